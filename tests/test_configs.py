"""The options of every command: their frozen list, their help, what is refused before any work, and their
values for every documented command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pi0_fast.actions.bpe import MAX_VOCABULARY
from pi0_fast.actions.inputs import checked_scale
from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.configs import (
    LARGEST_SCALE,
    LARGEST_VOCABULARY,
    NORMALIZATION_MODES,
    SMALLEST_SCALE,
    DemoConfig,
    InspectConfig,
    TokenizerTrainingConfig,
)
from pi0_fast.parsing import flags_of, help_text, parse, type_name
from pi0_fast.types import TokenizerError, UsageError

# Renaming or dropping one of these breaks somebody's script: it needs an entry in the change log too.
FROZEN = {
    "repo_id": dataclasses.MISSING,
    "root": None,
    "revision": None,
    "weights": None,
    "cache_dir": None,
    "local_files_only": False,
    "max_episodes": None,
    "max_chunks": 200_000,
    "sample_fraction": 0.1,
    "val_fraction": 0.1,
    "seed": 0,
    "action_key": "action",
    "action_horizon": 10,
    "encoded_dims": None,
    "use_delta_transform": False,
    "delta_dims": None,
    "delta_state_dims": None,
    "state_key": "observation.state",
    "normalization_mode": "QUANTILES",
    "vocab_size": 1024,
    "scale": 10.0,
    "symbol_format": "plain",
    "headroom": None,
    "rate_weight": None,
    "order": "frequency",
    "target_rmse": None,
    "target_error": None,
    "target_tokens": None,
    "output_dir": None,
    "overwrite": False,
    "report": False,
    "num_workers": None,
    "push_to_hub": False,
    "hub_repo_id": None,
    "hub_private": False,
}
FROZEN_INSPECT = {
    "repo_id": dataclasses.MISSING,
    "root": None,
    "revision": None,
    "cache_dir": None,
    "local_files_only": False,
    "max_episodes": None,
    "tokenizer": None,
    "tokenizer_revision": None,
    "max_chunks": 5000,
    "val_fraction": 0.1,
    "scales": None,
    "seed": 0,
    "action_key": "action",
    "action_horizon": None,
    "encoded_dims": None,
    "use_delta_transform": False,
    "delta_dims": None,
    "delta_state_dims": None,
    "state_key": None,
    "normalization_mode": None,
    "output_dir": None,
    "overwrite": False,
    "num_workers": None,
}
FROZEN_DEMO = {
    "output_dir": "demo_output",
    "overwrite": False,
    "tasks": None,
    "quick": False,
    "blind": False,
    "seed": 0,
}
FROZEN_ALIASES = {"relative_dims": "delta_dims", "use_relative_transform": "use_delta_transform"}

# Every command line of LeRobot's documentation of this command, with the values it must give.
DOCUMENTED = [
    pytest.param(
        ["--repo_id=lerobot/aloha_mobile_cabinet", "--action_horizon=10", "--vocab_size=1024"],
        {"repo_id": "lerobot/aloha_mobile_cabinet", "action_horizon": 10, "vocab_size": 1024},
        id="basic",
    ),
    pytest.param(
        [
            "--repo_id=lerobot/aloha_mobile_cabinet",
            "--action_horizon=10",
            "--encoded_dims=0:14",
            "--delta_dims=0,1,2,3,4,5,6,7,8,9,10,11,12,13",
            "--use_delta_transform=true",
            "--state_key=observation.state",
            "--normalization_mode=QUANTILES",
            "--vocab_size=1024",
        ],
        {
            "repo_id": "lerobot/aloha_mobile_cabinet",
            "action_horizon": 10,
            "encoded_dims": "0:14",
            "delta_dims": "0,1,2,3,4,5,6,7,8,9,10,11,12,13",
            "use_delta_transform": True,
            "state_key": "observation.state",
            "normalization_mode": "QUANTILES",
            "vocab_size": 1024,
        },
        id="delta",
    ),
    pytest.param(
        [
            "--repo_id=myuser/my_dataset",
            "--action_horizon=15",
            "--encoded_dims=0:6",
            "--vocab_size=512",
            "--scale=15.0",
        ],
        {
            "repo_id": "myuser/my_dataset",
            "action_horizon": 15,
            "encoded_dims": "0:6",
            "vocab_size": 512,
            "scale": 15.0,
        },
        id="dimensions",
    ),
    pytest.param(
        [
            "--repo_id=lerobot/pusht",
            "--max_episodes=100",
            "--sample_fraction=0.2",
            "--action_horizon=16",
            "--vocab_size=2048",
        ],
        {
            "repo_id": "lerobot/pusht",
            "max_episodes": 100,
            "sample_fraction": 0.2,
            "action_horizon": 16,
            "vocab_size": 2048,
        },
        id="sampling",
    ),
    pytest.param(
        [
            "--repo_id=lerobot/aloha_mobile_cabinet",
            "--action_horizon=10",
            "--vocab_size=1024",
            "--output_dir=./my_tokenizer",
            "--push_to_hub=true",
            "--hub_repo_id=myuser/aloha_tokenizer",
            "--hub_private=false",
        ],
        {
            "repo_id": "lerobot/aloha_mobile_cabinet",
            "action_horizon": 10,
            "vocab_size": 1024,
            "output_dir": "./my_tokenizer",
            "push_to_hub": True,
            "hub_repo_id": "myuser/aloha_tokenizer",
            "hub_private": False,
        },
        id="push",
    ),
    pytest.param(
        [
            *("--repo_id", "user/my-lerobot-dataset"),
            *("--action_horizon", "10"),
            *("--encoded_dims", "0:6"),
            *("--vocab_size", "1024"),
            *("--scale", "10.0"),
            *("--normalization_mode", "QUANTILES"),
            *("--output_dir", "./my_fast_tokenizer"),
            *("--push_to_hub", "true"),
            *("--hub_repo_id", "username/my-action-tokenizer"),
        ],
        {
            "repo_id": "user/my-lerobot-dataset",
            "action_horizon": 10,
            "encoded_dims": "0:6",
            "vocab_size": 1024,
            "scale": 10.0,
            "normalization_mode": "QUANTILES",
            "output_dir": "./my_fast_tokenizer",
            "push_to_hub": True,
            "hub_repo_id": "username/my-action-tokenizer",
        },
        id="pi0_fast page",
    ),
]


def defaults_of(config_class: type[Any]) -> dict[str, Any]:
    return {flag.name: flag.default for flag in flags_of(config_class).values()}


def tokenizer_config(*arguments: str) -> TokenizerTrainingConfig:
    return parse(TokenizerTrainingConfig, arguments, "pi0-fast train-tokenizer")


def test_the_list_of_options_is_frozen() -> None:
    assert defaults_of(TokenizerTrainingConfig) == FROZEN
    assert defaults_of(InspectConfig) == FROZEN_INSPECT
    assert defaults_of(DemoConfig) == FROZEN_DEMO
    flags = flags_of(TokenizerTrainingConfig).values()
    assert {alias: flag.name for flag in flags for alias in flag.aliases} == FROZEN_ALIASES


@pytest.mark.parametrize("config_class", [TokenizerTrainingConfig, InspectConfig, DemoConfig])
def test_help_shows_every_flag_with_its_default(config_class: type[Any]) -> None:
    text = help_text(config_class, "pi0-fast x", "Does x.")
    assert max(map(len, text.splitlines())) <= 100
    joined = " ".join(text.split())
    for flag in flags_of(config_class).values():
        assert flag.help, flag.name
        _, found, entry = joined.partition(f" --{flag.name} {type_name(flag.kind)} ")
        assert found, flag.name
        state = entry.partition("(default: ")[2].partition(")")[0]
        if flag.default is dataclasses.MISSING:
            assert entry.partition("(")[2].startswith("required)"), flag.name
        elif flag.default is None:
            assert state == " ".join((flag.shown or "none").split()), flag.name
        else:
            assert state == str(flag.default).replace("True", "true").replace("False", "false"), flag.name
    for alias in (a for flag in flags_of(config_class).values() for a in flag.aliases):
        assert f"--{alias}" in text


@pytest.mark.parametrize(("arguments", "expected"), DOCUMENTED)
def test_documented_command_lines_give_exactly_these_values(arguments: list[str], expected: dict[str, Any]) -> None:
    config = tokenizer_config(*arguments)
    assert dataclasses.asdict(config) == {**FROZEN, **expected}
    assert {name: type(value) for name, value in expected.items()} == {
        name: type(getattr(config, name)) for name in expected
    }


def test_the_documented_default_of_encoded_dims_is_still_accepted() -> None:
    assert tokenizer_config("--repo_id=a", "--encoded_dims", "0:6,7:23").encoded_dims == "0:6,7:23"


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        (["--encoded_dims", "0"], "encoded_dims", "0"),
        (["--encoded_dims", "1:30"], "encoded_dims", "1:30"),
        (["--relative_dims", "0,1,2"], "delta_dims", "0,1,2"),
        (["--use_relative_transform", "true"], "use_delta_transform", True),
        (["--use_relative_transform"], "use_delta_transform", True),
        (["--root", "null"], "root", None),
        (["--scale", "[10,20]"], "scale", [10.0, 20.0]),
        (["--scale", "10"], "scale", 10.0),
        (["--revision", "1.0"], "revision", "1.0"),
    ],
)
def test_values_that_yaml_would_change(arguments: list[str], name: str, expected: Any) -> None:
    value = getattr(tokenizer_config("--repo_id", "123", *arguments), name)
    assert value == expected
    assert type(value) is type(expected)
    assert tokenizer_config("--repo_id", "123", *arguments).repo_id == "123"


def test_both_spellings_with_different_values_are_refused() -> None:
    with pytest.raises(UsageError, match="--delta_dims and --relative_dims are two spellings"):
        tokenizer_config("--repo_id=a", "--delta_dims=0", "--relative_dims=1")
    assert tokenizer_config("--repo_id=a", "--delta_dims=0", "--relative_dims=0").delta_dims == "0"


def test_output_path() -> None:
    assert TokenizerTrainingConfig("lerobot/pusht").output_path == Path("fast_tokenizer_lerobot_pusht")
    assert TokenizerTrainingConfig("lerobot/pusht", output_dir="a/b").output_path == Path("a/b")


def test_the_default_name_on_the_hub_is_the_name_of_the_output_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TokenizerTrainingConfig("lerobot/pusht").hub_name == "fast_tokenizer_lerobot_pusht"
    assert TokenizerTrainingConfig("lerobot/pusht", output_dir="a/b/").hub_name == "b"
    assert TokenizerTrainingConfig("lerobot/pusht", output_dir="a/b", hub_repo_id="me/c").hub_name == "me/c"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert TokenizerTrainingConfig("lerobot/pusht", output_dir=".").hub_name == "here"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"root": "data", "local_files_only": True},
        {"sample_fraction": 1},
        {"val_fraction": 0},
        {"scale": [5, 0.5]},
        {"vocab_size": 65_535, "action_horizon": 65_535, "scale": [1e-30, 1e30], "headroom": 100},
        {"root": "caf\udce9", "output_dir": "~/x"},
        {"vocab_size": 2, "max_episodes": 1, "num_workers": 1, "headroom": 0},
        {"use_delta_transform": True, "delta_dims": "0", "delta_state_dims": "1", "state_key": "state"},
        {"normalization_mode": "IDENTITY", "symbol_format": "reference"},
        {"order": "auto", "target_error": [0.1, 2], "rate_weight": 0},
        {"repo_id": ["a/b", "c/d"], "order": "dimension", "rate_weight": 0.6},
    ],
)
def test_valid_configurations(changes: dict[str, Any]) -> None:
    TokenizerTrainingConfig(**{"repo_id": "a/b", **changes}).validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repo_id": " "}, ["--repo_id", "' '"]),
        ({"repo_id": "a/\udcff"}, ["--repo_id", "'a/\\udcff'"]),
        ({"action_key": "a\0"}, ["--action_key", "'a\\x00'"]),
        ({"root": "a\0b"}, ["--root", "'a\\x00b'"]),
        ({"root": "~nosuchuser/x"}, ["--root '~nosuchuser/x'", "home directory"]),
        ({"cache_dir": "~nosuchuser"}, ["--cache_dir '~nosuchuser'"]),
        ({"output_dir": "~nosuchuser/x"}, ["--output_dir '~nosuchuser/x'"]),
        ({"vocab_size": 65_536}, ["--vocab_size", "at most 65535", "65536"]),
        ({"action_horizon": 65_536}, ["--action_horizon", "at most 65535"]),
        ({"scale": 1e-40}, ["--scale", "1e-30", "1e-40"]),
        ({"scale": [1.0, 1e31]}, ["--scale", "1e+30", "1e+31", "number 1"]),
        ({"scale": 10**400}, ["--scale", "finite"]),
        ({"headroom": 1e308}, ["--headroom", "at most 100", "1e+308"]),
        ({"root": ""}, ["--root"]),
        ({"output_dir": ""}, ["--output_dir"]),
        ({"encoded_dims": 6}, ["--encoded_dims", "6"]),
        ({"action_horizon": 0}, ["--action_horizon", "at least 1", "0"]),
        ({"action_horizon": 2.0}, ["--action_horizon", "whole number", "2.0"]),
        ({"action_horizon": True}, ["--action_horizon", "True"]),
        ({"vocab_size": 1}, ["--vocab_size", "at least 2"]),
        ({"seed": -1}, ["--seed"]),
        ({"max_episodes": 0}, ["--max_episodes"]),
        ({"max_chunks": 0}, ["--max_chunks"]),
        ({"num_workers": 0}, ["--num_workers"]),
        ({"sample_fraction": 0.0}, ["--sample_fraction", "above 0", "0.0"]),
        ({"sample_fraction": 1.01}, ["--sample_fraction", "1.01"]),
        ({"sample_fraction": float("nan")}, ["--sample_fraction", "nan"]),
        ({"val_fraction": 1.0}, ["--val_fraction", "below 1"]),
        ({"val_fraction": -0.1}, ["--val_fraction", "-0.1"]),
        ({"headroom": -1.0}, ["--headroom"]),
        ({"headroom": 0.1, "symbol_format": "reference"}, ["--headroom", "reference"]),
        ({"rate_weight": -0.1}, ["--rate_weight", "at least 0", "-0.1"]),
        ({"rate_weight": float("inf")}, ["--rate_weight", "finite"]),
        ({"order": "zigzag"}, ["--order", "frequency, dimension, auto"]),
        ({"target_rmse": 0.0}, ["--target_rmse", "above 0"]),
        ({"target_tokens": float("nan")}, ["--target_tokens", "finite"]),
        ({"target_error": []}, ["--target_error", "empty"]),
        ({"target_error": [0.1, -1.0]}, ["--target_error", "-1.0"]),
        ({"target_rmse": 0.1, "target_tokens": 9}, ["--target_rmse", "--target_tokens", "one target"]),
        ({"repo_id": ["a/b", "c/d"], "target_rmse": 0.1}, ["--target_rmse", "one dataset"]),
        ({"repo_id": ["a/b", "c/d"], "order": "auto"}, ["--order auto", "one dataset"]),
        ({"scale": 0.0}, ["--scale", "above 0"]),
        ({"scale": float("inf")}, ["--scale", "finite", "inf"]),
        ({"scale": []}, ["--scale", "empty"]),
        ({"scale": [10.0, -1.0]}, ["--scale", "-1.0", "number 1"]),
        ({"scale": "10"}, ["--scale", "'10'"]),
        ({"normalization_mode": "quantiles"}, ["--normalization_mode", "did you mean QUANTILES?"]),
        ({"normalization_mode": "Q01"}, ["--normalization_mode", "MEAN_STD", "IDENTITY", "'Q01'"]),
        ({"symbol_format": "bytes"}, ["--symbol_format", "plain, reference"]),
        ({"use_delta_transform": True}, ["--use_delta_transform", "--delta_dims"]),
        ({"delta_dims": "0"}, ["--delta_dims", "no effect", "--use_delta_transform"]),
        ({"delta_state_dims": "0"}, ["--delta_state_dims", "no effect"]),
        ({"state_key": "state"}, ["--state_key", "no effect"]),
        ({"root": "data", "revision": "main"}, ["--revision", "no effect", "--root"]),
        ({"root": "data", "cache_dir": "c"}, ["--cache_dir", "no effect", "--root"]),
        ({"hub_repo_id": "a/b"}, ["--hub_repo_id", "no effect", "--push_to_hub"]),
        ({"hub_private": True}, ["--hub_private", "no effect", "--push_to_hub"]),
        ({"push_to_hub": True, "hub_repo_id": " "}, ["--hub_repo_id", "not empty"]),
        ({"push_to_hub": True, "hub_repo_id": "a/b/c"}, ["--hub_repo_id, 'a/b/c'", "owner/name"]),
        ({"push_to_hub": True, "output_dir": "my tokenizer"}, ["'my tokenizer'", "give --hub_repo_id"]),
    ],
)
def test_impossible_values_are_refused_before_any_work(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        TokenizerTrainingConfig(**{"repo_id": "a/b", **changes}).validate()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"root": "data", "local_files_only": True, "action_horizon": 5, "encoded_dims": "0:2"},
        {"use_delta_transform": True, "delta_dims": "0", "state_key": "state"},
        {"tokenizer": "t", "root": "data", "cache_dir": "c", "state_key": "state"},
        {"tokenizer": "a/t", "tokenizer_revision": "v1", "scales": [1, 2.5], "max_chunks": 1, "val_fraction": 0},
        {"tokenizer": "a/t", "normalization_mode": "MIN_MAX", "seed": 3, "num_workers": 2},
    ],
)
def test_valid_inspections(changes: dict[str, Any]) -> None:
    InspectConfig(**{"repo_id": "a/b", **changes}).validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repo_id": ""}, ["--repo_id"]),
        ({"tokenizer": "~nosuchuser/x"}, ["--tokenizer '~nosuchuser/x'"]),
        ({"output_dir": "~nosuchuser/x"}, ["--output_dir '~nosuchuser/x'"]),
        ({"action_horizon": 65_536}, ["--action_horizon", "at most 65535"]),
        ({"tokenizer": "t", "scales": [1e-40]}, ["--scales", "1e-40"]),
        ({"tokenizer": " "}, ["--tokenizer"]),
        ({"action_horizon": 0}, ["--action_horizon", "at least 1"]),
        ({"tokenizer": "t", "max_chunks": 0}, ["--max_chunks", "at least 1"]),
        ({"tokenizer": "t", "val_fraction": 1.0}, ["--val_fraction", "below 1"]),
        ({"tokenizer": "t", "scales": []}, ["--scales", "empty"]),
        ({"tokenizer": "t", "scales": [10.0, 0.0]}, ["--scales", "0.0"]),
        ({"tokenizer": "t", "normalization_mode": "quantiles"}, ["--normalization_mode", "did you mean QUANTILES?"]),
        ({"max_chunks": 7}, ["--max_chunks", "no effect without --tokenizer"]),
        ({"scales": [1.0]}, ["--scales", "no effect without --tokenizer"]),
        ({"val_fraction": 0.2}, ["--val_fraction", "no effect without --tokenizer"]),
        ({"seed": 1}, ["--seed", "no effect without --tokenizer"]),
        ({"normalization_mode": "MIN_MAX"}, ["--normalization_mode", "no effect without --tokenizer"]),
        ({"tokenizer_revision": "main"}, ["--tokenizer_revision", "no effect without --tokenizer"]),
        ({"num_workers": 1}, ["--num_workers", "no effect without --tokenizer"]),
        ({"state_key": "state"}, ["--state_key", "no effect"]),
        ({"use_delta_transform": True}, ["--use_delta_transform", "--delta_dims"]),
        ({"delta_dims": "0"}, ["--delta_dims", "no effect", "--use_delta_transform"]),
        ({"root": "data", "revision": "main"}, ["--revision", "no effect", "--root"]),
        ({"root": "data", "cache_dir": "c"}, ["--cache_dir", "no effect", "--root"]),
    ],
)
def test_impossible_inspections_are_refused_before_any_work(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        InspectConfig(**{"repo_id": "a/b", **changes}).validate()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_the_modes_are_those_of_the_normalizer() -> None:
    assert set(NORMALIZATION_MODES) == set(NormalizationMode.__members__)
    for mode in NormalizationMode:
        TokenizerTrainingConfig("a/b", normalization_mode=mode).validate()


def test_the_limits_are_those_of_the_tokenizer() -> None:
    assert LARGEST_VOCABULARY == MAX_VOCABULARY
    for scale in (SMALLEST_SCALE, LARGEST_SCALE):
        assert checked_scale(scale, None) == scale
    for scale in (SMALLEST_SCALE / 2, LARGEST_SCALE * 2):
        with pytest.raises(TokenizerError):
            checked_scale(scale, None)


def test_demo_configuration() -> None:
    DemoConfig().validate()
    with pytest.raises(UsageError, match="--output_dir"):
        DemoConfig(output_dir="").validate()
    with pytest.raises(UsageError, match="--output_dir '~nosuchuser'"):
        DemoConfig(output_dir="~nosuchuser").validate()
    with pytest.raises(UsageError, match="--seed"):
        DemoConfig(seed=-1).validate()
