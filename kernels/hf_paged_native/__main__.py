"""Build the library ahead: python -m hf_paged_native."""

from __future__ import annotations

import logging
import sys

from .building import Unavailable, build, capability, find
from .plan import load


def main() -> int:
    """Build it unless it exists, check that it loads, and print where it is."""
    logging.basicConfig(format="%(message)s")
    known = find() is not None
    try:
        file = load(build()).file
    except Unavailable as error:
        print(f"the C++ op for CPUs cannot be had: {error}", file=sys.stderr)
        return 1
    print(f"{'already built' if known else 'built'} for {capability()}: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
