"""FastTokenizer: normalised action chunks <-> token ids, fit, save and load.

The steps of the FAST paper (arXiv 2501.09747) joined: DCT and quantisation (dct.py), then the vocabulary
(vocabulary.py). What is not here: reading datasets, normalising (normalize.py; the normaliser travels with the
tokenizer as an attribute), reports, and the layout of prompts.

A chunk of H = 4 steps and D = 1 dimension that stays at 0.5 has the coefficients 10 0 0 0 at scale 10; once the pairs
(0, 0) and (10, 0 0) are merged that is two tokens, and decoding gives exactly 0.5 again.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import resolve_threads, run_rows
from pi0_fast.actions import layout
from pi0_fast.actions.bpe import MAX_VOCABULARY, scatter_rows
from pi0_fast.actions.bpe_training import Corpus, PackedRows
from pi0_fast.actions.chunks import as_numbers
from pi0_fast.actions.dct import (
    Order,
    checked_order,
    dct_matrix,
    dequantize_rows,
    from_frequency_order,
    quantize_rows,
    to_frequency_order,
)
from pi0_fast.actions.directory import (
    FILE_NAMES,
    SIGNATURE_FILES,
    Saved,
    read_directory,
    save_directory,
    wait_for_directory,
    write_files,
)
from pi0_fast.actions.inputs import (
    ID_RANGE,
    as_chunks,
    as_rows_of_ids,
    checked_hold,
    checked_max_error,
    checked_rate_weight,
    checked_scale,
    one_list_of_ids,
    scale_array,
)
from pi0_fast.actions.model_card import MODEL_CARD, is_hub_id, model_card
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.one_pass import REPORT, Decoder, Encoder
from pi0_fast.actions.rate_distortion import PathEncoder
from pi0_fast.actions.vocabulary import Decoded, SymbolFormat, Vocabulary
from pi0_fast.hub import PushTarget, check_push, download_snapshot, is_on_hub, push_files
from pi0_fast.types import TokenizerError, UsageError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
OnError = Literal["raise", "pad", "hold"]

#: Coefficients handed to a kernel at a time: half a megabyte, which stays in the processor's cache.
_VALUES_PER_PIECE = 1 << 17
#: Fewer rows are not worth a thread.
_LEAST_ROWS = 64
#: Normalised actions are about [-1, 1]; anything beyond this is no normalised action, whatever the tokenizer.
_LARGEST_ORDINARY_VALUE = 100.0
#: Sums of values up to here do not overflow float32.
_LARGEST_VALUE = 1e30


@dataclass(frozen=True)
class EncodeInfo:
    """What encoding did to each row; int32 [N] each.

    Attributes:
        saturations: coefficients clipped, because the vocabulary has no symbol for them.
        token_counts: ids.
        over_error: bool [N]; rows that no encoding keeps within `max_error`, and that got the ids of the plain one.
        clipped_values: values that the normaliser clipped; only `encode_actions` knows, else None.
    """

    saturations: IntArray
    token_counts: IntArray
    over_error: BoolArray
    clipped_values: IntArray | None = None


@dataclass(frozen=True)
class DecodeInfo:
    """Which rows were valid (bool [N]), and for each what was wrong (None for a valid one)."""

    valid: npt.NDArray[np.bool_] = field(repr=False)
    problems: tuple[str | None, ...] = field(repr=False)

    @property
    def invalid_count(self) -> int:
        """How many rows did not hold a chunk."""
        return int((~self.valid).sum())


class TokenizerFitter:
    """Takes in chunks block by block in bounded memory, then makes a tokenizer; `FastTokenizer.fit` in two halves."""

    def __init__(
        self,
        time_horizon: int,
        action_dim: int,
        *,
        scale: float | Sequence[float] = 10.0,
        order: Order = "frequency",
        max_runs: int | None = None,
    ) -> None:
        """For chunks [N, time_horizon, action_dim]; `order` as in `FastTokenizer.fit`.

        `max_runs` bounds memory, at some 14 bytes a run of equal coefficients: chunks beyond it are thinned out evenly,
        and counted in ``corpus.dropped``. None keeps all.

        Raises:
            TokenizerError: sizes below 1 or above 65,535 coefficients a chunk, a scale that is not positive.
            UsageError: no such order.
        """
        if time_horizon < 1 or action_dim < 1 or time_horizon * action_dim > MAX_VOCABULARY:
            raise TokenizerError(
                f"chunks of {time_horizon} steps and {action_dim} dimensions are not supported "
                f"(1 to {MAX_VOCABULARY} coefficients)"
            )
        self.shape = (time_horizon, action_dim)
        self.scale = checked_scale(scale, action_dim)
        self.order = checked_order(order)
        self.corpus = Corpus(time_horizon * action_dim, max_runs=max_runs)
        self._low = np.zeros(action_dim, np.int64)
        self._high = np.zeros(action_dim, np.int64)

    def add(self, chunks: Any, *, num_threads: int | None = None) -> None:
        """Take in normalised chunks [N, H, D] or one [H, D].

        Raises:
            TokenizerError: another shape, values that are not finite, coefficients beyond +-32,766. Rows are
                counted from the first that was ever added.
        """
        values = as_chunks(chunks, self.shape)
        scales = scale_array(self.scale, self.shape[1])
        limit, known = 32_766, self.corpus.rows
        pieces: dict[int, PackedRows] = {}
        ranges: dict[int, tuple[IntArray, IntArray]] = {}

        def work(begin: int, end: int) -> None:
            coefficients, saturations = _quantize(values[begin:end], scales, -limit, limit, 1e9, known + begin)
            if saturations.any():
                row = begin + int(np.flatnonzero(saturations)[0])
                dim = int((np.abs(dct_matrix(self.shape[0]) @ values[row]) * scales).max(axis=0).argmax())
                raise TokenizerError(
                    f"chunk {known + row}, dimension {dim}: coefficients exceed {limit}, so these are no normalised "
                    f"actions (the dimension goes from {values[row, :, dim].min():g} to {values[row, :, dim].max():g} "
                    "there); choose a normalization mode other than IDENTITY, or a smaller scale"
                )
            # First over the chunks, then over the steps: numpy is several times faster along long rows.
            low = coefficients.min(axis=0).reshape(self.shape).min(axis=0)
            high = coefficients.max(axis=0).reshape(self.shape).max(axis=0)
            ranges[begin] = low, high
            coefficients = from_frequency_order(coefficients, self.shape[0], self.order)
            pieces[begin] = self.corpus.pack(coefficients, (int(low.min()), int(high.max())))

        run_rows(work, len(values), num_threads=num_threads, piece=_piece(len(values), self.corpus.row_length, 1))
        for begin in sorted(pieces):  # in the order of the rows, whichever thread was first
            self._low = np.minimum(self._low, ranges[begin][0])
            self._high = np.maximum(self._high, ranges[begin][1])
            self.corpus.append(pieces[begin])

    def finish(
        self,
        *,
        vocab_size: int = 1024,
        symbol_format: SymbolFormat = "plain",
        headroom: float | None = None,
        normalizer: Normalizer | None = None,
        rate_weight: float = 0.0,
        max_error: float | Sequence[float] | None = None,
        num_threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> FastTokenizer:
        """Learn the vocabulary of what was added. Arguments and errors as in `FastTokenizer.fit`."""
        if self.corpus.rows == 0:
            raise TokenizerError("there are no chunks to fit on")
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, (int, np.integer)):
            raise TokenizerError(f"vocab_size must be a whole number, not {vocab_size!r}")
        if symbol_format not in ("plain", "reference"):
            raise UsageError(f"symbol_format must be 'plain' or 'reference', not {symbol_format!r}")
        span = int(self._high.max() - self._low.min()) + 1
        if span > vocab_size:
            widest = np.argsort(self._low - self._high)[:3]
            names = normalizer.names if normalizer is not None else None
            ranges = ", ".join(
                f"{d}{f' ({names[d]})' if names else ''}: {self._low[d]} to {self._high[d]}" for d in widest.tolist()
            )
            raise TokenizerError(
                f"the coefficients need {span} symbols, more than vocab_size {vocab_size}; the widest dimensions are "
                f"{ranges}. Normalise the actions (QUANTILES or MIN_MAX{_mode_hint(normalizer)}), take a smaller scale "
                f"than {self.scale}, or a vocab_size above {span} (some {2 * span} or more, to leave room for merges)"
            )
        vocabulary = Vocabulary.fit(
            self.corpus,
            vocab_size=vocab_size,
            symbol_format=symbol_format,
            headroom=headroom,
            num_threads=num_threads,
            progress=progress,
        )
        return FastTokenizer(
            vocabulary,
            scale=self.scale,
            time_horizon=self.shape[0],
            action_dim=self.shape[1],
            order=self.order,
            normalizer=normalizer,
            coefficient_range=(int(self._low.min()), int(self._high.max())),
            rate_weight=rate_weight,
            max_error=max_error,
        )

    def token_usage(self, tokenizer: FastTokenizer) -> tuple[IntArray, LongArray]:
        """What the fitted chunks become: tokens of each, int32 [N], and uses of each id, int64 [vocab_size].

        By plain encoding, whatever the tokenizer's `rate_weight`: only their rounded coefficients are kept.
        """
        lengths: list[IntArray] = []
        uses = np.zeros(tokenizer.vocab_size, np.int64)
        for block in self.corpus.blocks():
            ids, counts = tokenizer.vocabulary.encode(block)
            uses += np.bincount(ids, minlength=len(uses))
            lengths.append(counts)
        return np.concatenate(lengths), uses


class FastTokenizer:
    """The FAST action tokenizer.

    Attributes:
        vocabulary: what the ids mean.
        scale: multiplier of the coefficients, one number or one per dimension.
        time_horizon, action_dim: shape [H, D] of a chunk; None only in published tokenizers that take any.
        order: how the coefficients of a chunk follow each other; see `dct.Order`.
        normalizer: what the actions were normalised with, when known.
        coefficient_range: the smallest and largest coefficient of the fit, when known.
        rate_weight, max_error: how chunks are encoded where `encode` is not told otherwise.
        metadata: content of metadata.json (data, settings and measurements of the fit), when known.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        scale: float | Sequence[float] = 10.0,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        order: Order = "frequency",
        normalizer: Normalizer | None = None,
        coefficient_range: tuple[int, int] | None = None,
        rate_weight: float = 0.0,
        max_error: float | Sequence[float] | None = None,
    ) -> None:
        """Join a vocabulary with its settings; `fit` and `from_pretrained` are the usual ways.

        Raises:
            TokenizerError: settings that contradict each other.
            UsageError: no such order.
        """
        for name, value in (("time_horizon", time_horizon), ("action_dim", action_dim)):
            if value is not None and value < 1:
                raise TokenizerError(f"{name} must be at least 1, got {value}")
        _check_size(normalizer, action_dim)
        self.vocabulary = vocabulary
        self.scale = checked_scale(scale, action_dim)
        self.time_horizon = time_horizon
        self.action_dim = action_dim
        self.order = checked_order(order)
        self.normalizer = normalizer
        self.coefficient_range = coefficient_range
        self.rate_weight = checked_rate_weight(rate_weight)
        self.max_error = checked_max_error(max_error, action_dim)
        self._path_encoders: dict[tuple[int, int], PathEncoder] = {}
        self._scale_arrays: dict[int, FloatArray] = {}
        self._decoders: dict[tuple[int, int], Decoder] = {}
        self._encoders: dict[tuple[int, int], Encoder | None] = {}
        self.metadata: dict[str, Any] | None = None

    # --- fit --------------------------------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        chunks: Any,
        *,
        scale: float | Sequence[float] = 10.0,
        vocab_size: int = 1024,
        symbol_format: SymbolFormat = "plain",
        headroom: float | None = None,
        order: Order = "frequency",
        normalizer: Normalizer | None = None,
        rate_weight: float = 0.0,
        max_error: float | Sequence[float] | None = None,
        num_threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> FastTokenizer:
        """Learn a vocabulary from normalised action chunks.

        Args:
            chunks: [N, H, D], numpy or torch, any numeric dtype; actions normalised to about [-1, 1].
            scale: finer for larger values (and more tokens); one number or one per dimension.
            vocab_size: ids at most; fewer when no pair of symbols is left that occurs twice.
            symbol_format: "plain", or "reference" for the byte-level format of published tokenizers.
            headroom: how far beyond the largest coefficient seen the plain alphabet reaches, as a share of it; never
                more than a quarter of the free ids. The reference format has none.
            order: "frequency" puts the coefficients of frequency 0 of all dimensions first, as published tokenizers do;
                "dimension" all those of dimension 0. Fewer tokens on some data, and decoded as well; but LeRobot's
                own policy cannot, and its use of such a tokenizer is an error.
            normalizer: what made the chunks; kept and saved with the tokenizer.
            rate_weight, max_error: how the tokenizer encodes (see `encode`); the vocabulary does not depend on them.
            num_threads: None means all processors. The result does not depend on it.
            progress: called with 1 after each merge.

        Raises:
            TokenizerError: no chunks, another shape, values that are not finite, more symbols than `vocab_size` (the
                message names the dimensions, and what would fit).
            UsageError: no such order or symbol format.
        """
        array = as_numbers(chunks, "action chunks")
        if array.ndim != 3:
            raise TokenizerError(f"fit needs chunks of shape [N, H, D], got {list(array.shape)}")
        fitter = TokenizerFitter(array.shape[1], array.shape[2], scale=scale, order=order)
        for begin in range(0, len(array), 4096):
            fitter.add(array[begin : begin + 4096], num_threads=num_threads)
        return fitter.finish(
            vocab_size=vocab_size,
            symbol_format=symbol_format,
            headroom=headroom,
            normalizer=normalizer,
            rate_weight=rate_weight,
            max_error=max_error,
            num_threads=num_threads,
            progress=progress,
        )

    def bound(self, time_horizon: int, action_dim: int) -> FastTokenizer:
        """The same tokenizer for chunks [time_horizon, action_dim], whatever it was for.

        Raises:
            TokenizerError: its scales or its normaliser are for another number of dimensions.
        """
        found = copy.copy(self)
        found.time_horizon, found.action_dim = time_horizon, action_dim
        found.scale = checked_scale(self.scale, action_dim)
        found.max_error = checked_max_error(self.max_error, action_dim)
        _check_size(self.normalizer, action_dim)
        return found

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of ids; they are 0 .. vocab_size - 1."""
        return self.vocabulary.size

    @property
    def min_token(self) -> int:
        """The coefficient of code point 0."""
        return self.vocabulary.min_token

    @property
    def symbol_format(self) -> SymbolFormat:
        """ "plain" or "reference"."""
        return self.vocabulary.symbol_format

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides which ids a chunk gets and what they decode to."""
        return self._saved().fingerprint()

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return (
            f"FastTokenizer(vocab_size={self.vocab_size}, scale={self.scale}, time_horizon={self.time_horizon}, "
            f"action_dim={self.action_dim}, symbol_format={self.symbol_format!r}, order={self.order!r})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FastTokenizer) and self.fingerprint == other.fingerprint

    __hash__ = None  # type: ignore[assignment]

    # --- encode -----------------------------------------------------------------------------------------------------

    @overload
    def encode(
        self,
        chunks: Any,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: Literal[False] = False,
        num_threads: int | None = None,
    ) -> list[list[int]]: ...

    @overload
    def encode(
        self,
        chunks: Any,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: Literal[True],
        num_threads: int | None = None,
    ) -> tuple[list[list[int]], EncodeInfo]: ...

    def encode(
        self,
        chunks: Any,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: bool = False,
        num_threads: int | None = None,
    ) -> list[list[int]] | tuple[list[list[int]], EncodeInfo]:
        """Token ids of normalised chunks.

        Args:
            chunks: [N, H, D] or one chunk [H, D]; numpy or torch, any numeric dtype.
            rate_weight: how many squared (scaled) coefficients of error a token is worth: where that saves tokens,
                coefficients are not rounded to the nearest. 0 is plain encoding, as published; None: the tokenizer's
                own. Never makes a row longer.
            max_error: the largest error of any single action in the decoded chunk, in the units of `chunks`; one
                number, or one per dimension; None: the tokenizer's own; infinite: none. Rows that cannot be kept
                within it at this scale are encoded plainly, and marked in the info.
            return_info: also return an `EncodeInfo`.
            num_threads: None means all processors.

        Returns:
            N lists of ids (one list in a list for a single chunk), and the info if asked for. Coefficients that the
            vocabulary cannot express are clipped to the nearest that it can; they are counted in the info.

        Raises:
            TokenizerError: another shape than the tokenizer's, values that are not finite or no normalised actions.
        """
        values = as_chunks(chunks, (self.time_horizon, self.action_dim))
        encoder = self._encoder(values.shape[1], values.shape[2])
        rate, bounds = self._trade(rate_weight, max_error, values.shape[2])
        if encoder is not None and len(values) == 1 and not return_info and not rate:
            out, written = encoder.encode(values)
            if written >= 0:
                return [out[REPORT : REPORT + written].tolist()]
        flat, lengths, info = self._encode(values, encoder, rate, bounds, num_threads)
        ids = flat.tolist()
        ends = np.cumsum(lengths).tolist()
        rows = [ids[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []
        return (rows, info) if return_info else rows

    def __call__(self, chunks: Any) -> list[list[int]]:
        """`encode`, so that the object is used like a Hugging Face processor."""
        return self.encode(chunks)

    @overload
    def encode_padded(
        self,
        chunks: Any,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: Literal[False] = False,
        num_threads: int | None = None,
    ) -> tuple[IntArray, IntArray]: ...

    @overload
    def encode_padded(
        self,
        chunks: Any,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: Literal[True],
        num_threads: int | None = None,
    ) -> tuple[IntArray, IntArray, EncodeInfo]: ...

    def encode_padded(
        self,
        chunks: Any,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: bool = False,
        num_threads: int | None = None,
    ) -> tuple[IntArray, IntArray] | tuple[IntArray, IntArray, EncodeInfo]:
        """Token ids as arrays: ids int32 [N, T] with -1 after the end of each row, and lengths int32 [N].

        T is the longest row's length. Arguments and errors as in `encode`.
        """
        values = as_chunks(chunks, (self.time_horizon, self.action_dim))
        encoder = self._encoder(values.shape[1], values.shape[2])
        rate, bounds = self._trade(rate_weight, max_error, values.shape[2])
        flat, lengths, info = self._encode(values, encoder, rate, bounds, num_threads)
        ids = scatter_rows(flat, lengths, -1)
        return (ids, lengths, info) if return_info else (ids, lengths)

    def _encoder(self, horizon: int, action_dim: int) -> Encoder | None:
        """What encodes chunks of that shape in one pass; None for vocabularies that cannot be encoded so."""
        shape = (horizon, action_dim)
        if shape not in self._encoders:
            vocabulary, tables = self.vocabulary, self.vocabulary.search
            self._encoders[shape] = None
            if vocabulary.symbol_format == "plain" and tables is not None:
                self._encoders[shape] = Encoder.create(
                    tables,
                    horizon,
                    self._scales(action_dim),
                    low=vocabulary.low,
                    high=vocabulary.high,
                    value_limit=self._value_limit(horizon),
                    order=self.order,
                )
        return self._encoders[shape]

    def _path_encoder(self, horizon: int, action_dim: int) -> PathEncoder:
        """What encodes chunks of that shape by their rate and distortion."""
        shape = (horizon, action_dim)
        if shape not in self._path_encoders:
            scales = self._scales(action_dim)
            self._path_encoders[shape] = PathEncoder.create(self.vocabulary, horizon, scales, self.order)
        return self._path_encoders[shape]

    def _trade(self, rate_weight: float | None, max_error: Any, action_dim: int) -> tuple[float, DoubleArray | None]:
        """The rate weight and the bounds, float64 [D], that one call asks for."""
        rate = self.rate_weight if rate_weight is None else checked_rate_weight(rate_weight)
        bound = self.max_error if max_error is None else checked_max_error(max_error, action_dim)
        if bound is None:
            return rate, None
        bounds = np.asarray(bound, np.float64)
        return rate, None if np.isinf(bounds).all() else np.broadcast_to(bounds, (action_dim,))

    def _encode(
        self,
        values: FloatArray,
        encoder: Encoder | None,
        rate: float,
        bounds: DoubleArray | None,
        num_threads: int | None,
    ) -> tuple[IntArray, IntArray, EncodeInfo]:
        """All ids, row after row, and how many each row has."""
        pieces: dict[int, tuple[IntArray, IntArray, IntArray, BoolArray]] = {}
        if rate or bounds is not None:
            self._path_encoder(values.shape[1], values.shape[2])  # made once, not by every thread

        def work(begin: int, end: int) -> None:
            part = values[begin:end]
            if encoder is not None and not rate and bounds is None:
                out, written = encoder.encode(part)
                if written >= 0:
                    first = REPORT * len(part)
                    report = out[:first].reshape(-1, REPORT)
                    # Copied, so that the room of the others is free again.
                    ids, lengths, saturations = out[first : first + written], report[:, 0], report[:, 1]
                    pieces[begin] = ids.copy(), lengths.copy(), saturations.copy(), np.zeros(len(part), np.bool_)
                    return
            pieces[begin] = self._encode_in_steps(part, begin, rate, bounds)

        piece = _piece(len(values), values.shape[1] * values.shape[2], num_threads)
        run_rows(work, len(values), num_threads=num_threads, piece=piece)
        empty = (*(np.empty(0, np.int32),) * 3, np.empty(0, np.bool_))
        columns = zip(empty, *(pieces[begin] for begin in sorted(pieces)), strict=True)
        flat, lengths, saturations, over = (np.concatenate(column) for column in columns)
        return flat, lengths, EncodeInfo(saturations, lengths, over)

    def _encode_in_steps(
        self, values: FloatArray, first_row: int, rate: float = 0.0, bounds: DoubleArray | None = None
    ) -> tuple[IntArray, IntArray, IntArray, BoolArray]:
        """Ids, lengths, saturations and whether beyond the bounds of some rows, one step after the other.

        Any vocabulary, any settings, and all errors.
        """
        vocabulary, horizon, size = self.vocabulary, values.shape[1], values.shape[2]
        coefficients, saturations = _quantize(
            values, self._scales(size), vocabulary.low, vocabulary.high, self._value_limit(horizon), first_row
        )
        vocabulary.clip_holes(coefficients, saturations)
        coefficients = from_frequency_order(coefficients, horizon, self.order)
        if rate:
            ids, lengths, over = self._path_encoder(horizon, size).encode(values, coefficients, rate, bounds)
            return ids, lengths, saturations, over
        over = np.zeros(len(values), np.bool_)
        if bounds is not None:
            over |= self._path_encoder(horizon, size).beyond(values, coefficients, bounds).any(axis=1)
        return (*vocabulary.encode(coefficients), saturations, over)

    def _scales(self, action_dim: int) -> FloatArray:
        """The scale of each dimension, float32 [D]."""
        found = self._scale_arrays.get(action_dim)
        if found is None:
            found = self._scale_arrays[action_dim] = scale_array(self.scale, action_dim)
        return found

    def _value_limit(self, horizon: int) -> float:
        """Beyond which a value is taken for an action that nobody normalised, rather than clipped.

        No value of a chunk exceeds sqrt(H) times the largest coefficient / scale: four times that is no motion like
        those of the fit.
        """
        if self.coefficient_range is None:
            largest = 2.0 * abs(self.min_token)
        else:
            largest = 4.0 * math.sqrt(horizon) * max(-self.coefficient_range[0], self.coefficient_range[1])
        least_scale = min(self.scale) if isinstance(self.scale, list) else self.scale
        return min(max(_LARGEST_ORDINARY_VALUE, largest / least_scale), _LARGEST_VALUE)

    # --- decode -----------------------------------------------------------------------------------------------------

    @overload
    def decode(
        self,
        ids: Any,
        *,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        on_error: OnError = "raise",
        hold: Any = None,
        return_info: Literal[False] = False,
        num_threads: int | None = None,
    ) -> FloatArray: ...

    @overload
    def decode(
        self,
        ids: Any,
        *,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        on_error: OnError = "raise",
        hold: Any = None,
        return_info: Literal[True],
        num_threads: int | None = None,
    ) -> tuple[FloatArray, DecodeInfo]: ...

    def decode(
        self,
        ids: Any,
        *,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        on_error: OnError = "raise",
        hold: Any = None,
        return_info: bool = False,
        num_threads: int | None = None,
    ) -> FloatArray | tuple[FloatArray, DecodeInfo]:
        """Normalised chunks from token ids. Nothing of an earlier call is remembered.

        Args:
            ids: a list of id lists; one flat list of ids; an array [N, T] or [T]; or (ids [N, T], lengths [N]) as
                `encode_padded` gives them. numpy or torch.
            time_horizon, action_dim: H and D, for a tokenizer that is not bound to its own.
            on_error: what to do with a row that does not hold exactly H*D coefficients. "raise" (default); "pad":
                missing coefficients become 0 and surplus ones are dropped; "hold": every step of the row is `hold`.
            hold: normalised action [D], or one per row [N, D], that "hold" repeats: where the robot is now.
            return_info: also return a `DecodeInfo`, which says which rows were invalid, and why.
            num_threads: None means all processors.

        Returns:
            float32 [N, H, D], or [H, D] for one flat list; and the info if asked for.

        Raises:
            TokenizerError: invalid rows with "raise" (names the row and both counts), no or contradicting H and D, ids
                that are no whole numbers, a `hold` of another shape or with values that are not finite.
        """
        horizon = _resolve("time_horizon", self.time_horizon, time_horizon)
        size = _resolve("action_dim", self.action_dim, action_dim)
        if type(ids) is list and on_error == "raise" and hold is None and not return_info:
            chunk = self._decode_one(ids, horizon, size)
            if chunk is not None:
                return chunk
        if on_error not in ("raise", "pad", "hold"):
            raise UsageError(f"on_error must be 'raise', 'pad' or 'hold', not {on_error!r}")
        if (on_error == "hold") != (hold is not None):
            raise UsageError("on_error='hold' and hold=, the action to repeat, go together")
        flat, starts, ends, single = as_rows_of_ids(ids)
        rows, length = len(starts), horizon * size
        held = None if hold is None else checked_hold(hold, rows, size)
        values = np.empty((rows, horizon, size), np.float32)
        problems: dict[int, str] = {}
        scales, matrix = self._scales(size), dct_matrix(horizon)

        def work(begin: int, end: int) -> None:
            decoded = self.vocabulary.decode(flat, starts[begin:end], ends[begin:end], length)
            if not decoded.whole:
                for n in range(end - begin):
                    row = flat[starts[begin + n] : ends[begin + n]]
                    problem = _problem(decoded, n, row, length, self.vocab_size)
                    if problem is not None:
                        problems[begin + n] = problem
            coefficients = to_frequency_order(decoded.coefficients, horizon, self.order)
            dequantize_rows(coefficients, matrix, scales, values[begin:end])

        piece = _piece(rows, length, num_threads) if rows > _LEAST_ROWS else _LEAST_ROWS
        run_rows(work, rows, num_threads=num_threads, piece=piece)
        if problems:
            self._handle_invalid(values, problems, on_error, held)
        result = values[0] if single else values
        if not return_info:
            return result
        every = tuple(problems.get(n) for n in range(rows))
        return result, DecodeInfo(np.array([problem is None for problem in every], bool), every)

    def _decode_one(self, ids: list[Any], horizon: int, size: int) -> FloatArray | None:
        """The chunk of one flat list of ids; None for anything else, and for whatever is an error."""
        decoder = self._decoders.get((horizon, size))
        if decoder is None:
            if self.vocabulary.symbol_format != "plain":
                return None
            values, bounds = self.vocabulary.expansion_arrays
            decoder = self._decoders[horizon, size] = Decoder.create(
                values, bounds, horizon, self._scales(size), self.order
            )
        row = one_list_of_ids(ids)
        return None if row is None else decoder.decode(row)

    @staticmethod
    def _handle_invalid(
        values: FloatArray, problems: dict[int, str], on_error: OnError, held: FloatArray | None
    ) -> None:
        invalid = sorted(problems)
        if on_error == "raise":
            more = f" (and {len(invalid) - 1} more rows of {len(values)})" if len(invalid) > 1 else ""
            raise TokenizerError(
                f"row {invalid[0]}: {problems[invalid[0]]}{more}; on_error='pad' or 'hold' decodes such rows too"
            )
        if held is not None:
            values[invalid] = held[invalid][:, None, :]

    # --- in the robot's units ---------------------------------------------------------------------------------------

    @overload
    def encode_actions(
        self,
        actions: Any,
        states: Any = None,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: Literal[False] = False,
        num_threads: int | None = None,
    ) -> list[list[int]]: ...

    @overload
    def encode_actions(
        self,
        actions: Any,
        states: Any = None,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: Literal[True],
        num_threads: int | None = None,
    ) -> tuple[list[list[int]], EncodeInfo]: ...

    def encode_actions(
        self,
        actions: Any,
        states: Any = None,
        *,
        rate_weight: float | None = None,
        max_error: Any = None,
        return_info: bool = False,
        num_threads: int | None = None,
    ) -> list[list[int]] | tuple[list[list[int]], EncodeInfo]:
        """Token ids of actions as they are in the dataset: selects dimensions, subtracts states, normalises, encodes.

        Args:
            actions: [N, H, A] or one chunk [H, A], all A dimensions of the dataset's actions, in its units.
            states: [N, S] or [S], the state at each chunk's first step; needed where the tokenizer was fitted on
                relative actions, else not looked at.
            rate_weight: as in `encode`.
            max_error: as in `encode`, but in the units of `actions`; what the normaliser clips is not in it.
            return_info: also return an `EncodeInfo`; its ``clipped_values`` say what the normaliser cut off.
            num_threads: None means all processors.

        Returns:
            As `encode`.

        Raises:
            TokenizerError: no normaliser is known, states are missing, shapes that do not fit, values not finite.
        """
        normalizer = self._known_normalizer()
        if normalizer.selection is None:
            encoded = as_chunks(actions, (self.time_horizon, self.action_dim))
        else:
            encoded = normalizer.selection.from_absolute(actions, states)
        if max_error is not None:
            max_error = checked_max_error(max_error, normalizer.size)
            max_error = np.asarray(max_error) * 2.0 / (normalizer.high - normalizer.low)
        rows, info = self.encode(
            normalizer.apply(encoded),
            rate_weight=rate_weight,
            max_error=max_error,
            return_info=True,
            num_threads=num_threads,
        )
        if not return_info:
            return rows
        clipped = normalizer.clipped(encoded).reshape(len(rows), -1).sum(axis=1).astype(np.int32)
        return rows, replace(info, clipped_values=clipped)

    @overload
    def decode_actions(
        self,
        ids: Any,
        states: Any = None,
        *,
        on_error: OnError = "raise",
        hold: Any = None,
        return_info: Literal[False] = False,
        num_threads: int | None = None,
    ) -> FloatArray: ...

    @overload
    def decode_actions(
        self,
        ids: Any,
        states: Any = None,
        *,
        on_error: OnError = "raise",
        hold: Any = None,
        return_info: Literal[True],
        num_threads: int | None = None,
    ) -> tuple[FloatArray, DecodeInfo]: ...

    def decode_actions(
        self,
        ids: Any,
        states: Any = None,
        *,
        on_error: OnError = "raise",
        hold: Any = None,
        return_info: bool = False,
        num_threads: int | None = None,
    ) -> FloatArray | tuple[FloatArray, DecodeInfo]:
        """Actions in the dataset's units from token ids: the way back of `encode_actions`.

        Args:
            ids: as in `decode`.
            states: as in `encode_actions`.
            on_error: as in `decode`.
            hold: for "hold", the position [D] (or one per row [N, D]) that a row without a chunk repeats: where the
                robot is now, in its own units, never relative and never clipped.
            return_info, num_threads: as in `decode`.

        Returns:
            float32 [N, H, D], or [H, D] for one flat list: the encoded dimensions; and the info if asked for.

        Raises:
            TokenizerError: as in `decode`; also no normaliser is known, or states are missing.
        """
        normalizer = self._known_normalizer()
        if (on_error == "hold") != (hold is not None):
            raise UsageError("on_error='hold' and hold=, the position to repeat, go together")
        fallback: OnError = "pad" if on_error == "hold" else on_error
        chunks, info = self.decode(
            ids, action_dim=normalizer.size, on_error=fallback, return_info=True, num_threads=num_threads
        )
        actions = normalizer.invert(chunks)
        if normalizer.selection is not None:
            actions = normalizer.selection.to_absolute(actions, states)
        if hold is not None:
            held = checked_hold(hold, len(info.valid), normalizer.size)
            rows = actions.reshape(len(info.valid), *actions.shape[-2:])
            rows[~info.valid] = held[~info.valid][:, None, :]
            actions = rows.reshape(actions.shape)
        return (actions, info) if return_info else actions

    def _known_normalizer(self) -> Normalizer:
        if self.normalizer is None:
            raise TokenizerError(
                "this tokenizer came without a normaliser: normalise the actions to about [-1, 1] yourself and call "
                "encode and decode, or set tokenizer.normalizer"
            )
        return self.normalizer

    # --- save and load ----------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        metadata: Mapping[str, Any] | None = None,
        token_uses: Sequence[int] | LongArray | None = None,
    ) -> None:
        """Write the tokenizer's directory, which loads here, in AutoProcessor and in lerobot.

        The files appear all at once or not at all. Other files in an existing directory stay.

        Args:
            directory: made if missing.
            metadata: content of metadata.json; None: the tokenizer's own `metadata`. Where that is None too, an
                existing metadata.json is removed, as it describes another tokenizer; so is an earlier report.
            token_uses: how often each id occurs in the fitted chunks, for vocabulary.txt.

        Raises:
            TokenizerError: `token_uses` is not one count for each id, or JSON cannot hold the metadata.
            OSError: the files cannot be written, or cannot take this place (a mount point, the working directory);
                what was there before is unharmed.
        """
        saved = self._saved()
        if metadata is not None:
            saved = replace(saved, metadata=metadata)
        save_directory(_as_path(directory), saved, token_uses)

    def _saved(self) -> Saved:
        return Saved(
            self.vocabulary,
            self.scale,
            self.time_horizon,
            self.action_dim,
            self.normalizer,
            self.coefficient_range,
            self.metadata,
            self.order,
            self.rate_weight,
            self.max_error,
        )

    @staticmethod
    def check_push_to_hub(
        repo_id: str, *, private: bool = False, token: str | bool | None = None, revision: str | None = None
    ) -> PushTarget:
        """Find out before a fit whether `push_to_hub` would succeed after it; see `hub.check_push`. Changes nothing.

        Raises:
            HubError: it would not, or the hub cannot be asked.
        """
        return check_push(
            repo_id,
            own_files=FILE_NAMES,
            signature_files=SIGNATURE_FILES,
            private=private,
            token=token,
            revision=revision,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload FAST tokenizer",
        token_uses: Sequence[int] | LongArray | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes and a model card (README.md, replaced) to the Hugging Face hub.

        One commit; nothing but those files is uploaded, and files of the repository that are no tokenizer's stay.

        Args:
            repo_id: ``owner/name``, or ``name`` for the token's own user; created when missing.
            private: make a new repository private; an existing public one is refused then.
            token: None: the one of `hf auth login`, or HF_TOKEN.
            revision: branch to push to, made when missing; None: the main branch.
            commit_message: first line of the commit.
            token_uses: as in `save_pretrained`.

        Returns:
            The address of the commit.

        Raises:
            HubError: no token, one that may not write there, a repository of something else, or the hub failed.
        """
        target = self.check_push_to_hub(repo_id, private=private, token=token, revision=revision)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_files(folder, self._saved(), token_uses)
            dataset = (self.metadata or {}).get("repo_id")
            card = model_card(
                target.repo_id,
                self._saved().config(),
                self.metadata,
                None if self.normalizer is None else self.normalizer.to_json(),
                dataset_on_hub=is_hub_id(dataset) and is_on_hub(str(dataset), "dataset", token=token),
            )
            (folder / MODEL_CARD).write_text(card, encoding="utf-8")
            return push_files(
                folder,
                target,
                own_files=FILE_NAMES,
                signature_files=SIGNATURE_FILES,
                token=token,
                revision=revision,
                commit_message=commit_message,
            )

    @classmethod
    def from_pretrained(
        cls,
        directory_or_hub_id: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> FastTokenizer:
        """Load what `save_pretrained` wrote, or a published tokenizer (root or ``bpe_tokenizer/`` layout).

        No code of the directory is run. A local directory is never looked up on the hub.

        Raises:
            TokenizerError: missing, damaged or contradicting files (named).
            HubError: nothing of that name on the hub, access refused, or offline.
        """
        folder = _as_path(directory_or_hub_id)
        if not wait_for_directory(folder):
            text = str(directory_or_hub_id)
            local = isinstance(directory_or_hub_id, Path) or text.startswith((".", "/", "~")) or folder.exists()
            if local or text.count("/") != 1:
                raise TokenizerError(f"{folder} is no directory, and no hub id of the form owner/name")
            folder = download_snapshot(
                text,
                repo_type="model",
                allow_patterns=["*.json", f"{layout.BPE_FOLDER}/*.json"],
                searched=f"the directory {folder.absolute()}",
                local_advice="pass a local directory",
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        saved = read_directory(folder)
        try:
            tokenizer = cls(
                saved.vocabulary,
                scale=saved.scale,
                time_horizon=saved.time_horizon,
                action_dim=saved.action_dim,
                order=saved.order,
                rate_weight=saved.rate_weight,
                max_error=saved.max_error,
                normalizer=saved.normalizer,
                coefficient_range=saved.coefficient_range,
            )
        except TokenizerError as error:
            raise TokenizerError(f"{folder / layout.PROCESSOR_CONFIG}: {error}") from error
        tokenizer.metadata = None if saved.metadata is None else dict(saved.metadata)
        return tokenizer


def _as_path(directory: Any) -> Path:
    if not isinstance(directory, (str, os.PathLike)) or "\0" in os.fspath(directory):
        raise TokenizerError(f"the directory of a tokenizer must be a path, not {directory!r}")
    return Path(directory).expanduser()


def _check_size(normalizer: Normalizer | None, action_dim: int | None) -> None:
    if normalizer is not None and action_dim is not None and normalizer.size != action_dim:
        raise TokenizerError(
            f"the normaliser has {normalizer.size} dimensions, the tokenizer {action_dim}: they belong to "
            "different data"
        )


def _mode_hint(normalizer: Normalizer | None) -> str:
    return "" if normalizer is None else f"; they are normalised with {normalizer.mode}"


def _piece(rows: int, length: int, num_threads: int | None) -> int:
    """Rows that a thread takes at a time: what the cache holds, but two pieces for each thread where there are many."""
    fair = -(-rows // (2 * resolve_threads(num_threads)))
    return max(_LEAST_ROWS, min(_VALUES_PER_PIECE // length, fair))


def _quantize(
    values: FloatArray, scales: FloatArray, low: int, high: int, value_limit: float, first_row: int
) -> tuple[IntArray, IntArray]:
    """Chunks [N, H, D] -> clipped coefficients int32 [N, H*D] and saturations int32 [N]; one thread.

    Raises on values that are no actions, with `first_row` added to the row.
    """
    rows, horizon, size = values.shape
    coefficients = np.empty((rows, horizon * size), np.int32)
    saturations, bad = np.empty(rows, np.int32), np.empty(rows, np.int64)
    limit = np.float32(value_limit)
    if not quantize_rows(values, dct_matrix(horizon), scales, low, high, limit, coefficients, saturations, bad):
        row = int(np.flatnonzero(bad >= 0)[0])
        step, dim = divmod(int(bad[row]), size)
        value = float(values[row, step, dim])
        what = (
            f"is {value:g}: no normalised action (more than {value_limit:g}); normalise actions to about [-1, 1] first"
            if np.isfinite(value)
            else f"is {value}: repair or leave out that recording"
        )
        raise TokenizerError(f"the action in row {first_row + row}, step {step}, dimension {dim} {what}")
    return coefficients, saturations


def _resolve(name: str, own: int | None, asked: int | None) -> int:
    if own is None and asked is None:
        raise TokenizerError(f"this tokenizer is not bound to a {name}: pass decode(ids, {name}=...)")
    if own is not None and asked is not None and own != asked:
        raise TokenizerError(f"{name}={asked} contradicts the tokenizer, which was fitted with {name}={own}")
    found = asked if own is None else own
    assert found is not None
    if found < 1:
        raise TokenizerError(f"{name} must be at least 1, got {found}")
    return found


def _problem(decoded: Decoded, n: int, row: IntArray, length: int, vocab_size: int) -> str | None:
    """What is wrong with row n, None if nothing is."""
    if decoded.bad_id[n] >= 0:
        position = int(decoded.bad_id[n])
        value = int(row[position])
        shown = "an id beyond 32 bits" if value in (ID_RANGE.min, ID_RANGE.max) else f"id {value}"
        hint = " (padding? pass decode((ids, lengths)))" if value == -1 else ""
        return f"{shown} at position {position} is outside the vocabulary 0 to {vocab_size - 1}{hint}"
    if decoded.broken is not None and decoded.broken[n] >= 0:
        return f"the ids break off inside coefficient {decoded.broken[n]} of {length}"
    if decoded.counts[n] != length:
        return f"the {len(row)} ids hold {decoded.counts[n]} coefficients, a chunk needs {length}"
    return None
