"""Pushing to and loading from a hub of our own on 127.0.0.1, through the real huggingface_hub in a process of its own.

Runs with the installed huggingface_hub, and with those of the environments that PI0_FAST_INTEROP names (hub-0.36, made
by make_environments.py when it is not there).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from make_environments import HUBS, make_environment

from hub_server import Hub, serve
from pi0_fast import FastTokenizer, TokenizerTrainingConfig, train_tokenizer
from pi0_fast.actions.directory import FILE_NAMES
from pi0_fast.data import LeRobotWriter
from pi0_fast.types import Feature

WANTED = [name for name in os.environ.get("PI0_FAST_INTEROP", "").split(",") if name.strip() in HUBS]
CLIENT = Path(__file__).resolve().parents[1] / "hub_client.py"
SECONDS = 600  # the most that one request may take, kernels compiled for the first time included


class Client:
    """A process of hub_client.py that talks to one address."""

    def __init__(self, python: str, address: str, home: Path, **variables: str) -> None:
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        environment = {
            **keep,
            "HOME": str(home),
            "HF_HOME": str(home / "huggingface"),
            "HF_ENDPOINT": address,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
            **variables,
        }
        self._begin = partial(
            subprocess.Popen,
            [python, str(CLIENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / "client.err").open("w+"),
            text=True,
            env=environment,
            cwd=home,
        )
        self.errors = self._begin.keywords["stderr"]
        self.process = self._begin()

    def ask(self, call: str, *, login: str | None = None, **arguments: Any) -> dict[str, Any]:
        """The answer to one request, whatever it is."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"call": call, "login": login, "arguments": arguments}), file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.errors.seek(0)
            said = self.errors.read()[-2000:]
            self.process.kill()  # a late answer is not to be taken for that to the next request
            self.process.communicate(timeout=30)
            self.process = self._begin()
            pytest.fail(f"{call} gave no answer: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def get(self, call: str, **arguments: Any) -> Any:
        """The result of a request that must succeed."""
        answer = self.ask(call, **arguments)
        assert answer["error"] is None, answer
        return answer["result"]

    def error(self, call: str, **arguments: Any) -> str:
        """The one line of a request that must fail."""
        answer = self.ask(call, **arguments)
        assert answer["error"] is not None, answer
        message: str = answer["error"][1]
        assert "\n" not in message
        return message

    def command(self, *arguments: str, login: str | None = None) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command line."""
        answer = self.ask("command", login=login, arguments=list(arguments))
        return answer["result"], answer["out"], answer["err"]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate(timeout=30)
        self.errors.close()


@pytest.fixture(
    scope="module", params=["installed", *(pytest.param(name, marks=pytest.mark.interop) for name in WANTED)]
)
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter with pi0-fast and some huggingface_hub."""
    return sys.executable if request.param == "installed" else str(make_environment(request.param))


@pytest.fixture(scope="module")
def served(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Client]]:
    """A hub, and a client of it."""
    with serve() as hub:
        client = Client(python, hub.url, tmp_path_factory.mktemp("home"))
        yield hub, client
        client.close()


@pytest.fixture
def client(served: tuple[Hub, Client]) -> Client:
    return served[1]


@pytest.fixture
def hub(served: tuple[Hub, Client]) -> Hub:
    """An empty hub with some users."""
    hub = served[0]
    url = hub.url
    hub.__init__()  # type: ignore[misc]
    hub.url = url
    hub.user("writer", "me", orgs={"lab": "write", "watchers": "read"})
    hub.user("reader", "me", role="read")
    hub.user("other", "you")
    return hub


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "walk"
    random = np.random.default_rng(0)
    feature = Feature("action", "float32", (2,), ("shoulder | pan", "grip\nper"))
    with LeRobotWriter(root, fps=10, features={"action": feature}) as writer:
        for length in (60, 45, 80):
            path = np.cumsum(random.normal(0, 0.05, (length, 2)), axis=0)
            writer.add_episode({"action": path.astype(np.float32)}, task="wander")
    return root


