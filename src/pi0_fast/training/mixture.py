"""Several datasets as one: each prepared by itself, with its own names, units and action tokens, and joined to a batch.

Datasets may differ in dimensions, cameras and frames a second. In a joined batch a camera that a row's dataset lacks is
masked for that row, prompts are padded to the longest, and the loss is the mean over all rows as if they were of one
dataset. Left out: which rows a step sees (sampler.py), and where the datasets and their policies come from (setup.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi0_fast.preparation import Preparation, Prepared
from pi0_fast.prompt import PromptBatch, PromptReport
from pi0_fast.training.frames import FrameDataset
from pi0_fast.types import PolicyError

Indices = npt.NDArray[np.int64]
#: The rows of a batch that are of one dataset: its number, and what `FrameDataset.batch` gives.
Part = tuple[int, dict[str, Any]]


class MixedFrames:
    """The frames of several datasets, one behind the other; like a `FrameDataset`, but a batch is a list of parts."""

    def __init__(self, datasets: Sequence[FrameDataset]) -> None:
        self.datasets = tuple(datasets)
        self._first = np.cumsum([0, *map(len, self.datasets)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def batch(self, indices: Indices, epochs: Indices) -> list[Part]:
        """Rows by dataset, in the order of the datasets, and within one as they are given; see `FrameDataset.batch`."""
        numbers = np.searchsorted(self._first, indices, side="right") - 1
        return [
            (number, self.datasets[number].batch(indices[rows] - self._first[number], epochs[rows]))
            for number in np.unique(numbers).tolist()
            for rows in [numbers == number]
        ]


class MixedPreparation:
    """What `Preparation.training` is to one dataset, for the parts that `MixedFrames.batch` gives."""

    def __init__(self, preparations: Sequence[Preparation]) -> None:
        """Preparations of one policy: its model, prompt format and cameras are the same for all datasets.

        Raises:
            PolicyError: they are not.
        """
        self._preparations = tuple(preparations)
        first = self._preparations[0]
        for other in self._preparations[1:]:
            for name in ("image_keys", "prompt_format", "image_resolution"):
                ours, theirs = getattr(first.config, name), getattr(other.config, name)
                if ours != theirs:
                    raise PolicyError(f"datasets of one policy must have one {name}, not {ours} and {theirs}")
            if first.prompt.text_tokenizer.fingerprint != other.prompt.text_tokenizer.fingerprint:
                raise PolicyError("datasets of one policy must have one text tokenizer")

    def training(self, parts: Sequence[Part]) -> Prepared:
        """The rows of all parts, prepared for training."""
        first = self._preparations[0]
        prepared = [(number, self._preparations[number].training(batch)) for number, batch in parts]
        # A part without loss is a row that only fills it up: one of those is needed where no part has any.
        useful = [part for part in prepared if part[1].loss_units(first.config.prompt_format)] or prepared[:1]
        joined = join(
            [part for _, part in useful],
            [number for number, _ in useful],
            datasets=len(self._preparations),
            cameras=first.config.image_keys,
            prompt_format=first.config.prompt_format,
            pad_id=first.prompt.text_tokenizer.pad_id,
        )
        joined.counts["padded_rows"] = sum(part.counts["padded_rows"] for _, part in prepared)
        return joined


def join(
    parts: Sequence[Prepared],
    numbers: Sequence[int],
    *,
    datasets: int,
    cameras: Sequence[str],
    prompt_format: str,
    pad_id: int,
) -> Prepared:
    """Rows prepared for training apart, as one batch.

    Args:
        parts: at least one.
        numbers: of the dataset of each part.
        datasets: how many there are.
        cameras: the policy's, in its order.
        prompt_format: the policy's.
        pad_id: the text tokenizer's.

    Returns:
        The rows of the parts one behind the other. Cameras that no part has take no positions; states are padded with
        NaN, since nobody needs them in training.
    """
    used = [name for name in cameras if any(name in part.cameras for part in parts)]
    rows = [len(part.states) for part in parts]
    width = max(part.states.shape[1] for part in parts)
    states = np.full((sum(rows), width), np.nan, np.float32)
    valid = np.zeros((sum(rows), len(used)), bool)
    images = _black(parts, sum(rows), len(used))
    counts: Counter[str] = Counter()
    for begin, part in zip(np.cumsum([0, *rows]).tolist(), parts, strict=False):
        own = slice(begin, begin + len(part.states))
        states[own, : part.states.shape[1]] = part.states
        places = [used.index(name) for name in part.cameras]
        valid[own, places] = part.camera_valid
        if images is not None and part.images is not None:
            images[own, places] = part.images
        counts.update(part.counts)
    return Prepared(
        images,
        valid,
        _joined_prompts(parts, prompt_format, pad_id),
        states,
        counts,
        tuple(used),
        datasets,
        np.repeat(np.array(numbers, np.int64), rows),
    )


def _black(parts: Sequence[Prepared], rows: int, cameras: int) -> torch.Tensor | None:
    found = next((part.images for part in parts if part.images is not None), None)
    if found is None:
        return None
    return torch.full((rows, cameras, *found.shape[2:]), -1.0, dtype=found.dtype)


def _joined_prompts(parts: Sequence[Prepared], prompt_format: str, pad_id: int) -> PromptBatch:
    """The prompts, padded to the longest; each part's weights count as much as its share of all targets."""
    length = max(part.prompt.ids.shape[1] for part in parts)
    units = [part.loss_units(prompt_format) for part in parts]
    total = max(sum(units), 1)

    def joined(name: str, fill: Any) -> Any:
        found = [getattr(part.prompt, name) for part in parts]
        return np.concatenate(
            [np.pad(each, ((0, 0), (0, length - each.shape[1])), constant_values=fill) for each in found]
        )

    shares = np.array([own / total for own in units], np.float32)
    weight = joined("weight", 0) * np.repeat(shares, [len(part.prompt.ids) for part in parts])[:, None]
    return PromptBatch(
        ids=joined("ids", pad_id),
        valid=joined("valid", False),
        causal=joined("causal", False),
        label=joined("label", False),
        weight=weight,
        text_length=np.concatenate([part.prompt.text_length for part in parts]),
        report=_joined_reports([part.prompt.report for part in parts]),
    )


def _joined_reports(reports: Sequence[PromptReport]) -> PromptReport:
    """Of all rows; the counts by dimension of the state stand one behind the other."""
    return PromptReport(
        rows=sum(report.rows for report in reports),
        state_below=np.concatenate([report.state_below for report in reports]),
        state_above=np.concatenate([report.state_above for report in reports]),
        longest_text=max(report.longest_text for report in reports),
        longest_target=max(report.longest_target for report in reports),
        over_budget=sum(report.over_budget for report in reports),
    )
