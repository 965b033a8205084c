"""Recording: datasets, any number of processes, failures, interruptions; with the toy world."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi0_fast import episode_workers, recording
from pi0_fast.cli import main
from pi0_fast.data import LeRobotWriter, open_dataset
from pi0_fast.data.cameras import Cameras
from pi0_fast.expert_episodes import EpisodeSettings, held, run_episode
from pi0_fast.record_config import RecordConfig
from pi0_fast.recording import record
from pi0_fast.sims import make
from pi0_fast.simulation_config import EnvConfig
from pi0_fast.types import DatasetError, SimulatorError, UsageError

pytest.importorskip("av")
pytest.importorskip("PIL")

NAME = "local/toy"
BOTH = ["reach-green", "reach-blue"]


def config(
    root: Path, *, task: list[str] | None = None, options: dict[str, Any] | None = None, **more: Any
) -> RecordConfig:
    env = EnvConfig(
        type="toy",
        task=task or ["reach-green"],
        options=None if options is None else json.dumps(options),
        max_steps=more.pop("max_steps", None),
    )
    # PNG where nothing else is said: what encoders of video give for the same images is theirs.
    more = {"n_episodes": 3, "num_workers": 0, "noise_std": 0.2, "keep_after_success": 2, "video": False, **more}
    return RecordConfig(repo_id=NAME, env=env, root=str(root), **more)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def again(task: str, seed: int, every: int) -> tuple[dict[str, np.ndarray], dict[str, list[np.ndarray]]]:
    """The episode that `config` records, and the pictures of each row, from the simulator itself."""
    simulator = make("toy", task)
    pictures: dict[str, list[np.ndarray]] = {camera: [] for camera in simulator.spec.cameras}
    settings = EpisodeSettings(every, 2, (0.2,))
    _, columns = run_episode(simulator, settings, seed, lambda camera, image: pictures[camera].append(image))
    return columns, {key: list(held(np.stack(images), columns["image_age"])) for key, images in pictures.items()}


@pytest.mark.parametrize(("video", "every"), [(False, 1), (False, 3), (True, 3)])
def test_what_is_recorded_is_read(tmp_path: Path, video: bool, every: int) -> None:
    result = record(config(tmp_path / "it", task=BOTH, video=video, every=every, seed=5))
    assert [[outcome.seed for outcome in task.kept] for task in result.tasks] == [[5, 6, 7], [5, 6, 7]]
    reader = open_dataset(NAME, root=tmp_path / "it")
    assert (reader.fps, reader.robot_type) == (10, "toy")
    keys = ["observation.state", "action", "executed_action", *(["image_age"] if every > 1 else [])]
    assert ("image_age" in reader.features) == (every > 1)
    assert reader.feature("executed_action").names == ("dx", "dy")
    cameras = Cameras(reader, reader.camera_keys)
    assert cameras.keys == ("observation.images.top", "observation.images.hand")
    texts = {task.spec.task: task.spec.text for task in result.tasks}
    for episode, (task, seed) in zip(
        reader.iter_episodes(keys), [(task, seed) for task in BOTH for seed in (5, 6, 7)], strict=True
    ):
        columns, pictures = again(task, seed, every)
        assert reader.episodes[episode.index].tasks == (texts[task],)
        for key in keys:
            np.testing.assert_array_equal(episode.columns[key], columns[key])
        times = np.arange(episode.length) / 10
        for key in cameras.keys:
            for shown, expected in zip(
                cameras.frames(key, episode.index, range(episode.length), times), pictures[key], strict=True
            ):
                if video:  # coarse squares of strong colours: 4:2:0 blurs their edges
                    assert np.abs(shown.astype(int) - expected).mean() < 8
                else:
                    np.testing.assert_array_equal(shown, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_what_the_file_says_of_the_recording(tmp_path: Path) -> None:
    record(config(tmp_path / "it", task=BOTH, every=2, options={"fault": "raise", "fault_seed": 1, "fault_step": 2}))
    found = json.loads((tmp_path / "it/meta/recording.json").read_text())
    assert found["env"]["env_type"] == "toy"
    assert found["env"]["task"] == BOTH
    assert found["executed_key"] == "executed_action"
    assert found["expert"]["every"] == 2
    assert found["versions"]["numpy"] == np.__version__
    assert [(entry["task"], entry["seed"]) for entry in found["episodes"]] == [
        (task, seed) for task in BOTH for seed in (0, 2, 3)
    ]
    lengths = [record.length for record in open_dataset(NAME, root=tmp_path / "it").episodes]
    assert [entry["steps"] for entry in found["episodes"]] == lengths
    assert [entry["success_step"] + 2 for entry in found["episodes"]] == lengths
    assert [(entry["task"], entry["seed"]) for entry in found["dropped"]] == [(task, 1) for task in BOTH]
    assert found["dropped"][0]["reason"] == "SimulatorError: toy: fault asked for at step 2 of seed 1"


def test_the_same_dataset_by_any_number_of_processes(tmp_path: Path) -> None:
    fault = {"fault": "raise", "fault_seed": 1}
    for processes in (0, 1, 3):
        result = record(config(tmp_path / f"{processes}", task=BOTH, num_workers=processes, options=fault, every=3))
        assert [len(task.dropped) for task in result.tasks] == [1, 1]
    expected = files(tmp_path / "0")
    assert len(expected) == 6
    assert files(tmp_path / "1") == expected
    assert files(tmp_path / "3") == expected


def test_failed_episodes_are_dropped_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At most 9 steps: only those whose square is near."""
    arguments = ["--env.type=toy", "--env.task=reach-green", "--env.max_steps=9", "--n_episodes=3", "--num_workers=0"]
    assert main(["record", f"--repo_id={NAME}", f"--root={tmp_path / 'it'}", *arguments]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "it/meta/recording.json").read_text())
    assert len(found["episodes"]) == 3
    assert len(found["dropped"]) > 0
    assert all(entry["success_step"] <= 9 for entry in found["episodes"])
    assert {entry["reason"] for entry in found["dropped"]} == {"no success in 9 steps"}
    assert "Failed episodes, which are not in the dataset" in printed
    assert re.search(rf"reach-green +{len(found['dropped'])} +no success in 9 steps", printed)
    for entry in found["dropped"]:  # the simulator itself agrees
        simulator = make("toy", "reach-green", max_steps=9)
        assert run_episode(simulator, EpisodeSettings(), entry["seed"], lambda *_: None)[0].reason


