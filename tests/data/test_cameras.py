"""Pictures of a dataset: written and read, in video and in columns, from the three layouts, kept on disk, damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("av")
pytest.importorskip("PIL")

from dataset_builder import build_v2, build_v3, random_episodes
from video_builder import HEIGHT, WIDTH, build_video, number_of, picture

from pi0_fast.data import LeRobotWriter, open_dataset
from pi0_fast.data import frame_cache as frame_cache_module
from pi0_fast.data.cameras import Cameras
from pi0_fast.data.image_statistics import ImageStatistics
from pi0_fast.data.images import ImageColumns, decode_image, encode_png
from pi0_fast.types import DatasetError

TOP = "observation.images.top"
LENGTHS = [12, 7, 9]
CAMERA = {TOP: {"dtype": "video", "shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}}


def features(width: int = 3, **cameras: Any) -> dict[str, Any]:
    scalar = {"dtype": "int64", "shape": [1], "names": None}
    return {
        "action": {"dtype": "float32", "shape": [width], "names": None},
        **(cameras or CAMERA),
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), scalar),
    }


def written(root: Path, dtype: str = "video", codec: str = "h264") -> Path:
    """Three episodes; the picture of a frame has its number in the dataset."""
    cameras = {TOP: {"dtype": dtype, "shape": [HEIGHT, WIDTH, 3]}}
    declared = {"action": {"dtype": "float32", "shape": [3]}, **cameras}
    with LeRobotWriter(root, fps=10, features=declared, video_codec=codec) as writer:
        first = 0
        for values in random_episodes(LENGTHS):
            images = (picture(first + number) for number in range(len(values)))  # an iterator, nothing in memory
            writer.add_episode({"action": values, TOP: images}, task="look")
            first += len(values)
    return root


def v2(root: Path, **info: Any) -> Path:
    """v2.1: a video an episode."""
    build_v2(root, random_episodes(LENGTHS), features=features(), **info)
    first = 0
    for index, length in enumerate(LENGTHS):
        build_video(root / f"videos/chunk-000/{TOP}/episode_{index:06d}.mp4", range(first, first + length))
        first += length
    return root


def v3(root: Path) -> Path:
    """v3.0: one video of all episodes, with three pictures of nothing before the first episode."""
    build_v3(root, random_episodes(LENGTHS), features=features())
    build_video(root / f"videos/{TOP}/chunk-000/file-000.mp4", [4000, 4001, 4002, *range(sum(LENGTHS))])
    table = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    first = 0.3
    for row in table:
        last = first + row["length"] / 10
        names = {"chunk_index": 0, "file_index": 0, "from_timestamp": first, "to_timestamp": last}
        row.update({f"videos/{TOP}/{name}": value for name, value in names.items()})
        first = last
    pq.write_table(pa.Table.from_pylist(table), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


MAKERS = {
    "v2.1": v2,
    "v3.0, one file": v3,
    "written, h264": written,
    "written, av1": lambda root: written(root, codec="av1"),
    "written, images": lambda root: written(root, "image"),
}


def check_all(cameras: Cameras, episodes: range = range(3)) -> None:
    """Every frame, backwards, each episode after the other; then single ones out of order."""
    firsts = [0, 12, 19]
    for episode in reversed(episodes):
        times = np.arange(LENGTHS[episode], dtype=np.float32).astype(float) / 10
        numbers = list(range(LENGTHS[episode]))[::-1]
        found = [number_of(image) - firsts[episode] for image in cameras.frames(TOP, episode, numbers, times)]
        assert found == numbers
        for number in (3, 0, LENGTHS[episode] - 1):
            (image,) = cameras.frames(TOP, episode, [number], times)
            assert number_of(image) == firsts[episode] + number
            assert image.shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("cached", [False, True])
def test_every_frame_of_every_layout(tmp_path: Path, layout: str, cached: bool) -> None:
    reader = open_dataset("local/it", root=MAKERS[layout](tmp_path / "it"))
    assert reader.camera_keys == (TOP,)
    cache = tmp_path / "cache" if cached else None
    check_all(Cameras(reader, [TOP], cache_dir=cache))
    check_all(Cameras(reader, [TOP], [1], cache_dir=cache), range(1, 2))
    if cached:
        assert len(list((tmp_path / "cache").glob("*.npy"))) == 3


def test_images_come_back_to_the_pixel(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 256, (70, 8, 6, 3), np.uint8)
    declared = {"action": {"dtype": "float32", "shape": [1]}, TOP: {"dtype": "image", "shape": [8, 6, 3]}}
    with LeRobotWriter(tmp_path / "it", fps=10, features=declared) as writer:
        writer.add_episode({"action": np.zeros(40), TOP: random[:40]}, task="a")
        writer.add_episode({"action": np.zeros(30), TOP: random[40:]}, task="b")
    reader = open_dataset("local/it", root=tmp_path / "it")
    cameras = Cameras(reader, [TOP])
    times = np.arange(30) / 10
    np.testing.assert_array_equal(np.stack(cameras.frames(TOP, 1, [29, 0, 17], times)), random[[69, 40, 57]])
    info = json.loads((tmp_path / "it/meta/info.json").read_text())
    assert info["video_path"] is None
    assert [episode.columns["action"].shape for episode in reader.iter_episodes(["action"])] == [(40, 1), (30, 1)]


def test_statistics_of_pictures_by_hand_and_by_numpy() -> None:
    """Red 0, 0, 0, 255; green 10; blue 0, 51, 102, 153."""
    image = np.zeros((2, 2, 3), np.uint8)
    image[1, 1, 0], image[:, :, 1], image[:, :, 2] = 255, 10, [[0, 51], [102, 153]]
    statistics = ImageStatistics()
    statistics.add(image)
    found = {name: np.array(value).reshape(-1) for name, value in statistics.to_lerobot().items()}
    np.testing.assert_allclose(found["mean"], [0.25, 10 / 255, 0.3])
    np.testing.assert_allclose(found["std"][:2], [np.sqrt(3) / 4, 0], atol=1e-12)
    np.testing.assert_allclose([found["min"], found["max"]], [[0, 10 / 255, 0], [1, 10 / 255, 0.6]])
    np.testing.assert_allclose(found["q50"], [0, 10 / 255, 0.3])  # half way between 0.2 and 0.4
    random = np.random.default_rng(1).integers(0, 256, (5, 7, 9, 3), np.uint8)
    both = ImageStatistics()
    for image in random:
        one = ImageStatistics()
        one.add(image)
        both.merge(one)
    flat = random.reshape(-1, 3) / 255
    found = both.to_lerobot()
    assert found["count"] == [5]
    assert np.shape(found["mean"]) == (3, 1, 1)
    np.testing.assert_allclose(np.array(found["std"])[:, 0, 0], flat.std(axis=0))
    for name, share in {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
        np.testing.assert_allclose(np.array(found[name])[:, 0, 0], np.quantile(flat, share, axis=0), atol=1e-12)


def test_an_episode_whose_pictures_are_wrong_leaves_the_others(tmp_path: Path) -> None:
    declared = {"action": {"dtype": "float32", "shape": [1]}, TOP: {"dtype": "video", "shape": [HEIGHT, WIDTH, 3]}}
    root = tmp_path / "it"
    good = [picture(number) for number in range(5)]

    def broken() -> Iterator[np.ndarray]:
        yield from good[:2]
        raise RuntimeError("the camera fell off")

    with LeRobotWriter(root, fps=10, features=declared, video_codec="h264") as writer:
        writer.add_episode({"action": np.zeros(5), TOP: good}, task="a")
        for pictures, error, message in (
            (good[:4], DatasetError, r"episode 1, camera .* has 4 images and 5 frames"),
            (broken(), RuntimeError, "fell off"),
            ([image.astype(float) for image in good], DatasetError, "frame 0: an image is float64"),
            ([image[:, :48] for image in good], DatasetError, r"is uint8 \[64, 48, 3\], declared is uint8"),
            (7, DatasetError, "int is no images"),
            (tmp_path / "none.mp4", DatasetError, r"there is no file .*none\.mp4"),
            (root.parent / "text.mp4", DatasetError, "no video that can be read"),
            (build_video(tmp_path / "long.mp4", range(6)), DatasetError, "has 6 images and 5 frames"),
        ):
            (tmp_path / "text.mp4").write_text("no video")
            with pytest.raises(error, match=message):
                writer.add_episode({"action": np.zeros(5), TOP: pictures}, task="b")
        copied = build_video(tmp_path / "copy.mp4", range(100, 103))
        assert writer.add_episode({"action": np.zeros(3), TOP: copied}, task="c") == 1
    reader = open_dataset("local/it", root=root)
    assert sorted(path.name for path in root.rglob("*.mp4")) == ["file-000.mp4", "file-001.mp4"]
    assert (root / f"videos/{TOP}/chunk-000/file-001.mp4").read_bytes() == copied.read_bytes()
    cameras = Cameras(reader, [TOP])
    assert [number_of(image) for image in cameras.frames(TOP, 1, [2, 0], np.arange(3) / 10)] == [102, 100]
    assert reader.statistics(TOP)["count"].tolist() == [8]  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["video", "image"])
def test_a_full_disk_drops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    declared = {"action": {"dtype": "float32", "shape": [1]}, TOP: {"dtype": dtype, "shape": [HEIGHT, WIDTH, 3]}}
    writer = LeRobotWriter(tmp_path / "it", fps=10, features=declared, video_codec="h264")
    writer.add_episode({"action": np.zeros(2), TOP: [picture(0), picture(1)]}, task="a")
    monkeypatch.setattr(f"pi0_fast.data.camera_writing.{'encode_video' if dtype == 'video' else 'encode_png'}", full)
    with pytest.raises(DatasetError, match=r"episode 1 of .* cannot be written: .*No space left"):
        writer.add_episode({"action": np.zeros(2), TOP: [picture(0), picture(1)]}, task="a")
    assert list(tmp_path.iterdir()) == []


def test_what_an_encoder_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {"action": {"dtype": "float32", "shape": [1]}, TOP: {"dtype": "video", "shape": [8, 8, 3]}}
    with pytest.raises(DatasetError, match="video_codec is 'mpeg'; known: av1, h264"):
        LeRobotWriter(tmp_path / "it", fps=10, features=declared, video_codec="mpeg")
    episode = {"action": np.zeros(2), TOP: np.zeros((2, 8, 8, 3), np.uint8)}
    with LeRobotWriter(tmp_path / "it", fps=10, features=declared, video_codec="h264") as writer:
        writer.add_episode(episode, task="a")
        with monkeypatch.context() as patch:
            patch.setattr("pi0_fast.data.video_encoding.CODECS", {"h264": ("libnone", {})})
            with pytest.raises(DatasetError, match=r"episode 1.*encoder libnone failed .*video_codec chooses"):
                writer.add_episode(episode, task="a")
            patch.setattr("pi0_fast.data.video_encoding.av", None)
            with pytest.raises(DatasetError, match=r"PyAV, which is not installed: pip install"):
                writer.add_episode(episode, task="a")
    cameras = Cameras(open_dataset("local/it", root=tmp_path / "it"), [TOP])
    monkeypatch.setattr("pi0_fast.data.video.av", None)
    with pytest.raises(DatasetError, match=r"PyAV, which is not installed: pip install"):
        cameras.frames(TOP, 0, [0], np.zeros(2))


def test_missing_video_says_what_is_there(tmp_path: Path) -> None:
    reader = open_dataset("local/it", root=v2(tmp_path / "it"))
    (reader.root / f"videos/chunk-000/{TOP}/episode_000001.mp4").unlink()
    with pytest.raises(DatasetError, match=r"episode_000001\.mp4 is missing \(1 of 3 video files of camera"):
        Cameras(reader, [TOP])
    check_all(Cameras(reader, [TOP], [0]), range(1))
    (reader.root / f"videos/chunk-000/{TOP}").rename(reader.root / "videos/chunk-000/top")
    with pytest.raises(DatasetError, match=r"3 of 3 .*videos lie in: videos/chunk-000/top; .*correct video_path"):
        Cameras(reader, [TOP])
    info = json.loads((reader.root / "meta/info.json").read_text())
    info["video_path"] = "videos/chunk-{episode_chunk:03d}/top/episode_{episode_index:06d}.mp4"
    (reader.root / "meta/info.json").write_text(json.dumps(info))
    check_all(Cameras(open_dataset("local/it", root=reader.root), [TOP], [0]), range(1))
    shutil.rmtree(reader.root / "videos")
    with pytest.raises(DatasetError, match=r"no folder videos/ at all"):
        Cameras(reader, [TOP])
    assert len(list(reader.iter_episodes(["action"]))) == 3, "numbers need no video"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/etc/{video_key}.mp4", "leads out"),
        ("../{video_key}.mp4", "leads out"),
        ("videos/{camera}.mp4", "no template"),
    ],
)
def test_templates_that_lead_nowhere(tmp_path: Path, path: str, message: str) -> None:
    reader = open_dataset("local/it", root=v2(tmp_path / "it", video_path=path))
    with pytest.raises(DatasetError, match=message):
        Cameras(reader, [TOP])


def test_cameras_that_are_none(tmp_path: Path) -> None:
    depth = {"depth": {"dtype": "video", "shape": [4, 4, 1], "names": None}}
    root = build_v2(tmp_path / "it", random_episodes([3]), features=features(**depth))
    reader = open_dataset("local/it", root=root)
    with pytest.raises(DatasetError, match=r"'action'.*holds float32, not images; cameras: depth"):
        Cameras(reader, ["action"])
    with pytest.raises(DatasetError, match=r"shape \[4, 4, 1\]; needed are three channels"):
        Cameras(reader, ["depth"])
    with pytest.raises(DatasetError, match="no column 'observation"):
        Cameras(reader, [TOP])


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "is missing"), (-1.0, "begins at -1.0"), (float("nan"), "begins at nan")],
)
def test_metadata_that_does_not_say_where(tmp_path: Path, value: float | None, message: str) -> None:
    root = v3(tmp_path / "it")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row[f"videos/{TOP}/from_timestamp"] = value
        if value is None:
            del row[f"videos/{TOP}/from_timestamp"]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(DatasetError, match="has no column" if value is None else message):
        Cameras(open_dataset("local/it", root=root), [TOP])


# --- images in columns ---------------------------------------------------------------------------------------------


def test_images_as_they_lie_in_the_wild(tmp_path: Path) -> None:
    """Bytes alone, a struct, only a path, grey, no image, no picture; groups are read once and forgotten in time."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(encode_png(picture(9)))
    rows: list[Any] = [{"bytes": encode_png(picture(number)), "path": "x"} for number in range(6)]
    rows += [{"bytes": None, "path": "images/a.png"}, None, {"bytes": b"", "path": None}, {"bytes": b"?", "path": None}]
    rows += [{"bytes": None, "path": "../secret.png"}]
    pq.write_table(pa.table({"image": rows}), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"image": [row["bytes"] for row in rows[:6]]}), tmp_path / "b.parquet", row_group_size=4)
    columns = ImageColumns(tmp_path, limit_bytes=1000)
    for name in ("a.parquet", "b.parquet"):
        for order in ([5, 0, 3], [1, 2, 4]):
            found = columns.encoded(tmp_path / name, "image", order, 0)
            assert [number_of(decode_image(data, "here")) for data in found] == order
    assert len(columns._groups) <= 2
    assert number_of(decode_image(columns.encoded(tmp_path / "a.parquet", "image", [6], 0)[0], "here")) == 9
    for row, message in (
        (7, "row 7 .episode 5. holds no image"),
        (8, "holds no image"),
        (10, "only the path"),
        (11, "no"),
    ):
        with pytest.raises(DatasetError, match=message):
            columns.encoded(tmp_path / "a.parquet", "image", [row], 5)
    with pytest.raises(DatasetError, match="here: the image cannot be decoded"):
        decode_image(columns.encoded(tmp_path / "a.parquet", "image", [9], 5)[0], "here")
    with pytest.raises(DatasetError, match="no column 'picture'"):
        columns.encoded(tmp_path / "a.parquet", "picture", [0], 5)


