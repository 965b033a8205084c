"""The policy's configuration: LeRobot's defaults, both files of a checkpoint, and every refusal by name."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.policy_config import (
    PI0FastConfig,
    PolicyFeature,
    check_width,
    read_config,
    read_details,
    write_config,
)
from pi0_fast.types import PolicyError

CHECKPOINTS = ["lerobot_checkpoint", "lerobot_checkpoint_relative"]


def robot(**changes: Any) -> PI0FastConfig:
    """A configuration with one camera, a state of 4 and an action of 3 dimensions."""
    features = {
        "input_features": {
            "observation.images.top": {"type": "VISUAL", "shape": [3, 48, 64]},
            "observation.state": {"type": "STATE", "shape": [4]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
    }
    return PI0FastConfig(**{**features, **changes})


def lerobot_json(**changes: Any) -> dict[str, Any]:
    """The config.json of `robot()` with entries changed; None as a change stays None."""
    return {**robot().to_json(), **changes}


def test_the_defaults_are_those_of_the_documentation() -> None:
    """Every default of lerobot's page on the policy, and of its class; only the normalisation is ours."""
    config = PI0FastConfig()
    documented = {
        "paligemma_variant": "gemma_2b",
        "max_state_dim": 32,
        "max_action_dim": 32,
        "temperature": 0.0,
        "max_decoding_steps": 256,
        "use_kv_cache": True,
        "gradient_checkpointing": False,
        "dtype": "float32",
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_action_tokens": 256,
        "action_tokenizer_name": "lerobot/fast-action-tokenizer",
        "compile_model": False,
        "optimizer_fused": None,
        "tokenizer_max_length": 200,
        "text_tokenizer_name": "google/paligemma-3b-pt-224",
        "fast_skip_tokens": 128,
        "image_resolution": (224, 224),
        "empty_cameras": 0,
        "relative_exclude_joints": ["gripper"],
    }
    assert {name: getattr(config, name) for name in documented} == documented
    assert config.normalization_mapping == {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    assert (config.prompt_format, config.state_clip, config.action_clip, config.constrained) == (
        "lerobot",
        True,
        True,
        True,
    )


@pytest.mark.golden
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_lerobots_config_comes_back_byte_for_byte(shared: Path, tmp_path: Path, name: str) -> None:
    """Which also freezes the keys of config.json: lerobot 0.6.1 refuses a file with any other."""
    directory = shared / "golden" / name
    config = read_config(directory)
    write_config(tmp_path, config)
    assert (tmp_path / "config.json").read_text().rstrip() == (directory / "config.json").read_text().rstrip()
    assert read_config(tmp_path) == config
    assert set(json.loads((directory / "config.json").read_text())) == set(PI0FastConfig().to_json())


@pytest.mark.golden
def test_lerobots_checkpoints_keep_lerobots_behaviour(shared: Path) -> None:
    config = read_config(shared / "golden" / "lerobot_checkpoint_relative")
    assert (config.state_clip, config.action_clip, config.constrained) == (False, False, True)
    assert config.image_keys == (
        "observation.images.c0",
        "observation.images.c1",
        "observation.images.empty_camera_0",
    )
    assert (config.state_dim, config.action_dim) == (5, 5)
    assert config.mode("STATE") is NormalizationMode.MEAN_STD
    assert read_details(shared / "golden" / "lerobot_checkpoint_relative") == {}


def test_our_settings_travel_in_a_file_of_our_own(tmp_path: Path) -> None:
    config = robot(prompt_format="openpi", state_clip=False, position_gap=1, optimizer_fused=True, constrained=False)
    write_config(tmp_path, config, {"fingerprint": "abc"})
    assert read_config(tmp_path) == config
    assert read_details(tmp_path) == {"fingerprint": "abc"}
    assert "position_gap" not in json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "pi0_fast.json").unlink()  # as lerobot leaves the directory
    plain = read_config(tmp_path)
    assert (plain.prompt_format, plain.position_gap, plain.action_clip, plain.constrained) == (
        "lerobot",
        0,
        False,
        True,
    )


