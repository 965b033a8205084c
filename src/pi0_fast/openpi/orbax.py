"""The leaves of an Orbax checkpoint of a PyTree, read one by one with tensorstore, which Orbax itself stores with.

Reads what Orbax writes on a local disk: one OCDBT database, or a folder for each leaf; zarr 2 or 3. jax and Orbax are
not needed. Left out: writing, remote buckets, and whatever a leaf means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.types import PolicyError, UsageError

METADATA = "_METADATA"
_DATABASE = "manifest.ocdbt"
#: The root of openpi's tree, and what its training puts at the end of every path.
_ROOT, _VALUE = "params", "value"


@dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint, not read yet.

    Attributes:
        path: without the root and a ``value`` at the end, joined with ``/``.
        shape: of the whole array.
        dtype: numpy's name of its number format, ``float32`` or ``bfloat16``.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    _store: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return int(self._store.size * self._store.dtype.numpy_dtype.itemsize)

    def read(self) -> npt.NDArray[Any]:
        """All of it.

        Raises:
            PolicyError: data are missing or damaged.
        """
        return self._read(self._store)

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """The array in pieces along the first axis, each with its first index: as much at once as lies together.

        Raises:
            PolicyError: data are missing or damaged.
        """
        step = self._store.chunk_layout.read_chunk.shape[0]
        for first in range(0, self.shape[0], step):
            yield first, self._read(self._store[first : min(first + step, self.shape[0])])

    def _read(self, store: Any) -> npt.NDArray[Any]:
        try:
            return np.asarray(store.read().result())
        except Exception as error:  # of tensorstore, which raises ValueError for most things
            raise PolicyError(f"{self.path} cannot be read, data are missing or damaged: {_line(error)}") from error


def find_params(checkpoint: Path) -> Path:
    """The directory with the arrays: `params/` of a checkpoint, or the checkpoint itself.

    Raises:
        PolicyError: neither is an Orbax checkpoint.
    """
    if str(checkpoint).startswith(("gs:", "s3:")):
        raise PolicyError(f"{checkpoint} is in a bucket: download it first, as openpi does (into ~/.cache/openpi)")
    for place in (checkpoint / _ROOT, checkpoint):
        if (place / METADATA).is_file():
            return place
    if not checkpoint.is_dir():
        raise PolicyError(f"{checkpoint}: {'a file, no directory' if checkpoint.exists() else 'no such directory'}")
    there = sorted(entry.name for entry in checkpoint.iterdir())
    names = f"{', '.join(there[:20]) or 'nothing'}{', ...' if len(there) > 20 else ''}"
    steps = sorted((name for name in there if name.isdecimal()), key=int)
    hint = f": the steps of a training run, give one of them ({checkpoint / steps[-1]})" if steps else ""
    raise PolicyError(
        f"{checkpoint}: no checkpoint of openpi, which has {_ROOT}/{METADATA} in it; found: {names}{hint}"
    )


def leaves(params: Path) -> dict[str, Leaf]:
    """Every array of the checkpoint by its path.

    Args:
        params: of `find_params`.

    Raises:
        UsageError: tensorstore is not installed.
        PolicyError: the metadata are damaged, an array is missing, or a leaf is no array.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise UsageError(f"reading openpi's checkpoints needs {error.name}: pip install 'pi0-fast[openpi]'") from error
    metadata = _metadata(params / METADATA)
    keys = [tuple(part["key"] for part in entry["key_metadata"]) for entry in metadata["tree_metadata"].values()]
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})  # every array is read once
    opened = {key: tensorstore.open(_spec(params, key, driver), open=True, read=True, context=context) for key in keys}
    valued = all(key[-1] == _VALUE for key in keys)
    found: dict[str, Leaf] = {}
    for key, future in opened.items():
        path = "/".join(key[1 if key[0] == _ROOT else 0 : -1 if valued else None])
        try:
            store = future.result()
        except Exception as error:
            raise PolicyError(
                f"{params}: {path} is named in {METADATA}, but cannot be opened: {_line(error)}"
            ) from error
        found[path] = Leaf(path, tuple(store.shape), store.dtype.numpy_dtype.name, store)
    return found


def _spec(params: Path, key: tuple[str, ...], driver: str) -> dict[str, Any]:
    """Where tensorstore finds an array: in the database, or in a folder of its own."""
    name = ".".join(key)
    if (params / _DATABASE).is_file():
        store = {"driver": "ocdbt", "base": f"file://{params.absolute()}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{params.absolute()}/{name}/"}
    return {"driver": driver, "kvstore": store}


def _metadata(file: Path) -> dict[str, Any]:
    """The content of the tree's description, as far as it is needed.

    Raises:
        PolicyError: it is damaged, or says of a leaf that it is no array.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        entries = content["tree_metadata"].values()
        for entry in entries:
            names = [part["key"] for part in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
            if not names or not all(isinstance(name, str) for name in names):
                raise PolicyError(f"{file}: {names} is no path of names")
            if "array" not in kind.lower():
                raise PolicyError(f"{file}: {'/'.join(names)} is no array but {kind}")
        if not entries:
            raise PolicyError(f"{file}: the tree has no leaves")
    except PolicyError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{file} cannot be read as the description of an Orbax checkpoint: {error!r}") from error
    return content


def _line(error: Exception) -> str:
    """The first sentence of tensorstore's long messages."""
    return str(error).split(" [")[0].splitlines()[0]
