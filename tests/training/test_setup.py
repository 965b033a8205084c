"""What a run begins with: device, episodes, cameras and their names, settings, statistics, tokenizers, weights."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file as load_arrays  # noqa: E402
from safetensors.numpy import save_file as save_arrays  # noqa: E402
from tiny_runs import ACTION, PIXELS, STATE, arguments, build_dataset  # noqa: E402

from pi0_fast import FastTokenizer, PI0FastConfig  # noqa: E402
from pi0_fast.actions.chunks import split_episodes  # noqa: E402
from pi0_fast.actions.normalize import NormalizationMode, exact_statistics  # noqa: E402
from pi0_fast.data.reader import open_dataset  # noqa: E402
from pi0_fast.data.writer import LeRobotWriter  # noqa: E402
from pi0_fast.model.weights import load  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY  # noqa: E402
from pi0_fast.text_tokenizer import TinyTextTokenizer  # noqa: E402
from pi0_fast.train_config import TrainConfig, parse_train  # noqa: E402
from pi0_fast.training import setup  # noqa: E402
from pi0_fast.training.audit import audit  # noqa: E402
from pi0_fast.training.device import choose_device, settle_tf32  # noqa: E402
from pi0_fast.training.setup import Run, set_up  # noqa: E402
from pi0_fast.types import DatasetError, PolicyError, UsageError  # noqa: E402

TOP = "observation.images.top"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the dataset (data), the sizes of a model (sizes.json), and a checkpoint of such a policy (start)."""
    folder = tmp_path_factory.mktemp("setup")
    made = run(folder, folder / "unused", quiet=True)
    made.policy.save_pretrained(folder / "start")
    return folder


def config_of(line: list[str]) -> TrainConfig:
    config = parse_train(TrainConfig, line[1:], "pi0-fast train")
    config.validate()
    return config.resolved()


def run(home: Path, output: Path, *, quiet: bool = False, drop: tuple[str, ...] = (), **flags: object) -> Run:
    line = [text for text in arguments(home, output, **flags) if text.partition("=")[0].removeprefix("--") not in drop]
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        return set_up(config_of(line))


NEW = ("policy.architecture", "policy.text_tokenizer_name", "policy.auto_fit_fast_tokenizer")


def started(home: Path, output: Path, drop: tuple[str, ...] = (), **flags: object) -> Run:
    """From the checkpoint."""
    return run(home, output, drop=(*NEW, "policy.fast_tokenizer_cache_dir", *drop), **flags)


# --- device ---------------------------------------------------------------------------------------


def test_the_device_is_the_first_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(None).type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device(None).type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None).type == "cuda"


