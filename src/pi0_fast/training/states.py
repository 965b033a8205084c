"""Checkpoints of a run: what training goes on from, all at once or not at all.

    checkpoints/
      000200/
        pretrained_model/                   the policy, as it saves itself, and train_config.json
        training_state/
          training_step.json                the step, and everything about the run that is a number or a name
          optimizer_state.safetensors       see Optimizer.state
          optimizer_state/                  in its place where weights are sharded: a file of each process, as
                                            torch.distributed.checkpoint writes them
      last -> 000200

A checkpoint is written beside its place, flushed to the disk, and renamed: whatever is killed when, a directory of that
name is complete. `last` moves afterwards, and old ones go after that. There are no states of random generators and none
of the sampler: both are functions of the seed and the step. Left out: what is in the files of a policy (checkpoint.py).
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from pi0_fast.model.weights import write_tensors
from pi0_fast.policy_config import read_json_object, write_json
from pi0_fast.swap import TEMPORARY, check_place, finish_interrupted_swap, install_directory, temporary_sibling
from pi0_fast.train_config import CHECKPOINTS, LAST, PRETRAINED_MODEL, TRAINING_STATE
from pi0_fast.training.processes import Processes
from pi0_fast.training.sharding import part, rows_of
from pi0_fast.types import PolicyError

STEP_FILE, OPTIMIZER_FILE = "training_step.json", "optimizer_state.safetensors"
#: In place of that file, of sharded tensors.
OPTIMIZER_FOLDER = "optimizer_state"
#: Names of checkpoints that are being deleted begin so.
_DELETED = ".deleted-"
_FORMAT = {"format": "pi0-fast-training-state", "version": 1}
#: Free bytes that are asked for beyond what a checkpoint takes.
_SPARE_BYTES = 2**20


@dataclass(frozen=True)
class SavedState:
    """A checkpoint's training_state.

    Attributes:
        directory: of the checkpoint.
        step: updates that were done.
        progress: the rest of training_step.json.
        tensors: see `Optimizer.state`; they are read when they are asked for, best with `fill`.
    """

    directory: Path
    step: int
    progress: dict[str, Any]
    tensors: Mapping[str, Tensor]


class _Stored(Mapping[str, Tensor]):
    """Tensors in files, by name; each is read when it is asked for."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, name: object) -> bool:  # a mapping's own would read the tensor, and fail otherwise
        return name in self.shapes

    def __len__(self) -> int:
        return len(self.shapes)


