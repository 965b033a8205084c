"""Claims: what gemma_2b needs in memory and time on a GPU: inference, full fine-tuning, LoRA, FSDP over n GPUs.

The formulae are in cost_model.py. This script first checks them on the machine at hand, then puts published numbers of
GPUs into them and prints tables:

  layers     bytes that a decoder and an encoder layer keep for their backward pass, and their floating-point
             operations, counted from torch while they run; must equal the formulae
  traffic    bytes that everything but the matrix products reads and writes, counted on layers of gemma_2b's widths
  time       one decoder layer of gemma_2b's widths, forward and backward in float32 on one thread, beside what the
             formula says for this processor's rate of matrix products and memory bandwidth
  peak       a whole training step of a small model: most bytes of tensors at one time, as torch's profiler records
             them, beside the formula's

    python benchmarks/scaling.py [--parts layers traffic time peak tables] [--rows 32] [--cameras 2]

The GPU columns are predictions. `python benchmarks/gpu.py` measures them on a CUDA machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cost_model import (
    BANDWIDTH_SHARE,
    CONTEXT_BYTES,
    GPUS,
    LINK_SHARE,
    MATMUL_SHARE,
    Load,
    Memory,
    Parameters,
    Traffic,
    Training,
    generation_time,
    inference_memory,
    text_matrices,
    text_saved_bytes,
    training_memory,
    training_time,
    vision_matrices,
    vision_saved_bytes,
)
from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
from pi0_fast.model.gemma import DecoderLayer, rotary_frequencies, rotation
from pi0_fast.model.loss import target_cross_entropy
from pi0_fast.model.masks import attention_mask, sequence_layout
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.model.siglip import EncoderLayer
from pi0_fast.model.weights import initialize
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.train_config import PeftConfig
from pi0_fast.training.lora import add_adapters
from pi0_fast.training.optimizer import Optimizer

PARTS = ("layers", "traffic", "time", "peak", "tables")
#: For `traffic` where it is not measured: of gemma_2b in bfloat16, as this script printed them.
TRAFFIC = Traffic(text=560_688, text_backward=919_120, vision=80_528, vision_backward=174_864)
#: The small model of `peak`: wide enough that its tensors outweigh what the libraries take.
SMALL = Architecture(VisionSizes(256, 2, 4, 512), TextSizes(512, 8, 2048, 4, 1, 64, vocab_size=32_768))
SMALL_LOAD = Load(rows=4, cameras=1, prompt=40, target=40)
#: Rows, then GPUs, of the tables.
GPU_COUNTS = (1, 2, 4, 8)

Call = Callable[[], Tensor]


# ------------------------------------------------------------------------------------------------------ one layer here


def decoder_call(text: TextSizes, rows: int, columns: int, dtype: torch.dtype) -> tuple[nn.Module, Call]:
    """A decoder layer of zeros and a forward pass through it; its input asks for gradients."""
    layer = DecoderLayer(text)
    for name, parameter in layer.named_parameters():
        kind = torch.float32 if "norm" in name else dtype
        parameter.data = torch.zeros(parameter.shape, dtype=kind)
    x = torch.zeros(rows, columns, text.hidden_size, dtype=dtype, requires_grad=True)
    bias = torch.zeros(rows, 1, columns, columns, dtype=dtype)
    positions = torch.arange(columns).expand(rows, columns)
    turn = rotation(positions, rotary_frequencies(text.head_dim, torch.device("cpu")), dtype)
    shared = {part.untyped_storage()._cdata for part in (bias, *turn)}
    layer.shared_storages = shared  # type: ignore[assignment]  # the same for all layers: not counted
    return layer, lambda: layer(x, bias, turn)


def encoder_call(vision: VisionSizes, images: int) -> tuple[nn.Module, Call]:
    """The same of an encoder layer, in float32."""
    layer = EncoderLayer(vision)
    x = torch.zeros(images, vision.patches, vision.hidden_size, requires_grad=True)
    layer.shared_storages = set()  # type: ignore[assignment]
    return layer, lambda: layer(x)


def saved_bytes(layer: nn.Module, call: Call) -> int:
    """Bytes of the different storages that a forward pass keeps, weights and what all layers share left out."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Held on to, lest a freed storage's number be given to another.
        kept[tensor.untyped_storage()._cdata] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    left_out = {parameter.untyped_storage()._cdata for parameter in layer.parameters()} | layer.shared_storages
    total = sum(size for number, (size, _) in kept.items() if number not in left_out)
    del result
    return total


