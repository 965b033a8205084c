"""Byte-pair encoding over integers: train merges, encode, decode, read and write `tokenizer.json`.

A sequence is a row of base ids 0 .. A-1; training finds pairs of neighbours to merge, each into a token of its own, and
encoding replays the merges by rank, the leftmost first. Merges and ids are those that Hugging Face's `tokenizers`
finds on the same symbols (its BpeTrainer and BPE model), at a fraction of the time. A base id of -1 is a barrier: nothing
merges across it, and it is dropped (the reference format needs that, see reference_format.py).

What is not here: what a base id means. tokenizer.py maps coefficients to base ids.

Worked on five integers, with base ids 0 and 1 and the sequence 0 0 1 0 0 (twice, so that a pair is worth merging):
the pairs (0, 0), (0, 1), (1, 0) occur 4, 2 and 2 times, so (0, 0) becomes token 2 and leaves 2 1 2; then (1, 2) and
(2, 1) tie at 2 and the smaller wins: token 3 = 1 0 0 leaves 2 3; token 4 = 0 0 1 0 0 ends it. Encoding 0 0 1 0 0 gives 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, kernel, resolve_threads, run_rows
from pi0_fast.types import TokenizerError

IntArray = npt.NDArray[np.int32]

#: Token ids are packed in pairs into 32 bits, and run lengths beside token ids.
MAX_VOCABULARY = 0xFFFF
_NO_RANK = np.int32(0x7FFFFFFF)
_NO_KEY = np.uint32(0xFFFFFFFF)
_TOKEN, _COUNT, _START, _PREVIOUS, _NEXT = 0, 1, 2, 3, 4


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary: base ids, merges, and what every id expands to
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merges:
    """What training found, and all that encoding needs.

    Attributes:
        base_size: number of base ids A; they are the ids 0 .. A-1.
        left, right, result: int32 [M], by rank: the pair and the id it becomes. Two pairs whose expansions are equal
            become the same id, so there can be more merges than new ids.
    """

    base_size: int
    left: IntArray
    right: IntArray
    result: IntArray

    def __post_init__(self) -> None:
        if self.vocab_size > MAX_VOCABULARY:
            raise TokenizerError(f"a vocabulary of {self.vocab_size} ids exceeds the limit of {MAX_VOCABULARY}")

    @classmethod
    def from_pairs(cls, base_size: int, pairs: Sequence[tuple[int, int, int]]) -> Merges:
        """From (left, right, result) triples in rank order."""
        table = np.array(pairs, np.int32).reshape(-1, 3)
        return cls(base_size, *(np.ascontiguousarray(column) for column in table.T))

    @property
    def vocab_size(self) -> int:
        """Number of ids: the base ids and every distinct result."""
        return max(self.base_size, int(self.result.max(initial=-1)) + 1)

    @cached_property
    def expansions(self) -> list[tuple[int, ...]]:
        """Base ids that each id stands for."""
        found: list[tuple[int, ...]] = [(i,) for i in range(self.base_size)]
        found += [()] * (self.vocab_size - self.base_size)
        for left, right, result in zip(self.left.tolist(), self.right.tolist(), self.result.tolist(), strict=True):
            expansion = found[left] + found[right]
            if not found[left] or not found[right] or (found[result] and found[result] != expansion):
                raise TokenizerError(f"merge of {left} and {right} into {result} contradicts the merges before it")
            found[result] = expansion
        missing = [i for i, expansion in enumerate(found) if not expansion]
        if missing:
            raise TokenizerError(f"ids {missing[:5]} are produced by no merge")
        return found

    @cached_property
    def widths(self) -> IntArray:
        """Number of base ids that each id stands for, int32 [vocab_size]."""
        return np.array([len(expansion) for expansion in self.expansions], np.int32)

    @cached_property
    def table(self) -> tuple[npt.NDArray[np.uint32], IntArray, npt.NDArray[np.bool_]]:
        """Hash table pair -> rank (keys, ranks), and per rank whether all its sites may be merged in one sweep.

        A sweep is exact when no merge that uses its result has a lower rank; only vocabularies with two merges into one
        id can break that.
        """
        count = len(self.left)
        bits = max(4, int(np.ceil(np.log2(max(count, 1) * 4))))
        keys = np.zeros(1 << bits, np.uint32)
        ranks = np.full(1 << bits, _NO_RANK, np.int32)
        _fill_table(self.left, self.right, keys, ranks)
        first_use = np.full(self.vocab_size, count, np.int64)
        for parts in (self.left, self.right):
            np.minimum.at(first_use, parts, np.arange(count))
        return keys, ranks, first_use[self.result] > np.arange(count)


# ---------------------------------------------------------------------------------------------------------------------
# Encoding
# ---------------------------------------------------------------------------------------------------------------------


@kernel
def _fill_table(left, right, table, ranks):  # type: ignore[no-untyped-def]
    mask = np.uint32(len(table) - 1)
    for rank in range(len(left)):
        key = (np.uint32(left[rank]) << np.uint32(16)) | np.uint32(right[rank])
        slot = np.uint32(((key * np.uint32(2654435769)) >> np.uint32(12)) & mask)
        while ranks[slot] != _NO_RANK and table[slot] != key:
            slot = (slot + np.uint32(1)) & mask
        table[slot] = key
        ranks[slot] = rank  # a pair that stands twice has its later rank, as in `tokenizers`


@inlined
def _rank_of(left, right, table, ranks):  # type: ignore[no-untyped-def]
    if left < 0 or right < 0:
        return _NO_RANK
    mask = np.uint32(len(table) - 1)
    key = (np.uint32(left) << np.uint32(16)) | np.uint32(right)
    slot = np.uint32(((key * np.uint32(2654435769)) >> np.uint32(12)) & mask)
    while ranks[slot] != _NO_RANK:
        if table[slot] == key:
            return ranks[slot]
        slot = (slot + np.uint32(1)) & mask
    return _NO_RANK


@inlined
def _refresh(i, runs, keys, table, ranks):  # type: ignore[no-untyped-def]
    """Set the key of run i: the lowest rank of a pair that begins in it (with itself, or with the run after it)."""
    token, following = runs[_TOKEN, i], runs[_NEXT, i]
    rank = _NO_RANK
    if runs[_COUNT, i] > 1:
        rank = _rank_of(token, token, table, ranks)
    if following >= 0:
        rank = min(rank, _rank_of(token, runs[_TOKEN, following], table, ranks))
    if rank == _NO_RANK:
        keys[i] = _NO_KEY
    else:
        keys[i] = (np.uint32(rank) << np.uint32(16)) | np.uint32(runs[_START, i])


@inlined
def _remove(i, runs, keys):  # type: ignore[no-untyped-def]
    before, after = runs[_PREVIOUS, i], runs[_NEXT, i]
    if before >= 0:
        runs[_NEXT, before] = after
    if after >= 0:
        runs[_PREVIOUS, after] = before
    keys[i] = _NO_KEY


@inlined
def _insert(i, before, token, count, start, runs, run_at):  # type: ignore[no-untyped-def]
    """Put a new run with index i after the run `before`."""
    after = runs[_NEXT, before]
    runs[_TOKEN, i], runs[_COUNT, i], runs[_START, i] = token, count, start
    runs[_PREVIOUS, i], runs[_NEXT, i] = before, after
    runs[_NEXT, before] = i
    if after >= 0:
        runs[_PREVIOUS, after] = i
    run_at[start] = i


@inlined
def _compress(row, runs, run_at):  # type: ignore[no-untyped-def]
    """A row of ids as linked runs of equal ids; returns their number."""
    count = 0
    for i in range(len(row)):
        if count > 0 and runs[_TOKEN, count - 1] == row[i]:
            runs[_COUNT, count - 1] += 1
        else:
            runs[_TOKEN, count], runs[_COUNT, count], runs[_START, count] = row[i], 1, i
            runs[_PREVIOUS, count], runs[_NEXT, count] = count - 1, count + 1
            run_at[i] = count
            count += 1
    if count > 0:
        runs[_NEXT, count - 1] = -1
    return count


@inlined
def _merge_at(i, a, b, new, sweep, used, widths, runs, run_at, keys):  # type: ignore[no-untyped-def]
    """Merge the pair (a, b) that begins in run i. Inside one run (a equal to b) all pairs at once if `sweep`, else the first.

    Returns the index of the run with the new token, `used`, and whether the run after it has changed too.
    """
    if a == b:
        pairs = runs[_COUNT, i] // 2 if sweep else np.int32(1)
        rest = runs[_COUNT, i] - 2 * pairs
        if rest > 0:
            _insert(used, i, a, rest, runs[_START, i] + 2 * pairs * widths[a], runs, run_at)
            used += 1
        runs[_TOKEN, i], runs[_COUNT, i] = new, pairs
        return i, used, rest > 0
    following = runs[_NEXT, i]
    if runs[_COUNT, i] > 1:
        runs[_COUNT, i] -= 1
        _insert(used, i, new, 1, runs[_START, following] - widths[a], runs, run_at)
        i = used
        used += 1
    else:
        runs[_TOKEN, i] = new
    if runs[_COUNT, following] > 1:
        runs[_COUNT, following] -= 1
        runs[_START, following] += widths[b]
        run_at[runs[_START, following]] = following
        return i, used, True
    _remove(following, runs, keys)
    return i, used, False


@kernel
def _encode_rows(  # type: ignore[no-untyped-def]
    rows, lengths, left, right, result, widths, table, ranks, sweepable, out, out_lengths
):
    """Base ids int32 [N, L], of which `lengths` [N] count, -> ids in `out` int32 [N, L] and `out_lengths`.

    A row is a linked list of runs (token, repetitions): most of a chunk is zeros, and halving a run is one step. The key
    of a run holds the lowest rank that begins in it, and where it starts, so that the smallest key is the next merge:
    lowest rank first, then leftmost. Looking through all keys is a few vector instructions, cheaper than a heap.
    """
    size = 2 * rows.shape[1] + 2
    runs = np.empty((5, size), np.int32)
    keys = np.empty(size, np.uint32)
    run_at = np.empty(rows.shape[1] + 1, np.int32)
    for n in range(len(rows)):
        used = _compress(rows[n, : lengths[n]], runs, run_at)
        for i in range(used):
            _refresh(i, runs, keys, table, ranks)
        while True:
            lowest = _NO_KEY
            for i in range(used):
                lowest = min(lowest, keys[i])
            if lowest == _NO_KEY:
                break
            rank = lowest >> np.uint32(16)
            i, used, after_changed = _merge_at(
                run_at[lowest & np.uint32(0xFFFF)], left[rank], right[rank], result[rank], sweepable[rank],
                used, widths, runs, run_at, keys,
            )  # fmt: skip
            before, after = runs[_PREVIOUS, i], runs[_NEXT, i]
            if before >= 0 and runs[_TOKEN, before] == runs[_TOKEN, i]:
                runs[_COUNT, before] += runs[_COUNT, i]
                _remove(i, runs, keys)
                i, before = before, runs[_PREVIOUS, before]
            if after >= 0 and runs[_TOKEN, after] == runs[_TOKEN, i]:
                runs[_COUNT, i] += runs[_COUNT, after]
                _remove(after, runs, keys)
                after = runs[_NEXT, i]
            _refresh(i, runs, keys, table, ranks)
            if before >= 0:
                _refresh(before, runs, keys, table, ranks)
            if after_changed and after >= 0:
                _refresh(after, runs, keys, table, ranks)
        written, i = 0, 0
        if lengths[n] == 0:
            i = -1
        while i >= 0:
            if runs[_TOKEN, i] >= 0:
                for _ in range(runs[_COUNT, i]):
                    out[n, written] = runs[_TOKEN, i]
                    written += 1
            i = runs[_NEXT, i]
        out_lengths[n] = written


def encode_rows(
    merges: Merges, rows: IntArray, lengths: npt.NDArray[np.int32] | None = None
) -> tuple[IntArray, IntArray]:
    """Encode each row of base ids; one thread.

    Args:
        merges: the vocabulary.
        rows: int32 [N, L] base ids in [0, base_size), or -1 for a barrier.
        lengths: int32 [N], how many entries of each row count; None means L.

    Returns:
        ids int32 [N, L], of which the first `lengths` int32 [N] of each row are meaningful.
    """
    if lengths is None:
        lengths = np.full(len(rows), rows.shape[1], np.int32)
    out = np.empty(rows.shape, np.int32)
    out_lengths = np.empty(len(rows), np.int32)
    table, ranks, sweepable = merges.table
    _encode_rows(
        rows, lengths, merges.left, merges.right, merges.result, merges.widths, table, ranks, sweepable, out, out_lengths
    )
    return out, out_lengths


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------


@kernel
def _expand_rows(ids, offsets, values, bounds, out, totals, bad):  # type: ignore[no-untyped-def]
    limit = out.shape[1]
    for n in range(len(out)):
        total = 0
        bad[n] = -1
        for j in range(offsets[n], offsets[n + 1]):
            token = ids[j]
            if token < 0 or token >= len(bounds) - 1:
                bad[n] = j - offsets[n]
                break
            for k in range(bounds[token], bounds[token + 1]):
                if total < limit:
                    out[n, total] = values[k]
                total += 1
        totals[n] = total
        for k in range(total, limit):
            out[n, k] = 0


def expand_rows(
    ids: IntArray, offsets: npt.NDArray[np.int64], values: IntArray, bounds: npt.NDArray[np.int64], limit: int
) -> tuple[IntArray, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Replace ids by what they stand for; one thread.

    Args:
        ids: int32 flat ids of all rows; row n is ``ids[offsets[n]:offsets[n + 1]]``.
        offsets: int64 [N + 1].
        values, bounds: id t stands for ``values[bounds[t]:bounds[t + 1]]``.
        limit: how many values of each row to keep.

    Returns:
        The values int32 [N, limit] (0 beyond a row's end); how many each row would have had, int64 [N]; and the position
        in the row of the first id outside the vocabulary, where expansion stops, int64 [N] (-1 if there is none).
    """
    rows = len(offsets) - 1
    out = np.empty((rows, limit), np.int32)
    totals, bad = np.empty(rows, np.int64), np.empty(rows, np.int64)
    _expand_rows(ids, offsets, values, bounds, out, totals, bad)
    return out, totals, bad


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------

