"""Pictures into a video file as LeRobot's datasets have them: a key frame every second frame, so that any is near.

AV1 (what LeRobot writes) or H.264 (encoded quicker, decoded everywhere), 4:2:0. A video that is there already is
copied as it is. What is not here: which file an episode goes to (`writer.py`), and decoding (`video.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.types import DatasetError

Image = npt.NDArray[np.uint8]

try:
    import av
except ImportError:  # said when a video is written: datasets without video need no encoder
    av = None  # type: ignore[assignment]
_ERRORS: tuple[type[Exception], ...] = (ValueError, IndexError)
if av is not None:
    _ERRORS += (av.error.FFmpegError,)

#: name in info.json -> (FFmpeg's encoder, its options). Key frames every two frames; qualities that look alike.
#: Looking further ahead than the next key frame gains x264 nothing, costs half of its time, and now and then gave
#: another file of the same small images.
CODECS = {
    "av1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "h264": ("libx264", {"g": "2", "crf": "23", "preset": "veryfast", "rc-lookahead": "0"}),
}


def encode_video(path: Path, images: Iterable[Image], fps: float, codec: str, where: str) -> int:
    """Write a video file of images at 0, 1/fps, 2/fps ... seconds.

    Args:
        path: the file; its directory is there.
        images: uint8 [height, width, 3], even height and width, all of one size.
        fps: frames per second.
        codec: one of `CODECS`.
        where: begins errors.

    Returns:
        The number of images.

    Raises:
        DatasetError: no PyAV, or the encoder refuses the size.
        OSError: the file cannot be written.
    """
    if av is None:
        raise DatasetError(f"{where}: video needs PyAV, which is not installed: pip install 'pi0-fast[policy]'")
    name, options = CODECS[codec]
    count = 0
    try:
        with _quiet(), av.open(str(path), "w", format="mp4") as container:
            stream: Any = None
            for image in images:
                if stream is None:
                    stream = container.add_stream(name, rate=Fraction(fps).limit_denominator(100_000), options=options)
                    stream.height, stream.width, stream.pix_fmt = *image.shape[:2], "yuv420p"
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
                count += 1
            if stream is not None:
                container.mux(stream.encode(None))
    except OSError:
        raise
    except _ERRORS as error:
        raise DatasetError(f"{where}: the encoder {name} failed ({error}); video_codec chooses another") from error
    return count


def copy_video(source: Path, path: Path, where: str) -> int:
    """Copy a video file as it is; returns its number of frames.

    Raises:
        DatasetError: it is missing or no video.
        OSError: the copy cannot be written.
    """
    if av is None:
        raise DatasetError(f"{where}: video needs PyAV, which is not installed: pip install 'pi0-fast[policy]'")
    if not source.is_file():
        raise DatasetError(f"{where}: there is no file {source}")
    try:
        with av.open(str(source)) as container:
            count = sum(packet.pts is not None for packet in container.demux(video=0))
        shutil.copyfile(source, path)
    except _ERRORS as error:
        raise DatasetError(f"{where}: {source} is no video that can be read ({error})") from error
    return count


def describe_video(path: Path) -> dict[str, Any]:
    """What info.json says of a video, from the file itself, under LeRobot's names."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context
        names = {"libdav1d": "av1", "libaom-av1": "av1"}
        return {
            "video.height": codec.height,
            "video.width": codec.width,
            "video.codec": names.get(codec.name, codec.name),
            "video.pix_fmt": codec.pix_fmt,
            "video.fps": float(stream.average_rate or 0),
            "video.channels": 3,
            "is_depth_map": False,
            "has_audio": bool(container.streams.audio),
        }


@contextmanager
def _quiet() -> Iterator[None]:
    """SVT-AV1 writes its settings to stderr unless told not to."""
    before = os.environ.get("SVT_LOG")
    os.environ.setdefault("SVT_LOG", "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ["SVT_LOG"]
