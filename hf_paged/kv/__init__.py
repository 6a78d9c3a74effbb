"""The tensors: pools of keys and values, and the index tensors of a step. No policy beyond their size."""

from .batch import Batch, RowBatch
from .batches import GroupBatches
from .flat import FlatBatch
from .forks import fork_safe_lock, in_forked_process
from .group import Arithmetic, LayerGroup, Memory, is_out_of_memory
from .history import TokenHistory
from .host import HostBlocks, Transfer
from .layout import Layout
from .ops import NoKernels, TritonOps
from .ops_torch import Ops, Pages, Seen
from .prefixes import Prefix
from .rows import Rows
from .sequences import Sequences
from .spans import StaticSpans
from .static import StaticBatch
from .store import Store, tensors_agree

__all__ = [
    "Arithmetic",
    "Batch",
    "FlatBatch",
    "GroupBatches",
    "HostBlocks",
    "LayerGroup",
    "Layout",
    "Memory",
    "NoKernels",
    "Ops",
    "Pages",
    "Prefix",
    "RowBatch",
    "Rows",
    "Seen",
    "Sequences",
    "StaticBatch",
    "StaticSpans",
    "Store",
    "TokenHistory",
    "Transfer",
    "TritonOps",
    "fork_safe_lock",
    "in_forked_process",
    "is_out_of_memory",
    "tensors_agree",
]  # fmt: skip
