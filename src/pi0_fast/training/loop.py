"""`pi0-fast train`: from a configuration to checkpoints, and on from one of them as if nothing had happened.

A step takes its batches, adds up their gradients, updates the weights. Everything random in it is a function of the
seed and the step's number, so that a run that was killed and resumed has, on a CPU, the same weights to the last bit as
one that was not. SIGTERM and SIGINT end the step, save and leave. Several processes take one part each of every batch,
and their gradients are those of the whole batch; the first of them prints and writes. Left out, what its parts do:
processes.py and sharding.py (several devices), setup.py (data and policy), loader.py (batches), optimizer.py,
validation.py, states.py (checkpoints), metrics.py.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shlex
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pi0_fast import __version__
from pi0_fast.actions.report import Table
from pi0_fast.counters import described
from pi0_fast.display import print_table, progress, say, warn
from pi0_fast.flag_names import OF_TRAINING, flags_named
from pi0_fast.policy_card import Training
from pi0_fast.preparation import Prepared
from pi0_fast.train_config import LAST, PRETRAINED_MODEL, TRAIN_CONFIG_FILE, TrainConfig
from pi0_fast.training.baselines import beside, measured_table, verdict
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.launch import read_launch
from pi0_fast.training.loader import TrainBatches
from pi0_fast.training.lora import bits_digest
from pi0_fast.training.metrics import Meter, Metrics, check_outputs, combined, trackers
from pi0_fast.training.optimizer import Optimizer
from pi0_fast.training.processes import Processes, begun
from pi0_fast.training.report import report
from pi0_fast.training.setup import Run, set_up
from pi0_fast.training.sharding import check_engine, lent, synchronised, whole_model, wrapped
from pi0_fast.training.simulation import Simulation, said
from pi0_fast.training.states import Checkpoints, SavedState, newest_checkpoint, read_state
from pi0_fast.training.validation import loss_units, measure, over_datasets
from pi0_fast.types import DatasetError, UsageError

#: A picture takes a second.
_SECONDS_BETWEEN_PICTURES = 60.0


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        output_dir: of the run.
        step: updates that were done in all.
        finished: False where a signal ended it before the last step.
        checkpoint: the newest one, or None.
        validation: the last measurement of this process (see `validation.measure`), or None.
    """

    output_dir: Path
    step: int
    finished: bool
    checkpoint: Path | None
    validation: dict[str, Any] | None


@flags_named(OF_TRAINING)
def train(config: TrainConfig) -> TrainingResult:
    """Train a policy as the configuration says; checkpoints, metrics and the report go to its ``output_dir``.

    Raises:
        UsageError, DatasetError, PolicyError, TokenizerError, HubError: what is wrong with what was asked for or found;
            as far as possible before the first step.
        OSError: something cannot be written; earlier checkpoints are as they were.
    """
    config = config.resolved()
    launch = read_launch(config)
    check_engine(launch, config)
    if launch.cpu and config.policy.device is None:
        config.policy = replace(config.policy, device="cpu")
    with begun(launch, device=config.policy.device, timeout_s=config.distributed_timeout_s) as processes:
        return _train(_agreed(config, processes), processes)


def _train(config: TrainConfig, processes: Processes) -> TrainingResult:
    check_outputs(config)
    run = set_up(config)
    processes.launch.check_dtype(run.policy.config.dtype)
    if processes.count > 1:
        processes.check_same(_fundamentals(run))
    _say_processes(config, processes)
    loop = _Loop(run, processes)
    if not config.resume and processes.first:
        report(run)
    processes.wait()
    return loop.run()


def _agreed(config: TrainConfig, processes: Processes) -> TrainConfig:
    """The same output directory and checkpoint everywhere: one depends on the time, the other on the disk."""
    if processes.count == 1:
        return config
    processes.check_same(_flags(config.to_json()))
    checkpoint = config.checkpoint
    if config.resume and checkpoint is None and processes.first:
        checkpoint = newest_checkpoint(config.output_path)
    output_dir, checkpoint = processes.from_first((config.output_dir, checkpoint))
    agreed = replace(config, output_dir=output_dir)
    agreed.checkpoint = checkpoint
    return agreed


