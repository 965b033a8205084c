"""What a policy has learned, measured on frames: loss, token accuracy, and the error of the chunks it generates.

The error is compared with the one that the action tokenizer makes by itself on the same chunks, which no policy of
these tokens can fall below for long, and with those of chunks that need no policy (baselines.py). Only frames with a
whole chunk ahead are measured. Left out: success on a robot or in a simulator, and when to measure (loop.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi0_fast.policy import PI0FastPolicy
from pi0_fast.preparation import Preparation, Prepared
from pi0_fast.training.baselines import ERRORS, held_action, mean_action
from pi0_fast.training.frames import FrameDataset
from pi0_fast.types import PolicyError

Indices = npt.NDArray[np.int64]


def loss_units(prepared: Prepared, prompt_format: str) -> int:
    """Of how many things the loss of a batch is the mean: target ids, or rows in openpi's format; 0 without loss.

    Losses of several batches, weighted with this, add up to the loss of one large batch.
    """
    counted = prepared.prompt.label & (prepared.prompt.weight > 0)
    return int(counted.any(axis=1).sum() if prompt_format == "openpi" else counted.sum())


def spread(count: int, most: int) -> Indices:
    """`most` of the numbers below `count` (0: all), evenly spread: int64, ascending."""
    chosen = count if most == 0 else min(count, most)
    return (np.arange(chosen) * count) // max(chosen, 1)


@torch.no_grad()
def measure(
    policy: PI0FastPolicy,
    frames: FrameDataset,
    *,
    most: int,
    batch_size: int,
    stop: Callable[[], bool] = lambda: False,
    share: tuple[int, int] = (0, 1),
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> dict[str, Any] | None:
    """Measure a policy on frames that are evenly spread over those of a dataset with a whole chunk ahead.

    Args:
        policy: in any mode; is in evaluation mode meanwhile.
        frames: without random transforms.
        most: frames to measure; 0 for all.
        batch_size: frames at a time.
        stop: asked between batches; True ends it.
        share: (i, n): this process measures batches i, i + n, ...; the result is that of all, in each process.
        gather: what each of the n processes has, by number; called once by each.

    Returns:
        None where it was stopped, in any process. Else ``frames``; ``loss``, the mean cross entropy as in training;
        ``token_accuracy``, the share of action tokens that are the likeliest when those before them are given;
        ``action_l1``, the mean absolute error of greedily generated chunks in the data's units, and
        ``action_l1_by_dimension``; ``tokenizer_l1``, ``mean_action_l1``, ``held_action_l1`` (see `baselines.ERRORS`;
        None where unknown); ``malformed``, the share of rows that held no chunk.

    Raises:
        PolicyError: no frame has a whole chunk ahead, or what `PI0FastPolicy.forward` raises.
    """
    was_training, counts = policy.training, Counter(policy.counts)
    policy.eval()
    sums = _Sums()
    try:
        there = frames.whole
        indices = there[spread(len(there), most)]
        for start in range(share[0] * batch_size, len(indices), share[1] * batch_size):
            if stop():
                sums.stopped = True
                break
            sums.add(policy, frames.batch(indices[start : start + batch_size]))
    finally:
        policy.train(was_training)
        policy.counts.clear()  # what was changed in these frames is no part of training
        policy.counts.update(counts)
    every = gather(sums)
    return None if any(each.stopped for each in every) else _Sums.of(every).means()


def over_datasets(parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What `measure` found on several datasets as one, and ``datasets``, each by its name; of one, what it found.

    Errors of actions are in units of the robots, and have no mean over them.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    found = list(parts.values())

    def mean(name: str, of: str) -> float:
        return float(sum(part[name] * part[of] for part in found if part[of]) / max(sum(part[of] for part in found), 1))

    return {
        "frames": sum(part["frames"] for part in found),
        "loss": mean("loss", "loss_units"),
        "token_accuracy": mean("token_accuracy", "action_tokens"),
        "malformed": mean("malformed", "frames"),
        "datasets": dict(parts),
    }


class _Sums:
    """Of everything that `measure` reports, over batches."""

    def __init__(self) -> None:
        self.rows = self.units = self.actions = self.hits = self.malformed = 0
        self.loss = 0.0
        self.generated: Any = 0.0
        self.own: Any = 0.0
        self.mean_action: Any = 0.0
        self.held_action: Any = 0.0
        self.steps = 0
        self.stopped = False

    @classmethod
    def of(cls, parts: list[_Sums]) -> _Sums:
        """The sums over all that the parts are sums of."""
        total = cls()
        for name in vars(total):
            if name != "stopped":
                setattr(total, name, sum(getattr(each, name) for each in parts))
        return total

    def add(self, policy: PI0FastPolicy, batch: dict[str, Any]) -> None:
        preparation = policy.preparation
        prepared = preparation.training(batch, policy.model.device)
        scores = policy.score(prepared)
        units = loss_units(prepared, policy.config.prompt_format)
        self.loss -= float((scores.log_probabilities.double() * scores.weights).sum()) * units
        self.units += units
        self.actions += int(scores.is_action.sum())
        self.hits += int((scores.hits & scores.is_action).sum())
        wanted = np.asarray(preparation.processors.rename(batch)["action"], np.float64)
        chunks, info = policy.predict_action_chunk(batch, temperature=0.0, return_info=True)
        self.malformed += int((~info.valid).sum())
        self.generated += np.abs(chunks.numpy() - wanted).sum(axis=(0, 1))
        self.own += np.abs(round_trip(preparation, prepared) - wanted).sum(axis=(0, 1))
        mean = mean_action(preparation.processors, wanted, prepared.states)
        self.mean_action += np.abs(mean - wanted).sum(axis=(0, 1))
        self.held_action += np.abs(held_action(wanted) - wanted).sum(axis=(0, 1))
        self.rows += len(wanted)
        self.steps += wanted.shape[0] * wanted.shape[1]

    def means(self) -> dict[str, Any]:
        if self.rows == 0:
            raise PolicyError("no frame to measure on has a whole chunk ahead: choose a smaller chunk_size")
        errors: dict[str, Any] = {}
        for name, total in zip(ERRORS, (self.generated, self.own, self.mean_action, self.held_action), strict=True):
            by_dimension = total / self.steps
            known = bool(np.isfinite(by_dimension).all())
            errors[name] = float(by_dimension.mean()) if known else None
            errors[f"{name}_by_dimension"] = by_dimension.tolist() if known else None
        return {
            **errors,
            "frames": self.rows,
            "loss": self.loss / self.units if self.units else math.nan,
            "token_accuracy": self.hits / max(self.actions, 1),
            "malformed": self.malformed / self.rows,
            "loss_units": self.units,
            "action_tokens": self.actions,
        }


def round_trip(preparation: Preparation, prepared: Prepared) -> npt.NDArray[np.float32]:
    """What the action tokens of a batch prepared for training decode to: float32 [B, H, D], in the data's units."""
    prompt = prepared.prompt
    lengths = prompt.label.sum(axis=1)
    targets = np.zeros((len(lengths), int(lengths.max())), np.int64)
    targets[np.arange(targets.shape[1]) < lengths[:, None]] = prompt.ids[prompt.label]
    rows = preparation.prompt.parse(targets, lengths)
    ids = np.full((len(rows), max(len(row.ids) for row in rows)), -1)
    for kept, row in zip(ids, rows, strict=True):
        kept[: len(row.ids)] = row.ids
    return preparation.actions((ids, np.array([len(row.ids) for row in rows])), prepared.states)[0]
