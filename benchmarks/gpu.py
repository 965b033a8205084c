"""Checks and times the policy on a CUDA machine: one script, below 8 minutes, one GPU, nothing to download.

    python benchmarks/gpu.py [--output gpu.json] [--parts device parity ...] [--limit_s 460]
    python benchmarks/gpu.py --device cpu --tiny        # seconds, on any machine: that the script itself works

Parts, in the order in which they run:

  device      rates of large matrix products in each format, and bandwidth of memory, beside published numbers
  parity      loss, gradients and greedy ids in float32 on the GPU against the CPU; bfloat16 on the GPU no further from
              float32 than bfloat16 on the CPU is
  attention   each kernel of scaled_dot_product_attention on the shapes of this model: the same result, and its time
  training    a whole step of gemma_300m and gemma_2b in bfloat16 with checkpointing: seconds and peak memory, beside
              the formulae of cost_model.py; with float32 products (the vision tower's) as float32 and as TF32
  generation  gemma_2b in bfloat16, one row: images, prefill, each token, a chunk from pictures to actions; launched one
              by one, as CUDA graphs, and compiled; beside the time that reading the weights takes at the measured
              bandwidth
  compile     loss and gradients compiled against not, and the time of a step of gemma_300m

A check that fails is printed as FAIL, a part that raises as ERROR, and both make the exit status 1, as does a part for
which no time was left. What does not fit into memory is left out, which is printed too. Results so far are in --output
whatever happens later; after --limit_s the script ends itself.

With --tiny, sizes are small and compiled functions are traced, but not translated; on a CPU what would be captured as a
CUDA graph is called.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cost_model import (
    GPUS,
    Load,
    Parameters,
    Training,
    generation_time,
    token_bytes,
    training_memory,
    training_time,
)
from pi0_fast import FastTokenizer, Normalizer
from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
from pi0_fast.model.gemma import KeyValueCache
from pi0_fast.model.masks import attention_mask, sequence_layout
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.model.weights import initialize
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.processors import PolicyProcessors
from pi0_fast.text_tokenizer import TinyTextTokenizer
from scaling import TRAFFIC, training_step

#: Parts and the seconds that must be left before one is begun: estimates for a GPU of 2020 or later.
PARTS = {"device": 10, "parity": 40, "attention": 20, "training": 60, "generation": 150, "compile": 120}
#: Narrow enough for the CPU's side of a comparison; head width and vision sizes are those of the real model.
PARITY = Architecture(
    VisionSizes(num_hidden_layers=2), TextSizes(1024, 4, 4096, vocab_size=8192, num_key_value_heads=1)
)
TINY = Architecture(VisionSizes(32, 1, 2, 64, 28, 14), TextSizes(64, 2, 128, 4, 1, 16, vocab_size=2048))
ROWS = (32, 16, 8, 4, 2, 1)
#: Of the free memory, what a training step is planned to take at most.
MEMORY_SHARE = 0.9
#: Steps of a chunk, also with --tiny, and dimensions of an action.
HORIZON, TINY_HORIZON, DIMS = 20, 4, 7


@dataclass
class Report:
    """What was found: printed at once and written to a file after each part.

    Attributes:
        output: JSON file, or None.
        about: the machine.
        rows: one for each number or check.
    """

    output: Path | None
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""

    def add(self, name: str, value: float, unit: str, note: str = "", *, ok: bool | None = None) -> None:
        """One number, with what it is to be compared with in words; `ok` makes it a check."""
        self.rows.append({"part": self.part, "name": name, "value": value, "unit": unit, "note": note, "ok": ok})
        verdict = "" if ok is None else ("ok   " if ok else "FAIL ")
        print(f"  {name:54} {value:>11.4g} {unit:8} {verdict}{note}", flush=True)

    def leave_out(self, name: str, reason: str, *, ok: bool | None = None) -> None:
        """Something that was not measured."""
        self.rows.append({"part": self.part, "name": name, "value": None, "unit": "", "note": reason, "ok": ok})
        print(f"  {name:54} {'':>11} {'':8} {'' if ok is None else 'ERROR '}left out: {reason}", flush=True)

    def save(self) -> None:
        """Write what there is."""
        if self.output is not None:
            self.output.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")

    @property
    def failed(self) -> int:
        """Checks that failed, parts that raised or had no time."""
        return sum(row["ok"] is False for row in self.rows)


@dataclass(frozen=True)
class Bench:
    """What the parts share.

    Attributes:
        device: where it runs.
        tiny: small sizes.
        report: where results go.
        rates: operations/s by format and bytes/s ("memory"), filled by `device`.
    """

    device: torch.device
    tiny: bool
    report: Report
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], Any], repeats: int = 5, warm_up: int = 2) -> float:
        """Median seconds of a call, from an idle device to an idle device."""
        times = []
        for turn in range(warm_up + repeats):
            self.synchronize()
            begun = time.perf_counter()
            function()
            self.synchronize()
            if turn >= warm_up:
                times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def free(self) -> None:
        """Give memory back that nothing holds any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def model(self, sizes: Architecture, dtype: torch.dtype) -> PaliGemma:
        """Random weights, drawn on the device: drawing billions on the CPU would take a minute."""
        with torch.device("meta"):
            model = PaliGemma(sizes, tied_head=True, dtype=dtype)
        generator = torch.Generator(self.device).manual_seed(0)
        state: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():  # a shared tensor comes once, under the table's name
            values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.device)
            if parameter.ndim > 1:
                values.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            elif "norm" in name and name.endswith("weight") and name.startswith("vision_tower"):
                values.fill_(1)
            state[name] = values
        state["lm_head.weight"] = state["embed_tokens.weight"]
        model.load_state_dict(state, strict=True, assign=True)
        model.decoder.lay_side_by_side()
        return model.eval()


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 products and convolutions may run as TF32; torch's defaults are no and yes."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


