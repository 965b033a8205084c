"""From a batch to what the model takes: layouts, cameras, padded rows, bad input, and tokenizers that do not belong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from pi0_fast import FastTokenizer, Normalizer  # noqa: E402
from pi0_fast.actions.chunks import ActionSelection  # noqa: E402
from pi0_fast.policy_config import read_config  # noqa: E402
from pi0_fast.preparation import Preparation, Prepared, bound_tokenizer  # noqa: E402
from pi0_fast.processors import PolicyProcessors, read_processors  # noqa: E402
from pi0_fast.text_tokenizer import load_text_tokenizer  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402
from tiny_policies import (  # noqa: E402
    ACTION,
    CAMERAS,
    HORIZON,
    PIXELS,
    STATE,
    action_tokenizer,
    batch_of,
    frames,
    new_policy,
    published_tokenizer,
    row_of,
    settings,
    statistics,
    text_tokenizer,
)

CHECKPOINTS = ["lerobot_checkpoint", "lerobot_checkpoint_relative"]
TOP, WRIST = CAMERAS


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def preparation(cameras: int = 1, tokenizer: FastTokenizer | None = None, **changes: Any) -> Preparation:
    config = settings(cameras, **changes)
    given = statistics(config.use_relative_actions)
    tokenizer = action_tokenizer() if tokenizer is None else tokenizer
    if tokenizer.normalizer is not None:
        given["action"] = tokenizer.normalizer
    return Preparation(config, PolicyProcessors.from_statistics(config, given), text_tokenizer(), tokenizer)


def same(one: Prepared, other: Prepared) -> None:
    for name in ("ids", "valid", "causal", "label", "weight", "text_length"):
        np.testing.assert_array_equal(getattr(one.prompt, name), getattr(other.prompt, name), err_msg=name)
    np.testing.assert_array_equal(one.states, other.states)
    np.testing.assert_array_equal(one.camera_valid, other.camera_valid)
    assert (one.images is None) == (other.images is None)
    if one.images is not None:
        torch.testing.assert_close(one.images, other.images, rtol=0, atol=1e-6)


# --- lerobot's numbers ------------------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prompts_and_targets_are_lerobots(shared: Path, name: str) -> None:
    """From the raw batch; lerobot pads to fixed lengths and keeps text and target in two tensors."""
    folder = shared / "golden" / name
    config = read_config(folder)
    made = Preparation(
        config,
        read_processors(folder, config),
        load_text_tokenizer(config.text_tokenizer_name, base=folder),
        FastTokenizer.from_pretrained(folder / config.action_tokenizer_name),
    )
    vectors = load_file(folder / "vectors.safetensors")
    batch: dict[str, Any] = {key: value for key, value in vectors.items() if key.startswith(("observation.", "action"))}
    batch["task"] = json.loads((folder / "tasks.json").read_text())
    prepared = made.training(batch)
    prompt = prepared.prompt
    for row in range(2):
        text = vectors["pre.language.tokens"][row][vectors["pre.language.mask"][row]].tolist()
        target = vectors["pre.action.tokens"][row][vectors["pre.action.token_mask"][row]].tolist()
        assert prompt.ids[row][prompt.valid[row]].tolist() == [*text, *target]
        assert prompt.text_length[row] == len(text)
        assert prompt.ids[row][prompt.label[row]].tolist() == target[1:]
    assert prepared.counts["state_below"] == int((vectors["pre.state"] < -1).sum())
    # The second checkpoint declares an empty camera, which nobody need be told of.
    assert len(prepared.camera_valid) == sum("images" in key for key in batch)
    assert not [key for key in prepared.counts if key.startswith("missing")]


# --- layouts ----------------------------------------------------------------------------------------------------------


def hwc(images: Any) -> Any:
    return images.permute(0, 2, 3, 1)


LAYOUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "numpy": lambda b: {key: value.numpy() if torch.is_tensor(value) else value for key, value in b.items()},
    "float64": lambda b: {key: value.double() if torch.is_tensor(value) else value for key, value in b.items()},
    "uint8": lambda b: {**b, TOP: (b[TOP] * 255).round().to(torch.uint8)},
    "channels last": lambda b: {**b, TOP: hwc(b[TOP])},
    "uint8, channels last, numpy": lambda b: {**b, TOP: hwc((b[TOP] * 255).round().to(torch.uint8)).numpy()},
    "tuple of tasks": lambda b: {**b, "task": tuple(b["task"])},
    "array of tasks": lambda b: {**b, "task": np.array(b["task"])},
    "lists": lambda b: {**b, "observation.state": b["observation.state"].tolist(), "action": b["action"].tolist()},
    "list of images": lambda b: {**b, TOP: list(b[TOP])},
    "list of arrays": lambda b: {**b, TOP: list(b[TOP].numpy())},
    "more keys": lambda b: {**b, "index": torch.arange(3), "next.done": [False] * 3, TOP + "_is_pad": torch.zeros(3)},
    "nothing is padded": lambda b: {**b, "action_is_pad": torch.zeros(3, HORIZON, dtype=torch.bool)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_means_the_same(layout: str) -> None:
    made, batch = preparation(), batch_of()
    other = LAYOUTS[layout](dict(batch))
    same(made.training(other), made.training(batch))
    same(made.generation(other), made.generation(batch))


def test_without_a_batch_axis() -> None:
    made, batch = preparation(), batch_of(1)
    alone = {key: value[0] for key, value in batch.items()}
    same(made.training(alone), made.training(batch))
    alone["action_is_pad"] = np.zeros(HORIZON, bool)
    same(made.training(alone), made.training(batch))
    same(made.generation({**alone, TOP: hwc(batch[TOP])[0]}), made.generation(batch))


def test_one_task_serves_all_rows() -> None:
    made, batch = preparation(), batch_of()
    same(made.generation({**batch, "task": "stop"}), made.generation({**batch, "task": ["stop"] * 3}))


def test_what_is_prepared_by_hand() -> None:
    """The first row: state bins of the normalised state, and the tokenizer's own ids of the actions."""
    made, batch = preparation(), batch_of()
    prepared = made.training(batch)
    states, actions = batch["observation.state"].numpy(), batch["action"].numpy()
    range_ = statistics()["observation.state"]
    normalised = 2 * (states - range_.q01) / (range_.q99 - range_.q01) - 1
    bins = np.clip(np.floor((normalised[0] + 1) * 128), 0, 255).astype(int)
    tokenizer = action_tokenizer()
    text = text_tokenizer().encode_prompt(f"Task: pick up the cube, State: {' '.join(map(str, bins))};\n")
    ids = 1024 - 1 - 128 - np.array(tokenizer.encode_actions(actions)[0])
    target = [2, *text_tokenizer().encode("Action: "), *ids.tolist(), *text_tokenizer().encode("|"), 1]
    assert prepared.prompt.ids[0][prepared.prompt.valid[0]].tolist() == [*text, *target]
    np.testing.assert_array_equal(prepared.states, states)
    torch.testing.assert_close(prepared.images[:, 0], batch[TOP] * 2 - 1)
    assert prepared.counts["rows"] == 3
    assert prepared.counts["state_above"] == int((normalised > 1).sum())


