"""The numbers of a run: sums over steps, metrics.jsonl, metrics.png, trackio and Weights & Biases.

metrics.jsonl has one object a line, with "step" and "kind": "train" for the means since the line before, "validation"
for what was measured on held-out frames, "simulation" for what the policy did in a simulator. A run that resumes drops
the lines behind the step it goes on from. Left out: what the numbers mean for a policy (validation.py), and when they
are written (loop.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pi0_fast.reports.pictures import BLUE, GREY, ORANGE, Picture, draw_picture, require_matplotlib
from pi0_fast.train_config import TrainConfig
from pi0_fast.types import PolicyError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS_FILE, PICTURE_FILE = "metrics.jsonl", "metrics.png"
#: What of a line is state of the run, and goes on where it resumes; the rest is time.
_SUMS = ("steps", "loss", "grad_norm", "frames", "target_ids")


class Meter:
    """Sums since the last line; losses stay on the device, so that adding one does not wait for it.

    Attributes:
        counts: of what was changed or left out of the batches, by name.
    """

    def __init__(self, device: torch.device, datasets: Sequence[str] = ()) -> None:
        """`datasets` are the names of several, whose losses are told apart."""
        self._device, self._names = device, tuple(datasets)
        self.counts: Counter[str] = Counter()
        self._sums: dict[str, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._sums = {"steps": 0, "loss": self._zero(), "grad_norm": self._zero(), "frames": 0, "target_ids": 0}
        self._datasets = self._zero().expand(len(self._names), 2).clone()
        self.counts.clear()
        self.restart_clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block, which is spent on something else than training."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._begun += time.perf_counter() - begun

    def restart_clock(self) -> None:
        """Measure time from now on."""
        self._steps_timed = self._frames_timed = 0
        self._ids_timed = 0
        self._waited = 0.0
        self._begun = time.perf_counter()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64 if self._device.type != "mps" else torch.float32)

    def add(
        self, loss: Tensor, grad_norm: Tensor, *, frames: int, target_ids: int, waited_s: float, counts: Counter[str]
    ) -> None:
        """One step: its mean loss and gradient norm, frames and predicted ids, seconds it waited for data."""
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            self._sums[name] = self._sums[name].to(value.device) + value.detach()
        for name, count in (("steps", 1), ("frames", frames), ("target_ids", target_ids)):
            self._sums[name] += count
        self.counts.update(counts)
        self._steps_timed += 1
        self._frames_timed += frames
        self._ids_timed += target_ids
        self._waited += waited_s

    def add_datasets(self, losses: Tensor) -> None:
        """Of a step, or a part of it: what each dataset added to the loss and its weight there, float [D, 2]."""
        self._datasets = self._datasets.to(losses.device) + losses

    def check(self, step: int, since: int, way_out: str) -> None:
        """Refuse losses and gradients that are no numbers; waits for the device.

        Raises:
            PolicyError: one of the steps from `since` + 1 to `step` had such.
        """
        for name, what in (("loss", "loss"), ("grad_norm", "gradient")):
            value = float(self._sums[name])
            if not math.isfinite(value):
                when = f"at step {step}" if step == since + 1 else f"between step {since + 1} and step {step}"
                raise PolicyError(
                    f"the {what} became {value} {when}; a smaller --policy.optimizer_lr may help. {way_out}"
                )

    def read(self) -> dict[str, Any]:
        """Means since the last reading, which begins anew; empty without a step. Times are of this process only."""
        steps = self._sums["steps"]
        if steps == 0:
            return {}
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        timed = max(self._steps_timed, 1)
        values: dict[str, Any] = {
            "loss": float(self._sums["loss"]) / steps,
            "grad_norm": float(self._sums["grad_norm"]) / steps,
            "steps": steps,
            "frames": self._sums["frames"],
            "target_ids": self._sums["target_ids"],
            "step_s": seconds / timed,
            "data_share": min(self._waited / seconds, 1.0),
            "frames_per_s": self._frames_timed / seconds,
            "target_ids_per_s": self._ids_timed / seconds,
            "memory_gib": memory_gib(self._device),
        }
        counts = {name: count for name, count in sorted(self.counts.items()) if count and name != "rows"}
        if counts:
            values["counts"] = counts
        if self._names:
            sums = zip(self._names, self._datasets.tolist(), strict=True)
            # A dataset that none of the steps had has no loss.
            values["dataset_losses"] = {name: loss / weight for name, (loss, weight) in sums if weight}
        self._clear()
        return values

    def state(self) -> dict[str, Any]:
        """The sums, as JSON holds them exactly."""
        plain = {name: float(self._sums[name]) for name in ("loss", "grad_norm")}
        datasets = {"datasets": self._datasets.tolist()} if self._names else {}
        return {**{name: self._sums[name] for name in _SUMS}, **plain, "counts": dict(self.counts), **datasets}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self._clear()
        self._sums.update({name: state[name] for name in ("steps", "frames", "target_ids")})
        for name in ("loss", "grad_norm"):
            self._sums[name] = self._zero() + state[name]
        self.counts.update(state["counts"])
        if self._names and len(state.get("datasets", ())) == len(self._names):
            self._datasets = self._datasets + torch.tensor(state["datasets"], dtype=self._datasets.dtype)


def combined(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `Meter.read` gave in each of several processes, as one: loss, frames and ids are of all already.

    Counts are added up; of waiting and memory the largest share counts, since the slowest holds up all.
    """
    one = dict(values[0])
    if not one:
        return one
    for name in ("data_share", "memory_gib"):
        one[name] = max(each[name] for each in values)
    counts: Counter[str] = Counter()
    for each in values:
        counts.update(each.get("counts", {}))
    if counts:
        one["counts"] = dict(sorted(counts.items()))
    return one