# -------------------------------------------------------------------------------------------------------------- device


def device_part(bench: Bench) -> None:
    """Rates that everything else is compared with."""
    size = 256 if bench.tiny else 8192
    published = published_numbers(bench)
    for name, dtype, allowed in (
        ("bfloat16", torch.bfloat16, False),
        ("tf32", torch.float32, True),
        ("float32", torch.float32, False),
    ):
        left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
        with tf32(allowed):
            rate = 2 * size**3 / bench.seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
        bench.rates[name] = rate
        note = "" if published is None else f"{rate / getattr(published, name):.0%} of the published rate"
        bench.report.add(f"matrix product, {name}", rate / 1e12, "TFLOP/s", note)
    block = torch.zeros(2**18 if bench.tiny else 2**28, device=bench.device)
    target = torch.empty_like(block)
    bench.rates["memory"] = 2 * block.nbytes / bench.seconds(lambda: target.copy_(block))
    note = "" if published is None else f"{bench.rates['memory'] / published.bandwidth:.0%} of the published bandwidth"
    bench.report.add("memory, a copy's reads and writes", bench.rates["memory"] / 1e9, "GB/s", note)


def published_numbers(bench: Bench) -> Any:
    """The numbers of this GPU, where cost_model.py has them."""
    name = torch.cuda.get_device_name(bench.device) if bench.cuda else ""
    if "PCIe" in name or "NVL" in name:
        return None  # cards of the same name with other numbers
    found = [gpu for key, gpu in GPUS.items() if all(word in name for word in key.split())]
    return found[0] if found else None


# -------------------------------------------------------------------------------------------------------------- parity


