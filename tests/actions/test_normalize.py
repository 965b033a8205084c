"""Exact statistics against numpy; the five modes by hand; guarded ranges; the inverse; json."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.actions.normalize import (
    QUANTILES,
    NormalizationMode,
    Normalizer,
    Statistics,
    exact_statistics,
)
from pi0_fast.types import DatasetError, TokenizerError, UsageError

MODES = list(NormalizationMode)


def once(*arrays: Any) -> Callable[[], Iterable[Any]]:
    return lambda: list(arrays)


def statistics(**changes: Any) -> Statistics:
    """Of two dimensions; any quantity may be replaced."""
    values: dict[str, Any] = {
        "min": [-10, 0], "q01": [-8, 1], "q10": [-5, 2], "q50": [0, 5], "q90": [5, 6], "q99": [8, 9],
        "max": [10, 20], "mean": [1, 5], "std": [4, 2], "count": [100],
    }  # fmt: skip
    return Statistics.from_mapping(values | changes)


# --- modes --------------------------------------------------------------------------------------------------


def test_mode_names_in_any_case() -> None:
    assert NormalizationMode.parse("quantiles") is NormalizationMode.QUANTILES
    assert NormalizationMode(" Mean_Std ") is NormalizationMode.MEAN_STD
    assert NormalizationMode.parse(NormalizationMode.IDENTITY) is NormalizationMode.IDENTITY
    assert f"{NormalizationMode.QUANTILE10}" == "QUANTILE10"
    for unknown in ("QUANTILE", "", None, 3):
        with pytest.raises(UsageError, match="one of QUANTILES, MEAN_STD, MIN_MAX, QUANTILE10, IDENTITY"):
            NormalizationMode(unknown)


@pytest.mark.parametrize(
    ("mode", "expected", "clips"),
    [
        # x = (-12, 5): the two quantile modes clip the first, the others do not.
        ("QUANTILES", [-1, 0], True),  # 2 (5 - 1) / 8 - 1
        ("QUANTILE10", [-1, 0.5], True),  # 2 (5 - 2) / 4 - 1
        ("MIN_MAX", [-1.2, -0.5], False),
        ("MEAN_STD", [-3.25, 0], False),  # (x - mean) / std
        ("IDENTITY", [-12, 5], False),
    ],
)
def test_the_five_modes_by_hand(mode: str, expected: list[float], clips: bool) -> None:
    normalizer = Normalizer.from_statistics(statistics(), mode)
    assert normalizer.clip is clips
    assert normalizer.guarded == ()
    got = normalizer.apply([[-12, 5]])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [expected], rtol=0, atol=1e-7)
    assert normalizer.clipped([[-12, 5]]).tolist() == [[clips, False]]


def test_clip_is_a_stored_choice() -> None:
    unclipped = Normalizer.from_statistics(statistics(), clip=False)
    np.testing.assert_allclose(unclipped.apply([[-12, 17]]), [[-1.5, 3]])
    assert not unclipped.clipped([[-12, 17]]).any()
    clipped = Normalizer.from_statistics(statistics(), "MIN_MAX", clip=True)
    np.testing.assert_allclose(clipped.apply([[-12, 17]]), [[-1, 0.7]])
    assert clipped.clipped([[-12, 17], [-10, 20]]).tolist() == [[True, False], [False, False]]


# --- apply and invert ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.integers(1, 4)),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    st.sampled_from(MODES),
)
def test_the_inverse_is_exact_inside_the_range(values: np.ndarray, mode: NormalizationMode) -> None:
    normalizer = Normalizer.fit(once(values), mode)
    back = normalizer.invert(normalizer.apply(values))
    expected = values
    if normalizer.clip:
        expected = np.clip(values, normalizer.low, normalizer.high)
        assert np.array_equal(normalizer.clipped(values), expected != values)
    normalised = (np.abs(expected.astype(np.float64) - normalizer.low) / (normalizer.high - normalizer.low)) + 1
    # Half a float32 spacing of the normalised value, in units of the data, and of the value itself.
    allowed = 2.0**-23 * normalised * (normalizer.high - normalizer.low) + 2.0**-23 * np.abs(expected)
    allowed += 2.0**-149  # the spacing of denormals
    assert (np.abs(back - expected.astype(np.float64)) <= allowed).all()


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, (7, 3), elements=st.floats(-100, 100, width=32)),
    st.sampled_from(MODES),
    st.booleans(),
)
def test_apply_equals_the_formula_one_number_at_a_time(values: np.ndarray, mode: NormalizationMode, clip: bool) -> None:
    normalizer = Normalizer.fit(once(values), mode, clip=clip)
    got = normalizer.apply(values)
    for row, line in enumerate(values.tolist()):
        for dim, value in enumerate(line):
            low, high = float(normalizer.low[dim]), float(normalizer.high[dim])
            expected = 2 * (value - low) / (high - low) - 1
            if clip:
                expected = min(1.0, max(-1.0, expected))
            assert got[row, dim] == np.float32(expected)


def test_every_numeric_layout_gives_the_same() -> None:
    normalizer = Normalizer.from_statistics(statistics(), "MIN_MAX")
    whole = np.array([[[-3, 4], [2, 7]], [[0, 1], [5, 9]]])
    expected = normalizer.apply(whole.astype(np.float32))
    strided = np.zeros((2, 2, 4), np.float32)
    strided[..., ::2] = whole
    fortran = np.asfortranarray(whole.astype(np.float64))
    for layout in (whole, whole.astype(np.int16), whole.tolist(), strided[..., ::2], fortran):
        got = normalizer.apply(layout)
        np.testing.assert_array_equal(got, expected)
        assert (got.dtype, got.flags.c_contiguous) == (np.float32, True)
        np.testing.assert_allclose(normalizer.invert(got), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(normalizer.apply(whole[0, 0]), expected[0, 0])
    assert normalizer.apply(np.zeros((0, 5, 2))).shape == (0, 5, 2)
    np.testing.assert_array_equal(normalizer.apply(np.array([[True, False]])), normalizer.apply([[1, 0]]))


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    normalizer = Normalizer.from_statistics(statistics(), "MIN_MAX")
    tensor = torch.tensor([[-3.0, 4.0]], requires_grad=True)
    np.testing.assert_array_equal(normalizer.apply(tensor), normalizer.apply([[-3, 4]]))


def test_many_rows_are_done_in_slices() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(70_000, 2)).astype(np.float32)
    normalizer = Normalizer.from_statistics(statistics(), "QUANTILES")
    got, mask = normalizer.apply(values), normalizer.clipped(values)
    for row in (0, 32_767, 32_768, 69_999):
        np.testing.assert_array_equal(got[row], normalizer.apply(values[row]))
        np.testing.assert_array_equal(mask[row], normalizer.clipped(values[row]))


NAMED = Normalizer.from_statistics(
    statistics(), names=["pan", "grip"], selection=ActionSelection.create(9, encoded_dims="3,8")
)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("clip", [True, False])
def test_values_that_are_not_finite_are_located(value: float, clip: bool) -> None:
    normalizer = Normalizer.from_statistics(statistics(), clip=clip, names=["pan", "grip"])
    values = np.zeros((2, 5, 2))
    values[1, 3, 1] = value
    for function in (normalizer.apply, normalizer.invert):
        with pytest.raises(TokenizerError, match=rf"dimension 1 \(grip\) is {value} in row 1, step 3"):
            function(values)
    with pytest.raises(TokenizerError, match=r"dimension 0 \(pan\) .* in row 0,"):
        normalizer.apply([value, 0.0])
    with pytest.raises(TokenizerError, match=r"dimension 0 \(pan\) .* in row \(0, 0, 2\)"):
        normalizer.apply([[[[0, 0], [0, 0], [value, 0.0]]]])


def test_a_row_far_down_is_located_and_dims_are_those_of_the_robot() -> None:
    values = np.zeros((70_000, 2), np.float32)
    values[68_123, 1] = np.nan
    with pytest.raises(TokenizerError, match=r"dimension 8 \(grip\) is nan in row 68123"):
        NAMED.apply(values)


def test_what_overflows_float32_is_an_error() -> None:
    narrow = Normalizer(NormalizationMode.MIN_MAX, False, np.array([0.0]), np.array([1e-9]))
    with pytest.raises(TokenizerError, match="exceeds float32 when normalised"):
        narrow.apply([[1e30]])
    with pytest.raises(TokenizerError, match="exceeds float32 when decoded"):
        Normalizer(NormalizationMode.MIN_MAX, False, np.array([0.0]), np.array([1e30])).invert([[1e20]])


@pytest.mark.parametrize("values", [np.zeros((4, 3)), np.zeros((4, 2, 1)), 3.0, [["a", "b"]]])
def test_wrong_shapes_and_types(values: Any) -> None:
    with pytest.raises(TokenizerError, match=r"last axis must be the 2 dimensions|must be numbers"):
        NAMED.apply(values)


# --- guarded ranges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not NormalizationMode.IDENTITY])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.7, 1e-6, 123456.78, 3e9, -1e30])
def test_a_joint_that_never_moves(mode: NormalizationMode, value: float) -> None:
    values = np.full((50, 2), value, np.float32)
    values[:, 1] = np.linspace(-1, 1, 50)
    normalizer = Normalizer.fit(once(values), mode)
    assert normalizer.guarded == (0,)
    normalised = normalizer.apply(values)
    np.testing.assert_array_equal(normalised[:, 0], 0)
    np.testing.assert_array_equal(normalizer.invert(normalised)[:, 0], values[:, 0])
    assert not normalizer.clipped(values)[:, 0].any()
    (line,) = normalizer.guard_report()
    assert line.startswith("dimension 0: never moves")
    if abs(value) < 1e6:
        np.testing.assert_array_equal(normalizer.high[0] - normalizer.low[0], 2)


@pytest.mark.parametrize(("value", "noise"), [(0.1, 1e-8), (0.0, 1e-16), (1e-17, 3e-10)])
def test_float_noise_is_no_motion(value: float, noise: float) -> None:
    rng = np.random.default_rng(0)
    values = (value + rng.uniform(-noise, noise, size=(500, 1))).astype(np.float32)
    assert len(np.unique(values)) > 1
    normalizer = Normalizer.fit(once(values))
    assert normalizer.guarded == (0,)
    normalised = normalizer.apply(values)
    assert np.abs(normalised).max() < 1e-7
    np.testing.assert_allclose(normalizer.invert(normalised), values, rtol=0, atol=2e-16)


def test_a_joint_that_moves_in_half_a_percent_of_the_frames() -> None:
    values = np.zeros((10_000, 2), np.float32)
    values[:, 0] = np.linspace(-1, 1, 10_000)
    values[:50, 1] = np.linspace(0, 1.5, 50)
    normalizer = Normalizer.fit(once(values), names=["pan", "grip"])
    assert normalizer.guarded == (1,)
    assert (normalizer.low[1], normalizer.high[1]) == (0, 1.5)
    assert not normalizer.clipped(values)[:, 1].any()
    np.testing.assert_allclose(normalizer.invert(normalizer.apply(values))[:, 1], values[:, 1], atol=2e-7)
    (line,) = normalizer.guard_report()
    assert "dimension 1 (grip)" in line
    assert "QUANTILES range [0, 0] is 0 % of min to max" in line
    assert "range [0, 1.5] (min and max)" in line


def test_quantiles_a_milliradian_apart_around_a_value_that_reaches_zero() -> None:
    """q01 = 1.5686, q99 = 1.5696, and the value 0: elsewhere -3200."""
    values = np.linspace(1.5686, 1.5696, 1001, dtype=np.float32)[:, None]
    values[0] = 0.0
    normalizer = Normalizer.fit(once(values), clip=False)
    assert normalizer.guarded == (0,)
    assert normalizer.apply([[0.0]]) == -1
    assert np.abs(normalizer.apply(values)).max() <= 1
    (line,) = normalizer.guard_report()
    assert "is 0.062 % of min to max" in line


@pytest.mark.parametrize(("share", "guarded"), [(0.0099, (0,)), (0.0101, ())])
def test_the_guard_begins_below_one_percent(share: float, guarded: tuple[int, ...]) -> None:
    mapping = {"q01": [0.0], "q99": [share], "min": [0.0], "max": [1.0]}
    normalizer = Normalizer.from_statistics(mapping)
    assert normalizer.guarded == guarded
    assert normalizer.high[0] == (1.0 if guarded else share)
    assert normalizer.statistics is None  # incomplete ones are not kept
    assert all("too narrow" in line for line in normalizer.guard_report())


def test_mean_std_is_guarded_too_and_identity_never() -> None:
    mapping = {"mean": [0.0, 0.0], "std": [0.001, 1.0], "min": [-1, -2], "max": [1, 2]}
    normalizer = Normalizer.from_statistics(mapping, "MEAN_STD")
    assert normalizer.guarded == (0,)
    assert (normalizer.low.tolist(), normalizer.high.tolist()) == ([-1, -1], [1, 1])
    still = Normalizer.fit(once(np.full((9, 1), 7.0)), "IDENTITY")
    assert (still.guarded, still.apply([[7.0]]).item()) == ((), 7.0)


def test_the_report_names_the_dimension_of_the_robot() -> None:
    values = np.full((9, 1), 7.0, np.float32)
    selection = ActionSelection.create(26, encoded_dims="25")
    (line,) = Normalizer.fit(once(values), names=["thumb"], selection=selection).guard_report()
    assert line.startswith("dimension 25 (thumb): never moves (min 7, max 7); range [6, 8]")


# --- statistics given ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kept", "missing"),
    [
        ("QUANTILES", ["min", "max", "mean", "std", "count"], "q01, q99 missing"),  # as LeRobot v2.1 has them
        ("QUANTILE10", ["min", "max", "q10"], "q90 missing"),
        ("MEAN_STD", ["min", "max", "mean"], "std missing"),
        ("QUANTILES", ["q01", "q99", "mean"], "min, max missing"),  # the guard needs them
        ("MIN_MAX", ["min"], "max missing"),
        ("MIN_MAX", [], "min, max missing"),
        ("IDENTITY", ["count"], "hold none of"),
    ],
)
def test_missing_quantities_are_named(mode: str, kept: list[str], missing: str) -> None:
    mapping = {name: value for name, value in statistics().to_mapping().items() if name in kept}
    with pytest.raises(DatasetError, match=missing) as error:
        Normalizer.from_statistics(mapping, mode)
    assert mode == "IDENTITY" or f"normalization mode {mode}" in str(error.value)


def test_a_mapping_and_complete_statistics_give_the_same() -> None:
    complete = statistics()
    for mode in MODES:
        assert Normalizer.from_statistics(complete.to_mapping(), mode) == Normalizer.from_statistics(complete, mode)
    few = {name: complete.to_mapping()[name] for name in ("min", "max")}
    assert Normalizer.from_statistics(few, "MIN_MAX").high.tolist() == [10, 20]
    assert Normalizer.from_statistics(few, "IDENTITY").size == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q01": [9, 1]}, "dimension 0: q01 = 9.0 is above q99 = 8.0"),
        ({"min": [-10, 30]}, "dimension 1: min = 30.0 is above max"),
        ({"q90": [-6, 6]}, "q10 = -5.0 is above q90"),
        ({"q99": [8, 9, 9]}, "different length"),
        ({"q99": [8, float("nan")]}, "q99 of dimension 1 is nan"),
        ({"max": [float("inf"), 20]}, "max of dimension 0 is inf"),
        ({"std": [-1, 1]}, "std = -1.0 is negative"),
        ({"min": [[-10, 0]]}, r"shape \(1, 2\)"),
        ({"min": ["a", "b"]}, "must be numbers"),
        ({"count": [0]}, "count is 0"),
        ({"count": [1.5]}, "one whole number"),
        ({"count": [1, 2]}, "one whole number"),
    ],
)
def test_statistics_that_cannot_be_right(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DatasetError, match=reason):
        statistics(**changes)
    if "std" not in changes and "count" not in changes and "q90" not in changes:
        mapping: dict[str, Any] = statistics().to_mapping() | changes
        del mapping["std"]  # incomplete, so that the normaliser checks for itself
        with pytest.raises(DatasetError, match=reason):
            Normalizer.from_statistics(mapping)


def test_statistics_round_trip_and_missing_keys() -> None:
    values = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    complete = exact_statistics(once(values))
    again = Statistics.from_mapping(json.loads(json.dumps(complete.to_mapping())))
    assert again == complete
    assert again != statistics()
    with pytest.raises(ValueError, match="read-only"):
        complete.min[0] = 3
    with pytest.raises(DatasetError, match="lack max, q50, count"):
        Statistics.from_mapping({k: [1] for k in ("min", "mean", "std", "q01", "q10", "q90", "q99")})


# --- exact statistics ---------------------------------------------------------------------------------------


def assert_exact(got: Statistics, rows: np.ndarray) -> None:
    """Quantiles, min and max equal numpy's to the last bit, mean and std to rounding."""
    values = rows.astype(np.float32).astype(np.float64)
    expected = np.quantile(values, list(QUANTILES.values()), axis=0)
    for name, row in zip(QUANTILES, expected, strict=True):
        np.testing.assert_array_equal(getattr(got, name), row, err_msg=name)
    np.testing.assert_array_equal(got.min, values.min(axis=0))
    np.testing.assert_array_equal(got.max, values.max(axis=0))
    scale = np.abs(values).max(axis=0)
    assert (np.abs(got.mean - values.mean(axis=0)) <= 1e-12 * scale).all()
    assert (np.abs(got.std - values.std(axis=0)) <= 1e-9 * scale).all()
    assert got.count == len(rows)
    for name in (*QUANTILES, "min", "max", "mean"):  # zero has one spelling in files
        assert not np.signbit(getattr(got, name)[getattr(got, name) == 0]).any()


