"""A small checkpoint as openpi writes it, and what else a conversion needs; made on the spot, the same every time.

The trees are written with tensorstore, in Orbax' layout: one OCDBT database, or a folder for each leaf. What is not
here: any assertion, and openpi's own numbers (the golden).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pi0_fast import FastTokenizer

HORIZON, ACTION, STATE, PADDED = 6, 3, 4, 32
CAMERAS = ["base_0_rgb", "base_1_rgb", "wrist_0_rgb"]
SIZES = {
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "width": 16,
    "head": 8,
    "mlp": 24,
    "vocabulary": 4096,
    "vision_layers": 3,
    "vision_width": 12,
    "vision_heads": 2,
    "vision_head": 6,
    "vision_mlp": 20,
    "patches": 4,
    "patch": 14,
    "rank_attn": 4,
    "rank_mlp": 5,
}


def shape_of(axes: str) -> tuple[int, ...]:
    return tuple(int(name) if name.isdigit() else SIZES[name] for name in axes.split())


def small_tree(lora: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Every leaf of a small pi0-FAST with random weights, by its path without the root; float32."""
    from pi0_fast.openpi.leaves import ADAPTERS, PLACES

    axes = {path: place.axes for path, place in PLACES.items()}
    if lora:
        for adapter in ADAPTERS.values():
            axes |= {adapter.down: adapter.down_axes, adapter.up: adapter.up_axes}
    random = np.random.default_rng(seed)
    return {path: random.normal(0, 0.2, shape_of(text)).astype(np.float32) for path, text in axes.items()}


def write_params(
    folder: Path, tree: dict[str, np.ndarray], *, valued: bool = False, ocdbt: bool = True, chunks: int | None = None
) -> None:
    """Write a tree as Orbax does.

    Args:
        folder: is made.
        tree: path -> array.
        valued: every path ends in ``value``, as where openpi's training wrote it.
        ocdbt: one database; else a folder for each leaf.
        chunks: layers that lie together in a stacked leaf; None: all.
    """
    import tensorstore

    folder.mkdir(parents=True)
    metadata: dict[str, Any] = {}
    for path, values in tree.items():
        key = ("params", *path.split("/"), *(["value"] if valued else []))
        name = ".".join(key)
        if ocdbt:
            store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
        else:
            store = {"driver": "file", "path": f"{folder}/{name}/"}
        shape = list(values.shape) if chunks is None or values.ndim < 3 else [chunks, *values.shape[1:]]
        spec = {"driver": "zarr", "kvstore": store, "metadata": {"compressor": {"id": "zstd"}, "chunks": shape}}
        opened = tensorstore.open(spec, create=True, dtype=values.dtype, shape=values.shape).result()
        opened.write(values).result()
        metadata[str(key)] = {
            "key_metadata": [{"key": part, "key_type": 2} for part in key],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": metadata, "use_zarr3": False}))


def statistics(seed: int = 0) -> dict[str, dict[str, list[float]]]:
    """Of a robot with a state of 4 and an action of 3, padded to 32 with zeros as in some of openpi's files."""
    random = np.random.default_rng(seed)

    def feature(size: int) -> dict[str, list[float]]:
        low, mean, high = random.uniform(-2, -1, size), random.normal(0, 0.1, size), random.uniform(1, 2, size)
        values = {"mean": mean, "std": high / 2, "q01": low, "q99": high}
        return {name: [*map(float, value), *[0.0] * (PADDED - size)] for name, value in values.items()}

    return {"state": feature(STATE), "actions": feature(ACTION)}


def write_statistics(checkpoint: Path, asset: str = "my_robot", seed: int = 0) -> Path:
    folder = checkpoint / "assets" / asset
    folder.mkdir(parents=True)
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics(seed)}))
    return folder / "norm_stats.json"


@cache
def chunks() -> np.ndarray:
    """Normalised chunks [200, 6, 3]."""
    random = np.random.default_rng(0)
    moves = np.cumsum(random.normal(0, 0.15, (200, HORIZON, ACTION)), axis=1)
    return np.clip(moves, -1, 1).astype(np.float32)


def write_tokenizer(folder: Path) -> None:
    """One that says nothing of the chunks it was fitted on, as the published ones."""
    fitted = FastTokenizer.fit(chunks(), scale=10, vocab_size=300)
    FastTokenizer(fitted.vocabulary, scale=fitted.scale).save_pretrained(folder)


def settings(checkpoint: Path, output: Path, tokenizer: Path, **changes: Any) -> Any:
    """All that a conversion of such a checkpoint must be told."""
    from pi0_fast.convert_config import ConvertConfig

    given: dict[str, Any] = {
        "source": "openpi",
        "checkpoint": str(checkpoint),
        "output_dir": str(output),
        "action_horizon": HORIZON,
        "action_dim": ACTION,
        "cameras": CAMERAS,
        "relative_dims": "0,1",
        "normalization": "QUANTILES",
        "action_tokenizer": str(tokenizer),
        "text_tokenizer": "byte",
        **changes,
    }
    return ConvertConfig(**given)
