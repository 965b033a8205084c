"""The published way to do FAST, written from its description, as the measure of speed and of tokens per chunk.

Orthonormal DCT by scipy, scale, round, one string of characters for each chunk, byte-level BPE by `tokenizers` called
directly, one chunk at a time as the published processor does it, but without the overhead of its transformers wrapper.
Not part of the package.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
from scipy.fft import dct, idct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FloatArray = npt.NDArray[np.float32]


class ReferenceTwin:
    """Fit once, then encode and decode."""

    def __init__(self, chunks: FloatArray, *, scale: float, vocab_size: int) -> None:
        coefficients = np.around(dct(chunks, axis=1, norm="ortho") * scale).astype(np.int64)
        self.scale, self.shape = scale, chunks.shape[1:]
        self.min_token = int(coefficients.min())
        span = int(coefficients.max()) - self.min_token + 1
        self.bpe = Tokenizer(models.BPE())
        self.bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=2, show_progress=False, max_token_length=10_000,
            initial_alphabet=[chr(i) for i in range(span)],
        )  # fmt: skip
        strings = ("".join(map(chr, row.reshape(-1) - self.min_token)) for row in coefficients)
        self.bpe.train_from_iterator(strings, trainer, length=len(chunks))

    def encode(self, chunks: FloatArray) -> list[list[int]]:
        """Ids of each chunk."""
        coefficients = np.around(dct(chunks, axis=1, norm="ortho") * self.scale)
        found = []
        for row in coefficients:
            points = np.maximum(row.reshape(-1) - self.min_token, 0).astype(np.int64)
            found.append(self.bpe.encode("".join(map(chr, points))).ids)
        return found

    def decode(self, ids: list[list[int]]) -> FloatArray:
        """Chunks [N, H, D]."""
        found = []
        for row in ids:
            points = np.array(list(map(ord, self.bpe.decode(row)))) + self.min_token
            found.append(idct(points.reshape(self.shape) / self.scale, axis=0, norm="ortho"))
        return np.stack(found).astype(np.float32)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(json.loads(self.bpe.to_str())["model"]["vocab"])