def test_relative_actions_are_relative_to_the_raw_state_of_their_row() -> None:
    made = preparation(
        tokenizer=published_tokenizer(),
        use_relative_actions=True,
        relative_exclude_joints=["gripper"],
        action_feature_names=["a", "gripper", "b"],
    )
    batch = batch_of()
    prepared = made.training(batch)
    states, actions = batch["observation.state"].numpy(), batch["action"].numpy()
    relative = actions - states[:, None, :3] * [1, 0, 1]
    normalised = np.clip(made.processors.action.apply(relative.astype(np.float32)), -1, 1)
    ids = made.action_tokenizer.encode(normalised)
    for row in range(3):
        labels = prepared.prompt.ids[row][prepared.prompt.label[row]]
        start = len(made.prompt.action_prefix_ids)
        assert (1024 - 1 - 128 - labels[start:-2]).tolist() == ids[row]
    chunks, info = made.actions(ids, states)
    assert info.invalid_count == 0
    decoded = made.processors.action.invert(made.action_tokenizer.decode(ids))
    np.testing.assert_allclose(chunks - decoded, np.broadcast_to(states[:, None, :3] * [1, 0, 1], chunks.shape), 1e-4)


def test_renamed_inputs() -> None:
    batch = batch_of(actions=False)
    plain = preparation()
    renamed = Preparation(
        plain.config,
        plain.processors.with_rename_map({"cam": TOP, "proprio": "observation.state"}, plain.config),
        text_tokenizer(),
        action_tokenizer(),
    )
    other = {"cam": batch[TOP], "proprio": batch["observation.state"], "task": batch["task"]}
    same(renamed.generation(other), plain.generation(batch))