def test_too_many_failures(tmp_path: Path) -> None:
    with pytest.raises(
        SimulatorError, match=r"3 of 3 episodes of reach-green failed, the last one \(seed 2\): no succ"
    ):
        record(config(tmp_path / "it", max_steps=1, max_failures=2))
    assert not (tmp_path / "it").exists()


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    add = LeRobotWriter.add_episode
    calls = iter(range(count))

    def limited(self: LeRobotWriter, *arguments: Any, **more: Any) -> int:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return add(self, *arguments, **more)

    monkeypatch.setattr(LeRobotWriter, "add_episode", limited)


def test_an_interrupted_recording_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = config(tmp_path / "it", task=BOTH, every=3)
    record(config(tmp_path / "whole", task=BOTH, every=3))
    with monkeypatch.context() as patched:
        interrupt_after(4, patched)
        with pytest.raises(KeyboardInterrupt):
            record(wanted)
    said = capsys.readouterr().err
    assert "interrupted: 5 episodes are kept in" in said
    assert "--resume=true goes on" in said
    assert not (tmp_path / "it").exists()
    with pytest.raises(UsageError, match=r"an interrupted recording of 5 episodes is in .*--resume=true goes on"):
        record(wanted)
    other = dataclasses.replace(wanted, noise_std=0.1, resume=True)
    with pytest.raises(UsageError, match=r"was begun with expert = .*: --resume=true needs the same settings"):
        record(other)
    performed = []
    monkeypatch.setattr(
        recording, "perform", lambda job, real=recording.perform: performed.append(job.seed) or real(job)
    )
    result = record(dataclasses.replace(wanted, resume=True))
    assert (performed, result.taken_over) == ([2], 5)
    assert files(tmp_path / "it") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "whole"]


