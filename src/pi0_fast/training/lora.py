"""Low-rank adapters (Hu et al. 2022, arXiv 2106.09685) in the model's linear layers, with the library peft.

Adapters are trained in place of all weights and saved alone, as peft and LeRobot name them:

    pretrained_model/
      adapter_model.safetensors  adapter_config.json    which also names the base checkpoint
      config.json ...                                   all files of a checkpoint but the weights

They are merged into the weights where all of those are needed: for generation, which reads the matrices themselves,
on request in checkpoints, and by `merge_adapters` afterwards. Left out: other methods of peft; adapters of the token
table and the head, which are read directly too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from pi0_fast.checkpoint import (
    DTYPES,
    LOCAL,
    ROBOTS,
    Checkpoint,
    check_fingerprints,
    find_checkpoint,
    fingerprint_header,
    fingerprints_of,
    read_checkpoint,
    robots,
    with_tokenizers,
    write_checkpoint,
    write_parts,
    write_robots,
)
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.model.weights import foreign_name, write_tensors
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import (
    CONFIG_FILE,
    OWN_FILE,
    PI0FastConfig,
    read_details,
    read_json_object,
    write_json,
)
from pi0_fast.processors import read_processors
from pi0_fast.train_config import PeftConfig
from pi0_fast.types import PolicyError, UsageError

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: Where adapters go unless the command says otherwise: the language model's matrices.
_DEFAULT_TARGETS = r"decoder\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
_ALL_LINEAR = rf"{_DEFAULT_TARGETS}|projector|vision_tower\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])"
_NAME = "default"


def require_peft() -> ModuleType:
    """The library, imported.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UsageError(f"--peft needs the library peft ({error}): pip install 'pi0-fast[lora]'") from error


def add_adapters(model: PaliGemma, options: PeftConfig, seed: int) -> None:
    """Put adapters into the model and freeze everything else. They change nothing until they are trained.

    Raises:
        UsageError: peft is missing; no layer, or one that cannot have an adapter, is meant.
    """
    peft = require_peft()
    targets = options.target_modules
    if targets is None:
        targets = _DEFAULT_TARGETS
    elif targets == "all-linear":
        targets = _ALL_LINEAR
    settings = peft.LoraConfig(r=options.r, lora_alpha=options.lora_alpha or options.r, target_modules=targets)
    device = model.device
    torch.manual_seed(seed)
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise UsageError(
            f"--peft.target_modules={targets!r} fits no layer ({error}); layers are {', '.join(names[:3])}, ..."
        ) from error
    model.to(device)
    adapted = _adapted(model)
    for name in ("lm_head", "embed_tokens"):
        if name in adapted:
            raise UsageError(f"--peft.target_modules: {name} cannot have an adapter; leave it out")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Name -> module, of the layers that have an adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def merged(model: PaliGemma) -> PaliGemma:
    """A plain model that gives the same results; weights without an adapter are shared with the one given."""
    deltas = {f"{name}.weight": module.get_delta_weight(_NAME) for name, module in _adapted(model).items()}
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        name = key.replace(".base_layer", "")
        if ".lora_" in name:
            continue
        delta = deltas.get(name)
        state[name] = value if delta is None else (value.float() + delta.float()).to(value.dtype)
    with torch.device("meta"):
        plain = PaliGemma(model.architecture, tied_head=False, dtype=model.dtype)
    plain.load_state_dict(state, strict=True, assign=True)
    if model.tied_head:
        plain.lm_head.weight = plain.embed_tokens.weight
    return plain.eval()


@contextmanager
def merged_within(policy: PI0FastPolicy) -> Iterator[None]:
    """Within the block the policy has a model of merged weights, which can generate."""
    adapted = policy.model
    policy.model = merged(adapted)
    try:
        yield
    finally:
        policy.model = adapted


# --- files --------------------------------------------------------------------------------------------------


