"""Decoder and model: cached equals whole, a row equals itself alone, bfloat16, checkpointing, adapters, compilation."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes  # noqa: E402
from pi0_fast.model.gemma import RMSNorm, rotary_frequencies, rotate, rotation  # noqa: E402
from pi0_fast.model.masks import attention_mask, sequence_layout  # noqa: E402
from pi0_fast.model.tiny import tiny_paligemma  # noqa: E402
from pi0_fast.model.weights import initialize  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402

GROUPED = Architecture(VisionSizes(32, 1, 2, 64, image_size=28), TextSizes(48, 2, 96, 6, 2, 16, vocab_size=300))

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(vocab_size: int = 300, rows: int = 3):
    """Images with a missing camera, texts of unequal length, causal targets, padding on the right."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(rows, 2, 3, 28, 28, generator=generator) * 2 - 1
    image_valid = torch.ones(rows, 2, dtype=torch.bool)
    image_valid[1, 1] = False
    lengths = torch.tensor([[5, 9], [3, 5], [6, 7]])[:rows]  # text, text and targets
    columns = torch.arange(9)
    return {
        "images": images,
        "image_valid": image_valid.repeat_interleave(4, 1),
        "ids": torch.randint(0, vocab_size, (rows, 9), generator=generator),
        "valid": columns < lengths[:, 1:],
        "causal": (columns >= lengths[:, :1]) & (columns < lengths[:, 1:]),
    }


def embeddings(model, data):
    vectors = model.encode_images(data["images"].flatten(0, 1)).unflatten(0, data["images"].shape[:2]).flatten(1, 2)
    return torch.cat((vectors, model.embed(data["ids"])), 1)


def run(model, data, **options):
    valid, causal, positions = sequence_layout(data["image_valid"], data["valid"], data["causal"])
    return model.hidden_states(embeddings(model, data), attention_mask(valid, causal), positions, **options)


def test_rms_norm_by_hand() -> None:
    norm = RMSNorm(2)
    norm.weight.data = torch.tensor([0.0, 1.0])
    # Root mean square of (3, 4) is sqrt(12.5) = 3.5355.
    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.848528, 2.262742], abs=1e-5)


def test_rotation_by_hand() -> None:
    turn = rotation(torch.tensor([[2]]), rotary_frequencies(4, torch.device("cpu")), torch.float32)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 2, 2)
    # Pairs (1, 3) by 2 radians and (2, 4) by 2 / 100.
    expected = [-3.144039, 1.919605, -0.339143, 4.039197]
    assert rotate(x, turn).flatten().tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("architecture", [Architecture.tiny(300), GROUPED])
def test_cached_equals_whole(architecture: Architecture) -> None:
    """Prefill the text of each row, then feed the targets one by one; every hidden state is that of the whole."""
    model, data = initialize(architecture), batch()
    with torch.inference_mode():
        whole = run(model, data)
        texts = (data["valid"] & ~data["causal"]).sum(1)
        longest = int(texts.max())
        prefix = {**data, "ids": data["ids"][:, :longest], "causal": torch.zeros(3, longest, dtype=torch.bool)}
        prefix["valid"] = (data["valid"] & ~data["causal"])[:, :longest]
        valid, causal, positions = sequence_layout(prefix["image_valid"], prefix["valid"], prefix["causal"])
        cache = model.new_cache(3, 8 + longest + 4)
        wanted = 7 + texts[:, None]
        last = model.prefill(embeddings(model, prefix), attention_mask(valid, causal), positions, cache, wanted)
        torch.testing.assert_close(last[:, 0], whole[torch.arange(3), 7 + texts], atol=1e-5, rtol=1e-5)
        seen = torch.zeros(3, cache.capacity, dtype=torch.bool)
        seen[:, : valid.shape[1]] = valid
        position = positions[torch.arange(3), 7 + texts]
        for step in range(4):
            column = valid.shape[1] + step
            seen[:, column] = True
            ids = data["ids"][torch.arange(3), (texts + step).clamp(max=8)]
            hidden = model.step(ids, seen[:, : column + 1], position + step + 1, column, cache)
            for row in range(3):
                if data["causal"][row, min(texts[row] + step, 8)] and texts[row] + step < 9:
                    expected = whole[row, 8 + texts[row] + step]
                    torch.testing.assert_close(hidden[row], expected, atol=1e-5, rtol=1e-5)