def test_unknown_keys_are_named_once_and_written_back() -> None:
    content = lerobot_json(shiny=[1, 2], other="x")
    with pytest.warns(UserWarning, match=r"config\.json: pi0-fast does not know other, shiny") as caught:
        config = PI0FastConfig.from_json(content)
    assert len(caught) == 1
    assert config.to_json() == content


def test_an_absent_normalization_mapping_says_nothing() -> None:
    content = lerobot_json()
    del content["normalization_mapping"]
    config = PI0FastConfig.from_json(content)
    assert config.normalization_mapping == {}
    with pytest.raises(PolicyError, match="normalization_mapping says nothing of STATE"):
        config.mode("STATE")


def test_null_features_are_none_yet() -> None:
    config = PI0FastConfig.from_json(lerobot_json(input_features=None, output_features=None))
    with pytest.raises(PolicyError, match=r"input_features lacks 'observation\.state'"):
        _ = config.state_dim
    with pytest.raises(PolicyError, match="output_features lacks 'action'"):
        _ = config.action_dim


def test_empty_cameras_come_last_and_only_once() -> None:
    config = robot(empty_cameras=2)
    expected = (
        "observation.images.top",
        "observation.images.empty_camera_0",
        "observation.images.empty_camera_1",
    )
    assert config.image_keys == expected
    assert config.expected_inputs[expected[1]] == PolicyFeature("VISUAL", (3, 224, 224))
    again = PI0FastConfig.from_json(config.to_json())
    assert again.image_keys == expected
    assert list(again.input_features)[-2:] == list(expected[1:])


def test_inputs_that_are_not_looked_at_may_be_declared() -> None:
    inputs = robot().to_json()["input_features"] | {"observation.environment_state": {"type": "ENV", "shape": [7]}}
    assert robot(input_features=inputs).image_keys == robot().image_keys


def test_lists_are_copied_and_tuples_become_lists() -> None:
    names = ("a", "b", "gripper")
    config = robot(action_feature_names=names, image_resolution=[64, 48])
    assert (config.action_feature_names, config.image_resolution) == (["a", "b", "gripper"], (64, 48))
    content = lerobot_json(tags=["x"])
    PI0FastConfig.from_json(content).to_json()["tags"].append("y")
    assert content["tags"] == ["x"]


