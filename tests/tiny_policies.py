"""Tiny policies and batches for tests: chunks of 6 x 3, states of 4, cameras of 28 x 28, a built-in text tokenizer.

Everything is made on the spot and the same every time. What is not here: any assertion.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions.normalize import exact_statistics
from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.text_tokenizer import TextTokenizer, TinyTextTokenizer

HORIZON, ACTION, STATE, PIXELS, VOCABULARY = 6, 3, 4, 28, 1024
CAMERAS = ("observation.images.top", "observation.images.wrist")
TASKS = ("pick up the cube", "Open_the drawer\nslowly ", "push it all the way to the left", "stop")


@cache
def text_tokenizer() -> TextTokenizer:
    return TinyTextTokenizer(VOCABULARY)


@cache
def frames() -> tuple[np.ndarray, np.ndarray]:
    """States [200, 4] and chunks [200, 6, 3] in a robot's units; the chunks begin near the first three states."""
    random = np.random.default_rng(0)
    states = random.uniform(-1, 1, (200, STATE)) * [2.0, 0.5, 30.0, 1.0] + [1.0, 0.0, -10.0, 0.0]
    moves = np.cumsum(random.normal(0, 0.1, (200, HORIZON, ACTION)), axis=1) * [2.0, 0.5, 30.0]
    return states.astype(np.float32), (states[:, None, :ACTION] + moves).astype(np.float32)


def statistics(relative: bool = False) -> dict[str, Any]:
    """Of both, as a dataset has them."""
    states, chunks = frames()
    chunks = chunks - states[:, None, :ACTION] if relative else chunks
    return {
        "observation.state": exact_statistics(lambda: [states]),
        "action": exact_statistics(lambda: [chunks.reshape(-1, ACTION)]),
    }


@cache
def action_tokenizer(vocab_size: int = 300, scale: float = 20.0) -> FastTokenizer:
    """Fitted on the chunks, with the normaliser that made them."""
    _, chunks = frames()
    normalizer = Normalizer.fit(lambda: [chunks.reshape(-1, ACTION)], "QUANTILES")
    return FastTokenizer.fit(normalizer.apply(chunks), scale=scale, vocab_size=vocab_size, normalizer=normalizer)


@cache
def published_tokenizer() -> FastTokenizer:
    """One that says nothing of the chunks it was fitted on, as FAST+."""
    fitted = action_tokenizer()
    return FastTokenizer(fitted.vocabulary, scale=fitted.scale)


def settings(cameras: int = 1, **changes: Any) -> PI0FastConfig:
    images = {key: {"type": "VISUAL", "shape": [3, PIXELS, PIXELS]} for key in CAMERAS[:cameras]}
    given: dict[str, Any] = {
        "input_features": {**images, "observation.state": {"type": "STATE", "shape": [STATE]}},
        "output_features": {"action": {"type": "ACTION", "shape": [ACTION]}},
        "chunk_size": HORIZON,
        "n_action_steps": HORIZON,
        "image_resolution": (PIXELS, PIXELS),
        "tokenizer_max_length": 100,
        "max_action_tokens": 40,
        "max_decoding_steps": 40,
        **changes,
    }
    return PI0FastConfig(**given)


def sizes(image_size: int = PIXELS) -> Architecture:
    return Architecture(
        VisionSizes(16, 1, 2, 32, image_size, 14), TextSizes(32, 2, 64, 4, 1, 16, vocab_size=VOCABULARY)
    )


def new_policy(
    seed: int = 0, *, cameras: int = 1, tokenizer: FastTokenizer | None = None, **changes: Any
) -> PI0FastPolicy:
    """A policy of random weights, in evaluation mode."""
    return PI0FastPolicy.create(
        settings(cameras, **changes),
        statistics(bool(changes.get("use_relative_actions"))),
        architecture=sizes(),
        text_tokenizer=text_tokenizer(),
        action_tokenizer=action_tokenizer() if tokenizer is None else tokenizer,
        seed=seed,
    ).eval()


def batch_of(rows: int = 3, *, seed: int = 0, cameras: int = 1, actions: bool = True) -> dict[str, Any]:
    """A batch as a data loader makes it: torch, float images, a list of texts of unequal length."""
    states, chunks = frames()
    random = np.random.default_rng(seed)
    places = random.permutation(len(states))[:rows]
    batch: dict[str, Any] = {
        key: torch.from_numpy(random.integers(0, 256, (rows, 3, PIXELS, PIXELS)).astype(np.float32) / 255)
        for key in CAMERAS[:cameras]
    }
    batch["observation.state"] = torch.from_numpy(states[places])
    batch["task"] = [TASKS[row % len(TASKS)] for row in range(rows)]
    if actions:
        batch["action"] = torch.from_numpy(chunks[places])
    return batch


def row_of(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """One row of a batch, still with a batch axis."""
    return {key: value[row : row + 1] for key, value in batch.items()}


def overfit(policy: PI0FastPolicy, batch: dict[str, Any], steps: int = 80, rate: float = 4e-3) -> list[float]:
    """Plain AdamW on one batch; the loss of each step. The policy is in evaluation mode afterwards."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    prepared = policy.preparation.training(batch)
    policy.train()
    losses = []
    for _ in range(steps):
        loss, _ = policy(prepared)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    policy.eval()
    return losses


@cache
def trained() -> tuple[PI0FastPolicy, dict[str, Any]]:
    """A policy that has learned the three chunks of a batch by heart; not to be changed."""
    policy, batch = new_policy(1), batch_of()
    overfit(policy, batch)
    return policy, batch
