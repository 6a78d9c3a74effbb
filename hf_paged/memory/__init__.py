"""The tensors: pools of keys and values, and the index tensors of a step. No policy beyond the size of a pool."""

from .batch import Batch
from .group import Group, Kind, Memory, is_out_of_memory
from .ops import Ops, Seen, TritonOps
from .rows import Rows
from .sequences import Sequences
from .static import StaticBatch
from .store import Layout, Pages, Store

__all__ = [
    "Batch", "Group", "Kind", "Layout", "Memory", "Ops", "Pages", "Rows", "Seen", "Sequences", "StaticBatch", "Store", "TritonOps",
    "is_out_of_memory",
]  # fmt: skip
