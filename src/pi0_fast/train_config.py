"""What `pi0-fast train` can be told: every flag with its default, its checks, and the run that `--resume` goes on with.

Names and defaults are LeRobot's; docs/from_lerobot.md lists what differs. Of the policy only what was *said* is kept
(None: not said), because the checkpoint that a run begins with has settings of its own; training/settings.py joins
the two. Left out: anything that opens the dataset or needs torch, and reading arguments and files (parsing.py).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from pi0_fast.configs import (
    NORMALIZATION_MODES,
    check_choice,
    check_number,
    check_text,
    check_weights,
    check_whole,
    is_repository,
    one_each,
)
from pi0_fast.parsing import CONFIG_PATH, expanded, given_texts, option, parse
from pi0_fast.simulation_config import EnvConfig, EvalOptions
from pi0_fast.types import UsageError

#: Of a run's directory: checkpoints/{step}/pretrained_model/train_config.json, checkpoints/{step}/training_state.
TRAIN_CONFIG_FILE = "train_config.json"
CHECKPOINTS, LAST = "checkpoints", "last"
PRETRAINED_MODEL, TRAINING_STATE = "pretrained_model", "training_state"

# As in policy_config.py and dct.py (a test compares them), which need numpy; help is to answer at once.
POLICY_TYPE = "pi0_fast"
VARIANTS = ("gemma_300m", "gemma_2b")
DTYPES = ("float32", "bfloat16")
PROMPT_FORMATS = ("lerobot", "openpi")
ORDERS = ("frequency", "dimension")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_DATA, _TRANSFORMS, _RUN, _SAVING = "Dataset", "Image transforms", "Training", "Output and checkpoints"
_MEASURING, _LORA = "Measuring and tracking", "LoRA (needs pi0-fast[lora])"
_POLICY, _START, _TOKENIZERS = "Policy", "Policy: where it begins", "Policy: tokenizers"
_COMPUTE, _OPTIMIZER, _INFERENCE = "Policy: device and memory", "Policy: optimizer", "Policy: inference"


@dataclass
class ImageTransformsConfig:
    """Random changes of training images, of each camera on its own; never of those that are measured on."""

    enable: bool = option(False, group=_TRANSFORMS, help="Shift and colour training images at random.")
    max_shift: float = option(
        0.05, group=_TRANSFORMS, help="Largest shift, as a share of the image's height and width."
    )
    brightness: float = option(0.2, group=_TRANSFORMS, help="Brightness is multiplied by 1 - this to 1 + this.")
    contrast: float = option(0.2, group=_TRANSFORMS, help="Contrast is multiplied by 1 - this to 1 + this.")
    saturation: float = option(0.2, group=_TRANSFORMS, help="Saturation is multiplied by 1 - this to 1 + this.")

    def validate(self) -> None:
        """Refuse shares outside [0, 1) and transforms that are set but not enabled."""
        for item in fields(self)[1:]:
            name = f"dataset.image_transforms.{item.name}"
            if not 0 <= check_number(name, getattr(self, item.name)) < 1:
                raise UsageError(f"--{name} must be at least 0 and below 1, not {getattr(self, item.name)}")
            if not self.enable and getattr(self, item.name) != item.default:
                raise UsageError(f"--{name} has no effect without --dataset.image_transforms.enable=true")


@dataclass(frozen=True)
class Member:
    """One of the datasets that are trained on, as `DatasetConfig` describes it.

    Attributes:
        name: of its directory in checkpoints; no other member has it.
        weight: as given, or None.
        rename_map: as given for it; of a map that is given for all datasets, those columns count that it has.
        rename_is_shared: whether the map was given for all.
    """

    name: str
    repo_id: str
    root: str | None
    revision: str | None
    episodes: list[int] | None
    cameras: list[str] | None
    state_key: str
    action_key: str
    weight: float | None
    rename_map: dict[str, str] | None
    rename_is_shared: bool

    @property
    def renames(self) -> dict[str, str]:
        """The dataset's names -> the policy's, state and action columns included."""
        own = {self.state_key: "observation.state", self.action_key: "action"}
        return {key: name for key, name in own.items() if key != name} | (self.rename_map or {})


@dataclass
class DatasetConfig:
    """The dataset that is trained on, or several: then flags take one value for all, or a list with one for each."""

    repo_id: str | list[str] = option(  # noqa: RUF009 - a field
        group=_DATA,
        help="LeRobot dataset on the Hugging Face Hub, such as lerobot/libero; with --dataset.root a label. A JSON "
        "list of them trains on a mixture.",
    )
    root: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_DATA,
        help="Local directory of the dataset; the network is then never touched for it. Of several datasets a list.",
        shown="~/.cache/huggingface/lerobot/{repo_id} where it exists, else the Hub",
    )
    revision: str | list[str | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_DATA, help="Branch, tag or commit of the dataset on the Hub.", shown="the main branch"
    )
    weights: list[float] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_DATA,
        help="How often each of several datasets is drawn from, in any unit, such as '[0.7, 0.3]'.",
        shown="in proportion to their frames",
    )
    episodes: list[int] | list[list[int] | None] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_DATA,
        help="Indices of the episodes to use, such as '[0, 1, 2]'; of several datasets '[[0, 1], null]' (null: all).",
        shown="all",
    )
    val_fraction: float = option(
        0.0,
        group=_DATA,
        help="Fraction of the episodes to hold out of training and to measure on; at least one episode where there "
        "are two. With 0, --eval_freq measures on training frames.",
        aliases=("eval_split",),
    )
    cameras: list[str] | list[list[str]] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_DATA,
        help="Image columns to use, by their names in the dataset; [] for none.",
        shown="those that the policy knows; all for a new policy",
    )
    state_key: str | list[str] = option(  # noqa: RUF009 - a field, and its default is a text
        "observation.state", group=_DATA, help="Column of the dataset that holds the state."
    )
    action_key: str | list[str] = option(  # noqa: RUF009 - a field, and its default is a text
        "action", group=_DATA, help="Column of the dataset that holds the actions."
    )
    whole_chunks: bool = option(
        False,
        group=_DATA,
        help="Train only at frames with a whole chunk ahead. Otherwise the last frames of an episode are sampled too, "
        "and carry no loss.",
    )
    video_backend: str = option("pyav", group=_DATA, help="What decodes videos; pyav is the only one.")
    cache_dir: str | None = option(
        None,
        group=_DATA,
        help="Directory for decoded frames, so that no video frame is decoded twice; it grows to the size of the raw "
        "images.",
        shown="no cache",
    )
    image_transforms: ImageTransformsConfig = field(default_factory=ImageTransformsConfig)

    def validate(self) -> None:
        """Refuse what no dataset could make right; see `TrainConfig.validate`."""
        if self.cache_dir is not None:
            check_text("dataset.cache_dir", self.cache_dir)
        if not 0 <= check_number("dataset.val_fraction", self.val_fraction) < 1:
            raise UsageError(f"--dataset.val_fraction must be at least 0 and below 1, not {self.val_fraction}")
        for member in self.members(None):
            _validate_member(member)
        if self.weights is not None:
            if not isinstance(self.repo_id, list):
                raise UsageError("--dataset.weights has no effect with one dataset: give --dataset.repo_id as a list")
            check_weights("dataset.weights", self.weights)
        check_choice("dataset.video_backend", self.video_backend, ("pyav",))
        self.image_transforms.validate()

    def members(self, rename_map: dict[str, str] | list[dict[str, str]] | None) -> list[Member]:
        """Each dataset by itself; `rename_map` is the one of `TrainConfig`.

        Raises:
            UsageError: a flag is a list of another length than `repo_id`, or is one text where each needs its own.
        """
        several = isinstance(self.repo_id, list)
        ids = self.repo_id if isinstance(self.repo_id, list) else [self.repo_id]
        if not ids:
            raise UsageError("--dataset.repo_id is an empty list")
        for name in ("root", "episodes"):
            value = getattr(self, name)
            if several and value is not None and (isinstance(value, str) or not _is_nested(name, value)):
                example = '["data/one", "data/two"]' if name == "root" else "[[0, 1], null]"
                raise UsageError(f"--dataset.{name} must be a list with one for each dataset, such as '{example}'")
        values = {
            name: one_each(f"dataset.{name}", getattr(self, name), len(ids), several, _is_nested(name, given))
            for name, given in ((name, getattr(self, name)) for name in _OF_EACH)
        }
        weights = one_each("dataset.weights", self.weights, len(ids), True, self.weights is not None)
        renames = one_each("rename_map", rename_map, len(ids), several, isinstance(rename_map, list))
        shared = several and not isinstance(rename_map, list)
        names = _folder_names(ids)
        return [
            Member(
                name=names[number],
                repo_id=repo_id,
                **{name: value[number] for name, value in values.items()},
                weight=weights[number],
                rename_map=renames[number],
                rename_is_shared=shared,
            )
            for number, repo_id in enumerate(ids)
        ]


#: Flags of `DatasetConfig` that each of several datasets may have its own value of.
_OF_EACH = ("root", "revision", "episodes", "cameras", "state_key", "action_key")


def _is_nested(name: str, value: Any) -> bool:
    """Whether a value is a list with one for each dataset, and not one value (which may be a list too) for all."""
    if not isinstance(value, list):
        return False
    return name not in ("episodes", "cameras") or any(item is None or isinstance(item, list) for item in value)


def _folder_names(ids: Sequence[str]) -> list[str]:
    """A name of a directory for each dataset: its id with _ for /; one that is named again gets a number behind it.

    Raises:
        UsageError: two ids would share a name, perhaps only where upper and lower case are one.
    """
    names: list[str] = []
    owners: dict[str, str] = {}
    for repo_id in ids:
        base = re.sub(r"[^A-Za-z0-9._-]", "_", str(repo_id)).lstrip(".") or "dataset"
        again = ids[: len(names)].count(repo_id)
        name = f"{base}-{again + 1}" if again else base
        owner = owners.setdefault(name.lower(), repo_id)
        if owner != repo_id:
            raise UsageError(
                f"--dataset.repo_id: {owner!r} and {repo_id!r} would both be {name!r} in the checkpoint: give one of "
                "them another name (with --dataset.root it may be any)"
            )
        names.append(name)
    return names


def _validate_member(member: Member) -> None:
    for name in ("repo_id", "state_key", "action_key"):
        check_text(f"dataset.{name}", getattr(member, name))
    for name in ("root", "revision"):
        if getattr(member, name) is not None:
            check_text(f"dataset.{name}", getattr(member, name))
    if member.root is not None and member.revision is not None:
        raise UsageError("--dataset.revision has no effect with --dataset.root, which never touches the network")
    if member.episodes is not None:
        _distinct("dataset.episodes", member.episodes)
        for index in member.episodes:
            check_whole("dataset.episodes", index, 0)
    if member.cameras:  # an empty list asks for a policy that sees nothing
        _distinct("dataset.cameras", member.cameras)


@dataclass
class PolicyOptions:
    """What was said of the policy; None: nothing, and then the checkpoint's setting holds, or PI0FastConfig's default.

    Beyond the fields of `PI0FastConfig`, under their own names, there is where the policy begins (`path`,
    `pretrained_path`, `architecture`) and what concerns training alone.
    """

    type: str | None = option(
        None,
        group=_START,
        help=f"{POLICY_TYPE}, the only kind, makes a policy for the dataset, with --policy.pretrained_path or "
        "--policy.architecture; not needed with --policy.path.",
    )
    path: str | None = option(
        None,
        group=_START,
        help="Checkpoint to begin with: directory or Hub id. Its settings hold, but for those given as flags.",
    )
    pretrained_path: str | None = option(
        None,
        group=_START,
        help="Checkpoint whose weights to begin with, in a policy made for the dataset: its cameras and dimensions "
        "are the dataset's, settings that do not belong to the weights are the defaults.",
    )
    pretrained_revision: str | None = option(
        None, group=_START, help="Branch, tag or commit of that checkpoint on the Hub.", shown="the main branch"
    )
    architecture: str | None = option(
        None,
        group=_START,
        help="JSON file with the sizes of the model, where they are not those of the variant. Without a checkpoint it "
        "asks for a new model with random weights.",
    )
    statistics: str | None = option(
        None,
        group=_START,
        help="data: normalise by the statistics of this dataset, computed exactly. checkpoint: keep the checkpoint's. "
        "A tokenizer that was fitted with a normaliser of its own decides for the actions.",
        shown="data",
    )

    paligemma_variant: str | None = option(None, group=_POLICY, help=f"One of {', '.join(VARIANTS)}.", shown="gemma_2b")
    action_expert_variant: str | None = option(
        None, group=_POLICY, help="Only gemma_300m, which does nothing: pi0-FAST has no action expert."
    )
    n_obs_steps: int | None = option(None, group=_POLICY, help="Only 1: pi0-FAST looks at one observation.")
    chunk_size: int | None = option(None, group=_POLICY, help="Number of action steps to predict.", shown="50")
    n_action_steps: int | None = option(None, group=_POLICY, help="Number of action steps to execute.", shown="50")
    max_state_dim: int | None = option(
        None, group=_POLICY, help="Most dimensions of a state; nothing is padded to it.", shown="32"
    )
    max_action_dim: int | None = option(
        None, group=_POLICY, help="Most dimensions of an action; nothing is padded to it.", shown="32"
    )
    max_action_tokens: int | None = option(
        None, group=_POLICY, help="Budget of ids for the action tokens of a chunk; none is cut.", shown="256"
    )
    tokenizer_max_length: int | None = option(
        None, group=_POLICY, help="Budget of ids for task and state; a longer prompt is an error.", shown="200"
    )
    image_resolution: tuple[int, int] | None = option(
        None, group=_POLICY, help="Height and width of the model's images.", shown="[224, 224]"
    )
    empty_cameras: int | None = option(
        None, group=_POLICY, help="Number of cameras to declare that no data has.", shown="0"
    )
    normalization_mapping: dict[str, str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_POLICY,
        help=f"STATE and ACTION to one of {', '.join(NORMALIZATION_MODES)}, for a new policy.",
        shown="QUANTILES for both",
    )
    use_relative_actions: bool | None = option(
        None, group=_POLICY, help="Predict actions relative to the current state.", shown="false"
    )
    relative_exclude_joints: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_POLICY, help="Actions whose names contain one of these stay absolute.", shown='["gripper"]'
    )
    action_feature_names: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_POLICY, help="Names of the action dimensions.", shown="the dataset's"
    )
    prompt_format: str | None = option(
        None, group=_POLICY, help=f"One of {', '.join(PROMPT_FORMATS)}.", shown="lerobot"
    )
    state_clip: bool | None = option(
        None, group=_POLICY, help="Clip states to the range of their statistics.", shown="true for a new policy"
    )
    action_clip: bool | None = option(
        None, group=_POLICY, help="Clip actions to the range of their statistics.", shown="true for a new policy"
    )
    attend_missing_cameras: bool | None = option(
        None, group=_POLICY, help="Attend to a missing camera as a black image, as openpi does.", shown="false"
    )
    antialias_images: bool | None = option(
        None, group=_POLICY, help="Resize images with antialiasing, as openpi does.", shown="false"
    )
    count_padding_in_positions: bool | None = option(
        None, group=_POLICY, help="A missing camera takes positions in training, as in openpi.", shown="false"
    )
    enable_fast_action_loss: bool | None = option(
        None, group=_POLICY, help="The loss on FAST tokens; pi0-FAST has no other.", shown="true"
    )

    text_tokenizer_name: str | None = option(
        None,
        group=_TOKENIZERS,
        help="Text tokenizer: directory, file, Hub id, or byte for a tiny one that is built in.",
        shown="the checkpoint's; google/paligemma-3b-pt-224",
    )
    action_tokenizer_name: str | None = option(
        None,
        group=_TOKENIZERS,
        help="FAST tokenizer: directory or Hub id.",
        shown="the checkpoint's; lerobot/fast-action-tokenizer",
    )
    fast_skip_tokens: int | None = option(
        None, group=_TOKENIZERS, help="Ids at the end of the text vocabulary left unused.", shown="128"
    )
    auto_fit_fast_tokenizer: bool = option(
        False,
        group=_TOKENIZERS,
        help="Fit a FAST tokenizer on the dataset before training, or find it fitted already. One that is named with "
        "--policy.action_tokenizer_name is used instead.",
    )
    fast_tokenizer_cache_dir: str = option(
        "~/.cache/pi0_fast/tokenizers", group=_TOKENIZERS, help="Where fitted tokenizers are kept."
    )
    fast_tokenizer_fit_samples: int = option(1024, group=_TOKENIZERS, help="Chunks to fit on, at most.")
    fast_tokenizer_rate_weight: float = option(
        0.0,
        group=_TOKENIZERS,
        help="Rate weight of the fitted tokenizer: above 0 it looks for fewer tokens, at some error; "
        "see train-tokenizer.",
    )
    fast_tokenizer_order: str = option(
        "frequency",
        group=_TOKENIZERS,
        help=f"Order of the fitted tokenizer's coefficients, one of {', '.join(ORDERS)}; LeRobot's own policy can "
        "decode the first alone.",
    )

    device: str | None = option(
        None, group=_COMPUTE, help="cuda, cuda:1, mps or cpu.", shown="the first of cuda, mps, cpu that is there"
    )
    dtype: str | None = option(
        None, group=_COMPUTE, help=f"One of {', '.join(DTYPES)}.", shown="bfloat16 on cuda, else float32"
    )
    use_amp: bool | None = option(None, group=_COMPUTE, help="Only false: use --policy.dtype=bfloat16.")
    gradient_checkpointing: bool | None = option(
        None, group=_COMPUTE, help="Compute activations twice to hold fewer in memory.", shown="false"
    )
    compile_model: bool | None = option(None, group=_COMPUTE, help="Use torch.compile.", shown="false")
    compile_mode: str | None = option(
        None, group=_COMPUTE, help=f"One of {', '.join(COMPILE_MODES)}.", shown="max-autotune"
    )
    freeze_vision_encoder: bool = option(
        False, group=_COMPUTE, help="Do not train the vision tower (the projector behind it is trained)."
    )
    use_peft: bool | None = option(None, group=_COMPUTE, help="Only false: give --peft.r and the like instead.")

    optimizer_lr: float | None = option(None, group=_OPTIMIZER, help="Peak learning rate.", shown="2.5e-5")
    optimizer_betas: tuple[float, float] | None = option(
        None, group=_OPTIMIZER, help="AdamW's betas.", shown="[0.9, 0.95]"
    )
    optimizer_eps: float | None = option(None, group=_OPTIMIZER, help="AdamW's epsilon.", shown="1e-8")
    optimizer_weight_decay: float | None = option(None, group=_OPTIMIZER, help="AdamW's weight decay.", shown="0.01")
    optimizer_grad_clip_norm: float | None = option(
        None, group=_OPTIMIZER, help="Largest norm of the gradient; 0 does not clip.", shown="1.0"
    )
    optimizer_fused: bool | None = option(
        None, group=_OPTIMIZER, help="Fused AdamW; on --resume the saved choice holds.", shown="true on cuda and cpu"
    )
    scheduler_warmup_steps: int | None = option(
        None, group=_OPTIMIZER, help="Steps until the peak rate; scaled down with --steps.", shown="1000"
    )
    scheduler_decay_steps: int | None = option(
        None, group=_OPTIMIZER, help="Steps of the cosine decay; at most --steps.", shown="30000"
    )
    scheduler_decay_lr: float | None = option(
        None, group=_OPTIMIZER, help="Learning rate after the decay.", shown="2.5e-6"
    )

    temperature: float | None = option(
        None, group=_INFERENCE, help="0 takes the likeliest token, above 0 tokens are drawn.", shown="0"
    )
    max_decoding_steps: int | None = option(
        None, group=_INFERENCE, help="Budget of ids for a generated chunk.", shown="256"
    )
    use_kv_cache: bool | None = option(None, group=_INFERENCE, help="Generate with a cache.", shown="true")
    constrained: bool | None = option(
        None, group=_INFERENCE, help="Generate only what can become a valid chunk.", shown="true"
    )
    validate_action_token_prefix: bool | None = option(
        None, group=_INFERENCE, help="Without --policy.constrained: require Action: in front.", shown="true"
    )
    position_gap: int | None = option(
        None, group=_INFERENCE, help="Positions left out before Action: in generation, as in openpi.", shown="0"
    )
    assume_contiguous_prefix: bool | None = option(
        None,
        group=_INFERENCE,
        help="Where a camera is masked, generate as openpi's decoder does, which then looks at wrong columns.",
        shown="false",
    )

    push_to_hub: bool | None = option(
        None, group=_SAVING, help="Upload the trained policy to the Hub.", shown="true where --policy.repo_id is given"
    )
    repo_id: str | None = option(None, group=_SAVING, help="Repository on the Hub to upload the policy to.")
    private: bool | None = option(None, group=_SAVING, help="Make that repository private.", shown="false")
    license: str | None = option(None, group=_SAVING, help="License that config.json and the model card name.")
    tags: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_SAVING, help="Tags that config.json and the model card name."
    )

    def settings(self) -> dict[str, Any]:
        """What was said of the fields of `PI0FastConfig`, by their names; `device` and `dtype` as given."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in _NOT_SETTINGS and getattr(self, item.name) is not None
        }

    @property
    def pushes(self) -> bool:
        """Whether the trained policy is to be uploaded."""
        return self.repo_id is not None if self.push_to_hub is None else self.push_to_hub

    def validate(self) -> None:
        """Refuse what no checkpoint could make right; values of settings are checked with the rest of them."""
        for name in (
            *("path", "pretrained_path", "pretrained_revision", "architecture", "text_tokenizer_name"),
            *("action_tokenizer_name", "fast_tokenizer_cache_dir", "device", "repo_id"),
        ):
            if getattr(self, name) is not None:
                check_text(f"policy.{name}", getattr(self, name))
        for name, allowed in (
            ("type", (POLICY_TYPE,)),
            ("dtype", DTYPES),
            ("paligemma_variant", VARIANTS),
            ("prompt_format", PROMPT_FORMATS),
            ("compile_mode", COMPILE_MODES),
            ("statistics", ("data", "checkpoint")),
        ):
            if getattr(self, name) is not None:
                check_choice(f"policy.{name}", getattr(self, name), allowed)
        check_whole("policy.fast_tokenizer_fit_samples", self.fast_tokenizer_fit_samples, 1)
        check_choice("policy.fast_tokenizer_order", self.fast_tokenizer_order, ORDERS)
        if check_number("policy.fast_tokenizer_rate_weight", self.fast_tokenizer_rate_weight) < 0:
            raise UsageError(
                f"--policy.fast_tokenizer_rate_weight must be at least 0, not {self.fast_tokenizer_rate_weight}"
            )
        if self.enable_fast_action_loss is False:
            raise UsageError(
                "--policy.enable_fast_action_loss=false leaves nothing to train: pi0-FAST has no other loss"
            )
        if not self.auto_fit_fast_tokenizer:
            _unchanged(self, "policy.", _OF_THE_FIT, _AUTO_FIT)
        self._validate_start()
        if self.pushes and (self.repo_id is None or not is_repository(self.repo_id)):
            raise UsageError(
                f"--policy.push_to_hub=true needs --policy.repo_id, owner/name or name on the Hub, not {self.repo_id!r}"
            )
        if self.repo_id is not None and not self.pushes:
            raise UsageError("--policy.repo_id has no effect with --policy.push_to_hub=false")
        if self.private is not None and not self.pushes:
            raise UsageError("--policy.private has no effect without --policy.repo_id")

    def _validate_start(self) -> None:
        start = self.path or self.pretrained_path
        if start is None and self.type is None:
            raise UsageError(
                "which policy? Give --policy.path (a checkpoint, directory or Hub id), or --policy.type=pi0_fast with "
                "--policy.pretrained_path or --policy.architecture"
            )
        if start is None and self.architecture is None:
            raise UsageError(
                "--policy.type=pi0_fast alone would be a model of random weights: give --policy.pretrained_path (such "
                "as lerobot/pi0fast-base), or --policy.architecture to train a model of those sizes from nothing"
            )
        if start is None:
            for name in ("statistics", "pretrained_revision"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--policy.{name} has no effect without a checkpoint to begin with")


#: Options of the tokenizer that is fitted before training.
_OF_THE_FIT = tuple(f"fast_tokenizer_{name}" for name in ("cache_dir", "fit_samples", "rate_weight", "order"))
#: Options that are no fields of PI0FastConfig, or not set as given.
_NOT_SETTINGS = (
    *("type", "path", "architecture", "statistics", "enable_fast_action_loss", "auto_fit_fast_tokenizer"),
    *("freeze_vision_encoder", "pretrained_path"),
    *_OF_THE_FIT,
)


@dataclass
class PeftConfig:
    """Low-rank adapters in place of training all weights; there once one of its flags is given."""

    method_type: str = option("LORA", group=_LORA, help="LORA is the only one.")
    r: int = option(
        16,
        group=_LORA,
        help="Rank of the adapters. This flag, or another of these, trains adapters instead of all weights.",
    )
    lora_alpha: int | None = option(
        None, group=_LORA, help="Adapters are scaled by this over the rank.", shown="the rank"
    )
    target_modules: list[str] | str | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_LORA,
        help="Suffixes of the modules that get adapters, a regular expression, or all-linear.",
        shown="attention and mlp of the language model",
    )
    merge: bool = option(
        False,
        group=_LORA,
        help="Checkpoints hold all weights too, with the adapters merged into them.",
    )

    def validate(self) -> None:
        """Refuse impossible ranks and other methods."""
        check_choice("peft.method_type", self.method_type, ("LORA",))
        check_whole("peft.r", self.r, 1)
        if self.lora_alpha is not None:
            check_whole("peft.lora_alpha", self.lora_alpha, 1)
        if self.target_modules is not None and not self.target_modules:
            raise UsageError("--peft.target_modules is empty: name layers, or leave it out")


