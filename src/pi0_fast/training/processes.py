"""The processes of one run: who this is, what they tell each other, and the end of all when one is gone.

Gradients go through torch's own engines, DistributedDataParallel (Li et al. 2020) and FSDP2 (`fully_shard`), see
sharding.py. What is told here beside are small things, on the CPU: sums of counts before each step, who was asked to
stop, and that a checkpoint is written. With one process nothing is told and nothing awaited. Left out: reading the
environment (launch.py), and noticing the dead (watch.py).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from pi0_fast.display import silence
from pi0_fast.training.launch import Launch
from pi0_fast.training.watch import Watch
from pi0_fast.types import Pi0FastError, PolicyError

Value = TypeVar("Value")

#: How long an operation of all processes may take: as long as the largest checkpoint, not as long as noticing a death.
_PATIENCE = timedelta(hours=2)
#: So many times as long as for a sign of life the processes wait for each other at the start.
_ARRIVALS = 5


class ProcessError(PolicyError):
    """Another process of the run has failed, died, or cannot be reached."""


class Processes:
    """The processes of a run, as one of them sees them.

    Attributes:
        launch: how this one was started.
        rank, count: which of how many this one is.
    """

    def __init__(self, launch: Launch | None = None, watch: Watch | None = None) -> None:
        """One that is alone needs no arguments; others are made by `begun`."""
        self.launch = Launch() if launch is None else launch
        self.rank, self.count = self.launch.rank, self.launch.count
        self._watch = watch
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if self.count > 1 else None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All processes, for operations on the CPU; None with one process."""
        return self._group

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, in each of them; waits for all."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with self.reaching():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: Value) -> Value:
        """The first process' value, in each of them."""
        if self.count == 1:
            return value
        values = [value]
        with self.reaching():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """Sums over the processes, number by number."""
        if self.count == 1:
            return list(numbers)
        total = torch.tensor(list(numbers), dtype=torch.int64)
        with self.reaching():
            dist.all_reduce(total, group=self._group)
        return [int(number) for number in total.tolist()]

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor on the training device over the processes, in place; on a GPU nothing waits for it."""
        if self.count > 1:
            with self.reaching():
                dist.all_reduce(tensor)

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.count > 1:
            self.sums([0])

    def check_same(self, what: Mapping[str, Any]) -> None:
        """Refuse to train where processes have other data, settings or versions than the first.

        Raises:
            PolicyError: naming what differs, and where; in every process.
        """
        every = self.gather(dict(what))
        for rank, other in enumerate(every):
            for name in sorted({*every[0], *other}):
                first, own = every[0].get(name), other.get(name)
                if own != first:
                    raise PolicyError(
                        f"process {rank} has {name} {own!r}, process 0 has {first!r}: all processes need the same "
                        "flags, dataset, checkpoint, tokenizer and versions"
                    )

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Around an operation of all processes: what torch raises is said in plain words.

        Raises:
            ProcessError: the others cannot be reached.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or isinstance(error, Pi0FastError) or not _is_of_connections(error):
                raise
            why = None if self._watch is None else self._watch.why(3.0)
            why = why or "another process has died, or cannot be reached"
            raise ProcessError(f"{why} ({str(error).splitlines()[0][:200]})") from error


def _is_of_connections(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "onnection", "imed out"))


@contextmanager
def begun(launch: Launch, *, device: str | None, timeout_s: float) -> Iterator[Processes]:
    """Find the other processes, be one of them within the block, and part in good order.

    Where the block fails, the others are told, and end.

    Args:
        launch: how this process was started.
        device: type of the training device, or None for a GPU where there is one.
        timeout_s: when a process without a sign of life counts as gone.

    Raises:
        ProcessError: the others do not come, or are gone.
        PolicyError: this machine has no GPU of this process' local rank.
    """
    if launch.count == 1:
        yield Processes(launch)
        return
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu:
        _take_gpu(launch)
    watch = _meet(launch, gpu, timeout_s)
    try:
        processes = Processes(launch, watch)
        processes.wait()  # each has given its first sign of life
        watch.start()
        with _quiet(not processes.first):
            yield processes
        watch.stop()
        processes.wait()
    except ProcessError:
        watch.stop()
        raise
    except BaseException as error:
        watch.fail(str(error) or type(error).__name__)
        raise
    dist.destroy_process_group()


def _take_gpu(launch: Launch) -> None:
    """From now on "cuda" means this process' GPU."""
    there = torch.cuda.device_count()
    if launch.local_rank >= there:
        raise PolicyError(
            f"process {launch.rank} has local rank {launch.local_rank}, but this machine has {there} GPUs: start as "
            "many processes as there are (--nproc-per-node, --num_processes), or pass --policy.device=cpu"
        )
    torch.cuda.set_device(launch.local_rank)


def _meet(launch: Launch, gpu: bool, timeout_s: float) -> Watch:
    """Begin torch's default group, and a store of the watch's own."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ProcessError(f"{name} is not set: start with torchrun or accelerate launch, which set it")
    try:
        arrival = timedelta(seconds=_ARRIVALS * timeout_s)
        store, _, _ = next(rendezvous("env://", launch.rank, launch.count, timeout=arrival))
        store.set_timeout(arrival)
        # Gloo for what is on the CPU, NCCL for what is on the GPUs.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=PrefixStore("pi0_fast", store),
            rank=launch.rank,
            world_size=launch.count,
            timeout=_PATIENCE,
        )
        own = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            f"process {launch.rank} of {launch.count} cannot find the others at {place}: {str(error).splitlines()[0]}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Watch(PrefixStore(f"pi0_fast_watch/{attempt}", own), launch.rank, launch.count, timeout_s)


@contextmanager
def _quiet(others: bool) -> Iterator[None]:
    """Only one process says what all do; errors are everybody's own."""
    if not others:
        yield
        return
    logger = logging.getLogger("pi0_fast")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
