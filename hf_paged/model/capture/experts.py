"""Mixtures of experts in captured steps: products by the experts that each row has chosen, without the host.

Transformers gives all its mixtures one form, and one place where their products can be others
(`transformers.integrations.moe`). These take that place while a step is captured, module by module: no
setting of a configuration, which other models may share, is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kv.ops import on
from ...kv.reference import invariant
from ..mixtures import SEAM, in_form
from .chains import computed

OTHERS = ("eager", "grouped_mm", "batched_mm", None)
"""Implementations that these products stand for. Any other is the user's choice."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_mixture(module: nn.Module) -> bool:
    """True if a module's experts are in transformers' form, with weights that kernels can read."""
    mixture: Any = module
    if not in_form(module) or getattr(mixture, "_is_expert_parallel", False):
        return False
    weights = _weights(mixture)
    return (
        len({(weight.dtype, weight.device) for weight in weights if weight is not None}) == 1
        and all(weight is not None and type(weight) is nn.Parameter for weight in weights)
        and weights[0].dtype in FLOATS
    )


def _weights(mixture: Any) -> list[Any]:
    """The weights of both products, and their biases if it has any."""
    names = [_first(mixture), "down_proj"]
    names += [f"{name}_bias" for name in names] if mixture.has_bias else []
    return [mixture._parameters.get(name) for name in names]


def _first(mixture: Any) -> str:
    return "gate_up_proj" if mixture.has_gate else "up_proj"


def _operands(mixture: Any, weights: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Both weights [experts, depth, columns], and their biases or None. weights: as `_weights` has them, or
    such without data.
    """
    one, two, *biases = weights
    first_bias, second_bias = biases or (None, None)
    if not mixture.is_transposed:
        one, two = one.mT, two.mT
    return one, two, first_bias, second_bias


def gate_of(mixture: Any, activation: Callable[[Any], str | None]) -> str | None:
    """The kernels' name of what gates do, if it is what most mixtures' do."""
    default = getattr(sys.modules[SEAM], "_default_apply_gate", None)
    usual = mixture.has_gate and type(mixture)._apply_gate is default and mixture.is_concatenated
    return activation(mixture) if usual else None


def of_experts(
    kernels: Any,
    gate: str | None,
    mixture: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The mixture's answer [tokens, hidden]. gate: as `gate_of` has it."""
    chosen_here = getattr(mixture.config, "_experts_implementation", None) in OTHERS
    if not chosen_here or invariant.get() or hidden_states.ndim != 2:
        answer: torch.Tensor = type(mixture).forward(mixture, hidden_states, top_k_index, top_k_weights)
        return answer
    x, chosen, weights = map(computed, (hidden_states, top_k_index, top_k_weights))
    one, two, first_bias, second_bias = _operands(mixture, _weights(mixture))
    x = x.to(one.dtype)
    experts = one.shape[0]
    with on(x.device):
        routes = kernels.route(chosen, experts)
        inner = kernels.expert_product(x, one, routes, first_bias, activation=gate)
    if gate is None:
        inner = computed(mixture._apply_gate(inner) if mixture.has_gate else mixture.act_fn(inner))
    with on(x.device):
        outer = kernels.expert_product(inner.contiguous(), two, routes, second_bias, by_pair=True)
    if getattr(mixture, "has_post_expert_norm", False):
        outer = computed(mixture.post_expert_norm(outer)).contiguous()
    with on(x.device):
        summed: torch.Tensor = kernels.expert_sum(outer, weights, chosen, experts)
    return summed.to(hidden_states.dtype)


def calls_of(
    kernels: Any, gate: str | None, mixture: Any, rows: int, dtype: torch.dtype
) -> Iterator[tuple[Any, Callable[[], object]]]:
    """A call of each kernel of a mixture for so many rows, on tensors without data."""
    top = getattr(mixture.config, "num_experts_per_tok", None)
    if not isinstance(top, int):
        return
    one, two, first_bias, second_bias = _operands(
        mixture, [torch.empty_like(each, device="meta") for each in _weights(mixture)]
    )
    experts, depth, _ = one.shape
    chosen = torch.empty(rows, top, dtype=torch.long, device="meta")
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    inner = torch.empty(rows * top, two.shape[1], dtype=dtype, device="meta")
    outer = torch.empty(rows * top, two.shape[2], dtype=dtype, device="meta")
    weights = torch.empty(rows, top, dtype=dtype, device="meta")
    key = one.shape, two.shape, top, gate, first_bias is not None
    scores = torch.empty(rows, experts, dtype=torch.float32, device="meta")
    yield ("top", *key), partial(kernels.top, scores, top)
    yield ("route", *key), partial(kernels.route, chosen, experts)
    routes = kernels.Routes(
        torch.empty(rows * top, dtype=torch.int32, device="meta"),
        torch.empty(experts, 3, dtype=torch.int32, device="meta"),
        top,
    )
    yield (
        ("one", *key),
        partial(kernels.expert_product, x, one, routes, first_bias, activation=gate),
    )
    yield (
        ("two", *key),
        partial(kernels.expert_product, inner, two, routes, second_bias, by_pair=True),
    )
    yield ("sum", *key), partial(kernels.expert_sum, outer, weights, chosen, experts)
