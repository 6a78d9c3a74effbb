"""Copy blocks: all pairs of a step, all layers, keys and values, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import launch

CHUNK_BYTES = 16 * 1024


def copy(pools: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """pool[:, targets[i]] = pool[:, sources[i]] for every pool and pair; a pair with a negative id copies
    nothing.

    pools: one or two of [layers, blocks, ...], each block contiguous (keys and values, or one pool that holds
    both); sources and targets [pairs], int32 or int64 on the device. No block may be a target twice, or a
    target and a source.
    """
    if not 1 <= len(pools) <= 2 or any(pool.shape[:2] != pools[0].shape[:2] for pool in pools):
        raise ValueError(
            "Invalid pools: expected one or two of [layers, blocks, ...], got "
            f"{[list(pool.shape) for pool in pools]}"
        )
    if sources.shape != targets.shape or sources.ndim != 1:
        raise ValueError(
            f"Invalid shape of targets: expected {list(sources.shape)}, got {list(targets.shape)}"
        )
    if sources.shape[0] == 0:
        return
    flat = [_words(pool) for pool in pools]
    first = flat[0]
    second = flat[-1]
    chunk = CHUNK_BYTES // first.element_size()
    chunks = [triton.cdiv(pool.shape[2], chunk) for pool in flat]
    launch(
        _copy, (sum(chunks), first.shape[0], sources.shape[0]),
        first, second, sources, targets, first.stride(0), first.stride(1), second.stride(0), second.stride(1),
        first.shape[2], second.shape[2], FIRST_CHUNKS=chunks[0], CHUNK=chunk, num_warps=8,
    )  # fmt: skip


def _words(pool: torch.Tensor) -> torch.Tensor:
    """The pool [layers, blocks, ...] as [layers, blocks, words], of the widest words that it divides into."""
    elements = pool[0, 0].numel()
    if not pool[0, 0].is_contiguous():
        raise ValueError(f"Invalid strides of a pool: its blocks must be contiguous, got {pool.stride()}")
    flat = pool.as_strided((*pool.shape[:2], elements), (pool.stride(0), pool.stride(1), 1))
    size = pool.element_size()
    places = (
        elements * size,
        pool.stride(0) * size,
        pool.stride(1) * size,
        pool.data_ptr(),
        pool.storage_offset() * size,
    )
    for word in (torch.int64, torch.int32, torch.int16):
        if word.itemsize >= size and all(place % word.itemsize == 0 for place in places):
            return flat.view(word)
    return flat.view(torch.uint8)


@triton.jit
def _copy(
    FIRST, SECOND, SOURCES, TARGETS, first_layer, first_block, second_layer, second_block, first_words,
    second_words,
    FIRST_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """POOL[layer, TARGETS[i]] = POOL[layer, SOURCES[i]], a program for each CHUNK words of each pool, layer
    and pair.

    FIRST, SECOND [layers, blocks, words]; SOURCES, TARGETS [pairs].
    """
    chunk = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(SOURCES + tl.program_id(2)).to(tl.int64)
    target = tl.load(TARGETS + tl.program_id(2)).to(tl.int64)
    if (source < 0) | (target < 0):
        return
    if chunk < FIRST_CHUNKS:
        _move(
            FIRST + layer * first_layer, source * first_block, target * first_block, chunk, first_words, CHUNK
        )
    else:
        _move(
            SECOND + layer * second_layer,
            source * second_block,
            target * second_block,
            chunk - FIRST_CHUNKS,
            second_words,
            CHUNK,
        )


@triton.jit
def _move(layer, source, target, chunk, words, CHUNK: tl.constexpr):
    word = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(layer + source + word, mask=word < words)
    tl.store(layer + target + word, x, mask=word < words)
