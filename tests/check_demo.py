"""Whether a demo's policy does its task often enough: ``python tests/check_demo.py demo_output/demo.json 0.6``.

Left out: running the demo.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str, least: str) -> None:
    """End with a message where the demo did not finish, or its first policy succeeded less often."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if not content["finished"]:
        sys.exit(f"{path}: the demo did not finish")
    policy = content["policies"][0]
    print(f"{policy['name']}: {policy['successes']} of {policy['episodes']}, malformed {policy['malformed']:.1%}")
    if policy["success"] < float(least):
        sys.exit(f"success {policy['success']:.0%} is below {float(least):.0%}")
    if policy["malformed"]:
        sys.exit("malformed chunks under constrained decoding")


if __name__ == "__main__":
    main(*sys.argv[1:])
