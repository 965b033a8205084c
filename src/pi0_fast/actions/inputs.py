"""What callers may pass to a tokenizer, turned into the arrays that its kernels take: chunks, ids, scales.

Any numeric layout is taken, and nothing is guessed: what does not fit is an error that names it. What is not here: what
the numbers mean.
"""

from __future__ import annotations

from array import array as typed_array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.bpe import MAX_VOCABULARY
from pi0_fast.actions.chunks import as_numbers
from pi0_fast.types import TokenizerError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

#: Ids beyond this stand for themselves no more; they are outside every vocabulary.
ID_RANGE = np.iinfo(np.int32)
_FLOAT32 = np.dtype(np.float32)


def checked_scale(scale: float | Sequence[float], action_dim: int | None) -> float | list[float]:
    array = as_numbers(scale, "scale").astype(np.float64)
    # The range is float32's own, in which coefficients are computed.
    if array.ndim > 1 or array.size == 0 or not ((array >= 1e-30) & (array <= 1e30)).all():
        raise TokenizerError(f"scale must be a positive number, or one per dimension; got {scale!r}")
    if array.ndim == 1 and action_dim is not None and len(array) != action_dim:
        raise TokenizerError(f"scale has {len(array)} values for {action_dim} dimensions")
    return float(array) if array.ndim == 0 else [float(value) for value in array]


def checked_rate_weight(rate_weight: Any) -> float:
    """A finite number of at least 0."""
    array = as_numbers(rate_weight, "rate_weight").astype(np.float64)
    if array.ndim or not 0 <= array < np.inf:
        raise TokenizerError(f"rate_weight must be a number of at least 0, not {rate_weight!r}")
    return float(array)


def checked_max_error(max_error: Any, action_dim: int | None) -> float | list[float] | None:
    """None, one positive number, or one for each dimension; infinite is no bound."""
    if max_error is None:
        return None
    array = as_numbers(max_error, "max_error").astype(np.float64)
    if array.ndim > 1 or array.size == 0 or not (array > 0).all():
        raise TokenizerError(f"max_error must be a positive number, or one per dimension; got {max_error!r}")
    if array.ndim == 1 and action_dim is not None and len(array) != action_dim:
        raise TokenizerError(f"max_error has {len(array)} values for {action_dim} dimensions")
    return float(array) if array.ndim == 0 else [float(value) for value in array]


def scale_array(scale: float | list[float], action_dim: int) -> FloatArray:
    scales = np.asarray(scale, np.float32)
    if scales.ndim == 1 and len(scales) != action_dim:
        raise TokenizerError(f"scale has {len(scales)} values, chunks have {action_dim} dimensions")
    return np.ascontiguousarray(np.broadcast_to(scales, (action_dim,)))


def as_chunks(chunks: Any, shape: tuple[int | None, int | None]) -> FloatArray:
    """Any numeric layout as C-contiguous float32 [N, H, D]; one chunk [H, D] becomes N = 1."""
    if type(chunks) is np.ndarray and chunks.shape == shape and chunks.dtype == _FLOAT32 and chunks.flags.c_contiguous:
        return chunks[None]  # what a robot encodes: microseconds matter
    array = as_numbers(chunks, "action chunks")
    horizon, size = shape
    if array.ndim == 1 and array.size == 0:
        array = array.reshape(0, horizon or 1, size or 1)  # an empty list holds no chunks, whatever their shape
    if array.ndim == 2:
        array = array[None]
    if (
        array.ndim != 3
        or (horizon or array.shape[1], size or array.shape[2]) != array.shape[1:]
        or 0 in array.shape[1:]
    ):
        wanted = f"[N, {horizon or 'H'}, {size or 'D'}] or one chunk [{horizon or 'H'}, {size or 'D'}]"
        if array.ndim != 3:
            raise TokenizerError(f"action chunks have shape {list(array.shape)}; needed is {wanted}")
        raise TokenizerError(
            f"action chunks have {array.shape[1]} steps and {array.shape[2]} dimensions; needed is {wanted}"
        )
    if array.shape[1] * array.shape[2] > MAX_VOCABULARY:
        raise TokenizerError(f"chunks of {list(array.shape[1:])} exceed {MAX_VOCABULARY} coefficients")
    if array.dtype == np.float32:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite, and is refused below
        return np.ascontiguousarray(array, dtype=np.float32)


