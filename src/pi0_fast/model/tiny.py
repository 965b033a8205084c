"""A PaliGemma that fits in a test: random weights, sizes in `Architecture.tiny`, no file and no download."""

from __future__ import annotations

import torch

from pi0_fast.model.architecture import Architecture
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.model.weights import initialize


def tiny_paligemma(
    seed: int = 0, *, vocab_size: int = 4096, dtype: torch.dtype = torch.float32, tied_head: bool = True
) -> PaliGemma:
    """The tiny model: images of 28x28 pixels become four vectors, the text has two layers of width 64."""
    return initialize(Architecture.tiny(vocab_size), dtype, seed, tied_head=tied_head)
