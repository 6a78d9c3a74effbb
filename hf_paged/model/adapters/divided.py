"""Adapters of a model that ranks compute together: the part of each that a rank holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..lora import Adapter
from ..parts import LowRank, OwnBias, Part, Parts
from ..peft_parts import base_of
from ..ranks.tensor_parallel import mesh_of, style_of
from ..shards import is_divided, is_sharded, local_part

WHOLE = (
    None,
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
)
"""Styles of layers that take whole inputs and give whole outputs, whatever a rank has of their weights."""


def part_here(model: nn.Module, layers: Parts) -> Parts:
    """This rank's part of an adapter, by the names of layers; all of it if one process has the model.

    Where ranks divide a layer's outputs, each has B's rows of its own. Where they divide its inputs, each has
    A's columns of its own: the products of all ranks are added up with the layer's output, and `sum_norms`
    makes the norms of DoRA. Each has all of embeddings, heads and tokens, whose modules give whole outputs.
    Raises ValueError for layers that are divided in another way, on all ranks alike.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return dict(layers)
    rank = mesh.get_local_rank()
    size = mesh.size()
    return {
        path: tuple(_part(model, path, part, rank, size) for part in parts) for path, parts in layers.items()
    }


def _part(model: nn.Module, path: str, part: Part, rank: int, size: int) -> Part:
    style = style_of(model, path)
    names = path.split(".")
    above = [style_of(model, ".".join(names[:count])) for count in range(1, len(names))]
    if part.stays_whole and not any(above) and style in (*WHOLE, "embedding_rowwise"):
        return part
    if not part.divides:
        raise ValueError(
            f"the adapter has {part.name} at {path}, which the engine does not divide among {size} ranks; "
            "merge the adapter into the model, or serve it in one process"
        )
    module = base_of(model.get_submodule(path))
    divided = is_divided(module, size)
    reads_parts = part.reads_base and is_sharded(module)
    if not any(above) and style in WHOLE and (style is not None or not divided) and not reads_parts:
        return part
    if any(above) or style not in ("colwise", "rowwise") or not divided or type(module) is not nn.Linear:
        how = next((each for each in above if each), style)
        raise ValueError(
            f"{path} is divided over {size} ranks as {how!r}, as the engine divides no adapter; "
            "leave the layer out of target_modules, or merge the adapter into the model"
        )
    if isinstance(part, OwnBias):
        if style == "colwise":
            return OwnBias(part.bias.chunk(size)[rank].contiguous())
        return OwnBias(part.bias, here=rank == 0)  # the parts are summed
    assert isinstance(part, LowRank)
    bias, magnitude = part.bias, part.magnitude
    if style == "colwise":
        own = None if bias is None else bias.chunk(size)[rank].contiguous()
        scales = None if magnitude is None else magnitude.chunk(size)[rank].contiguous()
        return replace(part, b=part.b.chunk(size)[rank].contiguous(), bias=own, magnitude=scales)
    own = bias if bias is None or rank == 0 else torch.zeros_like(bias)  # the parts are summed
    norm = None if magnitude is None else torch.zeros_like(magnitude)  # all ranks make it
    return replace(part, a=part.a.chunk(size, dim=1)[rank].contiguous(), bias=own, norm=norm)


def sum_norms(model: nn.Module, adapter: Adapter) -> None:
    """Have the norms of columns of which each rank has a part, in the adapter's memory. All ranks call it
    together.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return
    for module, parts in adapter.layers.items():
        for part in parts:
            if isinstance(part, LowRank) and part.norm is not None:
                base = base_of(module)
                device = local_part(base.weight).device
                squares = part.mapped(partial(torch.Tensor.to, device=device)).norms(base).float().square()
                dist.all_reduce(squares, group=mesh.get_group())
                part.norm.copy_(squares.sqrt())
