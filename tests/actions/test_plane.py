"""The plane of encoders: lines between points, shares of changed tokens, and refits against fits by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast import FastTokenizer
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.plane import PlanePoint, by_kind, changed_share, plane, tokens_at

ROWS = st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4)


def point(tokens: float, rmse: float, kind: str = "a") -> PlanePoint:
    return PlanePoint(kind, "frequency", 0.0, "plain", 10.0, tokens=tokens, rmse=rmse)


def test_tokens_at_an_error_by_hand() -> None:
    points = [point(10, 0.02), point(40, 0.005)]
    assert tokens_at(points, 0.01) == pytest.approx(20)
    assert tokens_at(points, 0.02) == pytest.approx(10)
    assert tokens_at(points, 0.021) is None
    assert tokens_at(points, 0.004) is None
    assert tokens_at([], 0.01) is None


def test_changed_shares_by_hand() -> None:
    assert changed_share([[1, 2, 3, 4]], [[1, 9, 3, 4]]) == pytest.approx(0.25)
    assert changed_share([[1, 2, 3]], [[1, 2, 3]]) == 0.0
    assert changed_share([[1, 2]], [[3]]) == 1.0
    assert changed_share([[1, 2, 3]], [[2, 3]]) == pytest.approx(0.2)  # one of five has no partner
    assert changed_share([[1], []], [[1], [5]]) == pytest.approx(1 / 3)


@given(rows=ROWS, seed=st.integers(0, 100))
def test_changed_shares_equal_those_of_a_slow_twin(rows: list[list[int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    others = [random.integers(0, 4, random.integers(0, 8)).tolist() for _ in rows]

    def common(a: Sequence[int], b: Sequence[int]) -> int:
        if not a or not b:
            return 0
        return common(a[1:], b[1:]) + 1 if a[0] == b[0] else max(common(a[1:], b), common(a, b[1:]))

    total = sum(map(len, rows)) + sum(map(len, others))
    wanted = 1 - 2 * sum(map(common, rows, others)) / max(1, total)
    assert changed_share(rows, others) == pytest.approx(wanted)
    assert changed_share(others, rows) == pytest.approx(wanted)


def test_refits_are_fits_by_hand_and_what_cannot_be_is_shown() -> None:
    path = np.cumsum(np.random.default_rng(0).normal(0, 0.1, (300, 9, 3)), axis=1).astype(np.float32)
    fitted, measured = path[:200, :8], path[200:, :8]
    normalizer = Normalizer.fit(lambda: [fitted], "MIN_MAX")
    normal = normalizer.apply(fitted)
    like = FastTokenizer.fit(normal, vocab_size=200, scale=[10.0, 20.0, 30.0], rate_weight=0.3)
    points = plane(fitted, measured, (measured, path[200:, 1:]), like=like, normalizer=normalizer)
    kinds = by_kind(points)
    assert list(kinds)[1:] == [
        f"{o} first, {w}" for o in ("frequency", "dimension") for w in ("plain", "rate weight 0.3")
    ]
    middle = kinds["dimension first, rate weight 0.3"][1]
    assert middle.scale == [10.0, 20.0, 30.0]
    own = FastTokenizer.fit(normal, vocab_size=200, scale=middle.scale, order="dimension", rate_weight=0.3)
    chunks = normalizer.apply(measured)
    rows = own.encode(chunks)
    assert middle.tokens == pytest.approx(np.mean([len(row) for row in rows]))
    assert middle.rmse == pytest.approx(np.sqrt(((own.decode(rows) - chunks) ** 2).mean()), rel=1e-5)
    assert middle.moved == pytest.approx(changed_share(rows, own.encode(normalizer.apply(path[200:, 1:]))))
    few = plane(fitted, measured, (measured[:0], measured[:0]), like=like, normalizer=normalizer, vocab_size=100)
    assert all(each.moved is None for each in few)
    assert any(each.problem is not None for each in few)
    assert any(each.problem is None for each in few)
