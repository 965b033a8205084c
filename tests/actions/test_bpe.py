"""Encoding and expanding against `tokenizers` and an obvious twin, above all where two merges give one string."""

from __future__ import annotations

from typing import Any

import bpe_twins
import numpy as np
import pytest
from bpe_twins import LETTERS, Triple
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pi0_fast.actions.bpe import MAX_VOCABULARY, Merges, encode_rows, expand_rows
from pi0_fast.actions.bpe_training import pack_sequences, train_merges
from pi0_fast.types import TokenizerError


@st.composite
def vocabularies(draw: st.DrawFn) -> tuple[int, list[Triple]]:
    """A few base ids and merges of any ids there are; strings that arise twice share an id, pairs may stand twice."""
    base_size = draw(st.integers(1, 4))
    expansions = [(i,) for i in range(base_size)]
    pairs: list[Triple] = []
    for _ in range(draw(st.integers(0, 14))):
        left = draw(st.integers(0, len(expansions) - 1))
        right = draw(st.integers(0, len(expansions) - 1))
        expansion = expansions[left] + expansions[right]
        if len(expansion) > 9:
            continue
        if expansion not in expansions:
            expansions.append(expansion)
        pairs.append((left, right, expansions.index(expansion)))
    return base_size, pairs


def rows_of(base_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Rows with long runs of one id, and barriers."""
    run = st.tuples(st.integers(-1, base_size - 1), st.integers(1, 12)).map(lambda one: [one[0]] * one[1])
    row = st.lists(run, max_size=8).map(lambda runs: [i for part in runs for i in part])
    return st.lists(row, min_size=1, max_size=5)


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    table = np.zeros((len(rows), max(1, int(lengths.max()))), np.int32)  # the padding is a valid id: it must not count
    for n, row in enumerate(rows):
        table[n, : len(row)] = row
    return table, lengths


def encoded(base_size: int, pairs: list[Triple], rows: list[list[int]]) -> list[list[int]]:
    table, lengths = padded(rows)
    ids, sizes = encode_rows(Merges.from_pairs(base_size, pairs), table, lengths)
    return [ids[n, : sizes[n]].tolist() for n in range(len(rows))]


def expected(base_size: int, pairs: list[Triple], rows: list[list[int]]) -> list[list[int]]:
    """By `tokenizers`, word by word."""
    peer = bpe_twins.peer_of(LETTERS[:base_size], pairs)
    return [[i for word in bpe_twins.words_of(row) for i in peer.encode(word).ids] for row in rows]


# --- encode -------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(st.data(), vocabularies())
def test_ids_are_those_of_tokenizers_and_of_the_twin(data: st.DataObject, vocabulary: tuple[int, list[Triple]]) -> None:
    base_size, pairs = vocabulary
    rows = data.draw(rows_of(base_size))
    ours = encoded(base_size, pairs, rows)
    assert ours == [bpe_twins.encode(pairs, row) for row in rows]
    assert ours == expected(base_size, pairs, rows)


TWICE = [
    [(0, 0, 1), (1, 0, 2), (0, 1, 2)],
    [(0, 0, 1), (0, 1, 2), (1, 0, 2)],
    [(0, 0, 1), (0, 1, 2), (1, 1, 3), (1, 0, 2)],
    [(0, 0, 1), (1, 1, 2), (0, 1, 3), (1, 0, 3), (3, 0, 2)],
    # 3 = 000 is used by rank 1 before rank 2 makes it a second time: pairs must then be merged one by one.
    [(0, 0, 1), (0, 1, 2), (2, 0, 3), (1, 1, 3), (3, 1, 4), (1, 0, 2)],
    [(0, 0, 1), (1, 0, 2), (2, 2, 3), (1, 1, 4), (4, 1, 3), (2, 0, 4)],
    [(0, 1, 2), (1, 0, 3), (2, 0, 4), (0, 3, 4), (4, 1, 5), (2, 2, 5), (5, 5, 6)],
]


@pytest.mark.parametrize("pairs", TWICE)
def test_two_merges_into_one_id_on_every_short_row(pairs: list[Triple]) -> None:
    base_size = min(result for _, _, result in pairs)
    rows = [
        [(number // base_size**k) % base_size for k in range(size)]
        for size in range(1, 13 if base_size == 2 else 33)
        for number in range(base_size**size)
    ]
    ours = encoded(base_size, pairs, rows)
    assert ours == [bpe_twins.encode(pairs, row) for row in rows]
    assert ours == expected(base_size, pairs, rows)


def test_runs_are_swept_only_where_that_is_exact() -> None:
    # Rank 0 uses id 2 (= 00), which rank 1 makes: 0 0 0 0 0 1 -> 2 0 0 0 1 must first become 3 (2 0) and so on.
    pairs = [(2, 0, 3), (0, 0, 2), (3, 1, 4)]
    with pytest.raises(TokenizerError, match="contradicts the merges before it"):
        _ = Merges.from_pairs(2, pairs).expansions
    # The same with an id that a lower rank makes first, so that the order is a valid one.
    pairs = [(0, 0, 2), (0, 2, 3), (3, 0, 4), (2, 2, 4), (2, 0, 3)]
    merges = Merges.from_pairs(2, pairs)
    assert merges.table[2].tolist() == [True, True, True, True, False]
    for size in range(1, 30):
        assert encoded(2, pairs, [[0] * size]) == [bpe_twins.encode(pairs, [0] * size)]


def test_a_barrier_keeps_neighbours_apart() -> None:
    pairs = [(0, 0, 2), (2, 2, 3), (1, 0, 4)]
    assert encoded(2, pairs, [[0, 0, -1, 0, 0], [1, -1, 0], [-1, -1], [1, 0, 0, -1, -1, 0]]) == [
        [2, 2],
        [1, 0],
        [],
        [1, 2, 0],
    ]


def test_rows_of_many_lengths_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(5)
    pairs = [(0, 0, 3), (3, 3, 4), (1, 2, 5), (5, 0, 6), (4, 4, 7), (7, 1, 8), (6, 6, 9)]
    rows = [rng.choice(3, p=[0.8, 0.1, 0.1], size=size).tolist() for size in (200, 1, 0, 57, 199, 2)]
    assert encoded(3, pairs, rows) == [bpe_twins.encode(pairs, row) for row in rows]


def test_the_longest_row_and_one_too_long() -> None:
    merges = Merges.from_pairs(1, [(0, 0, 1), (1, 1, 2)])
    ids, sizes = encode_rows(merges, np.zeros((1, MAX_VOCABULARY), np.int32))
    assert sizes.tolist() == [16385]  # 16,383 fours, then 2 and 1
    assert ids[0, 16380:16385].tolist() == [2, 2, 2, 1, 0]
    wide = np.zeros((2, MAX_VOCABULARY + 5), np.int32)
    encode_rows(merges, wide, np.array([3, MAX_VOCABULARY], np.int32))
    with pytest.raises(TokenizerError, match="row 1 has 65536 symbols"):
        encode_rows(merges, wide, np.array([3, MAX_VOCABULARY + 1], np.int32))


def test_many_merges_fill_the_hash_table() -> None:
    """Several thousand pairs, so that slots collide; ids against the twin."""
    rng = np.random.default_rng(2)
    base_size = 64
    pairs = [
        (int(left), int(right), base_size + n)
        for n, (left, right) in enumerate(rng.permutation([(a, b) for a in range(64) for b in range(64)])[:3000])
    ]
    rows = rng.integers(0, base_size, (20, 40)).astype(np.int32)
    ids, sizes = encode_rows(Merges.from_pairs(base_size, pairs), rows)
    for n, row in enumerate(rows.tolist()):
        assert ids[n, : sizes[n]].tolist() == bpe_twins.encode(pairs, row)


# --- the vocabulary -----------------------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    rows = np.array([[0, 0, 1, 0, 0]] * 2, np.int32)
    arena, lengths = pack_sequences(rows, np.array([5, 5], np.int32))
    merges = train_merges(arena, lengths, row_length=5, base_size=2, vocab_size=10)
    assert list(zip(merges.left, merges.right, merges.result, strict=True)) == [(0, 0, 2), (1, 2, 3), (2, 3, 4)]
    ids, sizes = encode_rows(merges, rows[:1])
    assert ids[0, : sizes[0]].tolist() == [4]


def test_widths_and_expansions() -> None:
    merges = Merges.from_pairs(2, [(0, 1, 2), (2, 0, 3), (1, 0, 4), (0, 4, 3)])
    assert merges.vocab_size == 5
    assert merges.expansions == [(0,), (1,), (0, 1), (0, 1, 0), (1, 0)]
    assert merges.widths.tolist() == [1, 1, 2, 3, 2]
    assert Merges.from_pairs(3, []).expansions == [(0,), (1,), (2,)]
    assert encoded(3, [], [[2, 0, 0]]) == [[2, 0, 0]]


def test_equality_is_of_all_parts() -> None:
    one = Merges.from_pairs(2, [(0, 1, 2)])
    assert one == Merges.from_pairs(2, [(0, 1, 2)])
    assert one != Merges.from_pairs(2, [(1, 0, 2)])
    assert one != Merges.from_pairs(2, [])
    assert one != "merges"


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1, 0)],  # a base id
        [(0, 1, 2), (1, 0, 2)],  # two strings, one id
        [(2, 0, 3), (0, 1, 2)],  # used before it is made
        [(0, 1, 3)],  # an id that nothing makes
    ],
)
def test_merges_that_contradict(pairs: list[Triple]) -> None:
    with pytest.raises(TokenizerError, match=r"contradicts the merges before it|produced by no merge"):
        _ = Merges.from_pairs(2, pairs).expansions


def test_limits() -> None:
    Merges.from_pairs(MAX_VOCABULARY, [])
    with pytest.raises(TokenizerError, match="65536 ids exceeds the limit"):
        Merges.from_pairs(MAX_VOCABULARY + 1, [])
    many = np.zeros(MAX_VOCABULARY + 1, np.int32)
    with pytest.raises(TokenizerError, match="65536 merges exceed the limit"):
        Merges(2, many, many, many + 2)


# --- expand -------------------------------------------------------------------------------------------------


def expand(rows: list[list[int]], limit: int) -> tuple[Any, ...]:
    """Ids 0, 1, 2 stand for 7; nothing; 8 9."""
    flat = np.array([i for row in rows for i in row], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    values, bounds = np.array([7, 8, 9], np.int32), np.array([0, 1, 1, 3])
    found = expand_rows(flat, offsets[:-1], offsets[1:], values, bounds, limit)[:3]
    return tuple(array.tolist() for array in found)


def test_expanding_short_exact_and_long_rows() -> None:
    assert expand([[0, 2, 1], [2, 2], [], [0]], 3) == (
        [[7, 8, 9], [8, 9, 8], [0, 0, 0], [7, 0, 0]],
        [3, 4, 0, 1],
        [-1] * 4,
    )
    assert expand([], 3) == ([], [], [])


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_vocabulary_is_located_in_its_row(bad: int) -> None:
    out, totals, where = expand([[0, 0], [2, bad, 0, bad], [bad]], 4)
    assert where == [-1, 1, 0]
    assert totals == [2, 2, 0]
    assert out == [[7, 7, 0, 0], [8, 9, 0, 0], [0, 0, 0, 0]]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4), st.integers(1, 9))
@example([[1, 1]], 1)
def test_expanding_is_concatenation(rows: list[list[int]], limit: int) -> None:
    stands_for = {0: [7], 1: [], 2: [8, 9]}
    whole = [[value for i in row for value in stands_for[i]] for row in rows]
    out, totals, bad = expand(rows, limit)
    assert totals == [len(row) for row in whole]
    assert out == [(row + [0] * limit)[:limit] for row in whole]
    assert bad == [-1] * len(rows)
