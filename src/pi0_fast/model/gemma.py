"""The Gemma decoder with a static key-value cache: whole sequences, prefill, and one token at a time.

Gemma Team, "Gemma: Open Models Based on Gemini Research and Technology" (2024). Queries and keys turn with their
position (Su et al., "RoFormer", 2021; the first half of a head is paired with the second); several query heads share
one key-value head; the mlp is gated by a tanh-approximated gelu; RMS norms multiply by (1 + weight).

The two paths compute the same numbers. `Decoder.forward` takes any number of columns; `Decoder.step` takes one column
of every row and is written for little work between the matrix products, which is where the time of a small model goes.
Left out: embedding table and head (paligemma.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pi0_fast.model.architecture import TextSizes

RMS_NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0

#: Cosines and sines of `rotation`.
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of every layer, allocated once and written in place.

    Attributes:
        stores: one tensor [B, 2 G, capacity, head_dim] per layer, G key-value heads: first the keys, already turned by
            their position, then the values.
        frequencies: of `step_frequencies`, and
        parts: of `Decoder.step_parts`, kept so that a step need not make them.
    """

    stores: list[Tensor]
    frequencies: Tensor
    parts: list[StepParts] = field(repr=False)

    @property
    def batch(self) -> int:
        """Rows B."""
        return self.stores[0].shape[0]

    @property
    def capacity(self) -> int:
        """Columns that fit."""
        return self.stores[0].shape[2]


#: Up to this many rows of a step, a float32 product on a CPU waits for its weights.
_FEW_ROWS = 8


class RMSNorm(nn.Module):
    """Divide by the root mean square, multiply by (1 + weight); computed in float32 whatever the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The arithmetic of `RMSNorm`: [..., width] and float32 [width] -> the shape and dtype of x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_NORM_EPSILON)
    return torch.addcmul(normed, normed, weight).to(x.dtype)


def step_norm(x: Tensor, scale: Tensor, epsilon: Tensor) -> Tensor:
    """`rms_norm` in fewer operations, for the few rows of a step; without gradients.

    Args:
        x: [..., width].
        scale: float32 [width], 1 + weight.
        epsilon: float32 [1], RMS_NORM_EPSILON.
    """
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    factor = torch.addcmul(epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()
    return (wide * factor).mul_(scale).to(x.dtype)


def rotary_frequencies(head_dim: int, device: torch.device) -> Tensor:
    """Radians per position: float32 [1, 2, head_dim / 2], once negative and once positive, as the sines are needed."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = ROTARY_BASE**-exponents
    return torch.stack((-frequencies, frequencies))[None]


