"""Claims: how many times faster than lerobot 0.6.1, and in how much less memory, the policy runs on the same weights.

Both sides run in this process on one thread in float32, turn by turn, at the same small sizes: batch 4, chunks of
50x14, 1 camera, for a vocabulary of 257,152 (PaliGemma's) and of 4,096, once with 50 of 200 text and 40 of 256 target
positions valid (what prompts and chunks need) and once with all of them valid. Times are medians of CPU seconds, the
same as seconds on a machine that does nothing else. Before anything is timed the losses of both sides, their greedy
ids and their preprocessed ids are compared: a difference ends the run.

What each side does:
  prefill        images and prompt to the first hidden state to choose from (lerobot: and the choice)
  step           (generation of N ids - prefill) / N, for the same N on both sides
  chunk          generation of N ids, and the way from ids to actions. Ours generates under the grammar of the action
                 tokenizer until each row holds a chunk of 700 coefficients; that is N. lerobot is then told to generate
                 N ids: from random weights it never stops by itself, and what it generates is no chunk. It computes the
                 head over the whole vocabulary, ours only over the ids that can be legal. In use lerobot generates four
                 more than ours for the same chunk, `Action: ` and the end mark.
  loss           forward and backward of the training loss; gradients of all weights, no optimizer
  memory         the same in a process of its own for each side (Linux): how far the high-water mark of resident memory
                 lies above the process with its weights loaded, and the mark itself
  preprocessing  32 samples of state, action chunk and task: normalise, prompt, text ids, action tokens, tensors. Tasks
                 repeat, as in datasets

    python benchmarks/policy_speed.py [--vocabularies 257152 4096] [--repeats 5] [--parts chunk loss ...]

It needs lerobot beside pi0-fast, and lerobot 0.6.1 needs Python 3.12:

    python3.12 -m venv bench
    bench/bin/pip install "lerobot[pi,dataset]==0.6.1" -e ".[policy]"

Without lerobot, only what compares ours with itself is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lerobot_twin
from lerobot_twin import LerobotTwin
from tokenizer_speed import simulated

HORIZON, DIMS, BATCH = 50, 14, 4
TEXT_LENGTH, TARGET_LENGTH = 200, 256
#: (valid text positions, valid target positions)
FILLINGS = ((50, 40), (TEXT_LENGTH, TARGET_LENGTH))
#: Standard deviation of noise in the actions that the FAST tokenizer is fitted to, with which a chunk takes about as
#: many tokens as targets are valid.
NOISES = (0.01, 0.14)
PARTS = ("generation", "loss", "memory", "preprocessing", "itself")


def sizes(vocab_size: int) -> dict[str, Any]:
    """The small architecture, named as transformers names it."""
    return {
        "text": {
            "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 64, "vocab_size": vocab_size,
        },
        "vision": {
            "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256,
            "image_size": 224, "patch_size": 14, "projection_dim": 256,
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Goals:
    """The ratios that the project set itself for a vocabulary; None where it set none."""

    step: float | None
    chunk: float | None
    loss: float | None
    memory: float | None


GOALS = {257_152: Goals(None, 3, 2.5, 2), 4096: Goals(3, 1.5, 1.5, None)}


@dataclass(frozen=True)
class Case:
    """One batch in lerobot's layout: text padded to 200, then targets padded to 256.

    Attributes:
        images: float32 [B, 3, 224, 224] in [-1, 1].
        text, text_valid: int64 and bool [B, 200]; bos first.
        target, target_valid: int64 and bool [B, 256]; bos first.
    """

    images: torch.Tensor
    text: torch.Tensor
    text_valid: torch.Tensor
    target: torch.Tensor
    target_valid: torch.Tensor

    @staticmethod
    def random(vocab_size: int, text: int, target: int) -> Case:
        """Random images and ids, `text` and `target` positions of every row valid."""
        generator = torch.Generator().manual_seed(0)

        def ids(length: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Random ids behind a bos, 0 where not valid."""
            drawn = torch.randint(4, vocab_size, (BATCH, length), generator=generator)
            drawn[:, 0], drawn[:, valid:] = 2, 0
            return drawn, (torch.arange(length) < valid).expand(BATCH, -1)

        images = torch.rand(BATCH, 3, 224, 224, generator=generator) * 2 - 1
        return Case(images, *ids(TEXT_LENGTH, text), *ids(TARGET_LENGTH, target))

    def prefix(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What lerobot's generation starts from."""
        return self.images, self.text, self.text_valid

    def whole(self) -> tuple[torch.Tensor, ...]:
        """What lerobot's loss is computed from."""
        return *self.prefix(), self.target, self.target_valid


def medians(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Median CPU seconds of each function, called turn by turn after one call that is not counted."""
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            begun = time.process_time()
            function()
            if turn:
                times.append(time.process_time() - begun)
    return [statistics.median(times) for times in taken]


def row(what: str, theirs: float, ours: float, unit: str, goal: float | None = None) -> None:
    """Print one comparison; `goal` is the ratio that the project has set itself."""
    note = f"   (goal {goal:g}x)" if goal else ""
    print(f"  {what:44} {theirs:>9.4g} {ours:>9.4g} {unit:4} {theirs / ours:>6.1f}x{note}", flush=True)


# -------------------------------------------------------------------------------------------------------------- memory


def resident(what: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the high-water mark) of this process in bytes; Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {what}")


def peak_of(function: Callable[[], Any]) -> tuple[int, int]:
    """Resident bytes before the call, and their high-water mark during it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what loading the weights left behind is not to be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    function()
    return before, resident("VmHWM")


def memory_in_own_process(side: str, directory: Path, vocab_size: int, filling: int) -> tuple[float, float]:
    """GiB above the process with weights loaded, and in all, of forward and backward on one side."""
    command = [
        sys.executable, __file__, "--memory_of", side, "--directory", str(directory), "--vocabularies", str(vocab_size),
        "--fillings", str(filling),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    before, peak = json.loads(done.stdout.splitlines()[-1])
    return (peak - before) / 2**30, peak / 2**30


# ------------------------------------------------------------------------------------------------------------ our side


class Ours:
    """The parts of the package that lerobot's policy is compared with.

    Attributes:
        model: with the weights that lerobot has.
        tokenizer: the FAST tokenizer.
        prompt: the layout of ids.
        constrained: the grammar of chunks of 50x14.
        normalizers: of state and action.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """Load what `prepare` made."""
        from pi0_fast import FastTokenizer
        from pi0_fast.actions.grammar import Grammar
        from pi0_fast.actions.normalize import NormalizationMode
        from pi0_fast.decode import ConstrainedChoice
        from pi0_fast.model import weights
        from pi0_fast.model.architecture import Architecture
        from pi0_fast.processors import FeatureNormalizer
        from pi0_fast.prompt import Prompt
        from pi0_fast.text_tokenizer import load_text_tokenizer

        self.model = weights.load(directory / "model.safetensors", Architecture.from_json(sizes(vocab_size)))
        self.tokenizer = FastTokenizer.from_pretrained(directory / "actions")
        self.prompt = Prompt(load_text_tokenizer(directory / "text"), self.tokenizer.vocab_size, state_clip=False)
        grammar = Grammar(self.tokenizer.vocabulary, HORIZON * DIMS)
        self.constrained = ConstrainedChoice(grammar, self.prompt.action_text_ids)
        self.normalizers = {
            key: FeatureNormalizer(key, NormalizationMode.QUANTILES, DIMS, values)
            for key, values in quantiles_of(directory).items()
        }

    def pack(self, case: Case) -> dict[str, torch.Tensor]:
        """A training batch as `Prompt.training` packs it: no padding between text and target."""
        lengths = case.text_valid.sum(1)[:, None], case.target_valid.sum(1)[:, None]
        column = torch.arange(int((lengths[0] + lengths[1]).max()))
        place = column - lengths[0]
        valid = place < lengths[1]
        ids = torch.zeros(valid.shape, dtype=torch.int64)
        ids[place < 0] = case.text[case.text_valid]
        ids[valid & (place >= 0)] = case.target[case.target_valid]
        label = valid & (place >= 1)
        weight = label.float() / label.sum()
        return {"ids": ids, "valid": valid, "causal": valid & (place >= 0), "label": label, "weight": weight}

    def loss(self, images: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The training loss of a packed batch."""
        from pi0_fast.model.loss import target_cross_entropy
        from pi0_fast.model.masks import attention_mask, sequence_layout

        model, label = self.model, batch["label"]
        features = model.encode_images(images)
        embeddings = torch.cat((features, model.embed(batch["ids"])), dim=1)
        image_valid = torch.ones(features.shape[:2], dtype=torch.bool)
        valid, causal, positions = sequence_layout(image_valid, batch["valid"], batch["causal"])
        # Position p is predicted by what stands at p - 1. All rows have as many labels here.
        wanted = label.nonzero()[:, 1].view(len(label), -1) + features.shape[1] - 1
        hidden = model.hidden_states(embeddings, attention_mask(valid, causal), positions, wanted)
        ids, weight = batch["ids"][label], batch["weight"][label]
        return target_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, ids, weight)

    def prefix(self, case: Case, *, like_lerobot: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, valid and causal of what generation starts from: text, bos and `Action: `, [B, S] each.

        With `like_lerobot` the prefix is lerobot's: without `Action: `, and bos is seen by the text.
        """
        begin = [self.prompt.bos_id, *([] if like_lerobot else self.prompt.action_prefix_ids)]
        length = int(case.text_valid[0].sum())
        ids = torch.cat((case.text[:, :length], torch.tensor([begin]).expand(BATCH, -1)), dim=1)
        causal = torch.arange(ids.shape[1]).expand(BATCH, -1) >= length + int(like_lerobot)
        return ids, torch.ones_like(causal), causal

    def prefill(self, case: Case, steps: int) -> torch.Tensor:
        """Images and prompt to the first hidden state, with room for `steps` more columns."""
        from pi0_fast.model.masks import attention_mask, sequence_layout

        model = self.model
        with torch.inference_mode():
            ids, valid, causal = self.prefix(case)
            features = model.encode_images(case.images)
            embeddings = torch.cat((features, model.embed(ids)), dim=1)
            valid, causal, positions = sequence_layout(valid.new_ones(features.shape[:2]), valid, causal)
            cache = model.new_cache(BATCH, valid.shape[1] + steps)
            last = torch.full((BATCH, 1), valid.shape[1] - 1)
            return model.prefill(embeddings, attention_mask(valid, causal), positions, cache, last)

    def generate(
        self, case: Case, steps: int, *, free: bool = False, cached: bool = True, like_lerobot: bool = False
    ) -> Any:
        """Encode the images and generate at most `steps` ids after the text and the beginning of the target.

        Args:
            case: the batch.
            steps: budget.
            free: from the whole vocabulary, and not under the grammar.
            cached: with the cache of keys and values.
            like_lerobot: see `prefix`.
        """
        from pi0_fast.decode import FreeChoice, generate

        choice = FreeChoice(self.prompt.end_id) if free else self.constrained
        with torch.inference_mode():
            return generate(
                self.model, self.model.encode_images(case.images), None, *self.prefix(case, like_lerobot=like_lerobot),
                choice=choice, max_steps=steps, use_cache=cached, log_probabilities=False,
            )  # fmt: skip

    def decode(self, found: Any) -> np.ndarray:
        """What was generated to actions, float32 [B, 50, 14]."""
        return self.tokenizer.decode((found.ids, found.lengths), time_horizon=HORIZON, action_dim=DIMS, num_threads=1)

    def preprocess(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A batch of a dataset to the tensors that the loss is computed from."""
        states = self.normalizers["observation.state"].apply(batch["observation.state"].numpy())
        actions = self.normalizers["action"].apply(batch["action"].numpy())
        ids, lengths = self.tokenizer.encode_padded(actions, num_threads=1)
        made = self.prompt.training(batch["task"], states, ids, lengths)
        parts = {"ids": made.ids, "valid": made.valid, "causal": made.causal, "label": made.label}
        return {name: torch.from_numpy(part) for name, part in {**parts, "weight": made.weight}.items()}


# --------------------------------------------------------------------------------------------------- what is compared


def samples(count: int, noise: float) -> dict[str, Any]:
    """A batch as a dataset gives it: states [N, 14], action chunks [N, 50, 14], tasks; fewest tokens without noise."""
    chunks, _, _ = simulated(HORIZON, 20 * count, DIMS)
    chunks = chunks[::20] + np.random.default_rng(1).normal(0, noise, (count, HORIZON, DIMS)).astype(np.float32)
    tasks = [lerobot_twin.TASKS[i % len(lerobot_twin.TASKS)] for i in range(count)]
    states = torch.from_numpy(np.ascontiguousarray(chunks[:, 0]))
    return {"observation.state": states, "action": torch.from_numpy(chunks), "task": tasks}


def quantiles_of(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """q01 and q99 of state and action."""
    found = json.loads((directory / "statistics.json").read_text())
    return {key: {name: np.array(v, np.float32) for name, v in values.items()} for key, values in found.items()}


def prepare(directory: Path, vocab_size: int, noise: float) -> None:
    """Tokenizers and statistics for one vocabulary; noise in the actions makes their tokens short and many."""
    directory.mkdir()
    lerobot_twin.make_text_tokenizer(directory / "text", vocab_size)
    chunks = samples(1000, noise)["action"].numpy()
    lerobot_twin.make_action_tokenizer(directory / "actions", chunks)
    quantiles = {f"q{q:02}": np.quantile(chunks[:, 0], q / 100, axis=0).tolist() for q in (1, 99)}
    content = {"observation.state": quantiles, "action": quantiles}
    (directory / "statistics.json").write_text(json.dumps(content))


def twin(directory: Path, vocab_size: int) -> LerobotTwin:
    """lerobot's side; its random weights are written where there are none yet, and read where there are."""
    tensors = {
        key: {name: torch.from_numpy(value) for name, value in values.items()}
        for key, values in quantiles_of(directory).items()
    }
    weights = directory / "model.safetensors"
    made = LerobotTwin(
        sizes(vocab_size), directory / "text", directory / "actions", chunk=(HORIZON, DIMS), statistics=tensors,
        weights=weights if weights.exists() else None,
    )  # fmt: skip
    if not weights.exists():
        made.save_weights(weights)
    return made


def check(theirs: LerobotTwin, ours: Ours, case: Case, batch: dict[str, Any]) -> None:
    """End the run where the two sides do not compute the same: the loss, greedy ids, the ids of a batch."""
    with torch.no_grad():
        losses = float(theirs.loss(*case.whole())), float(ours.loss(case.images, ours.pack(case)))
    if abs(losses[0] - losses[1]) > 1e-5 * losses[0]:
        sys.exit(f"losses differ: lerobot {losses[0]}, ours {losses[1]}")
    ids = theirs.generate(*case.prefix(), steps=8)
    found = ours.generate(case, 8, free=True, like_lerobot=True).ids
    if not torch.equal(ids, found):
        sys.exit(f"greedy ids differ:\n{ids}\n{found}")
    a, b = theirs.preprocess(batch), ours.preprocess(batch)
    ids = torch.cat((a["observation.language.tokens"], a["action.tokens"]), dim=1)
    valid = torch.cat((a["observation.language.attention_mask"], a["action.token_mask"]), dim=1)
    if not torch.equal(ids[valid], b["ids"][b["valid"]]):
        sys.exit("the ids of a batch differ")


def backward(loss: Callable[[], torch.Tensor], model: torch.nn.Module) -> Callable[[], None]:
    """Forward and backward; gradients are freed before the next call, so they count in the memory."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]

    return run


def compare_generation(theirs: LerobotTwin, ours: Ours, case: Case, budget: int, repeats: int, goals: Goals) -> None:
    """Prefill, step and chunk."""
    found = ours.generate(case, budget)
    steps = found.steps
    ids = theirs.generate(*case.prefix(), steps=steps)
    times = medians(
        repeats,
        lambda: theirs.generate(*case.prefix(), steps=1), lambda: ours.prefill(case, budget),
        lambda: theirs.generate(*case.prefix(), steps=steps), lambda: ours.generate(case, budget),
        lambda: theirs.decode(ids), lambda: ours.decode(found),
    )  # fmt: skip
    row("prefill", *times[:2], "s")
    row(f"step, mean of {steps}", (times[2] - times[0]) / steps, (times[3] - times[1]) / steps, "s", goals.step)
    row(f"chunk of {steps} tokens", times[2] + times[4], times[3] + times[5], "s", goals.chunk)


def compare_loss(theirs: LerobotTwin, ours: Ours, case: Case, repeats: int, goals: Goals) -> None:
    """Forward and backward."""
    batch = ours.pack(case)
    times = medians(
        repeats,
        backward(lambda: theirs.loss(*case.whole()), theirs.policy),
        backward(lambda: ours.loss(case.images, batch), ours.model),
    )
    theirs.policy.zero_grad(set_to_none=True)
    ours.model.zero_grad(set_to_none=True)
    row("loss, forward and backward", *times, "s", goals.loss)


def compare_memory(directory: Path, vocab_size: int, filling: int, goals: Goals) -> None:
    """Peak memory of the same, each side in a process of its own."""
    theirs, ours = (memory_in_own_process(side, directory, vocab_size, filling) for side in ("lerobot", "ours"))
    row("memory of that above the weights", theirs[0], ours[0], "GiB", goals.memory)
    row("memory of that, whole process", theirs[1], ours[1], "GiB")


def measure_memory(side: str, directory: Path, vocab_size: int, filling: int) -> None:
    """Print resident bytes before forward and backward and their high-water mark: what the other process does."""
    case = Case.random(vocab_size, *FILLINGS[filling])
    if side == "lerobot":
        theirs = twin(directory, vocab_size)
        run = backward(lambda: theirs.loss(*case.whole()), theirs.policy)
    else:
        ours = Ours(directory, vocab_size)
        batch = ours.pack(case)
        run = backward(lambda: ours.loss(case.images, batch), ours.model)
    print(json.dumps(peak_of(run)))


def itself(ours: Ours, case: Case, budget: int, repeats: int) -> None:
    """Our side alone: constrained, cached and compiled against what they replace, for the same number of tokens."""
    steps = ours.generate(case, budget).steps
    free, uncached, constrained = medians(
        repeats,
        lambda: ours.generate(case, steps, free=True), lambda: ours.generate(case, budget, cached=False),
        lambda: ours.generate(case, budget),
    )  # fmt: skip
    row(f"{steps} tokens: free, constrained", free, constrained, "s")
    row(f"{steps} tokens: uncached, cached", uncached, constrained, "s")
    batch = ours.pack(case)
    run = backward(lambda: ours.loss(case.images, batch), ours.model)
    eager_loss = medians(repeats, run)[0]
    parts = ours.model._hidden_states, ours.model._prefill, ours.model._step
    ours.model.compile()
    compiled, compiled_loss = medians(repeats, lambda: ours.generate(case, budget), run)
    ours.model._hidden_states, ours.model._prefill, ours.model._step = parts
    row(f"{steps} tokens: eager, compiled", constrained, compiled, "s")
    row("loss: eager, compiled", eager_loss, compiled_loss, "s")


# ------------------------------------------------------------------------------------------------------------ gemma_2b


def gemma_2b(repeats: int, threads: int) -> None:
    """Prefill and time per token of `gemma_2b` in bfloat16, beside what reading its weights takes alone; 8 GiB."""
    from pi0_fast.decode import FreeChoice, generate
    from pi0_fast.model import weights
    from pi0_fast.model.architecture import Architecture

    torch.set_num_threads(threads)
    model = weights.initialize(Architecture.variant("gemma_2b"), torch.bfloat16).eval()
    read = sum(p.nbytes for p in model.decoder.parameters())
    head = model.lm_head.weight.nbytes
    block = torch.ones(2**28, dtype=torch.float32)  # 1 GiB, far beyond any cache
    ids = torch.randint(4, 250_000, (1, 54))
    causal = torch.arange(54)[None] >= 50
    images = torch.rand(1, 3, 224, 224) * 2 - 1

    def run(steps: int) -> None:
        with torch.inference_mode():
            generate(
                model, model.encode_images(images), None, ids, torch.ones_like(causal), causal, choice=FreeChoice(1),
                max_steps=steps, log_probabilities=False,
            )  # fmt: skip

    def wall(function: Callable[[], Any]) -> float:
        """Median seconds."""
        times = []
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            function()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[1:])

    bandwidth = block.nbytes / wall(block.sum)
    short, long = wall(lambda: run(1)), wall(lambda: run(9))
    floor = (read + head) / bandwidth
    print(f"gemma_2b, bfloat16, {threads} threads, 1 row, 1 camera, 54 ids, the whole head")
    print(f"  images, prefill and first id {short:.2f} s; each id {(long - short) / 8:.3f} s")
    print(f"  {(read + head) / 1e9:.2f} GB of weights per id at {bandwidth / 1e9:.1f} GB/s: at least {floor:.3f} s")


def compare(directory: Path, vocab_size: int, filling: int, arguments: argparse.Namespace) -> None:
    """All parts for one vocabulary and one filling."""
    text, target = FILLINGS[filling]
    prepare(directory, vocab_size, NOISES[filling])
    theirs, ours = twin(directory, vocab_size), Ours(directory, vocab_size)
    case, batch = Case.random(vocab_size, text, target), samples(32, NOISES[filling])
    check(theirs, ours, case, batch)
    goals = GOALS.get(vocab_size, Goals(None, None, None, None))
    repeats = arguments.repeats
    print(f"vocabulary {vocab_size}; {text} of {TEXT_LENGTH} text, {target} of {TARGET_LENGTH} target positions valid")
    print(f"  {'':44} {'lerobot':>9} {'ours':>9}")
    if "generation" in arguments.parts:
        compare_generation(theirs, ours, case, target, repeats, goals)
    if "loss" in arguments.parts:
        compare_loss(theirs, ours, case, repeats, goals)
    if "memory" in arguments.parts:
        compare_memory(directory, vocab_size, filling, goals)
    if "preprocessing" in arguments.parts:
        times = medians(5 * repeats, lambda: theirs.preprocess(batch), lambda: ours.preprocess(batch))
        row("preprocessing of 32 samples", *times, "s", 20)
    if "itself" in arguments.parts:
        print(f"  {'ours against itself':44} {'first':>9} {'second':>9}")
        itself(ours, case, target, repeats)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(GOALS))
    parser.add_argument("--fillings", type=int, nargs="+", default=[0, 1], help="0: 50 and 40 valid; 1: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "gemma_2b"), default=PARTS)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of gemma_2b alone")
    parser.add_argument("--memory_of", choices=("lerobot", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    if arguments.memory_of:
        measure_memory(arguments.memory_of, arguments.directory, arguments.vocabularies[0], arguments.fillings[0])
        return
    if "gemma_2b" in arguments.parts:
        gemma_2b(arguments.repeats, arguments.threads)
    if set(arguments.parts) == {"gemma_2b"}:
        return
    try:
        lerobot_twin.import_lerobot()
    except ImportError as error:
        print(f"nothing to compare with: {error}")
        return
    for vocab_size in arguments.vocabularies:
        for filling in arguments.fillings:
            with tempfile.TemporaryDirectory() as temporary:
                compare(Path(temporary) / "made", vocab_size, filling, arguments)


if __name__ == "__main__":
    main()
