"""Putting a finished directory in the place of another, so that a kill at any moment loses neither.

Steps of `install_directory(temporary, target)`, with the names beside `target` (`d` in the example):

    1. fsync every file of the temporary, rename it to `.d.pi0-fast-new`     the new one is complete from here on
    2. rename `d` to `.d.pi0-fast-old`                                       only when d exists
    3. rename `.d.pi0-fast-new` to `d`
    4. bring along what was written into `.d.pi0-fast-old` meanwhile (where the caller says how), delete it

A kill between 2 and 3 leaves no `d` but a complete `.d.pi0-fast-new`; `finish_interrupted_swap` does step 3 and 4
then. A kill before 2 leaves `d` as it was; a kill after 3 leaves `.d.pi0-fast-old`, with which the next swap does
step 4. Nothing but directories of these names and the temporary ones of dead processes is ever deleted.
Processes of one machine take turns (a lock, where the file system has locks): of two that write the same target the
last one wins. Left out: writers on several machines that share a file system.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pi0_fast.types import UsageError

#: Between a target's name and what tells temporary directories apart.
TEMPORARY = ".pi0-fast-tmp-"
#: Called with the old directory, which is deleted next, and the new one in its place.
BringAlong = Callable[[Path, Path], None]
#: Called with an entry of a directory and its path within, in posix form.
IsOwn = Callable[[Path, str], bool]


def temporary_sibling(target: Path) -> Path:
    """Make and return an empty directory beside `target`, on the same file system, as private as `target`.

    Temporary directories that killed processes of this machine left for the same target are removed.

    Raises:
        OSError: none can be made, or none could take the place of `target` (see `check_place`).
    """
    target = Path(os.path.realpath(target))
    _refuse_impossible(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_temporaries_of_the_dead(target)
        temporary = target.parent / f".{target.name}{TEMPORARY}{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir()
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise OSError(error.errno, f"{target} cannot be written: {error.strerror}{where}") from error
    _copy_access(target, temporary)
    return temporary


def check_place(target: Path) -> None:
    """Before the work: could `install_directory` put a directory there? Leaves nothing behind.

    Raises:
        OSError: it could not: no directory can be made beside it, it is a mount point, something else than a
            directory, or the working directory is in it.
    """
    if target.is_symlink() and not target.exists():
        raise NotADirectoryError(errno.ENOTDIR, f"{target} is a link to {os.path.realpath(target)}, which is missing")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{target} exists and is no directory")
    real = Path(os.path.realpath(target))
    missing = [parent for parent in real.parents if not parent.exists()]
    try:
        temporary_sibling(real).rmdir()
    finally:
        for parent in missing:
            with suppress(OSError):  # not made, or used by somebody else meanwhile
                parent.rmdir()


def install_directory(temporary: Path, target: Path, bring_along: BringAlong | None = None) -> None:
    """Move the complete directory `temporary` to `target`, replacing what is there; see the steps above.

    The new directory gets the permissions of the old one (and stays writable for its owner), and its owner where the
    system allows that.

    Raises:
        OSError: a rename or a write failed; `target` is as it was, or `finish_interrupted_swap` mends it.
    """
    target = Path(os.path.realpath(target))
    _refuse_impossible(target)
    with _alone(target):
        _install(temporary, target, bring_along)


def _install(temporary: Path, target: Path, bring_along: BringAlong | None) -> None:
    """The steps of `install_directory`."""
    new, old = _names(target)
    _finish(target, bring_along)
    if _is_own(old):
        if target.exists():
            _finish_old(old, target, bring_along)
            if old.exists():
                raise PermissionError(
                    errno.EACCES, f"{old}, which an earlier save replaced, cannot be deleted: delete it by hand"
                )
        else:
            os.rename(old, target)
    if _is_own(new):
        shutil.rmtree(new)
    for path in [*temporary.rglob("*"), temporary]:
        # Links may lead nowhere, and opening a pipe would wait for its other end: neither has anything to write out.
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            _fsync(path)
    _copy_access(target, temporary)
    os.rename(temporary, new)
    try:
        if target.exists():
            os.rename(target, old)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _rename_unless_done(new, target)
    _fsync(target.parent)
    _finish_old(old, target, bring_along)


def finish_interrupted_swap(target: Path, bring_along: BringAlong | None = None) -> bool:
    """Finish what a killed `install_directory` left between steps 2 and 3; True when there was anything.

    A swap that is still going on is waited for.
    """
    target = Path(os.path.realpath(target))
    if not _is_interrupted(target):
        return False
    with _alone(target):
        return _finish(target, bring_along)


def _is_interrupted(target: Path) -> bool:
    return not target.exists() and all(directory.is_dir() for directory in _names(target))


def _finish(target: Path, bring_along: BringAlong | None) -> bool:
    if not _is_interrupted(target):
        return False
    new, old = _names(target)
    _rename_unless_done(new, target)
    _finish_old(old, target, bring_along)
    return True


@contextmanager
def in_use(directory: Path, doing: str) -> Iterator[None]:
    """Within the block this process has a directory to itself, of those that ask by this; it ends with the process.

    Where there are no such locks (Windows, some file systems), nobody is kept out.

    Raises:
        UsageError: another process has it; `doing` says what that does.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process is {doing} ({directory} is in use)") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system within the block name the file, which those of a write, such as a full disk's, do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Within the block no other process swaps directories beside `target`; where the system has no such locks, any may.

    The lock is on the parent directory, so that no file is left over, and ends with its process.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _finish_old(old: Path, target: Path, bring_along: BringAlong | None) -> None:
    """Step 4. The old directory stays when something in it cannot be brought along."""
    if not old.is_dir():
        return
    if bring_along is not None:
        bring_along(old, target)
    with suppress(OSError):  # of another owner; what cannot be deleted stays for the next swap
        os.chmod(old, 0o700)
    shutil.rmtree(old, ignore_errors=True)


