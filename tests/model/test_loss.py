"""The chunked cross entropy against the obvious one: values, gradients, memory, and what it refuses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional  # noqa: E402

from pi0_fast.model import loss as module  # noqa: E402
from pi0_fast.model.loss import target_cross_entropy  # noqa: E402


def obvious(hidden, head, ids, weights):
    return (functional.cross_entropy((hidden @ head.T).float(), ids, reduction="none") * weights).sum()


def leaves(rows: int, width: int, words: int, seed: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(words, width, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, words, (rows,), generator=generator)
    return hidden, head, ids, torch.rand(rows, generator=generator)


def test_by_hand() -> None:
    head = torch.tensor([[1.0], [0.0], [0.0]])
    # Scores (ln 2, 0, 0): probabilities 1/2, 1/4, 1/4.
    hidden = torch.tensor([[0.693147], [0.693147]])
    value = target_cross_entropy(hidden, head, torch.tensor([0, 2]), torch.tensor([1.0, 10.0]))
    assert value.item() == pytest.approx(0.693147 + 10 * 1.386294, abs=1e-4)


@settings(max_examples=40)
@given(st.integers(0, 7), st.integers(1, 5), st.integers(1, 30), st.integers(1, 4), st.sampled_from([1.0, -0.3]))
def test_equals_the_obvious_one(rows: int, width: int, words: int, chunk: int, upstream: float) -> None:
    """For any number of positions, chunk and upstream gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORES_BYTES", 4 * words * chunk)
        first, second = leaves(rows, width, words, rows), leaves(rows, width, words, rows)
        value, expected = target_cross_entropy(*first), obvious(*second)
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)
        (value * upstream).backward()
        (expected * upstream).backward()
        for ours, reference in zip(first[:2], second[:2], strict=True):
            torch.testing.assert_close(ours.grad, reference.grad, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(target_cross_entropy(*first), expected, atol=1e-5, rtol=1e-5)


def test_only_the_gradients_that_are_wanted() -> None:
    hidden, head, ids, weights = leaves(4, 3, 9, 0)
    target_cross_entropy(hidden, head.detach(), ids, weights).backward()
    expected = hidden.grad.clone()
    hidden.grad = None
    target_cross_entropy(hidden, head, ids, weights).backward()
    torch.testing.assert_close(hidden.grad, expected)
    only_head = head.detach().clone().requires_grad_()
    target_cross_entropy(hidden.detach(), only_head, ids, weights).backward()
    torch.testing.assert_close(only_head.grad, head.grad)


def test_large_scores_stay_finite() -> None:
    hidden, head, ids, weights = leaves(3, 2, 5, 0)
    value = target_cross_entropy((hidden * 1e4).detach().requires_grad_(), head, ids, weights)
    value.backward()
    assert value.isfinite()
    assert head.grad.isfinite().all()


def test_bfloat16_is_near_float32() -> None:
    exact, rounded = leaves(6, 32, 50, 1), leaves(6, 32, 50, 1, torch.bfloat16)
    target_cross_entropy(*exact).backward()
    value = target_cross_entropy(*rounded)
    value.backward()
    assert value.dtype == torch.float32
    assert rounded[1].grad.dtype == torch.bfloat16
    for ours, reference in zip(rounded[:2], exact[:2], strict=True):
        assert (ours.grad.float() - reference.grad).abs().max() < 5e-2 * reference.grad.abs().max()


def test_a_second_backward_is_refused() -> None:
    value = target_cross_entropy(*leaves(3, 2, 5, 0))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already taken"):
        value.backward()


def test_no_scores_are_kept_and_at_most_one_chunk_is_made(monkeypatch) -> None:
    """Neither the graph nor any single allocation grows with the number of positions times the vocabulary."""
    monkeypatch.setattr(module, "SCORES_BYTES", 4 * 500 * 8)
    hidden, head, ids, weights = leaves(64, 4, 500, 0)
    shapes: set[tuple[int, ...]] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            shapes.update(tuple(part.shape) for part in [result] if isinstance(part, torch.Tensor))
            return result

    saved: list[int] = []
    with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        target_cross_entropy(hidden, head, ids, weights)
    assert (8, 500) in shapes
    assert max(rows * columns for rows, columns in (shape for shape in shapes if len(shape) == 2)) == 8 * 500
    assert not saved
