"""Chunks -> ids, and the ids of one chunk -> values, in one kernel each: all steps of a row one after the other.

For plain vocabularies; encoding also asks that they can be searched (segmentation.py), as nearly all can. The steps
themselves are those of dct.py, segmentation.py and bpe.py, which stay the place to read and change them. What is not
here: all other vocabularies, whose chunks go through the same steps array by array, and whatever is an error.

Robots encode and decode one chunk at a time, and then the work is a microsecond and what surrounds it several: hence
one call, few arrays, and one array for all results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import kernel
from pi0_fast.actions import bpe, dct, segmentation
from pi0_fast.actions.bpe import expand_row
from pi0_fast.actions.dct import Order, dct_matrix, dequantize_row, quantize_row, turn_row
from pi0_fast.actions.segmentation import SearchTables, segment_row, unpacked

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

_COUNT, _SATURATIONS, _BAD = 0, 1, 2
#: Columns of the results in front of the ids.
REPORT = 3


@kernel(uses=(dct, segmentation))
def _encode_chunks(chunks, numbers, low, high, value_limit, by_dimension, wide, narrow, known, out):  # type: ignore[no-untyped-def]
    """Chunks float32 [N, H, D] -> in `out` int32 [N * (REPORT + H*D)] the report [N, REPORT], then the ids.

    `numbers` float32 holds the DCT matrix and the scales; `by_dimension`: the order of the coefficients. Returns how
    many ids there are, -1 if a row has a bad value, -2 if one has no encoding.
    """
    rows, horizon, size = chunks.shape
    length = horizon * size
    matrix = numbers[: horizon * horizon].reshape(horizon, horizon)
    scales = numbers[horizon * horizon :]
    lowest, highest = np.float32(low), np.float32(high)
    keys, children, longest, ahead, common, chain, tokens, merges = unpacked(wide, narrow)
    report = out[: rows * REPORT].reshape(rows, REPORT)
    folded = np.empty((2, horizon // 2 + 1, size), np.float32)
    total = np.empty(size, np.float32)
    row = np.empty(length, np.int32)
    turned = np.empty(length if by_dimension else 0, np.int32)
    run_from = np.empty(length + 1, np.int32)
    dead = np.empty(length + 1, np.bool_)
    written, state = 0, 0
    for n in range(rows):
        clipped, bad = quantize_row(chunks[n], matrix, scales, lowest, highest, value_limit, folded, total, row)
        report[n, _SATURATIONS], report[n, _BAD] = clipped, bad
        if bad >= 0:
            state = -1
            continue
        if by_dimension:
            turn_row(row, horizon, turned)
            row[:] = turned
        for i in range(length):
            row[i] -= low
        count = segment_row(
            row, length, keys, children, longest, ahead, common, chain, tokens, merges, known, run_from, dead,
            out[rows * REPORT + written :],
        )  # fmt: skip
        if count < 0:
            return -2
        report[n, _COUNT] = count
        written += count
    return written if state == 0 else state


@kernel(uses=(bpe, dct))
def _decode_chunk(ids, expansions, numbers, by_dimension, out):  # type: ignore[no-untyped-def]
    """Ids int32 [T] -> `out` float32 [H, D]; False, and `out` is meaningless, if they do not hold exactly a chunk.

    `expansions` int32 holds the number of tokens V, where the expansion of each begins and the last one ends [V + 1],
    and the expansions.
    """
    horizon, size = out.shape
    bounds, values = expansions[1 : expansions[0] + 2], expansions[expansions[0] + 2 :]
    coefficients = np.empty(horizon * size, np.int32)
    total, bad = expand_row(ids, values, bounds, coefficients)
    if bad >= 0 or total != horizon * size:
        return False
    if by_dimension:
        turned = np.empty_like(coefficients)
        turn_row(coefficients, size, turned)
        coefficients = turned
    matrix = numbers[: horizon * horizon].reshape(horizon, horizon)
    folded, level = np.empty((2, (horizon + 1) // 2, size), np.float32), np.empty(size, np.float32)
    dequantize_row(coefficients, matrix, numbers[horizon * horizon :], folded, level, out)
    return True


def joined_numbers(horizon: int, scales: FloatArray) -> FloatArray:
    """The DCT matrix of chunks [horizon, D] and the scales of the dimensions in one array, float32."""
    return np.concatenate([dct_matrix(horizon).reshape(-1), scales])


@dataclass(frozen=True)
class Encoder:
    """One vocabulary with the settings of a tokenizer, for chunks of one shape.

    Attributes:
        low, high: the smallest and largest coefficient of the vocabulary.
        value_limit: values beyond it are no normalised actions.
        numbers: DCT matrix and scales, float32.
        tables: of the vocabulary.
        by_dimension: whether the coefficients are in the order "dimension".
    """

    low: int
    high: int
    value_limit: float
    numbers: FloatArray
    tables: SearchTables
    by_dimension: bool

    @classmethod
    def create(
        cls,
        tables: SearchTables,
        horizon: int,
        scales: FloatArray,
        *,
        low: int,
        high: int,
        value_limit: float,
        order: Order = "frequency",
    ) -> Encoder:
        """For chunks [horizon, D] with `scales` float32 [D]."""
        limit = float(np.float32(value_limit))
        return cls(low, high, limit, joined_numbers(horizon, scales), tables, order == "dimension")

    def encode(self, chunks: FloatArray) -> tuple[IntArray, int]:
        """Encode C-contiguous float32 [N, H, D]; one thread.

        Returns:
            int32: N times `REPORT` numbers (ids of the row, saturations, flat position of a value that is no normalised
            action or -1), then the ids of all rows, one row after the other; and how many these are, or -1 if there
            are none because a row has such a value.
        """
        rows = len(chunks)
        out = np.empty(REPORT * rows + chunks.size, np.int32)
        tables = self.tables
        written = _encode_chunks(
            chunks, self.numbers, self.low, self.high, self.value_limit, self.by_dimension,
            tables.wide, tables.narrow, tables.known, out,
        )  # fmt: skip
        if written < -1:
            raise RuntimeError("a chunk has no byte-pair encoding: its ids are not all base ids of the vocabulary")
        return out, written


@dataclass(frozen=True)
class Decoder:
    """One plain vocabulary with the settings of a tokenizer, for chunks of one shape [H, D].

    Attributes:
        shape: (H, D).
        expansions: what the ids stand for, as `_decode_chunk` takes it.
        numbers: DCT matrix and scales, float32.
        by_dimension: whether the coefficients are in the order "dimension".
    """

    shape: tuple[int, int]
    expansions: IntArray
    numbers: FloatArray
    by_dimension: bool

    @classmethod
    def create(
        cls,
        values: IntArray,
        bounds: npt.NDArray[np.int64],
        horizon: int,
        scales: FloatArray,
        order: Order = "frequency",
    ) -> Decoder:
        """Id t stands for ``values[bounds[t] : bounds[t + 1]]``."""
        expansions = np.concatenate([[len(bounds) - 1], bounds, values]).astype(np.int32)
        return cls((horizon, len(scales)), expansions, joined_numbers(horizon, scales), order == "dimension")

    def decode(self, ids: IntArray) -> FloatArray | None:
        """The chunk float32 [H, D] of ids int32 [T]; None if they do not hold exactly one."""
        out = np.empty(self.shape, np.float32)
        return out if _decode_chunk(ids, self.expansions, self.numbers, self.by_dimension, out) else None
