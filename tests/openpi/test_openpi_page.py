"""The commands and the code of docs/openpi.md run as they are printed, on openpi's own tiny checkpoint."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorstore")

from trees import write_statistics, write_tokenizer  # noqa: E402

from pi0_fast.cli import COMMANDS, main  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openpi.md"


def commands(kind: str) -> list[list[str]]:
    found = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(found).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip()]


@pytest.mark.golden
def test_the_page_of_openpi(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my_openpi_run" / "29999"
    shutil.copytree(shared / "golden" / "openpi_tiny" / "params", run / "params", copy_function=shutil.copyfile)
    write_statistics(run)
    write_tokenizer(tmp_path / "my_tokenizer")
    (arguments,) = commands("bash")
    assert main(arguments) == 0, capsys.readouterr().err
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, "docs/openpi.md", "exec"), {})
    assert capsys.readouterr().out.endswith("torch.Size([1, 6, 3])\n")


def test_the_commands_for_real_checkpoints_are_parsed() -> None:
    given = commands("sh")
    assert [name for name, *_ in given] == ["convert", "convert", "convert", "train"]
    for name, *arguments in given:
        command = COMMANDS[name]
        config = command.parse(command.config_class, arguments, f"pi0-fast {name}")
        config.validate()
        assert name != "convert" or config.missing() == []


def test_the_picture_of_the_two_resizes(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a recorded frame: openpi's way takes the edges off, and only these."""
    pytest.importorskip("av")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "two.png"
    flags = ["--root", str(shared / "data" / "g1_inspire_video_v21"), "--output", str(picture)]
    monkeypatch.setattr("sys.argv", ["two_resizes.py", *flags])
    runpy.run_path(str(PAGE.parents[1] / "examples" / "two_resizes.py"), run_name="__main__")
    found = re.search(r"mean difference is ([\d.]+) of 255 levels, the largest (\d+)", capsys.readouterr().out)
    assert found is not None
    assert 0.2 < float(found[1]) < 3
    assert int(found[2]) > 20
    assert picture.stat().st_size > 10_000
