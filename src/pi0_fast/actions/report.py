"""Rate and distortion of a tokenizer: tokens per chunk, and errors in the data's own units, on chunks it is shown.

Separates what the normaliser clips away from what quantisation rounds away. Left out: where the chunks come from
(fitting.py), and pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.tokenizer import FastTokenizer

DoubleArray = npt.NDArray[np.float64]
#: (title, rows, headers) of a table, for a terminal or a page.
Table = tuple[str, list[list[Any]], list[str]]

#: The error for which the table says which scale would reach it: a millimetre, for data in metres.
TARGET_ERROR = 0.001


def token_statistics(lengths: npt.NDArray[Any], values_per_chunk: int) -> dict[str, float | int]:
    """Token counts of chunks [N] as metadata.json names them; the ratio is values per token."""
    mean = float(np.mean(lengths))
    return {
        "compression_ratio": values_per_chunk / mean,
        "mean_token_length": mean,
        "p99_token_length": float(np.percentile(lengths, 99)),
        "min_token_length": int(np.min(lengths)),
        "max_token_length": int(np.max(lengths)),
    }


@dataclass(frozen=True)
class Distortion:
    """What a round trip through the tokenizer does to chunks; arrays are float64 [D], in the data's own units.

    Attributes:
        chunks: number of chunks measured.
        tokens: see `token_statistics`.
        rmse, worst: root mean square and largest absolute error of the whole round trip.
        clipping_rmse, clipping_worst: the part that the normaliser's clipping makes alone.
        quantization_rmse, quantization_worst: the part that rounding the coefficients makes alone.
        normalized_rmse: of the whole round trip, over all dimensions, in normalised units.
        clipped_values, clipped_frames: shares (0 to 1) of the values, and of the steps, of which something was clipped.
        saturations: coefficients that the vocabulary could not express.
        over_error: chunks that no encoding keeps within the tokenizer's `max_error`.
    """

    chunks: int
    tokens: dict[str, float | int]
    rmse: DoubleArray
    worst: DoubleArray
    clipping_rmse: DoubleArray
    clipping_worst: DoubleArray
    quantization_rmse: DoubleArray
    quantization_worst: DoubleArray
    normalized_rmse: float
    clipped_values: float
    clipped_frames: float
    saturations: int
    over_error: int

    def scale_for(self, scale: float | list[float], error: float) -> DoubleArray:
        """The scale at which the largest rounding error of each dimension would be about `error`, float64 [D].

        Rounding errors are in inverse proportion to the scale. 0 where there is no error.
        """
        return np.asarray(scale, np.float64) * self.quantization_worst / error

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in self.__dict__.items()
        }


class DistortionMeter:
    """Takes in chunks block by block and adds up `Distortion`; memory is that of one block."""

    def __init__(self, tokenizer: FastTokenizer, normalizer: Normalizer, *, num_threads: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._normalizer = normalizer
        self._threads = num_threads
        size = normalizer.size
        self._squares = np.zeros((3, size))
        self._worst = np.zeros((3, size))
        self._normalized_squares = 0.0
        self._clipped_values = self._clipped_frames = self._saturations = self._over_error = self._steps = 0
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._shape = (tokenizer.time_horizon or 0, size)

    def add(self, chunks: npt.NDArray[np.float32]) -> None:
        """Measure chunks [N, H, D] of raw (not normalised) encoded values."""
        if not len(chunks):
            return
        self._shape = (chunks.shape[1], chunks.shape[2])
        normalized = self._normalizer.apply(chunks)
        ids, info = self._tokenizer.encode(normalized, return_info=True, num_threads=self._threads)
        # A published tokenizer is bound to no shape, and wants to be told.
        horizon, size = self._shape
        decoded = self._tokenizer.decode(ids, time_horizon=horizon, action_dim=size, num_threads=self._threads)
        kept = self._normalizer.invert(normalized).astype(np.float64)
        restored = self._normalizer.invert(decoded).astype(np.float64)
        for row, error in enumerate((restored - chunks, kept - chunks, restored - kept)):
            self._squares[row] += (error**2).sum(axis=(0, 1))
            self._worst[row] = np.maximum(self._worst[row], np.abs(error).max(axis=(0, 1)))
        exact = (chunks - self._normalizer.low) * 2.0 / (self._normalizer.high - self._normalizer.low) - 1.0
        self._normalized_squares += float(((decoded - exact) ** 2).sum())
        clipped = self._normalizer.clipped(chunks)
        self._clipped_values += int(clipped.sum())
        self._clipped_frames += int(clipped.any(axis=2).sum())
        self._saturations += int(info.saturations.sum())
        self._over_error += int(info.over_error.sum())
        self._steps += chunks.shape[0] * chunks.shape[1]
        self._lengths.append(info.token_counts)

    @property
    def chunks(self) -> int:
        """How many chunks were measured so far."""
        return sum(len(lengths) for lengths in self._lengths)

    def result(self) -> Distortion:
        """The sums as means and maxima; there must have been a chunk."""
        rmse, clipping_rmse, quantization_rmse = np.sqrt(self._squares / self._steps)
        worst, clipping_worst, quantization_worst = self._worst
        values = self._steps * self._shape[1]
        return Distortion(
            chunks=self.chunks,
            tokens=token_statistics(np.concatenate(self._lengths), self._shape[0] * self._shape[1]),
            rmse=rmse,
            worst=worst,
            clipping_rmse=clipping_rmse,
            clipping_worst=clipping_worst,
            quantization_rmse=quantization_rmse,
            quantization_worst=quantization_worst,
            normalized_rmse=float(np.sqrt(self._normalized_squares / values)),
            clipped_values=self._clipped_values / values,
            clipped_frames=self._clipped_frames / self._steps,
            saturations=self._saturations,
            over_error=self._over_error,
        )


def error_table(measured: Distortion, scale: float | list[float], normalizer: Normalizer, measured_on: str) -> Table:
    """Errors of each dimension; `scale` is that of the tokenizer, `measured_on` says what was measured."""
    names = normalizer.names or [""] * normalizer.size
    scales = measured.scale_for(scale, TARGET_ERROR)
    width = normalizer.high - normalizer.low
    columns = (width, measured.rmse, measured.worst, measured.quantization_worst, measured.clipping_worst, scales)

    def shown(value: float, dim: int) -> str:
        """Three digits; what float32 itself rounds away is no error."""
        return "0" if abs(value) < 1e-6 * width[dim] else f"{value:.3g}"

    rows = [[dim, names[dim], *(shown(float(column[dim]), dim) for column in columns)] for dim in range(len(names))]
    headers = ["", "dimension", "range", "RMSE", "worst", "rounding", "clipping", "scale"]
    title = (
        f"Errors on {measured_on}, in the data's own units: RMSE, worst, worst by rounding alone and by "
        f"clipping alone; scale: the --scale at which rounding would err by {TARGET_ERROR:g} at worst (a millimetre, "
        "where the unit is a metre)"
    )
    return title, rows, headers
