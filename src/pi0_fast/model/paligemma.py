"""PaliGemma: image encoder, projector, token table, decoder and head, as the parts that training and decoding call.

Beyer et al., "PaliGemma: A versatile 3B VLM for transfer" (2024). The model consumes vectors, masks and positions; it
knows nothing of prompts or actions. Left out: weights in files (weights.py), masks (masks.py), the loss (loss.py), the
decoding loop (decode.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pi0_fast.model.architecture import Architecture
from pi0_fast.model.gemma import Decoder, KeyValueCache, product, step_frequencies
from pi0_fast.model.siglip import VisionTower
from pi0_fast.types import PolicyError

DTYPES = (torch.float32, torch.bfloat16)


class PaliGemma(nn.Module):
    """The model. In bfloat16 the vision tower, the projector and the norms stay float32.

    Attributes:
        architecture: the sizes.
        tied_head: whether head and token table are one tensor.
        dtype: of the decoder's matrices, the token table and the head.
        gradient_checkpointing: in training mode, keep only each layer's input and compute the rest again in the
            backward pass: about a third more time for a small part of the memory.

    Raises:
        PolicyError: a dtype other than float32 and bfloat16.
    """

    def __init__(self, architecture: Architecture, *, tied_head: bool, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise PolicyError(f"dtype {dtype} is not supported; float32 and bfloat16 are")
        text = architecture.text
        self.architecture = architecture
        self.dtype = dtype
        self.gradient_checkpointing = False
        self.vision_tower = VisionTower(architecture.vision)
        self.projector = nn.Linear(architecture.vision.hidden_size, text.hidden_size)
        # nn.Embedding alone would draw random numbers, which on the meta device loads torch's compiler: a second.
        table = torch.empty(text.vocab_size, text.hidden_size)
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size, _weight=table)
        self.decoder = Decoder(text)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            # Said for all, lest torch.set_default_dtype have a say.
            parameter.data = parameter.data.to(torch.float32 if keeps_float32(name) else dtype)
        if tied_head:
            self.lm_head.weight = self.embed_tokens.weight
        # Rounded to the dtype, as it was when the checkpoints were trained.
        self._embedding_scale = torch.tensor(text.hidden_size**0.5, dtype=dtype, device="cpu").item()
        self._compile_mode: str | None = None
        self._compiled_hidden_states: Callable[..., Tensor] | None = None
        self._compiled_prefill: Callable[..., Tensor] | None = None
        self._compiled_step: Callable[..., Tensor] | None = None
        self._tie_again = False
        self.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PaliGemma:
        """What `to`, `half`, `float` and the like go through: devices change, number formats do not.

        Raises:
            PolicyError: a change of format. Some weights are float32 in any model, so that torch would break it.
        """
        for dtype in {torch.float32, self.dtype}:
            changed = fn(torch.empty(0, dtype=dtype, device=self.device)).dtype
            if changed != dtype:
                names = [str(kind).removeprefix("torch.") for kind in (self.dtype, changed)]
                raise PolicyError(
                    f"a {names[0]} model cannot be converted to {names[1]} in place: load the policy with "
                    "dtype='float32' or dtype='bfloat16' (from_pretrained), or make it so (dtype of its configuration)"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def tied_head(self) -> bool:
        """Whether head and token table are one tensor."""
        return self.lm_head.weight is self.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    def encode_images(self, images: Tensor) -> Tensor:
        """Images to vectors of the decoder's width and dtype.

        Args:
            images: float32 [N, 3, image_size, image_size] in [-1, 1].

        Returns:
            [N, P, width], P vectors per image, not scaled.

        Raises:
            PolicyError: another shape.
        """
        size = self.architecture.vision.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise PolicyError(f"images of shape {tuple(images.shape)}; the vision tower takes [N, 3, {size}, {size}]")
        vectors = self.vision_tower(images.float(), checkpointed=self._checkpointed)
        return self.projector(vectors).to(self.dtype)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor) -> Tensor:
        """Token vectors, scaled by the square root of the width: int64 [...] -> [..., width]."""
        return functional.embedding(ids, self.embed_tokens.weight) * self._embedding_scale

    def hidden_states(
        self, embeddings: Tensor, mask: Tensor, positions: Tensor, wanted: Tensor | None = None
    ) -> Tensor:
        """Run whole sequences through the decoder.

        Args:
            embeddings: [B, S, width], from `encode_images` and `embed`.
            mask: bool [B, 1, S, S] of masks.attention_mask.
            positions: int64 [B, S].
            wanted: int64 [B, K], the columns of each row whose result is needed (None: all). Saves the last layer's
                work for the others; columns may repeat, as padding.

        Returns:
            [B, S or K, width] after the final norm, ready for the head.
        """
        return (self._compiled_hidden_states or self._whole)(embeddings, mask, positions, wanted)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Room for `capacity` columns of `batch` rows: 2 * layers * B * capacity * kv heads * head_dim numbers."""
        text = self.architecture.text
        shape = (batch, 2 * text.num_key_value_heads, capacity, text.head_dim)
        # Zeros, not whatever was in memory: a masked column has weight 0, and 0 * NaN would still be NaN.
        stores = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(text.num_hidden_layers)]
        return KeyValueCache(stores, step_frequencies(text, self.device), self.decoder.step_parts())

    def prefill(
        self,
        embeddings: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: KeyValueCache,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """`hidden_states` that also fills columns 0..S-1 of the cache.

        Raises:
            PolicyError: the cache is too small or has another number of rows.
        """
        batch, length = embeddings.shape[:2]
        if batch != cache.batch or length > cache.capacity:
            raise PolicyError(
                f"a cache of {cache.batch} rows and {cache.capacity} columns cannot hold {batch} rows of {length}"
            )
        return (self._compiled_prefill or self._filling)(embeddings, mask, positions, cache, wanted)

    def step(self, ids: Tensor, mask: Tensor, positions: Tensor, column: int | Tensor, cache: KeyValueCache) -> Tensor:
        """Feed one token of every row.

        Args:
            ids: int64 [B], the tokens.
            mask: bool [B, L]: which of the first L <= capacity columns each row sees, the new one included. A short
                mask saves time; one length throughout saves compilations.
            positions: int64 [B].
            column: where their keys and values go, one column for all rows; int, or int64 [1] on the device.
            cache: written in place.

        Returns:
            [B, width] after the final norm, ready for the head.
        """
        if isinstance(column, int):
            column = torch.tensor([column], device=ids.device)
        step = self._compiled_step or self.decoder.step
        return step(self.embed(ids), mask, positions, column, cache)

    def head_rows(self, ids: Tensor) -> Tensor:
        """The head's rows for these ids, copied to lie side by side: int64 [K] -> [K, width]."""
        return self.lm_head.weight.index_select(0, ids)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Scores of the whole vocabulary, or of the rows from `head_rows`: [..., width] -> float32 [..., V or K]."""
        return product(hidden, self.lm_head.weight if rows is None else rows).float()

    def compile(self, mode: str = "default") -> None:
        """Replace `hidden_states`, `prefill` and `step` by compiled versions, from now on.

        Sequence lengths are dynamic: from the second on, another length does not compile again.

        Args:
            mode: as in torch.compile.
        """
        # Dynamic from the first length on (dynamic=True) breaks torch 2.13's compiler where layers are checkpointed.
        self._compile_mode = mode
        self._compiled_hidden_states = torch.compile(self._whole, mode=mode)
        self._compiled_prefill = torch.compile(self._filling, mode=mode, dynamic=True)
        self._compiled_step = torch.compile(self.decoder.step, mode=mode)

    def __getstate__(self) -> dict[str, Any]:
        """Without the compiled functions: in a copy they would go on computing with this model's weights."""
        return {name: None if name.startswith("_compiled_") else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._compile_mode is not None:
            self.compile(self._compile_mode)

    @property
    def _checkpointed(self) -> bool:
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    # Two functions, for a compiled one with and without a cache are two programs.
    def _whole(self, embeddings: Tensor, mask: Tensor, positions: Tensor, wanted: Tensor | None) -> Tensor:
        return self.decoder(  # type: ignore[no-any-return]
            embeddings, mask, positions, None, wanted, checkpointed=self._checkpointed
        )

    def _filling(
        self, embeddings: Tensor, mask: Tensor, positions: Tensor, cache: KeyValueCache, wanted: Tensor | None
    ) -> Tensor:
        return self.decoder(embeddings, mask, positions, cache, wanted)  # type: ignore[no-any-return]


def _before_loading(model: PaliGemma, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ARG001
    """In `load_state_dict`: a shared tensor cannot take two different ones, of which torch would keep the last."""
    model._tie_again = model.tied_head
    table, head = (state.get(f"{prefix}{name}.weight") for name in ("embed_tokens", "lm_head"))
    if not model.tied_head or table is None or head is None or table is head:
        return
    if table.shape == head.shape and not torch.equal(table, head.to(table.device)):
        raise PolicyError(
            "this model shares one tensor between head and token table, and the given weights have two different "
            "ones: load them into a model that does not (weights.load, from_pretrained)"
        )


def _after_loading(model: PaliGemma, incompatible: Any) -> None:  # noqa: ARG001
    """With ``assign=True`` each name has got a tensor of its own."""
    if model._tie_again:
        model.lm_head.weight = model.embed_tokens.weight


def keeps_float32(name: str) -> bool:
    """Whether a parameter stays float32 in a bfloat16 model: the vision tower, the projector and the norms."""
    return name.startswith(("vision_tower.", "projector.")) or "norm" in name
