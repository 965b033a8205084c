"""ALOHA: two arms with grippers over a table that pass a cube on or put a peg into a socket (gym-aloha).

State and action are the 14 joints, left arm before right: six angles in radians, and a gripper from 0 (closed) to 1
(open); an action is where the joints are to go. 50 steps per second, at most 400. Success ends the episode. There is
no expert. Needs `pi0-fast[aloha]`. Left out: control of the end effectors, which the package does not offer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pi0_fast.sims import rendering
from pi0_fast.sims.packages import load
from pi0_fast.sims.protocol import IMAGES, Episode, Expert, Settings, Simulator, SimulatorSpec, StepResult, observation
from pi0_fast.types import SimulatorError

TASKS = {
    "AlohaInsertion-v0": ("insertion", "Insert the peg into the socket."),
    "AlohaTransferCube-v0": (
        "transfer_cube",
        "Pick up the cube with the right arm and transfer it to the left arm.",
    ),
}
SIZE = (480, 640)
USUAL_CAMERAS = ("top",)
CAMERAS = dict.fromkeys(
    (*USUAL_CAMERAS, "angle", "front_close", "left_pillar", "right_pillar", "left_wrist", "right_wrist"), SIZE
)
FPS, MAX_STEPS = 50.0, 400


class AlohaSimulator:
    """See Simulator."""

    def __init__(self, task: str, settings: Settings) -> None:
        if task not in TASKS:
            raise SimulatorError(f"aloha has no task {task!r}; it has {', '.join(TASKS)}")
        settings.checked_options(())
        name, text = TASKS[task]
        self._environment = _module().AlohaEnv(name, obs_type="pixels_agent_pos")
        self._physics = self._environment._env.physics
        self._leave_pictures_out()
        low, high = self._limits()
        names = tuple(load("gym_aloha.constants", "aloha", "gym-aloha").JOINTS)
        self.spec = SimulatorSpec(
            env_type="aloha",
            task=task,
            text=text,
            fps=settings.rate(FPS),
            max_steps=settings.steps(MAX_STEPS),
            cameras=settings.chosen_cameras(CAMERAS, USUAL_CAMERAS),
            state_names=names,
            action_names=names,
            action_low=low,
            action_high=high,
        )
        self._renderer = rendering.OffscreenRenderer(self._physics.model.ptr, fast=settings.fast_rendering)
        self._episode = Episode(self.spec)
        self._state = np.zeros(len(names), np.float32)

    def _leave_pictures_out(self) -> None:
        """The package draws three large pictures at every step; here `render` draws those that are wanted."""
        task, nothing = self._environment._env.task, np.zeros((0, 0, 3), np.uint8)
        task.get_observation = lambda physics: {"qpos": task.get_qpos(physics), "images": {"top": nothing}}

    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        """What the motors can be told, float32 [14] each; the package declares -1 to 1, which is not what it obeys."""
        ranges = np.array(self._physics.model.actuator_ctrlrange)  # [16, 2]: each gripper has two fingers
        gripper = np.array([[0.0, 1.0]])  # the motors stop a little before either end
        joints = np.concatenate([ranges[:6], gripper, ranges[8:14], gripper]).astype(np.float32)
        return joints[:, 0], joints[:, 1]

    def reset(self, seed: int) -> None:
        """Objects at random places of the seed, the arms at rest."""
        self._episode.begin(seed)
        seen, _ = self._environment.reset(seed=int(seed))
        self._state = seen["agent_pos"].astype(np.float32)

    def step(self, action: np.ndarray) -> StepResult:
        """One control step; the reward counts the stages of the task, 4 is success."""
        inside, clipped = self._episode.action(action)
        seen, reward, ended, _, info = self._environment.step(inside)
        self._state = seen["agent_pos"].astype(np.float32)
        return StepResult(bool(info["is_success"]), self._episode.ended(bool(ended)), float(reward), {}, clipped)

    def observe(self, images: bool = True) -> dict[str, Any]:
        """State float32 [14], images uint8 [h, w, 3], text."""
        self._episode.begun()
        return observation(self, self._state.copy(), images)

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """A picture by one of the cameras."""
        self._episode.check_camera(camera)
        height, width = size or self.spec.cameras[camera]
        return self._renderer.render(self._physics.data.ptr, camera.removeprefix(IMAGES), height, width)

    def expert(self) -> Expert | None:
        """None: the package has no expert."""
        return None

    def close(self) -> None:
        """Close the renderer and the world."""
        self._renderer.close()
        self._environment.close()
        self._physics.free()


def _module() -> Any:
    return rendering.load_with_mujoco("gym_aloha.env", "aloha", "gym-aloha")


def open_simulator(task: str, settings: Settings) -> Simulator:
    """See `sims.make`."""
    return AlohaSimulator(task, settings)


def task_names() -> tuple[str, ...]:
    """Both tasks."""
    return tuple(TASKS)


def preflight() -> None:
    """The package can be imported, and MuJoCo can render."""
    _module()
    rendering.check_renderer()
