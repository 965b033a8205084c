"""A converted checkpoint of openpi in lerobot 0.6.1: it loads, and gives what lerobot's own conventions make of it.

PI0_FAST_LEROBOT_PYTHON names an interpreter with lerobot 0.6.1; without it everything is skipped. Run with -s to see
the differences.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorstore")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "openpi"))

from test_policy_lerobot import in_lerobot  # noqa: E402
from trees import settings, write_statistics, write_tokenizer  # noqa: E402

from pi0_fast.openpi.convert import convert  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        not os.environ.get("PI0_FAST_LEROBOT_PYTHON"),
        reason="PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1",
    ),
]
#: The switches that have a meaning in lerobot, as it has them.
LEROBOTS = {"prompt_format": "lerobot", "attend_missing_cameras": False, "antialias_images": False, "position_gap": 0}


def test_its_own_conventions_apply_there(shared: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = shared / "golden" / "openpi_tiny" / "params"
    shutil.copytree(source, tmp_path / "checkpoint" / "params", copy_function=shutil.copyfile)
    write_statistics(tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "tokenizer")
    convert(settings(tmp_path / "checkpoint", tmp_path / "converted", tmp_path / "tokenizer"))
    random = np.random.default_rng(0)
    batch: dict[str, Any] = {
        "observation.state": torch.from_numpy(random.uniform(-0.8, 0.8, (2, 4)).astype(np.float32)),
        "action": torch.from_numpy(random.uniform(-0.5, 0.5, (2, 6, 3)).astype(np.float32)),
        "task": ["Open the Drawer", "stop"],
    }
    for name in ("base_0_rgb", "wrist_0_rgb"):  # base_1_rgb is missing, as openpi's robots have it
        batch[f"observation.images.{name}"] = torch.from_numpy(random.random((2, 3, 360, 640), np.float32))
    policy = PI0FastPolicy.from_pretrained(tmp_path / "converted")
    theirs = in_lerobot(policy, batch, tmp_path / "saved", shared, "loss")["loss"].item()
    losses = {}
    for name, changes in (("openpi", {}), ("lerobot", LEROBOTS)):
        counting = {"count_padding_in_positions": name == "openpi"}
        made = PI0FastPolicy.from_pretrained(tmp_path / "converted", overrides={**changes, **counting})
        with torch.no_grad():
            losses[name] = made(batch)[0].item()
    ours = f"here by its conventions {losses['lerobot']:.7g}, by openpi's {losses['openpi']:.7g}"
    print(f"\nloss in lerobot {theirs:.7g}; {ours}")
    assert losses["lerobot"] == pytest.approx(theirs, rel=1e-4)
    assert abs(losses["openpi"] - theirs) > 1e-2
