"""openpi's own numbers: logits, loss of each row, greedy tokens; and that each switch of the settings is needed."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorstore")

from trees import CAMERAS, settings, write_statistics, write_tokenizer  # noqa: E402

from pi0_fast.decode import FreeChoice, generate  # noqa: E402
from pi0_fast.model.masks import attention_mask, sequence_layout  # noqa: E402
from pi0_fast.openpi.convert import SWITCHES, convert  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from pi0_fast.preparation import Prepared  # noqa: E402
from pi0_fast.prompt import PromptBatch, PromptReport  # noqa: E402

pytestmark = pytest.mark.golden
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def golden(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays, Arrays]:
    """The converted directory, openpi's vectors, its images."""
    torch.set_num_threads(1)
    folder, source = tmp_path_factory.mktemp("openpi"), shared / "golden" / "openpi_tiny"
    # A copy that may be written to: the shared directory is read-only.
    shutil.copytree(source / "params", folder / "checkpoint" / "params", copy_function=shutil.copyfile)
    write_statistics(folder / "checkpoint")
    write_tokenizer(folder / "tokenizer")
    convert(settings(folder / "checkpoint", folder / "converted", folder / "tokenizer"))
    vectors, images = (dict(np.load(source / f"{name}.npz")) for name in ("vectors", "images"))
    return folder / "converted", vectors, images


@pytest.fixture(scope="module")
def policy(golden: Any) -> PI0FastPolicy:
    return PI0FastPolicy.from_pretrained(golden[0])


def changed(policy: PI0FastPolicy, **overrides: Any) -> PI0FastPolicy:
    """The same weights under other settings."""
    made = policy.checkpoint()
    return PI0FastPolicy(
        replace(policy.config, **overrides), made.model, made.processors, made.text_tokenizer, made.action_tokenizer
    ).eval()


def seen(vectors: Arrays, attended: bool = True) -> np.ndarray:
    """Which cameras each row sees, [3, 3]; base_1_rgb is the one that openpi feeds black pictures for."""
    wrist = vectors["image_mask_wrist"]
    return np.stack([np.ones_like(wrist), np.full_like(wrist, attended), wrist], axis=1)


def prepared(vectors: Arrays, images: Arrays, rows: slice, attended: bool = True) -> Prepared:
    """What openpi's transforms made of a batch, as `Preparation.training` would hand it on."""
    ids, valid, causal, label = (
        vectors[name][rows].astype(kind)
        for name, kind in (("tokens", np.int64), ("token_mask", bool), ("ar_mask", bool), ("loss_mask", bool))
    )
    weight = label / (label.sum(axis=1, keepdims=True) * len(label))
    nothing = np.zeros(1, np.int64)
    prompt = PromptBatch(
        *(ids, valid, causal & valid, label, weight.astype(np.float32), (valid & ~causal).sum(axis=1)),
        PromptReport(len(ids), nothing, nothing, 0),
    )
    stacked = np.stack([images[name][rows].astype(np.float32) for name in CAMERAS], axis=1)
    pixels = torch.from_numpy(stacked).permute(0, 1, 4, 2, 3).contiguous()
    return Prepared(pixels, seen(vectors, attended)[rows], prompt, np.zeros((len(ids), 4), np.float32), Counter())


@torch.no_grad()
def losses(policy: PI0FastPolicy, vectors: Arrays, images: Arrays, attended: bool = True) -> np.ndarray:
    """The loss of each row alone, [3]."""
    rows = [prepared(vectors, images, slice(row, row + 1), attended) for row in range(3)]
    return np.array([policy(row)[0].item() for row in rows])


def test_the_loss_of_each_row_and_their_mean(golden: Any, policy: PI0FastPolicy) -> None:
    _, vectors, images = golden
    np.testing.assert_allclose(losses(policy, vectors, images), vectors["loss"], rtol=0, atol=1e-4)
    with torch.no_grad():
        together, _ = policy(prepared(vectors, images, slice(None)))
    assert together.item() == pytest.approx(vectors["loss"].mean(), abs=1e-4)
    # The rows have unlike numbers of targets: one mean over all of them is another number.
    share = vectors["loss_mask"].sum(axis=1) / vectors["loss_mask"].sum()
    assert abs((share * vectors["loss"]).sum() - vectors["loss"].mean()) > 1e-2


