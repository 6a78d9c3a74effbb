"""Paged attention of CPUs in C++: it reads keys and values in their blocks, where plain torch has to gather
them first.

Beside it, products, sums and attention whose bits do not depend on the batch (invariant.cpp).

The sources depend neither on torch nor on Python. An installed compiler builds them in seconds, once: by
`python -m hf_paged_native`, or at the first use that requests it. Importing this package builds nothing and
loads nothing.
"""

from .building import Unavailable, build, compiler, find
from .invariant import InvariantFunctions
from .plan import DTYPES, Attend, Library, Write, load

__all__ = [
    "DTYPES",
    "Attend",
    "InvariantFunctions",
    "Library",
    "Unavailable",
    "Write",
    "build",
    "compiler",
    "find",
    "load",
]
