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


def target_cross_entropy(hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross entropies of N positions.

    Equals ``(functional.cross_entropy(hidden @ head.T, ids, reduction="none") * weights).sum()``, with the scores of a
    bfloat16 model rounded to bfloat16 before the float32 softmax. The head's gradient has the head's dtype.

    Args:
        hidden: [N, W], the positions that predict.
        head: [V, W].
        ids: int64 [N], what is to be predicted.
        weights: float32 [N]; no gradient flows to them.

    Returns:
        float32 scalar. Its gradient can be taken once (``retain_graph`` has no use here).
    """
    if not torch.is_grad_enabled() or not (hidden.requires_grad or head.requires_grad):
        return _forward(hidden, head, ids, weights, False, False)[0]
    return _TargetCrossEntropy.apply(hidden, head, ids, weights)  # type: ignore[no-any-return, no-untyped-call]


class _TargetCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss, *gradients = _forward(hidden, head, ids, weights, *context.needs_input_grad[:2])
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
        return (*gradients, None, None)


def _forward(
    hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor, want_hidden: bool, want_head: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and the gradients that are wanted, for an upstream gradient of 1."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if want_hidden else None
    head_gradient: Tensor | None = None
    rows = max(1, SCORES_BYTES // (4 * head.shape[0]))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        chunk, target, weight = hidden[part], ids[part, None], weights[part, None].float()
        scores = functional.linear(chunk, head).float()
        log_probabilities = torch.log_softmax(scores, dim=-1)
        del scores
        total -= (log_probabilities.gather(1, target) * weight).sum()
        if not want_hidden and not want_head:
            continue
        # d loss / d scores = weight * (probability - [is the target])
        gradient = log_probabilities.exp_().scatter_add_(
            1, target, target.new_full((1, 1), -1).float().expand_as(target)
        )
        gradient = gradient.mul_(weight).to(head.dtype)
        if hidden_gradient is not None:
            torch.mm(gradient, head, out=hidden_gradient[part])
        if want_head:
            if head_gradient is None:
                head_gradient = gradient.T @ chunk
            else:
                head_gradient.addmm_(gradient.T, chunk)
    if want_head and head_gradient is None:
        head_gradient = torch.zeros_like(head)
    return total, hidden_gradient, head_gradient
