"""Run by interpreters that have transformers and not pi0-fast: load a saved tokenizer, and write down what it does.

    python probe.py JOB.json

The job names `directory`, `chunks` (npy, float [N, H, D]), `texts` (list of symbol strings), `shape` ([H, D] to pass to
decode, or null where the tokenizer has its own), `again` (a directory to save to) and `results` (where results go:
that name with .json and .npz). Judging the results is left to test_interop.py.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from scipy.fft import idct
from transformers import AutoProcessor

FIELDS = ("vocab_size", "min_token", "time_horizon", "action_dim", "order")


def what_it_raises(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_value(chunks: np.ndarray, value: float) -> np.ndarray:
    chunks = np.array(chunks)
    chunks[1, 2, 3] = value
    return chunks


def as_lerobot(tokenizer: Any, row: list[int], horizon: int, size: int) -> np.ndarray:
    """Actions as lerobot's policy gets them: from the characters that the inner tokenizer decodes."""
    levels = np.array(list(map(ord, tokenizer.bpe_tokenizer.decode(row)))) + tokenizer.min_token
    return idct(levels.reshape(horizon, size) / tokenizer.scale, axis=0, norm="ortho")


def fields(tokenizer: Any) -> dict[str, Any]:
    """Settings; not through the attribute `scale`, which is not for every reader."""
    return {**{name: getattr(tokenizer, name) for name in FIELDS}, "scale": vars(tokenizer)["scale"]}


def errors(tokenizer: Any, chunks: np.ndarray, ids: list[list[int]], shape: dict[str, int]) -> dict[str, str]:
    horizon = chunks.shape[1]
    bad = {
        "short": lambda: tokenizer.decode([ids[0], ids[1][:-1]], **shape),
        "long": lambda: tokenizer.decode([ids[0], ids[1] + ids[1][-1:]], **shape),
        "foreign": lambda: tokenizer.decode([ids[0], [*ids[1][:-1], tokenizer.vocab_size]], **shape),
        "negative": lambda: tokenizer.decode([[-1]], **shape),
        "fractions": lambda: tokenizer.decode([[0.5]], **shape),
        "number": lambda: tokenizer.decode(7, **shape),
        "nan": lambda: tokenizer(with_value(chunks, np.nan)),
        "infinite": lambda: tokenizer(with_value(chunks, -np.inf)),
        "beyond float32": lambda: tokenizer(with_value(chunks.astype(np.float64), 1e300)),
        "text": lambda: tokenizer(chunks.astype(str)),
        "no steps": lambda: tokenizer(chunks[:, :0]),
        "one step": lambda: tokenizer(chunks[0, 0]),
        "fewer dimensions": lambda: tokenizer(chunks[:, :, :-1]),
        "other horizon": lambda: tokenizer.decode(ids, time_horizon=horizon + 1),
        "order": lambda: type(tokenizer)(tokenizer.bpe_tokenizer, order="zigzag"),
        "scale": lambda: type(tokenizer)(tokenizer.bpe_tokenizer, scale=[1.0, 0.0]),
    }
    return {name: what_it_raises(call) for name, call in bad.items()}


def main(job: dict[str, Any]) -> None:
    tokenizer = AutoProcessor.from_pretrained(job["directory"], trust_remote_code=True)
    chunks = np.load(job["chunks"])
    shape = dict(zip(("time_horizon", "action_dim"), job["shape"] or (), strict=False))
    ids = tokenizer(chunks)
    inner = tokenizer.bpe_tokenizer
    texts = [inner(text)["input_ids"] for text in job["texts"]]
    tokenizer.save_pretrained(job["again"])
    again = AutoProcessor.from_pretrained(job["again"], trust_remote_code=True)
    report = {
        "transformers": transformers.__version__,
        "pi0_fast is there": importlib.util.find_spec("pi0_fast") is not None,
        "class": type(tokenizer).__name__,
        "fields": fields(tokenizer),
        "fields again": fields(again),
        "ids": ids,
        "ids again": again(chunks),
        "ids of other layouts": [
            tokenizer(np.asfortranarray(chunks)),
            tokenizer(chunks.tolist()),
            [tokenizer(chunk)[0] for chunk in chunks],
        ],
        "text ids": texts,
        "of nothing": [tokenizer(chunks[:0]), list(tokenizer.decode([], **shape).shape)],
        "texts": [inner.decode(row) for row in texts],
        "errors": errors(tokenizer, chunks, ids, shape),
        "as lerobot": what_it_raises(lambda: as_lerobot(tokenizer, ids[0], *chunks.shape[1:])),
    }
    values = {
        "decoded": tokenizer.decode(ids, **shape),
        "one flat": tokenizer.decode(ids[0], **shape),
        "flat array": tokenizer.decode(np.array(ids[0]), **shape),
        "kept special": tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True, **shape),
    }
    if tokenizer.order == "frequency":
        values["as lerobot"] = np.stack([as_lerobot(tokenizer, row, *chunks.shape[1:]) for row in ids])
    results = Path(job["results"])
    results.with_suffix(".json").write_text(json.dumps(report))
    np.savez(results.with_suffix(".npz"), **values)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
