"""The rate-distortion plane: what other encoders make of the same chunks, and how steady their tokens are.

A tokenizer is compared with refits of other kinds at the same vocabulary size: the reference format of published
tokenizers, and of each order of the coefficients plain rounding and the rate-distortion encoder. Tokens per chunk mean
something at equal error only, so each kind is fitted at several scales, and its tokens at a given error read off the
line between them. Left out: pictures, and which chunks.

Steadiness is the share of tokens that change when nearly nothing happens: the next frame, or noise. Of the sequences
1 2 3 4 and 1 9 3 4 a quarter changed: three of four tokens are in both, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import kernel
from pi0_fast.actions.choosing import token_errors
from pi0_fast.actions.dct import ORDERS, Order
from pi0_fast.actions.details import scale_list
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.tokenizer import FastTokenizer, TokenizerFitter
from pi0_fast.actions.vocabulary import SymbolFormat
from pi0_fast.types import TokenizerError

FloatArray = npt.NDArray[np.float32]

#: Multiples of a tokenizer's scale at which each kind is fitted.
PLANE_FACTORS = (0.7, 1.0, 1.4)
#: How many fits `plane` makes: of each order, and of the reference.
PLANE_FITS = len(PLANE_FACTORS) * (1 + len(ORDERS))
#: The rate weight that is shown of tokenizers that have none.
USUAL_RATE_WEIGHT = 0.6
#: Chunks to fit on and to measure on at most, and pairs of chunks whose tokens are compared.
FIT_CHUNKS, MEASURE_CHUNKS, PAIRS = 2000, 600, 200
#: Standard deviation of the noise, as a share of each dimension's normalised range.
NOISE = 0.001


@dataclass(frozen=True)
class PlanePoint:
    """One refit.

    Attributes:
        kind: its name in words.
        order, rate_weight, symbol_format, scale: its settings.
        vocab_size: ids that it has.
        tokens: per chunk, mean.
        rmse: of rounding and choosing tokens, in normalised units.
        moved, noisy: share of the tokens (0 to 1) that change from one frame to the next, and by noise; at the
            tokenizer's own scale only, else None.
        problem: why there is no such tokenizer; then nothing was measured.
    """

    kind: str
    order: Order
    rate_weight: float
    symbol_format: SymbolFormat
    scale: float | list[float]
    vocab_size: int | None = None
    tokens: float | None = None
    rmse: float | None = None
    moved: float | None = None
    noisy: float | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def plane(
    fitted: FloatArray,
    measured: FloatArray,
    pairs: tuple[FloatArray, FloatArray],
    *,
    like: FastTokenizer,
    normalizer: Normalizer,
    vocab_size: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[PlanePoint, ...]:
    """Refits of every kind at several scales, kind by kind.

    Args:
        fitted, measured: raw chunks [N, H, D] and [M, H, D] to fit on and to measure on.
        pairs: raw chunks, and those that begin one frame later, [P, H, D] each.
        like: gives the scale, the rate weight (if it has one) and, where `vocab_size` is None, the vocabulary's size.
        normalizer: of all chunks.
        seed: of the noise.
        num_threads: None means all processors.
        progress: called with 1 after each fit.
    """
    chunks = normalizer.apply(fitted), normalizer.apply(measured)
    first, second = normalizer.apply(pairs[0]), normalizer.apply(pairs[1])
    random = np.random.default_rng(seed)
    noisy = (first + random.normal(0.0, 2.0 * NOISE, first.shape)).astype(np.float32)
    weights = (0.0, like.rate_weight or USUAL_RATE_WEIGHT)
    kinds: list[tuple[str, SymbolFormat, Order, tuple[float, ...]]] = [("reference", "reference", "frequency", (0.0,))]
    kinds += [(f"{order} first", "plain", order, weights) for order in ORDERS]
    points: list[PlanePoint] = []
    for name, symbol_format, order, tried in kinds:
        for factor in PLANE_FACTORS:
            scale = scale_list(like.scale, factor)
            empty = PlanePoint(name, order, 0.0, symbol_format, scale)
            named = [replace(empty, kind=_kind(name, weight), rate_weight=weight) for weight in tried]
            try:
                fitter = TokenizerFitter(fitted.shape[1], fitted.shape[2], scale=scale, order=order)
                fitter.add(chunks[0], num_threads=num_threads)
                tokenizer = fitter.finish(
                    vocab_size=vocab_size or like.vocab_size, symbol_format=symbol_format, num_threads=num_threads
                )
            except TokenizerError as error:  # more symbols than ids: a result, and shown as such
                points += [replace(point, problem=str(error)) for point in named]
            else:
                for point in named:
                    tokens, errors = token_errors(tokenizer, chunks[1], point.rate_weight, num_threads=num_threads)
                    point = replace(
                        point,
                        vocab_size=tokenizer.vocab_size,
                        tokens=float(tokens.mean()),
                        rmse=float(np.sqrt((errors**2).mean())),
                    )
                    if factor == 1.0 and len(first):
                        rows = [
                            tokenizer.encode(each, rate_weight=point.rate_weight, num_threads=num_threads)
                            for each in (first, second, noisy)
                        ]
                        point = replace(
                            point, moved=changed_share(rows[0], rows[1]), noisy=changed_share(rows[0], rows[2])
                        )
                    points.append(point)
            if progress is not None:
                progress(1)
    return tuple(sorted(points, key=lambda point: _names(points).index(point.kind)))


def _kind(name: str, rate_weight: float) -> str:
    return name if name == "reference" else f"{name}, {f'rate weight {rate_weight:g}' if rate_weight else 'plain'}"


def _names(points: Sequence[PlanePoint]) -> list[str]:
    return list(dict.fromkeys(point.kind for point in points))


def by_kind(points: Sequence[PlanePoint]) -> dict[str, list[PlanePoint]]:
    """The points that were measured, of each kind, from coarse to fine; kinds without any are left out."""
    found: dict[str, list[PlanePoint]] = {}
    for point in points:
        if point.problem is None:
            found.setdefault(point.kind, []).append(point)
    return found


def tokens_at(points: Sequence[PlanePoint], rmse: float) -> float | None:
    """Tokens per chunk of one kind at that error, on the line between its points; None where they do not reach it.

    The line is straight in logarithms, as both go with powers of the scale: 10 tokens at 0.02 and 40 at 0.005 are 20
    at 0.01.
    """
    known = sorted((point.rmse, point.tokens) for point in points if point.rmse and point.tokens)
    if not known or not known[0][0] <= rmse <= known[-1][0]:
        return None
    errors, tokens = np.log(np.array(known)).T
    return float(np.exp(np.interp(np.log(rmse), errors, tokens)))


@kernel
def _common_lengths(first, first_bounds, second, second_bounds, out):  # type: ignore[no-untyped-def]
    """Length of the longest common subsequence of each pair of rows, into `out` int32 [N]."""
    for n in range(len(out)):
        a = first[first_bounds[n] : first_bounds[n + 1]]
        b = second[second_bounds[n] : second_bounds[n + 1]]
        above = np.zeros(len(b) + 1, np.int32)
        for i in range(len(a)):
            left = np.int32(0)  # of this row
            corner = np.int32(0)  # of the row above, one place before
            for j in range(len(b)):
                old = above[j + 1]
                best = corner + np.int32(1) if a[i] == b[j] else max(old, left)
                above[j + 1] = best
                corner, left = old, best
        out[n] = above[len(b)]


def changed_share(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Share of the tokens of both, row by row, that have no partner in the other row in the same order; 0 to 1."""
    arrays = []
    for rows in (first, second):
        lengths = np.array([len(row) for row in rows], np.int64)
        flat = np.array([i for row in rows for i in row], np.int32)
        arrays += [flat, np.concatenate([[0], np.cumsum(lengths)])]
    common = np.empty(len(first), np.int32)
    _common_lengths(*arrays, common)
    return 1.0 - 2.0 * float(common.sum()) / max(1, len(arrays[0]) + len(arrays[2]))
