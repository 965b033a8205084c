"""Damaged, incomplete and contradicting datasets: one error that names the file and what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_builder import build_v2, build_v3, frame_table, list_array, random_episodes

from pi0_fast.data import open_dataset
from pi0_fast.types import DatasetError

V2_FILE = "data/chunk-000/episode_000001.parquet"
V3_FILE = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def read_all(root: Path) -> None:
    list(open_dataset("local/it", root=root).iter_episodes(["action"]))


def fails(root: Path, *parts: str) -> None:
    """Reading everything raises one DatasetError of one line that holds all the parts."""
    with pytest.raises(DatasetError) as caught:
        read_all(root)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    return build_v2(tmp_path / "v2", random_episodes([5, 4, 6]))


@pytest.fixture
def v3(tmp_path: Path) -> Path:
    return build_v3(tmp_path / "v3", random_episodes([5, 4, 6]))


def change_info(root: Path, **changes: Any) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def replace(table: pa.Table, name: str, values: list[Any] | pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, [values])


def test_the_undamaged_ones_are_read(v2: Path, v3: Path) -> None:
    read_all(v2)
    read_all(v3)


def test_no_directory_and_no_dataset(tmp_path: Path) -> None:
    fails(tmp_path / "absent", str(tmp_path / "absent"), "is not a directory", "--root")
    fails(tmp_path, "holds no meta/info.json", "--root")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("{", "is not valid JSON"),
        ("[]", "holds a list where a JSON object"),
        ("{}", "codebase_version is None"),
    ],
)
def test_info_that_is_no_info(v2: Path, text: str, reason: str) -> None:
    (v2 / "meta/info.json").write_text(text)
    fails(v2, str(v2 / "meta/info.json"), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version is 'v1.6', but only v2.0, v2.1, v3.0 can be read"),
        ({"codebase_version": "v3.1"}, "codebase_version is 'v3.1'"),
        ({"fps": 0}, "fps is 0"),
        ({"fps": None}, "fps is None"),
        ({"fps": 10**400}, "fps is 1000"),
        ({"fps": -(10**400)}, "fps is -1000"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": float("inf")}, "fps is inf"),
        ({"total_frames": 10**400}, "total_frames is 1000"),
        ({"chunks_size": 10**400}, "chunks_size is 1000"),
        ({"features": {}}, "declares no features"),
        ({"features": {"action": {"shape": [3]}}}, "feature action has no valid dtype and shape"),
        ({"features": {"action": {"dtype": "float32", "shape": "3"}}}, "feature action has no valid"),
        ({"total_episodes": 4}, "total_episodes = 4, but"),
        ({"total_frames": 16}, "total_frames = 16, but"),
        ({"total_frames": "many"}, "total_frames is 'many'"),
        ({"total_frames": None}, "total_frames is None"),
        ({"chunks_size": 0}, "chunks_size is 0"),
        ({"data_path": "data/{nonsense}.parquet"}, "is no template of episode_chunk, episode_index"),
        ({"data_path": "../{episode_index}.parquet"}, "leads out of the dataset"),
        ({"data_path": "/tmp/{episode_index}.parquet"}, "leads out of the dataset"),
    ],
)
def test_info_that_says_something_impossible(v2: Path, change: dict[str, Any], reason: str) -> None:
    change_info(v2, **change)
    fails(v2, str(v2 / "meta/info.json"), reason)


@pytest.mark.parametrize("name", ["meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1" * 5000, "digits"),
        ("[" * 100 + "]" * 100, "nested too deeply"),
        ('{"a":' * 400 + "1" + "}" * 400, "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"\\uDFFFx": 1}', "half of a surrogate pair"),
        ("[1,", "is not valid JSON"),
    ],
)
def test_json_that_python_cannot_hold(v2: Path, name: str, value: str, reason: str) -> None:
    if name == "meta/tasks.jsonl":
        (v2 / "meta/episodes.jsonl").write_text('{"episode_index": 0, "length": 5, "tasks": [0]}')
    (v2 / name).write_text('{"extra": ' + value + "}")
    fails(v2, str(v2 / name), reason)


def test_json_with_pairs_of_surrogates_and_many_arrays_is_read(v2: Path) -> None:
    change_info(v2, robot_type="\U0001f916", extra=[[1]] * 1000)
    assert "\\ud83e" in (v2 / "meta/info.json").read_text()
    assert open_dataset("local/it", root=v2).robot_type == "\U0001f916"


def test_a_surrogate_in_statistics(v3: Path) -> None:
    (v3 / "meta/stats.json").write_text('{"\\udc00": {}}')
    with pytest.raises(DatasetError, match="surrogate"):
        open_dataset("local/it", root=v3).statistics("action")


@pytest.mark.parametrize("tasks", [3.5, True, {"a": 1}, [None], [[0]], [1.0]])
def test_tasks_of_an_episode_that_are_none(v2: Path, tasks: Any) -> None:
    (v2 / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": 5, "tasks": tasks}))
    fails(v2, "episodes.jsonl, line 1: tasks is", "expected are texts")


@pytest.mark.parametrize("tasks", [[3.5] * 3, [True] * 3, [[None]] * 3, [[0.5]] * 3, [b"x"] * 3])
def test_tasks_of_an_episode_that_are_none_in_a_table(v3: Path, tasks: list[Any]) -> None:
    change_table(v3 / EPISODES, lambda table: replace(table, "tasks", pa.array(tasks)))
    fails(v3, str(v3 / EPISODES), "tasks of episode 0 is", "expected are texts")


def test_a_table_of_tasks_with_impossible_numbers(v3: Path) -> None:
    change_table(v3 / EPISODES, lambda table: replace(table, "tasks", pa.array([[0]] * 3)))
    for numbers in ([None], [[0]], [0.5]):
        pq.write_table(pa.table({"task_index": pa.array(numbers), "task": ["x"]}), v3 / "meta/tasks.parquet")
        fails(v3, "tasks.parquet: task_index is", "which is no count")


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        ("string", [3], "is declared as 'string', not numbers"),
        ("object", [3], "is declared as 'object', not numbers"),
        ("float32", [0], "holds nothing"),
        ("int64", [0], "holds nothing"),
        ("float32", [10**12], "too large for a frame"),
        ("float32", [10**30], "too large for a frame"),
        ("float32", [10**9], "holds 3 values a frame where 1000000000 are declared"),
        ("float32", [True], "no valid dtype and shape"),
    ],
)
def test_declarations_that_no_action_has(v2: Path, dtype: str, shape: list[int], reason: str) -> None:
    change_info(v2, features={"action": {"dtype": dtype, "shape": shape}})
    fails(v2, "action", reason)


def test_a_column_that_is_there_twice(v2: Path, v3: Path) -> None:
    for root, path in ((v2, v2 / V2_FILE), (v3, v3 / V3_FILE)):
        change_table(path, lambda table: table.append_column("action", table["action"]))
        fails(root, str(path), "2 columns 'action'")
        with pytest.raises(DatasetError, match="2 columns 'action'"):
            open_dataset("local/it", root=root).content_digest(["action"])


def test_an_index_and_an_episode_number_that_are_there_twice(v2: Path, v3: Path) -> None:
    change_table(v2 / V2_FILE, lambda table: table.append_column("frame_index", table["frame_index"]))
    fails(v2, str(v2 / V2_FILE), "2 columns 'frame_index'")
    change_table(v3 / EPISODES, lambda table: table.append_column("length", table["length"]))
    fails(v3, str(v3 / EPISODES), "2 columns 'length'")


def test_unsigned_integers_beyond_int64(v2: Path) -> None:
    large = pa.array([[1, 2, 3]] * 3 + [[1, 2**64 - 1, 3]], pa.list_(pa.uint64()))
    change_table(v2 / V2_FILE, lambda table: replace(table, "action", large))
    fails(v2, str(v2 / V2_FILE), "frame 3 of episode 1 holds the integer 18446744073709551615")
    change_table(v2 / V2_FILE, lambda table: replace(table, "frame_index", pa.array([2**64 - 1] * 4, pa.uint64())))
    fails(v2, str(v2 / V2_FILE), "frame_index holds the integer 18446744073709551615")


@pytest.mark.parametrize("name", [V3_FILE, EPISODES])
def test_flipped_bytes_of_a_footer(v3: Path, name: str) -> None:
    """Whatever a byte of the schema becomes: the dataset is read, or it is a DatasetError."""
    data = (v3 / name).read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    for place in range(len(data) - 8 - size, len(data) - 8, max(1, size // 250)):
        for mask in (0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= mask
            (v3 / name).write_bytes(bytes(damaged))
            with suppress(DatasetError):
                read_all(v3)
            with suppress(DatasetError):
                open_dataset("local/it", root=v3).content_digest(["action"])


def test_frame_counts_that_contradict_each_other_are_both_named(v2: Path, v3: Path) -> None:
    for root, source in ((v2, "episodes.jsonl"), (v3, "meta/episodes")):
        change_info(root, total_frames=100)
        fails(root, "total_frames = 100", source, "lists 15")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('{"episode_index": 0, "length": 5}\n{"episode_index": 1', "line 2 is not valid JSON"),
        ('{"episode_index": 0, "length": 5}\n3', "line 2 is no JSON object"),
        ('{"episode_index": 0, "length": 5}\n{"length": 4}', "line 2: episode_index is None"),
        ('{"episode_index": 0, "length": -5}', "line 1: length is -5"),
        ('{"episode_index": 0, "length": 5}\n{"episode_index": 0, "length": 4}', "lists episode 0 twice"),
        ('{"episode_index": 0, "length": 5}', "total_episodes = 3"),
        ('{"episode_index": 0, "length": 5, "tasks": [7]}', "has task 7"),
    ],
)
def test_episode_lists_that_are_damaged(v2: Path, lines: str, reason: str) -> None:
    (v2 / "meta/episodes.jsonl").write_text(lines)
    fails(v2, "meta", reason)


def test_missing_metadata_files(v2: Path, v3: Path) -> None:
    (v2 / "meta/episodes.jsonl").unlink()
    fails(v2, str(v2 / "meta/episodes.jsonl"), "cannot be read")
    shutil.rmtree(v3 / "meta/episodes")
    fails(v3, str(v3 / "meta/episodes"), "holds no parquet file")


def test_a_missing_shard_is_noticed_before_anything_is_read(v2: Path, v3: Path) -> None:
    (v2 / V2_FILE).unlink()
    with pytest.raises(DatasetError, match=r"episode_000001\.parquet is missing \(1 of 3 data files"):
        open_dataset("local/it", root=v2).iter_episodes(["action"])
    (v3 / V3_FILE).unlink()
    fails(v3, str(v3 / V3_FILE), "is missing (1 of 1")


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99])
def test_truncated_parquet_of_both_formats(v2: Path, v3: Path, keep: float) -> None:
    for path in (v2 / V2_FILE, v3 / V3_FILE):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    fails(v2, str(v2 / V2_FILE), "truncated or damaged")
    fails(v3, str(v3 / V3_FILE), "truncated or damaged")


def test_damaged_pages_are_noticed_while_reading(v3: Path) -> None:
    path = v3 / V3_FILE
    change_table(path, lambda table: table)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)
    fails(v3, str(path), "truncated or damaged")


def test_a_truncated_table_of_episodes(v3: Path) -> None:
    path = v3 / EPISODES
    path.write_bytes(path.read_bytes()[:-10])
    fails(v3, str(path), "truncated or damaged")


def test_a_table_of_episodes_without_a_column(v3: Path) -> None:
    change_table(v3 / EPISODES, lambda table: table.drop_columns(["data/file_index"]))
    fails(v3, str(v3 / EPISODES), "no column 'data/file_index'")


def test_a_git_lfs_pointer_is_recognised(v2: Path) -> None:
    (v2 / V2_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    fails(v2, str(v2 / V2_FILE), "Git LFS pointer", "git lfs pull")


def test_a_declared_column_that_the_file_lacks(v2: Path) -> None:
    change_table(v2 / V2_FILE, lambda table: table.drop_columns(["action"]))
    fails(v2, str(v2 / V2_FILE), "no column 'action'", "frame_index")


def test_no_frame_index(v2: Path) -> None:
    change_table(v2 / V2_FILE, lambda table: table.drop_columns(["frame_index"]))
    fails(v2, str(v2 / V2_FILE), "no column 'frame_index'")


def test_fewer_frames_than_the_metadata_says(v2: Path, v3: Path) -> None:
    change_table(v2 / V2_FILE, lambda table: table.slice(0, 3))
    fails(v2, str(v2 / V2_FILE), "holds 3 frames of episode 1, the metadata says 4")
    change_table(v3 / V3_FILE, lambda table: table.slice(0, 12))
    fails(v3, str(v3 / V3_FILE), "holds 3 frames of episode 2, the metadata says 6")
    change_table(v3 / V3_FILE, lambda table: table.slice(0, 9))
    fails(v3, str(v3 / V3_FILE), "holds 0 frames of episode 2, the metadata says 6")


def test_a_file_of_no_frames(v2: Path, v3: Path) -> None:
    for root, name, frames in ((v2, V2_FILE, "episode 1, the metadata says 4"), (v3, V3_FILE, "episode 0, the")):
        change_table(root / name, lambda table: table.slice(0, 0))
        fails(root, str(root / name), f"holds 0 frames of {frames}")


def test_more_frames_than_the_metadata_says(v3: Path) -> None:
    extra = frame_table(7, list_array(np.zeros((2, 3), np.float32)))
    change_table(v3 / V3_FILE, lambda table: pa.concat_tables([table, extra.cast(table.schema)]))
    fails(v3, str(v3 / V3_FILE), "2 frames of episode 7", "17 frames in the file, 15 in the metadata")


def test_a_file_of_another_episode(v2: Path) -> None:
    shutil.copy(v2 / "data/chunk-000/episode_000000.parquet", v2 / V2_FILE)
    fails(v2, str(v2 / V2_FILE), "holds 0 frames of episode 1, the metadata says 4")


def test_frames_out_of_order(v2: Path, v3: Path) -> None:
    change_table(v2 / V2_FILE, lambda table: table.take([0, 2, 1, 3]))
    fails(v2, str(v2 / V2_FILE), "out of order in episode 1", "row 1 has frame_index 2 where 1 is expected")
    change_table(v3 / V3_FILE, lambda table: table.take([*range(1, 15), 0]))
    fails(v3, str(v3 / V3_FILE), "out of order in episode 0", "row 0 has frame_index 1 where 0 is expected")


def test_an_episode_in_two_places(v3: Path) -> None:
    rows = [*range(5), *range(5, 9), *range(5), *range(9, 15)]
    change_table(v3 / V3_FILE, lambda table: table.take(rows))
    fails(v3, str(v3 / V3_FILE), "episode 0 lies at rows 0 and 9")


def test_a_null_index_and_a_negative_one(v2: Path) -> None:
    path = v2 / V2_FILE
    original = path.read_bytes()
    change_table(path, lambda table: replace(table, "frame_index", pa.array([0, 1, None, 3])))
    fails(v2, str(path), "frame_index holds a null")
    path.write_bytes(original)
    change_table(path, lambda table: replace(table, "episode_index", pa.array([-1] * 4)))
    fails(v2, str(path), "holds 0 frames of episode 1")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([[1.0, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3]], "frame 1 of episode 1 holds 2 values where 3"),
        ([[1.0, 2, 3], [1, 2, 3], None, [1, 2, 3]], "frame 2 of episode 1 holds a null"),
        ([[1.0, 2, 3], [1, 2, 3], [1, 2, 3], [None, 2, 3]], "frame 3 of episode 1 holds a null"),
        ([["a", "b", "c"]] * 4, "episode 1 holds string, not numbers"),
        ([1.0, 2.0, 3.0, 4.0], "holds 1 values a frame where 3 are declared"),
    ],
)
def test_columns_that_are_no_rows_of_numbers(v2: Path, values: list[Any], reason: str) -> None:
    change_table(v2 / V2_FILE, lambda table: replace(table, "action", pa.array(values)))
    fails(v2, str(v2 / V2_FILE), "column action", reason)


def test_the_frame_is_counted_from_the_start_of_the_episode(v3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a batch begins in the middle of the episode."""
    monkeypatch.setattr("pi0_fast.data.frames._READ_ROWS", 4)
    rows: list[Any] = [[1.0, 2, 3]] * 15
    rows[13] = [1.0]
    change_table(v3 / V3_FILE, lambda table: replace(table, "action", pa.array(rows)))
    fails(v3, "frame 4 of episode 2 holds 1 values where 3")