def memory_gib(device: torch.device) -> float:
    """Most memory that was in use so far: of the device, or on a CPU the process's resident memory; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


# --- trackers -------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """A service that metrics go to."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class _WandB:
    def __init__(self, config: TrainConfig, content: Mapping[str, Any]) -> None:
        wandb = _module("wandb", "wandb.enable", "pip install wandb")
        asked = config.wandb
        self._run = wandb.init(
            project=asked.project,
            entity=asked.entity,
            name=config.name,
            notes=asked.notes,
            id=asked.run_id,
            resume="allow" if asked.run_id is not None else None,
            mode=asked.mode,
            dir=str(config.output_path),
            config=dict(content),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, config: TrainConfig, content: Mapping[str, Any]) -> None:
        self._trackio = _module("trackio", "trackio.enable", "pip install 'pi0-fast[track]'")
        self._trackio.init(
            project=config.trackio.project,
            name=config.name,
            space_id=config.trackio.space_id,
            config=dict(content),
            resume="allow" if config.resume else "never",
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._trackio.log(values, step=step)

    def finish(self) -> None:
        self._trackio.finish()


def _module(name: str, flag: str, way_out: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"--{flag}=true needs {name}, which cannot be imported ({error}): {way_out}") from error


def check_outputs(config: TrainConfig) -> None:
    """Before the work: can the metrics be drawn and sent where they are to go?

    Raises:
        UsageError: a library is missing.
    """
    require_matplotlib()
    for enabled, name, way_out in (
        (config.wandb.enable, "wandb", "pip install wandb"),
        (config.trackio.enable, "trackio", "pip install 'pi0-fast[track]'"),
    ):
        if enabled and importlib.util.find_spec(name) is None:
            raise UsageError(f"--{name}.enable=true needs {name}, which is not installed: {way_out}")


def trackers(config: TrainConfig, content: Mapping[str, Any]) -> list[Tracker]:
    """Those that are asked for, begun; `content` is the configuration as they show it.

    Raises:
        UsageError: one is not installed.
    """
    made: list[Tracker] = []
    if config.wandb.enable:
        made.append(_WandB(config, content))
    if config.trackio.enable:
        made.append(_Trackio(config, content))
    return made


# --- files ----------------------------------------------------------------------------------------------------------


class Metrics:
    """metrics.jsonl and metrics.png of a run's directory, and the trackers."""

    def __init__(self, output_dir: Path, trackers: list[Tracker], *, resumed_step: int = 0) -> None:
        """Keep the lines up to the step that the run goes on from, and drop the rest.

        Raises:
            OSError: the directory cannot be written.
        """
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._picture = output_dir / METRICS_FILE, output_dir / PICTURE_FILE
        self._trackers = trackers
        self._drawn = time.monotonic()
        lines = [line for line in read_metrics(output_dir) if line["step"] <= resumed_step]
        _replace(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        numbers = {f"{kind}/{name}": value for name, value in _numbers(values)}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def draw(self, at_least_apart_s: float = 0.0) -> None:
        """Write the picture of all lines, where there are any, and where the last one is that old."""
        if time.monotonic() - self._drawn < at_least_apart_s:
            return
        self._drawn = time.monotonic()
        lines = read_metrics(self._path.parent)
        if lines:
            _replace(self._picture, curves(lines).png)

    def finish(self) -> None:
        """Draw, and end the trackers."""
        self.draw()
        for tracker in self._trackers:
            tracker.finish()


def _numbers(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found.append((f"{prefix}{name}", float(value)))
    return found


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line that a kill cut off is left out.

    Raises:
        PolicyError: another line is damaged.
    """
    path = output_dir / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is incomplete
        try:
            content = json.loads(line)
            content["step"], content["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise PolicyError(
                f"{path}, line {number} is damaged ({error!r}): mend it, or move the file away"
            ) from error
        found.append(content)
    return found


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def curves(lines: list[dict[str, Any]]) -> Picture:
    """Loss, learning rate and what validation measured, over the steps."""
    train = [line for line in lines if line["kind"] == "train"]
    validation = [line for line in lines if line["kind"] == "validation"]
    simulation = [line for line in lines if line["kind"] == "simulation"]
    panels: list[tuple[str, list[tuple[str, str, list[dict[str, Any]], str]]]] = [
        ("loss", [("training", "loss", train, BLUE), ("validation", "loss", validation, ORANGE)]),
        ("gradient norm", [("", "grad_norm", train, BLUE)]),
        ("learning rate", [("", "learning_rate", train, BLUE)]),
        ("token accuracy", [("", "token_accuracy", validation, ORANGE)]),
        ("success in the simulator", [("", "success", simulation, ORANGE)]),
        (
            "error of actions",
            [
                ("generated", "action_l1", validation, ORANGE),
                ("mean action", "mean_action_l1", validation, GREY),
                ("tokenizer alone", "tokenizer_l1", validation, BLUE),
            ],
        ),
    ]
    drawn = [
        (title, [line for line in kinds if any(entry.get(line[1]) is not None for entry in line[2])])
        for title, kinds in panels
    ]
    drawn = [(title, kinds) for title, kinds in drawn if kinds]

    def draw(figure: Figure) -> None:
        for number, (title, kinds) in enumerate(drawn, start=1):
            axes = figure.add_subplot((len(drawn) + 1) // 2, min(2, len(drawn)), number)
            axes.set(title=title, xlabel="step")
            for label, name, entries, colour in kinds:
                points = [(entry["step"], entry[name]) for entry in entries if entry.get(name) is not None]
                axes.plot(*zip(*points, strict=True), color=colour, label=label or None, marker=".", markersize=4)
            if kinds[0][0]:
                axes.legend()

    return draw_picture("metrics", "Training, over the steps.", 2.4 * ((len(drawn) + 1) // 2), draw)
