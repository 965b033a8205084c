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
_HEADER = 4
_SHORTER, _WIDTH, _BORN, _LEFT, _RIGHT = 0, 1, 2, 3, 4
_FITS, _FITS_NOT = np.int8(1), np.int8(2)
#: Up to this many ids, what is known of pairs is kept in a table (16 MB at most); beyond it is found anew each time.
_LARGEST_REMEMBERED = 4096


@dataclass(frozen=True)
class SearchTables:
    """What `segment_row` looks up; built once for a vocabulary by `search_tables`, taken apart by `unpacked`.

    Three arrays rather than seven: handing an array to a kernel takes as long as encoding some tokens.

    Attributes:
        wide: uint64; the `keys` of the trie, then the table of `merges`.
        narrow: int32; a header of `_HEADER` numbers, then `children`, `longest`, `ahead`, `chain` and `tokens`.
        known: int8 [V * V] or empty; whether two tokens fit, as far as it has been asked.

    The parts:
        keys, children: hash table of the trie of all expansions: (node + 1) << 32 | base id -> node, from root 0.
        longest: [nodes]; the longest token that begins the way to each node, -1 at the root.
        ahead: [nodes]; the base id that leads from each node to the one numbered next, -1 where none does. Most nodes
            have one child, numbered next: then no hash table is asked, and memory is read in order.
        common: the base id that most often stands in runs.
        chain: the node after 0, 1, 2, ... times `common`.
        tokens: [V, 5]; of each token, by `_SHORTER` to `_RIGHT`: the longest token that is a proper beginning of it
            (-1: none), its number of base ids, the rank of the merge that makes it (-1: none), and what that joins.
        merges: hash table of the merges: (left << 16 | right) + 1 << 32 | rank, or 0.
    """

    wide: npt.NDArray[np.uint64]
    narrow: IntArray
    known: npt.NDArray[np.int8]

    @classmethod
    def pack(
        cls,
        keys: npt.NDArray[np.uint64],
        children: IntArray,
        longest: IntArray,
        ahead: IntArray,
        common: int,
        chain: IntArray,
        tokens: IntArray,
        merges: npt.NDArray[np.uint64],
        known: npt.NDArray[np.int8],
    ) -> SearchTables:
        """Join the parts."""
        header = np.array([len(keys), len(longest), len(chain), common], np.int32)
        narrow = np.concatenate([header, children, longest, ahead, chain, tokens.reshape(-1)])
        return cls(np.concatenate([keys, merges]), narrow, known)


@inlined
def unpacked(wide, narrow):  # type: ignore[no-untyped-def]
    """The parts of `SearchTables`: keys, children, longest, ahead, common, chain, tokens, merges."""
    first = _HEADER + narrow[0]
    second = first + narrow[1]
    third = second + narrow[1]
    fourth = third + narrow[2]
    keys, merges = wide[: narrow[0]], wide[narrow[0] :]
    children, longest, ahead = narrow[_HEADER:first], narrow[first:second], narrow[second:third]
    chain, tokens = narrow[third:fourth], narrow[fourth:].reshape((len(narrow) - fourth) // 5, 5)
    return keys, children, longest, ahead, narrow[3], chain, tokens, merges


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
        longest, ahead = np.full((2, size), -1, np.int32)
        shorter = np.full(len(expansions), -1, np.int32)
        nodes = _build_trie(values, bounds, keys, children, longest, ahead, shorter)
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
    return SearchTables.pack(
        keys, children, longest[:nodes], ahead[:nodes], common, np.array(chain, np.int32), tokens, table, known
    )


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
def _build_trie(values, bounds, keys, children, longest, ahead, shorter):  # type: ignore[no-untyped-def]
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
                if nodes == node + 1:
                    ahead[node] = values[k]
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


@inlined
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


@inlined
def segment_row(  # type: ignore[no-untyped-def]
    row, size, keys, children, longest, ahead, common, chain, tokens, merges, known, run_from, dead, out
):
    """Encode the first `size` base ids of a row into `out`; returns the number of tokens, -1 if there is no way.

    `run_from` (how many `common` follow from each place) and `dead` (places from which the row cannot be cut to its
    end) are scratch of size + 1. One piece: cut into steps, even inlined ones, it is a tenth slower.
    """
    count, run, any_dead = 0, 0, False
    for i in range(size - 1, -1, -1):
        run = run + 1 if row[i] == common else 0
        run_from[i] = run
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
                    if ahead[node] == row[at]:
                        node += 1
                        at += 1
                        continue
                    slot, _ = _find(keys, node, row[at])
                    walking = keys[slot] != np.uint64(0)
                    if walking:
                        node = children[slot]
                        at += 1
                token = longest[node]
            placed = False
            while token >= 0 and not placed:
                placed = not (any_dead and dead[position + tokens[token, _WIDTH]])
                if placed and count > first:
                    before = out[count - 1]
                    if len(known) > 0:
                        fact = known[before * len(tokens) + token]
                        if fact == 0:
                            fact = _FITS if _fit(before, token, tokens, merges) else _FITS_NOT
                            known[before * len(tokens) + token] = fact
                        placed = fact == _FITS
                    else:
                        placed = _fit(before, token, tokens, merges)
                if not placed:
                    token = tokens[token, _SHORTER]
            retry = not placed
            if placed:
                out[count] = token
                count += 1
                position += tokens[token, _WIDTH]
            elif count == first:
                return -1  # no cut at all: cannot be, see segment_rows
            else:  # step back, and try what is shorter there
                if not any_dead:  # most rows need no step back, and then nobody looks at `dead`
                    any_dead = True
                    dead[: size + 1] = False
                dead[position] = True
                count -= 1
                token = out[count]
                position -= tokens[token, _WIDTH]
                token = tokens[token, _SHORTER]
        begin = end + 1
    return count


@kernel
def _segment_rows(rows, lengths, wide, narrow, known, out, out_lengths):  # type: ignore[no-untyped-def]
    keys, children, longest, ahead, common, chain, tokens, merges = unpacked(wide, narrow)
    run_from = np.empty(rows.shape[1] + 1, np.int32)
    dead = np.empty(rows.shape[1] + 1, np.bool_)
    base = 0  # where the row's ids begin in `out`
    for n in range(len(rows)):
        count = segment_row(
            rows[n], lengths[n], keys, children, longest, ahead, common, chain, tokens, merges, known, run_from, dead,
            out[base:],
        )  # fmt: skip
        if count < 0:
            return -1
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
    if lengths is None:
        lengths = np.full(len(rows), rows.shape[1], np.int32)
    out, out_lengths = np.empty(rows.size, np.int32), np.empty(len(rows), np.int32)
    written = _segment_rows(rows, lengths, tables.wide, tables.narrow, tables.known, out, out_lengths)
    if written < 0:
        raise RuntimeError("a row has no byte-pair encoding: its ids are not all base ids of the vocabulary")
    return out[:written].copy(), out_lengths