def cut(rows: np.ndarray, sizes: list[int]) -> Iterator[np.ndarray]:
    """The rows in blocks of the given sizes in turn (zero included)."""
    start, turn = 0, 0
    while start < len(rows):
        yield rows[start : start + sizes[turn % len(sizes)]]
        start += sizes[turn % len(sizes)]
        turn += 1


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.401298464324817e-45, -1.401298464324817e-45, 3.4028234663852886e38]),
)


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 60), st.integers(1, 5)), elements=FLOATS),
    st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    st.integers(1, 400),
)
def test_exact_statistics_equal_numpy(rows: np.ndarray, sizes: list[int], buffer_values: int) -> None:
    """Ties, negative zeros, denormals, one row; through the buffer and through the radix selection."""
    assert_exact(exact_statistics(lambda: cut(rows, sizes), buffer_values=buffer_values), rows)


@pytest.mark.parametrize("kind", ["normal", "ties", "offset", "constant", "one-moves"])
def test_exact_statistics_of_more_rows_than_the_buffer(kind: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(20_011, 3)).astype(np.float32)
    if kind == "ties":
        rows = np.round(rows, 1)
    elif kind == "offset":
        rows += np.float32(1000)
    elif kind == "constant":
        rows[:, 1] = -2.5
    elif kind == "one-moves":
        rows[100:, 1] = 0
    read: list[int] = []
    got = exact_statistics(lambda: cut(rows, [700, 3]), buffer_values=5000, progress=read.append)
    assert_exact(got, rows)
    assert sum(read) == 2 * len(rows)
    # The same file whatever the sizes of the blocks.
    assert got == exact_statistics(lambda: cut(rows, [9999]), buffer_values=5000)
    small = exact_statistics(once(rows))
    for name in ("q01", "q10", "q50", "q90", "q99", "min", "max"):
        np.testing.assert_array_equal(getattr(got, name), getattr(small, name))
    if kind == "constant":
        assert (got.mean[1], got.std[1]) == (-2.5, 0)


