"""What an error of actions is compared with: chunks that need no policy, and the table at the end of a run.

An error of 0.05 says nothing by itself. The same frames are therefore predicted in two naive ways: always the mean of
the training data, and the chunk's own first action held to its end. Left out: the measuring (validation.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.report import Table
from pi0_fast.processors import PolicyProcessors

FloatArray = npt.NDArray[np.float32]

#: Name of a measured error -> what made it. Each has its values by dimension under that name + "_by_dimension".
ERRORS = {
    "action_l1": "generated",
    "tokenizer_l1": "tokenizer alone",
    "mean_action_l1": "mean action",
    "held_action_l1": "first action held",
}


def mean_action(processors: PolicyProcessors, wanted: npt.NDArray[Any], states: FloatArray) -> FloatArray:
    """The mean of the training data as the prediction of every chunk.

    Args:
        processors: of the policy; the mean is that of relative actions where those are predicted.
        wanted: [B, H, D], whose shape is predicted.
        states: [B, S] of the first steps, in the data's units.

    Returns:
        [B, H, D] in the data's units; NaN where the policy's statistics have no mean.
    """
    mean = processors.action.statistics.get("mean")
    if mean is None or not np.isfinite(mean).all():
        return np.full(wanted.shape, np.nan, np.float32)
    chunks = np.broadcast_to(mean.astype(np.float32), wanted.shape).copy()
    return chunks if processors.relative is None else processors.relative.to_absolute(chunks, states)


def held_action(wanted: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Each chunk's own first action at all of its steps: [B, H, D]."""
    return np.broadcast_to(wanted[:, :1], wanted.shape)


def beside(values: Mapping[str, Any]) -> str:
    """The errors that that of the policy is compared with, on one line."""
    names = [name for name in ERRORS if name != "action_l1" and values.get(name) is not None]
    return ", ".join(f"{ERRORS[name]} {values[name]:.3g}" for name in names)


def verdict(values: Mapping[str, Any]) -> str | None:
    """What to say of a policy that is no better than not to look at anything; None of any other.

    Args:
        values: of `validation.measure`.
    """
    mean = values.get("mean_action_l1")
    if mean is None or not values["action_l1"] >= mean:  # False also where there is no mean
        return None
    return "no better than the mean action: this policy has learned nothing useful yet"


def measured_table(values: Mapping[str, Any], names: Sequence[str] | None) -> Table:
    """The errors of a measurement by dimension, in the data's units, with their mean below.

    Args:
        values: of `validation.measure`, with ``held_out``.
        names: of the action's dimensions.
    """
    columns = [name for name in ERRORS if values.get(f"{name}_by_dimension") is not None]
    size = len(values["action_l1_by_dimension"])
    labels = [f"{dim} {names[dim]}" if names is not None and dim < len(names) else str(dim) for dim in range(size)]
    rows: list[list[Any]] = [
        [label, *(float(values[f"{name}_by_dimension"][dim]) for name in columns)] for dim, label in enumerate(labels)
    ]
    rows.append(["mean", *(float(values[name]) for name in columns)])
    kind = "held-out" if values["held_out"] else "training"
    title = f"Error of actions on {values['frames']} {kind} frames, mean absolute, in the data's units"
    return title, rows, ["dimension", *(ERRORS[name] for name in columns)]