def test_truncated_and_deep_images() -> None:
    import io

    from PIL import Image

    whole = encode_png(picture(5))
    with pytest.raises(DatasetError, match="cannot be decoded"):
        decode_image(whole[: len(whole) // 2], "here")
    for mode, shape in {"RGBA": (4, 4, 4), "I;16": (4, 4)}.items():
        sink = io.BytesIO()
        Image.fromarray(np.zeros(shape, np.uint8 if mode == "RGBA" else np.uint16)).save(sink, "png")
        with pytest.raises(DatasetError, match=f"mode {mode}"):
            decode_image(sink.getvalue(), "here")
    sink = io.BytesIO()
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(sink, "png")
    np.testing.assert_array_equal(decode_image(sink.getvalue(), "here")[:, :, 1].reshape(-1), np.arange(16))


# --- decoded frames on disk ----------------------------------------------------------------------------------------


def test_another_content_is_decoded_anew(tmp_path: Path) -> None:
    root, cache = v2(tmp_path / "it"), tmp_path / "cache"
    check_all(Cameras(open_dataset("local/it", root=root), [TOP], cache_dir=cache))
    shutil.copytree(root, tmp_path / "copy")
    check_all(Cameras(open_dataset("local/copy", root=tmp_path / "copy"), [TOP], cache_dir=cache))
    assert len(list(cache.glob("*.npy"))) == 3, "a copy has the same content"
    build_video(root / f"videos/chunk-000/{TOP}/episode_000000.mp4", range(500, 512))
    cameras = Cameras(open_dataset("local/it", root=root), [TOP], cache_dir=cache)
    assert [number_of(image) for image in cameras.frames(TOP, 0, [3], np.arange(12) / 10)] == [503]
    assert len(list(cache.glob("*.npy"))) == 4


def test_another_stretch_of_a_file_is_another_content(tmp_path: Path) -> None:
    root, cache = v3(tmp_path / "it"), tmp_path / "cache"
    times = np.arange(7) / 10
    (before,) = Cameras(open_dataset("local/it", root=root), [TOP], cache_dir=cache).frames(TOP, 1, [2], times)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1][f"videos/{TOP}/from_timestamp"] += 0.4
    pq.write_table(pa.Table.from_pylist(rows), path)
    (after,) = Cameras(open_dataset("local/it", root=root), [TOP], cache_dir=cache).frames(TOP, 1, [2], times)
    assert (number_of(before), number_of(after)) == (14, 18)


def test_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_dataset("local/it", root=v2(tmp_path / "it"))
    check_all(Cameras(reader, [TOP], cache_dir=tmp_path / "cache"))
    monkeypatch.setattr("pi0_fast.data.video.VideoDecoders.frames", lambda *_: pytest.fail("decoded again"))
    check_all(Cameras(reader, [TOP], cache_dir=tmp_path / "cache"))


def test_a_damaged_or_full_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_dataset("local/it", root=v2(tmp_path / "it"))
    cache = tmp_path / "cache"
    times = np.arange(12) / 10
    monkeypatch.setattr(frame_cache_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(DatasetError, match=r"cache has 0\.0 GB free"):
        Cameras(reader, [TOP], cache_dir=cache).frames(TOP, 0, [1], times)
    monkeypatch.undo()
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".lock")] == []
    left = cache / f".{'0' * 64}.abc"  # of a killed process, for something else
    left.write_text("")
    Cameras(reader, [TOP], cache_dir=cache).frames(TOP, 0, [1], times)
    assert left.exists()
    (path,) = cache.glob("*.npy")
    half_written = cache / f".{path.stem}.killed"
    half_written.write_text("")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DatasetError, match=r"\.npy is damaged .*delete it"):
        Cameras(reader, [TOP], cache_dir=cache).frames(TOP, 0, [1], times)
    path.unlink()
    (image,) = Cameras(reader, [TOP], cache_dir=cache).frames(TOP, 0, [1], times)
    assert number_of(image) == 1
    assert not half_written.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="cannot be made"):
        Cameras(reader, [TOP], cache_dir=tmp_path / "file")


