"""`pi0-fast eval`: a policy, or two on the same seeds, in a simulator; results as tables, json and a page with videos.

The directory of an evaluation:

    eval_config.json     what was asked for; `--resume` reads it
    episodes.jsonl       a line for each run of the command ("begun"; with what it ran) and for each finished episode,
                         as it finishes, with the run that it was in and what had been changed in observations till then
    videos/              of each task's first episodes, with --save_videos
    evaluation.json      at the end: settings, versions, summaries, all episodes
    evaluation.html      the same for people; one file, videos inside

Episodes that the simulator could not end are run again on `--resume`. Left out: the loop itself (closed_loop.py) and
what is shown (reports/evaluation.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi0_fast.checkpoint import find_checkpoint
from pi0_fast.closed_loop import Recorded, fitted_environment, run, side_by_side
from pi0_fast.data.video_encoding import encode_video
from pi0_fast.display import print_table, progress, say, warn
from pi0_fast.eval_config import (
    EPISODES_FILE,
    EVAL_CONFIG_FILE,
    PAGE_FILE,
    RESULTS_FILE,
    VIDEOS,
    EvalConfig,
    check_same,
)
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.recording import versions
from pi0_fast.reports.evaluation import ALL_TASKS, FAILED, FORMAT, EpisodeResult, EvaluationReport, Film
from pi0_fast.sims import preflight
from pi0_fast.sims.protocol import SimulatorSpec
from pi0_fast.simulation_config import SUITES, EnvConfig
from pi0_fast.swap import in_use, naming
from pi0_fast.types import SimulatorError, UsageError

#: Percent of successes that LeRobot's documentation reports for its own checkpoint, by suite; their mean is 82.5.
PUBLISHED = {"libero_spatial": 70.0, "libero_object": 100.0, "libero_goal": 100.0, "libero_10": 60.0}
PUBLISHED_BY = "LeRobot's documentation, for lerobot/pi0fast-libero, one episode of each task"
#: Videos are put into the page up to so many bytes of it.
_MOST_VIDEO_BYTES = 48 * 2**20


def evaluate(config: EvalConfig) -> EvaluationReport:
    """Evaluate as the configuration says; tables are printed, results are written to its ``output_dir``.

    Raises:
        UsageError: what was asked for contradicts itself, or the directory's earlier evaluation.
        PolicyError, TokenizerError, HubError: a checkpoint cannot be loaded, or does not fit the simulator.
        SimulatorError: the simulator cannot be built, or failed in every episode.
        OSError: something cannot be written; finished episodes are kept.
    """
    config.validate()
    config = config.resolved()
    if config.compare is not None and all(_is_evaluation(path) for path in config.compare):
        report = _compared(config)
    else:
        report = _evaluated(config)
    for letter, path in zip("AB", config.compare or (), strict=False):
        say(f"{letter}: {path}")
    for title, rows, headers in report.tables():
        print_table(title, rows, headers)
    for line in report.warnings:
        warn(line)
    say(f"results: {config.output_path / PAGE_FILE}, {config.output_path / RESULTS_FILE}")
    return report


# --- running --------------------------------------------------------------------------------------------------------


def _evaluated(config: EvalConfig) -> EvaluationReport:
    if config.env.type is None:
        raise UsageError(
            "--compare: these are no two finished evaluations: give --env.type and --env.task to evaluate both policies"
        )
    preflight(config.env.type)
    if config.save_videos and importlib.util.find_spec("av") is None:
        raise UsageError("--save_videos needs PyAV, which is not installed: pip install 'pi0-fast[policy]'")
    other = [config.policy.architecture, config.policy.text_tokenizer_name, config.policy.action_tokenizer_name]
    beside = [Path(name).expanduser() for name in other if name is not None]
    prints = [
        _fingerprint(find_checkpoint(path, revision=config.policy.pretrained_revision), *beside)
        for path in config.paths
    ]
    if len(config.paths) == 2:  # before the first episode: does the second one fit, too?
        fitted_environment(_load(config, config.paths[1]), config.simulation)
    with closing(_Folder(config)) as folder:
        try:
            report = _all_parts(config, folder, prints)
        except BaseException:
            done = sum(len(episodes) for episodes in folder.episodes.values())
            if done:
                total = len(config.paths) * len(config.simulation.tasks) * config.eval.n_episodes
                place = shlex.quote(str(config.output_dir))
                say(
                    f"stopped after {done} of {total} episodes; go on with: pi0-fast eval --resume=true "
                    f"--output_dir={place}"
                )
            raise
    return report


def _all_parts(config: EvalConfig, folder: _Folder, prints: Sequence[str]) -> EvaluationReport:
    """Run one policy after the other, and write the results."""
    parts: list[_Part] = []
    for number, path in enumerate(config.paths):
        policy = _load(config, path)
        environment, specs = fitted_environment(policy, config.simulation)
        part = _Part(path, prints[number], policy, environment, specs)
        if config.save_videos and not specs[0].cameras:
            raise UsageError(f"--save_videos: {specs[0].env_type} has no camera here; see --env.cameras")
        if number == 0:
            folder.begin(prints, {"device": _device_name(policy), "threads": torch.get_num_threads()})
        for what, text in _about(config, part):
            say(f"{what}: {text}")
        _run_part(config, folder, number, part)
        part.release(folder.counts(number))
        parts.append(part)
    report = _report(config, folder, parts)
    _refuse_nothing_but_failures(report)
    _write(config, report, *_films(config, report))
    return report


@dataclass
class _Part:
    """One policy of an evaluation, and what is kept of it when it is done."""

    path: str
    fingerprint: str
    policy: PI0FastPolicy | None
    environment: EnvConfig
    specs: tuple[SimulatorSpec, ...]
    details: dict[str, Any] | None = None
    about: tuple[tuple[str, str], ...] = ()

    def release(self, counts: Mapping[str, int]) -> None:
        """Give the weights' memory back, for the next one; `counts`: of all runs."""
        assert self.policy is not None
        policy = self.policy
        self.details = {
            "path": self.path,
            "fingerprint": self.fingerprint,
            "device": _device_name(policy),
            "config": policy.config.to_json(),
            "counts": dict(counts),
            "environment": _environment_json(self.environment),
        }
        self.policy = None


