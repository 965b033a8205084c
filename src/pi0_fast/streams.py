"""Standard streams that are closed, broken, full, or cannot encode what is printed on them.

Whoever fits a tokenizer for hours must not lose it because nobody reads the progress any more. `forgiving` stands in
front of stdout and stderr while a command runs; `visible` shows control characters instead of sending them to a
terminal, which would obey those in the names of a dataset. Left out: stdin, and streams of other programs.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

# C0 and C1 controls but newline and tab, DEL, line separators, and what turns the direction of writing.
_CONTROLS = [*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def visible(text: str, *, one_line: bool = False) -> str:
    r"""Text with its control characters written out (ESC as ``\x1b``); newlines and tabs too with `one_line`."""
    return text.translate(_ESCAPES if one_line else _ESCAPES_IN_LINES)


def encodable(text: str, stream: TextIO | None) -> str:
    r"""Text with what the stream's encoding lacks written out (``\u65e5`` in latin-1)."""
    encoding = getattr(stream, "encoding", None)
    return text.encode(encoding, "backslashreplace").decode(encoding) if encoding else text


class ForgivingStream:
    """A text stream that never raises when it is written to; what cannot be encoded is escaped, and what a stream that
    is closed, broken or full cannot take is dropped.

    Attributes:
        error: what stopped the stream, after which nothing more is written; None while it works (or is None itself,
            as Python makes it where the stream was closed before the start: `pi0-fast demo >&-`).
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """Write, or drop the text; returns its length in either case."""
        if self.stream is not None and self.error is None:
            try:
                self.stream.write(encodable(text, self.stream))
            except (OSError, ValueError) as error:  # ValueError: it has been closed
                self.error = error
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing where the stream is broken."""
        if self.stream is not None and self.error is None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self.error = error

    def isatty(self) -> bool:
        """Whether it is a terminal; a closed or broken stream is none."""
        try:
            return self.stream is not None and self.error is None and self.stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """The file descriptor; io.UnsupportedOperation where there is none."""
        if self.stream is None:
            raise io.UnsupportedOperation("the stream is closed")
        return self.stream.fileno()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own (encoding, buffer...)."""
        return getattr(self.__dict__["stream"], name)


@contextlib.contextmanager
def forgiving() -> Iterator[tuple[ForgivingStream, ForgivingStream]]:
    """Make stdout and stderr streams that never raise; yields the two.

    Afterwards the process has its own streams again; one that broke leads nowhere, as Python would complain of it
    again at its exit.
    """
    _occupy_descriptors()
    before = sys.stdout, sys.stderr
    streams = ForgivingStream(sys.stdout), ForgivingStream(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield streams
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()
            if stream.error is not None:
                _lead_nowhere(stream)


def _occupy_descriptors() -> None:
    """Where 0, 1 or 2 is closed the next file to be opened would get its number, and the messages of libraries in C."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _lead_nowhere(stream: ForgivingStream) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or closed: nothing to do
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
