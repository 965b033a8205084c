"""The policy of a run: a new one of a checkpoint's weights or of random ones, or the one that a run goes on with.

Left out: what its settings are (settings.py), adapters (lora.py), and what is left out of training (setup.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from pi0_fast.actions.dct import checked_order
from pi0_fast.actions.normalize import Normalizer, Statistics
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.cached_fitting import fit_fast_tokenizer
from pi0_fast.checkpoint import (
    DTYPES,
    LOCAL,
    ROBOTS,
    check_fingerprints,
    fingerprints_of,
    normalization_fingerprint,
    read_checkpoint,
    robots,
    with_tokenizers,
)
from pi0_fast.display import say
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.parsing import expanded
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import ACTION_KEY, PI0FastConfig, read_config
from pi0_fast.processors import FeatureStatistics, PolicyProcessors
from pi0_fast.text_tokenizer import TextTokenizer
from pi0_fast.train_config import TrainConfig
from pi0_fast.training import lora
from pi0_fast.training.decisions import Decision
from pi0_fast.training.features import Columns, action_selection
from pi0_fast.training.opening import Data
from pi0_fast.training.start import Start
from pi0_fast.types import PolicyError, UsageError

#: Of the checkpoint or of the dataset, not of training.
_NOT_CHANGED = (
    *("input_features", "output_features", "normalization_mapping", "pretrained_path", "action_feature_names"),
)


@dataclass
class NewPolicy:
    """What a new policy is made of; of a mixture's further dataset, `first` has the model and the text tokenizer."""

    config: TrainConfig
    policy_config: PI0FastConfig
    start: Start
    data: Data
    statistics: dict[str, Statistics]
    device: torch.device
    decisions: list[Decision]
    first: PI0FastPolicy | None

    @property
    def columns(self) -> Columns:
        return self.data.columns

    def make(self) -> PI0FastPolicy:
        """Made of the checkpoint's weights, or of random ones."""
        fitted = self._fitted_tokenizer()
        kept = {} if self.start.folder is None else self._copies()
        text: TextTokenizer | None = None
        if self.first is not None:  # whose copy the checkpoint of this dataset will hold too
            text, kept = self.first.preparation.prompt.text_tokenizer, _without(kept, "text_tokenizer")
        config, text_tokenizer, action_tokenizer = with_tokenizers(
            self.policy_config, text, fitted, folder=self.start.folder, copies=kept
        )
        if fitted is None:
            name = self.policy_config.action_tokenizer_name
            asked = self.config.policy.action_tokenizer_name is not None
            place = str(kept.get("action_tokenizer", name))
            self.decisions.append(Decision("action tokenizer", place, "asked for" if asked else self._whose()))
        own: dict[str, Any] = {"text_tokenizer": text_tokenizer}
        if fitted is None:
            own["action_tokenizer"] = action_tokenizer
        self._check({kind: tokenizer.fingerprint for kind, tokenizer in own.items() if kind in kept})
        processors = self._processors(config, action_tokenizer)
        model = self._model(config, text_tokenizer.vocab_size) if self.first is None else self.first.model
        try:
            return PI0FastPolicy(config, model, processors, text_tokenizer, action_tokenizer)
        except PolicyError as error:
            hint = "" if fitted is not None or "tokenizer" not in str(error) else self._auto_fit_hint()
            raise PolicyError(f"{error}{hint}") from error

    def _check(self, found: Mapping[str, str]) -> None:
        """Whether what is taken of the checkpoint beside the weights belongs to them; see `check_fingerprints`."""
        start = self.start
        if start.whole is not None and start.folder is not None:
            found = {f"{start.folder.name}/{kind}": fingerprint for kind, fingerprint in found.items()}
        if start.folder is not None:
            check_fingerprints(start.weights, found)

    def _whose(self) -> str:
        """Why the checkpoint's action tokenizer is taken: of several, which one."""
        there = [] if self.start.folder is None else robots(self.start.weights)
        name = self.data.member.name
        if not there:
            return "not said otherwise"
        return f"that of {name} there" if name in there else f"that of {there[0]}, the first dataset there"

    def _auto_fit_hint(self) -> str:
        return " (--policy.auto_fit_fast_tokenizer=true fits one on this dataset)"

    def _copies(self) -> dict[str, Path]:
        """The tokenizers that the checkpoint holds, but for those that the command names."""
        folder, options = self.start.folder, self.config.policy
        assert folder is not None
        return {
            kind: folder / str(self.start.details[kind])
            for kind in LOCAL
            if kind in self.start.details and getattr(options, f"{kind}_name") is None
        }

    def _fitted_tokenizer(self) -> FastTokenizer | None:
        """The one that auto-fit makes, or None where another is to be used."""
        options = self.config.policy
        if not options.auto_fit_fast_tokenizer:
            return None
        if options.action_tokenizer_name is not None:
            why = "named by the command, so none is fitted (--policy.auto_fit_fast_tokenizer)"
            self.decisions.append(Decision("action tokenizer", options.action_tokenizer_name, why))
            return None
        config = self.policy_config
        mode = config.mode("ACTION")
        normalizer = Normalizer.from_statistics(
            self.statistics[ACTION_KEY],
            mode,
            clip=config.action_clip and mode.clips,
            names=self.columns.action_names,
            selection=action_selection(config, self.columns),
            source="frames",
        )
        path = fit_fast_tokenizer(
            dataset_repo_id=self.data.reader.repo_id,
            cache_dir=expanded("policy.fast_tokenizer_cache_dir", options.fast_tokenizer_cache_dir),
            base_tokenizer_name=None,
            n_samples=options.fast_tokenizer_fit_samples,
            chunk_size=config.chunk_size,
            root=self.data.reader.root if self.data.reader.origin == "directory" else None,
            revision=self.data.reader.revision if self.data.reader.origin == "hub" else None,
            action_key=self.columns.action.key,
            state_key=self.columns.state.key,
            normalizer=normalizer,
            rate_weight=options.fast_tokenizer_rate_weight,
            order=checked_order(options.fast_tokenizer_order),
            episodes=self.data.training,
        )
        why = "fitted on this dataset"
        if self.start.folder is not None:
            why += ", in place of the one that the checkpoint's weights know"
        self.decisions.append(Decision("action tokenizer", path, why))
        return FastTokenizer.from_pretrained(path)

    def _processors(self, config: PI0FastConfig, tokenizer: FastTokenizer) -> PolicyProcessors:
        if self.config.policy.statistics == "checkpoint":
            processors = self._stored_processors(config)
        else:
            statistics: dict[str, FeatureStatistics] = dict(self.statistics)
            if tokenizer.normalizer is not None:
                self._check_size(tokenizer.normalizer.size)
                statistics[ACTION_KEY] = tokenizer.normalizer
                why = "those that the action tokenizer was fitted with"
                self.decisions.append(Decision("statistics of the actions", str(tokenizer.normalizer.mode), why))
            processors = PolicyProcessors.from_statistics(config, statistics)
        # The action's column may have any name: it is no input, so with_rename_map would refuse it.
        action = {self.columns.action.key: ACTION_KEY} if self.columns.action.key != ACTION_KEY else {}
        inputs = {key: name for key, name in self.columns.renames.items() if key not in action}
        processors = processors.with_rename_map(inputs, config)
        return replace(processors, rename_map={**processors.rename_map, **action})

    def _check_size(self, size: int) -> None:
        if size != self.columns.action.shape[0]:
            raise PolicyError(
                f"the action tokenizer was fitted on {size} dimensions, and the actions of {self.data.member.repo_id} "
                f"have {self.columns.action.shape[0]}{self._auto_fit_hint()}"
            )

    def _stored_processors(self, config: PI0FastConfig) -> PolicyProcessors:
        processors = self.start.stored_processors()
        self._check({"normalization": normalization_fingerprint(processors)})
        for normalizer, size in ((processors.state, config.state_dim), (processors.action, config.action_dim)):
            if normalizer.size != size:
                raise UsageError(
                    f"--policy.statistics=checkpoint: {normalizer.key!r} has {normalizer.size} dimensions there and "
                    f"{size} in the dataset: use the dataset's (--policy.statistics=data)"
                )
        if config.use_relative_actions != (processors.relative is not None):
            raise UsageError(
                "--policy.statistics=checkpoint: they are of "
                f"{'absolute' if processors.relative is None else 'relative'} actions, the policy's are not"
            )
        return processors

    def _model(self, config: PI0FastConfig, vocab_size: int) -> PaliGemma:
        options = self.config.policy
        sizes = self.start.architecture(options.architecture)
        if sizes is not None and options.paligemma_variant is not None:
            raise UsageError(
                f"--policy.paligemma_variant={options.paligemma_variant} would change nothing: the sizes of the model "
                "are given already"
            )
        dtype = DTYPES[config.dtype]
        if self.start.folder is None:
            if sizes is None:
                sizes = Architecture.variant(config.paligemma_variant, vocab_size)
            self.decisions.append(Decision("weights", "random", "--policy.architecture without a checkpoint"))
            return weights.initialize(sizes, dtype, self.config.seed, device=self.device)
        if sizes is None:
            sizes = Architecture.variant(config.paligemma_variant)
        self.decisions.append(Decision("weights", str(self.start.weights), "asked for"))
        return weights.load(self.start.weights, sizes, dtype, self.device)


