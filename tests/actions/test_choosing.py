"""Settings from targets: what is chosen meets the target, and measures what it says it does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pi0_fast import FastTokenizer
from pi0_fast.actions.choosing import Choice, Target, adjusted, choose
from pi0_fast.actions.dct import ORDERS
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.types import TokenizerError

HORIZON, SIZE = 8, 3


def walks(count: int, seed: int) -> np.ndarray:
    """Raw chunks [count, 8, 3]; the last dimension is a thousand times larger than the first."""
    path = np.cumsum(np.random.default_rng(seed).normal(0, 0.1, (count, HORIZON, SIZE)), axis=1)
    return (path * [1.0, 10.0, 1000.0]).astype(np.float32)


FITTED, MEASURED = walks(400, seed=0), walks(120, seed=1)
NORMALIZER = Normalizer.fit(lambda: [FITTED], "MIN_MAX")


def chosen(target: Target | None, **changes: Any) -> Choice:
    settings: dict[str, Any] = {"orders": ["frequency"], "rate_weights": [0.0, 0.5], "scale": 10.0, "vocab_size": 256}
    return choose(FITTED, MEASURED, normalizer=NORMALIZER, target=target, **(settings | changes))


def again(choice: Choice, max_error: list[float] | None = None) -> tuple[float, float, np.ndarray]:
    """Tokens, normalised RMSE and largest errors in the data's units of what was chosen, worked out another way."""
    found = choice.chosen
    tokenizer = FastTokenizer.fit(
        NORMALIZER.apply(FITTED), scale=found.scale, vocab_size=256, order=found.order, rate_weight=found.rate_weight
    )
    chunks = NORMALIZER.apply(MEASURED)
    rows = [tokenizer.encode(chunk, max_error=max_error)[0] for chunk in chunks]
    decoded = np.stack([tokenizer.decode(row) for row in rows])
    worst = np.abs(NORMALIZER.invert(decoded) - NORMALIZER.invert(chunks)).max(axis=(0, 1))
    return float(np.mean([len(row) for row in rows])), float(np.sqrt(np.mean((decoded - chunks) ** 2))), worst


def test_an_rmse_is_met_with_the_fewest_tokens() -> None:
    choice = chosen(Target("rmse", 0.02), orders=ORDERS)
    tokens, rmse, _ = again(choice)
    assert choice.chosen.tokens == pytest.approx(tokens)
    assert choice.chosen.rmse == pytest.approx(rmse, rel=1e-5)
    assert 0.9 * 0.02 < rmse <= 0.02
    assert tokens == pytest.approx(min(each.tokens for each in choice.tried if each.rmse <= 0.02))
    assert {(each.order, each.rate_weight) for each in choice.tried} == {(o, w) for o in ORDERS for w in (0.0, 0.5)}


def test_tokens_are_met_with_the_smallest_error() -> None:
    choice = chosen(Target("tokens", 9.0))
    tokens, rmse, _ = again(choice)
    assert 0.9 * 9 < tokens <= 9
    assert rmse == pytest.approx(min(each.rmse for each in choice.tried if each.tokens <= 9.0), rel=1e-5)


@pytest.mark.parametrize("rate_weights", [[0.0], [0.5], [0.0, 0.5]])
def test_a_largest_error_is_met_in_every_dimension(rate_weights: list[float]) -> None:
    target = Target("error", [0.05, 0.2, 100.0])
    choice = chosen(target, rate_weights=rate_weights)
    assert choice.chosen.rate_weight in rate_weights
    bound = target.max_error(NORMALIZER)
    tokens, _, worst = again(choice, bound)
    assert choice.chosen.tokens == pytest.approx(tokens)
    np.testing.assert_allclose(choice.chosen.worst, worst, rtol=1e-3)
    assert (worst <= np.array(target.value) * 1.0001).all()
    assert (worst >= np.array(target.value) * 0.5).all(), "each dimension has a scale of its own"
    assert isinstance(choice.chosen.scale, list)


def test_without_a_target_the_order_with_fewer_tokens_is_chosen() -> None:
    choice = chosen(None, orders=ORDERS, rate_weights=[0.3])
    assert [each.scale for each in choice.tried] == [10.0, 10.0]
    assert choice.chosen.tokens == min(each.tokens for each in choice.tried)
    assert choice.tried[0].tokens != choice.tried[1].tokens
    assert choice.chosen.share is None


def test_proportions_of_scales_are_kept() -> None:
    choice = chosen(Target("rmse", 0.02), scale=[1.0, 2.0, 4.0], rate_weights=[0.0])
    np.testing.assert_allclose(np.asarray(choice.chosen.scale) / choice.chosen.scale[0], [1, 2, 4])  # type: ignore[index]


def test_what_cannot_be_met_is_an_error_that_says_what_came_nearest() -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer of 256 ids meets the target of RMSE 1e-06.*--vocab_size"):
        chosen(Target("rmse", 1e-6))
    with pytest.raises(TokenizerError, match=r"target of 0\.5 tokens per chunk"):
        chosen(Target("tokens", 0.5))


def test_scales_too_fine_for_the_vocabulary_are_results_and_shown() -> None:
    choice = chosen(Target("rmse", 0.02), scale=1000.0, rate_weights=[0.0])
    assert choice.tried[0].problem is not None
    assert choice.chosen.problem is None
    assert json.loads(json.dumps(choice.to_json()))["tried"][0]["rmse"] is None


def test_the_table_has_a_row_for_each_order_and_weight_and_marks_the_choice() -> None:
    choice = chosen(Target("rmse", 0.02), orders=ORDERS)
    title, rows, headers = choice.table()
    assert "target: RMSE 0.02" in title
    assert len(rows) == 4
    assert {len(row) for row in rows} == {len(headers)}
    assert [row[-1] for row in rows].count("chosen") == 1
    assert sum(row[-2] for row in rows) == len(choice.tried)
    content = json.loads(json.dumps(choice.to_json()))
    assert content["tried"][content["chosen"]]["scale"] == choice.chosen.scale


def test_the_next_scale_by_hand() -> None:
    """Twice the error allowed: twice the scale, and half a percent; twice the tokens: a quarter; four times at most."""
    assert adjusted(10.0, np.array([2.0]), "rmse") == pytest.approx(20.1)
    assert adjusted([10.0, 10.0], np.array([2.0, 0.5]), "error") == pytest.approx([20.1, 5.025])
    assert adjusted(10.0, np.array([2.0]), "tokens") == pytest.approx(2.4875)
    assert adjusted(10.0, np.array([100.0]), "rmse") == pytest.approx(40.2)
