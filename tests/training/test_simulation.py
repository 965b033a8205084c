"""Training that evaluates in the toy world: when, what is written, and that it leaves the training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import tiny_processes  # noqa: E402
from tiny_runs import arguments, weights, write_architecture  # noqa: E402

import pi0_fast.training.simulation as module  # noqa: E402
from pi0_fast import sims  # noqa: E402
from pi0_fast.cli import main  # noqa: E402
from pi0_fast.data.writer import LeRobotWriter  # noqa: E402
from pi0_fast.training.metrics import read_metrics  # noqa: E402
from pi0_fast.types import SimulatorError  # noqa: E402

TOP = "observation.images.top"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two demonstrations of the toy world's expert."""
    folder = tmp_path_factory.mktemp("toy")
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        "action": {"dtype": "float32", "shape": [2], "names": ["dx", "dy"]},
        TOP: {"dtype": "image", "shape": [32, 32, 3]},
    }
    simulator = sims.make("toy", "reach-green", cameras=["top"])
    with LeRobotWriter(folder / "data", fps=10, features=features) as writer:
        for seed in range(2):
            simulator.reset(seed)
            expert = simulator.expert()
            assert expert is not None
            rows = []
            for _ in range(12):
                action = np.clip(expert(), -1, 1)
                rows.append({**simulator.observe(), "action": action})
                simulator.step(action)
            keys = ("observation.state", "action", TOP)
            writer.add_episode({key: np.stack([row[key] for row in rows]) for key in keys}, task=simulator.spec.text)
    write_architecture(folder / "sizes.json")
    return folder


def trained(folder: Path, output: Path, **flags: object) -> list[dict[str, Any]]:
    line = arguments(folder, output, **{"steps": 4, "save_freq": 0, **flags})
    assert main(line) == 0
    return [line for line in read_metrics(output) if line["kind"] == "simulation"]


TOY = {"env.type": "toy", "env.task": "reach-green,reach-blue", "eval.n_episodes": 2, "eval.max_steps": 4}


def test_it_is_done_at_its_steps_and_changes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trained(folder, tmp_path / "with", **TOY, env_eval_freq=3)
    printed = capsys.readouterr().out
    assert "reach-green, reach-blue; cameras observation.images.top; 2 episodes of each task every 3 steps" in printed
    assert "step 3: in the simulator" in printed
    assert [line["step"] for line in lines] == [3, 4]
    for line in lines:
        assert (line["episodes"], line["failed"], line["malformed"]) == (4, 0, 0.0)
        assert {task: part["episodes"] for task, part in line["tasks"].items()} == {"reach-green": 2, "reach-blue": 2}
    assert trained(folder, tmp_path / "without") == []
    assert weights(tmp_path / "with", 4) == weights(tmp_path / "without", 4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_share_the_episodes(folder: Path, tmp_path: Path, engine: str) -> None:
    flags = {**TOY, "env_eval_freq": 4, "policy.optimizer_eps": 1e-4}
    (alone,) = trained(folder, tmp_path / "one", **flags, batch_size=4)
    line = arguments(folder, tmp_path / "two", **{**flags, "steps": 4, "batch_size": 2, "distributed": engine})
    ended = tiny_processes.run(line)
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    (together,) = (line for line in read_metrics(tmp_path / "two") if line["kind"] == "simulation")
    for name in ("episodes", "failed", "successes", "malformed"):
        assert together.get(name) == alone.get(name), name


def test_a_policy_that_does_not_fit_is_found_before_the_first_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(folder, tmp_path / "out", **{**TOY, "env.cameras": '["hand"]', "env_eval_freq": 2})
    assert main(line) == 1
    error = capsys.readouterr().err
    assert (
        "the policy's cameras are observation.images.top, those of toy reach-green are observation.images.hand" in error
    )
    assert read_metrics(tmp_path / "out") == []


def test_a_simulator_that_fails_does_not_end_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"env.options": '{"fault": "raise", "fault_seed": 100001}', "env.task": "reach-green", "env_eval_freq": 4}
    (line,) = trained(folder, tmp_path / "episode", **{**TOY, **fault})
    assert (line["episodes"], line["failed"]) == (2, 1)
    assert "in 1 of 2 episodes the simulator failed" in capsys.readouterr().err

    def broken(*_: Any, **__: Any) -> Any:
        raise SimulatorError("no renderer any more")

    monkeypatch.setattr(module, "run", broken)
    (line,) = trained(folder, tmp_path / "all", **{**TOY, "env_eval_freq": 4})
    assert line["problem"] == "no renderer any more"
    assert "not evaluated in the simulator: no renderer any more" in capsys.readouterr().err
