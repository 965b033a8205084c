"""Claims: how many times faster than lerobot 0.6.1, and in how much less memory, a whole training step is.

A step is forward, backward, clipping by norm, AdamW and the learning rate, on a batch that is ready: 4 rows of chunks
of 50x14, 1 camera, in float32 on one thread, the small sizes and the positions in use that policy_speed.py explains.
Both sides begin with the same weights, run in this process turn by turn, and must have the same loss after two steps,
or the run ends. Times are medians of CPU seconds. lerobot's side does what its training script does (AdamW as its
configuration builds it, torch's clipping, its scheduler); ours is `training.optimizer.Optimizer`. Memory is the
high-water mark of resident memory during the second step, of a process of its own for each side (Linux): weights,
gradients, AdamW's moments, activations, the libraries.

    python benchmarks/training_speed.py [--vocabularies 257152 4096] [--repeats 3]

It needs lerobot beside pi0-fast, as policy_speed.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import lerobot_twin
import policy_speed
from lerobot_twin import LerobotTwin
from policy_speed import NOISES, TARGET_LENGTH, Case, Ours, medians, peak_of, prepare, row, twin

#: Valid text and target positions of a row: what such prompts and chunks took in lerobot, and all target positions.
FILLINGS = ((75, 98), (75, TARGET_LENGTH))
#: The ratios of time and memory that the project set itself, for a vocabulary.
GOALS: dict[int, tuple[float, float | None]] = {257_152: (2.5, 2.0), 4096: (1.5, None)}
STEPS = 1000

Step = Callable[[], torch.Tensor]


def lerobots_step(theirs: LerobotTwin, case: Case) -> Step:
    """One update as lerobot's training script makes it; gives the loss."""
    policy = theirs.policy.train()
    optimizer = policy.config.get_optimizer_preset().build(policy.parameters())
    scheduler = policy.config.get_scheduler_preset().build(optimizer, STEPS)

    def run() -> torch.Tensor:
        loss = theirs.loss(*case.whole())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), policy.config.optimizer_grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    return run


def our_step(ours: Ours, case: Case) -> Step:
    """One update as the loop makes it; gives the loss."""
    from pi0_fast.training.optimizer import Optimizer

    policy, prepared = ours.policy.train(), ours.pack(case)
    optimizer = Optimizer(policy, policy.config, steps=STEPS)
    completed = 0

    def run() -> torch.Tensor:
        nonlocal completed
        loss = ours.loss(prepared)
        loss.backward()
        optimizer.step(completed)
        completed += 1
        return loss.detach()

    return run


def compare_time(directory: Path, vocab_size: int, case: Case, repeats: int) -> None:
    """CPU seconds of a step."""
    theirs = lerobots_step(twin(directory, vocab_size), case)
    ours = our_step(Ours(directory, vocab_size, TARGET_LENGTH), case)
    for number in range(3):
        losses = float(theirs()), float(ours())
        if abs(losses[0] - losses[1]) > 1e-4 * losses[0]:
            sys.exit(f"after {number} steps the losses differ: lerobot {losses[0]}, ours {losses[1]}")
    row("whole step", *medians(repeats, theirs, ours), "s", GOALS.get(vocab_size, (0, None))[0])


def compare_memory(directory: Path, vocab_size: int, filling: int) -> None:
    """The high-water mark of each side in a process of its own."""
    marks = []
    for side in ("lerobot", "ours"):
        command = [sys.executable, __file__, "--memory_of", side, "--directory", str(directory)]
        command += ["--vocabularies", str(vocab_size), "--fillings", str(filling)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        marks.append(json.loads(done.stdout.splitlines()[-1]) / 2**30)
    row("memory of it, whole process", *marks, "GiB", GOALS.get(vocab_size, (0, None))[1])


def measure_memory(side: str, directory: Path, vocab_size: int, filling: int) -> None:
    """Print the high-water mark of the second step: what the other process does."""
    case = Case.random(vocab_size, *FILLINGS[filling])
    if side == "lerobot":
        step = lerobots_step(twin(directory, vocab_size), case)
    else:
        step = our_step(Ours(directory, vocab_size, TARGET_LENGTH), case)
    step()
    print(json.dumps(peak_of(step)[1]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(GOALS))
    parser.add_argument("--fillings", type=int, nargs="+", default=[0, 1], help="0: 75 and 98 valid; 1: 75 and 256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory_of", choices=("lerobot", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    if arguments.memory_of:
        measure_memory(arguments.memory_of, arguments.directory, arguments.vocabularies[0], arguments.fillings[0])
        return
    try:
        lerobot_twin.import_lerobot()
    except ImportError as error:
        print(f"nothing to compare with: {error}")
        return
    for vocab_size in arguments.vocabularies:
        for filling in arguments.fillings:
            text, target = FILLINGS[filling]
            print(
                f"vocabulary {vocab_size}; {text} of {policy_speed.TEXT_LENGTH} text, {target} of {TARGET_LENGTH} "
                "target positions valid"
            )
            print(f"  {'':44} {'lerobot':>9} {'ours':>9}")
            with tempfile.TemporaryDirectory() as temporary:
                directory = Path(temporary) / "made"
                prepare(directory, vocab_size, NOISES[0])
                twin(directory, vocab_size)  # writes the checkpoint that both begin with
                case = Case.random(vocab_size, text, target)
                compare_time(directory, vocab_size, case, arguments.repeats)
                compare_memory(directory, vocab_size, filling)


if __name__ == "__main__":
    main()
