"""A policy's checkpoint directory: saved and loaded, replaced whole, damaged, mixed, overridden."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file as load_arrays  # noqa: E402
from safetensors.numpy import save_file as save_arrays  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from pi0_fast import FastTokenizer, checkpoint, swap  # noqa: E402
from pi0_fast.model import weights  # noqa: E402
from pi0_fast.model.architecture import Architecture, VisionSizes  # noqa: E402
from pi0_fast.model.paligemma import PaliGemma  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.text_tokenizer import TinyTextTokenizer  # noqa: E402
from pi0_fast.types import PolicyError, TokenizerError  # noqa: E402
from tiny_policies import (  # noqa: E402
    ACTION,
    CAMERAS,
    HORIZON,
    action_tokenizer,
    batch_of,
    new_policy,
    published_tokenizer,
    settings,
    sizes,
    statistics,
    text_tokenizer,
)

CHECKPOINTS = ["lerobot_checkpoint", "lerobot_checkpoint_relative"]
WRITTEN = {
    "config.json",
    "pi0_fast.json",
    "model.safetensors",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_3_normalizer_processor.safetensors",
    "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    "tokenizers",
}
HEAD, TABLE = weights.foreign_name(weights.HEAD), weights.foreign_name(weights.TABLE)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "policy"
    new_policy().save_pretrained(folder)
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A saved policy, to be damaged."""
    return Path(shutil.copytree(saved_once, tmp_path / "policy"))


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def chunk_of(policy: PI0FastPolicy) -> Any:
    return policy.predict_action_chunk(batch_of(actions=False))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of model.safetensors and keep its header."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata)


