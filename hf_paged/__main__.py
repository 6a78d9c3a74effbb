"""The command line as a module: python -m hf_paged."""

from __future__ import annotations

import sys

from .serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
