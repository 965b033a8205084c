"""`pi0-fast eval` in the toy world: what it writes, how it goes on after an interruption, and comparisons."""

from __future__ import annotations

import base64
import errno
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pi0_fast.evaluate as module  # noqa: E402
from pi0_fast.cli import main  # noqa: E402
from pi0_fast.closed_loop import Recorded  # noqa: E402
from pi0_fast.eval_config import EvalConfig, parse_eval  # noqa: E402
from pi0_fast.evaluate import evaluate  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.reports.evaluation import TIME, EpisodeResult, EvaluationReport  # noqa: E402
from pi0_fast.reports.intervals import wilson  # noqa: E402
from pi0_fast.sims import make  # noqa: E402
from pi0_fast.simulation_config import EnvConfig  # noqa: E402
from pi0_fast.swap import in_use  # noqa: E402
from pi0_fast.types import SimulatorError, UsageError  # noqa: E402
from toy_policies import Seeing, Still, new_policy  # noqa: E402

#: Of an episode, what depends on the machine.
TIMES = ("latencies_ms", "seconds")

pytestmark = pytest.mark.usefixtures("one_thread")


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
    two = "--env.type=toy" in argv and not any(argument.startswith("--eval.batch_size") for argument in argv)
    return evaluate(parse_eval(EvalConfig, [*(["--eval.batch_size=2"] if two else []), *argv], "pi0-fast eval"))


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

    def interrupted(self: Any, number: int, result: Any, counts: Any) -> None:
        add(self, number, result, counts)
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

    def noting(self: Any, number: int, result: Any, counts: Any) -> None:
        played.append(result.seed)
        add(self, number, result, counts)

    monkeypatch.setattr(module._Folder, "add", noting)
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


@pytest.fixture
def no_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are made up, without processes: for what is written of them."""

    def made_up(
        policy: PI0FastPolicy, env: EnvConfig, seeds: Sequence[int], *, skip: Any, on_episode: Any, **_: Any
    ) -> None:
        for task, seed in ((task, seed) for task in env.tasks for seed in seeds if (task, seed) not in skip):
            policy.counts.update({"rows": 1, "missing observation.images.hand": 1})
            on_episode(Recorded(EpisodeResult(task, seed, TIME, 4, math.nan, chunks=1, latencies_ms=(1.0,))))

    monkeypatch.setattr(module, "fitted_environment", lambda _, env: (env, (make("toy", env.tasks[0]).spec,)))
    monkeypatch.setattr(module, "run", made_up)


def short(path: str, out: Path, *more: str) -> list[str]:
    argv = [f"--policy.path={path}", "--env.type=toy", "--env.task=reach-green", "--eval.max_steps=4"]
    return [*argv, "--eval.n_episodes=2", f"--output_dir={out}", *more]


@pytest.mark.usefixtures("no_simulator")
def test_no_episode_is_counted_twice(stand_ins: dict[str, str], tmp_path: Path) -> None:
    """Neither by two processes at once, nor as two of them left it."""
    out = tmp_path / "out"
    argv = short(stand_ins["still"], out)
    evaluated(*argv)
    resume = ["--resume", f"--output_dir={out}"]
    with in_use(out, "testing"), pytest.raises(UsageError, match="another process is running this evaluation"):
        evaluated(*resume)
    lines = (out / "episodes.jsonl").read_text().splitlines(keepends=True)
    for added, message in (
        (lines[-1], "line 4 is the second result of reach-green, seed 100001"),
        (lines[-1].replace("100001", "100002"), "line 4 is no episode of this evaluation"),
        (lines[-1].replace("reach-green", "reach-blue"), "line 4 is no episode of this evaluation"),
        (lines[-1].replace('"policy": 0', '"policy": 1'), "line 4 is no episode of this evaluation"),
    ):
        assert added != lines[0]
        (out / "episodes.jsonl").write_text("".join([*lines, added]))
        with pytest.raises(UsageError, match=message):
            evaluated(*resume)
    (out / "episodes.jsonl").write_text("".join(lines))
    assert len(evaluated(*resume).episodes[0]) == 2


@pytest.mark.usefixtures("no_simulator")
def test_two_processes_that_begin_at_once(
    stand_ins: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has seen an empty directory, too."""
    out, load = tmp_path / "out", module._load

    def meanwhile(*arguments: Any) -> PI0FastPolicy:
        monkeypatch.setattr(module, "_load", load)
        evaluated(*short(stand_ins["still"], out))
        return load(*arguments)

    monkeypatch.setattr(module, "_load", meanwhile)
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        evaluated(*short(stand_ins["still"], out))
    assert len(evaluated("--resume", f"--output_dir={out}").episodes[0]) == 2


