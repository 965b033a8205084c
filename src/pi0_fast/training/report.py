"""The report before the first step, of one dataset or of several: printed, and saved as report.json.

Left out: what is measured of one dataset (audit.py).
"""

from __future__ import annotations

import json
from typing import Any

from pi0_fast.display import print_table, warn
from pi0_fast.training.audit import Audit, audit
from pi0_fast.training.sampler import MixtureSampler
from pi0_fast.training.setup import Run
from pi0_fast.types import PolicyError

REPORT_FILE = "report.json"
_HEADERS = ["dataset", "episodes", "frames", "frames/s", "s/chunk", "weight", "share", "ids/chunk"]


def report(run: Run) -> None:
    """Print `audit.audit` of each dataset, and save it in the run's directory.

    Of a mixture report.json is that of the first dataset, and has ``mixture``, the table of what each dataset
    contributes, and ``further``, the reports of the others by name.

    Raises:
        PolicyError: as in `audit.audit`, or an `Audit.problem`, after all was printed and saved.
        OSError: the directory cannot be written.
    """
    audits = {each.member.name: audit(each) for each in run.datasets}
    first, *others = audits.items()
    content = first[1].to_json()
    if others:
        content["mixture"] = contributions(run, audits)
        content["further"] = {name: result.content for name, result in others}
        print_table("Datasets", [list(row.values()) for row in content["mixture"]], _HEADERS)
    problems = []
    for name, result in audits.items():
        prefix = f"{name}: " if others else ""
        for title, rows, headers in result.tables():
            if title != "Parameters" or name == first[0]:
                print_table(f"{prefix}{title}", rows, headers)
        for line in result.warnings():
            warn(f"{prefix}{line}")
        if result.problem is not None:
            problems.append(f"{prefix}{result.problem}")
    folder = run.config.output_path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_FILE).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if problems:
        raise PolicyError("; ".join(problems))


def contributions(run: Run, audits: dict[str, Audit]) -> list[dict[str, Any]]:
    """What each dataset of a mixture gives to it; ``share`` is its part of all draws, which weights set.

    One chunk is as many steps for every dataset, and so takes longer at fewer frames a second.
    """
    sampler = run.sampler(1)
    assert isinstance(sampler, MixtureSampler)
    return [
        {
            "dataset": each.member.name,
            "episodes": len(each.train_frames.episodes),
            "frames": len(each.train_frames),
            "fps": float(each.reader.fps),
            "chunk_s": each.policy.config.chunk_size / each.reader.fps,
            "weight": "its frames" if each.member.weight is None else each.member.weight,
            "share": share,
            "ids_per_chunk": audits[each.member.name].content["tokens"]["target ids, mean"],
        }
        for each, share in zip(run.datasets, sampler.shares(), strict=True)
    ]
