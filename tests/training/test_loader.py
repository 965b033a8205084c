"""Prepared batches: the same in any number of workers, errors that say what they said, workers that end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("av")

import tiny_policies as tiny  # noqa: E402
from pi0_fast.data import LeRobotWriter, open_dataset  # noqa: E402
from pi0_fast.preparation import Preparation, Prepared  # noqa: E402
from pi0_fast.processors import PolicyProcessors  # noqa: E402
from pi0_fast.training.frames import FrameDataset  # noqa: E402
from pi0_fast.training.loader import TrainBatches, train_batches  # noqa: E402
from pi0_fast.training.sampler import BatchSampler  # noqa: E402
from pi0_fast.training.transforms import ImageTransforms  # noqa: E402
from pi0_fast.types import DatasetError, PolicyError  # noqa: E402

CAMERA = tiny.CAMERAS[0]
LENGTHS = (20, 13)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loader") / "it"
    states, chunks = tiny.frames()
    random = np.random.default_rng(0)
    declared = {
        "observation.state": {"dtype": "float32", "shape": [tiny.STATE]},
        "action": {"dtype": "float32", "shape": [tiny.ACTION]},
        CAMERA: {"dtype": "video", "shape": [64, 96, 3]},
    }
    with LeRobotWriter(root, fps=10, features=declared, video_codec="h264") as writer:
        for length in LENGTHS:
            pictures = random.integers(0, 256, (length, 64, 96, 3), np.uint8)
            values = {"observation.state": states[:length], "action": chunks[:length, 0], CAMERA: pictures}
            writer.add_episode(values, task=tiny.TASKS[0])
    return root


def dataset_of(root: Path, **arguments: Any) -> FrameDataset:
    reader = open_dataset("local/it", root=root)
    return FrameDataset(reader, chunk_size=tiny.HORIZON, camera_keys=[CAMERA], **arguments)


def preparation() -> Preparation:
    config = tiny.settings()
    processors = PolicyProcessors.from_statistics(config, tiny.statistics())
    return Preparation(config, processors, tiny.text_tokenizer(), tiny.action_tokenizer())


def batches(root: Path, workers: int, first: int = 0, count: int = 5) -> list[Prepared]:
    dataset = dataset_of(root, whole_only=True, transforms=ImageTransforms(seed=3))
    sampler = BatchSampler(len(dataset), 4, seed=3, first_step=first)
    with train_batches(dataset, preparation(), sampler, workers, stop_step=first + count) as found:
        return list(found)


def assert_equal(left: list[Prepared], right: list[Prepared]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.images, other.images)
        for name in ("ids", "valid", "causal", "label", "weight", "text_length"):
            np.testing.assert_array_equal(getattr(one.prompt, name), getattr(other.prompt, name))
        np.testing.assert_array_equal(one.states, other.states)
        assert one.counts == other.counts


def test_the_same_batches_in_any_number_of_workers_and_from_any_step(root: Path) -> None:
    threads = torch.get_num_threads()
    alone = batches(root, 0, count=9)  # more than an epoch
    assert torch.get_num_threads() == threads
    assert_equal(alone, batches(root, 2, count=9))
    assert_equal(alone[4:], batches(root, 3, first=4, count=5))
    assert_equal(alone[7:], batches(root, 0, first=7, count=2))
    assert alone[0].images is not None
    assert alone[0].images.shape == (4, 1, 3, tiny.PIXELS, tiny.PIXELS)
    dataset = dataset_of(root, whole_only=True)
    (plain,) = islice(train_batches(dataset, preparation(), BatchSampler(len(dataset), 4, 3)), 1)
    assert not torch.equal(plain.images, alone[0].images), "the transforms do something"


def test_without_workers_one_thread_prepares_as_in_a_worker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resizing on two threads differs in the last bit, so that a run would depend on the number of workers."""
    seen = []
    original = Preparation.training
    monkeypatch.setattr(
        Preparation, "training", lambda *given: seen.append(torch.get_num_threads()) or original(*given)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches(root, 0, count=1)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_a_spawned_worker_too(root: Path) -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        found = batches(root, 1, count=2)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert_equal(batches(root, 0, count=2), found)


def test_without_an_end_and_what_was_waited(root: Path) -> None:
    dataset = dataset_of(root)
    found = train_batches(dataset, preparation(), BatchSampler(len(dataset), 2, 0, first_step=5))
    assert (found.step, found.waited_s) == (5, 0.0)
    for _ in range(3):
        next(found)
    assert found.step == 8
    assert found.waited_s > 0
    waited = found.waited_s
    time.sleep(0.05)
    assert found.waited_s == waited, "what training itself takes is no waiting"
    found.close()
    with pytest.raises(StopIteration):
        next(found)


def test_workers_end(root: Path) -> None:
    dataset = dataset_of(root)
    sampler = BatchSampler(len(dataset), 2, 0)
    before = set(multiprocessing.active_children())
    found = train_batches(dataset, preparation(), sampler, 2)
    next(found)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    found.close()
    assert not any(worker.is_alive() for worker in workers)
    other = train_batches(dataset, preparation(), sampler, 1)
    (worker,) = set(multiprocessing.active_children()) - before
    del other
    assert not worker.is_alive()


def test_signals_of_a_terminal_or_a_scheduler_leave_the_workers_alone(root: Path) -> None:
    dataset = dataset_of(root)
    before = set(multiprocessing.active_children())
    with train_batches(dataset, preparation(), BatchSampler(len(dataset), 2, 0), 1) as found:
        next(found)
        (worker,) = set(multiprocessing.active_children()) - before
        assert worker.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
        for _ in range(4):
            next(found)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(DatasetError, match=r"worker that prepares .* has died at step \d.*smaller --num_workers"):
            list(islice(found, 10))


UNFINISHED = """
import sys
sys.path[:0] = sys.argv[2:]
import test_loader
from pathlib import Path
dataset = test_loader.dataset_of(Path(sys.argv[1]))
found = test_loader.train_batches(dataset, test_loader.preparation(), test_loader.BatchSampler(len(dataset), 2, 0), 2)
next(found)
if sys.argv[-1] == "raise":
    raise RuntimeError("in the middle")
"""


@pytest.mark.parametrize("way", ["end", "raise"])
def test_a_process_that_ends_in_the_middle_takes_its_workers_along(root: Path, way: str) -> None:
    """Nobody closes anything; workers that ignore SIGTERM must not keep the process."""
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", UNFINISHED, str(root), str(tests), str(tests / "training"), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (1 if way == "raise" else 0), done.stderr
    assert ("in the middle" in done.stderr) == (way == "raise")
    assert "forked" not in done.stderr, "the tokenizers' warning of each fork"


def test_the_parts_of_several_processes_are_the_batch(root: Path) -> None:
    dataset, prepared = dataset_of(root, whole_only=True), preparation()
    sampler = BatchSampler(len(dataset), 6, 3, 2)

    def states_of(share: tuple[int, int]) -> list[np.ndarray]:
        with train_batches(dataset, prepared, sampler, share=share, stop_step=4) as batches:
            return [batch.states for batch in batches]

    parts = zip(*(states_of((part, 3)) for part in range(3)), strict=True)
    for whole, each in zip(states_of((0, 1)), parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(each), whole)
    for wrong in ((0, 4), (3, 3), (-1, 2), (0, 0)):
        with pytest.raises(PolicyError, match="no such equal part"):
            train_batches(dataset, prepared, sampler, share=wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_keep_their_class_and_message(root: Path, tmp_path: Path, workers: int) -> None:
    import shutil

    copy = shutil.copytree(root, tmp_path / "it")
    dataset = dataset_of(copy)
    (copy / f"videos/{CAMERA}/chunk-000/file-001.mp4").write_bytes(b"broken")
    with train_batches(dataset, preparation(), BatchSampler(len(dataset), 8, 0), workers) as found:
        with pytest.raises(DatasetError) as error:
            list(islice(found, 10))
        assert str(error.value).startswith(str(copy))
        assert "(episode 1) cannot be decoded" in str(error.value)
        with pytest.raises(StopIteration):
            next(found)


def _broken(*_: Any) -> Any:
    raise KeyError("a fault of ours")


def test_faults_of_ours_come_with_their_trace(root: Path) -> None:
    dataset = dataset_of(root, transforms=_broken)
    with train_batches(dataset, preparation(), BatchSampler(len(dataset), 8, 0)) as found, pytest.raises(KeyError):
        next(found)
    with (
        train_batches(dataset, preparation(), BatchSampler(len(dataset), 8, 0), 1) as found,
        pytest.raises(RuntimeError, match=r"worker that prepares batches failed(.|\n)*_broken(.|\n)*a fault of ours"),
    ):
        next(found)


def test_what_does_not_fit(root: Path) -> None:
    dataset = dataset_of(root)
    with pytest.raises(PolicyError, match="chooses from 5 samples, the dataset has 33"):
        train_batches(dataset, preparation(), BatchSampler(5, 2, 0))
    for wrong in ({"num_workers": -1}, {"prefetch": 0}):
        with pytest.raises(PolicyError, match=next(iter(wrong))):
            train_batches(dataset, preparation(), BatchSampler(33, 2, 0), **wrong)
    assert isinstance(train_batches(dataset, preparation(), BatchSampler(33, 2, 0)), TrainBatches)
