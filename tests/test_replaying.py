"""Replay: the recorded actions do again what they did, raw and through a tokenizer; with the toy world."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi0_fast import replaying
from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.cli import main
from pi0_fast.data import LeRobotWriter, open_dataset
from pi0_fast.record_config import RecordConfig, ReplayConfig
from pi0_fast.recording import record
from pi0_fast.replaying import replay, round_trip
from pi0_fast.simulation_config import EnvConfig
from pi0_fast.types import DatasetError, SimulatorError, TokenizerError, UsageError

pytest.importorskip("PIL")

NAME = "local/toy"
HORIZON = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight noisy episodes of two tasks."""
    root = tmp_path_factory.mktemp("recorded") / "it"
    env = EnvConfig(type="toy", task="reach-green,reach-blue", image_size=[8, 8])
    settings: dict[str, Any] = {"n_episodes": 4, "num_workers": 0, "video": False, "noise_std": 0.3, "every": 2}
    record(RecordConfig(repo_id=NAME, env=env, root=str(root), keep_after_success=3, **settings))
    return root


def fitted(root: Path, scale: float, **selected: Any) -> FastTokenizer:
    """A tokenizer of the executed actions, as they are."""
    windows = []
    selection = None if not selected else ActionSelection.create(2, state_size=2, **selected)
    for episode in open_dataset(NAME, root=root).iter_episodes(["executed_action", "observation.state"]):
        starts = range(episode.length - HORIZON + 1)
        chunks = np.stack([episode.columns["executed_action"][start : start + HORIZON] for start in starts])
        if selection is not None:
            chunks = selection.from_absolute(chunks, episode.columns["observation.state"][: len(chunks)])
        windows.append(chunks)
    chunks = np.concatenate(windows)
    mode = "IDENTITY" if selection is None else "MIN_MAX"
    normalizer = Normalizer.fit(lambda: [chunks], mode, selection=selection)
    return FastTokenizer.fit(normalizer.apply(chunks), scale=scale, vocab_size=600, normalizer=normalizer)


def config(root: Path, output: Path, **more: Any) -> ReplayConfig:
    return ReplayConfig(repo_id=NAME, root=str(root), output_dir=str(output), **{"num_workers": 0, **more})


def test_the_recorded_actions_do_again_what_they_did(dataset: Path, tmp_path: Path) -> None:
    result = replay(config(dataset, tmp_path))
    assert result.summary["action_key"] == "executed_action"
    assert result.summary["raw"]["successes"] == len(result.episodes) == 8
    assert result.summary["raw"]["interval"] == pytest.approx([0.6756, 1.0], abs=1e-4)
    assert result.summary["raw"]["clipped_actions"] == 0
    assert result.summary["state_difference"]["largest"] == 0
    assert "decoded" not in result.summary
    recorded = json.loads((dataset / "meta/recording.json").read_text())["episodes"]
    for entry, then in zip(result.episodes, recorded, strict=True):
        assert (entry["task"], entry["seed"]) == (then["task"], then["seed"])
        assert entry["raw"] == {"success_step": then["success_step"], "steps": then["steps"], "clipped": 0}
    written = json.loads((tmp_path / "replay.json").read_text())
    assert written == {**result.summary, "episodes": result.episodes}


