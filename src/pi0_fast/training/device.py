"""On which device a run trains, and how that multiplies. Left out: several devices (processes.py)."""

from __future__ import annotations

import torch

from pi0_fast.training.decisions import Decision
from pi0_fast.types import PolicyError

_DEVICES = ("cuda", "mps", "cpu")


def _present_devices() -> list[str]:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name in _DEVICES if there[name]]


def choose_device(asked: str | None) -> torch.device:
    """The device asked for, or the first of cuda, mps and cpu that this machine has.

    Raises:
        PolicyError: it is no device, or not there; the message says which are.
    """
    present = _present_devices()
    if asked is None:
        return torch.device(present[0])
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise PolicyError(f"--policy.device={asked} is no device; there is: {', '.join(present)}") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in present or (device.index or 0) >= count:
        number = f" (number 0 to {count - 1})" if device.type in present and count else ""
        raise PolicyError(
            f"--policy.device={asked}: this machine has no such device; there is: {', '.join(present)}{number}"
        )
    return device


def settle_tf32(allowed: bool) -> Decision:
    """How cuda multiplies float32 numbers."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    why = "faster by far; --allow_tf32=false: with all bits" if allowed else "--allow_tf32=false"
    return Decision("products of float32", "TF32" if allowed else "float32", why)


def absent(device: torch.device) -> str:
    missing = _DEVICES[: _DEVICES.index(device.type)]
    return f"there is no {' and no '.join(missing)}" if missing else "the first choice"
