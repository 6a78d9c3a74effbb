"""Calls left to stock, and why."""

from __future__ import annotations

import dis
import functools
import inspect
import warnings
from typing import Any

from .cache_name import CACHE, FOR_STATES, NAMES, OLDER, parameters_of
from .caller import caller_level
from .slots import NO_CONTENT, STATES, Slot, slots_of
from .state_layers import NUMBERED

READS = "_can_checkpoint_with_cache"
"""Layers with this attribute only read the cache, and keep it."""
PREPARING = {"super", "generate", "_prepare_cache_for_generation"}
"""Names in the code of a generate() that prepares a cache, or leaves that to another."""
SHARED = ("transformers.generation", "transformers.modeling_utils", "torch", "builtins")
"""Modules of the base classes that all models have."""


OWN_STATE = "{} keeps a state of its own instead of keys and values"


class FallbackWarning(UserWarning):
    """A call asked for the paged cache and runs on transformers' own instead."""


def why_not(model: Any, generation_config: Any, slots: list[Slot] | None = None) -> str | None:
    """Why this call cannot run on pages, or None if it can. slots: gets the places of the model's cache."""
    name = type(model).__name__
    if generation_config.use_cache is False:
        return "use_cache=False leaves nothing to page"
    if not model._supports_default_dynamic_cache():
        return OWN_STATE.format(name)
    own = vars(model).get("forward")
    # A forward of the user's with the older name hands the other on to transformers' own.
    names = parameters_of(type(model).forward) if own is None else inspect.signature(own).parameters.keys()
    if NAMES.isdisjoint(names) and FOR_STATES not in names:
        return f"{name}.forward takes no {CACHE}"
    slots = [] if slots is None else slots
    slots += slots_of(model, cross=False)
    if not NUMBERED and any(STATES in slot.kinds for slot in slots):
        return f"{name} keeps recurrent states, which go to slots from transformers 5.14 on; upgrade it"
    kinds: list[Any] = [type(model), type(model.get_decoder())]
    if any(map(adds_layers, kinds)):
        return f"{name} adds layers to its cache during a call, as copies of others"
    if any(slot.kind not in (None, STATES) for slot in slots):
        return f"{name}.forward takes no {CACHE}" if NAMES.isdisjoint(names) else None
    if all(slot.kind == STATES or type(slot.source) in NO_CONTENT for slot in slots):
        return None  # no keys and values, but states in slots
    return f"no layer of {name} keeps plain keys and values"


@functools.cache
def adds_layers(kind: Any) -> bool:
    """True for a class whose forward copies layers of its cache: a model that runs its layers in loops, each
    of which has keys and values of its own.
    """
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    instructions = [] if code is None else dis.get_instructions(code)
    return any((each.opname, each.argval) == ("STORE_ATTR", "layers") for each in instructions)


def why_dropped(model: Any) -> str | None:
    """Why layers drop the cache they are given: transformers before 5.24 takes it from checkpointed ones even
    where nothing has gradients; else None.
    """
    if not model.training or CACHE != OLDER:
        return None
    for module in model.get_decoder().modules():
        checkpoints = getattr(module, "gradient_checkpointing", False) and module.training
        if checkpoints and not getattr(module, READS, False):
            return (
                f"{type(model).__name__} trains with gradient checkpointing, in which its layers drop any "
                "cache, transformers' too; call model.eval() or model.gradient_checkpointing_disable() first"
            )
    return None


def why_left(model: Any) -> str:
    """Why a call that began on pages continued with another cache, as far as the model shows it."""
    name = type(model).__name__
    dropped = why_dropped(model)
    if dropped is not None:
        return dropped
    # peft sets its own method on the model while it generates.
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    adapters = getattr(owner, "peft_config", {})
    if any(getattr(each, "is_prompt_learning", False) for each in getattr(adapters, "values", tuple)()):
        return f"peft's prefix tuning gave {name} another cache, with its keys and values in it"
    if any(rope.get("rope_type") == "longrope" for rope in ropes_of(model)):
        return (
            f"{name} continued with another cache, in which its long rope recomputes everything "
            "beyond its original length"
        )
    return f"{name} continued with another cache, which its forward or its prepare_inputs_for_generation made"


def prepares_none(model: Any) -> bool:
    """True if its own generate() neither prepares a cache nor calls one that does (MusicGen's decoder)."""
    kind = type(model)
    own = [base for base in kind.__mro__ if not base.__module__.startswith(SHARED)]
    waiting = ["generate"]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        code = getattr(inspect.unwrap(getattr(kind, name)), "__code__", None)
        names = set(PREPARING if code is None else code.co_names)
        if names & PREPARING:
            return False
        waiting += [each for each in names - seen if any(callable(vars(base).get(each)) for base in own)]
    return True


def ropes_of(model: Any) -> list[dict[str, Any]]:
    """The settings of rotary positions, one for all layers of a decoder or one for each kind."""
    found = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    return [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]


def warn(reason: str) -> None:
    """Warn once per place and reason that stock runs instead."""
    warnings.warn(
        f"cache_implementation='paged': {reason}; transformers' own cache is used",
        FallbackWarning,
        stacklevel=caller_level(),
    )
