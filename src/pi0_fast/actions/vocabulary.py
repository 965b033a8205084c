"""The vocabulary of a FAST tokenizer in its two symbol formats: fit, coefficients <-> ids, and `tokenizer.json`.

- **plain**: each integer coefficient in [low, high] is one symbol, the character with code point ``c - min_token``;
  there is no pre-tokenisation. The default for new fits: fewer tokens, and no token can end inside a coefficient.
- **reference**: the byte-level format of published tokenizers (reference_format.py).

Both are read from and written to the `tokenizer.json` of Hugging Face's `tokenizers`. What is not here: transforms of
actions (dct.py), and everything about directories (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.bpe import IntArray, Merges, encode_rows, expand_rows
from pi0_fast.actions.bpe_training import Corpus, pack_sequences, train_merges
from pi0_fast.actions.reference_format import FIRST_SURROGATE, byte_characters, from_byte_rows, to_byte_rows
from pi0_fast.actions.segmentation import SearchTables, is_searchable, search_tables, segment_rows
from pi0_fast.types import TokenizerError

SymbolFormat = Literal["plain", "reference"]
LongArray = npt.NDArray[np.int64]

#: Training stops at pairs rarer than this, as in the published fit.
MIN_FREQUENCY = 2
#: float32 holds every coefficient up to here exactly.
_LARGEST_MIN_TOKEN = 1 << 24
#: Recordings to come reach further than those seen, but every symbol kept ready costs a merge.
DEFAULT_HEADROOM = 0.25


@dataclass(frozen=True)
class Decoded:
    """Coefficients of a batch of id sequences, and what is wrong with each.

    Attributes:
        coefficients: int32 [N, L]; 0 where a row has too few.
        counts: int64 [N], how many coefficients each row has.
        bad_id: int64 [N], position of the first id outside the vocabulary, -1 if there is none.
        broken: int64 [N], index of a coefficient that a token cut in half, -1 if there is none; None in the plain
            format, where that cannot be.
        whole: whether nothing is wrong with any row.
    """

    coefficients: IntArray
    counts: LongArray
    bad_id: LongArray
    broken: LongArray | None
    whole: bool


@dataclass(frozen=True)
class Vocabulary:
    """What the ids mean; immutable.

    Attributes:
        symbol_format: "plain" or "reference".
        min_token: the coefficient of code point 0.
        characters: the string of every id, as in tokenizer.json.
        merges: the merges between ids; ids of single characters come first.
    """

    symbol_format: SymbolFormat
    min_token: int
    merges: Merges
    characters: tuple[str, ...] = field(repr=False)

    # --- what can be encoded ----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.characters)

    @cached_property
    def encodable(self) -> LongArray:
        """Every coefficient that can be encoded, ascending."""
        if self.symbol_format == "plain":
            return np.arange(self.merges.base_size, dtype=np.int64) + self.min_token
        known = self._byte_ids >= 0
        codes = np.arange(FIRST_SURROGATE)
        one = known[np.minimum(codes, 0x7F)]
        two = known[0xC0 | np.minimum(codes >> 6, 0x1F)] & known[0x80 | (codes & 0x3F)]
        three = known[0xE0 | (codes >> 12)] & known[0x80 | ((codes >> 6) & 0x3F)] & known[0x80 | (codes & 0x3F)]
        usable = np.where(codes < 0x80, one, np.where(codes < 0x800, two, three))
        if not usable.any():
            raise TokenizerError("no coefficient can be encoded: the vocabulary holds no byte symbols")
        return np.flatnonzero(usable) + self.min_token

    @cached_property
    def low(self) -> int:
        """The smallest coefficient that can be encoded."""
        return int(self.encodable[0])

    @cached_property
    def high(self) -> int:
        """The largest coefficient that can be encoded."""
        return int(self.encodable[-1])

    @cached_property
    def _nearest(self) -> IntArray | None:
        """For every coefficient low .. high the nearest that can be encoded; None if that is always itself."""
        if len(self.encodable) == self.high - self.low + 1:
            return None
        wanted = np.arange(self.low, self.high + 1)
        above = np.searchsorted(self.encodable, wanted)
        below = np.maximum(above - 1, 0)
        nearer_below = wanted - self.encodable[below] <= self.encodable[above] - wanted
        return self.encodable[np.where(nearer_below, below, above)].astype(np.int32)

    def clip_holes(self, coefficients: IntArray, saturations: IntArray) -> None:
        """Move coefficients (int32 [N, L], in low .. high) that cannot be encoded to the nearest that can, in place.

        Each is counted in `saturations` int32 [N]. Only byte-level vocabularies can have such holes.
        """
        if self._nearest is None:
            return
        nearest = self._nearest[coefficients - self.low]
        saturations += (nearest != coefficients).sum(axis=1, dtype=np.int32)
        coefficients[:] = nearest

    # --- coefficients <-> ids ---------------------------------------------------------------------------------------

    @cached_property
    def _byte_ids(self) -> IntArray:
        """Id of each byte's character, -1 where the vocabulary lacks it."""
        ids = {character: i for i, character in enumerate(self.characters)}
        return np.array([ids.get(character, -1) for character in byte_characters()], np.int32)

    def encode(self, coefficients: IntArray) -> tuple[IntArray, IntArray]:
        """Coefficients int32 [N, L], all encodable, -> all ids, row after row, and how many each has; one thread."""
        if self.symbol_format == "plain":
            rows, lengths = coefficients - np.int32(self.min_token), None
        else:
            rows, lengths = to_byte_rows(coefficients, self.min_token, self._byte_ids)
        if self.search is not None:
            return segment_rows(self.search, rows, lengths)
        ids, counts = encode_rows(self.merges, rows, lengths)
        return ids[np.arange(ids.shape[1]) < counts[:, None]], counts

    @cached_property
    def search(self) -> SearchTables | None:
        """The quicker encoder's tables, for vocabularies that it can take."""
        return search_tables(self.merges) if is_searchable(self.merges) else None

    @cached_property
    def expansions(self) -> tuple[tuple[int, ...], ...]:
        """What every id stands for: coefficients in the plain format, bytes in the reference format."""
        if self.symbol_format == "plain":
            return tuple(tuple(ord(c) + self.min_token for c in text) for text in self.characters)
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        # A string with a character that stands for no byte is taken literally, as `tokenizers` decodes it.
        return tuple(
            tuple(byte_of[c] for c in text) if all(c in byte_of for c in text) else tuple(text.encode("utf-8"))
            for text in self.characters
        )

    @cached_property
    def expansion_arrays(self) -> tuple[IntArray, LongArray]:
        """What the ids stand for, one after the other, and where each begins and the last one ends."""
        sizes = [len(expansion) for expansion in self.expansions]
        values = np.array([value for expansion in self.expansions for value in expansion], np.int32)
        return values, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def decode(self, ids: IntArray, starts: LongArray, ends: LongArray, length: int) -> Decoded:
        """Ids int32, row n being ``ids[starts[n]:ends[n]]``, -> `length` coefficients a row; one thread."""
        values, bounds = self.expansion_arrays
        if self.symbol_format == "plain":
            out, counts, bad, whole = expand_rows(ids, starts, ends, values, bounds, length)
            return Decoded(out, counts, bad, None, whole)
        limit = 4 * length  # bytes that hold any chunk
        rows, sizes, bad, _ = expand_rows(ids, starts, ends, values, bounds, limit)
        out, counts, broken = from_byte_rows(rows, np.minimum(sizes, limit), self.min_token, length)
        for n in np.flatnonzero(sizes > limit).tolist():  # never a chunk; read whole, one by one, for the true count
            one = slice(n, n + 1)
            every, size, _, _ = expand_rows(ids, starts[one], ends[one], values, bounds, int(sizes[n]))
            out[n], counts[n], broken[n] = (a[0] for a in from_byte_rows(every, size, self.min_token, length))
        whole = bool(((counts == length) & (bad < 0) & (broken < 0)).all())
        return Decoded(out, counts, bad, broken, whole)

    # --- fit --------------------------------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        corpus: Corpus,
        *,
        vocab_size: int,
        symbol_format: SymbolFormat = "plain",
        headroom: float | None = None,
        num_threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Vocabulary:
        """Learn the merges of the coefficients in `corpus`.

        Args:
            corpus: rows of coefficients.
            vocab_size: ids at most.
            symbol_format: see the module.
            headroom: at least 0; the plain format's symbols reach this much further than the largest coefficient seen,
                on both sides (None: `DEFAULT_HEADROOM`), but never take more than a quarter of the free ids. The
                reference format has none, like the published fit.
            num_threads: None means all processors; the result does not depend on it.
            progress: called with 1 after each merge.

        Raises:
            TokenizerError: more symbols than `vocab_size`; the message says how many. A headroom below 0.
        """
        if headroom is not None and not 0 <= headroom < np.inf:
            raise TokenizerError(f"headroom must be a number of at least 0, not {headroom}")
        low, high = min(corpus.low, 0), max(corpus.high, 0)
        span = high - low + 1
        if span > vocab_size:
            raise TokenizerError(
                f"the coefficients {low} to {high} need {span} symbols, but vocab_size is {vocab_size}"
            )
        if span > FIRST_SURROGATE:
            raise TokenizerError(
                f"the coefficients {low} to {high} need {span} symbols; the limit is {FIRST_SURROGATE}"
            )
        if symbol_format == "plain":
            extra = int(np.ceil((DEFAULT_HEADROOM if headroom is None else headroom) * max(-low, high)))
            extra = min(extra, (vocab_size - span) // 8)
            extra = min(extra, max(0, FIRST_SURROGATE - span) // 2)
            low, span = low - extra, span + 2 * extra
            arena, lengths = corpus.sequences(low)
            row_length, characters = corpus.row_length, [chr(i) for i in range(span)]
        else:
            byte_ids, characters = _reference_alphabet(corpus, low, span)
            if len(characters) > vocab_size:
                raise TokenizerError(
                    f"the coefficients {low} to {high} need {len(characters)} characters in the reference format, "
                    f"but vocab_size is {vocab_size}"
                )
            packed = [pack_sequences(*to_byte_rows(block, low, byte_ids)) for block in corpus.blocks()]
            arena = np.concatenate([part for part, _ in packed])
            lengths = np.concatenate([sizes for _, sizes in packed])
            row_length = 4 * corpus.row_length
        merges = train_merges(
            arena,
            lengths,
            row_length=row_length,
            base_size=len(characters),
            vocab_size=vocab_size,
            min_frequency=MIN_FREQUENCY,
            num_threads=num_threads,
            progress=progress,
        )
        strings = tuple("".join(characters[i] for i in expansion) for expansion in merges.expansions)
        return cls(symbol_format, low, merges, strings)

    # --- tokenizer.json ---------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The content of `tokenizer.json`, which `tokenizers` and `transformers` read.

        The plain format has no pre-tokeniser; its decoder only joins, as the default puts spaces between tokens.
        """
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        reference = self.symbol_format == "reference"
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level if reference else None,
            "post_processor": byte_level | {"add_prefix_space": True, "trim_offsets": False} if reference else None,
            "decoder": byte_level | {"add_prefix_space": True} if reference else {"type": "Fuse"},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {text: i for i, text in enumerate(self.characters)},
                "merges": [
                    [self.characters[left], self.characters[right]]
                    for left, right in zip(self.merges.left.tolist(), self.merges.right.tolist(), strict=True)
                ],
            },
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], *, min_token: int, where: str) -> Vocabulary:
        """From the content of a `tokenizer.json`; `where` names the file in errors.

        Raises:
            TokenizerError: not a BPE vocabulary in one of the two formats.
        """
        model = content.get("model")
        if (
            not isinstance(model, Mapping)
            or not isinstance(model.get("vocab"), Mapping)
            or not isinstance(model.get("merges"), list)
        ):
            raise TokenizerError(f"{where} holds no BPE vocabulary (model.vocab and model.merges)")
        if model.get("type", "BPE") != "BPE":
            raise TokenizerError(f"{where} holds a {model['type']} model; FAST vocabularies are BPE")
        if content.get("added_tokens"):
            raise TokenizerError(
                f"{where} has added tokens, which no FAST vocabulary has: {str(content['added_tokens'])[:200]}"
            )
        if abs(min_token) > _LARGEST_MIN_TOKEN:
            raise TokenizerError(f"{where}: min_token {min_token} cannot be right")
        symbol_format = _format_of(content, where)
        ids: Mapping[str, int] = model["vocab"]
        if not ids or any(type(i) is not int for i in ids.values()):
            raise TokenizerError(f"{where}: model.vocab holds no ids, or ids that are no whole numbers")
        characters = tuple(sorted(ids, key=lambda text: ids[text]))
        if [ids[text] for text in characters] != list(range(len(characters))):
            raise TokenizerError(f"{where}: the ids are not 0 to {len(characters) - 1}")
        base_size = next((i for i, text in enumerate(characters) if len(text) != 1), len(characters))
        if any(len(text) == 1 for text in characters[base_size:]):
            raise TokenizerError(f"{where}: ids of single characters do not come before all others")
        if symbol_format == "plain" and any(ord(text) != i for i, text in enumerate(characters[:base_size])):
            raise TokenizerError(f"{where}: its single characters are not the code points 0 to {base_size - 1}")
        pairs = [_merge(pair, ids, where) for pair in model["merges"]]
        try:
            "".join(characters).encode("utf-8")
            vocabulary = cls(symbol_format, min_token, Merges.from_pairs(base_size, pairs), characters)
            expansions = vocabulary.merges.expansions
            vocabulary.low  # noqa: B018  # raises when nothing can be encoded
        except (TokenizerError, UnicodeEncodeError) as error:
            raise TokenizerError(f"{where}: {error}") from error
        expected = tuple("".join(characters[i] for i in expansion) for expansion in expansions)
        if expected != characters:
            raise TokenizerError(f"{where}: the merges do not make the {len(characters)} tokens of the vocabulary")
        return vocabulary


def _format_of(content: Mapping[str, Any], where: str) -> SymbolFormat:
    if content.get("normalizer") is not None:
        raise TokenizerError(f"{where} has a normalizer, which would change the symbols")
    pre_tokenizer = content.get("pre_tokenizer")
    if pre_tokenizer is None:
        return "plain"
    if (
        isinstance(pre_tokenizer, Mapping)
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space", True)
        and pre_tokenizer.get("use_regex", True)
    ):
        return "reference"
    raise TokenizerError(f"{where}: the pre_tokenizer {pre_tokenizer} is of neither FAST format")


def _merge(pair: str | Sequence[str], ids: Mapping[str, int], where: str) -> tuple[int, int, int]:
    """A merge as written by newer (a list) or older (joined by a space) versions of `tokenizers`."""
    try:
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        return ids[left], ids[right], ids[left + right]
    except (KeyError, ValueError, TypeError) as error:
        raise TokenizerError(f"{where}: the merge {pair!r} is not of two tokens of the vocabulary") from error


def _reference_alphabet(corpus: Corpus, low: int, span: int) -> tuple[IntArray, list[str]]:
    """The published fit's alphabet: chr(0) .. chr(span - 1), and the characters of all bytes that occur; sorted.

    Returns the index of each byte's character in it, int32 [256], and the alphabet.
    """
    seen = np.zeros(256, bool)
    identity = np.arange(256, dtype=np.int32)
    for block in corpus.blocks():
        rows, lengths = to_byte_rows(block, low, identity)
        kept = rows[np.arange(rows.shape[1]) < lengths[:, None]]
        seen[np.unique(kept[kept >= 0])] = True
    of_byte = byte_characters()
    alphabet = sorted({chr(i) for i in range(span)} | {of_byte[b] for b in np.flatnonzero(seen)})
    index = {character: i for i, character in enumerate(alphabet)}
    return np.array([index.get(character, -1) for character in of_byte], np.int32), alphabet
