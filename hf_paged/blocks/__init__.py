"""The books: which block belongs to whom. Standard library only; they never see a tensor.

Nothing here locks: whoever owns a pool lets one thread in at a time (`memory` does so with one lock per model).
"""

from .digest import ROOT, chain, extra_key
from .evictor import Evictor
from .pool import BlockPool, OutOfBlocks
from .prefix import Match, adopt, commit, match
from .table import Copy, Table, append, blocks_needed, reorder

__all__ = [
    "ROOT",
    "BlockPool",
    "Copy",
    "Evictor",
    "Match",
    "OutOfBlocks",
    "Table",
    "adopt",
    "append",
    "blocks_needed",
    "chain",
    "commit",
    "extra_key",
    "match",
    "reorder",
]
