"""Simulators by name, each imported when it is asked for: `make("metaworld", "drawer-open-v3")`.

One adapter per file; protocol.py says what they have in common, docs/simulators.md what each gives. This file
chooses the adapter. Left out: registering adapters from outside (any Gymnasium environment runs as `gym`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any

from pi0_fast.sims import rendering
from pi0_fast.sims.protocol import Settings, Simulator, SimulatorSpec, StepResult
from pi0_fast.types import SimulatorError

__all__ = [
    "ENV_TYPES",
    "Simulator",
    "SimulatorSpec",
    "StepResult",
    "choose_renderer",
    "make",
    "preflight",
    "task_names",
]

#: Each is a file beside this one with `open_simulator`, `task_names` and `preflight`.
ENV_TYPES = ("metaworld", "libero", "pusht", "aloha", "gym", "toy")
_MUJOCO = ("metaworld", "libero", "aloha", "gym")


def _adapter(env_type: str) -> Any:
    if env_type not in ENV_TYPES:
        raise SimulatorError(f"no simulator {env_type!r}; there are {', '.join(ENV_TYPES)}")
    return importlib.import_module(f"pi0_fast.sims.{env_type}")


def make(
    env_type: str,
    task: str,
    *,
    cameras: list[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
    fast_rendering: bool = False,
    options: dict[str, Any] | None = None,
    max_steps: int | None = None,
    fps: float | None = None,
    text: str | None = None,
) -> Simulator:
    """A simulator, ready for `reset(seed)`.

    Args:
        env_type: one of ENV_TYPES.
        task: one of `task_names(env_type)`; for `gym` any Gymnasium id, `PACKAGE:Name-v0` imports the package first.
        cameras: names, with or without `observation.images.`; None: the adapter's usual ones, [] none.
        image_size: edge of a square or (height, width) in pixels, of all cameras; None: the adapter's own.
        fast_rendering: without shadows and antialiasing: quicker, and other pixels; only for MuJoCo's simulators.
        options: of the adapter; docs/simulators.md lists them.
        max_steps: an episode ends after so many steps; None: the adapter's own limit.
        fps: control rate, for `gym` environments that do not declare theirs; elsewhere it must be the simulator's.
        text: what a policy is told to do, in place of the task's own words.

    Raises:
        SimulatorError: a package is missing (with the remedy), a name is unknown, or a setting would do nothing.
    """
    settings = Settings(env_type, cameras, image_size, fast_rendering, options or {}, max_steps, fps)
    opened: Any = _adapter(env_type).open_simulator(task, settings)
    if text is not None:
        opened.spec = dataclasses.replace(opened.spec, text=text)
    simulator: Simulator = opened
    return simulator


def task_names(env_type: str) -> tuple[str, ...]:
    """Names of all tasks, in the simulator's order; empty for `gym`, which runs any id. SimulatorError: no package."""
    names: tuple[str, ...] = _adapter(env_type).task_names()
    return names


def choose_renderer(env_types: Iterable[str]) -> None:
    """Settle once for this process and those that it starts how MuJoCo renders, where one of these may need it."""
    if any(env_type in _MUJOCO for env_type in env_types):
        rendering.choose_backend()


def task_text(env_type: str, task: str) -> str:
    """A task in the simulator's words. SimulatorError: no such task, or no package."""
    simulator = make(env_type, task)
    text = simulator.spec.text
    simulator.close()
    return text


def preflight(env_type: str) -> None:
    """Try in little what an episode needs: the packages and the renderer. SimulatorError: one line with the remedy."""
    _adapter(env_type).preflight()
