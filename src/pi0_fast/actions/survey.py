"""The values that a tokenizer would encode: ranges, distributions, outliers, and what each mode does to them.

Takes blocks of values twice, in memory that does not grow with their number. Left out: where the blocks come from, and
everything that people see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.normalize import NormalizationMode, Normalizer, Statistics, exact_statistics

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]
#: Gives (episode index, values [n, D] or [n, H, D]) in the same order at every call; the blocks of an episode follow
#: each other, row 0 of the first being its frame or window 0.
LocatedBlocks = Callable[[], Iterable[tuple[int, FloatArray]]]

#: Bins of a dimension's histogram.
BINS = 60
#: How far a histogram looks outside [q01, q99], in their distance.
_VIEW = 0.25


@dataclass(frozen=True)
class ModeEffect:
    """What one normalisation mode does; float64 [D] unless it says otherwise.

    Attributes:
        normalizer: the mode fitted on the values.
        outside: share (0 to 1) of each dimension's values outside [low, high]; clipped where `normalizer.clip`.
        outside_values, outside_steps: shares of all values, and of the steps with such a value in any dimension.
        largest: the largest absolute normalised value of each dimension, before clipping.
    """

    normalizer: Normalizer
    outside: DoubleArray
    outside_values: float
    outside_steps: float
    largest: DoubleArray


@dataclass(frozen=True)
class Extreme:
    """The outlier of one dimension that is furthest out: its value, episode, and frame in it."""

    dim: int
    value: float
    episode: int
    frame: int


@dataclass(frozen=True)
class Survey:
    """Values of D dimensions.

    Attributes:
        statistics: exact, over all steps.
        still: dimensions that never move.
        rare: dimensions of which a few values are so far from the rest that [q01, q99] is a sliver of min to max: a
            gripper that moves in few frames, or a glitch. QUANTILES guards them.
        edges: float64 [D, BINS + 1] of the histograms, in the data's own units.
        counts: int64 [D, BINS].
        below, above: int64 [D], values outside the histograms' edges.
        outliers: int64 [D], values further outside [q01, q99] than those are apart (or than a hundredth of min to max,
            where that is more).
        outlier_episodes: int64 [D], episodes that hold such a value.
        extremes: one for each dimension with outliers.
        modes: the effect of every mode, by its name.
    """

    statistics: Statistics
    still: tuple[int, ...]
    rare: tuple[int, ...]
    edges: DoubleArray
    counts: LongArray
    below: LongArray
    above: LongArray
    outliers: LongArray
    outlier_episodes: LongArray
    extremes: tuple[Extreme, ...]
    modes: dict[str, ModeEffect]


def survey(
    blocks: LocatedBlocks,
    *,
    names: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Look at all values.

    Args:
        blocks: see `LocatedBlocks`; called two or three times.
        names: of the D dimensions, for errors.
        progress: called with the number of rows just read, in each pass.

    Raises:
        DatasetError: no values, or values that are not finite.
    """
    statistics = exact_statistics(lambda: (block for _, block in blocks()), names=names, progress=progress)
    normalizers = {
        mode.value: Normalizer.from_statistics(statistics, mode, names=names, source="frames")
        for mode in NormalizationMode
    }
    guarded = normalizers["QUANTILES"].guarded
    minmax_guarded = normalizers["MIN_MAX"].guarded  # MIN_MAX guards only what never moves
    rare = tuple(dim for dim in guarded if dim not in minmax_guarded)
    histograms = _Histograms(statistics, guarded)
    outliers = _Outliers(statistics)
    effects = {name: _Effect(normalizer) for name, normalizer in normalizers.items()}
    for episode, block in blocks():
        values = block.reshape(-1, block.shape[-1]).astype(np.float64)
        histograms.add(values)
        outliers.add(episode, block)
        for effect in effects.values():
            effect.add(values)
        if progress is not None:
            progress(len(values))
    return Survey(
        statistics=statistics,
        still=minmax_guarded,
        rare=rare,
        edges=histograms.edges,
        counts=histograms.counts,
        below=histograms.below,
        above=histograms.above,
        outliers=outliers.counts,
        outlier_episodes=outliers.episodes,
        extremes=outliers.extremes(),
        modes={name: effect.result() for name, effect in effects.items()},
    )


