"""Normalisation and relative actions as lerobot computes them, its processor files, and what is refused in them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file

from pi0_fast.actions.normalize import NormalizationMode, Normalizer, Statistics, exact_statistics
from pi0_fast.policy_config import PI0FastConfig, read_config, write_config
from pi0_fast.processors import (
    FeatureNormalizer,
    PolicyProcessors,
    RelativeActions,
    read_processors,
    write_processors,
)
from pi0_fast.types import PolicyError

CHECKPOINTS = ["lerobot_checkpoint", "lerobot_checkpoint_relative"]
MODES = [mode for mode in NormalizationMode if mode is not NormalizationMode.IDENTITY]
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
PRE_STATE = "policy_preprocessor_step_3_normalizer_processor.safetensors"
POST_STATE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


def rows(seed: int = 0, count: int = 400) -> np.ndarray:
    """Rows [count, 3]: an ordinary joint, one that never moves, one that moves in a few frames only."""
    generator = np.random.default_rng(seed)
    values = np.empty((count, 3), np.float32)
    values[:, 0] = generator.normal(0.3, 0.5, count)
    values[:, 1] = 1.5
    values[:, 2] = np.where(np.arange(count) < 2, 4.0, generator.normal(0, 1e-4, count))
    return values


def noise(count: int, size: int) -> np.ndarray:
    """Uniform numbers in [0, 1), the same every time."""
    return np.random.default_rng(size).random((count, size), np.float32)


def statistics_of(values: np.ndarray) -> Statistics:
    return exact_statistics(lambda: [values])


def robot(**changes: Any) -> PI0FastConfig:
    features = {
        "input_features": {
            "observation.images.top": {"type": "VISUAL", "shape": [3, 48, 64]},
            "observation.state": {"type": "STATE", "shape": [4]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
    }
    return PI0FastConfig(**{**features, **changes})


def new_processors(config: PI0FastConfig) -> PolicyProcessors:
    """For `robot()`, with ordinary statistics."""
    generator = np.random.default_rng(1)
    return PolicyProcessors.from_statistics(
        config,
        {
            "observation.state": statistics_of(generator.normal(1, 2, (200, 4)).astype(np.float32)),
            "action": statistics_of(generator.normal(0, 1, (200, 3)).astype(np.float32)),
        },
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint's configuration and processors, written by us for `robot()`, as lerobot would leave them."""
    config = robot(state_clip=False, action_clip=False)
    write_config(tmp_path, config)
    (tmp_path / "pi0_fast.json").unlink()
    write_processors(tmp_path, config, new_processors(config))
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def step(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in content["steps"] if entry["registry_name"] == name)


# --- golden -------------------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_lerobots_numbers_to_the_last_bit(shared: Path, name: str) -> None:
    """State and action into the model, and the chunk out of it, as lerobot 0.6.1 computed them with torch."""
    directory = shared / "golden" / name
    processors = read_processors(directory, read_config(directory))
    vectors = load_file(directory / "vectors.safetensors")
    state = vectors["observation.state"]
    np.testing.assert_array_equal(processors.state.apply(state), vectors["pre.state"])
    np.testing.assert_array_equal(processors.normalize_actions(vectors["action"], state), vectors["pre.action"])
    np.testing.assert_array_equal(processors.restore_actions(vectors["chunk_normalised"], state), vectors["chunk"])


@pytest.mark.golden
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_lerobots_files_come_back_byte_for_byte(shared: Path, tmp_path: Path, name: str) -> None:
    directory = shared / "golden" / name
    config = read_config(directory)
    write_processors(tmp_path, config, read_processors(directory, config))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted([PRE, POST, PRE_STATE, POST_STATE])
    for file in files:
        assert (tmp_path / file).read_bytes().rstrip(b"\n") == (directory / file).read_bytes().rstrip(b"\n"), file


@pytest.mark.golden
def test_the_relative_checkpoint_keeps_its_gripper_absolute(shared: Path) -> None:
    directory = shared / "golden" / "lerobot_checkpoint_relative"
    relative = read_processors(directory, read_config(directory)).relative
    assert relative is not None
    assert relative.mask == (True, True, True, True, False)


# --- the formula --------------------------------------------------------------------------------------------


def slowly(mode: NormalizationMode, value: float, first: float, second: float, inverse: bool) -> np.float32:
    """lerobot's formula for one number, every operation rounded to float32."""
    f = np.float32
    x, a, b = f(value), f(first), f(second)
    if mode is NormalizationMode.MEAN_STD:
        return f(f(x * b) + a) if inverse else f(f(x - a) / f(b + f(1e-8)))
    width = f(b - a) if b != a else f(1e-8)
    if inverse:
        return f(f(f(f(x + f(1)) * width) / f(2)) + a)
    return f(f(f(f(2) * f(x - a)) / width) - f(1))


FINITE = st.floats(-1e3, 1e3, width=32)


