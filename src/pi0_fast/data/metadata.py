"""Reading `meta/` of a LeRobot dataset: info.json, the episodes, their tasks, stats.json.

One `Metadata` for the three formats. v2.0 and v2.1 have `episodes.jsonl` and one parquet file an episode;
v3.0 has `episodes/chunk-*/file-*.parquet`, which says in which file an episode lies. Frames are read
elsewhere (`frames.py`), video nowhere here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pi0_fast.types import DatasetError, EpisodeRecord, Feature

VERSIONS = ("v2.0", "v2.1", "v3.0")
IMAGE_DTYPES = ("image", "video")
DEFAULT_CHUNKS_SIZE = 1000
# Counts, sizes and indices beyond these are damage: nothing that holds them can be stored, nor counted in int64.
_LARGEST_COUNT = 2**53
_LARGEST_FRAME = 2**31
_DEEPEST = 64  # levels of JSON
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_DEFAULT_DATA_PATH = {
    "v2.0": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}


@dataclass(frozen=True)
class Metadata:
    """What `meta/` says of a dataset; `files` maps an episode index to its parquet file below the root."""

    version: str
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    episodes: tuple[EpisodeRecord, ...]
    files: dict[int, str]
    total_frames: int


def read_metadata(root: Path) -> Metadata:
    """Read and check `meta/` (format v2.0, v2.1 or v3.0).

    Raises:
        DatasetError: a file is missing or damaged, the version is unknown, or counts contradict each other.
    """
    path = root / "meta" / "info.json"
    info = read_json(path)
    version = str(info.get("codebase_version"))
    if version not in VERSIONS:
        raise DatasetError(
            f"{path}: codebase_version is {info.get('codebase_version')!r}, but only {', '.join(VERSIONS)} "
            "can be read; convert older datasets with LeRobot's converter"
        )
    features = _features(path, info)
    fps = info.get("fps")
    # The bound comes first: isfinite cannot take an integer of hundreds of digits.
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < _LARGEST_COUNT:
        raise DatasetError(f"{path}: fps is {_shown(fps)}, which is no positive number of frames per second")
    robot_type = info.get("robot_type")
    read_episodes = _episodes_v30 if version == "v3.0" else _episodes_v2
    records, files, source = read_episodes(root, path, info, version)
    _check_counts(path, info, records, source)
    return Metadata(
        version=version,
        fps=float(fps),
        robot_type=None if robot_type is None else str(robot_type),
        features=features,
        episodes=tuple(records),
        files=files,
        total_frames=sum(record.length for record in records),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; DatasetError naming the file when it is missing, empty, or anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise DatasetError(f"{path} is empty; fetch or write the dataset again")
    value = _parse_json(text, str(path))
    if not isinstance(value, dict):
        raise DatasetError(f"{path} holds a {type(value).__name__} where a JSON object is expected")
    return value


def _parse_json(text: str, where: str) -> Any:
    """The value of a JSON text, all of whose strings can be written again; else a DatasetError that begins `where`."""
    depth = 0
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > _DEEPEST:
            depth = _depth(value)
        if _SURROGATE_ESCAPE.search(text):
            # "\ud800" alone is no character: a name with it could be neither printed nor saved.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DatasetError(f"{where} holds half of a surrogate pair, which is no character; correct it") from error
    except RecursionError:
        depth = _DEEPEST + 1
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise DatasetError(f"{where} is not valid JSON ({error}); fetch or write the dataset again") from error
    if depth > _DEEPEST:
        raise DatasetError(f"{where} is nested too deeply for metadata; fetch or write the dataset again")
    return value


def _depth(value: Any) -> int:
    """How many arrays and objects lie in each other, counted no further than just beyond the limit."""
    depth, level = 0, [value]
    while depth <= _DEEPEST and (level := [inner for inner in level if isinstance(inner, (dict, list))]):
        depth += 1
        level = [item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def read_statistics(path: Path, features: Mapping[str, Feature]) -> dict[str, dict[str, np.ndarray]]:
    """Read `stats.json`: key -> statistic name -> float64 [D] (`count` is [1]); {} without the file.

    Raises:
        DatasetError: the file is damaged, or a statistic of a declared column has another length than the
            column.
    """
    if not path.exists():
        return {}
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, statistics in read_json(path).items():
        if not isinstance(statistics, dict):
            raise DatasetError(f"{path}: {key} holds no statistics but {statistics!r}")
        found[key] = {}
        for name, value in statistics.items():
            try:
                array = np.asarray(value, dtype=np.float64).reshape(-1)
            except (TypeError, ValueError, OverflowError) as error:
                raise DatasetError(f"{path}: {key}/{name} is no array of numbers") from error
            feature = features.get(key)
            if feature is not None and feature.dtype not in IMAGE_DTYPES and name != "count":
                width = math.prod(feature.shape)
                if len(array) != width:
                    raise DatasetError(
                        f"{path}: {key}/{name} has {len(array)} values, the column has {width} dimensions"
                    )
            found[key][name] = array
    return found


def read_tasks(root: Path, version: str) -> dict[int, str]:
    """Task index -> text, from the tasks file; {} without the file.

    Raises:
        DatasetError: the file is damaged.
    """
    return (_tasks_v30 if version == "v3.0" else _tasks_v2)(root / "meta")


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises on a missing or damaged file into a DatasetError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing; fetch the dataset again") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if is_lfs_pointer(path):
            raise DatasetError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"{path} cannot be read as parquet, it is truncated or damaged: {reason}") from error


def refuse_repeated(path: Path, present: Sequence[str], keys: Iterable[str]) -> None:
    """A DatasetError for a column that a parquet file has twice: which of the two is meant is unknown."""
    for key in keys:
        if (times := present.count(key)) > 1:
            raise DatasetError(
                f"{path} has {times} columns {key!r}; which one is meant cannot be known: write it again"
            )


def flat_names(names: Any, width: int) -> tuple[str, ...] | None:
    """One name per dimension from whatever `names` holds; None when it does not give exactly `width` names.

    `["a", "b"]`, `[["a", "b"]]`, `{"motors": ["a", "b"]}`, `{"a": 0, "b": 1}` and `{"a": None, "b": None}`
    all give `("a", "b")`.
    """
    flat = _flatten_names(names)
    return tuple(flat) if len(flat) == width else None


def _flatten_names(names: Any) -> list[str]:
    if names is None:
        return []
    if isinstance(names, dict):
        values = list(names.values())
        if all(value is None for value in values):
            return [str(name) for name in names]
        if all(isinstance(value, int) for value in values):
            return [str(name) for name in sorted(names, key=lambda name: int(names[name]))]
        return [name for value in values for name in _flatten_names(value)]
    if isinstance(names, (list, tuple)):
        return [name for value in names for name in _flatten_names(value)]
    return [str(names)]


def _features(path: Path, info: Mapping[str, Any]) -> dict[str, Feature]:
    declared = info.get("features")
    if not isinstance(declared, dict) or not declared:
        raise DatasetError(f"{path} declares no features")
    features = {}
    for key, entry in declared.items():
        shape: Any = entry.get("shape") if isinstance(entry, dict) else None
        sizes: list[Any] = shape if isinstance(shape, list) else [shape]
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes)
        if not whole or not isinstance(entry.get("dtype"), str):
            raise DatasetError(f"{path}: feature {key} has no valid dtype and shape: {_shown(entry)}")
        if math.prod(sizes) > _LARGEST_FRAME:
            raise DatasetError(
                f"{path}: feature {key} is declared with the shape {_shown(sizes)}, too large for a frame"
            )
        names = flat_names(entry.get("names"), math.prod(sizes)) if len(sizes) <= 1 else None
        features[key] = Feature(key, entry["dtype"], tuple(sizes), names)
    return features


def _integer(value: Any, where: str) -> int:
    """A non-negative whole number (JSON may write it as 3.0), or a DatasetError."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 0 <= value <= _LARGEST_COUNT:
        raise DatasetError(f"{where} is {_shown(value)}, which is no count")
    return int(value)


