"""Generation with tiny real models, against a twin that runs every row alone, without cache, padding or tables."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from scipy.stats import chi2  # noqa: E402

from pi0_fast import FastTokenizer, decode  # noqa: E402
from pi0_fast.actions.grammar import Grammar  # noqa: E402
from pi0_fast.decode import ConstrainedChoice, FreeChoice, Generation, generate  # noqa: E402
from pi0_fast.model import weights  # noqa: E402
from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes  # noqa: E402
from pi0_fast.model.images import prepare_images  # noqa: E402
from pi0_fast.model.paligemma import PaliGemma  # noqa: E402
from pi0_fast.types import PolicyError  # noqa: E402

VOCABULARY = 1024
FORMATS = ("plain", "reference")
LENGTH = 18

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def tokenizer(symbol_format: str) -> FastTokenizer:
    random = np.random.default_rng(0)
    chunks = np.cumsum(random.normal(0, 0.15, (300, 6, 3)), axis=1)
    # So fine a scale that the byte-level format needs characters of two bytes.
    scale = 60.0 if symbol_format == "reference" else 10.0
    return FastTokenizer.fit(chunks, scale=scale, vocab_size=300, symbol_format=symbol_format)  # type: ignore[arg-type]


@cache
def choice(symbol_format: str = "plain", max_tokens: int | None = None) -> ConstrainedChoice:
    vocabulary = tokenizer(symbol_format).vocabulary
    text_ids = VOCABULARY - 1 - 128 - np.arange(vocabulary.size)
    return ConstrainedChoice(Grammar(vocabulary, LENGTH, max_tokens=max_tokens), text_ids)


def new_model(seed: int = 0, dtype: torch.dtype = torch.float32, tied_head: bool = False) -> PaliGemma:
    sizes = Architecture(VisionSizes(16, 1, 2, 32, 14, 7), TextSizes(32, 2, 64, 4, 1, 16, VOCABULARY))
    return weights.initialize(sizes, dtype, seed, tied_head=tied_head).eval()


model = cache(new_model)


def prompts(rows: int, seed: int = 0, images: int = 4, longest: int = 9) -> dict[str, Any]:
    """Prompts of unequal length (the last two tokens causal), one camera of two missing in some rows."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, longest + 1, rows)
    lengths[0] = longest
    columns = np.arange(longest)
    valid = columns < lengths[:, None]
    image_valid = np.repeat(np.stack([np.ones(rows, bool), random.random(rows) < 0.5], 1), images // 2, axis=1)
    return {
        "image_features": torch.from_numpy(random.normal(size=(rows, images, 32)).astype(np.float32)),
        "image_valid": torch.from_numpy(image_valid),
        "ids": torch.from_numpy(np.where(valid, random.integers(3, VOCABULARY, (rows, longest)), 0)),
        "valid": torch.from_numpy(valid),
        "causal": torch.from_numpy(valid & (columns >= lengths[:, None] - 2)),
    }


def take(batch: dict[str, Any], row: int) -> dict[str, Any]:
    return {key: value[row : row + 1] for key, value in batch.items()}


# --- the slow twin ------------------------------------------------------------------------------------------------


@dataclass
class SlowRow:
    """One row: its sequence without padding, run as a whole for every new token."""

    model: PaliGemma
    embeddings: torch.Tensor
    causal: list[bool]
    positions: list[int]
    next_position: int

    @classmethod
    def of(cls, model: PaliGemma, batch: dict[str, Any], row: int, gap: int = 0) -> SlowRow:
        one = take(batch, row)
        valid = torch.cat((one["image_valid"], one["valid"]), 1)[0]
        embeddings = torch.cat((one["image_features"].to(model.dtype), model.embed(one["ids"])), 1)[:, valid]
        causal = [False] * int(one["image_valid"].sum()) + one["causal"][0][one["valid"][0]].tolist()
        positions = [place + gap * of_target for place, of_target in enumerate(causal)]
        return cls(model, embeddings, causal, positions, len(causal) + gap)

    @torch.no_grad()
    def logits(self) -> np.ndarray:
        length = len(self.causal)
        mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
        for query in range(length):
            for key in range(length):
                mask[0, 0, query, key] = key <= query or not self.causal[key]
        hidden = self.model.hidden_states(self.embeddings, mask, torch.tensor([self.positions]))
        return (hidden[0, -1].double() @ self.model.lm_head.weight.double().T).numpy()

    def append(self, text_id: int) -> None:
        self.embeddings = torch.cat((self.embeddings, self.model.embed(torch.tensor([[text_id]]))), 1)
        self.causal.append(True)
        self.positions.append(self.next_position)
        self.next_position += 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def slow_constrained(row: SlowRow, how: ConstrainedChoice, budget: int | None = None) -> tuple[list[int], list[float]]:
    state = how.grammar.start(1, budget=budget)
    ids: list[int] = []
    scores: list[float] = []
    while not state.done[0]:
        allowed = how.grammar.allowed(state)[0]
        logits = np.where(allowed, row.logits()[how.text_ids], -np.inf)
        ids.append(int(logits.argmax()))
        scores.append(float(log_softmax(logits)[ids[-1]]))
        state = how.grammar.advance(state, [ids[-1]])
        row.append(int(how.text_ids[ids[-1]]))
    return ids, scores


def slow_free(row: SlowRow, end_id: int, steps: int) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    scores: list[float] = []
    while len(ids) < steps and end_id not in ids:
        logits = row.logits()
        ids.append(int(logits.argmax()))
        scores.append(float(log_softmax(logits)[ids[-1]]))
        row.append(ids[-1])
    return ids, scores


def check(got: Generation, want: list[tuple[list[int], list[float]]]) -> None:
    """The batch holds exactly these rows, and padding beyond."""
    assert got.steps == got.ids.shape[1] == max(len(ids) for ids, _ in want)
    for row, (ids, scores) in enumerate(want):
        rest = got.steps - len(ids)
        assert int(got.lengths[row]) == len(ids)
        assert got.ids[row].tolist() == ids + [-1] * rest
        np.testing.assert_allclose(got.log_probabilities[row].numpy(), scores + [0.0] * rest, atol=1e-5)


def equal(got: Generation, want: Generation) -> None:
    assert got.log_probabilities is not None
    assert want.log_probabilities is not None
    assert got.ids.tolist() == want.ids.tolist()
    assert got.lengths.tolist() == want.lengths.tolist()
    assert got.finished.tolist() == want.finished.tolist()
    torch.testing.assert_close(got.log_probabilities, want.log_probabilities, atol=1e-5, rtol=0)


# --- constrained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("gap", "given"), [(0, True), (1, True), (2, False)])
@pytest.mark.parametrize("rows", [1, 5])
def test_constrained_rows_equal_the_slow_twin(rows: int, gap: int, given: bool, use_cache: bool) -> None:
    """The gap lies before the causal tokens of the prompt, or behind a prompt without any."""
    batch = prompts(rows, seed=rows)
    batch["causal"] &= given
    got = generate(model(), **batch, choice=choice(), position_gap=gap, use_cache=use_cache)
    check(got, [slow_constrained(SlowRow.of(model(), batch, row, gap), choice()) for row in range(rows)])
    assert got.ids.dtype == got.lengths.dtype == torch.int64
    assert got.log_probabilities.dtype == torch.float32
    assert got.finished.tolist() == [True] * rows
    assert not got.ids.is_inference()


@pytest.mark.parametrize("symbol_format", FORMATS)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), extra=st.integers(0, 6), hot=st.booleans(), rows=st.integers(1, 5))
def test_random_weights_give_valid_chunks_within_any_budget(
    symbol_format: str, seed: int, extra: int, hot: bool, rows: int
) -> None:
    fitted, how = tokenizer(symbol_format), choice(symbol_format)
    budget = int(how.grammar.fewest[0, LENGTH]) + extra
    got = generate(
        new_model(seed),
        **prompts(rows, seed),
        choice=how,
        temperature=3.0 if hot else 0.0,
        max_steps=budget,
        generator=torch.Generator().manual_seed(seed),
    )
    ids = [row[:length].tolist() for row, length in zip(got.ids, got.lengths.tolist(), strict=True)]
    assert max(map(len, ids)) <= budget
    chunks, info = fitted.decode(ids, return_info=True)
    assert info.invalid_count == 0
    assert chunks.shape == (rows, 6, 3)
    assert bool(got.finished.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_contiguous_prefix_changes_rows_with_a_masked_camera_only(dtype: torch.dtype) -> None:
    """Whole chunks, and with the cache what is without; the columns that are empty count, too."""
    batch, small = prompts(6, seed=2), new_model(dtype=dtype)
    masked = ~batch["image_valid"].all(1)
    assert 0 < int(masked.sum()) < 6
    plain, imitated, other = (
        generate(small, **batch, choice=choice(), assume_contiguous_prefix=empty) for empty in (None, 5, 500)
    )
    ids = [row[:length].tolist() for row, length in zip(imitated.ids, imitated.lengths.tolist(), strict=True)]
    assert tokenizer("plain").decode(ids, return_info=True)[1].invalid_count == 0
    if dtype != torch.float32:
        return
    for row in range(6):
        first = [float(made.log_probabilities[row, :4].sum()) for made in (plain, imitated, other)]
        pairs = [(0, 1), (0, 2), (1, 2)]
        same = [first[one] == pytest.approx(first[two], abs=5e-6) for one, two in pairs]
        assert same == [not bool(masked[row])] * 3, first
    equal(imitated, generate(small, **batch, choice=choice(), assume_contiguous_prefix=5, use_cache=False))


@pytest.mark.parametrize("symbol_format", FORMATS)
def test_a_tight_budget_equals_the_slow_twin(symbol_format: str) -> None:
    how = choice(symbol_format)
    batch = prompts(3, seed=3)
    for budget in range(int(how.grammar.fewest[0, LENGTH]), 14, 2):
        got = generate(model(), **batch, choice=how, max_steps=budget)
        check(got, [slow_constrained(SlowRow.of(model(), batch, row), how, budget) for row in range(3)])


def test_the_grammars_own_budget_is_the_default() -> None:
    least = int(choice().grammar.fewest[0, LENGTH])
    tight = choice("plain", least)
    batch = prompts(4, seed=5)
    equal(generate(model(), **batch, choice=tight), generate(model(), **batch, choice=choice(), max_steps=least))


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("max_steps", [6, 30])
def test_no_step_is_run_for_nothing(monkeypatch: pytest.MonkeyPatch, max_steps: int, free: bool) -> None:
    """The first id comes from the prefill, and the last one is fed to nobody."""
    small, fed = new_model(), []
    monkeypatch.setattr(small, "step", _recorded(small.step, fed))
    how: Any = FreeChoice(_some_id(prompts(1), step=8)) if free else choice()
    got = generate(small, **prompts(1), choice=how, max_steps=max_steps)
    assert len(fed) == got.steps - 1


def test_an_endless_budget_takes_no_memory() -> None:
    batch = prompts(2)
    equal(generate(model(), **batch, choice=choice(), max_steps=10**12), generate(model(), **batch, choice=choice()))


def test_rows_that_have_ended_stay_so_whatever_the_order_of_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get id 0 in every further step; here that id stops within a character, or may not come at all."""
    grammar = choice("reference").grammar
    batch = prompts(5, seed=14)
    for stop in (-1, 1):
        inner = int(np.flatnonzero(grammar.next_place[0] == stop)[0])
        order = np.roll(np.arange(grammar.base.shape[1]), -inner)
        turned = copy.copy(grammar)
        for name in ("base", "consumed", "next_place"):
            setattr(turned, name, np.ascontiguousarray(getattr(grammar, name)[:, order]))
        assert turned.next_place[0, 0] == stop
        small, fed = new_model(), []
        monkeypatch.setattr(small, "step", _recorded(small.step, fed))
        got = generate(small, **batch, choice=ConstrainedChoice(turned, choice("reference").text_ids[order]))
        assert len(fed) == got.steps - 1
        want = generate(model(), **batch, choice=choice("reference"))
        assert len(set(got.lengths.tolist())) > 1
        back = torch.where(got.ids >= 0, torch.from_numpy(order)[got.ids], -1)
        equal(dataclasses.replace(got, ids=back), want)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("symbol_format", FORMATS)
def test_looking_rarely_changes_nothing(monkeypatch: pytest.MonkeyPatch, symbol_format: str, free: bool) -> None:
    """On an accelerator rows run on until the next look; what they choose then must not be seen."""
    batch = prompts(5, seed=6)
    how: Any = FreeChoice(_some_id(batch, step=2)) if free else choice(symbol_format)
    want = generate(model(), **batch, choice=how, max_steps=30)
    looks: list[int] = []
    for kind in (decode._ConstrainedRows, decode._FreeRows):
        monkeypatch.setattr(kind, "wait", _recorded(kind.wait, looks))
    monkeypatch.setattr(decode, "_stride", lambda _: 8)
    equal(generate(model(), **batch, choice=how, max_steps=30), want)
    assert len(looks) <= 2 + 30 // 8


def _recorded(method: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    def recorded(*arguments: Any) -> Any:
        results.append(method(*arguments))
        return results[-1]

    return recorded


def test_bfloat16_and_a_tied_head_give_valid_chunks() -> None:
    small = new_model(1, torch.bfloat16, tied_head=True)
    got = generate(small, **prompts(3), choice=choice())
    ids = [row[:length].tolist() for row, length in zip(got.ids, got.lengths.tolist(), strict=True)]
    assert tokenizer("plain").decode(ids).shape == (3, 6, 3)
    assert got.log_probabilities.dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_can_be_left_out(temperature: float) -> None:
    def run(log_probabilities: bool) -> Generation:
        generator = torch.Generator().manual_seed(0)
        return generate(
            model(),
            **prompts(3),
            choice=choice(),
            temperature=temperature,
            generator=generator,
            log_probabilities=log_probabilities,
        )

    assert run(False).log_probabilities is None
    assert run(False).ids.tolist() == run(True).ids.tolist()


def test_without_images() -> None:
    batch = prompts(2)
    text = {key: batch[key] for key in ("ids", "valid", "causal")}
    got = generate(model(), None, None, **text, choice=choice())
    without = {**batch, "image_valid": torch.zeros_like(batch["image_valid"])}
    equal(got, generate(model(), **without, choice=choice()))
    # None for image_valid: all are there.
    everything = {**batch, "image_valid": torch.ones_like(batch["image_valid"])}
    equal(
        generate(model(), **{**batch, "image_valid": None}, choice=choice()),
        generate(model(), **everything, choice=choice()),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch
def test_compiled_equals_eager_and_another_prompt_length_compiles_nothing() -> None:
    compiled = new_model()
    compiled.compile()
    first, second = prompts(2, seed=1), prompts(2, seed=2, longest=13)
    equal(generate(compiled, **first, choice=choice()), generate(model(), **first, choice=choice()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        equal(generate(compiled, **second, choice=choice()), generate(model(), **second, choice=choice()))


# --- free ---------------------------------------------------------------------------------------------------------


def _some_id(batch: dict[str, Any], step: int) -> int:
    """An id that row 0 generates at this step when nothing stops it."""
    return slow_free(SlowRow.of(model(), batch, 0), -1, step + 1)[0][step]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
def test_free_rows_equal_the_slow_twin_and_stop_alone(rows: int, use_cache: bool) -> None:
    batch = prompts(rows, seed=rows + 20)
    end_id = _some_id(batch, step=3)
    got = generate(model(), **batch, choice=FreeChoice(end_id), max_steps=12, use_cache=use_cache)
    want = [slow_free(SlowRow.of(model(), batch, row), end_id, 12) for row in range(rows)]
    check(got, want)
    assert len(want[0][0]) <= 4
    assert got.finished.tolist() == [ids[-1] == end_id for ids, _ in want]
    if rows > 1:
        assert not bool(got.finished.all()), "the case must hold rows that do not stop"


@cache
def trained() -> tuple[PaliGemma, dict[str, Any], list[list[int]], int]:
    """A model that has learned two chunks and the end mark by heart."""
    learned, batch, end_id = new_model(2, tied_head=True), prompts(2, seed=9), 7
    chunks = np.cumsum(np.random.default_rng(3).normal(0, 0.15, (2, 6, 3)), axis=1)
    ids = tokenizer("plain").encode(chunks)
    rows = []
    for row, actions in enumerate(ids):
        alone = SlowRow.of(learned, batch, row)
        target = [int(choice().text_ids[a]) for a in actions] + [end_id]
        rows.append((row, len(alone.causal), target))
    optimizer = torch.optim.Adam(learned.parameters(), lr=3e-3)
    for _ in range(60):
        loss = torch.zeros(())
        for row, start, target in rows:
            alone = SlowRow.of(learned, batch, row)
            for text_id in target[:-1]:
                alone.append(text_id)
            causal = torch.tensor(alone.causal)
            mask = torch.ones(len(causal), len(causal), dtype=torch.bool).tril() | ~causal
            hidden = learned.hidden_states(alone.embeddings, mask[None, None], torch.tensor([alone.positions]))
            logits = learned.logits(hidden[0, start - 1 :])
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return learned, batch, [list(row) for row in ids], end_id


def test_a_trained_models_valid_output_is_unchanged_by_the_grammar() -> None:
    learned, batch, ids, end_id = trained()
    free = generate(learned, **batch, choice=FreeChoice(end_id), max_steps=30)
    assert free.finished.tolist() == [True, True]
    to_text = choice().text_ids
    for row, actions in enumerate(ids):
        assert free.ids[row, : free.lengths[row]].tolist() == [*to_text[actions].tolist(), end_id]
    constrained = generate(learned, **batch, choice=choice())
    for row, actions in enumerate(ids):
        assert constrained.ids[row, : constrained.lengths[row]].tolist() == actions
    # The end mark is not generated; the same steps less one, and at least the same probability among fewer ids.
    assert constrained.lengths.tolist() == (free.lengths - 1).tolist()
    assert bool((constrained.log_probabilities >= free.log_probabilities[:, :-1] - 1e-5).all())


# --- temperature --------------------------------------------------------------------------------------------------


def _fits(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Chi-square at one in ten thousand; rare ids are one class. What cannot happen has not happened."""
    if counts[probabilities == 0].any():
        return False
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return bool(((observed - expected) ** 2 / expected).sum() < chi2.isf(1e-4, max(len(expected) - 1, 1)))


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_allowed_ids(temperature: float) -> None:
    one, rows = take(prompts(1, seed=11), 0), 4000
    batch = {key: value.expand(rows, *value.shape[1:]) for key, value in one.items()}
    how = ConstrainedChoice(Grammar(tokenizer("plain").vocabulary, 3), choice().text_ids)
    got = generate(model(), **batch, choice=how, temperature=temperature, generator=torch.Generator().manual_seed(1))
    row, state = SlowRow.of(model(), one, 0), how.grammar.start(1)
    first = log_softmax(np.where(how.grammar.allowed(state)[0], row.logits()[how.text_ids] / temperature, -np.inf))
    counts = np.bincount(got.ids[:, 0], minlength=len(first))
    assert _fits(counts, np.exp(first))
    wrong = log_softmax(
        np.where(how.grammar.allowed(state)[0], row.logits()[how.text_ids] / (1.5 * temperature), -np.inf)
    )
    assert not _fits(counts, np.exp(wrong)), "the check must be able to fail"
    np.testing.assert_allclose(got.log_probabilities[:, 0], first[got.ids[:, 0]], atol=1e-5)
    # And the second id after the commonest first one that leaves something open.
    consumed = how.grammar.consumed[0]
    common = int(np.where(consumed < 3, counts, 0).argmax())
    state = how.grammar.advance(state, [common])
    row.append(int(how.text_ids[common]))
    second = log_softmax(np.where(how.grammar.allowed(state)[0], row.logits()[how.text_ids] / temperature, -np.inf))
    after = got.ids[got.ids[:, 0] == common, 1].numpy()
    assert _fits(np.bincount(after, minlength=len(second)), np.exp(second))


def test_a_seed_repeats_and_a_cold_draw_is_greedy() -> None:
    batch = prompts(4, seed=12)

    def draw(temperature: float, seed: int) -> Generation:
        generator = torch.Generator().manual_seed(seed)
        return generate(model(), **batch, choice=choice(), temperature=temperature, generator=generator)

    equal(draw(1.0, 0), draw(1.0, 0))
    assert draw(1.0, 0).ids.tolist() != draw(1.0, 1).ids.tolist()
    assert draw(1e-39, 0).ids.tolist() == generate(model(), **batch, choice=choice()).ids.tolist()
    cached = generate(
        model(), **batch, choice=choice(), temperature=1.0, generator=torch.Generator().manual_seed(0), use_cache=False
    )
    equal(cached, draw(1.0, 0))


def test_free_draws_stop_per_row() -> None:
    """Peers run to the budget as soon as the temperature is not 0."""
    learned, batch, _, end_id = trained()
    got = generate(
        learned,
        **batch,
        choice=FreeChoice(end_id),
        max_steps=60,
        temperature=0.3,
        generator=torch.Generator().manual_seed(0),
    )
    assert got.steps < 60
    for row, length in zip(got.ids.tolist(), got.lengths.tolist(), strict=True):
        assert row.index(end_id) == length - 1
        assert set(row[length:]) <= {-1}


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -0.1}, ["temperature", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"max_steps": 0}, ["max_steps", "0"]),
        ({"max_steps": 1}, ["18 coefficients", "1 allowed", "max_decoding_steps"]),
        ({"position_gap": -1}, ["position_gap"]),
        ({"assume_contiguous_prefix": -1}, ["assume_contiguous_prefix", "-1"]),
        ({"choice": FreeChoice(7)}, ["max_steps"]),
        ({"choice": FreeChoice(VOCABULARY), "max_steps": 4}, ["1024", "end mark"]),
        ({"valid": torch.zeros(2, 9, dtype=torch.bool)}, ["row 0", "without tokens"]),
        ({"causal": torch.zeros(2, 8, dtype=torch.bool)}, ["[2, 8]"]),
        ({"image_features": torch.zeros(3, 4, 32)}, ["image_features", "[3, 4, 32]"]),
        ({"image_valid": torch.ones(2, 1, dtype=torch.bool)}, ["image_valid", "[2, 1]"]),
        ({"image_features": None}, ["image_valid"]),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PolicyError) as error:
        generate(model(), **{**prompts(2), "choice": choice(), **change})
    for word in words:
        assert word in str(error.value)


