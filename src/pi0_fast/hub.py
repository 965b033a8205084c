"""Fetching files from the Hugging Face hub and putting files there, with every failure explained in one line.

The search in local directories is the caller's; so is what the files mean. Nothing here asks for or stores a token:
that is `hf auth login`, HF_TOKEN, or the argument. Works with huggingface_hub 0.36 and 2.x, whose network stacks
raise different exceptions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pi0_fast.types import Pi0FastError


class HubError(Pi0FastError):
    """Nothing could be fetched, or pushed; the message says from or to where, why, and the way out."""


# --- fetching ---------------------------------------------------------------------------------------------------------


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
    page = _page(repo_id, repo_type)
    login = "log in with `hf auth login` or set HF_TOKEN"
    local = f"or {local_advice}"

    def first(*kinds: type[BaseException]) -> Any:
        return next((one for one in chain if isinstance(one, kinds)), None)

    status = _status(chain)
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
    if any(_status([one]) in (401, 403) for one in chain):
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


def _status(chain: Sequence[BaseException]) -> int | None:
    """The first HTTP status in a chain of errors."""
    statuses = (getattr(getattr(error, "response", None), "status_code", None) for error in chain)
    return next((status for status in statuses if isinstance(status, int)), None)


def _page(repo_id: str, repo_type: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"


# --- pushing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PushTarget:
    """A repository that `check_push` found nothing against.

    Attributes:
        repo_id: ``owner/name``.
        exists: whether it is on the hub already; if not, pushing creates it.
        private: as it is, or as it will be created; None for a new one that follows its owner's default (public,
            unless an organisation has chosen otherwise).
        doubt: what could not be found out without writing, in words; None where nothing is open.
    """

    repo_id: str
    exists: bool
    private: bool | None
    doubt: str | None = None


def check_push(
    repo_id: str,
    *,
    own_files: Collection[str],
    signature_files: Collection[str],
    private: bool = False,
    token: str | bool | None = None,
    revision: str | None = None,
) -> PushTarget:
    """Find out whether a push would succeed, before the work whose result is to be pushed; changes nothing on the hub.

    Asks the hub who the token belongs to, whether the repository exists, and then either whether the token may
    write to it, or whether the token may create it: its role, the owner's name, the role in an organisation and the
    permissions of a fine-grained token. For a new repository only creating it is certain, and an empty repository
    is not what a failed fit should leave; so what a token does not say of itself stays open (`PushTarget.doubt`).

    Args:
        repo_id: ``owner/name``, or ``name`` for the token's own user.
        own_files: names that the push may write.
        signature_files: those of them that only a repository of this kind has; where others of `own_files` exist and
            none of these, the repository holds something else.
        private: whether a new repository is to be private; an existing public one is refused then.
        token, revision: as in `push_files`.

    Raises:
        HubError: no valid name, no token, a token that may not write there, a public repository where a private one
            is wanted, a repository of something else, or a hub that cannot be reached.
    """
    from huggingface_hub import errors

    api = _api(token)
    try:
        _check_name(repo_id)
        identity = api.whoami()
        full = repo_id if "/" in repo_id else f"{identity['name']}/{repo_id}"
        _check_name(full)
        try:
            info = api.repo_info(full)
        except errors.RepositoryNotFoundError as error:
            if _status([error]) != 404:
                raise
            return PushTarget(full, False, True if private else None, _doubt_about_creating(identity, full))
        full = info.id or full
        doubt = _doubt_about_writing(identity, full, token)
        if private and not info.private:
            raise HubError(
                f"{full} exists and is public: a push does not make it private. Change that on "
                f"{_page(full, 'model')}/settings, or push to another name"
            )
        _refuse_other_content(set(_files(api, full, revision)), full, own_files, signature_files)
        return PushTarget(full, True, bool(info.private), doubt)
    except HubError:
        raise
    except Exception as error:  # which exceptions the network stack raises changes between hub versions
        raise HubError(_explain_push(error, repo_id)) from error


def push_files(
    folder: Path,
    target: PushTarget,
    *,
    own_files: Collection[str],
    signature_files: Collection[str],
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str,
) -> str:
    """Put all files of a folder into a model repository, as one commit; the repository is created when missing.

    Those of `own_files` that the repository has and the folder has not are removed by the same commit; other files of
    the repository stay.

    Args:
        folder: holds what is to be pushed and nothing else.
        target: as `check_push` gave it.
        own_files, signature_files: as in `check_push`.
        token: as in huggingface_hub; None: the one that is logged in, or HF_TOKEN.
        revision: branch to push to, made from the main branch when missing; None: the main branch.
        commit_message: first line of the commit.

    Returns:
        The address of the commit.

    Raises:
        HubError: the token may not write there after all, or the hub failed; says whether a repository was made.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api, full, created = _api(token), target.repo_id, False
    try:
        if not target.exists:
            # None, not False: an organisation whose default is private must not be overruled.
            api.create_repo(full, private=target.private)
            created = True
        if revision not in (None, "main") and not str(revision).startswith("refs/"):
            api.create_branch(full, branch=str(revision), exist_ok=True)
        present = set(_files(api, full, revision))
        _refuse_other_content(present, full, own_files, signature_files)
        added = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        stale = sorted(present & set(own_files) - set(added))
        operations = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in added.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ]
        commit = api.create_commit(full, operations, commit_message=commit_message, revision=revision)
        return str(commit.commit_url)
    except HubError:
        raise
    except Exception as error:
        note = f"; the repository {full} was created and is empty" if created else ""
        raise HubError(_explain_push(error, full) + note) from error


