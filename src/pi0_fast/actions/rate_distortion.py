"""The cheapest tokens for a chunk: encoding as a shortest path, errors against tokens.

Rounding first and merging after is only one way to write a chunk down: decoding joins what the tokens stand for,
whatever tokens they are. Here the encoder looks for the sequence that minimises

    sum over the coefficients of (x - c)^2  +  rate_weight * number of tokens

where x are the scaled coefficients before rounding and c those that the tokens stand for. That is a shortest path: the
nodes are the places 0 .. L of a flattened chunk, and each entry of the vocabulary that is near x from one place on
leads to another. It is found exactly, from the last place to the first, by walking the trie of the vocabulary. All
costs are counted from those of rounding, so an error never lowers the cost of a way; a walk ends where even the best
end that is still within its reach would not be better than what is known already, and jumps over runs of zeros.

A bound on the error of every single action is kept by making the errors of a dimension dearer, chunk by chunk. What is
not here: threads, and values that are no actions (tokenizer.py).

With tokens for 0, 1 and (0 0), x = 0.6 0.1 is rounded to 1 0: two tokens. As 0 0 it has one token, and the squared
error is larger by 0.36 - 0.16 = 0.2: that is taken if a token weighs more than 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast._kernels import inlined, kernel
from pi0_fast.actions.dct import Order, dct_matrix, dequantize_rows, from_frequency_order, to_frequency_order
from pi0_fast.actions.reference_format import byte_characters
from pi0_fast.actions.vocabulary import Vocabulary

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Exits with more states behind them than this are searched by halves.
_FEW = 6
#: Bounds are kept for what is left of entries with up to this many coefficients that are not 0.
_COUNTED = 4
#: How often the errors of a dimension that is beyond its bound are made four times as dear.
_MOST_ROUNDS = 10


@dataclass(frozen=True)
class PathTables:
    """Everything that ids can stand for, as a trie without its zeros; all int32, built once by `path_tables`.

    Most coefficients are 0, and what a run of zeros costs is known without walking along it. So a state is where the
    trie stands after a coefficient that is not 0 (state 0: at the root). An exit of a state is a number of zeros after
    which an entry ends, or another such coefficient follows. An entry is one id, or, in byte-level vocabularies,
    several ids that only together stand for whole coefficients.

    Attributes:
        exits: [states + 1]; the exits of state s are exits[s] .. exits[s + 1] - 1.
        runs: [exits]; the zeros of each, ascending within a state.
        entries: [exits]; the entry that ends after them, -1 where none does.
        reach: [exits]; how many coefficients follow the state at most, through this exit or a later one.
        nonzero: [exits]; how many coefficients that are not 0 follow the state at most, likewise.
        own_reach, own_nonzero: [exits]; the same through this exit and what follows it only.
        children: [exits + 1]; what follows an exit are the states children[e] .. children[e + 1] - 1.
        symbols: [states]; the coefficient that leads to each state; ascending within an exit.
        ends: [states]; the entry that ends with it, -1 where none does.
        value_bounds, values: entry e stands for the coefficients values[value_bounds[e] : value_bounds[e + 1]].
        id_bounds, ids: the ids of each entry.
        longer: [entries]; the entry that stands for the same after one more 0, -1 where there is none.
    """

    exits: IntArray
    runs: IntArray
    entries: IntArray
    reach: IntArray
    nonzero: IntArray
    own_reach: IntArray
    own_nonzero: IntArray
    children: IntArray
    symbols: IntArray
    ends: IntArray
    value_bounds: IntArray
    values: IntArray
    id_bounds: IntArray
    ids: IntArray
    longer: IntArray

    @property
    def most_ids(self) -> int:
        """The number of ids of the longest entry."""
        return int(np.diff(self.id_bounds).max())


class _State:
    """A state while the trie is built: what ends here, and its exits by their zeros: (entry, children by symbol)."""

    def __init__(self) -> None:
        self.end = -1
        self.exits: dict[int, tuple[list[int], dict[int, _State]]] = {}

    def exit(self, run: int) -> tuple[list[int], dict[int, _State]]:
        """The exit after so many zeros; made where there was none."""
        return self.exits.setdefault(run, ([-1], {}))


def path_tables(vocabulary: Vocabulary) -> PathTables:
    """Build the tables; some tens of milliseconds."""
    entries = _entries(vocabulary)
    root = _State()
    for number, expansion in enumerate(entries):
        state, run = root, 0
        for value in expansion:
            if value == 0:
                run += 1
            else:
                state = state.exit(run)[1].setdefault(value, _State())
                run = 0
        if run:
            state.exit(run)[0][0] = number
        else:
            state.end = number
    # Numbered level by level, so that the states behind an exit stand side by side.
    states, symbols = [root], [0]
    exits, runs, ends, children = [0], [], [], []
    for state in states:  # grows on the way
        for run, (entry, following) in sorted(state.exits.items()):
            runs.append(run)
            ends.append(entry[0])
            children.append(len(states))
            for value, child in sorted(following.items()):
                states.append(child)
                symbols.append(value)
        exits.append(len(runs))
    children.append(len(states))
    reach, nonzero, own_reach, own_nonzero = _reaches(exits, runs, children)
    expansions, ids = list(entries), list(entries.values())
    numbers = {expansion: number for number, expansion in enumerate(expansions)}
    return PathTables(
        exits=np.array(exits, np.int32),
        runs=np.array(runs, np.int32),
        entries=np.array(ends, np.int32),
        reach=reach,
        nonzero=nonzero,
        own_reach=own_reach,
        own_nonzero=own_nonzero,
        children=np.array(children, np.int32),
        symbols=np.array(symbols, np.int32),
        ends=np.array([state.end for state in states], np.int32),
        value_bounds=_bounds(expansions),
        values=np.array([value for expansion in expansions for value in expansion], np.int32),
        id_bounds=_bounds(ids),
        ids=np.array([i for row in ids for i in row], np.int32),
        longer=np.array([numbers.get((0, *expansion), -1) for expansion in expansions], np.int32),
    )


def _reaches(exits: list[int], runs: list[int], children: list[int]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """`reach`, `nonzero`, `own_reach` and `own_nonzero` of `PathTables`."""
    reach, nonzero, own_reach, own_nonzero = np.zeros((4, len(runs)), np.int32)
    for state in range(len(exits) - 2, -1, -1):
        longest = most = 0
        for e in range(exits[state + 1] - 1, exits[state] - 1, -1):
            own_reach[e] = runs[e]
            for child in range(children[e], children[e + 1]):
                begin, further = exits[child], exits[child] < exits[child + 1]
                own_reach[e] = max(own_reach[e], runs[e] + 1 + (reach[begin] if further else 0))
                own_nonzero[e] = max(own_nonzero[e], 1 + (nonzero[begin] if further else 0))
            longest, most = max(longest, own_reach[e]), max(most, own_nonzero[e])
            reach[e], nonzero[e] = longest, most
    return reach, nonzero, own_reach, own_nonzero


def _bounds(rows: list[tuple[int, ...]]) -> IntArray:
    return np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)


def _entries(vocabulary: Vocabulary) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Coefficients -> the fewest ids found that stand for them; every coefficient alone is there."""
    if vocabulary.symbol_format == "plain":
        return {expansion: (i,) for i, expansion in enumerate(vocabulary.expansions)}
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    byte_level = set(byte_characters())
    heads: list[tuple[bytes, int]] = []
    tails: list[tuple[bytes, int]] = []
    for i, (text, expansion) in enumerate(zip(vocabulary.characters, vocabulary.expansions, strict=True)):
        if not byte_level.issuperset(text):
            continue  # it decodes, but the encoder never makes it
        content = bytes(expansion)
        whole = _coefficients(content, vocabulary.min_token)
        if whole is not None:
            found[whole] = (i,)
        elif 0x80 <= content[0] < 0xC0:
            tails.append((content, i))
        else:
            heads.append((content, i))
    for head, left in heads:  # two ids that meet inside a coefficient
        for tail, right in tails:
            whole = _coefficients(head + tail, vocabulary.min_token)
            if whole is not None:
                found.setdefault(whole, (left, right))
    alone = vocabulary.encodable
    ids, counts = vocabulary.encode(alone[:, None].astype(np.int32))
    ends = np.cumsum(counts)
    flat: list[int] = ids.tolist()
    for coefficient, end, count in zip(alone.tolist(), ends.tolist(), counts.tolist(), strict=True):
        found.setdefault((coefficient,), tuple(flat[end - count : end]))
    return found


