"""Claim: what a dataset of 10,000 hours needs in disk, memory, decoding and tokenisation, from rates measured here.

Everything is measured on one thread on a small dataset and multiplied: bytes on disk and in memory per frame, frames
decoded per second one after the other and in random order, frames read and chunks tokenised per second, and the fit of
a tokenizer, which looks at no more chunks of a larger dataset. With `--root` (a LeRobot dataset with video, v2.1 or
v3.0) the rates are those of real recordings; without it a dataset of moving pictures is made, whose bytes per frame say
nothing about cameras, which is printed too.

    python benchmarks/data_scaling.py [--root DIRECTORY] [--hours 10000] [--rows_per_s 32] [--horizon 50]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.data import LeRobotReader, LeRobotWriter, open_dataset
from pi0_fast.data.cameras import Cameras
from pi0_fast.training.frames import FrameDataset

#: What `train-tokenizer` fits on at most (the default of its flag max_chunks).
FIT_CHUNKS = 200_000
#: Frames that are decoded for a rate.
DECODED = 64


@dataclass(frozen=True)
class Rates:
    """Measured on one thread.

    Attributes:
        fps, cameras: of the dataset.
        number_bytes: of its columns on disk, per frame.
        video_bytes: per frame and camera on disk.
        held_bytes: per frame in the memory of a training process.
        in_order, random: pictures decoded per second.
        read: frames per second whose numbers are read and checked.
        tokenised: chunks per second.
        fit_s: seconds to fit a tokenizer on FIT_CHUNKS chunks, scaled from those that there are.
    """

    fps: float
    cameras: int
    number_bytes: float
    video_bytes: float
    held_bytes: float
    in_order: float
    random: float
    read: float
    tokenised: float
    fit_s: float


def seconds(function: Callable[[], Any]) -> float:
    """CPU seconds of a call: the same as seconds on a machine that does nothing else."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


def make_dataset(root: Path) -> None:
    """Two episodes of slow joints before a camera that moves over a noisy gradient."""
    random = np.random.default_rng(0)
    height, width, frames, dims = 240, 320, 80, 14
    base = np.linspace(0, 200, width)[None, :, None] + random.integers(0, 40, (height, width, 3))
    numbers = {key: {"dtype": "float32", "shape": [dims]} for key in ("observation.state", "action")}
    camera = {"observation.images.front": {"dtype": "video", "shape": [height, width, 3]}}
    with LeRobotWriter(root, fps=30, features={**numbers, **camera}) as writer:
        for _ in range(2):
            path = random.normal(0, 0.02, (frames, dims)).cumsum(axis=0).cumsum(axis=0).astype(np.float32)
            pictures = (np.roll(base, 2 * frame, axis=1).astype(np.uint8) for frame in range(frames))
            writer.add_episode(
                {"observation.state": path, "action": path, "observation.images.front": pictures}, task="move"
            )


def measure(root: Path, horizon: int) -> Rates:
    """All rates of a dataset."""
    reader = open_dataset("local/it", root=root)
    frames = sum(record.length for record in reader.episodes)

    def numbers() -> None:
        for _ in reader.iter_episodes(["observation.state", "action"]):
            pass

    numbers()  # once before, for what is loaded on first use
    read = seconds(numbers)
    dataset = FrameDataset(reader, chunk_size=horizon, camera_keys=reader.camera_keys, whole_only=True)
    in_order, random = decoding(reader, dataset)
    tokenised, fit_s = tokenising(reader, horizon)
    videos = _bytes(root / "videos")
    cameras = len(reader.camera_keys)
    return Rates(
        fps=reader.fps,
        cameras=cameras,
        number_bytes=_bytes(root / "data") / frames,
        video_bytes=videos / frames / max(cameras, 1),
        held_bytes=_held(dataset) / frames,
        in_order=in_order,
        random=random,
        read=frames / read,
        tokenised=tokenised,
        fit_s=fit_s,
    )


def decoding(reader: LeRobotReader, dataset: FrameDataset) -> tuple[float, float]:
    """Pictures per second of the first camera one after the other, and of all cameras in random order."""
    key, record = reader.camera_keys[0], reader.episodes[0]
    (times,) = (found.columns["timestamp"][:, 0] for found in reader.iter_episodes(["timestamp"], [record.index]))
    count = min(DECODED, record.length)
    cameras = Cameras(reader, [key], [record.index])
    in_order = seconds(lambda: cameras.frames(key, record.index, range(count), times[:count].astype(np.float64)))
    order = np.random.default_rng(0).integers(0, len(dataset), DECODED)
    dataset.batch(order[:2])  # opens the files
    random = seconds(lambda: [dataset.batch(order[first : first + 8]) for first in range(0, DECODED, 8)])
    return count / in_order, DECODED * len(dataset.camera_keys) / random


