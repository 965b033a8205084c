"""What a demo measured, read from what its commands left behind: a page, a picture, a table for the README, json.

Nothing is measured here. Left out: running the commands (demo.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pi0_fast.actions.report import Table
from pi0_fast.reports.evaluation import SUCCESS
from pi0_fast.reports.intervals import Paired, paired_difference
from pi0_fast.reports.page import Page
from pi0_fast.reports.pictures import BLUE, Picture, draw_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Pictures of the tokenizer's report that are shown, in order.
_OF_THE_REPORT = {
    "rate_distortion": "Error of the tokenizer against tokens per chunk, at several scales.",
    "errors": "Error of each action on held-out episodes.",
    "token_lengths": "Tokens per chunk on held-out episodes.",
}
_FRAMES = 6


THE_POLICY = "the policy"


def _results(folder: Path) -> dict[str, Any]:
    """The policy's part of an evaluation's json."""
    content = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    policy: dict[str, Any] = content["policies"][0]
    return policy


@dataclass(frozen=True)
class Variant:
    """How a policy did in the simulator.

    Attributes:
        name: of the policy, for people.
        task: the simulator's name, or `all tasks`.
        summary: of its episodes, as in evaluation.json.
    """

    name: str
    task: str
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, folder: Path) -> list[Variant]:
        """Of each task, and of all where there are several, from an evaluation's directory."""
        return [cls(name, task, found) for task, found in _results(folder)["tasks"].items()]

    def row(self) -> list[str]:
        """Cells of the table, without the task."""
        found = self.summary
        low, high = found["interval"]
        return [
            self.name,
            f"{found['success']:.0%}",
            f"{low:.0%} to {high:.0%}",
            f"{found['successes']}/{found['episodes']}",
            "-" if found["steps_to_success"] is None else f"{found['steps_to_success']:.0f}",
            f"{found['malformed']:.1%}",
            f"{found['tokens']:.1f}",
            f"{found['latency_ms']['p50']:.0f}" if found["latency_ms"] else "-",
        ]


@dataclass(frozen=True)
class Told:
    """What the policy did in the scenes of one task when it was told to do another one.

    Attributes:
        task, other: whose scenes, and whose text.
        pairs: the first is told the truth; success is that of `task`.
    """

    task: str
    other: str
    pairs: Paired

    @classmethod
    def read(cls, task: str, other: str, truth: Path, otherwise: Path) -> Told:
        """From the directories of two evaluations."""
        first, second = (
            {each["seed"]: each["end"] == SUCCESS for each in _results(folder)["episodes"] if each["task"] == task}
            for folder in (truth, otherwise)
        )
        outcomes = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
        kinds = ((True, True), (True, False), (False, True), (False, False))
        return cls(task, other, Paired(*(outcomes.count(kind) for kind in kinds)))

    def row(self) -> list[str]:
        """Cells of the table."""
        count = max(self.pairs.both + self.pairs.only_first + self.pairs.only_second + self.pairs.neither, 1)
        low, high = paired_difference(self.pairs)
        return [
            self.task,
            self.other,
            f"{(self.pairs.both + self.pairs.only_first) / count:.0%}",
            f"{(self.pairs.both + self.pairs.only_second) / count:.0%}",
            f"{self.pairs.difference:+.0%}",
            f"{low:+.0%} to {high:+.0%}",
        ]


#: Malformed, tokens and ms (the median) are of a chunk; short words, so that the table fits into 100 columns.
_HEADERS = ["success", "95 % interval", "scenes", "steps", "malformed", "tokens", "ms"]