def _coefficients(content: bytes, min_token: int) -> tuple[int, ...] | None:
    """What bytes stand for; None if they are not whole characters."""
    try:
        return tuple(ord(character) + min_token for character in content.decode("utf-8"))
    except UnicodeDecodeError:
        return None


@kernel
def transform_rows(chunks, matrix, scales, out):  # type: ignore[no-untyped-def]
    """Chunks float32 [N, H, D] -> scaled coefficients before rounding, all dimensions of frequency 0 first.

    `matrix` is `dct.dct_matrix`, `scales` float32 [D], `out` float32 [N, H*D].
    """
    rows, horizon, size = chunks.shape
    for n in range(rows):
        for k in range(horizon):
            level = out[n, k * size : (k + 1) * size]
            for d in range(size):
                level[d] = np.float32(0.0)
            for t in range(horizon):
                weight = matrix[k, t]
                for d in range(size):
                    level[d] += weight * chunks[n, t, d]
            for d in range(size):
                level[d] *= scales[d]


@inlined
def _at_least(symbols, begin, end, value):  # type: ignore[no-untyped-def]
    """The first of ascending symbols[begin:end] that is not below `value`; `end` if all are."""
    low, high = np.int64(begin), np.int64(end)
    guess = begin + value - symbols[begin] - (value > 0)  # the states behind the root mostly have no gap but 0
    if begin <= guess < end and symbols[guess] == value:
        low = np.int64(guess)
    else:
        while low < high:
            middle = (low + high) // 2
            if symbols[middle] < value:
                low = middle + 1
            else:
                high = middle
    return low


