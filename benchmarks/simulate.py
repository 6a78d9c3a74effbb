"""Plan past the machines: the scheduler's own code under a simulated clock, from one card to a thousand.

    python benchmarks/simulate.py --sections validate                 # against the measured runs of one card
    python benchmarks/simulate.py --processes 2 --json scale.jsonl    # all, some 40 minutes on two cores
    python benchmarks/simulate.py --draw                              # docs/scale.svg, of docs/scale.md's tables

Step times come from POINTS, KERNELS and PREFILL below, each a figure of docs/benchmarks.md: 21.9 us for a token beyond
the 1,024th of a step, 28.2 ns for a key that a row reads. Steps without prompts take 1.14 times the sum, fitted on the
1,132 of the first run; that run took 198 steps with prompts, 3.69 s, and simulated 199, 3.71 s.

A measured run is replayed as benchmarks/engine.py takes it: behind as many other requests, with the captures that the
engine's own CapturePool decides on, each CAPTURE seconds. Later captures are few (2 to 4 in a warm run, as counted on the
card) and fall when they fall: under a Poisson load they decide which first tokens are the last of a hundred.

The tables of docs/scale.md: 2 of 16 cards run the scheduler, 60 s warm up and 20 s count, with 256 sequences and 2,048
tokens a step at most. A turn on another card takes as long as one of the latest turns on the 2; far beyond the goals
that sample is rough. Users are PagedAttention's figure 11 (161 and 338 tokens, lognormal) and ServeGen's turns (arXiv
2505.09999: 3.5 a conversation, 100 s apart; that turns are geometric and pauses lognormal is assumed). A conversation
begins anew before 8,192 tokens. HTTP, tokenizers, captures, failures, rush hours, networks that cards share and the
price of hosts are left out. Rows by prefix are of 2026-11-23; the others route otherwise and are older, and one of them,
run again, was the same. The row of 1,000 replicas had a rule of the simulator's own: the router's index of a million
users would not fit that machine. benchmarks/fleet.py has the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from chart import BOLD, tables
from fleet import Fleet, Outcome, Replica, Router, Setup, StepTimes, Turn, quantile, step_of
from plot import INK, Scale, text
from traces import Ask, trace

from hf_paged.engine.worker.captured import HOLDERS
from hf_paged.kv import Memory
from hf_paged.model.capture.pool import CapturePool
from hf_paged.model.capture.step import CapturedStep, Size, bucket_of
from hf_paged.scheduling import Limits, StepPlan

DOCS = Path(__file__).parents[1] / "docs"


class Shape(NamedTuple):
    """A Llama. weights: of its layers, which every token is multiplied with."""

    layers: int
    hidden: int
    weights: float
    kv_heads: int
    vocabulary: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in bfloat16, with heads of 128."""
        return self.layers * self.kv_heads * 128 * 2 * 2


SHAPES = {
    "8B": Shape(32, 4096, 6.98e9, 8, 128256),
    "13B": Shape(40, 5120, 12.69e9, 40, 32000),
}


class Point(NamedTuple):
    """A decoding step that was measured on H200s, and the heading of docs/benchmarks.md that has it."""

    shape: str
    cards: int
    rows: int
    context: int
    ms: float
    heading: str


ENGINE, SEVERAL, ALONE = "The engine on an H200", "One engine on several GPUs", "The kernels alone"
POINTS = [
    Point("8B", 1, 1, 400, 5.00, ENGINE),
    Point("8B", 1, 8, 400, 5.17, ENGINE),
    Point("8B", 1, 64, 400, 6.48, ENGINE),
    Point("8B", 1, 256, 421, 11.08, ENGINE),
    Point("8B", 1, 1024, 421, 37.04, ENGINE),
    Point("13B", 1, 1, 400, 7.57, SEVERAL),
    Point("13B", 1, 64, 400, 13.71, SEVERAL),
    Point("13B", 1, 256, 400, 32.70, SEVERAL),
    Point("8B", 2, 1, 400, 3.91, SEVERAL),
    Point("8B", 2, 64, 400, 4.98, SEVERAL),
    Point("8B", 2, 256, 400, 8.10, SEVERAL),
    Point("13B", 2, 1, 400, 5.50, SEVERAL),
    Point("13B", 2, 64, 400, 9.31, SEVERAL),
    Point("13B", 2, 256, 400, 20.88, SEVERAL),
]
"""Prompts of 384; timed steps begin some tokens behind them."""


