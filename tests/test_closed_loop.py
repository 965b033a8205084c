"""The loop of a policy and simulators in the toy world: who succeeds, what is counted, what fails and what fits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pi0_fast.closed_loop import Recorded, check_fit, fitted_environment, run, side_by_side  # noqa: E402
from pi0_fast.reports.evaluation import FAILED, SUCCESS, TIME  # noqa: E402
from pi0_fast.simulation_config import EnvConfig  # noqa: E402
from pi0_fast.types import PolicyError, SimulatorError  # noqa: E402
from toy_policies import HORIZON, Seeing, StandIn, Still, new_policy  # noqa: E402

GREEN = EnvConfig(type="toy", task="reach-green", cameras=["top"])
SEEDS = range(100_000, 100_004)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_one_that_sees_succeeds_and_one_that_stands_still_does_not() -> None:
    env = EnvConfig(type="toy", task="reach-green,reach-blue", cameras=["top"], max_steps=20)
    seeing = run(new_policy(Seeing), env, SEEDS, batch_size=2)
    assert [(result.task, result.seed) for result in seeing] == [
        (task, seed) for task in ("reach-green", "reach-blue") for seed in SEEDS
    ]
    assert {result.end for result in seeing} == {SUCCESS}
    assert all(0 < result.steps < 20 for result in seeing)
    assert all(result.chunks == -(-result.steps // HORIZON) for result in seeing)
    assert all(len(result.latencies_ms) == result.chunks for result in seeing)
    assert all(result.tokens == 3 * result.chunks for result in seeing)
    still = run(new_policy(Still), GREEN, SEEDS[:2], batch_size=2)
    assert {(result.end, result.steps, result.chunks) for result in still} == {(TIME, 60, 15)}


def test_results_do_not_depend_on_how_many_run_side_by_side() -> None:
    policy = new_policy()  # random weights, whose actions depend on image and state
    env = EnvConfig(type="toy", task="reach-blue", cameras=["top"], max_steps=12)

    def numbers(batch_size: int, seeds: Any = SEEDS) -> list[tuple[Any, ...]]:
        results = run(policy, env, seeds, batch_size=batch_size)
        return [(r.seed, r.end, r.steps, r.reward, r.clipped, r.chunks, r.tokens) for r in results]

    alone = numbers(1)
    assert numbers(3) == alone
    assert numbers(2, [SEEDS[3], SEEDS[1]]) == [alone[1], alone[3]]


def test_drawn_actions_depend_on_the_episode_alone() -> None:
    policy = new_policy(temperature=1.0)
    env = EnvConfig(type="toy", task="reach-blue", cameras=["top"], max_steps=8)

    def rewards(batch_size: int) -> list[float]:
        return [result.reward for result in run(policy, env, SEEDS[:3], batch_size=batch_size)]

    alone = rewards(1)
    assert rewards(3) == alone
    torch.manual_seed(5)
    assert rewards(2) == alone


def test_n_action_steps_of_a_chunk_are_executed_in_order() -> None:
    class Counting(StandIn):
        """Its chunks say which step of the chunk is executed: x moves by 0.01 times the step's number."""

        def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
            del batch, row
            return np.stack([0.1 * np.arange(1, HORIZON + 1), np.zeros(HORIZON)], axis=1)

    places: list[float] = []

    class Noting(Counting):
        def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
            places.append(float(batch["observation.state"][row][0]))
            return super().moves(batch, row)

    env = EnvConfig(type="toy", task="reach-green", cameras=["top"], max_steps=6)
    (result,) = run(new_policy(Noting, n_action_steps=2), env, [100_001], batch_size=1)
    assert (result.steps, result.chunks) == (6, 3)
    # The first call is there twice: it is tried out before it is timed.
    assert np.diff(places[1:]) == pytest.approx([0.03, 0.03], abs=1e-6)
    places.clear()
    run(new_policy(Noting), env, [100_001], batch_size=1)
    assert np.diff(places[1:]) == pytest.approx([0.1], abs=1e-6)


