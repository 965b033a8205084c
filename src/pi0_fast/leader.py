"""One of several processes does a piece of work, the others wait for its result: `run_once`.

The processes share nothing but a directory. Beside the result `d` lie two small files, which stay there:

    .d.lock       held by the leader while it works; the operating system frees it when the process dies
    .d.attempt    what the last leader says of itself: running, failed (with the error) or done; touched every second

A waiting process fails when the attempt that it waited for failed, or when its leader went quiet: then the lock tells
whether the leader is dead (on the same machine), or the silence has lasted long enough (on another machine, where
some network file systems do not share locks; the work may then be done twice, with the same result). What an earlier
attempt left behind is never taken for the present one, and so a new call always tries again.

Left out: the work, and how its result appears all at once (`swap.py`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from pi0_fast.types import Pi0FastError, UsageError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_POLL_S = 0.25
_BEAT_S = 1.0
_LOG_S = 30.0
#: A leader that has not touched its file for so long may be dead: on this machine the lock decides.
_QUIET_S = 4.0
#: ... and one on another machine is given up; its file is seen late through a network file system.
_QUIET_ELSEWHERE_S = 20.0


class SharedWorkError(Pi0FastError, RuntimeError):
    """The process that did the work for this one failed or died, or took longer than this one would wait."""


@dataclass(frozen=True)
class Attempt:
    """What a leader says of itself in its file.

    Attributes:
        id: different for each attempt.
        state: what became of it; a leader that was killed leaves "running".
        machine: identifies the running kernel of its machine.
        who: process, host and rank, for messages.
        started: seconds since the epoch, by the leader's clock.
        error: type and message of what it failed with.
    """

    id: str
    state: Literal["running", "failed", "done"]
    machine: str
    who: str
    started: float
    error: str = ""


def run_once(
    target: Path,
    work: Callable[[], Result],
    finished: Callable[[], Result | None],
    *,
    timeout_s: float,
    what: str,
) -> Result:
    """Return `finished()`; before, if there is nothing yet, let exactly one of the processes that call this `work()`.

    Who may lead: with LOCAL_RANK set (as torchrun does) the processes of local rank 0, one a machine, whose directory
    need not be shared; else with RANK set that of rank 0; else any. The first of them to come leads.

    Args:
        target: where the result will be; the two files of this protocol are made beside it.
        work: makes the result, which from then on `finished` finds.
        finished: the result, or None as long as it is not complete.
        timeout_s: how long to wait for another process; the work itself may take longer.
        what: the work in a few words, for messages.

    Raises:
        SharedWorkError: the leader failed (with its error) or died while this process waited for it; the time is up;
            the file system has no locks.
        UsageError: RANK, LOCAL_RANK or WORLD_SIZE is no number.
        Exception: in the leader, whatever `work` raises.
    """
    value = finished()
    if value is not None:
        return value
    process = _Process(target, what)
    begun = logged = time.monotonic()
    with process.lock() as held:
        value = finished()
        if value is None and process.arrive(held):
            return process.lead(work)
    while value is None:
        process.look()
        if process.wants_lock():
            with process.lock() as held:
                value = finished()  # it may have come since the last look
                if value is None and process.decide(held):
                    return process.lead(work)
        now = time.monotonic()
        if now - begun >= timeout_s:
            raise SharedWorkError(f"{what}: no result after {timeout_s:g} s of waiting {process.for_whom()}")
        if now - logged >= _LOG_S:
            logged = now
            # A warning, since a program that never set up logging shows nothing less.
            logger.warning("%s: waiting %s, %.0f s of %g s", what, process.for_whom(), now - begun, timeout_s)
        time.sleep(min(_POLL_S, timeout_s - (now - begun)))
        value = finished()
    return value


#: Attempts whose end this process has raised already; its next call is a new one.
_reported: set[str] = set()


class _Process:
    """This process' part: what it has seen of the leader's file, what follows from it, and leading."""

    def __init__(self, target: Path, what: str) -> None:
        target = Path(os.path.realpath(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path = target.parent / f".{target.name}.attempt"
        self._lock = target.parent / f".{target.name}.lock"
        self._what = what
        self._may_lead = _may_lead()
        self._machine = _machine()
        self._attempt: Attempt | None = None
        self._touched = 0.0
        self._changed = time.monotonic()
        #: The attempt that was at work while this process waited: only its failure or death is this process' business.
        self._awaited: str | None = None
        #: An attempt of former times whose leader is known to be dead.
        self._buried: str | None = None

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Try to take the lock, without waiting, and say whether it is held; free it afterwards.

        Raises:
            SharedWorkError: the file system cannot lock, or the lock file cannot be opened.
        """
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SharedWorkError(f"{self._lock} cannot be written: {error}") from error
        try:
            yield self._try(descriptor)
        finally:
            # Closing alone would not free it where another thread has forked a child meanwhile.
            with suppress(OSError):  # closing frees it all the same in all other cases
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _try(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SharedWorkError(
                f"{self._lock} cannot be locked, as its file system has no locks ({error}): take a directory on "
                "another one; with LOCAL_RANK set, as torchrun does, a local disk of each machine will do"
            ) from error
        return True

    def arrive(self, held: bool) -> bool:
        """After the first try of the lock: what is found, and whether this process shall lead."""
        self._attempt, self._touched = _read(self._path)
        attempt = self._attempt
        if attempt is None:
            return held and self._may_lead
        running = attempt.state == "running"
        if attempt.id not in _reported:
            at_work = running and not held and abs(time.time() - self._touched) < 2 * _BEAT_S
            # A rank that may not try itself must not miss a leader that failed before it came.
            of_this_run = not self._may_lead and attempt.started > _process_start()
            if at_work or of_this_run:
                self._awaited = attempt.id
        if running and attempt.machine != self._machine:
            return False  # it may be alive, where locks are not shared: watch it first
        return held and self._may_lead

    def look(self) -> None:
        """Read the leader's file again.

        Raises:
            SharedWorkError: the leader that this process waited for failed.
        """
        attempt, touched = _read(self._path)
        if (attempt, touched) != (self._attempt, self._touched):
            self._attempt, self._touched = attempt, touched
            self._changed = time.monotonic()
            self._buried = None
            if attempt is not None:
                self._awaited = attempt.id
        if attempt is not None and attempt.state == "failed" and attempt.id == self._awaited:
            self._raise(attempt, f"failed: {attempt.error}")

    def wants_lock(self) -> bool:
        """Whether the lock is worth a try: to learn whether a silent leader is dead, or to lead."""
        attempt = self._attempt
        if attempt is not None and attempt.state == "running" and attempt.id != self._buried:
            return self._is_silent(attempt)
        if attempt is not None and attempt.state == "done" and attempt.machine != self._machine:
            return self._may_lead and self._is_silent(attempt)  # this machine may see the result a little later
        return self._may_lead

    def decide(self, held: bool) -> bool:
        """After a further try of the lock: whether this process shall lead.

        Raises:
            SharedWorkError: the leader that this process waited for failed or died.
        """
        if held:
            self.look()  # its last words may have come in between
        attempt = self._attempt
        if attempt is not None and attempt.state == "running" and attempt.id != self._buried:
            here, silent = attempt.machine == self._machine, self._is_silent(attempt)
            # A held lock of this machine is proof of life: a process that is stopped, or too busy for a sign. Machines
            # may not share their locks: of another one's leader only silence tells, whether the lock is held or free.
            dead = held if here else silent
            if not dead:
                return False
            if attempt.id == self._awaited:
                self._raise(attempt, "died" if here else f"died (no sign of life for {_QUIET_ELSEWHERE_S:g} s)")
            self._buried = attempt.id
        return held and self._may_lead

    def lead(self, work: Callable[[], Result]) -> Result:
        """Do the work, and say in the file what becomes of it. The lock must be held."""
        attempt = Attempt(uuid.uuid4().hex, "running", self._machine, _who(), time.time())
        _write(self._path, attempt)
        over = threading.Event()
        beats = threading.Thread(target=_beat, args=(self._path, over), daemon=True, name="pi0-fast leader")
        beats.start()
        try:
            value = work()
        except BaseException as error:
            with suppress(OSError):  # the error itself counts; the others then find a lock that nobody holds
                _write(self._path, replace(attempt, state="failed", error=f"{type(error).__name__}: {error}"))
            raise
        finally:
            over.set()
            beats.join()
        try:
            _write(self._path, replace(attempt, state="done"))
        except OSError as error:  # the result is there, which is what the others look for first
            logger.warning("cannot write %s: %s", self._path, error)
        return value

    def for_whom(self) -> str:
        """For whom this process waits."""
        if self._attempt is not None and self._attempt.state == "running" and self._attempt.id != self._buried:
            return f"for {self._attempt.who}"
        if self._may_lead:
            return f"for the process that holds {self._lock}"
        return (
            f"for a process of local rank 0 to begin; this is {_who()}. Is one running, and does it use "
            f"{self._path.parent}?"
        )

    def _is_silent(self, attempt: Attempt) -> bool:
        limit = _QUIET_S if attempt.machine == self._machine else _QUIET_ELSEWHERE_S
        return time.monotonic() - self._changed >= limit

    def _raise(self, attempt: Attempt, end: str) -> None:
        _reported.add(attempt.id)
        raise SharedWorkError(f"{self._what}: {attempt.who}, for which this process waited, {end}")


def _beat(path: Path, over: threading.Event) -> None:
    """Touch the file until the work is over."""
    while not over.wait(_BEAT_S):
        try:
            os.utime(path)
        except OSError as error:
            logger.warning("cannot touch %s, so that waiting processes may take this one for dead: %s", path, error)
            return


def _read(path: Path) -> tuple[Attempt | None, float]:
    """The attempt and when it was last touched (seconds since the epoch); (None, 0) without a file.

    Opened anew each time: on a network file system that is what fetches the present state.
    """
    try:
        with path.open(encoding="utf-8") as file:
            touched = os.fstat(file.fileno()).st_mtime
            return Attempt(**json.load(file)), touched
    except FileNotFoundError:
        return None, 0.0
    except (ValueError, TypeError) as error:  # written by another version, or by hand
        raise SharedWorkError(f"{path} cannot be understood ({error}): delete it") from error


def _write(path: Path, attempt: Attempt) -> None:
    temporary = path.with_name(f"{path.name}.{attempt.id}")
    temporary.write_text(json.dumps(asdict(attempt)), encoding="utf-8")
    os.replace(temporary, path)


# --- which process this is --------------------------------------------------------------------------------------------


def _may_lead() -> bool:
    local, rank, world = (_environment(name) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
    if world == 1:
        return True
    first = local if local is not None else rank
    return first is None or first == 0


def _environment(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the environment variable {name} is {text!r}, which is no number") from None


def _rank_text() -> str:
    ranks = [f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK") if os.environ.get(name)]
    return f" ({', '.join(ranks)})" if ranks else ""


def _who() -> str:
    return f"process {os.getpid()} on {platform.node()}{_rank_text()}"


def _machine() -> str:
    """The running kernel, within which locks are shared for certain; containers of one machine have it in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


_IMPORTED = time.time()


def _process_start() -> float:
    """When this process began, in seconds since the epoch; without Linux' /proc, when this file was imported."""
    try:
        # proc(5): field 22, in clock ticks since boot; the name in parentheses before it may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _IMPORTED
    # Ticks are rounded down; one more, so that nothing from before this process counts as later.
    return time.time() - uptime + (ticks + 1) / os.sysconf("SC_CLK_TCK")
