"""The demo's arm is an arm, and the demo's numbers are in its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pi0_fast import FastTokenizer, demo
from pi0_fast.cli import main
from pi0_fast.data import open_dataset


def test_inverse_kinematics_follow_the_hand() -> None:
    joints = np.array([0.4, 0.9, 0.4])
    for fraction in np.linspace(0, 1, 20):
        target = demo.hand(np.array([0.4, 0.9, 0.4])) * (1 - fraction) + np.array([0.35, 0.2]) * fraction
        joints = demo.follow(joints, target)
    assert np.abs(demo.hand(joints) - [0.35, 0.2]).max() < 1e-3


def test_reaches_start_and_end_at_rest_and_close_the_gripper() -> None:
    actions, states = demo.reach(np.random.default_rng(3))
    assert actions.shape == states.shape
    assert actions.dtype == np.float32
    speed = np.abs(np.diff(actions[:, :3], axis=0)).max(axis=1)
    assert speed.max() > 10 * speed[:2].max()
    assert (speed[-10:] == 0).all()
    assert (actions[0, 3], actions[-1, 3]) == (1.0, 0.0)
    assert np.abs(states - actions).max() < 0.5


def test_demo_runs_twice_and_saves_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "demo")
    assert main(["demo", "--output_dir", output]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    assert f"{summary['held_out']['tokens']['mean_token_length']:.4g}" in printed
    assert open_dataset("local/x", root=tmp_path / "demo/dataset").version == "v3.0"
    assert FastTokenizer.from_pretrained(tmp_path / "demo/tokenizer").vocab_size == summary["vocab_size"]
    assert main(["demo", "--output_dir", output]) == 2
    assert main(["demo", "--output_dir", output, "--overwrite"]) == 0
    assert json.loads((tmp_path / "demo/summary.json").read_text()) == summary


MINE = {
    "summary.json": '{"repo_id": "my/own", "result": 3}',
    "dataset/meta/info.json": '{"robot_type": "so100", "codebase_version": "v3.0"}',
    "dataset/notes.txt": "no dataset at all",
    "tokenizer/metadata.json": '{"repo_id": "my/own"}',
    "tokenizer": "a file",
}


@pytest.mark.parametrize("name", MINE)
@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_what_no_demo_made_is_never_replaced(
    tmp_path: Path, name: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(MINE[name])
    assert main(["demo", "--output_dir", str(tmp_path), *flags]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / name.split('/')[0]} exists and is not of an earlier demo" in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == MINE[name]


def test_an_interrupted_demo_can_be_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.record(tmp_path / "dataset", seed=0, episodes=2)
    assert main(["demo", "--output_dir", str(tmp_path)]) == 2
    assert "holds an earlier demo" in capsys.readouterr().err
    assert main(["demo", "--output_dir", str(tmp_path), "--overwrite"]) == 0
    assert (tmp_path / "summary.json").exists()
