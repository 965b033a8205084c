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
from pi0_fast.actions.dct import checked_order
from pi0_fast.actions.normalize import NormalizationMode, Normalizer, Statistics
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.cached_fitting import fit_fast_tokenizer
from pi0_fast.checkpoint import (
    DTYPES,
    LOCAL,
    ROBOTS,
    check_fingerprints,
    find_checkpoint,
    fingerprints_of,
    normalization_fingerprint,
    read_checkpoint,
    robots,
    with_tokenizers,
    write_files,
)
from pi0_fast.data.reader import LeRobotReader, open_dataset
from pi0_fast.display import say, warn
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
    PolicyFeature,
    read_config,
    read_details,
)
from pi0_fast.processors import FeatureStatistics, PolicyProcessors, read_processors
from pi0_fast.text_tokenizer import TextTokenizer
from pi0_fast.train_config import CHECKPOINTS, PRETRAINED_MODEL, Member, TrainConfig
from pi0_fast.training import lora
from pi0_fast.training.features import Columns, action_selection, choose_columns, data_statistics, relative_names
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.loader import TrainBatches, train_batches
from pi0_fast.training.mixture import MixedFrames, MixedPreparation
from pi0_fast.training.sampler import BatchSampler, MixtureSampler
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
#: Decisions that are not about one dataset.
_OF_THE_RUN = ("device", "dtype", "weights", "checkpoint")


@dataclass(frozen=True)
class Decision:
    """One thing that was decided before training: what, its value, and why."""

    what: str
    value: str
    why: str


@dataclass
class Run:
    """A training run that is ready for its first step. Of a mixture: what belongs to its first dataset, and `others`.

    Attributes:
        config: the command's.
        member: what the command says of this dataset.
        policy: on its device, in training mode; only parameters that are trained require gradients.
        train_frames: the frames to train on.
        validation_frames: those of the held-out episodes; None where nothing is held out.
        reader: the dataset.
        columns: which of its columns are used, and as what.
        statistics: of the training frames, by the policy's names; empty on `--resume`, where the checkpoint's hold.
        stored_statistics: those of the checkpoint that training began with, or None.
        decisions: what was decided, for the report.
        others: of a mixture, the same for each further dataset; the model is the same one.
    """

    config: TrainConfig
    member: Member
    policy: PI0FastPolicy
    train_frames: FrameDataset
    validation_frames: FrameDataset | None
    reader: LeRobotReader
    columns: Columns
    statistics: dict[str, Statistics] = field(default_factory=dict)
    stored_statistics: dict[str, dict[str, Any]] | None = None
    decisions: list[Decision] = field(default_factory=list)
    others: list[Run] = field(default_factory=list)

    @property
    def datasets(self) -> list[Run]:
        """This, and the others."""
        return [self, *self.others]

    def sampler(self, batch_size: int, first_step: int = 0) -> BatchSampler:
        """Which frames each batch has."""
        seed = self.config.seed
        if not self.others:
            return BatchSampler(len(self.train_frames), batch_size, seed, first_step)
        counts = [len(run.train_frames) for run in self.datasets]
        weights = [run.member.weight for run in self.datasets]
        given = counts if None in weights else weights
        return MixtureSampler(counts, given, batch_size, seed, first_step)

    def batches(self, first_step: int, stop_step: int, *, share: tuple[int, int] = (0, 1)) -> TrainBatches:
        """Prepared batches from a step on; with `share` (i, n), part i of batches that are n times as large."""
        config = self.config
        parts = self.datasets
        return train_batches(
            MixedFrames([run.train_frames for run in parts]) if self.others else self.train_frames,
            MixedPreparation([run.policy.preparation for run in parts]) if self.others else self.policy.preparation,
            self.sampler(config.batch_size * share[1], first_step),
            config.num_workers,
            prefetch=config.prefetch_factor,
            stop_step=stop_step,
            share=share,
        )

    def conditions(self) -> dict[str, Any]:
        """What the batches depend on, beyond seed and step."""
        frames = {run.member.name: len(run.train_frames) for run in self.datasets}
        transforms = self.config.dataset.image_transforms
        digests = [run.train_frames.digest for run in self.datasets]
        common = {
            "which frames, and their tasks (sha256)": "-".join(digests),
            "image transforms": asdict(transforms) if transforms.enable else None,
        }
        if not self.others:
            return {"training frames": len(self.train_frames), **common}
        sampler = self.sampler(1)
        assert isinstance(sampler, MixtureSampler)
        return {"training frames": frames, "parts of the datasets": list(sampler.parts), **common}

    @cached_property
    def data_digest(self) -> str:
        """A hash of the states and actions of all episodes, by which a resumed run knows its data again."""
        keys = dict.fromkeys((self.columns.state.key, self.columns.action.key))
        own = self.reader.content_digest(tuple(keys))
        return "-".join([own, *(run.data_digest for run in self.others)])

    def save_model(self, directory: Path) -> None:
        """Write the policy's files, as a checkpoint's pretrained_model holds them, into an existing directory."""
        peft, policy = self.config.peft, self.policy
        others = {run.member.name: run.policy.checkpoint() for run in self.others}
        if peft is None:
            write_files(directory, policy.checkpoint(), others=others, name=self.member.name)
            return
        base = str(self.config.policy.path or self.config.policy.pretrained_path)
        if peft.merge:
            write_files(directory, lora.merged_checkpoint(policy), others=others, name=self.member.name)
            lora.write_adapters(directory, policy, peft, base, others)  # for going on
        else:
            lora.write_adapter_checkpoint(directory, policy, peft, base, others, self.member.name)

    def push(self, repo_id: str, *, private: bool) -> str:
        """Upload the policy's files to the hub, and return the address of the commit."""
        others = {run.member.name: run.policy.checkpoint() for run in self.others}
        return self.policy.push_to_hub(repo_id, private=private, others=others, name=self.member.name)

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
        if device.type != "cuda":
            warn(f"--cudnn_deterministic changes nothing on {device.type}")
    if device.type == "cuda":
        decisions.append(_settle_tf32(config.allow_tf32))
    start = _Start.of(config)
    first, *others = _open_datasets(config, start)
    _check_pictures(config, [first, *others])
    policy_config = _policy_config(config, start.of_dataset(first.member.name), first, device, decisions)
    if others and config.policy.statistics == "checkpoint":
        raise UsageError("--policy.statistics=checkpoint: a checkpoint has those of one dataset, and there are several")
    run = _run(config, first, policy_config, start, device, decisions, None)
    for data in others:
        settled = _config_of(data, policy_config, config.policy.action_feature_names)
        run.others.append(_run(config, data, settled, start, device, [], run))
    if config.peft is not None and not config.resume:
        lora.add_adapters(run.policy.model, config.peft, config.seed)
    for each in run.datasets:
        each.policy.train()
    _freeze(run)
    for each in run.datasets:
        for decision in each.decisions:
            prefix = f"{each.member.name}: " if others and decision.what not in _OF_THE_RUN else ""
            say(f"{prefix}{decision.what}: {decision.value} ({decision.why})")
    return run


