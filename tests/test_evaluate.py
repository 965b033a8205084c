"""`pi0-fast eval` in the toy world: what it writes, how it goes on after an interruption, and comparisons."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pi0_fast.evaluate as module  # noqa: E402
from pi0_fast.cli import main  # noqa: E402
from pi0_fast.eval_config import EvalConfig, parse_eval  # noqa: E402
from pi0_fast.evaluate import evaluate  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.reports.evaluation import EvaluationReport  # noqa: E402
from pi0_fast.reports.intervals import wilson  # noqa: E402
from pi0_fast.types import SimulatorError, UsageError  # noqa: E402
from toy_policies import Seeing, Still, new_policy  # noqa: E402

#: Of an episode, what depends on the machine.
TIMES = ("latencies_ms", "seconds")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "tiny"
    new_policy().save_pretrained(path)
    return path


@pytest.fixture
def stand_ins(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Checkpoints `seeing` and `still`, in whose place these stand-ins act."""
    kinds = {"seeing": Seeing, "still": Still}
    paths = {name: str(tmp_path / name) for name in kinds}
    for path in paths.values():
        shutil.copytree(checkpoint, path)

    def load(config: EvalConfig, path: str) -> PI0FastPolicy:
        return new_policy(kinds[Path(path).name], **config.policy.overrides())

    monkeypatch.setattr(module, "_load", load)
    return paths


def evaluated(*argv: str) -> EvaluationReport:
    config = parse_eval(EvalConfig, ["--eval.batch_size=2", *argv], "pi0-fast eval")
    return evaluate(config)


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return content


def without_times(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in episode.items() if name not in TIMES} for episode in episodes]


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = [f"--policy.path={checkpoint}", "--env.type=toy", "--env.task=reach-green,reach-blue", "--seed=7"]
    argv += ["--eval.n_episodes=2", "--eval.max_steps=8", "--policy.n_action_steps=2", f"--output_dir={out}"]
    argv += ["--save_videos", "--max_videos=1", "--policy.max_action_tokens=40"]
    assert main(["eval", *argv]) == 0
    printed = capsys.readouterr().out
    for text in (
        "2 of 4 predicted steps are executed, constrained decoding",
        "toy, 10 steps per second, 8 steps at most",
        "observation.images.top 32 x 32",
        "2 of each task, seeds 7 to 8",
        "max_action_tokens: concerns training",
        "all tasks",
        f"results: {out}/evaluation.html",
    ):
        assert text in printed
    found = results(out)
    policy = found["policies"][0]
    assert [(e["task"], e["seed"], e["steps"], e["chunks"]) for e in policy["episodes"]] == [
        (task, seed, 8, 4) for task in ("reach-green", "reach-blue") for seed in (7, 8)
    ]
    everything = policy["tasks"]["all tasks"]
    assert (everything["episodes"], everything["success"], everything["steps"]) == (4, 0.0, 8.0)
    assert everything["interval"] == list(wilson(0, 4))
    assert 0 < everything["latency_ms"]["p50"] <= everything["latency_ms"]["p99"]
    assert found["seeds"] == {"first": 7, "count": 2}
    assert found["versions"]["torch"] == torch.__version__
    assert found["settings"]["eval"]["max_steps"] == 8
    assert found["checkpoints"][0]["config"]["n_action_steps"] == 2
    assert found["checkpoints"][0]["environment"]["cameras"] == ["top"]
    check_page(out, videos=2)


def check_page(out: Path, videos: int) -> None:
    av = pytest.importorskip("av")
    page = (out / "evaluation.html").read_text()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    films = re.findall(r'<video [^>]*src="data:video/mp4;base64,([^"]*)"', page)
    files = sorted((out / "videos").iterdir())
    assert [file.name for file in files] == ["00-reach-green-7.mp4", "01-reach-blue-7.mp4"][:videos]
    assert [base64.b64decode(film) for film in films] == [file.read_bytes() for file in files]
    with av.open(str(files[0])) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 240, 240)
        assert sum(1 for _ in container.decode(stream)) == 9


