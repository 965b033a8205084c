"""A hash of the content of some columns of a dataset in a directory, cheaper than reading them.

What is hashed are the columns' bytes as they lie in the parquet files, compressed; hardly a value is decoded, and no
other column is touched, however large. So equal hashes mean equal values, while the same values written in another way
(other compression, other files) have another hash. Sizes and times of files are not used: a copy changes the times,
and a corrected value changes neither the size nor, in a parquet file's footer, anything that is certain to differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pi0_fast.data.metadata import parquet_errors, refuse_repeated
from pi0_fast.types import DatasetError, EpisodeRecord, Feature

_PIECE_BYTES = 1 << 22


def column_digest(
    root: Path, files: Sequence[str], episodes: Sequence[EpisodeRecord], features: Sequence[Feature]
) -> str:
    """A sha256 over the columns, their declarations, and the index columns that say which row is which.

    Args:
        root: directory of the dataset.
        files: its parquet files, below the root.
        episodes: index and length of each are part of the hash.
        features: the columns.

    Returns:
        64 hexadecimal digits.

    Raises:
        DatasetError: a file is damaged, or lacks a column.
    """
    digest = hashlib.sha256()
    digest.update(repr([(episode.index, episode.length) for episode in episodes]).encode())
    digest.update(repr([(f.key, f.dtype, f.shape, f.names) for f in features]).encode())
    keys = ["episode_index", "frame_index", *(feature.key for feature in features)]
    for file in files:
        for piece in _column_bytes(root / file, keys):
            digest.update(piece)
    return digest.hexdigest()


def _column_bytes(path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """For each column of each row group: a line that says how to read it, then its bytes in pieces."""
    with parquet_errors(path):
        footer = pq.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
        names: list[str] = schema.names
    refuse_repeated(path, names, keys)
    for key in keys:
        if key not in names:
            raise DatasetError(f"{path} has no column {key!r}; its columns are: {', '.join(names)}")
    kinds = {key: schema.field(key).type for key in keys}
    with parquet_errors(path), pq.ParquetFile(path, buffer_size=_PIECE_BYTES, pre_buffer=False) as parquet:
        # Asked for the place of a column whose description is damaged, pyarrow ends the process; reading it, it raises.
        for group in range(footer.num_row_groups):
            next(parquet.iter_batches(1, row_groups=[group], columns=list(keys), use_threads=False), None)
        columns = list(_columns(footer, kinds))
    with path.open("rb") as file:
        for line, start, length in columns:
            yield line.encode()
            yield from _range(path, file, start, length)


def _columns(footer: Any, kinds: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(line that says how to read it, first byte, number of bytes) of each column of these kinds in each row group."""
    # A list column is stored under `action.list.element` or the like.
    stored = [footer.schema.column(number).path for number in range(footer.num_columns)]
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for number, name in enumerate(stored):
            for key, kind in kinds.items():
                if f"{name}.".startswith(f"{key}."):
                    column = row_group.column(number)
                    yield (f"\n{name} {kind} {column.compression} {column.num_values}\n", *_place(column))


def _place(column: Any) -> tuple[int, int]:
    """(first byte, number of bytes) of a column chunk; the dictionary page, where there is one, comes first."""
    offsets = [offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset]
    return min(offsets, default=0), column.total_compressed_size


def _range(path: Path, file: Any, start: int, length: int) -> Iterator[bytes]:
    if start < 0 or length < 0:
        raise DatasetError(f"{path} cannot be read as parquet, it is truncated or damaged: a column lies before it")
    file.seek(start)
    while length > 0:
        piece = file.read(min(length, _PIECE_BYTES))
        if not piece:
            raise DatasetError(f"{path} cannot be read as parquet, it is truncated or damaged: a column ends early")
        length -= len(piece)
        yield piece
