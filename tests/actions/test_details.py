"""What a report measures of a tokenizer, against encoding chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast import FastTokenizer
from pi0_fast.actions.details import (
    Details,
    examine,
    round_trip,
    rounding_rmse,
    scale_list,
    sweep_scales,
    worst_chunks,
)
from pi0_fast.actions.normalize import Normalizer

HORIZON, SIZE = 8, 3


def walks(count: int, seed: int) -> np.ndarray:
    """Raw chunks [count, 8, 3]; the last dimension is a thousand times larger than the first."""
    random = np.random.default_rng(seed)
    path = np.cumsum(random.normal(0, 0.1, (count, HORIZON, SIZE)), axis=1)
    return (path * [1.0, 10.0, 1000.0]).astype(np.float32)


@pytest.fixture(scope="module")
def fitted() -> tuple[FastTokenizer, Normalizer]:
    chunks = walks(400, seed=0)
    normalizer = Normalizer.fit(lambda: [chunks], "QUANTILES")
    tokenizer = FastTokenizer.fit(normalizer.apply(chunks), vocab_size=256, normalizer=normalizer)
    return tokenizer, normalizer


def test_examine_is_encoding_chunk_by_chunk(fitted: tuple[FastTokenizer, Normalizer]) -> None:
    tokenizer, normalizer = fitted
    chunks = walks(60, seed=1) * np.float32(1.3)
    told: list[int] = []
    details: Details = examine(tokenizer, normalizer, chunks, progress=told.append)
    assert sum(told) == 60
    uses = np.zeros(tokenizer.vocab_size, int)
    for n, chunk in enumerate(chunks):
        (ids,), info = tokenizer.encode(normalizer.apply(chunk[None]), return_info=True)
        for i in ids:
            uses[i] += 1
        assert details.lengths[n] == len(ids)
        assert details.saturations[n] == info.saturations[0]
        restored = normalizer.invert(tokenizer.decode([ids]))[0].astype(float)
        np.testing.assert_array_equal(round_trip(tokenizer, normalizer, chunk), restored.astype(np.float32))
        relative = (restored - chunk) * 2 / (normalizer.high - normalizer.low)
        assert details.errors[n] == pytest.approx(np.sqrt((relative**2).mean()), rel=1e-6)
    assert details.uses.tolist() == uses.tolist()
    outside = (chunks < normalizer.low) | (chunks > normalizer.high)
    assert outside.any()
    np.testing.assert_allclose(details.clipped, outside.mean(axis=(0, 1)))
    whole = np.sqrt((details.errors**2).mean())  # all chunks have the same number of values
    assert details.distortion.normalized_rmse == pytest.approx(whole, rel=1e-5)


def test_rounding_rmse_is_that_of_values_that_are_not_clipped(fitted: tuple[FastTokenizer, Normalizer]) -> None:
    tokenizer, normalizer = fitted
    inside = normalizer.invert(np.clip(normalizer.apply(walks(50, seed=2)), -0.9, 0.9))
    distortion = examine(tokenizer, normalizer, inside).distortion
    assert distortion.clipped_values == 0
    assert rounding_rmse(distortion, normalizer) == pytest.approx(distortion.normalized_rmse, rel=1e-4)
    wild = examine(tokenizer, normalizer, inside * 3).distortion
    assert rounding_rmse(wild, normalizer) < 0.5 * wild.normalized_rmse


def test_worst_chunks_by_hand() -> None:
    errors = np.array([0.1, 0.5, 0.4, 0.3, 0.2, 0.45])
    episodes = np.array([0, 0, 0, 0, 1, 1])
    starts = np.array([0, 4, 5, 12, 4, 9])
    # 1 is worst; 2 overlaps it; 5 is in another episode; 3 begins 8 steps after 1.
    assert worst_chunks(errors, episodes, starts, 8, 3) == [1, 5, 3]
    assert worst_chunks(errors, episodes, starts, 4, 3) == [1, 5, 3]
    assert worst_chunks(errors, episodes, starts, 1, 3) == [1, 5, 2]
    assert worst_chunks(errors, episodes, starts, 100, 3) == [1, 5]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=25),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_worst_chunks_do_not_overlap_and_nothing_worse_is_left_out(
    rows: list[tuple[int, int, int]], horizon: int, count: int
) -> None:
    errors, episodes, starts = (np.array(column) for column in zip(*rows, strict=True))
    chosen = worst_chunks(errors.astype(float), episodes, starts, horizon, count)
    assert 1 <= len(chosen) <= count

    def overlap(a: int, b: int) -> bool:
        return bool(episodes[a] == episodes[b] and abs(starts[a] - starts[b]) < horizon)

    assert not any(overlap(a, b) for a in chosen for b in chosen if a != b)
    for other in set(range(len(rows))) - set(chosen):
        better = [n for n in chosen if errors[n] >= errors[other]]
        assert len(chosen) == count == len(better) or any(overlap(other, n) for n in better)


def test_a_sweep_at_the_tokenizers_own_scale_is_the_tokenizer(fitted: tuple[FastTokenizer, Normalizer]) -> None:
    tokenizer, normalizer = fitted
    measured = walks(40, seed=3)
    told: list[int] = []
    scales = [scale_list(tokenizer.scale, factor) for factor in (0.5, 1.0, 2.0)]
    points = sweep_scales(
        scales, walks(400, seed=0), measured, like=tokenizer, normalizer=normalizer, progress=told.append
    )
    assert told == [1, 1, 1]
    assert [point.scale for point in points] == [5.0, 10.0, 20.0]
    own = examine(tokenizer, normalizer, measured).distortion
    assert points[1].distortion is not None
    assert points[1].distortion.to_json() == own.to_json()
    coarse, fine = points[0].distortion, points[2].distortion
    assert coarse is not None
    assert fine is not None
    assert coarse.tokens["mean_token_length"] < own.tokens["mean_token_length"] < fine.tokens["mean_token_length"]
    assert coarse.normalized_rmse > own.normalized_rmse > fine.normalized_rmse


def test_a_scale_that_no_vocabulary_can_express_is_a_result(fitted: tuple[FastTokenizer, Normalizer]) -> None:
    tokenizer, normalizer = fitted
    chunks = walks(400, seed=0)
    (point,) = sweep_scales([1000.0], chunks, chunks[:5], like=tokenizer, normalizer=normalizer)
    assert (point.vocab_size, point.distortion) == (None, None)
    assert point.problem is not None
    assert "more than vocab_size 256" in point.problem


def test_multiples_of_a_scale() -> None:
    assert scale_list(10.0, 0.5) == 5.0
    assert scale_list([10.0, 4.0], 0.5) == [5.0, 2.0]
