"""Versions, devices and kernels of this installation: python -m hf_paged."""

from __future__ import annotations

import sys

from .environment import facts


def main() -> int:
    """Print the facts of the installation, for a user or an issue."""
    print("\n".join(facts().lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
