"""Reports on a tokenizer and a dataset, or on a dataset alone: the work of `pi0-fast inspect`.

Finds out which episodes and dimensions are meant, reads them, has them measured, and writes the report;
`train-tokenizer --report` uses the second half. Left out: the measuring itself (actions/), the pictures and the page
(reports/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.chunks import ActionSelection, format_dims, split_episodes
from pi0_fast.actions.details import SWEEP_FACTORS, Details, examine, round_trip, scale_list, sweep_scales, worst_chunks
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.plane import FIT_CHUNKS, MEASURE_CHUNKS, PAIRS, PLANE_FITS, plane
from pi0_fast.actions.report import Table
from pi0_fast.actions.survey import survey
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.configs import InspectConfig
from pi0_fast.data import LeRobotReader, open_dataset
from pi0_fast.dataset_chunks import DatasetChunks, Sample, vector_feature
from pi0_fast.display import progress, say, warn
from pi0_fast.reports.dataset import DatasetReport
from pi0_fast.reports.pictures import require_matplotlib
from pi0_fast.reports.save import REPORT_PAGE, Report, check_replaceable, save_report
from pi0_fast.reports.tokenizer import ShownChunk, TokenizerReport
from pi0_fast.swap import check_place, finish_interrupted_swap
from pi0_fast.types import TokenizerError, UsageError

FloatArray = npt.NDArray[np.float32]
LongArray = npt.NDArray[np.int64]

#: Chunks that are measured, and that other scales are fitted on, at most.
MAX_CHUNKS = 5000
#: Numbers of the chunks that are held in memory at a time, at most: 64 MB.
_MOST_VALUES = 1 << 24
_WORST = 3
_DEFAULT_HORIZON = 10
_DEFAULT_STATE_KEY = "observation.state"


@dataclass(frozen=True)
class Inspection:
    """What `inspect` gives: the report, and the directory it is in."""

    report: Report
    output_dir: Path

    def tables(self) -> list[Table]:
        """(title, rows, headers) of the tables that the command prints at its end."""
        return list(self.report.tables())


def inspect(config: InspectConfig) -> Inspection:
    """Report on a tokenizer and a dataset, or without a tokenizer on the dataset alone.

    Args:
        config: every setting; see `pi0-fast inspect --help`.

    Raises:
        UsageError: settings that are wrong, contradict the tokenizer or do not fit the data; matplotlib is missing; the
            output directory exists (without `overwrite`) or holds something else.
        DatasetError: the dataset is missing, damaged, or holds no episode as long as a chunk.
        TokenizerError: the tokenizer is missing, damaged, or made for actions of another size.
    """
    config.validate()
    require_matplotlib()
    output = config.output_path
    try:
        finish_interrupted_swap(output)
        check_place(output)
    except OSError as error:
        raise UsageError(f"--output_dir: {error.strerror or error}") from error
    if output.is_dir() and any(output.iterdir()) and not config.overwrite:
        raise UsageError(f"--output_dir {output} exists; give another one, or --overwrite to replace the report in it")
    check_replaceable(output)
    tokenizer = _load_tokenizer(config)
    reader = open_dataset(
        config.repo_id,
        root=config.root,
        revision=config.revision,
        cache_dir=config.cache_dir,
        local_files_only=config.local_files_only,
    )
    say(f"dataset        {config.repo_id} ({reader.version}) at {reader.root}")
    source = _source(config, reader, tokenizer)
    report: Report
    if tokenizer is None:
        report = dataset_report(source, about=about_data(config.repo_id, source))
    else:
        report = _inspect_tokenizer(config, source, tokenizer)
    write_report(report, output)
    return Inspection(report, output)


def write_report(report: Report, directory: Path) -> None:
    """Draw and save a report, with progress, and say where it is."""
    with progress("pictures", len(report.drawings()), "pictures") as advance:
        save_report(report, directory, advance)
    say(f"report         {directory / REPORT_PAGE}")


# --- what is meant ----------------------------------------------------------------------------------------------------


def _load_tokenizer(config: InspectConfig) -> FastTokenizer | None:
    if config.tokenizer is None:
        return None
    if config.tokenizer_revision is not None and Path(config.tokenizer).expanduser().is_dir():
        raise UsageError(f"--tokenizer_revision has no effect: {config.tokenizer} is a local directory")
    tokenizer = FastTokenizer.from_pretrained(
        config.tokenizer,
        revision=config.tokenizer_revision,
        cache_dir=config.cache_dir,
        local_files_only=config.local_files_only,
    )
    normalizer = tokenizer.normalizer
    if normalizer is None and config.normalization_mode is None:
        raise UsageError(
            f"the tokenizer {config.tokenizer} does not say how its actions were normalised (it has no "
            "normalizer.json, as published tokenizers): give --normalization_mode, such as QUANTILES, whose statistics "
            "are then computed from the dataset"
        )
    if normalizer is not None and config.normalization_mode not in (None, str(normalizer.mode)):
        raise UsageError(
            f"--normalization_mode {config.normalization_mode} contradicts the tokenizer, whose normalizer.json says "
            f"{normalizer.mode}"
        )
    if tokenizer.time_horizon is not None and config.action_horizon not in (None, tokenizer.time_horizon):
        raise UsageError(
            f"--action_horizon {config.action_horizon} contradicts the tokenizer, which is bound to chunks of "
            f"{tokenizer.time_horizon} steps"
        )
    return tokenizer


def _source(config: InspectConfig, reader: LeRobotReader, tokenizer: FastTokenizer | None) -> DatasetChunks:
    """The dataset's values that are meant: those that the tokenizer encodes, or those of the flags."""
    metadata = (tokenizer.metadata if tokenizer is not None else None) or {}
    state_key = config.state_key or str(metadata.get("state_key") or _DEFAULT_STATE_KEY)
    size = vector_feature(reader, config.action_key).shape[0]
    normalizer = tokenizer.normalizer if tokenizer is not None else None
    saved = normalizer.selection if normalizer is not None else None
    if saved is not None:
        _check_saved_selection(config, saved, reader, size, state_key)
        selection = saved
    else:
        state_size = vector_feature(reader, state_key).shape[0] if config.use_delta_transform else None
        selection = ActionSelection.create(
            size,
            encoded_dims=config.encoded_dims,
            delta_dims=config.delta_dims,
            delta_state_dims=config.delta_state_dims,
            state_size=state_size,
        )
    made_for = tokenizer.action_dim if tokenizer is not None else None
    if normalizer is not None:
        made_for = normalizer.size
    if made_for not in (None, selection.size):
        raise TokenizerError(
            f"the tokenizer is made for {made_for} dimensions, and {selection.size} of {config.action_key!r} are to be "
            f"encoded ({format_dims(selection.dims)}): choose them with --encoded_dims"
        )
    bound = tokenizer.time_horizon if tokenizer is not None else None
    source = DatasetChunks(
        reader,
        selection,
        bound or config.action_horizon or _DEFAULT_HORIZON,
        action_key=config.action_key,
        state_key=state_key,
        max_episodes=config.max_episodes,
        horizon_is_fixed=bound is not None,
    )
    if normalizer is not None and normalizer.names and source.names and normalizer.names != source.names:
        differ = [f"{a} / {b}" for a, b in zip(normalizer.names, source.names, strict=True) if a != b]
        warn(f"the tokenizer was fitted on dimensions of other names than the dataset's: {', '.join(differ[:5])}")
    return source


