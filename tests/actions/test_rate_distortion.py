"""Rate-distortion encoding: the cheapest path exactly, never longer than plain, errors within their bound, saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions import rate_distortion
from pi0_fast.actions.bpe import Merges
from pi0_fast.actions.dct import ORDERS, Order, dct_matrix
from pi0_fast.actions.grammar import Grammar
from pi0_fast.actions.rate_distortion import cheapest_rows, path_tables, transform_rows
from pi0_fast.actions.vocabulary import SymbolFormat, Vocabulary
from pi0_fast.types import TokenizerError

FORMATS: list[SymbolFormat] = ["plain", "reference"]
H, D = 8, 3


def motion(rows: int, seed: int = 0, spread: float = 0.1) -> np.ndarray:
    """Random walks, float32 [rows, H, D]."""
    steps = np.random.default_rng(seed).normal(0, spread, (rows, H, D))
    return np.cumsum(steps, axis=1).astype(np.float32)


def fitted(symbol_format: SymbolFormat = "plain", order: Order = "frequency", **settings: float) -> FastTokenizer:
    return FastTokenizer.fit(
        motion(400), vocab_size=300, symbol_format=symbol_format, order=order, num_threads=1, **settings
    )


TOKENIZERS = {(f, o): fitted(f, o) for f in FORMATS for o in ORDERS}


def least_cost(vocabulary: Vocabulary, x: np.ndarray, rate: float, weights: np.ndarray) -> float:
    """The slow twin: every entry tried at every place; errors beyond those of the best single coefficients."""
    entries = {e: len(i) for e, i in rate_distortion._entries(vocabulary).items() if max(map(abs, e)) < 100}
    alone = np.array([entry[0] for entry in entries if len(entry) == 1])
    nearest = weights * ((x[:, None] - alone) ** 2).min(axis=1)
    togo = np.full(len(x) + 1, np.inf)
    togo[-1] = 0.0
    for i in range(len(x) - 1, -1, -1):
        for entry, ids in entries.items():
            k = i + len(entry)
            if k <= len(x):
                error = (weights[i:k] * (x[i:k] - entry) ** 2).sum()
                togo[i] = min(togo[i], rate * ids + error + togo[k])
    return float(togo[0] - nearest.sum())


# --- the search -------------------------------------------------------------------------------------------------------


def test_the_example_of_the_module_by_hand() -> None:
    """Tokens 0, 1 and (0 0); 0.6 0.1 is one token when that saves more than the error of 0.2 that it adds."""
    vocabulary = Vocabulary("plain", 0, Merges.from_pairs(2, [(0, 0, 2)]), ("\0", "\1", "\0\0"))
    tables, row = path_tables(vocabulary), np.array([[0.6, 0.1]], np.float32)
    low, high = cheapest_rows(tables, row, 0.19), cheapest_rows(tables, row, 0.21)
    assert (low.ids.tolist(), low.coefficients.tolist()) == ([1, 0], [[1, 0]])
    assert (high.ids.tolist(), high.coefficients.tolist()) == ([2], [[0, 0]])
    np.testing.assert_allclose([low.costs[0], high.costs[0]], [2 * 0.19, 0.21 + 0.2], atol=1e-6)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(FORMATS),
    rate=st.sampled_from([1e-4, 0.1, 0.5, 2.0, 30.0]),
    seed=st.integers(0, 10_000),
    size=st.integers(1, 20),
    spread=st.sampled_from([0.3, 1.5, 8.0, 60.0]),
    sparse=st.booleans(),
    weighted=st.booleans(),
)
def test_no_sequence_costs_less(
    kind: SymbolFormat, rate: float, seed: int, size: int, spread: float, sparse: bool, weighted: bool
) -> None:
    """Also beyond the vocabulary, with long runs of zeros, and where errors of places differ in weight."""
    random = np.random.default_rng(seed)
    x = random.normal(0, spread, (2, size)) * (random.random((2, size)) < (0.3 if sparse else 1.0))
    x = (x + random.normal(0, 0.1, x.shape)).astype(np.float32)
    weights = random.uniform(0.2, 5, x.shape).astype(np.float32) if weighted else np.ones_like(x)
    vocabulary = TOKENIZERS[kind, "frequency"].vocabulary
    found = cheapest_rows(TABLES[kind], x, rate, weights if weighted else None)
    ends = np.cumsum(found.counts)
    decoded = vocabulary.decode(found.ids, ends - found.counts, ends.astype(np.int64), size)
    assert decoded.whole
    np.testing.assert_array_equal(decoded.coefficients, found.coefficients)
    for n in range(2):
        exact, factors = x[n].astype(np.float64), weights[n].astype(np.float64)
        assert found.costs[n] == pytest.approx(least_cost(vocabulary, exact, rate, factors), rel=1e-9, abs=1e-7)


TABLES = {f: path_tables(TOKENIZERS[f, "frequency"].vocabulary) for f in FORMATS}


def test_coefficients_before_rounding_are_those_of_the_dct() -> None:
    chunks, scales = motion(5), np.array([1.0, 10.0, 3.0], np.float32)
    out = np.empty((5, H * D), np.float32)
    transform_rows(chunks, dct_matrix(H), scales, out)
    expected = np.einsum("kt,ntd->nkd", dct_matrix(H).astype(np.float64), chunks) * scales
    np.testing.assert_allclose(out, expected.reshape(5, -1), atol=1e-5)


def test_bytes_that_meet_inside_a_coefficient_are_entries_too() -> None:
    """Byte-level tokens that only together are whole: each whole coefficient is there, in as few ids as were found."""
    vocabulary = FastTokenizer.fit(motion(300) * 8, vocab_size=700, symbol_format="reference").vocabulary
    entries = rate_distortion._entries(vocabulary)
    assert max(map(len, entries.values())) > 1  # beyond 128 symbols a coefficient has two bytes
    values, bounds = vocabulary.expansion_arrays
    for expansion, ids in list(entries.items())[:: max(1, len(entries) // 300)]:
        content = bytes(int(v) for i in ids for v in values[bounds[i] : bounds[i + 1]])
        assert tuple(ord(c) + vocabulary.min_token for c in content.decode()) == expansion
    assert {(c,) for c in vocabulary.encodable.tolist()} <= set(entries)


# --- a tokenizer's rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_weight_0_is_the_plain_encoder_and_more_weight_never_takes_more_tokens(
    kind: tuple[SymbolFormat, Order],
) -> None:
    tokenizer, chunks = TOKENIZERS[kind], motion(120, seed=1)
    plain = tokenizer.encode(chunks)
    assert tokenizer.encode(chunks, rate_weight=0) == plain
    lengths, errors = [[len(row) for row in plain]], [np.square(tokenizer.decode(plain) - chunks).sum(axis=(1, 2))]
    for rate in (0.01, 0.3, 1.0, 100.0):
        rows, info = tokenizer.encode(chunks, rate_weight=rate, return_info=True)
        assert info.token_counts.tolist() == [len(row) for row in rows]
        assert not info.over_error.any()
        lengths.append(info.token_counts)
        errors.append(np.square(tokenizer.decode(rows) - chunks).sum(axis=(1, 2)))
        cost = [e * 100 + rate * np.array(n) for e, n in zip(errors, lengths, strict=True)]
        assert (cost[-1] <= np.min(cost, axis=0) + 1e-3).all()
        assert tokenizer.encode(chunks, rate_weight=rate, num_threads=1) == rows
        assert [tokenizer.encode(chunk, rate_weight=rate)[0] for chunk in chunks[:9]] == rows[:9]
    assert (np.diff(lengths, axis=0) <= 0).all()
    assert (np.diff(errors, axis=0) >= -1e-5).all()
    assert np.mean(lengths[2]) < 0.97 * np.mean(lengths[0])


def test_what_the_vocabulary_lacks_is_clipped_and_counted_as_by_the_plain_encoder() -> None:
    tokenizer, chunks = TOKENIZERS["plain", "frequency"], motion(20, seed=2, spread=2.0)
    _, plain = tokenizer.encode(chunks, return_info=True)
    rows, info = tokenizer.encode(chunks, rate_weight=0.3, return_info=True)
    assert plain.saturations.sum() > 0
    np.testing.assert_array_equal(info.saturations, plain.saturations)
    assert (info.token_counts <= plain.token_counts).all()
    assert tokenizer.decode(rows).shape == chunks.shape


def test_bad_values_are_refused_by_row_and_step() -> None:
    chunks = motion(4)
    chunks[2, 5, 1] = np.nan
    with pytest.raises(TokenizerError, match="row 2, step 5, dimension 1 is nan"):
        TOKENIZERS["plain", "frequency"].encode(chunks, rate_weight=0.3)
    for name, value in (("rate_weight", -1), ("rate_weight", np.inf), ("max_error", 0), ("max_error", [1.0, 2.0])):
        with pytest.raises(TokenizerError, match=name):
            TOKENIZERS["plain", "frequency"].encode(motion(1), **{name: value})
        with pytest.raises(TokenizerError, match=name):
            fitted(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_error_is_beyond_its_bound_but_in_rows_that_are_marked(kind: tuple[SymbolFormat, Order]) -> None:
    tokenizer, chunks = TOKENIZERS[kind], motion(200, seed=3)
    plain, unbounded = tokenizer.encode(chunks), tokenizer.encode(chunks, rate_weight=1.5)
    rounding = np.abs(tokenizer.decode(plain) - chunks).max(axis=1)
    bounds = np.quantile(rounding, 0.98, axis=0).astype(np.float64)
    rows, info = tokenizer.encode(chunks, rate_weight=1.5, max_error=bounds, return_info=True)
    worst = np.abs(tokenizer.decode(rows).astype(np.float64) - chunks).max(axis=1)
    np.testing.assert_array_equal(info.over_error, (worst > bounds).any(axis=1))
    assert (info.over_error <= (rounding > bounds).any(axis=1)).all()
    assert 0 < info.over_error.sum() < 30
    for n in np.flatnonzero(info.over_error):
        assert rows[n] == plain[n]
    counts = [sum(map(len, found)) for found in (unbounded, rows, plain)]
    assert counts[0] < counts[1] < counts[2]
    assert (info.token_counts <= [len(row) for row in plain]).all()
    assert tokenizer.encode(chunks, rate_weight=1.5, max_error=np.inf) == unbounded
    same, marked = tokenizer.encode(chunks, max_error=bounds, return_info=True)
    assert same == plain
    np.testing.assert_array_equal(marked.over_error, (rounding > bounds).any(axis=1))


def test_a_bound_in_the_units_of_the_data() -> None:
    data = 300 + 50 * motion(300)
    normalizer = Normalizer.fit(lambda: [data], "MIN_MAX")
    tokenizer = FastTokenizer.fit(normalizer.apply(data), vocab_size=400, normalizer=normalizer)
    plain = tokenizer.decode_actions(tokenizer.encode_actions(data))
    bounds = np.abs(plain - data).max(axis=(0, 1)) * 1.01
    loose = tokenizer.decode_actions(tokenizer.encode_actions(data, rate_weight=1.0))
    assert (np.abs(loose - data).max(axis=(0, 1)) > bounds).any()
    ids, info = tokenizer.encode_actions(data, rate_weight=1.0, max_error=bounds, return_info=True)
    assert not info.over_error.any()
    assert (np.abs(tokenizer.decode_actions(ids) - data).max(axis=(0, 1)) <= bounds + 1e-4).all()
    assert sum(map(len, ids)) < sum(map(len, tokenizer.encode_actions(data)))


def test_the_grammar_lets_every_row_through_within_the_plain_rows_budget() -> None:
    for kind in FORMATS:
        tokenizer, chunks = TOKENIZERS[kind, "frequency"], motion(40, seed=4)
        grammar = Grammar(tokenizer.vocabulary, H * D)
        budgets = [len(row) for row in tokenizer.encode(chunks)]
        for row, budget in zip(tokenizer.encode(chunks, rate_weight=0.5), budgets, strict=True):
            state = grammar.start(1, budget=budget)
            for token in row:
                assert grammar.allowed(state)[0, token]
                state = grammar.advance(state, [token])
            assert state.done.all()


# --- a setting of the tokenizer ---------------------------------------------------------------------------------------


def test_the_setting_is_saved_and_used_where_nothing_else_is_said(tmp_path: Path) -> None:
    tokenizer, chunks = fitted(rate_weight=0.5, max_error=0.25), motion(50, seed=5)
    plain = TOKENIZERS["plain", "frequency"]
    assert tokenizer.vocabulary == plain.vocabulary
    assert tokenizer.fingerprint != plain.fingerprint
    wanted = plain.encode(chunks, rate_weight=0.5, max_error=0.25)
    assert tokenizer.encode(chunks) == wanted != plain.encode(chunks)
    assert tokenizer.encode(chunks, rate_weight=0, max_error=np.inf) == plain.encode(chunks)
    tokenizer.save_pretrained(tmp_path / "t")
    loaded = FastTokenizer.from_pretrained(tmp_path / "t")
    assert (loaded.rate_weight, loaded.max_error) == (0.5, 0.25)
    assert loaded == tokenizer
    assert loaded.encode(chunks) == wanted
    ids, lengths = loaded.encode_padded(chunks)
    assert [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)] == wanted
    bound = loaded.bound(H, D)
    assert bound.encode(chunks) == wanted


def test_a_tokenizer_without_the_setting_is_saved_as_before() -> None:
    config = TOKENIZERS["plain", "frequency"]._saved().config()
    assert not {"rate_weight", "max_error"} & set(config)


@pytest.mark.golden
def test_published_vocabulary(shared: Path) -> None:
    """FAST+ at its own scale: fewer ids for little more error, whatever they meet inside of."""
    vectors = np.load(shared / "golden" / "fast_plus" / "vectors.npz")
    tokenizer = FastTokenizer.from_pretrained(shared / "assets/fast_plus")
    for prefix in ("so101_h50_", "g1_h16_"):
        chunks, lengths = vectors[f"{prefix}chunks"], vectors[f"{prefix}lengths"]
        rows, info = tokenizer.encode(chunks, rate_weight=0.15, return_info=True)
        assert (info.token_counts <= lengths).all()
        assert info.token_counts.mean() < 0.97 * lengths.mean()
        values = tokenizer.decode(rows, time_horizon=chunks.shape[1], action_dim=chunks.shape[2])
        errors = [np.sqrt(np.mean(np.square(v - chunks))) for v in (values, vectors[f"{prefix}decoded"])]
        assert errors[0] < 1.015 * errors[1]
