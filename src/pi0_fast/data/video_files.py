"""Where the video of an episode is: one file an episode (v2.0, v2.1), or a stretch of a file of many (v3.0).

Reads metadata only; no video is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.parquet as pq

from pi0_fast.data.metadata import DEFAULT_CHUNKS_SIZE, parquet_errors, read_json
from pi0_fast.types import DatasetError

_DEFAULT_PATH = {
    "v2.0": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


@dataclass(frozen=True)
class VideoPlace:
    """The video of one camera in one episode.

    Attributes:
        file: below the dataset's root.
        start_s: the time in the file at which the episode's timestamp 0 lies; 0.0 where each episode has its file.
    """

    file: str
    start_s: float


def read_video_places(root: Path, version: str, key: str, episodes: list[int]) -> dict[int, VideoPlace]:
    """Episode index -> where its video of camera `key` is.

    Raises:
        DatasetError: `meta/` does not say it, or says it in a way that cannot be.
    """
    info = read_json(root / "meta" / "info.json")
    template = info.get("video_path") or _DEFAULT_PATH[version]
    if version == "v3.0":
        return _places_v30(root, template, key)
    chunks_size = info.get("chunks_size", DEFAULT_CHUNKS_SIZE)
    return {
        index: VideoPlace(
            _filled(root, template, video_key=key, episode_chunk=index // chunks_size, episode_index=index), 0.0
        )
        for index in episodes
    }


def check_videos(root: Path, key: str, places: Mapping[int, VideoPlace]) -> None:
    """Refuse a camera whose files are not all there.

    Raises:
        DatasetError: says how many are missing, the first of them, and which folders there are.
    """
    files = list(dict.fromkeys(place.file for place in places.values()))
    missing = [file for file in files if not (root / file).is_file()]
    if not missing:
        return
    videos = root / "videos"
    if not videos.is_dir():
        reason = "there is no folder videos/ at all: fetch it, or train without this camera"
    else:
        folders = sorted({str(path.parent.relative_to(root)) for path in videos.rglob("*.mp4")})
        shown = ", ".join(folders[:8]) + (", ..." if len(folders) > 8 else "")
        reason = (
            f"videos lie in: {shown or 'no folder'}; fetch what is missing, or correct video_path in meta/info.json"
        )
    raise DatasetError(
        f"{root / missing[0]} is missing ({len(missing)} of {len(files)} video files of camera {key!r} are): {reason}"
    )


def _places_v30(root: Path, template: Any, key: str) -> dict[int, VideoPlace]:
    names = {name: f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")}
    places: dict[int, VideoPlace] = {}
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        with parquet_errors(path), pq.ParquetFile(path) as file:
            if missing := [name for name in names.values() if name not in file.schema_arrow.names]:
                raise DatasetError(f"{path} has no column {missing[0]!r}: it does not say where camera {key!r} is")
            rows = file.read(columns=["episode_index", *names.values()]).to_pylist()
        for row in rows:
            chunk, number, start = (row[name] for name in names.values())
            where = f"{path}: the video of camera {key!r} in episode {row['episode_index']}"
            if not all(isinstance(value, int) and value >= 0 for value in (chunk, number)):
                raise DatasetError(f"{where} lies in chunk {chunk!r}, file {number!r}, which are no numbers of files")
            if not isinstance(start, int | float) or not math.isfinite(start) or start < 0:
                raise DatasetError(f"{where} begins at {start!r} seconds")
            file_name = _filled(root, template, video_key=key, chunk_index=chunk, file_index=number)
            places[row["episode_index"]] = VideoPlace(file_name, float(start))
    return places


def _filled(root: Path, template: Any, **values: Any) -> str:
    """The file that a template names; none leads out of the dataset."""
    where = f"{root / 'meta' / 'info.json'}: video_path {template!r}"
    try:
        filled = str(template).format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DatasetError(f"{where} is no template of {', '.join(values)}") from error
    if PurePosixPath(filled).is_absolute() or ".." in PurePosixPath(filled).parts:
        raise DatasetError(f"{where} leads out of the dataset")
    return filled
