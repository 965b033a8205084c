"""A run that was killed and resumed has the weights of one that was not, to the last bit; signals save and leave."""

from __future__ import annotations

import json
import re
import shlex
import signal as signals
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import tiny_runs

from pi0_fast.training.metrics import read_metrics

#: What a run has that resuming must not be noticed in.
FLAGS = {
    "num_workers": 2,
    "gradient_accumulation_steps": 2,
    "save_freq": 3,
    "log_freq": 2,
}
#: And measuring, which takes most of the time.
MEASURED = {**FLAGS, "eval_freq": 5, "max_eval_samples": 4}
OPTIMIZER = "pi0_fast.training.optimizer"
STATES = "pi0_fast.training.states"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The run that nobody interrupted."""
    done = tiny_runs.run(tiny_runs.arguments(folder, folder / "whole", **FLAGS))
    assert done.returncode == 0, done.stderr
    assert "trained 8 steps" in done.stdout
    return folder / "whole"


def kept_numbers(output: Path) -> list[dict[str, object]]:
    """The lines of training in metrics.jsonl, but for times and memory."""
    times = ("step_s", "data_share", "frames_per_s", "target_ids_per_s", "memory_gib")
    lines = [line for line in read_metrics(output) if line["kind"] == "train"]
    return [{key: value for key, value in line.items() if key not in times} for line in lines]


def check_resumed(folder: Path, whole: Path, at: tuple[str, str, int, str], flags: dict[str, object]) -> None:
    output = folder / re.sub(r"\W", "_", "_".join(map(str, at)))
    killed = tiny_runs.run(tiny_runs.arguments(folder, output, **flags), at=at)
    assert killed.returncode == -signals.SIGKILL, killed.stderr
    if not any((output / "checkpoints").glob("0*")):  # before the first checkpoint there is nothing to go on from
        refused = tiny_runs.run(["train", "--resume=true", f"--output_dir={output}"])
        assert (refused.returncode, "holds no" in refused.stderr) == (2, True), refused.stderr
        return
    resumed = tiny_runs.run(["train", "--resume=true", f"--output_dir={output}"])
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stdout
    assert "will differ" not in resumed.stderr
    assert tiny_runs.weights(output, 8) == tiny_runs.weights(whole, 8)
    assert kept_numbers(output) == kept_numbers(whole)
    leftovers = {entry.name for entry in (output / "checkpoints").iterdir()}
    assert leftovers == {"000003", "000006", "000008", "last"}


@pytest.mark.parametrize(
    "at",
    [
        (OPTIMIZER, "Optimizer.step", 5, "before"),  # gradients are there, the weights are as they were
        (STATES, "write_tensors", 2, "after"),  # in the middle of the second checkpoint
    ],
)
def test_killed_and_resumed(folder: Path, whole: Path, at: tuple[str, str, int, str]) -> None:
    check_resumed(folder, whole, at, FLAGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [
        *((OPTIMIZER, "Optimizer.step", step, when) for step in range(2, 8) for when in ("before", "after")),
        (STATES, "install_directory", 1, "before"),
        (STATES, "install_directory", 1, "after"),
        (STATES, "install_directory", 2, "before"),
        (STATES, "install_directory", 2, "after"),
        (STATES, "Checkpoints._point_last_to", 2, "after"),
        ("pi0_fast.training.validation", "round_trip", 1, "after"),
        ("pi0_fast.training.metrics", "Metrics.write", 3, "after"),
        ("pi0_fast.training.metrics", "Metrics.finish", 1, "before"),
    ],
)
def test_killed_and_resumed_at_any_moment(folder: Path, whole: Path, at: tuple[str, str, int, str]) -> None:
    check_resumed(folder, whole, at, MEASURED)


@pytest.mark.parametrize("number", [signals.SIGTERM, signals.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(folder: Path, whole: Path, number: int) -> None:
    output = folder / f"signal_{number}"
    at = (OPTIMIZER, "Optimizer.step", 4, "before")
    stopped = tiny_runs.run(tiny_runs.arguments(folder, output, **FLAGS), at=at, signal=number)
    assert stopped.returncode == 0, stopped.stderr
    found = re.search(r"stopped after step 4; go on with: pi0-fast (.*)", stopped.stdout)
    assert found, stopped.stdout
    state = json.loads((output / "checkpoints" / "last" / "training_state" / "training_step.json").read_text())
    assert state["step"] == 4
    if number == signals.SIGTERM:
        return
    resumed = tiny_runs.run(shlex.split(found[1]))
    assert resumed.returncode == 0, resumed.stderr
    assert tiny_runs.weights(output, 8) == tiny_runs.weights(whole, 8)


def test_another_order_of_work_gives_the_same_weights(folder: Path, whole: Path) -> None:
    """Neither workers, nor measuring, nor saving may leave a trace in the weights."""
    output = folder / "other"
    flags = {**MEASURED, "num_workers": 0, "save_freq": 0, "log_freq": 0}
    done = tiny_runs.run(tiny_runs.arguments(folder, output, **flags))
    assert done.returncode == 0, done.stderr
    assert tiny_runs.weights(output, 8) == tiny_runs.weights(whole, 8)
    assert [(line["step"], line["kind"]) for line in read_metrics(output)] == [(5, "validation"), (8, "validation")]