def test_a_short_mask_and_a_tensor_column_change_nothing() -> None:
    model, data = tiny_paligemma(vocab_size=300), batch()
    with torch.inference_mode():
        valid, causal, positions = sequence_layout(data["image_valid"], data["valid"], data["causal"])
        results = []
        for length, column in ((18, 17), (24, torch.tensor([17]))):
            cache = model.new_cache(3, 24)
            model.prefill(embeddings(model, data), attention_mask(valid, causal), positions, cache)
            seen = torch.zeros(3, length, dtype=torch.bool)
            seen[:, :17], seen[:, 17] = valid, True
            results.append(model.step(data["ids"][:, 0], seen, positions[:, -1] + 1, column, cache))
        torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)


def test_each_row_of_a_padded_batch_equals_the_row_alone() -> None:
    model, data = initialize(GROUPED), batch()
    with torch.inference_mode():
        together = run(model, data)
        for row in range(3):
            length = int(data["valid"][row].sum())
            cameras = data["image_valid"][row].view(2, 4)[:, 0]
            alone = {
                "images": data["images"][row : row + 1, cameras],
                "image_valid": torch.ones(1, 4 * int(cameras.sum()), dtype=torch.bool),
                **{key: data[key][row : row + 1, :length] for key in ("ids", "valid", "causal")},
            }
            expected = run(model, alone)[0]
            columns = torch.cat((data["image_valid"][row], data["valid"][row]))
            torch.testing.assert_close(together[row, columns], expected, atol=1e-5, rtol=1e-5)


def test_padding_and_missing_cameras_never_reach_what_is_valid() -> None:
    model, data = tiny_paligemma(vocab_size=300), batch()
    with torch.inference_mode():
        first = run(model, data)
        data["images"][1, 1] = 7.0
        data["ids"][~data["valid"]] = 299
        second = run(model, data)
    valid = torch.cat((data["image_valid"], data["valid"]), 1)
    assert torch.equal(first[valid], second[valid])
    assert first.isfinite().all()


def test_only_the_wanted_columns() -> None:
    model, data = tiny_paligemma(vocab_size=300), batch()
    wanted = torch.tensor([[12, 16], [11, 11], [0, 14]])
    whole = run(model, data)
    part = run(model, data, wanted=wanted)
    torch.testing.assert_close(part, whole[torch.arange(3)[:, None], wanted], atol=1e-6, rtol=1e-6)
    # The gradient of a loss on those columns is the same too.
    names, parameters = zip(*model.named_parameters(), strict=True)
    reference = torch.autograd.grad(
        whole[torch.arange(3)[:, None], wanted].square().sum(), parameters, allow_unused=True
    )
    for name, a, b in zip(
        names, torch.autograd.grad(part.square().sum(), parameters, allow_unused=True), reference, strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_memory_only(dtype) -> None:
    model, data = tiny_paligemma(vocab_size=300, dtype=dtype).train(), batch()
    gradients, saved = [], []
    for model.gradient_checkpointing in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x):
            loss = run(model, data).float().square().sum()
        model.zero_grad()
        loss.backward()
        saved.append(sum(sizes))
        gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})
    assert saved[1] < saved[0] / 3
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, msg=name)


