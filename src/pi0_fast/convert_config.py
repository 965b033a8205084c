"""What `pi0-fast convert` can be told: every flag with its default and its explanation, and the released checkpoints.

Plain values, checked as far as that needs no checkpoint. What a flag does not say a preset may; what neither says and
no checkpoint holds is asked for. Left out: the work (openpi/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pi0_fast.configs import check_choice, check_number, check_text, check_whole
from pi0_fast.parsing import flags_of, option, parse
from pi0_fast.types import UsageError

Config = TypeVar("Config")

SOURCES = ("openpi",)
DTYPES = ("float32", "bfloat16")
#: openpi's two ways to normalise: it calls them quantile and z-score.
MODES = ("QUANTILES", "MEAN_STD")
#: `--relative_dims` of a policy whose actions are all absolute.
NO_DIMS = "none"
CAMERA_PREFIX = "observation.images."

_FAST = "physical-intelligence/fast"
#: What openpi's own configurations say of the checkpoints that were released; they leave to the user what is not here.
PRESETS: dict[str, dict[str, Any]] = {
    "base": {
        "action_horizon": 32,
        "cameras": ["base_0_rgb", "base_1_rgb", "wrist_0_rgb"],
        "normalization": "QUANTILES",
        "action_tokenizer": _FAST,
    },
    "droid": {
        "action_horizon": 10,
        "action_dim": 8,
        "cameras": ["base_0_rgb", "base_1_rgb", "wrist_0_rgb"],
        "relative_dims": NO_DIMS,
        "normalization": "QUANTILES",
        "action_tokenizer": _FAST,
    },
    "libero": {
        "action_horizon": 10,
        "action_dim": 7,
        "cameras": ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"],
        "relative_dims": "0,1,2,3,4,5",
        "action_tokenizer": _FAST,
        "max_token_len": 180,
    },
}
#: openpi's own default of `--max_token_len`.
_MAX_TOKEN_LEN = 250
#: Asked for where neither a flag nor the preset says it -> what it is, and why it cannot be found out.
_ASKED = {
    "from": f"which program wrote the checkpoint: {', '.join(SOURCES)}",
    "checkpoint": "its directory, the first argument that is no flag",
    "output_dir": "where to write, the second argument that is no flag",
    "action_horizon": "steps of a chunk; action_horizon of openpi's model configuration",
    "action_dim": "dimensions of the robot's action; statistics may be padded beyond them",
    "cameras": 'names of the images in openpi, such as \'["base_0_rgb", "base_1_rgb", "wrist_0_rgb"]\'',
    "relative_dims": "action dimensions that openpi's DeltaActions made relative to the state, such as 0,1,2,3,4,5, "
    f"or {NO_DIMS}",
    "normalization": "QUANTILES or MEAN_STD (openpi's z-score): the statistics hold both, and nothing says which one "
    "was trained with. openpi's default for pi0-FAST is quantiles now, but users report that the released "
    "pi0_fast_libero acts sensibly with MEAN_STD only; with the wrong one all actions are wrong",
    "action_tokenizer": f"directory or hub id of the FAST tokenizer; openpi's default is {_FAST}",
}
_TO_BE_GIVEN = "none, it must be given"
_GIVEN, _MISSING, _OUTPUT = "Checkpoint", "What the checkpoint does not say", "Output"


@dataclass
class ConvertConfig:
    """All of `pi0-fast convert`; the same object is the argument of `pi0_fast.openpi.convert.convert` in Python."""

    source: str = option(
        "", group=_GIVEN, help=f"Which program wrote it: {', '.join(SOURCES)}.", aliases=("from",), shown=_TO_BE_GIVEN
    )
    checkpoint: str = option(
        "",
        group=_GIVEN,
        help="Directory of the checkpoint, with params/ and assets/ in it (or params/ itself); the first argument that "
        "is no flag.",
        shown=_TO_BE_GIVEN,
    )
    output_dir: str = option(
        "", group=_GIVEN, help="Directory to write; the second argument that is no flag.", shown=_TO_BE_GIVEN
    )
    norm_stats: str | None = option(
        None,
        group=_GIVEN,
        help="File norm_stats.json with openpi's statistics.",
        shown="the one in assets/ of the checkpoint",
    )
    asset_id: str | None = option(
        None, group=_GIVEN, help="Folder in assets/, where there are several.", shown="the only one"
    )

    preset: str | None = option(
        None,
        group=_MISSING,
        help=f"Values of a released checkpoint for the flags below: {', '.join(PRESETS)}. Flags override them.",
    )
    action_horizon: int | None = option(None, group=_MISSING, help="Steps of a chunk.", shown="the preset's")
    action_dim: int | None = option(
        None, group=_MISSING, help="Dimensions of the robot's action.", shown="the preset's"
    )
    state_dim: int | None = option(
        None,
        group=_MISSING,
        help="Dimensions of the robot's state.",
        shown="those of the statistics, without padding at the end",
    )
    cameras: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_MISSING,
        help="Names of the images in openpi, all that the model was fed, the black ones included. The model gets them "
        "in alphabetical order, as in openpi; the policy calls them observation.images.NAME.",
        shown="the preset's",
    )
    relative_dims: str | None = option(
        None,
        group=_MISSING,
        help=f"Comma-separated action dimensions that are relative to the state (DeltaActions), or {NO_DIMS}.",
        shown="the preset's",
    )
    normalization: str | None = option(
        None, group=_MISSING, help=f"One of {', '.join(MODES)}; which one is stored nowhere.", shown="the preset's"
    )
    action_tokenizer: str | None = option(
        None, group=_MISSING, help="Directory or hub id of the FAST tokenizer.", shown="the preset's"
    )
    text_tokenizer: str = option(
        "google/paligemma-3b-pt-224",
        group=_MISSING,
        help="Directory, file (openpi keeps a paligemma_tokenizer.model) or hub id of the text tokenizer.",
    )
    max_token_len: int | None = option(
        None,
        group=_MISSING,
        help="Most ids of a prompt: max_token_len of openpi's model configuration, which pads prompts to it.",
        shown=f"the preset's, or openpi's own default, {_MAX_TOKEN_LEN}",
    )
    lora_alpha: float | None = option(
        None,
        group=_MISSING,
        help="Alpha of openpi's LoRA configuration, where the checkpoint has LoRA leaves; they are merged.",
        shown="16 for rank 16, as in openpi's gemma_2b_lora",
    )
    lora_rank_stabilized: bool = option(
        False, group=_MISSING, help="LoRA is scaled by alpha / sqrt(rank) (rslora), not by alpha / rank."
    )

    dtype: str = option("float32", group=_OUTPUT, help=f"Number format of the weights: {' or '.join(DTYPES)}.")
    overwrite: bool = option(False, group=_OUTPUT, help="Replace a checkpoint in the output directory.")

    def setting(self, name: str) -> Any:
        """The flag's value, or else the preset's, or else None."""
        given = getattr(self, name)
        return given if given is not None or self.preset is None else PRESETS[self.preset].get(name)

    def prompt_length(self) -> int:
        """`max_token_len`, or openpi's own."""
        return int(self.setting("max_token_len") or _MAX_TOKEN_LEN)

    def validate(self) -> None:
        """Refuse what no checkpoint could make right; what is missing is for `missing`.

        Raises:
            UsageError: naming the flag, the value and what is allowed.
        """
        if self.source:
            check_choice("from", self.source, SOURCES)
        check_choice("dtype", self.dtype, DTYPES)
        if self.preset is not None:
            check_choice("preset", self.preset, tuple(PRESETS))
        for name in ("checkpoint", "output_dir", "text_tokenizer", "norm_stats", "asset_id", "action_tokenizer"):
            if getattr(self, name) or name == "text_tokenizer":
                check_text(name, getattr(self, name))
        if self.norm_stats is not None and self.asset_id is not None:
            raise UsageError("--asset_id has no effect with --norm_stats, which names the file")
        for name in ("action_horizon", "action_dim", "state_dim", "max_token_len"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.normalization is not None:
            check_choice("normalization", self.normalization, MODES)
        if self.lora_alpha is not None and check_number("lora_alpha", self.lora_alpha) <= 0:
            raise UsageError(f"--lora_alpha must be above 0, not {self.lora_alpha}")
        self._validate_cameras()
        self.relative_numbers()

    def missing(self) -> list[str]:
        """What neither a flag nor the preset says: each flag that must be given, and why."""
        values = {name: self.setting("source" if name == "from" else name) for name in _ASKED}
        return [f"--{name} ({why})" for name, why in _ASKED.items() if values[name] in (None, "")]

    def ask(self, missing: list[str]) -> None:
        """Ask for all that is missing at once.

        Args:
            missing: of the method of that name, and what the checkpoint makes necessary beside it.

        Raises:
            UsageError: it is not empty.
        """
        if not missing:
            return
        if self.preset is not None:
            hint = f"The preset {self.preset} leaves that to you"
        else:
            hint = f"For a released checkpoint --preset, one of {', '.join(PRESETS)}, says most of it"
        raise UsageError(
            f"no checkpoint of openpi holds all that a policy needs, so you must give: {'; '.join(missing)}. {hint}"
        )

    def _validate_cameras(self) -> None:
        if self.cameras is None:
            return
        for name in self.cameras:
            check_text("cameras", name)
        names = [name.removeprefix(CAMERA_PREFIX) for name in self.cameras]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"--cameras must be different names, at least one, not {self.cameras}")

    def camera_keys(self) -> list[str]:
        """The policy's names of the cameras, in the order in which openpi's model sees them.

        Its images travel as a dictionary through jax, which sorts it.
        """
        return sorted(CAMERA_PREFIX + name.removeprefix(CAMERA_PREFIX) for name in self.setting("cameras"))

    def relative_numbers(self) -> list[int]:
        """The relative action dimensions as numbers; none where the setting is missing.

        Raises:
            UsageError: it is no list of different numbers within `action_dim`.
        """
        text = self.setting("relative_dims")
        if text is None or text == NO_DIMS:
            return []
        parts = [part.strip() for part in text.split(",")]
        size = self.setting("action_dim")
        if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
            raise UsageError(f"--relative_dims must be numbers such as 0,1,2, or {NO_DIMS}, not {text!r}")
        numbers = sorted(map(int, parts))
        if size is not None and numbers[-1] >= size:
            raise UsageError(f"--relative_dims names dimension {numbers[-1]}, but --action_dim is {size}")
        return numbers


def parse_convert(config_class: type[Config], argv: Sequence[str], program: str) -> Config:
    """`parse`, where the first two arguments that are no flags are the checkpoint and the output directory.

    Raises:
        UsageError: as `parse`; a third one.
    """
    flags = flags_of(config_class)
    switches = {name for flag in flags.values() if flag.is_switch for name in (flag.name, *flag.aliases)}
    remaining, arguments, places = list(argv), [], []
    while remaining:
        token = remaining.pop(0)
        if not token.startswith("--"):
            places.append(token)
            continue
        following = remaining[0] if remaining and not remaining[0].startswith("--") else None
        if "=" in token or following is None:
            arguments.append(token)
        elif token[2:] in switches and following.lower() not in ("true", "false"):
            arguments.append(f"{token}=true")
        else:
            arguments.append(f"{token}={remaining.pop(0)}")
    if len(places) > 2:
        raise UsageError(
            f"unexpected argument {places[2]!r}: {program} takes the checkpoint, the output directory and --flags (see "
            f"{program} --help)"
        )
    names = ("checkpoint", "output_dir")
    arguments += [f"--{name}={place}" for name, place in zip(names, places, strict=False)]
    return parse(config_class, arguments, program)
