"""Random changes of training pictures: a shift, and brightness, contrast and saturation.

What a picture gets depends on the seed, the epoch, the frame's index and the camera, and on nothing else: not on which
worker has it, nor on whether the run was resumed. Sizes are kept. What is not here: resizing (`model/images.py`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast.types import PolicyError

Image = npt.NDArray[np.uint8]

#: How bright red, green and blue look (ITU-R BT.601).
_LUMA = np.array([0.299, 0.587, 0.114])


@dataclass(frozen=True)
class ImageTransforms:
    """Changes a picture by at most these amounts; a `FrameDataset` calls it.

    Attributes:
        seed: of the run.
        max_shift: largest shift, as a share of height and of width; the edge is repeated where nothing was.
        brightness, contrast, saturation: each is multiplied by 1 - this to 1 + this.
    """

    seed: int
    max_shift: float = 0.05
    brightness: float = 0.2
    contrast: float = 0.2
    saturation: float = 0.2

    def __post_init__(self) -> None:
        """Raises PolicyError for an amount outside [0, 1), or a negative seed."""
        for name in ("max_shift", "brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) < 1:
                raise PolicyError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.seed < 0:
            raise PolicyError(f"seed is {self.seed}; it must be 0 or more")

    def __call__(self, image: Image, epoch: int, index: int, camera: str) -> Image:
        """The picture changed, uint8 [height, width, 3] as the one given, which stays as it is."""
        random = np.random.default_rng([self.seed, epoch, index, zlib.crc32(camera.encode())])
        # All draws, in this order, whatever the amounts: switching one off changes no other.
        down, right, *factors = random.uniform(-1, 1, 5).tolist()
        amounts = (self.brightness, self.contrast, self.saturation)
        height, width, _ = image.shape
        moved = shifted(image, round(down * self.max_shift * height), round(right * self.max_shift * width))
        brightness, contrast, saturation = (1 + f * amount for f, amount in zip(factors, amounts, strict=True))
        return coloured(moved, brightness, contrast, saturation)


def shifted(image: Image, down: int, right: int) -> Image:
    """The picture moved by whole pixels; edges are repeated where nothing was.

    A row of pixels 1 2 3 4 moved right by one is 1 1 2 3.
    """
    if down == 0 and right == 0:
        return image
    height, width, _ = image.shape
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return np.ascontiguousarray(image[rows][:, columns])


def coloured(image: Image, brightness: float, contrast: float, saturation: float) -> Image:
    """Brightness times a factor, then contrast around the mean grey, then saturation around each pixel's grey.

    All three are one linear map of a pixel, rounded and cut to 0..255 once, at the end.
    """
    if brightness == contrast == saturation == 1:
        return image
    from PIL import Image as Pillow

    # Of every fourth pixel in both directions: the mean grey needs no more.
    grey = brightness * float(image[::4, ::4].reshape(-1, 3).mean(axis=0) @ _LUMA)
    colours = saturation * np.eye(3) + (1 - saturation) * _LUMA
    matrix = np.concatenate([brightness * contrast * colours, np.full((3, 1), (1 - contrast) * grey)], axis=1)
    picture = Pillow.fromarray(image).convert("RGB", tuple(matrix.reshape(-1).tolist()))
    return np.array(picture)
