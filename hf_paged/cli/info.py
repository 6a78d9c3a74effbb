"""The command `hf-paged info`: the installation, and a model's parts for pages; no weights are loaded."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import torch

from ..engine import EngineConfig
from ..engine.memory import EngineMemory, bytes_of_weights, sized
from ..engine.self_test import self_test
from ..kv.budget import Room, free_bytes
from ..model.loading import first_device
from ..model.servable import Unservable, longest
from ..model.slots import slots_of
from ..model.state_layers import NUMBERED
from ..model.support import why_not
from ..serve.link.loading import Source
from .arguments import source_of
from .environment import facts

SERVED = {"engine, serve": "served, if the trial of its forward succeeds when the engine is made"}


def run(given: Namespace) -> int:
    """Print the installation, for a user or an issue, and a model where one is named."""
    print("\n".join(facts().lines()))
    if given.model:
        print("\n".join(["", *model_lines(given, source_of(given))]))
    elif given.memory is not None:
        raise ValueError(f"--memory {given.memory} is for a model; name one")
    if given.self_test:
        if not given.model:
            raise ValueError("--self-test loads a model; name one, or demo")
        error = self_test(source_of(given).load())
        print(f"\na byte of a cached block was flipped; the next request ended, as it should, with\n{error}")
    return 0


def model_lines(given: Namespace, source: Source) -> list[str]:
    """A model's layers, whether generate() and the engine take it, and the memory of an engine, one fact a
    line.
    """
    config = EngineConfig(
        block_size=given.block_size,
        num_blocks=given.num_blocks,
        memory_fraction=given.gpu_memory_utilization,
        max_batch_sequences=given.max_num_seqs,
        max_batch_tokens=given.max_num_batched_tokens,
        state_slots=given.state_slots,
        state_snapshots=given.state_snapshots,
        state_every=given.state_every,
        state_dtype=given.state_dtype,
        **({} if given.max_loras is None else {"max_adapters": given.max_loras}),
    )
    model = source.outline()
    found = {"model": type(model).__name__, "layers": _layers(model)}
    found["longest sequence"] = str(longest(model) or "not named by its config")
    reason = why_not(model, model.generation_config)
    found["generate()"] = "on pages" if reason is None else f"on transformers' own cache: {reason}"
    found |= _engine(model, config, _room(given, source))
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        found["weights"] += f", before they are quantized by {method}"
    width = max(map(len, found))
    return [f"{name:{width}}  {value}" for name, value in found.items()]


def _layers(model: Any) -> str:
    """How many layers of each kind keep their keys and values in pages."""
    try:
        slots = slots_of(model, cross=False)
    except AttributeError as error:
        return f"unknown ({error})"
    if not NUMBERED and any(not kind.fills for slot in slots for kind in slot.kinds):
        return f"{len(slots)} in transformers' own tensors"  # an older release, which has no slots for states
    kinds = Counter(_kind(slot) for slot in slots)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _kind(slot: Any) -> str:
    if slot.kind is None:
        return f"{type(slot.source).__name__} in transformers' own tensors"
    found = []
    for kind in slot.kinds:
        window = "" if kind.window is None else f" of {kind.window} tokens"
        found.append(f"{kind.name}{window} in pages" if kind.fills else "states in slots")
    return " and ".join(found)


def _room(given: Namespace, source: Source) -> Room:
    """The device, before it has the model: this machine's, or one of a size."""
    if given.memory is None:
        device = torch.device(source.device or first_device())
        return Room(device.type, free_bytes(device))
    return Room("cpu" if (source.device or "").startswith("cpu") else "cuda", given.memory)


def _engine(model: Any, config: EngineConfig, room: Room) -> dict[str, str]:
    """The memory of an engine on the model, or why there is none."""
    found = {"weights": sized(bytes_of_weights(model))}
    try:
        memory = EngineMemory.outlined(model, config, room)
    except Unservable as error:
        return {"engine, serve": f"not served: {error}", **found}
    except Exception as error:  # the model's code, which wants numbers
        return {
            **SERVED,
            **found,
            "keys and values": f"not known without weights ({type(error).__name__}: {error})",
        }
    served = SERVED
    if not memory.requests:
        served = {"engine, serve": f"not one request of {memory.length:,} tokens fits beside the weights"}
    place = {"free memory": f"{sized(room.free)} of a {room.type.upper()} device, before the weights"}
    return {**served, **place, **memory.facts()}