# --- there and back ---------------------------------------------------------------------------------------------------


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two cameras, bfloat16": {"cameras": 2, "dtype": "bfloat16"},
    "relative": {
        "use_relative_actions": True,
        "relative_exclude_joints": ["b"],
        "action_feature_names": ["a", "b", "c"],
        "tokenizer": "published",
    },
    "openpi": {
        "prompt_format": "openpi",
        "position_gap": 1,
        "count_padding_in_positions": True,
        "assume_contiguous_prefix": True,
    },
    "free": {"constrained": False, "validate_action_token_prefix": False},
}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_policy_loads_as_it_was(tmp_path: Path, case: str) -> None:
    changes = dict(CASES[case])
    if changes.pop("tokenizer", None):
        changes["tokenizer"] = published_tokenizer()
    policy = new_policy(3, **changes)
    policy.save_pretrained(tmp_path / "out")
    assert names_in(tmp_path / "out") == WRITTEN
    again = PI0FastPolicy.from_pretrained(tmp_path / "out")
    assert again.config == policy.config
    assert again.checkpoint().fingerprints() == policy.checkpoint().fingerprints()
    assert not again.training
    for (name, one), (other_name, other) in zip(policy.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other_name
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    batch = batch_of(cameras=changes.get("cameras", 1))
    assert torch.equal(again.predict_action_chunk(batch), policy.predict_action_chunk(batch))
    assert torch.equal(again(batch)[0], policy(batch)[0])


def test_saving_what_was_loaded_writes_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    PI0FastPolicy.from_pretrained(saved).save_pretrained(tmp_path / "again")
    files = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*.*"))
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (saved / file).read_bytes(), file


def test_in_shards(saved: Path, tmp_path: Path) -> None:
    policy = PI0FastPolicy.from_pretrained(saved)
    policy.save_pretrained(tmp_path / "out", max_shard_bytes=100_000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert torch.equal(chunk_of(PI0FastPolicy.from_pretrained(tmp_path / "out")), chunk_of(policy))
    shutil.copytree(tmp_path / "out", tmp_path / "mixed")
    TinyTextTokenizer(1030).save(tmp_path / "mixed" / "tokenizers" / "text")
    with pytest.raises(PolicyError, match="text tokenizer has the fingerprint"):
        PI0FastPolicy.from_pretrained(tmp_path / "mixed")
    # One file takes the place of many, and the other way round: nothing of the old checkpoint may be left to be read.
    policy.save_pretrained(tmp_path / "out")
    assert names_in(tmp_path / "out") == WRITTEN
    shards[1].touch()  # a stray file is not looked at
    assert torch.equal(chunk_of(PI0FastPolicy.from_pretrained(tmp_path / "out")), chunk_of(policy))
    policy.save_pretrained(tmp_path / "out", max_shard_bytes=100_000)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_both_keys_of_a_shared_head_are_written_and_it_stays_shared(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    assert torch.equal(tensors[HEAD], tensors[TABLE])
    assert PI0FastPolicy.from_pretrained(saved).model.tied_head
    edit_weights(saved, lambda tensors: tensors[HEAD].add_(0.5))
    separate = PI0FastPolicy.from_pretrained(saved)
    assert not separate.model.tied_head
    separate.save_pretrained(saved)
    assert not PI0FastPolicy.from_pretrained(saved).model.tied_head


@pytest.mark.parametrize("key", [HEAD, TABLE])
def test_one_key_of_the_head_is_enough(saved: Path, key: str) -> None:
    expected = chunk_of(PI0FastPolicy.from_pretrained(saved))
    edit_weights(saved, lambda tensors: tensors.pop(key))
    policy = PI0FastPolicy.from_pretrained(saved)
    assert policy.model.tied_head
    assert torch.equal(chunk_of(policy), expected)


# --- what a saved directory names -------------------------------------------------------------------------------------


def test_what_was_given_is_named_as_the_checkpoints_own_copy(saved: Path) -> None:
    """Not as the default on the hub, from which lerobot would take another tokenizer."""
    config = json.loads((saved / "config.json").read_text())
    assert config["action_tokenizer_name"] == "tokenizers/action"
    assert config["text_tokenizer_name"] == "tokenizers/text"
    steps = json.loads((saved / "policy_preprocessor.json").read_text())["steps"]
    found = {key: value for step in steps for key, value in step["config"].items() if key.endswith("tokenizer_name")}
    assert found == {"action_tokenizer_name": "tokenizers/action", "tokenizer_name": "tokenizers/text"}


def test_local_tokenizers_are_copied_and_renamed(tmp_path: Path) -> None:
    action_tokenizer().save_pretrained(tmp_path / "fast")
    text_tokenizer().save(tmp_path / "text")
    config = settings(action_tokenizer_name=str(tmp_path / "fast"), text_tokenizer_name=str(tmp_path / "text"))
    policy = PI0FastPolicy.create(config, statistics(), architecture=sizes())
    expected = chunk_of(policy)
    policy.save_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "fast")
    shutil.rmtree(tmp_path / "text")
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    again = PI0FastPolicy.from_pretrained(tmp_path / "out")
    assert again.config.action_tokenizer_name == "tokenizers/action"
    assert torch.equal(chunk_of(again), expected)


def test_the_built_in_text_tokenizer_by_its_name(tmp_path: Path) -> None:
    config = settings(text_tokenizer_name="byte")
    architecture = Architecture(VisionSizes(16, 1, 2, 32, 28, 14), replace(sizes().text, vocab_size=4096))
    policy = PI0FastPolicy.create(config, statistics(), architecture=architecture, action_tokenizer=action_tokenizer())
    policy.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_tokenizer_name"] == "tokenizers/text"
    assert torch.equal(chunk_of(PI0FastPolicy.from_pretrained(tmp_path / "out")), chunk_of(policy))


def test_a_hub_name_stays_where_the_tokenizer_came_from_the_hub(saved: Path, tmp_path: Path) -> None:
    """The copy in the checkpoint is read; lerobot goes by the name."""
    edit(saved / "config.json", lambda c: c.update(action_tokenizer_name="lerobot/fast-action-tokenizer"))
    edit(
        saved / "policy_preprocessor.json",
        lambda c: c["steps"][6]["config"].update(action_tokenizer_name="lerobot/fast-action-tokenizer"),
    )
    policy = PI0FastPolicy.from_pretrained(saved)
    assert policy.config.action_tokenizer_name == "lerobot/fast-action-tokenizer"
    policy.save_pretrained(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["action_tokenizer_name"] == "lerobot/fast-action-tokenizer"


@pytest.mark.golden
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_lerobots_checkpoint_becomes_a_whole_one(shared: Path, tmp_path: Path, name: str) -> None:
    """Saved here it needs no architecture= any more, and gives lerobot's recorded chunk."""
    folder = shared / "golden" / name
    policy = PI0FastPolicy.from_pretrained(folder, architecture=folder / "architecture.json")
    policy.save_pretrained(tmp_path / "out")
    again = PI0FastPolicy.from_pretrained(tmp_path / "out")
    vectors = load_file(folder / "vectors.safetensors")
    batch: dict[str, Any] = {key: value for key, value in vectors.items() if key.startswith("observation.")}
    batch["task"] = json.loads((folder / "tasks.json").read_text())
    assert float((again.predict_action_chunk(batch) - vectors["chunk"]).abs().max()) < 1e-4
    assert not again.config.state_clip
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(ours) == {key if key.startswith("model.") else f"model.{key}" for key in theirs} | {HEAD, TABLE}


def test_a_published_tokenizer_is_saved_with_the_policys_own_shape(tmp_path: Path) -> None:
    """lerobot's training refuses chunks of another shape than the saved tokenizer names."""
    other = FastTokenizer(action_tokenizer().vocabulary, scale=20.0, time_horizon=50, action_dim=14)
    policy = new_policy(tokenizer=other)
    policy.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "tokenizers" / "action" / "processor_config.json").read_text())
    assert (saved["time_horizon"], saved["action_dim"]) == (HORIZON, ACTION)
    other.save_pretrained(tmp_path / "original")
    name = str(tmp_path / "original")  # bound to the same chunks it is the same tokenizer
    again = PI0FastPolicy.from_pretrained(tmp_path / "out", overrides={"action_tokenizer_name": name})
    assert torch.equal(chunk_of(again), chunk_of(policy))


# --- replacing --------------------------------------------------------------------------------------------------------


def test_saving_over_a_directory_keeps_files_of_others(saved: Path) -> None:
    others = ["notes.txt", "model_of_mine.safetensors", "checkpoints/0001/state.bin", "tokenizers/mine/vocab.txt"]
    for name in others:
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_text(name)
    (saved / "tokenizers" / "action" / "stale.json").write_text("{}")
    policy = new_policy(5)
    policy.save_pretrained(saved)
    assert all((saved / name).read_text() == name for name in others)
    assert not (saved / "tokenizers" / "action" / "stale.json").exists()
    assert torch.equal(chunk_of(PI0FastPolicy.from_pretrained(saved)), chunk_of(policy))
    assert names_in(saved.parent) == {"policy"}


@pytest.mark.parametrize("failing", ["write_config", "write_processors", "weights.save"])
def test_a_failure_in_the_middle_leaves_the_old_one_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    owner, name = (weights, "save") if failing == "weights.save" else (checkpoint, failing)
    real = getattr(owner, name)

    def fail(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="No space left"):
        new_policy(5).save_pretrained(saved)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    assert names_in(saved.parent) == {"policy"}


@pytest.mark.parametrize("times", [1, 2, 99])
@pytest.mark.parametrize("moment", ["read_processors", "load_text_tokenizer", "load"])
def test_a_checkpoint_that_is_replaced_while_it_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch, moment: str, times: int
) -> None:
    """As an evaluation does that loads the newest checkpoint of a training run: one of them, never some of each."""
    place = weights if moment == "load" else checkpoint
    read, saves = getattr(place, moment), []

    def slow(*arguments: Any, **options: Any) -> Any:
        result = read(*arguments, **options)
        if len(saves) < times:
            saves.append(new_policy(1 + len(saves)))
            saves[-1].save_pretrained(saved)
        return result

    monkeypatch.setattr(place, moment, slow)
    monkeypatch.setattr(checkpoint, "_READ_PAUSE", 0.0)
    if times == 99:
        with pytest.raises(PolicyError, match="is replaced again and again"):
            PI0FastPolicy.from_pretrained(saved)
        return
    loaded = PI0FastPolicy.from_pretrained(saved)
    assert torch.equal(loaded.model.embed_tokens.weight, saves[-1].model.embed_tokens.weight)


