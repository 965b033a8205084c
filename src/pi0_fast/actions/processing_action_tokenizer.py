"""A FAST action tokenizer as a transformers processor, in one self-contained file.

This file is copied into saved tokenizer directories, so that

    AutoProcessor.from_pretrained(directory, trust_remote_code=True)

gives the tokenizer wherever numpy, scipy and transformers (4.57 or newer) are installed. Encoding: orthonormal
DCT-II along time, times `scale`, rounded half to even, clipped to the coefficients that have a symbol, flattened
with all dimensions of frequency 0 first (or, as `order` says, all frequencies of dimension 0), each coefficient c
written as the character with code point c - min_token, and the string split into tokens by byte-pair encoding (FAST,
arXiv 2501.09747). Decoding is the inverse, and refuses ids that do not give exactly one coefficient per step and
dimension.

What is not here: fitting, normalisation, and reports of what was clipped; see the package pi0-fast.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from scipy.fft import idct
from transformers.processing_utils import ProcessorMixin

#: Coefficients are written with code points below this one; surrogates are no characters.
_FIRST_SURROGATE = 0xD800
#: Normalised actions are about [-1, 1]; anything beyond this is no normalised action, whatever the tokenizer.
_LARGEST_ORDINARY_VALUE = 100.0
_TOKENIZER_CONFIG = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's map).

    Printable bytes of Latin-1 stand for themselves; the others take code points from 256 on, in order.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


def _encodable_code_points(tokenizer: dict[str, Any]) -> np.ndarray:
    """The code points that a tokenizer (as in tokenizer.json) can write as ids, ascending, int64 [A]."""
    pre_tokenizer, vocabulary = tokenizer["pre_tokenizer"], tokenizer["model"]["vocab"]
    if pre_tokenizer is None:
        points = sorted(ord(token) for token in vocabulary if len(token) == 1)
        if points != list(range(len(points))):
            raise ValueError("tokenizer.json: the one-character tokens are not the code points 0, 1, 2, ...")
    elif pre_tokenizer["type"] == "ByteLevel":
        known = {byte for byte, character in enumerate(_byte_characters()) if character in vocabulary}
        points = [point for point in range(_FIRST_SURROGATE) if known.issuperset(chr(point).encode("utf-8"))]
    else:
        raise ValueError(f"tokenizer.json: no action tokenizer has the pre_tokenizer {pre_tokenizer['type']}")
    if not points:
        raise ValueError("tokenizer.json: no one-character tokens to write coefficients with")
    return np.array(points, np.int64)


def _as_float32(chunks: Any) -> np.ndarray:
    """Chunks from numpy, torch or nested lists, as float32 [N, H, D] (one [H, D] chunk becomes N = 1)."""
    if hasattr(chunks, "detach"):
        chunks = chunks.detach().cpu().float().numpy()
    array = np.asarray(chunks)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"action chunks must be numbers, not {array.dtype}")
    if array.ndim not in (2, 3) or 0 in array.shape[-2:]:
        raise ValueError(f"action chunks have shape {list(array.shape)}; needed is [N, H, D] or one chunk [H, D]")
    array = array[None] if array.ndim == 2 else array
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is reported
        return array.astype(np.float32)


def _transform(values: np.ndarray) -> np.ndarray:
    """Orthonormal DCT-II along time, float32 [N, H, D] -> float32 [N, H, D].

    The sum that pi0-fast computes, in the same order and precision. A library's transform rounds otherwise, and where
    a coefficient times `scale` lies half-way between two integers (chunks that stand still, actions on a grid) that
    would give other ids.
    """
    horizon = values.shape[1]
    time, frequency = np.arange(horizon) + 0.5, np.arange(horizon)[:, None]
    matrix = np.sqrt(2.0 / horizon) * np.cos(np.pi / horizon * frequency * time)
    matrix[0] /= np.sqrt(2.0)
    matrix = matrix.astype(np.float32)
    # Rows of even frequency are symmetric in time, the others antisymmetric: half the terms do.
    symmetric, antisymmetric = values + values[:, ::-1], values - values[:, ::-1]
    if horizon % 2:
        symmetric[:, horizon // 2] = values[:, horizon // 2]  # the middle step has no partner
    coefficients = np.zeros_like(values)
    for t in range((horizon + 1) // 2):
        coefficients[:, 0::2] += matrix[0::2, t, None] * symmetric[:, None, t]
        coefficients[:, 1::2] += matrix[1::2, t, None] * antisymmetric[:, None, t]
    return coefficients


def _is_number(value: Any) -> bool:
    """Whether it is one number: a Python or numpy number, or an array or tensor without axes."""
    return isinstance(value, numbers.Number) or getattr(value, "ndim", None) == 0


def _as_id_rows(ids: Any) -> tuple[list[list[int]], bool]:
    """Token ids (numpy, torch or lists) as a list of rows, and whether they were one flat row."""
    single = getattr(ids, "ndim", None) == 1
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise ValueError(f"token ids must be a list of id lists or one flat list, not {ids!r}")
    single = single or (len(ids) > 0 and _is_number(ids[0]))
    rows = [ids] if single else ids
    try:
        return [[index(i) for i in (row.tolist() if hasattr(row, "tolist") else row)] for row in rows], single
    except TypeError as error:
        raise ValueError(f"token ids must be a list of id lists or one flat list, of whole numbers: {error}") from error


def _size(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, or null, not {value!r}")
    return int(value)


class UniversalActionProcessor(ProcessorMixin):
    """Action chunks to token ids and back.

    Args:
        bpe_tokenizer: the byte-pair encoder of the symbol string, a fast tokenizer.
        scale: multiplier of the coefficients before rounding, one number or a list with one per dimension.
        vocab_size: number of token ids.
        min_token: the coefficient whose symbol is code point 0.
        time_horizon, action_dim: [H, D] of a chunk; None when any shape is taken, and decode must be told.
        order: how coefficients are flattened: "frequency" (all dimensions of frequency 0 first) or "dimension" (all
            frequencies of dimension 0 first). With "dimension", `scale` cannot be read: who reads it decodes without
            this class, and as if the order were the other.

    The arguments stay positional: transformers restores no saved value of a keyword-only argument.
    """

    # transformers 4 reads these two; 5 finds the tokenizer by the name of the constructor argument.
    attributes = ["bpe_tokenizer"]  # noqa: RUF012
    bpe_tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        bpe_tokenizer: Any,
        scale: float | list[float] = 10,
        vocab_size: int = 1024,
        min_token: int = 0,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        order: str = "frequency",
    ) -> None:
        super().__init__(bpe_tokenizer)
        if order not in ("frequency", "dimension"):
            raise ValueError(f"order {order!r} is not known to this file; it knows 'frequency' and 'dimension'")
        self.__dict__["scale"] = scale  # where transformers finds what it saves; reading goes through the property
        self.vocab_size = vocab_size
        self.min_token = min_token
        self.time_horizon = _size("time_horizon", time_horizon)
        self.action_dim = _size("action_dim", action_dim)
        self.order = order
        factors = np.asarray(scale, np.float64)
        if factors.ndim > 1 or not np.all(np.isfinite(factors)) or not np.all(factors > 0):
            raise ValueError(f"scale must be one positive number or one per dimension, not {scale!r}")
        if factors.ndim == 1 and self.action_dim not in (None, len(factors)):
            raise ValueError(f"scale has {len(factors)} values and action_dim is {self.action_dim}")
        self._factors = factors
        self._code_points = _encodable_code_points(json.loads(bpe_tokenizer.backend_tokenizer.to_str()))

    @property
    def scale(self) -> float | list[float]:
        """Multiplier of the coefficients, of whoever decodes frequency by frequency without this class.

        Raises:
            ValueError: the order is another one.
        """
        if self.order != "frequency":
            raise ValueError(
                f"this action tokenizer flattens in the order {self.order!r}, but its scale was asked for, as by "
                "LeRobot's pi0_fast policy, which decodes by itself, frequency by frequency, and would go wrong. "
                "Decode with this processor's decode() or with pi0-fast, or fit a tokenizer with --order frequency"
            )
        found: float | list[float] = self.__dict__["scale"]
        return found

    def __call__(self, chunks: Any) -> list[list[int]]:
        """Token ids of normalised action chunks.

        Args:
            chunks: [N, H, D] or one chunk [H, D], any numeric dtype; numpy, torch or nested lists.

        Returns:
            N lists of ids. Coefficients without a symbol are clipped to the nearest that has one.

        Raises:
            ValueError: wrong shape, values that are not finite or no normalised actions (row and dimension are named).
        """
        values = _as_float32(chunks)
        self._check_shape(*values.shape[1:])
        if len(values) == 0:
            return []
        coefficients = self._quantize(values)
        points = self._clip(coefficients - self.min_token)
        symbols = (points if self.order == "frequency" else points.swapaxes(1, 2)).reshape(len(values), -1)
        texts = [row.astype("<u4").tobytes().decode("utf-32-le") for row in symbols]
        encoded = self.bpe_tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return [list(row) for row in encoded["input_ids"]]

    def decode(
        self,
        token_ids: Any,
        time_horizon: int | None = None,
        action_dim: int | None = None,
        skip_special_tokens: bool | None = None,  # noqa: ARG002
        clean_up_tokenization_spaces: bool | None = None,  # noqa: ARG002
    ) -> np.ndarray:
        """Action chunks from token ids.

        Args:
            token_ids: a list of id rows, or one flat row; numpy and torch arrays [N, T] or [T] too.
            time_horizon, action_dim: H and D, where the tokenizer does not have its own.
            skip_special_tokens, clean_up_tokenization_spaces: taken because callers of transformers tokenizers
                pass them; an action vocabulary has no special tokens, and every character is a coefficient.

        Returns:
            float32 [N, H, D], or [H, D] for one flat row.

        Raises:
            ValueError: ids outside the vocabulary, or rows that do not hold exactly H * D whole coefficients.
        """
        horizon = self._resolve("time_horizon", self.time_horizon, time_horizon)
        size = self._resolve("action_dim", self.action_dim, action_dim)
        self._check_shape(horizon, size)
        rows, single = _as_id_rows(token_ids)
        levels = np.empty((len(rows), horizon, size))
        for n, row in enumerate(rows):
            row_levels = self._row_coefficients(n, row, horizon * size)
            if self.order == "frequency":
                levels[n] = row_levels.reshape(horizon, size) / self._factors
            else:
                levels[n] = row_levels.reshape(size, horizon).T / self._factors
        values: np.ndarray = idct(levels, axis=1, norm="ortho").astype(np.float32)
        return values[0] if single else values

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Write the processor so that every supported transformers version can read it.

        Each version writes the byte-pair encoder only where it looks for it itself, and under its own class
        name; here it is written at the root and in `bpe_tokenizer/`. With `push_to_hub` the directory is uploaded
        too; the remaining arguments are those of transformers.
        """
        written = super().save_pretrained(save_directory)
        text = self.bpe_tokenizer.backend_tokenizer.to_str(pretty=True)
        for folder in (Path(save_directory), Path(save_directory) / "bpe_tokenizer"):
            folder.mkdir(exist_ok=True)
            (folder / "tokenizer.json").write_text(text, encoding="utf-8")
            settings = json.dumps(_TOKENIZER_CONFIG, indent=2, sort_keys=True) + "\n"
            (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return list(written or [])

    def _quantize(self, values: np.ndarray) -> np.ndarray:
        """float32 [N, H, D] -> rounded coefficients, float32 [N, H, D], not clipped."""
        largest = np.abs(self._code_points[[0, -1]] + self.min_token).max()
        limit = max(_LARGEST_ORDINARY_VALUE, 2.0 * largest / self._factors.min())
        wrong = ~(np.abs(values) <= limit)  # true for NaN, too
        if wrong.any():
            row, step, dimension = (int(i) for i in np.argwhere(wrong)[0])
            value = float(values[row, step, dimension])
            raise ValueError(
                f"the action in row {row}, step {step}, dimension {dimension} is {value:g}: no normalised action "
                f"(they are finite, and {limit:g} at most); normalise actions to about [-1, 1] first"
            )
        rounded: np.ndarray = np.rint(_transform(values) * self._factors.astype(np.float32))
        return rounded

    def _clip(self, points: np.ndarray) -> np.ndarray:
        """The encodable code point nearest to each wanted one (the lower of two equally near), int64."""
        allowed = self._code_points
        points = np.clip(points, allowed[0], allowed[-1]).astype(np.int64)
        above = np.searchsorted(allowed, points)
        below = np.maximum(above - 1, 0)
        return np.where(allowed[above] - points < points - allowed[below], allowed[above], allowed[below])

    def _row_coefficients(self, n: int, row: list[int], expected: int) -> np.ndarray:
        """The `expected` coefficients that row n of ids stands for, int64."""
        size = len(self.bpe_tokenizer)
        for position, token in enumerate(row):
            if not 0 <= token < size:
                raise ValueError(f"row {n}, position {position}: id {token} is outside the vocabulary [0, {size})")
        text = self.bpe_tokenizer.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" in text:
            whole = text.index("\ufffd")
            raise ValueError(f"row {n}: the ids break off inside coefficient {whole} of {expected}")
        if len(text) != expected:
            raise ValueError(f"row {n}: the {len(row)} ids hold {len(text)} coefficients, a chunk needs {expected}")
        return np.fromiter(map(ord, text), np.int64, expected) + self.min_token

    def _check_shape(self, horizon: int, size: int) -> None:
        if self.time_horizon not in (None, horizon) or self.action_dim not in (None, size):
            raise ValueError(
                f"chunks of shape [{horizon}, {size}] given to a tokenizer of chunks "
                f"[{self.time_horizon or 'any'}, {self.action_dim or 'any'}]"
            )
        if self._factors.ndim == 1 and len(self._factors) != size:
            raise ValueError(f"chunks have {size} dimensions, scale has {len(self._factors)} values")

    @staticmethod
    def _resolve(name: str, saved: int | None, asked: int | None) -> int:
        asked = _size(name, asked)
        if saved is not None and asked is not None and saved != asked:
            raise ValueError(f"{name}={asked} contradicts the tokenizer, which was made for {name}={saved}")
        found = asked if saved is None else saved
        if found is None:
            raise ValueError(f"this tokenizer does not fix {name}: pass decode(ids, {name}=...)")
        return found
