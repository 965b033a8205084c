"""Vocabularies fitted as `tokenizers` fits them, read and written as it does, and every damaged file refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import bpe_twins
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pi0_fast.actions.bpe_training import Corpus
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.actions.vocabulary import SymbolFormat, Vocabulary
from pi0_fast.types import TokenizerError

FORMATS: list[SymbolFormat] = ["plain", "reference"]


def corpus_of(rows: Any) -> Corpus:
    table = np.ascontiguousarray(rows, np.int32)
    corpus = Corpus(table.shape[1])
    corpus.add(table[: len(table) // 2])
    corpus.add(table[len(table) // 2 :])
    return corpus


def sample_rows(seed: int, rows: int = 60, size: int = 24, spread: float = 4.0) -> np.ndarray:
    """Like coefficients: mostly zero, few of them large."""
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(0, spread, (rows, size)) * (rng.random((rows, size)) < 0.4)).astype(np.int32)
    values[rows // 2 :, : size // 2] = values[: rows - rows // 2, : size // 2]
    return values


def strings_of(rows: np.ndarray, min_token: int) -> list[str]:
    return ["".join(chr(c - min_token) for c in row) for row in rows.tolist()]


def peer(vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(vocabulary.to_json()))


def reloaded(vocabulary: Vocabulary) -> Vocabulary:
    content = json.loads(json.dumps(vocabulary.to_json()))
    return Vocabulary.from_json(content, min_token=vocabulary.min_token, where="here")


def tokenizer_of(vocabulary: Vocabulary, length: int) -> FastTokenizer:
    """With H = 1 and scale 1 the coefficients are the values themselves."""
    return FastTokenizer(vocabulary, scale=1.0, time_horizon=1, action_dim=length, coefficient_range=(-60_000, 60_000))


def ids_of(vocabulary: Vocabulary, rows: Any) -> list[list[int]]:
    values = np.asarray(rows)
    return tokenizer_of(vocabulary, values.shape[1]).encode(values[:, None])


def decoded(vocabulary: Vocabulary, rows: list[list[int]], length: int) -> tuple[list[list[int]], list[str | None]]:
    """Coefficients (0 where there are too few), and what is wrong with each row."""
    values, info = tokenizer_of(vocabulary, length).decode(rows, on_error="pad", return_info=True)
    assert (values == np.rint(values)).all()
    return values[:, 0].astype(int).tolist(), list(info.problems)


# --- fit against tokenizers ---------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.6, 2.0, 30.0]), st.integers(0, 80))
def test_a_plain_fit_is_that_of_tokenizers(seed: int, spread: float, more: int) -> None:
    rows = sample_rows(seed, rows=20, size=12, spread=spread)
    span = int(max(rows.max(), 0)) - int(min(rows.min(), 0)) + 1
    vocabulary = Vocabulary.fit(corpus_of(rows), vocab_size=span + more, headroom=0)
    low = vocabulary.low
    assert (low, vocabulary.high) == (min(rows.min(), 0), max(rows.max(), 0))
    base = [chr(i) for i in range(span)]
    _, open_choice = bpe_twins.train((rows - low).tolist(), span, span + more)
    assume(not open_choice)
    pairs, strings = bpe_twins.peer_train(strings_of(rows, low), base, span + more)
    assert list(vocabulary.characters) == strings
    merges = vocabulary.merges
    assert list(zip(merges.left, merges.right, merges.result, strict=True)) == pairs


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.6, 4.0, 30.0, 120.0]), st.integers(0, 80))
def test_a_reference_fit_is_that_of_tokenizers(seed: int, spread: float, more: int) -> None:
    """The published fit: byte level with its pattern, initial alphabet chr(0) .. chr(max - min)."""
    rows = sample_rows(seed, rows=20, size=12, spread=spread)
    low, high = int(min(rows.min(), 0)), int(max(rows.max(), 0))
    span = high - low + 1
    strings = strings_of(rows, low)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2 * span + 200 + more,
        min_frequency=2,
        initial_alphabet=[chr(i) for i in range(span)],
        special_tokens=[],
        show_progress=False,
        max_token_length=10_000,
    )
    tokenizer.train_from_iterator(strings, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = Vocabulary.fit(corpus_of(rows), vocab_size=2 * span + 200 + more, symbol_format="reference")
    ours = vocabulary.to_json()["model"]
    assert ours["vocab"] == model["vocab"]
    assert ours["merges"] == [list(merge) for merge in model["merges"]]
    assert ids_of(vocabulary, rows) == [tokenizer.encode(text).ids for text in strings]


@pytest.mark.golden
def test_the_recorded_fit_again(shared: Path) -> None:
    """From its training chunks: the same vocabulary, merge by merge."""
    folder = shared / "golden" / "reference_fit_g1_h16"
    chunks = np.load(folder / "vectors.npz")["train_chunks"]
    recorded = json.loads((folder / "tokenizer.json").read_text())["model"]
    settings = json.loads((folder / "processor_config.json").read_text())
    fitted = FastTokenizer.fit(chunks, vocab_size=settings["vocab_size"], symbol_format="reference")
    ours = fitted.vocabulary.to_json()["model"]
    assert fitted.min_token == settings["min_token"]
    assert ours["vocab"] == recorded["vocab"]
    assert ours["merges"] == [list(m) if isinstance(m, list) else m.split(" ") for m in recorded["merges"]]


# --- what is encoded and decoded ----------------------------------------------------------------------------


@pytest.mark.parametrize("symbol_format", FORMATS)
@pytest.mark.parametrize("spread", [1.0, 12.0, 90.0])
def test_tokenizers_reads_the_file_and_finds_the_same(symbol_format: SymbolFormat, spread: float) -> None:
    rows = sample_rows(1, spread=spread)
    vocabulary = Vocabulary.fit(corpus_of(rows), vocab_size=1500, symbol_format=symbol_format)
    other = np.clip(sample_rows(2, spread=spread), vocabulary.low, vocabulary.high).astype(np.int32)
    vocabulary.clip_holes(other, np.zeros(len(other), np.int32))
    for part in (rows, other):
        texts, ids = strings_of(part, vocabulary.min_token), ids_of(vocabulary, part)
        assert ids == [peer(vocabulary).encode(text).ids for text in texts]
        assert [peer(vocabulary).decode(row) for row in ids] == texts
        assert decoded(vocabulary, ids, part.shape[1]) == (part.tolist(), [None] * len(part))


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_every_single_id_decodes_as_tokenizers_decodes_it(symbol_format: SymbolFormat) -> None:
    """Also the control characters of the reference alphabet, which stand for no byte and that nothing encodes to."""
    vocabulary = Vocabulary.fit(corpus_of(sample_rows(1, spread=60)), vocab_size=1500, symbol_format=symbol_format)
    reader, raw = peer(vocabulary), 0
    for i in range(vocabulary.size):
        text = reader.decode([i], skip_special_tokens=False)
        coefficients, problems = decoded(vocabulary, [[i]], len(text))
        if "�" in text:
            assert "break off inside coefficient" in str(problems[0])
        else:
            assert (coefficients, problems) == ([[ord(c) + vocabulary.min_token for c in text]], [None])
        raw += vocabulary.characters[i] < " "
    assert raw == 32


@pytest.mark.parametrize("symbol_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 69, 71, 83, 700])
def test_counts_are_true_however_many(symbol_format: SymbolFormat, tokens: int) -> None:
    vocabulary = Vocabulary.fit(corpus_of(sample_rows(1)), vocab_size=400, symbol_format=symbol_format)
    high = vocabulary.high
    row = ids_of(vocabulary, np.full((1, 70), high))[0]
    one = ids_of(vocabulary, [[high]])[0]
    coefficients, problems = decoded(vocabulary, [row, one * tokens, []], 70)
    assert problems[0] is None
    assert f"hold {tokens} coefficients, a chunk needs 70" in str(problems[1])
    assert "the 0 ids hold 0 coefficients, a chunk needs 70" in str(problems[2])
    kept = min(tokens, 70)
    assert coefficients == [[high] * 70, [high] * kept + [0] * (70 - kept), [0] * 70]


def test_a_token_that_ends_inside_a_coefficient() -> None:
    """Reference format: coefficients above 127 - |min_token| have two bytes, and one id may hold half of one."""
    rows = np.array([[-100, 100, 0, 90, 0, 0]] * 3)
    vocabulary = Vocabulary.fit(corpus_of(rows), vocab_size=230, symbol_format="reference")
    lead = vocabulary.characters.index("Ã")  # byte 0xC3 begins the code points 192 to 255
    zero = ids_of(vocabulary, [[0]])[0]
    rows_of_ids = [zero * count + [lead] for count in (1, 5, 6, 60)] + [[lead, *zero]]
    _, problems = decoded(vocabulary, rows_of_ids, 6)
    assert problems == [f"the ids break off inside coefficient {n} of 6" for n in (1, 5, 6, 60, 0)]


def test_holes_of_a_byte_alphabet_are_clipped_to_the_nearest() -> None:
    """Without the byte 0x85 the code points 133, 197, ... cannot be written."""
    rows = np.arange(-130, 131, dtype=np.int32).reshape(1, -1)
    rows = np.delete(rows, np.flatnonzero(rows[0] + 130 == 133), axis=1)
    rows = np.delete(rows, np.flatnonzero(rows[0] + 130 == 197), axis=1)
    vocabulary = Vocabulary.fit(corpus_of(rows.repeat(2, 0)), vocab_size=2000, symbol_format="reference")
    low = vocabulary.min_token
    assert low == -130
    reader = peer(vocabulary)
    known = {c for c in range(vocabulary.low, vocabulary.high + 1) if peer_writes(reader, vocabulary, c)}
    assert {133 + low, 197 + low} & known == set()
    wanted = np.array([[133 + low, 132 + low, 197 + low], [0, 0, 0]], np.int32)
    saturations = np.array([5, 0], np.int32)
    vocabulary.clip_holes(wanted, saturations)
    assert wanted.tolist() == [[132 + low, 132 + low, 196 + low], [0, 0, 0]]  # of two equally near the lower
    assert saturations.tolist() == [7, 0]
    every = np.arange(vocabulary.low, vocabulary.high + 1, dtype=np.int32)[None]
    moved, counted = every.copy(), np.zeros(1, np.int32)
    vocabulary.clip_holes(moved, counted)
    assert set(moved[0].tolist()) <= known
    assert counted[0] == sum(c not in known for c in every[0].tolist())
    ordered = np.array(sorted(known))
    for wanted_one, given_one in zip(every[0, ::7].tolist(), moved[0, ::7].tolist(), strict=True):
        assert abs(given_one - wanted_one) == np.abs(ordered - wanted_one).min()


def peer_writes(reader: Tokenizer, vocabulary: Vocabulary, coefficient: int) -> bool:
    """Whether `tokenizers` gets the coefficient through; it drops bytes that it has no symbol for."""
    text = chr(coefficient - vocabulary.min_token)
    return bool(reader.decode(reader.encode(text).ids) == text)


def test_headroom_reaches_beyond_what_was_seen() -> None:
    rows = np.array([[-8, 20, 0, 0], [-8, 20, 0, 0]])
    fitted = [
        (vocabulary.low, vocabulary.high)
        for headroom in (0, None, 0.5, 100)
        for vocabulary in [Vocabulary.fit(corpus_of(rows), vocab_size=129, headroom=headroom)]
    ]
    # 29 symbols seen, 100 ids free: 0; 0.25 x 20; 0.5 x 20; never more than 100 / 8 on a side.
    assert fitted == [(-8, 20), (-13, 25), (-18, 30), (-20, 32)]
    positive = Vocabulary.fit(corpus_of([[3, 4, 3, 4]]), vocab_size=50, headroom=0)
    assert (positive.low, positive.high) == (0, 4)  # zero can always be written


@pytest.mark.parametrize("headroom", [-0.1, np.nan, np.inf])
def test_headroom_that_is_no_share(headroom: float) -> None:
    with pytest.raises(TokenizerError, match="headroom must be a number of at least 0"):
        Vocabulary.fit(corpus_of([[1, 2]]), vocab_size=50, headroom=headroom)


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_more_symbols_than_ids(symbol_format: SymbolFormat) -> None:
    rows = np.arange(-250, 250, dtype=np.int32).reshape(5, 100)
    with pytest.raises(TokenizerError, match="-250 to 249 need 500 symbols, but vocab_size is 100"):
        Vocabulary.fit(corpus_of(rows), vocab_size=100, symbol_format=symbol_format)
    full = Vocabulary.fit(corpus_of(rows), vocab_size=700, symbol_format=symbol_format)
    assert full.size <= 700
    huge = np.array([[-30_000, 30_000]])
    with pytest.raises(TokenizerError, match="60001 symbols; the limit is 55296"):
        Vocabulary.fit(corpus_of(huge), vocab_size=65_000, symbol_format=symbol_format)


def test_the_reference_alphabet_may_need_more_ids_than_there_are_symbols() -> None:
    rows = np.arange(-80, 100, dtype=np.int32).reshape(1, -1)
    with pytest.raises(TokenizerError, match=r"need \d+ characters in the reference format, but vocab_size is 180"):
        Vocabulary.fit(corpus_of(rows), vocab_size=180, symbol_format="reference")


def test_alphabets_beyond_16_bits_and_of_the_largest_size() -> None:
    low = Vocabulary.fit(corpus_of([[-32_000]]), vocab_size=65_535)  # with headroom from -36,191
    assert low.low < -32_768
    assert decoded(low, ids_of(low, [[-32_000]]), 1) == ([[-32_000]], [None])
    wide = Vocabulary.fit(corpus_of([[-27_000, 27_000]]), vocab_size=65_535)
    assert wide.high - wide.low + 1 <= 0xD800
    assert peer(wide).encode(chr(54_000)).ids == [54_000]


# --- tokenizer.json -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_files_come_back(symbol_format: SymbolFormat) -> None:
    vocabulary = Vocabulary.fit(corpus_of(sample_rows(3)), vocab_size=300, symbol_format=symbol_format)
    assert reloaded(vocabulary) == vocabulary
    content = vocabulary.to_json()
    if symbol_format == "reference":  # older versions of tokenizers join a merge by a space
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        assert Vocabulary.from_json(content, min_token=vocabulary.min_token, where="here") == vocabulary
    written_by_peer = json.loads(peer(vocabulary).to_str())
    assert Vocabulary.from_json(written_by_peer, min_token=vocabulary.min_token, where="here") == vocabulary


def damages() -> list[tuple[str, Any]]:
    """Each takes the content of a good file and spoils it; the error's text is given first."""

    def put(*path: Any) -> Any:
        *keys, value = path

        def spoil(content: dict[str, Any]) -> Any:
            inner: Any = content
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value
            return content

        return spoil

    def rename(old: str, new: str) -> Any:
        def spoil(content: dict[str, Any]) -> Any:
            vocab = content["model"]["vocab"]
            vocab[new] = vocab.pop(old)
            return content

        return spoil

    def without(key: str) -> Any:
        return lambda content: {k: v for k, v in content.items() if k != key}

    return [
        ("no BPE vocabulary", without("model")),
        ("no BPE vocabulary", put("model", None)),
        ("no BPE vocabulary", put("model", [])),
        ("no BPE vocabulary", put("model", "vocab", ["a"])),
        ("no BPE vocabulary", put("model", "merges", None)),
        ("no BPE vocabulary", put("model", "merges", "ab")),
        ("holds a WordPiece model", put("model", "type", "WordPiece")),
        ("holds no ids", put("model", "vocab", {})),
        ("no whole numbers", put("model", "vocab", "\0", "0")),
        ("no whole numbers", put("model", "vocab", "\0", None)),
        ("no whole numbers", put("model", "vocab", "\0", 0.0)),
        ("no whole numbers", put("model", "vocab", "\0", True)),
        ("ids are not 0 to", put("model", "vocab", "\0", 10**6)),
        ("ids are not 0 to", put("model", "vocab", "\0", 1)),
        ("ids are not 0 to", put("model", "vocab", "\0", -1)),
        ("is not of two tokens", put("model", "merges", 0, ["\0"])),
        ("is not of two tokens", put("model", "merges", 0, ["\0", "\0", "\0"])),
        ("is not of two tokens", put("model", "merges", 0, ["nowhere", "\0"])),
        ("is not of two tokens", put("model", "merges", 0, "nowhere")),
        ("is not of two tokens", put("model", "merges", 0, None)),
        ("is not of two tokens", put("model", "merges", 0, 7)),
        ("is not of two tokens", put("model", "merges", 0, [["a"], {}])),
        ("here: ", put("model", "merges", [])),
        ("has added tokens", put("added_tokens", [{"id": 0, "content": "<s>"}])),
        ("has added tokens", put("added_tokens", {"<s>": 0})),
        ("has a normalizer", put("normalizer", {"type": "NFC"})),
        ("of neither FAST format", put("pre_tokenizer", {"type": "Whitespace"})),
        ("of neither FAST format", put("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True})),
        ("of neither FAST format", put("pre_tokenizer", "ByteLevel")),
        ("of neither FAST format", put("pre_tokenizer", 3)),
        ("here: ", rename("\1", "\ud800")),
        ("here: ", rename("\1", "\1\1\1\1\1\1\1\1")),
        ("here: ", rename("\1", "")),
    ]


@pytest.mark.parametrize("symbol_format", FORMATS)
@pytest.mark.parametrize("case", range(len(damages())))
def test_damaged_files_are_one_clear_error(symbol_format: SymbolFormat, case: int) -> None:
    text, spoil = damages()[case]
    vocabulary = Vocabulary.fit(corpus_of(sample_rows(3)), vocab_size=300, symbol_format=symbol_format)
    content = spoil(copy.deepcopy(vocabulary.to_json()))
    with pytest.raises(TokenizerError, match=text) as caught:
        Vocabulary.from_json(content, min_token=vocabulary.min_token, where="here")
    assert str(caught.value).startswith("here")


def test_plain_characters_must_be_the_code_points_in_order() -> None:
    vocabulary = Vocabulary.fit(corpus_of(sample_rows(3)), vocab_size=300)
    content = vocabulary.to_json()
    vocab = content["model"]["vocab"]
    vocab["\0"], vocab["\1"] = 1, 0
    with pytest.raises(TokenizerError, match="here: its single characters are not the code points 0 to"):
        Vocabulary.from_json(content, min_token=0, where="here")
    for min_token in (10**9, -(10**9)):
        with pytest.raises(TokenizerError, match=f"min_token {min_token} cannot be right"):
            Vocabulary.from_json(vocabulary.to_json(), min_token=min_token, where="here")


def test_a_byte_level_vocabulary_without_bytes() -> None:
    content = Vocabulary.fit(corpus_of([[0, 0]]), vocab_size=9, symbol_format="reference").to_json()
    content["model"] |= {"vocab": {"\1": 0, "\2": 1}, "merges": []}
    with pytest.raises(TokenizerError, match="here: no coefficient can be encoded"):
        Vocabulary.from_json(content, min_token=0, where="here")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 300), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(FORMATS), JSON)
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject, symbol_format: SymbolFormat, value: Any) -> None:
    """Never another exception than TokenizerError; and what is read can encode and decode."""
    vocabulary = Vocabulary.fit(
        corpus_of([[0, 1, 0, 1], [0, 1, 1, 0]]), vocab_size=12, symbol_format=symbol_format, headroom=0
    )
    content = json.loads(json.dumps(vocabulary.to_json()))
    inner: Any = content
    while True:
        keys = sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(inner[key], (dict, list)) and len(inner[key]) > 0
        if not (deeper and data.draw(st.booleans())):
            inner[key] = value
            break
        inner = inner[key]
    try:
        read = Vocabulary.from_json(content, min_token=0, where="here")
    except TokenizerError:
        return
    assert decoded(read, ids_of(read, [[read.low] * 5]), 5) == ([[read.low] * 5], [None])
