"""Camera images -> what the vision tower takes: float32 in [-1, 1], resized with the aspect ratio kept and padded.

As lerobot and openpi do it: bilinear without corner alignment, black bars in equal parts (the odd pixel goes right or
bottom), then x * 2 - 1, so that the bars are -1. What is not here: which cameras a policy expects, and what stands in
for one that is missing. A picture of 90 x 160 becomes 126 x 224 with 49 black rows above and below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pi0_fast.types import PolicyError

_LAYOUTS = "[3, height, width] or [height, width, 3], with or without a batch axis in front"
_DTYPES = "needed is uint8 (0 to 255) or floating point (0 to 1)"
# Float images may leave [0, 1] by rounding (of an earlier resize, say); what is further off was meant otherwise.
_SLACK = 1e-4


def prepare_images(
    images: Any, *, resolution: tuple[int, int] = (224, 224), antialias: bool = False, key: str = "image"
) -> Tensor:
    """Images of one camera, ready for the vision tower; float32 [B, 3, height, width] in [-1, 1], on their own device.

    Args:
        images: numpy array or tensor, channels first or last, with or without batch axis (without: B = 1); uint8, or
            floating point in [0, 1]. uint8 gives what the same image divided by 255 gives.
        resolution: (height, width) of the result.
        antialias: resize as openpi does, whose pictures are 8-bit before and after it: rounded to 1/255, low-pass
            filtered where they shrink. False: as lerobot does. Pictures of the right size are not resized.
        key: the feature's name, for messages.

    Raises:
        PolicyError: another type, shape or dtype; a float value outside [0, 1], or not finite. Names the key and row.
    """
    pixels = _channels_first(_as_tensor(images, key), key)
    if pixels.dtype == torch.uint8:
        levels = 255.0
    elif pixels.is_floating_point():
        pixels, levels = pixels.to(torch.float32), 1.0
        _check_range(pixels, key)
    else:
        dtype = str(pixels.dtype).removeprefix("torch.")
        raise PolicyError(f"{key}: images of dtype {dtype}; {_DTYPES}")
    height, width = resolution
    inner_height, inner_width = _inner_size(pixels, height, width, key)
    if (inner_height, inner_width) != tuple(pixels.shape[2:]):
        if antialias:
            pixels, levels = _resize_8bit(pixels, levels, (inner_height, inner_width)), 255.0
        else:
            pixels = _resize(pixels.to(torch.float32), (inner_height, inner_width))
    result = torch.full((len(pixels), 3, height, width), -1.0, dtype=torch.float32, device=pixels.device)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    inside = result[:, :, top : top + inner_height, left : left + inner_width]
    inside.copy_(pixels)
    if levels != 1.0:
        inside.div_(levels)
    inside.clamp_(0.0, 1.0).mul_(2.0).sub_(1.0)
    return result


def _as_tensor(images: Any, key: str) -> Tensor:
    if isinstance(images, Tensor):
        if images.layout is not torch.strided:
            raise PolicyError(f"{key}: images of layout {images.layout}; needed is a dense tensor")
        return images.detach()
    if not isinstance(images, np.ndarray):
        raise PolicyError(
            f"{key}: needed is a numpy array or a tensor of shape {_LAYOUTS}, not {type(images).__name__}"
        )
    if images.dtype.kind == "f" and images.dtype.itemsize <= 8:
        images = images.astype(np.float32, copy=False)
    elif images.dtype != np.uint8:
        raise PolicyError(f"{key}: images of dtype {images.dtype}; {_DTYPES}")
    if not images.flags.writeable or any(stride < 0 for stride in images.strides):
        images = images.copy()  # torch shares memory with neither
    return torch.from_numpy(images)


def _channels_first(images: Tensor, key: str) -> Tensor:
    """Any of the four layouts -> [B, 3, H, W], as a view."""
    shape = list(images.shape)
    batch = images if images.ndim == 4 else images[None]
    if images.ndim not in (3, 4) or 0 in batch.shape:
        raise PolicyError(f"{key}: images of shape {shape}; needed is {_LAYOUTS}")
    first, last = batch.shape[1] == 3, batch.shape[3] == 3
    if first and last:
        raise PolicyError(
            f"{key}: images of shape {shape}: both the first and the last axis could be the colours; pictures of 3 "
            "pixels cannot be told apart"
        )
    if not first and not last:
        hint = ""
        if {batch.shape[1], batch.shape[3]} & {1, 4}:
            hint = " (repeat a grey channel three times, drop an alpha or depth channel)"
        raise PolicyError(f"{key}: images of shape {shape} have no axis of 3 colours; needed is {_LAYOUTS}{hint}")
    return batch if first else batch.permute(0, 3, 1, 2)


def _check_range(pixels: Tensor, key: str) -> None:
    """Refuse float images outside [0, 1]; one pass, and a second one only for the message."""
    low, high = (float(value) for value in torch.stack(torch.aminmax(pixels)))
    if low >= -_SLACK and high <= 1 + _SLACK:  # false for NaN
        return
    lows, highs = pixels.amin((1, 2, 3)), pixels.amax((1, 2, 3))
    row = int(torch.nonzero(~((lows >= -_SLACK) & (highs <= 1 + _SLACK)))[0, 0])
    low, high = float(lows[row]), float(highs[row])
    if not (np.isfinite(low) and np.isfinite(high)):
        raise PolicyError(f"{key}: image {row} of the batch holds NaN or infinity")
    way_out = "give 0 to 255 as uint8, or divide by 255" if high > 2 else "images must not be normalised before"
    raise PolicyError(
        f"{key}: image {row} of the batch holds values from {low:.6g} to {high:.6g}; float images must lie in [0, 1] "
        f"({way_out})"
    )


def _inner_size(pixels: Tensor, height: int, width: int, key: str) -> tuple[int, int]:
    """The size without the bars. The same float arithmetic as openpi and lerobot, whose truncation decides a pixel."""
    own_height, own_width = pixels.shape[2:]
    ratio = max(own_width / width, own_height / height)
    inner = int(own_height / ratio), int(own_width / ratio)
    if 0 in inner:
        raise PolicyError(
            f"{key}: images of {own_height} x {own_width} pixels are too narrow to be fitted into {height} x {width}"
        )
    return inner


def _resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)


def _resize_8bit(pixels: Tensor, levels: float, size: tuple[int, int]) -> Tensor:
    """Antialiased, in 8 bits; within one level of what Pillow makes."""
    if levels == 1.0:
        pixels = pixels.mul(255.0).round_().clamp_(0.0, 255.0).to(torch.uint8)
    if pixels.device.type == "cpu":
        return functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False, antialias=True)
    resized = functional.interpolate(
        pixels.to(torch.float32), size=size, mode="bilinear", align_corners=False, antialias=True
    )
    return resized.round_()