@inlined
def _round(x, symbols, begin, end, zero):  # type: ignore[no-untyped-def]
    """The place of the symbol nearest to x among ascending symbols[begin:end]; -1 if 0 is nearer and `zero` allows it.

    Of two that are equally near the even one, as `rint` does it, where it is there.
    """
    wanted = np.int64(np.rint(x))
    place = np.int64(-1)
    if wanted != 0 or not zero:
        place = _at_least(symbols, begin, end, wanted)
        if place == end or (
            symbols[place] != wanted and place > begin and x - symbols[place - 1] <= symbols[place] - x
        ):
            place -= 1
        if zero and abs(x) <= abs(x - symbols[place]):
            place = np.int64(-1)
    return place


@inlined
def _begin_row(  # type: ignore[no-untyped-def]
    row, weights, exits, runs, entries, children, symbols, ends, nearest, zeroed, lifted, alone
):
    """Fill in what is known of a row before the search; see `_cheapest_rows`."""
    zero = np.int32(-1)  # the entry of a 0 alone
    for e in range(exits[0], exits[1]):
        if runs[e] == 1:
            zero = entries[e]
    first, last = np.int64(0), np.int64(0)
    if runs[0] == 0:
        first, last = np.int64(children[0]), np.int64(children[1])
    zeroed[0] = 0.0
    for j in range(len(row)):
        x = np.float64(row[j])
        weight = np.float64(weights[j]) if len(weights) > 0 else 1.0
        place = _round(x, symbols, first, last, zero >= 0)
        nearest[j] = (x - symbols[place]) ** 2 if place >= 0 else x * x
        alone[j] = ends[place] if place >= 0 else zero
        lifted[j] = 0.0 if place >= 0 else weight * max(0.0, 1.0 - 2.0 * abs(x))
        zeroed[j + 1] = zeroed[j] + weight * (x * x - nearest[j])