def make_policy(model: PaliGemma) -> tuple[PI0FastPolicy, dict[str, Any]]:
    """A policy around a model, with small tokenizers that are made here, and a batch of two rows for training."""
    random = np.random.default_rng(0)
    horizon = TINY_HORIZON if model.architecture.text == TINY.text else HORIZON
    paths = random.normal(0, 0.1, (64, 60, DIMS)).cumsum(axis=1).astype(np.float32)
    normalizer = Normalizer.fit(lambda: iter(paths))
    chunks = np.concatenate([paths[:, start : start + horizon] for start in (0, 20, 40)])
    tokenizer = FastTokenizer.fit(normalizer.apply(chunks), vocab_size=512, normalizer=normalizer)
    pixels = model.architecture.vision.image_size
    features = {
        "observation.images.front": {"type": "VISUAL", "shape": [3, pixels, pixels]},
        "observation.state": {"type": "STATE", "shape": [DIMS]},
    }
    config = PI0FastConfig(
        input_features=features,  # type: ignore[arg-type]
        output_features={"action": {"type": "ACTION", "shape": [DIMS]}},  # type: ignore[dict-item]
        chunk_size=horizon,
        n_action_steps=horizon,
        image_resolution=(pixels, pixels),
    )
    statistics_ = {"observation.state": normalizer.statistics, "action": normalizer}
    processors = PolicyProcessors.from_statistics(config, statistics_)
    text = TinyTextTokenizer(model.architecture.text.vocab_size)
    batch = {
        "observation.images.front": random.integers(0, 256, (2, pixels, pixels, 3), dtype=np.uint8),
        "observation.state": paths[:2, 0],
        "task": ["pick up the cube", "stop"],
        "action": paths[:2, :horizon],
    }
    return PI0FastPolicy(config, model, processors, text, tokenizer), batch