def _check_saved_selection(
    config: InspectConfig, saved: ActionSelection, reader: LeRobotReader, size: int, state_key: str
) -> None:
    for name in ("encoded_dims", "use_delta_transform", "delta_dims", "delta_state_dims"):
        if getattr(config, name):
            raise UsageError(f"--{name} has no effect: the tokenizer's normalizer.json says what it encodes")
    if saved.action_size != size:
        raise TokenizerError(
            f"the tokenizer was fitted on actions of {saved.action_size} dimensions, but {config.action_key!r} of "
            f"{config.repo_id} has {size}: they belong to different robots (--action_key chooses the column)"
        )
    if not saved.is_delta:
        if config.state_key is not None:
            raise UsageError("--state_key has no effect: the tokenizer encodes no actions relative to the state")
        return
    found = vector_feature(reader, state_key).shape[0]
    if saved.state_size not in (None, found):
        raise TokenizerError(
            f"the tokenizer was fitted on states of {saved.state_size} dimensions, but {state_key!r} of "
            f"{config.repo_id} has {found} (--state_key chooses the column)"
        )


def _episodes(
    config: InspectConfig, source: DatasetChunks, metadata: dict[str, Any] | None
) -> tuple[Sequence[int], Sequence[int], str]:
    """(episodes to fit other scales on, episodes to measure on, what the latter are in words)."""
    present = list(source.lengths)
    named = _held_out(metadata) if metadata is not None and metadata.get("repo_id") == config.repo_id else None
    if named is not None:
        measured = [index for index in named if index in source.lengths]
        fitted = [index for index in present if index not in set(named)]
        if measured and fitted:
            return fitted, measured, "held-out episodes"
        warn(
            f"of the episodes {named} that the tokenizer's metadata.json says were held out of its fit, none is among "
            f"the {len(present)} that are inspected: measured on others"
        )
    say("held out       not known of this tokenizer, which may have been fitted on what it is measured on")
    fit, measure = split_episodes(present, config.val_fraction, config.seed)
    return (fit, measure, "chosen episodes") if measure else (fit, fit, "all episodes")


