"""Everything that a training run needs before its first step: the dataset, the policy, and what was decided on the way.

`set_up` joins what the command said (train_config.py), what the checkpoint says (config.json and its neighbours) and
what the dataset holds. Decisions that nobody spelt out are printed and kept for the report. Left out: the report itself
(audit.py), the optimizer, the loop.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi0_fast.actions.chunks import split_episodes
from pi0_fast.actions.normalize import NormalizationMode, Normalizer, Statistics
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.cached_fitting import fit_fast_tokenizer
from pi0_fast.checkpoint import (
    DTYPES,
    LOCAL,
    check_fingerprints,
    find_checkpoint,
    normalization_fingerprint,
    with_tokenizers,
    write_files,
)
from pi0_fast.data.reader import LeRobotReader, open_dataset
from pi0_fast.display import say
from pi0_fast.hub import download_snapshot
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.model.weights import foreign_name
from pi0_fast.parsing import expanded
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_config import (
    ACTION_KEY,
    STATE_KEY,
    PI0FastConfig,
    read_config,
    read_details,
)
from pi0_fast.processors import FeatureStatistics, PolicyProcessors, read_processors
from pi0_fast.train_config import CHECKPOINTS, PRETRAINED_MODEL, TrainConfig
from pi0_fast.training import lora
from pi0_fast.training.features import Columns, action_selection, choose_columns, data_statistics
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.states import newest_checkpoint
from pi0_fast.training.transforms import ImageTransforms
from pi0_fast.types import DatasetError, PolicyError, UsageError

#: Settings that the weights were trained with; all others of a checkpoint are only its own habits.
_OF_THE_WEIGHTS = (
    *("paligemma_variant", "image_resolution", "fast_skip_tokens", "text_tokenizer_name", "action_tokenizer_name"),
    *("use_relative_actions", "relative_exclude_joints", "prompt_format", "state_clip", "action_clip", "position_gap"),
    *("attend_missing_cameras", "antialias_images", "count_padding_in_positions"),
)
#: Settings that --resume does not take from the command line: they are the checkpoint's.
_FIXED = (
    *("text_tokenizer_name", "action_tokenizer_name", "normalization_mapping", "use_relative_actions", "device"),
    *("relative_exclude_joints", "action_feature_names", "paligemma_variant", "pretrained_revision", "optimizer_fused"),
)
#: Of the checkpoint or of the dataset, not of training.
_NOT_CHANGED = (
    *("input_features", "output_features", "normalization_mapping", "pretrained_path", "action_feature_names"),
)
_DEVICES = ("cuda", "mps", "cpu")


@dataclass(frozen=True)
class Decision:
    """One thing that was decided before training: what, its value, and why."""

    what: str
    value: str
    why: str


@dataclass
class Run:
    """A training run that is ready for its first step.

    Attributes:
        config: the command's.
        policy: on its device, in training mode; only parameters that are trained require gradients.
        train_frames: the frames to train on.
        validation_frames: those of the held-out episodes; None where nothing is held out.
        reader: the dataset.
        columns: which of its columns are used, and as what.
        statistics: of the training frames, by the policy's names; empty on `--resume`, where the checkpoint's hold.
        stored_statistics: those of the checkpoint that training began with, or None.
        decisions: what was decided, for the report.
    """

    config: TrainConfig
    policy: PI0FastPolicy
    train_frames: FrameDataset
    validation_frames: FrameDataset | None
    reader: LeRobotReader
    columns: Columns
    statistics: dict[str, Statistics] = field(default_factory=dict)
    stored_statistics: dict[str, dict[str, Any]] | None = None
    decisions: list[Decision] = field(default_factory=list)

    @cached_property
    def data_digest(self) -> str:
        """A hash of the states and actions of all episodes, by which a resumed run knows its data again."""
        keys = dict.fromkeys((self.columns.state.key, self.columns.action.key))
        return self.reader.content_digest(tuple(keys))

    def save_model(self, directory: Path) -> None:
        """Write the policy's files, as a checkpoint's pretrained_model holds them, into an existing directory."""
        peft, policy = self.config.peft, self.policy
        if peft is None:
            write_files(directory, policy.checkpoint())
            return
        base = str(self.config.policy.path or self.config.policy.pretrained_path)
        if peft.merge:
            write_files(directory, lora.merged_checkpoint(policy))
            lora.write_adapters(directory, policy, peft, base)  # for going on
        else:
            lora.write_adapter_checkpoint(directory, policy, peft, base)

    def generating(self) -> AbstractContextManager[None]:
        """Within it the policy can generate (adapters are merged)."""
        return nullcontext() if self.config.peft is None else lora.merged_within(self.policy)


def set_up(config: TrainConfig) -> Run:
    """Prepare a run; nothing is written but a fitted tokenizer's cache.

    Args:
        config: validated and `resolved`; with `resume` and no `checkpoint` the run's newest is gone on from.

    Raises:
        UsageError: the command contradicts itself or the dataset.
        DatasetError, PolicyError, TokenizerError, HubError: the dataset, the checkpoint or a tokenizer cannot be used.
        OSError: the output directory exists already.
    """
    if not config.resume:
        _check_output(config.output_path)
    elif config.checkpoint is None:
        config = replace(config)
        config.checkpoint = newest_checkpoint(config.output_path)
        if config.checkpoint is None:
            raise UsageError(f"--resume: {config.output_path} holds no complete checkpoint to go on from")
    if config.peft is not None:
        lora.require_peft()
    if config.policy.pushes:
        assert config.policy.repo_id is not None  # validated
        PI0FastPolicy.check_push_to_hub(config.policy.repo_id, private=bool(config.policy.private))
    decisions: list[Decision] = []
    device = choose_device(config.policy.device)
    decisions.append(Decision("device", str(device), "asked for" if config.policy.device else _absent(device)))
    if config.cudnn_deterministic:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    options = config.dataset
    reader = open_dataset(options.repo_id, root=options.root, revision=options.revision)
    training, held_out = _episodes(config, reader)
    start = _Start.of(config)
    columns = choose_columns(reader, config, start.config if start.keeps_cameras else None, start.renames)
    policy_config = _policy_config(config, start, columns, reader, device, decisions)
    _fetch_videos(reader, columns)
    frames = _frames(config, reader, columns, policy_config.chunk_size, training, transformed=True)
    held = _frames(config, reader, columns, policy_config.chunk_size, held_out) if held_out else None
    if frames.repeated:
        shown = f"{len(frames)} of {len(frames) + frames.repeated}"
        decisions.append(Decision("frames", shown, "the others repeat an earlier picture, says image_age"))
    if config.resume:
        policy = _resumed(policy_config, start, device, config)
        run = Run(config, policy, frames, held, reader, columns, decisions=decisions)
    else:
        selection = action_selection(policy_config, columns)
        statistics = data_statistics(reader, columns, selection, training, policy_config.chunk_size)
        made = _Making(config, policy_config, start, columns, statistics, reader, device, decisions, training)
        run = Run(
            config, made.policy(), frames, held, reader, columns, statistics, start.stored_statistics(), decisions
        )
        if config.peft is not None:
            lora.add_adapters(run.policy.model, config.peft, config.seed)
    run.policy.train()
    _freeze(run)
    for decision in decisions:
        say(f"{decision.what}: {decision.value} ({decision.why})")
    return run


def _check_output(path: Path) -> None:
    """A run that ended before its first checkpoint is in nobody's way; anything else is not overwritten."""
    if path.is_dir() and all(_is_leftover(entry) for entry in path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise FileExistsError(
            f"{path} exists: go on with that run (--resume), or choose another --output_dir; nothing is overwritten"
        )


def _is_leftover(entry: Path) -> bool:
    if entry.name == CHECKPOINTS:
        return entry.is_dir() and all(child.name.startswith(".") for child in entry.iterdir())
    return entry.name in ("report.json", "metrics.jsonl", "metrics.png")


# --- device -------------------------------------------------------------------------------------------------


def _present_devices() -> list[str]:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name in _DEVICES if there[name]]


