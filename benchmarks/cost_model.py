"""Formulae: parameters, bytes and floating-point operations of a PaliGemma, and from those memory and time on a GPU.

Numbers only, no torch. `scaling.py` checks the formulae on the machine at hand and prints tables of them; `gpu.py`
prints them beside what it measures. Counted is what this code does: which tensors a layer keeps for the backward pass,
which formats weights, gradients and moments have, what the optimizer and the loss hold for a moment.

Left out: memory of the CUDA context and its libraries (`CONTEXT_BYTES`, an estimate), fragmentation of torch's
allocator, the few hundred bytes per token of masks and positions, and that the last layer runs for target positions
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pi0_fast.model.architecture import Architecture, TextSizes, VisionSizes
from pi0_fast.model.loss import SCORES_BYTES

BYTES = {"float32": 4, "bfloat16": 2}
#: What a CUDA context, cuBLAS's work space and the kernels take; an estimate.
CONTEXT_BYTES = 1e9
#: Shares of the published rates that large matrix products, passes over memory and links between GPUs reach: assumed,
#: until gpu.py has measured them.
MATMUL_SHARE, BANDWIDTH_SHARE, LINK_SHARE = 0.6, 0.8, 0.7


@dataclass(frozen=True)
class Gpu:
    """Published numbers of a device; dense (without sparsity), and one direction of a link.

    Attributes:
        memory: bytes.
        bandwidth: bytes/s of its memory.
        bfloat16, tf32, float32: operations/s of matrix products in each format.
        link: bytes/s to other GPUs of the same machine.
        source: where the numbers are published.
    """

    memory: float
    bandwidth: float
    bfloat16: float
    tf32: float
    float32: float
    link: float
    source: str


_ADA = "NVIDIA Ada GPU architecture whitepaper"
GPUS = {
    "RTX 4090": Gpu(24e9, 1008e9, 165.2e12, 82.6e12, 82.6e12, 32e9, f"{_ADA} (float32 accumulation), PCIe 4.0 x16"),
    "L40S": Gpu(48e9, 864e9, 362e12, 183e12, 91.6e12, 32e9, "NVIDIA L40S datasheet, PCIe 4.0 x16"),
    "A100 80GB": Gpu(80e9, 2039e9, 312e12, 156e12, 19.5e12, 300e9, "NVIDIA A100 datasheet (SXM)"),
    "H100 80GB": Gpu(80e9, 3350e9, 989e12, 494e12, 67e12, 450e9, "NVIDIA H100 datasheet (SXM)"),
    "H200": Gpu(141e9, 4800e9, 989e12, 494e12, 67e12, 450e9, "NVIDIA H200 datasheet (SXM)"),
}


@dataclass(frozen=True)
class Load:
    """What one GPU has before it.

    Attributes:
        rows: samples of a batch.
        cameras: images of a sample.
        prompt: ids of the text.
        target: ids to be predicted (training) or generated.
        choices: head rows that generation computes (constrained), at most the vocabulary.
    """

    rows: int = 1
    cameras: int = 2
    prompt: int = 60
    target: int = 60
    choices: int = 1024

    def images(self, sizes: Architecture) -> int:
        """Image vectors of the batch."""
        return self.rows * self.cameras * sizes.vision.patches

    def sequence(self, sizes: Architecture) -> int:
        """Columns of a row: image vectors, text and targets."""
        return self.cameras * sizes.vision.patches + self.prompt + self.target

    def tokens(self, sizes: Architecture) -> int:
        """Columns of the batch."""
        return self.rows * self.sequence(sizes)


# ---------------------------------------------------------------------------------------------------------- parameters


def text_matrices(text: TextSizes) -> int:
    """Parameters of one decoder layer's matrices: queries and output, keys and values, three of the mlp."""
    attention = 2 * text.hidden_size * text.head_dim * (text.num_attention_heads + text.num_key_value_heads)
    return attention + 3 * text.hidden_size * text.intermediate_size


