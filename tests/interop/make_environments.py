"""Environments with other versions of other libraries, in `.venv-interop/` of the repository.

Those named after a version of transformers are without pi0-fast; `hub-0.36` is pi0-fast with an older huggingface_hub.

    python tests/interop/make_environments.py 5.5.4 newest

makes those that are not there yet; without names, all. What is not here: the environment with lerobot, which is too
large to be made by a test; PI0_FAST_LEROBOT_PYTHON names its interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / ".venv-interop"
# No torch: transformers reads a tokenizer without it.
TRANSFORMERS = {
    "4.57.6": ["transformers==4.57.6", "numpy", "scipy"],
    "5.5.4": ["transformers==5.5.4", "numpy", "scipy"],
    "newest": ["transformers>=5.24", "numpy", "scipy"],
}
HUBS = {"hub-0.36": ["huggingface_hub==0.36.*", "--editable", str(REPOSITORY)]}
REQUIREMENTS = {**TRANSFORMERS, **HUBS}


def make_environment(name: str) -> Path:
    """The interpreter of the environment `name`, which is made when it is not there, or only half made.

    Raises:
        KeyError: no such environment.
        RuntimeError: pip failed; the message holds what it printed.
    """
    requirements = REQUIREMENTS[name]
    directory = ROOT / name
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = directory / "complete.json"  # written last
    if complete.is_file() and json.loads(complete.read_text()) == requirements:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    commands = [
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *requirements],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    complete.write_text(json.dumps(requirements))
    return python


if __name__ == "__main__":
    for chosen in sys.argv[1:] or REQUIREMENTS:
        if chosen not in REQUIREMENTS:
            sys.exit(f"no environment {chosen!r}; there are {', '.join(REQUIREMENTS)}")
        print(f"{chosen}: {make_environment(chosen)}")