def _load(config: EvalConfig, path: str) -> PI0FastPolicy:
    options = config.policy
    return PI0FastPolicy.from_pretrained(
        path,
        revision=options.pretrained_revision,
        robot=options.robot,
        device=options.device,
        dtype=options.dtype,
        architecture=options.architecture,
        overrides=options.overrides(),
        rename_map=config.rename_map,
    )


def _about(config: EvalConfig, part: _Part) -> tuple[tuple[str, str], ...]:
    """What was decided, for people."""
    policy, spec = part.policy, part.specs[0]
    assert policy is not None
    simulators, processes = side_by_side(config.eval.batch_size, config.eval.n_episodes)
    cameras = ", ".join(f"{key} {height} x {width}" for key, (height, width) in spec.cameras.items())
    seeds = config.seeds
    lines = [
        ("policy", f"{part.path} ({part.fingerprint[:16]}), {policy.config.dtype} on {_device_name(policy)}"),
        (
            "actions",
            f"{policy.config.n_action_steps} of {policy.config.chunk_size} predicted steps are executed, "
            f"{'constrained' if policy.config.constrained else 'unconstrained'} decoding, "
            f"temperature {policy.config.temperature:g}",
        ),
        ("simulator", f"{spec.env_type}, {spec.fps:g} steps per second, {spec.max_steps} steps at most"),
        ("cameras", (cameras or "none") + _other_sizes(part)),
        ("episodes", f"{len(seeds)} of each task, seeds {seeds[0]} to {seeds[-1]}"),
        ("side by side", f"{simulators} simulators in {processes} processes"),
    ]
    names = policy.config.action_feature_names
    if names is not None and list(names) != list(spec.action_names):
        lines.append(
            ("names of actions", f"{', '.join(names)} of the policy are taken for {', '.join(spec.action_names)}")
        )
    if config.policy.max_action_tokens is not None:
        lines.append(("max_action_tokens", "concerns training; max_decoding_steps bounds what is generated"))
    part.about = tuple(lines)
    return part.about


