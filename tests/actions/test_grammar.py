"""The grammar: whatever is sampled under it is a chunk, and nothing that could become one is forbidden."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast import FastTokenizer
from pi0_fast.actions.grammar import NEVER, Grammar, GrammarState
from pi0_fast.types import TokenizerError

FORMATS = ("plain", "reference")


@cache
def tokenizer(symbol_format: str, scale: float = 10.0) -> FastTokenizer:
    random = np.random.default_rng(0)
    chunks = np.cumsum(random.normal(0, 0.15, (300, 6, 3)), axis=1)
    return FastTokenizer.fit(chunks, vocab_size=700, scale=scale, symbol_format=symbol_format)  # type: ignore[arg-type]


def sample(
    grammar: Grammar, rows: int, budget: int | None, random: np.random.Generator, greedy_for_long: bool = False
) -> list[list[int]]:
    """Random ids under the grammar; `greedy_for_long` takes those of fewest coefficients, to use up the budget."""
    state = grammar.start(rows, budget=budget)
    found: list[list[int]] = [[] for _ in range(rows)]
    while not state.done.all():
        allowed = grammar.allowed(state)
        assert (allowed.any(axis=1) | state.done).all(), "a row that is not done has no legal id"
        scores = random.random(allowed.shape) - (10 * grammar.consumed[state.place] if greedy_for_long else 0)
        ids = np.where(allowed, scores, -np.inf).argmax(axis=1)
        for n in np.flatnonzero(~state.done):
            found[n].append(int(ids[n]))
        state = grammar.advance(state, ids)
    return found


@pytest.mark.parametrize("symbol_format", FORMATS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_anything_sampled_within_any_feasible_budget_decodes(symbol_format: str, data: st.DataObject) -> None:
    fitted = tokenizer(symbol_format)
    grammar = Grammar(fitted.vocabulary, 18)
    least = int(grammar.fewest[0, 18])
    budget = data.draw(st.integers(least, least + 60))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    rows = sample(grammar, 8, budget, random, greedy_for_long=data.draw(st.booleans()))
    assert max(map(len, rows)) <= budget
    assert fitted.decode(rows).shape == (8, 6, 3)


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_what_the_encoder_makes_is_legal_down_to_its_own_length(symbol_format: str) -> None:
    fitted = tokenizer(symbol_format)
    grammar = Grammar(fitted.vocabulary, 18)
    random = np.random.default_rng(5)
    chunks = np.cumsum(random.normal(0, 0.4, (50, 6, 3)), axis=1)  # beyond the fit: clipped symbols too
    for ids in fitted.encode(chunks):
        state = grammar.start(1, budget=len(ids))
        for i in ids:
            assert grammar.allowed(state)[0, i]
            state = grammar.advance(state, [i])
        assert state.done.all()
        assert not grammar.allowed(state).any()


def test_worked_by_hand() -> None:
    """Tokens of 1 and 3 coefficients: a vocabulary of the symbols 0 and 1, and 000."""
    from pi0_fast.actions.bpe import Merges
    from pi0_fast.actions.vocabulary import Vocabulary

    merges = Merges.from_pairs(2, [(0, 0, 2), (2, 0, 3)])
    vocabulary = Vocabulary("plain", 0, merges, ("\0", "\1", "\0\0", "\0\0\0"))
    grammar = Grammar(vocabulary, 4, max_tokens=4)
    assert grammar.fewest.tolist() == [[0, 1, 1, 1, 2]]
    legal = {budget: grammar.allowed(grammar.start(1, budget=budget))[0].tolist() for budget in (2, 3, 4)}
    assert legal == {2: [True, True, True, True], 3: [True] * 4, 4: [True] * 4}
    after = grammar.advance(grammar.start(1, budget=2), [0])  # three to come, one token
    assert grammar.allowed(after)[0].tolist() == [False, False, False, True]
    with pytest.raises(TokenizerError, match=r"takes 2 tokens .* more than the budget of 1"):
        Grammar(vocabulary, 4, max_tokens=1)
    with pytest.raises(TokenizerError, match="row 0: id 1 may not follow with 3 coefficients and 1 tokens"):
        grammar.advance(after, [1])
    with pytest.raises(TokenizerError, match="id 4"):
        grammar.advance(after, [4])


def brute_force_legal(fitted: FastTokenizer, prefix: list[int], length: int, budget: int) -> set[int]:
    """By searching: the ids after which some sequence within the budget decodes to exactly `length` symbols."""
    vocabulary = fitted.vocabulary
    texts = [bytes(expansion) for expansion in vocabulary.expansions]
    usable = [i for i in range(vocabulary.size) if not _raw(vocabulary.characters[i])]

    @cache
    def reachable(tail: bytes, missing: int, tokens: int) -> bool:
        """Whether `tail` (an unfinished character) and at most `tokens` more ids make exactly `missing` characters."""
        if missing == 0 and not tail:
            return True
        if tokens == 0 or missing <= 0:
            return False
        return any(step(tail, texts[i], missing, tokens - 1) for i in usable)

    def step(tail: bytes, text: bytes, missing: int, tokens: int) -> bool:
        joined, count = tail + text, 0
        while joined:
            for size in (1, 2, 3, 4):
                try:
                    joined[:size].decode("utf-8")
                except UnicodeDecodeError as error:
                    if error.reason != "unexpected end of data" or size > len(joined):
                        break
                else:
                    joined, count = joined[size:], count + 1
                    break
            else:
                return False
            if joined and not _decodable_start(joined):
                return False
            if joined and _is_unfinished(joined):
                break
        return reachable(joined, missing - count, tokens)

    before, count = b"".join(texts[i] for i in prefix), 0
    whole = before.decode("utf-8", errors="ignore")
    count = len(whole)
    tail = before[len(whole.encode("utf-8")) :]
    return {i for i in usable if step(tail, texts[i], length - count, budget - 1)}


def _raw(text: str) -> bool:
    from pi0_fast.actions.reference_format import byte_characters

    return not set(byte_characters()).issuperset(text)


def _decodable_start(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > 0 or error.reason == "unexpected end of data"
    return True


def _is_unfinished(data: bytes) -> bool:
    try:
        data[:4].decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1 << 30), budget=st.integers(0, 4))
def test_byte_level_masks_equal_a_search(seed: int, budget: int) -> None:
    """Exactly the ids from which the end can be reached, on a small vocabulary whose symbols are two bytes long."""
    fitted = two_byte_tokenizer()
    grammar = Grammar(fitted.vocabulary, 4)
    random = np.random.default_rng(seed)
    tokens = int(grammar.fewest[0, 4]) + budget
    state, prefix = grammar.start(1, budget=tokens), []
    while not state.done.all():
        allowed = set(np.flatnonzero(grammar.allowed(state)[0]).tolist())
        assert allowed == brute_force_legal(fitted, prefix, 4, tokens - len(prefix))
        prefix.append(int(random.choice(sorted(allowed))))
        state = grammar.advance(state, prefix[-1:])


@cache
def two_byte_tokenizer() -> FastTokenizer:
    """Coefficients of 100 and more, whose characters take two bytes."""
    random = np.random.default_rng(1)
    chunks = random.integers(-3, 4, (400, 2, 2)) / 10 + np.array([0.0, 9.0])
    return FastTokenizer.fit(chunks, vocab_size=190, symbol_format="reference")


def test_tokens_may_stop_inside_a_character() -> None:
    fitted = two_byte_tokenizer()
    grammar = Grammar(fitted.vocabulary, 4)
    lead = next(i for i, expansion in enumerate(fitted.vocabulary.expansions) if expansion == (0xC2,))
    state = grammar.advance(grammar.start(1), [lead])
    assert state.place.tolist() == [1]
    assert state.remaining.tolist() == [4]
    legal = [fitted.vocabulary.expansions[i] for i in np.flatnonzero(grammar.allowed(state)[0])]
    assert legal
    assert all(0x80 <= expansion[0] <= 0xBF for expansion in legal)


def test_raw_control_characters_are_never_legal() -> None:
    fitted = tokenizer("reference")
    grammar = Grammar(fitted.vocabulary, 18)
    raw = [i for i, text in enumerate(fitted.vocabulary.characters) if _raw(text)]
    assert len(raw) >= 33
    assert (grammar.next_place[:, raw] == -1).all()
    rows = sample(grammar, 64, None, np.random.default_rng(0))
    assert not set(raw).intersection(*[set(row) for row in rows])


def test_rows_are_independent_and_done_rows_stay() -> None:
    grammar = Grammar(tokenizer("plain").vocabulary, 18)
    together = GrammarState(np.array([18, 3, 0], np.int32), np.array([40, 1, 5], np.int32), np.zeros(3, np.int32))
    allowed = grammar.allowed(together)
    for n in range(3):
        alone = GrammarState(together.remaining[[n]], together.budget[[n]], together.place[[n]])
        assert (grammar.allowed(alone)[0] == allowed[n]).all()
    assert not allowed[2].any()
    first = allowed.argmax(axis=1)
    after = grammar.advance(together, [first[0], first[1], -7])
    assert (after.remaining[2], after.budget[2]) == (0, 5)


@pytest.mark.golden
def test_the_published_vocabulary(shared: Path) -> None:
    fitted = FastTokenizer.from_pretrained(shared / "assets/fast_plus")
    grammar = Grammar(fitted.vocabulary, 70, max_tokens=60)
    rows = sample(grammar, 32, None, np.random.default_rng(0))
    rows += sample(grammar, 4, int(grammar.fewest[0, 70]), np.random.default_rng(1))
    assert fitted.decode(rows, time_horizon=10, action_dim=7).shape == (36, 10, 7)
    assert grammar.fewest.max() <= NEVER


def test_ids_of_another_shape_or_type_are_refused() -> None:
    """A column of ids, as samplers give it, must not be broadcast against the rows."""
    grammar = Grammar(tokenizer("plain").vocabulary, 18)
    state = grammar.start(3)
    for ids in ([[0], [0], [0]], 0, [0, 0], [0.0, 0.0, 0.0], [True, True, True]):
        with pytest.raises(TokenizerError, match="one id for each of 3 rows"):
            grammar.advance(state, ids)


def test_odd_arguments() -> None:
    vocabulary = tokenizer("plain").vocabulary
    for length in (0, -1, 6.5, True):
        with pytest.raises(TokenizerError, match="length must be"):
            Grammar(vocabulary, length)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="max_tokens must be"):
        Grammar(vocabulary, 6, max_tokens=0)
    grammar = Grammar(vocabulary, 6)
    for rows, budget in ((-1, None), (1, 2**40), (1, 2.5)):
        with pytest.raises(TokenizerError, match="cannot be started"):
            grammar.start(rows, budget=budget)  # type: ignore[arg-type]
