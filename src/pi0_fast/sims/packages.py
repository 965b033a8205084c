"""Importing what simulators need, with the one line that remedies its absence."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from pi0_fast.types import SimulatorError


def load(module: str, extra: str, package: str | None = None) -> ModuleType:
    """A module of an optional package.

    Args:
        module: dotted name.
        extra: of this distribution, which installs it.
        package: its name on PyPI, where the module's own first part is another.

    Raises:
        SimulatorError: it, or something that it imports, is missing; with the line to run.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # theirs, not the user's to mend
            return importlib.import_module(module)
    except ImportError as error:
        name = package or module.split(".")[0]
        why = "is not installed" if error.name == module.split(".")[0] else f"cannot be imported ({error})"
        raise SimulatorError(f"{name} {why}: pip install 'pi0-fast[{extra}]'") from error