def _other_sizes(part: _Part) -> str:
    """Says so where pictures are not of the size that the policy was trained on."""
    policy, spec = part.policy, part.specs[0]
    assert policy is not None
    inputs, renames = policy.config.expected_inputs, policy.preparation.processors.rename_map
    sizes = {key: inputs[renames.get(key, key)].shape[1:] for key in spec.cameras if renames.get(key, key) in inputs}
    other = sorted({"x".join(map(str, sizes[key])) for key in sizes if tuple(sizes[key]) != spec.cameras[key]})
    return f" (the policy's are {', '.join(other)}: --env.image_size chooses)" if other else ""


def _published(tasks: Sequence[str]) -> dict[str, float]:
    """Published numbers that an evaluation of these tasks can stand beside: of whole suites."""
    whole = {
        suite: percent
        for suite, percent in PUBLISHED.items()
        if all(f"{suite}/{number}" in tasks for number in range(SUITES["libero"][suite]))
    }
    if len(whole) == len(PUBLISHED) and sum(SUITES["libero"][suite] for suite in whole) == len(tasks):
        whole[ALL_TASKS] = sum(PUBLISHED.values()) / len(PUBLISHED)
    return whole


def _run_part(config: EvalConfig, folder: _Folder, number: int, part: _Part) -> None:
    assert part.policy is not None
    policy, done = part.policy, folder.episodes[number]
    total = len(config.simulation.tasks) * config.eval.n_episodes
    with progress(_label(config, number, "evaluating"), total, "episodes") as advance:
        advance(len(done))

        def keep(recorded: Recorded) -> None:
            if recorded.frames:
                folder.film(number, recorded)
            folder.add(number, recorded.result, policy.counts)
            advance()

        run(
            policy,
            part.environment,
            config.seeds,
            batch_size=config.eval.batch_size,
            timeout_s=config.eval.timeout_s,
            skip={(episode.task, episode.seed) for episode in done},
            films=config.max_videos if config.save_videos else 0,
            on_episode=keep,
        )


def _label(config: EvalConfig, number: int, what: str) -> str:
    return what if len(config.paths) == 1 else f"{what} {'AB'[number]}"


def _refuse_nothing_but_failures(report: EvaluationReport) -> None:
    for episodes in report.episodes:
        if all(episode.end == FAILED for episode in episodes):
            raise SimulatorError(
                f"the simulator failed in every episode: {episodes[0].failure} (--resume=true runs them again)"
            )


# --- what was run ---------------------------------------------------------------------------------------------------


def _fingerprint(*places: Path) -> str:
    """A sha256 of the files of a checkpoint, and of what else was named in place of its own, and of their names."""
    digest = hashlib.sha256()
    for place in places:
        found = place.rglob("*") if place.is_dir() else [place]
        for path in sorted(path for path in found if path.is_file() and not path.name.startswith(".")):
            name = path.relative_to(place).as_posix()
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while piece := file.read(2**24):
                    digest.update(piece)
    return digest.hexdigest()


def _device_name(policy: PI0FastPolicy) -> str:
    device = policy.model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _environment_json(environment: EnvConfig) -> dict[str, Any]:
    return {**environment.arguments(""), "task": list(environment.tasks)}


