"""One call of generate(): what was asked, and what must be as before when it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .attention import NAME
from .cache import PagedCache
from .forward import wrap
from .latents import let_wait
from .registry import memory_of
from .support import warn, why_left
from .switch import decoder_configs, restore, switch


class _Plug:
    """A model whose forward is wrapped and whose attention is ours while at least one call runs."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.configs = decoder_configs(model)
        let_wait(model)
        self.own: Callable[..., Any] | None = model.__dict__.get("forward")
        self.wrapper = wrap(model, model.forward, masks_known=bool(self.configs))

    def push_in(self, model: nn.Module) -> None:
        switch(self.configs, NAME)
        model.__dict__["forward"] = self.wrapper

    def pull_out(self, model: nn.Module) -> None:
        restore(self.configs)
        # Somebody may have wrapped our wrapper meanwhile; without a paged cache it only passes through.
        if model.__dict__.get("forward") is self.wrapper:
            if self.own is None:
                del model.__dict__["forward"]
            else:
                model.__dict__["forward"] = self.own


_plugs: weakref.WeakKeyDictionary[nn.Module, _Plug] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@dataclass
class Call:
    """A running generate(). `asked` is the word as a keyword; a config may ask as well."""

    asked: bool
    model: nn.Module | None = None
    made: list[PagedCache] = field(default_factory=list)
    used: list[PagedCache] = field(default_factory=list)

    def plug(self, model: nn.Module, caches: list[PagedCache], made: bool) -> None:
        """Begin to run `model` on `caches`, which this call made or was given."""
        self.used += caches
        self.made += caches if made else []
        for cache in caches:
            cache.mask_read = False
        if self.model is not None:
            return
        with _lock:
            plug = _plugs.get(model)
            if plug is None:
                plug = _plugs[model] = _Plug(model)
            if plug.count == 0:
                plug.push_in(model)
            plug.count += 1
            self.model = model

    def close(self, answer: Any) -> None:
        """Leave everything as it was; `answer` is None if the call failed, and its own caches' blocks are back at once."""
        model, self.model = self.model, None
        if model is None:
            return
        with _lock:
            plug = _plugs[model]
            plug.count -= 1
            if plug.count == 0:
                plug.pull_out(model)
                del _plugs[model]
        memory = memory_of(model)
        self._leave_prefixes(model, answer is not None)
        memory.paths = [str(path) for path in self.used[0].paths]
        if answer is None:
            memory.suspect = True
            memory.drain()
            memory.suspect = bool(self.made)
            for cache in self.made:
                cache.reset()
        for cache in self.used:
            cache.spread()
        if answer is not None and left_behind(self.used[0], answer):
            warn(why_left(model))
        self.made, self.used = [], []
        memory.drain()

    def _leave_prefixes(self, model: nn.Module, succeeded: bool) -> None:
        """Leave what the caches hold to later calls."""
        with memory_of(model).lock:
            for cache in self.used:
                if cache.reuse is not None:
                    try:
                        if succeeded:
                            cache.settle()
                            cache.reuse.commit(model)
                    finally:
                        cache.reuse.leave()


def left_behind(cache: PagedCache, answer: Any) -> bool:
    """Whether the tokens of `answer` went through another cache than the one that was prepared."""
    sequences = answer if isinstance(answer, torch.Tensor) else getattr(answer, "sequences", None)
    return isinstance(sequences, torch.Tensor) and sequences.ndim == 2 and cache.get_seq_length() < sequences.shape[1] - 1


current: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
