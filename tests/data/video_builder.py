"""Pictures that say which one they are, also after lossy coding; videos of them with any key frames and times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

HEIGHT, WIDTH, BITS = 64, 96, 12


def picture(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """uint8 [height, width, 3]: the bits of a number as bars, dark or bright, from the left."""
    bits = [(number >> bit) & 1 for bit in range(BITS)]
    columns = np.repeat(np.where(bits, 220, 30), width // BITS).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(columns[None, :, None], (height, width, 3)))


def number_of(image: np.ndarray) -> int:
    """The number of a picture."""
    means = image.reshape(image.shape[0], BITS, -1).mean(axis=(0, 2))
    return sum(1 << bit for bit, mean in enumerate(means.tolist()) if mean > 125)


def build_video(
    path: Path,
    numbers: Iterable[int],
    *,
    fps: int = 10,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    ticks: Sequence[int] | None = None,
    noise: int = 0,
) -> Path:
    """A video of the pictures of some numbers; `ticks` are their times in 1/1000 s, else 0, 1/fps, ...

    With `noise`, levels differ by up to as much, which makes the file large.
    """
    random = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=fps, options=options or {"g": "2", "crf": "23"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.time_base = Fraction(1, 1000)
        stream.codec_context.time_base = Fraction(1, 1000)
        for place, number in enumerate(numbers):
            image = picture(number) + random.integers(0, noise + 1, (HEIGHT, WIDTH, 3)).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.time_base = Fraction(1, 1000)
            frame.pts = ticks[place] if ticks is not None else place * 1000 // fps
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