def tokenising(reader: LeRobotReader, horizon: int) -> tuple[float, float]:
    """Chunks per second from robot units to ids, and seconds of a fit."""
    paths = [episode.columns["action"].astype(np.float32) for episode in reader.iter_episodes(["action"])]
    normalizer = Normalizer.fit(lambda: iter(paths))
    windows = [np.lib.stride_tricks.sliding_window_view(p, horizon, axis=0) for p in paths if len(p) >= horizon]
    chunks = np.concatenate([window.transpose(0, 2, 1) for window in windows])
    fitted = normalizer.apply(chunks)
    FastTokenizer.fit(fitted[:64], vocab_size=1024)  # compiles the kernels, where that was not done before
    tokenizer: FastTokenizer | None = None

    def fit() -> None:
        nonlocal tokenizer
        tokenizer = FastTokenizer.fit(fitted, vocab_size=1024, normalizer=normalizer)

    fit_s = seconds(fit) * FIT_CHUNKS / len(fitted)
    assert tokenizer is not None
    tokenizer.encode_actions(chunks[:64])
    repeats = max(1, 20_000 // len(chunks))
    taken = seconds(lambda: [tokenizer.encode_actions(chunks) for _ in range(repeats)])
    return repeats * len(chunks) / taken, fit_s


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _held(dataset: FrameDataset) -> int:
    """Bytes of the arrays that a dataset keeps."""
    arrays = {id(value): value for value in vars(dataset).values() if isinstance(value, np.ndarray)}
    return sum(array.nbytes for array in arrays.values())


def table(rates: Rates, hours: float, rows_per_s: float) -> list[str]:
    """Rows of markdown."""
    frames = hours * 3600 * rates.fps
    pictures = frames * rates.cameras
    rows = [
        ("frames", f"{frames:,.0f}"),
        ("disk, numbers", f"{frames * rates.number_bytes / 1e9:,.0f} GB"),
        ("disk, video", f"{pictures * rates.video_bytes / 1e12:,.1f} TB"),
        ("memory of a training process, numbers", f"{frames * rates.held_bytes / 1e9:,.0f} GB"),
        ("reading all numbers", _core_hours(frames / rates.read)),
        ("fitting a tokenizer, beside reading", _core_hours(rates.fit_s)),
        ("tokenising a chunk at every frame", _core_hours(frames / rates.tokenised)),
        ("decoding every picture once, in order", _core_hours(pictures / rates.in_order)),
        ("decoding every picture once, in random order", _core_hours(pictures / rates.random)),
        (f"cores that decode for {rows_per_s:g} rows/s", f"{rows_per_s * rates.cameras / rates.random:,.1f}"),
        (f"days of one pass at {rows_per_s:g} rows/s", f"{frames / rows_per_s / 86_400:,.0f}"),
    ]
    return [f"| {hours:,.0f} hours at {rates.fps:g}/s, {rates.cameras} camera(s) | |", "| --- | --- |"] + [
        f"| {name} | {value} |" for name, value in rows
    ]


def _core_hours(taken_s: float) -> str:
    return f"{taken_s:.1f} s of one core" if taken_s < 600 else f"{taken_s / 3600:,.1f} core hours"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a LeRobot dataset with video; without it one is made")
    parser.add_argument("--hours", type=float, default=10_000)
    parser.add_argument("--rows_per_s", type=float, default=32, help="samples that the GPUs take; see scaling.py")
    parser.add_argument("--horizon", type=int, default=50, help="steps of a chunk")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.root
        if root is None:
            root = Path(folder) / "made"
            make_dataset(root)
            print("made-up pictures: bytes of video and rates of decoding are not those of cameras; give --root")
        rates = measure(root, arguments.horizon)
    print("\n".join(f"{name:14} {value:,.4g}" for name, value in vars(rates).items()))
    print("\n" + "\n".join(table(rates, arguments.hours, arguments.rows_per_s)))


if __name__ == "__main__":
    main()
