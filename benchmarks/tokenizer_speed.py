"""Claims: how many times faster than the published way, and how many tokens per chunk, on the same chunks.

Both sides run in this process on all processors, turn by turn; each time is the median of `--repeats`. Without `--root`
the chunks are of a simulated robot of 26 joints; with it, of any LeRobot dataset.

    python benchmarks/tokenizer_speed.py [--root DIR] [--horizon 50] [--chunks 20000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.actions.chunks import ActionSelection, split_episodes
from pi0_fast.data import open_dataset
from reference_twin import ReferenceTwin

FloatArray = npt.NDArray[np.float32]
SCALE, VOCAB_SIZE = 10.0, 1024


def simulated(horizon: int, chunks: int, dims: int = 26) -> tuple[FloatArray, FloatArray, FloatArray]:
    """All, fitted and held-out chunks of joints that move between random poses on minimum-jerk paths, with noise."""
    random = np.random.default_rng(0)
    time_ = np.linspace(0, 1, 60)
    smooth = (10 * time_**3 - 15 * time_**4 + 6 * time_**5)[:, None]
    parts, pose = [], random.uniform(-1, 1, dims)
    while sum(map(len, parts)) < chunks * 1.2 + horizon:
        target = np.where(random.random(dims) < 0.4, random.uniform(-1, 1, dims), pose)
        parts.append(pose + smooth * (target - pose))
        pose = target
    path = np.concatenate(parts) + random.normal(0, 0.002, (sum(map(len, parts)), dims))
    windows = np.lib.stride_tricks.sliding_window_view(np.clip(path, -1, 1).astype(np.float32), horizon, axis=0)
    every = np.ascontiguousarray(windows.transpose(0, 2, 1))
    return every[:chunks], every[: chunks * 9 // 10], every[chunks + horizon :][: chunks // 10]


def recorded(root: Path, horizon: int, chunks: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """All, fitted and held-out chunks of a dataset, normalised by the quantiles of all its frames."""
    reader = open_dataset("local/benchmark", root=root)
    size = reader.feature("action").shape[0]
    selection = ActionSelection.create(size)
    episodes = {e.index: e.columns["action"] for e in reader.iter_episodes(["action"]) if e.length >= horizon}
    normalizer = Normalizer.fit(lambda: iter(episodes.values()))
    train, held_out = split_episodes(list(episodes), 0.1, 0)
    sets = []
    for indices in (train, held_out):
        blocks = [b for i in indices for b in selection.all_windows(episodes[i], None, horizon)]
        sets.append(normalizer.apply(np.concatenate(blocks)))
    return np.concatenate(sets)[:chunks], sets[0][:chunks], sets[1]


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Mean seconds of some calls in a row."""
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begun) / calls


def medians(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Median seconds of each function, turn by turn; what is quick is called several times in a row, for 0.1 s."""
    calls = [max(1, math.ceil(0.1 / seconds(function, 1))) for function in functions]
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, count, taken in zip(functions, calls, times, strict=True):
            taken.append(seconds(function, count))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=None)
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument("--chunks", type=int, default=20_000, help="fit and time on at most this many")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    source = (
        recorded(arguments.root, arguments.horizon, arguments.chunks)
        if arguments.root
        else simulated(arguments.horizon, arguments.chunks)
    )
    every, fitted, held_out = source
    settings: dict[str, Any] = {"scale": SCALE, "vocab_size": VOCAB_SIZE}
    warm = FastTokenizer.fit(every[:64], **settings)  # compiles the kernels, where that was not done before
    warm.decode(warm.encode(every[:64]))
    fit = medians(
        arguments.repeats,
        lambda: ReferenceTwin(every, **settings),
        lambda: FastTokenizer.fit(every, **settings),
    )
    twin, ours = ReferenceTwin(every, **settings), FastTokenizer.fit(every, **settings)
    few = every[:: max(1, len(every) // 2000)]
    ids, padded, theirs = ours.encode(every), ours.encode_padded(every), twin.encode(few)
    print(f"{len(every)} chunks of {every.shape[1]}x{every.shape[2]}, vocabulary {VOCAB_SIZE}, scale {SCALE}")
    print(f"{'':28} {'reference':>12} {'ours':>12} {'ratio':>7}")
    print(f"{'fit, seconds':28} {fit[0]:>12.2f} {fit[1]:>12.2f} {fit[0] / fit[1]:>7.1f}")

    def row(what: str, theirs: Callable[[], Any], ours: Callable[[], Any], count: int) -> None:
        """Chunks per second; the reference on `few`."""
        slow, quick = medians(arguments.repeats, theirs, ours)
        rates = len(few) / slow, count / quick
        print(f"{what:28} {rates[0]:>12,.0f} {rates[1]:>12,.0f} {rates[1] / rates[0]:>7.1f}", flush=True)

    row("encode to arrays, chunks/s", lambda: twin.encode(few), lambda: ours.encode_padded(every), len(every))
    row("encode to lists", lambda: twin.encode(few), lambda: ours.encode(every), len(every))
    row(
        "encode one at a time",
        lambda: [twin.encode(chunk[None]) for chunk in few],
        lambda: [ours.encode(chunk) for chunk in few],
        len(few),
    )
    row("decode from arrays", lambda: twin.decode(theirs), lambda: ours.decode(padded), len(every))
    row("decode from lists", lambda: twin.decode(theirs), lambda: ours.decode(ids), len(every))
    row(
        "decode one at a time",
        lambda: [twin.decode([row]) for row in theirs],
        lambda: [ours.decode(row) for row in ids[: len(few)]],
        len(few),
    )
    twin, ours = ReferenceTwin(fitted, **settings), FastTokenizer.fit(fitted, **settings)
    rates = [np.mean([len(i) for i in tokenizer.encode(held_out)]) for tokenizer in (twin, ours)]
    print(f"{'tokens per held-out chunk':28} {rates[0]:>12.2f} {rates[1]:>12.2f} {rates[1] / rates[0]:>7.3f}")


if __name__ == "__main__":
    main()
