"""Writing v3.0: round trips, exact statistics, nothing left behind, and the layout that LeRobot expects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from dataset_builder import random_episodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi0_fast.data import LeRobotWriter, open_dataset
from pi0_fast.data import writer as writer_module
from pi0_fast.data.writer import exact_statistics
from pi0_fast.types import DatasetError, Feature

ACTION = {"action": {"dtype": "float32", "shape": [3], "names": ["x", "y", "grip"]}}


def write(root: Path, episodes: list[np.ndarray], **arguments: Any) -> Path:
    with LeRobotWriter(root, fps=10, features=ACTION, **arguments) as writer:
        for index, values in enumerate(episodes):
            assert writer.add_episode({"action": values}, task=f"task {index % 2}") == index
    return root


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_written_is_read(tmp_path: Path, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6), label="lengths")
    widths = {"action": data.draw(st.integers(1, 5)), "observation.state": data.draw(st.integers(1, 5))}
    seed = data.draw(st.integers(0, 100))
    generator = np.random.default_rng(seed)
    episodes = [
        {
            **{key: generator.normal(size=(n, width)).astype(np.float32) for key, width in widths.items()},
            "gripper": generator.integers(-(2**40), 2**40, size=(n, 1)),
        }
        for n in lengths
    ]
    features: dict[str, Any] = {key: Feature(key, "float32", (width,)) for key, width in widths.items()}
    features["gripper"] = {"dtype": "int64", "shape": [1]}
    tasks = [data.draw(st.sampled_from(["pick", "fold", "Ärger — 开"])) for _ in lengths]
    with LeRobotWriter(tmp_path / "it", fps=12.5, features=features, overwrite=True) as writer:
        for columns, task in zip(episodes, tasks, strict=True):
            writer.add_episode(columns, task=task)
    dataset = open_dataset("local/it", root=tmp_path / "it")
    assert (dataset.version, dataset.fps, dataset.robot_type) == ("v3.0", 12.5, None)
    assert [record.length for record in dataset.episodes] == lengths
    assert [record.tasks for record in dataset.episodes] == [(task,) for task in tasks]
    order = list(dict.fromkeys(tasks))
    keys = [*features, "timestamp", "frame_index", "index", "task_index"]
    first = 0
    for episode, columns, task in zip(dataset.iter_episodes(keys), episodes, tasks, strict=True):
        for key in widths:
            np.testing.assert_array_equal(episode.columns[key], columns[key])
        frames = np.arange(episode.length)
        np.testing.assert_array_equal(episode.columns["gripper"], columns["gripper"][:, 0])
        np.testing.assert_array_equal(episode.columns["frame_index"], frames)
        np.testing.assert_array_equal(episode.columns["index"], first + frames)
        np.testing.assert_array_equal(episode.columns["timestamp"][:, 0], (frames / 12.5).astype(np.float32))
        np.testing.assert_array_equal(episode.columns["task_index"], order.index(task))
        first += episode.length
    assert entries(tmp_path) == ["it"]


def test_statistics_of_five_numbers_by_hand() -> None:
    """0, 1, 2, 3, 10: mean 3.2, variance 114/5 - 3.2^2 = 12.56; q10 is at rank 0.4, and so on."""
    statistics = exact_statistics(np.array([[2], [0], [10], [1], [3]], np.float32))
    expected = {"min": 0, "max": 10, "mean": 3.2, "std": 12.56**0.5, "count": 5}
    expected.update({"q01": 0.04, "q10": 0.4, "q50": 2, "q90": 7.2, "q99": 9.72})
    assert set(statistics) == set(expected)
    for name, value in expected.items():
        assert statistics[name] == pytest.approx([value], abs=1e-12), name


def test_statistics_are_those_of_all_frames_and_not_averages_of_episodes(tmp_path: Path) -> None:
    episodes = random_episodes([1000, 20, 300])
    episodes[1] += 50
    root = write(tmp_path / "it", episodes)
    dataset = open_dataset("local/it", root=root)
    frames = np.concatenate(episodes).astype(np.float64)
    statistics = dataset.statistics("action")
    assert statistics is not None
    for name, share in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(statistics[name], np.quantile(frames, share, axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(statistics["mean"], frames.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(statistics["std"], frames.std(axis=0), atol=1e-12)
    np.testing.assert_array_equal(statistics["min"], frames.min(axis=0))
    np.testing.assert_array_equal(statistics["max"], frames.max(axis=0))
    np.testing.assert_array_equal(statistics["count"], [1320])
    assert set(json.loads((root / "meta/stats.json").read_text())) == set(dataset.features)
    row = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()[1]
    np.testing.assert_array_equal(row["stats/action/max"], episodes[1].max(axis=0))
    assert row["stats/action/count"] == [20]
    assert (row["dataset_from_index"], row["dataset_to_index"]) == (1000, 1020)


def test_files_roll_over_by_size_and_chunks_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FILES_PER_CHUNK", 2)
    episodes = random_episodes([10_000] * 9)  # 350 kB each: two fit in a file of 1 MB
    root = write(tmp_path / "it", episodes, data_file_size_mb=1)
    files = sorted(str(path.relative_to(root)) for path in (root / "data").rglob("*.parquet"))
    assert files == [
        "data/chunk-000/file-000.parquet",
        "data/chunk-000/file-001.parquet",
        "data/chunk-001/file-000.parquet",
        "data/chunk-001/file-001.parquet",
        "data/chunk-002/file-000.parquet",
    ]
    assert all((root / file).stat().st_size < 2**20 for file in files)
    assert pq.read_metadata(root / files[0]).num_row_groups == 2
    dataset = open_dataset("local/it", root=root)
    for episode, values in zip(dataset.iter_episodes(["action"]), episodes, strict=True):
        np.testing.assert_array_equal(episode.columns["action"], values)
    statistics = dataset.statistics("action")
    assert statistics is not None
    np.testing.assert_array_equal(statistics["count"], [90_000])


@pytest.mark.golden
def test_g1_converted_to_v3_reads_the_same(shared: Path, tmp_path: Path) -> None:
    keys = ["action", "observation.state"]
    source = open_dataset("local/g1", root=shared / "data" / "g1_inspire_v21")
    features = {key: source.feature(key) for key in keys}
    with LeRobotWriter(tmp_path / "g1", fps=source.fps, features=features, robot_type=source.robot_type) as writer:
        for episode, record in zip(source.iter_episodes(keys), source.episodes, strict=True):
            writer.add_episode(episode.columns, task=record.tasks[0])
    copy = open_dataset("local/g1", root=tmp_path / "g1")
    assert copy.episodes == source.episodes
    assert (copy.total_frames, copy.robot_type) == (22042, "Unitree_G1_Inspire")
    assert copy.feature("action") == source.feature("action")
    ours = copy.iter_episodes([*keys, "index", "timestamp"])
    theirs = source.iter_episodes([*keys, "index", "timestamp"])
    for mine, other in zip(ours, theirs, strict=True):
        for key in (*keys, "index"):
            np.testing.assert_array_equal(mine.columns[key], other.columns[key])
        np.testing.assert_allclose(mine.columns["timestamp"], other.columns["timestamp"], atol=1e-5)


@pytest.mark.golden
def test_statistics_agree_with_those_that_lerobot_recorded(shared: Path, tmp_path: Path) -> None:
    """All but the quantiles of SO-101, averages over episodes there. LeRobot computes in float32."""
    source = open_dataset("local/so101", root=shared / "data" / "so101_record_test_v30")
    with LeRobotWriter(tmp_path / "it", fps=30, features={"action": source.feature("action")}) as writer:
        for episode in source.iter_episodes(["action"]):
            writer.add_episode(episode.columns, task="pick")
    copy = open_dataset("local/so101", root=tmp_path / "it")
    for key in ("action", "index", "timestamp"):
        ours, recorded = copy.statistics(key), source.statistics(key)
        assert ours is not None
        assert recorded is not None
        for name in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(ours[name], recorded[name], rtol=1e-4, err_msg=f"{key}/{name}")


@pytest.mark.golden
def test_the_tasks_table_is_laid_out_as_lerobot_lays_it_out(shared: Path, tmp_path: Path) -> None:
    recorded = pq.read_schema(shared / "data/so101_record_test_v30/meta/tasks.parquet")
    written = pq.read_schema(write(tmp_path / "it", random_episodes([2])) / "meta/tasks.parquet")
    assert written.equals(recorded)
    for name in ("index_columns", "column_indexes", "columns"):
        ours, theirs = (json.loads(schema.metadata[b"pandas"])[name] for schema in (written, recorded))
        assert ours == theirs


def test_an_exception_leaves_nothing_and_an_old_dataset_whole(tmp_path: Path) -> None:
    root = write(tmp_path / "it", random_episodes([4]))

    def interrupted(target: Path) -> None:
        with LeRobotWriter(target, fps=10, features=ACTION, overwrite=True) as writer:
            writer.add_episode({"action": np.ones((3, 3))}, task="t")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted(root)
    assert entries(tmp_path) == ["it"]
    assert open_dataset("local/it", root=root).total_frames == 4
    with pytest.raises(ZeroDivisionError):
        interrupted(tmp_path / "new")
    assert entries(tmp_path) == ["it"]


def test_nothing_is_there_before_close_and_everything_after(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "it", fps=10, features=ACTION)
    writer.add_episode({"action": np.zeros((3, 3))}, task="t")
    assert not (tmp_path / "it").exists()
    writer.close()
    writer.close()
    assert entries(tmp_path) == ["it"]
    with pytest.raises(DatasetError, match="is closed"):
        writer.add_episode({"action": np.zeros((3, 3))}, task="t")
    assert open_dataset("local/it", root=tmp_path / "it").total_frames == 3


def test_overwriting_is_asked_for_and_replaces_all(tmp_path: Path) -> None:
    root = write(tmp_path / "it", random_episodes([4, 5]))
    (root / "data" / "extra").touch()
    with pytest.raises(DatasetError, match=r"is there already.*--overwrite"):
        LeRobotWriter(root, fps=10, features=ACTION)
    write(root, random_episodes([6]), overwrite=True)
    assert open_dataset("local/it", root=root).total_frames == 6
    assert not (root / "data" / "extra").exists()
    assert entries(tmp_path) == ["it"]


def test_only_datasets_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    with pytest.raises(DatasetError, match="is no LeRobot dataset, so it is not overwritten"):
        LeRobotWriter(tmp_path / "thesis", fps=10, features=ACTION, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match="is no LeRobot dataset"):
        LeRobotWriter(tmp_path / "file", fps=10, features=ACTION, overwrite=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", random_episodes([2]), overwrite=True)
    assert entries(tmp_path) == ["empty", "file", "thesis"]


def test_a_root_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "it", fps=10, features=ACTION)
    writer.add_episode({"action": np.zeros((3, 3))}, task="t")
    write(tmp_path / "it", random_episodes([7]))
    with pytest.raises(DatasetError, match="is there already"):
        writer.close()
    assert entries(tmp_path) == ["it"]
    assert open_dataset("local/it", root=tmp_path / "it").total_frames == 7


def test_a_dataset_without_episodes_is_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(DatasetError, match="no episode was added"),
        LeRobotWriter(tmp_path / "it", fps=10, features=ACTION),
    ):
        pass
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("columns", "task", "reason"),
    [
        ({}, "t", "episode 1 lacks column 'action'"),
        (
            {"action": np.zeros((2, 3)), "state": np.zeros((2, 3))},
            "t",
            "has the column 'state'; declared: action",
        ),
        ({"action": np.zeros((2, 4))}, "t", r"has the shape \(2, 4\), not \[T, 3\]"),
        ({"action": np.zeros(3)}, "t", r"has the shape \(3,\)"),
        ({"action": np.zeros((0, 3))}, "t", "has no frames"),
        ({"action": np.full((2, 3), "a")}, "t", "holds <U1, not float32"),
        ({"action": np.zeros((2, 3), complex)}, "t", "holds complex128, not float32"),
        ({"action": np.array([[0, 0, 0], [0, 0, np.nan]])}, "t", r"frame 1, dimension 2 \(grip\) is nan"),
        ({"action": np.array([[0, 1e300, 0]])}, "t", r"frame 0, dimension 1 \(y\) is inf"),
        ({"action": np.zeros((2, 3))}, " ", "no task text"),
    ],
)
def test_a_refused_episode_does_no_harm(tmp_path: Path, columns: dict[str, np.ndarray], task: str, reason: str) -> None:
    good = random_episodes([3, 2])
    with LeRobotWriter(tmp_path / "it", fps=10, features=ACTION) as writer:
        writer.add_episode({"action": good[0]}, task="t")
        with pytest.raises(DatasetError, match=reason):
            writer.add_episode(columns, task=task)
        writer.add_episode({"action": good[1]}, task="t")
    read = list(open_dataset("local/it", root=tmp_path / "it").iter_episodes(["action"]))
    for episode, values in zip(read, good, strict=True):
        np.testing.assert_array_equal(episode.columns["action"], values)


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    features = {**ACTION, "observation.state": Feature("observation.state", "float32", (2,))}
    with (
        pytest.raises(DatasetError, match=r"different lengths: \{'action': 3, 'observation.state': 2\}"),
        LeRobotWriter(tmp_path / "it", fps=10, features=features) as writer,
    ):
        writer.add_episode({"action": np.zeros((3, 3)), "observation.state": np.zeros((2, 2))}, task="t")


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({}, "at least one feature"),
        ({"timestamp": {"dtype": "float32", "shape": [1]}}, "'timestamp' is added by the writer"),
        ({"a/b": {"dtype": "float32", "shape": [1]}}, "'a/b' is empty or holds a '/'"),
        ({"image": {"dtype": "video", "shape": [4, 4, 3]}}, "at least one feature of numbers"),
        ({"image": {"dtype": "video", "shape": [5, 4, 3]}}, "height and width must be even"),
        ({"image": {"dtype": "image", "shape": [3, 4, 4]}}, r"shape \(height, width, 3\) is expected"),
        ({"action": {"dtype": "string", "shape": [1]}}, "dtype 'string'; known: float32, float64, int64"),
        ({"action": {"dtype": "float32", "shape": [2, 2]}}, r"has the shape \(2, 2\)"),
        ({"action": {"dtype": "float32", "shape": [2], "names": ["x"]}}, "2 dimensions, but its names"),
        ({"action": {"dtype": "float32"}}, r"has the shape \(\)"),
    ],
)
def test_declarations_that_cannot_be_written(tmp_path: Path, features: dict[str, Any], reason: str) -> None:
    with pytest.raises(DatasetError, match=reason):
        LeRobotWriter(tmp_path / "it", fps=10, features=features)
    assert entries(tmp_path) == []


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf")])
def test_impossible_frame_rates(tmp_path: Path, fps: float) -> None:
    with pytest.raises(DatasetError, match="fps is"):
        LeRobotWriter(tmp_path / "it", fps=fps, features=ACTION)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = LeRobotWriter(tmp_path / "it", fps=10, features=ACTION)
    writer.add_episode({"action": np.zeros((3, 3))}, task="t")
    monkeypatch.setattr(writer_module.pq.ParquetWriter, "write_table", full)
    with pytest.raises(DatasetError, match=r"episode 1 of .* cannot be written: .*No space left"):
        writer.add_episode({"action": np.zeros((3, 3))}, task="t")
    assert entries(tmp_path) == []


LEROBOT = """
import sys
import shim_torchvision
shim_torchvision.install()
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
dataset = LeRobotDataset("local/it", root=sys.argv[1])
ahead = {"action": [0, 0.1, 0.2]}
chunks = LeRobotDataset("local/it", root=sys.argv[1], episodes=[1], delta_timestamps=ahead)
items = [dataset[i] for i in range(len(dataset))]
np.savez(
    sys.argv[2],
    **{key: np.stack([item[key].numpy() for item in items]) for key in items[0] if key != "task"},
    tasks=np.array([item["task"] for item in items]),
    episodes=dataset.num_episodes,
    fps=dataset.fps,
    chunk=chunks[0]["action"].numpy(),
    **{f"stats/{key}": value for key, value in dataset.meta.stats["action"].items()},
)
"""


@pytest.mark.interop
def test_lerobot_opens_what_is_written(tmp_path: Path) -> None:
    """Frame by frame, with the interpreter of an environment that has lerobot 0.6.1."""
    python = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not python:
        pytest.skip("PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1")
    generator = np.random.default_rng(0)
    lengths = [5, 7, 3]
    episodes = [
        {
            "action": generator.normal(size=(n, 3)).astype(np.float32),
            "gripper": generator.normal(size=(n, 1)).astype(np.float32),
            "button": generator.integers(0, 9, size=(n, 1)),
        }
        for n in lengths
    ]
    features: dict[str, Any] = {
        **ACTION,
        "gripper": {"dtype": "float32", "shape": [1]},
        "button": {"dtype": "int64", "shape": [1]},
    }
    root = tmp_path / "it"
    with LeRobotWriter(root, fps=10, features=features, robot_type="testbot") as writer:
        for index, columns in enumerate(episodes):
            writer.add_episode(columns, task=f"task {index % 2}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [python, "-c", LEROBOT, str(root), str(tmp_path / "seen.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "seen.npz") as seen:
        assert (int(seen["episodes"]), int(seen["fps"])) == (3, 10)
        whole = {key: np.concatenate([columns[key] for columns in episodes]) for key in features}
        np.testing.assert_array_equal(seen["action"], whole["action"])
        np.testing.assert_array_equal(seen["gripper"], whole["gripper"][:, 0])
        np.testing.assert_array_equal(seen["button"], whole["button"][:, 0])
        np.testing.assert_array_equal(seen["episode_index"], np.repeat([0, 1, 2], lengths))
        np.testing.assert_array_equal(seen["frame_index"], np.concatenate([np.arange(n) for n in lengths]))
        np.testing.assert_array_equal(seen["index"], np.arange(15))
        np.testing.assert_array_equal(seen["task_index"], np.repeat([0, 1, 0], lengths))
        assert seen["tasks"].tolist() == np.repeat(["task 0", "task 1", "task 0"], lengths).tolist()
        np.testing.assert_array_equal(seen["chunk"], episodes[1]["action"][:3])
        np.testing.assert_allclose(seen["stats/q01"], np.quantile(whole["action"], 0.01, axis=0), atol=1e-6)
        np.testing.assert_array_equal(seen["stats/count"], [15])
    shutil.rmtree(tmp_path / "home", ignore_errors=True)


def test_metadata_of_the_callers_own(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "it", fps=10, features=ACTION) as writer:
        writer.add_episode({"action": np.zeros((2, 3), np.float32)}, task="x")
        writer.add_metadata("recording.json", {"seeds": [4]})
        for name in ("info.json", "stats.json", "../recording.json", "recording.txt", "sub/recording.json"):
            with pytest.raises(DatasetError, match="cannot be called"):
                writer.add_metadata(name, {})
    assert json.loads((tmp_path / "it/meta/recording.json").read_text()) == {"seeds": [4]}
    assert entries(tmp_path) == ["it"]
