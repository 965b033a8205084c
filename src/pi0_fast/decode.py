"""Generation: prefill the prompt, then one token of every row per step, chosen freely or under a grammar.

Two ways to choose. `ConstrainedChoice` allows only action tokens with which a whole chunk comes out within the budget,
so that any weights give a valid chunk; only the head rows of action tokens are computed, and the end mark, which is
certain once a chunk is complete, not at all. `FreeChoice` takes any token of the vocabulary until the end mark, as
lerobot does. Rows stop on their own; the loop ends when all have. Without a cache every step runs the whole sequence
again: the slow twin. What is not here: prompts, the way from ids to action chunks, and the model itself.

The loop never waits for an accelerator between two looks at whether all rows have stopped, and such a look comes at
most every `STRIDE` steps there. A batch of two, "p" prompt, "-" padding, "a" generated (columns are common to all rows,
positions are not):

    column    0 1 2 3 4 5      position  0 1 2 3 4 5
    row 0     p p p p a a                0 1 2 3 4 5
    row 1     p p - - a a                0 1     2 3
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pi0_fast.actions.grammar import Grammar
from pi0_fast.model.masks import attention_mask, contiguous_prefix, contiguous_prefix_mask, sequence_layout
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.types import PolicyError

#: On an accelerator: the fewest steps between two looks at whether all rows have stopped.
STRIDE = 8
# Cache and step masks grow in blocks, so that a compiled step meets few different sizes.
_BLOCK = 64
# The smallest draw of a float32 exponential that is not 0: the resolution of its uniform source.
_SMALLEST_DRAW = 2.0**-25
# At the one, scores that differ are further apart than any two draws; at the other, all differences are rounded away.
_COLDEST, _HOTTEST = 1e-30, 1e30


@dataclass(frozen=True)
class Generation:
    """What was generated, padded on the right to the longest row.

    Attributes:
        ids: int64 [B, T]; action ids (constrained) or text ids with the end mark (free); -1 after a row's end.
        lengths: int64 [B], ids of each row.
        log_probabilities: float32 [B, T], or None where not wanted; natural logarithm of the chosen id's share among
            the allowed ones, at the temperature that it was drawn with (greedy: 1); 0 after a row's end, so that the
            sum is the sequence's.
        steps: T, the steps until the last row ended.
        finished: bool [B]; the row is a whole chunk (constrained: always) or holds the end mark.
    """

    ids: Tensor
    lengths: Tensor
    log_probabilities: Tensor | None
    steps: int
    finished: Tensor


class _Rows(Protocol):
    """The state of a batch under one way of choosing."""

    def scores(self, hidden: Tensor) -> Tensor:
        """[B, width] -> float32 [B, K]; minus infinity where an id is not allowed."""

    def advance(self, chosen: Tensor) -> Tensor:
        """Take one chosen index (int64 [B]) per row; the text ids to feed, int64 [B]."""

    def wait(self) -> int:
        """How many steps the last row needs at least; 0 when all have ended. Waits for the device."""

    def lengths(self, chosen: Tensor) -> Tensor:
        """int64 [B] of all choices [B, T]."""

    def finished(self) -> Tensor:
        """bool [B]."""


class Choice(Protocol):
    """How ids are chosen."""

    def start(self, model: PaliGemma, rows: int, max_steps: int | None) -> tuple[_Rows, int]:
        """The state before the first step, and the most steps there may be."""


class ConstrainedChoice:
    """Only what the grammar of the action tokenizer allows; every row becomes a whole chunk.

    Args:
        grammar: for one vocabulary and one H*D; its `max_tokens` is the budget unless `generate` is given another.
        action_text_ids: int64 [A], the text id of each action id.

    Raises:
        PolicyError: not one text id for each action token, or one twice.
    """

    def __init__(self, grammar: Grammar, action_text_ids: npt.ArrayLike) -> None:
        text_ids = np.asarray(action_text_ids)
        actions = grammar.base.shape[1]
        if text_ids.shape != (actions,) or text_ids.dtype.kind not in "iu":
            raise PolicyError(
                f"needed is one text id for each of the {actions} action tokens, got shape {list(text_ids.shape)} and "
                f"dtype {text_ids.dtype}"
            )
        if len(np.unique(text_ids)) != actions or text_ids.min() < 0:
            raise PolicyError("the text ids of the action tokens must be different and not negative")
        self.grammar = grammar
        self.text_ids = text_ids.astype(np.int64)
        self._tables: _Tables | None = None

    def start(self, model: PaliGemma, rows: int, max_steps: int | None) -> tuple[_ConstrainedRows, int]:
        """The state before the first step, and the budget.

        Raises:
            PolicyError: a budget that cannot hold a chunk; text ids outside the model's vocabulary.
        """
        budget = self.grammar.max_tokens if max_steps is None else max_steps
        least = int(self.grammar.fewest[0, self.grammar.length])
        if budget < least:
            raise PolicyError(
                f"a chunk of {self.grammar.length} coefficients takes {least} tokens at least, more than the {budget} "
                "allowed: raise max_decoding_steps (and max_action_tokens), or shorten the chunk"
            )
        budget = min(budget, 4 * self.grammar.length)  # no sequence is longer
        vocab_size = model.architecture.text.vocab_size
        if self.text_ids.max() >= vocab_size:
            raise PolicyError(
                f"the action tokens' text ids go up to {self.text_ids.max()}, but the model's vocabulary has "
                f"{vocab_size} ids: this tokenizer does not belong to this checkpoint"
            )
        if self._tables is None or self._tables.text_ids.device != model.device:
            self._tables = _Tables.of(self, model.device)
        return _ConstrainedRows(self._tables, model, rows, self.grammar.length, budget), budget


@dataclass(frozen=True)
class _Tables:
    """The grammar's tables on the model's device; int64, as indices are, except `table`."""

    text_ids: Tensor
    base: Tensor
    table: Tensor
    consumed: Tensor
    next_place: Tensor
    fewest: Tensor

    @classmethod
    def of(cls, choice: ConstrainedChoice, device: torch.device) -> _Tables:
        grammar = choice.grammar
        arrays = (grammar.base, grammar.table, grammar.consumed, grammar.next_place, grammar.fewest)
        base, table, consumed, next_place, fewest = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(
            torch.from_numpy(choice.text_ids).to(device),
            base.long(),
            table,
            consumed.long(),
            next_place.long(),
            fewest.long(),
        )


class _ConstrainedRows:
    """Coefficients to come and place in a character of every row; the budget is common to all."""

    def __init__(self, tables: _Tables, model: PaliGemma, rows: int, length: int, budget: int) -> None:
        self._tables, self._model, self._budget = tables, model, budget
        self._head = model.head_rows(tables.text_ids)
        self._remaining = torch.full((rows,), length, device=model.device)
        # In the plain format there is only one place.
        self._place = torch.zeros_like(self._remaining) if len(tables.base) > 1 else None
        self._history = [self._remaining]

    def scores(self, hidden: Tensor) -> Tensor:
        base = self._tables.base if self._place is None else self._tables.base[self._place]
        needed = self._tables.table.take(base + self._remaining[:, None])
        return self._model.logits(hidden, self._head).masked_fill_(needed >= self._budget, -math.inf)

    def advance(self, chosen: Tensor) -> Tensor:
        self._budget -= 1
        tables = self._tables
        # Rows that have ended choose among nothing and get some id: they stay at 0, in place 0. A row that has not
        # ended never goes below 0, and one that reaches 0 is between two characters.
        if self._place is None:
            self._remaining = (self._remaining - tables.consumed[0][chosen]).clamp_min_(0)
        else:
            consumed = tables.consumed[self._place, chosen]
            self._place = tables.next_place[self._place, chosen]
            self._remaining = (self._remaining - consumed).clamp_min_(0)
            self._place = self._place.mul_(self._remaining > 0)
        self._history.append(self._remaining)
        return tables.text_ids[chosen]

    def wait(self) -> int:
        place = 0 if self._place is None else self._place
        return int(self._tables.fewest[place, self._remaining].max())

    def lengths(self, chosen: Tensor) -> Tensor:
        return (torch.stack(self._history[: chosen.shape[1]]) > 0).sum(0)

    def finished(self) -> Tensor:
        return self._remaining == 0


@dataclass(frozen=True)
class FreeChoice:
    """Any id of the whole vocabulary, until the end mark or `max_steps`.

    Attributes:
        end_id: text id of the end mark: `|` in lerobot's prompt; where rows end by eos, that.
    """

    end_id: int

    def start(self, model: PaliGemma, rows: int, max_steps: int | None) -> tuple[_FreeRows, int]:
        """The state before the first step, and the most steps.

        Raises:
            PolicyError: without `max_steps`; an end mark outside the model's vocabulary.
        """
        if max_steps is None:
            raise PolicyError("free decoding may never meet the end mark: give max_steps (max_decoding_steps)")
        vocab_size = model.architecture.text.vocab_size
        if not 0 <= self.end_id < vocab_size:
            raise PolicyError(f"the end mark's id {self.end_id} is outside the model's vocabulary of {vocab_size} ids")
        return _FreeRows(model, rows, self.end_id), max_steps


class _FreeRows:
    """Which rows have met the end mark."""

    def __init__(self, model: PaliGemma, rows: int, end_id: int) -> None:
        self._model, self._end_id = model, end_id
        self._finished = torch.zeros(rows, dtype=torch.bool, device=model.device)

    def scores(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def advance(self, chosen: Tensor) -> Tensor:
        self._finished = self._finished | (chosen == self._end_id)
        return chosen

    def wait(self) -> int:
        return 0 if bool(self._finished.all()) else 1

    def lengths(self, chosen: Tensor) -> Tensor:
        before_end = (chosen == self._end_id).cumsum(1) == 0
        return (before_end.sum(1) + 1).clamp_max(chosen.shape[1])

    def finished(self) -> Tensor:
        return self._finished


def generate(
    model: PaliGemma,
    image_features: Tensor | None,
    image_valid: Tensor | None,
    ids: Tensor,
    valid: Tensor,
    causal: Tensor,
    *,
    choice: Choice,
    temperature: float = 0.0,
    max_steps: int | None = None,
    use_cache: bool = True,
    position_gap: int = 0,
    assume_contiguous_prefix: int | None = None,
    generator: torch.Generator | None = None,
    log_probabilities: bool = True,
) -> Generation:
    """Generate after a prompt; each row is what it would be alone. No gradients.

    Args:
        model: on any device, with everything else.
        image_features: [B, I, width], the vectors of all cameras one after the other, or None.
        image_valid: bool [B, I]; False for the vectors of a missing camera. None: all are there.
        ids: int64 [B, S], prompts padded on the right; `valid` bool [B, S] says where they are not padding.
        valid: see `ids`.
        causal: bool [B, S], True for tokens that only themselves and later ones see.
        choice: `ConstrainedChoice` or `FreeChoice`.
        temperature: 0 takes the likeliest id; above it ids are drawn from softmax(logits / temperature), restricted to
            the allowed ones.
        max_steps: most ids per row. Constrained: None is the grammar's budget. Free: needed.
        use_cache: False runs the whole sequence again in every step.
        position_gap: positions left out before the first token that only later ones see, which is the first generated
            one where the prompt has none of these (openpi's decoder: 1).
        assume_contiguous_prefix: None: what is generated sees all that is valid. A number: it sees what openpi's
            decoder sees, see `masks.contiguous_prefix`; the number is that of the columns that are empty there while
            the prompt is read (its max_decoding_steps). To be openpi's to the token, `ids` must be padded as there.
        generator: of the draws, on the model's device; None is torch's own.
        log_probabilities: whether to compute them; over a whole vocabulary they take time.

    Raises:
        PolicyError: shapes that do not fit, a prompt without tokens, a budget in which no chunk fits, a temperature
            below 0, or logits that are not numbers.
    """
    _check(image_features, image_valid, ids, valid, causal, temperature, max_steps, position_gap)
    if assume_contiguous_prefix is not None and assume_contiguous_prefix < 0:
        raise PolicyError(f"assume_contiguous_prefix is {assume_contiguous_prefix}; needed is None or at least 0")
    # Plain tensors come out (clones made outside), but within, torch keeps no books for gradients.
    with torch.inference_mode():
        rows, most = choice.start(model, len(ids), max_steps)
        prompt = _join(model, image_features, image_valid, ids, valid, causal, position_gap, assume_contiguous_prefix)
        feeder: _Feeder = (_Cached if use_cache else _Uncached)(model, prompt, most)
        chosen, scores = _loop(rows, most, feeder, temperature, generator, log_probabilities)
        lengths = rows.lengths(chosen)
        steps = int(lengths.max())
        chosen, scores = chosen[:, :steps], scores[:, :steps]
        past = torch.arange(steps, device=chosen.device) >= lengths[:, None]
        wrong = ~(scores.isfinite() | past)
        if bool(wrong.any()):
            row, step = (int(value) for value in wrong.nonzero()[0])
            raise PolicyError(
                f"row {row}, step {step}: the model's logits are not numbers; its weights, or the images or state of "
                "this row, hold NaN or infinity"
            )
        chosen, scores = chosen.masked_fill(past, -1), scores.masked_fill(past, 0.0)
        finished = rows.finished()
    wanted = scores.clone() if log_probabilities else None
    return Generation(chosen.clone(), lengths.clone(), wanted, steps, finished.clone())


def _check(
    image_features: Tensor | None,
    image_valid: Tensor | None,
    ids: Tensor,
    valid: Tensor,
    causal: Tensor,
    temperature: float,
    max_steps: int | None,
    position_gap: int,
) -> None:
    try:
        possible = math.isfinite(temperature) and temperature >= 0
    except (TypeError, OverflowError):
        possible = False
    if not possible:
        raise PolicyError(f"temperature is {temperature!r}; it must be 0 (greedy) or a positive number")
    if (max_steps is not None and max_steps < 1) or position_gap < 0:
        raise PolicyError(
            f"max_steps is {max_steps} and position_gap {position_gap}; needed are at least 1 and at least 0"
        )
    if ids.ndim != 2 or 0 in ids.shape or valid.shape != ids.shape or causal.shape != ids.shape:
        raise PolicyError(
            f"ids, valid and causal must have one shape [B, S], got {list(ids.shape)}, {list(valid.shape)} and "
            f"{list(causal.shape)}"
        )
    if not bool(valid.any(1).all()):
        raise PolicyError(f"row {int(valid.any(1).int().argmin())}: a prompt without tokens")
    if image_features is None:
        if image_valid is not None and image_valid.numel():
            raise PolicyError("image_valid is given without image_features")
        return
    shape = list(image_features.shape)
    if len(shape) != 3 or shape[0] != len(ids):
        raise PolicyError(f"image_features must be [B, I, width] with B = {len(ids)}, got {shape}")
    if image_valid is not None and list(image_valid.shape) != shape[:2]:
        raise PolicyError(f"image_valid must be [B, I] = {shape[:2]}, got {list(image_valid.shape)}")


@dataclass(frozen=True)
class _Prompt:
    """Images and tokens as one sequence [B, L]; the last column of each row and the position after it, [B, 1].

    `empty` is None, or how many columns at its beginning are empty where openpi's decoder is imitated.
    """

    embeddings: Tensor
    valid: Tensor
    causal: Tensor
    positions: Tensor
    last: Tensor
    first_position: Tensor
    empty: int | None

    def mask(self, valid: Tensor, causal: Tensor) -> Tensor:
        """The mask of this prompt and what follows it, both bool [B, L or more]."""
        return (
            attention_mask(valid, causal) if self.empty is None else contiguous_prefix_mask(valid, causal, self.empty)
        )

    def seen(self) -> Tensor:
        """What of the prompt is seen by all that follows it, bool [B, L]."""
        return self.valid if self.empty is None else contiguous_prefix(self.valid, self.causal)


def _join(
    model: PaliGemma,
    image_features: Tensor | None,
    image_valid: Tensor | None,
    ids: Tensor,
    valid: Tensor,
    causal: Tensor,
    position_gap: int,
    empty: int | None,
) -> _Prompt:
    embeddings = model.embed(ids)
    if image_features is None:
        image_valid = valid[:, :0]
    else:
        embeddings = torch.cat((image_features.to(embeddings.dtype), embeddings), dim=1)
        if image_valid is None:
            image_valid = torch.ones(image_features.shape[:2], dtype=torch.bool, device=ids.device)
    if empty:
        # Vectors of zeros stay so in every layer, and so are their keys and values: an empty cache.
        nothing = embeddings.new_zeros(len(ids), empty, embeddings.shape[2])
        embeddings = torch.cat((nothing, embeddings), dim=1)
        image_valid = torch.cat((torch.zeros(len(ids), empty, dtype=torch.bool, device=ids.device), image_valid), dim=1)
    valid, causal, positions = sequence_layout(image_valid, valid, causal)
    # openpi's decoder generates all that is causal; where the prompt has some of it already, the gap lies before that.
    positions = positions + position_gap * causal
    columns = torch.arange(valid.shape[1], device=ids.device)
    last = (columns * valid).amax(1, keepdim=True)
    first_position = positions.gather(1, last) + 1 + position_gap * ~causal.gather(1, last)
    return _Prompt(embeddings, valid, causal, positions, last, first_position, empty)


class _Feeder(Protocol):
    """The model after a prompt."""

    hidden: Tensor

    def feed(self, ids: Tensor) -> None:
        """Append one id per row (int64 [B]); `hidden` [B, width] is then the state after it."""


class _Cached:
    """Prefill once, then one column per id."""

    def __init__(self, model: PaliGemma, prompt: _Prompt, steps: int) -> None:
        rows, length = prompt.valid.shape
        capacity = _blocks(length + steps)
        self._model, self._column = model, length
        self._cache = model.new_cache(rows, capacity)
        mask = prompt.mask(prompt.valid, prompt.causal)
        self.hidden = model.prefill(prompt.embeddings, mask, prompt.positions, self._cache, prompt.last)[:, 0]
        device = prompt.valid.device
        self._seen = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
        self._seen[:, :length] = prompt.seen()
        # Made once, so that a step only takes a view.
        self._columns = torch.arange(capacity, device=device)
        self._positions = prompt.first_position[:, 0] + self._columns[:steps, None]
        self._step = 0

    def feed(self, ids: Tensor) -> None:
        column = self._column + self._step
        self._seen[:, column] = True
        mask = self._seen[:, : _blocks(column + 1)]
        position = self._positions[self._step]
        self.hidden = self._model.step(ids, mask, position, self._columns[column : column + 1], self._cache)
        self._step += 1


class _Uncached:
    """The whole sequence again for each id."""

    def __init__(self, model: PaliGemma, prompt: _Prompt, steps: int) -> None:  # noqa: ARG002 (one signature)
        self._model, self._mask = model, prompt.mask
        self._embeddings, self._valid, self._causal = prompt.embeddings, prompt.valid, prompt.causal
        self._positions, self._next = prompt.positions, prompt.first_position
        self.hidden = self._run(prompt.last)

    def _run(self, wanted: Tensor) -> Tensor:
        mask = self._mask(self._valid, self._causal)
        return self._model.hidden_states(self._embeddings, mask, self._positions, wanted)[:, 0]

    def feed(self, ids: Tensor) -> None:
        one = torch.ones_like(self._valid[:, :1])
        self._embeddings = torch.cat((self._embeddings, self._model.embed(ids[:, None])), dim=1)
        self._valid, self._causal = torch.cat((self._valid, one), 1), torch.cat((self._causal, one), 1)
        self._positions = torch.cat((self._positions, self._next), 1)
        self._next = self._next + 1
        self.hidden = self._run(torch.full_like(self._next, self._valid.shape[1] - 1))


def _stride(device: torch.device) -> int:
    """Steps between two looks at least: a look is free on a CPU, and elsewhere waits for everything before it."""
    return 1 if device.type == "cpu" else STRIDE


def _blocks(columns: int) -> int:
    """Rounded up to whole blocks."""
    return -(-columns // _BLOCK) * _BLOCK


def _loop(
    rows: _Rows, most: int, feeder: _Feeder, temperature: float, generator: torch.Generator | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Choose, feed, choose ...; ids int64 and scores float32 [B, T'], meaningless after the end of a row.

    `normalize` makes the scores log-probabilities.
    """
    stride = _stride(feeder.hidden.device)
    chosen, chosen_scores = [], []
    look = max(rows.wait(), stride)
    for step in range(1, most + 1):
        scores = rows.scores(feeder.hidden)
        if temperature > 0:
            index, scores = _draw(scores, temperature, generator)
            score = scores.gather(1, index[:, None])[:, 0]
        else:
            score, index = scores.max(1)
        chosen.append(index)
        chosen_scores.append(score - scores.logsumexp(1) if normalize else score)
        ids = rows.advance(index)
        if step == look:
            wait = rows.wait()
            if wait == 0:
                break
            look = step + max(wait, stride)
        if step < most:
            feeder.feed(ids)
    return torch.stack(chosen, 1), torch.stack(chosen_scores, 1)


def _draw(scores: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One index per row of float32 [B, K], and the scores it was drawn by; never one at minus infinity.

    The largest score first becomes 0, lest a small temperature overflow. The index with the largest score -
    log(exponential draw) is distributed as the softmax (Gumbel's trick): nothing is summed up or sorted.
    """
    # Beyond these two a float32 would become 0 or infinite, and scores NaN; within, nothing is left to change.
    temperature = min(max(temperature, _COLDEST), _HOTTEST)
    scores = (scores - scores.amax(1, keepdim=True)).div_(temperature)
    noise = torch.empty_like(scores).exponential_(generator=generator).clamp_min_(_SMALLEST_DRAW).log_()
    return (scores - noise).argmax(1), scores
