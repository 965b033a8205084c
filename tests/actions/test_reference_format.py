"""Words against the ByteLevel pre-tokeniser of `tokenizers`; bytes back to coefficients against Python's UTF-8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from pi0_fast.actions.reference_format import (
    FIRST_SURROGATE,
    byte_characters,
    character_classes,
    from_byte_rows,
    to_byte_rows,
)

PEER = ByteLevel(add_prefix_space=False)
BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}
IDENTITY = np.arange(256, dtype=np.int32)

#: Letters of Unicode 16, which `tokenizers` knows from 0.22 on; older ones are not asked about them.
NEWEST = {0x1C89, 0x1C8A, 0xA7CB, 0xA7CC, 0xA7CD, 0xA7DA, 0xA7DB, 0xA7DC}
PEER_IS_OLD = len(PEER.pre_tokenize_str("a\u1c89")) > 1
ASKED = [code for code in range(FIRST_SURROGATE) if not (PEER_IS_OLD and code in NEWEST)]

#: Where the pattern decides: contraction letters, spaces, digits, signs, and edges of UTF-8 and of the letter table.
TELLING = st.sampled_from([ord(c) for c in "'stmdrevl ab Z17!-\t\n"] + [0, 31, 127, 128, 160, 170, 178, 0x7FF, 0x800])
UNUSUAL = st.sampled_from(
    [133, 0x85, 0x1680, 0x180E, 0x2007, 0x200B, 0x2028, 0x202F, 0x205F, 0x3000, 0x0300, 0x2160, 0xD7FF]
)
CODES = st.one_of(TELLING, TELLING, UNUSUAL, st.integers(0, 0x2FF), st.sampled_from(ASKED))


def words_of_peer(text: str) -> list[bytes]:
    return [bytes(BYTE_OF[c] for c in word) for word, _ in PEER.pre_tokenize_str(text)]


def words_of(rows: np.ndarray, min_token: int = 0) -> list[list[bytes]]:
    """Each row's words, from the bytes between its barriers."""
    out, lengths = to_byte_rows(np.ascontiguousarray(rows, np.int32), min_token, IDENTITY)
    result = []
    for row, length in zip(out, lengths, strict=True):
        ends = [*np.flatnonzero(row[:length] == -1).tolist(), int(length)]
        begins = [0, *(end + 1 for end in ends[:-1])]
        result.append([bytes(row[begin:end].tolist()) for begin, end in zip(begins, ends, strict=True)])
    return result


# --- the alphabet -------------------------------------------------------------------------------------------


def test_byte_characters_are_those_of_tokenizers() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert set(characters) == set(ByteLevel.alphabet())
    assert (characters[65], characters[32], characters[0], characters[255]) == ("A", "Ġ", "Ā", "ÿ")
    # Every byte that UTF-8 uses, through the peer itself.
    for code in [*range(256), *range(0x80, FIRST_SURROGATE, 61)]:
        assert b"".join(words_of_peer(chr(code))) == chr(code).encode()


# --- coefficients -> words ----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(st.lists(CODES, min_size=30, max_size=30), min_size=1, max_size=5), st.integers(-400, 400))
@example([[ord(c) for c in "it's we'll I'd 'tis  a\n\nb  \n c 12ab!?'re"[:30]]], -354)
def test_words_are_those_of_tokenizers(codes: list[list[int]], min_token: int) -> None:
    rows = np.array(codes) + min_token
    assert words_of(rows, min_token) == [words_of_peer("".join(map(chr, row))) for row in codes]


@given(st.lists(TELLING, min_size=1, max_size=12))
@settings(max_examples=400)
def test_short_rows_end_where_tokenizers_ends_them(codes: list[int]) -> None:
    assert words_of(np.array([codes])) == [words_of_peer("".join(map(chr, codes)))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("'s ab7", ["'s", " ab", "7"]),
        ("a  b", ["a", " ", " b"]),
        ("a \n b", ["a", " \n", " b"]),
        ("a \nb", ["a", " ", "\n", "b"]),
        ("a  ", ["a", "  "]),
        ("a'll!'re", ["a", "'ll", "!'", "re"]),
        (" 'm''d", [" '", "m", "''", "d"]),
        ("'", ["'"]),
        ("'l", ["'", "l"]),
    ],
)
def test_words_by_hand(text: str, words: list[str]) -> None:
    assert words_of(np.array([[ord(c) for c in text]])) == [[word.encode() for word in words]]


