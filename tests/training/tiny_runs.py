"""Tiny training runs: a dataset of four short episodes with one camera, and command lines that train on it in seconds.

What is not here: any assertion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from pi0_fast.data.writer import LeRobotWriter

ACTION, STATE, PIXELS = 3, 4, 28
#: Runs the command line in a process that kills itself (SIGKILL), or sends another signal to itself and its workers as
#: a terminal does, or raises an error (0), at the n-th call of a function. Arguments are module, dotted name, n, before
#: or after, the signal's number, and the command line.
DRIVER = """
import importlib, os, sys
import torch
torch.set_num_threads(1)
module, name, number, when, signal, *arguments = sys.argv[1:]
calls = 0
def send():
    if int(signal) == 0:
        raise OSError("the disk is full")
    if int(signal) == 9:
        os.kill(os.getpid(), 9)
    os.killpg(os.getpid(), int(signal))
if module:
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, last)
    def counted(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(number) and when == "before":
            send()
        result = original(*args, **kwargs)
        if calls == int(number) and when == "after":
            send()
        return result
    setattr(owner, last, counted)
from pi0_fast.cli import main
sys.exit(main(arguments))
"""


def build_dataset(
    root: Path, lengths: tuple[int, ...] = (14, 11, 9, 12), *, joints: tuple[str, ...] | None = None
) -> Path:
    """Episodes whose action follows the state, whose camera shows the size of the first; `joints` names the actions."""
    size = ACTION if joints is None else len(joints)
    random = np.random.default_rng(0)
    features = {
        "observation.state": {"dtype": "float32", "shape": [STATE]},
        "action": {"dtype": "float32", "shape": [size], "names": None if joints is None else list(joints)},
        "observation.images.top": {"dtype": "image", "shape": [PIXELS, PIXELS, 3]},
    }
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for number, length in enumerate(lengths):
            state = random.uniform(-1, 1, STATE) + np.cumsum(random.normal(0, 0.1, (length, STATE)), axis=0)
            action = state[:, :size] * [2.0, 0.5, 30.0, 1.0][:size]
            images = np.clip(128 + 60 * action[:, 0], 0, 255)[:, None, None, None]
            columns = {
                "observation.state": state.astype(np.float32),
                "action": action.astype(np.float32),
                "observation.images.top": np.broadcast_to(images, (length, PIXELS, PIXELS, 3)).astype(np.uint8),
            }
            writer.add_episode(columns, task=("pick up", "put_down")[number % 2])
    return root


def write_architecture(path: Path) -> Path:
    """The sizes of a model with 4096 ids."""
    sizes = {
        "vision": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": PIXELS,
            "patch_size": 14,
        },
        "text": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 4096,
        },
    }
    path.write_text(json.dumps(sizes))
    return path


def arguments(folder: Path, output: Path, **flags: object) -> list[str]:
    """A command line; the dataset and the sizes in `folder` are made where they are missing."""
    if not (folder / "data").exists():
        build_dataset(folder / "data")
        write_architecture(folder / "sizes.json")
    given = {
        "dataset.repo_id": "tiny",
        "dataset.root": folder / "data",
        "policy.type": "pi0_fast",
        "policy.architecture": folder / "sizes.json",
        "policy.text_tokenizer_name": "byte",
        "policy.auto_fit_fast_tokenizer": "true",
        "policy.fast_tokenizer_cache_dir": folder / "tokenizers",
        "policy.chunk_size": 4,
        "policy.n_action_steps": 4,
        "policy.optimizer_lr": 1e-3,
        "policy.scheduler_decay_lr": 1e-4,
        "policy.device": "cpu",
        "output_dir": output,
        "steps": 8,
        "batch_size": 3,
        "num_workers": 0,
        "log_freq": 2,
        "eval_freq": 0,
        "save_freq": 2,
        **flags,
    }
    return ["train", *(f"--{name}={value}" for name, value in given.items())]


def run(
    line: list[str], *, at: tuple[str, str, int, str] = ("", "", 0, ""), signal: int = 9
) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, with a signal at the n-th call of a function; see `DRIVER`."""
    module, name, number, when = at
    return subprocess.run(
        [sys.executable, "-c", DRIVER, module, name, str(number), when, str(signal), *line],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def weights(output: Path, step: int) -> bytes:
    """The file of a checkpoint's weights."""
    return (output / "checkpoints" / f"{step:06d}" / "pretrained_model" / "model.safetensors").read_bytes()
