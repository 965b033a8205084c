"""`fit_fast_tokenizer`: the tokenizer of a training run, fitted once and then found in a cache directory.

For training code: a quick fit on chunks sampled over the episodes, under a name that says what it was made from, safe
when many processes ask at once (`leader.py`). Left out: the command with its tables and held-out errors (`fitting.py`),
and delta statistics, which come with the `normalizer` that training uses.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pi0_fast.actions import layout
from pi0_fast.actions.chunks import ActionSelection, dim_ranges, format_dims, window_count
from pi0_fast.actions.dct import Order, checked_order
from pi0_fast.actions.directory import METADATA, NORMALIZER
from pi0_fast.actions.normalize import NormalizationMode, Normalizer, Statistics
from pi0_fast.actions.report import token_statistics
from pi0_fast.actions.tokenizer import FastTokenizer, TokenizerFitter
from pi0_fast.data.locate import locate_dataset
from pi0_fast.data.reader import LeRobotReader
from pi0_fast.dataset_chunks import vector_feature, vector_values
from pi0_fast.hub import HubError
from pi0_fast.leader import run_once
from pi0_fast.swap import TEMPORARY
from pi0_fast.types import DatasetError, EpisodeRecord, TokenizerError, UsageError

logger = logging.getLogger(__name__)

#: Part of every signature: goes up when the same arguments and data would give another tokenizer than before.
FIT_VERSION = 1


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """There is no dataset where one was looked for, or it cannot be fetched."""


class NoChunksError(DatasetError, RuntimeError):
    """The dataset is there, but holds no chunk to fit on."""


def fit_fast_tokenizer(
    *,
    dataset_repo_id: str,
    cache_dir: str | Path,
    base_tokenizer_name: str | None = "physical-intelligence/fast",
    n_samples: int = 1024,
    chunk_size: int = 50,
    seed: int = 42,
    root: str | Path | None = None,
    scale: float | Sequence[float] = 10.0,
    vocab_size: int = 1024,
    timeout_s: float = 1800.0,
    revision: str | None = None,
    local_files_only: bool = False,
    action_key: str = "action",
    state_key: str = "observation.state",
    normalization_mode: str | None = None,
    statistics: Statistics | Mapping[str, Any] | None = None,
    normalizer: Normalizer | None = None,
    symbol_format: Literal["plain", "reference"] = "plain",
    rate_weight: float = 0.0,
    order: Order = "frequency",
    episodes: Sequence[int] | None = None,
) -> str:
    """The directory of a FAST tokenizer fitted on a LeRobot dataset: from the cache, or fitted now by one process.

    `n_samples // episodes` chunks (at least one) are taken from each episode, the episodes in random order until there
    are `n_samples`, at random first frames without repetition; shorter episodes are skipped, counted and logged. Only
    the action column and the index columns are read (and the state, for a normaliser that makes actions relative).

    The result is `{cache_dir}/{signature}`; the signature is a hash of all that decides it: the dataset's name and its
    commit on the hub, or for a local directory the content of the columns; every argument but cache_dir, root, revision
    and timeout_s; the versions of formats and of the method. Equal signatures mean byte-identical vocabularies.

    Many processes may call this at once with the same arguments, see `leader.run_once` for who fits: one does, the
    others wait for it, with a line in the log every 30 s, and fail when it fails or dies. Calling again tries again.

    Args:
        dataset_repo_id: ``owner/name``; with `root` only a label.
        cache_dir: where tokenizers are kept; processes on several machines may share it.
        base_tokenizer_name: a FAST tokenizer that the run is derived from: a directory or a hub id. It is part of the
            signature, and before a fit it is checked to be a FAST tokenizer (looked up locally first; where it cannot
            be read, that is logged). scale and vocab_size are the arguments, not the base's. None: there is none.
        n_samples: chunks to fit on, at most.
        chunk_size: steps H of a chunk.
        seed: of the sample.
        root: directory of the dataset; the network is then never touched for it.
        scale, vocab_size, symbol_format, rate_weight, order: see `FastTokenizer.fit`.
        episodes: indices of those to fit on, such as the ones that are not held out; None for all.
        timeout_s: how long to wait for the process that fits.
        revision, local_files_only: see `pi0_fast.data.open_dataset`.
        action_key, state_key: columns of the dataset.
        normalization_mode: see `NormalizationMode`; None means QUANTILES, which maps [q01, q99] to [-1, 1] and clips.
            The statistics are computed exactly, from all frames.
        statistics: of the actions, in their place: those that training will use.
        normalizer: in place of both; its selection says which dimensions are encoded, and relative to which state.

    Returns:
        The path; `FastTokenizer.from_pretrained(path)` has the normaliser attached.

    Raises:
        DatasetNotFoundError: (a FileNotFoundError) no such dataset.
        NoChunksError: (a RuntimeError) no parquet shards, or no episode as long as a chunk.
        SharedWorkError: (a RuntimeError) the process that fitted failed or died, or `timeout_s` is over.
        DatasetError: the dataset is damaged, or lacks the column.
        TokenizerError: the base is no FAST tokenizer; no vocabulary of that size can express the data.
        UsageError: arguments that are impossible or contradict each other.
    """
    settings = _Settings(
        n_samples=_whole("n_samples", n_samples, 1),
        chunk_size=_whole("chunk_size", chunk_size, 1),
        seed=_whole("seed", seed, 0),
        scale=_scale(scale),
        vocab_size=_whole("vocab_size", vocab_size, 2),
        symbol_format=symbol_format,
        rate_weight=_weight(rate_weight),
        order=checked_order(order),
        base=None if base_tokenizer_name is None else str(base_tokenizer_name),
    )
    if symbol_format not in ("plain", "reference"):
        raise UsageError(f"symbol_format must be 'plain' or 'reference', not {symbol_format!r}")
    if not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
        raise UsageError(f"timeout_s must be above 0, not {timeout_s!r}")
    reader = _open(dataset_repo_id, root, revision, local_files_only)
    data = _Actions.of(reader, action_key, state_key, normalizer, settings, _chosen(reader, episodes))
    normalization = _normalization(data, normalization_mode, statistics, normalizer)
    signature = _signature(data, normalization, settings)
    path = Path(cache_dir).expanduser() / signature

    def finished() -> str | None:
        return None if _why_unfinished(path, signature) else str(path)

    def work() -> str:
        if path.exists():
            logger.warning("%s is not used, but fitted again: %s", path, _why_unfinished(path, signature))
        _check_base(settings.base, local_files_only)
        _remove_leftovers(path)
        _fit(data, normalization, settings, signature, path)
        return str(path)

    what = f"FAST tokenizer {signature} of {dataset_repo_id}"
    return run_once(path, work, finished, timeout_s=timeout_s, what=what)


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """Checked arguments that decide the result, besides data and normalisation."""

    n_samples: int
    chunk_size: int
    seed: int
    scale: float | list[float]
    vocab_size: int
    symbol_format: Literal["plain", "reference"]
    rate_weight: float
    order: Order
    base: str | None


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number


def _scale(value: Any) -> float | list[float]:
    """10, 10.0 and numpy's 10 are one scale, and must give one signature."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.full(1, np.nan)
    if array.ndim > 1 or array.size == 0 or not np.isfinite(array).all() or not (array > 0).all():
        raise UsageError(f"scale must be a number above 0, or one for each dimension, not {value!r}")
    return float(array) if array.ndim == 0 else [float(number) for number in array]