def _without(copies: Mapping[str, Path], kind: str) -> dict[str, Path]:
    return {name: path for name, path in copies.items() if name != kind}


def resumed_policy_of_another(settled: PI0FastConfig, start: Start, name: str, model: PaliGemma) -> PI0FastPolicy:
    """The policy of a further dataset, with the model that was read already."""
    assert start.folder is not None
    stored = read_config(start.folder / ROBOTS / name)
    changed = {item: getattr(settled, item) for item in _changes(settled, stored)}
    parts = read_checkpoint(start.folder, robot=name, model=model, overrides=changed)
    if (start.folder / lora.ADAPTER_FILE).is_file():
        check_fingerprints(start.folder, fingerprints_of({name: parts}), start.folder / lora.ADAPTER_FILE)
    return PI0FastPolicy(parts.config, model, parts.processors, parts.text_tokenizer, parts.action_tokenizer)


def _changes(settled: PI0FastConfig, stored: PI0FastConfig) -> list[str]:
    """Settings that differ and may be changed by resuming."""
    names = [item.name for item in fields(PI0FastConfig) if item.name not in _NOT_CHANGED]
    return [name for name in names if getattr(settled, name) != getattr(stored, name)]


def resumed_policy(config: TrainConfig, settled: PI0FastConfig, start: Start, device: torch.device) -> PI0FastPolicy:
    """The policy of the checkpoint; only settings that belong to training may differ from the stored ones."""
    assert start.config is not None
    assert start.folder is not None
    changed = {name: getattr(settled, name) for name in _changes(settled, start.config)}
    said = {name: value for name, value in changed.items() if name not in ("device", "push_to_hub")}
    if said:
        say(f"changed since the run began: {json.dumps(said, default=str)}")
    if config.peft is None:
        return PI0FastPolicy.from_pretrained(start.folder, device=device, overrides=changed)
    adapters = lora.read_adapters(start.folder)
    policy = lora.read_base_policy(start.folder, replace(start.config, **changed), adapters, device)
    lora.add_adapters(policy.model, config.peft, config.seed)
    lora.load_adapters(policy.model, adapters.tensors, str(start.folder))
    return policy
