"""Scale, rate weight and order of a tokenizer from what is wanted of it: an error, or a number of tokens.

For each order and rate weight the scale is searched at which tokenizers fitted on some chunks just reach the target on
others; of those the one with the fewest tokens is chosen, or, where tokens are the target, the one with the smallest
error. Errors are those that the tokens make: what the normaliser clips is not their fault, and no scale mends it. Left
out: which chunks (fitting.py), and the fit on all of them.

With twice the error that is allowed at scale 10, scale 20 is tried next: errors are nearly in inverse proportion to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.dct import Order
from pi0_fast.actions.inputs import checked_scale
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.report import Table
from pi0_fast.actions.tokenizer import FastTokenizer, TokenizerFitter
from pi0_fast.actions.vocabulary import SymbolFormat
from pi0_fast.types import TokenizerError

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]

#: Rate weights that are tried where none is given; the larger ones pay off at finer scales.
RATE_WEIGHTS = (0.0, 0.3, 0.6, 1.0)
#: How near below its target a search ends, at each fit for one order and rate weight. Errors do not fall evenly with
#: the scale (grippers take few positions, and hit or miss the steps), so not every target can be met exactly.
_CLOSE = (0.98, 0.98, 0.98, 0.96, 0.96, 0.94)
#: The same for the largest error of each dimension; after these, scales are only made finer until it is met.
_CLOSE_WORST = 0.85
#: Of a largest error: rate weights are tried at these multiples of the scale that plain encoding needs. The bound
#: itself is kept by the encoder.
_FINER = (1.0, 1.15, 1.35)
#: No search goes further than this from where it began, per dimension.
_FARTHEST = 1000.0
#: A step changes a scale by this factor at most.
_LONGEST_STEP = 4.0


@dataclass(frozen=True)
class Target:
    """What is wanted.

    Attributes:
        kind: "rmse": root mean square error over all dimensions, in normalised units; "error": the largest error of any
            single action, in the data's units, one number for all dimensions or one for each; "tokens": mean tokens per
            chunk.
        value: of which there should be no more.
    """

    kind: Literal["rmse", "error", "tokens"]
    value: float | list[float]

    def shares(self, tokens: float, rmse: float, worst: DoubleArray) -> DoubleArray:
        """How much of what is allowed was used; 1 meets the target. One number, for "error" one for each dimension."""
        found: Any = {"rmse": rmse, "error": worst, "tokens": tokens}[self.kind]
        return np.atleast_1d(np.asarray(found, np.float64) / np.asarray(self.value, np.float64))

    def max_error(self, normalizer: Normalizer) -> list[float] | None:
        """The bound that the tokenizer is to keep, in normalised units; None but for the kind "error"."""
        if self.kind != "error":
            return None
        bounds: list[float] = (np.asarray(self.value) * 2.0 / (normalizer.high - normalizer.low)).tolist()
        return bounds

    def __str__(self) -> str:
        return {
            "rmse": f"RMSE {self.value} in normalised units",
            "error": f"largest error {self.value} in the data's units",
            "tokens": f"{self.value} tokens per chunk",
        }[self.kind]


@dataclass(frozen=True)
class Tried:
    """One tokenizer that was fitted and measured.

    Attributes:
        order, rate_weight, scale: its settings.
        vocab_size: ids that it has.
        tokens, p99: per chunk, mean and 99th percentile.
        rmse: over all dimensions, in normalised units, of rounding and choosing tokens.
        worst: largest such error of each dimension, in the data's units, float64 [D].
        share: of the target that was used; it is met up to 1. None where there was no target.
        problem: why there is no such tokenizer; then nothing was measured.
    """

    order: Order
    rate_weight: float
    scale: float | list[float]
    vocab_size: int = 0
    tokens: float = np.inf
    p99: float = np.inf
    rmse: float = np.inf
    worst: DoubleArray = field(default_factory=lambda: np.empty(0))
    share: float | None = None
    problem: str | None = None

    @property
    def meets(self) -> bool:
        """Whether it can be had, and meets the target, if there is one."""
        return self.problem is None and (self.share is None or self.share <= 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; null for what was not measured."""
        found = asdict(self) | {"worst": self.worst.tolist()}
        return found if self.problem is None else found | {"tokens": None, "p99": None, "rmse": None}


