"""The shape of a model's attention, for those that compile its kernels ahead, and the kernels of a captured
step of generate().
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kv import GroupBatches, Layout, TritonOps
from ...kv.warmup import META, AttentionShape, Job, Warming
from ..ranks.tensor_parallel import heads_here
from ..switch import original_implementation
from .fusion import Fusion
from .graph import ReplayableStep, groups_of, kinds_read, rows_of_graph, static_batch

COMPILED_FOR = {"cuda"}
"""Types of devices whose kernels are compiled ahead."""


def attention_shape(model: Any, layout: Layout, maker: GroupBatches, fusion: Fusion | None) -> AttentionShape:
    """Layers with keys and values of a layout, as far as the config tells. maker: of their batches in
    captured steps. fusion: the small operations of these, if there are any.
    """
    config = model.config.get_text_config(decoder=True)
    queries, _ = heads_here(model, config.num_attention_heads, layout.heads)
    eager = original_implementation(config) != "sdpa"
    softcap = getattr(config, "attn_logit_softcapping", None) if eager else None
    turns = fusion is not None and bool(fusion.rotaries)
    return AttentionShape(layout, queries, maker, softcap, turns)


def compile_step(model: nn.Module, step: ReplayableStep, fusion: Fusion) -> None:
    """Compile what a captured step will launch, in threads beside each other.

    What is not foreseen (layers that differ among each other) is compiled when it is launched.
    """
    group = groups_of(step)[0]
    ops = group.captured_ops
    if group.device.type in COMPILED_FOR and isinstance(ops, TritonOps):
        Warming(group.device, lambda: ops.first, lambda: jobs(model, step, fusion)).wait()


def foresees_chains(device: torch.device, fusion: Fusion) -> bool:
    """True if kernels of chains are compiled beside each other before one is launched."""
    return device.type in COMPILED_FOR and fusion.has_chains


def compile_chains(device: torch.device, fusion: Fusion, calls: Sequence[Job]) -> None:
    """Compile kernels of chains, in threads beside each other. calls: as `Fusion.foreseeing` notes them."""
    first = [fusion.kernels.find_driver, fusion.kernels.know_triton]
    Warming(device, lambda: first, lambda: calls).wait()


def jobs(model: Any, step: ReplayableStep, fusion: Fusion) -> Sequence[Job]:
    """Calls on tensors without data of the kernels of a captured step."""
    bucket = rows_of_graph(step)
    found: list[Job] = []
    for part in step.parts:
        for kind, rows in kinds_read(part):
            batch = partial(static_batch, kind, rows, bucket, step.new, META)
            ops = rows.group.captured_ops
            if isinstance(ops, TritonOps) and batch().new:
                maker = GroupBatches(rows.group, captured=True)
                for layout in (each for each in rows.group.layouts if isinstance(each, Layout)):
                    shape = attention_shape(model, layout, maker, fusion)
                    found += shape.step(ops, batch)
    return [*found, *fusion.calls(bucket, model.dtype)]