@dataclass(frozen=True)
class Story:
    """Everything that is told.

    Attributes:
        title: simulator and task.
        variants: the policy, and what it is compared with, of each task.
        told: what happens when the text is another one.
        seconds: what each chapter took, by its title.
        commands: what was typed.
        run: directory of the training run.
        report: directory of the tokenizer's report.
        videos: mp4 files of episodes of the policy.
    """

    title: str
    variants: tuple[Variant, ...]
    told: tuple[Told, ...]
    seconds: Mapping[str, float]
    commands: tuple[str, ...]
    run: Path
    report: Path
    videos: tuple[Path, ...]

    @property
    def _whole(self) -> Variant:
        """The policy itself, over all tasks."""
        return [variant for variant in self.variants if variant.name == THE_POLICY][-1]

    def tables(self) -> Iterator[Table]:
        """For a terminal."""
        if len({variant.task for variant in self.variants}) == 1:
            yield f"In the simulator: {self.title}", [variant.row() for variant in self.variants], ["", *_HEADERS]
        else:
            rows = [[variant.task, *variant.row()] for variant in self.variants]
            yield "In the simulator", rows, ["task", "", *_HEADERS]
        if self.told:
            headers = ["scenes of", "told to do", "told the truth", "told otherwise", "difference", "95 % interval"]
            yield "Does the text decide? Success, on the same seeds", [told.row() for told in self.told], headers
        rows = [[title, f"{seconds:.0f}"] for title, seconds in self.seconds.items()]
        yield "Time", [*rows, ["in all", f"{sum(self.seconds.values()):.0f}"]], ["", "seconds"]

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "title": self.title,
            "policies": [{"name": each.name, "task": each.task, **each.summary} for each in self.variants],
            "told_otherwise": [
                {"task": told.task, "told": told.other, **asdict(told.pairs), "difference": told.pairs.difference}
                for told in self.told
            ],
            "seconds": dict(self.seconds),
            "commands": list(self.commands),
        }

    def markdown(self) -> str:
        """The tables, as they stand in a README."""
        lines = []
        for _, rows, headers in self.tables():
            marks = ["---", *["---:"] * (len(headers) - 1)]
            lines += [f"| {' | '.join(map(str, cells))} |" for cells in (headers, marks, *rows)]
            lines.append("")
        return "\n".join(lines)

    def page(self) -> Page:
        """For a browser."""
        page = Page("pi0-fast demo", self.title)
        first = self._whole.summary
        low, high = first["interval"]
        page.cards(
            [
                (f"success, {low:.0%} to {high:.0%}", f"{first['success']:.0%}"),
                ("scenes it had never seen", str(first["episodes"])),
                ("malformed chunks", f"{first['malformed']:.1%}"),
                ("tokens a chunk", f"{first['tokens']:.1f}"),
                ("seconds in all", f"{sum(self.seconds.values()):.0f}"),
            ]
        )
        page.heading("The policy at work")
        page.videos([(path.read_bytes(), path.stem.replace("_", " ")) for path in self.videos])
        *tables, (_, times, time_headers) = self.tables()
        for title, rows, headers in tables:
            page.heading(title)
            page.table(rows, headers)
        page.text(
            "Each policy acts in the same scenes, none of which was recorded. The intervals hold the true share 95 "
            "times of 100 (Wilson); steps are those of successful episodes. Malformed, tokens and milliseconds (the "
            "median) are of a chunk. Constrained decoding makes every chunk a whole one; without it a malformed chunk "
            "is filled up, and executed all the same."
        )
        page.heading("Training")
        page.image((self.run / "metrics.png").read_bytes(), "Loss and the like, over the steps of training.")
        page.heading("The action tokenizer")
        for name, words in _OF_THE_REPORT.items():
            page.image((self.report / f"{name}.png").read_bytes(), words)
        page.heading("Commands, and the time they took")
        page.table(times, time_headers)
        for line in self.commands:
            page.code(line)
        return page

    def picture(self) -> Picture:
        """An episode in frames, and below it the shares of success with their intervals."""
        strip = film_strip(self.videos[0], _FRAMES) if self.videos else None
        one = len({variant.task for variant in self.variants}) == 1
        names = [each.name if one else f"{each.task}: {each.name}" for each in reversed(self.variants)]

        def draw(figure: Figure) -> None:
            rows = 1 if strip is None else 2
            grid = figure.add_gridspec(rows, 1, height_ratios=[1.6, 0.5 + 0.25 * len(names)][-rows:])
            if strip is not None:
                axes = figure.add_subplot(grid[0])
                axes.imshow(strip)
                axes.set_axis_off()
                axes.set_in_layout(False)  # as wide as the picture, whatever the names below take
                axes.set_position((0.01, 0.5, 0.98, 0.5), which="both")
            axes = figure.add_subplot(grid[rows - 1])
            for place, variant in enumerate(reversed(self.variants)):
                low, high = variant.summary["interval"]
                share = variant.summary["success"]
                ends = [[max(share - low, 0)], [max(high - share, 0)]]
                axes.errorbar([share], [place], xerr=ends, fmt="o", color=BLUE, capsize=3)
            axes.set_yticks(range(len(names)), names)
            axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(names) - 0.4), xlabel="success, with 95 % interval")

        words = f"An episode of the policy, and its success: {self.title}."
        return draw_picture("demo", words, 2.6 + 0.25 * len(names), draw)


def film_strip(path: Path, count: int) -> np.ndarray:
    """`count` frames of a video (fewer where it is shorter) side by side, first to last: uint8 [h, w, 3]."""
    import av

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    places = np.unique(np.linspace(0, len(frames) - 1, count).round().astype(int))
    gap = np.full((frames[0].shape[0], max(frames[0].shape[1] // 40, 1), 3), 255, np.uint8)
    row = [part for place in places.tolist() for part in (frames[place], gap)]
    return np.concatenate(row[:-1], axis=1)


def write_story(story: Story, output: Path, mark: Mapping[str, Any]) -> None:
    """Write demo.png, demo.md, demo.html, and at last demo.json, into an existing directory."""
    (output / "demo.png").write_bytes(story.picture().png)
    (output / "demo.md").write_text(story.markdown(), encoding="utf-8")
    (output / "demo.html").write_text(story.page().render(), encoding="utf-8")
    content = json.dumps({**mark, "finished": True, **story.to_json()}, indent=2, ensure_ascii=False)
    (output / "demo.json").write_text(content + "\n", encoding="utf-8")