@dataclass(frozen=True)
class Choice:
    """What was tried, in order, and which of it was chosen."""

    target: Target | None
    tried: tuple[Tried, ...]
    chosen: Tried
    fitted_chunks: int
    measured_chunks: int

    def to_json(self) -> dict[str, Any]:
        """For metadata.json."""
        return {
            "target": None if self.target is None else asdict(self.target),
            "fitted_chunks": self.fitted_chunks,
            "measured_chunks": self.measured_chunks,
            "tried": [each.to_json() for each in self.tried],
            "chosen": self.tried.index(self.chosen),
        }

    def table(self) -> Table:
        """The best of each order and rate weight, and how many were fitted for it."""
        rows = []
        for each, fits in self.best():
            measured = [f"{each.tokens:.1f}", f"{each.p99:.0f}", f"{each.rmse:.4f}"]
            share = "" if each.share is None else f"{each.share:.0%}"
            rows.append(
                [
                    each.order,
                    f"{each.rate_weight:g}",
                    _scale_text(each.scale),
                    *(measured if each.problem is None else ["none", "", ""]),
                    share if each.meets else f"{share} (missed)",
                    fits,
                    "chosen" if each is self.chosen else "",
                ]
            )
        wanted = "no target: fewest tokens" if self.target is None else f"target: {self.target}"
        title = (
            f"What was tried, fitted on {self.fitted_chunks} and measured on {self.measured_chunks} other chunks; "
            f"{wanted}; RMSE of rounding in normalised units"
        )
        return title, rows, ["order", "rate weight", "scale", "tokens", "p99", "RMSE", "of target", "fits", ""]

    def best(self) -> Iterator[tuple[Tried, int]]:
        """The best of each order and rate weight, and how many were tried of it."""
        groups: dict[tuple[Order, float], list[Tried]] = {}
        for each in self.tried:
            groups.setdefault((each.order, each.rate_weight), []).append(each)
        for group in groups.values():
            yield min(group, key=lambda each: _badness(each, self.target)), len(group)


