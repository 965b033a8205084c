"""What is summed up and shown of episodes: by hand, in tables, json, picture and page."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from pi0_fast.reports.evaluation import (
    ALL_TASKS,
    ENDED,
    FAILED,
    SUCCESS,
    TIME,
    EpisodeResult,
    EvaluationReport,
    Film,
    Summary,
)
from pi0_fast.reports.intervals import Paired, paired_difference, wilson

EVIL = "<b>&\"'"


def episode(task: str, seed: int, end: str, **numbers: object) -> EpisodeResult:
    return EpisodeResult(task, seed, end, **numbers)  # type: ignore[arg-type]


EPISODES = (
    episode("open", 1, SUCCESS, steps=10, chunks=3, tokens=30, clipped=2, latencies_ms=(10.0, 20.0, 30.0)),
    episode("open", 2, TIME, steps=50, chunks=13, tokens=104, malformed=4, latencies_ms=(40.0,)),
    episode("open", 3, FAILED, steps=4, chunks=1, tokens=9, failure="the process died"),
    episode("shut", 1, ENDED, steps=20, chunks=5, tokens=50, latencies_ms=(50.0,)),
    episode("shut", 2, SUCCESS, steps=30, chunks=8, tokens=77),
)


def report_of(*policies: tuple[EpisodeResult, ...], **changes: object) -> EvaluationReport:
    names = ("first", "second")[: len(policies)]
    return EvaluationReport((("simulator", "toy"),), names, ("open", "shut"), policies, **changes)  # type: ignore[arg-type]


def test_a_summary_by_hand() -> None:
    found = Summary.of(EPISODES[:3])
    assert (found.episodes, found.successes, found.failed) == (3, 1, 1)
    assert found.share == pytest.approx(1 / 3)
    assert found.interval == wilson(1, 3)
    assert (found.steps, found.steps_to_success) == (30.0, 10.0)  # the failed one is left out
    assert found.chunks == 17
    assert found.malformed == pytest.approx(4 / 17)
    assert found.clipped == pytest.approx(2 / 64)
    assert found.tokens == pytest.approx(143 / 17)
    assert found.latency_ms == pytest.approx({"mean": 25.0, "p50": 25.0, "p99": 39.7})


def test_a_summary_of_nothing_is_no_error() -> None:
    found = Summary.of([])
    assert (found.share, found.interval, found.steps, found.latency_ms) == (0.0, (0.0, 1.0), None, {})


def test_an_episode_survives_json() -> None:
    for each in EPISODES:
        assert EpisodeResult.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_tables_of_one_policy() -> None:
    (_, success, headers), (_, chunks, _) = report_of(EPISODES).tables()
    assert [row[0] for row in success] == ["open", "shut", ALL_TASKS]
    low, high = wilson(2, 5)
    assert success[2] == [ALL_TASKS, "40.0%", f"{low:.1%} to {high:.1%}", "2 of 5", "27.5", "20.0", 1]
    assert len(headers) == len(success[0])
    assert chunks[0][:4] == ["open", 17, "8.4", "23.5%"]
    (_, success, _), _ = report_of(EPISODES[:2]).tables()
    assert len(success[0]) == 6  # no column of failures where there is none


SECOND = (
    episode("open", 1, TIME, steps=50),
    episode("open", 2, SUCCESS, steps=9),
    episode("open", 3, SUCCESS, steps=9),
    episode("shut", 1, SUCCESS, steps=9),
    episode("shut", 2, SUCCESS, steps=9),
)


def test_two_policies_are_paired_by_task_and_seed() -> None:
    report = report_of(EPISODES, SECOND[::-1])
    pairs = dict(report.pairs())
    # open: seed 1 only the first, 2 only the second, 3 left out (the simulator failed); shut: 1 only the second.
    assert pairs == {"open": Paired(0, 1, 1, 0), "shut": Paired(1, 0, 1, 0), ALL_TASKS: Paired(1, 1, 2, 0)}
    _, _, (_, rows, _) = report.tables()
    low, high = paired_difference(Paired(1, 1, 2, 0))
    assert rows[2] == [ALL_TASKS, "+25.0%", f"{low:+.1%} to {high:+.1%}", 1, 1, 2, 0]
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["difference"][ALL_TASKS]["only_second"] == 2
    assert [policy["name"] for policy in content["policies"]] == ["first", "second"]
    assert list(report_of(EPISODES).pairs()) == []


def test_the_picture_is_drawn_to_scale() -> None:
    picture = report_of((*EPISODES, episode(EVIL, 1, TIME))).picture()
    root = ElementTree.fromstring(picture.svg)
    space = "{http://www.w3.org/2000/svg}"
    labels = {text.text: float(text.attrib["x"]) for text in root.iter(f"{space}text")}
    circles = [float(circle.attrib["cx"]) for circle in root.iter(f"{space}circle")]
    zero, hundred = labels["0 %"], labels["100 %"]
    assert [(x - zero) / (hundred - zero) for x in circles] == pytest.approx([1 / 3, 1 / 2, 2 / 6], abs=1e-3)
    bars = [line for line in root.iter(f"{space}line") if line.attrib.get("stroke-width") == "3"]
    ends = [(float(bars[0].attrib[name]) - zero) / (hundred - zero) for name in ("x1", "x2")]
    assert ends == pytest.approx(wilson(1, 3), abs=1e-3)


def test_the_page_has_everything_and_fetches_nothing() -> None:
    report = report_of(EPISODES, SECOND, warnings=(EVIL,))
    films = [Film(0, b"mp4 of A", f"film {EVIL}"), Film(1, b"mp4 of B", "film 2")]
    text = report.page(films, ["more lie there"]).render()
    assert EVIL not in text
    assert text.count("<video") == 2
    assert "media-src data:" in text
    for part in (
        "the process died",
        "ended by the simulator",
        "not done within the steps",
        "more lie there",
        "B: second",
    ):
        assert part in text
    assert "http" not in text.replace("http-equiv", "")
    done = report_of(tuple(each for each in SECOND if each.success)).page().render()
    assert "Episodes without success" not in done
    assert "<video" not in done


def test_suites_have_lines_together_and_published_numbers_stand_beside_them() -> None:
    tasks = ("a/0", "a/1", "b/0")
    ends = {"a/0": (SUCCESS, SUCCESS), "a/1": (SUCCESS, TIME), "b/0": (TIME, TIME)}
    own = tuple(episode(task, seed, end, steps=5) for task, two in ends.items() for seed, end in enumerate(two))
    other = tuple(episode(task, seed, SUCCESS, steps=5) for task in tasks for seed in range(2))
    report = EvaluationReport((), ("first", "second"), tasks, (own, other))
    assert [name for name, _ in report.groups(0)] == [*tasks, "a", "b", ALL_TASKS]
    summaries = {name: Summary.of(episodes) for name, episodes in report.groups(0)}
    assert [summaries[name].successes for name in ("a", "b", ALL_TASKS)] == [3, 0, 3]
    assert dict(report.pairs()) == {
        "a/0": Paired(2, 0, 0, 0),
        "a/1": Paired(1, 0, 1, 0),
        "b/0": Paired(0, 0, 2, 0),
        "a": Paired(3, 0, 1, 0),
        "b": Paired(0, 0, 2, 0),
        ALL_TASKS: Paired(3, 0, 3, 0),
    }

    quoted = EvaluationReport((), ("p",), tasks, (own,), published={"a": 70.0, ALL_TASKS: 82.5}, source="somebody")
    _, (title, rows, headers), _ = quoted.tables()
    assert "somebody" in title
    assert "not reproduced" in title
    low, high = wilson(3, 4)
    assert headers == ["task", "published", "here", "95 % interval"]
    assert rows[0] == ["a", "70.0%", "75.0%", f"{low:.1%} to {high:.1%}"]
    assert rows[1][:3] == [ALL_TASKS, "82.5%", "50.0%"]
    assert quoted.to_json()["published"] == {"source": "somebody", "percent": {"a": 70.0, ALL_TASKS: 82.5}}
    assert "82.5%" in quoted.page().render()
    assert "published" not in report.to_json()
    one_suite = EvaluationReport((), ("p",), tasks[:2], (own[:4],))
    assert [name for name, _ in one_suite.groups(0)] == ["a/0", "a/1", ALL_TASKS]
