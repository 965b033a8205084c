"""A policy's weights over several processes: the whole in each, or a part in each (FSDP2).

DistributedDataParallel (Li et al. 2020) keeps all weights in every process and takes the mean of the gradients during
the backward pass. Left out: who the processes are (processes.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pi0_fast.policy import PI0FastPolicy
from pi0_fast.training.processes import Processes


def wrapped(policy: PI0FastPolicy, processes: Processes) -> nn.Module:
    """What to call in place of the policy, so that gradients are means over the processes."""
    if processes.count == 1:
        return policy
    with processes.reaching():
        return DistributedDataParallel(
            policy,
            gradient_as_bucket_view=True,
            # Without cameras the vision tower has no gradients, for which the others would wait.
            find_unused_parameters=not policy.config.image_keys,
        )


def synchronised(module: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Around forward and backward: are gradients exchanged now, or only added up?"""
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    return nullcontext()
