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
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

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


class ProcessDied(SimulatorError):
    """A job took its process with it, and once more when it was alone."""


class Task(Generic[Result]):
    """A job that was handed over; `result` waits for it."""

    def __init__(self, workers: Workers, work: Callable[[], Result]) -> None:
        self._workers, self._work = workers, work
        self._executor, self._future = workers.start(work)

    def result(self, what: str) -> Result:
        """The result of the job; its own exceptions come through.

        When a process dies all jobs under way are lost, and nobody knows whose fault it was: each is done again, alone.

        Raises:
            ProcessDied: its process died, and then that in which it was alone; `what` says which job it was.
        """
        try:
            return self._future.result()
        except BrokenProcessPool:
            self._workers.renew(self._executor)
        try:
            with _executor(1) as alone:
                return alone.submit(self._work).result()
        except BrokenProcessPool as error:
            raise ProcessDied(
                f"the process that ran {what} died twice (killed, out of memory, or a crash of the simulator; "
                "--num_workers=0 shows what it says)"
            ) from error


class Workers:
    """Processes that run jobs; renewed when one of them dies."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._stack = ExitStack()
        self._executor = self._stack.enter_context(_executor(processes))

    def submit(self, function: Callable[..., Result], /, *arguments: Any) -> Task[Result]:
        """Hand a job over: a function of a module, and what it is called with."""
        return Task(self, partial(function, *arguments))

    def start(self, work: Callable[[], Result]) -> tuple[Executor, Future[Result]]:
        """Hand it to the processes that there are, which are told, too."""
        try:
            return self._executor, self._executor.submit(work)
        except BrokenProcessPool:
            self.renew(self._executor)
            return self._executor, self._executor.submit(work)

    def renew(self, broken: Executor) -> None:
        """New processes in place of those of which one has died; nothing where that was done already."""
        if self._executor is broken:
            self._stack.close()
            self._executor = self._stack.enter_context(_executor(self._processes))

    def leave(self, kind: Any, error: Any, trace: Any) -> None:
        """End the processes, without finishing their jobs where there is an exception."""
        self._stack.__exit__(kind, error, trace)


@contextmanager
def episode_workers(processes: int) -> Iterator[Workers]:
    """So many processes; with 0 everything runs in this one, at once.

    When the block is left by an exception, the processes end without finishing their episodes.
    """
    workers = Workers(processes)
    try:
        yield workers
    except BaseException as error:
        workers.leave(type(error), error, error.__traceback__)
        raise
    workers.leave(None, None, None)


@contextmanager
def _executor(processes: int) -> Iterator[Executor]:
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
