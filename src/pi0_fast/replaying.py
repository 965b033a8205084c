"""Recorded actions, executed again in the simulator: as they are, and through a tokenizer: `pi0-fast replay`.

The first thing to try where a policy scores zero: where the recorded actions fail, no policy is to blame; where only
the decoded ones do, the tokenizer is too coarse. Open loop: nothing is corrected. Left out: pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.report import Table
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.data import LeRobotReader, open_dataset
from pi0_fast.dataset_chunks import vector_feature, vector_values
from pi0_fast.display import progress, say, warn
from pi0_fast.episode_workers import answering, episode_workers, simulator_of
from pi0_fast.expert_episodes import ACTION, EXECUTED
from pi0_fast.record_config import ReplayConfig
from pi0_fast.recording import RECORDING_FILE, versions, worker_count
from pi0_fast.reports.intervals import wilson
from pi0_fast.sims.protocol import STATE
from pi0_fast.swap import naming
from pi0_fast.types import DatasetError, UsageError

FloatArray = npt.NDArray[np.float32]

RESULT_FILE = "replay.json"


# --- one episode ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """What came of some actions.

    Attributes:
        steps: executed; fewer than there were actions where the simulator ended the episode.
        success_step: steps until the first success; None when there was none.
        clipped: actions that the simulator's limits cut.
        states: float32 [steps, Ds], before each action.
    """

    steps: int
    success_step: int | None
    clipped: int
    states: FloatArray


def execute(arguments: Mapping[str, Any], seed: int, actions: FloatArray) -> Replayed:
    """In a worker: reset the simulator of `sims.make(**arguments)` with the seed and execute the actions [T, D].

    Raises:
        UsageError: the simulator's actions have another size.
    """
    simulator = simulator_of(arguments)
    names = simulator.spec.action_names
    if actions.shape[1] != len(names):
        raise UsageError(
            f"the dataset's actions have {actions.shape[1]} dimensions, those of {simulator.spec.env_type} "
            f"{simulator.spec.task} {len(names)} ({', '.join(names)}); --action_key chooses another column"
        )
    states: list[FloatArray] = []
    success, clipped = None, 0
    with answering(simulator) as watched:
        watched.reset(seed)
        for action in actions:
            states.append(watched.observe(images=False)[STATE])
            result = watched.step(action)
            clipped += result.clipped
            if result.success and success is None:
                success = len(states)
            if result.ended:
                break
    return Replayed(len(states), success, clipped, np.array(states, np.float32))


# --- through the tokenizer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTrip:
    """Actions [T, D] of an episode after encode and decode, and what that cost.

    Attributes:
        actions: float32 [T, D]; dimensions that the tokenizer does not encode are as they were.
        tokens: of each chunk.
        clipped: values that the normaliser cut off.
        saturated: coefficients that the vocabulary cannot express.
    """

    actions: FloatArray
    tokens: list[int]
    clipped: int
    saturated: int


def round_trip(tokenizer: FastTokenizer, horizon: int, actions: FloatArray, states: FloatArray | None) -> RoundTrip:
    """Encode and decode an episode chunk by chunk, as a policy that executes whole chunks would.

    The last chunk is filled with the last action, and what was filled in is dropped again.

    Args:
        tokenizer: with a normaliser.
        horizon: steps of a chunk.
        actions: float32 [T, D], T >= 1.
        states: float32 [T, Ds], needed where the tokenizer's actions are relative: those of each chunk's first step.
    """
    starts = np.arange(0, len(actions), horizon)
    rows = np.minimum(starts[:, None] + np.arange(horizon), len(actions) - 1)
    firsts = None if states is None else states[starts]
    ids, info = tokenizer.encode_actions(actions[rows], firsts, return_info=True)
    decoded = tokenizer.decode_actions(ids, firsts)
    selection = tokenizer.normalizer.selection if tokenizer.normalizer is not None else None
    dims = list(range(actions.shape[1])) if selection is None else list(selection.dims)
    restored = actions.copy()
    restored[:, dims] = decoded.reshape(-1, len(dims))[: len(actions)]
    clipped = 0 if info.clipped_values is None else int(info.clipped_values.sum())
    return RoundTrip(restored, [len(row) for row in ids], clipped, int(info.saturations.sum()))


def _load_tokenizer(config: ReplayConfig, reader: LeRobotReader, key: str) -> tuple[FastTokenizer, int]:
    """The tokenizer with its normaliser, and the steps of its chunks."""
    name = str(config.tokenizer)
    tokenizer = FastTokenizer.from_pretrained(name)
    size = vector_feature(reader, key).shape[0]
    normalizer = tokenizer.normalizer
    if normalizer is None:
        if config.normalization_mode is None:
            raise UsageError(
                f"the tokenizer {name} does not say how its actions were normalised (it has no normalizer.json, as "
                "published tokenizers): give --normalization_mode, such as QUANTILES, whose statistics are then "
                "computed from the dataset"
            )
        tokenizer.normalizer = Normalizer.fit(
            lambda: (vector_values(episode, key) for episode in reader.iter_episodes([key])), config.normalization_mode
        )
    else:
        if config.normalization_mode not in (None, str(normalizer.mode)):
            raise UsageError(
                f"--normalization_mode {config.normalization_mode} contradicts the tokenizer, whose normalizer.json "
                f"says {normalizer.mode}"
            )
        wanted = normalizer.size if normalizer.selection is None else normalizer.selection.action_size
        if wanted != size:
            raise UsageError(f"the tokenizer {name} is for actions of {wanted} dimensions; {key!r} has {size}")
    horizon = tokenizer.time_horizon or config.action_horizon
    if horizon is None:
        raise UsageError(f"the tokenizer {name} takes chunks of any length: --action_horizon says how many steps")
    if config.action_horizon not in (None, horizon):
        raise UsageError(
            f"--action_horizon {config.action_horizon} contradicts the tokenizer, which is bound to chunks of "
            f"{horizon} steps"
        )
    if tokenizer.time_horizon is None or tokenizer.action_dim is None:
        return tokenizer.bound(horizon, size), horizon
    return tokenizer, horizon


# --- which simulator, which seeds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """What an episode begins with: the arguments of `sims.make`, and the seed of the reset."""

    arguments: dict[str, Any]
    seed: int


def _starts(config: ReplayConfig, reader: LeRobotReader) -> dict[int, Start]:
    """For each episode of the dataset."""
    indices = [record.index for record in reader.episodes]
    path = reader.root / "meta" / RECORDING_FILE
    if config.seeds is not None:
        if len(config.seeds) != len(indices):
            raise UsageError(f"--seeds has {len(config.seeds)} numbers, {reader.repo_id} has {len(indices)} episodes")
        arguments = config.env.arguments(config.env.tasks[0])
        return {index: Start(arguments, seed) for index, seed in zip(indices, config.seeds, strict=True)}
    if not path.is_file():
        raise DatasetError(
            f"{path} is missing: it says in which simulator and with which seeds `pi0-fast record` made a dataset. "
            "For another dataset say it with --env.type, --env.task and --seeds, one seed for each of its "
            f"{len(indices)} episodes"
        )
    if config.env.type is not None:
        raise UsageError(f"--env.type has no effect without --seeds: {path} says which simulator it was")
    recording = read_recording(path)
    if len(recording["episodes"]) != len(indices):
        raise DatasetError(
            f"{path} lists {len(recording['episodes'])} episodes, the dataset has {len(indices)}: they do not belong "
            "together; fetch the dataset again"
        )
    _warn_of_versions(recording, path)
    # Sizes of pictures do not matter here, and a list is what json makes of a tuple.
    shared = {**recording["env"], "image_size": None}
    return {
        index: Start({**shared, "task": str(entry["task"])}, int(entry["seed"]))
        for index, entry in zip(indices, recording["episodes"], strict=True)
    }


def read_recording(path: Path) -> dict[str, Any]:
    """The content of `meta/recording.json`.

    Raises:
        DatasetError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        complete = isinstance(found["env"], dict) and all(
            {"task", "seed"} <= entry.keys() and isinstance(entry["seed"], int) for entry in found["episodes"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(f"{path} is damaged ({type(error).__name__}: {error}); fetch the dataset again") from error
    if not complete:
        raise DatasetError(f"{path} is damaged: each of its episodes needs a task and a seed; fetch the dataset again")
    return dict(found)


def _warn_of_versions(recording: Mapping[str, Any], path: Path) -> None:
    """Another version of a simulator may do something else with the same actions."""
    then, now = recording.get("versions") or {}, versions()
    differ = [
        f"{name} {then[name]}, here {now.get(name, 'none')}"
        for name in then
        if name not in ("pi0-fast", "numpy") and then[name] != now.get(name)
    ]
    if differ:
        warn(f"{path.parent.parent} was recorded with {'; '.join(differ)}: the same actions may do something else")


# --- all episodes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayResult:
    """What `replay` gives.

    Attributes:
        episodes: for each episode what `replay.json` says of it.
        summary: everything else in `replay.json`.
        path: of that file.
    """

    episodes: list[dict[str, Any]]
    summary: dict[str, Any]
    path: Path

    def tables(self) -> list[Table]:
        """(title, rows, headers) of what the command prints."""
        rows: list[list[object]] = []
        for name, shown in (("raw", "recorded"), ("decoded", "through the tokenizer")):
            if name not in self.summary:
                continue
            found = self.summary[name]
            low, high = found["interval"]
            steps = found["mean_steps_to_success"]
            rows.append(
                [
                    shown,
                    f"{found['successes']}/{len(self.episodes)}",
                    f"{low:.1%} to {high:.1%}",
                    "-" if steps is None else f"{steps:.1f}",
                ]
            )
        tables: list[Table] = [("Replayed", rows, ["actions", "success", "95 % interval", "steps to success"])]
        if "round_trip" in self.summary:
            trip = self.summary["round_trip"]
            lines: list[list[object]] = [
                [name, rmse, largest]
                for name, rmse, largest in zip(trip["names"], trip["rmse"], trip["largest_error"], strict=True)
            ]
            title = (
                f"Error of encode and decode ({trip['tokens_per_chunk']:.1f} tokens per {trip['horizon']} steps, "
                f"{trip['clipped_share']:.2%} of the values clipped)"
            )
            tables.append((title, lines, ["dimension", "rms error", "largest"]))
        return tables


def replay(config: ReplayConfig) -> ReplayResult:
    """Execute a dataset's actions in the simulator, and what a tokenizer makes of them.

    Args:
        config: every setting; see `pi0-fast replay --help`.

    Raises:
        UsageError: settings that are wrong or contradict the dataset or the tokenizer; replay.json is there already.
        DatasetError: the dataset is missing or damaged, or does not say which simulator it is from.
        SimulatorError: the simulator cannot run here, fails or hangs.
        TokenizerError: the tokenizer is missing, damaged, or made for other actions.
    """
    config.validate()
    path = config.output_path / RESULT_FILE
    if path.exists() and not config.overwrite:
        raise UsageError(f"{path} is there already; give another --output_dir, or --overwrite")
    reader = open_dataset(config.repo_id, root=config.root)
    key = config.action_key or (EXECUTED if EXECUTED in reader.features else ACTION)
    starts = _starts(config, reader)
    say(f"dataset        {config.repo_id} ({reader.version}) at {reader.root}, actions of {key!r}")
    loaded = None if config.tokenizer is None else _load_tokenizer(config, reader, key)
    episodes = list(_read(config, reader, key, starts, loaded))
    path.parent.mkdir(parents=True, exist_ok=True)  # before the work: can it be written there?
    _execute_all(config, episodes)
    result = _summarise(config, reader, key, episodes, loaded, path)
    content = {**result.summary, "episodes": result.episodes}
    with naming(path):
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    say(f"result         {path}")
    return result


@dataclass
class _Episode:
    """An episode on its way."""

    index: int
    start: Start
    actions: FloatArray
    states: FloatArray
    trip: RoundTrip | None
    raw: Replayed | None = None
    decoded: Replayed | None = None


def _read(
    config: ReplayConfig,
    reader: LeRobotReader,
    key: str,
    starts: Mapping[int, Start],
    loaded: tuple[FastTokenizer, int] | None,
) -> Iterator[_Episode]:
    for key_ in (key, config.state_key):
        vector_feature(reader, key_)
    for episode in reader.iter_episodes(list(dict.fromkeys([key, config.state_key])), config.episodes):
        actions, states = vector_values(episode, key), vector_values(episode, config.state_key)
        trip = None if loaded is None else round_trip(*loaded, actions, states)
        yield _Episode(episode.index, starts[episode.index], actions, states, trip)


def _execute_all(config: ReplayConfig, episodes: Sequence[_Episode]) -> None:
    """Fill in what came of each episode's actions."""
    runs = [(episode, False) for episode in episodes]
    runs += [(episode, True) for episode in episodes if episode.trip is not None]
    runs.sort(key=lambda run: str(run[0].start.arguments))  # each process keeps one simulator
    with (
        episode_workers(worker_count(config.num_workers), config.timeout_s) as workers,
        progress("replaying", len(runs), "episodes") as advance,
    ):
        futures = []
        for episode, decoded in runs:
            actions = episode.trip.actions if decoded and episode.trip is not None else episode.actions
            futures.append(workers.submit(execute, episode.start.arguments, episode.start.seed, actions))
        for (episode, decoded), future in zip(runs, futures, strict=True):
            start = episode.start
            found = future.result(f"episode {episode.index} ({start.arguments['task']}, seed {start.seed})")
            if decoded:
                episode.decoded = found
            else:
                episode.raw = found
            advance()


def _summarise(
    config: ReplayConfig,
    reader: LeRobotReader,
    key: str,
    episodes: Sequence[_Episode],
    loaded: tuple[FastTokenizer, int] | None,
    path: Path,
) -> ReplayResult:
    raw = [episode.raw for episode in episodes if episode.raw is not None]
    summary: dict[str, Any] = {
        "repo_id": config.repo_id,
        "action_key": key,
        "tokenizer": config.tokenizer,
        "versions": versions(),
        "raw": _counts(raw),
    }
    summary["state_difference"] = _state_difference(episodes, reader, config.state_key)
    if loaded is not None:
        summary["decoded"] = _counts([episode.decoded for episode in episodes if episode.decoded is not None])
        summary["round_trip"] = _errors(episodes, reader, key, loaded[1])
    _tell(episodes, summary)
    return ReplayResult([_listed(episode) for episode in episodes], summary, path)


def _counts(found: Sequence[Replayed]) -> dict[str, Any]:
    steps = [replayed.success_step for replayed in found if replayed.success_step is not None]
    return {
        "successes": len(steps),
        "success_rate": len(steps) / len(found),
        "interval": list(wilson(len(steps), len(found))),
        "mean_steps_to_success": float(np.mean(steps)) if steps else None,
        "clipped_actions": sum(replayed.clipped for replayed in found),
    }


def _state_difference(episodes: Sequence[_Episode], reader: LeRobotReader, state_key: str) -> dict[str, Any] | None:
    """The largest difference of the states from the recorded ones, and where; None where they are other quantities."""
    worst: dict[str, Any] | None = None
    names = reader.feature(state_key).names
    for episode in episodes:
        if episode.raw is None or episode.raw.states.shape[1] != episode.states.shape[1]:
            return None
        difference = np.abs(episode.raw.states - episode.states[: episode.raw.steps])
        frame, dim = (int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
        value = float(difference[frame, dim])
        if worst is None or value > worst["largest"]:
            name = str(dim) if names is None else names[dim]
            worst = {"largest": value, "dimension": name, "episode": episode.index, "frame": frame}
    return worst


def _errors(episodes: Sequence[_Episode], reader: LeRobotReader, key: str, horizon: int) -> dict[str, Any]:
    """What encode and decode did to the actions, over all frames."""
    trips = [episode.trip for episode in episodes if episode.trip is not None]
    errors = np.concatenate(
        [episode.trip.actions - episode.actions for episode in episodes if episode.trip is not None]
    ).astype(np.float64)
    tokens = [count for trip in trips for count in trip.tokens]
    names = reader.feature(key).names
    return {
        "horizon": horizon,
        "names": list(names) if names is not None else [str(dim) for dim in range(errors.shape[1])],
        "rmse": np.sqrt((errors**2).mean(axis=0)).tolist(),
        "largest_error": np.abs(errors).max(axis=0).tolist(),
        "tokens_per_chunk": float(np.mean(tokens)),
        "clipped_share": sum(trip.clipped for trip in trips) / (len(tokens) * horizon * errors.shape[1]),
        "saturated_coefficients": sum(trip.saturated for trip in trips),
    }


def _tell(episodes: Sequence[_Episode], summary: Mapping[str, Any]) -> None:
    """In words, what the numbers do not say by themselves."""
    difference = summary["state_difference"]
    if difference is None:
        say("the simulator's states are not those of the dataset (another size), so they are not compared")
    else:
        say(
            f"replayed states differ from the recorded ones by at most {difference['largest']:.2g} "
            f"({difference['dimension']}, episode {difference['episode']}, frame {difference['frame']})"
        )
    failed = [episode.index for episode in episodes if episode.raw is not None and episode.raw.success_step is None]
    cut = [
        episode.index
        for episode in episodes
        if episode.raw is not None and episode.raw.success_step is None and episode.raw.steps < len(episode.actions)
    ]
    if cut:
        warn(
            f"the simulator ended episodes {_shown(cut)} before all of their actions were executed: see --env.max_steps"
        )
    if failed:
        warn(
            f"the recorded actions do not succeed in episodes {_shown(failed)}: before a policy is blamed, look for "
            "another version of the simulator, other seeds, or actions of another meaning (sign, scale, order)"
        )
    lost = [
        episode.index
        for episode in episodes
        if episode.raw is not None
        and episode.raw.success_step is not None
        and episode.decoded is not None
        and episode.decoded.success_step is None
    ]
    if lost:
        warn(
            f"episodes {_shown(lost)} succeed with the recorded actions, and not through the tokenizer: a larger "
            "--scale of `pi0-fast train-tokenizer` makes it finer"
        )


def _shown(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:10])) + (f" and {len(indices) - 10} more" if len(indices) > 10 else "")


def _listed(episode: _Episode) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "episode": episode.index,
        "task": episode.start.arguments["task"],
        "seed": episode.start.seed,
        "frames": len(episode.actions),
    }
    for name, found in (("raw", episode.raw), ("decoded", episode.decoded)):
        if found is not None:
            entry[name] = {"success_step": found.success_step, "steps": found.steps, "clipped": found.clipped}
    return entry
