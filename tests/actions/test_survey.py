"""What is found in values, by hand and against numpy on all of them at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.actions.survey import BINS, Survey, survey
from pi0_fast.types import DatasetError


def surveyed(values: np.ndarray, cuts: tuple[int, ...] = ()) -> Survey:
    """One episode [n, D], in blocks."""
    return survey(lambda: ((0, block) for block in np.split(values.astype(np.float32), cuts) if len(block)))


def test_a_glitch_is_found_where_it_is() -> None:
    random = np.random.default_rng(0)
    episodes = {3: random.normal(size=(200, 2)), 7: random.normal(size=(150, 2))}
    episodes[7][120, 1] = 900.0
    episodes[3][5, 1] = -40.0
    episodes[7][20, 1] = 30.0  # in another block of the same episode

    def blocks() -> Iterator[tuple[int, np.ndarray]]:
        for index, values in episodes.items():
            for begin in range(0, len(values), 50):  # frame 120 is in the third block of its episode
                yield index, values[begin : begin + 50].astype(np.float32)

    found = survey(blocks)
    assert found.rare == (1,)  # 900 makes a sliver of the bulk
    assert found.still == ()
    assert found.outliers.tolist() == [0, 3]
    assert found.outlier_episodes.tolist() == [0, 2]
    (extreme,) = found.extremes
    assert (extreme.dim, extreme.value, extreme.episode, extreme.frame) == (1, 900.0, 7, 120)


def test_frames_of_windows_count_from_the_episodes_beginning() -> None:
    values = np.zeros((2, 60, 3, 1), np.float32)  # two blocks of 60 windows of 3 steps
    values += np.random.default_rng(1).normal(size=values.shape).astype(np.float32)
    values[1, 20, 2, 0] = 500.0  # window 80 of the episode, step 2
    found = survey(lambda: [(5, values[0]), (5, values[1])])
    assert [(e.episode, e.frame) for e in found.extremes] == [(5, 82)]


def test_still_and_rare_dimensions() -> None:
    values = np.zeros((1000, 3))
    values[:, 0] = 0.25
    values[10:14, 1] = 1.0  # a gripper that closes once
    values[:, 2] = np.linspace(-1, 1, 1000)
    found = surveyed(values)
    assert found.still == (0,)
    assert found.rare == (1,)
    assert found.outliers.tolist() == [0, 4, 0]
    assert found.modes["QUANTILES"].normalizer.guarded == (0, 1)
    assert found.counts.sum(axis=1).tolist() == [1000, 1000, 1000 - found.below[2] - found.above[2]]
    assert (found.edges[:, 0] < found.edges[:, -1]).all()


def test_noise_around_a_still_position_is_no_outlier() -> None:
    values = np.tile([[-0.001], [0.001]], (500, 1))
    values[100:105] = 0.005  # beyond the bulk, but nothing beside the range
    values[7] = 1.0
    found = surveyed(values)
    assert found.rare == (0,)
    assert found.outliers.tolist() == [1]


def test_what_modes_do_by_hand() -> None:
    values = np.arange(101, dtype=float)[:, None]  # q01 = 1, q99 = 99, q10 = 10, q90 = 90
    modes = surveyed(values).modes
    assert list(modes) == [mode.value for mode in NormalizationMode]
    quantiles, ten, minmax, identity = (modes[name] for name in ("QUANTILES", "QUANTILE10", "MIN_MAX", "IDENTITY"))
    assert quantiles.outside.tolist() == [2 / 101]
    assert quantiles.largest[0] == pytest.approx(51 * 2 / 98 - 0.0204081632, abs=1e-6)
    assert ten.outside_values == pytest.approx(20 / 101)
    assert (minmax.outside_steps, minmax.largest[0]) == (0.0, 1.0)
    assert identity.outside_steps == 99 / 101
    assert identity.largest[0] == 100.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(1, 4), st.lists(st.integers(0, 300), max_size=3))
def test_numbers_are_numpys_whatever_the_blocks(seed: int, rows: int, size: int, cuts: list[int]) -> None:
    random = np.random.default_rng(seed)
    values = (random.standard_t(1.5, (rows, size)) * random.choice([0.001, 1.0, 300.0], size)).astype(np.float32)
    values[:, random.random(size) < 0.2] = 0.5
    found = surveyed(values, tuple(sorted(min(cut, rows) for cut in cuts)))
    exact = values.astype(np.float64)
    q01, q99 = np.quantile(exact, [0.01, 0.99], axis=0)
    reach = np.maximum(q99 - q01, 0.01 * (exact.max(axis=0) - exact.min(axis=0)))
    outliers = (exact < q01 - reach) | (exact > q99 + reach)
    assert found.outliers.tolist() == outliers.sum(axis=0).tolist()
    assert found.outlier_episodes.tolist() == outliers.any(axis=0).astype(int).tolist()
    for extreme in found.extremes:
        assert exact[extreme.frame, extreme.dim] == extreme.value
    for effect in found.modes.values():
        low, high = effect.normalizer.low, effect.normalizer.high
        outside = (exact < low) | (exact > high)
        np.testing.assert_allclose(effect.outside, outside.mean(axis=0))
        assert effect.outside_values == pytest.approx(outside.mean())
        assert effect.outside_steps == pytest.approx(outside.any(axis=1).mean())
        np.testing.assert_allclose(effect.largest, np.abs((exact - low) * 2 / (high - low) - 1).max(axis=0))
    assert found.counts.shape == (size, BINS)
    assert (found.counts.sum(axis=1) + found.below + found.above == rows).all()


def test_no_values_and_values_that_are_not_finite() -> None:
    with pytest.raises(DatasetError, match="no rows"):
        survey(list)
    with pytest.raises(DatasetError, match="dimension 1"):
        surveyed(np.array([[0.0, np.nan]]))
