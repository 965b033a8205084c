"""Simulators in worker processes: the same results whatever the layout; crashes and hangs cost one episode."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi0_fast import sims
from pi0_fast.sims.pool import Film, Outcome, SimulatorPool
from pi0_fast.types import SimulatorError

TOP = "observation.images.top"


def toy(**options: Any) -> dict[str, Any]:
    return {"env_type": "toy", "task": "reach-green", "image_size": 8, "options": options}


def towards(observation: dict[str, Any], k: int) -> np.ndarray:
    """A policy without memory that depends on the observation: k steps to the middle."""
    step = np.clip(-observation["observation.state"], -1, 1)
    return np.stack([step * 0.9**i for i in range(k)])


def episodes(pool: SimulatorPool, seeds: list[int], chunks: int = 3) -> dict[int, list[Any]]:
    """Every seed's states and rewards over some chunks, on whatever slots the pool has."""
    waiting, found, at, left = list(seeds), {s: [] for s in seeds}, {}, {}
    for slot in range(min(len(pool), len(seeds))):
        at[slot] = waiting.pop(0)
        pool.reset(slot, at[slot])
    while at:
        for outcome in pool.wait():
            slot = outcome.slot
            seed = at[slot]
            if outcome.failure is not None:
                found[seed].append(outcome.failure)
                left[seed] = 0
            else:
                found[seed].append(outcome.observation["observation.state"].tolist())
                found[seed].append(outcome.observation[TOP].sum())
                found[seed].extend(result.reward for result in outcome.results)
            if left.setdefault(seed, chunks) > 0:
                left[seed] -= 1
                pool.run(slot, towards(outcome.observation, 4))
            elif waiting:
                at[slot] = waiting.pop(0)
                pool.reset(slot, at[slot])
            else:
                del at[slot]
    return found


def alone(seed: int, chunks: int = 3) -> list[Any]:
    """The obvious twin: one simulator in this process."""
    simulator = sims.make(**toy())
    simulator.reset(seed)
    seen = simulator.observe()
    found = [seen["observation.state"].tolist(), seen[TOP].sum()]
    for _ in range(chunks):
        rewards = [simulator.step(action).reward for action in towards(seen, 4)]
        seen = simulator.observe()
        found += [seen["observation.state"].tolist(), seen[TOP].sum(), *rewards]
    return found


@pytest.mark.parametrize(("slots", "processes"), [(1, 1), (3, 2)])
def test_results_depend_on_the_seed_alone(slots: int, processes: int) -> None:
    seeds = [3, 4, 5, 6, 7]
    with SimulatorPool([toy()] * slots, processes) as pool:
        assert len(pool) == slots
        assert pool.specs[-1].cameras == sims.make(**toy()).spec.cameras
        found = episodes(pool, seeds)
    assert found == {seed: alone(seed) for seed in seeds}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "fault asked for at step 5 of seed 4"),
        ("crash", "the simulator's process died (exit code 66)"),
        ("hang", "no answer within 1 s (killed)"),
    ],
)
def test_a_fault_costs_one_episode(fault: str, reason: str) -> None:
    seeds = [3, 4, 5, 6]
    with SimulatorPool([toy(fault=fault, fault_step=5, fault_seed=4)] * 3, 1, timeout=1.0) as pool:
        found = episodes(pool, seeds)
        assert pool.replaced == (0 if fault == "raise" else 1)
    assert reason in found[4][-1]
    # The others shared the process with it: they were brought back to where they were.
    assert {s: found[s] for s in seeds if s != 4} == {s: alone(s) for s in seeds if s != 4}


def test_an_idle_episode_survives_the_crash_of_its_neighbour() -> None:
    with SimulatorPool([toy(), toy(fault="crash")], 1) as pool:
        for slot in (0, 1):
            pool.reset(slot, 9)
        first = pool.wait_for([0, 1])[0]
        pool.run(1, np.zeros((1, 2)))
        assert "died" in str(pool.wait_for([1])[1].failure)
        pool.run(0, towards(first.observation, 4))
        after = pool.wait_for([0])[0]
        assert after.failure is None
        assert after.observation["observation.state"].tolist() == alone(9, 1)[2]
        with pytest.raises(SimulatorError, match="slot 1 has no running episode"):
            pool.run(1, np.zeros((1, 2)))
        pool.reset(1, 10)
        assert pool.wait_for([1])[1].failure is None


