"""The model card (README.md) of a policy on the Hugging Face hub: inputs, outputs, settings, errors, how to load it.

A text from a checkpoint's parts and from what training adds (`Training`). Left out: what neither of them knows, such as
how the data was recorded and what the policy may be used for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pi0_fast import __version__
from pi0_fast.actions.model_card import bullets, escaped, front_matter, is_hub_id, table
from pi0_fast.actions.report import Table
from pi0_fast.checkpoint import Checkpoint
from pi0_fast.policy_config import PI0FastConfig
from pi0_fast.processors import FeatureNormalizer


@dataclass(frozen=True)
class Training:
    """What a policy does not know of its training.

    Attributes:
        datasets: ids of the datasets, the first one first.
        rows: (what, value), such as ("Steps", "30,000").
        tables: (title, rows, headers) of measurements.
    """

    datasets: Sequence[str] = ()
    rows: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()


def policy_card(
    repo_id: str, policies: Mapping[str, Checkpoint], training: Training, on_hub: Sequence[str] = ()
) -> str:
    """The content of README.md.

    Args:
        repo_id: ``owner/name`` of the policy on the hub.
        policies: name of each dataset that it was trained on -> the parts, the first one first; of one any name.
        training: what is known beyond that.
        on_hub: those of the datasets and the checkpoint that it began with that are on the hub, to be linked.
    """
    first = next(iter(policies.values()))
    config = first.config
    began = config.pretrained_path
    head = {
        "library_name": "pi0-fast",
        "pipeline_tag": "robotics",
        "license": config.license,
        "tags": ["robotics", "lerobot", "pi0_fast", *(config.tags or [])],
        "datasets": [name for name in training.datasets if name in on_hub],
        "base_model": began if began in on_hub else None,
    }
    parts = [
        front_matter(head),
        f"# pi0-FAST policy {escaped(repo_id)}",
        "Predicts chunks of robot actions from camera images, a task in words and the robot's state: a PaliGemma model "
        "that writes [FAST](https://arxiv.org/abs/2501.09747) action tokens, saved by `pi0-fast`.",
    ]
    for name, policy in policies.items():
        title = f"## Robot {escaped(name)}" if len(policies) > 1 else "## Inputs and outputs"
        parts += [title, bullets(_robot(policy))]
    parts += ["## Settings", bullets(_settings(first, training, on_hub))]
    parts += ["## Measured"] if training.tables else []
    for title, rows, headers in training.tables:
        cells = [[f"{cell:.4g}" if isinstance(cell, float) else escaped(cell) for cell in row] for row in rows]
        parts += [escaped(title) + ":", table([escaped(header) for header in headers], cells)]
    parts += ["## Loading", _loading(repo_id, policies)]
    return "\n\n".join(parts) + "\n"


def names_on_hub(
    config: PI0FastConfig, training: Training, exists: Callable[[str, Literal["model", "dataset"]], bool]
) -> list[str]:
    """The datasets, and the checkpoint that the policy began with, that are on the hub; `exists` asks it."""
    found = [name for name in training.datasets if is_hub_id(name) and exists(name, "dataset")]
    began = config.pretrained_path
    return [*found, str(began)] if is_hub_id(began) and exists(str(began), "model") else found


def _robot(policy: Checkpoint) -> list[tuple[str, str]]:
    """What goes in and comes out."""
    config, processors, tokenizer = policy.config, policy.processors, policy.action_tokenizer
    names = {target: source for source, target in processors.rename_map.items()}
    cameras = [key for key in config.image_keys if key in config.input_features]
    shown = [escaped(names.get(key, key)) + (f" (as {escaped(key)})" if key in names else "") for key in cameras]
    relative = "relative to the state" if config.use_relative_actions else "absolute"
    vocabulary = f"{tokenizer.vocab_size} tokens at scale {escaped(tokenizer.scale)}"
    fitted = (tokenizer.metadata or {}).get("repo_id")
    return [
        ("Cameras", ", ".join(shown) or "none"),
        ("State", _feature(processors.state, config.state_dim)),
        ("Action", f"{_feature(processors.action, config.action_dim, config.action_feature_names)}, {relative}"),
        ("Chunk", f"{config.chunk_size} steps, of which {config.n_action_steps} are executed"),
        ("Action tokenizer", vocabulary + (f", fitted on {escaped(fitted)}" if fitted is not None else "")),
    ]


def _feature(normalizer: FeatureNormalizer, size: int, names: Sequence[str] | None = None) -> str:
    named = f" ({', '.join(map(escaped, names))})" if names else ""
    return f"{size} dimensions{named}, normalized by {escaped(normalizer.mode)}"


def _settings(policy: Checkpoint, training: Training, on_hub: Sequence[str]) -> list[tuple[str, str]]:
    config, sizes = policy.config, policy.model.architecture
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    listed = ", ".join(
        f"[{escaped(name)}](https://huggingface.co/datasets/{name})" if name in on_hub else escaped(name)
        for name in training.datasets
    )
    return [
        ("Model", f"{parameters:,} parameters, {sizes.text.num_hidden_layers} layers of text, {config.dtype}"),
        ("Began with", escaped(config.pretrained_path) if config.pretrained_path is not None else ""),
        ("Datasets" if len(training.datasets) > 1 else "Dataset", listed),
        *((what, escaped(value)) for what, value in training.rows),
        ("Prompt", escaped(config.prompt_format)),
        ("Saved with", f"pi0-fast {__version__}"),
    ]


def _loading(repo_id: str, policies: Mapping[str, Checkpoint]) -> str:
    first = next(iter(policies.values()))
    place = json.dumps(repo_id)
    names = {target: source for source, target in first.processors.rename_map.items()}
    inputs = [key for key, feature in first.config.input_features.items() if feature.type in ("VISUAL", "STATE")]
    keys = "".join(f"{json.dumps(names.get(key, key))}: ..., " for key in inputs)
    robots = list(policies)[1:]
    lines = [
        "With `pip install 'pi0-fast[policy]'`:",
        "",
        "```python",
        "from pi0_fast import PI0FastPolicy",
        "",
        f"policy = PI0FastPolicy.from_pretrained({place})",
        f'chunk = policy.predict_action_chunk({{{keys}"task": "..."}})',
        *(f"policy = PI0FastPolicy.from_pretrained({place}, robot={json.dumps(name)})" for name in robots),
        "```",
        "",
    ]
    if first.action_tokenizer.order != "frequency":
        return "\n".join([*lines, "LeRobot's own pi0-FAST policy cannot decode this order of the coefficients."])
    own = "" if first.config.prompt_format == "lerobot" else " It knows none of openpi's conventions, which this needs."
    return "\n".join(
        [
            *lines,
            "LeRobot 0.6.1 loads it, too. It takes names of tokenizers relative to where it runs: download the "
            f"repository, run it in there, and name the text tokenizer, which it does not read.{own}",
        ]
    )
