"""Processes that run episodes: a simulator that hangs ends its process, whatever it hangs in, and its job is named."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from pi0_fast.episode_workers import ProcessDied, answering, episode_workers, simulator_of

TOY = {"env_type": "toy", "task": "reach-green"}


class Stuck:
    """A simulator that never comes back from a step, in a library that holds the interpreter's lock."""

    def step(self) -> None:
        ctypes.PyDLL(None).sleep(3600)


def reset(seed: int) -> list[float]:
    with answering(simulator_of(TOY)) as simulator:
        simulator.reset(seed)
        return list(simulator.observe(images=False)["observation.state"])


def hang() -> None:
    simulator: Any = Stuck()
    with answering(simulator) as watched:
        watched.step()  # type: ignore[call-arg]


@pytest.mark.skipif(sys.platform == "win32", reason="the C library is found in another way there")
def test_a_simulator_that_hangs_with_the_lock_ends_its_process() -> None:
    with episode_workers(1, 2.0) as workers:
        before, hung, after = workers.submit(reset, 1), workers.submit(hang), workers.submit(reset, 2)
        with pytest.raises(ProcessDied, match=r"^the simulator hung in the third: no answer within --timeout_s=2$"):
            hung.result("the third")
        assert before.result("the first") == reset(1)
        assert after.result("the last") == reset(2)


def test_without_processes_nobody_watches() -> None:
    with episode_workers(0, 1e-9) as workers:
        assert workers.submit(reset, 1).result("it") == reset(1)


def test_a_limit_beyond_what_the_system_can_wait() -> None:
    with episode_workers(1, 1e300) as workers:
        assert workers.submit(reset, 1).result("it") == reset(1)
