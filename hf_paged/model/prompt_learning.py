"""peft's methods of prompt learning: adapters that are virtual tokens in front of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache_name import CACHE, OLDER

EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING", "CPT", "MULTITASK_PROMPT_TUNING")
"""Methods of peft whose virtual tokens are embeddings."""
PASTS = ("PREFIX_TUNING", "CARTRIDGE")
"""Methods of peft whose virtual tokens are keys and values of all layers."""
BY_TASK = "MULTITASK_PROMPT_TUNING"
"""The one whose embeddings depend on the request's task."""


def is_virtual(config: Any) -> bool:
    """True if an adapter with this config of peft's is virtual tokens."""
    return bool(getattr(config, "is_prompt_learning", False))


def kind_of(config: Any) -> str:
    """peft's name of the method of an adapter with this config."""
    return str(getattr(config, "peft_type", None)).removeprefix("PeftType.")


def learns_prompts(outer: Any) -> bool:
    """True for a peft model whose adapters are virtual tokens."""
    configs = getattr(outer, "peft_config", None)
    return isinstance(configs, Mapping) and any(map(is_virtual, configs.values()))


def why_no_virtual_tokens(outer: Any) -> str | None:
    """Why virtual tokens of a peft model cannot stand in front of prompts; None if they can."""
    if not learns_prompts(outer):
        return None
    if outer.config.is_encoder_decoder:
        return "the engine has no virtual tokens of encoders"
    kinds = {kind_of(each) for each in outer.peft_config.values()} - {*EMBEDDINGS, *PASTS}
    return f"the engine does not support {min(kinds)}" if kinds else None


def past_in(made: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Keys and values [rows, heads, tokens, dim] by layer in the cache that peft has made of an adapter; None
    if it has other layers. A layer with a window lacks its first tokens, which no other one sees: zeros are
    there.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in getattr(made, "layers", ()):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not layer.get_seq_length():
            return None
        gone = layer.get_seq_length() - layer.keys.shape[2]
        pair = [nn.functional.pad(each, (0, 0, gone, 0)) for each in (layer.keys, layer.values)]
        found.append((pair[0], pair[1]))
    lengths = {keys.shape[2] for keys, _ in found}
    return found if len(lengths) == 1 else None


@functools.cache
def pasts_are_ignored() -> bool:
    """True if peft hands its keys and values over under a name that the installed transformers does not read:
    generate() computes without them then.
    """
    from peft import PeftModelForCausalLM

    known = PeftModelForCausalLM.prepare_inputs_for_generation.__code__.co_consts
    return CACHE != OLDER and OLDER in known and CACHE not in known
