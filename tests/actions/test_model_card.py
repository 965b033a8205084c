"""The model card: what it states, and that no name breaks it, as a YAML parser and a Markdown parser see it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pi0_fast.actions.model_card import is_hub_id, model_card

SETTINGS = {"scale": 10.0, "vocab_size": 256, "time_horizon": 16, "action_dim": 2, "symbol_format": "plain"}
NORMALIZER = {"mode": "QUANTILES", "names": ["pan", "lift"], "low": [-1.0, 0.0], "high": [1.0, 0.5]}
TOKENS = {
    "compression_ratio": 8.0,
    "mean_token_length": 4.0,
    "p99_token_length": 7.5,
    "min_token_length": 2,
    "max_token_length": 9,
}
METADATA: dict[str, Any] = {
    "repo_id": "me/walk",
    "encoded_dims": "0:2",
    "use_delta_transform": True,
    "delta_dims": "0,1",
    "state_key": "observation.state",
    "normalization_mode": "QUANTILES",
    "num_training_chunks": 1234,
    "compression_stats": TOKENS,
    "held_out": {
        "episodes": [3, 8],
        "chunks": 567,
        "tokens": {**TOKENS, "mean_token_length": 4.5},
        "rmse": [0.00123456, 0.002],
        "worst": [0.0345678, 0.05],
        "quantization_worst": [0.03, 0.05],
        "clipping_worst": [0.02, 0.0],
        "normalized_rmse": 0.0125,
        "clipped_values": 0.01,
        "clipped_frames": 0.0567,
        "saturations": 3,
    },
    "versions": {"pi0-fast": "0.1.0", "dataset_revision": "0123abc"},
}


def front_matter(card: str) -> Any:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))


def body(card: str) -> str:
    return card.split("\n---\n", 1)[1]


def rendered(card: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(body(card))


def shown(token: Token) -> str:
    """The text that a reader sees of one paragraph or cell; nothing but text (and the links that we make) is in it."""
    children = token.children or []
    assert {child.type for child in children} <= {"text", "code_inline", "text_special", "link_open", "link_close"}
    return "".join(child.content for child in children)


def tables(card: str) -> list[list[list[str]]]:
    """Rows of cells of every table, the headers first."""
    found: list[list[list[str]]] = []
    tokens = rendered(card)
    for before, token in itertools.pairwise(tokens):
        if before.type == "table_open":
            found.append([])
        if before.type == "tr_open":
            found[-1].append([])
        if before.type in ("td_open", "th_open"):
            found[-1][-1].append(shown(token))
    return found


def listed(card: str) -> dict[str, str]:
    """The items of all lists, ``name: value``."""
    tokens = rendered(card)
    items = [shown(tokens[i + 2]) for i, token in enumerate(tokens) if token.type == "list_item_open"]
    return dict(item.split(": ", 1) for item in items)


def test_what_a_card_states() -> None:
    card = model_card("me/tok", SETTINGS, METADATA, NORMALIZER, dataset_on_hub=True)
    assert front_matter(card) == {
        "library_name": "pi0-fast",
        "tags": ["robotics", "FAST", "LeRobot"],
        "datasets": ["me/walk"],
    }
    assert listed(card) == {
        "Dataset": "me/walk",
        "Dataset revision": "0123abc",
        "Chunk": "16 steps of 2 dimensions",
        "Dimensions of the action": "0:2 (the end excluded)",
        "Delta transform": "relative to observation.state: dimensions 0,1",
        "Normalization": "QUANTILES (normalizer.json)",
        "Scale": "10.0",
        "Vocabulary": "256 tokens, plain",
        "Chunks fitted": "1234",
        "Fitted with": "pi0-fast 0.1.0",
        "Frames clipped by the normalizer": "5.67%",
        "Values clipped": "1.00%",
        "Coefficients outside the vocabulary": "3",
        "RMSE in normalized units": "0.0125",
    }
    tokens, errors = tables(card)
    assert tokens[0] == ["", "fitted", "held out"]
    assert tokens[1] == ["Tokens per chunk, mean", "4", "4.5"]
    assert errors == [
        ["", "dimension", "range", "RMSE", "worst", "by rounding", "by clipping"],
        ["0", "pan", "2", "0.001235", "0.03457", "0.03", "0.02"],
        ["1", "lift", "0.5", "0.002", "0.05", "0.05", "0"],
    ]
    assert "567 chunks of 2 episodes that were held out" in card
    assert "(https://huggingface.co/datasets/me/walk)" in card
    assert [fence.content for fence in rendered(card) if fence.type == "fence"] == [
        "from pi0_fast import FastTokenizer\n\n"
        'tokenizer = FastTokenizer.from_pretrained("me/tok")\n'
        "actions, states = ...  # as in the dataset: chunks [N, H, A], and the state at each one's first step\n"
        "ids = tokenizer.encode_actions(actions, states)\n"
        "restored = tokenizer.decode_actions(ids, states)  # [N, 16, 2], the encoded dimensions\n",
        "from transformers import AutoProcessor\n\n"
        'processor = AutoProcessor.from_pretrained("me/tok", trust_remote_code=True)\n',
        "lerobot-train --policy.type=pi0_fast --policy.action_tokenizer_name=me/tok ...\n",
    ]


def test_what_is_not_known_is_not_stated() -> None:
    card = model_card("me/tok", {**SETTINGS, "time_horizon": None, "action_dim": None})
    assert "datasets" not in front_matter(card)
    assert "No measurements came with this tokenizer." in card
    assert "any number of steps of any number of dimensions" in card
    assert "None" not in card
    assert "[N, H, D], normalized to about [-1, 1]" in card
    assert "normalizer" not in card
    nothing_held = model_card("me/tok", SETTINGS, {**METADATA, "held_out": None}, NORMALIZER, dataset_on_hub=True)
    assert "No episodes were held out" in nothing_held
    assert tables(nothing_held)[0][0] == ["", "fitted"]


def test_metadata_as_lerobot_writes_it() -> None:
    known = {key: METADATA[key] for key in ("repo_id", "encoded_dims", "normalization_mode", "compression_stats")}
    card = model_card("me/tok", SETTINGS, {**known, "use_delta_transform": False, "delta_dims": None})
    assert listed(card)["Normalization"] == "QUANTILES"
    assert "Delta transform" not in listed(card)


@pytest.mark.parametrize("name", ["local/walk", "../data", "a\n- b", "me/walk\ntags: []", "/data/walk", "walk"])
def test_only_a_dataset_of_the_hub_is_linked(name: str) -> None:
    on_hub = name == "local/walk"
    card = model_card("me/tok", SETTINGS, {**METADATA, "repo_id": name}, NORMALIZER, dataset_on_hub=on_hub)
    assert ("datasets" in front_matter(card)) is on_hub
    assert listed(card)["Dataset"] == " ".join(name.split())


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("lerobot/pusht", True),
        ("a/B-c_d.e0", True),
        ("pusht", False),
        ("a/b/c", False),
        ("./b", False),
        ("a/b c", False),
        ("a/b\n", False),
        ("a/..", False),
        ("a/b--c", False),
        ("a/b.git", False),
        ("a/" + "b" * 95, False),
        (None, False),
        (3, False),
    ],
)
def test_names_of_the_hub(name: object, is_one: bool) -> None:
    assert is_hub_id(name) is is_one


NASTY = [
    "a | b",
    "`code` **bold** <script>alert(1)</script> &amp;",
    "[x](http://evil) ![y](z)",
    "\\",
    "---",
    "# title",
    "- item",
    "1. item",
    "a\n\n---\nb: [c",
    "~~gone~~ $x$ @someone http://a.b",
    "\x00\x1b[31m\u202e\ud83d",
    "$$",
    "名前 é 😀",
]
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(max_size=30))


@settings(deadline=None, max_examples=150)
@given(name=TEXTS, dataset=TEXTS, key=TEXTS)
def test_no_name_breaks_a_card(name: str, dataset: str, key: str) -> None:
    """Every name is shown as it is (white space and unprintable characters apart), and nothing else changes."""

    def as_shown(text: str) -> str:
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    metadata = {**METADATA, "repo_id": dataset, "state_key": key, "versions": {"dataset_revision": name}}
    card = model_card("me/tok", SETTINGS, metadata, {**NORMALIZER, "names": [name, "lift"]}, dataset_on_hub=True)
    card.encode("utf-8")
    assert set(front_matter(card)) - {"datasets"} == {"library_name", "tags"}
    errors = tables(card)[1]
    assert [row[1] for row in errors] == ["dimension", as_shown(name), "lift"]
    assert {len(row) for row in errors} == {7}
    assert listed(card)["Delta transform"] == f"relative to {as_shown(key)}: dimensions 0,1"
    assert listed(card).get("Dataset", "") == as_shown(dataset)
    assert not re.search(r"<[a-z/!]", body(card))
    headings = [token for token in rendered(card) if token.type == "heading_open"]
    assert [token.tag for token in headings] == ["h1", "h2", "h2", "h2"]
