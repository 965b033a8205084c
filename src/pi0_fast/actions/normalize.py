"""Statistics of action values and the one normaliser: fit, apply, invert, to and from json.

All five modes are one formula, ``y = 2 (x - low) / (high - low) - 1``, and differ in which statistics are
`low` and `high`. Quantiles are exact (equal to numpy's over all rows) in memory that does not grow with the
number of rows. Leaves out where the values come from (`fitting.py`) and which dimensions they are
(`chunks.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pi0_fast.actions.chunks import ActionSelection, as_numbers
from pi0_fast.types import DatasetError, Pi0FastError, TokenizerError, UsageError

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
Blocks = Callable[[], Iterable[Any]]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_QUANTITIES = ("min", "max", "mean", "std", *QUANTILES)
_FORMAT_VERSION = 1
# A mode's range below this share of max - min is not trusted: the dimension moves in a few frames only.
_LEAST_SHARE_OF_RANGE = 0.01
# max - min up to this many float32 spacings of the larger magnitude is rounding, not motion.
_SPACINGS_OF_NOISE = 4
# ... and so is this much around zero, where float32 resolves far less: a nanometre, a nanoradian.
_LEAST_MOTION = 1e-9
_BUFFER_VALUES = 1 << 22  # 16 MB of float32: what exact_statistics holds at a time
_SLICE_VALUES = 1 << 16  # apply and invert work on slices that stay in the cache


class NormalizationMode(str, enum.Enum):
    """Which statistics map to -1 and +1; names as in LeRobot's ``--normalization_mode``."""

    QUANTILES = "QUANTILES"  # q01, q99; clips by default
    MEAN_STD = "MEAN_STD"  # mean - std, mean + std
    MIN_MAX = "MIN_MAX"  # min, max
    QUANTILE10 = "QUANTILE10"  # q10, q90; clips by default
    IDENTITY = "IDENTITY"  # -1, +1: values stay as they are

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, text: str) -> NormalizationMode:
        """The mode of that name, in upper or lower case.

        Raises:
            UsageError: no such mode; the message lists them.
        """
        for mode in cls:
            if isinstance(text, str) and text.strip().upper() == mode.value:
                return mode
        raise UsageError(f"unknown normalization mode {text!r}; one of {', '.join(cls.__members__)}")

    @classmethod
    def _missing_(cls, value: object) -> NormalizationMode:
        return cls.parse(value)  # type: ignore[arg-type]  # parse refuses what is no string

    @property
    def needs(self) -> tuple[str, ...]:
        """The statistics that the range of this mode is made of."""
        return _NEEDS[self]

    @property
    def clips(self) -> bool:
        """Whether values outside the range are clipped unless the caller says otherwise."""
        return self in (NormalizationMode.QUANTILES, NormalizationMode.QUANTILE10)


_NEEDS: dict[NormalizationMode, tuple[str, ...]] = {
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
    NormalizationMode.IDENTITY: (),
}