@pytest.mark.parametrize("template", ["a@a", "1@1", "!@!", " @ ", "\n@\n", " a@", "a @", "@\n@ ", "'@", "@'s", "@@  @"])
def test_every_code_point_in_many_contexts(template: str) -> None:
    """Also that letters, numbers and spaces do not depend on the Unicode version of this Python."""
    assert all(character_classes()[code] == character_classes()[ord("a")] for code in NEWEST)
    text = "".join(template.replace("@", chr(code)) for code in ASKED)
    rows = np.frombuffer(text.encode("utf-32-le"), np.int32)[None]
    assert words_of(rows) == [words_of_peer(text)]


def test_bytes_get_the_ids_that_are_asked_for() -> None:
    ids = np.arange(256, dtype=np.int32)[::-1].copy()
    out, lengths = to_byte_rows(np.array([[97, 0x416]], np.int32), 0, ids)
    assert lengths.tolist() == [3]
    assert out[0, :3].tolist() == [255 - 97, 255 - 0xD0, 255 - 0x96]


# --- bytes -> coefficients ----------------------------------------------------------------------------------


def back(rows: list[bytes], limit: int, min_token: int = 0) -> tuple[list[list[int]], list[int], list[int]]:
    width = max([1, *map(len, rows)])
    table = np.full((len(rows), width), 0x41, np.int32)  # padding that would be a character if it counted
    for n, row in enumerate(rows):
        table[n, : len(row)] = list(row)
    lengths = np.array([len(row) for row in rows], np.int64)
    out, totals, broken = from_byte_rows(table, lengths, min_token, limit)
    return out.tolist(), totals.tolist(), broken.tolist()


def expected(row: bytes, limit: int, min_token: int) -> tuple[list[int], int, int]:
    """By Python: all characters, or those before the first invalid byte."""
    try:
        text, broken = row.decode("utf-8"), -1
    except UnicodeDecodeError as error:
        text = row[: error.start].decode("utf-8")
        broken = len(text)
    kept = [ord(c) + min_token for c in text[:limit]]
    return kept + [0] * (limit - len(kept)), len(text), broken


#: Where UTF-8 has its limits.
EDGES = b"\x41\x7f\x80\xbf\xc0\xc1\xc2\xdf\xe0\xa0\x9f\xed\xef\xf0\x8f\x90\xf4\xf5\xff"
BYTES = st.one_of(
    st.binary(max_size=12),
    st.lists(st.sampled_from(EDGES), max_size=9).map(bytes),
    st.text(max_size=6).map(lambda text: text.encode()),
    st.text(min_size=1, max_size=6).flatmap(
        lambda text: st.integers(0, len(text.encode())).map(lambda end: text.encode()[:end])
    ),
)


@settings(max_examples=600)
@given(st.lists(BYTES, max_size=4), st.integers(1, 8), st.integers(-400, 10))
def test_the_way_back_is_pythons_utf8(rows: list[bytes], limit: int, min_token: int) -> None:
    out, totals, broken = back(rows, limit, min_token)
    assert list(zip(out, totals, broken, strict=True)) == [expected(row, limit, min_token) for row in rows]


@pytest.mark.parametrize(
    "invalid",
    [
        b"\x80", b"\xbf", b"\xff", b"\xfe",  # no first bytes
        b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf",  # long
        b"\xed\xa0\x80", b"\xed\xbf\xbf",  # surrogates
        b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80",  # beyond Unicode
        b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3a", b"\xe2\x82a", b"\xf0\x9f\x98a",  # truncated
    ],
)  # fmt: skip
def test_invalid_bytes_stop_the_row_at_their_coefficient(invalid: bytes) -> None:
    assert back(["é1".encode() + invalid + b"zz", b"ok"], 3) == ([[233, 49, 0], [111, 107, 0]], [2, 2], [2, -1])


@given(st.lists(st.integers(0, FIRST_SURROGATE - 1), min_size=1, max_size=20), st.integers(-400, 0))
def test_there_and_back(codes: list[int], min_token: int) -> None:
    rows = np.array([codes], np.int32) + min_token
    out, lengths = to_byte_rows(rows, min_token, IDENTITY)
    kept = out[0, : lengths[0]]
    joined = kept[kept >= 0][None]
    again, totals, broken = from_byte_rows(
        np.ascontiguousarray(joined), np.array([joined.shape[1]]), min_token, len(codes)
    )
    assert again.tolist() == rows.tolist()
    assert (totals.tolist(), broken.tolist()) == ([len(codes)], [-1])
