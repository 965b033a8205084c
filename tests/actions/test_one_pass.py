"""One pass over a chunk gives what the steps give one after the other, and leaves every error to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast import FastTokenizer
from pi0_fast.actions.dct import ORDERS, Order
from pi0_fast.actions.one_pass import REPORT
from pi0_fast.types import TokenizerError


def smooth(rows: int, horizon: int, size: int, seed: int, spread: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    walk = random.normal(0, 0.15 * spread, (rows, horizon, size)).cumsum(axis=1) + random.normal(
        0, 0.3, (rows, 1, size)
    )
    return walk.astype(np.float32)


def fitted(horizon: int, size: int, seed: int, vocab_size: int = 300, order: Order = "frequency") -> FastTokenizer:
    chunks = np.clip(smooth(80, horizon, size, seed), -2, 2)
    return FastTokenizer.fit(chunks, scale=6.0, vocab_size=vocab_size, order=order)


@settings(max_examples=60)
@given(
    horizon=st.integers(1, 21),
    size=st.integers(1, 7),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 9.0]),
    order=st.sampled_from(ORDERS),
)
def test_encoding_equals_the_steps(horizon: int, size: int, seed: int, spread: float, order: Order) -> None:
    """Also where coefficients are beyond the vocabulary, and are clipped and counted."""
    tokenizer = fitted(horizon, size, seed, order=order)
    chunks = smooth(9, horizon, size, seed + 1, spread)
    encoder = tokenizer._encoder(horizon, size)
    assert encoder is not None
    out, written = encoder.encode(chunks)
    ids, lengths, saturations, _ = tokenizer._encode_in_steps(chunks, 0)
    report = out[: 9 * REPORT].reshape(9, REPORT)
    np.testing.assert_array_equal(out[9 * REPORT : 9 * REPORT + written], ids)
    np.testing.assert_array_equal(report[:, 0], lengths)
    np.testing.assert_array_equal(report[:, 1], saturations)
    assert (report[:, 2] == -1).all()
    assert tokenizer.encode(chunks) == [row for chunk in chunks for row in tokenizer.encode(chunk)]


@settings(max_examples=40)
@given(horizon=st.integers(1, 21), size=st.integers(1, 7), seed=st.integers(0, 1000), order=st.sampled_from(ORDERS))
def test_one_list_decodes_as_in_a_batch(horizon: int, size: int, seed: int, order: Order) -> None:
    tokenizer = fitted(horizon, size, seed, order=order)
    rows = tokenizer.encode(smooth(4, horizon, size, seed + 1))
    together = tokenizer.decode(rows)
    for row, chunk in zip(rows, together, strict=True):
        alone = tokenizer.decode(row)
        assert alone.shape == (horizon, size)
        np.testing.assert_array_equal(alone, chunk)
        np.testing.assert_array_equal(tokenizer.decode([np.int64(i) for i in row]), chunk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:-1], "row 0: the .* ids hold .* coefficients, a chunk needs 24"),
        (lambda ids: ids + ids, "row 0: the .* ids hold 48 coefficients"),
        (lambda ids: [*ids[:1], 300, *ids[1:]], "row 0: id 300 at position 1 is outside the vocabulary"),
        (lambda ids: [*ids, -1], "row 0: id -1 at position"),
        (lambda ids: [*ids, 1 << 40], "an id beyond 32 bits at position"),
        (lambda ids: [*ids, 0.5], "ids must be whole numbers"),
        (lambda ids: [*ids, "a"], "ids of row 0 must be numbers"),
    ],
)
def test_a_list_that_holds_no_chunk_is_the_same_error_as_in_a_batch(change, message: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = fitted(6, 4, 0)
    ids = change(tokenizer.encode(smooth(1, 6, 4, 3))[0])
    with pytest.raises(TokenizerError, match=message):
        tokenizer.decode(ids)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_value_that_is_no_action_is_named(value: float, rows: int) -> None:
    tokenizer = fitted(6, 4, 0)
    chunks = smooth(rows, 6, 4, 5)
    chunks[-1, 2, 3] = value
    with pytest.raises(TokenizerError, match=f"row {rows - 1}, step 2, dimension 3"):
        tokenizer.encode(chunks)
    with pytest.raises(TokenizerError, match="row 0, step 2, dimension 3"):
        tokenizer.encode(chunks[-1])
