"""Actions in the robot's own units, there and back, with and without states."""

from __future__ import annotations

import numpy as np
import pytest

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.types import TokenizerError, UsageError

HORIZON = 8


def make(relative: bool) -> tuple[FastTokenizer, np.ndarray, np.ndarray]:
    """A tokenizer of dimensions 0, 2, 3 of four, of which 0 and 3 are relative to the states 1 and 0; its data."""
    random = np.random.default_rng(0)
    path = (50 + 20 * np.cumsum(random.normal(0, 0.1, (400, 4)), axis=0)).astype(np.float32)
    states = np.stack([path[:, 3] + 0.3, path[:, 0] - 0.2], axis=1)
    selection = ActionSelection.create(
        4,
        encoded_dims="0,2:4",
        delta_dims="0,3" if relative else None,
        delta_state_dims="1,0" if relative else None,
        state_size=2,
    )
    starts = np.arange(0, 390 - HORIZON, 3)
    chunks = selection.window_chunks(path, states, starts, HORIZON)
    normalizer = Normalizer.fit(lambda: [chunks], "MIN_MAX", selection=selection)
    tokenizer = FastTokenizer.fit(normalizer.apply(chunks), scale=60.0, vocab_size=3000, normalizer=normalizer)
    return tokenizer, np.stack([path[s : s + HORIZON] for s in starts]), states[starts]


@pytest.mark.parametrize("relative", [False, True])
def test_there_and_back_equals_doing_it_by_hand(relative: bool) -> None:
    tokenizer, actions, states = make(relative)
    ids = tokenizer.encode_actions(actions, states)
    by_hand = actions[..., [0, 2, 3]].copy()
    if relative:
        by_hand[..., 0] -= states[:, None, 1]
        by_hand[..., 2] -= states[:, None, 0]
    normalizer = tokenizer.normalizer
    assert normalizer is not None
    assert ids == tokenizer.encode(normalizer.apply(by_hand))
    restored = tokenizer.decode_actions(ids, states)
    assert restored.shape == (len(actions), HORIZON, 3)
    width = (normalizer.high - normalizer.low).max()
    assert np.abs(restored - actions[..., [0, 2, 3]]).max() < width * HORIZON**0.5 / 60 / 4 + 1e-3
    one = tokenizer.decode_actions(ids[5], states[5])
    np.testing.assert_array_equal(one, restored[5])
    assert tokenizer.encode_actions(actions[5], states[5]) == [ids[5]]


def test_relative_actions_demand_states_and_absolute_ones_do_not() -> None:
    tokenizer, actions, states = make(relative=True)
    with pytest.raises(TokenizerError, match="state"):
        tokenizer.encode_actions(actions)
    ids = tokenizer.encode_actions(actions, states)
    with pytest.raises(TokenizerError, match="state"):
        tokenizer.decode_actions(ids)
    absolute, actions, states = make(relative=False)
    assert absolute.encode_actions(actions) == absolute.encode_actions(actions, states)


@pytest.mark.parametrize("relative", [False, True])
def test_hold_is_a_position_of_the_robot(relative: bool) -> None:
    """In its own units, exactly, also where it lies outside of what the normaliser knows."""
    tokenizer, actions, states = make(relative)
    ids = tokenizer.encode_actions(actions[:4], states[:4])
    ids[2] = ids[2][:-1]
    position = np.array([12.5, -900.0, 33.25])
    decoded, info = tokenizer.decode_actions(ids, states[:4], on_error="hold", hold=position, return_info=True)
    assert info.valid.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(decoded[2], np.tile(position, (HORIZON, 1)).astype(np.float32))
    whole = [0, 1, 3]
    np.testing.assert_array_equal(decoded[whole], tokenizer.decode_actions([ids[n] for n in whole], states[whole]))
    single = tokenizer.decode_actions(ids[2], states[2], on_error="hold", hold=position)
    np.testing.assert_array_equal(single, decoded[2])
    with pytest.raises(TokenizerError, match="row 2"):
        tokenizer.decode_actions(ids, states[:4])
    with pytest.raises(UsageError, match="go together"):
        tokenizer.decode_actions(ids, states[:4], hold=position)
    with pytest.raises(TokenizerError, match="hold has shape"):
        tokenizer.decode_actions(ids, states[:4], on_error="hold", hold=position[:2])


def test_what_the_normaliser_clips_is_counted() -> None:
    random = np.random.default_rng(1)
    frames = random.uniform(-1, 1, (1000, 2)).astype(np.float32)
    normalizer = Normalizer.fit(lambda: [frames], "QUANTILES")
    chunks = np.zeros((3, HORIZON, 2), np.float32)
    chunks[1, 2] = 5.0
    chunks[2, :, 0] = -7.0
    tokenizer = FastTokenizer.fit(normalizer.apply(frames[:992].reshape(-1, HORIZON, 2)), normalizer=normalizer)
    _, info = tokenizer.encode_actions(chunks, return_info=True)
    assert info.clipped_values is not None
    assert info.clipped_values.tolist() == [0, 2, HORIZON]


def test_without_a_normaliser_there_are_no_units() -> None:
    chunks = np.random.default_rng(0).normal(0, 0.3, (50, HORIZON, 2))
    tokenizer = FastTokenizer.fit(chunks)
    with pytest.raises(TokenizerError, match="without a normaliser"):
        tokenizer.encode_actions(chunks)
    with pytest.raises(TokenizerError, match="without a normaliser"):
        tokenizer.decode_actions(tokenizer.encode(chunks))
