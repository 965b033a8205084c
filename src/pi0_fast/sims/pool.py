"""Many simulators side by side in worker processes, for one policy that serves them all in batches.

Each slot holds one simulator. A command to a slot is sent off at once (`reset`, `run`) and its outcome is picked up
by `wait`, whichever slot is done first. A worker that dies, hangs or raises fails the episode of the slot it was
busy with, with the reason, and is replaced; episodes of other slots in the same worker are brought back to where they
were by repeating their actions. Since each episode depends on its seed alone, results do not depend on how many slots
and processes there are.
Workers are plain subprocesses that inherit one socket: the parent's threads, locks and devices stay its own.
"""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np

from pi0_fast.sims import choose_renderer
from pi0_fast.sims.protocol import SimulatorSpec, StepResult
from pi0_fast.sims.worker import Film, Ran, Run
from pi0_fast.types import SimulatorError

__all__ = ["Film", "Outcome", "SimulatorPool"]

#: Seconds that one command may take before its worker counts as hung; building a simulator may take three times that.
TIMEOUT = 120.0
#: No wait of the system's is asked for more seconds than this; some refuse more.
_LONGEST_WAIT = 3600.0
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """What came of the last command to a slot.

    Attributes:
        slot: whose command it was.
        observation: the present, as Simulator.observe gives it; empty after a failure.
        results: of the steps executed by this command, fewer than asked for where the episode ended or succeeded.
        frames: pictures for a video, uint8 [h, w, 3] each.
        failure: None, or why the episode cannot go on; the next command to the slot is a `reset`.
    """

    slot: int
    observation: dict[str, Any]
    results: tuple[StepResult, ...] = ()
    frames: tuple[np.ndarray, ...] = field(default=(), repr=False)
    failure: str | None = None


@dataclass
class _Slot:
    """The parent's side of a slot: how its simulator is built, and the episode so far.

    Attributes:
        arguments: of `sims.make`.
        built: the worker has the simulator, in a known state.
        seed: of the running episode; None where there is none.
        actions: that the running episode has executed.
        failure: why the running episode cannot go on, where no command was out that could have said so.
        busy: a command is out, or its outcome is not picked up yet.
    """

    arguments: dict[str, Any]
    built: bool = False
    seed: int | None = None
    actions: list[np.ndarray] = field(default_factory=list)
    failure: str | None = None
    busy: bool = False


@dataclass
class _Command:
    """What is asked of a worker; `silent` ones rebuild, and have no outcome of their own."""

    kind: str
    slot: int
    payload: Any
    silent: bool = False