def is_on_hub(repo_id: str, repo_type: Literal["model", "dataset"], *, token: str | bool | None = None) -> bool:
    """Whether the hub has a repository of that kind and name that the token may see.

    Raises:
        HubError: the hub cannot be asked.
    """
    try:
        return bool(_api(token).repo_exists(repo_id, repo_type=repo_type))
    except Exception as error:
        raise HubError(_explain_push(error, repo_id)) from error


def _api(token: str | bool | None) -> Any:
    from huggingface_hub import HfApi

    from pi0_fast import __version__

    return HfApi(token=token, library_name="pi0-fast", library_version=__version__)


def _check_name(repo_id: str) -> None:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if not isinstance(repo_id, str) or not repo_id:
        raise HubError(f"{repo_id!r} is no repository name of the form owner/name")
    validate_repo_id(repo_id)


def _files(api: Any, repo_id: str, revision: str | None) -> list[str]:
    """Names of the files at a revision; those of the main branch where the revision is yet to be made."""
    from huggingface_hub import errors

    try:
        return list(api.list_repo_files(repo_id, revision=revision))
    except errors.RevisionNotFoundError:
        return list(api.list_repo_files(repo_id))


def _refuse_other_content(
    present: set[str], repo_id: str, own_files: Collection[str], signature_files: Collection[str]
) -> None:
    """A policy's config.json, say, is not to be replaced by a tokenizer's."""
    clash = sorted(present & set(own_files))
    if clash and not present & set(signature_files):
        raise HubError(
            f"{repo_id} holds something else ({', '.join(clash[:3])} but no {' or '.join(signature_files)}), which a "
            "push would overwrite: push to another name"
        )


