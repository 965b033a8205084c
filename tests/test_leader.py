"""One process works, the others wait: with real processes that fail, die, stop, come late, or share no locks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pi0_fast.leader import SharedWorkError, run_once
from pi0_fast.types import UsageError

# A process that takes part. Its work appends a line to `log`, takes `seconds`, and fails if told so.
CHILD = """
import json, os, sys, time
from pathlib import Path
settings = {"seconds": 0.0, "delay": 0.0, "timeout": 60.0, "fail": False, "machine": None, "errno": 0}
settings.update(json.loads(sys.argv[1]))
if settings["errno"]:
    import fcntl
    def flock(*_):
        raise OSError(settings["errno"], os.strerror(settings["errno"]))
    fcntl.flock = flock
from pi0_fast import leader
leader._BEAT_S, leader._QUIET_S, leader._QUIET_ELSEWHERE_S, leader._LOG_S = 0.1, 0.8, 3.0, 0.3
if settings["machine"]:  # another machine: another kernel, and locks of its own
    begin = leader._Process.__init__
    def begin_elsewhere(self, *arguments):
        begin(self, *arguments)
        self._lock = Path(f"{self._lock}-{settings['machine']}")
    leader._Process.__init__ = begin_elsewhere
    leader._machine = lambda: settings["machine"]
target = Path(settings["target"])
def finished():
    return target.read_text() if target.exists() else None
def work():
    with (target.parent / "log").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    print("working", flush=True)
    time.sleep(settings["seconds"])
    if settings["fail"]:
        raise ValueError("the data is bad")
    temporary = target.with_suffix(f".{os.getpid()}")
    temporary.write_text(f"made by {os.getpid()}")
    os.replace(temporary, target)
    return target.read_text()