def _held_out(metadata: dict[str, Any]) -> list[int] | None:
    """The episodes that a tokenizer's metadata.json says were held out of its fit; None where it does not say.

    Others write this file too: what is no list of episode indices is told of, and then not known.
    """
    held_out = metadata.get("held_out")
    if held_out is None:
        return None
    episodes = held_out.get("episodes") if isinstance(held_out, dict) else held_out
    if isinstance(episodes, list) and all(type(index) is int and index >= 0 for index in episodes):
        return sorted(set(episodes))
    text = repr(held_out)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    warn(f"held_out of the tokenizer's metadata.json lists no episode indices, and is not used: {text}")
    return None


# --- a tokenizer ------------------------------------------------------------------------------------------------------


def _inspect_tokenizer(config: InspectConfig, source: DatasetChunks, tokenizer: FastTokenizer) -> TokenizerReport:
    fitted, measured, measured_on = _episodes(config, source, tokenizer.metadata)
    normalizer = tokenizer.normalizer
    if normalizer is None:
        assert config.normalization_mode is not None
        with progress("statistics", None, "rows read") as advance:
            normalizer = Normalizer.fit(
                lambda: source.statistics_blocks(fitted),
                config.normalization_mode,
                names=source.names,
                selection=source.selection,
                progress=advance,
            )
    about = (
        *about_data(config.repo_id, source),
        ("tokenizer", str(config.tokenizer)),
        *about_tokenizer(tokenizer, normalizer),
    )
    return tokenizer_report(
        tokenizer,
        normalizer,
        source,
        fitted=fitted,
        measured=measured,
        measured_on=measured_on,
        about=about,
        max_chunks=config.max_chunks,
        scales=config.scales,
        seed=config.seed,
        num_threads=config.num_workers,
    )


