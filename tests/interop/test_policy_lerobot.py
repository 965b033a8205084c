"""What is saved here, in lerobot 0.6.1: it loads, and gives the same loss and the same chunk from the same raw batch.

PI0_FAST_LEROBOT_PYTHON names an interpreter with lerobot 0.6.1; without it everything is skipped. Run with -s to see
the differences.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from pi0_fast import FastTokenizer, Normalizer, PI0FastConfig  # noqa: E402
from pi0_fast.actions.chunks import ActionSelection  # noqa: E402
from pi0_fast.policy import PI0FastPolicy  # noqa: E402
from tiny_policies import (  # noqa: E402
    ACTION,
    CAMERAS,
    HORIZON,
    STATE,
    TASKS,
    frames,
    overfit,
    sizes,
    statistics,
    text_tokenizer,
)

INTERPRETER = os.environ.get("PI0_FAST_LEROBOT_PYTHON")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not INTERPRETER, reason="PI0_FAST_LEROBOT_PYTHON names no interpreter with lerobot 0.6.1"),
]
TOP, WRIST = CAMERAS

# Run in the saved directory: the tokenizers' names are relative to it.
LEROBOT = """
import json, sys
import lerobot_tiny

M = lerobot_tiny.install(json.load(open("pi0_fast.json"))["details"]["architecture"])
import torch
from lerobot.policies.factory import make_pre_post_processors
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
policy = M.PI0FastPolicy.from_pretrained(".").eval()
saved = load_file("model.safetensors")
state = policy.state_dict()
assert set(saved) == set(state), set(saved) ^ set(state)
# lerobot swallows what goes wrong in loading, and runs on random weights.
assert all(torch.equal(saved[key], state[key]) for key in saved)
# It does not save this name and would ask the hub for its default.
names = {"action_tokenizer_processor": {"paligemma_tokenizer_name": policy.config.text_tokenizer_name}}
pre, post = make_pre_post_processors(policy.config, pretrained_path=".", preprocessor_overrides=names)
batch = {**load_file("batch.safetensors"), "task": json.load(open("batch.json"))}
made = pre(dict(batch))
with torch.no_grad():
    loss, _ = policy.forward(made)
    found = {"loss": loss.reshape(1)}
    if sys.argv[1] == "chunk":
        given = {key: value for key, value in batch.items() if key != "action"}
        found["chunk"] = post(policy.predict_action_chunk(pre(given))).contiguous()
save_file(found, "made.safetensors")
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def in_lerobot(
    policy: PI0FastPolicy, batch: dict[str, Any], folder: Path, shared: Path, wanted: str = "chunk"
) -> dict[str, Any]:
    """Save the policy; what lerobot makes of it and the batch: loss, and chunk unless only the loss is wanted."""
    policy.save_pretrained(folder)
    return lerobot_reads(folder, batch, shared, wanted)


