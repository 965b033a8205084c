"""The benchmark of kinds of action tokens: on a toy it goes through, and a finished run is not done again."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("av")


@pytest.mark.slow
def test_on_a_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    script = importlib.import_module("tokens_and_success")
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
