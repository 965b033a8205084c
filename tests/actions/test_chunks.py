"""Dimension notation, selection, delta transform, windows, held-out episodes; by hand and by slow loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi0_fast.actions.chunks import (
    ActionSelection,
    as_numbers,
    dim_ranges,
    format_dims,
    limit_samples,
    parse_dims,
    sample_starts,
    split_episodes,
    window_count,
)
from pi0_fast.types import DatasetError, TokenizerError, UsageError

# --- as_numbers
# -----------------------------------------------------------------------------------------------


class FakeTensor:
    """What torch tensors look like to numpy: detach, cpu, and no array before both."""

    def __init__(self, array: np.ndarray, ready: int = 0, dtype: str = "torch.float32") -> None:
        self.array, self.ready, self.dtype = array, ready, dtype

    def detach(self) -> FakeTensor:
        return FakeTensor(self.array, 1, self.dtype)

    def cpu(self) -> FakeTensor:
        assert self.ready == 1
        return FakeTensor(self.array, 2, self.dtype)

    def float(self) -> FakeTensor:
        return FakeTensor(self.array, self.ready, "torch.float32")

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        if self.ready != 2 or "bfloat16" in self.dtype:
            raise TypeError("not a numpy dtype, or requires grad, or on a GPU")
        return self.array


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_tensors_are_detached_moved_and_widened(dtype: str) -> None:
    array = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(as_numbers(FakeTensor(array, dtype=dtype), "actions"), array)


@pytest.mark.parametrize("value", ["abc", [["a", "b"]], [1 + 2j], [object()], [[1.0], [2.0, 3.0]], None])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(TokenizerError, match="actions"):
        as_numbers(value, "actions")


def test_real_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1.5, 2.5]], requires_grad=True)
    np.testing.assert_array_equal(as_numbers(tensor, "actions"), [[1.5, 2.5]])
    np.testing.assert_array_equal(as_numbers(tensor.bfloat16(), "actions"), [[1.5, 2.5]])


# --- notation
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("0:6,7:9", (0, 1, 2, 3, 4, 5, 7, 8)),
        ("0,1,2", (0, 1, 2)),
        ("3", (3,)),
        (" 0:2 , 5, 7:9 ", (0, 1, 5, 7, 8)),
        ("4,2", (4, 2)),
        ([1, np.int64(3)], (1, 3)),
        (None, tuple(range(9))),
    ],
)
def test_parse_dims(text: object, dims: tuple[int, ...]) -> None:
    assert parse_dims(text, size=9, what="--encoded_dims") == dims  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0:6,7:23", "'7:23' is outside"),  # the documented default on a 7-dimensional robot
        ("7", "outside"),
        ("-1", "outside"),
        ([7], "outside"),
        ("0:4,3:6", "dimension 3 more than once"),
        ("1,1", "more than once"),
        ("5:2", "reversed"),
        ("3:3", "is empty"),
        ("", "not a dimension"),
        ("0:2,", "not a dimension"),
        ("a:b", "not a dimension"),
        ("1:2:3", "not a dimension"),
        ("0.5", "not a dimension"),
        ("0_1", "not a dimension"),
        ("0:\u0663", "not a dimension"),
        ("9" * 5000, "not a dimension"),
        ([0.5], "not an integer"),
        ([], "names no dimension"),
    ],
)
def test_parse_dims_refuses_and_names_flag_text_and_size(text: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        parse_dims(text, size=7, what="--encoded_dims")  # type: ignore[arg-type]
    assert "--encoded_dims" in str(error.value)
    assert repr(text) in str(error.value)
    if "outside" in reason:
        assert "7 dimensions" in str(error.value)


def test_dim_ranges_and_format_dims() -> None:
    assert dim_ranges(parse_dims("0:6,7:23", size=26, what="x")) == [[0, 6], [7, 23]]
    assert format_dims((0, 1, 2, 5)) == "0:3,5:6"
    assert dim_ranges(()) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_format_dims_is_the_inverse_of_parse_dims(dims: list[int]) -> None:
    assert parse_dims(format_dims(dims), size=31, what="x") == tuple(dims)


# --- selection
# ------------------------------------------------------------------------------------------------


def test_default_is_all_dims_and_nothing_relative() -> None:
    selection = ActionSelection.create(3)
    assert selection == ActionSelection(3, (0, 1, 2))
    assert (selection.size, selection.is_delta) == (3, False)


def test_delta_dims_of_equal_sizes_map_to_themselves() -> None:
    selection = ActionSelection.create(6, delta_dims="3,0:2", state_size=6)
    assert (selection.delta_dims, selection.delta_state_dims) == ((0, 1, 3), (0, 1, 3))


def test_an_explicit_state_map_follows_the_order_of_delta_dims_and_may_repeat() -> None:
    selection = ActionSelection.create(7, delta_dims="4,1", delta_state_dims="6,2", state_size=8)
    assert (selection.delta_dims, selection.delta_state_dims) == ((1, 4), (2, 6))
    twice = ActionSelection.create(7, delta_dims="0:2", delta_state_dims=[5, 5], state_size=8)
    assert twice.delta_state_dims == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"delta_dims": "0:3", "state_size": 8}, "--delta_state_dims '0,1,2'"),  # 8-dim state, 7-dim action
        ({"delta_dims": "0:3", "delta_state_dims": "0:2", "state_size": 8}, "one state dimension per delta"),
        ({"delta_dims": "0:2", "delta_state_dims": "7:9", "state_size": 8}, "outside the data"),
        ({"delta_dims": "0:2"}, "needs the state"),
        ({"delta_state_dims": "0:2", "state_size": 8}, "without --delta_dims"),
        ({"encoded_dims": "0:6", "delta_dims": "5,6", "state_size": 7}, r"\[6\] are not among the encoded"),
        ({"encoded_dims": "3:5,0:2"}, "write '0:2,3:5'"),
    ],
)
def test_selections_that_cannot_be_meant(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        ActionSelection.create(7, **arguments)  # type: ignore[arg-type]


def test_the_class_itself_checks_the_state_map() -> None:
    with pytest.raises(UsageError, match="outside the state"):
        ActionSelection(3, (0, 1, 2), (0,), (4,), state_size=4)
    with pytest.raises(UsageError, match="outside the state"):
        ActionSelection(3, (0, 1, 2), (0,), (-1,))
    with pytest.raises(UsageError, match="ascending"):
        ActionSelection(3, (0, 1, 2), (1, 0), (1, 0))


def test_encoded_names() -> None:
    selection = ActionSelection.create(3, encoded_dims="0,2")
    assert selection.encoded_names(["pan", "lift", "grip"]) == ("pan", "grip")
    assert selection.encoded_names(None) is None
    with pytest.raises(UsageError, match="2 names for 3"):
        selection.encoded_names(["pan", "lift"])


def test_selection_json_round_trip() -> None:
    selection = ActionSelection(7, (0, 1, 2, 3, 4), (1, 4), (2, 6), 8)
    assert ActionSelection.from_json(json.loads(json.dumps(selection.to_json()))) == selection
    for broken in (
        {},
        [1],
        {**selection.to_json(), "extra": 1},
        {**selection.to_json(), "dims": [99]},
        {**selection.to_json(), "dims": ["a"]},
        {**selection.to_json(), "action_size": None},
    ):
        with pytest.raises(TokenizerError, match="selection"):
            ActionSelection.from_json(broken)  # type: ignore[arg-type]


# --- windows
# --------------------------------------------------------------------------------------------------

ACTIONS = np.array([[0, 10, 5], [1, 11, 6], [2, 12, 7], [3, 13, 8]], np.float32)
STATES = np.array([[100, 0.5], [200, 1.5], [300, 2.5], [400, 3.5]], np.float32)


def test_hand_worked_windows() -> None:
    selection = ActionSelection.create(3, encoded_dims="0,2", delta_dims="2", delta_state_dims="1", state_size=2)
    chunks = selection.window_chunks(ACTIONS, STATES, [0, 2], 2)
    # Dim 2 minus state 1 of the first step: 5 - 0.5, 6 - 0.5; then 7 - 2.5, 8 - 2.5.
    np.testing.assert_array_equal(chunks, [[[0, 4.5], [1, 5.5]], [[2, 4.5], [3, 5.5]]])
    assert chunks.dtype == np.float32
    assert chunks.flags.c_contiguous
    back = selection.to_absolute(chunks, STATES[[0, 2]])
    np.testing.assert_array_equal(back, [[[0, 5], [1, 6]], [[2, 7], [3, 8]]])
    # One state for all, and one chunk alone.
    np.testing.assert_array_equal(selection.to_absolute(chunks[:1], STATES[0]), back[:1])
    np.testing.assert_array_equal(selection.to_absolute(chunks[0], STATES[0]), back[0])
    np.testing.assert_array_equal(selection.from_absolute(ACTIONS[None, :2], STATES[:1]), chunks[:1])
    assert ACTIONS[0, 2] == 5  # the input is left alone


def test_without_delta_no_state_is_needed() -> None:
    selection = ActionSelection.create(3)
    chunks = selection.window_chunks(ACTIONS, None, np.arange(3), 2)
    np.testing.assert_array_equal(chunks[1], ACTIONS[1:3])
    np.testing.assert_array_equal(selection.to_absolute(chunks), chunks)
    assert selection.window_chunks(ACTIONS, None, [], 2).shape == (0, 2, 3)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, ActionSelection, int]:
    """Actions, states, a selection, a horizon."""
    size, state_size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dims = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    delta = sorted(draw(st.sets(st.sampled_from(dims))))
    state_dims = [draw(st.integers(0, state_size - 1)) for _ in delta]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    length, horizon = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int32]))
    actions = (rng.normal(size=(length, size)) * 50).astype(dtype)
    states = (rng.normal(size=(length, state_size)) * 50).astype(np.float32)
    states = states.astype(draw(st.sampled_from([np.float32, np.float16])))
    selection = ActionSelection(size, tuple(dims), tuple(delta), tuple(state_dims), state_size)
    return actions, states, selection, horizon


def slow_windows(actions: np.ndarray, states: np.ndarray, selection: ActionSelection, horizon: int) -> np.ndarray:
    """All windows of an episode, one number at a time."""
    windows = []
    for start in range(len(actions) - horizon + 1):
        window = []
        for step in range(horizon):
            row = []
            for dim in selection.dims:
                value = float(actions[start + step, dim])
                if dim in selection.delta_dims:
                    value -= float(states[start, selection.delta_state_dims[selection.delta_dims.index(dim)]])
                row.append(value)
            window.append(row)
        windows.append(window)
    return np.array(windows, np.float32).reshape(-1, horizon, selection.size)


@settings(deadline=None)
@given(episodes(), st.integers(1, 40))
def test_windows_equal_a_slow_loop(case: tuple[np.ndarray, np.ndarray, ActionSelection, int], max_values: int) -> None:
    actions, states, selection, horizon = case
    expected = slow_windows(actions, states, selection, horizon)
    count = window_count(len(actions), horizon)
    assert len(expected) == count
    chunks = selection.window_chunks(actions, states, np.arange(count), horizon)
    np.testing.assert_allclose(chunks, expected, rtol=1e-6, atol=1e-5)
    blocks = list(selection.all_windows(actions, states, horizon, max_values=max_values))
    np.testing.assert_array_equal(np.concatenate([*blocks, chunks[:0]]), chunks)
    assert all(block.size <= max(max_values, horizon * selection.size) for block in blocks)
    back = selection.to_absolute(chunks, states[:count])
    for start in range(count):
        expected_actions = actions[start : start + horizon, list(selection.dims)]
        np.testing.assert_allclose(back[start], expected_actions, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16])
def test_narrow_types_do_not_wrap_or_round(dtype: type) -> None:
    selection = ActionSelection.create(1, delta_dims="0", state_size=1)
    actions, states = np.array([[3], [100]], dtype), np.array([[100], [1]], dtype)
    chunks = selection.window_chunks(actions, states, [0], 2)
    assert chunks.tolist() == [[[-97], [0]]]
    assert selection.to_absolute(chunks, states[:1]).tolist() == [[[3], [100]]]
    assert selection.from_absolute(actions[None], states[:1]).tolist() == chunks.tolist()
    big, one = np.array([[60000]], np.float16), np.array([[-60000]], np.float16)
    assert selection.window_chunks(big, one, [0], 1).item() == 2 * float(big[0, 0])


def test_statistics_are_of_what_is_encoded() -> None:
    absolute = ActionSelection.create(3, encoded_dims="0:2")
    (frames,) = absolute.statistics_blocks(ACTIONS, None, 2)
    np.testing.assert_array_equal(frames, ACTIONS[:, :2])
    relative = ActionSelection.create(3, delta_dims="0", delta_state_dims="0", state_size=2)
    (windows,) = relative.statistics_blocks(ACTIONS, STATES, 2)
    np.testing.assert_array_equal(windows[:, :, 0], [[-100, -99], [-199, -198], [-298, -297]])
    assert list(relative.statistics_blocks(ACTIONS, STATES, 5)) == []  # too short for one window


def test_episodes_that_do_not_fit_the_selection() -> None:
    selection = ActionSelection.create(3, delta_dims="0", delta_state_dims="1", state_size=2)
    with pytest.raises(DatasetError, match=r"expected \[frames, 3\]"):
        selection.window_chunks(ACTIONS[:, :2], STATES, [0], 2)
    with pytest.raises(DatasetError, match="no states"):
        selection.window_chunks(ACTIONS, None, [0], 2)
    with pytest.raises(DatasetError, match=r"expected \[4, S\]"):
        selection.window_chunks(ACTIONS, STATES[:3], [0], 2)
    with pytest.raises(DatasetError, match="states have 3 dimensions, expected 2"):
        selection.window_chunks(ACTIONS, ACTIONS, [0], 2)
    for starts in ([3], [-1], [0, 3]):
        with pytest.raises(UsageError, match="do not fit an episode of 4 frames"):
            selection.window_chunks(ACTIONS, STATES, starts, 2)


def test_chunks_that_do_not_fit_the_selection() -> None:
    selection = ActionSelection.create(3, delta_dims="0", delta_state_dims="1", state_size=2)
    chunks = np.zeros((2, 4, 3), np.float32)
    with pytest.raises(TokenizerError, match=r"expected \[..., H, 3\]"):
        selection.to_absolute(chunks[..., :2], STATES[:2])
    with pytest.raises(TokenizerError, match="pass each chunk's state"):
        selection.to_absolute(chunks)
    with pytest.raises(TokenizerError, match=r"states of shape \(3, 2\) do not fit"):
        selection.to_absolute(chunks, STATES[:3])
    with pytest.raises(TokenizerError, match="states have 3 dimensions, expected 2"):
        selection.to_absolute(chunks, np.zeros(3))
    unknown_size = ActionSelection(3, (0, 1, 2), (0,), (4,))
    with pytest.raises(TokenizerError, match="expected more than 4"):
        unknown_size.to_absolute(chunks, np.zeros(4))


# --- which windows, which episodes
# ----------------------------------------------------------------------------


def test_window_count() -> None:
    assert [window_count(length, 10) for length in (0, 7, 9, 10, 11)] == [0, 0, 0, 1, 2]
    with pytest.raises(UsageError, match="at least 1"):
        window_count(5, 0)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 12), st.floats(1e-3, 1), st.integers(0, 5), st.integers(0, 5))
def test_sample_starts(length: int, horizon: int, fraction: float, seed: int, episode: int) -> None:
    starts = sample_starts(length, horizon, fraction, seed=seed, episode_index=episode)
    count = window_count(length, horizon)
    expected = 0 if count == 0 else max(1, int(count * fraction))
    assert len(starts) == len(set(starts.tolist())) == expected
    assert starts.tolist() == sorted(starts.tolist())
    assert all(0 <= start < count for start in starts)
    np.testing.assert_array_equal(starts, sample_starts(length, horizon, fraction, seed=seed, episode_index=episode))


def test_samples_differ_between_seeds_and_episodes() -> None:
    samples = [
        tuple(sample_starts(500, 10, 0.1, seed=seed, episode_index=episode))
        for seed, episode in ((0, 0), (1, 0), (0, 1))
    ]
    assert len(set(samples)) == 3
    assert sample_starts(20, 10, 1.0, seed=0, episode_index=0).tolist() == list(range(11))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_fraction_outside_its_range(fraction: float) -> None:
    with pytest.raises(UsageError, match="fraction"):
        sample_starts(50, 10, fraction, seed=0, episode_index=0)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 500), unique=True, max_size=30),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 9),
)
def test_split_episodes(indices: list[int], fraction: float, seed: int) -> None:
    train, held_out = split_episodes(indices, fraction, seed)
    assert sorted(train + held_out) == sorted(indices)
    assert list(train) == sorted(train)
    assert list(held_out) == sorted(held_out)
    if fraction == 0 or len(indices) < 2:
        assert held_out == ()
    else:
        assert 1 <= len(held_out) < len(indices)
        assert abs(len(held_out) - fraction * len(indices)) <= 1
    assert split_episodes(indices[::-1], fraction, seed) == (train, held_out)


def test_split_of_sixty_episodes() -> None:
    train, held_out = split_episodes(range(60), 0.1, 0)
    assert (len(train), len(held_out)) == (54, 6)
    assert split_episodes(range(60), 0.1, 1)[1] != held_out


@pytest.mark.parametrize(
    ("indices", "fraction", "seed"),
    [([0, 1], 1.0, 0), ([0, 1], -0.1, 0), ([1, 1], 0.5, 0), ([0, 1], 0.5, -1)],
)
def test_splits_that_cannot_be_meant(indices: list[int], fraction: float, seed: int) -> None:
    with pytest.raises(UsageError):
        split_episodes(indices, fraction, seed)


# --- real recordings
# ------------------------------------------------------------------------------------------


def read(path: Path, episode: int) -> tuple[np.ndarray, np.ndarray]:
    """Actions and states of one episode of a parquet file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path, columns=["action", "observation.state", "episode_index"])
    rows = np.flatnonzero(np.asarray(table["episode_index"]) == episode)
    actions, states = (np.array(table[key].to_pylist(), np.float32)[rows] for key in ("action", "observation.state"))
    return actions, states


