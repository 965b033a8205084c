"""The same random weights in transformers' PaliGemma, with its own masks, in another interpreter: logits and loss."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from pi0_fast.model import weights  # noqa: E402
from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes  # noqa: E402
from pi0_fast.model.loss import target_cross_entropy  # noqa: E402
from pi0_fast.model.masks import attention_mask, sequence_layout  # noqa: E402

TWIN = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration
directory = sys.argv[1]
sizes = json.load(open(directory + "/sizes.json"))
text, vision = sizes["text"], sizes["vision"]
text["hidden_activation"] = "gelu_pytorch_tanh"
config = PaliGemmaConfig(
    text_config={"model_type": "gemma", **text},
    vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
    image_token_index=text["vocab_size"] - 1, projection_dim=text["hidden_size"], pad_token_id=0,
    tie_word_embeddings=False)
model = PaliGemmaForConditionalGeneration(config).eval()
prefix = "model.paligemma_with_expert.paligemma."
state = {key[len(prefix):]: value for key, value in load_file(directory + "/model.safetensors").items()}
model.load_state_dict(state, strict=True)
data = load_file(directory + "/inputs.safetensors")
with torch.no_grad():
    out = model(pixel_values=data["images"], input_ids=data["ids"], attention_mask=data["valid"].long(),
                token_type_ids=data["suffix"].long(), labels=data["labels"])
save_file({"logits": out.logits.contiguous(), "loss": out.loss[None]}, directory + "/outputs.safetensors")
"""


@pytest.mark.interop
def test_equals_transformers_paligemma(tmp_path: Path) -> None:
    python = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
    if not python:
        pytest.skip("set PI0_FAST_LEROBOT_PYTHON to an interpreter with transformers and torch to compare with it")
    architecture = Architecture(
        VisionSizes(48, 3, 4, 96, image_size=42), TextSizes(64, 3, 160, 6, 2, 32, vocab_size=500)
    )
    model = weights.initialize(architecture, seed=4, tied_head=False)
    generator = torch.Generator().manual_seed(2)
    # Norms and biases that do something.
    for name, value in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            value.data += 0.3 * torch.randn(value.shape, generator=generator)
    weights.save(model, tmp_path, {})

    patches, columns = architecture.vision.patches, torch.arange(14)
    lengths = torch.tensor([[5, 11], [8, 14], [3, 4]])
    images = torch.rand(3, 3, 42, 42, generator=generator) * 2 - 1
    ids = torch.randint(3, 499, (3, 14), generator=generator)
    valid = columns < lengths[:, 1:]
    causal = valid & (columns >= lengths[:, :1])
    none = torch.zeros(3, patches, dtype=torch.bool)
    inputs = {
        "images": images,
        "ids": torch.cat((torch.full((3, patches), 499), ids), 1),
        "valid": torch.cat((~none, valid), 1),
        "suffix": torch.cat((none, causal), 1),
        "labels": torch.cat((torch.full((3, patches), -100), ids.masked_fill(~causal, -100)), 1),
    }
    safetensors_torch.save_file(inputs, tmp_path / "inputs.safetensors")
    (tmp_path / "sizes.json").write_text(json.dumps(architecture.to_json()))
    done = subprocess.run([python, "-B", "-c", TWIN, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = safetensors_torch.load_file(tmp_path / "outputs.safetensors")

    with torch.no_grad():
        joint, causal_too, positions = sequence_layout(~none, valid, causal)
        vectors = torch.cat((model.encode_images(images), model.embed(ids)), 1)
        hidden = model.hidden_states(vectors, attention_mask(joint, causal_too), positions)
        difference = (model.logits(hidden) - outputs["logits"])[joint].abs().max()
        print(f"largest difference of the logits {difference:.2e}, largest logit {outputs['logits'].abs().max():.2f}")
        assert difference < 1e-4
        label = inputs["suffix"][:, 1:]
        chosen = hidden[:, :-1][label]
        share = torch.full((len(chosen),), 1 / len(chosen))
        loss = target_cross_entropy(chosen, model.lm_head.weight, ids[causal], share)
        assert abs(loss.item() - outputs["loss"].item()) < 1e-5