def test_blocks_of_windows_and_of_other_types() -> None:
    rng = np.random.default_rng(4)
    windows = (rng.normal(size=(300, 5, 4)) * 100).astype(np.float32)
    assert_exact(exact_statistics(once(windows), buffer_values=97), windows.reshape(-1, 4))
    assert_exact(exact_statistics(once(windows[:, ::2, ::-1])), windows[:, ::2, ::-1].reshape(-1, 4))
    integers = windows.astype(np.int64)[:, 0]
    assert_exact(exact_statistics(once(integers, integers.tolist())), np.concatenate([integers, integers]))
    assert_exact(exact_statistics(once(windows[:, 0].astype(np.float64))), windows[:, 0])


def test_a_block_that_is_reused_by_its_generator() -> None:
    """Readers may fill one array again and again; what was yielded before must have been copied."""

    def blocks() -> Iterator[np.ndarray]:
        block = np.empty((10, 2), np.float32)
        for start in range(5):
            block[:] = start
            yield block

    assert exact_statistics(blocks).max.tolist() == [4, 4]
    assert exact_statistics(blocks).min.tolist() == [0, 0]


def test_mean_and_std_far_from_zero() -> None:
    """A naive sum of squares would lose everything here."""
    rows = (1e7 + np.tile([0.0, 1.0, 2.0, 3.0], 5000))[:, None].astype(np.float32)
    got = exact_statistics(lambda: cut(rows, [333]), buffer_values=1000)
    np.testing.assert_allclose(got.mean, 1e7 + 1.5, rtol=1e-14)
    np.testing.assert_allclose(got.std, np.sqrt(1.25), rtol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_statistics_locate_what_is_not_finite(value: float) -> None:
    good, bad = np.zeros((50, 3)), np.zeros((50, 3))
    bad[37, 2] = value
    for buffer_values in (1 << 20, 30):
        with pytest.raises(
            DatasetError, match=rf"dimension 2 \(grip\) is {value} in block 1, row 37:".replace("+", r"\+")
        ):
            exact_statistics(once(good, bad), names=["x", "y", "grip"], buffer_values=buffer_values)
    with pytest.raises(DatasetError, match=r"dimension 2 is .* in block 0, row 3, step 7"):
        exact_statistics(once(bad.reshape(5, 10, 3)))


def test_blocks_that_do_not_fit() -> None:
    for blocks, reason in (
        (once(), "no rows"),
        (once(np.zeros((0, 3))), "no rows"),
        (once(np.zeros((2, 3)), np.zeros((2, 4))), "block 1 has 4 dimensions, those before 3"),
        (once(np.zeros(3)), r"block 0 has shape \(3,\)"),
        (once(np.zeros((3, 0))), r"block 0 has shape \(3, 0\)"),
        (once([["a"]]), "block 0 must be numbers"),
    ):
        with pytest.raises(DatasetError, match=reason):
            exact_statistics(blocks)
    with pytest.raises(DatasetError, match="3 dimensions, but there are 2 names"):
        exact_statistics(once(np.zeros((2, 3))), names=["a", "b"])


def test_data_that_changes_between_the_readings() -> None:
    rows = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    used_up = iter([rows])
    with pytest.raises(DatasetError, match=r"changed between two readings \(100 rows, then 0\)"):
        exact_statistics(lambda: used_up, buffer_values=50)
    versions = iter([rows, rows[::-1] * 2])
    with pytest.raises(DatasetError, match="changed between two readings"):
        exact_statistics(lambda: [next(versions)], buffer_values=50)


def test_memory_does_not_grow_with_the_rows() -> None:
    peaks = []
    for repeats in (5, 20):
        block = np.random.default_rng(0).normal(size=(5000, 2)).astype(np.float32)
        tracemalloc.start()
        exact_statistics(lambda b=block, r=repeats: (b for _ in range(r)), buffer_values=20_000)  # type: ignore[misc]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 20e6


# --- json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_json_round_trip_is_exact(mode: NormalizationMode) -> None:
    rows = (np.random.default_rng(0).normal(size=(300, 3)) * [1, 1e-7, 1e9]).astype(np.float32)
    rows[:, 1] = 0.3
    selection = ActionSelection.create(5, encoded_dims="1:4", delta_dims="2", delta_state_dims="0", state_size=1)
    for arguments in (
        {},
        {"names": ["a", "b", "c"], "selection": selection, "clip": True, "source": "stats.json"},
    ):
        normalizer = Normalizer.fit(once(rows), mode, **arguments)  # type: ignore[arg-type]
        text = json.dumps(normalizer.to_json())
        again = Normalizer.from_json(json.loads(text))
        assert again == normalizer
        assert json.dumps(again.to_json()) == text
        assert again.guard_report() == normalizer.guard_report()
        assert (again.mode, again.clip, again.selection) == (
            normalizer.mode,
            normalizer.clip,
            normalizer.selection,
        )
        np.testing.assert_array_equal(again.apply(rows), normalizer.apply(rows))
    assert Normalizer.fit(once(rows[:200]), mode, clip=True) != normalizer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "not a saved normaliser"),
        ({"version": 2}, "has version 2, this pi0-fast reads version 1"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
        ({"mode": "SOFTMAX"}, "unknown normalization mode"),
        ({"mode": 3}, "unknown normalization mode"),
        ({"clip": 1}, "'clip' must be true or false"),
        ({"low": [0, 0, 0]}, "low has 3 dimensions, but high has 2"),
        ({"low": [0, 99]}, r"range \[99.0, 9.0\]"),
        ({"low": [0, None]}, "cannot be used"),
        ({"high": [float("nan"), 1]}, "high of dimension 0 is nan"),
        ({"guarded": [2]}, "outside 0 to 1"),
        ({"guarded": 3}, "cannot be used"),
        ({"names": ["a"]}, "names has 1"),
        ({"statistics": {"min": [1, 2]}}, "the statistics lack max"),
        ({"selection": {}}, "selection"),
    ],
)
def test_json_that_is_broken(changes: dict[str, Any], reason: str) -> None:
    value = Normalizer.from_statistics(statistics()).to_json()
    with pytest.raises(TokenizerError, match=reason):
        Normalizer.from_json(value | changes)


