"""Small LeRobot datasets written by hand with pyarrow and json, independent of the package's own writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

V2_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V3_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


def random_episodes(lengths: Sequence[int], width: int = 3, seed: int = 0) -> list[np.ndarray]:
    """One float32 [T, width] array an episode."""
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(length, width)).astype(np.float32) for length in lengths]


def list_array(values: np.ndarray, kind: str = "fixed") -> pa.Array:
    """[T, D] as one of the arrow layouts seen in the wild."""
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    if kind == "list":
        return pa.array([list(row) for row in values], pa.list_(pa.from_numpy_dtype(values.dtype)))
    if kind == "large_list":
        return pa.array([list(row) for row in values], pa.large_list(pa.from_numpy_dtype(values.dtype)))
    if kind == "double":
        return pa.array([list(row) for row in values.astype(np.float64)], pa.list_(pa.float64()))
    if kind == "scalar":
        assert values.shape[1] == 1
        return pa.array(values[:, 0])
    raise AssertionError(kind)


def frame_table(index: int, action: pa.Array, first: int = 0, key: str = "action") -> pa.Table:
    """The rows of one episode with LeRobot's index columns; `first` counts the frames before it."""
    length = len(action)
    frames = np.arange(length)
    columns = {
        key: action,
        "timestamp": pa.array((frames / 10).astype(np.float32)),
        "frame_index": pa.array(frames, pa.int64()),
        "episode_index": pa.array(np.full(length, index), pa.int64()),
        "index": pa.array(first + frames, pa.int64()),
        "task_index": pa.array(np.zeros(length), pa.int64()),
    }
    return pa.table(columns)


def write_info(root: Path, version: str, episodes: int, frames: int, width: int, **changes: Any) -> None:
    """meta/info.json; `changes` replace or (with None) drop entries."""
    scalar = {"dtype": "int64", "shape": [1], "names": None}
    info: dict[str, Any] = {
        "codebase_version": version,
        "robot_type": "testbot",
        "total_episodes": episodes,
        "total_frames": frames,
        "fps": 10,
        "chunks_size": 1000,
        "data_path": V3_PATH if version == "v3.0" else V2_PATH,
        "features": {
            "action": {"dtype": "float32", "shape": [width], "names": None},
            "observation.images.top": {
                "dtype": "video",
                "shape": [4, 4, 3],
                "names": ["height", "width", "c"],
            },
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), scalar),
        },
    }
    info.update(changes)
    (root / "meta").mkdir(parents=True, exist_ok=True)
    (root / "meta" / "info.json").write_text(json.dumps({k: v for k, v in info.items() if v is not None}))


def build_v2(
    root: Path, episodes: Sequence[np.ndarray], *, version: str = "v2.1", kind: str = "fixed", **changes: Any
) -> Path:
    """A v2.0 or v2.1 dataset with one column `action`."""
    write_info(root, version, len(episodes), sum(map(len, episodes)), episodes[0].shape[1], **changes)
    lines, first = [], 0
    chunks_size = changes.get("chunks_size", 1000)
    for index, values in enumerate(episodes):
        lines.append(json.dumps({"episode_index": index, "tasks": [f"task {index % 2}"], "length": len(values)}))
        path = root / V2_PATH.format(episode_chunk=index // chunks_size, episode_index=index)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(frame_table(index, list_array(values, kind), first), path)
        first += len(values)
    (root / "meta" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    return root


def build_v3(
    root: Path,
    episodes: Sequence[np.ndarray],
    *,
    files: Sequence[Sequence[int]] | None = None,
    kind: str = "fixed",
    row_group_size: int = 1000,
    files_per_chunk: int = 1000,
    tasks: bool = True,
    **changes: Any,
) -> Path:
    """A v3.0 dataset with one column `action`; `files` lists the episodes of each data file, in row order."""
    write_info(root, "v3.0", len(episodes), sum(map(len, episodes)), episodes[0].shape[1], **changes)
    starts = np.concatenate([[0], np.cumsum([len(values) for values in episodes])]).tolist()
    files = [list(range(len(episodes)))] if files is None else files
    rows = []
    for place, members in enumerate(files):
        chunk, number = divmod(place, files_per_chunk)
        path = root / V3_PATH.format(chunk_index=chunk, file_index=number)
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = [frame_table(index, list_array(episodes[index], kind), starts[index]) for index in members]
        pq.write_table(pa.concat_tables(tables).combine_chunks(), path, row_group_size=row_group_size)
        for index in members:
            row = {
                "episode_index": index,
                "length": len(episodes[index]),
                "data/chunk_index": chunk,
                "data/file_index": number,
                "dataset_from_index": starts[index],
                "dataset_to_index": starts[index + 1],
                "stats/action/min": [0.0],
            }
            rows.append({**row, **({"tasks": [f"task {index % 2}"]} if tasks else {})})
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return root
