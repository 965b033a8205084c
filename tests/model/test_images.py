"""Images for the vision tower: against hand-worked numbers, a slow twin, Pillow's filter, and lerobot where it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pi0_fast.model.images import prepare_images  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def slow_twin(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pixel by pixel: image float [H, W, 3] in [0, 1] -> [3, height, width]."""
    own_height, own_width = image.shape[:2]
    ratio = max(own_width / width, own_height / height)
    inner_height, inner_width = int(own_height / ratio), int(own_width / ratio)
    result = np.full((3, height, width), -1.0)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    for y in range(inner_height):
        for x in range(inner_width):
            # The middle of the new pixel, in old pixels; never before the middle of the first.
            source_y = max((y + 0.5) * own_height / inner_height - 0.5, 0.0)
            source_x = max((x + 0.5) * own_width / inner_width - 0.5, 0.0)
            y0, x0 = int(source_y), int(source_x)
            y1, x1 = min(y0 + 1, own_height - 1), min(x0 + 1, own_width - 1)
            dy, dx = source_y - y0, source_x - x0
            value = (1 - dy) * ((1 - dx) * image[y0, x0] + dx * image[y0, x1])
            value = value + dy * ((1 - dx) * image[y1, x0] + dx * image[y1, x1])
            result[:, top + y, left + x] = value * 2 - 1
    return result


def test_two_pixels_become_four_between_black_bars() -> None:
    """Width 2 -> 4: centres at -0.25 (held at 0), 0.25, 0.75, 1.25 (held at 1)."""
    image = np.zeros((1, 2, 3), np.float32)
    image[0, 1] = 1.0
    got = prepare_images(image, resolution=(4, 4))
    assert got.shape == (1, 3, 4, 4)
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    row = [-1.0, -0.5, 0.5, 1.0]
    bar = [-1.0] * 4
    assert got[0].tolist() == [[bar, row, row, bar]] * 3


def test_the_odd_row_and_column_go_below_and_to_the_right() -> None:
    white = np.ones((2, 4, 3), np.float32)
    rows = prepare_images(white, resolution=(5, 4))[0, 0, :, 0].tolist()
    assert rows == [-1.0, 1.0, 1.0, -1.0, -1.0]
    columns = prepare_images(white.transpose(1, 0, 2), resolution=(4, 5))[0, 0, 0].tolist()
    assert columns == [-1.0, 1.0, 1.0, -1.0, -1.0]


@given(
    st.tuples(st.integers(4, 40), st.integers(4, 40)), st.tuples(st.integers(4, 24), st.integers(4, 24)), st.integers(0)
)
def test_equals_the_slow_twin(size: tuple[int, int], resolution: tuple[int, int], seed: int) -> None:
    image = np.random.default_rng(seed % 2**32).random((*size, 3), np.float32)
    assume(min(size) * min(resolution) >= max(size))  # else nothing of it is left
    got = prepare_images(image, resolution=resolution)
    np.testing.assert_allclose(got[0].numpy(), slow_twin(image, *resolution), atol=1e-5)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(20, 31), (32, 32), (40, 12)])
def test_every_layout_and_dtype_gives_the_same(size: tuple[int, int], antialias: bool) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (2, *size, 3), np.uint8)
    floats = levels.astype(np.float32) / 255
    want = prepare_images(floats, resolution=(32, 32), antialias=antialias)
    assert want.shape == (2, 3, 32, 32)
    first = floats.transpose(0, 3, 1, 2)
    read_only = first.copy()
    read_only.flags.writeable = False
    flipped_twice = np.ascontiguousarray(floats[:, ::-1])[:, ::-1]
    versions = [
        levels,
        levels.transpose(0, 3, 1, 2),
        torch.from_numpy(levels),
        torch.from_numpy(first),
        first.copy(),
        read_only,
        flipped_twice,
        floats.astype(np.float64),
    ]
    for images in versions:
        got = prepare_images(images, resolution=(32, 32), antialias=antialias)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        alone = prepare_images(images[1], resolution=(32, 32), antialias=antialias)
        torch.testing.assert_close(alone, want[1:], atol=1e-6, rtol=0)
    half = prepare_images(torch.from_numpy(floats).half(), resolution=(32, 32), antialias=antialias)
    assert half.dtype == torch.float32
    assert float((half - want).abs().max()) < 0.01


def test_images_of_the_right_size_are_only_scaled_and_the_input_is_left_alone() -> None:
    image = torch.linspace(0, 1, 48).reshape(3, 4, 4)
    before = image.clone()
    for antialias in (False, True):
        got = prepare_images(image, resolution=(4, 4), antialias=antialias)
        torch.testing.assert_close(got[0], before * 2 - 1, atol=0, rtol=0)
    assert torch.equal(image, before)


