"""The routing that an answer of generate() has: the experts of each of its tokens, by row and column."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..model.ranks.tensor_parallel import mesh_of
from .cache import PagedCache

NONE = -1
"""In the place of an expert where there is no token, or none that was computed."""


class ReturnedRouting(NamedTuple):
    """The record of a call's cache, and what says which columns are padding."""

    cache: PagedCache
    mask: torch.Tensor | None
    """[prompts, columns]; None without padding in front."""
    pad: int | None
    pad_ends: bool
    """True if the pad token also ends rows: then the first one behind a row may be its last token."""

    def of(self, answer: Any) -> torch.Tensor:
        """The routing int16 [rows, columns, layers, k] of an answer, a column more than were computed: that
        of the last token, with NONE there and at padding.
        """
        record = self.cache.routing
        assert record is not None
        self.cache.settle()
        rows = self.cache.sequences.rows[record.kind]
        starts = rows.starts or [0] * rows.count
        padded = self._padded(answer.sequences)
        ends = [self.cache.sequences.columns + 1 - count for count in padded]
        found: list[torch.Tensor] = []
        for table, start, end in zip(rows.tables, starts, ends, strict=True):
            own = record.read(table.blocks, table.length)[: max(0, end - 1 - start)]
            whole = own.new_full((rows.columns + 1, *own.shape[1:]), NONE)
            whole[start : start + len(own)] = own
            found.append(whole)
        routing = torch.stack(found)
        if self.mask is not None and self.mask.ndim == 2:
            mask = self.mask.cpu().repeat_interleave(len(found) // len(self.mask), 0)
            routing[:, : mask.shape[1]][mask == 0] = NONE
        return routing

    def _padded(self, sequences: torch.Tensor) -> list[int]:
        """How many pad tokens follow the last token of each row."""
        if self.pad is None:
            return [0] * len(sequences)
        behind = (sequences.flip(1) != self.pad).long().cumsum(1).eq(0).sum(1)
        counts: list[int] = (behind - int(self.pad_ends)).clamp(min=0).tolist()
        return counts


def returned_routing(
    cache: PagedCache, generation_config: Any, mask: torch.Tensor | None
) -> ReturnedRouting | None:
    """The routing that a call on this cache returns, if it does."""
    if cache.routing is None:
        return None
    pad, ends = generation_config._pad_token_tensor, generation_config._eos_token_tensor
    if pad is None or ends is None:  # then no row has pad tokens behind it
        return ReturnedRouting(cache, mask, None, False)
    return ReturnedRouting(cache, mask, int(pad), int(pad) in ends.tolist())


def check_routing(model: Any, generation_config: Any, given: Any) -> None:
    """Raise if a call cannot return its routing."""
    asked = 'cache_config={"return_routing": True}'
    if not generation_config.return_dict_in_generate:
        raise ValueError(
            f"{asked} needs an answer with fields; pass return_dict_in_generate=True and read output.routing"
        )
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"{asked} and num_beams={generation_config.num_beams}: the blocks of beams that have ended are "
            "gone with their routing; sample or decode greedily"
        )
    if mesh_of(model) is not None:
        raise ValueError(
            f"{asked}: several ranks compute {type(model).__name__}, which do not record it; use one rank"
        )
    if given is not None:
        raise ValueError(
            f"{asked} and a cache that was handed in, of whose tokens the routing is not known; leave the "
            "cache out, prefix_caching reuses earlier calls with their routing"
        )
