"""Which attention a model's decoder uses, for as long as a call needs it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kv import fork_safe_lock

SETTING = "_attn_implementation_internal"
"""Where a config has it. Read and written past the config's own methods, which take as long as a layer."""


class _Switched(NamedTuple):
    """A config whose attention setting is ours for as long as it has owners. Models may share a config."""

    config: Any
    original: str
    ours: str
    owners: set[int]


_switched: dict[int, _Switched] = {}
_lock = fork_safe_lock()


def setting_of(config: Any, name: str) -> Any:
    """A setting of a config, None if it has none; for reads in every step, past the config's own methods."""
    try:
        return object.__getattribute__(config, name)
    except AttributeError:
        return getattr(config, name, None)


def original_implementation(config: Any) -> str:
    """The attention setting that the user chose for the models of `config`."""
    with _lock:  # another thread may switch it between the two questions
        entry = _switched.get(id(config))
        if entry is not None and vars(config)[SETTING] == entry.ours:
            return entry.original
        return str(getattr(config, "_attn_implementation", None) or "eager")


def switch(configs: list[Any], name: str, owner: object) -> None:
    """Set the attention of `configs` to `name` until `restore`. Twice by the same owner is once."""
    with _lock:
        for config in configs:
            entry = _switched.get(id(config))
            now = vars(config).get(SETTING) or getattr(config, SETTING, None) or "eager"
            if entry is None or now != name:
                entry = _switched[id(config)] = _Switched(config, now, name, entry.owners if entry else set())
            entry.owners.add(id(owner))
            vars(config)[SETTING] = name


def restore(configs: list[Any], owner: object) -> None:
    """Undo an owner's `switch`, or an interrupt's rest of it; the last one, unless the user chose anew."""
    with _lock:
        for config in configs:
            entry = _switched.get(id(config))
            if entry is None:
                continue
            entry.owners.discard(id(owner))
            if not entry.owners:
                if vars(config)[SETTING] == entry.ours:
                    vars(config)[SETTING] = entry.original
                _switched.pop(id(config), None)


def restore_copies(memo: dict[int, Any]) -> None:
    """Give the user's setting to copies of switched configs; memo: what was copied, of copy.deepcopy."""
    with _lock:
        for key, entry in _switched.items():
            if key in memo and vars(memo[key])[SETTING] == entry.ours:
                vars(memo[key])[SETTING] = entry.original


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every module once. torch's own walk makes up a name for each, which costs more than all the rest."""
    seen = {id(model)}
    found = [model]
    for module in found:  # which grows meanwhile
        for child in module.__dict__["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def decoder_configs(modules: Iterable[nn.Module]) -> list[Any]:
    """The configs of the attention modules of a model that read a cache and look their function up in
    transformers' registry. modules: all of it.

    A config that other attention reads too stays as it is: that module would not know our name. So does one
    whose attention is the user's own: it is called as before, on dense copies.
    """
    ours: dict[int, Any] = {}
    others: set[int] = set()
    for module in modules:
        own = module.__dict__
        config = own.get("config")
        if config is None or SETTING not in getattr(config, "__dict__", {}):
            continue
        attention: Any = type(module)
        if own.get("layer_idx") is None and not is_told_its_layer(attention):
            continue
        if uses_registry(attention) and (id(config) in ours or is_stock(original_implementation(config))):
            ours[id(config)] = config
        elif "ttention" in attention.__name__:
            others.add(id(config))
    return [config for key, config in ours.items() if key not in others]


def is_stock(setting: str) -> bool:
    """True if an attention setting means the softmax attention that pages compute too."""
    if setting == "sdpa":
        return ALL_ATTENTION_FUNCTIONS.get("sdpa") is sdpa_attention_forward
    return setting in ("eager", "flex_attention") or "flash" in setting


@cache
def is_told_its_layer(cls: Any) -> bool:
    """True if a module serves several layers and learns at each call which it is (Zamba's attention)."""
    return "layer_idx" in inspect.signature(cls.forward).parameters


@cache
def sdpa_refuses_softcap() -> bool:
    """True if this transformers raises for a softcap under sdpa; older ones leave it out."""
    return "softcap" in inspect.getsource(sdpa_attention_forward)


@cache
def uses_registry(cls: Any) -> bool:
    """True if an attention class looks its function up in transformers' registry."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return False
    # A class that compares its function with stock's names would misjudge ours. One that makes a mask of its
    # own checks whether it was given one, and stock gives none where a mask would be plainly causal.
    return "ALL_ATTENTION_FUNCTIONS" in source and not re.search(
        r"_attn_implementation (not )?in |attention_mask=attn_mask\b", source
    )
