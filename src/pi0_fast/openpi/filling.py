"""openpi's weights into a model that has none yet, leaf by leaf, so that memory holds little more than the model.

The largest leaves come first: while one is read and turned, the model is still small. Left out: which leaf belongs
where (leaves.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.openpi.leaves import PLACES, Adapter, Tree, merged
from pi0_fast.types import PolicyError, UsageError

#: openpi's only LoRA variant of pi0-FAST, gemma_2b_lora.
_RANK, _ALPHA = 16, 16.0


@torch.inference_mode(False)  # weights made in that mode could never be trained
def fill(model: PaliGemma, tree: Tree, scale: float | None, advance: Callable[..., None]) -> None:
    """Give a model on the meta device, whose head is its token table, the weights of a checkpoint.

    Args:
        model: of the tree's architecture; its parameters are replaced, on the CPU, in the model's own number formats.
        tree: of `leaves.understand`.
        scale: of LoRA in attention, of `lora_scale`; None without LoRA.
        advance: called with the number of bytes after each piece that was read.

    Raises:
        PolicyError: data are missing, damaged or not finite.
    """
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for path in sorted(PLACES, key=lambda path: -math.prod(tree.leaves[path].shape)):
        _take(path, tree, scale, dtypes, state, advance)
    state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.lm_head.weight = model.embed_tokens.weight


def _take(
    path: str,
    tree: Tree,
    scale: float | None,
    dtypes: Mapping[str, torch.dtype],
    state: dict[str, Tensor],
    advance: Callable[..., None],
) -> None:
    """Put what a leaf becomes into the state; a function, so that nothing holds the leaf when the next one is read."""
    place, leaf, adapter = PLACES[path], tree.leaves[path], tree.adapters.get(path)
    blocks = leaf.blocks() if place.stacked else iter([(0, leaf.read()[None])])
    for first, block in blocks:
        for layer in range(first, first + len(block)):
            weight = _tensor(block[layer - first]).float()
            if not bool(torch.isfinite(weight).all()):
                raise PolicyError(f"{path}{f', layer {layer}' if place.stacked else ''}: weights are not finite")
            if adapter is not None:
                weight = _adapted(weight, tree, adapter, layer, scale)
            for name, value in zip(place.names, place.turn(weight), strict=True):
                name = name.replace(".N.", f".{layer}.")
                # In the order of memory that a model's own weights have.
                state[name] = torch.empty(value.shape, dtype=dtypes[name], device="cpu").copy_(value)
        advance(block.nbytes)
        del block, weight, value


def _tensor(values: npt.NDArray[Any]) -> Tensor:
    """numpy's array as a tensor; its bfloat16, which torch does not take, by its bits."""
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(values)


def _adapted(weight: Tensor, tree: Tree, adapter: Adapter, layer: int, scale: float | None) -> Tensor:
    """A layer's weight with its adapter, which is small: it is read once more for each layer."""
    down, up = (_tensor(tree.leaves[path].read())[layer].float() for path in (adapter.down, adapter.up))
    assert scale is not None
    return merged(weight, down, up, scale if adapter.scaled else 1.0, heads_summed=adapter.heads_summed)


def lora_scale(tree: Tree, alpha: float | None, rank_stabilized: bool) -> float | None:
    """The factor of LoRA's products in attention; None where the checkpoint has no LoRA.

    Raises:
        UsageError: alpha is needed and not given, or given (or the square root) where it changes nothing.
    """
    rank = tree.ranks.get("attn")
    if rank is None and (alpha is not None or rank_stabilized):
        what = "no LoRA leaves" if not tree.ranks else "LoRA in the mlp only, which openpi does not scale"
        raise UsageError(f"--lora_alpha and --lora_rank_stabilized have no effect: the checkpoint has {what}")
    if not tree.ranks:
        return None
    if rank is None:
        return 1.0
    if alpha is None:
        if rank != _RANK:
            raise UsageError(
                f"--lora_alpha must be given: the checkpoint has LoRA of rank {rank} in attention, and alpha is in "
                "openpi's configuration (LoRAConfig) only"
            )
        alpha = _ALPHA
    return alpha / math.sqrt(rank) if rank_stabilized else alpha / rank
