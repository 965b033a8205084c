"""A policy's checkpoint directory: everything a policy is made of, read and written as one.

    out/
      config.json                    LeRobot's settings
      pi0_fast.json                  ours, the sizes of the model, and where the tokenizers lie
      model.safetensors              weights under LeRobot's names; its header holds the fingerprints of what follows
      policy_preprocessor.json  policy_postprocessor.json  and the statistics that they name
      tokenizers/action/             the FAST tokenizer
      tokenizers/text/               the text tokenizer's files
      robots/NAME/                   of a policy that was trained on several datasets: all of the above but the weights,
                                     for each dataset but the first, which the rest is of

Directories of LeRobot, which have no pi0_fast.json and need not hold their tokenizers, are read too. A directory is
written beside its place and put there when it is whole. What is not here: the single files (policy_config.py,
processors.py, model/weights.py) and what a policy does.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pi0_fast.actions.directory import wait_for_directory
from pi0_fast.actions.tokenizer import FastTokenizer
from pi0_fast.hub import download_snapshot
from pi0_fast.model import weights
from pi0_fast.model.architecture import Architecture
from pi0_fast.model.paligemma import PaliGemma
from pi0_fast.policy_config import (
    CONFIG_FILE,
    OWN_FILE,
    STATE_KEY,
    PI0FastConfig,
    read_config,
    read_details,
    read_json_object,
    write_config,
)
from pi0_fast.preparation import bound_tokenizer
from pi0_fast.processors import (
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    FeatureNormalizer,
    FeatureStatistics,
    PolicyProcessors,
    read_processors,
    write_processors,
)
from pi0_fast.swap import (
    bring_along,
    finish_interrupted_swap,
    install_directory,
    keep_other_files,
    temporary_sibling,
)
from pi0_fast.text_tokenizer import BUILT_IN, TextTokenizer, load_text_tokenizer
from pi0_fast.train_config import CHECKPOINTS, LAST, PRETRAINED_MODEL
from pi0_fast.types import PolicyError, TokenizerError

TOKENIZERS = "tokenizers"
#: Where a checkpoint keeps its tokenizers.
LOCAL = {"action_tokenizer": f"{TOKENIZERS}/action", "text_tokenizer": f"{TOKENIZERS}/text"}
#: What a hub repository is asked for: a checkpoint's files, its tokenizers included.
HUB_FILES = ("*.json", "*.safetensors", "*.model", f"{TOKENIZERS}/**", "robots/**")
#: Where a checkpoint keeps what it has for each further dataset, and what pi0_fast.json calls the names of them all.
ROBOTS = "robots"
#: Files that only a policy's repository has.
SIGNATURE_FILES = (PREPROCESSOR_FILE, POSTPROCESSOR_FILE, OWN_FILE)
#: Files that a checkpoint replaces, or removes where it does not have them.
OWN_FILES = (CONFIG_FILE, *SIGNATURE_FILES, weights.SINGLE_FILE, weights.INDEX_FILE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FINGERPRINT = "pi0_fast."
# How often a directory is read that is being replaced just now, and the seconds between.
_READ_TRIES, _READ_PAUSE = 5, 0.05
_OWN_TENSORS = re.compile(r"(model-\d+-of-\d+|policy_(pre|post)processor_step_\d+_\w+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What a policy is made of.

    Attributes:
        config: all settings.
        model: the weights.
        processors: names, units, normalisation.
        text_tokenizer, action_tokenizer: the tokenizers; the action tokenizer is bound to the policy's chunks.
    """

    config: PI0FastConfig
    model: PaliGemma
    processors: PolicyProcessors
    text_tokenizer: TextTokenizer
    action_tokenizer: FastTokenizer

    def fingerprints(self) -> dict[str, str]:
        """Hashes of what belongs to the weights and lies in other files, by name."""
        return {
            "action_tokenizer": self.action_tokenizer.fingerprint,
            "text_tokenizer": self.text_tokenizer.fingerprint,
            "normalization": normalization_fingerprint(self.processors),
        }


