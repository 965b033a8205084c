"""The pictures of a dataset by camera, episode and frame, whether they lie in video files or in parquet columns.

An object of this kind holds paths and numbers only until it is asked for a frame; it can be pickled, forked and used
in many processes at once. What is not here: numbers and tasks (`reader.py`), and what is done with pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pi0_fast.data.frame_cache import FrameCache
from pi0_fast.data.images import ImageColumns, decode_image
from pi0_fast.data.video import Image, VideoDecoders, decoder_version
from pi0_fast.data.video_files import VideoPlace
from pi0_fast.types import DatasetError

if TYPE_CHECKING:
    from pi0_fast.data.reader import LeRobotReader

_PIECE = 32  # frames of an episode in memory at once, when all of it is decoded


class Cameras:
    """Frames of some cameras of a dataset, decoded when asked for."""

    def __init__(
        self,
        reader: LeRobotReader,
        keys: Sequence[str],
        episodes: Collection[int] | None = None,
        *,
        cache_dir: str | Path | None = None,
        open_files: int = 32,
    ) -> None:
        """Find where the pictures of these episodes are; nothing is decoded.

        Args:
            reader: the dataset.
            keys: cameras; columns of dtype video or image.
            episodes: None for all.
            cache_dir: keep decoded frames in this directory; see `frame_cache.py`.
            open_files: how many video files stay open.

        Raises:
            DatasetError: an unknown camera, one without three channels, a missing file.
        """
        self.keys = tuple(keys)
        self._root, self._fps = reader.root, reader.fps
        self._videos: dict[str, dict[int, VideoPlace]] = {}
        for key in self.keys:
            feature = reader.feature(key)
            if key not in reader.camera_keys:
                raise DatasetError(
                    f"column {key!r} of {reader.repo_id} holds {feature.dtype}, not images; cameras: "
                    f"{', '.join(reader.camera_keys) or 'none'}"
                )
            if len(feature.shape) != 3 or 3 not in (feature.shape[0], feature.shape[-1]):
                raise DatasetError(
                    f"camera {key!r} of {reader.repo_id} is declared with the shape {list(feature.shape)}; needed are "
                    "three channels, [height, width, 3] or [3, height, width]"
                )
            if feature.dtype == "video":
                self._videos[key] = reader.video_places(key, episodes)
        in_columns = len(self._videos) < len(self.keys)
        self._rows: dict[int, tuple[str, int]] = reader.row_places(episodes) if in_columns else {}
        self._decoders = VideoDecoders(open_files)
        self._columns = ImageColumns(self._root)
        self._cache = None if cache_dir is None else FrameCache(Path(cache_dir))
        self._digests: dict[Path, bytes] = {}
        self._names: dict[tuple[str, int], str] = {}

    def frames(self, key: str, episode: int, numbers: Sequence[int], times: npt.NDArray[np.float64]) -> list[Image]:
        """Frames of a camera in one episode.

        Args:
            key: the camera.
            episode: its index.
            numbers: frame_index of those wanted.
            times: float64 [T], timestamps of *all* frames of the episode, seconds from its start.

        Returns:
            uint8 [height, width, 3], one for each number; not to be written to.

        Raises:
            DatasetError: a frame cannot be decoded; names file, episode and time.
        """
        if self._cache is None:
            return self._decode(key, episode, numbers, times)
        name = self._content(key, episode, times)
        whole = self._cache.episode(name, len(times), lambda: self._decode_all(key, episode, times))
        return [whole[number] for number in numbers]

    def _decode(self, key: str, episode: int, numbers: Sequence[int], times: npt.NDArray[np.float64]) -> list[Image]:
        if key in self._videos:
            place = self._videos[key][episode]
            wanted = (place.start_s + times[np.asarray(numbers)]).tolist()
            return self._decoders.frames(self._root / place.file, wanted, self._fps, episode)
        path, encoded = self._encoded(key, episode, numbers)
        return [
            decode_image(data, f"{path}: column {key}, episode {episode}, frame {number}, {times[number]:.4f} s")
            for data, number in zip(encoded, numbers, strict=True)
        ]

    def _decode_all(self, key: str, episode: int, times: npt.NDArray[np.float64]) -> Iterator[Image]:
        for first in range(0, len(times), _PIECE):
            yield from self._decode(key, episode, range(first, min(first + _PIECE, len(times))), times)

    def _encoded(self, key: str, episode: int, numbers: Sequence[int]) -> tuple[Path, list[bytes]]:
        file, first = self._rows[episode]
        path = self._root / file
        return path, self._columns.encoded(path, key, [first + number for number in numbers], episode)

    def _content(self, key: str, episode: int, times: npt.NDArray[np.float64]) -> str:
        """A hash of what the pictures of an episode are decoded from."""
        if (key, episode) not in self._names:
            digest = hashlib.sha256(f"1 {decoder_version()} {len(times)}".encode())
            if key in self._videos:
                place = self._videos[key][episode]
                digest.update(self._file_digest(self._root / place.file, episode))
                digest.update(np.array([place.start_s, *times]).tobytes())
            else:
                for number in range(len(times)):
                    _, (data,) = self._encoded(key, episode, [number])
                    digest.update(hashlib.sha256(data).digest())
            self._names[key, episode] = digest.hexdigest()
        return self._names[key, episode]

    def _file_digest(self, path: Path, episode: int) -> bytes:
        if path not in self._digests:
            digest = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while piece := file.read(1 << 22):
                        digest.update(piece)
            except OSError as error:
                raise DatasetError(f"{path} (episode {episode}) cannot be read: {error}") from error
            self._digests[path] = digest.digest()
        return self._digests[path]
