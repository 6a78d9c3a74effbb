"""Caches with recurrent states that go back to an earlier length.

A state covers all tokens before it, and none can be taken from it. The rows begin again behind their last
snapshot before that length, or behind nothing, and the tokens from there on are computed once more.
"""

from __future__ import annotations

from typing import Any

import torch

from ..model.cache_name import CACHE, name_in, renamed
from ..model.offloaded import input_device
from ..model.snapshot import CallSnapshots
from .cache import PagedCache
from .call import Call
from .keys import NotShareable


def go_back(cache: PagedCache, columns: int) -> None:
    """Let a cache hold its first `columns` columns; on failure it is as it was. Raises RuntimeError if their
    tokens are not known.
    """
    model: Any = cache.model
    try:
        if model is None or cache.reuse is None:
            raise NotShareable("the cache does not know its tokens; prefix_caching=True keeps them")
        given = cache.reuse.prompt_again(columns)
        twin = PagedCache.make(model, cache.config)
        _compute(model, twin, given)
        assert twin.reuse is not None
        cache.reuse.require_same(twin.reuse)
    except NotShareable as reason:
        raise RuntimeError(
            f"cannot go back {cache.sequences.columns - columns} tokens: a recurrent state covers all "
            f"{cache.sequences.columns}, and they cannot be computed again: {reason}; use a new cache, or a "
            "copy.deepcopy of this one from before (layers that only convolve go back after "
            "activate_past_recording())"
        ) from None
    with cache.sequences.memory.lock:
        cache.sequences.exchange(twin.sequences)
        cache.reuse.exchange(twin.reuse)
    twin.reset()
    for layer in cache.own_layers:
        layer.follow()


def _compute(model: Any, cache: PagedCache, given: dict[str, Any]) -> None:
    """Compute a prompt as generate() does."""
    device = input_device(model)
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }
    call = Call(by_keyword=True)
    answer = None
    try:
        call.open(CallSnapshots(False, {}))
        call.plug(model, [cache], made=True)
        with torch.no_grad():
            answer = model(**renamed({**arguments, CACHE: cache}, CACHE, name_in(model)))
    finally:
        try:
            call.close(answer)
        finally:
            call.close(answer)  # again, if an interrupt has broken it off
