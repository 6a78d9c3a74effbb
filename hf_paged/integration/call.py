"""One call of generate(): what was asked, and what must be as before when it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .attention import NAME
from .cache import PagedCache
from .forward import wrap
from .registry import memory_of
from .switch import decoder_configs, restore, switch


class _Plug:
    """A model whose forward is wrapped and whose attention is ours while at least one call runs."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.configs = decoder_configs(model)
        self.own: Callable[..., Any] | None = model.__dict__.get("forward")
        self.wrapper = wrap(model, model.forward)

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

    def close(self, failed: bool) -> None:
        """Leave everything as it was. A call that failed gives its own caches' blocks back at once."""
        model, self.model = self.model, None
        if model is None:
            return
        with _lock:
            plug = _plugs[model]
            plug.count -= 1
            if plug.count == 0:
                plug.pull_out(model)
                del _plugs[model]
        for cache in self.made if failed else ():
            cache.reset()
        for cache in self.used:
            cache.spread()
        self.made, self.used = [], []
        memory_of(model).drain()


current: ContextVar[Call | None] = ContextVar("hf_paged_call", default=None)
