"""The training commands of LeRobot's documentation, with the program's name exchanged, on real video.

Added are only a tiny local checkpoint, the CPU, and the dataset's directory (and fewer steps).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tiny_runs import write_architecture  # noqa: E402

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.train_config import TrainConfig, parse_train  # noqa: E402
from pi0_fast.training.setup import set_up  # noqa: E402
from test_train_config import FINE_TUNE, TRAIN  # noqa: E402


@pytest.fixture(scope="module")
def start(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint for the robot of the recorded videos."""
    folder = tmp_path_factory.mktemp("start")
    line = [
        "--dataset.repo_id=g1",
        f"--dataset.root={shared / 'data' / 'g1_inspire_video_v21'}",
        "--policy.type=pi0_fast",
        f"--policy.architecture={write_architecture(folder / 'sizes.json')}",
        "--policy.text_tokenizer_name=byte",
        "--policy.auto_fit_fast_tokenizer=true",
        f"--policy.fast_tokenizer_cache_dir={folder / 'tokenizers'}",
        "--policy.chunk_size=10",
        "--policy.n_action_steps=10",
        "--policy.device=cpu",
        f"--output_dir={folder / 'unused'}",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_up(parse_train(TrainConfig, line, "pi0-fast train")).policy.save_pretrained(folder / "policy")
    return folder / "policy"


@pytest.mark.parametrize("command", [TRAIN, FINE_TUNE], ids=["train", "fine-tune"])
@pytest.mark.parametrize("whole", [False, True], ids=["path", "pretrained_path"])
def test_a_documented_command(
    command: list[str],
    whole: bool,
    start: Path,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if whole and command is FINE_TUNE:
        pytest.skip("it has no --policy.pretrained_path")
    monkeypatch.chdir(tmp_path)
    changed = {
        "--policy.device": "cpu",
        "--steps": "20",
        "--num_workers": "0",
        "--max_eval_samples": "2",
        "--dataset.root": str(shared / "data" / "g1_inspire_video_v21"),
        "--policy.pretrained_path" if whole else "--policy.path": str(start),
    }
    kept = [text for text in command if text.partition("=")[0] not in changed]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(["train", *kept, *(f"{name}={value}" for name, value in changed.items())]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "dtype: bfloat16 (asked for)" in out
    assert "step 20/20: loss" in out
    output = next(text.partition("=")[2] for text in command if text.startswith("--output_dir="))
    policy = PI0FastPolicy.from_pretrained(Path(output) / "checkpoints" / "last" / "pretrained_model")
    assert policy.config.dtype == "bfloat16"
    assert policy.config.empty_cameras == (1 if command is FINE_TUNE else 0)
    if command is FINE_TUNE:
        assert (policy.config.scheduler_decay_lr, policy.config.scheduler_warmup_steps) == (1e-5, 4000)
