"""How numba kernels are compiled, cached on disk and spread over threads.

`kernel` compiles a function without the global interpreter lock and caches the machine code on disk. `run_rows` cuts a
range of rows into pieces and runs them on a thread pool of this process. The disk cache is never needed: damaged files
in it are deleted, and machine code that cannot be written is made anew by the next process. Left out on purpose:
numba's own `parallel=True`, whose thread layers either kill forked workers or abort under threads.

numba's cache only notices changes of the file that a kernel stands in: one that takes steps from other files names them
in `kernel(uses=...)`.
"""

from __future__ import annotations

import glob
import hashlib
import inspect
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

from pi0_fast.types import UsageError

logger = logging.getLogger(__name__)

#: Kernels whose machine code could not be kept on disk: no directory is writable, the disk is full.
uncached: list[str] = []


class _ForgivingCache(FunctionCache):
    """numba's disk cache of one kernel, whose files may be damaged and whose disk may be full.

    numba lets such errors reach whoever calls the kernel, in every later process too.
    """

    def __init__(self, function: Callable[..., Any], uses: tuple[ModuleType, ...] = ()) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._uses = uses

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """numba's key, and what the kernel takes from other files."""
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        sources = "".join(inspect.getsource(module) for module in self._uses)
        return (*key, hashlib.sha256(sources.encode()).hexdigest())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code for a signature, or None where none is kept or what is kept cannot be read."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:
            # Whatever a truncated pickle or broken machine code raises (EOFError, UnpicklingError, AttributeError...).
            logger.warning(
                "damaged kernel cache in %s: %s is compiled anew (%s: %s)",
                self.cache_path,
                self._py_func.__qualname__,
                type(error).__name__,
                error,
            )
            self._remove()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the machine code for a signature; where that fails, say so once and list the kernel in `uncached`."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:
            _report_uncached(self._py_func, f"{type(error).__name__}: {error}")
            # numba writes the index before the code: it may now name a file that holds the code of an older source.
            self._remove()

    def _remove(self) -> None:
        folder, base = Path(self.cache_path), glob.escape(self._impl.filename_base)
        for path in (*folder.glob(f"{base}.nbi"), *folder.glob(f"{base}.*.nbc")):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s from the kernel cache, please do: %s", path, error)


def _report_uncached(function: Callable[..., Any], reason: object) -> None:
    """List a kernel in `uncached`; the first one is logged."""
    if not uncached:
        logger.warning("no writable cache directory: kernels are compiled anew; set NUMBA_CACHE_DIR (%s)", reason)
    if function.__qualname__ not in uncached:
        uncached.append(function.__qualname__)


def kernel(function: Callable[..., Any] | None = None, *, uses: tuple[ModuleType, ...] = ()) -> Callable[..., Any]:
    """Compile with numba on first use: nogil, no fast-math (so results do not depend on the processor), disk cache.

    Used as ``@kernel``, or as ``@kernel(uses=(module, ...))`` where inlined steps come from other files.

    Where neither the package's directory, nor the user's cache, nor NUMBA_CACHE_DIR is writable (or the disk is full)
    the kernel is compiled anew in every process (some seconds each); that is logged once and listed in `uncached`.
    """
    if function is None:
        return partial(kernel, uses=uses)
    compiled: Callable[..., Any] = njit(nogil=True)(function)
    try:
        cache = _ForgivingCache(function, uses)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _report_uncached(function, error)
    else:
        vars(compiled)["_cache"] = cache  # as `cache=True` does with numba's own class
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
    """The number of threads to use: as asked, but at most one per available processor, which is what None means.

    More would only wait for each other, and work that keeps an array per thread would take memory for nothing.

    Raises:
        UsageError: fewer than 1.
    """
    if num_threads is None:
        return available_threads()
    if num_threads < 1:
        raise UsageError(f"the number of threads must be at least 1, got {num_threads}")
    return min(num_threads, available_threads())


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
