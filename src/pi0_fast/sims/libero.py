"""LIBERO: a Panda arm at tables, 130 tasks in five suites, with LeRobot's conventions, which its checkpoints expect.

State [x, y, z, ax, ay, az, left, right]: position of the gripper in metres, its orientation as axis times angle, the
positions of both fingers. Action [dx, dy, dz, dax, day, daz, gripper] in [-1, 1]: up to 5 cm and half a radian a step
(20 steps a second) and the gripper, which opens below 0 and closes above. Pictures are upright and mirrored: robosuite
gives them upside down, and LeRobot turns both axes around. What is observed was so one step of the physics (2 ms)
before the end of the control step, since that is when robosuite looks; states and pictures are robosuite's own.

Options, each with LeRobot's name and default where it has one:
    init_states     true: an episode begins in the task's fixed state number (seed modulo how many there are, 50);
                    false: objects are placed at random by the seed, as where demonstrations are recorded
    num_steps_wait  10: steps of doing nothing after the reset, while objects settle
    control_mode    "relative" or "absolute": a pose in place of a change of it
    hard_reset      true: the world is built anew for each episode; false: quicker, and the same to the last bit
    flip            "both", "height" (upright and not mirrored), or "none" (as robosuite gives it, upside down)
    control_freq    20 control steps a second

Needs `pi0-fast[libero]`. Left out: LIBERO-plus, and the segmentation and depth that robosuite offers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.sims import libero_package as package
from pi0_fast.sims import rendering
from pi0_fast.sims.libero_expert import PickAndPlace
from pi0_fast.sims.protocol import IMAGES, Episode, Expert, Settings, Simulator, SimulatorSpec, StepResult, observation
from pi0_fast.types import SimulatorError

#: Steps of an episode, as LeRobot has them; other suites end after OTHER_MAX_STEPS.
MAX_STEPS = {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
OTHER_MAX_STEPS = 500
STATE_NAMES = ("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "finger_left", "finger_right")
ACTION_NAMES = ("dx", "dy", "dz", "dax", "day", "daz", "gripper")
ABSOLUTE_NAMES = ("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "gripper")
SIZE = (360, 360)
#: Name here -> in the world.
CAMERAS = {
    "image": "agentview",
    "image2": "robot0_eye_in_hand",
    "frontview": "frontview",
    "birdview": "birdview",
    "sideview": "sideview",
}
USUAL_CAMERAS = ("image", "image2")
NOTHING = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)  # LeRobot's: with an open gripper
#: Shapes that only physics sees are in this group; robosuite does not draw them.
_COLLISION_GROUP = 0
#: What of the world's state a picture shows: where bodies, shapes, sites, cameras and lights are.
_DRAWN: tuple[str, ...] = (
    "qpos",
    "xpos",
    "xquat",
    "xmat",
    "xipos",
    "ximat",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
)
_DRAWN += ("cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
_FLIPS = {"both": (slice(None), slice(None, None, -1)), "height": (slice(None), slice(None))}
_FLIPS["none"] = (slice(None, None, -1), slice(None))


class LiberoSimulator:
    """See Simulator. Success is LIBERO's own, and does not end the episode."""

    def __init__(self, task: str, settings: Settings) -> None:
        suite, number, libero_task = _find(task)
        options = _Options(settings)
        package.check_assets()
        self._options, self._task, self._suite = options, libero_task, suite
        limit = np.ones(7, np.float32)
        if options.absolute:
            limit[:6] = np.inf
        self.spec = SimulatorSpec(
            env_type="libero",
            task=f"{suite}/{number}",
            text=libero_task.text,
            fps=settings.rate(options.control_freq),
            max_steps=settings.steps(MAX_STEPS.get(suite, OTHER_MAX_STEPS)),
            cameras=settings.chosen_cameras(dict.fromkeys(CAMERAS, SIZE), USUAL_CAMERAS),
            state_names=STATE_NAMES,
            action_names=ABSOLUTE_NAMES if options.absolute else ACTION_NAMES,
            action_low=-limit,
            action_high=limit,
        )
        self._states = package.initial_states(libero_task) if options.init_states else None
        self._fast = settings.fast_rendering
        self._renderer: rendering.OffscreenRenderer | None = None
        self._seen: Any = None  # the mujoco.MjData that is observed, and its model
        self._seen_model: Any = None
        self._environment = _environment(libero_task, options, self.spec.max_steps)
        self._watch()
        self._episode = Episode(self.spec)
        self._observed: dict[str, Any] = {}

    def _watch(self) -> None:
        """Keep the world as it is whenever robosuite looks at it, so that pictures can be drawn later, or never."""
        observables = rendering.load_with_mujoco("robosuite.utils.observables", package.EXTRA, "robosuite")

        def look(_: object) -> float:
            import mujoco

            model, data = self._model, self._environment.sim.data._data
            if self._seen_model is not model:
                self._seen, self._seen_model = mujoco.MjData(model), model
            for name in _DRAWN:
                getattr(self._seen, name)[:] = getattr(data, name)
            return 0.0

        look.__modality__ = "look"  # type: ignore[attr-defined]
        watching = observables.Observable("pi0_fast_look", look, sampling_rate=self._options.control_freq)
        self._environment.env.add_observable(watching)

    @property
    def _model(self) -> Any:
        return self._environment.sim.model._model

    def reset(self, seed: int) -> None:
        """A fixed initial state, or random places, of the seed; then the idle steps."""
        self._episode.begin(seed)
        self._environment.seed(int(seed))
        with package.quiet():
            self._observed = self._environment.reset()
        for robot in self._environment.robots:  # what a reset that is not hard leaves as it was
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)
            robot.controller.use_delta = True
        if self._states is not None:
            self._observed = self._environment.set_init_state(self._states[seed % len(self._states)])
        for _ in range(self._options.num_steps_wait):
            self._observed, _, _, _ = self._environment.step(NOTHING)
        for robot in self._environment.robots:
            robot.controller.use_delta = not self._options.absolute

    def step(self, action: np.ndarray) -> StepResult:
        """One control step; the reward is 1 where the task is done."""
        inside, clipped = self._episode.action(action)
        self._observed, reward, _, _ = self._environment.step(inside.astype(np.float64))
        success = bool(self._environment.check_success())
        return StepResult(success, self._episode.ended(), float(reward), {}, clipped)

    def observe(self, images: bool = True) -> dict[str, Any]:
        """State float32 [8], images uint8 [h, w, 3], text."""
        self._episode.begun()
        seen = self._observed
        parts = (seen["robot0_eef_pos"], axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"])
        return observation(self, np.concatenate(parts).astype(np.float32), images)

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """A picture of what was observed last; 70 ms at 360 x 360 without a GPU, and 1 s for the first of a world."""
        self._episode.check_camera(camera)
        if self._renderer is None or self._renderer.model is not self._model:
            self._close_renderer()
            self._renderer = rendering.OffscreenRenderer(
                self._model, fast=self._fast, hidden_groups=(_COLLISION_GROUP,)
            )
        height, width = size or self.spec.cameras[camera]
        image = self._renderer.render(self._seen, CAMERAS[camera.removeprefix(IMAGES)], height, width)
        return np.ascontiguousarray(image[_FLIPS[self._options.flip]])

    def expert(self) -> Expert | None:
        """Picks up and puts into the basket, in libero_object; None elsewhere, and in absolute control."""
        self._episode.begun()
        if self._suite != "libero_object" or self._options.absolute:
            return None
        return PickAndPlace(self._environment.env)

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def close(self) -> None:
        """Close the renderer and the world."""
        self._close_renderer()
        self._environment.close()


class _Options:
    """The adapter's options, checked."""

    def __init__(self, settings: Settings) -> None:
        defaults: dict[str, Any] = {
            "init_states": True,
            "num_steps_wait": 10,
            "control_mode": "relative",
            "hard_reset": True,
            "flip": "both",
            "control_freq": 20,
        }
        given = defaults | settings.checked_options(tuple(defaults))
        for name, default in defaults.items():
            if type(given[name]) is not type(default):
                raise SimulatorError(f"libero: option {name} is such as {default!r}, not {given[name]!r}")
        for name, allowed in (("control_mode", ("relative", "absolute")), ("flip", tuple(_FLIPS))):
            if given[name] not in allowed:
                raise SimulatorError(f"libero: option {name} is one of {', '.join(allowed)}, not {given[name]!r}")
        if given["num_steps_wait"] < 0 or given["control_freq"] < 1:
            raise SimulatorError("libero: option num_steps_wait is at least 0, and control_freq at least 1")
        self.init_states: bool = given["init_states"]
        self.num_steps_wait: int = given["num_steps_wait"]
        self.absolute: bool = given["control_mode"] == "absolute"
        self.hard_reset: bool = given["hard_reset"]
        self.flip: str = given["flip"]
        self.control_freq: int = given["control_freq"]


def axis_angle(quaternion: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Axis times angle in radians, [3], of a unit quaternion (x, y, z, w).

    The angle is 2 arccos w, from 0 to 2 pi, as in LeRobot: it does not jump where a gripper points down (w is 0).
    """
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(max(0.0, 1.0 - w * w))
    if sine <= 1e-10:
        return np.zeros(3)
    vector: npt.NDArray[np.float64] = quaternion[:3] / sine * (2.0 * np.arccos(w))
    return vector


def _environment(task: package.LiberoTask, options: _Options, max_steps: int) -> Any:
    """LIBERO's world of a task, which draws nothing by itself."""
    if not task.problem.is_file():
        raise SimulatorError(f"libero lacks {task.problem}: reinstall the package")
    wrapper = package.module("envs.env_wrapper")
    with package.quiet():
        world: Any = wrapper.ControlEnv(
            bddl_file_name=str(task.problem),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            control_freq=options.control_freq,
            hard_reset=options.hard_reset,
            horizon=max_steps + options.num_steps_wait + 1,
        )
    return world


def _find(name: str) -> tuple[str, int, package.LiberoTask]:
    """Suite, number and task of a name such as libero_object/3; SimulatorError where there is none."""
    suite, _, number = name.partition("/")
    known = package.suites()
    if suite not in known:
        raise SimulatorError(f"libero has no suite {suite!r}; it has {', '.join(known)}")
    tasks = known[suite]
    if not number.isascii() or not number.isdigit() or int(number) >= len(tasks):
        there = "; ".join(f"{suite}/{place} {task.text}" for place, task in enumerate(tasks))
        raise SimulatorError(f"libero has no task {name!r}; it has {there}")
    return suite, int(number), tasks[int(number)]


def open_simulator(task: str, settings: Settings) -> Simulator:
    """See `sims.make`."""
    return LiberoSimulator(task, settings)


def task_names() -> tuple[str, ...]:
    """All tasks of all suites, such as libero_object/0."""
    return tuple(f"{suite}/{number}" for suite, tasks in package.suites().items() for number in range(len(tasks)))


def preflight() -> None:
    """The package can be imported, its assets are there, and MuJoCo can render."""
    package.suites()
    package.check_assets()
    rendering.check_renderer()
