"""Arrow layouts to numpy: every layout gives the same array, what would lose a value is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pi0_fast.data.columns import ColumnFault, float_rows, integer_values

VALUES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 20), st.integers(1, 5)),
    elements=st.floats(width=32, allow_nan=False),
)


@given(values=VALUES, start=st.integers(0, 5))
def test_every_layout_gives_the_rows_that_python_lists_give(values: np.ndarray, start: int) -> None:
    width = values.shape[1]
    rows = [list(row) for row in values]
    layouts = [
        pa.array(rows, pa.list_(pa.float32())),
        pa.array(rows, pa.large_list(pa.float32())),
        pa.array(rows, pa.list_(pa.float32(), width)),
        pa.array(rows, pa.list_(pa.float64())),
        pa.array([[[x] for x in row] for row in rows], pa.list_(pa.list_(pa.float32()))),
        pa.array([[row] for row in rows], pa.list_(pa.list_(pa.float32(), width), 1)),
    ]
    if width == 1:
        layouts.append(pa.array(values[:, 0]))
    for array in layouts:
        piece = array.slice(start)
        np.testing.assert_array_equal(float_rows(piece, width), values[start:])


def test_integers_booleans_and_half_floats() -> None:
    ticks = pa.array([[2048, -7], [0, 2**24]], pa.list_(pa.int32()))
    np.testing.assert_array_equal(float_rows(ticks, 2), [[2048, -7], [0, 2**24]])
    np.testing.assert_array_equal(float_rows(pa.array([[True], [False]]), 1), [[1], [0]])
    np.testing.assert_array_equal(float_rows(pa.array(np.array([0.5, 2], np.float16)), 1), [[0.5], [2]])
    np.testing.assert_array_equal(integer_values(pa.array([3, -4], pa.int8())), [3, -4])
    np.testing.assert_array_equal(integer_values(pa.array([[3], [4]])), [3, 4])
    np.testing.assert_array_equal(integer_values(pa.array([True, False])), [1, 0])
    assert integer_values(pa.array([True])).dtype == np.int64


def test_values_that_are_not_finite_pass() -> None:
    array = pa.array([[float("nan"), float("inf")]], pa.list_(pa.float32()))
    assert np.isnan(float_rows(array, 2)[0, 0])
    assert float_rows(array, 2)[0, 1] == np.inf


@pytest.mark.parametrize(
    ("array", "width", "row", "reason"),
    [
        (pa.array([[1.0, 2.0], [1.0]]), 2, 1, "holds 1 values where 2 are declared"),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), 2, 1, "null"),
        (pa.array([[1.0, 2.0], [3.0, None]]), 2, 1, "null"),
        (pa.array([1.0, None, 2.0]), 1, 1, "null"),
        (pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), 3, None, "holds 2 values a frame where 3"),
        (pa.array([1.0, 2.0]), 2, None, "holds 1 values a frame where 2"),
        (pa.array([[[1.0], [2.0]], [[1.0]]]), 2, 1, "holds 1 values where 2"),
        (pa.array([[[1.0, 2.0]], [[3.0]]]), 2, 1, "holds 1 values where 2"),
        (pa.array([[]], pa.list_(pa.float32())), 2, 0, "holds 0 values where 2"),
        (pa.array(["a"]), 1, None, "string, not numbers"),
        (pa.array([[0, 0], [0, 2**24 + 1]]), 2, 1, "16777217, which float32 cannot hold"),
    ],
)
def test_rows_that_cannot_be_read_are_named(array: pa.Array, width: int, row: int | None, reason: str) -> None:
    with pytest.raises(ColumnFault, match=reason) as caught:
        float_rows(array, width)
    assert caught.value.row == row


def test_a_null_before_a_slice_is_no_fault_of_the_slice() -> None:
    array = pa.array([None, [1.0, 2.0]], pa.list_(pa.float32())).slice(1)
    np.testing.assert_array_equal(float_rows(array, 2), [[1, 2]])


def test_floats_are_no_integers() -> None:
    with pytest.raises(ColumnFault, match="float, not integers"):
        integer_values(pa.array([1.0], pa.float32()))


def test_unsigned_integers_beyond_int64_are_named() -> None:
    with pytest.raises(ColumnFault, match="18446744073709551615, which int64 cannot hold") as caught:
        integer_values(pa.array([1, 2**64 - 1], pa.uint64()))
    assert caught.value.row == 1
    with pytest.raises(ColumnFault, match="9223372036854775808, which int64 cannot hold") as caught:
        float_rows(pa.array([[1, 2], [3, 2**63]], pa.list_(pa.uint64())), 2)
    assert caught.value.row == 1
    np.testing.assert_array_equal(integer_values(pa.array([2**63 - 1], pa.uint64())), [2**63 - 1])
