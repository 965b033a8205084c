"""The flags of `pi0-fast eval`: what is read and refused, and what may differ on --resume."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import pytest

from pi0_fast.eval_config import EvalConfig, EvalPolicyOptions, check_same, parse_eval
from pi0_fast.types import UsageError

ENV = ["--env.type=toy", "--env.task=reach-green"]


def parsed(*argv: str) -> EvalConfig:
    config = parse_eval(EvalConfig, argv, "pi0-fast eval")
    config.validate()
    return config


def test_the_documented_command_of_lerobot_is_read() -> None:
    config = parsed(
        "--policy.path=lerobot/pi0fast-libero",
        "--policy.max_action_tokens=256",
        "--env.type=libero",
        "--policy.gradient_checkpointing=false",
        "--env.task=libero_object,libero_spatial,libero_goal,libero_10",
        "--eval.batch_size=1",
        "--eval.n_episodes=1",
        '--rename_map={"observation.images.image":"observation.images.base_0_rgb"}',
    )
    assert config.paths == ("lerobot/pi0fast-libero",)
    suites = ("libero_object", "libero_spatial", "libero_goal", "libero_10")
    assert config.env.tasks == tuple(f"{suite}/{number}" for suite in suites for number in range(10))
    assert (config.eval.batch_size, config.eval.n_episodes) == (1, 1)
    assert config.policy.overrides() == {"max_action_tokens": 256}
    assert config.rename_map == {"observation.images.image": "observation.images.base_0_rgb"}


def test_overrides_are_fields_of_the_policy() -> None:
    policy_config = pytest.importorskip("pi0_fast.policy_config")
    known = {item.name for item in fields(policy_config.PI0FastConfig)}
    own = {"path", "type", "pretrained_revision", "robot", "architecture", "device", "dtype", "gradient_checkpointing"}
    assert {item.name for item in fields(EvalPolicyOptions)} - own <= known
    given = parsed("--policy.path=a", "--policy.n_action_steps=10", "--policy.constrained=false", *ENV)
    assert given.policy.overrides() == {"n_action_steps": 10, "constrained": False}


def test_two_policies_are_given_as_two_words_or_as_a_list() -> None:
    for argv in (["--compare", "runs/a", "runs/b"], ['--compare=["runs/a", "runs/b"]']):
        config = parsed(*argv, *ENV)
        assert config.paths == ("runs/a", "runs/b")
    assert parsed(*ENV, "--compare", "a", "b").paths == ("a", "b")


def test_seeds_are_not_those_that_demonstrations_are_recorded_with() -> None:
    config = parsed("--policy.path=a", *ENV, "--eval.n_episodes=3")
    assert list(config.seeds) == [100_000, 100_001, 100_002]
    assert list(parsed("--policy.path=a", *ENV, "--eval.n_episodes=2", "--seed=7").seeds) == [7, 8]


def test_where_results_go() -> None:
    config = parsed("--policy.path=a", *ENV).resolved(datetime(2026, 5, 4, 3, 2, 1))
    assert config.output_path == Path("outputs/eval/2026-05-04/03-02-01_toy_pi0_fast")


def test_the_limit_of_steps_has_two_names() -> None:
    assert parsed("--policy.path=a", *ENV, "--eval.max_steps=9").simulation.max_steps == 9
    assert parsed("--policy.path=a", *ENV, "--env.episode_length=9").simulation.max_steps == 9
    with pytest.raises(UsageError, match=r"--eval.max_steps=9 and --env.max_steps=8 are one thing"):
        parsed("--policy.path=a", *ENV, "--eval.max_steps=9", "--env.max_steps=8")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (ENV, "which policy"),
        (["--policy.path=a"], "which simulator"),
        (["--policy.path=a", "--env.type=toy"], "needs --env.task"),
        (["--policy.path=a", "--env.type=libro", "--env.task=x"], "--env.type"),
        (["--policy.path=a", *ENV, "--eval.n_episodes=0"], "--eval.n_episodes must be a whole number of at least 1"),
        (["--policy.path=a", *ENV, "--eval.batch_size=-1"], "--eval.batch_size"),
        (["--policy.path=a", *ENV, "--eval.max_steps=0"], "--eval.max_steps"),
        (["--policy.path=a", *ENV, "--eval.timeout_s=0"], "--eval.timeout_s must be above 0"),
        (["--policy.path=a", *ENV, "--eval.timeout_s=nan"], "--eval.timeout_s must be a finite number"),
        (["--policy.path=a", *ENV, "--eval.use_async_envs=false"], "--eval.batch_size=1 runs one at a time"),
        (["--policy.path=a", *ENV, "--seed=2147483647"], "--seed"),
        (["--policy.path=a", *ENV, "--policy.gradient_checkpointing=true"], "nothing is trained"),
        (["--policy.path=a", *ENV, "--policy.use_amp=true"], "bfloat16"),
        (["--policy.path=a", *ENV, "--policy.validate_action_token_prefix=false"], "--policy.constrained=false"),
        (["--policy.path=a", *ENV, "--policy.type=act"], "pi0_fast"),
        (["--policy.path=a", *ENV, "--policy.optimizer_lr=1"], "concerns training"),
        (["--policy.path=a", *ENV, "--eval.recording=true"], "not offered"),
        (["--policy.path=a", *ENV, "--max_videos=2"], "no effect without --save_videos"),
        (["--policy.path=a", *ENV, "--save_videos", "--max_videos=0"], "--max_videos"),
        (["--policy.path=a", *ENV, "--resume"], "--output_dir"),
        (["--policy.path=a", "--compare", "a", "b", *ENV], "leave out --policy.path"),
        (['--compare=["a"]', *ENV], "takes two"),
        (["--policy.path=a", *ENV, "--polisy.device=cpu"], "unknown flag"),
    ],
)
def test_what_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        parsed(*argv)


def test_resume_reads_what_was_asked_for(tmp_path: Path) -> None:
    first = parsed("--policy.path=a", *ENV, "--eval.n_episodes=3", f"--output_dir={tmp_path}", "--policy.temperature=1")
    (tmp_path / "eval_config.json").write_text(json.dumps(first.to_json()))
    again = parsed("--resume=true", f"--output_dir={tmp_path}")
    assert again.to_json() == first.to_json()
    assert again.resume
    more = parsed("--resume", f"--output_dir={tmp_path}", "--eval.n_episodes=5", "--eval.batch_size=2")
    check_same(more, first.to_json(), "there")
    for flag, said in (
        ("--policy.temperature=2", r"--policy.temperature=1.0, not 2.0"),
        ("--seed=3", r"--seed=100000, not 3"),
        ("--eval.n_episodes=2", "can only be raised"),
        ("--policy.constrained=false", "--policy.constrained=nothing, not false"),
        ("--env.task=reach-blue", 'not "reach-blue"'),
    ):
        with pytest.raises(UsageError, match=said):
            check_same(parsed("--resume", f"--output_dir={tmp_path}", flag), first.to_json(), "there")


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out --resume"):
        parsed("--resume", f"--output_dir={tmp_path}")
