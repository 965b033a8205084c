"""The report before the first step: what it counts, compared with counting by hand, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiny_runs import ACTION, arguments, build_dataset  # noqa: E402

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY  # noqa: E402
from pi0_fast.train_config import TrainConfig, parse_train  # noqa: E402
from pi0_fast.training.audit import audit  # noqa: E402
from pi0_fast.training.setup import Run, set_up  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


def run_of(home: Path, output: Path, **flags: object) -> Run:
    config = parse_train(TrainConfig, arguments(home, output, **flags)[1:], "pi0-fast train")
    config.validate()
    return set_up(config.resolved())


def test_counts_are_those_of_the_data(home: Path, tmp_path: Path) -> None:
    run = run_of(home, tmp_path / "out")
    content = audit(run).content
    lengths = (14, 11, 9, 12)
    assert content["data"]["frames to train on"] == sum(lengths)
    assert content["data"]["frames without a whole chunk ahead (no loss)"] == pytest.approx(4 * 3 / sum(lengths))
    assert content["data"]["padded steps"] == pytest.approx(4 * (1 + 2 + 3) / (4 * sum(lengths)))
    assert content["tokens"]["of whole chunks"] == sum(length - 3 for length in lengths)
    # Every frame, as training sees it: the same lengths of targets and prompts, the same values outside.
    batch = run.train_frames.batch(np.arange(len(run.train_frames)))
    prepared = run.policy.preparation.training(batch)
    targets = prepared.prompt.valid.sum(axis=1) - prepared.prompt.text_length
    tokens = content["tokens"]
    assert tokens["chunks encoded"] == len(targets)
    assert tokens["target ids, mean"] == pytest.approx(targets.mean())
    assert tokens["target ids, most"] == targets.max()
    assert tokens["chunks over that budget"] == 0
    prompts = run.policy.preparation.prompt.generation(
        batch["task"], run.policy.preparation.processors.state.apply(batch["observation.state"])
    )
    assert tokens["prompt ids, most"] == prompts.text_length.max()
    shares = [row["outside"] for row in content["ranges"][ACTION_KEY]["dimensions"]]
    counted = sum(shares) * len(targets) * 4
    assert round(counted) == prepared.counts["clipped_values"] > 0
    assert content["parameters"]["trained"] == sum(p.numel() for p in run.policy.model.parameters())


def test_ranges_and_what_never_moves(home: Path, tmp_path: Path) -> None:
    root = tmp_path / "still"
    build_dataset(root)
    still(root)
    with pytest.warns(UserWarning, match="never move"):
        run = run_of(home, tmp_path / "out", **{"dataset.root": root})
    content = audit(run).content
    rows = content["ranges"][ACTION_KEY]["dimensions"]
    assert [row["constant"] for row in rows] == [False, True, False]
    assert rows[1]["low"] < rows[1]["min"] == rows[1]["max"] < rows[1]["high"]
    states = run.train_frames.observations(np.arange(len(run.train_frames)))[1]
    found = content["ranges"][STATE_KEY]["dimensions"]
    assert [row["min"] for row in found] == pytest.approx(states.min(axis=0).tolist())
    assert found[0]["checkpoint_low"] is None
    trip = content["round_trip"]["dimensions"]
    assert len(trip) == ACTION
    assert trip[1]["largest_error"] < 1e-3


def still(root: Path) -> None:
    """The second action never moves."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        values = np.array(table["action"].to_pylist(), np.float32)
        values[:, 1] = 0.25
        array = pa.array(values.tolist(), table.schema.field("action").type)
        pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", array), file)


def test_the_checkpoints_statistics_stand_beside_the_datas(home: Path, tmp_path: Path) -> None:
    run_of(home, tmp_path / "a").policy.save_pretrained(tmp_path / "start")
    other = build_dataset(tmp_path / "other", lengths=(20, 20))
    line = [
        text
        for text in arguments(home, tmp_path / "b", **{"policy.path": tmp_path / "start", "dataset.root": other})
        if not text.startswith(("--policy.architecture", "--policy.text_tok", "--policy.auto_fit", "--policy.fast_tok"))
    ]
    config = parse_train(TrainConfig, line[1:], "pi0-fast train")
    result = audit(set_up(config.resolved()))
    row = result.content["ranges"][STATE_KEY]["dimensions"][0]
    assert row["checkpoint_low"] not in (None, row["low"])
    headers = next(headers for title, _, headers in result.tables() if title.startswith(STATE_KEY))
    assert "checkpoint's -1" in headers
    assert result.content["statistics"]["checkpoint"][STATE_KEY]["q01"][0] == pytest.approx(row["checkpoint_low"])


def test_targets_over_the_budget_stop_training_before_it_begins(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"policy.max_action_tokens": 8}
    assert main(arguments(home, tmp_path / "out", **flags)) == 1
    out, err = capsys.readouterr()
    assert "chunks over that budget" in out  # the report is there all the same
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    most = content["tokens"]["target ids, most"]
    assert f"the longest {most}: set --policy.max_action_tokens={most}" in err
    assert not list((tmp_path / "out" / "checkpoints").glob("0*"))
    # What it says helps, in the same directory.
    assert main(arguments(home, tmp_path / "out", steps=1, **{"policy.max_action_tokens": most})) == 0


