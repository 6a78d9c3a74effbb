"""Paged attention of CPUs in C++: it reads keys and values in their blocks, where plain torch has to gather
them first.

The source (paged.cpp) depends neither on torch nor on Python. An installed compiler builds it in seconds,
once: by `python -m hf_paged_native`, or at the first use that requests it. Importing this package builds
nothing and loads nothing.
"""

from .building import Unavailable, build, compiler, find
from .plan import DTYPES, Attend, Library, Write, load

__all__ = ["DTYPES", "Attend", "Library", "Unavailable", "Write", "build", "compiler", "find", "load"]
