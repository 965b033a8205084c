"""The command `pi0-fast` from its arguments to its exit status, the work itself replaced."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pi0_fast import __version__
from pi0_fast.cli import COMMANDS, PROGRAM, main
from pi0_fast.configs import DemoConfig, TokenizerTrainingConfig
from pi0_fast.types import DatasetError, TokenizerError, UsageError
from test_configs import DOCUMENTED, FROZEN

MINIMAL = ["train-tokenizer", "--repo_id", "nobody/nothing"]


@pytest.fixture
def replace_work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Replaces what a subcommand calls; gives the list of configurations it was called with."""

    def replace(module: str, function: str, raises: BaseException | None = None) -> list[Any]:
        seen: list[Any] = []

        def work(config: Any, *_: Any) -> Any:
            seen.append(config)
            if raises is not None:
                raise raises
            return SimpleNamespace(tables=lambda: [("Held-out episodes", [["tokens per chunk", 18.5]], ["", "mean"])])

        stand_in = ModuleType(module)
        setattr(stand_in, function, work)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return seen

    return replace


@pytest.fixture
def fit(replace_work: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda raises=None: replace_work("pi0_fast.fitting", "train_tokenizer", raises)


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    assert text.startswith("pi0-fast: error: ")
    return text.removeprefix("pi0-fast: error: ").strip()


# --- documented command lines ---------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "expected"), DOCUMENTED)
def test_documented_command_lines_reach_the_fit(
    arguments: list[str],
    expected: dict[str, Any],
    fit: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = fit()
    assert main(["train-tokenizer", *arguments]) == 0
    assert seen == [TokenizerTrainingConfig(**{**FROZEN, **expected})]
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("Held-out episodes\n")
    assert re.search(r"tokens per chunk +18\.5", out)


def test_a_command_that_does_not_exist_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--policy.path=lerobot/pi0fast-libero"]) == 2
    message = one_line(capsys.readouterr().err)
    assert message == f"unknown command 'serve'; there are: {', '.join(COMMANDS)}"


EVALUATE = ["--policy.path=lerobot/pi0fast-libero", "--env.task=a,b", "--rename_map={}"]


def test_eval_is_called_with_its_configuration(replace_work: Callable[..., list[Any]]) -> None:
    seen = replace_work("pi0_fast.evaluate", "evaluate")
    assert main(["eval", *EVALUATE, "--env.type=metaworld"]) == 0
    assert (seen[0].paths, seen[0].env.tasks) == (("lerobot/pi0fast-libero",), ("a", "b"))


def test_a_simulator_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *EVALUATE, "--env.type=habitat"]) == 2
    assert "--env.type must be one of" in one_line(capsys.readouterr().err)


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert set(lines) == set(COMMANDS)
    for name, command in COMMANDS.items():
        assert lines[name].endswith(command.summary)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_command(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--output_dir", "x", flag]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: pi0-fast {command} ")
    assert max(map(len, out.splitlines())) <= 100
    for example in COMMANDS[command].examples:
        assert example.splitlines()[0] in out