@inlined
def _search_row(  # type: ignore[no-untyped-def]
    row, weights, rate, exits, runs, entries, reach, nonzero, own_reach, own_nonzero, children, symbols, ends,
    id_bounds, longer, nearest, zeroed, lifted, alone, togo, least, ahead, chosen, stack_state, stack_place, stack_cost,
):  # fmt: skip
    """Fill `togo` and `chosen`, from the last place to the first; see `_cheapest_rows`.

    One piece, as its loops hand everything to each other: cut into steps, even inlined ones, it is 2.5 times slower.
    """
    size = len(row)
    togo[size], least[size], ahead[:, size] = 0.0, 0.0, zeroed[size]
    for i in range(size - 1, -1, -1):
        ahead[:, i] = -np.inf
        choice = alone[i]  # a way that is always there
        best = rate * (id_bounds[choice + 1] - id_bounds[choice]) + togo[i + 1]
        if i + 1 < size:
            entry = longer[chosen[i + 1]]
            if entry >= 0:  # along a run of zeros the best entry often ends where it did
                more = id_bounds[entry + 1] - id_bounds[entry] - id_bounds[chosen[i + 1] + 1] + id_bounds[chosen[i + 1]]
                total = zeroed[i + 1] - zeroed[i] + togo[i + 1] + rate * more
                if total < best:
                    best, choice = total, entry
        stack_state[0], stack_place[0], stack_cost[0] = 0, i, rate
        depth = 1
        while depth > 0:
            depth -= 1
            state, j, before = stack_state[depth], stack_place[depth], stack_cost[depth]
            for e in range(exits[state], exits[state + 1]):
                b = j + runs[e]
                if b > size:
                    break
                cost = before + (zeroed[b] - zeroed[j])
                q = nonzero[e]
                if cost + least[min(j + reach[e], size)] >= best or (
                    q <= _COUNTED and before - zeroed[j] + ahead[q, b] >= best
                ):
                    break  # through later exits it costs no less
                entry = entries[e]
                if entry >= 0:
                    total = cost + rate * (id_bounds[entry + 1] - id_bounds[entry] - 1) + togo[b]
                    if total < best:
                        best, choice = total, entry
                begin, end = children[e], children[e + 1]
                if begin == end or b == size or cost + lifted[b] + least[min(j + own_reach[e], size)] >= best:
                    continue
                q = own_nonzero[e]
                if q <= _COUNTED and cost + lifted[b] - zeroed[b + 1] + ahead[q - 1, b + 1] >= best:
                    continue
                x = np.float64(row[b])
                weight = np.float64(weights[b]) if len(weights) > 0 else 1.0
                middle = np.int64(begin)
                if end - begin > _FEW:
                    middle = _at_least(symbols, begin, end, np.int64(np.rint(x)))
                step, child = np.int64(1), middle
                while True:
                    # From the middle upwards, then from below the middle downwards, until it is too far.
                    if child == end or child < begin:
                        if step < 0 or middle == begin:
                            break
                        step, child = np.int64(-1), middle - 1
                        continue
                    more = cost + weight * ((x - symbols[child]) ** 2 - nearest[b])
                    if more + least[size] >= best:
                        if end - begin > _FEW:  # farther ones cost more
                            child = np.int64(end) if step > 0 else np.int64(begin - 1)
                            continue
                    else:
                        entry = ends[child]
                        if entry >= 0:
                            total = more + rate * (id_bounds[entry + 1] - id_bounds[entry] - 1) + togo[b + 1]
                            if total < best:
                                best, choice = total, entry
                        onward = exits[child]
                        if onward < exits[child + 1] and more + least[min(b + 1 + reach[onward], size)] < best:
                            q = nonzero[onward]
                            if q <= _COUNTED and more - zeroed[b + 1] + ahead[q, b + 1] >= best:
                                child += step
                                continue
                            stack_state[depth], stack_place[depth], stack_cost[depth] = child, b + 1, more
                            depth += 1
                    child += step
        togo[i], chosen[i], least[i] = best, choice, best
        ahead[0, i] = min(ahead[0, i + 1], zeroed[i] + best)
        for q in range(1, _COUNTED + 1):
            lifting = zeroed[i] + lifted[i] - zeroed[i + 1] + ahead[q - 1, i + 1]
            ahead[q, i] = min(ahead[q, i + 1], ahead[0, i], lifting)
        j = i + 1
        while j <= size and least[j] > best:
            least[j] = best
            j += 1


