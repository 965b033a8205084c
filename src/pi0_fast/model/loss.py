"""The cross entropy of the target positions over a large vocabulary, in little memory and one pass.

With 257,152 ids, the scores of one position take a megabyte and the head's gradient as much as the head. So only the
positions that carry loss are scored, a chunk of them at a time; a chunk's gradients are made from its scores while
these are still there, in the forward pass, and the head's are summed into one buffer. The backward pass only scales
them. Nothing is computed twice, and never are there scores of more than one chunk. Left out: which positions count and
how much, which is the prompt's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Memory for the scores of one chunk of positions. Larger chunks update the head's gradient less often.
SCORES_BYTES = 256 * 2**20


def target_cross_entropy(
    hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor, each: Tensor | None = None
) -> Tensor:
    """Weighted sum of the cross entropies of N positions.

    Equals ``(functional.cross_entropy(hidden @ head.T, ids, reduction="none") * weights).sum()``, with the scores of a
    bfloat16 model rounded to bfloat16 before the float32 softmax. The head's gradient has the head's dtype.

    Args:
        hidden: [N, W], the positions that predict.
        head: [V, W].
        ids: int64 [N], what is to be predicted.
        weights: float32 [N]; no gradient flows to them.
        each: float32 [N], is filled with the cross entropy of each position.

    Returns:
        float32 scalar. Its gradient can be taken once (``retain_graph`` has no use here).
    """
    if not torch.is_grad_enabled() or not (hidden.requires_grad or head.requires_grad):
        return _forward(hidden, head, ids, weights, each, False, False)[0]
    return _TargetCrossEntropy.apply(hidden, head, ids, weights, each)  # type: ignore[no-any-return, no-untyped-call]


class _TargetCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor, each: Tensor | None
    ) -> Tensor:
        loss, *gradients = _forward(hidden, head, ids, weights, each, *context.needs_input_grad[:2])
        context.gradients = gradients
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if context.gradients is None:
            raise RuntimeError("the gradient of target_cross_entropy was already taken; it is kept for one time only")
        gradients, context.gradients = context.gradients, None
        # On a CPU the usual upstream of exactly 1 saves a pass over the head; elsewhere asking would stall the device.
        if upstream.device.type != "cpu" or upstream.item() != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return (*gradients, None, None, None)


def _forward(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    weights: Tensor,
    each: Tensor | None,
    want_hidden: bool,
    want_head: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and the gradients that are wanted, for an upstream gradient of 1."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if want_hidden else None
    head_gradient = torch.zeros_like(head) if want_head else None
    rows = min(max(1, SCORES_BYTES // (4 * head.shape[0])), max(1, len(hidden)))
    # One buffer for all chunks: fresh memory of this size costs as much as what is computed in it.
    buffer = torch.empty(rows, head.shape[0], dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        chunk, target, weight = hidden[part], ids[part], weights[part, None].float()
        scores = buffer[: len(chunk)]
        if head.dtype == torch.float32:
            torch.mm(chunk, head.T, out=scores)
        else:
            scores.copy_(functional.linear(chunk, head))
        chosen, top = scores.gather(1, target[:, None]), scores.amax(1, keepdim=True)
        norm = scores.sub_(top).exp_().sum(1, keepdim=True)
        logarithm = chosen - top - norm.log()
        total -= (logarithm * weight).sum()
        if each is not None:
            each[part] = -logarithm[:, 0]
        # d loss / d scores = weight * (scores / norm - [is the target])
        share = weight / norm
        if head.dtype != torch.float32:
            scores.mul_(share).scatter_add_(1, target[:, None], -weight)
            _add_gradients(scores.to(head.dtype), chunk, head, part, hidden_gradient, head_gradient)
            continue
        # In float32 the factors and the target's part are exact enough on the small matrices.
        if hidden_gradient is not None:
            torch.mm(scores, head, out=hidden_gradient[part])
            hidden_gradient[part].mul_(share).sub_(head[target] * weight)
        if head_gradient is not None:
            head_gradient.addmm_(scores.T, chunk * share)
            head_gradient.index_add_(0, target, chunk * weight, alpha=-1)
    return total, hidden_gradient, head_gradient


def _add_gradients(
    gradient: Tensor,
    chunk: Tensor,
    head: Tensor,
    part: slice,
    hidden_gradient: Tensor | None,
    head_gradient: Tensor | None,
) -> None:
    """From the gradient of a chunk's scores, [n, V], to those of its positions and of the head."""
    if hidden_gradient is not None:
        torch.mm(gradient, head, out=hidden_gradient[part])
    if head_gradient is not None:
        head_gradient.addmm_(gradient.T, chunk)
