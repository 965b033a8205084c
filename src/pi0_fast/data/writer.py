"""Writing a LeRobot v3.0 dataset: frames, episodes, tasks and exact statistics, which LeRobot 0.6.1 opens.

Columns of numbers here, cameras in `camera_writing.py`. Appending to a dataset that is finished is left out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pi0_fast.data.camera_writing import VIDEO_PATH, CameraWriter, camera_feature
from pi0_fast.data.columns import float_rows, integer_values
from pi0_fast.data.image_statistics import ImageStatistics
from pi0_fast.data.images import image_type
from pi0_fast.data.locate import INFO_FILE
from pi0_fast.data.metadata import IMAGE_DTYPES, flat_names
from pi0_fast.data.video_encoding import CODECS
from pi0_fast.swap import install_directory, temporary_sibling
from pi0_fast.types import DatasetError, Feature

FILES_PER_CHUNK = 1000
_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_IMAGES_PER_GROUP = 32  # rows of a row group with images: reading one image reads its group
_EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_DTYPES = {"float32": np.float32, "float64": np.float64, "int64": np.int64}
_FRAME_COLUMNS = {
    "timestamp": Feature("timestamp", "float32", (1,)),
    "frame_index": Feature("frame_index", "int64", (1,)),
    "episode_index": Feature("episode_index", "int64", (1,)),
    "index": Feature("index", "int64", (1,)),
    "task_index": Feature("task_index", "int64", (1,)),
}


class LeRobotWriter:
    """Writes a LeRobot v3.0 dataset, one episode at a time; a context manager.

    Everything goes to a temporary directory beside `root`, which is put in its place by `close`. Leaving the
    `with` block by an exception, or `abort`, leaves nothing behind and an existing dataset as it was.

        with LeRobotWriter("out", fps=30, features={"action": {"dtype": "float32", "shape": [7]}}) as writer:
            writer.add_episode({"action": actions}, task="pick up the cube")

    Memory: one episode at a time while recording, plus its statistics (some 80 bytes a dimension); of a video one
    picture, when they come from an iterator. `close`
    computes the exact statistics from the files, column after column: frames x dimensions x 4 bytes (8 for
    int64 and float64) of the widest column, and about 24 bytes a frame for the dimension at hand.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        fps: float,
        features: Mapping[str, Feature | Mapping[str, Any]],
        robot_type: str | None = None,
        overwrite: bool = False,
        data_file_size_mb: int = 100,
        video_codec: str = "av1",
    ) -> None:
        """Check the declarations and make the temporary directory.

        Args:
            root: directory of the dataset; its parents are made when absent.
            fps: frames per second; timestamps are frame_index / fps.
            features: column name -> Feature, or a mapping with `dtype` (float32, float64, int64), `shape`
                ([D]) and optionally `names`; for a camera dtype `video` or `image` and the shape
                [height, width, 3]. timestamp, frame_index, episode_index, index and task_index are added.
            robot_type: written to info.json.
            overwrite: replace an existing directory, at `close`; otherwise one that is there is an error.
            data_file_size_mb: a data file is not made larger than this, unless one episode is.
            video_codec: ``"av1"`` or ``"h264"``.

        Raises:
            DatasetError: `root` is there already, or a declaration cannot be written.
        """
        self.root = Path(root).expanduser()
        if not math.isfinite(fps) or fps <= 0:
            raise DatasetError(f"fps is {fps!r}, which is no positive number")
        if data_file_size_mb <= 0:
            raise DatasetError(f"data_file_size_mb is {data_file_size_mb!r}, which is no positive number")
        if video_codec not in CODECS:
            raise DatasetError(f"video_codec is {video_codec!r}; known: {', '.join(CODECS)}")
        self.fps = fps
        self.robot_type = robot_type
        self.features = {key: _feature(key, declared) for key, declared in features.items()}
        self._numbers = {key: f for key, f in self.features.items() if f.dtype not in IMAGE_DTYPES}
        if not self._numbers:
            raise DatasetError("a dataset needs at least one feature of numbers")
        self._refuse_existing(overwrite)
        self._overwrite = overwrite
        self._size_mb = data_file_size_mb
        self._all = {**self.features, **_FRAME_COLUMNS}
        columns = {key: feature for key, feature in self._all.items() if feature.dtype != "video"}
        self._schema = pa.schema([(key, _arrow_type(feature)) for key, feature in columns.items()])
        self._tasks: dict[str, int] = {}
        self._more_metadata: dict[str, Any] = {}
        self._episodes: list[dict[str, Any]] = []
        self._total_frames = 0
        self._file_number = -1  # counts files over all chunks
        self._file_frames = 0
        self._sink: IO[bytes] | None = None
        self._parquet: Any = None
        self._open = True
        try:
            self._directory = temporary_sibling(self.root)
        except OSError as error:
            raise DatasetError(f"no directory can be made beside {self.root}: {error}") from error
        self._cameras = {
            key: CameraWriter(feature, self._directory, fps, video_codec)
            for key, feature in self.features.items()
            if feature.dtype in IMAGE_DTYPES
        }

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.close()

    def add_episode(self, columns: Mapping[str, Any], *, task: str) -> int:
        """Append one episode and return its index (0, 1, 2, ...).

        Args:
            columns: an array [T, D] for each declared feature ([T] will do when D = 1), all of one T >= 1. For a
                camera T images uint8 [height, width, 3], in an array or from any iterable; for one of dtype `video`
                also the path of a video file, which is copied as it is.
            task: what the robot was told to do.

        Raises:
            DatasetError: a column is missing, unknown, of another shape or type than declared, or not finite
                (other episodes can still be added); or the disk is full (everything is dropped).
        """
        self._refuse_closed()
        if not isinstance(task, str) or not task.strip():
            raise DatasetError(f"episode {len(self._episodes)} has no task text: {task!r}")
        values = self._checked(columns)
        index, length = len(self._episodes), len(next(iter(values.values())))
        written = self._write_pictures(columns, index, length)
        frames = np.arange(length, dtype=np.int64)
        task_index = self._tasks.setdefault(task, len(self._tasks))
        values["timestamp"] = (frames / self.fps).astype(np.float32)[:, None]
        values["frame_index"] = frames[:, None]
        values["episode_index"] = np.full((length, 1), index, dtype=np.int64)
        values["index"] = self._total_frames + frames[:, None]
        values["task_index"] = np.full((length, 1), task_index, dtype=np.int64)
        pictures = {key: array for key, (_, _, array) in written.items()}
        arrays = [
            pictures[key] if key in pictures else _arrow_array(values[key], self._schema.field(key).type)
            for key in self._schema.names
        ]
        try:
            self._write(pa.table(arrays, schema=self._schema))
        except OSError as error:
            self.abort()
            raise DatasetError(f"episode {index} of {self.root} cannot be written: {error}") from error
        except BaseException:  # an interrupt in the middle of a write leaves a file that cannot be continued
            self.abort()
            raise
        row = self._episode_row(index, task, values)
        for key, (place, counted, _) in written.items():
            self._cameras[key].statistics.merge(counted)
            row.update(place)
            row.update({f"stats/{key}/{name}": value for name, value in counted.to_lerobot().items()})
        self._episodes.append(row)
        self._total_frames += length
        return index

    def add_metadata(self, name: str, value: Any) -> None:
        """Write `meta/{name}` with the dataset: a json file of the caller's own, which readers of LeRobot leave alone.

        Raises:
            DatasetError: not a plain name that ends in .json, or one that the dataset needs itself.
        """
        self._refuse_closed()
        if name != Path(name).name or not name.endswith(".json") or name in (Path(INFO_FILE).name, "stats.json"):
            raise DatasetError(f"metadata cannot be called {name!r}: a name that ends in .json, not info or stats")
        self._more_metadata[name] = value

    def _write_pictures(
        self, columns: Mapping[str, Any], index: int, length: int
    ) -> dict[str, tuple[dict[str, Any], ImageStatistics, Any]]:
        """What `CameraWriter.write` returns, for each camera; nothing stays of an episode that fails."""
        written = {}
        try:
            for key, camera in self._cameras.items():
                written[key] = camera.write(columns[key], index, length, f"episode {index}, camera {key!r}")
        except OSError as error:
            self.abort()
            raise DatasetError(f"episode {index} of {self.root} cannot be written: {error}") from error
        except BaseException:
            for camera in self._cameras.values():
                camera.discard(index)
            raise
        return written

    def _episode_row(self, index: int, task: str, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The row of `meta/episodes` for the episode that was written last."""
        length = len(values["index"])
        chunk, number = divmod(self._file_number, FILES_PER_CHUNK)
        row: dict[str, Any] = {
            "episode_index": index,
            "tasks": [task],
            "length": length,
            "data/chunk_index": chunk,
            "data/file_index": number,
            "dataset_from_index": self._total_frames,
            "dataset_to_index": self._total_frames + length,
        }
        for key, column in values.items():
            row.update({f"stats/{key}/{name}": value for name, value in exact_statistics(column).items()})
        row.update({"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        return row

    def close(self) -> None:
        """Write the metadata and put the dataset in its place. A second call does nothing.

        Raises:
            DatasetError: no episode was added, `root` has appeared meanwhile, or the disk is full; nothing is
                left behind.
        """
        if not self._open:
            return
        try:
            if not self._episodes:
                raise DatasetError(f"no episode was added, so {self.root} is not written")
            self._close_file()
            self._write_metadata()
            self._refuse_existing(self._overwrite)
            install_directory(self._directory, self.root)
        except OSError as error:
            raise DatasetError(f"{self.root} cannot be written: {error}") from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop everything that was added; what was at `root` before stays. Does nothing after `close`."""
        self._open = False
        with suppress(OSError, pa.ArrowException):  # the end of a file that is deleted next cannot be written
            self._close_file()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _refuse_existing(self, overwrite: bool) -> None:
        if not self.root.exists():
            return
        if not overwrite:
            raise DatasetError(
                f"{self.root} is there already; choose another directory, or pass overwrite (--overwrite)"
            )
        if not self.root.is_dir() or (any(self.root.iterdir()) and not (self.root / INFO_FILE).is_file()):
            raise DatasetError(f"{self.root} is no LeRobot dataset, so it is not overwritten; move it away")

    def _refuse_closed(self) -> None:
        if not self._open:
            raise DatasetError(f"the writer of {self.root} is closed; make a new one")

    def _checked(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Columns as [T, D] arrays of the declared type, in declared order."""
        where = f"episode {len(self._episodes)}"
        if missing := [key for key in self.features if key not in columns]:
            raise DatasetError(f"{where} lacks column {missing[0]!r}; declared: {', '.join(self.features)}")
        if unknown := [key for key in columns if key not in self.features]:
            raise DatasetError(f"{where} has the column {unknown[0]!r}; declared: {', '.join(self.features)}")
        values = {key: _checked_column(columns[key], feature, where) for key, feature in self._numbers.items()}
        lengths = {key: len(value) for key, value in values.items()}
        if len(set(lengths.values())) > 1:
            raise DatasetError(f"{where} has columns of different lengths: {lengths}")
        if 0 in lengths.values():
            raise DatasetError(f"{where} has no frames")
        return values

    def _write(self, table: Any) -> None:
        """One row group an episode; the next file when this one would grow larger than the limit."""
        if self._sink is not None:
            written = self._sink.tell()
            expected = written * table.num_rows / max(self._file_frames, 1)
            if written + expected > self._size_mb * 2**20:
                self._close_file()
        if self._sink is None:
            self._file_number += 1
            chunk, number = divmod(self._file_number, FILES_PER_CHUNK)
            path = self._directory / _DATA_PATH.format(chunk_index=chunk, file_index=number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = path.open("wb")
            self._parquet = pq.ParquetWriter(self._sink, self._schema)
            self._file_frames = 0
        with_images = any(camera.in_column for camera in self._cameras.values())
        self._parquet.write_table(table, row_group_size=_IMAGES_PER_GROUP if with_images else table.num_rows)
        self._file_frames += table.num_rows

    def _close_file(self) -> None:
        sink, parquet = self._sink, self._parquet
        self._sink, self._parquet = None, None
        try:
            if parquet is not None:
                parquet.close()
        finally:
            if sink is not None:
                sink.close()

    def _write_metadata(self) -> None:
        meta = self._directory / "meta"
        episodes = self._directory / _EPISODES_PATH
        episodes.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), episodes)
        pq.write_table(_tasks_table(list(self._tasks)), meta / "tasks.parquet")
        _write_json(meta / "stats.json", {key: self._statistics(key) for key in self._all})
        features: dict[str, Any] = {}
        for key, feature in self._all.items():
            if key in self._cameras:
                features[key] = self._cameras[key].declaration()
                continue
            names = None if feature.names is None else list(feature.names)
            features[key] = {"dtype": feature.dtype, "shape": list(feature.shape), "names": names}
        info = {
            "codebase_version": "v3.0",
            "robot_type": self.robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self._total_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": self._size_mb,
            "video_files_size_in_mb": 200,
            "fps": int(self.fps) if float(self.fps).is_integer() else self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": _DATA_PATH,
            "video_path": VIDEO_PATH if any(not camera.in_column for camera in self._cameras.values()) else None,
            "features": features,
        }
        _write_json(meta / "info.json", info)
        for name, value in self._more_metadata.items():
            _write_json(meta / name, value)

    def _statistics(self, key: str) -> dict[str, Any]:
        """Over all frames of the dataset, from the files just written; of a camera over the frames counted."""
        if key in self._cameras:
            return self._cameras[key].statistics.to_lerobot()
        feature, row = self._all[key], 0
        values = np.empty((self._total_frames, feature.shape[0]), dtype=_DTYPES[feature.dtype])
        for path in sorted((self._directory / "data").glob("*/*.parquet")):
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=[key], use_threads=False):
                    values[row : row + len(batch)] = _rows(batch.column(key), feature)
                    row += len(batch)
        return exact_statistics(values)


def exact_statistics(values: np.ndarray) -> dict[str, list[float]]:
    """Statistics of the rows of [N, D] values under LeRobot's names, one number a dimension (`count`: one).

    Exact: mean and (population) standard deviation in float64, quantiles with linear interpolation between
        the two nearest
    values, none of them averaged over episodes. min and max of integers are integers.
    """
    statistics: dict[str, list[float]] = {name: [] for name in ("min", "max", "mean", "std")}
    statistics.update({"count": [len(values)], **{name: [] for name in _QUANTILES}})
    for column in values.T:  # one at a time: a float64 copy of a dimension instead of one of everything
        wide = column.astype(np.float64)
        statistics["min"].append(column.min().item())
        statistics["max"].append(column.max().item())
        statistics["mean"].append(float(wide.mean()))
        statistics["std"].append(float(wide.std()))
        for name, value in zip(_QUANTILES, np.quantile(wide, list(_QUANTILES.values())), strict=True):
            statistics[name].append(float(value))
    return statistics


def _feature(key: str, declared: Feature | Mapping[str, Any]) -> Feature:
    """A declaration that can be written, or a DatasetError."""
    if key in _FRAME_COLUMNS:
        raise DatasetError(f"column {key!r} is added by the writer and cannot be declared")
    if not key or "/" in key:
        raise DatasetError(f"column name {key!r} is empty or holds a '/', which LeRobot refuses")
    if isinstance(declared, Feature):
        dtype, shape, names = declared.dtype, declared.shape, declared.names
    else:
        dtype, shape = declared.get("dtype", ""), tuple(declared.get("shape", ()))
        names = declared.get("names")
    if dtype in IMAGE_DTYPES:
        return camera_feature(key, dtype, tuple(shape))
    if dtype not in _DTYPES:
        known = ", ".join([*_DTYPES, *IMAGE_DTYPES])
        raise DatasetError(f"column {key!r} has the dtype {dtype!r}; known: {known}")
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 1:
        raise DatasetError(f"column {key!r} has the shape {shape}; a shape (D,) is expected")
    flat = flat_names(names, shape[0])
    if names is not None and flat is None:
        raise DatasetError(f"column {key!r} has {shape[0]} dimensions, but its names are {names!r}")
    return Feature(key, dtype, shape, flat)


def _checked_column(values: Any, feature: Feature, where: str) -> np.ndarray:
    """[T, D] of the declared type, C-contiguous."""
    array = np.asarray(values)
    width = feature.shape[0]
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != width:
        raise DatasetError(f"{where}: column {feature.key!r} has the shape {array.shape}, not [T, {width}]")
    wanted = np.dtype(_DTYPES[feature.dtype])
    if not np.can_cast(array.dtype, wanted, casting="same_kind"):
        raise DatasetError(f"{where}: column {feature.key!r} holds {array.dtype}, not {feature.dtype}")
    with np.errstate(over="ignore"):  # beyond float32: becomes inf and is refused below
        array = np.ascontiguousarray(array, dtype=wanted)
    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        frame, dimension = int(wrong[0, 0]), int(wrong[0, 1])
        name = f" ({feature.names[dimension]})" if feature.names else ""
        raise DatasetError(
            f"{where}: column {feature.key!r}, frame {frame}, dimension {dimension}{name} is "
            f"{array[frame, dimension]}, not a finite {feature.dtype}"
        )
    return array


def _arrow_type(feature: Feature) -> Any:
    if feature.dtype == "image":
        return image_type()
    kind = pa.from_numpy_dtype(_DTYPES[feature.dtype])
    return kind if feature.shape == (1,) else pa.list_(kind, feature.shape[0])


def _arrow_array(values: np.ndarray, kind: Any) -> Any:
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=kind) if pa.types.is_fixed_size_list(kind) else flat


def _rows(array: Any, feature: Feature) -> np.ndarray:
    """The inverse of `_arrow_array`: [N, D]."""
    if feature.dtype == "int64":
        flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
        return integer_values(flat).reshape(len(array), feature.shape[0])
    return float_rows(array, feature.shape[0])


def _tasks_table(tasks: list[str]) -> Any:
    """LeRobot reads this table with pandas; the schema tells pandas that the task text is the index."""
    columns = {
        "task_index": pa.array(range(len(tasks)), pa.int64()),
        "__index_level_0__": pa.array(tasks, pa.string()),
    }
    described = [
        ("task_index", "task_index", "int64", "int64"),
        (None, "__index_level_0__", "unicode", "object"),
    ]
    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [
            {
                "name": None,
                "field_name": None,
                "pandas_type": "unicode",
                "numpy_type": "object",
                "metadata": {"encoding": "UTF-8"},
            }
        ],
        "columns": [
            {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
            for name, field, kind, dtype in described
        ],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    return pa.table(columns).replace_schema_metadata({"pandas": json.dumps(pandas)})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
