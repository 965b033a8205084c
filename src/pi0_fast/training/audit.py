"""What training is about to do, measured on its data before the first step.

Ranges against the normalisation, lengths of tokens against their budget, one decoded round trip: what goes wrong here
would otherwise show as a policy that does not work. Training is refused where too many chunks exceed the budget.
Left out: printing and saving it (report.py), the dataset on its own (`pi0-fast inspect`), and metrics during training
(metrics.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.chunks import limit_samples, window_count
from pi0_fast.actions.normalize import NormalizationMode
from pi0_fast.actions.report import Table
from pi0_fast.dataset_chunks import vector_values
from pi0_fast.display import progress
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY
from pi0_fast.processors import FeatureNormalizer
from pi0_fast.reports.save import FORMAT
from pi0_fast.training.features import channels_first
from pi0_fast.training.setup import Run
from pi0_fast.types import PolicyError

FloatArray = npt.NDArray[np.float32]

#: Share of values outside a range above which a warning says so, in the modes whose ranges hold nearly all of the data
#: that they were made from.
MOST_OUTSIDE = {"QUANTILES": 0.1, "MIN_MAX": 0.1}
#: Share of the range of normalisation that a dimension which moves has to use; a warning says where it is less.
LEAST_USED = 0.05
#: Share of clipped steps of the held-out episodes above which a warning says so.
MOST_CLIPPED_STEPS = 0.05
#: Chunks longer than the budget that training puts up with.
MOST_OVER_BUDGET = 0.001
_MOST_CHUNKS, _MOST_HELD_OUT = 50_000, 5_000
_BLOCK = 2048
#: Rows whose prompts are made, to know the longest.
_MOST_PROMPTS = 4096


@dataclass(frozen=True)
class Audit:
    """The report, as it is saved; see `audit` for the keys.

    Attributes:
        content: plain values.
        problem: why training must not begin, or None.
    """

    content: dict[str, Any]
    problem: str | None

    def warnings(self) -> Iterator[str]:
        """What may be as it was meant to be, but seldom is."""
        for key, part in self.content["ranges"].items():
            most = MOST_OUTSIDE.get(part["mode"], 1.0)
            rows = [row for row in part["dimensions"] if row["outside"] > most]
            if rows:
                worst = max(rows, key=lambda row: row["outside"])
                what = "clipped" if part["clips"] else "far from what the model has seen"
                yield (
                    f"{key}: {len(rows)} of {len(part['dimensions'])} dimensions have more than {most:.0%} of their "
                    f"values outside the range of normalisation, where they are {what}; the worst is "
                    f"{worst['dimension']} with {worst['outside']:.1%}. Its range comes from other data: fit a "
                    "tokenizer on this data (--policy.auto_fit_fast_tokenizer=true), and take its statistics"
                )
            rows = [row for row in part["dimensions"] if 0 < row["max"] - row["min"] < LEAST_USED * _width(row)]
            if rows:
                least = min(rows, key=lambda row: (row["max"] - row["min"]) / _width(row))
                yield (
                    f"{key}: {len(rows)} of {len(part['dimensions'])} dimensions move within less than "
                    f"{LEAST_USED:.0%} of the range of normalisation, where little is told apart; the least is "
                    f"{least['dimension']} ({least['min']:.4g} to {least['max']:.4g} of {least['low']:.4g} to "
                    f"{least['high']:.4g}). Its range comes from other data, or there is no normalisation: fit a "
                    "tokenizer on this data (--policy.auto_fit_fast_tokenizer=true), and take its statistics"
                )
        held_out = self.content["held_out"]
        if held_out is not None and (held_out["clipped steps"] or 0) > MOST_CLIPPED_STEPS:
            yield (
                f"{held_out['clipped steps']:.1%} of the steps of the held-out episodes have actions outside the range "
                f"of normalisation, which are cut off (largest error {held_out['largest error of clipping']:.4g} in "
                f"dimension {held_out['in dimension']}): no policy falls below that error there; the mode MIN_MAX "
                "(--policy.normalization_mapping) cuts off less"
            )
        if not self.content["cameras"]:
            yield "the policy has no camera: it will act on the state and the task alone"

    def tables(self) -> Iterator[Table]:
        """For a terminal; without the decisions, which are said as they are made."""
        content = self.content
        yield "Data", _shown(content["data"]), ["", ""]
        rows = [[camera["column"], camera["policy"], camera["size"], camera["state"]] for camera in content["cameras"]]
        if rows:
            yield "Cameras", rows, ["column", "the policy's name", "size", ""]
        for key in (STATE_KEY, ACTION_KEY):
            yield self._ranges(key)
        if content["held_out"] is not None:
            yield "Held out", _shown(content["held_out"]), ["", ""]
        yield "Tokens", _shown(content["tokens"]), ["", ""]
        trip = content["round_trip"]
        rows = [[row["dimension"], row["mean_error"], row["largest_error"]] for row in trip["dimensions"]]
        title = f"One chunk encoded and decoded (episode {trip['episode']}, frame {trip['frame']}), in the data's units"
        yield title, rows, ["dimension", "mean error", "largest error"]
        yield "Parameters", [[name, f"{value:,}"] for name, value in content["parameters"].items()], ["", ""]

    def _ranges(self, key: str) -> Table:
        part = self.content["ranges"][key]
        stored = any(row["checkpoint_low"] is not None for row in part["dimensions"])
        rows: list[list[Any]] = []
        for row in part["dimensions"]:
            cells = [row["dimension"], row["min"], row["max"], row["low"], row["high"], f"{row['outside']:.2%}"]
            if stored:
                cells += [row["checkpoint_low"], row["checkpoint_high"]]
            rows.append([*cells, "never moves" if row["constant"] else ""])
        headers = ["dimension", "min", "max", "to -1", "to +1", "outside", ""]
        if stored:
            headers[6:6] = ["checkpoint's -1", "+1"]
        clips = "clipped" if part["clips"] else "kept"
        return f"{key}, {part['mode']}: values outside -1 to +1 are {clips}", rows, headers

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**FORMAT, "kind": "training", **self.content}


def _width(row: dict[str, Any]) -> float:
    """Of the range of normalisation of a dimension."""
    return float(row["high"] - row["low"])


#: Of the values that are shown by their names those that are shares.
_SHARES = ("frames without a whole chunk ahead (no loss)", "padded steps", "clipped steps")


def _shown(content: dict[str, Any]) -> list[list[Any]]:
    """Rows of a table: names with their values, shares in percent."""
    return [
        [name, f"{value:.2%}" if name in _SHARES and value is not None else _cell(value)]
        for name, value in content.items()
    ]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def audit(run: Run) -> Audit:
    """Look at the data as training will see it.

    All whole chunks of the training episodes are encoded, or 50,000 of them, evenly drawn. The keys of `content`:
    ``data``, ``decisions``, ``cameras``, ``ranges`` (by feature; per dimension minimum and maximum of the frames, what
    maps to -1 and +1, the share outside, constant ones, and the checkpoint's range), ``tokens``, ``round_trip``,
    ``held_out`` (None where nothing is), ``parameters``, ``statistics`` (data's and checkpoint's, complete).

    `Audit.problem` is set where more than 0.1 % of the chunks have targets longer than ``max_action_tokens``; it says
    what would fit.

    Raises:
        PolicyError: no whole chunk, a prompt that is too long, or values that cannot be encoded.
    """
    found = _Measurements(run)
    lengths = found.targets
    budget = run.policy.config.max_action_tokens
    over = int((lengths > budget).sum())
    content: dict[str, Any] = {
        "data": found.data(),
        "decisions": [vars(decision) for decision in run.decisions],
        "cameras": _cameras(run),
        "ranges": {STATE_KEY: found.ranges(STATE_KEY), ACTION_KEY: found.ranges(ACTION_KEY)},
        "tokens": {
            "chunks encoded": len(lengths),
            "of whole chunks": found.windows,
            "target ids, mean": float(lengths.mean()),
            "target ids, 99 % have at most": int(np.quantile(lengths, 0.99, method="higher")),
            "target ids, most": int(lengths.max()),
            "max_action_tokens": budget,
            "chunks over that budget": over,
            "saturated coefficients": found.saturated,
            "prompt ids, most": found.longest_prompt,
            "tokenizer_max_length": run.policy.config.tokenizer_max_length,
        },
        "held_out": found.held_out(),
        "round_trip": found.round_trip(),
        "parameters": _parameters(run),
        "statistics": {
            "data": {key: statistics.to_mapping() for key, statistics in run.statistics.items()},
            "checkpoint": run.stored_statistics,
        },
    }
    problem = None
    if over > MOST_OVER_BUDGET * len(lengths):
        problem = (
            f"{over} of {len(lengths)} chunks ({over / len(lengths):.2%}) take more than max_action_tokens={budget} "
            f"ids, the longest {int(lengths.max())}: {_ways_out(run, int(lengths.max()))}"
        )
    return Audit(content, problem)


def _ways_out(run: Run, most: int) -> str:
    """What makes room for chunks of `most` ids, without what is there already."""
    config = run.policy.config
    budgets = [f"--policy.max_action_tokens={most}"]
    if config.max_decoding_steps < most:
        budgets.append(f"--policy.max_decoding_steps={most}")
    ways = [f"set {' and '.join(budgets)}", "choose a smaller --policy.chunk_size"]
    if not run.config.policy.auto_fit_fast_tokenizer or run.config.policy.action_tokenizer_name is not None:
        ways.append("fit a tokenizer on this data (--policy.auto_fit_fast_tokenizer=true)")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


class _Measurements:
    """Numbers over the frames and chunks of the training episodes.

    Attributes:
        windows: whole chunks there are.
        targets: int64 [N], ids of the target of each encoded chunk, special ones included.
        saturated: coefficients that the alphabet could not hold.
        longest_prompt: ids of the longest prompt seen.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._preparation = run.policy.preparation
        self._processors = self._preparation.processors
        self._extremes: dict[str, list[FloatArray]] = {STATE_KEY: [], ACTION_KEY: []}
        self._outside = {
            STATE_KEY: np.zeros(self._processors.state.size),
            ACTION_KEY: np.zeros(self._processors.action.size),
        }
        self._values: Counter[str] = Counter()
        self._sample: tuple[int, int, FloatArray, FloatArray] | None = None
        self.saturated, self.longest_prompt, self._beside = 0, 0, 0
        horizon = run.policy.config.chunk_size
        self._lengths = {
            record.index: record.length for record in run.reader.episodes if record.index in run.train_frames.episodes
        }
        counts = {index: window_count(length, horizon) for index, length in self._lengths.items()}
        self.windows = sum(counts.values())
        if self.windows == 0:
            raise PolicyError(
                f"no training episode has the {horizon} frames of a chunk (the longest has "
                f"{max(self._lengths.values(), default=0)}), so no frame carries loss: choose a smaller "
                "--policy.chunk_size"
            )
        chosen = limit_samples(counts, _MOST_CHUNKS, seed=run.config.seed)
        found: list[npt.NDArray[np.int64]] = []
        state, action = run.columns.state.key, run.columns.action.key
        keys = list(dict.fromkeys((state, action)))
        with progress("looking at the data", len(counts), "episodes") as advance:
            for episode in run.reader.iter_episodes(keys, list(counts)):
                states, actions = vector_values(episode, state), vector_values(episode, action)
                self._frames(states, actions)
                starts = np.arange(counts[episode.index]) if chosen is None else chosen[episode.index]
                for begin in range(0, len(starts), _BLOCK):
                    part = starts[begin : begin + _BLOCK]
                    chunks = actions[part[:, None] + np.arange(horizon)]
                    found.append(self._chunks(episode.index, part, chunks, states[part]))
                advance()
        self.targets = np.concatenate(found)
        self._measure_prompts()

    def _frames(self, states: FloatArray, actions: FloatArray) -> None:
        for key, values in ((STATE_KEY, states), (ACTION_KEY, actions)):
            self._extremes[key] += [values.min(axis=0), values.max(axis=0)]
        normalized = self._processors.state.apply(states)
        self._outside[STATE_KEY] += (np.abs(normalized) > 1).sum(axis=0)
        self._values[STATE_KEY] += len(states)

    def _chunks(
        self, episode: int, starts: npt.NDArray[np.int64], chunks: FloatArray, states: FloatArray
    ) -> npt.NDArray[np.int64]:
        """Length of the target of each chunk; counts what falls outside."""
        excess, ids, lengths, saturated = self._encoded(chunks, states)
        self._outside[ACTION_KEY] += (excess > 0).sum(axis=(0, 1))
        self._values[ACTION_KEY] += excess.shape[0] * excess.shape[1]
        self.saturated += saturated
        if self._sample is None:
            place = len(starts) // 2
            self._sample = (episode, int(starts[place]), chunks[place], states[place])
            one = self._preparation.prompt.training(
                ["-"], self._processors.state.apply(states[:1]), ids[:1], lengths[:1]
            )
            self._beside = one.report.longest_target - int(lengths[0])
        return lengths.astype(np.int64) + self._beside

    def _encoded(
        self, chunks: FloatArray, states: FloatArray
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], int]:
        """How far values lie outside the range [N, H, D], token ids [N, L], their lengths [N], saturated coefficients.

        The first is in the data's units, of relative actions where those are encoded.
        """
        relative = self._processors.relative
        raw = chunks if relative is None else relative.to_relative(chunks, states)
        normalized = self._processors.normalize_actions(chunks, states)
        ids, lengths, info = self._preparation.action_tokenizer.encode_padded(normalized, return_info=True)
        return _excess(self._processors.action, raw), ids, lengths, int(info.saturations.sum())

    def _measure_prompts(self) -> None:
        """The longest prompt: all frames, or some of them, evenly spread.

        Raises:
            PolicyError: one is too long.
        """
        frames = self._run.train_frames
        chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _MOST_PROMPTS)).astype(np.int64))
        tasks, states = frames.observations(chosen)
        batch = self._preparation.prompt.generation(tasks, self._processors.state.apply(states))
        self.longest_prompt = batch.report.longest_text

    def data(self) -> dict[str, Any]:
        """What is trained on."""
        run = self._run
        frames, held = run.train_frames, run.validation_frames
        horizon = run.policy.config.chunk_size
        padded = np.maximum(horizon - frames.steps_left, 0)  # steps of each sample
        indices = [] if held is None else list(held.episodes)
        return {
            "dataset": f"{run.reader.repo_id} ({run.reader.root})",
            "format": f"{run.reader.version}, {run.reader.fps:g} frames/s",
            "episodes to train on": len(frames.episodes),
            "held-out episodes": len(indices),
            "their indices": ", ".join(map(str, indices)) or "none",
            "frames to train on": len(frames),
            "held-out frames": 0 if held is None else len(held),
            "steps of a chunk": horizon,
            "frames without a whole chunk ahead (no loss)": float((padded > 0).mean()),
            "padded steps": float(padded.mean()) / horizon,
        }

    def ranges(self, key: str) -> dict[str, Any]:
        """Of one feature, by dimension."""
        normalizer = self._processors.state if key == STATE_KEY else self._processors.action
        extremes = np.stack(self._extremes[key])
        low, high = extremes.min(axis=0), extremes.max(axis=0)
        relative = key == ACTION_KEY and self._processors.relative is not None
        if relative and key in self._run.statistics:  # what is normalised are differences
            low, high = (np.asarray(getattr(self._run.statistics[key], name)) for name in ("min", "max"))
        bounds = _bounds(normalizer.mode, normalizer.statistics, normalizer.size)
        stored = (self._run.stored_statistics or {}).get(key)
        theirs = _bounds(normalizer.mode, stored, normalizer.size) if stored else None
        if theirs is not None and len(theirs[0]) != normalizer.size:  # of another robot: nothing stands beside them
            theirs = None
        names = (self._run.columns.state if key == STATE_KEY else self._run.columns.action).names
        share = self._outside[key] / max(self._values[key], 1)
        rows = [
            {
                "dimension": _label(dim, names),
                "min": float(low[dim]),
                "max": float(high[dim]),
                "low": float(bounds[0][dim]),
                "high": float(bounds[1][dim]),
                "outside": float(share[dim]),
                "constant": bool(low[dim] == high[dim]),
                "checkpoint_low": float(theirs[0][dim]) if theirs is not None else None,
                "checkpoint_high": float(theirs[1][dim]) if theirs is not None else None,
            }
            for dim in range(normalizer.size)
        ]
        clips = normalizer.clip if key == ACTION_KEY else self._run.policy.config.state_clip
        return {"mode": normalizer.mode.value, "clips": clips, "relative": relative, "dimensions": rows}

    def held_out(self) -> dict[str, Any] | None:
        """The held-out chunks under what was made from the others; None where nothing is held out."""
        run, held, horizon = self._run, self._run.validation_frames, self._run.policy.config.chunk_size
        if held is None:
            return None
        counts = {
            record.index: window_count(record.length, horizon)
            for record in run.reader.episodes
            if record.index in held.episodes
        }
        chosen = limit_samples(counts, _MOST_HELD_OUT, seed=run.config.seed)
        worst = np.zeros(self._processors.action.size)
        steps, chunks, ids = 0, 0, 0
        keys = list(dict.fromkeys((run.columns.state.key, run.columns.action.key)))
        for episode in run.reader.iter_episodes(keys, list(counts)):
            states, actions = (vector_values(episode, each.key) for each in (run.columns.state, run.columns.action))
            starts = np.arange(counts[episode.index]) if chosen is None else chosen[episode.index]
            for begin in range(0, len(starts), _BLOCK):
                part = starts[begin : begin + _BLOCK]
                excess, _, lengths, _ = self._encoded(actions[part[:, None] + np.arange(horizon)], states[part])
                worst = np.maximum(worst, excess.max(axis=(0, 1)))
                steps += int((excess > 0).any(axis=2).sum())
                chunks, ids = chunks + len(part), ids + int(lengths.sum()) + self._beside * len(part)
        clips = self._processors.action.clip
        return {
            "chunks encoded": chunks,
            "of whole chunks": sum(counts.values()),
            "target ids, mean": ids / chunks if chunks else None,
            "clipped steps": steps / (chunks * horizon) if chunks and clips else None,
            "largest error of clipping": float(worst.max()) if clips else None,
            "in dimension": _label(int(worst.argmax()), run.columns.action.names) if clips else None,
        }

    def round_trip(self) -> dict[str, Any]:
        """One chunk through normalisation and tokens, and back."""
        assert self._sample is not None  # there is a whole chunk
        episode, frame, chunk, state = self._sample
        encoder = self._preparation.action_tokenizer
        ids, lengths = encoder.encode_padded(self._processors.normalize_actions(chunk[None], state[None]))
        decoded, _ = self._preparation.actions((ids, lengths), state[None])
        error = np.abs(decoded[0] - chunk)
        names = self._run.columns.action.names
        return {
            "episode": episode,
            "frame": frame,
            "tokens": int(lengths[0]),
            "dimensions": [
                {
                    "dimension": _label(dim, names),
                    "mean_error": float(error[:, dim].mean()),
                    "largest_error": float(error[:, dim].max()),
                }
                for dim in range(error.shape[1])
            ],
        }


