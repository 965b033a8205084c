"""The code of the documentation runs as it is printed, in the order in which it stands."""

from __future__ import annotations

import re
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
