"""Adapters of real simulators, each skipped where its package is absent; and what is said where one is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi0_fast import sims
from pi0_fast.sims import rendering
from pi0_fast.sims.pool import SimulatorPool
from pi0_fast.types import SimulatorError

STATE, TOP = "observation.state", "observation.images.top"
CORNER, GRIPPER = "observation.images.corner4", "observation.images.behindGripper"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=False
    )


# ----------------------------------------------------------------------------------------------------
# What is missing


@pytest.mark.parametrize(
    ("env_type", "module", "line"),
    [
        ("metaworld", "metaworld", "metaworld is not installed: pip install 'pi0-fast[metaworld]'"),
        ("libero", "libero", "hf-libero is not installed: pip install 'pi0-fast[libero]'"),
        ("pusht", "gym_pusht", "gym-pusht is not installed: pip install 'pi0-fast[pusht]'"),
        ("aloha", "gym_aloha", "gym-aloha is not installed: pip install 'pi0-fast[aloha]'"),
        ("gym", "gymnasium", "gymnasium is not installed: pip install 'pi0-fast[gym]'"),
    ],
)
def test_a_missing_package_is_one_line_with_the_remedy(env_type: str, module: str, line: str) -> None:
    tasks = {"metaworld": "reach-v3", "libero": "libero_object/0", "pusht": "PushT-v0", "aloha": "AlohaInsertion-v0"}
    task = tasks.get(env_type, "Pendulum-v1")
    code = (
        f"import sys, os; os.environ['MUJOCO_GL'] = 'egl'\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from pi0_fast import sims\n"
        "from pi0_fast.types import SimulatorError\n"
        f"for call in (lambda: sims.preflight({env_type!r}), lambda: sims.make({env_type!r}, {task!r})):\n"
        "    try: call()\n"
        "    except SimulatorError as error: print(error)\n"
    )
    done = run(code)
    assert done.stdout == f"{line}\n{line}\n", done.stderr


def hide(folder: Path, *libraries: str) -> None:
    """Put files that are no libraries where a process with this LD_LIBRARY_PATH looks first."""
    for name in libraries:
        for suffix in ("", *(f".{number}" for number in range(10))):
            (folder / f"lib{name}.so{suffix}").write_bytes(b"")


HIDE = """
from pi0_fast import sims
from pi0_fast.types import SimulatorError
try: sims.preflight("metaworld")
except SimulatorError as error: print(error)
simulator = sims.make("metaworld", "reach-v3")
simulator.reset(0)
simulator.step([0, 0, 0, 0])
print(simulator.observe(images=False)["observation.state"].shape)
try: simulator.observe()
except SimulatorError as error: print(error)
simulator.close()
"""


@needs("metaworld")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems bring their own OpenGL")
def test_a_missing_renderer_is_one_line_with_the_remedy_and_physics_needs_none(tmp_path: Path) -> None:
    hide(tmp_path, "EGL", "OSMesa")
    done = run(HIDE, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout, done.stderr
    preflight, state, picture = done.stdout.splitlines()
    for line in (preflight, picture):
        assert line.startswith("MuJoCo cannot render here (egl: ")
        assert "; osmesa: " in line
        assert line.endswith("install a renderer: apt-get install -y libegl1 libgl1 libgl1-mesa-dri")
    assert state == "(4,)"
    # Where the variable names what is missing, MuJoCo itself cannot be imported.
    done = run(HIDE.split("simulator")[0], LD_LIBRARY_PATH=str(tmp_path), MUJOCO_GL="osmesa")
    (line,) = done.stdout.splitlines()
    assert line.startswith("MuJoCo cannot render here with MUJOCO_GL=osmesa (")
    assert line.endswith("apt-get install -y libosmesa6, or unset MUJOCO_GL")


@needs("mujoco")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems bring their own OpenGL")
def test_the_backend_is_chosen_where_it_is_unset_and_only_there(tmp_path: Path) -> None:
    hide(tmp_path, "EGL")
    show = "import os; from pi0_fast.sims import rendering as r; print(r.choose_backend(), os.environ.get('MUJOCO_GL'))"
    assert run(show, MUJOCO_GL="osmesa").stdout == "osmesa osmesa\n"
    if rendering._works("egl") is None:
        assert run(show).stdout == "egl egl\n"
        assert run("import mujoco\n" + show).stdout == "egl egl\n"  # not too late
    if rendering._works("osmesa") is None:
        assert run(show, LD_LIBRARY_PATH=str(tmp_path)).stdout == "osmesa osmesa\n"


# ----------------------------------------------------------------------------------------------------
# Meta-World


def rollout(simulator: sims.Simulator, seed: int, steps: int) -> list[np.ndarray]:
    """States of an episode that the expert drives."""
    simulator.reset(seed)
    expert = simulator.expert()
    assert expert is not None
    states = [simulator.observe(images=False)[STATE]]
    for _ in range(steps):
        simulator.step(expert())
        states.append(simulator.observe(images=False)[STATE])
    return states


@pytest.fixture(scope="module")
def _can_render() -> None:
    """Skips where MuJoCo is installed but nothing renders."""
    pytest.importorskip("mujoco")
    rendering.choose_backend()
    try:
        rendering.check_renderer()
    except SimulatorError as error:
        pytest.skip(str(error))


@needs("metaworld")
def test_metaworld_has_a_text_and_an_expert_for_every_task() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    assert set(sims.task_names("metaworld")) == set(ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP)
    assert len(sims.task_names("metaworld")) == 50


@needs("metaworld")
@pytest.mark.parametrize("task", ["drawer-open-v3", "pick-place-v3"])
def test_metaworld_experts_succeed_and_episodes_depend_on_the_seed_alone(task: str) -> None:
    used = sims.make("metaworld", task)
    for seed in (0, 1):
        used.reset(seed)
        expert = used.expert()
        assert expert is not None
        result = used.step(expert())
        while not result.success and not result.ended:
            result = used.step(expert())
        assert result.success
    fresh = sims.make("metaworld", task)
    again, first, other = rollout(used, 5, 30), rollout(fresh, 5, 30), rollout(fresh, 6, 30)
    assert np.array_equal(again, first)
    assert not np.array_equal(first, other)
    fresh.close()
    used.close()


@needs("metaworld")
@pytest.mark.usefixtures("_can_render")
def test_metaworld_shows_the_object_where_it_is_from_the_first_picture_on() -> None:
    """Not where it was in the episode before: only the hand moves in the first step, by some millimetres."""
    simulator = sims.make("metaworld", "drawer-open-v3", image_size=64, fast_rendering=True)
    first = {}
    for seed in (3, 4, 3):
        simulator.reset(seed)
        before, seen = simulator.render(CORNER), simulator.expert()
        assert seen is not None
        action = seen()
        simulator.step(np.zeros(4))
        after = simulator.render(CORNER)
        assert np.abs(before.astype(int) - after).mean() < 0.5
        if seed in first:
            assert np.array_equal(before, first[seed][0])
            assert np.array_equal(action, first[seed][1])
        first[seed] = before, action
    assert np.abs(first[3][0].astype(int) - first[4][0]).mean() > 1
    simulator.close()


@needs("metaworld")
def test_metaworld_describes_itself() -> None:
    simulator = sims.make("metaworld", "drawer-open-v3", cameras=["behindGripper"], image_size=(48, 64), max_steps=9)
    spec = simulator.spec
    assert (spec.text, spec.fps, spec.max_steps) == ("Open a drawer", 80.0, 9)
    assert spec.cameras == {GRIPPER: (48, 64)}
    simulator.reset(0)
    before = simulator.observe(images=False)[STATE]
    result = simulator.step(np.array([2.0, 0, 0, -1]))
    assert result.clipped
    for _ in range(7):
        assert not simulator.step(np.array([1.0, 0, 0, -1])).ended
    after = simulator.observe(images=False)[STATE]
    assert 0.03 < after[0] - before[0] < 0.09  # nine centimetres are asked for, and the hand follows
    assert abs(after[1] - before[1]) < 0.01
    assert simulator.step(np.zeros(4)).ended
    with pytest.raises(SimulatorError, match="at most 500, not 501"):
        sims.make("metaworld", "drawer-open-v3", max_steps=501)
    with pytest.raises(SimulatorError, match="metaworld has no task 'drawer-open-v2'; it has assembly-v3"):
        sims.make("metaworld", "drawer-open-v2")
    simulator.close()


@needs("metaworld")
@pytest.mark.usefixtures("_can_render")
def test_metaworld_images_are_upright_and_fast_ones_show_the_same() -> None:
    scenes = {}
    for fast in (False, True):
        simulator = sims.make("metaworld", "drawer-open-v3", image_size=64, fast_rendering=fast)
        simulator.reset(3)
        scenes[fast] = simulator.observe()
        # In the upright picture the wooden table lies below and the gray void above.
        image = scenes[fast][CORNER].astype(int)
        wood = (image[..., 0] - image[..., 2] > 25) & (image[..., 0] < 200) & (image[..., 1] > 60)
        assert wood[40:].mean() > 4 * wood[:24].mean()
        assert simulator.render(CORNER, (300, 700)).shape == (300, 700, 3)  # larger than MuJoCo's own buffer
        assert np.array_equal(simulator.render(CORNER), scenes[fast][CORNER])
        simulator.close()
    difference = abs(scenes[True][CORNER].astype(int) - scenes[False][CORNER])
    assert 0 < difference.mean() < 12


@needs("metaworld")
@pytest.mark.usefixtures("_can_render")
def test_metaworld_pictures_are_the_packages_own() -> None:
    import mujoco
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    simulator = sims.make("metaworld", "drawer-open-v3", cameras=["corner4", "behindGripper"], image_size=64)
    simulator.reset(3)
    seen = simulator.observe()
    for key, turn in ((CORNER, 2), (GRIPPER, 0)):
        camera = key.removeprefix("observation.images.")
        theirs: Any = ALL_V3_ENVIRONMENTS["drawer-open-v3"](
            render_mode="rgb_array", camera_name=camera, width=64, height=64
        )
        theirs._set_task_called, theirs._freeze_rand_vec, theirs.seeded_rand_vec = True, False, True
        theirs.seed(3)
        theirs.reset()
        mujoco.mj_forward(theirs.model, theirs.data)  # as ours: see the test of the first picture
        assert np.array_equal(np.rot90(theirs.render(), turn), seen[key])
        theirs.close()
    simulator.close()


@needs("metaworld")
@pytest.mark.usefixtures("_can_render")
def test_metaworld_in_a_pool_gives_the_same_pictures() -> None:
    arguments = {"env_type": "metaworld", "task": "drawer-open-v3", "image_size": 32, "fast_rendering": True}
    here = sims.make(**arguments)
    here.reset(4)
    here.step(np.ones(4))
    with SimulatorPool([arguments]) as pool:
        pool.reset(0, 4)
        pool.wait()
        pool.run(0, np.ones((1, 4)))
        there = pool.wait()[0].observation
    assert all(np.array_equal(there[key], value) for key, value in here.observe().items())
    here.close()


# ----------------------------------------------------------------------------------------------------
# PushT, ALOHA, Gymnasium

PUSHT = "gym_pusht:gym_pusht/PushT-v0"
MAPPING: dict[str, Any] = {
    "state": "agent_pos",
    "images": {"top": "pixels"},
    "kwargs": {"obs_type": "pixels_agent_pos"},
    "text": "Push.",
    "action_names": ["x", "y"],
}


@needs("gym_pusht")
def test_pusht_and_the_same_by_a_mapping_of_keys() -> None:
    ours = sims.make("pusht", "PushT-v0")
    mapped = sims.make("gym", PUSHT, options=MAPPING)
    assert (mapped.spec.text, mapped.spec.action_names, mapped.spec.state_names) == (
        "Push.",
        ("x", "y"),
        ("state_0", "state_1"),
    )
    assert (mapped.spec.fps, mapped.spec.max_steps, mapped.spec.cameras) == (10.0, 300, ours.spec.cameras)
    assert np.array_equal(mapped.spec.action_high, ours.spec.action_high)
    for simulator in (ours, mapped):
        simulator.reset(2)
    for _ in range(12):
        a, b = (simulator.step(np.array([256.0, 600.0])) for simulator in (ours, mapped))
        assert (a.reward, a.success, a.clipped) == (b.reward, b.success, b.clipped) == (a.reward, False, True)
    a, b = ours.observe(), mapped.observe()
    assert np.array_equal(a[STATE], b[STATE])
    assert np.array_equal(a[TOP], b[TOP])
    assert a[STATE][1] > 490  # the disc went to the lower edge ...
    blue = np.argwhere((a[TOP][..., 2] > 200) & (a[TOP][..., 0] < 120)).mean(0)
    assert blue[0] > 85  # ... which is below in the picture
    assert ours.expert() is None
    ours.reset(2)
    assert not np.array_equal(ours.observe()[STATE], a[STATE])
    assert ours.render(TOP, (30, 50)).shape == mapped.render(TOP, (30, 50)).shape == (30, 50, 3)


@needs("gym_aloha")
@pytest.mark.usefixtures("_can_render")
def test_aloha() -> None:
    simulator = sims.make("aloha", "AlohaTransferCube-v0", image_size=(48, 64), fast_rendering=True)
    spec = simulator.spec
    assert spec.cameras == {TOP: (48, 64)}
    assert (len(spec.action_names), spec.fps, spec.max_steps) == (14, 50.0, 400)
    assert spec.action_names[6] == "left_arm_gripper"
    assert spec.action_high[6] == 1.0
    simulator.reset(1)
    rest = simulator.observe()
    assert rest[STATE][2] == np.float32(1.16)  # the elbow, beyond the limits of 1 that the package declares
    for _ in range(20):
        result = simulator.step(rest[STATE])
    assert not result.clipped
    moved = simulator.observe()[STATE]
    assert abs(moved - rest[STATE]).max() < 0.05
    red = rest[TOP].astype(int)
    red = np.argwhere((red[..., 0] > 120) & (red[..., 1] < 60))
    assert len(red) > 2  # the cube, on the right half
    assert red[:, 1].mean() > 32
    simulator.reset(2)
    assert not np.array_equal(simulator.observe()[TOP], rest[TOP])
    simulator.reset(1)
    assert np.array_equal(simulator.observe()[TOP], rest[TOP])
    simulator.close()


@needs("gymnasium")
def test_gym_mistakes_are_named() -> None:
    with pytest.raises(SimulatorError, match=r"cannot make 'No-v0' \(a package is imported first"):
        sims.make("gym", "No-v0")
    with pytest.raises(SimulatorError, match=r"a vector of numbers as action; this environment takes Discrete"):
        sims.make("gym", "CartPole-v1")
    for arguments, message in [
        ({"image_size": 3}, "the environment sets the size"),
        ({"options": {"picture": 1}}, "no option 'picture'; it has state, images"),
        (
            {"options": {"state": "pixels"}},
            "option state names 'pixels', which is not observed; there is only one array",
        ),
        ({"options": {"rotate": ["top"]}}, "option rotate names top"),
        ({"options": {"action_names": ["a", "b"]}}, "option action_names needs 1 different names, not a, b"),
        ({"options": {"images": ["render"]}}, "option images is a map"),
        ({"fps": 10}, "runs at 30 control steps"),
    ]:
        with pytest.raises(SimulatorError, match=message):
            sims.make("gym", "Pendulum-v1", **arguments)  # type: ignore[arg-type]
    simulator = sims.make("gym", "Pendulum-v1", max_steps=5)
    simulator.reset(0)
    with pytest.raises(SimulatorError, match=r"info has no is_success or success .*say \"terminated\""):
        simulator.step(np.zeros(1))
    simulator = sims.make("gym", "Pendulum-v1", max_steps=5, options={"success": "terminated"})
    simulator.reset(0)
    assert [simulator.step(np.zeros(1)).ended for _ in range(5)] == [False] * 4 + [True]
    simulator.close()


@needs("gym_pusht")
def test_no_step_may_follow_the_end_that_a_simulator_sets() -> None:
    simulator = sims.make("pusht", "PushT-v0")
    simulator.reset(0)
    world: Any = simulator._environment  # type: ignore[attr-defined]
    world.block.angle = float(world.goal_pose[2])  # turns about its centre of gravity, so the position comes second
    world.block.position = world.goal_pose[:2].tolist()
    world.agent.position = (20, 20)
    result = simulator.step(np.array([20.0, 20.0]))
    assert result.success
    assert result.ended
    assert result.info["coverage"] > 0.95
    with pytest.raises(SimulatorError, match="the episode ended after 1 steps"):
        simulator.step(np.array([20.0, 20.0]))


@needs("gymnasium")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gym_actions_at_the_limits_are_within_them(dtype: str) -> None:
    """Limits such as 0.1 are others in float32 and in float64, and an environment may check its own."""
    code = f"""