_BARRIER = np.uint32(0xFFFF)


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


class Corpus:
    """Sequences to train on, as runs: each entry packs a symbol and its repetitions into 32 bits.

    A chunk of 50x26 coefficients is some 150 runs, so 200,000 such chunks take about 120 MB, five times less than their
    coefficients as 16-bit integers would.
    """

    def __init__(self, row_length: int) -> None:
        """For rows of at most `row_length` symbols; more than 65,535 are not supported."""
        if not 1 <= row_length <= MAX_VOCABULARY:
            raise TokenizerError(f"sequences of {row_length} symbols are not supported (1 to {MAX_VOCABULARY})")
        self._row_length = row_length
        self._parts: list[npt.NDArray[np.uint32]] = []
        self._lengths: list[IntArray] = []
        self.rows = 0
        #: Smallest and largest symbol added so far.
        self.low, self.high = 0, 0

    #: Added to raw symbols in storage, so that negative ones fit; `sequences` takes it off again.
    _BIAS = 1 << 15

    def add(self, rows: IntArray) -> None:
        """Add int32 [N, L] symbols in [-32768, 32767)."""
        if not len(rows):
            return
        low, high = int(rows.min()), int(rows.max())
        if low < -self._BIAS or high >= self._BIAS - 1:
            raise TokenizerError(f"symbols from {low} to {high} do not fit into 16 bits")
        self.low = low if self.rows == 0 else min(self.low, low)
        self.high = high if self.rows == 0 else max(self.high, high)
        out = np.empty(rows.size, np.uint32)
        packed = np.empty(len(rows), np.int32)
        lengths = np.full(len(rows), rows.shape[1], np.int32)
        written = _pack_rows(rows, lengths, self._BIAS, out, packed)
        self._parts.append(out[:written].copy())
        self._lengths.append(packed)
        self.rows += len(rows)

    def sequences(self, base: int) -> tuple[npt.NDArray[np.uint32], IntArray]:
        """Hand over the runs, with symbol `base` as id 0, and the number of runs of each row. Empties this object."""
        total = sum(len(part) for part in self._parts)
        arena = np.empty(total, np.uint32)
        written = 0
        while self._parts:  # part by part, so that the peak is one copy and one part
            part = self._parts.pop(0)
            arena[written : written + len(part)] = part
            written += len(part)
        arena -= np.uint32((self._BIAS + base) << 16)
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int32)
        self._lengths = []
        return arena, lengths