def test_a_run_stops_at_success_and_at_the_end_and_films() -> None:
    simulator = sims.make(**toy())
    simulator.reset(0)
    expert, actions = simulator.expert(), []
    assert expert is not None
    while not actions or not simulator.step(actions[-1]).success:
        actions.append(expert())
    n = len(actions)
    long = np.concatenate([np.stack(actions), np.zeros((80, 2), np.float32)])
    film = Film(TOP, (6, 10), every=2)
    with SimulatorPool([toy()]) as pool:
        pool.reset(0, 0, film=film)
        assert [f.shape for f in pool.wait()[0].frames] == [(6, 10, 3)]
        pool.run(0, long, film=film, images=False)
        (stopped,) = pool.wait()
        assert [r.success for r in stopped.results] == [False] * (n - 1) + [True]
        assert len(stopped.frames) == n // 2
        assert TOP not in stopped.observation
        pool.run(0, np.zeros((99, 2)), stop_at_success=False)
        (ended,) = pool.wait()
        assert len(ended.results) == 60 - n
        assert ended.results[-1].ended
        pool.run(0, np.zeros((1, 2)))
        assert "the episode ended after 60 steps" in str(pool.wait()[0].failure)


def test_waiting_may_have_an_end() -> None:
    with SimulatorPool([toy(fault="hang")], timeout=60.0) as pool:
        pool.reset(0, 0)
        assert len(pool.wait(timeout=60.0)) == 1
        pool.run(0, np.zeros((1, 2)))
        assert pool.wait(timeout=0.05) == []
        with pytest.raises(SimulatorError, match="slot 0 is busy"):
            pool.run(0, np.zeros((1, 2)))
        pool._processes[0]._process.kill()
        (outcome,) = pool.wait(timeout=60.0)
        assert outcome.failure == "the simulator's process died (signal SIGKILL)"


def test_what_cannot_be_built_is_said_at_once() -> None:
    with pytest.raises(SimulatorError, match="toy has no task 'fly'"):
        SimulatorPool([toy(), {"env_type": "toy", "task": "fly"}])
    with pytest.raises(SimulatorError, match="a pool needs"):
        SimulatorPool([])


def test_wrong_use_is_refused() -> None:
    with SimulatorPool([toy()]) as pool:
        pool.reset(0, 1)
        with pytest.raises(SimulatorError, match="slot 0 is busy"):
            pool.reset(0, 2)
        assert isinstance(pool.wait()[0], Outcome)
        assert pool.wait() == []
        with pytest.raises(SimulatorError, match="no command to wait for"):
            pool.wait_for([0])
        with pytest.raises(SimulatorError, match=r"shape \[steps, dimensions\], not \[2\]"):
            pool.run(0, np.zeros(2))
        pool.run(0, np.full((1, 2), np.nan))
        assert "not finite in dx" in str(pool.wait()[0].failure)
    with pytest.raises(SimulatorError, match="the pool is closed"):
        pool.reset(0, 1)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("fault", [{}, {"fault": "hang"}])
def test_workers_end_with_their_parent_however_that_ends(fault: dict[str, Any]) -> None:
    """Also where they are busy with a simulator that never comes back."""
    code = f"""
import numpy as np, os, signal
from pi0_fast.sims import worker
from pi0_fast.sims.pool import SimulatorPool
pool = SimulatorPool([{toy(**fault)!r}], 1)
pool.reset(0, 1)
pool.wait()
pool.run(0, np.zeros((1, 2)))
print(pool._processes[0]._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    worker = Path(f"/proc/{int(done.stdout)}/stat")
    until = time.monotonic() + 60
    while worker.exists() and worker.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the worker is still there"
        time.sleep(0.05)


def test_a_patience_beyond_what_the_system_can_wait() -> None:
    with SimulatorPool([toy()], 1, timeout=1e300) as pool:
        pool.reset(0, 1)
        assert pool.wait()[0].failure is None
