"""Reading real recordings and small hand-made datasets of the three formats."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_builder import build_v2, build_v3, list_array, random_episodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi0_fast.data import frames as frames_module
from pi0_fast.data import open_dataset
from pi0_fast.data.metadata import flat_names
from pi0_fast.types import DatasetError


def by_hand(path: Path, column: str) -> np.ndarray:
    return np.array(pq.read_table(path).column(column).to_pylist(), dtype=np.float32)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "version", "episodes", "total", "width", "first_length"),
    [
        ("g1_inspire_v21", "v2.1", 60, 22042, 26, 479),
        ("g1_inspire_video_v21", "v2.1", 3, 891, 26, 392),
        ("so101_record_test_v30", "v3.0", 4, 1492, 6, 373),
    ],
)
def test_real_recordings_have_their_recorded_counts(
    shared: Path, name: str, version: str, episodes: int, total: int, width: int, first_length: int
) -> None:
    dataset = open_dataset("local/it", root=shared / "data" / name)
    assert (dataset.version, dataset.fps, dataset.origin, dataset.revision) == (
        version,
        30.0,
        "directory",
        None,
    )
    assert (len(dataset.episodes), dataset.total_frames) == (episodes, total)
    assert dataset.feature("action").shape == (width,)
    assert len(dataset.feature("action").names or ()) == width
    read = list(dataset.iter_episodes(["action", "observation.state", "frame_index", "timestamp"]))
    assert [episode.index for episode in read] == [record.index for record in dataset.episodes]
    assert [episode.length for episode in read] == [record.length for record in dataset.episodes]
    assert read[0].length == first_length
    for episode in read:
        for key in ("action", "observation.state"):
            values = episode.columns[key]
            assert values.shape == (episode.length, width)
            assert values.dtype == np.float32
            assert values.flags.c_contiguous
            assert values.flags.writeable
        assert episode.columns["frame_index"].dtype == np.int64
        np.testing.assert_array_equal(episode.columns["frame_index"], np.arange(episode.length))
        assert episode.columns["timestamp"].shape == (episode.length, 1)


@pytest.mark.golden
def test_g1_is_what_its_files_hold(shared: Path) -> None:
    root = shared / "data" / "g1_inspire_v21"
    dataset = open_dataset("local/g1", root=root)
    assert dataset.robot_type == "Unitree_G1_Inspire"
    assert (dataset.feature("action").names or ())[:2] == ("kLeftShoulderPitch", "kLeftShoulderRoll")
    assert {record.tasks for record in dataset.episodes} == {("Pick up the yellow bottle on the table.",)}
    assert dataset.statistics("action") is None
    for episode in dataset.iter_episodes(["action", "observation.state"], episodes=[59, 0, 31]):
        path = root / f"data/chunk-000/episode_{episode.index:06d}.parquet"
        for key, values in episode.columns.items():
            np.testing.assert_array_equal(values, by_hand(path, key))


@pytest.mark.golden
def test_so101_is_what_its_files_hold(shared: Path) -> None:
    root = shared / "data" / "so101_record_test_v30"
    dataset = open_dataset("local/so101", root=root)
    path = root / "data/chunk-000/file-000.parquet"
    whole = by_hand(path, "action")
    of_episode = np.array(pq.read_table(path).column("episode_index").to_pylist())
    episodes = list(dataset.iter_episodes(["action"]))
    for episode in episodes:
        np.testing.assert_array_equal(episode.columns["action"], whole[of_episode == episode.index])
    assert dataset.episodes[0].tasks == ("Pick the orange cube and place it in the box",)
    assert dataset.feature("observation.images.front").names is None
    statistics = dataset.statistics("action")
    assert statistics is not None
    assert set(statistics) == {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}
    assert all(value.dtype == np.float64 for value in statistics.values())
    recorded = json.loads((root / "meta/stats.json").read_text())["action"]
    np.testing.assert_array_equal(statistics["q99"], recorded["q99"])
    np.testing.assert_array_equal(statistics["max"].astype(np.float32), whole.max(axis=0))
    np.testing.assert_array_equal(statistics["count"], [1492])
    assert dataset.statistics("no such column") is None


@pytest.mark.parametrize("kind", ["fixed", "list", "large_list", "double"])
@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_formats_and_layouts_read_the_same(tmp_path: Path, version: str, kind: str) -> None:
    episodes = random_episodes([5, 1, 7])
    if version == "v3.0":
        build_v3(tmp_path, episodes, kind=kind)
    else:
        build_v2(tmp_path, episodes, version=version, kind=kind)
    dataset = open_dataset("local/it", root=tmp_path)
    assert dataset.version == version
    assert [record.tasks for record in dataset.episodes] == [("task 0",), ("task 1",), ("task 0",)]
    read = list(dataset.iter_episodes(["action", "index"]))
    for episode, values, first in zip(read, episodes, (0, 5, 6), strict=True):
        np.testing.assert_array_equal(episode.columns["action"], values)
        np.testing.assert_array_equal(episode.columns["index"], first + np.arange(len(values)))


def test_a_scalar_column_has_one_dimension(tmp_path: Path) -> None:
    episodes = random_episodes([4, 2], width=1)
    build_v2(tmp_path, episodes, kind="scalar")
    read = list(open_dataset("local/it", root=tmp_path).iter_episodes(["action"]))
    np.testing.assert_array_equal(read[0].columns["action"], episodes[0])


def test_v2_statistics_are_read_and_v21_leftovers_are_not(tmp_path: Path) -> None:
    for version in ("v2.0", "v2.1"):
        root = build_v2(tmp_path / version, random_episodes([4]), version=version)
        (root / "meta/stats.json").write_text(json.dumps({"action": {"mean": [1, 2, 3], "count": 4}}))
    statistics = open_dataset("local/it", root=tmp_path / "v2.0").statistics("action")
    assert statistics is not None
    np.testing.assert_array_equal(statistics["mean"], [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(statistics["count"], [4.0])
    assert open_dataset("local/it", root=tmp_path / "v2.1").statistics("action") is None


def test_chunks_of_episodes_in_v2(tmp_path: Path) -> None:
    episodes = random_episodes([2] * 5)
    build_v2(tmp_path, episodes, chunks_size=2)
    assert (tmp_path / "data/chunk-002/episode_000004.parquet").is_file()
    read = list(open_dataset("local/it", root=tmp_path).iter_episodes(["action"]))
    np.testing.assert_array_equal(read[4].columns["action"], episodes[4])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_arrangement_of_episodes_in_files_reads_the_same(tmp_path: Path, data: st.DataObject) -> None:
    """Rows in any order of episodes, over any files, in row groups and batches that cut episodes anywhere."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8), label="lengths")
    order = data.draw(st.permutations(range(len(lengths))), label="order")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths))), label="cuts") | {len(lengths)})
    files = [order[a:b] for a, b in zip([0, *cuts], cuts, strict=False) if b > a]
    wanted = data.draw(st.none() | st.sets(st.integers(0, len(lengths) - 1)), label="wanted")
    episodes = random_episodes(lengths)
    root = tmp_path / "it"
    shutil.rmtree(root, ignore_errors=True)
    build_v3(root, episodes, files=files, row_group_size=data.draw(st.integers(1, 12)), files_per_chunk=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames_module, "_READ_ROWS", data.draw(st.integers(1, 6)))
        patch.setattr(frames_module, "_SCAN_ROWS", data.draw(st.integers(1, 6)))
        dataset = open_dataset("local/it", root=root)
        for _ in range(2):  # the second time without a new scan
            read = list(dataset.iter_episodes(["action", "index"], wanted))
            expected = range(len(lengths)) if wanted is None else sorted(wanted)
            assert [episode.index for episode in read] == list(expected)
            for episode in read:
                np.testing.assert_array_equal(episode.columns["action"], episodes[episode.index])


