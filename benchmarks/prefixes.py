"""Prefix reuse as a user meets it: calls that share a long beginning, a chat, and what the look at the
weights costs.

    python benchmarks/prefixes.py --json results.jsonl             # 8B shape on a GPU, about two minutes
    OMP_NUM_THREADS=1 python benchmarks/prefixes.py --shape tiny   # does it run? on any CPU, in a minute

calls   64 calls one after the other, 1,024 shared + 128 own + 32 new tokens: stock, pages, pages with prefix
        caching
turns   a chat of ten turns: the seconds of each with and without
check   milliseconds that a call spends on seeing whether the model is the same, against the call; the bar is 1 %
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from shapes import Report, build, common_parser, report_of

import hf_paged
from hf_paged.model.identity import Identity, identity_of
from hf_paged.model.registry import memory_of
from hf_paged.model.snapshot import ModelSnapshot

SIDES: dict[str, dict[str, Any]] = {
    "stock": {},
    "paged": {"cache_implementation": "paged"},
    "reused": {"cache_implementation": "paged", "cache_config": {"prefix_caching": True}},
}
CHECK_BAR = 0.01


class Bench:
    """One model, called in three ways."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self.model = build(options.shape, options.device, getattr(torch, options.dtype))
        self.model.generation_config.pad_token_id = 0
        self.on_gpu = self.model.device.type == "cuda"

    def words(self, tokens: int, seed: int) -> torch.Tensor:
        """Random ids [1, tokens], the same at every call with that seed."""
        random = torch.Generator(self.model.device).manual_seed(seed)
        return torch.randint(10, 1000, (1, tokens), device=self.model.device, generator=random)

    def call(self, side: str, ids: torch.Tensor, new: int) -> tuple[float, torch.Tensor]:
        """The seconds of a call of exactly `new` tokens, and its answer."""
        self.synchronize()
        begin = time.perf_counter()
        answer = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            **SIDES[side],
        )
        self.synchronize()
        return time.perf_counter() - begin, answer

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def warm(self, side: str, prompt: int, new: int) -> None:
        """Begin with empty pools, and let kernels be compiled and steps captured for calls of this size."""
        gc.collect()
        hf_paged.release(self.model)
        if self.on_gpu:
            torch.cuda.empty_cache()
        for seed in range(3):
            self.call(side, self.words(prompt, 100 + seed), new)
        hf_paged.invalidate(self.model)

    def computed(self) -> int:
        """The tokens of prompts that calls with prefix caching have computed."""
        return hf_paged.stats(self.model).computed


def calls(bench: Bench) -> None:
    options = bench.options
    bench.report.table(
        "calls", f"{options.calls} calls, {options.shared} shared + {options.own} own + {options.new} new tokens",
        side=("", ""), seconds=("all calls, s", ".2f"), first=("first, ms", ".1f"), median=("median, ms", ".1f"),
        ratio=("all / stock", ".3f"), prompt=("prompt tokens computed", ",d"), same=("same tokens as stock", ".1%"),
    )  # fmt: skip
    shared = bench.words(options.shared, 1)
    prompts = [torch.cat([shared, bench.words(options.own, 1000 + i)], 1) for i in range(options.calls)]
    expected, whole = None, 0.0
    for side in SIDES:
        with bench.report.surviving(f"calls, {side}"):
            bench.warm(side, options.shared + options.own, options.new)
            before = bench.computed()
            timed = [bench.call(side, ids, options.new) for ids in prompts]
            seconds = [one for one, _ in timed]
            answers = torch.cat([answer[:, -options.new :] for _, answer in timed])
            expected = answers if expected is None else expected
            whole = whole or sum(seconds)
            bench.report.row(
                side=side, seconds=sum(seconds), first=seconds[0] * 1e3, median=statistics.median(seconds[1:] or seconds) * 1e3,
                ratio=sum(seconds) / whole, same=(answers == expected).float().mean().item(),
                prompt=bench.computed() - before if side == "reused" else sum(ids.shape[1] for ids in prompts),
            )  # fmt: skip
    print(f"\n{hf_paged.stats(bench.model)}", flush=True)