def test_workers_get_the_same() -> None:
    """Used, pickled, used: as a data loader's workers do it; what they make travels back the same way."""
    made, batch = preparation(), batch_of()
    first = made.training(batch)
    copy = pickle.loads(pickle.dumps(made))
    again = pickle.loads(pickle.dumps(copy.training(batch)))
    same(again, first)
    assert again.counts == first.counts


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's way of starting workers
def test_a_data_loader_with_workers() -> None:
    made, batch = preparation(), batch_of(4)
    items = [{key: value[row] for key, value in batch.items()} for row in range(4)]

    class Collate:
        def __call__(self, rows: list[dict[str, Any]]) -> Prepared:
            return made.training(torch.utils.data.default_collate(rows))

    loader = torch.utils.data.DataLoader(items, batch_size=2, collate_fn=Collate(), num_workers=1)
    for prepared, rows in zip(loader, ([0, 1], [2, 3]), strict=True):
        same(prepared, made.training(torch.utils.data.default_collate([items[row] for row in rows])))


# --- padded rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["tensor", "list"])
def test_rows_with_padded_steps_are_left_out_and_counted(images: str) -> None:
    made, batch = preparation(), batch_of(4)
    padded = torch.zeros(4, HORIZON, dtype=torch.bool)
    padded[1, -1] = padded[3, 2:] = True
    batch["action"][1, -1] = torch.nan  # whatever stands there
    kept = {key: [value[0], value[2]] if key == "task" else value[[0, 2]] for key, value in batch.items()}
    if images == "list":
        batch[TOP] = list(batch[TOP])
    prepared = made.training({**batch, "action_is_pad": padded})
    same(prepared, made.training(kept))
    assert prepared.counts["padded_rows"] == 2
    assert prepared.counts["rows"] == 2


def test_where_all_rows_are_padded_one_stays_without_weight() -> None:
    made, batch = preparation(), batch_of(2)
    prepared = made.training({**batch, "action_is_pad": torch.ones(2, HORIZON)})
    one = made.training(row_of(batch, 0))
    same(prepared, replace(one, prompt=replace(one.prompt, weight=np.zeros_like(one.prompt.weight))))
    assert prepared.counts["padded_rows"] == 2


# --- cameras ----------------------------------------------------------------------------------------------------------


def test_a_missing_camera_is_left_out_and_counted() -> None:
    made, batch = preparation(2), batch_of(cameras=2)
    del batch[WRIST]
    prepared = made.generation(batch)
    assert prepared.images.shape == (3, 1, 3, PIXELS, PIXELS)
    assert prepared.camera_valid.tolist() == [True]
    assert prepared.counts[f"missing {WRIST}"] == 3
    assert made.generation({**batch, WRIST: None}).counts[f"missing {WRIST}"] == 3


@pytest.mark.parametrize("switch", ["attend_missing_cameras", "count_padding_in_positions"])
def test_a_missing_camera_may_be_a_black_image_in_its_place(switch: str) -> None:
    """openpi: seen, or not seen but taking positions; the first of two cameras is missing."""
    made, batch = preparation(2, **{switch: True}), batch_of(cameras=2)
    del batch[TOP]
    prepared = made.generation(batch)
    assert prepared.images.shape == (3, 2, 3, PIXELS, PIXELS)
    assert bool((prepared.images[:, 0] == -1).all())
    torch.testing.assert_close(prepared.images[:, 1], batch[WRIST] * 2 - 1)
    assert prepared.camera_valid.tolist() == [switch == "attend_missing_cameras", True]
    assert prepared.counts[f"missing {TOP}"] == 3


def test_a_declared_empty_camera_is_no_missing_one() -> None:
    """Nor is a camera that the policy does not know mistaken for it."""
    made = preparation(1, empty_cameras=1)
    batch = {**batch_of(), "observation.images.side": torch.zeros(3, 3, 8, 8)}
    prepared = made.generation(batch)
    assert prepared.camera_valid.tolist() == [True]
    assert sorted(prepared.counts) == ["rows", "state_above", "state_below", "unused observation.images.side"]
    attended = preparation(1, empty_cameras=1, attend_missing_cameras=True).generation(batch)
    assert attended.camera_valid.tolist() == [True, True]