class _InOneFile(_Stored):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            super().__init__({name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        self._path = path

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        with safe_open(self._path, framework="pt") as file:
            for name, target in targets.items():
                sharded = isinstance(target, DTensor)
                part(target).copy_(file.get_slice(name)[rows_of(target)] if sharded else file.get_tensor(name))


class _Sharded(_Stored):
    """A directory of torch.distributed.checkpoint; any number of processes can read what any other wrote."""

    def __init__(self, folder: Path) -> None:
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
        super().__init__(
            {name: each.size for name, each in metadata.items() if isinstance(each, TensorStorageMetadata)}
        )
        self._folder = folder

    def __getitem__(self, name: str) -> Tensor:
        found = {name: torch.empty(self.shapes[name])}
        self.fill(found)
        return found[name]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        # Each process reads what it needs, and nothing has to be agreed upon.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it was asked for
            load(dict(targets), storage_reader=FileSystemReader(self._folder), no_dist=True)


def stored_shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """The shape of one of them, without reading it where it is in a file."""
    return tensors.shapes[name] if isinstance(tensors, _Stored) else tensors[name].shape


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into others of the same names and shapes; of a sharded one each process reads its part.

    Raises:
        PolicyError: a file is damaged.
    """
    if not isinstance(tensors, _InOneFile | _Sharded):
        for name, target in targets.items():
            part(target).copy_(tensors[name][rows_of(target)])
        return
    try:
        tensors.fill(targets)
    except (OSError, SafetensorError, CheckpointException) as error:
        raise PolicyError(f"the optimizer's state cannot be read: {error}") from error


class Checkpoints:
    """The checkpoints of a run's directory; one process writes them."""

    def __init__(self, output_dir: Path, *, total_steps: int, keep_last: int | None = None) -> None:
        """Nothing is touched yet.

        Args:
            output_dir: of the run.
            total_steps: of the run; decides how many digits a step has (six at least, as LeRobot).
            keep_last: delete all but this many of the newest after each save; None keeps all.
        """
        self.folder = output_dir / CHECKPOINTS
        self._digits = max(6, len(str(total_steps)))
        self._keep_last = keep_last

    def directory(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        return self.folder / f"{step:0{self._digits}d}"

    def check(self, needed_bytes: int) -> None:
        """Before training: could checkpoints be saved? Removes what killed runs left half-written or half-deleted.

        Args:
            needed_bytes: of one checkpoint.

        Raises:
            OSError: the directory cannot be written, links cannot be made there, or the disk has no room for one.
        """
        target = self.directory(0)
        check_place(target)
        self.folder.mkdir(parents=True, exist_ok=True)
        last = self.folder / LAST
        if last.exists() and not last.is_symlink():
            raise FileExistsError(errno.EEXIST, f"{last} is no link: pi0-fast keeps one there; move it elsewhere")
        try:
            link = self.folder / f".{LAST}-{os.getpid()}"
            link.symlink_to(target.name)
            link.unlink()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.folder} cannot hold the link {LAST!r} ({error.strerror}): choose another output_dir",
            ) from error
        newest_checkpoint(self.folder.parent)  # finishes what a killed run was about to replace
        self._remove_leftovers()
        free = shutil.disk_usage(self.folder).free
        with suppress(OSError):  # a run that ends before it saves leaves no empty directory
            self.folder.rmdir()
        if free < needed_bytes + _SPARE_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint takes {needed_bytes / 1e9:.2f} GB, and {self.folder} has {free / 1e9:.2f} GB left: make "
                "room, choose another output_dir, or set save_checkpoint=false",
            )

    def save(
        self,
        step: int,
        write_model: Callable[[Path], None],
        progress: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        processes: Processes | None = None,
    ) -> Path:
        """Write the checkpoint of a step, move `last` to it, delete old ones.

        Args:
            step: updates that were done.
            write_model: called with the empty directory pretrained_model.
            progress: what `SavedState.progress` will hold.
            tensors: as in `SavedState`.
            processes: where tensors are sharded over these, all of which call this: each writes its parts, the first
                of them everything else.

        Returns:
            Its directory.

        Raises:
            OSError: it cannot be written; earlier checkpoints are as they were, and the message names the newest.
        """
        target = self.directory(step)
        if processes is not None and not processes.first:
            _write_parts(processes.from_first(target), tensors, processes)
            processes.wait()
            return target
        temporary: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = temporary_sibling(target)
            model, state = temporary / PRETRAINED_MODEL, temporary / TRAINING_STATE
            model.mkdir()
            state.mkdir()
            write_model(model)
            if processes is None:
                write_tensors(state / OPTIMIZER_FILE, tensors, {})
            else:
                _write_parts(processes.from_first(state / OPTIMIZER_FOLDER), tensors, processes)
            write_json(state / STEP_FILE, {**_FORMAT, "step": step, **progress}, indent=2)
            install_directory(temporary, target)
            self._point_last_to(target)
        except (OSError, SafetensorError) as error:
            raise self._failure(target, error) from error
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
        self._delete_old(step)
        if processes is not None:
            processes.wait()
        return target

    def _failure(self, target: Path, error: Exception) -> OSError:
        reason = getattr(error, "strerror", None) or str(error)
        number = getattr(error, "errno", None) or errno.EIO
        if number == errno.EIO and self.folder.is_dir() and shutil.disk_usage(self.folder).free < _SPARE_BYTES:
            number, reason = errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({reason})"
        newest = newest_checkpoint(self.folder.parent)
        intact = "there is none before it" if newest is None else f"{newest} is complete"
        return OSError(number, f"the checkpoint {target} cannot be written: {reason}; {intact}")

    def _point_last_to(self, target: Path) -> None:
        link = self.folder / f".{LAST}-{os.getpid()}"
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(target.name)
        os.replace(link, self.folder / LAST)

    def _delete_old(self, step: int) -> None:
        """All but the newest; a directory gets another name first, so that none looks complete that is not."""
        if self._keep_last is None:
            return
        older = [directory for number, directory in _complete(self.folder) if number <= step]
        for directory in older[: -self._keep_last]:
            hidden = self.folder / f"{_DELETED}{directory.name}"
            shutil.rmtree(hidden, ignore_errors=True)
            os.rename(directory, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Of runs that were killed while they saved or deleted."""
        for entry in sorted(self.folder.iterdir()):
            half = re.fullmatch(rf"\.(\d+){re.escape(TEMPORARY)}.*", entry.name)
            if half is not None and entry.is_dir():
                temporary_sibling(self.folder / half[1]).rmdir()  # removes those of dead processes
            elif entry.name.startswith(_DELETED) or re.fullmatch(r"\.\d+\.pi0-fast-new", entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def _write_parts(folder: Path, tensors: Mapping[str, Tensor], processes: Processes) -> None:
    """This process' parts of sharded tensors, and one of those that all have alike.

    Raises:
        OSError: a part cannot be written, or the directory, which the first process made, is not there.
    """
    if not folder.parent.is_dir():
        raise OSError(
            errno.ENOENT,
            f"process {processes.rank} does not see {folder.parent}, which process 0 made: with --distributed=fsdp on "
            "several machines, --output_dir must be on a file system that all of them share",
        )
    try:
        with processes.reaching():
            save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=processes.group)
    except CheckpointException as error:
        raise OSError(errno.EIO, str(error)) from error


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint that a run's directory got last, or None.

    That is where `last` leads, unless a kill came between a checkpoint and its link. Higher steps that were there
    before are of a run that was gone back from, and do not count.
    """
    folder = output_dir / CHECKPOINTS
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            replaced = re.fullmatch(r"\.(\d+)\.pi0-fast-old", entry.name)
            if replaced is not None:
                finish_interrupted_swap(folder / replaced[1])
    complete = _complete(folder)
    linked = os.path.basename(os.path.realpath(folder / LAST))
    places = [place for place, (_, directory) in enumerate(complete) if directory.name == linked]
    if not places:
        return complete[-1][1] if complete else None
    since = _written(complete[places[0]][1])
    later = [directory for _, directory in complete[places[0] + 1 :] if _written(directory) > since]
    return later[-1] if later else complete[places[0]][1]


def _written(checkpoint: Path) -> int:
    return (checkpoint / TRAINING_STATE / STEP_FILE).stat().st_mtime_ns


def _complete(folder: Path) -> list[tuple[int, Path]]:
    """Step and directory of every checkpoint, in the order of the steps."""
    if not folder.is_dir():
        return []
    named = [entry for entry in folder.iterdir() if re.fullmatch(r"\d+", entry.name)]
    return sorted(
        (int(entry.name), entry)
        for entry in named
        if (entry / TRAINING_STATE / STEP_FILE).is_file() and (entry / PRETRAINED_MODEL).is_dir()
    )


def read_state(checkpoint: Path) -> SavedState:
    """What training goes on from.

    Raises:
        PolicyError: a file is missing or damaged, or of another version.
    """
    folder = checkpoint / TRAINING_STATE
    content = read_json_object(folder / STEP_FILE)
    for name, value in _FORMAT.items():
        if content.pop(name, None) != value:
            raise PolicyError(
                f"{folder / STEP_FILE}: no training state of this version ({name} is not {value!r}); LeRobot's are not "
                "read: begin a new run with --policy.path"
            )
    step = content.pop("step", None)
    if isinstance(step, bool) or not isinstance(step, int):
        raise PolicyError(f"{folder / STEP_FILE}: 'step' is {step!r}")
    sharded = (folder / OPTIMIZER_FOLDER).is_dir()
    path = folder / (OPTIMIZER_FOLDER if sharded else OPTIMIZER_FILE)
    try:
        tensors = _Sharded(path) if sharded else _InOneFile(path)
    except (OSError, SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error
    return SavedState(checkpoint, step, content, tensors)
