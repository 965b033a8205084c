"""Training against the BpeTrainer of `tokenizers` and an obvious twin; any number of threads; rows that grow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bpe_twins
import numpy as np
import pytest
from bpe_twins import LETTERS, Triple
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pi0_fast.actions import bpe_training
from pi0_fast.actions.bpe import MAX_VOCABULARY
from pi0_fast.actions.bpe_training import Corpus, pack_sequences, train_merges
from pi0_fast.types import TokenizerError, UsageError


def rows_of(base_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Rows of long runs, repeated pieces and barriers, which make self-overlaps and strings that arise twice."""
    piece = st.one_of(
        st.tuples(st.integers(0, base_size - 1), st.integers(1, 9)).map(lambda one: [one[0]] * one[1]),
        st.lists(st.integers(0, base_size - 1), min_size=1, max_size=3).map(lambda part: part * 3),
        st.just([-1]),
    )
    row = st.lists(piece, min_size=1, max_size=6).map(lambda parts: [i for part in parts for i in part])
    return st.lists(row, min_size=1, max_size=8)


def trained(rows: list[list[int]], base_size: int, vocab_size: int, num_threads: int = 1) -> list[Triple]:
    lengths = np.array([len(row) for row in rows], np.int32)
    table = np.full((len(rows), int(lengths.max())), 1, np.int32)
    for n, row in enumerate(rows):
        table[n, : len(row)] = row
    merges = train_merges(
        *pack_sequences(table, lengths),
        row_length=table.shape[1],
        base_size=base_size,
        vocab_size=vocab_size,
        num_threads=num_threads,
    )
    assert merges.expansions  # raises if the merges contradict each other
    return list(zip(merges.left.tolist(), merges.right.tolist(), merges.result.tolist(), strict=True))


