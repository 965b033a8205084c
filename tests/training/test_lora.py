"""Adapters: what is trained, that merging changes nothing, and their files."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("peft")

from tiny_runs import arguments, run, weights  # noqa: E402

from pi0_fast.cli import main  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.train_config import TrainConfig, parse_train  # noqa: E402
from pi0_fast.training.lora import ADAPTER_FILE, _own_layer, has_adapters, merge_adapters  # noqa: E402
from pi0_fast.training.setup import Run, set_up  # noqa: E402
from pi0_fast.types import PolicyError, UsageError  # noqa: E402

DROPPED = ("--policy.architecture", "--policy.text_tok", "--policy.auto_fit", "--policy.fast_tok")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    config = parse_train(TrainConfig, arguments(folder, folder / "unused")[1:], "pi0-fast train")
    set_up(config.resolved()).policy.save_pretrained(folder / "start")
    return folder


def line(home: Path, output: Path, **flags: object) -> list[str]:
    given = {"policy.path": home / "start", "peft.r": 2, **flags}
    return [text for text in arguments(home, output, **given) if not text.startswith(DROPPED)]


def set_up_of(words: list[str]) -> Run:
    config = parse_train(TrainConfig, words[1:], "pi0-fast train")
    config.validate()
    return set_up(config.resolved())


def trained(made: Run, steps: int = 3) -> Run:
    batch = made.train_frames.batch([0, 1, 2])
    optimizer = torch.optim.AdamW([p for p in made.policy.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        loss, _ = made.policy(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made


def test_only_adapters_are_trained_and_merging_changes_nothing(home: Path, tmp_path: Path) -> None:
    made = set_up_of(line(home, tmp_path / "out"))
    names = [name for name, value in made.policy.model.named_parameters() if value.requires_grad]
    assert names
    assert all(".lora_" in name and name.startswith("decoder.layers.") for name in names)
    batch = made.train_frames.batch([0, 1, 2])
    base = PI0FastPolicy.from_pretrained(home / "start")
    with torch.no_grad():
        begin = made.policy(batch)[0]
        torch.testing.assert_close(begin, base(batch)[0])  # new adapters change nothing
    trained(made).policy.eval()
    with torch.no_grad():
        end = made.policy(batch)[0]
        with made.generating():
            assert not has_adapters(made.policy.model)
            torch.testing.assert_close(made.policy(batch)[0], end)
            chunk = made.policy.predict_action_chunk(batch)
    assert has_adapters(made.policy.model)
    assert end < begin
    folder = tmp_path / "saved"
    folder.mkdir()
    made.save_model(folder)
    assert (folder / ADAPTER_FILE).is_file()
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(PolicyError, match="merge the adapter"):
        PI0FastPolicy.from_pretrained(folder)
    merge_adapters(folder, tmp_path / "merged")
    again = PI0FastPolicy.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(again(batch)[0], end)
    torch.testing.assert_close(again.predict_action_chunk(batch), chunk)


def test_merged_checkpoints_on_request(home: Path, tmp_path: Path) -> None:
    made = trained(set_up_of(line(home, tmp_path / "out", **{"peft.merge": "true"})))
    (tmp_path / "saved").mkdir()
    made.save_model(tmp_path / "saved")
    again = PI0FastPolicy.from_pretrained(tmp_path / "saved")
    batch = made.train_frames.batch([0, 1, 2])
    made.policy.eval()
    with torch.no_grad():
        torch.testing.assert_close(again(batch)[0], made.policy(batch)[0])


def test_layers_by_name(home: Path, tmp_path: Path) -> None:
    made = set_up_of(line(home, tmp_path / "a", **{"peft.target_modules": '["q_proj"]'}))
    layers = {n.partition(".lora_")[0] for n, value in made.policy.model.named_parameters() if value.requires_grad}
    assert layers == {
        "decoder.layers.0.self_attn.q_proj",
        "decoder.layers.1.self_attn.q_proj",
        "vision_tower.layers.0.self_attn.q_proj",
    }
    everywhere = set_up_of(line(home, tmp_path / "b", **{"peft.target_modules": "all-linear"}))
    assert any(name.startswith("projector.lora_") for name, _ in everywhere.policy.model.named_parameters())
    with pytest.raises(UsageError, match="fits no layer"):
        set_up_of(line(home, tmp_path / "c", **{"peft.target_modules": '["nothing"]'}))
    with pytest.raises(UsageError, match="lm_head cannot have an adapter"):
        set_up_of(line(home, tmp_path / "d", **{"peft.target_modules": '["lm_head"]'}))


def test_names_in_files() -> None:
    prefix = "base_model.model.model.paligemma_with_expert.paligemma.model."
    assert _own_layer(prefix + "language_model.layers.13.mlp.up_proj") == "decoder.layers.13.mlp.up_proj"
    assert _own_layer(prefix + "multi_modal_projector.linear") == "projector"
    with pytest.raises(PolicyError, match="is no layer"):
        _own_layer(prefix + "language_model.layers.x.mlp.up_proj")


def test_a_run_with_adapters_resumes_to_the_same_bits(home: Path, tmp_path: Path) -> None:
    words = line(home, tmp_path / "whole", steps=4)
    assert run(words).returncode == 0
    words = line(home, tmp_path / "killed", steps=4)
    at = ("pi0_fast.training.states", "Checkpoints.save", 1, "after")
    assert run(words, at=at).returncode == -9
    assert main(["train", "--resume=true", f"--output_dir={tmp_path / 'killed'}"]) == 0
    places = [tmp_path / name / "checkpoints" / "000004" / "pretrained_model" for name in ("whole", "killed")]
    assert (places[0] / ADAPTER_FILE).read_bytes() == (places[1] / ADAPTER_FILE).read_bytes()
    with pytest.raises(FileNotFoundError):
        weights(tmp_path / "whole", 4)
