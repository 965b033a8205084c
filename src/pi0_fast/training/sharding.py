"""A policy's weights over several processes: all of them in each, or a part in each.

DistributedDataParallel (Li et al. 2020) keeps all weights in every process and takes the mean of the gradients during
the backward pass. FSDP2 (torch's `fully_shard`; Zhao et al. 2023) keeps a part of every tensor, the rows r * k to
(r + 1) * k in process r, gathers a layer's weights when they are needed, and gives each process its part of the
gradients. A unit that is gathered at once is a decoder layer, a layer of the vision tower, what is left of that tower,
and the rest; norms of a bfloat16 model, which are float32, are units of their own. Left out: who the processes are
(processes.py), and files (states.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.train_config import TrainConfig
from pi0_fast.training.launch import Launch
from pi0_fast.training.processes import Processes
from pi0_fast.types import UsageError


def check_engine(launch: Launch, config: TrainConfig) -> None:
    """Refuse what sharded weights do not go with, before anything is loaded.

    Raises:
        UsageError: adapters or a compiled model with FSDP.
    """
    if launch.engine != "fsdp":
        return
    if config.peft is not None:
        raise UsageError(
            "--peft with --distributed=fsdp is not offered: adapters are small, and the weights beneath them are not "
            "trained; take --distributed=ddp"
        )
    if config.policy.compile_model:
        raise UsageError("--policy.compile_model with --distributed=fsdp is not offered: take --distributed=ddp")


def wrapped(policy: PI0FastPolicy, processes: Processes) -> nn.Module:
    """What to call in place of the policy, so that gradients are means over the processes.

    With FSDP that is the policy itself, whose weights are tensors with a part in each process from now on.
    """
    launch = processes.launch
    if launch.engine == "one":
        return policy
    with processes.reaching():
        if launch.engine == "fsdp":
            _shard(policy, processes)
            return policy
        return DistributedDataParallel(
            policy,
            gradient_as_bucket_view=True,
            # Without cameras the vision tower has no gradients, for which the others would wait.
            find_unused_parameters=not policy.config.image_keys,
        )


def synchronised(module: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Around forward and backward: are gradients exchanged now, or only added up?

    Only DDP leaves it for later: with FSDP the gradients of all weights would have to be kept meanwhile.
    """
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    return nullcontext()


# --- FSDP -----------------------------------------------------------------------------------------------------------


def _shard(policy: PI0FastPolicy, processes: Processes) -> None:
    model = policy.model
    options: dict[str, Any] = {"mesh": init_device_mesh(model.device.type, (processes.count,))}
    again = processes.launch.reshard_after_forward
    for layer in (*model.decoder.layers, *model.vision_tower.layers):
        _shard_unit(layer, again, options)
    _shard_unit(model.vision_tower, again, options)
    # Embedding table and head are needed first and last in the forward pass, and first in the backward pass.
    _shard_unit(policy, False, options)
    # What is warned of, changing a unit's result in place, nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if model.device.type == "cpu":  # gloo knows sums only
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _shard_unit(module: nn.Module, again: bool, options: dict[str, Any]) -> None:
    """One unit of what is not sharded yet below a module; what is of another dtype than most becomes one before."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in _unsharded(module.parameters()):
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if not sizes:
        return
    most = max(sizes, key=lambda dtype: sizes[dtype])
    others = [
        child
        for child in module.modules()
        if any(parameter.dtype != most for parameter in _unsharded(child.parameters(recurse=False)))
    ]
    for child in others:
        fully_shard(child, reshard_after_forward=again, **options)
    fully_shard(module, reshard_after_forward=again, **options)


def _unsharded(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    return (parameter for parameter in parameters if not isinstance(parameter, DTensor))


@torch.no_grad()
def part(tensor: Tensor) -> Tensor:
    """This process' rows of a sharded tensor, in the same memory; another tensor is itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows = tensor.to_local()
    assert isinstance(rows, Tensor)
    return rows


def laid_out_as(parameter: Tensor, rows: Tensor) -> Tensor:
    """A tensor of the parameter's shape, of which these are this process' rows, in the same memory."""
    if not isinstance(parameter, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def rows_of(parameter: Tensor) -> slice:
    """Which rows of a parameter this process has."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    # As torch.chunk: all processes but the last ones have equally many.
    count, number = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    most = -(-parameter.shape[0] // count)
    return slice(min(number * most, parameter.shape[0]), min((number + 1) * most, parameter.shape[0]))


@torch.no_grad()
def whole_model(model: PaliGemma, device: torch.device | str | None) -> PaliGemma | None:
    """A plain model of all the weights that are sharded in `model`; called by all processes.

    Args:
        model: sharded.
        device: of the result; None: this process needs none.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        if device is not None:
            state[name] = tensor.to(device)
    if device is None:
        return None
    if model.tied_head:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    with torch.device("meta"):
        plain = PaliGemma(model.architecture, tied_head=model.tied_head, dtype=model.dtype)
    plain.load_state_dict(state, strict=True, assign=True)
    return plain.eval()


@contextmanager
def lent(policies: Iterable[PI0FastPolicy], model: PaliGemma | None) -> Iterator[None]:
    """Within the block the policies have another model, for measuring and saving; None leaves them theirs."""
    own = [(policy, policy.model) for policy in policies]
    try:
        for policy, _ in own:
            if model is not None:
                policy.model = model
        yield
    finally:
        for policy, before in own:
            policy.model = before
