"""FastTokenizer: normalised action chunks <-> token ids, fit, save and load.

The steps of the FAST paper (arXiv 2501.09747) joined: DCT and quantisation (dct.py), then the vocabulary
(vocabulary.py). What is not here: reading datasets, normalising (normalize.py; the normaliser travels with the
tokenizer as an attribute), reports, and the layout of prompts.

A chunk of H = 4 steps and D = 1 dimension that stays at 0.5 has the coefficients 10 0 0 0 at scale 10; once the pairs
(0, 0) and (10, 0 0) are merged that is two tokens, and decoding gives exactly 0.5 again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from array import array as typed_array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import run_rows
from pi0_fast.actions import layout
from pi0_fast.actions.bpe import MAX_VOCABULARY, scatter_rows
from pi0_fast.actions.bpe_training import Corpus, PackedRows
from pi0_fast.actions.chunks import as_numbers
from pi0_fast.actions.dct import dct_matrix, dequantize_rows, quantize_rows
from pi0_fast.actions.model_card import MODEL_CARD, is_hub_id, model_card
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.vocabulary import Decoded, SymbolFormat, Vocabulary
from pi0_fast.hub import PushTarget, check_push, dataset_exists, download_snapshot, push_files
from pi0_fast.swap import finish_interrupted_swap, install_directory, temporary_sibling
from pi0_fast.types import TokenizerError, UsageError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
OnError = Literal["raise", "pad", "hold"]
_ID_RANGE = np.iinfo(np.int32)

NORMALIZER = "normalizer.json"
METADATA = "metadata.json"
VOCABULARY_TEXT = "vocabulary.txt"
#: A report on the tokenizer may lie in this folder of its directory; this file shows that it is one.
REPORT_FOLDER, REPORT = "report", "report.json"
#: Every file that `save_pretrained` may write.
FILE_NAMES = (*layout.FILE_NAMES, NORMALIZER, METADATA, VOCABULARY_TEXT)
#: Files that only FAST tokenizers have: ours and published ones the first, those that transformers 5 saved the second.
_SIGNATURE_FILES = (layout.PROCESSING_SOURCE.name, f"{layout.BPE_FOLDER}/{layout.TOKENIZER}")

#: Rows handed to a kernel at a time: some hundred kilobytes of coefficients, which stay in the processor's cache.
_ROWS_PER_PIECE = 128
#: Normalised actions are about [-1, 1]; anything beyond this is no normalised action, whatever the tokenizer.
_LARGEST_ORDINARY_VALUE = 100.0
#: Sums of values up to here do not overflow float32.
_LARGEST_VALUE = 1e30


@dataclass(frozen=True)
class EncodeInfo:
    """What encoding did to each row: ``saturations`` int32 [N], coefficients clipped; ``token_counts`` int32 [N]."""

    saturations: IntArray
    token_counts: IntArray


@dataclass(frozen=True)
class DecodeInfo:
    """Which rows were valid (bool [N]), and for each what was wrong (None for a valid one)."""

    valid: npt.NDArray[np.bool_]
    problems: tuple[str | None, ...]

    @property
    def invalid_count(self) -> int:
        """How many rows did not hold a chunk."""
        return int((~self.valid).sum())


class TokenizerFitter:
    """Takes in chunks block by block in bounded memory, then makes a tokenizer; `FastTokenizer.fit` in two halves."""

    def __init__(self, time_horizon: int, action_dim: int, *, scale: float | Sequence[float] = 10.0) -> None:
        """For chunks [N, time_horizon, action_dim].

        Raises:
            TokenizerError: sizes below 1 or above 65,535 coefficients a chunk, a scale that is not positive.
        """
        if time_horizon < 1 or action_dim < 1 or time_horizon * action_dim > MAX_VOCABULARY:
            raise TokenizerError(
                f"chunks of {time_horizon} steps and {action_dim} dimensions are not supported "
                f"(1 to {MAX_VOCABULARY} coefficients)"
            )
        self.shape = (time_horizon, action_dim)
        self.scale = _checked_scale(scale, action_dim)
        self.corpus = Corpus(time_horizon * action_dim)
        self._low = np.zeros(action_dim, np.int64)
        self._high = np.zeros(action_dim, np.int64)

    def add(self, chunks: Any, *, num_threads: int | None = None) -> None:
        """Take in normalised chunks [N, H, D] or one [H, D].

        Raises:
            TokenizerError: another shape, values that are not finite, coefficients beyond +-32,766. Rows are
                counted from the first that was ever added.
        """
        values = _as_chunks(chunks, self.shape)
        scales = _scales(self.scale, self.shape[1])
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
            levels = coefficients.reshape(-1, self.shape[1])
            ranges[begin] = levels.min(axis=0), levels.max(axis=0)
            pieces[begin] = self.corpus.pack(coefficients)

        run_rows(work, len(values), num_threads=num_threads, piece=_ROWS_PER_PIECE)
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
            normalizer=normalizer,
            coefficient_range=(int(self._low.min()), int(self._high.max())),
        )

    def token_usage(self, tokenizer: FastTokenizer) -> tuple[IntArray, LongArray]:
        """What the fitted chunks become: tokens of each, int32 [N], and uses of each id, int64 [vocab_size]."""
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
        normalizer: what the actions were normalised with, when known.
        coefficient_range: the smallest and largest coefficient of the fit, when known.
        metadata: content of metadata.json (data, settings and measurements of the fit), when known.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        scale: float | Sequence[float] = 10.0,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        normalizer: Normalizer | None = None,
        coefficient_range: tuple[int, int] | None = None,
    ) -> None:
        """Join a vocabulary with its settings; `fit` and `from_pretrained` are the usual ways.

        Raises:
            TokenizerError: settings that contradict each other.
        """
        for name, value in (("time_horizon", time_horizon), ("action_dim", action_dim)):
            if value is not None and value < 1:
                raise TokenizerError(f"{name} must be at least 1, got {value}")
        if normalizer is not None and action_dim is not None and normalizer.size != action_dim:
            raise TokenizerError(
                f"the normaliser has {normalizer.size} dimensions, the tokenizer {action_dim}: they belong to "
                "different data"
            )
        self.vocabulary = vocabulary
        self.scale = _checked_scale(scale, action_dim)
        self.time_horizon = time_horizon
        self.action_dim = action_dim
        self.normalizer = normalizer
        self.coefficient_range = coefficient_range
        self._scale_arrays: dict[int, FloatArray] = {}
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
        normalizer: Normalizer | None = None,
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
            normalizer: what made the chunks; kept and saved with the tokenizer.
            num_threads: None means all processors. The result does not depend on it.
            progress: called with 1 after each merge.

        Raises:
            TokenizerError: no chunks, another shape, values that are not finite, more symbols than `vocab_size` (the
                message names the dimensions, and what would fit).
        """
        array = as_numbers(chunks, "action chunks")
        if array.ndim != 3:
            raise TokenizerError(f"fit needs chunks of shape [N, H, D], got {list(array.shape)}")
        fitter = TokenizerFitter(array.shape[1], array.shape[2], scale=scale)
        for begin in range(0, len(array), 4096):
            fitter.add(array[begin : begin + 4096], num_threads=num_threads)
        return fitter.finish(
            vocab_size=vocab_size,
            symbol_format=symbol_format,
            headroom=headroom,
            normalizer=normalizer,
            num_threads=num_threads,
            progress=progress,
        )

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
        content = {"config": self._config(), "tokenizer": self.vocabulary.to_json()}
        if self.normalizer is not None:
            content["normalizer"] = self.normalizer.to_json()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return (
            f"FastTokenizer(vocab_size={self.vocab_size}, scale={self.scale}, time_horizon={self.time_horizon}, "
            f"action_dim={self.action_dim}, symbol_format={self.symbol_format!r})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FastTokenizer) and self.fingerprint == other.fingerprint

    __hash__ = None  # type: ignore[assignment]

    # --- encode -----------------------------------------------------------------------------------------------------

    @overload
    def encode(
        self, chunks: Any, *, return_info: Literal[False] = False, num_threads: int | None = None
    ) -> list[list[int]]: ...

    @overload
    def encode(
        self, chunks: Any, *, return_info: Literal[True], num_threads: int | None = None
    ) -> tuple[list[list[int]], EncodeInfo]: ...

    def encode(
        self, chunks: Any, *, return_info: bool = False, num_threads: int | None = None
    ) -> list[list[int]] | tuple[list[list[int]], EncodeInfo]:
        """Token ids of normalised chunks.

        Args:
            chunks: [N, H, D] or one chunk [H, D]; numpy or torch, any numeric dtype.
            return_info: also return an `EncodeInfo`.
            num_threads: None means all processors.

        Returns:
            N lists of ids (one list in a list for a single chunk), and the info if asked for. Coefficients that the
            vocabulary cannot express are clipped to the nearest that it can; they are counted in the info.

        Raises:
            TokenizerError: another shape than the tokenizer's, values that are not finite or no normalised actions.
        """
        flat, lengths, info = self._encode(chunks, num_threads)
        values = flat.tolist()
        if len(lengths) == 1:
            return ([values], info) if return_info else [values]
        ends = np.cumsum(lengths).tolist()
        rows = [values[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []
        return (rows, info) if return_info else rows

    def __call__(self, chunks: Any) -> list[list[int]]:
        """`encode`, so that the object is used like a Hugging Face processor."""
        return self.encode(chunks)

    def encode_padded(self, chunks: Any, *, num_threads: int | None = None) -> tuple[IntArray, IntArray]:
        """Token ids as arrays: ids int32 [N, T] with -1 after the end of each row, and lengths int32 [N].

        T is the longest row's length. Arguments and errors as in `encode`.
        """
        flat, lengths, _ = self._encode(chunks, num_threads)
        return scatter_rows(flat, lengths, -1), lengths

    def _encode(self, chunks: Any, num_threads: int | None) -> tuple[IntArray, IntArray, EncodeInfo]:
        values = _as_chunks(chunks, (self.time_horizon, self.action_dim))
        scales = self._scales(values.shape[2])
        low, high = self.vocabulary.low, self.vocabulary.high
        limit = self._value_limit(values.shape[1])

        def encode(begin: int, end: int) -> tuple[IntArray, IntArray, IntArray]:
            coefficients, saturations = _quantize(values[begin:end], scales, low, high, limit, begin)
            self.vocabulary.clip_holes(coefficients, saturations)
            return (*self.vocabulary.encode(coefficients), saturations)

        if num_threads is None and 0 < len(values) <= _ROWS_PER_PIECE:
            flat, lengths, saturations = encode(0, len(values))
        else:
            pieces: dict[int, tuple[IntArray, IntArray, IntArray]] = {}

            def work(begin: int, end: int) -> None:
                pieces[begin] = encode(begin, end)

            run_rows(work, len(values), num_threads=num_threads, piece=_ROWS_PER_PIECE)
            empty = (np.empty(0, np.int32),) * 3
            columns = zip(empty, *(pieces[begin] for begin in sorted(pieces)), strict=True)
            flat, lengths, saturations = (np.concatenate(column) for column in columns)
        return flat, lengths, EncodeInfo(saturations, lengths)

    def _scales(self, action_dim: int) -> FloatArray:
        """The scale of each dimension, float32 [D]."""
        found = self._scale_arrays.get(action_dim)
        if found is None:
            found = self._scale_arrays[action_dim] = _scales(self.scale, action_dim)
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
        if on_error not in ("raise", "pad", "hold"):
            raise UsageError(f"on_error must be 'raise', 'pad' or 'hold', not {on_error!r}")
        if (on_error == "hold") != (hold is not None):
            raise UsageError("on_error='hold' and hold=, the action to repeat, go together")
        flat, starts, ends, single = _as_rows_of_ids(ids)
        rows, length = len(starts), horizon * size
        held = None if hold is None else _checked_hold(hold, rows, size)
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
            dequantize_rows(decoded.coefficients, matrix, scales, values[begin:end])

        run_rows(work, rows, num_threads=num_threads, piece=_ROWS_PER_PIECE)
        if problems:
            self._handle_invalid(values, problems, on_error, held)
        result = values[0] if single else values
        if not return_info:
            return result
        every = tuple(problems.get(n) for n in range(rows))
        return result, DecodeInfo(np.array([problem is None for problem in every], bool), every)

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

    # --- save and load ----------------------------------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        config = layout.config(
            symbol_format=self.symbol_format,
            scale=self.scale,
            vocab_size=self.vocab_size,
            min_token=self.min_token,
            time_horizon=self.time_horizon,
            action_dim=self.action_dim,
        )
        config["coefficient_range"] = None if self.coefficient_range is None else list(self.coefficient_range)
        return config

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
            TokenizerError: `token_uses` is not one number for each id.
            OSError: the files cannot be written; what was there before is unharmed.
        """
        target = Path(directory).expanduser()
        if token_uses is not None and len(token_uses) != self.vocab_size:
            raise TokenizerError(f"token_uses has {len(token_uses)} numbers for {self.vocab_size} ids")
        if (target.is_symlink() or target.exists()) and not target.is_dir():
            raise NotADirectoryError(f"{target} exists and is no directory")
        finish_interrupted_swap(target)
        temporary = temporary_sibling(target)
        try:
            _keep_other_files(target, temporary)
            self._write_files(temporary, self.metadata if metadata is None else metadata, token_uses)
            install_directory(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _write_files(
        self, folder: Path, metadata: Mapping[str, Any] | None, token_uses: Sequence[int] | LongArray | None
    ) -> None:
        bpe = folder / layout.BPE_FOLDER
        bpe.mkdir(exist_ok=True)
        processor = layout.processor_config(
            self.scale, self.vocab_size, self.min_token, self.time_horizon, self.action_dim
        )
        _write_json(folder / layout.PROCESSOR_CONFIG, processor)
        _write_json(folder / layout.CONFIG, self._config())
        _write_json(folder / layout.PREPROCESSOR_CONFIG, layout.preprocessor_config())
        for place in (folder, bpe):
            _write_json(place / layout.TOKENIZER, self.vocabulary.to_json(), sort_keys=False)
            _write_json(place / layout.TOKENIZER_CONFIG, layout.tokenizer_config())
        shutil.copyfile(layout.PROCESSING_SOURCE, folder / layout.PROCESSING_SOURCE.name)
        if self.normalizer is not None:
            _write_json(folder / NORMALIZER, self.normalizer.to_json())
        if metadata is not None:
            _write_json(folder / METADATA, metadata, sort_keys=False)
        (folder / VOCABULARY_TEXT).write_text(self._vocabulary_text(token_uses), encoding="utf-8")

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
            signature_files=_SIGNATURE_FILES,
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
            self._write_files(folder, self.metadata, token_uses)
            dataset = (self.metadata or {}).get("repo_id")
            card = model_card(
                target.repo_id,
                self._config(),
                self.metadata,
                None if self.normalizer is None else self.normalizer.to_json(),
                dataset_on_hub=is_hub_id(dataset) and dataset_exists(str(dataset), token=token),
            )
            (folder / MODEL_CARD).write_text(card, encoding="utf-8")
            return push_files(
                folder,
                target,
                own_files=FILE_NAMES,
                signature_files=_SIGNATURE_FILES,
                token=token,
                revision=revision,
                commit_message=commit_message,
            )

    def _vocabulary_text(self, token_uses: Sequence[int] | LongArray | None) -> str:
        """One line for each id: its number, how often it is used, what it stands for."""
        unit = "coefficients" if self.symbol_format == "plain" else "bytes (UTF-8 of coefficient - min_token)"
        lines = [f"# id\tcount\t{unit}"]
        for i, expansion in enumerate(self.vocabulary.expansions):
            count = "?" if token_uses is None else str(int(token_uses[i]))
            lines.append(f"{i}\t{count}\t{runs_text(expansion)}")
        return "\n".join(lines) + "\n"

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
        folder = Path(directory_or_hub_id).expanduser()
        finish_interrupted_swap(folder)
        if not folder.is_dir():
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
        return cls._from_directory(folder)

    @classmethod
    def _from_directory(cls, folder: Path) -> FastTokenizer:
        place = folder / layout.PROCESSOR_CONFIG
        settings = _read_json(place)
        if "min_token" not in settings or "scale" not in settings:
            raise TokenizerError(f"{place} lacks min_token or scale: no FAST tokenizer")
        order = settings.get("order", "frequency")
        if order != "frequency":
            raise TokenizerError(f"{place}: flatten order {order!r} is not known; update pi0-fast")
        min_token = _whole(settings["min_token"], "min_token", place)
        vocabulary = _read_vocabulary(folder, min_token)
        vocab_size = _whole(settings.get("vocab_size", vocabulary.size), "vocab_size", place)
        if vocab_size < vocabulary.size:
            raise TokenizerError(f"{place} says vocab_size {vocab_size}, but the vocabulary has {vocabulary.size} ids")
        own = _own_config(folder, settings, vocabulary)
        seen = own.get("coefficient_range")
        if seen is not None and not (isinstance(seen, list) and len(seen) == 2):
            raise TokenizerError(f"{folder / layout.CONFIG}: coefficient_range must be two numbers, not {seen!r}")
        shape = {
            name: None if settings.get(name) is None else _whole(settings[name], name, place)
            for name in ("time_horizon", "action_dim")
        }
        normalizer = _read_normalizer(folder / NORMALIZER)
        try:
            tokenizer = cls(
                vocabulary,
                scale=settings["scale"],
                **shape,
                normalizer=normalizer,
                coefficient_range=None
                if seen is None
                else (
                    _whole(seen[0], "coefficient_range", folder / layout.CONFIG),
                    _whole(seen[1], "coefficient_range", folder / layout.CONFIG),
                ),
            )
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
        tokenizer.metadata = _read_json(folder / METADATA) if (folder / METADATA).is_file() else None
        return tokenizer


# --- input and output -------------------------------------------------------------------------------------------------


def _mode_hint(normalizer: Normalizer | None) -> str:
    return "" if normalizer is None else f"; they are normalised with {normalizer.mode}"


def _checked_scale(scale: float | Sequence[float], action_dim: int | None) -> float | list[float]:
    array = as_numbers(scale, "scale").astype(np.float64)
    # The range is float32's own, in which coefficients are computed.
    if array.ndim > 1 or array.size == 0 or not ((array >= 1e-30) & (array <= 1e30)).all():
        raise TokenizerError(f"scale must be a positive number, or one per dimension; got {scale!r}")
    if array.ndim == 1 and action_dim is not None and len(array) != action_dim:
        raise TokenizerError(f"scale has {len(array)} values for {action_dim} dimensions")
    return float(array) if array.ndim == 0 else [float(value) for value in array]


def _scales(scale: float | list[float], action_dim: int) -> FloatArray:
    scales = np.asarray(scale, np.float32)
    if scales.ndim == 1 and len(scales) != action_dim:
        raise TokenizerError(f"scale has {len(scales)} values, chunks have {action_dim} dimensions")
    return np.ascontiguousarray(np.broadcast_to(scales, (action_dim,)))


def _as_chunks(chunks: Any, shape: tuple[int | None, int | None]) -> FloatArray:
    """Any numeric layout as C-contiguous float32 [N, H, D]; one chunk [H, D] becomes N = 1."""
    array = as_numbers(chunks, "action chunks")
    horizon, size = shape
    if array.ndim == 1 and array.size == 0:
        array = array.reshape(0, horizon or 1, size or 1)  # an empty list holds no chunks, whatever their shape
    if array.ndim == 2:
        array = array[None]
    if (
        array.ndim != 3
        or (horizon or array.shape[1], size or array.shape[2]) != array.shape[1:]
        or 0 in array.shape[1:]
    ):
        wanted = f"[N, {horizon or 'H'}, {size or 'D'}] or one chunk [{horizon or 'H'}, {size or 'D'}]"
        if array.ndim != 3:
            raise TokenizerError(f"action chunks have shape {list(array.shape)}; needed is {wanted}")
        raise TokenizerError(
            f"action chunks have {array.shape[1]} steps and {array.shape[2]} dimensions; needed is {wanted}"
        )
    if array.shape[1] * array.shape[2] > MAX_VOCABULARY:
        raise TokenizerError(f"chunks of {list(array.shape[1:])} exceed {MAX_VOCABULARY} coefficients")
    if array.dtype == np.float32:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite, and is refused below
        return np.ascontiguousarray(array, dtype=np.float32)


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


def _as_rows_of_ids(ids: Any) -> tuple[IntArray, LongArray, LongArray, bool]:
    """Every accepted form as (int32 ids, row n from starts[n] to ends[n], whether it was one flat row)."""
    if isinstance(ids, tuple) and len(ids) == 2 and getattr(ids[0], "ndim", 0) == 2:
        array = _whole_ids(as_numbers(ids[0], "ids"))
        lengths = _whole_ids(as_numbers(ids[1], "lengths")).astype(np.int64)
        if lengths.shape != (len(array),) or (lengths < 0).any() or (lengths > array.shape[1]).any():
            raise TokenizerError(f"lengths of shape {list(lengths.shape)} do not fit ids of shape {list(array.shape)}")
        starts = np.arange(len(array), dtype=np.int64) * array.shape[1]
        return array.reshape(-1), starts, starts + lengths, False
    if hasattr(ids, "ndim"):
        array = _whole_ids(as_numbers(ids, "ids"))
        if array.ndim == 1:
            return array, np.array([0]), np.array([len(array)]), True
        if array.ndim != 2:
            raise TokenizerError(f"ids have shape {list(array.shape)}; needed is [N, T] or [T]")
        starts = np.arange(len(array), dtype=np.int64) * array.shape[1]
        return array.reshape(-1), starts, starts + array.shape[1], False
    try:
        rows = list(ids)
        single = bool(rows) and (type(rows[0]) is int or np.ndim(rows[0]) == 0)
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"ids must be a list of lists of ids, or one flat list ({error})") from error
    flat, counts = _joined([rows] if single else rows)
    if single:
        return flat, np.zeros(1, np.int64), counts, True
    ends = np.cumsum(counts, dtype=np.int64)
    return flat, ends - counts, ends, False


def _joined(rows: list[Any]) -> tuple[IntArray, LongArray]:
    """A list of rows of ids as one int32 array, and how many each row has."""
    if all(type(row) is list for row in rows):
        joined = typed_array("i")  # takes whole numbers only, several times faster than numpy
        try:
            for row in rows:
                joined.fromlist(row)
        except (TypeError, OverflowError):
            pass  # what is wrong, or merely large, is found with its row below
        else:
            return np.frombuffer(joined, np.int32), np.fromiter(map(len, rows), np.int64, len(rows))
    parts = [_whole_ids(as_numbers(row, f"ids of row {n}")) for n, row in enumerate(rows)]
    if any(part.ndim != 1 for part in parts):
        raise TokenizerError("ids must be a list of lists of ids, or one flat list")
    flat = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return flat, np.array([len(part) for part in parts], np.int64)


def _whole_ids(ids: npt.NDArray[Any]) -> IntArray:
    if ids.dtype == np.int32:
        return np.ascontiguousarray(ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise TokenizerError(f"ids must be whole numbers, got an array of dtype {ids.dtype}")
    # Ids beyond 32 bits stay outside every vocabulary, and are reported as such.
    clipped: IntArray = np.clip(ids.astype(np.int64), _ID_RANGE.min, _ID_RANGE.max).astype(np.int32)
    return clipped


def _problem(decoded: Decoded, n: int, row: IntArray, length: int, vocab_size: int) -> str | None:
    """What is wrong with row n, None if nothing is."""
    if decoded.bad_id[n] >= 0:
        position = int(decoded.bad_id[n])
        value = int(row[position])
        shown = "an id beyond 32 bits" if value in (_ID_RANGE.min, _ID_RANGE.max) else f"id {value}"
        hint = " (padding? pass decode((ids, lengths)))" if value == -1 else ""
        return f"{shown} at position {position} is outside the vocabulary 0 to {vocab_size - 1}{hint}"
    if decoded.broken is not None and decoded.broken[n] >= 0:
        return f"the ids break off inside coefficient {decoded.broken[n]} of {length}"
    if decoded.counts[n] != length:
        return f"the {len(row)} ids hold {decoded.counts[n]} coefficients, a chunk needs {length}"
    return None


def _checked_hold(hold: Any, rows: int, size: int) -> FloatArray:
    """The action that each row holds if it is invalid, float32 [rows, D]."""
    actions = as_numbers(hold, "hold").astype(np.float32)
    if actions.shape not in ((size,), (rows, size)):
        raise TokenizerError(f"hold has shape {list(actions.shape)}; needed is [{size}] or [{rows}, {size}]")
    if not np.isfinite(actions).all():
        raise TokenizerError("hold has values that are not finite: no robot can hold them")
    return np.broadcast_to(actions, (rows, size))


def runs_text(expansion: Iterable[int]) -> str:
    """``3 0*12 -1`` for 3, twelve zeros, -1."""
    runs: list[list[int]] = []
    for value in expansion:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return " ".join(str(value) if times == 1 else f"{value}*{times}" for value, times in runs)


def _write_json(path: Path, content: Mapping[str, Any], *, sort_keys: bool = True) -> None:
    text = json.dumps(content, indent=2, sort_keys=sort_keys, ensure_ascii=True, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TokenizerError(f"{path} is missing: {path.parent} holds no FAST tokenizer") from None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return content


def _read_vocabulary(folder: Path, min_token: int) -> Vocabulary:
    """From the root or the subfolder; where it stands in both, the two must agree."""
    places = [folder / layout.TOKENIZER, folder / layout.BPE_FOLDER / layout.TOKENIZER]
    found = [place for place in places if place.is_file()]
    if not found:
        raise TokenizerError(f"{folder} holds neither {layout.TOKENIZER} nor {layout.BPE_FOLDER}/{layout.TOKENIZER}")
    contents = [_read_json(place) for place in found]
    first = Vocabulary.from_json(contents[0], min_token=min_token, where=str(found[0]))
    for content, place in zip(contents[1:], found[1:], strict=True):
        if content == contents[0]:
            continue
        if Vocabulary.from_json(content, min_token=min_token, where=str(place)) != first:
            raise TokenizerError(f"{found[0]} and {place} hold different vocabularies: delete the wrong one")
    return first


def _own_config(folder: Path, settings: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json as pi0-fast writes it, checked against the other files; empty where it is not ours."""
    place = folder / layout.CONFIG
    own = _read_json(place) if place.exists() else {}
    if "format_version" not in own:
        return {}
    if own["format_version"] != layout.FORMAT_VERSION:
        raise TokenizerError(
            f"{place} has format_version {own['format_version']!r}, this pi0-fast reads {layout.FORMAT_VERSION}: "
            "install the pi0-fast that wrote it, or a newer one"
        )
    for name, value in {**settings, "symbol_format": vocabulary.symbol_format}.items():
        if name in own and own[name] != value:
            other = layout.TOKENIZER if name == "symbol_format" else layout.PROCESSOR_CONFIG
            raise TokenizerError(f"{place} says {name} {own[name]!r}, but {other} says {value!r}")
    return own


def _read_normalizer(place: Path) -> Normalizer | None:
    if not place.exists():
        return None
    try:
        return Normalizer.from_json(_read_json(place))
    except TokenizerError as error:
        raise TokenizerError(f"{place}: {error}") from error


def _whole(value: Any, name: str, place: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TokenizerError(f"{place}: {name} must be a whole number, not {value!r}")
    return value


def _keep_other_files(target: Path, temporary: Path) -> None:
    """Bring along what an existing directory holds besides a tokenizer; as hard links, so that nothing is copied."""
    if not target.is_dir():
        return
    ours = {*layout.FILE_NAMES, NORMALIZER, METADATA, VOCABULARY_TEXT}
    folders = [target, target / layout.BPE_FOLDER]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry not in folders]
    for entry in entries:
        name = entry.relative_to(target).as_posix()
        if name in ours or (name == REPORT_FOLDER and (entry / REPORT).is_file()):
            continue
        (temporary / name).parent.mkdir(exist_ok=True)
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, temporary / name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(entry), str(temporary / name))


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, destination, follow_symlinks=False)
