"""LeRobot datasets: open, check, read columns (v2.0, v2.1, v3.0), write v3.0.

Public names are loaded on first use: importing this package imports neither pyarrow nor huggingface_hub, and
nothing here ever imports torch. Pictures (`cameras.py`, and cameras of the writer) need PyAV and Pillow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi0_fast.data.reader import LeRobotReader, open_dataset
    from pi0_fast.data.writer import LeRobotWriter

__all__ = ["LeRobotReader", "LeRobotWriter", "open_dataset"]

_HOMES = {
    "LeRobotReader": "pi0_fast.data.reader",
    "LeRobotWriter": "pi0_fast.data.writer",
    "open_dataset": "pi0_fast.data.reader",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pi0_fast.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
