"""Where the files of a dataset are: a given directory, LeRobot's home directory, or the Hugging Face hub.

Only the search and its errors; nothing is parsed here. From the hub only `meta/` and `data/` are fetched,
never video.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pi0_fast.hub import HubError, download_snapshot
from pi0_fast.swap import finish_interrupted_swap
from pi0_fast.types import DatasetError

INFO_FILE = "meta/info.json"
_HUB_PATTERNS = ["meta/**", "data/**"]


@dataclass(frozen=True)
class Location:
    """A dataset directory and where it comes from.

    Attributes:
        root: directory that holds `meta/` and `data/`.
        origin: ``"directory"`` (a local directory, given or in LeRobot's home) or ``"hub"`` (a snapshot of
            the hub).
        revision: commit hash of a hub snapshot, None for a local directory.
    """

    root: Path
    origin: Literal["directory", "hub"]
    revision: str | None = None


def lerobot_home() -> Path:
    """LeRobot's dataset directory: $HF_LEROBOT_HOME, else `lerobot` in $HF_HOME or its default."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    default = Path(os.environ.get("HF_HOME") or cache) / "lerobot"
    return Path(os.environ.get("HF_LEROBOT_HOME") or default).expanduser()


def locate_dataset(
    repo_id: str,
    *,
    root: str | Path | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Location:
    """Find the dataset; the network is touched only when neither `root` nor LeRobot's home directory has it.

    With a `revision` LeRobot's home directory is not considered, because nothing there says which revision it
    holds.

    Raises:
        DatasetError: nothing is there, access is denied, or the hub cannot be reached; names where it looked.
    """
    if root is not None:
        return _from_directory(Path(root).expanduser())
    if repo_id.startswith(("/", ".", "~")) or os.path.isabs(repo_id):
        raise DatasetError(f"repo_id {repo_id!r} is a path, not owner/name; pass the directory as --root")
    home = lerobot_home() / repo_id
    if revision is None:
        _finish_swap(home)
        if (home / INFO_FILE).is_file():
            return Location(home, "directory")
    return _from_hub(repo_id, revision, token, cache_dir, local_files_only, home)


def _from_directory(root: Path) -> Location:
    _finish_swap(root)
    if not root.is_dir():
        raise DatasetError(f"{root} is not a directory; --root takes the directory that holds meta/ and data/")
    if not (root / INFO_FILE).is_file():
        raise DatasetError(
            f"{root} holds no {INFO_FILE}, so it is no LeRobot dataset; --root takes the directory that "
            "holds meta/ and data/"
        )
    return Location(root, "directory")


def _finish_swap(root: Path) -> None:
    try:
        finish_interrupted_swap(root)
    except OSError as error:
        raise DatasetError(
            f"{root} was being replaced when its writer was killed, and the swap cannot be finished: {error}"
        ) from error


def _from_hub(
    repo_id: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
    home: Path,
) -> Location:
    try:
        root = download_snapshot(
            repo_id,
            repo_type="dataset",
            allow_patterns=_HUB_PATTERNS,
            searched=f"{home} (not considered, as a revision was asked for)" if revision else str(home),
            local_advice="pass a local directory as --root",
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
    except HubError as error:
        raise DatasetError(str(error)) from error
    if not (root / INFO_FILE).is_file():
        raise DatasetError(f"the hub dataset {repo_id} holds no {INFO_FILE} at {root}, so it is no LeRobot dataset")
    return Location(root, "hub", root.name if root.parent.name == "snapshots" else revision)
