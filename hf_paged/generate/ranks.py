"""A call of generate() on several ranks, each of which runs all of it: what they must have alike."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model.caller import caller_level
from ..model.offloaded import input_device
from ..model.peft_layers import why_no_adapters_on_ranks
from ..model.ranks.symmetric_memory import symmetric_memory_of
from ..model.ranks.tensor_parallel import mesh_of, why_not_divided
from ..model.ranks.votes import votes_of
from ..model.snapshot import call_snapshots


def begin_on_ranks(model: nn.Module, reason: str | None) -> str | None:
    """Why a call cannot run on pages: `reason`, or that another rank has one. Where the user's code runs
    between the steps of one rank (a streamer on rank 0), all check their models, and so they meet as often.
    """
    mesh = mesh_of(model)
    kept = call_snapshots.get()
    if mesh is None or kept is None:
        return reason
    own = 0 if reason is not None else 1 if kept.foreign else 2
    apart = input_device(model).type != "cpu"  # there nothing that the user sends is counted as a sum
    least = votes_of(mesh.get_group()).least(own, computed=apart, place="the beginning of a call")
    if least == 0:
        return reason or f"another rank of {type(model).__name__} cannot run on pages, and says why"
    call_snapshots.set(kept._replace(foreign=least == 1))
    symmetric_memory_of(mesh.get_group())  # ranks meet, so it is made where no lock is held
    return None


def any_rank(model: nn.Module, found: bool) -> bool:
    """True if something was found on any rank; all of them are at the end of a call."""
    mesh = mesh_of(model)
    if mesh is None:
        return found
    return votes_of(mesh.get_group()).least(int(not found), computed=False, place="the end of a call") == 0


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
    where = (device,) if device.type == "cuda" else ()
    own = random.get_rng_state(*where).to(device)
    first = own.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    differ = torch.tensor(not torch.equal(own, first), dtype=torch.int32, device=device)
    dist.all_reduce(differ, dist.ReduceOp.MAX, group=group)
    if not differ:
        return
    random.set_rng_state(first.cpu(), *where)
    if dist.get_rank(group) == 0:
        warnings.warn(
            "cache_implementation='paged': the random states of the ranks differ, so each would draw other "
            "tokens; rank 0's is taken on all of them. Call torch.manual_seed() with one seed on every rank",
            stacklevel=caller_level(),
        )
