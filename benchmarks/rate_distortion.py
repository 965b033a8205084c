"""Claims: how many tokens per chunk rate-distortion encoding takes at the error of the published way, and how fast.

Fitted on some episodes of LeRobot datasets, measured on others. The published way (`reference_twin.py`) is at scale 10;
ours is fitted at several scales for each rate weight, and its tokens are read off where its RMSE is the same
(logarithms, straight lines between the scales). Everything runs in this process; the published way encodes one chunk at
a time, ours on all processors.

    python benchmarks/rate_distortion.py [--root DIR ...] [--horizon 16 50] [--published DIR]

Without `--root` the chunks are of a simulated robot of 26 joints.
`--published`: the directory of a published tokenizer, such as FAST+, which is then encoded with at its own scale.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast import FastTokenizer
from pi0_fast.actions.dct import ORDERS, Order
from reference_twin import ReferenceTwin
from tokenizer_speed import medians, recorded, simulated

FloatArray = npt.NDArray[np.float32]
SCALE, VOCAB_SIZE = 10.0, 1024
SCALES = (9.0, 11.0, 13.5, 16.5)
RATE_WEIGHTS = (0.0, 0.3, 0.6, 1.0, 1.5)
SPEED_WEIGHTS = (0.3, 0.6)
PUBLISHED_WEIGHTS = (0.05, 0.1, 0.15, 0.2)


def rmse(decoded: FloatArray, chunks: FloatArray) -> float:
    """Root mean square error over all values, in normalised units."""
    return float(np.sqrt(np.mean(np.square(decoded.astype(np.float64) - chunks))))


def measured(tokenizer: FastTokenizer, chunks: FloatArray, weight: float) -> tuple[float, float]:
    """RMSE and tokens per chunk."""
    rows = tokenizer.encode(chunks, rate_weight=weight)
    decoded = tokenizer.decode(rows, time_horizon=chunks.shape[1], action_dim=chunks.shape[2])
    return rmse(decoded, chunks), float(np.mean([len(row) for row in rows]))


def tokens_at(error: float, points: list[tuple[float, float]]) -> float:
    """Tokens where the line through (RMSE, tokens) has that error; NaN where it does not reach it."""
    errors, tokens = np.log(np.array(sorted(points)).T)
    if not errors[0] <= np.log(error) <= errors[-1]:
        return float("nan")
    return float(np.exp(np.interp(np.log(error), errors, tokens)))


def geometric(ratios: list[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.mean(np.log(ratios))))


def one_set(name: str, fitted: FloatArray, held_out: FloatArray) -> dict[tuple[Order, float], float]:
    """Print the lines of one set; tokens of each order and weight relative to the published way."""
    twin = ReferenceTwin(fitted, scale=SCALE, vocab_size=VOCAB_SIZE)
    ids = twin.encode(held_out)
    error, count = rmse(twin.decode(ids), held_out), float(np.mean([len(row) for row in ids]))
    print(f"\n{name}: {len(fitted)} chunks to fit, {len(held_out)} held out; RMSE {error:.4f}, reference {count:.2f}")
    ratios = {}
    for order in ORDERS:
        made = [FastTokenizer.fit(fitted, scale=s, vocab_size=VOCAB_SIZE, order=order) for s in SCALES]
        for weight in RATE_WEIGHTS:
            tokens = tokens_at(error, [measured(tokenizer, held_out, weight) for tokenizer in made])
            ratios[order, weight] = tokens / count
            print(f"  {order:10} rate weight {weight:<4g} {tokens:8.2f} tokens, ratio {tokens / count:.3f}", flush=True)
        speed(twin, made[0], held_out)
    return ratios


def speed(twin: ReferenceTwin, tokenizer: FastTokenizer, chunks: FloatArray) -> None:
    """Print chunks per second of the published way's plain encoding and of ours, turn by turn.

    On all processors by the clock, which other work on the machine distorts, and per second of processor time.
    """
    few = chunks[:: max(1, len(chunks) // 500)]
    many = np.tile(chunks, (max(1, 200_000 // chunks.size), 1, 1))
    tokenizer.encode_padded(chunks[:2], rate_weight=0.3)
    slow, *quick = medians(
        3,
        lambda: twin.encode(few),
        *(lambda weight=weight: tokenizer.encode_padded(many, rate_weight=weight) for weight in SPEED_WEIGHTS),
    )
    slow_processor = processor_time(lambda: twin.encode(few)) / len(few)
    for weight, seconds in zip(SPEED_WEIGHTS, quick, strict=True):
        used = processor_time(partial(tokenizer.encode_padded, many, rate_weight=weight)) / len(many)
        ratio = slow / len(few) / (seconds / len(many))
        print(
            f"  {tokenizer.order:10} rate weight {weight:<4g} chunks/s: reference {len(few) / slow:,.0f}, ours "
            f"{len(many) / seconds:,.0f} ({ratio:.1f}x); per second of processor time {1 / slow_processor:,.0f}, "
            f"{1 / used:,.0f} ({slow_processor / used:.1f}x)",
            flush=True,
        )


def processor_time(function: Callable[[], Any]) -> float:
    """Seconds of processor time that all threads of this process spend on it; the least of three."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        function()
        taken.append(time.process_time() - begun)
    return min(taken)


