"""The report on a tokenizer: its tables, json, pictures and page. Left out: measuring (actions/details.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.details import Details, SweepPoint, rounding_rmse
from pi0_fast.actions.directory import runs_text
from pi0_fast.actions.normalize import Normalizer
from pi0_fast.actions.plane import NOISE, PlanePoint, by_kind, tokens_at
from pi0_fast.actions.report import Table, error_table
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.reports import pictures
from pi0_fast.reports.page import Page
from pi0_fast.reports.pictures import Picture
from pi0_fast.reports.save import FORMAT

FloatArray = npt.NDArray[np.float32]

#: Ids that the page lists, the most used ones.
_LISTED_IDS = 10
#: A share of clipped frames above this is worth a warning.
_CLIPPED_FRAMES_WARNING = 0.05


@dataclass(frozen=True)
class ShownChunk:
    """A chunk that is drawn: where it is from, its tokens, its normalised RMSE, and its values [H, D] in data units."""

    episode: int
    start: int
    tokens: int
    error: float
    original: FloatArray
    decoded: FloatArray


@dataclass(frozen=True)
class TokenizerReport:
    """Everything that is shown of a tokenizer on a dataset.

    Attributes:
        about: (what, text) lines on what was done.
        tokenizer, normalizer: that were measured.
        labels: of the D encoded dimensions.
        measured_on: which episodes, in words.
        details: the measurements.
        worst: the chunks with the largest errors.
        sweep: tokenizers refitted at other scales.
        sweep_vocab_size: ids that each of them may have at most.
        sweep_chunks: chunks that they were fitted on.
        plane: refits with other encoders and orders.
    """

    about: tuple[tuple[str, str], ...]
    tokenizer: FastTokenizer
    normalizer: Normalizer
    labels: tuple[str, ...]
    measured_on: str
    details: Details
    worst: tuple[ShownChunk, ...]
    sweep: tuple[SweepPoint, ...]
    sweep_vocab_size: int
    sweep_chunks: int
    plane: tuple[PlanePoint, ...]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """How many coefficients (reference format: bytes) each id stands for, int64 [V]."""
        return np.array([len(expansion) for expansion in self.tokenizer.vocabulary.expansions], np.int64)

    @property
    def unit(self) -> str:
        """What ids stand for."""
        return "coefficients" if self.tokenizer.symbol_format == "plain" else "bytes"

    def scale_text(self, scale: float | list[float]) -> str:
        """A scale; one of many numbers as a multiple of the tokenizer's own."""
        if not isinstance(scale, list):
            return f"{scale:g}"
        own = self.tokenizer.scale
        return f"x{scale[0] / (own[0] if isinstance(own, list) else own):g}"

    def tables(self) -> Iterator[Table]:
        """Summary, errors of each dimension, other scales."""
        yield "Summary", self._summary(), ["", self.measured_on]
        yield error_table(self.details.distortion, self.tokenizer.scale, self.normalizer, self.measured_on)
        yield self._sweep_table()
        yield self._plane_table()

    def _summary(self) -> list[list[Any]]:
        measured, details = self.details.distortion, self.details
        used = int((details.uses > 0).sum())
        return [
            ["chunks", measured.chunks],
            ["tokens per chunk, mean", measured.tokens["mean_token_length"]],
            ["tokens per chunk, 99th percentile", measured.tokens["p99_token_length"]],
            ["tokens per chunk, min", measured.tokens["min_token_length"]],
            ["tokens per chunk, max", measured.tokens["max_token_length"]],
            ["values per token (compression)", measured.tokens["compression_ratio"]],
            ["RMSE, normalised units", measured.normalized_rmse],
            ["the part of it that rounding makes alone", rounding_rmse(measured, self.normalizer)],
            ["ids used", f"{used} of {self.tokenizer.vocab_size}"],
            ["values clipped by the normaliser", f"{measured.clipped_values:.2%}"],
            ["frames clipped by the normaliser", f"{measured.clipped_frames:.2%}"],
            ["coefficients outside the vocabulary", measured.saturations],
            ["chunks with such coefficients", int((details.saturations > 0).sum())],
            *(
                [["chunks beyond its largest error", measured.over_error]]
                if self.tokenizer.max_error is not None
                else []
            ),
        ]

    def _sweep_table(self) -> Table:
        rows: list[list[Any]] = []
        for point in self.sweep:
            if point.distortion is None:
                rows.append([self.scale_text(point.scale), "none", "", "", "", "", "", ""])
                continue
            tokens = point.distortion.tokens
            rows.append(
                [
                    self.scale_text(point.scale),
                    point.vocab_size,
                    f"{tokens['mean_token_length']:.1f}",
                    f"{tokens['p99_token_length']:.0f}",
                    f"{tokens['compression_ratio']:.2f}",
                    f"{point.distortion.normalized_rmse:.4f}",
                    f"{rounding_rmse(point.distortion, self.normalizer):.4f}",
                    point.distortion.saturations,
                ]
            )
        headers = ["scale", "ids", "tokens", "p99", "values/token", "RMSE", "by rounding", "outside"]
        title = (
            f"Tokenizers refitted at other scales, {self.sweep_vocab_size} ids at most, on {self.sweep_chunks} chunks; "
            "tokens per chunk, RMSE in normalised units, coefficients outside the vocabulary"
        )
        return title, rows, headers

    def _plane_table(self) -> Table:
        """Each kind of encoder at this tokenizer's error, and how steady its tokens are."""
        rmse = rounding_rmse(self.details.distortion, self.normalizer)
        kinds = by_kind(self.plane)
        reference = tokens_at(kinds.get("reference", []), rmse)
        rows: list[list[Any]] = []
        for kind in dict.fromkeys(point.kind for point in self.plane):
            points = kinds.get(kind, [])
            tokens = tokens_at(points, rmse)
            moved = next((point.moved for point in points if point.moved is not None), None)
            noisy = next((point.noisy for point in points if point.noisy is not None), None)
            rows.append(
                [
                    kind,
                    "out of reach" if tokens is None else f"{tokens:.1f}",
                    "" if tokens is None or reference is None else f"{tokens / reference:.2f}",
                    "" if moved is None else f"{moved:.0%}",
                    "" if noisy is None else f"{noisy:.0%}",
                ]
            )
        headers = ["encoder", "tokens", "to reference", "change in a frame", "change by noise"]
        title = (
            f"Other encoders, refitted with {self.sweep_vocab_size} ids at most: tokens per chunk at this tokenizer's "
            f"rounding RMSE of {rmse:.4f}, and the share of tokens that change from one frame to the next and by noise "
            f"of {NOISE:.1%} of the range (at its scale)"
        )
        return title, rows, headers

    def to_json(self) -> dict[str, Any]:
        """Every number that is drawn."""
        details, normalizer, tokenizer = self.details, self.normalizer, self.tokenizer
        first, counts = self._length_counts()
        return {
            **FORMAT,
            "kind": "tokenizer",
            "about": dict(self.about),
            "measured_on": self.measured_on,
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "scale": tokenizer.scale,
                "symbol_format": tokenizer.symbol_format,
                "order": tokenizer.order,
                "rate_weight": tokenizer.rate_weight,
                "time_horizon": self.worst[0].original.shape[0],
                "action_dim": normalizer.size,
                "coefficients": [tokenizer.vocabulary.low, tokenizer.vocabulary.high],
            },
            "normalizer": {
                "mode": str(normalizer.mode),
                "clip": normalizer.clip,
                "low": normalizer.low.tolist(),
                "high": normalizer.high.tolist(),
            },
            "dimensions": list(self.labels),
            "measured": {
                **details.distortion.to_json(),
                "normalized_rounding_rmse": rounding_rmse(details.distortion, normalizer),
                "clipped_values_of_dimension": details.clipped.tolist(),
                "chunks_with_saturations": int((details.saturations > 0).sum()),
            },
            "token_lengths": {"first": first, "counts": counts},
            "vocabulary": {
                "used": int((details.uses > 0).sum()),
                "uses": details.uses.tolist(),
                "sizes": self.sizes.tolist(),
                "unit": self.unit,
            },
            "worst_chunks": [
                {**chunk.__dict__, "original": chunk.original.tolist(), "decoded": chunk.decoded.tolist()}
                for chunk in self.worst
            ],
            "rate_distortion": {
                "vocab_size": self.sweep_vocab_size,
                "fitted_chunks": self.sweep_chunks,
                "points": [self._point_json(point) for point in self.sweep],
                "plane": [point.to_json() for point in self.plane],
            },
        }

    def _point_json(self, point: SweepPoint) -> dict[str, Any]:
        found = point.distortion
        measured = None if found is None else found.to_json()
        rounding = None if found is None else rounding_rmse(found, self.normalizer)
        return {
            "scale": point.scale,
            "vocab_size": point.vocab_size,
            "problem": point.problem,
            "normalized_rounding_rmse": rounding,
            "measured": measured,
        }

    def _length_counts(self) -> tuple[int, list[int]]:
        """(tokens of the shortest chunk, how many chunks have that many, one more, ...)."""
        first = int(self.details.lengths.min())
        return first, np.bincount(self.details.lengths - first).tolist()

    def drawings(self) -> list[Callable[[], Picture]]:
        """Token lengths, errors, worst chunks, rate and distortion, other encoders, vocabulary."""
        return [
            self._draw_lengths,
            self._draw_errors,
            *(lambda number=number: self._draw_chunk(number) for number in range(len(self.worst))),
            *([self._draw_sweep] if any(point.distortion for point in self.sweep) else []),
            *([self._draw_plane] if by_kind(self.plane) else []),
            lambda: pictures.vocabulary_use(self.details.uses, self.sizes, self.unit),
        ]

    def _draw_lengths(self) -> Picture:
        first, counts = self._length_counts()
        tokens = self.details.distortion.tokens
        return pictures.token_lengths(counts, first, tokens["mean_token_length"], tokens["p99_token_length"])

    def _draw_errors(self) -> Picture:
        measured = self.details.distortion
        width = self.normalizer.high - self.normalizer.low
        return pictures.dimension_errors(
            self.labels,
            measured.rmse,
            measured.worst,
            measured.quantization_rmse / width,
            measured.clipping_rmse / width,
            self.details.clipped,
        )

    def _draw_chunk(self, number: int) -> Picture:
        chunk = self.worst[number]
        title = f"Episode {chunk.episode} from frame {chunk.start}, {chunk.tokens} tokens, RMSE {chunk.error:.3g}"
        return pictures.chunk(
            f"worst_chunk_{number + 1}",
            title,
            self.labels,
            chunk.original,
            chunk.decoded,
            self.normalizer.low,
            self.normalizer.high,
        )

    def _draw_sweep(self) -> Picture:
        found = [(point, point.distortion) for point in self.sweep if point.distortion is not None]
        own = self.details.distortion
        return pictures.rate_distortion(
            [measured.tokens["mean_token_length"] for _, measured in found],
            [measured.normalized_rmse for _, measured in found],
            [rounding_rmse(measured, self.normalizer) for _, measured in found],
            [self.scale_text(point.scale) for point, _ in found],
            (own.tokens["mean_token_length"], own.normalized_rmse),
        )

    def _draw_plane(self) -> Picture:
        lines = {
            kind: ([point.tokens or 0.0 for point in points], [point.rmse or 0.0 for point in points])
            for kind, points in by_kind(self.plane).items()
        }
        measured = self.details.distortion
        own = measured.tokens["mean_token_length"], rounding_rmse(measured, self.normalizer)
        return pictures.rate_distortion_plane(lines, own)

    def page(self, drawn: Sequence[Picture]) -> Page:
        """The page: in every section a picture, what it says, and its table."""
        measured, details = self.details.distortion, self.details
        by_name = {picture.name: picture for picture in drawn}
        page = Page("FAST tokenizer report", f"Measured on {self.measured_on}.")
        page.cards(
            [
                ("tokens per chunk, mean", f"{measured.tokens['mean_token_length']:.1f}"),
                ("tokens per chunk, 99th percentile", f"{measured.tokens['p99_token_length']:.0f}"),
                ("values per token", f"{measured.tokens['compression_ratio']:.1f}"),
                ("RMSE, normalised units", f"{measured.normalized_rmse:.4f}"),
                ("frames clipped", f"{measured.clipped_frames:.1%}"),
                ("coefficients outside the vocabulary", str(measured.saturations)),
            ]
        )
        page.table([list(line) for line in self.about], ["", ""])
        page.heading("Token lengths")
        page.show(by_name["token_lengths"])
        page.table(self._summary(), ["", self.measured_on])
        page.heading("Error of each dimension")
        self._page_errors(page, by_name["errors"])
        page.heading("Worst chunks")
        page.text(
            "The chunks with the largest error over all dimensions, in normalised units; of overlapping chunks only "
            "the worst is shown."
        )
        for number in range(len(self.worst)):
            page.show(by_name[f"worst_chunk_{number + 1}"])
        page.heading("Rate and distortion")
        self._page_sweep(page, by_name.get("rate_distortion"))
        page.heading("Other encoders")
        if "rate_distortion_plane" in by_name:
            page.show(by_name["rate_distortion_plane"])
        title, rows, headers = self._plane_table()
        page.text(title + ".")
        page.table(rows, headers)
        for point in self.plane:
            if point.problem is not None:
                page.warning(f"{point.kind}, scale {self.scale_text(point.scale)}: {point.problem}")
        page.heading("Use of the vocabulary")
        page.show(by_name["vocabulary_use"])
        page.table(*self._ids_table())
        page.heading("Saturations")
        low, high = self.tokenizer.vocabulary.low, self.tokenizer.vocabulary.high
        page.text(
            f"The vocabulary expresses the coefficients {low} to {high}. {measured.saturations} coefficients of "
            f"{int((details.saturations > 0).sum())} chunks (of {measured.chunks}) are outside and were moved to the "
            "nearest that it can express."
        )
        return page

    def _page_errors(self, page: Page, picture: Picture) -> None:
        measured = self.details.distortion
        if measured.clipped_frames > _CLIPPED_FRAMES_WARNING:
            page.warning(
                f"{measured.clipped_frames:.1%} of the frames have values outside the range of the normaliser "
                f"({self.normalizer.mode}), which are cut off. MIN_MAX cuts nothing off."
            )
        for line in self.normalizer.guard_report():
            page.warning(line)
        page.show(picture)
        title, rows, headers = error_table(measured, self.tokenizer.scale, self.normalizer, self.measured_on)
        shares = [f"{share:.2%}" for share in self.details.clipped]
        rows = [[label, *row[2:], share] for row, label, share in zip(rows, self.labels, shares, strict=True)]
        page.text(title + ".")
        page.table(rows, [*headers[1:], "clipped"])

    def _page_sweep(self, page: Page, picture: Picture | None) -> None:
        title, rows, headers = self._sweep_table()
        if picture is not None:
            page.show(picture)
        page.text(title + ".")
        page.table(rows, headers)
        for point in self.sweep:
            if point.problem is not None:
                page.warning(f"Scale {self.scale_text(point.scale)}: {point.problem}")

    def _ids_table(self) -> tuple[list[list[Any]], list[str]]:
        uses, expansions = self.details.uses, self.tokenizer.vocabulary.expansions
        most = np.argsort(-uses, kind="stable")[:_LISTED_IDS].tolist()
        total = max(1, int(uses.sum()))
        rows = [[i, int(uses[i]), f"{uses[i] / total:.1%}", _short(runs_text(expansions[i]))] for i in most]
        return rows, ["id", "uses", "share", f"stands for ({self.unit}; 0*12: twelve zeros)"]


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