def step_frequencies(sizes: TextSizes, device: torch.device) -> Tensor:
    """`rotary_frequencies` for queries, keys and values in one tensor: [heads + 2 G, 2, head_dim / 2].

    Values do not turn: theirs are 0.
    """
    turning = rotary_frequencies(sizes.head_dim, device)
    groups = sizes.num_key_value_heads
    heads = sizes.num_attention_heads + groups
    return torch.cat((turning.expand(heads, -1, -1), torch.zeros_like(turning).expand(groups, -1, -1)))


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and signed sines of the rotary embedding.

    Args:
        positions: int64 [...].
        frequencies: of `rotary_frequencies`, [1, 2, head_dim / 2], or `step_frequencies`.
        dtype: of the result; the angles are computed in float32.

    Returns:
        cosine and sine [..., 1 or heads + 2 G, 2, head_dim / 2]; the sine of a first half is negative.
    """
    angles = positions[..., None, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) by its angle: [..., heads, 2, head_dim / 2] -> the same."""
    cosine, sine = turn
    return torch.addcmul(x * cosine, x.flip(-2), sine)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, sizes.hidden_size, bias=False)

    def forward(
        self, x: Tensor, asking: Tensor, bias: Tensor, turn: Rotation, asking_turn: Rotation, store: Tensor | None
    ) -> Tensor:
        """Attention of K columns to S.

        Args:
            x: [B, S, width], what is attended to.
            asking: [B, K, width], what attends; `x` itself where all columns do.
            bias: [B, 1, K, S].
            turn: of `x`.
            asking_turn: of `asking`.
            store: of a `KeyValueCache`; receives keys and values in columns 0..S-1.

        Returns:
            [B, K, width].
        """
        batch, length, half = *x.shape[:2], self.head_dim // 2
        query = (
            rotate(self.q_proj(asking).view(batch, -1, self.heads, 2, half), asking_turn).flatten(-2).transpose(1, 2)
        )
        key = rotate(self.k_proj(x).view(batch, length, self.groups, 2, half), turn).flatten(-2).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, self.groups, self.head_dim).transpose(1, 2)
        if store is not None:
            store[:, : self.groups, :length].copy_(key)
            store[:, self.groups :, :length].copy_(value)
        mixed = functional.scaled_dot_product_attention(query, self._share(key), self._share(value), attn_mask=bias)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _share(self, x: Tensor) -> Tensor:
        """[B, groups, S, head_dim] -> [B, heads, S, head_dim]; a view without copies where groups is 1."""
        return x[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    """gelu(gate) * up, then down."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        gate = functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and mlp, each after a norm and added to its input."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size)
        self.mlp = MLP(sizes)

    def forward(
        self, x: Tensor, bias: Tensor, turn: Rotation, store: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """[B, S, width] -> the same, or [B, K, width] of the columns in `wanted` (int64 [B, K])."""
        normed = self.input_layernorm(x)
        asking, asking_turn = normed, turn
        if wanted is not None:
            x, asking = _columns(x, wanted), _columns(normed, wanted)
            bias = _columns(bias[:, 0], wanted)[:, None]
            asking_turn = (_columns(turn[0], wanted), _columns(turn[1], wanted))
        x = x + self.self_attn(normed, asking, bias, turn, asking_turn, store)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def step_parts(self) -> StepParts:
        """What `layer_step` needs: without the cost of calling a module, where that does the same."""
        attention, mlp = self.self_attn, self.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        gates = [mlp.gate_proj, mlp.up_proj]
        return StepParts(
            1 + self.input_layernorm.weight,
            1 + self.post_attention_layernorm.weight,
            _joined(projections),
            _direct(attention.o_proj),
            _joined(gates),
            _direct(mlp.down_proj),
        )

    def lay_side_by_side(self) -> None:
        """Let the weights that read the same vector share one piece of memory, so that a step needs one product."""
        attention, mlp = self.self_attn, self.mlp
        _lay_side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        _lay_side_by_side([mlp.gate_proj, mlp.up_proj])


class StepParts(NamedTuple):
    """One layer as `layer_step` uses it: 1 + the weights of the norms, and functions for the linear maps."""

    input_scale: Tensor
    post_scale: Tensor
    queries_keys_values: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]
    gate_and_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]


def layer_step(
    layer: StepParts, x: Tensor, bias: Tensor, turn: Rotation, column: Tensor, store: Tensor, epsilon: Tensor
) -> Tensor:
    """`DecoderLayer.forward` for one column, without a dimension for it.

    Args:
        layer: of `DecoderLayer.step_parts`.
        x: [B, width].
        bias: [B, 1, 1, L], the first L columns of the store.
        turn: of the new column, [B, heads + 2 G, 2, head_dim / 2].
        column: int64 [1], where keys and values are written.
        store: keys and values [B, 2 G, capacity, head_dim].
        epsilon: of `step_norm`.

    Returns:
        [B, width].
    """
    batch, both, _, head_dim = store.shape
    groups, length = both // 2, bias.shape[-1]
    mixed = layer.queries_keys_values(step_norm(x, layer.input_scale, epsilon)).view(batch, -1, 2, head_dim // 2)
    turned = rotate(mixed, turn).view(batch, -1, 1, head_dim)
    heads = turned.shape[1] - both
    store.index_copy_(2, column, turned[:, heads:])
    seen = store.narrow(2, 0, length)
    # The heads that share keys are the rows of one query matrix: nothing is expanded.
    query = turned[:, :heads].reshape(batch, groups, -1, head_dim)
    mixed = functional.scaled_dot_product_attention(query, seen[:, :groups], seen[:, groups:], attn_mask=bias)
    x = x + layer.output(mixed.reshape(batch, -1))
    gate, up = layer.gate_and_up(step_norm(x, layer.post_scale, epsilon)).chunk(2, -1)
    return x + layer.down(functional.gelu(gate, approximate="tanh") * up)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``functional.linear(x, weight)`` of [N, width] and [K, width], quick for the few rows of a step, too.

    In float32 on a CPU, reading the weights is what takes the time then, and this way round they are read in order.
    """
    if 1 < len(x) <= _FEW_ROWS and x.ndim == 2 and weight.dtype == torch.float32 and weight.device.type == "cpu":
        return torch.mm(weight, x.t()).t().contiguous()
    return functional.linear(x, weight)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear map and nothing more: no adapter, no hook, no quantised map."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _direct(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function of a plain linear map; anything else is called as it is."""
    if not _is_plain(module):
        return module
    linear = cast("nn.Linear", module)
    weight, bias = linear.weight, cast("Tensor | None", linear.bias)  # torch's own annotation leaves out None
    if bias is None:
        return lambda x: product(x, weight)
    return lambda x: functional.linear(x, weight, bias)


def _joined(modules: list[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """The results of several linear maps of one vector, one behind the other; one product where that is possible."""
    if all(_is_plain(module) and module.bias is None for module in modules):
        weight = _as_one([module.weight for module in modules])
        if weight is not None:
            return lambda x: product(x, weight)
    calls = [_direct(module) for module in modules]
    return lambda x: torch.cat([call(x) for call in calls], dim=-1)


def _as_one(weights: list[Tensor]) -> Tensor | None:
    """Matrices [K_i, width] as one [sum of K_i, width] of the same memory, if they lie there one behind the other."""
    first = weights[0].detach()
    place = first.storage_offset()
    for weight in weights:
        ours = type(weight) is nn.Parameter and weight.dtype == first.dtype  # and not distributed, for one
        if not ours or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if weight.storage_offset() != place or not weight.is_contiguous():
            return None
        place += weight.numel()
    return first.as_strided((sum(len(weight) for weight in weights), first.shape[1]), first.stride())


def _lay_side_by_side(modules: list[nn.Linear]) -> None:
    weights: list[Tensor] = [module.weight for module in modules if _is_plain(module)]
    if not weights:
        return
    alike = {(type(weight), weight.device, weight.dtype) for weight in weights} == {
        (nn.Parameter, weights[0].device, weights[0].dtype)
    }
    if len(weights) < len(modules) or not alike or weights[0].is_meta or _as_one(weights) is not None:
        return
    together = torch.cat([weight.detach() for weight in weights])
    begin = 0
    for weight in weights:
        weight.data = together[begin : begin + len(weight)]
        begin += len(weight)


class Decoder(nn.Module):
    """The layers and the final norm: vectors in, vectors out."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: KeyValueCache | None = None,
        wanted: Tensor | None = None,
        *,
        checkpointed: bool = False,
    ) -> Tensor:
        """Whole sequences.

        Args:
            x: [B, S, width].
            mask: bool [B, 1, S, S], True where the query sees the key; no row may be empty. Or floats, which are added
                to the scores.
            positions: int64 [B, S].
            cache: where given, its columns 0..S-1 receive the keys and values.
            wanted: int64 [B, K], the columns that are needed: the last layer then leaves the others out.
            checkpointed: keep only the input of each layer and compute the rest again in the backward pass.

        Returns:
            [B, S or K, width] after the final norm.
        """
        turn = rotation(positions, rotary_frequencies(self.head_dim, x.device), x.dtype)
        bias = _bias(mask, x.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            store = None if cache is None else cache.stores[index]
            arguments = (x, bias, turn, store, wanted if index == last else None)
            x = checkpoint(layer, *arguments, use_reentrant=False) if checkpointed else layer(*arguments)
        return self.norm(x)  # type: ignore[no-any-return]

    def _apply(self, *arguments: Any, **options: Any) -> Decoder:
        """Of every move to a device or dtype, which takes each weight on its own."""
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self.lay_side_by_side()
        return self

    def lay_side_by_side(self) -> None:
        """See `DecoderLayer.lay_side_by_side`: to be called when weights were put in; without it all is the same."""
        for layer in self.layers:
            layer.lay_side_by_side()  # type: ignore[operator]

    def step_parts(self) -> list[StepParts]:
        """The layers as `step` uses them; see `DecoderLayer.step_parts`."""
        return [layer.step_parts() for layer in self.layers]  # type: ignore[operator]

    def step(self, x: Tensor, mask: Tensor, positions: Tensor, column: Tensor, cache: KeyValueCache) -> Tensor:
        """One column of every row.

        Args:
            x: [B, width].
            mask: bool [B, L], the first L <= capacity columns; the new column must be among them and True.
            positions: int64 [B].
            column: int64 [1], where keys and values are written.
            cache: written in place.

        Returns:
            [B, width] after the final norm.
        """
        turn = rotation(positions, cache.frequencies, x.dtype)
        bias = _bias(mask[:, None, None], x.dtype)
        epsilon = torch.full((1,), RMS_NORM_EPSILON, device=x.device)
        for layer, store in zip(cache.parts, cache.stores, strict=True):
            x = layer_step(layer, x, bias, turn, column, store, epsilon)
        return step_norm(x, 1 + self.norm.weight, epsilon)


def _columns(x: Tensor, wanted: Tensor) -> Tensor:
    """Pick columns of each row: [B, S, ...] and int64 [B, K] -> [B, K, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], wanted]


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, minus infinity elsewhere: made once, where a bool mask would be converted in every layer."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