def normalization_fingerprint(processors: PolicyProcessors) -> str:
    """16 hexadecimal digits: how state and action are normalised, and which actions are relative."""

    def plain(normalizer: FeatureNormalizer) -> dict[str, Any]:
        used = {name: normalizer.statistics[name].tolist() for name in normalizer.mode.needs}
        return {"mode": normalizer.mode.value, "size": normalizer.size, **used}

    content: dict[str, Any] = {"state": plain(processors.state), "action": plain(processors.action)}
    if processors.relative is not None:
        content["relative"] = list(processors.relative.mask)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --- reading ------------------------------------------------------------------------------------------------


def find_checkpoint(
    path_or_hub_id: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The directory of that name, or the downloaded files of a hub repository.

    Raises:
        PolicyError: neither a directory nor a hub id; the directory of a training run, which holds policies.
        HubError: no such repository, access refused, offline.
    """
    folder = Path(path_or_hub_id).expanduser()
    try:
        if wait_for_directory(folder, partial(finish_interrupted_swap, bring_along=_bring_along)):
            _refuse_run(folder)
            return folder
    except TokenizerError as error:
        raise PolicyError(str(error)) from error
    text = str(path_or_hub_id)
    if folder.exists():
        raise PolicyError(f"{folder} is a file: give the directory of the checkpoint")
    if isinstance(path_or_hub_id, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise PolicyError(
            f"no checkpoint directory at {folder.absolute()}, and {text!r} is no hub id of the form owner/name"
        )
    return download_snapshot(
        text,
        repo_type="model",
        allow_patterns=HUB_FILES,
        searched=str(folder.absolute()),
        local_advice="pass the local directory of the checkpoint",
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )


def _refuse_run(folder: Path) -> None:
    """A run's directory, its checkpoints/, or one of those: they hold policies, but are none.

    Raises:
        PolicyError: it is one; the message names the newest policy in it.
    """
    if (folder / CONFIG_FILE).exists():
        return
    steps = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    numbered = [entry for entry in steps.iterdir() if re.fullmatch(r"\d+", entry.name)]
    newest = sorted(numbered, key=lambda entry: int(entry.name), reverse=True)
    places = [entry / PRETRAINED_MODEL for entry in (folder, steps / LAST, *newest)]
    found = next((place for place in places if (place / CONFIG_FILE).is_file()), None)
    if found is not None:
        raise PolicyError(f"{folder} belongs to a training run and is no policy itself: give {found}")
    if steps != folder:
        raise PolicyError(f"{folder} is the directory of a training run that has saved no checkpoint yet")


def read_checkpoint(folder: Path, **options: Any) -> Checkpoint:
    """Read a checkpoint directory of ours or of LeRobot's, once more where it is replaced meanwhile.

    Its files are opened one after the other, so that a training run that saves there would mix two checkpoints.

    Args:
        folder: as `find_checkpoint` gives it.
        options: of `_read_once`.

    Raises:
        PolicyError: a file is missing, damaged, contradicts another, or does not belong to the weights; or files keep
            changing.
    """
    for _ in range(_READ_TRIES):
        before, problem, result = _identity(folder), None, None
        try:
            result = _read_once(folder, **options)
        except (PolicyError, TokenizerError, SafetensorError, OSError, RuntimeError) as error:
            problem = error
        if before is not None and _identity(folder) == before:
            if problem is not None:
                raise problem
            assert result is not None
            return result
        del result  # the memory is needed for the next one
        time.sleep(_READ_PAUSE)
        find_checkpoint(folder)
    raise PolicyError(f"{folder} is replaced again and again: load it when nothing is saved there") from problem


def _identity(folder: Path) -> list[tuple[int, ...]] | None:
    """What changes when the directory is replaced, or one of the checkpoint's files in it; None where it is not there.

    Of a tokenizer's folder only itself: its files are read at one time, and checked.
    """
    try:
        own = sorted(entry for entry in folder.iterdir() if _is_own(entry, entry.name))
        stats = [folder.stat(), *(entry.stat() for entry in own)]
    except OSError:
        return None
    whole, *files = [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
    return [whole[:2], *files]


def _read_once(
    folder: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: Callable[[PI0FastConfig], torch.device] = lambda _: torch.device("cpu"),
    strict: bool = True,
    architecture: Architecture | None = None,
    statistics: Mapping[str, FeatureStatistics] | None = None,
    text_tokenizer: TextTokenizer | None = None,
    action_tokenizer: FastTokenizer | None = None,
    robot: str | None = None,
    model: PaliGemma | None = None,
    **hub: Any,
) -> Checkpoint:
    """The files as they are found; see `PI0FastPolicy.from_pretrained` for the arguments.

    `device` says, of the configuration, where the weights go; `hub` is token, cache_dir and local_files_only. A `model`
    that is given is the checkpoint's, loaded already.

    Raises:
        PolicyError: a file is missing, damaged, contradicts another, or does not belong to the weights.
    """
    weights_folder, prefix = folder, ""
    if robot is not None:
        folder, prefix = _robot_folder(folder, robot)
    stored = read_config(folder)
    details = read_details(folder)
    config = _overridden(stored, overrides or {})
    processors = read_processors(folder, replace(stored, action_clip=config.action_clip), statistics=statistics)
    given = {"action_tokenizer": action_tokenizer is not None, "text_tokenizer": text_tokenizer is not None}
    changed = {name for name in vars(config) if getattr(config, name) != getattr(stored, name)}
    copies = {kind: _copy(folder, details[kind]) for kind in LOCAL if kind in details and f"{kind}_name" not in changed}
    config, text_tokenizer, action_tokenizer = with_tokenizers(
        config, text_tokenizer, action_tokenizer, folder=folder, copies=copies, **hub
    )
    action_tokenizer = bound_tokenizer(action_tokenizer, config, processors)
    if details.get("architecture") is not None and "paligemma_variant" in changed:
        raise PolicyError(
            f"{folder}: {OWN_FILE} says the sizes of the model, so that paligemma_variant={config.paligemma_variant!r} "
            "would change nothing; it cannot be overridden"
        )
    if architecture is None and details.get("architecture") is not None:
        architecture = Architecture.from_json(details["architecture"])
    if architecture is None:
        architecture = Architecture.variant(config.paligemma_variant)
    if model is None:
        model = weights.load(weights_folder, architecture, DTYPES[config.dtype], device(config), strict)
    result = Checkpoint(config, model, processors, text_tokenizer, action_tokenizer)
    given["normalization"] = statistics is not None
    found = {prefix + name: value for name, value in result.fingerprints().items() if not given[name]}
    if (weights_folder / weights.SINGLE_FILE).is_file() or (weights_folder / weights.INDEX_FILE).is_file():
        check_fingerprints(weights_folder, found)  # adapters alone, to whose base a given model was made, say nothing
    return result


def robots(folder: Path) -> list[str]:
    """Names of the datasets that a policy was trained on, the first one first; empty where there was only one."""
    names = read_details(folder).get(ROBOTS, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise PolicyError(f"{folder / OWN_FILE}: {ROBOTS!r} must be a list of names, not {names!r}")
    return names


def _robot_folder(folder: Path, name: str) -> tuple[Path, str]:
    """Where the parts of a dataset lie, and what stands before the names of their fingerprints."""
    there = robots(folder)
    name = name if name in there else name.replace("/", "_")
    if name not in there:
        known = f"it has {', '.join(there)}" if there else "it was trained on one dataset: leave robot out"
        raise PolicyError(f"{folder} has no robot {name!r}; {known}")
    if name == there[0]:
        return folder, ""
    return _copy(folder, f"{ROBOTS}/{name}"), f"{name}/"


def with_tokenizers(
    config: PI0FastConfig,
    text_tokenizer: TextTokenizer | None,
    action_tokenizer: FastTokenizer | None,
    *,
    folder: Path | None = None,
    copies: Mapping[str, Path] | None = None,
    **hub: Any,
) -> tuple[PI0FastConfig, TextTokenizer, FastTokenizer]:
    """The tokenizers, loaded where they are not given, and the configuration with the names they are saved under.

    What was given, or is on this machine only, has no name elsewhere: the configuration then names the copy that a
    checkpoint holds.

    Args:
        config: names the tokenizers.
        text_tokenizer, action_tokenizer: None loads what the configuration names.
        folder: of a checkpoint, where relative names are looked for first.
        copies: kind of tokenizer -> where the checkpoint holds a copy of it, which is preferred.
        hub: token, cache_dir, local_files_only.

    Raises:
        PolicyError, TokenizerError, HubError: nothing of that name, or damaged files.
    """
    places: dict[str, str | Path] = dict(copies or {})
    names: dict[str, Any] = {}
    for kind, given in (("text_tokenizer", text_tokenizer), ("action_tokenizer", action_tokenizer)):
        setting, is_copy = f"{kind}_name", kind in places
        if not is_copy:
            places[kind] = _place(folder, getattr(config, setting))
        if given is not None or (isinstance(places[kind], Path) and not is_copy):
            names[setting] = LOCAL[kind]
    config = replace(config, **names)
    if text_tokenizer is None:
        text_tokenizer = load_text_tokenizer(places["text_tokenizer"], **hub)
    if action_tokenizer is None:
        action_tokenizer = FastTokenizer.from_pretrained(places["action_tokenizer"], **hub)
    return config, text_tokenizer, action_tokenizer


def _overridden(stored: PI0FastConfig, overrides: Mapping[str, Any]) -> PI0FastConfig:
    unknown = sorted(set(overrides) - set(vars(stored)))
    if unknown:
        raise PolicyError(f"the policy has no settings {', '.join(unknown)}; it has {', '.join(sorted(vars(stored)))}")
    changed = replace(stored, **overrides)
    fixed = ("normalization_mapping", "use_relative_actions", "relative_exclude_joints", "action_feature_names")
    for name in (*fixed, "output_features"):
        if getattr(changed, name) != getattr(stored, name):
            raise PolicyError(
                f"{name} belongs to the checkpoint's weights ({getattr(stored, name)}) and cannot be overridden"
            )
    if changed.input_features.get(STATE_KEY) != stored.input_features.get(STATE_KEY):
        raise PolicyError(f"input_features: {STATE_KEY!r} belongs to the checkpoint's weights and cannot be overridden")
    return changed


def _copy(folder: Path, name: Any) -> Path:
    """Where pi0_fast.json says that a tokenizer lies, which must be in the checkpoint."""
    parts = Path(name).parts if isinstance(name, str) else ()
    if not parts or ".." in parts or Path(*parts).is_absolute():
        raise PolicyError(f"{folder / OWN_FILE}: {name!r} is no place within the checkpoint")
    return folder.joinpath(*parts)


def _place(folder: Path | None, name: str) -> str | Path:
    """Where a tokenizer of that name lies: in the checkpoint, elsewhere on this machine, or (a text) on the hub."""
    here = Path(name).expanduser()
    for place in (here,) if folder is None else (folder / name, here):
        if name not in ("", BUILT_IN) and place.exists():
            return place
    return name


def check_fingerprints(folder: Path, found: Mapping[str, str], file: Path | None = None) -> None:
    """Whether the tokenizers and statistics are those that the weights were saved with; LeRobot's do not say.

    Args:
        folder: of the checkpoint.
        found: of those to check, name -> fingerprint; see `Checkpoint.fingerprints`.
        file: whose header has those that were trained with; None for that of the weights.

    Raises:
        PolicyError: one is another; or the weights cannot be read.
    """
    try:
        file = file or folder / weights.SINGLE_FILE
        if not file.is_file():  # any shard
            file = folder / min(read_json_object(folder / weights.INDEX_FILE)["weight_map"].values())
        with safe_open(file, "pt") as header:
            recorded = header.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{folder}: the header of the weights cannot be read: {error}") from error
    for name, fingerprint in found.items():
        wanted = recorded.get(_FINGERPRINT + name)
        if wanted is not None and wanted != fingerprint:
            robot, _, kind = name.rpartition("/")
            what = f"{f'{ROBOTS}/{robot}/' if robot else ''}{LOCAL.get(kind, PREPROCESSOR_FILE)}"
            raise PolicyError(
                f"{folder}: the {name.replace('_', ' ')} has the fingerprint {fingerprint}, but the weights were "
                f"trained with {wanted}: {what} comes from another checkpoint. Restore it; to go on with another one "
                "on purpose, pass it to from_pretrained (action_tokenizer=, text_tokenizer=, statistics=)"
            )


def fingerprints_of(others: Mapping[str, Checkpoint]) -> dict[str, str]:
    """Those of further datasets, with the dataset's name before each."""
    return {f"{name}/{kind}": value for name, parts in others.items() for kind, value in parts.fingerprints().items()}


def fingerprint_header(found: Mapping[str, str]) -> dict[str, str]:
    """What the header of the weights says of `Checkpoint.fingerprints`."""
    return {_FINGERPRINT + kind: value for kind, value in found.items()}


# --- writing ------------------------------------------------------------------------------------------------


def write_checkpoint(target: Path, checkpoint: Checkpoint, **options: Any) -> None:
    """Write a checkpoint directory, all at once or not at all; other files in an existing directory stay.

    Args:
        target: made if missing.
        checkpoint: all of it.
        options: of `write_files`.

    Raises:
        OSError: it cannot be written; what was there before is unharmed.
    """
    if (target.is_symlink() or target.exists()) and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{target} exists and is no directory")
    finish_interrupted_swap(target, _bring_along)
    temporary = temporary_sibling(target)
    try:
        keep_other_files(target, temporary, _is_own, mixed_folders=(TOKENIZERS,))
        write_files(temporary, checkpoint, **options)
        install_directory(temporary, target, _bring_along)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_files(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    max_shard_bytes: int | None = None,
    others: Mapping[str, Checkpoint] | None = None,
    name: str = "",
) -> None:
    """Write the files into an existing directory, one after the other.

    Args:
        folder: exists.
        checkpoint: all of it.
        max_shard_bytes: see `model.weights.save`.
        others: of further datasets, by their names, with the same model.
        name: of the first dataset, where there are others.
    """
    header = fingerprint_header({**checkpoint.fingerprints(), **fingerprints_of(others or {})})
    write_robots(folder, others or {})
    write_parts(folder, checkpoint, {ROBOTS: [name, *others]} if others else {})
    weights.save(checkpoint.model, folder, header, max_shard_bytes=max_shard_bytes)


def write_robots(folder: Path, others: Mapping[str, Checkpoint]) -> None:
    """Write what belongs to each further dataset, without the weights."""
    for name, parts in others.items():
        (folder / ROBOTS / name).mkdir(parents=True)
        write_parts(folder / ROBOTS / name, parts)


def write_parts(folder: Path, checkpoint: Checkpoint, details: Mapping[str, Any] | None = None) -> None:
    """Write all but the weights; `details` are for pi0_fast.json."""
    config = checkpoint.config
    details = {"architecture": checkpoint.model.architecture.to_json(), **LOCAL, **(details or {})}
    if config.text_tokenizer_name == BUILT_IN:
        config = replace(config, text_tokenizer_name=LOCAL["text_tokenizer"])
    checkpoint.text_tokenizer.save(folder / LOCAL["text_tokenizer"])
    checkpoint.action_tokenizer.save_pretrained(folder / LOCAL["action_tokenizer"])
    write_config(folder, config, details)
    write_processors(folder, config, checkpoint.processors)


def _is_own(entry: Path, name: str) -> bool:  # noqa: ARG001 (one signature)
    """Whether this entry belongs to the checkpoint that is replaced, and goes with it."""
    return name in (*LOCAL.values(), *OWN_FILES, ROBOTS) or _OWN_TENSORS.fullmatch(name) is not None


_bring_along = partial(bring_along, is_own=_is_own)
