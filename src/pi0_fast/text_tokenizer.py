"""Text tokenizers of the language model: text -> ids, from the files that published checkpoints bring.

Three kinds: Hugging Face's `tokenizer.json`, a sentencepiece `.model` (PaliGemma's own file), and a tiny one that is
built in, for small models and tests. The first gives the ids of `transformers` without it, special tokens of its
post-processor included. What is not here: prompts, padding, masks, and everything about action tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pi0_fast.hub import download_snapshot
from pi0_fast.types import PolicyError

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
#: Files beside `tokenizer.json` that belong to it: read where ids depend on them, and saved along.
_COMPANIONS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
#: All that is fetched from a hub repository, which may hold gigabytes of weights.
HUB_FILES = (TOKENIZER_JSON, *_COMPANIONS, TOKENIZER_MODEL)
#: The name of `TinyTextTokenizer` where a directory or a hub id could stand.
BUILT_IN = "byte"

_SPECIAL_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
#: tokenizer_config.json of Gemma's and PaliGemma's vocabularies, for transformers.
_GEMMA_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    **_SPECIAL_NAMES,
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1_000_000,
}
_SPACE = "\u2581"  # what sentencepiece and Gemma's vocabularies write for a space
_PROBE = "x"


class TextTokenizer(ABC):
    """A text tokenizer with the special tokens that prompts need. Instances can be pickled.

    Attributes:
        vocab_size: number of ids in the vocabulary, without tokens added behind it (as `vocab_size` in transformers).
        bos_id, eos_id, pad_id: the special tokens' ids.
        prompt_prefix_ids, prompt_suffix_ids: what the tokenizer's own post-processor puts around a text.
        fingerprint: 16 hexadecimal digits, a hash of the vocabulary and of the special tokens.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    prompt_prefix_ids: tuple[int, ...]
    prompt_suffix_ids: tuple[int, ...]
    fingerprint: str
    _files: Mapping[str, bytes]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """The string that an id stands for.

        Raises:
            PolicyError: no such id.
        """

    @abstractmethod
    def _joins_only_by_vocabulary(self, characters: str) -> bool:
        """Whether texts of these characters get ids by nothing but pieces of the vocabulary."""

    @abstractmethod
    def _pieces(self) -> Iterable[str]:
        """All strings of the vocabulary, added tokens included."""

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text with what the tokenizer's own post-processor puts around it (PaliGemma's: bos first)."""
        return [*self.prompt_prefix_ids, *self.encode(text), *self.prompt_suffix_ids]

    def never_joins(self, pairs: Sequence[tuple[str, str]]) -> bool:
        """Whether a text may be cut between any of these pairs of characters without changing its ids.

        True is a proof: ids are made by joining characters to pieces of the vocabulary, and no piece has such a pair
        inside. So ``encode(a + b) == encode(a) + encode(b)`` wherever `a` ends and `b` begins with one of the pairs.
        """
        if not self._joins_only_by_vocabulary("".join(left + right for left, right in pairs)):
            return False
        for left, right in pairs:  # finds tokenizers that put something before every text, or strip it
            begin, end = _PROBE + left, right + _PROBE
            if self.encode(begin + end) != self.encode(begin) + self.encode(end):
                return False
        inside = {re.escape(left + right) for left, right in pairs}
        inside |= {pair.replace(re.escape(" "), _SPACE) for pair in inside}
        return re.search("|".join(inside), "\0".join(self._pieces())) is None

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer's files, byte for byte as they were read, into a directory (made if missing).

        They load here with the same fingerprint, and in transformers with the same ids, wherever the originals did.

        Raises:
            OSError: they cannot be written.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    def _hash(self, vocabulary: bytes) -> str:
        special = [self.bos_id, self.eos_id, self.pad_id, self.prompt_prefix_ids, self.prompt_suffix_ids]
        return hashlib.sha256(vocabulary + json.dumps(special).encode()).hexdigest()[:16]


class JsonTextTokenizer(TextTokenizer):
    """A `tokenizer.json` of Hugging Face's `tokenizers`."""

    def __init__(self, files: Mapping[str, bytes], where: str) -> None:
        """Make a tokenizer of the content of its files.

        Args:
            files: name -> content; ``tokenizer.json``, and `tokenizer_config.json` and the like where there are any.
            where: what to call the source in errors.

        Raises:
            PolicyError: a file is damaged, a special token is missing, or the files contradict each other.
        """
        from tokenizers import Tokenizer

        self._files = dict(files)
        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER_JSON].decode("utf-8"))
        except Exception as error:  # `tokenizers` raises bare exceptions
            raise PolicyError(f"{where}: {TOKENIZER_JSON} cannot be read as a tokenizer: {error}") from error
        # Settings of training runs that the file may carry; transformers, too, applies its callers' instead.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=False)
        companions = {name: _json_object(files[name], f"{where}: {name}") for name in _COMPANIONS if name in files}
        self._check_added_tokens(companions, where)
        self.bos_id, self.eos_id, self.pad_id = (self._special_id(name, companions, where) for name in _SPECIAL_NAMES)
        self.prompt_prefix_ids, self.prompt_suffix_ids = self._around(where)
        self.fingerprint = self._hash(files[TOKENIZER_JSON])

    def _check_added_tokens(self, companions: Mapping[str, Mapping[str, Any]], where: str) -> None:
        """Files that name tokens which `tokenizer.json` lacks would give other ids in transformers."""
        decoder = companions.get(TOKENIZER_CONFIG, {}).get("added_tokens_decoder") or {}
        named = [(TOKENIZER_CONFIG, _content(token), number) for number, token in decoder.items()]
        named += [("added_tokens.json", token, i) for token, i in companions.get("added_tokens.json", {}).items()]
        for file, token, number in named:
            if token is None or self._tokenizer.token_to_id(token) != int(number):
                raise PolicyError(
                    f"{where}: {file} has the token {token!r} as id {number}, {TOKENIZER_JSON} has not: the files are "
                    "of different tokenizers; save them once more with save_pretrained of transformers"
                )

    def _special_id(self, name: str, companions: Mapping[str, Mapping[str, Any]], where: str) -> int:
        """The id of a special token, by the name that the files give it, or else Gemma's name for it."""
        given = [(file, _content(content.get(name))) for file, content in companions.items()]
        file, token = next(((f, t) for f, t in given if t is not None), (TOKENIZER_JSON, _SPECIAL_NAMES[name]))
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise PolicyError(
                f"{where}: no {name}: {token!r} ({file}) is no token of {TOKENIZER_JSON}. Prompts need bos, eos and "
                f"pad; name them in {TOKENIZER_CONFIG}"
            )
        return int(found)

    def _around(self, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the post-processor puts before and after a text."""
        text, whole = self.encode(_PROBE), self._tokenizer.encode(_PROBE).ids
        for begin in range(len(whole) - len(text) + 1):
            if text and whole[begin : begin + len(text)] == text:
                return tuple(whole[:begin]), tuple(whole[begin + len(text) :])
        raise PolicyError(f"{where}: the post-processor of {TOKENIZER_JSON} changes the ids of a text ({text} {whole})")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token_id: int) -> str:
        found = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if found is None:
            raise PolicyError(f"the text tokenizer has no id {token_id}; its vocabulary is 0 to {self.vocab_size - 1}")
        return str(found)

    def _joins_only_by_vocabulary(self, characters: str) -> bool:
        """True for BPE over whole texts, as Gemma's: nothing but merges, and no character of these unknown."""
        from tokenizers import models

        model, normalizer = self._tokenizer.model, _state(self._tokenizer.normalizer)
        replaces_spaces = normalizer == {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        pre_tokenizer = _state(self._tokenizer.pre_tokenizer)
        splits_spaces = pre_tokenizer.get("type") == "Split" and pre_tokenizer.get("pattern") == {"String": " "}
        added = self._tokenizer.get_added_tokens_decoder().values()
        known = characters.replace(" ", _SPACE) if replaces_spaces else characters
        return (
            isinstance(model, models.BPE)
            and not (model.dropout or model.ignore_merges)
            and not (model.continuing_subword_prefix or model.end_of_word_suffix)
            and (replaces_spaces or not normalizer)
            # After the replacement there is no space left to split at.
            and (not pre_tokenizer or (replaces_spaces and splits_spaces))
            and not any(token.lstrip or token.rstrip or token.single_word for token in added)
            and all(self._tokenizer.token_to_id(character) is not None for character in known)
        )

    def _pieces(self) -> Iterable[str]:
        pieces: Iterable[str] = self._tokenizer.get_vocab(with_added_tokens=True)
        return pieces


class SentencePieceTextTokenizer(TextTokenizer):
    """A sentencepiece `.model`, as PaliGemma's; bos before a prompt, as in the `tokenizer.json` made of that one.

    A literal ``<bos>`` in a text is text here, and the special token in a `tokenizer.json`; else the ids are the same.
    """

    def __init__(self, model: bytes, where: str, config: bytes | None = None) -> None:
        """Make a tokenizer of the content of a `.model` file.

        Args:
            model: content of the file.
            where: what to call it in errors.
            config: content of the `tokenizer_config.json` beside it, whose `add_bos_token` and `add_eos_token` count.
                Where there is none and the special tokens are Gemma's, `save` writes one with which transformers 5
                reads the `.model` to the same ids.

        Raises:
            PolicyError: sentencepiece is not installed, a file is damaged, or lacks bos, eos or pad.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise PolicyError(
                f"{where} needs the package sentencepiece: pip install 'pi0-fast[policy]', or give a {TOKENIZER_JSON}"
            ) from error
        if not model:  # sentencepiece would take it for no file at all
            raise PolicyError(f"{where} is empty")
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except Exception as error:  # a RuntimeError, or whatever the version raises
            raise PolicyError(f"{where} cannot be read as a sentencepiece model: {error}") from error
        self.vocab_size = int(self._processor.get_piece_size())
        special = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id())
        missing = [name for name, number in zip(_SPECIAL_NAMES, special, strict=True) if number < 0]
        if missing:
            raise PolicyError(f"{where} has no {', '.join(missing)}; prompts need bos, eos and pad")
        self.bos_id, self.eos_id, self.pad_id = special
        if config is None and [self.piece(number) for number in special] == list(_SPECIAL_NAMES.values()):
            config = json.dumps(_GEMMA_CONFIG, indent=2).encode()
        self._files = {TOKENIZER_MODEL: model, **({} if config is None else {TOKENIZER_CONFIG: config})}
        settings = {} if config is None else _json_object(config, f"{TOKENIZER_CONFIG} beside {where}")
        self.prompt_prefix_ids = (self.bos_id,) if settings.get("add_bos_token", True) else ()
        self.prompt_suffix_ids = (self.eos_id,) if settings.get("add_eos_token", False) else ()
        self.fingerprint = self._hash(model)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def piece(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise PolicyError(f"the text tokenizer has no id {token_id}; its vocabulary is 0 to {self.vocab_size - 1}")
        return str(self._processor.id_to_piece(int(token_id)))

    def _joins_only_by_vocabulary(self, characters: str) -> bool:
        unknown = self._processor.unk_id()
        return all(self._processor.piece_to_id(c.replace(" ", _SPACE)) != unknown for c in characters)

    def _pieces(self) -> Iterable[str]:
        pieces: list[str] = self._processor.id_to_piece(list(range(self.vocab_size)))
        return pieces


class TinyTextTokenizer(JsonTextTokenizer):
    """A built-in tokenizer for small models: one id for each printable ASCII character, bytes for all else.

    pad 0, eos 1, bos 2, unknown 3, then 256 bytes, the space, the line feed, 94 characters, and ``Action``, ``Task``,
    ``State`` with the pieces on the way to them (which lerobot looks for by name); the rest is never produced from
    text, so free for action tokens. What `save` writes loads in transformers, with the same ids.
    """

    def __init__(self, vocab_size: int = 4096) -> None:
        """Build it; no file is read.

        Raises:
            PolicyError: a vocabulary too small for the characters.
        """
        content = _tiny_content(vocab_size)
        config = {
            **_SPECIAL_NAMES,
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        files = {TOKENIZER_JSON: content, TOKENIZER_CONFIG: config}
        super().__init__({name: json.dumps(value).encode() for name, value in files.items()}, "TinyTextTokenizer")


def _tiny_content(vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.json` of `TinyTextTokenizer`."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE, "\n", *map(chr, range(0x21, 0x7F))]
    words = ("Action", "Task", "State")
    merges = [[word[:end], word[end]] for word in words for end in range(1, len(word))]
    pieces += [left + right for left, right in merges]
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < len(pieces):
        raise PolicyError(f"vocab_size of TinyTextTokenizer must be a whole number from {len(pieces)}: {vocab_size!r}")
    pieces += [f"<unused{number}>" for number in range(vocab_size - len(pieces))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in enumerate(special)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [special.index("<bos>")], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": merges,
        },
    }


def load_text_tokenizer(
    name: str | Path,
    *,
    base: str | Path | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> TextTokenizer:
    """Load a text tokenizer; the network is touched only where no local file or directory has that name.

    Args:
        name: a directory with a `tokenizer.json` (preferred) or a `.model`, such a file, a hub id, or ``"byte"`` for
            the built-in `TinyTextTokenizer`.
        base: a directory that relative names are looked for in first, as those in a checkpoint's config.json are.
        revision, token, cache_dir, local_files_only: as in `huggingface_hub.snapshot_download`.

    Raises:
        PolicyError: nothing of that name, or damaged or unsuitable files (named).
        HubError: nothing of that name on the hub, access refused (which page to accept), or offline.
    """
    text = str(name)
    if text == BUILT_IN:
        return TinyTextTokenizer()
    if not text or "\0" in text:
        raise PolicyError(f"{text!r} is no name of a text tokenizer: give a directory, a file or a hub id")
    candidates = [Path(text).expanduser()]
    if base is not None:
        candidates.insert(0, Path(base) / candidates[0])
    for candidate in dict.fromkeys(candidates):
        if candidate.exists():
            return _read(candidate)
    searched = " or ".join(str(candidate.absolute()) for candidate in dict.fromkeys(candidates))
    local = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.endswith((".json", ".model"))
    if local or text.count("/") != 1:
        raise PolicyError(
            f"no text tokenizer at {searched}, and {text!r} is no hub id of the form owner/name: give a directory, a "
            f"{TOKENIZER_JSON} or a sentencepiece .model"
        )
    folder = download_snapshot(
        text,
        repo_type="model",
        allow_patterns=HUB_FILES,
        searched=searched,
        local_advice="give a local directory, tokenizer.json or sentencepiece .model as --policy.text_tokenizer_name",
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    return _read(folder)


def _read(path: Path) -> TextTokenizer:
    """A tokenizer from an existing directory or file."""
    if path.is_dir():
        models = sorted(path.glob("*.model"))
        if (path / TOKENIZER_JSON).is_file():
            path = path / TOKENIZER_JSON
        elif len(models) == 1:
            path = models[0]
        else:
            found = f"{len(models)} files *.model" if models else "no *.model either"
            raise PolicyError(f"{path} holds no {TOKENIZER_JSON} and {found}, so it is no text tokenizer's directory")
    try:
        content = path.read_bytes()
        beside = {name: (path.parent / name).read_bytes() for name in _COMPANIONS if (path.parent / name).is_file()}
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".json":
        return JsonTextTokenizer({TOKENIZER_JSON: content, **beside}, str(path.parent))
    return SentencePieceTextTokenizer(content, str(path), beside.get(TOKENIZER_CONFIG))


def _json_object(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise PolicyError(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise PolicyError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """A token as written by transformers: its string, or an object with that as `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _state(part: Any) -> dict[str, Any]:
    """The settings of a normalizer or pre-tokenizer; none where there is none."""
    return {} if part is None else dict(json.loads(part.__getstate__()))