def _shown(value: Any) -> str:
    """A value of a damaged file in an error: its repr, not longer than a line."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_counts(path: Path, info: Mapping[str, Any], records: list[EpisodeRecord], source: Path) -> None:
    indices = [record.index for record in records]
    twice = [first for first, second in pairwise(indices) if first == second]
    if twice:
        raise DatasetError(f"{source} lists episode {twice[0]} twice")
    frames = sum(record.length for record in records)
    for name, found in (("total_episodes", len(records)), ("total_frames", frames)):
        declared = _integer(info.get(name), f"{path}: {name}")
        if declared != found:
            raise DatasetError(
                f"{path} says {name} = {declared}, but {source} lists {found}; the dataset is incomplete or "
                "its metadata is stale: fetch it again, or correct the file that is wrong"
            )


def _episodes_v2(
    root: Path, info_path: Path, info: Mapping[str, Any], version: str
) -> tuple[list[EpisodeRecord], dict[int, str], Path]:
    source = root / "meta" / "episodes.jsonl"
    tasks = _TaskTexts(root, version)
    records = []
    for number, entry in _json_lines(source):
        where = f"{source}, line {number}"
        index = _integer(entry.get("episode_index"), f"{where}: episode_index")
        length = _integer(entry.get("length"), f"{where}: length")
        records.append(EpisodeRecord(index, length, tasks.resolve(entry.get("tasks"), f"{where}: tasks")))
    records.sort(key=lambda record: record.index)
    chunks_size = _integer(info.get("chunks_size", DEFAULT_CHUNKS_SIZE), f"{info_path}: chunks_size")
    if chunks_size == 0:
        raise DatasetError(f"{info_path}: chunks_size is 0")
    path_of = _data_path(info_path, info, version)
    files = {r.index: path_of(episode_chunk=r.index // chunks_size, episode_index=r.index) for r in records}
    return records, files, source


def _episodes_v30(
    root: Path, info_path: Path, info: Mapping[str, Any], version: str
) -> tuple[list[EpisodeRecord], dict[int, str], Path]:
    source = root / "meta" / "episodes"
    paths = sorted(source.glob("*/*.parquet"))
    if not paths:
        raise DatasetError(f"{source} holds no parquet file; fetch the dataset again")
    tasks = _TaskTexts(root, version)
    path_of = _data_path(info_path, info, version)
    needed = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    found = []
    for path in paths:
        with parquet_errors(path), pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            present = set(names)
            refuse_repeated(path, names, [*needed, "tasks"])
            if missing := [name for name in needed if name not in present]:
                raise DatasetError(f"{path} has no column {missing[0]!r}; it is no table of LeRobot v3.0 episodes")
            columns = [*needed, *(["tasks"] if "tasks" in present else [])]
            rows = file.read(columns=columns).to_pylist()
        for row in rows:
            index, length, chunk, number = (_integer(row[name], f"{path}: {name}") for name in needed)
            record = EpisodeRecord(index, length, tasks.resolve(row.get("tasks"), f"{path}: tasks of episode {index}"))
            found.append((record, path_of(chunk_index=chunk, file_index=number)))
    found.sort(key=lambda pair: pair[0].index)
    return [record for record, _ in found], {record.index: path for record, path in found}, source


def _data_path(path: Path, info: Mapping[str, Any], version: str) -> Callable[..., str]:
    """The `data_path` template of info.json as a function of its names; no path leads out of the root."""
    template = info.get("data_path", _DEFAULT_DATA_PATH[version])

    def fill(**numbers: int) -> str:
        try:
            filled = str(template).format(**numbers)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise DatasetError(f"{path}: data_path {template!r} is no template of {', '.join(numbers)}") from error
        if PurePosixPath(filled).is_absolute() or ".." in PurePosixPath(filled).parts:
            raise DatasetError(f"{path}: data_path {template!r} leads out of the dataset")
        return filled

    return fill


class _TaskTexts:
    """Task texts of an episode; reads the tasks file only for an episode that does not spell them out."""

    def __init__(self, root: Path, version: str) -> None:
        self._root = root
        self._version = version
        self._texts: dict[int, str] | None = None

    def resolve(self, tasks: Any, where: str) -> tuple[str, ...]:
        """From a text, texts, task indices, or nothing (then the dataset's task, if it has only one)."""
        if tasks is None:
            only = self._load()
            return tuple(only.values()) if len(only) == 1 else ()
        listed = tasks if isinstance(tasks, list) else [tasks]
        if not all(isinstance(task, (str, int)) and not isinstance(task, bool) for task in listed):
            raise DatasetError(f"{where} is {_shown(tasks)}; expected are texts, or indices of the tasks file")
        return tuple(task if isinstance(task, str) else self._by_number(task) for task in listed)

    def _by_number(self, number: int) -> str:
        texts = self._load()
        if number not in texts:
            raise DatasetError(
                f"{self._root / 'meta'}: an episode has task {number}, which the tasks file does not list"
            )
        return texts[number]

    def _load(self) -> dict[int, str]:
        if self._texts is None:
            self._texts = read_tasks(self._root, self._version)
        return self._texts


def _tasks_v2(meta: Path) -> dict[int, str]:
    path = meta / "tasks.jsonl"
    if not path.exists():
        return {}
    return {
        _integer(entry.get("task_index"), f"{path}, line {number}: task_index"): str(entry.get("task"))
        for number, entry in _json_lines(path)
    }


def _tasks_v30(meta: Path) -> dict[int, str]:
    """The task text is the table's index in pandas: a column named `task` or `__index_level_0__`."""
    path = meta / "tasks.parquet"
    if not path.exists():
        return {}
    with parquet_errors(path):
        table = pq.read_table(path)
    refuse_repeated(path, table.column_names, table.column_names)
    text_columns = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or not text_columns:
        raise DatasetError(
            f"{path} has the columns {table.column_names}, where task_index and the task text are expected"
        )
    texts = table.column("task" if "task" in text_columns else text_columns[0]).to_pylist()
    indices = [_integer(index, f"{path}: task_index") for index in table.column("task_index").to_pylist()]
    return dict(zip(indices, map(str, texts), strict=True))


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of each line that is not blank."""
    try:
        # Not splitlines(): a task text may hold U+2028 and other marks that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse_json(line, f"{path}, line {number}")
        if not isinstance(entry, dict):
            raise DatasetError(f"{path}, line {number} is no JSON object")
        yield number, entry


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what git leaves of a large file that was not fetched."""
    mark = b"version https://git-lfs"
    try:
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False