import gymnasium, numpy as np
from pi0_fast import sims

low, high = np.array([-0.1, -0.3]), np.array([0.1, 0.7])

class Strict(gymnasium.Env):
    metadata = {{"render_fps": 10}}
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(low.astype({dtype!r}), high.astype({dtype!r}), dtype=np.{dtype})

    def __init__(self, render_mode=None): pass
    def reset(self, seed=None, options=None): return np.zeros(2), {{}}
    def step(self, action):
        assert action.dtype == {dtype!r} and self.action_space.contains(action), action.tolist()
        return np.zeros(2), 0.0, False, False, {{"is_success": False}}

gymnasium.register("Strict-v0", entry_point=Strict, max_episode_steps=9)
simulator = sims.make("gym", "Strict-v0")
simulator.reset(0)
print([simulator.step(action).clipped for action in ([9, 9], [-9, -9], low / 2, high / 2)])
"""
    done = run(code)
    assert done.stdout.strip() == "[True, True, False, False]", done.stderr


@needs("gym_pusht")
def test_gym_pictures_can_be_turned() -> None:
    turned = sims.make("gym", PUSHT, options=MAPPING | {"rotate": ["top"]})
    plain = sims.make("gym", PUSHT, options=MAPPING)
    for simulator in (turned, plain):
        simulator.reset(0)
    assert np.array_equal(turned.observe()[TOP], plain.observe()[TOP][::-1, ::-1])
    with pytest.raises(SimulatorError, match="which of these is the state: pixels, agent_pos"):
        sims.make("gym", PUSHT, options={"kwargs": {"obs_type": "pixels_agent_pos"}})
