"""Flags of the simulator: read, checked, and handed on to `sims.make`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from pi0_fast import sims, simulation_config
from pi0_fast.parsing import parse
from pi0_fast.simulation_config import EnvConfig
from pi0_fast.types import UsageError


@dataclass
class Command:
    """A command that has a simulator."""

    env: EnvConfig = field(default_factory=EnvConfig)


def read(*arguments: str) -> EnvConfig:
    env = parse(Command, [f"--env.{argument}" for argument in arguments], "test").env
    env.validate()
    return env


def test_the_names_of_simulators_are_those_of_sims() -> None:
    assert simulation_config.ENV_TYPES == sims.ENV_TYPES


@pytest.mark.parametrize("text", ["a,b", " a , b", '["a", "b"]', "[a, b]"])
def test_several_tasks(text: str) -> None:
    assert read("type=gym", f"task={text}").tasks == ("a", "b")


def test_a_simulator_is_made_from_the_flags() -> None:
    options = '{"fault": "raise", "fault_step": 2}'
    env = read(
        "type=toy", "task=reach-blue", "cameras=[top]", "image_size=[8, 9]", "episode_length=7", f"options={options}"
    )
    (task,) = env.tasks
    arguments = env.arguments(task)
    assert json.loads(json.dumps(arguments))["options"] == {"fault": "raise", "fault_step": 2}
    simulator = sims.make(**arguments)
    assert simulator.spec.cameras == {"observation.images.top": (8, 9)}
    assert (simulator.spec.task, simulator.spec.max_steps) == ("reach-blue", 7)
    assert read("type=toy", "task=reach-blue", "image_size=8").arguments("reach-blue")["image_size"] == 8


def test_suites_stand_for_their_tasks() -> None:
    assert read("type=libero", "task=libero_goal/7,libero_object").tasks == (
        "libero_goal/7",
        *(f"libero_object/{number}" for number in range(10)),
    )
    assert read("type=libero").tasks == tuple(f"libero_10/{number}" for number in range(10))
    assert len(read("type=libero", "task=libero_90").tasks) == 90
    assert read("type=gym", "task=libero_object").tasks == ("libero_object",)


def test_simulators_with_a_usual_task_need_none() -> None:
    assert (read("type=pusht").tasks, read("type=aloha").tasks) == (("PushT-v0",), ("AlohaInsertion-v0",))


def test_no_simulator_is_the_default() -> None:
    assert read().tasks == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["type=liberty", "task=x"], "--env.type"),
        (["type=libero", "task=libero_10,libero_10/3"], "names a task twice"),
        (["type=toy"], "--env.type=toy needs --env.task, such as --env.task=reach-green"),
        (["type=metaworld"], "--env.type=metaworld needs --env.task, such as --env.task=drawer-open-v3"),
        (["type=gym"], "--env.type=gym needs --env.task, such as --env.task="),
        (["task=x"], "--env.task has no effect without --env.type"),
        (["fast_rendering=true"], "--env.fast_rendering has no effect"),
        (["type=toy", "task=a,"], "--env.task"),
        (["type=toy", "task=a,b,a"], "names a task twice: a, b, a"),
        (["type=toy", "task=a", "image_size=0"], "--env.image_size"),
        (["type=toy", "task=a", "image_size=[1,2,3]"], r"an edge or \[height, width\]"),
        (["type=toy", "task=a", "max_steps=0"], "--env.max_steps"),
        (["type=toy", "task=a", "fps=0"], "--env.fps must be above 0"),
        (["type=toy", "task=a", "options=[1]"], "a JSON map"),
        (["type=toy", "task=a", "options={a"], "--env.options"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(*arguments)
