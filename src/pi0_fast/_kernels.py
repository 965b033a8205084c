"""How numba kernels are compiled, cached on disk and spread over threads.

`kernel` compiles a function without the global interpreter lock and caches the machine code on disk. `run_rows` cuts a
range of rows into pieces and runs them on a thread pool of this process. Left out on purpose: numba's own
`parallel=True`, whose thread layers either kill forked workers or abort under threads.

Kernels never call a kernel of another file: numba's cache only notices changes of the file that a kernel stands in.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numba import njit

from pi0_fast.types import UsageError

logger = logging.getLogger(__name__)

#: Kernels that could not be given a disk cache, because no directory for it is writable.
uncached: list[str] = []


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with numba on first use: nogil, no fast-math (so results do not depend on the processor), disk cache.

    Where neither the package's directory, nor the user's cache, nor NUMBA_CACHE_DIR is writable the kernel is
    compiled anew in every process (some seconds each); that is logged once and listed in `uncached`.
    """
    try:
        compiled = njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        if not uncached:
            logger.warning("no writable cache directory: kernels are compiled anew; set NUMBA_CACHE_DIR (%s)", error)
        uncached.append(function.__qualname__)
        compiled = njit(nogil=True)(function)
    return compiled


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a kernel, pasted into its callers: a call that passes arrays costs more than most steps themselves."""
    return njit(inline="always")(function)


def is_compiled(compiled: Any) -> bool:
    """Whether the machine code of a kernel is in the disk cache, so that its first use does not take seconds."""
    name, place = compiled.py_func.__name__, compiled.stats.cache_path
    return place is not None and any(Path(place).glob(f"*{name}-*.nbc"))


_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    """In a forked child: the parent's threads are not here, and its lock may be held by one of them."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def available_threads() -> int:
    """The number of processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_threads(num_threads: int | None) -> int:
    """None means every available processor; anything below 1 is an error."""
    if num_threads is None:
        return available_threads()
    if num_threads < 1:
        raise UsageError(f"the number of threads must be at least 1, got {num_threads}")
    return num_threads


def _the_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            # More threads than processors only wait; requests for more pieces than threads queue up.
            _pool = ThreadPoolExecutor(max(available_threads(), 4), thread_name_prefix="pi0-fast")
        return _pool


def run_rows(work: Callable[[int, int], None], rows: int, *, num_threads: int | None = None, piece: int = 256) -> None:
    """Call ``work(begin, end)`` for consecutive pieces that cover ``range(rows)``, on up to `num_threads` threads.

    Pieces may run in any order and at the same time, so each must write only its own rows. The exception of the first
    piece that has one is raised here, after all have stopped. `work` must not call `run_rows` itself.
    """
    if rows <= piece and num_threads is None:
        if rows > 0:
            work(0, rows)
        return
    bounds = [(begin, min(begin + piece, rows)) for begin in range(0, rows, piece)]
    threads = min(resolve_threads(num_threads), len(bounds))
    if threads <= 1:
        for begin, end in bounds:
            work(begin, end)
        return
    pending = iter(bounds)
    taking = threading.Lock()
    failures: list[tuple[int, BaseException]] = []

    def drain() -> None:
        while not failures:
            with taking:
                bound = next(pending, None)
            if bound is None:
                return
            try:
                work(*bound)
            except BaseException as error:
                failures.append((bound[0], error))

    pool = _the_pool()
    futures: list[Future[None]] = [pool.submit(drain) for _ in range(threads - 1)]
    drain()  # the calling thread works too
    for future in futures:
        future.result()
    if failures:
        # Pieces are taken in order, so every piece before the first that fails is done: the error is always the same.
        raise min(failures, key=lambda failure: failure[0])[1]
