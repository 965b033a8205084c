"""The search finds exactly the byte-pair encoding, for every vocabulary that it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from pi0_fast.actions import segmentation
from pi0_fast.actions.bpe import Merges, encode_rows
from pi0_fast.actions.segmentation import is_searchable, search_tables, segment_rows


@st.composite
def vocabularies(draw: st.DrawFn) -> Merges:
    """Random merges over two to four symbols, each of a new expansion."""
    base_size = draw(st.integers(2, 4))
    expansions: list[tuple[int, ...]] = [(i,) for i in range(base_size)]
    triples: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(0, 14))):
        left, right = (draw(st.integers(0, len(expansions) - 1)) for _ in range(2))
        expansion = expansions[left] + expansions[right]
        if expansion not in expansions and len(expansion) <= 12:
            triples.append((left, right, len(expansions)))
            expansions.append(expansion)
    return Merges.from_pairs(base_size, triples)


def rows_of(flat: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    ends = np.cumsum(lengths)
    return [flat[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


@settings(deadline=None, max_examples=300)
@given(merges=vocabularies(), data=st.data())
def test_equals_tokenizers_on_random_vocabularies(merges: Merges, data: st.DataObject) -> None:
    assert is_searchable(merges)
    symbol = st.integers(0, merges.base_size - 1)
    rows = data.draw(st.lists(st.lists(symbol, min_size=24, max_size=24), min_size=1, max_size=4))
    texts = ["".join(chr(97 + s) for s in expansion) for expansion in merges.expansions]
    pairs = [
        (texts[left], texts[right]) for left, right in zip(merges.left.tolist(), merges.right.tolist(), strict=True)
    ]
    oracle = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, pairs))
    expected = [oracle.encode("".join(chr(97 + s) for s in row)).ids for row in rows]
    assert rows_of(*segment_rows(search_tables(merges), np.array(rows, np.int32))) == expected


@settings(deadline=None, max_examples=100)
@given(merges=vocabularies(), data=st.data())
def test_barriers_and_lengths_as_in_replaying_merges(merges: Merges, data: st.DataObject) -> None:
    symbol = st.integers(-1, merges.base_size - 1)
    rows = np.array(data.draw(st.lists(st.lists(symbol, min_size=15, max_size=15), min_size=1, max_size=5)), np.int32)
    lengths = np.array(data.draw(st.lists(st.integers(0, 15), min_size=len(rows), max_size=len(rows))), np.int32)
    ids, counts = encode_rows(merges, rows, lengths)
    expected = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
    assert rows_of(*segment_rows(search_tables(merges), rows, lengths)) == expected


def test_what_is_remembered_and_what_is_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    merges = Merges.from_pairs(2, [(0, 0, 2), (2, 2, 3), (2, 1, 4), (1, 3, 5)])
    rows = np.random.default_rng(0).integers(0, 2, (200, 40)).astype(np.int32)
    remembered = segment_rows(search_tables(merges), rows)
    monkeypatch.setattr(segmentation, "_LARGEST_REMEMBERED", 0)
    tables = search_tables(merges)
    assert len(tables.known) == 0
    for one, other in zip(remembered, segment_rows(tables, rows), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_example_of_the_file() -> None:
    merges = Merges.from_pairs(2, [(0, 0, 2), (2, 2, 3)])
    ids, lengths = segment_rows(search_tables(merges), np.array([[0, 0, 0], [0, 1, 0]], np.int32))
    assert ids.tolist() == [2, 0, 0, 1, 0]
    assert lengths.tolist() == [2, 3]


def test_a_vocabulary_with_two_merges_into_one_id_is_left_to_replaying() -> None:
    assert not is_searchable(Merges.from_pairs(1, [(0, 0, 1), (1, 0, 2), (0, 1, 2)]))


def test_a_trie_larger_than_the_first_table() -> None:
    """Thousands of nodes: the table grows until they fit."""
    random = np.random.default_rng(1)
    triples, size = [], 40
    seen = {(i,) for i in range(40)}
    expansions = [(i,) for i in range(40)]
    while size < 1200:
        left, right = random.integers(0, size, 2)
        expansion = expansions[left] + expansions[right]
        if expansion not in seen and len(expansion) < 20:
            seen.add(expansion)
            expansions.append(expansion)
            triples.append((int(left), int(right), size))
            size += 1
    merges = Merges.from_pairs(40, triples)
    tables = search_tables(merges)
    assert tables.narrow[0] > 1 << 12  # slots of the trie
    rows = np.concatenate([np.array(e, np.int32) for e in expansions if len(e) > 1])[:3000].reshape(60, 50)
    ids, counts = encode_rows(merges, rows)
    expected = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
    assert rows_of(*segment_rows(tables, rows)) == expected