@given(st.sampled_from(MODES), FINITE, FINITE, st.floats(0, 1e3, width=32))
def test_equal_to_the_formula_number_by_number(mode: NormalizationMode, value: float, low: float, width: float) -> None:
    second = width if mode is NormalizationMode.MEAN_STD else float(np.float32(low) + np.float32(width))
    statistics = {name: np.array([number], np.float32) for name, number in zip(mode.needs, (low, second), strict=True)}
    normalizer = FeatureNormalizer("x", mode, 1, statistics)
    with np.errstate(over="ignore"):
        for inverse, function in ((False, normalizer.apply), (True, normalizer.invert)):
            assert function([value])[0] == slowly(mode, value, low, second, inverse)


def test_worked_numbers() -> None:
    quantiles = FeatureNormalizer(
        "x",
        NormalizationMode.QUANTILES,
        2,
        {"q01": np.array([0, -1], np.float32), "q99": np.array([4, 1], np.float32)},
    )
    np.testing.assert_array_equal(
        quantiles.apply([[0, -1], [4, 1], [5, 0], [-2, 3]]), [[-1, -1], [1, 1], [1.5, 0], [-2, 3]]
    )
    np.testing.assert_array_equal(quantiles.invert([1.5, -3]), [5, -3])
    clipping = dataclasses.replace(quantiles, clip=True)
    np.testing.assert_array_equal(clipping.apply([5, -7]), [1, -1])
    np.testing.assert_array_equal(clipping.invert([1.5, -3]), [5, -3])
    spread = FeatureNormalizer(
        "x", NormalizationMode.MEAN_STD, 1, {"mean": np.array([2], np.float32), "std": np.array([0.5], np.float32)}
    )
    np.testing.assert_array_equal(spread.apply([[3]]), [[2]])
    np.testing.assert_array_equal(spread.invert([[-1]]), [[1.5]])


@pytest.mark.parametrize("mode", list(NormalizationMode))
def test_every_layout_gives_a_fresh_float32_array(mode: NormalizationMode) -> None:
    normalizer = FeatureNormalizer.fit("x", mode, statistics_of(np.random.default_rng(0).random((50, 3))))
    values = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
    expected = normalizer.apply(values)
    for other in (values.astype(np.float64), values.tolist(), np.asfortranarray(values), values[::-1][::-1]):
        result = normalizer.apply(other)
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected)
    assert not np.shares_memory(expected, values)
    assert not np.shares_memory(normalizer.invert(values), values)
    assert normalizer.apply(np.zeros((0, 3))).shape == (0, 3)
    assert normalizer.apply(values.reshape(2, 2, 3)).shape == (2, 2, 3)


def test_torch_tensors_are_read() -> None:
    torch = pytest.importorskip("torch")
    normalizer = FeatureNormalizer.fit("x", NormalizationMode.QUANTILES, statistics_of(rows()[:, :1]))
    values = torch.tensor([[0.25], [0.5]], requires_grad=True)
    np.testing.assert_array_equal(normalizer.apply(values), normalizer.apply([[0.25], [0.5]]))
    np.testing.assert_array_equal(normalizer.apply(values.bfloat16()), normalizer.apply([[0.25], [0.5]]))