def _versions() -> dict[str, str]:
    return {**versions(), "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def _report(config: EvalConfig, folder: _Folder, parts: Sequence[_Part]) -> EvaluationReport:
    details = [part.details or {} for part in parts]
    about: list[tuple[str, str]] = []
    for number, part in enumerate(parts):
        about += [(_label(config, number, what), text) for what, text in part.about]
    runs = folder.runs_with_episodes()
    latest = runs[-1]["versions"]
    about.append(("versions", ", ".join(f"{name} {number}" for name, number in latest.items())))
    tasks = config.simulation.tasks
    episodes = tuple(folder.of(number, tasks) for number in range(len(parts)))
    return EvaluationReport(
        about=tuple(about),
        policies=tuple(part.path for part in parts),
        tasks=tasks,
        episodes=episodes,
        warnings=(*_warnings(details, episodes), *_warnings_of_runs(runs)),
        details={
            "settings": config.to_json(),
            "seeds": {"first": config.seed, "count": config.eval.n_episodes},
            "versions": latest,
            "threads": runs[-1]["threads"],
            "runs": runs,
            "checkpoints": details,
        },
        published=_published(tasks) if config.env.type == "libero" else {},
        source=PUBLISHED_BY,
    )


def _warnings(details: Sequence[Mapping[str, Any]], episodes: Sequence[Sequence[EpisodeResult]]) -> list[str]:
    lines = []
    for number, (part, own) in enumerate(zip(details, episodes, strict=True)):
        prefix = "" if len(details) == 1 else f"{'AB'[number]}: "
        failed = [episode for episode in own if episode.end == FAILED]
        if failed:
            first = failed[0]
            lines.append(
                f"{prefix}in {len(failed)} of {len(own)} episodes the simulator failed, which counts as no success; "
                f"the first ({first.task}, seed {first.seed}): {first.failure}. --resume=true runs them again"
            )
        counts = Counter(part["counts"])
        rows = max(counts["rows"], 1)
        outside = counts["state_below"] + counts["state_above"]
        if outside:
            lines.append(
                f"{prefix}values of the states lay outside the range that the policy was trained in {outside:,} times "
                f"in {rows:,} chunks"
            )
        for name, count in sorted(counts.items()):
            if name.startswith(("missing ", "unused ")) and count:
                lines.append(
                    f"{prefix}{name.partition(' ')[2]} was {name.partition(' ')[0]} in {count} of {rows} chunks"
                )
    return lines


def _warnings_of_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Episodes of an evaluation that was interrupted may have been run by other programs, or on another machine."""
    lines = []
    versions_of = [part["versions"] for part in runs]
    differ = {
        name: list(dict.fromkeys(str(found.get(name)) for found in versions_of))
        for name in sorted({name for found in versions_of for name in found})
    }
    if words := [f"{name} {' and '.join(found)}" for name, found in differ.items() if len(found) > 1]:
        lines.append(f"not all episodes were run with the same versions: {', '.join(words)}")
    if any(part[name] != runs[0][name] for part in runs for name in ("device", "threads", "batch_size")):
        words = [
            f"{part['episodes']} on {part['device']} with {part['threads']} threads, batch_size {part['batch_size']}"
            for part in runs
        ]
        lines.append(f"not all episodes were run alike, so that times are of different things: {'; '.join(words)}")
    return lines


# --- files ----------------------------------------------------------------------------------------------------------


class _Folder:
    """An evaluation's directory, and the episodes that it holds."""

    def __init__(self, config: EvalConfig) -> None:
        """Check that the directory is new, or holds the evaluation that is to be gone on with; writes nothing.

        Raises:
            UsageError: another evaluation, a damaged file, or another process is at it.
            OSError: the directory exists already.
        """
        self._config = config
        self.path = config.output_path
        self.episodes: dict[int, list[EpisodeResult]] = {number: [] for number in range(len(config.paths))}
        self._held = ExitStack()
        self._runs: list[dict[str, Any]] = []
        self._run_of: dict[tuple[int, str, int], int] = {}
        try:
            if config.resume:
                if self.path.is_dir():
                    self._hold()
                self._read()
            else:
                self._refuse_what_is_there()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have the directory."""
        self._held.close()

    def _hold(self) -> None:
        self._held.enter_context(in_use(self.path, "running this evaluation"))

    def _refuse_what_is_there(self) -> None:
        # What a kill left of a first write is nothing.
        nothing = self.path.is_dir() and all(_TEMPORARY.fullmatch(path.name) for path in self.path.iterdir())
        if self.path.is_symlink() or (self.path.exists() and not nothing):
            raise FileExistsError(
                f"{self.path} exists: go on with that evaluation (--resume=true), or choose another --output_dir; "
                "nothing is overwritten"
            )

    def _read(self) -> None:
        file = self.path / EVAL_CONFIG_FILE
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--resume: {file} cannot be read ({error})") from error
        check_same(self._config, saved, str(self.path))
        wanted = {(task, seed) for task in self._config.simulation.tasks for seed in self._config.seeds}
        for number, line in enumerate(_lines(self.path / EPISODES_FILE), start=1):
            if line["kind"] == "begun":
                self._runs.append({"counts": {}, **line})
                continue
            policy, result, run = line["policy"], EpisodeResult.from_json(line["episode"]), line["run"]
            where = f"--resume: {self.path / EPISODES_FILE}, line {number}"
            if policy not in self.episodes or (result.task, result.seed) not in wanted or not run < len(self._runs):
                raise UsageError(f"{where} is no episode of this evaluation: mend or remove it")
            if (policy, result.task, result.seed) in self._run_of:
                raise UsageError(
                    f"{where} is the second result of {result.task}, seed {result.seed}: remove one of them"
                )
            self._runs[run]["counts"][str(policy)] = line["counts"]
            if result.end != FAILED:
                self.episodes[policy].append(result)
                self._run_of[policy, result.task, result.seed] = run

    def begin(self, fingerprints: Sequence[str], machine: Mapping[str, Any]) -> None:
        """Write what was asked for, and the episodes that are kept.

        Raises:
            UsageError: a checkpoint has changed since the evaluation was begun, or another process is at it.
            OSError: the directory cannot be written.
        """
        now: dict[str, Any] = {
            "kind": "begun",
            "fingerprints": list(fingerprints),
            "versions": _versions(),
            **machine,
            "batch_size": self._config.eval.batch_size,
            "counts": {},
        }
        if self._runs:
            first = self._runs[0]
            for path, before, found in zip(self._config.paths, first["fingerprints"], fingerprints, strict=True):
                if before != found:
                    raise UsageError(f"--resume: {path} has changed since; choose another --output_dir")
            changed = [
                f"{name} was {first['versions'].get(name)} and is {version}"
                for name, version in now["versions"].items()
                if first["versions"].get(name) != version
            ]
            if changed:
                warn(f"not what the evaluation was begun with, results may differ: {'; '.join(changed)}")
        if not self._config.resume:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            self._refuse_what_is_there()  # again: there may have been another process until now
        for left in self.path.iterdir():
            if _TEMPORARY.fullmatch(left.name):
                left.unlink()
        self._runs.append(now)
        config = json.dumps(self._config.to_json(), indent=2, ensure_ascii=False)
        _replace(self.path / EVAL_CONFIG_FILE, config + "\n")
        lines = list(self._runs)
        for number, episodes in self.episodes.items():
            lines += [self._line(number, episode) for episode in episodes]
        _replace(self.path / EPISODES_FILE, "".join(json.dumps(line) + "\n" for line in lines))

    def add(self, number: int, result: EpisodeResult, counts: Mapping[str, int]) -> None:
        """Keep an episode that has just ended; `counts` are the policy's in this run, of all episodes till now."""
        self.episodes[number].append(result)
        self._run_of[number, result.task, result.seed] = len(self._runs) - 1
        self._runs[-1]["counts"][str(number)] = dict(counts)
        path = self.path / EPISODES_FILE
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._line(number, result)) + "\n")

    def _line(self, number: int, result: EpisodeResult) -> dict[str, Any]:
        run = self._run_of[number, result.task, result.seed]
        counts = self._runs[run]["counts"].get(str(number), {})
        return {"kind": "episode", "policy": number, "run": run, "counts": counts, "episode": result.to_json()}

    def counts(self, number: int) -> Counter[str]:
        """What was changed in a policy's observations and actions, in all runs."""
        return sum((Counter(run["counts"].get(str(number), {})) for run in self._runs), Counter[str]())

    def runs_with_episodes(self) -> list[dict[str, Any]]:
        """What ran the episodes that there are: versions, device, threads, batch size, number of episodes."""
        numbers = Counter(
            self._run_of[number, episode.task, episode.seed]
            for number, episodes in self.episodes.items()
            for episode in episodes
        )
        names = ("versions", "device", "threads", "batch_size")
        return [
            {**{name: run[name] for name in names}, "episodes": numbers[place]}
            for place, run in enumerate(self._runs)
            if numbers[place]
        ]

    def of(self, number: int, tasks: Sequence[str]) -> tuple[EpisodeResult, ...]:
        """A policy's episodes, by task and seed."""
        return tuple(sorted(self.episodes[number], key=lambda result: (tasks.index(result.task), result.seed)))

    def film(self, number: int, recorded: Recorded) -> None:
        """Write the video of an episode."""
        path = video_path(self._config, number, recorded.result)
        path.parent.mkdir(exist_ok=True)
        encode_video(path, recorded.frames, recorded.fps, "h264", f"video of {recorded.result.task}")


