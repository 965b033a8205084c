"""One parquet file of frames: which episodes lie where in it, and their columns, in small batches.

Memory stays flat however large the file and its row groups are: a scan of the two index columns leaves two
numbers an episode, and columns are decoded a batch at a time. Which file to open, and in which order, is the
reader's business.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pi0_fast.data.columns import ColumnFault, float_rows, integer_values
from pi0_fast.data.metadata import parquet_errors, refuse_repeated
from pi0_fast.data.rounding import Rounding
from pi0_fast.types import DatasetError, Episode, Feature

_SCAN_ROWS = 1 << 16
_READ_ROWS = 1 << 13
# Read column chunks piece by piece: one may be as large as the file. Works with pre_buffer=False only.
_BUFFER_BYTES = 1 << 20


class FrameFile:
    """An open parquet file of frames; a context manager.

    Attributes:
        path: the file.
        rows: episode index -> (first row, one past the last row), from the file itself.
    """

    def __init__(self, path: Path, keys: Sequence[str], rows: Mapping[int, tuple[int, int]] | None = None) -> None:
        """Open the file and scan where its episodes lie (not again when `rows` of an earlier scan is given).

        Raises:
            DatasetError: the file is missing or damaged, lacks a column, has an episode in two places or
                frames out of order.
        """
        self.path = path
        self._keys = list(keys)
        with parquet_errors(path):
            self._file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        self._missing_columns()
        groups = [self._file.metadata.row_group(g).num_rows for g in range(self._file.metadata.num_row_groups)]
        self._group_starts = np.concatenate([[0], np.cumsum(groups)]).astype(int).tolist()
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._batch_start = 0
        self._next_row = self._group_starts[-1]  # nothing can be read before the first seek
        self.rows = dict(rows) if rows is not None else self._scan()

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self, lengths: Mapping[int, int]) -> None:
        """Compare with what the metadata says lies in this file (episode index -> number of frames).

        Raises:
            DatasetError: naming the file and both counts.
        """
        for index, length in lengths.items():
            start, stop = self.rows.get(index, (0, 0))
            if stop - start != length:
                raise DatasetError(
                    f"{self.path} holds {stop - start} frames of episode {index}, the metadata says "
                    f"{length}; fetch the dataset again, or correct the metadata"
                )
        for index in self.rows:
            if index not in lengths:
                start, stop = self.rows[index]
                raise DatasetError(
                    f"{self.path} holds {stop - start} frames of episode {index}, which the metadata does "
                    f"not place in this file ({self._group_starts[-1]} frames in the file, "
                    f"{sum(lengths.values())} in the metadata)"
                )

    def episode(self, index: int, features: Mapping[str, Feature], roundings: Mapping[str, Rounding]) -> Episode:
        """The columns of one episode, copied out of the file; quick when called in the order of the file.

        What float64 loses on the way to float32 is added to `roundings`, which has one for each key.

        Raises:
            DatasetError: the file is damaged, or a column is ragged, null, not numeric or of another width
                than declared.
        """
        start, stop = self.rows.get(index, (0, 0))
        columns: dict[str, np.ndarray] = {}
        row = start
        while row < stop:
            batch, offset = self._batch_at(row)
            count = min(stop - row, len(batch) - offset)
            for key in self._keys:
                piece = batch.column(key).slice(offset, count)
                frame = row - start
                try:
                    values = _values(piece, features[key])
                except ColumnFault as fault:
                    where = f" of frame {frame + fault.row}" if fault.row is not None else ""
                    raise DatasetError(
                        f"{self.path}: column {key}{where} of episode {index} {fault}; correct the file, or "
                        "choose another column"
                    ) from fault
                if key not in columns:  # not before the first values: a damaged width would fill the memory
                    columns[key] = _empty(features[key], stop - start)
                part = columns[key][frame : frame + count]
                with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the normaliser reports
                    part[:] = values
                if values.dtype == np.float64:
                    roundings[key].add(values, part, index)
            row += count
        return Episode(index, {key: columns.get(key, _empty(features[key], 0)) for key in self._keys})

    def _missing_columns(self) -> None:
        with parquet_errors(self.path):
            present: list[str] = self._file.schema_arrow.names
        refuse_repeated(self.path, present, ["episode_index", "frame_index", *self._keys])
        for key in ["episode_index", "frame_index", *self._keys]:
            if key not in present:
                raise DatasetError(f"{self.path} has no column {key!r}; its columns are: {', '.join(present)}")

    def _batch_at(self, row: int) -> tuple[Any, int]:
        """The batch that holds `row`, and the place of `row` in it; jumps over row groups nobody wants."""
        behind = self._batch is None or row < self._batch_start
        if behind or self._group_of(row) > self._group_of(max(self._next_row - 1, 0)) + 1:
            group = self._group_of(row)
            groups = list(range(group, len(self._group_starts) - 1))
            with parquet_errors(self.path):
                self._batches = self._file.iter_batches(
                    _READ_ROWS, row_groups=groups, columns=self._keys, use_threads=False
                )
            self._batch, self._next_row = None, self._group_starts[group]
        while row >= self._next_row:
            with parquet_errors(self.path):
                batch = next(self._batches, None)
            if batch is None:
                raise DatasetError(
                    f"{self.path} is truncated: it ends at row {self._next_row} of {self._group_starts[-1]}"
                )
            self._batch, self._batch_start = batch, self._next_row
            self._next_row += len(batch)
        return self._batch, row - self._batch_start

    def _group_of(self, row: int) -> int:
        return bisect_right(self._group_starts, row) - 1

    def _scan(self) -> dict[int, tuple[int, int]]:
        """The rows of each episode, from one pass over episode_index and frame_index (0, 1, 2, ...)."""
        starts: list[int] = []
        indices: list[int] = []
        row, last_episode, last_frame = 0, np.iinfo(np.int64).min, -1  # no episode has that index
        for episodes, frames in self._index_columns():
            before = np.concatenate([[last_episode], episodes[:-1]])
            expected = np.concatenate([[last_frame], frames[:-1]]) + 1
            first = episodes != before
            expected[first] = 0
            if wrong := np.flatnonzero(frames != expected).tolist():
                at = wrong[0]
                raise DatasetError(
                    f"{self.path}: frames out of order in episode {episodes[at]}: row {row + at} has "
                    f"frame_index {frames[at]} where {expected[at]} is expected; write the file again in "
                    "order"
                )
            for at in np.flatnonzero(first).tolist():
                starts.append(row + at)
                indices.append(int(episodes[at]))
            row += len(episodes)
            last_episode, last_frame = int(episodes[-1]), int(frames[-1])
        rows: dict[int, tuple[int, int]] = {}
        for index, start, stop in zip(indices, starts, [*starts, row][1:], strict=True):
            if index in rows:
                raise DatasetError(
                    f"{self.path}: episode {index} lies at rows {rows[index][0]} and {start}, not together"
                )
            rows[index] = (start, stop)
        return rows

    def _index_columns(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        names = ["episode_index", "frame_index"]
        with parquet_errors(self.path):
            batches = self._file.iter_batches(_SCAN_ROWS, columns=names, use_threads=False)
        while True:
            with parquet_errors(self.path):
                batch = next(batches, None)
            if batch is None:
                return
            if len(batch):
                try:
                    yield integer_values(batch.column(names[0])), integer_values(batch.column(names[1]))
                except ColumnFault as fault:
                    raise DatasetError(f"{self.path}: episode_index or frame_index {fault}") from fault


def is_integer_scalar(feature: Feature) -> bool:
    """Whether a column is delivered as int64 [T] rather than as float32 [T, D]."""
    one = math.prod(feature.shape) == 1 and len(feature.shape) <= 1
    return one and feature.dtype.startswith(("int", "uint", "bool"))


def _empty(feature: Feature, length: int) -> np.ndarray:
    if is_integer_scalar(feature):
        return np.empty(length, dtype=np.int64)
    return np.empty((length, math.prod(feature.shape)), dtype=np.float32)


def _values(piece: Any, feature: Feature) -> np.ndarray:
    if is_integer_scalar(feature):
        return integer_values(piece)
    return float_rows(piece, math.prod(feature.shape))
