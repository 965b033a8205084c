"""What people see while a command runs: lines, warnings, tables and progress.

Results go to stdout, progress and warnings to stderr. Colours and bars appear only on a terminal (NO_COLOR
removes the colours); elsewhere everything is plain text. rich is imported only when it draws something. A stream that
is closed or broken stops no work: what it cannot take is dropped. Control characters are shown, never sent.
Left out: log files, levels of verbosity, two progress bars at once.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from pi0_fast.streams import ForgivingStream, encodable, visible

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 100
#: Of a table: characters beside the columns, between two of them, and the width that a column of texts is not narrowed
#: below for another.
_EDGES, _GAP, _LEAST_TEXT = 2, 3, 20
_SECONDS_BETWEEN_LINES = 10.0

Advance = Callable[..., None]


_silent = False


@contextmanager
def silence() -> Iterator[None]:
    """Within the block nothing is shown: of several processes that do the same, one says so."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def say(text: str) -> None:
    """One line (or several) of a command's result on stdout."""
    _print(text, sys.stdout)


def warn(text: str) -> None:
    """A warning on stderr, yellow on a terminal."""
    line = f"warning: {visible(text)}"
    if _draws_on(sys.stderr) and not os.environ.get("NO_COLOR"):
        line = f"\x1b[33m{line}\x1b[0m"
    _print(line, sys.stderr, escape=False)


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Within the block Python's warnings and this package's log, from WARNING up, are lines as `warn` makes them.

    For commands; a program that imports the package decides for itself. A line that was shown is not shown again.
    """
    seen: set[str] = set()

    def show(text: str) -> None:
        if text not in seen:
            seen.add(text)
            warn(text)

    def show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            show(str(message))
        else:
            before(message, category, *rest, **more)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: show(record.getMessage())  # type: ignore[method-assign]
    logger, before = logging.getLogger("pi0_fast"), warnings.showwarning
    logger.addHandler(handler)
    warnings.showwarning = show_warning
    try:
        yield
    finally:
        warnings.showwarning = before
        logger.removeHandler(handler)


def print_table(title: str, rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> None:
    """A table on stdout, at most 100 columns wide where stdout is not a terminal.

    Long texts are folded; numbers and the first column, which says what a row is about, are kept whole while there is
    room for them and one more. A table that is too wide even so is printed in parts, each with the first column.

    Args:
        title: line above the table.
        rows: cells, of any type; floats are printed with four significant digits.
        headers: one per column. Columns that hold only numbers are aligned to the right.

    Raises:
        ValueError: a row has more or fewer cells than there are headers.
    """
    from rich.console import Console

    texts = [[_cell(value) for value in row] for row in rows]
    for row in texts:
        if len(row) != len(headers):
            raise ValueError(f"table {title!r}: a row has {len(row)} cells for {len(headers)} headers: {row}")
    terminal = _draws_on(sys.stdout)
    console = Console(
        file=_forgiving(sys.stdout), force_terminal=terminal, width=None if terminal else _PLAIN_WIDTH, highlight=False
    )
    columns = [
        _Column(_cell(header), [row[position] for row in texts], first=position == 0)
        for position, header in enumerate(headers)
    ]
    for number, part in enumerate(_parts(columns, console.width)):
        _print_part(console, title if number == 0 else f"{title} (continued)", part)


class _Column:
    """A table's column: its header, its cells, and how it may be narrowed."""

    def __init__(self, header: str, cells: list[str], *, first: bool) -> None:
        from rich.cells import cell_len

        self.header, self.cells = header, cells
        self.numeric = bool(cells) and all(map(_is_number, cells))
        self.width = max(map(cell_len, (header, *cells)))
        self.rigid = self.numeric or first
        #: What it needs before another column is put beside it.
        self.least = self.width if self.rigid else min(self.width, _LEAST_TEXT)


