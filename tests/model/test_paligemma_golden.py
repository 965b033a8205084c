"""The recorded numbers of lerobot's tiny pi0_fast model: loss, logits, greedy tokens, cached and not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pi0_fast.model import weights  # noqa: E402
from pi0_fast.model.architecture import Architecture  # noqa: E402
from pi0_fast.model.loss import target_cross_entropy  # noqa: E402
from pi0_fast.model.masks import attention_mask, sequence_layout  # noqa: E402

safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def golden(shared: Path):
    directory = shared / "golden" / "pi0fast_tiny"
    config = json.loads((directory / "config.json").read_text())
    architecture = Architecture.from_json({"text": config["text"], "vision": config["vision"]})
    return weights.load(directory, architecture), safetensors_torch.load_file(directory / "vectors.safetensors"), config


def prefix(model, vectors):
    images = model.encode_images(vectors["image0"])
    image_valid = vectors["image_mask0"][:, None].expand(images.shape[:2])
    return images, image_valid


@pytest.mark.golden
def test_loss_and_logits(golden) -> None:
    model, vectors, _ = golden
    with torch.no_grad():
        images, image_valid = prefix(model, vectors)
        ids = torch.cat((vectors["language_tokens"], vectors["action_tokens"]), 1)
        valid = torch.cat((vectors["language_mask"], vectors["action_mask"]), 1)
        causal = torch.cat((torch.zeros_like(vectors["language_mask"]), vectors["action_mask"]), 1)
        valid, causal, positions = sequence_layout(image_valid, valid, causal)
        embeddings = torch.cat((images, model.embed(ids)), 1)
        hidden = model.hidden_states(embeddings, attention_mask(valid, causal), positions)
        first = images.shape[1] + vectors["language_tokens"].shape[1]
        targets = hidden[:, first : first + 21]
        logits = model.logits(targets)
        mask = vectors["action_mask"][:, :21]
        difference = (logits - vectors["action_logits"]).abs().amax(-1)[mask]
        assert difference.max() < 1e-4
        label = vectors["action_mask"][:, 1:22]
        count = label.sum()
        loss = target_cross_entropy(
            targets[label],
            model.lm_head.weight,
            vectors["action_tokens"][:, 1:22][label],
            torch.full((count,), 1 / count),
        )
        assert abs(loss.item() - vectors["loss"].item()) < 1e-5


@pytest.mark.golden
def test_greedy_tokens_cached_and_uncached(golden) -> None:
    """As recorded: bos at the end of the bidirectional prefix, unconstrained, the whole head."""
    model, vectors, config = golden
    steps = config["decoding_steps"]
    with torch.inference_mode():
        images, image_valid = prefix(model, vectors)
        bos = torch.full((2, 1), config["bos_token_id"])
        ids = torch.cat((vectors["language_tokens"], bos), 1)
        valid = torch.cat((vectors["language_mask"], torch.ones_like(bos, dtype=torch.bool)), 1)
        causal = torch.zeros_like(valid)
        seen, _, positions = sequence_layout(image_valid, valid, causal)
        length = seen.shape[1]
        cache = model.new_cache(2, length + steps)
        embeddings = torch.cat((images, model.embed(ids)), 1)
        last = torch.full((2, 1), length - 1)
        mask = attention_mask(seen, torch.zeros_like(seen))
        hidden = model.prefill(embeddings, mask, positions, cache, last)[:, 0]
        position, columns, cached = positions[:, -1], torch.ones(2, length + steps, dtype=torch.bool), []
        columns[:, :length] = seen
        for step in range(steps):
            cached.append(model.logits(hidden).argmax(-1))
            position = position + 1
            hidden = model.step(cached[-1], columns[:, : length + step + 1], position, length + step, cache)
        assert torch.stack(cached, 1).tolist() == vectors["greedy_tokens"].tolist()

        # The same without a cache: everything again for each token; what was generated is causal.
        for step in range(steps):
            tokens = torch.stack(cached[: step + 1], 1)[:, :step]
            all_ids = torch.cat((ids, tokens), 1)
            all_valid = torch.cat((valid, torch.ones_like(tokens, dtype=torch.bool)), 1)
            all_causal = torch.cat((causal, torch.ones_like(tokens, dtype=torch.bool)), 1)
            all_valid, all_causal, positions = sequence_layout(image_valid, all_valid, all_causal)
            hidden = model.hidden_states(
                torch.cat((images, model.embed(all_ids)), 1), attention_mask(all_valid, all_causal), positions
            )
            assert model.logits(hidden[:, -1]).argmax(-1).tolist() == cached[step].tolist()