def test_more_episodes_than_the_interrupted_recording_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupt_after(2, patched)
        with pytest.raises(KeyboardInterrupt):
            record(config(tmp_path / "it"))
    record(config(tmp_path / "it", n_episodes=5, resume=True))
    record(config(tmp_path / "whole", n_episodes=5))
    assert files(tmp_path / "it") == files(tmp_path / "whole")


def test_beginning_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patched:
        interrupt_after(2, patched)
        with pytest.raises(KeyboardInterrupt):
            record(config(tmp_path / "it"))
    record(config(tmp_path / "it", noise_std=0.0, overwrite=True))
    before = files(tmp_path / "it")
    with pytest.raises(UsageError, match="is there already; choose another --root, or pass --overwrite"):
        record(config(tmp_path / "it"))
    with pytest.raises(UsageError, match="is finished, so there is nothing to resume; pass --overwrite alone"):
        record(config(tmp_path / "it", resume=True))
    assert files(tmp_path / "it") == before
    # Interrupted while it was to be replaced: the old dataset stays, and the new one goes on.
    with monkeypatch.context() as patched:
        interrupt_after(2, patched)
        with pytest.raises(KeyboardInterrupt):
            record(config(tmp_path / "it", overwrite=True))
    assert files(tmp_path / "it") == before
    with pytest.raises(UsageError, match="pass --overwrite as well"):
        record(config(tmp_path / "it", resume=True))
    capsys.readouterr()
    assert record(config(tmp_path / "it", resume=True, overwrite=True)).taken_over == 3
    assert "3 finished episodes are there" in capsys.readouterr().out
    assert files(tmp_path / "it") != before
    record(config(tmp_path / "new", resume=True))
    assert "nothing to resume: beginning anew" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "new"]


def test_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it/precious.txt").write_text("x")
    with pytest.raises(UsageError, match="is there already"):
        record(config(tmp_path / "it"))
    with pytest.raises(ValueError, match="is no LeRobot dataset, so it is not overwritten"):
        record(config(tmp_path / "it", overwrite=True))
    assert files(tmp_path / "it") == {"precious.txt": b"x"}
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_two_at_once(tmp_path: Path) -> None:
    store = recording._Store(tmp_path / "it")
    with store.alone(), pytest.raises(UsageError, match="another process is recording to the same dataset"):
        record(config(tmp_path / "it"))


def test_a_simulator_that_takes_its_process_with_it_fails_its_episode_only(tmp_path: Path) -> None:
    """And what others were doing in other processes is not lost: the rest is as without that seed."""
    fault = {"fault": "crash", "fault_step": 2, "fault_seed": 1}
    made = record(config(tmp_path / "it", num_workers=2, n_episodes=3, options=fault))
    (task,) = made.tasks
    assert [outcome.seed for outcome in task.kept] == [0, 2, 3]
    (lost,) = task.dropped
    assert (lost.seed, str(lost.reason)[:49]) == (1, "the process that ran seed 1 of reach-green died t")
    assert "died twice" in str(made.tables()[1])
    listed = json.loads((tmp_path / "it/meta/recording.json").read_text())
    assert [entry["seed"] for entry in listed["dropped"]] == [1]


def test_a_simulator_that_hangs_fails_its_episode_only(tmp_path: Path) -> None:
    fault = {"fault": "hang", "fault_step": 2, "fault_seed": 1}
    (task,) = record(config(tmp_path / "it", num_workers=1, n_episodes=2, options=fault, timeout_s=3.0)).tasks
    assert [outcome.seed for outcome in task.kept] == [0, 2]
    (lost,) = task.dropped
    assert lost.reason == "the simulator hung in seed 1 of reach-green: no answer within --timeout_s=3"


