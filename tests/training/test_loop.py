"""The loop in this process: accumulation, averages, bfloat16, what is refused, what a run leaves behind."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import tiny_runs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.train_config import TrainConfig, parse_train  # noqa: E402
from pi0_fast.training import loop  # noqa: E402
from pi0_fast.training.loop import TrainingResult, train  # noqa: E402
from pi0_fast.training.metrics import read_metrics  # noqa: E402
from pi0_fast.training.setup import Run, set_up  # noqa: E402
from pi0_fast.types import PolicyError, UsageError  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def run(folder: Path, output: Path, **flags: Any) -> TrainingResult:
    line = tiny_runs.arguments(folder, output, **flags)
    config = parse_train(TrainConfig, line[1:], "train")
    config.validate()
    return train(config)


def go_on(output: Path, **flags: Any) -> TrainingResult:
    line = ["--resume=true", f"--output_dir={output}", *(f"--{name}={value}" for name, value in flags.items())]
    config = parse_train(TrainConfig, line, "train")
    config.validate()
    return train(config)


def weights(checkpoint: Path | None) -> dict[str, Any]:
    assert checkpoint is not None
    return load_file(checkpoint / "pretrained_model" / "model.safetensors")


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("prompt_format", ["lerobot", "openpi"])
def test_accumulated_batches_are_one_large_batch(folder: Path, tmp_path: Path, prompt_format: str) -> None:
    """Also where batches have different numbers of target ids, and rows that carry no loss."""
    flags = {"policy.prompt_format": prompt_format, "save_freq": 0, "policy.optimizer_eps": 1e-4}
    large = run(folder, tmp_path / "large", batch_size=6, **flags)
    small = run(folder, tmp_path / "small", batch_size=2, gradient_accumulation_steps=3, **flags)
    assert any("padded_rows" in line.get("counts", {}) for line in read_metrics(large.output_dir))
    for name, value in weights(large.checkpoint).items():
        torch.testing.assert_close(value, weights(small.checkpoint)[name], rtol=1e-4, atol=1e-5)
    pairs = zip(read_metrics(large.output_dir), read_metrics(small.output_dir), strict=True)
    for first, second in pairs:
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["target_ids"] == first["target_ids"]


@pytest.mark.parametrize(
    "flags",
    [
        {"ema_decay": 0.5},
        {"policy.dtype": "bfloat16"},
        {"policy.dtype": "bfloat16", "ema_decay": 0.5, "freeze": '["*embed_tokens*"]'},
        {"policy.gradient_checkpointing": "true", "policy.optimizer_fused": "false"},
    ],
    ids=["averages", "bfloat16", "bfloat16-averages-frozen", "checkpointing-not-fused"],
)
def test_resumed_runs_are_the_same_in_every_mode(
    folder: Path, tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folder, tmp_path / "whole", **flags)
    real, calls = loop.Optimizer.step, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop.Optimizer, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "broken", **flags)
    monkeypatch.setattr(loop.Optimizer, "step", real)
    resumed = go_on(tmp_path / "broken")
    assert (resumed.step, resumed.finished) == (8, True)
    assert_equal(weights(resumed.checkpoint), weights(whole.checkpoint))


def test_checkpoints_hold_the_averaged_weights(folder: Path, tmp_path: Path) -> None:
    flags = {"steps": 3, "save_freq": 1}
    plain = run(folder, tmp_path / "plain", **flags)
    averaged = run(folder, tmp_path / "averaged", ema_decay=0.5, **flags)
    name = next(iter(weights(plain.checkpoint)))
    steps = [weights(plain.output_dir / "checkpoints" / f"{step:06d}")[name] for step in (1, 2, 3)]
    first = weights(averaged.output_dir / "checkpoints" / "000001")[name]
    expected = 0.5 * (0.5 * first + 0.5 * steps[1]) + 0.5 * steps[2]
    torch.testing.assert_close(weights(averaged.checkpoint)[name], expected)


def test_what_a_run_leaves_behind(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"dataset.val_fraction": 0.25, "eval_freq": 4, "keep_last": 2, "batch_size": 8, "max_eval_samples": 6}
    result = run(folder, tmp_path / "run", **flags)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "000008"
    entries = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert entries == {"checkpoints", "metrics.jsonl", "metrics.png", "report.json"}
    assert {entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()} == {"000006", "000008", "last"}
    lines = read_metrics(tmp_path / "run")
    assert [(line["step"], line["kind"]) for line in lines] == [
        *((2, "train"), (4, "train"), (4, "validation")),
        *((6, "train"), (8, "train"), (8, "validation")),
    ]
    training = [line for line in lines if line["kind"] == "train"]
    assert training[-1]["loss"] < training[0]["loss"]
    # Of the second of 8 updates: an eighth of half a cosine from 1e-3 to 1e-4.
    assert training[0]["learning_rate"] == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 8)))
    assert result.validation is not None
    assert result.validation["held_out"]
    assert result.validation["frames"] <= 6
    assert result.validation["action_l1"] >= result.validation["tokenizer_l1"]
    loaded = PI0FastPolicy.from_pretrained(tmp_path / "run" / "checkpoints" / "last" / "pretrained_model")
    assert loaded.config.chunk_size == 4
    out = capsys.readouterr().out
    assert "step 8/8: loss" in out
    assert "held-out frames loss" in out


def test_without_held_out_frames_training_frames_are_measured(folder: Path, tmp_path: Path) -> None:
    result = run(
        folder, tmp_path / "run", steps=1, eval_freq=1, max_eval_samples=3, save_checkpoint="false", save_freq=20_000
    )
    assert result.validation is not None
    assert not result.validation["held_out"]
    assert result.checkpoint is None
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_finished_run_is_gone_on_with_by_more_steps(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(folder, tmp_path / "run", steps=2)
    assert go_on(tmp_path / "run").step == 2
    assert "raise --steps" in capsys.readouterr().out
    more = go_on(tmp_path / "run", steps=4)
    assert (more.step, more.checkpoint) == (4, tmp_path / "run" / "checkpoints" / "000004")
    assert first.checkpoint != more.checkpoint
    # and that is said, without what has not changed
    assert "its results will differ: learning rates: decay_steps was 2 and is 4\n" in capsys.readouterr().err


def test_the_saved_kind_of_adamw_wins(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, tmp_path / "run", steps=2, **{"policy.optimizer_fused": "true"})
    capsys.readouterr()
    go_on(tmp_path / "run", steps=4, **{"policy.optimizer_fused": "false"})
    out = capsys.readouterr().out
    assert "optimizer_fused=false is ignored" in out
    state = json.loads((tmp_path / "run/checkpoints/last/training_state/training_step.json").read_text())
    assert state["optimizer"]["fused"] is True
    assert "optimizer_fused" not in json.loads(
        (tmp_path / "run/checkpoints/last/pretrained_model/config.json").read_text()
    )


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = PI0FastPolicy.forward, 0

    def broken(self: PI0FastPolicy, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, info = real(self, batch)
        return (loss * float("nan") if calls == 4 else loss), info

    monkeypatch.setattr(PI0FastPolicy, "forward", broken)
    with pytest.raises(PolicyError, match=r"loss became nan at step 4; .*000002 is from before"):
        run(folder, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / "000004").exists()


def test_a_process_without_a_number_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK is not set"):
        run(folder, tmp_path / "run")


def test_a_full_disk_is_found_before_the_first_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("pi0_fast.training.states.shutil.disk_usage", lambda _: Usage)
    with pytest.raises(OSError, match="a checkpoint takes"):
        run(folder, tmp_path / "run")


def test_it_runs_in_another_thread(folder: Path, tmp_path: Path) -> None:
    """Signals cannot be caught there; nothing else is different."""
    results: list[TrainingResult] = []
    thread = threading.Thread(target=lambda: results.append(run(folder, tmp_path / "run", steps=1)))
    thread.start()
    thread.join()
    assert results[0].finished


def test_processes_that_differ_in_what_belongs_to_a_policy_are_told_apart(tmp_path: Path) -> None:
    """Each of several datasets' tokenizers and statistics, and the weights, though sizes and flags are the same."""

    def made() -> Run:
        both = {"dataset.repo_id": '["a","b"]', "dataset.root": json.dumps([str(tmp_path / "data")] * 2)}
        line = tiny_runs.arguments(tmp_path, tmp_path / "out", **both)
        return set_up(parse_train(TrainConfig, line[1:], "pi0-fast train").resolved())

    tiny_runs.build_dataset(tmp_path / "data")
    tiny_runs.write_architecture(tmp_path / "sizes.json")
    first, second = loop._fundamentals(made()), made()
    assert loop._fundamentals(second) == first
    policy = second.others[0].policy
    statistics = policy.preparation.processors.action.statistics
    statistics["q01"] = statistics["q01"] - 1
    with torch.no_grad():
        next(policy.model.parameters()).flatten()[0].mul_(-1)
    found = loop._fundamentals(second)
    assert {name for name in first if found[name] != first[name]} == {
        "normalization of b (fingerprint)",
        "weights (sha256 of sums)",
    }


