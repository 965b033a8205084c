"""That every process of a run notices within a minute when one of them is gone, whatever it is waiting for.

A collective operation on a GPU waits for a dead process for as long as it is told to; and it must be told to wait long,
since one process may be writing a large checkpoint. So a thread of each process gives a sign of life every second to
the store through which the processes have found each other, and looks for that of its neighbour. Who misses one writes
so to the store, where all the others read it; then everybody ends. So does a process that fails by an error, for which
the others need not wait. Left out: noticing a process that lives and does nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

_BEAT_S = 1.0
_MOST_GRACE_S = 5.0
_FAILED = "failed"


class Watch:
    """A thread that looks after one neighbour and the common notice of failure.

    Attributes:
        reason: why the run must end, once that is known.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        count: int,
        timeout_s: float,
        *,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Give the first sign of life; `start` is called once all processes did.

        Args:
            store: used by this object only: an operation on it may wait.
            rank, count: of this process, of all.
            timeout_s: without a sign of life for so long a process counts as gone.
            end: what ends this process where its main thread does not; None: print the reason, leave with status 1.
        """
        self.reason: str | None = None
        self._store, self._rank, self._count, self._timeout_s = store, rank, count, timeout_s
        self._over = threading.Event()
        self._known = threading.Event()
        self._end = _leave if end is None else end
        self._thread = threading.Thread(target=self._run, daemon=True, name="pi0-fast watch")
        store.set(_alive(rank), "0")

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer, and give no more signs of life: what comes now takes no time."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(self._timeout_s)

    def fail(self, message: str) -> None:
        """Tell the others why this process ends."""
        self.stop()
        try:
            self._store.compare_set(_FAILED, "", f"process {self._rank} of {self._count} failed: {message}")
        except RuntimeError as error:  # the store is gone, and the others with it
            print(f"pi0-fast: the other processes cannot be told: {error}", file=sys.stderr)

    def why(self, wait_s: float) -> str | None:
        """The reason, where it becomes known within that time."""
        self._known.wait(wait_s)
        return self.reason

    def _run(self) -> None:
        beat = min(_BEAT_S, self._timeout_s / 4)
        neighbour = (self._rank + 1) % self._count
        count, last, changed = 0, b"0", time.monotonic()
        while not self._over.wait(beat) and self.reason is None:
            count += 1
            try:
                self._store.set(_alive(self._rank), str(count))
                seen = self._store.get(_alive(neighbour))
                now = time.monotonic()
                if seen != last:
                    last, changed = seen, now
                elif now - changed > self._timeout_s:
                    message = f"process {neighbour} of {self._count} gave no sign of life for {self._timeout_s:g} s"
                    self._store.compare_set(_FAILED, "", message)
                if self._store.check([_FAILED]):
                    self.reason = self._store.get(_FAILED).decode(errors="replace")
            except RuntimeError as error:
                self.reason = f"the process through which the others find each other is gone: {_short(error)}"
        if self.reason is None:
            return
        self._known.set()
        # The main thread may learn it by itself, from an operation that fails, and end in good order.
        if not self._over.wait(min(_MOST_GRACE_S, self._timeout_s)):
            self._end(self.reason)


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _leave(reason: str) -> None:
    """End the process from a thread: the main one may be waiting for the dead, and would not hear of it."""
    print(f"pi0-fast: error: {reason}; this process ends too", file=sys.stderr, flush=True)
    os._exit(1)
