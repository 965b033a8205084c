"""From a batch as LeRobot makes it to what the model takes: images, prompts, action tokens; and actions back.

The same object serves training and inference, in this process or in a data loader's workers (it can be pickled and
holds no weights). It joins the processors (names, units), the prompt and the action tokenizer, and counts whatever it
changed on the way. What is not here: the model, and generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pi0_fast.actions.chunks import as_numbers
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.tokenizer import DecodeInfo, FastTokenizer
from pi0_fast.model.images import prepare_images
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY, PI0FastConfig
from pi0_fast.processors import PolicyProcessors
from pi0_fast.prompt import Prompt, PromptBatch
from pi0_fast.text_tokenizer import TextTokenizer
from pi0_fast.types import PolicyError, TokenizerError

FloatArray = npt.NDArray[np.float32]

TASK_KEY = "task"
#: bool [B, H] of LeRobot's datasets: the step lies behind the episode's end and repeats its last action.
PADDING_KEY = "action_is_pad"


@dataclass(frozen=True)
class Prepared:
    """B rows, ready for the model.

    Attributes:
        images: float32 [B, C, 3, height, width] in [-1, 1], of the cameras that the model sees, on the device asked
            for; None where there are none.
        camera_valid: bool [C], or [B, C] where rows of several datasets are joined; False for a missing camera that
            only takes positions.
        prompt: ids and what the model is to know about them.
        states: float32 [B, Ds], in the robot's units; of joined rows NaN behind what a row's robot has.
        counts: what was changed or left out, by name; see `PI0FastPolicy.counts`.
        cameras: the policy's names of the C cameras.
        datasets: number of datasets that the rows are from, where they are joined; else 0.
        dataset_of_row: int64 [B], which of these each row is from, where they are joined.
    """

    images: Tensor | None
    camera_valid: npt.NDArray[np.bool_]
    prompt: PromptBatch
    states: FloatArray = field(repr=False)
    counts: Counter[str]
    cameras: tuple[str, ...] = ()
    datasets: int = 0
    dataset_of_row: npt.NDArray[np.int64] | None = None

    def loss_units(self, prompt_format: str) -> int:
        """Of how many things the loss is the mean: target ids, or rows in openpi's format; 0 without loss.

        Losses of several batches, weighted with this, add up to the loss of one large batch.
        """
        counted = self.prompt.label & (self.prompt.weight > 0)
        return int(counted.any(axis=1).sum() if prompt_format == "openpi" else counted.sum())


class Preparation:
    """What happens to a batch before the model and to its tokens after it; see `PI0FastPolicy` for the arguments."""

    def __init__(
        self,
        config: PI0FastConfig,
        processors: PolicyProcessors,
        text_tokenizer: TextTokenizer,
        action_tokenizer: FastTokenizer,
    ) -> None:
        self.config, self.processors = config, processors
        self.action_tokenizer = bound_tokenizer(action_tokenizer, config, processors)
        try:
            self.prompt = Prompt(
                text_tokenizer,
                self.action_tokenizer.vocab_size,
                prompt_format=config.prompt_format,  # type: ignore[arg-type]  # checked by the configuration
                tokenizer_max_length=config.tokenizer_max_length,
                max_action_tokens=config.max_action_tokens,
                fast_skip_tokens=config.fast_skip_tokens,
                state_clip=config.state_clip,
            )
        except PolicyError as error:
            raise PolicyError(
                f"text tokenizer {config.text_tokenizer_name!r} with action tokenizer "
                f"{config.action_tokenizer_name!r}: {error}"
            ) from error
        self._unclipped = replace(processors.action, clip=False)
        #: Declared as missing, so that nothing need be said of them.
        self._empty_cameras = {f"observation.images.empty_camera_{number}" for number in range(config.empty_cameras)}

    # --- before the model -------------------------------------------------------------------------------------------

    def generation(self, batch: Mapping[str, Any], device: torch.device | str = "cpu") -> Prepared:
        """Images, and prompts up to where the model goes on; see `PI0FastPolicy.predict_action_chunk`."""
        batch, states, tasks = self._observation(batch)
        prompt = self.prompt.generation(tasks, self._normalized(states), prefill_action_prefix=self.config.constrained)
        counts = _prompt_counts(prompt)
        imitated = self.config.assume_contiguous_prefix
        images, valid, cameras = self._images(batch, np.arange(len(states)), device, counts, masked=imitated)
        if imitated and not valid.all():
            prompt = self._padded(prompt)
            counts["assume_contiguous_prefix"] = len(states)
        return Prepared(images, valid, prompt, states, counts, cameras)

    def _padded(self, prompt: PromptBatch) -> PromptBatch:
        """With padding up to `tokenizer_max_length` and what is given of the target, as openpi has it."""
        width = self.config.tokenizer_max_length + int(prompt.causal.sum(axis=1).max())
        more = ((0, 0), (0, width - prompt.ids.shape[1]))
        return replace(
            prompt,
            ids=np.pad(prompt.ids, more, constant_values=self.prompt.text_tokenizer.pad_id),
            valid=np.pad(prompt.valid, more),
            causal=np.pad(prompt.causal, more),
            label=np.pad(prompt.label, more),
            weight=np.pad(prompt.weight, more),
        )

    def training(self, batch: Mapping[str, Any], device: torch.device | str = "cpu") -> Prepared:
        """Images, and prompts with their targets; see `PI0FastPolicy.forward`.

        Rows with a padded step are left out and counted; where that leaves none, one stays, without weight.
        """
        batch, states, tasks = self._observation(batch)
        actions = self._actions(batch, len(states))
        kept, weightless = self._whole_rows(batch, len(states))
        states, actions, tasks = states[kept], actions[kept], [tasks[row] for row in kept.tolist()]
        normalized = self._unclipped.apply(
            actions if self.processors.relative is None else self.processors.relative.to_relative(actions, states)
        )
        outside = int(np.count_nonzero(np.abs(normalized) > 1))
        if self.processors.action.clip and outside:
            np.clip(normalized, -1, 1, out=normalized)
        try:
            ids, lengths, info = self.action_tokenizer.encode_padded(normalized, return_info=True)
        except TokenizerError as error:
            raise PolicyError(
                f"{ACTION_KEY!r} after normalisation ({self.processors.action.mode}): {error}. Its statistics may not "
                "be those of this data"
            ) from error
        prompt = self.prompt.training(tasks, self._normalized(states), ids, lengths)
        if weightless:
            prompt = replace(prompt, weight=np.zeros_like(prompt.weight))
        counts = _prompt_counts(prompt)
        counts["over_budget"] = prompt.report.over_budget
        counts["clipped_values"] = outside if self.processors.action.clip else 0
        counts["saturated_coefficients"] = int(info.saturations.sum())
        counts["over_error"] = int(info.over_error.sum())
        counts["padded_rows"] = len(batch[STATE_KEY]) - (0 if weightless else len(kept))
        images, valid, cameras = self._images(batch, kept, device, counts)
        return Prepared(images, valid, prompt, states, counts, cameras)

    def _observation(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], FloatArray, list[str]]:
        """The batch with the policy's names; raw states [B, Ds]; B tasks."""
        if not isinstance(batch, Mapping):
            raise PolicyError(f"a batch is a dictionary of names, not {type(batch).__name__}")
        renamed = self.processors.rename(batch)
        states = self._numbers(renamed, STATE_KEY)
        states = states[None] if states.ndim == 1 else states
        size = self.processors.state.size
        if states.ndim != 2 or states.shape[1] != size or len(states) == 0:
            raise PolicyError(
                f"{STATE_KEY!r} has shape {list(states.shape)}; this policy's state has {size} dimensions: needed is "
                f"[batch, {size}] or [{size}]"
            )
        renamed[STATE_KEY] = states
        if renamed.get(TASK_KEY) is None:
            raise PolicyError(f"the batch has no {TASK_KEY!r}: a text that says what to do, or one for each row")
        tasks = renamed[TASK_KEY]
        if isinstance(tasks, np.ndarray):
            tasks = tasks.tolist()  # a text where it has no axis
        if not isinstance(tasks, str | Sequence):
            raise PolicyError(f"{TASK_KEY!r} must be a text, or one for each row, not {type(tasks).__name__}")
        tasks = [tasks] * len(states) if isinstance(tasks, str) else list(tasks)
        if len(tasks) != len(states):
            raise PolicyError(f"{TASK_KEY!r} has {len(tasks)} texts for {len(states)} rows of {STATE_KEY!r}")
        return renamed, states, tasks

    def _numbers(self, batch: Mapping[str, Any], key: str) -> FloatArray:
        if batch.get(key) is None:
            raise PolicyError(
                f"the batch has no {key!r}; it has {', '.join(map(str, batch)) or 'nothing'}. Where another name is "
                f"meant, pass rename_map={{'that name': {key!r}}}"
            )
        try:
            numbers = as_numbers(batch[key], repr(key))
        except TokenizerError as error:
            raise PolicyError(str(error)) from error
        with np.errstate(over="ignore"):  # an infinity is found, and named, where it is normalised
            return numbers.astype(np.float32, copy=False)

    def _normalized(self, states: FloatArray) -> FloatArray:
        return self.processors.state.apply(states)

    def _actions(self, batch: Mapping[str, Any], rows: int) -> FloatArray:
        actions = self._numbers(batch, ACTION_KEY)
        actions = actions[None] if actions.ndim == 2 else actions
        wanted = (rows, self.config.chunk_size, self.processors.action.size)
        if actions.shape != wanted:
            raise PolicyError(
                f"{ACTION_KEY!r} has shape {list(actions.shape)}; needed is [rows, chunk_size, dimensions] = "
                f"{list(wanted)}"
            )
        return actions

    def _whole_rows(self, batch: Mapping[str, Any], rows: int) -> tuple[npt.NDArray[np.int64], bool]:
        """Rows without padded steps, or one row that is to have no weight."""
        if batch.get(PADDING_KEY) is None:
            return np.arange(rows), False
        padded = self._numbers(batch, PADDING_KEY) != 0
        padded = padded[None] if padded.ndim == 1 else padded
        if padded.shape != (rows, self.config.chunk_size):
            raise PolicyError(
                f"{PADDING_KEY!r} has shape {list(padded.shape)}; needed is [rows, chunk_size] = "
                f"[{rows}, {self.config.chunk_size}]"
            )
        whole = np.flatnonzero(~padded.any(axis=1))
        return (whole, False) if len(whole) else (np.zeros(1, np.int64), True)

    def _images(
        self,
        batch: Mapping[str, Any],
        rows: npt.NDArray[np.int64],
        device: torch.device | str,
        counts: Counter[str],
        *,
        masked: bool = False,
    ) -> tuple[Tensor | None, npt.NDArray[np.bool_], tuple[str, ...]]:
        """Images [B, C, 3, height, width] of the cameras that the model gets, which of these it sees, their names.

        `masked` says that it is to get those it does not see, too.
        """
        keys, config = self.config.image_keys, self.config
        present = {key for key in keys if batch.get(key) is not None}
        self._check_cameras(batch, keys, present, len(rows), counts)
        images: list[Tensor | None] = []
        valid: list[bool] = []
        names: list[str] = []
        total = len(batch[STATE_KEY])
        for key in keys:
            if key in present:
                pixels = self._one_camera(batch[key], key, total, rows, device)
                images.append(pixels)
                valid.append(True)
                names.append(key)
                continue
            if key not in self._empty_cameras:
                counts[f"missing {key}"] += len(rows)
            # A camera that nobody attends to changes nothing, unless it takes positions.
            if config.attend_missing_cameras or config.count_padding_in_positions or masked:
                images.append(None)
                valid.append(config.attend_missing_cameras)
                names.append(key)
        if not images:
            return None, np.zeros(0, bool), ()
        black = torch.full((len(rows), 3, *config.image_resolution), -1.0, dtype=torch.float32, device=device)
        stacked = torch.stack([black if image is None else image for image in images], dim=1)
        return stacked, np.array(valid), tuple(names)

    def _one_camera(
        self, images: Any, key: str, total: int, rows: npt.NDArray[np.int64], device: torch.device | str
    ) -> Tensor:
        if isinstance(images, Sequence) and not isinstance(images, str):
            try:
                of_torch = all(isinstance(image, Tensor) for image in images)
                images = torch.stack(list(images)) if of_torch else np.stack([np.asarray(image) for image in images])
            except (ValueError, TypeError, RuntimeError) as error:
                raise PolicyError(f"{key}: the images of a batch must have one size ({error})") from error
        if len(rows) != total and getattr(images, "ndim", 0) == 4 and len(images) == total:
            images = images[torch.from_numpy(rows)] if isinstance(images, Tensor) else images[rows]
            total = len(rows)
        if isinstance(images, Tensor):
            images = images.to(device)  # before the work, which is the device's then
        pixels = prepare_images(
            images, resolution=self.config.image_resolution, antialias=self.config.antialias_images, key=key
        ).to(device)
        if len(pixels) != total:
            raise PolicyError(f"{key!r} has {len(pixels)} images, {STATE_KEY!r} has {total} rows")
        return pixels

    def _check_cameras(
        self, batch: Mapping[str, Any], keys: Sequence[str], present: set[str], rows: int, counts: Counter[str]
    ) -> None:
        """Refuse a batch without any image, and one whose camera has another name than the one that is missing.

        Cameras beyond those that the policy has are counted.
        """
        missing = [key for key in keys if key not in present and key not in self._empty_cameras]
        strange = [
            key
            for key, value in batch.items()
            if key not in keys
            and str(key).startswith("observation.image")
            and not str(key).endswith("_is_pad")
            and getattr(value, "ndim", 3) >= 3
        ]
        if not keys or not ((missing and strange) or not present):
            for key in strange:
                counts[f"unused {key}"] += rows
            return
        wanted = missing or list(keys)
        if strange:
            raise PolicyError(
                f"the batch lacks the images {', '.join(wanted)} and has {', '.join(strange)}, which this policy does "
                f"not know: pass rename_map={{{strange[0]!r}: {wanted[0]!r}}} if that is the one meant, or leave it out"
            )
        raise PolicyError(
            f"the batch lacks the images {', '.join(wanted)}, so there is none at all; it has "
            f"{', '.join(map(str, batch))}. Where another name is meant, pass rename_map={{'that name': {wanted[0]!r}}}"
        )

    # --- after the model --------------------------------------------------------------------------------------------

    def actions(self, ids: Any, states: FloatArray, *, on_error: str = "raise") -> tuple[FloatArray, DecodeInfo]:
        """Action tokens to actions in the robot's units.

        Args:
            ids: as `FastTokenizer.decode` takes them.
            states: float32 [B, Ds], raw, of the moment that the actions were predicted at.
            on_error: as in `FastTokenizer.decode`: "raise", or "pad".

        Returns:
            float32 [B, H, D], and which rows were valid.
        """
        chunks, info = self.action_tokenizer.decode(ids, on_error=on_error, return_info=True)  # type: ignore[call-overload]
        return self.processors.restore_actions(chunks, states), info


