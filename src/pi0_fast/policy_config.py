"""What a pi0-FAST policy can be told: all fields, their defaults, and the two files of a checkpoint they live in.

`config.json` holds LeRobot's fields and only those, because LeRobot 0.6.1 refuses a file with any other key;
`pi0_fast.json` beside it holds ours. A directory without `pi0_fast.json` was written by LeRobot: settings that would
change the numbers of such a checkpoint then keep LeRobot's behaviour. Left out: the processor files
(`processors.py`) and everything that needs torch.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.types import PolicyError, UsageError

CONFIG_FILE = "config.json"
OWN_FILE = "pi0_fast.json"
POLICY_TYPE = "pi0_fast"
STATE_KEY = "observation.state"
ACTION_KEY = "action"

#: As LeRobot spells them (``FeatureType``).
FEATURE_TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD", "LANGUAGE")
VARIANTS = ("gemma_300m", "gemma_2b")
DTYPES = ("float32", "bfloat16")
PROMPT_FORMATS = ("lerobot", "openpi")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_OWN_FORMAT, _OWN_VERSION = "pi0-fast-policy", 1
# Fields that LeRobot's configuration class does not know: they go to OWN_FILE.
_OWN_FIELDS = (
    "prompt_format",
    "state_clip",
    "action_clip",
    "constrained",
    "position_gap",
    "assume_contiguous_prefix",
    "attend_missing_cameras",
    "antialias_images",
    "count_padding_in_positions",
    "optimizer_fused",
)
# What a checkpoint of LeRobot was trained with, where our default for a new policy is another.
_LEROBOT_BEHAVIOUR: dict[str, Any] = {"state_clip": False, "action_clip": False}

_SWITCHES = (
    "use_amp",
    "use_peft",
    "push_to_hub",
    "use_relative_actions",
    "validate_action_token_prefix",
    "use_kv_cache",
    "gradient_checkpointing",
    "compile_model",
    "state_clip",
    "action_clip",
    "constrained",
    "assume_contiguous_prefix",
    "attend_missing_cameras",
    "antialias_images",
    "count_padding_in_positions",
)
_COUNTS_FROM_1 = (
    "n_obs_steps",
    "chunk_size",
    "n_action_steps",
    "max_state_dim",
    "max_action_dim",
    "max_action_tokens",
    "tokenizer_max_length",
    "max_decoding_steps",
)
_COUNTS_FROM_0 = (
    "empty_cameras",
    "fast_skip_tokens",
    "position_gap",
    "scheduler_warmup_steps",
    "scheduler_decay_steps",
)
_NUMBERS_FROM_0 = (
    "temperature",
    "optimizer_lr",
    "optimizer_eps",
    "optimizer_weight_decay",
    "optimizer_grad_clip_norm",
    "scheduler_decay_lr",
)
_CHOICES = {
    "paligemma_variant": VARIANTS,
    "dtype": DTYPES,
    "prompt_format": PROMPT_FORMATS,
    "compile_mode": COMPILE_MODES,
}
_TEXTS = ("text_tokenizer_name", "action_tokenizer_name")
_OPTIONAL_TEXTS = ("device", "repo_id", "license", "pretrained_path", "pretrained_revision")
_TEXT_LISTS = ("relative_exclude_joints", "action_feature_names", "tags")


@dataclass(frozen=True)
class PolicyFeature:
    """One input or output that a policy declares, as LeRobot's config.json writes it.

    Attributes:
        type: one of FEATURE_TYPES.
        shape: without the batch axis; images as (3, height, width).
    """

    type: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """``{"type": ..., "shape": [...]}``."""
        return {"type": self.type, "shape": list(self.shape)}


@dataclass
class PI0FastConfig:
    """All settings of a pi0-FAST policy: names and defaults are LeRobot's, then come ours.

    One default differs from LeRobot 0.6.1: `normalization_mapping` is QUANTILES for state and action, as the papers
    have it (there MEAN_STD). `max_state_dim` and `max_action_dim` are limits: nothing is padded to them.

    Attributes:
        input_features, output_features: key -> PolicyFeature (or its JSON); the images' order is the model's.
        chunk_size: steps that are predicted; `n_action_steps`: steps of it that are executed.
        max_action_tokens: budget of a training target with its special ids; longer ones are counted, never cut.
        use_relative_actions: actions are relative to the state, but for names that contain one of
            `relative_exclude_joints`; `action_feature_names` names the action's dimensions.
        tokenizer_max_length: budget of the prompt in ids; a longer one is an error.
        fast_skip_tokens: ids at the end of the text vocabulary that action tokens leave alone.
        normalization_mapping: feature type -> NormalizationMode (or its name).
        prompt_format: "lerobot" or "openpi" layout of the prompt and its targets.
        state_clip: state bins outside the range are clipped to 0..255; False keeps -1 as LeRobot's checkpoints do.
        action_clip: normalised actions are clipped to [-1, 1] before they are encoded, in the modes that clip
            (QUANTILES, QUANTILE10), as the tokenizer was fitted; LeRobot never does.
        constrained: only ids that can still become a valid chunk are generated.
        position_gap: positions left out before ``Action: `` when it is generated or given (openpi's released decoder:
            1); not in training.
        assume_contiguous_prefix: where a camera is masked, what is generated looks at the columns that openpi's decoder
            looks at, which are the wrong ones: its tokens, but worse ones. Without a masked camera it changes nothing.
        attend_missing_cameras: a camera that the batch lacks is attended as a black image (openpi), not masked.
        antialias_images: images are resized with antialiasing (openpi, for uint8 images).
        count_padding_in_positions: in training a missing camera that is masked takes positions, as in openpi; not in
            generation.
        optimizer_fused: fused AdamW; None chooses by device.
        foreign_settings: keys of config.json that this version does not know, kept for writing back.

    Raises:
        PolicyError: a value that is impossible, contradicts another, or asks for what pi0-fast does not do.
    """

    n_obs_steps: int = 1
    input_features: dict[str, PolicyFeature] = field(default_factory=dict)
    output_features: dict[str, PolicyFeature] = field(default_factory=dict)
    device: str | None = None
    use_amp: bool = False
    use_peft: bool = False
    push_to_hub: bool = True
    repo_id: str | None = None
    private: bool | None = None
    tags: list[str] | None = None
    license: str | None = None
    pretrained_path: str | None = None
    pretrained_revision: str | None = None

    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    dtype: str = "float32"
    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    max_action_tokens: int = 256
    use_relative_actions: bool = False
    relative_exclude_joints: list[str] = field(default_factory=lambda: ["gripper"])
    action_feature_names: list[str] | None = None
    rtc_config: dict[str, Any] | None = None
    image_resolution: tuple[int, int] = (224, 224)
    empty_cameras: int = 0
    tokenizer_max_length: int = 200
    text_tokenizer_name: str = "google/paligemma-3b-pt-224"
    action_tokenizer_name: str = "lerobot/fast-action-tokenizer"
    temperature: float = 0.0
    max_decoding_steps: int = 256
    fast_skip_tokens: int = 128
    validate_action_token_prefix: bool = True
    use_kv_cache: bool = True
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.QUANTILES,
            "ACTION": NormalizationMode.QUANTILES,
        }
    )

    gradient_checkpointing: bool = False
    compile_model: bool = False
    compile_mode: str = "max-autotune"
    optimizer_lr: float = 2.5e-5
    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_eps: float = 1e-8
    optimizer_weight_decay: float = 0.01
    optimizer_grad_clip_norm: float = 1.0
    scheduler_warmup_steps: int = 1_000
    scheduler_decay_steps: int = 30_000
    scheduler_decay_lr: float = 2.5e-6

    prompt_format: str = "lerobot"
    state_clip: bool = True
    action_clip: bool = True
    constrained: bool = True
    position_gap: int = 0
    assume_contiguous_prefix: bool = False
    attend_missing_cameras: bool = False
    antialias_images: bool = False
    count_padding_in_positions: bool = False
    optimizer_fused: bool | None = None

    foreign_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_types()
        self.image_resolution = _pair(self.image_resolution, "image_resolution", int)
        self.optimizer_betas = _pair(self.optimizer_betas, "optimizer_betas", float)
        self.input_features = _features(self.input_features, "input_features")
        self.output_features = _features(self.output_features, "output_features")
        self.normalization_mapping = modes_from_json(self.normalization_mapping, "normalization_mapping")
        self._check_values()
        self._check_features()
        self._refuse_what_is_not_done()

    # --- what the fields mean together ----------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The key of the robot's state in a batch."""
        return STATE_KEY

    @property
    def action_key(self) -> str:
        """The key of the action in a batch."""
        return ACTION_KEY

    @property
    def expected_inputs(self) -> dict[str, PolicyFeature]:
        """`input_features` with the cameras that `empty_cameras` adds, in the order the model sees them."""
        inputs = dict(self.input_features)
        for number in range(self.empty_cameras):
            key = f"observation.images.empty_camera_{number}"
            inputs[key] = PolicyFeature("VISUAL", (3, *self.image_resolution))
        return inputs

    @property
    def image_keys(self) -> tuple[str, ...]:
        """Keys of all cameras in declared order, those of `empty_cameras` included."""
        return tuple(key for key, feature in self.expected_inputs.items() if feature.type == "VISUAL")

    @property
    def state_dim(self) -> int:
        """Dimensions of the declared state.

        Raises:
            PolicyError: no state is declared.
        """
        return self._declared(self.input_features, STATE_KEY, "input_features").shape[0]

    @property
    def action_dim(self) -> int:
        """Dimensions of the declared action.

        Raises:
            PolicyError: no action is declared.
        """
        return self._declared(self.output_features, ACTION_KEY, "output_features").shape[0]

    def mode(self, feature_type: str) -> NormalizationMode:
        """How features of that type ("STATE", "ACTION", "VISUAL") are normalised.

        Raises:
            PolicyError: `normalization_mapping` does not say.
        """
        if feature_type not in self.normalization_mapping:
            raise PolicyError(
                f"normalization_mapping says nothing of {feature_type} (it has "
                f"{', '.join(self.normalization_mapping) or 'no entry'}): add it, one of "
                f"{', '.join(NormalizationMode.__members__)}"
            )
        return self.normalization_mapping[feature_type]

    @staticmethod
    def _declared(features: Mapping[str, PolicyFeature], key: str, where: str) -> PolicyFeature:
        if key not in features:
            raise PolicyError(f"{where} lacks {key!r} (it has {', '.join(features) or 'no entry'}): declare it there")
        return features[key]

    # --- files ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: exactly the keys of LeRobot 0.6.1's class, then `foreign_settings`."""
        content: dict[str, Any] = {"type": POLICY_TYPE}
        for item in fields(self):
            if item.name not in (*_OWN_FIELDS, "foreign_settings"):
                content[item.name] = _plain(getattr(self, item.name))
        inputs = self.expected_inputs if self.input_features else {}
        content["input_features"] = {key: feature.to_json() for key, feature in inputs.items()}
        content["output_features"] = {key: feature.to_json() for key, feature in self.output_features.items()}
        return {**content, **copy.deepcopy(self.foreign_settings)}

    def own_to_json(self) -> dict[str, Any]:
        """The settings of pi0_fast.json: those that LeRobot's class would refuse."""
        return {name: _plain(getattr(self, name)) for name in _OWN_FIELDS}

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], where: str = CONFIG_FILE, own: Mapping[str, Any] | None = None
    ) -> PI0FastConfig:
        """From the content of config.json and, where there is one, the settings of pi0_fast.json.

        Unknown keys of config.json get one warning that lists them and are kept. Without `own` the file is LeRobot's:
        state bins and actions are not clipped, and an absent `normalization_mapping` says nothing (the processor
        files do).

        Args:
            value: the object of config.json.
            where: how errors call it.
            own: what `own_to_json` gave.

        Raises:
            PolicyError: another type of policy, an unknown own setting, or values as in the class.
        """
        if not isinstance(value, Mapping):
            raise PolicyError(f"{where}: expected an object, got {type(value).__name__}")
        settings = dict(value)
        if settings.pop("type", None) != POLICY_TYPE:
            raise PolicyError(f"{where}: 'type' is {value.get('type')!r}; only {POLICY_TYPE!r} policies are read")
        known = {item.name for item in fields(cls)} - {*_OWN_FIELDS, "foreign_settings"}
        foreign = {name: settings.pop(name) for name in list(settings) if name not in known}
        if foreign:
            warnings.warn(
                f"{where}: pi0-fast does not know {', '.join(sorted(foreign))}; kept for writing back, without effect",
                stacklevel=2,
            )
        settings.setdefault("normalization_mapping", {})
        for name in ("input_features", "output_features"):  # null, where LeRobot would take them from a dataset
            if settings.get(name) is None:
                settings[name] = {}
        if own is not None and set(own) - set(_OWN_FIELDS):
            raise PolicyError(
                f"{OWN_FILE} beside {where}: unknown settings {sorted(set(own) - set(_OWN_FIELDS))}; a newer pi0-fast "
                f"wrote it: install that one"
            )
        try:
            return cls(**settings, **(_LEROBOT_BEHAVIOUR if own is None else own), foreign_settings=foreign)
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from error

    # --- checks ---------------------------------------------------------------------------------------------

    def _check_types(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"{name} is {getattr(self, name)!r}; expected true or false")
        for name in ("private", "optimizer_fused"):
            if not isinstance(getattr(self, name), bool | None):
                raise PolicyError(f"{name} is {getattr(self, name)!r}; expected true, false or none")
        for names, least in ((_COUNTS_FROM_1, 1), (_COUNTS_FROM_0, 0)):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise PolicyError(f"{name} is {value!r}; expected a whole number, at least {least}")
        for name in _NUMBERS_FROM_0:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise PolicyError(f"{name} is {value!r}; expected a finite number, at least 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise PolicyError(f"{name} is {getattr(self, name)!r}; one of {', '.join(choices)}")
        path: Any = self.pretrained_path
        if isinstance(path, Path):
            self.pretrained_path = str(path)
        for name in (*_TEXTS, *_OPTIONAL_TEXTS):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in _OPTIONAL_TEXTS):
                raise PolicyError(f"{name} is {value!r}; expected a text")
        for name in _TEXT_LISTS:
            value = getattr(self, name)
            if value is not None or name == "relative_exclude_joints":
                setattr(self, name, texts_from_json(value, name))

    def _check_values(self) -> None:
        if self.n_action_steps > self.chunk_size:
            raise PolicyError(
                f"n_action_steps ({self.n_action_steps}, the steps that are executed) is above chunk_size "
                f"({self.chunk_size}, the steps that are predicted)"
            )
        if any(not 0 <= beta < 1 for beta in self.optimizer_betas):
            raise PolicyError(f"optimizer_betas are {self.optimizer_betas}; expected two numbers from 0 to below 1")
        if min(self.image_resolution) < 1:
            raise PolicyError(f"image_resolution is {self.image_resolution}; expected height and width")
        visual = self.normalization_mapping.get("VISUAL", NormalizationMode.IDENTITY)
        if visual is not NormalizationMode.IDENTITY:
            raise PolicyError(
                f"normalization_mapping asks for {visual} of VISUAL: images in [0, 1] are scaled to [-1, 1] and "
                f"nothing else; it must be IDENTITY"
            )

    def _check_features(self) -> None:
        for where, features in (("input_features", self.input_features), ("output_features", self.output_features)):
            for key, feature in features.items():
                place = f"{where}: {key!r}"
                if feature.type == "VISUAL" and (len(feature.shape) != 3 or feature.shape[0] != 3):
                    raise PolicyError(
                        f"{place} has the shape {feature.shape}; an image is declared as (3, height, width)"
                    )
        for where, key, type_ in (("input_features", STATE_KEY, "STATE"), ("output_features", ACTION_KEY, "ACTION")):
            feature = getattr(self, where).get(key)
            if feature is None:
                continue
            if feature.type != type_ or len(feature.shape) != 1:
                raise PolicyError(
                    f"{where}: {key!r} is {feature.type} of shape {feature.shape}; expected {type_} of shape (D,)"
                )
            check_width(feature.shape[0], self, key, f"declared in {where}")

    def _refuse_what_is_not_done(self) -> None:
        rtc: Any = self.rtc_config
        if rtc is not None and not isinstance(rtc, Mapping):
            raise PolicyError(f"rtc_config is {rtc!r}; expected an object or none")
        refused = {
            "n_obs_steps": (self.n_obs_steps != 1, "pi0-FAST looks at one observation; set it to 1"),
            "use_amp": (self.use_amp, "not offered; set it to false and use dtype=bfloat16"),
            "use_peft": (self.use_peft, "adapters are not read; merge the adapter into the weights, then set it false"),
            "rtc_config": (
                rtc is not None and rtc.get("enabled", True) is not False,
                "real-time chunking is not offered; set it to none",
            ),
            "action_expert_variant": (
                self.action_expert_variant != "gemma_300m",
                "pi0-FAST has no action expert, so it would do nothing; leave it at 'gemma_300m'",
            ),
        }
        for name, (wrong, way_out) in refused.items():
            if wrong:
                raise PolicyError(f"{name} is {getattr(self, name)!r}: {way_out}")


