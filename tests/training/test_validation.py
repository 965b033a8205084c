"""What is measured on frames: by hand, beside a batch that is all frames, and with a policy that makes no mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_policies  # noqa: E402
from pi0_fast.training.validation import loss_units, measure, round_trip, spread  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402


class Frames:
    """Rows of a batch, as a FrameDataset gives them."""

    def __init__(self, batch: dict[str, Any], padded: tuple[int, ...] = ()) -> None:
        self._batch = batch
        self._rows = len(batch["task"])
        self._padded = np.zeros((self._rows, tiny_policies.HORIZON), bool)
        self._padded[list(padded), -1] = True

    def __len__(self) -> int:
        return self._rows

    @property
    def whole(self) -> Any:
        return np.flatnonzero(~self._padded.any(axis=1))

    def batch(self, indices: Any) -> dict[str, Any]:
        rows = np.asarray(indices).tolist()
        batch: dict[str, Any] = {
            key: [value[row] for row in rows] if isinstance(value, list) else np.asarray(value)[rows]
            for key, value in self._batch.items()
        }
        return {**batch, "action_is_pad": self._padded[rows]}


def test_spread() -> None:
    assert spread(10, 4).tolist() == [0, 2, 5, 7]
    assert spread(3, 10).tolist() == [0, 1, 2]
    assert spread(3, 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("prompt_format", ["lerobot", "openpi"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_losses_of_batches_add_up_to_that_of_all_frames(prompt_format: str, batch_size: int) -> None:
    policy = tiny_policies.new_policy(prompt_format=prompt_format)
    batch = tiny_policies.batch_of(5)
    values = measure(policy, Frames(batch), most=0, batch_size=batch_size)  # type: ignore[arg-type]
    assert values is not None
    assert values["loss"] == pytest.approx(float(policy(batch)[0].detach()), rel=1e-5)
    assert values["frames"] == 5


def test_units_are_target_ids_or_rows() -> None:
    policy = tiny_policies.new_policy()
    batch = tiny_policies.batch_of(3)
    prepared = policy.preparation.training(batch)
    assert loss_units(prepared, "lerobot") == policy(prepared)[1]["target_ids"]
    assert loss_units(prepared, "openpi") == 3
    weightless = policy.preparation.training(
        batch | {"action_is_pad": torch.ones(3, tiny_policies.HORIZON, dtype=torch.bool)}
    )
    assert loss_units(weightless, "lerobot") == loss_units(weightless, "openpi") == 0


def test_a_policy_that_knows_the_chunks_has_the_tokenizers_error() -> None:
    policy, batch = tiny_policies.trained()
    counts = dict(policy.counts)
    values = measure(policy, Frames(batch), most=0, batch_size=2)  # type: ignore[arg-type]
    assert values is not None
    assert values["token_accuracy"] == 1.0
    assert values["action_l1"] == pytest.approx(values["tokenizer_l1"])
    assert values["malformed"] == 0
    assert dict(policy.counts) == counts
    chunk = policy.predict_action_chunk(batch)
    expected = (chunk - batch["action"]).abs().mean(dim=(0, 1))
    assert values["action_l1_by_dimension"] == pytest.approx(expected.tolist(), rel=1e-5)
    assert values["action_l1"] == pytest.approx(float(expected.mean()), rel=1e-5)


def test_an_untrained_policy_is_worse_than_the_tokenizer() -> None:
    policy = tiny_policies.new_policy().train()
    values = measure(policy, Frames(tiny_policies.batch_of(6)), most=4, batch_size=4)  # type: ignore[arg-type]
    assert values is not None
    assert values["frames"] == 4
    assert values["action_l1"] > 2 * values["tokenizer_l1"] > 0
    assert policy.training


@pytest.mark.parametrize("relative", [False, True])
def test_the_round_trip_is_that_of_the_tokenizer(relative: bool) -> None:
    policy = (
        tiny_policies.new_policy(use_relative_actions=relative, relative_exclude_joints=[])
        if relative
        else (tiny_policies.new_policy())
    )
    batch = tiny_policies.batch_of(5)
    back = round_trip(policy.preparation, policy.preparation.training(batch))
    preparation = policy.preparation
    actions = batch["action"].numpy()
    if preparation.processors.relative is not None:
        actions = preparation.processors.relative.to_relative(actions, batch["observation.state"].numpy())
    tokens = preparation.action_tokenizer.encode(preparation.processors.action.apply(actions))
    expected, _ = preparation.actions(tokens, batch["observation.state"].numpy())
    np.testing.assert_array_equal(back, expected)


def test_frames_near_an_episodes_end_are_left_out() -> None:
    policy = tiny_policies.new_policy()
    batch = tiny_policies.batch_of(4)
    some = measure(policy, Frames(batch, padded=(0, 3)), most=0, batch_size=1)  # type: ignore[arg-type]
    rows = {key: value[1:3] for key, value in batch.items()}
    alone = measure(policy, Frames(rows), most=0, batch_size=1)  # type: ignore[arg-type]
    assert some == alone
    first = measure(policy, Frames(batch, padded=(0, 3)), most=1, batch_size=1)  # type: ignore[arg-type]
    assert first is not None
    assert first["frames"] == 1  # not the first frame, which has none ahead
    with pytest.raises(PolicyError, match="no frame to measure on"):
        measure(policy, Frames(batch, padded=(0, 1, 2, 3)), most=0, batch_size=2)  # type: ignore[arg-type]


def test_it_can_be_stopped(tmp_path: Path) -> None:
    del tmp_path
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    policy = tiny_policies.new_policy()
    frames = Frames(tiny_policies.batch_of(4))
    assert measure(policy, frames, most=0, batch_size=2, stop=stop) is None  # type: ignore[arg-type]
