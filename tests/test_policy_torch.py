"""A policy among torch's own switches: default formats and devices, modes, conversions, state dicts, copies, threads.

What is not here: what a policy computes, and checkpoints in files.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402
from tiny_policies import batch_of, new_policy  # noqa: E402

CAMERA = "observation.images.top"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def chunk(policy: PI0FastPolicy) -> Any:
    return policy.predict_action_chunk(batch_of(actions=False))


def gradient(policy: PI0FastPolicy) -> Any:
    loss, _ = policy(batch_of())
    loss.backward()
    return policy.model.decoder.layers[0].mlp.up_proj.weight.grad


# --- surroundings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "around",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),  # stands for set_default_device("cuda")
    ],
    ids=["inference_mode", "no_grad", "autocast", "default_device"],
)
@pytest.mark.parametrize("made", [False, True], ids=["used", "made"])
def test_nothing_around_a_call_changes_a_chunk_or_what_comes_after_it(around: Any, made: bool) -> None:
    expected = chunk(new_policy())
    first: AbstractContextManager[Any] = around() if made else nullcontext()
    with first:
        policy = new_policy()
    with around():
        within, info = policy.predict_action_chunk(batch_of(actions=False), return_info=True)
    assert torch.equal(within, expected)
    assert torch.equal(chunk(policy), expected)
    assert not info.log_probabilities.is_inference() or around is torch.inference_mode
    assert torch.equal(gradient(policy), gradient(new_policy()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_format_changes_nothing(dtype: Any) -> None:
    expected = chunk(new_policy())
    torch.set_default_dtype(dtype)
    policy = new_policy(cameras=2, attend_missing_cameras=True)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    prepared = policy.preparation.generation(batch_of(actions=False))
    assert prepared.images is not None
    assert prepared.images.dtype == torch.float32
    assert torch.equal(chunk(new_policy()), expected)
    assert gradient(new_policy()).dtype == torch.float32


def test_autocast_rounds_the_loss_only() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = new_policy()(batch_of())
    loss.backward()
    assert loss.item() == pytest.approx(new_policy()(batch_of())[0].item(), rel=1e-2)


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("other", ["half", "bfloat16", "float", "double"])
def test_formats_are_not_converted_in_place(own: str, other: str) -> None:
    policy = new_policy(dtype=own)
    before = chunk(policy)
    if (own, other) == ("float32", "float"):
        policy.float()
    else:
        with pytest.raises(PolicyError, match=rf"a {own} model cannot be converted.*from_pretrained"):
            getattr(policy, other)()
    assert torch.equal(chunk(policy), before)  # whole, whatever was tried


def test_devices_can_be_changed() -> None:
    policy = new_policy().to("cpu")
    assert policy.model.tied_head
    assert torch.equal(chunk(policy), chunk(new_policy()))
    assert new_policy().to("meta").model.device.type == "meta"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_copies(copied: Any) -> None:
    policy = new_policy()
    other = copied(policy)
    assert other.model.tied_head
    assert torch.equal(chunk(other), chunk(policy))
    with torch.no_grad():
        other.model.embed_tokens.weight.zero_()
    assert not torch.equal(other.model.lm_head.weight, policy.model.lm_head.weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_copies_of_a_compiled_policy_compute_with_their_own_weights(
    copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As averages of the weights do. What is compiled stands in for itself here, as compiling takes a minute."""
    compiled: list[Any] = []

    def counted(function: Any, **options: Any) -> Any:
        def call(*arguments: Any) -> Any:
            return function(*arguments)

        compiled.append(options["mode"])
        return call

    monkeypatch.setattr(torch, "compile", counted)
    policy = new_policy(compile_model=True, compile_mode="default")
    other = copied(policy)
    assert compiled == ["default"] * 6
    assert torch.equal(chunk(other), chunk(policy))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(float("nan"))
    with pytest.raises(PolicyError, match="logits are not numbers"):
        chunk(other)
    assert not other(batch_of())[0].isfinite()
    assert torch.equal(chunk(policy), chunk(new_policy()))