def test_an_episode_does_not_depend_on_what_broke_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator that has raised is built anew, as in another process."""
    made: list[Any] = []
    usual = episode_workers.make

    def noting(**arguments: Any) -> Any:
        made.append(usual(**arguments))
        return made[-1]

    monkeypatch.setattr(episode_workers, "make", noting)
    fault = {"fault": "raise", "fault_step": 2, "fault_seed": 1}
    record(config(tmp_path / "it", n_episodes=3, options=fault))
    assert [simulator._seed for simulator in made] == [1, 3]  # the last seed of each


@pytest.mark.parametrize("content", ["", "{", "[]", '{"strange": 1}', "null"])
@pytest.mark.parametrize("name", ["settings.json", "task-000/seed-0000000000/outcome.json"])
def test_what_a_crash_of_the_machine_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(config(tmp_path / "it"))
    (recording._Store(tmp_path / "it").path / name).write_text(content)
    with pytest.raises((DatasetError, UsageError), match=r"damaged|was begun with|begin anew"):
        record(config(tmp_path / "it", resume=True))


@pytest.mark.parametrize("kept", [0, 10, -100])
@pytest.mark.parametrize("name", ["columns.npz", "camera-0.raw", "camera-1.mp4"])
def test_an_episode_that_a_crash_of_the_machine_cut_short_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: int
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    video = name.endswith("mp4")
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record(config(tmp_path / "it", video=video, n_episodes=1))
    file = recording._Store(tmp_path / "it").path / "task-000/seed-0000000000" / name
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DatasetError):
        record(config(tmp_path / "it", video=video, n_episodes=1, resume=True))
    shutil.rmtree(file.parent)  # what the message says
    assert len(record(config(tmp_path / "it", video=video, n_episodes=1, resume=True)).tasks[0].kept) == 1


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recording, "_put", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*pi0-fast-recording/task-000/seed-0000000000"):
        record(config(tmp_path / "it"))


def test_a_kill_leaves_no_process_and_loses_nothing(tmp_path: Path) -> None:
    fault = json.dumps({"fault": "hang", "fault_seed": 2})
    arguments = ["--env.type=toy", "--env.task=reach-green", f"--env.options={fault}", "--n_episodes=4"]
    command = [sys.executable, "-m", "pi0_fast.cli", "record", f"--repo_id={NAME}", f"--root={tmp_path / 'it'}"]
    process = subprocess.Popen([*command, *arguments, "--num_workers=1"], stderr=subprocess.DEVNULL)
    store = recording._Store(tmp_path / "it").path
    try:
        _until(lambda: (store / "task-000/seed-0000000002.part").is_dir())
        (worker,) = [pid for pid in _children(process.pid) if "resource_tracker" not in _command(pid)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _until(lambda: not Path(f"/proc/{worker}").exists() or _state(worker) == "Z")
    assert not (tmp_path / "it").exists()
    assert len(list(store.glob("task-*/seed-*/outcome.json"))) == 2
    with pytest.raises(UsageError, match="was begun with env = "):
        record(config(tmp_path / "it", resume=True))


def _until(true: Any) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    for _ in range(600):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within 30 s")


def _children(pid: int) -> list[int]:
    return [int(other) for other in os.listdir("/proc") if other.isdigit() and _parent(int(other)) == pid]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_one_dataset_holds_tasks_of_one_robot(tmp_path: Path) -> None:
    first = make("toy", "reach-green").spec
    second = dataclasses.replace(make("toy", "reach-blue").spec, state_names=("x", "y", "z"))
    with pytest.raises(UsageError, match="the tasks reach-green and reach-blue differ in state_names"):
        recording._features([first, second], config(tmp_path))


def test_without_cameras(tmp_path: Path) -> None:
    wanted = config(tmp_path / "it")
    wanted.env.cameras = []
    record(wanted)
    assert open_dataset(NAME, root=tmp_path / "it").camera_keys == ()
    with pytest.raises(UsageError, match="--every has no effect: no camera is recorded"):
        record(dataclasses.replace(wanted, every=2, overwrite=True))


def test_no_expert_and_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SimulatorError, match="toy has no task 'reach-red'"):
        record(config(tmp_path / "it", task=["reach-red"]))
    from pi0_fast.sims.toy import ToySimulator

    monkeypatch.setattr(ToySimulator, "expert", lambda _: None)
    with pytest.raises(SimulatorError, match="toy reach-green has no scripted expert"):
        record(config(tmp_path / "it"))
    assert list(tmp_path.iterdir()) == []


WRONG = [
    ({"noise_std": -1.0}, "--noise_std must not be negative"),
    ({"noise_std": []}, "--noise_std is an empty list"),
    ({"noise_std": [0.1, 0.1, 0.1]}, "--noise_std has 3 numbers, the action 2"),
    ({"burst_share": 1.5}, "--burst_share must be from 0 to 1"),
    ({"burst_share": 0.1}, "--burst_share needs --burst_std"),
    ({"burst_std": 0.1}, "--burst_std has no effect without --burst_share"),
    ({"burst_steps": [1, 2]}, "--burst_steps has no effect"),
    ({"burst_share": 0.1, "burst_std": 0.1, "burst_steps": [3]}, "--burst_steps must be the fewest and the most"),
    (
        {"burst_share": 0.1, "burst_std": 0.1, "burst_steps": [3, 2]},
        "--burst_steps must be a whole number of at least 3",
    ),
    ({"n_episodes": 0}, "--n_episodes must be a whole number of at least 1"),
    ({"every": 0}, "--every must be a whole number of at least 1"),
    ({"seed": 2**31}, "--seed must be a whole number of at least 0 and at most"),
    ({"num_workers": -1}, "--num_workers must be"),
    ({"num_workers": 1, "timeout_s": 0.0}, "--timeout_s must be above 0"),
    ({"timeout_s": 60.0}, "--timeout_s has no effect with --num_workers=0"),
    ({"video_codec": "vp9"}, "--video_codec must be one of h264, av1"),
    ({"video": False, "video_codec": "av1"}, "--video_codec has no effect with --video=false"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        record(config(tmp_path / "it", **settings))
    assert list(tmp_path.iterdir()) == []


def test_a_recording_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", f"--repo_id={NAME}", f"--root={tmp_path / 'it'}"]) == 2
    assert "--env.type and --env.task must be given" in capsys.readouterr().err
    assert main(["record", "--repo_id=a/b/c", "--env.type=toy", "--env.task=reach-green"]) == 2
    assert "--repo_id must be a name such as owner/dataset" in capsys.readouterr().err


def test_the_place_of_a_dataset_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    made = record(dataclasses.replace(config(tmp_path), root=None, n_episodes=1))
    assert made.root == tmp_path / "local/toy"
    assert len(open_dataset(NAME).episodes) == 1


LEROBOT = """
import sys
import shim_torchvision
shim_torchvision.install()
import numpy as np
import torch
from torchvision import transforms
if not callable(transforms.ToTensor()):  # a stand-in that does not convert
    transforms.ToTensor.__call__ = lambda self, image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
