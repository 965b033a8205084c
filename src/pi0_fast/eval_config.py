"""What `pi0-fast eval` can be told: all flags with defaults and checks, and the evaluation `--resume` goes on with.

Names are LeRobot's where it has them; docs/from_lerobot.md lists what differs. Of the policy only what was said is kept
(None: not said): the checkpoint's settings hold otherwise. Left out: everything that needs torch, numpy or a simulator.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from pi0_fast.configs import check_choice, check_text, check_whole
from pi0_fast.parsing import CONFIG_PATH, expanded, given_texts, option, parse
from pi0_fast.simulation_config import FIRST_SEED, SEEDS, EnvConfig, EvalOptions
from pi0_fast.train_config import COMPILE_MODES, DTYPES, POLICY_TYPE, PROMPT_FORMATS, PolicyOptions
from pi0_fast.types import UsageError

#: Of an evaluation's directory: what was asked for, one line for each finished episode, and the results.
EVAL_CONFIG_FILE, EPISODES_FILE = "eval_config.json", "episodes.jsonl"
RESULTS_FILE, PAGE_FILE, VIDEOS = "evaluation.json", "evaluation.html", "videos"

_POLICY, _EVAL, _OUTPUT = "Policy", "Evaluation in the simulator", "Output"


def _as_in_training(name: str, shown: str = "the checkpoint's") -> Any:
    """A field like that of `PolicyOptions`, None by default; `shown` is what help says of that."""
    metadata = dict(PolicyOptions.__dataclass_fields__[name].metadata) | {"group": _POLICY, "shown": shown}
    return dataclasses.field(default=None, metadata=metadata)


@dataclass
class EvalPolicyOptions:
    """The checkpoint, and settings in place of its own (None: its own hold)."""

    path: str | None = option(None, group=_POLICY, help="Checkpoint: directory or Hub id.", shown="none")
    type: str | None = option(None, group=_POLICY, help=f"Not needed; {POLICY_TYPE} is the only kind.", shown="none")
    pretrained_revision: str | None = _as_in_training("pretrained_revision", shown="the main branch")
    robot: str | None = option(
        None,
        group=_POLICY,
        help="Of a policy that was trained on several datasets the one whose names, units and action tokens are used.",
        shown="the first",
    )
    architecture: str | None = option(
        None,
        group=_POLICY,
        help="JSON file with the sizes of the model, where the checkpoint does not say them.",
        shown="the checkpoint's",
    )
    device: str | None = _as_in_training("device", shown="the checkpoint's where it is there, else cpu")
    dtype: str | None = _as_in_training("dtype")
    compile_model: bool | None = _as_in_training("compile_model")
    compile_mode: str | None = _as_in_training("compile_mode")
    n_action_steps: int | None = _as_in_training("n_action_steps")
    chunk_size: int | None = _as_in_training("chunk_size")
    temperature: float | None = _as_in_training("temperature")
    constrained: bool | None = _as_in_training("constrained")
    validate_action_token_prefix: bool | None = _as_in_training("validate_action_token_prefix")
    max_decoding_steps: int | None = _as_in_training("max_decoding_steps")
    use_kv_cache: bool | None = _as_in_training("use_kv_cache")
    position_gap: int | None = _as_in_training("position_gap")
    assume_contiguous_prefix: bool | None = _as_in_training("assume_contiguous_prefix")
    tokenizer_max_length: int | None = _as_in_training("tokenizer_max_length")
    max_action_tokens: int | None = option(
        None,
        group=_POLICY,
        help="Budget of training targets; --policy.max_decoding_steps bounds what is generated.",
    )
    prompt_format: str | None = _as_in_training("prompt_format")
    state_clip: bool | None = _as_in_training("state_clip")
    empty_cameras: int | None = _as_in_training("empty_cameras")
    attend_missing_cameras: bool | None = _as_in_training("attend_missing_cameras")
    antialias_images: bool | None = _as_in_training("antialias_images")
    text_tokenizer_name: str | None = _as_in_training("text_tokenizer_name")
    action_tokenizer_name: str | None = _as_in_training("action_tokenizer_name")
    use_amp: bool | None = _as_in_training("use_amp")
    gradient_checkpointing: bool | None = option(None, group=_POLICY, help="Only false: nothing is trained here.")

    def overrides(self) -> dict[str, Any]:
        """Settings of `PI0FastConfig` that were said, by their names; of those that change nothing none."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in _NOT_SETTINGS and getattr(self, item.name) is not None
        }

    def validate(self) -> None:
        """Refuse what no checkpoint could make right."""
        for name in ("path", "pretrained_revision", "robot", "architecture", "device", "text_tokenizer_name"):
            if getattr(self, name) is not None:
                check_text(f"policy.{name}", getattr(self, name))
        for name, allowed in (
            ("type", (POLICY_TYPE,)),
            ("dtype", DTYPES),
            ("prompt_format", PROMPT_FORMATS),
            ("compile_mode", COMPILE_MODES),
        ):
            if getattr(self, name) is not None:
                check_choice(f"policy.{name}", getattr(self, name), allowed)
        if self.gradient_checkpointing:
            raise UsageError("--policy.gradient_checkpointing=true has no effect: nothing is trained here")
        if self.use_amp:
            raise UsageError("--policy.use_amp=true is not offered: use --policy.dtype=bfloat16")
        if self.validate_action_token_prefix is not None and self.constrained is not False:
            raise UsageError("--policy.validate_action_token_prefix has no effect without --policy.constrained=false")


