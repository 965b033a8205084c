"""Flags of `pi0-fast train`: their frozen list, what is refused before any work, the commands of the documentation, and
which configuration `--resume` starts from."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pi0_fast import policy_config, train_config
from pi0_fast.actions import dct
from pi0_fast.cli import COMMANDS, main
from pi0_fast.parsing import flags_of, help_text
from pi0_fast.train_config import (
    DatasetConfig,
    PeftConfig,
    PolicyOptions,
    TrainConfig,
    parse_train,
)
from pi0_fast.types import UsageError

PROGRAM = "pi0-fast train"
MINIMAL = ["--dataset.repo_id=a/b", "--policy.path=start"]
TRAIN = [
    "--dataset.repo_id=your_dataset",
    "--policy.type=pi0_fast",
    "--output_dir=./outputs/pi0fast_training",
    "--job_name=pi0fast_training",
    "--policy.pretrained_path=lerobot/pi0fast-base",
    "--policy.dtype=bfloat16",
    "--policy.gradient_checkpointing=true",
    "--policy.chunk_size=10",
    "--policy.n_action_steps=10",
    "--policy.max_action_tokens=256",
    "--steps=100000",
    "--batch_size=4",
    "--policy.device=cuda",
]
FINE_TUNE = [
    "--dataset.repo_id=lerobot/libero",
    "--output_dir=outputs/libero_pi0fast",
    "--job_name=libero_pi0fast",
    "--policy.path=lerobot/pi0fast-base",
    "--policy.dtype=bfloat16",
    "--steps=100000",
    "--save_freq=20000",
    "--batch_size=4",
    "--policy.device=cuda",
    "--policy.scheduler_warmup_steps=4000",
    "--policy.scheduler_decay_steps=100000",
    "--policy.scheduler_decay_lr=1e-5",
    "--policy.gradient_checkpointing=true",
    "--policy.chunk_size=10",
    "--policy.n_action_steps=10",
    "--policy.max_action_tokens=256",
    "--policy.empty_cameras=1",
]


def read(arguments: list[str]) -> TrainConfig:
    config = parse_train(TrainConfig, arguments, PROGRAM)
    config.validate()
    return config


# --- what is said ---------------------------------------------------------------------------------


def test_defaults_are_lerobots() -> None:
    defaults = {
        flag.name: flag.default for flag in flags_of(TrainConfig).values() if not flag.name.startswith("policy")
    }
    assert {name: defaults[name] for name in FROZEN} == FROZEN
    assert set(defaults) == set(FROZEN)


FROZEN: dict[str, Any] = {
    "dataset.repo_id": dataclasses.MISSING,
    "dataset.root": None,
    "dataset.revision": None,
    "dataset.weights": None,
    "dataset.episodes": None,
    "dataset.val_fraction": 0.0,
    "dataset.cameras": None,
    "dataset.state_key": "observation.state",
    "dataset.action_key": "action",
    "dataset.whole_chunks": False,
    "dataset.video_backend": "pyav",
    "dataset.cache_dir": None,
    "dataset.image_transforms.enable": False,
    "dataset.image_transforms.max_shift": 0.05,
    "dataset.image_transforms.brightness": 0.2,
    "dataset.image_transforms.contrast": 0.2,
    "dataset.image_transforms.saturation": 0.2,
    "output_dir": None,
    "job_name": None,
    "save_checkpoint": True,
    "save_freq": 20_000,
    "keep_last": None,
    "resume": False,
    "steps": 100_000,
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_workers": 4,
    "prefetch_factor": 4,
    "seed": 1000,
    "cudnn_deterministic": False,
    "allow_tf32": True,
    "distributed": None,
    "distributed_timeout_s": 60.0,
    "ema_decay": None,
    "freeze": None,
    "rename_map": None,
    "log_freq": 200,
    "eval_freq": 20_000,
    "max_eval_samples": 256,
    "wandb.enable": False,
    "wandb.project": "lerobot",
    "wandb.entity": None,
    "wandb.notes": None,
    "wandb.run_id": None,
    "wandb.mode": None,
    "trackio.enable": False,
    "trackio.project": "pi0-fast",
    "trackio.space_id": None,
    "peft.method_type": "LORA",
    "peft.r": 16,
    "peft.lora_alpha": None,
    "peft.target_modules": None,
    "peft.merge": False,
    "env.type": None,
    "env.task": None,
    "env.cameras": None,
    "env.image_size": None,
    "env.fast_rendering": False,
    "env.max_steps": None,
    "env.fps": None,
    "env.text": None,
    "env.options": None,
    "eval.n_episodes": 50,
    "eval.batch_size": 0,
    "eval.max_steps": None,
    "eval.timeout_s": 120.0,
    "eval.use_async_envs": True,
    "env_eval_freq": None,
}


def test_every_setting_of_a_policy_is_a_flag_or_has_a_reason_not_to_be() -> None:
    flags = {item.name for item in dataclasses.fields(PolicyOptions)}
    settings = {item.name for item in dataclasses.fields(policy_config.PI0FastConfig)}
    assert settings - flags == {"input_features", "output_features", "foreign_settings", "rtc_config"}
    assert flags - settings == {
        *("type", "path", "architecture", "statistics", "enable_fast_action_loss", "auto_fit_fast_tokenizer"),
        *("fast_tokenizer_cache_dir", "fast_tokenizer_fit_samples", "freeze_vision_encoder"),
        *("fast_tokenizer_rate_weight", "fast_tokenizer_order"),
    }


@pytest.mark.parametrize("name", ["POLICY_TYPE", "VARIANTS", "DTYPES", "PROMPT_FORMATS", "COMPILE_MODES"])
def test_constants_are_those_of_the_policy(name: str) -> None:
    assert getattr(train_config, name) == getattr(policy_config, name)


def test_the_shown_defaults_of_settings_are_those_of_the_policy() -> None:
    policy = policy_config.PI0FastConfig()
    for item in dataclasses.fields(PolicyOptions):
        shown = item.metadata["shown"]
        if shown is not None and shown.replace(".", "").replace("e-", "").isdigit():
            assert float(shown) == getattr(policy, item.name), item.name
        elif shown in ("true", "false") and hasattr(policy, item.name) and item.name != "private":
            assert getattr(policy, item.name) is (shown == "true"), item.name


def test_the_commands_of_the_documentation() -> None:
    config = read(TRAIN)
    assert (config.steps, config.batch_size, config.name) == (100_000, 4, "pi0fast_training")
    assert config.policy.pretrained_path == "lerobot/pi0fast-base"
    assert config.policy.settings() == {
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "chunk_size": 10,
        "n_action_steps": 10,
        "max_action_tokens": 256,
        "device": "cuda",
    }
    config = read(FINE_TUNE)
    assert config.policy.path == "lerobot/pi0fast-base"
    assert config.policy.settings()["scheduler_decay_lr"] == 1e-5
    assert config.policy.settings()["empty_cameras"] == 1
    assert not config.policy.pushes


def test_lists_maps_and_groups() -> None:
    config = read(
        [
            *MINIMAL,
            "--dataset.episodes=[3, 1]",
            "--rename_map={'observation.images.a': 'observation.images.b'}".replace("'", '"'),
            "--policy.optimizer_betas=[0.8, 0.9]",
            "--policy.normalization_mapping={STATE: MEAN_STD, ACTION: QUANTILES}",
            "--peft.r=4",
            "--dataset.eval_split=0.2",
            "--eval_steps=5",
        ]
    )
    assert config.dataset.episodes == [3, 1]
    assert config.members[0].renames == {"observation.images.a": "observation.images.b"}
    assert config.policy.settings() == {
        "optimizer_betas": (0.8, 0.9),
        "normalization_mapping": {"STATE": "MEAN_STD", "ACTION": "QUANTILES"},
    }
    assert config.peft == PeftConfig(r=4)
    assert (config.dataset.val_fraction, config.eval_freq) == (0.2, 5)
    assert read(MINIMAL).peft is None


def test_columns_of_other_names_are_renamed() -> None:
    config = read([*MINIMAL, "--dataset.state_key=state", "--dataset.action_key=actions"])
    assert config.members[0].renames == {"state": "observation.state", "actions": "action"}


def test_the_directory_depends_on_the_time() -> None:
    config = read(MINIMAL).resolved(datetime(2025, 1, 2, 3, 4, 5))
    assert config.output_dir == "outputs/train/2025-01-02/03-04-05_pi0_fast"
    assert config.resolved(datetime(2026, 1, 1)) == config


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy.path=x"], "--dataset.repo_id must be given"),
        (["--dataset.repo_id=a/b"], "--policy.path (a checkpoint"),
        (["--dataset.repo_id=a/b", "--policy.type=pi0_fast"], "random weights"),
        (["--dataset.repo_id=a/b", "--policy.type=pi0"], "--policy.type must be one of pi0_fast, not 'pi0'"),
        (
            ["--dataset.repo_id=a/b", "--policy.type=pi0_fast", "--policy.architecture=a", "--policy.statistics=data"],
            "--policy.statistics has no effect without a checkpoint",
        ),
        ([*MINIMAL, "--policy.dtyp=float32"], "did you mean --policy.dtype?"),
        ([*MINIMAL, "--polcy.dtype=float32"], "did you mean --policy.dtype?"),
        ([*MINIMAL, "--env.type=libro"], "--env.type must be one of"),
        ([*MINIMAL, "--env.type=toy"], "needs --env.task"),
        ([*MINIMAL, "--env.task=reach-green"], "--env.task has no effect without --env.type"),
        ([*MINIMAL, "--eval.n_episodes=3"], "--eval.n_episodes has no effect without --env.type"),
        ([*MINIMAL, "--env_eval_freq=3"], "--env_eval_freq has no effect without --env.type"),
        ([*MINIMAL, "--env.type=toy", "--env.task=a", "--eval_freq=0"], "give --env_eval_freq"),
        ([*MINIMAL, "--optimizer.lr=1"], "--policy.optimizer_lr"),
        ([*MINIMAL, "--dataset.use_imagenet_stats=false"], "leave it out"),
        ([*MINIMAL, "--dataset.video_backend=torchcodec"], "one of pyav"),
        ([*MINIMAL, "--policy.enable_fast_action_loss=false"], "no other loss"),
        ([*MINIMAL, "--policy.push_to_hub=true"], "needs --policy.repo_id"),
        ([*MINIMAL, "--policy.repo_id=a/b", "--policy.push_to_hub=false"], "--policy.repo_id has no effect"),
        ([*MINIMAL, "--policy.private=true"], "--policy.private has no effect"),
        ([*MINIMAL, "--dataset.root=x", "--dataset.revision=main"], "--dataset.revision has no effect"),
        ([*MINIMAL, "--dataset.val_fraction=1"], "below 1"),
        ([*MINIMAL, "--dataset.episodes=[1, 1]"], "names 1 twice"),
        ([*MINIMAL, "--dataset.episodes=[]"], "empty list"),
        ([*MINIMAL, "--dataset.image_transforms.max_shift=0.1"], "image_transforms.enable=true"),
        ([*MINIMAL, "--num_workers=0", "--prefetch_factor=2"], "--prefetch_factor has no effect"),
        ([*MINIMAL, "--save_checkpoint=false", "--keep_last=2"], "--keep_last has no effect"),
        ([*MINIMAL, "--save_checkpoint=false", "--save_freq=5"], "--save_freq has no effect"),
        ([*MINIMAL, "--save_checkpoint=false", "--peft.merge=true"], "--peft.merge has no effect"),
        ([*MINIMAL, "--eval_freq=0", "--max_eval_samples=9"], "--max_eval_samples has no effect with --eval_freq=0"),
        ([*MINIMAL, "--policy.fast_tokenizer_cache_dir=x"], "without --policy.auto_fit_fast_tokenizer=true"),
        ([*MINIMAL, "--policy.fast_tokenizer_fit_samples=9"], "without --policy.auto_fit_fast_tokenizer=true"),
        ([*MINIMAL, "--policy.fast_tokenizer_rate_weight=1"], "without --policy.auto_fit_fast_tokenizer=true"),
        ([*MINIMAL, "--policy.fast_tokenizer_order=dimension"], "without --policy.auto_fit_fast_tokenizer=true"),
        ([*MINIMAL, "--policy.fast_tokenizer_order=auto"], "one of frequency, dimension"),
        ([*MINIMAL, "--policy.fast_tokenizer_rate_weight=-1"], "at least 0"),
        ([*MINIMAL, "--peft.target_modules=[]"], "--peft.target_modules is empty"),
        ([*MINIMAL, "--peft.r=4", "--freeze=[x]"], "only adapters are trained"),
        ([*MINIMAL, "--peft.method_type=DORA"], "one of LORA"),
        ([*MINIMAL, "--wandb.entity=me"], "--wandb.enable=true"),
        ([*MINIMAL, "--ema_decay=1"], "below 1"),
        ([*MINIMAL, "--steps=0"], "--steps must be a whole number of at least 1"),
        ([*MINIMAL, "--batch_size=2.5"], "--batch_size"),
        ([*MINIMAL, "--policy.dtype=float16"], "one of float32, bfloat16"),
        ([*MINIMAL, "--resume"], "--resume needs --output_dir"),
    ],
)
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_help_explains_every_flag() -> None:
    text = help_text(TrainConfig, PROGRAM, COMMANDS["train"].summary)
    for flag in flags_of(TrainConfig).values():
        assert f"--{flag.name} " in text
        assert flag.help
        assert flag.help.endswith(".")
    assert max(map(len, text.splitlines())) <= 100


# --- files ----------------------------------------------------------------------------------------


def saved(run: Path, step: int, arguments: list[str]) -> Path:
    """A checkpoint's train_config.json."""
    folder = run / "checkpoints" / f"{step:06d}" / "pretrained_model"
    folder.mkdir(parents=True)
    read([*arguments, f"--output_dir={run}"]).write(folder)
    return folder / "train_config.json"


