"""`python -m evodsp` is `evodsp`."""

from __future__ import annotations

import sys

from evodsp.cli import main

if __name__ == "__main__":
    sys.exit(main())
