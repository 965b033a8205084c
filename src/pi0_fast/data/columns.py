"""One arrow column of a parquet batch as a numpy array: the layouts that LeRobot datasets store numbers in.

Accepted: list, large_list and fixed_size_list (also nested, flattened row by row) and plain scalars, of
floats of any width, integers or booleans. Everything that would change or lose a value in silence is refused
with its row: nulls, rows of another length, integers that float32 cannot hold. Values that are not finite
pass (the normaliser reports them).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

LARGEST_EXACT = 2**24  # float32 holds every integer up to here


class ColumnFault(Exception):
    """A column cannot be read as numbers; `row` counts from the start of the array, None for all rows.

    Internal: the caller knows file, key, episode and frame and raises the DatasetError.
    """

    def __init__(self, reason: str, row: int | None = None) -> None:
        super().__init__(reason)
        self.row = row


def float_rows(array: Any, width: int) -> np.ndarray:
    """An arrow array of N rows of `width` numbers as [N, width], without a copy where possible."""
    values = _flat_values(array, width)
    kind = values.type
    if pa.types.is_floating(kind):
        flat = values.to_numpy(zero_copy_only=False)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        flat = _int64(values, width)
        large = np.flatnonzero((flat > LARGEST_EXACT) | (flat < -LARGEST_EXACT))
        if large.size:
            row = int(large[0]) // width
            raise ColumnFault(f"holds the integer {flat[large[0]]}, which float32 cannot hold exactly", row)
    else:
        raise ColumnFault(f"holds {kind}, not numbers")
    return np.asarray(flat).reshape(len(array), width)


def integer_values(array: Any) -> np.ndarray:
    """An arrow array of N rows of one integer or boolean as int64 [N]."""
    values = _flat_values(array, 1)
    if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        raise ColumnFault(f"holds {values.type}, not integers as declared")
    return _int64(values, 1)


def _int64(values: Any, width: int) -> np.ndarray:
    """Integers or booleans, `width` a row, as int64."""
    if pa.types.is_uint64(values.type):
        # The cast itself would refuse these, without the row.
        flat = values.to_numpy(zero_copy_only=False)
        large = np.flatnonzero(flat > np.uint64(np.iinfo(np.int64).max))
        if large.size:
            raise ColumnFault(f"holds the integer {flat[large[0]]}, which int64 cannot hold", int(large[0]) // width)
    return np.asarray(values.cast(pa.int64()).to_numpy(zero_copy_only=False))


def _flat_values(array: Any, width: int) -> Any:
    """The numbers of all rows in one flat arrow array; each row has `width` of them and no null."""
    per_row = 1
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    rows = len(array)
    while _is_list(array.type):
        _refuse_nulls(array, per_row)
        nested = _is_list(array.type.value_type)
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
        elif rows == 0:
            size = width // per_row
        else:
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            size = int(lengths[0]) if nested else width // per_row
            wrong = np.flatnonzero(lengths != size)
            if wrong.size:
                held = int(lengths[wrong[0]]) * per_row
                raise ColumnFault(f"holds {held} values where {width} are declared", int(wrong[0]) // per_row)
        if size == 0 or width % (per_row * size):
            raise ColumnFault(f"holds {per_row * size} values a frame where {width} are declared")
        array = array.flatten()
        per_row *= size
    if per_row != width:
        raise ColumnFault(f"holds {per_row} values a frame where {width} are declared")
    _refuse_nulls(array, per_row)
    return array


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _refuse_nulls(array: Any, per_row: int) -> None:
    if array.null_count:
        first = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise ColumnFault("holds a null", first // per_row)
