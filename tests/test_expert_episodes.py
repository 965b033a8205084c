"""One episode of an expert: noise, pictures, labels; against the toy world stepped by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi0_fast.expert_episodes import ActionNoise, EpisodeSettings, held, picture_steps, run_episode
from pi0_fast.sims import make
from pi0_fast.types import SimulatorError, UsageError

TOP = "observation.images.top"


@given(every=st.integers(1, 9), seed=st.integers(0, 10_000), length=st.integers(0, 60))
def test_pictures_at_the_first_step_and_then_every_so_many(every: int, seed: int, length: int) -> None:
    steps = picture_steps(every, seed, length)
    assert steps == sorted(set(steps)) == picture_steps(every, seed, length)
    assert steps[:1] == [0][:length]
    assert all(0 <= step < length for step in steps)
    gaps = np.diff([*steps, length])
    assert (gaps[1:-1] == every).all()
    assert (gaps[:1] <= every).all()
    assert (gaps[-1:] <= every).all()


def test_all_phases_of_pictures_are_seen() -> None:
    assert picture_steps(1, 0, 4) == [0, 1, 2, 3]
    assert {picture_steps(5, seed, 60)[1] for seed in range(40)} == {1, 2, 3, 4, 5}


def test_a_picture_is_held_until_the_next_by_hand() -> None:
    images = np.arange(2, dtype=np.uint8).reshape(2, 1, 1, 1).repeat(3, axis=3)
    shown = [int(image[0, 0, 0]) for image in held(images, np.array([0, 1, 0, 1, 2]))]
    assert shown == [0, 0, 1, 1, 1]


def test_noise_has_its_deviation_in_each_dimension() -> None:
    noise = ActionNoise(EpisodeSettings(noise_std=(0.15, 0.0, 0.045)), 3, seed=4)
    values = np.array([noise.next() for _ in range(4000)])
    np.testing.assert_allclose(values.std(axis=0), [0.15, 0, 0.045], rtol=0.05)
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=0.01)
    again = ActionNoise(EpisodeSettings(noise_std=(0.15, 0.0, 0.045)), 3, seed=4)
    np.testing.assert_array_equal(again.next(), values[0])


def test_bursts_are_held_and_as_frequent_as_asked() -> None:
    settings = EpisodeSettings(burst_share=0.05, burst_std=(0.3,), burst_steps=(3, 7))
    noise = ActionNoise(settings, 2, seed=0)
    values = np.array([noise.next() for _ in range(20_000)])
    lengths, bursts = [], []
    for value, group in itertools.groupby(map(tuple, values)):
        if value != (0.0, 0.0):
            lengths.append(len(list(group)))
            bursts.append(value)
    assert set(lengths) == {3, 4, 5, 6, 7}
    np.testing.assert_allclose(np.std(bursts, axis=0), 0.3, rtol=0.1)
    # One begins with probability 0.05 at a step where none is: 20 steps without and 5 with one, on average.
    assert len(bursts) / len(values) == pytest.approx(1 / 24, rel=0.1)


def test_no_noise_at_all() -> None:
    noise = ActionNoise(EpisodeSettings(), 4, seed=0)
    assert not any(noise.next().any() for _ in range(50))


def test_numbers_for_another_action_are_refused() -> None:
    with pytest.raises(UsageError, match="--noise_std has 3 numbers, the action 2 dimensions"):
        ActionNoise(EpisodeSettings(noise_std=(1.0, 1.0, 1.0)), 2, 0)


@pytest.mark.parametrize("every", [1, 4])
def test_an_episode_is_what_the_simulator_does_with_its_actions(every: int) -> None:
    """Labels are the expert's at each state that the executed actions led to; pictures are those of their steps."""
    settings = EpisodeSettings(every, 5, (0.4,), 0.2, (0.5,), (2, 3))
    simulator = make("toy", "reach-blue")
    seen: list[tuple[str, np.ndarray]] = []
    outcome, columns = run_episode(simulator, settings, 3, lambda camera, image: seen.append((camera, image.copy())))
    assert outcome.reason is None
    assert outcome.success_step is not None
    assert outcome.steps == outcome.success_step + 5 == len(columns["action"])
    twin = make("toy", "reach-blue")
    twin.reset(3)
    expert = twin.expert()
    assert expert is not None
    fresh, cut, success = [], 0, None
    for step in range(outcome.steps):
        observation = twin.observe()
        np.testing.assert_array_equal(columns["observation.state"][step], observation["observation.state"])
        np.testing.assert_array_equal(columns["action"][step], np.clip(expert(), -1, 1))
        if columns["image_age"][step] == 0:
            fresh += [observation[camera] for camera in twin.spec.cameras]
        executed = columns["executed_action"][step]
        cut += bool((np.abs(executed) == 1).any())
        result = twin.step(executed)
        assert not result.clipped
        success = step + 1 if result.success and success is None else success
    assert (success, cut) == (outcome.success_step, outcome.clipped)
    assert len(seen) == 2 * outcome.pictures == len(fresh)
    assert [camera for camera, _ in seen[:2]] == list(twin.spec.cameras)
    for (_, image), expected in zip(seen, fresh, strict=True):
        np.testing.assert_array_equal(image, expected)
    assert np.flatnonzero(columns["image_age"] == 0).tolist() == picture_steps(every, 3, outcome.steps)
    assert columns["image_age"].max() == every - 1
    assert np.abs(columns["action"] - columns["executed_action"]).max() > 0.1


def test_pictures_do_not_change_what_happens() -> None:
    """The random numbers of pictures are not those of the noise."""
    simulator = make("toy", "reach-green")
    found = []
    for every in (1, 3):
        settings = EpisodeSettings(every, 0, (0.3,))
        found.append(run_episode(simulator, settings, 8, lambda *_: None)[1]["executed_action"])
    np.testing.assert_array_equal(found[0], found[1])


def test_an_episode_without_success() -> None:
    simulator = make("toy", "reach-green", max_steps=3)
    outcome, columns = run_episode(simulator, EpisodeSettings(), 0, lambda *_: None)
    assert (outcome.reason, outcome.steps, len(columns["action"])) == ("no success in 3 steps", 3, 3)


@pytest.mark.parametrize("action", [[0.0, np.nan], [0.0], None])
def test_an_expert_that_gives_no_action(action: object, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = make("toy", "reach-green")
    monkeypatch.setattr(simulator, "expert", lambda: None if action is None else lambda: np.array(action))
    with pytest.raises(SimulatorError, match="no scripted expert" if action is None else "at step 0 of seed 0"):
        run_episode(simulator, EpisodeSettings(), 0, lambda *_: None)