def test_only_the_files_of_the_wanted_episodes_are_opened(tmp_path: Path) -> None:
    build_v3(tmp_path, random_episodes([3, 3, 3]), files=[[0], [1], [2]])
    (tmp_path / "data/chunk-000/file-001.parquet").unlink()
    (tmp_path / "data/chunk-000/file-002.parquet").write_bytes(b"")
    dataset = open_dataset("local/it", root=tmp_path)
    assert [episode.index for episode in dataset.iter_episodes(["action"], [0])] == [0]


def test_only_the_wanted_columns_are_read(tmp_path: Path) -> None:
    """A column that cannot be decoded does no harm when nobody asks for it."""
    episodes = random_episodes([50, 50], width=8)
    build_v3(tmp_path, episodes)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    other = list_array(np.arange(800, dtype=np.float32).reshape(100, 8))
    pq.write_table(table.append_column("bad", other), path, compression="none", use_dictionary=False)
    column = next(
        group.column(i)
        for group in [pq.read_metadata(path).row_group(0)]
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.startswith("bad")
    )
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset : column.data_page_offset + 20] = b"\xff" * 20
    path.write_bytes(raw)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    info["features"]["bad"] = {"dtype": "float32", "shape": [8], "names": None}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    dataset = open_dataset("local/it", root=tmp_path)
    np.testing.assert_array_equal(next(dataset.iter_episodes(["action"])).columns["action"], episodes[0])
    with pytest.raises(DatasetError, match=r"file-000\.parquet cannot be read as parquet"):
        list(dataset.iter_episodes(["bad"]))


