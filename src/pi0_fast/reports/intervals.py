"""How far a measured share of successes can be trusted: intervals for one policy, and for the difference of two.

Both are score intervals, which stay inside [0, 1] and [-1, 1] and are right for few episodes and for shares of 0 and 1,
where the usual "plus or minus 1.96 standard errors" is not. Left out: other confidences than 95 %, and what is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The standard normal's 97.5 % quantile: intervals hold the true value 95 times of 100.
Z_95 = 1.959963984540054


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927): lowest and highest; (0, 1) where nothing was counted.

    Of 40 successes in 40 episodes it says 0.912 to 1, of 0 in 40 it says 0 to 0.088.
    """
    if not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count}")
    if count == 0:
        return 0.0, 1.0
    share, z2 = successes / count, Z_95**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = Z_95 / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    # At the ends the formula gives 0 and 1, but for rounding.
    return (0.0 if successes == 0 else middle - half), (1.0 if successes == count else middle + half)


@dataclass(frozen=True)
class Paired:
    """How often two policies succeeded at the same episodes.

    Attributes:
        both, only_first, only_second, neither: numbers of episodes.
    """

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def count(self) -> int:
        """Episodes in all."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Success of the second less that of the first, as shares; 0 without episodes."""
        return (self.only_second - self.only_first) / max(self.count, 1)

    def __add__(self, other: Paired) -> Paired:
        return Paired(
            self.both + other.both,
            self.only_first + other.only_first,
            self.only_second + other.only_second,
            self.neither + other.neither,
        )


def paired_difference(pairs: Paired) -> tuple[float, float]:
    """The 95 % interval of `Paired.difference` (Newcombe 1998, Statistics in Medicine 17:2635, method 10).

    Wilson's intervals of the two shares, squared and added, less what they have in common because the episodes are the
    same. (-1, 1) without episodes.
    """
    if pairs.count == 0:
        return -1.0, 1.0
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    low_1, high_1 = wilson(first, pairs.count)
    low_2, high_2 = wilson(second, pairs.count)
    share_1, share_2 = first / pairs.count, second / pairs.count
    together = _correlation(pairs, first, second)

    def reach(of_second: float, of_first: float) -> float:
        return math.sqrt(max(of_second**2 - 2 * together * of_second * of_first + of_first**2, 0.0))

    low = pairs.difference - reach(share_2 - low_2, high_1 - share_1)
    high = pairs.difference + reach(high_2 - share_2, share_1 - low_1)
    return low, high


def _correlation(pairs: Paired, first: int, second: int) -> float:
    """Of the two policies' successes; one above 0 is made smaller by Newcombe's correction for continuity."""
    count = pairs.count
    margins = first * (count - first) * second * (count - second)
    if margins == 0:
        return 0.0
    product = pairs.both * pairs.neither - pairs.only_first * pairs.only_second
    corrected = max(product - count / 2, 0.0) if product > 0 else float(product)
    return corrected / math.sqrt(margins)
