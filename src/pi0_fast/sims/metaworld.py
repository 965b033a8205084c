"""Meta-World: a Sawyer arm with a gripper on a table, 50 tasks, each with a scripted expert.

State [x, y, z, gripper]: position of the hand in metres, opening of the gripper from 0 to 1. Action [dx, dy, dz,
gripper] in [-1, 1]: the hand's target moves by up to 1 cm a step, and the fingers push apart (-1) or together (1).
80 steps per second, at most 500. Where the object and the goal are, only the images say; the expert knows.
The corner cameras hang upside down in the simulator; they are turned here, so that every image is upright.
Needs `pi0-fast[metaworld]`. Left out: the goal as an observation, and the benchmark's fixed sets of goals.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from pi0_fast.sims import rendering
from pi0_fast.sims.packages import load
from pi0_fast.sims.protocol import IMAGES, Episode, Expert, Settings, Simulator, SimulatorSpec, StepResult, observation
from pi0_fast.types import SimulatorError

FPS, MAX_STEPS = 80.0, 500
STATE_NAMES, ACTION_NAMES = ("x", "y", "z", "gripper"), ("dx", "dy", "dz", "gripper")
SIZE = (224, 224)
USUAL_CAMERAS = ("corner4", "behindGripper")
_UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
CAMERAS = dict.fromkeys((*USUAL_CAMERAS, "corner", "corner2", "corner3", "topview", "gripperPOV"), SIZE)

#: What a policy is told, in the words of LeRobot's Meta-World datasets, so that what is trained on those understands.
TEXTS = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "disassemble-v3": "Pick a nut out of a peg",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "hand-insert-v3": "Insert the gripper into a hole",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "hammer-v3": "Hammer a screw on the wall",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-insert-side-v3": "Insert a peg sideways",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "reach-v3": "Reach a goal position",
    "push-back-v3": "Push the puck to a goal",
    "push-v3": "Push the puck to a goal",
    "pick-place-v3": "Pick and place a puck to a goal",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "soccer-v3": "Kick a soccer into the goal",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
    "window-open-v3": "Push and open a window",
    "window-close-v3": "Push and close a window",
}


class MetaWorldSimulator:
    """See Simulator. Success is Meta-World's own, and does not end the episode."""

    def __init__(self, task: str, settings: Settings) -> None:
        if task not in TEXTS:
            raise SimulatorError(f"metaworld has no task {task!r}; it has {', '.join(TEXTS)}")
        settings.checked_options(())
        limit = np.ones(4, np.float32)
        self.spec = SimulatorSpec(
            env_type="metaworld",
            task=task,
            text=TEXTS[task],
            fps=settings.rate(FPS),
            max_steps=settings.steps(MAX_STEPS, MAX_STEPS),
            cameras=settings.chosen_cameras(CAMERAS, USUAL_CAMERAS),
            state_names=STATE_NAMES,
            action_names=ACTION_NAMES,
            action_low=-limit,
            action_high=limit,
        )
        self._environment = _environment(task)
        self._policy_class = load("metaworld.policies", "metaworld").ENV_POLICY_MAP[task]
        self._renderer = rendering.OffscreenRenderer(self._environment.model, fast=settings.fast_rendering)
        self._episode = Episode(self.spec)
        self._seen = np.zeros(39)

    def reset(self, seed: int) -> None:
        """Object and goal at random places of the seed."""
        self._episode.begin(seed)
        self._environment.seed(int(seed))  # reset(seed=) is ignored there
        self._environment.reset()
        # Meta-World moves the object last, and computes where its parts are with the first step only: until then
        # pictures and what the expert sees would be those of the episode before.
        load("mujoco", "metaworld").mj_forward(self._environment.model, self._environment.data)
        self._seen = self._environment._get_obs()

    def step(self, action: np.ndarray) -> StepResult:
        """One control step; `info` has Meta-World's own measures."""
        inside, clipped = self._episode.action(action)
        self._seen, reward, _, _, info = self._environment.step(inside)
        measures = {name: float(value) for name, value in info.items()}
        return StepResult(bool(info["success"]), self._episode.ended(), float(reward), measures, clipped)

    def observe(self, images: bool = True) -> dict[str, Any]:
        """State float32 [4], images uint8 [h, w, 3], text."""
        self._episode.begun()
        return observation(self, self._seen[:4].astype(np.float32), images)

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """An upright picture; about 10 ms without a GPU where rendering is fast, ten times that where it is not."""
        self._episode.check_camera(camera)
        name, (height, width) = camera.removeprefix(IMAGES), size or self.spec.cameras[camera]
        image = self._renderer.render(self._environment.data, name, height, width)
        return np.ascontiguousarray(image[::-1, ::-1]) if name in _UPSIDE_DOWN else image

    def expert(self) -> Expert | None:
        """Meta-World's scripted policy for the task, with no memory of an earlier episode; unclipped."""
        self._episode.begun()
        policy = self._policy_class()

        def act() -> np.ndarray:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Constant.s. may be too high")  # said where it clips
                return np.asarray(policy.get_action(self._seen), np.float32)

        return act

    def close(self) -> None:
        """Close the renderer and the world."""
        self._renderer.close()
        self._environment.close()


def _environment(task: str) -> Any:
    """Meta-World's environment of a task, with the goal drawn anew by each reset and seen by the expert."""
    environment = rendering.load_with_mujoco("metaworld.env_dict", "metaworld").ALL_V3_ENVIRONMENTS[task]()
    environment._partially_observable = False
    environment.__dict__.pop("sawyer_observation_space", None)  # cached from when the goal was hidden
    environment._set_task_called = True
    environment._freeze_rand_vec = False
    environment.seeded_rand_vec = True
    return environment


def open_simulator(task: str, settings: Settings) -> Simulator:
    """See `sims.make`."""
    return MetaWorldSimulator(task, settings)


def task_names() -> tuple[str, ...]:
    """All 50."""
    return tuple(TEXTS)


def preflight() -> None:
    """The package can be imported, and MuJoCo can render."""
    rendering.load_with_mujoco("metaworld.env_dict", "metaworld")
    rendering.check_renderer()