def _file_name(key: str) -> str:
    """Our name of an adapter's tensor -> the file's: `x.q_proj.lora_A.default.weight` -> `base_model.model...`."""
    layer, _, rest = key.partition(".lora_")
    return (
        f"base_model.model.{foreign_name(layer + '.weight').removesuffix('weight')}lora_{rest.replace('.default', '')}"
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {_file_name(key): value for key, value in model.state_dict().items() if ".lora_" in key}


def bits_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits that other names, shapes or values change: sums of bits, the same on every device."""
    sums = {}
    for name, tensor in tensors:
        bits = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        sums[name] = [list(tensor.shape), int(bits.sum(dtype=torch.int64))]
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


def _base_fingerprint(model: nn.Module) -> dict[str, str]:
    """Of the weights without the adapters, in the number format that they have."""
    named = ((name.replace(".base_layer", ""), value) for name, value in model.named_parameters())
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    return {f"base_weights_{dtype}": bits_digest(each for each in named if ".lora_" not in each[0])}


def _check_base(directory: Path, base: str, model: nn.Module) -> None:
    """Whether adapters are put on the weights that they were trained on: a link or a branch may lead elsewhere by now.

    Raises:
        PolicyError: they are others.
    """
    with safe_open(directory / ADAPTER_FILE, "pt") as file:
        recorded = file.metadata() or {}
    for name, found in fingerprint_header(_base_fingerprint(model)).items():
        if recorded.get(name, found) != found:
            raise PolicyError(
                f"{directory}: the weights in {base} are not those that its adapters were trained on (fingerprint "
                f"{found}, not {recorded[name]}): they were replaced, or a link or branch leads to others. Name the "
                f"right ones under base_model_name_or_path in {directory / ADAPTER_CONFIG}"
            )


def write_adapters(
    directory: Path,
    policy: PI0FastPolicy,
    options: PeftConfig,
    base: str,
    others: Mapping[str, Checkpoint] | None = None,
) -> None:
    """Write the two files of the adapters into an existing directory.

    Raises:
        OSError: it cannot be written.
    """
    modules = sorted(
        {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in _tensors(policy.model)}
    )
    content = {
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "base_model_name_or_path": base,
        "r": options.r,
        "lora_alpha": options.lora_alpha or options.r,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
    }
    prints = {**policy.checkpoint().fingerprints(), **fingerprints_of(others or {}), **_base_fingerprint(policy.model)}
    header = fingerprint_header(prints)
    write_tensors(directory / ADAPTER_FILE, _tensors(policy.model), header)
    write_json(directory / ADAPTER_CONFIG, content, indent=2)


def write_adapter_checkpoint(
    directory: Path,
    policy: PI0FastPolicy,
    options: PeftConfig,
    base: str,
    others: Mapping[str, Checkpoint] | None = None,
    name: str = "",
) -> None:
    """Write everything of a checkpoint but the weights, and the adapters, into an existing directory.

    Its config.json says ``use_peft``, so that nobody takes it for a complete one. Of several datasets `others` and
    `name` are as in `checkpoint.write_files`.

    Raises:
        OSError: it cannot be written.
    """
    write_parts(directory, policy.checkpoint(), {ROBOTS: [name, *others]} if others else {})
    write_robots(directory, others or {})
    content = {**read_json_object(directory / CONFIG_FILE), "use_peft": True}
    write_json(directory / CONFIG_FILE, content, indent=4)
    write_adapters(directory, policy, options, base, others)


@dataclass(frozen=True)
class Adapters:
    """What a directory says of its adapters.

    Attributes:
        options: rank, scale, and which layers.
        base: checkpoint that they belong to, as the command named it.
        tensors: by the names of the files.
    """

    options: PeftConfig
    base: str
    tensors: dict[str, Tensor]


def read_adapters(directory: Path) -> Adapters:
    """The adapters that `write_adapters` wrote.

    Raises:
        PolicyError: a file is missing, damaged, or of another method.
    """
    content = read_json_object(directory / ADAPTER_CONFIG)
    try:
        options = PeftConfig(r=int(content["r"]), lora_alpha=int(content["lora_alpha"]))
        base = str(content["base_model_name_or_path"])
        tensors = load_file(directory / ADAPTER_FILE)
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise PolicyError(f"{directory}: its adapters cannot be read: {error!r}") from error
    return Adapters(options, base, tensors)


def load_adapters(model: PaliGemma, tensors: Mapping[str, Tensor], where: str) -> None:
    """Fill the model's adapters.

    Raises:
        PolicyError: the file's adapters are not those of the model.
    """
    wanted = _tensors(model)
    if set(wanted) != set(tensors) or any(wanted[key].shape != tensors[key].shape for key in wanted):
        different = sorted(set(wanted) ^ set(tensors)) or [k for k in wanted if wanted[k].shape != tensors[k].shape]
        raise PolicyError(
            f"{where}: its adapters are of other layers or another rank than --peft says, such as {different[0]}"
        )
    with torch.no_grad():
        for key, value in wanted.items():
            value.copy_(tensors[key])


def read_adapter_config(directory: Path) -> PI0FastConfig:
    """The configuration of a directory with adapters.

    Raises:
        PolicyError: as in `policy_config.read_config`.
    """
    content = {**read_json_object(directory / CONFIG_FILE), "use_peft": False}
    own = read_json_object(directory / OWN_FILE)
    return PI0FastConfig.from_json(content, str(directory / CONFIG_FILE), own.get("config"))


def read_base_policy(
    directory: Path, config: PI0FastConfig, adapters: Adapters, device: torch.device | str
) -> PI0FastPolicy:
    """The policy of a directory with adapters, with the weights of their base, to which none was added yet.

    Args:
        directory: the adapters'.
        config: its settings (`read_adapter_config`), or with other ones of training.
        adapters: of `read_adapters`.
        device: where the weights go.

    Raises:
        PolicyError, HubError: the base cannot be read; tokenizers or statistics are not those of the adapters.
    """
    details = read_details(directory)
    processors = read_processors(directory, read_adapter_config(directory))
    copies = {kind: directory / str(details[kind]) for kind in LOCAL}
    config, text_tokenizer, action_tokenizer = with_tokenizers(config, None, None, folder=directory, copies=copies)
    sizes = Architecture.from_json(details["architecture"])
    revision = None if Path(adapters.base).expanduser().is_dir() else config.pretrained_revision
    model = weights.load(find_checkpoint(adapters.base, revision=revision), sizes, DTYPES[config.dtype], device)
    _check_base(directory, adapters.base, model)
    policy = PI0FastPolicy(config, model, processors, text_tokenizer, action_tokenizer)
    check_fingerprints(directory, policy.checkpoint().fingerprints(), directory / ADAPTER_FILE)
    return policy


def merge_adapters(directory: str | Path, target: str | Path) -> None:
    """Make a complete checkpoint of one that holds adapters alone.

    Args:
        directory: a pretrained_model with adapter_model.safetensors; the checkpoint that it names must be there.
        target: directory of the complete checkpoint, which loads with `PI0FastPolicy.from_pretrained` and in LeRobot.

    Raises:
        PolicyError, HubError: something is missing or damaged.
        UsageError: peft is not installed.
        OSError: the target cannot be written.
    """
    folder = Path(directory)
    adapters = read_adapters(folder)
    policy = read_base_policy(folder, read_adapter_config(folder), adapters, "cpu")
    add_adapters(policy.model, _with_targets(adapters), seed=0)
    load_adapters(policy.model, adapters.tensors, str(folder))
    names = robots(folder)
    others = {name: read_checkpoint(folder, robot=name, model=policy.model) for name in names[1:]}
    check_fingerprints(folder, fingerprints_of(others), folder / ADAPTER_FILE)
    write_checkpoint(Path(target), merged_checkpoint(policy), others=others, name=names[0] if names else "")


def merged_checkpoint(policy: PI0FastPolicy) -> Checkpoint:
    """The policy's parts, with all weights."""
    return replace(policy.checkpoint(), model=merged(policy.model))


def _with_targets(adapters: Adapters) -> PeftConfig:
    """Adapters' layers under our names, which are found by those of the file."""
    layers = sorted({name.partition(".lora_")[0] for name in adapters.tensors})
    return replace(adapters.options, target_modules=[_own_layer(name) for name in layers])


def _own_layer(name: str) -> str:
    """`base_model.model...language_model.layers.3.mlp.up_proj` -> `decoder.layers.3.mlp.up_proj`."""
    tail = name.removeprefix(f"base_model.model.{weights.PREFIX}")
    for own, foreign in weights.NAMES.items():
        own_layer, foreign_layer = own.removesuffix(".weight"), foreign.removesuffix(".weight")
        head, _, rest = foreign_layer.partition(".N.")
        if tail == foreign_layer:
            return own_layer
        if rest and tail.startswith(head + ".") and tail.endswith("." + rest):
            number = tail.removeprefix(head + ".").removesuffix("." + rest)
            if number.isdigit():
                return own_layer.replace(".N.", f".{number}.")
    raise PolicyError(f"{ADAPTER_FILE}: {json.dumps(name)} is no layer of the model")
