"""What commands are told of a simulator: `--env.type`, `--env.task` and what belongs to them.

Nested as `env` in the configurations of record, replay, eval and train, and as `eval` in those of the last two. Names
are LeRobot's where it has them. Left out: opening the simulator (sims/), which packages and numpy are needed for.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from pi0_fast.configs import check_choice, check_number, check_text, check_whole
from pi0_fast.parsing import option
from pi0_fast.types import UsageError

# As sims.ENV_TYPES (a test compares them), which needs numpy; help is to answer at once.
ENV_TYPES = ("metaworld", "libero", "pusht", "aloha", "gym", "toy")
#: As LeRobot's.
USUAL_TASKS = {"pusht": "PushT-v0", "aloha": "AlohaInsertion-v0", "libero": "libero_10"}
#: One task of each simulator that has no usual one, for messages.
_SUCH_AS = {"metaworld": "drawer-open-v3", "toy": "reach-green", "gym": "gym_pusht:gym_pusht/PushT-v0"}
#: Names that stand for many tasks: libero_object for libero_object/0 to libero_object/9.
SUITES = {
    "libero": {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90},
}
#: Far from the seeds that demonstrations are recorded with (0, 1, 2, ...), so that none of them is evaluated on.
FIRST_SEED = 100_000
#: Seeds of simulators are below this.
SEEDS = 2**31

_ENV, _EVAL = "Simulator", "Evaluation in the simulator"


@dataclass
class EnvConfig:
    """The simulator and its tasks."""

    type: str | None = option(
        None, group=_ENV, help=f"Simulator: {', '.join(ENV_TYPES)} (toy needs no package).", shown="none"
    )
    task: list[str] | str | None = option(  # noqa: RUF009 - a field, and its default is None
        None,
        group=_ENV,
        help='Name of the task, or a list: a,b or \'["a", "b"]\'. LIBERO: also suites, such as libero_object.',
        shown=", ".join(USUAL_TASKS.values()) + "; else it must be given",
    )
    cameras: list[str] | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_ENV, help="Names of the cameras.", shown="the simulator's usual ones"
    )
    image_size: list[int] | int | None = option(  # noqa: RUF009 - a field, and its default is None
        None, group=_ENV, help="Size of the images in pixels: an edge or [height, width].", shown="the simulator's own"
    )
    fast_rendering: bool = option(
        False,
        group=_ENV,
        help="Render without shadows and antialiasing: up to ten times quicker on a CPU, and other pixels than "
        "published checkpoints were trained on.",
    )
    max_steps: int | None = option(
        None,
        group=_ENV,
        help="An episode ends after so many steps.",
        aliases=("episode_length",),
        shown="the simulator's own limit",
    )
    fps: float | None = option(
        None,
        group=_ENV,
        help="Control steps per second, for gym environments that do not declare theirs.",
        shown="the simulator's own",
    )
    text: str | None = option(
        None, group=_ENV, help="What the policy is told to do.", shown="the task in the simulator's words"
    )
    options: str | None = option(
        None, group=_ENV, help="Further settings of the simulator as a JSON map, such as '{\"a\": 1}'.", shown="none"
    )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, in order, suites as their tasks; the simulator's usual one, or none, where none is given."""
        given = self.task if self.task is not None else USUAL_TASKS.get(str(self.type), [])
        sizes = SUITES.get(str(self.type), {})
        names: list[str] = []
        for name in given.split(",") if isinstance(given, str) else given:
            name = name.strip()
            names += [f"{name}/{number}" for number in range(sizes[name])] if name in sizes else [name]
        return tuple(names)

    @property
    def option_map(self) -> dict[str, Any]:
        """`options` as a map; UsageError where it is none."""
        if self.options is None:
            return {}
        try:
            found = json.loads(self.options)
        except json.JSONDecodeError as error:
            raise UsageError(f"--env.options is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"--env.options is a JSON map such as '{{\"a\": 1}}', not {self.options}")
        return found

    def arguments(self, task: str) -> dict[str, Any]:
        """Keyword arguments of `sims.make` for one of the tasks; they pickle and print as JSON."""
        size = tuple(self.image_size) if isinstance(self.image_size, list) else self.image_size
        return {
            "env_type": self.type,
            "task": task,
            "cameras": self.cameras,
            "image_size": size,
            "fast_rendering": self.fast_rendering,
            "max_steps": self.max_steps,
            "fps": self.fps,
            "text": self.text,
            "options": self.option_map,
        }

    def validate(self) -> None:
        """Refuse unknown simulators, empty or repeated tasks, sizes below 1, and settings without --env.type."""
        if self.type is None:
            names = ("task", "cameras", "image_size", "max_steps", "fps", "text", "options")
            given = [name for name in names if getattr(self, name) is not None]
            given += ["fast_rendering"] if self.fast_rendering else []
            if given:
                raise UsageError(f"--env.{given[0]} has no effect without --env.type")
            return
        check_choice("env.type", self.type, ENV_TYPES)
        if not self.tasks:
            raise UsageError(f"--env.type={self.type} needs --env.task, such as --env.task={_SUCH_AS[self.type]}")
        for name in self.tasks:
            check_text("env.task", name)
        if len(set(self.tasks)) < len(self.tasks):
            raise UsageError(f"--env.task names a task twice: {', '.join(self.tasks)}")
        sizes = self.image_size if isinstance(self.image_size, list) else [self.image_size]
        if self.image_size is not None:
            if isinstance(self.image_size, list) and len(sizes) != 2:
                raise UsageError(f"--env.image_size is an edge or [height, width], not {self.image_size}")
            for size in sizes:
                check_whole("env.image_size", size, 1)
        if self.max_steps is not None:
            check_whole("env.max_steps", self.max_steps, 1)
        if self.fps is not None and not check_number("env.fps", self.fps) > 0:
            raise UsageError(f"--env.fps must be above 0, not {self.fps}")
        if self.text is not None:
            check_text("env.text", self.text)
        _ = self.option_map


@dataclass
class EvalOptions:
    """How much is evaluated, and how many episodes run side by side."""

    n_episodes: int = option(50, group=_EVAL, help="Episodes of each task; their seeds count up from --seed.")
    batch_size: int = option(
        0,
        group=_EVAL,
        help="Simulators that run side by side, and rows of a batch of the policy; 0: as many as the machine has "
        "cores, and no more than episodes.",
    )
    max_steps: int | None = option(
        None,
        group=_EVAL,
        help="An episode ends after so many steps; as --env.max_steps.",
        shown="the simulator's limit",
    )
    timeout_s: float = option(
        120.0, group=_EVAL, help="A simulator that answers nothing for so many seconds has failed its episode."
    )
    use_async_envs: bool = option(True, group=_EVAL, help="Only true: simulators run in processes of their own.")

    def limited(self, env: EnvConfig) -> EnvConfig:
        """The simulator with `max_steps`; UsageError where both say it and differ."""
        if self.max_steps is None:
            return env
        if env.max_steps not in (None, self.max_steps):
            raise UsageError(f"--eval.max_steps={self.max_steps} and --env.max_steps={env.max_steps} are one thing")
        return dataclasses.replace(env, max_steps=self.max_steps)

    def validate(self) -> None:
        """Refuse counts below 1."""
        check_whole("eval.n_episodes", self.n_episodes, 1, SEEDS)
        check_whole("eval.batch_size", self.batch_size, 0)
        if self.max_steps is not None:
            check_whole("eval.max_steps", self.max_steps, 1)
        if not check_number("eval.timeout_s", self.timeout_s) > 0:
            raise UsageError(f"--eval.timeout_s must be above 0, not {self.timeout_s}")
        if not self.use_async_envs:
            raise UsageError("--eval.use_async_envs=false is not offered: --eval.batch_size=1 runs one at a time")
