"""Fetching files from the Hugging Face hub, with every failure explained in one line.

The search in local directories is the caller's; so is what the files mean. Uploading is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pi0_fast.types import Pi0FastError


class HubError(Pi0FastError):
    """Nothing could be fetched; the message says from where, why, and the way out."""


def download_snapshot(
    repo_id: str,
    *,
    repo_type: Literal["model", "dataset"],
    allow_patterns: Sequence[str],
    searched: str,
    local_advice: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download (or find in the hub cache) the files of a repository that match the patterns.

    Args:
        repo_id: ``owner/name``.
        repo_type: what the repository is.
        allow_patterns: which files.
        searched: where the caller has looked before, for the error message.
        local_advice: how to use a local copy instead, e.g. ``"pass a local copy as --root"``.
        revision, token, cache_dir, local_files_only: as in `huggingface_hub.snapshot_download`.

    Returns:
        The snapshot's directory.

    Raises:
        HubError: no such repository or revision, access refused, offline, or any failure of the network.
    """
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                repo_type=repo_type,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=list(allow_patterns),
            )
        )
    except Exception as error:  # which exceptions the network stack raises changes between hub versions
        raise HubError(_explain(error, repo_id, repo_type, revision, searched, local_advice)) from error


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and everything that caused it: the hub wraps a refused access into a failed local look-up."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _explain(
    error: Exception, repo_id: str, repo_type: str, revision: str | None, searched: str, local_advice: str
) -> str:
    """One line for the user: what failed, and the way out."""
    from huggingface_hub import errors

    chain = _chain(error)
    page = f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    local = f"or {local_advice}"

    def first(*kinds: type[BaseException]) -> Any:
        return next((one for one in chain if isinstance(one, kinds)), None)

    def status_of(one: BaseException) -> int | None:
        status = getattr(getattr(one, "response", None), "status_code", None)
        return status if isinstance(status, int) else None

    status = next((status_of(one) for one in chain if status_of(one) is not None), None)
    if first(errors.GatedRepoError):
        return (
            f"the hub {repo_type} {repo_id} is gated (HTTP {status}): accept its conditions on {page} and "
            f"{login}, {local}"
        )
    if first(errors.RevisionNotFoundError):
        return f"the hub {repo_type} {repo_id} has no revision {revision!r}; {page}/tree/main lists branches and tags"
    if first(errors.RepositoryNotFoundError):
        return (
            f"no {repo_type} {repo_id} in {searched}, and none on the hub that this token may see (HTTP {status}): "
            f"check the name on {page}; if it is private or gated, accept its conditions there and {login}, {local}"
        )
    if any(status_of(one) in (401, 403) for one in chain):
        return (
            f"the hub refused access to {repo_id} (HTTP {status}): accept its conditions on {page} and {login}, {local}"
        )
    if first(errors.LocalTokenNotFoundError):
        return f"token=True, but no token is stored on this machine: {login}, {local}"
    if first(errors.HFValidationError):
        return f"{repo_id!r} is no {repo_type} name of the form owner/name; for a local directory {local_advice}"
    if first(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        cause = f" ({_brief(chain[1])})" if len(chain) > 1 else ""
        at = f" at revision {revision}" if revision else ""
        return (
            f"no {repo_type} {repo_id} in {searched} or in the hub cache{at}, and the hub is switched off "
            f"(local_files_only, HF_HUB_OFFLINE) or cannot be reached{cause}: go online, {local}"
        )
    return f"no {repo_type} {repo_id} in {searched}, and the hub failed ({_brief(error)}): try again, {local}"


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
