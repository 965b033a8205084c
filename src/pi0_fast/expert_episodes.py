"""One episode of a scripted expert in a simulator: noise, which steps have pictures, and what is kept of it.

Labels are the expert's own actions, whatever noise was executed. Left out: files, processes and datasets
(recording.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.record_config import RecordConfig
from pi0_fast.sims import Simulator, SimulatorSpec
from pi0_fast.sims.protocol import STATE
from pi0_fast.types import SimulatorError, UsageError

FloatArray = npt.NDArray[np.float32]
Image = npt.NDArray[np.uint8]

#: Columns beside LeRobot's own.
ACTION, EXECUTED, IMAGE_AGE = "action", "executed_action", "image_age"
#: What tells the random numbers of an episode apart that serve different ends.
_NOISE_STREAM, _PICTURE_STREAM = 1, 2


@dataclass(frozen=True)
class EpisodeSettings:
    """What an episode depends on, besides the simulator and its seed. Deviations: one, or one per dimension."""

    every: int = 1
    keep_after_success: int = 0
    noise_std: tuple[float, ...] = (0.0,)
    burst_share: float = 0.0
    burst_std: tuple[float, ...] = (0.0,)
    burst_steps: tuple[int, int] = (3, 7)

    @classmethod
    def of(cls, config: RecordConfig) -> EpisodeSettings:
        """From the flags."""

        def several(value: Sequence[float] | float | None) -> tuple[float, ...]:
            return tuple(value) if isinstance(value, Sequence) else (value or 0.0,)

        return cls(
            config.every,
            config.keep_after_success,
            several(config.noise_std),
            config.burst_share,
            several(config.burst_std),
            config.burst_range,
        )


class ActionNoise:
    """What is added to an expert's actions: Gaussian noise, and bursts (one offset that is held for some steps).

    The correction of a disturbance is what a policy learns from it, since labels stay those of the expert (DART,
    arXiv 1703.09327, with bursts).
    """

    def __init__(self, settings: EpisodeSettings, size: int, seed: int) -> None:
        """For actions of `size` dimensions; UsageError where the settings are for another number of them."""
        self._settings = settings
        self._random = np.random.default_rng([seed, _NOISE_STREAM])
        self._std = _per_dimension("noise_std", settings.noise_std, size)
        self._burst_std = _per_dimension("burst_std", settings.burst_std, size)
        self._burst, self._left = np.zeros(size), 0

    def next(self) -> npt.NDArray[np.float64]:
        """The noise of the next step, [D]."""
        begins = self._random.random() < self._settings.burst_share
        if self._left == 0 and begins:
            least, most = self._settings.burst_steps
            self._left = int(self._random.integers(least, most + 1))
            self._burst = self._random.normal(0.0, self._burst_std)
        noise = self._random.normal(0.0, self._std)
        if self._left > 0:
            self._left -= 1
            noise = noise + self._burst
        return noise


def _per_dimension(name: str, values: Sequence[float], size: int) -> npt.NDArray[np.float64]:
    if len(values) not in (1, size):
        raise UsageError(
            f"--{name} has {len(values)} numbers, the action {size} dimensions; give one number, or {size}"
        )
    return np.broadcast_to(np.array(values, np.float64), (size,))


def picture_steps(every: int, seed: int, length: int) -> list[int]:
    """At which of `length` steps pictures are rendered: the first, then every so many from a random one on.

    With `every` 5 these are 0, 3, 8, 13 ... or 0, 5, 10, 15 ...: over many episodes all phases are seen.
    """
    first = int(np.random.default_rng([seed, _PICTURE_STREAM]).integers(1, every + 1))
    return [0, *range(first, length, every)] if length else []


@dataclass
class Outcome:
    """How an episode went.

    Attributes:
        seed: of the simulator's reset.
        steps: executed.
        success_step: steps until the first success; None when there was none.
        clipped: executed actions that the limits cut.
        pictures: rendered by each camera.
        reason: why it is not kept; None when it is.
    """

    seed: int
    steps: int = 0
    success_step: int | None = None
    clipped: int = 0
    pictures: int = 0
    reason: str | None = None


def run_episode(
    simulator: Simulator, settings: EpisodeSettings, seed: int, see: Callable[[str, Image], None]
) -> tuple[Outcome, dict[str, npt.NDArray[Any]]]:
    """Let the expert do the task once.

    Args:
        simulator: it is reset.
        settings: noise, pictures, and when to stop.
        seed: determines everything.
        see: called with (camera, image) for each picture, in order.

    Returns:
        The outcome, and columns: `observation.state` [T, Ds], `action` [T, D] (the expert's, clipped to the limits),
        `executed_action` [T, D] float32, and `image_age` int64 [T].

    Raises:
        SimulatorError: there is no expert, or it gives what is no action.
    """
    spec = simulator.spec
    simulator.reset(seed)
    expert = simulator.expert()
    if expert is None:
        raise SimulatorError(f"{spec.env_type} {spec.task} has no scripted expert: there is nobody to record")
    noise = ActionNoise(settings, len(spec.action_names), seed)
    pictured = set(picture_steps(settings.every, seed, spec.max_steps))
    outcome, age = Outcome(seed), 0
    rows: dict[str, list[Any]] = {STATE: [], ACTION: [], EXECUTED: [], IMAGE_AGE: []}
    ended = False
    while not ended:
        fresh = outcome.steps in pictured
        observation = simulator.observe(images=fresh)
        age = 0 if fresh else age + 1
        for camera in spec.cameras if fresh else ():
            see(camera, observation[camera])
        outcome.pictures += fresh
        label = _label(expert(), spec, seed, outcome.steps)
        wanted = label + noise.next()
        executed = np.clip(wanted, spec.action_low, spec.action_high).astype(np.float32)
        outcome.clipped += bool((executed != wanted.astype(np.float32)).any())
        for key, value in ((STATE, observation[STATE]), (ACTION, label), (EXECUTED, executed), (IMAGE_AGE, age)):
            rows[key].append(value)
        result = simulator.step(executed)
        outcome.steps += 1
        if result.success and outcome.success_step is None:
            outcome.success_step = outcome.steps
        enough = outcome.success_step is not None and (
            outcome.steps - outcome.success_step >= settings.keep_after_success
        )
        ended = result.ended or enough
    if outcome.success_step is None:
        outcome.reason = f"no success in {outcome.steps} steps"
    return outcome, {
        key: np.array(values, np.int64 if key == IMAGE_AGE else np.float32) for key, values in rows.items()
    }


def _label(action: Any, spec: SimulatorSpec, seed: int, step: int) -> FloatArray:
    """The expert's action within the limits, float32 [D]."""
    array = np.asarray(action, np.float64)
    if array.shape != spec.action_low.shape or not np.isfinite(array).all():
        raise SimulatorError(
            f"{spec.env_type} {spec.task}: the expert's action at step {step} of seed {seed} is {array.tolist()}, not "
            f"{len(spec.action_low)} finite numbers"
        )
    return np.clip(array, spec.action_low, spec.action_high).astype(np.float32)


def held(images: Image, ages: npt.NDArray[np.int64]) -> Iterator[Image]:
    """The image of each row: a new one where its age is 0, else that of the row before.

    Ages 0 1 0 1 2 of images a, b are a a b b b.
    """
    number = -1
    for age in ages.tolist():
        number += age == 0
        yield images[number]
