"""Decoded pictures kept on disk: one file an episode and camera, uint8 [frames, height, width, 3], memory-mapped.

The name of a file is a hash of what it was decoded from (the bytes of the video, the times of the frames, the version
of the decoder), so that a corrected video has another name and several datasets may share a directory. A file appears
complete, by renaming, or not at all; processes that want the same one wait for whoever came first. The first access to
an episode decodes all of it, which is quicker than frame by frame; 640 x 480 takes 0.9 MB a frame. Nothing is ever
deleted here except what killed processes left unfinished.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.types import DatasetError

Image = npt.NDArray[np.uint8]

_MAPS = 256  # open at once; a map takes addresses, but neither memory nor a file descriptor


class FrameCache:
    """A directory of decoded episodes. Pickles as its path; not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        """Make the directory.

        Raises:
            DatasetError: it cannot be made, or not be written to.
        """
        self.directory = directory.expanduser()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatasetError(f"cache_dir {self.directory} cannot be made: {error}") from error
        if not os.access(self.directory, os.W_OK):
            raise DatasetError(f"cache_dir {self.directory} cannot be written to; choose another --dataset.cache_dir")
        self._maps: OrderedDict[str, Image] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.directory, self._maps = state["directory"], OrderedDict()

    def episode(self, name: str, count: int, decode: Callable[[], Iterable[Image]]) -> Image:
        """The frames kept under a name, decoded first where they are not there.

        Args:
            name: hexadecimal digits that stand for the content.
            count: number of frames.
            decode: gives these frames in order, each uint8 [height, width, 3] and all of one size.

        Returns:
            uint8 [count, height, width, 3], memory-mapped, not to be written to.

        Raises:
            DatasetError: the disk is full, the frames differ in size, or a file of the cache is damaged; whatever
                `decode` raises.
        """
        found = self._maps.get(name)
        if found is None:
            path = self.directory / f"{name}.npy"
            if not path.exists():
                with self._lock(name) as alone:
                    if alone:
                        for left in self.directory.glob(f".{name}.*"):  # by killed processes
                            left.unlink(missing_ok=True)
                    if not path.exists():  # by another process, while this one waited
                        self._write(path, name, count, decode)
            found = self._maps[name] = _mapped(path, count)
            while len(self._maps) > _MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(name)
        return found

    @contextmanager
    def _lock(self, name: str) -> Iterator[bool]:
        """Wait for other processes that decode the same; False where the file system has no locks."""
        # Few files for all names: two that share one wait for each other without need, which costs little.
        try:
            file = (self.directory / f".lock-{name[:2]}").open("a")
        except OSError as error:
            raise DatasetError(f"cache_dir {self.directory} cannot be written to: {error}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # then several may decode the same: slower, with the same result
                yield False
                return
            yield True

    def _write(self, path: Path, name: str, count: int, decode: Callable[[], Iterable[Image]]) -> None:
        temporary = self.directory / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            with temporary.open("xb") as file:
                shape: tuple[int, ...] | None = None
                written = 0
                for image in decode():
                    if shape is None:
                        shape = image.shape
                        self._check_space(image.nbytes * count)
                        header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
                        np.lib.format.write_array_header_1_0(file, header)
                    if image.shape != shape:
                        raise DatasetError(
                            f"frames of {shape} and of {image.shape} in one episode cannot be kept together: leave "
                            "--dataset.cache_dir out"
                        )
                    file.write(np.ascontiguousarray(image).data)
                    written += 1
                if written != count:
                    raise DatasetError(f"{written} frames were decoded where {count} are expected")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise DatasetError(f"cache_dir {self.directory} cannot be written to: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise DatasetError(
                f"cache_dir {self.directory} has {free / 1e9:.1f} GB free, an episode needs {needed / 1e9:.1f} GB: "
                "make room, choose another --dataset.cache_dir, or leave it out"
            )


def _mapped(path: Path, count: int) -> Image:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{path} is damaged ({error}); delete it, and it is made anew") from error
    if found.dtype != np.uint8 or found.ndim != 4 or len(found) != count or found.shape[3] != 3:
        raise DatasetError(f"{path} holds {found.dtype} {found.shape}, not {count} pictures; delete it")
    return found  # type: ignore[no-any-return]
