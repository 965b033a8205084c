"""From arguments and configuration files to dataclasses: exact values, one clear line for every mistake."""

from __future__ import annotations

import enum
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast.parsing import flags_of, help_text, nearest, option, parse, type_name
from pi0_fast.types import UsageError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Policy:
    dtype: str = option("float32", help="Precision.")
    chunk_size: int = option(50, help="Steps predicted.")
    compile_model: bool = option(False, help="Use torch.compile.")
    fused: bool | None = option(None, help="Fused optimizer.")


@dataclass
class Environment:
    task: list[str] | str = option(help="A name or a list.")  # noqa: RUF009 - a field
    kind: typing.Literal["libero", "pusht"] = option("libero", help="Simulator.")


@dataclass
class Toy:
    """Stands for what later commands need: nested groups, maps, lists, choices."""

    name: str = option(help="A text.")
    policy: Policy = field(default_factory=lambda: Policy(chunk_size=10))
    env: Environment | None = None
    rename_map: dict[str, str] = field(default_factory=dict)
    episodes: list[int] | None = None
    size: tuple[int, int] = (3, 4)
    colour: Colour = Colour.RED
    # The wrong order for draccus, which would print a list into the text.
    text_or_list: str | list[str] = "none"
    rate: float = 0.5
    steps: int = option(1, help="Steps.", aliases=("num_steps",))
    note: str | None = None


def toy(*arguments: str) -> Toy:
    return parse(Toy, ["--name", "n", *arguments], "toy")