# --- statistics ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Statistics:
    """Per-dimension statistics over all rows, named as in LeRobot's ``meta/stats.json``.

    Attributes:
        min, max, mean, std, q01, q10, q50, q90, q99: float64 [D], read-only; std is the population's
            (divided by n).
        count: number of rows.

    Raises:
        DatasetError: different lengths, not finite, negative std, min above max, crossed quantiles.
    """

    min: DoubleArray
    max: DoubleArray
    mean: DoubleArray
    std: DoubleArray
    q01: DoubleArray
    q10: DoubleArray
    q50: DoubleArray
    q90: DoubleArray
    q99: DoubleArray
    count: int

    def __post_init__(self) -> None:
        for name in _QUANTITIES:
            object.__setattr__(self, name, _vector(getattr(self, name), f"statistics: {name}"))
        _check_quantities({name: getattr(self, name) for name in _QUANTITIES})
        if self.count < 1:
            raise DatasetError(f"statistics: count is {self.count}; there must be at least one row")

    @property
    def size(self) -> int:
        """Number of dimensions D."""
        return len(self.min)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Statistics:
        """From ``{"min": [...], ..., "q99": [...], "count": [n]}``; other keys are ignored.

        Raises:
            DatasetError: a quantity is missing (all missing ones are named) or cannot be used.
        """
        missing = [name for name in (*_QUANTITIES, "count") if name not in mapping]
        if missing:
            raise DatasetError(f"the statistics lack {', '.join(missing)} (present: {', '.join(mapping)})")
        count = _vector(mapping["count"], "statistics: count")
        if len(count) != 1 or count[0] != int(count[0]):
            raise DatasetError(f"statistics: count must be one whole number, got {mapping['count']!r}")
        return cls(count=int(count[0]), **{name: mapping[name] for name in _QUANTITIES})

    def to_mapping(self) -> dict[str, list[float] | list[int]]:
        """As LeRobot writes them: lists of float, ``count`` as a list of one integer. Exact both ways."""
        mapping: dict[str, list[float] | list[int]] = {
            name: [float(value) for value in getattr(self, name)] for name in _QUANTITIES
        }
        mapping["count"] = [self.count]
        return mapping

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statistics) and self.to_mapping() == other.to_mapping()

    __hash__ = None  # type: ignore[assignment]


def _vector(values: Any, what: str) -> DoubleArray:
    """A read-only float64 copy [D] (a single number becomes [1])."""
    try:
        array = np.array(as_numbers(values, what), dtype=np.float64, ndmin=1)
    except TokenizerError as error:
        raise DatasetError(str(error)) from error
    if array.ndim != 1:
        raise DatasetError(f"{what} has shape {array.shape}, expected one number per dimension")
    if not np.isfinite(array).all():
        dim = int(np.flatnonzero(~np.isfinite(array))[0])
        raise DatasetError(f"{what} of dimension {dim} is {array[dim]}")
    array.setflags(write=False)
    return array


