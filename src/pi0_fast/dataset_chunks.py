"""A dataset as action chunks: which columns, dimensions, episodes and windows of it are used, read in bounded memory.

What fitting and inspecting have in common. Left out: files (data/), what a chunk is (actions/chunks.py), and which of
the windows are taken, which the caller says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.chunks import ActionSelection, sample_starts, window_count
from pi0_fast.data import LeRobotReader
from pi0_fast.data.columns import LARGEST_EXACT
from pi0_fast.display import warn
from pi0_fast.types import DatasetError, Episode, Feature

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

#: Numbers in a block of chunks.
_BLOCK_VALUES = 1 << 22
#: Dimensions of a vector, at most: beyond this the declaration is damaged, and would fill the memory.
_MOST_DIMS = 1 << 16


def vector_feature(reader: LeRobotReader, key: str) -> Feature:
    """The declaration of a column that holds one vector per frame (one number counts as a vector of one).

    Raises:
        DatasetError: no such column, a column of matrices, of nothing, or of more dimensions than any robot has.
    """
    feature = reader.feature(key)
    if len(feature.shape) > 1:
        raise DatasetError(f"column {key!r} has shape {list(feature.shape)}; needed is one vector per frame")
    if len(feature.shape) == 0:
        return Feature(feature.key, feature.dtype, (1,), feature.names)
    if not 1 <= feature.shape[0] <= _MOST_DIMS:
        raise DatasetError(
            f"column {key!r} of {reader.root} is declared with shape {list(feature.shape)}; needed is one vector per "
            f"frame, of 1 to {_MOST_DIMS} dimensions: correct meta/info.json, or choose another column"
        )
    return feature


def vector_values(episode: Episode, key: str) -> FloatArray:
    """A column of an episode as vectors float32 [T, D], whatever its dtype: booleans are 0 and 1.

    The reader delivers columns of one integer a frame as int64 [T], because most of them are indices.

    Raises:
        DatasetError: an integer that float32 cannot hold.
    """
    values = episode.columns[key]
    if values.ndim == 2:
        return values
    large = np.flatnonzero((values > LARGEST_EXACT) | (values < -LARGEST_EXACT))
    if large.size:
        raise DatasetError(
            f"column {key!r} of frame {large[0]} of episode {episode.index} holds the integer {values[large[0]]}, "
            "which float32 cannot hold exactly; subtract an offset from the column, or choose another"
        )
    return values.astype(np.float32)[:, np.newaxis]


@dataclass(frozen=True)
class Sample:
    """Chunks held in memory: raw values float32 [N, H, D], and where each is from.

    Attributes:
        chunks: float32 [N, H, D].
        episodes, starts: int64 [N], episode index and first frame of each.
        windows: how many chunks there are to sample from in the same episodes.
    """

    chunks: FloatArray
    episodes: IntArray
    starts: IntArray
    windows: int


class DatasetChunks:
    """The encoded values of a dataset's episodes, as chunks.

    Attributes:
        reader, selection, horizon: the dataset, the encoded dimensions, the steps H of a chunk.
        lengths: episode index -> frames, of the episodes that hold at least one chunk.
        asked: lengths of all the episodes asked for.
        too_short: how many of those are shorter than a chunk.
    """

    def __init__(
        self,
        reader: LeRobotReader,
        selection: ActionSelection,
        horizon: int,
        *,
        action_key: str,
        state_key: str,
        max_episodes: int | None = None,
        horizon_is_fixed: bool = False,
    ) -> None:
        """Choose the usable ones of the first `max_episodes` episodes (None: all); warns of those too short.

        Args:
            horizon_is_fixed: whether a shorter --action_horizon is no way out, for the error.

        Raises:
            DatasetError: no episode is as long as a chunk.
        """
        self.reader, self.selection, self.horizon = reader, selection, horizon
        self._action_key, self._state_key = action_key, state_key
        asked = reader.episodes[:max_episodes]
        self.asked = tuple(episode.length for episode in asked)
        self.lengths = {episode.index: episode.length for episode in asked if episode.length >= horizon}
        self.too_short = len(asked) - len(self.lengths)
        if not self.lengths:
            longest = max((episode.length for episode in asked), default=0)
            advice = f": take --action_horizon {longest} or less"
            if horizon_is_fixed:
                advice = ", which the tokenizer is bound to: fit one with a shorter --action_horizon"
            raise DatasetError(
                f"none of the {len(asked)} episodes has {horizon} frames (the longest has {longest}){advice}"
                if longest
                else f"the dataset {reader.root} holds no episodes"
            )
        if self.too_short:
            warn(
                f"{self.too_short} of {len(asked)} episodes are shorter than --action_horizon {horizon} "
                "and are left out"
            )

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """Names of the encoded dimensions, if the dataset gives them."""
        names = vector_feature(self.reader, self._action_key).names
        usable = names and len(names) == self.selection.action_size
        return self.selection.encoded_names(names) if usable else None

    def episodes(self, indices: Sequence[int]) -> Iterator[tuple[int, Any, Any]]:
        """(index, actions [T, A], states [T, S] or None) of the given episodes, ascending.

        Raises:
            DatasetError: also where an encoded value, or a state that it is relative to, is not finite.
        """
        relative = self.selection.is_delta
        keys = [self._action_key, self._state_key] if relative else [self._action_key]
        for episode in self.reader.iter_episodes(keys, indices):
            states = vector_values(episode, self._state_key) if relative else None
            actions = vector_values(episode, self._action_key)
            self._check_finite(episode.index, self._action_key, actions, self.selection.dims)
            if states is not None:
                self._check_finite(episode.index, self._state_key, states, self.selection.delta_state_dims)
            yield episode.index, actions, states

    def _check_finite(self, index: int, key: str, values: FloatArray, dims: Sequence[int]) -> None:
        used = values[:, list(dims)]
        if np.isfinite(used).all():
            return
        frame, place = (int(i) for i in np.argwhere(~np.isfinite(used))[0])
        dim = dims[place]
        names = self.reader.feature(key).names
        named = f" ({names[dim]})" if names is not None and dim < len(names) else ""
        raise DatasetError(
            f"episode {index}, frame {frame}: dimension {dim}{named} of {key!r} is {used[frame, place]}: repair or "
            "leave out that recording"
        )

    def statistics_blocks(self, indices: Sequence[int]) -> Iterator[FloatArray]:
        """What the statistics of the given episodes are taken over; see `ActionSelection.statistics_blocks`."""
        for _, actions, states in self.episodes(indices):
            yield from self.selection.statistics_blocks(actions, states, self.horizon)

    def chunks(self, indices: Sequence[int], starts_of: Callable[[int], IntArray]) -> Iterator[FloatArray]:
        """Raw chunks [n, H, D] of the episodes, at the first frames that `starts_of` gives for each episode.

        In ascending order, in blocks of bounded size.
        """
        step = max(1, _BLOCK_VALUES // (self.horizon * self.selection.size))
        waiting: list[FloatArray] = []
        for index, actions, states in self.episodes(indices):
            starts = starts_of(index)
            for begin in range(0, len(starts), step):
                part = starts[begin : begin + step]
                waiting.append(self.selection.window_chunks(actions, states, part, self.horizon))
                if sum(map(len, waiting)) >= step:
                    yield np.concatenate(waiting)
                    waiting = []
        if waiting:
            yield np.concatenate(waiting)

    def located_blocks(self, indices: Sequence[int]) -> Iterator[tuple[int, FloatArray]]:
        """`statistics_blocks`, each with the index of its episode."""
        for index, actions, states in self.episodes(indices):
            for block in self.selection.statistics_blocks(actions, states, self.horizon):
                yield index, block

    def sample(
        self, indices: Sequence[int], most: int, seed: int, advance: Callable[[int], object] | None = None
    ) -> Sample:
        """About `most` chunks at most, spread evenly over the given episodes; all of them where there are no more.

        Of more episodes than that, as many are chosen by `seed`. `advance` is told how many episodes were just read.
        """
        chosen = sorted(indices)
        if len(chosen) > most:
            random = np.random.default_rng(seed)
            chosen = sorted(chosen[i] for i in random.choice(len(chosen), most, replace=False))
        windows = sum(window_count(self.lengths[index], self.horizon) for index in chosen)
        share = min(1.0, most / windows)
        chunks, episodes, starts = [], [], []
        for index, actions, states in self.episodes(chosen):
            first = sample_starts(self.lengths[index], self.horizon, share, seed=seed, episode_index=index)
            chunks.append(self.selection.window_chunks(actions, states, first, self.horizon))
            episodes.append(np.full(len(first), index, np.int64))
            starts.append(first)
            if advance is not None:
                advance(1)
        return Sample(np.concatenate(chunks), np.concatenate(episodes), np.concatenate(starts), windows)