def test_a_resumed_run_knows_its_frames_and_tasks_again(tmp_path: Path) -> None:
    tiny_runs.build_dataset(tmp_path / "data", (12, 12, 12))
    tiny_runs.write_architecture(tmp_path / "sizes.json")

    def made(**flags: object) -> dict[str, Any]:
        line = tiny_runs.arguments(tmp_path, tmp_path / "out", **flags)
        return set_up(parse_train(TrainConfig, line[1:], "pi0-fast train").resolved()).conditions()

    first = made(**{"dataset.episodes": "[0,1]"})
    assert made(**{"dataset.episodes": "[0,1]"}) == first
    other = made(**{"dataset.episodes": "[0,2]"})  # as many frames
    assert other["training frames"] == first["training frames"]
    name = "which frames, and their tasks (sha256)"
    assert other[name] != first[name]
    tasks = tmp_path / "data/meta/tasks.parquet"
    table = pq.read_table(tasks)
    texts = [text.replace("pick up", "drop") for text in table.column(1).to_pylist()]
    pq.write_table(table.set_column(1, table.column_names[1], pa.array(texts)), tasks)
    assert made(**{"dataset.episodes": "[0,1]"})[name] != first[name]
    assert made(**{"dataset.image_transforms.enable": "true"})["image transforms"]["max_shift"] == 0.05
