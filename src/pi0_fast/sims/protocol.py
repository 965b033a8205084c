"""What every simulator looks like from outside: its description, and a handful of methods.

Observations come out as LeRobot features (`observation.state`, `observation.images.NAME`, `task`), images upright.
`reset` and `step` never render, since rendering is what costs; `observe` and `render` do. Numpy only; the adapters
are beside this file, one simulator each. Left out: several robots in one world, and real robots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pi0_fast.types import SimulatorError

STATE = "observation.state"
IMAGES = "observation.images."
TASK = "task"

#: Called without arguments: the scripted expert's action for the current state, float32 [D]; it may exceed the limits.
Expert = Callable[[], np.ndarray]


@dataclass(frozen=True)
class SimulatorSpec:
    """What a simulator gives and takes.

    Attributes:
        env_type: adapter, e.g. ``metaworld``.
        task: name of the task within it, e.g. ``drawer-open-v3``.
        text: the task in words, what a policy is told.
        fps: control steps per second of simulated time.
        max_steps: an episode ends after so many steps.
        cameras: full feature key (``observation.images.corner4``) -> (height, width) in pixels.
        state_names: one name per dimension of ``observation.state``.
        action_names: one name per dimension of an action.
        action_low, action_high: float32 [D], limits of an action; -inf and inf where there are none.
    """

    env_type: str
    task: str
    text: str
    fps: float
    max_steps: int
    cameras: dict[str, tuple[int, int]]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    action_low: np.ndarray = field(repr=False, compare=False)
    action_high: np.ndarray = field(repr=False, compare=False)


@dataclass(frozen=True)
class StepResult:
    """What one control step led to.

    Attributes:
        success: the task counts as done in the state that was reached (it may be undone later).
        ended: the episode is over: `max_steps` are done, or the simulator ends it; `reset` comes next.
        reward: the simulator's own.
        info: what else the simulator says.
        clipped: the action was outside the limits and was executed at the limits.
    """

    success: bool
    ended: bool
    reward: float
    info: dict[str, Any] = field(repr=False)
    clipped: bool = False


class Simulator(Protocol):
    """One world with one robot. Methods raise SimulatorError where a call cannot be served."""

    @property
    def spec(self) -> SimulatorSpec:
        """What it gives and takes; the same from construction to `close`."""
        ...

    def reset(self, seed: int) -> None:
        """Begin an episode that depends on nothing but the seed (a whole number, 0 to 2**31 - 1)."""
        ...

    def observe(self, images: bool = True) -> dict[str, Any]:
        """The present: `observation.state` float32 [Ds], each camera uint8 [h, w, 3] RGB upright, `task` the text."""
        ...

    def step(self, action: np.ndarray) -> StepResult:
        """Execute one action, float [D], clipped to the limits; SimulatorError where it is not finite or not [D]."""
        ...

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """A picture by a camera (full key), uint8 [h, w, 3], of (height, width) in pixels, by default the camera's."""
        ...

    def expert(self) -> Expert | None:
        """A scripted expert for the running episode, which sees the hidden state; None where there is none."""
        ...

    def close(self) -> None:
        """Free what it holds; no other call may follow."""
        ...


def observation(simulator: Simulator, state: np.ndarray, images: bool) -> dict[str, Any]:
    """What `Simulator.observe` gives, of its state float32 [Ds] and its pictures, where `images` are wanted."""
    pictures = {key: simulator.render(key) for key in simulator.spec.cameras} if images else {}
    return {STATE: state, TASK: simulator.spec.text, **pictures}