KERNELS = {
    "8B": [(64, 512, 39.6), (64, 2048, 124.9), (64, 8192, 472.6), (256, 512, 127.4), (256, 2048, 472.8)],
    "13B": [(8, 2048, 78.9), (64, 512, 153.6), (64, 1024, 298.8)],
}
"""Decode attention of one layer under ALONE: rows, context, microseconds."""
PREFILL = 384e12
"""Operations a second of causal attention, 8 x 2,048 tokens."""
PRODUCTS = 790e12
"""Operations a second of products, the floor's."""


DECODES = (1132, 9.75)
"""Steps without prompts of "512 requests, 256 at once", and their seconds ("Where it goes" in ENGINE)."""


CAPTURE = 2.9 / 19
"""Seconds, of the 19 captures of a new engine under "24 a second" in ENGINE."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line with the least squares."""
    x = sum(each for each, _ in points) / len(points)
    y = sum(each for _, each in points) / len(points)
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


@cache
def fit(shape: str, cards: int = 1) -> StepTimes:
    """The step times of a shape on so many cards.

    Attention comes from the kernels alone, the rest from whole steps. Beyond the largest step that was measured a
    token costs what it costs the 8B shape between 256 and 1,024 rows, in proportion to the weights: there the
    products decide. Steps of a trace take longer than the same rows in a steady state, because their lengths
    differ and a captured step for more rows stands in for them: by how much is fitted on one trace of one card.
    """
    made = SHAPES[shape]
    kernels = [(rows * context, us * 1e-6) for rows, context, us in KERNELS[shape]]
    key = slope(kernels) * made.layers / cards
    knots = [
        (each.rows, each.ms * 1e-3 - key * each.rows * each.context)
        for each in POINTS
        if (each.shape, each.cards) == (shape, cards)
    ]
    if (shape, cards) == ("8B", 1):
        (left, low), (right, high) = knots[-2:]
        token = (high - low) / (right - left)
    else:
        token = fit("8B").token * made.weights / SHAPES["8B"].weights / cards
    pair = 4 * made.hidden * made.layers / PREFILL / cards
    times = StepTimes(tuple(knots), token, key, pair)
    if (shape, cards) != ("8B", 1):
        return times
    found = replay(RUNS[0], times)
    return replace(times, decode=DECODES[1] / DECODES[0] / (sum(found.decoding) / len(found.decoding)))


# ---- against measured runs


class Measured(NamedTuple):
    """A run of docs/benchmarks.md. first: seconds, between: milliseconds, both p50 and p99."""

    name: str
    heading: str
    shape: str
    cards: int
    requests: int
    at_once: int
    speed: float
    first: tuple[float, float] | None = None
    between: tuple[float, float] | None = None
    rate: float | None = None
    warmed: float | None = None
    """At which rate the requests before came; None if all were there at once."""
    caching: bool | None = None
    blocks: int = 60_000
    preemptions: int | None = None


RUNS = [
    Measured("512 requests, 256 at once", ENGINE, "8B", 1, 512, 256, 11326, (1.23, 5.71), (14.97, 31.60)),
    Measured("1,024 at 1,024", ENGINE, "8B", 1, 1024, 1024, 14575, (2.69, 5.95), (35.67, 56.12)),
    Measured("the same, a second run", ENGINE, "8B", 1, 512, 256, 11740),
    Measured("13B, 512 at 256", ENGINE, "13B", 1, 512, 256, 5005, (2.36, 12.78), (34.84, 69.83)),
    Measured("the same, a second run", SEVERAL, "13B", 1, 512, 256, 5285),
    Measured("13B, 512 at 256, 2 cards", SEVERAL, "13B", 2, 512, 256, 9473),
    Measured("8B, 512 at 256, 2 cards", SEVERAL, "8B", 2, 512, 256, 18154),
    Measured("8 a second, 192", ENGINE, "8B", 1, 192, 256, 2076, (0.02, 0.32), (6.75, 13.20), rate=8),
    Measured("24 a second, 256", ENGINE, "8B", 1, 256, 256, 4639, (0.11, 0.46), (12.34, 39.75), rate=24),
    Measured("8 a second, 512, warm", ENGINE, "8B", 1, 512, 256, 2277, (0.02, 0.09), (5.90, 6.64), rate=8, warmed=8),
    Measured("24 a second, 1,024, warm", ENGINE, "8B", 1, 1024, 256, 6644, (0.02, 0.07), (7.51, 9.21), rate=24, warmed=24),
    Measured("1,024 tokens in common", ENGINE, "8B", 1, 64, 64, 3020, (0.46, 0.46), (6.87, 18.63), caching=True),
    Measured("the same, not cached", ENGINE, "8B", 1, 64, 64, 906, (1.15, 2.05), (32.58, 53.12), caching=False),
    Measured("512 at 256 on 3,091 blocks", ENGINE, "8B", 1, 512, 256, 8441, blocks=3091, preemptions=122),
]  # fmt: skip


