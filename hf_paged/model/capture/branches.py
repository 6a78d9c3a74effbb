"""Linear layers that are given one input: in a captured step of few rows they are branches of the graph.

One such product alone leaves most of the device idle (docs/benchmarks.md has a step with and without). Beyond
MOST_ROWS each of them fills the device.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..adapters.apply import OURS
from ..device_map import runs_class_forward
from ..ranks.tensor_parallel import COLUMNS
from ..source import definition_of
from ..streams import side_stream

MOST_ROWS = 128
Product = Callable[[torch.Tensor], torch.Tensor]


def layers_of_one_input(parent: nn.Module) -> list[list[nn.Linear]]:
    """The linear layers of a module that its forward gives one input, in the order of its calls."""
    found = []
    for names in given_alike(type(parent).forward) if runs_class_forward(parent) else ():
        layers: list[Any] = [getattr(parent, name, None) for name in names]
        layers = [getattr(layer, "base_layer", layer) for layer in layers]  # what an adapter of peft's wraps
        linear = list(dict.fromkeys(layer for layer in layers if type(layer) is nn.Linear))
        if len(linear) > 1 and len({layer.in_features for layer in linear}) == 1:
            found.append(linear)
    return found


def products_of(parent: nn.Module) -> list[dict[nn.Linear, Product]]:
    """These layers and how each computes its product, where it is its own or a rank's part of it."""
    several = [
        {layer: product for layer in layers if (product := _product(layer)) is not None}
        for layers in layers_of_one_input(parent)
    ]
    return [products for products in several if len(products) > 1]


def _product(layer: nn.Linear) -> Product | None:
    own = layer.__dict__.get("forward")
    plain = runs_class_forward(layer) or hasattr(own, COLUMNS)
    if not plain or hasattr(own, OURS):
        return None
    product: Product = own or partial(nn.Linear.forward, layer)
    return product


def at_once(x: torch.Tensor) -> bool:
    """True if products of x are branches."""
    few = x.numel() <= MOST_ROWS * x.shape[-1]
    return few and x.is_cuda and torch.cuda.is_current_stream_capturing()


def beside(x: torch.Tensor, products: Sequence[Product]) -> list[torch.Tensor]:
    """The products of x, which the device computes at once."""
    main = torch.cuda.current_stream(x.device)
    streams = [side_stream(x.device, f"branch {number}") for number in range(1, len(products))]
    others = []
    for stream, product in zip(streams, products[1:], strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            others.append(product(x))
    first = products[0](x)
    for stream in streams:
        main.wait_stream(stream)
    return [first, *others]


@cache
def given_alike(forward: Callable[..., Any]) -> list[list[str]]:
    """The names of modules that a forward calls with one of its own arguments, in the order of the calls."""
    definition = definition_of(forward)
    if definition is None:
        return []
    nodes = list(ast.walk(definition))
    written = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own = {argument.arg for argument in definition.args.args} - written
    calls = sorted(
        (node.args[0].id, node.lineno, node.col_offset, node.func.attr)
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and len(node.args) == 1
        and not node.keywords
        and isinstance(node.args[0], ast.Name)
    )
    names = [
        list(dict.fromkeys(name for *_, name in group))
        for argument, group in groupby(calls, key=lambda call: call[0])
        if argument in own
    ]
    return [each for each in names if len(each) > 1]
