"""What was decided before training without anybody spelling it out: printed, and kept for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One thing that was decided before training: what, its value, and why."""

    what: str
    value: str
    why: str
