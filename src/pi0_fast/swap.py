"""Putting a finished directory in the place of another, so that a kill at any moment loses neither.

Steps of `install_directory(temporary, target)`, with the names beside `target` (`d` in the example):

    1. fsync every file of the temporary, rename it to `.d.new`     the new one is complete from here on
    2. rename `d` to `.d.old`                                       only when d exists
    3. rename `.d.new` to `d`
    4. delete `.d.old`

A kill between 2 and 3 leaves no `d` but a complete `.d.new`; `finish_interrupted_swap` does step 3 and 4
then. A kill before 2 leaves `d` as it was; a kill after 3 leaves `.d.old`, which the next swap deletes.
Two processes that write the same target at the same time are left out: the last one wins or fails.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path


def temporary_sibling(target: Path) -> Path:
    """Make and return an empty directory beside `target`, on the same file system."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex[:12]}"
    temporary.mkdir()
    return temporary


def install_directory(temporary: Path, target: Path) -> None:
    """Move the complete directory `temporary` to `target`, replacing what is there; see the steps above.

    Raises:
        OSError: a rename or a write failed; `target` is as it was, or `finish_interrupted_swap` mends it.
    """
    target = Path(os.path.realpath(target))
    new, old = _names(target)
    finish_interrupted_swap(target)
    for leftover in (new, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    for path in [*temporary.rglob("*"), temporary]:
        # Links may lead nowhere, and opening a pipe would wait for its other end: neither has anything to write out.
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            _fsync(path)
    os.rename(temporary, new)
    try:
        if target.exists():
            os.rename(target, old)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _rename_unless_done(new, target)
    _fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def finish_interrupted_swap(target: Path) -> bool:
    """Finish what a killed `install_directory` left between steps 2 and 3; True when there was anything."""
    target = Path(os.path.realpath(target))
    new, old = _names(target)
    if target.exists() or not (new.is_dir() and old.is_dir()):
        return False
    _rename_unless_done(new, target)
    shutil.rmtree(old, ignore_errors=True)
    return True


def _rename_unless_done(new: Path, target: Path) -> None:
    """Step 3. A reader that sees the gap may finish the swap of a live writer, which then finds it done."""
    try:
        os.rename(new, target)
    except FileNotFoundError:
        if not target.exists():
            raise


def _names(target: Path) -> tuple[Path, Path]:
    return target.parent / f".{target.name}.new", target.parent / f".{target.name}.old"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
