"""What the JSON files of a saved tokenizer directory hold, as dictionaries; the file names of its layout.

transformers 4.57 reads tokenizer.json and tokenizer_config.json at the root of the directory, 5.5 reads them
only in `bpe_tokenizer/`, newer versions in either place; so they are written twice. `AutoProcessor` starts at
processor_config.json, whose auto_map names the class in the Python file that travels with the directory.

What is not here: tokenizer.json itself (vocabulary.py), the writing and reading of directories (tokenizer.py), the
statistics and reports beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pi0_fast.actions.dct import Order
from pi0_fast.actions.vocabulary import SymbolFormat

#: Version of the layout and of the keys in config.json; it goes up when older readers would misread a directory.
FORMAT_VERSION = 1

PROCESSOR_CLASS = "UniversalActionProcessor"
#: The self-contained Python file; copied into every directory, never imported by this package.
PROCESSING_SOURCE = Path(__file__).with_name("processing_action_tokenizer.py")
#: Named after the processor's constructor argument; transformers 5.5 looks for the BPE tokenizer there.
BPE_FOLDER = "bpe_tokenizer"

PROCESSOR_CONFIG = "processor_config.json"
CONFIG = "config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

#: Every file that loading elsewhere needs, relative to the directory.
FILE_NAMES: tuple[str, ...] = (
    PROCESSOR_CONFIG,
    CONFIG,
    PREPROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    f"{BPE_FOLDER}/{TOKENIZER}",
    f"{BPE_FOLDER}/{TOKENIZER_CONFIG}",
    PROCESSING_SOURCE.name,
)


def _auto_map() -> dict[str, str]:
    return {"AutoProcessor": f"{PROCESSING_SOURCE.stem}.{PROCESSOR_CLASS}"}


def _scale(scale: float | Sequence[float]) -> float | list[float]:
    """A number, or a list with one number per dimension, as plain Python numbers."""
    return [float(value) for value in scale] if isinstance(scale, Sequence) else scale


def processor_config(
    scale: float | Sequence[float],
    vocab_size: int,
    min_token: int,
    time_horizon: int | None,
    action_dim: int | None,
    order: Order = "frequency",
) -> dict[str, Any]:
    """processor_config.json: the constructor arguments of the processor class, and where that class is.

    Args:
        scale: multiplier of the coefficients, one number or one per action dimension.
        vocab_size: number of token ids.
        min_token: the coefficient whose symbol is code point 0.
        time_horizon, action_dim: shape [H, D] of a chunk; None when a tokenizer takes any shape.
        order: how coefficients are flattened; see `dct.Order`.
    """
    return {
        "action_dim": action_dim,
        "auto_map": _auto_map(),
        "min_token": min_token,
        "order": order,
        "processor_class": PROCESSOR_CLASS,
        "scale": _scale(scale),
        "time_horizon": time_horizon,
        "vocab_size": vocab_size,
    }


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json, at the root and in `bpe_tokenizer/`.

    The class is the one name that transformers 4 and 5 share for "whatever tokenizer.json says". Cleaning up
    spaces would delete coefficients: the code point of a space is a coefficient like any other.
    """
    return {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}


def preprocessor_config() -> dict[str, Any]:
    """preprocessor_config.json: the same class for readers that look for it in this file."""
    return {"auto_map": _auto_map(), "processor_class": PROCESSOR_CLASS}


def config(
    *,
    symbol_format: SymbolFormat,
    scale: float | Sequence[float],
    vocab_size: int,
    min_token: int,
    time_horizon: int | None,
    action_dim: int | None,
    order: Order = "frequency",
) -> dict[str, Any]:
    """config.json: all settings of the tokenizer. Arguments as in `processor_config`.

    It has no `model_type` and no `transformers_version`: with either, transformers takes the directory for a
    model.
    """
    return {
        "action_dim": action_dim,
        "format_version": FORMAT_VERSION,
        "min_token": min_token,
        "order": order,
        "scale": _scale(scale),
        "symbol_format": symbol_format,
        "time_horizon": time_horizon,
        "vocab_size": vocab_size,
    }
