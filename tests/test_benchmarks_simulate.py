"""The simulated fleet: the engine's own plans, every token once, and a clock that only goes forward."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import Engine, trace
from hf_paged.blocks import Prompt
from hf_paged.ray import routing
from hf_paged.scheduling import Limits, Scheduler

ROOT = Path(__file__).parent.parent


def _module(name: str) -> Any:
    """A script of benchmarks/, which is no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


fleet = _module("fleet")
simulate = _module("simulate")

TIMES = fleet.StepTimes(((1, 0.1), (256, 0.2)), token=1e-3, key=3e-7, pair=1e-8)
"""A slow card: few steps in many seconds."""
SMALL = fleet.Setup(
    cards=3, users=24, simulated=None, warm=0.0, seconds=100.0, mix=fleet.Mix(think=20.0, context=3500)
)
BYTES = 131072
"""Of a token's keys and values."""


class Recorded(fleet.Users):
    """Users that keep every prompt they sent."""

    def __init__(self, count: int, mix: Any, seed: int = 0) -> None:
        super().__init__(count, mix, seed)
        self.sent: list[Any] = []

    def begin(self) -> Any:
        for wait, turn in super().begin():
            self.sent.append(turn)
            yield wait, turn

    def next(self, turn: Any) -> tuple[float, Any]:
        wait, following = super().next(turn)
        self.sent.append(following)
        return wait, following


def _run(setup: Any) -> tuple[Any, Any, list[Any]]:
    """A fleet after its time, what came of it, and all turns."""
    made = fleet.Fleet(setup, TIMES, BYTES)
    made.users = Recorded(setup.users, setup.mix, setup.seed)
    outcome = made.run()
    return made, outcome, made.users.sent


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"routing": "random"},
        {"cache": 0.5, "admission": "future"},
        {"cache": 0.5},
        {"tier": "shared"},
        {"prefill": 1},
    ],
    ids=str,
)
def test_every_token_is_produced_once(changes: dict[str, Any]) -> None:
    """Also where sequences are preempted, blocks come from elsewhere, and answers change cards."""
    made, outcome, turns = _run(replace(SMALL, **changes))
    produced = sum(turn.produced for turn in turns)
    begun = sum(turn.first >= 0 for turn in turns)
    assert produced == outcome.gaps.total() + begun > 5_000
    assert made.turns
    assert all(turn.produced == turn.new for turn in made.turns)
    assert all(turn.produced <= turn.new for turn in turns)
    assert (outcome.preemptions > 0) == ("cache" in changes)
    for turn in made.turns:
        assert 0 <= turn.sent < turn.first <= turn.finished <= made.clock.now
        assert 0 <= turn.fetched <= turn.cached < turn.prompt
    for replica in made.replicas:
        replica.scheduler.check()
        replica.pool.check()


def test_the_clock_never_goes_back() -> None:
    made = fleet.Fleet(SMALL, TIMES, BYTES)
    times: list[float] = []
    for replica in made.replicas:
        replica.watch = lambda plan, seconds: times.append(made.clock.now)
    made.run()
    assert times == sorted(times)
    assert len(times) > 500
    with pytest.raises(ValueError, match="before now"):
        made.clock.at(made.clock.now - 1, print)


def test_events_of_one_time_keep_their_order() -> None:
    clock = fleet.Clock()
    seen: list[int] = []
    for number in range(3):
        clock.at(1.0, seen.append, number)
    clock.at(0.5, seen.append, 9)
    clock.run(until=2.0)
    assert seen == [9, 0, 1, 2]
    assert clock.now == 2.0


# ---- the scheduler's own plans