def test_bfloat16_is_near_float32_and_keeps_vision_and_norms() -> None:
    exact = tiny_paligemma(vocab_size=300)
    rounded = tiny_paligemma(vocab_size=300, dtype=torch.bfloat16)
    wide = {name for name, value in rounded.named_parameters() if value.dtype == torch.float32}
    assert wide == {
        n for n, _ in rounded.named_parameters() if n.startswith(("vision_tower", "projector")) or "norm" in n
    }
    assert rounded.decoder.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    data = batch()
    with torch.inference_mode():
        valid = torch.cat((data["image_valid"], data["valid"]), 1)
        expected = exact.logits(run(exact, data))[valid]
        logits = rounded.logits(run(rounded, data))[valid]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 2e-2 * expected.abs().max()


def test_bfloat16_steps_and_trains_on_a_cpu() -> None:
    model, data = tiny_paligemma(vocab_size=300, dtype=torch.bfloat16), batch()
    run(model, data).float().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == value.dtype for value in model.parameters())
    with torch.inference_mode():
        cache = model.new_cache(3, 4)
        hidden = model.step(
            data["ids"][:, 0], torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, dtype=torch.long), 0, cache
        )
    assert hidden.dtype == torch.bfloat16
    assert cache.stores[0].dtype == torch.bfloat16


def test_head_rows_give_the_same_scores() -> None:
    model = tiny_paligemma(vocab_size=300, tied_head=False)
    hidden, ids = torch.randn(2, 64), torch.tensor([7, 299, 0])
    rows = model.head_rows(ids)
    assert rows.is_contiguous()
    torch.testing.assert_close(model.logits(hidden, rows), model.logits(hidden)[:, ids])


def test_a_step_asks_a_replaced_projection() -> None:
    """An adapter in place of a linear map, or a hook on it, is not passed over."""

    class Doubled(torch.nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, x):
            return 2 * self.inner(x)

    model = tiny_paligemma(vocab_size=300)
    arguments = (torch.tensor([5]), torch.ones(1, 1, dtype=torch.bool), torch.tensor([0]), 0)
    with torch.inference_mode():
        plain = model.step(*arguments, model.new_cache(1, 1))
        projection = model.decoder.layers[0].mlp.down_proj
        model.decoder.layers[0].mlp.down_proj = Doubled(projection)
        doubled = model.step(*arguments, model.new_cache(1, 1))
        model.decoder.layers[0].mlp.down_proj = projection
        projection.register_forward_hook(lambda *arguments: 2 * arguments[2])
        hooked = model.step(*arguments, model.new_cache(1, 1))
    assert not torch.allclose(plain, doubled)
    torch.testing.assert_close(doubled, hooked)


def test_a_step_asks_a_hooked_projection_among_joined_ones() -> None:
    model = tiny_paligemma(vocab_size=300)
    plain = stepped(model, 2)
    for name in ("q_proj", "v_proj"):
        handle = getattr(model.decoder.layers[0].self_attn, name).register_forward_hook(lambda *given: 2 * given[2])
        assert not torch.allclose(stepped(model, 2), plain)
        handle.remove()
    torch.testing.assert_close(stepped(model, 2), plain, atol=0, rtol=0)


def joined_weights(model) -> list[bool]:
    """Of each layer: do the weights that read one vector lie in memory one behind the other?"""
    found = []
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for modules in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            places = [(module.weight.data_ptr(), module.weight.nbytes) for module in modules]
            found.append(all(p + n == q for (p, n), (q, _) in pairwise(places)))
    return found


def apart(model) -> None:
    """Every weight in memory of its own, with a gap behind it."""
    for parameter in model.decoder.parameters():
        parameter.data = torch.cat((parameter.data.flatten(), torch.zeros(64)))[:-64].view(parameter.shape)


