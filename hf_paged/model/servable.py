"""Which models the engine can serve, and how far."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationMixin

from .offloaded import divided, unloaded
from .prompt_learning import why_no_virtual_tokens
from .quantized import looks_around
from .routers import routers_of
from .slots import STATES, slots_of
from .support import ropes_of, why_not

UNBOUNDED = 512
"""Tokens of a sequence with which routers are tried if the model names no longest."""


class Unservable(ValueError):
    """A model that the engine cannot run, and why."""


def check_servable(model: Any, outer: Any) -> None:
    """Raise unless the model is one whose sequences can run side by side. `outer` is what the user holds,
    perhaps peft's wrapper.
    """
    check_architecture(model)
    name = type(model).__name__
    absent = unloaded(model)
    if absent:
        some = ", ".join(absent[:3]) + ", ..." * (len(absent) > 3)
        raise Unservable(
            f'{len(absent)} parameters of {name} are on "meta" ({some}) and no accelerate hook loads them; '
            "load the weights first, or offload them with accelerate"
        )
    if divided(map(type, model.modules())):
        raise Unservable(
            f"FSDP divides the weights of {name}, so a step needs all ranks, and each rank's engine has "
            "steps of its own; use generate(), or tensor parallelism"
        )
    if any(
        looks_around(module, weight)
        for module in model.modules()
        for weight in module._parameters.values()
        if weight is not None
    ):
        raise Unservable(
            f"{name} has quantized layers that round a token depending on the rest of its batch, so its "
            "neighbours would change its tokens; "
            "use generate(), or layers with a scale for each row (threshold 0 in bitsandbytes' int8)"
        )
    reason = why_no_virtual_tokens(outer)
    if reason is not None:
        raise Unservable(f"{reason}; use generate()")


def check_architecture(model: Any) -> None:
    """Raise unless the model's class and settings can be served; its weights may be missing."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise Unservable(
            "torch.compile() has wrapped this model; give the engine the model itself, and compile=True"
        )
    if not issubclass(type(model), GenerationMixin):
        raise Unservable(f"{name} cannot generate; the engine needs a model with a language modeling head")
    if getattr(model, "_is_stateful", False) and not _keeps_states_in_its_cache(model):
        raise Unservable(
            f"{name} keeps a state of its own, which the engine cannot roll back or fork; use generate()"
        )
    if model.generation_config.use_cache is False:
        raise Unservable(
            "model.generation_config.use_cache=False, and the engine needs a cache; set it to True"
        )
    try:
        reason = why_not(model, model.generation_config)
    except AttributeError as error:
        raise Unservable(f"{name} does not describe its layers ({error}); use generate()") from error
    if reason is not None:
        raise Unservable(f"{reason}; use generate()")


def _keeps_states_in_its_cache(model: Any) -> bool:
    """True if layers of the model's cache have recurrent states: those are in slots."""
    try:
        return any(STATES in slot.kinds for slot in slots_of(model, cross=False))
    except AttributeError:  # said below
        return False


def versions(model: nn.Module) -> list[int]:
    """How often torch wrote to each of the model's parameters, offloaded ones aside."""
    return [0 if each.is_inference() or each.is_meta else each._version for each in model.parameters()]


def check_writes(model: nn.Module, before: list[int]) -> None:
    """Raise if the forwards of a trial have written to the model's weights, as peft's do to experts with
    adapters: the engine could not tell that from a change. before: the versions when the trial began.
    """
    if versions(model) != before:
        raise Unservable(
            f"a forward of {type(model).__name__} writes to its own weights, as with LoRA on experts "
            "(target_parameters), which looks like a change of the weights; use generate(), or merge "
            "the adapter"
        )


def check_routers(model: Any, tokens: int) -> None:
    """Raise if a token's result may depend on others in the batch: steps of up to `tokens` are not what
    generate() computes together.
    """
    routers = routers_of(model)
    most = max(tokens, longest(model) or UNBOUNDED)
    if routers.modules and not (routers.known and routers.keep_tokens_apart(most)):
        raise Unservable(
            f"{type(model).__name__} has routers that drop tokens beyond an expert's capacity; the engine "
            f"splits and batches up to {most} tokens unlike generate(), which would change which "
            "are dropped; use generate(), or raise the capacity"
        )


def longest(model: Any) -> int | None:
    """The most tokens of a sequence, or None if the model does not limit it.

    Where rotary angles change beyond some length, that length: one long sequence would change its neighbours'
    positions.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    limits += [
        rope.get("original_max_position_embeddings")
        for rope in ropes_of(model)
        if rope.get("rope_type") == "longrope"
    ]
    return min((int(limit) for limit in limits if limit), default=None)


def longest_source(model: Any) -> int | None:
    """The most tokens that an encoder makes, or None if the model does not limit it."""
    config = model.config.get_text_config(encoder=True)
    limits = [getattr(config, name, None) for name in ("max_source_positions", "max_position_embeddings")]
    return next((int(limit) for limit in limits if limit), None)
