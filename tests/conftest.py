"""Fixtures of all tests. `shared` is the only way to the directory of recorded data and golden numbers."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Kernels are compiled on first use, which no deadline of one example should punish.
settings.register_profile("pi0_fast", deadline=None)
settings.load_profile("pi0_fast")

_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data directory: PI0_FAST_SHARED, else ../shared beside the repository; skips when absent."""
    path = Path(os.environ.get("PI0_FAST_SHARED", _REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared data directory at {path} (set PI0_FAST_SHARED)")
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes with one thread: tiny models are no slower, and tests side by side do not wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where PI0_FAST_REQUIRE_GOLDEN is set, a golden test that skips has failed: nobody compared the numbers."""
    report = yield
    if report.skipped and item.get_closest_marker("golden") and os.environ.get("PI0_FAST_REQUIRE_GOLDEN"):
        report.outcome = "failed"
        report.longrepr = f"golden test skipped although PI0_FAST_REQUIRE_GOLDEN is set: {report.longrepr}"
    return report