@torch.no_grad()
def test_logits(golden: Any, policy: PI0FastPolicy) -> None:
    _, vectors, images = golden
    model, batch = policy.model, prepared(vectors, images, slice(None))
    features = model.encode_images(batch.images.flatten(0, 1)).reshape(3, -1, 64)
    image_valid = torch.from_numpy(np.repeat(batch.camera_valid, features.shape[1] // 3, axis=1))
    ids, valid, causal = map(torch.from_numpy, (batch.prompt.ids, batch.prompt.valid, batch.prompt.causal))
    valid, causal, positions = sequence_layout(image_valid, valid, causal, count_padding=True)
    embeddings = torch.cat((features, model.embed(ids)), dim=1)
    hidden = model.hidden_states(embeddings, attention_mask(valid, causal), positions)
    logits = model.logits(hidden[:, features.shape[1] :][:, : vectors["logits"].shape[1]]).numpy()
    kept = vectors["token_mask"][:, : logits.shape[1]]
    assert np.abs(logits - vectors["logits"])[kept].max() < 1e-3


#: The tokens that openpi generated of each row, and so the columns that its cache had for them.
STEPS = 16


@torch.no_grad()
def continuation(policy: PI0FastPolicy, vectors: Arrays, images: Arrays, given: int = 0, **changes: Any) -> np.ndarray:
    """Greedy tokens after the prefix, and after as many of openpi's own as are given; [3, 16 - given].

    All rows at once; the third has a masked camera, whose picture openpi encodes none the less.
    """
    batch = prepared(vectors, images, slice(None))
    lengths, row = vectors["prefix_mask"].sum(axis=1), np.arange(3)
    ids, valid = vectors["prefix_tokens"].astype(np.int64), vectors["prefix_mask"].copy()
    causal = np.zeros_like(valid)
    for place in range(given):
        ids[row, lengths + place] = vectors["generated"][:, place]
        valid[row, lengths + place] = causal[row, lengths + place] = True
    features = policy.model.encode_images(batch.images.flatten(0, 1)).reshape(3, -1, 64)
    image_valid = torch.from_numpy(np.repeat(batch.camera_valid, features.shape[1] // 3, axis=1))
    made = generate(
        policy.model,
        features,
        image_valid,
        *map(torch.from_numpy, (ids, valid, causal)),
        choice=FreeChoice(0),  # the padding's id, which the model never generates here
        max_steps=STEPS - given,
        **{"position_gap": policy.config.position_gap, "assume_contiguous_prefix": STEPS, **changes},
    )
    return made.ids.numpy()


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens(golden: Any, policy: PI0FastPolicy, use_cache: bool) -> None:
    _, vectors, images = golden
    made = continuation(policy, vectors, images, use_cache=use_cache)
    np.testing.assert_array_equal(made, vectors["generated"])


def of_one_row(vectors: Arrays, images: Arrays, row: int) -> Prepared:
    """What `Preparation.generation` would hand on of openpi's transforms, padded as these pad."""
    batch = prepared(vectors, images, slice(row, row + 1))
    ids, valid = (vectors[f"prefix_{name}"][row : row + 1] for name in ("tokens", "mask"))
    nothing = np.zeros_like(valid)
    weight, length = np.zeros(valid.shape, np.float32), valid.sum(axis=1)
    prompt = PromptBatch(ids.astype(np.int64), valid, nothing, nothing, weight, length, batch.prompt.report)
    return replace(batch, camera_valid=batch.camera_valid[0], prompt=prompt)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_of_the_policy(
    golden: Any, policy: PI0FastPolicy, monkeypatch: pytest.MonkeyPatch, use_cache: bool
) -> None:
    """The same from `predict_action_chunk`, by the settings that conversion gave the policy."""
    _, vectors, images = golden
    free = changed(policy, constrained=False, max_decoding_steps=STEPS, use_kv_cache=use_cache)
    free._choice = FreeChoice(0)
    monkeypatch.setattr(free, "_chunks", lambda made, *_: made.ids[0].tolist())
    made = [free.predict_action_chunk(of_one_row(vectors, images, row)) for row in range(3)]
    np.testing.assert_array_equal(made, vectors["generated"])


def turned(x: Any, positions: Any) -> Any:
    """Rotary embedding of [T, heads, head]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def through_layers(model: Any, x: Any, positions: Any, mask: Any, store: list[Any], column: int) -> Any:
    """The decoder as openpi has it: masked scores are a large negative number, so that a row that sees nothing sees all
    columns alike, empty ones included; x [T, width], mask [T, columns], store: keys and values of each layer."""
    width = model.architecture.text.head_dim
    for layer, (keys, values) in zip(model.decoder.layers, store, strict=True):
        attention, inner = layer.self_attn, layer.input_layernorm(x)
        query = turned(attention.q_proj(inner).unflatten(-1, (-1, width)), positions) * width**-0.5
        keys[column : column + len(x)] = turned(attention.k_proj(inner)[:, None], positions)[:, 0]
        values[column : column + len(x)] = attention.v_proj(inner)
        scores = torch.einsum("thd,sd->hts", query, keys).masked_fill(~mask, -2.3819763e38)
        x = x + attention.o_proj(torch.einsum("hts,sd->thd", scores.softmax(-1), values).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.decoder.norm(x)


@torch.no_grad()
def slow_openpi(
    policy: PI0FastPolicy, vectors: Arrays, images: Arrays, row: int, *, window: bool, cameras: list[bool] | None = None
) -> list[int]:
    """openpi's decoder for one row: right-aligned, and each step sees as many of the last columns as are valid.

    With a masked camera these are the wrong columns, which `window` False puts right. `cameras` are the row's, unless
    others are said.
    """
    model, batch = policy.model, prepared(vectors, images, slice(row, row + 1))
    if cameras is not None:
        batch = replace(batch, camera_valid=np.array([cameras]))
    ids, tokens_valid = (torch.from_numpy(vectors[f"prefix_{name}"][row]) for name in ("tokens", "mask"))
    features = model.encode_images(batch.images[0])
    image_valid = torch.from_numpy(batch.camera_valid[0])[:, None].expand(features.shape[:2])
    x, valid = (
        torch.cat((features.flatten(0, 1), model.embed(ids.long()))),
        torch.cat((image_valid.flatten(), tokens_valid)),
    )
    shift = -int(valid.nonzero().max()) - 1
    x, valid = x.roll(shift, 0), valid.roll(shift)
    length, count, steps = len(valid), int(valid.sum()), STEPS
    columns = torch.arange(length + steps)
    store = [(torch.zeros(length + steps, 32), torch.zeros(length + steps, 32)) for _ in model.decoder.layers]
    mask = torch.zeros(length, length + steps, dtype=torch.bool)
    mask[:, :length] = valid[:, None] & valid
    hidden = through_layers(model, x, valid.cumsum(0) - 1, mask, store, 0)[-1:]
    made: list[int] = []
    for step in range(steps):
        made.append(int(model.logits(hidden).argmax()))
        seen = columns >= length - count if window else torch.cat((valid, torch.ones(steps, dtype=torch.bool)))
        seen = seen & (columns <= length + step)
        position = torch.tensor([count + step + 1])
        hidden = through_layers(model, model.embed(torch.tensor(made[-1:])), position, seen[None], store, length + step)
    return made


def test_assuming_a_contiguous_prefix_is_needed(golden: Any, policy: PI0FastPolicy) -> None:
    """Without it the row with a masked camera is put right, and so another one than openpi's; the others stay."""
    _, vectors, images = golden
    right = continuation(policy, vectors, images, assume_contiguous_prefix=None)
    np.testing.assert_array_equal(right[:2], vectors["generated"][:2])
    assert right[2].tolist() != vectors["generated"][2].tolist()
    assert slow_openpi(policy, vectors, images, 2, window=True) == vectors["generated"][2].tolist()
    assert slow_openpi(policy, vectors, images, 2, window=False) == right[2].tolist()


@pytest.mark.parametrize("cameras", [[False, True, True], [True, False, True], [False, True, False]])
def test_greedy_tokens_whichever_cameras_are_masked(golden: Any, policy: PI0FastPolicy, cameras: list[bool]) -> None:
    """The golden masks the last camera only; the decoder that is written out above masks any."""
    _, vectors, images = golden
    free = changed(policy, constrained=False, max_decoding_steps=STEPS)
    free._choice = FreeChoice(0)
    free._chunks = lambda generation, *_: generation.ids[0].tolist()  # type: ignore[method-assign]
    batch = replace(of_one_row(vectors, images, 0), camera_valid=np.array(cameras))
    made = free.predict_action_chunk(batch)
    assert made == slow_openpi(policy, vectors, images, 0, window=True, cameras=cameras)[: len(made)]
    assert len(made) == STEPS


@pytest.mark.parametrize("use_cache", [True, False])
def test_constrained_chunks_with_a_contiguous_prefix(golden: Any, policy: PI0FastPolicy, use_cache: bool) -> None:
    """From a batch: ``Action: `` is given, the padding is openpi's, and what comes out is a chunk."""
    images = golden[2]
    batch = {
        f"observation.images.{name}": torch.from_numpy(images[name].astype(np.float32) / 2 + 0.5)
        for name in CAMERAS
        if name != "base_1_rgb"
    }
    batch |= {"observation.state": np.zeros((3, 4), np.float32), "task": ["open", "Close_it", "put it down"]}
    found = {}
    for switch in (True, False):
        masking = changed(policy, attend_missing_cameras=False, assume_contiguous_prefix=switch, use_kv_cache=use_cache)
        made = masking.preparation.generation(batch)
        assert made.camera_valid.tolist() == [True, False, True]
        given = len(masking.preparation.prompt.action_prefix_ids)
        assert (made.prompt.ids.shape[1] == masking.config.tokenizer_max_length + given) is switch
        assert masking.config.tokenizer_max_length == 250, "openpi's max_token_len"
        assert made.counts["assume_contiguous_prefix"] == 3 * switch
        chunk, info = masking.predict_action_chunk(made, return_info=True)
        assert info.valid.all()
        assert torch.isfinite(chunk).all()
        found[switch] = info.log_probabilities[:, 0]
    assert (found[True] - found[False]).abs().min() > 1e-4


@pytest.mark.parametrize("given", [1, 5])
@pytest.mark.parametrize("use_cache", [True, False])
def test_tokens_that_are_given_count_as_generated(
    golden: Any, policy: PI0FastPolicy, given: int, use_cache: bool
) -> None:
    """As ``Action: `` is where generation is constrained: the gap lies before it."""
    _, vectors, images = golden
    made = continuation(policy, vectors, images, given, use_cache=use_cache)
    np.testing.assert_array_equal(made, vectors["generated"][:, given:])


def test_the_gap_is_needed(golden: Any, policy: PI0FastPolicy) -> None:
    _, vectors, images = golden
    assert (continuation(policy, vectors, images, position_gap=0) != vectors["generated"])[:2].any()


def test_counting_in_training_is_needed(golden: Any, policy: PI0FastPolicy) -> None:
    """The third row's masked camera is the last one: what follows it moves away from the others."""
    _, vectors, images = golden
    plain = losses(changed(policy, count_padding_in_positions=False), vectors, images)
    np.testing.assert_allclose(plain[:2], vectors["loss"][:2], rtol=0, atol=1e-4)
    assert abs(plain[2] - vectors["loss"][2]) > 1e-3


def test_attending_to_a_missing_camera_is_needed(golden: Any, policy: PI0FastPolicy) -> None:
    """From a batch without that camera to the loss: the black picture is openpi's, and seen."""
    _, vectors, images = golden
    assert np.abs(losses(policy, vectors, images, attended=False) - vectors["loss"]).min() > 1e-3
    batch = {
        f"observation.images.{name}": torch.from_numpy(images[name][:2].astype(np.float32) / 2 + 0.5)
        for name in CAMERAS
        if name != "base_1_rgb"
    }
    batch |= {"observation.state": np.zeros((2, 4), np.float32), "task": ["open", "Close_it"]}
    for attended in (True, False):
        made = changed(policy, attend_missing_cameras=attended).preparation.generation(batch)
        assert made.camera_valid.tolist() == [True, attended, True]
        assert made.counts["missing observation.images.base_1_rgb"] == 2
        want = np.stack([images[name][:2].astype(np.float32) for name in CAMERAS], axis=1).transpose(0, 1, 4, 2, 3)
        np.testing.assert_allclose(made.images.numpy(), want, rtol=0, atol=2e-6)


def test_every_switch_is_set(policy: PI0FastPolicy) -> None:
    assert {name: getattr(policy.config, name) for name in SWITCHES} == SWITCHES


def test_the_prompt_format_is_needed(policy: PI0FastPolicy) -> None:
    """Text, target and loss of openpi, by hand; and what lerobot's format makes of the same rows."""
    batch = {
        "observation.state": np.zeros((2, 4), np.float32),
        "task": [" Open_the Drawer\nslowly", "stop"],
        "action": np.random.default_rng(0).uniform(-0.5, 0.5, (2, 6, 3)).astype(np.float32),
        "observation.images.base_0_rgb": np.zeros((2, 8, 8, 3), np.uint8),
    }
    openpi, lerobot = policy, changed(policy, prompt_format="lerobot")
    texts = []
    for made in (openpi, lerobot):
        prompt = made.preparation.training(batch).prompt
        tokenizer, length = made.preparation.prompt.text_tokenizer, int(prompt.text_length[0])
        texts.append("".join(tokenizer.piece(number) for number in prompt.ids[0, :length].tolist()))
        labels = prompt.label.sum(axis=1)
        assert prompt.ids[0, length] == (tokenizer.bos_id if made is lerobot else tokenizer.encode("Action")[0])
        assert labels[0] != labels[1]
        share = 1 / (2 * labels[:, None]) if made is openpi else 1 / labels.sum()
        np.testing.assert_allclose(prompt.weight, prompt.label * share, rtol=1e-6)
    assert texts[0].startswith("<bos>Task:▁open▁the▁drawer\nslowly,▁State:")
    assert texts[1].startswith("<bos>Task:▁Open▁the▁Drawer▁slowly,▁State:")
    with torch.no_grad():
        assert abs(openpi(batch)[0].item() - lerobot(batch)[0].item()) > 1e-3


@pytest.mark.parametrize("switch", ["state_clip", "action_clip"])
def test_not_clipping_is_needed(golden: Any, policy: PI0FastPolicy, switch: str) -> None:
    """A state below its range has a bin of its own in openpi, and actions outside theirs keep what lies outside."""
    assert getattr(policy.config, switch) is False
    clipping = PI0FastPolicy.from_pretrained(golden[0], overrides={switch: True})
    state = -40.0 if switch == "state_clip" else 0.0
    batch = {
        "observation.state": np.full((1, 4), state, np.float32),
        "task": "stop",
        "action": np.linspace(-1, 3, 18, dtype=np.float32).reshape(1, 6, 3) + state,
        "observation.images.base_0_rgb": np.zeros((1, 8, 8, 3), np.uint8),
    }
    found = {made: made.preparation.training(batch).prompt for made in (policy, clipping)}
    texts = [
        "".join(made.preparation.prompt.text_tokenizer.piece(number) for number in prompt.ids[0].tolist())
        for made, prompt in found.items()
    ]
    assert ["-1▁-1▁-1▁-1" in text for text in texts] == [switch == "state_clip", False]
    targets = [prompt.ids[prompt.label].tolist() for prompt in found.values()]
    assert (targets[0] != targets[1]) == (switch == "action_clip")
    with torch.no_grad():
        losses_of_both = [made(batch)[0].item() for made in found]
    assert abs(losses_of_both[0] - losses_of_both[1]) > 1e-3


def test_antialiasing_is_needed(shared: Path, policy: PI0FastPolicy) -> None:
    """A real frame, resized both ways and by Pillow, which is what openpi resizes with."""
    pytest.importorskip("av")
    image = pytest.importorskip("PIL.Image")
    from pi0_fast.data.reader import open_dataset
    from pi0_fast.training.frames import FrameDataset

    reader = open_dataset("local/g1", root=shared / "data" / "g1_inspire_video_v21")
    frames = FrameDataset(reader, chunk_size=1, camera_keys=reader.camera_keys[:1])
    frame = np.asarray(frames[0][reader.camera_keys[0]])
    height, width = frame.shape[:2]
    assert max(height, width) > 2 * 224
    made = {
        antialias: changed(policy, antialias_images=antialias).preparation.generation(
            {"observation.state": np.zeros((1, 4)), "task": "stop", "observation.images.base_0_rgb": frame[None]}
        )
        for antialias in (True, False)
    }
    ratio = max(height, width) / 224
    size = (int(width / ratio), int(height / ratio))
    pillow = np.asarray(image.fromarray(frame).resize(size, image.BILINEAR), np.float32) / 255 * 2 - 1
    top = (224 - size[1]) // 2
    inner = {key: value.images[0, 0, :, top : top + size[1]].numpy().transpose(1, 2, 0) for key, value in made.items()}
    assert np.abs(inner[True] - pillow).max() < 1.01 * 2 / 255
    assert np.abs(inner[False] - pillow).max() > 0.2
