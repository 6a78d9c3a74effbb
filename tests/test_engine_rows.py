"""Rows of an engine with a length each: any number of tokens a step, and one token a row as it was with one clock."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cases import examples, once_each
from clocked_rows import ClockedRows
from engine_answers import PROMPTS, alone, answers, small_engine
from engine_parts import scheduler_of
from engine_steps import watch_plans
from families import BY_NAME, build
from tape import record
from uneven_rows import PLAIN, advance

from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.scheduling import StepPlan

FEW = {"num_blocks": 26, "max_batch_tokens": 20, "max_batch_sequences": 8}
NEW = {"max_new_tokens": 10, "min_new_tokens": 10}


@pytest.mark.parametrize(("name", "captured"), once_each(["llama", "gemma3"], [False, True]))
def test_rows_take_any_number_of_tokens(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the host has, waiting, preemption by swap and recomputation beside beams: each answer is its own."""
    if captured:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    model = build(BY_NAME[name])
    asked = [(PROMPTS[i % 6], {**PLAIN[i % len(PLAIN)], **NEW, "seed": i}) for i in range(8)]
    with small_engine(model, max_batch_tokens=40, max_batch_sequences=8) as engine:
        truths = [answers(engine.submit(prompt, **kind).result()) for prompt, kind in asked]
        assert truths[0] == alone(model, PROMPTS[0], **PLAIN[0], **NEW)
    options = {"max_batch_tokens": 20, "max_batch_sequences": 8, "num_blocks": 80, "run_ahead": False}
    for seed in range(examples(3)):
        with small_engine(model, **options) as engine:
            handles = [engine.submit(prompt, **kind) for prompt, kind in asked]
            took = advance(engine, handles, truths, random.Random(seed))
            assert [answers(handle.result()) for handle in handles] == truths
            assert min(took[count] for count in range(5)), took
            if captured:
                assert engine.stats()["graphs"]["replayed"]


def planned(engine: Engine) -> list[Any]:
    """Every plan as it is made: its rows, and the blocks of each; the list grows."""
    found: list[Any] = []

    def note(plan: StepPlan) -> None:
        rows = [
            (
                row.sequence.group.request.number, row.sequence.index, row.sequence.row, row.start, row.count,
                [list(table.blocks) for table in row.sequence.tables],
            )
            for row in plan.rows
        ]  # fmt: skip
        batch = plan.batch
        full = [(sequence.group.request.number, sequence.index, end) for sequence, end in batch.full]
        found.append(
            (
                rows,
                batch.decodes,
                batch.longest * bool(batch.decodes),
                batch.tokens,
                sorted(full),
                batch.last,
                plan.copies,
            )
        )

    watch_plans(engine, note)
    return found


@pytest.mark.parametrize(("name", "ahead"), once_each(["llama", "mistral-window"], [False, True]))
def test_plans_are_those_of_one_clock(name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every row takes one token, the plans of captured steps are those of the table with one clock, with the
    tokens of the step in flight unknown or known; under preemption, with samples, beams and requests that end early.
    """
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model = build(BY_NAME[name])
    plans, found = [], []
    for clocked in (False, True):
        with small_engine(model, **FEW, run_ahead=ahead) as engine:
            scheduler = scheduler_of(engine)
            if clocked:
                scheduler.rows = ClockedRows(scheduler.kv_groups)  # type: ignore[assignment]
            plans.append(planned(engine))
            handles = []
            for i in range(9):
                least = {"min_new_tokens": 12} if i % 3 else {}
                kind = {**PLAIN[i % len(PLAIN)], **least, "max_new_tokens": 12 + i, "seed": i}
                handles.append(engine.submit(PROMPTS[i % 6], **kind))
                for _ in range(1 + i % 3):
                    engine.step()
                    engine.check()
                if i in (4, 6) and scheduler.running:
                    scheduler.preempt(scheduler.running[0], swap=i == 6)
            while not all(handle.done for handle in handles):
                engine.step()
                engine.check()
            found.append([answers(handle.result()) for handle in handles])
            stats = engine.stats()
            assert stats["preemptions"]
            assert stats["graphs"]["replayed"]
    assert found[0] == found[1]
    assert plans[0] == plans[1]
    assert any(decodes > 2 for _, decodes, *_ in plans[0])