class Replayed(NamedTuple):
    """A measured run, simulated: its turns, and the seconds of its steps without prompts."""

    turns: list[Turn]
    seconds: float
    preemptions: int
    decoding: list[float]

    @property
    def speed(self) -> float:
        return sum(turn.new for turn in self.turns) / self.seconds

    def first(self) -> tuple[float, float]:
        """Seconds to the first token, p50 and p99."""
        return ends([turn.first - turn.sent for turn in self.turns])

    def between(self) -> tuple[float, float]:
        """Milliseconds between tokens, the mean of each answer, p50 and p99."""
        return ends([(turn.finished - turn.first) / max(1, turn.new - 1) * 1e3 for turn in self.turns])


def ends(values: list[float]) -> tuple[float, float]:
    return quantile(values, 0.5), quantile(values, 0.99)


def asks_of(run: Measured) -> list[Ask]:
    """The requests of a run, as benchmarks/engine.py makes them."""
    vocabulary = SHAPES[run.shape].vocabulary
    if run.caching is None:
        return trace("sharegpt", run.requests, vocabulary)
    common = (trace("alpaca", 1, vocabulary, seed=3)[0].prompt * 1024)[:1024]
    own = trace("sharegpt", run.requests, vocabulary, seed=4)
    return [Ask([*common, *ask.prompt[:128]], 32) for ask in own]


class Captures(CapturePool):
    """Which steps an engine captures, by its own rules; nothing is computed."""

    def __init__(self) -> None:
        super().__init__(Memory())
        self._state: Any = object()

    def _capture(self, key: Any, source: Any) -> CapturedStep:
        step = CapturedStep()
        step.size = key.size
        step.trusted = True
        self._steps[key] = step
        self.counts["captured"] += 1
        return step

    def note(self, plan: StepPlan) -> float:
        """Seconds of what is captured behind a step."""
        batch = plan.batch
        decodes = batch.decodes == len(batch.sequences)
        single = all(count == 1 and samples for _, _, count, samples in batch.other_rows)
        rows = bucket_of(batch.decodes if decodes else batch.tokens, 8 if single else 4)
        source: Any = SimpleNamespace(
            size=Size("single" if single else "spans", rows),
            comparable=False,
            repeatable=True,
            is_worth_it=lambda seen: True,
        )
        before = self.counts["captured"]
        stand_in = self.find(self._state, source.size, HOLDERS[source.size.form])
        if stand_in is None or stand_in.size != source.size:
            self.learn(self._state, source, None, stand_in)
        return CAPTURE * (self.counts["captured"] - before)


def replay(
    run: Measured, times: StepTimes, captures: Captures | None = None, asks: Sequence[Ask] | None = None
) -> Replayed:
    """Simulate a measured run, or other requests in its place."""
    limits = Limits(max(2048, run.at_once), run.at_once)
    replica = Replica(times, run.blocks, limits, prefix_caching=run.caching is not False)
    decoding: list[float] = []
    pauses = [0.0]

    def watch(plan: StepPlan, seconds: float) -> None:
        pauses.append(0.0 if captures is None else captures.note(plan))
        if not step_of(plan).pairs:
            decoding.append(seconds)

    replica.watch = watch
    rate = run.rate if asks is None else run.warmed
    chance = random.Random(2)
    sent = 0.0
    turns = []
    for number, ask in enumerate(asks_of(run) if asks is None else asks):
        sent += chance.expovariate(rate) if rate else 0.0
        turns.append(Turn(number, len(ask.prompt), ask.new, ask.new, ids=tuple(ask.prompt), sent=sent))
    coming = deque(turns)
    now = 0.0
    while coming or not replica.idle:
        if replica.idle:
            now = coming[0].sent
            while coming and coming[0].sent <= now:
                replica.submit(coming.popleft())
        end = replica.begin(now)
        assert end is not None
        end += pauses[-1]
        while coming and coming[0].sent <= end:
            replica.submit(coming.popleft())
        for turn in replica.end(end):
            turn.finished = end
        now = end
    return Replayed(turns, now, replica.scheduler.counts["preemptions"], decoding)