def test_the_clean_labels_do_something_else(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Open loop, without the noise that they answered to."""
    result = replay(config(dataset, tmp_path, action_key="action"))
    assert result.summary["state_difference"]["largest"] > 0.05
    failed = [entry["episode"] for entry in result.episodes if entry["raw"]["success_step"] is None]
    assert failed
    said = capsys.readouterr().err
    assert f"the recorded actions do not succeed in episodes {', '.join(map(str, failed))}: before a policy" in said


def test_a_simulator_that_hangs_ends_the_replay(dataset: Path, tmp_path: Path) -> None:
    fault = json.dumps({"fault": "hang", "fault_step": 1, "fault_seed": 9})
    env = EnvConfig(type="toy", task="reach-green", options=fault)
    settings: dict[str, Any] = {"env": env, "seeds": [9, *range(7)], "episodes": [0], "num_workers": 1}
    with pytest.raises(
        SimulatorError,
        match=r"^the simulator hung in episode 0 \(reach-green, seed 9\): no answer within --timeout_s=3$",
    ):
        replay(config(dataset, tmp_path, timeout_s=3.0, **settings))
    assert not (tmp_path / "replay.json").exists()
    with pytest.raises(UsageError, match="--timeout_s has no effect with --num_workers=0"):
        replay(config(dataset, tmp_path, timeout_s=3.0))


def test_through_a_fine_and_a_coarse_tokenizer(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(dataset, 100.0).save_pretrained(tmp_path / "fine")
    fitted(dataset, 0.3).save_pretrained(tmp_path / "coarse")
    fine = replay(config(dataset, tmp_path / "a", tokenizer=str(tmp_path / "fine")))
    assert fine.summary["decoded"]["successes"] == 8
    assert max(fine.summary["round_trip"]["rmse"]) < 0.01
    assert "not through the tokenizer" not in capsys.readouterr().err
    coarse = replay(config(dataset, tmp_path / "b", tokenizer=str(tmp_path / "coarse")))
    lost = [entry["episode"] for entry in coarse.episodes if entry["decoded"]["success_step"] is None]
    assert coarse.summary["decoded"]["successes"] == 8 - len(lost) < 8
    assert coarse.summary["raw"] == fine.summary["raw"]
    assert coarse.summary["round_trip"]["tokens_per_chunk"] < fine.summary["round_trip"]["tokens_per_chunk"]
    said = capsys.readouterr().err
    assert f"episodes {', '.join(map(str, lost))} succeed with the recorded actions, and not through the" in said


@pytest.mark.parametrize("selected", [{}, {"delta_dims": "0,1"}, {"encoded_dims": "1"}, {"delta_dims": "1"}])
def test_the_round_trip_is_chunk_by_chunk(dataset: Path, selected: dict[str, Any]) -> None:
    tokenizer = fitted(dataset, 20.0, **selected)
    reader = open_dataset(NAME, root=dataset)
    for episode in reader.iter_episodes(["executed_action", "observation.state"]):
        actions, states = episode.columns["executed_action"], episode.columns["observation.state"]
        found = round_trip(tokenizer, HORIZON, actions, states)
        expected, counts = actions.copy(), []
        for start in range(0, len(actions), HORIZON):
            chunk = [actions[min(start + step, len(actions) - 1)] for step in range(HORIZON)]
            (ids,) = tokenizer.encode_actions(np.stack(chunk), states[start])
            counts.append(len(ids))
            decoded = tokenizer.decode_actions(ids, states[start])
            dims = [1] if "encoded_dims" in selected else [0, 1]
            rest = expected[start : start + HORIZON]
            rest[:, dims] = decoded[: len(rest)]
        np.testing.assert_allclose(found.actions, expected, atol=1e-6)
        assert found.tokens == counts
        assert np.abs(found.actions - actions).max() > 0
        if "encoded_dims" in selected:
            np.testing.assert_array_equal(found.actions[:, 0], actions[:, 0])


def test_some_episodes_in_other_processes(dataset: Path, tmp_path: Path) -> None:
    here = replay(config(dataset, tmp_path / "a", episodes=[1, 6]))
    there = replay(config(dataset, tmp_path / "b", episodes=[1, 6], num_workers=2))
    assert [entry["episode"] for entry in there.episodes] == [1, 6]
    assert here.episodes == there.episodes
    with pytest.raises(DatasetError, match="has no episode 8"):
        replay(config(dataset, tmp_path / "c", episodes=[8]))


def published(tokenizer: FastTokenizer) -> FastTokenizer:
    return FastTokenizer(tokenizer.vocabulary, scale=tokenizer.scale)


def test_a_tokenizer_that_does_not_say_what_it_is_for(dataset: Path, tmp_path: Path) -> None:
    published(fitted(dataset, 100.0)).save_pretrained(tmp_path / "any")
    wanted = config(dataset, tmp_path / "out", tokenizer=str(tmp_path / "any"))
    with pytest.raises(UsageError, match=r"it has no normalizer.json, as published tokenizers.*--normalization_mode"):
        replay(wanted)
    wanted = dataclasses.replace(wanted, normalization_mode="MIN_MAX")
    with pytest.raises(UsageError, match="takes chunks of any length: --action_horizon"):
        replay(wanted)
    result = replay(dataclasses.replace(wanted, action_horizon=5))
    assert result.summary["round_trip"]["horizon"] == 5
    assert result.summary["decoded"]["successes"] == 8


def test_flags_that_contradict_the_tokenizer(dataset: Path, tmp_path: Path) -> None:
    fitted(dataset, 100.0).save_pretrained(tmp_path / "own")
    wanted = config(dataset, tmp_path / "out", tokenizer=str(tmp_path / "own"))
    for more, message in (
        ({"action_horizon": 5}, "--action_horizon 5 contradicts the tokenizer"),
        ({"normalization_mode": "QUANTILES"}, "--normalization_mode QUANTILES contradicts the tokenizer"),
        ({"action_key": "image_age"}, "is for actions of 2 dimensions; 'image_age' has 1"),
    ):
        with pytest.raises(UsageError, match=message):
            replay(dataclasses.replace(wanted, **more))
    with pytest.raises(TokenizerError):
        replay(config(dataset, tmp_path / "out", tokenizer=str(tmp_path / "absent")))
    with pytest.raises(UsageError, match="--action_horizon has no effect without --tokenizer"):
        replay(config(dataset, tmp_path / "out", action_horizon=3))


def foreign(dataset: Path, root: Path) -> Path:
    """The first task's episodes as somebody else would have written them."""
    reader = open_dataset(NAME, root=dataset)
    features = {"action": reader.feature("action"), "observation.state": reader.feature("observation.state")}
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for episode in reader.iter_episodes(["executed_action", "observation.state"], range(4)):
            state = episode.columns["observation.state"]
            writer.add_episode({"action": episode.columns["executed_action"], "observation.state": state}, task="t")
    return root


def test_a_dataset_of_others(dataset: Path, tmp_path: Path) -> None:
    root = foreign(dataset, tmp_path / "theirs")
    with pytest.raises(
        DatasetError, match=r"recording.json is missing: .*--env.type, --env.task and --seeds, one seed"
    ):
        replay(config(root, tmp_path / "out"))
    env = EnvConfig(type="toy", task="reach-green")
    result = replay(config(root, tmp_path / "out", env=env, seeds=[0, 1, 2, 3]))
    assert (result.summary["action_key"], result.summary["raw"]["successes"]) == ("action", 4)
    assert result.summary["state_difference"]["largest"] == 0
    wrong = replay(config(root, tmp_path / "wrong", env=env, seeds=[3, 2, 1, 0]))
    assert wrong.summary["raw"]["successes"] < 4
    for more, message in (
        ({"env": env, "seeds": [0]}, "--seeds has 1 numbers, local/toy has 4 episodes"),
        ({"seeds": [0, 1, 2, 3]}, "--seeds needs --env.type and --env.task"),
        ({"env": EnvConfig(type="toy", task="reach-green,reach-blue"), "seeds": [0, 1, 2, 3]}, "--env.task: one task"),
    ):
        with pytest.raises(UsageError, match=message):
            replay(config(root, tmp_path / "more", **more))
    with pytest.raises(UsageError, match=r"--env.type has no effect without --seeds"):
        replay(config(dataset, tmp_path / "more", env=env))


def test_states_of_other_quantities_are_not_compared(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = EnvConfig(type="toy", task="reach-green")
    found = replay(
        config(foreign(dataset, tmp_path / "it"), tmp_path / "out", env=env, seeds=[0, 1, 2, 3], state_key="timestamp")
    )
    assert found.summary["state_difference"] is None
    assert "are not those of the dataset (another size), so they are not compared" in capsys.readouterr().out


def test_episodes_that_the_simulator_cuts_short_are_told_from_failures(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = EnvConfig(type="toy", task="reach-green", max_steps=4)
    replay(config(dataset, tmp_path, env=env, seeds=list(range(8))))
    assert "the simulator ended episodes 0, 1, 2, 3, 4, 5, 6, 7 before all of their actions" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_found_before_the_work(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "_execute_all", lambda *_: pytest.fail("it was executed"))
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(OSError, match="file"):
            replay(config(dataset, place))


def test_actions_of_another_robot(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"actions have 1 dimensions, those of toy reach-(green|blue) 2 \(dx, dy\)"):
        replay(config(dataset, tmp_path / "out", action_key="image_age"))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"env": {}}', '{"env": {}, "episodes": [{"task": "x"}]}', '{"env": 1, "episodes": []}']
)
def test_a_damaged_file(dataset: Path, tmp_path: Path, content: str) -> None:
    root = foreign(dataset, tmp_path / "it")
    (root / "meta/recording.json").write_text(content)
    with pytest.raises(DatasetError, match=r"recording.json is damaged"):
        replay(config(root, tmp_path / "out"))


def test_a_file_of_another_dataset(dataset: Path, tmp_path: Path) -> None:
    root = foreign(dataset, tmp_path / "it")
    (root / "meta/recording.json").write_text((dataset / "meta/recording.json").read_text())
    with pytest.raises(DatasetError, match=r"lists 8 episodes, the dataset has 4: they do not belong together"):
        replay(config(root, tmp_path / "out"))


def test_another_version_of_the_simulator_is_said(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = foreign(dataset, tmp_path / "it")
    found = json.loads((dataset / "meta/recording.json").read_text())
    found["episodes"] = found["episodes"][:4]
    found["versions"]["no-such-simulator"] = "1.2"
    (root / "meta/recording.json").write_text(json.dumps(found))
    replay(config(root, tmp_path / "out"))
    assert "was recorded with no-such-simulator 1.2, here none" in capsys.readouterr().err


def test_the_command(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(dataset, 50.0).save_pretrained(tmp_path / "own")
    command = ["replay", f"--repo_id={NAME}", f"--root={dataset}", f"--output_dir={tmp_path / 'out'}"]
    command += [f"--tokenizer={tmp_path / 'own'}", "--num_workers=0"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "replayed states differ from the recorded ones by at most 0 " in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["recorded", "8/8", "67.6%", "to", "100.0%"] in [row[:5] for row in rows]
    assert ["through", "the", "tokenizer", "8/8"] in [row[:4] for row in rows]
    assert main(command) == 2
    assert "replay.json is there already" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_meta_world_does_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    env = EnvConfig(type="metaworld", task="drawer-open-v3", cameras=["corner4"], image_size=32, fast_rendering=True)
    settings: dict[str, Any] = {"n_episodes": 2, "num_workers": 0, "video": False, "noise_std": 0.1, "every": 60}
    record(RecordConfig(repo_id=NAME, env=env, root=str(tmp_path / "it"), **settings))
    result = replay(config(tmp_path / "it", tmp_path / "out", num_workers=1))
    assert result.summary["raw"]["successes"] == 2
    assert result.summary["state_difference"]["largest"] == 0