def video_path(config: EvalConfig, number: int, result: EpisodeResult) -> Path:
    """Where the video of an episode lies."""
    letter = "" if len(config.paths) == 1 else f"{'AB'[number]}-"
    place = config.simulation.tasks.index(result.task)
    task = re.sub(r"[^A-Za-z0-9._-]+", "_", result.task)
    return config.output_path / VIDEOS / f"{letter}{place:02d}-{task}-{result.seed}.mp4"


#: What is said of each run of the command.
_OF_A_RUN = ("fingerprints", "versions", "device", "threads", "batch_size")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was cut off is left out.

    Raises:
        UsageError: another one is damaged.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            content = json.loads(line)
            if content["kind"] == "episode":
                EpisodeResult.from_json(content["episode"])
            wanted = ("policy", "run", "counts") if content["kind"] == "episode" else _OF_A_RUN
            if missing := [name for name in wanted if name not in content]:
                raise KeyError(missing[0])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--resume: {path}, line {number} is damaged ({error!r}): mend or remove it") from error
        found.append(content)
    return found


def _films(config: EvalConfig, report: EvaluationReport) -> tuple[list[Film], list[str]]:
    """The videos that are there, as many as a page holds, and what is to be said of the others."""
    films: list[Film] = []
    left_out: list[Path] = []
    size = 0
    for number, episodes in enumerate(report.episodes):
        for episode in episodes:
            path = video_path(config, number, episode)
            if not path.is_file():
                continue
            size += path.stat().st_size
            if size > _MOST_VIDEO_BYTES:
                left_out.append(path)
                continue
            words = f"{episode.task}, seed {episode.seed}: {episode.end} after {episode.steps} steps"
            films.append(Film(number, path.read_bytes(), words))
    if not left_out:
        return films, []
    return films, [f"{len(left_out)} more videos are in {VIDEOS}/: {', '.join(path.name for path in left_out)}."]


