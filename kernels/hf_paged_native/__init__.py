"""Paged attention of CPUs in C++: it reads keys and values in their blocks, where plain torch has to gather
them first.

The source (paged.cpp) knows neither torch nor Python. A compiler that is there builds it in seconds, once: by
`python -m hf_paged_native`, or when somebody asks for it. Importing this package builds nothing and loads
nothing.
"""

from .building import Unavailable, build, compiler, find
from .plan import DTYPES, Attend, Library, Write, load

__all__ = ["DTYPES", "Attend", "Library", "Unavailable", "Write", "build", "compiler", "find", "load"]