BAD_VALUES = [
    ([[0, 0, np.nan]], r"observation\.state, row 0, dimension 2 \(c\): the value nan is not finite"),
    ([[0, 0, 0], [0, np.inf, 0]], r"observation\.state, row 1, dimension 1 \(b\): the value inf is not finite"),
    ([[[0, 0, 0], [-np.inf, 0, 0]]], r"row 0, step 1, dimension 0 \(a\): the value -inf"),
    ([1e300, 0, 0], r"observation\.state, dimension 0 \(a\): the value inf is not finite in float32"),
    ([3e38, 0, 0], r"dimension 0 \(a\): the value .* leaves float32 when it is scaled"),
    ([0, 0], r"has the shape \(2,\); its last axis must be the 3 dimensions"),
    (1.0, r"has the shape \(\); its last axis"),
    ([["a", "b", "c"]], "must be numbers"),
    ([[1, 2, 3], [1, 2]], "cannot be read as an array"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=range(len(BAD_VALUES)))
@pytest.mark.parametrize("clip", [False, True])
def test_bad_values_are_named(values: Any, message: str, clip: bool) -> None:
    low, high = np.zeros(3, np.float32), np.full(3, 0.5, np.float32)
    normalizer = FeatureNormalizer(
        "observation.state", NormalizationMode.QUANTILES, 3, {"q01": low, "q99": high}, clip, names=("a", "b", "c")
    )
    with pytest.raises(PolicyError, match=message):
        normalizer.apply(values)


def test_bad_values_are_named_on_the_way_back_and_without_normalisation() -> None:
    identity = FeatureNormalizer("action", NormalizationMode.IDENTITY, 2)
    with pytest.raises(PolicyError, match="action, row 0, dimension 1: the value nan"):
        identity.apply([[0, np.nan]])
    with pytest.raises(PolicyError, match="normalised action, row 0, dimension 0: the value inf"):
        identity.invert([[np.inf, 0]])


@pytest.mark.parametrize(
    ("mode", "statistics", "message"),
    [
        ("QUANTILES", {}, "x: normalisation QUANTILES needs the statistics q01, q99; q01, q99 missing .present: none"),
        ("MEAN_STD", {"mean": [0, 0]}, "std missing .present: mean"),
        ("MEAN_STD", {"mean": [0, 0], "std": [1, -1]}, r"dimension 1 cannot be right: mean = 0.0, std = -1.0"),
        ("MIN_MAX", {"min": [0, 2], "max": [1, 1]}, r"dimension 1 cannot be right: min = 2.0, max = 1.0"),
        ("MIN_MAX", {"min": [0, np.inf], "max": [1, np.inf]}, "statistic min of dimension 1 is inf"),
        ("MIN_MAX", {"min": [0], "max": [1]}, r"statistic min is float32 of shape \(1,\)"),
    ],
)
def test_impossible_statistics_are_named(mode: str, statistics: dict[str, list[float]], message: str) -> None:
    arrays = {name: np.array(values, np.float32) for name, values in statistics.items()}
    with pytest.raises(PolicyError, match=message):
        FeatureNormalizer("x", NormalizationMode(mode), 2, arrays)


# --- new policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_still_joints_and_rare_motion_get_a_guarded_range(mode: NormalizationMode) -> None:
    """What elsewhere divides by 1e-8 or by a sliver: one range in both directions, said once."""
    values = rows()
    expected = "action: dimension 1" if mode is NormalizationMode.MIN_MAX else r"action: dimension 1, dimension 2"
    if mode is NormalizationMode.MEAN_STD:
        expected = "action: dimension 1 never"
    with pytest.warns(UserWarning, match=expected) as caught:
        normalizer = FeatureNormalizer.fit("action", mode, statistics_of(values))
    assert len(caught) == 1
    assert normalizer.degenerate == ()
    normalised = normalizer.apply(values)
    assert np.abs(normalised[:, 1]).max() == 0
    assert np.abs(normalised).max() < 30
    np.testing.assert_allclose(normalizer.invert(normalised), values, atol=2e-6)


@given(
    st.sampled_from([NormalizationMode.QUANTILES, NormalizationMode.QUANTILE10, NormalizationMode.MIN_MAX]),
    st.floats(-1e4, 1e4, width=32),
    st.floats(0, 1e2, width=32),
    st.integers(0, 1000),
)
def test_agrees_with_the_normaliser_of_the_tokenizer(
    mode: NormalizationMode, offset: float, spread: float, seed: int
) -> None:
    """Which works in float64; in float32 the range may lose its last digits but never becomes zero."""
    generator = np.random.default_rng(seed)
    values = (np.float32(offset) + np.float32(spread) * generator.standard_normal((40, 2)).astype(np.float32)).astype(
        np.float32
    )
    statistics = statistics_of(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = FeatureNormalizer.fit("action", mode, statistics, clip=mode.clips)
    low, high = (ours.statistics[name].astype(np.float64) for name in mode.needs)
    assert (high > low).all()
    normalised = ours.apply(values)
    other = Normalizer.from_statistics(statistics, mode)
    # Rounding an end of the range to float32 moves values by that much of the range.
    spacing = 8 * np.spacing(np.abs(values).max(axis=0)).astype(np.float64)
    if (spacing < 1e-3 * (other.high - other.low)).all():
        np.testing.assert_allclose(
            normalised, other.apply(values), rtol=0, atol=(4 * spacing / (high - low)).max() + 1e-6
        )
    inside = (values >= low) & (values <= high)
    back = ours.invert(normalised)
    assert (np.abs(back.astype(np.float64) - values) <= spacing + 1e-6 * (high - low))[inside].all()


def test_a_range_that_float32_does_not_resolve_becomes_min_to_max() -> None:
    spacing = float(np.spacing(np.float32(1000)))
    statistics = {
        "min": [1000],
        "max": [1000 + 20 * spacing],
        "q01": [1000 + spacing / 10],
        "q99": [1000 + 0.4 * spacing],
    }
    other = Normalizer.from_statistics(statistics, "QUANTILES")
    assert other.guarded == ()
    assert np.float32(other.low[0]) == np.float32(other.high[0])
    with pytest.warns(UserWarning, match="dimension 0 never move"):
        normalizer = FeatureNormalizer.fit("action", NormalizationMode.QUANTILES, statistics)
    np.testing.assert_array_equal(normalizer.apply([[1000], [1000 + 20 * spacing]]), [[-1], [1]])


def test_ordinary_dimensions_keep_their_statistics_to_the_last_bit() -> None:
    statistics = statistics_of(rows())
    for mode in MODES:
        with pytest.warns(UserWarning, match="dimension 1"):
            normalizer = FeatureNormalizer.fit("action", mode, statistics)
        for name, values in normalizer.statistics.items():
            assert values[0] == np.float32(getattr(statistics, name)[0]), (mode, name)


def test_a_tiny_std_is_said() -> None:
    values = 1e-6 * np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    with pytest.warns(UserWarning, match="x: std of dimension 0, 1 is below 1e-05"):
        FeatureNormalizer.fit("x", NormalizationMode.MEAN_STD, statistics_of(values))


def test_the_tokenizers_own_normaliser_can_be_used() -> None:
    fitted = Normalizer.from_statistics(statistics_of(rows()[:, :1]), "QUANTILES")
    normalizer = FeatureNormalizer.fit("action", NormalizationMode.QUANTILES, fitted, clip=True)
    np.testing.assert_allclose(normalizer.apply(rows()[:, :1]), fitted.apply(rows()[:, :1]), atol=1e-6)
    with pytest.raises(
        PolicyError, match=r"the given normaliser is QUANTILES with clip=True, .* MIN_MAX with clip=False"
    ):
        FeatureNormalizer.fit("action", NormalizationMode.MIN_MAX, fitted)


def test_new_policies_clip_actions_as_the_tokenizer_was_fitted_but_never_states() -> None:
    processors = new_processors(robot())
    assert (processors.state.mode, processors.action.mode) == (NormalizationMode.QUANTILES,) * 2
    assert (processors.state.clip, processors.action.clip) == (False, True)
    assert not new_processors(robot(action_clip=False)).action.clip
    mapping = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    assert not new_processors(robot(normalization_mapping=mapping)).action.clip


def test_what_a_new_policy_lacks_is_named() -> None:
    config = robot()
    good = {"observation.state": statistics_of(noise(9, 4)), "action": statistics_of(noise(9, 3))}
    with pytest.raises(PolicyError, match=r"statistics of 'action' are missing \(there are observation\.state\)"):
        PolicyProcessors.from_statistics(config, {"observation.state": good["observation.state"]})
    with pytest.raises(PolicyError, match=r"'observation\.state' is declared with 4 dimensions, its statistics have 3"):
        PolicyProcessors.from_statistics(config, good | {"observation.state": good["action"]})
    with pytest.raises(PolicyError, match="action: normalization mode QUANTILES needs the statistics"):
        PolicyProcessors.from_statistics(config, good | {"action": {"mean": [0] * 3, "std": [1] * 3}})
    with pytest.raises(PolicyError, match="normalization_mapping says nothing of ACTION"):
        PolicyProcessors.from_statistics(robot(normalization_mapping={"STATE": "MIN_MAX"}), good)
    with pytest.raises(PolicyError, match="2 action_feature_names, but statistics of 3 dimensions"):
        PolicyProcessors.from_statistics(robot(action_feature_names=["a", "b"]), good)


# --- relative actions ---------------------------------------------------------------------------------------


def test_relative_actions_by_hand() -> None:
    relative = RelativeActions(3, ("GRIPPER",), ("shoulder", "left_gripper.pos", "wrist"))
    assert relative.mask == (True, False, True)
    actions = np.array([[[1, 2, 3], [4, 5, 6]]], np.float32)
    state = np.array([[0.5, 100, 1, 7]], np.float32)  # wider than the action: the rest is not looked at
    np.testing.assert_array_equal(relative.to_relative(actions, state), [[[0.5, 2, 2], [3.5, 5, 5]]])
    np.testing.assert_array_equal(relative.to_absolute(relative.to_relative(actions, state), state), actions)
    np.testing.assert_array_equal(relative.to_relative(actions[0], state[0]), [[0.5, 2, 2], [3.5, 5, 5]])
    assert actions[0, 0, 0] == 1, "the input is not written to"


@pytest.mark.parametrize(
    ("exclude", "names", "mask"),
    [
        ((), ("a", "gripper"), (True, True)),
        (("gripper",), None, (True, True)),  # as lerobot: without names nothing can be excluded
        (("", "grip"), ("a", "Gripper"), (True, False)),
        (("a",), ("a",), (False, True)),
        (("x",), ("a", "b", "x"), (True, True)),
    ],
)
def test_masks_are_lerobots(exclude: tuple[str, ...], names: tuple[str, ...] | None, mask: tuple[bool, ...]) -> None:
    relative = RelativeActions(2, exclude, names)
    assert relative.mask == mask
    assert (relative.problem is not None) == (bool(exclude) and (names is None or len(names) != 2))


def test_a_short_state_is_enough_where_the_last_dimensions_are_absolute() -> None:
    relative = RelativeActions(3, ("gripper",), ("a", "b", "gripper"))
    np.testing.assert_array_equal(relative.to_relative([[1, 2, 3]], [1, 1]), [[0, 1, 3]])
    with pytest.raises(PolicyError, match=r"'observation\.state' has the shape \(1,\); .* at least 2 dimensions"):
        relative.to_relative([[1, 2, 3]], [1])
    with pytest.raises(PolicyError, match=r"one state .* for each chunk"):
        relative.to_relative(np.zeros((2, 5, 3)), np.zeros((3, 3)))
    with pytest.raises(PolicyError, match=r"relative actions need \[\.\.\., H, 3\]"):
        relative.to_relative([1, 2, 3], [1, 1])
    with pytest.raises(PolicyError, match=r"'observation\.state' is nan at \(1,\)"):
        relative.to_relative([[1, 2, 3]], [1, np.nan])


def test_new_relative_policies_need_names_to_exclude_by() -> None:
    statistics = {
        "observation.state": statistics_of(noise(9, 4)),
        "action": statistics_of(noise(9, 3)),
    }
    with pytest.raises(PolicyError, match=r"no action names are known, so that .'gripper'. cannot be kept absolute"):
        PolicyProcessors.from_statistics(robot(use_relative_actions=True), statistics)
    names = ["a", "b", "gripper"]
    processors = PolicyProcessors.from_statistics(
        robot(use_relative_actions=True, action_feature_names=names), statistics
    )
    assert processors.relative == RelativeActions(3, ("gripper",), tuple(names))
    everything = robot(use_relative_actions=True, relative_exclude_joints=[])
    assert PolicyProcessors.from_statistics(everything, statistics).relative == RelativeActions(3)


# --- renaming -----------------------------------------------------------------------------------------------


def test_renaming() -> None:
    config = robot()
    processors = new_processors(config).with_rename_map({"observation.images.cam": "observation.images.top"}, config)
    assert processors.rename({"observation.images.cam": 1, "task": 2}) == {"observation.images.top": 1, "task": 2}
    with pytest.raises(PolicyError, match=r"two entries of the batch would become 'observation\.images\.top'"):
        processors.rename({"observation.images.cam": 1, "observation.images.top": 2})
    with pytest.raises(
        PolicyError, match=r"'a' -> 'observation\.images\.tip', but the policy has no such input; it has"
    ):
        processors.with_rename_map({"a": "observation.images.tip"}, config)
    with pytest.raises(PolicyError, match=r"more than one key becomes 'observation\.state'"):
        processors.with_rename_map({"a": "observation.state", "b": "observation.state"}, config)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(NormalizationMode))
def test_a_written_policy_reads_back_the_same(tmp_path: Path, mode: NormalizationMode) -> None:
    names = ["joint", "gripper", "wrist"]
    mapping = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    config = robot(normalization_mapping=mapping, use_relative_actions=True, action_feature_names=names)
    statistics = {"observation.state": statistics_of(noise(99, 4)), "action": statistics_of(rows())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = PolicyProcessors.from_statistics(config, statistics, {"cam": "observation.images.top"})
    write_config(tmp_path, config)
    write_processors(tmp_path, config, first)
    second = read_processors(tmp_path, read_config(tmp_path))
    assert second.rename_map == first.rename_map
    assert second.relative == first.relative
    for before, after in ((first.state, second.state), (first.action, second.action)):
        assert (before.mode, before.clip, before.size, before.epsilon) == (
            after.mode,
            after.clip,
            after.size,
            after.epsilon,
        )
        assert set(before.statistics) == set(after.statistics)
        for name, values in before.statistics.items():
            np.testing.assert_array_equal(values, after.statistics[name])
    state = noise(2, 4)
    chunk = rows()[:10].reshape(2, 5, 3)
    normalised = second.normalize_actions(chunk, state)
    np.testing.assert_array_equal(normalised, first.normalize_actions(chunk, state))
    inside = np.abs(normalised) < 1
    np.testing.assert_allclose(second.restore_actions(normalised, state)[inside], chunk[inside], atol=2e-6)


def test_identity_without_statistics_writes_none(tmp_path: Path) -> None:
    config = robot(normalization_mapping={"STATE": "IDENTITY", "ACTION": "IDENTITY"})
    identity = NormalizationMode.IDENTITY
    processors = PolicyProcessors(
        FeatureNormalizer("observation.state", identity, 4), FeatureNormalizer("action", identity, 3)
    )
    write_processors(tmp_path, config, processors)
    assert not list(tmp_path.glob("*.safetensors"))
    assert read_processors(tmp_path, config).action.size == 3


def test_a_policy_that_contradicts_its_configuration_is_not_written(tmp_path: Path) -> None:
    processors = new_processors(robot())
    with pytest.raises(PolicyError, match="ACTION: the configuration says MIN_MAX, the policy normalises QUANTILES"):
        write_processors(tmp_path, robot(normalization_mapping={"ACTION": "MIN_MAX"}), processors)
    with pytest.raises(PolicyError, match=r"use_relative_actions is True .* actions are absolute"):
        write_processors(tmp_path, robot(use_relative_actions=True), processors)
    assert not list(tmp_path.iterdir())


def set_mode(type_: str, mode: str, file: str = PRE, name: str = "normalizer_processor") -> tuple[str, Any]:
    return file, lambda content: step(content, name)["config"]["norm_map"].update({type_: mode})


def setting(name: str, key: str, value: Any, file: str = PRE) -> tuple[str, Any]:
    return file, lambda content: step(content, name)["config"].update({key: value})


CONTRADICTIONS: list[tuple[tuple[str, Any], str]] = [
    (
        set_mode("STATE", "MEAN_STD"),
        r"STATE: normalization_mapping of config\.json says QUANTILES, norm_map of .*MEAN_STD",
    ),
    (set_mode("ACTION", "MEAN_STD"), r"ACTION: normalization_mapping of config\.json says QUANTILES, .*MEAN_STD"),
    (set_mode("ACTION", "MIN_MAX", POST, "unnormalizer_processor"), "ACTION: .*QUANTILES, .*MIN_MAX: actions would"),
    (set_mode("VISUAL", "MEAN_STD"), r"VISUAL: normalization_mapping of config\.json says IDENTITY"),
    (set_mode("STATE", "ROBUST"), "norm_map: STATE: unknown normalization mode 'ROBUST'"),
    (setting("unnormalizer_processor", "eps", 1e-6, POST), "eps is 1e-08 in .* and 1e-06 in"),
    (setting("normalizer_processor", "normalize_observation_keys", ["x"]), r"leaves out 'observation\.state'"),
    (
        setting("tokenizer_processor", "tokenizer_name", "other"),
        "text_tokenizer_name is 'google/.*tokenizer_name is 'other'",
    ),
    (setting("action_tokenizer_processor", "action_tokenizer_name", "mine"), "action_tokenizer_name is .*'mine' in"),
    (setting("action_tokenizer_processor", "fast_skip_tokens", 0), "fast_skip_tokens is 128 .* 0 in"),
    (setting("tokenizer_processor", "padding_side", "left"), "padding_side is 'left'; only 'right' is done"),
    (setting("device_processor", "float_dtype", "float16"), "float_dtype is 'float16'; only 'float32'"),
    (setting("relative_actions_processor", "enabled", True), r"relative actions: .*config\.json is False, .* is True"),
    (setting("absolute_actions_processor", "enabled", True, POST), r"relative actions: .*json is True$"),
    (setting("rename_observations_processor", "rename_map", ["a"]), "rename_map is .'a'.; expected an object"),
    (
        (PRE, lambda content: content["steps"].insert(0, {"registry_name": "crop"})),
        r"step 0 \(crop\): .*nothing of that kind",
    ),
    ((PRE, lambda content: content["steps"].append(content["steps"][0])), "the step is there twice"),
    ((PRE, lambda content: content["steps"].insert(0, content["steps"].pop(3))), "come in another order"),
    ((PRE, lambda content: content["steps"].pop(3)), "step normalizer_processor is missing"),
    ((POST, lambda content: content.pop("steps")), "'steps' must be a list"),
    ((PRE, lambda content: step(content, "normalizer_processor").pop("state_file")), "q01 of 'action' is not the same"),
    (
        (PRE, lambda content: step(content, "normalizer_processor").update(state_file="../x.safetensors")),
        "is no safetensors file of that directory",
    ),
    (
        (PRE, lambda content: step(content, "normalizer_processor").update(state_file="x.safetensors")),
        "x.safetensors is missing, which",
    ),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS, ids=range(len(CONTRADICTIONS)))
def test_contradictions_and_unknown_steps_are_refused(saved: Path, change: tuple[str, Any], message: str) -> None:
    read_processors(saved, read_config(saved))
    edit(saved / change[0], change[1])
    with pytest.raises(PolicyError, match=message):
        read_processors(saved, read_config(saved))


def test_the_processor_files_decide_where_config_json_says_nothing(saved: Path) -> None:
    edit(saved / "config.json", lambda content: content.pop("normalization_mapping"))
    processors = read_processors(saved, read_config(saved))
    assert processors.state.mode is NormalizationMode.QUANTILES


def test_a_type_that_the_processor_files_do_not_name_is_not_normalised_there(saved: Path) -> None:
    edit(saved / PRE, lambda content: step(content, "normalizer_processor")["config"]["norm_map"].pop("STATE"))
    with pytest.raises(PolicyError, match=r"STATE: .*config\.json says QUANTILES, norm_map of .* says IDENTITY"):
        read_processors(saved, read_config(saved))
    edit(saved / "config.json", lambda content: content["normalization_mapping"].pop("STATE"))
    assert read_processors(saved, read_config(saved)).state.mode is NormalizationMode.IDENTITY


def test_the_files_own_epsilon_is_used(saved: Path) -> None:
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        edit(saved / file, setting(name, "eps", 0.25)[1])
    rewrite(saved, lambda tensors: tensors["action.q99"].__setitem__(0, tensors["action.q01"][0]), BOTH)
    with pytest.warns(UserWarning, match=r"LeRobot divides by 0\.25"):
        action = read_processors(saved, read_config(saved)).action
    low = action.statistics["q01"]
    assert action.apply(low + np.array([0.25, 0, 0], np.float32))[0] == 1
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        edit(saved / file, setting(name, "eps", "small")[1])
    with pytest.raises(PolicyError, match="eps is 'small'"):
        read_processors(saved, read_config(saved))


def test_limits_that_differ_are_said(saved: Path) -> None:
    edit(saved / PRE, setting("tokenizer_processor", "max_length", 180)[1])
    with pytest.warns(UserWarning, match="tokenizer_max_length is 200 .* max_length is 180 .* configuration's is used"):
        read_processors(saved, read_config(saved))


def test_unknown_settings_are_said(saved: Path) -> None:
    edit(saved / PRE, setting("tokenizer_processor", "stride", 4)[1])
    with pytest.warns(UserWarning, match=r"step 5 \(tokenizer_processor\): pi0-fast does not know stride"):
        read_processors(saved, read_config(saved))


def test_an_older_file_without_relative_steps_loads(saved: Path) -> None:
    edit(saved / PRE, lambda content: content["steps"].pop(2))
    edit(saved / POST, lambda content: content["steps"].pop(1))
    assert read_processors(saved, read_config(saved)).relative is None


def test_missing_files_are_named(saved: Path) -> None:
    (saved / POST).unlink()
    with pytest.raises(PolicyError, match=r"policy_postprocessor\.json is missing"):
        read_processors(saved, read_config(saved))


def test_a_damaged_statistics_file_is_named(saved: Path) -> None:
    (saved / PRE_STATE).write_bytes(b"not safetensors")
    with pytest.raises(PolicyError, match=f"{PRE_STATE} cannot be read"):
        read_processors(saved, read_config(saved))


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], Any], files: tuple[str, ...]) -> None:
    for file in files:
        tensors = load_file(directory / file)
        change(tensors)
        save_file(tensors, directory / file)


