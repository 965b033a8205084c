"""Weights in and out of safetensors files under lerobot's names, and random weights for those who ask.

The model is built on the meta device and filled tensor by tensor, largest first, so that loading needs little more
memory than the weights. Every name is matched; nothing is guessed, and a pickle is never read. Left out: other
frameworks' checkpoints, and everything in a checkpoint directory that is no weight.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pi0_fast.model.architecture import Architecture
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.types import PolicyError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"

#: lerobot's module path before every name below.
PREFIX = "model.paligemma_with_expert.paligemma."
_VISION = "model.vision_tower.vision_model."
_TEXT = "model.language_model."
#: Our name -> lerobot's after the prefix; N stands for the number of a layer.
NAMES = {
    "vision_tower.patch_embedding.weight": _VISION + "embeddings.patch_embedding.weight",
    "vision_tower.patch_embedding.bias": _VISION + "embeddings.patch_embedding.bias",
    "vision_tower.position_embedding.weight": _VISION + "embeddings.position_embedding.weight",
    "vision_tower.layers.N.layer_norm1.weight": _VISION + "encoder.layers.N.layer_norm1.weight",
    "vision_tower.layers.N.layer_norm1.bias": _VISION + "encoder.layers.N.layer_norm1.bias",
    "vision_tower.layers.N.self_attn.q_proj.weight": _VISION + "encoder.layers.N.self_attn.q_proj.weight",
    "vision_tower.layers.N.self_attn.q_proj.bias": _VISION + "encoder.layers.N.self_attn.q_proj.bias",
    "vision_tower.layers.N.self_attn.k_proj.weight": _VISION + "encoder.layers.N.self_attn.k_proj.weight",
    "vision_tower.layers.N.self_attn.k_proj.bias": _VISION + "encoder.layers.N.self_attn.k_proj.bias",
    "vision_tower.layers.N.self_attn.v_proj.weight": _VISION + "encoder.layers.N.self_attn.v_proj.weight",
    "vision_tower.layers.N.self_attn.v_proj.bias": _VISION + "encoder.layers.N.self_attn.v_proj.bias",
    "vision_tower.layers.N.self_attn.out_proj.weight": _VISION + "encoder.layers.N.self_attn.out_proj.weight",
    "vision_tower.layers.N.self_attn.out_proj.bias": _VISION + "encoder.layers.N.self_attn.out_proj.bias",
    "vision_tower.layers.N.layer_norm2.weight": _VISION + "encoder.layers.N.layer_norm2.weight",
    "vision_tower.layers.N.layer_norm2.bias": _VISION + "encoder.layers.N.layer_norm2.bias",
    "vision_tower.layers.N.mlp.fc1.weight": _VISION + "encoder.layers.N.mlp.fc1.weight",
    "vision_tower.layers.N.mlp.fc1.bias": _VISION + "encoder.layers.N.mlp.fc1.bias",
    "vision_tower.layers.N.mlp.fc2.weight": _VISION + "encoder.layers.N.mlp.fc2.weight",
    "vision_tower.layers.N.mlp.fc2.bias": _VISION + "encoder.layers.N.mlp.fc2.bias",
    "vision_tower.post_layernorm.weight": _VISION + "post_layernorm.weight",
    "vision_tower.post_layernorm.bias": _VISION + "post_layernorm.bias",
    "projector.weight": "model.multi_modal_projector.linear.weight",
    "projector.bias": "model.multi_modal_projector.linear.bias",
    TABLE: _TEXT + "embed_tokens.weight",
    "decoder.layers.N.input_layernorm.weight": _TEXT + "layers.N.input_layernorm.weight",
    "decoder.layers.N.self_attn.q_proj.weight": _TEXT + "layers.N.self_attn.q_proj.weight",
    "decoder.layers.N.self_attn.k_proj.weight": _TEXT + "layers.N.self_attn.k_proj.weight",
    "decoder.layers.N.self_attn.v_proj.weight": _TEXT + "layers.N.self_attn.v_proj.weight",
    "decoder.layers.N.self_attn.o_proj.weight": _TEXT + "layers.N.self_attn.o_proj.weight",
    "decoder.layers.N.post_attention_layernorm.weight": _TEXT + "layers.N.post_attention_layernorm.weight",
    "decoder.layers.N.mlp.gate_proj.weight": _TEXT + "layers.N.mlp.gate_proj.weight",
    "decoder.layers.N.mlp.up_proj.weight": _TEXT + "layers.N.mlp.up_proj.weight",
    "decoder.layers.N.mlp.down_proj.weight": _TEXT + "layers.N.mlp.down_proj.weight",
    "decoder.norm.weight": _TEXT + "norm.weight",
    HEAD: "lm_head.weight",
}
#: safetensors' names of the number formats that weights may have.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMATS = {dtype: name for name, dtype in FLOATS.items()}


def foreign_name(name: str) -> str:
    """lerobot's name of one of our parameters: `projector.bias` -> `model.paligemma_with_expert...linear.bias`."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None:
        return PREFIX + NAMES[name]
    pattern = NAMES[name.replace(f".layers.{layer[1]}.", ".layers.N.")]
    return PREFIX + pattern.replace(".layers.N.", f".layers.{layer[1]}.")


