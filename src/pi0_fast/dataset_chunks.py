"""A dataset as action chunks: which columns, dimensions, episodes and windows of it are used, read in bounded memory.

What fitting and inspecting have in common. Left out: files (data/), what a chunk is (actions/chunks.py), and which of
the windows are taken, which the caller says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.data import LeRobotReader
from pi0_fast.display import warn
from pi0_fast.types import DatasetError, Feature

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

#: Numbers in a block of chunks.
_BLOCK_VALUES = 1 << 22


def vector_feature(reader: LeRobotReader, key: str) -> Feature:
    """The declaration of a column that holds one vector per frame (one number counts as a vector of one).

    Raises:
        DatasetError: no such column, or a column of matrices.
    """
    feature = reader.feature(key)
    if len(feature.shape) > 1:
        raise DatasetError(f"column {key!r} has shape {list(feature.shape)}; needed is one vector per frame")
    if len(feature.shape) == 0:
        return Feature(feature.key, feature.dtype, (1,), feature.names)
    return feature


class DatasetChunks:
    """The encoded values of a dataset's episodes, as chunks.

    Attributes:
        reader, selection, horizon: the dataset, the encoded dimensions, the steps H of a chunk.
        lengths: episode index -> frames, of the episodes that hold at least one chunk.
        too_short: how many of the episodes asked for do not.
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
        """(index, actions [T, A], states [T, S] or None) of the given episodes, ascending."""
        relative = self.selection.is_delta
        keys = [self._action_key, self._state_key] if relative else [self._action_key]
        for episode in self.reader.iter_episodes(keys, indices):
            states = episode.columns[self._state_key] if relative else None
            yield episode.index, episode.columns[self._action_key], states

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
