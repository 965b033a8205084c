"""lerobot 0.6.1's pi0_fast policy at any sizes, on random weights and tokenizers made on the spot, to compare with.

Nothing is downloaded. Three things of lerobot are replaced before its policy is built, and none of them is measured:
the sizes that it hard-codes, the way it finds a FAST tokenizer (a local directory, read with the FAST processor that
lerobot itself ships), and, where torchvision is not installed, the names that lerobot imports from it and its pi0_fast
never uses. Weights travel as safetensors with lerobot's own keys. Not part of the package.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from reference_twin import ReferenceTwin

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VERSION = "0.6.1"
FloatArray = npt.NDArray[np.float32]
Sizes = dict[str, Any]

#: Task texts that the small text tokenizer is trained on and that batches are made of.
TASKS = (
    "pick up the cube and place it into the bowl",
    "open the drawer slowly",
    "fold the towel twice and lay it on the table",
    "insert the peg into the socket",
)


class _AbsentModule(types.ModuleType):
    """A module of which every public name is an empty class, so that ``from torchvision.x import y`` succeeds."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _TorchvisionFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an `_AbsentModule` for torchvision and whatever lies inside it."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """A spec for torchvision's modules, None for all others."""
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The empty module."""
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def import_lerobot() -> Any:
    """lerobot's module of the policy.

    Raises:
        ImportError: lerobot is not installed, or is another version than the one compared with.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("lerobot")
    except PackageNotFoundError as error:
        raise ImportError(f"lerobot {VERSION} is not installed here; the docstring says how to install it") from error
    if found != VERSION:
        raise ImportError(f"this compares with lerobot {VERSION}; installed is {found}")
    import transformers

    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        transformers.utils.is_torchvision_available()  # must have found it absent before it seems to be there
        sys.meta_path.append(_TorchvisionFinder())
    transformers.logging.set_verbosity_error()  # it warns of image processors that it falls back to; none is used
    import lerobot.policies.pi0_fast.modeling_pi0_fast as module

    logging.getLogger().setLevel(logging.ERROR)  # one warning for each row that is no chunk, which is every row here
    return module


@contextlib.contextmanager
def sized(module: Any, sizes: Sizes) -> Iterator[None]:
    """While open, lerobot builds its policy with these sizes (``text`` and ``vision``, keys as in transformers)."""
    text, vision = sizes["text"], sizes["vision"]
    original, original_sizes = module.PaliGemmaForConditionalGenerationWithPiGemma, module.get_gemma_config

    class Sized(original):  # type: ignore[misc, valid-type]
        """The model that lerobot builds, after its fixed sizes were overwritten."""

        def __init__(self, config: Any) -> None:
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
                setattr(config.vision_config, name, vision[name])
            config.projection_dim = config.vision_config.projection_dim = text["hidden_size"]
            config.text_config.vocab_size = config._vocab_size = config.image_token_index = text["vocab_size"]
            super().__init__(config=config)

    def gemma(_: str) -> Any:
        """The text sizes, whatever the variant."""
        return module.GemmaConfig(
            width=text["hidden_size"], depth=text["num_hidden_layers"], mlp_dim=text["intermediate_size"],
            num_heads=text["num_attention_heads"], num_kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
        )  # fmt: skip

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.get_gemma_config = Sized, gemma
    try:
        yield
    finally:
        module.PaliGemmaForConditionalGenerationWithPiGemma, module.get_gemma_config = original, original_sizes


def make_text_tokenizer(directory: Path, vocab_size: int) -> None:
    """A BPE tokenizer of Gemma's make (bos first, digits one by one), filled up with unused pieces to `vocab_size`.

    Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads as they are.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # While merges are learned, digits and punctuation stand alone; afterwards no merge joins them.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("[0-9]|[,:;|\n]"), "isolated"), pre_tokenizers.Split("▁", "merged_with_next"),
    ])  # fmt: skip
    texts = [f"Task: {task}, State: 0 1 2 3 4 5 6 7 8 9 -1;\n" for task in TASKS] * 2 + ["Action: |"] * 2
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"<unused{i}>": i for i in range(len(vocabulary), vocab_size)})
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>",
    }))  # fmt: skip


def make_action_tokenizer(directory: Path, chunks: FloatArray, *, vocab_size: int = 1024, scale: float = 10) -> None:
    """A FAST tokenizer fitted the published way to chunks [N, H, D], in the published format."""
    twin = ReferenceTwin(chunks, scale=scale, vocab_size=vocab_size)
    horizon, dims = chunks.shape[1:]
    directory.mkdir(parents=True)
    twin.bpe.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})
    )
    (directory / "processor_config.json").write_text(json.dumps({
        "processor_class": "UniversalActionProcessor", "scale": scale, "vocab_size": vocab_size,
        "min_token": twin.min_token, "time_horizon": horizon, "action_dim": dims,
    }))  # fmt: skip


class _LocalActionProcessor:
    """Stands where lerobot looks for transformers' AutoProcessor: reads its own FAST processor from a directory."""

    @staticmethod
    def from_pretrained(name: str, **_: Any) -> Any:
        """The processor that is saved in directory `name`."""
        from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor

        return UniversalActionProcessor.from_pretrained_local(name)


