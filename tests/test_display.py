"""What is drawn on a terminal and what is printed elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from pi0_fast import display

ESCAPE = "\x1b"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(display, "_now", made)
    return made


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """Both streams of the process as one terminal. (No fixture: pytest would put its own streams back.)"""
    stream = Terminal()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield stream


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_progress_lines_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress("fitting", 943, "merges") as advance:
        for _ in range(100):
            advance()
            clock.now += 0.25  # 25 s in all: lines are due at 10 s and 20 s
        clock.now += 10
        advance(843)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fitting: 0/943 merges",
        "fitting: 41/943 merges",
        "fitting: 81/943 merges",
        "fitting: 943/943 merges",
        "fitting: 943/943 merges, done in 35.0 s",
    ]


@pytest.mark.usefixtures("clock")
def test_progress_of_an_unknown_total_and_of_work_that_ends_early(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with display.progress("reading", None, "frames") as advance:
        advance(7)
    with display.progress("fitting", 10, "merges") as advance:
        advance(6)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 0 frames",
        "reading: 7 frames, done in 0.0 s",
        "fitting: 0/10 merges",
        "fitting: 6/10 merges, done in 0.0 s",
    ]


def test_progress_of_work_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with display.progress("fitting", 10, "merges") as advance:
            advance(3)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work()
    assert capsys.readouterr().err.splitlines() == ["fitting: 0/10 merges", "fitting: stopped at 3/10 merges"]


def test_no_progress_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress("fitting", 0, "merges") as advance:
        advance()
    assert capsys.readouterr() == ("", "")


def test_progress_counts_every_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress("encoding", 4000, "chunks") as advance:

        def work() -> None:
            for _ in range(1000):
                advance()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "encoding: 4000/4000 chunks, done" in capsys.readouterr().err.splitlines()[-1]


def test_progress_bar_on_a_terminal() -> None:
    with terminal() as stream, display.progress("fitting [0:6]", 943, "merges") as advance:
        advance(943)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert ESCAPE in stream.getvalue()
    assert "fitting [0:6]" in text
    assert "943/943 merges" in text


def test_a_bar_on_the_terminal_leaves_a_piped_stdout_alone() -> None:
    piped = io.StringIO()
    with (
        terminal() as stream,
        contextlib.redirect_stdout(piped),
        display.progress("fitting", 2, "merges") as advance,
    ):
        display.say("a result")
        advance(2)
    assert piped.getvalue() == "a result\n"
    assert "a result" not in stream.getvalue()


def test_a_warning_during_a_bar_is_shown() -> None:
    with terminal() as stream, display.progress("fitting", 2, "merges") as advance:
        display.warn("careful [0:6]")
        advance(2)
    assert "warning: careful [0:6]" in stream.getvalue()


def test_table_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what some CI machines set; a file gets plain text all the same
    monkeypatch.setenv("COLUMNS", "200")
    display.print_table(
        "Held-out episodes",
        [
            ["tokens per chunk", 18.25, "[0:6] mean"],
            ["share clipped", "3.1%", "of frames " * 12],
            ["chunks", 1250, ""],
        ],
        ["what", "value", "note"],
    )
    text = capsys.readouterr().out
    assert ESCAPE not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0].strip() == "Held-out episodes"
    assert text.count("of frames") >= 11
    assert re.search(r"tokens per chunk +18\.25 +\[0:6\] mean", text)
    ends = {line.index(value) + len(value) for line in lines for value in ("18.25", "3.1%", "1250") if value in line}
    assert len(ends) == 1  # numbers end in one column


JOINTS = [f"{side}_shoulder_pitch_joint_{number}.position" for side in ("left", "right") for number in (1, 2)]


def test_names_and_numbers_of_a_wide_table_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[name, -1.2345, 1.25, -123.4, 0.2, "12.34%", -1.75, 98.76, "never moves"] for name in JOINTS]
    display.print_table("Ranges", rows, ["dimension", "min", "max", "to -1", "to +1", "outside", "its -1", "+1", ""])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "Ranges (continued)" in lines
    for name in JOINTS:
        found = [line.split() for line in lines if name in line]
        assert all(line[0] == name for line in found)
        cells = [cell for line in found for cell in line[1:]]
        assert cells == ["-1.234", "1.25", "-123.4", "0.2", "12.34%", "-1.75", "98.76", "never", "moves"]


def test_a_table_that_fits_is_one_and_only_texts_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    display.print_table("Decisions", [[JOINTS[0], 1.5, "word " * 40]], ["what", "value", "why"])
    text = capsys.readouterr().out
    assert "continued" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(rf"{JOINTS[0]} +1\.5 +word word", text)
    assert text.count("word") == 40


def test_a_name_longer_than_the_table_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    display.print_table("Names", [["n" * 130, 1.5]], ["what", "value"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("n") >= 130
    assert "1.5" in text


def test_a_table_with_a_ragged_row_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells for 1 headers"):
        display.print_table("t", [["a", "b"]], ["only"])


def test_table_of_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    display.print_table("nothing", [], ["a", "b"])
    assert "nothing" in capsys.readouterr().out


def test_table_and_warning_on_a_terminal() -> None:
    with terminal() as stream:
        display.print_table("title", [["a", 1]], ["x", "y"])
        display.warn("careful")
    assert stream.getvalue().endswith(f"{ESCAPE}[33mwarning: careful{ESCAPE}[0m\n")
    assert stream.getvalue().count(ESCAPE) > 2


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal() as stream:
        display.warn("careful")
        display.print_table("title", [["a", 1]], ["x", "y"])
    assert stream.getvalue().startswith("warning: careful\n")
    assert not re.search(r"\x1b\[3[0-9]", stream.getvalue())


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as stream:
        display.warn("careful")
        display.print_table("title", [["a", 1]], ["x", "y"])
        with display.progress("fitting", 2, "merges") as advance:
            advance(2)
    assert ESCAPE not in stream.getvalue()


def test_say_and_warn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display.say("done")
    display.warn("careful")
    assert capsys.readouterr() == ("done\n", "warning: careful\n")


def test_warnings_of_python_and_of_the_log_are_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(str(message)))
    log = logging.getLogger("pi0_fast.somewhere")
    with warnings.catch_warnings(), display.shown_warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("the range is wide", UserWarning, stacklevel=1)
            log.warning("%d episodes are short", 3)
        log.info("nothing")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        assert others == ["old"]  # of interest to those who program
    assert capsys.readouterr().err == "warning: the range is wide\nwarning: 3 episodes are short\n"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("afterwards", UserWarning, stacklevel=1)
    assert others == ["old", "afterwards"]
    assert logging.getLogger("pi0_fast").handlers == []


def test_a_long_title_is_one_line_above_a_narrow_table(capsys: pytest.CaptureFixture[str]) -> None:
    title = "One chunk encoded and decoded (episode 0, frame 5), in the data's units"
    display.print_table(title, [["a", 1]], ["", ""])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == title
    assert [line.split() for line in lines[1:] if line] == [["a", "1"]]


def test_ascii_only_output_does_not_fail() -> None:
    code = "from pi0_fast.display import print_table; print_table('t', [['a', 1]], ['x', 'y'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_importing_display_does_not_import_rich() -> None:
    code = "import sys, pi0_fast.display; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Broken(Terminal):
    """A terminal that has been hung up."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error", text)