def _look(cameras: Cameras, seed: int) -> list[int]:
    decoded = []
    original = Cameras._decode_all
    Cameras._decode_all = lambda *given: decoded.append(given[2]) or original(*given)  # type: ignore[method-assign,misc,assignment,func-returns-value]
    firsts = [0, 12, 19]
    for episode in np.random.default_rng(seed).permutation(3).tolist() * 3:
        times = np.arange(LENGTHS[episode]) / 10
        (image,) = cameras.frames(TOP, episode, [seed], times)
        assert number_of(image) == firsts[episode] + seed
    return decoded


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_the_cache(tmp_path: Path, method: str) -> None:
    """Each episode is decoded by one of them; all see the same."""
    reader = open_dataset("local/it", root=v3(tmp_path / "it"))
    cameras = Cameras(reader, [TOP], cache_dir=tmp_path / "cache")
    count = 4 if method == "fork" else 2
    with get_context(method).Pool(count) as pool:
        decoded = pool.starmap(_look, [(cameras, seed) for seed in range(count)], chunksize=1)
    assert sorted(episode for some in decoded for episode in some) == [0, 1, 2]


# --- lerobot -------------------------------------------------------------------------------------------------------

LEROBOT = """
import sys
import shim_torchvision
shim_torchvision.install()
import numpy as np
import torch
from torchvision import transforms
if not callable(transforms.ToTensor()):  # a stand-in that does not convert
    transforms.ToTensor.__call__ = lambda self, image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
from lerobot.datasets.lerobot_dataset import LeRobotDataset
dataset = LeRobotDataset("local/it", root=sys.argv[1], video_backend="pyav")
items = [dataset[i] for i in range(len(dataset))]
key = "observation.images.top"
np.savez(sys.argv[2], images=np.stack([item[key].numpy() for item in items]), mean=dataset.meta.stats[key]["mean"])
"""


@pytest.mark.interop
@pytest.mark.parametrize("dtype", ["video", "image"])
def test_lerobot_sees_the_pictures(tmp_path: Path, dtype: str) -> None:
    python = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not python:
        pytest.skip("PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1")
    root = written(tmp_path / "it", dtype, "av1")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [python, "-c", LEROBOT, str(root), str(tmp_path / "seen.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    cameras = Cameras(open_dataset("local/it", root=root), [TOP])
    ours = [cameras.frames(TOP, e, range(n), np.arange(n) / 10) for e, n in enumerate(LENGTHS)]
    stacked = np.stack([image for images in ours for image in images]).transpose(0, 3, 1, 2)
    with np.load(tmp_path / "seen.npz") as seen:
        assert [number_of(image.transpose(1, 2, 0) * 255) for image in seen["images"]] == list(range(28))
        np.testing.assert_allclose(seen["images"] * 255, stacked, atol=1)
        assert seen["mean"].shape == (3, 1, 1)
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