def _weight(value: Any) -> float:
    """0 and 0.0 are one weight, as in `_scale`."""
    number = value if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) else np.nan
    if not 0 <= number < np.inf:
        raise UsageError(f"rate_weight must be a number of at least 0, not {value!r}")
    return float(number)


def _check_base(name: str | None, local_files_only: bool) -> None:
    """Whether the base is a FAST tokenizer, where that can be found out."""
    if name is None:
        return
    try:
        try:
            FastTokenizer.from_pretrained(name, local_files_only=True)
        except HubError:
            if local_files_only:
                raise
            FastTokenizer.from_pretrained(name)
    except HubError as error:
        logger.warning("the base tokenizer %s cannot be read, so it is not checked: %s", name, error)
    except TokenizerError as error:
        raise TokenizerError(f"base_tokenizer_name {name!r} is no FAST tokenizer: {error}") from error


# --- data -------------------------------------------------------------------------------------------------------------


def _open(repo_id: str, root: str | Path | None, revision: str | None, local_files_only: bool) -> LeRobotReader:
    if root is not None and revision is not None:
        raise UsageError("revision has no effect with root, which never touches the network")
    try:
        location = locate_dataset(repo_id, root=root, revision=revision, local_files_only=local_files_only)
    except DatasetError as error:
        raise DatasetNotFoundError(str(error)) from error
    data = location.root / "data"
    if not any(data.rglob("*.parquet")):
        raise NoChunksError(f"{data} holds no parquet shards: fetch the dataset again")
    return LeRobotReader(repo_id, location.root, origin=location.origin, revision=location.revision)


