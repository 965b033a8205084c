"""The settings of a run's policy: the checkpoint's or the defaults, then the flags, then what the dataset says.

Left out: what the flags are (train_config.py), and what the settings mean (policy_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.policy_config import STATE_KEY, PI0FastConfig
from pi0_fast.train_config import TrainConfig
from pi0_fast.training.decisions import Decision
from pi0_fast.training.opening import Data
from pi0_fast.training.start import Start
from pi0_fast.types import PolicyError, UsageError

#: Settings that the weights were trained with; all others of a checkpoint are only its own habits.
_OF_THE_WEIGHTS = (
    *("paligemma_variant", "image_resolution", "fast_skip_tokens", "text_tokenizer_name", "action_tokenizer_name"),
    *("use_relative_actions", "relative_exclude_joints", "prompt_format", "state_clip", "action_clip", "position_gap"),
    *("attend_missing_cameras", "antialias_images", "count_padding_in_positions"),
)
#: Settings that --resume does not take from the command line: they are the checkpoint's.
_FIXED = (
    *("text_tokenizer_name", "action_tokenizer_name", "normalization_mapping", "use_relative_actions", "device"),
    *("relative_exclude_joints", "action_feature_names", "paligemma_variant", "pretrained_revision", "optimizer_fused"),
)


def settled_config(
    config: TrainConfig,
    start: Start,
    data: Data,
    device: torch.device,
    decisions: list[Decision],
) -> PI0FastConfig:
    """The policy's settings: the checkpoint's or the defaults, then the flags, then what the dataset says."""
    options = config.policy
    given = {name: value for name, value in options.settings().items() if not (config.resume and name in _FIXED)}
    dataset_inputs, outputs = data.inputs, data.columns.outputs()
    if start.config is None:
        base, inputs = PI0FastConfig(), dataset_inputs
        sizes = start.architecture(options.architecture)
        if sizes is not None:
            base = replace(base, image_resolution=(sizes.vision.image_size, sizes.vision.image_size))
    elif start.keeps_cameras and start.config.image_keys:
        base = start.config
        cameras = {key: feature for key, feature in base.input_features.items() if feature.type == "VISUAL"}
        inputs = {**cameras, STATE_KEY: dataset_inputs[STATE_KEY]}
    else:
        base, inputs = start.config, dataset_inputs
        if not start.keeps_cameras:
            base = PI0FastConfig(**{name: getattr(base, name) for name in _OF_THE_WEIGHTS})
    decided: dict[str, Any] = {
        "input_features": inputs,
        "output_features": outputs,
        "device": str(device),
        "push_to_hub": options.pushes,
        "pretrained_path": options.path or options.pretrained_path,
    }
    if "dtype" not in given and not config.resume:
        decided["dtype"] = "bfloat16" if device.type == "cuda" else "float32"
        why = f"the default on {device.type}; --policy.dtype changes it"
        decisions.append(Decision("dtype", str(decided["dtype"]), why))
    else:
        decisions.append(
            Decision("dtype", str(given.get("dtype", base.dtype)), "asked for" if "dtype" in given else "the run's")
        )
    if not config.resume:
        decided["action_feature_names"] = _action_names(options.action_feature_names, data, base.action_feature_names)
    try:
        settled = replace(base, **{**given, **decided})
        if start.folder is not None and not config.resume:
            settled = replace(settled, normalization_mapping=_modes(start, given))
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error
    if options.path is not None and options.pretrained_path is not None and not config.resume:
        why = (
            f"--policy.path gives settings and weights; --policy.pretrained_path={options.pretrained_path} is not read"
        )
        decisions.append(Decision("checkpoint", options.path, why))
    _check_effects(given, settled, base)
    return settled


#: A setting -> another that it needs to change anything, and the value that it needs.
_NEEDS: dict[str, tuple[str, bool]] = {
    "compile_mode": ("compile_model", True),
    "relative_exclude_joints": ("use_relative_actions", True),
    "validate_action_token_prefix": ("constrained", False),
}


def _check_effects(given: Mapping[str, Any], settled: PI0FastConfig, base: PI0FastConfig) -> None:
    """Refuse flags that change a setting which changes nothing.

    Raises:
        UsageError: there is one.
    """
    for name, (other, value) in _NEEDS.items():
        if name in given and getattr(settled, other) is not value and getattr(settled, name) != getattr(base, name):
            raise UsageError(f"--policy.{name} has no effect without --policy.{other}={str(value).lower()}")


def _action_names(asked: list[str] | None, data: Data, stored: list[str] | None = None) -> list[str] | None:
    """Names of the action's dimensions: those asked for, else the dataset's, else the checkpoint's where they fit.

    A checkpoint may be of a robot with as many joints in another order: what stays absolute goes by the data's names.

    Raises:
        UsageError: those asked for are not one for each dimension.
    """
    size = data.columns.action.shape[0]
    if asked is not None and len(asked) != size:
        raise UsageError(
            f"--policy.action_feature_names has {len(asked)} names, but the actions of {data.member.repo_id} have "
            f"{size} dimensions: give one for each, or leave it out for the dataset's names"
        )
    fitting = stored if stored is not None and len(stored) == size else None
    return asked or data.columns.action_names or fitting


def config_of_another(data: Data, first: PI0FastConfig, asked: list[str] | None) -> PI0FastConfig:
    """The settings of a mixture's further dataset: the first one's, but for dimensions and their names.

    Names that the command gives are the first one's; another dataset gets them where it has none, and they fit.
    """
    inputs = {key: feature for key, feature in first.input_features.items() if feature.type == "VISUAL"}
    try:
        return replace(
            first,
            input_features={**inputs, STATE_KEY: data.inputs[STATE_KEY]},
            output_features=data.columns.outputs(),
            action_feature_names=_action_names(None, data, asked),
        )
    except PolicyError as error:
        raise UsageError(f"{data.member.name}: {error}") from error


def _modes(start: Start, given: Mapping[str, Any]) -> dict[str, NormalizationMode]:
    """How state and action are normalised: as the checkpoint's were, unless the command says so outright."""
    stored = start.nominal_processors
    modes = {"VISUAL": NormalizationMode.IDENTITY, "STATE": stored.state.mode, "ACTION": stored.action.mode}
    for type_, mode in (given.get("normalization_mapping") or {}).items():
        asked = NormalizationMode.parse(mode)
        if start.keeps_cameras and asked is not modes.get(type_):
            raise UsageError(
                f"--policy.normalization_mapping: {type_} is {asked}, but the checkpoint was trained with "
                f"{modes.get(type_)}: leave it out, or begin with --policy.pretrained_path, which makes a new policy"
            )
        modes[type_] = asked
    return modes
