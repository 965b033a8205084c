"""The page on several datasets runs as it is printed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pi0_fast.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs/mixtures.md"


def test_the_page_of_mixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"^```(python|bash)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in found] == ["python", "bash", "python", "bash", "bash"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, block in found:
            if kind == "python":
                exec(compile(block, str(PAGE), "exec"), {})
                continue
            program, *arguments = shlex.split(block.replace("\\\n", " "))
            assert program == "pi0-fast"
            assert main(arguments) == 0, capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "\n6 2\n" in printed
    assert "resuming" in printed
    report = json.loads((tmp_path / "outputs/both/report.json").read_text())
    assert [round(row["chunk_s"], 2) for row in report["mixture"]] == [0.17, 0.5]
    assert [row["share"] for row in report["mixture"]] == [0.7, 0.3]
    assert (tmp_path / "gripper_policy" / "model.safetensors").is_file()
    assert (tmp_path / "shared_tokenizer" / "metadata.json").is_file()