# --- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_shared_head_stays_shared(assign: bool) -> None:
    source, policy = new_policy(1), new_policy(2)
    policy.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=assign)
    assert policy.model.tied_head
    assert torch.equal(chunk(policy), chunk(source))


@pytest.mark.parametrize("assign", [False, True])
def test_two_tensors_do_not_go_into_one(assign: bool) -> None:
    policy = new_policy()
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    state["model.lm_head.weight"] += 1
    with pytest.raises(PolicyError, match="shares one tensor between head and token table"):
        policy.load_state_dict(state, assign=assign)
    assert torch.equal(chunk(policy), chunk(new_policy()))


# --- threads, draws, inputs -------------------------------------------------------------------------------------------


def test_threads_share_a_policy() -> None:
    policy = new_policy()
    batches = [batch_of(2, seed=seed, actions=False) for seed in range(4)]
    expected = [policy.predict_action_chunk(batch) for batch in batches]
    before, wrong = policy.counts["rows"], []

    def run(number: int) -> None:
        for _ in range(3):
            if not torch.equal(policy.predict_action_chunk(batches[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert policy.counts["rows"] - before == 4 * 3 * 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-38, 1e-30])
def test_the_coldest_draws_are_greedy(temperature: float) -> None:
    policy = new_policy()
    batch = batch_of(actions=False)
    drawn, info = policy.predict_action_chunk(batch, temperature=temperature, return_info=True)
    assert torch.equal(drawn, policy.predict_action_chunk(batch, temperature=0))
    assert torch.equal(info.log_probabilities, torch.zeros_like(info.log_probabilities))


@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e300])
def test_the_hottest_draws_are_uniform_and_valid(temperature: float) -> None:
    _, info = new_policy().predict_action_chunk(batch_of(actions=False), temperature=temperature, return_info=True)
    assert bool(info.valid.all())
    first = new_policy().preparation.action_tokenizer.vocab_size
    assert info.log_probabilities[:, 0].exp().numpy() == pytest.approx(1 / first, rel=0.2)  # nearly all may come first


@pytest.mark.parametrize("temperature", ["0.5", 10**400, float("nan"), float("inf"), -1.0, [1.0]])
def test_what_is_no_temperature(temperature: Any) -> None:
    with pytest.raises(PolicyError, match=r"temperature is .* must be 0 .greedy. or a positive number"):
        new_policy().predict_action_chunk(batch_of(actions=False), temperature=temperature)


def test_sparse_images_are_named() -> None:
    batch = batch_of(actions=False)
    batch[CAMERA] = batch[CAMERA].to_sparse()
    with pytest.raises(PolicyError, match=f"{CAMERA}.*sparse_coo.*dense"):
        new_policy().predict_action_chunk(batch)


@pytest.mark.parametrize("tasks", [np.array("stop"), np.str_("stop"), np.array(["stop"] * 3), ("stop",) * 3])
def test_tasks_of_numpy(tasks: Any) -> None:
    batch = {**batch_of(actions=False), "task": "stop"}
    policy = new_policy()
    assert torch.equal(policy.predict_action_chunk({**batch, "task": tasks}), policy.predict_action_chunk(batch))


@pytest.mark.parametrize("task", ["_", " _\n", "", "\t"])
def test_a_task_that_says_nothing(task: str) -> None:
    with pytest.raises(PolicyError, match="the task in row 0 must be a text that says what to do"):
        new_policy().predict_action_chunk({**batch_of(actions=False), "task": task})


def test_a_device_that_is_no_name(tmp_path: Any) -> None:
    policy = new_policy()
    policy.save_pretrained(tmp_path / "saved")
    with pytest.raises(PolicyError, match="the device '0' cannot be used"):
        PI0FastPolicy.from_pretrained(tmp_path / "saved", device=0)  # type: ignore[arg-type]
