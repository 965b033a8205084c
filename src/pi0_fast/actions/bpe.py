"""Byte-pair encoding over integers: what a vocabulary is, encoding, decoding. Training is in bpe_training.py.

A sequence is a row of base ids 0 .. A-1; encoding replays the merges by rank, the leftmost first. Ids are those that
the BPE model of Hugging Face's `tokenizers` finds on the same symbols, at a fraction of the time. A base id of -1 is a
barrier: nothing merges across it, and it is dropped (the reference format needs that, see reference_format.py).

What is not here: what a base id means, and files; both are in vocabulary.py.

Worked on five integers, with base ids 0 and 1 and the sequence 0 0 1 0 0 (twice, so that a pair is worth merging):
the pairs (0, 0), (0, 1), (1, 0) occur 4, 2 and 2 times, so (0, 0) becomes token 2 and leaves 2 1 2; then (1, 2) and
(2, 1) tie at 2 and the smaller wins: token 3 = 1 0 0 leaves 2 3; token 4 = 0 0 1 0 0 ends it. Encoding 0 0 1 0 0
gives 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, kernel
from pi0_fast.types import TokenizerError

IntArray = npt.NDArray[np.int32]

#: Token ids are packed in pairs into 32 bits, run lengths beside token ids, ranks of merges beside positions in a row.
MAX_VOCABULARY = 0xFFFF
_NO_RANK = np.int32(0x7FFFFFFF)
_NO_KEY = np.uint32(0xFFFFFFFF)
_TOKEN, _COUNT, _START, _PREVIOUS, _NEXT = 0, 1, 2, 3, 4


# --- The vocabulary: base ids, merges, and what every id expands to -----------------------------------------


@dataclass(frozen=True, eq=False)
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
        if len(self.left) > MAX_VOCABULARY:
            raise TokenizerError(f"{len(self.left)} merges exceed the limit of {MAX_VOCABULARY}")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Merges)
            and self.base_size == other.base_size
            and np.array_equal(self.left, other.left)
            and np.array_equal(self.right, other.right)
            and np.array_equal(self.result, other.result)
        )

    __hash__ = None  # type: ignore[assignment]

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


# --- Encoding -----------------------------------------------------------------------------------------------


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
    """Merge the pair (a, b) that begins in run i; inside one run (a equal to b) all pairs if `sweep`, else the first.

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

    A row is a linked list of runs (token, repetitions): most of a chunk is zeros, and halving a run is one step. A key
    holds, for a run, the lowest rank that begins in it, and where it starts, so that the smallest key is the next
    merge: lowest rank first, then leftmost. Looking through all keys is a few vector instructions, cheaper than a heap.
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


@kernel
def _scatter(flat, lengths, out):  # type: ignore[no-untyped-def]
    position = 0
    for n in range(len(lengths)):
        for i in range(lengths[n]):
            out[n, i] = flat[position + i]
        position += lengths[n]


def scatter_rows(flat: IntArray, lengths: IntArray, fill: int) -> IntArray:
    """Rows that lie one after the other, of `lengths` int32 [N], as int32 [N, longest] with `fill` behind them."""
    out = np.full((len(lengths), int(lengths.max(initial=0))), fill, np.int32)
    _scatter(flat, lengths, out)
    return out


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

    Raises:
        TokenizerError: a row of more than 65,535 entries.
    """
    if lengths is None:
        lengths = np.full(len(rows), rows.shape[1], np.int32)
    if rows.shape[1] > MAX_VOCABULARY and lengths.max(initial=0) > MAX_VOCABULARY:
        raise TokenizerError(
            f"row {int(lengths.argmax())} has {lengths.max()} symbols to merge, more than the limit of {MAX_VOCABULARY}"
        )
    out = np.empty(rows.shape, np.int32)
    out_lengths = np.empty(len(rows), np.int32)
    table, ranks, sweepable = merges.table
    _encode_rows(
        rows,
        lengths,
        merges.left,
        merges.right,
        merges.result,
        merges.widths,
        table,
        ranks,
        sweepable,
        out,
        out_lengths,
    )
    return out, out_lengths


# --- Decoding -----------------------------------------------------------------------------------------------


@inlined
def expand_row(ids, values, bounds, out):  # type: ignore[no-untyped-def]
    """One row of `expand_rows`; returns how many values it would have, and the place of a bad id."""
    limit, total, bad = len(out), 0, -1
    for j in range(len(ids)):
        token = ids[j]
        if token < 0 or token >= len(bounds) - 1:
            bad = j
            break
        first, size = bounds[token], bounds[token + 1] - bounds[token]
        for k in range(min(size, max(limit - total, 0))):
            out[total + k] = values[first + k]
        total += size
    for k in range(total, limit):
        out[k] = 0
    return total, bad


@kernel
def _expand_rows(ids, starts, ends, values, bounds, out, totals, bad):  # type: ignore[no-untyped-def]
    whole = True
    for n in range(len(out)):
        totals[n], bad[n] = expand_row(ids[starts[n] : ends[n]], values, bounds, out[n])
        whole &= totals[n] == out.shape[1] and bad[n] < 0
    return whole


def expand_rows(
    ids: IntArray,
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    values: IntArray,
    bounds: npt.NDArray[np.int64],
    limit: int,
) -> tuple[IntArray, npt.NDArray[np.int64], npt.NDArray[np.int64], bool]:
    """Replace ids by what they stand for; one thread.

    Args:
        ids: int32 ids of all rows; row n is ``ids[starts[n]:ends[n]]``.
        starts, ends: int64 [N].
        values, bounds: id t stands for ``values[bounds[t]:bounds[t + 1]]``.
        limit: how many values of each row to keep.

    Returns:
        The values int32 [N, limit] (0 beyond a row's end); how many each row would have had, int64 [N]; and the
        position in the row of the first id outside the vocabulary, where expansion stops, int64 [N] (-1: none);
        and whether every row has exactly `limit` values and no such id.
    """
    rows = len(starts)
    out = np.empty((rows, limit), np.int32)
    totals, bad = np.empty(rows, np.int64), np.empty(rows, np.int64)
    whole = _expand_rows(ids, starts, ends, values, bounds, out, totals, bad)
    return out, totals, bad, whole
