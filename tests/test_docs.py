"""The code of the documentation runs as it is printed, in the order in which it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / page).read_text(), re.DOTALL | re.MULTILINE)


def section(page: str, title: str) -> str:
    text = (REPOSITORY / page).read_text()
    assert text.count(f"\n## {title}\n") == 1
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_page_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    code = blocks("docs/policy.md")
    assert len(code) == 5
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, "docs/policy.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([1, 10, 6])") == 1
    assert printed.count("torch.Size([1, 6])") == 7
    # The README's section follows on: the checkpoint is there now.
    for block in re.findall(
        r"^```python\n(.*?)^```$", section("README.md", "Use a checkpoint"), re.DOTALL | re.MULTILINE
    ):
        exec(compile(block, "README.md", "exec"), names)
    assert "torch.Size([1, 10, 6])" in capsys.readouterr().out


def test_the_page_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from pi0_fast.cli import main

    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs/train.md").read_text()
    found = re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in found] == ["python", "python", "bash", "bash", "python"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, block in found:
            if kind == "python":
                exec(compile(block, "docs/train.md", "exec"), {})
                continue
            program, *arguments = shlex.split(block.replace("\\\n", " "))
            assert program == "pi0-fast"
            assert main(arguments) == 0, capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "resuming outputs/circles/checkpoints/000040 at step 40 of 50" in printed
    assert printed.endswith("torch.Size([1, 8, 3])\n")
    assert (tmp_path / "outputs/circles/report.json").is_file()
    # The command for a GPU is parsed at least.
    from pi0_fast.train_config import TrainConfig, parse_train

    (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    parse_train(TrainConfig, shlex.split(block.replace("\\\n", " "))[2:], "pi0-fast train").validate()


def test_the_page_of_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    pytest.importorskip("PIL")
    from pi0_fast.cli import COMMANDS, main

    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs/record.md").read_text()
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        arguments = shlex.split(block.replace("\\\n", " "))[1:]
        assert main([*arguments, *([] if "train-tokenizer" in arguments else ["--num_workers=0"])]) == 0
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for line in shown.splitlines():
        assert line in printed
    for block in blocks("docs/record.md"):
        exec(compile(block, "docs/record.md", "exec"), {})
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        name, *arguments = shlex.split(block.replace("\\\n", " "))[1:]
        command = COMMANDS[name]
        command.parse(command.config_class, arguments, "pi0-fast").validate()


def test_the_page_of_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("av")
    from pi0_fast.cli import main
    from pi0_fast.eval_config import EvalConfig, parse_eval

    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs/evaluate.md").read_text()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, block in re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if kind == "python":
                exec(compile(block, "docs/evaluate.md", "exec"), {})
            else:
                arguments = shlex.split(block.replace("\\\n", " "))[1:]
                assert main([*arguments]) == 0, capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "of 8 succeeded, 95 % interval [" in printed
    assert "6 of each task, seeds 100000 to 100005" in printed
    assert "B less A, on the same seeds" in printed
    assert "A: evaluated\nB: evaluated_8\n" in printed
    (block,) = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    parse_eval(EvalConfig, shlex.split(block.replace("\\\n", " "))[2:], "pi0-fast eval").validate()


@pytest.mark.slow
def test_the_page_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on a CPU, with the data of the page of training."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for block in blocks("docs/train.md")[:2]:
        exec(compile(block, "docs/train.md", "exec"), {})
    text = (REPOSITORY / "docs/train_on_several_gpus.md").read_text()
    commands = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(commands) == 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    printed = ""
    for command in commands:
        done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert "2 processes (fsdp): 2 frames a process x 2 = 4 frames a step" in printed
    assert "saved by 2 processes, and is gone on with by 1 process" in printed
