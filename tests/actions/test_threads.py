"""Kernels in threads, in forked and in spawned processes, and where their machine code cannot be kept on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi0_fast
from pi0_fast import FastTokenizer, _kernels
from pi0_fast.types import UsageError

# --- pieces of rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 9, 10, 11, 100])
@pytest.mark.parametrize("threads", [1, 2, 3, 50, None])
def test_pieces_cover_every_row_once(rows: int, threads: int | None) -> None:
    counts = np.zeros(rows, int)
    sizes: list[int] = []

    def work(begin: int, end: int) -> None:
        counts[begin:end] += 1
        sizes.append(end - begin)

    _kernels.run_rows(work, rows, num_threads=threads, piece=10)
    assert (counts == 1).all()
    assert len(sizes) == -(-rows // 10)
    assert max(sizes, default=0) <= 10


def test_pieces_run_on_as_many_threads_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "available_threads", lambda: 3)
    used: set[int] = set()
    together = threading.Barrier(3)

    def work(*_: int) -> None:
        used.add(threading.get_ident())
        together.wait(timeout=60)  # breaks unless three pieces run at the same time

    _kernels.run_rows(work, 3, num_threads=3, piece=1)
    assert len(used) == 3
    used.clear()
    _kernels.run_rows(lambda *_: used.add(threading.get_ident()), 20, num_threads=1, piece=1)
    assert used == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_in_any_piece_is_raised_after_all_have_stopped(threads: int) -> None:
    running: list[int] = []

    def work(begin: int, _: int) -> None:
        running.append(begin)
        try:
            if begin == 30:
                raise ValueError("piece 30")
        finally:
            running.remove(begin)

    for _ in range(20):
        with pytest.raises(ValueError, match="piece 30"):
            _kernels.run_rows(work, 100, num_threads=threads, piece=10)
        assert running == []
    _kernels.run_rows(lambda *_: None, 100, num_threads=threads, piece=10)  # the pool has survived


def test_numbers_of_threads() -> None:
    assert _kernels.resolve_threads(None) == _kernels.available_threads() >= 1
    assert _kernels.resolve_threads(1) == 1
    # No array per thread is made for threads that could only wait.
    assert _kernels.resolve_threads(100_000) == _kernels.available_threads()
    for wrong in (0, -1):
        with pytest.raises(UsageError, match=f"at least 1, got {wrong}"):
            _kernels.run_rows(lambda *_: None, 0, num_threads=wrong)


# --- threads and processes ----------------------------------------------------------------------------------


def motion(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.normal(0, 0.1, (rows, 8, 3)), axis=1).astype(np.float32)


def test_four_threads_at_once_on_one_tokenizer() -> None:
    tok = FastTokenizer.fit(motion(600, 0), vocab_size=300)
    batches = [motion(500, seed) for seed in range(1, 9)]
    expected = [tok.encode(batch, num_threads=1) for batch in batches]
    fresh = FastTokenizer.fit(motion(600, 0), vocab_size=300)  # with nothing cached yet
    start = threading.Barrier(4)

    def both(n: int) -> Any:
        if n < 4:
            start.wait(timeout=60)
        ids = fresh.encode(batches[n], num_threads=3)
        return ids, fresh.decode(ids, num_threads=3), FastTokenizer.fit(batches[n], vocab_size=200, num_threads=2)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(both, range(8)))
    for n, (ids, values, fit) in enumerate(results):
        assert ids == expected[n]
        np.testing.assert_array_equal(values, tok.decode(expected[n], num_threads=1))
        assert fit == FastTokenizer.fit(batches[n], vocab_size=200, num_threads=1)


# Encodes in the parent on several threads, then in children of both kinds; the child must not wait for lost threads.
CHILDREN = """
import json, multiprocessing, os, sys
import numpy as np
from pi0_fast import FastTokenizer, _kernels

_kernels.available_threads = lambda: 3  # also on machines with fewer
CHUNKS = np.cumsum(np.random.default_rng(0).normal(0, 0.1, (700, 8, 3)), axis=1).astype(np.float32)

def child(tok, queue):
    before = _kernels._pool is None
    ids = tok.encode(CHUNKS, num_threads=3)
    values = tok.decode(ids, num_threads=3)
    again = FastTokenizer.fit(CHUNKS, vocab_size=250, num_threads=3)
    queue.put((before, _kernels._pool is not None, ids == tok.encode(CHUNKS, num_threads=1), float(values.sum()),
               again.fingerprint))

if __name__ == "__main__":
    tok = FastTokenizer.fit(CHUNKS, vocab_size=250, num_threads=3)
    ids = tok.encode(CHUNKS, num_threads=3)
    report = {"parent": [_kernels._pool is not None, float(tok.decode(ids, num_threads=3).sum()), tok.fingerprint]}
    for kind in ("fork", "spawn"):
        context = multiprocessing.get_context(kind)
        queue = context.Queue()
        process = context.Process(target=child, args=(tok, queue))
        process.start()
        report[kind] = queue.get(timeout=120)
        process.join(timeout=60)
        assert process.exitcode == 0, process.exitcode
    report["after"] = ids == tok.encode(CHUNKS, num_threads=3)
    print(json.dumps(report))
