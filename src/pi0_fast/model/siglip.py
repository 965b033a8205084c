"""The SigLIP image encoder: patches -> transformer -> one vector per patch.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023); sizes So400m/14 in PaliGemma. Always float32, which
is how the published policies run it. Left out: the pooling head and the text tower, which PaliGemma does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pi0_fast.model.architecture import VisionSizes

LAYER_NORM_EPSILON = 1e-6


class Attention(nn.Module):
    """Every patch attends to every patch of its image."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.heads = sizes.num_attention_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, P, width] -> the same."""
        batch, patches, width = x.shape
        shape = (batch, patches, self.heads, width // self.heads)
        query, key, value = (
            project(x).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Linear, tanh-approximated gelu, linear."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, P, width] -> the same."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Attention and mlp, each after a layer norm and added to its input."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.hidden_size, eps=LAYER_NORM_EPSILON)
        self.self_attn = Attention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.hidden_size, eps=LAYER_NORM_EPSILON)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, P, width] -> the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class VisionTower(nn.Module):
    """Images to patch vectors."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, sizes.hidden_size, sizes.patch_size, stride=sizes.patch_size)
        table = torch.empty(sizes.patches, sizes.hidden_size)  # see PaliGemma
        self.position_embedding = nn.Embedding(sizes.patches, sizes.hidden_size, _weight=table)
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(sizes.hidden_size, eps=LAYER_NORM_EPSILON)

    def forward(self, images: Tensor, *, checkpointed: bool = False) -> Tensor:
        """float32 [N, 3, image_size, image_size] in [-1, 1] -> float32 [N, P, width].

        checkpointed: keep only the input of each layer and compute the rest again in the backward pass.
        """
        x = self.patch_embedding(images).flatten(2).transpose(1, 2) + self.position_embedding.weight
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return self.post_layernorm(x)  # type: ignore[no-any-return]