def error_of(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        toy(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["0", "1:30", "0:6,7:23", "0,1,2", "007", "1e3", "yes", "true", "~", "[1]", "a: b", ""]
)
def test_a_text_stays_as_typed(text: str) -> None:
    assert parse(Toy, ["--name", text], "toy").name == text
    assert parse(Toy, [f"--name={text}"], "toy").name == text


@given(st.text().filter(lambda text: not text.startswith("--")))
def test_any_text_stays_as_typed(text: str) -> None:
    assert parse(Toy, ["--name", text], "toy").name == text


# What files and datasets can be called: no NUL, no lone surrogate.
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


@given(st.integers(), st.floats(allow_nan=False), st.lists(st.integers()), st.dictionaries(NAMES, NAMES))
def test_values_come_back(steps: int, rate: float, episodes: list[int], renames: dict[str, str]) -> None:
    config = toy(
        f"--steps={steps}",
        f"--rate={rate!r}",
        f"--episodes={json.dumps(episodes)}",
        f"--rename_map={json.dumps(renames)}",
    )
    assert (config.steps, config.rate, config.episodes, config.rename_map) == (steps, rate, episodes, renames)
    assert type(config.steps) is int
    assert type(config.rate) is float


def test_nested_flags_keep_the_default_of_their_group() -> None:
    assert toy().policy == Policy(chunk_size=10)
    config = toy("--policy.dtype=bfloat16", "--policy.compile_model", "--policy.fused", "true")
    assert config.policy == Policy("bfloat16", chunk_size=10, compile_model=True, fused=True)
    assert config.env is None


def test_an_optional_group_exists_once_one_of_its_flags_is_given() -> None:
    assert toy("--env.task", "libero_object,libero_goal").env == Environment("libero_object,libero_goal")
    assert toy("--env.task", '["libero_object"]', "--env.kind=pusht").env == Environment(["libero_object"], "pusht")
    assert error_of("--env.kind=pusht").startswith("--env.task must be given")


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        (("--rename_map", '{"a.b":"c"}'), "rename_map", {"a.b": "c"}),
        (("--rename_map={a: b, c: 1:30}",), "rename_map", {"a": "b", "c": "1:30"}),
        (("--episodes", "[0, 2]"), "episodes", [0, 2]),
        (("--episodes", "null"), "episodes", None),
        (("--note", "null"), "note", None),
        (("--name", "null"), "name", "null"),
        (("--size", "[5,6]"), "size", (5, 6)),
        (("--colour", "blue"), "colour", Colour.BLUE),
        (("--text_or_list", '["a", "b"]'), "text_or_list", ["a", "b"]),
        (("--text_or_list", "a,b"), "text_or_list", "a,b"),
        (("--rate", "1e-5"), "rate", 1e-5),
        (("--rate", "-3"), "rate", -3.0),
        (("--num_steps", "7"), "steps", 7),
        (("--steps", "7", "--steps=7", "--num_steps", "7"), "steps", 7),
        (("--policy.compile_model=True",), "policy", Policy(chunk_size=10, compile_model=True)),
        (("--policy.compile_model", "false"), "policy", Policy(chunk_size=10)),
    ],
)
def test_kinds_of_values(arguments: tuple[str, ...], name: str, expected: object) -> None:
    if name == "name":
        assert parse(Toy, list(arguments), "toy").name == expected
        return
    value = getattr(toy(*arguments), name)
    assert value == expected
    assert type(value) is type(expected)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "12x"), ["--steps", "int", "'12x'"]),
        (("--steps", "10.0"), ["--steps", "int", "'10.0'"]),
        (("--steps", "null"), ["--steps", "int", "'null'"]),
        (("--num_steps", ""), ["--num_steps", "int", "''"]),
        (("--steps", "1_0"), ["--steps", "int", "'1_0'"]),
        (("--steps", "\u0661\u0662"), ["--steps", "int"]),
        (("--rate", "1_0.5"), ["--rate", "float", "'1_0.5'"]),
        (("--rate", "\uff11"), ["--rate", "float"]),
        (("--episodes", '["1_0"]'), ["--episodes", "list of int"]),
        (("--episodes", "[" * 60 + "]" * 60), ["--episodes", "nested more than 50 deep"]),
        (("--episodes", "[" * 100_000), ["--episodes", "nested more than 50 deep"]),
        (("--episodes", "[" + "9" * 5000 + "]"), ["--episodes"]),
        (("--text_or_list", '["a\\u0000"]'), ["--text_or_list", "U+0000"]),
        (("--episodes", "[&a 1, *a]"), ["--episodes", "aliases"]),
        (("--config_path", "~nosuchuser/x.yaml"), ["--config_path '~nosuchuser/x.yaml'", "home directory"]),
        (("--rate", "fast"), ["--rate", "float", "'fast'"]),
        (("--policy.compile_model", "maybe"), ["--policy.compile_model", "true or false", "'maybe'"]),
        (("--episodes", "0,1"), ["--episodes", "list of int", "JSON", "'0,1'"]),
        (("--episodes", "[0, 1"), ["--episodes", "list of int", "not valid", "'[0, 1'"]),
        (("--episodes", "[0, true]"), ["--episodes", "list of int"]),
        (("--episodes", "[0, null]"), ["--episodes", "list of int"]),
        (("--episodes", "[0, 1.5]"), ["--episodes", "list of int"]),
        (("--size", "[1,2,3]"), ["--size", "[1,2,3]"]),
        (("--rename_map", '{"a": ["b"]}'), ["--rename_map", "map of str to str"]),
        (("--rename_map", '{"a": "b", "a": "c"}'), ["--rename_map", "'a'", "twice"]),
        (("--colour", "green"), ["--colour", "red|blue", "'green'"]),
        (("--env.task=x", "--env.kind=Libero"), ["--env.kind", "libero|pusht", "'Libero'"]),
        (("--stepps", "3"), ["unknown flag --stepps", "did you mean --steps?"]),
        (("--policy.dtyp", "x"), ["unknown flag --policy.dtyp", "did you mean --policy.dtype?"]),
        (("--policy", "x"), ["unknown flag --policy", "--policy.dtype"]),
        (("--zzz", "3"), ["unknown flag --zzz", "toy --help"]),
        (("--step", "3"), ["unknown flag --step", "--steps"]),
        (("stray",), ["'stray'"]),
        (("--rate",), ["--rate needs a value"]),
        (("--rate", "--steps", "3"), ["--rate needs a value"]),
        (("--steps", "1", "--steps", "2"), ["--steps", "twice", "1 and 2"]),
        (("--steps", "1", "--num_steps", "2"), ["--steps and --num_steps", "1 and 2"]),
        (("--name", "m"), ["--name", "twice", "'n' and 'm'"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: tuple[str, ...], words: list[str]) -> None:
    message = error_of(*arguments)
    assert [word for word in words if word not in message] == [], message


def test_missing_required_flags_are_all_named() -> None:
    with pytest.raises(UsageError, match=r"^--name and --env\.task must be given \(see toy --help\)$"):
        parse(Toy, ["--env.kind", "pusht"], "toy")


def test_nothing_is_printed_by_the_libraries_below(capsys: pytest.CaptureFixture[str]) -> None:
    error_of("--steps", "x")
    error_of("--unknown")
    assert capsys.readouterr() == ("", "")


def test_nearest() -> None:
    assert nearest("train-tokenizr", ["train-tokenizer", "demo"]) == "train-tokenizer"
    assert nearest("repo-id", ["repo_id", "root"]) == "repo_id"
    assert nearest("zzz", ["train-tokenizer", "demo"]) is None


# --- configuration files --------------------------------------------------------------------------


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_yaml_file_with_flags_over_it(tmp_path: Path) -> None:
    text = """
    name: 1:30          # YAML 1.1 reads 90
    num_steps: 3
    note: ~
    policy: {dtype: bfloat16, compile_model: true}
    episodes: [1, 2]
    rename_map:
      a: 0
    rate: 1e-5          # PyYAML reads a text
    """
    path = write(tmp_path / "toy.yaml", text)
    config = parse(Toy, ["--policy.chunk_size=7", "--config_path", path, "--steps", "4", "--episodes=null"], "toy")
    assert config == Toy(
        "1:30",
        policy=Policy("bfloat16", chunk_size=7, compile_model=True),
        rename_map={"a": "0"},
        rate=1e-5,
        steps=4,
    )


def test_json_file(tmp_path: Path) -> None:
    tree = {"name": "0", "policy": {"chunk_size": 5}, "episodes": [3], "text_or_list": ["a"], "note": None}
    path = write(tmp_path / "toy.json", json.dumps(tree))
    config = parse(Toy, [f"--config_path={path}"], "toy")
    assert config == Toy("0", policy=Policy(chunk_size=5), episodes=[3], text_or_list=["a"])


# Thirty levels of ten references each: 10 ** 30 values in a kilobyte.
BOMB = "l0: &l0 [x]\n" + "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 31))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"name": 0}', ["a.json: name", "expected str, got 0", "quotes"]),
        ("a.json", '{"name": "n", "steps": "x"}', ["a.json: steps", "int", "'x'"]),
        ("a.json", '{"name": "n", "stepps": 1}', ["a.json", "'stepps'", "did you mean 'steps'?"]),
        ("a.json", '{"name": "n", "policy": {"dtyp": "x"}}', ["a.json", "'policy.dtyp'", "'policy.dtype'"]),
        ("a.json", '{"name": "n", "steps": 1, "num_steps": 2}', ["steps", "num_steps", "1 and 2"]),
        ("a.json", '{"name": "n", "name": "m"}', ["a.json", "'name'", "twice"]),
        ("a.json", '{"name": ', ["a.json", "not valid JSON", "line 1"]),
        ("a.json", '{"name": "n", "policy": null}', ["a.json", "'policy' is a group", "null"]),
        ("a.json", "[1]", ["a.json", "top level"]),
        ("a.yaml", "name: [1", ["a.yaml", "not valid YAML"]),
        ("a.yaml", "name: a\nname: b", ["a.yaml", "'name'", "twice"]),
        ("a.yaml", "", ["a.yaml", "top level"]),
        ("a.yaml", "name: ~", ["a.yaml: name", "expected str, got null"]),
        ("a.json", '{"name": "a\\u0000b"}', ["a.json", "U+0000", "'a\\x00b'"]),
        ("a.json", '{"name": "a\\ud800"}', ["a.json", "U+D800", "'a\\ud800'"]),
        ("a.json", '{"name\\u0000": "a"}', ["a.json", "U+0000"]),
        ("a.json", '{"episodes": [' + "9" * 5000 + "]}", ["a.json", "digits"]),
        ("a.json", '{"name": ' + "[" * 60 + "]" * 60 + "}", ["a.json", "nested more than 50 deep"]),
        ("a.json", '{"name": ' + "[" * 100_000, ["a.json", "nested more than 50 deep"]),
        ("a.yaml", 'name: "a\\0b"', ["a.yaml", "U+0000"]),
        ("a.yaml", "name: a\0b", ["a.yaml", "#x0000"]),
        ("a.yaml", "name: " + "[" * 60 + "]" * 60, ["a.yaml", "nested more than 50 deep"]),
        ("a.yaml", "name: " + "[" * 5000 + "]" * 5000, ["a.yaml", "nested more than 50 deep"]),
        ("a.yaml", "name: &n x\nnote: *n", ["a.yaml", "aliases", "line 1"]),
        ("a.yaml", "name: n\n? [a, b]\n: 3", ["a.yaml", "key is a sequence", "line 2"]),
        ("a.yaml", "name: n\nsteps: 1_0", ["a.yaml: steps", "'1_0'"]),
        ("a.yaml", BOMB, ["a.yaml", "aliases"]),
        ("a.toml", "name = 1", ["a.toml", ".yaml"]),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(UsageError) as caught:
        parse(Toy, ["--config_path", path], "toy")
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_missing_file_and_two_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config_path: cannot read .*none\.yaml"):
        parse(Toy, ["--config_path", str(tmp_path / "none.yaml")], "toy")
    with pytest.raises(UsageError, match="--config_path is given twice"):
        parse(Toy, ["--config_path", "a.yaml", "--config_path", "b.yaml"], "toy")


# --- help -----------------------------------------------------------------------------------------


def test_type_names() -> None:
    kinds = {name: type_name(flag.kind) for name, flag in flags_of(Toy).items()}
    assert kinds == {
        "name": "str",
        "policy.dtype": "str",
        "policy.chunk_size": "int",
        "policy.compile_model": "bool",
        "policy.fused": "bool",
        "env.task": "str or list of str",
        "env.kind": "libero|pusht",
        "rename_map": "map of str to str",
        "episodes": "list of int",
        "size": "tuple of int",
        "colour": "red|blue",
        "text_or_list": "str or list of str",
        "rate": "float",
        "steps": "int",
        "note": "str",
    }


def test_help_shows_the_default_of_the_group() -> None:
    text = " ".join(help_text(Toy, "toy", "A toy.").split())
    assert "--policy.chunk_size int Steps predicted. (default: 10)" in text
    assert "--steps int Steps. Also spelt --num_steps. (default: 1)" in text
    assert "--size tuple of int (default: [3, 4])" in text
    assert "--colour red|blue (default: red)" in text