@kernel
def _cheapest_rows(  # type: ignore[no-untyped-def]
    rows, rate, weights, exits, runs, entries, reach, nonzero, own_reach, own_nonzero, children, symbols, ends,
    value_bounds, values, id_bounds, ids, longer, out, counts, coefficients, costs,
):  # fmt: skip
    """See `cheapest_rows`. Returns how many ids were written.

    What is known of a row: `nearest` [L], the squared error of rounding; `zeroed` [L + 1], what setting all before each
    place to 0 costs; `lifted` [L], what setting a coefficient to something else than 0 costs at least; `alone` [L], the
    entry of the rounded coefficient alone. What is found: `togo` [L + 1], the least cost from each place to the end;
    `chosen` [L], the entry that it begins with. Bounds: `least` [L + 1], the least `togo` of all from the place after
    the current one up to each; ahead[q, j] less zeroed[j], what it costs at least from j to the end if an entry goes on
    there that has up to q more coefficients other than 0.
    """
    size = rows.shape[1]
    nearest, zeroed, lifted = np.empty(size), np.empty(size + 1), np.empty(size)
    togo, least, ahead = np.empty(size + 1), np.empty(size + 1), np.empty((_COUNTED + 1, size + 1))
    chosen, alone = np.empty(size, np.int32), np.empty(size, np.int32)
    stack_state, stack_place = np.empty(len(symbols), np.int32), np.empty(len(symbols), np.int32)
    stack_cost = np.empty(len(symbols))
    written = 0
    for n in range(len(rows)):
        row, factors = rows[n], weights[min(n, len(weights) - 1)]
        _begin_row(row, factors, exits, runs, entries, children, symbols, ends, nearest, zeroed, lifted, alone)
        _search_row(
            row, factors, rate, exits, runs, entries, reach, nonzero, own_reach, own_nonzero, children, symbols, ends,
            id_bounds, longer, nearest, zeroed, lifted, alone, togo, least, ahead, chosen,
            stack_state, stack_place, stack_cost,
        )  # fmt: skip
        costs[n] = togo[0]
        i, begun = 0, written
        while i < size:
            entry = chosen[i]
            for k in range(id_bounds[entry], id_bounds[entry + 1]):
                out[written] = ids[k]
                written += 1
            for k in range(value_bounds[entry], value_bounds[entry + 1]):
                coefficients[n, i] = values[k]
                i += 1
        counts[n] = written - begun
    return written


@dataclass(frozen=True)
class Cheapest:
    """What `cheapest_rows` found for N rows of L coefficients.

    Attributes:
        ids: int32; all ids, row after row.
        counts: int32 [N], ids of each row.
        coefficients: int32 [N, L], what the ids stand for.
        costs: float64 [N]; weighted squared errors beyond those of rounding, and rate_weight times the ids.
    """

    ids: IntArray
    counts: IntArray
    coefficients: IntArray
    costs: DoubleArray


def cheapest_rows(
    tables: PathTables, rows: FloatArray, rate_weight: float, weights: FloatArray | None = None
) -> Cheapest:
    """The ids that cost least for each row; one thread.

    Args:
        tables: of the vocabulary.
        rows: float32 [N, L] scaled coefficients before rounding, finite.
        rate_weight: what an id costs, in squared coefficients; above 0.
        weights: float32 [N, L] positive factors of the squared errors; None means 1.
    """
    count, size = rows.shape
    out = np.empty(rows.size * tables.most_ids, np.int32)
    counts = np.empty(count, np.int32)
    coefficients, costs = np.empty((count, size), np.int32), np.empty(count, np.float64)
    factors = np.empty((1, 0), np.float32) if weights is None else weights
    written = _cheapest_rows(
        rows, float(rate_weight), factors,
        tables.exits, tables.runs, tables.entries, tables.reach, tables.nonzero, tables.own_reach,
        tables.own_nonzero, tables.children, tables.symbols, tables.ends, tables.value_bounds, tables.values,
        tables.id_bounds, tables.ids, tables.longer, out, counts, coefficients, costs,
    )  # fmt: skip
    return Cheapest(out[:written].copy(), counts, coefficients, costs)


