"""Where the files of a dataset are: a given directory, LeRobot's home directory, or the Hugging Face hub.

Only the search and its errors; nothing is parsed here. From the hub only `meta/` and `data/` are fetched,
never video.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
        raise DatasetError(
            f"{root} is not a directory; --root takes the directory that holds meta/ and data/"
        )
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
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=_HUB_PATTERNS,
        )
    except Exception as error:  # which exceptions the network stack raises changes between hub versions
        looked_at = f"{home} (not considered, as a revision was asked for)" if revision else str(home)
        raise DatasetError(_explain(error, repo_id, revision, looked_at)) from error
    root = Path(snapshot)
    if not (root / INFO_FILE).is_file():
        raise DatasetError(
            f"the hub dataset {repo_id} holds no {INFO_FILE} at {root}, so it is no LeRobot dataset"
        )
    return Location(root, "hub", root.name if root.parent.name == "snapshots" else revision)


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and everything that caused it: the hub wraps a refused access into a failed local look-up."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _explain(error: Exception, repo_id: str, revision: str | None, home: str) -> str:
    """One line for the user: what failed, and the way out."""
    from huggingface_hub import errors

    chain = _chain(error)
    page = f"https://huggingface.co/datasets/{repo_id}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    local = "or pass a local copy as --root"

    def first(*kinds: type[BaseException]) -> Any:
        return next((one for one in chain if isinstance(one, kinds)), None)

    status = next((getattr(getattr(one, "response", None), "status_code", None) for one in chain), None)
    if gated := first(errors.GatedRepoError):
        status = getattr(gated.response, "status_code", status)
        return (
            f"the hub dataset {repo_id} is gated (HTTP {status}): accept its conditions on {page} and "
            f"{login}, {local}"
        )
    if first(errors.RevisionNotFoundError):
        return (
            f"the hub dataset {repo_id} has no revision {revision!r}; {page}/tree/main lists branches and "
            "tags"
        )
    if first(errors.RepositoryNotFoundError):
        return (
            f"no dataset {repo_id} in {home}, and none on the hub that this token may see (HTTP {status}): "
            f"check the name on {page}; if it is private or gated, accept its conditions there and {login}, "
            f"{local}"
        )
    refused = next(
        (one for one in chain if getattr(getattr(one, "response", None), "status_code", None) in (401, 403)),
        None,
    )
    if refused is not None:
        code = refused.response.status_code  # type: ignore[attr-defined]
        return (
            f"the hub refused access to {repo_id} (HTTP {code}): accept its conditions on {page} and "
            f"{login}, {local}"
        )
    if first(errors.LocalTokenNotFoundError):
        return f"token=True, but no token is stored on this machine: {login}, {local}"
    if first(errors.HFValidationError):
        return f"{repo_id!r} is no dataset name of the form owner/name; a local directory is given as --root"
    if first(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        cause = f" ({_brief(chain[1])})" if len(chain) > 1 else ""
        return (
            f"no dataset {repo_id} in {home} or in the hub "
            f"cache{f' at revision {revision}' if revision else ''}, and the hub is switched off "
            f"(local_files_only, HF_HUB_OFFLINE) or cannot be reached{cause}: go online, or pass a local "
            "directory as --root"
        )
    return (
        f"no dataset {repo_id} in {home}, and the hub failed ({_brief(error)}): try again, or pass a local "
        "directory as --root"
    )


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
