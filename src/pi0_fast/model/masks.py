"""Who sees whom, and where each token stands: attention masks and positions, built once per batch.

One row of a batch is images, then text, then target tokens, then padding. Images and text see each other in both
directions; a target token sees all of those and the target tokens up to itself; nobody sees padding or a missing
camera. With two image vectors, one word, two target tokens and one padding (columns are what is seen):

            i i w t t p
    image   1 1 1 . . .
    image   1 1 1 . . .
    word    1 1 1 . . .
    target  1 1 1 1 . .
    target  1 1 1 1 1 .
    padding . . . . . 1     sees itself only: no row of a softmax is empty, and nobody reads the result

Left out: the mask of a decoding step, which is one row of this one and belongs to the loop that decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Beside it a score is lost, so that a row of nothing else weights its columns alike; finite in bfloat16, too, and
#: when an accelerator's attention multiplies it by a number of about 1.
_ALIKE = -1e38


def sequence_layout(
    image_valid: Tensor, valid: Tensor, causal: Tensor, *, count_padding: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Join the image vectors and the tokens of a batch to one sequence.

    Args:
        image_valid: bool [B, I], one per image vector; False for a camera that is missing.
        valid: bool [B, S], False for padding.
        causal: bool [B, S], True for tokens that only themselves and later ones see.
        count_padding: positions count every column, as openpi trains, instead of valid ones only.

    Returns:
        valid bool [B, I+S], causal bool [B, I+S], positions int64 [B, I+S] (0 for what precedes the first valid one).
    """
    valid = torch.cat((image_valid, valid), dim=1)
    causal = torch.cat((torch.zeros_like(image_valid), causal), dim=1)
    if count_padding:
        positions = torch.arange(valid.shape[1], device=valid.device).expand(valid.shape)
    else:
        positions = (valid.cumsum(dim=1) - 1).clamp_min_(0)
    return valid, causal, positions


def attention_mask(valid: Tensor, causal: Tensor) -> Tensor:
    """The mask of the drawing above: [B, 1, L, L], True where the query (row) sees the key (column).

    Args:
        valid: bool [B, L].
        causal: bool [B, L].
    """
    length = valid.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril_()
    seen = (earlier | ~causal[:, None, :]) & (valid[:, None, :] & valid[:, :, None])
    seen.diagonal(dim1=1, dim2=2).fill_(True)
    return seen[:, None]


def contiguous_prefix(valid: Tensor, causal: Tensor) -> Tensor:
    """What openpi's decoder sees of a prompt: as many of its last columns as are valid, wherever those lie.

    With nothing masked between them (padding behind them is nothing) these are the valid ones. Where a camera is
    masked, its columns are seen, and as many of the first ones are not:

        prompt    i i m m w w p         i image, m masked camera, w word, p padding
        seen      . . 1 1 1 1 .

    Args:
        valid: bool [B, L].
        causal: bool [B, L]; these are no part of the prompt: openpi generates them.

    Returns:
        bool [B, L]; of the causal ones, all.
    """
    prefix = valid & ~causal
    columns = torch.arange(valid.shape[1], device=valid.device)
    last = (columns * prefix).amax(1, keepdim=True)
    return ((columns <= last) & (columns > last - prefix.sum(1, keepdim=True))) | (valid & causal)


def contiguous_prefix_mask(valid: Tensor, causal: Tensor, empty: int) -> Tensor:
    """`attention_mask` as openpi's decoder has it where a camera is masked, float32 [B, 1, L, L], to add to the scores.

    The prompt sees its valid columns. What is causal sees `contiguous_prefix` and earlier ones. Padding and masked
    columns, of which that may hold some, see all columns of the prompt alike, empty ones included: JAX's softmax of
    equal numbers.

    Args:
        valid: bool [B, L].
        causal: bool [B, L].
        empty: how many columns at the beginning are empty, which see only themselves.
    """
    length = valid.shape[1]
    columns = torch.arange(length, device=valid.device)
    causal = causal & valid
    prefix = (valid & ~causal)[:, None]
    earlier = (columns <= columns[:, None]) & causal[:, None]
    seen = torch.where(
        causal[:, :, None], earlier | (contiguous_prefix(valid, causal) & ~causal)[:, None], prefix & valid[:, :, None]
    )
    unseen = torch.full((), float("-inf"), device=valid.device)
    bias = torch.where(seen, 0.0, unseen)
    alike = ~valid[:, :, None] & (columns >= empty)[:, None]
    bias = torch.where(alike, torch.where(causal[:, None], unseen, _ALIKE), bias)
    bias[:, :empty].diagonal(dim1=1, dim2=2).fill_(0.0)
    return bias[:, None]