@dataclass(frozen=True)
class PathEncoder:
    """One vocabulary with the settings of a tokenizer, for chunks [H, D] of one shape.

    Attributes:
        vocabulary, tables: what ids stand for.
        horizon, scales, order: of the tokenizer; float32 [D].
    """

    vocabulary: Vocabulary
    tables: PathTables
    horizon: int
    scales: FloatArray
    order: Order

    @classmethod
    def create(cls, vocabulary: Vocabulary, horizon: int, scales: FloatArray, order: Order) -> PathEncoder:
        """For chunks [horizon, D] with `scales` float32 [D]."""
        return cls(vocabulary, path_tables(vocabulary), horizon, scales, order)

    def encode(
        self, chunks: FloatArray, rounded: IntArray, rate_weight: float, bounds: DoubleArray | None
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """Encode C-contiguous float32 [N, H, D]; one thread.

        A row whose errors go beyond the bounds is encoded again, with the errors of those dimensions four times as
        dear, until it is within them. In the end such a dimension is rounded; where even that is beyond its bound, the
        row gets the ids of the plain encoding.

        Args:
            chunks: finite.
            rounded: int32 [N, H*D] their rounded coefficients that the vocabulary has, in the tokenizer's order.
            rate_weight: see `cheapest_rows`.
            bounds: float64 [D], the largest error allowed of each dimension's actions; None for no bound.

        Returns:
            The ids of all rows, how many each has, and which rows are beyond the bounds.
        """
        exact = np.empty(rounded.shape, np.float32)
        transform_rows(chunks, dct_matrix(self.horizon), self.scales, exact)
        exact = from_frequency_order(exact, self.horizon, self.order)
        found = cheapest_rows(self.tables, exact, rate_weight)
        rows = _Rows(found.ids, found.counts)
        plain = np.zeros(len(chunks), np.bool_)
        over = np.zeros(len(chunks), np.bool_)
        if bounds is not None:
            over, plain = self._bound(chunks, rounded, exact, found.coefficients, rate_weight, bounds, rows)
        if self.vocabulary.symbol_format == "reference":
            # Ids may meet inside a coefficient in more ways than the entries know.
            plain |= rate_weight * self._plain(rounded)[1] < found.costs - 1e-6
        if plain.any():
            which = np.flatnonzero(plain)
            rows.replace(which, *self._plain(rounded[which]))
        return rows.ids, rows.counts, over

    def _plain(self, rounded: IntArray) -> tuple[IntArray, IntArray]:
        return self.vocabulary.encode(np.ascontiguousarray(rounded))

    def _bound(
        self,
        chunks: FloatArray,
        rounded: IntArray,
        exact: FloatArray,
        coefficients: IntArray,
        rate_weight: float,
        bounds: DoubleArray,
        rows: _Rows,
    ) -> tuple[BoolArray, BoolArray]:
        """Encode rows again that are beyond the bounds; which are beyond in any case, and which get the plain ids."""
        beyond = self.beyond(chunks, coefficients, bounds)
        late = np.flatnonzero(beyond.any(axis=1))
        over = np.zeros(len(chunks), np.bool_)
        over[late] = self.beyond(chunks[late], rounded[late], bounds).any(axis=1)
        plain = over.copy()
        late = late[~over[late]]
        factors = np.ones((len(late), len(self.scales)), np.float32)
        beyond = beyond[late]
        for _ in range(_MOST_ROUNDS):
            if not len(late):
                break
            factors[beyond] *= 4.0
            weights = from_frequency_order(np.tile(factors, (1, self.horizon)), self.horizon, self.order)
            again = cheapest_rows(self.tables, exact[late], rate_weight, weights)
            rows.replace(late, again.ids, again.counts)
            beyond = self.beyond(chunks[late], again.coefficients, bounds)
            still = beyond.any(axis=1)
            late, factors, beyond = late[still], factors[still], beyond[still]
        plain[late] = True  # half-way coefficients that float32 rounds one way or the other
        return over, plain

    def beyond(self, chunks: FloatArray, coefficients: IntArray, bounds: DoubleArray) -> BoolArray:
        """Which dimensions of which rows of coefficients, decoded, are further than `bounds` off; bool [N, D]."""
        decoded = np.empty(chunks.shape, np.float32)
        ordered = np.ascontiguousarray(to_frequency_order(coefficients, self.horizon, self.order))
        dequantize_rows(ordered, dct_matrix(self.horizon), self.scales, decoded)
        worst = np.abs(decoded.astype(np.float64) - chunks).max(axis=1, initial=0.0)
        result: BoolArray = worst > bounds
        return result


@dataclass
class _Rows:
    """Rows of ids of which some may be replaced: all ids, row after row, and how many each row has."""

    ids: IntArray
    counts: IntArray

    def replace(self, which: npt.NDArray[np.int64], ids: IntArray, counts: IntArray) -> None:
        """Put the rows of `ids` into the places `which`."""
        parts = np.split(self.ids, np.cumsum(self.counts)[:-1])
        for row, part in zip(which.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            parts[row] = part
        self.ids = np.concatenate(parts)
        self.counts = self.counts.copy()
        self.counts[which] = counts
