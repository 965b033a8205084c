"""`PI0FastPolicy.score`: the same numbers as the loss, and as scoring the whole sequence at once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import pi0_fast.policy  # noqa: E402
import tiny_policies  # noqa: E402


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("prompt_format", ["lerobot", "openpi"])
def test_scores_sum_up_to_the_loss(at_once: int, prompt_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pi0_fast.policy, "_SCORED_AT_ONCE", at_once)
    policy = tiny_policies.new_policy(prompt_format=prompt_format)
    batch = tiny_policies.batch_of(4)
    loss, info = policy(batch)
    scores = policy.score(batch)
    assert len(scores.log_probabilities) == info["target_ids"]
    torch.testing.assert_close(-(scores.log_probabilities * scores.weights).sum(), loss.detach())
    assert not any(value.requires_grad for value in vars(scores).values())


def test_hits_and_kinds_of_target_ids() -> None:
    policy, batch = tiny_policies.trained()
    scores = policy.score(batch)
    assert scores.hits.all()  # it knows these by heart
    untrained = tiny_policies.new_policy(1).score(batch)
    assert untrained.hits.float().mean() < 0.2

    prepared = policy.preparation.training(batch)
    ids = torch.from_numpy(prepared.prompt.ids[prepared.prompt.label])
    prompt = policy.preparation.prompt
    beside = {prompt.end_id, prompt.eos_id, *prompt.action_prefix_ids}
    assert {int(one) for one in ids[~scores.is_action]} == beside
    assert not beside & {int(one) for one in ids[scores.is_action]}
    tokens = policy.preparation.action_tokenizer.encode(policy.preparation.processors.action.apply(batch["action"]))
    assert int(scores.is_action.sum()) == sum(map(len, tokens))


def test_a_row_without_weight_is_marked() -> None:
    policy = tiny_policies.new_policy()
    batch = tiny_policies.batch_of(2) | {"action_is_pad": torch.ones(2, tiny_policies.HORIZON, dtype=torch.bool)}
    assert policy.score(batch).weights.sum() == 0
