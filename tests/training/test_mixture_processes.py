"""Two processes train on a mixture as one does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import test_mixture
import tiny_processes
import tiny_runs

from pi0_fast.training.metrics import read_metrics


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_are_one_with_the_same_batch(tmp_path: Path, engine: str) -> None:
    """Losses in all and by dataset; one of the datasets lacks a camera, and some parts have rows of one only, or none
    that a whole chunk follows."""
    tiny_runs.build_dataset(tmp_path / "data")
    tiny_runs.write_architecture(tmp_path / "sizes.json")
    test_mixture.build_other(tmp_path / "other")
    flags = {"dataset.weights": "[2, 1]", "steps": 4, "log_freq": 1, "save_freq": 0, "eval_freq": 4}
    flags |= {"max_eval_samples": 4}
    one = tiny_runs.run(test_mixture.line(tmp_path, tmp_path / "one", batch_size=4, **flags))
    assert one.returncode == 0, one.stderr
    two = tiny_processes.run(test_mixture.line(tmp_path, tmp_path / "two", batch_size=2, distributed=engine, **flags))
    assert [each.returncode for each in two] == [0, 0], two[0].stderr + two[1].stderr
    lines = [read_metrics(tmp_path / name) for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1]) == 5
    for ours, theirs in zip(*lines, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        if ours["kind"] == "train":
            for name in ("frames", "target_ids", "counts"):
                assert theirs.get(name) == ours.get(name), name
            assert theirs["dataset_losses"] == pytest.approx(ours["dataset_losses"], rel=1e-5)
        else:
            for name, part in ours["datasets"].items():
                assert theirs["datasets"][name]["action_l1"] == pytest.approx(part["action_l1"], rel=1e-4)