def test_what_is_saved_reads_back_the_same(tmp_path: Path) -> None:
    arguments = [
        *MINIMAL,
        "--peft.r=4",
        "--rename_map={a: b}",
        "--policy.optimizer_betas=[0.8, 0.9]",
        "--dataset.image_transforms.enable=true",
        "--wandb.enable=true",
        "--wandb.mode=offline",
        "--dataset.episodes=[0,2]",
    ]
    file = saved(tmp_path, 3, arguments)
    assert read([f"--config_path={file}"]) == read([*arguments, f"--output_dir={tmp_path}"])
    assert json.loads(file.read_text())["policy"] == {
        "path": "start",
        "auto_fit_fast_tokenizer": False,
        "fast_tokenizer_cache_dir": "~/.cache/pi0_fast/tokenizers",
        "fast_tokenizer_fit_samples": 1024,
        "fast_tokenizer_rate_weight": 0.0,
        "fast_tokenizer_order": "frequency",
        "freeze_vision_encoder": False,
        "optimizer_betas": [0.8, 0.9],
    }


def test_resume_takes_the_flags_of_the_run(tmp_path: Path) -> None:
    saved(tmp_path, 2, [*MINIMAL, "--steps=10", "--seed=7"])
    config = read(["--resume=true", f"--output_dir={tmp_path}", "--steps=20"])
    assert (config.steps, config.seed, config.policy.path, config.resume) == (20, 7, "start", True)
    assert config.output_path == tmp_path
    assert config.checkpoint is None  # the newest complete one, which the loop looks for
    assert read(["--resume", f"--config_path={tmp_path}"]).checkpoint is None