#: Options that are no fields of PI0FastConfig, or that are checked and then change nothing.
_NOT_SETTINGS = (
    *("path", "type", "pretrained_revision", "robot", "architecture", "device", "dtype", "gradient_checkpointing"),
)


@dataclass
class EvalConfig:
    """All of `pi0-fast eval`; the same object is the argument of `pi0_fast.evaluate.evaluate` in Python."""

    policy: EvalPolicyOptions = field(default_factory=EvalPolicyOptions)
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalOptions = field(default_factory=EvalOptions)
    compare: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_EVAL,
        help="Two checkpoints to compare on the same seeds, in place of --policy.path; or the directories of two "
        "evaluations that were done with the same seeds. Also --compare A B.",
        shown="none",
    )
    seed: int = option(FIRST_SEED, group=_EVAL, help="Seed of each task's first episode.")
    rename_map: dict[str, str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_EVAL, help="The simulator's names to the policy's names, as JSON.", shown="the checkpoint's"
    )
    output_dir: str | None = option(
        None,
        group=_OUTPUT,
        help="Directory of the results: evaluation.html, evaluation.json, one line per episode, videos.",
        shown="outputs/eval/{date}/{time}_{job_name}",
    )
    job_name: str | None = option(
        None, group=_OUTPUT, help="Name of the evaluation.", shown=f"{{env.type}}_{POLICY_TYPE}"
    )
    resume: bool = option(
        False,
        group=_OUTPUT,
        help="Go on with the evaluation in --output_dir. Its own flags hold; --eval.n_episodes may be raised.",
    )
    save_videos: bool = option(False, group=_OUTPUT, help="Save videos of each task's first episodes.")
    max_videos: int = option(4, group=_OUTPUT, help="Videos of each task, with --save_videos.")

    @property
    def paths(self) -> tuple[str, ...]:
        """The checkpoints: one, or two to compare."""
        if self.compare is not None:
            return tuple(self.compare)
        return () if self.policy.path is None else (self.policy.path,)

    @property
    def simulation(self) -> EnvConfig:
        """`env`, with `eval.max_steps`."""
        return self.eval.limited(self.env)

    @property
    def seeds(self) -> range:
        """Of the episodes of each task."""
        return range(self.seed, self.seed + self.eval.n_episodes)

    @property
    def output_path(self) -> Path:
        """Directory of the results; `resolved` sets it."""
        if self.output_dir is None:
            raise UsageError("the evaluation has no --output_dir")
        return expanded("output_dir", self.output_dir)

    def resolved(self, now: datetime | None = None) -> EvalConfig:
        """The same with a name and a directory, which depend on the time where none is given."""
        moment = now or datetime.now()
        name = self.job_name or f"{self.env.type}_{POLICY_TYPE}"
        output_dir = self.output_dir or f"outputs/eval/{moment:%Y-%m-%d}/{moment:%H-%M-%S}_{name}"
        return dataclasses.replace(self, job_name=name, output_dir=output_dir)

    def validate(self) -> None:
        """Refuse what no checkpoint and no simulator could make right.

        Raises:
            UsageError: naming the flag, the value and what is allowed.
        """
        self.policy.validate()
        self.eval.validate()
        self.env.validate()
        if self.compare is not None:
            if len(self.compare) != 2:
                raise UsageError(f"--compare takes two checkpoints, or two evaluations, not {len(self.compare)}")
            for path in self.compare:
                check_text("compare", path)
            if self.policy.path is not None:
                raise UsageError("--compare names both checkpoints: leave out --policy.path")
        elif self.policy.path is None:
            raise UsageError("which policy? Give --policy.path (a checkpoint, directory or Hub id), or --compare A B")
        if self.env.type is None and self.compare is None:
            raise UsageError("which simulator? Give --env.type and --env.task")
        check_whole("seed", self.seed, 0, SEEDS - self.eval.n_episodes)
        for name in ("output_dir", "job_name"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        for source, target in (self.rename_map or {}).items():
            check_text("rename_map", source)
            check_text("rename_map", target)
        self._validate_combinations()

    def _validate_combinations(self) -> None:
        """A flag that would change nothing is a misunderstanding, not a wish."""
        self.eval.limited(self.env)
        check_whole("max_videos", self.max_videos, 1)
        if not self.save_videos and self.max_videos != type(self).__dataclass_fields__["max_videos"].default:
            raise UsageError("--max_videos has no effect without --save_videos")
        if self.resume and self.output_dir is None:
            raise UsageError("--resume needs --output_dir of the evaluation to go on with")

    def to_json(self) -> dict[str, Any]:
        """What was said, nested as `--config_path` reads it; values that say nothing (None) are left out."""
        said = _said(self)
        del said["resume"]
        return said


def _said(config: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if value is not None:
            said[item.name] = _said(value) if dataclasses.is_dataclass(value) else value
    return said


# --- going on -----------------------------------------------------------------------------------------------

#: What of an evaluation may differ where it is gone on with.
_MAY_DIFFER = ("eval.n_episodes", "eval.batch_size", "eval.timeout_s", "output_dir", "job_name", "policy.device")


def check_same(config: EvalConfig, saved: dict[str, Any], where: str) -> None:
    """Refuse to go on with an evaluation of something else.

    Raises:
        UsageError: a flag differs, or fewer episodes are asked for than before; it is named with both values.
    """
    before, now = _flat(saved), _flat(config.to_json())
    for name in sorted({*before, *now}):
        if name not in _MAY_DIFFER and before.get(name) != now.get(name):
            raise UsageError(
                f"--resume: {where} was begun with --{name}={_shown(before.get(name))}, not {_shown(now.get(name))}: "
                "leave the flag out, or choose another --output_dir"
            )
    episodes = before.get("eval.n_episodes", 0)
    if config.eval.n_episodes < episodes:
        raise UsageError(f"--resume: {where} was begun with --eval.n_episodes={episodes}; it can only be raised")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and name in ("policy", "env", "eval"):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


# --- reading the command line -------------------------------------------------------------------------------

#: Flags of LeRobot's that are not offered (or groups of them, with a dot) -> what to do instead.
_NOT_OFFERED = {
    "eval.recording": "episodes are not kept as a dataset; pi0-fast record makes one of a scripted expert",
    "eval.recording_repo_id": "see --save_videos",
    "eval.recording_private": "see --save_videos",
    "trust_remote_code": "no code is fetched from the Hub; leave it out",
    "env.max_parallel_tasks": "tasks run one after the other; see --eval.batch_size",
    "policy.optimizer_": "it concerns training",
    "policy.scheduler_": "it concerns training",
    "policy.input_features": "they are the checkpoint's; see --rename_map and --env.cameras",
    "policy.output_features": "they are the checkpoint's",
    "policy.rtc_config": "real-time chunking is not offered; leave it out",
    "policy.push_to_hub": "nothing is uploaded",
}


def parse_eval(config_class: type[EvalConfig], argv: Sequence[str], program: str) -> EvalConfig:
    """The configuration that a command line describes; with `--resume` the saved one, which flags override.

    Raises:
        UsageError: as `parsing.parse`; a flag of LeRobot's that is not offered; nothing to resume.
    """
    argv = _joined_pair(argv)
    for argument in argv:
        name = argument.removeprefix("--").partition("=")[0]
        for refused, advice in _NOT_OFFERED.items():
            if argument.startswith("--") and (name == refused or (refused[-1] in "._" and name.startswith(refused))):
                raise UsageError(f"--{name} is not offered: {advice}")
    texts = given_texts(config_class, argv, program)
    if texts.get("resume", "false").lower() != "true" or CONFIG_PATH in texts:
        return parse(config_class, argv, program)
    if "output_dir" not in texts:
        raise UsageError("--resume needs --output_dir of the evaluation to go on with")
    file = expanded("output_dir", texts["output_dir"]) / EVAL_CONFIG_FILE
    if not file.is_file():
        raise UsageError(f"--resume: there is no {file}; leave out --resume to begin anew")
    return parse(config_class, [*argv, f"--{CONFIG_PATH}={file}"], program)


def _joined_pair(argv: Sequence[str]) -> list[str]:
    """`--compare A B` as the list that the parser reads."""
    found = list(argv)
    for place, argument in enumerate(found[:-2]):
        pair = found[place + 1 : place + 3]
        if argument == "--compare" and not any(part.startswith(("--", "[")) for part in pair):
            return [*found[:place], f"--compare={json.dumps(pair)}", *found[place + 3 :]]
    return found
