"""The optimizer: learning rates by hand, updates beside torch's, bfloat16, averages, and its state."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from pi0_fast.policy_config import PI0FastConfig  # noqa: E402
from pi0_fast.training.optimizer import CosineSchedule, Optimizer  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402


def schedule(steps: int, *, warmup: int, decay: int, peak: float = 1.0, floor: float = 0.1) -> CosineSchedule:
    config = PI0FastConfig(
        optimizer_lr=peak, scheduler_decay_lr=floor, scheduler_warmup_steps=warmup, scheduler_decay_steps=decay
    )
    return CosineSchedule.of(config, steps)


def test_learning_rates_worked_out_by_hand() -> None:
    rates = schedule(100, warmup=4, decay=8)
    # 1/5 to 1 in a line; then the cosine of the steps since the very beginning.
    found = [rates.rate(step) for step in range(10)]
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[4] == pytest.approx(0.1 + 0.9 * 0.5)
    assert found[6] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.75 * math.pi)))
    assert found[8:] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(20, 1_000, 30_000), (15_000, 1_000, 30_000), (30_000, 1_000, 30_000), (7, 3, 7)]
)
def test_a_short_run_shrinks_both_phases(steps: int, warmup: int, decay: int) -> None:
    rates = schedule(steps, warmup=warmup, decay=decay)
    assert (rates.warmup_steps, rates.decay_steps) == (int(warmup * steps / decay), steps)
    assert rates.rate(steps) == pytest.approx(0.1)


def test_no_warmup_and_no_decay() -> None:
    assert schedule(10, warmup=0, decay=10).rate(0) == 1.0
    assert schedule(10, warmup=0, decay=0).rate(0) == 0.1


# --- updates --------------------------------------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.float32, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5), nn.Linear(7, 5))
    if tied:
        model[3].weight = model[2].weight
    return model.to(dtype)


def gradients(model: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)


def config(**changes: object) -> PI0FastConfig:
    settings = {"optimizer_lr": 0.01, "scheduler_warmup_steps": 2, "scheduler_decay_steps": 10, **changes}
    return PI0FastConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [False, True])
def test_updates_are_those_of_torch_with_clipping_and_a_schedule(fused: bool) -> None:
    ours, theirs = network(), network()
    optimizer = Optimizer(ours, config(optimizer_weight_decay=0.1), steps=10, fused=fused)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(6):
        for model in (ours, theirs):
            gradients(model, step, size=0.01 if step == 3 else 1.0)  # one step that clipping leaves alone
        norm = optimizer.step(step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.param_groups[0]["lr"] = optimizer.schedule.rate(step)
        plain.step()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        assert all(parameter.grad is None for parameter in ours.parameters())
        for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_a_norm_of_zero_means_no_clipping() -> None:
    ours, clipped = network(), network()
    for model, norm in ((ours, 0.0), (clipped, 1.0)):
        settings = config(optimizer_grad_clip_norm=norm, optimizer_eps=1e3, optimizer_weight_decay=0.0)
        gradients(model, 0, size=100.0)
        gradients_norm = Optimizer(model, settings, steps=10).step(0)
        assert gradients_norm.item() > 100
    # With a huge epsilon the update is proportional to the gradient.
    start = network()[0].weight
    assert (ours[0].weight - start).abs().max() > 50 * (clipped[0].weight - start).abs().max()


def test_bfloat16_weights_follow_updates_that_are_smaller_than_their_spacing() -> None:
    model = network(torch.bfloat16)
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # the next smaller bfloat16 number is 1 - 2**-8
    optimizer = Optimizer(
        model, config(optimizer_lr=1e-3, scheduler_decay_lr=1e-3, optimizer_weight_decay=0.0), steps=10
    )
    for step in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(step)
    assert model[0].weight.dtype == torch.bfloat16
    # Twenty updates of 0.001 are 0.02; one of them would be rounded away.
    assert model[0].weight.float().mean().item() == pytest.approx(0.98, abs=0.004)


def test_averages_follow_the_weights_and_are_shown_on_demand() -> None:
    model = network()
    optimizer = Optimizer(model, config(), steps=10, ema_decay=0.75)
    expected = model[0].weight.detach().clone()
    for step in range(3):
        gradients(model, step)
        optimizer.step(step)
        expected = 0.75 * expected + 0.25 * model[0].weight.detach()
    raw = model[0].weight.detach().clone()
    with optimizer.averaged():
        torch.testing.assert_close(model[0].weight.detach(), expected)
    assert torch.equal(model[0].weight.detach(), raw)
    assert not torch.equal(raw, expected)


def test_frozen_parameters_stay_and_all_frozen_is_refused() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = Optimizer(model, config(), steps=10)
    gradients(model, 0)
    optimizer.step(0)
    assert torch.equal(model[0].weight, before)
    assert [name for name in optimizer.parameters if name.startswith("0.")] == []
    with pytest.raises(PolicyError, match="frozen"):
        Optimizer(model.requires_grad_(False), config(), steps=10)


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_state_goes_on_bit_for_bit(dtype: torch.dtype, ema: float | None, fused: bool) -> None:
    model = network(dtype, tied=True)
    optimizer = Optimizer(model, config(), steps=10, fused=fused, ema_decay=ema)
    for step in range(3):
        gradients(model, step)
        optimizer.step(step)
    state = {name: value.clone() for name, value in optimizer.state().items()}
    assert sum(value.nbytes for name, value in state.items() if not name.endswith("/step")) == optimizer.state_bytes()

    other = network(dtype, tied=True)
    with optimizer.averaged():  # what a checkpoint's policy holds
        other.load_state_dict(model.state_dict())
    resumed = Optimizer(other, config(), steps=10, fused=fused, ema_decay=ema)
    resumed.load_state(state, optimizer.settings(), "there")
    for step in range(3, 6):
        for each, by in ((model, optimizer), (other, resumed)):
            gradients(each, step)
            by.step(step)
    for first, second in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
    for name, value in optimizer.state().items():
        assert torch.equal(value, resumed.state()[name]), name


def drop(state: dict[str, Tensor], settings: dict[str, object]) -> None:
    del settings
    del state["0.weight/exp_avg"]


def reshape(state: dict[str, Tensor], settings: dict[str, object]) -> None:
    del settings
    state["0.weight/exp_avg"] = state["0.weight/exp_avg"].T


def rename(state: dict[str, Tensor], settings: dict[str, object]) -> None:
    del state
    settings["parameters"] = ["0.weight"]


def average(state: dict[str, Tensor], settings: dict[str, object]) -> None:
    del state
    settings["ema_decay"] = 0.5


@pytest.mark.parametrize(
    ("damage", "message"),
    [(drop, "lacks 0.weight/exp_avg"), (reshape, r"\[5, 7\]"), (rename, "other trainable"), (average, "ema_decay=0.5")],
)
def test_a_state_that_does_not_fit_is_refused(damage: Callable[..., None], message: str) -> None:
    model = network()
    optimizer = Optimizer(model, config(), steps=10)
    gradients(model, 0)
    optimizer.step(0)
    state, settings = dict(optimizer.state()), optimizer.settings()
    damage(state, settings)
    with pytest.raises(PolicyError, match=message):
        optimizer.load_state(state, settings, "there")
