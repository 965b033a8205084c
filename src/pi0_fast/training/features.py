"""What a policy gets of a dataset: cameras, state and action, their names and sizes, and statistics of their values.

The dataset's columns keep their names in the data; `Columns.renames` says what the policy calls them. Statistics are
computed from the frames that are trained on, never taken from files. Left out: decoding pictures (frames.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.chunks import ActionSelection
from pi0_fast.actions.normalize import Statistics, exact_statistics
from pi0_fast.data.reader import LeRobotReader
from pi0_fast.dataset_chunks import vector_feature, vector_values
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY, PI0FastConfig, PolicyFeature
from pi0_fast.processors import RelativeActions
from pi0_fast.train_config import Member
from pi0_fast.types import DatasetError, Feature, UsageError

_EMPTY_CAMERA = "observation.images.empty_camera_"


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset that a policy is trained on.

    Attributes:
        state, action: declarations of these columns, shape (D,).
        cameras: image columns that are used, in the policy's order.
        renames: column -> the policy's name, where it is another.
        unused_cameras: image columns that the policy does not look at.
        missing_cameras: the policy's cameras that the dataset lacks.
    """

    state: Feature
    action: Feature
    cameras: tuple[str, ...]
    renames: dict[str, str]
    unused_cameras: tuple[str, ...] = ()
    missing_cameras: tuple[str, ...] = ()

    @property
    def action_names(self) -> list[str] | None:
        """Names of the action's dimensions, if the dataset gives one for each."""
        names = self.action.names
        return list(names) if names is not None and len(names) == self.action.shape[0] else None

    def policy_name(self, column: str) -> str:
        """What the policy calls a column."""
        return self.renames.get(column, column)

    def inputs(self, reader: LeRobotReader) -> dict[str, PolicyFeature]:
        """`input_features` of a policy that is made for this dataset."""
        features = {
            self.policy_name(key): PolicyFeature("VISUAL", channels_first(reader.feature(key))) for key in self.cameras
        }
        return {**features, STATE_KEY: PolicyFeature("STATE", self.state.shape)}

    def outputs(self) -> dict[str, PolicyFeature]:
        """`output_features`."""
        return {ACTION_KEY: PolicyFeature("ACTION", self.action.shape)}


