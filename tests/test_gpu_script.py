"""The script for CUDA machines, at tiny sizes on this CPU: every part runs, and a fault is not passed over."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # What the compiler logs of itself takes pytest as long to keep as the work takes.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("gpu")
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def rows_of(path: Path, part: str) -> dict[str, dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["device"] == "cpu"
    return {row["name"]: row for row in content["rows"] if row["part"] == part}


# Torch's compiler looks at tensors' gradients while it traces, and warns itself of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_all_parts_run_and_pass(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--tiny", "--output", str(output)]) == 0, capsys.readouterr()
    assert "all checks passed" in capsys.readouterr().out
    assert {row["part"] for row in json.loads(output.read_text())["rows"]} == set(gpu.PARTS)
    parity = rows_of(output, "parity")
    assert parity["float32 against the CPU: greedy ids"]["value"] == 1
    assert 0 < parity["bfloat16 against float32: gradients"]["value"] < 0.05
    generation = rows_of(output, "generation")
    for name in ("called one by one", "CUDA graph", "compiled, default", "compiled, reduce-overhead"):
        assert generation[f"{name}: ids as in the first run"]["value"] == 4
        assert generation[f"{name}: each token"]["value"] > 0
    assert rows_of(output, "compile")["float32, compiled: gradients"]["ok"] is True
    assert rows_of(output, "attention")["training, default"]["ok"] is True


def test_a_fault_and_a_part_that_raises_fail(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(bench: Any) -> None:
        bench.report.add("a check", 2.0, "relative", "at most 1", ok=False)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setitem(gpu.RUN, "parity", wrong)
    output = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--parts", "parity", "device", "--output", str(output)]
    assert gpu.main(arguments) == 1
    printed = capsys.readouterr()
    assert "2 failed" in printed.out
    assert "illegal memory access" in printed.err
    assert len(rows_of(output, "device")) == 4  # the other part's results are there
    assert [row["ok"] for row in rows_of(output, "parity").values()] == [False, False]


def test_parts_without_time_are_not_passed_over(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report = gpu.Report(None, {})
    gpu.run(gpu.Bench(torch.device("cpu"), False, report), ["training", "compile"], limit_s=1.0)
    assert report.failed == 2
    assert "left out: 1 s are left" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err


def test_another_result_on_the_device_is_a_failure(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes a little wrong: the checks of parity have to see it."""
    right = gpu.Outcome(2.0, torch.ones(100), torch.tensor([[3, 4, 5], [6, 7, -1]]))
    off = gpu.Outcome(2.001, torch.ones(100) * 1.01, torch.tensor([[3, 9, 5, 8], [6, 7, -1, -1]]))
    loss, gradients = off.differences(right)
    assert loss == pytest.approx(5e-4)
    assert gradients == pytest.approx(0.01, rel=1e-4)
    assert off.same_ids(right) == pytest.approx(5 / 8)
    outcomes = iter([right, off, right, off])
    monkeypatch.setattr(gpu.Outcome, "of", lambda *_: next(outcomes))
    report = gpu.Report(None, {})
    gpu.parity_part(gpu.Bench(torch.device("cpu"), True, report))
    assert [row["ok"] for row in report.rows] == [False, False, False, True, False, None]


def test_published_numbers_are_those_of_the_very_card(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = gpu.Bench(torch.device("cuda"), False, gpu.Report(None, {}))
    for name, known in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 3090", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert gpu.published_numbers(bench) == (gpu.GPUS[known] if known else None)
