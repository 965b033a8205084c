"""Training samples out of datasets: chunks, padding, tasks, pictures, subsets; real data."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi0_fast.data import LeRobotWriter, open_dataset
from pi0_fast.training.frames import FrameDataset
from pi0_fast.types import DatasetError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))

STATE = {"observation.state": {"dtype": "float32", "shape": [2]}, "action": {"dtype": "float32", "shape": [3]}}
TASKS = ("pick", "place")


def columns(length: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"observation.state": random.normal(size=(length, 2)), "action": random.normal(size=(length, 3))}


def write(root: Path, lengths: list[int]) -> list[dict[str, np.ndarray]]:
    """A dataset without cameras; episode e has the task e % 2."""
    episodes = [columns(length, seed) for seed, length in enumerate(lengths)]
    with LeRobotWriter(root, fps=10, features=STATE, overwrite=True) as writer:
        for index, episode in enumerate(episodes):
            writer.add_episode(episode, task=TASKS[index % 2])
    return episodes


def frames(root: Path, chunk_size: int = 4, cameras: tuple[str, ...] = (), **arguments: Any) -> FrameDataset:
    return FrameDataset(open_dataset("local/it", root=root), chunk_size=chunk_size, camera_keys=cameras, **arguments)


def test_a_chunk_at_the_end_of_an_episode_by_hand(tmp_path: Path) -> None:
    """Episodes of 3 and 2 frames, chunks of 3: a a a | a a - and so on, never into the next episode."""
    with LeRobotWriter(tmp_path / "it", fps=10, features=STATE) as writer:
        for first, length in ((10, 3), (20, 2)):
            values = np.arange(first, first + length)
            writer.add_episode(
                {"observation.state": np.stack([values, -values], 1), "action": np.stack([values] * 3, 1)}, task="t"
            )
    dataset = frames(tmp_path / "it", 3)
    assert len(dataset) == 5
    chunks = [(item["action"][:, 0].tolist(), item["action_is_pad"].tolist()) for item in dataset]
    assert chunks == [
        ([10, 11, 12], [False, False, False]),
        ([11, 12, 12], [False, False, True]),
        ([12, 12, 12], [False, True, True]),
        ([20, 21, 21], [False, False, True]),
        ([21, 21, 21], [False, True, True]),
    ]
    item = dataset[3]
    assert item["observation.state"].tolist() == [20, -20]
    assert (item["index"], item["episode_index"], item["frame_index"], item["task"]) == (3, 1, 0, "t")
    assert (item["action"].dtype, item["observation.state"].dtype) == (np.float32, np.float32)
    whole = frames(tmp_path / "it", 3, whole_only=True)
    assert [item["action"][:, 0].tolist() for item in whole] == [[10, 11, 12]]
    assert (whole.skipped, whole.episodes) == ({1: 2}, (0,))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_samples_as_plain_loops_find_them(tmp_path: Path, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    chunk_size = data.draw(st.integers(1, 6))
    whole_only = data.draw(st.booleans())
    chosen = data.draw(st.none() | st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    written = write(tmp_path / "it", lengths)
    expected, first = [], 0
    for index, episode in enumerate(written):
        length = len(episode["action"])
        for frame in range(length if chosen is None or index in chosen else 0):
            steps = [frame + step for step in range(chunk_size)]
            padded = [step >= length for step in steps]
            if not (whole_only and any(padded)):
                action = [episode["action"][min(step, length - 1)] for step in steps]
                expected.append((first + frame, index, frame, episode["observation.state"][frame], action, padded))
        first += length
    if not expected:
        with pytest.raises(DatasetError, match=r"longest episode has \d+ frames.*chunk_size"):
            frames(tmp_path / "it", chunk_size, whole_only=whole_only, episodes=chosen)
        return
    dataset = frames(tmp_path / "it", chunk_size, whole_only=whole_only, episodes=chosen)
    assert len(dataset) == len(expected)
    order = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=8))
    batch, items = dataset.batch(order), dataset.__getitems__(order)
    for row, place in enumerate(order):
        index, episode, frame, state, action, padded = expected[place]
        assert (batch["index"][row], batch["episode_index"][row], batch["frame_index"][row]) == (index, episode, frame)
        np.testing.assert_array_equal(batch["observation.state"][row], np.float32(state))
        np.testing.assert_array_equal(batch["action"][row], np.float32(action))
        assert batch["action_is_pad"][row].tolist() == padded
        assert batch["task"][row] == TASKS[episode % 2]
        for key, value in dataset[place].items():
            np.testing.assert_array_equal(value, batch[key][row])
            np.testing.assert_array_equal(value, items[row][key])


def test_indices(tmp_path: Path) -> None:
    write(tmp_path / "it", [5])
    dataset = frames(tmp_path / "it")
    assert dataset[-1]["frame_index"] == 4
    for wrong in (5, -6):
        with pytest.raises(IndexError, match="of 5"):
            dataset[wrong]
    with pytest.raises(DatasetError, match="chunk_size is 0"):
        frames(tmp_path / "it", 0)
    with pytest.raises(DatasetError, match="no episode 9"):
        frames(tmp_path / "it", episodes=[9])


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "it", [5])
    with pytest.raises(DatasetError, match=r"no column 'state'; did you mean 'observation.state'\?"):
        frames(tmp_path / "it", state_key="state")
    with pytest.raises(DatasetError, match="no column 'top'"):
        frames(tmp_path / "it", cameras=("top",))
    same = frames(tmp_path / "it", state_key="action")  # some datasets have no state but the last action
    np.testing.assert_array_equal(same.batch([0])["action"].shape, [1, 4, 3])


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path / "it", [5, 6])
    path = tmp_path / "it/data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    values = np.array(table["action"].to_pylist(), np.float32)
    values[7, 2] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 3)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    with pytest.raises(DatasetError, match=r"action .*: dimension 2 of frame 2 in episode 1 is nan .one of 1"):
        frames(tmp_path / "it")
    assert len(frames(tmp_path / "it", episodes=[0])) == 5


def test_each_frame_has_its_own_task(tmp_path: Path) -> None:
    """Several tasks in an episode: the column task_index decides, not the episode's list."""
    write(tmp_path / "it", [4, 3])
    root = tmp_path / "it"
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("task_index")
    several = table.set_column(place, "task_index", pa.array([1, 1, 0, 1, 0, 0, 0], pa.int64()))
    pq.write_table(several, path)
    found = frames(root).batch(range(7))["task"]
    assert found == ["place", "place", "pick", "place", "pick", "pick", "pick"]
    pq.write_table(table.set_column(place, "task_index", pa.array([0, 0, 7, 0, 0, 0, 0], pa.int64())), path)
    with pytest.raises(DatasetError, match=r"episode 0 .* has task_index 7, which the tasks file"):
        frames(root)
    info = json.loads((root / "meta/info.json").read_text())
    del info["features"]["task_index"]
    (root / "meta/info.json").write_text(json.dumps(info))
    assert frames(root).batch([0, 5])["task"] == ["pick", "place"]
    episodes = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(episodes).to_pylist()
    rows[0]["tasks"] = ["pick", "place"]
    pq.write_table(pa.Table.from_pylist(rows), episodes)
    with pytest.raises(DatasetError, match=r"episode 0 .* has 2 tasks and no task_index"):
        frames(root)


