"""Claim: the whole `train-tokenizer` command needs less than 1 GB, and no more for a dataset ten times as large.

Generates LeRobot v3.0 datasets of 1 and 10 million frames of 32 dimensions (about 0.13 and 1.3 GB), runs the command on
them in a process of its own at horizons 10 and 50, and prints the peak of its memory, beside the rate at which it reads
frames and that of plain pyarrow on the same columns. Takes about ten minutes and 1.5 GB of disk.

    python benchmarks/fit_memory.py [--frames 1000000 10000000] [--horizons 10 50] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DIMS = 32
EPISODE = 1000
FRAMES_PER_FILE = 250_000

#: Runs a command line in its own process and prints its peak memory in bytes as the last line.
MEASURED = """
import os, resource, sys
from pi0_fast.cli import main
status = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
if os.path.exists("/proc/self/status"):  # where ru_maxrss counts the process that started this one, too
    peak = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak)
sys.exit(status)
"""


def generate(root: Path, frames: int, *, smooth: bool = True) -> None:
    """A v3.0 dataset written file by file, in little memory; without `smooth` it is noise, the worst case."""
    random = np.random.default_rng(0)
    episodes: list[dict[str, object]] = []
    names = [f"joint_{i}" for i in range(DIMS)]
    for number, first in enumerate(range(0, frames, FRAMES_PER_FILE)):
        count = min(FRAMES_PER_FILE, frames - first)
        steps = random.normal(0, 0.02, (count // EPISODE, EPISODE, DIMS)).astype(np.float32)
        values = (np.cumsum(np.cumsum(steps, axis=1) * 0.1, axis=1) if smooth else steps).reshape(count, DIMS)
        path = root / f"data/chunk-000/file-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        index = np.arange(first, first + count)
        columns = {
            "action": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), DIMS),
            "timestamp": pa.array((index % EPISODE / 30).astype(np.float32)),
            "frame_index": pa.array(index % EPISODE),
            "episode_index": pa.array(index // EPISODE),
            "index": pa.array(index),
            "task_index": pa.array(np.zeros(count, np.int64)),
        }
        pq.write_table(pa.table(columns), path, row_group_size=50_000)
        for episode in range(first // EPISODE, (first + count) // EPISODE):
            episodes.append({
                "episode_index": episode, "length": EPISODE, "tasks": ["wander"], "data/chunk_index": 0,
                "data/file_index": number, "dataset_from_index": episode * EPISODE,
                "dataset_to_index": (episode + 1) * EPISODE,
            })  # fmt: skip
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["wander"]}), root / "meta/tasks.parquet")
    scalar = {"shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0", "robot_type": "none", "fps": 30, "chunks_size": 1000, "splits": {},
        "total_episodes": len(episodes), "total_frames": frames, "total_tasks": 1,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None,
        "features": {
            "action": {"dtype": "float32", "shape": [DIMS], "names": names},
            "timestamp": {"dtype": "float32", **scalar},
            **{key: {"dtype": "int64", **scalar} for key in ("frame_index", "episode_index", "index", "task_index")},
        },
    }  # fmt: skip
    (root / "meta/info.json").write_text(json.dumps(info))


def plain_reading(root: Path) -> float:
    """Frames per second of pyarrow reading the action and episode columns, batch by batch."""
    begun, frames = time.perf_counter(), 0
    for path in sorted((root / "data").rglob("*.parquet")):
        file = pq.ParquetFile(path, pre_buffer=False)
        for batch in file.iter_batches(columns=["action", "episode_index", "frame_index"]):
            frames += batch.num_rows
    return frames / (time.perf_counter() - begun)


def our_reading(root: Path) -> float:
    """Frames per second of our reader, checks included."""
    from pi0_fast.data import open_dataset

    begun = time.perf_counter()
    frames = sum(episode.length for episode in open_dataset("local/walk", root=root).iter_episodes(["action"]))
    return frames / (time.perf_counter() - begun)


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--horizons", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--directory", type=Path, default=None, help="keep the datasets here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        print(f"{'frames':>10} {'H':>3} {'peak MB':>8} {'seconds':>8} {'tokens':>7}")
        for frames in arguments.frames:
            root = directory / f"walk_{frames}"
            if not root.exists():
                generate(root, frames)
            for horizon in arguments.horizons:
                output = Path(temporary) / f"tokenizer_{frames}_{horizon}"
                command = [
                    sys.executable, "-c", MEASURED, "train-tokenizer", "--repo_id=local/walk", f"--root={root}",
                    f"--action_horizon={horizon}", "--sample_fraction=0.1", f"--output_dir={output}",
                ]  # fmt: skip
                begun = time.perf_counter()
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                peak = int(done.stdout.strip().splitlines()[-1])
                tokens = json.loads((output / "metadata.json").read_text())["held_out"]["tokens"]["mean_token_length"]
                seconds = time.perf_counter() - begun
                print(f"{frames:>10} {horizon:>3} {peak / 1e6:>8.0f} {seconds:>8.1f} {tokens:>7.1f}", flush=True)
            plain, ours = plain_reading(root), our_reading(root)
            print(f"reading {frames} frames: pyarrow {plain:,.0f}/s, ours {ours:,.0f}/s, ratio {ours / plain:.2f}")


if __name__ == "__main__":
    main()
