"""What a step does with the gradients: their norm, clipping, AdamW, the learning rate, averaged weights.

AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on all trainable parameters in one group, as LeRobot's
`pi0_fast` has it; the gradients' norm over all of them is clipped; the learning rate follows a warm-up and half a
cosine. A bfloat16 parameter keeps a float32 copy of itself here, on which AdamW works: an update of 2.5e-5 is less than
half the distance between neighbouring bfloat16 numbers from 0.01 on, and would be rounded away. Left out: gradients
(policy.py), files (states.py), other optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pi0_fast.policy_config import PI0FastConfig
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
        """The learning rate of the update after `step` completed ones (so the first has 0)."""
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
    ) -> None:
        """Look at the model's parameters; none is changed.

        Args:
            model: only parameters with ``requires_grad`` are trained.
            config: its ``optimizer_*`` and ``scheduler_*`` fields.
            steps: of the whole run.
            fused: None takes the fused kernel where the device has one.
            ema_decay: keep averaged weights, which forget 1 - ema_decay of themselves at each step.
        """
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self._parameters:
            raise PolicyError("all parameters are frozen: there is nothing to train")
        device = next(iter(self._parameters.values())).device
        self.schedule = CosineSchedule.of(config, steps)
        self.fused = device.type in FUSED_DEVICES if fused is None else fused
        self.ema_decay = ema_decay
        self._clip_norm = config.optimizer_grad_clip_norm
        self._masters = {
            name: parameter.detach().float().clone()
            for name, parameter in self._parameters.items()
            if parameter.dtype != torch.float32
        }
        direct = [parameter for name, parameter in self._parameters.items() if name not in self._masters]
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
            {name: parameter.detach().float().clone() for name, parameter in self._parameters.items()}
            if ema_decay is not None
            else {}
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
        norm, scale = self._norm_and_scale()
        rate = self.schedule.rate(completed)
        if self._direct is not None:
            gradients = [p.grad for p in self._direct.param_groups[0]["params"] if p.grad is not None]
            if scale is not None and gradients:
                torch._foreach_mul_(gradients, scale)
            _apply(self._direct, rate)
        for name, optimizer in self._separate.items():
            parameter, master = self._parameters[name], self._masters[name]
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
                average.lerp_(self._masters.get(name, self._parameters[name].detach()), 1 - self.ema_decay)
        return norm

    def discard_gradients(self) -> None:
        """Forget the gradients, without an update."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _norm_and_scale(self) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients, and what to multiply them with (None: nothing to do)."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
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
        kept = {name: self._parameters[name].data for name in self._averages}
        try:
            for name, average in self._averages.items():
                self._parameters[name].data = average.to(kept[name].dtype)
            yield
        finally:
            for name, values in kept.items():
                self._parameters[name].data = values

    # --- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that go on from step to step, but for the model's own; not copied.

        Keys are ``{parameter}/exp_avg``, ``/exp_avg_sq``, ``/step``, and where they are kept ``/master`` and
        ``/average``; with averaged weights also ``/weights``, since a checkpoint's policy has the averaged ones.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._moments(name).items():
                state[f"{name}/{key}"] = value.reshape(-1) if key == "step" else value
            if name in self._masters:
                state[f"{name}/master"] = self._masters[name]
            if name in self._averages:
                state[f"{name}/average"] = self._averages[name]
                if name not in self._masters:
                    state[f"{name}/weights"] = parameter.detach()
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
        used: set[str] = set()

        def take(name: str, key: str, like: Tensor) -> Tensor:
            full = f"{name}/{key}"
            if full not in state:
                raise PolicyError(f"{where} lacks {full}: it was saved with other settings, or is damaged")
            if state[full].shape != like.shape:
                raise PolicyError(f"{where}: {full} is {list(state[full].shape)}, not {list(like.shape)}")
            used.add(full)
            return state[full]

        for name, parameter in self._parameters.items():
            target = self._masters.get(name, parameter)
            if f"{name}/step" in state:
                self._set_moments(name, target, {key: take(name, key, like) for key, like in _like(target)})
            if name in self._masters:
                target.copy_(take(name, "master", target))
            elif self._averages:
                parameter.data.copy_(take(name, "weights", parameter))
            if name in self._masters:
                parameter.data.copy_(target)
            if name in self._averages:
                self._averages[name].copy_(take(name, "average", parameter))
        if set(state) != used:
            raise PolicyError(
                f"{where} holds {', '.join(sorted(set(state) - used)[:8])}, for which these settings have no use: "
                "resume with the dtype that it was saved with"
            )

    def _moments(self, name: str) -> Mapping[str, Tensor]:
        optimizer = self._separate.get(name, self._direct)
        assert optimizer is not None
        moments: Mapping[str, Tensor] = optimizer.state.get(self._masters.get(name, self._parameters[name]), {})
        return moments

    def _set_moments(self, name: str, target: Tensor, values: Mapping[str, Tensor]) -> None:
        optimizer = self._separate.get(name, self._direct)
        assert optimizer is not None
        kept = {key: torch.empty_like(target, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")}
        for key, tensor in kept.items():
            tensor.detach_().copy_(values[key])
        # As AdamW makes it: on the device where it is fused, else on the CPU.
        step = values["step"].to(target.device if self.fused else "cpu", torch.float32, copy=True).reshape(())
        optimizer.state[target] = {"step": step, **kept}


def _apply(optimizer: torch.optim.AdamW, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _like(parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and shapes of AdamW's state of a parameter."""
    yield "step", torch.zeros(1)
    yield "exp_avg", parameter
    yield "exp_avg_sq", parameter
