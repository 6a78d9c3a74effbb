"""A call of generate() on several ranks, each of which runs all of it: what they must have alike."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model.adapters.peft_layers import why_no_adapters_on_ranks
from ..model.offloaded import input_device
from ..model.tensor_parallel import mesh_of, why_not_divided


def check_ranks(model: nn.Module, generation_config: Any) -> None:
    """Refuse what ranks compute wrongly, and let those that sample draw alike, once a call."""
    mesh = mesh_of(model)
    if mesh is None:
        return
    reason = why_no_adapters_on_ranks(model)
    if reason is not None:
        raise ValueError(reason)
    reason = why_not_divided(model)
    if reason is not None:
        raise ValueError(f"{reason}; use fewer ranks (without pages the tokens would be wrong as well)")
    if generation_config.do_sample:
        _draw_alike(input_device(model), mesh.get_group())


def _draw_alike(device: torch.device, group: dist.ProcessGroup) -> None:
    """Give all ranks rank 0's random state, with a warning if theirs is another."""
    random: Any = torch.cuda if device.type == "cuda" else torch.random
    own = (random.get_rng_state(device) if device.type == "cuda" else random.get_rng_state()).to(device)
    first = own.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    differ = torch.tensor(not torch.equal(own, first), dtype=torch.int32, device=device)
    dist.all_reduce(differ, dist.ReduceOp.MAX, group=group)
    if not differ:
        return
    if device.type == "cuda":
        random.set_rng_state(first.cpu(), device)
    else:
        random.set_rng_state(first)
    if dist.get_rank(group) == 0:
        warnings.warn(
            "cache_implementation='paged': the random states of the ranks differ, so each would draw other "
            "tokens; rank 0's is taken on all of them. Call torch.manual_seed() with one seed on every rank",
            stacklevel=5,
        )