@contextmanager
def cramped() -> Iterator[None]:
    """Threads for every merge, room for one row at a time, and lists that are full after one row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe_training, "_HEAVY", 0)
        patch.setattr(bpe_training, "_RESERVED_ROWS", 1)
        patch.setattr(bpe_training, "_RESERVED_SHARE", 1 << 40)
        patch.setattr(bpe_training, "_LONGEST_FOUND", 0)
        roomy = bpe_training._Trainer._workspace

        def tight(self: Any) -> Any:
            scratch, changes, seen, found = roomy(self)
            return scratch, changes, seen, found[: 2 * self.vocab_size + 2]

        patch.setattr(bpe_training._Trainer, "_workspace", tight)
        yield


# --- against the twins --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.data(), st.integers(1, 4), st.integers(0, 24))
def test_merges_are_those_of_tokenizers_and_of_the_twin(data: st.DataObject, base_size: int, more: int) -> None:
    rows = data.draw(rows_of(base_size))
    ours = trained(rows, base_size, base_size + more)
    twin, open_choice = bpe_twins.train(rows, base_size, base_size + more)
    assert ours == twin
    assume(not open_choice)
    words = [word for row in rows for word in bpe_twins.words_of(row)]
    assume(words)
    pairs, strings = bpe_twins.peer_train(words, LETTERS[:base_size], base_size + more)
    assert ours == pairs
    assert bpe_twins.strings_of(LETTERS[:base_size], ours) == strings


@settings(max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(0, 24), st.integers(1, 3))
def test_any_number_of_threads_in_little_room(data: st.DataObject, base_size: int, more: int, threads: int) -> None:
    rows = data.draw(rows_of(base_size))
    with cramped():
        ours = trained(rows, base_size, base_size + more, threads)
    assert ours == bpe_twins.train(rows, base_size, base_size + more)[0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_that_grow_do_not_run_into_each_other(threads: int) -> None:
    """Long runs that every merge cuts into more runs: rows move to the end of the arena again and again."""
    rng = np.random.default_rng(0)
    rows = [
        [i for _ in range(40) for i in [0] * int(rng.integers(1, 12)) + [int(rng.integers(1, 4))]] for _ in range(40)
    ]
    rows += [([0] * 4 + [1] * 4) * int(rng.integers(3, 60)) for _ in range(40)]  # (0, 1) makes half as many runs again
    twin, _ = bpe_twins.train(rows, 4, 60)
    with cramped():
        assert trained(rows, 4, 60, threads) == twin


def test_a_row_that_grows_takes_no_more_room_than_there_is() -> None:
    """Whatever the room: either the row is not begun, or it fits with what is kept for later."""
    row = np.array([([0] * 4 + [1] * 4) * 20], np.int32)  # 40 runs, 60 after (0, 1) has become 2
    packed, lengths = pack_sequences(row, np.array([160], np.int32))
    started = []
    for room in range(120):
        arena = np.concatenate([packed, np.full(room, 99, np.uint32), np.full(50, 77, np.uint32)])
        start, length, capacity = np.zeros(1, np.int64), lengths.copy(), lengths.copy()
        reserve = np.array([40, 40 + room])
        stopped = bpe_training._merge_rows(
            np.zeros(1, np.int32), 0, arena, start, length, capacity, reserve, 0, 1, 2, np.empty(400, np.uint32),
            np.zeros((4, 3), np.int64), np.full(6, -1, np.int32), np.empty((99, 2), np.int64), np.zeros(1, np.int64),
        )  # fmt: skip
        assert (arena[40 + room :] == 77).all()
        if stopped:
            assert start[0] == 40
            assert start[0] + capacity[0] == reserve[0] <= reserve[1]
            assert length[0] == 60
        else:
            assert (reserve[0], length[0]) == (40, 40)
        started.append(bool(stopped))
    assert started == sorted(started)
    assert started[-1]


def test_the_room_for_rows_that_grow_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 threads at every merge the arena takes little more than with one, and the lists stay bounded."""
    trainers: list[Any] = []
    init = bpe_training._Trainer.__init__

    def remembered(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        trainers.append(self)

    monkeypatch.setattr(bpe_training._Trainer, "__init__", remembered)
    monkeypatch.setattr(bpe_training, "_HEAVY", 0)
    rng = np.random.default_rng(1)
    rows = np.where(rng.random((3000, 60)) < 0.7, 0, rng.integers(0, 30, (3000, 60))).astype(np.int32)
    results = []
    for threads in (1, 8):
        corpus = Corpus(60)
        corpus.add(rows)
        results.append(
            train_merges(*corpus.sequences(0), row_length=60, base_size=30, vocab_size=300, num_threads=threads)
        )
    assert results[0] == results[1]
    one, eight = trainers
    assert len(eight.arena) <= 1.3 * len(one.arena)
    assert all(len(workspace[3]) <= 2 * bpe_training._LONGEST_FOUND for workspace in eight._workspaces)


def test_no_pair_twice_no_merge() -> None:
    assert trained([[0, 1, 2]], 3, 100) == []
    assert trained([[0]], 1, 100) == []
    assert trained([[-1, -1]], 1, 100) == []
    assert trained([[0, 1], [1, 0], [0, -1, 0], [1, -1, 1]], 2, 100) == []


def test_ties_go_to_the_smaller_pair() -> None:
    assert trained([[2, 1], [0, 3], [2, 1], [0, 3]], 4, 5) == [(0, 3, 4)]


def test_a_run_counts_every_pair_of_neighbours() -> None:
    """0 0 0 has (0, 0) twice, as `tokenizers` counts, though only one can be merged."""
    assert trained([[0, 0, 0]], 1, 3) == [(0, 0, 1)]


def test_progress_counts_merges() -> None:
    calls: list[int] = []
    rows = np.array([[0, 0, 1, 0, 0]] * 2, np.int32)
    train_merges(
        *pack_sequences(rows, np.array([5, 5], np.int32)),
        row_length=5, base_size=2, vocab_size=10, progress=calls.append,
    )  # fmt: skip
    assert calls == [1, 1, 1]


def test_vocabulary_sizes_that_are_refused() -> None:
    rows = np.zeros((2, 3), np.int32)
    for base_size, vocab_size in ((5, 4), (2, MAX_VOCABULARY + 1)):
        arena, lengths = pack_sequences(rows, np.array([3, 3], np.int32))
        with pytest.raises(TokenizerError, match=f"vocab_size {vocab_size} must be from {base_size}"):
            train_merges(arena, lengths, row_length=3, base_size=base_size, vocab_size=vocab_size)
    with pytest.raises(UsageError, match="threads must be at least 1"):
        trained([[0, 0]], 1, 3, 0)


# --- the corpus ---------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.lists(
            st.lists(
                st.lists(st.sampled_from([0, 0, 0, 1, -3, 32766, -32768]), min_size=size, max_size=size), max_size=4
            ),
            max_size=4,
        ).map(lambda blocks: (size, blocks))
    )
)
def test_the_corpus_gives_back_what_was_added(drawn: tuple[int, list[list[list[int]]]]) -> None:
    size, blocks = drawn
    corpus = Corpus(size)
    for block in blocks:
        corpus.add(np.array(block, np.int32).reshape(-1, size))
    kept = [block for block in blocks if block]
    assert [block.tolist() for block in corpus.blocks()] == kept
    everything = [i for block in kept for row in block for i in row]
    assert corpus.rows == sum(len(block) for block in kept)
    if everything:
        assert (corpus.low, corpus.high) == (min(everything), max(everything))


