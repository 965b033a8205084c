"""Everything that a training run needs before its first step: the dataset, the policy, and what was decided on the way.

`set_up` joins what the command said (train_config.py), what the checkpoint says (start.py) and what the datasets hold
(opening.py), has the settings settled (settings.py) and the policy made (policies.py). Decisions that nobody spelt out
are printed and kept for the report. Left out: the report itself (audit.py), the optimizer, the loop.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pi0_fast.actions.normalize import Statistics
from pi0_fast.checkpoint import write_files
from pi0_fast.data.reader import LeRobotReader
from pi0_fast.display import say, warn
from pi0_fast.model.weights import foreign_name
from pi0_fast.policy import PI0FastPolicy
from pi0_fast.policy_card import Training
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.train_config import CHECKPOINTS, Member, TrainConfig
from pi0_fast.training import lora
from pi0_fast.training.decisions import Decision
from pi0_fast.training.device import absent, choose_device, settle_tf32
from pi0_fast.training.features import Columns, action_selection, data_statistics, relative_names
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.loader import TrainBatches, train_batches
from pi0_fast.training.mixture import MixedFrames, MixedPreparation
from pi0_fast.training.opening import Data, check_pictures, fetch_videos, frames_of, open_datasets
from pi0_fast.training.policies import NewPolicy, resumed_policy, resumed_policy_of_another
from pi0_fast.training.sampler import BatchSampler, MixtureSampler
from pi0_fast.training.settings import config_of_another, settled_config
from pi0_fast.training.start import Start
from pi0_fast.training.states import newest_checkpoint
from pi0_fast.types import UsageError

#: Decisions that are not about one dataset.
_OF_THE_RUN = ("device", "dtype", "weights", "checkpoint")


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

    def push(self, repo_id: str, *, private: bool, training: Training) -> str:
        """Upload the policy's files to the hub, and return the address of the commit."""
        others = {run.member.name: run.policy.checkpoint() for run in self.others}
        return self.policy.push_to_hub(
            repo_id, private=private, others=others, name=self.member.name, training=training
        )

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
    decisions.append(Decision("device", str(device), "asked for" if config.policy.device else absent(device)))
    if config.cudnn_deterministic:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        if device.type != "cuda":
            warn(f"--cudnn_deterministic changes nothing on {device.type}")
    if device.type == "cuda":
        decisions.append(settle_tf32(config.allow_tf32))
    start = Start.of(config)
    first, *others = open_datasets(config, start)
    check_pictures(config, [first, *others])
    policy_config = settled_config(config, start.of_dataset(first.member.name), first, device, decisions)
    if others and config.policy.statistics == "checkpoint":
        raise UsageError("--policy.statistics=checkpoint: a checkpoint has those of one dataset, and there are several")
    run = _run(config, first, policy_config, start, device, decisions, None)
    for data in others:
        settled = config_of_another(data, policy_config, config.policy.action_feature_names)
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
    data: Data,
    policy_config: PI0FastConfig,
    start: Start,
    device: torch.device,
    decisions: list[Decision],
    first: Run | None,
) -> Run:
    """One dataset with its policy; the model is the first one's, where there is one."""
    reader, columns = data.reader, data.columns
    fetch_videos(reader, columns)
    horizon = policy_config.chunk_size
    frames = frames_of(config, reader, columns, horizon, data.training, transformed=True)
    held = frames_of(config, reader, columns, horizon, data.held_out) if data.held_out else None
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
            policy = resumed_policy(config, policy_config, start, device)
        else:
            policy = resumed_policy_of_another(policy_config, start, data.member.name, first.policy.model)
        return Run(config, data.member, policy, frames, held, reader, columns, decisions=decisions)
    selection = action_selection(policy_config, columns)
    if policy_config.use_relative_actions:
        decisions.append(Decision("relative actions", *relative_names(selection, policy_config, columns)))
    statistics = data_statistics(reader, columns, selection, data.training, horizon)
    own_start = start.of_dataset(data.member.name)
    shared = None if first is None else first.policy
    policy = NewPolicy(config, policy_config, own_start, data, statistics, device, decisions, shared).make()
    known = first is None or own_start is not start
    stored = own_start.stored_statistics() if known else None
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
