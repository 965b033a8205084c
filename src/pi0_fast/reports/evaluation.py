"""The report on policies in a simulator: episodes, their summary, tables, json and page.

An evaluation has one policy or two that were given the same episodes; then it says by how much they differ. Episodes
that failed for a reason of the simulator's count as no success, and are counted apart as well. Left out: running
episodes (evaluate.py), and the intervals' formulas (intervals.py).
"""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pi0_fast.actions.report import Table
from pi0_fast.reports.intervals import Paired, paired_difference, wilson
from pi0_fast.reports.page import Page
from pi0_fast.reports.pictures import BLUE, ORANGE, Picture

FORMAT = {"format": "pi0-fast-evaluation", "version": 1}
#: How an episode can end: with success, after its last step, ended by the simulator, or failed with a reason.
SUCCESS, TIME, ENDED, FAILED = "success", "time", "ended", "failed"
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class EpisodeResult:
    """One episode of a policy in a simulator.

    Attributes:
        task: the simulator's name of it.
        seed: of the simulator.
        end: SUCCESS, TIME, ENDED or FAILED.
        steps: actions that were executed.
        reward: the sum of the simulator's rewards.
        clipped: executed actions that were beyond the simulator's limits.
        chunks: that were predicted.
        malformed: of these, those that held no chunk (only without constrained decoding).
        tokens: action tokens of all chunks.
        latencies_ms: of each chunk the time of the policy's call, from observation to actions; one call serves all
            episodes that run side by side.
        seconds: from the first observation to the end.
        failure: why the simulator could not go on, or None.
    """

    task: str
    seed: int
    end: str
    steps: int = 0
    reward: float = 0.0
    clipped: int = 0
    chunks: int = 0
    malformed: int = 0
    tokens: int = 0
    latencies_ms: tuple[float, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    failure: str | None = None

    @property
    def success(self) -> bool:
        """Whether the task was done."""
        return self.end == SUCCESS

    def to_json(self) -> dict[str, Any]:
        """A plain mapping, from which `from_json` makes the same again; a reward that is no number is None there."""
        return {**asdict(self), "reward": self.reward if math.isfinite(self.reward) else None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EpisodeResult:
        """Raises TypeError or KeyError where fields are missing or unknown."""
        reward = math.nan if content["reward"] is None else content["reward"]
        return cls(**{**content, "latencies_ms": tuple(content["latencies_ms"]), "reward": reward})


@dataclass(frozen=True)
class Summary:
    """Of some episodes of one policy.

    Attributes:
        episodes, successes, failed: numbers of episodes; failed ones are those that the simulator could not end.
        interval: of the share of successes, 95 % (Wilson).
        steps: mean of all episodes but failed ones, and `steps_to_success`: of the successful; None without such.
        chunks: that were predicted.
        malformed, clipped: shares of the chunks, and of the executed actions.
        tokens: mean of a chunk.
        latency_ms: "mean", "p50", "p99" of a chunk.
    """

    episodes: int
    successes: int
    failed: int
    interval: tuple[float, float]
    steps: float | None
    steps_to_success: float | None
    chunks: int
    malformed: float
    clipped: float
    tokens: float
    latency_ms: dict[str, float]

    @classmethod
    def of(cls, episodes: Sequence[EpisodeResult]) -> Summary:
        """The sums and shares of these."""
        successes = sum(episode.success for episode in episodes)
        chunks = sum(episode.chunks for episode in episodes)
        actions = sum(episode.steps for episode in episodes)
        latencies = np.array([value for episode in episodes for value in episode.latencies_ms])
        latency = {}
        if len(latencies):
            p50, p99 = np.percentile(latencies, [50, 99]).tolist()
            latency = {"mean": float(latencies.mean()), "p50": p50, "p99": p99}
        return cls(
            episodes=len(episodes),
            successes=successes,
            failed=sum(episode.end == FAILED for episode in episodes),
            interval=wilson(successes, len(episodes)),
            steps=_mean([episode.steps for episode in episodes if episode.end != FAILED]),
            steps_to_success=_mean([episode.steps for episode in episodes if episode.success]),
            chunks=chunks,
            malformed=sum(episode.malformed for episode in episodes) / max(chunks, 1),
            clipped=sum(episode.clipped for episode in episodes) / max(actions, 1),
            tokens=sum(episode.tokens for episode in episodes) / max(chunks, 1),
            latency_ms=latency,
        )

    @property
    def share(self) -> float:
        """Of successes; 0 without episodes."""
        return self.successes / max(self.episodes, 1)

    def to_json(self) -> dict[str, Any]:
        """All of it, with `success`, the share."""
        return {"success": self.share, **asdict(self)}


def _mean(values: Sequence[int]) -> float | None:
    return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class Film:
    """A video of an episode: the mp4 file's content, and the words below it."""

    policy: int
    content: bytes = field(repr=False)
    words: str


@dataclass(frozen=True)
class EvaluationReport:
    """Everything that is shown of an evaluation.

    Attributes:
        about: (what, text) lines on what was done.
        policies: names of the policy, or of the two that are compared.
        tasks: in order.
        episodes: of each policy.
        warnings: what a reader has to know before believing the numbers.
        details: what else the json holds: settings, seeds, versions.
        published: name of a suite, or ALL_TASKS -> percent that others published, quoted and not measured here.
        source: whose numbers those are.
    """

    about: tuple[tuple[str, str], ...]
    policies: tuple[str, ...]
    tasks: tuple[str, ...]
    episodes: tuple[tuple[EpisodeResult, ...], ...]
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    @property
    def suites(self) -> dict[str, list[str]]:
        """The tasks of each suite, in order: what comes before the `/` of names such as libero_object/3."""
        found: dict[str, list[str]] = {}
        for task in self.tasks:
            suite, slash, number = task.rpartition("/")
            if slash and number.isdigit():
                found.setdefault(suite, []).append(task)
        return found

    def _together(self) -> Iterator[tuple[str, Collection[str]]]:
        """Tasks that have a line together: those of each suite, where there are several suites, and all."""
        suites = self.suites
        if len(suites) > 1 and len(self.tasks) > len(suites):
            yield from suites.items()
        if len(self.tasks) > 1:
            yield ALL_TASKS, self.tasks

    def groups(self, policy: int) -> Iterator[tuple[str, list[EpisodeResult]]]:
        """The episodes of each task, and, where there are several tasks, of those together."""
        own = self.episodes[policy]
        for task in self.tasks:
            yield task, [episode for episode in own if episode.task == task]
        for name, tasks in self._together():
            yield name, [episode for episode in own if name == ALL_TASKS or episode.task in tasks]

    def pairs(self) -> Iterator[tuple[str, Paired]]:
        """For two policies: the episodes that both have ended, counted by who succeeded, as `groups`."""
        if len(self.policies) != 2:
            return
        of_tasks: dict[str, Paired] = {}
        for task in self.tasks:
            first, second = (
                {episode.seed: episode.success for episode in own if episode.task == task and episode.end != FAILED}
                for own in self.episodes
            )
            outcomes = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
            kinds = ((True, True), (True, False), (False, True), (False, False))
            pairs = Paired(*(outcomes.count(kind) for kind in kinds))
            of_tasks[task] = pairs
            yield task, pairs
        for name, tasks in self._together():
            yield name, sum((of_tasks[task] for task in tasks), Paired(0, 0, 0, 0))

    # --- tables ---------------------------------------------------------------------------------------------

    def tables(self) -> Iterator[Table]:
        """Success, what others published, chunks, and the difference of two policies."""
        yield self._success_table()
        if self.published:
            yield self._published_table()
        yield self._chunks_table()
        if len(self.policies) == 2:
            yield self._difference_table()

    def _named(self, policy: int, task: str) -> list[Any]:
        return [task] if len(self.policies) == 1 else [task, _letter(policy)]

    @property
    def _name_headers(self) -> list[str]:
        return ["task"] if len(self.policies) == 1 else ["task", "policy"]

    def _rows(self) -> Iterator[tuple[list[Any], Summary]]:
        """Each task, and then all; two policies under one another."""
        grouped = [list(self.groups(policy)) for policy in range(len(self.policies))]
        for of_task in zip(*grouped, strict=True):
            for policy, (task, episodes) in enumerate(of_task):
                yield self._named(policy, task), Summary.of(episodes)

    def _success_table(self) -> Table:
        rows = []
        any_failed = any(episode.end == FAILED for own in self.episodes for episode in own)
        for names, found in self._rows():
            low, high = found.interval
            cells = [f"{found.share:.1%}", f"{low:.1%} to {high:.1%}", f"{found.successes} of {found.episodes}"]
            failed = [found.failed] if any_failed else []
            rows.append([*names, *cells, _number(found.steps), _number(found.steps_to_success), *failed])
        headers = ["success", "95 % interval", "episodes", "steps", "steps if done"]
        failed_header = ["simulator failed"] if any_failed else []
        return "Success", rows, [*self._name_headers, *headers, *failed_header]

    def _published_table(self) -> Table:
        rows: list[list[Any]] = []
        for policy in range(len(self.policies)):
            for name, episodes in self._of_published(policy):
                found = Summary.of(episodes)
                low, high = found.interval
                cells = [f"{self.published[name]:.1f}%", f"{found.share:.1%}", f"{low:.1%} to {high:.1%}"]
                rows.append([*self._named(policy, name), *cells])
        headers = [*self._name_headers, "published", "here", "95 % interval"]
        return f"Beside published numbers ({self.source}), which are quoted, not reproduced here", rows, headers

    def _of_published(self, policy: int) -> Iterator[tuple[str, list[EpisodeResult]]]:
        """The episodes that stand beside each published number."""
        for name in self.published:
            tasks = self.tasks if name == ALL_TASKS else self.suites[name]
            yield name, [episode for episode in self.episodes[policy] if episode.task in tasks]

    def _chunks_table(self) -> Table:
        rows = []
        for names, found in self._rows():
            times = [f"{found.latency_ms[name]:.1f}" if found.latency_ms else "-" for name in ("mean", "p50", "p99")]
            shares = [f"{found.tokens:.1f}", f"{found.malformed:.1%}", f"{found.clipped:.1%}"]
            rows.append([*names, found.chunks, *shares, *times])
        headers = ["chunks", "tokens", "malformed", "clipped actions", "ms, mean", "p50", "p99"]
        return "Chunks: tokens and time of each", rows, [*self._name_headers, *headers]

    def _difference_table(self) -> Table:
        rows: list[list[Any]] = []
        for task, pairs in self.pairs():
            low, high = paired_difference(pairs)
            counts = [pairs.both, pairs.only_first, pairs.only_second, pairs.neither]
            rows.append([task, f"{pairs.difference:+.1%}", f"{low:+.1%} to {high:+.1%}", *counts])
        title = "B less A, on the same seeds: difference in success, and at which episodes who succeeded"
        return title, rows, ["task", "difference", "95 % interval", "both", "only A", "only B", "neither"]

    # --- json -----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Every number, every episode, and what is needed to do it again."""
        policies = [
            {
                "name": name,
                "tasks": {task: Summary.of(episodes).to_json() for task, episodes in self.groups(policy)},
                "episodes": [episode.to_json() for episode in self.episodes[policy]],
            }
            for policy, name in enumerate(self.policies)
        ]
        content = {**FORMAT, "kind": "evaluation", **self.details, "policies": policies}
        if len(self.policies) == 2:
            content["difference"] = {
                task: {"difference": pairs.difference, "interval": list(paired_difference(pairs)), **asdict(pairs)}
                for task, pairs in self.pairs()
            }
        if self.published:
            content["published"] = {"source": self.source, "percent": dict(self.published)}
        return {**content, "warnings": list(self.warnings)}

    # --- page -----------------------------------------------------------------------------------------------

    def page(self, films: Sequence[Film] = (), notes: Sequence[str] = ()) -> Page:
        """The page, with videos of episodes, and notes below these."""
        page = Page("Evaluation in a simulator", " against ".join(self.policies))
        page.cards(self._cards())
        for line in self.warnings:
            page.warning(line)
        page.table([list(line) for line in self.about], ["", ""])
        page.heading("Success")
        page.show(self.picture())
        _, rows, headers = self._success_table()
        page.table(rows, headers)
        page.text(
            "Intervals hold the true share 95 times of 100 (Wilson). Episodes in which the simulator failed count as "
            "no success. Steps are means; the second column is of successful episodes only."
        )
        if self.published:
            title, rows, headers = self._published_table()
            page.text(f"{title}.")
            page.table(rows, headers)
        if len(self.policies) == 2:
            page.heading("Difference")
            title, rows, headers = self._difference_table()
            page.text(f"{title}. Episodes in which the simulator failed are left out of the pairs.")
            page.table(rows, headers)
        page.heading("Chunks")
        _, rows, headers = self._chunks_table()
        page.table(rows, headers)
        page.text(
            "Tokens are action tokens of a chunk. A malformed chunk did not decode to all of its actions. Clipped "
            "actions were beyond the simulator's limits. Times are those of a call of the policy, from observation to "
            "actions; one call serves all episodes that run side by side."
        )
        if films or notes:
            page.heading("Videos")
            for policy, name in enumerate(self.policies):
                own = [(film.content, film.words) for film in films if film.policy == policy]
                if len(self.policies) > 1 and own:
                    page.text(f"{_letter(policy)}: {name}")
                page.videos(own)
            for note in notes:
                page.text(note)
        failures, headers = self._failures()
        if failures:
            page.heading("Episodes without success")
            page.table(failures, headers)
        return page

    def _cards(self) -> list[tuple[str, str]]:
        cards = []
        for policy in range(len(self.policies)):
            found = Summary.of(self.episodes[policy])
            low, high = found.interval
            prefix = "" if len(self.policies) == 1 else f"{_letter(policy)}: "
            cards.append((f"{prefix}success, {low:.0%} to {high:.0%}", f"{found.share:.0%}"))
            cards.append((f"{prefix}episodes", str(found.episodes)))
            cards.append((f"{prefix}malformed chunks", f"{found.malformed:.1%}"))
            if found.latency_ms:
                cards.append((f"{prefix}median time of a chunk", f"{found.latency_ms['p50']:.0f} ms"))
        return cards

    def _failures(self) -> tuple[list[list[Any]], list[str]]:
        reasons = {TIME: "not done within the steps", ENDED: "ended by the simulator"}
        rows = [
            [*self._named(policy, episode.task), episode.seed, episode.steps, episode.failure or reasons[episode.end]]
            for policy, own in enumerate(self.episodes)
            for episode in own
            if not episode.success
        ]
        return rows, [*self._name_headers, "seed", "steps", "why"]

    def picture(self) -> Picture:
        """Success and its interval, a bar for each row of the table; drawn here, so that no library is needed."""
        rows = [(" ".join(map(str, names)), found) for names, found in self._rows()]
        left = 20 + 7 * max(len(name) for name, _ in rows)
        width, height = left + 460, 24 * len(rows) + 34
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#1b1f24">',
        ]
        for percent in range(0, 101, 20):
            x = left + 4 * percent
            lines.append(f'<line x1="{x}" x2="{x}" y1="4" y2="{height - 26}" stroke="#e3e3e3"/>')
            lines.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle">{percent} %</text>')
        for number, (name, found) in enumerate(rows):
            y = 24 * number + 16
            colour = (BLUE, ORANGE)[number % len(self.policies)]
            low, high = (left + 400 * end for end in found.interval)
            lines.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>')
            lines.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
            lines.append(f'<circle cx="{left + 400 * found.share:.1f}" cy="{y}" r="5" fill="{colour}"/>')
        svg = "\n".join([*lines, "</svg>"])
        words = "Share of successful episodes with its 95 % interval"
        if len(self.policies) == 2:
            words += "; " + ", ".join(f"{_letter(policy)} is {name}" for policy, name in enumerate(self.policies))
        return Picture("success", words + ".", svg.encode(), b"")


def _letter(policy: int) -> str:
    return "AB"[policy]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
