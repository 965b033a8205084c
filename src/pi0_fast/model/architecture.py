"""The sizes of a PaliGemma: vision encoder and text decoder, the published variants, and a tiny one.

Numbers only, no torch. Left out: what never differs between the published checkpoints (activation, norm epsilon,
rotary base), which is written where it is computed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pi0_fast.types import PolicyError

#: PaliGemma's vocabulary: Gemma's 256,000 ids, 1,024 locations, 128 segmentation codes.
PALIGEMMA_VOCABULARY = 257_152


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of the SigLIP encoder; the defaults are those of So400m/14 at 224 pixels.

    Attributes:
        hidden_size: width of a patch vector.
        num_hidden_layers: encoder layers.
        num_attention_heads: heads; they divide hidden_size.
        intermediate_size: width of the mlp.
        image_size: height and width of an image in pixels.
        patch_size: height and width of a patch in pixels; what does not fill a patch at the right and bottom is unused.
    """

    hidden_size: int = 1152
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = 4304
    image_size: int = 224
    patch_size: int = 14

    @property
    def patches(self) -> int:
        """Vectors per image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class TextSizes:
    """Sizes of the Gemma decoder; the defaults are those of `gemma_2b`.

    Attributes:
        hidden_size: width of a token vector; images are projected to it.
        num_hidden_layers: decoder layers.
        intermediate_size: width of the gated mlp.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; they divide num_attention_heads.
        head_dim: width of a head, even; need not be hidden_size / num_attention_heads.
        vocab_size: rows of the embedding table and of the head.
    """

    hidden_size: int = 2048
    num_hidden_layers: int = 18
    intermediate_size: int = 16_384
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    vocab_size: int = PALIGEMMA_VOCABULARY


#: The published text decoders, each with the So400m/14 encoder.
VARIANTS = {
    "gemma_2b": TextSizes(),
    "gemma_300m": TextSizes(hidden_size=1024, intermediate_size=4096),
}

Sizes = TypeVar("Sizes", VisionSizes, TextSizes)


@dataclass(frozen=True)
class Architecture:
    """Everything that the shapes of the weights follow from.

    Raises:
        PolicyError: a size is not a positive whole number, or two sizes do not go together.
    """

    vision: VisionSizes
    text: TextSizes

    def __post_init__(self) -> None:
        """Refuse what could not be built, naming the size."""
        for part in (self.vision, self.text):
            for field in fields(part):
                value = getattr(part, field.name)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    name = f"{_PART[type(part)]}.{field.name}"
                    raise PolicyError(f"architecture: {name} is {value!r}; it must be a positive whole number")
        vision, text = self.vision, self.text
        if vision.hidden_size % vision.num_attention_heads:
            raise PolicyError(
                f"architecture: vision.hidden_size {vision.hidden_size} is no multiple of "
                f"vision.num_attention_heads {vision.num_attention_heads}"
            )
        if text.num_attention_heads % text.num_key_value_heads:
            raise PolicyError(
                f"architecture: text.num_attention_heads {text.num_attention_heads} is no multiple of "
                f"text.num_key_value_heads {text.num_key_value_heads}"
            )
        if text.head_dim % 2:
            raise PolicyError(f"architecture: text.head_dim {text.head_dim} is odd; the rotary embedding pairs halves")
        if vision.image_size < vision.patch_size:
            raise PolicyError(
                f"architecture: vision.image_size {vision.image_size} is smaller than one patch "
                f"(vision.patch_size {vision.patch_size})"
            )

    @classmethod
    def variant(cls, name: str, vocab_size: int = PALIGEMMA_VOCABULARY) -> Architecture:
        """A published architecture by its name in `paligemma_variant`: `gemma_2b` or `gemma_300m`.

        Raises:
            PolicyError: no such variant.
        """
        if name not in VARIANTS:
            raise PolicyError(f"unknown paligemma_variant {name!r}; known: {', '.join(sorted(VARIANTS))}")
        return cls(VisionSizes(), TextSizes(**{**asdict(VARIANTS[name]), "vocab_size": vocab_size}))

    @classmethod
    def tiny(cls, vocab_size: int = 4096, image_size: int = 28) -> Architecture:
        """Small enough for tests and examples on a CPU: 0.3 million parameters, four vectors per image."""
        return cls(
            VisionSizes(32, 1, 2, 64, image_size=image_size, patch_size=14),
            TextSizes(64, 2, 128, 4, 1, 16, vocab_size=vocab_size),
        )

    @classmethod
    def from_json(cls, source: dict[str, Any] | str | Path) -> Architecture:
        """Read ``{"text": {...}, "vision": {...}}``, as a dictionary or as the path of a JSON file.

        The keys are the attributes of `TextSizes` and `VisionSizes`; a missing one takes its default.
        `vision.projection_dim`, which other programs write, must equal `text.hidden_size`.

        Raises:
            PolicyError: unreadable file, unknown key, or sizes that do not go together.
        """
        where = "architecture"
        if isinstance(source, (str, Path)):
            where = str(source)
            try:
                source = json.loads(Path(source).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise PolicyError(f"{where}: cannot be read as an architecture: {error}") from error
        if not isinstance(source, dict) or set(source) != {"text", "vision"}:
            found = sorted(source) if isinstance(source, dict) else type(source).__name__
            raise PolicyError(f"{where}: an architecture has the two keys 'text' and 'vision', found {found}")
        for part in ("text", "vision"):
            if not isinstance(source[part], dict):
                raise PolicyError(f"{where}: {part!r} is {type(source[part]).__name__}, not a dictionary of sizes")
        vision = dict(source["vision"])
        projection = vision.pop("projection_dim", None)
        architecture = cls(_sizes(VisionSizes, vision, where), _sizes(TextSizes, source["text"], where))
        if projection not in (None, architecture.text.hidden_size):
            raise PolicyError(
                f"{where}: vision.projection_dim {projection} differs from text.hidden_size "
                f"{architecture.text.hidden_size}; images are projected to the width of the text"
            )
        return architecture

    def to_json(self) -> dict[str, dict[str, int]]:
        """The dictionary that `from_json` reads."""
        return {"text": asdict(self.text), "vision": asdict(self.vision)}


_PART: dict[type, str] = {VisionSizes: "vision", TextSizes: "text"}


def _sizes(kind: type[Sizes], values: dict[str, Any], where: str) -> Sizes:
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise PolicyError(f"{where}: unknown keys in {_PART[kind]!r}: {unknown}; known: {known}")
    return kind(**values)
