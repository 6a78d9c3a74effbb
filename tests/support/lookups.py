"""Looking a prompt up in a pool, as the books' tests do it."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged.blocks import BlockPool, Match, PrefixLookup, Prompt


def match(pool: BlockPool, tokens: Sequence[int], extra: bytes = b"", verify: bool = False) -> Match:
    """The full blocks that a prompt can begin with; at least one of its tokens is computed."""
    lookup = PrefixLookup(pool, Prompt(tokens, pool.block_size, extra), verify=verify)
    reach = lookup.reach(len(tokens) - 1)
    return lookup.take(reach - reach % pool.block_size)
