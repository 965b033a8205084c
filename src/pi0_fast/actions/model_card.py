"""The model card (README.md) of a tokenizer on the Hugging Face hub: data, settings, measured errors, how to load it.

A text from plain values, most of them from metadata.json. Names in it come from datasets and robots, so every one is
escaped: none can break the YAML at its head, a table or the Markdown. Left out: what a license or a citation would be,
which only the owner of the data knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MODEL_CARD = "README.md"

#: What means something in the middle of a line of Markdown or in its tables; `<`, `>` and `&` become entities instead.
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$@]|:(?=//))")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_id(name: Any) -> bool:
    """Whether a dataset's name has the form ``owner/name`` that the hub allows; not whether it exists there."""
    return (
        isinstance(name, str)
        and len(name) <= 96
        and _HUB_ID.fullmatch(name) is not None
        and ".." not in name
        and "--" not in name
        and not name.endswith((".git", ".", "-"))
    )


def model_card(
    repo_id: str,
    settings: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    normalizer: Mapping[str, Any] | None = None,
    *,
    dataset_on_hub: bool = False,
) -> str:
    """The content of README.md.

    Args:
        repo_id: ``owner/name`` of the tokenizer on the hub.
        settings: content of config.json (scale, vocab_size, time_horizon, action_dim, symbol_format).
        metadata: content of metadata.json, when it is known what the tokenizer was fitted on.
        normalizer: content of normalizer.json, when there is one; it has the names and ranges of the dimensions.
        dataset_on_hub: whether the dataset's name in metadata is that of a hub dataset, to be linked.
    """
    metadata = metadata or {}
    dataset = metadata.get("repo_id")
    linked = dataset if dataset_on_hub and is_hub_id(dataset) else None
    parts = [
        front_matter(
            {
                "library_name": "pi0-fast",
                "tags": ["robotics", "FAST", "LeRobot"],
                "datasets": [linked] if linked is not None else None,
            }
        ),
        f"# FAST action tokenizer {escaped(repo_id)}",
        "Turns chunks of robot actions into tokens and back: the [FAST](https://arxiv.org/abs/2501.09747) tokenizer "
        "(discrete cosine transform, rounding, byte-pair encoding), fitted and measured by `pi0-fast`.",
        "## Data and settings",
        bullets(_settings(settings, metadata, normalizer or {}, linked)),
        "## Measured",
        *_measured(metadata, normalizer or {}),
        "## Loading",
        _loading(repo_id, settings, normalizer is not None),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(head: Mapping[str, Any]) -> str:
    """The YAML at the head of a card, which the hub reads; what is None or empty is left out."""
    import yaml  # type: ignore[import-untyped]

    said = {name: value for name, value in head.items() if value}
    return f"---\n{yaml.safe_dump(said, sort_keys=False, allow_unicode=False)}---"


def _settings(
    settings: Mapping[str, Any], metadata: Mapping[str, Any], normalizer: Mapping[str, Any], linked: str | None
) -> list[tuple[str, str]]:
    """(what, value) of the list of settings, those that are known."""
    rows: list[tuple[str, str]] = []
    dataset, versions = metadata.get("repo_id"), _mapping(metadata.get("versions"))
    if linked is not None:
        rows.append(("Dataset", f"[{escaped(linked)}](https://huggingface.co/datasets/{linked})"))
    elif dataset is not None:
        rows.append(("Dataset", escaped(dataset)))
    if versions.get("dataset_revision") is not None:
        rows.append(("Dataset revision", escaped(versions["dataset_revision"])))
    horizon, size = settings.get("time_horizon"), settings.get("action_dim")
    rows.append(("Chunk", f"{horizon or 'any number of'} steps of {size or 'any number of'} dimensions"))
    if metadata.get("encoded_dims") is not None:
        rows.append(("Dimensions of the action", escaped(metadata["encoded_dims"]) + " (the end excluded)"))
    if metadata.get("use_delta_transform"):
        state = f"relative to {escaped(metadata.get('state_key'))}: dimensions {escaped(metadata.get('delta_dims'))}"
        rows.append(("Delta transform", state))
    mode = normalizer.get("mode", metadata.get("normalization_mode"))
    if mode is not None:
        where = " (`normalizer.json`)" if normalizer else ""
        rows.append(("Normalization", escaped(mode) + where))
    rows.append(("Scale", escaped(settings.get("scale"))))
    if settings.get("order", "frequency") != "frequency":
        rows.append(("Order of the coefficients", escaped(settings["order"])))
    if settings.get("rate_weight"):
        rows.append(("Rate weight", f"{escaped(settings['rate_weight'])} (tokens chosen by error and number)"))
    if settings.get("max_error") is not None:
        rows.append(("Largest error, normalized units", escaped(settings["max_error"])))
    rows.append(
        ("Vocabulary", f"{escaped(settings.get('vocab_size'))} tokens, {escaped(settings.get('symbol_format'))}")
    )
    if metadata.get("num_training_chunks") is not None:
        rows.append(("Chunks fitted", escaped(metadata["num_training_chunks"])))
    if versions.get("pi0-fast") is not None:
        rows.append(("Fitted with", f"pi0-fast {escaped(versions['pi0-fast'])}"))
    return rows


def _measured(metadata: Mapping[str, Any], normalizer: Mapping[str, Any]) -> list[str]:
    """Paragraphs: tokens per chunk, and the errors of every dimension on held-out episodes."""
    fitted, held = _mapping(metadata.get("compression_stats")), _mapping(metadata.get("held_out"))
    if not fitted and not held:
        return ["No measurements came with this tokenizer."]
    parts = [_token_table(fitted, _mapping(held.get("tokens")))]
    if not held:
        return [*parts, "No episodes were held out of the fit, so no errors on unseen data are stated."]
    episodes, chunks = len(held.get("episodes", ())), held.get("chunks")
    parts.append(
        f"Errors of encoding and decoding {escaped(chunks)} chunks of {episodes} episode{'s' if episodes != 1 else ''} "
        "that were held out of the fit, in the data's own units. Rounding is the tokenizer's share of the worst "
        "error, clipping the normalizer's."
    )
    parts.append(_error_table(held, normalizer))
    shares = {
        "frames clipped by the normalizer": _percent(held.get("clipped_frames")),
        "values clipped": _percent(held.get("clipped_values")),
        "coefficients outside the vocabulary": escaped(held.get("saturations")),
        "RMSE in normalized units": _number(held.get("normalized_rmse")),
    }
    parts.append(bullets([(name[0].upper() + name[1:], value) for name, value in shares.items()]))
    return parts


def _token_table(fitted: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    keys = {
        "Tokens per chunk, mean": "mean_token_length",
        "Tokens per chunk, 99th percentile": "p99_token_length",
        "Tokens per chunk, min": "min_token_length",
        "Tokens per chunk, max": "max_token_length",
        "Values per token": "compression_ratio",
    }
    columns = [(name, source) for name, source in (("fitted", fitted), ("held out", held)) if source]
    rows = [[title, *(_number(source.get(key)) for _, source in columns)] for title, key in keys.items()]
    return table(["", *(name for name, _ in columns)], rows)


def _error_table(held: Mapping[str, Any], normalizer: Mapping[str, Any]) -> str:
    keys = {"RMSE": "rmse", "worst": "worst", "by rounding": "quantization_worst", "by clipping": "clipping_worst"}
    columns = {title: list(held.get(key, ())) for title, key in keys.items()}
    size = max(map(len, columns.values()), default=0)
    names = normalizer.get("names") or [""] * size
    low, high = normalizer.get("low", ()), normalizer.get("high", ())
    rows = []
    for dim in range(size):
        name = escaped(names[dim]) if dim < len(names) else ""
        width = _number(high[dim] - low[dim]) if dim < min(len(low), len(high)) else ""
        values = (_number(column[dim]) if dim < len(column) else "" for column in columns.values())
        rows.append([str(dim), name, width, *values])
    return table(["", "dimension", "range", *keys], rows)


def _loading(repo_id: str, settings: Mapping[str, Any], has_normalizer: bool) -> str:
    shape = f"[N, {settings.get('time_horizon') or 'H'}, {settings.get('action_dim') or 'D'}]"
    if has_normalizer:
        here = [
            "actions, states = ...  # as in the dataset: chunks [N, H, A], and the state at each one's first step",
            "ids = tokenizer.encode_actions(actions, states)",
            f"restored = tokenizer.decode_actions(ids, states)  # {shape}, the encoded dimensions",
        ]
    else:
        here = [
            f"actions = ...  # {shape}, normalized to about [-1, 1]",
            "ids = tokenizer(actions)",
            "restored = tokenizer.decode(ids)",
        ]
    plainly = " (it encodes by rounding: more tokens)" if settings.get("rate_weight") else ""
    lerobot = [
        "In LeRobot's pi0-FAST policy:",
        "",
        "```bash",
        f"lerobot-train --policy.type=pi0_fast --policy.action_tokenizer_name={repo_id} ...",
        "```",
    ]
    if settings.get("order", "frequency") != "frequency":
        lerobot = ["LeRobot's own pi0-FAST policy cannot decode this order of the coefficients; pi0-fast's can."]
    return "\n".join(
        [
            "With `pip install pi0-fast`:",
            "",
            "```python",
            "from pi0_fast import FastTokenizer",
            "",
            f'tokenizer = FastTokenizer.from_pretrained("{repo_id}")',
            *here,
            "```",
            "",
            f"With transformers alone, for actions that are normalized already{plainly}:",
            "",
            "```python",
            "from transformers import AutoProcessor",
            "",
            f'processor = AutoProcessor.from_pretrained("{repo_id}", trust_remote_code=True)',
            "```",
            "",
            *lerobot,
        ]
    )


def escaped(value: Any) -> str:
    """Any value as one line of Markdown that shows it as it is."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", line)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else escaped(value)


def _percent(share: Any) -> str:
    return f"{share:.2%}" if isinstance(share, (int, float)) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def bullets(rows: Sequence[tuple[str, str]]) -> str:
    """A list of "name: value"; of empty values nothing."""
    return "\n".join(f"- {name}: {value}" for name, value in rows if value)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; cells are escaped already."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
