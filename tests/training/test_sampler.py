"""Which frames a step sees."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast.training.sampler import MOST_TURNS, BatchSampler, MixtureSampler, shuffled, whole_parts
from pi0_fast.types import PolicyError


@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 2**40),
    first=st.integers(0, 30),
)
def test_epochs_lie_end_to_end(count: int, batch_size: int, seed: int, first: int) -> None:
    """Beside a list of all epochs, cut into batches."""
    steps = 6
    epochs = (first + steps) * batch_size // count + 1
    line = [index for epoch in range(epochs) for index in shuffled(count, seed, epoch).tolist()]
    sampler = BatchSampler(count, batch_size, seed)
    found = [sampler.batch(step)[0].tolist() for step in range(first, first + steps)]
    assert found == [line[s * batch_size : (s + 1) * batch_size] for s in range(first, first + steps)]
    for step in (first + 3, first, first + 5):  # in any order, for nothing is remembered
        indices, of = sampler.batch(step)
        assert indices.tolist() == found[step - first]
        assert of.tolist() == [place // count for place in range(step * batch_size, (step + 1) * batch_size)]


def test_an_epoch_has_each_frame_once_and_another_order_than_the_next() -> None:
    orders = [shuffled(100, 7, epoch).tolist() for epoch in range(3)] + [shuffled(100, 8, 0).tolist()]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_stays_what_it_is() -> None:
    """A run that was saved goes on in the order it began with, under another version too."""
    assert shuffled(10, 1000, 0).tolist() == FROZEN
    with pytest.raises(ValueError, match="read-only"):
        shuffled(10, 1000, 0)[0] = 1


FROZEN = [5, 3, 6, 2, 0, 4, 8, 1, 7, 9]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 1, 0), "number of frames"), ((1, 0, 0), "batch_size"), ((1, 1, -1), "seed"), ((1, 1, 0, -1), "first step")],
)
def test_impossible_numbers(arguments: tuple[int, ...], name: str) -> None:
    with pytest.raises(PolicyError, match=name):
        BatchSampler(*arguments)


# --- several datasets -----------------------------------------------------------------------------


def drawn(sampler: MixtureSampler, step: int) -> list[int]:
    """The dataset of each row of a batch."""
    return np.searchsorted(np.cumsum(sampler.counts), sampler.batch(step)[0], side="right").tolist()


def test_turns_of_a_mixture_by_hand() -> None:
    sampler = MixtureSampler([4, 2, 9], [3, 2, 1], batch_size=6, seed=5)
    assert drawn(sampler, 0) == drawn(sampler, 7) == [0, 1, 0, 1, 0, 2]
    assert drawn(MixtureSampler([4, 2], [1.5, 0.5], 8, 5), 0) == [0, 0, 0, 1, 0, 0, 0, 1]
    found = np.concatenate([sampler.batch(step)[0] for step in range(4)]).tolist()
    first = [index for index in found if index < 4]
    assert first == [index for epoch in range(3) for index in shuffled(4, 5, epoch).tolist()]
    second = [index - 4 for index in found if 4 <= index < 6]
    assert second == [index for epoch in range(4) for index in shuffled(2, 5, epoch, 1).tolist()]
    assert [index - 6 for index in found if index >= 6] == shuffled(9, 5, 0, 2)[:4].tolist()


weights = st.lists(st.one_of(st.integers(1, 60), st.sampled_from([0.1, 0.25, 0.7, 12.5])), min_size=1, max_size=6)


@settings(max_examples=30)
@given(weights=weights, batch_size=st.integers(1, 17), start=st.integers(0, 10**9))
def test_each_dataset_is_within_one_draw_of_its_share(weights: list[float], batch_size: int, start: int) -> None:
    """At each of some thousand draws from anywhere on: counted beside the share as a fraction, which is exact."""
    sampler = MixtureSampler([5] * len(weights), weights, batch_size, 0)
    period = sum(sampler.parts)
    # Whole periods have exactly the parts, so that counting may begin at the start of one.
    begin = start * batch_size // period * period
    first = -(-begin // batch_size)
    steps = range(first, first + 100)
    numbers = np.concatenate([drawn(sampler, step) for step in steps])
    before = sampler._turns[np.arange(begin, first * batch_size) % period]
    numbers = np.concatenate([before, numbers])
    for number, part in enumerate(sampler.parts):
        counts = np.cumsum(numbers == number)
        # |count - draws * part / period| < 1, in whole numbers
        assert int(np.abs(counts * period - np.arange(1, len(numbers) + 1) * part).max()) < period


def test_the_hard_shares_of_many_datasets() -> None:
    """A whole period of shares that greedy orders fail on, and of the most turns there are."""
    for weights in ([1] * 9, [1, 1, 1, 1, 1, 1, 100], [1_000_003, 999_983, 77_777, 1], [7, 7, 6, 6, 5, 5, 3]):
        sampler = MixtureSampler([3] * len(weights), weights, 1, 0)
        period = sum(sampler.parts)
        assert period <= MOST_TURNS
        for number, part in enumerate(sampler.parts):
            counts = np.cumsum(sampler._turns == number)
            assert int(np.abs(counts * period - np.arange(1, period + 1) * part).max()) < period
            assert counts[-1] == part


def test_a_mixture_remembers_nothing() -> None:
    sampler = MixtureSampler([11, 30, 2], [0.5, 0.3, 0.2], 7, 3)
    whole = [sampler.batch(step)[0].tolist() for step in range(4, 24)]
    for step in (19, 2, 11):
        assert MixtureSampler([11, 30, 2], [5, 3, 2], 7, 3).batch(step + 4)[0].tolist() == whole[step]
    # Another size of batch, as with another number of processes: the same draws.
    line = [index for batch in whole[:14] for index in batch]
    assert [index for step in (2, 3, 4) for index in MixtureSampler([11, 30, 2], [5, 3, 2], 14, 3).batch(step)[0]] == (
        line[: 3 * 14]
    )


def test_one_dataset_as_a_mixture_is_that_dataset() -> None:
    for step in (0, 5, 100):
        for one, other in zip(BatchSampler(13, 5, 9).batch(step), MixtureSampler([13], [0.3], 5, 9).batch(step)):  # noqa: B905
            np.testing.assert_array_equal(one, other)


def test_weights_are_whole_parts() -> None:
    assert whole_parts([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_parts([46, 23]) == (2, 1)
    assert whole_parts([1]) == (1,)
    exact = [10_000_019, 20_000_003, 1]
    parts = whole_parts(exact)
    assert sum(parts) == MOST_TURNS
    assert parts[2] == 1  # not forgotten
    for part, weight in zip(parts, exact, strict=True):
        assert abs(Fraction(part, MOST_TURNS) - Fraction(weight, sum(exact))) < 2e-6
    for wrong in (0, -1.0, float("nan"), float("inf"), "x"):
        with pytest.raises(PolicyError, match="weight must be a finite number above 0"):
            whole_parts([1.0, wrong])
    with pytest.raises(PolicyError, match="2 weights for 1 datasets"):
        MixtureSampler([3], [1, 1], 1, 0)
    with pytest.raises(PolicyError, match="number of frames is 0"):
        MixtureSampler([3, 0], [1, 1], 1, 0)
