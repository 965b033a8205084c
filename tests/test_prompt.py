"""Prompts: recorded ids, hand-worked rows, slow twins of everything that is vectorised, and the way back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast import FastTokenizer
from pi0_fast.prompt import Prompt, PromptBatch, PromptFormat
from pi0_fast.text_tokenizer import JsonTextTokenizer, TextTokenizer, TinyTextTokenizer, load_text_tokenizer
from pi0_fast.types import PolicyError

TINY = TinyTextTokenizer()
TINY_PROMPT = Prompt(TINY, 1024)
TINY_OPENPI = Prompt(TINY, 1024, prompt_format="openpi", state_clip=False)
FORMATS = {"lerobot": TINY_PROMPT, "openpi": TINY_OPENPI}
TASKS = st.text(min_size=1).filter(lambda task: task.strip() and task.encode(errors="ignore").decode() == task)


class Uncut(TinyTextTokenizer):
    """Of this one nothing is proved, so whole texts are encoded."""

    def never_joins(self, pairs: Any) -> bool:
        del pairs
        return False


UNCUT = Uncut()


def first_rows(batch: PromptBatch, row: int = 0) -> tuple[list[int], list[bool], list[bool], list[float]]:
    """The valid part of a row: ids, causal, label, weight."""
    valid = batch.valid[row]
    return tuple(part[row][valid].tolist() for part in (batch.ids, batch.causal, batch.label, batch.weight))


# --- recorded ids -------------------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("name", ["lerobot_checkpoint", "lerobot_checkpoint_relative"])
def test_goldens_of_lerobot(shared: Path, name: str) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    folder = shared / "golden" / name
    config = json.loads((folder / "config.json").read_text())
    tasks = json.loads((folder / "tasks.json").read_text())
    vectors = numpy_files.load_file(folder / "vectors.safetensors")
    tokenizer = FastTokenizer.from_pretrained(folder / config["action_tokenizer_name"])
    prompt = Prompt(
        load_text_tokenizer(config["text_tokenizer_name"], base=folder),
        tokenizer.vocab_size,
        tokenizer_max_length=config["tokenizer_max_length"],
        max_action_tokens=config["max_action_tokens"],
        fast_skip_tokens=config["fast_skip_tokens"],
        state_clip=False,
    )
    horizon, dims = vectors["pre.action"].shape[1:]
    chunks = FastTokenizer(tokenizer.vocabulary, scale=tokenizer.scale, time_horizon=horizon, action_dim=dims)
    batch = prompt.training(tasks, vectors["pre.state"], *chunks.encode_padded(vectors["pre.action"]))
    for row in range(len(tasks)):
        text = vectors["pre.language.tokens"][row][vectors["pre.language.mask"][row]]
        target = vectors["pre.action.tokens"][row][vectors["pre.action.token_mask"][row]]
        assert batch.text_length[row] == len(text)
        assert batch.ids[row][batch.valid[row]].tolist() == [*text, *target]
        assert batch.causal[row].sum() == len(target)
        assert batch.label[row].sum() == len(target) - 1
    longest = (vectors["pre.language.mask"].sum(1) + vectors["pre.action.token_mask"].sum(1)).max()
    assert batch.ids.shape == (len(tasks), longest)
    # -1.0x in the second state, whose bin is -1.
    assert batch.report.state_below.sum() == (vectors["pre.state"] < -1).sum()
    parsed = prompt.parse(vectors["pre.action.tokens"][:, 1:])
    assert [row.ids.tolist() for row in parsed] == chunks.encode(vectors["pre.action"])
    assert [row.problem for row in parsed] == [None, None]


TAIL = [235269, 3040, 235292, 728, 235274, 235248, 235276, 235248, 235284, 235308, 235308, 235289, 108]
STATE = [[-1.001, -1.0, 1.0]]  # bins -1, 0, 255


@pytest.mark.golden
def test_paligemma_rows_in_both_formats(shared: Path) -> None:
    pytest.importorskip("sentencepiece")
    tokenizer = load_text_tokenizer(shared / "assets" / "paligemma_tokenizer.model")
    task = ["Open_the drawer\nslowly "]
    lerobot = Prompt(tokenizer, 2048, state_clip=False)
    openpi = Prompt(tokenizer, 2048, prompt_format="openpi", state_clip=False)
    lerobot_text = [2, 7071, 235292, 6376, 573, 39635, 13708, *TAIL]
    openpi_text = [2, 7071, 235292, 2174, 573, 39635, 108, 212000, *TAIL]
    prefix, target = [4022, 235292, 235248], [257023, 257022, 254976]
    assert first_rows(lerobot.generation(task, STATE))[0] == [*lerobot_text, 2, *prefix]
    assert first_rows(openpi.generation(task, STATE))[0] == [*openpi_text, *prefix]
    rows = first_rows(lerobot.training(task, STATE, [[0, 1, 2047]]))
    assert rows[0] == [*lerobot_text, 2, *prefix, *target, 235371, 1]
    assert rows[1] == [False] * 20 + [True] * 9
    assert rows[2] == [False] * 21 + [True] * 8
    rows = first_rows(openpi.training(task, STATE, [[0, 1, 2047]]))
    assert rows[0] == [*openpi_text, *prefix, *target, 235371, 1]
    assert rows[1] == rows[2] == [False] * 21 + [True] * 8


# --- text and state -----------------------------------------------------------------------------------------------


def test_texts_by_hand() -> None:
    state = [-1, -0.993, -0.992, 0, 0.999, 1.5]
    assert TINY_PROMPT.text(" Open_the\n Drawer ", state) == "Task: Open the  Drawer, State: 0 0 1 128 255 255;\n"
    assert TINY_OPENPI.text(" Open_the\n Drawer ", [-7, 0.25]) == "Task: open the\n drawer, State: -1 160;\n"


EDGES = [k / 128 for k in range(-130, 131)]
VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1.125, 1.125, width=32),
    st.sampled_from([float(np.float32(edge)) for edge in EDGES]),
    st.sampled_from([float(np.nextafter(np.float32(edge), np.float32(side))) for edge in EDGES for side in (-9, 9)]),
)


@settings(max_examples=300)
@given(st.lists(VALUES, min_size=1, max_size=40), st.sampled_from([np.float32, np.float64]), st.booleans())
def test_bins_are_those_of_digitize(values: list[float], dtype: Any, clip: bool) -> None:
    states = np.array([values], dtype)
    prompt = TINY_PROMPT if clip else TINY_OPENPI
    expected = np.digitize(states, np.linspace(-1, 1, 257)[:-1]) - 1
    bins, below, above = prompt.state_bins(states)
    assert bins.dtype == np.int64
    assert bins.tolist() == (np.maximum(expected, 0) if clip else expected).tolist()
    assert below.tolist() == [int(value < -1) for value in states[0]]
    assert above.tolist() == [int(value > 1) for value in states[0]]


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.float16])
def test_bins_of_other_numbers(dtype: Any) -> None:
    states = np.array([[0, 1, 100]], dtype)
    assert TINY_PROMPT.state_bins(states)[0].tolist() == [[128, 255, 255]]


def test_values_outside_the_range_are_counted_for_each_dimension() -> None:
    batch = TINY_OPENPI.generation(["a", "b"], [[-1.5, 0.0, 1.5], [-2.0, -1.0, 1.0]])
    assert batch.report.state_below.tolist() == [2, 0, 0]
    assert batch.report.state_above.tolist() == [0, 0, 1]
    assert "-1 128 255" in TINY_OPENPI.text("a", [-1.5, 0.0, 1.5])


LONG_PROMPTS = {
    (form, clip): [
        Prompt(tokenizer, 8, prompt_format=form, state_clip=clip, tokenizer_max_length=10_000)
        for tokenizer in (TINY, UNCUT)
    ]
    for form in get_args(PromptFormat)
    for clip in (False, True)
}


@settings(max_examples=60)
@given(
    st.lists(TASKS, min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["lerobot", "openpi"]),
    st.booleans(),
)
def test_looked_up_numbers_give_the_ids_of_whole_texts(
    tasks: list[str], dims: int, seed: int, prompt_format: Any, clip: bool
) -> None:
    states = np.random.default_rng(seed).normal(0, 0.7, (len(tasks), dims))
    prompt, slow = LONG_PROMPTS[prompt_format, clip]
    cut, whole = prompt.generation(tasks, states), slow.generation(tasks, states)
    for field in ("ids", "valid", "causal", "text_length"):
        assert getattr(cut, field).tolist() == getattr(whole, field).tolist()
    for row, (task, state) in enumerate(zip(tasks, states, strict=True)):
        length = cut.text_length[row]
        assert cut.ids[row, :length].tolist() == TINY.encode_prompt(prompt.text(task, state))


def test_a_text_tokenizer_that_ends_prompts_with_eos() -> None:
    files = dict(TINY._files)
    content = json.loads(files["tokenizer.json"])
    around = content["post_processor"]
    around["single"] = [around["single"][1], {"SpecialToken": {"id": "<eos>", "type_id": 0}}]
    around["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}
    tokenizer = JsonTextTokenizer({**files, "tokenizer.json": json.dumps(content).encode()}, "here")
    prompt = Prompt(tokenizer, 8)
    assert tokenizer.never_joins([(":", " ")])
    expected = [*TINY.encode(prompt.text("go", [0.0, 0.5])), 1]
    batch = prompt.generation(["go"], [[0.0, 0.5]])
    assert batch.ids[0].tolist() == [*expected, 2, *TINY.encode("Action: ")]
    assert batch.text_length.tolist() == [len(expected)]


@pytest.mark.golden
def test_looked_up_numbers_give_the_ids_of_whole_texts_with_paligemma(shared: Path) -> None:
    pytest.importorskip("sentencepiece")
    tokenizer = load_text_tokenizer(shared / "assets" / "paligemma_tokenizer.model")
    prompt = Prompt(tokenizer, 2048, state_clip=False, tokenizer_max_length=1000)
    states = np.random.default_rng(0).uniform(-1.02, 1.02, (40, 32))
    tasks = [f"Put block {n}; into: the_box 5 {'x' * n}\n{n}" for n in range(40)]
    batch = prompt.generation(tasks, states)
    for row, task in enumerate(tasks):
        expected = tokenizer.encode_prompt(prompt.text(task, states[row]))
        assert batch.ids[row, : batch.text_length[row]].tolist() == expected


# --- rows -----------------------------------------------------------------------------------------------------------


def slow_row(prompt: Prompt, task: str, state: Any, actions: list[int]) -> tuple[list[int], list[bool], list[bool]]:
    """Ids, causal and label of one row, as the formats are described."""
    text = TINY.encode_prompt(prompt.text(task, state))
    begin = [2] if prompt.prompt_format == "lerobot" else []
    target = [*begin, *TINY.encode("Action: "), *(4096 - 1 - 128 - a for a in actions), *TINY.encode("|"), 1]
    unpredicted = len(text) + len(begin)
    ids = text + target
    causal = [i >= len(text) for i in range(len(ids))]
    return ids, causal, [i >= unpredicted for i in range(len(ids))]


@pytest.mark.parametrize("prompt_format", FORMATS)
@given(st.lists(st.lists(st.integers(0, 1023), max_size=12), min_size=1, max_size=4), st.integers(1, 6), st.booleans())
def test_training_rows_equal_the_slow_twin(
    prompt_format: str, actions: list[list[int]], dims: int, padded: bool
) -> None:
    prompt = FORMATS[prompt_format]
    rng = np.random.default_rng(len(actions))
    tasks, states = [f"{'go ' * n}on" for n in range(len(actions))], rng.normal(0, 1, (len(actions), dims))
    if padded:
        table = np.full((len(actions), 15), -1, np.int32)
        for row, ids in zip(table, actions, strict=True):
            row[: len(ids)] = ids
        batch = prompt.training(tasks, states, table, [len(ids) for ids in actions])
    else:
        batch = prompt.training(tasks, states, actions)
    rows = [slow_row(prompt, *row) for row in zip(tasks, states, actions, strict=True)]
    width = max(len(ids) for ids, _, _ in rows)
    assert batch.ids.shape == (len(rows), width)
    total = sum(sum(label) for _, _, label in rows)
    for n, (ids, causal, label) in enumerate(rows):
        gap = width - len(ids)
        share = 1 / total if prompt_format == "lerobot" else 1 / sum(label) / len(rows)
        assert batch.ids[n].tolist() == ids + [0] * gap
        assert batch.valid[n].tolist() == [True] * len(ids) + [False] * gap
        assert batch.causal[n].tolist() == causal + [False] * gap
        assert batch.label[n].tolist() == label + [False] * gap
        np.testing.assert_allclose(batch.weight[n], [share * x for x in label] + [0] * gap, rtol=1e-6)
    assert batch.weight.sum() == pytest.approx(1, abs=1e-6)


def test_types_and_weights_by_hand() -> None:
    """`Action: ` is 3 ids, so the rows have 3 + 1 + 2 = 6 and 3 + 3 + 2 = 8 labels."""
    arguments: Any = (["a", "b"], [[0.0], [0.0]], [[5], [6, 7, 8]])
    batch = TINY_PROMPT.training(*arguments)
    kinds = {name: str(getattr(batch, name).dtype) for name in ("ids", "valid", "causal", "label", "weight")}
    assert kinds == {"ids": "int64", "valid": "bool", "causal": "bool", "label": "bool", "weight": "float32"}
    assert sorted(set(batch.weight.ravel().tolist())) == [0, np.float32(1 / 14)]
    weight = TINY_OPENPI.training(*arguments).weight
    assert sorted(set(weight.ravel().tolist())) == [0, np.float32(1 / 16), np.float32(1 / 12)]


@pytest.mark.parametrize("prompt_format", FORMATS)
def test_the_end_mark_is_a_label(prompt_format: str) -> None:
    prompt = FORMATS[prompt_format]
    batch = prompt.training(["a"], [[0.0]], [[5]])
    ids, _, label, _ = first_rows(batch)
    assert (ids[-2], ids[-1]) == (prompt.end_id, prompt.eos_id)
    assert label[-2:] == [True, True]


def test_a_row_of_a_batch_is_the_row_alone() -> None:
    tasks, states, actions = ["a", "go to the door"], [[0.0, -1.0], [1.0, 0.3]], [[1, 2, 3], [4]]
    batch = TINY_PROMPT.training(tasks, states, actions)
    for row in range(2):
        alone = TINY_PROMPT.training(tasks[row : row + 1], states[row : row + 1], actions[row : row + 1])
        assert first_rows(batch, row)[:3] == first_rows(alone)[:3]


@pytest.mark.parametrize(("prefill", "bidirectional"), [(True, False), (True, True), (False, False), (False, True)])
def test_generation_ends_where_the_model_begins(prefill: bool, bidirectional: bool) -> None:
    tasks, states = ["a", "go"], [[0.0], [0.5]]
    for prompt in FORMATS.values():
        batch = prompt.generation(tasks, states, prefill_action_prefix=prefill, bos_bidirectional=bidirectional)
        trained = prompt.training(tasks, states, [[], []])
        bos = prompt.prompt_format == "lerobot"
        given_ids = int(bos) + (3 if prefill else 0)
        for row in range(2):
            ids, causal, label, weight = first_rows(batch, row)
            length = batch.text_length[row]
            assert len(ids) == length + given_ids
            assert ids == first_rows(trained, row)[0][: len(ids)]
            expected = [False] * length + [True] * given_ids
            if bos and bidirectional:
                expected[length] = False
            assert causal == expected
            assert not any(label)
            assert not any(weight)


def test_too_long_targets_are_counted_and_whole() -> None:
    prompt = Prompt(TINY, 1024, max_action_tokens=10)
    assert prompt.target_overhead == 6
    batch = prompt.training(["a"] * 3, [[0.0]] * 3, [[1] * 4, [2] * 5, [3] * 20])
    assert batch.report.over_budget == 2
    assert batch.report.longest_target == 26
    assert [row.ids.tolist() for row in prompt.parse(batch.ids[:, int(batch.text_length[0]) + 1 :])] == [
        [1] * 4,
        [2] * 5,
        [3] * 20,
    ]
    total = batch.report + prompt.training(["a"], [[2.0]], [[1] * 21]).report
    assert (total.rows, total.over_budget, total.longest_target) == (4, 3, 27)
    assert total.state_above.tolist() == [1]


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_prompt_too_long_names_both_lengths_and_the_row() -> None:
    exact = len(TINY.encode_prompt(TINY_PROMPT.text("a task", [0.0])))
    prompt = Prompt(TINY, 8, tokenizer_max_length=exact)
    prompt.generation(["a task"], [[0.0]])
    with pytest.raises(PolicyError, match=rf"row 1 has {exact + 1} ids.*tokenizer_max_length={exact}:.*'a tasks'"):
        prompt.generation(["a task", "a tasks"], [[0.0], [0.0]])


BAD_ROWS: list[tuple[Any, Any, str]] = [
    (["a", " \n"], [[0.0], [0.0]], "task in row 1 must be a text"),
    (["a", None], [[0.0], [0.0]], "task in row 1 must be a text"),
    (["a", "\ud800"], [[0.0], [0.0]], "task in row 1 is no text that can be written"),
    ("ab", [[0.0], [0.0]], "list with one text for each row"),
    (["a"], [[0.0], [0.0]], "1 tasks, but 2 rows of states"),
    (["a", "b"], [[0.0, 1.0], [0.0, np.nan]], "row 1, dimension 1 is nan"),
    (["a"], [[-np.inf]], "row 0, dimension 0 is -inf"),
    (["a"], [0.0], r"shape \[1\]"),
    (["a"], [[]], r"shape \[1, 0\]"),
    ([], np.zeros((0, 3)), r"shape \[0, 3\]"),
    (["a"], [["x"]], "dtype <U1"),
    (["a"], [[True]], "dtype bool"),
]


@pytest.mark.parametrize(("tasks", "states", "words"), BAD_ROWS)
def test_bad_tasks_and_states(tasks: Any, states: Any, words: str) -> None:
    for prompt in (TINY_PROMPT, Prompt(UNCUT, 8)):
        with pytest.raises(PolicyError, match=words):
            prompt.generation(tasks, states)
        with pytest.raises(PolicyError, match=words):
            prompt.training(tasks, states, [[1]] * len(states))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1], [2, 1024]],), "1024 in row 1, position 1 is no action token; .* 0 to 1023"),
        (([[1], [-1]],), "-1 in row 1, position 0"),
        (([[1]],), "2 tasks and states, but 1 rows"),
        (([[1.0], [2.0]],), "whole numbers, not float64"),
        ((np.zeros((2, 4)), [1, 1]), "whole numbers"),
        ((np.zeros((2, 4), int), [1, 5]), r"0 to 4, got \[1, 5\]"),
        ((np.zeros((2, 4), int), [-1, 1]), "0 to 4"),
        ((np.zeros((2, 4), int), [1]), r"\[2, 4\] and \[1\]"),
        ((np.zeros(4, int), [1, 1]), r"\[4\] and \[2\]"),
        ((np.zeros((2, 4), int), [1.0, 1.0]), "whole lengths"),
    ],
)
def test_bad_action_tokens(arguments: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        TINY_PROMPT.training(["a", "b"], [[0.0], [0.0]], *arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_format": "pi0"}, "'lerobot' or 'openpi', not 'pi0'"),
        ({"tokenizer_max_length": 0}, "tokenizer_max_length must be a whole number from 1"),
        ({"max_action_tokens": 2.5}, "max_action_tokens"),
        ({"fast_skip_tokens": -1}, "fast_skip_tokens"),
        ({"action_vocab_size": True}, "action_vocab_size"),
        # 4096 - 129 - 3606 = 361 is the lowest id: "Action" is 360.
        ({"action_vocab_size": 3608}, "id 360, 'Action', is text of every prompt"),
        ({"action_vocab_size": 5000}, "5000 action tokens .* 4096 "),
        ({"fast_skip_tokens": 4090, "action_vocab_size": 4}, r"2 to 5 .*id 2, '<bos>'"),
        ({"fast_skip_tokens": 4100, "action_vocab_size": 1}, "below 0"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        Prompt(TINY, **{"action_vocab_size": 8, **options})


def test_the_largest_action_vocabulary_that_fits() -> None:
    prompt = Prompt(TINY, 3600)
    assert prompt.action_text_ids[[0, 1, -1]].tolist() == [3967, 3966, 368]
    assert not prompt.action_text_ids.flags.writeable


def test_an_end_mark_of_two_ids_is_refused() -> None:
    files = dict(TINY._files)
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    vocabulary["<bar>"] = vocabulary.pop("|")
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "|"}, "content": "!!"}
    tokenizer = JsonTextTokenizer({**files, "tokenizer.json": json.dumps(content).encode()}, "here")
    with pytest.raises(PolicyError, match=r"2 ids for '\|'"):
        Prompt(tokenizer, 8)


# --- and back -------------------------------------------------------------------------------------------------------

PREFIX = TINY.encode("Action: ")
END = TINY.encode("|")[0]


def text_ids(*actions: int) -> list[int]:
    return [3967 - a for a in actions]


def padded_rows(*rows: list[int]) -> np.ndarray[Any, Any]:
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows])


def test_parsed_rows_by_hand() -> None:
    rows = padded_rows(
        [*PREFIX, *text_ids(7, 0, 1023), END, 1, 5],
        [*PREFIX, *text_ids(7), *PREFIX, *text_ids(8), END],
        [*PREFIX, END],
        [*PREFIX, *text_ids(7, 8)],
        [*text_ids(7, 8), END],
        [*PREFIX, *text_ids(7), 300, *text_ids(8), END],
        [*PREFIX, *text_ids(7, 1024), END],
        [*PREFIX[:2], *text_ids(7), END],
        [],
    )
    parsed = TINY_PROMPT.parse(rows)
    assert [row.ids.tolist() for row in parsed] == [[7, 0, 1023], [7, 8], [], [7, 8], [7, 8], [7], [7], [], []]
    assert [row.problem for row in parsed] == [
        None,
        None,
        None,
        "no end mark '|' among 5 ids",
        "the row does not begin with 'Action: '",
        "id 300 at position 4 is no action token",
        "id 2943 at position 4 is no action token",
        "the row does not begin with 'Action: '",
        "the row does not begin with 'Action: '",
    ]
    assert [row.problem for row in TINY_PROMPT.parse(rows, require_prefix=False)][4] is None
    lengths = [4, 0, 0, 0, 0, 0, 0, 0, 0]
    assert TINY_PROMPT.parse(rows, lengths)[0].problem == "no end mark '|' among 4 ids"


@given(
    st.lists(st.lists(st.integers(0, 1023), max_size=20), min_size=1, max_size=4),
    st.sampled_from(["lerobot", "openpi"]),
)
def test_targets_come_back(actions: list[list[int]], prompt_format: str) -> None:
    prompt = FORMATS[prompt_format]
    batch = prompt.training(["a"] * len(actions), [[0.0]] * len(actions), actions)
    start = int(batch.text_length[0]) + (prompt_format == "lerobot")
    parsed = prompt.parse(batch.ids[:, start:])
    assert [row.ids.tolist() for row in parsed] == actions
    assert all(row.problem is None for row in parsed)


def as_lerobot(ids: list[int]) -> list[int]:
    """lerobot's way from generated ids to action tokens: cut at the end mark, take out every prefix, map the rest."""
    if END in ids:
        ids = ids[: ids.index(END)]
    i = 0
    while i <= len(ids) - len(PREFIX):
        if ids[i : i + len(PREFIX)] == PREFIX:
            ids = ids[:i] + ids[i + len(PREFIX) :]
        else:
            i += 1
    return [3967 - x for x in ids]


