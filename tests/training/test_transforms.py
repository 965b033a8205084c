"""Random changes of pictures: what they do, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL")

from pi0_fast.training.transforms import ImageTransforms, coloured, shifted
from pi0_fast.types import PolicyError

PICTURE = np.random.default_rng(0).integers(0, 256, (20, 32, 3), np.uint8)
DULL = np.random.default_rng(0).integers(100, 140, (20, 32, 3), np.uint8)  # nothing is cut at 0 or 255


def test_a_shift_by_hand() -> None:
    image = np.arange(1, 7, dtype=np.uint8).reshape(2, 3, 1).repeat(3, axis=2)  # 1 2 3 / 4 5 6
    assert shifted(image, 0, 1)[:, :, 0].tolist() == [[1, 1, 2], [4, 4, 5]]
    assert shifted(image, -1, 0)[:, :, 2].tolist() == [[4, 5, 6], [4, 5, 6]]
    assert shifted(image, 1, -2)[:, :, 1].tolist() == [[3, 3, 3], [3, 3, 3]]


def test_colours_as_plain_arithmetic_has_them() -> None:
    weights = np.array([0.299, 0.587, 0.114])
    plain = DULL * 1.1
    grey = (DULL[::4, ::4].reshape(-1, 3).mean(axis=0) * 1.1) @ weights
    plain = grey + (plain - grey) * 0.9
    each = (plain @ weights)[:, :, None]
    plain = each + (plain - each) * 1.2
    assert np.abs(coloured(DULL, 1.1, 0.9, 1.2) - plain).max() <= 0.51
    assert (coloured(PICTURE, 0.5, 1, 1).astype(int) - np.round(PICTURE * 0.5)).__abs__().max() <= 1
    assert coloured(PICTURE, 1.9, 1, 1).max() == 255


def test_what_a_picture_gets_depends_on_seed_epoch_frame_and_camera() -> None:
    change = ImageTransforms(seed=1)
    first = change(PICTURE, 0, 5, "top")
    np.testing.assert_array_equal(first, change(PICTURE, 0, 5, "top"))
    assert first.dtype == np.uint8
    assert first.shape == PICTURE.shape
    others = [
        ImageTransforms(seed=2)(PICTURE, 0, 5, "top"),
        change(PICTURE, 1, 5, "top"),
        change(PICTURE, 0, 6, "top"),
        change(PICTURE, 0, 5, "wrist"),
    ]
    for other in others:
        assert (other != first).any()


def test_amounts_of_zero_change_nothing_and_bounds_hold() -> None:
    nothing = ImageTransforms(seed=0, max_shift=0, brightness=0, contrast=0, saturation=0)
    np.testing.assert_array_equal(nothing(PICTURE, 3, 4, "top"), PICTURE)
    moved = ImageTransforms(seed=0, max_shift=0.1, brightness=0, contrast=0, saturation=0)
    shifts = set()
    place = np.zeros((20, 30, 3), np.uint8)
    place[10, 15] = 255
    for index in range(300):
        (row,), (column,) = np.nonzero(moved(place, 0, index, "top")[:, :, 0])
        shifts.add((int(row) - 10, int(column) - 15))
    assert {down for down, _ in shifts} == {-2, -1, 0, 1, 2}
    assert {right for _, right in shifts} == {-3, -2, -1, 0, 1, 2, 3}
    bright = ImageTransforms(seed=0, max_shift=0, brightness=0.3, contrast=0, saturation=0)
    means = [bright(np.full((4, 4, 3), 100, np.uint8), 0, index, "top").mean() for index in range(300)]
    assert 70 <= min(means) < 75
    assert 125 < max(means) <= 130


@pytest.mark.parametrize("wrong", [{"max_shift": 1.0}, {"brightness": -0.1}, {"seed": -1}, {"contrast": float("nan")}])
def test_impossible_amounts(wrong: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match=next(iter(wrong))):
        ImageTransforms(**{"seed": 0, **wrong})  # type: ignore[arg-type]
