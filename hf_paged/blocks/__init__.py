"""The books: which block belongs to whom. Standard library only; they never see a tensor.

Nothing here locks: whoever owns a pool lets one thread in at a time (`kv` does so with one lock per model).
"""

from .copies import distinct, move
from .evictor import Evictor
from .hashing import ROOT, chain, check_salt, extra_key, seat
from .pool import BlockPool, OutOfBlocks
from .prefix import Match, Partial, adopt, commit
from .sheet import Sheet
from .siblings import Siblings
from .table import BlockTable, Copy, append, blocks_needed, check_sources, reorder
from .trail import Prompt, Trail, commit_tail, detach, reach_in_all

__all__ = [
    "ROOT",
    "BlockPool",
    "BlockTable",
    "Copy",
    "Evictor",
    "Match",
    "OutOfBlocks",
    "Partial",
    "Prompt",
    "Sheet",
    "Siblings",
    "Trail",
    "adopt",
    "append",
    "blocks_needed",
    "chain",
    "check_salt",
    "check_sources",
    "commit",
    "commit_tail",
    "detach",
    "distinct",
    "extra_key",
    "move",
    "reach_in_all",
    "reorder",
    "seat",
]
