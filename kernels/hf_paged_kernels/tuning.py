"""Which tile, how many warps, how many buffers: a table made by measurement, read on the host, never tuned at
run time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def multiprocessors(device: torch.device) -> int:
    """How many a device has; in the interpreter a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def room_for(rows: int) -> int:
    """For how many rows the kernel of a plan is compiled: a few numbers serve all."""
    room = 32
    while room < rows:
        room *= 8
    return room


class Tiling(NamedTuple):
    """How one launch of an attention kernel is cut."""

    block_m: int
    """Query rows of a tile; from 64 on the products run as wgmma."""
    block_n: int
    """Tokens of a tile."""
    warps: int
    stages: int
    per_sm: int = 1
    """Pieces a multiprocessor that the work of a step is cut into (decode only)."""
    registers: int | None = None
    """The most a thread may use, so that two programs fit on a multiprocessor (prefill only)."""


SHARED_MEMORY = 200 * 1024
WIDE = 1024
"""Bytes of a token's keys and values in one head: beyond, 64 queries need 8 warps."""


FOREVER = 2**62
# Streams (rows times key heads) up to, mean length up to, and the tiling: the first line that fits. Measured
# on an H200, bf16, head size 128, with scripts/tune_kernels.py; that of 132 streams up to 1024, and of 1024
# single ones, on an H100 with `ranks`. Below two pieces a row stays whole, so batches of many equal rows are
# never cut.
GROUPED = [
    (16, 1024, Tiling(16, 64, 2, 3, 1)),
    (16, 8192, Tiling(16, 64, 4, 3, 1)),
    (16, FOREVER, Tiling(16, 128, 4, 3, 1)),
    (96, FOREVER, Tiling(16, 32, 1, 3, 2)),
    (132, 1024, Tiling(16, 64, 4, 3, 2)),
    (132, FOREVER, Tiling(16, 32, 1, 3, 2)),
    (300, FOREVER, Tiling(16, 64, 4, 3, 2)),
    (1024, 1024, Tiling(16, 32, 1, 3, 4)),
    (1024, 4096, Tiling(64, 64, 4, 3, 2)),
    (1024, FOREVER, Tiling(16, 128, 4, 3, 1)),
    (FOREVER, 1024, Tiling(16, 32, 1, 3, 4)),
    (FOREVER, FOREVER, Tiling(16, 64, 4, 3, 2)),
]
SINGLE = [
    (512, FOREVER, Tiling(16, 32, 1, 3, 4)),
    (1024, 768, Tiling(16, 32, 1, 3, 4)),
    (FOREVER, 768, Tiling(16, 32, 2, 4, 4)),
    (FOREVER, FOREVER, Tiling(64, 64, 4, 3, 2)),
]
OWN_PARTS = [*GROUPED[:7], (FOREVER, FOREVER, Tiling(16, 32, 1, 4, 4))]
"""Of rows that may read common blocks together: what is left of long ones is short, and small programs find
room beside those that read common blocks. Measured on an H100: rows without common blocks lose 2 % at most.
"""
PROMPT = Tiling(128, 64, 8, 3)


def decode_tiling(
    group: int, token_bytes: int, rows: int, heads: int, mean_length: int, shared: bool = False
) -> Tiling:
    """The tiling of a decode step: `token_bytes` are one token's keys and values in one head, padded to
    powers of two. shared: of rows that may read common blocks together.
    """
    lines = SINGLE if group == 1 else OWN_PARTS if shared else GROUPED
    choice = next(
        tiling for streams, length, tiling in lines if rows * heads <= streams and mean_length <= length
    )
    if token_bytes > WIDE:
        choice = choice._replace(block_m=16, warps=max(4, choice.warps))
    return shrink_to_fit(choice, token_bytes)


def shared_tiling(token_bytes: int, exact: bool) -> Tiling:
    """The tiling of blocks that several rows read together; `exact` as for prefill."""
    choice = Tiling(32, 32, 4, 2, 2) if exact else Tiling(64, 64, 4, 3, 2)
    if token_bytes > WIDE:
        choice = choice._replace(block_m=32, warps=8)
    return shrink_to_fit(choice, token_bytes, choice.block_m * token_bytes // 2)


def prefill_tiling(token_bytes: int, queries: int, exact: bool) -> Tiling:
    """The tiling of a prefill of at most `queries` query rows a row and key head; `exact` is fp32, multiplied
    in three passes.
    """
    if exact:
        choice = Tiling(32, 16, 8, 2)
    elif token_bytes > WIDE:
        choice = Tiling(64, 32, 8, 2)
    elif queries <= 64:
        choice = Tiling(64, 64, 4, 3)
    elif token_bytes <= 512:
        choice = PROMPT
    else:
        choice = Tiling(128, 64, 8, 2)
    return shrink_to_fit(choice, token_bytes, choice.block_m * token_bytes // 2)


STATE_TILE = 4096
"""Numbers of a state that one program of a step of one token holds, 32 a thread."""
STATE_PROGRAMS = 256
"""Fewer programs leave multiprocessors idle: each then takes less of a state."""


def state_tiling(states: int, dims: int, width: int) -> tuple[int, int]:
    """How many of `width` columns of a state a program takes, each of `dims` numbers, and its warps; states:
    those of all rows and heads. Not measured yet.
    """
    tile = max(1, min(width, STATE_TILE // dims))
    while states * (width // tile) < STATE_PROGRAMS and tile > 8:
        tile //= 2
    return tile, max(1, min(4, tile * dims // 512))


def shrink_to_fit(choice: Tiling, token_bytes: int, query_bytes: int = 0) -> Tiling:
    """Halve the tile until its buffers fit in shared memory together with the queries."""
    block_n = choice.block_n
    stages = choice.stages
    while block_n * token_bytes * stages + query_bytes > SHARED_MEMORY:
        if block_n > 16:
            block_n //= 2
        else:
            stages -= 1
    return choice._replace(block_n=block_n, stages=stages)


def in_fixed_tiles(tiling: Tiling, token_bytes: int, exact: bool) -> Tiling:
    """A tiling of decode or prefill with the tile of tokens that both have for this width of heads: a query's
    sums run from tile to tile.
    """
    block_n = 16 if exact else 64 if token_bytes <= 512 else 32
    warps = max(4, tiling.warps)
    stages = tiling.stages
    while block_n * token_bytes * stages + tiling.block_m * token_bytes // 2 > SHARED_MEMORY and stages > 1:
        stages -= 1
    return tiling._replace(block_n=block_n, warps=warps, stages=stages)
