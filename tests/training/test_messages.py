"""What a run says: flags by this command's names, how it ended, what became of its data."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")

from tiny_runs import arguments, build_dataset  # noqa: E402

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.training import loop  # noqa: E402


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("messages")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dataset.root": "nowhere"}, "nowhere is not a directory; --dataset.root takes the directory"),
        ({"dataset.action_key": "actions"}, "--dataset.action_key and --dataset.state_key choose the columns"),
        ({"policy.chunk_size": 20, "policy.n_action_steps": 20}, "take --policy.chunk_size=14 or less"),
    ],
)
def test_errors_name_the_flags_of_this_command(
    home: Path, tmp_path: Path, flags: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(home, tmp_path / "out", **flags)) != 0
    err = capsys.readouterr().err
    assert words in err
    assert not re.search(r"--(root|action_key|state_key)\b", err)


def test_the_line_of_a_step_fits_a_terminal() -> None:
    values = {"loss": 0.012345, "grad_norm": 0.01234, "learning_rate": 7.123e-6, "frames_per_s": 1234.5}
    line = loop._line({**values, "data_share": 1.0, "memory_gib": 123.456})
    assert line == "loss 0.01235, gradient 0.012, rate 7.1e-06, 1234 frames/s, 100% waiting, 123 GiB"
    assert len(f"step 100000/100000: {line}") <= 100


def test_a_run_ends_with_errors_by_joint_and_counters_in_words(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build_dataset(tmp_path / "data", joints=("left_shoulder.position", "left_elbow.position"))
    flags = {"dataset.root": root, "steps": 1, "eval_freq": 1, "batch_size": 46, "max_eval_samples": 4}
    assert main(arguments(home, tmp_path / "out", **flags)) == 0
    out = capsys.readouterr().out
    assert re.search(r"error of actions \S+ \(tokenizer alone \S+, mean action \S+, first action held \S+\)", out)
    table = out[out.index("Error of actions on ") :]
    assert re.search(r"\n +0 left_shoulder\.position +\S+ +\S+ +\S+ +\S+\n +1 left_elbow\.position +", table)
    assert "12 rows reached beyond the end of their episode and carried no loss (padded_rows)" in table
    assert not re.search(r"^padded_rows:", out, re.MULTILINE)


def test_a_signal_before_the_first_step_leaves_no_directory_of_checkpoints(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = loop._Loop._one_step

    def interrupted(*args: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(loop._Loop, "_one_step", interrupted)
    assert main(arguments(home, tmp_path / "out")) == 0
    assert "stopped after step 0 without a checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "out" / "checkpoints").exists()
    monkeypatch.setattr(loop._Loop, "_one_step", real)
    assert main(arguments(home, tmp_path / "out", steps=1)) == 0  # in the same place


def test_the_second_interrupt_says_how_to_go_on_from_the_last_checkpoint(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = loop.Optimizer.step, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(loop.Optimizer, "step", interrupted)
    assert main(arguments(home, tmp_path / "out")) == 130
    found = re.search(r"interrupted; go on with: pi0-fast (.*)", capsys.readouterr().out)
    assert found
    assert not (tmp_path / "out" / "checkpoints" / "000003").exists()
    monkeypatch.setattr(loop.Optimizer, "step", real)
    assert main([*shlex.split(found[1]), "--steps=3"]) == 0
    assert "step 2 of 3" in capsys.readouterr().out


def test_an_interrupt_before_anything_was_saved(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Optimizer, "step", interrupted)
    assert main(arguments(home, tmp_path / "out")) == 130
    assert "interrupted; no checkpoint was saved: begin again" in capsys.readouterr().out


def test_resuming_with_changed_data_is_warned_of(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build_dataset(tmp_path / "data")
    assert main(arguments(home, tmp_path / "out", steps=1, **{"dataset.root": root})) == 0
    capsys.readouterr()
    again = ["train", "--resume=true", f"--output_dir={tmp_path / 'out'}"]
    assert main([*again, "--steps=2"]) == 0
    name = "states and actions of the dataset"
    assert name not in capsys.readouterr().err
    file = next((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    values = np.array(table["action"].to_pylist(), np.float32)
    values[3, 1] += 1e-3
    column = pa.array(values.tolist(), table.schema.field("action").type)
    pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", column), file)
    assert main([*again, "--steps=3"]) == 0
    err = capsys.readouterr().err
    assert "not the run that was interrupted, its results will differ" in err
    assert name in err