@pytest.mark.usefixtures("no_simulator")
def test_what_ran_which_episodes_is_kept(
    stand_ins: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions, device and what was missing are those of the episodes, not of the last command."""
    out = tmp_path / "out"
    argv = short(stand_ins["still"], out, "--eval.batch_size=1")
    before = module._versions()
    monkeypatch.setattr(module, "_versions", lambda: {**before, "numpy": "0.1"})
    first = evaluated(*argv)
    said = "observation.images.hand was missing in 2 of 2 chunks"
    assert [line for line in first.warnings if "missing" in line] == [said]
    monkeypatch.setattr(module, "_versions", lambda: before)
    again = evaluated("--resume", f"--output_dir={out}")  # runs nothing
    assert [line for line in again.warnings if "missing" in line] == [said]
    found = results(out)
    assert (found["versions"]["numpy"], [run["episodes"] for run in found["runs"]]) == ("0.1", [2])
    more = evaluated("--resume", f"--output_dir={out}", "--eval.n_episodes=3", "--eval.batch_size=2")
    versions, alike = more.warnings[-2:]
    assert versions == f"not all episodes were run with the same versions: numpy 0.1 and {before['numpy']}"
    assert alike.endswith("2 on cpu with 1 threads, batch_size 1; 1 on cpu with 1 threads, batch_size 2")
    assert "was missing in 3 of 3 chunks" in more.warnings[0]


@pytest.mark.usefixtures("no_simulator")
@pytest.mark.parametrize("name", ["eval_config.json", "episodes.jsonl", "evaluation.json", "evaluation.html"])
def test_a_write_that_fails_is_named_and_can_be_gone_on_with(
    stand_ins: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out, write = tmp_path / "out", Path.write_text

    def full(self: Path, content: str, **given: Any) -> int:
        if self.name.startswith(f".{name}-"):
            write(self, content[:3], **given)
            raise OSError(errno.ENOSPC, "No space left on device")  # writes do not name their file
        return write(self, content, **given)

    argv = short(stand_ins["still"], out)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        evaluated(*argv)
    monkeypatch.setattr(Path, "write_text", write)
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    if name == "eval_config.json":
        (out / f".{name}-1").write_text("what a kill leaves")
        evaluated(*argv)
    else:
        evaluated("--resume", f"--output_dir={out}")
    assert len(results(out)["policies"][0]["episodes"]) == 2
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("no_simulator")
def test_videos_that_cannot_be_written_are_found_before_the_first_episode(
    stand_ins: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="--save_videos needs PyAV"):
        evaluated(*short(stand_ins["still"], tmp_path / "out", "--save_videos"))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_simulator")
def test_a_reward_that_is_no_number_loses_no_results(stand_ins: dict[str, str], tmp_path: Path) -> None:
    evaluated(*short(stand_ins["still"], tmp_path / "out"))
    assert [episode["reward"] for episode in results(tmp_path / "out")["policies"][0]["episodes"]] == [None, None]
    assert math.isnan(evaluated("--resume", f"--output_dir={tmp_path / 'out'}").episodes[0][0].reward)


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


@pytest.mark.usefixtures("no_simulator")
def test_what_cannot_be_compared(stand_ins: dict[str, str], tmp_path: Path) -> None:
    path = stand_ins["still"]
    for name, more in (
        ("a", []),
        ("b", ["--env.text=Do nothing.", "--policy.n_action_steps=2"]),
        ("few", ["--eval.n_episodes=1"]),
        ("long", ["--eval.max_steps=5"]),
    ):
        evaluated(*[flag for flag in short(path, tmp_path / name) if flag.partition("=")[0] not in str(more)], *more)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    out = f"--output_dir={tmp_path / 'x'}"
    for flag in (
        *("--env.type=toy", "--eval.n_episodes=3", "--eval.batch_size=2", "--seed=5", "--policy.temperature=0.5"),
        *("--policy.device=cpu", "--rename_map={}", "--save_videos", "--eval.max_steps=3"),
    ):
        given = [flag, "--env.task=reach-green"] if "env.type" in flag else [flag]
        with pytest.raises(UsageError, match=rf"nothing is run: {flag.partition('=')[0]} has no effect"):
            evaluated("--compare", *folders, *given, out)
    with pytest.raises(UsageError, match="no two finished evaluations"):
        evaluated("--compare", path, path)
    with pytest.raises(UsageError, match="1 episodes are in only one"):
        evaluated("--compare", folders[0], str(tmp_path / "few"), out)
    with pytest.raises(UsageError, match="max_steps is 4 in"):
        evaluated("--compare", folders[0], str(tmp_path / "long"), out)
    file = tmp_path / "b/evaluation.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "warnings": ["of the other one"]}))
    report = evaluated("--compare", *folders, f"--output_dir={tmp_path / 'text'}")
    assert report.about[-1] == ("A and B differ in", "n_action_steps, text")
    assert report.warnings[-1] == "B: of the other one"
    for damage in ({"policies": []}, {"checkpoints": [{}]}, {"warnings": None}, {"policies": [{"episodes": [{}]}]}):
        file.write_text(json.dumps({**content, **damage}))
        with pytest.raises(UsageError, match=r"b/evaluation\.json"):
            evaluated("--compare", *folders, out)


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
    sizes = tmp_path / "sizes.json"  # what is named in place of the checkpoint's own is a part of it
    prints = [module._fingerprint(Path(path)), module._fingerprint(Path(path), tmp_path / "none")]
    for content in ("first", "second"):
        sizes.write_text(content)
        prints.append(module._fingerprint(Path(path), sizes))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
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


def test_states_outside_the_range_of_training_are_told_of_in_whole_numbers() -> None:
    part = {"counts": {"rows": 1872, "state_below": 1, "state_above": 2}}
    assert module._warnings([part], [[]]) == [
        "values of the states lay outside the range that the policy was trained in 3 times in 1,872 chunks"
    ]
