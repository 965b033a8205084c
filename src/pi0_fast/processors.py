"""What happens to state and action around the model, and the files in which LeRobot keeps it.

`policy_preprocessor.json`, `policy_postprocessor.json` and the safetensors with statistics that they name are read and
written here: rename map, relative actions, normalisation of state and action. One formula, LeRobot's in float32,
serves loaded and new policies; a new policy differs in the statistics only, whose ranges are guarded before they are
used and written. Left out: images, the prompt, tokens (LeRobot's steps for those are checked against the configuration,
which alone says what they do), and how a whole checkpoint is put in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from pi0_fast.actions.chunks import as_numbers
from pi0_fast.actions.normalize import NormalizationMode, Normalizer, Statistics
from pi0_fast.policy_config import (
    ACTION_KEY,
    STATE_KEY,
    PI0FastConfig,
    check_width,
    modes_from_json,
    read_json_object,
    texts_from_json,
    write_json,
)
from pi0_fast.types import Pi0FastError, PolicyError, TokenizerError

FloatArray = NDArray[np.float32]
#: Statistics of one feature: complete, as a mapping of them, or a normaliser that was made of them already.
FeatureStatistics = Statistics | Mapping[str, Any] | Normalizer

PREPROCESSOR_FILE = "policy_preprocessor.json"
POSTPROCESSOR_FILE = "policy_postprocessor.json"

_QUANTITIES = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")
_EPSILON = 1e-8  # LeRobot's
# LeRobot divides by std + 1e-8 but multiplies back by std: below this the two differ by more than a thousandth.
_LEAST_STD = 1e-5

_RENAME, _BATCH, _DEVICE = "rename_observations_processor", "to_batch_processor", "device_processor"
_RELATIVE, _ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
_NORMALIZE, _UNNORMALIZE = "normalizer_processor", "unnormalizer_processor"
_PROMPT, _TEXT = "pi0_fast_prepare_state_tokenizer_processor_step", "tokenizer_processor"
_ACTION_TOKENS = "action_tokenizer_processor"
_PRE_STEPS = (_RENAME, _BATCH, _RELATIVE, _NORMALIZE, _PROMPT, _TEXT, _ACTION_TOKENS, _DEVICE)
_POST_STEPS = (_UNNORMALIZE, _ABSOLUTE, _DEVICE)
# Adding the batch axis and moving to a device change no number: they may stand anywhere.
_ANYWHERE = (_BATCH, _DEVICE)
_NORMALIZER_SETTINGS = {"eps", "features", "norm_map", "normalize_observation_keys"}
_KNOWN_SETTINGS: dict[str, set[str]] = {
    _RENAME: {"rename_map"},
    _BATCH: set(),
    _RELATIVE: {"enabled", "exclude_joints", "action_names"},
    _ABSOLUTE: {"enabled"},
    _NORMALIZE: _NORMALIZER_SETTINGS,
    _UNNORMALIZE: _NORMALIZER_SETTINGS,
    _PROMPT: {"max_state_dim", "task_key"},
    _TEXT: {"max_length", "task_key", "padding_side", "padding", "truncation", "tokenizer_name"},
    _ACTION_TOKENS: {
        "trust_remote_code",
        "max_action_tokens",
        "action_tokenizer_name",
        "fast_skip_tokens",
        "paligemma_tokenizer_name",
    },
    _DEVICE: {"device", "float_dtype"},
}
# Settings of which only some values are done here.
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    _PROMPT: {"task_key": ("task",)},
    _TEXT: {"task_key": ("task",), "padding_side": ("right",)},
    _DEVICE: {"float_dtype": (None, "float32")},
}


# --- normalisation ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureNormalizer:
    """Normalises one feature as LeRobot 0.6.1 does, to the last bit: float32, the same operations in their order.

    QUANTILES, QUANTILE10, MIN_MAX: ``2 (x - low) / (high - low) - 1``, a range of exactly zero replaced by `epsilon`.
    MEAN_STD: ``(x - mean) / (std + epsilon)``, back ``y std + mean``. IDENTITY: unchanged.

    Attributes:
        key: of the feature, for errors: ``observation.state``.
        mode: which of the statistics are used.
        size: number of dimensions D.
        statistics: name -> float32 [D], as written to the checkpoint; may hold more than the mode needs.
        clip: whether `apply` clips to [-1, 1]; LeRobot never does.
        epsilon: see above.
        names: of the D dimensions, for errors.

    Raises:
        PolicyError: the statistics lack what the mode needs, have another length, are not finite, or are crossed.
    """

    key: str
    mode: NormalizationMode
    size: int
    statistics: dict[str, FloatArray] = field(default_factory=dict)
    clip: bool = False
    epsilon: float = _EPSILON
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        missing = [name for name in self.mode.needs if name not in self.statistics]
        if missing:
            raise PolicyError(
                f"{self.key}: normalisation {self.mode} needs the statistics {', '.join(self.mode.needs)}; "
                f"{', '.join(missing)} missing (present: {', '.join(self.statistics) or 'none'}). Without them LeRobot "
                f"silently does not normalise; pass the statistics of the dataset, or set IDENTITY in config.json and "
                f"both processor files if that is what was trained"
            )
        for name in self.statistics:
            self._check_statistic(name)
        if self.mode is NormalizationMode.MEAN_STD:
            wrong = np.flatnonzero(self.statistics["std"] < 0)
        elif self.mode is NormalizationMode.IDENTITY:
            wrong = np.zeros(0, np.int64)
        else:
            low, high = (self.statistics[name] for name in self.mode.needs)
            wrong = np.flatnonzero(low > high)
        if len(wrong):
            dim = int(wrong[0])
            values = ", ".join(f"{name} = {self.statistics[name][dim]}" for name in self.mode.needs)
            raise PolicyError(f"{self.key}: the statistics of {self._dim(dim)} cannot be right: {values}")

    def _check_statistic(self, name: str) -> None:
        values = self.statistics[name]
        if values.shape != (self.size,) or values.dtype != np.float32:
            raise PolicyError(
                f"{self.key}: the statistic {name} is {values.dtype} of shape {values.shape}, expected float32 of "
                f"shape ({self.size},)"
            )
        if name in self.mode.needs and not np.isfinite(values).all():
            dim = int(np.flatnonzero(~np.isfinite(values))[0])
            raise PolicyError(f"{self.key}: the statistic {name} of {self._dim(dim)} is {values[dim]}")

    @classmethod
    def fit(
        cls,
        key: str,
        mode: NormalizationMode,
        statistics: FeatureStatistics,
        *,
        clip: bool = False,
        names: Sequence[str] | None = None,
    ) -> FeatureNormalizer:
        """For a new policy: the ranges are guarded as `Normalizer.from_statistics` does, and one warning lists those.

        The guarded range takes the place of the mode's own among the statistics, so that a checkpoint's files give
        LeRobot the same numbers.

        Args:
            key: of the feature.
            mode: how it is to be normalised.
            statistics: of the values that will be normalised (relative ones where actions are relative), or a
                Normalizer, such as the one that the action tokenizer was fitted with.
            clip: see the class.
            names: of the dimensions.

        Raises:
            PolicyError: the statistics cannot be used, or a Normalizer of another mode or clipping is given.
        """
        if isinstance(statistics, Normalizer):
            normalizer = statistics
            if normalizer.mode is not mode or normalizer.clip != clip:
                raise PolicyError(
                    f"{key}: the given normaliser is {normalizer.mode} with clip={normalizer.clip}, the policy's "
                    f"configuration asks for {mode} with clip={clip}: set normalization_mapping and action_clip to it"
                )
        else:
            try:
                normalizer = Normalizer.from_statistics(statistics, mode, clip=clip, names=names)
            except Pi0FastError as error:
                raise PolicyError(f"{key}: {error}") from error
        given = statistics.statistics if isinstance(statistics, Normalizer) else statistics
        values = _vectors(key, given, normalizer.size)
        guarded = set(normalizer.guarded)
        if mode is NormalizationMode.MEAN_STD:
            _guard_std(values, normalizer)
            _warn_of_small_std(key, values["std"])
        elif mode is not NormalizationMode.IDENTITY:
            guarded |= _guard_range(values, normalizer)
        result = cls(key, mode, normalizer.size, values, clip, names=None if names is None else tuple(names))
        if guarded:
            dims = ", ".join(result._dim(dim) for dim in sorted(guarded))
            moves = "never moves, or moves" if len(guarded) == 1 else "never move, or move"
            warnings.warn(
                f"{key}: {dims} {moves} in few frames only; the {mode} range is widened there to one that includes "
                f"what was seen",
                stacklevel=3,
            )
        return result

    def apply(self, values: Any) -> FloatArray:
        """Raw values [..., D] of any numeric kind to normalised float32 [..., D].

        Raises:
            PolicyError: another last axis, not numeric, or not finite (the message names key, row and dimension).
        """
        array = self._checked(values, self.key)
        result: FloatArray
        if self.mode is NormalizationMode.IDENTITY:
            return self._finite(array.copy(), array, self.key)
        with np.errstate(over="ignore", invalid="ignore"):  # found below, with its place
            if self.mode is NormalizationMode.MEAN_STD:
                result = (array - self.statistics["mean"]) / (self.statistics["std"] + np.float32(self.epsilon))
            else:
                low, width = self._range()
                result = np.float32(2) * (array - low) / width - np.float32(1)
        # Clipping would hide an infinity, so it comes last.
        self._finite(result, array, self.key)
        return np.clip(result, -1, 1, out=result) if self.clip else result

    def invert(self, values: Any) -> FloatArray:
        """Normalised values [..., D] to raw float32 [..., D]; never clips. Errors as in `apply`."""
        what = f"normalised {self.key}"
        array = self._checked(values, what)
        result: FloatArray
        if self.mode is NormalizationMode.IDENTITY:
            return self._finite(array.copy(), array, what)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.mode is NormalizationMode.MEAN_STD:
                result = array * self.statistics["std"] + self.statistics["mean"]
            else:
                low, width = self._range()
                result = (array + np.float32(1)) * width / np.float32(2) + low
        return self._finite(result, array, what)

    @property
    def degenerate(self) -> tuple[int, ...]:
        """Dimensions whose range is exactly zero, so that `epsilon` takes its place and any deviation explodes."""
        if self.mode is NormalizationMode.IDENTITY:
            return ()
        width = self.statistics["std"] if self.mode is NormalizationMode.MEAN_STD else np.subtract(*self._pair()[::-1])
        return tuple(int(dim) for dim in np.flatnonzero(width == 0))

    def _pair(self) -> tuple[FloatArray, FloatArray]:
        low, high = (self.statistics[name] for name in self.mode.needs)
        return low, high

    def _range(self) -> tuple[FloatArray, FloatArray]:
        low, high = self._pair()
        width = high - low
        return low, np.where(width == 0, np.float32(self.epsilon), width)

    def _checked(self, values: Any, what: str) -> FloatArray:
        try:
            array = as_numbers(values, what)
        except TokenizerError as error:
            raise PolicyError(str(error)) from error
        if array.ndim == 0 or array.shape[-1] != self.size:
            raise PolicyError(
                f"{what} has the shape {array.shape}; its last axis must be the {self.size} dimensions that the "
                f"policy was made for. Nothing is padded or cut off"
            )
        with np.errstate(over="ignore"):
            return array.astype(np.float32, copy=False)

    def _finite(self, result: FloatArray, array: FloatArray, what: str) -> FloatArray:
        finite = np.isfinite(result)
        if finite.all():
            return result
        place = tuple(int(i) for i in np.argwhere(~finite)[0])
        rows = "".join(f", {name} {index}" for name, index in zip(("row", "step"), place[:-1], strict=False))
        value = array[place]
        reason = "is not finite in float32" if not np.isfinite(value) else "leaves float32 when it is scaled"
        raise PolicyError(f"{what}{rows}, {self._dim(place[-1])}: the value {value} {reason}")

    def _dim(self, dim: int) -> str:
        return f"dimension {dim}" + (f" ({self.names[dim]})" if self.names is not None else "")


def _vectors(key: str, statistics: Statistics | Mapping[str, Any] | None, size: int) -> dict[str, FloatArray]:
    """Those of the known statistics that are there, as float32 [D]; anything else (count) is left out."""
    if statistics is None:
        return {}
    mapping = statistics.to_mapping() if isinstance(statistics, Statistics) else statistics
    vectors = {}
    for name in _QUANTITIES:
        if name not in mapping:
            continue
        try:
            array = as_numbers(mapping[name], f"{key}: {name}")
        except TokenizerError as error:
            raise PolicyError(str(error)) from error
        if array.size != size or array.ndim > 1:
            raise PolicyError(f"{key}: the statistic {name} has the shape {array.shape}, expected ({size},)")
        vectors[name] = array.reshape(size).astype(np.float32)
    return vectors


def _guard_std(values: dict[str, FloatArray], normalizer: Normalizer) -> None:
    """Puts mean and std of the guarded range in place; untouched dimensions keep their own to the last bit."""
    middle, half = (normalizer.low + normalizer.high) / 2, (normalizer.high - normalizer.low) / 2
    own = np.ones(normalizer.size, bool)
    own[list(normalizer.guarded)] = False
    for name, new in (("mean", middle), ("std", half)):
        values[name] = np.where(own, values[name], new).astype(np.float32) if name in values else new.astype(np.float32)


def _warn_of_small_std(key: str, std: FloatArray) -> None:
    small = np.flatnonzero(std < _LEAST_STD)
    if len(small):
        dims = ", ".join(str(dim) for dim in small)
        warnings.warn(
            f"{key}: std of dimension {dims} is below {_LEAST_STD}; LeRobot's MEAN_STD, which is followed, divides by "
            f"std + {_EPSILON} but multiplies by std, so values do not come back exactly: use QUANTILES, or larger "
            f"units",
            stacklevel=4,
        )


def _guard_range(values: dict[str, FloatArray], normalizer: Normalizer) -> set[int]:
    """Puts low and high in place; returns the dimensions whose range float32 does not resolve (min to max there)."""
    low, high = normalizer.low.astype(np.float32), normalizer.high.astype(np.float32)
    collapsed = low >= high
    if collapsed.any() and {"min", "max"} <= set(values):
        low, high = np.where(collapsed, values["min"], low), np.where(collapsed, values["max"], high)
    names = normalizer.mode.needs
    values[names[0]], values[names[1]] = low, high
    return {int(dim) for dim in np.flatnonzero(collapsed)}


# --- relative actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RelativeActions:
    """Actions relative to the state of the moment they are predicted at: action i minus state i, in float32.

    Dimension i stays absolute when its name contains one of `exclude_joints`, upper and lower case alike. As in
    LeRobot, every dimension is relative where there are no names, and so is one that has none.

    Attributes:
        size: number of action dimensions D.
        exclude_joints: parts of names.
        action_names: of the action dimensions, or None.
    """

    size: int
    exclude_joints: tuple[str, ...] = ()
    action_names: tuple[str, ...] | None = None

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which of the D dimensions are relative."""
        names = () if self.action_names is None else self.action_names[: self.size]
        parts = [part.lower() for part in self.exclude_joints if part]
        relative = [not any(part in name.lower() for part in parts) for name in names]
        return (*relative, *(True for _ in range(self.size - len(relative))))

    @property
    def problem(self) -> str | None:
        """Why the mask may not be what was meant, or None."""
        if not any(self.exclude_joints):
            return None
        if self.action_names is None:
            return f"no action names are known, so that {list(self.exclude_joints)} cannot be kept absolute"
        if len(self.action_names) != self.size:
            return f"there are {len(self.action_names)} action names for {self.size} dimensions: {self.action_names}"
        return None

    def to_relative(self, actions: Any, state: Any) -> FloatArray:
        """Absolute actions [..., H, D] and raw states [..., Ds] to float32 [..., H, D].

        Raises:
            PolicyError: shapes that do not belong together, or values that are not finite.
        """
        array, offset = self._prepared(actions, state)
        return array - offset

    def to_absolute(self, actions: Any, state: Any) -> FloatArray:
        """The inverse of `to_relative`, with the state of the same moment."""
        array, offset = self._prepared(actions, state)
        return array + offset

    def _prepared(self, actions: Any, state: Any) -> tuple[FloatArray, FloatArray]:
        array = _float32(actions, ACTION_KEY)
        states = _float32(state, STATE_KEY)
        if array.ndim < 2 or array.shape[-1] != self.size:
            raise PolicyError(
                f"{ACTION_KEY!r} has the shape {array.shape}; relative actions need [..., H, {self.size}]"
            )
        mask = np.array(self.mask)
        needed = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
        if states.ndim == 0 or states.shape[-1] < needed or states.shape[:-1] != array.shape[:-2]:
            raise PolicyError(
                f"{STATE_KEY!r} has the shape {states.shape}; actions {array.shape} that are relative up to dimension "
                f"{needed - 1} need one state of at least {needed} dimensions for each chunk"
            )
        offset = np.zeros((*states.shape[:-1], 1, self.size), np.float32)
        offset[..., 0, mask] = states[..., : self.size][..., mask[: states.shape[-1]]]
        return array, offset