def test_actions_beyond_the_limits_are_counted() -> None:
    class Hasty(StandIn):
        def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
            del batch, row
            return np.array([[1.0, 1.0], [1.5, 0.0], [-1.0, 0.0], [0.0, -9.0]])

    env = EnvConfig(type="toy", task="reach-green", cameras=["top"], max_steps=8)
    (result,) = run(new_policy(Hasty), env, [100_001], batch_size=1)
    assert (result.steps, result.clipped) == (8, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("step", [0, HORIZON - 1])
def test_actions_that_are_no_numbers_are_blamed_on_the_policy(value: float, step: int) -> None:
    """Not on the simulator, whose failures are left out of comparisons and run again."""

    class Broken(StandIn):
        def moves(self, batch: dict[str, Any], row: int) -> np.ndarray:
            moves = np.zeros((HORIZON, 2))
            moves[step, 1] = value if row == len(batch["task"]) - 1 else 0.0
            return moves

    said = rf"action is {value} in dy at step {step} of a chunk \(reach-green, seed 100001\)"
    with pytest.raises(PolicyError, match=said):
        run(new_policy(Broken), GREEN, SEEDS[:2], batch_size=2)


def test_malformed_chunks_are_counted_without_constraints_only() -> None:
    env = EnvConfig(type="toy", task="reach-green", cameras=["top"], max_steps=8)
    (free,) = run(new_policy(constrained=False, max_decoding_steps=12), env, [100_001], batch_size=1)
    assert (free.chunks, free.malformed) == (2, 2)
    (bound,) = run(new_policy(), env, [100_001], batch_size=1)
    assert (bound.chunks, bound.malformed) == (2, 0)


@pytest.mark.parametrize(("fault", "reason"), [("raise", "fault asked for at step 4"), ("crash", "died")])
def test_a_simulator_that_fails_fails_its_episode_only(fault: str, reason: str) -> None:
    options = f'{{"fault": "{fault}", "fault_step": 4, "fault_seed": 100001}}'
    env = EnvConfig(type="toy", task="reach-green", cameras=["top"], options=options)
    results = run(new_policy(Seeing), env, SEEDS, batch_size=3)
    assert [result.end for result in results] == [SUCCESS, FAILED, SUCCESS, SUCCESS]
    assert reason in str(results[1].failure)
    assert results[1].steps == 4
    whole = run(new_policy(Seeing), GREEN, SEEDS, batch_size=3)
    assert [result.steps for result in results if result.end == SUCCESS] == [
        result.steps for result in whole if result.seed != 100_001
    ]


def test_a_simulator_that_hangs_fails_its_episode() -> None:
    options = '{"fault": "hang", "fault_step": 0}'
    env = EnvConfig(type="toy", task="reach-green", cameras=["top"], options=options)
    (result,) = run(new_policy(Still), env, [100_001], batch_size=1, timeout_s=0.5)
    assert result.end == FAILED
    assert "no answer within 0.5 s" in str(result.failure)


def test_what_has_been_run_is_skipped_and_a_stop_leaves_the_rest() -> None:
    done = {("reach-green", seed) for seed in SEEDS[1:]}
    assert [result.seed for result in run(new_policy(Seeing), GREEN, SEEDS, skip=done)] == [SEEDS[0]]
    seen: list[Recorded] = []
    results = run(new_policy(Seeing), GREEN, SEEDS, batch_size=1, on_episode=seen.append, stop=lambda: len(seen) == 2)
    assert [result.seed for result in results] == list(SEEDS[:2])


def test_the_first_episodes_are_filmed() -> None:
    seen: dict[int, Recorded] = {}
    run(
        new_policy(Seeing),
        GREEN,
        SEEDS[:3],
        batch_size=2,
        films=2,
        on_episode=lambda recorded: seen.__setitem__(recorded.result.seed, recorded),
    )
    for seed in SEEDS[:2]:
        assert len(seen[seed].frames) == seen[seed].result.steps + 1
        assert seen[seed].frames[0].shape == (240, 240, 3)
        assert seen[seed].fps == 10.0
    assert seen[SEEDS[2]].frames == ()


def test_a_policy_that_sees_nothing_gets_no_image_but_is_filmed() -> None:
    seen: list[Recorded] = []
    policy = new_policy(cameras=0)
    env, specs = fitted_environment(policy, EnvConfig(type="toy", task="reach-green", max_steps=8))
    assert len(specs[0].cameras) == 2
    run(policy, env, [100_001], films=1, on_episode=seen.append)
    assert (seen[0].result.end, len(seen[0].frames)) == (TIME, 9)
    assert not [name for name in policy.counts if name.startswith(("missing", "unused"))]


def test_the_policy_is_left_as_it_was() -> None:
    policy = new_policy().train()
    policy.counts = Counter(rows=5)
    env = EnvConfig(type="toy", task="reach-green", cameras=["top"], max_steps=4)
    run(policy, env, [100_001], batch_size=1)
    assert policy.training
    assert policy.counts["rows"] == 6  # the call that is tried out does not count


def test_how_many_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert side_by_side(0, 50) == (3, 3)
    assert side_by_side(0, 2) == (2, 2)
    assert side_by_side(8, 50) == (8, 3)
    assert side_by_side(1, 50) == (1, 1)


# --- does it fit? ---------------------------------------------------------------------------------------------------


def test_cameras_and_sizes_are_those_of_the_policy() -> None:
    env, specs = fitted_environment(new_policy(cameras=1), EnvConfig(type="toy", task="reach-green"))
    assert (env.cameras, env.image_size) == (["top"], [32, 32])
    assert specs[0].cameras == {"observation.images.top": (32, 32)}
    env, specs = fitted_environment(new_policy(cameras=2), EnvConfig(type="toy", task="reach-green", image_size=16))
    assert (env.cameras, env.image_size) == (["top", "hand"], 16)
    assert set(specs[0].cameras.values()) == {(16, 16)}


def test_a_renamed_camera_is_found() -> None:
    policy = new_policy()
    processors = policy.preparation.processors
    names = {"observation.images.hand": "observation.images.top"}
    policy.preparation.processors = processors.with_rename_map(names, policy.config)
    env, _ = fitted_environment(policy, EnvConfig(type="toy", task="reach-green"))
    assert env.cameras == ["hand"]
    (result,) = run(policy, env, [100_001], batch_size=1)
    assert result.end == TIME
    assert not [name for name in policy.counts if name.startswith(("missing", "unused"))]


def test_with_a_map_the_policy_does_without_cameras_that_there_are_not() -> None:
    images = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 32, 32]} for name in ("base", "right")}
    state = {"observation.state": {"type": "STATE", "shape": [2]}}
    policy = new_policy(input_features={**images, **state})
    names = {"observation.images.top": "observation.images.base"}
    processors = policy.preparation.processors
    policy.preparation.processors = processors.with_rename_map(names, policy.config)
    env, _ = fitted_environment(policy, EnvConfig(type="toy", task="reach-green", max_steps=4))
    assert env.cameras == ["top"]
    (result,) = run(policy, env, [100_001])
    assert result.end == TIME
    assert policy.counts["missing observation.images.right"] == 1


