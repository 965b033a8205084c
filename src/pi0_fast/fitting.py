"""From a LeRobot dataset to a saved FAST tokenizer: the work of `pi0-fast train-tokenizer`.

Reads the dataset episode by episode (several times rather than all at once), so that memory does not grow with it:
statistics, then the fit on sampled chunks of the training episodes, then the errors on held-out episodes. Left out: the
parts themselves (data/, actions/, hub.py, inspection.py).

Of several datasets one vocabulary is fitted: the chunks of each are normalised by its own statistics, and each gives as
many as its weight says. The tokenizer then has no normaliser, and no number of dimensions where these differ.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast import __version__
from pi0_fast.actions.bpe_training import JoinedCorpus, training_is_compiled
from pi0_fast.actions.choosing import RATE_WEIGHTS, Choice, Target, adjusted, choose
from pi0_fast.actions.chunks import (
    ActionSelection,
    dim_ranges,
    format_dims,
    limit_samples,
    sample_count,
    sample_starts,
    split_episodes,
    window_count,
)
from pi0_fast.actions.dct import ORDERS, checked_order
from pi0_fast.actions.details import rounding_rmse
from pi0_fast.actions.directory import REPORT_FOLDER, finish_interrupted_save
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.report import Distortion, DistortionMeter, Table, error_table, token_statistics
from pi0_fast.actions.tokenizer import FastTokenizer, TokenizerFitter
from pi0_fast.actions.vocabulary import Vocabulary
from pi0_fast.configs import TokenizerSource, TokenizerTrainingConfig
from pi0_fast.data import LeRobotReader, open_dataset
from pi0_fast.dataset_chunks import DatasetChunks, vector_feature
from pi0_fast.display import progress, say, warn
from pi0_fast.hub import HubError, PushTarget
from pi0_fast.inspection import about_data, about_tokenizer, tokenizer_report, write_report
from pi0_fast.reports.pictures import require_matplotlib
from pi0_fast.reports.save import check_replaceable
from pi0_fast.reports.tokenizer import TokenizerReport
from pi0_fast.swap import check_place
from pi0_fast.types import UsageError

#: Chunks, and numbers of them, that settings are chosen with: to fit on, and to measure on.
_CHOICE_CHUNKS, _CHOICE_VALUES = (4000, 1500), (1 << 22, 1 << 20)
#: Fits on all chunks, at most, until a target is met there too.
_MOST_FITS = 3
#: A share of clipped frames above this is worth a warning.
CLIPPED_FRAMES_WARNING = 0.05


@dataclass(frozen=True)
class TokenizerTrainingResult:
    """What a fit gave.

    Attributes:
        tokenizer: the fitted tokenizer, with its normaliser.
        output_dir: where it was saved.
        metadata: the content of metadata.json.
        measured: rate and distortion on `measured_on`.
        measured_on: "held-out episodes", or "fitted episodes" where none were held out.
        seconds: how long everything took.
        choice: what was tried to find the settings, where they were not all given.
        further: of several datasets the same for all but the first, which the fields above are about; by name.
    """

    tokenizer: FastTokenizer
    output_dir: Path
    metadata: dict[str, Any]
    measured: Distortion
    measured_on: str
    seconds: float
    choice: Choice | None = None
    further: Mapping[str, Measured] | None = None

    def tables(self) -> Iterator[Table]:
        """(title, rows, headers) of the tables that the command prints at its end."""
        if self.further is not None:
            yield from self._tables_of_several(self.further)
            return
        if self.choice is not None:
            yield self.choice.table()
        measured, fitted = self.measured, self.metadata["compression_stats"]
        held = measured.tokens
        rows = [
            ["chunks", self.metadata["num_training_chunks"], measured.chunks],
            ["tokens per chunk, mean", fitted["mean_token_length"], held["mean_token_length"]],
            ["tokens per chunk, 99th percentile", fitted["p99_token_length"], held["p99_token_length"]],
            ["tokens per chunk, min", fitted["min_token_length"], held["min_token_length"]],
            ["tokens per chunk, max", fitted["max_token_length"], held["max_token_length"]],
            ["values per token (compression)", fitted["compression_ratio"], held["compression_ratio"]],
            ["RMSE, normalised units", "", measured.normalized_rmse],
            ["values clipped by the normaliser", "", f"{measured.clipped_values:.2%}"],
            ["frames clipped by the normaliser", "", f"{measured.clipped_frames:.2%}"],
            ["coefficients outside the vocabulary", "", measured.saturations],
        ]
        if self.tokenizer.max_error is not None:
            rows.append(["chunks beyond the largest error asked for", "", measured.over_error])
        yield f"{self.tokenizer.vocab_size} tokens in {self.seconds:.1f} s", rows, ["", "fitted", self.measured_on]
        normalizer = self.tokenizer.normalizer
        assert normalizer is not None
        yield error_table(measured, self.tokenizer.scale, normalizer, self.measured_on)

    def _tables_of_several(self, further: Mapping[str, Measured]) -> Iterator[Table]:
        parts = self.metadata["datasets"]
        measured = [self.measured, *(each.distortion for each in further.values())]
        rows = [
            [
                part["repo_id"],
                part["num_training_chunks"],
                part["share"],
                part["total_encoded_dims"],
                part["compression_stats"]["mean_token_length"],
                each.tokens["mean_token_length"],
                each.normalized_rmse,
                f"{each.clipped_values:.2%}",
                each.saturations,
            ]
            for part, each in zip(parts, measured, strict=True)
        ]
        headers = ["dataset", "chunks", "share", "dims", "tokens", "held-out tokens", "RMSE", "clipped", "saturated"]
        yield f"{self.tokenizer.vocab_size} tokens in {self.seconds:.1f} s", rows, headers


@dataclass(frozen=True)
class Measured:
    """Rate and distortion of a tokenizer on one of several datasets, and the normaliser that it has there."""

    distortion: Distortion
    normalizer: Normalizer
    measured_on: str


#: Runs of equal coefficients that a fit may hold: with some 14 bytes each it stays below 1 GB in all.
_MOST_RUNS = 48_000_000


def train_tokenizer(config: TokenizerTrainingConfig) -> TokenizerTrainingResult:
    """Fit a FAST tokenizer on a dataset, measure it on held-out episodes, and save it.

    Args:
        config: every setting; see `pi0-fast train-tokenizer --help`.

    Raises:
        UsageError: settings that are wrong or do not fit the data; the output directory exists (without `overwrite`).
        HubError: with `push_to_hub`, a token that may not write there (before the fit), or a push that failed (after
            the tokenizer was saved).
        DatasetError: the dataset is missing, damaged, or holds no episode as long as a chunk.
        TokenizerError: no vocabulary of that size can express the data, or meets the target.
    """
    begun = time.monotonic()
    config.validate()
    _check_output(config)
    push = _check_push(config)
    if isinstance(config.repo_id, list):
        return _fit_several(config, push, begun)
    fit = _Fit(config, config.sources()[0])
    fit.announce()
    if not training_is_compiled():
        say("first run      compiling kernels, which takes some seconds once on this machine")
    normalizer = fit.normalizer()
    for line in normalizer.guard_report():
        warn(line)
    choice = fit.choose(normalizer)
    fitter, tokenizer, measured, measured_on = fit.fit_and_measure(normalizer)
    if measured.clipped_frames > CLIPPED_FRAMES_WARNING:
        warn(
            f"{measured.clipped_frames:.1%} of the frames of the {measured_on} have values outside the normaliser's "
            f"range, which are cut off (largest error {measured.clipping_worst.max():.4g} in dimension "
            f"{_dim_text(normalizer, int(measured.clipping_worst.argmax()))}); --normalization_mode MIN_MAX cuts "
            "nothing off"
        )
    lengths, uses = fit.token_usage(fitter, tokenizer, normalizer)
    metadata = fit.metadata(tokenizer, lengths, measured if fit.held_out else None)
    if choice is not None:
        metadata["choice"] = choice.to_json()
    tokenizer.metadata = metadata
    tokenizer.save_pretrained(config.output_path, token_uses=uses)
    say(f"saved to {config.output_path}")
    if config.report:
        write_report(fit.report(tokenizer, measured_on), config.output_path / REPORT_FOLDER)
    if push is not None:
        _push(tokenizer, config, push, uses)
    return TokenizerTrainingResult(
        tokenizer, config.output_path, metadata, measured, measured_on, time.monotonic() - begun, choice
    )


def _check_output(config: TokenizerTrainingConfig) -> None:
    """Before hours of work: is there a place for the result?"""
    path = config.output_path
    try:
        finish_interrupted_save(path)
        check_place(path)
    except OSError as error:
        raise UsageError(f"--output_dir: {error.strerror or error}") from error
    if path.is_dir() and any(path.iterdir()) and not config.overwrite:
        raise UsageError(f"--output_dir {path} exists; give another one, or --overwrite to replace the tokenizer in it")
    if config.report:
        require_matplotlib()
        check_replaceable(path / REPORT_FOLDER)


def _check_push(config: TokenizerTrainingConfig) -> PushTarget | None:
    """Before hours of work: may the result be pushed? None where nothing is to be pushed."""
    if not config.push_to_hub:
        return None
    target = FastTokenizer.check_push_to_hub(config.hub_name, private=config.hub_private)
    kind = "existing" if target.exists else "new"
    say(f"push           to {target.repo_id} ({kind}{', private' if target.private else ''})")
    if target.doubt:
        warn(f"{target.doubt}; the tokenizer is saved before it is pushed")
    return target


def _push(
    tokenizer: FastTokenizer, config: TokenizerTrainingConfig, target: PushTarget, uses: npt.NDArray[np.int64]
) -> None:
    """Push what has been saved; a failure says how to do that later."""
    try:
        address = tokenizer.push_to_hub(target.repo_id, private=config.hub_private, token_uses=uses)
    except HubError as error:
        private = ", private=True" if config.hub_private else ""
        directory = str(config.output_path.absolute())
        later = f"FastTokenizer.from_pretrained({directory!r}).push_to_hub({target.repo_id!r}{private})"
        raise HubError(
            f"{error}. The tokenizer is saved in {config.output_path}; push it later, in Python: {later}"
        ) from error
    say(f"pushed to {address}")


class _Fit:
    """One run, or one dataset of it: the dataset, which of it is used, and the steps in order."""

    def __init__(self, config: TokenizerTrainingConfig, dataset: TokenizerSource) -> None:
        self.config, self.dataset = config, dataset
        self.reader: LeRobotReader = open_dataset(
            dataset.repo_id,
            root=dataset.root,
            revision=dataset.revision,
            cache_dir=config.cache_dir,
            local_files_only=config.local_files_only,
        )
        state_size = None
        if config.use_delta_transform:
            state_size = vector_feature(self.reader, dataset.state_key).shape[0]
        self.selection = ActionSelection.create(
            vector_feature(self.reader, dataset.action_key).shape[0],
            encoded_dims=dataset.encoded_dims,
            delta_dims=dataset.delta_dims if config.use_delta_transform else None,
            delta_state_dims=dataset.delta_state_dims,
            state_size=state_size,
        )
        if isinstance(config.scale, (list, tuple)) and len(config.scale) != self.selection.size:
            raise UsageError(
                f"--scale has {len(config.scale)} values for {self.selection.size} encoded dimensions "
                f"({format_dims(self.selection.dims)})"
            )
        self.target = _target(config, self.selection)
        self.source = DatasetChunks(
            self.reader,
            self.selection,
            config.action_horizon,
            action_key=dataset.action_key,
            state_key=dataset.state_key,
            max_episodes=config.max_episodes,
        )
        self.lengths = self.source.lengths
        self.train, self.held_out = split_episodes(list(self.lengths), config.val_fraction, config.seed)
        self._choose(config, "--max_chunks")

    def _choose(self, config: TokenizerTrainingConfig, limit: str) -> None:
        """Which chunks are used, of which `limit` is the reason for fewer."""
        self.config, self._limit = config, limit
        counts = self._sample_counts(self.train)
        self._kept = {
            **(limit_samples(counts, config.max_chunks, seed=config.seed) or {}),
            **(limit_samples(self._sample_counts(self.held_out), config.max_chunks, seed=config.seed) or {}),
        }
        self.sampled, self.windows = sum(counts.values()), sum(self._windows(index) for index in self.train)

    def take(self, chunks: int) -> None:
        """Use that many chunks, out of all windows."""
        self._choose(replace(self.config, sample_fraction=1.0, max_chunks=chunks), "its weight, or --sample_fraction")

    def _windows(self, index: int) -> int:
        return window_count(self.lengths[index], self.config.action_horizon)

    def _sample_counts(self, indices: Sequence[int]) -> dict[int, int]:
        return {index: sample_count(self._windows(index), self.config.sample_fraction) for index in indices}

    def _starts(self, index: int) -> npt.NDArray[np.int64]:
        """First frames of the chunks of an episode that are used."""
        starts = sample_starts(
            self.lengths[index],
            self.config.action_horizon,
            self.config.sample_fraction,
            seed=self.config.seed,
            episode_index=index,
        )
        return starts[self._kept[index]] if index in self._kept else starts

    def _used(self, indices: Sequence[int]) -> int:
        """How many chunks of the episodes are used."""
        return min(sum(self._sample_counts(indices).values()), self.config.max_chunks)

    def announce(self) -> None:
        """Say what will be done."""
        config, reader, selection = self.config, self.reader, self.selection
        frames = sum(self.lengths.values())
        say(f"dataset        {self.dataset.repo_id} ({reader.version}) at {reader.root}")
        counts = f"{len(self.train)} to fit, {len(self.held_out)} held out"
        say(f"episodes       {counts}; {frames} frames at {reader.fps:g} Hz")
        left_out = self.sampled - self._used(self.train)
        limited = f" ({left_out} more were sampled: {self._limit})" if left_out else ""
        say(
            f"chunks         {self._used(self.train)} of {self.windows} windows of {config.action_horizon} steps "
            f"to fit{limited}"
        )
        named = "" if self.source.names is None else ": " + ", ".join(self.source.names)
        say(f"dimensions     {format_dims(selection.dims)} of {selection.action_size}{named}")
        if selection.is_delta:
            pairs = zip(selection.delta_dims, selection.delta_state_dims, strict=True)
            say(f"relative to    {self.dataset.state_key}: " + ", ".join(f"{a}-{s}" for a, s in pairs))
        over = "deltas of all windows" if selection.is_delta else "frames"
        say(f"normalisation  {config.normalization_mode}, statistics computed from the {over} of the fitted episodes")
        say(f"vocabulary     {config.vocab_size} at most, {config.symbol_format} symbols")
        if self.target is not None:
            say(f"target         {self.target}")
        else:
            weight = f", rate weight {config.rate_weight:g}" if config.rate_weight else ""
            say(f"scale          {config.scale}{weight}; order {config.order}")

    def normalizer(self) -> Normalizer:
        """The normaliser of the encoded values of the fitted episodes."""
        with progress("statistics", None, "rows read") as advance:
            return Normalizer.fit(
                lambda: self.source.statistics_blocks(self.train),
                self.config.normalization_mode,
                names=self.source.names,
                selection=self.selection,
                progress=advance,
            )

    def choose(self, normalizer: Normalizer) -> Choice | None:
        """Find the settings that are not given, and use them from here on; None where all are given."""
        config, orders = self.config, (ORDERS if self.config.order == "auto" else (checked_order(self.config.order),))
        if self.target is None and config.order != "auto":
            return None
        weights = RATE_WEIGHTS if config.rate_weight is None and self.target is not None else (config.rate_weight or 0,)
        values = config.action_horizon * self.selection.size
        samples = []
        for indices, chunks, most in zip((self.train, self.held_out), _CHOICE_CHUNKS, _CHOICE_VALUES, strict=True):
            with progress("reading", len(indices or self.train), "episodes") as advance:
                sample = self.source.sample(
                    indices or self.train, max(1, min(chunks, most // values)), config.seed, advance
                )
                samples.append(sample.chunks)
        if not self.held_out:
            warn("no episodes are held out: scale, rate weight and order are chosen on those that are fitted")
        with progress("settings", None, "fits") as advance:
            choice = choose(
                *samples,
                normalizer=normalizer,
                target=self.target,
                orders=orders,
                rate_weights=weights,
                scale=config.scale,
                vocab_size=config.vocab_size,
                symbol_format=config.symbol_format,  # type: ignore[arg-type]  # validated
                headroom=config.headroom,
                num_threads=config.num_workers,
                progress=advance,
            )
        found = choice.chosen
        self.config = replace(config, scale=found.scale, rate_weight=found.rate_weight, order=found.order)
        say(f"chosen         scale {found.scale}, rate weight {found.rate_weight:g}, order {found.order}")
        if found.order != "frequency":
            warn("LeRobot's own pi0_fast policy cannot decode this order; for use there, give --order frequency")
            warn("fewer tokens are not all: policies may learn this order worse (docs/benchmarks.md); try both")
        return choice

    def fit_and_measure(self, normalizer: Normalizer) -> tuple[TokenizerFitter, FastTokenizer, Distortion, str]:
        """The tokenizer fitted on all sampled chunks, and measured; again at another scale, where that misses a target.

        A vocabulary of all chunks is another one than that of the few that the settings were chosen with.
        """
        for fits in range(1, _MOST_FITS + 1):
            fitter, tokenizer = self.tokenizer(normalizer)
            measured, measured_on = self.measure(tokenizer, normalizer)
            if self.target is None:
                break
            shares = self.target.shares(
                float(measured.tokens["mean_token_length"]),
                rounding_rmse(measured, normalizer),
                measured.quantization_worst,
            )
            if shares.max() <= 1.0:
                break
            if fits == _MOST_FITS:
                warn(f"the {measured_on} take {shares.max():.3g} times the target of {self.target}")
                break
            if self.target.kind == "error":
                shares = np.maximum(shares, 1.0)
            scale = adjusted(self.config.scale, shares, self.target.kind)
            say(f"scale          {scale}, as the {measured_on} take {shares.max():.3f} times the target")
            self.config = replace(self.config, scale=scale)
        return fitter, tokenizer, measured, measured_on

    def token_usage(
        self, fitter: TokenizerFitter, tokenizer: FastTokenizer, normalizer: Normalizer
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Tokens of each fitted chunk, and uses of each id; read once more where they are not those of rounding."""
        if not tokenizer.rate_weight:
            return fitter.token_usage(tokenizer)
        lengths: list[npt.NDArray[np.int32]] = []
        uses = np.zeros(tokenizer.vocab_size, np.int64)
        with progress("encoding", self._used(self.train), "chunks") as advance:
            for chunks in self.source.chunks(self.train, self._starts):
                ids, counts = tokenizer.encode_padded(normalizer.apply(chunks), num_threads=self.config.num_workers)
                uses += np.bincount(ids[ids >= 0], minlength=len(uses))
                lengths.append(counts)
                advance(len(chunks))
        return np.concatenate(lengths), uses

    def tokenizer(self, normalizer: Normalizer) -> tuple[TokenizerFitter, FastTokenizer]:
        """The tokenizer fitted on sampled chunks of the training episodes, and what it was fitted from."""
        config = self.config
        fitter = self.fitter(normalizer, _MOST_RUNS)
        with progress("vocabulary", None, "merges") as advance:
            tokenizer = fitter.finish(
                vocab_size=config.vocab_size,
                symbol_format=config.symbol_format,  # type: ignore[arg-type]  # validated
                headroom=config.headroom,
                normalizer=normalizer,
                rate_weight=config.rate_weight or 0.0,
                max_error=None if self.target is None else self.target.max_error(normalizer),
                num_threads=config.num_workers,
                progress=advance,
            )
        if tokenizer.vocab_size < config.vocab_size:
            say(f"no pair of symbols is left that occurs twice: the vocabulary has {tokenizer.vocab_size} tokens")
        return fitter, tokenizer

    def fitter(self, normalizer: Normalizer, max_runs: int) -> TokenizerFitter:
        """The sampled chunks of the training episodes, taken in for a fit."""
        config = self.config
        fitter = TokenizerFitter(
            config.action_horizon,
            self.selection.size,
            scale=config.scale,
            order=checked_order(config.order),
            max_runs=max_runs,
        )
        with progress("chunks", self._used(self.train), "chunks") as advance:
            for chunks in self.source.chunks(self.train, self._starts):
                fitter.add(normalizer.apply(chunks), num_threads=config.num_workers)
                advance(len(chunks))
        if fitter.corpus.dropped:
            warn(
                f"{fitter.corpus.dropped} chunks are left out of the fit, to stay below a gigabyte of memory: their "
                "coefficients hardly repeat (noise, or a fine --scale)"
            )
        return fitter

    def measure(self, tokenizer: FastTokenizer, normalizer: Normalizer) -> tuple[Distortion, str]:
        """Rate and distortion on the held-out episodes, or on the fitted ones where there are none."""
        indices, what = (self.held_out, "held-out episodes") if self.held_out else (self.train, "fitted episodes")
        meter = DistortionMeter(tokenizer, normalizer, num_threads=self.config.num_workers)
        with progress("measuring", self._used(indices), "chunks") as advance:
            for chunks in self.source.chunks(indices, self._starts):
                meter.add(chunks)
                advance(len(chunks))
        return meter.result(), what

    def report(self, tokenizer: FastTokenizer, measured_on: str) -> TokenizerReport:
        """What `pi0-fast inspect` would report on the tokenizer just fitted."""
        assert tokenizer.normalizer is not None
        return tokenizer_report(
            tokenizer,
            tokenizer.normalizer,
            self.source,
            fitted=self.train,
            measured=self.held_out or self.train,
            measured_on=measured_on,
            about=(
                *about_data(self.dataset.repo_id, self.source),
                *about_tokenizer(tokenizer, tokenizer.normalizer),
            ),
            vocab_size=self.config.vocab_size,
            seed=self.config.seed,
            num_threads=self.config.num_workers,
        )

    def metadata(
        self, tokenizer: FastTokenizer, lengths: npt.NDArray[np.int32], held_out: Distortion | None
    ) -> dict[str, Any]:
        """The content of metadata.json: the documented keys, the held-out measurements, and versions."""
        config, selection = self.config, self.selection
        delta = list(selection.delta_dims) if selection.is_delta else None
        return {
            "repo_id": self.dataset.repo_id,
            "vocab_size": tokenizer.vocab_size,
            "scale": tokenizer.scale,
            "encoded_dims": format_dims(selection.dims),
            "encoded_dim_ranges": dim_ranges(selection.dims),
            "total_encoded_dims": selection.size,
            "delta_dims": None if delta is None else ",".join(map(str, delta)),
            "delta_dim_list": delta,
            "use_delta_transform": config.use_delta_transform,
            "state_key": self.dataset.state_key,
            "normalization_mode": config.normalization_mode,
            "action_horizon": config.action_horizon,
            "num_training_chunks": len(lengths),
            "compression_stats": token_statistics(lengths, config.action_horizon * selection.size),
            "held_out": None
            if held_out is None
            else {"episodes": list(self.held_out), **held_out.to_json(), "val_fraction": config.val_fraction},
            "versions": {
                "pi0-fast": __version__,
                "python": platform.python_version(),
                **{name: _version(name) for name in ("numpy", "numba", "scipy", "tokenizers", "pyarrow")},
                "dataset": self.reader.version,
                "dataset_revision": self.reader.revision,
            },
        }


