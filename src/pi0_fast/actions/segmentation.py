"""Byte-pair encoding as a search: the one way to cut a row into tokens in which every two neighbours fit.

Replaying merges (bpe.py) looks at every pair once for each merge. But where every id is made by one merge only, a cut
of a row into tokens is the byte-pair encoding exactly if each pair of neighbouring tokens alone would be encoded as
itself.
So walk along the row, take the longest token that fits its left neighbour, and step back where none does. Whether two
tokens fit is found by undoing their merges at the seam, the latest first, and remembered in a table.

What is not here: vocabularies in which two merges make the same id; those are left to bpe.py.

With the merges (0, 0) -> 2 and (2, 2) -> 3: in 0 0 0 the longest token, 2, is followed by 0, and they fit; 0 followed
by 2 would not, since merging goes from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, kernel
from pi0_fast.actions.bpe import IntArray, Merges, encode_rows

_NO_RANK = np.int32(0x7FFFFFFF)
_SHORTER, _WIDTH, _BORN, _LEFT, _RIGHT = 0, 1, 2, 3, 4
_FITS, _FITS_NOT = np.int8(1), np.int8(2)
#: Up to this many ids, what is known of pairs is kept in a table (16 MB at most); beyond it is found anew each time.
_LARGEST_REMEMBERED = 4096


@dataclass(frozen=True)
class SearchTables:
    """What `segment_rows` looks up; built once for a vocabulary by `search_tables`.

    Few arrays rather than clear ones: handing an array to a kernel takes as long as encoding some tokens.

    Attributes:
        keys, children: hash table of the trie of all expansions: (node + 1) << 32 | base id -> node, from root 0.
        longest: int32 [nodes]; the longest token that begins the way to each node, -1 at the root.
        tokens: int32 [V, 5]; of each token, by `_SHORTER` to `_RIGHT`: the longest token that is a proper beginning of
            it (-1: none), its number of base ids, the rank of the merge that makes it (-1: none), and what that joins.
        common: the base id that most often stands in runs.
        chain: int32; the node after 0, 1, 2, ... times `common`.
        merges: hash table of the merges, uint64: (left << 16 | right) + 1 << 32 | rank, or 0.
        known: int8 [V * V] or empty; whether two tokens fit, as far as it has been asked.
    """

    keys: npt.NDArray[np.uint64]
    children: IntArray
    longest: IntArray
    tokens: IntArray
    common: int
    chain: IntArray
    merges: npt.NDArray[np.uint64]
    known: npt.NDArray[np.int8]


def is_searchable(merges: Merges) -> bool:
    """Whether every id is made by one merge only, so that `segment_rows` gives the byte-pair encoding."""
    return len(np.unique(merges.result)) == len(merges.result) and not (merges.result < merges.base_size).any()


def search_tables(merges: Merges) -> SearchTables:
    """Build the tables of a vocabulary for which `is_searchable`; some ten milliseconds.

    A token that byte-pair encoding never makes, because merges of lower rank break up what it stands for, has no place
    in the trie.
    """
    made = _tokens_that_are_made(merges)
    expansions = [expansion if made[i] else () for i, expansion in enumerate(merges.expansions)]
    values = np.array([value for expansion in expansions for value in expansion], np.int32)
    bounds = np.concatenate([[0], np.cumsum([len(expansion) for expansion in expansions], dtype=np.int64)])
    size = 1 << 12
    while True:  # most ways begin alike, so the number of nodes is not known before
        keys, children = np.zeros(size, np.uint64), np.zeros(size, np.int32)
        longest = np.full(size, -1, np.int32)
        shorter = np.full(len(expansions), -1, np.int32)
        nodes = _build_trie(values, bounds, keys, children, longest, shorter)
        if nodes > 0:
            break
        size *= 4
    common = int(np.bincount(values).argmax())
    chain = [0]
    while (node := _child(keys, children, chain[-1], common)) >= 0:
        chain.append(node)
    count = len(expansions)
    tokens = np.zeros((count, 5), np.int32)
    tokens[:, _SHORTER], tokens[:, _WIDTH], tokens[:, _BORN] = shorter, merges.widths, -1
    tokens[merges.result, _BORN] = np.arange(len(merges.result))
    tokens[merges.result, _LEFT], tokens[merges.result, _RIGHT] = merges.left, merges.right
    table = np.zeros(1 << int(np.ceil(np.log2(4 * len(merges.left) + 4))), np.uint64)
    _fill_merges(merges.left, merges.right, table)
    known = np.zeros(count * count if count <= _LARGEST_REMEMBERED else 0, np.int8)
    return SearchTables(keys, children, longest[:nodes].copy(), tokens, common, np.array(chain, np.int32), table, known)


def _tokens_that_are_made(merges: Merges) -> npt.NDArray[np.bool_]:
    """Which tokens are the encoding of what they stand for, bool [V]."""
    made = np.ones(len(merges.expansions), bool)
    for begin in range(0, len(made), 512):
        part = merges.expansions[begin : begin + 512]
        lengths = np.array([len(expansion) for expansion in part], np.int32)
        rows = np.zeros((len(part), int(lengths.max())), np.int32)
        for row, expansion in zip(rows, part, strict=True):
            row[: len(expansion)] = expansion
        ids, counts = encode_rows(merges, rows, lengths)
        made[begin : begin + 512] = (counts == 1) & (ids[:, 0] == np.arange(begin, begin + len(part)))
    return made


@inlined
def _find(keys, node, symbol):  # type: ignore[no-untyped-def]
    """The slot of a trie edge, or the empty one where it would go."""
    mask = np.uint64(len(keys) - 1)
    key = (np.uint64(node + 1) << np.uint64(32)) | np.uint64(symbol)
    slot = ((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & mask
    while keys[slot] != np.uint64(0) and keys[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot, key


@kernel
def _child(keys, children, node, symbol):  # type: ignore[no-untyped-def]
    slot, _ = _find(keys, node, symbol)
    return children[slot] if keys[slot] != np.uint64(0) else -1


@kernel
def _build_trie(values, bounds, keys, children, longest, shorter):  # type: ignore[no-untyped-def]
    """Fill the tables; returns the number of nodes, or -1 if there are more than a quarter of the slots."""
    nodes = 1
    for token in range(len(bounds) - 1):
        node = 0
        for k in range(bounds[token], bounds[token + 1]):
            slot, key = _find(keys, node, values[k])
            if keys[slot] == np.uint64(0):
                if nodes * 4 >= len(keys):
                    return -1
                keys[slot], children[slot] = key, nodes
                nodes += 1
            node = children[slot]
        if node > 0:
            longest[node] = token
    ends = longest.copy()
    for token in range(len(bounds) - 1):
        node, before = 0, -1
        for k in range(bounds[token], bounds[token + 1]):
            slot, _ = _find(keys, node, values[k])
            node = children[slot]
            if k + 1 == bounds[token + 1]:
                shorter[token] = before
            if ends[node] >= 0:
                before = ends[node]
            longest[node] = before
    return nodes


@inlined
def _merge_slot(left, right, merges):  # type: ignore[no-untyped-def]
    """The slot of a pair in the table of merges, or the empty one where it would go; and its key."""
    mask = np.uint64(len(merges) - 1)
    key = ((np.uint64(left) << np.uint64(16)) | np.uint64(right)) + np.uint64(1)
    slot = ((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & mask
    while merges[slot] != np.uint64(0) and (merges[slot] >> np.uint64(32)) != key:
        slot = (slot + np.uint64(1)) & mask
    return slot, key


@kernel
def _fill_merges(left, right, merges):  # type: ignore[no-untyped-def]
    for rank in range(len(left)):
        slot, key = _merge_slot(left[rank], right[rank], merges)
        merges[slot] = (key << np.uint64(32)) | np.uint64(rank)


@kernel
def _fit(x, y, tokens, merges):  # type: ignore[no-untyped-def]
    """Whether x followed by y is how byte-pair encoding cuts what they stand for.

    Going back in time, the tokens at the seam are ever smaller parts of x and y. At no time may their own merge have
    come before the merge that took one of them away from the seam. Equal ranks are merged from left to right, so a
    merge inside x comes before an equal one at the seam, and one inside y after it.
    """
    limit = np.int64(_NO_RANK)
    while True:
        slot, _ = _merge_slot(x, y, merges)
        if merges[slot] != np.uint64(0) and np.int64(merges[slot] & np.uint64(0xFFFFFFFF)) < limit:
            return False
        if tokens[x, _BORN] < 0 and tokens[y, _BORN] < 0:
            return True
        if tokens[x, _BORN] > tokens[y, _BORN]:
            limit = np.int64(tokens[x, _BORN])
            x = tokens[x, _RIGHT]
        else:
            limit = np.int64(tokens[y, _BORN]) + 1
            y = tokens[y, _LEFT]


@kernel
def _segment_rows(  # type: ignore[no-untyped-def]
    rows, lengths, keys, children, longest, tokens, common, chain, merges, known, out, out_lengths
):
    count_of_tokens = len(tokens)
    remember = len(known) > 0
    run_from = np.empty(rows.shape[1] + 1, np.int32)  # how many `common` follow from each place
    dead = np.empty(rows.shape[1] + 1, np.bool_)  # places from which the row cannot be cut to its end
    base = 0  # where the row's ids begin in `out`
    for n in range(len(rows)):
        row, count, size = rows[n], 0, lengths[n]
        run = 0
        for i in range(size - 1, -1, -1):
            run = run + 1 if row[i] == common else 0
            run_from[i] = run
            dead[i] = False
        dead[size] = False
        begin = 0
        while begin < size:
            end = begin
            while end < size and row[end] >= 0:
                end += 1
            first = count  # the first token between two barriers has no left neighbour
            position, token, retry = begin, np.int32(-1), False
            while position < end:
                if not retry:
                    # The longest token from here: jump over a run of the common id, then walk the trie.
                    run = run_from[position]
                    steps = min(run, len(chain) - 1)
                    node, at = chain[steps], position + steps
                    walking = steps == run
                    while walking and at < end:
                        slot, _ = _find(keys, node, row[at])
                        walking = keys[slot] != np.uint64(0)
                        if walking:
                            node = children[slot]
                            at += 1
                    token = longest[node]
                placed = False
                while token >= 0 and not placed:
                    placed = not dead[position + tokens[token, _WIDTH]]
                    if placed and count > first:
                        before = out[base + count - 1]
                        if remember:
                            fact = known[before * count_of_tokens + token]
                            if fact == 0:
                                fact = _FITS if _fit(before, token, tokens, merges) else _FITS_NOT
                                known[before * count_of_tokens + token] = fact
                            placed = fact == _FITS
                        else:
                            placed = _fit(before, token, tokens, merges)
                    if not placed:
                        token = tokens[token, _SHORTER]
                retry = not placed
                if placed:
                    out[base + count] = token
                    count += 1
                    position += tokens[token, _WIDTH]
                elif count == first:
                    return -1  # no cut at all: cannot be, see segment_rows
                else:  # step back, and try what is shorter there
                    dead[position] = True
                    count -= 1
                    token = out[base + count]
                    position -= tokens[token, _WIDTH]
                    token = tokens[token, _SHORTER]
            begin = end + 1
        out_lengths[n] = count
        base += count
    return base


def segment_rows(tables: SearchTables, rows: IntArray, lengths: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Encode each row of base ids; one thread.

    Args:
        tables: of the vocabulary.
        rows: int32 [N, L] base ids, or -1 for a barrier.
        lengths: int32 [N], how many entries of each row count; None means L.

    Returns:
        The ids of all rows, one row after the other, int32, and how many each row has, int32 [N].
    """
    out_lengths = np.empty(len(rows), np.int32)
    if lengths is None:
        lengths = out_lengths  # read before it is written
        lengths.fill(rows.shape[1])
    out = np.empty(rows.size, np.int32)
    written = _segment_rows(
        rows, lengths, tables.keys, tables.children, tables.longest, tables.tokens, tables.common, tables.chain,
        tables.merges, tables.known, out, out_lengths,
    )  # fmt: skip
    if written < 0:
        raise RuntimeError("a row has no byte-pair encoding: its ids are not all base ids of the vocabulary")
    return out[:written].copy(), out_lengths
