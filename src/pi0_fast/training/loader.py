"""From samples to prepared batches, in worker processes or in this one: the same batches in the same order.

A worker is told the number of a step and does everything for it: which frames (`sampler.py`), decoding, prompt,
action tokens, images as the model takes them. So the order and the content of the batches depend on the seed and the
step only, never on the number of workers. What is not here: moving batches to an accelerator.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset

from pi0_fast._kernels import available_threads
from pi0_fast.preparation import Preparation, Prepared
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.mixture import MixedFrames, MixedPreparation
from pi0_fast.training.sampler import BatchSampler
from pi0_fast.types import DatasetError, Pi0FastError, PolicyError

logger = logging.getLogger(__name__)


def train_batches(
    dataset: FrameDataset | MixedFrames,
    preparation: Preparation | MixedPreparation,
    sampler: BatchSampler,
    num_workers: int = 0,
    *,
    prefetch: int = 2,
    stop_step: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> TrainBatches:
    """Batches from the sampler's first step on, as `Preparation.training` makes them, on the CPU.

    Args:
        dataset: the samples; `sampler.count` of them.
        preparation: the policy's; mixed ones for mixed frames.
        sampler: which samples a step sees, and where to begin.
        num_workers: processes that prepare; 0 for none, and then a batch is made when it is asked for.
        prefetch: batches that each worker has ready.
        stop_step: one past the last step; None for no end.
        share: (i, n): of each of the sampler's batches only part i of n equal parts, one after the other.

    Raises:
        PolicyError: the sampler chooses from another number of samples, a number is out of range, or a batch has no n
            equal parts.
    """
    if sampler.count != len(dataset):
        raise PolicyError(f"the sampler chooses from {sampler.count} samples, the dataset has {len(dataset)}")
    if num_workers < 0 or prefetch < 1:
        raise PolicyError(f"num_workers={num_workers} and prefetch={prefetch}: needed are 0 or more, and 1 or more")
    part, parts = share
    if not 0 <= part < parts or sampler.batch_size % parts:
        raise PolicyError(f"share={share}: of a batch of {sampler.batch_size} there is no such equal part")
    steps = _Steps(dataset, preparation, sampler, share)
    return TrainBatches(steps, sampler.first_step, stop_step, num_workers, prefetch)


class TrainBatches(Iterator[Prepared]):
    """Prepared batches, step by step. `close` ends the workers; a `with` block does so by itself.

    Attributes:
        step: of the batch that comes next.
        waited_s: seconds spent in `next`, all steps together: what training waited for data.
    """

    def __init__(self, steps: _Steps, first: int, stop: int | None, num_workers: int, prefetch: int) -> None:
        self._batches: Iterator[Prepared | _Failure] | None = None
        self.step, self.waited_s = first, 0.0
        if num_workers > (processors := available_threads()):
            logger.warning("num_workers=%d is more than the %d processors here", num_workers, processors)
        with warnings.catch_warnings(), _quiet_tokenizers():
            # Said above, in one line, and no reason to stop where warnings are errors.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: DataLoader[Any] = DataLoader(
                steps,
                batch_size=None,  # a sample is a whole batch already
                sampler=_Range(first, _ENDLESS if stop is None else stop),
                num_workers=num_workers,
                prefetch_factor=prefetch if num_workers else None,
                worker_init_fn=_begin_worker if num_workers else None,
            )
            self._batches = iter(loader)
        # torch's own end of a process sends SIGTERM to workers that are left, which these ignore.
        atexit.register(_close, weakref.ref(self))

    def __enter__(self) -> TrainBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Prepared:
        if self._batches is None:
            raise StopIteration
        begin = time.perf_counter()
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DatasetError(
                f"a worker that prepares batches has died at step {self.step} ({error}); where memory or /dev/shm is "
                "short, pass a smaller --num_workers"
            ) from error
        finally:
            self.waited_s += time.perf_counter() - begin
        if isinstance(batch, _Failure):
            self.close()
            batch.raise_again()
        self.step += 1
        return batch

    def close(self) -> None:
        """End the workers; there are no more batches then."""
        batches, self._batches = self._batches, None
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is None:
            return
        workers = list(batches._workers)  # type: ignore[union-attr]
        shut_down()
        for worker in workers:
            if worker.is_alive():  # seconds after it was told to end
                worker.kill()

    def __del__(self) -> None:
        self.close()


def _close(batches: weakref.ref[TrainBatches]) -> None:
    if (alive := batches()) is not None:
        alive.close()


_ENDLESS = 2**62


class _Range:
    """Steps from `first` on; unlike a list, of any length, and unlike a generator, with a length."""

    def __init__(self, first: int, stop: int) -> None:
        self._steps = range(first, max(first, stop))

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


class _Steps(Dataset[Any]):
    """Step number -> prepared batch, or what went wrong."""

    def __init__(
        self,
        dataset: FrameDataset | MixedFrames,
        preparation: Preparation | MixedPreparation,
        sampler: BatchSampler,
        share: tuple[int, int],
    ) -> None:
        self._dataset, self._preparation, self._sampler = dataset, preparation, sampler
        part, parts = share
        size = sampler.batch_size // parts
        self._rows = slice(part * size, (part + 1) * size)

    def __getitem__(self, step: int) -> Prepared | _Failure:
        try:
            indices, epochs = self._sampler.batch(step)
            batch: Any = self._dataset.batch(indices[self._rows], epochs[self._rows])
            with _one_thread():
                return self._preparation.training(batch)
        except Exception as error:
            return _Failure(error, traceback.format_exc(), os.getpid())


@dataclass(frozen=True)
class _Failure:
    """An error on its way out of a worker, which torch would wrap into another message."""

    error: Exception
    trace: str
    process: int

    def raise_again(self) -> NoReturn:
        if self.process == os.getpid():
            raise self.error
        if not isinstance(self.error, Pi0FastError):
            raise RuntimeError(f"a worker that prepares batches failed:\n{self.trace}") from self.error
        raise self.error from RuntimeError(f"in a worker:\n{self.trace}")


def _begin_worker(_: int) -> None:
    # A terminal's interrupt and a scheduler's SIGTERM reach all processes: the loop still needs its workers to come to
    # a checkpoint, and then ends them. A worker whose loop is gone ends by itself (torch looks every few seconds).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a worker: resizing with more threads differs in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Workers tokenize on one thread each; without being told, the library says so at each fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
