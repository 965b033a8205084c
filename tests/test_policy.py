"""The policy from a batch to actions and to a loss, with tiny real models; slow twins run every row alone, in full."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import pi0_fast.policy as policy_module  # noqa: E402
from pi0_fast.actions.grammar import Grammar  # noqa: E402
from pi0_fast.policy import ChunkInfo, PI0FastPolicy  # noqa: E402
from pi0_fast.text_tokenizer import TinyTextTokenizer  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402
from tiny_policies import (  # noqa: E402
    ACTION,
    CAMERAS,
    HORIZON,
    TASKS,
    action_tokenizer,
    batch_of,
    new_policy,
    published_tokenizer,
    row_of,
    sizes,
    statistics,
    text_tokenizer,
    trained,
)
from tiny_policies import settings as policy_settings  # noqa: E402

TOP, WRIST = CAMERAS
Golden = tuple[Path, dict[str, Any], dict[str, Any]]
CHECKPOINTS = ["lerobot_checkpoint", "lerobot_checkpoint_relative"]
LIVE_RELATIVE = 0.00193218642

pytestmark = pytest.mark.usefixtures("one_thread")


# --- lerobot's numbers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CHECKPOINTS)
def golden(shared: Path, request: pytest.FixtureRequest) -> Golden:
    """Directory, all recorded numbers, the raw batch."""
    folder = shared / "golden" / request.param
    vectors = load_file(folder / "vectors.safetensors")
    batch: dict[str, Any] = {key: value for key, value in vectors.items() if key.startswith("observation.")}
    batch |= {"action": vectors["action"], "task": json.loads((folder / "tasks.json").read_text())}
    return folder, vectors, batch


def load_golden(folder: Path, **overrides: Any) -> PI0FastPolicy:
    return PI0FastPolicy.from_pretrained(folder, architecture=folder / "architecture.json", overrides=overrides)


@pytest.mark.golden
@pytest.mark.parametrize("constrained", [True, False])
def test_the_recorded_chunk_from_raw_inputs(golden: Golden, constrained: bool) -> None:
    folder, vectors, batch = golden
    policy = load_golden(folder, constrained=constrained)
    chunk, info = policy.predict_action_chunk(batch, return_info=True)
    torch.testing.assert_close(chunk, vectors["chunk"], rtol=0, atol=1e-4)
    assert info.problems == (None, None)
    # In every layout: numpy, 8-bit, channels last, a row alone without a batch axis.
    images = [key for key in batch if "images" in key]
    arrays = {key: value if key == "task" else value.numpy() for key, value in batch.items()}
    torch.testing.assert_close(policy.predict_action_chunk(arrays), chunk, rtol=0, atol=1e-5)
    last = {**batch, **{key: batch[key].permute(0, 2, 3, 1) for key in images}}
    torch.testing.assert_close(policy.predict_action_chunk(last), chunk, rtol=0, atol=1e-5)
    alone = {key: value[1] for key, value in batch.items()}
    torch.testing.assert_close(policy.predict_action_chunk(alone)[0], chunk[1], rtol=0, atol=1e-4)
    bytes_ = {**batch, **{key: (batch[key] * 255).round().to(torch.uint8) for key in images}}
    torch.testing.assert_close(policy.predict_action_chunk(bytes_), vectors["chunk"], rtol=0, atol=1e-4)


@pytest.mark.golden
def test_the_loss_of_lerobots_checkpoints(golden: Golden) -> None:
    """The recorded loss is that before the last step of training; lerobot 0.6.1 gives the other ones on the weights."""
    folder, vectors, batch = golden
    live = {"lerobot_checkpoint": 0.00329720508, "lerobot_checkpoint_relative": LIVE_RELATIVE}[folder.name]
    loss, output = load_golden(folder)(batch)
    assert loss.item() == pytest.approx(live, abs=2e-6)  # of float64 the same is 0.00193343
    assert loss.item() == pytest.approx(vectors["loss"].item(), abs=2e-5)
    assert output["target_ids"] == int(vectors["pre.action.token_mask"].sum()) - 2


# --- the loss ---------------------------------------------------------------------------------------------------------


def slow_sequence(policy: PI0FastPolicy, batch: dict[str, Any], row: int, gap: int = 0) -> tuple[Any, int, list[int]]:
    """Logits [S, V] of one row run alone, the column that predicts the first target, the targets. Nothing is shared.

    `gap`: positions between the images and the text.
    """
    model, prompt = policy.model, policy.preparation.prompt
    processors, tokenizer = policy.preparation.processors, action_tokenizer()
    openpi = policy.config.prompt_format == "openpi"
    state = processors.state.apply(batch["observation.state"][row].numpy())
    actions = processors.action.apply(batch["action"][row].numpy())
    text = text_tokenizer().encode_prompt(prompt.text(batch["task"][row], state))
    begin = [] if openpi else [2]
    target = [*begin, *text_tokenizer().encode("Action: ")]
    target += [1024 - 1 - 128 - i for i in tokenizer.encode(actions[None])[0]]
    target += [*text_tokenizer().encode("|"), 1]
    keys = [key for key in policy.config.image_keys if key in batch]
    images = [model.encode_images(batch[key][row : row + 1] * 2 - 1)[0] for key in keys]
    sequence = torch.cat((*images, model.embed(torch.tensor([*text, *target]))))
    seen_by_all = sum(map(len, images)) + len(text)
    size = len(sequence)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for query in range(size):
        for key in range(size):
            mask[query, key] = key < seen_by_all or key <= query
    positions = torch.arange(size)
    positions[sum(map(len, images)) :] += gap
    hidden = model.hidden_states(sequence[None], mask[None, None], positions[None])
    return model.logits(hidden)[0], seen_by_all + len(begin) - 1, target[len(begin) :]


@pytest.mark.parametrize("cameras", [0, 1, 2])
@pytest.mark.parametrize("prompt_format", ["lerobot", "openpi"])
def test_the_loss_and_its_gradients_equal_the_slow_twin(prompt_format: str, cameras: int) -> None:
    """Full logits of every row alone; lerobot's mean is over all targets of the batch, openpi's over rows of means."""
    policy, batch = new_policy(2, cameras=cameras, prompt_format=prompt_format), batch_of(4, cameras=cameras)
    losses, counts = [], []
    for row in range(4):
        logits, start, targets = slow_sequence(policy, batch, row)
        predicted = logits[start : start + len(targets)]
        losses.append(torch.nn.functional.cross_entropy(predicted, torch.tensor(targets), reduction="sum"))
        counts.append(len(targets))
    assert len(set(counts)) > 1, "rows must differ in length"
    total = torch.stack(losses)
    expected = total.sum() / sum(counts) if prompt_format == "lerobot" else (total / torch.tensor(counts)).mean()
    expected.backward()
    wanted = {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}
    policy.zero_grad()
    loss, output = policy(batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(output["loss"], loss.detach())
    assert not output["loss"].requires_grad
    assert (output["target_ids"], output["rows"]) == (sum(counts), 4)
    for name, parameter in policy.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("changes", "gap"), [({}, 0), ({"attend_missing_cameras": True}, 0), ({"count_padding_in_positions": True}, 4)]
)
def test_the_loss_without_a_camera_equals_the_slow_twin(changes: dict[str, Any], gap: int) -> None:
    """Left out; attended to as a black image; or unseen, its four vectors taking positions."""
    policy, batch = new_policy(2, cameras=2, **changes), batch_of(2, cameras=2)
    del batch[WRIST]
    twins = {**batch, WRIST: torch.zeros_like(batch[TOP])} if "attend_missing_cameras" in changes else batch
    total, count = 0.0, 0
    with torch.no_grad():
        for row in range(2):
            logits, start, targets = slow_sequence(policy, twins, row, gap)
            predicted = logits[start : start + len(targets)]
            total += torch.nn.functional.cross_entropy(predicted, torch.tensor(targets), reduction="sum").item()
            count += len(targets)
        loss, output = policy(batch)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    assert output[f"missing {WRIST}"] == 2


def test_padded_rows_change_neither_loss_nor_gradients() -> None:
    policy, batch = new_policy(2), batch_of(4)
    padded = torch.zeros(4, HORIZON, dtype=torch.bool)
    padded[0, 3:] = padded[2, -1] = True
    kept = {key: [value[1], value[3]] if key == "task" else value[[1, 3]] for key, value in batch.items()}
    results = []
    for given_batch in ({**batch, "action_is_pad": padded}, kept):
        policy.zero_grad()
        loss, output = policy(given_batch)
        loss.backward()
        results.append((loss.item(), policy.model.projector.weight.grad.clone(), output["padded_rows"]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][2], results[1][2]) == (2, 0)
    assert policy.counts["padded_rows"] == 2


def test_a_batch_of_padded_rows_has_a_loss_of_zero_that_can_be_differentiated() -> None:
    policy = new_policy(2)
    loss, output = policy({**batch_of(2), "action_is_pad": torch.ones(2, HORIZON)})
    loss.backward()
    assert loss.item() == 0.0
    assert output["padded_rows"] == 2
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert gradients
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients)


def test_gradient_checkpointing_is_used_and_changes_nothing() -> None:
    plain, saving = new_policy(2), new_policy(2, gradient_checkpointing=True).train()
    assert saving.model.gradient_checkpointing
    for policy in (plain, saving):
        policy(batch_of())[0].backward()
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_a_new_policy_is_in_training_mode() -> None:
    parts = {"text_tokenizer": text_tokenizer(), "action_tokenizer": action_tokenizer()}
    policy = PI0FastPolicy.create(policy_settings(), statistics(), architecture=sizes().to_json(), **parts)
    assert policy.training
    assert policy.model.training
    assert policy.model.architecture == sizes()


def test_training_learns_the_chunks_and_the_end_mark() -> None:
    """Then free generation stops by itself at the end mark, and gives what the grammar gives."""
    policy, batch = trained()
    constrained, info = policy.predict_action_chunk(batch, return_info=True)
    ids = action_tokenizer().encode_actions(batch["action"].numpy())
    for row, expected in enumerate(ids):
        assert info.token_ids[row, : info.lengths[row]].tolist() == expected
    decoded = torch.from_numpy(action_tokenizer().decode_actions(ids))
    torch.testing.assert_close(constrained, decoded, rtol=0, atol=1e-4)
    free = copy_of(policy, constrained=False)
    chunk, free_info = free.predict_action_chunk(batch, return_info=True)
    assert torch.equal(chunk, constrained)
    assert free_info.valid.tolist() == [True] * 3
    assert torch.equal(free_info.token_ids, info.token_ids)
    # `Action: ` before, and the end mark after it.
    longest = len(text_tokenizer().encode("Action: ")) + max(map(len, ids)) + 1
    assert free_info.steps == longest < free.config.max_decoding_steps
    assert free.counts["malformed"] == 0


def copy_of(policy: PI0FastPolicy, **changes: Any) -> PI0FastPolicy:
    """The same weights under other settings."""
    return PI0FastPolicy(
        policy_settings(len(policy.config.image_keys), **changes),
        policy.model,
        policy.preparation.processors,
        text_tokenizer(),
        changes.pop("tokenizer", action_tokenizer()),
    ).eval()


def test_the_rest_of_a_prepared_batch() -> None:
    """What was prepared elsewhere gives the same; the two kinds are not mixed up."""
    policy, batch = new_policy(), batch_of()
    for_loss, for_chunk = policy.preparation.training(batch), policy.preparation.generation(batch)
    assert torch.equal(policy(for_loss)[0], policy(batch)[0])
    assert torch.equal(policy.predict_action_chunk(for_chunk), policy.predict_action_chunk(batch))
    with pytest.raises(PolicyError, match=r"prepared for generation.*preparation\.training"):
        policy(for_chunk)
    with pytest.raises(PolicyError, match=r"prepared for training.*preparation\.generation"):
        policy.predict_action_chunk(for_loss)


# --- generation -------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    horizon=st.integers(1, 9),
    steps=st.integers(26, 60),
    temperature=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_untrained_weights_always_give_valid_chunks(
    seed: int, rows: int, horizon: int, steps: int, temperature: float
) -> None:
    """100 %: any weights, shape and temperature, within the budget; decoding raises where a chunk is not whole."""
    changes = {"chunk_size": horizon, "n_action_steps": 1, "max_decoding_steps": steps, "temperature": temperature}
    policy = new_policy(seed, tokenizer=published_tokenizer(), **changes)
    chunk, info = policy.predict_action_chunk(batch_of(rows, seed=seed, actions=False), return_info=True)
    assert chunk.shape == (rows, horizon, ACTION)
    assert chunk.dtype == torch.float32
    assert bool(chunk.isfinite().all())
    assert info.valid.tolist() == [True] * rows
    assert info.problems == (None,) * rows
    assert int(info.lengths.max()) == info.steps <= steps - 4  # `Action: ` is 3 ids here, the end mark one
    for row in range(rows):
        ids = info.token_ids[row, : info.lengths[row]].tolist()
        held = sum(len(action_tokenizer().vocabulary.expansions[i]) for i in ids)
        assert held == horizon * ACTION
        assert info.token_ids[row, info.lengths[row] :].tolist() == [-1] * (info.steps - len(ids))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("constrained", [True, False])
def test_each_row_of_a_batch_equals_the_row_alone(constrained: bool, temperature: float) -> None:
    """Prompts of unequal length; drawn rows are compared by what their log-probabilities say of the ids drawn."""
    policy = new_policy(4, cameras=2, constrained=constrained, max_decoding_steps=24)
    batch = batch_of(4, cameras=2, actions=False)
    chunk, info = policy.predict_action_chunk(batch, return_info=True)
    assert len({len(text) for text in batch["task"]}) == 4
    for row in range(4):
        alone, its = policy.predict_action_chunk(row_of(batch, row), return_info=True)
        torch.testing.assert_close(alone[0], chunk[row], rtol=0, atol=1e-4)
        length = min(its.log_probabilities.shape[1], info.log_probabilities.shape[1])
        torch.testing.assert_close(its.log_probabilities[0, :length], info.log_probabilities[row, :length])
    if temperature:
        drawn = policy.predict_action_chunk(
            batch, temperature=temperature, generator=torch.Generator().manual_seed(3), return_info=True
        )
        again = policy.predict_action_chunk(
            batch, temperature=temperature, generator=torch.Generator().manual_seed(3), return_info=True
        )
        assert torch.equal(drawn[0], again[0])
        assert not torch.equal(drawn[1].log_probabilities, info.log_probabilities)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"constrained": False},
        {"position_gap": 1, "prompt_format": "openpi", "count_padding_in_positions": True},
        {"attend_missing_cameras": True},
        {"assume_contiguous_prefix": True},
    ],
)
def test_cached_equals_uncached(changes: dict[str, Any]) -> None:
    batch = batch_of(cameras=2, actions=False)
    del batch[WRIST]
    fast, slow = (new_policy(6, cameras=2, max_decoding_steps=20, use_kv_cache=c, **changes) for c in (True, False))
    chunk, info = fast.predict_action_chunk(batch, return_info=True)
    other, its = slow.predict_action_chunk(batch, return_info=True)
    assert torch.equal(info.token_ids, its.token_ids)
    torch.testing.assert_close(other, chunk)
    torch.testing.assert_close(info.log_probabilities, its.log_probabilities, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_cache_is_used_where_asked_for(monkeypatch: pytest.MonkeyPatch, use_cache: bool) -> None:
    policy = new_policy(6, use_kv_cache=use_cache)
    steps = []
    real = policy.model.step
    monkeypatch.setattr(policy.model, "step", lambda *given: steps.append(1) or real(*given))
    _, info = policy.predict_action_chunk(batch_of(), return_info=True)
    assert len(steps) == (info.steps - 1 if use_cache else 0)


def test_the_temperature_of_the_configuration_and_of_a_call() -> None:
    batch = batch_of(actions=False)

    def draw(policy: PI0FastPolicy, **named: Any) -> Any:
        return policy.predict_action_chunk(batch, generator=torch.Generator().manual_seed(1), **named)

    greedy, hot = new_policy(6), new_policy(6, temperature=2.0)
    assert torch.equal(draw(hot), draw(greedy, temperature=2.0))
    assert torch.equal(draw(hot, temperature=0.0), draw(greedy))
    assert not torch.equal(draw(hot), draw(greedy))
    with pytest.raises(PolicyError, match="temperature is -1"):
        draw(greedy, temperature=-1.0)


def test_drawn_rows_stop_alone() -> None:
    policy, batch = trained()
    free = copy_of(policy, constrained=False, temperature=0.3)
    _, info = free.predict_action_chunk(batch, return_info=True, generator=torch.Generator().manual_seed(0))
    assert info.steps < free.config.max_decoding_steps
    after = info.log_probabilities == 0
    assert bool(after.any()), "rows must end at different steps"
    assert len(set(info.lengths.tolist())) > 1


def test_bfloat16_on_a_cpu() -> None:
    """One step of training, and a valid chunk; the loss is near that of float32."""
    policy, batch = new_policy(2, dtype="bfloat16").train(), batch_of()
    loss, _ = policy(batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(bool(p.grad.isfinite().all()) for p in policy.parameters() if p.grad is not None)
    assert policy.model.projector.weight.dtype == torch.float32
    assert policy.model.lm_head.weight.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(new_policy(2)(batch)[0].item(), rel=2e-2)
    torch.optim.AdamW(policy.parameters(), lr=1e-3).step()
    chunk, info = policy.eval().predict_action_chunk(batch, return_info=True)
    assert info.valid.all()
    assert chunk.dtype == torch.float32
    assert policy(batch)[0].item() < loss.item()


def test_what_is_returned_on_request() -> None:
    policy, batch = trained()
    chunk = policy.predict_action_chunk(batch)
    again, info = policy.predict_action_chunk(batch, return_info=True)
    assert torch.equal(chunk, again)
    assert isinstance(info, ChunkInfo)
    assert not chunk.requires_grad
    assert info.log_probabilities.shape == (3, info.steps)
    ids = [row[:length].tolist() for row, length in zip(info.token_ids, info.lengths.tolist(), strict=True)]
    np.testing.assert_allclose(action_tokenizer().decode_actions(ids), chunk.numpy(), atol=1e-5)
    # The most that the targets' share of the loss allows: all ids of a row are likelier than e^-0.5.
    assert bool((info.log_probabilities > -0.5).all())


# --- free generation --------------------------------------------------------------------------------------------------


def test_malformed_rows_are_marked_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = new_policy(0, constrained=False, max_decoding_steps=12)
    chunk, info = policy.predict_action_chunk(batch_of(actions=False), return_info=True)
    assert chunk.shape == (3, HORIZON, ACTION)
    assert bool(chunk.isfinite().all())
    assert info.valid.tolist() == [False] * 3
    assert all("does not begin with 'Action: '" in (problem or "") for problem in info.problems)
    assert policy.counts["malformed"] == 3
    assert (
        "some rows generated no valid chunk (counted as malformed): row 0: the row does not begin with" in caplog.text
    )
    caplog.clear()
    policy.predict_action_chunk(batch_of(actions=False))
    assert policy.counts["malformed"] == 6
    assert "malformed" not in caplog.text  # once is enough


def test_a_row_cut_off_is_decoded_as_lerobot_does() -> None:
    """A budget that ends before the end mark: what is missing counts as 0, and the row is marked."""
    policy, batch = trained()
    _, whole = policy.predict_action_chunk(batch, return_info=True)
    steps = 3 + 2
    free = copy_of(policy, constrained=False, max_decoding_steps=steps)
    chunk, info = free.predict_action_chunk(batch, return_info=True)
    assert info.lengths.tolist() == [2, 2, 2]
    assert torch.equal(info.token_ids, whole.token_ids[:, :2])
    assert all("no end mark" in (problem or "") for problem in info.problems)
    ids = info.token_ids.numpy()
    vocabulary = action_tokenizer().vocabulary
    for row in range(3):
        coefficients = [c for i in ids[row].tolist() for c in vocabulary.expansions[i]]
        coefficients += [0] * (HORIZON * ACTION - len(coefficients))
        spectrum = np.array(coefficients).reshape(HORIZON, ACTION) / 20.0
        n, k = np.mgrid[:HORIZON, :HORIZON]
        inverse = np.sqrt(2 / HORIZON) * np.cos(np.pi * (n + 0.5) * k / HORIZON) * np.where(k == 0, np.sqrt(0.5), 1)
        expected = policy.preparation.processors.action.invert((inverse @ spectrum).astype(np.float32))
        np.testing.assert_allclose(chunk[row].numpy(), expected, rtol=1e-4, atol=1e-4)


def test_the_prefix_need_not_be_checked() -> None:
    policy, batch = trained()
    lenient = copy_of(policy, constrained=False, validate_action_token_prefix=False)
    assert lenient.predict_action_chunk(batch, return_info=True)[1].valid.all()
    untrained = new_policy(0, constrained=False, validate_action_token_prefix=False, max_decoding_steps=6)
    problems = untrained.predict_action_chunk(batch, return_info=True)[1].problems
    assert all("begin" not in (problem or "begin") for problem in problems)


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 4, "least"])
def test_a_budget_that_cannot_hold_a_chunk_is_an_error_at_construction(steps: int | str) -> None:
    """`Action: ` and the end mark take 4 here."""
    least = int(Grammar(action_tokenizer().vocabulary, HORIZON * ACTION).fewest[0, HORIZON * ACTION])
    assert least > 1
    number = least + 4 - 1 if steps == "least" else int(steps)
    with pytest.raises(PolicyError, match=f"max_decoding_steps={number} leaves {number - 4} action tokens"):
        new_policy(max_decoding_steps=number)
    if steps == "least":
        policy = new_policy(max_decoding_steps=least + 4)
        assert policy.predict_action_chunk(batch_of(), return_info=True)[1].steps == least
        new_policy(max_decoding_steps=1, constrained=False)


def test_an_endless_budget_changes_nothing() -> None:
    batch = batch_of(actions=False)
    endless = new_policy(max_decoding_steps=10**12).predict_action_chunk(batch)
    assert torch.equal(endless, new_policy(max_decoding_steps=4 * 6 * 3 + 4).predict_action_chunk(batch))


def test_targets_over_the_budget_are_counted_in_training(caplog: pytest.LogCaptureFixture) -> None:
    policy = new_policy(max_action_tokens=7)
    _, output = policy(batch_of())
    assert output["over_budget"] == policy.counts["over_budget"] == 3
    assert "some rows took more ids than max_action_tokens; none was cut (counted as over_budget)" in caplog.text
    assert policy(batch_of())[0].item() == new_policy()(batch_of())[0].item()


# --- actions one at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executed", [1, 2, 5, HORIZON])
def test_the_first_steps_of_whole_chunks_are_executed_in_order(executed: int) -> None:
    """Decoded at chunk_size, whatever is executed; each next chunk comes of the batch of that moment."""
    policy = copy_of(trained()[0], n_action_steps=executed)
    observations = [batch_of(2, seed=seed, actions=False) for seed in range(2 * executed + 1)]
    expected: list[Any] = []
    for start in range(0, len(observations), executed):
        chunk = policy.predict_action_chunk(observations[start])
        assert chunk.shape == (2, HORIZON, ACTION)
        expected += list(chunk[:, :executed].transpose(0, 1))
    made = [policy.select_action(batch) for batch in observations]
    assert all(action.shape == (2, ACTION) for action in made)
    assert torch.equal(torch.stack(made), torch.stack(expected[: len(made)]))


def test_fifty_steps_predicted_ten_or_twenty_five_executed() -> None:
    for executed in (10, 25):
        changes = {"chunk_size": 50, "n_action_steps": executed, "max_decoding_steps": 160}
        policy = new_policy(3, tokenizer=published_tokenizer(), **changes)
        batches = [batch_of(1, seed=seed, actions=False) for seed in range(executed + 1)]
        first, second = (policy.predict_action_chunk(batches[i]) for i in (0, executed))
        assert first.shape == (1, 50, ACTION)
        made = [policy.select_action(batch) for batch in batches]
        assert torch.equal(torch.stack(made[:-1], 1), first[:, :executed])
        assert torch.equal(made[-1], second[:, 0])


def test_more_steps_than_are_predicted_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"n_action_steps \(7, .*chunk_size \(6"):
        policy_settings(n_action_steps=7)


def test_reset_in_the_middle_of_a_chunk() -> None:
    policy = copy_of(trained()[0])
    first, second = batch_of(2, seed=1, actions=False), batch_of(2, seed=2, actions=False)
    policy.select_action(first)
    policy.select_action(first)
    policy.reset()
    assert torch.equal(policy.select_action(second), policy.predict_action_chunk(second)[:, 0])


def test_another_number_of_rows_in_the_middle_of_a_chunk(tmp_path: Path) -> None:
    policy = copy_of(trained()[0])
    policy.select_action(batch_of(2))
    for other in (batch_of(3), {key: value[0] for key, value in batch_of(1).items()}):
        with pytest.raises(PolicyError, match=r"the chunk under way has 2: call reset\(\)"):
            policy.select_action(other)
    policy.select_action({"task": "whatever"})  # nothing is looked at before the next chunk
    policy.reset()
    alone = {key: value[0] for key, value in batch_of(1).items()}
    assert policy.select_action(alone).shape == (1, ACTION)
    assert policy.select_action(alone).shape == (1, ACTION)
    policy.save_pretrained(tmp_path / "out")
    renamed = PI0FastPolicy.from_pretrained(tmp_path / "out", rename_map={"proprio": "observation.state"})
    batch = batch_of(2)
    batch["proprio"] = batch.pop("observation.state")
    renamed.select_action(batch)
    with pytest.raises(PolicyError, match="a batch of 1 rows"):
        renamed.select_action(row_of(batch, 0))


# --- cameras and openpi's switches ------------------------------------------------------------------------------------


def scores(policy: PI0FastPolicy, batch: dict[str, Any]) -> Any:
    return policy.predict_action_chunk(batch, return_info=True)[1].log_probabilities[:, 0]


def test_a_missing_camera_is_masked_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It changes nothing: the policy sees what one without that camera sees. openpi attends to a black image."""
    both, one = new_policy(5, cameras=2), new_policy(5, cameras=1)
    batch = batch_of(cameras=2, actions=False)
    full = scores(both, batch)
    del batch[WRIST]
    assert torch.equal(scores(both, batch), scores(one, batch))
    assert both.counts[f"missing {WRIST}"] == 3
    assert f"some rows had no picture of {WRIST}, which was masked or black (counted as missing {WRIST})" in caplog.text
    attended = scores(new_policy(5, cameras=2, attend_missing_cameras=True), batch)
    black = scores(both, {**batch, WRIST: torch.zeros_like(batch[TOP])})
    torch.testing.assert_close(attended, black, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(attended, scores(one, batch), atol=1e-4)
    assert not torch.allclose(full, attended, atol=1e-4)


def test_a_contiguous_prefix_is_assumed_where_a_camera_is_masked_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With all cameras there, or attended to, generation takes its ordinary way."""
    given, original = [], policy_module.generate

    def recorded(*arguments: Any, **named: Any) -> Any:
        given.append((named["assume_contiguous_prefix"], arguments[3].shape[1]))
        return original(*arguments, **named)

    monkeypatch.setattr(policy_module, "generate", recorded)
    batch = batch_of(cameras=2, actions=False)
    switched, plain = (new_policy(5, cameras=2, assume_contiguous_prefix=switch) for switch in (True, False))
    attending = new_policy(5, cameras=2, assume_contiguous_prefix=True, attend_missing_cameras=True)
    whole = [scores(policy, batch) for policy in (switched, plain)]
    assert torch.equal(*whole)
    del batch[WRIST]
    found = [scores(policy, batch) for policy in (switched, plain, attending)]
    assert (found[0] - found[1]).abs().min() > 1e-6
    config = switched.config
    prefix = config.tokenizer_max_length + 1 + len(switched.preparation.prompt.action_prefix_ids)  # bos, Action:
    ordinary = given[0]
    assert ordinary[0] is None
    assert given == [ordinary, ordinary, (config.max_decoding_steps, prefix), ordinary, ordinary]
    assert (switched.counts["assume_contiguous_prefix"], attending.counts["assume_contiguous_prefix"]) == (3, 0)
    assert "some rows had a masked camera and were generated from the wrong columns" in caplog.text


@torch.no_grad()
def test_positions_may_count_a_missing_camera_in_training() -> None:
    """The first of two is missing: its four vectors take positions, but nobody sees them."""
    batch = batch_of(cameras=2)
    del batch[TOP]
    plain, counting = (new_policy(5, cameras=2, count_padding_in_positions=c) for c in (False, True))
    # Rotary positions are relative, so that a common shift of all changes nothing: exactly the point of the mask.
    torch.testing.assert_close(plain(batch)[0], counting(batch)[0], rtol=1e-4, atol=1e-5)
    batch[TOP] = batch.pop(WRIST)
    assert not torch.allclose(plain(batch)[0], counting(batch)[0], rtol=0, atol=1e-6)
    # As openpi: generation never counts them.
    torch.testing.assert_close(scores(plain, batch), scores(counting, batch), rtol=1e-4, atol=1e-5)
    short, long_ = row_of(batch_of(4), 3), row_of(batch_of(4), 2)
    assert len(TASKS[3]) < len(TASKS[2])
    rows = {
        key: value + long_[key] if key == "task" else torch.cat((value, long_[key])) for key, value in short.items()
    }
    for policy in (new_policy(5), new_policy(5, count_padding_in_positions=True)):
        torch.testing.assert_close(scores(policy, rows)[0], scores(policy, short)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "common"),
    [
        ({"position_gap": 1}, {}),
        ({"position_gap": 1}, {"constrained": False, "prompt_format": "openpi"}),
        ({"prompt_format": "openpi"}, {}),
        ({"antialias_images": True}, {}),
    ],
    ids=["gap", "gap-free", "prompt_format", "antialias_images"],
)
def test_openpis_switches_change_what_they_should(changes: dict[str, Any], common: dict[str, Any]) -> None:
    batch = batch_of(actions=False)
    batch[TOP] = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8))
    plain, other = new_policy(5, **common), new_policy(5, **common, **changes)
    one, two = (policy.predict_action_chunk(batch, return_info=True)[1] for policy in (plain, other))
    same_first = torch.allclose(one.log_probabilities[:, 0], two.log_probabilities[:, 0], atol=1e-6)
    assert same_first == ("constrained" in common), (
        "the gap lies before the target: before Action:, where that is given"
    )
    length = min(one.steps, two.steps)
    assert not torch.allclose(one.log_probabilities[:, :length], two.log_probabilities[:, :length], atol=1e-6)


# --- construction -----------------------------------------------------------------------------------------------------


def test_parts_that_do_not_belong_together() -> None:
    with pytest.raises(PolicyError, match=r"image_resolution is \(56, 56\).*28 x 28"):
        new_policy(image_resolution=(56, 56))
    policy = new_policy()
    processors = policy.preparation.processors
    with pytest.raises(PolicyError, match="the text tokenizer has 4096 ids, the model 1024"):
        PI0FastPolicy(policy.config, policy.model, processors, TinyTextTokenizer(), action_tokenizer())
    given = {"text_tokenizer": text_tokenizer(), "architecture": sizes()}
    other_mode = policy_settings(normalization_mapping={"STATE": "QUANTILES", "ACTION": "MEAN_STD"})
    with pytest.raises(PolicyError, match="QUANTILES with clip=True, the policy's configuration asks for MEAN_STD"):
        PI0FastPolicy.create(other_mode, statistics(), action_tokenizer=action_tokenizer(), **given)
    with pytest.raises(PolicyError, match=r"statistics of 'observation\.state' are missing"):
        PI0FastPolicy.create(policy_settings(), {}, action_tokenizer=action_tokenizer(), **given)
    with pytest.raises(PolicyError, match="the device 'quantum' cannot be used"):
        PI0FastPolicy.create(
            policy_settings(), statistics(), action_tokenizer=action_tokenizer(), device="quantum", **given
        )


def test_the_same_seed_gives_the_same_policy() -> None:
    one, same_, other = new_policy(7), new_policy(7), new_policy(8)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same_.parameters(), strict=True))
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_compile_model_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled, and that it computes the same, is the model's test."""
    asked = []

    def compile_(function: Any, **named: Any) -> Any:
        asked.append(named["mode"])
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    policy = new_policy(2, compile_model=True, compile_mode="reduce-overhead")
    assert asked
    assert set(asked) == {"reduce-overhead"}
    batch = batch_of(actions=False)
    torch.testing.assert_close(policy.predict_action_chunk(batch), new_policy(2).predict_action_chunk(batch))
    asked.clear()
    new_policy(2)
    assert asked == []


def test_counts_are_sums_and_the_first_of_each_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = new_policy()
    batch = batch_of(2, actions=False)
    batch["observation.state"][:, 1] = 99.0
    with caplog.at_level(logging.WARNING):
        policy.predict_action_chunk(batch)
        policy.predict_action_chunk(batch)
    assert policy.counts["rows"] == 4
    assert policy.counts["state_above"] >= 4
    assert caplog.text.count("state_above") == 1
    assert "rows:" not in caplog.text


def test_the_first_chunk_may_be_predicted_within_inference_mode() -> None:
    """What generation keeps for later calls belongs to no mode of torch."""
    policy, batch = new_policy(), batch_of(2)
    with torch.inference_mode():
        first = policy.predict_action_chunk(batch)
    torch.testing.assert_close(policy.predict_action_chunk(batch), first)
    with torch.enable_grad():
        torch.testing.assert_close(policy.predict_action_chunk(batch), first)
