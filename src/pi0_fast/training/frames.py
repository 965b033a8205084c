"""A LeRobot dataset as training samples: pictures, state, the chunk of actions from here on, and the task.

Numbers are held in memory as float32; pictures are decoded when asked for. Names are the dataset's own: the policy's
`rename_map` changes them later. What is not here: shuffling (`sampler.py`), what the model makes of a sample
(`preparation.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.data.cameras import Cameras
from pi0_fast.data.reader import LeRobotReader
from pi0_fast.types import DatasetError

#: Column of datasets whose pictures were not rendered at each step: how many steps ago that of a row was (see record).
IMAGE_AGE = "image_age"
#: (image uint8 [h, w, 3], epoch, index of the frame in the dataset, camera key) -> image uint8 [h, w, 3].
ImageTransform = Callable[[npt.NDArray[np.uint8], int, int, str], npt.NDArray[np.uint8]]


class FrameDataset:
    """A sample for each frame of a dataset that a chunk may start at; map style, without torch.

    A sample has the dataset's own keys:

        each camera       uint8 [height, width, 3]
        state_key         float32 [Ds]
        action_key        float32 [chunk_size, D]; behind the episode's end its last action is repeated
        action_is_pad     bool [chunk_size]; True behind the episode's end
        task              text
        index             frame of the dataset, counted over all episodes
        episode_index, frame_index

    It can be pickled and forked; each process decodes by itself.

    Attributes:
        chunk_size, camera_keys, state_key, action_key: as given.
        fps: frames a second.
        episodes: indices of the episodes that are sampled from, ascending.
        repeated: frames that no chunk starts at, because their pictures are those of an earlier one (column image_age).
        skipped: episodes that no chunk starts in (too short with `whole_only`, or without frames): index -> length.
    """

    def __init__(
        self,
        reader: LeRobotReader,
        *,
        chunk_size: int,
        camera_keys: Sequence[str],
        state_key: str = "observation.state",
        action_key: str = "action",
        episodes: Collection[int] | None = None,
        transforms: ImageTransform | None = None,
        cache_dir: str | Path | None = None,
        whole_only: bool = False,
    ) -> None:
        """Read the numbers and find the pictures.

        Args:
            reader: the dataset.
            chunk_size: steps a chunk.
            camera_keys: columns of images or video; may be empty.
            state_key: column of the state.
            action_key: column of the action.
            episodes: indices of the episodes to sample from; None for all.
            transforms: applied to each picture; see `transforms.py`.
            cache_dir: keep decoded frames here; see `data/frame_cache.py`.
            whole_only: only frames that a whole chunk follows, so that no step is padded.

        Raises:
            DatasetError: unknown keys or episodes, missing or damaged files, a number that is not finite, a task that
                nobody named, no frame to start at.
        """
        if chunk_size < 1:
            raise DatasetError(f"chunk_size is {chunk_size}; it must be 1 or more")
        self.chunk_size, self.camera_keys = chunk_size, tuple(camera_keys)
        self.state_key, self.action_key = state_key, action_key
        self.fps = reader.fps
        self.transforms = transforms
        self._cameras = Cameras(reader, self.camera_keys, episodes, cache_dir=cache_dir)
        self._read(reader, episodes)
        lengths = np.diff(self._bounds)
        usable = lengths - (chunk_size - 1 if whole_only else 0)
        self.skipped = {
            index: length
            for index, length, count in zip(self._indices.tolist(), lengths.tolist(), usable.tolist(), strict=True)
            if count < 1
        }
        self.episodes = tuple(index for index in self._indices.tolist() if index not in self.skipped)
        if not self.episodes:
            raise DatasetError(
                f"no frame of {reader.repo_id} can start a chunk of {chunk_size} steps: its longest episode has "
                f"{max(lengths.tolist(), default=0)} frames; choose a smaller chunk_size"
            )
        starts = np.concatenate(
            [np.arange(first, first + max(count, 0)) for first, count in zip(self._bounds, usable, strict=False)]
        )
        self._starts = starts[self._fresh[starts]]
        self.repeated = len(starts) - len(self._starts)
        if not len(self._starts):
            raise DatasetError(f"no frame of {reader.repo_id} has pictures of its own ({IMAGE_AGE} 0): record it anew")

    def __len__(self) -> int:
        return len(self._starts)

    def __repr__(self) -> str:
        return (
            f"FrameDataset({len(self)} samples of {len(self.episodes)} episodes, chunk_size={self.chunk_size}, "
            f"cameras: {', '.join(self.camera_keys) or 'none'})"
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of several indices; their pictures are decoded together."""
        batch = self.batch(indices)
        return [{key: values[row] for key, values in batch.items()} for row in range(len(indices))]

    def batch(
        self,
        indices: Sequence[int] | npt.NDArray[np.int64],
        epochs: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> dict[str, Any]:
        """Samples stacked: arrays [B, ...], `task` a list; a camera whose pictures differ in size is a list of arrays.

        Args:
            indices: of samples, 0 to len - 1.
            epochs: of each sample, for the random transforms; 0 when not given.

        Raises:
            DatasetError: a picture cannot be decoded; names file, episode and time.
        """
        rows = self._starts[np.asarray(indices, np.int64)]
        steps = rows[:, None] + np.arange(self.chunk_size)
        ends = self._bounds[self._episode[rows] + 1][:, None]
        frames = rows - self._bounds[self._episode[rows]]
        episodes = self._indices[self._episode[rows]]
        index = self._first[self._episode[rows]] + frames
        batch: dict[str, Any] = {key: self._pictures(key, rows) for key in self.camera_keys}
        if self.transforms is not None:
            turns = np.zeros(len(rows), np.int64) if epochs is None else np.asarray(epochs)
            for key in self.camera_keys:
                batch[key] = [
                    self.transforms(image, int(epoch), int(frame), key)
                    for image, epoch, frame in zip(batch[key], turns, index, strict=True)
                ]
        for key in self.camera_keys:
            if len({image.shape for image in batch[key]}) == 1:
                batch[key] = np.stack(batch[key])
        batch[self.state_key] = self._states[rows]
        batch[self.action_key] = self._actions[np.minimum(steps, ends - 1)]
        batch["action_is_pad"] = steps >= ends
        batch["task"] = [self._texts[number] for number in self._tasks[rows].tolist()]
        batch.update({"index": index, "episode_index": episodes, "frame_index": frames})
        return batch

    @property
    def steps_left(self) -> npt.NDArray[np.int64]:
        """Of each sample, the frames from its own to the end of its episode, int64 [len]."""
        left: npt.NDArray[np.int64] = self._bounds[self._episode[self._starts] + 1] - self._starts
        return left

    @property
    def whole(self) -> npt.NDArray[np.int64]:
        """The samples that a whole chunk follows, without padded steps: indices int64, ascending."""
        return np.flatnonzero(self.steps_left >= self.chunk_size)

    @property
    def digest(self) -> str:
        """12 hexadecimal digits: which frames of the dataset the samples are, in order, and their tasks' texts."""
        number = self._episode[self._starts]
        index = self._first[number] + self._starts - self._bounds[number]
        found = hashlib.sha256(np.ascontiguousarray(index, "<i8").data)
        found.update(np.ascontiguousarray(self._tasks[self._starts], "<i4").data)
        found.update("\0".join(self._texts).encode())
        return found.hexdigest()[:12]

    def observations(self, indices: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Tasks and states [B, Ds] of some samples, without their pictures."""
        rows = self._starts[indices]
        return [self._texts[number] for number in self._tasks[rows].tolist()], self._states[rows]

    def _pictures(self, key: str, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        """The pictures of some rows; those of one episode are decoded together."""
        found: dict[int, npt.NDArray[np.uint8]] = {}
        for number in np.unique(self._episode[rows]).tolist():
            inside = np.unique(rows[self._episode[rows] == number])
            images = self._cameras.frames(
                key,
                int(self._indices[number]),
                (inside - self._bounds[number]).tolist(),
                self._times[self._bounds[number] : self._bounds[number + 1]],
            )
            found.update(zip(inside.tolist(), images, strict=True))
        return [found[row] for row in rows.tolist()]

    # --- reading --------------------------------------------------------------------------------------------------

    def _read(self, reader: LeRobotReader, episodes: Collection[int] | None) -> None:
        """The columns of numbers, episode behind episode."""
        keys = [self.state_key, self.action_key]
        optional: list[str] = [key for key in ("timestamp", "task_index") if key in reader.features]
        if self.camera_keys and IMAGE_AGE in reader.features:  # where nobody looks at pictures, any frame will do
            optional.append(IMAGE_AGE)
        wanted = {record.index for record in reader.episodes} if episodes is None else {int(e) for e in episodes}
        records = [record for record in reader.episodes if record.index in wanted]
        firsts = np.cumsum([0, *(record.length for record in reader.episodes)])
        place = {record.index: number for number, record in enumerate(reader.episodes)}
        self._indices = np.array([record.index for record in records], np.int64)
        self._first = np.array([firsts[place[record.index]] for record in records], np.int64)
        self._bounds = np.cumsum([0, *(record.length for record in records)]).astype(np.int64)
        total = int(self._bounds[-1])
        self._episode = np.repeat(np.arange(len(records)), np.diff(self._bounds))
        self._times = np.empty(total)
        self._fresh = np.ones(total, bool)
        self._tasks = np.zeros(total, np.int32)
        names = _TaskNames(reader)
        columns: dict[str, npt.NDArray[np.float32]] = {}
        found = reader.iter_episodes(list(dict.fromkeys([*keys, *optional])), wanted)
        for number, (record, episode) in enumerate(zip(records, found, strict=True)):
            rows = slice(int(self._bounds[number]), int(self._bounds[number + 1]))
            for key in keys:
                values = _float_rows(episode.columns[key])
                _refuse_not_finite(reader, key, record.index, values)
                columns.setdefault(key, np.empty((total, values.shape[1]), np.float32))[rows] = values
            if "timestamp" in optional:
                times = _float_rows(episode.columns["timestamp"])
                _refuse_not_finite(reader, "timestamp", record.index, times)
                self._times[rows] = times[:, 0]
            else:
                self._times[rows] = np.arange(record.length) / reader.fps
            if IMAGE_AGE in optional:
                self._fresh[rows] = episode.columns[IMAGE_AGE] == 0
            self._tasks[rows] = names.numbers(record.index, record.tasks, episode.columns.get("task_index"))
        self._texts = names.texts
        empty = np.empty((0, 0), np.float32)
        self._states, self._actions = columns.get(self.state_key, empty), columns.get(self.action_key, empty)


class _TaskNames:
    """The text of each frame: from the column task_index and the tasks file, else the episode's only task."""

    def __init__(self, reader: LeRobotReader) -> None:
        self._reader = reader
        self._by_index = reader.task_texts() if "task_index" in reader.features else {}
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def numbers(
        self, episode: int, tasks: Sequence[str], column: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.int32] | int:
        """Places in `texts`, one a frame or one for all."""
        if column is not None and self._by_index:
            present, inverse = np.unique(column, return_inverse=True)
            if unknown := [index for index in present.tolist() if index not in self._by_index]:
                raise DatasetError(
                    f"episode {episode} of {self._reader.repo_id} has task_index {unknown[0]}, which the tasks file "
                    f"in {self._reader.root / 'meta'} does not list; correct one of them"
                )
            places = [self._place(self._by_index[index]) for index in present.tolist()]
            return np.array(places, np.int32)[inverse.reshape(-1)]
        if len(tasks) != 1:
            raise DatasetError(
                f"episode {episode} of {self._reader.repo_id} has {len(tasks)} tasks and no task_index that says which "
                "frame has which; write meta/tasks and the column task_index, or leave the episode out"
            )
        return self._place(tasks[0])

    def _place(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _float_rows(values: np.ndarray) -> npt.NDArray[np.float32]:
    """float32 [T, D] also of a column of single integers."""
    wide = values.astype(np.float32, copy=False)
    return wide[:, None] if wide.ndim == 1 else wide


def _refuse_not_finite(reader: LeRobotReader, key: str, episode: int, values: np.ndarray) -> None:
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        frame, dim = wrong[0].tolist()
        names = reader.feature(key).names
        name = f" ({names[dim]})" if names else ""
        raise DatasetError(
            f"{key} of {reader.repo_id}: dimension {dim}{name} of frame {frame} in episode {episode} is "
            f"{values[frame, dim]} (one of {len(wrong)} values there); correct it, or leave the episode out"
        )
