"""The code of the documentation runs as it is printed, in the order in which it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pi0_fast.cli import COMMANDS, main

REPOSITORY = Path(__file__).resolve().parents[1]


def blocks(page: str, *kinds: str, section: str = "") -> list[tuple[str, str]]:
    """(kind, text) of the blocks of these kinds, in order, on a page or in one section of it."""
    text = (REPOSITORY / page).read_text()
    if section:
        assert text.count(f"\n## {section}\n") == 1
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```({'|'.join(kinds)})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def arguments(command: str) -> list[str]:
    """What follows the program's name."""
    program, *found = shlex.split(command.replace("\\\n", " "))
    assert program == "pi0-fast"
    return found


def check_command(command: str) -> None:
    """A command that needs more than a test has: it is parsed at least."""
    name, *flags = arguments(command)
    COMMANDS[name].parse(COMMANDS[name].config_class, flags, f"pi0-fast {name}").validate()


def run(code: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> str:
    """What Python code and commands print, each block on its own."""
    printed = ""
    for kind, block in code:
        if kind == "python":
            exec(compile(block, "the page", "exec"), {})
        else:
            assert main(arguments(block)) == 0, capsys.readouterr().err
        printed += capsys.readouterr().out
    return printed


def test_the_page_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    code = blocks("docs/policy.md", "python")
    assert len(code) == 5
    names: dict[str, object] = {}
    for _, block in code:
        exec(compile(block, "docs/policy.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([1, 10, 6])") == 1
    assert printed.count("torch.Size([1, 6])") == 7
    # The README's section follows on: the checkpoint is there now.
    for _, block in blocks("README.md", "python", section="Use a checkpoint"):
        exec(compile(block, "README.md", "exec"), names)
    assert "torch.Size([1, 10, 6])" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_the_page_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code = blocks("docs/train.md", "python", "bash")
    assert [kind for kind, _ in code] == ["python", "python", "bash", "bash", "python"]
    printed = run(code, capsys)
    assert "resuming outputs/circles/checkpoints/000040 at step 40 of 50" in printed
    assert printed.endswith("torch.Size([1, 8, 3])\n")
    assert (tmp_path / "outputs/circles/report.json").is_file()
    ((_, for_a_gpu),) = blocks("docs/train.md", "sh")
    check_command(for_a_gpu)


@pytest.mark.usefixtures("one_thread")
def test_the_page_of_mixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code = blocks("docs/mixtures.md", "python", "bash")
    assert [kind for kind, _ in code] == ["python", "bash", "python", "bash", "bash"]
    printed = run(code, capsys)
    assert "\n6 2\n" in printed
    assert "resuming" in printed
    report = json.loads((tmp_path / "outputs/both/report.json").read_text())
    assert [round(row["chunk_s"], 2) for row in report["mixture"]] == [0.17, 0.5]
    assert [row["share"] for row in report["mixture"]] == [0.7, 0.3]
    assert (tmp_path / "gripper_policy" / "model.safetensors").is_file()
    assert (tmp_path / "shared_tokenizer" / "metadata.json").is_file()


def test_the_page_of_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    for _, block in blocks("docs/record.md", "bash"):
        flags = arguments(block)
        assert main([*flags, *([] if "train-tokenizer" in flags else ["--num_workers=0"])]) == 0
    printed = capsys.readouterr().out
    ((_, shown),) = blocks("docs/record.md", "text")
    for line in shown.splitlines():
        assert line in printed
    run(blocks("docs/record.md", "python"), capsys)
    for _, block in blocks("docs/record.md", "sh"):
        check_command(block)


@pytest.mark.usefixtures("one_thread")
def test_the_page_of_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    printed = run(blocks("docs/evaluate.md", "python", "bash"), capsys)
    assert "of 8 succeeded, 95 % interval [" in printed
    assert "6 of each task, seeds 100000 to 100005" in printed
    assert "B less A, on the same seeds" in printed
    assert "A: evaluated\nB: evaluated_8\n" in printed
    ((_, command),) = blocks("docs/evaluate.md", "sh")
    check_command(command)


@pytest.mark.slow
def test_the_page_of_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes on a CPU, with the data of the page of training."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    run(blocks("docs/train.md", "python")[:2], capsys)
    commands = blocks("docs/train_on_several_gpus.md", "bash")
    assert len(commands) == 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    printed = ""
    for _, command in commands:
        done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert "2 processes (fsdp): 2 frames a process x 2 = 4 frames a step" in printed
    assert "saved by 2 processes, and is gone on with by 1 process" in printed