def test_antialias_filters_what_would_be_skipped() -> None:
    """Every fourth column white: without a filter the picture depends on which columns are hit."""
    image = np.zeros((32, 32, 3), np.uint8)
    image[:, ::4] = 255
    plain = prepare_images(image, resolution=(8, 8))
    smooth = prepare_images(image, resolution=(8, 8), antialias=True)
    assert float(plain.max()) == -1.0  # only black columns are hit
    assert -0.6 < float(smooth[..., 1:-1].min()) <= float(smooth[..., 1:-1].max()) < -0.4  # a quarter of white


@pytest.mark.parametrize("size", [(48, 64), (100, 30), (9, 13)])
def test_antialias_is_within_one_level_of_pillow(size: tuple[int, int]) -> None:
    pillow = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    ratio = max(size[0] / 32, size[1] / 32)
    height, width = int(size[0] / ratio), int(size[1] / ratio)
    want = np.asarray(pillow.fromarray(image).resize((width, height), pillow.Resampling.BILINEAR)).astype(float)
    got = prepare_images(image, resolution=(32, 32), antialias=True)[0].permute(1, 2, 0).numpy()
    top, left = (32 - height) // 2, (32 - width) // 2
    levels = (got[top : top + height, left : left + width] + 1) * 127.5
    assert np.abs(levels - want).max() < 1.01


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.full((3, 8, 8), 255, np.float32), ["[0, 1]", "255", "uint8", "image 0"]),
        (np.full((3, 8, 8), -1, np.float32), ["[0, 1]", "-1"]),
        (np.stack([np.zeros((3, 8, 8)), np.full((3, 8, 8), np.nan)]), ["image 1", "NaN"]),
        (np.stack([np.zeros((3, 8, 8)), np.full((3, 8, 8), np.inf)]), ["image 1", "infinity"]),
        (np.zeros((3, 8, 8), np.int64), ["int64", "uint8"]),
        (np.zeros((3, 8, 8), np.uint16), ["uint16"]),
        (np.zeros((3, 8, 8), bool), ["bool"]),
        (torch.zeros((3, 8, 8), dtype=torch.bool), ["bool"]),
        (np.zeros((1, 8, 8), np.float32), ["[1, 8, 8]", "grey"]),
        (np.zeros((2, 8, 8, 4), np.uint8), ["[2, 8, 8, 4]", "alpha"]),
        (np.zeros((8, 8), np.uint8), ["[8, 8]"]),
        (np.zeros((1, 1, 3, 8, 8), np.uint8), ["[1, 1, 3, 8, 8]"]),
        (np.zeros((0, 3, 8, 8), np.uint8), ["[0, 3, 8, 8]"]),
        (np.zeros((3, 8, 3), np.uint8), ["[3, 8, 3]", "told apart"]),
        (np.zeros((3, 2, 2000), np.uint8), ["2 x 2000", "narrow"]),
        ([[0.0]], ["list", "numpy"]),
    ],
)
def test_bad_images_are_named(image: object, words: list[str]) -> None:
    with pytest.raises(PolicyError) as error:
        prepare_images(image, key="observation.images.top")
    for word in ["observation.images.top", *words]:
        assert word in str(error.value), (word, str(error.value))


def test_a_value_off_by_rounding_is_held_at_the_end() -> None:
    image = np.full((3, 4, 4), 1 + 1e-6, np.float32)
    assert float(prepare_images(image, resolution=(4, 4)).max()) == 1.0


@pytest.mark.interop
def test_equals_lerobot(tmp_path: Path, shared: Path) -> None:
    """The whole image path of lerobot's policy, run by an interpreter that has it."""
    python = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not python:
        pytest.skip("set PI0_FAST_LEROBOT_PYTHON to an interpreter with lerobot to compare with it")
    generator = np.random.default_rng(2)
    sizes = [(90, 160), (120, 160), (480, 640), (224, 224), (97, 61), (7, 300)]
    images = {f"{h}x{w}": generator.random((2, 3, h, w), np.float32) for h, w in sizes}
    np.savez(tmp_path / "images.npz", **images)
    code = (
        "import sys, numpy, torch, shim_torchvision\n"
        "shim_torchvision.install()\n"
        "from lerobot.policies.common.vla_utils import resize_with_pad_torch\n"
        "images = numpy.load(sys.argv[1])\n"
        "result = {}\n"
        "for key in images:\n"
        "    image = torch.from_numpy(images[key]).permute(0, 2, 3, 1)\n"
        "    if tuple(image.shape[1:3]) != (224, 224):\n"
        "        image = resize_with_pad_torch(image, 224, 224)\n"
        "    result[key] = (image * 2 - 1).permute(0, 3, 1, 2).numpy()\n"
        "numpy.savez(sys.argv[2], **result)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(shared / "tools"), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([python, "-c", code, tmp_path / "images.npz", tmp_path / "lerobot.npz"], check=True, env=environment)
    theirs = np.load(tmp_path / "lerobot.npz")
    for key, image in images.items():
        np.testing.assert_allclose(prepare_images(image).numpy(), theirs[key], atol=2e-6, err_msg=key)
