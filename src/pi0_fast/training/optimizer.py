"""What a step does with the gradients: their norm, clipping, AdamW, the learning rate, averaged weights.

AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on all trainable parameters in one group, as LeRobot's
`pi0_fast` has it; the gradients' norm over all of them is clipped; the learning rate follows a warm-up and half a
cosine. A bfloat16 parameter keeps a float32 copy of itself here, on which AdamW works: an update of 2.5e-5 is less than
half the distance between neighbouring bfloat16 numbers from 0.01 on, and would be rounded away. Of weights that are
sharded over several processes, each updates its part. Left out: gradients (policy.py), files (states.py), other
optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.training.processes import Processes
from pi0_fast.training.sharding import laid_out_as, part
from pi0_fast.training.states import fill, stored_shape
from pi0_fast.types import PolicyError

#: Device types whose fused AdamW is taken where nobody says otherwise.
FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class CosineSchedule:
    """Learning rates of LeRobot's `CosineDecayWithWarmupSchedulerConfig`.

    Attributes:
        peak: after the warm-up.
        floor: at `decay_steps` and from then on.
        warmup_steps: the rate rises from ``peak / (warmup_steps + 1)`` in a line.
        decay_steps: counted from step 0, warm-up included.
    """

    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int

    @classmethod
    def of(cls, config: PI0FastConfig, steps: int) -> CosineSchedule:
        """For a run of `steps` steps: where that is less than ``scheduler_decay_steps``, both phases shrink alike."""
        warmup, decay = config.scheduler_warmup_steps, config.scheduler_decay_steps
        if steps < decay:
            warmup, decay = int(warmup * (steps / decay)), steps
        return cls(config.optimizer_lr, config.scheduler_decay_lr, warmup, decay)

    def rate(self, step: int) -> float:
        """The learning rate of the update after `step` completed ones: 0 for the first."""
        if step < self.warmup_steps:
            first = 1 / (self.warmup_steps + 1)
            return self.peak * (first + (1 - first) * step / self.warmup_steps)
        done = min(step, self.decay_steps) / self.decay_steps if self.decay_steps else 1.0
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """AdamW over the trainable parameters of a model, with everything around it.

    Attributes:
        schedule: the learning rates.
        fused: whether AdamW is fused.
        ema_decay: of the averaged weights, or None.

    Raises:
        PolicyError: nothing is trainable.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PI0FastConfig,
        *,
        steps: int,
        fused: bool | None = None,
        ema_decay: float | None = None,
        processes: Processes | None = None,
    ) -> None:
        """Look at the model's parameters; none is changed.

        Args:
            model: only parameters with ``requires_grad`` are trained.
            config: its ``optimizer_*`` and ``scheduler_*`` fields.
            steps: of the whole run.
            fused: None takes the fused kernel where the device has one.
            ema_decay: keep averaged weights, which forget 1 - ema_decay of themselves at each step.
            processes: over which parameters are sharded, where they are.
        """
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self._parameters:
            raise PolicyError("all parameters are frozen: there is nothing to train")
        device = next(iter(self._parameters.values())).device
        self.schedule = CosineSchedule.of(config, steps)
        self.fused = device.type in FUSED_DEVICES if fused is None else fused
        self.ema_decay = ema_decay
        self._clip_norm = config.optimizer_grad_clip_norm
        self._processes = processes
        # What is computed with here: the parameters, or this process' rows of them in the same memory.
        self._parts = {
            name: nn.Parameter(part(parameter)) if isinstance(parameter, DTensor) else parameter
            for name, parameter in self._parameters.items()
        }
        self._masters = {
            name: own.detach().float().clone() for name, own in self._parts.items() if own.dtype != torch.float32
        }
        direct = [own for name, own in self._parts.items() if name not in self._masters]
        settings = {
            "betas": config.optimizer_betas,
            "eps": config.optimizer_eps,
            "weight_decay": config.optimizer_weight_decay,
            "fused": self.fused,
        }
        self._direct = torch.optim.AdamW(direct, lr=0.0, **settings) if direct else None  # type: ignore[arg-type]
        # One for each, so that only one gradient at a time is there in float32 too.
        self._separate = {
            name: torch.optim.AdamW([master], lr=0.0, **settings)  # type: ignore[arg-type]
            for name, master in self._masters.items()
        }
        self._averages = (
            {name: own.detach().float().clone() for name, own in self._parts.items()} if ema_decay is not None else {}
        )

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters, by name; one that has two names has one here."""
        return self._parameters

    def step(self, completed: int) -> Tensor:
        """Update the weights from their gradients, which are gone afterwards.

        Args:
            completed: how many updates there were before; decides the learning rate.

        Returns:
            float32 scalar on the device: the gradients' norm before clipping.
        """
        self._take_gradients()
        norm, scale = self._norm_and_scale()
        rate = self.schedule.rate(completed)
        if self._direct is not None:
            gradients = [p.grad for p in self._direct.param_groups[0]["params"] if p.grad is not None]
            if scale is not None and gradients:
                torch._foreach_mul_(gradients, scale)
            _apply(self._direct, rate)
        for name, optimizer in self._separate.items():
            parameter, master = self._parts[name], self._masters[name]
            if parameter.grad is None:
                continue
            master.grad = parameter.grad.float()
            parameter.grad = None
            if scale is not None:
                master.grad.mul_(scale)
            _apply(optimizer, rate)
            parameter.data.copy_(master)
        if self.ema_decay is not None:
            for name, average in self._averages.items():
                average.lerp_(self._masters.get(name, self._parts[name].detach()), 1 - self.ema_decay)
        return norm

    def _take_gradients(self) -> None:
        for name, own in self._parts.items():
            parameter = self._parameters[name]
            if own is not parameter:
                own.grad = None if parameter.grad is None else part(parameter.grad)
                parameter.grad = None

    def _norm_and_scale(self) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients, and what to multiply them with (None: nothing to do)."""
        gradients = [own.grad for own in self._parts.values() if own.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if self._processes is not None and any(isinstance(p, DTensor) for p in self._parameters.values()):
            squares = norm.square()
            self._processes.add_up(squares)
            norm = squares.sqrt()
        if self._clip_norm <= 0:
            return norm, None
        scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        # On a CPU asking costs nothing and saves a pass over all gradients; elsewhere it would stall the device.
        if norm.device.type == "cpu" and norm.item() <= self._clip_norm:
            return norm, None
        return norm, scale

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the model has the averaged weights, where they are kept."""
        # Where the memory is that of a sharded parameter, it stays; else only what is in it changes.
        kept = {
            name: own.detach().clone() if own is not self._parameters[name] else own.data
            for name, own in self._parts.items()
            if name in self._averages
        }
        try:
            for name, average in self._averages.items():
                self._put(name, average.to(kept[name].dtype))
            yield
        finally:
            for name, values in kept.items():
                self._put(name, values)

    def _put(self, name: str, values: Tensor) -> None:
        own = self._parts[name]
        if own is self._parameters[name]:
            own.data = values
        else:
            own.data.copy_(values)

    # --- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that go on from step to step, but for the model's own; not copied.

        Keys are ``{parameter}/exp_avg``, ``/exp_avg_sq``, ``/step``, and where they are kept ``/master`` and
        ``/average``; with averaged weights also ``/weights``, since a checkpoint's policy has the averaged ones.
        """
        state: dict[str, Tensor] = {}
        for name, own in self._parts.items():
            found = {
                **{key: value for key, value in self._moments(name).items() if key != "step"},
                **({"master": self._masters[name]} if name in self._masters else {}),
                **({"average": self._averages[name]} if name in self._averages else {}),
                **({"weights": own.detach()} if name in self._averages and name not in self._masters else {}),
            }
            for key, value in found.items():
                state[f"{name}/{key}"] = laid_out_as(self._parameters[name], value)
            if "step" in self._moments(name):
                state[f"{name}/step"] = self._moments(name)["step"].reshape(-1)
        return state

    def settings(self) -> dict[str, Any]:
        """What must be the same where `state` is loaded, as JSON holds it; ``fused`` is taken over."""
        return {"fused": self.fused, "ema_decay": self.ema_decay, "parameters": list(self._parameters)}

    def state_bytes(self) -> int:
        """Bytes of `state` once there was a step."""
        moments = 2 + bool(self._averages)
        return sum(
            parameter.numel() * 4 * (moments + (name in self._masters or bool(self._averages)))
            for name, parameter in self._parameters.items()
        )

    def load_state(self, state: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> None:
        """Take over what `state` and `settings` gave, weights included; the tensors are copied.

        Raises:
            PolicyError: the state is that of other parameters, shapes or settings, or lacks something.
        """
        differing = sorted({*settings["parameters"]} ^ {*self._parameters})
        if differing:
            raise PolicyError(
                f"{where} is the state of other trainable parameters: {', '.join(differing[:8])}"
                f"{', ...' if len(differing) > 8 else ''}. Resume with what was frozen, and how the head is shared, "
                "as it was"
            )
        if settings["ema_decay"] != self.ema_decay:
            raise PolicyError(
                f"{where} was saved with ema_decay={settings['ema_decay']}, which cannot become {self.ema_decay} in "
                "the middle of a run"
            )
        targets = self._targets(state)
        for name, target in targets.items():
            if name not in state:
                raise PolicyError(f"{where} lacks {name}: it was saved with other settings, or is damaged")
            shape = stored_shape(state, name)
            if shape != target.shape:
                raise PolicyError(f"{where}: {name} is {list(shape)}, not {list(target.shape)}")
        if set(state) != set(targets):
            raise PolicyError(
                f"{where} holds {', '.join(sorted(set(state) - set(targets))[:8])}, for which these settings have no "
                "use: resume with the dtype that it was saved with"
            )
        fill(targets, state)
        for name, own in self._parts.items():
            if f"{name}/step" in targets:
                self._set_moments(name, {key: targets[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")})
            if name in self._masters:
                own.data.copy_(self._masters[name])

    def _targets(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where the tensors of a state are to go, but for AdamW's, which are new; `state` says whether it has those."""
        targets: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            own, found = self._parts[name], dict[str, Tensor]()
            if f"{name}/step" in state:
                moment = self._masters.get(name, own).detach()
                for key in ("exp_avg", "exp_avg_sq"):
                    found[key] = torch.empty_like(moment, memory_format=torch.preserve_format)
                targets[f"{name}/step"] = torch.zeros(1)
            if name in self._masters:
                found["master"] = self._masters[name]
            elif self._averages:
                found["weights"] = own.data
            if name in self._averages:
                found["average"] = self._averages[name]
            targets |= {f"{name}/{key}": laid_out_as(parameter, value) for key, value in found.items()}
        return targets

    def _moments(self, name: str) -> Mapping[str, Tensor]:
        optimizer = self._separate.get(name, self._direct)
        assert optimizer is not None
        moments: Mapping[str, Tensor] = optimizer.state.get(self._masters.get(name, self._parts[name]), {})
        return moments

    def _set_moments(self, name: str, values: Mapping[str, Tensor]) -> None:
        optimizer = self._separate.get(name, self._direct)
        assert optimizer is not None
        target = self._masters.get(name, self._parts[name])
        # As AdamW makes it: on the device where it is fused, else on the CPU.
        step = values["step"].to(target.device if self.fused else "cpu", torch.float32, copy=True).reshape(())
        optimizer.state[target] = {"step": step, **{key: part(values[key]) for key in ("exp_avg", "exp_avg_sq")}}


def _apply(optimizer: torch.optim.AdamW, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
