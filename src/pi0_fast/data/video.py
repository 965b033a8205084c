"""Single frames out of video files, by time: AV1, H.264 and whatever else FFmpeg decodes.

A frame is found by seeking to the key frame before it and decoding from there; only frames that were asked for are
converted to pixels. Files stay open in a small cache of the process. What is not here: which file an episode lies in
(`video_files.py`), and keeping decoded frames (`frame_cache.py`).

Frames at 0, 1/30, 2/30 s, key frames at 0 and 2/30: asked for 0.0334, the decoder starts at 0 and gives the second.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pi0_fast.data.metadata import is_lfs_pointer
from pi0_fast.types import DatasetError

Image = npt.NDArray[np.uint8]

try:
    import av
    from av.video.reformatter import VideoReformatter
except ImportError:  # said when a video is opened: datasets without video need no decoder
    av = None  # type: ignore[assignment]
_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError)
if av is not None:
    _ERRORS += (av.error.FFmpegError,)

#: Nearer than this share of a frame, no other frame can be nearer: the next one need not be decoded.
_CERTAIN = 0.1
#: A frame further away than this share of a frame is another one.
_TOLERANCE = 0.5 + 1e-6
#: Decoders that a forked process inherited. Freeing one could wait for threads that exist in the parent only.
_inherited: list[Any] = []


class VideoDecoders:
    """Decoders of the video files used last; each process has its own, also after a fork or a pickle.

    Not for several threads at once.
    """

    def __init__(self, capacity: int = 32) -> None:
        """`capacity`: how many files stay open; a decoder of 640 x 480 takes some 2 MB."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, which is not positive")
        self._capacity = capacity
        self._open: OrderedDict[Path, _Video] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self._capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"])  # type: ignore[misc]

    def frames(self, path: Path, times: Sequence[float], fps: float, episode: int) -> list[Image]:
        """The frames nearest to some times, each within half a frame of its time.

        Args:
            path: the file.
            times: seconds on the file's own clock, in any order; quickest ascending.
            fps: frames per second of the dataset, for what half a frame is.
            episode: named in errors.

        Returns:
            uint8 [height, width, 3], one for each time.

        Raises:
            DatasetError: the file is missing or damaged, or has no frame at one of the times; names the file, the
                episode and the time.
        """
        order = sorted(range(len(times)), key=times.__getitem__)
        found: list[Image | None] = [None] * len(times)
        with self._video(path, episode) as video:
            for place in order:
                with _errors(path, episode, times[place]):
                    found[place] = video.pixels(times[place], fps)
        return [image for image in found if image is not None]

    @contextmanager
    def _video(self, path: Path, episode: int) -> Iterator[_Video]:
        """The decoder of a file; it is not used again after an error."""
        if self._process != os.getpid():
            _inherited.append(self._open)
            self._open, self._process = OrderedDict(), os.getpid()
        video = self._open.pop(path, None)
        if video is None:
            while len(self._open) >= self._capacity:
                self._open.popitem(last=False)[1].close()
            with _errors(path, episode, None):
                video = _Video(path)
        try:
            yield video
        except BaseException:
            video.close()
            raise
        self._open[path] = video


def decoder_version() -> str:
    """What decodes: other versions may give other pixels."""
    return "none" if av is None else f"PyAV {av.__version__}"


class _Decoded(NamedTuple):
    """A decoded frame, its time in seconds, and whether it can be trusted."""

    frame: Any
    time: float
    damaged: bool