BOTH = (PRE_STATE, POST_STATE)


def test_statistics_are_compared_between_both_files(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"action.q99": tensors["action.q99"] + 1}), (POST_STATE,))
    with pytest.raises(PolicyError, match="statistic q99 of 'action' is not the same"):
        read_processors(saved, read_config(saved))


def test_missing_statistics_are_an_error_where_lerobot_skips_the_normalisation(saved: Path) -> None:
    rewrite(saved, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".q" in name], BOTH)
    with pytest.raises(PolicyError, match=r"observation\.state: normalisation QUANTILES needs .* q01, q99 missing"):
        read_processors(saved, read_config(saved))


def test_statistics_of_another_robot_are_refused(saved: Path) -> None:
    edit(saved / "config.json", lambda content: content["output_features"]["action"].update(shape=[5]))
    with pytest.raises(PolicyError, match=r"declares 5 dimensions of 'action', its statistics have 3: put \[3\]"):
        read_processors(saved, read_config(saved))


def test_a_declared_limit_stands_for_any_size(saved: Path) -> None:
    """lerobot declares max_state_dim where it knows no state, as in base checkpoints."""
    edit(saved / "config.json", lambda content: content["input_features"]["observation.state"].update(shape=[32]))
    config = read_config(saved)
    assert (config.state_dim, read_processors(saved, config).state.size) == (32, 4)