def check_width(size: int, config: PI0FastConfig, key: str, where: str) -> None:
    """Whether a state or action of `size` dimensions is within the limit of the configuration.

    Raises:
        PolicyError: it is not; nothing is cut off to fit.
    """
    name = "max_state_dim" if key == STATE_KEY else "max_action_dim"
    limit = getattr(config, name)
    if size > limit:
        raise PolicyError(
            f"{key!r} has {size} dimensions ({where}), above {name} = {limit}: raise {name}; nothing is cut off"
        )


# --- a checkpoint directory ---------------------------------------------------------------------------------


def read_config(directory: Path) -> PI0FastConfig:
    """The configuration of a checkpoint directory: config.json and, where there is one, pi0_fast.json.

    Raises:
        PolicyError: a file is missing, is not JSON, or holds what `PI0FastConfig.from_json` refuses.
    """
    own = _read_own(directory)
    return PI0FastConfig.from_json(
        read_json_object(directory / CONFIG_FILE),
        str(directory / CONFIG_FILE),
        None if own is None else own["config"],
    )


def write_config(directory: Path, config: PI0FastConfig, details: Mapping[str, Any] | None = None) -> None:
    """Write config.json and pi0_fast.json; `details` are plain values of the policy's own, kept beside the settings."""
    own = {
        "format": _OWN_FORMAT,
        "version": _OWN_VERSION,
        "config": config.own_to_json(),
        "details": dict(details or {}),
    }
    write_json(directory / CONFIG_FILE, config.to_json(), indent=4)
    write_json(directory / OWN_FILE, own, indent=2)