def test_an_evaluation_that_was_interrupted_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"--policy.path={checkpoint}", "--env.type=toy", "--env.task=reach-green,reach-blue"]
    argv += ["--eval.n_episodes=3", "--eval.max_steps=8"]
    evaluated(*argv, f"--output_dir={tmp_path / 'whole'}")
    add, out = module._Folder.add, tmp_path / "cut"

    def interrupted(self: Any, number: int, result: Any) -> None:
        add(self, number, result)
        if len(self.episodes[0]) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(module._Folder, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(*argv, f"--output_dir={out}")
    assert f"stopped after 4 of 6 episodes; go on with: pi0-fast eval --resume=true --output_dir={out}" in (
        capsys.readouterr().out
    )
    monkeypatch.setattr(module._Folder, "add", add)
    assert not (out / "evaluation.json").exists()
    with (out / "episodes.jsonl").open("a") as file:
        file.write('{"kind": "episode", "poli')  # as a kill leaves it
    played: list[int] = []
    monkeypatch.setattr(
        module._Folder, "add", lambda self, n, result: (played.append(result.seed), add(self, n, result))
    )
    evaluated("--resume", f"--output_dir={out}")
    assert len(played) == 2
    whole, resumed = (results(tmp_path / name)["policies"][0]["episodes"] for name in ("whole", "cut"))
    assert without_times(resumed) == without_times(whole)
    evaluated("--resume", f"--output_dir={out}", "--eval.n_episodes=4")
    assert len(played) == 4
    assert without_times(results(out)["policies"][0]["episodes"])[:3] == without_times(whole)[:3]


def test_episodes_in_which_the_simulator_failed(stand_ins: dict[str, str], tmp_path: Path) -> None:
    argv = [f"--policy.path={stand_ins['seeing']}", "--env.type=toy", "--env.task=reach-green", "--seed=3"]
    argv += ["--eval.n_episodes=3", '--env.options={"fault": "raise", "fault_step": 1, "fault_seed": 4}']
    report = evaluated(*argv, f"--output_dir={tmp_path / 'out'}")
    found = results(tmp_path / "out")["policies"][0]["tasks"]["reach-green"]
    assert (found["episodes"], found["successes"], found["failed"]) == (3, 2, 1)
    assert found["interval"] == list(wilson(2, 3))
    assert "in 1 of 3 episodes the simulator failed" in report.warnings[0]
    assert "fault asked for at step 1 of seed 4" in (tmp_path / "out" / "evaluation.html").read_text()
    (_, rows, headers), *_ = report.tables()
    assert headers[-1] == "simulator failed"
    assert rows[0][-1] == 1
    again = evaluated("--resume", f"--output_dir={tmp_path / 'out'}")  # only that episode is run again
    same = [new == old for new, old in zip(again.episodes[0], report.episodes[0], strict=True)]
    assert same == [True, False, True]
    assert [episode.end for episode in again.episodes[0]] == ["success", "failed", "success"]


def test_a_simulator_that_always_fails_is_an_error(stand_ins: dict[str, str], tmp_path: Path) -> None:
    argv = [f"--policy.path={stand_ins['still']}", "--env.type=toy", "--env.task=reach-green"]
    argv += ["--eval.n_episodes=2", '--env.options={"fault": "raise"}', f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(SimulatorError, match="failed in every episode: toy: fault asked for"):
        evaluated(*argv)


def test_two_policies_on_the_same_seeds(stand_ins: dict[str, str], tmp_path: Path) -> None:
    env = ["--env.type=toy", "--env.task=reach-green,reach-blue", "--eval.n_episodes=3", "--env.max_steps=30"]
    report = evaluated(
        "--compare",
        stand_ins["still"],
        stand_ins["seeing"],
        *env,
        f"--output_dir={tmp_path / 'both'}",
        "--save_videos",
        "--max_videos=1",
    )
    difference = results(tmp_path / "both")["difference"]["all tasks"]
    assert (difference["difference"], difference["only_second"], difference["both"]) == (1.0, 6, 0)
    assert 0.3 < difference["interval"][0] < difference["interval"][1] == pytest.approx(1.0)
    _, rows, _ = list(report.tables())[2]
    assert rows[-1][:2] == ["all tasks", "+100.0%"]
    names = {path.name for path in (tmp_path / "both" / "videos").iterdir()}
    assert names == {f"{letter}-{task}-100000.mp4" for letter in "AB" for task in ("00-reach-green", "01-reach-blue")}
    for name in ("still", "seeing"):
        evaluated(f"--policy.path={stand_ins[name]}", *env, f"--output_dir={tmp_path / name / 'eval'}")
    folders = [str(tmp_path / name / "eval") for name in ("still", "seeing")]
    evaluated("--compare", *folders, f"--output_dir={tmp_path / 'afterwards'}")
    assert results(tmp_path / "afterwards")["difference"] == results(tmp_path / "both")["difference"]
    check_refusals_of_comparisons(stand_ins, folders, env, tmp_path)


def check_refusals_of_comparisons(
    stand_ins: dict[str, str], folders: list[str], env: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="flags of the policy, the simulator and videos do nothing"):
        evaluated("--compare", *folders, *env)
    with pytest.raises(UsageError, match="no two finished evaluations"):
        evaluated("--compare", stand_ins["still"], stand_ins["seeing"])
    other = tmp_path / "other"
    argv = [f"--policy.path={stand_ins['still']}", *env[:2], "--eval.n_episodes=1", "--env.max_steps=30"]
    evaluated(*argv, f"--output_dir={other}")
    with pytest.raises(UsageError, match="4 episodes are in only one"):
        evaluated("--compare", folders[0], str(other), f"--output_dir={tmp_path / 'x'}")


def test_nothing_is_overwritten_and_nothing_else_gone_on_with(stand_ins: dict[str, str], tmp_path: Path) -> None:
    path = stand_ins["still"]
    argv = [f"--policy.path={path}", "--env.type=toy", "--env.task=reach-green", "--eval.n_episodes=1"]
    argv += ["--eval.max_steps=4", f"--output_dir={tmp_path / 'out'}"]
    evaluated(*argv)
    with pytest.raises(FileExistsError, match="--resume=true"):
        evaluated(*argv)
    with pytest.raises(UsageError, match=r"--policy\.temperature=nothing, not 1"):
        evaluated("--resume", f"--output_dir={tmp_path / 'out'}", "--policy.temperature=1")
    (Path(path) / "pi0_fast.json").write_text((Path(path) / "pi0_fast.json").read_text() + " ")
    with pytest.raises(UsageError, match="still has changed since"):
        evaluated("--resume", f"--output_dir={tmp_path / 'out'}")
    with (tmp_path / "out" / "episodes.jsonl").open("a") as file:
        file.write('{"kind": "episode", "policy": 0}\n')
    with pytest.raises(UsageError, match=r"episodes.jsonl, line 3 is damaged"):
        evaluated("--resume", f"--output_dir={tmp_path / 'out'}")


def test_what_was_said_of_the_policy_reaches_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(path: str, **given: Any) -> Any:
        seen.update(given, path=path)
        raise KeyboardInterrupt

    monkeypatch.setattr(PI0FastPolicy, "from_pretrained", load)
    flags = {"robot": "b", "device": "cpu", "dtype": "float32", "pretrained_revision": "v1", "temperature": 0.5}
    argv = [f"--policy.{name}={value}" for name, value in flags.items()]
    with pytest.raises(KeyboardInterrupt):
        evaluated(f"--policy.path={checkpoint}", *argv, "--env.type=toy", "--env.task=reach-green", "--rename_map={}")
    assert seen == {
        "path": str(checkpoint),
        "revision": "v1",
        "robot": "b",
        "device": "cpu",
        "dtype": "float32",
        "architecture": None,
        "overrides": {"temperature": 0.5},
        "rename_map": {},
    }


def test_a_policy_of_another_robot_writes_nothing(tmp_path: Path) -> None:
    from tiny_policies import new_policy as of_another_robot

    of_another_robot().save_pretrained(tmp_path / "other")
    argv = [f"--policy.path={tmp_path / 'other'}", "--env.type=toy", "--env.task=reach-green"]
    argv += [f"--output_dir={tmp_path / 'out'}"]
    assert main(["eval", *argv]) == 1
    assert not (tmp_path / "out").exists()
