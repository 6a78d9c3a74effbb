"""Prompts given as embeddings."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from ...model.offloaded import input_device
from ...model.peft_parts import base_of
from ...model.weights_digest import host_bytes


def checked(model: Any, embeds: object, ids: tuple[int, ...]) -> torch.Tensor:
    """A prompt's embeddings [tokens, hidden] in the model's dtype; `ids` are those given with them."""
    table: Any = model.get_input_embeddings()
    table = None if table is None else base_of(table)  # peft's module makes a weight for each look
    hidden = (
        table.weight.shape[1]
        if getattr(table, "weight", None) is not None
        else model.config.get_text_config(decoder=True).hidden_size
    )
    if not isinstance(embeds, torch.Tensor):
        raise TypeError(f"inputs_embeds must be a tensor [tokens, {hidden}], got {type(embeds).__name__}")
    rows = embeds[0] if embeds.ndim == 3 and embeds.shape[0] == 1 else embeds
    if rows.ndim != 2 or rows.shape[1] != hidden:
        raise ValueError(
            f"inputs_embeds is {list(embeds.shape)}, expected [tokens, {hidden}] or [1, tokens, {hidden}]: "
            "one prompt a request"
        )
    if not rows.shape[0]:
        raise ValueError("the prompt is empty; give it at least one token")
    if rows.dtype != model.dtype:
        raise TypeError(
            f"inputs_embeds are {rows.dtype} and the model computes in {model.dtype}; convert them with "
            f".to({model.dtype})"
        )
    if ids and len(ids) != rows.shape[0]:
        raise ValueError(
            f"the prompt has {len(ids)} token ids and {rows.shape[0]} embeddings; give as many of both, or "
            "no ids"
        )
    # A copy: what its owner does with the tensor later is no business of a request that may be computed
    # again.
    return rows.detach().to(input_device(model), copy=True)


def names_of(embeds: torch.Tensor, key: bytes) -> tuple[int, ...]:
    """Token ids that stand for embeddings [tokens, hidden] in the prefix cache: a digest of each, below -1
    unlike any id.

    Equal rows have equal names, so prompts of embeddings share prefixes as others do. Without the key it is
    infeasible to find two rows with one name.
    """
    content = memoryview(host_bytes(embeds))
    width = embeds.shape[1] * embeds.element_size()
    rows = [content[i * width : (i + 1) * width] for i in range(len(embeds))]
    return tuple(
        -2 - (int.from_bytes(blake2b(row, digest_size=8, key=key).digest(), "big") >> 2) for row in rows
    )