def test_wider_data_than_the_limit_is_an_error_not_cut(saved: Path) -> None:
    edit(saved / "config.json", lambda content: content.update(max_state_dim=3))
    edit(saved / "config.json", lambda content: content["input_features"]["observation.state"].update(shape=[3]))
    with pytest.raises(PolicyError, match=r"'observation\.state' has 4 dimensions .*above max_state_dim = 3: raise"):
        read_processors(saved, read_config(saved))
    with pytest.raises(PolicyError, match=r"'observation\.state' has 4 dimensions \(the statistics\), above"):
        read_processors(
            saved,
            read_config(saved),
            statistics={"observation.state": statistics_of(noise(9, 4)), "action": statistics_of(noise(9, 3))},
        )


def test_a_count_among_the_statistics_is_no_dimension(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"action.count": np.array([1234], np.float32)}), BOTH)
    assert "count" not in read_processors(saved, read_config(saved)).action.statistics


def test_a_joint_without_range_is_computed_as_lerobot_does_and_said(saved: Path) -> None:
    def freeze(tensors: dict[str, np.ndarray]) -> None:
        tensors["action.q01"][1] = tensors["action.q99"][1] = 0.5

    rewrite(saved, freeze, BOTH)
    with pytest.warns(
        UserWarning, match="action: the QUANTILES range of dimension 1 is zero; LeRobot divides by 1e-08"
    ):
        processors = read_processors(saved, read_config(saved))
    assert processors.action.degenerate == (1,)
    assert processors.action.apply([0, 0.5, 0])[1] == -1


