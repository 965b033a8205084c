"""The benchmark of kinds of action tokens: on a toy it goes through, and a finished run is not done again."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("av")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module("tokens_and_success")


def test_the_interval_over_seeds_knows_that_scenes_of_one_policy_go_together(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """1, 2, 3: 2 plus or minus 4.303 / sqrt(3). Policies that differ from seed to seed are no evidence of a kind."""
    assert script.over_seeds([1, 2, 3]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-4)
    assert script.over_seeds([0.5]) is None

    def run(succeeded: int) -> dict[str, Any]:
        success = {str(scene): scene < succeeded for scene in range(40)}
        return {"success": success, "rmse": 0.01, "target_tokens": 5, "cross_entropy": 10, "action_l1": 0.1}

    kinds = {"plain": (35, 38, 31, 21, 39), "rate-distortion": (32, 30, 39, 35, 28)}
    script.show({kind: {seed: run(many) for seed, many in enumerate(each)} for kind, each in kinds.items()})
    printed = capsys.readouterr().out
    # By hand: the differences of the seeds are -7.5, -20, 20, 35 and -27.5 points, whose deviation is 26.63.
    assert "| rate-distortion | 200 | +0.0 | " in printed
    assert " | -33 to +33 | 1.000 (1.000 to 1.000) |" in printed
    assert "| plain | 5 | 82.0 | 76 to 87 | 59 to 100 | 88, 95, 78, 52, 98 |" in printed


@pytest.mark.slow
def test_on_a_toy(tmp_path: Path, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["plain", "rate-distortion", "dimension first"]
    arguments = ["--toy", "--seeds", "1", "--output_dir", str(tmp_path / "out"), "--variants", *variants]
    script.main(arguments)
    first = capsys.readouterr().out
    found = {
        name: json.loads((tmp_path / "out/results" / name.replace(" ", "_") / "0.json").read_text())
        for name in variants
    }
    plain, cheap, turned = found.values()
    assert cheap["rmse"] <= plain["rmse"] == pytest.approx(turned["rmse"], rel=1e-5)
    # Rounded coefficients are the same in either order; what differs is how many tokens they take.
    assert len(plain["success"]) == len(cheap["success"]) == script.TOY.eval_episodes
    for made in found.values():
        # 4 steps of training have taught little: about as many nats as a guess among all ids, for each token.
        assert 4 < made["cross_entropy"] / (made["target_tokens"] + 3) < 12
    again = importlib.reload(script)
    again.main(arguments)
    second = capsys.readouterr().out
    assert "pi0-fast train" in first
    assert "pi0-fast " not in second
    rows = re.findall(r"^\| (.+?) \| 1 \|", second, re.MULTILINE)
    assert rows == variants
    tables = [text[text.rindex("Mean over seeds") : text.index("\nMilliseconds")] for text in (first, second)]
    assert tables[0] == tables[1]