def stepped(model, rows: int):
    """Hidden state after two steps; the second sees both."""
    ids, mask = torch.arange(rows) + 7, torch.ones(rows, 2, dtype=torch.bool)
    with torch.inference_mode():
        cache = model.new_cache(rows, 4)
        model.step(ids, mask[:, :1], torch.arange(rows), 0, cache)
        return model.step(ids + 1, mask, torch.arange(rows) + 1, 1, cache)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_one_product_for_weights_side_by_side_changes_nothing(rows: int) -> None:
    model = initialize(GROUPED)
    for name, parameter in model.decoder.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert all(joined_weights(model))
    together = stepped(model, rows)
    apart(model)
    assert not any(joined_weights(model))
    torch.testing.assert_close(stepped(model, rows), together, atol=1e-5, rtol=1e-5)


def test_weights_stay_side_by_side_and_are_still_the_parameters() -> None:
    model = initialize(GROUPED)
    before = stepped(model, 2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.decoder.layers[1].self_attn.v_proj.weight.mul_(2)
    assert not torch.allclose(stepped(model, 2), before)
    model.load_state_dict(saved)
    torch.testing.assert_close(stepped(model, 2), before, atol=0, rtol=0)
    apart(model)
    assert all(joined_weights(model.to("cpu")))
    torch.testing.assert_close(stepped(model, 2), before)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(stepped(copied, 2), before)
    with torch.no_grad():
        copied.decoder.layers[0].mlp.up_proj.weight.mul_(2)
    torch.testing.assert_close(stepped(model, 2), before)


def test_wrong_shapes_are_named() -> None:
    model = tiny_paligemma(vocab_size=300)
    with pytest.raises(PolicyError, match=r"images of shape \(1, 3, 30, 28\); the vision tower takes \[N, 3, 28, 28\]"):
        model.encode_images(torch.zeros(1, 3, 30, 28))
    data = batch()
    valid, causal, positions = sequence_layout(data["image_valid"], data["valid"], data["causal"])
    with pytest.raises(PolicyError, match="a cache of 3 rows and 16 columns cannot hold 3 rows of 17"):
        model.prefill(embeddings(model, data), attention_mask(valid, causal), positions, model.new_cache(3, 16))
    with pytest.raises(PolicyError, match="float16 is not supported"):
        tiny_paligemma(dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_equals_eager_and_is_used() -> None:
    model, data = tiny_paligemma(vocab_size=300), batch()
    valid, causal, positions = sequence_layout(data["image_valid"], data["valid"], data["causal"])
    mask = attention_mask(valid, causal)

    def everything():
        with torch.no_grad():
            cache = model.new_cache(3, 20)
            vectors = embeddings(model, data)
            results = [model.hidden_states(vectors, mask, positions), model.prefill(vectors, mask, positions, cache)]
            short = (attention_mask(valid[:, :15], causal[:, :15]), positions[:, :15].contiguous())
            results.append(model.hidden_states(vectors[:, :15].contiguous(), *short))
            seen = torch.zeros(3, 20, dtype=torch.bool)
            seen[:, :17] = valid
            for column in (17, 18):
                seen[:, column] = True
                results.append(model.step(data["ids"][:, 0], seen, positions[:, -1] + column - 16, column, cache))
            return results

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = everything()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    model.compile("default")
    for a, b in zip(everything(), eager, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    everything()
    # hidden_states has a graph for its first length and one for all others; prefill and step have one each.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 4
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_training_with_checkpointing_gives_the_same_gradients() -> None:
    def gradients(compiled: bool, checkpointing: bool):
        torch._dynamo.reset()
        model = tiny_paligemma(vocab_size=300).train()
        model.gradient_checkpointing = checkpointing
        if compiled:
            model.compile("default")
        results = []
        for rows in (3, 2):
            model.zero_grad()
            run(
                model, batch(rows=rows), wanted=torch.tensor([[12, 16], [11, 11], [0, 14]])[:rows]
            ).square().sum().backward()
            results.append({name: value.grad.clone() for name, value in model.named_parameters()})
        return results

    for ours, reference in zip(gradients(True, True), gradients(False, False), strict=True):
        for name, value in reference.items():
            torch.testing.assert_close(ours[name], value, atol=1e-3, rtol=1e-3, msg=name)
