"""The kernels of adapters, compiled side by side before they are launched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...kv import TritonOps
from ...kv.warmup import META, Job, Warming
from ..peft_parts import base_of, takes_products
from .joint import projection_name
from .table import AdapterTable

TOKENS = (1, 16, 256, 4096)
"""Numbers of tokens of which each needs other kernels than the one before."""
PAIR = ("gate_proj", "up_proj")
"""Layers of a feed-forward block that have one input, and whose outputs captured steps read together."""


def compiling(table: AdapterTable, dtype: torch.dtype) -> Warming:
    """Compile what a table's adapters need beside a model of this number type, in threads."""
    return Warming(table.device, lambda: TritonOps().first, lambda: jobs(table, dtype))


def jobs(table: AdapterTable, dtype: torch.dtype) -> Sequence[Job]:
    """Calls of the kernels on tensors without data, one of each kind."""
    found: list[Job] = []
    for tokens in TOKENS:
        found.append(partial(_sort, table, tokens))
        for together, inputs, outputs in sorted(set(_groups(table))):
            found.append(partial(_call, table, dtype, tokens, together, inputs, outputs))
    return found


def _groups(table: AdapterTable) -> Iterator[tuple[int, int, int]]:
    """How many layers share an input, its width and that of an output."""
    layers = list(table.layers)
    names = [projection_name(layer) for layer in layers]
    for number, layer in enumerate(layers):
        together = table.joint.get(number, number) - number + 1
        base: Any = base_of(layer)
        if not takes_products(layer):
            continue  # an embedding: compiled with its first step
        inputs = getattr(base, "in_features", None) or base.weight.shape[0]
        outputs = getattr(base, "out_features", None) or base.weight.shape[1]
        yield together, inputs, outputs
        if tuple(names[number : number + 2]) == PAIR:
            yield 2, inputs, outputs


def _sort(table: AdapterTable, tokens: int) -> None:
    plan = table.kernels.AdapterPlan(tokens, len(table.slots), META)
    plan.update(torch.empty(tokens, dtype=torch.int32, device=META))


def _call(
    table: AdapterTable, dtype: torch.dtype, tokens: int, together: int, inputs: int, outputs: int
) -> None:
    known = table.weights
    plan = table.kernels.AdapterPlan(tokens, len(table.slots), META)
    weights = table.kernels.LoraWeights(together, known.slots, known.rank, known.dtype, META, known.scaled)
    x = torch.empty(tokens, inputs, dtype=dtype, device=META)
    outs = [torch.empty(tokens, outputs, dtype=dtype, device=META) for _ in range(together)]
    shrunk = table.kernels.lora_shrink(x, weights, plan)
    table.kernels.lora_expand(outs, shrunk, weights, plan)
