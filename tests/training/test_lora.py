"""Adapters: what is trained, that merging changes nothing, and their files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("peft")

from safetensors.numpy import load_file as load_arrays  # noqa: E402
from safetensors.numpy import save_file as save_arrays  # noqa: E402
from tiny_runs import arguments, run, weights  # noqa: E402

from pi0_fast import FastTokenizer  # noqa: E402
from pi0_fast.cli import main  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.train_config import TrainConfig, parse_train  # noqa: E402
from pi0_fast.training import loop  # noqa: E402
from pi0_fast.training.lora import ADAPTER_FILE, _own_layer, merge_adapters  # noqa: E402
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


def has_adapters(model: torch.nn.Module) -> bool:
    return any(".lora_" in name for name, _ in model.named_parameters())


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


def test_a_new_run_begins_with_merged_weights(home: Path, tmp_path: Path) -> None:
    """Where a checkpoint has both; one of adapters alone is refused."""
    made = trained(set_up_of(line(home, tmp_path / "out", **{"peft.merge": "true"})))
    for name in ("both", "alone"):
        (tmp_path / name).mkdir()
        made.save_model(tmp_path / name)
    (tmp_path / "alone" / "model.safetensors").unlink()
    again = set_up_of(line(home, tmp_path / "next", **{"policy.path": tmp_path / "both"}))
    merged = PI0FastPolicy.from_pretrained(tmp_path / "both").model.state_dict()
    found = {name.replace(".base_layer", ""): value for name, value in again.policy.model.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in merged.items())
    with pytest.raises(UsageError, match="holds adapters: merge them first"):
        set_up_of(line(home, tmp_path / "next", **{"policy.path": tmp_path / "alone"}))


def test_adapters_go_only_on_the_weights_that_they_were_trained_on(home: Path, tmp_path: Path) -> None:
    """A checkpoint may be named by a link, which leads elsewhere when its own run goes on."""
    base, folder = tmp_path / "base", tmp_path / "saved"
    policy = PI0FastPolicy.from_pretrained(home / "start")
    policy.save_pretrained(base)
    made = trained(set_up_of(line(home, tmp_path / "out", **{"policy.path": base})))
    folder.mkdir()
    made.save_model(folder)
    merge_adapters(folder, tmp_path / "merged")
    with torch.no_grad():
        policy.model.embed_tokens.weight[0, 0] += 1
    policy.save_pretrained(base)
    with pytest.raises(PolicyError, match=r"weights in .*base are not those that its adapters were trained on"):
        merge_adapters(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


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


def same_adapters(first: Path, second: Path) -> bool:
    files = [place / "checkpoints" / "000004" / "pretrained_model" / ADAPTER_FILE for place in (first, second)]
    return files[0].read_bytes() == files[1].read_bytes()


def test_an_interrupted_run_with_adapters_resumes_to_the_same_bits(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(line(home, tmp_path / "whole", steps=4)) == 0
    real, calls = loop.Optimizer.step, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop.Optimizer, "step", interrupted)
    assert main(line(home, tmp_path / "broken", steps=4)) == 130
    monkeypatch.setattr(loop.Optimizer, "step", real)
    assert main(["train", "--resume=true", f"--output_dir={tmp_path / 'broken'}"]) == 0
    assert same_adapters(tmp_path / "whole", tmp_path / "broken")
    with pytest.raises(FileNotFoundError):
        weights(tmp_path / "whole", 4)


@pytest.mark.slow
def test_a_killed_run_with_adapters_resumes_to_the_same_bits(home: Path, tmp_path: Path) -> None:
    assert run(line(home, tmp_path / "whole", steps=4)).returncode == 0
    at = ("pi0_fast.training.states", "Checkpoints.save", 1, "after")
    assert run(line(home, tmp_path / "killed", steps=4), at=at).returncode == -9
    assert main(["train", "--resume=true", f"--output_dir={tmp_path / 'killed'}"]) == 0
    assert same_adapters(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("part", ["statistics", "action"])
def test_adapters_with_parts_of_other_ones_are_refused(home: Path, tmp_path: Path, part: str) -> None:
    made = set_up_of(line(home, tmp_path / "out"))
    folder = tmp_path / "saved"
    folder.mkdir()
    made.save_model(folder)
    if part == "statistics":
        for path in folder.glob("policy_*.safetensors"):
            arrays = load_arrays(path)
            arrays["observation.state.q99"] = arrays["observation.state.q99"] + np.float32(0.25)
            save_arrays(arrays, path)
    else:
        place = folder / "tokenizers" / "action"
        own = FastTokenizer.from_pretrained(place)
        shape: dict[str, Any] = {"time_horizon": own.time_horizon, "action_dim": own.action_dim}
        FastTokenizer(own.vocabulary, scale=11.0, normalizer=own.normalizer, **shape).save_pretrained(place)
    name = {"statistics": "normalization", "action": "action tokenizer"}[part]
    with pytest.raises(PolicyError, match=f"the {name} has the fingerprint"):
        merge_adapters(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_adapters_are_no_checkpoint_to_begin_with(home: Path, tmp_path: Path) -> None:
    made = set_up_of(line(home, tmp_path / "out"))
    (tmp_path / "saved").mkdir()
    made.save_model(tmp_path / "saved")
    with pytest.raises(UsageError, match="holds adapters: merge them first"):
        set_up_of(line(home, tmp_path / "next", **{"policy.path": tmp_path / "saved"}))


def test_adapters_with_gradient_checkpointing(home: Path, tmp_path: Path) -> None:
    plain = set_up_of(line(home, tmp_path / "a"))
    spare = set_up_of(line(home, tmp_path / "b", **{"policy.gradient_checkpointing": "true"}))
    batch = plain.train_frames.batch([0, 1, 2])
    losses = [[float(trained(made, 1).policy(batch)[0].detach()) for _ in range(2)] for made in (plain, spare)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    gradients = [
        {name: value.grad for name, value in made.policy.model.named_parameters() if value.grad is not None}
        for made in (plain, spare)
    ]
    assert gradients[0]
    assert set(gradients[0]) == set(gradients[1])
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-4, atol=1e-6)