# --- several datasets ---------------------------------------------------------------------------------------


def _fit_several(config: TokenizerTrainingConfig, push: PushTarget | None, begun: float) -> TokenizerTrainingResult:
    """One vocabulary for the chunks of several datasets, each normalised by itself."""
    fits = _weighted_fits(config)
    for fit in fits:
        fit.announce()
    if not training_is_compiled():
        say("first run      compiling kernels, which takes some seconds once on this machine")
    normalizers = [fit.normalizer() for fit in fits]
    for fit, normalizer in zip(fits, normalizers, strict=True):
        for line in normalizer.guard_report():
            warn(f"{fit.dataset.repo_id}: {line}")
    most_runs = _MOST_RUNS // len(fits)
    fitters = [fit.fitter(normalizer, most_runs) for fit, normalizer in zip(fits, normalizers, strict=True)]
    tokenizer = _shared_tokenizer(config, fitters)
    measured: list[Measured] = []
    parts: list[dict[str, Any]] = []
    uses = np.zeros(tokenizer.vocab_size, np.int64)
    for fit, normalizer, fitter in zip(fits, normalizers, fitters, strict=True):
        bound = tokenizer.bound(config.action_horizon, fit.selection.size)
        distortion, measured_on = fit.measure(bound, normalizer)
        measured.append(Measured(distortion, normalizer, measured_on))
        lengths, own = fit.token_usage(fitter, bound, normalizer)
        uses += own
        part = fit.metadata(bound, lengths, distortion if fit.held_out else None)
        parts.append({**part, "normalizer": normalizer.to_json()})
    total = sum(part["num_training_chunks"] for part in parts)
    for part in parts:
        part["share"] = part["num_training_chunks"] / total
    tokenizer.metadata = _metadata_of_several(config, tokenizer, parts)
    tokenizer.save_pretrained(config.output_path, token_uses=uses)
    say(f"saved to {config.output_path}")
    if push is not None:
        _push(tokenizer, config, push, uses)
    first, *others = measured
    names = [fit.dataset.repo_id for fit in fits]
    return TokenizerTrainingResult(
        tokenizer,
        config.output_path,
        tokenizer.metadata,
        first.distortion,
        first.measured_on,
        time.monotonic() - begun,
        further=dict(zip(_distinct(names)[1:], others, strict=True)),
    )