def pack_sequences(rows: IntArray, lengths: IntArray) -> tuple[npt.NDArray[np.uint32], IntArray]:
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
def _list_rows(arena, start, length, keys, used, last, place, rows):  # type: ignore[no-untyped-def]
    """The rows that each pair is in, ascending, at rows[place[slot]:]; `place` is left at their ends."""
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
                    rows[place[slot]] = w
                    place[slot] += 1


# What a merge of (a, b) into `new` changes, by the neighbour p on the left or x on the right of a site:
_LEFT_OLD, _LEFT_NEW, _RIGHT_OLD, _RIGHT_NEW = 0, 1, 2, 3  # (p, a) lost, (p, new) won, (b, x) lost, (new, x) won


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


@kernel
def _merge_rows(  # type: ignore[no-untyped-def]
    rows, begin, arena, start, length, capacity, reserve, a, b, new, scratch, changes, seen, found, counters
):
    """Merge (a, b) into `new` in arena rows ``rows[begin:]``; returns the index it stopped at.

    It stops early when `found` [M, 2] could overflow, or a row that grew finds no room in ``arena[reserve[0]:reserve[1]]``.
    `changes` int64 [4, V] is what pair counts change by, as `tokenizers` counts: the merged pair itself keeps its count.
    """
    found_count = counters[0]
    for index in range(begin, len(rows)):
        w = rows[index]
        first, last = start[w], start[w] + length[w]
        if found_count + 2 * changes.shape[1] + 2 > len(found):
            counters[0] = found_count
            return index
        if length[w] + length[w] // 2 + 8 > reserve[1] - reserve[0]:
            counters[0] = found_count
            return index
        written = 0
        i = first
        run = np.int64(arena[i] & np.uint32(0xFFFF))
        while i < last:
            token = np.int64(arena[i] >> np.uint32(16))
            following = np.int64(arena[i + 1] >> np.uint32(16)) if i + 1 < last else np.int64(_BARRIER)
            if token == a and ((a == b and run > 1) or (a != b and following == b)):
                if a != b and run > 1:
                    written = _push(a, run - 1, scratch, written)
                before = np.int64(scratch[written - 1] >> np.uint32(16)) if written > 0 else np.int64(_BARRIER)
                if before != _BARRIER:
                    changes[_LEFT_OLD, before] -= 1
                    found_count = _win(_LEFT_NEW, before, 1, w, changes, seen, found, found_count)
                pairs, rest, after = np.int64(1), np.int64(0), following
                i += 1
                if a == b:
                    pairs, rest = run // 2, run % 2
                    if pairs + rest > 1:  # inside the run: a b a b ..., each site is first the left neighbour of an a
                        changes[_RIGHT_OLD, a] -= pairs - 1 + rest
                        found_count = _win(_RIGHT_NEW, a, pairs - 1 + rest, w, changes, seen, found, found_count)
                    if pairs > 1:
                        changes[_LEFT_OLD, new] -= pairs - 1
                        found_count = _win(_LEFT_NEW, new, pairs - 1, w, changes, seen, found, found_count)
                    run = np.int64(arena[i] & np.uint32(0xFFFF)) if i < last else np.int64(0)
                else:
                    run = np.int64(arena[i] & np.uint32(0xFFFF)) - 1
                    after = b
                    if run == 0:
                        i += 1
                        after = np.int64(arena[i] >> np.uint32(16)) if i < last else np.int64(_BARRIER)
                        run = np.int64(arena[i] & np.uint32(0xFFFF)) if i < last else np.int64(0)
                if rest == 0 and after != _BARRIER:
                    changes[_RIGHT_OLD, after] -= 1
                    found_count = _win(_RIGHT_NEW, after, 1, w, changes, seen, found, found_count)
                written = _push(new, pairs, scratch, written)
                if rest > 0:
                    written = _push(a, rest, scratch, written)
            else:
                written = _push(token, run, scratch, written)
                i += 1
                run = np.int64(arena[i] & np.uint32(0xFFFF)) if i < last else np.int64(0)
        if written > capacity[w]:
            start[w] = reserve[0]
            capacity[w] = written + written // 4 + 4
            reserve[0] += capacity[w]
        length[w] = written
        for j in range(written):
            arena[start[w] + j] = scratch[j]
    counters[0] = found_count
    return len(rows)