def test_resume_from_a_given_checkpoint(tmp_path: Path) -> None:
    first = saved(tmp_path / "moved", 2, [*MINIMAL, "--steps=10"])
    saved(tmp_path / "moved", 4, [*MINIMAL, "--steps=99"])
    run = tmp_path / "elsewhere"
    (tmp_path / "moved").rename(run)
    for place in (run / "checkpoints/000002", run / "checkpoints/000002/pretrained_model"):
        config = read(["--resume=true", f"--config_path={place}"])
        assert config.checkpoint == run / "checkpoints/000002"
        assert config.output_path == run  # where it is now, not where it was
        assert config.steps == 10
    config = read(["--resume=true", f"--config_path={run / 'checkpoints/000002/pretrained_model' / first.name}"])
    assert config.checkpoint == run / "checkpoints/000002"


@pytest.mark.parametrize(
    ("flag", "before"),
    [
        ("--policy.path=other", '"start"'),
        ("--policy.text_tokenizer_name=byte", "null"),
        ("--policy.use_relative_actions=true", "null"),
        ("--policy.chunk_size=7", "null"),
        ("--policy.auto_fit_fast_tokenizer=true", "false"),
        ("--rename_map={c: d}", '{"a": "b"}'),
        ("--peft.r=8", "4"),
        ("--dataset.action_key=other", '"action"'),
    ],
)
def test_what_belongs_to_the_run_is_not_ignored(tmp_path: Path, flag: str, before: str) -> None:
    saved(tmp_path, 2, [*MINIMAL, "--rename_map={a: b}", "--peft.r=4"])
    name = flag.partition("=")[0]
    with pytest.raises(UsageError, match=rf"{name} belongs to the run \({re.escape(before)}\) and cannot be changed"):
        read(["--resume=true", f"--output_dir={tmp_path}", flag])
    same = ["--policy.path=start", "--rename_map={a: b}", "--peft.r=4", "--dataset.action_key=action"]
    read(["--resume=true", f"--output_dir={tmp_path}", *same])


def test_resume_of_a_run_that_saved_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no checkpoint to go on from; leave out --resume"):
        read(["--resume", f"--output_dir={tmp_path}"])


def test_resume_with_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"dataset:\n  repo_id: a/b\npolicy:\n  path: start\noutput_dir: {tmp_path / 'run'}\n")
    config = read(["--resume", f"--config_path={file}"])
    assert (config.checkpoint, config.output_path) == (None, tmp_path / "run")


def test_orders_are_those_of_the_tokenizer() -> None:
    assert train_config.ORDERS == dct.ORDERS


def test_python_users_build_the_same() -> None:
    assert TrainConfig(DatasetConfig("a/b"), PolicyOptions(path="start")) == read(MINIMAL)
