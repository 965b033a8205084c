"""openpi's leaves and what becomes of them: a literal table, the sizes that follow from the shapes, LoRA.

Every leaf has its place and every parameter its leaf; what is left over on either side is an error that lists it.
openpi is written in JAX: matrices are [in, out] and attention's have an axis for the heads, where torch has [out, in]
and none. The layers of a stack lie on the first axis of one leaf. Left out: reading (orbax.py) and the weights' way
into a model (filling.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
from pi0_fast.openpi.orbax import Leaf
from pi0_fast.types import PolicyError

#: float32 tensors of one layer (or of an unstacked leaf) -> our parameters of it, in the order of `Place.names`.
Turn = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Place:
    """Where a leaf belongs.

    Attributes:
        axes: names of its axes, a number where the size is fixed; ``layers`` or ``vision_layers`` first in a stack.
        names: our parameters; N is the number of the layer.
        turn: see `Turn`.
    """

    axes: str
    names: tuple[str, ...]
    turn: Turn

    @property
    def stacked(self) -> bool:
        """Whether the first axis is that of the layers."""
        return self.axes.split()[0].endswith("layers")


def _same(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def _first(x: Tensor) -> tuple[Tensor, ...]:
    """[1, ...] -> [...]."""
    return (x[0],)


def _transposed(x: Tensor) -> tuple[Tensor, ...]:
    """[in, out] -> [out, in]."""
    return (x.T,)


def _each_transposed(x: Tensor) -> tuple[Tensor, ...]:
    """[K, in, out] -> K times [out, in]."""
    return tuple(part.T for part in x)


def _into_heads(x: Tensor) -> tuple[Tensor, ...]:
    """[heads, in, head] -> [heads * head, in]."""
    return (x.transpose(1, 2).flatten(0, 1),)


def _each_into_heads(x: Tensor) -> tuple[Tensor, ...]:
    """[K, heads, in, head] -> K times [heads * head, in]."""
    return tuple(_into_heads(part)[0] for part in x)


def _out_of_heads(x: Tensor) -> tuple[Tensor, ...]:
    """[heads, head, out] -> [out, heads * head]."""
    return (x.flatten(0, 1).T,)


def _into_heads_behind(x: Tensor) -> tuple[Tensor, ...]:
    """[in, heads, head] -> [heads * head, in]."""
    return (x.flatten(1, 2).T,)


def _joined(x: Tensor) -> tuple[Tensor, ...]:
    """[heads, head] -> [heads * head]."""
    return (x.flatten(),)


def _patches(x: Tensor) -> tuple[Tensor, ...]:
    """[height, width, in, out] -> [out, in, height, width]."""
    return (x.permute(3, 2, 0, 1),)


_LLM, _LAYERS, _IMG = "PaliGemma/llm/", "PaliGemma/llm/layers/", "PaliGemma/img/"
_BLOCK = _IMG + "Transformer/encoderblock/"
_ATTENTION = _BLOCK + "MultiHeadDotProductAttention_0/"
_DECODER, _VISION = "decoder.layers.N.", "vision_tower.layers.N."
_KERNEL, _BIAS = "vision_layers vision_width vision_heads vision_head", "vision_layers vision_heads vision_head"
#: openpi's leaf -> where it belongs.
PLACES = {
    _LLM + "embedder/input_embedding": Place("vocabulary width", ("embed_tokens.weight",), _same),
    _LAYERS + "attn/q_einsum/w": Place("layers heads width head", (_DECODER + "self_attn.q_proj.weight",), _into_heads),
    _LAYERS + "attn/kv_einsum/w": Place(
        "layers 2 kv_heads width head",
        (_DECODER + "self_attn.k_proj.weight", _DECODER + "self_attn.v_proj.weight"),
        _each_into_heads,
    ),
    _LAYERS + "attn/attn_vec_einsum/w": Place(
        "layers heads head width", (_DECODER + "self_attn.o_proj.weight",), _out_of_heads
    ),
    _LAYERS + "mlp/gating_einsum": Place(
        "layers 2 width mlp", (_DECODER + "mlp.gate_proj.weight", _DECODER + "mlp.up_proj.weight"), _each_transposed
    ),
    _LAYERS + "mlp/linear": Place("layers mlp width", (_DECODER + "mlp.down_proj.weight",), _transposed),
    _LAYERS + "pre_attention_norm/scale": Place("layers width", (_DECODER + "input_layernorm.weight",), _same),
    _LAYERS + "pre_ffw_norm/scale": Place("layers width", (_DECODER + "post_attention_layernorm.weight",), _same),
    _LLM + "final_norm/scale": Place("width", ("decoder.norm.weight",), _same),
    _IMG + "embedding/kernel": Place("patch patch 3 vision_width", ("vision_tower.patch_embedding.weight",), _patches),
    _IMG + "embedding/bias": Place("vision_width", ("vision_tower.patch_embedding.bias",), _same),
    _IMG + "pos_embedding": Place("1 patches vision_width", ("vision_tower.position_embedding.weight",), _first),
    _BLOCK + "LayerNorm_0/scale": Place("vision_layers vision_width", (_VISION + "layer_norm1.weight",), _same),
    _BLOCK + "LayerNorm_0/bias": Place("vision_layers vision_width", (_VISION + "layer_norm1.bias",), _same),
    _BLOCK + "LayerNorm_1/scale": Place("vision_layers vision_width", (_VISION + "layer_norm2.weight",), _same),
    _BLOCK + "LayerNorm_1/bias": Place("vision_layers vision_width", (_VISION + "layer_norm2.bias",), _same),
    _ATTENTION + "query/kernel": Place(_KERNEL, (_VISION + "self_attn.q_proj.weight",), _into_heads_behind),
    _ATTENTION + "query/bias": Place(_BIAS, (_VISION + "self_attn.q_proj.bias",), _joined),
    _ATTENTION + "key/kernel": Place(_KERNEL, (_VISION + "self_attn.k_proj.weight",), _into_heads_behind),
    _ATTENTION + "key/bias": Place(_BIAS, (_VISION + "self_attn.k_proj.bias",), _joined),
    _ATTENTION + "value/kernel": Place(_KERNEL, (_VISION + "self_attn.v_proj.weight",), _into_heads_behind),
    _ATTENTION + "value/bias": Place(_BIAS, (_VISION + "self_attn.v_proj.bias",), _joined),
    _ATTENTION + "out/kernel": Place(
        "vision_layers vision_heads vision_head vision_width", (_VISION + "self_attn.out_proj.weight",), _out_of_heads
    ),
    _ATTENTION + "out/bias": Place("vision_layers vision_width", (_VISION + "self_attn.out_proj.bias",), _same),
    _BLOCK + "MlpBlock_0/Dense_0/kernel": Place(
        "vision_layers vision_width vision_mlp", (_VISION + "mlp.fc1.weight",), _transposed
    ),
    _BLOCK + "MlpBlock_0/Dense_0/bias": Place("vision_layers vision_mlp", (_VISION + "mlp.fc1.bias",), _same),
    _BLOCK + "MlpBlock_0/Dense_1/kernel": Place(
        "vision_layers vision_mlp vision_width", (_VISION + "mlp.fc2.weight",), _transposed
    ),
    _BLOCK + "MlpBlock_0/Dense_1/bias": Place("vision_layers vision_width", (_VISION + "mlp.fc2.bias",), _same),
    _IMG + "Transformer/encoder_norm/scale": Place("vision_width", ("vision_tower.post_layernorm.weight",), _same),
    _IMG + "Transformer/encoder_norm/bias": Place("vision_width", ("vision_tower.post_layernorm.bias",), _same),
    _IMG + "head/kernel": Place("vision_width width", ("projector.weight",), _transposed),
    _IMG + "head/bias": Place("width", ("projector.bias",), _same),
}


@dataclass(frozen=True)
class Adapter:
    """The two LoRA leaves that a leaf may have beside it.

    Attributes:
        down, up: their paths: openpi's ``lora_a`` and ``lora_b``.
        down_axes, up_axes: as in `Place`.
        scaled: whether openpi multiplies the product; it does so in attention and not in the mlp.
        heads_summed: whether openpi sums ``up`` over the heads. Its equation for the output projection, "BTNH,NHD->BTD"
            with "NHL" and "NLD" in place of "NHD", sums heads before the second product, and again in it.
    """

    down: str
    up: str
    down_axes: str
    up_axes: str
    scaled: bool
    heads_summed: bool = False


_ATTN, _MLP = _LAYERS + "attn/", _LAYERS + "mlp/"
ADAPTERS = {
    _ATTN + "q_einsum/w": Adapter(
        _ATTN + "q_einsum/lora_a",
        _ATTN + "q_einsum/lora_b",
        "layers heads width rank_attn",
        "layers heads rank_attn head",
        scaled=True,
    ),
    _ATTN + "kv_einsum/w": Adapter(
        _ATTN + "kv_einsum/lora_a",
        _ATTN + "kv_einsum/lora_b",
        "layers 2 kv_heads width rank_attn",
        "layers 2 kv_heads rank_attn head",
        scaled=True,
    ),
    _ATTN + "attn_vec_einsum/w": Adapter(
        _ATTN + "attn_vec_einsum/lora_a",
        _ATTN + "attn_vec_einsum/lora_b",
        "layers heads head rank_attn",
        "layers heads rank_attn width",
        scaled=True,
        heads_summed=True,
    ),
    _MLP + "gating_einsum": Adapter(
        _MLP + "gating_einsum_lora_a",
        _MLP + "gating_einsum_lora_b",
        "layers 2 width rank_mlp",
        "layers 2 rank_mlp mlp",
        scaled=False,
    ),
    _MLP + "linear": Adapter(
        _MLP + "linear_lora_a", _MLP + "linear_lora_b", "layers mlp rank_mlp", "layers rank_mlp width", scaled=False
    ),
}


@dataclass(frozen=True)
class Tree:
    """The leaves of a checkpoint, each in its place.

    Attributes:
        leaves: path -> leaf, those of LoRA included.
        architecture: the sizes that follow from the shapes.
        adapters: leaf -> its adapter, for those that have one.
        ranks: LoRA's rank in attention and in the mlp, for those of the two that have any.
    """

    leaves: Mapping[str, Leaf]
    architecture: Architecture
    adapters: Mapping[str, Adapter]
    ranks: Mapping[str, int]


def understand(leaves: Mapping[str, Leaf], where: str) -> Tree:
    """Put every leaf in its place, and find the sizes of the model.

    Args:
        leaves: of `orbax.leaves`.
        where: how errors call the checkpoint.

    Raises:
        PolicyError: leaves missing, unexpected, of another shape than the others ask for, or no floats: all are listed.
    """
    adapters = {path: adapter for path, adapter in ADAPTERS.items() if {adapter.down, adapter.up} & set(leaves)}
    axes = {path: place.axes for path, place in PLACES.items()}
    for adapter in adapters.values():
        axes |= {adapter.down: adapter.down_axes, adapter.up: adapter.up_axes}
    missing, unexpected = sorted(set(axes) - set(leaves)), sorted(set(leaves) - set(axes))
    sizes, misshapen = _sizes({path: (axes[path], leaves[path].shape) for path in axes if path in leaves})
    misshapen += [
        f"{path} of {leaf.dtype}"
        for path, leaf in leaves.items()
        if leaf.dtype not in ("float32", "bfloat16", "float16")
    ]
    if missing or unexpected or misshapen:
        parts = [
            f"{len(paths)} leaves {title}: {', '.join(paths[:20])}{', ...' if len(paths) > 20 else ''}"
            for title, paths in (("missing", missing), ("unexpected", unexpected), ("that do not fit", misshapen))
            if paths
        ]
        raise PolicyError(f"{where}: no pi0-FAST of openpi: {'; '.join(parts)}{_hint(unexpected)}")
    ranks = {part: sizes[f"rank_{part}"] for part in ("attn", "mlp") if f"rank_{part}" in sizes}
    return Tree(leaves, _architecture(sizes, where), adapters, ranks)


def _hint(unexpected: list[str]) -> str:
    if any(path.startswith(("action_", "state_proj", "time_mlp")) or "_1/" in path for path in unexpected):
        return ". An action expert makes it a pi0 or pi0.5, which generate actions by flow matching: not converted"
    if any("lora" in path for path in unexpected):
        return ". LoRA leaves that are unknown cannot be merged: merge them in openpi"
    return ""


def _sizes(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, int], list[str]]:
    """The size of each named axis, and the leaves that contradict those before them."""
    sizes: dict[str, int] = {}
    wrong = []
    for path, (axes, shape) in shapes.items():
        names = axes.split()
        wanted = [int(name) if name.isdigit() else sizes.get(name) for name in names]
        if len(shape) != len(names) or any(w not in (None, size) for w, size in zip(wanted, shape, strict=True)):
            shown = ", ".join(
                name if size is None or name.isdigit() else f"{name} {size}"
                for name, size in zip(names, wanted, strict=True)
            )
            wrong.append(f"{path} {list(shape)} instead of [{shown}]")
            continue
        sizes |= {name: size for name, size in zip(names, shape, strict=True) if not name.isdigit()}
    return sizes, wrong


def _architecture(sizes: Mapping[str, int], where: str) -> Architecture:
    side = math.isqrt(sizes["patches"])
    if side * side != sizes["patches"] or sizes["vision_heads"] * sizes["vision_head"] != sizes["vision_width"]:
        raise PolicyError(
            f"{where}: {sizes['patches']} image positions are no square, or {sizes['vision_heads']} heads of "
            f"{sizes['vision_head']} do not make the width {sizes['vision_width']}"
        )
    vision = VisionSizes(
        hidden_size=sizes["vision_width"],
        num_hidden_layers=sizes["vision_layers"],
        num_attention_heads=sizes["vision_heads"],
        intermediate_size=sizes["vision_mlp"],
        image_size=side * sizes["patch"],
        patch_size=sizes["patch"],
    )
    text = TextSizes(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        intermediate_size=sizes["mlp"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head"],
        vocab_size=sizes["vocabulary"],
    )
    return Architecture(vision, text)


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float, *, heads_summed: bool) -> Tensor:
    """One layer's weight with its adapter added, as openpi computes with the two.

    Args:
        weight: float32 [..., in, out].
        down: float32 [..., in, rank].
        up: float32 [..., rank, out].
        scale: of the product.
        heads_summed: see `Adapter`.
    """
    if heads_summed:
        up = up.sum(dim=0, keepdim=True)
    return weight + scale * torch.matmul(down, up)
