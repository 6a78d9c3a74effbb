"""The tensors: pools of keys and values, and the index tensors of a step. No policy beyond the size of a pool."""

from .batch import Batch
from .group import Group, Kind, Memory
from .ops import Seen
from .rows import Rows
from .sequences import Sequences
from .store import Layout, Pages, Store

__all__ = ["Batch", "Group", "Kind", "Layout", "Memory", "Pages", "Rows", "Seen", "Sequences", "Store"]