def choose(
    fitted: FloatArray,
    measured: FloatArray,
    *,
    normalizer: Normalizer,
    target: Target | None,
    orders: Sequence[Order],
    rate_weights: Sequence[float],
    scale: float | list[float],
    vocab_size: int,
    symbol_format: SymbolFormat = "plain",
    headroom: float | None = None,
    num_threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Choice:
    """Try tokenizers and choose one.

    Args:
        fitted, measured: raw chunks [N, H, D] and [M, H, D], to fit on and to measure on.
        normalizer: of both.
        target: None takes `scale` as it is.
        orders, rate_weights: to try.
        scale: where the search begins; of one number for each dimension the proportions are kept, except for a target
            of kind "error", which gives each dimension its own.
        vocab_size, symbol_format, headroom: of the tokenizers, see `FastTokenizer.fit`.
        num_threads: None means all processors.
        progress: called with 1 after each fit.

    Raises:
        TokenizerError: nothing that was tried meets the target; the message says what came nearest.
    """
    trial = _Trial(
        normalizer.apply(fitted),
        normalizer.apply(measured),
        normalizer,
        target,
        vocab_size,
        symbol_format,
        headroom,
        num_threads,
        progress,
    )
    tried: list[Tried] = []
    start: float | list[float] = checked_scale(scale, normalizer.size)
    if target is not None and target.kind == "error" and not isinstance(start, list):
        start = [start] * normalizer.size
    for order in orders:
        plain: Tried | None = None
        for rate_weight in rate_weights:
            if target is None:
                found = [trial.run(order, rate_weight, start)[0]]
            elif target.kind == "error" and rate_weight > 0:
                if plain is None:  # not to be chosen, but the others begin at its scale
                    plain = min(_search(trial, order, 0.0, start, target), key=lambda each: _badness(each, target))
                finer = [_as_scale(np.asarray(plain.scale) * factor) for factor in _FINER]
                found = [trial.run(order, rate_weight, scale)[0] for scale in finer]
            else:
                found = list(_search(trial, order, rate_weight, start, target))
            tried += found
            best = min(found, key=lambda each: _badness(each, target))
            if target is not None and best.meets:
                start, plain = best.scale, best if rate_weight == 0 else plain
    chosen = min(tried, key=lambda each: _badness(each, target))
    if not chosen.meets:
        got = f"{chosen.tokens:.1f} tokens and an RMSE of {chosen.rmse:.4g} at scale {_scale_text(chosen.scale)}"
        raise TokenizerError(
            f"no tokenizer of {vocab_size} ids meets the target of {target}: "
            + (chosen.problem or f"the nearest has {got}")
            + "; ask for less, or take a larger --vocab_size"
        )
    return Choice(target, tuple(tried), chosen, len(fitted), len(measured))


def adjusted(scale: float | list[float], shares: DoubleArray, kind: str) -> float | list[float]:
    """The scale to try next, where that much of the target was used; errors are about in inverse proportion to it."""
    # Tokens grow slower than the scale, about as its root.
    power = -2.0 if kind == "tokens" else 1.0
    factors = np.clip(np.maximum(shares, 1e-9) ** power, 1 / _LONGEST_STEP, _LONGEST_STEP)
    aimed = factors * (1.005 if kind != "tokens" else 0.995)
    return _as_scale(np.asarray(scale) * (aimed if isinstance(scale, list) else aimed[0]))


def _as_scale(values: Any) -> float | list[float]:
    return checked_scale(np.asarray(values).tolist(), None)


def _badness(each: Tried, target: Target | None) -> tuple[float, ...]:
    """What is smaller for better ones."""
    if each.problem is not None:
        return (2.0, 0.0, 0.0)
    if not each.meets:
        assert each.share is not None
        return (1.0, each.share, 0.0)
    return (0.0, each.rmse, each.tokens) if target and target.kind == "tokens" else (0.0, each.tokens, each.rmse)


def _scale_text(scale: float | list[float]) -> str:
    return f"{min(scale):.3g} to {max(scale):.3g}" if isinstance(scale, list) else f"{scale:.4g}"


@dataclass
class _Trial:
    """Fits and measures one tokenizer at a time, on normalised chunks."""

    fitted: FloatArray
    measured: FloatArray
    normalizer: Normalizer
    target: Target | None
    vocab_size: int
    symbol_format: SymbolFormat
    headroom: float | None
    num_threads: int | None
    progress: Callable[[int], object] | None

    def run(self, order: Order, rate_weight: float, scale: float | list[float]) -> tuple[Tried, DoubleArray | None]:
        """What such a tokenizer does, and how much of the target it used; None where there is none."""
        try:
            tokenizer = self._fit(order, scale)
        except TokenizerError as error:  # more symbols than ids: a result, and shown as such
            return Tried(order, rate_weight, scale, problem=str(error)), None
        finally:
            if self.progress is not None:
                self.progress(1)
        bound = None if self.target is None else self.target.max_error(self.normalizer)
        tokens, errors = token_errors(
            tokenizer, self.measured, rate_weight, max_error=bound, num_threads=self.num_threads
        )
        rmse = float(np.sqrt((errors**2).mean()))
        half = (self.normalizer.high - self.normalizer.low) / 2.0
        worst = np.abs(errors).max(axis=(0, 1)) * half
        mean, p99 = float(tokens.mean()), float(np.percentile(tokens, 99))
        shares = None if self.target is None else self.target.shares(mean, rmse, worst)
        share = None if shares is None else float(shares.max())
        return Tried(order, rate_weight, scale, tokenizer.vocab_size, mean, p99, rmse, worst, share), shares

    def _fit(self, order: Order, scale: float | list[float]) -> FastTokenizer:
        fitter = TokenizerFitter(self.fitted.shape[1], self.fitted.shape[2], scale=scale, order=order)
        fitter.add(self.fitted, num_threads=self.num_threads)
        return fitter.finish(
            vocab_size=self.vocab_size,
            symbol_format=self.symbol_format,
            headroom=self.headroom,
            num_threads=self.num_threads,
        )


def token_errors(
    tokenizer: FastTokenizer,
    chunks: FloatArray,
    rate_weight: float,
    *,
    max_error: list[float] | None = None,
    num_threads: int | None = None,
) -> tuple[npt.NDArray[np.int32], FloatArray]:
    """Normalised chunks [N, H, D] -> tokens of each, int32 [N], and what decoding gets wrong, float32 [N, H, D]."""
    ids, info = tokenizer.encode(
        chunks, rate_weight=rate_weight, max_error=max_error, return_info=True, num_threads=num_threads
    )
    decoded = tokenizer.decode(ids, time_horizon=chunks.shape[1], action_dim=chunks.shape[2], num_threads=num_threads)
    return info.token_counts, decoded - chunks


def _search(
    trial: _Trial, order: Order, rate_weight: float, start: float | list[float], target: Target
) -> Iterator[Tried]:
    """Tokenizers of one order and rate weight, at scales that come nearer and nearer to the target."""
    scale: float | list[float] = start
    possible: float | list[float] | None = None
    coarsest, finest = np.asarray(start) / _FARTHEST, np.asarray(start) * _FARTHEST
    for step, close in enumerate(_CLOSE):
        found, shares = trial.run(order, rate_weight, scale)
        yield found
        if shares is None:  # too fine for the vocabulary
            fine = np.asarray(scale)
            scale = _as_scale(fine / _LONGEST_STEP if possible is None else np.sqrt(fine * np.asarray(possible)))
            continue
        possible = scale
        if target.kind == "error":
            moving = shares[shares > 1e-4]  # what never moves has no error at any scale
            if shares.max() <= 1.0 and (step > 2 or moving.min(initial=1.0) >= _CLOSE_WORST):
                return
            if step > 1:  # what is largest jumps from scale to scale: no dimension is made coarser again
                shares = np.where(shares > 1.0, 1.05 * shares, 1.0)
        elif close <= shares[0] <= 1.0:
            return
        following = adjusted(scale, shares, target.kind)
        if np.any(np.asarray(following) > finest) or np.all(np.asarray(following) <= coarsest):
            return
        scale = _as_scale(np.clip(following, coarsest, finest))