@pytest.mark.parametrize("times", [1, 99])
def test_a_shard_that_goes_while_it_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    new_policy(1).save_pretrained(saved, max_shard_bytes=20_000)
    survey, saves = weights._survey, []

    def slow(files: Any) -> Any:
        found = survey(files)
        if len(saves) < times:
            saves.append(new_policy(2 + len(saves)))
            saves[-1].save_pretrained(saved, max_shard_bytes=None if len(saves) % 2 else 20_000)
        return found

    monkeypatch.setattr(weights, "_survey", slow)
    monkeypatch.setattr(checkpoint, "_READ_PAUSE", 0.0)
    if times == 99:
        with pytest.raises(PolicyError, match="is replaced again and again"):
            PI0FastPolicy.from_pretrained(saved)
        return
    loaded = PI0FastPolicy.from_pretrained(saved)
    assert torch.equal(loaded.model.embed_tokens.weight, saves[-1].model.embed_tokens.weight)


def test_a_writer_killed_between_two_renames(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next reader finishes its work; nothing of the old checkpoint may come along, least of all its weights."""
    (saved / "notes.txt").write_text("mine")
    new = new_policy(5)

    class Killed(BaseException):
        pass

    real = swap._rename_unless_done

    def kill(new: Path, target: Path) -> None:
        if target == saved:
            raise Killed
        real(new, target)

    monkeypatch.setattr(swap, "_rename_unless_done", kill)
    with pytest.raises(Killed):
        new.save_pretrained(saved, max_shard_bytes=100_000)
    monkeypatch.undo()
    assert not saved.exists()
    policy = PI0FastPolicy.from_pretrained(saved)
    assert torch.equal(chunk_of(policy), chunk_of(new))
    assert (saved / "notes.txt").read_text() == "mine"
    assert not (saved / "model.safetensors").exists()
    assert names_in(tmp_path) == {"policy"}


def test_places_that_are_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        new_policy().save_pretrained(tmp_path / "file")
    with pytest.raises(PolicyError, match="is a file: give the directory"):
        PI0FastPolicy.from_pretrained(tmp_path / "file")
    for name in (tmp_path / "none", str(tmp_path / "none"), "none", "a/b/c"):
        with pytest.raises(PolicyError, match=r"no checkpoint directory at .* is no hub id"):
            PI0FastPolicy.from_pretrained(name)


@pytest.mark.parametrize("depth", ["run", "run/checkpoints", "run/checkpoints/000020"])
def test_a_runs_directory_names_the_policy_in_it(saved: Path, tmp_path: Path, depth: str) -> None:
    steps = tmp_path / "run" / "checkpoints"
    for step in ("000003", "000020"):
        shutil.copytree(saved, steps / step / "pretrained_model")
    place = steps / "000020" / "pretrained_model"
    with pytest.raises(PolicyError, match=f"belongs to a training run .*: give {place}$"):
        PI0FastPolicy.from_pretrained(tmp_path / depth)
    (steps / "last").symlink_to("000003")  # where it leads is the newest one
    if depth != "run/checkpoints/000020":
        place = steps / "last" / "pretrained_model"
    with pytest.raises(PolicyError, match=f"give {place}$"):
        PI0FastPolicy.from_pretrained(tmp_path / depth)
    PI0FastPolicy.from_pretrained(place)


def test_a_run_that_has_saved_nothing(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(PolicyError, match="a training run that has saved no checkpoint yet"):
        PI0FastPolicy.from_pretrained(tmp_path / "run")


# --- damaged and mixed ------------------------------------------------------------------------------------------------


def exchange_text(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizers" / "text")
    TinyTextTokenizer(1023).save(folder / "tokenizers" / "text")


def exchange_action(folder: Path) -> None:
    other = FastTokenizer.fit(np.random.default_rng(0).normal(0, 0.3, (50, HORIZON, ACTION)))
    other.save_pretrained(folder / "tokenizers" / "action")


def exchange_statistics(folder: Path, key: str = "observation.state") -> None:
    for path in folder.glob("policy_*.safetensors"):
        arrays = load_arrays(path)
        arrays[f"{key}.q99"] = arrays[f"{key}.q99"] + np.float32(0.25)
        save_arrays(arrays, path)


MIXTURES: list[tuple[Callable[[Path], Any], list[str]]] = [
    (exchange_text, ["the text tokenizer has the fingerprint", "tokenizers/text", "text_tokenizer="]),
    (exchange_action, ["the action tokenizer has the fingerprint", "tokenizers/action", "action_tokenizer="]),
    (exchange_statistics, ["the normalization has the fingerprint", "policy_preprocessor.json", "statistics="]),
]


@pytest.mark.parametrize(("exchange", "words"), MIXTURES, ids=["text", "action", "statistics"])
def test_parts_of_another_checkpoint_are_refused(
    saved: Path, exchange: Callable[[Path], Any], words: list[str]
) -> None:
    exchange(saved)
    with pytest.raises(PolicyError) as raised:
        PI0FastPolicy.from_pretrained(saved)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_other_parts_can_be_given_on_purpose(saved: Path, tmp_path: Path) -> None:
    """And the next checkpoint ties itself to them."""
    other = FastTokenizer.fit(np.random.default_rng(0).normal(0, 0.3, (50, HORIZON, ACTION)))
    given = statistics()
    given["observation.state"] = given["action"]
    with pytest.raises(PolicyError, match=r"4 dimensions .* its statistics have 3"):
        PI0FastPolicy.from_pretrained(saved, statistics=given)
    shifted = {**statistics(), "observation.state": {"min": [-9] * 4, "max": [9] * 4, "q01": [-8] * 4, "q99": [8] * 4}}
    policy = PI0FastPolicy.from_pretrained(saved, statistics=shifted, action_tokenizer=other)
    assert policy.preparation.action_tokenizer == other
    assert policy.preparation.processors.state.statistics["q99"].tolist() == [8] * 4
    policy.save_pretrained(tmp_path / "out")
    again = PI0FastPolicy.from_pretrained(tmp_path / "out")
    assert again.checkpoint().fingerprints() == policy.checkpoint().fingerprints()
    assert torch.equal(chunk_of(again), chunk_of(policy))


NORM = weights.PREFIX + weights.NAMES["decoder.norm.weight"]
DAMAGES: list[tuple[Callable[[Path], Any], list[str]]] = [
    (lambda p: (p / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
    (lambda p: (p / "model.safetensors").write_bytes(b"\0" * 100), ["model.safetensors", "readable"]),
    (
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-100]),
        ["model.safetensors", "readable"],
    ),
    (lambda p: edit_weights(p, lambda t: t.pop(NORM)), ["1 keys missing", NORM]),
    (lambda p: edit_weights(p, lambda t: t.update({"model.more": torch.ones(1)})), ["1 unexpected", "model.more"]),
    (lambda p: edit_weights(p, lambda t: t.update({NORM: torch.ones(7)})), ["another shape", NORM, "[7]", "[32]"]),
    (lambda p: (p / "config.json").unlink(), ["config.json is missing"]),
    (lambda p: (p / "config.json").write_text("{"), ["config.json cannot be read"]),
    (lambda p: (p / "policy_preprocessor.json").unlink(), ["policy_preprocessor.json is missing"]),
    (lambda p: (p / "policy_postprocessor.json").unlink(), ["policy_postprocessor.json is missing"]),
    (lambda p: next(p.glob("policy_pre*.safetensors")).unlink(), ["policy_preprocessor_step_3", "is missing"]),
    (lambda p: next(p.glob("policy_pre*.safetensors")).write_bytes(b"x"), ["policy_preprocessor_step_3", "read"]),
    (lambda p: shutil.rmtree(p / "tokenizers" / "action"), ["tokenizers/action is no directory"]),
    (lambda p: shutil.rmtree(p / "tokenizers" / "text"), ["no text tokenizer at", "tokenizers/text"]),
    (lambda p: (p / "tokenizers" / "text" / "tokenizer.json").write_text("{}"), ["tokenizers/text", "tokenizer.json"]),
    (lambda p: edit(p / "pi0_fast.json", lambda c: c["details"].pop("architecture")), ["another shape"]),
    (
        lambda p: edit(p / "pi0_fast.json", lambda c: c["details"]["architecture"]["text"].update(head_dim=8)),
        ["another shape", "q_proj"],
    ),
    (lambda p: edit(p / "config.json", lambda c: c.update(chunk_size=5, n_action_steps=5)), ["chunk_size=5"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[" ".join(case[1][:1]) for case in DAMAGES])
def test_a_damaged_checkpoint_is_an_error_that_names_the_damage(
    saved: Path, damage: Callable[[Path], Any], words: list[str]
) -> None:
    """Never random weights, and never the network."""
    damage(saved)
    with pytest.raises((PolicyError, TokenizerError)) as raised:
        PI0FastPolicy.from_pretrained(saved)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_weights_may_only_be_missing_when_asked_for(saved: Path) -> None:
    edit_weights(saved, lambda tensors: tensors.pop(NORM))
    with pytest.warns(UserWarning, match=f"1 keys missing: {NORM}.*strict=False"):
        policy = PI0FastPolicy.from_pretrained(saved, strict=False)
    assert policy.model.decoder.norm.weight.tolist() == [0] * 32


@pytest.mark.parametrize("strict", [True, False])
def test_an_index_of_nothing(saved: Path, strict: bool) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(PolicyError, match=r"index\.json: damaged index: it names no weights"):
        PI0FastPolicy.from_pretrained(saved, strict=strict)


@pytest.mark.parametrize("place", ["../other", "/tmp", "", ".", 3, None, ["tokenizers/text"], "tokenizers/../../x"])
@pytest.mark.parametrize("kind", ["text_tokenizer", "action_tokenizer"])
def test_tokenizers_lie_within_the_checkpoint(saved: Path, kind: str, place: Any) -> None:
    edit(saved / "pi0_fast.json", lambda content: content["details"].update({kind: place}))
    with pytest.raises(PolicyError, match=r"pi0_fast\.json: .* is no place within the checkpoint"):
        PI0FastPolicy.from_pretrained(saved)


def test_statistics_that_are_no_numbers_are_named_with_their_dimension(saved: Path) -> None:
    for file in saved.glob("policy_*.safetensors"):
        arrays = load_arrays(file)
        arrays["action.q01"][1] = np.nan
        save_arrays(arrays, file)
    with pytest.raises(PolicyError, match=r"the statistic q01 of dimension 1.* is nan"):
        PI0FastPolicy.from_pretrained(saved)


def test_a_pickle_is_never_read(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(PolicyError, match=r"neither model\.safetensors nor"):
        PI0FastPolicy.from_pretrained(saved)


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_take_effect_and_are_saved(saved: Path, tmp_path: Path) -> None:
    policy = PI0FastPolicy.from_pretrained(saved, overrides={"n_action_steps": 2, "temperature": 0.5}, dtype="bfloat16")
    assert (policy.config.n_action_steps, policy.config.temperature) == (2, 0.5)
    assert policy.model.dtype == torch.bfloat16
    policy.save_pretrained(tmp_path / "out")
    again = PI0FastPolicy.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (again.config.n_action_steps, again.config.dtype) == (2, "float32")
    assert again.model.dtype == torch.float32


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"n_actoin_steps": 2}, ["no settings n_actoin_steps", "n_action_steps"]),
    ({"n_action_steps": 7}, ["n_action_steps (7", "chunk_size (6"]),
    ({"dtype": "float16"}, ["dtype", "float16", "bfloat16"]),
    ({"paligemma_variant": "gemma_300m"}, ["paligemma_variant='gemma_300m'", "pi0_fast.json"]),
    ({"use_relative_actions": True}, ["use_relative_actions", "cannot be overridden"]),
    ({"normalization_mapping": {"ACTION": "MEAN_STD"}}, ["normalization_mapping", "cannot be overridden"]),
    ({"output_features": {"action": {"type": "ACTION", "shape": [9]}}}, ["output_features", "cannot be overridden"]),
    ({"input_features": {}}, ["observation.state", "cannot be overridden"]),
    ({"image_resolution": (56, 56)}, ["image_resolution is (56, 56)", "28 x 28"]),
    ({"max_decoding_steps": 2}, ["max_decoding_steps=2 leaves", "action tokens"]),
    ({"max_decoding_steps": 5}, ["max_decoding_steps=5 leaves 1", "at least"]),
    ({"action_tokenizer_name": "no/where/at/all"}, ["no/where/at/all"]),
    ({"text_tokenizer_name": "no/where/at/all"}, ["no/where/at/all"]),
    ({"device": "gpu"}, ["'gpu'"]),
    ({"device": "cuda:77"}, ["'cuda:77'", "cannot be used"]),
    ({"fast_skip_tokens": 650}, ["fast_skip_tokens=650"]),
    ({"tokenizer_max_length": 0}, ["tokenizer_max_length"]),
]


#: Settings of what a policy makes of its inputs, each with a value that its default is not.
OF_INPUTS: dict[str, Any] = {
    "state_clip": False,
    "action_clip": False,
    "prompt_format": "openpi",
    "antialias_images": True,
    "attend_missing_cameras": True,
    "tokenizer_max_length": 3,
    "max_action_tokens": 3,
}


@pytest.mark.parametrize("name", OF_INPUTS)
def test_an_override_does_what_the_stored_setting_does(tmp_path: Path, name: str) -> None:
    """Saved and loaded, every part is made from the configuration; an override must reach the same parts."""

    def made(policy: PI0FastPolicy) -> Any:
        batch = batch_of(cameras=1)  # one of two is missing
        batch["observation.state"] = batch["observation.state"] - 100  # out of range, as are
        batch["action"] = 3 * batch["action"]
        batch[CAMERAS[0]] = np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), np.uint8)
        try:
            found = policy.preparation.training(batch)
        except PolicyError as error:
            return str(error)
        ids = np.where(found.prompt.valid, found.prompt.ids, -1)
        return ids.tolist(), found.images.tolist(), found.camera_valid.tolist(), found.counts

    two = new_policy(cameras=2)
    two.save_pretrained(tmp_path / "two")
    before = made(two)
    overridden = PI0FastPolicy.from_pretrained(tmp_path / "two", overrides={name: OF_INPUTS[name]})
    overridden.save_pretrained(tmp_path / "again")
    assert made(overridden) == made(PI0FastPolicy.from_pretrained(tmp_path / "again"))
    assert made(overridden) != before


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=[next(iter(case[0])) for case in REFUSED])
def test_overrides_that_cannot_be_are_errors(saved_once: Path, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((PolicyError, TokenizerError)) as raised:
        PI0FastPolicy.from_pretrained(saved_once, overrides=overrides)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_another_action_tokenizer_by_name(saved: Path, tmp_path: Path) -> None:
    """Effective (here: the same one, elsewhere), or an error that names the mixture."""
    action_tokenizer().save_pretrained(tmp_path / "same")
    policy = PI0FastPolicy.from_pretrained(saved, overrides={"action_tokenizer_name": str(tmp_path / "same")})
    assert policy.config.action_tokenizer_name == "tokenizers/action"
    action_tokenizer(280).save_pretrained(tmp_path / "other")
    with pytest.raises(PolicyError, match="action tokenizer has the fingerprint"):
        PI0FastPolicy.from_pretrained(saved, overrides={"action_tokenizer_name": str(tmp_path / "other")})


@pytest.mark.golden
def test_another_action_tokenizer_of_a_checkpoint_without_fingerprints(shared: Path, tmp_path: Path) -> None:
    folder = shared / "golden" / "lerobot_checkpoint"
    published_tokenizer().save_pretrained(tmp_path / "other")
    policy = PI0FastPolicy.from_pretrained(
        folder,
        architecture=json.loads((folder / "architecture.json").read_text()),
        overrides={"action_tokenizer_name": str(tmp_path / "other")},
    )
    assert policy.preparation.action_tokenizer.vocabulary == published_tokenizer().vocabulary
    with pytest.raises(PolicyError, match="of another shape"):  # the sizes of gemma_2b
        PI0FastPolicy.from_pretrained(folder)


def test_rename_map_and_device(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch = batch_of(actions=False)
    expected = PI0FastPolicy.from_pretrained(saved).predict_action_chunk(batch)
    policy = PI0FastPolicy.from_pretrained(saved, rename_map={"cam": "observation.images.top"}, device="cpu")
    batch["cam"] = batch.pop("observation.images.top")
    assert torch.equal(policy.predict_action_chunk(batch), expected)
    policy.save_pretrained(tmp_path / "out")
    assert torch.equal(PI0FastPolicy.from_pretrained(tmp_path / "out").predict_action_chunk(batch), expected)
    with pytest.raises(PolicyError, match=r"'cam' -> 'observation\.images\.front', but the policy has no such input"):
        PI0FastPolicy.from_pretrained(saved, rename_map={"cam": "observation.images.front"})
    assert policy.config.device == "cpu"
    edit(saved / "config.json", lambda content: content.update(device="cuda:77"))
    elsewhere = PI0FastPolicy.from_pretrained(saved)
    assert elsewhere.model.device.type == "cpu"
    assert "'cuda:77' cannot be used" in caplog.text
    assert elsewhere.config.device == "cuda:77"


def test_a_device_that_is_not_there(saved_once: Path) -> None:
    for device in ("cuda:77", "quantum"):
        with pytest.raises(PolicyError, match=f"the device '{device}' cannot be used"):
            PI0FastPolicy.from_pretrained(saved_once, device=device)


def test_the_published_sizes_can_be_built() -> None:
    """gemma_300m, too: the projector follows the width of the text. On the meta device, without its numbers."""
    for name, width, millions in (("gemma_300m", 1024, 988), ("gemma_2b", 2048, 2923)):
        with torch.device("meta"):
            model = PaliGemma(Architecture.variant(name), tied_head=True, dtype=torch.bfloat16)
        assert tuple(model.projector.weight.shape) == (width, 1152)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert round(count / 1e6) == millions, count
