"""Where a dataset is looked for, and the hub's failures with the hub's own exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from dataset_builder import build_v2, random_episodes
from huggingface_hub import errors

from pi0_fast.data import open_dataset
from pi0_fast.data.locate import lerobot_home
from pi0_fast.types import DatasetError

PAGE = "https://huggingface.co/datasets/robots/cube"


class Response:
    """What the hub's exceptions look at in a response."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers: dict[str, str] = {}
        self.request = None


def hub_error(kind: type[Exception], status: int) -> Exception:
    return kind("a long story\nof two lines", response=Response(status))  # type: ignore[call-arg]


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LeRobot's home in tmp_path, and a hub that must not be asked."""
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    return tmp_path / "home"


def hub_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def message(**arguments: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        open_dataset("robots/cube", **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_root_comes_first_and_nothing_after_it(tmp_path: Path, homes: Path) -> None:
    build_v2(homes / "robots/cube", random_episodes([3]))
    build_v2(tmp_path / "given", random_episodes([3, 4]))
    assert len(open_dataset("robots/cube", root=tmp_path / "given").episodes) == 2
    assert str(tmp_path / "absent") in message(root=tmp_path / "absent")


def test_the_home_of_lerobot_comes_before_the_hub(homes: Path) -> None:
    build_v2(homes / "robots/cube", random_episodes([3]))
    dataset = open_dataset("robots/cube")
    assert (dataset.root, dataset.origin, dataset.revision) == (homes / "robots/cube", "directory", None)


def test_where_the_home_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("HF_LEROBOT_HOME", "~/robots")
    assert lerobot_home() == Path("/home/me/robots")
    monkeypatch.delenv("HF_LEROBOT_HOME")
    monkeypatch.setenv("HF_HOME", "/cache/hf")
    assert lerobot_home() == Path("/cache/hf/lerobot")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert lerobot_home() == Path("/home/me/.cache/huggingface/lerobot")


def test_the_hub_is_asked_for_meta_and_data_only_with_every_argument(
    tmp_path: Path, homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revision passes over LeRobot's home, which does not know revisions."""
    build_v2(homes / "robots/cube", random_episodes([3]))
    snapshot = build_v2(tmp_path / "snapshots" / "0123abc", random_episodes([3, 4]))
    asked: list[Any] = []

    def snapshot_download(*arguments: Any, **named: Any) -> str:
        asked.append((arguments, named))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    dataset = open_dataset(
        "robots/cube", revision="v2.1", token="secret", cache_dir=tmp_path / "cache", local_files_only=True
    )
    assert (len(dataset.episodes), dataset.origin, dataset.revision) == (2, "hub", "0123abc")
    assert asked == [
        (
            ("robots/cube",),
            {
                "repo_type": "dataset",
                "revision": "v2.1",
                "token": "secret",
                "cache_dir": tmp_path / "cache",
                "local_files_only": True,
                "allow_patterns": ["meta/**", "data/**"],
            },
        )
    ]


def test_the_patterns_pick_the_files_that_are_needed() -> None:
    from huggingface_hub.utils import filter_repo_objects

    from pi0_fast.data.locate import _HUB_PATTERNS

    files = [
        "README.md",
        "meta/info.json",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        "videos/top/chunk-000/file-000.mp4",
    ]
    assert list(filter_repo_objects(files, allow_patterns=_HUB_PATTERNS)) == files[1:4]


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_dataset_names_the_page_and_the_login(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    hub_raises(monkeypatch, hub_error(errors.GatedRepoError, status))
    text = message()
    for part in ("gated", str(status), PAGE, "hf auth login", "HF_TOKEN", "--root"):
        assert part in text


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_access_names_the_page_and_the_login(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Also when the hub wraps it into a failed look-up in the local cache, as snapshot_download does."""
    refused = hub_error(errors.HfHubHTTPError, status)
    wrapped = errors.LocalEntryNotFoundError("cannot find the files")
    wrapped.__cause__ = refused
    for error in (refused, wrapped):
        hub_raises(monkeypatch, error)
        text = message()
        for part in ("refused access", str(status), PAGE, "hf auth login", "HF_TOKEN", "--root"):
            assert part in text


def test_a_dataset_that_is_not_there(monkeypatch: pytest.MonkeyPatch, homes: Path) -> None:
    hub_raises(monkeypatch, hub_error(errors.RepositoryNotFoundError, 404))
    text = message()
    for part in (
        "no dataset robots/cube",
        str(homes / "robots/cube"),
        "404",
        PAGE,
        "hf auth login",
        "--root",
    ):
        assert part in text


def test_a_revision_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_raises(monkeypatch, hub_error(errors.RevisionNotFoundError, 404))
    assert f"no revision 'v9'; {PAGE}/tree/main lists" in message(revision="v9")


def test_no_network(monkeypatch: pytest.MonkeyPatch, homes: Path) -> None:
    offline = errors.LocalEntryNotFoundError("Cannot find a cached snapshot")
    unreachable = errors.LocalEntryNotFoundError("An error happened")
    unreachable.__cause__ = ConnectionError("Name or service not known")
    for error in (offline, unreachable, errors.OfflineModeIsEnabled("offline")):
        hub_raises(monkeypatch, error)
        text = message()
        for part in (str(homes / "robots/cube"), "hub cache", "HF_HUB_OFFLINE", "--root"):
            assert part in text
        if error is unreachable:
            assert "ConnectionError: Name or service not known" in text
    assert "at revision main" in message(revision="main")
    assert "not considered" in message(revision="main")


def test_an_empty_cache_without_network_by_the_hub_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    text = message(cache_dir=tmp_path / "cache", local_files_only=True)
    for part in (str(tmp_path / "home/robots/cube"), "hub cache", "local_files_only", "--root"):
        assert part in text


def test_other_failures_keep_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_raises(monkeypatch, errors.LocalTokenNotFoundError("no token"))
    assert "hf auth login" in message(token=True)
    hub_raises(monkeypatch, hub_error(errors.HfHubHTTPError, 500))
    assert "HfHubHTTPError: a long story" in message()
    hub_raises(monkeypatch, OSError("No space left on device"))
    assert "OSError: No space left on device" in message()


def test_names_that_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/data/cube", "./cube", "~/cube"):
        with pytest.raises(DatasetError, match="is a path, not owner/name; pass the directory as --root"):
            open_dataset(path)
    hub_raises(monkeypatch, errors.HFValidationError("bad"))
    with pytest.raises(DatasetError, match="no dataset name of the form owner/name"):
        open_dataset("a/b/c")


def test_a_snapshot_that_is_no_lerobot_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert "robots/cube holds no meta/info.json" in message()