# --- pictures ------------------------------------------------------------------------------------------------------


def with_video(root: Path) -> Path:
    """Two cameras: the first shows the frame's number, the second that plus 100; the second is smaller."""
    pytest.importorskip("av")
    from video_builder import picture

    cameras = {"top": {"dtype": "video", "shape": [64, 96, 3]}, "wrist": {"dtype": "image", "shape": [16, 24, 3]}}
    with LeRobotWriter(root, fps=10, features={**STATE, **cameras}, video_codec="h264") as writer:
        first = 0
        for length in (9, 7):
            numbers = range(first, first + length)
            pictures = {
                "top": [picture(number) for number in numbers],
                "wrist": [picture(number + 100, 16, 24) for number in numbers],
            }
            writer.add_episode({**columns(length, 0), **pictures}, task="t")
            first += length
    return root


@pytest.mark.parametrize("cached", [False, True])
def test_pictures_belong_to_their_frames(tmp_path: Path, cached: bool) -> None:
    root = with_video(tmp_path / "it")
    from video_builder import number_of

    arguments: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {}
    dataset = frames(root, 3, ("top", "wrist"), **arguments)
    order = [*np.random.default_rng(0).permutation(16)[:11].tolist(), 4, 4]
    batch = dataset.batch(order)
    assert (batch["top"].shape, batch["wrist"].shape) == ((13, 64, 96, 3), (13, 16, 24, 3))
    assert [number_of(image) for image in batch["top"]] == batch["index"].tolist() == order
    assert [number_of(image) - 100 for image in batch["wrist"]] == order
    again = pickle.loads(pickle.dumps(dataset))
    assert number_of(again[7]["top"]) == number_of(again[7]["wrist"]) - 100 == 7
    assert again[7]["top"].dtype == np.uint8
    subset = frames(root, 3, ("top",), episodes=[1], **arguments)
    assert [number_of(item["top"]) for item in subset] == list(range(9, 16))
    assert "wrist" not in subset[0]


