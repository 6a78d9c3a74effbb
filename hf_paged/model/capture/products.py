"""Products of one input with several weights as one: rows of q, k and v, or of gate and up, are adjacent in
memory. The products of a divided model are those of this rank's parts.

The parameters stay the same objects, with their names, shapes, values and gradients; only the place of their
numbers changes, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.dlpack import from_dlpack

from ...kv import is_out_of_memory
from ...kv.ordinary import ordinary_tensors
from ..ranks.tensor_parallel import mesh_of
from ..shards import local_part
from ..weights_digest import PLAIN_TENSORS, address_of
from .branches import layers_of_one_input


@torch.library.custom_op(
    "hf_paged::products", mutates_args=(), schema="(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor"
)
def _products(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    """x [..., k] times each of the weights [n_i, k], plus their biases [n_i] if there are any: [..., sum of
    n_i].
    """
    fused = _fused(weights, biases)
    if fused is not None:
        return linear(x, *fused)
    apart: list[torch.Tensor | None] = [*biases] if biases else [None] * len(weights)
    return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, apart, strict=True)], -1)


@_products.register_fake
def _(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def fused_product(x: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor] | None:
    """The products of x by linear layers as one; None if their weights do not lie side by side."""
    fused = fused_parameters(layers)
    if fused is None:
        return None
    widths = [len(local_part(layer.weight)) for layer in layers]
    products: Sequence[torch.Tensor] = linear(x, *fused).split(widths, -1)
    return products


def fused_parameters(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The weights of linear layers as one, and their biases, if any; None if they do not lie side by side."""
    weights, biases = _parameters_of(layers)
    return _fused(weights, biases) if len(biases) in (0, len(weights)) else None


def _fused(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    weight = joined_of(weights)
    bias = joined_of(biases) if biases else None
    return None if weight is None or (bias is None and biases) else (weight, bias)


def _parameters_of(layers: Iterable[nn.Linear]) -> tuple[list[Any], list[Any]]:
    """The weights, and the biases of those that have one."""
    several = [(local_part(layer.weight), local_part(layer.bias)) for layer in layers]
    return [weight for weight, _ in several], [bias for _, bias in several if bias is not None]


def joined_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor [sum of n_i, ...] over tensors [n_i, ...] that lie side by side; None if they do not. It
    does not keep their memory.
    """
    first = tensors[0]
    kinds = {(tensor.dtype, tensor.device, tensor.shape[1:], tensor.is_contiguous()) for tensor in tensors}
    plain = PLAIN_TENSORS.issuperset(map(type, tensors)) and not first.is_meta
    if len(kinds) > 1 or not plain or not first.is_contiguous():
        return None
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place:
            return None
        place += tensor.nbytes
    size = place - first.data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, size)
    shape = sum(len(tensor) for tensor in tensors), *first.shape[1:]
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, shape, first.stride())


# ---- in a traced layer


def join_products(graph: torch.fx.GraphModule) -> None:
    """Let linear layers be our operation, one for all that have one input."""
    by_input: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is linear and _is_plain(node):
            by_input.setdefault((node.args[0], _bias(node) is None), []).append(node)
    for nodes in by_input.values():
        if len({_weight(node).dtype for node in nodes}) == 1:
            _replace(graph.graph, nodes)
    graph.recompile()


def _is_plain(node: torch.fx.Node) -> bool:
    tensors = [node.args[1]] if _bias(node) is None else [node.args[1], _bias(node)]
    return not node.kwargs and all(
        isinstance(each, torch.fx.Node) and each.op == "placeholder" for each in tensors
    )


def _bias(node: torch.fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else None


def _weight(node: torch.fx.Node) -> torch.Tensor:
    weight: Any = node.args[1]
    known: torch.Tensor = weight.meta["example_value"]
    return known


def _replace(graph: torch.fx.Graph, nodes: Sequence[torch.fx.Node]) -> None:
    with graph.inserting_before(nodes[0]):
        biases = [] if _bias(nodes[0]) is None else [_bias(node) for node in nodes]
        every = graph.call_function(
            torch.ops.hf_paged.products.default, (nodes[0].args[0], [node.args[1] for node in nodes], biases)
        )
        begin = 0
        for node in nodes:
            count = _weight(node).shape[0]
            part = graph.call_function(torch.narrow, (every, -1, begin, count))
            node.replace_all_uses_with(part)
            begin += count
    for node in nodes:
        graph.erase_node(node)


# ---- in the model


def lay_side_by_side(model: nn.Module) -> int:
    """Move the weights of linear layers that get one input next to each other: how many moved."""
    every: Iterable[Any] = chain(model.parameters(), model.buffers())
    if mesh_of(model) is not None:  # what else has parts (FSDP) keeps views of them
        every = map(local_part, every)
    storages = Counter(_storage(tensor) for tensor in every if type(tensor) in PLAIN_TENSORS)
    moved = 0
    for layers in chain.from_iterable(map(layers_of_one_input, model.modules())):
        weights, biases = _parameters_of(layers)
        apart = [tensors for tensors in (weights, biases) if tensors and joined_of(tensors) is None]
        if len(biases) in (0, len(weights)) and apart and all(_may_move(each, storages) for each in apart):
            if not moved:
                _release()  # or they come to lie in what a pool has left, which no pool can have again then
            try:
                moved += sum(_move(tensors) for tensors in apart)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                break  # there is no room to move; what lies apart is multiplied apart
    if moved:
        _release()  # the places that they left are too small for what comes
    return moved


def _release() -> None:
    """Give memory that torch keeps for later back to the devices."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, address_of(tensor)


def _may_move(tensors: Sequence[Any], storages: Counter[tuple[torch.device, int]]) -> bool:
    """True if they are plain tensors that share memory with no other."""
    first = tensors[0]
    return len(set(map(id, tensors))) == len(tensors) > 1 and all(
        type(tensor) in PLAIN_TENSORS
        and (tensor.dtype, tensor.device, tensor.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        and tensor.is_contiguous()
        and not (tensor.is_meta or tensor.is_inference())
        and storages[_storage(tensor)] == 1
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        for tensor in tensors
    )


def _move(parameters: Sequence[torch.Tensor]) -> int:
    """Move parameters side by side. Each has a storage of its own: who saves a model takes what shares one
    for the same weight.
    """
    with ordinary_tensors(), torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([*map(len, parameters)]), strict=True):
            parameter.data = from_dlpack(part)
    return len(parameters)