@pytest.mark.parametrize(
    ("command", "example"), [(name, example) for name in COMMANDS for example in COMMANDS[name].examples]
)
def test_the_examples_in_the_help_are_command_lines(command: str, example: str) -> None:
    program, name, *flags = shlex.split(example.replace("\\\n", " "))  # as a shell reads it
    assert (program, name) == (PROGRAM, command)
    if "--resume=true" not in flags:  # that needs the run
        COMMANDS[name].parse(COMMANDS[name].config_class, flags, f"{program} {name}").validate()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pi0-fast {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train-tokenizr"], ["unknown command 'train-tokenizr'", "did you mean train-tokenizer?"]),
        (["train_tokenizer"], ["did you mean train-tokenizer?"]),
        (["train-tokenizer"], ["--repo_id must be given", "pi0-fast train-tokenizer --help"]),
        ([*MINIMAL, "--vocabsize", "3"], ["--vocabsize", "did you mean --vocab_size?"]),
        ([*MINIMAL, "--vocab_size", "many"], ["--vocab_size", "int", "'many'"]),
        ([*MINIMAL, "--sample_fraction", "7"], ["--sample_fraction", "7"]),
    ],
)
def test_wrong_usage(
    arguments: list[str], words: list[str], fit: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fit()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [word for word in words if word not in one_line(err)] == [], err
    assert seen == []


def test_demo_is_called_with_its_configuration(replace_work: Callable[..., list[Any]]) -> None:
    seen = replace_work("pi0_fast.demo", "run")
    assert main(["demo", "--output_dir", "somewhere", "--overwrite", "--quick"]) == 0
    assert seen == [DemoConfig("somewhere", overwrite=True, quick=True)]


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DatasetError("episode 3\n  is damaged"), 1, "episode 3 is damaged"),
        (TokenizerError("bad"), 1, "bad"),
        (UsageError("--encoded_dims '0:9': outside the data"), 2, "--encoded_dims '0:9': outside the data"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "[Errno 13] Permission denied: '/x'"),
        (
            KeyError("action"),
            1,
            "unexpected KeyError: 'action' (run again with --debug for the traceback)",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_one_line_and_a_status(
    error: BaseException,
    status: int,
    message: str,
    fit: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(error)
    assert main(MINIMAL) == status
    assert one_line(capsys.readouterr().err) == message


@pytest.mark.parametrize("position", [0, 1, 3])
def test_debug_anywhere_shows_the_traceback(
    position: int, fit: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fit(DatasetError("damaged"))
    assert main([*MINIMAL[:position], "--debug", *MINIMAL[position:]]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert err.splitlines()[-1] == "pi0-fast: error: damaged"
    assert seen == [TokenizerTrainingConfig("nobody/nothing")]


def test_a_reader_that_leaves_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "pi0_fast.cli", "train-tokenizer", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 0


# --- streams that are closed, broken, or speak another encoding -----------------------------------

# The command line with a piece of work that prints everything a fit prints.
WORK = """
import sys
from types import ModuleType, SimpleNamespace
from pi0_fast import display
from pi0_fast.cli import main

def train_tokenizer(config):
    display.say("dataset \\u65e5\\u672c \\x1b[31m of " + config.repo_id)
    display.warn("dimension \\u65e5 is constant")
    with display.progress("fitting", 3, "merges") as advance:
        advance()
    display.say("saved")
    open(sys.argv[1], "w").close()
    return SimpleNamespace(tables=lambda: [("Errors", [["\\u65e5\\x1b[2J\\nx", 0.5]], ["joint", "mean"])])

stand_in = ModuleType("pi0_fast.fitting")
stand_in.train_tokenizer = train_tokenizer
sys.modules["pi0_fast.fitting"] = stand_in
sys.exit(main(["train-tokenizer", "--repo_id", "a/b"]))
"""


def shell(tmp_path: Path, redirection: str, **environment: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of the work with its streams redirected; it has always been finished."""
    marker = tmp_path / "done"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" "$2" {redirection}', sys.executable, WORK, str(marker)],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert marker.exists(), done.stderr
    return done.returncode, done.stdout.decode(), done.stderr.decode()


PROGRESS = ["warning: dimension 日 is constant", "fitting: 0/3 merges"]


@pytest.mark.parametrize(
    ("redirection", "status", "read"),
    [
        ("", 0, ("out", "err")),
        ("2>&-", 0, ("out",)),
        (">&-", 0, ("err",)),
        (">&- 2>&-", 0, ()),
        ("<&- >&- 2>&-", 0, ()),
        ("2>/dev/full", 0, ("out",)),
        ("2> >(head -1 >/dev/null)", 0, ("out",)),
        ("> >(true)", 0, ("err",)),
        (">/dev/full", 1, ("err",)),
    ],
)
def test_no_stream_stops_the_work(tmp_path: Path, redirection: str, status: int, read: tuple[str, ...]) -> None:
    code, out, err = shell(tmp_path, redirection, PYTHONUTF8="1")
    assert code == status
    if "out" in read:
        assert out.splitlines()[:3] == ["dataset 日本 \\x1b[31m of a/b", "saved", "Errors"]
    else:
        assert out == ""
    if "err" in read:
        lines = err.splitlines()
        assert lines[:2] == PROGRESS
        assert lines[2].startswith("fitting: 1/3 merges, done in ")
        rest = ["pi0-fast: error: done, but its output could not be printed: [Errno 28] No space left on device"]
        assert lines[3:] == (rest if status else [])
    else:
        assert err == ""


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["train-tokenizer", "--help"], ["nonsense"]])
def test_help_without_streams(command: list[str]) -> None:
    arguments = ["bash", "-c", '"$0" -m pi0_fast.cli "$@" >&- 2>&-', sys.executable, *command]
    done = subprocess.run(arguments, capture_output=True, check=False)
    assert done.returncode == (2 if command == ["nonsense"] else 0)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}, "\\u65e5"),
        ({"PYTHONIOENCODING": "latin-1"}, "\\u65e5"),
        ({"PYTHONIOENCODING": "utf-8"}, "日"),
    ],
)
def test_what_an_encoding_lacks_is_escaped_and_so_are_control_characters(
    tmp_path: Path, environment: dict[str, str], shown: str
) -> None:
    code, out, err = shell(tmp_path, "", **environment)
    assert code == 0
    assert f"dataset {shown}" in out
    assert "\\x1b[31m of a/b" in out
    # As long as a row of the table can be cut at a newline, a name could forge rows.
    assert re.search(re.escape(f"{shown}\\x1b[2J\\nx") + "[ |]+0.5", out)
    assert f"dimension {shown} is constant" in err
    assert "\x1b" not in out + err


def test_errors_and_tracebacks_show_control_characters(
    fit: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(DatasetError("column \x1b]0;title\x07 is damaged"))
    assert main([*MINIMAL, "--debug"]) == 1
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.splitlines()[-1] == "pi0-fast: error: column \\x1b]0;title\\x07 is damaged"


def test_a_broken_connection_is_not_a_reader_that_left(
    fit: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert main(MINIMAL) == 1
    assert one_line(capsys.readouterr().err) == "[Errno 32] Broken pipe"


def test_streams_are_put_back(fit: Callable[..., list[Any]]) -> None:
    fit()
    before = sys.stdout, sys.stderr
    assert main(MINIMAL) == 0
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("arguments", [["--help"], ["train-tokenizer", "--help"], ["train-tokenizer", "--nonsense"]])
def test_help_and_mistakes_import_nothing_heavy(arguments: list[str]) -> None:
    """What makes `--help` answer in well under half a second."""
    code = (
        "import sys\n"
        "from pi0_fast.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = {'numpy', 'numba', 'scipy', 'pyarrow', 'torch', 'tokenizers', 'huggingface_hub', 'rich'}\n"
        "heavy |= {'draccus', 'yaml'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("module", ["pi0_fast", "pi0_fast.cli"])
def test_the_installed_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"pi0-fast {__version__}\n")
