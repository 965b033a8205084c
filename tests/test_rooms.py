"""The direction of imports, and what may be imported at all by whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "pi0_fast"

# From top to bottom: a room may import only from rooms above it (or from itself).
ROOMS = [
    ["types"],
    ["swap", "hub", "leader"],
    ["flag_names", "counters"],
    ["_kernels"],
    ["streams", "display"],
    ["parsing"],
    ["configs"],
    ["data"],
    ["actions"],
    ["policy_config"],
    ["simulation_config"],
    ["train_config"],
    ["record_config", "eval_config", "convert_config"],
    ["text_tokenizer"],
    ["prompt"],
    ["processors"],
    ["model"],
    ["decode"],
    ["preparation"],
    ["checkpoint"],
    ["policy_card"],
    ["policy"],
    ["openpi"],
    ["reports"],
    ["dataset_chunks"],
    ["inspection"],
    ["fitting"],
    ["cached_fitting"],
    ["sims"],
    ["episode_workers"],
    ["expert_episodes"],
    ["recording", "replaying"],
    ["closed_loop"],
    ["evaluate"],
    ["training"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
# Inside actions/, from top to bottom.
ACTIONS = [
    "chunks",
    "normalize",
    "dct",
    "bpe",
    "bpe_training",
    "segmentation",
    "one_pass",
    "reference_format",
    "vocabulary",
    "rate_distortion",
    "grammar",
]
ACTIONS += [
    "layout",
    "processing_action_tokenizer",
    "model_card",
    "inputs",
    "directory",
    "tokenizer",
    "report",
    "choosing",
    "details",
    "plane",
    "survey",
]
# Inside model/, from top to bottom; torch begins here.
MODEL = ["architecture", "masks", "images", "siglip", "gemma", "loss", "paligemma", "weights", "tiny"]
TRAINING = ["launch", "watch", "processes", "sharding"]
TRAINING += ["frames", "transforms", "sampler", "mixture", "loader", "states", "features", "lora"]
TRAINING += ["decisions", "device", "start", "opening", "settings", "policies", "setup", "audit", "report"]
TRAINING += ["optimizer", "metrics", "baselines", "validation", "simulation", "loop"]
OPENPI = ["orbax", "leaves", "filling", "statistics", "convert"]
INSIDE = {"actions": ACTIONS, "model": MODEL, "training": TRAINING, "openpi": OPENPI}


def _rank(rooms: list[list[str]], name: str) -> int:
    for rank, names in enumerate(rooms):
        if name in names:
            return rank
    raise AssertionError(f"{name} has no place in the list of rooms: add it to tests/test_rooms.py")


def _imports(path: Path) -> set[str]:
    """Dotted names below pi0_fast that a file imports, at any depth of the code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the direction; write pi0_fast...."
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name.removeprefix("pi0_fast.") for name in found if name.startswith("pi0_fast.")}


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_from_rooms_above(path: Path) -> None:
    room = path.relative_to(SOURCE).with_suffix("").parts[0]
    for name in _imports(path):
        if name == "__version__":
            continue
        other = name.split(".")[0]
        assert _rank(ROOMS, other) <= _rank(ROOMS, room), f"{room} imports {name}, which is below it"
        if room == other and room in INSIDE and path.name != "__init__.py" and len(name.split(".")) > 1:
            steps = [[step] for step in INSIDE[room]]
            assert _rank(steps, name.split(".")[1]) <= _rank(steps, path.stem), f"{path.name} imports {name}"


def run_without(names: tuple[str, ...], code: str) -> None:
    """Run code in a process where some modules cannot be imported at all."""
    code = f"import sys\nfor name in {names!r}: sys.modules[name] = None\n{code}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FOREIGN = ("transformers", "lerobot", "draccus", "accelerate", "av", "metaworld", "libero", "gymnasium", "mujoco")
FOREIGN += ("tensorstore", "orbax", "jax")


@pytest.mark.parametrize("module", ["pi0_fast", "pi0_fast.fitting", "pi0_fast.cli", "pi0_fast.actions.tokenizer"])
def test_the_tokenizer_side_needs_no_torch(module: str) -> None:
    run_without(
        ("torch", "transformers", "lerobot", "safetensors", "sentencepiece", "av"),
        f"import {module}\n"
        "import pi0_fast\n"
        "[getattr(pi0_fast, name) for name in pi0_fast.__all__ if name != 'PI0FastPolicy']\n"
        "try: pi0_fast.PI0FastPolicy\n"
        "except ImportError as error: assert 'pip install' in str(error), error\n"
        "else: raise AssertionError('torch was imported')",
    )


@pytest.mark.parametrize("module", ["policy_config", "prompt", "processors", "text_tokenizer", "model.architecture"])
def test_what_a_policy_does_outside_its_model_needs_no_torch(module: str) -> None:
    if module == "processors":
        pytest.importorskip("safetensors")
    run_without(("torch", *FOREIGN), f"import pi0_fast.{module}")


def test_the_policy_needs_no_simulator_and_no_other_library() -> None:
    pytest.importorskip("torch")
    run_without(FOREIGN, "import pi0_fast.policy, pi0_fast; pi0_fast.PI0FastPolicy")