def measured_again(run: Measured) -> tuple[Replayed, int]:
    """A measured run as it was taken, behind as many others: and how many steps were captured in it."""
    times = fit(run.shape, run.cards)
    captures = Captures()
    replay(run, times, captures, trace("sharegpt", run.requests, SHAPES[run.shape].vocabulary, seed=1))
    before = captures.counts["captured"]
    return replay(run, times, captures), captures.counts["captured"] - before


def show_validation() -> None:
    """Print measured runs beside simulated ones."""
    times = fit("8B")
    print(
        f"8B, one card: {times.token * 1e6:.1f} us a token beyond {times.knots[-1][0]}, {times.key * 1e9:.1f} ns a key"
    )
    print(f"steps without prompts take {times.decode:.2f} of that")
    columns = "run | tok/s | first token p50, s | p99 | between tokens p50, ms | p99 | preemptions | captures"
    head("Measured, simulated", *columns.split(" | "))
    for run in RUNS:
        found, captured = measured_again(run)
        cells = [beside(run.speed, found.speed, ",.0f")]
        for measured, simulated in ((run.first, found.first()), (run.between, found.between())):
            for i in range(2):
                cells.append(beside(measured[i], simulated[i], ".2f") if measured else "")
        cells.append("" if run.preemptions is None else f"{run.preemptions}, {found.preemptions}")
        cells.append(f"{captured}")
        line(run.name, *cells)


def beside(measured: float, simulated: float, form: str) -> str:
    return f"{measured:{form}}, {simulated:{form}} ({simulated / measured - 1:+.0%})"


