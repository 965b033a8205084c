"""Sizes of a model: read, written, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
from pi0_fast.types import PolicyError


def test_published_variants() -> None:
    big, small = Architecture.variant("gemma_2b"), Architecture.variant("gemma_300m", vocab_size=1000)
    assert (big.text.hidden_size, big.text.num_hidden_layers, big.text.intermediate_size) == (2048, 18, 16384)
    assert (big.text.num_attention_heads, big.text.num_key_value_heads, big.text.head_dim) == (8, 1, 256)
    assert big.text.vocab_size == 257152
    assert big.vision == VisionSizes(1152, 27, 16, 4304, 224, 14)
    assert big.vision.patches == 256
    assert small.text == TextSizes(1024, 18, 4096, 8, 1, 256, 1000)
    with pytest.raises(PolicyError, match="unknown paligemma_variant 'gemma_7b'; known: gemma_2b, gemma_300m"):
        Architecture.variant("gemma_7b")


@pytest.mark.golden
def test_reads_the_files_beside_checkpoints(shared: Path) -> None:
    path = shared / "golden" / "lerobot_checkpoint" / "architecture.json"
    from_path = Architecture.from_json(path)
    assert from_path == Architecture.from_json(json.loads(path.read_text()))
    assert from_path.text == TextSizes(64, 2, 128, 2, 1, 32, 4096)
    assert Architecture.from_json(from_path.to_json()) == from_path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"text": {}}, "the two keys 'text' and 'vision', found \\['text'\\]"),
        ({"text": {"width": 3}, "vision": {}}, "unknown keys in 'text': \\['width'\\]"),
        ({"text": {}, "vision": {"projection_dim": 64}}, "projection_dim 64 differs from text.hidden_size 2048"),
        ({"text": {"head_dim": 3}, "vision": {}}, "text.head_dim 3 is odd"),
        ({"text": {"num_attention_heads": 3, "num_key_value_heads": 2}, "vision": {}}, "3 is no multiple of"),
        ({"text": {}, "vision": {"num_attention_heads": 5}}, "vision.hidden_size 1152 is no multiple"),
        ({"text": {}, "vision": {"image_size": 8}}, "image_size 8 is smaller than one patch"),
        ({"text": {"vocab_size": 0}, "vision": {}}, "text.vocab_size is 0"),
        ({"text": {"vocab_size": 2.5}, "vision": {}}, "text.vocab_size is 2.5"),
        ({"text": 3, "vision": {}}, "'text' is int"),
    ],
)
def test_refuses_what_cannot_be_built(source: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Architecture.from_json(source)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "architecture.json").write_text("{")
    with pytest.raises(PolicyError, match=r"architecture\.json: cannot be read"):
        Architecture.from_json(tmp_path / "architecture.json")
    with pytest.raises(PolicyError, match=r"nothing\.json: cannot be read"):
        Architecture.from_json(str(tmp_path / "nothing.json"))


def test_patches_that_do_not_fit_are_left_out() -> None:
    assert replace(Architecture.tiny().vision, image_size=30, patch_size=14).patches == 4