def inputs(cameras: dict[str, list[int]], state: int = 2) -> dict[str, Any]:
    images = {f"observation.images.{name}": {"type": "VISUAL", "shape": shape} for name, shape in cameras.items()}
    return {"input_features": {**images, "observation.state": {"type": "STATE", "shape": [state]}}}


def toy_spec(**changes: Any) -> Any:
    import dataclasses

    from pi0_fast import sims

    return dataclasses.replace(sims.make("toy", "reach-green").spec, **changes)


def test_what_does_not_fit_is_named_on_both_sides() -> None:
    policy = new_policy()
    config = policy.config
    check_fit(config, {}, toy_spec(cameras={"observation.images.top": (32, 32)}))
    with pytest.raises(
        PolicyError, match=r"action has 2 dimensions \(dx, dy\), that of toy reach-green has 1 \(grip\)"
    ):
        check_fit(config, {}, toy_spec(action_names=("grip",)))
    with pytest.raises(PolicyError, match=r"state has 2 dimensions, that of toy reach-green has 3 \(x, y, z\)"):
        check_fit(config, {}, toy_spec(state_names=("x", "y", "z")))
    with pytest.raises(
        PolicyError, match=r"cameras are observation.images.top, those of .* are observation.images.hand"
    ):
        check_fit(config, {}, toy_spec(cameras={"observation.images.hand": (32, 32)}))
    with pytest.raises(PolicyError, match=r"those of toy reach-green are none"):
        check_fit(config, {}, toy_spec(cameras={}))
    with pytest.raises(PolicyError, match=r"action is \(dx, dy\), that of .* is \(dy, dx\): the same in another order"):
        check_fit(config, {}, toy_spec(action_names=("dy", "dx")))
    check_fit(config, {}, toy_spec(action_names=("a", "b"), cameras={"observation.images.top": (32, 32)}))
    with pytest.raises(PolicyError, match=r"would become 'x'"):
        check_fit(config, {"observation.state": "x"}, toy_spec())


def test_an_unknown_camera_says_which_there_are() -> None:
    policy = new_policy()
    policy.config.input_features = new_policy(**inputs({"wrist": [3, 32, 32]})).config.input_features
    with pytest.raises(PolicyError, match=r"observation.images.wrist.*observation.images.top.*--rename_map"):
        fitted_environment(policy, EnvConfig(type="toy", task="reach-green"))


def test_an_unknown_task_is_found_before_the_first_episode() -> None:
    with pytest.raises(SimulatorError, match=r"no task 'reach-gren'; did you mean reach-green"):
        fitted_environment(new_policy(), EnvConfig(type="toy", task="reach-blue,reach-gren"))


def test_there_is_no_trace_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(new_policy(Seeing), GREEN, SEEDS[:1], films=1)
    assert list(tmp_path.iterdir()) == []
