"""What a report is, and how its directory is written.

It holds report.html (self-contained), report.json (every number that is drawn), and the pictures as png files. Left
out: the two kinds of report (tokenizer.py, dataset.py), and drawing (pictures.py, page.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pi0_fast.actions.directory import REPORT
from pi0_fast.actions.report import Table
from pi0_fast.reports.page import Page
from pi0_fast.reports.pictures import Picture
from pi0_fast.swap import install_directory, temporary_sibling
from pi0_fast.types import UsageError

REPORT_PAGE = "report.html"
#: The first keys of every report.json.
FORMAT = {"format": "pi0-fast-report", "version": 1}
_OWN_FILES = re.compile(
    r"report\.(html|json)|(token_lengths|errors|worst_chunk_\d+|rate_distortion|vocabulary_use|episode_lengths|ranges|"
    r"distributions|modes)\.png"
)


class Report(Protocol):
    """What both kinds of report can do."""

    def tables(self) -> Iterator[Table]:
        """For a terminal."""

    def to_json(self) -> dict[str, Any]:
        """Every number that is drawn."""

    def drawings(self) -> list[Callable[[], Picture]]:
        """What draws the pictures, in order."""

    def page(self, drawn: Sequence[Picture]) -> Page:
        """The page, with the drawn pictures."""


def save_report(report: Report, directory: Path, advance: Callable[[], object]) -> None:
    """Write a report's directory, all at once; `advance` is called after each picture.

    Raises:
        UsageError: the directory exists and holds anything but a report; matplotlib is missing.
        OSError: it cannot be written; what was there before is unharmed.
    """
    check_replaceable(directory)
    drawn: list[Picture] = []
    for draw in report.drawings():
        drawn.append(draw())
        advance()
    temporary = temporary_sibling(directory)
    try:
        for picture in drawn:
            (temporary / f"{picture.name}.png").write_bytes(picture.png)
        text = json.dumps(report.to_json(), indent=1, allow_nan=False)
        (temporary / REPORT).write_text(text + "\n", encoding="utf-8")
        (temporary / REPORT_PAGE).write_text(report.page(drawn).render(), encoding="utf-8")
        install_directory(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_replaceable(directory: Path) -> None:
    """Refuse to replace a directory that holds anything but an earlier report.

    Raises:
        UsageError: naming what is in the way.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} exists and is no directory")
    for entry in sorted(directory.iterdir()):
        if not _OWN_FILES.fullmatch(entry.name):
            raise UsageError(f"{directory} holds {entry.name}, which is no part of a report, and is not replaced")