def _run(
    config: TrainConfig,
    data: _Data,
    policy_config: PI0FastConfig,
    start: _Start,
    device: torch.device,
    decisions: list[Decision],
    first: Run | None,
) -> Run:
    """One dataset with its policy; the model is the first one's, where there is one."""
    reader, columns = data.reader, data.columns
    _fetch_videos(reader, columns)
    horizon = policy_config.chunk_size
    frames = _frames(config, reader, columns, horizon, data.training, transformed=True)
    held = _frames(config, reader, columns, horizon, data.held_out) if data.held_out else None
    if config.eval_freq and held is not None and not len(held.whole):
        raise UsageError(
            f"--dataset.val_fraction: none of the held-out episodes of {reader.repo_id} "
            f"({', '.join(map(str, held.episodes))}) has the {horizon} frames of a chunk, so that nothing can be "
            "measured on them: hold out more, take another --seed or a smaller --policy.chunk_size, or --eval_freq=0"
        )
    if frames.repeated:
        shown = f"{len(frames)} of {len(frames) + frames.repeated}"
        decisions.append(Decision("frames", shown, "the others repeat an earlier picture, says image_age"))
    if config.resume:
        if first is None:
            policy = _resumed(policy_config, start, device, config)
        else:
            policy = _resumed_robot(policy_config, start, data.member.name, first.policy.model)
        return Run(config, data.member, policy, frames, held, reader, columns, decisions=decisions)
    selection = action_selection(policy_config, columns)
    if policy_config.use_relative_actions:
        decisions.append(Decision("relative actions", *relative_names(selection, policy_config, columns)))
    statistics = data_statistics(reader, columns, selection, data.training, horizon)
    own_start = start.of_dataset(data.member.name)
    made = _Making(config, policy_config, own_start, data, statistics, device, decisions, first)
    known = first is None or own_start is not start
    policy, stored = made.policy(), own_start.stored_statistics() if known else None
    return Run(config, data.member, policy, frames, held, reader, columns, statistics, stored, decisions)


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


