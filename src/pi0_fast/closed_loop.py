"""A policy that acts in simulators: does it fit them, and what comes of its episodes.

All simulators of a batch are waited for, one call of the policy predicts a chunk for each, the first `n_action_steps`
of it are executed, and so on. An episode depends on its seed and its policy alone: not on the number of simulators (but
for the rounding of larger matrices), nor, where actions are drawn (`temperature`), on what was drawn for others. Left
out: files and what the numbers are summed up to (evaluate.py).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.reports.evaluation import ENDED, FAILED, SUCCESS, TIME, EpisodeResult
from pi0_fast.sims import task_names
from pi0_fast.sims.pool import Film, Outcome, SimulatorPool
from pi0_fast.sims.protocol import IMAGES, STATE, SimulatorSpec
from pi0_fast.simulation_config import EnvConfig
from pi0_fast.types import PolicyError, SimulatorError

#: Of videos: the height in pixels, and pictures a second at most.
_VIDEO_HEIGHT, _VIDEO_FPS = 240, 20.0


# --- does the policy fit the simulator? -----------------------------------------------------------------------------


def fitted_environment(policy: PI0FastPolicy, environment: EnvConfig) -> tuple[EnvConfig, tuple[SimulatorSpec, ...]]:
    """The environment with the cameras and image sizes that the policy was trained on, where it does not say its own.

    LIBERO's pictures have the adapter's size where no other is given.

    Args:
        policy: whose `config` and rename map decide.
        environment: validated, with a type and tasks.

    Returns:
        The environment, and what the simulator says of the tasks that were looked at: all where they may differ.

    Raises:
        PolicyError: state, action or cameras do not fit; both sides are named.
        SimulatorError: no such task, or the simulator cannot be built.
    """
    config, renames = policy.config, policy.preparation.processors.rename_map
    _check_tasks(environment)
    looked_at = environment.tasks if environment.type == "gym" else environment.tasks[:1]
    chosen = environment
    # LIBERO's checkpoints are scored on pictures of 360 x 360, whatever they were trained on: LeRobot's convention.
    if environment.image_size is None and environment.type != "libero":
        sizes = {config.expected_inputs[key].shape[1:] for key in _cameras(config)}
        if len(sizes) == 1:
            chosen = dataclasses.replace(chosen, image_size=list(sizes.pop()))
    if environment.cameras is None:
        chosen, specs = _with_cameras(config, renames, chosen, looked_at)
    else:
        specs = _specs(chosen, looked_at)
    for spec in specs:
        check_fit(config, renames, spec)
    return chosen, specs


def _check_tasks(environment: EnvConfig) -> None:
    known = task_names(str(environment.type))
    for task in environment.tasks:
        if known and task not in known:
            from pi0_fast.parsing import nearest

            close = nearest(task, known)
            hint = f"; did you mean {close}?" if close else f"; it has {', '.join(known)}"
            raise SimulatorError(f"{environment.type} has no task {task!r}{hint}")


def _specs(environment: EnvConfig, tasks: Sequence[str]) -> tuple[SimulatorSpec, ...]:
    with SimulatorPool([environment.arguments(task) for task in tasks], 1) as pool:
        return tuple(pool.specs)


def _cameras(config: PI0FastConfig) -> list[str]:
    """Keys of the cameras that data may have."""
    return [key for key in config.image_keys if key in config.input_features]


def _with_cameras(
    config: PI0FastConfig, renames: Mapping[str, str], environment: EnvConfig, tasks: Sequence[str]
) -> tuple[EnvConfig, tuple[SimulatorSpec, ...]]:
    """The environment with the policy's cameras; with its usual ones where the policy's names say nothing of them."""
    sources = {target: source for source, target in renames.items()}
    wanted = [sources.get(key, key) for key in _cameras(config)]
    if not wanted or not all(key.startswith(IMAGES) for key in wanted):
        return environment, _specs(environment, tasks)
    chosen = dataclasses.replace(environment, cameras=[key.removeprefix(IMAGES) for key in wanted])
    try:
        return chosen, _specs(chosen, tasks)
    except SimulatorError as error:
        reason = str(error)
    specs = _specs(environment, tasks)  # where that fails too, the cameras are not to blame
    there = [key for key in wanted if key in specs[0].cameras]
    if not (renames and there):
        raise PolicyError(_camera_advice(config, renames, specs[0], reason))
    # The map says which cameras there are; the policy does without the others.
    chosen = dataclasses.replace(environment, cameras=[key.removeprefix(IMAGES) for key in there])
    return chosen, _specs(chosen, tasks)


def _camera_advice(config: PI0FastConfig, renames: Mapping[str, str], spec: SimulatorSpec, reason: str) -> str:
    ours = ", ".join(_cameras(config)) or "none"
    there = ", ".join(spec.cameras) or "none"
    missing = [key for key in _cameras(config) if key not in {renames.get(source, source) for source in spec.cameras}]
    example = "" if not (missing and spec.cameras) else f", such as {{{next(iter(spec.cameras))!r}: {missing[0]!r}}}"
    return (
        f"the policy's cameras are {ours}, those of {spec.env_type} {spec.task} are {there} ({reason}): choose the "
        f"simulator's with --env.cameras, and say with --rename_map which is which{example}"
    )


def check_fit(config: PI0FastConfig, renames: Mapping[str, str], spec: SimulatorSpec) -> None:
    """Refuse a policy whose state, action or cameras are not those of a simulator.

    Args:
        config: the policy's.
        renames: a simulator's name of an input -> the policy's.
        spec: the simulator's.

    Raises:
        PolicyError: what does not fit, with both sides.
    """
    simulator = f"{spec.env_type} {spec.task}"
    sides = (
        ("state", config.state_dim, None, spec.state_names),
        ("action", config.action_dim, config.action_feature_names, spec.action_names),
    )
    for what, size, names, there in sides:
        if size != len(there):
            own = f" ({', '.join(names)})" if names else ""
            raise PolicyError(
                f"the policy's {what} has {size} dimensions{own}, that of {simulator} has {len(there)} "
                f"({', '.join(there)}): the policy was trained on another robot, or on other columns"
            )
        if names is not None and list(names) != list(there) and set(names) == set(there):
            raise PolicyError(
                f"the policy's {what} is ({', '.join(names)}), that of {simulator} is ({', '.join(there)}): the same "
                "in another order, so that each would be taken for another"
            )
    state_key = renames.get(STATE, STATE)
    if state_key != STATE:
        raise PolicyError(
            f"--rename_map: {STATE!r} of {simulator} would become {state_key!r}; the policy needs {STATE!r}"
        )
    cameras = _cameras(config)
    given = {renames.get(key, key) for key in spec.cameras}
    missing = [key for key in cameras if key not in given]
    strange = sorted(given - set(cameras))
    if missing and (strange or len(missing) == len(cameras)):
        raise PolicyError(_camera_advice(config, renames, spec, f"{', '.join(missing)} is missing"))


# --- episodes -------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """An episode under way in a slot, from its reset on."""

    seed: int
    film: Film | None
    observation: dict[str, Any] | None = None
    steps: int = 0
    reward: float = 0.0
    clipped: int = 0
    chunks: int = 0
    malformed: int = 0
    tokens: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def result(self, task: str, end: str, failure: str | None = None) -> EpisodeResult:
        return EpisodeResult(
            task=task,
            seed=self.seed,
            end=end,
            steps=self.steps,
            reward=self.reward,
            clipped=self.clipped,
            chunks=self.chunks,
            malformed=self.malformed,
            tokens=self.tokens,
            latencies_ms=tuple(self.latencies_ms),
            seconds=round(time.monotonic() - self.begun, 3),
            failure=failure,
        )


@dataclass(frozen=True)
class Recorded:
    """A finished episode; `frames` uint8 [h, w, 3] at `fps` where it was filmed."""

    result: EpisodeResult
    frames: tuple[np.ndarray, ...] = field(default=(), repr=False)
    fps: float = 0.0


def side_by_side(batch_size: int, episodes: int) -> tuple[int, int]:
    """Simulators and processes for so many episodes; `batch_size` 0: a simulator for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    simulators = max(1, min(batch_size or cores, episodes))
    return simulators, min(simulators, cores)


