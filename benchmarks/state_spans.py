"""Kernels over recurrent states of a captured step, checked against float64 and timed: single tokens beside spans.

python benchmarks/state_spans.py [--only delta ssm] [--check]
TRITON_INTERPRET=1 python benchmarks/state_spans.py    # small shapes on a CPU: does it run, is it right?
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import hf_paged_kernels as kernels

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu"
MOST = 256
"""Sequences of a captured step."""
CHECKED = [1, 1, 1, 1, 3, 66, 2, 20, 0] if SMALL else [*[1] * 12, 200, 3, 64, 130, 2, 70, 0]
"""Tokens of the sequences that are compared."""
TIMED = {"256 rows": [1] * 256, "250 rows + 200 tokens": [1] * 250 + [200], "2048 tokens": [2048]}
ERRORS = {BF16: (1e-2, 5e-3), FP32: (2e-5, 2e-5)}
"""The error of answers and of states, as a share of their norm, that rounding explains."""
if SMALL:
    ERRORS[BF16] = 3e-2, 1.5e-2  # the interpreter cuts off where bfloat16 should be rounded
State = torch.Tensor
Reference = Callable[[torch.Tensor, State], tuple[torch.Tensor, State]]


class Case(NamedTuple):
    """One kernel of single tokens and one of spans, over the same inputs."""

    name: str
    dtype: torch.dtype
    given: tuple[Any, ...]
    options: dict[str, Any]
    state: tuple[int, ...]
    """The shape of a state, and its type."""
    held: torch.dtype
    out: tuple[int, ...]
    """The shape of a token's answer."""
    reference: Reference
    """In float64: the answers and next states of tokens [rows], behind states [rows, ...]."""

    def step(self, slots: Any, borders: Any, out: torch.Tensor) -> None:
        kernel = getattr(kernels, f"{self.name.split()[0]}_step")
        kernel(*self.given, *slots, spans=borders, out=out, **self.options)

    def spans(self, slots: Any, borders: Any, out: torch.Tensor) -> None:
        kernel = getattr(kernels, f"{self.name.split()[0]}_spans")
        kernel(*self.given, *slots, begins=borders[0], ends=borders[1], out=out, least=2, **self.options)


class Inputs:
    """Random numbers of one case."""

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        self.dtype = dtype
        self.tokens = tokens

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype or self.dtype, device=DEVICE)

    def split(self, *shapes: tuple[int, int]) -> list[torch.Tensor]:
        """Parts [tokens, *shape] of one product, as layers have them."""
        widths = [heads * dim for heads, dim in shapes]
        parts = self.noise(self.tokens, sum(widths)).split(widths, -1)
        return [part.view(self.tokens, *shape) for part, shape in zip(parts, shapes, strict=True)]


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(FP64) for x in tensors]


