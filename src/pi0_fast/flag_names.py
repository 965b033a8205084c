"""Errors that name the flags of the command in use.

What opens and reads datasets serves several commands, and its errors name flags as most of them have them (`--root`);
where a command calls them otherwise (`--dataset.root`), it says so here. Left out: the flags themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pi0_fast.types import Pi0FastError

#: Flags of `pi0-fast train` that other commands, or functions, call otherwise.
OF_TRAINING = {
    "--root": "--dataset.root",
    "--repo_id": "--dataset.repo_id",
    "--revision": "--dataset.revision",
    "--action_key": "--dataset.action_key",
    "--state_key": "--dataset.state_key",
    "take chunk_size": "take --policy.chunk_size",
}


@contextmanager
def flags_named(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, and as a decorator within the function, errors get other flags in their messages.

    Args:
        names: a flag as messages have it -> as the command has it.

    Raises:
        Pi0FastError: whatever was raised, the same object.
    """
    try:
        yield
    except Pi0FastError as error:
        error.args = (renamed(str(error), names), *error.args[1:])
        raise


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with the names exchanged; a longer flag that contains one, such as ``--rooted``, is another flag."""
    pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.-])({pattern})(?![\w.-]*\w)", lambda found: names[found[1]], text)
