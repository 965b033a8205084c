"""Run the test suite on every supported Python that is installed; the oldest with the lowest versions allowed.

    python tests/python_versions.py [3.10 3.13 ...]

Interpreters are found as pythonX.Y, or among those of pyenv. Virtual environments are kept in .venv-pythons/. Ends with
status 1 if a suite fails or no interpreter is found. Left out: the [policy] extra, which is tested on 3.11 alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
#: The one whose environment gets the lower bounds of pyproject.toml instead of the newest versions.
LOWEST = "3.10"


def find(version: str) -> str | None:
    """Path of an interpreter of that version that runs, or None."""
    candidates = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        candidates += [str(path) for path in sorted(Path(root).glob(f"versions/{version}.*/bin/python"))]
    for candidate in candidates:
        if (
            candidate
            and subprocess.run([candidate, "-c", "import venv"], capture_output=True, check=False).returncode == 0
        ):
            return candidate
    return None


def lower_bounds() -> list[str]:
    """``numpy==1.26`` for ``numpy>=1.26``: the dependencies of the base package at their lowest."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return [f"{name}=={bound}.*" for name, bound in re.findall(r'"([\w-]+)>=([\d.]+)"', block[1])]


def run(version: str, interpreter: str) -> bool:
    """Install into a fresh environment and run the tests; whether they passed."""
    environment = REPOSITORY / ".venv-pythons" / version
    subprocess.run([interpreter, "-m", "venv", "--clear", environment], check=True)
    python = str(environment / "bin/python")
    pinned = lower_bounds() if version == LOWEST else []
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", f"{REPOSITORY}[report]"]
    subprocess.run([*command, "pytest", "hypothesis", *pinned], check=True)
    print(f"--- Python {version}{' with the lowest versions' if pinned else ''}", flush=True)
    cache = {"NUMBA_CACHE_DIR": str(environment / "numba")}
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(tests, cwd=REPOSITORY, env=os.environ | cache, check=False).returncode == 0


def main() -> int:
    """Run every version asked for, or all that are found."""
    asked = sys.argv[1:]
    results: dict[str, str] = {}
    for version in asked or VERSIONS:
        interpreter = find(version)
        if interpreter is None:
            results[version] = "not installed"
            continue
        results[version] = "passed" if run(version, interpreter) else "FAILED"
    print("\n".join(f"Python {version}: {result}" for version, result in results.items()))
    bad = "FAILED" in results.values() or (asked and "not installed" in results.values())
    return 1 if bad or "passed" not in results.values() else 0


if __name__ == "__main__":
    sys.exit(main())