@pytest.mark.golden
def test_real_recordings(shared: Path) -> None:
    """Windows of deltas of an SO-101 and a G1 recording equal the slow loop, and invert."""
    so101 = shared / "data/so101_record_test_v30/data/chunk-000/file-000.parquet"
    g1 = shared / "data/g1_inspire_v21/data/chunk-000/episode_000003.parquet"
    for path, episode, delta in ((so101, 2, "0:6"), (g1, 3, "0:14")):
        actions, states = read(path, episode)
        actions, states = actions[:60], states[:60]
        selection = ActionSelection.create(actions.shape[1], delta_dims=delta, state_size=states.shape[1])
        chunks = selection.window_chunks(actions, states, np.arange(45), 16)
        np.testing.assert_array_equal(chunks, slow_windows(actions, states, selection, 16))
        back = selection.to_absolute(chunks, states[:45])
        windows = ActionSelection.create(actions.shape[1]).window_chunks(actions, None, np.arange(45), 16)
        np.testing.assert_allclose(back, windows, rtol=0, atol=2e-5)  # SO-101 in degrees, up to 100
        # Deltas of the first step are small next to the positions: the transform does what it is for.
        moved = selection.delta_dims
        assert np.abs(chunks[:, 0][:, moved]).mean() < 0.5 * np.abs(actions[:45, moved]).mean()


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 20), max_size=8), st.integers(1, 60), st.integers(0, 5))
def test_limited_samples(counts: dict[int, int], most: int, seed: int) -> None:
    kept = limit_samples(counts, most, seed=seed)
    if sum(counts.values()) <= most:
        assert kept is None
        return
    assert kept is not None
    assert list(kept) == list(counts)
    assert sum(map(len, kept.values())) == most
    for group, positions in kept.items():
        assert (np.diff(positions) > 0).all()
        assert all(0 <= position < counts[group] for position in positions)
    again = limit_samples(counts, most, seed=seed)
    assert again is not None
    assert all((again[group] == kept[group]).all() for group in counts)


def test_limited_samples_are_spread_evenly() -> None:
    """Each of 100 members of 3 groups is kept about as often as any other."""
    uses = np.zeros(100)
    for seed in range(300):
        kept = limit_samples({0: 50, 1: 20, 2: 30}, 10, seed=seed)
        assert kept is not None
        for group, first in ((0, 0), (1, 50), (2, 70)):
            uses[first + kept[group]] += 1
    assert uses.sum() == 3000
    assert uses.min() > 8
    assert uses.max() < 60
