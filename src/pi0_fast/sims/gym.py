"""Any Gymnasium environment with a continuous action, by a mapping of its keys: `--env.type=gym --env.task=PKG:Id-v0`.

Options (all optional where the environment leaves no doubt):
    state           path of the state in the observation, parts joined by `/`; not needed where that is one vector
    images          camera name -> path of its image in the observation, or `render` for the environment's own picture
    rotate          names of cameras whose images are to be turned by 180 degrees
    success         key in `info` that says so, or `terminated`
    text            what a policy is told; by default the id without its version
    state_names, action_names     one name per dimension
    kwargs          passed on to `gymnasium.make`
Needs `pi0-fast[gym]` and the environment's package. Left out: discrete actions, experts, and keeping an environment
whose observation holds images from rendering them at every step.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from pi0_fast.sims import rendering
from pi0_fast.sims.packages import load
from pi0_fast.sims.protocol import IMAGES, Episode, Expert, Settings, Simulator, SimulatorSpec, StepResult, observation
from pi0_fast.types import SimulatorError

OPTIONS = ("state", "images", "rotate", "success", "text", "state_names", "action_names", "kwargs")
RENDER, TERMINATED = "render", "terminated"
_SUCCESS = ("is_success", "success")


class GymSimulator:
    """See Simulator."""

    def __init__(self, task: str, settings: Settings) -> None:
        options = settings.checked_options(OPTIONS)
        settings.no_fast_rendering()
        if settings.image_size is not None:
            raise SimulatorError('gym: the environment sets the size of its images; say it by the option "kwargs"')
        rendering.choose_backend()
        self._environment = _environment(task, options.get("kwargs", {}), settings.max_steps)
        self._success = options.get("success")
        self._state_path = options.get("state")
        self._seen, _ = self._environment.reset(seed=0)  # what an image measures, only an image says
        sources = _text_map(options.get("images", {}))
        known = {name: self._picture(path).shape[:2] for name, path in sources.items()}
        cameras = settings.chosen_cameras(known)
        self._sources = {key: sources[key.removeprefix(IMAGES)] for key in cameras}
        self._rotated = set(options.get("rotate", []))
        if unknown := self._rotated - known.keys():
            raise SimulatorError(f"gym: option rotate names {', '.join(sorted(unknown))}, which is not in images")
        low, high = self._limits()
        registered = self._environment.spec
        self.spec = SimulatorSpec(
            env_type="gym",
            task=task,
            text=options.get("text", _words(task)),
            fps=settings.rate(self._environment.metadata.get("render_fps")),
            max_steps=settings.steps(registered.max_episode_steps if registered else None),
            cameras=cameras,
            state_names=_names("state_names", options, "state", len(self._state())),
            action_names=_names("action_names", options, "action", len(low)),
            action_low=low,
            action_high=high,
        )
        self._episode = Episode(self.spec)

    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        space = self._environment.action_space
        if len(getattr(space, "shape", None) or ()) != 1 or not np.issubdtype(space.dtype, np.floating):
            raise SimulatorError(f"gym: a policy gives a vector of numbers as action; this environment takes {space}")
        return space.low.astype(np.float32), space.high.astype(np.float32)

    def _state(self) -> np.ndarray:
        found = _at(self._seen, self._state_path, "state") if self._state_path is not None else self._seen
        if isinstance(found, dict):
            keys = ", ".join(_paths(found))
            raise SimulatorError(f'gym: say by the option "state" which of these is the state: {keys}')
        state = np.asarray(found, np.float32)
        if state.ndim != 1:
            raise SimulatorError(
                f"gym: a state is one vector; {self._state_path or 'this observation'} is {state.shape}"
            )
        return state

    def _picture(self, path: str) -> np.ndarray:
        image = np.asarray(self._environment.render() if path == RENDER else _at(self._seen, path, "images"))
        if image.ndim != 3 or image.shape[-1] != 3 or image.dtype != np.uint8:
            raise SimulatorError(f"gym: an image is uint8 [height, width, 3]; {path} gives {image.dtype} {image.shape}")
        return image

    def reset(self, seed: int) -> None:
        """The environment's own reset with the seed."""
        self._episode.begin(seed)
        self._seen, _ = self._environment.reset(seed=int(seed))

    def step(self, action: np.ndarray) -> StepResult:
        """One step; `info` keeps what is a number, a truth value or a text."""
        inside, clipped = self._episode.action(action)
        space = self._environment.action_space
        # Once more in the space's own numbers: 0.1 as float32 is beyond 0.1 as float64, which some environments refuse.
        exact = np.clip(inside.astype(space.dtype), space.low, space.high)
        self._seen, reward, terminated, truncated, info = self._environment.step(exact)
        ended = self._episode.ended(bool(terminated) or bool(truncated))
        measures = {key: value for key, value in info.items() if isinstance(value, (bool, int, float, str, np.generic))}
        return StepResult(self._succeeded(info, bool(terminated)), ended, float(reward), measures, clipped)

    def _succeeded(self, info: dict[str, Any], terminated: bool) -> bool:
        if self._success == TERMINATED:
            return terminated
        for key in _SUCCESS if self._success is None else (self._success,):
            if key in info:
                return bool(info[key])
        wanted = "is_success or success" if self._success is None else repr(self._success)
        raise SimulatorError(
            f"gym {self.spec.task}: info has no {wanted} (it has {', '.join(info) or 'nothing'}); "
            f'name its key by the option "success", or say "{TERMINATED}"'
        )

    def observe(self, images: bool = True) -> dict[str, Any]:
        """State float32 [Ds], images uint8 [h, w, 3], text."""
        self._episode.begun()
        return observation(self, self._state().copy(), images)

    def render(self, camera: str, size: tuple[int, int] | None = None) -> np.ndarray:
        """The camera's image; another size repeats or leaves out pixels."""
        self._episode.check_camera(camera)
        image = self._picture(self._sources[camera])
        if camera.removeprefix(IMAGES) in self._rotated:
            image = image[::-1, ::-1]
        if size is not None:
            rows, columns = (np.arange(n) * have // n for n, have in zip(size, image.shape, strict=False))
            image = image[rows][:, columns]
        return np.array(image)

    def expert(self) -> Expert | None:
        """None: environments bring none."""
        return None

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


def _environment(task: str, kwargs: dict[str, Any], max_steps: int | None) -> Any:
    """`gymnasium.make`, with what cannot be made as one line."""
    gymnasium = load("gymnasium", "gym")
    limit = {} if max_steps is None else {"max_episode_steps": max_steps}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about versions and packages of others, at every start
            return gymnasium.make(task, disable_env_checker=True, **({"render_mode": "rgb_array"} | kwargs | limit))
    except Exception as error:  # whatever an environment's constructor raises, naming it is all that can be done
        hint = "" if ":" in task else f" (a package is imported first where it is named: PACKAGE:{task})"
        raise SimulatorError(f"gym cannot make {task!r}{hint}: {type(error).__name__}: {error}") from error


def _at(observation: Any, path: str, option: str) -> Any:
    """What lies at a path such as `pixels/top` of a nested observation."""
    found = observation
    for part in path.split("/"):
        if not isinstance(found, dict) or part not in found:
            there = ", ".join(_paths(observation)) if isinstance(observation, dict) else "only one array"
            raise SimulatorError(f"gym: option {option} names {path!r}, which is not observed; there is {there}")
        found = found[part]
    return found


def _paths(observation: dict[str, Any], prefix: str = "") -> list[str]:
    """All paths of a nested observation."""
    found: list[str] = []
    for key, value in observation.items():
        found += _paths(value, f"{prefix}{key}/") if isinstance(value, dict) else [prefix + key]
    return found


def _text_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(path, str) for path in value.values()):
        raise SimulatorError(f'gym: option images is a map of names to paths such as {{"top": "pixels"}}, not {value}')
    return value


def _names(option: str, options: dict[str, Any], stem: str, count: int) -> tuple[str, ...]:
    names = tuple(options.get(option, [f"{stem}_{number}" for number in range(count)]))
    if len(names) != count or len(set(names)) < count:
        raise SimulatorError(f"gym: option {option} needs {count} different names, not {', '.join(names)}")
    return names


def _words(task: str) -> str:
    """`gym_pusht:gym_pusht/PushT-v0` -> `PushT`."""
    return task.split(":")[-1].split("/")[-1].split("-v")[0]


def open_simulator(task: str, settings: Settings) -> Simulator:
    """See `sims.make`."""
    return GymSimulator(task, settings)


def task_names() -> tuple[str, ...]:
    """Empty: any registered id runs."""
    return ()


def preflight() -> None:
    """Gymnasium can be imported."""
    load("gymnasium", "gym")
