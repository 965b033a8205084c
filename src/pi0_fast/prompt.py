"""Task, state and action tokens -> ids of the language model, and back; the only place that maps action tokens to ids.

With PaliGemma's vocabulary (V = 257152) and `fast_skip_tokens` = 128 action token a has the id V - 1 - 128 - a. Two
layouts, each for training; generation stops before the first action token:

    lerobot  Task: pick up the cube, State: 130 7 255;\\n  <bos> Action: 257023 257019 ...  | <eos>
    openpi   Task: pick up the cube, State: 130 7 255;\\n        Action: 257023 257019 ...  | <eos>
             text: all see all of it                       target: each sees the text and what is before it

What the text tokenizer puts around a text (PaliGemma's: bos before it) belongs to the text. Ids, what is valid, what is
causal, which positions carry loss and with what weight are made here, as data; images, attention masks and positions
are the model's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pi0_fast.text_tokenizer import TextTokenizer
from pi0_fast.types import PolicyError

LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]

PromptFormat = Literal["lerobot", "openpi"]

STATE_BINS = 256
ACTION_PREFIX = "Action: "
END_MARK = "|"
_STATE_BEGIN, _STATE_END = ", State:", ";\n"
# Where the text is cut so that the ids of each number are looked up, not computed.
_CUTS = [(_STATE_BEGIN[-1], " "), *((digit, after) for digit in "0123456789" for after in (" ", _STATE_END[0]))]
_TASKS_KEPT = 4096


@dataclass(frozen=True)
class PromptReport:
    """What a batch held that a user should hear of; reports of several batches can be added.

    Attributes:
        rows: number of rows.
        state_below, state_above: int64 [Ds]; values of each state dimension outside [-1, 1], which have bin -1 (0 with
            `state_clip`) or 255.
        longest_text: ids of the longest text.
        longest_target: ids of the longest target, all that is not an action token included; 0 without targets.
        over_budget: rows whose target is longer than `max_action_tokens`. They are whole all the same.
    """

    rows: int
    state_below: LongArray
    state_above: LongArray
    longest_text: int
    longest_target: int = 0
    over_budget: int = 0

    def __add__(self, other: PromptReport) -> PromptReport:
        return PromptReport(
            self.rows + other.rows,
            self.state_below + other.state_below,
            self.state_above + other.state_above,
            max(self.longest_text, other.longest_text),
            max(self.longest_target, other.longest_target),
            self.over_budget + other.over_budget,
        )


@dataclass(frozen=True)
class PromptBatch:
    """Ids of B rows and what the model is to know about each. Rows are packed: text, target, then padding.

    Attributes:
        ids: int64 [B, S]; the tokenizer's pad id where not valid. S is the longest row's length.
        valid: bool [B, S].
        causal: bool [B, S]; seen by itself and later positions only. The text is not, nor is padding.
        label: bool [B, S]; ids that are to be predicted from the position before, and carry loss.
        weight: float32 [B, S]; the share of each label in the loss, sum 1; 0 elsewhere, all 0 in generation.
        text_length: int64 [B]; ids of the text at the beginning of each row.
        report: what was counted on the way.
    """

    ids: LongArray
    valid: BoolArray
    causal: BoolArray
    label: BoolArray
    weight: FloatArray
    text_length: LongArray
    report: PromptReport = field(repr=False)


class ParsedActions(NamedTuple):
    """The action tokens of a row of generated ids, int64, and what is wrong with the row: None if nothing is."""

    ids: LongArray
    problem: str | None


class Prompt:
    """The layout of prompts and targets for one text tokenizer and one action vocabulary.

    Attributes:
        action_text_ids: int64 [A]; the id of each action token, read-only.
        action_prefix_ids: ids of ``Action: ``.
        end_id: id of ``|``, which ends the action tokens.
        bos_id, eos_id: the text tokenizer's.
        target_overhead: ids of a target that are no action tokens: a target of n action tokens has n more than this.
    """

    def __init__(
        self,
        text_tokenizer: TextTokenizer,
        action_vocab_size: int,
        *,
        prompt_format: PromptFormat = "lerobot",
        tokenizer_max_length: int = 200,
        max_action_tokens: int = 256,
        fast_skip_tokens: int = 128,
        state_clip: bool = True,
    ) -> None:
        """Check that the vocabularies fit each other.

        Args:
            text_tokenizer: of the language model.
            action_vocab_size: A, size of the action tokenizer's vocabulary.
            prompt_format: ``"lerobot"``, or ``"openpi"``: the task lower-cased with its line feeds kept, no bos before
                the target, the loss a mean of row means instead of one mean over the batch.
            tokenizer_max_length: the most ids that the text of a row may have.
            max_action_tokens: the ids of a target beyond which a row is reported.
            fast_skip_tokens: ids left free at the end of the vocabulary.
            state_clip: bins below the range are 0. Otherwise -1, which lerobot's and openpi's checkpoints have seen.

        Raises:
            PolicyError: a setting out of range; an action token would have the id of text that every prompt holds, or
                a negative one; the text tokenizer has no single id for the end mark.
        """
        if prompt_format not in ("lerobot", "openpi"):
            raise PolicyError(f"prompt_format must be 'lerobot' or 'openpi', not {prompt_format!r}")
        least = {"action_vocab_size": 1, "tokenizer_max_length": 1, "max_action_tokens": 1, "fast_skip_tokens": 0}
        given = (action_vocab_size, tokenizer_max_length, max_action_tokens, fast_skip_tokens)
        for (name, low), value in zip(least.items(), given, strict=True):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
                raise PolicyError(f"{name} must be a whole number from {low} on, not {value!r}")
        self.text_tokenizer = text_tokenizer
        self.prompt_format: PromptFormat = prompt_format
        self.tokenizer_max_length, self.max_action_tokens = int(tokenizer_max_length), int(max_action_tokens)
        self.state_clip = state_clip
        self.bos_id, self.eos_id = text_tokenizer.bos_id, text_tokenizer.eos_id
        self.action_prefix_ids = tuple(text_tokenizer.encode(ACTION_PREFIX))
        end = text_tokenizer.encode(END_MARK)
        if len(end) != 1 or not self.action_prefix_ids:
            raise PolicyError(
                f"the text tokenizer has {len(end)} ids for {END_MARK!r}, which ends the action tokens, and "
                f"{len(self.action_prefix_ids)} for {ACTION_PREFIX!r}; needed are one, and at least one"
            )
        self.end_id = end[0]
        # lerobot's explicit bos is the first id of the target, but nothing predicts it.
        self._target_begin = ((self.bos_id,) if prompt_format == "lerobot" else ()) + self.action_prefix_ids
        self.target_overhead = len(self._target_begin) + 2
        self._first_action_id = text_tokenizer.vocab_size - 1 - int(fast_skip_tokens)
        self.action_text_ids: LongArray = self._first_action_id - np.arange(action_vocab_size, dtype=np.int64)
        self.action_text_ids.setflags(write=False)
        self._check_overlap(int(fast_skip_tokens))
        self._numbers = self._number_table() if text_tokenizer.never_joins(_CUTS) else None
        self._heads: OrderedDict[str, LongArray] = OrderedDict()

    def _check_overlap(self, skip: int) -> None:
        """Raise where the id of an action token is also that of a special token, or of text in every prompt."""
        tokenizer, count = self.text_tokenizer, len(self.action_text_ids)
        low, high = int(self.action_text_ids[-1]), int(self.action_text_ids[0])
        numbers = " ".join(str(number) for number in range(-1, STATE_BINS))
        frame = tokenizer.encode_prompt(f"Task: {_STATE_BEGIN} {numbers}{_STATE_END}")
        used = {self.bos_id, self.eos_id, tokenizer.pad_id, self.end_id, *self.action_prefix_ids, *frame}
        clash = sorted(number for number in used if low <= number <= high)
        if low < 0 or clash:
            what = f"id {clash[0]}, {tokenizer.piece(clash[0])!r}, is text of every prompt" if clash else "below 0"
            raise PolicyError(
                f"{count} action tokens take the ids {low} to {high} of the text vocabulary of {tokenizer.vocab_size} "
                f"(fast_skip_tokens={skip}), but {what}: take a larger text vocabulary or a smaller action vocabulary"
            )

    # --- text -------------------------------------------------------------------------------------------------------

    def state_bins(self, states: Any) -> tuple[LongArray, LongArray, LongArray]:
        """Bins of normalised states, and how many values of each dimension are outside [-1, 1].

        Args:
            states: [B, Ds] numbers, normalised to about [-1, 1].

        Returns:
            Bins int64 [B, Ds]: 0 for [-1, -1 + 1/128) to 255 for 1 - 1/128 on; below the range -1, or 0 with
            `state_clip`. Then the counts below and above, int64 [Ds] each.

        Raises:
            PolicyError: not a matrix of numbers, or a value that is not finite (row and dimension named).
        """
        values = np.asarray(states)
        if values.dtype.kind not in "fiu" or values.ndim != 2 or values.size == 0:
            raise PolicyError(
                f"states must be numbers of shape [batch, dimensions], got shape {list(values.shape)} and dtype "
                f"{values.dtype}"
            )
        if not np.isfinite(values).all():
            row, dimension = np.argwhere(~np.isfinite(values))[0].tolist()
            raise PolicyError(
                f"the state in row {row}, dimension {dimension} is {values[row, dimension]}: repair or leave out that "
                "observation"
            )
        # Multiplying by a power of two rounds nothing, so this is np.digitize with 256 bins over [-1, 1] exactly.
        half = STATE_BINS // 2
        wide = values.astype(np.float64) if values.dtype.kind != "f" else values
        bins = np.floor(np.clip(wide, -2, 2) * half).astype(np.int64) + half
        np.clip(bins, 0 if self.state_clip else -1, STATE_BINS - 1, out=bins)
        return bins, (values < -1).sum(axis=0), (values > 1).sum(axis=0)

    def text(self, task: str, state: Any) -> str:
        """The text of one prompt.

        Args:
            task: what the robot is to do.
            state: normalised, [Ds].

        Raises:
            PolicyError: as `state_bins`, and no task.
        """
        bins, _, _ = self.state_bins(np.asarray(state)[None])
        return self._text(self._head(task, 0), bins[0].tolist())

    def _head(self, task: str, row: int) -> str:
        """The text up to the state's numbers."""
        if not isinstance(task, str) or not task.replace("_", " ").strip():
            raise PolicyError(f"the task in row {row} must be a text that says what to do, not {task!r}")
        try:
            task.encode()
        except UnicodeEncodeError as error:
            raise PolicyError(f"the task in row {row} is no text that can be written: {error}") from error
        task = task.strip().replace("_", " ")
        task = task.lower() if self.prompt_format == "openpi" else task.replace("\n", " ")
        return f"Task: {task}{_STATE_BEGIN}"

    @staticmethod
    def _text(head: str, bins: Sequence[int]) -> str:
        return f"{head} {' '.join(map(str, bins))}{_STATE_END}"

    def _number_table(self) -> tuple[LongArray, LongArray]:
        """Ids of `` -1``, `` 0`` ... `` 255``, int64 [257, L], and how many each has."""
        rows = [self.text_tokenizer.encode(f" {number}") for number in range(-1, STATE_BINS)]
        lengths = np.array([len(row) for row in rows])
        table = np.zeros((len(rows), lengths.max()), np.int64)
        for row, ids in zip(table, rows, strict=True):
            row[: len(ids)] = ids
        return table, lengths

    def _head_ids(self, task: str, row: int) -> LongArray:
        """Ids of the text up to the state's numbers; tasks are few, so they are remembered."""
        found = self._heads.get(task) if isinstance(task, str) else None
        if found is None:
            head = self._head(task, row)
            ids = [*self.text_tokenizer.prompt_prefix_ids, *self.text_tokenizer.encode(head)]
            found = self._heads[task] = np.array(ids, np.int64)
            if len(self._heads) > _TASKS_KEPT:
                self._heads.popitem(last=False)
        return found

    def _text_ids(self, tasks: Sequence[str], bins: LongArray) -> tuple[LongArray, LongArray]:
        """Ids of the texts, int64 [B, T] with anything behind each row's end, and their lengths [B]."""
        if self._numbers is None:
            texts = [self._text(self._head(task, row), bins[row].tolist()) for row, task in enumerate(tasks)]
            rows = [self.text_tokenizer.encode_prompt(text) for text in texts]
            lengths = np.array([len(row) for row in rows], np.int64)
            ids = np.zeros((len(rows), lengths.max()), np.int64)
            for row, values in enumerate(rows):
                ids[row, : len(values)] = values
            return ids, lengths
        table, counts = self._numbers
        heads = [self._head_ids(task, row) for row, task in enumerate(tasks)]
        tail = [*self.text_tokenizer.encode(_STATE_END), *self.text_tokenizer.prompt_suffix_ids]
        ends = counts[bins + 1].cumsum(axis=1) + np.array([len(head) for head in heads])[:, None]
        lengths = ends[:, -1] + len(tail)
        ids = np.zeros((len(heads), lengths.max()), np.int64)
        for row, head in enumerate(heads):
            ids[row, : len(head)] = head
        counts, starts = counts[bins + 1], ends - counts[bins + 1]
        for column in range(table.shape[1]):
            has = counts > column
            ids[np.nonzero(has)[0], starts[has] + column] = table[bins[has] + 1, column]
        for column, value in enumerate(tail):
            ids[np.arange(len(heads)), ends[:, -1] + column] = value
        return ids, lengths

    # --- batches ----------------------------------------------------------------------------------------------------

    def training(
        self,
        tasks: Sequence[str],
        states: Any,
        action_ids: Any,
        lengths: npt.ArrayLike | None = None,
    ) -> PromptBatch:
        """Texts with their targets; labels are all ids of a target that something predicts, the end mark included.

        Args:
            tasks: B texts.
            states: [B, Ds], normalised.
            action_ids: B lists of action tokens, or int [B, T] with `lengths`, as `FastTokenizer.encode_padded` gives.
            lengths: int [B], with padded ids only.

        Raises:
            PolicyError: as `state_bins`; no task; a text longer than `tokenizer_max_length`; ids that are no action
                tokens (row and position named); other numbers of rows.
        """
        padded, counts = self._padded(action_ids, lengths)
        text, text_length, report = self._texts(tasks, states)
        if len(counts) != len(text):
            raise PolicyError(f"{len(text)} tasks and states, but {len(counts)} rows of action tokens")
        begin = np.array(self._target_begin, np.int64)
        targets = np.empty((len(counts), self.target_overhead + padded.shape[1]), np.int64)
        targets[:, : len(begin)] = begin
        targets[:, len(begin) : -2] = self._first_action_id - padded
        every = np.arange(len(counts))
        targets[every, len(begin) + counts] = self.end_id
        targets[every, len(begin) + counts + 1] = self.eos_id
        target_length = counts + self.target_overhead
        report = PromptReport(
            report.rows,
            report.state_below,
            report.state_above,
            report.longest_text,
            int(target_length.max()),
            int((target_length > self.max_action_tokens).sum()),
        )
        ids, valid, relative = self._pack(text, text_length, targets, target_length)
        lerobot = self.prompt_format == "lerobot"
        label = valid & (relative >= (1 if lerobot else 0))
        share = label.sum() if lerobot else label.sum(axis=1, keepdims=True) * len(label)
        return PromptBatch(
            ids, valid, valid & (relative >= 0), label, (label / share).astype(np.float32), text_length, report
        )

    def generation(
        self,
        tasks: Sequence[str],
        states: Any,
        *,
        prefill_action_prefix: bool = True,
        bos_bidirectional: bool = False,
    ) -> PromptBatch:
        """Texts with what stands before the first id that the model is to choose.

        Args:
            tasks, states: as in `training`.
            prefill_action_prefix: ``Action: `` is given; otherwise the model has to generate it, as in lerobot.
            bos_bidirectional: the target's bos is seen by the text too, as in lerobot's generation; not in its
                training. Nothing in openpi's format, which has no such bos.

        Raises:
            PolicyError: as `training`.
        """
        text, text_length, report = self._texts(tasks, states)
        keep = len(self._target_begin) - (0 if prefill_action_prefix else len(self.action_prefix_ids))
        begin = np.array(self._target_begin[:keep], np.int64)
        ids, valid, relative = self._pack(
            text, text_length, np.broadcast_to(begin, (len(text), keep)), np.full(len(text), keep)
        )
        first_causal = 1 if bos_bidirectional and self.prompt_format == "lerobot" else 0
        causal = valid & (relative >= first_causal)
        nothing = np.zeros(ids.shape, bool)
        return PromptBatch(ids, valid, causal, nothing, nothing.astype(np.float32), text_length, report)

    def _texts(self, tasks: Sequence[str], states: Any) -> tuple[LongArray, LongArray, PromptReport]:
        """Ids of the texts, [B, T] with anything behind each row's end; their lengths [B]; what was counted."""
        if isinstance(tasks, str):
            raise PolicyError(f"tasks must be a list with one text for each row, not the text {tasks!r}")
        bins, below, above = self.state_bins(states)
        if len(tasks) != len(bins):
            raise PolicyError(f"{len(tasks)} tasks, but {len(bins)} rows of states")
        text, lengths = self._text_ids(tasks, bins)
        row = int(lengths.argmax())
        if lengths[row] > self.tokenizer_max_length:
            raise PolicyError(
                f"the prompt in row {row} has {lengths[row]} ids, more than tokenizer_max_length="
                f"{self.tokenizer_max_length}: raise that to {lengths[row]} at least, or shorten the task "
                f"{tasks[row]!r}"
            )
        return text, lengths, PromptReport(len(bins), below, above, int(lengths[row]))

    def _pack(
        self, text: LongArray, text_length: LongArray, target: LongArray, target_length: LongArray
    ) -> tuple[LongArray, BoolArray, LongArray]:
        """Rows of text and target without a gap, [B, S]; what is valid; each position's place in the target.

        Places in the text are negative. Of text and target, [B, ...], only the given lengths [B] are looked at.
        """
        width = int((text_length + target_length).max())
        ids = np.full((len(text), width), self.text_tokenizer.pad_id, np.int64)
        column = np.arange(width)
        relative: LongArray = column - text_length[:, None]
        valid = relative < target_length[:, None]
        ids[relative < 0] = text[np.arange(text.shape[1]) < text_length[:, None]]
        ids[valid & (relative >= 0)] = target[np.arange(target.shape[1]) < target_length[:, None]]
        return ids, valid, relative

    def _padded(self, action_ids: Any, lengths: npt.ArrayLike | None) -> tuple[LongArray, LongArray]:
        """Action tokens as int64 [B, T], 0 behind each row's end, and lengths [B]; all checked."""
        if lengths is None:
            counts = np.array([len(row) for row in action_ids], np.int64)
            # An empty list would make floats of all.
            rows = [np.asarray(row).reshape(len(row)) for row in action_ids if len(row)]
            flat = np.concatenate(rows) if rows else np.empty(0, np.int64)
            within = np.arange(int(counts.max(initial=0))) < counts[:, None]
        else:
            given, counts = np.asarray(action_ids), np.asarray(lengths)
            if given.ndim != 2 or counts.shape != given.shape[:1] or counts.dtype.kind not in "iu":
                raise PolicyError(
                    f"padded action tokens must be [B, T] with whole lengths [B], got shapes {list(given.shape)} and "
                    f"{list(counts.shape)}"
                )
            if counts.size and not (counts.min() >= 0 and counts.max() <= given.shape[1]):
                raise PolicyError(f"lengths of action tokens must be 0 to {given.shape[1]}, got {counts.tolist()}")
            counts = counts.astype(np.int64)
            within = np.arange(int(counts.max(initial=0))) < counts[:, None]
            flat = given[:, : within.shape[1]][within]
        if flat.dtype.kind not in "iu":
            raise PolicyError(f"action tokens must be whole numbers, not {flat.dtype}")
        wrong = (flat < 0) | (flat >= len(self.action_text_ids))
        if wrong.any():
            row, position = np.argwhere(within)[int(wrong.argmax())].tolist()
            raise PolicyError(
                f"{flat[wrong][0]} in row {row}, position {position} is no action token; the action vocabulary is 0 to "
                f"{len(self.action_text_ids) - 1}"
            )
        padded = np.zeros(within.shape, np.int64)
        padded[within] = flat
        return padded, counts

    # --- and back ---------------------------------------------------------------------------------------------------

    def parse(
        self, ids: Any, lengths: npt.ArrayLike | None = None, *, require_prefix: bool = True
    ) -> list[ParsedActions]:
        """Action tokens of freely generated rows: all before the end mark, ``Action: `` removed wherever it stands.

        Args:
            ids: int [B, T] ids of the text vocabulary; a row ends before its first negative id.
            lengths: int [B], where rows end; None: at their width.
            require_prefix: a row must begin with ``Action: `` (where it was not prefilled).

        Returns:
            For each row its action tokens up to the first id that is none, and its problem: no ``Action: `` at the
            beginning, no end mark, or an id that is no action token (with its position in the row).

        Raises:
            PolicyError: no matrix of whole numbers.
        """
        rows = np.asarray(ids)
        if rows.ndim != 2 or rows.dtype.kind not in "iu":
            raise PolicyError(f"generated ids must be whole numbers [B, T], got {list(rows.shape)}, {rows.dtype}")
        ends = np.full(len(rows), rows.shape[1]) if lengths is None else np.asarray(lengths)
        if ends.shape != (len(rows),):
            raise PolicyError(f"{len(rows)} rows of generated ids, but lengths of shape {list(ends.shape)}")
        return [self._parse_row(row[:end], require_prefix) for row, end in zip(rows, ends, strict=True)]

    def _parse_row(self, row: npt.NDArray[np.integer[Any]], require_prefix: bool) -> ParsedActions:
        values: list[int] = row.tolist()
        values = values[: next((i for i, value in enumerate(values) if value < 0), len(values))]
        prefix = list(self.action_prefix_ids)
        problem = None
        if require_prefix and values[: len(prefix)] != prefix:
            problem = f"the row does not begin with {ACTION_PREFIX!r}"
        if self.end_id in values:
            values = values[: values.index(self.end_id)]
        else:
            problem = problem or f"no end mark {END_MARK!r} among {len(values)} ids"
        kept: list[int] = []
        position = 0
        while position < len(values):
            if values[position : position + len(prefix)] == prefix:
                position += len(prefix)
                continue
            token = self._first_action_id - values[position]
            if not 0 <= token < len(self.action_text_ids):
                problem = problem or f"id {values[position]} at position {position} is no action token"
                break
            kept.append(token)
            position += 1
        return ParsedActions(np.array(kept, np.int64), problem)