@pytest.mark.parametrize("stream", [None, Broken()])
def test_nothing_shown_is_no_error(stream: Broken | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    display.say("result")
    display.warn("careful")
    display.print_table("Errors", [["a", 1.0]], ["joint", "mean"])
    with display.progress("fitting", 3, "merges") as advance:
        advance()


def test_control_characters_are_shown_on_a_terminal_too() -> None:
    with terminal() as stream:
        display.say("a \x1b[2Jb\x9b0mc\u202ed\n\te")
        display.warn("x\x1b[0my")
        display.print_table("T\x1b[2J", [["j\x1b[2J\nk"]], ["h\x07"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert text.startswith("a \\x1b[2Jb\\x9b0mc\\u202ed\n\te\nwarning: x\\x1b[0my\n")
    assert ESCAPE not in text
    assert "j\\x1b[2J\\nk" in text
    assert "h\\x07" in text


def test_what_an_encoding_lacks_is_escaped_before_columns_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")  # strict, as a notebook or a file may be
    monkeypatch.setattr(sys, "stdout", stream)
    display.say("joint 日本 é")
    display.print_table("日", [["日本", 1.0], ["é", 22.5]], ["joint", "mean"])
    lines = stream.buffer.getvalue().decode("latin-1").splitlines()  # type: ignore[attr-defined]
    assert lines[:2] == ["joint \\u65e5\\u672c é", "\\u65e5"]
    assert len({len(line) for line in lines[2:]}) == 1, lines
    assert lines[-3].startswith("|\\u65e5\\u672c ")