@settings(max_examples=300)
@given(st.lists(st.one_of(st.sampled_from([*PREFIX, END, 1, *text_ids(0, 1, 1023)]), st.just(PREFIX[0])), max_size=14))
def test_parsing_equals_lerobots_way(ids: list[int]) -> None:
    parsed = TINY_PROMPT.parse(np.array([ids], int).reshape(1, -1), require_prefix=False)[0]
    expected = as_lerobot(ids)
    if all(0 <= token < 1024 for token in expected):
        assert parsed.ids.tolist() == expected
        assert (parsed.problem is None) == (END in ids)
    else:
        assert parsed.problem is not None
        assert parsed.ids.tolist() == expected[: len(parsed.ids)]


def test_what_cannot_be_parsed() -> None:
    with pytest.raises(PolicyError, match="whole numbers"):
        TINY_PROMPT.parse([1, 2])
    with pytest.raises(PolicyError, match="whole numbers"):
        TINY_PROMPT.parse([[1.0]])
    with pytest.raises(PolicyError, match="2 rows of generated ids, but lengths of shape"):
        TINY_PROMPT.parse([[1], [2]], [1])


def test_prompts_need_no_torch_and_no_sentencepiece() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'sentencepiece', 'safetensors'): sys.modules[name] = None\n"
        "from pi0_fast.prompt import Prompt\n"
        "from pi0_fast.text_tokenizer import load_text_tokenizer\n"
        "print(Prompt(load_text_tokenizer('byte'), 8).generation(['a'], [[0.0]]).ids.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(1, ")


def test_kept_tasks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi0_fast.prompt._TASKS_KEPT", 3)
    prompt = Prompt(TINY, 8)
    first = prompt.generation(["task 0"], [[0.0]])
    for n in range(10):
        prompt.generation([f"task {n}"], [[0.0]])
    assert len(prompt._heads) == 3
    assert prompt.generation(["task 0"], [[0.0]]).ids.tolist() == first.ids.tolist()


def test_a_text_tokenizer_of_another_kind_will_do() -> None:
    """Only what `TextTokenizer` promises is used."""
    assert issubclass(Uncut, TextTokenizer)
    assert (
        Prompt(UNCUT, 8).generation(["a"], [[0.0]]).ids.tolist()
        == Prompt(TINY, 8).generation(["a"], [[0.0]]).ids.tolist()
    )