def run(
    policy: PI0FastPolicy,
    environment: EnvConfig,
    seeds: Sequence[int],
    *,
    batch_size: int = 0,
    timeout_s: float = 120.0,
    skip: Collection[tuple[str, int]] = (),
    films: int = 0,
    on_episode: Callable[[Recorded], object] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[EpisodeResult]:
    """Let a policy act in the tasks of an environment, one episode for each task and seed.

    Args:
        policy: in any mode; is in evaluation mode meanwhile. What is unusual is added to its `counts`.
        environment: as `fitted_environment` gives it.
        seeds: of the episodes of each task.
        batch_size: simulators side by side; 0: one for each core.
        timeout_s: a simulator that answers nothing for so long has failed its episode.
        skip: (task, seed) of episodes that are not to be run.
        films: episodes of each task, the first ones, to film.
        on_episode: called with each episode when it has ended.
        stop: asked between chunks; True leaves the episodes under way without a result.

    Returns:
        The episodes that ended, by task and seed.

    Raises:
        PolicyError: the policy does not fit, or cannot predict.
        SimulatorError: a simulator cannot be built; one that fails later fails its episode only.
    """
    found: list[EpisodeResult] = []
    warm = False

    def keep(recorded: Recorded) -> None:
        found.append(recorded.result)
        on_episode(recorded)

    with _evaluating(policy):
        for task in environment.tasks:
            todo = [seed for seed in seeds if (task, seed) not in skip]
            if not todo or stop():
                continue
            simulators, processes = side_by_side(batch_size, len(todo))
            arguments = [environment.arguments(task)] * simulators
            with SimulatorPool(arguments, processes, timeout=timeout_s) as pool:
                check_fit(policy.config, policy.preparation.processors.rename_map, pool.specs[0])
                filmed = frozenset(list(seeds)[:films])
                loop = _Loop(policy, pool, task, todo, filmed, keep, warm)
                loop.run(stop)
                warm = True
    order = {task: place for place, task in enumerate(environment.tasks)}
    return sorted(found, key=lambda result: (order[result.task], result.seed))


@contextmanager
def _evaluating(policy: PI0FastPolicy) -> Iterator[None]:
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


class _Loop:
    """The episodes of one task, over the slots of a pool."""

    def __init__(
        self,
        policy: PI0FastPolicy,
        pool: SimulatorPool,
        task: str,
        seeds: Sequence[int],
        filmed: Collection[int],
        keep: Callable[[Recorded], object],
        warm: bool,
    ) -> None:
        self._policy, self._pool, self._task, self._keep, self._warm = policy, pool, task, keep, warm
        self._waiting = deque(seeds)
        self._filmed = filmed
        self._spec = pool.specs[0]
        # A policy that sees nothing gets no image: rendering is what costs. Videos have a camera all the same.
        self._cameras = list(self._spec.cameras) if policy.config.image_keys else []
        self._running: dict[int, _Running] = {}

    def run(self, stop: Callable[[], bool]) -> None:
        for slot in range(len(self._pool)):
            self._begin(slot)
        while self._running and not stop():
            self._gather()
            slots = sorted(self._running)
            if not slots:
                return
            chunks = self._predict([self._running[slot] for slot in slots])
            steps = self._policy.config.n_action_steps
            for slot, chunk in zip(slots, chunks, strict=True):
                episode = self._running[slot]
                episode.observation = None
                self._pool.run(slot, chunk[:steps], images=bool(self._cameras), film=episode.film)

    def _begin(self, slot: int) -> None:
        """The next episode in a slot, where there is one."""
        self._running.pop(slot, None)
        if not self._waiting:
            return
        seed = self._waiting.popleft()
        film = _film(self._spec) if seed in self._filmed else None
        self._running[slot] = _Running(seed, film)
        self._pool.reset(slot, seed, images=bool(self._cameras), film=film)

    def _gather(self) -> None:
        """Wait until every slot in use has an observation; those whose episode has ended get the next one."""
        while True:
            without = [slot for slot, episode in self._running.items() if episode.observation is None]
            if not without:
                return
            for slot, outcome in sorted(self._pool.wait_for(without).items()):
                recorded = self._taken(self._running[slot], outcome)
                if recorded is not None:
                    self._begin(slot)  # before what is done with the episode, so that the simulator is busy meanwhile
                    self._keep(recorded)

    def _taken(self, episode: _Running, outcome: Outcome) -> Recorded | None:
        """Add what a command led to; the finished episode where it has ended."""
        if not episode.chunks:
            episode.begun = time.monotonic()
        for result in outcome.results:
            episode.steps += 1
            episode.reward += result.reward
            episode.clipped += result.clipped
        episode.frames.extend(outcome.frames)
        last = outcome.results[-1] if outcome.results else None
        end, failure = None, outcome.failure
        if failure is None and not np.isfinite(outcome.observation[STATE]).all():
            failure = f"the simulator's state is not finite: {outcome.observation[STATE].tolist()}"
        if failure is not None:
            end = FAILED
        elif last is not None and last.success:
            end = SUCCESS
        elif last is not None and last.ended:
            end = TIME if episode.steps >= self._spec.max_steps else ENDED
        if end is None:
            episode.observation = outcome.observation
            return None
        fps = 0.0 if episode.film is None else self._spec.fps / episode.film.every
        return Recorded(episode.result(self._task, end, failure), tuple(episode.frames), fps)

    # --- the policy -------------------------------------------------------------------------------------------------

    def _predict(self, episodes: Sequence[_Running]) -> list[np.ndarray]:
        """A chunk [chunk_size, D] for each episode, and what it took."""
        if not self._warm:  # the first call compiles, and allocates
            before = Counter(self._policy.counts)
            self._call(episodes)
            self._policy.counts.clear()
            self._policy.counts.update(before)
            self._warm = True
        # Drawn one by one, so that what is drawn depends on the episode alone.
        drawn = self._policy.config.temperature > 0
        groups = [[episode] for episode in episodes] if drawn else [list(episodes)]
        chunks: list[np.ndarray] = []
        for group in groups:
            begun = time.perf_counter()
            actions, info = self._call(group)
            elapsed = (time.perf_counter() - begun) * 1e3
            self._check_finite(group, actions)
            chunks.extend(actions)
            valid, lengths = info.valid.tolist(), info.lengths.tolist()
            for episode, is_valid, length in zip(group, valid, lengths, strict=True):
                episode.chunks += 1
                episode.malformed += not is_valid
                episode.tokens += length
                episode.latencies_ms.append(round(elapsed, 3))
        return chunks

    def _check_finite(self, episodes: Sequence[_Running], actions: np.ndarray) -> None:
        """Actions that are no numbers are the policy's failure; the simulator would be blamed for refusing them."""
        bad = np.argwhere(~np.isfinite(actions))
        if len(bad):
            row, step, dim = bad[0].tolist()
            raise PolicyError(
                f"the policy's action is {actions[row, step, dim]} in {self._spec.action_names[dim]} at step {step} of "
                f"a chunk ({self._task}, seed {episodes[row].seed}): its weights or its statistics are damaged"
            )

    def _call(self, episodes: Sequence[_Running]) -> tuple[np.ndarray, Any]:
        observations = [episode.observation or {} for episode in episodes]
        batch: dict[str, Any] = {
            key: np.stack([observation[key] for observation in observations]) for key in (STATE, *self._cameras)
        }
        batch["task"] = [observation["task"] for observation in observations]
        generator = None
        if self._policy.config.temperature > 0:
            first = episodes[0]
            state = np.random.SeedSequence([first.seed, first.chunks]).generate_state(1)
            generator = torch.Generator(self._policy.model.device).manual_seed(int(state[0]))
        actions, info = self._policy.predict_action_chunk(batch, return_info=True, generator=generator)
        return actions.numpy(), info


def _film(spec: SimulatorSpec) -> Film:
    """By the first camera, its shape at a size to look at, in real time."""
    camera, (height, width) = next(iter(spec.cameras.items()))
    scale = _VIDEO_HEIGHT / height
    size = (_VIDEO_HEIGHT, max(2, round(width * scale / 2) * 2))
    return Film(camera, size, max(1, round(spec.fps / _VIDEO_FPS)))
