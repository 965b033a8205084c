"""openpi's norm_stats.json, and the normalisers that give openpi's numbers.

openpi adds 1e-6 to a range or a standard deviation; ours are LeRobot's formulas, which do not, so the statistics that a
checkpoint gets are larger by that much. Left out: statistics of relative actions, which openpi's are already.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY
from pi0_fast.processors import FeatureNormalizer
from pi0_fast.types import PolicyError, UsageError

FILE = "norm_stats.json"
ASSETS = "assets"
#: openpi's name of a feature -> ours.
FEATURES = {"state": STATE_KEY, "actions": ACTION_KEY}
#: What openpi adds to a range, and to a standard deviation; what LeRobot's formula adds to the latter.
_EPSILON, _OURS = 1e-6, 1e-8
#: A padded dimension was 0 in every frame: its statistics differ from 0 by no more than the bins of openpi's histogram.
_NOTHING = 1e-6

Vectors = dict[str, npt.NDArray[np.float64]]


def find_statistics(checkpoint: Path, file: str | None, asset_id: str | None) -> Path:
    """The file with the statistics of a checkpoint.

    Raises:
        UsageError: there is none, or more than one and nothing says which.
    """
    if file is not None:
        return Path(file).expanduser()
    # Beside params/, where that itself was given.
    folders = [checkpoint / ASSETS, checkpoint.absolute().parent / ASSETS]
    assets = next((folder for folder in folders if folder.is_dir()), folders[0])
    found = {str(path.parent.relative_to(assets)): path for path in sorted(assets.rglob(FILE))}
    if asset_id is not None and asset_id in found:
        return found[asset_id]
    names = ", ".join(found) or "none"
    if asset_id is not None:
        raise UsageError(f"--asset_id {asset_id!r}: no {FILE} there; {assets} has: {names}")
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise UsageError(f"{assets} has statistics of several robots, say which with --asset_id: {names}")
    raise UsageError(
        f"no {FILE} in {assets}: a checkpoint without statistics cannot act; copy openpi's assets there, or give the "
        "file with --norm_stats"
    )


def read_statistics(file: Path) -> dict[str, Vectors]:
    """State's and action's statistics under our names: those of mean, std, q01, q99 that are there, float64 [D].

    Raises:
        PolicyError: the file is missing or damaged, lacks a feature, or holds what cannot be statistics.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file} cannot be read as openpi's statistics: {error}") from error
    stored = content.get("norm_stats", content) if isinstance(content, dict) else None
    if not isinstance(stored, dict) or not set(FEATURES) <= set(stored):
        there = ", ".join(map(str, stored)) if isinstance(stored, dict) else type(content).__name__
        raise PolicyError(f"{file}: needed are the statistics of {' and '.join(FEATURES)}; there are: {there}")
    return {ours: _vectors(stored[theirs], f"{file}: {theirs}") for theirs, ours in FEATURES.items()}


def _vectors(stored: Any, where: str) -> Vectors:
    if not isinstance(stored, Mapping):
        raise PolicyError(f"{where} is no map of statistics")
    vectors: Vectors = {}
    for name in ("mean", "std", "q01", "q99"):
        if stored.get(name) is None:
            continue
        try:
            vectors[name] = np.asarray(stored[name], np.float64)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"{where}: {name} is no list of numbers") from error
        if vectors[name].ndim != 1 or not np.isfinite(vectors[name]).all():
            raise PolicyError(f"{where}: {name} is no list of finite numbers")
    sizes = {name: len(values) for name, values in vectors.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise PolicyError(f"{where}: statistics of different lengths, or none: {sizes}")
    return vectors


def padding(vectors: Vectors) -> npt.NDArray[np.bool_]:
    """Which of the D dimensions look like padding: they were 0 in every frame."""
    result: npt.NDArray[np.bool_] = np.all([np.abs(values) <= _NOTHING for values in vectors.values()], axis=0)
    return result


def cut(vectors: Vectors, size: int | None, key: str, flag: str) -> Vectors:
    """The statistics of the robot's own dimensions.

    Args:
        vectors: of `read_statistics`.
        size: how many those are; None: all up to the last that does not look like padding.
        key: of the feature.
        flag: the one that says `size`.

    Raises:
        UsageError: there are fewer, or what would be cut off is no padding.
    """
    empty = padding(vectors)
    total = len(empty)
    if size is None:
        moving = np.flatnonzero(~empty)
        if not len(moving):
            raise UsageError(f"{key}: no dimension of the statistics ever moves; give --{flag}")
        size = int(moving[-1]) + 1
    if size > total:
        raise UsageError(f"--{flag} is {size}, but the statistics of {key} have {total} dimensions")
    lost = np.flatnonzero(~empty[size:])
    if len(lost):
        dim = size + int(lost[0])
        shown = ", ".join(f"{name} {values[dim]:.4g}" for name, values in vectors.items())
        raise UsageError(
            f"--{flag} is {size}, but dimension {dim} of {key} is no padding ({shown}): the robot has more dimensions"
        )
    return {name: values[:size] for name, values in vectors.items()}


def normalizer(
    vectors: Vectors, mode: NormalizationMode, key: str, names: tuple[str, ...] | None = None
) -> FeatureNormalizer:
    """What gives openpi's normalised values: ``(x - q01) / (q99 - q01 + 1e-6) * 2 - 1``, or ``(x - mean) / (std +
    1e-6)``; nothing is clipped.

    Args:
        vectors: of `cut`.
        mode: QUANTILES or MEAN_STD.
        key: of the feature.
        names: of its dimensions.

    Raises:
        PolicyError: the mode's statistics are missing, or cannot be right.
    """
    own = {name: vectors[name] for name in mode.needs if name in vectors}
    if len(own) == len(mode.needs):
        if mode is NormalizationMode.MEAN_STD:
            own["std"] = own["std"] + (_EPSILON - _OURS)
        else:
            own["q99"] = own["q99"] + _EPSILON
    result = {name: values.astype(np.float32) for name, values in own.items()}
    if mode is NormalizationMode.QUANTILES and len(own) == len(mode.needs):
        # Where 1e-6 is lost beside a large value, the least range there is: only a value that never occurred differs.
        lost = result["q99"] == result["q01"]
        result["q99"] = np.where(lost, np.nextafter(result["q01"], np.float32(np.inf)), result["q99"])
    still = _still(vectors, mode)
    if len(still):
        dims = ", ".join(f"{dim} ({names[dim]})" if names else str(dim) for dim in still)
        warnings.warn(
            f"{key}: dimension {dims} never moved in openpi's data: as in openpi, any other value becomes huge when it "
            "is normalised",
            stacklevel=2,
        )
    size = len(next(iter(vectors.values())))
    return FeatureNormalizer(key, mode, size, result, names=names)


def _still(vectors: Vectors, mode: NormalizationMode) -> list[int]:
    if not set(mode.needs) <= set(vectors):
        return []
    width = vectors["std"] if mode is NormalizationMode.MEAN_STD else vectors["q99"] - vectors["q01"]
    return [int(dim) for dim in np.flatnonzero(width <= _NOTHING)]
