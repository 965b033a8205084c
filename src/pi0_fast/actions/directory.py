"""A saved tokenizer's directory: written all at once, read and checked file by file.

What the JSON files for other readers hold is in layout.py, the vocabulary's own file in vocabulary.py. What is not
here: encoding and decoding, and the hub.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions import layout
from pi0_fast.actions.dct import Order, checked_order
from pi0_fast.actions.inputs import checked_max_error, checked_rate_weight, checked_scale
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.vocabulary import Vocabulary
from pi0_fast.swap import (
    bring_along,
    finish_interrupted_swap,
    install_directory,
    keep_other_files,
    temporary_sibling,
)
from pi0_fast.types import TokenizerError, UsageError

LongArray = npt.NDArray[np.int64]

NORMALIZER = "normalizer.json"
METADATA = "metadata.json"
VOCABULARY_TEXT = "vocabulary.txt"
#: A report on the tokenizer may lie in this folder of its directory; this file shows that it is one.
REPORT_FOLDER, REPORT = "report", "report.json"
#: Key of config.json that holds `Saved.fingerprint`; published tokenizers have none.
FINGERPRINT = "fingerprint"
#: Keys of config.json that say how to encode; decoding does not ask.
RATE_WEIGHT, MAX_ERROR = "rate_weight", "max_error"
#: How often a directory is read that is being replaced or filled just now, and the seconds between.
READ_TRIES, READ_PAUSE = 20, 0.01
#: Every file that `save_directory` may write.
FILE_NAMES = (*layout.FILE_NAMES, NORMALIZER, METADATA, VOCABULARY_TEXT)
#: Files that only FAST tokenizers have: ours and published ones the first, those that transformers 5 saved the second.
SIGNATURE_FILES = (layout.PROCESSING_SOURCE.name, f"{layout.BPE_FOLDER}/{layout.TOKENIZER}")


@dataclass(frozen=True)
class Saved:
    """All that a tokenizer is made of, as it lies in a directory.

    Attributes:
        vocabulary, scale, time_horizon, action_dim, normalizer, coefficient_range: as in `FastTokenizer`.
        metadata: content of metadata.json, if there is one.
        order, rate_weight, max_error: as in `FastTokenizer`.
    """

    vocabulary: Vocabulary
    scale: float | list[float]
    time_horizon: int | None
    action_dim: int | None
    normalizer: Normalizer | None
    coefficient_range: tuple[int, int] | None
    metadata: Mapping[str, Any] | None = None
    order: Order = "frequency"
    rate_weight: float = 0.0
    max_error: float | list[float] | None = None

    def config(self) -> dict[str, Any]:
        """The content of config.json: every setting."""
        config = layout.config(
            symbol_format=self.vocabulary.symbol_format,
            scale=self.scale,
            vocab_size=self.vocabulary.size,
            min_token=self.vocabulary.min_token,
            time_horizon=self.time_horizon,
            action_dim=self.action_dim,
            order=self.order,
        )
        config["coefficient_range"] = None if self.coefficient_range is None else list(self.coefficient_range)
        # Only where they are set, so that the others' fingerprints are what they were before there were these.
        if self.rate_weight:
            config[RATE_WEIGHT] = self.rate_weight
        if self.max_error is not None:
            config[MAX_ERROR] = self.max_error
        return config

    def fingerprint(self) -> str:
        """16 hexadecimal digits: a hash of settings, vocabulary and normaliser, without the metadata."""
        content = {"config": self.config(), "tokenizer": self.vocabulary.to_json()}
        if self.normalizer is not None:
            content["normalizer"] = self.normalizer.to_json()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def save_directory(target: Path, saved: Saved, token_uses: Sequence[int] | LongArray | None) -> None:
    """Write the files, all at once or not at all; other files in an existing directory stay.

    Raises:
        TokenizerError: `token_uses` is not one number for each id, or JSON cannot hold the metadata.
        OSError: the files cannot be written; what was there before is unharmed.
    """
    _check_contents(saved, token_uses)
    if (target.is_symlink() or target.exists()) and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{target} exists and is no directory")
    finish_interrupted_save(target)
    temporary = temporary_sibling(target)
    try:
        keep_other_files(target, temporary, _is_own, mixed_folders=(layout.BPE_FOLDER,))
        write_files(temporary, saved, token_uses)
        install_directory(temporary, target, _bring_along)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def finish_interrupted_save(target: Path) -> bool:
    """Finish what a killed `save_directory` left, if anything; see `swap.py`."""
    return finish_interrupted_swap(target, _bring_along)


def wait_for_directory(folder: Path, finish: Callable[[Path], bool] = finish_interrupted_save) -> bool:
    """Whether a directory is there; one that is being replaced is waited for, or its killed writer's work finished.

    Args:
        folder: its path.
        finish: what finishes that work, where the directory is no tokenizer's; see `swap.finish_interrupted_swap`.

    Raises:
        TokenizerError: it was being replaced when its writer was killed, and that cannot be finished.
    """
    for tries_left in reversed(range(READ_TRIES)):
        try:
            return folder.is_dir() or finish(folder) or folder.is_dir()
        except OSError as error:  # such as a reader who may not write there
            if not tries_left:
                raise TokenizerError(
                    f"{folder} was being replaced when its writer was killed, and that cannot be finished: {error}"
                ) from error
        time.sleep(READ_PAUSE)
    raise AssertionError("the last try returns or raises")


def write_files(folder: Path, saved: Saved, token_uses: Sequence[int] | LongArray | None) -> None:
    """Write the files into an existing directory, one after the other.

    Raises:
        TokenizerError: as `save_directory`.
    """
    _check_contents(saved, token_uses)
    vocabulary = saved.vocabulary
    bpe = folder / layout.BPE_FOLDER
    bpe.mkdir(exist_ok=True)
    processor = layout.processor_config(
        saved.scale, vocabulary.size, vocabulary.min_token, saved.time_horizon, saved.action_dim, saved.order
    )
    _write_json(folder / layout.PROCESSOR_CONFIG, processor)
    _write_json(folder / layout.CONFIG, {**saved.config(), FINGERPRINT: saved.fingerprint()})
    _write_json(folder / layout.PREPROCESSOR_CONFIG, layout.preprocessor_config())
    for place in (folder, bpe):
        _write_json(place / layout.TOKENIZER, vocabulary.to_json(), sort_keys=False)
        _write_json(place / layout.TOKENIZER_CONFIG, layout.tokenizer_config())
    shutil.copyfile(layout.PROCESSING_SOURCE, folder / layout.PROCESSING_SOURCE.name)
    if saved.normalizer is not None:
        _write_json(folder / NORMALIZER, saved.normalizer.to_json())
    if saved.metadata is not None:
        _write_json(folder / METADATA, saved.metadata, sort_keys=False)
    (folder / VOCABULARY_TEXT).write_text(_vocabulary_text(vocabulary, token_uses), encoding="utf-8")


def _vocabulary_text(vocabulary: Vocabulary, token_uses: Sequence[int] | LongArray | None) -> str:
    """One line for each id: its number, how often it is used, what it stands for."""
    unit = "coefficients" if vocabulary.symbol_format == "plain" else "bytes (UTF-8 of coefficient - min_token)"
    lines = [f"# id\tcount\t{unit}"]
    for i, expansion in enumerate(vocabulary.expansions):
        count = "?" if token_uses is None else str(int(token_uses[i]))
        lines.append(f"{i}\t{count}\t{runs_text(expansion)}")
    return "\n".join(lines) + "\n"


def _check_contents(saved: Saved, token_uses: Sequence[int] | LongArray | None) -> None:
    """Raise a TokenizerError on what cannot be written."""
    if token_uses is not None:
        size = saved.vocabulary.size
        try:
            counts = np.asarray(token_uses)
        except ValueError:  # lists of different lengths
            counts = np.empty(0)
        if counts.ndim == 1 and counts.size not in (0, size):
            raise TokenizerError(f"token_uses has {len(counts)} numbers for {size} ids")
        if counts.shape != (size,) or counts.dtype.kind not in "iu" or counts.min() < 0:
            raise TokenizerError(f"token_uses must be {size} whole numbers of at least 0, one for each id")
    if saved.metadata is None:
        return
    if not isinstance(saved.metadata, Mapping):
        raise TokenizerError(f"metadata must be a dictionary, not {type(saved.metadata).__name__}")
    try:
        json.dumps(saved.metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        found = next(_unwritable(saved.metadata, "metadata"), "metadata")
        raise TokenizerError(
            f"{METADATA} cannot hold {found} ({error}); give plain Python numbers, strings, lists and dictionaries"
        ) from error


def _unwritable(value: Any, name: str, depth: int = 0) -> Iterator[str]:
    """Names of the parts of a value that JSON cannot hold, such as ``metadata['a'][3]``."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        if depth < 50:  # deeper, or within itself: the outermost name must do
            for key, part in parts:
                yield from _unwritable(part, f"{name}[{key!r}]", depth + 1)
        yield name