def test_text_ids_that_do_not_fit_are_named() -> None:
    grammar, text_ids = choice().grammar, choice().text_ids
    with pytest.raises(PolicyError, match=f"each of the {len(text_ids)} action tokens"):
        ConstrainedChoice(grammar, text_ids[:-1])
    with pytest.raises(PolicyError, match="different"):
        ConstrainedChoice(grammar, np.zeros_like(text_ids))
    with pytest.raises(PolicyError, match=r"up to 1124.*vocabulary has 1024"):
        generate(model(), **prompts(1), choice=ConstrainedChoice(grammar, text_ids - text_ids.max() + 1124))


@pytest.mark.parametrize("log_probabilities", [False, True])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error_not_a_chunk(
    free: bool, temperature: float, log_probabilities: bool
) -> None:
    batch = prompts(3)
    batch["image_features"][1] = float("nan")
    how: Any = FreeChoice(7) if free else choice()
    with pytest.raises(PolicyError, match="row 1, step 0"):
        generate(
            model(),
            **batch,
            choice=how,
            temperature=temperature,
            max_steps=20,
            log_probabilities=log_probabilities,
        )


# --- recorded numbers ---------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_the_greedy_tokens_of_lerobots_tiny_model(shared: Path) -> None:
    """Its bos stands in the bidirectional part, and nothing stops before 16 steps."""
    directory = shared / "golden" / "pi0fast_tiny"
    config = json.loads((directory / "config.json").read_text())
    golden = load_file(directory / "vectors.safetensors")
    architecture = Architecture.from_json({"text": config["text"], "vision": config["vision"]})
    tiny = weights.load(directory, architecture)
    rows = len(golden["language_tokens"])
    with torch.no_grad():
        features = tiny.encode_images(golden["image0"])
    # The prompt is padded, then comes bos: any place of the padding will do.
    ids = torch.cat((golden["language_tokens"], torch.full((rows, 1), config["bos_token_id"])), 1)
    valid = torch.cat((golden["language_mask"], torch.ones(rows, 1, dtype=torch.bool)), 1)
    for use_cache in (True, False):
        got = generate(
            tiny,
            features,
            golden["image_mask0"][:, None].expand(features.shape[:2]),
            ids,
            valid,
            torch.zeros_like(valid),
            choice=FreeChoice(config["end_token_id"]),
            max_steps=16,
            use_cache=use_cache,
        )
        assert got.ids.tolist() == golden["greedy_tokens"].tolist()
        assert got.finished.tolist() == [False] * rows


