"""Whether there is room for a request: now, later, or never."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from .limits import Limits, Shelf
from .sequence import Group, Request, blocks_of_group


class Verdict(Enum):
    """What admission says. LATER ends the scan: nobody jumps the queue for memory (C12)."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


def judge(total: int, available: int, need: int, *, hits: int = 0, cached_hits: int = 0, reserve: int = 0) -> Verdict:
    """Whether a pool has room for `need` blocks and `reserve` more (C8, C9).

    hits: blocks of the need that are there already; cached_hits: those of them that nobody holds, which count as available now
    and would not any more.
    """
    if total - need < reserve:
        return Verdict.NEVER
    if available - cached_hits - (need - hits) >= reserve:
        return Verdict.OK
    return Verdict.LATER


def why_infeasible(request: Request, shelves: Sequence[Shelf], limits: Limits) -> str | None:
    """Why this request can never run to its end, with both numbers, or None if it can (C11)."""
    if request.width > limits.sequences:
        return (
            f"{request.width} sequences are asked for and at most {limits.sequences} run at once; lower them or raise the sequence budget"
        )
    for shelf in shelves:
        need = blocks_of_group(shelf, request.width, len(request.prompt), request.most_tokens, limits.tokens)
        most = shelf.pool.total - limits.reserve(shelf)
        if need > most:
            return (
                f"{request.width} sequence(s) of up to {request.most_tokens} tokens (prompt {len(request.prompt)}) need {need} blocks of "
                f"{shelf.pool.block_size} and {most} can be had; lower max_new_tokens or raise num_blocks"
            )
    return None


def headroom(group: Group, need: int, running: Sequence[Group], shelf: int, chunk: int) -> int:
    """The blocks that a group to which preemption happens again and again leaves available when it comes back with `need` blocks.

    For every sequence that runs, and its own, twice as many with each time that blocks ran out for it, up to all they can come to
    need: then nobody older can push it out any more, so it goes only so often.
    """
    each = 1 << (group.setbacks - 1)
    own = min(each * len(group.sequences), max(0, group.most(shelf, chunk) - need))
    return own + sum(min(each * len(other.sequences), max(0, other.most(shelf, chunk) - other.held(shelf))) for other in running)
