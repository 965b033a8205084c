"""Intervals of shares and of paired differences: hand-worked, published, and their coverage by enumeration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast.reports.intervals import Paired, paired_difference, wilson


def test_wilson_by_hand() -> None:
    # 8 of 10: z2/n = 0.384146; middle (0.8 + 0.192073) / 1.384146 = 0.716740;
    # half 1.959964 / 1.384146 * sqrt(0.016 + 0.0096036) = 1.416010 * 0.160012 = 0.226578
    assert wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=2e-6)


def test_wilson_of_all_and_of_none() -> None:
    # For n of n the low end is n / (n + z2): 40 / 43.841459.
    assert wilson(40, 40) == (pytest.approx(40 / 43.841459), 1.0)
    assert wilson(0, 40) == (0.0, pytest.approx(3.841459 / 43.841459))
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_refuses_impossible_counts() -> None:
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson(5, 4)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_the_score_equation(counts: tuple[int, int]) -> None:
    """Its ends are the shares from which the measured one is 1.96 standard errors away: |s - p| = z sqrt(p(1-p)/n)."""
    successes, count = counts
    low, high = wilson(successes, count)
    assert 0 <= low <= successes / count <= high <= 1
    for end, at_end in ((low, successes == 0), (high, successes == count)):
        if not at_end:
            error = math.sqrt(end * (1 - end) / count)
            assert abs(successes / count - end) == pytest.approx(1.959963984540054 * error, rel=1e-6)


def test_paired_difference_as_published() -> None:
    """Airway hyper-responsiveness before and after (Bentur 2009), in Fagerland, Lydersen and Laake (2014)."""
    low, high = paired_difference(Paired(both=1, only_first=7, only_second=1, neither=12))
    assert (round(low, 3), round(high, 3)) == (-0.507, -0.026)


def test_paired_difference_by_hand_with_correlation() -> None:
    # 20 episodes: both 10, first 1, second 3, neither 6. Shares 0.55 and 0.65; product 60 - 3 = 57, corrected 47;
    # margins 11*9*13*7 = 9009, correlation 47 / 94.916 = 0.495176.
    # Wilson: 0.55 is 0.207915 above its low end and 0.191802 below its high one, 0.65 is 0.217146 and 0.168808.
    # low = 0.1 - sqrt(0.217146^2 - 2*0.495176*0.217146*0.191802 + 0.191802^2) = 0.1 - sqrt(0.042692) = 0.1 - 0.206623
    # high = 0.1 + sqrt(0.168808^2 - 2*0.495176*0.168808*0.207915 + 0.207915^2) = 0.1 + sqrt(0.036966) = 0.1 + 0.192267
    low, high = paired_difference(Paired(10, 1, 3, 6))
    assert (low, high) == pytest.approx((-0.106623, 0.292267), abs=5e-6)


def test_paired_difference_of_equal_policies_holds_zero() -> None:
    for pairs in (Paired(20, 0, 0, 0), Paired(0, 0, 0, 20), Paired(12, 3, 3, 2)):
        low, high = paired_difference(pairs)
        assert low < 0 < high
    assert paired_difference(Paired(0, 0, 0, 0)) == (-1.0, 1.0)


def test_no_success_against_all() -> None:
    low, high = paired_difference(Paired(0, 0, 30, 0))
    assert 0.8 < low < 1.0
    assert high == pytest.approx(1.0)


@given(*[st.integers(0, 30)] * 4)
def test_paired_difference_is_symmetric_and_bounded(both: int, first: int, second: int, neither: int) -> None:
    low, high = paired_difference(Paired(both, first, second, neither))
    other_low, other_high = paired_difference(Paired(both, second, first, neither))
    assert (low, high) == pytest.approx((-other_high, -other_low))
    assert -1 - 1e-12 <= low <= high <= 1 + 1e-12


@pytest.mark.parametrize("shares", [(0.6, 0.1, 0.2, 0.1), (0.3, 0.05, 0.3, 0.35), (0.85, 0.05, 0.05, 0.05)])
def test_paired_difference_covers_the_truth(shares: tuple[float, float, float, float]) -> None:
    """Over every outcome of 20 episodes, weighted with its probability, the interval holds the true difference."""
    count, truth, covered = 20, shares[2] - shares[1], 0.0
    for both in range(count + 1):
        for first in range(count + 1 - both):
            for second in range(count + 1 - both - first):
                cells = (both, first, second, count - both - first - second)
                low, high = paired_difference(Paired(*cells))
                if low <= truth <= high:
                    ways = math.factorial(count) / math.prod(math.factorial(cell) for cell in cells)
                    covered += ways * math.prod(p**cell for p, cell in zip(shares, cells, strict=True))
    assert 0.94 < covered <= 1 - 1e-4
