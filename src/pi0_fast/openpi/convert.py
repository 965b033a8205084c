"""`pi0-fast convert --from openpi`: a checkpoint of openpi's pi0-FAST to one of ours, which LeRobot loads, too.

    params/ (Orbax) ----- leaves ----> weights           assets/ID/norm_stats.json --> normalisers
    flags, or a preset --------------> config            tokenizers ------------------> copied

Everything but the weights is made and checked before the first of them is read; the directory appears when it is whole.
What openpi does otherwise than LeRobot is said in the configuration, and so done here: see `SWITCHES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.checkpoint import DTYPES, with_tokenizers, write_checkpoint
from pi0_fast.convert_config import CAMERA_PREFIX, ConvertConfig
from pi0_fast.display import progress, say
from pi0_fast.flag_names import flags_named
from pi0_fast.model.architecture import VARIANTS
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.openpi.filling import fill, lora_scale
from pi0_fast.openpi.leaves import PLACES, Tree, understand
from pi0_fast.openpi.orbax import find_params, leaves
from pi0_fast.openpi.statistics import Vectors, cut, find_statistics, normalizer, read_statistics
from pi0_fast.parsing import expanded
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY, PI0FastConfig, PolicyFeature
from pi0_fast.processors import PolicyProcessors, RelativeActions
from pi0_fast.swap import check_place
from pi0_fast.types import UsageError

#: What openpi does otherwise than LeRobot, and its checkpoints were trained and scored with.
SWITCHES: dict[str, Any] = {
    "prompt_format": "openpi",
    "position_gap": 1,
    "assume_contiguous_prefix": True,
    "count_padding_in_positions": True,
    "attend_missing_cameras": True,
    "antialias_images": True,
    "state_clip": False,
    "action_clip": False,
}
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Conversion:
    """What was converted, in words.

    Attributes:
        output: the directory.
        decisions: (what, how, where that is from).
    """

    output: Path
    decisions: tuple[tuple[str, str, str], ...]

    def tables(self) -> list[tuple[str, list[tuple[str, ...]], tuple[str, ...]]]:
        """(title, rows, headers) of what the command prints."""
        return [(f"converted to {self.output}", [*self.decisions], ("what", "how", "from"))]


@flags_named({"--policy.text_tokenizer_name": "--text_tokenizer"})
def convert(config: ConvertConfig) -> Conversion:
    """Convert a checkpoint.

    Args:
        config: validated.

    Raises:
        UsageError: a flag is missing or contradicts the checkpoint; the output directory exists.
        PolicyError: the checkpoint is damaged, or no pi0-FAST of openpi; parts do not belong together.
        TokenizerError, HubError: a tokenizer cannot be loaded.
        OSError: the directory cannot be written.
    """
    config.validate()
    if not config.checkpoint:
        config.ask(config.missing())
    source = expanded("checkpoint", config.checkpoint)
    if config.output_dir:
        _check_target(source, expanded("output_dir", config.output_dir), config.overwrite)
    params = find_params(source)
    tree = understand(leaves(params), str(params))
    scale, file = _told(config, tree, source)
    target = expanded("output_dir", config.output_dir)
    stored = read_statistics(file)
    vectors = {
        STATE_KEY: cut(stored[STATE_KEY], config.state_dim, STATE_KEY, "state_dim"),
        ACTION_KEY: cut(stored[ACTION_KEY], config.setting("action_dim"), ACTION_KEY, "action_dim"),
    }
    policy = _without_weights(config, tree, vectors)
    total = sum(tree.leaves[path].nbytes for path in PLACES)
    with progress("converting", _megabytes(total), "MB") as advance:
        fill(policy.model, tree, scale, _Megabytes(advance))
    say(f"writing {target}")
    write_checkpoint(target, policy.checkpoint())
    return Conversion(target, tuple(_decisions(config, tree, policy, scale, file, stored)))


def _told(config: ConvertConfig, tree: Tree, source: Path) -> tuple[float | None, Path]:
    """LoRA's factor and the file of statistics; whatever is missing, of these and all else, is asked for at once."""
    missing = config.missing()
    found: list[Any] = []
    for look in (
        lambda: lora_scale(tree, config.lora_alpha, config.lora_rank_stabilized),
        lambda: find_statistics(source, config.norm_stats, config.asset_id),
    ):
        try:
            found.append(look())
        except UsageError as error:
            if not missing:
                raise
            found.append(None)
            missing.append(str(error))
    config.ask(missing)
    return found[0], found[1]