#: What may differ between machines.
_OF_A_MACHINE = (
    *("dataset.root", "dataset.cache_dir", "policy.path", "policy.pretrained_path", "policy.fast_tokenizer_cache_dir"),
    *("output_dir", "num_workers", "prefetch_factor"),
)


def _flags(content: dict[str, Any], group: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= _flags(value, f"{group}{name}.")
        elif f"{group}{name}" not in _OF_A_MACHINE:
            found[f"--{group}{name}"] = value
    return found


def _fundamentals(run: Run) -> dict[str, Any]:
    """What all processes of a run must have in common; a difference would be trained on in silence."""
    found = {
        **run.conditions(),
        "states and actions of the dataset (sha256)": run.data_digest,
        "torch": torch.__version__,
        "pi0-fast": __version__,
        "weights (sha256 of sums)": bits_digest(run.policy.model.named_parameters()),
    }
    for each in run.datasets:
        where = f" of {each.member.name}" if run.others else ""
        settings = json.dumps(asdict(each.policy.config), sort_keys=True, default=str)
        found[f"settings of the policy{where} (sha256)"] = hashlib.sha256(settings.encode()).hexdigest()[:12]
        for kind, fingerprint in each.policy.checkpoint().fingerprints().items():
            found[f"{kind.replace('_', ' ')}{where} (fingerprint)"] = fingerprint
    return found


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What is different, one by one; of groups of values only those that are."""
    for name, value in before.items():
        other = now.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from (f"{name}: {change}" for change in _changes(value, other))
        elif value != other:
            yield f"{name} was {value!r} and is {other!r}"


def _say_processes(config: TrainConfig, processes: Processes) -> None:
    launch = processes.launch
    if launch.unknown:
        warn(f"accelerate sets {', '.join(launch.unknown)}, which nothing here knows: it changes nothing")
    if launch.count == 1:
        if config.distributed is not None:
            warn(f"--distributed={config.distributed} changes nothing: this is the only process")
        return
    batch = config.batch_size * launch.count * config.gradient_accumulation_steps
    accumulated = f" x {config.gradient_accumulation_steps}" if config.gradient_accumulation_steps > 1 else ""
    say(
        f"{launch.count} processes ({launch.engine}): {config.batch_size} frames a process x {launch.count}"
        f"{accumulated} = {batch} frames a step"
    )


class _Loop:
    """A run from its first step to its last, or to a signal."""

    def __init__(self, run: Run, processes: Processes) -> None:
        self._run, self._config, self._policy = run, run.config, run.policy
        self._processes = processes
        self._first, self._sharded = processes.first, processes.launch.engine == "fsdp"
        config, self._device = run.config, run.policy.model.device
        self._accumulation = config.gradient_accumulation_steps
        saved = self._saved()
        self._start = 0 if saved is None else saved.step
        fused = run.policy.config.optimizer_fused
        if saved is not None:
            fused = _saved_choice(saved, config.policy.optimizer_fused)
        self._simulation = Simulation(run.policy, config, processes) if config.simulation_freq else None
        self._module = wrapped(run.policy, processes)
        self._optimizer = Optimizer(
            run.policy,
            run.policy.config,
            steps=config.steps,
            fused=fused,
            ema_decay=config.ema_decay,
            processes=processes,
        )
        self._meter = Meter(self._device, [each.member.name for each in run.datasets] if run.others else [])
        self._read_at = self._start
        self._checkpoints = Checkpoints(config.output_path, total_steps=config.steps, keep_last=config.keep_last)
        self._newest = None if saved is None else saved.directory
        self._validation: dict[str, Any] | None = None
        if saved is not None:
            self._go_on_from(saved)
        if config.save_checkpoint and self._first:
            weights = sum(value.nbytes for value in run.policy.model.state_dict().values())
            self._checkpoints.check(weights + self._optimizer.state_bytes())

    # --- going on -----------------------------------------------------------------------------------------------

    def _saved(self) -> SavedState | None:
        if not self._config.resume:
            return None
        checkpoint = self._config.checkpoint or newest_checkpoint(self._config.output_path)
        if checkpoint is None:
            raise UsageError(f"--resume: {self._config.output_path} holds no complete checkpoint to go on from")
        return read_state(checkpoint)

    def _go_on_from(self, saved: SavedState) -> None:
        where = str(saved.directory)
        self._optimizer.load_state(saved.tensors, saved.progress["optimizer"], where)
        self._meter.load_state(saved.progress["meter"])
        if self._first:  # counts are added up over the processes when they are written
            self._policy.counts.update(saved.progress["counts"])
        else:
            self._meter.counts.clear()
        now = self._conditions()
        changed = list(_changes(saved.progress["conditions"], now))
        say(f"resuming {where} at step {saved.step} of {self._config.steps}")
        before, count = saved.progress.get("processes", 1), self._processes.count
        if before != count:
            say(f"it was saved by {_counted(before)}, and is gone on with by {_counted(count)}: rounding will differ")
        if changed:
            frames, keep = saved.progress["conditions"].get("batch_size"), ""
            if before != count and frames != now["batch_size"] and frames % count == 0:
                keep = f". --batch_size={frames // count} keeps the batch of {frames} frames"
            warn(f"not the run that was interrupted, its results will differ: {'; '.join(changed)}{keep}")

    def _conditions(self) -> dict[str, Any]:
        """What the numbers of a step depend on, beyond weights and step."""
        config = self._config
        return {
            "seed": config.seed,
            "batch_size": config.batch_size * self._processes.count,
            "gradient_accumulation_steps": self._accumulation,
            **self._run.conditions(),
            "learning rates": asdict(self._optimizer.schedule),
            "states and actions of the dataset (sha256)": self._run.data_digest,
            "device": self._device.type,
            "dtype": self._policy.config.dtype,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }

    # --- steps --------------------------------------------------------------------------------------------------

    def run(self) -> TrainingResult:
        config = self._config
        if self._start >= config.steps:
            say(f"the run has done all of its {config.steps} steps; raise --steps to go on")
            return self._result(self._start)
        metrics = None
        if self._first:
            content = config.to_json()
            metrics = Metrics(config.output_path, trackers(config, content), resumed_step=self._start)
        with ExitStack() as stack:
            # Workers are begun first: what is done about signals here is not for them.
            batches = stack.enter_context(
                self._run.batches(
                    self._start * self._accumulation,
                    config.steps * self._accumulation,
                    share=(self._processes.rank, self._processes.count),
                )
            )
            stop = stack.enter_context(_noted_signals())
            advance = stack.enter_context(progress("training", config.steps, "steps"))
            advance(self._start)
            try:
                step = self._steps(batches, metrics, stop, advance)
            except KeyboardInterrupt:  # the second one, which saves nothing
                say(f"interrupted; {self._way_on()}")
                raise
        if metrics is not None:
            metrics.finish()
        self._policy.eval()
        return self._end(step)

    def _steps(self, batches: TrainBatches, metrics: Metrics | None, stop: _Stop, advance: Any) -> int:
        config = self._config
        self._policy.train()
        self._meter.restart_clock()
        step = self._start
        while step < config.steps and self._one_step(step, batches, stop):
            step += 1
            advance()
            last = step == config.steps
            if self._device.type == "cpu":
                self._check(step)
            if config.log_freq and (step % config.log_freq == 0 or last):
                self._log(step, metrics)
            with self._meter.paused():
                if config.eval_freq and (step % config.eval_freq == 0 or last):
                    self._measure(step, metrics, stop)
                if config.simulation_freq and (step % config.simulation_freq == 0 or last):
                    self._simulate(step, metrics, stop)
                if config.save_checkpoint and ((config.save_freq and step % config.save_freq == 0) or last):
                    self._save(step, metrics)
        stopped = step < config.steps
        if stopped and config.save_checkpoint and self._newest_step() != step and step > 0:
            self._save(step, metrics)
        return step

    def _one_step(self, step: int, batches: TrainBatches, stop: _Stop) -> bool:
        """One update; False where a signal came to one of the processes before it was begun."""
        torch.manual_seed(int(np.random.SeedSequence([self._config.seed, step]).generate_state(1)[0]))
        waited = batches.waited_s
        prepared = None if stop.asked else _next_batches(batches, self._accumulation, stop)
        waited = batches.waited_s - waited
        units = [loss_units(each, self._policy.config.prompt_format) for each in prepared or ()]
        counts: Counter[str] = Counter()
        for each, own in zip(prepared or (), units, strict=True):
            # A batch without loss holds a row that only fills it up, of which nothing counts.
            counts.update(each.counts if own else {"padded_rows": each.counts["padded_rows"]})
        useful = [each for each, own in zip(prepared or (), units, strict=True) if own]
        frames = sum(each.counts["rows"] for each in useful)
        ids = sum(int(each.prompt.label.sum()) for each in useful)
        stopping, total, frames, ids = self._processes.sums([prepared is None, sum(units), frames, ids])
        if stopping or prepared is None:
            return False
        if total == 0:  # only rows with padded steps: there is nothing to learn from
            self._meter.counts.update(counts + Counter(steps_without_loss=int(self._first)))
            return True
        losses = self._backward(prepared, units, total)
        self._processes.add_up(losses)
        with self._processes.reaching():
            norm = self._optimizer.step(step)
        self._meter.add_datasets(losses[1:].reshape(-1, 2))
        self._meter.add(losses[0], norm, frames=frames, target_ids=ids, waited_s=waited, counts=counts)
        return True

    def _backward(self, prepared: list[Prepared], units: list[int], total: int) -> Tensor:
        """Gradients of the mean over `total` units of all processes' batches, and this process' part of that mean.

        Of a mixture followed by its parts and their weights: float32 [1], or [1 + 2 D].
        """
        loss = torch.zeros((), device=self._device)
        by_dataset = torch.zeros(len(self._run.datasets) if self._run.others else 0, 2, device=self._device)
        several = self._processes.count
        for number, (each, own) in enumerate(zip(prepared, units, strict=True)):
            counted = Counter(self._policy.counts)
            if own == 0 and several == 1:
                self._policy.counts["padded_rows"] += each.counts["padded_rows"]
                continue
            with self._processes.reaching(), synchronised(self._module, number == len(prepared) - 1):
                part, info = self._module(each)
                # The engines take the mean over the processes, of which the sum is wanted.
                share = several * own / total
                (part if share == 1 else part * share).backward()
            loss += part.detach() * (own / total)
            if own == 0:  # computed only because the other processes wait for its gradients, which are 0
                self._policy.counts.clear()
                self._policy.counts.update(counted + Counter(padded_rows=each.counts["padded_rows"]))
            if "dataset_losses" in info:
                by_dataset += info["dataset_losses"] * (own / total)
        return torch.cat((loss[None], by_dataset.flatten()))

    # --- beside the steps ---------------------------------------------------------------------------------------

    def _check(self, step: int) -> None:
        way_out = "No checkpoint was written yet"
        if self._newest is not None:
            way_out = f"The checkpoint {self._newest} is from before"
        self._meter.check(step, self._read_at, way_out)
        self._read_at = step

    def _log(self, step: int, metrics: Metrics | None) -> None:
        self._check(step)
        values = combined(self._processes.gather(self._meter.read()))
        if not values or metrics is None:
            return
        values["learning_rate"] = self._optimizer.schedule.rate(step - 1)
        metrics.write(step, "train", values)
        say(f"step {step}/{self._config.steps}: {_line(values)}")

    def _measure(self, step: int, metrics: Metrics | None, stop: _Stop) -> None:
        self._check(step)
        parts: dict[str, dict[str, Any]] = {}
        with self._final_weights(self._device), self._run.generating():
            for run in self._run.datasets:
                found = measure(
                    run.policy,
                    run.validation_frames or _without_transforms(run.train_frames),
                    most=self._config.max_eval_samples,
                    batch_size=self._config.batch_size,
                    stop=lambda: stop.asked,
                    share=(self._processes.rank, self._processes.count),
                    gather=self._processes.gather,
                )
                if found is None:
                    return
                parts[run.member.name] = found
        values = over_datasets(parts)
        for each in (values, *parts.values()):
            each["held_out"] = self._run.validation_frames is not None
        self._validation = values
        if metrics is None:
            return
        metrics.write(step, "validation", values)
        metrics.draw(_SECONDS_BETWEEN_PICTURES)
        held_out = "held-out" if values["held_out"] else "training"
        for name, part in parts.items():
            say(
                f"step {step}: on {part['frames']} {held_out} frames{f' of {name}' if self._run.others else ''} loss "
                f"{part['loss']:.4g}, token accuracy {part['token_accuracy']:.1%}"
            )
            say(f"  error of actions {part['action_l1']:.3g} ({beside(part)})")
        if self._run.others:
            say(f"step {step}: on all {values['frames']} of them loss {values['loss']:.4g}")

    def _simulate(self, step: int, metrics: Metrics | None, stop: _Stop) -> None:
        assert self._simulation is not None
        with self._final_weights(self._device), self._run.generating():
            values = self._simulation.measure(lambda: stop.asked)
        if values is None or metrics is None:
            return
        metrics.write(step, "simulation", values)
        if "success" in values:
            say(said(step, values))

    def _save(self, step: int, metrics: Metrics | None) -> None:
        self._check(step)
        meter = self._meter.state()
        counts = self._processes.gather((meter["counts"], dict(self._policy.counts)))
        progress_of_run = {
            "optimizer": self._optimizer.settings(),
            "meter": {**meter, "counts": _added([each for each, _ in counts])},
            "counts": _added([each for _, each in counts]),
            "conditions": self._conditions(),
            "processes": self._processes.count,
        }
        state = self._optimizer.state()  # of the weights themselves, not of their averages
        if self._sharded:
            with self._final_weights("cpu" if self._first else None):
                self._newest = self._checkpoints.save(step, self._write_model, progress_of_run, state, self._processes)
        elif self._first:
            with self._final_weights("cpu"):
                self._newest = self._checkpoints.save(step, self._write_model, progress_of_run, state)
        self._newest = self._processes.from_first(self._newest)
        if metrics is not None:
            metrics.draw(_SECONDS_BETWEEN_PICTURES)

    @contextmanager
    def _final_weights(self, device: torch.device | str | None) -> Iterator[None]:
        """Within the block the policies have the weights that are measured and saved: averaged, and not sharded."""
        if not self._sharded:
            with self._optimizer.averaged():
                yield
            return
        with self._optimizer.averaged():
            model = whole_model(self._policy.model, device)
        # Averaged no more: what is saved beside are the weights themselves, in the same memory.
        with lent([run.policy for run in self._run.datasets], model):
            yield

    def _write_model(self, directory: Path) -> None:
        self._run.save_model(directory)
        self._config.write(directory)

    def _newest_step(self) -> int | None:
        return None if self._newest is None else int(self._newest.name)

    # --- the end ------------------------------------------------------------------------------------------------

    def _end(self, step: int) -> TrainingResult:
        finished = step == self._config.steps
        for (title, rows, headers), found in self._measured():
            print_table(title, rows, headers)
            if found is not None:
                say(found)
        counts = _added(self._processes.gather(dict(self._policy.counts)))
        for line in described(counts):
            say(line)
        if finished:
            where = "" if self._newest is None else f": {self._newest / PRETRAINED_MODEL}"
            say(f"trained {step} steps{where}")
            self._push()
        elif self._newest is None:
            say(f"stopped after step {step} without a checkpoint")
        else:
            say(f"stopped after step {step}; {self._way_on()}")
        return self._result(step)

    def _measured(self) -> Iterator[tuple[Table, str | None]]:
        """A table for each dataset of what was measured last, and what there is to say of it."""
        if self._validation is None:
            return
        for run in self._run.datasets:
            part = self._validation.get("datasets", {}).get(run.member.name, self._validation)
            prefix = f"{run.member.name}: " if self._run.others else ""
            title, rows, headers = measured_table(part, run.columns.action.names)
            found = verdict(part)
            yield (f"{prefix}{title}", rows, headers), None if found is None else f"{prefix}{found}"

    def _way_on(self) -> str:
        if self._newest is None:
            return "no checkpoint was saved: begin again"
        file = self._newest.parent / LAST / PRETRAINED_MODEL / TRAIN_CONFIG_FILE
        return f"go on with: pi0-fast train --resume=true --config_path={shlex.quote(str(file))}"

    def _push(self) -> None:
        options = self._config.policy
        if not options.pushes or options.repo_id is None:
            return
        with self._final_weights("cpu" if self._first else None), self._run.generating():
            if self._first:
                frames = self._config.batch_size * self._processes.count * self._accumulation
                training = Training(
                    [run.member.repo_id for run in self._run.datasets],
                    [("Training", f"{self._config.steps:,} steps of {frames} frames")],
                    [table for table, _ in self._measured()],
                )
                address = self._run.push(options.repo_id, private=bool(options.private), training=training)
                say(f"uploaded: {address}")
        self._processes.wait()

    def _result(self, step: int) -> TrainingResult:
        config = self._config
        return TrainingResult(config.output_path, step, step >= config.steps, self._newest, self._validation)


def _saved_choice(saved: SavedState, asked: bool | None) -> bool:
    """Whether AdamW is fused: as it was, whatever is asked for now."""
    before = bool(saved.progress["optimizer"]["fused"])
    if asked is not None and asked != before:
        say(f"optimizer_fused={asked} is ignored: the run was begun with {before}, and resuming keeps that".lower())
    return before


def _added(counts: list[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _line(values: dict[str, Any]) -> str:
    """What `Meter.read` gave, with the learning rate; with the steps before it no wider than 100 columns."""
    speed = values["frames_per_s"]
    return (
        f"loss {values['loss']:.4g}, gradient {values['grad_norm']:.2g}, rate {values['learning_rate']:.2g}, "
        f"{speed:{'.0f' if speed >= 100 else '.3g'}} frames/s, {values['data_share']:.0%} waiting, "
        f"{values['memory_gib']:.3g} GiB"
    )


def _without_transforms(frames: FrameDataset) -> FrameDataset:
    plain = copy.copy(frames)
    plain.transforms = None
    return plain


def _next_batches(batches: TrainBatches, count: int, stop: _Stop) -> list[Prepared] | None:
    """The batches of a step, or None where a signal came: it may have ended the workers too."""
    found = []
    try:
        for _ in range(count):
            found.append(next(batches))
            if stop.asked:
                return None
    except (DatasetError, RuntimeError):
        if stop.asked:
            return None
        raise
    return found


class _Stop:
    """Whether a signal asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; an interrupt after the first is an ordinary one, and nothing is saved."""
        del frame
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def _noted_signals() -> Iterator[_Stop]:
    """Within the block SIGTERM and SIGINT are noted only. Elsewhere than in the main thread nothing can be done."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
