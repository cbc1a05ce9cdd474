"""`python -m ringfence` is the `ringfence` command."""

from __future__ import annotations

import sys

from ringfence.cli import main

if __name__ == "__main__":
    sys.exit(main())