def _doubt_about_writing(identity: Any, repo_id: str, token: str | bool | None) -> str | None:
    """Ask whether the token may write to an existing repository; raises when it may not."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    _refuse_read_token(identity, repo_id)
    address = f"{constants.ENDPOINT}/api/models/{repo_id}/auth-check/write"
    response = get_session().get(address, headers=build_hf_headers(token=token))
    if response.status_code == 404 and not response.headers.get("X-Error-Code"):
        return "the hub does not tell before a push whether the token may write to this repository"
    hf_raise_for_status(response)
    return None


def _doubt_about_creating(identity: Any, repo_id: str) -> str | None:
    """What a token's own description leaves open about creating a repository; raises when it says no."""
    _refuse_read_token(identity, repo_id)
    owner, user = repo_id.split("/")[0], identity.get("name")
    organisations = {org.get("name"): org.get("roleInOrg") for org in identity.get("orgs") or []}
    token = (identity.get("auth") or {}).get("accessToken") or {}
    if organisations.get(owner) == "read":
        raise HubError(f"{user} has only read access in {owner}, so cannot create {repo_id} there")
    if isinstance(token.get("fineGrained"), dict):
        return _doubt_about_fine_grained(token["fineGrained"], owner, repo_id)
    if owner != user and owner not in organisations:
        names = ", ".join(map(str, [user, *organisations]))
        raise HubError(f"{user}, whose token this is, cannot create {repo_id}: repositories can be under {names}")
    if token.get("role") != "write":
        return f"the token does not say whether it may create {repo_id}"
    return None


def _doubt_about_fine_grained(token: Any, owner: str, repo_id: str) -> str | None:
    """The same of a token with permissions one by one: those for the owner's name, and those for everything."""
    scopes = token.get("scoped")
    if not isinstance(scopes, list) or not all(
        isinstance(scope, dict)
        and isinstance(scope.get("permissions"), list)
        and isinstance((scope.get("entity") or {}).get("name"), str)
        for scope in scopes
    ):
        return f"the fine-grained token does not say in a known way whether it may create {repo_id}"
    granted = list(token.get("global") or [])
    for scope in scopes:
        if scope["entity"]["name"] == owner:
            granted += scope["permissions"]
    if any(str(permission).startswith("repo") and "write" in str(permission) for permission in granted):
        return None
    raise HubError(
        f"this fine-grained token may not write to the repositories of {owner}, so cannot create {repo_id}: give it "
        f"that permission on {_tokens_page()}"
    )


def _refuse_read_token(identity: Any, repo_id: str) -> None:
    token = (identity.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise HubError(
            f"this token of {identity.get('name')} may only read; pushing to {repo_id} needs one with write access: "
            f"make it on {_tokens_page()}, then `hf auth login` or set HF_TOKEN"
        )


def _tokens_page() -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/settings/tokens"


def _explain_push(error: Exception, repo_id: str) -> str:
    """One line for the user: why nothing could be pushed, and the way out."""
    from huggingface_hub import constants, errors

    chain = _chain(error)
    status = _status(chain)
    login = f"make a token with write access on {_tokens_page()}, then `hf auth login` or set HF_TOKEN"

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    if has(errors.LocalTokenNotFoundError):
        return f"pushing to {repo_id} needs a token, and there is none on this machine: {login}"
    if has(errors.HFValidationError):
        return f"{repo_id!r} is no repository name of the form owner/name ({_reason(chain)})"
    if has(errors.OfflineModeIsEnabled):
        return f"nothing can be pushed to {repo_id} while the hub is switched off (HF_HUB_OFFLINE): unset that"
    if status == 401:
        return f"the hub does not accept this token for {repo_id} (HTTP 401: {_reason(chain)}): {login}"
    if status == 403:
        return f"this token may not write to {repo_id} (HTTP 403: {_reason(chain)}): {login}, or push to another name"
    if status is not None:
        return f"pushing to {repo_id} failed at the hub (HTTP {status}: {_reason(chain)})"
    if isinstance(error, ValueError):
        return f"pushing to {repo_id} failed: {_brief(error)}"
    return f"pushing to {repo_id} failed, as {constants.ENDPOINT} cannot be reached ({_brief(error)}): go online"


def _reason(chain: Sequence[BaseException]) -> str:
    """What the hub itself said, else the first line of the first error."""
    said = next((getattr(one, "server_message", None) for one in chain if getattr(one, "server_message", None)), None)
    lines = (str(said) if said else str(chain[0])).strip().splitlines()
    return lines[0].strip() if lines else type(chain[0]).__name__
