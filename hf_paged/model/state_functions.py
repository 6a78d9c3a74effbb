"""The functions by which layers step recurrent states, over slots instead of tensors.

Every mixer with a state calls functions of its own modeling file. While a forward of ours runs, each asks
first what answers it in its thread: `StateFunctions` in captured steps, `FlatStates` in flat ones.

A captured step has one token of each row. A layer is given a `SlotState` in the place of the state. A known
function that gets one runs a kernel, which reads each state from its slot once and writes it once. Functions
with other parameters, and layers that call none of them, compute with tensors that are gathered before and
scattered behind them.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, cached_property
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kv import fork_safe_lock
from ..kv.layout import StateLayout
from ..kv.ops import on
from .device_map import runs_class_forward
from .lazy import LazyTensor, NotCapturable, as_dense
from .source import STANDS_FOR

logger = logging.getLogger("hf_paged")


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
        borders: torch.Tensor | None = None,
        limit: tuple[float, float] | None = None,
    ) -> None:
        """steps: the kernels; states [slots, ...]; source and target [rows]: slots to read and to write, -1
        for none. borders [rows + 1]: row i has the step's tokens from borders[i] to borders[i + 1]; one each
        without. limit: the least and the most time that tokens of a prompt take in the layer's scan.
        """
        self.borders = borders
        self.limit = limit
        self.steps = steps
        self.states = states
        self.source = source
        self.target = target
        self.stepped = False
        """True if a kernel has written the slots."""
        self.part_of: tuple[SlotState, int] | None = None
        """The states of all heads, and the number of the head that these are of."""
        self._stepped: list[int] = []
        """The heads whose slots a kernel has written, while others' are to come."""

    @staticmethod
    def __new__(
        cls,
        layout: StateLayout,
        steps: Any,
        states: Any,
        source: Any,
        target: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        return LazyTensor.__new__(cls, (len(source), *layout.shape), layout.computed, layout.device)

    @property
    def in_slots(self) -> bool:
        """True if the states lie in the slots alone: no tensor of them has been handed out."""
        return self._dense is None and (self.part_of is None or self.part_of[0].in_slots)

    def _make(self) -> torch.Tensor:
        """The states as they are now, gathered."""
        if self.borders is not None:
            raise NotCapturable("a layer computes with states of rows that take several tokens")
        if self.part_of is not None:
            states, head = self.part_of
            return states.dense()[:, head]
        found = self.states.index_select(0, self.source.clamp(min=0)).to(self.dtype)
        for head in self._stepped:
            found[:, head] = self.states[:, head].index_select(0, self.target.clamp(min=0)).to(self.dtype)
        return found

    # ---- heads that are computed one by one, as Zamba's layers do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.stack.default:
            whole = whole_of(*args, **(kwargs or {}))
            if whole is not None:
                return whole
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self.in_slots and isinstance(index, tuple) and len(index) == 2:
            rows, number = index
            if rows == slice(None) and isinstance(number, int) and 0 <= number < self.shape[1]:
                return self.head(number)
        return self.dense()[index]

    def head(self, number: int) -> SlotState:
        """The states [rows, ...] of one head of states [rows, heads, ...]."""
        layout = StateLayout(self.device, self.states.dtype, tuple(self.shape[2:]), self.dtype)
        states = self.states[:, number]
        part = SlotState(layout, self.steps, states, self.source, self.target, self.borders)
        part.part_of = self, number
        return part

    def _note(self, head: int) -> None:
        """A kernel has written a head's slots."""
        self._stepped.append(head)
        if len(self._stepped) == self.shape[1]:
            self._stepped = []
            self._advance()

    def _advance(self) -> None:
        """A kernel has written the slots, which later ones read."""
        self.source = self.target
        self.stepped = True
        if self.part_of is not None:
            states, head = self.part_of
            states._note(head)

    def step_spans(self, kernel: str, *given: Any, **options: Any) -> torch.Tensor:
        """Step the states by the tokens of each row: by one, or by several."""
        assert self.spans is not None
        begins, ends = self.spans
        slots = self.states, self.source, self.target
        with on(self.device):
            getattr(self.steps, f"{kernel}_step")(*map(as_dense, given), *slots, spans=self.spans, **options)
        return self.step(f"{kernel}_spans", *given, begins=begins, ends=ends, least=2, **options)

    @property
    def spans(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where the tokens of each row begin and end; None if each has one."""
        return None if self.borders is None else (self.borders[:-1], self.borders[1:])

    def fits(self, x: torch.Tensor) -> bool:
        """True if x [tokens, ...] may be the tokens of the rows."""
        return self.borders is not None or len(x) == len(self.source)

    def step(self, kernel: str, *given: Any, **options: Any) -> torch.Tensor:
        """Step the states by one token of each row; the answer of that kernel."""
        with on(self.device):
            answer: torch.Tensor = getattr(self.steps, kernel)(
                *map(as_dense, given), self.states, self.source, self.target, **options
            )
        self._advance()
        return answer

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> SlotState:
        """Change the states, unless what is to be copied is what the slots hold already."""
        if source is not self:
            self.dense().copy_(as_dense(source), non_blocking)
        return self


def whole_of(parts: Sequence[Any], dim: int = 0) -> SlotState | None:
    """The states of all heads, if these are all of them in their order."""
    first = parts[0].part_of if isinstance(parts[0], SlotState) else None
    if first is None or dim != 1 or len(parts) != first[0].shape[1] or not first[0].in_slots:
        return None
    for number, part in enumerate(parts):
        if not isinstance(part, SlotState) or part.part_of is None:
            return None
        if part.part_of[0] is not first[0] or part.part_of[1] != number:
            return None
    return first[0]


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
    _require(hidden_states.shape[1:] == (state.shape[1], 1), "there is more than one token of a row")
    _require(state.fits(hidden_states), "there are other rows")
    _require(activation in (None, "silu", "swish"), f"the activation is {activation!r}")
    _require(weight.shape == state.shape[1:] and weight.is_contiguous(), "the state is no window of inputs")
    used = None if activation is None else "silu"
    given = hidden_states[..., 0], weight, bias
    if state.spans is None:
        return state.step("conv_step", *given, activation=used).unsqueeze(-1)
    out = hidden_states.new_zeros(hidden_states.shape[:2])
    return state.step_spans("conv", *given, out=out, activation=used).unsqueeze(-1)


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
    one = query.shape[1] == 1 and state.fits(query) and cu_seqlens is None
    _require(one, "there is more than one token of a row")
    _require(output_final_state, "the state is not wanted")
    given = [dense_last(x[:, 0]) for x in (query, key, value, g, beta)]
    if state.spans is None:
        return state.step("delta_step", *given, l2norm=use_qk_l2norm_in_kernel).unsqueeze(1), state
    out = torch.zeros_like(given[2], dtype=query.dtype)
    return state.step_spans("delta", *given, out=out, l2norm=use_qk_l2norm_in_kernel).unsqueeze(1), state


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
    one = hidden_states.shape[1:] == state.shape[1:3] and state.fits(hidden_states)
    _require(one, "there is more than one token of a row")
    x, b, c = map(dense_last, (hidden_states, B, C))
    by_head = _of_heads(dt, 2), _of_heads(A, 1)
    given = x, *by_head, b, c, _of_heads(D, 1), _of_heads(dt_bias, 1)
    if state.spans is None:
        gate = None if z is None else dense_last(z)
        return state.step("ssm_step", *given, gate=gate, softplus=dt_softplus)
    _require(z is None and state.limit is not None, "it is not known what chunks of prompts are scaled by")
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    return state.step_spans("ssm", *given, out=out, softplus=dt_softplus, limit=state.limit)


def _scan(
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
    """hidden_states, dt and z [rows, channels]; A [channels, N]; B and C [rows, N]; D, dt_bias [channels]."""
    one = hidden_states.shape[1:] == state.shape[1:2] and state.fits(hidden_states)
    _require(one, "there is more than one token of a row")
    x, times, rates, b, c = map(dense_last, (hidden_states, dt, A, B, C))
    given = x, times, rates, b, c, D, dt_bias
    options = {"gate": None if z is None else dense_last(z), "softplus": dt_softplus}
    if state.spans is None:
        return state.step("scan_step", *given, **options)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    return state.step_spans("scan", *given, out=out, **options)


def dense_last(x: torch.Tensor) -> torch.Tensor:
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
    "mamba_selective_state_update": ("recurrent", "state", SCAN, _scan),
}  # fmt: skip
"""By name of a function of one token: the states that it steps, its parameter for them, all its parameters,
and what it does given a SlotState.
"""


LIMITED = "mamba2_selective_state_update"
"""A function that is not told the limits of time, which `mamba2_chunk_scan` keeps to in prompts."""


def tell_once(model: nn.Module, fact: str) -> None:
    """Log a fact of a model with recurrent states, once for each class."""
    told = _told.setdefault(type(model), set())
    if fact not in told:
        told.add(fact)
        logger.warning("%s: %s", type(model).__name__, fact)


_told: weakref.WeakKeyDictionary[type[nn.Module], set[str]] = weakref.WeakKeyDictionary()


@cache
def has_parameters(function: Any, names: Iterable[str]) -> bool:
    """True if a function has these parameters, keywords for others aside."""
    parameters = inspect.signature(getattr(function, STANDS_FOR, function)).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD) == names


SELECTIVE = (
    "hidden_states",
    "dt",
    "A",
    "B",
    "C",
    "D",
    "z",
    "delta_bias",
    "delta_softplus",
    "return_last_state",
    "use_mambapy",
    "use_associative_scan",
)
WITHOUT_PAST = {"mamba_selective_scan": SELECTIVE}
"""By name of a function that begins without states, whatever is before its tokens: all its parameters."""
CAPTURED = {**{name: parameters for name, (_, _, parameters, _) in KNOWN.items()}, **WITHOUT_PAST}
"""The functions of captured steps likewise."""


class StateFunctions:
    """The functions of a model's own files by which its layers step states, as far as they are known."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, tuple[str, ...]] = CAPTURED) -> None:
        """parameters: of each function, by its name."""
        self.parameters = parameters
        self.places: dict[tuple[str, str], ModuleType] = {}
        """The files of the functions, by their names and the functions'."""
        self.called: set[tuple[int, str]] = set()
        """Numbers of layers, and the functions that they call."""
        self.limits: dict[int, tuple[float, float]] = {}
        """The least and the most time that a token of a prompt takes, by the layer's number."""
        self.reasons: Counter[str] = Counter()
        """Why functions are not used, and how often."""
        for module in model.modules():
            number = module.__dict__.get("layer_idx")
            if isinstance(number, int):
                for name in self._find(type(module).forward):
                    if runs_class_forward(module):
                        self.called.add((number, name))
                limit = module.__dict__.get("time_step_limit")
                if limit is not None and (number, LIMITED) in self.called:
                    self.limits[number] = float(limit[0]), float(limit[1])
        for reason in self.reasons:
            tell_once(model, f"{reason}, so transformers' own code steps its recurrent states")

    def _find(self, forward: Any) -> Iterator[str]:
        """Find the functions that a layer's forward calls."""
        forward = inspect.unwrap(forward)
        if not isinstance(forward, FunctionType):
            return
        place = sys.modules.get(forward.__module__)
        for name in forward.__code__.co_names:
            function = getattr(place, name, None) if name in self.parameters else None
            if place is None or function is None:
                continue
            if has_parameters(function, self.parameters[name]):
                self.places[place.__name__, name] = place
                yield name
            else:
                self.reasons[f"{place.__name__}.{name} has other parameters"] += 1

    @cached_property
    def known(self) -> set[tuple[int, str]]:
        """Numbers of layers, and their states ("conv" or "recurrent") that functions of one token step."""
        return {(number, KNOWN[name][0]) for number, name in self.called if name in KNOWN}

    def call(
        self, name: str, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The answer to a call of a function; without states in slots it is stock's."""
        if name not in KNOWN:
            return stock(*args, **kwargs)
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

    # ---- in the place of the files' functions

    def put_in(self) -> None:
        """Let calls of the functions ask `stepping` first, which is each thread's own. Twice is once."""
        with _changing:
            for key, place in self.places.items():
                if key not in _replaced:
                    _replaced[key] = Replaced.of(place, key[1])
                replaced = _replaced[key]
                replaced.owners.add(self)
                if getattr(place, key[1]) is replaced.stock:
                    setattr(place, key[1], replaced.ours)

    def take_out(self) -> None:
        """Give the files their functions back, unless others need them replaced. Twice is once."""
        with _changing:
            for key, place in self.places.items():
                replaced = _replaced.get(key)
                if replaced is None or self not in replaced.owners:
                    continue
                if replaced.owners == {self}:
                    if getattr(place, key[1]) is replaced.ours:
                        setattr(place, key[1], replaced.stock)
                    del _replaced[key]
                replaced.owners.discard(self)


class Replaced(NamedTuple):
    """A function of a file, what is in its place, and for whom."""

    stock: Callable[..., Any]
    ours: Callable[..., Any]
    owners: set[StateFunctions]

    @classmethod
    def of(cls, place: ModuleType, name: str) -> Replaced:
        stock = getattr(place, name)

        def ask(*args: Any, **kwargs: Any) -> Any:
            functions = stepping.get()
            return stock(*args, **kwargs) if functions is None else functions.call(name, stock, args, kwargs)

        setattr(ask, STANDS_FOR, stock)
        return cls(stock, ask, set())


_changing = fork_safe_lock()
_replaced: dict[tuple[str, str], Replaced] = {}
"""The functions that are replaced, by the names of files and functions."""


stepping: ContextVar[Any] = ContextVar("hf_paged_state_functions", default=None)
"""The answerer of calls of replaced functions, in this thread; None outside of forwards of ours."""
