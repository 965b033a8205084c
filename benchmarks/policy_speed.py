"""Claims: how many times faster than lerobot 0.6.1, and in how much less memory, the policy runs on the same weights.

Both sides run in this process on one thread in float32, turn by turn, at the same small sizes: batch 4, chunks of
50x14, 1 camera, for a vocabulary of 257,152 (PaliGemma's) and of 4,096, once with 50 of 200 text and 40 of 256 target
positions valid (what prompts and chunks need) and once with all of them valid. Times are medians of CPU seconds, the
same as seconds on a machine that does nothing else. Before anything is timed the losses of both sides, their greedy
ids and their preprocessed ids are compared: a difference ends the run.

What each side does:
  prefill        images and prompt to the first hidden state to choose from (lerobot: and the choice)
  step           (generation of N ids - prefill) / (N - 1), for the same N on both sides; ours / N, its first choice
                 counted in
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

    python benchmarks/policy_speed.py [--vocabularies 257152 4096] [--repeats 5] [--parts generation loss ...]

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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import lerobot_twin
from lerobot_twin import LerobotTwin
from tokenizer_speed import simulated

if TYPE_CHECKING:
    from pi0_fast.preparation import Prepared

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


def medians(repeats: int, *functions: Callable[[], Any], calls: int = 1) -> list[float]:
    """Median CPU seconds of each function: turn by turn, `calls` in a row, after one turn that is not counted."""
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            begun = time.process_time()
            for _ in range(calls):
                function()
            if turn:
                times.append((time.process_time() - begun) / calls)
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


def new_config(directory: Path, **settings: Any) -> Any:
    """The configuration that lerobot's side has too."""
    from pi0_fast.policy_config import PI0FastConfig

    return PI0FastConfig(
        input_features={
            "observation.images.front": {"type": "VISUAL", "shape": [3, 224, 224]},
            "observation.state": {"type": "STATE", "shape": [DIMS]},
        },
        output_features={"action": {"type": "ACTION", "shape": [DIMS]}},
        text_tokenizer_name=str(directory / "text"), action_tokenizer_name=str(directory / "actions"), **settings,
    )  # fmt: skip


