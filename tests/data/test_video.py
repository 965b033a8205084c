"""Frames by time: any order, any key frames, B-frames, odd times, damage, forks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

av = pytest.importorskip("av")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from video_builder import build_video, number_of, picture  # noqa: E402

from pi0_fast.data.video import VideoDecoders  # noqa: E402
from pi0_fast.types import DatasetError  # noqa: E402

KINDS = {
    "h264, every second frame is a key": ("libx264", {"g": "2", "bf": "0"}),
    "h264, one key frame": ("libx264", {"g": "250"}),
    "h264, B-frames around open groups": ("libx264", {"x264-params": "keyint=8:open-gop=1:bframes=3:b-adapt=0"}),
    "h264, B-frame pyramid": ("libx264", {"x264-params": "keyint=12:bframes=5:b-pyramid=normal:b-adapt=0"}),
    "av1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "av1, long groups": ("libsvtav1", {"g": "20", "crf": "30", "preset": "12"}),
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """40 frames of 10 a second, of each kind."""
    root = tmp_path_factory.mktemp("videos")
    return {
        kind: build_video(root / f"{number}.mp4", range(40), codec=codec, options=options)
        for number, (kind, (codec, options)) in enumerate(KINDS.items())
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_in_any_order(videos: dict[str, Path], kind: str) -> None:
    decoders = VideoDecoders()
    order = np.random.default_rng(0).permutation(40).tolist()
    alone = [number_of(decoders.frames(videos[kind], [number / 10], 10, 0)[0]) for number in order]
    assert alone == order
    assert [number_of(image) for image in decoders.frames(videos[kind], [n / 10 for n in order], 10, 0)] == order
    (image,) = decoders.frames(videos[kind], [0.7], 10, 0)
    assert image.shape == (64, 96, 3)
    assert image.dtype == np.uint8
    assert np.abs(image.astype(int) - picture(7)).mean() < 8


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_nearest_frame_as_an_obvious_search_finds_it(videos: dict[str, Path], data: st.DataObject) -> None:
    path = videos[data.draw(st.sampled_from([kind for kind in KINDS if "h264" in kind]))]
    times = data.draw(st.lists(st.floats(-0.045, 3.945), min_size=1, max_size=6))
    decoders = VideoDecoders()
    found = [number_of(image) for image in decoders.frames(path, times, 10, 0)]
    for time, number in zip(times, found, strict=True):
        distances = [abs(time - place / 10) for place in range(40)]
        # Within a tenth of a frame nothing is nearer; half way between two frames either will do.
        assert distances[number] <= min(distances) + 1e-6


def test_only_what_is_needed_is_decoded(videos: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from pi0_fast.data import video

    decoded = []
    original = video._Video._next
    monkeypatch.setattr(video._Video, "_next", lambda self: decoded.append(1) or original(self))
    decoders = VideoDecoders()
    path = videos["h264, every second frame is a key"]
    for time in (3.1, 0.4, 2.0):  # a key frame and one more; a key frame; a key frame
        decoders.frames(path, [time], 10, 0)
    assert len(decoded) == 4
    decoded.clear()
    decoders.frames(path, [n / 10 for n in range(40)], 10, 0)
    assert len(decoded) == 40
    decoded.clear()
    for _ in range(3):
        decoders.frames(path, [3.9], 10, 0)
    assert len(decoded) == 0, "the frame decoded last is there already"


def test_times_that_are_not_quite_those_of_frames(tmp_path: Path) -> None:
    """Frames at 0, 104, 196, 300 and 700 ms, ten a second: half a frame is 50 ms."""
    path = build_video(tmp_path / "odd.mp4", range(5), ticks=[0, 104, 196, 300, 700])
    decoders = VideoDecoders()
    times = [0.0499, 0.1, 0.2, 0.149, 0.3499, 0.66, 0.7499]
    assert [number_of(image) for image in decoders.frames(path, times, 10, 0)] == [0, 1, 2, 1, 3, 4, 4]
    for time in (0.36, 0.5, 0.64, 0.76, 9.0):
        with pytest.raises(DatasetError, match=rf"odd\.mp4 \(episode 7, {time:.4f} s\).*half a frame"):
            decoders.frames(path, [0.1, time], 10, 7)
    assert [number_of(image) for image in decoders.frames(path, times, 10, 0)] == [0, 1, 2, 1, 3, 4, 4]


def test_damage_is_named(videos: dict[str, Path], tmp_path: Path) -> None:
    whole = videos["h264, one key frame"].read_bytes()
    decoders = VideoDecoders()

    def damaged(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    with pytest.raises(DatasetError, match=r"gone\.mp4 \(episode 3\) is missing"):
        decoders.frames(tmp_path / "gone.mp4", [0.0], 10, 3)
    for name, content in {
        "empty.mp4": b"",
        "text.mp4": b"no video",
        "short.mp4": whole[: len(whole) // 2],  # the index is at the end
    }.items():
        with pytest.raises(DatasetError, match=rf"{name} \(episode 3\) cannot be decoded"):
            decoders.frames(damaged(name, content), [0.0], 10, 3)
    with pytest.raises(DatasetError, match=r"lfs\.mp4 \(episode 3\) is a Git LFS pointer"):
        decoders.frames(damaged("lfs.mp4", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), [0.0], 10, 3)
    zeros = bytearray(whole)
    begin, end = whole.index(b"mdat") + 900, whole.index(b"moov") - 4
    zeros[(begin + end) // 2 : end] = bytes(end - (begin + end) // 2)
    with pytest.raises(DatasetError, match=r"zeros\.mp4 \(episode 3, \d\.\d+ s\) cannot be decoded"):
        decoders.frames(damaged("zeros.mp4", bytes(zeros)), [n / 10 for n in range(40)], 10, 3)


def test_frames_that_build_on_a_damaged_one_are_not_given(tmp_path: Path) -> None:
    """A decoder hides what is missing and says so once; the pictures after it, to the next key frame, are wrong too."""
    path = build_video(tmp_path / "it.mp4", range(40), options={"g": "25", "bf": "0", "crf": "18", "sc_threshold": "0"})
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    content = bytearray(path.read_bytes())
    begin, size = places[20]
    half = size // 2
    content[begin + half : begin + size] = bytes(255 - byte for byte in content[begin + half : begin + size])
    path.write_bytes(content)
    decoders = VideoDecoders()
    for number in range(40):
        if 20 <= number < 25:
            with pytest.raises(DatasetError, match=rf"episode 1, {number / 10:.4f} s\) .*damaged"):
                decoders.frames(path, [number / 10], 10, 1)
        else:
            assert number_of(decoders.frames(path, [number / 10], 10, 1)[0]) == number
    past_it = decoders.frames(path, [1.9, 3.0], 10, 1)
    assert [number_of(image) for image in past_it] == [19, 30], "a key frame builds on nothing"


def test_a_file_without_video_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(DatasetError, match="no video"):
        VideoDecoders().frames(path, [0.0], 10, 0)


def test_few_files_stay_open(videos: dict[str, Path]) -> None:
    decoders = VideoDecoders(capacity=2)
    for _ in range(2):
        for path in videos.values():
            assert number_of(decoders.frames(path, [1.1], 10, 0)[0]) == 11
    assert len(decoders._open) == 2
    with pytest.raises(ValueError, match="not positive"):
        VideoDecoders(capacity=0)


def test_a_pickle_opens_its_own(videos: dict[str, Path]) -> None:
    path = next(iter(videos.values()))
    decoders = VideoDecoders(capacity=3)
    decoders.frames(path, [1.0], 10, 0)
    again = pickle.loads(pickle.dumps(decoders))
    assert number_of(again.frames(path, [1.2], 10, 0)[0]) == 12
    assert (again._capacity, len(decoders._open)) == (3, 1)


def test_a_fork_opens_its_own(tmp_path: Path) -> None:
    """Parent and children read one file at the same time; a shared file offset would mix them up."""
    path = build_video(tmp_path / "it.mp4", range(40), options={"g": "8", "crf": "4"}, noise=25)
    assert path.stat().st_size > 150_000, "more than what is read at once"
    decoders = VideoDecoders()
    decoders.frames(path, [0.5], 10, 0)
    children = []
    for start in (3, 20):
        child = os.fork()
        if child == 0:
            right = False
            try:
                found = [number_of(decoders.frames(path, [n / 10], 10, 0)[0]) for n in range(start, start + 15)]
                right = found == list(range(start, start + 15))
            finally:
                os._exit(0 if right else 1)
        children.append(child)
    assert [number_of(decoders.frames(path, [n / 10], 10, 0)[0]) for n in range(39, 0, -2)] == list(range(39, 0, -2))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


def test_real_video_is_what_a_plain_decoder_gives(shared: Path) -> None:
    """AV1 of a robot: a frame here and there equals the same frame of decoding from the start."""
    path = shared / "data/g1_inspire_video_v21/videos/chunk-000/observation.images.cam_high/episode_000002.mp4"
    wanted = [0, 1, 7, 40, 41]
    with av.open(str(path)) as container:
        frames = dict(zip(range(42), container.decode(video=0), strict=False))
        expected = [frames[number].to_ndarray(format="rgb24") for number in wanted]
    decoders = VideoDecoders()
    for order in (range(5), (4, 1, 3, 0, 2)):
        times = [float(np.float32(wanted[place] / 30)) for place in order]
        for place, image in zip(order, decoders.frames(path, times, 30, 2), strict=True):
            np.testing.assert_array_equal(image, expected[place])