def vision_matrices(vision: VisionSizes) -> int:
    """Parameters of one encoder layer's matrices, without biases."""
    return 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size


@dataclass(frozen=True)
class Parameters:
    """Parameters by what they cost.

    Attributes:
        layer: matrices of one decoder layer.
        layers: of all.
        table: the token table; `head` the same again where it is not shared, else 0.
        head: see `table`.
        vision: vision tower and projector; float32 in every model.
        norms: of the decoder; float32 in every model.
    """

    layer: int
    layers: int
    table: int
    head: int
    vision: int
    norms: int

    @classmethod
    def of(cls, sizes: Architecture, *, tied_head: bool = True) -> Parameters:
        """Count them."""
        text, vision = sizes.text, sizes.vision
        width = vision.hidden_size
        # Two norms of two vectors; biases of four projections and of the mlp's two.
        per_layer = vision_matrices(vision) + 4 * width + 4 * width + vision.intermediate_size + width
        patches = 3 * vision.patch_size**2 * width + width + vision.patches * width
        projector = width * text.hidden_size + text.hidden_size
        table = text.vocab_size * text.hidden_size
        return cls(
            layer=text_matrices(text),
            layers=text.num_hidden_layers * text_matrices(text),
            table=table,
            head=0 if tied_head else table,
            vision=vision.num_hidden_layers * per_layer + patches + 2 * width + projector,
            norms=(2 * text.num_hidden_layers + 1) * text.hidden_size,
        )

    @property
    def total(self) -> int:
        """All."""
        return self.layers + self.table + self.head + self.vision + self.norms

    def weight_bytes(self, dtype: str) -> float:
        """Of the weights: what is not float32 in every model has the model's format."""
        return BYTES[dtype] * (self.layers + self.table + self.head) + 4 * (self.vision + self.norms)


def lora_parameters(text: TextSizes, rank: int) -> int:
    """Of adapters in all matrices of the decoder's layers: rank x (inputs + outputs) of each."""
    heads, groups = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    width, wide = text.hidden_size, text.intermediate_size
    sums = 2 * (width + heads) + 2 * (width + groups) + 3 * (width + wide)
    return text.num_hidden_layers * rank * sums


# ---------------------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Operations:
    """Floating-point operations (a product and a sum are two) of a forward pass, by the format they run in.

    Attributes:
        decoder: of the decoder's layers, attention included.
        vision: of the vision tower and projector: always float32.
        head: scores of the target positions.
    """

    decoder: float
    vision: float
    head: float

    @classmethod
    def of(cls, sizes: Architecture, load: Load) -> Operations:
        """Two operations per parameter of a matrix and column; attention takes 4 x head width x columns^2 per head."""
        text, vision = sizes.text, sizes.vision
        columns, images = load.sequence(sizes), load.rows * load.cameras
        attention = 4 * text.num_attention_heads * text.head_dim * columns**2
        decoder = text.num_hidden_layers * (2 * text_matrices(text) * columns + attention) * load.rows
        per_layer = 2 * vision_matrices(vision) * vision.patches + 4 * vision.hidden_size * vision.patches**2
        ends = 2 * vision.patches * vision.hidden_size * (3 * vision.patch_size**2 + text.hidden_size)
        head = 2.0 * load.rows * load.target * text.vocab_size * text.hidden_size
        return cls(decoder, images * (vision.num_hidden_layers * per_layer + ends), head)


# --------------------------------------------------------------------------------------------------------- activations


def text_saved_bytes(text: TextSizes, dtype: str) -> int:
    """Bytes that one decoder layer keeps per column for its backward pass.

    Each of two norms: the input, the normalised and the inverse length in float32, and the result. Attention: queries,
    keys, values, the result, and a float32 per head. The mlp: gate before and after the gelu, up, and their product.
    """
    size = BYTES[dtype]
    norms = 2 * (8 * text.hidden_size + 4 + size * text.hidden_size)
    attention = size * text.head_dim * 2 * (text.num_attention_heads + text.num_key_value_heads)
    return norms + attention + 4 * text.num_attention_heads + 4 * size * text.intermediate_size


