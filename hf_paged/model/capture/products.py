"""Products of one input with several weights as one: rows of q, k and v, or of gate and up, are adjacent in
memory.

The parameters stay the same objects, with their names, shapes, values and gradients; only the place of their
numbers changes, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.dlpack import from_dlpack

from ...kv import is_out_of_memory


@torch.library.custom_op(
    "hf_paged::products", mutates_args=(), schema="(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor"
)
def _products(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    """x [..., k] times each of the weights [n_i, k], plus their biases [n_i] if there are any: [..., sum of
    n_i].
    """
    joined = joined_of(weights)
    bias = joined_of(biases) if biases else None
    if joined is not None and (bias is not None or not biases):
        return linear(x, joined, bias)
    apart: list[torch.Tensor | None] = [*biases] if biases else [None] * len(weights)
    return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, apart, strict=True)], -1)


@_products.register_fake
def _(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def joined_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor [sum of n_i, ...] over tensors [n_i, ...] that lie side by side; None if they do not. It
    does not keep their memory.
    """
    first = tensors[0]
    kinds = {(tensor.dtype, tensor.device, tensor.shape[1:], tensor.is_contiguous()) for tensor in tensors}
    if len(kinds) > 1 or not first.is_contiguous():
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


def lay_side_by_side(model: nn.Module, run: Callable[[], Any]) -> int:
    """Move the weights of linear layers that get one input, next to each other. `run` runs the model. The
    answer is how many moved.
    """
    with _noting(model) as groups:
        run()
    storages = Counter(_storage(tensor) for tensor in (*model.parameters(), *model.buffers()))
    moved = 0
    for group in groups:
        weights: list[Any] = [layer.weight for layer in group]
        biases: list[Any] = [layer.bias for layer in group if layer.bias is not None]
        several = [weights, biases] if biases else [weights]
        if len(biases) in (0, len(group)) and all(_may_move(tensors, storages) for tensors in several):
            try:
                moved += sum(_move(tensors) for tensors in several)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                break  # there is no room to move; what lies apart is multiplied apart
    if moved and any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.empty_cache()  # the places that they left are too small for what comes
    return moved


@contextmanager
def _noting(model: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """Modules that get the same input tensor as the module before, both parts of one module."""
    groups: list[list[nn.Linear]] = []
    last: list[Any] = [None, None]
    hooks = []
    for parent in model.modules():
        for child in parent.children():
            if type(child) is nn.Linear:

                def note(module: nn.Linear, args: tuple[Any, ...], parent: nn.Module = parent) -> None:
                    given = [parent, args[0] if args else None]
                    if given[0] is last[0] and given[1] is last[1] and module not in groups[-1]:
                        groups[-1].append(module)
                    else:
                        groups.append([module])
                    last[:] = given

                hooks.append(child.register_forward_pre_hook(note))
    try:
        yield groups
    finally:
        last.clear()
        for hook in hooks:
            hook.remove()


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _may_move(tensors: Sequence[Any], storages: Counter[tuple[torch.device, int]]) -> bool:
    """Whether they are plain parameters that share memory with no other, and not adjacent already."""
    first = tensors[0]
    alike = len(tensors) > 1 and all(
        type(tensor) is nn.Parameter
        and (tensor.dtype, tensor.device, tensor.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        and tensor.is_contiguous()
        and tensor.device.type != "meta"
        and storages[_storage(tensor)] == 1
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        for tensor in tensors
    )
    return alike and joined_of(tensors) is None


def _move(parameters: Sequence[nn.Parameter]) -> int:
    """Move parameters side by side. Each has a storage of its own: who saves a model takes what shares one
    for the same weight.
    """
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([*map(len, parameters)]), strict=True):
            parameter.data = from_dlpack(part)
    return len(parameters)