@dataclass
class WandBConfig:
    """Metrics to Weights & Biases, where wandb is installed."""

    enable: bool = option(False, group=_MEASURING, help="Send metrics to Weights & Biases.")
    project: str = option("lerobot", group=_MEASURING, help="Project there.")
    entity: str | None = option(None, group=_MEASURING, help="User or team there.", shown="the logged-in user")
    notes: str | None = option(None, group=_MEASURING, help="Text about the run.")
    run_id: str | None = option(None, group=_MEASURING, help="Run to go on with.", shown="a new one")
    mode: str | None = option(None, group=_MEASURING, help="online, offline or disabled.", shown="online")

    def validate(self) -> None:
        """Refuse flags that would do nothing, and unknown modes."""
        _only_when_enabled("wandb", self)
        if self.mode is not None:
            check_choice("wandb.mode", self.mode, ("online", "offline", "disabled"))


@dataclass
class TrackioConfig:
    """Metrics to trackio, which needs no account."""

    enable: bool = option(False, group=_MEASURING, help="Keep metrics with trackio; needs pi0-fast[track].")
    project: str = option("pi0-fast", group=_MEASURING, help="Project there.")
    space_id: str | None = option(None, group=_MEASURING, help="Hugging Face Space to show them in.", shown="none")

    def validate(self) -> None:
        """Refuse flags that would do nothing."""
        _only_when_enabled("trackio", self)


