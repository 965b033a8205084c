"""Where a policy begins: the checkpoint that the command names, or none, and what it says of the policy.

Left out: reading the weights (policies.py), and what the dataset says (features.py).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi0_fast.checkpoint import ROBOTS, find_checkpoint, robots
from pi0_fast.display import say
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture
from pi0_fast.parsing import expanded
from pi0_fast.policy_config import ACTION_KEY, STATE_KEY, PI0FastConfig, read_config, read_details
from pi0_fast.processors import PolicyProcessors, read_processors
from pi0_fast.train_config import PRETRAINED_MODEL, TrainConfig
from pi0_fast.training import lora
from pi0_fast.types import PolicyError, UsageError


@dataclass
class Start:
    """The checkpoint that a policy begins with, or none.

    Attributes:
        folder: its files; None for a model of random weights.
        config: its settings as stored.
        details: its pi0_fast.json's.
        keeps_cameras: whether the policy's cameras are the checkpoint's.
        whole: of the parts of one of several datasets (see `of_dataset`), the checkpoint that has the weights.
    """

    folder: Path | None
    config: PI0FastConfig | None
    details: dict[str, Any]
    keeps_cameras: bool
    whole: Path | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> Start:
        options = config.policy
        if config.resume:
            assert config.checkpoint is not None  # set_up found it
            folder = config.checkpoint / PRETRAINED_MODEL
        elif options.path or options.pretrained_path:
            name = options.path or str(options.pretrained_path)
            folder = find_checkpoint(name, revision=options.pretrained_revision)
            if options.pretrained_revision is not None and Path(name).expanduser().is_dir():
                raise UsageError(f"--policy.pretrained_revision has no effect with the local directory {name}")
        else:
            return cls(None, None, {}, False)
        complete = any((folder / name).is_file() for name in (weights.SINGLE_FILE, weights.INDEX_FILE))
        # Beside merged weights adapters are only for going on.
        adapted = (folder / lora.ADAPTER_FILE).is_file() and (config.resume or not complete)
        if adapted and not config.resume:
            raise UsageError(
                f"{folder} holds adapters: merge them first (pi0_fast.training.lora.merge_adapters), or go on with "
                "--resume"
            )
        stored = lora.read_adapter_config(folder) if adapted else read_config(folder)
        return cls(folder, stored, read_details(folder), config.resume or options.path is not None)

    def of_dataset(self, name: str) -> Start:
        """What the checkpoint holds for a dataset that it was trained on among others; else what it holds as a whole.

        Without this, a robot would be trained on with the tokens, units and names of the checkpoint's first one.
        """
        if self.folder is None or name not in robots(self.folder)[1:]:
            return self
        folder = self.folder / ROBOTS / name
        return Start(folder, read_config(folder), read_details(folder), self.keeps_cameras, self.folder)

    @property
    def weights(self) -> Path:
        """The checkpoint that has the weights."""
        folder = self.whole or self.folder
        assert folder is not None
        return folder

    @property
    def renames(self) -> dict[str, str]:
        return {} if self.folder is None else self.nominal_processors.rename_map

    @property
    def nominal_processors(self) -> PolicyProcessors:
        """The checkpoint's processors with unit ranges as statistics: for their names and modes."""
        assert self.folder is not None
        assert self.config is not None
        config = self.config
        sizes = {
            STATE_KEY: config.state_dim if STATE_KEY in config.input_features else 1,
            ACTION_KEY: config.action_dim if ACTION_KEY in config.output_features else 1,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the files' peculiarities
            return read_processors(
                self.folder, config, statistics={key: _unit_ranges(size) for key, size in sizes.items()}
            )

    def stored_processors(self) -> PolicyProcessors:
        """The checkpoint's processors with its statistics.

        Raises:
            PolicyError: it has none, or they cannot be used.
        """
        assert self.folder is not None
        assert self.config is not None
        return read_processors(self.folder, self.config)

    def stored_statistics(self) -> dict[str, dict[str, Any]] | None:
        """For the report; None where there is no checkpoint or it has no usable statistics."""
        if self.folder is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                processors = self.stored_processors()
        except PolicyError as error:
            say(f"the checkpoint's statistics cannot be shown: {error}")
            return None
        return {
            feature.key: {name: values.tolist() for name, values in feature.statistics.items()}
            for feature in (processors.state, processors.action)
        }

    def architecture(self, given: str | None) -> Architecture | None:
        """The sizes of the model, where something says them."""
        if given is not None:
            return Architecture.from_json(expanded("policy.architecture", given))
        stored = self.details.get("architecture")
        return None if stored is None else Architecture.from_json(stored)


def _unit_ranges(size: int) -> dict[str, Any]:
    values = {"min": -1, "max": 1, "mean": 0, "std": 1, "q01": -1, "q10": -1, "q50": 0, "q90": 1, "q99": 1}
    return {name: np.full(size, value, np.float64) for name, value in values.items()}
