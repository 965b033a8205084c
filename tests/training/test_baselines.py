"""Naive chunks that errors are compared with, by hand, and what is shown of a measurement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_policies  # noqa: E402
from pi0_fast.training.baselines import beside, held_action, mean_action, measured_table, verdict  # noqa: E402
from pi0_fast.training.validation import measure  # noqa: E402

from test_validation import Frames  # noqa: E402  isort: skip


def test_the_first_action_held() -> None:
    wanted = np.array([[[1, 10], [2, 8], [4, 4]], [[0, 0], [0, 1], [0, 2]]], np.float32)
    held = held_action(wanted)
    np.testing.assert_array_equal(held, [[[1, 10]] * 3, [[0, 0]] * 3])
    np.testing.assert_allclose(np.abs(held - wanted).mean(axis=(0, 1)), [(0 + 1 + 3) / 6, (0 + 2 + 6 + 0 + 1 + 2) / 6])


@pytest.mark.parametrize("relative", [False, True])
def test_the_mean_of_the_training_data(relative: bool) -> None:
    settings: dict[str, Any] = {"use_relative_actions": True, "relative_exclude_joints": []} if relative else {}
    processors = tiny_policies.new_policy(**settings).preparation.processors
    batch = tiny_policies.batch_of(2)
    wanted, states = batch["action"].numpy(), batch["observation.state"].numpy()
    processors.action.statistics.pop("mean", None)
    assert np.isnan(mean_action(processors, wanted, states)).all()
    mean = np.arange(1, tiny_policies.ACTION + 1, dtype=np.float32)
    processors.action.statistics["mean"] = mean
    expected = mean + (states[:, None, : tiny_policies.ACTION] if relative else 0)
    found = mean_action(processors, wanted, states)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, np.broadcast_to(expected, wanted.shape), rtol=1e-6)


def test_they_are_measured_on_the_same_frames() -> None:
    policy = tiny_policies.new_policy()
    batch = tiny_policies.batch_of(5)
    mean = np.full(tiny_policies.ACTION, 0.5, np.float32)
    policy.preparation.processors.action.statistics["mean"] = mean
    values = measure(policy, Frames(batch), most=0, batch_size=2)  # type: ignore[arg-type]
    assert values is not None
    wanted = batch["action"].numpy().astype(np.float64)
    expected = np.abs(mean - wanted).mean(axis=(0, 1))
    assert values["mean_action_l1_by_dimension"] == pytest.approx(expected.tolist(), rel=1e-6)
    assert values["mean_action_l1"] == pytest.approx(expected.mean(), rel=1e-6)
    assert values["held_action_l1"] == pytest.approx(np.abs(wanted[:, :1] - wanted).mean(), rel=1e-6)
    del policy.preparation.processors.action.statistics["mean"]
    unknown = measure(policy, Frames(batch), most=0, batch_size=5)  # type: ignore[arg-type]
    assert unknown is not None
    assert unknown["mean_action_l1"] is unknown["mean_action_l1_by_dimension"] is None
    assert unknown["held_action_l1"] == pytest.approx(values["held_action_l1"])


VALUES: dict[str, Any] = {
    "frames": 7,
    "held_out": True,
    "action_l1": 0.15,
    "action_l1_by_dimension": [0.1, 0.2],
    "tokenizer_l1": 0.015,
    "tokenizer_l1_by_dimension": [0.01, 0.02],
    "mean_action_l1": None,
    "mean_action_l1_by_dimension": None,
    "held_action_l1": 2.0,
    "held_action_l1_by_dimension": [1.0, 3.0],
}


def test_a_policy_that_is_no_better_than_the_mean_is_told_of() -> None:
    assert verdict({"action_l1": 0.3, "mean_action_l1": 0.4}) is None
    assert "learned nothing useful yet" in (verdict({"action_l1": 0.4, "mean_action_l1": 0.4}) or "")
    assert verdict({"action_l1": 0.4, "mean_action_l1": float("nan")}) is None
    assert verdict({"action_l1": 0.4, "mean_action_l1": None}) is None


def test_the_table_has_a_row_for_each_joint() -> None:
    title, rows, headers = measured_table(VALUES, ("hip", "knee"))
    assert title == "Error of actions on 7 held-out frames, mean absolute, in the data's units"
    assert headers == ["dimension", "generated", "tokenizer alone", "first action held"]
    assert rows == [["0 hip", 0.1, 0.01, 1.0], ["1 knee", 0.2, 0.02, 3.0], ["mean", 0.15, 0.015, 2.0]]
    title, rows, _ = measured_table({**VALUES, "held_out": False}, None)
    assert "7 training frames" in title
    assert [row[0] for row in rows] == ["0", "1", "mean"]
    assert beside(VALUES) == "tokenizer alone 0.015, first action held 2"
