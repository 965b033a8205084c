"""Whether float64 columns lose something that matters when they become float32, measured while they are read.

float32 has 24 bits: steps of 1 at ten million, of 128 at a timestamp of 1.7e9. Values that move by little more than
such a step come out as a staircase, and every later error is measured against the staircase. That is told once for
each column, when a reading ends. It is a warning and no error, because what is read may be one episode in which a
joint rests, and because the dimension may be one that nobody uses. Left out: float32 columns, which lose nothing.
"""

from __future__ import annotations

import logging

import numpy as np

logger = logging.getLogger(__name__)

#: A rounding up to this share of a dimension's max - min is no loss.
_HARMLESS_SHARE = 1e-4
# max - min up to this share of the magnitude is the noise of float64 computations, not motion ...
_NOISE_SHARE = 1e-12
# ... and so is this much around zero: a nanometre, a nanoradian. The normaliser takes the same.
_LEAST_MOTION = 1e-9


class Rounding:
    """The largest rounding, and the range, of each dimension of one column, over all that was read of it."""

    def __init__(self, key: str, names: tuple[str, ...] | None) -> None:
        self._key, self._names = key, names
        self._low = self._high = self._largest = np.empty(0)
        self._episode = np.empty(0, np.int64)
        self._told: set[int] = set()

    def add(self, values: np.ndarray, rounded: np.ndarray, episode: int) -> None:
        """Account for values float64 [T, D] of an episode that became `rounded`, float32 [T, D].

        Values that are not finite, before or after, are left to the checks that name them.
        """
        lost = np.zeros(values.shape[1])
        if not np.array_equal(values, rounded):
            with np.errstate(invalid="ignore"):
                differences = np.abs(values - rounded)
            lost = np.max(differences, axis=0, initial=0.0, where=np.isfinite(differences))
        low = np.fmin.reduce(values, axis=0, initial=np.inf)
        high = np.fmax.reduce(values, axis=0, initial=-np.inf)
        if not self._largest.size:
            self._low, self._high, self._largest = low, high, lost
            self._episode = np.full(len(lost), episode)
            return
        self._low, self._high = np.fmin(self._low, low), np.fmax(self._high, high)
        self._episode = np.where(lost > self._largest, episode, self._episode)
        self._largest = np.maximum(self._largest, lost)

    def tell(self) -> None:
        """Log a warning that names the dimensions which lose too much, if any that was not told before."""
        with np.errstate(invalid="ignore"):
            span = self._high - self._low
            noise = np.maximum(_LEAST_MOTION, _NOISE_SHARE * np.maximum(np.abs(self._low), np.abs(self._high)))
            harmed = np.isfinite(span) & (span > noise) & (self._largest > _HARMLESS_SHARE * span)
        new = [dim for dim in np.flatnonzero(harmed).tolist() if dim not in self._told]
        if not new:
            return
        self._told.update(new)
        worst = max(new, key=lambda dim: float(self._largest[dim] / span[dim]))
        others = f" (and {len(new) - 1} more dimensions)" if len(new) > 1 else ""
        name = f" ({self._names[worst]})" if self._names is not None else ""
        logger.warning(
            "column %r, dimension %d%s%s: float64 values between %.10g and %.10g are rounded to float32, by up to %.3g "
            "(%.2g %% of their range, in episode %d); errors reported later leave this out. Subtract an offset from "
            "the dimension, or leave it out",
            self._key, worst, name, others, self._low[worst], self._high[worst], self._largest[worst],
            100 * self._largest[worst] / span[worst], self._episode[worst],
        )  # fmt: skip