def tokenizer_report(
    tokenizer: FastTokenizer,
    normalizer: Normalizer,
    source: DatasetChunks,
    *,
    fitted: Sequence[int],
    measured: Sequence[int],
    measured_on: str,
    about: Sequence[tuple[str, str]],
    max_chunks: int = MAX_CHUNKS,
    scales: Sequence[float] | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
) -> TokenizerReport:
    """Measure a tokenizer on some episodes, and others like it at other scales.

    Args:
        tokenizer, normalizer: to measure.
        source: the dataset.
        fitted, measured: indices of the episodes to fit other scales on, and to measure on.
        measured_on: what the latter are, in words.
        about: (what, text) lines for the page.
        max_chunks: chunks that are measured, and that are fitted on, at most; fewer where they are large.
        scales: to try; None: multiples of the tokenizer's own.
        vocab_size: of the refitted tokenizers; None: the tokenizer's.
        seed: of the sampled chunks.
        num_threads: None means all processors.
    """
    most = max(1, min(max_chunks, _MOST_VALUES // (source.horizon * source.selection.size)))
    with progress("reading", min(len(measured), most), "episodes") as advance:
        sample = source.sample(measured, most, seed, advance)
    say(f"measured on    {len(sample.chunks)} of {sample.windows} chunks; {measured_on}: {len(measured)}")
    with progress("measuring", len(sample.chunks), "chunks") as advance:
        details = examine(tokenizer, normalizer, sample.chunks, num_threads=num_threads, progress=advance)
    with progress("reading", min(len(fitted), most), "episodes") as advance:
        training = source.sample(fitted, most, seed, advance)
    tried = list(scales) if scales else [scale_list(tokenizer.scale, factor) for factor in SWEEP_FACTORS]
    with progress("other scales", len(tried), "fits") as advance:
        sweep = sweep_scales(
            tried,
            training.chunks,
            sample.chunks,
            like=tokenizer,
            normalizer=normalizer,
            vocab_size=vocab_size,
            num_threads=num_threads,
            progress=advance,
        )
    with progress("other encoders", PLANE_FITS, "fits") as advance:
        points = plane(
            training.chunks[_spread(len(training.chunks), FIT_CHUNKS)],
            sample.chunks[_spread(len(sample.chunks), MEASURE_CHUNKS)],
            _pairs(source, sample),
            like=tokenizer,
            normalizer=normalizer,
            vocab_size=vocab_size,
            seed=seed,
            num_threads=num_threads,
            progress=advance,
        )
    return TokenizerReport(
        about=tuple(about),
        tokenizer=tokenizer,
        normalizer=normalizer,
        labels=_labels(source),
        measured_on=measured_on,
        details=details,
        worst=_worst(details, sample, tokenizer, normalizer),
        sweep=tuple(sweep),
        sweep_vocab_size=vocab_size or tokenizer.vocab_size,
        sweep_chunks=len(training.chunks),
        plane=points,
    )


def _worst(
    details: Details, sample: Sample, tokenizer: FastTokenizer, normalizer: Normalizer
) -> tuple[ShownChunk, ...]:
    """The chunks with the largest errors, as recorded and as decoded."""
    horizon = sample.chunks.shape[1]
    return tuple(
        ShownChunk(
            episode=int(sample.episodes[i]),
            start=int(sample.starts[i]),
            tokens=int(details.lengths[i]),
            error=float(details.errors[i]),
            original=sample.chunks[i],
            decoded=round_trip(tokenizer, normalizer, sample.chunks[i]),
        )
        for i in worst_chunks(details.errors, sample.episodes, sample.starts, horizon, _WORST)
    )


def _spread(count: int, most: int) -> LongArray:
    """Positions of at most `most` of `count` things, evenly spread."""
    found: LongArray = np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
    return found


def _pairs(source: DatasetChunks, sample: Sample) -> tuple[FloatArray, FloatArray]:
    """Chunks of the sample, and those that begin one frame later, raw [P, H, D] each."""
    ends = np.array([source.lengths[index] for index in sample.episodes.tolist()])
    followed = np.flatnonzero(sample.starts + source.horizon < ends)
    chosen = followed[_spread(len(followed), PAIRS)] if len(followed) else followed
    if not len(chosen):
        return sample.chunks[:0], sample.chunks[:0]
    episodes, starts = sample.episodes[chosen], sample.starts[chosen]
    later = source.chunks(np.unique(episodes).tolist(), lambda index: starts[episodes == index] + 1)
    return sample.chunks[chosen], np.concatenate(list(later))


# --- a dataset --------------------------------------------------------------------------------------------------------


def dataset_report(source: DatasetChunks, *, about: Sequence[tuple[str, str]]) -> DatasetReport:
    """Look at every value of the episodes that are long enough."""
    indices = list(source.lengths)
    with progress("values", None, "rows read") as advance:
        found = survey(lambda: source.located_blocks(indices), names=source.names, progress=advance)
    return DatasetReport(
        about=tuple(about),
        labels=_labels(source),
        frames=source.asked,
        fps=source.reader.fps,
        horizon=source.horizon,
        too_short=source.too_short,
        survey=found,
    )


# --- words ------------------------------------------------------------------------------------------------------------


def _labels(source: DatasetChunks) -> tuple[str, ...]:
    """What each encoded dimension is called: its number in the robot's action, and its name."""
    dims, names = source.selection.dims, source.names
    relative = set(source.selection.delta_dims)
    return tuple(
        f"{f'dimension {dim}' if names is None else f'{dim} {names[place]}'}{' (rel.)' if dim in relative else ''}"
        for place, dim in enumerate(dims)
    )


def about_data(repo_id: str, source: DatasetChunks) -> list[tuple[str, str]]:
    """(what, text) lines on a dataset."""
    reader, selection = source.reader, source.selection
    lines = [
        ("dataset", f"{repo_id} ({reader.version})"),
        ("episodes", f"{len(source.lengths)} used, {source.too_short} too short; {reader.fps:g} frames per second"),
        ("frames", str(sum(source.lengths.values()))),
        ("dimensions", f"{format_dims(selection.dims)} of {selection.action_size}"),
        ("chunks", f"{source.horizon} steps"),
    ]
    if selection.is_delta:
        pairs = zip(selection.delta_dims, selection.delta_state_dims, strict=True)
        lines.append(("relative to the state", ", ".join(f"{a} to {s}" for a, s in pairs)))
    return lines


def about_tokenizer(tokenizer: FastTokenizer, normalizer: Normalizer) -> list[tuple[str, str]]:
    """(what, text) lines on a tokenizer."""
    clips = "clips" if normalizer.clip else "does not clip"
    return [
        ("fingerprint", tokenizer.fingerprint),
        ("vocabulary", f"{tokenizer.vocab_size} ids, {tokenizer.symbol_format} symbols"),
        ("scale", str(tokenizer.scale)),
        ("order of the coefficients", f"{tokenizer.order} first"),
        ("encoder", f"rate weight {tokenizer.rate_weight:g}" if tokenizer.rate_weight else "rounding"),
        ("normalisation", f"{normalizer.mode}, {clips}, statistics of {normalizer.source}"),
    ]