def _megabytes(count: int) -> int:
    return -(-count // _MEGABYTE)


class _Megabytes:
    """Bytes to the megabytes, begun ones included, of a progress bar."""

    def __init__(self, advance: Any) -> None:
        self._advance, self._bytes = advance, 0

    def __call__(self, count: int) -> None:
        before, self._bytes = self._bytes, self._bytes + count
        self._advance(_megabytes(self._bytes) - _megabytes(before))


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if target.exists() and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UsageError(f"the output directory {target} holds the checkpoint {source}: give another one")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UsageError(
            f"{target} exists: give another output directory, or --overwrite to replace a checkpoint there"
        )
    check_place(target)


def _without_weights(config: ConvertConfig, tree: Tree, vectors: dict[str, Vectors]) -> PI0FastPolicy:
    """The whole policy, its model on the meta device: whatever does not fit together fails here."""
    settings = _settings(config, tree, {key: len(next(iter(values.values()))) for key, values in vectors.items()})
    settings, text_tokenizer, action_tokenizer = with_tokenizers(settings, None, None)
    mode = NormalizationMode(config.setting("normalization"))
    names = None if settings.action_feature_names is None else tuple(settings.action_feature_names)
    relative = None
    if settings.use_relative_actions:
        relative = RelativeActions(settings.action_dim, tuple(settings.relative_exclude_joints), names)
    processors = PolicyProcessors(
        normalizer(vectors[STATE_KEY], mode, STATE_KEY),
        normalizer(vectors[ACTION_KEY], mode, ACTION_KEY, names),
        relative,
    )
    with torch.device("meta"):
        model = PaliGemma(tree.architecture, tied_head=True, dtype=DTYPES[config.dtype])
    return PI0FastPolicy(settings, model, processors, text_tokenizer, action_tokenizer)


def _settings(config: ConvertConfig, tree: Tree, sizes: dict[str, int]) -> PI0FastConfig:
    relative = config.relative_numbers()
    action_dim, size = sizes[ACTION_KEY], tree.architecture.vision.image_size
    if relative and relative[-1] >= sizes[STATE_KEY]:
        raise UsageError(
            f"--relative_dims: action dimension {relative[-1]} is relative to that of the state, which has "
            f"{sizes[STATE_KEY]} dimensions"
        )
    # Of one length, so that none of the names is part of another: LeRobot excludes by parts of names.
    digits = len(str(action_dim - 1))
    names = [f"dim{dim:0{digits}}" for dim in range(action_dim)]
    horizon = config.setting("action_horizon")
    variant = next((name for name, text in VARIANTS.items() if text == tree.architecture.text), "gemma_2b")
    return PI0FastConfig(
        input_features={
            **{key: PolicyFeature("VISUAL", (3, size, size)) for key in config.camera_keys()},
            STATE_KEY: PolicyFeature("STATE", (sizes[STATE_KEY],)),
        },
        output_features={ACTION_KEY: PolicyFeature("ACTION", (action_dim,))},
        paligemma_variant=variant,
        dtype=config.dtype,
        chunk_size=horizon,
        n_action_steps=horizon,
        max_state_dim=max(sizes[STATE_KEY], 32),
        max_action_dim=max(action_dim, 32),
        use_relative_actions=bool(relative),
        relative_exclude_joints=[name for dim, name in enumerate(names) if relative and dim not in relative],
        action_feature_names=names if relative else None,
        image_resolution=(size, size),
        tokenizer_max_length=config.prompt_length(),
        text_tokenizer_name=config.text_tokenizer,
        action_tokenizer_name=config.setting("action_tokenizer"),
        normalization_mapping={
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode(config.setting("normalization")),
            "ACTION": NormalizationMode(config.setting("normalization")),
        },
        **SWITCHES,
    )


def _decisions(
    config: ConvertConfig,
    tree: Tree,
    policy: PI0FastPolicy,
    scale: float | None,
    file: Path,
    stored: dict[str, Vectors],
) -> list[tuple[str, str, str]]:
    """(what, how, where that is from), for people."""

    def origin(name: str) -> str:
        if getattr(config, name) is not None:
            return f"--{name}"
        return f"preset {config.preset}" if config.setting(name) is not None else "openpi"

    processors, settings = policy.preparation.processors, policy.config
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    sizes = {key: len(next(iter(values.values()))) for key, values in stored.items()}
    relative = config.relative_numbers()
    rows = [
        ("weights", f"{count:,} in {config.dtype}, head and token table one", "checkpoint"),
        ("chunk", f"{settings.chunk_size} steps", origin("action_horizon")),
        ("action", f"{processors.action.size} of {sizes[ACTION_KEY]} dimensions", origin("action_dim")),
        (
            "state",
            f"{processors.state.size} of {sizes[STATE_KEY]} dimensions",
            "--state_dim" if config.state_dim is not None else str(file),
        ),
        ("normalization", settings.mode("ACTION").value, origin("normalization")),
        (
            "relative actions",
            f"dimension {', '.join(map(str, relative))}" if relative else "none",
            origin("relative_dims"),
        ),
        (
            "cameras, as the model sees them",
            ", ".join(key.removeprefix(CAMERA_PREFIX) for key in settings.image_keys),
            origin("cameras"),
        ),
        ("action tokenizer", config.setting("action_tokenizer"), origin("action_tokenizer")),
        ("prompt", f"up to {settings.tokenizer_max_length} ids", origin("max_token_len")),
        ("text tokenizer", config.text_tokenizer, "--text_tokenizer"),
    ]
    if scale is not None:
        ranks = ", ".join(f"rank {rank} in {part}" for part, rank in tree.ranks.items())
        rows.append(
            ("LoRA, merged", f"{len(tree.adapters)} adapters, {ranks}; attention's times {scale:g}", "checkpoint")
        )
    rows += [(name, str(value), "openpi") for name, value in SWITCHES.items()]
    return rows