def _parts(columns: list[_Column], width: int) -> list[list[_Column]]:
    """The columns, or several groups of them that each fit into a width, all beginning with the first column."""
    parts = [columns[:1]]
    for column in columns[1:]:
        if _needed([*parts[-1], column]) > width and len(parts[-1]) > 1:
            parts.append(columns[:1])
        parts[-1].append(column)
    return parts


def _needed(columns: list[_Column]) -> int:
    return _EDGES + sum(column.least + _GAP for column in columns) - _GAP


def _print_part(console: Console, title: str, columns: list[_Column]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    # Text, not str: rich would take "[0:6]" in a cell for markup and drop it.
    named = any(column.header for column in columns)
    table = Table(box=SIMPLE_HEAD, show_header=named, pad_edge=False)
    fits = _needed(columns) <= console.width
    for column in columns:
        table.add_column(
            Text(column.header),
            justify="right" if column.numeric else "left",
            overflow="fold",
            no_wrap=column.rigid and fits,
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    with console.capture() as drawn:
        console.print(Text(_cell(title), style="bold"))  # as the table's title it would be folded to its width
        console.print(table)
    lines = "\n".join(line.rstrip() for line in drawn.get().rstrip("\n").split("\n"))  # rich pads every line
    _print(lines, sys.stdout, escape=False)  # the cells are escaped already, and rich's own colours must not be


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return encodable(visible(str(value), one_line=True), sys.stdout)  # before the widths of columns are measured


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%").replace(",", ""))
    except ValueError:
        return False
    return True


@contextmanager
def progress(title: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Show how far a piece of work is: `with progress("fitting", 943, "merges") as advance: ...; advance()`.

    On a terminal a bar on stderr. Elsewhere plain lines on stderr: one at the start, at most one every ten
    seconds, one at the end, which says how far it came (also when the work ended early or failed).

    Args:
        title: what is going on, e.g. "fitting".
        total: how many units there are; None when that is not known; with 0 nothing is shown.
        unit: their name in the plural.

    Yields:
        `advance(n=1)`: n more units are done. Any thread may call it.
    """
    if total == 0 or _silent:
        yield _advance_nothing
        return
    shown = _bar if _draws_on(sys.stderr) else _lines
    with shown(title, total, unit) as advance:
        yield advance


def _advance_nothing(n: int = 1) -> None:
    del n


@contextmanager
def _bar(title: str, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # rich would send what is printed to stdout to the bar's terminal as well, away from a pipe or a file.
    console = Console(file=_forgiving(sys.stderr), force_terminal=True)
    with Progress(*columns, console=console, redirect_stdout=ForgivingStream(sys.stdout).isatty()) as bars:
        task = bars.add_task(visible(title), total=total, unit=unit)

        def advance(n: int = 1) -> None:
            bars.advance(task, n)

        yield advance


@contextmanager
def _lines(title: str, total: int | None, unit: str) -> Iterator[Advance]:
    lock = threading.Lock()
    begun = last = _now()
    done = 0

    def counts() -> str:
        return f"{done} {unit}" if total is None else f"{done}/{total} {unit}"

    def advance(n: int = 1) -> None:
        nonlocal done, last
        with lock:
            done += n
            if _now() - last >= _SECONDS_BETWEEN_LINES:
                last = _now()
                _line(f"{title}: {counts()}")

    _line(f"{title}: {counts()}")
    try:
        yield advance
    except BaseException:
        _line(f"{title}: stopped at {counts()}")
        raise
    _line(f"{title}: {counts()}, done in {_now() - begun:.1f} s")


def _line(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO | None, *, escape: bool = True) -> None:
    """Lines on a stream, or nowhere: see `ForgivingStream`, which the command line keeps for its exit status."""
    if _silent:
        return
    forgiving = ForgivingStream(stream)
    forgiving.write((visible(text) if escape else text) + "\n")
    forgiving.flush()


def _forgiving(stream: TextIO | None) -> TextIO:
    return cast(TextIO, ForgivingStream(stream))


def _now() -> float:
    return time.monotonic()


def _draws_on(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that understands colours and cursor movement."""
    return ForgivingStream(stream).isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
