"""Counters in plain words."""

from __future__ import annotations

from pi0_fast.counters import described, noticed


def test_every_counter_has_its_words() -> None:
    counts = {"rows": 2000, "padded_rows": 500, "clipped_values": 12345, "state_above": 0, "missing camera.top": 1}
    assert described(counts) == [
        "12,345 action values were clipped to the range of normalisation (clipped_values)",
        "1 of 2,000 rows (0.1%) had no picture of camera.top, which was masked or black (missing camera.top)",
        "500 rows reached beyond the end of their episode and carried no loss (padded_rows)",
    ]


def test_what_has_no_words_is_shown_all_the_same() -> None:
    assert described({"new": 3, "malformed": 2}) == ["2 rows generated no valid chunk (malformed)", "3 (new)"]
    assert described({"rows": 3}) == []


def test_what_is_noticed_is_said_without_a_number() -> None:
    """So that a line which was shown is not shown again."""
    assert noticed("state_above") == (
        "some values of the state lay above the range of normalisation (counted as state_above)"
    )
    assert noticed("missing camera.top") == (
        "some rows had no picture of camera.top, which was masked or black (counted as missing camera.top)"
    )
    assert noticed("new") == "something happened (counted as new)"
