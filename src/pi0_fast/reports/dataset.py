"""The report on a dataset: its tables, json, pictures and page. Left out: looking at the values (actions/survey.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast.actions.report import Table
from pi0_fast.actions.survey import Survey
from pi0_fast.reports import pictures
from pi0_fast.reports.page import Page
from pi0_fast.reports.pictures import Picture
from pi0_fast.reports.save import FORMAT


@dataclass(frozen=True)
class DatasetReport:
    """Everything that is shown of a dataset.

    Attributes:
        about: (what, text) lines on what was looked at.
        labels, names: of the D encoded dimensions, with and without their number.
        frames: length of each episode asked for.
        fps: frames per second.
        horizon: steps of a chunk.
        too_short: episodes shorter than that.
        survey: what was found.
    """

    about: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]
    frames: tuple[int, ...]
    fps: float
    horizon: int
    too_short: int
    survey: Survey

    def tables(self) -> Iterator[Table]:
        """Ranges of the dimensions, outliers, normalisation modes."""
        yield self._ranges_table()
        if self.survey.extremes:
            yield self._outliers_table()
        yield self._modes_table()

    def _remark(self, dim: int) -> str:
        if dim in self.survey.still:
            return "never moves"
        count = int(self.survey.outliers[dim])
        if dim in self.survey.rare:
            return f"hardly moves, {count} outliers"
        return f"{count} outliers" if count else ""

    def _ranges_table(self) -> Table:
        found = self.survey.statistics
        columns = (found.min, found.q01, found.q50, found.q99, found.max)
        rows: list[list[Any]] = [
            [label, *(f"{float(column[dim]):.4g}" for column in columns), self._remark(dim)]
            for dim, label in enumerate(self.labels)
        ]
        return "Ranges, in the data's own units", rows, ["dimension", "min", "q01", "q50", "q99", "max", ""]

    def _outliers_table(self) -> Table:
        found = self.survey
        rows: list[list[Any]] = [
            [
                self.labels[extreme.dim],
                int(found.outliers[extreme.dim]),
                int(found.outlier_episodes[extreme.dim]),
                f"{extreme.value:.4g}",
                f"{found.statistics.q01[extreme.dim]:.4g} to {found.statistics.q99[extreme.dim]:.4g}",
                extreme.episode,
                extreme.frame,
            ]
            for extreme in found.extremes
        ]
        title = "Outliers: values further outside q01 to q99 than those are apart"
        headers = ["dimension", "values", "in episodes", "furthest", "q01 to q99", "episode", "frame"]
        return title, rows, headers

    def _modes_table(self) -> Table:
        rows: list[list[Any]] = []
        for name, effect in self.survey.modes.items():
            worst = int(effect.largest.argmax())
            rows.append(
                [
                    name,
                    "yes" if effect.normalizer.clip else "no",
                    f"{effect.outside_values:.2%}",
                    f"{effect.outside_steps:.2%}",
                    f"{effect.largest[worst]:.3g}",
                    self.labels[worst],
                    len(effect.normalizer.guarded),
                ]
            )
        title = "What each normalisation mode would do: values outside its range, and the largest before clipping"
        return title, rows, ["mode", "clips", "values", "frames", "largest", "in dimension", "guarded"]

    def to_json(self) -> dict[str, Any]:
        """Every number that is drawn."""
        found = self.survey
        edges, counts = self._length_histogram()
        return {
            **FORMAT,
            "kind": "dataset",
            "about": dict(self.about),
            "dimensions": list(self.labels),
            "fps": self.fps,
            "action_horizon": self.horizon,
            "episodes_too_short": self.too_short,
            "episode_lengths": {"frames": list(self.frames), "edges": edges.tolist(), "counts": counts.tolist()},
            "statistics": found.statistics.to_mapping(),
            "never_moves": list(found.still),
            "hardly_moves": list(found.rare),
            "distributions": {
                "edges": found.edges.tolist(),
                "counts": found.counts.tolist(),
                "below": found.below.tolist(),
                "above": found.above.tolist(),
            },
            "outliers": {
                "values": found.outliers.tolist(),
                "episodes": found.outlier_episodes.tolist(),
                "furthest": [dict(extreme.__dict__) for extreme in found.extremes],
            },
            "modes": {
                name: {
                    "clips": effect.normalizer.clip,
                    "low": effect.normalizer.low.tolist(),
                    "high": effect.normalizer.high.tolist(),
                    "guarded": list(effect.normalizer.guarded),
                    "outside_of_dimension": effect.outside.tolist(),
                    "outside_values": effect.outside_values,
                    "outside_frames": effect.outside_steps,
                    "largest_of_dimension": effect.largest.tolist(),
                }
                for name, effect in found.modes.items()
            },
        }

    def _length_histogram(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(edges, counts), in bins of a fiftieth of the longest episode, from 0 on."""
        width = max(1, -(-max(self.frames) // 50))
        counts, edges = np.histogram(self.frames, np.arange(0, max(self.frames) + 2 * width, width))
        return edges, counts

    def drawings(self) -> list[Callable[[], Picture]]:
        """Episode lengths, ranges, distributions, modes."""
        return [self._draw_lengths, self._draw_ranges, self._draw_distributions, self._draw_modes]

    def _draw_lengths(self) -> Picture:
        edges, counts = self._length_histogram()
        return pictures.episode_lengths(edges, counts, self.fps, self.horizon)

    def _draw_ranges(self) -> Picture:
        found = self.survey.statistics
        width = np.where(found.q99 > found.q01, found.q99 - found.q01, 1.0)
        names = ("min", "q01", "q10", "q50", "q90", "q99", "max")
        relative = {name: (getattr(found, name) - found.q01) * 2.0 / width - 1.0 for name in names}
        return pictures.spreads(self.labels, relative, self.survey.still, self.survey.rare)

    def _draw_distributions(self) -> Picture:
        found = self.survey
        marks = list(zip(found.statistics.q01.tolist(), found.statistics.q99.tolist(), strict=True))
        outside = (found.below + found.above).tolist()
        return pictures.distributions(self.labels, found.edges, found.counts, marks, outside)

    def _draw_modes(self) -> Picture:
        effects = list(self.survey.modes.values())
        return pictures.modes(
            list(self.survey.modes),
            [effect.normalizer.clip for effect in effects],
            [effect.outside_steps for effect in effects],
            [float(effect.largest.max()) for effect in effects],
        )

    def page(self, drawn: Sequence[Picture]) -> Page:
        """The page: in every section a picture and its table."""
        by_name = {picture.name: picture for picture in drawn}
        found = self.survey
        page = Page("Dataset report", "What a tokenizer would be fitted on.")
        page.cards(
            [
                ("episodes", str(len(self.frames))),
                ("frames", str(sum(self.frames))),
                ("dimensions", str(len(self.labels))),
                ("never move", str(len(found.still))),
                ("hardly move", str(len(found.rare))),
                ("values that are outliers", str(int(found.outliers.sum()))),
            ]
        )
        page.table([list(line) for line in self.about], ["", ""])
        page.heading("Episode lengths")
        if self.too_short:
            page.warning(
                f"{self.too_short} episodes are shorter than a chunk of {self.horizon} frames and are left out."
            )
        page.show(by_name["episode_lengths"])
        page.heading("Ranges")
        page.show(by_name["ranges"])
        title, rows, headers = self._ranges_table()
        page.text(title + ".")
        page.table(rows, headers)
        page.heading("Distributions")
        page.show(by_name["distributions"])
        page.heading("Outliers")
        if found.extremes:
            title, rows, headers = self._outliers_table()
            page.text(title + ". Episode and frame are those of the furthest.")
            page.table(rows, headers)
        else:
            page.text("No value is further outside q01 to q99 than those are apart.")
        page.heading("Normalisation modes")
        self._page_modes(page, by_name["modes"])
        return page

    def _page_modes(self, page: Page, picture: Picture) -> None:
        page.show(picture)
        title, rows, headers = self._modes_table()
        page.text(title + ".")
        page.table(rows, headers)
        page.text(
            "Guarded dimensions never move, or move in so few frames that the mode's range would be a sliver; they get "
            "a range of their own. Range of each dimension in each mode (* guarded), and the share of values outside:"
        )
        effects = self.survey.modes
        per_dim: list[list[Any]] = []
        for dim, label in enumerate(self.labels):
            cells: list[str] = []
            for effect in effects.values():
                star = " *" if dim in effect.normalizer.guarded else ""
                low, high = effect.normalizer.low[dim], effect.normalizer.high[dim]
                cells += [f"{low:.4g} to {high:.4g}{star}", f"{effect.outside[dim]:.1%}"]
            per_dim.append([label, *cells])
        page.table(per_dim, ["dimension", *(text for name in effects for text in (name, "outside"))])
