"""Training of byte-pair merges over integers, as `tokenizers` trains them, in bounded memory and seconds.

`Corpus` stores sequences of symbols as runs; `train_merges` finds the pairs of neighbours worth merging. The order of
merges, and how pairs are counted and queued, follow the BpeTrainer of Hugging Face's `tokenizers`, so that the result
is the same; the longest-token limit of that trainer is left out, and so are its special tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, is_compiled, kernel, resolve_threads, run_rows
from pi0_fast.actions.bpe import MAX_VOCABULARY, IntArray, Merges
from pi0_fast.types import TokenizerError

PackedArray = npt.NDArray[np.uint32]

_BARRIER = np.uint32(0xFFFF)

#: A merge is spread over threads when its rows have more runs than this: waking a thread costs as much as some ten
#: thousand.
_HEAVY = 60_000
#: A thread takes room for rows that outgrow their place this many rows at a time, or this part of the arena if more.
_RESERVED_ROWS, _RESERVED_SHARE = 8, 512
#: Pairs wait aside until no pair of this many times their count is left.
_THRESHOLD_STEP = 8
#: Won pairs that one pass may note, once the list has grown; 16 bytes each.
_LONGEST_FOUND = 1 << 20


@kernel
def _pack_rows(rows, lengths, shift, out, packed_lengths):  # type: ignore[no-untyped-def]
    written = 0
    for n in range(len(rows)):
        begin = written
        for i in range(lengths[n]):
            token = _BARRIER if rows[n, i] == -1 and shift == 0 else np.uint32(rows[n, i] + shift)
            if written > begin and (out[written - 1] >> np.uint32(16)) == token:
                out[written - 1] += np.uint32(1)
            else:
                out[written] = (token << np.uint32(16)) | np.uint32(1)
                written += 1
        packed_lengths[n] = written - begin
    return written


@dataclass(frozen=True)
class PackedRows:
    """Some rows as runs: uint32 runs of all of them, how many each row has, and the smallest and largest symbol."""

    runs: PackedArray
    lengths: IntArray
    low: int
    high: int


class Corpus:
    """Rows of symbols to train on, all of one length, as runs: 32 bits hold a symbol and its repetitions.

    A chunk of 50x26 coefficients is some 150 runs, so 200,000 such chunks take about 120 MB, five times less than their
    coefficients as 16-bit integers would.
    """

    def __init__(self, row_length: int, *, max_runs: int | None = None) -> None:
        """For rows of `row_length` symbols; more than 65,535 are not supported.

        With `max_runs`, rows that have more runs than that in all are thinned out: every second piece (as given to
        `append`) is dropped, and from then on only every second one taken, and so on. `dropped` counts the rows.
        """
        if not 1 <= row_length <= MAX_VOCABULARY:
            raise TokenizerError(f"sequences of {row_length} symbols are not supported (1 to {MAX_VOCABULARY})")
        #: Symbols in a row.
        self.row_length = row_length
        self._parts: list[PackedArray] = []
        self._lengths: list[IntArray] = []
        self.rows = 0
        #: Rows that were left out to stay below `max_runs`.
        self.dropped = 0
        self._max_runs, self._runs = max_runs, 0
        self._pieces, self._keep_every = 0, 1
        #: Smallest and largest symbol added so far.
        self.low, self.high = 0, 0

    #: Added to raw symbols in storage, so that negative ones fit; `sequences` takes it off again.
    _BIAS = 1 << 15

    def add(self, rows: IntArray) -> None:
        """Add int32 [N, L] symbols in [-32768, 32767)."""
        if len(rows):
            self.append(self.pack(rows))

    @classmethod
    def pack(cls, rows: IntArray, bounds: tuple[int, int] | None = None) -> PackedRows:
        """The first half of `add`, which any thread may do; at least one row.

        `bounds` are the smallest and largest symbol, where the caller knows them.
        """
        low, high = (int(rows.min()), int(rows.max())) if bounds is None else bounds
        if low < -cls._BIAS or high >= cls._BIAS - 1:
            raise TokenizerError(f"symbols from {low} to {high} do not fit into 16 bits")
        out = np.empty(rows.size, np.uint32)
        packed = np.empty(len(rows), np.int32)
        lengths = np.full(len(rows), rows.shape[1], np.int32)
        written = _pack_rows(rows, lengths, cls._BIAS, out, packed)
        return PackedRows(out[:written].copy(), packed, low, high)

    def append(self, piece: PackedRows) -> None:
        """The second half of `add`."""
        self.low = piece.low if self.rows == 0 else min(self.low, piece.low)
        self.high = piece.high if self.rows == 0 else max(self.high, piece.high)
        number, self._pieces = self._pieces, self._pieces + 1
        if number % self._keep_every:
            self.dropped += len(piece.lengths)
            return
        self._parts.append(piece.runs)
        self._lengths.append(piece.lengths)
        self.rows += len(piece.lengths)
        self._runs += len(piece.runs)
        while self._max_runs is not None and self._runs > self._max_runs and len(self._parts) > 1:
            self._parts, self._lengths = self._parts[::2], self._lengths[::2]
            self._keep_every *= 2
            kept = sum(map(len, self._lengths))
            self.dropped, self.rows = self.dropped + self.rows - kept, kept
            self._runs = sum(map(len, self._parts))

    def sequences(self, base: int) -> tuple[PackedArray, IntArray]:
        """All rows as runs, with symbol `base` as id 0, and the number of runs of each row.

        The array has room to spare at its end, which training uses.
        """
        total = sum(len(part) for part in self._parts)
        arena = np.empty(total + total // 16 + 4096, np.uint32)
        written = 0
        for part in self._parts:
            # Modulo 2**32: `base` may lie below -32,768, when an alphabet reaches further than the symbols do.
            offset = np.uint32(((self._BIAS + base) << 16) & 0xFFFFFFFF)
            np.subtract(part, offset, out=arena[written : written + len(part)])
            written += len(part)
        return arena, np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int32)

    def blocks(self) -> Iterator[IntArray]:
        """The rows again, in order, as int32 blocks [n, L]."""
        for part, lengths in zip(self._parts, self._lengths, strict=True):
            rows = np.empty((len(lengths), self.row_length), np.int32)
            _unpack_rows(part, lengths, self._BIAS, rows)
            yield rows


class JoinedCorpus(Corpus):
    """The rows of several corpora, whose rows may differ in length, to train on together."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        """At least one corpus; nothing is copied, and nothing may be added any more, here or there."""
        super().__init__(max(corpus.row_length for corpus in corpora))
        self._corpora = tuple(corpus for corpus in corpora if corpus.rows)
        self._parts = [part for corpus in self._corpora for part in corpus._parts]
        self._lengths = [lengths for corpus in self._corpora for lengths in corpus._lengths]
        self.rows = sum(corpus.rows for corpus in self._corpora)
        self.dropped = sum(corpus.dropped for corpus in corpora)
        self.low = min((corpus.low for corpus in self._corpora), default=0)
        self.high = max((corpus.high for corpus in self._corpora), default=0)

    def blocks(self) -> Iterator[IntArray]:
        """The rows again, corpus by corpus, as int32 blocks [n, L], with the L of each corpus."""
        for corpus in self._corpora:
            yield from corpus.blocks()


@kernel
def _unpack_rows(packed, lengths, shift, rows):  # type: ignore[no-untyped-def]
    position = 0
    for n in range(len(lengths)):
        written = 0
        for i in range(position, position + lengths[n]):
            symbol = np.int32(packed[i] >> np.uint32(16)) - shift
            for _ in range(packed[i] & np.uint32(0xFFFF)):
                rows[n, written] = symbol
                written += 1
        position += lengths[n]


def pack_sequences(rows: IntArray, lengths: IntArray) -> tuple[PackedArray, IntArray]:
    """Rows of base ids int32 [N, L] (-1: barrier), of which `lengths` count, as runs for `train_merges`."""
    out = np.empty(int(lengths.sum()), np.uint32)
    packed = np.empty(len(rows), np.int32)
    written = _pack_rows(rows, lengths, 0, out, packed)
    return out[:written].copy(), packed


@inlined
def _slot_of(key, keys, used):  # type: ignore[no-untyped-def]
    mask = np.uint32(len(keys) - 1)
    slot = np.uint32(((key * np.uint32(2654435769)) >> np.uint32(12)) & mask)
    while used[slot] and keys[slot] != key:
        slot = (slot + np.uint32(1)) & mask
    return slot


@kernel
def _count_pairs(arena, start, length, keys, used, counts, words, last):  # type: ignore[no-untyped-def]
    """Occurrences of each pair of neighbours, and how many rows it is in; False if the table is too small."""
    filled = 0
    for w in range(len(start)):
        for i in range(start[w], start[w] + length[w]):
            token, run = arena[i] >> np.uint32(16), np.int64(arena[i] & np.uint32(0xFFFF))
            if token == _BARRIER:
                continue
            for inner in range(2):
                if inner == 0:
                    other, times = token, run - 1
                elif i + 1 < start[w] + length[w]:
                    other, times = arena[i + 1] >> np.uint32(16), np.int64(1)
                else:
                    continue
                if times == 0 or other == _BARRIER:
                    continue
                key = np.uint32((token << np.uint32(16)) | other)
                slot = _slot_of(key, keys, used)
                if not used[slot]:
                    if filled * 2 >= len(keys):
                        return False
                    filled += 1
                    used[slot], keys[slot], counts[slot], words[slot], last[slot] = True, key, 0, 0, -1
                counts[slot] += times
                if last[slot] != w:
                    last[slot] = w
                    words[slot] += 1
    return True


@kernel
def _list_rows(arena, start, length, first_row, keys, used, last, place, rows):  # type: ignore[no-untyped-def]
    """The rows that each pair is in, ascending, at rows[place[slot]:]; `place` is left at their ends.

    `start` and `length` are those from `first_row` on.
    """
    last[:] = -1
    for w in range(len(start)):
        for i in range(start[w], start[w] + length[w]):
            token, run = arena[i] >> np.uint32(16), arena[i] & np.uint32(0xFFFF)
            if token == _BARRIER:
                continue
            for inner in range(2):
                if inner == 0:
                    other = token if run > np.uint32(1) else _BARRIER
                else:
                    other = arena[i + 1] >> np.uint32(16) if i + 1 < start[w] + length[w] else _BARRIER
                if other == _BARRIER:
                    continue
                slot = _slot_of(np.uint32((token << np.uint32(16)) | other), keys, used)
                if last[slot] != w:
                    last[slot] = w
                    rows[place[slot]] = first_row + w
                    place[slot] += 1


# What a merge of (a, b) into `new` changes, by the neighbour p on the left or x on the right of a site:
# (p, a) lost, (p, new) won, (b, x) lost, (new, x) won.
_LEFT_OLD, _LEFT_NEW, _RIGHT_OLD, _RIGHT_NEW = 0, 1, 2, 3


@inlined
def _push(token, run, scratch, written):  # type: ignore[no-untyped-def]
    if written > 0 and (scratch[written - 1] >> np.uint32(16)) == token:
        scratch[written - 1] += np.uint32(run)
    else:
        scratch[written] = (np.uint32(token) << np.uint32(16)) | np.uint32(run)
        written += 1
    return written


@inlined
def _win(side, token, times, w, changes, seen, found, found_count):  # type: ignore[no-untyped-def]
    """Count a won pair, and note once per row that the row has it."""
    changes[side, token] += times
    key = (side >> 1) * changes.shape[1] + token
    if seen[key] != w:
        seen[key] = w
        found[found_count, 0], found[found_count, 1] = key, w
        found_count += 1
    return found_count


@inlined
def _next_site(arena, i, last, a, b):  # type: ignore[no-untyped-def]
    """The first run from i on in which a site of (a, b) begins, or `last`."""
    low, following = np.uint32(a << 16), np.uint32(b)
    if a == b:
        low += np.uint32(2)  # a site lies inside a run of two at least
    span = np.uint32((a << 16) | 0xFFFF) - low
    found = False
    while i < last and not found:
        while i + 16 <= last:  # skip what has no run of `a`, sixteen runs at a time
            hits = 0
            for j in range(16):
                hits += np.uint32(arena[i + j] - low) <= span
            if hits > 0:
                break
            i += 16
        while i < last and not found:
            if np.uint32(arena[i] - low) <= span:
                found = a == b or (i + 1 < last and (arena[i + 1] >> np.uint32(16)) == following)
                if not found:
                    i += 1
                    break  # back to the quick search
            else:
                i += 1
    return i


@kernel
def _merge_rows(  # type: ignore[no-untyped-def]
    rows, begin, arena, start, length, capacity, reserve, a, b, new, scratch, changes, seen, found, counters
):
    """Merge (a, b) into `new` in arena rows ``rows[begin:]``; returns the index it stopped at.

    It stops early when `found` [M, 2] could overflow, or when a row that grew finds no room in
    ``arena[reserve[0]:reserve[1]]``. `changes` int64 [4, V] is what pair counts change by, as `tokenizers` counts: the
    merged pair itself keeps its count.
    """
    found_count = counters[0]
    for index in range(begin, len(rows)):
        w = rows[index]
        first, last = start[w], start[w] + length[w]
        if found_count + 2 * changes.shape[1] + 2 > len(found):
            counters[0] = found_count
            return index
        # A merge makes at most half as many runs again, and one; a quarter more is kept for the next time.
        if 2 * np.int64(length[w]) + 8 > reserve[1] - reserve[0]:
            counters[0] = found_count
            return index
        i = _next_site(arena, first, last, a, b)
        if i == last:
            continue
        kept = max(i - 1, first) - first  # runs before the first site and its neighbour stay where they are
        written = 0
        for j in range(first + kept, i):
            scratch[written] = arena[j]
            written += 1
        while i < last:  # at a site
            run = np.int64(arena[i] & np.uint32(0xFFFF))
            if a != b and run > 1:
                written = _push(a, run - 1, scratch, written)
            before = np.int64(scratch[written - 1] >> np.uint32(16)) if written > 0 else np.int64(_BARRIER)
            if before != _BARRIER:
                changes[_LEFT_OLD, before] -= 1
                found_count = _win(_LEFT_NEW, before, 1, w, changes, seen, found, found_count)
            pairs, rest, left_over = np.int64(1), np.int64(0), np.int64(0)
            i += 1
            if a == b:
                pairs, rest = run // 2, run % 2
                if pairs + rest > 1:  # inside the run: a b a b ..., each site is first the left neighbour of an a
                    changes[_RIGHT_OLD, a] -= pairs - 1 + rest
                    found_count = _win(_RIGHT_NEW, a, pairs - 1 + rest, w, changes, seen, found, found_count)
                if pairs > 1:
                    changes[_LEFT_OLD, new] -= pairs - 1
                    found_count = _win(_LEFT_NEW, new, pairs - 1, w, changes, seen, found, found_count)
            else:
                left_over = np.int64(arena[i] & np.uint32(0xFFFF)) - 1
                i += 1
            after = np.int64(_BARRIER)
            if left_over > 0:
                after = np.int64(b)
            elif i < last:
                after = np.int64(arena[i] >> np.uint32(16))
            if rest == 0 and after != _BARRIER:
                changes[_RIGHT_OLD, after] -= 1
                found_count = _win(_RIGHT_NEW, after, 1, w, changes, seen, found, found_count)
            written = _push(new, pairs, scratch, written)
            if rest > 0:
                written = _push(a, rest, scratch, written)
            if left_over > 0:
                written = _push(b, left_over, scratch, written)
            until = _next_site(arena, i, last, a, b)
            if i < until:
                written = _push(arena[i] >> np.uint32(16), arena[i] & np.uint32(0xFFFF), scratch, written)
                for j in range(i + 1, until):
                    scratch[written] = arena[j]
                    written += 1
                i = until
        length[w] = kept + written
        if kept + written > capacity[w]:
            for j in range(kept):
                arena[reserve[0] + j] = arena[first + j]
            start[w] = first = reserve[0]
            capacity[w] = length[w] + length[w] // 4 + 4
            reserve[0] += capacity[w]
        for j in range(written):
            arena[first + kept + j] = scratch[j]
    counters[0] = found_count
    return len(rows)


@kernel
def _copy_rows(source, source_start, length, target, target_start):  # type: ignore[no-untyped-def]
    for w in range(len(length)):
        for i in range(length[w]):
            target[target_start[w] + i] = source[source_start[w] + i]


@kernel
def _change_counts(changes, a, b, new, keys, used, counts, filled):  # type: ignore[no-untyped-def]
    """Add `changes` to the table of pair counts and set them to zero; filled[0] is the number of pairs in the table."""
    for side in range(4):
        for neighbour in range(changes.shape[1]):
            change = changes[side, neighbour]
            if change == 0:
                continue
            changes[side, neighbour] = 0
            left, right = neighbour, new
            if side == _LEFT_OLD:
                right = a
            elif side == _RIGHT_OLD:
                left, right = b, neighbour
            elif side == _RIGHT_NEW:
                left, right = new, neighbour
            key = (np.uint32(left) << np.uint32(16)) | np.uint32(right)
            slot = _slot_of(key, keys, used)
            if not used[slot]:
                used[slot], keys[slot], counts[slot] = True, key, 0
                filled[0] += 1
            counts[slot] += change


@kernel
def _count_of(key, keys, used, counts):  # type: ignore[no-untyped-def]
    slot = _slot_of(key, keys, used)
    return counts[slot] if used[slot] else 0


@kernel
def _rehash(keys, used, counts, new_keys, new_used, new_counts):  # type: ignore[no-untyped-def]
    for old in range(len(keys)):
        if used[old]:
            slot = _slot_of(keys[old], new_keys, new_used)
            new_keys[slot], new_used[slot], new_counts[slot] = keys[old], True, counts[old]


@kernel
def _group_found(found, vocab_size, new, keys, used, counts, rows, pairs, pair_counts, ends):  # type: ignore[no-untyped-def]
    """Sort the noted (pair, row) by pair: rows of each, the pairs, their counts, and where their rows end.

    The pair (new, new) may come twice, from the left and from the right. Returns the number of pairs.
    """
    size = np.zeros(2 * vocab_size + 1, np.int64)
    for i in range(len(found)):
        size[found[i, 0] + 1] += 1
    groups = 0
    for key in range(2 * vocab_size):
        if size[key + 1] > 0:
            if key < vocab_size:
                pair = (np.uint32(key) << np.uint32(16)) | np.uint32(new)
            else:
                pair = (np.uint32(new) << np.uint32(16)) | np.uint32(key - vocab_size)
            pairs[groups] = pair
            slot = _slot_of(pair, keys, used)
            pair_counts[groups] = counts[slot] if used[slot] else 0
            groups += 1
        size[key + 1] += size[key]
        if groups > 0:
            ends[groups - 1] = size[key + 1]
    for i in range(len(found)):
        rows[size[found[i, 0]]] = found[i, 1]
        size[found[i, 0]] += 1
    return groups


@dataclass(frozen=True)
class _PairTable:
    """The pairs of some rows in a hash table, as `_count_pairs` fills it: occurrences, and rows that have each."""

    keys: PackedArray
    used: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    last: IntArray

    @classmethod
    def of(cls, arena: PackedArray, start: npt.NDArray[np.int64], length: IntArray) -> _PairTable:
        """Count, in a table that grows until the pairs fit."""
        size = 1 << 14
        while True:
            table = cls(
                np.empty(size, np.uint32),
                np.zeros(size, np.bool_),
                np.empty(size, np.int64),
                np.empty(size, np.int64),
                np.empty(size, np.int32),
            )
            if _count_pairs(arena, start, length, table.keys, table.used, table.counts, table.words, table.last):
                return table
            size *= 4


class _CountTable:
    """How often each pair of neighbours occurs: left << 16 | right -> count; a hash table for the kernels."""

    def __init__(
        self,
        keys: PackedArray | None = None,
        used: npt.NDArray[np.bool_] | None = None,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.keys = np.empty(1 << 12, np.uint32) if keys is None else keys
        self.used = np.zeros(1 << 12, np.bool_) if used is None else used
        self.counts = np.empty(1 << 12, np.int64) if counts is None else counts
        self._filled = np.array([self.used.sum()], np.int64)

    @classmethod
    def of(cls, pairs: PackedArray, counts: npt.NDArray[np.int64]) -> _CountTable:
        """A table of these pairs."""
        size = 1 << max(12, int(np.ceil(np.log2(4 * len(pairs) + 1))))
        table = cls(np.empty(size, np.uint32), np.zeros(size, np.bool_), np.empty(size, np.int64))
        _rehash(pairs, np.ones(len(pairs), np.bool_), counts, table.keys, table.used, table.counts)
        table._filled[0] = len(pairs)
        return table

    def get(self, key: int) -> int:
        """The count of a pair, 0 if it never occurred."""
        return int(_count_of(np.uint32(key), self.keys, self.used, self.counts))

    def change(self, changes: npt.NDArray[np.int64], a: int, b: int, new: int) -> None:
        """Add what a merge changed, as `_merge_rows` notes it, and set it to zero."""
        while (self._filled[0] + changes.size) * 2 > len(self.keys):
            size = 2 * len(self.keys)
            bigger = np.empty(size, np.uint32), np.zeros(size, np.bool_), np.empty(size, np.int64)
            _rehash(self.keys, self.used, self.counts, *bigger)
            self.keys, self.used, self.counts = bigger
        _change_counts(changes, a, b, new, self.keys, self.used, self.counts, self._filled)


class _Trainer:
    """The state of one training run: rows as runs, counts of pairs, and a queue of candidates."""

    def __init__(
        self,
        arena: PackedArray,
        lengths: IntArray,
        row_length: int,
        vocab_size: int,
        threads: int,
        min_frequency: int,
    ) -> None:
        self.min_frequency = max(1, min_frequency)
        self.length = lengths.copy()
        self.start = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1]
        self.capacity = lengths.copy()
        self.vocab_size = vocab_size
        self.row_length = row_length
        self.threads = threads
        self.used = int(lengths.sum(dtype=np.int64))
        self.arena = arena
        self.counts = _CountTable()
        self.rows_of: dict[int, IntArray] = {}
        self._serial = 0
        self.queue: list[tuple[int, int, int]] = []  # (-count, left << 16 | right, key of rows_of)
        #: Pairs below this count when they were won wait in `_aside`, as (pairs, counts, rows, ends), not in the queue.
        self._threshold = self.min_frequency
        self._aside: list[tuple[PackedArray, npt.NDArray[np.int64], IntArray, npt.NDArray[np.int64]]] = []
        self._workspaces = [self._workspace() for _ in range(threads)]
        #: Where each thread puts rows that outgrow their place: begin and end in the arena.
        self._reserves = np.zeros((threads, 2), np.int64)

    def _workspace(self) -> tuple[PackedArray, npt.NDArray[np.int64], IntArray, npt.NDArray[np.int64]]:
        return (
            np.empty(2 * self.row_length + 16, np.uint32),
            np.zeros((4, self.vocab_size), np.int64),
            np.full(2 * self.vocab_size, -1, np.int32),
            np.empty((4 * (2 * self.vocab_size + 2), 2), np.int64),
        )

    def start_queue(self) -> None:
        """Count every pair of neighbours, with the rows that it is in; each thread for a part of the rows."""
        bounds = np.linspace(0, len(self.start), self.threads + 1).astype(np.int64)
        tables: dict[int, _PairTable] = {}

        def count(first: int, last: int) -> None:
            for p in range(first, last):
                part = slice(bounds[p], bounds[p + 1])
                tables[p] = _PairTable.of(self.arena, self.start[part], self.length[part])

        run_rows(count, self.threads, num_threads=self.threads, piece=1)
        slots = [np.flatnonzero(tables[p].used) for p in range(self.threads)]
        found = np.concatenate([tables[p].keys[slots[p]] for p in range(self.threads)])
        pairs, places = np.unique(found, return_inverse=True)
        where = np.split(places.reshape(-1), np.cumsum([len(part) for part in slots])[:-1])
        counts = np.zeros(len(pairs), np.int64)
        words = np.zeros((self.threads, len(pairs)), np.int64)
        for p in range(self.threads):  # a pair stands only once among those of a part
            counts[where[p]] += tables[p].counts[slots[p]]
            words[p, where[p]] = tables[p].words[slots[p]]
        ends = np.cumsum(words.sum(axis=0))
        rows = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        begins = ends - words.sum(axis=0) + np.cumsum(words, axis=0) - words

        def list_rows(first: int, last: int) -> None:
            for p in range(first, last):
                part, table = slice(bounds[p], bounds[p + 1]), tables[p]
                place = np.zeros(len(table.keys), np.int64)
                place[slots[p]] = begins[p, where[p]]
                _list_rows(
                    self.arena, self.start[part], self.length[part], bounds[p],
                    table.keys, table.used, table.last, place, rows,
                )  # fmt: skip

        run_rows(list_rows, self.threads, num_threads=self.threads, piece=1)
        self.counts = _CountTable.of(pairs, counts)
        self._threshold = max(self.min_frequency, int(counts.max(initial=0)) // _THRESHOLD_STEP)
        self._enqueue(pairs, counts, rows, ends)

    def next_pair(self) -> tuple[int, int, IntArray] | None:
        """The most frequent pair (of equals the smallest), with rows that have it; None when none is worth it."""
        while True:
            if not self.queue or -self.queue[0][0] < self._threshold:
                if self._threshold <= self.min_frequency and not self.queue:
                    return None
                if self._threshold > self.min_frequency:
                    self._lower_threshold(max(self.min_frequency, self._threshold // _THRESHOLD_STEP))
                    continue
            negative, key, index = heapq.heappop(self.queue)
            count = self.counts.get(key)
            if count != -negative:  # outdated: put back where it belongs now
                heapq.heappush(self.queue, (-count, key, index))
                continue
            if count < self.min_frequency:
                return None
            return key >> 16, key & 0xFFFF, self.rows_of.pop(index)

    def merge(self, a: int, b: int, new: int, rows: IntArray) -> None:
        """Replace (a, b) by `new` in `rows`, and bring counts and queue up to date."""
        heavy = self.threads > 1 and int(self.length[rows].sum()) > _HEAVY
        parts = np.array_split(rows, self.threads) if heavy else [rows]
        begins = [0] * len(parts)
        found: list[npt.NDArray[np.int64]] = []
        results: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(parts)
        for workspace in self._workspaces[: len(parts)]:
            workspace[2][:] = -1
        while any(begin < len(part) for begin, part in zip(begins, parts, strict=True)):
            self._fill_reserves(len(parts))

            def work(first: int, last: int) -> None:
                for p in range(first, last):
                    scratch, changes, seen, pairs = self._workspaces[p]
                    counters = np.zeros(1, np.int64)
                    begins[p] = _merge_rows(
                        parts[p], begins[p], self.arena, self.start, self.length, self.capacity, self._reserves[p],
                        a, b, new, scratch, changes, seen, pairs, counters,
                    )  # fmt: skip
                    results[p] = pairs[: counters[0]].copy()

            run_rows(work, len(parts), num_threads=self.threads, piece=1)
            found += results
            for p in range(len(parts)):  # a list that was full becomes longer, so that this stays rare
                scratch, changes, seen, pairs = self._workspaces[p]
                if len(results[p]) > len(pairs) // 2 and len(pairs) < _LONGEST_FOUND:
                    self._workspaces[p] = (scratch, changes, seen, np.empty((2 * len(pairs), 2), np.int64))
        for workspace in self._workspaces[: len(parts)]:
            self.counts.change(workspace[1], a, b, new)
        self._sort_found(new, np.concatenate(found) if len(found) > 1 else found[0])

    def _fill_reserves(self, parts: int) -> None:
        """Give every thread at work room for at least one more row; what is left of its old piece is given up."""
        needed = 2 * self.row_length + 8  # what _merge_rows asks for before it takes on the longest row
        size = max(_RESERVED_ROWS * needed, len(self.arena) // _RESERVED_SHARE)
        short = [p for p in range(parts) if self._reserves[p, 1] - self._reserves[p, 0] < needed]
        if short and len(self.arena) - self.used < size * len(short):
            self._spread_rows(size * parts)
            short = list(range(parts))
        for p in short:
            self._reserves[p] = self.used, self.used + size
            self.used += size

    def _spread_rows(self, reserve: int) -> None:
        """Lay all rows anew, each with some room to grow in place, and at least `reserve` behind them."""
        capacity = self.length + self.length // 8 + 8
        ends = np.cumsum(capacity, dtype=np.int64)
        self.used = int(ends[-1])
        arena = np.empty(self.used + max(reserve, self.used // 16), np.uint32)
        start = ends - capacity
        old = self.arena

        def work(begin: int, end: int) -> None:
            part = slice(begin, end)
            _copy_rows(old, self.start[part], self.length[part], arena, start[part])

        run_rows(work, len(start), num_threads=self.threads, piece=max(1024, len(start) // (2 * self.threads)))
        self.arena, self.start, self.capacity = arena, start, capacity

    def _sort_found(self, new: int, found: npt.NDArray[np.int64]) -> None:
        """Queue the pairs that a merge has won, with their rows."""
        rows = np.empty(len(found), np.int32)
        most = min(len(found), 2 * self.vocab_size)
        pairs, counts, ends = np.empty(most, np.uint32), np.empty(most, np.int64), np.empty(most, np.int64)
        table = self.counts
        groups = _group_found(
            found, self.vocab_size, new, table.keys, table.used, table.counts, rows, pairs, counts, ends
        )
        pairs, counts, ends = pairs[:groups], counts[:groups], ends[:groups]
        both = np.flatnonzero(pairs == np.uint32((new << 16) | new))
        if len(both) == 2:
            (left, left_end), (right, right_end) = ((ends[i - 1] if i else 0, ends[i]) for i in both.tolist())
            members = np.unique(np.concatenate([rows[left:left_end], rows[right:right_end]]))
            self._enqueue(pairs[both[:1]], counts[both[:1]], members, np.array([len(members)]))
            counts[both] = 0
        self._enqueue(pairs, counts, rows, ends)

    def _enqueue(
        self, pairs: PackedArray, counts: npt.NDArray[np.int64], rows: IntArray, ends: npt.NDArray[np.int64]
    ) -> None:
        """Queue pairs whose rows lie one after the other up to `ends`; drop those of count 0.

        Pairs below the threshold are put aside: most are never merged, and in the queue they would take ten times the
        memory.
        """
        queued = np.flatnonzero(counts >= max(1, self._threshold)).tolist()
        for i in queued:
            heapq.heappush(self.queue, (-int(counts[i]), int(pairs[i]), self._serial))
            self.rows_of[self._serial] = rows[ends[i - 1] if i else 0 : ends[i]].copy()
            self._serial += 1
        aside = counts > 0
        aside[queued] = False
        if aside.all():  # as after most merges
            self._aside.append((pairs.copy(), counts.copy(), rows, ends.copy()))
        elif aside.any():
            sizes = np.diff(ends, prepend=0)
            self._aside.append((pairs[aside], counts[aside], rows[np.repeat(aside, sizes)], np.cumsum(sizes[aside])))

    def _lower_threshold(self, threshold: int) -> None:
        """Queue what was put aside with a count of at least `threshold`."""
        self._threshold = threshold
        waiting, self._aside = self._aside, []
        while waiting:  # one by one, so that each can be freed
            self._enqueue(*waiting.pop(0))

    def queue_all(self) -> None:
        """Before a merge into an id that exists already, which may win a pair more occurrences: put nothing aside."""
        if self._threshold > 1:
            self._lower_threshold(1)


def training_is_compiled() -> bool:
    """Whether the kernels are in the disk cache; without it the first fit takes some seconds longer."""
    return is_compiled(_merge_rows)


def train_merges(
    arena: PackedArray,
    lengths: IntArray,
    *,
    row_length: int,
    base_size: int,
    vocab_size: int,
    min_frequency: int = 2,
    num_threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Merges:
    """Learn merges from sequences of base ids, as the BpeTrainer of `tokenizers` does (without a longest token).

    Args:
        arena, lengths: the sequences as runs, from `Corpus.sequences` or `pack_sequences`; `arena` is overwritten.
        row_length: the largest number of symbols in a sequence.
        base_size: number of base ids.
        vocab_size: stop when there are this many ids.
        min_frequency: stop when the most frequent pair occurs less often.
        num_threads: None means all processors; the result does not depend on it.
        progress: called with 1 after each merge.

    Raises:
        TokenizerError: `base_size` exceeds `vocab_size`, or `vocab_size` exceeds 65,535.
    """
    if not base_size <= vocab_size <= MAX_VOCABULARY:
        raise TokenizerError(
            f"vocab_size {vocab_size} must be from {base_size}, the number of base symbols, to {MAX_VOCABULARY}"
        )
    trainer = _Trainer(arena, lengths, row_length, vocab_size, resolve_threads(num_threads), min_frequency)
    trainer.start_queue()
    expansions: list[tuple[int, ...]] = [(i,) for i in range(base_size)]
    id_of = {expansion: i for i, expansion in enumerate(expansions)}
    found: dict[tuple[int, int], int] = {}
    while len(expansions) < vocab_size:
        best = trainer.next_pair()
        if best is None:
            break
        left, right, rows = best
        expansion = expansions[left] + expansions[right]
        new = id_of.setdefault(expansion, len(expansions))
        if new == len(expansions):
            expansions.append(expansion)
        else:
            trainer.queue_all()
        found.pop((left, right), None)  # a pair that is merged again counts at its last place
        found[left, right] = new
        trainer.merge(left, right, new, rows)
        if progress is not None:
            progress(1)
    return Merges.from_pairs(base_size, [(left, right, new) for (left, right), new in found.items()])