def published(directory: Path, sets: dict[str, FloatArray]) -> None:
    """Print tokens and RMSE of a published tokenizer with each weight, relative to its own encoding."""
    tokenizer = FastTokenizer.from_pretrained(directory)
    print(f"\n{directory.name}, at its own scale, relative to its plain encoding")
    table = defaultdict(list)
    for name, chunks in sets.items():
        plain = measured(tokenizer, chunks, 0.0)
        for weight in PUBLISHED_WEIGHTS:
            error, tokens = measured(tokenizer, chunks, weight)
            table[weight].append((tokens / plain[1], error / plain[0]))
            print(
                f"  {name:28} rate weight {weight:<4g} {plain[1]:7.2f} -> {tokens:7.2f} tokens, ratio "
                f"{tokens / plain[1]:.3f}, RMSE {100 * (error / plain[0] - 1):+.2f} %",
                flush=True,
            )
    for weight, pairs in table.items():
        tokens, error = (geometric(list(column)) for column in zip(*pairs, strict=True))
        print(f"  geometric mean, rate weight {weight:<4g}: tokens {tokens:.3f}, RMSE {100 * (error - 1):+.2f} %")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, nargs="+", default=[None])
    parser.add_argument("--horizon", type=int, nargs="+", default=[16, 50], help="one for all sets, or several")
    parser.add_argument("--chunks", type=int, default=8000, help="fit on at most this many")
    parser.add_argument("--held_out", type=int, default=1000, help="measure on at most this many")
    parser.add_argument("--published", type=Path, default=None)
    arguments = parser.parse_args()
    held: dict[str, FloatArray] = {}
    found = []
    for root in arguments.root:
        for horizon in arguments.horizon:
            source = recorded(root, horizon, arguments.chunks) if root else simulated(horizon, arguments.chunks)
            _, fitted, chunks = source
            chunks = np.ascontiguousarray(chunks[:: max(1, len(chunks) // arguments.held_out)][: arguments.held_out])
            name = f"{root.name if root else 'simulated'} {horizon}x{chunks.shape[2]}"
            held[name] = chunks
            found.append(one_set(name, fitted, chunks))
    print("\ngeometric mean over the sets of tokens relative to the reference at its RMSE")
    for weight in RATE_WEIGHTS:
        means = {order: geometric([ratios[order, weight] for ratios in found]) for order in ORDERS}
        auto = geometric([min(ratios[order, weight] for order in ORDERS) for ratios in found])
        shown = ", ".join(f"{order} {mean:.3f}" for order, mean in means.items())
        print(f"  rate weight {weight:<4g} {shown}, the better order of each set {auto:.3f}")
    if arguments.published:
        published(arguments.published, held)


if __name__ == "__main__":
    main()
