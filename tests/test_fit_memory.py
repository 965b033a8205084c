"""The command's memory: 50,000 chunks of 50x32 in one fit stay far below a gigabyte."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "fit_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [True, False])
def test_a_large_fit_is_bounded(tmp_path: Path, smooth: bool) -> None:
    spec = importlib.util.spec_from_file_location("fit_memory", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.generate(tmp_path / "data", 600_000, smooth=smooth)
    command = [
        sys.executable, "-c", benchmark.MEASURED, "train-tokenizer", "--repo_id=local/walk",
        f"--root={tmp_path / 'data'}", "--action_horizon=50", "--sample_fraction=0.1",
        f"--output_dir={tmp_path / 'out'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert metadata["num_training_chunks"] > (50_000 if smooth else 10_000)
    assert ("left out of the fit" in done.stderr) == (not smooth)
    assert int(done.stdout.strip().splitlines()[-1]) < 1e9
    assert "vocabulary:" in done.stderr  # it says how far it is
