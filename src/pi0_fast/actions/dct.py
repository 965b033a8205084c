"""Discrete cosine transform, quantisation and flattening of action chunks, and their inverses.

The FAST paper (arXiv 2501.09747), steps 1 to 3: the orthonormal DCT-II along time for each action dimension, a
multiplication by `scale`, rounding half to even, and flattening row by row, so that all dimensions of frequency 0 come
first; or, which is not the paper's, column by column (`Order`). What is not here: normalisation (normalize.py) and the
merging of coefficients into tokens (bpe.py).

A constant chunk of value x has one coefficient, sqrt(H) * x * scale; with H = 4, x = 0.5 and scale = 10 that is 10.
With H = 2 and D = 3 the coefficients (frequency, dimension) follow each other as 00 01 02 10 11 12 in the order
"frequency", and as 00 10 01 11 02 12 in the order "dimension".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, kernel
from pi0_fast.types import UsageError

NumberArray = TypeVar("NumberArray", npt.NDArray[np.int32], npt.NDArray[np.float32])

#: How the coefficients of a chunk follow each other: all dimensions of frequency 0 first, or all frequencies of
#: dimension 0 first. The zeros of a dimension that hardly moves are then neighbours, and merge.
Order = Literal["frequency", "dimension"]
ORDERS: tuple[Order, ...] = get_args(Order)


@lru_cache(maxsize=64)
def dct_matrix(horizon: int) -> npt.NDArray[np.float32]:
    """The orthonormal DCT-II, float32 [H, H]: coefficients = matrix @ values, values = matrix.T @ coefficients."""
    time = np.arange(horizon) + 0.5
    frequency = np.arange(horizon)[:, None]
    matrix = np.sqrt(2.0 / horizon) * np.cos(np.pi / horizon * frequency * time)
    matrix[0] /= np.sqrt(2.0)
    result: npt.NDArray[np.float32] = matrix.astype(np.float32)
    result.flags.writeable = False
    return result


def checked_order(order: str) -> Order:
    """The order of that name.

    Raises:
        UsageError: there is none.
    """
    for known in ORDERS:
        if order == known:
            return known
    raise UsageError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")


def from_frequency_order(coefficients: NumberArray, horizon: int, order: Order) -> NumberArray:
    """Rows of a chunk's coefficients, [N, H*D], from the order "frequency" into another."""
    return coefficients if order == "frequency" else _turned(coefficients, horizon)


