"""The toy world, and through it what every simulator promises."""

from __future__ import annotations

import numpy as np
import pytest

from pi0_fast import sims
from pi0_fast.types import SimulatorError

TOP, HAND, STATE = "observation.images.top", "observation.images.hand", "observation.state"


def test_the_description_and_the_observations_agree() -> None:
    simulator = sims.make("toy", "reach-blue", image_size=(24, 40))
    spec = simulator.spec
    assert (spec.env_type, spec.task, spec.fps, spec.max_steps) == ("toy", "reach-blue", 10.0, 60)
    assert spec.cameras == {TOP: (24, 40), HAND: (24, 40)}
    simulator.reset(7)
    seen = simulator.observe()
    assert set(seen) == {STATE, TOP, HAND, "task"}
    assert seen["task"] == spec.text == "Move the dot to the blue square."
    assert (seen[STATE].shape, seen[STATE].dtype) == ((len(spec.state_names),), np.float32)
    assert (seen[TOP].shape, seen[TOP].dtype) == ((24, 40, 3), np.uint8)
    assert set(simulator.observe(images=False)) == {STATE, "task"}
    assert simulator.render(TOP, (11, 12)).shape == (11, 12, 3)


def test_images_are_upright_and_show_what_the_state_says() -> None:
    simulator = sims.make("toy", "reach-green", image_size=100)
    simulator.reset(0)
    expert = simulator.expert()
    assert expert is not None
    for direction in ([0, 1], [1, 0]):
        for _ in range(7):
            simulator.step(np.array(direction))
        seen = simulator.observe()
        red = np.argwhere((seen[TOP] == (200, 40, 40)).all(-1)).mean(0)
        x, y = seen[STATE]
        assert abs(red - [(1 - y) * 50 - 0.5, (x + 1) * 50 - 0.5]).max() < 3.0  # a dot at the edge is cut off
        centre = np.argwhere((seen[HAND] == (200, 40, 40)).all(-1)).mean(0)
        assert abs(centre - 49.5).max() < 0.6


@pytest.mark.parametrize("task", sims.task_names("toy"))
def test_the_expert_succeeds_and_what_counts_as_success_is_the_task(task: str) -> None:
    simulator = sims.make("toy", task)
    other = sims.make("toy", next(name for name in sims.task_names("toy") if name != task))
    for seed in range(30):
        simulator.reset(seed)
        other.reset(seed)
        expert = simulator.expert()
        assert expert is not None
        for _ in range(simulator.spec.max_steps):
            action = expert()
            assert action.dtype == np.float32
            result, elsewhere = simulator.step(action), other.step(action)
            assert result.clipped == bool((abs(action) > 1).any())
            if result.success:
                break
        assert result.success
        assert not elsewhere.success  # the squares are apart
        assert not result.ended


def test_an_episode_depends_on_its_seed_alone() -> None:
    used, fresh = sims.make("toy", "reach-green"), sims.make("toy", "reach-green")
    used.reset(1)
    used.step(np.ones(2))
    used.reset(2)
    fresh.reset(2)
    for _ in range(3):
        assert used.step(np.array([0.3, -0.2])) == fresh.step(np.array([0.3, -0.2]))
        a, b = used.observe(), fresh.observe()
        assert all(np.array_equal(a[key], b[key]) for key in (STATE, TOP, HAND))
    fresh.reset(3)
    assert not np.array_equal(fresh.observe()[TOP], b[TOP])


def test_an_episode_ends_once() -> None:
    simulator = sims.make("toy", "reach-green", max_steps=3)
    with pytest.raises(SimulatorError, match=r"call reset\(seed\) before anything else"):
        simulator.step(np.zeros(2))
    simulator.reset(0)
    assert [simulator.step(np.zeros(2)).ended for _ in range(3)] == [False, False, True]
    with pytest.raises(SimulatorError, match="the episode ended after 3 steps"):
        simulator.step(np.zeros(2))
    simulator.reset(0)
    assert not simulator.step(np.zeros(2)).ended


def test_wrong_use_is_refused_and_named() -> None:
    simulator = sims.make("toy", "reach-green", cameras=["top"])
    simulator.reset(0)
    for action, message in [
        (np.zeros(3), r"shape \(2,\) \(dx, dy\), not \(3,\)"),
        (np.zeros((1, 2)), r"not \(1, 2\)"),
        (np.array([0, np.inf]), "not finite in dy"),
    ]:
        with pytest.raises(SimulatorError, match=message):
            simulator.step(action)
    assert simulator._episode.steps == 0  # type: ignore[attr-defined]
    with pytest.raises(
        SimulatorError, match=r"was made with observation.images.top, not with 'observation.images.hand'"
    ):
        simulator.render(HAND)
    for seed in (-1, 2**31, 1.5, True):
        with pytest.raises(SimulatorError, match="a seed is a whole number"):
            simulator.reset(seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cameras": ["side"]}, "no camera 'side'; it has top, hand"),
        ({"cameras": ["top", TOP]}, "named twice in top, top"),
        ({"image_size": 0}, r"\(height, width\), not 0"),
        ({"image_size": (3, 4, 5)}, "an image size"),
        ({"fast_rendering": True}, "drop fast_rendering"),
        ({"max_steps": 0}, "max_steps must be at least 1, not 0"),
        ({"fps": 30}, "runs at 10 control steps per second, not at 30"),
        ({"options": {"colour": 1}}, "no option 'colour'; it has fault"),
        ({"options": {"fault_step": 1}}, "need the option fault"),
        ({"options": {"fault": "melt"}}, "fault is one of raise, crash, hang"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SimulatorError, match=message):
        sims.make("toy", "reach-green", **arguments)  # type: ignore[arg-type]


def test_names_are_checked() -> None:
    with pytest.raises(
        SimulatorError, match="no simulator 'nothing'; there are metaworld, libero, pusht, aloha, gym, toy"
    ):
        sims.make("nothing", "x")
    with pytest.raises(SimulatorError, match="toy has no task 'x'; it has reach-green, reach-blue"):
        sims.make("toy", "x")
    sims.preflight("toy")
    assert sims.make("toy", "reach-green", cameras=[]).spec.cameras == {}
    assert sims.make("toy", "reach-green", fps=10).spec.fps == 10.0


def test_a_policy_can_be_told_something_else() -> None:
    simulator = sims.make("toy", "reach-green", text="Stay where you are.")
    simulator.reset(3)
    assert (simulator.spec.text, simulator.observe()["task"]) == ("Stay where you are.", "Stay where you are.")
