"""The demo's commands are commands, its numbers are those of its files, and nothing but a demo is ever replaced."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pi0_fast import demo
from pi0_fast.cli import COMMANDS, main
from pi0_fast.configs import DemoConfig
from pi0_fast.types import SimulatorError, UsageError

TOY = replace(
    demo.Plan(),
    env_type="toy",
    tasks=("reach-green",),
    cameras=("top", "hand"),
    image_size=32,
    episodes=3,
    every=2,
    keep_after_success=4,
    noise=("--noise_std=0.05",),
    horizon=4,
    executed=2,
    width=32,
    layers=1,
    steps=3,
    batch_size=4,
    peak_rate=1e-3,
    eval_episodes=2,
    eval_steps=6,
)


def run_in_process(arguments: Sequence[str]) -> None:
    assert main(arguments) == 0


def test_every_chapter_is_a_command_that_parses(tmp_path: Path) -> None:
    config = DemoConfig(output_dir=str(tmp_path), blind=True)
    for plan in (demo.Plan(), demo.QUICK, TOY):
        for chapter in demo.chapters(plan, tmp_path, config):
            name, *flags = chapter.arguments
            typed = demo._shown(chapter.arguments).replace("\\\n", " ")
            assert shlex.split(typed) == ["pi0-fast", *chapter.arguments]
            command = COMMANDS[name]
            command.parse(command.config_class, flags, f"pi0-fast {name}").validate()


def test_a_task_that_is_not_there_leaves_an_earlier_demo_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("av")
    demo._begin(tmp_path / "out", TOY)
    (tmp_path / "out" / "demo.md").write_text("of an earlier one")

    def never(arguments: Sequence[str]) -> None:
        raise AssertionError(arguments)

    config = DemoConfig(output_dir=str(tmp_path / "out"), overwrite=True)
    with pytest.raises(UsageError, match="did you mean reach-green"):
        demo.tell(replace(TOY, tasks=("reach-green", "reach-gren")), config, never)
    assert (tmp_path / "out" / "demo.md").read_text() == "of an earlier one"


def test_the_story_of_a_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("av")
    output = tmp_path / "out"
    demo.tell(TOY, DemoConfig(output_dir=str(output), blind=True), run_in_process)
    printed = capsys.readouterr().out
    content = json.loads((output / "demo.json").read_text())
    assert content["finished"]
    assert [policy["name"] for policy in content["policies"]] == [
        "the policy",
        "without constrained decoding",
        "trained without images",
    ]
    for policy, folder in zip(content["policies"], ("evaluation", "free_evaluation", "blind_evaluation"), strict=True):
        found = json.loads((output / folder / "evaluation.json").read_text())["policies"][0]["tasks"]["reach-green"]
        assert {"name": policy["name"], "task": "reach-green", **found} == policy
        assert policy["episodes"] == TOY.eval_episodes
    assert content["policies"][0]["malformed"] == 0
    settings = json.loads((output / "blind_policy/checkpoints/last/pretrained_model/config.json").read_text())
    assert list(settings["input_features"]) == ["observation.state"]
    page = (output / "demo.html").read_text()
    assert page.count("data:video/mp4") == 2
    assert page.count("data:image/png") == 4
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    for line in content["commands"]:
        assert line in printed
    table = printed[printed.index("In the simulator:") :]
    assert "(continued)" not in table, "the last table is in one piece"
    rows = (output / "demo.md").read_text().splitlines()
    assert rows[2].startswith("| the policy | ")
    with pytest.raises(UsageError, match="holds an earlier demo"):
        demo.tell(TOY, DemoConfig(output_dir=str(output)), run_in_process)
    assert {entry.name for entry in output.iterdir()} <= set(demo.OWN)


def test_tasks_of_one_object_are_told_apart_by_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("av")
    assert demo.pairs_of_one_object(["drawer-open-v3", "button-press-v3", "drawer-close-v3"]) == [
        ("drawer-open-v3", "drawer-close-v3"),
        ("drawer-close-v3", "drawer-open-v3"),
    ]
    plan = replace(TOY, tasks=("reach-green", "reach-blue"), free=False, steps=1, episodes=1)
    demo.tell(plan, DemoConfig(output_dir=str(tmp_path / "out")), run_in_process)
    content = json.loads((tmp_path / "out/demo.json").read_text())
    assert [policy["task"] for policy in content["policies"]] == ["reach-green", "reach-blue", "all tasks"]
    assert [(told["task"], told["told"]) for told in content["told_otherwise"]] == [
        ("reach-green", "reach-blue"),
        ("reach-blue", "reach-green"),
    ]
    for told in content["told_otherwise"]:
        assert told["both"] + told["only_first"] + told["only_second"] + told["neither"] == TOY.eval_episodes
    assert "--env.text=Move the dot to the blue square." in capsys.readouterr().out.replace("'", "")


def test_the_story_does_not_go_on_with_half_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def stopped(arguments: Sequence[str]) -> None:
        ran.append(arguments[0])
        if arguments[0] == "train":  # a signal came after the first step
            (tmp_path / "out/policy/checkpoints/000001").mkdir(parents=True)
            (tmp_path / "out/policy/checkpoints/last").symlink_to("000001")

    monkeypatch.setattr(demo, "_require_packages", lambda _: None)
    with pytest.raises(UsageError, match="was stopped before its 3 steps"):
        demo.tell(TOY, DemoConfig(output_dir=str(tmp_path / "out")), stopped)
    assert ran == ["record", "train-tokenizer", "inspect", "train"]


def begun(output: Path) -> None:
    """What an interrupted demo left behind."""
    demo._begin(output, TOY)
    (output / "dataset").mkdir()
    (output / "dataset/file").write_text("half")


def test_an_interrupted_demo_can_be_replaced(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(UsageError, match="--overwrite"):
        demo._check_output(tmp_path, overwrite=False)
    demo._check_output(tmp_path, overwrite=True)
    demo._begin(tmp_path, TOY)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["architecture.json", "demo.json"]


@pytest.mark.parametrize(
    "left",
    [
        ".dataset.pi0-fast-recording",
        ".tokenizer.pi0-fast-tmp-a-1-b",
        ".policy.pi0-fast-new",
        ".evaluation.pi0-fast-old",
    ],
)
def test_what_a_kill_left_of_a_command_is_replaced(tmp_path: Path, left: str) -> None:
    begun(tmp_path)
    (tmp_path / left).mkdir()
    (tmp_path / left / "file").write_text("half")
    demo._check_output(tmp_path, overwrite=True)
    demo._begin(tmp_path, TOY)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["architecture.json", "demo.json"]


def test_a_kill_while_an_earlier_demo_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    (tmp_path / "demo.html").write_text("of before")

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            demo._begin(tmp_path, TOY)
    demo._check_output(tmp_path, overwrite=True)


@pytest.mark.parametrize("name", ["demo.json", "dataset/meta/info.json", "notes.txt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_demo_made_is_never_replaced(tmp_path: Path, name: str, overwrite: bool) -> None:
    output = tmp_path / "mine"
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text('{"mine": true}')
    with pytest.raises(UsageError, match="choose another --output_dir"):
        demo._check_output(output, overwrite=overwrite)
    assert (output / name).read_text() == '{"mine": true}'


def test_a_file_beside_an_earlier_demo_is_not_lost(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt, which no demo made"):
        demo._check_output(tmp_path, overwrite=True)


def test_a_file_in_the_place(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("mine")
    with pytest.raises(UsageError, match="choose another"):
        demo._check_output(tmp_path / "it", overwrite=True)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(UsageError, match=r"needs torch.*: pip install 'pi0-fast\[policy,metaworld\]'"):
        demo.run(DemoConfig(output_dir=str(tmp_path / "x")), run_in_process)
    assert not (tmp_path / "x").exists()


def no_renderer(_: str) -> None:
    raise SimulatorError("MuJoCo cannot render here (egl: no): install a renderer: apt-get install -y libegl1 x")


@pytest.mark.parametrize(("root", "apt"), [(False, "/usr/bin/apt-get"), (True, None)])
def test_without_a_renderer_the_line_to_type_is_said(
    monkeypatch: pytest.MonkeyPatch, root: bool, apt: str | None
) -> None:
    monkeypatch.setattr(demo, "preflight", no_renderer)
    monkeypatch.setattr(demo.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(demo.shutil, "which", lambda _: apt)
    with pytest.raises(SimulatorError, match="apt-get install -y libegl1"):
        demo._settle_renderer("metaworld")


def test_a_renderer_is_installed_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def install(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(arguments)
        monkeypatch.setattr(demo, "preflight", lambda _: None)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(demo, "preflight", no_renderer)
    monkeypatch.setattr(demo.os, "geteuid", lambda: 0)
    monkeypatch.setattr(demo.shutil, "which", lambda _: "apt-get")
    monkeypatch.setattr(demo.subprocess, "run", install)
    demo._settle_renderer("metaworld")
    assert ran == [
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", *demo.APT_PACKAGES["egl"]],
    ]


def test_a_failed_installation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 100, "", "E: no network\n")
    monkeypatch.setattr(demo, "preflight", no_renderer)
    monkeypatch.setattr(demo.os, "geteuid", lambda: 0)
    monkeypatch.setattr(demo.shutil, "which", lambda _: "apt-get")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SimulatorError, match="apt-get update -qq failed: E: no network"):
        demo._settle_renderer("metaworld")


def test_importing_the_demo_needs_no_torch() -> None:
    code = "import sys, pi0_fast.demo; assert not {'torch', 'mujoco', 'av', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
