"""Recurrent states of sequences that lie in one row of tokens.

Stock's layers are told that no tokens are behind the row. They hand its tokens to functions of their own
files, which are answered here: each sequence goes by itself through the convolution or the recurrence, behind
the state in the slot that it reads, and its next state goes to the slot that it writes. What a layer then
hands to the cache is compared with what its function has answered, so that a layer with other code is known
by name before it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..kv import LayerGroup, state_steps
from ..kv.layout import StateLayout
from ..kv.state_scans import SCANNED, scan_tokens
from ..kv.state_spans import SpanRows, Spans, StateSpans, rounded
from ..kv.state_steps import times_of
from .lazy import NotFlat
from .state_functions import DELTA, SELECTIVE, SlotState, dense_last

StateName = tuple[int, str, int]
"""A layer's number, "conv" or "recurrent", and the number of the state in the layer."""
LEAST = 16
"""The shortest rows of several tokens."""
ANY_TIME = (0.0, float("inf"))
"""The limits of the time that tokens take, where a call of Mamba-2's scan names none."""
DELTA_CHUNK = 64
"""The tokens of a chunk of the gated delta rule, where a call does not name them."""


class StockCall(NamedTuple):
    """A call of a function of stock, which may be made again with other arguments."""

    stock: Callable[..., Any]
    positional: tuple[str, ...]
    """The names of the arguments that were given by place."""
    given: Mapping[str, Any]

    @classmethod
    def of(
        cls, stock: Callable[..., Any], names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> StockCall:
        """names: of all parameters, in their order."""
        return cls(stock, names[: len(args)], {**dict(zip(names, args, strict=False)), **named})

    def get(self, name: str) -> Any:
        """An argument; None if it is not given."""
        return self.given.get(name)

    def again(self, **changes: Any) -> Any:
        given = {**self.given, **changes}
        args = [given.pop(name) for name in self.positional]
        return self.stock(*args, **given)


class SelectiveScan(NamedTuple):
    """The arguments of a call of Mamba's selective scan, tokens before channels."""

    x: torch.Tensor
    """[rows, tokens, channels], as `times`; `rates` [channels, N]; `b` and `c` [rows, tokens, N]."""
    times: torch.Tensor
    rates: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    skip: torch.Tensor | None
    """[channels]: the part of x that goes around the scan."""
    gate: torch.Tensor | None
    """[rows, channels, tokens]"""

    @classmethod
    def of(cls, call: StockCall) -> SelectiveScan:
        x, dt, b, c = (call.get(name).transpose(1, 2) for name in ("hidden_states", "dt", "B", "C"))
        times = times_of(dt, call.get("delta_bias"), bool(call.get("delta_softplus")))
        return cls(x, times, call.get("A"), b, c, call.get("D"), call.get("z"))

    def behind(self, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer of the call behind states [rows, channels, N], and the states behind it."""
        out, states = scan_tokens(self.x, self.times, self.rates, self.b, self.c, past)
        return self.answer(out), states

    def answer(self, out: torch.Tensor) -> torch.Tensor:
        """The answers [rows, channels, tokens] of the scan's [rows, tokens, channels]."""
        if self.skip is not None:
            out = out + self.x * self.skip
        out = out.transpose(1, 2)
        return out if self.gate is None else out * F.silu(self.gate)


class Spanned(NamedTuple):
    """A kernel that takes all spans of several tokens by their slots."""

    kernel: str
    run: Callable[[Any, torch.Tensor, Spans], torch.Tensor]
    """Runs it, given the kernels, the states of a layer, and the spans."""


class FlatStates:
    """The states of the sequences of one row, while a forward of it runs."""

    def __init__(self, group: LayerGroup, spans: StateSpans, reasons: Iterable[str] = ()) -> None:
        """reasons: why functions of the model's files are not known."""
        self.group = group
        self.spans = spans
        self.reasons = reasons
        self.layer = -1
        """The last layer that convolves; a recurrence comes behind that."""
        self._row: tuple[StateName, torch.Tensor] | None = None
        """The inputs of the layer's convolution, which is to come."""
        self._answered: tuple[StateName, SlotState] | None = None
        """The states that the layer's recurrence has answered, which the layer is to keep."""
        self._heads = 0
        """The heads that it has answered, where a layer calls it head by head."""

    # ---- what a layer does with its states

    def settle(self) -> None:
        """Raise unless all states that the layer keeps are those of functions that are known."""
        if self._row is not None or self._answered is not None:
            raise self.unknown(self.layer)

    def begin(self, name: StateName, row: torch.Tensor) -> torch.Tensor:
        """A layer is about to convolve the row [1, C, tokens], as if no inputs were before it."""
        self.settle()
        self.layer = name[0]
        self._row = name, row
        return row

    def end(self, name: StateName, states: torch.Tensor) -> torch.Tensor:
        """The layer keeps states behind a recurrence."""
        if self._answered is None or self._answered[0] != name or self._answered[1] is not states:
            raise self.unknown(name[0])
        if self._heads not in (0, states.shape[1]):
            raise self.unknown(name[0])
        self._heads = 0
        self._answered = None
        return states

    def unknown(self, layer: int) -> NotFlat:
        """The error of a layer that computes with its states in another way."""
        reasons = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return NotFlat(f"layer {layer} advances its states by code that is not known{reasons}")

    # ---- what its functions answer

    def call(
        self, name: str, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The answer to a call of a function of a modeling file."""
        if name not in SPANNED:
            return stock(*args, **kwargs)
        names, answer = SPANNED[name]
        return answer(self, StockCall.of(stock, names, args, kwargs))

    def convolve(self, call: StockCall) -> torch.Tensor:
        """hidden_states [1, C, tokens]; weight [C, taps]."""
        if self._row is None or self._row[1] is not call.get("hidden_states"):
            answer: torch.Tensor = call.again()
            return answer
        name, row = self._row
        self._row = None
        self._require(row.ndim == 3 and row.shape[::2] == (1, self.spans.tokens))
        _, _, states = self._states(name)
        return self.spans.convolve(lambda x: call.again(hidden_states=x), row, states)

    def delta(self, call: StockCall) -> tuple[torch.Tensor, SlotState]:
        """query and key [1, tokens, key_heads, D], value [1, tokens, heads, Dv], g [1, tokens, heads] or
        [1, tokens, heads, D], beta [1, tokens, heads].
        """
        given = {name: call.get(name) for name in DELTA[:5]}
        self._require(call.get("initial_state") is None and bool(call.get("output_final_state")))
        chunk = call.get("chunk_size") or DELTA_CHUNK

        def single(steps: Any, rows: SpanRows, states: torch.Tensor) -> torch.Tensor:
            x = [dense_last(rows.take(each)[:, 0]) for each in given.values()]
            l2norm = bool(call.get("use_qk_l2norm_in_kernel"))
            answer: torch.Tensor = steps.delta_step(*x, states, rows.source, rows.target, l2norm=l2norm)
            return answer

        def chunks(rows: SpanRows, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x = {name: rows.take(each) for name, each in given.items()}
            x |= {name: rows.ended(x[name]) for name in ("g", "beta")}
            answer: tuple[torch.Tensor, torch.Tensor] = call.again(
                **x, chunk_size=rounded_chunk(rows.length, chunk), initial_state=past
            )
            return answer

        def spanned(steps: Any, states: torch.Tensor, spans: Spans) -> torch.Tensor:
            x = [dense_last(each[0]) for each in given.values()]
            out = x[0].new_empty(x[2].shape)
            answer: torch.Tensor = steps.delta_spans(
                *x, states, spans.source, spans.target, spans.begins, spans.ends, out,
                longest=spans.longest, l2norm=bool(call.get("use_qk_l2norm_in_kernel")),
            )  # fmt: skip
            return answer

        size = chunk, LEAST
        return self._recur(given["query"], size, single, chunks, Spanned("delta_spans", spanned))

    def scan(self, call: StockCall) -> Any:
        """hidden_states [1, tokens, heads, P], dt [1, tokens, heads], A, D and dt_bias [heads], B and C [1,
        tokens, groups, N].
        """
        self._require(call.get("initial_states") is None and bool(call.get("return_final_states")))
        self._require(call.get("z") is None)
        given = {name: call.get(name) for name in ("hidden_states", "dt", "B", "C")}
        rates, skip, bias = (call.get(name) for name in ("A", "D", "dt_bias"))
        softplus, limit = bool(call.get("dt_softplus")), call.get("dt_limit") or ANY_TIME

        def single(steps: Any, rows: SpanRows, states: torch.Tensor) -> torch.Tensor:
            x, dt, b, c = (dense_last(rows.take(each)[:, 0]) for each in given.values())
            slots = states, rows.source, rows.target
            answer: torch.Tensor = steps.ssm_step(x, dt, rates, b, c, skip, bias, *slots, softplus=softplus)
            return answer

        def chunks(rows: SpanRows, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x = {name: rows.take(each) for name, each in given.items()}
            # Times as stock begins, so that tokens behind the end of a sequence take none.
            x["dt"] = rows.ended(torch.clamp(times_of(x["dt"], bias, softplus), *limit))
            timed = {"dt_bias": None, "dt_softplus": False, "dt_limit": ANY_TIME}
            chunk = rounded_chunk(rows.length, call.get("chunk_size"))
            answer: tuple[torch.Tensor, torch.Tensor] = call.again(
                **x, **timed, chunk_size=chunk, initial_states=past
            )
            return answer

        def spanned(steps: Any, states: torch.Tensor, spans: Spans) -> torch.Tensor:
            x, dt, b, c = (dense_last(each[0]) for each in given.values())
            slots = states, spans.source, spans.target, spans.begins, spans.ends
            answer: torch.Tensor = steps.ssm_spans(
                x, dt, rates, b, c, skip, bias, *slots, x.new_empty(x.shape), softplus=softplus, limit=limit
            )
            return answer

        size = call.get("chunk_size"), LEAST
        return self._recur(given["hidden_states"], size, single, chunks, Spanned("ssm_spans", spanned))

    def selective_scan(self, call: StockCall) -> tuple[torch.Tensor, SlotState]:
        """All channels of a layer, or those of its next head."""
        self._require(bool(call.get("return_last_state")))
        scan = SelectiveScan.of(call)

        def single(steps: Any, rows: SpanRows, states: torch.Tensor) -> torch.Tensor:
            x, times, b, c = (
                dense_last(rows.take(each)[:, 0]) for each in (scan.x, scan.times, scan.b, scan.c)
            )
            answer: torch.Tensor = steps.scan_step(
                x, times, scan.rates, b, c, None, None, states, rows.source, rows.target
            )
            return answer

        def chunks(rows: SpanRows, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x, b, c = map(rows.take, (scan.x, scan.b, scan.c))
            return scan_tokens(x, rows.ended(rows.take(scan.times)), scan.rates, b, c, past)

        def spanned(steps: Any, states: torch.Tensor, spans: Spans) -> torch.Tensor:
            x, times, b, c = (dense_last(each[0]) for each in (scan.x, scan.times, scan.b, scan.c))
            slots = states, spans.source, spans.target, spans.begins, spans.ends
            out = x.new_empty(x.shape)
            answer: torch.Tensor = steps.scan_spans(x, times, scan.rates, b, c, None, None, *slots, out)
            return answer

        if self._answered is None:
            self._answered = self._behind(scan.x.device)
            self._heads = 0
        states = self._answered[1]
        if states.ndim > 3:
            self._require(self._heads < states.shape[1])
            states = states.head(self._heads)
            self._heads += 1
        out = self._through(scan.x, states, (SCANNED, LEAST), single, chunks, Spanned("scan_spans", spanned))
        return scan.answer(out), states

    def _recur(
        self,
        x: torch.Tensor,
        chunk: tuple[int, int],
        single: Callable[[Any, SpanRows, torch.Tensor], torch.Tensor],
        chunks: Callable[[SpanRows, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
        spanned: Spanned | None = None,
    ) -> tuple[torch.Tensor, SlotState]:
        """The answers [1, tokens, ...] of a recurrence, and the states behind it. chunk: the tokens of a
        chunk, and of the shortest rows. single: one token of rows by their slots. chunks: rows behind states.
        spanned: all spans of several tokens by their slots, where there is a kernel for it.
        """
        self._require(self._answered is None)
        name, answered = self._behind(x.device)
        out = self._through(x, answered, chunk, single, chunks, spanned)
        self._answered = name, answered
        return out, answered

    def _behind(self, device: torch.device) -> tuple[StateName, SlotState]:
        """The name of the states behind the layer's recurrence, and what stands for them."""
        name = self.layer, "recurrent", 0
        layout, steps, states = self._states(name)
        return name, SlotState(layout, steps, states, *self.spans.slots(device))

    def _through(
        self,
        x: torch.Tensor,
        answered: SlotState,
        chunk: tuple[int, int],
        single: Callable[[Any, SpanRows, torch.Tensor], torch.Tensor],
        chunks: Callable[[SpanRows, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
        spanned: Spanned | None = None,
    ) -> torch.Tensor:
        """The answers; the slots of `answered` then hold the states behind them."""
        self._require(x.shape[:2] == (1, self.spans.tokens))
        steps, states = answered.steps, answered.states
        out: torch.Tensor | None = None
        by_slots = spanned is not None and hasattr(steps, spanned.kernel)
        if spanned is not None and by_slots:
            out = spanned.run(steps, states, self.spans.several(x.device))
        for rows in self.spans.rows(*chunk, x.device):
            if rows.length == 1 and rows.has_past:
                found = single(steps, rows, states).unsqueeze(1)
            elif by_slots:
                continue
            else:
                past = state_steps.read(states, rows.source).to(answered.dtype) if rows.has_past else None
                found, after = chunks(rows, past)
                state_steps.write(states, rows.target, after)
            if out is None:
                out = found.new_empty((self.spans.tokens, *found.shape[2:]))
            rows.put(out, found)
        assert out is not None
        return out.unsqueeze(0)

    def _states(self, name: StateName) -> tuple[StateLayout, Any, torch.Tensor]:
        """The layout of a layer's state, the functions of one token, and the states [slots, ...]."""
        layout: StateLayout | None = self.group.layout(name)
        if layout is None:
            raise self.unknown(name[0])
        self.group.place(name, layout)
        store, place = self.group.store(name)
        return layout, store.steps or state_steps, store.of_layer[place]

    def _require(self, condition: bool) -> None:
        if not condition:
            raise self.unknown(self.layer)


def rounded_chunk(length: int, chunk: int) -> int:
    """The tokens of a chunk for rows of a length: a whole one is needless where they are shorter."""
    return rounded(min(length, chunk), chunk, LEAST)


CONV_FN = ("hidden_states", "weight", "bias", "activation")
CHUNKS = (*DELTA[:5], "chunk_size", *DELTA[5:])
SCANS = (
    "hidden_states",
    "dt",
    "A",
    "B",
    "C",
    "chunk_size",
    "D",
    "dt_bias",
    "initial_states",
    "dt_softplus",
    "dt_limit",
    "return_final_states",
)
SPANNED: dict[str, tuple[tuple[str, ...], Callable[[FlatStates, StockCall], Any]]] = {
    "causal_conv1d_fn": (CONV_FN, FlatStates.convolve),
    "torch_chunk_gated_delta_rule": (CHUNKS, FlatStates.delta),
    "chunk_kimi_delta_attention": (CHUNKS, FlatStates.delta),
    "mamba2_chunk_scan": (SCANS, FlatStates.scan),
    "mamba_selective_scan": (SELECTIVE, FlatStates.selective_scan),
}
"""By name of a function of several tokens: all its parameters, and what answers it."""
PARAMETERS = {name: parameters for name, (parameters, _) in SPANNED.items()}