def test_a_policy_without_cameras_takes_none() -> None:
    prepared = preparation(0).generation(batch_of(cameras=0, actions=False))
    assert prepared.images is None
    assert prepared.camera_valid.shape == (0,)


@pytest.mark.parametrize("cameras", [0, 1])
def test_a_camera_that_the_policy_does_not_know_is_counted(cameras: int) -> None:
    batch = {**batch_of(cameras=cameras, actions=False), "observation.images.other": np.zeros((3, 5, 5, 3), np.uint8)}
    batch["observation.images.other_is_pad"] = [False] * 3
    counts = preparation(cameras).generation(batch).counts
    assert {name: count for name, count in counts.items() if "images" in name} == {"unused observation.images.other": 3}


def test_large_images_are_resized_and_antialiased_where_asked() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 60, 80, 3), np.uint8)
    batch = {**batch_of(), TOP: pixels}
    plain, smooth = (preparation(antialias_images=switch).generation(batch).images for switch in (False, True))
    assert plain.shape == smooth.shape == (3, 1, 3, PIXELS, PIXELS)
    assert bool((plain[..., :3, :] == -1).all())  # 21 of 28 rows are picture
    assert float(smooth[..., 4:24, :].std()) < float(plain[..., 4:24, :].std()) / 1.3


# --- what is counted --------------------------------------------------------------------------------------------------


def test_targets_over_the_budget_are_whole_and_counted() -> None:
    batch = batch_of()
    lengths = preparation().training(batch).prompt.label.sum(axis=1) + 1
    budget = int(np.sort(lengths)[1])
    prepared = preparation(max_action_tokens=budget).training(batch)
    assert prepared.counts["over_budget"] == int((lengths > budget).sum()) > 0
    same(prepared, preparation().training(batch))


def test_actions_outside_the_range_are_clipped_and_counted() -> None:
    """As the tokenizer was fitted; what lerobot trained was not clipped, and only saturates."""
    batch = batch_of()
    batch["action"][0, 2, 1] += 5.0
    batch["action"][2, :, 0] -= 9.0
    clipping, lerobots = preparation(), preparation(tokenizer=published_tokenizer(), action_clip=False)
    prepared = clipping.training(batch)
    normalised = clipping.processors.action.apply(batch["action"].numpy())
    assert float(np.abs(normalised).max()) == 1.0
    ids = 1024 - 1 - 128 - prepared.prompt.ids[0][prepared.prompt.label[0]]
    assert ids[len(clipping.prompt.action_prefix_ids) : -2].tolist() == action_tokenizer().encode(normalised)[0]
    unclipped = replace(clipping.processors.action, clip=False).apply(batch["action"].numpy())
    assert prepared.counts["clipped_values"] == int((np.abs(unclipped) > 1).sum()) >= 7
    other = lerobots.training(batch)
    assert other.counts["clipped_values"] == 0
    assert other.counts["saturated_coefficients"] > 0


def test_targets_are_encoded_as_the_tokenizer_says_and_rows_beyond_its_bound_are_counted() -> None:
    tokenizer = action_tokenizer().bound(HORIZON, ACTION)
    tokenizer.rate_weight, tokenizer.max_error = 2.0, 1e-6
    prepared, batch = preparation(tokenizer=tokenizer), batch_of()
    normalised = prepared.processors.action.apply(batch["action"].numpy())
    assert prepared.training(batch).counts["over_error"] == len(normalised)
    tokenizer.max_error = None
    made = prepared.training(batch)
    assert made.counts["over_error"] == 0
    wanted = action_tokenizer().encode(normalised, rate_weight=2.0)
    assert wanted != action_tokenizer().encode(normalised)
    for row, ids in enumerate(wanted):
        found = 1024 - 1 - 128 - made.prompt.ids[row][made.prompt.label[row]]
        assert found[len(prepared.prompt.action_prefix_ids) : -2].tolist() == ids