def _distinct(names: Sequence[str]) -> list[str]:
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def _weighted_fits(config: TokenizerTrainingConfig) -> list[_Fit]:
    """The datasets, each with as many chunks as its weight says: all in all as many as `--sample_fraction` of all
    windows and `--max_chunks` allow, and no dataset more than it has.

    Raises:
        UsageError: a dataset would give less than one chunk.
    """
    sources = config.sources()
    fits = [_Fit(config, source) for source in sources]
    windows = [fit.windows for fit in fits]
    most = min(config.max_chunks, sum(fit.sampled for fit in fits))
    given = [source.weight for source in sources]
    weights = [float(count) for count in windows] if None in given else [float(weight or 0) for weight in given]
    shares = [weight / sum(weights) for weight in weights]
    total = min(most, *(count / share for count, share in zip(windows, shares, strict=True)))
    for fit, share, count in zip(fits, shares, windows, strict=True):
        chunks = min(count, round(total * share))
        if chunks < 1:
            raise UsageError(
                f"--weights: of {total:.0f} chunks in all, {fit.dataset.repo_id} would give none; raise its weight, "
                "--sample_fraction or --max_chunks"
            )
        fit.take(chunks)
    return fits


def _shared_tokenizer(config: TokenizerTrainingConfig, fitters: Sequence[TokenizerFitter]) -> FastTokenizer:
    """The tokenizer of all chunks; bound to a number of dimensions where all datasets have the same."""
    with progress("vocabulary", None, "merges") as advance:
        vocabulary = Vocabulary.fit(
            JoinedCorpus([fitter.corpus for fitter in fitters]),
            vocab_size=config.vocab_size,
            symbol_format=config.symbol_format,  # type: ignore[arg-type]  # validated
            headroom=config.headroom,
            num_threads=config.num_workers,
            progress=advance,
        )
    sizes = {fitter.shape[1] for fitter in fitters}
    tokenizer = FastTokenizer(
        vocabulary,
        scale=config.scale,
        time_horizon=config.action_horizon if len(sizes) == 1 else None,
        action_dim=sizes.pop() if len(sizes) == 1 else None,
        order=checked_order(config.order),
        rate_weight=config.rate_weight or 0.0,
    )
    if tokenizer.vocab_size < config.vocab_size:
        say(f"no pair of symbols is left that occurs twice: the vocabulary has {tokenizer.vocab_size} tokens")
    return tokenizer


