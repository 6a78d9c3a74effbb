"""The engine on too few blocks: swapped, computed again or whatever costs less, every request gets its own
tokens (C23, C30, C31, C34).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import once_each
from engine_answers import KINDS, PROMPTS, _model, alone, answers, right
from engine_parts import block_bytes, block_pools, costs_of, layer_groups, preempt, running
from engine_steps import new_tokens, unseen_tokens, watch_plans
from families import BY_NAME, build

import hf_paged
from hf_paged.blocks import OutOfBlocks
from hf_paged.engine import Engine, EngineConfig, loop
from hf_paged.engine.preemption import Preemption
from hf_paged.engine.worker.pools import Pools
from hf_paged.kv import HostBlocks, host
from hf_paged.scheduling import ScheduledBatch, ScheduledRow, Scheduler, SequenceGroup, StepPlan, Swaps

NEW = 13
ASKED = [(p, k) for p in (1, 3, 5, 2) for k in range(len(KINDS))]
TIGHT = {
    "block_size": 2,
    "num_blocks": 56,
    "max_batch_tokens": 64,
    "max_batch_sequences": 30,
    "watermark": 0.0,
}
"""About a fifth of what those requests hold if there are enough."""


def run(engine: Engine, params: list[tuple[int, int]] = ASKED) -> list[list[list[int]]]:
    """The answers of all requests, submitted together."""
    handles = [engine.submit(PROMPTS[p], max_new_tokens=NEW, seed=p, **KINDS[k]) for p, k in params]
    found = [answers(handle.result()) for handle in handles]
    engine.check()
    stats = engine.stats()
    assert all(kind["held"] == 0 for kind in [*stats["blocks"].values(), *stats["host"].values()])
    return found


def expected(name: str, params: list[tuple[int, int]] = ASKED) -> list[list[list[int]]]:
    return [right(name, p, k, NEW) for p, k in params]


MODES: list[dict[str, Any]] = [
    {"preemption": "swap", "host_blocks": 400},
    {"preemption": "swap", "host_blocks": 25},
    {"preemption": "swap"},
    {"preemption": "recompute"},
    {"preemption": "auto"},
]


@pytest.mark.parametrize(("name", "mode"), once_each(["llama", "qwen2-window"], MODES))
def test_a_fifth_of_the_blocks_changes_no_token(name: str, mode: dict[str, Any]) -> None:
    """Greedy, processors, samples under a seed, beams; with windows and without."""
    with Engine(_model(name), prefix_caching=mode["preemption"] != "swap", **TIGHT, **mode) as engine:
        assert run(engine) == expected(name)
        stats = engine.stats()
    assert stats["preemptions"] > 4
    assert stats["preemptions"] == stats["swapped_out"] + stats["recomputed"]
    assert stats["swapped_in"] == stats["swapped_out"]
    assert stats["blocks_in"] <= stats["blocks_out"]
    if mode["preemption"] == "recompute":
        assert stats["swapped_out"] == stats["blocks_out"] == stats["bytes_out"] == 0
    elif mode.get("host_blocks") == 400:
        assert stats["recomputed"] == 0
        assert stats["blocks_in"] == stats["blocks_out"]
        assert stats["bytes_in"] == stats["bytes_out"] > 0
    elif mode.get("host_blocks") == 25:
        assert stats["swapped_out"] > 0
        assert stats["recomputed"] > 0


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", {"preemption": "swap", "host_blocks": 400}),
        ("qwen2-window", {"preemption": "swap", "host_blocks": 400}),
        ("qwen2-window", {"preemption": "swap", "host_blocks": 12}),
        ("llama", {"preemption": "recompute"}),
    ],
)
def test_a_group_that_leaves_while_its_step_is_in_flight(name: str, mode: dict[str, Any]) -> None:
    """Planned ahead: a group leaves with a token that the host has not heard of, and may turn out to have
    ended.
    """
    blind = [(p, k) for p in range(len(PROMPTS)) for k in (0, 2, 3)]
    with Engine(_model(name), prefix_caching=False, run_ahead=True, **TIGHT, **mode) as engine:
        handles = [engine.submit(PROMPTS[p], max_new_tokens=NEW, seed=p, **KINDS[k]) for p, k in blind]
        engine.step()
        engine.step()
        assert unseen_tokens(engine)
        assert [answers(handle.result()) for handle in handles] == expected(name, blind)
        engine.check()
        stats = engine.stats()
    assert stats["preemptions"] > 4
    assert (stats["swapped_out"] > 0) == (mode["preemption"] == "swap")
    assert (stats["recomputed"] > 0) == (mode.get("host_blocks") != 400)


def test_a_step_of_nothing_but_swaps() -> None:
    """Planned ahead: the older request waits to hear of its last token, the newer one finds no block and
    goes, and nobody has a row.
    """
    model = _model("llama")
    plans: list[StepPlan] = []
    for new in range(4, 16):
        with Engine(
            model,
            prefix_caching=False,
            run_ahead=True,
            block_size=2,
            num_blocks=26,
            preemption="swap",
            watermark=0.0,
        ) as engine:
            handles = [
                engine.submit(PROMPTS[p], max_new_tokens=n, do_sample=False) for p, n in ((1, new), (2, 24))
            ]
            watch_plans(engine, plans.append, empty=True)
            for handle, p, n in zip(handles, (1, 2), (new, 24), strict=True):
                assert answers(handle.result()) == alone(model, PROMPTS[p], max_new_tokens=n, do_sample=False)
    assert any(plan.swaps and not plan.rows for plan in plans)


def test_the_demand_is_five_times_that() -> None:
    with Engine(
        _model("llama"), prefix_caching=False, **{**TIGHT, "num_blocks": 1000, "max_batch_sequences": 60}
    ) as engine:
        run(engine)
        assert engine.stats()["preemptions"] == 0
        assert block_pools(engine)[0].peak_held > 5 * TIGHT["num_blocks"]


def test_work_under_pressure_is_bounded() -> None:
    """C31: who is swapped computes no token twice; who is computed again, some."""
    tokens = {}
    for mode in ("none", "swap", "recompute"):
        options = (
            {"preemption": "swap", "host_blocks": 400} if mode == "swap" else {"preemption": "recompute"}
        )
        blocks = 1000 if mode == "none" else TIGHT["num_blocks"]
        with Engine(
            _model("llama"), prefix_caching=False, **{**TIGHT, "num_blocks": blocks}, **options
        ) as engine:
            run(engine)
            tokens[mode] = engine.stats()["tokens"]
            assert (engine.stats()["preemptions"] > 4) == (mode != "none")
    assert tokens["swap"] == tokens["none"]
    assert tokens["none"] < tokens["recompute"] < 2 * tokens["none"]


def contents(group: SequenceGroup, engine: Engine, tokens: int) -> list[torch.Tensor]:
    """Keys and values of the first tokens of every sequence, in all layers, as far as they are held."""
    found = []
    for sequence in group.sequences:
        for table, of_kind in zip(sequence.tables, layer_groups(engine), strict=True):
            slots = [
                table.slot(position) for position in range(table.released * table.pool.block_size, tokens)
            ]
            found += [data[:, slots].clone() for data in of_kind.tensors]
    return found


@pytest.mark.parametrize(
    "kind", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3, "seed": 2}]
)
def test_the_same_bytes_come_back(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """C30: everything on the device is written over while the group is away; what it shared it shares
    again.
    """
    model = build(BY_NAME["llama"])
    options = {"max_new_tokens": 12, **kind}
    with Engine(model, block_size=2, num_blocks=80, prefix_caching=False, preemption="swap") as engine:
        undisturbed = answers(engine.submit(PROMPTS[1], **options).result())
        handle = engine.submit(PROMPTS[1], **options)
        for _ in range(7):
            engine.step()
        (group,) = running(engine)
        computed = group.leader.computed
        held = engine.stats()["blocks"]["full"]["held"]
        before = contents(group, engine, computed)
        carry, launch, after = Pools.swap, Scheduler.launch, []

        def swap(pools: Pools, swaps: Swaps) -> None:
            carry(pools, Swaps(swaps.out, ()))
            for data in layer_groups(engine)[0].tensors:
                data.fill_(float("nan"))
            carry(pools, Swaps((), swaps.back))

        def launched(*plan: Any) -> None:
            after.extend(contents(group, engine, computed))
            launch(*plan)

        preempt(engine, group)
        with monkeypatch.context() as patch:
            patch.setattr(Pools, "swap", swap)
            patch.setattr(Scheduler, "launch", launched)
            engine.step()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert engine.stats()["blocks_out"] == engine.stats()["blocks_in"] == held < 3 * -(-computed // 2)
        assert answers(handle.result()) == undisturbed


# ---- trouble while somebody waits on the host

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture
def engine(model: Any) -> Engine:
    return Engine(
        model, block_size=2, num_blocks=34, max_batch_tokens=64, prefix_caching=False, preemption="swap"
    )


def until_swapped(engine: Engine) -> tuple[list[Any], Any]:
    """Three requests, the last of which waits on the host."""
    handles = [
        engine.submit(PROMPTS[p], **{**GREEDY, **kind})
        for p, kind in ((1, {}), (2, {}), (5, {"num_beams": 2}))
    ]
    while not engine.stats()["preempted"]:
        engine.step()
    assert engine.stats()["preempted"] == engine.stats()["swapped_out"] == 1
    assert on_host(engine) > 0
    return handles, handles[2]


def drive(engine: Engine, handles: list[Any]) -> None:
    while not all(handle.done for handle in handles):
        engine.step()


def on_host(engine: Engine) -> int:
    return sum(kind["held"] for kind in engine.stats()["host"].values())


def assert_right(engine: Engine, handles: list[Any], prompts: tuple[int, ...] = (1, 2, 5)) -> None:
    """Everybody has his tokens, nothing is held, and the next request runs."""
    kinds = {5: {"num_beams": 2}}
    for handle, p in zip(handles, prompts, strict=True):
        assert answers(handle.result()) == alone(engine.model, PROMPTS[p], **{**GREEDY, **kinds.get(p, {})})
    engine.check()
    assert on_host(engine) == 0
    assert answers(engine.submit(PROMPTS[0], **GREEDY).result()) == alone(engine.model, PROMPTS[0], **GREEDY)


def test_a_cancelled_request_leaves_the_host(engine: Engine) -> None:
    handles, away = until_swapped(engine)
    away.cancel()
    assert away.result().finish_reason == "abort"
    assert on_host(engine) == 0
    assert_right(engine, handles[:2], (1, 2))


def test_a_pause_empties_the_host(engine: Engine) -> None:
    """Whoever changes the weights then may: nothing of the old ones is brought back."""
    handles, _ = until_swapped(engine)
    engine.pause()
    assert on_host(engine) == 0
    assert engine.stats()["recomputed"] == 3
    engine.check()
    engine.resume()
    assert_right(engine, handles)
    assert engine.stats()["swapped_in"] < engine.stats()["swapped_out"]


def test_closing_empties_the_host(engine: Engine) -> None:
    handles, _ = until_swapped(engine)
    engine.close()
    assert {handle.result().finish_reason for handle in handles} == {"abort"}
    assert all(kind["bytes"] == kind["held"] == 0 for kind in engine.stats()["host"].values())
    assert engine.stats()["host"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["out", "back", "schedule", "move"])
def test_an_interrupt_in_a_swap(
    engine: Engine, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the books or of the copies: it reaches the caller, and everybody is computed again."""

    def breaks(*arguments: Any) -> None:
        raise error

    targets: dict[str, tuple[Any, str, Callable[..., None]]] = {
        "out": (HostBlocks, "out", breaks),
        "back": (HostBlocks, "back", breaks),
        "schedule": (Scheduler, "_take", breaks),
        "move": (layer_groups(engine)[0].host.pool, "share", breaks),
    }
    if where in ("out", "move"):
        handles = [
            engine.submit(PROMPTS[p], **{**GREEDY, **kind})
            for p, kind in ((1, {}), (2, {}), (5, {"num_beams": 2}))
        ]
    else:
        handles, _ = until_swapped(engine)
    with monkeypatch.context() as patch:
        patch.setattr(*targets[where])
        with pytest.raises(error):
            drive(engine, handles)
    engine.check()
    assert on_host(engine) == 0
    assert_right(engine, handles)


