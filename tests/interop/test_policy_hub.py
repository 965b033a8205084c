"""A policy pushed to and loaded from a hub of our own on 127.0.0.1, through the installed huggingface_hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import yaml  # noqa: E402
from test_hub import Client  # noqa: E402

from hub_server import Hub, serve  # noqa: E402
from tiny_policies import new_policy  # noqa: E402


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Client]]:
    with serve() as hub:
        client = Client(sys.executable, hub.url, tmp_path_factory.mktemp("home"))
        yield hub, client
        client.close()


@pytest.fixture
def hub(served: tuple[Hub, Client]) -> Hub:
    hub, url = served[0], served[0].url
    hub.__init__()  # type: ignore[misc]
    hub.url = url
    hub.user("writer", "me")
    hub.user("other", "you")
    return hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "policy"
    new_policy().save_pretrained(folder)
    return folder


@pytest.fixture
def client(served: tuple[Hub, Client]) -> Client:
    return served[1]


def test_push_and_load_from_the_hub(hub: Hub, client: Client, saved: Path, tmp_path: Path) -> None:
    files = [path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()]
    hub.add("me/policy", files={"notes.md": b"mine", "model.safetensors.index.json": b"{}", "pi0_fast.json": b"{}"})
    where = client.get("push_policy", login="writer", source=str(saved), repo_id="me/policy", revision="v2")
    repository = hub.repositories["model", "me/policy"]
    assert where == f"{hub.url}/me/policy/commit/{repository.branches['v2']}"
    assert set(repository.files("v2")) == {*files, "notes.md", "README.md", ".gitattributes"}
    assert b'PI0FastPolicy.from_pretrained("me/policy")' in repository.files("v2")["README.md"]
    for name in files:
        assert repository.files("v2")[name] == (saved / name).read_bytes(), name
    expected = client.get("load_policy", source=str(saved))
    repository.private = True
    cache = str(tmp_path / "cache")
    for named in ({"token": "writer"}, {"local_files_only": True}):
        found = client.get("load_policy", source="me/policy", revision="v2", cache_dir=cache, **named)
        assert found == expected
    pinned = {"revision": repository.branches["v2"], "cache_dir": cache, "local_files_only": True}
    assert client.get("load_policy", source="me/policy", **pinned) == expected
    for named, words in (
        ({"local_files_only": True, "cache_dir": str(tmp_path / "empty"), "revision": "v2"}, "switched off"),
        ({"token": "other", "cache_dir": str(tmp_path / "empty")}, "no model me/policy"),
        ({"token": "writer", "revision": "v3", "cache_dir": cache}, "no revision 'v3'"),
        ({"token": "writer", "revision": "main", "cache_dir": cache}, "pi0_fast.json: format None"),
    ):
        assert words in client.error("load_policy", source="me/policy", **named)


def test_the_tokenizers_that_a_checkpoint_names_on_the_hub(
    hub: Hub, client: Client, saved: Path, tmp_path: Path
) -> None:
    """As lerobot's name them; token, cache_dir and local_files_only go for them, too."""
    files = {path.relative_to(saved).as_posix(): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    tokenizers = {"text": "me/text", "action": "me/fast"}
    for kind, name in tokenizers.items():
        prefix = f"tokenizers/{kind}/"
        own = {path.removeprefix(prefix): content for path, content in files.items() if path.startswith(prefix)}
        hub.add(name, files=own, private=True)
    for name in ("config.json", "policy_preprocessor.json"):
        text = files[name].decode()
        for kind, hub_name in tokenizers.items():
            text = text.replace(f"tokenizers/{kind}", hub_name)
        files[name] = text.encode()
    own = json.loads(files["pi0_fast.json"])
    architecture = own["details"]["architecture"]
    kept = {name: content for name, content in files.items() if not name.startswith(("tokenizers/", "pi0_fast"))}
    hub.add("me/lerobots", files=kept, private=True)
    cache = str(tmp_path / "cache")
    found = client.get("load_policy", source="me/lerobots", token="writer", cache_dir=cache, architecture=architecture)
    expected = client.get("load_policy", source=str(saved))
    assert found["fingerprints"] == expected["fingerprints"]
    assert found["names"] == ["me/text", "me/fast"]
    named = {"cache_dir": cache, "architecture": architecture, "local_files_only": True}
    assert client.get("load_policy", source="me/lerobots", **named) == found
    del hub.repositories["model", "me/fast"]
    named = {"cache_dir": str(tmp_path / "empty"), "architecture": architecture, "token": "writer"}
    assert "no model me/fast" in client.error("load_policy", source="me/lerobots", **named)


def test_a_run_pushes_its_policy_with_what_it_knows(
    hub: Hub, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card links what is on the hub, and says how it was trained and what was measured."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "training"))
    import tiny_runs

    hub.add("me/circles", files={"README.md": b""}, kind="dataset")
    flags = {"dataset.repo_id": "me/circles", "dataset.val_fraction": 0.25, "eval_freq": 4, "save_checkpoint": "false"}
    flags |= {"policy.repo_id": "me/new", "policy.license": "apache-2.0", "policy.tags": '["circles"]', "steps": 4}
    line = tiny_runs.arguments(tmp_path, tmp_path / "run", **flags)
    kept = [each for each in line if not each.startswith("--save_freq")]
    assert client.get("command", login="writer", arguments=kept) == 0
    card = hub.repositories["model", "me/new"].files()["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["datasets"] == ["me/circles"]
    assert (head["license"], head["pipeline_tag"], "base_model" in head) == ("apache-2.0", "robotics", False)
    assert head["tags"] == ["robotics", "lerobot", "pi0_fast", "circles"]
    assert "- Dataset: [me/circles](https://huggingface.co/datasets/me/circles)" in card
    assert "- Training: 4 steps of 3 frames" in card
    assert "held-out frames, mean absolute, in the data's units:\n\n| dimension | generated |" in card
    assert client.get("load_policy", source="me/new")["fingerprints"]


def test_a_repository_of_something_else_is_not_overwritten(hub: Hub, client: Client, saved: Path) -> None:
    repository = hub.add("me/bert", files={"config.json": b"{}", "model.safetensors": b"weights"})
    message = client.error("push_policy", login="writer", source=str(saved), repo_id="me/bert")
    assert "me/bert holds something else (config.json, model.safetensors but no policy_preprocessor.json" in message
    assert repository.files()["model.safetensors"] == b"weights"
    message = client.error("push_policy", login="other", source=str(saved), repo_id="me/new")
    assert "cannot create me/new" in message
    assert hub.asked("^POST") == []
    assert client.get("check_policy", login="writer", repo_id="new")["repo_id"] == "me/new"
    assert client.get("push_policy", login="writer", source=str(saved), repo_id="new", private=True)
    assert hub.repositories["model", "me/new"].private