@dataclass
class TrainConfig:
    """All of `pi0-fast train`; the same object is the argument of `pi0_fast.training.loop.train` in Python.

    Attributes:
        checkpoint: directory (…/checkpoints/000100) that `resume` goes on from; None: the newest complete one below
            `output_dir`.
    """

    dataset: DatasetConfig
    policy: PolicyOptions = field(default_factory=PolicyOptions)

    output_dir: str | None = option(
        None,
        group=_SAVING,
        help="Directory of the run: checkpoints, metrics, the report.",
        shown="outputs/train/{date}/{time}_{job_name}",
    )
    job_name: str | None = option(None, group=_SAVING, help="Name of the run.", shown=POLICY_TYPE)
    save_checkpoint: bool = option(True, group=_SAVING, help="Save checkpoints.")
    save_freq: int = option(
        20_000, group=_SAVING, help="Steps between checkpoints; the last step is always saved. 0: only that one."
    )
    keep_last: int | None = option(None, group=_SAVING, help="Keep only this many checkpoints.", shown="all")
    resume: bool = option(
        False,
        group=_SAVING,
        help="Go on with the run in --output_dir, or from the checkpoint whose train_config.json is --config_path. "
        "The run's own flags hold, but for those given.",
    )

    steps: int = option(100_000, group=_RUN, help="Optimizer steps in all.")
    batch_size: int = option(8, group=_RUN, help="Frames of a batch, in each process.")
    gradient_accumulation_steps: int = option(1, group=_RUN, help="Batches of one optimizer step.")
    num_workers: int = option(4, group=_RUN, help="Processes that load data; 0: none but this one.")
    prefetch_factor: int = option(4, group=_RUN, help="Batches that each of them holds ready.")
    seed: int = option(1000, group=_RUN, help="Seed of weights, order and transforms.")
    cudnn_deterministic: bool = option(False, group=_RUN, help="Only deterministic algorithms, which may be slower.")
    allow_tf32: bool = option(
        True,
        group=_RUN,
        help="On cuda, multiply float32 numbers (those of the vision tower) as TF32, with 10 bits instead of 23, "
        "several times faster; as LeRobot.",
    )
    distributed: str | None = option(
        None,
        group=_RUN,
        help="With several processes (torchrun, accelerate launch): ddp, each has all weights, or fsdp, each a part.",
        shown="ddp, or what accelerate asks for",
    )
    distributed_timeout_s: float = option(
        60.0, group=_RUN, help="Seconds without a sign of life after which a process counts as gone, and all end."
    )
    ema_decay: float | None = option(
        None, group=_RUN, help="Save weights averaged with this decay, such as 0.99.", shown="no average"
    )
    freeze: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_RUN,
        help="Patterns (* and ?) of the names of weights not to train, such as '[\"*embed_tokens*\"]'.",
        shown="all are trained",
    )
    rename_map: dict[str, str] | list[dict[str, str]] | None = option(  # noqa: RUF009 - a field; its default is None
        None,
        group=_DATA,
        help="Names in the dataset to the policy's names, as JSON; of several datasets one for all, or a list.",
        shown="none",
    )

    log_freq: int = option(200, group=_MEASURING, help="Steps between lines of metrics; 0: none.")
    eval_freq: int = option(
        20_000,
        group=_MEASURING,
        help="Steps between measurements of loss, token accuracy and error of generated chunks; 0: none.",
        aliases=("eval_steps",),
    )
    max_eval_samples: int = option(256, group=_MEASURING, help="Most frames of one measurement; 0: all held-out ones.")
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalOptions = field(default_factory=EvalOptions)
    env_eval_freq: int | None = option(
        None,
        group="Evaluation in the simulator",
        help="Steps between evaluations in the simulator of --env.type; 0: none.",
        shown="--eval_freq",
    )

    wandb: WandBConfig = field(default_factory=WandBConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    peft: PeftConfig | None = field(default=None)

    checkpoint: Path | None = field(init=False, default=None)

    @property
    def name(self) -> str:
        """`job_name`, or the kind of policy."""
        return self.job_name or POLICY_TYPE

    @property
    def output_path(self) -> Path:
        """Directory of the run.

        Raises:
            UsageError: `output_dir` is None; `resolved` sets it.
        """
        if self.output_dir is None:
            raise UsageError("the run has no --output_dir")
        return expanded("output_dir", self.output_dir)

    @property
    def simulation(self) -> EnvConfig:
        """`env`, with `eval.max_steps`."""
        return self.eval.limited(self.env)

    @property
    def simulation_freq(self) -> int:
        """Steps between evaluations in the simulator; 0: none."""
        if self.env.type is None:
            return 0
        return self.eval_freq if self.env_eval_freq is None else self.env_eval_freq

    @property
    def members(self) -> list[Member]:
        """The datasets, one or several."""
        return self.dataset.members(self.rename_map)

    def resolved(self, now: datetime | None = None) -> TrainConfig:
        """The same with a name and a directory, which depend on the time where none is given."""
        moment = now or datetime.now()
        output_dir = self.output_dir or f"outputs/train/{moment:%Y-%m-%d}/{moment:%H-%M-%S}_{self.name}"
        config = dataclasses.replace(self, job_name=self.name, output_dir=output_dir)
        config.checkpoint = self.checkpoint
        return config

    def validate(self) -> None:
        """Refuse what no dataset and no checkpoint could make right.

        Raises:
            UsageError: naming the flag, the value and what is allowed.
        """
        self.dataset.validate()
        self.policy.validate()
        self.wandb.validate()
        self.trackio.validate()
        self.env.validate()
        self.eval.validate()
        if self.peft is not None:
            self.peft.validate()
        for name in ("output_dir", "job_name"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        for name, least in _WHOLE_NUMBERS.items():
            check_whole(name, getattr(self, name), least)
        if self.keep_last is not None:
            check_whole("keep_last", self.keep_last, 1)
        if self.distributed is not None:
            check_choice("distributed", self.distributed, ("ddp", "fsdp"))
        if check_number("distributed_timeout_s", self.distributed_timeout_s) < 1:
            raise UsageError(f"--distributed_timeout_s must be at least 1, not {self.distributed_timeout_s}")
        if self.ema_decay is not None and not 0 < check_number("ema_decay", self.ema_decay) < 1:
            raise UsageError(f"--ema_decay must be above 0 and below 1, not {self.ema_decay}")
        self._validate_combinations()

    def _validate_combinations(self) -> None:
        """A flag that would change nothing is a misunderstanding, not a wish."""
        if self.freeze is not None:
            _distinct("freeze", self.freeze)
        if self.num_workers == 0:
            _unchanged(self, "", ("prefetch_factor",), "with --num_workers=0")
        if not self.save_checkpoint:
            _unchanged(self, "", ("keep_last", "save_freq"), "with --save_checkpoint=false")
        self.eval.limited(self.env)
        if self.env_eval_freq is not None:
            check_whole("env_eval_freq", self.env_eval_freq, 0)
        if self.env.type is None:
            _unchanged(self, "", ("env_eval_freq",), "without --env.type")
            _unchanged(self.eval, "eval.", [item.name for item in fields(self.eval)], "without --env.type")
        elif self.simulation_freq == 0:
            raise UsageError("--env.type has no effect where nothing is evaluated: give --env_eval_freq")
        if self.eval_freq == 0:
            _unchanged(self, "", ("max_eval_samples",), "with --eval_freq=0")
        if self.peft is not None and self.peft.merge and not self.save_checkpoint:
            raise UsageError("--peft.merge has no effect with --save_checkpoint=false")
        if self.peft is not None and (self.freeze is not None or self.policy.freeze_vision_encoder):
            raise UsageError(
                "with --peft only adapters are trained: --freeze and --policy.freeze_vision_encoder do nothing"
            )
        if self.peft is not None and not (self.policy.path or self.policy.pretrained_path):
            raise UsageError("--peft needs a checkpoint to adapt: --policy.path or --policy.pretrained_path")
        if self.peft is not None and self.ema_decay is not None:
            raise UsageError("--ema_decay is not offered together with --peft")
        for member in self.members:
            for source, target in member.renames.items():
                check_text("rename_map", source)
                check_text("rename_map", target)
        if self.resume and self.checkpoint is None and self.output_dir is None:
            raise UsageError(
                "--resume needs --output_dir of the run, or --config_path of a checkpoint's train_config.json"
            )

    def to_json(self) -> dict[str, Any]:
        """What was said, nested as `--config_path` reads it; values that say nothing (None) are left out."""
        return _said(self)

    def write(self, directory: Path) -> None:
        """Write train_config.json."""
        content = json.dumps(self.to_json(), indent=2, ensure_ascii=False)
        (directory / TRAIN_CONFIG_FILE).write_text(content + "\n", encoding="utf-8")


_WHOLE_NUMBERS = {
    "steps": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_workers": 0,
    "prefetch_factor": 1,
    "seed": 0,
    "save_freq": 0,
    "log_freq": 0,
    "eval_freq": 0,
    "max_eval_samples": 0,
}


def _said(config: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.init and value is not None:
            said[item.name] = _said(value) if dataclasses.is_dataclass(value) else value
    return said


def _distinct(name: str, values: Sequence[Any]) -> None:
    if not values:
        raise UsageError(f"--{name} is an empty list")
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise UsageError(f"--{name} names {twice[0]!r} twice")


_AUTO_FIT = "without --policy.auto_fit_fast_tokenizer=true"


def _unchanged(config: Any, prefix: str, names: Sequence[str], why: str) -> None:
    """Refuse flags that differ from their defaults where they change nothing."""
    for item in fields(config):
        if item.name in names and getattr(config, item.name) != item.default:
            raise UsageError(f"--{prefix}{item.name} has no effect {why}")


def _only_when_enabled(group: str, config: Any) -> None:
    for item in fields(config):
        if not config.enable and getattr(config, item.name) != item.default:
            raise UsageError(f"--{group}.{item.name} has no effect without --{group}.enable=true")


# --- reading the command line -------------------------------------------------------------------------------

#: Flags of LeRobot's that are not offered (or groups of them, with a dot) -> what to do instead.
_NOT_OFFERED = {
    "eval.recording": "episodes are not kept as a dataset",
    "optimizer.": "AdamW is set with --policy.optimizer_lr and the like",
    "scheduler.": "the schedule is set with --policy.scheduler_warmup_steps and the like",
    "use_policy_training_preset": "the policy's own fields, --policy.optimizer_lr and the like, are always used",
    "dataset.streaming": "datasets are read from local files; only columns and videos that are used are decoded",
    "dataset.use_imagenet_stats": "images are scaled to [-1, 1] for pi0-FAST, and nothing else; leave it out",
    "dataset.return_uint8": "images travel as uint8 anyway; leave it out",
    "tolerance_s": "a frame is looked for within half a frame's time; leave it out",
    "persistent_workers": "workers are always kept; leave it out",
    "policy.rtc_config": "real-time chunking is not offered; leave it out",
    "policy.input_features": "they are the checkpoint's or the dataset's; see --rename_map and --dataset.cameras",
    "policy.output_features": "they are the dataset's; leave it out",
    "sample_weighting": "not offered; leave it out",
    "reward_model.": "not offered; leave it out",
    "job.": "training runs on this machine; leave it out",
    "save_checkpoint_to_hub": "only the trained policy is uploaded, see --policy.push_to_hub",
    "wandb.disable_artifact": "checkpoints are never uploaded there; leave it out",
    "wandb.add_tags": "the configuration is sent as it is, not as tags; leave it out",
    "peft.full_training_modules": "only adapters are trained; leave it out",
    "peft.init_type": "adapters begin as peft has them by default; leave it out",
}


def parse_train(config_class: type[TrainConfig], argv: Sequence[str], program: str) -> TrainConfig:
    """The configuration that a command line describes; with `--resume` the saved one of the run, which flags override.

    Raises:
        UsageError: as `parsing.parse`; a flag of LeRobot's that is not offered; nothing to resume.
    """
    for argument in argv:
        name = argument.removeprefix("--").partition("=")[0]
        for refused, advice in _NOT_OFFERED.items():
            if argument.startswith("--") and (
                name == refused.rstrip(".") or (refused[-1] == "." and name.startswith(refused))
            ):
                raise UsageError(f"--{name} is not offered: {advice}")
    texts = given_texts(config_class, argv, program)
    if texts.get("resume", "false").lower() != "true":
        return parse(config_class, argv, program)
    named = texts.get(CONFIG_PATH)
    if named is None and "output_dir" not in texts:
        raise UsageError("--resume needs --output_dir of the run, or --config_path of a checkpoint's train_config.json")
    place = expanded("output_dir", texts["output_dir"]) if named is None else expanded(CONFIG_PATH, named)
    file = next(_saved_configurations(place), None) if named is None or place.is_dir() else place
    if file is None:
        raise UsageError(f"--resume: {place} holds no checkpoint to go on from; leave out --resume to begin anew")
    others = [*_without(argv, CONFIG_PATH), f"--{CONFIG_PATH}={file}"]
    config = parse(config_class, others, program)
    _check_fixed(config, parse(config_class, others[-1:], program))
    if file.parent.name == PRETRAINED_MODEL and named is not None and place.name != CHECKPOINTS:
        if not (place / CHECKPOINTS).is_dir():
            config.checkpoint = file.parent.parent.resolve()
        if "output_dir" not in texts:
            config.output_dir = str(file.resolve().parents[3])
    return config


#: Flags that a checkpoint has decided once and for all; a run cannot go on with others.
_OF_THE_RUN = (
    *("policy.path", "policy.pretrained_path", "policy.pretrained_revision", "policy.architecture"),
    *("policy.paligemma_variant", "policy.text_tokenizer_name", "policy.action_tokenizer_name"),
    *("policy.auto_fit_fast_tokenizer", *(f"policy.{name}" for name in _OF_THE_FIT)),
    *("policy.statistics", "policy.normalization_mapping", "policy.use_relative_actions"),
    *("policy.relative_exclude_joints", "policy.action_feature_names", "policy.chunk_size"),
    *("policy.prompt_format", "policy.fast_skip_tokens", "policy.image_resolution", "policy.empty_cameras"),
    *("rename_map", "dataset.state_key", "dataset.action_key", "dataset.cameras"),
    *("peft.method_type", "peft.r", "peft.lora_alpha", "peft.target_modules"),
)


def _check_fixed(config: TrainConfig, saved: TrainConfig) -> None:
    """Refuse flags beside `--resume` that would be ignored, or spoil the run.

    Raises:
        UsageError: one differs from that of the run.
    """
    for name in _OF_THE_RUN:
        group, _, item = name.rpartition(".")
        values = [getattr(getattr(each, group) if group else each, item, None) for each in (config, saved)]
        if values[0] != values[1]:
            raise UsageError(
                f"--{name} belongs to the run ({json.dumps(values[1])}) and cannot be changed with --resume: leave it "
                "out, or begin a new run from the checkpoint with --policy.path"
            )


def _without(argv: Sequence[str], name: str) -> Iterator[str]:
    """The arguments without a flag and its value."""
    skip = False
    for argument in argv:
        if skip:
            skip = False
        elif argument == f"--{name}":
            skip = True
        elif not argument.startswith(f"--{name}="):
            yield argument


def _saved_configurations(place: Path) -> Iterator[Path]:
    """The train_config.json files at or below a run's, a checkpoint's or a policy's directory, the newest first."""
    folder = place / CHECKPOINTS
    if folder.is_dir():
        steps = [entry for entry in folder.iterdir() if re.fullmatch(r"\d+", entry.name)]
        folders = [folder / LAST, *sorted(steps, key=lambda entry: int(entry.name), reverse=True)]
        candidates = [entry / PRETRAINED_MODEL / TRAIN_CONFIG_FILE for entry in folders]
    else:
        candidates = [place / TRAIN_CONFIG_FILE, place / PRETRAINED_MODEL / TRAIN_CONFIG_FILE]
    yield from (path for path in candidates if path.is_file())