def choose_device(asked: str | None) -> torch.device:
    """The device asked for, or the first of cuda, mps and cpu that this machine has.

    Raises:
        PolicyError: it is no device, or not there; the message says which are.
    """
    present = _present_devices()
    if asked is None:
        return torch.device(present[0])
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise PolicyError(f"--policy.device={asked} is no device; there is: {', '.join(present)}") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in present or (device.index or 0) >= count:
        number = f" (number 0 to {count - 1})" if device.type in present and count else ""
        raise PolicyError(
            f"--policy.device={asked}: this machine has no such device; there is: {', '.join(present)}{number}"
        )
    return device


def _absent(device: torch.device) -> str:
    missing = _DEVICES[: _DEVICES.index(device.type)]
    return f"there is no {' and no '.join(missing)}" if missing else "the first choice"


# --- dataset ------------------------------------------------------------------------------------------------


def _episodes(config: TrainConfig, reader: LeRobotReader) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Episodes to train on and held-out ones."""
    there = [record.index for record in reader.episodes]
    asked = there if config.dataset.episodes is None else config.dataset.episodes
    for index in asked:
        if index not in there:
            span = f"{there[0]} to {there[-1]}" if there else "none"
            raise UsageError(f"--dataset.episodes: {reader.repo_id} has no episode {index}; it has {span}")
    if not asked:
        raise DatasetError(f"the dataset {reader.root} holds no episodes")
    training, held_out = split_episodes(asked, config.dataset.val_fraction, config.seed)
    if config.dataset.val_fraction and not held_out:
        raise UsageError("--dataset.val_fraction: of a single episode nothing can be held out; leave it out")
    return training, held_out


def _fetch_videos(reader: LeRobotReader, columns: Columns) -> None:
    """The videos of the cameras in use, for a dataset on the hub, of which only the numbers were fetched so far."""
    keys = [key for key in columns.cameras if reader.feature(key).dtype == "video"]
    if reader.origin == "hub" and keys:
        download_snapshot(
            reader.repo_id,
            repo_type="dataset",
            allow_patterns=[f"videos/*{key}/*" for key in keys],
            searched=str(reader.root),
            local_advice="pass a local directory as --dataset.root",
            revision=reader.revision,
        )


def _frames(
    config: TrainConfig,
    reader: LeRobotReader,
    columns: Columns,
    chunk_size: int,
    episodes: tuple[int, ...],
    *,
    transformed: bool = False,
) -> FrameDataset:
    options = config.dataset
    amounts = asdict(options.image_transforms)
    enabled = amounts.pop("enable")
    return FrameDataset(
        reader,
        chunk_size=chunk_size,
        camera_keys=columns.cameras,
        state_key=columns.state.key,
        action_key=columns.action.key,
        episodes=episodes,
        transforms=ImageTransforms(config.seed, **amounts) if transformed and enabled else None,
        cache_dir=None if options.cache_dir is None else expanded("dataset.cache_dir", options.cache_dir),
        whole_only=options.whole_chunks,
    )


# --- where the policy begins --------------------------------------------------------------------------------


@dataclass
class _Start:
    """The checkpoint that a policy begins with, or none.

    Attributes:
        folder: its files; None for a model of random weights.
        config: its settings as stored.
        details: its pi0_fast.json's.
        keeps_cameras: whether the policy's cameras are the checkpoint's.
    """

    folder: Path | None
    config: PI0FastConfig | None
    details: dict[str, Any]
    keeps_cameras: bool

    @classmethod
    def of(cls, config: TrainConfig) -> _Start:
        options = config.policy
        if config.resume:
            assert config.checkpoint is not None  # set_up found it
            folder = config.checkpoint / PRETRAINED_MODEL
        elif options.path or options.pretrained_path:
            folder = find_checkpoint(options.path or str(options.pretrained_path), revision=options.pretrained_revision)
        else:
            return cls(None, None, {}, False)
        adapted = (folder / lora.ADAPTER_FILE).is_file()
        if adapted and not config.resume:
            raise UsageError(
                f"{folder} holds adapters: merge them first (pi0_fast.training.lora.merge_adapters), or go on with "
                "--resume"
            )
        stored = lora.read_adapter_config(folder) if adapted else read_config(folder)
        return cls(folder, stored, read_details(folder), config.resume or options.path is not None)

    @property
    def renames(self) -> dict[str, str]:
        return {} if self.folder is None else self.processors_for(None).rename_map

    def processors_for(self, config: PI0FastConfig | None) -> PolicyProcessors:
        """The checkpoint's processors, but with unit ranges of the sizes that `config` has as statistics."""
        assert self.folder is not None
        assert self.config is not None
        config = config or self.config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the files' peculiarities, of which only the modes are taken here
            return read_processors(
                self.folder,
                replace(
                    self.config,
                    input_features=config.input_features,
                    output_features=config.output_features,
                    # Names of the data's dimensions, which need not be as many as the checkpoint's.
                    action_feature_names=config.action_feature_names,
                ),
                statistics={
                    STATE_KEY: _unit_ranges(config.state_dim if STATE_KEY in config.input_features else 1),
                    ACTION_KEY: _unit_ranges(config.action_dim if ACTION_KEY in config.output_features else 1),
                },
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


def _policy_config(
    config: TrainConfig,
    start: _Start,
    columns: Columns,
    reader: LeRobotReader,
    device: torch.device,
    decisions: list[Decision],
) -> PI0FastConfig:
    """The policy's settings: the checkpoint's or the defaults, then the flags, then what the dataset says."""
    options = config.policy
    given = {name: value for name, value in options.settings().items() if not (config.resume and name in _FIXED)}
    dataset_inputs, outputs = columns.inputs(reader), columns.outputs()
    if start.config is None:
        base, inputs = PI0FastConfig(), dataset_inputs
        sizes = start.architecture(options.architecture)
        if sizes is not None:
            base = replace(base, image_resolution=(sizes.vision.image_size, sizes.vision.image_size))
    elif start.keeps_cameras and start.config.image_keys:
        base = start.config
        cameras = {key: feature for key, feature in base.input_features.items() if feature.type == "VISUAL"}
        inputs = {**cameras, STATE_KEY: dataset_inputs[STATE_KEY]}
    else:
        base, inputs = start.config, dataset_inputs
        if not start.keeps_cameras:
            base = PI0FastConfig(**{name: getattr(base, name) for name in _OF_THE_WEIGHTS})
    decided: dict[str, Any] = {
        "input_features": inputs,
        "output_features": outputs,
        "device": str(device),
        "push_to_hub": options.pushes,
        "pretrained_path": options.path or options.pretrained_path,
    }
    if "dtype" not in given and not config.resume:
        decided["dtype"] = "bfloat16" if device.type == "cuda" else "float32"
        why = f"the default on {device.type}; --policy.dtype changes it"
        decisions.append(Decision("dtype", str(decided["dtype"]), why))
    else:
        decisions.append(Decision("dtype", str(given.get("dtype", base.dtype)), "asked for" if given else "the run's"))
    names = given.get("action_feature_names", base.action_feature_names)
    if names is None or len(names) != columns.action.shape[0]:
        decided["action_feature_names"] = columns.action_names
    try:
        settled = replace(base, **{**given, **decided})
        if start.folder is not None and not config.resume:
            settled = replace(settled, normalization_mapping=_modes(start, settled, given))
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error
    if options.path is not None and options.pretrained_path is not None and not config.resume:
        why = (
            f"--policy.path gives settings and weights; --policy.pretrained_path={options.pretrained_path} is not read"
        )
        decisions.append(Decision("checkpoint", options.path, why))
    return settled


def _modes(start: _Start, settled: PI0FastConfig, given: Mapping[str, Any]) -> dict[str, NormalizationMode]:
    """How state and action are normalised: as the checkpoint's were, unless the command says so outright."""
    stored = start.processors_for(settled)
    modes = {"VISUAL": NormalizationMode.IDENTITY, "STATE": stored.state.mode, "ACTION": stored.action.mode}
    for type_, mode in (given.get("normalization_mapping") or {}).items():
        asked = NormalizationMode.parse(mode)
        if start.keeps_cameras and asked is not modes.get(type_):
            raise UsageError(
                f"--policy.normalization_mapping: {type_} is {asked}, but the checkpoint was trained with "
                f"{modes.get(type_)}: leave it out, or begin with --policy.pretrained_path, which makes a new policy"
            )
        modes[type_] = asked
    return modes


# --- the policy ---------------------------------------------------------------------------------------------


@dataclass
class _Making:
    """What a new policy is made of."""

    config: TrainConfig
    policy_config: PI0FastConfig
    start: _Start
    columns: Columns
    statistics: dict[str, Statistics]
    reader: LeRobotReader
    device: torch.device
    decisions: list[Decision]
    episodes: tuple[int, ...]

    def policy(self) -> PI0FastPolicy:
        """Made of the checkpoint's weights, or of random ones."""
        fitted = self._fitted_tokenizer()
        kept = {} if self.start.folder is None else self._copies()
        config, text_tokenizer, action_tokenizer = with_tokenizers(
            self.policy_config, None, fitted, folder=self.start.folder, copies=kept
        )
        if fitted is None:
            name = self.policy_config.action_tokenizer_name
            asked = self.config.policy.action_tokenizer_name is not None
            place = str(kept.get("action_tokenizer", name))
            self.decisions.append(Decision("action tokenizer", place, "asked for" if asked else "not said otherwise"))
        own: dict[str, Any] = {"text_tokenizer": text_tokenizer}
        if fitted is None:
            own["action_tokenizer"] = action_tokenizer
        self._check({kind: tokenizer.fingerprint for kind, tokenizer in own.items() if kind in kept})
        processors = self._processors(config, action_tokenizer)
        model = self._model(config, text_tokenizer.vocab_size)
        try:
            return PI0FastPolicy(config, model, processors, text_tokenizer, action_tokenizer)
        except PolicyError as error:
            hint = "" if fitted is not None or "tokenizer" not in str(error) else self._auto_fit_hint()
            raise PolicyError(f"{error}{hint}") from error

    def _check(self, found: Mapping[str, str]) -> None:
        """Whether what is taken of the checkpoint beside the weights belongs to them; see `check_fingerprints`."""
        if self.start.folder is not None:
            check_fingerprints(self.start.folder, found)

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
            dataset_repo_id=self.reader.repo_id,
            cache_dir=expanded("policy.fast_tokenizer_cache_dir", options.fast_tokenizer_cache_dir),
            base_tokenizer_name=None,
            n_samples=options.fast_tokenizer_fit_samples,
            chunk_size=config.chunk_size,
            root=self.reader.root if self.reader.origin == "directory" else None,
            revision=self.reader.revision if self.reader.origin == "hub" else None,
            action_key=self.columns.action.key,
            state_key=self.columns.state.key,
            normalizer=normalizer,
            episodes=self.episodes,
        )
        self.decisions.append(Decision("action tokenizer", path, "fitted on this dataset"))
        return FastTokenizer.from_pretrained(path)

    def _processors(self, config: PI0FastConfig, tokenizer: FastTokenizer) -> PolicyProcessors:
        if self.config.policy.statistics == "checkpoint":
            processors = self._stored_processors(config)
        else:
            statistics: dict[str, FeatureStatistics] = dict(self.statistics)
            if tokenizer.normalizer is not None:
                statistics[ACTION_KEY] = tokenizer.normalizer
                why = "those that the action tokenizer was fitted with"
                self.decisions.append(Decision("statistics of the actions", str(tokenizer.normalizer.mode), why))
            processors = PolicyProcessors.from_statistics(config, statistics)
        # The action's column may have any name: it is no input, so with_rename_map would refuse it.
        action = {self.columns.action.key: ACTION_KEY} if self.columns.action.key != ACTION_KEY else {}
        inputs = {key: name for key, name in self.columns.renames.items() if key not in action}
        processors = processors.with_rename_map(inputs, config)
        return replace(processors, rename_map={**processors.rename_map, **action})

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
        self.decisions.append(Decision("weights", str(self.start.folder), "asked for"))
        return weights.load(self.start.folder, sizes, dtype, self.device)


def _resumed(settled: PI0FastConfig, start: _Start, device: torch.device, config: TrainConfig) -> PI0FastPolicy:
    """The policy of the checkpoint; only settings that belong to training may differ from the stored ones."""
    assert start.config is not None
    assert start.folder is not None
    changed = {
        item.name: getattr(settled, item.name)
        for item in fields(PI0FastConfig)
        if item.name not in _NOT_CHANGED and getattr(settled, item.name) != getattr(start.config, item.name)
    }
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


def _freeze(run: Run) -> None:
    """Leave out of training what the command names.

    Raises:
        UsageError: a pattern that fits no weight, or nothing left to train.
    """
    patterns = list(run.config.freeze or [])
    if run.config.policy.freeze_vision_encoder:
        patterns.append("vision_tower.*")
    parameters = dict(run.policy.model.named_parameters())
    for pattern in patterns:
        fitting = [
            name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(foreign_name(name), pattern)
        ]
        if not fitting:
            raise UsageError(
                f"--freeze: no weight is named like {pattern!r}; names are {', '.join(list(parameters)[:3])}, ..."
            )
        for name in fitting:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError(f"--freeze={json.dumps(patterns)} leaves nothing to train")