class _Video:
    """An open file and where its decoder stands."""

    def __init__(self, path: Path) -> None:
        if av is None:
            raise _Fault("video needs PyAV, which is not installed: pip install 'pi0-fast[policy]'")
        self._container: Any = av.open(str(path))
        try:
            if not self._container.streams.video:
                raise _Fault("it holds no video")
            self._stream: Any = self._container.streams.video[0]
            # Frame threads deliver later: for a frame here and there one thread is quickest, and workers are many.
            self._stream.codec_context.thread_count = 1
            if self._stream.time_base is None:
                raise _Fault("it does not say how its time is counted")
        except BaseException:
            self._container.close()
            raise
        self._reformatter = VideoReformatter()
        # Newer versions take a number of threads, and all there are when it is not given.
        known = VideoReformatter.reformat.__doc__ or ""
        self._one_thread: dict[str, Any] = {"threads": 1} if ":param int threads" in known else {}
        self._frames: Iterator[Any] = iter(())
        self._last: _Decoded | None = None  # frame decoded last, None before the first seek
        self._reach = 0.0  # seconds; the longest way from a key frame to what was asked for

    def close(self) -> None:
        with suppress(Exception):  # of a file that may be damaged, and is not used again
            self._container.close()

    def pixels(self, time: float, fps: float) -> Image:
        found = self._nearest(time, 1 / fps)
        if found is None:
            raise _Fault("the video has no frame that can be decoded there")
        if abs(found.time - time) * fps > _TOLERANCE:
            raise _Fault(f"the nearest frame is at {found.time:.4f} s, further away than half a frame")
        if found.damaged:
            raise _Fault("the frame, or one that it builds on, is damaged")
        return np.asarray(
            self._reformatter.reformat(found.frame, format="rgb24", **self._one_thread).to_ndarray(), np.uint8
        )

    def _nearest(self, time: float, frame_s: float) -> _Decoded | None:
        """The decoded frame nearest to a time, or None."""
        best = self._last
        # Going on decodes what lies between; a seek decodes from a key frame, about as far as the furthest one yet.
        if best is None or not -_CERTAIN * frame_s <= time - best.time <= max(self._reach, 1.5 * frame_s):
            best = self._seek(time, frame_s)
            if best is not None:
                self._reach = max(self._reach, time - best.time)
        while best is not None and self._last is not None and self._last.time < time - _CERTAIN * frame_s:
            frame = self._next()
            if frame is None:
                break
            if abs(frame.time - time) < abs(best.time - time):
                best = frame
        return best

    def _seek(self, time: float, frame_s: float) -> _Decoded | None:
        """The first frame from the last key frame before a time; None when nothing can be decoded."""
        earliest = self._stream.start_time or 0
        # A key frame may be shown later than frames that are stored behind it: then go back further.
        back = 0.0
        while True:
            wanted = max(int((time + _CERTAIN * frame_s - back) / self._stream.time_base), earliest)
            self._container.seek(wanted, stream=self._stream, backward=True)
            self._frames = self._container.decode(self._stream)
            self._last = None
            frame = self._next()
            if frame is None or frame.time <= time + _CERTAIN * frame_s or wanted == earliest:
                return frame
            back = max(2 * back, 8 * frame_s)

    def _next(self) -> _Decoded | None:
        frame = next(self._frames, None)
        if frame is None:
            return None
        if frame.time is None:
            raise _Fault("a frame has no time")
        # The decoder marks only the frame whose data is damaged; those up to the next key frame build on it.
        damaged = self._last is not None and self._last.damaged and not frame.key_frame
        self._last = _Decoded(frame, float(frame.time), damaged or bool(frame.is_corrupt))
        return self._last


class _Fault(Exception):
    """What is wrong with a video; becomes a DatasetError that names the file, the episode and the time."""


@contextmanager
def _errors(path: Path, episode: int, time: float | None) -> Iterator[None]:
    where = f"{path} (episode {episode}" + (")" if time is None else f", {time:.4f} s)")
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"{where} is missing; fetch the dataset's videos/ again") from error
    except _Fault as error:
        raise DatasetError(f"{where} cannot be decoded: {error}") from error
    except _ERRORS as error:
        if is_lfs_pointer(path):
            raise DatasetError(f"{where} is a Git LFS pointer, not the file itself; run `git lfs pull`") from error
        raise DatasetError(
            f"{where} cannot be decoded ({error}); it is damaged or no video: fetch it again, or leave the episode out"
        ) from error
