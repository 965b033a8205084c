"""PushT: a disc pushes a T-shaped block onto its outline, seen from above (gym-pusht).

State [x, y] of the disc and action [x, y], where the disc is to go, both in pixels of a 512 x 512 table with y down.
10 steps per second, at most 300. Success is 95 % of the outline covered, and ends the episode. There is no expert.
Needs `pi0-fast[pusht]`, and no OpenGL. Left out: the block's keypoints as an observation.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from pi0_fast.sims.packages import load
from pi0_fast.sims.protocol import Episode, Expert, Settings, Simulator, SimulatorSpec, StepResult, observation
from pi0_fast.types import SimulatorError

TASKS = {"PushT-v0": "Push the T-shaped block onto the T-shaped target."}
CAMERAS = {"top": (96, 96)}
FPS, MAX_STEPS, TABLE = 10.0, 300, 512.0


class PushTSimulator:
    """See Simulator."""

    def __init__(self, task: str, settings: Settings) -> None:
        if task not in TASKS:
            raise SimulatorError(f"pusht has no task {task!r}; it has {', '.join(TASKS)}")
        settings.checked_options(())
        settings.no_fast_rendering()
        self.spec = SimulatorSpec(
            env_type="pusht",
            task=task,
            text=TASKS[task],
            fps=settings.rate(FPS),
            max_steps=settings.steps(MAX_STEPS),
            cameras=settings.chosen_cameras(CAMERAS),
            state_names=("x", "y"),
            action_names=("x", "y"),
            action_low=np.zeros(2, np.float32),
            action_high=np.full(2, TABLE, np.float32),
        )
        self._environment = _module().PushTEnv(obs_type="state", render_mode="rgb_array")
        self._episode = Episode(self.spec)
        self._state = np.zeros(2, np.float32)

    def reset(self, seed: int) -> None:
        """Disc and block at random places of the seed."""
        self._episode.begin(seed)
        seen, _ = self._environment.reset(seed=int(seed))
        self._state = seen[:2].astype(np.float32)

    def step(self, action: np.ndarray) -> StepResult:
        """A tenth of a second of pushing; `info` has the share of the outline that is covered."""
        inside, clipped = self._episode.action(action)
        seen, reward, ended, _, info = self._environment.step(inside)
        self._state = seen[:2].astype(np.float32)
        measures = {"coverage": float(info["coverage"])}
        success, over = bool(info["is_success"]), self._episode.ended(bool(ended))
        return StepResult(success, over, float(reward), measures, clipped)

    def observe(self, images: bool = True) -> dict[str, Any]:
        """State float32 [2], image uint8 [h, w, 3], text."""
        self._episode.begun()
        return observation(self, self._state.copy(), images)

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """The table from above, as the package's own `pixels` observation draws it."""
        self._episode.check_camera(camera)
        height, width = size or self.spec.cameras[camera]
        self._environment.observation_height, self._environment.observation_width = height, width
        return np.ascontiguousarray(self._environment._render(visualize=False))

    def expert(self) -> Expert | None:
        """None: the package has no expert."""
        return None

    def close(self) -> None:
        """Close the world."""
        self._environment.close()


def _module() -> Any:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame only draws into memory here
    return load("gym_pusht.envs.pusht", "pusht", "gym-pusht")


def open_simulator(task: str, settings: Settings) -> Simulator:
    """See `sims.make`."""
    return PushTSimulator(task, settings)


def task_names() -> tuple[str, ...]:
    """The one task."""
    return tuple(TASKS)


def preflight() -> None:
    """The package can be imported."""
    _module()