def read_details(directory: Path) -> dict[str, Any]:
    """The `details` that `write_config` was given; empty for a directory of LeRobot's.

    Raises:
        PolicyError: pi0_fast.json cannot be used.
    """
    own = _read_own(directory)
    return {} if own is None else dict(own["details"])


def _read_own(directory: Path) -> dict[str, Any] | None:
    path = directory / OWN_FILE
    if not path.exists():
        return None
    own = read_json_object(path)
    if own.get("format") != _OWN_FORMAT or own.get("version") != _OWN_VERSION:
        raise PolicyError(
            f"{path}: format {own.get('format')!r}, version {own.get('version')!r}; this pi0-fast reads "
            f"{_OWN_FORMAT!r}, version {_OWN_VERSION}: install the pi0-fast that wrote it, or a newer one"
        )
    for name in ("config", "details"):
        if not isinstance(own.get(name), dict):
            raise PolicyError(f"{path}: {name!r} must be an object")
    return own


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        PolicyError: the file is missing, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PolicyError(f"{path} is missing: this is no complete checkpoint directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise PolicyError(f"{path} holds no JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any], *, indent: int) -> None:
    """Write `content` as JSON with a final newline; the same bytes for equal content."""
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


# --- reading values -----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """As JSON holds it: modes as their names, tuples as lists; a copy."""
    if isinstance(value, NormalizationMode):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _pair(value: Any, name: str, kind: type) -> tuple[Any, Any]:
    allowed = int if kind is int else (int, float)
    wrong = isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2
    if wrong or any(isinstance(item, bool) or not isinstance(item, allowed) for item in value):
        raise PolicyError(f"{name} is {value!r}; expected two {'whole ' if kind is int else ''}numbers")
    return value[0], value[1]