def read_directory(folder: Path) -> Saved:
    """Read what `save_directory` wrote, or a published tokenizer (root or ``bpe_tokenizer/`` layout).

    Where another process replaces the directory meanwhile, it is read again: the result is all old or all new.

    Raises:
        TokenizerError: missing, damaged or contradicting files (named).
    """
    for tries_left in reversed(range(READ_TRIES)):
        before = _identity(folder)
        try:
            saved = _read_once(folder)
        except _MixedFilesError:  # perhaps being copied there just now
            if not tries_left:
                raise
        except TokenizerError:
            if not tries_left or (before is not None and _identity(folder) == before):
                raise
        else:
            if _identity(folder) == before:
                return saved
            if not tries_left:
                raise TokenizerError(f"{folder} is replaced again and again: load it when nothing is saved there")
        time.sleep(READ_PAUSE)
        wait_for_directory(folder)
    raise AssertionError("the last try returns or raises")


class _MixedFilesError(TokenizerError):
    """The files do not belong together."""


def _identity(folder: Path) -> tuple[int, int] | None:
    """What changes when another directory takes the place of this one; None while there is none."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _read_once(folder: Path) -> Saved:
    place = folder / layout.PROCESSOR_CONFIG
    settings = _read_json(place)
    if "min_token" not in settings or "scale" not in settings:
        raise TokenizerError(f"{place} lacks min_token or scale: no FAST tokenizer")
    try:
        order = checked_order(settings.get("order", "frequency"))
    except UsageError as error:
        raise TokenizerError(f"{place}: {error}; a newer pi0-fast may know it") from error
    vocabulary = _read_vocabulary(folder, _whole(settings["min_token"], "min_token", place))
    vocab_size = _whole(settings.get("vocab_size", vocabulary.size), "vocab_size", place)
    if vocab_size < vocabulary.size:
        raise TokenizerError(f"{place} says vocab_size {vocab_size}, but the vocabulary has {vocabulary.size} ids")
    own = _own_config(folder, settings, vocabulary)
    seen = own.get("coefficient_range")
    if seen is not None and not (isinstance(seen, list) and len(seen) == 2):
        raise TokenizerError(f"{folder / layout.CONFIG}: coefficient_range must be two numbers, not {seen!r}")
    horizon, size = (
        None if settings.get(name) is None else _whole(settings[name], name, place)
        for name in ("time_horizon", "action_dim")
    )
    low_high = [_whole(value, "coefficient_range", folder / layout.CONFIG) for value in seen or []]
    saved = Saved(
        vocabulary=vocabulary,
        scale=_checked(checked_scale, settings["scale"], size, place=place),
        time_horizon=horizon,
        action_dim=size,
        normalizer=_read_normalizer(folder / NORMALIZER),
        coefficient_range=(low_high[0], low_high[1]) if low_high else None,
        order=order,
        rate_weight=_checked(checked_rate_weight, own.get(RATE_WEIGHT, 0.0), place=folder / layout.CONFIG),
        max_error=_checked(checked_max_error, own.get(MAX_ERROR), size, place=folder / layout.CONFIG),
        metadata=_read_json(folder / METADATA) if (folder / METADATA).is_file() else None,
    )
    if FINGERPRINT in own and own[FINGERPRINT] != saved.fingerprint():
        _refuse_mixture(folder, own[FINGERPRINT], saved)
    return saved


def _checked(check: Callable[..., Any], *values: Any, place: Path) -> Any:
    try:
        return check(*values)
    except TokenizerError as error:
        raise TokenizerError(f"{place}: {error}") from error


def _refuse_mixture(folder: Path, expected: Any, saved: Saved) -> None:
    names = [layout.PROCESSOR_CONFIG, layout.CONFIG, layout.TOKENIZER, f"{layout.BPE_FOLDER}/{layout.TOKENIZER}"]
    together = ", ".join([*names, NORMALIZER])
    without = "" if saved.normalizer is not None else f" (there is no {NORMALIZER})"
    raise _MixedFilesError(
        f"{folder} holds files of different tokenizers, or changed ones{without}: {layout.CONFIG} was saved with the "
        f"fingerprint {expected!r}, but the files give {saved.fingerprint()!r}. {together} belong together: copy all "
        f"of them again, or save the tokenizer anew (where the change is meant, remove {FINGERPRINT!r} from "
        f"{layout.CONFIG})"
    )


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


def _is_own(entry: Path, name: str) -> bool:
    """Whether this entry belongs to the tokenizer that is replaced, and goes with it."""
    return name in FILE_NAMES or (name == REPORT_FOLDER and (entry / REPORT).is_file())


_bring_along = partial(bring_along, is_own=_is_own)
