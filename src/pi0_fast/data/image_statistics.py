"""Statistics of pictures per channel, in [0, 1] and in the shape that LeRobot keeps: [3, 1, 1].

Counted exactly, level by level, over some frames of each episode; nothing is averaged over episodes.
Four pixels of red 0, 0, 0, 255 have the mean 0.25 and the median 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: About as many frames of an episode are counted.
FRAMES = 100
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


class ImageStatistics:
    """How often each of the 256 levels of each channel was seen."""

    def __init__(self) -> None:
        self.levels = np.zeros((3, 256), np.int64)
        self.frames = 0

    def add(self, image: npt.NDArray[np.uint8]) -> None:
        """Count an image, uint8 [height, width, 3]."""
        for channel in range(3):
            self.levels[channel] += np.bincount(image[:, :, channel].reshape(-1), minlength=256)
        self.frames += 1

    def merge(self, other: ImageStatistics) -> None:
        """Count what another has counted."""
        self.levels += other.levels
        self.frames += other.frames

    def to_lerobot(self) -> dict[str, Any]:
        """min, max, mean, std, count (frames), quantiles: nested lists [3, 1, 1], `count` [1]."""
        values = np.arange(256) / 255
        total = self.levels.sum(axis=1)
        mean = (self.levels * values).sum(axis=1) / total
        seen = np.cumsum(self.levels, axis=1)
        found = {
            "min": values[(self.levels > 0).argmax(axis=1)],
            "max": values[255 - (self.levels[:, ::-1] > 0).argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt((self.levels * (values - mean[:, None]) ** 2).sum(axis=1) / total),
        }
        for name, share in _QUANTILES.items():
            found[name] = np.array([_quantile(row, share) for row in seen]) / 255
        shaped: dict[str, Any] = {name: value.reshape(3, 1, 1).tolist() for name, value in found.items()}
        return {**shaped, "count": [self.frames]}


def _quantile(seen: npt.NDArray[np.int64], share: float) -> float:
    """Linear between the two nearest values, as numpy's default; `seen[level]` pixels are at or below a level."""
    rank = share * (int(seen[-1]) - 1)
    below, above = (int(np.searchsorted(seen, place, side="right")) for place in (int(rank), int(np.ceil(rank))))
    return below + (above - below) * (rank - int(rank))
