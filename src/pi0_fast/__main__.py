"""`python -m pi0_fast`: the command `pi0-fast` of this very Python."""

from __future__ import annotations

import sys

from pi0_fast.cli import main

if __name__ == "__main__":  # worker processes import this file under another name
    sys.exit(main())
