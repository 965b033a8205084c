"""The pictures of one camera of a dataset that is written: video files, or encoded images for a parquet column.

A video file holds one episode, which LeRobot v3.0 allows and which keeps a failed episode from harming another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pi0_fast.data.image_statistics import FRAMES, ImageStatistics
from pi0_fast.data.images import encode_png, image_type
from pi0_fast.data.video import VideoDecoders
from pi0_fast.data.video_encoding import copy_video, describe_video, encode_video
from pi0_fast.types import DatasetError, Feature

VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_FILES_PER_CHUNK = 1000
Image = npt.NDArray[np.uint8]


class CameraWriter:
    """Writes the episodes of one camera below a directory, and counts its statistics over all of them."""

    def __init__(self, feature: Feature, directory: Path, fps: float, codec: str) -> None:
        self.feature, self._directory, self._fps, self._codec = feature, directory, fps, codec
        self.statistics = ImageStatistics()
        self._info: dict[str, Any] | None = None

    @property
    def in_column(self) -> bool:
        """Whether the pictures go into the parquet file rather than into a video."""
        return self.feature.dtype == "image"

    def write(self, pictures: Any, index: int, length: int, where: str) -> tuple[dict[str, Any], ImageStatistics, Any]:
        """Write one episode.

        Args:
            pictures: `length` images uint8 [height, width, 3], in an array or one after the other; for a video also
                the path of a file, which is copied.
            index: of the episode.
            length: frames it must have.
            where: begins errors.

        Returns:
            What `meta/episodes` says of it, its statistics, and the arrow array of its images (None for video).

        Raises:
            DatasetError: another number of images, another shape or type, or they cannot be encoded.
            OSError: a file cannot be written.
        """
        counted = ImageStatistics()
        if self.in_column:
            encoded = [encode_png(image) for image in self._checked(pictures, length, counted, where)]
            self._check_count(len(encoded), length, where)
            paths = [f"frame-{number:06d}.png" for number in range(length)]
            array = pa.StructArray.from_arrays(
                [pa.array(encoded, pa.binary()), pa.array(paths, pa.string())], fields=list(image_type())
            )
            return {}, counted, array
        path = self._path(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(pictures, str | Path):
            self._check_count(copy_video(Path(pictures), path, where), length, where)
            times = (np.unique(np.linspace(0, length - 1, FRAMES).astype(int)) / self._fps).tolist()
            decoders = VideoDecoders(1)
            for time in times:
                (image,) = decoders.frames(path, [time], self._fps, index)
                counted.add(self._image(image, where))
        else:
            images = self._checked(pictures, length, counted, where)
            self._check_count(encode_video(path, images, self._fps, self._codec, where), length, where)
        info = describe_video(path)
        if self._info not in (None, info):
            raise DatasetError(f"{where}: the video is {info}, those before are {self._info}; write them alike")
        self._info = info
        chunk, number = divmod(index, _FILES_PER_CHUNK)
        place = {"chunk_index": chunk, "file_index": number, "from_timestamp": 0.0, "to_timestamp": length / self._fps}
        return {f"videos/{self.feature.key}/{name}": value for name, value in place.items()}, counted, None

    def discard(self, index: int) -> None:
        """Remove the video of an episode that was not finished."""
        if not self.in_column:
            self._path(index).unlink(missing_ok=True)

    def declaration(self) -> dict[str, Any]:
        """The camera's entry in the features of info.json."""
        names = ["height", "width", "channels"]
        entry: dict[str, Any] = {"dtype": self.feature.dtype, "shape": list(self.feature.shape), "names": names}
        return entry if self._info is None else {**entry, "info": self._info}

    def _path(self, index: int) -> Path:
        chunk, number = divmod(index, _FILES_PER_CHUNK)
        return self._directory / VIDEO_PATH.format(video_key=self.feature.key, chunk_index=chunk, file_index=number)

    def _checked(self, pictures: Any, length: int, counted: ImageStatistics, where: str) -> Iterator[Image]:
        """The images one by one, some of them counted."""
        if not isinstance(pictures, Iterable):
            raise DatasetError(f"{where}: {type(pictures).__name__} is no images uint8 {list(self.feature.shape)}")
        step = max(length // FRAMES, 1)
        for number, image in enumerate(pictures):
            image = self._image(image, f"{where}, frame {number}")
            if number % step == 0:
                counted.add(image)
            yield image

    def _image(self, image: Any, where: str) -> Image:
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.shape != self.feature.shape:
            raise DatasetError(
                f"{where}: an image is {array.dtype} {list(array.shape)}, declared is uint8 {list(self.feature.shape)}"
            )
        return array

    def _check_count(self, count: int, length: int, where: str) -> None:
        if count != length:
            raise DatasetError(f"{where} has {count} images and {length} frames of the other columns")


def camera_feature(key: str, dtype: str, shape: tuple[Any, ...]) -> Feature:
    """The declaration of a camera that can be written, or a DatasetError."""
    if len(shape) != 3 or shape[2] != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise DatasetError(f"camera {key!r} has the shape {shape}; a shape (height, width, 3) is expected")
    if dtype == "video" and (shape[0] % 2 or shape[1] % 2):
        raise DatasetError(f"camera {key!r} has the shape {shape}; a video's height and width must be even")
    return Feature(key, dtype, shape, ("height", "width", "channels"))