def _write(config: EvalConfig, report: EvaluationReport, films: Sequence[Film] = (), notes: Sequence[str] = ()) -> None:
    config.output_path.mkdir(parents=True, exist_ok=True)
    content = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    _replace(config.output_path / RESULTS_FILE, content + "\n")
    _replace(config.output_path / PAGE_FILE, report.page(films, notes).render())


#: Of files that `_replace` has not finished.
_TEMPORARY = re.compile(r"\.(eval_config\.json|episodes\.jsonl|evaluation\.json|evaluation\.html)-\d+")


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with naming(path):
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --- two evaluations that are done ----------------------------------------------------------------------------------


def _is_evaluation(path: str) -> bool:
    return (Path(path).expanduser() / RESULTS_FILE).is_file()


def _read_results(path: str) -> dict[str, Any]:
    file = Path(path).expanduser() / RESULTS_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if {key: content.get(key) for key in FORMAT} != FORMAT or len(content["policies"]) != 1:
            raise UsageError(f"--compare: {file} is no evaluation of one policy, by this version")
        for episode in content["policies"][0]["episodes"]:
            EpisodeResult.from_json(episode)
        _differences([content, content])  # reads what is read below, so that damage is named here
        if not all(isinstance(content[name], kind) for name, kind in _KEPT.items()):
            raise UsageError(f"--compare: {file} is damaged")
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--compare: {file} cannot be read ({error!r})") from error
    return dict(content)


