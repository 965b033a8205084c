"""Errors name the flags of the command in use."""

from __future__ import annotations

import pytest

from pi0_fast.flag_names import OF_TRAINING, flags_named, renamed
from pi0_fast.types import DatasetError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pass it as --root", "pass it as --dataset.root"),
        ("(--action_key and --state_key choose)", "(--dataset.action_key and --dataset.state_key choose)"),
        ("--root=x, --root: y; --root.", "--dataset.root=x, --dataset.root: y; --dataset.root."),
        ("--dataset.root, --roots, --root.x, ---root, a--root", "--dataset.root, --roots, --root.x, ---root, a--root"),
        ("chunk_size 9: take chunk_size=8 or less", "chunk_size 9: take --policy.chunk_size=8 or less"),
    ],
)
def test_names_are_exchanged_whole(text: str, expected: str) -> None:
    assert renamed(text, OF_TRAINING) == expected


def test_the_error_stays_the_same_object() -> None:
    raised = DatasetError("no column; see --action_key")

    @flags_named(OF_TRAINING)
    def work() -> None:
        raise raised

    for _ in range(2):
        with pytest.raises(DatasetError, match=r"^no column; see --dataset\.action_key$") as caught:
            work()
        assert caught.value is raised
