"""Two processes on one machine: the losses are those of one with the same batches, one of them writes, and all end when
one is gone."""

from __future__ import annotations

import json
import shutil
import signal as signals
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import tiny_processes  # noqa: E402
import tiny_runs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.training.metrics import read_metrics  # noqa: E402

torch.set_num_threads(1)

OPTIMIZER = "pi0_fast.training.optimizer"
#: Everything that must not be noticed: measuring, averages, clipping (the norms are about 3), accumulated batches.
FLAGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "ema_decay": 0.9,
    "policy.optimizer_eps": 1e-4,  # gradients that are 0 but for rounding would become steps
    "dataset.val_fraction": 0.5,
    "eval_freq": 4,
    "log_freq": 1,
    "save_freq": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    """The run of one process, whose batches are twice as large."""
    done = tiny_runs.run(tiny_runs.arguments(folder, folder / "one", batch_size=4, **FLAGS))
    assert done.returncode == 0, done.stderr
    return folder / "one"


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """The same run of two processes, which end well; only the first of them says so."""
    line = tiny_runs.arguments(folder, folder / "two", batch_size=2, num_workers=1, **FLAGS)
    first, second = tiny_processes.run(line)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "2 processes (ddp): 2 frames a process x 2 x 2 = 8 frames a step" in first.stdout
    assert "trained 8 steps" in first.stdout
    assert (second.stdout, second.stderr) == ("", "")
    return folder / "two"


def weights(output: Path, step: int = 8) -> dict[str, Any]:
    return load_file(output / "checkpoints" / f"{step:06d}" / "pretrained_model" / "model.safetensors")


