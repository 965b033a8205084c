"""When one of the processes of a run dies, fails or hangs, or never was the same, all of them end with an error."""

from __future__ import annotations

import os
import signal as signals
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import tiny_processes  # noqa: E402
import tiny_runs  # noqa: E402
from torch.distributed import HashStore  # noqa: E402

from pi0_fast.training.watch import Watch  # noqa: E402

STEP = ("pi0_fast.training.optimizer", "Optimizer.step", 3, "before")
FLAGS = {"save_freq": 2, "log_freq": 1, "num_workers": 1, "distributed_timeout_s": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others(folder: Path, engine: str) -> None:
    line = tiny_runs.arguments(folder, folder / engine, distributed=engine, **FLAGS)
    first, second = tiny_processes.run(line, at={1: STEP}, number=signals.SIGKILL)
    assert second.returncode == -signals.SIGKILL
    assert first.returncode == 1
    assert "pi0-fast: error: another process has died, or cannot be reached" in first.stderr
    assert (folder / engine / "checkpoints/last").resolve().name == "000002"  # what was saved is there
    tokenizers = [entry for entry in (folder / "tokenizers").iterdir() if not entry.name.startswith(".")]
    assert len(tokenizers) == 1  # one of the processes made it


def test_an_error_of_one_process_is_told_to_all(folder: Path) -> None:
    line = tiny_runs.arguments(folder, folder / "error", **FLAGS)
    first, second = tiny_processes.run(line, at={1: STEP}, number=0)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "pi0-fast: error: the disk is full" in second.stderr
    assert "process 1 of 2 failed: the disk is full" in first.stderr


def test_processes_with_different_data_do_not_train(folder: Path) -> None:
    line = tiny_runs.arguments(folder, folder / "different")
    ended = tiny_processes.wait(tiny_processes.start([line, [*line, "--dataset.episodes=[0,1,2]"]]))
    assert [each.returncode for each in ended] == [1, 1]
    assert "process 1 has --dataset.episodes [0, 1, 2], process 0 has None" in ended[0].stderr
    assert not (folder / "different").exists()


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others(folder: Path) -> None:
    line = tiny_runs.arguments(folder, folder / "hung", **{**FLAGS, "distributed_timeout_s": 5})
    first, second = tiny_processes.start([line, line], at={1: STEP}, number=signals.SIGSTOP)
    try:
        (ended,) = tiny_processes.wait([first])
    finally:
        os.killpg(second.pid, signals.SIGKILL)
        second.communicate()
    assert ended.returncode == 1
    assert "process 1 of 2 gave no sign of life for 5 s" in ended.stderr


# --- the watch itself -----------------------------------------------------------------------------------------------


def ending(timeout_s: float) -> tuple[list[str], Watch, Watch]:
    """Two watches of one store, and what they ended for."""
    store, reasons = HashStore(), list[str]()
    first, second = (Watch(store, rank, 2, timeout_s, end=reasons.append) for rank in (0, 1))
    return reasons, first, second


def wait_for(reasons: list[str]) -> None:
    end = time.monotonic() + 20
    while not reasons and time.monotonic() < end:
        time.sleep(0.02)


def test_a_watch_misses_its_neighbour() -> None:
    reasons, first, _silent = ending(0.4)
    first.start()
    wait_for(reasons)
    assert reasons == ["process 1 of 2 gave no sign of life for 0.4 s"] == [first.reason]


def test_a_watch_hears_of_a_failure_and_of_no_end_in_good_order() -> None:
    reasons, first, second = ending(2.0)
    for each in (first, second):
        each.start()
    second.fail("out of memory")
    assert first.why(20) == "process 1 of 2 failed: out of memory"
    wait_for(reasons)
    assert reasons == [first.reason]
    reasons, first, second = ending(2.0)
    for each in (first, second):
        each.start()
    time.sleep(0.3)
    for each in (first, second):
        each.stop()
    time.sleep(0.8)
    assert (reasons, first.reason, second.reason) == ([], None, None)