def test_relative_dimensions_must_agree(tmp_path: Path) -> None:
    config = robot(use_relative_actions=True, action_feature_names=["a", "b", "gripper"])
    write_config(tmp_path, config)
    write_processors(tmp_path, config, new_processors(config))
    read_processors(tmp_path, config)
    edit(tmp_path / PRE, setting("relative_actions_processor", "exclude_joints", ["b"])[1])
    with pytest.raises(PolicyError, match=r"relative dimensions are \(True, True, False\) by config\.json"):
        read_processors(tmp_path, config)
    for file in (PRE, "config.json"):
        text = (tmp_path / file).read_text()
        for names in ("action_names", "action_feature_names"):
            content = json.loads(text)
            target = step(content, "relative_actions_processor")["config"] if file == PRE else content
            if names in target:
                target[names] = None
                (tmp_path / file).write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="no action names are known, .*LeRobot makes them relative"):
        processors = read_processors(tmp_path, read_config(tmp_path))
    assert processors.relative is not None
    assert processors.relative.mask == (True, True, True)


def test_statistics_of_other_data_take_the_place_of_the_files(saved: Path) -> None:
    """A base checkpoint has no statistics; fine-tuning brings its own, in the checkpoint's modes."""
    for file in BOTH:
        (saved / file).unlink()
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        edit(saved / file, lambda content, name=name: step(content, name).pop("state_file"))
    with pytest.raises(PolicyError, match="needs the statistics q01, q99"):
        read_processors(saved, read_config(saved))
    statistics = {
        "observation.state": statistics_of(noise(9, 4)),
        "action": statistics_of(rows()[:, [0, 0, 0]]),
    }
    processors = read_processors(saved, read_config(saved), statistics=statistics)
    np.testing.assert_array_equal(processors.action.statistics["q01"], statistics["action"].q01.astype(np.float32))