class _Trainer:
    """The state of one training run: rows as runs, counts of pairs, and a queue of candidates."""

    def __init__(
        self, arena: npt.NDArray[np.uint32], lengths: IntArray, row_length: int, vocab_size: int, threads: int
    ) -> None:
        self.length = lengths.copy()
        self.start = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1]
        self.capacity = lengths.copy()
        self.vocab_size = vocab_size
        self.row_length = row_length
        self.threads = threads
        self.used = len(arena)
        self.arena = np.concatenate([arena, np.empty(self._reserve_size(), np.uint32)])
        self.counts: dict[int, int] = {}
        self.rows_of: list[IntArray] = []
        self.queue: list[tuple[int, int, int]] = []  # (-count, left << 16 | right, index into rows_of)
        self._workspaces = [self._workspace() for _ in range(threads)]

    def _reserve_size(self) -> int:
        return self.threads * 4 * (2 * self.row_length + 16)

    def _workspace(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], IntArray, npt.NDArray[np.int64]]:
        return (
            np.empty(2 * self.row_length + 16, np.uint32),
            np.zeros((4, self.vocab_size), np.int64),
            np.full(2 * self.vocab_size, -1, np.int32),
            np.empty((4 * (2 * self.vocab_size + 2), 2), np.int64),
        )

    def start_queue(self) -> None:
        """Count every pair of neighbours, with the rows that it is in."""
        size = 1 << 12
        while True:
            keys, used = np.empty(size, np.uint32), np.zeros(size, np.bool_)
            counts, words = np.empty(size, np.int64), np.empty(size, np.int64)
            last = np.empty(size, np.int32)
            if _count_pairs(self.arena, self.start, self.length, keys, used, counts, words, last):
                break
            size *= 4
        slots = np.flatnonzero(used)
        ends = np.cumsum(words[slots])
        place = np.zeros(size, np.int64)
        place[slots] = ends - words[slots]
        rows = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        _list_rows(self.arena, self.start, self.length, keys, used, last, place, rows)
        for key, count, end, number in zip(
            keys[slots].tolist(), counts[slots].tolist(), ends.tolist(), words[slots].tolist(), strict=True
        ):
            self.counts[key] = count
            self.queue.append((-count, key, len(self.rows_of)))
            self.rows_of.append(rows[end - number : end])
        heapq.heapify(self.queue)

    def next_pair(self, min_frequency: int) -> tuple[int, int, IntArray] | None:
        """The most frequent pair (of equals the smallest), with rows that have it; None when none is worth it."""
        while self.queue:
            negative, key, index = heapq.heappop(self.queue)
            count = self.counts[key]
            if count != -negative:  # outdated: put back where it belongs now
                heapq.heappush(self.queue, (-count, key, index))
                continue
            if count < max(1, min_frequency):
                return None
            rows = self.rows_of[index]
            self.rows_of[index] = np.empty(0, np.int32)  # never asked for again
            return key >> 16, key & 0xFFFF, rows
        return None

    def merge(self, a: int, b: int, new: int, rows: IntArray) -> None:
        """Replace (a, b) by `new` in `rows`, and bring counts and queue up to date."""
        # Waking a thread costs as much as some hundred thousand runs.
        heavy = self.threads > 1 and int(self.length[rows].sum()) > 1_000_000
        parts = np.array_split(rows, self.threads) if heavy else [rows]
        begins = [0] * len(parts)
        found: list[npt.NDArray[np.int64]] = []
        results: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(parts)
        for workspace in self._workspaces:
            workspace[1][:] = 0
            workspace[2][:] = -1
        while any(begin < len(part) for begin, part in zip(begins, parts, strict=True)):
            reserves = self._reserves(len(parts))

            def work(first: int, last: int, reserves: npt.NDArray[np.int64] = reserves) -> None:
                for p in range(first, last):
                    scratch, changes, seen, pairs = self._workspaces[p]
                    counters = np.zeros(1, np.int64)
                    begins[p] = _merge_rows(
                        parts[p], begins[p], self.arena, self.start, self.length, self.capacity, reserves[p],
                        a, b, new, scratch, changes, seen, pairs, counters,
                    )  # fmt: skip
                    results[p] = pairs[: counters[0]].copy()

            run_rows(work, len(parts), num_threads=self.threads, piece=1)
            self.used = int(reserves[:, 0].max())
            found += results
            for p, part in enumerate(parts):  # make room for whatever stopped a part early
                if begins[p] < len(part):
                    scratch, changes, seen, pairs = self._workspaces[p]
                    self._workspaces[p] = (scratch, changes, seen, np.empty((2 * len(pairs), 2), np.int64))
        self._count(a, b, new, np.sum([workspace[1] for workspace in self._workspaces], axis=0))
        self._enqueue(new, np.concatenate(found) if found else np.empty((0, 2), np.int64))

    def _reserves(self, parts: int) -> npt.NDArray[np.int64]:
        """Room at the end of the arena for rows that outgrow their place, one piece a thread; int64 [parts, 2]."""
        size = self._reserve_size()
        if len(self.arena) - self.used < size:
            self.arena = np.concatenate([self.arena, np.empty(max(size, len(self.arena) // 16), np.uint32)])
        bounds = np.linspace(self.used, len(self.arena), parts + 1).astype(np.int64)
        return np.stack([bounds[:-1], bounds[1:]], axis=1).copy()

    def _count(self, a: int, b: int, new: int, changes: npt.NDArray[np.int64]) -> None:
        for side in range(4):
            neighbours = np.flatnonzero(changes[side])
            if side in (_LEFT_OLD, _LEFT_NEW):
                keys = (neighbours << 16) | (a if side == _LEFT_OLD else new)
            else:
                keys = ((b if side == _RIGHT_OLD else new) << 16) | neighbours
            for key, change in zip(keys.tolist(), changes[side, neighbours].tolist(), strict=True):
                self.counts[key] = self.counts.get(key, 0) + change

    def _enqueue(self, new: int, found: npt.NDArray[np.int64]) -> None:
        left = found[:, 0] < self.vocab_size
        neighbour = found[:, 0] % self.vocab_size
        keys = np.where(left, (neighbour << 16) | new, (new << 16) | neighbour)
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], found[order, 1].astype(np.int32)
        bounds = [*np.flatnonzero(np.diff(keys, prepend=-1)).tolist(), len(keys)]
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            key = int(keys[begin])
            count = self.counts.get(key, 0)
            if count > 0:
                members = rows[begin:end]
                if (key >> 16) == (key & 0xFFFF):  # (new, new) is found from both sides
                    members = np.unique(members)
                heapq.heappush(self.queue, (-count, key, len(self.rows_of)))
                self.rows_of.append(members.copy())


def train_merges(
    arena: npt.NDArray[np.uint32],
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
        arena, lengths: the sequences as runs, from `Corpus.sequences` or `pack_sequences`.
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
    trainer = _Trainer(arena, lengths, row_length, vocab_size, resolve_threads(num_threads))
    trainer.start_queue()
    expansions: list[tuple[int, ...]] = [(i,) for i in range(base_size)]
    id_of = {expansion: i for i, expansion in enumerate(expansions)}
    found: dict[tuple[int, int], int] = {}
    while len(expansions) < vocab_size:
        best = trainer.next_pair(min_frequency)
        if best is None:
            break
        left, right, rows = best
        expansion = expansions[left] + expansions[right]
        new = id_of.setdefault(expansion, len(expansions))
        if new == len(expansions):
            expansions.append(expansion)
        found.pop((left, right), None)  # a pair that is merged again counts at its last place
        found[left, right] = new
        trainer.merge(left, right, new, rows)
        if progress is not None:
            progress(1)
    return Merges.from_pairs(base_size, [(left, right, new) for (left, right), new in found.items()])