class Episode:
    """Counts the steps of an episode and checks what it is given; adapters hold one."""

    def __init__(self, spec: SimulatorSpec) -> None:
        self.spec = spec
        self.steps: int | None = None
        self._over = False

    def begin(self, seed: int) -> None:
        """Start counting; SimulatorError where the seed is out of range."""
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**31:
            raise SimulatorError(f"{self.name}: a seed is a whole number from 0 to {2**31 - 1}, not {seed!r}")
        self.steps, self._over = 0, False

    @property
    def name(self) -> str:
        """How errors name the simulator."""
        return f"{self.spec.env_type} {self.spec.task}"

    def begun(self) -> None:
        """Refuse what comes before the first reset."""
        if self.steps is None:
            raise SimulatorError(f"{self.name}: call reset(seed) before anything else")

    def action(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """Count a step: the action within the limits, float32 [D], and whether it had to be clipped."""
        self.begun()
        assert self.steps is not None
        if self._over:
            raise SimulatorError(f"{self.name}: the episode ended after {self.steps} steps; call reset(seed)")
        given, dims = np.asarray(action, np.float32), len(self.spec.action_names)
        if given.shape != (dims,):
            names = ", ".join(self.spec.action_names)
            raise SimulatorError(f"{self.name}: an action has shape ({dims},) ({names}), not {given.shape}")
        if not np.isfinite(given).all():
            bad = self.spec.action_names[int(np.flatnonzero(~np.isfinite(given))[0])]
            raise SimulatorError(f"{self.name}: the action is not finite in {bad}: {given.tolist()}")
        self.steps += 1
        inside = np.clip(given, self.spec.action_low, self.spec.action_high)
        return inside, bool((inside != given).any())

    def check_camera(self, camera: str) -> None:
        """Refuse pictures before the first reset, and by cameras that were not asked for."""
        self.begun()
        if camera not in self.spec.cameras:
            there = ", ".join(self.spec.cameras) or "no camera"
            raise SimulatorError(f"{self.name} was made with {there}, not with {camera!r}")

    def ended(self, by_itself: bool = False) -> bool:
        """Whether the episode is over: the simulator ends it by itself, or `max_steps` are done. No step may follow."""
        assert self.steps is not None
        self._over = by_itself or self.steps >= self.spec.max_steps
        return self._over


@dataclass(frozen=True)
class Settings:
    """What `sims.make` was told beyond the task; adapters ask it, so that nothing said is passed over.

    Attributes: those of `sims.make`; None means not said.
    """

    env_type: str
    cameras: list[str] | None = None
    image_size: int | tuple[int, int] | None = None
    fast_rendering: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    max_steps: int | None = None
    fps: float | None = None

    def chosen_cameras(
        self, known: dict[str, tuple[int, int]], usual: tuple[str, ...] | None = None
    ) -> dict[str, tuple[int, int]]:
        """Full key -> (height, width) of the cameras asked for.

        Args:
            known: name without prefix -> default (height, width).
            usual: names taken where none are asked for; None takes all of `known`.

        Raises:
            SimulatorError: unknown or repeated name, or a size below 1.
        """
        wanted = (usual or tuple(known)) if self.cameras is None else self.cameras
        names = [name.removeprefix(IMAGES) for name in wanted]
        for name in names:
            if name not in known:
                raise SimulatorError(f"{self.env_type} has no camera {name!r}; it has {', '.join(known) or 'none'}")
        if len(set(names)) < len(names):
            raise SimulatorError(f"{self.env_type}: a camera is named twice in {', '.join(names)}")
        size = (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise SimulatorError(
                f"{self.env_type}: an image size is a number of pixels or (height, width), not {self.image_size}"
            )
        return {IMAGES + name: known[name] if size is None else (int(size[0]), int(size[1])) for name in names}

    def checked_options(self, known: tuple[str, ...]) -> dict[str, Any]:
        """The options; SimulatorError where one is not known."""
        for name in self.options:
            if name not in known:
                there = f"it has {', '.join(known)}" if known else "it has none"
                raise SimulatorError(f"{self.env_type} has no option {name!r}; {there}")
        return self.options

    def steps(self, own: int | None, most: int | None = None) -> int:
        """Length of an episode: what was asked for, else the simulator's own; SimulatorError above `most`."""
        wanted = own if self.max_steps is None else self.max_steps
        if wanted is None:
            raise SimulatorError(f"{self.env_type}: this environment has no limit of its own; set max_steps")
        if wanted < 1 or (most is not None and wanted > most):
            limit = "" if most is None else f" and at most {most}"
            raise SimulatorError(f"{self.env_type}: max_steps must be at least 1{limit}, not {wanted}")
        return wanted

    def rate(self, own: float | None) -> float:
        """Control steps per second; SimulatorError where another rate than the simulator's own was asked for."""
        wanted = own if self.fps is None else self.fps
        if wanted is None or not wanted > 0:
            raise SimulatorError(f"{self.env_type}: this environment does not say its control rate; set fps")
        if own is not None and wanted != own:
            raise SimulatorError(f"{self.env_type} runs at {own:g} control steps per second, not at {wanted:g}")
        return float(wanted)

    def no_fast_rendering(self) -> None:
        """Refuse the flag in an adapter where it would do nothing."""
        if self.fast_rendering:
            raise SimulatorError(f"{self.env_type} has no shadows or antialiasing to leave out: drop fast_rendering")