def _float32(values: Any, what: str) -> FloatArray:
    try:
        array = as_numbers(values, repr(what))
    except TokenizerError as error:
        raise PolicyError(str(error)) from error
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise PolicyError(f"{what!r} is {array[place]} at {place} (the last index is the dimension)")
    return array


# --- all of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PolicyProcessors:
    """What is done to a batch before the model and to its actions after it, but for images and tokens.

    Attributes:
        state, action: the normalisers; their `size` is what the policy works with.
        relative: None where actions are absolute.
        rename_map: a batch's key -> the policy's key.
    """

    state: FeatureNormalizer
    action: FeatureNormalizer
    relative: RelativeActions | None = None
    rename_map: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_statistics(
        cls,
        config: PI0FastConfig,
        statistics: Mapping[str, FeatureStatistics],
        rename_map: Mapping[str, str] | None = None,
    ) -> PolicyProcessors:
        """For a new policy: modes from the configuration, ranges guarded (see `FeatureNormalizer.fit`).

        Args:
            config: declares the state and the action.
            statistics: of ``observation.state`` and ``action``; those of relative actions where
                `use_relative_actions` is set, since that is what gets normalised.
            rename_map: see `with_rename_map`.

        Raises:
            PolicyError: statistics are missing or cannot be used, sizes differ from the declared ones, or relative
                actions exclude joints by names that are not there.
        """
        features = {}
        for key, type_, declared in (
            (STATE_KEY, "STATE", config.state_dim),
            (ACTION_KEY, "ACTION", config.action_dim),
        ):
            features[key] = _fitted(config, key, config.mode(type_), statistics)
            if features[key].size != declared:
                raise PolicyError(
                    f"{key!r} is declared with {declared} dimensions, its statistics have {features[key].size}"
                )
        relative = None
        if config.use_relative_actions:
            relative = _relative(config, features[ACTION_KEY].size)
            if relative.problem is not None:
                raise PolicyError(
                    f"use_relative_actions: {relative.problem}; set action_feature_names (one for each dimension), or "
                    f"relative_exclude_joints to [] if all are meant to be relative"
                )
        processors = cls(features[STATE_KEY], features[ACTION_KEY], relative)
        return processors.with_rename_map(rename_map or {}, config)

    def with_rename_map(self, rename_map: Mapping[str, str], config: PI0FastConfig) -> PolicyProcessors:
        """The same with another rename map (a batch's key -> the policy's key).

        Raises:
            PolicyError: a target that the policy does not look at, or two keys with one target.
        """
        for source, target in rename_map.items():
            if target not in config.expected_inputs:
                raise PolicyError(
                    f"rename_map: {source!r} -> {target!r}, but the policy has no such input; it has "
                    f"{', '.join(config.expected_inputs) or 'none'}"
                )
        twice = [target for target in rename_map.values() if list(rename_map.values()).count(target) > 1]
        if twice:
            raise PolicyError(f"rename_map: more than one key becomes {twice[0]!r}")
        return replace(self, rename_map=dict(rename_map))

    def rename(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the policy's keys; keys that the map does not name stay.

        Raises:
            PolicyError: a renamed entry would replace another one.
        """
        renamed: dict[str, Any] = {}
        for key, value in batch.items():
            target = self.rename_map.get(key, key)
            if target in renamed:
                raise PolicyError(f"rename_map: two entries of the batch would become {target!r} ({', '.join(batch)})")
            renamed[target] = value
        return renamed

    def normalize_actions(self, actions: Any, state: Any) -> FloatArray:
        """Actions [..., H, D] in the robot's units, with raw states [..., Ds], to what is encoded, float32."""
        return self.action.apply(actions if self.relative is None else self.relative.to_relative(actions, state))

    def restore_actions(self, normalised: Any, state: Any) -> FloatArray:
        """The inverse: decoded actions [..., H, D] and the raw states they were predicted at, to the robot's units."""
        actions = self.action.invert(normalised)
        return actions if self.relative is None else self.relative.to_absolute(actions, state)


def _fitted(
    config: PI0FastConfig, key: str, mode: NormalizationMode, statistics: Mapping[str, FeatureStatistics]
) -> FeatureNormalizer:
    if key not in statistics:
        raise PolicyError(
            f"statistics of {key!r} are missing (there are {', '.join(statistics) or 'none'}): compute them from the "
            f"frames of the dataset"
        )
    names = None
    given = statistics[key]
    if key == ACTION_KEY and config.action_feature_names is not None:
        names = config.action_feature_names
        size = given.size if isinstance(given, Statistics | Normalizer) else len(names)
        if size != len(names):
            raise PolicyError(f"there are {len(names)} action_feature_names, but statistics of {size} dimensions")
    clip = key == ACTION_KEY and config.action_clip and mode.clips
    result = FeatureNormalizer.fit(key, mode, given, clip=clip, names=names)
    check_width(result.size, config, key, "the statistics")
    return result


def _relative(config: PI0FastConfig, size: int, names: Sequence[str] | None = None) -> RelativeActions:
    names = config.action_feature_names if config.action_feature_names is not None else names
    return RelativeActions(size, tuple(config.relative_exclude_joints), None if names is None else tuple(names))


# --- LeRobot's files: reading -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """One step of a processor file: where errors say it is, its settings, its statistics' file name."""

    where: str
    settings: dict[str, Any]
    state_file: str | None

    def get(self, name: str, default: Any = None) -> Any:
        value = self.settings.get(name)
        return default if value is None else value


def read_processors(
    directory: Path, config: PI0FastConfig, *, statistics: Mapping[str, FeatureStatistics] | None = None
) -> PolicyProcessors:
    """What LeRobot's two processor files of a checkpoint say, with their statistics.

    The files decide on normalisation and renaming; where config.json contradicts them on a mode, a tokenizer or
    relative actions, both are named and nothing is loaded. Two limits (`tokenizer_max_length`, `max_action_tokens`)
    may differ: nothing is cut here, so that the configuration's hold, with a warning.

    Args:
        directory: of the checkpoint.
        config: as read from the same directory, before any setting is overridden.
        statistics: in place of the files' statistics, guarded as for a new policy: for a base checkpoint that has
            none, or for fine-tuning on other data.

    Raises:
        PolicyError: a file is missing or damaged, has a step or setting that is not done here, lacks statistics, or
            contradicts the configuration or its other half.
    """
    pre = _steps(directory / PREPROCESSOR_FILE, _PRE_STEPS, (_NORMALIZE,))
    post = _steps(directory / POSTPROCESSOR_FILE, _POST_STEPS, (_UNNORMALIZE,))
    modes = _agreed_modes(pre[_NORMALIZE], post[_UNNORMALIZE], config)
    _compare_tokenizers(pre, config)
    if statistics is None:
        before, after = _statistics(directory, pre[_NORMALIZE]), _statistics(directory, post[_UNNORMALIZE])
        _compare_statistics(before, after, modes["ACTION"], directory)
        state, action = (
            _loaded(config, key, modes[type_], before.get(key, {}), pre[_NORMALIZE])
            for key, type_ in ((STATE_KEY, "STATE"), (ACTION_KEY, "ACTION"))
        )
    else:
        state = _fitted(config, STATE_KEY, modes["STATE"], statistics)
        action = _fitted(config, ACTION_KEY, modes["ACTION"], statistics)
    for normalizer, declared in (
        (state, config.input_features.get(STATE_KEY)),
        (action, config.output_features.get(ACTION_KEY)),
    ):
        if declared is not None:
            _check_declared(normalizer, declared.shape[0], config, directory)
    rename_map = pre[_RENAME].get("rename_map", {}) if _RENAME in pre else {}
    if not isinstance(rename_map, dict) or any(not isinstance(target, str) for target in rename_map.values()):
        raise PolicyError(f"{pre[_RENAME].where}: rename_map is {rename_map!r}; expected an object of texts")
    return PolicyProcessors(state, action, _agreed_relative(pre, post, config, action.size), dict(rename_map))


def _steps(path: Path, known: Sequence[str], required: Iterable[str]) -> dict[str, _Step]:
    """The steps of a processor file by name, all of them understood and in an order that means the same."""
    steps = read_json_object(path).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise PolicyError(f"{path}: 'steps' must be a list of objects")
    found: dict[str, _Step] = {}
    for number, step in enumerate(steps):
        name = step.get("registry_name", step.get("class"))
        where = f"{path}, step {number} ({name})"
        if name not in known:
            raise PolicyError(f"{where}: pi0-fast does nothing of that kind; it knows {', '.join(known)}")
        if name in found:
            raise PolicyError(f"{where}: the step is there twice")
        settings, state_file = step.get("config", {}), step.get("state_file")
        if not isinstance(settings, dict) or not isinstance(state_file, str | None):
            raise PolicyError(f"{where}: 'config' must be an object and 'state_file' a text")
        found[name] = _Step(where, settings, state_file)
        _check_settings(name, found[name])
    missing = [name for name in required if name not in found]
    if missing:
        raise PolicyError(f"{path}: the step {missing[0]} is missing, so nothing says how to normalise")
    order = [known.index(name) for name in found if name not in _ANYWHERE]
    if order != sorted(order):
        raise PolicyError(f"{path}: the steps come in another order than LeRobot's pi0_fast has: {', '.join(found)}")
    return found


def _check_settings(name: str, step: _Step) -> None:
    unknown = sorted(set(step.settings) - _KNOWN_SETTINGS[name])
    if unknown:
        warnings.warn(f"{step.where}: pi0-fast does not know {', '.join(unknown)}; without effect", stacklevel=4)
    for setting, allowed in _ONLY.get(name, {}).items():
        if setting in step.settings and step.settings[setting] not in allowed:
            raise PolicyError(f"{step.where}: {setting} is {step.settings[setting]!r}; only {allowed[-1]!r} is done")


def _agreed_modes(pre: _Step, post: _Step, config: PI0FastConfig) -> dict[str, NormalizationMode]:
    """The mode of each feature type, on which both processor files and config.json (where it says one) agree."""
    before, after = (modes_from_json(step.get("norm_map", {}), f"{step.where}: norm_map") for step in (pre, post))
    agreed = {}
    for type_ in ("VISUAL", "STATE", "ACTION"):
        # A type that a file does not name is not normalised there.
        mode = before.get(type_, NormalizationMode.IDENTITY)
        declared = config.normalization_mapping.get(type_)
        if declared is not None and declared is not mode:
            raise PolicyError(
                f"{type_}: normalization_mapping of config.json says {declared}, norm_map of {pre.where} says {mode}: "
                f"the processor file is what the weights were trained with; if so, put {mode} into config.json"
            )
        agreed[type_] = mode
    if agreed["VISUAL"] is not NormalizationMode.IDENTITY:
        raise PolicyError(f"{pre.where}: VISUAL is {agreed['VISUAL']}; images are only scaled to [-1, 1] (IDENTITY)")
    if after.get("ACTION", NormalizationMode.IDENTITY) is not agreed["ACTION"]:
        raise PolicyError(
            f"ACTION: {pre.where} says {agreed['ACTION']}, {post.where} says {after.get('ACTION', 'nothing')}: actions "
            f"would not come back in the robot's units"
        )
    if pre.get("eps", _EPSILON) != post.get("eps", _EPSILON):
        raise PolicyError(f"eps is {pre.get('eps')} in {pre.where} and {post.get('eps')} in {post.where}")
    keys = pre.get("normalize_observation_keys")
    if keys is not None and STATE_KEY not in keys and agreed["STATE"] is not NormalizationMode.IDENTITY:
        raise PolicyError(
            f"{pre.where}: normalize_observation_keys leaves out {STATE_KEY!r}, which is to be {agreed['STATE']}"
        )
    return agreed


def _compare_tokenizers(pre: Mapping[str, _Step], config: PI0FastConfig) -> None:
    """Which tokenizers and limits: the configuration alone decides, so the files must not say something else."""
    for step, setting, name, both in (
        (_TEXT, "tokenizer_name", "text_tokenizer_name", False),
        (_ACTION_TOKENS, "paligemma_tokenizer_name", "text_tokenizer_name", False),
        (_ACTION_TOKENS, "action_tokenizer_name", "action_tokenizer_name", False),
        (_ACTION_TOKENS, "fast_skip_tokens", "fast_skip_tokens", False),
        (_TEXT, "max_length", "tokenizer_max_length", True),
        (_ACTION_TOKENS, "max_action_tokens", "max_action_tokens", True),
    ):
        value = pre[step].get(setting) if step in pre else None
        expected = getattr(config, name)
        if value is None or value == expected:
            continue
        line = f"{name} is {expected!r} in the configuration, {setting} is {value!r} in {pre[step].where}"
        if not both:
            raise PolicyError(
                f"{line}: training data was made with the latter; if that is right, put it into config.json"
            )
        warnings.warn(f"{line}; the configuration's is used", stacklevel=4)


def _statistics(directory: Path, step: _Step) -> dict[str, dict[str, FloatArray]]:
    """Feature key -> statistic -> float32 [D], of state and action; empty without a file."""
    if step.state_file is None:
        return {}
    if Path(step.state_file).name != step.state_file or not step.state_file.endswith(".safetensors"):
        raise PolicyError(f"{step.where}: state_file {step.state_file!r} is no safetensors file of that directory")
    path = directory / step.state_file
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise PolicyError(f"{path} is missing, which {step.where} names: this is no complete checkpoint") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{path} cannot be read as safetensors of float32: {error}") from error
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        key, _, quantity = name.rpartition(".")
        if key in (STATE_KEY, ACTION_KEY) and quantity in _QUANTITIES:
            found.setdefault(key, {})[quantity] = tensor
    result = {}
    for key, values in found.items():
        size = next(iter(values.values())).size
        try:
            result[key] = _vectors(key, values, size)
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from error
    return result


def _compare_statistics(
    before: Mapping[str, Mapping[str, FloatArray]],
    after: Mapping[str, Mapping[str, FloatArray]],
    mode: NormalizationMode,
    directory: Path,
) -> None:
    for name in mode.needs:
        pair = [side.get(ACTION_KEY, {}).get(name) for side in (before, after)]
        if pair[0] is None and pair[1] is None:
            continue  # missing from both: `FeatureNormalizer` says so
        if pair[0] is None or pair[1] is None or not np.array_equal(pair[0], pair[1], equal_nan=True):
            raise PolicyError(
                f"{directory}: the statistic {name} of {ACTION_KEY!r} is not the same in the files that "
                f"{PREPROCESSOR_FILE} and {POSTPROCESSOR_FILE} name: actions would not come back in the robot's units"
            )


def _loaded(
    config: PI0FastConfig, key: str, mode: NormalizationMode, statistics: dict[str, FloatArray], step: _Step
) -> FeatureNormalizer:
    if statistics:
        size = next(iter(statistics.values())).size
    else:
        size = config.state_dim if key == STATE_KEY else config.action_dim
    names = config.action_feature_names if key == ACTION_KEY else None
    epsilon = step.get("eps", _EPSILON)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
        raise PolicyError(f"{step.where}: eps is {epsilon!r}; expected a small number")
    try:
        normalizer = FeatureNormalizer(
            key,
            mode,
            size,
            statistics,
            clip=key == ACTION_KEY and config.action_clip and mode.clips,
            epsilon=float(epsilon),
            names=tuple(names) if names is not None and len(names) == size else None,
        )
    except PolicyError as error:
        raise PolicyError(f"{step.where}: {error}") from error
    check_width(size, config, key, f"in the statistics of {step.where}")
    if normalizer.degenerate:
        warnings.warn(
            f"{step.where}: {key}: the {mode} range of dimension {', '.join(map(str, normalizer.degenerate))} is zero; "
            f"LeRobot divides by {epsilon} there, and so it is done: any other value becomes huge",
            stacklevel=3,
        )
    return normalizer


def _check_declared(normalizer: FeatureNormalizer, declared: int, config: PI0FastConfig, directory: Path) -> None:
    """The declared size must be that of the statistics; LeRobot declares the limit itself where it knows no size."""
    limit = config.max_state_dim if normalizer.key == STATE_KEY else config.max_action_dim
    if declared not in (normalizer.size, limit):
        raise PolicyError(
            f"{directory}: config.json declares {declared} dimensions of {normalizer.key!r}, its statistics have "
            f"{normalizer.size}: put [{normalizer.size}] into config.json if the statistics are right"
        )


def _agreed_relative(
    pre: Mapping[str, _Step], post: Mapping[str, _Step], config: PI0FastConfig, size: int
) -> RelativeActions | None:
    said = {
        "use_relative_actions of config.json": config.use_relative_actions,
        f"{_RELATIVE} of {PREPROCESSOR_FILE}": bool(pre[_RELATIVE].get("enabled", False))
        if _RELATIVE in pre
        else False,
        f"{_ABSOLUTE} of {POSTPROCESSOR_FILE}": bool(post[_ABSOLUTE].get("enabled", False))
        if _ABSOLUTE in post
        else False,
    }
    if len(set(said.values())) > 1:
        raise PolicyError("relative actions: " + ", ".join(f"{name} is {value}" for name, value in said.items()))
    if not config.use_relative_actions:
        return None
    step = pre[_RELATIVE]
    names = step.get("action_names")
    relative = RelativeActions(
        size,
        tuple(texts_from_json(step.get("exclude_joints", []), f"{step.where}: exclude_joints")),
        None if names is None else tuple(texts_from_json(names, f"{step.where}: action_names")),
    )
    declared = _relative(config, size, relative.action_names)
    if declared.mask != relative.mask:
        raise PolicyError(
            f"relative dimensions are {declared.mask} by config.json (relative_exclude_joints, action_feature_names), "
            f"{relative.mask} by {step.where}"
        )
    if relative.problem is not None:
        warnings.warn(f"{step.where}: {relative.problem}; LeRobot makes them relative, and so it is done", stacklevel=3)
    return relative


# --- LeRobot's files: writing -------------------------------------------------------------------------------


def write_processors(directory: Path, config: PI0FastConfig, processors: PolicyProcessors) -> None:
    """Write both processor files and their statistics, as LeRobot 0.6.1 does; it gets the same numbers from them.

    Raises:
        PolicyError: the configuration contradicts the processors, so that the directory could not be loaded.
    """
    modes = {
        "VISUAL": NormalizationMode.IDENTITY,
        "STATE": processors.state.mode,
        "ACTION": processors.action.mode,
    }
    for type_, mode in modes.items():
        if config.normalization_mapping.get(type_, mode) is not mode:
            raise PolicyError(
                f"{type_}: the configuration says {config.normalization_mapping[type_]}, the policy normalises {mode}"
            )
    if config.use_relative_actions != (processors.relative is not None):
        raise PolicyError(
            f"use_relative_actions is {config.use_relative_actions} in the configuration, but the policy's "
            f"actions are {'absolute' if processors.relative is None else 'relative'}"
        )
    for file, steps in (
        (PREPROCESSOR_FILE, _pre_steps(config, processors, modes)),
        (POSTPROCESSOR_FILE, _post_steps(config, processors, modes)),
    ):
        name = file.removesuffix(".json")
        written = []
        for number, (step, settings) in enumerate(steps):
            entry: dict[str, Any] = {"registry_name": step, "config": settings}
            tensors = _tensors(processors) if step in (_NORMALIZE, _UNNORMALIZE) else {}
            if tensors:
                entry["state_file"] = f"{name}_step_{number}_{step}.safetensors"
                # Not by save_file, whose files only their owner may read.
                (directory / entry["state_file"]).write_bytes(save(tensors))
            written.append(entry)
        write_json(directory / file, {"name": name, "steps": written}, indent=2)


def _tensors(processors: PolicyProcessors) -> dict[str, FloatArray]:
    return {
        f"{normalizer.key}.{name}": np.ascontiguousarray(values)
        for normalizer in (processors.state, processors.action)
        for name, values in normalizer.statistics.items()
    }


def _normalizer_settings(
    epsilon: float, features: Mapping[str, Any], modes: Mapping[str, NormalizationMode]
) -> dict[str, Any]:
    return {
        "eps": epsilon,
        "features": {key: feature.to_json() for key, feature in features.items()},
        "norm_map": {type_: mode.value for type_, mode in modes.items()},
    }


def _pre_steps(
    config: PI0FastConfig, processors: PolicyProcessors, modes: Mapping[str, NormalizationMode]
) -> list[tuple[str, dict[str, Any]]]:
    relative = processors.relative or _relative(config, processors.action.size)
    names = relative.action_names
    return [
        (_RENAME, {"rename_map": dict(processors.rename_map)}),
        (_BATCH, {}),
        (
            _RELATIVE,
            {
                "enabled": config.use_relative_actions,
                "exclude_joints": list(relative.exclude_joints),
                "action_names": None if names is None else list(names),
            },
        ),
        (
            _NORMALIZE,
            _normalizer_settings(processors.state.epsilon, {**config.expected_inputs, **config.output_features}, modes),
        ),
        (_PROMPT, {}),
        (
            _TEXT,
            {
                "max_length": config.tokenizer_max_length,
                "task_key": "task",
                "padding_side": "right",
                "padding": "max_length",
                "truncation": True,
                "tokenizer_name": config.text_tokenizer_name,
            },
        ),
        (
            _ACTION_TOKENS,
            {
                "trust_remote_code": True,
                "max_action_tokens": config.max_action_tokens,
                "action_tokenizer_name": config.action_tokenizer_name,
            },
        ),
        (_DEVICE, {"device": config.device or "cpu", "float_dtype": None}),
    ]


def _post_steps(
    config: PI0FastConfig, processors: PolicyProcessors, modes: Mapping[str, NormalizationMode]
) -> list[tuple[str, dict[str, Any]]]:
    return [
        (_UNNORMALIZE, _normalizer_settings(processors.action.epsilon, config.output_features, modes)),
        (_ABSOLUTE, {"enabled": config.use_relative_actions}),
        (_DEVICE, {"device": "cpu", "float_dtype": None}),
    ]