def test_the_advice_is_what_is_not_set_already(home: Path, tmp_path: Path) -> None:
    def advice(name: str, **flags: object) -> str:
        problem = audit(run_of(home, tmp_path / name, **{"policy.max_action_tokens": 8, **flags})).problem
        assert problem is not None
        return problem.partition(": ")[2]

    assert "max_decoding_steps" not in advice("a")  # 256 of them hold any of these chunks
    assert "auto_fit" not in advice("b")
    assert advice("c").endswith("or choose a smaller --policy.chunk_size")
    decided = {decision.what: decision.value for decision in run_of(home, tmp_path / "x").decisions}
    fitted = Path(decided["action tokenizer"])  # there may be others of other tests
    named = advice("d", **{"policy.action_tokenizer_name": fitted})
    assert named.endswith("or fit a tokenizer on this data (--policy.auto_fit_fast_tokenizer=true)")
    assert "max_decoding_steps=" in advice("e", **{"policy.max_decoding_steps": 12, "policy.constrained": "false"})


def test_held_out_chunks_are_measured_by_the_ranges_of_the_others(home: Path, tmp_path: Path) -> None:
    root = build_dataset(tmp_path / "data", lengths=(14, 11, 9, 12))
    run = run_of(home, tmp_path / "none", **{"dataset.root": root})
    assert audit(run).content["held_out"] is None
    run = run_of(home, tmp_path / "out", **{"dataset.root": root, "dataset.val_fraction": 0.25})
    assert run.validation_frames is not None
    batch = run.validation_frames.batch(np.arange(len(run.validation_frames)))
    whole = ~batch["action_is_pad"].any(axis=1)
    actions = batch["action"][whole].astype(np.float64)
    normalizer = run.policy.preparation.processors.action
    low, high = normalizer.statistics["q01"], normalizer.statistics["q99"]
    excess = np.maximum(np.maximum(low - actions, actions - high), 0)
    result = audit(run)
    found = result.content["held_out"]
    assert found["of whole chunks"] == found["chunks encoded"] == whole.sum()
    assert found["clipped steps"] == pytest.approx((excess > 0).any(axis=2).mean())
    assert found["largest error of clipping"] == pytest.approx(excess.max(), rel=1e-5)
    assert found["in dimension"] == str(int(excess.max(axis=(0, 1)).argmax()))
    assert found["clipped steps"] > 0.05
    (table,) = (dict(rows) for title, rows, _ in result.tables() if title == "Held out")
    assert table["clipped steps"] == f"{found['clipped steps']:.2%}"
    assert table["largest error of clipping"] == f"{excess.max():.4g}", "in the data's units, not a share"
    (line,) = (line for line in result.warnings() if "held-out" in line)
    assert f"{found['clipped steps']:.1%} of the steps" in line
    found["clipped steps"] = 0.05
    assert not any("held-out" in line for line in result.warnings())


def test_decisions_are_said_once(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(home, tmp_path / "out", steps=1)) == 0
    out = capsys.readouterr().out
    for decision in json.loads((tmp_path / "out" / "report.json").read_text())["decisions"]:
        assert out.count(f"{decision['what']}: {decision['value']}") == 1
        assert out.count(decision["why"]) == 1, decision


def test_no_whole_chunk_at_all(home: Path, tmp_path: Path) -> None:
    short = build_dataset(tmp_path / "short", lengths=(3, 2))
    made = run_of(home, tmp_path / "a")
    made.policy.save_pretrained(tmp_path / "start")
    line = [
        text
        for text in arguments(home, tmp_path / "b", **{"policy.path": tmp_path / "start", "dataset.root": short})
        if not text.startswith(("--policy.architecture", "--policy.text_tok", "--policy.auto_fit", "--policy.fast_tok"))
    ]
    run = set_up(parse_train(TrainConfig, line[1:], "pi0-fast train").resolved())
    with pytest.raises(PolicyError, match=r"has the 4 frames of a chunk \(the longest has 3\)"):
        audit(run)


def test_data_that_the_checkpoint_does_not_know_is_warned_of(home: Path, tmp_path: Path) -> None:
    run = run_of(home, tmp_path / "out")
    result = audit(run)
    assert not list(result.warnings())
    for key, part in result.content["ranges"].items():
        part["dimensions"][1]["outside"] = 0.454
        (line,) = result.warnings()
        assert key in line
        assert "1 of " in line
        assert "45.4%" in line
        part["dimensions"][1]["outside"] = 0.02
        kept = dict(part["dimensions"][1])
        part["dimensions"][1].update({"low": kept["low"] - 1e4, "high": kept["high"] + 1e4})
        (line,) = result.warnings()
        assert f"{key}: 1 of {len(part['dimensions'])} dimensions move within less than 5%" in line
        part["dimensions"][1].update(kept)
    result.content["cameras"].clear()
    assert list(result.warnings()) == ["the policy has no camera: it will act on the state and the task alone"]