def test_transforms_know_the_epoch_and_the_frame(tmp_path: Path) -> None:
    root = with_video(tmp_path / "it")
    seen: list[tuple[int, int, str]] = []

    def change(image: np.ndarray, epoch: int, index: int, camera: str) -> np.ndarray:
        seen.append((epoch, index, camera))
        return image[: 10 + epoch]

    dataset = frames(root, 3, ("top",), episodes=[1], transforms=change)
    batch = dataset.batch([2, 0], [1, 0])
    assert seen == [(1, 11, "top"), (0, 9, "top")]
    assert [image.shape for image in batch["top"]] == [(11, 96, 3), (10, 96, 3)], "sizes differ: a list"
    assert dataset.batch([2, 0])["top"].shape == (2, 10, 96, 3)


def test_missing_and_broken_video(tmp_path: Path) -> None:
    root = with_video(tmp_path / "it")
    video = root / "videos/top/chunk-000/file-001.mp4"
    content = video.read_bytes()
    video.unlink()
    with pytest.raises(DatasetError, match=r"file-001\.mp4 is missing \(1 of 2 video files of camera 'top'"):
        frames(root, 3, ("top",))
    assert len(frames(root, 3, ("wrist",))) == 16
    video.write_bytes(content[: len(content) // 2])
    dataset = frames(root, 3, ("top",))
    dataset[3]
    with pytest.raises(DatasetError, match=r"file-001\.mp4 \(episode 1\) cannot be decoded"):
        dataset[12]
    shutil.copyfile(root / "videos/top/chunk-000/file-000.mp4", video)  # of the other episode, two frames longer
    assert dataset[12]["top"].shape == (64, 96, 3)
    video.write_bytes(content)
    shutil.copyfile(video, root / "videos/top/chunk-000/file-000.mp4")
    with pytest.raises(DatasetError, match=r"file-000\.mp4 \(episode 0, 0\.8000 s\).*half a frame"):
        frames(root, 3, ("top",))[8]


def test_the_numbers_of_a_dataset_whose_video_is_not_there(shared: Path) -> None:
    reader = open_dataset("x/so101", root=shared / "data/so101_record_test_v30")
    dataset = FrameDataset(reader, chunk_size=50, camera_keys=(), whole_only=True)
    assert len(dataset) == 1492 - 4 * 49
    assert not dataset.batch(range(0, len(dataset), 7))["action_is_pad"].any()
    assert dataset[0]["task"] == "Pick the orange cube and place it in the box"
    with pytest.raises(DatasetError, match=r"no folder videos/ at all"):
        FrameDataset(reader, chunk_size=50, camera_keys=reader.camera_keys)


def test_real_video(shared: Path) -> None:
    pytest.importorskip("av")
    reader = open_dataset("x/g1", root=shared / "data/g1_inspire_video_v21")
    dataset = FrameDataset(reader, chunk_size=50, camera_keys=reader.camera_keys, whole_only=True)
    assert len(dataset) == 891 - 3 * 49
    batch = dataset.batch([0, 400, 743])
    assert batch["observation.images.cam_high"].shape == (3, 480, 640, 3)
    assert batch["task"] == ["Pick up the yellow bottle on the table."] * 3
    (last,) = reader.iter_episodes(["action"], [2])
    np.testing.assert_array_equal(batch["action"][2], last.columns["action"][-50:])


def test_chunks_start_only_where_pictures_are_new(tmp_path: Path) -> None:
    """Ages 0 1 2 0 1 and 0 0: samples are the frames 0, 3, 5, 6; their chunks go on over the frames between."""
    pytest.importorskip("PIL")
    features: dict[str, Any] = {
        **STATE,
        "image_age": {"dtype": "int64", "shape": [1]},
        "observation.images.top": {"dtype": "image", "shape": [2, 2, 3]},
    }
    with LeRobotWriter(tmp_path / "it", fps=10, features=features) as writer:
        for first, ages in ((10, [0, 1, 2, 0, 1]), (20, [0, 0])):
            values = np.arange(first, first + len(ages))
            writer.add_episode(
                {
                    "observation.state": np.stack([values] * 2, 1),
                    "action": np.stack([values] * 3, 1),
                    "image_age": np.array(ages),
                    "observation.images.top": np.zeros((len(ages), 2, 2, 3), np.uint8),
                },
                task="t",
            )
    dataset = frames(tmp_path / "it", 2, ("observation.images.top",))
    assert (len(dataset), dataset.repeated) == (4, 3)
    assert [item["index"] for item in dataset] == [0, 3, 5, 6]
    assert dataset.steps_left.tolist() == [5, 2, 2, 1]
    assert [item["action"][:, 0].tolist() for item in dataset] == [[10, 11], [13, 14], [20, 21], [21, 21]]
    whole = frames(tmp_path / "it", 2, ("observation.images.top",), whole_only=True)
    assert [item["index"] for item in whole] == [0, 3, 5]
    blind = frames(tmp_path / "it", 2)
    assert (len(blind), blind.repeated) == (7, 0)
