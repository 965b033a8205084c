"""DCT and quantisation: hand-worked numbers, scipy as the twin, clipping and counts, positions of bad values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.fft import dct, idct

from pi0_fast.actions.dct import (
    ORDERS,
    checked_order,
    dct_matrix,
    dequantize_rows,
    from_frequency_order,
    quantize_rows,
    to_frequency_order,
)
from pi0_fast.types import UsageError

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 33), st.integers(1, 7))


def quantize(
    chunks: Any, scale: Any = 10.0, low: int = -1000, high: int = 1000, limit: float = 100.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.ascontiguousarray(chunks, np.float32)
    rows, horizon, size = values.shape
    scales = np.ascontiguousarray(np.broadcast_to(np.asarray(scale, np.float32), (size,)))
    out, saturations = np.full((rows, horizon * size), 77, np.int32), np.full(rows, 77, np.int32)
    bad = np.full(rows, 77, np.int64)
    quantize_rows(values, dct_matrix(horizon), scales, low, high, np.float32(limit), out, saturations, bad)
    return out, saturations, bad


def dequantize(coefficients: Any, horizon: int, size: int, scale: Any = 10.0) -> np.ndarray:
    rows = np.ascontiguousarray(coefficients, np.int32)
    scales = np.ascontiguousarray(np.broadcast_to(np.asarray(scale, np.float32), (size,)))
    out = np.full((len(rows), horizon, size), 77, np.float32)
    dequantize_rows(rows, dct_matrix(horizon), scales, out)
    return out


# --- orders -------------------------------------------------------------------------------------------------


def test_orders_by_hand() -> None:
    """Two frequencies of three dimensions: tens are the frequency, ones the dimension."""
    rows = np.array([[0, 1, 2, 10, 11, 12]], np.int32)
    np.testing.assert_array_equal(from_frequency_order(rows, 2, "frequency"), rows)
    np.testing.assert_array_equal(from_frequency_order(rows, 2, "dimension"), [[0, 10, 1, 11, 2, 12]])


@given(horizon=st.integers(1, 9), size=st.integers(1, 9), rows=st.integers(0, 4), order=st.sampled_from(ORDERS))
def test_orders_are_undone(horizon: int, size: int, rows: int, order: Any) -> None:
    numbers = np.arange(rows * horizon * size, dtype=np.int32).reshape(rows, horizon * size)
    turned = from_frequency_order(numbers, horizon, order)
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(to_frequency_order(turned, horizon, order), numbers)


def test_an_unknown_order_names_the_known() -> None:
    with pytest.raises(UsageError, match="one of frequency, dimension, not 'zigzag'"):
        checked_order("zigzag")


# --- by hand ------------------------------------------------------------------------------------------------


def test_constant_and_step_by_hand() -> None:
    """H = 4: a constant x has sqrt(4) x 10; the step +x +x -x -x has 2 (cos(pi/8) + cos(3 pi/8)) / sqrt(2) x 10."""
    chunk = np.zeros((1, 4, 2))
    chunk[0, :, 0] = 0.5
    chunk[0, :, 1] = [1, 1, -1, -1]
    coefficients, saturations, bad = quantize(chunk)
    # Frequency 0 of both dimensions first, then frequency 1, ...: 18.478 and -7.654 for the step.
    assert coefficients.tolist() == [[10, 0, 0, 18, 0, 0, 0, -8]]
    assert saturations.tolist() == [0]
    assert bad.tolist() == [-1]


def test_one_step_is_its_own_transform() -> None:
    coefficients, _, _ = quantize([[[0.31, -0.29]]])
    assert coefficients.tolist() == [[3, -3]]
    np.testing.assert_allclose(dequantize(coefficients, 1, 2), [[[0.3, -0.3]]], rtol=1e-6)


def test_halves_round_to_even() -> None:
    values = np.array([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5])
    coefficients, _, _ = quantize(values[:, None, None], scale=1.0)
    assert coefficients[:, 0].tolist() == [0, 2, 2, 4, 0, -2, -2, -4]
    # H = 4 with a constant: 2 x, exactly representable, so halves at every odd quarter.
    constant = np.repeat(np.array([0.25, 0.75, 1.25, -0.75])[:, None, None], 4, axis=1)
    assert quantize(constant, scale=1.0)[0][:, 0].tolist() == [0, 2, 2, -2]


def test_clipping_is_counted_for_each_row() -> None:
    chunks = np.zeros((3, 4, 2))
    chunks[1, :, 0] = 5.0  # coefficient 100
    chunks[2, :, 0] = -5.0
    chunks[2, :, 1] = [1, 1, -1, -1]  # coefficients 18 and -8
    coefficients, saturations, _ = quantize(chunks, low=-7, high=18)
    assert coefficients.tolist() == [[0] * 8, [18] + [0] * 7, [-7, 0, 0, 18, 0, 0, 0, -7]]
    assert saturations.tolist() == [0, 1, 2]


def test_bounds_themselves_are_not_saturations() -> None:
    chunks = np.array([-0.7, 1.8, -0.8, 1.9])[:, None, None]
    coefficients, saturations, _ = quantize(chunks, low=-7, high=18)
    assert coefficients[:, 0].tolist() == [-7, 18, -7, 18]
    assert saturations.tolist() == [0, 0, 1, 1]


def test_every_dimension_has_its_own_scale() -> None:
    chunks = np.full((1, 4, 3), 0.5)
    coefficients, _, _ = quantize(chunks, scale=[10, 1, 100])
    assert coefficients.tolist() == [[10, 1, 100] + [0] * 9]
    np.testing.assert_allclose(dequantize(coefficients, 4, 3, scale=[10, 1, 100]), chunks, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 790.0, -101.0])
@pytest.mark.parametrize("position", [0, 7, 14])
def test_positions_of_values_that_are_no_actions(value: float, position: int) -> None:
    chunks = np.full((3, 5, 3), 0.1)
    chunks[1].reshape(-1)[position] = value
    chunks[1, -1, -1] = value  # only the first is reported
    coefficients, _, bad = quantize(chunks)
    assert bad.tolist() == [-1, position, -1]
    assert coefficients[0].tolist() == coefficients[2].tolist() == [2, 2, 2] + [0] * 12


def test_the_limit_itself_is_allowed() -> None:
    assert quantize([[[100.0]]])[2].tolist() == [-1]


# --- against scipy ------------------------------------------------------------------------------------------


@given(SHAPES, st.integers(0, 2**32 - 1), st.sampled_from([1.0, 10.0, 33.3]), st.booleans())
def test_coefficients_are_those_of_scipy(shape: tuple[int, int, int], seed: int, scale: float, many: bool) -> None:
    rng = np.random.default_rng(seed)
    chunks = rng.normal(size=shape).astype(np.float32)
    scales = scale * rng.uniform(0.5, 2, shape[2]).astype(np.float32) if many else np.float32(scale)
    coefficients, saturations, bad = quantize(chunks, scale=scales, low=-9, high=20)
    exact = dct(chunks, axis=1, norm="ortho").astype(np.float64) * scales
    expected = np.clip(np.around(exact), -9, 20)
    # Two float32 sums differ in the last digits: only next to a half may the rounding differ, and only by one.
    tie = np.abs(np.abs(exact - np.floor(exact)) - 0.5) < 1e-3
    difference = np.abs(coefficients.reshape(shape) - expected)
    assert (difference[~tie] == 0).all()
    assert difference.max(initial=0) <= 1
    outside = (np.around(exact) < -9) | (np.around(exact) > 20)
    low, high = (outside & ~tie).sum((1, 2)), (outside | tie).sum((1, 2))
    assert ((low <= saturations) & (saturations <= high)).all()
    assert (bad == -1).all()


@given(SHAPES, st.integers(0, 2**32 - 1))
def test_the_inverse_is_that_of_scipy(shape: tuple[int, int, int], seed: int) -> None:
    rows, horizon, size = shape
    rng = np.random.default_rng(seed)
    coefficients = rng.integers(-40, 41, (rows, horizon * size)).astype(np.int32)
    coefficients[rng.random(coefficients.shape) < 0.7] = 0
    scales = rng.uniform(1, 20, size).astype(np.float32)
    expected = idct(coefficients.reshape(shape) / scales, axis=1, norm="ortho")
    np.testing.assert_allclose(dequantize(coefficients, horizon, size, scales), expected, atol=2e-5)


@given(SHAPES, st.integers(0, 2**32 - 1), st.sampled_from([1.0, 10.0, 100.0]))
def test_round_trip_within_half_a_step(shape: tuple[int, int, int], seed: int, scale: float) -> None:
    """Rounding moves each of H coefficients by half at most: a dimension's norm by sqrt(H)/2 steps."""
    chunks = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    coefficients, _, _ = quantize(chunks, scale=scale, low=-(10**6), high=10**6)
    error = dequantize(coefficients, shape[1], shape[2], scale) - chunks
    bound = 0.5 / scale * np.sqrt(shape[1])
    assert np.linalg.norm(error, axis=1).max() <= bound * (1 + 1e-4) + 1e-5


def test_the_matrix_is_orthonormal_and_shared_safely() -> None:
    for horizon in (1, 2, 3, 16, 51):
        matrix = dct_matrix(horizon)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(horizon), atol=1e-5)
        assert not matrix.flags.writeable  # it is cached: nobody may change it