@pytest.mark.golden
@pytest.mark.parametrize("name", ["lerobot_checkpoint", "lerobot_checkpoint_relative"])
def test_the_chunks_of_lerobots_checkpoints(shared: Path, name: str) -> None:
    """From its raw images and its prompts' ids: freely as lerobot decodes, and under the grammar, to its chunk."""
    directory = shared / "golden" / name
    config = json.loads((directory / "config.json").read_text())
    golden = load_file(directory / "vectors.safetensors")
    architecture = Architecture.from_json(directory / "architecture.json")
    fast = FastTokenizer.from_pretrained(directory / config["action_tokenizer_name"])
    horizon, size = golden["chunk_normalised"].shape[1:]
    # Its files say 50 steps of 14 dimensions; lerobot decodes at the policy's own.
    fast = FastTokenizer(fast.vocabulary, scale=fast.scale, time_horizon=horizon, action_dim=size)
    text_ids = architecture.text.vocab_size - 1 - config["fast_skip_tokens"] - np.arange(fast.vocab_size)
    tuned, end_id, bos_id = weights.load(directory, architecture), 352, 2
    rows = len(golden["chunk"])
    with torch.no_grad():
        cameras = [key for key in config["input_features"] if key.startswith("observation.images.") and key in golden]
        features = torch.cat([tuned.encode_images(prepare_images(golden[key], key=key)) for key in cameras], 1)
    prefix = golden["pre.action.tokens"][:, : int((golden["pre.action.tokens"][0] >= text_ids.min()).int().argmax())]
    for free in (True, False):
        # lerobot's bos stands in the bidirectional part; ours is causal, with the prefix of the action given.
        given = torch.full((rows, 1), bos_id) if free else prefix
        ids = torch.cat((golden["pre.language.tokens"], given), 1)
        valid = torch.cat((golden["pre.language.mask"], torch.ones_like(given, dtype=torch.bool)), 1)
        causal = torch.zeros_like(valid)
        causal[:, golden["pre.language.tokens"].shape[1] :] = not free
        grammar = Grammar(fast.vocabulary, horizon * size, max_tokens=config["max_action_tokens"])
        how: Any = FreeChoice(end_id) if free else ConstrainedChoice(grammar, text_ids)
        got = generate(tuned, features, None, ids, valid, causal, choice=how, max_steps=config["max_action_tokens"])
        assert bool(got.finished.all())
        actions = [row[:length] for row, length in zip(got.ids, got.lengths.tolist(), strict=True)]
        if free:
            assert all(row[: prefix.shape[1] - 1].tolist() == prefix[0, 1:].tolist() for row in actions)
            actions = [text_ids[0] - row[prefix.shape[1] - 1 : -1] for row in actions]
        chunks = fast.decode([row.tolist() for row in actions])
        np.testing.assert_allclose(chunks, golden["chunk_normalised"].numpy(), atol=1e-4)
