"""The code of docs/simulators.md runs as it is printed, and its tables say what is there."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from pi0_fast import sims
from pi0_fast.parsing import parse
from pi0_fast.sims import gym, rendering

PAGE = (Path(__file__).resolve().parents[2] / "docs/simulators.md").read_text()


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/simulators.md", "exec"), {})
    assert capsys.readouterr().out == ("Move the dot to the green square. (64, 64, 3) True\n0 8 None\n1 8 None\n")


def test_the_tables_are_complete() -> None:
    assert re.findall(r"^\| `(\w+)` \| [^|]*\|[^|]*\| (\d+|its own)", PAGE, re.MULTILINE) == [
        ("metaworld", "80"),
        ("libero", "20"),
        ("aloha", "50"),
        ("pusht", "10"),
        ("gym", "its own"),
        ("toy", "10"),
    ]
    for name in ("metaworld", "aloha", "pusht", "toy"):
        adapter = importlib.import_module(f"pi0_fast.sims.{name}")
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
        assert f"| {adapter.FPS:g}, {adapter.MAX_STEPS} |" in row
        (convention,) = re.findall(rf"^\*\*`{name}`\*\*\. (.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
        for camera, size in adapter.CAMERAS.items():
            assert f"`{camera}`" in convention, camera
            assert f"{size[0]} x {size[1]} pixels" in convention
        assert name == "metaworld" or all(f"`{task}`" in row for task in sims.task_names(name))
    for option in gym.OPTIONS:
        assert f"`{option}`" in PAGE
    assert rendering.APT_LINE in PAGE


def test_the_command_is_parsed() -> None:
    eval_config = pytest.importorskip("pi0_fast.eval_config")
    (command,) = re.findall(r"^```sh\n(pi0-fast eval.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    config = parse(eval_config.EvalConfig, shlex.split(command.replace("\\\n", " "))[2:], "pi0-fast eval")
    assert config.env.option_map["state"] == "agent_pos"
