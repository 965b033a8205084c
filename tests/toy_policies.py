"""Policies for the toy world (sims/toy.py): a tiny real one, and stand-ins whose success is known beforehand.

`Seeing` finds dot and square in the image as a trained policy would, and always succeeds; `Still` does nothing. What is
not here: any assertion.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions.normalize import exact_statistics
from pi0_fast.policy import ChunkInfo, PI0FastPolicy
from pi0_fast.policy_config import PI0FastConfig
from tiny_policies import PIXELS, sizes, text_tokenizer

HORIZON = 4
CAMERAS = ("observation.images.top", "observation.images.hand")


@cache
def action_tokenizer() -> FastTokenizer:
    """Of moves in the toy world's [-1, 1]."""
    chunks = np.random.default_rng(0).uniform(-1, 1, (300, 1, 2)) * np.ones((1, HORIZON, 1))
    normalizer = Normalizer.fit(lambda: [chunks.reshape(-1, 2).astype(np.float32)], "QUANTILES")
    return FastTokenizer.fit(
        normalizer.apply(chunks.astype(np.float32)), scale=10.0, vocab_size=300, normalizer=normalizer
    )


def settings(cameras: int = 1, **changes: Any) -> PI0FastConfig:
    images = {key: {"type": "VISUAL", "shape": [3, 32, 32]} for key in CAMERAS[:cameras]}
    given: dict[str, Any] = {
        "input_features": {**images, "observation.state": {"type": "STATE", "shape": [2]}},
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "chunk_size": HORIZON,
        "n_action_steps": HORIZON,
        "image_resolution": (PIXELS, PIXELS),
        "tokenizer_max_length": 100,
        "max_action_tokens": 40,
        "max_decoding_steps": 40,
        "action_feature_names": ["dx", "dy"],
        **changes,
    }
    return PI0FastConfig(**given)


def new_policy(kind: type[PI0FastPolicy] = PI0FastPolicy, *, cameras: int = 1, **changes: Any) -> PI0FastPolicy:
    """A policy of random weights, in evaluation mode."""
    places = np.random.default_rng(1).uniform(-1, 1, (200, 2)).astype(np.float32)
    statistics = {"observation.state": exact_statistics(lambda: [places]), "action": exact_statistics(lambda: [places])}
    return kind.create(
        settings(cameras, **changes),
        statistics,
        architecture=sizes(),
        text_tokenizer=text_tokenizer(),
        action_tokenizer=action_tokenizer(),
    ).eval()


class StandIn(PI0FastPolicy):
    """Predicts with `moves`, and notes what it was given.

    Attributes:
        batches: rows of each call.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.batches: list[int] = []

    def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
        raise NotImplementedError

    def predict_action_chunk(self, batch: Any, **_: Any) -> Any:
        rows = len(batch["observation.state"])
        self.batches.append(rows)
        chunk = np.stack([self.moves(batch, row) for row in range(rows)]).astype(np.float32)
        lengths = torch.full((rows,), 3)
        info = ChunkInfo(
            torch.zeros(rows, 3, dtype=torch.int64),
            lengths,
            torch.zeros(rows, 3),
            3,
            torch.ones(rows, dtype=torch.bool),
            (None,) * rows,
        )
        return torch.from_numpy(chunk), info


class Seeing(StandIn):
    """Drives the dot to the square that the text names, as the picture from above shows it."""

    def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
        image = batch["observation.images.top"][row].astype(int)
        red, green, blue = image[..., 0], image[..., 1], image[..., 2]
        seen = (green > red + 50) & (green > blue) if "green" in batch["task"][row] else (blue > red + 100)
        height, width = seen.shape
        rows, columns = np.nonzero(seen)
        target = np.array([columns.mean() / width * 2 - 1, 1 - rows.mean() / height * 2])
        place, found = batch["observation.state"][row].astype(float), []
        for _ in range(HORIZON):
            found.append(np.clip((target - place) / 0.1 * 0.5, -1, 1))
            place = place + 0.1 * found[-1]
        return np.array(found)


class Still(StandIn):
    """Never moves."""

    def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
        del batch, row
        return np.zeros((HORIZON, 2))
