"""The model card of a policy: what it states, as parsers of YAML and Markdown see it, and that no name breaks it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import yaml
from markdown_it import MarkdownIt

from pi0_fast import __version__
from pi0_fast.checkpoint import Checkpoint
from pi0_fast.policy_card import Training, names_on_hub, policy_card
from pi0_fast.policy_config import PI0FastConfig
from tiny_policies import new_policy

TABLE = ("Error of actions on 8 held-out frames", [["0 pan", 0.0123456], ["mean", 0.5]], ["dimension", "generated"])


def parts(**changes: Any) -> Checkpoint:
    return new_policy(**changes).checkpoint()


def head(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    return found


def lines(card: str) -> list[str]:
    return card.split("\n---\n", 1)[1].splitlines()


def test_what_a_card_states() -> None:
    names = ["pan", "lift", "grip"]
    checkpoint = parts(
        n_action_steps=4, action_feature_names=names, license="mit", tags=["x"], pretrained_path="lab/base"
    )
    training = Training(["lab/one", "local/two"], [("Training", "30,000 steps of 64 frames")], [TABLE])
    card = policy_card("me/it", {"": checkpoint}, training, ["lab/one", "lab/base"])
    assert head(card) == {
        "library_name": "pi0-fast",
        "pipeline_tag": "robotics",
        "license": "mit",
        "tags": ["robotics", "lerobot", "pi0_fast", "x"],
        "datasets": ["lab/one"],
        "base_model": "lab/base",
    }
    expected = [
        "- Cameras: observation.images.top",
        "- State: 4 dimensions, normalized by QUANTILES",
        "- Action: 3 dimensions (pan, lift, grip), normalized by QUANTILES, absolute",
        "- Chunk: 6 steps, of which 4 are executed",
        "- Action tokenizer: 300 tokens at scale 20.0",
        "- Began with: lab/base",
        "- Datasets: [lab/one](https://huggingface.co/datasets/lab/one), local/two",
        "- Training: 30,000 steps of 64 frames",
        f"- Saved with: pi0-fast {__version__}",
        "| 0 pan | 0.01235 |",
        'policy = PI0FastPolicy.from_pretrained("me/it")',
        'chunk = policy.predict_action_chunk({"observation.images.top": ..., "observation.state": ..., "task": "..."})',
    ]
    assert [line for line in expected if line not in lines(card)] == []
    count = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    assert f"- Model: {count:,} parameters" in card


def test_what_is_not_known_is_not_stated() -> None:
    card = policy_card("me/it", {"": parts()}, Training())
    assert set(head(card)) == {"library_name", "pipeline_tag", "tags"}
    for absent in ("Measured", "Dataset", "Began with", "Training"):
        assert absent not in card


def test_several_robots_and_what_lerobot_cannot_decode() -> None:
    card = policy_card("me/it", {"lab_arm": parts(), "lab_push": parts()}, Training(["lab/arm", "lab/push"]))
    assert [line for line in lines(card) if line.startswith("## Robot")] == [
        "## Robot lab\\_arm",
        "## Robot lab\\_push",
    ]
    assert 'policy = PI0FastPolicy.from_pretrained("me/it", robot="lab_push")' in lines(card)
    assert "LeRobot 0.6.1 loads it" in card
    assert "conventions" not in card
    assert "It knows none of openpi's conventions" in policy_card(
        "me/it", {"": parts(prompt_format="openpi")}, Training()
    )


def test_only_what_is_on_the_hub_is_linked() -> None:
    asked = []

    def exists(name: str, kind: str) -> bool:
        asked.append((name, kind))
        return name != "outputs/policy"

    training = Training(["lab/one", "../data", "two"])
    assert names_on_hub(PI0FastConfig(pretrained_path="outputs/policy"), training, exists) == ["lab/one"]
    assert asked == [("lab/one", "dataset"), ("outputs/policy", "model")]
    assert names_on_hub(PI0FastConfig(pretrained_path="lab/base"), training, exists) == ["lab/one", "lab/base"]
    assert names_on_hub(PI0FastConfig(pretrained_path="/tmp/base"), training, exists) == ["lab/one"]


@pytest.mark.parametrize("name", ["a\n# b", "---", "```", "| x", "[a](b)", "<script>", "{{x}}", "é\x00"])
def test_no_name_breaks_a_card(name: str) -> None:
    checkpoint = parts(action_feature_names=[name, "b", "c"], pretrained_path=name, tags=[name])
    training = Training([name], [("Training", name)], [(name, [[name, 1.0]], [name, "error"])])
    card = policy_card("me/it", {"": checkpoint}, training)
    assert name in head(card)["tags"] or "\x00" in name
    kinds = [token.type for token in MarkdownIt().enable("table").parse("\n".join(lines(card)))]
    plain = policy_card(
        "me/it",
        {"": parts(action_feature_names=["a", "b", "c"], pretrained_path="a", tags=["a"])},
        Training(["a"], [("Training", "a")], [("a", [["a", 1.0]], ["a", "error"])]),
    )
    assert kinds == [token.type for token in MarkdownIt().enable("table").parse("\n".join(lines(plain)))]