def head(title: str, *columns: str) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def line(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


# ---- experiments


class Goals(NamedTuple):
    """What answers must keep: seconds that 99 of a hundred stay within, and answers for each prompt that comes."""

    first: float = 1.0
    between: float = 0.1
    answered: float = 0.85

    def met(self, outcome: Outcome) -> bool:
        answered = len(outcome.first) >= self.answered * outcome.sent
        in_time = quantile(outcome.first, 0.99) <= self.first and outcome.gap(0.99) <= self.between
        return answered and in_time


STEP, MOST = 250, 16
"""Users a card from one candidate of `most_users` to the next, and the first candidate that is not tried."""


class Case(NamedTuple):
    """A row of a table: its first cells, what is simulated, and whether users are added up to the goals."""

    section: str
    cells: tuple[str, ...]
    setup: Setup
    search: bool = True


def of_card(setup: Setup, users: int) -> Setup:
    """With so many users a card."""
    return replace(setup, users=users * setup.cards)


def run(setup: Setup) -> Outcome:
    gc.set_threshold(200_000, 20, 1000)  # a million users are many objects, and few of them are garbage
    return Fleet(setup, fit("8B"), SHAPES["8B"].token_bytes).run()


def most_users(setup: Setup, goals: Goals) -> Outcome:
    """The run with the most users a card, in steps of STEP, that keeps the goals; found by bisection."""
    low, high = 0, MOST
    best: Outcome | None = None
    while high - low > 1:
        middle = (low + high) // 2
        outcome = run(of_card(setup, middle * STEP))
        if goals.met(outcome):
            low, best = middle, outcome
        else:
            high = middle
    if best is None:
        raise ValueError(f"{STEP} users a card are too many for {goals}: {setup}")
    return best


def measure(setup: Setup, search: bool, goals: Goals, dollars: float) -> dict[str, Any]:
    """What a table needs of an outcome."""
    outcome = most_users(setup, goals) if search else run(setup)
    return {
        "cards": outcome.setup.cards,
        "users": outcome.setup.users,
        "speed": outcome.speed,
        "dollars": outcome.cost(dollars),
        "hits": (outcome.cached - outcome.fetched) / outcome.prompts,
        "fetched": outcome.fetched / outcome.prompts,
        "first": [quantile(outcome.first, 0.5), quantile(outcome.first, 0.99)],
        "between": outcome.gap(0.99),
        "preemptions": outcome.preemptions / len(outcome.first),
        "turns": len(outcome.first),
        "sent": outcome.sent,
    }


BASE = Setup(cards=16, simulated=2, warm=60.0, seconds=20.0)
HOST = replace(BASE, tier="host", tier_size=512, tier_speed=52.5)
SHARED = replace(BASE, tier="shared", tier_size=512, tier_speed=25)
DISK = replace(BASE, tier="shared", tier_size=4096, tier_speed=5)
"""Of the speeds, 52.5 GB/s was measured (docs/benchmarks.md, "Too few blocks"); 25 and 5 are assumed: a network card
of 200 Gb/s, and a disk for each card.
"""
TIERS = {
    "none": BASE,
    "own host, 512 GB, 52.5 GB/s": HOST,
    "shared memory, 512 GB a card, 25 GB/s": SHARED,
    "shared disks, 4 TB a card, 5 GB/s": DISK,
}
CURVES = {
    "random": replace(BASE, routing="random"),
    "prefix": BASE,
    "prefix, host": HOST,
    "least-loaded, shared": replace(SHARED, routing="least-loaded"),
}

APART = {"none": BASE, "shared memory": SHARED}
SAMPLES = [(1, 1), (8, 8), (8, 2), (1000, 2)]
"""Replicas, and how many of them run the scheduler. The last have a million users."""
PREFILLS: dict[str, dict[str, int]] = {
    "together, 2,048 tokens a step": {},
    "together, 512 tokens a step": {"tokens": 512},
    "1 card of 4 for prompts": {"prefill": 1},
    "2 cards of 4 for prompts": {"prefill": 2},
}


def cases() -> Iterable[Case]:
    """Every row of every table."""
    for routing, size in [*product(Router.POLICIES, (80,)), ("prefix", 20)]:
        yield Case("routing", (routing, f"{size} GB"), replace(BASE, routing=routing, cache=float(size)))
    for users, name in product((1000, 2000, 3000, 4000), CURVES):
        yield Case("load", (f"{users:,}", name), of_card(CURVES[name], users), search=False)
    for name, routing in product(TIERS, ("least-loaded", "prefix")):
        setup = of_card(replace(TIERS[name], routing=routing), 3000)
        yield Case("tier", (name, routing), setup, search=False)
    for admission in ("watermark", "future"):
        setup = of_card(replace(HOST, cache=10.0, admission=admission), 1500)
        yield Case("admission", ("10 GB", admission), setup, search=False)
    for tier, (name, changes) in product(APART, PREFILLS.items()):
        setup = of_card(replace(APART[tier], cards=4, simulated=None, **changes), 1500)
        yield Case("apart", (tier, name), setup, search=False)
    for cards, simulated in SAMPLES:
        setup = of_card(replace(HOST, cards=cards, simulated=simulated), 1000)
        yield Case("replicas", (f"{cards:,}", f"{simulated}"), setup, search=False)


COLUMNS = {
    "routing": ("routing", "cache a card"),
    "load": ("load", "cards"),
    "tier": ("tier", "routing"),
    "admission": ("cache a card", "admission"),
    "apart": ("tier", "prompts and answers"),
    "replicas": ("replicas", "of these simulated"),
}
"""The first columns of each section's table."""
FOUND = (
    "users a card | tok/s a card | $ a million | hits | fetched | first token p50 / p99, s | between p99, ms | "
    "preemptions a turn"
)


def show(section: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of a section."""
    head(section, *COLUMNS[section], *FOUND.split(" | "))
    for row in rows:
        first = " / ".join(f"{each:.2f}" for each in row["first"])
        line(
            *row["cells"], f"{row['users'] / row['cards']:,.0f}", f"{row['speed']:,.0f}", f"{row['dollars']:.3f}",
            f"{row['hits']:.0%}", f"{row['fetched']:.0%}", first, f"{row['between'] * 1e3:.0f}", f"{row['preemptions']:.3f}",
        )  # fmt: skip


def experiments(options: argparse.Namespace) -> None:
    """Run the cases of the sections side by side, and print their tables."""
    goals = Goals(options.first, options.between)
    chosen = [case for case in cases() if case.section in options.sections]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        running = {
            key: pool.submit(measure, *key, goals, options.dollars)
            for key in dict.fromkeys((case.setup, case.search) for case in chosen)
        }
        for case in chosen:
            found = running[case.setup, case.search].result()
            rows.append({"section": case.section, "cells": case.cells, **found})
            if options.json is not None:
                with options.json.open("a") as file:
                    print(json.dumps(rows[-1]), file=file)
    for section in dict.fromkeys(case.section for case in chosen):
        show(section, [row for row in rows if row["section"] == section])


# ---- the plots


WIDTH, HEIGHT, TOP, BOTTOM = 860, 310, 36, 236
COLOURS = dict(zip(CURVES, ("#d9622b", "#2f80ed", "#2a9d5c", "#9a7fc7"), strict=True))


def rows_of(page: str, section: str) -> dict[tuple[str, ...], dict[str, str]]:
    """The table of a section on a page: its rows by their first cells."""
    first = len(COLUMNS[section])
    for head, *rows in tables(page):
        if tuple(head) == (*COLUMNS[section], *FOUND.split(" | ")):
            return {tuple(row[:first]): dict(zip(head, row, strict=True)) for row in rows}
    raise SystemExit(f"docs/scale.md has no table that begins with {COLUMNS[section]}, for {section}")


def draw(page: str) -> str:
    """The plots, of the table of loads on docs/scale.md."""
    rows = rows_of(page, "load")
    first = {key: row["first token p50 / p99, s"].split(" / ")[1] for key, row in rows.items()}
    between = {key: row["between p99, ms"] for key, row in rows.items()}
    speed = {key: row["tok/s a card"] for key, row in rows.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<title>First token, time between tokens and throughput against users a card, simulated</title>",
        *draw_panel("First token, p99, s", first, 0),
        *draw_panel("Between tokens, p99, ms", between, 290),
        *draw_panel("Tokens a second and card", speed, 580),
    ]
    for i, (name, colour) in enumerate(COLOURS.items()):
        parts.append(text(50 + 200 * i, HEIGHT - 8, name, "start", colour, BOLD))
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_panel(title: str, cells: dict[tuple[str, ...], str], left: float) -> list[str]:
    """Lines through the values of a column, against users a card."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for (users, name), cell in cells.items():
        lines.setdefault(name, []).append((float(users.replace(",", "")), float(cell.replace(",", ""))))
    points = [point for line in lines.values() for point in line]
    x = Scale(min(points)[0], max(points)[0], left + 54, left + 260)
    y = Scale(min(value for _, value in points) / 1.2, max(value for _, value in points) * 1.2, BOTTOM, TOP)
    parts = [text(left + 20, 20, title, "start", more=BOLD)]
    for value in y.ticks():
        parts.append(f'<path d="M{left + 54:g} {y(value):g}h206" stroke="{INK}" stroke-opacity=".25"/>')
        parts.append(text(left + 46, y(value) + 4, f"{value:,g}", "end"))
    parts += [
        text(x(users), BOTTOM + 18, f"{users:,.0f}") for users in sorted({users for users, _ in points})
    ]
    parts.append(text(left + 157, BOTTOM + 34, "users a card"))
    for name, line in lines.items():
        path = "L".join(f"{x(users):g} {y(value):g}" for users, value in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
    return parts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = ["validate", *COLUMNS]
    parser.add_argument("--sections", nargs="+", choices=everything, default=everything)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=float, default=1.0, help="goal: p99 of the first token, seconds")
    parser.add_argument("--between", type=float, default=0.1, help="goal: p99 between tokens, seconds")
    parser.add_argument("--dollars", type=float, default=3.0, help="of a card and an hour, assumed")
    parser.add_argument("--json", type=Path, help="a file that gets a line for each row")
    parser.add_argument("--draw", action="store_true", help="only draw docs/scale.svg, of docs/scale.md")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.draw:
        (DOCS / "scale.svg").write_text(draw((DOCS / "scale.md").read_text()))
        return
    if "validate" in options.sections:
        show_validation()
    experiments(options)


if __name__ == "__main__":
    main()