def test_a_replica_plans_what_the_engine_plans(tmp_path: Path) -> None:
    """One replica and a real engine that runs ahead, on the same requests: row for row."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    lengths = [(40, 9), (5, 30), (70, 12), (17, 3), (33, 25), (8, 8)]
    prompts = [[1 + (7 * i + j) % 60 for j in range(prompt)] for i, (prompt, _) in enumerate(lengths)]
    options = {"num_blocks": 9, "block_size": 16, "max_batch_tokens": 32, "max_batch_sequences": 4}
    path = tmp_path / "steps.jsonl"
    with Engine(LlamaForCausalLM(config).eval(), run_ahead=True, **options) as engine, engine.trace(path):
        handles = [
            engine.submit(prompt, max_new_tokens=new, do_sample=False)
            for prompt, (_, new) in zip(prompts, lengths, strict=True)
        ]
        while not all(handle.done for handle in handles):
            engine.step()
    real = [
        sorted((row.request, row.start, row.tokens) for row in step.rows)
        for step in trace.read(path).steps
        if step.rows
    ]

    replica = fleet.Replica(TIMES, 9, Limits(32, 4))
    plans: list[list[tuple[int, int, int]]] = []
    replica.watch = lambda plan, seconds: plans.append(
        sorted((row.sequence.group.request.number, row.start, row.count) for row in plan.rows)
    )
    for number, (prompt, (_, new)) in enumerate(zip(prompts, lengths, strict=True)):
        replica.submit(fleet.Turn(number, len(prompt), new, new, ids=tuple(prompt)))
    now = 0.0
    while (end := replica.begin(now)) is not None:
        replica.end(end)
        now = end
    assert plans == real
    assert any(start and count > 1 for plan in plans for _, start, count in plan)  # a prompt in chunks
    assert replica.scheduler.counts["preemptions"] > 0


def test_the_scheduler_is_the_real_one() -> None:
    assert type(fleet.Replica(TIMES, 8, Limits(16, 2)).scheduler) is Scheduler


# ---- what is cached


def test_without_a_cache_nothing_hits() -> None:
    _, without, _ = _run(replace(SMALL, prefix_caching=False))
    _, cached, _ = _run(SMALL)
    assert without.cached == 0 < cached.cached < cached.prompts
    assert fleet.quantile(without.first, 0.5) > fleet.quantile(cached.first, 0.5)


def test_a_larger_cache_hits_more_and_a_tier_fetches_the_rest() -> None:
    long = replace(SMALL, seconds=200.0)
    _, small, _ = _run(replace(long, cache=1.5))
    _, large, _ = _run(long)
    _, tier, _ = _run(replace(long, cache=1.5, tier="host"))
    shares = [outcome.cached / outcome.prompts for outcome in (small, tier, large)]
    assert shares == sorted(shares)
    assert shares[0] < shares[1]
    assert tier.fetched > 0 == small.fetched == large.fetched


def test_blocks_from_elsewhere_are_cached() -> None:
    replica = fleet.Replica(TIMES, 8, Limits(64, 4))
    turn = fleet.Turn(3, 100, 10, 10)
    replica.place(turn, 90)
    assert replica.cached(turn) == 80
    assert (replica.pool.held, replica.pool.cached) == (0, 6)
    replica.place(turn, 90)
    assert replica.pool.cached == 6
    replica.place(fleet.Turn(4, 200, 10, 10), 200)  # more than the pool has
    assert replica.cached(turn) == 80
    replica.pool.check()


def test_a_tier_drops_what_was_used_longest_ago() -> None:
    tier = fleet.Tier(100)
    tier.store(1, 40)
    tier.store(2, 40)
    assert tier.find(1) == 40
    tier.store(3, 50)
    assert [tier.find(each) for each in (1, 2, 3)] == [40, 0, 50]


# ---- routing


def test_routing_by_prefix_is_that_of_the_ray_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is the least loaded replica of the first rank of `routing.ranked`, with digests as names."""
    seen = []

    def watched(names: Any, loads: Any, *others: Any) -> list[list[str]]:
        ranks = routing.ranked(names, loads, *others)
        seen.append((names, dict(loads), ranks))
        return ranks

    monkeypatch.setattr(fleet, "ranked", watched)
    router = fleet.Router("prefix", 3, blocks=40)
    index = routing.PrefixIndex()
    index.keep(dict.fromkeys("012", 40))
    for i in range(60):
        turn = fleet.Turn(i % 7, 64 + 16 * (i // 7), 16, 16)
        chosen = router.send(turn)
        names, loads, ranks = seen[-1]
        assert chosen == int(min(ranks[0], key=lambda each: loads[each]))
        digests = Prompt(list(turn.tokens(turn.prompt)), fleet.BLOCK).digests
        index.add(str(chosen), digests)
        assert [index.match(each, digests) for each in "012"] == [
            router._index.match(each, names) for each in "012"
        ], "names are equal where digests are"
        if i % 3:
            router.done(chosen)
    assert len(seen) == 60


def test_ties_spread() -> None:
    assert [fleet.least_loaded([1, 1, 2, 1], start) for start in range(4)] == [0, 1, 3, 3]


@pytest.mark.parametrize("policy", fleet.Router.POLICIES)
def test_a_router_counts_what_is_outstanding(policy: str) -> None:
    router = fleet.Router(policy, 4)
    out = [(turn, router.send(turn)) for turn in [fleet.Turn(i % 5, 64, 16, 16) for i in range(40)]]
    counts = Counter(replica for _, replica in out)
    assert router.loads == [counts[replica] for replica in range(4)]
    if policy != "random":
        assert max(router.loads) <= 1.25 * 10 + 1
    for _, replica in out:
        router.done(replica)
    assert router.loads == [0, 0, 0, 0]
    if policy == "prefix":
        assert router.send(fleet.Turn(3, 80, 16, 16)) in {
            replica for turn, replica in out if turn.conversation == 3
        }


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="routing='nearest' is not one of"):
        fleet.Router("nearest", 2)
    with pytest.raises(ValueError, match="prefill=3 cards of 3"):
        replace(SMALL, prefill=3)
    with pytest.raises(ValueError, match="tier='tape'"):
        replace(SMALL, tier="tape")


def test_echoes_carry_their_share() -> None:
    """Cards that are not simulated take turns like those that are, and are not counted."""
    made, outcome, turns = _run(replace(SMALL, cards=6, users=120, simulated=2, routing="least-loaded"))
    answered = sum(turn.produced == turn.new for turn in turns)
    assert outcome.cards == 2
    assert len(made.turns) == pytest.approx(answered / 3, rel=0.15)


# ---- step times


@pytest.mark.parametrize(("shape", "cards"), [("13B", 1), ("8B", 2)])
def test_step_times_meet_their_points(shape: str, cards: int) -> None:
    times = simulate.fit(shape, cards)
    for point in simulate.POINTS:
        if (point.shape, point.cards) == (shape, cards):
            step = fleet.Step(point.rows, point.rows * point.context)
            assert times.seconds(step) == pytest.approx(point.ms * 1e-3)
    seconds = [times.seconds(fleet.Step(tokens)) for tokens in range(1, 2049)]
    assert seconds == sorted(seconds)


def test_the_figures_are_those_of_the_page() -> None:
    """Every measured figure stands under its heading of docs/benchmarks.md."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, re.M))
    figures = {name: set(re.findall(r"[\d.,]*\d", text)) for name, text in sections.items()}
    for point in simulate.POINTS:
        assert f"{point.ms:.2f}" in figures[point.heading], point
    for rows, context, us in (each for kernels in simulate.KERNELS.values() for each in kernels):
        assert f"{us:.1f}" in figures[simulate.ALONE], (rows, context)
    for run in simulate.RUNS:
        assert f"{run.speed:,}" in figures[run.heading], run
        for value in (*(run.first or ()), *(run.between or ())):
            assert f"{value:.2f}" in figures[run.heading], run


def test_a_measured_run_is_met() -> None:
    """Within the goal of a tenth, and with the number of steps that were counted on the card."""
    run = simulate.RUNS[0]
    found = simulate.replay(run, simulate.fit(run.shape))
    assert found.speed == pytest.approx(run.speed, rel=0.1)
    assert len(found.decoding) == pytest.approx(simulate.DECODES[0], rel=0.02)


def test_a_warm_engine_captures_as_few_steps_as_on_the_card() -> None:
    """By the engine's own rules: 3 were counted; a new engine captures most sizes once."""
    (run,) = [each for each in simulate.RUNS if each.name == "8 a second, 512, warm"]
    found, captured = simulate.measured_again(run)
    assert 2 <= captured <= 4
    assert found.speed == pytest.approx(run.speed, rel=0.1)
    captures = simulate.Captures()
    new = simulate.replay(run, simulate.fit(run.shape), captures)
    assert captures.counts["captured"] > 10
    assert new.between()[1] > found.between()[1]


def test_the_plots_are_those_of_the_page() -> None:
    """`python benchmarks/simulate.py --draw` draws the tables of docs/scale.md anew."""
    page = (ROOT / "docs" / "scale.md").read_text()
    drawn = simulate.draw(page)
    assert drawn == (ROOT / "docs" / "scale.svg").read_text()
    assert "scale.svg" in page
    with pytest.raises(SystemExit, match="has no table"):
        simulate.draw(page.replace("| load |", "| loads |"))


def test_goals_ask_for_answers_as_well() -> None:
    """A run whose answers fall behind its prompts has not settled, however soon the first tokens come."""
    outcome = fleet.Outcome(SMALL, 1, 100, 5, 5, 0, 0, [0.2] * 100, Counter({100: 10}), 0)
    assert simulate.Goals().met(outcome)
    assert not simulate.Goals().met(outcome._replace(sent=120))
    assert not simulate.Goals(first=0.1).met(outcome)
    assert not simulate.Goals(between=0.009).met(outcome)
    assert outcome.cost(3.6) == pytest.approx(1e3 / (5 / 100))