def fit_arguments(dataset: Path, output: Path, *more: str) -> list[str]:
    arguments = ["train-tokenizer", "--repo_id", "me/walk", "--root", str(dataset), "--output_dir", str(output)]
    return [*arguments, "--sample_fraction", "1.0", "--vocab_size", "256", *more]


@pytest.fixture(scope="module")
def saved(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fitted tokenizer, in a directory that holds other files too."""
    output = tmp_path_factory.mktemp("fit") / "my_tokenizer"
    train_tokenizer(
        TokenizerTrainingConfig(
            "me/walk", root=str(dataset), output_dir=str(output), sample_fraction=1.0, vocab_size=256
        )
    )
    (output / "notes.txt").write_text("mine")
    (output / "secret.json").write_text("{}")
    return output


def names_of(files: dict[str, bytes]) -> set[str]:
    return set(files) - {".gitattributes"}


PUSHED = {*FILE_NAMES, "README.md"}


def test_the_environment_has_the_hub_it_is_named_after(client: Client, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["python"]
    if name != "installed":
        assert client.get("version").startswith(name.removeprefix("hub-") + ".")


# --- pushing a tokenizer ------------------------------------------------------------------------------------------


def test_push_makes_a_repository_with_the_tokenizers_files_and_a_card(hub: Hub, client: Client, saved: Path) -> None:
    address = client.get("push", login="writer", source=str(saved), repo_id="tok")
    repository = hub.repositories["model", "me/tok"]
    assert address == f"{hub.url}/me/tok/commit/{repository.branches['main']}"
    assert not repository.private
    assert repository.messages == ["initial commit", "Upload FAST tokenizer"]
    files = repository.files()
    assert names_of(files) == PUSHED
    for name in PUSHED - {"README.md", "vocabulary.txt"}:  # whose counts only the fit knows
        assert files[name] == (saved / name).read_bytes(), name
    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "pi0-fast",
        "tags": ["robotics", "FAST", "LeRobot"],
    }
    assert 'from_pretrained("me/tok")' in card
    assert "shoulder \\| pan" in card


def test_what_was_pushed_loads_by_its_name_and_is_equal(hub: Hub, client: Client, saved: Path, tmp_path: Path) -> None:
    client.get("push", login="writer", source=str(saved), repo_id="me/tok", private=True)
    assert hub.repositories["model", "me/tok"].private
    original = FastTokenizer.from_pretrained(saved)
    cache = str(tmp_path)
    found = client.get("load", source="me/tok", token="writer", cache_dir=cache)
    assert found == {"fingerprint": original.fingerprint, "metadata": original.metadata}
    assert original.metadata is not None
    again = client.get("load", source="me/tok", local_files_only=True, cache_dir=cache)
    assert again["fingerprint"] == original.fingerprint
    for token in ({}, {"token": "other"}):
        message = client.error("load", source="me/tok", cache_dir=str(tmp_path / "empty"), **token)
        assert "no model me/tok" in message
        assert f"check the name on {hub.url}/me/tok" in message
    message = client.error("load", source="me/tok", token="forged", cache_dir=str(tmp_path / "empty"))
    assert "401" in message


def test_branches_and_revisions(hub: Hub, client: Client, saved: Path, tmp_path: Path) -> None:
    hub.add("me/tok")
    for _ in range(2):  # the branch is made, then it is there
        client.get("push", login="writer", source=str(saved), repo_id="me/tok", revision="v2")
    repository = hub.repositories["model", "me/tok"]
    assert names_of(repository.files("main")) == set()
    assert names_of(repository.files("v2")) == PUSHED
    assert len(repository.commits) == 2  # the second push changed nothing
    cache = str(tmp_path)
    fingerprint = FastTokenizer.from_pretrained(saved).fingerprint
    for revision in ("v2", repository.branches["v2"]):
        found = client.get("load", source="me/tok", revision=revision, cache_dir=cache)
        assert found["fingerprint"] == fingerprint
    message = client.error("load", source="me/tok", revision="v3", cache_dir=cache)
    assert "no revision 'v3'" in message


def test_large_files_go_by_the_lfs_protocol(hub: Hub, client: Client, saved: Path, tmp_path: Path) -> None:
    hub.lfs_suffixes = ("/tokenizer.json", "vocabulary.txt")
    client.get("push", login="writer", source=str(saved), repo_id="me/tok")
    assert len(hub.asked("^PUT /lfs/")) == 2
    files = hub.repositories["model", "me/tok"].files()
    assert files["bpe_tokenizer/tokenizer.json"] == (saved / "bpe_tokenizer/tokenizer.json").read_bytes()
    found = client.get("load", source="me/tok", cache_dir=str(tmp_path))
    assert found["fingerprint"] == FastTokenizer.from_pretrained(saved).fingerprint


def test_an_existing_tokenizer_is_replaced_whole_and_other_files_stay(
    hub: Hub, client: Client, saved: Path, tmp_path: Path
) -> None:
    """A normalizer.json of the old tokenizer must not be read as that of the new one."""
    hub.add("lab/tok", files={"plots/a.png": b"png"})
    client.get("push", login="writer", source=str(saved), repo_id="lab/tok")
    bare = FastTokenizer.fit(np.zeros((4, 5, 2), np.float32))
    bare.save_pretrained(tmp_path / "bare")
    client.get("push", login="writer", source=str(tmp_path / "bare"), repo_id="lab/tok", commit_message="bare")
    repository = hub.repositories["model", "lab/tok"]
    assert names_of(repository.files()) == {"plots/a.png", *PUSHED} - {"normalizer.json", "metadata.json"}
    assert repository.messages[-1] == "bare"


def test_a_repository_of_something_else_is_not_overwritten(hub: Hub, client: Client, saved: Path) -> None:
    repository = hub.add("me/policy", files={"config.json": b"{}", "model.safetensors": b"weights"})
    message = client.error("push", login="writer", source=str(saved), repo_id="me/policy")
    assert "me/policy holds something else (config.json but no processing_action_tokenizer.py or " in message
    assert repository.files()["config.json"] == b"{}"
    assert hub.asked("^POST") == []
    # What transformers 5 saved of a FAST tokenizer, without its code, is one.
    hub.add("me/tok", files={"processor_config.json": b"{}", "bpe_tokenizer/tokenizer.json": b"{}"})
    assert client.get("check", login="writer", repo_id="me/tok")["exists"]


# --- who may --------------------------------------------------------------------------------------------------------


def test_the_check_changes_nothing_and_says_what_it_found(hub: Hub, client: Client) -> None:
    hub.add("lab/open")
    hub.add("me/closed", private=True)
    hub.add("you/shared", writers={"me"})
    new = {"exists": False, "private": None, "doubt": None}
    assert client.get("check", login="writer", repo_id="tok") == {"repo_id": "me/tok", **new}
    assert client.get("check", login="writer", repo_id="lab/tok") == {"repo_id": "lab/tok", **new}
    assert client.get("check", repo_id="me/tok", token="writer", private=True)["private"] is True
    found = {"exists": True, "private": False, "doubt": None}
    assert client.get("check", login="writer", repo_id="lab/open") == {"repo_id": "lab/open", **found}
    assert client.get("check", login="writer", repo_id="you/shared")["exists"]  # of another, but they may write
    assert client.get("check", login="writer", repo_id="me/closed", private=True)["private"] is True
    assert hub.asked("^POST") == []
    hub.knows_write_check = False
    assert "does not tell" in client.get("check", login="writer", repo_id="lab/open")["doubt"]


@pytest.mark.parametrize(
    ("login", "named", "words"),
    [
        (None, {"repo_id": "me/tok"}, ["needs a token", "hf auth login", "HF_TOKEN"]),
        ("forged", {"repo_id": "me/tok"}, ["HTTP 401", "does not accept this token", "hf auth login"]),
        ("reader", {"repo_id": "me/tok"}, ["may only read", "write access", "/settings/tokens"]),
        ("reader", {"repo_id": "me/mine"}, ["may only read"]),
        ("writer", {"repo_id": "you/tok"}, ["me, whose token this is, cannot create you/tok", "me, lab, watchers"]),
        ("writer", {"repo_id": "watchers/tok"}, ["only read access in watchers"]),
        ("writer", {"repo_id": "you/theirs"}, ["may not write to you/theirs", "HTTP 403", "required permissions"]),
        ("writer", {"repo_id": "me/mine", "private": True}, ["me/mine exists and is public", "/me/mine/settings"]),
        ("writer", {"repo_id": "a/b/c"}, ["'a/b/c'", "owner/name"]),
        ("writer", {"repo_id": "me/a--b"}, ["'me/a--b'", "owner/name"]),
        ("writer", {"repo_id": ""}, ["''", "owner/name"]),
    ],
)
def test_a_push_that_would_fail_is_refused_with_the_way_out(
    hub: Hub, client: Client, login: str | None, named: dict[str, Any], words: list[str]
) -> None:
    hub.add("me/mine")
    hub.add("you/theirs")
    message = client.error("check", login=login, **named)
    assert [word for word in words if word not in message] == [], message
    assert hub.asked("^POST") == []


def test_tokens_with_permissions_one_by_one(hub: Hub, client: Client) -> None:
    token = hub.user("fine", "me", role="fineGrained", orgs={"lab": "admin"})["auth"]["accessToken"]

    def scoped(entity: str, *permissions: str) -> dict[str, Any]:
        return {"entity": {"type": "user", "name": entity}, "permissions": list(permissions)}

    token["fineGrained"] = {"global": [], "scoped": [scoped("lab", "repo.content.read", "repo.write")]}
    assert client.get("check", login="fine", repo_id="lab/tok")["doubt"] is None
    message = client.error("check", login="fine", repo_id="me/tok")
    assert "may not write to the repositories of me" in message
    for unknown in ({"scoped": [{"who": "me"}]}, {}, {"scoped": "me"}):
        token["fineGrained"] = unknown
        assert "fine-grained" in client.get("check", login="fine", repo_id="me/tok")["doubt"]
    del token["fineGrained"]
    assert "does not say" in client.get("check", login="fine", repo_id="me/tok")["doubt"]


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["switched off", "nobody there"])
def test_no_network(python: str, tmp_path: Path, variables: dict[str, str]) -> None:
    client = Client(python, "http://127.0.0.1:9", tmp_path, **variables)
    try:
        message = client.error("check", login="writer", repo_id="me/tok")
    finally:
        client.close()
    if variables:
        assert "switched off (HF_HUB_OFFLINE)" in message
    else:
        assert "http://127.0.0.1:9 cannot be reached" in message


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_fits_saves_and_pushes(hub: Hub, client: Client, dataset: Path, tmp_path: Path) -> None:
    hub.add("me/walk", kind="dataset", private=True)
    output = tmp_path / "arm_tokenizer"
    flags = ["--push_to_hub=true", "--hub_private=true"]
    status, out, err = client.command(*fit_arguments(dataset, output, *flags), login="writer")
    assert status == 0, err
    assert out.startswith("push           to me/arm_tokenizer (new, private)\n")
    repository = hub.repositories["model", "me/arm_tokenizer"]
    assert f"pushed to {hub.url}/me/arm_tokenizer/commit/{repository.branches['main']}\n" in out
    assert repository.private
    files = repository.files()
    assert names_of(files) == PUSHED
    for name in PUSHED - {"README.md"}:
        assert files[name] == (output / name).read_bytes(), name
    assert not (output / "README.md").exists()
    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["me/walk"]
    held = json.loads(files["metadata.json"])["held_out"]
    for dim in range(2):
        assert f" {held['rmse'][dim]:.4g} | {held['worst'][dim]:.4g} |" in card


@pytest.mark.parametrize(
    ("login", "flags", "message"),
    [
        ("forged", ["--hub_repo_id=me/tok"], "does not accept this token for me/tok (HTTP 401"),
        ("writer", ["--hub_repo_id=you/theirs"], "this token may not write to you/theirs (HTTP 403"),
        ("reader", [], "may only read"),
        (None, [], "needs a token"),
    ],
)
def test_without_write_access_the_fit_does_not_start(
    hub: Hub, client: Client, tmp_path: Path, login: str | None, flags: list[str], message: str
) -> None:
    """Not even the dataset is looked at, which is not there."""
    hub.add("you/theirs")
    arguments = fit_arguments(tmp_path / "no_dataset", tmp_path / "out", "--push_to_hub=true", *flags)
    status, out, err = client.command(*arguments, login=login)
    assert (status, out) == (1, "")
    assert err.startswith("pi0-fast: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "out").exists()
    assert hub.asked("^POST") == []


def test_a_failed_fit_leaves_nothing_on_the_hub(hub: Hub, client: Client, tmp_path: Path) -> None:
    arguments = fit_arguments(tmp_path / "no_dataset", tmp_path / "out", "--push_to_hub=true")
    status, out, err = client.command(*arguments, login="writer")
    assert status == 1
    assert "no_dataset is not a directory" in err
    assert out == "push           to me/out (new)\n"
    assert hub.repositories == {}


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (("POST", "/commit/", 500), ["HTTP 500", "the repository me/out was created and is empty"]),
        (("POST", "/repos/create", 403), ["may not write to me/out (HTTP 403"]),
    ],
)
def test_when_the_push_fails_the_result_is_kept_and_can_be_pushed_later(
    hub: Hub, client: Client, dataset: Path, tmp_path: Path, failure: tuple[str, str, int], words: list[str]
) -> None:
    method, path, status_code = failure
    hub.failures[method, path] = (status_code, {})
    output = tmp_path / "out"
    status, out, err = client.command(*fit_arguments(dataset, output, "--push_to_hub=true"), login="writer")
    assert status == 1
    assert f"saved to {output}" in out
    line = err.splitlines()[-1]
    assert [word for word in words if word not in line] == [], line
    later = f"FastTokenizer.from_pretrained('{output}').push_to_hub('me/out')"
    assert later in line
    original = FastTokenizer.from_pretrained(output)
    hub.failures.clear()
    client.get("push", login="writer", source=str(output), repo_id="me/out")
    files = hub.repositories["model", "me/out"].files()
    assert json.loads(files["metadata.json"]) == original.metadata


# --- datasets from the hub ------------------------------------------------------------------------------------------


@pytest.fixture
def published(hub: Hub, dataset: Path) -> Hub:
    files = {str(path.relative_to(dataset)): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    hub.add("me/walk", kind="dataset", files={**files, "videos/top/file-000.mp4": b"film"})
    return hub


def test_a_dataset_is_read_from_the_hub_without_its_videos(published: Hub, client: Client, tmp_path: Path) -> None:
    repository = published.repositories["dataset", "me/walk"]
    found = client.get("dataset", repo_id="me/walk", cache_dir=str(tmp_path))
    assert found == {"lengths": [60, 45, 80], "revision": repository.branches["main"]}
    assert published.asked(r"/resolve/.*data/chunk")
    assert published.asked(r"/resolve/.*videos") == []
    repository.private = True
    assert client.get("dataset", repo_id="me/walk", token="writer", cache_dir=str(tmp_path / "b")) == found
    assert "401" in client.error("dataset", repo_id="me/walk", token="forged", cache_dir=str(tmp_path / "c"))


@pytest.mark.parametrize("login", [None, "other"])
def test_a_gated_dataset_names_its_page(published: Hub, client: Client, tmp_path: Path, login: str | None) -> None:
    published.repositories["dataset", "me/walk"].gated = True
    message = client.error("dataset", login=login, repo_id="me/walk", cache_dir=str(tmp_path))
    status = 403 if login else 401
    assert f"is gated (HTTP {status}): accept its conditions on {published.url}/datasets/me/walk" in message
    assert "hf auth login" in message


def test_a_dataset_that_the_hub_refuses(published: Hub, client: Client, tmp_path: Path) -> None:
    published.failures["GET", "/api/datasets/me/walk"] = (403, {})
    message = client.error("dataset", login="other", repo_id="me/walk", cache_dir=str(tmp_path))
    assert "refused access to me/walk (HTTP 403)" in message
    assert f"{published.url}/datasets/me/walk" in message


def test_the_server_stops_when_it_is_left() -> None:
    before = threading.active_count()
    with serve():
        assert threading.active_count() > before
    assert threading.active_count() == before