def test_replace_checks_again() -> None:
    config = dataclasses.replace(robot(), chunk_size=10, n_action_steps=5)
    assert (config.chunk_size, config.n_action_steps) == (10, 5)
    with pytest.raises(PolicyError, match="n_action_steps"):
        dataclasses.replace(config, chunk_size=4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 10, "n_action_steps": 11}, r"n_action_steps \(11.*above chunk_size \(10"),
    ({"chunk_size": 0}, "chunk_size is 0"),
    ({"chunk_size": True}, "chunk_size is True"),
    ({"chunk_size": 2.0}, "chunk_size is 2.0"),
    ({"paligemma_variant": "gemma_7b"}, "paligemma_variant is 'gemma_7b'; one of gemma_300m, gemma_2b"),
    ({"dtype": "float16"}, "dtype is 'float16'; one of float32, bfloat16"),
    ({"prompt_format": "pi0"}, "prompt_format is 'pi0'"),
    ({"compile_mode": "fast"}, "compile_mode is 'fast'"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"optimizer_lr": float("inf")}, "optimizer_lr is inf"),
    ({"optimizer_betas": (0.9, 1.0)}, "optimizer_betas are"),
    ({"optimizer_betas": (0.9,)}, "optimizer_betas is"),
    ({"image_resolution": (224, 224.0)}, "image_resolution is"),
    ({"image_resolution": (0, 224)}, "image_resolution is"),
    ({"use_kv_cache": "false"}, "use_kv_cache is 'false'; expected true or false"),
    ({"optimizer_fused": 1}, "optimizer_fused is 1"),
    ({"text_tokenizer_name": None}, "text_tokenizer_name is None"),
    ({"relative_exclude_joints": "gripper"}, "relative_exclude_joints is 'gripper'; expected a list"),
    ({"relative_exclude_joints": None}, "relative_exclude_joints is None"),
    ({"action_feature_names": [1]}, "action_feature_names is"),
    ({"n_obs_steps": 2}, "n_obs_steps is 2: .*one observation"),
    ({"use_amp": True}, "use_amp is True: .*dtype=bfloat16"),
    ({"use_peft": True}, "use_peft is True: .*merge"),
    ({"rtc_config": {"execution_horizon": 10}}, "rtc_config is .*real-time chunking is not offered"),
    ({"rtc_config": "on"}, "rtc_config is 'on'"),
    ({"action_expert_variant": "gemma_2b"}, "action_expert_variant is 'gemma_2b': .*no action expert"),
    ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "MEAN_STD of VISUAL"),
    ({"normalization_mapping": {"STATE": "MINMAX"}}, "normalization_mapping: STATE: unknown normalization mode"),
    ({"normalization_mapping": {"state": "MIN_MAX"}}, "normalization_mapping names 'state'"),
    ({"normalization_mapping": None}, "normalization_mapping is None"),
    ({"max_state_dim": 3}, r"'observation\.state' has 4 dimensions .*above max_state_dim = 3"),
    ({"max_action_dim": 2}, "'action' has 3 dimensions .*above max_action_dim = 2"),
    ({"input_features": {"observation.state": {"type": "STATE", "shape": [4, 1]}}}, r"of shape \(4, 1\)"),
    ({"input_features": {"observation.state": {"type": "ENV", "shape": [4]}}}, "is ENV of shape"),
    ({"input_features": {"observation.image": {"type": "VISUAL", "shape": [64, 64, 3]}}}, "image is declared as"),
    ({"input_features": {"observation.image": {"type": "VIDEO", "shape": [3, 4, 4]}}}, "has the type 'VIDEO'"),
    ({"input_features": {"observation.state": {"type": "STATE", "shape": []}}}, "has the shape"),
    ({"input_features": {"observation.state": {"shape": [3]}}}, "expected 'type' and 'shape'"),
    ({"output_features": ["action"]}, "output_features is"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=[str(next(iter(c))) + str(i) for i, (c, _) in enumerate(REFUSED)]
)
def test_impossible_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        robot(**changes)


def test_a_disabled_real_time_chunking_is_no_obstacle() -> None:
    content = lerobot_json(rtc_config={"enabled": False, "execution_horizon": 10})
    assert PI0FastConfig.from_json(content).to_json() == content


@pytest.mark.parametrize("type_", [None, "pi0", "pi05"])
def test_another_policy_is_refused(type_: str | None) -> None:
    with pytest.raises(PolicyError, match=r"some/config\.json: 'type' is .*'pi0_fast'"):
        PI0FastConfig.from_json(lerobot_json(type=type_), "some/config.json")


def test_files_that_are_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(PolicyError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PolicyError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PolicyError, match=r"config\.json holds no JSON object"):
        read_config(tmp_path)
    write_config(tmp_path, robot())
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"dtype": "int8"}))
    with pytest.raises(PolicyError, match=r"config\.json: dtype is 'int8'"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; this pi0-fast reads"),
        ({"format": "x"}, "format 'x'"),
        ({"details": None}, "'details' must be an object"),
        ({"config": {"speed": 2}}, r"pi0_fast\.json beside .*unknown settings \['speed'\]"),
    ],
)
def test_our_own_file_is_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_config(tmp_path, robot())
    path = tmp_path / "pi0_fast.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PolicyError, match=message):
        read_config(tmp_path)


def test_widths_are_limits() -> None:
    check_width(32, PI0FastConfig(), "action", "here")
    with pytest.raises(PolicyError, match="33 dimensions \\(in the data\\), above max_action_dim = 32: raise"):
        check_width(33, PI0FastConfig(), "action", "in the data")


def test_equal_configurations_write_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            write_config(tmp_path / name, robot(pretrained_path=Path("x/y")))
    for file in ("config.json", "pi0_fast.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert read_config(tmp_path / "a").pretrained_path == "x/y"
