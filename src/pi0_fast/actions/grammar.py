"""Which token may come next, so that a sequence of tokens decodes to exactly H*D coefficients within a token budget.

A model that generates tokens under this grammar gives a valid chunk whatever its weights. Everything is a table: a
batched decoding loop looks up its rows without any Python work for each. What is not here: probabilities, the end
mark, and the mapping to the ids of a language model.

State of a row: how many coefficients are still to come, how many tokens may still be used, and, in byte-level
vocabularies, where inside a UTF-8 character the last token stopped. With tokens of 1 and 3 coefficients and 4 to come,
a budget of 2 allows both (1 + 3, 3 + 1), a budget of 4 too, and a budget of 1 nothing: that is refused at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.reference_format import byte_characters
from pi0_fast.actions.vocabulary import Vocabulary
from pi0_fast.types import TokenizerError

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

#: More tokens than any budget: "cannot end at all".
NEVER = np.int32(1 << 30)

# Where inside a character bytes may stop: between two (0), or before a byte of one of these ranges. After it comes the
# given place. The special ranges after E0, ED, F0 and F4 keep out overlong forms, surrogates and values over 10FFFF.
_PLACES: tuple[tuple[int, int, int], ...] = (
    (0x00, 0x00, 0),  # 0: between characters; see _LEADS
    (0x80, 0xBF, 0),  # 1: one continuation byte to come
    (0x80, 0xBF, 1),  # 2: two
    (0xA0, 0xBF, 1),  # 3: two, after E0
    (0x80, 0x9F, 1),  # 4: two, after ED
    (0x80, 0xBF, 2),  # 5: three
    (0x90, 0xBF, 2),  # 6: three, after F0
    (0x80, 0x8F, 2),  # 7: three, after F4
)
_LEADS: tuple[tuple[int, int, int], ...] = (
    (0x00, 0x7F, 0),
    (0xC2, 0xDF, 1),
    (0xE0, 0xE0, 3),
    (0xE1, 0xEC, 2),
    (0xED, 0xED, 4),
    (0xEE, 0xEF, 2),
    (0xF0, 0xF0, 6),
    (0xF1, 0xF3, 5),
    (0xF4, 0xF4, 7),
)
# Places from which a character ends in ever more bytes: the order in which `fewest` can be computed.
_BY_DEPTH = (1, 2, 3, 4, 5, 6, 7, 0)


@dataclass(frozen=True)
class GrammarState:
    """Where each row of a batch is; int32 [N] each.

    Attributes:
        remaining: coefficients still to come.
        budget: tokens still allowed.
        place: where in a character the row stopped; always 0 in the plain format.
    """

    remaining: IntArray
    budget: IntArray
    place: IntArray

    @property
    def done(self) -> BoolArray:
        """Which rows hold a whole chunk; nothing may follow but the end mark."""
        finished: BoolArray = (self.remaining == 0) & (self.place == 0)
        return finished


class Grammar:
    """The tables for one vocabulary and one length of chunk.

    Attributes:
        length: H*D, coefficients of a chunk.
        max_tokens: the largest budget that rows start with.
        fewest: int32 [P, length + 1]; the fewest tokens that end exactly n coefficients on, from each place.
        base: int32 [P, V] and
        table: int32 flat; ``table[base[place, id] + remaining]`` is the fewest tokens that must follow that id, or
            `NEVER`. An id is legal where this is below the budget. Both suit torch as they are.
        consumed, next_place: int32 [P, V]; the coefficients that an id completes, and where it stops (-1: illegal).
    """

    def __init__(self, vocabulary: Vocabulary, length: int, *, max_tokens: int | None = None) -> None:
        """Build the tables; some ten milliseconds.

        Args:
            vocabulary: of either format.
            length: H*D.
            max_tokens: budget of a chunk; None means 4 `length`, which no sequence of whole characters exceeds.

        Raises:
            TokenizerError: no sequence of `max_tokens` ids holds `length` coefficients; the message says how many must.
        """
        for name, value in (("length", length), ("max_tokens", 1 if max_tokens is None else max_tokens)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < NEVER:
                raise TokenizerError(f"{name} must be a whole number from 1 on, not {value!r}")
        self.length = length
        self.consumed, self.next_place = _transitions(vocabulary)
        self.fewest = _fewest(self.consumed, self.next_place, length)
        least = int(self.fewest[0, length])
        if least >= NEVER:
            raise TokenizerError(f"no sequence of this vocabulary holds exactly {length} coefficients")
        self.max_tokens = 4 * length if max_tokens is None else max_tokens
        if self.max_tokens < least:
            raise TokenizerError(
                f"a chunk of {length} coefficients takes {least} tokens of this vocabulary at least, more than the "
                f"budget of {self.max_tokens}: raise max_action_tokens, or shorten the chunk"
            )
        self.base, self.table = self._lookup()

    def _lookup(self) -> tuple[IntArray, IntArray]:
        """Rows of `fewest` behind a margin of NEVER, for ids holding more than remains; one row for illegal ids."""
        margin = int(self.consumed.max())
        places, size = len(self.fewest), margin + self.length + 1
        table = np.full((places + 1, size), NEVER, np.int32)
        table[:places, margin:] = self.fewest
        row = np.where(self.next_place < 0, places, self.next_place)
        base = row * size + margin - np.where(self.next_place < 0, 0, self.consumed)
        return base.astype(np.int32), table.reshape(-1)

    def start(self, rows: int, *, budget: int | None = None) -> GrammarState:
        """The state of `rows` rows before their first token.

        Raises:
            TokenizerError: a budget in which no chunk fits.
        """
        tokens = self.max_tokens if budget is None else budget
        if rows < 0 or not isinstance(tokens, (int, np.integer)) or tokens >= NEVER:
            raise TokenizerError(f"{rows} rows with a budget of {tokens} tokens cannot be started")
        if tokens < self.fewest[0, self.length]:
            raise TokenizerError(f"a chunk takes {self.fewest[0, self.length]} tokens at least, budget is {tokens}")
        return GrammarState(
            np.full(rows, self.length, np.int32), np.full(rows, tokens, np.int32), np.zeros(rows, np.int32)
        )

    def allowed(self, state: GrammarState) -> BoolArray:
        """The legal next ids, bool [N, V]; none for rows that are done."""
        legal: BoolArray = self.table[self.base[state.place] + state.remaining[:, None]] < state.budget[:, None]
        return legal

    def advance(self, state: GrammarState, ids: npt.ArrayLike) -> GrammarState:
        """The state after one more id in every row (int [N]); rows that are done stay as they are, whatever their id.

        Raises:
            TokenizerError: an id that `allowed` does not allow (names the row); not one whole number for each row.
        """
        chosen = np.asarray(ids)
        if chosen.shape != state.remaining.shape or chosen.dtype.kind not in "iu":
            raise TokenizerError(
                f"needed is one id for each of {len(state.remaining)} rows, got an array of shape {list(chosen.shape)} "
                f"and dtype {chosen.dtype}"
            )
        done = state.done
        inside = (chosen >= 0) & (chosen < self.base.shape[1])
        safe = np.where(inside, chosen, 0)
        legal = inside & (self.table[self.base[state.place, safe] + state.remaining] < state.budget)
        wrong = np.flatnonzero(~legal & ~done)
        if len(wrong):
            row = int(wrong[0])
            raise TokenizerError(
                f"row {row}: id {chosen[row]} may not follow with {state.remaining[row]} coefficients and "
                f"{state.budget[row]} tokens to come"
            )
        step = ~done
        return GrammarState(
            np.where(step, state.remaining - self.consumed[state.place, safe], state.remaining).astype(np.int32),
            np.where(step, state.budget - 1, state.budget).astype(np.int32),
            np.where(step, self.next_place[state.place, safe], state.place).astype(np.int32),
        )


def _transitions(vocabulary: Vocabulary) -> tuple[IntArray, IntArray]:
    """From each place, how many coefficients each id completes and where it stops; int32 [P, V], -1 where illegal."""
    if vocabulary.symbol_format == "plain":
        widths = np.array([len(expansion) for expansion in vocabulary.expansions], np.int32)
        return widths[None], np.zeros((1, len(widths)), np.int32)
    following = np.full((len(_PLACES), 256), -1, np.int32)
    for place, (low, high, after) in enumerate(_PLACES[1:], start=1):
        following[place, low : high + 1] = after
    for low, high, after in _LEADS:
        following[0, low : high + 1] = after
    characters = set(byte_characters())
    consumed = np.zeros((len(_PLACES), vocabulary.size), np.int32)
    stops = np.full((len(_PLACES), vocabulary.size), -1, np.int32)
    for i, (text, expansion) in enumerate(zip(vocabulary.characters, vocabulary.expansions, strict=True)):
        # A string with characters that stand for no byte decodes, but the encoder never makes it.
        if not characters.issuperset(text):
            continue
        places = np.arange(len(_PLACES))
        for byte in expansion:
            places = np.where(places >= 0, following[np.maximum(places, 0), byte], -1)
            consumed[:, i] += places == 0
        stops[:, i] = places
    consumed[stops < 0] = 0
    return consumed, stops


def _fewest(consumed: IntArray, next_place: IntArray, length: int) -> IntArray:
    """The fewest tokens that end exactly n coefficients on, between two characters; int32 [P, length + 1]."""
    places = len(consumed)
    fewest = np.full((places, length + 1), NEVER, np.int32)
    fewest[0, 0] = 0
    moves = []
    for place in range(places):
        legal = next_place[place] >= 0
        moves.append(np.unique(np.stack([consumed[place, legal], next_place[place, legal]]), axis=1))
    order = _BY_DEPTH if places > 1 else (0,)
    for n in range(1, length + 1):
        for place in order:
            steps, stops = moves[place]
            fitting = steps <= n
            if fitting.any():
                best = fewest[stops[fitting], n - steps[fitting]].min()
                fewest[place, n] = min(best + 1, NEVER)
    return fewest
