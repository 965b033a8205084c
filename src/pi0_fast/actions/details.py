"""What a report on a tokenizer shows beyond `Distortion`: each chunk's tokens and error, uses of the ids, other scales.

Works on arrays of raw chunks that are in memory. Left out: which chunks these are, and everything that people see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.report import Distortion, DistortionMeter
from pi0_fast.actions.tokenizer import FastTokenizer, TokenizerFitter
from pi0_fast.types import TokenizerError

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

#: Multiples of a tokenizer's own scale that a sweep tries.
SWEEP_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
_BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class Details:
    """A tokenizer on N raw chunks [H, D].

    Attributes:
        distortion: the sums over all chunks.
        lengths: int32 [N], tokens of each chunk.
        errors: float64 [N], root mean square error of each chunk over all its values, in normalised units.
        saturations: int32 [N], coefficients of each chunk that the vocabulary could not express.
        uses: int64 [vocab_size], how often each id occurs.
        clipped: float64 [D], share (0 to 1) of each dimension's values that the normaliser clips.
    """

    distortion: Distortion
    lengths: IntArray
    errors: DoubleArray
    saturations: IntArray
    uses: LongArray
    clipped: DoubleArray


def examine(
    tokenizer: FastTokenizer,
    normalizer: Normalizer,
    chunks: FloatArray,
    *,
    num_threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Details:
    """Measure a tokenizer on raw chunks [N, H, D], N at least 1; `progress` is told how many were just done."""
    meter = DistortionMeter(tokenizer, normalizer, num_threads=num_threads)
    uses = np.zeros(tokenizer.vocab_size, np.int64)
    errors, lengths, saturations = [], [], []
    clipped = np.zeros(normalizer.size)
    half = (normalizer.high - normalizer.low) / 2.0
    step = max(1, _BLOCK_VALUES // chunks[0].size)
    for begin in range(0, len(chunks), step):
        part = chunks[begin : begin + step]
        meter.add(part)
        ids, info = tokenizer.encode(normalizer.apply(part), return_info=True, num_threads=num_threads)
        uses += np.bincount(np.concatenate([np.asarray(row, np.int64) for row in ids]), minlength=len(uses))
        decoded = tokenizer.decode(ids, time_horizon=part.shape[1], action_dim=part.shape[2], num_threads=num_threads)
        restored = normalizer.invert(decoded)
        distance = (restored.astype(np.float64) - part) / half
        errors.append(np.sqrt((distance**2).mean(axis=(1, 2))))
        lengths.append(info.token_counts)
        saturations.append(info.saturations)
        clipped += normalizer.clipped(part).sum(axis=(0, 1))
        if progress is not None:
            progress(len(part))
    return Details(
        distortion=meter.result(),
        lengths=np.concatenate(lengths),
        errors=np.concatenate(errors),
        saturations=np.concatenate(saturations),
        uses=uses,
        clipped=clipped / (len(chunks) * chunks.shape[1]),
    )


def round_trip(tokenizer: FastTokenizer, normalizer: Normalizer, chunk: FloatArray) -> FloatArray:
    """What one raw chunk [H, D] is after encoding and decoding, float32 [H, D]."""
    ids = tokenizer.encode(normalizer.apply(chunk[None]))
    decoded = tokenizer.decode(ids, time_horizon=chunk.shape[0], action_dim=chunk.shape[1])
    restored: FloatArray = normalizer.invert(decoded)[0]
    return restored


def worst_chunks(errors: DoubleArray, episodes: LongArray, starts: LongArray, horizon: int, count: int) -> list[int]:
    """Positions of the `count` largest of errors [N], of windows that do not overlap.

    Neighbouring windows of an episode have nearly the same error; of such only the worst is taken.

    Args:
        errors: of each chunk.
        episodes, starts: where each chunk comes from.
        horizon: steps of a chunk.
    """
    chosen: list[int] = []
    for position in np.argsort(-errors, kind="stable").tolist():
        if len(chosen) == count:
            break
        near = (
            episodes[position] == episodes[other] and abs(int(starts[position] - starts[other])) < horizon
            for other in chosen
        )
        if not any(near):
            chosen.append(position)
    return chosen


@dataclass(frozen=True)
class SweepPoint:
    """A tokenizer refitted at another scale.

    Attributes:
        scale: one number, or one for each dimension.
        vocab_size: of the refitted tokenizer.
        distortion: on the measured chunks; None where no such tokenizer can be made.
        problem: why not.
    """

    scale: float | list[float]
    vocab_size: int | None
    distortion: Distortion | None
    problem: str | None = None


def sweep_scales(
    scales: Sequence[float | list[float]],
    fitted: FloatArray,
    measured: FloatArray,
    *,
    like: FastTokenizer,
    normalizer: Normalizer,
    vocab_size: int | None = None,
    num_threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[SweepPoint]:
    """Tokenizers like a given one at other scales: same vocabulary size, symbol format, order, encoder and normaliser.

    Args:
        scales: to try, in this order.
        fitted: raw chunks [N, H, D] to fit on.
        measured: raw chunks [M, H, D] to measure on.
        like: gives symbol format, order and encoder, and the vocabulary's size where `vocab_size` is None.
        normalizer: of both sets.
        vocab_size: ids at most.
        progress: called with 1 after each scale.
    """
    normalized = normalizer.apply(fitted)
    points: list[SweepPoint] = []
    for scale in scales:
        try:
            fitter = TokenizerFitter(fitted.shape[1], fitted.shape[2], scale=scale, order=like.order)
            fitter.add(normalized, num_threads=num_threads)
            tokenizer = fitter.finish(
                vocab_size=vocab_size or like.vocab_size,
                symbol_format=like.symbol_format,
                rate_weight=like.rate_weight,
                max_error=like.max_error,
                normalizer=normalizer,
                num_threads=num_threads,
            )
        except TokenizerError as error:  # more symbols than the vocabulary holds: a result, and shown as such
            points.append(SweepPoint(scale, None, None, str(error)))
        else:
            meter = DistortionMeter(tokenizer, normalizer, num_threads=num_threads)
            step = max(1, _BLOCK_VALUES // measured[0].size)
            for begin in range(0, len(measured), step):
                meter.add(measured[begin : begin + step])
            points.append(SweepPoint(scale, tokenizer.vocab_size, meter.result()))
        if progress is not None:
            progress(1)
    return points


def rounding_rmse(distortion: Distortion, normalizer: Normalizer) -> float:
    """The part of the normalised RMSE, over all dimensions, that rounding makes alone."""
    relative = distortion.quantization_rmse * 2.0 / (normalizer.high - normalizer.low)
    return float(np.sqrt((relative**2).mean()))


def scale_list(scale: float | list[float], factor: float) -> Any:
    """A multiple of a scale, of one number or of one for each dimension."""
    return [value * factor for value in scale] if isinstance(scale, list) else scale * factor