class _Histograms:
    """Counts of each dimension's values in equal bins around the bulk of them."""

    def __init__(self, statistics: Statistics, guarded: Sequence[int]) -> None:
        width = statistics.q99 - statistics.q01
        low = np.maximum(statistics.min, statistics.q01 - _VIEW * width)
        high = np.minimum(statistics.max, statistics.q99 + _VIEW * width)
        whole = list(guarded)
        low[whole], high[whole] = statistics.min[whole], statistics.max[whole]
        # Something must be between the edges, also of a value that never changes.
        margin = np.where(high > low, 0.0, np.maximum(np.abs(low) * 1e-3, 1e-3))
        self.edges = np.linspace(low - margin, high + margin, BINS + 1, axis=1)
        self.counts = np.zeros((len(low), BINS), np.int64)
        self.below = np.zeros(len(low), np.int64)
        self.above = np.zeros(len(low), np.int64)

    def add(self, values: DoubleArray) -> None:
        for dim, edges in enumerate(self.edges):
            column = values[:, dim]
            self.counts[dim] += np.histogram(column, edges)[0]
            self.below[dim] += int((column < edges[0]).sum())
            self.above[dim] += int((column > edges[-1]).sum())


class _Outliers:
    """Values far outside [q01, q99], where they are, and the furthest of each dimension."""

    def __init__(self, statistics: Statistics) -> None:
        reach = np.maximum(statistics.q99 - statistics.q01, 0.01 * (statistics.max - statistics.min))
        self._low, self._high = statistics.q01 - reach, statistics.q99 + reach
        self.counts = np.zeros(len(reach), np.int64)
        self.episodes = np.zeros(len(reach), np.int64)
        self._last_episode = np.full(len(reach), -1, np.int64)
        self._furthest = np.zeros(len(reach))
        self._extremes: dict[int, Extreme] = {}
        self._episode, self._row = -1, 0

    def add(self, episode: int, block: FloatArray) -> None:
        first = self._row if episode == self._episode else 0
        self._episode, self._row = episode, first + len(block)
        values = block.astype(np.float64)
        distance = np.maximum(self._low - values, values - self._high)  # positive outside
        outside = distance > 0
        steps = tuple(range(block.ndim - 1))
        self.counts += outside.sum(axis=steps)
        found = outside.any(axis=steps)
        self.episodes += found & (self._last_episode != episode)
        self._last_episode[found] = episode
        for dim in np.flatnonzero(found).tolist():
            column = distance[..., dim]
            place = np.unravel_index(int(column.argmax()), column.shape)
            if column[place] > self._furthest[dim]:
                self._furthest[dim] = column[place]
                frame = first + sum(int(i) for i in place)  # of a window: its first frame and the step in it
                self._extremes[dim] = Extreme(dim, float(block[..., dim][place]), episode, frame)

    def extremes(self) -> tuple[Extreme, ...]:
        return tuple(self._extremes[dim] for dim in sorted(self._extremes))


class _Effect:
    def __init__(self, normalizer: Normalizer) -> None:
        self._normalizer = normalizer
        self._outside = np.zeros(normalizer.size, np.int64)
        self._largest = np.zeros(normalizer.size)
        self._steps = self._outside_steps = 0

    def add(self, values: DoubleArray) -> None:
        low, high = self._normalizer.low, self._normalizer.high
        outside = (values < low) | (values > high)
        self._outside += outside.sum(axis=0)
        self._outside_steps += int(outside.any(axis=1).sum())
        self._steps += len(values)
        normalized = np.abs((values - low) * 2.0 / (high - low) - 1.0)
        self._largest = np.maximum(self._largest, normalized.max(axis=0, initial=0.0))

    def result(self) -> ModeEffect:
        return ModeEffect(
            self._normalizer,
            self._outside / self._steps,
            float(self._outside.sum() / (self._steps * self._normalizer.size)),
            self._outside_steps / self._steps,
            self._largest,
        )