@dataclass(frozen=True)
class _Actions:
    """The dataset as this fit sees it: columns, encoded dimensions, and which windows are taken.

    Attributes:
        keys: columns to read; the action first, then, for relative actions, the state.
        episodes: those to fit on, ascending.
        starts: episode index -> sorted first frames of its chunks.
        skipped: how many of the episodes are shorter than a chunk.
    """

    reader: LeRobotReader
    keys: tuple[str, ...]
    selection: ActionSelection
    names: tuple[str, ...] | None
    episodes: tuple[EpisodeRecord, ...]
    starts: Mapping[int, npt.NDArray[np.int64]]
    skipped: int

    @classmethod
    def of(
        cls,
        reader: LeRobotReader,
        action_key: str,
        state_key: str,
        normalizer: Normalizer | None,
        settings: _Settings,
        episodes: tuple[EpisodeRecord, ...],
    ) -> _Actions:
        """Choose, from the metadata alone."""
        feature = vector_feature(reader, action_key)
        size = feature.shape[0]
        selection = normalizer.selection if normalizer is not None else None
        if selection is None:
            selection = ActionSelection.create(size)
        if selection.action_size != size:
            raise UsageError(f"the normalizer is for actions of {selection.action_size} dimensions, not of {size}")
        if isinstance(settings.scale, list) and len(settings.scale) != selection.size:
            raise UsageError(f"scale has {len(settings.scale)} values for {selection.size} encoded dimensions")
        if selection.is_delta:
            vector_feature(reader, state_key)
        return cls(
            reader=reader,
            keys=(action_key, state_key) if selection.is_delta else (action_key,),
            selection=selection,
            names=selection.encoded_names(feature.names) if feature.names and len(feature.names) == size else None,
            episodes=episodes,
            starts=_sampled_starts(reader, episodes, settings),
            skipped=sum(episode.length < settings.chunk_size for episode in episodes),
        )

    @property
    def are_all(self) -> bool:
        """Whether no episode is left out."""
        return len(self.episodes) == len(self.reader.episodes)

    def statistics_blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        """Encoded values [T, D] of all frames of the episodes."""
        for episode in self.reader.iter_episodes(self.keys[:1], [record.index for record in self.episodes]):
            yield vector_values(episode, self.keys[0])[:, list(self.selection.dims)]

    def chunks(self, horizon: int) -> Iterator[npt.NDArray[np.float32]]:
        """The sampled raw chunks [n, H, D], episode by episode in ascending order."""
        for episode in self.reader.iter_episodes(self.keys, self.starts):
            states = vector_values(episode, self.keys[1]) if self.selection.is_delta else None
            actions = vector_values(episode, self.keys[0])
            yield self.selection.window_chunks(actions, states, self.starts[episode.index], horizon)


