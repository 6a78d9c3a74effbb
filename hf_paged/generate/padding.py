"""The rows given to a forward: their number, their new tokens, and the mask that says where they begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..model.switch import setting_of
from .cache import PagedCache

INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def mask_name(model: nn.Module) -> str:
    """The argument that marks the padding in the rows of the cache."""
    return "decoder_attention_mask" if setting_of(model.config, "is_encoder_decoder") else "attention_mask"


def rows_of(arguments: Mapping[str, Any]) -> int:
    """How many rows a forward has."""
    return next((arguments[name].shape[0] for name in INPUTS[::-1] if arguments.get(name) is not None), 0)


def new_of(arguments: Mapping[str, Any]) -> int:
    """How many new tokens it has of each row."""
    return next((arguments[name].shape[1] for name in INPUTS[::-1] if arguments.get(name) is not None), 0)


class Padding(NamedTuple):
    """Padding by an attention mask."""

    starts: list[int]
    """The column at which each row begins."""
    plain: bool
    """True if it shows every token from there on."""

    @classmethod
    def of(cls, told: list[int]) -> Padding:
        """From what `look` found, on the host."""
        return cls(told[:-1], bool(told[-1]))


def look(mask: torch.Tensor) -> torch.Tensor:
    """Read mask [rows, columns] on its device: where each row begins and whether it is plain, [rows + 1]."""
    mask = mask.bool()
    begin = (mask.cumsum(1) == 0).sum(1)
    plain = (mask == (torch.arange(mask.shape[1], device=mask.device) >= begin[:, None])).all()
    return torch.cat([begin, plain[None].long()])


def note_padding(
    model: nn.Module,
    arguments: Mapping[str, Any],
    cache: PagedCache,
    store_all: bool,
    padding: Padding | None,
) -> None:
    """Learn from the attention mask where each row begins, or that it is no left padding. padding: what it
    says, if that was read.
    """
    sequences = cache.sequences
    name = mask_name(model)
    mask = arguments.get(name)
    if mask is None:
        sequences.padding_known = True
        return
    own = INPUTS[:2] if name == "attention_mask" else INPUTS[2:]
    inputs = next((arguments[name] for name in own if arguments.get(name) is not None), None)
    new = 0 if inputs is None else inputs.shape[1]
    fits = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == sequences.columns + new
    if not fits or inputs is None:
        sequences.padding_known = False
    elif mask.device.type == "cpu" or new > 1 or not cache.mask_read:
        # Reading a device's mask waits for it, so a decoding step trusts what its call has read.
        _read_mask(mask, cache, store_all, padding)
        cache.mask_read = True


def _read_mask(mask: torch.Tensor, cache: PagedCache, store_all: bool, padding: Padding | None) -> None:
    """Take mask [rows, columns] apart into where rows begin; with `store_all` padding is stored like anything
    else.
    """
    sequences = cache.sequences
    sequences.flush()  # the mask's rows are in the order that a reorder owes
    known = sequences.starts
    if known is None and sequences.columns:
        sequences.padding_known = bool(mask.bool().all())
        return
    starts, plain = padding or Padding.of(look(mask).tolist())
    if sequences.columns == 0:
        sequences.begin_at(starts if plain and not store_all else None)
        sequences.padding_known = plain and (not any(starts) or not store_all)
        return
    assert known is not None
    # A row that was all padding so far may begin later than it seemed.
    grown = [new if old >= sequences.columns else old for new, old in zip(starts, known, strict=True)]
    sequences.padding_known = plain and grown == starts
    column = torch.arange(mask.shape[1], device=mask.device)
    if (mask.bool() & (column < torch.tensor(grown, device=mask.device)[:, None])).any():
        raise ValueError(
            "the attention_mask shows tokens that were padding when this cache was begun; use a new cache"
        )
    sequences.begin_at(grown)