@torch.inference_mode(False)  # weights made in that mode could never be trained
def load(
    path: str | Path,
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strict: bool = True,
) -> PaliGemma:
    """Build the model that a checkpoint's weights make.

    One of the two keys of token table and head may be absent: they are one tensor then, as they are when both are
    there and bit-equal; otherwise they stay two.

    Args:
        path: a safetensors file, or a directory with `model.safetensors` or its index and shards.
        architecture: the sizes; every shape must agree.
        dtype: float32 or bfloat16, whatever the file has; see PaliGemma for what stays float32.
        device: where the weights go.
        strict: False lets keys of the file go unused and fills absent ones at random (seed 0), with a warning that
            lists both. A wrong shape is always an error.

    Returns:
        The model in evaluation mode.

    Raises:
        PolicyError: no such file, damaged file, keys missing, unexpected or of another shape; all of them are listed.
    """
    files = _files(Path(path))
    found = _survey(files)
    with torch.device("meta"):
        model = PaliGemma(architecture, tied_head=False, dtype=dtype)
    wanted = {foreign_name(name): (name, parameter) for name, parameter in model.named_parameters()}
    head, table = foreign_name(HEAD), foreign_name(TABLE)
    tied = (head in found) != (table in found) or (
        head in found and table in found and _equal(found[head], found[table])
    )
    if tied:
        # Both places are filled from whichever key is there, and become one tensor below.
        present = table if table in found else head
        del wanted[head]
        if present == head:
            wanted[head] = wanted.pop(table)
            found.pop(table, None)
    missing, unexpected = _check(wanted, found, Path(path), strict, ignored={head, table} if tied else set())
    state = {}
    for key in sorted(set(wanted) - set(missing), key=lambda key: -math.prod(found[key].shape)):
        name, parameter = wanted[key]
        state[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        with found[key].read() as values:
            state[name].copy_(values)
    if missing or unexpected:
        warnings.warn(
            _lists(Path(path), missing, unexpected, []) + "; loaded all the same (strict=False)", stacklevel=2
        )
        generator = torch.Generator("cpu").manual_seed(0)
        for key in missing:
            name, parameter = wanted[key]
            state[name] = _random(name, parameter.shape, generator).to(device, parameter.dtype)
    if tied:
        state[HEAD] = state[TABLE]
    model.load_state_dict(state, strict=True, assign=True)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    model.decoder.lay_side_by_side()
    return model.eval()


def save(
    model: PaliGemma, directory: str | Path, metadata: Mapping[str, str], max_shard_bytes: int | None = None
) -> list[Path]:
    """Write the weights under lerobot's names, head and token table both, and return the files written.

    A tensor is copied only while it is written. Existing files of the same names are overwritten: an atomic
    replacement of the directory is the caller's.

    Args:
        model: on any device, in its own dtypes.
        directory: exists already.
        metadata: text entries for the file's header; ``format: pt`` is added.
        max_shard_bytes: None writes one `model.safetensors`, which is all that lerobot reads; a number starts another
            file whenever it would be exceeded (a single larger tensor has its own), and writes the index.
    """
    directory = Path(directory)
    tensors = {foreign_name(name): value.detach() for name, value in model.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for key in sorted(tensors):
        size = tensors[key].nbytes
        if max_shard_bytes is not None and shards[-1] and used + size > max_shard_bytes:
            shards.append({})
            used = 0
        shards[-1][key] = tensors[key]
        used += size
    if len(shards) == 1:
        write_tensors(directory / SINGLE_FILE, shards[0], metadata)
        return [directory / SINGLE_FILE]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(directory / name, shard, metadata)
    total = sum(tensor.nbytes for tensor in tensors.values())
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*(directory / name for name in names), directory / INDEX_FILE]


@torch.inference_mode(False)
def initialize(
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    tied_head: bool = True,
    device: torch.device | str = "cpu",
) -> PaliGemma:
    """A model of random weights, for tests and for training small models from nothing.

    Matrices are normal with variance 1 / (number of inputs), the token table with 1 / width, so that vectors start at
    size one; norms are the identity and biases zero. The same seed gives the same weights on every device.
    """
    with torch.device("meta"):
        model = PaliGemma(architecture, tied_head=tied_head, dtype=dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    state = {
        name: _random(name, parameter.shape, generator).to(device, parameter.dtype)
        for name, parameter in model.named_parameters()
    }
    if tied_head:
        state[HEAD] = state[TABLE]
    model.load_state_dict(state, strict=True, assign=True)
    model.decoder.lay_side_by_side()
    return model.eval()


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """float32 values for one parameter; see `initialize`."""
    # Said, lest torch's defaults have a say.
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if name.endswith(".bias"):
        return values.zero_()
    if "norm" in name:
        # Gemma's norms multiply by (1 + weight), SigLIP's by weight.
        return values.fill_(0.0 if name.startswith("decoder.") else 1.0)
    return values.normal_(generator=generator).div_(math.sqrt(math.prod(shape[1:])))


@dataclass(frozen=True)
class _Stored:
    """One tensor of a file, not read yet."""

    file: Path
    key: str
    shape: tuple[int, ...]
    format: str

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        """The tensor, as a view of the file that ends with the block: what was looked at is unmapped again."""
        with safe_open(self.file, framework="pt") as handle:
            yield handle.get_tensor(self.key)


def _files(path: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a checkpoint, each with the keys that an index says it holds."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise PolicyError(f"{path}: only safetensors files are read as weights (a pickle could run code)")
        return {path: None}
    if (path / SINGLE_FILE).is_file():
        return {path / SINGLE_FILE: None}
    index = path / INDEX_FILE
    if not index.is_file():
        there = sorted(entry.name for entry in path.iterdir())[:20] if path.is_dir() else "no such directory"
        raise PolicyError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; found: {there}")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for key, name in places.items():
            if Path(name).name != name:
                raise PolicyError(f"{index}: {key} is said to be in {name!r}, which is no plain file name")
            keys = files.setdefault(path / name, set())
            assert keys is not None
            keys.add(key)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"{index}: damaged index: {error!r}") from error
    if not files:
        raise PolicyError(f"{index}: damaged index: it names no weights")
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise PolicyError(f"{path}: shards named in {INDEX_FILE} are missing: {absent}")
    return files


def _survey(files: dict[Path, set[str] | None]) -> dict[str, _Stored]:
    """Every tensor of the files by lerobot's name; `model.` in front may be left out, as lerobot allows."""
    found: dict[str, _Stored] = {}
    for file, listed in files.items():
        try:
            with safe_open(file, framework="pt") as handle:
                keys = list(handle.keys())
                slices = {key: handle.get_slice(key) for key in keys}
                stored = [_Stored(file, key, tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()]
        except (SafetensorError, OSError) as error:
            raise PolicyError(f"{file}: no readable safetensors file ({error}); fetch or copy it again") from error
        if listed is not None and listed != set(keys):
            raise PolicyError(f"{file}: the index and the file disagree about {sorted(listed ^ set(keys))[:10]}")
        for tensor in stored:
            name = tensor.key if tensor.key.startswith("model.") else f"model.{tensor.key}"
            if name in found:
                raise PolicyError(f"{file}: {tensor.key} occurs twice (also in {found[name].file.name})")
            if tensor.format not in FLOATS:
                raise PolicyError(f"{file}: {tensor.key} holds {tensor.format} numbers; known: {sorted(FLOATS)}")
            found[name] = tensor
    return found


def _check(
    wanted: dict[str, tuple[str, nn.Parameter]], found: dict[str, _Stored], path: Path, strict: bool, ignored: set[str]
) -> tuple[list[str], list[str]]:
    """Keys missing and unexpected; raises where there are any and `strict`, or where a shape differs."""
    missing = sorted(set(wanted) - set(found))
    unexpected = sorted(set(found) - set(wanted) - ignored)
    misshapen = [
        f"{key} {list(found[key].shape)} instead of {list(parameter.shape)}"
        for key, (_, parameter) in sorted(wanted.items())
        if key in found and found[key].shape != tuple(parameter.shape)
    ]
    if misshapen or (strict and (missing or unexpected)):
        raise PolicyError(_lists(path, missing, unexpected, misshapen))
    return missing, unexpected


def _lists(path: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> str:
    """What differs, in one text."""
    parts = [
        f"{len(keys)} {title}: {', '.join(keys[:20])}{', ...' if len(keys) > 20 else ''}"
        for title, keys in (("keys missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if keys
    ]
    return f"{path}: the weights do not fit the architecture: " + "; ".join(parts)


def _equal(first: _Stored, second: _Stored) -> bool:
    """Whether two stored tensors are the same bit for bit."""
    if (first.shape, first.format) != (second.shape, second.format):
        return False
    with first.read() as left, second.read() as right:
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file: length of the header, header, numbers. Streams where the library would copy everything."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    start = 0
    for key, tensor in tensors.items():
        end = start + tensor.nbytes
        header[key] = {"dtype": _FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor.to("cpu").contiguous().view(torch.uint8).numpy().tofile(out)
        out.flush()
        os.fsync(out.fileno())