class LerobotTwin:
    """lerobot's policy and what it has around it.

    Attributes:
        policy: its PI0FastPolicy, in evaluation mode, float32.
        preprocess: its pipeline from a batch of a dataset to the policy's input.
        postprocess: from the policy's output to the robot's units.
    """

    def __init__(
        self, sizes: Sizes, text_tokenizer: Path, action_tokenizer: Path, *, chunk: tuple[int, int],
        quantiles: dict[str, FloatArray], weights: Path | None = None,
    ) -> None:  # fmt: skip
        """Build it.

        Args:
            sizes: architecture, ``{"text": {...}, "vision": {...}}``.
            text_tokenizer, action_tokenizer: directories made by the two functions above.
            chunk: H, D; the state has D dimensions too.
            quantiles: ``q01`` and ``q99``, [D] each, of the state and of the action.
            weights: safetensors with lerobot's keys; without, the weights are random (`randomize`).
        """
        module = import_lerobot()
        import lerobot.processor.tokenizer_processor as tokenizer_processor
        from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
        from lerobot.policies.pi0_fast.processor_pi0_fast import make_pi0_fast_pre_post_processors

        module.AutoProcessor = tokenizer_processor.AutoProcessor = _LocalActionProcessor
        horizon, dims = chunk
        config = module.PI0FastConfig(
            device="cpu", chunk_size=horizon, n_action_steps=horizon, validate_action_token_prefix=False,
            text_tokenizer_name=str(text_tokenizer), action_tokenizer_name=str(action_tokenizer),
            normalization_mapping={
                "VISUAL": NormalizationMode.IDENTITY, "STATE": NormalizationMode.QUANTILES,
                "ACTION": NormalizationMode.QUANTILES,
            },
            input_features={
                "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 224, 224)),
                "observation.state": PolicyFeature(FeatureType.STATE, (dims,)),
            },
            output_features={"action": PolicyFeature(FeatureType.ACTION, (dims,))},
        )  # fmt: skip
        with sized(module, sizes):
            self.policy = module.PI0FastPolicy(config)
        self.policy.eval()
        if weights is None:
            self.randomize()
        else:
            self.policy.load_state_dict(load_file(weights))
        statistics = {name: torch.from_numpy(value) for name, value in quantiles.items()}
        both = {"observation.state": statistics, "action": statistics}
        self.preprocess, self.postprocess = make_pi0_fast_pre_post_processors(config, both)

    def randomize(self, seed: int = 0) -> None:
        """Fill all weights with small random numbers, norms around what they are, head and embedding unlike."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                noise = torch.empty_like(parameter).normal_(0, 0.02, generator=generator)
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)

    def save(self, directory: Path) -> None:
        """A checkpoint as lerobot writes it; tokenizers stay where they are."""
        self.policy.save_pretrained(directory)
        self.preprocess.save_pretrained(directory)
        self.postprocess.save_pretrained(directory)

    def loss(self, images: torch.Tensor, text: torch.Tensor, text_valid: torch.Tensor, target: torch.Tensor,
             target_valid: torch.Tensor) -> torch.Tensor:  # fmt: skip
        """The training loss; images [B, 3, 224, 224] in [-1, 1], ids and masks [B, 200] and [B, 256]."""
        present = [torch.ones(len(images), dtype=torch.bool)]
        found = self.policy.model.forward([images], present, text, text_valid, target, target_valid)
        loss: torch.Tensor = found["loss"]
        return loss

    def generate(
        self, images: torch.Tensor, text: torch.Tensor, text_valid: torch.Tensor, *, steps: int, cached: bool = True
    ) -> torch.Tensor:
        """Greedy text ids [B, steps] over the whole vocabulary; runs all the steps unless every row ends before."""
        model = self.policy.model
        sample = model.sample_actions_fast_kv_cache if cached else model.sample_actions_fast
        present = [torch.ones(len(images), dtype=torch.bool)]
        ids: torch.Tensor = sample([images], present, text, text_valid, max_decoding_steps=steps, temperature=0.0)
        return ids

    def decode(self, ids: torch.Tensor) -> torch.Tensor:
        """Text ids to actions [B, H, D], as its `predict_action_chunk` does: rows that are no chunk become zeros."""
        horizon, dims = self.policy.config.chunk_size, self.policy.config.output_features["action"].shape[0]
        actions: torch.Tensor = self.policy.detokenize_actions(ids, action_horizon=horizon, action_dim=dims)
        return actions
