"""Images that lie in a dataset's parquet files, as structs of encoded bytes and a path (PNG, JPEG, ...).

Row groups used last stay in memory, still encoded, up to a limit; a row costs one row group when its group is not
there. Where groups are large, a cache of decoded frames (`frame_cache.py`) is what makes random order quick.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pi0_fast.data.metadata import parquet_errors
from pi0_fast.types import DatasetError

_LIMIT_BYTES = 256 * 2**20


class ImageColumns:
    """Encoded images of parquet columns by row. Pickles as its limit; not for several threads at once."""

    def __init__(self, root: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._root, self._limit = root, limit_bytes
        self._groups: OrderedDict[tuple[Path, str, int], Any] = OrderedDict()
        self._starts: dict[Path, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self._root, "limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], state["limit"])  # type: ignore[misc]

    def encoded(self, path: Path, key: str, rows: Sequence[int], episode: int) -> list[bytes]:
        """The bytes of the images in some rows of a file.

        Raises:
            DatasetError: the file is damaged, or a row has no image; names the file, column, episode and row.
        """
        return [self._one(path, key, row, episode) for row in rows]

    def _one(self, path: Path, key: str, row: int, episode: int) -> bytes:
        column, offset = self._group(path, key, row)
        value = column[offset].as_py() if offset < len(column) else None
        where = f"{path}: column {key}, row {row} (episode {episode})"
        if isinstance(value, bytes):
            return value
        if not isinstance(value, dict) or not (value.get("bytes") or value.get("path")):
            raise DatasetError(f"{where} holds no image; correct the file, or leave the episode out")
        if value.get("bytes"):
            return bytes(value["bytes"])
        name = PurePosixPath(str(value["path"]))
        if name.is_absolute() or ".." in name.parts or not (self._root / name).is_file():
            raise DatasetError(f"{where} holds only the path {str(name)!r}, and there is no such file in {self._root}")
        return (self._root / name).read_bytes()

    def _group(self, path: Path, key: str, row: int) -> tuple[Any, int]:
        """The column in the row group that holds a row, and the row's place in it."""
        if path not in self._starts:
            with parquet_errors(path):
                footer = pq.read_metadata(path)
            groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            self._starts[path] = np.concatenate([[0], np.cumsum(groups)]).astype(int).tolist()
        starts = self._starts[path]
        number = bisect_right(starts, row, hi=len(starts) - 1) - 1
        place = (path, key, number)
        if place in self._groups:
            self._groups.move_to_end(place)
        else:
            with parquet_errors(path), pq.ParquetFile(path) as file:
                if key not in file.schema_arrow.names:
                    raise DatasetError(f"{path} has no column {key!r}; its columns are: {file.schema_arrow.names}")
                self._groups[place] = file.read_row_group(number, columns=[key], use_threads=False).column(0)
            held = sum(column.nbytes for column in self._groups.values())
            while held > self._limit and len(self._groups) > 1:
                held -= self._groups.popitem(last=False)[1].nbytes
        return self._groups[place], row - starts[number]


def decode_image(data: bytes, where: str) -> npt.NDArray[np.uint8]:
    """An encoded image as uint8 [height, width, 3]; a grey one has three equal channels.

    Raises:
        DatasetError: it cannot be decoded, or has more than 8 bits or an alpha channel; begins with `where`.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DatasetError(f"{where}: images need Pillow, which is missing: pip install 'pi0-fast[policy]'") from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode not in ("RGB", "L", "P", "1"):
                raise DatasetError(f"{where}: an image of mode {image.mode}, needed is RGB or grey with 8 bits")
            return np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{where}: the image cannot be decoded ({error})") from error


def encode_png(image: npt.NDArray[np.uint8]) -> bytes:
    """uint8 [height, width, 3] as PNG."""
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(image).save(sink, "png", compress_level=1)
    return sink.getvalue()


def image_type() -> Any:
    """The arrow type of an image column, as LeRobot's files have it."""
    return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