def _compared(config: EvalConfig) -> EvaluationReport:
    """The difference between two evaluations, without running anything."""
    assert config.compare is not None
    _refuse_what_does_nothing(config)
    results = [_read_results(path) for path in config.compare]
    _check_comparable(config.compare, results)
    if config.output_path.exists() and any(config.output_path.iterdir()):
        raise FileExistsError(f"{config.output_path} exists: choose another --output_dir; nothing is overwritten")
    policies = [result["policies"][0] for result in results]
    tasks = tuple(results[0]["checkpoints"][0]["environment"]["task"])
    report = EvaluationReport(
        about=(*zip("AB", config.compare, strict=True), *_differences(results)),
        policies=tuple(config.compare),
        tasks=tasks,
        episodes=tuple(tuple(map(EpisodeResult.from_json, policy["episodes"])) for policy in policies),
        warnings=tuple(
            f"{letter}: {line}" for letter, result in zip("AB", results, strict=True) for line in result["warnings"]
        ),
        details={"compared": [{key: result[key] for key in _KEPT} for result in results]},
    )
    _write(config, report)
    return report


_KEPT = {"settings": dict, "seeds": dict, "versions": dict, "checkpoints": list, "warnings": list}


def _refuse_what_does_nothing(config: EvalConfig) -> None:
    """Where two evaluations are compared that are done, nothing is run."""
    nothing = EvalConfig(compare=config.compare, output_dir=config.output_dir, job_name=config.job_name)
    for item in fields(config):
        given, usual = getattr(config, item.name), getattr(nothing, item.name)
        if given != usual:
            names = [f"{item.name}.{part.name}" for part in fields(given)] if is_dataclass(given) else [item.name]
            said = next((name for name in names if _at(config, name) != _at(nothing, name)), item.name)
            raise UsageError(
                f"--compare names two evaluations that are done, and nothing is run: --{said} has no effect"
            )


def _at(config: EvalConfig, name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _differences(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the two were told that differs, beside the checkpoint; it may be what is compared, or a mistake."""
    sides = [
        {**result["checkpoints"][0]["environment"], **result["checkpoints"][0]["config"]}
        | {"device": result["checkpoints"][0]["device"]}
        for result in results
    ]
    names = sorted({*sides[0], *sides[1]})
    differ = [name for name in names if sides[0].get(name) != sides[1].get(name)]
    return [("A and B differ in", ", ".join(differ))] if differ else []


def _check_comparable(paths: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """Refuse evaluations of other tasks, other simulators or other seeds."""
    environments = [result["checkpoints"][0]["environment"] for result in results]
    for name in ("env_type", "task", "max_steps", "options", "fps"):
        first, second = (environment.get(name) for environment in environments)
        if first != second:
            raise UsageError(f"--compare: {name} is {first} in {paths[0]}, and {second} in {paths[1]}")
    seeds = [
        {(episode["task"], episode["seed"]) for episode in result["policies"][0]["episodes"]} for result in results
    ]
    if seeds[0] != seeds[1]:
        only = len(seeds[0] ^ seeds[1])
        raise UsageError(
            f"--compare: {only} episodes are in only one of {paths[0]} and {paths[1]}: evaluate both with the same "
            "--seed and --eval.n_episodes"
        )
    before, after = (result["versions"] for result in results)
    changed = [f"{name} {before.get(name)} and {after.get(name)}" for name in before if before[name] != after.get(name)]
    if changed:
        warn(f"the two were not evaluated with the same versions: {', '.join(changed)}")
