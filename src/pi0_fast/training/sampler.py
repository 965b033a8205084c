"""Which frames a training step sees: a function of the seed and the step's number, and of nothing else.

The frames are shuffled anew for each epoch, and the epochs lie end to end: a batch that reaches over the end of one
takes the rest from the next, so that all batches are full. Nothing is remembered from step to step, so that resuming
at step s, or another number of workers, changes nothing. What is not here: the frames themselves.

Three frames, batches of two, the shuffled epochs [2 0 1] and [1 2 0]: the batches are [2 0], [1 1], [2 0].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pi0_fast.types import PolicyError

Indices = npt.NDArray[np.int64]


class BatchSampler:
    """Batches of indices without end; iterating begins at `first_step`, each time anew.

    Attributes:
        count: number of frames to choose from.
        batch_size: frames a batch; may be larger than `count`.
        seed: any integer that is not negative.
        first_step: where iterating begins.
    """

    def __init__(self, count: int, batch_size: int, seed: int, first_step: int = 0) -> None:
        """Raises PolicyError for a size below one, or a seed or step below zero."""
        for name, value, least in (
            ("number of frames", count, 1),
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("first step", first_step, 0),
        ):
            if value < least:
                raise PolicyError(f"{name} is {value}; it must be {least} or more")
        self.count, self.batch_size, self.seed, self.first_step = count, batch_size, seed, first_step

    def batch(self, step: int) -> tuple[Indices, Indices]:
        """The batch of a step.

        Args:
            step: 0, 1, ...

        Returns:
            Indices int64 [batch_size] below `count`, and the epoch of each, int64 [batch_size].
        """
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        epochs, within = np.divmod(places, self.count)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            indices[chosen] = shuffled(self.count, self.seed, epoch)[within[chosen]]
        return indices, epochs

    def __iter__(self) -> Iterator[Indices]:
        step = self.first_step
        while True:
            yield self.batch(step)[0]
            step += 1


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> Indices:
    """The numbers below `count` in the order of an epoch, int64 [count]; not to be written to.

    Sorted by the raw bits of a generator: these are the same in every version of numpy, whose `permutation` may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    order = np.argsort(bits, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