def test_an_absent_device_is_named_with_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(PolicyError, match=r"device=cuda: this machine has no such device; there is: cpu$"):
        choose_device("cuda")
    with pytest.raises(PolicyError, match=r"device=tpu9 is no device; there is: cpu$"):
        choose_device("tpu9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(PolicyError, match=r"there is: cuda, cpu \(number 0 to 1\)"):
        choose_device("cuda:2")


# --- a new policy ---------------------------------------------------------------------------------


def test_a_new_policy_is_made_for_the_dataset(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(home, tmp_path / "out", **{"dataset.val_fraction": 0.25})
    config = made.policy.config
    assert {key: feature.shape for key, feature in config.input_features.items()} == {
        TOP: (3, PIXELS, PIXELS),
        STATE_KEY: (STATE,),
    }
    assert config.action_dim == ACTION
    assert config.image_resolution == (PIXELS, PIXELS)  # the model's, without being told
    assert made.policy.training
    assert made.validation_frames is not None
    assert set(made.train_frames.episodes) | set(made.validation_frames.episodes) == {0, 1, 2, 3}
    assert len(made.validation_frames.episodes) == 1
    out = capsys.readouterr().out
    assert "device: cpu (asked for)" in out
    assert "dtype: float32 (the default on cpu; --policy.dtype changes it)" in out
    assert f"action tokenizer: {home / 'tokenizers'}" in out


def test_statistics_are_those_of_the_training_frames(home: Path, tmp_path: Path) -> None:
    made = run(home, tmp_path / "out", **{"dataset.val_fraction": 0.25})
    reader = open_dataset("tiny", root=home / "data")
    episodes = list(reader.iter_episodes(["action", STATE_KEY], made.train_frames.episodes))
    for key in (STATE_KEY, ACTION_KEY):
        expected = exact_statistics(lambda key=key: [episode.columns[key] for episode in episodes])
        assert made.statistics[key] == expected
        assert expected.count < 46  # not the held-out ones
    normalizer = made.policy.preparation.action_tokenizer.normalizer
    assert normalizer is not None
    np.testing.assert_array_equal(normalizer.low, made.statistics[ACTION_KEY].q01)


def test_names_of_actions_are_the_datas(home: Path, tmp_path: Path) -> None:
    """A checkpoint of a robot with as many joints in another order does not say which of them stays absolute."""
    build_dataset(tmp_path / "first", joints=("gripper", "x", "y"))
    build_dataset(tmp_path / "second", joints=("x", "y", "gripper"))
    flags = {"policy.use_relative_actions": "true"}
    run(home, tmp_path / "out", **flags, **{"dataset.root": tmp_path / "first"}).policy.save_pretrained(
        tmp_path / "start"
    )
    flags = {"policy.path": tmp_path / "start", "dataset.root": tmp_path / "second"}
    made = run(home, tmp_path / "out", drop=("policy.architecture",), **flags)
    assert made.policy.config.action_feature_names == ["x", "y", "gripper"]
    relative = made.policy.preparation.processors.relative
    assert relative is not None
    assert list(relative.mask) == [True, True, False]
    with pytest.raises(UsageError, match=r"action_feature_names has 2 names, but the actions of tiny have 3 dim"):
        run(home, tmp_path / "out", **{"policy.action_feature_names": '["x","y"]'})


def test_held_out_episodes_that_cannot_be_measured_on(home: Path, tmp_path: Path) -> None:
    """Said before the first step, and not at the first measurement."""
    build_dataset(tmp_path / "data", (12, 3, 2, 3))
    seeds = {bool(0 in split_episodes(range(4), 0.25, seed)[0]): seed for seed in range(8)}
    flags = {"dataset.root": tmp_path / "data", "dataset.val_fraction": 0.25, "seed": seeds[True]}
    with pytest.raises(UsageError, match=r"held-out episodes of tiny \(\d\) has the 4 frames of a chunk, so that"):
        run(home, tmp_path / "out", eval_freq=4, **flags)
    made = run(home, tmp_path / "out", **flags)  # without measurements
    assert made.validation_frames is not None
    assert len(made.validation_frames.whole) == 0
    assert len(made.train_frames.whole) == 9


def test_relative_actions_have_statistics_of_their_own(home: Path, tmp_path: Path) -> None:
    flags = {"policy.use_relative_actions": "true", "policy.action_feature_names": '["x","y","gripper"]'}
    made = run(home, tmp_path / "out", **flags)
    relative = made.policy.preparation.processors.relative
    assert relative is not None
    assert relative.mask == (True, True, False)
    reader = open_dataset("tiny", root=home / "data")
    values = []
    for episode in reader.iter_episodes(["action", STATE_KEY]):
        action, state = episode.columns["action"], episode.columns[STATE_KEY][:, :ACTION] * [1, 1, 0]
        values += [action[t : t + 4] - state[t].astype(np.float32) for t in range(len(action) - 3)]
    expected = exact_statistics(lambda: [np.stack(values).reshape(-1, ACTION).astype(np.float32)])
    np.testing.assert_allclose(made.statistics[ACTION_KEY].q99, expected.q99, rtol=1e-5)
    loss, _ = made.policy(made.train_frames.batch([0, 5]))
    assert torch.isfinite(loss)


def test_a_named_tokenizer_wins_over_auto_fit(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = home / "start" / "tokenizers" / "action"
    made = run(
        home,
        tmp_path / "out",
        **{"policy.action_tokenizer_name": named, "policy.fast_tokenizer_cache_dir": tmp_path / "empty"},
    )
    assert not (tmp_path / "empty").exists()
    assert made.policy.preparation.action_tokenizer.fingerprint == FastTokenizer.from_pretrained(named).fingerprint
    assert f"action tokenizer: {named} (named by the command, so none is fitted" in capsys.readouterr().out


def test_auto_fit_finds_what_it_fitted_before(home: Path, tmp_path: Path) -> None:
    before = sorted((home / "tokenizers").iterdir())
    first, second = (run(home, tmp_path / name) for name in ("a", "b"))
    assert sorted((home / "tokenizers").iterdir()) == before
    prints = {made.policy.preparation.action_tokenizer.fingerprint for made in (first, second)}
    assert len(prints) == 1


def test_auto_fit_takes_the_encoder_and_the_order_that_are_asked_for(home: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"policy.fast_tokenizer_rate_weight": 0.5, "policy.fast_tokenizer_order": "dimension"}
    asked["policy.fast_tokenizer_cache_dir"] = tmp_path / "tokenizers"
    made = run(home, tmp_path / "a", **asked).policy.preparation.action_tokenizer
    assert (made.rate_weight, made.order) == (0.5, "dimension")


# --- from a checkpoint ----------------------------------------------------------------------------


def test_path_keeps_settings_and_weights(home: Path, tmp_path: Path) -> None:
    made = started(
        home, tmp_path / "out", ("policy.type", "policy.optimizer_lr"), **{"policy.path": home / "start", "seed": 5}
    )
    stored = load(home / "start", made.policy.model.architecture)
    for name, value in made.policy.model.state_dict().items():
        assert torch.equal(value, stored.state_dict()[name])
    assert made.policy.config.optimizer_lr == 1e-3  # the checkpoint's
    assert made.policy.config.chunk_size == 4
    assert made.policy.config.pretrained_path == str(home / "start")
    assert made.stored_statistics is not None
    assert len(made.stored_statistics[STATE_KEY]["q01"]) == STATE


def test_pretrained_path_takes_only_what_belongs_to_the_weights(home: Path, tmp_path: Path) -> None:
    made = started(home, tmp_path / "out", ("policy.optimizer_lr",), **{"policy.pretrained_path": home / "start"})
    assert made.policy.config.optimizer_lr == PI0FastConfig().optimizer_lr
    assert made.policy.config.image_resolution == (PIXELS, PIXELS)
    assert made.policy.config.state_clip


def test_both_paths_are_no_secret(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(home, tmp_path / "out", **{"policy.path": home / "start", "policy.pretrained_path": "lerobot/pi0fast-base"})
    assert "--policy.pretrained_path=lerobot/pi0fast-base is not read" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["policy.path", "policy.pretrained_path"])
def test_a_policy_with_named_actions_goes_on_to_a_robot_of_other_joints(home: Path, tmp_path: Path, flag: str) -> None:
    for name, joints in (("first", ("hip", "knee", "toe")), ("second", ("left", "right"))):
        build_dataset(tmp_path / name, joints=joints)
    first = run(home, tmp_path / "one", **{"dataset.root": tmp_path / "first"})
    assert first.policy.config.action_feature_names == ["hip", "knee", "toe"]
    first.policy.save_pretrained(tmp_path / "start")
    new = tuple(name for name in NEW if name != "policy.auto_fit_fast_tokenizer")
    made = run(home, tmp_path / "two", drop=new, **{"dataset.root": tmp_path / "second", flag: tmp_path / "start"})
    assert made.policy.config.action_feature_names == ["left", "right"]
    assert made.policy.preparation.processors.action.size == 2
    loss, _ = made.policy(made.train_frames.batch([0, 1]))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("flag", ["policy.path", "policy.pretrained_path"])
@pytest.mark.parametrize("joints", [("left", "gripper"), ("a", "b", "gripper", "c")], ids=len)
def test_relative_actions_go_on_to_a_robot_of_other_joints(
    home: Path, tmp_path: Path, flag: str, joints: tuple[str, ...]
) -> None:
    """What stays absolute is found by name among the new joints; the differences have statistics of the new data."""
    build_dataset(tmp_path / "first", joints=("hip", "knee", "gripper"))
    build_dataset(tmp_path / "second", joints=joints)
    flags = {"dataset.root": tmp_path / "first", "policy.use_relative_actions": "true"}
    first = run(home, tmp_path / "one", **flags)
    first.policy.save_pretrained(tmp_path / "start")
    new = tuple(name for name in NEW if name != "policy.auto_fit_fast_tokenizer")
    made = run(home, tmp_path / "two", drop=new, **{"dataset.root": tmp_path / "second", flag: tmp_path / "start"})
    processors = made.policy.preparation.processors
    assert made.policy.config.use_relative_actions
    assert processors.relative is not None
    assert processors.relative.mask == tuple(name != "gripper" for name in joints)
    (decision,) = (each for each in made.decisions if each.what == "relative actions")
    assert decision.value == ", ".join(name for name in joints if name != "gripper")
    assert decision.why == 'absolute: gripper; relative_exclude_joints is ["gripper"]'
    (decision,) = (each for each in made.decisions if each.what == "action tokenizer")
    assert decision.why == "fitted on this dataset, in place of the one that the checkpoint's weights know"
    batch = made.train_frames.batch([0, 5])
    wanted, states = batch["action"], batch["observation.state"]
    low, high = (processors.action.statistics[name] for name in ("q01", "q99"))
    relative = wanted - np.where(processors.relative.mask, states[:, None, : len(joints)], 0)
    expected = np.clip(2 * (relative - low) / (high - low) - 1, -1, 1)
    np.testing.assert_allclose(processors.normalize_actions(wanted, states), expected, atol=1e-4)
    loss, _ = made.policy(batch)
    assert torch.isfinite(loss)
    rows = audit(made).content["ranges"][ACTION_KEY]["dimensions"]
    assert [row["dimension"] for row in rows] == [f"{dim} {name}" for dim, name in enumerate(joints)]
    assert all(row["checkpoint_low"] is None for row in rows)  # of three other joints


@pytest.fixture
def other_camera(tmp_path: Path, home: Path) -> Path:
    """The dataset with another name of its camera."""
    root = tmp_path / "renamed"
    shutil.copytree(home / "data", root)
    for file in root.rglob("*"):
        if file.suffix == ".json":
            file.write_text(file.read_text().replace(TOP, "observation.images.front"))
        elif file.suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(file)
            names = [name.replace(TOP, "observation.images.front") for name in table.column_names]
            pq.write_table(table.rename_columns(names), file)
    return root


def test_a_camera_of_another_name(home: Path, tmp_path: Path, other_camera: Path) -> None:
    flags = {"policy.path": home / "start", "dataset.root": other_camera}
    with pytest.raises(
        UsageError, match=r"'observation.images.front'.*--rename_map='\{\"observation.images.front\": \""
    ):
        started(home, tmp_path / "out", **flags)
    made = started(home, tmp_path / "out", **flags, rename_map=json.dumps({"observation.images.front": TOP}))
    assert made.policy.preparation.processors.rename_map == {"observation.images.front": TOP}
    batch = made.train_frames.batch([0, 1])
    assert "observation.images.front" in batch
    prepared = made.policy.preparation.training(batch)
    assert prepared.images is not None
    assert prepared.counts[f"missing {TOP}"] == 0
    # Another run from the same data without the map is what the map would have been for.
    images = torch.from_numpy(np.moveaxis(batch["observation.images.front"], -1, 1)).float() / 127.5 - 1
    torch.testing.assert_close(prepared.images[:, 0], images)


def test_a_rename_without_effect_is_refused(home: Path, tmp_path: Path) -> None:
    for renames, message in (
        ({"nothing": TOP}, "no column 'nothing'"),
        ({"timestamp": "observation.x"}, "has no effect"),
        ({TOP: STATE_KEY}, "more than one column becomes|does not know"),
    ):
        with pytest.raises((UsageError, DatasetError), match=message):
            started(home, tmp_path / "out", **{"policy.path": home / "start"}, rename_map=json.dumps(renames))


def test_empty_cameras_are_declared_and_masked(home: Path, tmp_path: Path) -> None:
    made = started(home, tmp_path / "out", **{"policy.path": home / "start", "policy.empty_cameras": 1})
    assert made.policy.config.image_keys == (TOP, "observation.images.empty_camera_0")
    prepared = made.policy.preparation.training(made.train_frames.batch([0]))
    assert not any(name.startswith("missing") for name in prepared.counts)


def test_another_normalisation_than_the_checkpoints_is_refused(home: Path, tmp_path: Path) -> None:
    mapping = {"policy.normalization_mapping": '{"ACTION": "MEAN_STD"}'}
    with pytest.raises(UsageError, match="ACTION is MEAN_STD, but the checkpoint was trained with QUANTILES"):
        started(home, tmp_path / "out", **{"policy.path": home / "start"}, **mapping)
    fitted = {"policy.auto_fit_fast_tokenizer": "true", "policy.fast_tokenizer_cache_dir": tmp_path / "t"}
    made = run(
        home,
        tmp_path / "out",
        drop=("policy.architecture", "policy.text_tokenizer_name"),
        **{"policy.pretrained_path": home / "start"},
        **mapping,
        **fitted,
    )
    assert made.policy.preparation.processors.action.mode is NormalizationMode.MEAN_STD


def test_a_tokenizer_for_other_chunks_says_what_would_fit_one(home: Path, tmp_path: Path) -> None:
    flags = {"policy.path": home / "start", "policy.chunk_size": 5, "policy.n_action_steps": 5}
    with pytest.raises(PolicyError, match=r"chunks of 4 steps .*--policy.auto_fit_fast_tokenizer=true fits one"):
        started(home, tmp_path / "out", **flags)


def test_the_checkpoints_statistics_on_request(home: Path, tmp_path: Path) -> None:
    other = build_dataset(tmp_path / "other", lengths=(30, 30))
    flags = {"policy.path": home / "start", "dataset.root": other}
    ours = started(home, tmp_path / "a", **flags).policy.preparation.processors
    kept = started(home, tmp_path / "b", **flags, **{"policy.statistics": "checkpoint"}).policy.preparation.processors
    stored = PI0FastPolicy.from_pretrained(home / "start").preparation.processors
    np.testing.assert_array_equal(kept.state.statistics["q99"], stored.state.statistics["q99"])
    assert not np.array_equal(ours.state.statistics["q99"], stored.state.statistics["q99"])
    np.testing.assert_array_equal(ours.action.statistics["q99"], stored.action.statistics["q99"])  # the tokenizer's


def test_settings_that_contradict_each_other(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="n_action_steps"):
        started(home, tmp_path / "out", **{"policy.path": home / "start", "policy.n_action_steps": 5})
    with pytest.raises(UsageError, match="paligemma_variant=gemma_300m would change nothing"):
        started(home, tmp_path / "out", **{"policy.path": home / "start", "policy.paligemma_variant": "gemma_300m"})


# --- episodes, output, freezing -------------------------------------------------------------------


def test_episodes(home: Path, tmp_path: Path) -> None:
    made = run(home, tmp_path / "out", **{"dataset.episodes": "[1, 3]"})
    assert made.train_frames.episodes == (1, 3)
    assert made.validation_frames is None
    with pytest.raises(UsageError, match="has no episode 9; it has 0 to 3"):
        run(home, tmp_path / "out", **{"dataset.episodes": "[1, 9]"})
    with pytest.raises(UsageError, match="of a single episode nothing can be held out"):
        run(home, tmp_path / "out", **{"dataset.episodes": "[1]", "dataset.val_fraction": 0.5})


def test_nothing_is_overwritten(home: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "000001").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"--resume.*nothing is overwritten"):
        run(home, tmp_path / "out")
    (tmp_path / "out" / "checkpoints" / "000001").rmdir()
    (tmp_path / "out" / "report.json").write_text("{}")  # of a run that was refused
    run(home, tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("")
    with pytest.raises(FileExistsError):
        run(home, tmp_path / "out")


def test_freezing(home: Path, tmp_path: Path) -> None:
    made = run(home, tmp_path / "out", freeze='["decoder.layers.0.*"]', **{"policy.freeze_vision_encoder": "true"})
    frozen = {name for name, value in made.policy.model.named_parameters() if not value.requires_grad}
    assert frozen
    assert all(name.startswith(("decoder.layers.0.", "vision_tower.")) for name in frozen)
    assert "projector.weight" not in frozen
    with pytest.raises(UsageError, match=r"no weight is named like 'encoder\.\*'"):
        run(home, tmp_path / "out", freeze='["encoder.*"]')
    with pytest.raises(UsageError, match="leaves nothing to train"):
        run(home, tmp_path / "out", freeze='["*"]')


def test_image_transforms_are_for_training_alone(home: Path, tmp_path: Path) -> None:
    made = run(
        home,
        tmp_path / "out",
        **{"dataset.image_transforms.enable": "true", "dataset.image_transforms.max_shift": 0.3},
        **{"dataset.val_fraction": 0.25},
    )
    assert made.validation_frames is not None
    assert made.validation_frames.transforms is None
    assert getattr(made.train_frames.transforms, "max_shift") == 0.3  # noqa: B009 - any callable
    assert not np.array_equal(made.train_frames.batch([0], [0])[TOP], made.train_frames.batch([0], [1])[TOP])


def test_a_push_that_would_fail_is_known_before_training(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(setup.PI0FastPolicy, "check_push_to_hub", lambda *a, **k: asked.append((a, k)))
    made = run(home, tmp_path / "out", **{"policy.repo_id": "me/mine", "policy.private": "true"})
    assert asked == [(("me/mine",), {"private": True})]
    assert made.policy.config.push_to_hub
    assert not run(home, tmp_path / "out").policy.config.push_to_hub


def test_columns_of_other_names(home: Path, tmp_path: Path) -> None:
    root = tmp_path / "named"
    shutil.copytree(home / "data", root)
    import pyarrow.parquet as pq

    for file in root.rglob("*"):
        if file.name == "info.json":
            info = json.loads(file.read_text())
            info["features"] = {
                {"observation.state": "state", "action": "actions"}.get(k, k): v for k, v in info["features"].items()
            }
            file.write_text(json.dumps(info))
        elif file.suffix == ".parquet" and "data" in file.relative_to(root).parts[:1]:
            table = pq.read_table(file)
            names = [{"observation.state": "state", "action": "actions"}.get(n, n) for n in table.column_names]
            pq.write_table(table.rename_columns(names), file)
    (root / "meta" / "stats.json").unlink(missing_ok=True)
    with pytest.raises(DatasetError, match=r"observation\.state.*state"):
        run(home, tmp_path / "out", **{"dataset.root": root})
    made = run(
        home, tmp_path / "out", **{"dataset.root": root, "dataset.state_key": "state", "dataset.action_key": "actions"}
    )
    loss, _ = made.policy(made.train_frames.batch([0, 1]))
    assert torch.isfinite(loss)
    made.policy.save_pretrained(tmp_path / "saved")
    again = PI0FastPolicy.from_pretrained(tmp_path / "saved")
    observation = {key: value for key, value in made.train_frames.batch([0]).items() if key != "actions"}
    assert again.predict_action_chunk(observation).shape == (1, 4, ACTION)


def test_resume_takes_the_checkpoints_policy(home: Path, tmp_path: Path) -> None:
    made = run(home, tmp_path / "out")
    folder = tmp_path / "out" / "checkpoints" / "000002" / "pretrained_model"
    folder.mkdir(parents=True)
    state = folder.parent / "training_state"
    state.mkdir()
    (state / "training_step.json").write_text("{}")
    with torch.no_grad():
        made.policy.model.projector.bias += 1
    made.save_model(folder)
    made.config.write(folder)
    line = ["train", "--resume=true", f"--output_dir={tmp_path / 'out'}"]
    again = set_up(config_of(line))
    assert torch.equal(again.policy.model.projector.bias, made.policy.model.projector.bias)
    assert again.policy.training
    assert again.config.checkpoint == folder.parent
    assert replace(again.policy.config, pretrained_path=None, push_to_hub=False) == replace(
        made.policy.config,
        pretrained_path=None,
        push_to_hub=False,
        action_tokenizer_name="tokenizers/action",
        text_tokenizer_name="tokenizers/text",
    )


# --- what belongs together ------------------------------------------------------------------------


def test_auto_fit_does_not_look_at_held_out_episodes(home: Path, tmp_path: Path) -> None:
    made = run(home, tmp_path / "out", **{"dataset.val_fraction": 0.25})
    metadata = made.policy.preparation.action_tokenizer.metadata
    assert metadata["episodes"] == list(made.train_frames.episodes)
    assert len(metadata["episodes"]) == 3
    every = run(home, tmp_path / "every").policy.preparation.action_tokenizer.metadata
    assert every["episodes"] == "all"


def exchange(home: Path, folder: Path, part: str) -> Path:
    """A copy of the checkpoint with a part of another one."""
    shutil.copytree(home / "start", folder)
    if part == "text":
        shutil.rmtree(folder / "tokenizers" / "text")
        TinyTextTokenizer(1023).save(folder / "tokenizers" / "text")
    elif part == "action":
        place = folder / "tokenizers" / "action"
        tokenizer = FastTokenizer.from_pretrained(place)
        FastTokenizer(
            tokenizer.vocabulary,
            scale=11.0,
            time_horizon=tokenizer.time_horizon,
            action_dim=tokenizer.action_dim,
            normalizer=tokenizer.normalizer,
        ).save_pretrained(place)
    else:
        for path in folder.glob("policy_*.safetensors"):
            arrays = load_arrays(path)
            arrays["observation.state.q99"] = arrays["observation.state.q99"] + np.float32(0.25)
            save_arrays(arrays, path)
    return folder


@pytest.mark.parametrize("flag", ["policy.path", "policy.pretrained_path"])
@pytest.mark.parametrize("part", ["text", "action", "statistics"])
def test_parts_of_another_checkpoint_are_refused(home: Path, tmp_path: Path, part: str, flag: str) -> None:
    folder = exchange(home, tmp_path / "mixed", part)
    name = {"text": "text tokenizer", "action": "action tokenizer", "statistics": "normalization"}[part]
    flags = {flag: folder, **({"policy.statistics": "checkpoint"} if part == "statistics" else {})}
    with pytest.raises(PolicyError, match=f"the {name} has the fingerprint"):
        started(home, tmp_path / "out", **flags)
    # What is not taken from there need not belong to it.
    if part == "statistics":
        started(home, tmp_path / "out", **{flag: folder})
    elif part == "action":
        fitted = {"policy.auto_fit_fast_tokenizer": "true", "policy.fast_tokenizer_cache_dir": home / "tokenizers"}
        started(
            home,
            tmp_path / "out",
            (),
            **{flag: folder, "policy.action_tokenizer_name": home / "start/tokenizers/action"},
        )
        made = run(home, tmp_path / "out", drop=NEW[:2], **{flag: folder}, **fitted)
        assert made.policy.preparation.action_tokenizer.scale == 10.0


def test_a_runs_directory_as_the_checkpoint_to_begin_with(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoints" / "000008" / "pretrained_model"
    shutil.copytree(home / "start", place)
    for flag in ("policy.path", "policy.pretrained_path"):
        with pytest.raises(PolicyError, match=f"is no policy itself: give {place}"):
            started(home, tmp_path / "out", **{flag: tmp_path / "run"})
        started(home, tmp_path / "out", **{flag: place})


# --- flags that would change nothing --------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "idle", "other", "value"),
    [
        ("compile_mode", "default", "compile_model", "true"),
        ("relative_exclude_joints", "[]", "use_relative_actions", "true"),
        ("validate_action_token_prefix", "false", "constrained", "false"),
    ],
)
def test_a_setting_that_needs_another(home: Path, tmp_path: Path, flag: str, idle: str, other: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--policy.{flag} has no effect without --policy.{other}={value}"):
        run(home, tmp_path / "out", **{f"policy.{flag}": idle})
    made = run(home, tmp_path / "out", quiet=True, **{f"policy.{flag}": idle, f"policy.{other}": value})
    assert str(getattr(made.policy.config, other)).lower() == value


def test_a_default_that_is_spelt_out_is_no_mistake(home: Path, tmp_path: Path) -> None:
    run(
        home, tmp_path / "out", **{"policy.compile_mode": "max-autotune", "policy.validate_action_token_prefix": "true"}
    )


def test_a_revision_of_a_local_directory(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--policy\.pretrained_revision has no effect with the local directory"):
        started(home, tmp_path / "out", **{"policy.path": home / "start", "policy.pretrained_revision": "main"})


def test_pictures_that_are_not_there(home: Path, tmp_path: Path) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": [STATE]},
        "action": {"dtype": "float32", "shape": [ACTION]},
    }
    with LeRobotWriter(tmp_path / "blind", fps=10, features=features) as writer:
        random = np.random.default_rng(0)
        columns = {key: random.normal(size=(20, *value["shape"])) for key, value in features.items()}
        writer.add_episode({key: value.astype(np.float32) for key, value in columns.items()}, task="feel")
    for flags in ({"dataset.cache_dir": tmp_path / "c"}, {"dataset.image_transforms.enable": "true"}):
        with pytest.raises(UsageError, match=f"--{next(iter(flags))} has no effect: no camera is in use"):
            run(home, tmp_path / "out", **{"dataset.root": tmp_path / "blind"}, **flags)


def test_cudnn_on_a_device_without_it(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(home, tmp_path / "out", cudnn_deterministic="true")
    assert "warning: --cudnn_deterministic changes nothing on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("allowed", "shown"), [(True, "TF32"), (False, "float32")])
def test_how_cuda_multiplies(allowed: bool, shown: str) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        decision = settle_tf32(allowed)
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
    assert (decision.value, "allow_tf32=false" in decision.why) == (shown, True)
