"""The command `pi0-fast` from its arguments to its exit status, the work itself replaced."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pi0_fast import __version__
from pi0_fast.cli import COMMANDS, main
from pi0_fast.configs import DemoConfig, TokenizerTrainingConfig
from pi0_fast.types import DatasetError, TokenizerError, UsageError
from test_configs import DOCUMENTED, FROZEN

MINIMAL = ["train-tokenizer", "--repo_id", "nobody/nothing"]


@pytest.fixture
def replace_work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Replaces what a subcommand calls; gives the list of configurations it was called with."""

    def replace(module: str, function: str, raises: BaseException | None = None) -> list[Any]:
        seen: list[Any] = []

        def work(config: Any) -> Any:
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


TRAIN = [
    "--dataset.repo_id=your_dataset",
    "--policy.type=pi0_fast",
    "--output_dir=./outputs/pi0fast_training",
    "--policy.dtype=bfloat16",
]
EVALUATE = ["--policy.path=lerobot/pi0fast-libero", "--env.type=libero", "--rename_map={}"]


@pytest.mark.parametrize(("command", "arguments"), [("train", TRAIN), ("eval", EVALUATE)])
def test_commands_that_do_not_exist_yet_are_unknown(
    command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments]) == 2
    message = one_line(capsys.readouterr().err)
    assert message == f"unknown command '{command}'; there are: train-tokenizer, inspect, demo"


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
    assert capsys.readouterr().out.startswith(f"usage: pi0-fast {command} ")


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
    assert main(["demo", "--output_dir", "somewhere", "--overwrite"]) == 0
    assert seen == [DemoConfig("somewhere", overwrite=True)]


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
    assert done.returncode == 1


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


def test_the_installed_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pi0_fast.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"pi0-fast {__version__}\n")
