"""A flat world of one dot and two squares in numpy: what records, replays and evaluates where no simulator is.

The dot is to be driven onto the square that the task names. Where the squares are, only the images show
(`top`: the whole table; `hand`: what surrounds the dot), and which of them counts, only the text. It exists for
tests and first tries, so it can also be told to misbehave (`fault`). Left out: any physics beyond an integrator.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from pi0_fast.sims.protocol import Episode, Expert, Settings, Simulator, SimulatorSpec, StepResult, observation
from pi0_fast.types import SimulatorError

TASKS = {
    "reach-green": "Move the dot to the green square.",
    "reach-blue": "Move the dot to the blue square.",
}
CAMERAS = {"top": (32, 32), "hand": (32, 32)}
FPS, MAX_STEPS = 10.0, 60
#: Faults: what happens at `fault_step` of the episode with seed `fault_seed` (every episode where it is not given).
FAULTS = ("raise", "crash", "hang")
_OPTIONS = ("fault", "fault_step", "fault_seed")

# The table is [-1, 1] x [-1, 1] with y up; lengths are in its units.
_STEP, _REACHED, _SQUARE, _DOT = 0.1, 0.1, 0.14, 0.08
_TABLE = np.array([225, 220, 210], np.uint8)
_OUTSIDE = np.array([40, 40, 45], np.uint8)
_GREEN, _BLUE = np.array([40, 160, 70], np.uint8), np.array([50, 80, 200], np.uint8)
_RED = np.array([200, 40, 40], np.uint8)


class ToySimulator:
    """See Simulator. State [x, y] of the dot; an action [dx, dy] in [-1, 1] moves it by a tenth of that."""

    def __init__(self, task: str, settings: Settings) -> None:
        if task not in TASKS:
            raise SimulatorError(f"toy has no task {task!r}; it has {', '.join(TASKS)}")
        settings.no_fast_rendering()
        self._fault = _fault(settings.checked_options(_OPTIONS))
        limit = np.ones(2, np.float32)
        self.spec = SimulatorSpec(
            env_type="toy",
            task=task,
            text=TASKS[task],
            fps=settings.rate(FPS),
            max_steps=settings.steps(MAX_STEPS),
            cameras=settings.chosen_cameras(CAMERAS),
            state_names=("x", "y"),
            action_names=("dx", "dy"),
            action_low=-limit,
            action_high=limit,
        )
        self._episode = Episode(self.spec)
        self._seed = -1
        self._dot = np.zeros(2)
        self._squares = np.zeros((2, 2))

    def reset(self, seed: int) -> None:
        """Dot and squares at random places of the seed, at least 0.5 apart."""
        self._episode.begin(seed)
        self._seed = int(seed)
        draw = np.random.default_rng(self._seed)
        while True:
            places = draw.uniform(-0.85, 0.85, (3, 2))
            distances = np.linalg.norm(places[[0, 0, 1]] - places[[1, 2, 2]], axis=1)
            if distances.min() >= 0.5:
                break
        self._dot, self._squares = places[0], places[1:]

    @property
    def _target(self) -> np.ndarray:
        target: np.ndarray = self._squares[list(TASKS).index(self.spec.task)]
        return target

    def step(self, action: np.ndarray) -> StepResult:
        """Move the dot; it stops at the edge of the table."""
        inside, clipped = self._episode.action(action)
        self._misbehave()
        self._dot = np.clip(self._dot + _STEP * inside, -1, 1)
        distance = float(np.linalg.norm(self._dot - self._target))
        success = distance < _REACHED
        return StepResult(success, self._episode.ended(), -distance, {"distance": distance}, clipped)

    def observe(self, images: bool = True) -> dict[str, Any]:
        """State float32 [2], images uint8 [h, w, 3], text."""
        self._episode.begun()
        return observation(self, self._dot.astype(np.float32), images)

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """The table from above (`top`), or the part within 0.5 of the dot (`hand`); y points up."""
        self._episode.check_camera(camera)
        height, width = size or self.spec.cameras[camera]
        centre, reach = (self._dot, 0.5) if camera.endswith(".hand") else (np.zeros(2), 1.0)
        x = centre[0] + reach * ((np.arange(width) + 0.5) / width * 2 - 1)[None, :]
        y = centre[1] - reach * ((np.arange(height) + 0.5) / height * 2 - 1)[:, None]
        image = np.where((np.maximum(abs(x), abs(y)) <= 1)[..., None], _TABLE, _OUTSIDE)
        for colour, (at_x, at_y) in zip((_GREEN, _BLUE), self._squares, strict=True):
            image[np.maximum(abs(x - at_x), abs(y - at_y)) <= _SQUARE] = colour
        image[(x - self._dot[0]) ** 2 + (y - self._dot[1]) ** 2 <= _DOT**2] = _RED
        return image

    def expert(self) -> Expert | None:
        """Straight to the target, at full speed until it is near; unclipped."""
        self._episode.begun()
        return lambda: ((self._target - self._dot) / _STEP * 0.5).astype(np.float32)

    def close(self) -> None:
        """Nothing to free."""

    def _misbehave(self) -> None:
        if self._fault is None:
            return
        kind, step, seed = self._fault
        if self._episode.steps != step + 1 or seed not in (None, self._seed):
            return
        if kind == "raise":
            raise SimulatorError(f"toy: fault asked for at step {step} of seed {self._seed}")
        if kind == "crash":
            os._exit(66)
        time.sleep(3600)


def _fault(options: dict[str, Any]) -> tuple[str, int, int | None] | None:
    """What to do wrong, at which step, in which episode; None: nothing."""
    if "fault" not in options:
        if options:
            raise SimulatorError(f"toy: {' and '.join(options)} need the option fault")
        return None
    if options["fault"] not in FAULTS:
        raise SimulatorError(f"toy: fault is one of {', '.join(FAULTS)}, not {options['fault']!r}")
    seed = options.get("fault_seed")
    return str(options["fault"]), int(options.get("fault_step", 0)), None if seed is None else int(seed)


def open_simulator(task: str, settings: Settings) -> Simulator:
    """See `sims.make`."""
    return ToySimulator(task, settings)


def task_names() -> tuple[str, ...]:
    """Both tasks."""
    return tuple(TASKS)


def preflight() -> None:
    """It needs nothing."""
