"""A command line in several processes on this machine, which find each other as those of torchrun do.

What is not here: any assertion.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import tiny_runs

#: No test waits longer for a process.
PATIENCE_S = 300.0
Done = subprocess.CompletedProcess[str]


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def environment(rank: int, count: int, port: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What torchrun sets, with one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    own = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**kept, **{name: str(value) for name, value in own.items()}, "OMP_NUM_THREADS": "1", **(extra or {})}


def start(
    lines: Sequence[list[str]],
    *,
    at: Mapping[int, tuple[str, str, int, str]] | None = None,
    number: int = signal.SIGKILL,
    extra: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """One process for each command line; `at`: which of them get a signal when, as in `tiny_runs.run`."""
    port = free_port()
    started = []
    for rank, line in enumerate(lines):
        module, name, calls, when = (at or {}).get(rank, ("", "", 0, ""))
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", tiny_runs.DRIVER, module, name, str(calls), when, str(number), *line],
                env=environment(rank, len(lines), port, extra),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    return started


def wait(started: list[subprocess.Popen[str]]) -> list[Done]:
    """How they ended; those that do not in time are killed, and the test fails."""
    end = time.monotonic() + PATIENCE_S
    ended = []
    try:
        for process in started:
            out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and those that load data
                process.communicate()
    return ended


def run(line: list[str], count: int = 2, **options: object) -> list[Done]:
    """The same command line in `count` processes."""
    return wait(start([line] * count, **options))  # type: ignore[arg-type]