def vision_saved_bytes(vision: VisionSizes) -> int:
    """Bytes that one encoder layer keeps per patch: two norms' inputs, results, means and inverse deviations, queries,
    keys, values and the result, a float32 per head, and the mlp before and after the gelu.
    """
    return 4 * (8 * vision.hidden_size + 4 + vision.num_attention_heads + 2 * vision.intermediate_size)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        dtype: of the model.
        checkpointing: `gradient_checkpointing`.
        rank: of adapters that are trained alone; 0 trains everything.
        gpus: over how many FSDP divides weights, gradients and the optimizer's state; 1 is without FSDP.
        tied_head: whether head and token table are one tensor.
    """

    dtype: str = "bfloat16"
    checkpointing: bool = True
    rank: int = 0
    gpus: int = 1
    tied_head: bool = True


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Attributes:
        weights: of the model.
        state: float32 copies and two moments of what is trained.
        gradients: of what is trained.
        activations: kept by the forward pass.
        peak: most of all that is there at one time, with what is there for a moment; `CONTEXT_BYTES` not counted.
    """

    weights: float
    state: float
    gradients: float
    activations: float
    peak: float


def inference_memory(sizes: Architecture, load: Load, dtype: str = "bfloat16") -> Memory:
    """Weights, the cache of keys and values, and the widest layer of the prefill (gate, up and their product)."""
    text, vision = sizes.text, sizes.vision
    weights = Parameters.of(sizes).weight_bytes(dtype)
    columns, images = load.tokens(sizes), load.images(sizes)
    cache = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * BYTES[dtype] * columns
    decoder = columns * BYTES[dtype] * (3 * text.intermediate_size + 2 * text.hidden_size)
    encoder = images * 4 * (2 * vision.intermediate_size + 2 * vision.hidden_size)
    return Memory(weights, 0, 0, cache, weights + cache + max(decoder, encoder))


def training_memory(sizes: Architecture, load: Load, how: Training) -> Memory:
    """The highest of four moments: begin and end of the decoder's backward pass, end of the vision tower's, update.

    A trained bfloat16 parameter takes 16 bytes (itself, gradient, float32 copy, two moments), a float32 one 16 too.
    """
    text, size = sizes.text, BYTES[how.dtype]
    p = Parameters.of(sizes, tied_head=how.tied_head)
    weights = p.weight_bytes(how.dtype) / how.gpus
    if how.rank:
        adapters = lora_parameters(text, how.rank)
        trained = {"decoder": adapters * size, "table": 0, "vision": 0}
        copies = adapters * (8 + (4 if size == 2 else 0))
        weights += adapters * size / how.gpus
        largest = how.rank * text.intermediate_size
    else:
        trained = {
            "decoder": p.layers * size + p.norms * 4,
            "table": (p.table + p.head) * size,
            "vision": p.vision * 4,
        }
        half = p.layers + p.table + p.head
        copies = 8 * p.total + (4 * half if size == 2 else 0)
        largest = p.table
    gradients = {part: value / how.gpus for part, value in trained.items()}
    kept_decoder, kept_vision, one_layer = _kept(sizes, load, how)
    head, loss = _loss_bytes(sizes, load, how)
    gathered = _gathered_bytes(how, p)
    begin = kept_decoder + kept_vision + head + loss
    # Gradients inside a layer: those of gate, up and their product at once.
    inside = one_layer + 3 * size * text.intermediate_size * load.tokens(sizes)
    middle = kept_vision + max(head, gradients["table"]) + gradients["decoder"] + inside
    # The token table's own gradient is made beside the head's.
    end = sum(gradients.values()) + (trained["table"] if not how.rank else 0)
    one_more = 4 * largest / how.gpus if size == 2 else 0
    update = sum(gradients.values()) + one_more
    state = copies / how.gpus
    peak = weights + state + max(begin + gathered, middle + gathered, end + gathered, update)
    return Memory(weights, state, sum(gradients.values()), kept_decoder + kept_vision, peak)