def to_frequency_order(coefficients: NumberArray, horizon: int, order: Order) -> NumberArray:
    """The inverse of `from_frequency_order`."""
    return coefficients if order == "frequency" else _turned(coefficients, coefficients.shape[1] // horizon)


def _turned(rows: NumberArray, height: int) -> NumberArray:
    """Each row [height * width] as a matrix, transposed."""
    turned = rows.reshape(len(rows), height, rows.shape[1] // height).swapaxes(1, 2)
    return np.ascontiguousarray(turned).reshape(rows.shape)


@inlined
def turn_row(source, height, target):  # type: ignore[no-untyped-def]
    """`target` = `source` as a matrix of `height` rows, transposed."""
    width = len(source) // height
    for i in range(height):
        for j in range(width):
            target[j * height + i] = source[i * width + j]


@inlined
def quantize_row(chunk, matrix, scales, lowest, highest, value_limit, folded, total, target):  # type: ignore[no-untyped-def]
    """One chunk of `quantize_rows`; `folded` and `total` are scratch. Returns how many were clipped, and the bad place.

    The sum over time is folded: row k of the matrix is symmetric in time for even k and antisymmetric for odd k, so
    half the multiplications do.
    """
    horizon, size = chunk.shape
    half = horizon // 2
    strange, bad, clipped = 0, -1, 0
    for t in range(horizon):
        for d in range(size):
            strange += not (abs(chunk[t, d]) <= value_limit)  # also counts NaN
    if strange > 0:
        bad = 0
        while abs(chunk[bad // size, bad % size]) <= value_limit:
            bad += 1
    else:
        for t in range(half):
            for d in range(size):
                first, last = chunk[t, d], chunk[horizon - 1 - t, d]
                folded[0, t, d] = first + last
                folded[1, t, d] = first - last
        terms = half
        if horizon % 2:  # the middle step stands alone, and counts only for even frequencies
            terms = half + 1
            for d in range(size):
                folded[0, half, d] = chunk[half, d]
                folded[1, half, d] = np.float32(0.0)
        for k in range(horizon):
            source, weights = folded[k % 2], matrix[k]
            for d in range(size):
                total[d] = np.float32(0.0)
            t = 0
            while t + 4 <= terms:  # four at a time, added in order: fewer trips to memory, the same sum
                w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
                s0, s1, s2, s3 = source[t], source[t + 1], source[t + 2], source[t + 3]
                for d in range(size):
                    total[d] = total[d] + w0 * s0[d] + w1 * s1[d] + w2 * s2[d] + w3 * s3[d]
                t += 4
            while t < terms:
                for d in range(size):
                    total[d] += weights[t] * source[t, d]
                t += 1
            level = target[k * size : (k + 1) * size]
            for d in range(size):
                value = np.rint(total[d] * scales[d])
                clipped += (value < lowest) | (value > highest)
                level[d] = np.int32(min(max(value, lowest), highest))
    return clipped, bad


@kernel
def quantize_rows(chunks, matrix, scales, low, high, value_limit, out, saturations, bad):  # type: ignore[no-untyped-def]
    """Chunks float32 [N, H, D] -> clipped integer coefficients, flattened: out int32 [N, H*D]; whether all are good.

    `scales` float32 [D]. Coefficients outside [low, high] are clipped; `saturations` int32 [N] counts them. A value
    that is not finite, or larger than `value_limit`, is reported by its flat position in `bad` int64 [N] (else -1),
    and the row's coefficients are then meaningless.
    """
    rows, horizon, size = chunks.shape
    all_good = True
    lowest, highest = np.float32(low), np.float32(high)
    folded = np.empty((2, horizon // 2 + 1, size), np.float32)
    total = np.empty(size, np.float32)
    for n in range(rows):
        saturations[n], bad[n] = quantize_row(
            chunks[n], matrix, scales, lowest, highest, value_limit, folded, total, out[n]
        )
        all_good &= bad[n] < 0
    return all_good


@inlined
def dequantize_row(coefficients, matrix, scales, folded, level, out):  # type: ignore[no-untyped-def]
    """One chunk of `dequantize_rows`; `folded` [2, (H+1)//2, D] and `level` [D] are scratch."""
    horizon, size = out.shape
    half = (horizon + 1) // 2
    folded[:] = np.float32(0.0)
    for k in range(horizon):
        any_set = 0
        for d in range(size):
            any_set |= coefficients[k * size + d]
        if any_set != 0:
            for d in range(size):
                level[d] = np.float32(coefficients[k * size + d]) / scales[d]
            target = folded[k % 2]
            for t in range(half):
                weight = matrix[k, t]
                for d in range(size):
                    target[t, d] += weight * level[d]
    for t in range(half):
        for d in range(size):
            even, odd = folded[0, t, d], folded[1, t, d]
            out[horizon - 1 - t, d] = even - odd
            out[t, d] = even + odd  # the middle step of an odd horizon is written last, and has no odd part


@kernel
def dequantize_rows(coefficients, matrix, scales, out):  # type: ignore[no-untyped-def]
    """Integer coefficients int32 [N, H*D] -> values float32 [N, H, D], the inverse of `quantize_rows` up to rounding.

    Most high frequencies of a chunk are zero in every dimension, and are skipped.
    """
    rows, horizon, size = out.shape
    folded, level = np.empty((2, (horizon + 1) // 2, size), np.float32), np.empty(size, np.float32)
    for n in range(rows):
        dequantize_row(coefficients[n], matrix, scales, folded, level, out[n])