def test_sequences_number_symbols_from_the_base() -> None:
    corpus = Corpus(4)
    corpus.add(np.array([[-3, -3, 5, -3]], np.int32))
    for base in (-3, -20_000, -40_000):
        arena, lengths = corpus.sequences(base)
        runs = [(int(word) >> 16, int(word) & 0xFFFF) for word in arena[: lengths[0]]]
        assert runs == [(-3 - base, 2), (5 - base, 1), (-3 - base, 1)]


def test_a_row_of_one_long_run() -> None:
    corpus = Corpus(MAX_VOCABULARY)
    corpus.add(np.zeros((2, MAX_VOCABULARY), np.int32))
    merges = train_merges(*corpus.sequences(0), row_length=MAX_VOCABULARY, base_size=1, vocab_size=8)
    assert merges.widths.tolist() == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [block.shape for block in corpus.blocks()] == [(2, MAX_VOCABULARY)]


def test_what_a_corpus_refuses() -> None:
    for size in (0, MAX_VOCABULARY + 1):
        with pytest.raises(TokenizerError, match="not supported"):
            Corpus(size)
    corpus = Corpus(2)
    for symbol in (32767, -32769):
        with pytest.raises(TokenizerError, match="do not fit into 16 bits"):
            corpus.add(np.array([[0, symbol]], np.int32))
    assert corpus.rows == 0


def test_a_corpus_that_is_full_is_thinned_out_evenly() -> None:
    corpus = Corpus(10, max_runs=400)
    random = np.random.default_rng(0)
    pieces = [random.integers(0, 50, (4, 10)).astype(np.int32) for _ in range(64)]
    for piece in pieces:
        corpus.add(piece)
    assert corpus.rows + corpus.dropped == 256
    kept = np.concatenate(list(corpus.blocks()))
    assert len(kept) == corpus.rows
    assert 100 < len(kept) * 9 <= 400 + 40
    every = len(pieces) // (len(kept) // 4)
    np.testing.assert_array_equal(kept, np.concatenate(pieces[::every]))
    assert (corpus.low, corpus.high) == (min(p.min() for p in pieces), max(p.max() for p in pieces))
    whole = Corpus(10)
    for piece in pieces:
        whole.add(piece)
    assert (whole.rows, whole.dropped) == (256, 0)
