"""Fixtures of all tests. `shared` is the only way to the directory of recorded data and golden numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data directory: PI0_FAST_SHARED, else ../shared beside the repository; skips when absent."""
    path = Path(os.environ.get("PI0_FAST_SHARED", _REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared data directory at {path} (set PI0_FAST_SHARED)")
    return path
