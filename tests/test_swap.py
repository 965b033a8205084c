"""A kill at any step of putting a directory in its place loses neither the old nor the new one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pi0_fast.swap import check_place, finish_interrupted_swap, install_directory, temporary_sibling

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
    assert [path.name for path in tmp_path.iterdir()] == ["d"]  # nor is the temporary of the dead process left


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


def test_neighbours_of_similar_names_stay(tmp_path: Path) -> None:
    target = fill(tmp_path / "d", "old")
    others = [fill(tmp_path / name, name) for name in (".d.old", ".d.new", ".d.tmp-0123", ".d.pi0-fast-tmp-mine")]
    install_directory(fill(temporary_sibling(target), "new"), target)
    assert (target / "file").read_text() == "new"
    assert [(other / "file").read_text() for other in others] == [other.name for other in others]
    target.rename(tmp_path / "elsewhere")
    assert not finish_interrupted_swap(target)
    assert not target.exists()


@pytest.mark.parametrize("name", [".d.pi0-fast-new", ".d.pi0-fast-old"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_a_swap_did_not_make_is_in_its_way(tmp_path: Path, name: str, kind: str) -> None:
    target = fill(tmp_path / "d", "old")
    precious = fill(tmp_path / "precious", "mine")
    if kind == "file":
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(FileExistsError, match=f"{name} is in the way"):
        install_directory(fill(temporary_sibling(target), "new"), target)
    assert (target / "file").read_text() == "old"
    assert (precious / "file").read_text() == "mine"
    assert os.path.lexists(tmp_path / name)


def test_the_only_copy_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the old one is left, a swap that fails later still leaves it."""
    fill(tmp_path / ".d.pi0-fast-old", "old")
    target = tmp_path / "d"
    temporary = fill(temporary_sibling(target), "new")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        install_directory(temporary, target)
    assert (target / "file").read_text() == "old"


def test_an_old_one_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one with a folder of another user; the save before it was complete."""
    target = fill(tmp_path / "d", "old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        install_directory(fill(temporary_sibling(target), "new"), target)
        assert (target / "file").read_text() == "new"
        with pytest.raises(PermissionError, match=r"\.d\.pi0-fast-old, .* cannot be deleted: delete it by hand"):
            install_directory(fill(temporary_sibling(target), "third"), target)
        assert (target / "file").read_text() == "new"
    install_directory(fill(temporary_sibling(target), "third"), target)
    assert (target / "file").read_text() == "third"
    assert not (tmp_path / ".d.pi0-fast-old").exists()


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o2775])
def test_permissions_stay(tmp_path: Path, mode: int) -> None:
    target = fill(tmp_path / "d", "old")
    target.chmod(mode)
    temporary = temporary_sibling(target)
    assert temporary.stat().st_mode & 0o7777 == mode  # from the first moment
    temporary.chmod(0o755)
    install_directory(fill(temporary, "new"), target)
    assert target.stat().st_mode & 0o7777 == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may give a directory to another user")
def test_the_owner_stays(tmp_path: Path) -> None:
    target = fill(tmp_path / "d", "old")
    os.chown(target, 1234, 2345)
    install_directory(fill(temporary_sibling(target), "new"), target)
    assert (target.stat().st_uid, target.stat().st_gid) == (1234, 2345)


def test_temporaries_of_dead_processes_go_and_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "d"
    mine = temporary_sibling(target)
    code = (
        "import sys; from pathlib import Path; from pi0_fast.swap import *; print(temporary_sibling(Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True)
    dead = fill(Path(done.stdout.strip()), "half")
    assert dead.is_dir()
    machine, process, number = mine.name.removeprefix(".d.pi0-fast-tmp-").split("-")
    elsewhere = tmp_path / dead.name.replace(machine, "00000000")
    elsewhere.mkdir()
    other = tmp_path / dead.name.replace(".d.", ".e.")
    other.mkdir()
    assert process == str(os.getpid())
    assert len(number) == 8
    again = temporary_sibling(target)
    assert sorted(tmp_path.iterdir()) == sorted([mine, again, elsewhere, other])


# --- impossible places ----------------------------------------------------------------------------------------------


def test_possible_places_leave_nothing_behind(tmp_path: Path) -> None:
    fill(tmp_path / "d", "old")
    (tmp_path / "link").symlink_to("d")
    for place in ("d", "link", "new", "a/b/c"):
        check_place(tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "link"]
    assert (tmp_path / "d" / "file").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "exists and is no directory"),
        ("file/x", "file is no directory"),
        ("file/x/y", "file is no directory"),
        ("dangling", "is a link to .*nowhere, which is missing"),
        ("n" * 240, "cannot be written: File name too long"),
        ("/proc", r"is a mount point.*name a directory in it, such as /proc/"),
        (".", "working directory .* would be deleted"),
        ("../..", "working directory .* would be deleted"),
    ],
)
def test_impossible_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b" if name == "../.." else tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError, match=message) as caught:
        check_place(Path(name))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_mounts_that_look_like_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the same file system, mounted elsewhere: only Linux's own list of mounts tells."""
    (tmp_path / "a b" / "inner").mkdir(parents=True)
    listed = str(tmp_path / "a b" / "inner").replace(" ", r"\040")
    read_text = Path.read_text

    def read(path: Path, *arguments: str, **named: str) -> str:
        if path == Path("/proc/self/mountinfo"):
            return f"36 35 98:0 /x {listed} rw - ext4 /dev/sda rw\n"
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(OSError, match="inner is a mount point"):
        check_place(tmp_path / "a b" / "inner")
    with pytest.raises(OSError, match="inner is mounted in it; name another"):
        check_place(tmp_path / "a b")
    check_place(tmp_path / "a b" / "inner" / "new")


def test_a_deleted_working_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_place(tmp_path / "d")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot be written: Permission denied"):
            check_place(tmp_path / "d")
    finally:
        tmp_path.chmod(0o700)


def test_writers_of_one_target_take_turns(tmp_path: Path) -> None:
    target, failures = tmp_path / "d", []

    def write(name: str) -> None:
        for number in range(15):
            temporary = temporary_sibling(target)
            for file in ("a", "b", "c"):
                (temporary / file).write_text(f"{name}{number}")
            try:
                install_directory(temporary, target)
            except OSError as error:
                failures.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in ("x", "y", "z")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        finish_interrupted_swap(target)  # as readers do
    for writer in writers:
        writer.join()
    assert failures == []
    assert {entry.name for entry in tmp_path.iterdir()} == {"d"}
    assert len({(target / file).read_text() for file in ("a", "b", "c")}) == 1


def test_a_reader_waits_for_a_swap_that_is_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not finish the swap itself, as after a kill: the writer would find its directories gone."""
    target, seen = tmp_path / "d", []
    target.mkdir()
    temporary = temporary_sibling(target)
    (temporary / "new").touch()
    rename = os.rename

    def slow(source: Path, destination: Path) -> None:
        rename(source, destination)
        if Path(destination).name.endswith("-old"):
            reader = threading.Thread(target=lambda: seen.append(finish_interrupted_swap(target)))
            reader.start()
            readers.append(reader)
            reader.join(0.05)
            assert seen == []

    readers: list[threading.Thread] = []
    monkeypatch.setattr(os, "rename", slow)
    install_directory(temporary, target)
    readers[0].join()
    assert seen == [False]
    assert [entry.name for entry in target.iterdir()] == ["new"]
