"""Which frames a step sees."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast.training.sampler import BatchSampler, shuffled
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
    found = [batch.tolist() for batch in islice(BatchSampler(count, batch_size, seed, first), steps)]
    assert found == [line[s * batch_size : (s + 1) * batch_size] for s in range(first, first + steps)]
    sampler = BatchSampler(count, batch_size, seed)
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
