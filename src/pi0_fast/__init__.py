"""pi0-fast: the FAST action tokenizer and the pi0-FAST policy.

Public names are loaded on first use, so that `import pi0_fast` costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("pi0-fast")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "FastTokenizer": "pi0_fast.actions.tokenizer",
    "Normalizer": "pi0_fast.actions.normalize",
    "PI0FastConfig": "pi0_fast.policy_config",
    "PI0FastPolicy": "pi0_fast.policy",
    "PolicyFeature": "pi0_fast.policy_config",
    "TokenizerTrainingConfig": "pi0_fast.configs",
    "fit_fast_tokenizer": "pi0_fast.cached_fitting",
    "train_tokenizer": "pi0_fast.fitting",
}

__all__ = ["__version__", *_HOMES]


#: What the extra [policy] brings.
_POLICY_EXTRA = ("torch", "safetensors", "sentencepiece")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name in _POLICY_EXTRA:
                raise ImportError(f"{name} needs {error.name}: pip install 'pi0-fast[policy]'") from error
            raise
    raise AttributeError(f"module 'pi0_fast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
