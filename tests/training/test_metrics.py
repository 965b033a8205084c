"""The numbers of a run: means, files, pictures, and what resuming keeps of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import pi0_fast.training.metrics as metrics_module  # noqa: E402
from pi0_fast.training.metrics import METRICS_FILE, Meter, Metrics, curves, memory_gib, read_metrics  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402


def add(meter: Meter, loss: float, norm: float = 1.0, **counts: int) -> None:
    meter.add(
        torch.tensor(loss),
        torch.tensor(norm),
        frames=4,
        target_ids=50,
        waited_s=0.0,
        counts=Counter({"rows": 4} | counts),
    )


def meter() -> Meter:
    return Meter(torch.device("cpu"))


def test_means_since_the_last_reading() -> None:
    one = meter()
    assert one.read() == {}
    for loss, norm in ((3.0, 1.0), (1.0, 2.0)):
        add(one, loss, norm, padded_rows=2)
    values = one.read()
    assert (values["loss"], values["grad_norm"], values["steps"], values["frames"]) == (2.0, 1.5, 2, 8)
    assert values["target_ids"] == 100
    assert values["counts"] == {"padded_rows": 4}
    assert values["frames_per_s"] == pytest.approx(4 / values["step_s"])
    add(one, 7.0)
    assert one.read()["loss"] == 7.0


def test_the_sums_go_on_where_a_run_resumes() -> None:
    straight, before, after = meter(), meter(), meter()
    losses = [0.1, 0.2, 0.7]
    for loss in losses:
        add(straight, loss, 1 / 3, clipped_values=1)
    for loss in losses[:2]:
        add(before, loss, 1 / 3, clipped_values=1)
    after.load_state(json.loads(json.dumps(before.state())))
    add(after, losses[2], 1 / 3, clipped_values=1)
    first, second = straight.read(), after.read()
    for name in ("loss", "grad_norm", "steps", "frames", "target_ids", "counts"):
        assert first[name] == second[name], name


@pytest.mark.parametrize(("loss", "norm", "what"), [(math.nan, 1.0, "loss became nan"), (1.0, math.inf, "gradient")])
def test_what_is_no_number_is_refused(loss: float, norm: float, what: str) -> None:
    one = meter()
    add(one, 1.0)
    one.check(5, 4, "")
    add(one, loss, norm)
    with pytest.raises(PolicyError, match=f"{what}.* at step 6; .* Then so"):
        one.check(6, 5, "Then so")
    with pytest.raises(PolicyError, match="between step 5 and step 6"):
        one.check(6, 4, "")


def test_time_spent_elsewhere_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now[0])
    one = meter()
    for _ in range(2):
        add(one, 1.0)
        now[0] += 3
    with one.paused():
        now[0] += 50
    assert one.read()["step_s"] == 3


def test_memory_is_that_of_this_process() -> None:
    assert 0.01 < memory_gib(torch.device("cpu")) < 1000


# --- files ----------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_lines_go_to_the_file_and_to_trackers(tmp_path: Path) -> None:
    recorder = Recorder()
    metrics = Metrics(tmp_path / "run", [recorder])
    metrics.write(2, "train", {"loss": 1.5, "counts": {"clipped_values": 3}})
    metrics.write(2, "validation", {"action_l1": 0.1, "action_l1_by_dimension": [0.1]})
    metrics.finish()
    assert read_metrics(tmp_path / "run") == [
        {"step": 2, "kind": "train", "loss": 1.5, "counts": {"clipped_values": 3}},
        {"step": 2, "kind": "validation", "action_l1": 0.1, "action_l1_by_dimension": [0.1]},
    ]
    assert recorder.seen == [
        (2, {"train/loss": 1.5, "train/counts/clipped_values": 3.0}),
        (2, {"validation/action_l1": 0.1}),
    ]
    assert recorder.finished
    assert (tmp_path / "run" / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_drops_later_lines_and_a_half_one(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, [])
    for step in (2, 4, 6):
        metrics.write(step, "train", {"loss": 1.0})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 8, "ki')  # killed while it wrote
    Metrics(tmp_path, [], resumed_step=4).write(6, "train", {"loss": 2.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(2, 1.0), (4, 1.0), (6, 2.0)]
    Metrics(tmp_path, [])
    assert read_metrics(tmp_path) == []


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "kind": "train"}\n{"step": 2}\n')
    with pytest.raises(PolicyError, match=r"line 2 is damaged \(KeyError\('kind'\)\)"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("kinds", [["train"], ["validation"], ["train", "validation"]])
def test_pictures_of_any_mixture_of_lines(kinds: list[str]) -> None:
    values: dict[str, Any] = {
        "train": {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 0.1},
        "validation": {"loss": 2.0, "token_accuracy": 0.5, "action_l1": 0.2, "tokenizer_l1": 0.1},
    }
    lines = [{"step": step, "kind": kind, **values[kind]} for step in (1, 2) for kind in kinds]
    assert curves(lines).png.startswith(b"\x89PNG")
