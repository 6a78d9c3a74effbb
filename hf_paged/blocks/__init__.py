"""The books: which block belongs to which table. Standard library only; no module here sees a tensor.

Nothing here locks: the owner of a pool admits one thread at a time (`kv` does so with one lock per model).
"""

from .block_table_array import BlockTableArray
from .columns import (
    ADAPTER_SLOT,
    COLUMNS,
    LOGIT_PLACE,
    NO_NUMBERS,
    ROPE_DELTA,
    SCORED,
    SOURCE,
    STATE_READ,
    STATE_WRITTEN,
    TASK,
    WANTED,
    Column,
    ColumnFillers,
    Numbers,
)
from .copies import distinct, move
from .evictor import Evictor
from .hashing import ROOT, chain, check_salt, extra_key, parent_key
from .kinds import Cross, Full, LayerKind, State, Window
from .partial_index import PartialBlockIndex, leading
from .pool import NEVER_FULL, BlockPool, OutOfBlocks
from .prefix import Match, Partial, adopt, commit, commit_tail, tail_name
from .prefix_lookup import PrefixLookup, Prompt, detach, reach_in_all
from .prompt_scores import PromptScores
from .sealed import Corruption, Due, SealedBlocks
from .shared_reads import SharedReads
from .table import BlockTable, Copy, TableView, append, blocks_needed, check_sources, reorder

__all__ = [
    "ADAPTER_SLOT", "COLUMNS", "LOGIT_PLACE", "NEVER_FULL", "NO_NUMBERS", "ROOT", "ROPE_DELTA", "SCORED",
    "SOURCE", "STATE_READ", "STATE_WRITTEN", "TASK", "WANTED", "BlockPool", "BlockTable", "BlockTableArray",
    "Column", "ColumnFillers", "Copy", "Corruption", "Cross", "Due", "Evictor", "Full", "LayerKind", "Match",
    "Numbers", "OutOfBlocks", "Partial", "PartialBlockIndex", "PrefixLookup", "Prompt", "PromptScores",
    "SealedBlocks", "SharedReads", "State", "TableView", "Window", "adopt", "append", "blocks_needed",
    "chain", "check_salt", "check_sources", "commit", "commit_tail", "detach", "distinct", "extra_key",
    "leading", "move", "parent_key", "reach_in_all", "reorder", "tail_name",
]  # fmt: skip