def as_rows_of_ids(ids: Any) -> tuple[IntArray, LongArray, LongArray, bool]:
    """Every accepted form as (int32 ids, row n from starts[n] to ends[n], whether it was one flat row)."""
    if isinstance(ids, tuple) and len(ids) == 2 and getattr(ids[0], "ndim", 0) == 2:
        array = _whole_ids(as_numbers(ids[0], "ids"))
        lengths = _whole_ids(as_numbers(ids[1], "lengths")).astype(np.int64)
        if lengths.shape != (len(array),) or (lengths < 0).any() or (lengths > array.shape[1]).any():
            raise TokenizerError(f"lengths of shape {list(lengths.shape)} do not fit ids of shape {list(array.shape)}")
        starts = np.arange(len(array), dtype=np.int64) * array.shape[1]
        return array.reshape(-1), starts, starts + lengths, False
    if hasattr(ids, "ndim"):
        array = _whole_ids(as_numbers(ids, "ids"))
        if array.ndim == 1:
            return array, np.array([0]), np.array([len(array)]), True
        if array.ndim != 2:
            raise TokenizerError(f"ids have shape {list(array.shape)}; needed is [N, T] or [T]")
        starts = np.arange(len(array), dtype=np.int64) * array.shape[1]
        return array.reshape(-1), starts, starts + array.shape[1], False
    try:
        rows = list(ids)
        single = bool(rows) and (type(rows[0]) is int or np.ndim(rows[0]) == 0)
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"ids must be a list of lists of ids, or one flat list ({error})") from error
    flat, counts = _joined([rows] if single else rows)
    if single:
        return flat, np.zeros(1, np.int64), counts, True
    ends = np.cumsum(counts, dtype=np.int64)
    return flat, ends - counts, ends, False


def one_list_of_ids(ids: list[Any]) -> IntArray | None:
    """A flat list of whole numbers of 32 bits as int32 [T]; None for any other list, an empty one too."""
    if not ids or type(ids[0]) is not int:
        return None
    joined = typed_array("i")
    try:
        joined.fromlist(ids)
    except (TypeError, OverflowError):
        return None  # as_rows_of_ids says what is wrong, or takes what is merely unusual
    return np.frombuffer(joined, np.int32)


def _joined(rows: list[Any]) -> tuple[IntArray, LongArray]:
    """A list of rows of ids as one int32 array, and how many each row has."""
    if all(type(row) is list for row in rows):
        joined = typed_array("i")  # takes whole numbers only, several times faster than numpy
        try:
            for row in rows:
                joined.fromlist(row)
        except (TypeError, OverflowError):
            pass  # what is wrong, or merely large, is found with its row below
        else:
            return np.frombuffer(joined, np.int32), np.fromiter(map(len, rows), np.int64, len(rows))
    parts = [_whole_ids(as_numbers(row, f"ids of row {n}")) for n, row in enumerate(rows)]
    if any(part.ndim != 1 for part in parts):
        raise TokenizerError("ids must be a list of lists of ids, or one flat list")
    flat = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return flat, np.array([len(part) for part in parts], np.int64)


def _whole_ids(ids: npt.NDArray[Any]) -> IntArray:
    if ids.dtype == np.int32:
        return np.ascontiguousarray(ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise TokenizerError(f"ids must be whole numbers, got an array of dtype {ids.dtype}")
    # Ids beyond 32 bits stay outside every vocabulary, and are reported as such.
    clipped: IntArray = np.clip(ids.astype(np.int64), ID_RANGE.min, ID_RANGE.max).astype(np.int32)
    return clipped


def checked_hold(hold: Any, rows: int, size: int) -> FloatArray:
    """The action that each row holds if it is invalid, float32 [rows, D]."""
    actions = as_numbers(hold, "hold").astype(np.float32)
    if actions.shape not in ((size,), (rows, size)):
        raise TokenizerError(f"hold has shape {list(actions.shape)}; needed is [{size}] or [{rows}, {size}]")
    if not np.isfinite(actions).all():
        raise TokenizerError("hold has values that are not finite: no robot can hold them")
    return np.broadcast_to(actions, (rows, size))