def test_a_failing_neighbour_harms_no_group_on_the_host(model: Any, engine: Engine) -> None:
    handles, _ = until_swapped(engine)

    def fails(*_: Any) -> None:
        raise ArithmeticError("the head is gone")

    with model.lm_head.register_forward_pre_hook(fails):
        while engine.stats()["running"]:
            engine.step()
    assert [handle.done for handle in handles] == [True, True, False]
    assert_right(engine, handles[2:], (5,))


def test_pools_that_are_given_back_while_groups_wait(model: Any, engine: Engine) -> None:
    """Nobody holds anything on the device, and its memory goes: what waits for it is computed again."""
    handles, _ = until_swapped(engine)
    for handle in handles[:2]:
        handle.cancel()
    assert hf_paged.release(model) > 0
    assert_right(engine, handles[2:], (5,))
    assert engine.stats()["recomputed"] == 1


def test_weights_that_change_while_all_wait_on_the_host(model: Any, engine: Engine) -> None:
    """C24: what was said stays, and is computed again with the weights of then."""
    handles = [engine.submit(PROMPTS[p], **GREEDY) for p in (1, 2, 5)]
    while not engine.stats()["preempted"]:
        engine.step()
    for handle in handles[:2]:
        handle.cancel()
    said = new_tokens(handles[2])
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    rest = alone(model, PROMPTS[5] + said, max_new_tokens=12 - len(said), do_sample=False)
    assert answers(handles[2].result()) == [said + rest[0]]
    assert engine.stats()["recomputed"] == 1