def _settle_tf32(allowed: bool) -> Decision:
    """How cuda multiplies float32 numbers."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    why = "faster by far; --allow_tf32=false: with all bits" if allowed else "--allow_tf32=false"
    return Decision("products of float32", "TF32" if allowed else "float32", why)


def _absent(device: torch.device) -> str:
    missing = _DEVICES[: _DEVICES.index(device.type)]
    return f"there is no {' and no '.join(missing)}" if missing else "the first choice"


# --- dataset ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """A dataset: what the command says of it, its columns, its episodes, and the inputs of a policy made for all."""

    member: Member
    reader: LeRobotReader
    columns: Columns
    training: tuple[int, ...]
    held_out: tuple[int, ...]
    inputs: dict[str, PolicyFeature]


def _open_datasets(config: TrainConfig, start: _Start) -> list[_Data]:
    """The datasets. A new policy has the cameras of all of them, and each dataset lacks those of the others."""
    members = config.members
    if config.resume and start.folder is not None:
        saved, named = robots(start.folder), [member.name for member in members]
        if (saved or named[:1]) != named:
            raise UsageError(
                f"--resume: the run has the datasets {', '.join(saved) or 'of one name only'}, the command names "
                f"{', '.join(named)}"
            )
    readers = [open_dataset(member.repo_id, root=member.root, revision=member.revision) for member in members]
    if members[0].rename_is_shared:
        members = [_with_own_renames(member, reader, readers) for member, reader in zip(members, readers, strict=True)]
    columns = []
    for member, reader in zip(members, readers, strict=True):
        own_start = start.of_dataset(member.name)
        stored = own_start.config if start.keeps_cameras else None
        columns.append(choose_columns(reader, member, stored, own_start.renames))
    cameras: dict[str, PolicyFeature] = {}
    for own, reader in zip(columns, readers, strict=True):
        for key, feature in own.inputs(reader).items():
            if feature.type == "VISUAL":
                cameras.setdefault(key, feature)
    found = []
    for member, reader, own in zip(members, readers, columns, strict=True):
        if cameras and not own.cameras:
            raise UsageError(
                f"{member.repo_id} has no camera, but the policy looks at {', '.join(cameras)}: leave that dataset out"
            )
        there = {own.policy_name(key) for key in own.cameras}
        lacking = tuple(key for key in cameras if key not in there and key not in own.missing_cameras)
        found.append(
            _Data(
                member,
                reader,
                replace(own, missing_cameras=(*own.missing_cameras, *lacking)),
                *_episodes(config, member, reader),
                {**cameras, STATE_KEY: PolicyFeature("STATE", own.state.shape)},
            )
        )
    return found


def _with_own_renames(member: Member, reader: LeRobotReader, readers: list[LeRobotReader]) -> Member:
    """Of a map that is given for all datasets, what concerns this one; each entry must concern one of them."""
    given = member.rename_map or {}
    for source in given:
        if not any(source in other.features for other in readers):
            names = ", ".join(other.repo_id for other in readers)
            raise UsageError(f"--rename_map: none of the datasets {names} has a column {source!r}")
    kept = {source: target for source, target in given.items() if source in reader.features}
    return replace(member, rename_map=None if member.rename_map is None else kept)


def _episodes(config: TrainConfig, member: Member, reader: LeRobotReader) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Episodes to train on and held-out ones."""
    there = [record.index for record in reader.episodes]
    asked = there if member.episodes is None else member.episodes
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
        whole: of the parts of one of several datasets (see `of_dataset`), the checkpoint that has the weights.
    """

    folder: Path | None
    config: PI0FastConfig | None
    details: dict[str, Any]
    keeps_cameras: bool
    whole: Path | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> _Start:
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

    def of_dataset(self, name: str) -> _Start:
        """What the checkpoint holds for a dataset that it was trained on among others; else what it holds as a whole.

        Without this, a robot would be trained on with the tokens, units and names of the checkpoint's first one.
        """
        if self.folder is None or name not in robots(self.folder)[1:]:
            return self
        folder = self.folder / ROBOTS / name
        return _Start(folder, read_config(folder), read_details(folder), self.keeps_cameras, self.folder)

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


def _check_pictures(config: TrainConfig, datasets: list[_Data]) -> None:
    """Refuse flags about pictures where no dataset has any.

    Raises:
        UsageError: there is one.
    """
    if any(data.columns.cameras for data in datasets):
        return
    for name, given in (
        ("cache_dir", config.dataset.cache_dir is not None),
        ("image_transforms.enable", config.dataset.image_transforms.enable),
    ):
        if given:
            raise UsageError(f"--dataset.{name} has no effect: no camera is in use")


def _policy_config(
    config: TrainConfig,
    start: _Start,
    data: _Data,
    device: torch.device,
    decisions: list[Decision],
) -> PI0FastConfig:
    """The policy's settings: the checkpoint's or the defaults, then the flags, then what the dataset says."""
    options = config.policy
    given = {name: value for name, value in options.settings().items() if not (config.resume and name in _FIXED)}
    dataset_inputs, outputs = data.inputs, data.columns.outputs()
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
        decisions.append(
            Decision("dtype", str(given.get("dtype", base.dtype)), "asked for" if "dtype" in given else "the run's")
        )
    if not config.resume:
        decided["action_feature_names"] = _action_names(options.action_feature_names, data, base.action_feature_names)
    try:
        settled = replace(base, **{**given, **decided})
        if start.folder is not None and not config.resume:
            settled = replace(settled, normalization_mapping=_modes(start, given))
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error
    if options.path is not None and options.pretrained_path is not None and not config.resume:
        why = (
            f"--policy.path gives settings and weights; --policy.pretrained_path={options.pretrained_path} is not read"
        )
        decisions.append(Decision("checkpoint", options.path, why))
    _check_effects(given, settled, base)
    return settled


#: A setting -> another that it needs to change anything, and the value that it needs.
_NEEDS: dict[str, tuple[str, bool]] = {
    "compile_mode": ("compile_model", True),
    "relative_exclude_joints": ("use_relative_actions", True),
    "validate_action_token_prefix": ("constrained", False),
}


def _check_effects(given: Mapping[str, Any], settled: PI0FastConfig, base: PI0FastConfig) -> None:
    """Refuse flags that change a setting which changes nothing.

    Raises:
        UsageError: there is one.
    """
    for name, (other, value) in _NEEDS.items():
        if name in given and getattr(settled, other) is not value and getattr(settled, name) != getattr(base, name):
            raise UsageError(f"--policy.{name} has no effect without --policy.{other}={str(value).lower()}")


def _action_names(asked: list[str] | None, data: _Data, stored: list[str] | None = None) -> list[str] | None:
    """Names of the action's dimensions: those asked for, else the dataset's, else the checkpoint's where they fit.

    A checkpoint may be of a robot with as many joints in another order: what stays absolute goes by the data's names.

    Raises:
        UsageError: those asked for are not one for each dimension.
    """
    size = data.columns.action.shape[0]
    if asked is not None and len(asked) != size:
        raise UsageError(
            f"--policy.action_feature_names has {len(asked)} names, but the actions of {data.member.repo_id} have "
            f"{size} dimensions: give one for each, or leave it out for the dataset's names"
        )
    fitting = stored if stored is not None and len(stored) == size else None
    return asked or data.columns.action_names or fitting


def _config_of(data: _Data, first: PI0FastConfig, asked: list[str] | None) -> PI0FastConfig:
    """The settings of a mixture's further dataset: the first one's, but for dimensions and their names.

    Names that the command gives are the first one's; another dataset gets them where it has none, and they fit.
    """
    inputs = {key: feature for key, feature in first.input_features.items() if feature.type == "VISUAL"}
    try:
        return replace(
            first,
            input_features={**inputs, STATE_KEY: data.inputs[STATE_KEY]},
            output_features=data.columns.outputs(),
            action_feature_names=_action_names(None, data, asked),
        )
    except PolicyError as error:
        raise UsageError(f"{data.member.name}: {error}") from error


def _modes(start: _Start, given: Mapping[str, Any]) -> dict[str, NormalizationMode]:
    """How state and action are normalised: as the checkpoint's were, unless the command says so outright."""
    stored = start.nominal_processors
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
    data: _Data
    statistics: dict[str, Statistics]
    device: torch.device
    decisions: list[Decision]
    first: Run | None

    @property
    def columns(self) -> Columns:
        return self.data.columns

    def policy(self) -> PI0FastPolicy:
        """Made of the checkpoint's weights, or of random ones."""
        fitted = self._fitted_tokenizer()
        kept = {} if self.start.folder is None else self._copies()
        text: TextTokenizer | None = None
        if self.first is not None:  # whose copy the checkpoint of this dataset will hold too
            text, kept = self.first.policy.preparation.prompt.text_tokenizer, _without(kept, "text_tokenizer")
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
        model = self._model(config, text_tokenizer.vocab_size) if self.first is None else self.first.policy.model
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


def _resumed_robot(settled: PI0FastConfig, start: _Start, name: str, model: PaliGemma) -> PI0FastPolicy:
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


def _resumed(settled: PI0FastConfig, start: _Start, device: torch.device, config: TrainConfig) -> PI0FastPolicy:
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