def forward_operations(call: Call) -> int:
    """Floating-point operations of the matrix products outside attention, whose kernel torch does not count here."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operator, count in counts.items() if "attention" not in str(operator))


class CountTraffic(TorchDispatchMode):
    """Adds up the bytes of inputs and results of every operation but views, matrix products and attention."""

    _PRODUCTS = ("mm", "addmm", "bmm", "attention", "convolution")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        name = function._schema.name.split("::")[-1]
        view = any(out.alias_info and not out.alias_info.is_write for out in function._schema.returns)
        if not view and not any(part in name for part in self._PRODUCTS):
            leaves = tree_leaves((arguments, keywords, result))
            self.bytes += sum(_distinct_bytes(x) for x in leaves if isinstance(x, Tensor))
        return result


def _distinct_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in memory: an expanded one takes no more than its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def traffic_of(call: Call) -> tuple[int, int]:
    """Bytes of a forward and of its backward pass."""
    with CountTraffic() as forward:
        result = call()
    upstream = torch.zeros_like(result)
    with CountTraffic() as backward:
        result.backward(upstream)  # type: ignore[no-untyped-call]
    return forward.bytes, backward.bytes


def per_column(make: Callable[[int], Call], few: int, many: int) -> tuple[float, float]:
    """Traffic per column or image: what more of them add, so that passes over weights do not count."""
    less, more = traffic_of(make(few)), traffic_of(make(many))
    return (more[0] - less[0]) / (many - few), (more[1] - less[1]) / (many - few)


def measure_traffic(sizes: Architecture, dtype: torch.dtype = torch.bfloat16) -> Traffic:
    """Of one decoder layer per column and one encoder layer per patch."""
    text = per_column(lambda columns: decoder_call(sizes.text, 1, columns, dtype)[1], 8, 16)
    vision = per_column(lambda images: encoder_call(sizes.vision, images)[1], 1, 2)
    return Traffic(*text, *(value / sizes.vision.patches for value in vision))


# --------------------------------------------------------------------------------------------------------- checks here


def check_layers() -> None:
    """Kept bytes and operations of small layers against the formulae; a difference ends the run."""
    text, vision = TextSizes(64, 1, 256, 4, 1, 32, vocab_size=16), VisionSizes(64, 1, 4, 96, 28, 14)
    rows, columns, images = 2, 24, 3
    print(f"{'one layer':34} {'here':>12} {'formula':>12}")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        layer, call = decoder_call(text, rows, columns, dtype)
        found, said = saved_bytes(layer, call), rows * columns * text_saved_bytes(text, name)
        _same(f"decoder, bytes kept, {name}", found, said)
    found = forward_operations(decoder_call(text, rows, columns, torch.float32)[1])
    _same("decoder, operations", found, 2 * rows * columns * text_matrices(text))
    layer, call = encoder_call(vision, images)
    _same("encoder, bytes kept", saved_bytes(layer, call), images * vision.patches * vision_saved_bytes(vision))
    found = forward_operations(encoder_call(vision, images)[1])
    _same("encoder, operations", found, 2 * images * vision.patches * vision_matrices(vision))


def _same(what: str, found: float, said: float) -> None:
    print(f"  {what:32} {found:>12,} {said:>12,}")
    if found != said:
        sys.exit(f"{what}: the formula is wrong: {said}, counted {found}")


def seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """Median seconds, after one turn that is not counted."""
    times = []
    for turn in range(repeats + 1):
        begun = time.perf_counter()
        function()
        if turn:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def check_time(text: TextSizes, columns: int = 128) -> tuple[float, float]:
    """Seconds of one decoder layer, forward and backward in float32: measured, and by the formula."""
    torch.set_num_threads(1)
    layer, call = decoder_call(text, 1, columns, torch.float32)

    def step() -> None:
        layer.zero_grad(set_to_none=False)
        result = call()
        result.backward(torch.zeros_like(result))  # type: ignore[no-untyped-call]

    measured = seconds(step)
    left, right = torch.zeros(columns, text.hidden_size), torch.zeros(text.intermediate_size, text.hidden_size)
    rate = 2 * columns * right.numel() / seconds(lambda: left @ right.T)
    block = torch.zeros(2**26)
    bandwidth = block.nbytes / seconds(block.sum)
    forward, backward = per_column(lambda count: decoder_call(text, 1, count, torch.float32)[1], 8, 16)
    # Gradients are also set to zero and added to, which is a pass over three times the weights.
    weights = 4 * 4 * text_matrices(text)
    attention = 4 * text.num_attention_heads * text.head_dim * columns**2
    products = 3 * (2 * text_matrices(text) * columns + attention) / rate
    said = products + (columns * (forward + backward) + weights) / bandwidth
    print(
        f"decoder layer, {columns} columns, float32, one thread: {rate / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s"
    )
    print(f"  forward and backward {measured:.2f} s; by the formula {said:.2f} s, {products:.2f} s of it products")
    return measured, said


def training_step(model: PaliGemma, load: Load) -> Callable[[int], Tensor]:
    """A whole update on random ids and images, as the loop makes it; it takes the number of updates before, and gives
    the loss.
    """
    sizes, device = model.architecture, model.device
    optimizer = Optimizer(model.train(), PI0FastConfig(), steps=1000)
    ids = torch.randint(4, sizes.text.vocab_size, (load.rows, load.prompt + load.target), device=device)
    causal = (torch.arange(ids.shape[1], device=device) >= load.prompt).expand(ids.shape)
    size = sizes.vision.image_size
    images = torch.zeros(load.rows * load.cameras, 3, size, size, device=device)
    wanted = torch.arange(load.target, device=device).expand(load.rows, -1) + load.sequence(sizes) - load.target - 1
    labels = ids[:, load.prompt :].flatten()
    weights = torch.full(labels.shape, 1 / len(labels), device=device)

    def step(completed: int) -> Tensor:
        features = model.encode_images(images).view(load.rows, -1, sizes.text.hidden_size)
        embeddings = torch.cat((features, model.embed(ids)), dim=1)
        seen = torch.ones(features.shape[:2], dtype=torch.bool, device=device)
        valid, all_causal, positions = sequence_layout(seen, torch.ones_like(causal), causal)
        hidden = model.hidden_states(embeddings, attention_mask(valid, all_causal), positions, wanted).flatten(0, 1)
        loss = target_cross_entropy(hidden, model.lm_head.weight, labels, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(completed)
        return loss.detach()

    return step


def check_peak(dtype: str, checkpointing: bool, load: Load = SMALL_LOAD, rank: int = 0) -> tuple[float, float]:
    """Most bytes of tensors at one time in the second training step of a small model: counted, and by the formula.

    rank: of adapters that are trained alone, which needs peft; 0 trains everything.
    """
    model = initialize(SMALL, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    model.gradient_checkpointing = checkpointing
    if rank:
        add_adapters(model, PeftConfig(r=rank), seed=0)
    step = training_step(model, load)
    said = training_memory(SMALL, load, Training(dtype, checkpointing, rank))
    step(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(1)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # less than 0 where something is freed
        most = max(most, now)
    counted = said.weights + said.state + most  # these were there before
    kind = f"{dtype}{', checkpointing' if checkpointing else ''}"
    print(f"  {kind:26} {counted / 2**20:>7.0f} MiB; formula {said.peak / 2**20:>7.0f} MiB")
    return counted, said.peak


# --------------------------------------------------------------------------------------------------------------- tables


def memory_table(sizes: Architecture, load: Load) -> list[str]:
    """Rows of markdown: GB of one GPU for inference and training."""
    one = Load(1, load.cameras, load.prompt, load.target, load.choices)
    lines = [
        "| gemma_2b | weights | optimizer | gradients | kept | peak, GB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines.append(_memory_row("inference, bfloat16, 1 row", inference_memory(sizes, one)))
    lines.append(_memory_row("inference, float32, 1 row", inference_memory(sizes, one, "float32")))
    cases = [
        ("LoRA r=16, bfloat16, checkpointing", Training(rank=16)),
        ("LoRA r=16, bfloat16", Training(rank=16, checkpointing=False)),
        ("full, bfloat16, checkpointing", Training()),
        ("full, bfloat16", Training(checkpointing=False)),
        ("full, float32, checkpointing", Training("float32")),
        *((f"full, bfloat16, checkpointing, FSDP over {n}", Training(gpus=n)) for n in GPU_COUNTS[1:]),
    ]
    for name, how in cases:
        lines.append(_memory_row(f"{name}, {load.rows} rows", training_memory(sizes, load, how)))
    return lines


def short_memory_table(sizes: Architecture) -> list[str]:
    """Rows of markdown for the README: GB of one GPU at 8 and at 32 rows of two cameras."""
    lines = ["| gemma_2b in bfloat16, two cameras | GB per GPU |", "| --- | --- |"]
    lines.append(f"| inference | {_peak_gb(inference_memory(sizes, Load()))} |")
    cases = [("LoRA (r=16)", Training(rank=16)), ("full fine-tuning", Training())]
    cases += [(f"full fine-tuning, FSDP over {n} GPUs", Training(gpus=n)) for n in GPU_COUNTS[1:]]
    for name, how in cases:
        few, many = (_peak_gb(training_memory(sizes, Load(rows=rows), how)) for rows in (8, 32))
        lines.append(f"| {name}, checkpointing, 8 / 32 rows per GPU | {few} / {many} |")
    return lines


def _peak_gb(memory: Memory) -> str:
    return f"{(memory.peak + CONTEXT_BYTES) / 1e9:.0f}"


def _memory_row(name: str, memory: Memory) -> str:
    parts = (memory.weights, memory.state, memory.gradients, memory.activations, memory.peak + CONTEXT_BYTES)
    return f"| {name} | " + " | ".join(f"{part / 1e9:.1f}" for part in parts) + " |"


def training_table(sizes: Architecture, load: Load, traffic: Traffic) -> list[str]:
    """Rows of markdown: seconds of a step with checkpointing, by GPU; a dash where the memory is too small."""
    cases = [("LoRA r=16", Training(rank=16), False), ("full", Training(), False), ("full, TF32", Training(), True)]
    cases += [(f"full, TF32, FSDP over {n}", Training(gpus=n), True) for n in GPU_COUNTS[1:]]
    lines = [f"| {load.rows} rows per GPU | " + " | ".join(GPUS) + " |", "| --- |" + " --- |" * len(GPUS)]
    for name, how, tf32 in cases:
        fits = training_memory(sizes, load, how).peak + CONTEXT_BYTES
        times = {key: training_time(sizes, load, how, gpu, traffic, tf32=tf32).total for key, gpu in GPUS.items()}
        cells = [f"{times[key]:.2f} s" if fits <= gpu.memory else "-" for key, gpu in GPUS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def generation_table(sizes: Architecture, load: Load) -> list[str]:
    """Rows of markdown: milliseconds of a chunk of one row, by GPU."""
    one = Load(1, load.cameras, load.prompt, load.target, load.choices)
    times = {key: generation_time(sizes, one, gpu) for key, gpu in GPUS.items()}
    quick = {key: generation_time(sizes, one, gpu, tf32=True) for key, gpu in GPUS.items()}
    lines = ["| 1 row, ms | " + " | ".join(GPUS) + " |", "| --- |" + " --- |" * len(GPUS)]
    lines.append("| vision | " + " | ".join(f"{1e3 * t.vision:.1f}" for t in times.values()) + " |")
    lines.append("| vision, TF32 | " + " | ".join(f"{1e3 * t.vision:.1f}" for t in quick.values()) + " |")
    lines.append("| prefill | " + " | ".join(f"{1e3 * t.prefill:.1f}" for t in times.values()) + " |")
    lines.append("| each token | " + " | ".join(f"{1e3 * t.token:.2f}" for t in times.values()) + " |")
    lines.append(f"| chunk of {load.target} | " + " | ".join(f"{1e3 * t.chunk:.0f}" for t in times.values()) + " |")
    return lines


def tables(load: Load, traffic: Traffic) -> list[str]:
    """All tables as lines of markdown."""
    sizes = Architecture.variant("gemma_2b")
    parameters = Parameters.of(sizes)
    lines = [
        f"gemma_2b: {parameters.total:,} parameters, {load.sequence(sizes)} columns a row ({load.cameras} cameras, "
        f"{load.prompt} ids of text, {load.target} of targets). Peaks with {CONTEXT_BYTES / 1e9:g} GB for CUDA itself.",
        "",
        *memory_table(sizes, load),
        "",
        f"Seconds of a step at {MATMUL_SHARE:.0%} of the published rates of products, {BANDWIDTH_SHARE:.0%} of "
        f"bandwidth, {LINK_SHARE:.0%} of links:",
        "",
        *training_table(sizes, load, traffic),
        "",
        *generation_table(sizes, load),
    ]
    return [*lines, "", *(f"{name}: {gpu.source}" for name, gpu in GPUS.items())]


def main() -> None:
    """Check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=32, help="samples of a batch per GPU")
    parser.add_argument("--cameras", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=60, help="ids of text and state")
    parser.add_argument("--target", type=int, default=60, help="ids of an action chunk with its marks")
    arguments = parser.parse_args()
    if "layers" in arguments.parts:
        check_layers()
    traffic = TRAFFIC
    if "traffic" in arguments.parts:
        traffic = measure_traffic(Architecture.variant("gemma_2b"))
        print(f"bytes beside the products, forward and backward, per layer: {traffic}")
    if "time" in arguments.parts:
        check_time(Architecture.variant("gemma_2b").text)
    if "peak" in arguments.parts:
        print("most bytes of a training step of a small model")
        for dtype in ("float32", "bfloat16"):
            for checkpointing in (False, True):
                check_peak(dtype, checkpointing)
    if "tables" in arguments.parts:
        load = Load(arguments.rows, arguments.cameras, arguments.prompt, arguments.target)
        print("\n" + "\n".join(tables(load, traffic)))


if __name__ == "__main__":
    main()