def assert_same_run(first: Path, second: Path) -> None:
    """The same losses, measurements, counts and weights, but for rounding."""
    lines, others = read_metrics(first), read_metrics(second)
    assert [(line["step"], line["kind"]) for line in lines] == [(line["step"], line["kind"]) for line in others]
    for line, other in zip(lines, others, strict=True):
        for name in ("loss", "action_l1", "tokenizer_l1", "token_accuracy"):
            if name in line:
                assert other[name] == pytest.approx(line[name], rel=1e-5), (line["step"], name)
        if "grad_norm" in line:  # float32 sums of squares, of parts where weights are sharded
            assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4), line["step"]
        for name in ("frames", "target_ids", "counts", "steps", "malformed"):
            assert other.get(name) == line.get(name), (line["step"], name)
    other_weights = weights(second)
    for name, value in weights(first).items():
        torch.testing.assert_close(other_weights[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_two_processes_are_one_with_the_same_batches(one: Path, two: Path) -> None:
    assert_same_run(one, two)
    assert {entry.name for entry in (two / "checkpoints").iterdir()} == {"000004", "000008", "last"}
    states = [
        json.loads((run / "checkpoints/000004/training_state/training_step.json").read_text()) for run in (one, two)
    ]
    assert states[0]["counts"] == states[1]["counts"]
    assert [state["processes"] for state in states] == [1, 2]


def test_one_process_goes_on_with_what_two_began(folder: Path, one: Path) -> None:
    output = folder / "two_then_one"
    began = tiny_runs.arguments(folder, output, batch_size=2, **FLAGS)
    stopping = {0: (OPTIMIZER, "Optimizer.step", 6, "before")}
    stopped, other = tiny_processes.run(began, at=stopping, number=signals.SIGTERM)
    assert (stopped.returncode, other.returncode) == (0, 0), stopped.stderr + other.stderr
    assert "stopped after step 6; go on with" in stopped.stdout
    resumed = tiny_runs.run(["train", "--resume=true", f"--output_dir={output}", "--batch_size=4"])
    assert resumed.returncode == 0, resumed.stderr
    assert "saved by 2 processes, and is gone on with by 1 process" in resumed.stdout
    assert "will differ" not in resumed.stderr
    assert_same_run(one, output)


@pytest.mark.slow
def test_two_processes_go_on_with_what_one_began(folder: Path, one: Path) -> None:
    output = folder / "one_then_two"
    at = (OPTIMIZER, "Optimizer.step", 3, "before")
    stopped = tiny_runs.run(tiny_runs.arguments(folder, output, batch_size=4, **FLAGS), at=at, signal=signals.SIGTERM)
    assert stopped.returncode == 0, stopped.stderr
    line = ["train", "--resume=true", f"--output_dir={output}"]
    first, second = tiny_processes.run([*line, "--batch_size=2"])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "will differ" not in first.stderr
    assert_same_run(one, output)


def test_another_batch_than_before_is_said_with_the_way_out(
    one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = shutil.copytree(one / "checkpoints/000004", tmp_path / "checkpoints/000004") / "training_state"
    content = json.loads((state / "training_step.json").read_text())
    content["processes"], content["conditions"]["batch_size"] = 2, 8
    (state / "training_step.json").write_text(json.dumps(content))
    assert main(["train", "--resume=true", f"--output_dir={tmp_path}", "--steps=4"]) == 0
    assert "batch_size was 8 and is 4" in (printed := capsys.readouterr().err)
    assert "--batch_size=8 keeps the batch of 8 frames" in printed


# --- sharded weights ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Path:
    """The run of two processes with a part of the weights each, stopped after step 6."""
    line = tiny_runs.arguments(folder, folder / "sharded", batch_size=2, distributed="fsdp", **FLAGS)
    stopping = {1: (OPTIMIZER, "Optimizer.step", 6, "before")}
    ended = tiny_processes.run(line, at=stopping, number=signals.SIGTERM)
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert "2 processes (fsdp)" in ended[0].stdout
    state = folder / "sharded/checkpoints/000006/training_state"
    assert {entry.name for entry in state.iterdir()} == {"training_step.json", "optimizer_state"}
    return folder / "sharded"


@pytest.mark.parametrize("count", [1, 2])
def test_sharded_weights_are_trained_as_whole_ones(folder: Path, one: Path, sharded: Path, count: int) -> None:
    """Also where as many processes go on as began, or one."""
    output = shutil.copytree(sharded, folder / f"sharded_then_{count}", symlinks=True)
    line = ["train", "--resume=true", f"--output_dir={output}", f"--batch_size={4 // count}"]
    ended = tiny_processes.run(line, count)
    assert [each.returncode for each in ended] == [0] * count, ended[0].stderr
    assert "will differ" not in ended[0].stderr
    assert_same_run(one, output)


def test_a_policy_of_sharded_weights_is_a_plain_checkpoint(one: Path, sharded: Path) -> None:
    plain, saved = (load_file(run / "checkpoints/000004/pretrained_model/model.safetensors") for run in (one, sharded))
    assert {name: value.shape for name, value in plain.items()} == {name: value.shape for name, value in saved.items()}
    policy = PI0FastPolicy.from_pretrained(sharded / "checkpoints/last/pretrained_model")
    assert not any(parameter.isnan().any() for parameter in policy.parameters())


@pytest.mark.slow
def test_three_processes_share_out_what_does_not_divide(folder: Path) -> None:
    """With frozen weights, recomputed activations, and bfloat16 beside float32 in a layer."""
    flags = {
        "policy.freeze_vision_encoder": "true",
        "policy.gradient_checkpointing": "true",
        "policy.optimizer_eps": 1e-4,
        "log_freq": 1,
    }
    done = tiny_runs.run(tiny_runs.arguments(folder, folder / "frozen", batch_size=6, **flags))
    assert done.returncode == 0, done.stderr
    for dtype in ("float32", "bfloat16"):
        output = folder / f"three_{dtype}"
        line = tiny_runs.arguments(folder, output, batch_size=2, distributed="fsdp", **{**flags, "policy.dtype": dtype})
        ended = tiny_processes.run(line, 3)
        assert [each.returncode for each in ended] == [0, 0, 0], ended[0].stderr
        if dtype == "float32":
            assert_same_run(folder / "frozen", output)
        for line_, other in zip(read_metrics(folder / "frozen"), read_metrics(output), strict=True):
            assert other["loss"] == pytest.approx(line_["loss"], rel=1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_accelerate_launches_what_the_examples_say(folder: Path, engine: str) -> None:
    pytest.importorskip("accelerate")
    examples = Path(__file__).resolve().parents[2] / "examples/accelerate"
    launch = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={examples / engine}.yaml"]
    launch += ["--num_processes=2", f"--main_process_port={tiny_processes.free_port()}", "-m", "pi0_fast.cli"]
    line = tiny_runs.arguments(folder, folder / f"accelerate_{engine}", batch_size=2, steps=2)
    done = subprocess.run([*launch, *line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"2 processes ({engine.rstrip('2')}): 2 frames a process x 2 = 4 frames a step" in done.stdout
    assert "which nothing here knows" not in done.stderr
    state = folder / f"accelerate_{engine}/checkpoints/last/training_state"
    assert (state / "optimizer_state").is_dir() == (engine == "fsdp2")


@pytest.mark.slow
def test_adapters_are_trained_by_two_processes_as_by_one(folder: Path, one: Path) -> None:
    pytest.importorskip("peft")
    flags = {"policy.optimizer_eps": 1e-4, "log_freq": 1, "save_freq": 0, "eval_freq": 4, "max_eval_samples": 4}
    flags |= {"policy.path": one / "checkpoints/last/pretrained_model", "peft.r": 2, "peft.merge": "true"}
    lines = []
    for name, size in (("lora_one", 4), ("lora_two", 2)):
        line = tiny_runs.arguments(folder, folder / name, batch_size=size, **flags)
        lines.append(
            [text for text in line if not text.startswith(("--policy.arch", "--policy.auto", "--policy.fast"))]
        )
        lines[-1] = [text for text in lines[-1] if not text.startswith("--policy.text")]
    done = tiny_runs.run(lines[0])
    assert done.returncode == 0, done.stderr
    ended = tiny_processes.run(lines[1])
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert_same_run(folder / "lora_one", folder / "lora_two")
    refused = tiny_processes.run([*lines[1], "--distributed=fsdp"])
    assert [each.returncode for each in refused] == [2, 2]
    assert "--peft with --distributed=fsdp is not offered" in refused[0].stderr