@pytest.mark.parametrize(("clip", "bin_"), [(True, 0), (False, -1)])
def test_states_below_the_range(clip: bool, bin_: int) -> None:
    batch = batch_of(1)
    batch["observation.state"][0] = torch.tensor([-100.0, 0.0, -10.0, 99.0])
    made = preparation(state_clip=clip)
    prepared = made.generation(batch)
    assert (prepared.counts["state_below"], prepared.counts["state_above"]) == (1, 1)
    text = "".join(made.prompt.text_tokenizer.piece(i) for i in prepared.prompt.ids[0])
    assert f"State:\u2581{bin_}\u2581" in text
    assert "\u2581255;" in text


# --- bad input --------------------------------------------------------------------------------------------------------


def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
    return lambda batch: {key: value for key, value in batch.items() if key not in keys}


def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda batch: {**batch, key: value(batch[key]) if callable(value) else value}


def at(place: tuple[int, ...], value: float) -> Callable[[Any], Any]:
    def changed(tensor: Any) -> Any:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return changed


STATE_KEY = "observation.state"
BAD: list[tuple[str, Callable[[dict[str, Any]], Any], list[str]]] = [
    ("no mapping", lambda batch: list(batch), ["dictionary", "list"]),
    ("no state", without(STATE_KEY), ["no 'observation.state'", TOP, "rename_map"]),
    ("no task", without("task"), ["no 'task'"]),
    ("empty task", put("task", ["stop", " ", "stop"]), ["row 1", "' '"]),
    ("number as task", put("task", ["stop", "stop", 3]), ["row 2", "3"]),
    ("one number", put("task", 3), ["'task'", "int"]),
    ("two tasks", put("task", ["stop", "stop"]), ["2 texts", "3 rows"]),
    ("long task", put("task", ["stop", "x" * 200, "stop"]), ["row 1", "tokenizer_max_length=100"]),
    ("narrow state", put(STATE_KEY, lambda s: s[:, :3]), ["observation.state", "[3, 3]", "[batch, 4]"]),
    ("wide state", put(STATE_KEY, lambda s: torch.cat((s, s), 1)), ["observation.state", "[3, 8]"]),
    ("state with a time axis", put(STATE_KEY, lambda s: s[:, None]), ["[3, 1, 4]"]),
    ("no rows", put(STATE_KEY, lambda s: s[:0]), ["observation.state", "[0, 4]"]),
    ("words as state", put(STATE_KEY, np.array([["a"] * 4] * 3)), ["observation.state", "numbers"]),
    ("NaN", put(STATE_KEY, at((1, 2), np.nan)), ["observation.state", "row 1", "dimension 2", "nan"]),
    ("infinity", put(STATE_KEY, at((2, 0), -np.inf)), ["observation.state", "row 2", "dimension 0"]),
    (
        "beyond float32",
        put(STATE_KEY, lambda s: np.where(np.arange(4) == 3, 1e300, s.numpy().astype(np.float64))),
        ["observation.state", "row 0", "dimension 3"],
    ),
    ("no image", without(TOP), [TOP, "none at all", "rename_map"]),
    (
        "wrong key",
        lambda batch: {**without(TOP)(batch), "observation.images.front": batch[TOP]},
        [TOP, "has observation.images.front", f"rename_map={{'observation.images.front': '{TOP}'}}"],
    ),
    (
        "wrong key of a list",
        lambda batch: {**without(TOP)(batch), "observation.image": list(batch[TOP])},
        [TOP, f"rename_map={{'observation.image': '{TOP}'}}"],
    ),
    ("0 to 255 as floats", put(TOP, lambda i: i * 255), [TOP, "image 0", "[0, 1]", "255"]),
    ("-1 to 1", put(TOP, lambda i: i * 2 - 1), [TOP, "[0, 1]"]),
    ("NaN image", put(TOP, at((1, 0, 3, 3), np.nan)), [TOP, "image 1", "NaN"]),
    ("grey images", put(TOP, lambda i: i[:, :1]), [TOP, "[3, 1, 28, 28]", "grey"]),
    ("int64 images", put(TOP, lambda i: (i * 255).long()), [TOP, "int64"]),
    ("too few images", put(TOP, lambda i: i[:2]), [TOP, "2 images", "3 rows"]),
    ("one image for all", put(TOP, lambda i: i[0]), [TOP, "1 images", "3 rows"]),
    ("a text", put(TOP, "photo.png"), [TOP, "str"]),
    (
        "images of many sizes",
        put(TOP, lambda i: [i[0].numpy(), i[1, :, :9].numpy(), i[2].numpy()]),
        [TOP, "one size"],
    ),
    ("tensors of many sizes", put(TOP, lambda i: [i[0], i[1, :, :9], i[2]]), [TOP, "one size"]),
]
BAD_TRAINING: list[tuple[str, Callable[[dict[str, Any]], Any], list[str]]] = [
    ("no actions", without("action"), ["no 'action'"]),
    ("short chunks", put("action", lambda a: a[:, :5]), ["'action'", "[3, 5, 3]", "[3, 6, 3]"]),
    ("narrow actions", put("action", lambda a: a[..., :2]), ["'action'", "[3, 6, 2]"]),
    ("fewer chunks", put("action", lambda a: a[:2]), ["'action'", "[2, 6, 3]"]),
    ("one chunk", put("action", lambda a: a[0]), ["'action'", "[1, 6, 3]"]),
    ("NaN action", put("action", at((2, 1, 0), np.nan)), ["action", "row 2", "step 1", "dimension 0"]),
    ("flags of another length", put("action_is_pad", np.zeros((3, 5), bool)), ["'action_is_pad'", "[3, 5]"]),
    ("flags of other rows", put("action_is_pad", np.zeros((2, 6), bool)), ["'action_is_pad'", "[2, 6]"]),
    ("one flag for a row", put("action_is_pad", np.zeros(3, bool)), ["'action_is_pad'", "[1, 3]"]),
    ("words as flags", put("action_is_pad", np.array([["no"] * 6] * 3)), ["'action_is_pad'", "numbers"]),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
@pytest.mark.parametrize("training", [False, True])
def test_bad_input_is_named(training: bool, change: Callable[[dict[str, Any]], Any], words: list[str]) -> None:
    made, batch = preparation(), change(batch_of())
    with pytest.raises(PolicyError) as raised:
        (made.training if training else made.generation)(batch)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in BAD_TRAINING], ids=[c[0] for c in BAD_TRAINING])