# --- lerobot itself -----------------------------------------------------------------------------------------


LEROBOT = """
import json, sys
import lerobot_tiny
M = lerobot_tiny.install(json.load(open("architecture.json")))
import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import NormalizerProcessorStep

config = PreTrainedConfig.from_pretrained(".")
pre, post = make_pre_post_processors(config, pretrained_path=".", preprocessor_overrides={
    "action_tokenizer_processor": {"paligemma_tokenizer_name": config.text_tokenizer_name}})
given = np.load("given.npz")
batch = {"cam": torch.zeros(2, 3, 8, 8), "observation.images.cam": torch.zeros(2, 3, 8, 8),
         "observation.state": torch.from_numpy(given["state"]),
         "action": torch.from_numpy(given["action"]), "task": ["pick", "place"]}
made = pre(batch)
chunk = post(torch.from_numpy(given["normalised"]))
np.savez("made.npz", state=made["observation.state"].numpy(), action=made["action"].numpy(), chunk=chunk.numpy(),
         keys=np.array(sorted(made)))
"""


@pytest.mark.interop
@pytest.mark.parametrize("mode", ["QUANTILES", "MEAN_STD"])
def test_lerobot_reads_what_is_written_and_gets_the_same_numbers(shared: Path, tmp_path: Path, mode: str) -> None:
    """A new policy's guarded ranges, relative actions and rename map in lerobot 0.6.1's own pipelines."""
    interpreter = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not interpreter:
        pytest.skip("PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1")
    source = shared / "golden" / "lerobot_checkpoint"
    shutil.copytree(source / "tokenizers", tmp_path / "tokenizers", copy_function=shutil.copyfile)
    shutil.copyfile(source / "architecture.json", tmp_path / "architecture.json")
    names = read_config(source)
    config = robot(
        normalization_mapping={"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        chunk_size=5,
        n_action_steps=5,
        use_relative_actions=True,
        action_feature_names=["joint", "gripper", "wrist"],
        action_clip=False,
        text_tokenizer_name=names.text_tokenizer_name,
        action_tokenizer_name=names.action_tokenizer_name,
        device="cpu",
    )
    generator = np.random.default_rng(3)
    states = generator.normal(0, 1, (100, 4)).astype(np.float32)
    states[:, 2] = 0.25
    with pytest.warns(UserWarning, match="range is widened"):
        processors = PolicyProcessors.from_statistics(
            config,
            {"observation.state": statistics_of(states), "action": statistics_of(rows())},
            {"observation.images.cam": "observation.images.top"},
        )
    write_config(tmp_path, config)
    write_processors(tmp_path, config, processors)
    given = {
        "state": states[:2],
        "action": rows(5)[:10].reshape(2, 5, 3),
        "normalised": generator.uniform(-1.5, 1.5, (2, 5, 3)).astype(np.float32),
    }
    np.savez(tmp_path / "given.npz", **given)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    # The shared directory is read-only: an import from it must not leave bytecode there.
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(shared / "tools")
    done = subprocess.run(
        [interpreter, "-c", LEROBOT], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "made.npz") as made:
        assert "observation.images.top" in made["keys"]
        np.testing.assert_array_equal(made["state"], processors.state.apply(given["state"]))
        np.testing.assert_array_equal(made["action"], processors.normalize_actions(given["action"], given["state"]))
        np.testing.assert_array_equal(made["chunk"], processors.restore_actions(given["normalised"], given["state"]))