"""


def test_forked_and_spawned_children(tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    had_pool, total, fingerprint = report["parent"]
    assert had_pool
    for kind in ("fork", "spawn"):
        # The child begins without a pool, makes its own, and finds the same.
        assert report[kind] == [True, True, True, total, fingerprint], kind
    assert report["after"]


# A thread holds the pool's lock, as one that is just starting it would, while another forks.
LOCKED = """
import os, time, threading
from pi0_fast import _kernels
_kernels.available_threads = lambda: 3  # also on machines with fewer
held, release = threading.Event(), threading.Event()
def hold():
    with _kernels._lock:
        held.set()
        release.wait(60)
threading.Thread(target=hold, daemon=True).start()
held.wait(60)
child = os.fork()
if child == 0:
    seen = []
    _kernels.run_rows(lambda begin, end: seen.append(begin), 40, num_threads=3, piece=10)
    os._exit(0 if sorted(seen) == [0, 10, 20, 30] else 1)
release.set()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, 9)
raise SystemExit("the child waits for a lock that nobody will release")
"""


def test_a_lock_that_is_held_at_a_fork_does_not_stop_the_child() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr


# --- where machine code cannot be kept ----------------------------------------------------------------------

UNCACHED = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
import numpy as np
import pi0_fast
from pi0_fast import _kernels
from pi0_fast.actions import dct
out, saturations, bad = np.empty((1, 4), np.int32), np.empty(1, np.int32), np.empty(1, np.int64)
dct.quantize_rows(np.full((1, 4, 1), 0.5, np.float32), dct.dct_matrix(4), np.full(1, 10, np.float32), -50, 50,
                  np.float32(100), out, saturations, bad)
print(json.dumps([pi0_fast.__file__, _kernels.uncached, out.tolist()]))
"""


@pytest.mark.parametrize("writable", [True, False])
def test_without_a_writable_cache_kernels_work_and_say_so(tmp_path: Path, writable: bool) -> None:
    """A file stands where each of numba's cache directories would be made, which stops even root."""
    shutil.copytree(Path(pi0_fast.__file__).parent, tmp_path / "pi0_fast", ignore=shutil.ignore_patterns("__pycache__"))
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    for folder in (tmp_path / "pi0_fast", tmp_path / "pi0_fast" / "actions"):
        (folder / "__pycache__").write_text("")
    cache = tmp_path / "cache" if writable else blocked
    homes = {"NUMBA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(blocked), "HOME": str(blocked)}
    environment = os.environ | homes | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", UNCACHED], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    file, uncached, out = json.loads(done.stdout)
    assert file == str(tmp_path / "pi0_fast" / "__init__.py")
    assert out == [[10, 0, 0, 0]]
    if writable:
        assert uncached == []
        assert "no writable cache directory" not in done.stderr
        assert list(cache.rglob("*.nbc"))
    else:
        assert {"quantize_rows", "dequantize_rows"} <= set(uncached)
        assert done.stderr.count("WARNING no writable cache directory") == 1
        assert "set NUMBA_CACHE_DIR" in done.stderr


def quantize(cache: Path, before: str = "") -> tuple[list[str], str, list[Path]]:
    """A kernel called in a process of its own: the kernels it could not keep, its stderr, the files of the cache."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", before + UNCACHED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    _, uncached, out = json.loads(done.stdout)
    assert out == [[10, 0, 0, 0]]
    return uncached, done.stderr, sorted(cache.rglob("*.nb?"))


def test_damaged_machine_code_is_deleted_and_made_anew(tmp_path: Path) -> None:
    uncached, err, files = quantize(tmp_path)
    assert (uncached, err) == ([], "")
    assert {path.suffix for path in files} == {".nbi", ".nbc"}
    whole = {path: path.read_bytes() for path in files}
    for path, content in whole.items():
        for damaged in (b"", content[: len(content) // 2], b"no pickle at all", content[:-1]):
            path.write_bytes(damaged)
            uncached, err, again = quantize(tmp_path)
            assert uncached == []
            assert err.count("WARNING damaged kernel cache in ") == 1, err
            assert again == files
        assert quantize(tmp_path)[1] == "", "the cache was not mended"


# As on a full disk: files can be made, but not written.
FULL_DISK = """
import errno
from numba.core.caching import IndexDataCacheFile
def full(self, name, data):
    raise OSError(errno.ENOSPC, "No space left on device")
IndexDataCacheFile._save_data = full
"""


def test_a_full_disk_stops_nothing_and_leaves_no_index_to_older_code(tmp_path: Path) -> None:
    uncached, err, files = quantize(tmp_path, FULL_DISK)
    assert uncached == ["quantize_rows"]
    assert err.count("WARNING no writable cache directory") == 1
    assert "No space left on device" in err
    assert files == []
    assert quantize(tmp_path)[2] != []


STEP = """
from pi0_fast._kernels import inlined
@inlined
def step(x):
    return x + 1
"""
USER = """
import step
from pi0_fast._kernels import kernel
@kernel(uses=(step,))
def twice(x):
    return step.step(x) * 2
print(twice(3), sum(twice.stats.cache_hits.values()))
"""


def test_a_kernel_is_compiled_anew_when_a_file_it_takes_steps_from_changes(tmp_path: Path) -> None:
    """numba looks at the kernel's own file only."""
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "user.py").write_text(USER)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def result() -> str:
        command = [sys.executable, "-B", "-c", "import user"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        return done.stdout.strip()

    assert (result(), result()) == ("8 0", "8 1")
    (tmp_path / "step.py").write_text(STEP.replace("x + 1", "x + 2"))
    assert (result(), result()) == ("10 0", "10 1")