def test_bad_actions_are_named(change: Callable[[dict[str, Any]], Any], words: list[str]) -> None:
    with pytest.raises(PolicyError) as raised:
        preparation().training(change(batch_of()))
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_actions_that_are_no_normalised_ones_are_an_error() -> None:
    """Statistics of other data, without clipping: 790 is refused by the tokenizer, not encoded as garbage."""
    batch = batch_of()
    batch["action"] *= 5000
    with pytest.raises(PolicyError, match=r"'action' after normalisation \(QUANTILES\).*no normalised action"):
        preparation(tokenizer=published_tokenizer(), action_clip=False).training(batch)


def test_one_of_two_cameras_under_another_name() -> None:
    batch = batch_of(cameras=2)
    batch["observation.images.hand"] = batch.pop(WRIST)
    with pytest.raises(PolicyError, match=r"lacks the images .*wrist and has .*hand.*rename_map=.*leave it out"):
        preparation(2).generation(batch)


# --- tokenizers that belong, and others -------------------------------------------------------------------------------


def test_a_published_tokenizer_is_bound_to_the_policys_chunks() -> None:
    """Also where its files name other chunks, as those of lerobot's checkpoints do."""
    config = settings()
    processors = PolicyProcessors.from_statistics(config, statistics())
    other = FastTokenizer(action_tokenizer().vocabulary, scale=20.0, time_horizon=50, action_dim=14)
    by_dimension = FastTokenizer(published_tokenizer().vocabulary, order="dimension")
    assert bound_tokenizer(by_dimension, config, processors).order == "dimension"
    for tokenizer in (published_tokenizer(), other):
        bound = bound_tokenizer(tokenizer, config, processors)
        assert (bound.time_horizon, bound.action_dim, bound.scale) == (HORIZON, ACTION, 20.0)
    scales = FastTokenizer(action_tokenizer().vocabulary, scale=[1.0, 2.0], action_dim=2)
    with pytest.raises(PolicyError, match="does not suit 3 dimensions"):
        bound_tokenizer(scales, config, processors)


def fitted(selection: ActionSelection | None = None, mode: str = "QUANTILES", horizon: int = HORIZON) -> FastTokenizer:
    _, chunks = frames()
    chunks = chunks[:, :horizon]
    normalizer = Normalizer.fit(lambda: [chunks.reshape(-1, ACTION)], mode, clip=True, selection=selection)
    return FastTokenizer.fit(normalizer.apply(chunks), vocab_size=256, normalizer=normalizer)