def _excess(normalizer: FeatureNormalizer, raw: FloatArray) -> npt.NDArray[Any]:
    """How far values lie outside the range, before any clipping; 0 within."""
    low, high = _bounds(normalizer.mode, normalizer.statistics, normalizer.size)
    excess: npt.NDArray[Any] = np.maximum(np.maximum(low - raw, raw - high), 0)
    return excess


def _bounds(mode: NormalizationMode, statistics: Any, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """What maps to -1 and +1."""
    if mode is NormalizationMode.IDENTITY or any(name not in statistics for name in mode.needs):
        return -np.ones(size), np.ones(size)
    first, second = (np.asarray(statistics[name]) for name in mode.needs)
    return (first - second, first + second) if mode is NormalizationMode.MEAN_STD else (first, second)


def _label(dim: int, names: tuple[str, ...] | None) -> str:
    return f"{dim} {names[dim]}" if names is not None and dim < len(names) else str(dim)


def _cameras(run: Run) -> list[dict[str, Any]]:
    columns, config = run.columns, run.policy.config
    rows = [
        {
            "column": key,
            "policy": columns.policy_name(key),
            "size": "x".join(map(str, channels_first(run.reader.feature(key))[1:])),
            "state": "renamed" if key in columns.renames else "",
        }
        for key in columns.cameras
    ]
    rows += [{"column": key, "policy": "", "size": "", "state": "not used"} for key in columns.unused_cameras]
    used = {columns.policy_name(key) for key in columns.cameras}
    for key in config.image_keys:
        if key not in used:
            state = "missing: masked" if key in columns.missing_cameras else "declared as empty: masked"
            rows.append({"column": "", "policy": key, "size": "", "state": state})
    return rows


def _parameters(run: Run) -> dict[str, int]:
    counts = {"trained": 0, "frozen": 0}
    for parameter in run.policy.model.parameters():
        counts["trained" if parameter.requires_grad else "frozen"] += parameter.numel()
    return counts