from lerobot.utils.feature_utils import dataset_to_policy_features
from lerobot.datasets.lerobot_dataset import LeRobotDataset
dataset = LeRobotDataset("local/toy", root=sys.argv[1], video_backend="pyav")
items = [dataset[i] for i in range(len(dataset))]
np.savez(
    sys.argv[2],
    **{key: np.stack([item[key].numpy() for item in items]) for key in items[0] if key != "task"},
    tasks=np.array([item["task"] for item in items]),
    policy=np.array(sorted(dataset_to_policy_features(dataset.features))),
)
"""


@pytest.mark.interop
@pytest.mark.parametrize("video", [False, True])
def test_lerobot_sees_the_same(tmp_path: Path, video: bool) -> None:
    python = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not python:
        pytest.skip("PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1")
    root = tmp_path / "it"
    record(config(root, task=BOTH, video=video, every=3))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [python, "-c", LEROBOT, str(root), str(tmp_path / "seen.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    reader = open_dataset(NAME, root=root)
    cameras = Cameras(reader, reader.camera_keys)
    with np.load(tmp_path / "seen.npz") as seen:
        for key in ("observation.state", "action", "executed_action", "image_age"):
            ours = np.concatenate([episode.columns[key] for episode in reader.iter_episodes([key])])
            np.testing.assert_array_equal(seen[key], ours)
        for key in cameras.keys:
            images = [
                image
                for record in reader.episodes
                for image in cameras.frames(key, record.index, range(record.length), np.arange(record.length) / 10)
            ]
            np.testing.assert_allclose(seen[key] * 255, np.stack(images).transpose(0, 3, 1, 2), atol=1)
        texts = [text for record in reader.episodes for text in record.tasks * record.length]
        assert seen["tasks"].tolist() == texts
        # The columns of our own are no inputs of a policy there.
        assert seen["policy"].tolist() == sorted([*cameras.keys, "observation.state", "action"])
