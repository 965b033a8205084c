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