@dataclass(frozen=True)
class Outcome:
    """Loss, gradients side by side (float32, on the CPU) and greedy action ids of a policy."""

    loss: float
    gradients: Tensor
    ids: Tensor

    @classmethod
    def of(cls, sizes: Architecture, dtype: torch.dtype, device: torch.device) -> Outcome:
        """The same weights and the same batch every time."""
        policy, batch = make_policy(initialize(sizes, dtype, device=device))
        policy.train()
        loss, _ = policy(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = torch.cat([p.grad.float().flatten().cpu() for p in policy.parameters() if p.grad is not None])
        policy.zero_grad(set_to_none=True)
        policy.eval()
        observation = {key: value for key, value in batch.items() if key != "action"}
        _, info = policy.predict_action_chunk(observation, return_info=True)
        return cls(float(loss.detach()), gradients, info.token_ids.cpu())

    def differences(self, other: Outcome) -> tuple[float, float]:
        """Relative: of the losses, and the norm of the difference of the gradients."""
        loss = abs(self.loss - other.loss) / abs(other.loss)
        return loss, float((self.gradients - other.gradients).norm() / other.gradients.norm())

    def same_ids(self, other: Outcome) -> float:
        """Share of the ids of `other` that are the same, row by row from the start to the first other one."""
        width = max(self.ids.shape[1], other.ids.shape[1])
        ours, theirs = (functional.pad(ids, (0, width - ids.shape[1]), value=-1) for ids in (self.ids, other.ids))
        return float((ours == theirs).cumprod(dim=1).sum() / theirs.numel())


def parity_part(bench: Bench) -> None:
    """The device against the CPU."""
    sizes, report = TINY if bench.tiny else PARITY, bench.report
    cpu = torch.device("cpu")
    exact = Outcome.of(sizes, torch.float32, cpu)
    with tf32(False):
        found = Outcome.of(sizes, torch.float32, bench.device)
    loss, gradients = found.differences(exact)
    report.add("float32 against the CPU: loss", loss, "relative", "at most 1e-5", ok=loss <= 1e-5)
    report.add("float32 against the CPU: gradients", gradients, "relative", "at most 1e-4", ok=gradients <= 1e-4)
    same = found.same_ids(exact)
    report.add("float32 against the CPU: greedy ids", same, "share", "all", ok=same == 1)
    reference = Outcome.of(sizes, torch.bfloat16, cpu)
    rounded = Outcome.of(sizes, torch.bfloat16, bench.device)
    for name, ours, cpus in zip(
        ("loss", "gradients"), rounded.differences(exact), reference.differences(exact), strict=True
    ):
        # A loss may be near by chance: a floor of one bfloat16 rounding of it.
        bound = max(2 * cpus, 2.0**-8)
        report.add(f"bfloat16 against float32: {name}", ours, "relative", f"at most {bound:.2g}", ok=ours <= bound)
    report.add("bfloat16 against float32: greedy ids before another", rounded.same_ids(exact), "share")


# ----------------------------------------------------------------------------------------------------------- attention


def attention_part(bench: Bench) -> None:
    """Kernels on the shapes of prefill, training, a step and the vision tower."""
    text, vision = (TINY if bench.tiny else Architecture.variant("gemma_2b")).text, VisionSizes()
    columns, rows = (24, 2) if bench.tiny else (633, 8)  # 633: no kernel's favourite
    heads, width = text.num_attention_heads, text.head_dim
    images, patches = (2, 8) if bench.tiny else (16, vision.patches)
    for name, shape, keys, dtype, trained in (
        ("training", (rows, heads, columns), columns, torch.bfloat16, True),
        ("prefill", (1, heads, columns), columns, torch.bfloat16, False),
        ("step", (1, 1, heads), columns, torch.bfloat16, False),
        ("vision", (images, vision.num_attention_heads, patches), patches, torch.float32, True),
    ):
        attention_case(bench, name, (*shape, 72 if name == "vision" else width), keys, dtype, trained)


def attention_case(
    bench: Bench, name: str, shape: tuple[int, ...], keys: int, dtype: torch.dtype, trained: bool
) -> None:
    """Every kernel that takes this case, against the plain arithmetic in float32."""
    generator = torch.Generator(bench.device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=bench.device, generator=generator).to(dtype).requires_grad_(trained)

    batch, heads, queries, width = shape
    query = random(*shape)
    # As the model has them: in the decoder all heads share one key and one value, as a view.
    key, value = (random(batch, heads if name == "vision" else 1, keys, width) for _ in range(2))
    wide = [part.expand(batch, heads, keys, width) for part in (key, value)]
    mask = None
    if name != "vision":
        seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=bench.device)
        seen[..., keys - keys // 8 :] = False  # padding
        mask = torch.zeros(seen.shape, dtype=dtype, device=bench.device).masked_fill_(~seen, float("-inf"))

    def run() -> Tensor:
        result = functional.scaled_dot_product_attention(query, *wide, attn_mask=mask)
        if trained:
            query.grad = key.grad = value.grad = None
            result.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return result

    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        parts = (query.float(), *(part.float() for part in wide))
        exact = functional.scaled_dot_product_attention(*parts, attn_mask=None if mask is None else mask.float())
    kernels = {"default": None, "math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    kernels |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for kernel, backend in kernels.items():
        try:
            with tf32(False):
                attention_kernel(bench, f"{name}, {kernel}", run, exact, backend)
        except RuntimeError as error:
            # Of a kernel that was asked for; the default one must work.
            reason = str(error).splitlines()[0][:80]
            bench.report.leave_out(f"{name}, {kernel}", reason, ok=False if backend is None else None)


def attention_kernel(
    bench: Bench, name: str, run: Callable[[], Tensor], exact: Tensor, backend: SDPBackend | None
) -> None:
    """One kernel: how far it is from `exact`, and its time."""
    with nullcontext() if backend is None else sdpa_kernel(backend):
        result = run()
        error = float((result.detach().float() - exact).norm() / exact.norm())
        taken = bench.seconds(run)
    bound = 1e-2 if result.dtype == torch.bfloat16 else 1e-4
    bench.report.add(name, taken * 1e3, "ms", f"difference {error:.1e}, at most {bound:.0e}", ok=error <= bound)


# ------------------------------------------------------------------------------------------------------------ training


def training_part(bench: Bench) -> None:
    """Whole steps of the published sizes."""
    variants = (
        {"tiny": TINY} if bench.tiny else {name: Architecture.variant(name) for name in ("gemma_300m", "gemma_2b")}
    )
    for name, sizes in variants.items():
        how = Training()
        load = fitting_load(bench, sizes, how)
        if load is None:
            bench.report.leave_out(f"{name}, a step", "its weights, gradients and moments do not fit into memory")
            continue
        train_variant(bench, f"{name}, {load.rows} rows", sizes, load, how)
        bench.free()


def fitting_load(bench: Bench, sizes: Architecture, how: Training) -> Load | None:
    """The most rows that the formula says fit; two cameras."""
    if not bench.cuda:
        return Load(2, 1, 8, 8)
    free, _ = torch.cuda.mem_get_info(bench.device)
    fits = (Load(rows) for rows in ROWS if training_memory(sizes, Load(rows), how).peak <= MEMORY_SHARE * free)
    return next(fits, None)


def train_variant(bench: Bench, name: str, sizes: Architecture, load: Load, how: Training) -> None:
    """Seconds and peak of a step."""
    model = bench.model(sizes, torch.bfloat16)
    model.gradient_checkpointing = how.checkpointing
    step, losses = training_step(model, load), []
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats(bench.device)

    def run() -> None:
        losses.append(step(len(losses)))

    published = published_numbers(bench)
    for allowed in (False, True):
        with tf32(allowed):
            taken = bench.seconds(run, repeats=3, warm_up=2)
        note = f"{load.rows / taken:.3g} rows/s"
        if published is not None:
            said = training_time(sizes, load, how, published, TRAFFIC, tf32=allowed).total
            note += f"; formula {said * 1e3:.4g} ms, measured is {taken / said:.2f} of it"
        bench.report.add(f"{name}, a step{', TF32' if allowed else ''}", taken * 1e3, "ms", note)
    finite = bool(torch.stack(losses).isfinite().all())
    bench.report.add(f"{name}, loss of the last step", float(losses[-1]), "nats", "must be a number", ok=finite)
    if bench.cuda:
        peak, said = torch.cuda.max_memory_allocated(bench.device), training_memory(sizes, load, how).peak
        note = f"formula {said / 1e9:.1f} GB, measured is {peak / said:.2f} of it"
        bench.report.add(f"{name}, peak of tensors", peak / 1e9, "GB", note)


# ---------------------------------------------------------------------------------------------------------- generation


def graphed(bench: Bench, function: Callable[[], None]) -> Callable[[], Any]:
    """A call that replays the work of `function` as one CUDA graph.

    The function must read and write the same tensors every time, and never wait for the device. It is called three
    times first, on a stream of its own, as capturing asks for; what it changed then is the caller's to put back.
    """
    if not bench.cuda:
        return function
    stream = torch.cuda.Stream(bench.device)
    stream.wait_stream(torch.cuda.current_stream(bench.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(bench.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Generation:
    """One row after its prompt, in tensors that stay where they are, so that its steps can be captured.

    All of it must run in inference mode.
    """

    def __init__(self, model: PaliGemma, load: Load) -> None:
        sizes, device = model.architecture, model.device
        self.model, self.load = model, load
        pixels = sizes.vision.image_size
        self.images = torch.zeros(load.cameras, 3, pixels, pixels, device=device)
        self.ids = torch.randint(4, sizes.text.vocab_size, (1, load.prompt), device=device)
        self.length = load.cameras * sizes.vision.patches + load.prompt
        capacity = -(-(self.length + load.target) // 64) * 64
        self.cache: KeyValueCache = model.new_cache(1, capacity)
        self.choices = torch.arange(4, 4 + load.choices, device=device)
        self.head = model.head_rows(self.choices)
        self.chosen = torch.zeros(1, dtype=torch.int64, device=device)
        self.position, self.column = torch.zeros_like(self.chosen), torch.zeros_like(self.chosen)
        self.seen = torch.zeros(1, capacity, dtype=torch.bool, device=device)
        self.features = model.encode_images(self.images).flatten(0, 1)[None]
        valid = torch.ones(1, load.prompt, dtype=torch.bool, device=device)
        seen = torch.ones(self.features.shape[:2], dtype=torch.bool, device=device)
        valid, causal, self.positions = sequence_layout(seen, valid, torch.zeros_like(valid))
        self.mask = attention_mask(valid, causal)
        self.last = torch.full((1, 1), self.length - 1, device=device)

    def encode(self) -> None:
        """Images to vectors."""
        self.features.copy_(self.model.encode_images(self.images).flatten(0, 1)[None])

    def prefill(self) -> None:
        """Images and prompt through the decoder, and the first id."""
        embeddings = torch.cat((self.features, self.model.embed(self.ids)), dim=1)
        hidden = self.model.prefill(embeddings, self.mask, self.positions, self.cache, self.last)[:, 0]
        self._choose(hidden)
        self.position.fill_(self.length)
        self.column.fill_(self.length)
        self.seen.fill_(False)
        self.seen[:, : self.length] = True

    def step(self) -> None:
        """One id more."""
        self.seen.index_fill_(1, self.column, True)
        hidden = self.model.step(self.chosen, self.seen, self.position, self.column, self.cache)
        self._choose(hidden)
        self.position.add_(1)
        self.column.add_(1)

    def _choose(self, hidden: Tensor) -> None:
        self.chosen.copy_(self.choices.take(self.model.logits(hidden, self.head).argmax(1)))

    def run(self, step: Callable[[], Any]) -> list[int]:
        """The ids of a whole chunk."""
        self.prefill()
        ids = [self.chosen.clone()]
        for _ in range(self.load.target - 1):
            step()
            ids.append(self.chosen.clone())
        return [int(each) for each in ids]


def generation_part(bench: Bench) -> None:
    """Latencies of gemma_2b."""
    sizes = TINY if bench.tiny else Architecture.variant("gemma_2b")
    if bench.cuda:
        free, need = torch.cuda.mem_get_info(bench.device)[0], 1.3 * Parameters.of(sizes).weight_bytes("bfloat16")
        if free < need:
            bench.report.leave_out("gemma_2b", f"needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
            return
    model = bench.model(sizes, torch.bfloat16)
    load = Load(1, 1, 8, 4, 64) if bench.tiny else Load(1)
    with torch.inference_mode():
        state = Generation(model, load)
        eager = state.run(state.step)
        measure_prefill(bench, state, sizes)
        measure_steps(bench, "called one by one", state, state.step, eager)
        state.prefill()
        measure_steps(bench, "CUDA graph", state, graphed(bench, state.step), eager)
    attempt(bench, "predict_action_chunk", lambda: measure_chunk(bench, model))
    for mode in ("default", "reduce-overhead"):
        attempt(bench, f"compiled, {mode}", lambda mode=mode: measure_compiled(bench, mode, state, eager))  # type: ignore[misc]


def measure_prefill(bench: Bench, state: Generation, sizes: Architecture) -> None:
    """Images and prefill, with and without CUDA graphs, beside the formula."""
    published = published_numbers(bench)
    for allowed in (False, True):
        said = None if published is None else generation_time(sizes, state.load, published, tf32=allowed)
        with tf32(allowed):
            for name, function in (("images", state.encode), ("prefill", state.prefill)):
                if name == "prefill" and allowed:
                    continue  # nothing of it is float32
                plain = bench.seconds(function)
                replayed = bench.seconds(graphed(bench, function))
                part = {"images": "vision", "prefill": "prefill"}[name]
                note = "" if said is None else f"formula {getattr(said, part) * 1e3:.3g} ms"
                kind = f"{state.load.cameras} images{', TF32' if allowed else ''}" if name == "images" else name
                bench.report.add(f"{kind}, called one by one", plain * 1e3, "ms", note)
                bench.report.add(f"{kind}, CUDA graph", replayed * 1e3, "ms", f"{plain / replayed:.2f} times faster")


def measure_steps(
    bench: Bench, name: str, state: Generation, step: Callable[[], Any], eager: list[int], *, exact: bool = True
) -> None:
    """Seconds per token of one way to run a step, and whether it generates the same ids.

    exact: the same kernels run, so that other ids are a fault; compiled ones may round otherwise.
    """
    ids = state.run(step)
    same = next((i for i, (one, two) in enumerate(zip(ids, eager, strict=True)) if one != two), len(eager))
    ok = same == len(eager) if exact else None
    bench.report.add(f"{name}: ids as in the first run", same, "ids", f"of {len(eager)}", ok=ok)

    def tokens() -> None:
        # From the same column every time: there is room for `target` ids.
        state.position.fill_(state.length)
        state.column.fill_(state.length)
        for _ in range(state.load.target - 1):
            step()

    taken = bench.seconds(tokens, repeats=3, warm_up=1) / (state.load.target - 1)
    note = ""
    if "memory" in bench.rates:
        floor = token_bytes(state.model.architecture, state.load) / bench.rates["memory"]
        note = f"reading the weights takes {floor * 1e3:.3g} ms: {taken / floor:.2f} times that"
    bench.report.add(f"{name}: each token", taken * 1e3, "ms", note)


@torch.inference_mode()
def measure_compiled(bench: Bench, mode: str, state: Generation, eager: list[int]) -> None:
    """Steps through torch.compile; in the mode reduce-overhead as CUDA graphs, where nothing stands in their way."""
    torch._dynamo.reset()
    counters.clear()
    state.model.compile(mode)
    for tensor in state.cache.stores:
        # A graph may write into inputs only where they stay in place, which torch must be told.
        torch._dynamo.mark_static_address(tensor)

    def step() -> None:
        if bench.cuda and mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        state.step()

    # The prefill is not what is measured here, and compiling it takes as long again.
    state.model._compiled_prefill = None
    begun = time.perf_counter()
    state.run(step)
    bench.synchronize()
    bench.report.add(f"compiled, {mode}: first chunk", time.perf_counter() - begun, "s", "with the compilation")
    measure_steps(bench, f"compiled, {mode}", state, step, eager, exact=False)
    skipped = counters["inductor"]["cudagraph_skips"]
    if mode == "reduce-overhead" and bench.cuda:
        bench.report.add("CUDA graphs that the compiler left out", skipped, "graphs", "0 where they are used")


def measure_chunk(bench: Bench, model: PaliGemma) -> None:
    """From pictures to actions, as `predict_action_chunk` does it; nothing compiled."""
    policy, batch = make_policy(model)
    observation = {key: value[:1] for key, value in batch.items() if key != "action"}
    steps = 0

    def run() -> None:
        nonlocal steps
        _, info = policy.predict_action_chunk(observation, return_info=True)
        steps = info.steps

    taken = bench.seconds(run, repeats=3, warm_up=1)
    bench.report.add(
        f"predict_action_chunk, 1 camera, {steps} ids", taken * 1e3, "ms", f"{1e3 * taken / steps:.3g} ms per id"
    )


# ------------------------------------------------------------------------------------------------------------- compile


def compile_part(bench: Bench) -> None:
    """A training step compiled: the same numbers, and its time."""
    sizes = TINY if bench.tiny else PARITY
    exact = loss_and_gradients(bench, sizes, torch.float32, compiled=False)
    found = loss_and_gradients(bench, sizes, torch.float32, compiled=True)
    loss = abs(found[0] - exact[0]) / abs(exact[0])
    gradients = float((found[1] - exact[1]).norm() / exact[1].norm())
    bench.report.add("float32, compiled: loss", loss, "relative", "at most 1e-5", ok=loss <= 1e-5)
    bench.report.add("float32, compiled: gradients", gradients, "relative", "at most 1e-4", ok=gradients <= 1e-4)
    bench.free()
    sizes, load = (TINY, Load(2, 1, 8, 8)) if bench.tiny else (Architecture.variant("gemma_300m"), Load(8))
    for compiled in (False, True):
        torch._dynamo.reset()
        model = bench.model(sizes, torch.bfloat16)
        model.gradient_checkpointing = True
        if compiled:
            model.compile("default")
        step = training_step(model, load)
        begun = time.perf_counter()
        step(0)
        bench.synchronize()
        first = time.perf_counter() - begun
        taken = bench.seconds(lambda step=step: step(1), repeats=3)  # type: ignore[misc]
        kind = "compiled" if compiled else "not compiled"
        bench.report.add(f"gemma_300m, {load.rows} rows, {kind}", taken * 1e3, "ms", f"the first {first:.1f} s")
        del model, step
        bench.free()


def loss_and_gradients(
    bench: Bench, sizes: Architecture, dtype: torch.dtype, *, compiled: bool
) -> tuple[float, Tensor]:
    """Of the same weights and batch every time."""
    torch._dynamo.reset()
    policy, batch = make_policy(bench.model(sizes, dtype))
    policy.train()
    if compiled:
        policy.model.compile("default")
    with tf32(False):
        loss, _ = policy(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])
    return float(loss.detach()), gradients


# ------------------------------------------------------------------------------------------------------------------ run

RUN: dict[str, Callable[[Bench], None]] = {
    "device": device_part,
    "parity": parity_part,
    "attention": attention_part,
    "training": training_part,
    "generation": generation_part,
    "compile": compile_part,
}


@contextmanager
def traced_only(wanted: bool) -> Iterator[None]:
    """Within the block torch.compile traces and differentiates functions, but calls torch's own kernels."""
    if not wanted:
        yield
        return
    original = torch.compile
    torch.compile = lambda function, *, mode=None, dynamic=None: original(  # type: ignore[assignment]  # noqa: ARG005
        function, dynamic=dynamic, backend="aot_eager"
    )
    try:
        yield
    finally:
        torch.compile = original  # type: ignore[assignment]


def attempt(bench: Bench, name: str, function: Callable[[], None]) -> None:
    """Call it; what it raises is printed and makes the exit status 1, but does not take other results with it."""
    try:
        function()
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        bench.report.leave_out(name, f"{type(error).__name__}: {first}", ok=False)


def run(bench: Bench, parts: list[str], limit_s: float) -> None:
    """All parts that are wanted and for which there is time."""
    begun = time.perf_counter()
    for part in (part for part in PARTS if part in parts):
        bench.report.part = part
        print(f"{part}, after {time.perf_counter() - begun:.0f} s", flush=True)
        left = limit_s - (time.perf_counter() - begun)
        if not bench.tiny and left < PARTS[part]:
            bench.report.leave_out(part, f"{left:.0f} s are left; raise --limit_s or name it in --parts", ok=False)
            continue
        attempt(bench, part, lambda part=part: RUN[part](bench))  # type: ignore[misc]
        bench.free()
        bench.report.save()


def about(device: torch.device) -> dict[str, Any]:
    """The machine, for the file and the first line."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "memory_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found


def main(argv: list[str] | None = None) -> int:
    """Run and say whether all checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small sizes: does the script run?")
    parser.add_argument("--limit_s", type=float, default=460.0, help="the script ends itself after this many seconds")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --device cpu --tiny tries the script out", file=sys.stderr)
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    faulthandler.dump_traceback_later(arguments.limit_s, exit=True, file=sys.__stderr__ or sys.stderr)
    report = Report(arguments.output, about(device))
    print(", ".join(f"{key} {value}" for key, value in report.about.items()), flush=True)
    try:
        with traced_only(arguments.tiny):
            run(Bench(device, arguments.tiny, report), arguments.parts, arguments.limit_s)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"{report.failed} failed" if report.failed else "all checks passed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
