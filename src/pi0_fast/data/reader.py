"""Opening a LeRobot dataset (v2.0, v2.1, v3.0) and reading the columns that a job needs, episode by episode.

The dataset is never written to. Reading actions and states works without `videos/`; of video and images this file
says only where they lie (decoding: `cameras.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from pi0_fast.data.fingerprint import column_digest
from pi0_fast.data.frames import FrameFile
from pi0_fast.data.locate import locate_dataset
from pi0_fast.data.metadata import IMAGE_DTYPES, read_metadata, read_statistics, read_tasks
from pi0_fast.data.rounding import Rounding
from pi0_fast.data.video_files import VideoPlace, check_videos, read_video_places
from pi0_fast.types import DatasetError, Episode, EpisodeRecord, Feature

_NUMERIC_DTYPE = re.compile(r"u?int\d*|b?float\d*|double|half|bool\w*")


def open_dataset(
    repo_id: str,
    *,
    root: str | Path | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> LeRobotReader:
    """Find a LeRobot dataset, read and check its metadata.

    Looked for in this order: `root`, and then nowhere else; `$HF_LEROBOT_HOME/{repo_id}` (default
    `~/.cache/huggingface/lerobot/{repo_id}`, only without a `revision`); the Hugging Face hub, from which
    `meta/` and `data/` are fetched.

    Args:
        repo_id: `owner/name`; with `root` only a label.
        root: directory that holds `meta/` and `data/`; the network is then never touched.
        revision: branch, tag or commit on the hub.
        token: hub token, True for the stored one, False for none.
        cache_dir: hub cache directory.
        local_files_only: use the hub cache as it is, without the network (HF_HUB_OFFLINE=1 does the same).

    Raises:
        DatasetError: the dataset is not found, access is refused, or its metadata is damaged or contradicts
            itself.
    """
    location = locate_dataset(
        repo_id,
        root=root,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    return LeRobotReader(repo_id, location.root, origin=location.origin, revision=location.revision)


class LeRobotReader:
    """A LeRobot dataset in a directory, read-only. Made by `open_dataset`.

    Attributes:
        repo_id: its name.
        root: directory with `meta/` and `data/`.
        version: ``"v2.0"``, ``"v2.1"`` or ``"v3.0"``.
        fps: frames per second.
        robot_type: as declared, or None.
        features: column name -> Feature, in declared order, images included.
        episodes: one record an episode, in ascending index.
        total_frames: sum of the episodes' lengths; equal to info.json, which is checked.
        origin: ``"directory"`` or ``"hub"``.
        revision: commit hash of a hub snapshot, else None.
    """

    def __init__(
        self,
        repo_id: str,
        root: str | Path,
        *,
        origin: Literal["directory", "hub"] = "directory",
        revision: str | None = None,
    ) -> None:
        self.repo_id = repo_id
        self.root = Path(root)
        self.origin = origin
        self.revision = revision
        metadata = read_metadata(self.root)
        self.version = metadata.version
        self.fps = metadata.fps
        self.robot_type = metadata.robot_type
        self.features: dict[str, Feature] = metadata.features
        self.episodes: tuple[EpisodeRecord, ...] = metadata.episodes
        self.total_frames = metadata.total_frames
        self._files = metadata.files
        self._lengths_of_file: dict[str, dict[int, int]] = {}
        for record in self.episodes:
            self._lengths_of_file.setdefault(self._files[record.index], {})[record.index] = record.length
        self._checked: dict[str, dict[int, tuple[int, int]]] = {}
        self._roundings: dict[str, Rounding] = {}
        self._statistics: dict[str, dict[str, np.ndarray]] | None = None

    def __repr__(self) -> str:
        return (
            f"LeRobotReader({self.repo_id!r}, {self.version}, {len(self.episodes)} episodes, "
            f"{self.total_frames} frames, {self.fps:g} fps)"
        )

    def feature(self, key: str) -> Feature:
        """The declaration of a column.

        Raises:
            DatasetError: there is no such column; names those that are there, the most similar first.
        """
        if key in self.features:
            return self.features[key]
        alike = difflib.get_close_matches(key, self.features, n=len(self.features), cutoff=0.0)
        hint = f"; did you mean {alike[0]!r}?" if difflib.get_close_matches(key, self.features, cutoff=0.4) else "."
        raise DatasetError(
            f"dataset {self.repo_id} has no column {key!r}{hint} Present: {', '.join(alike)} (--action_key "
            "and --state_key choose the columns)"
        )

    def statistics(self, key: str) -> dict[str, np.ndarray] | None:
        """What `meta/stats.json` (v2.0, v3.0) says of a column, name -> float64 [D]; None for nothing.

        Names are those of the file (min, max, mean, std, count, q01, ...), and so are the values: how they
        were computed is not known. v2.1 keeps statistics of each episode only, for which None is returned.

        Raises:
            DatasetError: stats.json is damaged, or a length in it contradicts the column.
        """
        if self._statistics is None:
            path = self.root / "meta" / "stats.json"
            self._statistics = {} if self.version == "v2.1" else read_statistics(path, self.features)
        found = self._statistics.get(key)
        return None if found is None else {name: value.copy() for name, value in found.items()}

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Columns that are images or video, in declared order."""
        return tuple(key for key, feature in self.features.items() if feature.dtype in IMAGE_DTYPES)

    def task_texts(self) -> dict[int, str]:
        """What the column `task_index` stands for: index -> text; {} for a dataset without a tasks file.

        Raises:
            DatasetError: the tasks file is damaged.
        """
        return read_tasks(self.root, self.version)

    def video_places(self, key: str, episodes: Collection[int] | None = None) -> dict[int, VideoPlace]:
        """Episode index -> where its video of a camera is; the files are there, but none is opened.

        Raises:
            DatasetError: unknown camera or episode, a file that is missing, metadata that does not say where.
        """
        if self.feature(key).dtype != "video":
            raise DatasetError(f"column {key!r} of {self.repo_id} is declared as {self.feature(key).dtype}, not video")
        wanted = self._wanted(episodes)
        places = read_video_places(self.root, self.version, key, wanted)
        if missing := [index for index in wanted if index not in places]:
            raise DatasetError(f"{self.root / 'meta'} does not say where camera {key!r} of episode {missing[0]} is")
        places = {index: places[index] for index in wanted}
        check_videos(self.root, key, places)
        return places

    def row_places(self, episodes: Collection[int] | None = None) -> dict[int, tuple[str, int]]:
        """Episode index -> (parquet file below the root, first row of the episode in it).

        Raises:
            DatasetError: as `iter_episodes`.
        """
        wanted = self._wanted(episodes)
        for name in self._present_files(wanted):
            if name not in self._checked:
                with FrameFile(self.root / name, []) as file:
                    file.check(self._lengths_of_file[name])
                    self._checked[name] = file.rows
        # An episode of no frames has no rows.
        return {i: (self._files[i], self._checked[self._files[i]].get(i, (0, 0))[0]) for i in wanted}

    def content_digest(self, keys: Sequence[str]) -> str:
        """A hash of what `iter_episodes(keys)` would give, over all episodes; see `fingerprint.py`.

        Raises:
            DatasetError: as `iter_episodes`, for unknown keys and missing or damaged files.
        """
        features = self._numeric_features(keys)
        files = self._present_files(record.index for record in self.episodes)
        return column_digest(self.root, files, self.episodes, list(features.values()))

    def iter_episodes(self, keys: Sequence[str], episodes: Collection[int] | None = None) -> Iterator[Episode]:
        """Read columns, episode by episode in ascending index, from the files of these episodes only.

        Keys, episodes and the presence of the files are checked here, before the first episode is read. Each
        file is checked against the metadata when it is opened: number of frames of each of its episodes,
        order of the frames. Values are not checked for NaN and infinity. float64 columns that lose much of their
        range when they become float32 are named in a warning of the log, when the reading ends.

        Args:
            keys: columns to read. Float columns come as C-contiguous float32 [T, D] (scalars [T, 1]), columns
                declared as one integer or boolean as int64 [T]. Arrays are the caller's own.
            episodes: indices of the wanted episodes; None for all.

        Raises:
            DatasetError: unknown key or episode, an image asked as numbers, a missing, damaged or
                contradicting file.
        """
        features = self._numeric_features(keys)
        wanted = self._wanted(episodes)
        self._present_files(wanted)
        return self._read(features, wanted)

    def _present_files(self, indices: Iterable[int]) -> list[str]:
        """The files of these episodes, below the root, once each; an error when one is missing."""
        files = list(dict.fromkeys(self._files[index] for index in indices))
        missing = [file for file in files if not (self.root / file).is_file()]
        if missing:
            raise DatasetError(
                f"{self.root / missing[0]} is missing ({len(missing)} of {len(files)} data files of "
                f"{self.repo_id} are); fetch the dataset again"
            )
        return files

    def _numeric_features(self, keys: Sequence[str]) -> dict[str, Feature]:
        if isinstance(keys, str):
            keys = [keys]
        features = {key: self.feature(key) for key in keys}
        if not features:
            raise DatasetError(f"no column of {self.repo_id} was asked for; present: {', '.join(self.features)}")
        for key, feature in features.items():
            if feature.dtype in IMAGE_DTYPES:
                numeric = [name for name, other in self.features.items() if other.dtype not in IMAGE_DTYPES]
                raise DatasetError(
                    f"column {key!r} of {self.repo_id} is an image ({feature.dtype}), not numbers; columns "
                    f"of numbers: {', '.join(numeric)}"
                )
            if not _NUMERIC_DTYPE.fullmatch(feature.dtype):
                raise DatasetError(
                    f"column {key!r} of {self.repo_id} is declared as {feature.dtype!r}, not numbers; choose another "
                    "column, or correct meta/info.json"
                )
            if 0 in feature.shape:
                raise DatasetError(
                    f"column {key!r} of {self.repo_id} is declared with the shape {list(feature.shape)}: it holds "
                    "nothing; choose another column, or correct meta/info.json"
                )
        return features

    def _wanted(self, episodes: Collection[int] | None) -> list[int]:
        present = [record.index for record in self.episodes]
        if episodes is None:
            return present
        wanted = sorted({int(index) for index in episodes})
        if unknown := sorted(set(wanted) - set(present)):
            span = f"{present[0]} to {present[-1]}" if present else "none"
            raise DatasetError(
                f"dataset {self.repo_id} has no episode {unknown[0]}; it has {len(present)} episodes ({span})"
            )
        return wanted

    def _read(self, features: dict[str, Feature], wanted: list[int]) -> Iterator[Episode]:
        # Kept over readings: the more episodes were seen, the better the range is known.
        for key, feature in features.items():
            self._roundings.setdefault(key, Rounding(key, feature.names))
        roundings = {key: self._roundings[key] for key in features}
        try:
            for name, indices in groupby(wanted, key=self._files.__getitem__):
                with FrameFile(self.root / name, list(features), self._checked.get(name)) as file:
                    if name not in self._checked:
                        file.check(self._lengths_of_file[name])
                        self._checked[name] = file.rows
                    for index in indices:
                        yield file.episode(index, features, roundings)
        finally:
            for rounding in roundings.values():
                rounding.tell()