def choose_columns(
    reader: LeRobotReader, member: Member, stored: PI0FastConfig | None, stored_renames: dict[str, str]
) -> Columns:
    """Match the dataset's columns with what a policy looks at.

    Args:
        reader: the dataset.
        member: names columns and renames.
        stored: of the checkpoint whose cameras count; None, or one without cameras: all of the dataset's are used.
        stored_renames: the checkpoint's rename map, used where the command names none.

    Raises:
        DatasetError: no such column.
        UsageError: cameras of the dataset and of the policy have different names, or a rename of nothing.
    """
    given = member.renames
    for source in member.rename_map or {}:
        reader.feature(source)
    kept = {} if member.rename_map is not None else {k: v for k, v in stored_renames.items() if k in reader.features}
    renames = {**kept, **given}
    wanted = tuple(reader.camera_keys if member.cameras is None else member.cameras)
    for key in wanted:
        if key not in reader.camera_keys:
            there = ", ".join(reader.camera_keys) or "none"
            raise UsageError(f"--dataset.cameras: {key!r} is no image column of {reader.repo_id}; there are: {there}")
    state = vector_feature(reader, member.state_key)
    action = vector_feature(reader, member.action_key)
    expected = [] if stored is None else [key for key in stored.image_keys if not key.startswith(_EMPTY_CAMERA)]
    if expected:
        used, unused, missing = _match(wanted, expected, renames, explicit=member.cameras is not None)
    else:
        used, unused, missing = wanted, tuple(key for key in reader.camera_keys if key not in wanted), ()
    targets = [renames.get(key, key) for key in (*used, state.key, action.key)]
    twice = next((name for name in targets if targets.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--rename_map: more than one column becomes {twice!r}")
    idle = [key for key in member.rename_map or {} if key not in (*used, state.key, action.key)]
    if idle:
        raise UsageError(
            f"--rename_map: {idle[0]!r} -> {renames[idle[0]]!r} has no effect: the policy looks at "
            f"{', '.join([*expected, STATE_KEY]) if expected else ', '.join((*used, state.key))}"
        )
    renames = {key: name for key, name in renames.items() if key in (*used, state.key, action.key) and key != name}
    return Columns(state, action, used, renames, unused, missing)


def _match(
    wanted: Sequence[str], expected: Sequence[str], renames: dict[str, str], *, explicit: bool
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Used, unused and missing cameras. As in LeRobot one side may have more than the other, but not both."""
    place = {renames.get(key, key): key for key in wanted}
    used = tuple(place[key] for key in expected if key in place)
    unused = tuple(key for key in wanted if key not in used)
    missing = tuple(key for key in expected if key not in place)
    if unused and (missing or explicit):
        pairs = dict(zip(unused, missing, strict=False))
        advice = f"say which is which with --rename_map='{json.dumps(pairs)}'" if pairs else "leave it out"
        raise UsageError(
            f"the dataset has the camera {unused[0]!r}, which the policy does not know; it looks at "
            f"{', '.join(expected)}: {advice}"
        )
    if not used:
        raise UsageError(f"the dataset has no camera, and the policy looks at {', '.join(expected)}")
    return used, unused, missing


def channels_first(feature: Feature) -> tuple[int, int, int]:
    """(3, height, width) of an image column, however it is declared.

    Raises:
        DatasetError: it has not three channels.
    """
    shape = feature.shape
    if len(shape) == 3 and shape[0] == 3:
        return (3, shape[1], shape[2])
    if len(shape) == 3 and shape[2] == 3:
        return (3, shape[0], shape[1])
    raise DatasetError(
        f"column {feature.key!r} is declared with shape {list(shape)}; an image has height, width and 3 channels"
    )


def action_selection(config: PI0FastConfig, columns: Columns) -> ActionSelection:
    """Which actions are relative to which dimension of the state: i to i, as LeRobot has it.

    Raises:
        UsageError: the state has too few dimensions.
    """
    size, state_size = columns.action.shape[0], columns.state.shape[0]
    if not config.use_relative_actions:
        return ActionSelection.create(size)
    names = config.action_feature_names
    mask = RelativeActions(size, tuple(config.relative_exclude_joints), None if names is None else tuple(names)).mask
    dims = [dim for dim, relative in enumerate(mask) if relative]
    if dims and dims[-1] >= state_size:
        raise UsageError(
            f"--policy.use_relative_actions: action dimension {dims[-1]} would be relative to that dimension of the "
            f"state, which has {state_size}: name what stays absolute in --policy.relative_exclude_joints"
        )
    return ActionSelection.create(size, delta_dims=dims, delta_state_dims=dims, state_size=state_size)


def relative_names(selection: ActionSelection, config: PI0FastConfig, columns: Columns) -> tuple[str, str]:
    """For the report: which actions are relative, and which stay absolute, by name or number."""
    names = columns.action_names or [str(dim) for dim in range(selection.size)]
    absolute = [name for dim, name in enumerate(names) if dim not in selection.delta_dims]
    kept = f"absolute: {', '.join(absolute)}" if absolute else "none is absolute"
    asked = json.dumps(list(config.relative_exclude_joints))
    relative = ", ".join(names[dim] for dim in selection.delta_dims) or "none"
    return relative, f"{kept}; relative_exclude_joints is {asked}"


def data_statistics(
    reader: LeRobotReader, columns: Columns, selection: ActionSelection, episodes: Sequence[int], chunk_size: int
) -> dict[str, Statistics]:
    """Exact statistics of state and action over the given episodes, under the policy's names.

    Of the action those of what is encoded: relative ones over all whole chunks, absolute ones over all frames.

    Raises:
        DatasetError: values that are not finite, or, for relative actions, no episode as long as a chunk.
    """
    keys = list(dict.fromkeys((columns.action.key, columns.state.key)))

    def actions() -> Iterator[npt.NDArray[np.float32]]:
        for episode in reader.iter_episodes(keys, episodes):
            values = vector_values(episode, columns.action.key)
            yield from selection.statistics_blocks(values, vector_values(episode, columns.state.key), chunk_size)

    def states() -> Iterator[npt.NDArray[np.float32]]:
        for episode in reader.iter_episodes([columns.state.key], episodes):
            yield vector_values(episode, columns.state.key)

    state_names = columns.state.names
    if state_names is not None and len(state_names) != columns.state.shape[0]:
        state_names = None
    return {
        STATE_KEY: exact_statistics(states, names=state_names),
        ACTION_KEY: exact_statistics(actions, names=columns.action_names),
    }
