"""Processes that run whole episodes in simulators: each keeps the simulator that it used last.

Jobs are functions of a module, called with `simulator_of` at hand. Workers end when their parent does, however that
ends, and when a simulator gives no answer for too long. Left out: many episodes under one policy, whose steps are
batched (sims/pool.py).
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

from pi0_fast.sims import Simulator, make
from pi0_fast.types import SimulatorError

Result = TypeVar("Result")

#: Building a simulator may take so many times what an answer of it may.
_BUILDING = 3
#: Seconds; some systems refuse to wait longer.
_LONGEST_WAIT = 1e6

_KEPT: dict[str, Simulator] = {}  # at most one; its key is its arguments
_WATCHES: list[_Watch] = []  # one in a worker with a limit, else none


def simulator_of(arguments: Mapping[str, Any]) -> Simulator:
    """The simulator of `sims.make(**arguments)`; the one that this process used last is kept.

    Raises:
        SimulatorError: as `sims.make`.
    """
    name = repr(sorted(arguments.items()))
    if name not in _KEPT:
        close_simulator()
        with _WATCHES[0].on(_BUILDING) if _WATCHES else nullcontext():
            _KEPT[name] = make(**arguments)
    return _KEPT[name]


def close_simulator() -> None:
    """Close the simulator that this process keeps, if any."""
    while _KEPT:
        with _WATCHES[0].on() if _WATCHES else nullcontext():
            _KEPT.popitem()[1].close()


@contextmanager
def answering(simulator: Simulator) -> Iterator[Simulator]:
    """Within the block the process ends where nothing is heard of the simulator for the limit of its workers, if any.

    Args:
        simulator: what it is asked for must be asked of the one that the block is given.
    """
    if not _WATCHES:
        yield simulator
        return
    with _WATCHES[0].on():
        yield cast(Simulator, _Answering(simulator, _WATCHES[0]))


class _Answering:
    """A simulator each of whose answers is a sign of life."""

    def __init__(self, simulator: Simulator, watch: _Watch) -> None:
        self._simulator, self._watch = simulator, watch

    def __getattr__(self, name: str) -> Any:
        self._watch.again()
        return getattr(self._simulator, name)


class _Watch:
    """In a worker: ends the process where its simulator does not answer, whatever it hangs in.

    The interpreter's own watchdog does so, which needs no lock that a hanging library holds. What it writes about that,
    into the job's file, tells the parent whose fault it was.
    """

    def __init__(self, folder: str, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._file: IO[str] | None = None
        self._begun = math.inf

    @contextmanager
    def job(self, number: int) -> Iterator[None]:
        """Within the block the job is done that has this number."""
        path = Path(self._folder, str(number))
        with path.open("w") as self._file:
            yield
        path.unlink()

    @contextmanager
    def on(self, times: float = 1) -> Iterator[None]:
        """Within the block the process ends after so many times the limit, counted from its beginning or `again`."""
        self._start(times)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._begun = math.inf

    def again(self) -> None:
        """Count from now; not where that was done just now, because it takes longer than some answers."""
        if time.monotonic() - self._begun > self._limit_s / 100:
            self._start(1)

    def _start(self, times: float) -> None:
        assert self._file is not None
        limit = min(self._limit_s * times, _LONGEST_WAIT)
        faulthandler.dump_traceback_later(limit, file=self._file, exit=True)
        self._begun = time.monotonic()


class ProcessDied(SimulatorError):
    """A job took its process with it, and once more when it was alone; or its simulator hung."""


class Task(Generic[Result]):
    """A job that was handed over; `result` waits for it."""

    def __init__(self, workers: Workers, number: int, work: Callable[[], Result]) -> None:
        self._workers, self._number, self._work = workers, number, partial(_done, number, work)
        self._executor, self._future = workers.start(self._work)

    def result(self, what: str) -> Result:
        """The result of the job; its own exceptions come through.

        When a process dies all jobs under way are lost. Where a simulator hung it is known in which one; else nobody
        knows whose fault it was: each is done again, alone.

        Raises:
            ProcessDied: its simulator hung; or its process died, and then that in which it was alone. `what` says which
                job it was.
        """
        try:
            return self._future.result()
        except BrokenProcessPool:
            self._workers.renew(self._executor)
            self._workers.refuse_hung(self._number, what)
        try:
            with self._workers.executor(1) as alone:
                return alone.submit(self._work).result()
        except BrokenProcessPool as error:
            self._workers.refuse_hung(self._number, what)
            raise ProcessDied(
                f"the process that ran {what} died twice (killed, out of memory, or a crash of the simulator; "
                "--num_workers=0 shows what it says)"
            ) from error


def _done(number: int, work: Callable[[], Result]) -> Result:
    """In a worker: do the job of that number."""
    with _WATCHES[0].job(number) if _WATCHES else nullcontext():
        return work()


class Workers:
    """Processes that run jobs; renewed when one of them dies."""

    def __init__(self, processes: int, timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s
        self._outer = ExitStack()
        self._hung = self._outer.enter_context(tempfile.TemporaryDirectory())  # see _Watch
        self._numbers = count()
        self._stack = self._outer.enter_context(ExitStack())
        self._executor = self._stack.enter_context(self.executor(processes))

    def executor(self, processes: int) -> AbstractContextManager[Executor]:
        """So many processes more."""
        return _executor(processes, self._hung, self._timeout_s)

    def submit(self, function: Callable[..., Result], /, *arguments: Any) -> Task[Result]:
        """Hand a job over: a function of a module, and what it is called with."""
        return Task(self, next(self._numbers), partial(function, *arguments))

    def refuse_hung(self, number: int, what: str) -> None:
        """Raise where the process of that job ended because the simulator hung."""
        path = Path(self._hung, str(number))
        if path.exists() and path.stat().st_size:
            raise ProcessDied(f"the simulator hung in {what}: no answer within --timeout_s={self._timeout_s:g}")

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
            self._executor = self._stack.enter_context(self.executor(self._processes))

    def leave(self, kind: Any, error: Any, trace: Any) -> None:
        """End the processes, without finishing their jobs where there is an exception."""
        self._outer.__exit__(kind, error, trace)


@contextmanager
def episode_workers(processes: int, timeout_s: float) -> Iterator[Workers]:
    """So many processes; with 0 everything runs in this one, at once.

    When the block is left by an exception, the processes end without finishing their episodes.

    Args:
        processes: how many.
        timeout_s: a process whose simulator gives no answer for so many seconds ends; with 0 processes nobody sees to
            that.
    """
    workers = Workers(processes, timeout_s)
    try:
        yield workers
    except BaseException as error:
        workers.leave(type(error), error, error.__traceback__)
        raise
    workers.leave(None, None, None)


@contextmanager
def _executor(processes: int, hung: str, timeout_s: float) -> Iterator[Executor]:
    if processes == 0:
        try:
            yield _Here()
        finally:
            close_simulator()
        return
    # Not fork: simulators, their renderers and torch have threads, which a forked process lacks.
    context = multiprocessing.get_context("spawn")
    alive, parent = context.Pipe(duplex=False)
    watch = (hung, timeout_s)
    workers = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(alive, watch))
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


def _prepare(alive: Connection, watch: tuple[str, float]) -> None:
    """In a worker: the parent alone hears Ctrl-C, and when it is gone, or gives up, so is the worker."""
    _WATCHES.append(_Watch(*watch))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    try:
        alive.recv()  # nothing is ever sent: this is until the other end is closed
    except (EOFError, OSError):
        os._exit(1)
