"""Claims: whether a policy likes cheaper tokens: success, cross entropy of a chunk and time, by kind of action tokens.

The task of `pi0-fast demo`, by the commands of the package, which are printed. Demonstrations are recorded once; on
them, with the same model, steps and seeds, policies are trained on the tokens of

  plain              order frequency, rounded
  rate-distortion    order frequency, the rate-distortion encoder, scale and rate weight chosen for plain's RMSE on
                     held-out episodes and the fewest tokens
  dimension first    rounded at plain's scale, which has the same error, but all of a joint's coefficients in a row
  both               (where asked for) order dimension, chosen as rate-distortion

For each seed of training (the first weights, the order of the frames) the policy acts in the same scenes, none of which
was recorded. Cross entropy is that of a whole chunk, all its tokens together, in nats, on held-out episodes: that of a
token cannot be compared where the numbers of tokens differ.

Two intervals stand beside each success, and answer two questions. That of the scenes holds for the very policies that
were trained: how they fare in other scenes. That over seeds holds for the kind of tokens: how a policy fares that is
trained again. Only the second says whether one kind is better than another.

A run that is finished is not done again: interrupt and go on as you like.

    python benchmarks/tokens_and_success.py [--output_dir DIR] [--seeds 5] [--steps 200] [--variants plain ...]

`--print_only` shows the tables of the runs that are there. It needs the extras `policy` and `metaworld`, and some three
minutes of processor time for each of the fifteen runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pi0_fast import PI0FastPolicy, demo
from pi0_fast.cli import main as command_line
from pi0_fast.configs import DemoConfig
from pi0_fast.data.reader import open_dataset
from pi0_fast.reports.evaluation import SUCCESS
from pi0_fast.reports.intervals import Paired, paired_difference, wilson
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.metrics import read_metrics

PLAIN = "plain"
#: Flags of `train-tokenizer`; the second of each: whether the error of plain's tokens is its target.
VARIANTS: dict[str, tuple[dict[str, str], bool]] = {
    PLAIN: ({}, False),
    "rate-distortion": ({"--order": "frequency"}, True),
    "dimension first": ({"--order": "dimension"}, False),
    "both": ({"--order": "dimension"}, True),
}
#: 97.5 % quantiles of Student's t, by degrees of freedom from 1 on; for more the last is taken, which is too wide.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
#: As the demo's, but with less training: with all of it every kind of token succeeds nearly always.
PLAN = replace(demo.Plan(), steps=200, free=False)
#: For a quick try, and for the test of this script.
TOY = replace(
    PLAN,
    env_type="toy", tasks=("reach-green",), cameras=("top", "hand"), image_size=32, episodes=6, every=2,
    keep_after_success=4, noise=("--noise_std=0.05",), horizon=4, executed=2, width=32, layers=1, steps=4, batch_size=4,
    eval_episodes=2, eval_steps=6,
)  # fmt: skip


def command(arguments: Sequence[str], **changes: str | None) -> None:
    """Run one command line of the package; flags in `changes` (`__` for `.`) are set, or left out where None.

    A command that fails ends this script.
    """
    flags = dict(flag.partition("=")[::2] for flag in arguments[1:])
    for name, value in changes.items():
        flag = "--" + name.replace("__", ".")
        if value is None:
            flags.pop(flag, None)
        else:
            flags[flag] = value
    line = [arguments[0], *(f"{flag}={value}" for flag, value in flags.items())]
    print("\npi0-fast " + " ".join(line), flush=True)
    if command_line(line) != 0:
        sys.exit(f"pi0-fast {arguments[0]} failed")


def rmse_of(tokenizer: Path) -> float:
    """On held-out episodes, in normalised units."""
    metadata = json.loads((tokenizer / "metadata.json").read_text(encoding="utf-8"))
    return float(metadata["held_out"]["normalized_rmse"])


class Comparison:
    """The runs of one directory.

    Attributes:
        output: the directory: dataset/, frames/, tokenizers/, runs/ and results/VARIANT/SEED.json.
        plan: how much of everything.
    """

    def __init__(self, output: Path, plan: demo.Plan) -> None:
        self.output, self.plan = output, plan
        found = demo.chapters(plan, output, DemoConfig(output_dir=str(output), seed=0))
        self._record, self._fit, _, self._train, self._drive = (chapter.arguments for chapter in found[:5])

    def prepare(self, variants: Sequence[str]) -> None:
        """Demonstrations and tokenizers, where they are not there yet."""
        (self.output / "tokenizers").mkdir(parents=True, exist_ok=True)
        if not (self.output / "dataset").exists():
            command(self._record)
        sizes = json.dumps(demo.architecture(self.plan), indent=2)
        (self.output / demo.ARCHITECTURE_FILE).write_text(sizes + "\n", encoding="utf-8")
        for variant in dict.fromkeys([PLAIN, *variants]):
            flags, as_good_as_plain = VARIANTS[variant]
            if self.tokenizer(variant).exists():
                continue
            target = {"target_rmse": f"{rmse_of(self.tokenizer(PLAIN)):.6f}"} if as_good_as_plain else {}
            changes = {flag.removeprefix("--"): value for flag, value in flags.items()} | target
            command(self._fit, output_dir=str(self.tokenizer(variant)), **changes)

    def tokenizer(self, variant: str) -> Path:
        """Directory of its action tokenizer."""
        return self.output / "tokenizers" / variant.replace(" ", "_")

    def result(self, variant: str, seed: int) -> Path:
        """File of what was measured."""
        return self.output / "results" / variant.replace(" ", "_") / f"{seed}.json"

    def run(self, variant: str, seed: int) -> None:
        """Train, measure on held-out episodes, drive; what was measured goes into `result`."""
        place = self.output / "runs" / variant.replace(" ", "_") / str(seed)
        command(
            self._train, seed=str(seed), output_dir=str(place / "policy"), dataset__val_fraction="0.1",
            eval_freq=str(self.plan.steps), max_eval_samples="500", resume=str((place / "policy").exists()).lower(),
            policy__action_tokenizer_name=str(self.tokenizer(variant)),
        )  # fmt: skip
        # Training that a signal ends saves and ends well, but is not finished.
        if int((place / "policy/checkpoints/last").resolve().name) != self.plan.steps:
            sys.exit(f"the training in {place} was stopped; call again to go on")
        policy = place / "policy/checkpoints/last/pretrained_model"
        driven = place / "evaluation"
        resume = str(driven.exists()).lower()
        command(self._drive, policy__path=str(policy), output_dir=str(driven), save_videos=None, resume=resume)
        lines = read_metrics(place / "policy")
        held_out = [line for line in lines if line["kind"] == "validation"][-1]
        acted = json.loads((driven / "evaluation.json").read_text(encoding="utf-8"))["policies"][0]
        (task,) = acted["tasks"].values()
        made = {
            "success": {str(each["seed"]): each["end"] == SUCCESS for each in acted["episodes"]},
            "rmse": rmse_of(self.tokenizer(variant)),
            "target_tokens": held_out["action_tokens"] / held_out["frames"],
            "cross_entropy": held_out["loss"] * held_out["loss_units"] / held_out["frames"],
            "action_l1": held_out["action_l1"],
            "tokens": task["tokens"],
            "training_seconds": sum(line["step_s"] * line["steps"] for line in lines if line["kind"] == "train"),
        }
        file = self.result(variant, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(made) + "\n", encoding="utf-8")
        os.replace(partial, file)

    def chunk_seconds(self, variants: Sequence[str], seed: int, frames: int = 60) -> dict[str, float]:
        """Processor seconds of one predicted chunk, mean over frames of the dataset, the variants turn by turn.

        Whoever comes first with a frame finds cold caches, and needs up to a tenth longer: each does as often. The
        first frame is not counted.
        """
        reader = open_dataset(demo.REPO_ID, root=self.output / "dataset")
        dataset = FrameDataset(reader, chunk_size=self.plan.horizon, camera_keys=reader.camera_keys)
        place = "policy/checkpoints/last/pretrained_model"
        policies = {
            variant: PI0FastPolicy.from_pretrained(self.output / "runs" / variant.replace(" ", "_") / str(seed) / place)
            for variant in variants
        }
        spent = dict.fromkeys(variants, 0.0)
        turns = list(policies.items())
        for turn, index in enumerate(np.linspace(0, len(dataset) - 1, frames + 1).astype(int).tolist()):
            batch = {key: value for key, value in dataset.batch([index]).items() if not key.startswith("action")}
            turns.append(turns.pop(0))
            for variant, policy in turns:
                begun = time.process_time()
                policy.predict_action_chunk(batch)
                spent[variant] += (time.process_time() - begun) * (turn > 0)
        return {variant: seconds / frames for variant, seconds in spent.items()}

    def results(self, variants: Sequence[str], seeds: range) -> dict[str, dict[int, dict[str, Any]]]:
        """What is there."""
        return {
            variant: {
                seed: json.loads(self.result(variant, seed).read_text(encoding="utf-8"))
                for seed in seeds
                if self.result(variant, seed).exists()
            }
            for variant in variants
        }


def share(low_high: tuple[float, float], signed: bool = False) -> str:
    """An interval in percent."""
    return " to ".join(f"{100 * value:+.0f}" if signed else f"{100 * value:.0f}" for value in low_high)


def over_seeds(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of what trainings from different seeds gave; None of fewer than two.

    Student's: one value a training, since scenes of one policy succeed and fail together.
    """
    if len(values) < 2:
        return None
    middle = statistics.mean(values)
    quantile = STUDENT_95[min(len(values) - 2, len(STUDENT_95) - 1)]
    reach = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return middle - reach, middle + reach


