"""In plain words: what a policy counted of its data, because it changed it, left it out, or could not use it.

Left out: the counting (preparation.py, policy.py, training/).
"""

from __future__ import annotations

from collections.abc import Mapping

#: Name of a counter -> what one of them is, in the plural.
_WORDS = {
    "state_below": "values of the state lay below the range of normalisation",
    "state_above": "values of the state lay above the range of normalisation",
    "clipped_values": "action values were clipped to the range of normalisation",
    "saturated_coefficients": "coefficients were larger than the action tokenizer can express and were cut off",
    "over_error": "rows could not be kept within the action tokenizer's max_error and were encoded plainly",
    "padded_rows": "rows reached beyond the end of their episode and carried no loss",
    "steps_without_loss": "steps had no row with loss and changed nothing",
}
_WORDS_OF_ROWS = {
    "over_budget": "took more ids than max_action_tokens; none was cut",
    "malformed": "generated no valid chunk",
    "assume_contiguous_prefix": "had a masked camera and were generated from the wrong columns, as by openpi's decoder",
}


def described(counts: Mapping[str, int]) -> list[str]:
    """One line for each counter that is not 0, with its name in brackets; of ``rows`` (with loss) there is the share.

    Args:
        counts: as `PI0FastPolicy.counts`.
    """
    rows = counts.get("rows", 0)
    return [
        f"{_line(name, count, rows)} ({name})" for name, count in sorted(counts.items()) if count and name != "rows"
    ]


def noticed(name: str) -> str:
    """What happened for the first time, without a number: one text however often it is said.

    Args:
        name: of a counter, as in `PI0FastPolicy.counts`.
    """
    if name in _WORDS:
        what = f"some {_WORDS[name]}"
    else:
        what = f"some rows {_of_rows(name)}" if _of_rows(name) else "something happened"
    return f"{what} (counted as {name})"


def _line(name: str, count: int, rows: int) -> str:
    if name in _WORDS:
        return f"{count:,} {_WORDS[name]}"
    what = _of_rows(name)
    share = f" of {rows:,} rows ({count / rows:.1%})" if rows else " rows"
    return f"{count:,}{share} {what}" if what else f"{count:,}"


def _of_rows(name: str) -> str:
    """What is true of the rows that a counter counts; empty for a name without words."""
    kind, _, camera = name.partition(" ")
    if kind == "missing":
        return f"had no picture of {camera}, which was masked or black"
    if kind == "unused":
        return f"had pictures of {camera}, which the policy does not look at"
    return _WORDS_OF_ROWS.get(name, "")
