"""Checkpoints of a run: complete or absent, whatever is killed, full or in the way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pi0_fast.swap  # noqa: E402
from pi0_fast.training import states  # noqa: E402
from pi0_fast.training.states import Checkpoints, newest_checkpoint, read_state  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402

TENSORS = {"a/exp_avg": torch.arange(6.0).reshape(2, 3), "a/step": torch.tensor([3.0])}


def write_model(directory: Path) -> None:
    (directory / "model.txt").write_text("weights")


def save(checkpoints: Checkpoints, step: int, **progress: Any) -> Path:
    return checkpoints.save(step, write_model, progress, TENSORS)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_saved_state_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, total_steps=20)
    checkpoints.check(100)
    directory = save(checkpoints, 3, seed=7)
    assert directory == tmp_path / "checkpoints" / "000003" == newest_checkpoint(tmp_path)
    state = read_state(directory)
    assert (state.step, state.progress) == (3, {"seed": 7})
    assert set(state.tensors) == set(TENSORS)
    assert all(torch.equal(state.tensors[name], value) for name, value in TENSORS.items())
    assert (directory / "pretrained_model" / "model.txt").read_text() == "weights"
    assert names(tmp_path / "checkpoints") == ["000003", "last"]


def test_last_follows_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, total_steps=12_345_678, keep_last=2)
    for step in (5, 10, 15, 20):
        save(checkpoints, step)
        assert os.readlink(tmp_path / "checkpoints" / "last") == f"{step:08d}"
    assert names(tmp_path / "checkpoints") == ["00000015", "00000020", "last"]
    # A run that was resumed from an older one leaves the later ones of its predecessor alone.
    assert newest_checkpoint(tmp_path) == checkpoints.directory(20)
    save(checkpoints, 16)
    assert newest_checkpoint(tmp_path) == checkpoints.directory(16)
    assert names(tmp_path / "checkpoints") == ["00000015", "00000016", "00000020", "last"]


@pytest.mark.parametrize("moment", ["write_model", "write_tensors", "install_directory", "_point_last_to"])
def test_a_failed_save_leaves_the_earlier_one(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, total_steps=20)
    first = save(checkpoints, 5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if moment == "_point_last_to":
        monkeypatch.setattr(Checkpoints, moment, full)
    elif moment != "write_model":
        monkeypatch.setattr(states, moment, full)
    with pytest.raises(OSError, match=r"000010 cannot be written: No space left on device; .* is complete"):
        checkpoints.save(10, full if moment == "write_model" else write_model, {}, TENSORS)
    assert read_state(first).step == 5
    assert os.readlink(tmp_path / "checkpoints" / "last") == "000005"
    # What was renamed already is complete, and is found though `last` does not lead there.
    assert newest_checkpoint(tmp_path) == (checkpoints.directory(10) if moment == "_point_last_to" else first)


def test_a_file_that_grows_too_large(tmp_path: Path) -> None:
    """A real write that fails in the middle: the system's limit for the size of a file stands in for a full disk."""
    resource = pytest.importorskip("resource")
    del resource
    code = f"""
import resource, torch
from pathlib import Path
from pi0_fast.training.states import Checkpoints
checkpoints = Checkpoints(Path({str(tmp_path)!r}), total_steps=20)
checkpoints.save(5, lambda directory: None, {{}}, {{"a/x": torch.zeros(10)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try: checkpoints.save(10, lambda directory: None, {{}}, {{"a/x": torch.zeros(100_000)}})
except OSError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "000010 cannot be written" in done.stdout
    assert "000005 is complete" in done.stdout
    assert names(tmp_path / "checkpoints") == ["000005", "last"]
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "000005"


def test_what_killed_runs_left_is_passed_over_and_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, total_steps=20, keep_last=3)
    complete = save(checkpoints, 5)
    folder = complete.parent
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    half = folder / f".000010{pi0_fast.swap.TEMPORARY}{pi0_fast.swap._machine()}-{dead.pid}-{'0' * 8}"
    for entry in (half, folder / ".deleted-000003", folder / ".000012.pi0-fast-new", folder / "000007"):
        (entry / "pretrained_model").mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == complete  # 000007 was not made here: it has no state
    checkpoints.check(0)
    assert names(folder) == ["000005", "000007", "last"]


def test_a_replacement_that_was_killed_half_way_is_finished(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, total_steps=20)
    directory = save(checkpoints, 5)
    directory.rename(directory.parent / ".000005.pi0-fast-old")
    new = Checkpoints(tmp_path / "other", total_steps=20).save(5, write_model, {"new": True}, TENSORS)
    new.rename(directory.parent / ".000005.pi0-fast-new")
    found = newest_checkpoint(tmp_path)
    assert found == directory
    assert read_state(found).progress == {"new": True}


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library says only how many bytes it wrote."""
    checkpoints = Checkpoints(tmp_path, total_steps=20)
    save(checkpoints, 5)

    def short(*_: object) -> None:
        raise OSError("524288 requested and 70152 written")

    monkeypatch.setattr(states, "write_tensors", short)
    with pytest.raises(OSError, match=r"000010 cannot be written: 524288 requested") as other:
        save(checkpoints, 10)
    assert other.value.errno == errno.EIO
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(4096))
    with pytest.raises(OSError, match=r"cannot be written: No space left on device \(524288 requested") as full:
        save(checkpoints, 10)
    assert full.value.errno == errno.ENOSPC


def test_what_a_file_lacks_is_not_read_to_be_missed(tmp_path: Path) -> None:
    found = read_state(save(Checkpoints(tmp_path, total_steps=20), 5)).tensors
    assert all(name in found for name in TENSORS)
    assert "another/master" not in found
    assert set(found) == set(TENSORS)


# --- before training ------------------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run is no directory"):
        Checkpoints(tmp_path / "run", total_steps=20).check(0)


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 0, 3 * 10**9)
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: usage)
    checkpoints = Checkpoints(tmp_path, total_steps=20)
    checkpoints.check(2 * 10**9)
    with pytest.raises(OSError, match=r"takes 12\.00 GB.* has 3\.00 GB left"):
        checkpoints.check(12 * 10**9)


def test_a_last_that_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="last is no link"):
        Checkpoints(tmp_path, total_steps=20).check(0)


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("training_step.json", '{"step": 5}', "no training state of this version"),
        ("training_step.json", "{", "cannot be read"),
        ("training_step.json", json.dumps({**states._FORMAT, "step": "5"}), "'step' is '5'"),
        ("optimizer_state.safetensors", "", "optimizer_state.safetensors cannot be read"),
        ("optimizer_state.safetensors", None, "optimizer_state.safetensors cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    directory = save(Checkpoints(tmp_path, total_steps=20), 5)
    path = directory / "training_state" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(PolicyError, match=message):
        read_state(directory)