def success_of(run: dict[str, Any]) -> float:
    """Share of the scenes of one run."""
    return statistics.mean(map(float, run["success"].values()))


def compared(first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]]) -> Paired:
    """The same scenes after training from the same seeds."""
    total = Paired(0, 0, 0, 0)
    for seed in first.keys() & second.keys():
        one, other = first[seed]["success"], second[seed]["success"]
        pairs = [(one[scene], other[scene]) for scene in one.keys() & other.keys()]
        kinds = ((True, True), (True, False), (False, True), (False, False))
        total += Paired(*(pairs.count(kind) for kind in kinds))
    return total


def show(results: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Two tables in Markdown."""
    print("\nMean over seeds, plus or minus the standard deviation where it says so; success of all scenes together.\n")
    print(
        "| tokens | runs | success, % | 95 %, scenes | 95 %, seeds | of each run | tokens/chunk | RMSE | nats/chunk | "
        "error of chunks |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for variant, runs in results.items():
        if not runs:
            continue
        succeeded = sum(sum(run["success"].values()) for run in runs.values())
        count = sum(len(run["success"]) for run in runs.values())
        each = [success_of(runs[seed]) for seed in sorted(runs)]
        seeds = over_seeds(each)

        def mean(name: str, digits: int, runs: dict[int, dict[str, Any]] = runs, spread: bool = False) -> str:
            values = [run[name] for run in runs.values()]
            deviation = f" ± {statistics.stdev(values):.{digits}f}" if spread and len(values) > 1 else ""
            return f"{statistics.mean(values):.{digits}f}{deviation}"

        print(
            f"| {variant} | {len(runs)} | {100 * succeeded / count:.1f} | {share(wilson(succeeded, count))} | "
            f"{share((max(seeds[0], 0.0), min(seeds[1], 1.0))) if seeds else '-'} | "
            f"{', '.join(f'{100 * value:.0f}' for value in each)} | {mean('target_tokens', 2)} | "
            f"{mean('rmse', 4)} | {mean('cross_entropy', 2, spread=True)} | {mean('action_l1', 4, spread=True)} |"
        )
    print("\nAgainst plain, from the same seeds:\n")
    print("| tokens | scenes | success, points | 95 %, scenes | 95 %, seeds | ratio of nats | ratio of tokens |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    plain = results.get(PLAIN, {})
    for variant, runs in results.items():
        common = sorted(plain.keys() & runs.keys())
        if variant == PLAIN or not common:
            continue
        pairs = compared(plain, runs)
        differences = over_seeds([success_of(runs[seed]) - success_of(plain[seed]) for seed in common])
        cells = []
        for name in ("cross_entropy", "target_tokens"):
            ratios = [runs[seed][name] / plain[seed][name] for seed in common]
            reach = over_seeds(ratios)
            cells.append(f"{statistics.mean(ratios):.3f}" + (f" ({reach[0]:.3f} to {reach[1]:.3f})" if reach else ""))
        print(
            f"| {variant} | {pairs.count} | {100 * pairs.difference:+.1f} | "
            f"{share(paired_difference(pairs), signed=True)} | "
            f"{share(differences, signed=True) if differences else '-'} | {' | '.join(cells)} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("tokens_and_success_output"))
    parser.add_argument("--seeds", type=int, default=5, help="of training: 0, 1, ...")
    parser.add_argument("--steps", type=int, default=None, help=f"of training, else {PLAN.steps}")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS)[:3])
    parser.add_argument("--toy", action="store_true", help="a toy instead of Meta-World, and next to no training")
    parser.add_argument("--print_only", action="store_true")
    options = parser.parse_args(arguments)
    plan = TOY if options.toy else PLAN
    plan = replace(plan, steps=options.steps or plan.steps)
    comparison, seeds = Comparison(options.output_dir, plan), range(options.seeds)
    if not options.print_only:
        comparison.prepare(options.variants)
        for seed in seeds:
            for variant in options.variants:
                if not comparison.result(variant, seed).exists():
                    comparison.run(variant, seed)
    results = comparison.results(options.variants, seeds)
    show(results)
    finished = [seed for seed in seeds if all(seed in runs for runs in results.values())]
    if finished:
        each = [comparison.chunk_seconds(options.variants, seed) for seed in finished]
        shown = (
            f"{variant} {1000 * statistics.mean(one[variant] for one in each):.1f}" for variant in options.variants
        )
        print(f"\nMilliseconds of processor time for a chunk: {', '.join(shown)}")


if __name__ == "__main__":
    main()
