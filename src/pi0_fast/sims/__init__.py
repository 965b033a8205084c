"""Simulators by name, each imported when it is asked for: `make("metaworld", "drawer-open-v3")`.

One adapter per file; protocol.py says what they have in common, docs/simulators.md what each gives. This file
chooses the adapter. Left out: registering adapters from outside (any Gymnasium environment runs as `gym`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pi0_fast.sims.protocol import Simulator, SimulatorSpec, StepResult
from pi0_fast.sims.toy import TASKS as TOY_TASKS
from pi0_fast.sims.toy import ToySimulator
from pi0_fast.types import SimulatorError

__all__ = ["ENV_TYPES", "Simulator", "SimulatorSpec", "StepResult", "make", "preflight", "task_names"]

ENV_TYPES = ("metaworld", "pusht", "aloha", "gym", "toy")


def _known(env_type: str) -> None:
    if env_type not in ENV_TYPES:
        raise SimulatorError(f"no simulator {env_type!r}; there are {', '.join(ENV_TYPES)}")


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
) -> Simulator:
    """A simulator, ready for `reset(seed)`.

    Args:
        env_type: one of ENV_TYPES.
        task: one of `task_names(env_type)`; for `gym` any Gymnasium id, `PACKAGE:Name-v0` imports the package first.
        cameras: names, with or without `observation.images.`; None: the adapter's usual ones.
        image_size: edge of a square or (height, width) in pixels, of all cameras; None: the adapter's own.
        fast_rendering: without shadows and antialiasing, where the adapter has them: quicker, and other pixels.
        options: of the adapter; docs/simulators.md lists them.
        max_steps: an episode ends after so many steps; None: the adapter's own limit.
        fps: control rate, for `gym` environments that do not declare theirs; elsewhere it must be the simulator's.

    Raises:
        SimulatorError: a package or renderer is missing (with the remedy), or a name is unknown.
    """
    _known(env_type)
    simulator: Simulator = ToySimulator(task, cameras=cameras, image_size=image_size, options=options)
    spec = simulator.spec
    if fps is not None and fps != spec.fps:
        raise SimulatorError(f"{env_type} {task} runs at {spec.fps:g} steps per second, not at {fps:g}")
    if max_steps is not None:
        _limit(simulator, max_steps)
    return simulator


def _limit(simulator: Any, max_steps: int) -> None:
    if max_steps < 1:
        raise SimulatorError(f"max_steps must be at least 1, not {max_steps}")
    simulator.spec = dataclasses.replace(simulator.spec, max_steps=max_steps)
    simulator._episode.spec = simulator.spec


def task_names(env_type: str) -> tuple[str, ...]:
    """Names of all tasks, in the simulator's order; empty for `gym`, which runs any registered id."""
    _known(env_type)
    return tuple(TOY_TASKS)


def preflight(env_type: str) -> None:
    """Try in little what an episode needs: the packages and the renderer. SimulatorError: one line with the remedy."""
    _known(env_type)