class _Process:
    """One worker process, the commands that wait for it, and the one it is busy with."""

    def __init__(self) -> None:
        self.queue: deque[_Command] = deque()
        self.current: _Command | None = None
        self.deadline = 0.0
        self.start()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        # The child finds the package where this process found it, whatever its own path would be.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from pi0_fast.sims import worker; worker.serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env={**dict.fromkeys(_THREADS, "1"), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self.connection: Connection[Any, Any] = Connection(ours.detach())

    def send_next(self, timeout: float) -> None:
        """Hand over the next command where the worker is free."""
        if self.current is None and self.queue:
            self.current = self.queue.popleft()
            self.deadline = time.monotonic() + timeout * (3 if self.current.kind == "make" else 1)
            # Where it has died, the read that follows finds that out, and says so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.connection.send((self.current.kind, self.current.slot, self.current.payload))

    def stop(self) -> str:
        """End the process now; returns how it ended and its last words."""
        try:
            code = self._process.wait(0.5)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            how = "killed"
        self.connection.close()
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        self._log.close()
        return how + (f"; its last words: {lines[-1].strip()}" if lines else "")

    def leave(self, patience: float) -> None:
        """Let the process go: it leaves when its socket closes, and is killed where it does not in so many seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class SimulatorPool:
    """Simulators in worker processes; a context manager. `specs` holds the description of each slot's simulator.

    Args:
        environments: one per slot, the keyword arguments of `sims.make` (EnvConfig.arguments gives them).
        processes: number of worker processes, at most one per slot; slots are dealt out in turn.
        timeout: seconds that one command may take before its worker is taken for hung and replaced.

    Raises:
        SimulatorError: a simulator cannot be built, with its reason; or the arguments are impossible.
    """

    def __init__(
        self, environments: Sequence[dict[str, Any]], processes: int | None = None, *, timeout: float = TIMEOUT
    ) -> None:
        if not environments or (processes is not None and processes < 1) or not timeout > 0:
            raise SimulatorError(
                f"a pool needs an environment, a process and time; it got {len(environments)}, {processes}, {timeout}"
            )
        choose_renderer(str(arguments.get("env_type")) for arguments in environments)
        self._timeout = timeout
        self._slots = [_Slot(dict(arguments)) for arguments in environments]
        self._processes = [_Process() for _ in range(min(processes or len(environments), len(environments)))]
        #: Replaced worker processes so far.
        self.replaced = 0
        self._outcomes: deque[Outcome] = deque()
        self.specs: list[SimulatorSpec] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._slots)

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for process in self._processes:
            process.connection.close()
        patience = time.monotonic() + 5
        for process in self._processes:
            process.leave(max(0.0, patience - time.monotonic()))
        self._processes = []

    # ------------------------------------------------------------------------------------------------
    # Commands

    def reset(self, slot: int, seed: int, *, images: bool = True, film: Film | None = None) -> None:
        """Begin an episode in a slot; the outcome holds the first observation (and the first frame of a film)."""
        state, seed = self._claim(slot), operator.index(seed)
        state.seed, state.actions, state.failure = seed, [], None
        if not state.built:
            self._send(_Command("make", slot, state.arguments, silent=True))
        self._send(_Command("reset", slot, (seed, images, film)))

    def run(
        self,
        slot: int,
        actions: np.ndarray,
        *,
        images: bool = True,
        film: Film | None = None,
        stop_at_success: bool = True,
    ) -> None:
        """Execute actions [k, D] in a slot, up to the end of the episode or the first success.

        Args:
            slot: which simulator; its last outcome must have been picked up.
            actions: float [k, D], in the units of the simulator.
            images: whether the observation at the end has images, which cost the most.
            film: pictures for a video on the way.
            stop_at_success: stop after the first step with success.
        """
        steps = np.asarray(actions, np.float32)
        if steps.ndim != 2 or not len(steps):
            raise SimulatorError(f"slot {slot}: actions have shape [steps, dimensions], not {list(steps.shape)}")
        if self._slots[slot].seed is None and self._slots[slot].failure is None:
            raise SimulatorError(f"slot {slot} has no running episode: reset it first")
        state = self._claim(slot)
        if state.failure is not None:
            self._outcomes.append(Outcome(slot, {}, failure=state.failure))
        else:
            self._send(_Command("run", slot, Run(steps, images, film, stop_at_success)))

    def wait(self, timeout: float | None = None) -> list[Outcome]:
        """Outcomes that are there, at least one; fewer only where nothing was sent off or the seconds are over."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._outcomes and any(slot.busy for slot in self._slots):
            self._turn(until)
            if until is not None and time.monotonic() >= until:
                break
        found = list(self._outcomes)
        self._outcomes.clear()
        for outcome in found:
            self._slots[outcome.slot].busy = False
        return found

    def wait_for(self, slots: Iterable[int]) -> dict[int, Outcome]:
        """The outcomes of these slots, in their order; each has a command out. Others stay to be picked up."""
        order = list(slots)
        wanted = set(order)
        idle = [slot for slot in wanted if not self._slots[slot].busy]
        if idle:
            raise SimulatorError(f"slots {idle} have no command to wait for")
        found: dict[int, Outcome] = {}
        others: list[Outcome] = []
        while wanted - found.keys():
            for outcome in self.wait():
                if outcome.slot in wanted:
                    found[outcome.slot] = outcome
                else:
                    others.append(outcome)
        for outcome in others:
            self._slots[outcome.slot].busy = True
            self._outcomes.append(outcome)
        return {slot: found[slot] for slot in order}

    # ------------------------------------------------------------------------------------------------
    # Workers

    def _process_of(self, slot: int) -> _Process:
        return self._processes[slot % len(self._processes)]

    def _claim(self, slot: int) -> _Slot:
        if not self._processes:
            raise SimulatorError("the pool is closed")
        if self._slots[slot].busy:
            raise SimulatorError(f"slot {slot} is busy: wait for its outcome first")
        self._slots[slot].busy = True
        return self._slots[slot]

    def _send(self, command: _Command) -> None:
        process = self._process_of(command.slot)
        process.queue.append(command)
        process.send_next(self._timeout)

    def _build(self) -> None:
        for slot, state in enumerate(self._slots):
            state.busy = True
            self._send(_Command("make", slot, state.arguments))
        made: dict[int, Any] = {}
        while len(made) < len(self._slots):
            for outcome in self.wait():
                if outcome.failure is not None:
                    raise SimulatorError(outcome.failure)
                made[outcome.slot] = outcome.observation["spec"]
        self.specs = [made[slot] for slot in range(len(self._slots))]

    def _turn(self, until: float | None) -> None:
        """Wait for one thing to happen: an answer, a death, a deadline, or the time that the caller gives."""
        busy = {process.connection: process for process in self._processes if process.current is not None}
        ends = [process.deadline for process in busy.values()] + ([] if until is None else [until])
        ready = wait(list(busy), min(max(0.0, min(ends) - time.monotonic()), _LONGEST_WAIT))
        for connection in ready:
            process = busy[connection]  # type: ignore[index]
            try:
                fine, answer = process.connection.recv()
            except (EOFError, ConnectionResetError):
                self._replace(process, "the simulator's process died")
                continue
            command, process.current = process.current, None
            assert command is not None
            process.send_next(self._timeout)  # the next slot's work goes on while this answer is dealt with
            self._answered(command, fine, answer)
        for process in busy.values():
            if process.connection not in ready and time.monotonic() >= process.deadline:
                self._replace(process, f"no answer within {self._timeout:g} s")

    def _answered(self, command: _Command, fine: bool, answer: Any) -> None:
        state = self._slots[command.slot]
        if not fine:
            self._fail(command, str(answer))
        elif command.kind == "make":
            state.built = True
            if not command.silent:
                self._outcomes.append(Outcome(command.slot, {"spec": answer}))
        elif not command.silent:
            assert isinstance(answer, Ran)
            if command.kind == "run":
                state.actions.extend(command.payload.actions[: len(answer.results)])
            self._outcomes.append(Outcome(command.slot, answer.observation, answer.results, answer.frames))

    def _fail(self, command: _Command, reason: str) -> None:
        """The slot's episode is over with a reason; its simulator, in an unknown state by now, is built anew."""
        state, process = self._slots[command.slot], self._process_of(command.slot)
        state.built, state.seed = False, None
        # Where it was being brought back, what waits behind that cannot be served either.
        lost = [command, *(c for c in process.queue if c.slot == command.slot)]
        process.queue = deque(c for c in process.queue if c.slot != command.slot)
        if all(c.silent for c in lost):
            state.failure = reason
        else:
            self._outcomes.append(Outcome(command.slot, {}, failure=reason))

    def _replace(self, process: _Process, reason: str) -> None:
        """Start a worker in place of one that died or hangs; all slots but the guilty one go on where they were."""
        guilty, process.current = process.current, None
        assert guilty is not None
        reason = f"{reason} ({process.stop()})"
        process.start()
        self.replaced += 1
        waiting, process.queue = process.queue, deque()
        number = self._processes.index(process)
        for slot in range(number, len(self._slots), len(self._processes)):
            state = self._slots[slot]
            state.built = False
            if slot != guilty.slot and state.seed is not None:
                so_far = (state.seed, np.asarray(state.actions, np.float32))
                process.queue.append(_Command("make", slot, state.arguments, silent=True))
                process.queue.append(_Command("restore", slot, so_far, silent=True))
        process.queue.extend(c for c in waiting if not c.silent or c.slot == guilty.slot)
        self._fail(guilty, reason)
        process.send_next(self._timeout)