def test_a_float_column_declared_as_integer(v2: Path) -> None:
    change_info(v2, features={"action": {"dtype": "int64", "shape": [1]}})
    change_table(v2 / V2_FILE, lambda table: replace(table, "action", pa.array([1.0, 2.0, 3.0, 4.5])))
    with pytest.raises(DatasetError, match="double, not integers as declared"):
        list(open_dataset("local/it", root=v2).iter_episodes(["action"], [1]))


@pytest.mark.parametrize(
    ("statistics", "reason"),
    [
        ("", "is empty"),
        ('{"action": 3}', "action holds no statistics"),
        ('{"action": {"q01": [1, 2]}}', "action/q01 has 2 values, the column has 3 dimensions"),
        ('{"action": {"q01": ["a", "b", "c"]}}', "action/q01 is no array of numbers"),
        ('{"action": {"q01": [[1], [2, 3]]}}', "action/q01 is no array of numbers"),
    ],
)
def test_damaged_statistics(v3: Path, statistics: str, reason: str) -> None:
    (v3 / "meta/stats.json").write_text(statistics)
    dataset = open_dataset("local/it", root=v3)
    with pytest.raises(DatasetError, match=reason) as caught:
        dataset.statistics("action")
    assert str(v3 / "meta/stats.json") in str(caught.value)


@pytest.mark.golden
def test_a_damaged_copy_of_a_real_recording(shared: Path, tmp_path: Path) -> None:
    root = tmp_path / "so101"
    shutil.copytree(shared / "data/so101_record_test_v30", root, copy_function=shutil.copyfile)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755)
    path = root / V3_FILE
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    fails(root, str(path), "truncated or damaged")
    path.write_bytes(data)
    change_table(path, lambda table: table.slice(0, 1400))
    fails(root, str(path), "of episode 3, the metadata says")
