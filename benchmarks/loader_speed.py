"""Claim: how many times more frames a second the training data comes in than lerobot 0.6.1's, with PyAV on both sides.

Both sides read the same LeRobot v3.0 dataset with the same video files, in the same random order, a camera, the state
and chunks of 50 actions a sample, stacked into batches of 8. Without `--root` a dataset is made (3 episodes of 100
frames, 640 x 480, AV1, a key frame every second frame, as LeRobot writes); a dataset in `--root` (v2.1 or v3.0) is
copied first, its video streams as they are. Before anything is timed the first batch of both sides is compared.

What is measured, turn by turn:
  samples    in this process on one thread, CPU seconds: lerobot's `LeRobotDataset[i]` and torch's collation, our
             `FrameDataset.batch`; pictures as bytes on both sides, as both training commands have them
  workers    wall seconds of torch's DataLoader with lerobot's dataset, and of ours with the same number of workers
  cache      ours again, with the frames decoded before (`--dataset.cache_dir`)

    python benchmarks/loader_speed.py [--root DIRECTORY] [--batches 12] [--repeats 5] [--workers 2]

It needs lerobot beside pi0-fast, as policy_speed.py says. Without lerobot, only ours is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from pi0_fast.data import LeRobotReader, LeRobotWriter, open_dataset
from pi0_fast.data.cameras import Cameras
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.sampler import BatchSampler

CHUNK, BATCH, GOAL = 50, 8, 1.5


def main() -> None:
    """Prepare the dataset, compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a dataset with video; without it one is made")
    parser.add_argument("--batches", type=int, default=12, help="batches of one turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side; the median counts")
    parser.add_argument("--workers", type=int, default=2, help="of the loaders with workers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "dataset"
        copy_dataset(options.root, root) if options.root else make_dataset(root)
        reader = open_dataset("local/it", root=root)
        ours = FrameDataset(reader, chunk_size=CHUNK, camera_keys=reader.camera_keys)
        theirs = their_dataset(root, ours)
        sampler = BatchSampler(len(ours), BATCH, seed=0)
        order = [sampler.batch(step)[0] for step in range(options.batches)]
        print(f"{ours}, {options.batches} batches of {BATCH}, median of {options.repeats}")
        print(f"{'frames/s':36} {'lerobot':>9} {'ours':>9}")
        in_process(ours, theirs, order, options.repeats)
        with_workers(ours, theirs, order, options.repeats, options.workers)
        cached = FrameDataset(
            reader, chunk_size=CHUNK, camera_keys=reader.camera_keys, cache_dir=Path(folder) / "cache"
        )
        cached.batch(range(0, len(cached), 20))  # every episode, and so every frame
        (taken,) = medians(options.repeats, time.process_time, lambda: [cached.batch(indices) for indices in order])
        row("in this process, frames kept on disk", None, options.batches * BATCH / taken)


def make_dataset(root: Path) -> None:
    """Noise that moves slowly over a gradient: compresses about as a camera's pictures do."""
    random = np.random.default_rng(0)
    height, width = 480, 640
    base = np.linspace(0, 200, width)[None, :, None] + random.integers(0, 40, (height, width, 3))
    camera = {"observation.images.front": {"dtype": "video", "shape": [height, width, 3]}}
    numbers = {key: {"dtype": "float32", "shape": [14]} for key in ("observation.state", "action")}
    with LeRobotWriter(root, fps=30, features={**numbers, **camera}) as writer:
        for _ in range(3):
            pictures = (np.roll(base, frame * 2, axis=1).astype(np.uint8) for frame in range(100))
            values = {key: random.normal(size=(100, 14)) for key in numbers}
            writer.add_episode({**values, "observation.images.front": pictures}, task="look")


def copy_dataset(source: Path, root: Path) -> None:
    """A v3.0 copy with the same streams of video."""
    reader = open_dataset("local/source", root=source)
    kept = {key: feature for key, feature in reader.features.items() if key in ("observation.state", "action")}
    cameras = {key: reader.features[key] for key in reader.camera_keys}
    with LeRobotWriter(root, fps=reader.fps, features={**kept, **cameras}) as writer:
        for record, episode in zip(reader.episodes, reader.iter_episodes(list(kept)), strict=True):
            pictures = {key: pictures_of(reader, key, record.index) for key in cameras}
            writer.add_episode({**episode.columns, **pictures}, task=record.tasks[0])


def pictures_of(reader: LeRobotReader, key: str, episode: int) -> Any:
    """The file of an episode's video; the decoded pictures where a file holds several episodes."""
    if reader.version != "v3.0":
        return reader.root / reader.video_places(key, [episode])[episode].file
    (times,) = (found.columns["timestamp"][:, 0] for found in reader.iter_episodes(["timestamp"], [episode]))
    cameras = Cameras(reader, [key], [episode])
    return (cameras.frames(key, episode, [number], times.astype(float))[0] for number in range(len(times)))


def their_dataset(root: Path, ours: FrameDataset) -> Any:
    """lerobot's dataset with the same chunks, after its first batch was compared; None without lerobot."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with contextlib.suppress(ImportError):
        import shim_torchvision  # a stand-in, in environments without torchvision

        shim_torchvision.install()
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError:
        print("no lerobot here: only ours is timed")
        return None
    ahead = {"action": [step / ours.fps for step in range(CHUNK)]}
    theirs = LeRobotDataset("local/it", root=root, video_backend="pyav", delta_timestamps=ahead, return_uint8=True)
    indices = np.linspace(0, len(ours) - 1, BATCH).astype(int).tolist()
    expected, found = default_collate([theirs[index] for index in indices]), ours.batch(indices)
    for key in (ours.state_key, ours.action_key, "action_is_pad"):
        np.testing.assert_array_equal(found[key], expected[key].numpy())
    for key in ours.camera_keys:
        np.testing.assert_array_equal(found[key].transpose(0, 3, 1, 2), expected[key].numpy())
    assert found["task"] == expected["task"]
    return theirs


def in_process(ours: FrameDataset, theirs: Any, order: list[Any], repeats: int) -> None:
    """Batches one after the other, on one thread."""
    frames = len(order) * BATCH

    def mine() -> None:
        for indices in order:
            ours.batch(indices)

    if theirs is None:
        (taken,) = medians(repeats, time.process_time, mine)
        row("in this process", None, frames / taken)
        return

    def lerobot() -> None:
        for indices in order:
            default_collate([theirs[index] for index in indices.tolist()])

    taken, slower = medians(repeats, time.process_time, mine, lerobot)
    row("in this process", frames / slower, frames / taken, GOAL)


def with_workers(ours: FrameDataset, theirs: Any, order: list[Any], repeats: int, workers: int) -> None:
    """The same through torch's DataLoader; starting the workers does not count."""

    class Mine(Dataset[Any]):
        def __getitem__(self, step: int) -> Any:
            batch = ours.batch(order[step])
            return {key: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in batch.items()}

        def __len__(self) -> int:
            return len(order)

    def timed(loader: Any) -> float:
        batches = iter(loader)
        next(batches)
        begun = time.perf_counter()
        count = sum(1 for _ in batches)
        return (time.perf_counter() - begun) / (count * BATCH)

    mine = DataLoader(Mine(), batch_size=None, num_workers=workers)
    lerobot = theirs and DataLoader(theirs, batch_sampler=[indices.tolist() for indices in order], num_workers=workers)
    both = [(timed(mine), timed(lerobot) if lerobot else None) for _ in range(repeats)]
    slower = statistics.median(times[1] for times in both) if lerobot else None
    row(f"{workers} workers", slower and 1 / slower, 1 / statistics.median(times[0] for times in both), GOAL)


def medians(repeats: int, clock: Callable[[], float], *functions: Callable[[], Any]) -> list[float]:
    """Median seconds of each function, turn by turn, after one turn that is not counted."""
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            begun = clock()
            function()
            if turn:
                times.append(clock() - begun)
    return [statistics.median(times) for times in taken]


def row(what: str, theirs: float | None, ours: float, goal: float | None = None) -> None:
    """Print one comparison; `goal` is the ratio that the project has set itself."""
    if theirs is None:
        print(f"  {what:34} {'':>9} {ours:>9.1f}", flush=True)
        return
    note = f"   (goal {goal:g}x)" if goal else ""
    print(f"  {what:34} {theirs:>9.1f} {ours:>9.1f} {ours / theirs:>6.2f}x{note}", flush=True)


if __name__ == "__main__":
    main()
