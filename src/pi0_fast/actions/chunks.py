"""From the frames of one episode to action chunks [N, H, D] and back: which dimensions, windows and units.

Holds the notation of dimension ranges (``"0:6,7:23"``), the selection of encoded dimensions with the delta
transform (actions relative to the state) in both directions, the choice of windows and of held-out episodes.
Leaves out normalisation (`normalize.py`) and everything about files: an episode arrives as plain arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pi0_fast.types import DatasetError, TokenizerError, UsageError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


def as_numbers(values: Any, what: str) -> NDArray[Any]:
    """Any numeric array-like as a real numpy array, without a copy where numpy needs none.

    Args:
        values: numpy or torch array (any device, with or without gradient, bfloat16 too), nested lists, ...
        what: how the error calls it, e.g. ``"actions"``.

    Raises:
        TokenizerError: not numeric (strings, objects, complex numbers), or rows of unequal length.
    """
    if hasattr(values, "detach"):  # a torch tensor; torch itself is never imported here
        values = values.detach()
        if hasattr(values, "cpu"):
            values = values.cpu()
        if "bfloat16" in str(getattr(values, "dtype", "")):
            values = values.float()  # numpy has no bfloat16; float32 holds every value of it
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise TokenizerError(f"{what} cannot be read as an array of numbers: {error}") from error
    if array.dtype.kind not in "biuf":
        raise TokenizerError(f"{what} must be numbers, got an array of dtype {array.dtype}")
    return array


# --- the notation of dimensions -----------------------------------------------------------------------------


def parse_dims(text: str | Sequence[int] | None, *, size: int, what: str) -> tuple[int, ...]:
    """Dimension indices from ``"0:6,7:23"``, ``"0,1,2"``, ``"3"``, mixtures, or a sequence of integers.

    Ranges are half open: ``"0:6"`` is 0, 1, 2, 3, 4, 5. The order given is kept. None means all dimensions.

    Args:
        text: the flag's value.
        size: number of dimensions there are; valid indices are 0 to size - 1.
        what: the flag or setting, named in errors, e.g. ``"--encoded_dims"``.

    Raises:
        UsageError: empty, not integers, a reversed or empty range, outside the data, a dimension given twice.
    """
    if text is None:
        return tuple(range(size))
    shown = f"{what} {text!r}"
    dims: list[int] = []
    parts: Sequence[str | int] = text.split(",") if isinstance(text, str) else text
    for part in parts:
        if isinstance(part, str):
            start, stop = _parse_range(part.strip(), shown)
        else:
            start, stop = _one_index(part, shown)
        if start < 0 or stop > size:
            raise UsageError(
                f"{shown}: {part!r} is outside the data, which has {size} dimensions "
                f"(indices 0 to {size - 1}; all of them are '0:{size}')"
            )
        dims.extend(range(start, stop))
    if not dims:
        raise UsageError(f"{shown} names no dimension; the data has {size} (all of them are '0:{size}')")
    twice = sorted({dim for dim in dims if dims.count(dim) > 1})
    if twice:
        raise UsageError(f"{shown} names dimension {twice[0]} more than once (of {size} dimensions)")
    return tuple(dims)


def _one_index(part: Any, shown: str) -> tuple[int, int]:
    try:
        index = operator.index(part)
    except TypeError as error:
        raise UsageError(f"{shown}: {part!r} is not an integer") from error
    return index, index + 1


def _parse_range(part: str, shown: str) -> tuple[int, int]:
    """``"3"`` -> (3, 4), ``"0:6"`` -> (0, 6)."""
    first, colon, last = part.partition(":")
    try:
        if "_" in part or not part.isascii():  # int() would read 1_0, and the digits of every script
            raise ValueError(part)
        start = int(first)
        stop = int(last) if colon else start + 1
    except ValueError as error:
        raise UsageError(
            f"{shown}: {part!r} is not a dimension or a range; write e.g. '0:6,7:23' or '0,1,2'"
        ) from error
    if stop <= start:
        raise UsageError(f"{shown}: the range {part!r} is {'empty' if stop == start else 'reversed'}")
    return start, stop


def dim_ranges(dims: Sequence[int]) -> list[list[int]]:
    """Contiguous half-open ranges in the order given: (0, 1, 2, 5, 6) -> [[0, 3], [5, 7]]."""
    ranges: list[list[int]] = []
    for dim in dims:
        if ranges and ranges[-1][1] == dim:
            ranges[-1][1] = dim + 1
        else:
            ranges.append([dim, dim + 1])
    return ranges


def format_dims(dims: Sequence[int]) -> str:
    """The inverse of `parse_dims`: (0, 1, 2, 5) -> ``"0:3,5:6"``.

    Always start:stop, since LeRobot's own reader of ``encoded_dims`` knows no single numbers.
    """
    return ",".join(f"{start}:{stop}" for start, stop in dim_ranges(dims))


# --- which dimensions are encoded, and relative to what -----------------------------------------------------


@dataclass(frozen=True)
class ActionSelection:
    """Which action dimensions are encoded, and which of them relative to which dimension of the state.

    The delta transform of a chunk subtracts the state at the chunk's *first* step from all its steps
    (LeRobot's "relative actions", openpi's DeltaActions), so that chunk + state gives the actions back.

    Attributes:
        action_size: dimensions A of a raw action.
        dims: encoded action dimensions, ascending; D = len(dims).
        delta_dims: the action dimensions (indices into the raw action, ascending, all encoded) made relative.
        delta_state_dims: for each delta dimension, the dimension of the state that is subtracted.
        state_size: dimensions S of a state when known; states of another size are then refused.

    Raises:
        UsageError: indices outside the data, not ascending, maps of unequal length, a delta dim not encoded.
    """

    action_size: int
    dims: tuple[int, ...]
    delta_dims: tuple[int, ...] = ()
    delta_state_dims: tuple[int, ...] = ()
    state_size: int | None = None

    def __post_init__(self) -> None:
        parse_dims(self.dims, size=self.action_size, what="encoded dims")
        if any(a >= b for a, b in pairwise(self.dims)):
            raise UsageError(
                f"encoded dims {format_dims(self.dims)!r} are not in ascending order; "
                f"write {format_dims(sorted(self.dims))!r}"
            )
        if len(self.delta_dims) != len(self.delta_state_dims):
            raise UsageError(
                f"{len(self.delta_dims)} delta dims {list(self.delta_dims)} but {len(self.delta_state_dims)} "
                f"state dims {list(self.delta_state_dims)}: --delta_state_dims needs one state dimension per "
                f"delta dim"
            )
        if not self.delta_dims:
            return
        parse_dims(self.delta_dims, size=self.action_size, what="delta dims")
        absent = [dim for dim in self.delta_dims if dim not in self.dims]
        if absent:
            raise UsageError(
                f"delta dims {absent} are not among the encoded dims {format_dims(self.dims)!r}: "
                f"encode them too, or leave them out of --delta_dims"
            )
        if any(a >= b for a, b in pairwise(self.delta_dims)):
            raise UsageError(f"delta dims {list(self.delta_dims)} are not in ascending order")
        highest = max(self.delta_state_dims)
        if min(self.delta_state_dims) < 0 or (self.state_size is not None and highest >= self.state_size):
            raise UsageError(
                f"--delta_state_dims {list(self.delta_state_dims)} are outside the state, "
                f"which has {self.state_size if self.state_size is not None else 'no negative'} dimensions"
            )

    @classmethod
    def create(
        cls,
        action_size: int,
        *,
        encoded_dims: str | Sequence[int] | None = None,
        delta_dims: str | Sequence[int] | None = None,
        delta_state_dims: str | Sequence[int] | None = None,
        state_size: int | None = None,
    ) -> ActionSelection:
        """From the values of the flags.

        Args:
            action_size: dimensions of a raw action.
            encoded_dims: None encodes all.
            delta_dims: None makes nothing relative.
            delta_state_dims: state dimension of each delta dim, in the order of `delta_dims`. May be left out
                only where action and state have the same size; action dim i is then relative to state dim i.
            state_size: dimensions of a state; needed when there are delta dims.

        Raises:
            UsageError: see the class; also a state map needed and missing, or given without delta dims.
        """
        dims = parse_dims(encoded_dims, size=action_size, what="--encoded_dims")
        if delta_dims is None:
            if delta_state_dims is not None:
                raise UsageError("--delta_state_dims is given without --delta_dims: nothing would be relative")
            return cls(action_size, dims, state_size=state_size)
        delta = parse_dims(delta_dims, size=action_size, what="--delta_dims")
        if state_size is None:
            raise UsageError(f"--delta_dims {delta_dims!r} needs the state, and there is none (see --state_key)")
        if delta_state_dims is not None:
            state = _parse_state_map(delta_state_dims, size=state_size)
        elif state_size == action_size:
            state = delta
        else:
            raise UsageError(
                f"actions have {action_size} dimensions and states {state_size}, so it is not known which "
                f"state dimension each of the delta dims {list(delta)} is relative to: say so with "
                f"--delta_state_dims, one state dimension per delta dim in the same order, e.g. "
                f"--delta_state_dims {','.join(str(index) for index in range(len(delta)))!r}"
            )
        if len(state) == len(delta):
            order = np.argsort(delta)
            delta, state = tuple(delta[i] for i in order), tuple(state[i] for i in order)
        return cls(action_size, dims, delta, state, state_size)

    @property
    def size(self) -> int:
        """Number of encoded dimensions D."""
        return len(self.dims)

    @property
    def is_delta(self) -> bool:
        """Whether any encoded dimension is relative to the state."""
        return bool(self.delta_dims)

    def encoded_names(self, names: Sequence[str] | None) -> tuple[str, ...] | None:
        """The names of the encoded dimensions, from those of all action dimensions (None stays None)."""
        if names is None:
            return None
        if len(names) != self.action_size:
            raise UsageError(f"{len(names)} names for {self.action_size} action dimensions")
        return tuple(names[dim] for dim in self.dims)

    def window_chunks(self, actions: Any, states: Any, starts: Any, horizon: int) -> FloatArray:
        """Chunks of one episode at the given first frames.

        Args:
            actions: [T, A] raw actions of the episode.
            states: [T, S], or None when nothing is relative.
            starts: [K] first frames, 0 <= start <= T - H.
            horizon: H, steps of a chunk.

        Returns:
            float32 [K, H, D], C-contiguous: ``chunk[k, t] = actions[start_k + t]``, minus
            ``states[start_k]`` in the delta dimensions; encoded dimensions only.

        Raises:
            DatasetError: sizes that do not fit the selection, missing states, states of another length.
            UsageError: windows outside the episode.
        """
        actions, states = self._check_episode(actions, states)
        first = np.asarray(starts, dtype=np.int64).reshape(-1)
        count = window_count(len(actions), horizon)
        if len(first) and (first.min() < 0 or first.max() >= count):
            raise UsageError(
                f"windows of {horizon} steps starting at frames {first.min()} to {first.max()} do not fit an "
                f"episode of {len(actions)} frames"
            )
        encoded = actions[:, list(self.dims)]
        chunks = encoded[first[:, None] + np.arange(horizon)]
        if self.is_delta:
            chunks = self._shift(chunks, -states[first][:, list(self.delta_state_dims)])
        return np.ascontiguousarray(chunks, dtype=np.float32)

    def all_windows(
        self, actions: Any, states: Any, horizon: int, *, max_values: int = 1 << 20
    ) -> Iterator[FloatArray]:
        """Every window of one episode, in order, as blocks [k, H, D] of at most `max_values` numbers.

        A block holds one window at least; there is none when the episode is shorter than the horizon.
        Arguments and errors as in `window_chunks`.
        """
        actions, states = self._check_episode(actions, states)
        count = window_count(len(actions), horizon)
        step = max(1, max_values // (horizon * self.size))
        for start in range(0, count, step):
            yield self.window_chunks(actions, states, np.arange(start, min(start + step, count)), horizon)

    def statistics_blocks(self, actions: Any, states: Any, horizon: int) -> Iterator[FloatArray]:
        """What the statistics of the encoded values are taken over, for one episode.

        Without delta dimensions its frames, each once: one block [T, D]. With delta dimensions every window,
        as in `all_windows`: a delta exists only within a window, and statistics are those of what is encoded.
        """
        if self.is_delta:
            yield from self.all_windows(actions, states, horizon)
        else:
            actions, _ = self._check_episode(actions, None)
            yield np.ascontiguousarray(actions[:, list(self.dims)], dtype=np.float32)

    def from_absolute(self, chunks: Any, states: Any = None) -> FloatArray:
        """Raw action chunks to what is encoded; `to_absolute` inverts it where all dimensions are encoded.

        Args:
            chunks: [..., H, A] raw actions.
            states: [..., S] or [S], the state at each chunk's first step; None when nothing is relative.

        Returns:
            float32 [..., H, D].
        """
        array = self._check_last(as_numbers(chunks, "action chunks"), self.action_size, "action chunks")
        return self._relative(array[..., list(self.dims)], states, sign=-1)

    def to_absolute(self, chunks: Any, states: Any = None) -> FloatArray:
        """Decoded chunks in absolute units: the state is added again in the delta dimensions.

        Args:
            chunks: [..., H, D] encoded dimensions, e.g. [N, H, D] or [H, D].
            states: [..., S], e.g. [N, S], or [S] for all: the state at each chunk's first step; None when
                nothing is relative.

        Returns:
            float32 [..., H, D], the encoded dimensions in the robot's units.

        Raises:
            TokenizerError: shapes that do not fit; missing states.
        """
        array = self._check_last(as_numbers(chunks, "chunks"), self.size, "chunks")
        return self._relative(array, states, sign=1)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives an equal selection."""
        return {
            "action_size": self.action_size,
            "dims": list(self.dims),
            "delta_dims": list(self.delta_dims),
            "delta_state_dims": list(self.delta_state_dims),
            "state_size": self.state_size,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ActionSelection:
        """Reads what `to_json` wrote.

        Raises:
            TokenizerError: missing or unknown keys, or values that are no selection.
        """
        keys = {"action_size", "dims", "delta_dims", "delta_state_dims", "state_size"}
        if not isinstance(value, Mapping) or set(value) != keys:
            found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise TokenizerError(f"a saved selection of actions needs exactly the keys {sorted(keys)}, found {found}")
        try:
            return cls(
                operator.index(value["action_size"]),
                tuple(operator.index(dim) for dim in value["dims"]),
                tuple(operator.index(dim) for dim in value["delta_dims"]),
                tuple(operator.index(dim) for dim in value["delta_state_dims"]),
                None if value["state_size"] is None else operator.index(value["state_size"]),
            )
        except (TypeError, UsageError) as error:
            raise TokenizerError(f"the saved selection of actions cannot be used: {error}") from error

    def _relative(self, chunks: NDArray[Any], states: Any, *, sign: int) -> FloatArray:
        """Adds (sign 1) or subtracts (-1) states [..., S] in the delta dimensions of chunks [..., H, D]."""
        if chunks.ndim < 2:
            raise TokenizerError(f"chunks must be [..., H, D], got shape {chunks.shape}")
        if self.is_delta:
            if states is None:
                raise TokenizerError(
                    f"action dims {list(self.delta_dims)} are relative to the state: pass each chunk's state"
                )
            state = as_numbers(states, "states")
            if state.ndim == 0 or (state.ndim > 1 and state.shape[:-1] != chunks.shape[:-2]):
                raise TokenizerError(f"states of shape {state.shape} do not fit chunks of shape {chunks.shape}")
            self._check_state_size(state.shape[-1], TokenizerError)
            chunks = self._shift(chunks, sign * _widen(state[..., list(self.delta_state_dims)]))
        return np.ascontiguousarray(chunks, dtype=np.float32)

    def _shift(self, chunks: NDArray[Any], states: NDArray[Any]) -> NDArray[Any]:
        """Chunks [..., H, D] with states [..., len(delta_dims)] added in the delta dims of every step."""
        positions = [self.dims.index(dim) for dim in self.delta_dims]
        shifted = chunks.astype(np.result_type(chunks.dtype, states.dtype), copy=True)
        shifted[..., positions] += states[..., None, :]
        return shifted

    def _check_episode(self, actions: Any, states: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """actions [T, A] and states [T, S] as floating arrays ([T, 0] states when nothing is relative)."""
        actions = as_numbers(actions, "actions")
        if actions.ndim != 2 or actions.shape[1] != self.action_size:
            raise DatasetError(f"actions have shape {actions.shape}, expected [frames, {self.action_size}]")
        if not self.is_delta:
            return actions, np.zeros((len(actions), 0), np.float32)
        if states is None:
            raise DatasetError(
                f"action dims {list(self.delta_dims)} are relative to the state, but there are no states"
            )
        states = as_numbers(states, "states")
        if states.ndim != 2 or len(states) != len(actions):
            raise DatasetError(f"states have shape {states.shape}, expected [{len(actions)}, S] as the actions have")
        self._check_state_size(states.shape[1], DatasetError)
        return _widen(actions), _widen(states)

    def _check_state_size(self, size: int, error: type[DatasetError] | type[TokenizerError]) -> None:
        expected = self.state_size
        if (expected is not None and size != expected) or size <= max(self.delta_state_dims):
            wanted = f"{expected}" if expected is not None else f"more than {max(self.delta_state_dims)}"
            raise error(f"states have {size} dimensions, expected {wanted} (delta_state_dims {self.delta_state_dims})")

    @staticmethod
    def _check_last(array: NDArray[Any], size: int, what: str) -> NDArray[Any]:
        if array.ndim < 2 or array.shape[-1] != size:
            raise TokenizerError(f"{what} have shape {array.shape}, expected [..., H, {size}]")
        return array


def _widen(array: NDArray[Any]) -> NDArray[Any]:
    """At least float32: integers and halves would overflow or round in a subtraction."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def _parse_state_map(text: str | Sequence[int], *, size: int) -> tuple[int, ...]:
    """Like `parse_dims`, in the order given, but a state dimension may appear more than once."""
    parts: Sequence[str | int] = text.split(",") if isinstance(text, str) else text
    found: list[int] = []
    for part in parts:
        one: str | Sequence[int] = part if isinstance(part, str) else [part]
        found.extend(parse_dims(one, size=size, what="--delta_state_dims"))
    return tuple(found)


# --- which windows and which episodes -----------------------------------------------------------------------


def window_count(length: int, horizon: int) -> int:
    """Number of windows of `horizon` steps that lie whole within an episode of `length` frames."""
    if horizon < 1:
        raise UsageError(f"the action horizon must be at least 1 step, got {horizon}")
    return max(0, length - horizon + 1)


def sample_starts(length: int, horizon: int, fraction: float, *, seed: int, episode_index: int) -> IntArray:
    """First frames of a sample of an episode's windows: sorted, without repetition.

    Args:
        length: frames of the episode.
        horizon: steps of a window.
        fraction: share of the windows, in (0, 1]; ``max(1, int(count * fraction))`` are taken, all at 1.
        seed: with `episode_index` it determines the sample, whatever other episodes are read.
        episode_index: index of the episode in the dataset.

    Returns:
        int64 [K]; empty when the episode is shorter than the horizon.
    """
    if not 0 < fraction <= 1:
        raise UsageError(f"the sampled fraction of windows must be above 0 and at most 1, got {fraction}")
    _check_seed(seed)
    count = window_count(length, horizon)
    if count == 0 or fraction == 1:
        return np.arange(count, dtype=np.int64)
    generator = np.random.default_rng([seed, episode_index])
    return np.sort(generator.choice(count, sample_count(count, fraction), replace=False)).astype(np.int64)


def sample_count(count: int, fraction: float) -> int:
    """How many of `count` windows `sample_starts` takes."""
    return count if fraction == 1 or count == 0 else max(1, int(count * fraction))


def limit_samples(counts: Mapping[int, int], most: int, *, seed: int) -> dict[int, IntArray] | None:
    """A sample of at most `most` from groups of `counts` each, all members equally likely.

    Args:
        counts: group -> number of members.
        most: members to keep in all.
        seed: determines the choice.

    Returns:
        Group -> sorted positions (int64) of its members that are kept; None when there are no more than `most`.
    """
    total = sum(counts.values())
    if total <= most:
        return None
    chosen = np.sort(np.random.default_rng([seed, total]).choice(total, most, replace=False, shuffle=False))
    kept: dict[int, IntArray] = {}
    begin = 0
    for group, count in counts.items():
        first, last = np.searchsorted(chosen, [begin, begin + count])
        kept[group] = chosen[first:last].astype(np.int64) - begin
        begin += count
    return kept


def split_episodes(indices: Sequence[int], val_fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Episodes to fit on and episodes held out, both ascending.

    Whole episodes are held out, since windows of one episode resemble each other. With a positive fraction
    and two episodes or more at least one is held out, and never all; a single episode is fitted on.

    Args:
        indices: episode indices, in any order (the split does not depend on it).
        val_fraction: share held out, in [0, 1); 0 holds none out.
        seed: determines the choice.
    """
    if not 0 <= val_fraction < 1:
        raise UsageError(f"the held-out fraction of episodes must be at least 0 and below 1, got {val_fraction}")
    _check_seed(seed)
    ordered = sorted(operator.index(index) for index in indices)
    if any(a == b for a, b in pairwise(ordered)):
        raise UsageError(f"an episode is listed twice: {ordered}")
    if val_fraction == 0 or len(ordered) < 2:
        return tuple(ordered), ()
    count = min(max(1, int(len(ordered) * val_fraction + 0.5)), len(ordered) - 1)
    chosen = np.random.default_rng(seed).choice(len(ordered), count, replace=False)
    held_out = {ordered[position] for position in chosen}
    return tuple(index for index in ordered if index not in held_out), tuple(sorted(held_out))


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UsageError(f"the seed must not be negative, got {seed}")