def test_a_column_whose_name_begins_like_another(tmp_path: Path) -> None:
    """pyarrow takes a column name for a prefix; the exact one must come back."""
    build_v3(tmp_path, random_episodes([3]))
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.add_column(0, "action.left", pa.array([9.0, 9.0, 9.0])), path)
    episode = next(open_dataset("local/it", root=tmp_path).iter_episodes(["action"]))
    np.testing.assert_array_equal(episode.columns["action"], random_episodes([3])[0])


def test_memory_stays_flat_over_one_huge_row_group(tmp_path: Path) -> None:
    """A million frames in one row group are 104 MB of actions, of which a small part is held."""
    code = """
import sys, numpy as np, pyarrow as pa
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from dataset_builder import build_v3
from pi0_fast.data import open_dataset
values = np.random.default_rng(0).normal(size=(1000, 26)).astype(np.float32)
root = build_v3(Path(sys.argv[1]), [values] * 1000, row_group_size=10**7)
del values
dataset = open_dataset("local/it", root=root)
pa.default_memory_pool().release_unused()
before, seen = pa.total_allocated_bytes(), 0
peak = before
for episode in dataset.iter_episodes(["action"]):
    seen += episode.length
    peak = max(peak, pa.total_allocated_bytes())
print(seen, (peak - before) // 2**20)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen, megabytes = map(int, done.stdout.split())
    assert seen == 1_000_000
    assert megabytes < 16


def test_an_early_stop_closes_the_file(tmp_path: Path) -> None:
    build_v3(tmp_path, random_episodes([3, 3]))
    iterator = open_dataset("local/it", root=tmp_path).iter_episodes(["action"])
    assert next(iterator).index == 0
    iterator.close()  # type: ignore[attr-defined]
    assert list(iterator) == []


def test_reading_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    build_v3(tmp_path, random_episodes([3, 3]))

    def state() -> list[tuple[str, int, int]]:
        paths = sorted(tmp_path.rglob("*"))
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    before = state()
    dataset = open_dataset("local/it", root=tmp_path)
    list(dataset.iter_episodes(["action"]))
    dataset.statistics("action")
    assert state() == before


def test_an_unknown_key_names_the_columns_the_nearest_first(tmp_path: Path) -> None:
    build_v2(tmp_path, random_episodes([3]))
    info = json.loads((tmp_path / "meta/info.json").read_text())
    info["features"] = {("actions" if key == "action" else key): value for key, value in info["features"].items()}
    info["features"]["state"] = {"dtype": "float32", "shape": [3], "names": None}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    dataset = open_dataset("local/it", root=tmp_path)
    with pytest.raises(DatasetError, match=r"no column 'action'; did you mean 'actions'\? Present: actions, "):
        dataset.iter_episodes(["action"])
    with pytest.raises(DatasetError, match=r"no column 'observation.state'.*state.*--state_key"):
        dataset.feature("observation.state")


def test_wrong_questions_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    build_v2(tmp_path, random_episodes([3, 2]))
    dataset = open_dataset("local/it", root=tmp_path)
    with pytest.raises(DatasetError, match=r"'observation.images.top' .* is an image \(video\).*action"):
        dataset.iter_episodes(["observation.images.top"])
    with pytest.raises(DatasetError, match=r"no episode 2; it has 2 episodes \(0 to 1\)"):
        dataset.iter_episodes(["action"], [0, 2])
    with pytest.raises(DatasetError, match=r"no episode -1"):
        dataset.iter_episodes(["action"], [-1])
    with pytest.raises(DatasetError, match="no column"):
        dataset.iter_episodes([])
    assert list(dataset.iter_episodes(["action"], [])) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ("a", "b")),
        ([["a", "b"]], ("a", "b")),
        ({"motors": ["a", "b"]}, ("a", "b")),
        ({"left": ["a"], "right": ["b"]}, ("a", "b")),
        ({"b": 1, "a": 0}, ("a", "b")),
        ({"a": None, "b": None}, ("a", "b")),
        (["a"], None),
        (["a", "b", "c"], None),
        ("a", None),
        (None, None),
        ([], None),
    ],
)
def test_names_come_flat_or_not_at_all(names: object, expected: tuple[str, ...] | None) -> None:
    assert flat_names(names, 2) == expected


def test_tasks_by_number_or_from_the_only_task(tmp_path: Path) -> None:
    root = build_v2(tmp_path / "v21", random_episodes([3, 2]))
    (root / "meta/tasks.jsonl").write_text(
        '{"task_index": 0, "task": "fold"}\n{"task_index": 1, "task": "line\u2028break"}\n', encoding="utf-8"
    )
    (root / "meta/episodes.jsonl").write_text(
        '{"episode_index": 1, "tasks": [1, 0], "length": 2}\n\n{"episode_index": 0, "length": 3}\n'
    )
    records = open_dataset("local/it", root=root).episodes
    assert [record.tasks for record in records] == [(), ("line\u2028break", "fold")]
    for column in ("task", "__index_level_0__"):
        root = build_v3(tmp_path / column, random_episodes([3, 2]), tasks=False)
        pq.write_table(pa.table({"task_index": [0], column: ["fold"]}), root / "meta/tasks.parquet")
        records = open_dataset("local/it", root=root).episodes
        assert [record.tasks for record in records] == [("fold",), ("fold",)]


def test_the_package_imports_without_arrow_and_hub() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'av', 'pyarrow', 'huggingface_hub', 'pandas'): sys.modules[name] = None\n"
        "import pi0_fast.data\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_directory_is_read_without_hub_torch_and_network(tmp_path: Path) -> None:
    build_v3(tmp_path, random_episodes([3, 2]))
    code = (
        "import sys, socket\n"
        "for name in ('torch', 'av', 'huggingface_hub', 'pandas', 'datasets'): sys.modules[name] = None\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from pi0_fast.data import open_dataset\n"
        "print(len(list(open_dataset('no/such', root=sys.argv[1]).iter_episodes(['action']))))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


def test_opening_a_dataset_finishes_the_swap(tmp_path: Path) -> None:
    build_v2(tmp_path / ".d.pi0-fast-new", random_episodes([3]))
    build_v2(tmp_path / ".d.pi0-fast-old", random_episodes([4]))
    assert open_dataset("local/d", root=tmp_path / "d").total_frames == 3
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