def turns(bench: Bench) -> None:
    options = bench.options
    bench.report.table(
        "turns", f"A chat: {options.shared} tokens, then messages of {options.own // 2}, answers of {options.new}; ms of a turn",
        turn=("turn", "d"), tokens=("tokens before it", ",d"), stock=("stock", ".1f"), paged=("paged", ".1f"), reused=("reused", ".1f"),
        ratio=("reused / stock", ".3f"),
    )  # fmt: skip
    longest = options.shared + 10 * (options.own // 2 + options.new)
    found: dict[str, list[float]] = {}
    lengths: list[int] = []
    for side in SIDES:
        bench.warm(side, longest - options.new, options.new)
        told, found[side], lengths = bench.words(options.shared, 1), [], []
        for turn in range(10):
            lengths.append(told.shape[1])
            seconds, answer = bench.call(side, told, options.new)
            found[side].append(seconds * 1e3)
            told = torch.cat([answer, bench.words(options.own // 2, 500 + turn)], 1)
    for turn, tokens in enumerate(lengths):
        values = {side: times[turn] for side, times in found.items()}
        bench.report.row(turn=turn + 1, tokens=tokens, **values, ratio=values["reused"] / values["stock"])


def check(bench: Bench) -> None:
    options, model = bench.options, bench.model
    bench.report.table(
        "check", "What a call spends on seeing whether the model is the same, ms",
        begin=("in the beginning", ".3f"), end=("behind its last step, while a device works", ".3f"), again=("all weights, once", ".2f"),
        turns=("calls until all is read", "d"), call=("a call", ".1f"), blind=("a call that does not look", ".1f"),
        part=("of the call", ".2%"), met=("1 %", ""),
    )  # fmt: skip
    ids = torch.cat([bench.words(options.shared, 1), bench.words(options.own, 2)], 1)
    bench.warm("reused", ids.shape[1], options.new)
    identity = identity_of(model)

    def timed(what: Callable[[], Any], rounds: int = 20) -> float:
        times = []
        for _ in range(rounds):
            bench.synchronize()
            begin = time.perf_counter()
            what()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    with memory_of(model).lock:
        state = identity.prefix_key(ModelSnapshot(model))
        begin = timed(lambda: identity.prefix_key(ModelSnapshot(model)))
        end = timed(lambda: identity.still(ModelSnapshot(model), state, identity.moves))

        def renew() -> None:
            with torch.no_grad():
                next(model.parameters()).add_(0)
            identity.prefix_key(ModelSnapshot(model))
            identity.prefix_key(ModelSnapshot(model))

        again = timed(renew, 3) - begin
    calls: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * options.rounds):  # in turns: what differs between them is the looking
        with blind(identity) if turn % 2 else nullcontext():
            calls[turn % 2 == 1].append(bench.call("reused", ids, options.new)[0])
    call, unseen = (statistics.median(calls[side]) for side in (False, True))
    part = (call - unseen) / call
    bench.report.row(
        begin=begin * 1e3, end=end * 1e3, again=again * 1e3, turns=identity.turns, call=call * 1e3, blind=unseen * 1e3, part=part,
        met="met" if part <= CHECK_BAR else "no",
    )  # fmt: skip


@contextmanager
def blind(identity: Identity) -> Iterator[None]:
    """Checks of the model find what the last one found, at no price."""
    _, _, state = identity._states[-1]
    walk = ModelSnapshot._walk
    identity.prefix_key = lambda _: state  # type: ignore[method-assign]
    identity.still = lambda *_: True  # type: ignore[method-assign]
    ModelSnapshot._walk = lambda _: ()  # type: ignore[method-assign]
    try:
        yield
    finally:
        del identity.prefix_key, identity.still  # type: ignore[method-assign]
        ModelSnapshot._walk = walk  # type: ignore[method-assign]


SECTIONS: dict[str, Callable[[Bench], None]] = {"calls": calls, "turns": turns, "check": check}


def main() -> None:
    parser = common_parser(__doc__, SECTIONS)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--own", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=20, help="calls that look at the model, and that do not"
    )
    options = parser.parse_args()
    report = report_of(options)
    bench = Bench(options, report)
    for name in options.sections:
        begin = time.perf_counter()
        with report.surviving(name):
            SECTIONS[name](bench)
        print(f"({name}: {time.perf_counter() - begin:.0f} s)", flush=True)
    report.end()


if __name__ == "__main__":
    main()