def _features(value: Any, where: str) -> dict[str, PolicyFeature]:
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where} is {value!r}; expected a mapping from keys to features")
    return {str(key): _feature(item, f"{where}: {key!r}") for key, item in value.items()}


def _feature(value: Any, place: str) -> PolicyFeature:
    if isinstance(value, PolicyFeature):
        value = value.to_json()
    if isinstance(value, Mapping) and set(value) == {"type", "shape"}:
        type_, shape = value["type"], value["shape"]
    else:
        raise PolicyError(f"{place} is {value!r}; expected 'type' and 'shape'")
    if type_ not in FEATURE_TYPES:
        raise PolicyError(f"{place} has the type {type_!r}; one of {', '.join(FEATURE_TYPES)}")
    wrong = isinstance(shape, str) or not isinstance(shape, Sequence) or not shape
    if wrong or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise PolicyError(f"{place} has the shape {shape!r}; expected a list of whole numbers, at least 1 each")
    return PolicyFeature(str(type_), tuple(shape))


def modes_from_json(value: Any, where: str) -> dict[str, NormalizationMode]:
    """Feature type -> mode, from names or members, as config.json and the processor files write them.

    Raises:
        PolicyError: no mapping, or an unknown type or mode in it.
    """
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where} is {value!r}; expected a mapping from feature types to modes")
    modes = {}
    for type_, mode in value.items():
        if type_ not in FEATURE_TYPES:
            raise PolicyError(f"{where} names {type_!r}; feature types are {', '.join(FEATURE_TYPES)}")
        try:
            modes[str(type_)] = NormalizationMode.parse(mode)
        except UsageError as error:
            raise PolicyError(f"{where}: {type_}: {error}") from error
    return modes


def texts_from_json(value: Any, where: str) -> list[str]:
    """A list of texts, copied.

    Raises:
        PolicyError: it is none.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or any(not isinstance(item, str) for item in value):
        raise PolicyError(f"{where} is {value!r}; expected a list of texts")
    return list(value)