def _kept(sizes: Architecture, load: Load, how: Training) -> tuple[float, float, float]:
    """Bytes that decoder and vision tower keep, and what a decoder layer adds while it is computed again."""
    text, vision, size = sizes.text, sizes.vision, BYTES[how.dtype]
    columns, images = load.tokens(sizes), load.images(sizes)
    layer = text_saved_bytes(text, how.dtype) * columns
    encoder = vision_saved_bytes(vision) * images
    if how.rank:  # a frozen vision tower keeps nothing; an adapter keeps its own narrow result
        encoder = 0
        layer += 7 * how.rank * size * columns
    if not how.checkpointing:
        return text.num_hidden_layers * layer, vision.num_hidden_layers * encoder, 0
    kept_vision = vision.num_hidden_layers * 4 * vision.hidden_size * images if not how.rank else 0
    return text.num_hidden_layers * size * text.hidden_size * columns, kept_vision, max(layer, encoder)


def _loss_bytes(sizes: Architecture, load: Load, how: Training) -> tuple[float, float]:
    """The head's gradient, and the scores of a chunk of positions: in float32, and once more in bfloat16."""
    text, size = sizes.text, BYTES[how.dtype]
    positions = min(max(1, SCORES_BYTES // (4 * text.vocab_size)), load.rows * load.target)
    scores = positions * text.vocab_size * (4 + (2 if size == 2 else 0))
    head = 0 if how.rank else text.vocab_size * text.hidden_size * size
    return head, scores


def _gathered_bytes(how: Training, p: Parameters) -> float:
    """With FSDP: two layers whole at a time, their gradient, and what belongs to no layer from forward to backward."""
    if how.gpus == 1:
        return 0.0
    size = BYTES[how.dtype]
    root = (p.table + p.head) * size + (0 if how.rank else p.table * size)
    return (2 if how.rank else 3) * p.layer * size + root


# ---------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Traffic:
    """Bytes that everything but the matrix products reads and writes, measured by scaling.py on one layer.

    Attributes:
        text: per decoder layer and column, forward; `text_backward` backward.
        text_backward: see `text`.
        vision: per encoder layer and patch, forward; `vision_backward` backward.
        vision_backward: see `vision`.
    """

    text: float
    text_backward: float
    vision: float
    vision_backward: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step on one GPU.

    Attributes:
        decoder, vision, head: matrix products.
        elementwise: everything else of the layers, limited by memory.
        update: the optimizer's passes over weights, gradients and moments.
        link: between GPUs; hidden behind the products as far as these take as long.
    """

    decoder: float
    vision: float
    head: float
    elementwise: float
    update: float
    link: float

    @property
    def total(self) -> float:
        """All, with the link's time only where it is longer than what it hides behind."""
        compute = self.decoder + self.vision + self.head + self.elementwise
        return max(compute, self.link) + self.update


def training_time(
    sizes: Architecture, load: Load, how: Training, gpu: Gpu, traffic: Traffic, *, tf32: bool = False
) -> StepTime:
    """Seconds of one step at the assumed shares of the published rates.

    A backward pass takes twice the forward's products (once without gradients of matrices, as under adapters, and none
    in a frozen vision tower); checkpointing takes the forward pass twice. The head's products are taken three times,
    never again. `tf32`: whether float32 products may run as TF32 (torch.set_float32_matmul_precision("high")).
    """
    operations = Operations.of(sizes, load)
    again = 1 if how.checkpointing else 0
    decoder_passes = (2 if how.rank else 3) + again
    vision_passes = 1 if how.rank else 3 + again
    rate = {"float32": gpu.tf32 if tf32 else gpu.float32, "bfloat16": gpu.bfloat16}
    tower, decoder = rate["float32"] * MATMUL_SHARE, rate[how.dtype] * MATMUL_SHARE
    columns = load.tokens(sizes) * sizes.text.num_hidden_layers
    patches = load.images(sizes) * sizes.vision.num_hidden_layers
    text_bytes = columns * ((1 + again) * traffic.text + traffic.text_backward)
    vision_bytes = patches * traffic.vision
    if not how.rank:
        vision_bytes += patches * (again * traffic.vision + traffic.vision_backward)
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    return StepTime(
        decoder=operations.decoder * decoder_passes / decoder,
        vision=operations.vision * vision_passes / tower,
        head=operations.head * (2 if how.rank else 3) / decoder,
        elementwise=(text_bytes + vision_bytes) / bandwidth,
        update=_update_bytes(sizes, how) / bandwidth,
        link=_link_bytes(sizes, how) / (gpu.link * LINK_SHARE),
    )


def _update_bytes(sizes: Architecture, how: Training) -> float:
    """Norm, clipping and AdamW: a float32 parameter is passed over for 40 bytes; a bfloat16 one, with its copy, 44."""
    p = Parameters.of(sizes, tied_head=how.tied_head)
    wide, half = p.vision + p.norms, p.layers + p.table + p.head
    if how.rank:
        wide, half = 0, lora_parameters(sizes.text, how.rank)
    return (40 * wide + (44 if how.dtype == "bfloat16" else 40) * half) / how.gpus


def _link_bytes(sizes: Architecture, how: Training) -> float:
    """FSDP: weights are gathered twice and gradients scattered once, each GPU moving (n - 1) / n of them."""
    if how.gpus == 1:
        return 0.0
    p = Parameters.of(sizes, tied_head=how.tied_head)
    weights = p.weight_bytes(how.dtype)
    gradients = lora_parameters(sizes.text, how.rank) * BYTES[how.dtype] if how.rank else weights
    return (2 * weights + gradients) * (how.gpus - 1) / how.gpus


@dataclass(frozen=True)
class Latency:
    """Seconds of generating one chunk.

    Attributes:
        vision: images to vectors.
        prefill: images and prompt through the decoder.
        token: each generated id; at least what reading the weights takes.
        chunk: all of it.
    """

    vision: float
    prefill: float
    token: float
    chunk: float


def token_bytes(sizes: Architecture, load: Load, dtype: str = "bfloat16") -> float:
    """Bytes that are read for one generated id: the layers, the head rows that can be chosen, the cache."""
    text, p = sizes.text, Parameters.of(sizes)
    cache = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * BYTES[dtype] * load.tokens(sizes)
    head = min(load.choices, text.vocab_size) * text.hidden_size
    return BYTES[dtype] * (p.layers + head) + 4 * p.norms + cache


def generation_time(
    sizes: Architecture, load: Load, gpu: Gpu, dtype: str = "bfloat16", *, tf32: bool = False
) -> Latency:
    """Seconds at the assumed shares of the published rates; the time to launch kernels is left out (see gpu.py)."""
    operations = Operations.of(sizes, replace(load, target=0))
    p = Parameters.of(sizes)
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    rate = {"float32": gpu.tf32 if tf32 else gpu.float32, "bfloat16": gpu.bfloat16}
    vision = max(operations.vision / (rate["float32"] * MATMUL_SHARE), 4 * p.vision / bandwidth)
    prefill = max(operations.decoder / (rate[dtype] * MATMUL_SHARE), BYTES[dtype] * p.layers / bandwidth)
    token = token_bytes(sizes, load, dtype) / bandwidth
    return Latency(vision, prefill, token, vision + prefill + load.target * token)
