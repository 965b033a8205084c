"""The plain records that travel between the rooms of the package, and its error classes.

Numpy only, no behaviour beyond construction. Files of every room may import this one; it imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Pi0FastError(Exception):
    """Base of every error that a user can cause and mend; the message names the culprit and the way out."""


class DatasetError(Pi0FastError, ValueError):
    """A dataset is missing, damaged, inconsistent, or does not hold what was asked of it."""


class TokenizerError(Pi0FastError, ValueError):
    """Chunks, ids or a saved tokenizer cannot be used as they are."""


class PolicyError(Pi0FastError, ValueError):
    """A checkpoint, a policy's configuration, or what a policy is given cannot be used as it is."""


class SimulatorError(Pi0FastError, RuntimeError):
    """A simulator is not installed, cannot render here, or does not know what is asked of it."""


class UsageError(Pi0FastError, ValueError):
    """A command or configuration is wrong: unknown flag, impossible value, contradicting settings."""


@dataclass(frozen=True)
class Feature:
    """One column of a LeRobot dataset as `meta/info.json` declares it.

    Attributes:
        key: column name, e.g. ``action``.
        dtype: as declared, e.g. ``float32``, ``video``.
        shape: without the time axis; ``(26,)`` for a 26-dimensional action.
        names: one name per dimension for one-dimensional features (nesting removed), or None when not declared.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class EpisodeRecord:
    """What the metadata says of one episode: its index, its number of frames, its task texts."""

    index: int
    length: int
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Episode:
    """The frames of one episode, column by column.

    Attributes:
        index: episode index in the dataset.
        columns: key -> array [T, ...]; float columns as float32 [T, D] (a scalar column has D = 1),
            integer columns as int64 [T].
    """

    index: int
    columns: dict[str, np.ndarray] = field(repr=False)

    @property
    def length(self) -> int:
        """Number of frames T (0 without columns)."""
        return len(next(iter(self.columns.values()))) if self.columns else 0
