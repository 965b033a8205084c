"""Processes that run whole episodes in simulators: each keeps the simulator that it used last.

Jobs are functions of a module, called with `simulator_of` at hand. Workers end when their parent does, however that
ends. Left out: many episodes under one policy, whose steps are batched (sims/pool.py).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from pi0_fast.sims import Simulator, make
from pi0_fast.types import SimulatorError

Result = TypeVar("Result")

_KEPT: dict[str, Simulator] = {}  # at most one; its key is its arguments


def simulator_of(arguments: Mapping[str, Any]) -> Simulator:
    """The simulator of `sims.make(**arguments)`; the one that this process used last is kept.

    Raises:
        SimulatorError: as `sims.make`.
    """
    name = repr(sorted(arguments.items()))
    if name not in _KEPT:
        close_simulator()
        _KEPT[name] = make(**arguments)
    return _KEPT[name]


def close_simulator() -> None:
    """Close the simulator that this process keeps, if any."""
    while _KEPT:
        _KEPT.popitem()[1].close()


@contextmanager
def episode_workers(processes: int) -> Iterator[Executor]:
    """An executor of so many processes; with 0 it runs everything in this one, at once.

    When the block is left by an exception, the processes end without finishing their episodes.
    """
    if processes == 0:
        try:
            yield _Here()
        finally:
            close_simulator()
        return
    # Not fork: simulators, their renderers and torch have threads, which a forked process lacks.
    context = multiprocessing.get_context("spawn")
    alive, parent = context.Pipe(duplex=False)
    workers = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(alive,))
    try:
        yield workers
    except BaseException:
        parent.close()
        raise
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
        parent.close()
        alive.close()


def result_of(future: Future[Result], what: str) -> Result:
    """The result of a job; its own exceptions come through.

    Raises:
        SimulatorError: the process that ran it, or another one, died.
    """
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise SimulatorError(
            f"a process that ran episodes died (killed, out of memory, or a crash of the simulator) during {what} or "
            "another one at the same time; --num_workers=0 shows what it says"
        ) from error


class _Here(Executor):
    """Runs a job when it is submitted."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _prepare(alive: Connection) -> None:
    """In a worker: the parent alone hears Ctrl-C, and when it is gone, or gives up, so is the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    try:
        alive.recv()  # nothing is ever sent: this is until the other end is closed
    except (EOFError, OSError):
        os._exit(1)