def lerobot_reads(folder: Path, batch: dict[str, Any], shared: Path, wanted: str = "chunk") -> dict[str, Any]:
    """What lerobot makes of a checkpoint's directory, which a few files are added to."""
    tensors = {key: value.contiguous() for key, value in batch.items() if key != "task"}
    save_file(tensors, folder / "batch.safetensors")
    (folder / "batch.json").write_text(json.dumps(batch["task"]))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    # The shared directory is read-only: an import from it must not leave bytecode there.
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(shared / "tools")
    done = subprocess.run(
        [str(INTERPRETER), "-c", LEROBOT, wanted],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "Error decoding tokens" not in done.stderr
    return load_file(folder / "made.safetensors")


def compare(policy: PI0FastPolicy, batch: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    """Chunk, under the grammar and freely, and loss; policies here are trained enough for their output to be valid."""
    with torch.no_grad():
        loss = policy(batch)[0].item()
    chunk = policy.predict_action_chunk(batch)
    width = chunk.abs().max().item()
    difference = (chunk - theirs["chunk"]).abs().max().item()
    print(
        f"\n{what}: loss {loss:.9g}, lerobot's {theirs['loss'].item():.9g}; chunks up to {width:.3g} differ by "
        f"{difference:.2g}"
    )
    assert loss == pytest.approx(theirs["loss"].item(), rel=1e-4, abs=2e-6)  # theirs is that far from float64
    assert difference < 1e-4 * max(width, 1.0)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["lerobot_checkpoint", "lerobot_checkpoint_relative"])
def test_a_checkpoint_of_lerobots_loaded_and_saved_here(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "golden" / name
    policy = PI0FastPolicy.from_pretrained(source, architecture=source / "architecture.json")
    vectors = load_file(source / "vectors.safetensors")
    batch: dict[str, Any] = {key: value for key, value in vectors.items() if key.startswith("observation.")}
    batch |= {"action": vectors["action"], "task": json.loads((source / "tasks.json").read_text())}
    compare(policy, batch, in_lerobot(policy, batch, tmp_path / "out", shared), name)


def new_policy(relative: bool) -> PI0FastPolicy:
    """Cameras of 224 x 224, which lerobot cannot do without; the FAST tokenizer is fitted here on 200 chunks."""
    states, chunks = frames()
    selection, encoded = None, chunks
    if relative:
        selection = ActionSelection(ACTION, tuple(range(ACTION)), (0, 2), (0, 2), STATE)
        encoded = chunks - states[:, None, :ACTION] * np.array([1, 0, 1], np.float32)
    normalizer = Normalizer.fit(lambda: [encoded.reshape(-1, ACTION)], "QUANTILES", selection=selection)
    tokenizer = FastTokenizer.fit(normalizer.apply(encoded), scale=20.0, vocab_size=300, normalizer=normalizer)
    image = {"type": "VISUAL", "shape": [3, 224, 224]}
    more: dict[str, Any] = {}
    if relative:
        names = ["shoulder", "gripper", "elbow"]
        more = {"use_relative_actions": True, "action_feature_names": names, "empty_cameras": 1}
    config = PI0FastConfig(
        input_features={TOP: image, WRIST: image, "observation.state": {"type": "STATE", "shape": [STATE]}},
        output_features={"action": {"type": "ACTION", "shape": [ACTION]}},
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        tokenizer_max_length=100,
        max_action_tokens=40,
        max_decoding_steps=40,
        device="cpu",
        **more,
    )
    return PI0FastPolicy.create(
        config,
        statistics(),
        architecture=sizes(224),
        text_tokenizer=text_tokenizer(),
        action_tokenizer=tokenizer,
        rename_map={"observation.images.cam": TOP},
    )


@pytest.mark.parametrize("relative", [False, True])
def test_a_new_policy_trained_here(shared: Path, tmp_path: Path, relative: bool) -> None:
    """Tokenizers made here, a renamed camera, images that are not square, one camera missing and one declared empty."""
    policy = new_policy(relative)
    random = np.random.default_rng(1)
    states, chunks = frames()
    processors = policy.preparation.processors
    # lerobot clips neither states nor actions.
    outside = (np.abs(processors.normalize_actions(chunks, states)) >= 1).any(axis=(1, 2))
    below = (processors.state.apply(states) < -1).any(axis=1)
    places = np.flatnonzero(~outside & ~below)[:2]
    batch: dict[str, Any] = {
        "observation.images.cam": torch.from_numpy(random.random((2, 3, 90, 160), np.float32)),
        "observation.state": torch.from_numpy(states[places]),
        "action": torch.from_numpy(chunks[places]),
        "task": list(TASKS[:2]),
    }
    if not relative:
        batch[WRIST] = torch.from_numpy(random.random((2, 3, 224, 100), np.float32))
    loss = policy(batch)[0].item()  # of untrained weights, whose free output is no chunk
    theirs = in_lerobot(policy, batch, tmp_path / "untrained", shared, "loss")["loss"].item()
    print(f"\nuntrained: loss {loss:.9g}, lerobot's {theirs:.9g}")
    assert loss == pytest.approx(theirs, rel=1e-5)
    losses = overfit(policy, batch, steps=60)
    assert losses[-1] < 0.1 < losses[0]
    assert policy.counts["clipped_values"] == policy.counts["state_below"] == 0
    compare(policy, batch, in_lerobot(policy, batch, tmp_path / "out", shared), f"new, relative={relative}")
    for constrained in (True, False):
        again = PI0FastPolicy.from_pretrained(tmp_path / "out", overrides={"constrained": constrained})
        assert torch.equal(again.predict_action_chunk(batch), policy.predict_action_chunk(batch))


def test_what_two_processes_with_parts_of_the_weights_trained(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory as FSDP's run wrote it; lerobot takes images of 224 x 224 only."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "training"))
    import tiny_processes
    import tiny_runs

    line = tiny_runs.arguments(tmp_path, tmp_path / "run", steps=2, distributed="fsdp")
    architecture = json.loads((tmp_path / "sizes.json").read_text())
    architecture["vision"]["image_size"] = 224
    (tmp_path / "sizes.json").write_text(json.dumps(architecture))
    for done in tiny_processes.run(line):
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "run/checkpoints/last/pretrained_model"
    policy = PI0FastPolicy.from_pretrained(folder)
    random, processors = np.random.default_rng(2), policy.preparation.processors
    # Within the ranges: lerobot clips neither states nor actions.
    states = processors.state.invert(random.uniform(-0.9, 0.9, (2, tiny_runs.STATE)).astype(np.float32))
    actions = processors.action.invert(random.uniform(-0.9, 0.9, (2, 4, tiny_runs.ACTION)).astype(np.float32))
    batch = {
        "observation.images.top": torch.from_numpy(random.random((2, 3, 28, 28), np.float32)),
        "observation.state": torch.from_numpy(states),
        "action": torch.from_numpy(actions),
        "task": ["pick up", "put_down"],
    }
    with torch.no_grad():
        loss = policy(batch)[0].item()
    theirs = lerobot_reads(folder, batch, shared, "loss")["loss"].item()
    print(f"\nloss {loss:.9g}, lerobot's {theirs:.9g}")
    assert loss == pytest.approx(theirs, rel=1e-4)