def _metadata_of_several(
    config: TokenizerTrainingConfig, tokenizer: FastTokenizer, parts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """metadata.json: the documented keys that are about all datasets, and those of each under ``datasets``."""
    return {
        "repo_id": [part["repo_id"] for part in parts],
        "vocab_size": tokenizer.vocab_size,
        "scale": tokenizer.scale,
        "use_delta_transform": config.use_delta_transform,
        "normalization_mode": config.normalization_mode,
        "action_horizon": config.action_horizon,
        "num_training_chunks": sum(part["num_training_chunks"] for part in parts),
        "weights": config.weights,
        "datasets": list(parts),
        "versions": parts[0]["versions"],
    }


def _target(config: TokenizerTrainingConfig, selection: ActionSelection) -> Target | None:
    name = config.target_name
    if name is None:
        return None
    value = getattr(config, name)
    if isinstance(value, (list, tuple)) and len(value) != selection.size:
        raise UsageError(
            f"--{name} has {len(value)} values for {selection.size} encoded dimensions ({format_dims(selection.dims)})"
        )
    return Target(name.removeprefix("target_"), value)  # type: ignore[arg-type]


def _dim_text(normalizer: Normalizer, dim: int) -> str:
    return f"{dim}" if normalizer.names is None else f"{dim} ({normalizer.names[dim]})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