def _chosen(reader: LeRobotReader, asked: Sequence[int] | None) -> tuple[EpisodeRecord, ...]:
    """The records of the episodes asked for, ascending.

    Raises:
        UsageError: none, or one that the dataset does not have.
    """
    if asked is None:
        return tuple(reader.episodes)
    wanted = {_whole("episodes", index, 0) for index in asked}
    found = tuple(record for record in reader.episodes if record.index in wanted)
    if not wanted or len(found) < len(wanted):
        missing = sorted(wanted - {record.index for record in found})
        raise UsageError(f"episodes: {reader.root} has no episode {missing[0]}" if missing else "episodes is empty")
    return found


def _sampled_starts(
    reader: LeRobotReader, episodes: tuple[EpisodeRecord, ...], settings: _Settings
) -> dict[int, npt.NDArray[np.int64]]:
    """First frames of the chunks of each episode that is used.

    Raises:
        NoChunksError: no episode is as long as a chunk.
    """
    each = max(1, settings.n_samples // max(1, len(episodes)))
    starts: dict[int, npt.NDArray[np.int64]] = {}
    left = settings.n_samples
    for position in np.random.default_rng(settings.seed).permutation(len(episodes)).tolist():
        index, length = episodes[position].index, episodes[position].length
        count = window_count(length, settings.chunk_size)
        if count and left:
            # A generator for each episode: what is taken of it does not depend on the others.
            generator = np.random.default_rng([settings.seed, index])
            taken = generator.choice(count, min(each, count, left), replace=False)
            starts[index] = np.sort(taken).astype(np.int64)
            left -= len(taken)
    if not starts:
        longest = max((episode.length for episode in episodes), default=0)
        advice = f": take chunk_size={longest} or less" if longest else ""
        raise NoChunksError(
            f"no usable chunks in {reader.root}: all of its {len(episodes)} episodes are shorter than chunk_size "
            f"{settings.chunk_size} (the longest has {longest} frames){advice}"
        )
    return starts


def _normalization(
    data: _Actions,
    mode: str | None,
    statistics: Statistics | Mapping[str, Any] | None,
    normalizer: Normalizer | None,
) -> Normalizer | NormalizationMode:
    """The normaliser that the caller wants, or the mode in which one is to be fitted."""
    parsed = None if mode is None else NormalizationMode.parse(mode)
    if normalizer is not None and (statistics is not None or parsed not in (None, normalizer.mode)):
        raise UsageError("a normalizer has its own mode and statistics: leave out normalization_mode and statistics")
    chosen = parsed or NormalizationMode.QUANTILES
    if statistics is not None:
        normalizer = Normalizer.from_statistics(statistics, chosen, source="given statistics")
    if normalizer is None:
        return chosen
    if normalizer.size != data.selection.size:
        raise UsageError(
            f"the statistics are of {normalizer.size} dimensions, the encoded dimensions of {data.keys[0]!r} are "
            f"{format_dims(data.selection.dims)}"
        )
    if statistics is not None:
        normalizer = replace(normalizer, names=data.names, selection=data.selection)
    return normalizer


# --- signature and cache ----------------------------------------------------------------------------------------------


def _signature(data: _Actions, normalization: Normalizer | NormalizationMode, settings: _Settings) -> str:
    """16 hexadecimal digits: a hash of everything that decides the result.

    The base counts by its name. Its commit would make the signature depend on whether the hub can be reached just
    now, and processes with different signatures would wait for each other in vain; nothing else is taken from it.
    """
    reader = data.reader
    on_hub = reader.origin == "hub" and reader.revision is not None
    normal = normalization.to_json() if isinstance(normalization, Normalizer) else {"mode": normalization.value}
    content = {
        "fit_version": FIT_VERSION,
        "format_version": layout.FORMAT_VERSION,
        "dataset": reader.repo_id,
        "content": reader.revision if on_hub else reader.content_digest(data.keys),
        "keys": data.keys,
        "selection": data.selection.to_json(),
        "normalization": normal,
        **vars(settings),
    }
    if not data.are_all:
        content["episodes"] = [record.index for record in data.episodes]
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def _why_unfinished(path: Path, signature: str) -> str | None:
    """None when the whole tokenizer is there; else what is wrong. Whatever lacks anything is no result."""
    try:
        metadata = json.loads((path / METADATA).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return f"{METADATA} is missing"
    except ValueError as error:
        return f"{METADATA} cannot be read: {error}"
    if not isinstance(metadata, dict) or metadata.get("signature") != signature:
        return f"{METADATA} does not have this signature"
    missing = [name for name in (*layout.FILE_NAMES, NORMALIZER) if not (path / name).is_file()]
    if missing:
        return f"{', '.join(missing)} missing"
    try:
        FastTokenizer.from_pretrained(path)
    except TokenizerError as error:
        return str(error)
    return None


def _remove_leftovers(path: Path) -> None:
    """Temporary directories of processes that were killed while they wrote this tokenizer. The lock is held."""
    for leftover in path.parent.glob(f".{path.name}{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


# --- the fit ----------------------------------------------------------------------------------------------------------


def _fit(
    data: _Actions, normalization: Normalizer | NormalizationMode, settings: _Settings, signature: str, path: Path
) -> FastTokenizer:
    """Fit on the sampled chunks and save, all at once."""
    chosen = sum(map(len, data.starts.values()))
    logger.info("fitting %s on %d chunks of %s", path, chosen, data.reader.repo_id)
    if data.skipped:
        total = len(data.episodes)
        logger.warning("%d of %d episodes are shorter than chunk_size %d", data.skipped, total, settings.chunk_size)
    if isinstance(normalization, Normalizer):
        normalizer = normalization
    else:
        normalizer = Normalizer.fit(data.statistics_blocks, normalization, names=data.names, selection=data.selection)
    for line in normalizer.guard_report():
        logger.warning("%s", line)
    fitter = TokenizerFitter(settings.chunk_size, data.selection.size, scale=settings.scale, order=settings.order)
    for chunks in data.chunks(settings.chunk_size):
        fitter.add(normalizer.apply(chunks))
    tokenizer = fitter.finish(
        vocab_size=settings.vocab_size,
        symbol_format=settings.symbol_format,
        normalizer=normalizer,
        rate_weight=settings.rate_weight,
    )
    lengths, uses = fitter.token_usage(tokenizer)
    metadata = _metadata(data, normalizer, tokenizer, settings, signature, lengths)
    tokenizer.save_pretrained(path, metadata=metadata, token_uses=uses)
    logger.info("saved %s: %d tokens, %.1f a chunk", path, tokenizer.vocab_size, lengths.mean())
    return tokenizer


def _metadata(
    data: _Actions,
    normalizer: Normalizer,
    tokenizer: FastTokenizer,
    settings: _Settings,
    signature: str,
    lengths: npt.NDArray[np.int32],
) -> dict[str, Any]:
    """metadata.json: the keys of `pi0-fast train-tokenizer` that apply, and those of this fit."""
    selection = data.selection
    delta = list(selection.delta_dims) if selection.is_delta else None
    return {
        "repo_id": data.reader.repo_id,
        "vocab_size": tokenizer.vocab_size,
        "scale": tokenizer.scale,
        "encoded_dims": format_dims(selection.dims),
        "encoded_dim_ranges": dim_ranges(selection.dims),
        "total_encoded_dims": selection.size,
        "delta_dims": None if delta is None else ",".join(map(str, delta)),
        "delta_dim_list": delta,
        "use_delta_transform": selection.is_delta,
        "state_key": data.keys[1] if selection.is_delta else None,
        "normalization_mode": normalizer.mode.value,
        "action_horizon": settings.chunk_size,
        "num_training_chunks": len(lengths),
        "compression_stats": token_statistics(lengths, settings.chunk_size * selection.size),
        "signature": signature,
        "base_tokenizer_name": settings.base,
        "n_samples": settings.n_samples,
        "seed": settings.seed,
        "skipped_episodes": data.skipped,
        "episodes": "all" if data.are_all else [record.index for record in data.episodes],
        "dataset_revision": data.reader.revision,
    }
