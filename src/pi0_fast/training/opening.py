"""The datasets of a run: opened, their columns and episodes chosen, their frames.

Left out: which columns there are (features.py), decoding (frames.py), and in which order frames come (sampler.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from pi0_fast.actions.chunks import split_episodes
from pi0_fast.checkpoint import robots
from pi0_fast.data.reader import LeRobotReader, open_dataset
from pi0_fast.hub import download_snapshot
from pi0_fast.parsing import expanded
from pi0_fast.policy_config import STATE_KEY, PolicyFeature
from pi0_fast.train_config import Member, TrainConfig
from pi0_fast.training.features import Columns, choose_columns
from pi0_fast.training.frames import FrameDataset
from pi0_fast.training.start import Start
from pi0_fast.training.transforms import ImageTransforms
from pi0_fast.types import DatasetError, UsageError


@dataclass(frozen=True)
class Data:
    """A dataset: what the command says of it, its columns, its episodes, and the inputs of a policy made for all."""

    member: Member
    reader: LeRobotReader
    columns: Columns
    training: tuple[int, ...]
    held_out: tuple[int, ...]
    inputs: dict[str, PolicyFeature]


def open_datasets(config: TrainConfig, start: Start) -> list[Data]:
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
            Data(
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


def fetch_videos(reader: LeRobotReader, columns: Columns) -> None:
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


def frames_of(
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


def check_pictures(config: TrainConfig, datasets: list[Data]) -> None:
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
