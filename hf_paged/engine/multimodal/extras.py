"""Inputs of a decoder for some tokens in addition to their embeddings: features that its first layers add, as
Qwen3-VL's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class DecoderExtras(NamedTuple):
    """mask [tokens]: the tokens with features. features: by argument their features, [those tokens, ...]."""

    name: str
    """The mask's argument."""
    mask: torch.Tensor
    features: dict[str, tuple[torch.Tensor, ...]]

    def part(self, start: int, count: int) -> DecoderExtras:
        """The same for `count` tokens from `start` on; tokens after the last one have no features."""
        mask = self.mask[start : start + count]
        first = int(self.mask[:start].sum())
        many = int(mask.sum())
        mask = torch.cat([mask, mask.new_zeros(count - len(mask))])
        return DecoderExtras(
            self.name,
            mask,
            {
                name: tuple(each[first : first + many] for each in parts)
                for name, parts in self.features.items()
            },
        )


def decoder_extras(given: Mapping[str, Any], tokens: int) -> DecoderExtras | None:
    """The extras among a decoder's arguments: a mask of tokens [1, tokens] and lists of features for these;
    None if the arguments have another form.
    """
    masks = {
        name: value
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool
    }
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple))}
    if len(masks) != 1 or not lists or len(masks) + len(lists) != len(given):
        return None
    name, mask = next(iter(masks.items()))
    parts = [each for value in lists.values() for each in value]
    if mask.shape != (1, tokens) or not all(
        isinstance(each, torch.Tensor) and each.shape[:1] == (int(mask.sum()),) for each in parts
    ):
        return None
    return DecoderExtras(name, mask[0], {name: tuple(value) for name, value in lists.items()})


def joined_extras(parts: Sequence[DecoderExtras | None], counts: Sequence[int]) -> dict[str, Any]:
    """The decoder's arguments for pieces of these lengths in one row; empty if no piece has extras."""
    some = [part for part in parts if part is not None and bool(part.mask.any())]
    if not some:
        return {}
    first = some[0]
    masks = [
        first.mask.new_zeros(count) if part is None else part.mask
        for part, count in zip(parts, counts, strict=True)
    ]
    features = {
        name: [torch.cat(each) for each in zip(*(part.features[name] for part in some), strict=True)]
        for name in first.features
    }
    return {first.name: torch.cat(masks)[None], **features}


@contextmanager
def decoder_arguments(model: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Add these arguments to every call of the model's decoder."""
    if not arguments:
        yield
        return

    def add(
        module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**keywords, **arguments}

    with model.get_decoder().register_forward_pre_hook(add, with_kwargs=True):
        yield
