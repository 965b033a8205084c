"""Which frames a training step sees: a function of the seed and the step's number, and of nothing else.

The frames are shuffled anew for each epoch, and the epochs lie end to end: a batch that reaches over the end of one
takes the rest from the next, so that all batches are full. Nothing is remembered from step to step, so that resuming
at step s, or another number of workers, changes nothing. What is not here: the frames themselves.

Three frames, batches of two, the shuffled epochs [2 0 1] and [1 2 0]: the batches are [2 0], [1 1], [2 0].

Of several datasets, a fixed order of turns says which one each draw is from, and each goes through its own epochs.
With shares of 1/2, 1/3 and 1/6 the turns are 0 1 0 1 0 2, again and again: after any number of draws each dataset was
drawn its share of times, but for less than one draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, partial
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import kernel
from pi0_fast.types import PolicyError

Indices = npt.NDArray[np.int64]

#: The turns of a mixture repeat after at most this many; shares that need more are rounded, by some 1e-6.
MOST_TURNS = 1 << 20


class BatchSampler:
    """Batches of indices, by the number of the step.

    Attributes:
        count: number of frames to choose from.
        batch_size: frames a batch; may be larger than `count`.
        seed: any integer that is not negative.
        first_step: of the run; `batch` gives earlier ones too.
    """

    def __init__(self, count: int, batch_size: int, seed: int, first_step: int = 0) -> None:
        """Raises PolicyError for a size below one, or a seed or step below zero."""
        _check(count, batch_size, seed, first_step)
        self.count, self.batch_size, self.seed, self.first_step = count, batch_size, seed, first_step

    def batch(self, step: int) -> tuple[Indices, Indices]:
        """The batch of a step.

        Args:
            step: 0, 1, ...

        Returns:
            Indices int64 [batch_size] below `count`, and the epoch of each, int64 [batch_size].
        """
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        return _in_epochs(places, self.count, self.seed)


class MixtureSampler(BatchSampler):
    """Batches of indices over several datasets that lie one behind the other.

    Attributes:
        counts: frames of each dataset; `count` is their sum.
        parts: integers in proportion to the datasets' shares of the draws, without a common divisor.
    """

    def __init__(
        self, counts: Sequence[int], weights: Sequence[Any], batch_size: int, seed: int, first_step: int = 0
    ) -> None:
        """Raises PolicyError for a size below one, a seed or step below zero, weights that are not above zero.

        Args:
            counts: frames of each dataset.
            weights: of each dataset, above zero, in any unit. A float means the decimal fraction that it is printed as.
            batch_size, seed, first_step: as in `BatchSampler`.
        """
        for count in counts:
            _check(count, batch_size, seed, first_step)
        super().__init__(sum(counts), batch_size, seed, first_step)
        self.counts = tuple(counts)
        if len(weights) != len(self.counts):
            raise PolicyError(f"there are {len(weights)} weights for {len(self.counts)} datasets")
        self.parts = whole_parts(weights)
        self._first = np.cumsum([0, *self.counts])
        self._turns, self._turn = _turns(self.parts)

    def shares(self) -> list[float]:
        """The part of all draws that is each dataset's; the sum is 1."""
        return [part / sum(self.parts) for part in self.parts]

    def batch(self, step: int) -> tuple[Indices, Indices]:
        """The batch of a step: indices int64 [batch_size] below `count`, and the epoch of each in its own dataset."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        rounds, within = np.divmod(places, len(self._turns))
        chosen = self._turns[within]
        indices, epochs = np.empty_like(places), np.empty_like(places)
        for number in np.unique(chosen).tolist():
            rows = chosen == number
            drawn = rounds[rows] * self.parts[number] + self._turn[within[rows]]
            own, epochs[rows] = _in_epochs(drawn, self.counts[number], self.seed, number)
            indices[rows] = own + self._first[number]
        return indices, epochs


def _check(count: int, batch_size: int, seed: int, first_step: int) -> None:
    for name, value, least in (
        ("number of frames", count, 1),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
        ("first step", first_step, 0),
    ):
        if value < least:
            raise PolicyError(f"{name} is {value}; it must be {least} or more")


def _in_epochs(places: Indices, count: int, seed: int, number: int = 0) -> tuple[Indices, Indices]:
    """Frames and epochs of the draws with these numbers, of epochs end to end."""
    epochs, within = np.divmod(places, count)
    indices = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        indices[chosen] = shuffled(count, seed, epoch, number)[within[chosen]]
    return indices, epochs


def shuffled(count: int, seed: int, epoch: int, number: int = 0) -> Indices:
    """The numbers below `count` in the order of an epoch of dataset `number`, int64 [count]; not to be written to.

    Sorted by the raw bits of a generator: these are the same in every version of numpy, whose `permutation` may change.
    The last two epochs of each dataset are kept.
    """
    order: Indices = _recent(count, seed, number)(epoch)
    return order


@lru_cache(maxsize=64)
def _recent(count: int, seed: int, number: int) -> Any:
    return lru_cache(maxsize=2)(partial(_order, count, seed, number))


def _order(count: int, seed: int, number: int, epoch: int) -> Indices:
    # The first dataset, alone or not, has the order that it always had.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, *([number] if number else [])])).random_raw(count)
    order = np.argsort(bits, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


# --- turns ----------------------------------------------------------------------------------------------------


def whole_parts(weights: Sequence[Any]) -> tuple[int, ...]:
    """Integers in proportion to the weights, without a common divisor, with a sum of at most `MOST_TURNS`.

    0.7, 0.2, 0.1 are 7, 2, 1. Where a larger sum would be needed, they are rounded to a sum of `MOST_TURNS`, none to 0.

    Raises:
        PolicyError: no weights, one that is no finite number above zero, or more than `MOST_TURNS`.
    """
    exact = []
    for weight in weights:
        try:
            exact.append(Fraction(repr(weight) if isinstance(weight, float) else weight))
        except (ValueError, TypeError, OverflowError):
            exact.append(Fraction(0))
        if exact[-1] <= 0:
            raise PolicyError(f"a dataset's weight must be a finite number above 0, not {weight!r}")
    if not 0 < len(exact) <= MOST_TURNS:
        raise PolicyError(f"there are {len(exact)} weights")
    common = lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * common) for weight in exact]
    if sum(parts) // gcd(*parts) > MOST_TURNS:
        parts = _rounded([Fraction(part, sum(parts)) for part in parts])
    divisor = gcd(*parts)
    return tuple(part // divisor for part in parts)


def _rounded(shares: list[Fraction]) -> list[int]:
    """Whole numbers above zero whose sum is `MOST_TURNS`; the largest gives or takes what rounding leaves."""
    parts = [max(1, round(share * MOST_TURNS)) for share in shares]
    largest = max(range(len(parts)), key=parts.__getitem__)
    parts[largest] += MOST_TURNS - sum(parts)
    return parts


def _turns(parts: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Which dataset has each turn of a period of sum(parts), and how many turns it had before in the period.

    The turn number j (from 0) of a dataset with the share w may not come before j / w turns have begun, nor after
    (j + 1) / w: whoever must come first comes first. This finds an order that keeps all of these bounds, because one
    exists where the shares add up to 1 (Liu and Layland 1973; Baruah et al. 1996, "Proportionate progress"), and the
    bounds say that no dataset is ever a whole draw away from its share.
    """
    sizes = np.array(parts, np.int64)
    turns = np.empty(int(sizes.sum()), np.int32)
    turn = np.empty_like(turns)
    _earliest_deadline_first(sizes, turns, turn)
    return turns, turn


@kernel
def _earliest_deadline_first(sizes, turns, turn):  # type: ignore[no-untyped-def]
    period = len(turns)
    drawn = np.zeros(len(sizes), np.int64)
    for now in range(period):
        best, deadline = -1, 0
        for number in range(len(sizes)):
            if drawn[number] * period >= (now + 1) * sizes[number]:
                continue  # its turn has not begun
            end = ((drawn[number] + 1) * period + sizes[number] - 1) // sizes[number]
            if best < 0 or end < deadline:
                best, deadline = number, end
        turns[now], turn[now] = best, drawn[best]
        drawn[best] += 1
