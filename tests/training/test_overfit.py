"""One command on real video: a tiny policy learns a recorded episode by heart, to the error of its tokenizer.

Minutes, so only `make test-slow` runs it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("av")

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.training.metrics import read_metrics  # noqa: E402

SIZES = {
    "vision": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "image_size": 84,
        "patch_size": 14,
    },
    "text": {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 4096,
    },
}


@pytest.mark.slow
def test_real_video_is_learned_to_the_tokenizers_error(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(SIZES))
    command = f"""train --dataset.repo_id=g1 --dataset.root={shared / "data/g1_inspire_video_v21"}
        --dataset.episodes=[0]
        --dataset.cache_dir={tmp_path / "frames"} --policy.type=pi0_fast --policy.architecture={tmp_path / "tiny.json"}
        --policy.text_tokenizer_name=byte --policy.auto_fit_fast_tokenizer=true
        --policy.fast_tokenizer_cache_dir={tmp_path / "tokenizers"} --policy.chunk_size=10 --policy.n_action_steps=10
        --policy.device=cpu --policy.optimizer_lr=2e-3 --policy.scheduler_decay_lr=1e-5
        --policy.optimizer_weight_decay=0 --steps=1500 --batch_size=16 --num_workers=0 --log_freq=100 --eval_freq=1500
        --max_eval_samples=200 --save_checkpoint=false --output_dir={tmp_path / "run"}"""
    assert main(command.split()) == 0
    last = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "validation"][-1]
    assert last["frames"] >= 190  # frames without a whole chunk ahead are left out
    assert last["malformed"] == 0
    assert last["action_l1"] <= 1.2 * last["tokenizer_l1"], last