def delta(by_channel: bool, inputs: Inputs) -> Case:
    """Qwen3.5's shape of 8B, or Kimi-Linear's."""
    key_heads, heads, dim = (1, 2, 16) if SMALL else (32 if by_channel else 16, 32, 128)
    query, key, value = inputs.split((key_heads, dim), (key_heads, dim), (heads, dim))
    gates = (inputs.tokens, heads, dim) if by_channel else (inputs.tokens, heads)
    decay, beta = -inputs.noise(*gates, dtype=FP32).abs(), inputs.noise(inputs.tokens, heads).sigmoid()

    def reference(token: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        q, k, v, g, b = wide(*[x[token] for x in (query, key, value, decay, beta)])
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(heads // key_heads, 1) for x in (q, k))
        state = state * (g.exp()[..., None] if by_channel else g.exp()[..., None, None])
        change = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * b[..., None]
        state = state + k[..., None] * change[..., None, :]
        return torch.einsum("rhkv,rhk->rhv", state, q) / dim**0.5, state

    name = "delta by channel" if by_channel else "delta"
    given = query, key, value, decay, beta
    options = {"l2norm": True}
    return Case(name, inputs.dtype, given, options, (heads, dim, dim), FP32, (heads, dim), reference)


def ssm(states: int, inputs: Inputs) -> Case:
    """Nemotron-H's shape of 8B (128 states), or Falcon-H1's (256)."""
    heads, groups, width, dim = (
        (2, 1, 16, 16) if SMALL else (128, 8, 64, 128) if states == 128 else (32, 2, 128, 256)
    )
    x, b, c = inputs.split((heads, width), (groups, dim), (groups, dim))
    dt, bias, skip = inputs.noise(inputs.tokens, heads), inputs.noise(heads), inputs.noise(heads)
    rates = -inputs.noise(heads, dtype=FP32).exp()

    def reference(token: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        t = F.softplus(dt[token] + bias).to(FP64)
        one, ins, outs, rate, around = wide(x[token], b[token], c[token], rates, skip)
        ins, outs = (each.repeat_interleave(heads // groups, 1) for each in (ins, outs))
        state = state * (t * rate).exp()[..., None, None] + torch.einsum("rhp,rhn,rh->rhpn", one, ins, t)
        return torch.einsum("rhpn,rhn->rhp", state, outs) + one * around[:, None], state

    given = x, dt, rates, b, c, skip, bias
    shape = heads, width, dim
    return Case(
        f"ssm of {states}", inputs.dtype, given, {"softplus": True}, shape, FP32, (heads, width), reference
    )


def scan(inputs: Inputs) -> Case:
    """A Falcon-Mamba's shape of 7B."""
    channels, dim = (64, 16) if SMALL else (8192, 16)
    x, gate, dt = (each.flatten(1) for each in inputs.split(*[(channels, 1)] * 3))
    b, c = inputs.noise(inputs.tokens, dim), inputs.noise(inputs.tokens, dim)
    rates, skip = -inputs.noise(channels, dim, dtype=FP32).exp(), inputs.noise(channels)
    bias = inputs.noise(channels, dtype=FP32)

    def reference(token: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        t = F.softplus(dt[token] + bias.to(dt.dtype)).to(FP64)[..., None]
        one, ins, outs, rate, around = wide(x[token], b[token], c[token], rates, skip)
        state = state * (t * rate).exp() + t * ins[:, None] * one[..., None]
        out = torch.einsum("rcn,rn->rc", state, outs) + one * around
        return out * F.silu(gate[token].to(FP64)), state

    given = x, dt, rates, b, c, skip, bias
    options = {"softplus": True, "gate": gate}
    return Case("scan", inputs.dtype, given, options, (channels, dim), FP32, (channels,), reference)


def conv(inputs: Inputs) -> Case:
    """Qwen3.5's shape of 8B."""
    channels, taps = (64, 4) if SMALL else (8192, 4)
    x, _ = (each.flatten(1) for each in inputs.split((channels, 1), (channels, 1)))
    weight = inputs.noise(channels, taps)

    def reference(token: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        state = torch.cat([state[..., 1:], x[token].to(FP64)[..., None]], -1)
        return F.silu((state * weight.to(FP64)).sum(-1)), state

    options = {"activation": "silu"}
    return Case(
        "conv",
        inputs.dtype,
        (x, weight, None),
        options,
        (channels, taps),
        inputs.dtype,
        (channels,),
        reference,
    )


MAKERS: dict[str, list[Callable[[Inputs], Case]]] = {
    "delta": [partial(delta, False), partial(delta, True)],
    "ssm": [partial(ssm, 128), partial(ssm, 256)],
    "scan": [scan],
    "conv": [conv],
}


def borders(counts: list[int], most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of each of `most` sequences begin and end."""
    ends = torch.tensor(counts + [0] * (most - len(counts)), dtype=torch.int32).cumsum(0).to(torch.int32)
    both = torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(DEVICE)
    return both[:-1], both[1:]


def check(make: Callable[[Inputs], Case], dtype: torch.dtype) -> bool:
    """Compare a case with float64; false if it is off."""
    torch.manual_seed(0)
    tokens = sum(CHECKED)
    case = make(Inputs(dtype, tokens))
    rows = len(CHECKED)
    # In place; without a past; elsewhere; nowhere.
    source, target = torch.arange(rows), torch.arange(rows)
    source[[1, rows - 2]] = -1
    target[[2, rows - 3]] = torch.tensor([rows, rows + 1])
    target[[3, rows - 5]] = -1
    states = torch.randn(rows + 3, *case.state, device=DEVICE).to(case.held)
    before = states.clone()
    source, target = source.to(DEVICE), target.to(DEVICE)
    first, end = borders(CHECKED, rows)
    out = torch.zeros(tokens, *case.out, dtype=dtype, device=DEVICE)
    wanted = torch.zeros(tokens, *case.out, dtype=FP64, device=DEVICE)
    state = before[source.clamp(min=0)].to(FP64)
    state[source < 0] = 0
    for i in range(max(CHECKED)):
        here = (first + i < end).nonzero()[:, 0]
        token = (first[here] + i).long()
        wanted[token], state[here] = case.reference(token, state[here])
    for run in (case.step, case.spans):
        run((states, source, target), (first, end), out)
    moved = (target >= 0) & (end > first)
    kept = torch.ones(len(states), dtype=torch.bool, device=DEVICE)
    kept[target[moved]] = False
    whole = torch.equal(states[kept], before[kept])
    several = moved & (end - first > 1)
    found = [relative(out, wanted)]
    found += [relative(states[target[of]], state[of]) for of in (moved & ~several, several)]
    right = whole and found[0] <= ERRORS[dtype][0] and max(found[1:]) <= ERRORS[dtype][1]
    print(
        f"{case.name:18} {str(dtype).removeprefix('torch.'):9} answers {found[0]:.1e}  states of single tokens "
        f"{found[1]:.1e}, of spans {found[2]:.1e}  {'right' if right else 'WRONG'}",
        flush=True,
    )
    return right


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The error as a share of the norm; NaN counts as endless."""
    return float(((found.to(FP64) - wanted).norm() / wanted.norm()).nan_to_num(nan=float("inf")))


def measure(make: Callable[[Inputs], Case], best: float) -> None:
    """Print microseconds of a case in bf16, in steps as captured ones have them."""
    from triton.testing import do_bench

    for name, counts in TIMED.items():
        case = make(Inputs(BF16, sum(counts)))
        states = torch.randn(MOST + 1, *case.state, device=DEVICE).to(case.held)
        slots = torch.arange(MOST, device=DEVICE)
        out = torch.zeros(sum(counts), *case.out, dtype=BF16, device=DEVICE)
        given = (states, slots, slots), borders(counts, MOST), out
        step, spans = (1e3 * do_bench(captured(run, *given)) for run in (case.step, case.spans))
        share = 2 * counts.count(1) * states[0].nbytes / step / best * 1e6
        print(
            f"{case.name:18} {name:22} single tokens {step:8.1f} us ({share:4.0%} of a copy)  spans "
            f"{spans:8.1f} us",
            flush=True,
        )


def captured(run: Callable[..., None], *given: Any) -> Callable[[], Any]:
    """A replay of a graph of one launch, so that the host's time does not count."""
    run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*given)
    return graph.replay


def compile_all(makers: list[Callable[[Inputs], Case]]) -> None:
    """Compile the kernels of all cases beside each other, by their first launches."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count(), initializer=partial(torch.zeros, 1, device=DEVICE)) as pool:
        waiting = []
        for make in makers:
            for dtype in (BF16, FP32):
                case = make(Inputs(dtype, 512))
                states = torch.zeros(MOST + 1, *case.state, dtype=case.held, device=DEVICE)
                slots = torch.arange(MOST, device=DEVICE)
                out = torch.zeros(512, *case.out, dtype=dtype, device=DEVICE)
                given = (states, slots, slots), borders([512], MOST), out
                waiting += [pool.submit(run, *given) for run in (case.step, case.spans)]
        for launched in waiting:
            launched.result()
    torch.cuda.synchronize()
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    """Print what is compared, and a table of times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--check", action="store_true", help="time nothing")
    options = parser.parse_args()
    makers = [make for name in options.only for make in MAKERS[name]]
    if not SMALL:
        print(torch.cuda.get_device_name())
        compile_all(makers)
    right = [check(make, dtype) for make in makers for dtype in (BF16, FP32)]
    if not SMALL and not options.check:
        data = torch.ones(2**28, device=DEVICE)
        other = torch.empty_like(data)
        from triton.testing import do_bench

        best = 2 * data.nbytes / do_bench(lambda: other.copy_(data)) * 1e3
        print(f"a copy moves {best / 1e12:.2f} TB/s")
        for make in makers:
            measure(make, best)
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
