"""Stands for hf-libero where that is not installed: as much of its interface as the adapter uses, a world of two boxes.

`write(folder)` makes `libero` and `robosuite` below a folder for sys.path. Like the real one it asks a question at its
first import, prints, and looks for its assets; the hand goes where actions push it, a step at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

LIBRARY = """
import os
from pathlib import Path
config_file = os.path.join(os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero")), "config.yaml")
if not os.path.exists(config_file):
    input("Do you want to specify a custom path for the dataset folder? (Y/N): ")

def get_libero_path(name):
    for line in Path(config_file).read_text().splitlines():
        if line.startswith(name + ": "):
            return line.partition(": ")[2].strip("'").replace("''", "'")
    raise AssertionError("Key " + name + " not found")

def get_assets_path():
    print("Warning: Could not download assets from HuggingFace Hub: no network")
    return os.path.join(os.path.dirname(__file__), "assets")
"""

BENCHMARK = """
from typing import NamedTuple
class Task(NamedTuple):
    language: str
    problem_folder: str
    bddl_file: str
    init_states_file: str
class Suite:
    def __init__(self):
        print("[info] using task orders")
        self.tasks = [
            Task(f"pick up {name}", self.name, f"{name}.bddl", f"{name}.pruned_init") for name in ("soup", "milk")
        ]
class Object(Suite):
    name = "libero_object"
class Extra(Suite):
    name = "libero_extra"
class Hundred(Suite):
    def __init__(self):
        raise KeyError("libero_100")
def get_benchmark_dict():
    return {"libero_object": Object, "libero_extra": Extra, "libero_100": Hundred}
"""

WORLD = '''
import types
import mujoco
import numpy as np
XML = """<mujoco><visual><global offwidth="64" offheight="64"/></visual><worldbody><light pos="0 0 3"/>
<camera name="agentview" pos="0 0 2"/><camera name="robot0_eye_in_hand" pos="0.2 0 2"/>
<geom group="1" type="box" size=".2 .2 .01" pos="-.4 .4 0" rgba="1 0 0 1"/>
<geom group="0" type="box" size="2 2 .01" pos="0 0 .5" rgba="0 1 0 1"/>
<body><joint name="a" type="slide" axis="1 0 0"/><geom group="1" type="box" size=".1 .1 .1" rgba="0 0 1 1"/></body>
</worldbody></mujoco>"""
MADE = []

class World:
    def __init__(self):
        self.observables = []
    def add_observable(self, observable):
        self.observables.append(observable)

class ControlEnv:
    def __init__(self, **settings):
        self.settings, self.env, self.calls = settings, World(), []
        gripper = types.SimpleNamespace(current_action=np.ones(2))
        self.robots = [types.SimpleNamespace(controller=types.SimpleNamespace(use_delta=True), gripper=gripper)]
        MADE.append(self)
        self._build()
    def _build(self):
        model = mujoco.MjModel.from_xml_string(XML)
        self.sim = types.SimpleNamespace(
            model=types.SimpleNamespace(_model=model), data=types.SimpleNamespace(_data=mujoco.MjData(model))
        )
        self.hand = np.zeros(7)
    def seed(self, seed):
        self.random = np.random.default_rng(seed)
    def reset(self):
        print("noise on stdout")
        self.calls.append("reset")
        if self.settings["hard_reset"]:
            self._build()
        self.hand = np.zeros(7)
        if hasattr(self, "random"):
            self.hand[0] = self.random.random()
        return self._look()
    def set_init_state(self, state):
        self.calls.append(("state", float(state[0])))
        self.hand = np.zeros(7)
        self.hand[0] = state[1]
        return self._look()
    def step(self, action):
        assert len(action) == 7
        self.calls.append(("step", [float(x) for x in action]))
        robot = self.robots[0]
        self.hand = self.hand + action * (0.1 if robot.controller.use_delta else 1.0)
        self.widths = list(getattr(self, "widths", [])) + [float(robot.gripper.current_action[0])]
        robot.gripper.current_action = robot.gripper.current_action + action[6]
        return self._look(), float(self.check_success()), self.check_success(), {}
    def check_success(self):
        return bool(self.hand[0] > 1.0)
    def _look(self):
        data = self.sim.data._data
        data.qpos[0] = self.hand[0]
        mujoco.mj_forward(self.sim.model._model, data)
        for observable in self.env.observables:
            observable.sensor({})
        return {
            "robot0_eef_pos": self.hand[:3].copy(),
            "robot0_eef_quat": np.array([1.0, 0.0, 0.0, 0.0]),
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
        }
    def close(self):
        self.calls.append("close")
'''

OBSERVABLES = """
class Observable:
    def __init__(self, name, sensor, sampling_rate):
        self.name, self.sensor, self.rate = name, sensor, sampling_rate
        sensor({})
"""


def states(count: int = 5) -> np.ndarray:
    """Initial states of the fake tasks: number, and where the hand begins."""
    return np.stack([np.arange(count), np.arange(count) / 10], 1).astype(np.float64)


def write(folder: Path, *, assets: bool = True) -> None:
    """The packages, and files of two tasks of the suites libero_object and libero_extra."""
    root = folder / "libero" / "libero"
    files = {
        "libero/__init__.py": "",
        "libero/libero/__init__.py": LIBRARY,
        "libero/libero/benchmark/__init__.py": BENCHMARK,
        "libero/libero/envs/__init__.py": "",
        "libero/libero/envs/env_wrapper.py": WORLD,
        "robosuite/__init__.py": "",
        "robosuite/utils/__init__.py": "",
        "robosuite/utils/observables.py": OBSERVABLES,
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for suite in ("libero_object", "libero_extra"):
        for task in ("soup", "milk"):
            for place, suffix in (("bddl_files", "bddl"), ("init_files", "pruned_init.npz")):
                path = root / place / suite / f"{task}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("(define)")
            np.savez(root / "init_files" / suite / f"{task}.pruned_init.npz", states=states())
    for name in ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects") if assets else ():
        (root / "assets" / name).mkdir(parents=True)