class Ours:
    """The package's policy, loaded from the checkpoint that lerobot wrote, or made anew where there is none.

    Attributes:
        policy: PI0FastPolicy with lerobot's weights, statistics and tokenizers.
        preparation: the policy's, without its cameras: lerobot's pipeline leaves images as they are.
    """

    def __init__(self, directory: Path, vocab_size: int, most: int) -> None:
        """Load what `prepare` and `twin` made; `most` is max_decoding_steps."""
        from pi0_fast.policy import PI0FastPolicy
        from pi0_fast.preparation import Preparation

        architecture, settings = sizes(vocab_size), {"max_decoding_steps": most}
        if (directory / "model.safetensors").exists():
            self.policy = PI0FastPolicy.from_pretrained(directory, architecture=architecture, overrides=settings)
        else:  # without lerobot
            low, high = np.load(directory / "quantiles.npy")
            known = {"q01": low, "q99": high, "min": low, "max": high}
            self.policy = PI0FastPolicy.create(
                new_config(directory, **settings), {"observation.state": known, "action": known},
                architecture=architecture,
            ).eval()  # fmt: skip
        parts = self.policy.checkpoint()
        inputs = {"observation.state": parts.config.input_features["observation.state"]}
        blind = replace(parts.config, input_features=inputs)
        self.preparation = Preparation(blind, parts.processors, parts.text_tokenizer, parts.action_tokenizer)

    def pack(self, case: Case, *, targets: bool = True, like_lerobot: bool = False) -> Prepared:
        """The case as the preparation would give it: text, target, and no padding between.

        Args:
            case: the batch.
            targets: for training; otherwise the text, bos and `Action: `, to generate from.
            like_lerobot: to generate from what lerobot does: without `Action: `, and bos is seen by the text.
        """
        from pi0_fast.preparation import Prepared
        from pi0_fast.prompt import PromptBatch, PromptReport

        prompt = self.preparation.prompt
        text, rows = case.text[:, case.text_valid[0]].numpy(), np.zeros(BATCH, np.int64)
        begin = [prompt.bos_id, *([] if like_lerobot else prompt.action_prefix_ids)]
        target = case.target[:, case.target_valid[0]].numpy() if targets else np.tile(begin, (BATCH, 1))
        ids = np.concatenate((text, target), axis=1)
        place = np.broadcast_to(np.arange(ids.shape[1]) - text.shape[1], ids.shape)
        label = (place >= 1) & targets
        weight = label.astype(np.float32) / max(label.sum(), 1)
        batch = PromptBatch(
            ids, np.ones(ids.shape, bool), place >= int(like_lerobot), label, weight, rows + text.shape[1],
            PromptReport(BATCH, rows, rows, text.shape[1]),
        )  # fmt: skip
        states = np.zeros((BATCH, DIMS), np.float32)
        return Prepared(case.images[:, None], np.ones(1, bool), batch, states, Counter())

    def loss(self, prepared: Prepared) -> torch.Tensor:
        """The training loss."""
        return self.policy(prepared)[0]

    def prefill(self, prepared: Prepared) -> torch.Tensor:
        """Images and prompt to the first hidden state to choose from."""
        from pi0_fast.model.masks import attention_mask, sequence_layout

        model = self.policy.model
        with torch.inference_mode():
            ids, valid, causal = (
                torch.from_numpy(part) for part in (prepared.prompt.ids, prepared.prompt.valid, prepared.prompt.causal)
            )
            features = model.encode_images(prepared.images[:, 0])
            embeddings = torch.cat((features, model.embed(ids)), dim=1)
            valid, causal, positions = sequence_layout(valid.new_ones(features.shape[:2]), valid, causal)
            cache = model.new_cache(BATCH, valid.shape[1] + TARGET_LENGTH)
            last = torch.full((BATCH, 1), valid.shape[1] - 1)
            return model.prefill(embeddings, attention_mask(valid, causal), positions, cache, last)

    def generate(self, prepared: Prepared, steps: int | None = None, *, free: bool = False, cached: bool = True) -> Any:
        """Encode the images and generate: under the grammar, or freely `steps` ids of the whole vocabulary."""
        from pi0_fast.decode import FreeChoice, generate

        prompt, model = prepared.prompt, self.policy.model
        parts = (torch.from_numpy(part) for part in (prompt.ids, prompt.valid, prompt.causal))
        with torch.no_grad():
            return generate(
                model, model.encode_images(prepared.images[:, 0]), None, *parts,
                choice=FreeChoice(self.preparation.prompt.end_id) if free else self.policy._choice,
                max_steps=steps, use_cache=cached, log_probabilities=False,
            )  # fmt: skip

    def preprocess(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """A batch of a dataset to the tensors that the loss is computed from; ids and valid come first."""
        made = self.preparation.training(batch).prompt
        return [torch.from_numpy(part) for part in (made.ids, made.valid, made.causal, made.label, made.weight)]


# --------------------------------------------------------------------------------------------------- what is compared


def samples(count: int, noise: float) -> dict[str, Any]:
    """A batch as a dataset gives it: states [N, 14], action chunks [N, 50, 14], tasks; fewest tokens without noise."""
    chunks, _, _ = simulated(HORIZON, 20 * count, DIMS)
    chunks = chunks[::20] + np.random.default_rng(1).normal(0, noise, (count, HORIZON, DIMS)).astype(np.float32)
    tasks = [lerobot_twin.TASKS[i % len(lerobot_twin.TASKS)] for i in range(count)]
    states = torch.from_numpy(np.ascontiguousarray(chunks[:, 0]))
    return {"observation.state": states, "action": torch.from_numpy(chunks), "task": tasks}


def prepare(directory: Path, vocab_size: int, noise: float) -> None:
    """Tokenizers and statistics for one vocabulary; noise in the actions makes their tokens short and many."""
    directory.mkdir()
    lerobot_twin.make_text_tokenizer(directory / "text", vocab_size)
    chunks = samples(1000, noise)["action"].numpy()
    np.save(directory / "quantiles.npy", np.quantile(chunks[:, 0], (0.01, 0.99), axis=0).astype(np.float32))
    lerobot_twin.make_action_tokenizer(directory / "actions", chunks)


def twin(directory: Path, vocab_size: int) -> LerobotTwin:
    """lerobot's side; a checkpoint is written where there is none yet, and its weights are read where there is."""
    weights = directory / "model.safetensors"
    made = LerobotTwin(
        sizes(vocab_size), directory / "text", directory / "actions", chunk=(HORIZON, DIMS),
        quantiles=dict(zip(("q01", "q99"), np.load(directory / "quantiles.npy"), strict=True)),
        weights=weights if weights.exists() else None,
    )  # fmt: skip
    if not weights.exists():
        made.save(directory)
    return made


def check(theirs: LerobotTwin, ours: Ours, case: Case, batch: dict[str, Any]) -> None:
    """End the run where the two sides do not compute the same: the loss, greedy ids, the ids of a batch."""
    with torch.no_grad():
        losses = float(theirs.loss(*case.whole())), float(ours.loss(ours.pack(case)))
    if abs(losses[0] - losses[1]) > 1e-5 * losses[0]:
        sys.exit(f"losses differ: lerobot {losses[0]}, ours {losses[1]}")
    ids = theirs.generate(*case.prefix(), steps=8)
    found = ours.generate(ours.pack(case, targets=False, like_lerobot=True), 8, free=True).ids
    if not torch.equal(ids, found):
        sys.exit(f"greedy ids differ:\n{ids}\n{found}")
    whole, (ids, valid, *_) = theirs.preprocess(batch), ours.preprocess(batch)
    theirs_ids = torch.cat((whole["observation.language.tokens"], whole["action.tokens"]), dim=1)
    theirs_valid = torch.cat((whole["observation.language.attention_mask"], whole["action.token_mask"]), dim=1)
    if not torch.equal(theirs_ids[theirs_valid], ids[valid]):
        sys.exit("the ids of a batch differ")


def backward(loss: Callable[[], torch.Tensor], model: torch.nn.Module) -> Callable[[], None]:
    """Forward and backward; gradients are freed before the next call, so they count in the memory."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]

    return run


def compare_generation(theirs: LerobotTwin, ours: Ours, case: Case, repeats: int, goals: Goals) -> None:
    """Prefill, step and chunk."""
    prepared = ours.pack(case, targets=False)
    steps = ours.generate(prepared).steps
    ids = theirs.generate(*case.prefix(), steps=steps)
    prefill, whole, decoding, our_prefill, our_whole, our_chunk = medians(
        repeats,
        lambda: theirs.generate(*case.prefix(), steps=1),
        lambda: theirs.generate(*case.prefix(), steps=steps),
        lambda: theirs.decode(ids),
        lambda: ours.prefill(prepared),
        lambda: ours.generate(prepared),
        lambda: ours.policy.predict_action_chunk(prepared),
    )
    row("prefill", prefill, our_prefill, "s")
    row(f"step, mean of {steps}", (whole - prefill) / (steps - 1), (our_whole - our_prefill) / steps, "s", goals.step)
    row(f"chunk of {steps} tokens", whole + decoding, our_chunk, "s", goals.chunk)


def compare_loss(theirs: LerobotTwin, ours: Ours, case: Case, repeats: int, goals: Goals) -> None:
    """Forward and backward."""
    prepared = ours.pack(case)
    times = medians(
        repeats,
        backward(lambda: theirs.loss(*case.whole()), theirs.policy),
        backward(lambda: ours.loss(prepared), ours.policy),
    )
    theirs.policy.zero_grad(set_to_none=True)
    ours.policy.zero_grad(set_to_none=True)
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
        ours = Ours(directory, vocab_size, TARGET_LENGTH)
        prepared = ours.pack(case)
        run = backward(lambda: ours.loss(prepared), ours.policy)
    print(json.dumps(peak_of(run)))


def itself(ours: Ours, case: Case, repeats: int) -> None:
    """Our side alone: constrained, cached and compiled against what they replace, for the same number of tokens."""
    prepared, trained = ours.pack(case, targets=False), ours.pack(case)
    steps = ours.generate(prepared).steps
    run = backward(lambda: ours.loss(trained), ours.policy)
    free, plain, loss = medians(
        repeats, lambda: ours.generate(prepared, steps, free=True), lambda: ours.generate(prepared), run
    )
    uncached = medians(1, lambda: ours.generate(prepared, cached=False))[0]
    ours.policy.model.compile()
    compiled, compiled_loss = medians(repeats, lambda: ours.generate(prepared), run)
    print(f"  {'ours against itself, ' + str(steps) + ' tokens':44} {'first':>9} {'second':>9}")
    row("free, constrained", free, plain, "s")
    row("uncached, cached", uncached, plain, "s")
    row("eager, compiled", plain, compiled, "s")
    row("loss eager, compiled", loss, compiled_loss, "s")


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


def measure(directory: Path, vocab_size: int, filling: int, arguments: argparse.Namespace) -> None:
    """All parts for one vocabulary and one filling."""
    text, target = FILLINGS[filling]
    prepare(directory, vocab_size, NOISES[filling])
    print(f"vocabulary {vocab_size}; {text} of {TEXT_LENGTH} text, {target} of {TARGET_LENGTH} target positions valid")
    case = Case.random(vocab_size, text, target)
    if set(arguments.parts) != {"itself"}:
        theirs, ours = twin(directory, vocab_size), Ours(directory, vocab_size, target)
        compare(theirs, ours, case, directory, filling, arguments)
    if "itself" in arguments.parts:
        itself(Ours(directory, vocab_size, target), case, arguments.repeats)


def compare(
    theirs: LerobotTwin, ours: Ours, case: Case, directory: Path, filling: int, arguments: argparse.Namespace
) -> None:
    """Both sides, part by part."""
    batch = samples(32, NOISES[filling])
    check(theirs, ours, case, batch)
    vocab_size, repeats = ours.policy.model.architecture.text.vocab_size, arguments.repeats
    goals = GOALS.get(vocab_size, Goals(None, None, None, None))
    print(f"  {'':44} {'lerobot':>9} {'ours':>9}")
    if "generation" in arguments.parts:
        compare_generation(theirs, ours, case, repeats, goals)
    if "loss" in arguments.parts:
        compare_loss(theirs, ours, case, repeats, goals)
    if "memory" in arguments.parts:
        compare_memory(directory, vocab_size, filling, goals)
    if "preprocessing" in arguments.parts:
        times = medians(repeats, lambda: theirs.preprocess(batch), lambda: ours.preprocess(batch), calls=10)
        row("preprocessing of 32 samples", *times, "s", 20)


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
        arguments.parts = [part for part in arguments.parts if part == "itself"]
        if not arguments.parts:
            return
    for vocab_size in arguments.vocabularies:
        for filling in arguments.fillings:
            with tempfile.TemporaryDirectory() as temporary:
                measure(Path(temporary) / "made", vocab_size, filling, arguments)


if __name__ == "__main__":
    main()