def _check_quantities(values: Mapping[str, DoubleArray]) -> None:
    """Whether those of the quantities that are present can be statistics of one set of rows."""
    lengths = {name: len(value) for name, value in values.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetError(f"statistics of different length: {lengths}")
    for low, high in (("min", "max"), ("q01", "q99"), ("q10", "q90")):
        if low in values and high in values and (values[low] > values[high]).any():
            dim = int(np.flatnonzero(values[low] > values[high])[0])
            raise DatasetError(
                f"statistics of dimension {dim}: {low} = {values[low][dim]} is above {high} = {values[high][dim]}"
            )
    if "std" in values and (values["std"] < 0).any():
        dim = int(np.flatnonzero(values["std"] < 0)[0])
        raise DatasetError(f"statistics of dimension {dim}: std = {values['std'][dim]} is negative")


# --- exact statistics in bounded memory ---------------------------------------------------------------------


def exact_statistics(
    blocks: Blocks,
    *,
    names: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
    buffer_values: int = _BUFFER_VALUES,
) -> Statistics:
    """Statistics over all rows, with quantiles equal to ``np.quantile(rows as float64, q, axis=0)``.

    Data that fits the buffer is handed to numpy. Beyond that the quantiles are found by radix selection on
    the float32 bit patterns, which order like the values once sign bits are turned round: a first pass
    counts the high 16 bits of every dimension, a second the low 16 bits within the few bins that hold a
    wanted rank. Memory is about 3 MB per dimension (5 at worst) and the buffer, whatever the number of rows.

    Args:
        blocks: called once, or twice for data larger than the buffer; each time it must give the same rows,
            as arrays [n, D] or [n, H, D] of any size. Values are taken as float32, as datasets hold them.
        names: of the D dimensions, for errors.
        progress: called with the number of rows just read ([n, H, D] has n H); each is reported once per
            pass.
        buffer_values: numbers held at a time.

    Raises:
        DatasetError: no rows, blocks of different width, a value that is not finite in float32 (the message
            names dimension, block, row and value), or another content when read the second time.
    """
    moments: _Moments | None = None
    counts = np.zeros((0, 0), np.int64)
    for columns, last in _columns(blocks(), names, progress, buffer_values):
        if moments is None:
            moments = _Moments(len(columns))
            if not last:
                counts = np.zeros((len(columns), 1 << 16), np.int64)
        moments.add(columns)
        if len(counts) == 0:
            table = np.quantile(columns.astype(np.float64), list(QUANTILES.values()), axis=1)
            return moments.statistics(table)
        for dim, column in enumerate(columns):
            counts[dim] += np.bincount(_ordered_keys(column) >> 16, minlength=1 << 16)
    if moments is None:
        raise DatasetError("there are no rows to compute statistics of")
    reread = _columns(blocks(), names, progress, buffer_values)
    return moments.statistics(_selected_quantiles(counts, moments.count, (columns for columns, _ in reread)))


class _Moments:
    """Count, min, max, mean, standard deviation of columns that arrive in parts (Chan et al. 1983)."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.min = np.full(size, np.inf)
        self.max = np.full(size, -np.inf)
        self.mean = np.zeros(size)
        self.squares = np.zeros(size)  # sum of squared distances from the mean

    def add(self, columns: FloatArray) -> None:
        """Takes in columns [D, n], n >= 1."""
        self.min = np.minimum(self.min, columns.min(axis=1))
        self.max = np.maximum(self.max, columns.max(axis=1))
        added = columns.shape[1]
        total = self.count + added
        for dim, column in enumerate(columns):
            values = column.astype(np.float64)
            mean = values.mean()
            values -= mean
            distance = mean - self.mean[dim]
            np.multiply(values, values, out=values)  # no BLAS: its sums depend on the number of threads
            self.squares[dim] += values.sum() + distance * distance * (self.count * added / total)
            self.mean[dim] += distance * (added / total)
        self.count = total

    def statistics(self, quantiles: DoubleArray) -> Statistics:
        """With the quantiles [5, D] in the order of QUANTILES."""
        return Statistics(
            # Adding zero turns -0.0 into 0.0, which is the same number but another text in a file.
            min=self.min + 0.0,
            max=self.max + 0.0,
            mean=np.clip(self.mean, self.min, self.max) + 0.0,
            std=np.where(self.min == self.max, 0.0, np.sqrt(self.squares / self.count)),
            count=self.count,
            **{name: row + 0.0 for name, row in zip(QUANTILES, quantiles, strict=True)},
        )


def _columns(
    blocks: Iterable[Any],
    names: Sequence[str] | None,
    progress: Callable[[int], None] | None,
    buffer_values: int,
) -> Iterator[tuple[FloatArray, bool]]:
    """All rows as (columns [D, n] float32, whether the last); one buffer, overwritten at the next step."""
    buffer: FloatArray | None = None
    filled = 0
    for number, block in enumerate(blocks):
        array = _checked_block(block, number, names)
        if buffer is None:
            buffer = np.empty((array.shape[-1], max(1, buffer_values // array.shape[-1])), np.float32)
        if array.shape[-1] != len(buffer):
            raise DatasetError(f"block {number} has {array.shape[-1]} dimensions, those before {len(buffer)}")
        inner = array.shape[1] if array.ndim == 3 else 1
        step = max(1, buffer.shape[1] // max(1, inner))
        for first in range(0, len(array), step):
            rows = _float32_rows(array[first : first + step], number, first, names)
            taken = 0
            while taken < len(rows):
                if filled == buffer.shape[1]:
                    yield buffer, False
                    filled = 0
                part = rows[taken : taken + buffer.shape[1] - filled]
                buffer[:, filled : filled + len(part)] = part.T
                filled += len(part)
                taken += len(part)
            if progress is not None and len(rows):
                progress(len(rows))
    if buffer is not None and filled:
        yield buffer[:, :filled], True


def _checked_block(block: Any, number: int, names: Sequence[str] | None) -> NDArray[Any]:
    try:
        array = as_numbers(block, f"block {number}")
    except TokenizerError as error:
        raise DatasetError(str(error)) from error
    if array.ndim not in (2, 3) or array.shape[-1] == 0:
        raise DatasetError(f"block {number} has shape {array.shape}, expected [n, D] or [n, H, D]")
    if names is not None and len(names) != array.shape[-1]:
        raise DatasetError(f"block {number} has {array.shape[-1]} dimensions, but there are {len(names)} names")
    return array


def _float32_rows(array: NDArray[Any], number: int, first: int, names: Sequence[str] | None) -> FloatArray:
    """Rows [n, D] of a part of a block that starts at its row `first`; raises on what is not finite."""
    with np.errstate(over="ignore"):  # what overflows float32 is found below
        values = array.astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        place = tuple(int(i) for i in np.argwhere(~finite)[0])
        step = f", step {place[1]}" if array.ndim == 3 else ""
        raise DatasetError(
            f"{_dim_text(place[-1], names)} is {array[place]} in block {number}, row "
            f"{first + place[0]}{step}: repair or leave out that recording; statistics need finite float32 "
            f"values"
        )
    return values.reshape(-1, array.shape[-1])


def _dim_text(dim: int, names: Sequence[str] | None) -> str:
    return f"dimension {dim}" + (f" ({names[dim]})" if names is not None else "")


def _ordered_keys(column: FloatArray) -> NDArray[np.uint32]:
    """uint32 keys that order as finite float32 values do: the sign bit set, and negatives inverted whole.

    -0.0 gets the key right below that of 0.0; the two are told apart, which changes no value.
    """
    keys = (column.view(np.int32) >> 31).view(np.uint32)  # all ones for negatives, else zero
    keys |= np.uint32(1 << 31)
    keys ^= column.view(np.uint32)
    return keys


def _value_of_key(key: int) -> float:
    """The inverse of `_ordered_keys`."""
    bits = key ^ (1 << 31) if key >> 31 else ~key & 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))


def _selected_quantiles(counts: NDArray[np.int64], rows: int, parts: Iterable[FloatArray]) -> DoubleArray:
    """Quantiles [5, D] of `rows` rows, from the counts [D, 65536] of high halves and a second reading."""
    # numpy's "linear" method: the value at position q (n - 1), between the two ranks on either side.
    positions = [(rows - 1) * q for q in QUANTILES.values()]
    below = [int(np.floor(position)) for position in positions]
    ranks = sorted({min(rank + step, rows - 1) for rank in below for step in (0, 1)})
    cumulative = np.cumsum(counts, axis=1)
    bins = np.array([np.searchsorted(row, ranks, side="right") for row in cumulative])  # [D, ranks]
    slots = [(dim, int(high)) for dim in range(len(counts)) for high in np.unique(bins[dim])]
    low_counts = np.zeros((len(slots), 1 << 16), np.uint32 if rows < 1 << 32 else np.int64)
    seen = 0
    for columns in parts:
        seen += columns.shape[1]
        halves = {}
        for slot, (dim, high) in enumerate(slots):
            if dim not in halves:
                keys = _ordered_keys(columns[dim])
                halves = {dim: ((keys >> 16).astype(np.uint16), keys.astype(np.uint16))}
            highs, lows = halves[dim]
            found = np.bincount(lows[highs == high], minlength=1 << 16)
            low_counts[slot] += found.astype(low_counts.dtype)
    expected = [counts[dim, high] for dim, high in slots]
    if seen != rows or not np.array_equal(low_counts.sum(axis=1, dtype=np.int64), expected):
        raise DatasetError(
            f"the data changed between two readings ({rows} rows, then {seen}): blocks() must give the same "
            f"rows every time it is called; a generator that is already used up gives none"
        )
    slot_of = {place: slot for slot, place in enumerate(slots)}
    table = np.empty((len(QUANTILES), len(counts)))
    for dim in range(len(counts)):
        value_at = {}
        for rank, high in zip(ranks, bins[dim].tolist(), strict=True):
            within = rank - (cumulative[dim, high] - counts[dim, high])
            low = np.searchsorted(np.cumsum(low_counts[slot_of[dim, high]]), within, side="right")
            value_at[rank] = _value_of_key((high << 16) | int(low))
        for row, (position, rank) in enumerate(zip(positions, below, strict=True)):
            pair = [value_at[rank], value_at[min(rank + 1, rows - 1)]]
            table[row, dim] = np.quantile(pair, position - rank)  # numpy's own interpolation, to the last bit
    return table


# --- the normaliser -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Maps [low, high] of every dimension to [-1, 1] and back.

    Attributes:
        mode: what `low` and `high` were chosen by.
        clip: whether `apply` clips values outside [low, high] to -1 and +1.
        low, high: float64 [D], read-only; the values that map to -1 and +1.
        statistics: what they came from, when complete.
        guarded: the dimensions (0 to D - 1) whose range was not the mode's own, see `from_statistics`.
        names: of the D dimensions.
        source: where the statistics came from: "frames", "stats.json", ...
        selection: which action dimensions the D encoded ones are, and what they are relative to.

    Raises:
        TokenizerError: fields that contradict each other.
    """

    mode: NormalizationMode
    clip: bool
    low: DoubleArray
    high: DoubleArray
    statistics: Statistics | None = None
    guarded: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    source: str = "frames"
    selection: ActionSelection | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, _vector(getattr(self, name), f"normaliser: {name}"))
        size = len(self.low)
        lengths = {
            "high": len(self.high),
            "statistics": self.statistics.size if self.statistics is not None else size,
            "names": len(self.names) if self.names is not None else size,
            "selection": self.selection.size if self.selection is not None else size,
        }
        for name, length in lengths.items():
            if length != size:
                raise TokenizerError(f"normaliser: low has {size} dimensions, but {name} has {length}")
        with np.errstate(over="ignore"):
            bad = np.flatnonzero(~(self.high > self.low) | ~np.isfinite(self.high - self.low))
        if len(bad):
            dim = int(bad[0])
            raise TokenizerError(
                f"normaliser: {self._dim(dim)} has the range [{self.low[dim]}, {self.high[dim]}]; "
                f"high must be above low, and their difference finite"
            )
        if any(dim not in range(size) for dim in self.guarded):
            raise TokenizerError(f"normaliser: guarded dimensions {self.guarded} are outside 0 to {size - 1}")

    @property
    def size(self) -> int:
        """Number of dimensions D."""
        return len(self.low)

    @classmethod
    def fit(
        cls,
        blocks: Blocks,
        mode: str | NormalizationMode = NormalizationMode.QUANTILES,
        *,
        clip: bool | None = None,
        names: Sequence[str] | None = None,
        selection: ActionSelection | None = None,
        source: str = "frames",
        progress: Callable[[int], None] | None = None,
    ) -> Normalizer:
        """From the exact statistics of the values to be encoded; see `from_statistics`."""
        parsed = NormalizationMode.parse(mode)
        statistics = exact_statistics(blocks, names=names, progress=progress)
        return cls.from_statistics(statistics, parsed, clip=clip, names=names, selection=selection, source=source)

    @classmethod
    def from_statistics(
        cls,
        statistics: Statistics | Mapping[str, Any],
        mode: str | NormalizationMode = NormalizationMode.QUANTILES,
        *,
        clip: bool | None = None,
        names: Sequence[str] | None = None,
        selection: ActionSelection | None = None,
        source: str = "stats.json",
    ) -> Normalizer:
        """From statistics that are there already, of the D values that will be encoded.

        Two kinds of dimension do not get the mode's own range; they are listed in `guarded`:

        - It never moves (max - min within float32 rounding, or below 1e-9): its value -/+ 1, normalised 0.
        - The mode's range is below 1 % of max - min, as of a gripper that moves in few frames: min and max,
          since a sliver of the range would turn ordinary motion into values of hundreds, or clip it away.

        Args:
            statistics: complete, or a mapping with what `mode` needs and min and max (IDENTITY: any one).
            mode: name or member.
            clip: None means the mode's default: true in QUANTILES and QUANTILE10.
            names, selection, source: see the class.

        Raises:
            DatasetError: the statistics lack what the mode needs, or cannot be right (crossed, not finite).
            UsageError: unknown mode.
        """
        mode = NormalizationMode.parse(mode)
        values = _needed_quantities(statistics, mode)
        guarded: tuple[int, ...] = ()
        if mode is NormalizationMode.IDENTITY:
            high = np.ones(len(next(iter(values.values()))))
            low = -high
        else:
            first, second = (values[name] for name in mode.needs)
            low, high = first, second
            if mode is NormalizationMode.MEAN_STD:
                low, high = first - second, first + second
            low, high, guarded = _guarded_range(low, high, values["min"], values["max"])
        if isinstance(statistics, Mapping):
            complete = all(name in statistics for name in (*_QUANTITIES, "count"))
            kept = Statistics.from_mapping(statistics) if complete else None
        else:
            kept = statistics
        return cls(
            mode=mode,
            clip=mode.clips if clip is None else clip,
            low=low,
            high=high,
            statistics=kept,
            guarded=guarded,
            names=None if names is None else tuple(names),
            source=source,
            selection=selection,
        )

    def apply(self, values: Any) -> FloatArray:
        """Raw values [..., D] to normalised float32 [..., D], C-contiguous; clipped to [-1, 1] where `clip`.

        Any numeric layout: float64, integers, not contiguous, torch tensors.

        Raises:
            TokenizerError: another last dimension, not numeric, or a value that is not finite (the message
                names its dimension and row).
        """

        def forward(part: DoubleArray) -> DoubleArray:
            part -= self.low
            part *= 2.0
            part /= self.high - self.low
            part -= 1.0
            return np.clip(part, -1.0, 1.0, out=part) if self.clip else part

        return self._mapped(values, forward, "actions", "normalised")

    def invert(self, values: Any) -> FloatArray:
        """Normalised values [..., D] to raw float32 [..., D]; never clips. Errors as in `apply`."""

        def backward(part: DoubleArray) -> DoubleArray:
            part += 1.0
            part *= (self.high - self.low) / 2.0
            part += self.low
            return part

        return self._mapped(values, backward, "normalised actions", "decoded")

    def clipped(self, values: Any) -> NDArray[np.bool_]:
        """Which raw values [..., D] lie outside [low, high] and get clipped (none where not `clip`)."""
        array = self._checked(values, "actions")
        mask = np.zeros(array.shape, bool)
        if not self.clip:
            return mask
        rows, flat = array.reshape(-1, self.size), mask.reshape(-1, self.size)
        step = max(1, _SLICE_VALUES // self.size)
        for first in range(0, len(rows), step):
            part = rows[first : first + step].astype(np.float64)
            flat[first : first + step] = (part < self.low) | (part > self.high)
        return mask

    def guard_report(self) -> list[str]:
        """A line for each guarded dimension: its index, name, old and new range, and what to do about it."""
        return [self._guard_line(dim) for dim in self.guarded]

    def to_json(self) -> dict[str, Any]:
        """Plain values, the same for equal normalisers; floats survive json exactly."""
        return {
            "format": "pi0-fast-normalizer",
            "version": _FORMAT_VERSION,
            "mode": self.mode.value,
            "clip": self.clip,
            "low": [float(value) for value in self.low],
            "high": [float(value) for value in self.high],
            "guarded": list(self.guarded),
            "names": None if self.names is None else list(self.names),
            "source": self.source,
            "statistics": None if self.statistics is None else self.statistics.to_mapping(),
            "selection": None if self.selection is None else self.selection.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Normalizer:
        """Reads what `to_json` wrote.

        Raises:
            TokenizerError: another format or version, missing or unknown keys, values that contradict.
        """
        if not isinstance(value, Mapping) or value.get("format") != "pi0-fast-normalizer":
            raise TokenizerError("not a saved normaliser: the key 'format' is not 'pi0-fast-normalizer'")
        if value.get("version") != _FORMAT_VERSION:
            raise TokenizerError(
                f"the saved normaliser has version {value.get('version')!r}, this pi0-fast reads version "
                f"{_FORMAT_VERSION}: install the pi0-fast that wrote it, or a newer one"
            )
        missing, unknown = sorted(_JSON_KEYS - set(value)), sorted(set(value) - _JSON_KEYS)
        if missing or unknown:
            raise TokenizerError(f"the saved normaliser lacks the keys {missing} and has unknown keys {unknown}")
        if not isinstance(value["clip"], bool) or not isinstance(value["source"], str):
            raise TokenizerError("the saved normaliser: 'clip' must be true or false and 'source' a text")
        statistics, names, selection = value["statistics"], value["names"], value["selection"]
        try:
            return cls(
                mode=NormalizationMode.parse(value["mode"]),
                clip=value["clip"],
                low=value["low"],
                high=value["high"],
                statistics=None if statistics is None else Statistics.from_mapping(statistics),
                guarded=tuple(int(dim) for dim in value["guarded"]),
                names=None if names is None else tuple(str(name) for name in names),
                source=value["source"],
                selection=None if selection is None else ActionSelection.from_json(selection),
            )
        except (Pi0FastError, TypeError, ValueError) as error:
            raise TokenizerError(f"the saved normaliser cannot be used: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Normalizer) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def _dim(self, dim: int) -> str:
        """How messages call an encoded dimension: by its index in the robot's action, and its name."""
        index = dim if self.selection is None else self.selection.dims[dim]
        return f"dimension {index}" + (f" ({self.names[dim]})" if self.names is not None else "")

    def _guard_line(self, dim: int) -> str:
        new = f"[{self.low[dim]:.6g}, {self.high[dim]:.6g}]"
        if self.statistics is None:
            return f"{self._dim(dim)}: range {new} in place of that of {self.mode}, which was too narrow"
        low, high = float(self.statistics.min[dim]), float(self.statistics.max[dim])
        if _never_moves(np.array([low]), np.array([high]))[0]:
            return (
                f"{self._dim(dim)}: never moves (min {low:.6g}, max {high:.6g}); range {new}, so it "
                f"normalises to 0. Leave it out with --encoded_dims if that is intended"
            )
        first, second = (float(getattr(self.statistics, name)[dim]) for name in self.mode.needs)
        if self.mode is NormalizationMode.MEAN_STD:
            first, second = first - second, first + second
        return (
            f"{self._dim(dim)}: its {self.mode} range [{first:.6g}, {second:.6g}] is "
            f"{100 * (second - first) / (high - low):.2g} % of min to max, it moves in few frames; range "
            f"{new} (min and max). If the rare values are glitches, leave those episodes out or the "
            f"dimension with --encoded_dims"
        )

    def _checked(self, values: Any, what: str) -> NDArray[Any]:
        array = as_numbers(values, what)
        if array.ndim == 0 or array.shape[-1] != self.size:
            raise TokenizerError(
                f"{what} have shape {array.shape}; the last axis must be the {self.size} dimensions that the "
                f"normaliser was fitted on"
            )
        return array

    def _mapped(self, values: Any, function: Callable[[DoubleArray], DoubleArray], what: str, verb: str) -> FloatArray:
        """`function` (float64, in place) on slices of rows, so that no float64 copy of everything is made."""
        array = self._checked(values, what)
        result = np.empty(array.shape, np.float32)
        rows, flat = array.reshape(-1, self.size), result.reshape(-1, self.size)
        step = max(1, _SLICE_VALUES // self.size)
        for first in range(0, len(rows), step):
            part = rows[first : first + step].astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the dimension
                flat[first : first + step] = function(part)
            finite = np.isfinite(flat[first : first + step])
            # Clipping would hide an infinity, so the input is looked at too.
            if self.clip:
                finite &= np.isfinite(rows[first : first + step])
            if not finite.all():
                row, dim = (int(i) for i in np.argwhere(~finite)[0])
                self._raise_not_finite(array, first + row, dim, what, verb)
        return result

    def _raise_not_finite(self, array: NDArray[Any], row: int, dim: int, what: str, verb: str) -> None:
        place = [int(i) for i in np.unravel_index(row, array.shape[:-1])] if array.ndim > 1 else [0]
        value = array.reshape(-1, self.size)[row, dim]
        where = f"row {place[0]}" + (f", step {place[1]}" if len(place) == 2 else "")
        where = f"row {tuple(place)}" if len(place) > 2 else where
        reason = "is not finite" if not np.isfinite(value) else f"exceeds float32 when {verb}"
        raise TokenizerError(f"{what}: {self._dim(dim)} is {value} in {where}, which {reason}")


_JSON_KEYS = {
    "format",
    "version",
    "mode",
    "clip",
    "low",
    "high",
    "guarded",
    "names",
    "source",
    "statistics",
    "selection",
}


def _needed_quantities(statistics: Statistics | Mapping[str, Any], mode: NormalizationMode) -> dict[str, DoubleArray]:
    """Checked vectors of what the mode and its guard need (IDENTITY: of all that is there, for the size)."""
    if isinstance(statistics, Statistics):
        return {name: getattr(statistics, name) for name in _QUANTITIES}
    present = [name for name in _QUANTITIES if name in statistics]
    if mode is NormalizationMode.IDENTITY:
        needed = tuple(present)
        if not needed:
            raise DatasetError(f"the statistics hold none of {', '.join(_QUANTITIES)}: the size is not known")
    else:
        needed = tuple(dict.fromkeys((*mode.needs, "min", "max")))
    missing = [name for name in needed if name not in statistics]
    if missing:
        raise DatasetError(
            f"normalization mode {mode} needs the statistics {', '.join(needed)}; {', '.join(missing)} "
            f"missing (present: {', '.join(map(str, statistics)) or 'none'}). Compute them from the frames "
            f"instead"
        )
    values = {name: _vector(statistics[name], f"statistics: {name}") for name in needed}
    _check_quantities(values)
    return values


def _never_moves(minimum: DoubleArray, maximum: DoubleArray) -> NDArray[np.bool_]:
    """Whether max - min is within float32 rounding of the values, or next to nothing."""
    magnitude = np.maximum(np.abs(minimum), np.abs(maximum))
    noise = _SPACINGS_OF_NOISE * float(np.finfo(np.float32).eps) * magnitude
    return np.asarray(maximum - minimum <= np.maximum(noise, _LEAST_MOTION))


def _guarded_range(
    low: DoubleArray, high: DoubleArray, minimum: DoubleArray, maximum: DoubleArray
) -> tuple[DoubleArray, DoubleArray, tuple[int, ...]]:
    """(low, high, guarded dimensions): the mode's range or what takes its place, see `from_statistics`."""
    still = _never_moves(minimum, maximum)
    narrow = ~still & (high - low < _LEAST_SHARE_OF_RANGE * (maximum - minimum))
    value = minimum + (maximum - minimum) / 2.0
    # A power of two, so that value -/+ half is exact; above 1 only where float32 itself is coarser than 1.
    half = np.maximum(1.0, 2.0 ** np.floor(np.log2(np.maximum(np.abs(value), 1.0)) - 23.0))
    guarded_low = np.where(still, value - half, np.where(narrow, minimum, low))
    guarded_high = np.where(still, value + half, np.where(narrow, maximum, high))
    return guarded_low, guarded_high, tuple(int(dim) for dim in np.flatnonzero(still | narrow))
