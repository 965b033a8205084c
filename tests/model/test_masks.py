"""Attention masks and positions: the drawing of the module, openpi's counting, and a slow twin."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pi0_fast.model.masks import (  # noqa: E402
    attention_mask,
    contiguous_prefix,
    contiguous_prefix_mask,
    sequence_layout,
)


def row(bits: str) -> torch.Tensor:
    return torch.tensor([[bit == "1" for bit in bits]])


def test_the_drawing() -> None:
    valid, causal, positions = sequence_layout(row("11"), row("1110"), row("0110"))
    expected = ["111000", "111000", "111000", "111100", "111110", "000001"]
    assert attention_mask(valid, causal)[0, 0].tolist() == [[bit == "1" for bit in line] for line in expected]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 4]]


def test_missing_camera_takes_no_position_unless_padding_counts() -> None:
    arguments = (row("0011"), row("110"), row("000"))
    assert sequence_layout(*arguments)[2].tolist() == [[0, 0, 0, 1, 2, 3, 3]]
    assert sequence_layout(*arguments, count_padding=True)[2].tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    seen = attention_mask(*sequence_layout(*arguments)[:2])[0, 0]
    assert not seen[2:, :2].any()


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9), st.integers(0, 3))
def test_equals_the_rule_pair_by_pair(tokens: list[tuple[bool, bool]], images: int) -> None:
    flags = torch.tensor(tokens)[None]
    image_valid = torch.tensor([[index != 1 for index in range(images)]], dtype=torch.bool)
    valid, causal, _ = sequence_layout(image_valid, flags[..., 0], flags[..., 1])
    mask = attention_mask(valid, causal)[0, 0]
    for query in range(valid.shape[1]):
        for key in range(valid.shape[1]):
            seen = bool(valid[0, query] and valid[0, key] and (not causal[0, key] or key <= query))
            assert bool(mask[query, key]) == (seen or query == key)


def test_the_drawing_of_a_contiguous_prefix() -> None:
    """Two image vectors, two of a masked camera, two words, padding; in the second row also two given tokens."""
    valid = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    causal = torch.tensor([[0] * 8, [0] * 6 + [1] * 2], dtype=torch.bool)
    assert contiguous_prefix(valid, causal).int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
    whole = torch.tensor([[1, 1, 1, 0, 0]], dtype=torch.bool)
    assert contiguous_prefix(whole, torch.zeros_like(whole)).tolist() == whole.tolist(), "nothing but padding"


def test_the_mask_of_a_contiguous_prefix() -> None:
    """Empty, image, masked, word, given token, padding: as weights of equal scores."""
    valid = torch.tensor([[0, 1, 0, 1, 1, 0]], dtype=torch.bool)
    causal = torch.tensor([[0, 0, 0, 0, 1, 0]], dtype=torch.bool)
    bias = contiguous_prefix_mask(valid, causal, empty=1)
    scores = torch.linspace(-50, 50, 36).view(6, 6)
    # Whatever the scores, a padded or masked column weights all of the prompt alike.
    alike = [0.2, 0.2, 0.2, 0.2, 0.0, 0.2]
    assert (scores + bias[0, 0]).softmax(-1)[[2, 5]].tolist() == [pytest.approx(alike)] * 2
    assert bias[0, 0].softmax(-1).tolist() == [
        pytest.approx(row)
        for row in (
            [1, 0, 0, 0, 0, 0],
            [0, 0.5, 0, 0.5, 0, 0],
            alike,
            [0, 0.5, 0, 0.5, 0, 0],
            [0, 0, 1 / 3, 1 / 3, 1 / 3, 0],  # the masked column in place of the image's
            alike,
        )
    ]
    assert torch.isfinite(bias.to(torch.bfloat16).softmax(-1)).all()
