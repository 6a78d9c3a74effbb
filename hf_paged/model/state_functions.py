"""The functions by which layers step recurrent states, over slots instead of tensors.

Every mixer with a state calls a function of its own modeling file for one token of each row. In a captured
step a layer is given a `SlotState` in the place of the state. A known function that gets one runs a kernel,
which reads each state from its slot once and writes it once. Functions with other parameters, and layers that
call none of them, compute with tensors that are gathered before and scattered behind them.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..kv.layout import StateLayout
from ..kv.ops import on
from .device_map import runs_class_forward
from .lazy import LazyTensor, as_dense


class SlotState(LazyTensor):
    """The states [rows, ...] of a layer in a captured step, in their slots.

    Code that computes with it gets the gathered tensor.
    """

    def __init__(
        self,
        layout: StateLayout,
        steps: Any,
        states: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """steps: the kernels; states [slots, ...]; source and target [rows]: slots to read and to write, -1
        for none.
        """
        self.steps = steps
        self.states = states
        self.source = source
        self.target = target
        self.stepped = False
        """True if a kernel has written the slots."""

    @staticmethod
    def __new__(cls, layout: StateLayout, steps: Any, states: Any, source: Any, target: Any) -> Any:
        return LazyTensor.__new__(cls, (len(source), *layout.shape), layout.dtype, layout.device)

    @property
    def in_slots(self) -> bool:
        """True if the states lie in the slots alone: no tensor of them has been handed out."""
        return self._dense is None

    def _make(self) -> torch.Tensor:
        """The states as they are now, gathered."""
        return self.states.index_select(0, self.source.clamp(min=0))

    def step(self, kernel: str, *given: Any, **options: Any) -> torch.Tensor:
        """Step the states by one token of each row; the answer of that kernel."""
        with on(self.device):
            answer: torch.Tensor = getattr(self.steps, kernel)(
                *given, self.states, self.source, self.target, **options
            )
        self.source = self.target
        self.stepped = True
        return answer

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> SlotState:
        """Change the states, unless what is to be copied is what the slots hold already."""
        if source is not self:
            self.dense().copy_(as_dense(source), non_blocking)
        return self


# ---- what the functions do instead, given a SlotState


class _Unfit(Exception):
    """Arguments that the kernel does not compute with; the reason."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _Unfit(reason)


def _conv(
    state: SlotState,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """hidden_states [rows, channels, 1]; weight [channels, taps]."""
    _require(hidden_states.shape == (*state.shape[:2], 1), "there is more than one token of a row")
    _require(activation in (None, "silu", "swish"), f"the activation is {activation!r}")
    _require(weight.shape == state.shape[1:] and weight.is_contiguous(), "the state is no window of inputs")
    used = None if activation is None else "silu"
    return state.step("conv_step", hidden_states[..., 0], weight, bias, activation=used).unsqueeze(-1)


def _delta(
    state: SlotState,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key [rows, 1, key_heads, D], value [rows, 1, heads, Dv], g [rows, 1, heads] or
    [rows, 1, heads, D], beta [rows, 1, heads].
    """
    one = query.shape[:2] == (state.shape[0], 1) and cu_seqlens is None
    _require(one, "there is more than one token of a row")
    _require(output_final_state, "the state is not wanted")
    given = [_dense_last(x[:, 0]) for x in (query, key, value, g, beta)]
    return state.step("delta_step", *given, l2norm=use_qk_l2norm_in_kernel).unsqueeze(1), state


def _ssm(
    state: SlotState,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """hidden_states, dt and z [rows, heads, P]; A [heads, P, N]; B and C [rows, groups, N]; D and dt_bias
    [heads, P]. dt, A, D and dt_bias are expanded from numbers of heads.
    """
    _require(hidden_states.shape == state.shape[:3], "there is more than one token of a row")
    x, b, c = map(_dense_last, (hidden_states, B, C))
    gate = None if z is None else _dense_last(z)
    by_head = _of_heads(dt, 2), _of_heads(A, 1)
    return state.step(
        "ssm_step", x, *by_head, b, c, _of_heads(D, 1), _of_heads(dt_bias, 1), gate=gate, softplus=dt_softplus
    )


def _dense_last(x: torch.Tensor) -> torch.Tensor:
    """x with the last stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_heads(x: torch.Tensor | None, dims: int) -> Any:
    """The first `dims` dimensions of x, which is expanded along the others."""
    if x is None:
        return None
    alike = all(x.stride(d) == 0 or x.shape[d] == 1 for d in range(dims, x.ndim))
    _require(alike, "a head has several rates")
    for _ in range(dims, x.ndim):
        x = x[..., 0]
    return x


DELTA = (
    "query",
    "key",
    "value",
    "g",
    "beta",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
)
SCAN = ("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z")
KNOWN: dict[str, tuple[str, str, tuple[str, ...], Callable[..., Any]]] = {
    "causal_conv1d_update": (
        "conv", "conv_state", ("hidden_states", "conv_state", "weight", "bias", "activation"), _conv,
    ),
    "torch_recurrent_gated_delta_rule": ("recurrent", "initial_state", DELTA, _delta),
    "recurrent_kimi_delta_attention": ("recurrent", "initial_state", DELTA, _delta),
    "mamba2_selective_state_update": ("recurrent", "state", SCAN, _ssm),
}  # fmt: skip
"""By name of a function of one token: the states that it steps, its parameter for them, all its parameters,
and what it does given a SlotState.
"""


@cache
def has_parameters(function: Any, names: Iterable[str]) -> bool:
    """True if a function has these parameters, keywords for others aside."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD) == names


class StateFunctions:
    """The functions of one token that a model's layers call, as far as they are known."""

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[tuple[str, str], ModuleType] = {}
        """The files of the functions, by their names and the functions'."""
        self.known: set[tuple[int, str]] = set()
        """Numbers of layers, and the states of them ("conv" or "recurrent") that known functions step."""
        self.reasons: Counter[str] = Counter()
        """Why states are stepped as gathered tensors, and how often."""
        for module in model.modules():
            number = module.__dict__.get("layer_idx")
            if isinstance(number, int) and runs_class_forward(module):
                self._find(number, type(module).forward)

    def _find(self, number: int, forward: Any) -> None:
        """Find the functions that the layer of a number calls."""
        forward = inspect.unwrap(forward)
        if not isinstance(forward, FunctionType):
            return
        place = sys.modules.get(forward.__module__)
        for name in forward.__code__.co_names:
            function = getattr(place, name, None) if name in KNOWN else None
            if place is None or function is None:
                continue
            which, _, parameters, _ = KNOWN[name]
            if has_parameters(function, parameters):
                self.places[place.__name__, name] = place
                self.known.add((number, which))
            else:
                self.reasons[f"{place.__name__}.{name} has other parameters"] += 1

    def substitute(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A function that stands for another meanwhile: without states in slots it is that one."""
        return partial(self._call, name, stock)

    def _call(self, name: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _, its_state, parameters, ours = KNOWN[name]
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        state = given.pop(its_state, None)
        if isinstance(state, SlotState) and state.in_slots:
            try:
                return ours(state, **given)
            except _Unfit as reason:
                self.reasons[f"{name}: {reason}"] += 1
        named = {key: as_dense(value) for key, value in kwargs.items()}
        return stock(*map(as_dense, args), **named)


stepping: ContextVar[StateFunctions | None] = ContextVar("hf_paged_state_functions", default=None)
"""The functions that step states by slot now, in this thread; set within captured forwards."""