print("begun", flush=True)
time.sleep(settings["delay"])
try:
    print(leader.run_once(target, work, finished, timeout_s=settings["timeout"], what="the answer"), flush=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a taking-part process; `rank` sets the variables of torchrun. All are gone at the end of the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin(rank: int | None = None, **settings: Any) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        if rank is not None:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
        command = [sys.executable, "-c", CHILD, json.dumps({"target": str(tmp_path / "d"), **settings})]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit status, last line) of a process."""
    assert process.stdout is not None
    # `communicate` would leave out what came together with the first line, which is in the stream's buffer by now.
    late = threading.Timer(60, process.kill)
    late.start()
    out = process.stdout.read()
    late.cancel()
    err = process.communicate(timeout=60)[1]
    assert "Traceback" not in err, err
    return process.returncode, out.strip().splitlines()[-1]


def wait_for_work(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"


def works(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("ranks", [[None] * 4, [3, 2, 1, 0]], ids=["plain", "torchrun"])
def test_of_four_at_once_exactly_one_works(tmp_path: Path, start: Start, ranks: list[int | None]) -> None:
    processes = [start(rank, seconds=0.5) for rank in ranks]
    ends = [end(process) for process in processes]
    assert [code for code, _ in ends] == [0] * 4
    assert len({text for _, text in ends}) == 1
    assert works(tmp_path) == 1
    if ranks[0] is not None:
        assert ends[0][1] == f"made by {processes[3].pid}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".d.attempt", ".d.lock", "d", "log"]


def test_the_leaders_error_reaches_all_and_the_next_call_tries_again(tmp_path: Path, start: Start) -> None:
    leader = start(seconds=1.5, fail=True)
    wait_for_work(leader)
    followers = [start() for _ in range(2)]
    assert end(leader) == (3, "ValueError: the data is bad")
    for follower in followers:
        code, text = end(follower)
        assert code == 3
        assert text.startswith(f"SharedWorkError: the answer: process {leader.pid} on ")
        assert text.endswith("failed: ValueError: the data is bad")
    assert works(tmp_path) == 1
    again = start()
    assert end(again) == (0, f"made by {again.pid}")


def test_a_killed_leader_is_noticed_and_the_next_call_tries_again(tmp_path: Path, start: Start) -> None:
    leader = start(seconds=60)
    wait_for_work(leader)
    followers = [start() for _ in range(2)]
    time.sleep(0.5)  # they must be waiting
    leader.kill()
    for follower in followers:
        code, text = end(follower)
        assert code == 3
        assert f"process {leader.pid} on " in text
        assert text.endswith("died")
    assert works(tmp_path) == 1
    again = start()
    assert end(again) == (0, f"made by {again.pid}")


def test_who_comes_after_the_death_of_a_leader_works_at_once(start: Start) -> None:
    leader = start(seconds=60)
    wait_for_work(leader)
    leader.kill()
    leader.wait()
    after = start()
    assert end(after) == (0, f"made by {after.pid}")


@pytest.mark.slow
def test_a_stopped_leader_is_not_dead(start: Start) -> None:
    leader = start(seconds=0.5)
    wait_for_work(leader)
    leader.send_signal(signal.SIGSTOP)
    follower = start()
    time.sleep(2)  # more than twice the silence after which the lock is looked at
    assert follower.poll() is None
    leader.send_signal(signal.SIGCONT)
    assert end(leader) == end(follower) == (0, f"made by {leader.pid}")


def test_waiting_is_logged_and_ends(start: Start) -> None:
    leader = start(seconds=60)
    wait_for_work(leader)
    follower = start(timeout=2.0)
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 3
    assert f"SharedWorkError: the answer: no result after 2 s of waiting for process {leader.pid} on " in out
    assert err.count(f"the answer: waiting for process {leader.pid} on ") >= 2


def test_a_rank_that_waits_for_nobody_says_whom_it_expects(tmp_path: Path, start: Start) -> None:
    code, text = end(start(1, timeout=0.5))
    assert code == 3
    assert "waiting for a process of local rank 0 to begin" in text
    assert "(RANK=1, LOCAL_RANK=1)" in text
    assert str(tmp_path) in text
    assert works(tmp_path) == 0


@pytest.mark.slow
def test_a_late_rank_gets_the_error_of_the_leader_that_failed_before(start: Start) -> None:
    late = start(1, delay=1.5)
    assert end(start(0, fail=True))[0] == 3
    code, text = end(late)
    assert code == 3
    assert text.endswith("failed: ValueError: the data is bad")


@pytest.mark.parametrize("killed", [False, True], ids=["failed", "killed"])
def test_an_earlier_run_does_not_poison_the_ranks_of_the_next(start: Start, killed: bool) -> None:
    earlier = start(0, fail=not killed, seconds=60 if killed else 0)
    wait_for_work(earlier)
    if killed:
        earlier.kill()
    earlier.wait()
    follower = start(1)  # comes first, and must not take what it finds for its own leader's end
    time.sleep(1.5)
    leader = start(0)
    assert end(leader) == end(follower) == (0, f"made by {leader.pid}")


def test_the_same_process_can_try_again(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank that may not lead: the failure that it has raised once is not raised again."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    leader = start(seconds=1, fail=True)
    wait_for_work(leader)

    def finished() -> str | None:
        return (tmp_path / "d").read_text() if (tmp_path / "d").exists() else None

    def never() -> str:
        raise AssertionError

    with pytest.raises(SharedWorkError, match="the data is bad"):
        run_once(tmp_path / "d", never, finished, timeout_s=30, what="the answer")
    with pytest.raises(SharedWorkError, match=r"no result after 0\.3 s"):
        run_once(tmp_path / "d", never, finished, timeout_s=0.3, what="the answer")
    again = start()
    assert run_once(tmp_path / "d", never, finished, timeout_s=30, what="the answer") == f"made by {again.pid}"


@pytest.mark.slow
def test_without_shared_locks_a_living_leader_is_respected_and_a_dead_one_noticed(tmp_path: Path, start: Start) -> None:
    """Two machines whose locks do not see each other, as on some network file systems."""
    leader = start(machine="a", seconds=1)
    wait_for_work(leader)
    follower = start(machine="b")
    assert end(leader) == end(follower) == (0, f"made by {leader.pid}")
    (tmp_path / "d").unlink()
    leader = start(machine="a", seconds=60)
    wait_for_work(leader)
    follower = start(machine="b")
    time.sleep(0.5)
    leader.kill()
    code, text = end(follower)
    assert code == 3
    assert text.endswith("died (no sign of life for 3 s)")
    again = start(machine="b")  # first watches whether that leader gives a sign
    assert end(again) == (0, f"made by {again.pid}")
    assert works(tmp_path) == 3


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_lock_is_named(tmp_path: Path, start: Start, number: int) -> None:
    code, text = end(start(errno=number))
    assert code == 3
    assert text.startswith(f"SharedWorkError: {tmp_path / '.d.lock'} cannot be locked, as its file system has no locks")
    assert works(tmp_path) == 0


def test_threads_of_one_process_share_the_work(tmp_path: Path) -> None:
    made: list[str] = []
    results: list[str] = []

    def finished() -> str | None:
        return made[0] if made else None

    def work() -> str:
        time.sleep(0.3)
        made.append("answer")
        return "answer"

    def take_part() -> None:
        results.append(run_once(tmp_path / "d", work, finished, timeout_s=30, what="the answer"))

    threads = [threading.Thread(target=take_part) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["answer"] * 4
    assert made == ["answer"]


def test_a_result_needs_neither_lock_nor_a_writable_directory(tmp_path: Path) -> None:
    place = tmp_path / "missing" / "d"
    assert run_once(place, lambda: "new", lambda: "old", timeout_s=1, what="the answer") == "old"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK is 'first'"):
        run_once(tmp_path / "d", lambda: "new", lambda: None, timeout_s=1, what="the answer")


def test_a_file_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ".d.attempt").write_text('{"id": "x", "mood": "good"}')
    with pytest.raises(SharedWorkError, match=r"\.d\.attempt cannot be understood .*delete it"):
        run_once(tmp_path / "d", lambda: "new", lambda: None, timeout_s=1, what="the answer")