# ---- what is chosen, and what is there


@pytest.mark.parametrize("cheap", ["swap", "recompute"])
def test_auto_takes_what_costs_less(cheap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up measurements decide; the tokens are the same either way."""
    with Engine(_model("llama"), prefix_caching=False, preemption="auto", host_blocks=400, **TIGHT) as engine:
        monkeypatch.setattr(Preemption, "of_swap", lambda *_: 1.0 if cheap == "swap" else 3.0)
        monkeypatch.setattr(Preemption, "of_recomputation", lambda *_: 2.0)
        assert run(engine) == expected("llama")
        stats = engine.stats()
    assert (stats["swapped_out"] > 4, stats["recomputed"] > 4) == (cheap == "swap", cheap == "recompute")


def test_auto_measures_steps_and_swaps() -> None:
    with Engine(_model("llama"), prefix_caching=False, preemption="auto", host_blocks=400, **TIGHT) as engine:
        run(engine)
        costs, stats = costs_of(engine), engine.stats()
    assert 0 < costs.steps.count < stats["steps"]
    assert costs.out.count > 0
    assert costs.back.count > 0
    assert stats["exposed"] > 0


def test_a_step_without_tokens_is_measured_with_the_next_one(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not wait for it: its time is found in the next one. Steps that swap are not measured."""
    with Engine(model, num_blocks=30) as engine:
        engine.generate([PROMPTS[0]], max_new_tokens=2)
        sequence = engine.submit(PROMPTS[1], **GREEDY)
        engine.step()
        (group,) = running(engine)
        sequence = group.leader
        chunk, last = (
            StepPlan(ScheduledBatch().followed_by([ScheduledRow(sequence, 0, 10, ())])),
            StepPlan(ScheduledBatch().followed_by([ScheduledRow(sequence, 10, 7, (sequence,))])),
        )
        swapped = StepPlan(last.batch, swaps=Swaps((((0, 1),),)))
        measure = costs_of(engine).measure
        seen: list[tuple[int, float]] = []
        engine.stats()  # enters what was measured before
        monkeypatch.setattr(
            Preemption, "enter_step", lambda _, tokens, seconds: seen.append((tokens, seconds))
        )
        measure(last, 5.0)
        measure(chunk, 1.0)
        measure(chunk, 2.0)
        measure(last, 4.0)
        measure(last, 8.0)
        measure(chunk, 1.0)
        measure(swapped, 1.0)
        measure(last, 16.0)
        engine.stats()
        monkeypatch.undo()
    assert seen == [(7, 5.0), (27, 7.0), (7, 8.0), (7, 16.0)]


@pytest.mark.parametrize(("ahead", "own"), [(False, 1), (True, 2)])
def test_a_step_is_measured_from_the_tokens_of_the_one_before(
    model: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool, own: int
) -> None:
    """The clock is read when a step is launched and when one arrives: ahead, the step before arrives between
    the two. Only steps that may take blocks are measured.
    """
    clock = itertools.count()
    measured: list[tuple[bool, float]] = []
    with Engine(model, num_blocks=30, block_size=8, run_ahead=ahead) as engine:
        engine.submit(PROMPTS[1], max_new_tokens=30, do_sample=False)
        for _ in range(3):
            engine.step()
        monkeypatch.setattr(
            Preemption, "measure", lambda _, plan, seconds: measured.append((plan.takes_blocks, seconds))
        )
        monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(clock)))
        for _ in range(16):
            engine.step()
        monkeypatch.undo()
    assert measured == [(True, own)] * 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"host_blocks": -1}, ValueError, "host_blocks=-1"),
        ({"host_blocks": True}, TypeError, "host_blocks must be an int"),
        ({"host_blocks": 2.5}, TypeError, "host_blocks must be an int"),
        ({"preemption": "recompute", "host_blocks": 4}, ValueError, "nothing would ever be swapped there"),
        ({"preemption": "swap", "host_blocks": 0}, ValueError, "host_blocks=0 gives none"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        EngineConfig(**options)


def test_no_blocks_on_the_host() -> None:
    """Then "auto" computes again, and nothing is measured."""
    with Engine(_model("llama"), host_blocks=0, **TIGHT) as engine:
        assert run(engine) == expected("llama")
        assert engine.stats()["recomputed"] == engine.stats()["preemptions"] > 0
        assert engine.stats()["host"] == {}


def test_when_the_hosts_memory_is_taken(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A number of blocks at once, and it is said; without one when the first has to go, as many as the pool
    has at most.
    """
    with caplog.at_level(logging.INFO, "hf_paged"), Engine(model, num_blocks=30, host_blocks=17) as engine:
        assert engine.stats()["host"]["full"] == {
            "most": 17,
            "total": 17,
            "held": 0,
            "free": 17,
            "bytes": 17 * block_bytes(engine),
        }
        assert "up to 17 swapped blocks of the full layers fit on the host" in caplog.text
    with Engine(model, block_size=2, num_blocks=34, prefix_caching=False, preemption="swap") as engine:
        assert (engine.stats()["host"]["full"]["total"], engine.stats()["host"]["full"]["most"]) == (0, 34)
        until_swapped(engine)
        assert 0 < engine.stats()["host"]["full"]["total"] <= 34


def test_a_host_without_memory(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for a number is told that it cannot be had; who does not is served without."""

    def nothing_left(self: Any, slabs: int) -> None:
        raise MemoryError

    monkeypatch.setattr(host._HostBuffer, "have", nothing_left)
    with pytest.raises(OutOfBlocks, match="host_blocks=50"):
        Engine(model, num_blocks=30, host_blocks=50)
    with Engine(model, preemption="swap", **TIGHT) as engine:
        assert run(engine) == expected("llama")
        assert engine.stats()["recomputed"] == engine.stats()["preemptions"] > 0