def test_json_with_a_key_missing_or_no_mapping() -> None:
    value = Normalizer.from_statistics(statistics()).to_json()
    del value["clip"]
    with pytest.raises(TokenizerError, match=r"lacks the keys \['clip'\]"):
        Normalizer.from_json(value)
    with pytest.raises(TokenizerError, match="not a saved normaliser"):
        Normalizer.from_json([1])  # type: ignore[arg-type]


# --- real recordings ----------------------------------------------------------------------------------------


@pytest.mark.golden
def test_a_real_recording_with_delta(shared: Path) -> None:
    """SO-101: statistics of the frames as its stats.json has them; deltas get those of the deltas."""
    parquet = pytest.importorskip("pyarrow.parquet")
    root = shared / "data/so101_record_test_v30"
    table = parquet.read_table(root / "data/chunk-000/file-000.parquet")
    actions, states = (np.array(table[key].to_pylist(), np.float32) for key in ("action", "observation.state"))
    episodes = np.asarray(table["episode_index"])
    recorded = json.loads((root / "meta/stats.json").read_text())["action"]
    exact = exact_statistics(once(actions), buffer_values=4000)
    assert exact.count == recorded["count"][0] == 1492
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(getattr(exact, name), recorded[name], rtol=1e-4, atol=1e-4, err_msg=name)
    assert_exact(exact, actions)
    from_file = Normalizer.from_statistics(recorded)
    assert from_file.statistics is not None

    selection = ActionSelection.create(6, delta_dims="0,1,2,3,4,5", state_size=6)

    def windows() -> Iterator[np.ndarray]:
        for episode in np.unique(episodes):
            rows = episodes == episode
            yield from selection.statistics_blocks(actions[rows], states[rows], 10)

    normalizer = Normalizer.fit(windows, selection=selection)
    every = np.concatenate(list(windows()))
    assert normalizer.statistics is not None
    assert_exact(normalizer.statistics, every.reshape(-1, 6))
    # Two percent of the values of a dimension lie outside its q01 to q99 and are clipped, no more.
    assert (normalizer.clipped(every).mean(axis=(0, 1)) <= 0.0201).all()
    # Deltas lie around zero, which the positions do not.
    assert (np.abs(normalizer.low + normalizer.high) < 0.3 * (normalizer.high - normalizer.low)).all()
    assert (np.abs(from_file.low + from_file.high) > 0.3 * (from_file.high - from_file.low)).all()
    back = normalizer.invert(normalizer.apply(every))
    inside = ~normalizer.clipped(every)
    np.testing.assert_allclose(back[inside], every[inside], rtol=0, atol=1e-4)