def _rename_unless_done(new: Path, target: Path) -> None:
    """Step 3. A reader that sees the gap may finish the swap of a live writer, which then finds it done."""
    try:
        os.rename(new, target)
    except FileNotFoundError:
        if not target.exists():
            raise


def _names(target: Path) -> tuple[Path, Path]:
    return target.parent / f".{target.name}.pi0-fast-new", target.parent / f".{target.name}.pi0-fast-old"


def _is_own(leftover: Path) -> bool:
    """Whether an earlier swap left this directory; anything else of that name is in the way."""
    if leftover.is_symlink() or (leftover.exists() and not leftover.is_dir()):
        raise FileExistsError(
            errno.EEXIST, f"{leftover} is in the way: pi0-fast keeps only directories there; move it elsewhere"
        )
    return leftover.is_dir()


def _refuse_impossible(target: Path) -> None:
    """Places that renaming cannot replace, or must not."""
    for parent in target.parents:
        if parent.exists() and not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{target} cannot be written: {parent} is no directory")
    mounts = _mount_points()
    if os.path.ismount(target) or str(target) in mounts:
        raise OSError(
            errno.EBUSY,
            f"{target} is a mount point, which cannot be replaced as a whole; name a directory in it, such as "
            f"{target / 'output'}",
        )
    for mount in sorted(mounts):
        if target in Path(mount).parents:
            raise OSError(
                errno.EBUSY, f"{target} cannot be replaced, because {mount} is mounted in it; name another directory"
            )
    try:
        working = Path(os.path.realpath(os.getcwd()))
    except FileNotFoundError:  # it was deleted before
        return
    if target.exists() and (working == target or target in working.parents):
        raise OSError(
            errno.EBUSY,
            f"{target} cannot be replaced, because the working directory {working} would be deleted with it; "
            "name another directory, or change to one outside it",
        )


def _mount_points() -> set[str]:
    """Of Linux: a directory of the same file system that is mounted elsewhere looks like any other."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return set()
    # Blanks and backslashes are written as three octal digits.
    return {re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split(" ")[4]) for line in lines}


def _copy_access(source: Path, destination: Path) -> None:
    """Permissions of an existing directory, and its owner where the system allows that."""
    try:
        found = source.stat()
    except FileNotFoundError:
        return
    made = destination.stat()
    if (found.st_uid, found.st_gid) != (made.st_uid, made.st_gid):
        for uid in (found.st_uid, -1):  # only the superuser may give the owner, others may give some groups
            try:
                os.chown(destination, uid, found.st_gid)
                break
            except PermissionError:
                continue
    os.chmod(destination, stat.S_IMODE(found.st_mode) | 0o700)


def _machine() -> str:
    """Tells apart machines, and containers of one machine, that share a file system: processes have other numbers."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        numbering = ""
    return hashlib.sha256(f"{platform.node()} {numbering}".encode()).hexdigest()[:8]


def _remove_temporaries_of_the_dead(target: Path) -> None:
    if os.name != "posix":  # elsewhere signal 0 is no question
        return
    pattern = re.compile(re.escape(f".{target.name}{TEMPORARY}{_machine()}-") + r"(\d+)-[0-9a-f]{8}")
    for entry in os.listdir(target.parent):
        found = pattern.fullmatch(entry)
        if found is not None and not _is_alive(int(found[1])):
            shutil.rmtree(target.parent / entry, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- files of others in a directory that is replaced ----------------------------------------------------------------


def keep_other_files(target: Path, temporary: Path, is_own: IsOwn, *, mixed_folders: Sequence[str] = ()) -> None:
    """Bring along what an existing directory holds besides own files; as hard links, so that nothing is copied.

    Args:
        target: what will be replaced; nothing is done where it is no directory.
        temporary: what will replace it.
        is_own: whether an entry, of that path within the directory, goes with what is replaced.
        mixed_folders: subfolders that hold own files and those of others.
    """
    if not target.is_dir():
        return
    folders = [target, *(target / name for name in mixed_folders)]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry not in folders]
    for entry in entries:
        name = entry.relative_to(target).as_posix()
        if is_own(entry, name):
            continue
        (temporary / name).parent.mkdir(exist_ok=True)
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, temporary / name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(entry), str(temporary / name))


def bring_along(old: Path, new: Path, *, is_own: IsOwn, within: str = "") -> None:
    """Move what was written into the old directory after `keep_other_files`: other files, new or newer ones."""
    with suppress(FileNotFoundError):  # a reader that finishes the same swap was faster
        for entry in list((old / within).iterdir()):
            name = entry.relative_to(old).as_posix()
            if is_own(entry, name):
                continue
            there = new / name
            if entry.is_dir() and not entry.is_symlink() and there.is_dir():
                bring_along(old, new, is_own=is_own, within=name)
            elif not os.path.lexists(there) or _is_newer(entry, there):
                with suppress(FileNotFoundError):
                    os.replace(entry, there)


def _is_newer(entry: Path, there: Path) -> bool:
    """Whether a file was replaced in the old directory after it was linked or copied to the new one."""
    found, kept = entry.lstat(), there.lstat()
    return not os.path.samestat(found, kept) and not there.is_dir() and found.st_mtime_ns > kept.st_mtime_ns


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, destination, follow_symlinks=False)
