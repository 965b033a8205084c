"""A kill at any step of putting a directory in its place loses neither the old nor the new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pi0_fast.swap import finish_interrupted_swap, install_directory, temporary_sibling

# Kills itself before the n-th call of os.rename or shutil.rmtree in install_directory.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from pi0_fast import swap
target, calls = Path(sys.argv[1]), int(sys.argv[2])
temporary = swap.temporary_sibling(target)
(temporary / "file").write_text("new")
def counted(function):
    def call(*arguments, **named):
        global calls
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        calls -= 1
        return function(*arguments, **named)
    return call
os.rename = counted(os.rename)
shutil.rmtree = counted(shutil.rmtree)
swap.install_directory(temporary, target)
"""


def fill(path: Path, text: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize(("calls", "survivor"), [(0, "old"), (1, "old"), (2, "new"), (3, "new"), (4, "new")])
def test_a_kill_at_any_step(tmp_path: Path, calls: int, survivor: str) -> None:
    """Steps: rename to .new, rename the old aside, rename the new in, delete the old, done."""
    target = fill(tmp_path / "d", "old")
    command = [sys.executable, "-c", KILLED, str(target), str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if calls == 4 else -signal.SIGKILL), done.stderr
    assert finish_interrupted_swap(target) == (calls == 2)
    assert (target / "file").read_text() == survivor
    install_directory(fill(temporary_sibling(target), "third"), target)
    assert (target / "file").read_text() == "third"
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert all(name.startswith(".d.tmp-") for name in left)
    assert len(left) == (1 if calls == 0 else 0)


def test_a_new_directory_needs_no_old_one(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "d"
    install_directory(fill(temporary_sibling(target), "new"), target)
    assert (target / "file").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["d"]
    assert not finish_interrupted_swap(target)


def test_a_failed_rename_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fill(tmp_path / "d", "old")
    temporary = fill(temporary_sibling(target), "new")
    rename = os.rename

    def refuse(source: Path, destination: Path) -> None:
        if Path(source) == target:
            raise PermissionError("no")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        install_directory(temporary, target)
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_link_is_kept_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    fill(tmp_path / "disk" / "d", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "d")
    install_directory(fill(temporary_sibling(tmp_path / "link"), "new"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "d" / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["d", "disk", "file", "link"]