def bound_tokenizer(tokenizer: FastTokenizer, config: PI0FastConfig, processors: PolicyProcessors) -> FastTokenizer:
    """The action tokenizer for the policy's chunks.

    One that was fitted here knows its chunks and their units, which must be the policy's. A published one takes chunks
    of any shape: it is bound to the policy's.

    Raises:
        PolicyError: it was fitted on other chunks, dimensions or units.
    """
    horizon, size = config.chunk_size, processors.action.size
    name = config.action_tokenizer_name
    if tokenizer.coefficient_range is None and tokenizer.normalizer is None:
        try:
            return tokenizer.bound(horizon, size)
        except TokenizerError as error:
            raise PolicyError(f"the action tokenizer {name!r} does not suit {size} dimensions: {error}") from error
    if (tokenizer.time_horizon, tokenizer.action_dim) != (horizon, size):
        raise PolicyError(
            f"the action tokenizer {name!r} was fitted on chunks of {tokenizer.time_horizon} steps and "
            f"{tokenizer.action_dim} dimensions, the policy's have chunk_size={horizon} and {size}: fit one on such "
            "chunks, or set chunk_size"
        )
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return tokenizer
    _check_relative(normalizer, processors, name)
    probe = np.stack([np.full(size, value, np.float32) for value in (-1.0, 0.0, 1.0)])
    theirs, ours = normalizer.invert(probe), processors.action.invert(probe)
    width = np.abs(ours[2] - ours[0])
    wrong = np.flatnonzero((np.abs(theirs - ours) > 1e-3 * np.maximum(width, 1e-6)).any(axis=0))
    if len(wrong):
        dim = int(wrong[0])
        raise PolicyError(
            f"the action tokenizer {name!r} was fitted on actions in other units than the policy's: dimension {dim} "
            f"from {theirs[0, dim]:g} to {theirs[2, dim]:g} ({normalizer.mode}), here from {ours[0, dim]:g} to "
            f"{ours[2, dim]:g} ({processors.action.mode}). Make the policy with the tokenizer's normalizer as the "
            "action's statistics"
        )
    return tokenizer


def _check_relative(normalizer: Normalizer, processors: PolicyProcessors, name: str) -> None:
    """Whether the tokenizer was fitted on actions that are relative in the same dimensions, to the same states."""
    selection = normalizer.selection
    if selection is None:  # it does not say
        return
    pairs = zip(selection.delta_dims, selection.delta_state_dims, strict=True)
    theirs = {selection.dims.index(action): state for action, state in pairs}
    mask = () if processors.relative is None else processors.relative.mask
    ours = {dim: dim for dim, relative in enumerate(mask) if relative}
    if theirs == ours:
        return

    def shown(map_: Mapping[int, int]) -> str:
        dims = ", ".join(f"{dim} to state {state}" for dim, state in map_.items())
        return f"relative actions (dimension {dims})" if dims else "absolute actions"

    raise PolicyError(
        f"the action tokenizer {name!r} was fitted on {shown(theirs)}, the policy has {shown(ours)}: see "
        "use_relative_actions, relative_exclude_joints and action_feature_names"
    )


def _prompt_counts(prompt: PromptBatch) -> Counter[str]:
    report = prompt.report
    return Counter(
        rows=report.rows, state_below=int(report.state_below.sum()), state_above=int(report.state_above.sum())
    )