def bind(tokenizer: FastTokenizer, relative: bool = False, given: dict[str, Any] | None = None, **changes: Any) -> Any:
    names = {"use_relative_actions": True, "action_feature_names": ["a", "gripper", "b"]} if relative else {}
    config = settings(**{**names, **changes})
    return bound_tokenizer(tokenizer, config, PolicyProcessors.from_statistics(config, given or statistics()))


def test_a_tokenizer_of_the_same_chunks_belongs() -> None:
    plain = action_tokenizer()
    assert bind(plain, given={**statistics(), "action": plain.normalizer}) is plain
    assert bind(plain) is plain  # the same statistics by another way
    bare = FastTokenizer.fit(np.zeros((3, HORIZON, ACTION), np.float32))
    assert bind(bare) is bare
    relative = fitted(ActionSelection(ACTION, (0, 1, 2), (0, 2), (0, 2), STATE))
    assert bind(relative, relative=True) is relative


RANGES = {"min": [-9, -9, -99], "max": [9, 9, 99]}
OTHERS: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("horizon", lambda: bind(fitted(horizon=5)), ["5 steps and 3 dimensions", "chunk_size=6", "set chunk_size"]),
    ("policy's horizon", lambda: bind(fitted(), chunk_size=9), ["6 steps", "chunk_size=9"]),
    (
        "dimensions",
        lambda: bind(FastTokenizer.fit(np.zeros((3, HORIZON, 2), np.float32))),
        ["2 dimensions", "chunk_size=6 and 3"],
    ),
    ("mode", lambda: bind(fitted(mode="MIN_MAX")), ["other units", "dimension 0", "MIN_MAX", "QUANTILES"]),
    (
        "units",
        lambda: bind(fitted(), given={**statistics(), "action": {**RANGES, "q01": [0, -1, -99], "q99": [1, 1, 99]}}),
        ["other units", "from 0 to 1"],
    ),
    (
        "absolute policy",
        lambda: bind(fitted(ActionSelection(ACTION, (0, 1, 2), (0, 2), (0, 2)))),
        ["relative actions (dimension 0 to state 0, 2 to state 2)", "has absolute actions"],
    ),
    (
        "absolute tokenizer",
        lambda: bind(fitted(ActionSelection(ACTION, (0, 1, 2))), relative=True),
        ["fitted on absolute actions", "has relative actions (dimension 0 to state 0"],
    ),
    (
        "other dimensions relative",
        lambda: bind(fitted(ActionSelection(ACTION, (0, 1, 2), (0, 1, 2), (0, 1, 2))), relative=True),
        ["1 to state 1", "relative_exclude_joints"],
    ),
    (
        "relative to other states",
        lambda: bind(fitted(ActionSelection(ACTION, (0, 1, 2), (0, 2), (0, 3))), relative=True),
        ["2 to state 3"],
    ),
]


@pytest.mark.parametrize(("made", "words"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS])
def test_a_tokenizer_of_other_chunks_or_units_is_refused(made: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(PolicyError) as raised:
        made()
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_vocabularies_that_clash_name_both_tokenizers() -> None:
    with pytest.raises(PolicyError, match=r"text tokenizer .* with action tokenizer .*fast_skip_tokens=600"):
        preparation(fast_skip_tokens=600)


# --- openpi -----------------------------------------------------------------------------------------------------------


def test_openpis_layout() -> None:
    batch = {**batch_of(1), "task": ["Put_It\nDOWN"]}
    made = preparation(prompt_format="openpi")
    prepared = made.training(batch)
    prompt = prepared.prompt
    begin = int(prompt.text_length[0])
    text = "".join(made.prompt.text_tokenizer.piece(i) for i in prompt.ids[0, :begin])
    assert text.startswith("<bos>Task:\u2581put\u2581it\ndown,\u2581State:")
    assert prompt.ids[0, begin : begin + 3].tolist() == text_tokenizer().encode("Action: ")  # no second bos
    assert prompt.label[0, begin]
    before = made.generation(batch).prompt
    assert before.ids[0].tolist() == prompt.ids[0, : begin + 3].tolist()


def test_the_whole_policy_uses_it() -> None:
    """The policy's own preparation is this one."""
    policy, batch = new_policy(), batch_of()
    same(policy.preparation.generation(batch), preparation().generation(batch))
