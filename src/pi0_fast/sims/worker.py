"""The process that holds simulators for a pool: it reads commands from a socket, one by one, and answers each.

A command is (kind, slot, payload); the answer is (True, what was asked for) or (False, the reason in words).
pool.py starts it, waits on it and replaces it. Left out: any judgement of what a failure means for an episode.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pi0_fast import sims
from pi0_fast.sims.protocol import Simulator, SimulatorSpec, StepResult
from pi0_fast.types import SimulatorError


@dataclass(frozen=True)
class Film:
    """Which pictures of a run are wanted for a video: every `every`-th step's, by one camera."""

    camera: str
    size: tuple[int, int] | None = None
    every: int = 1


@dataclass(frozen=True)
class Run:
    """Actions to execute, [k, D], and what to stop at and bring back."""

    actions: np.ndarray
    images: bool = True
    film: Film | None = None
    stop_at_success: bool = True


@dataclass(frozen=True)
class Ran:
    """What came of a command: the observation at its end, the result of each executed step, the frames filmed."""

    observation: dict[str, Any]
    results: tuple[StepResult, ...] = ()
    frames: tuple[np.ndarray, ...] = field(default=(), repr=False)


class Worker:
    """The simulators of some slots, by slot."""

    def __init__(self) -> None:
        self._simulators: dict[int, Simulator] = {}
        self._steps: dict[int, int] = {}

    def make(self, slot: int, arguments: dict[str, Any]) -> SimulatorSpec:
        """Build the slot's simulator, in place of an older one."""
        self._drop(slot)
        self._simulators[slot] = sims.make(**arguments)
        return self._simulators[slot].spec

    def reset(self, slot: int, payload: tuple[int, bool, Film | None]) -> Ran:
        """Begin an episode (seed, whether images are wanted, what is filmed)."""
        seed, images, film = payload
        simulator = self._simulators[slot]
        simulator.reset(seed)
        self._steps[slot] = 0
        frames = () if film is None else (simulator.render(film.camera, film.size),)
        return Ran(simulator.observe(images), (), frames)

    def run(self, slot: int, run: Run) -> Ran:
        """Execute actions until they are used up, the episode ends, or the task is done."""
        simulator = self._simulators[slot]
        results: list[StepResult] = []
        frames: list[np.ndarray] = []
        for action in run.actions:
            result = simulator.step(action)
            results.append(result)
            self._steps[slot] += 1
            if run.film is not None and self._steps[slot] % run.film.every == 0:
                frames.append(simulator.render(run.film.camera, run.film.size))
            if result.ended or (result.success and run.stop_at_success):
                break
        return Ran(simulator.observe(run.images), tuple(results), tuple(frames))

    def restore(self, slot: int, payload: tuple[int, np.ndarray]) -> None:
        """Bring an episode of a seed to where its first actions [n, D] lead, without looking."""
        seed, actions = payload
        self._simulators[slot].reset(seed)
        for action in actions:
            self._simulators[slot].step(action)
        self._steps[slot] = len(actions)

    def _drop(self, slot: int) -> None:
        if slot in self._simulators:
            self._simulators.pop(slot).close()

    def close(self) -> None:
        """Close all simulators."""
        for slot in list(self._simulators):
            self._drop(slot)


#: Seconds that a simulator may take to come back once its parent is gone.
_GRACE = 5.0


def _end_with(descriptor: int) -> None:
    """Once the other side of the socket is closed, end this process, even where a simulator never comes back."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)  # nothing but POLLHUP, which is always told
    hung_up.poll()
    time.sleep(_GRACE)  # to leave in order, as `serve` does where it is not busy
    os._exit(1)


def serve(descriptor: int) -> None:
    """Answer commands from a socket until the other side closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the socket
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    worker = Worker()
    while True:
        try:
            kind, slot, payload = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, getattr(worker, kind)(slot, payload))
        except SimulatorError as error:
            answer = (False, str(error))
        except Exception as error:  # whatever a simulator throws ends one episode, and is reported there
            where = traceback.extract_tb(error.__traceback__)[-1]
            answer = (False, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):  # nobody is there any more
            break
    worker.close()
