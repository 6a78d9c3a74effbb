"""A column that only this test knows: one declaration and one filler, and steps of all kinds carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from captures import counts, policy, reasons
from engine_answers import PROMPTS, answers, small_engine
from engine_parts import scheduler_of
from engine_steps import own_steps
from families import BY_NAME, build
from hops import FrozenGraphs, begin_steady_decode
from marked import MARK, SEEN, by_request, fillers_of, marked, with_mark
from tape import record

from hf_paged.blocks import COLUMNS, NO_NUMBERS
from hf_paged.blocks.columns import declared
from hf_paged.engine import Engine
from hf_paged.model.attention import running
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
BEAMS: dict[str, Any] = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
REQUESTS = [(0, 1, GREEDY), (1, 0, GREEDY), (2, 2, BEAMS), (1, 3, GREEDY), (3, 1, GREEDY), (1, 2, BEAMS)]
"""Prompts, their marks and what is asked; some prompts come again with another mark."""


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    SEEN.clear()


@pytest.fixture
def model() -> Any:
    return marked(build(BY_NAME["llama"]))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_rows_of_the_engine(model: Any, graphs: bool, ahead: bool) -> None:
    """Requests that join, leave and are preempted keep their marks, and so do beams."""
    expected = [with_mark(model, mark, PROMPTS[p], **kind) for p, mark, kind in REQUESTS]
    options = {"graphs": graphs, "run_ahead": ahead, "num_blocks": 44, "prefix_caching": False}
    with declared(MARK), small_engine(model, **options) as engine:
        fillers_of(engine).fill("mark", by_request([*(mark for _, mark, _ in REQUESTS), 3]))
        handles = []
        for p, _, kind in REQUESTS:
            handles.append(engine.submit(PROMPTS[p], **kind))
            engine.step()
        leaving = engine.submit(PROMPTS[0], **GREEDY)
        for _ in range(4):
            engine.step()
        scheduler = scheduler_of(engine)
        scheduler.preempt(scheduler.running[1])
        for _ in range(4):
            engine.step()
        leaving.cancel()
        assert [answers(handle.result()) for handle in handles] == expected
        assert (counts(engine)["replayed"] > 4) == graphs, reasons(engine)
        assert {mark for step in SEEN for mark in step} == {0, 1, 2, 3}
        engine.check()


def test_sequences_run_one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a forward of its own."""
    expected = [with_mark(model, mark, PROMPTS[p], **GREEDY) for p, mark, _ in REQUESTS]
    monkeypatch.setattr("hf_paged.engine.worker.runner.Runner.form", "rows")
    with declared(MARK), small_engine(model, prefix_caching=False, graphs=False) as engine:
        fillers_of(engine).fill("mark", by_request([mark for _, mark, _ in REQUESTS]))
        handles = [engine.submit(PROMPTS[p], **GREEDY) for p, _, _ in REQUESTS]
        assert [answers(handle.result()) for handle in handles] == expected
        assert all(len(set(marks)) == 1 for marks in SEEN)


def test_a_steady_step_asks_no_filler(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner announces a change, and the next step has it."""
    graphs = FrozenGraphs()
    monkeypatch.setitem(RECORDERS, "cpu", graphs.record)
    model.generation_config.eos_token_id = None
    asked: list[Sequence[Any]] = []
    mark = [1]

    def fill(sequences: Sequence[Any]) -> list[int]:
        asked.append(sequences)
        return mark * len(sequences)

    with declared(MARK), Engine(model, block_size=64, num_blocks=40, run_ahead=True) as engine:
        fillers = fillers_of(engine)
        fillers.fill("mark", fill)
        begin_steady_decode(engine, graphs)
        own_steps(engine, 2)
        before = len(asked)
        own_steps(engine, 3)
        assert len(asked) == before
        rows = asked[-1]
        kept = fillers.of(rows)
        assert kept == {"mark": (1, 1, 1)}
        mark[0] = 2
        assert fillers.of(rows) is kept
        fillers.renew("mark")
        assert fillers.of(rows) == {"mark": (2, 2, 2)}
        mark[0] = 0
        fillers.renew("mark")
        assert fillers.of(rows) == NO_NUMBERS


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_rows_of_generate(model: Any, graphs: bool, mode: dict[str, Any]) -> None:
    """Rows of equal prompts are computed once where their marks are equal, and apart where they are not."""
    width = mode.get("num_beams", 1)
    prompts, marks = [0, 0, 1, 0, 1], [1, 2, 0, 1, 3]
    length = min(len(PROMPTS[p]) for p in prompts)
    ids = torch.tensor([PROMPTS[p][:length] for p in prompts])
    options = {**GREEDY, **mode}
    expected = [with_mark(model, mark, row.tolist(), **options) for row, mark in zip(ids, marks, strict=True)]
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "cache_implementation": "paged",
        "cache_config": {"block_size": 4, "graphs": graphs},
        **options,
    }
    with declared(MARK):
        fillers = memory_of(model).row_fillers
        fillers.fill("mark", lambda rows: [marks[row // width] for row in rows])
        for _ in range(2):
            tokens = model.generate(**call)[:, length:].tolist()
            per = mode.get("num_return_sequences", 1)
            assert [tokens[i : i + per] for i in range(0, len(tokens), per)] == expected
        assert (counts(model)["replayed"] > 4) == graphs, reasons(model)
        first = SEEN[0]  # one row for each prompt and mark
        assert first == [1, 2, 0, 3]
        fillers.fill("mark", None)
    plain = [with_mark(model, 0, row.tolist(), **options) for row in ids]
    tokens = model.generate(**call)[:, length:].tolist()
    assert [tokens[i : i + per] for i in range(0, len(tokens), per)] == plain


def test_a_column_is_taken_back(model: Any) -> None:
    """Declarations and engines are as they were before it."""
    before = dict(COLUMNS)
    with declared(MARK):
        assert {**before, "mark": MARK} == COLUMNS
        with pytest.raises(ValueError, match="there is a column 'mark' already"), declared(MARK):
            pass
        with small_engine(model) as engine:
            fillers_of(engine).fill("mark", by_request([1]))
            (output,) = engine.generate([PROMPTS[0]], **GREEDY)
    assert answers(output) == with_mark(model, 1, PROMPTS[0], **GREEDY)
    assert before == COLUMNS
    with small_engine(model) as engine:
        with pytest.raises(ValueError, match="there is no column 'mark'"):
            fillers_of(engine).fill("mark", by_request([1]))
        (output,) = engine.generate([PROMPTS[0]], **GREEDY)
    assert answers(output) == with_mark(model, 0, PROMPTS[0], **GREEDY)


def test_a_name_that_nobody_has_declared_is_refused(llama: Any) -> None:
    """A layer that misspells a column is told so; it would find no numbers, in silence."""
    layer = llama.model.layers[0].mlp
    forward = layer.forward

    def misspelt(x: torch.Tensor) -> torch.Tensor:
        step = running.get()
        if step is not None:
            step.column("mrak", x.device)
        return forward(x)

    layer.forward = misspelt
    with pytest.raises(ValueError, match="there is no column 'mrak', expected one of"):
        llama.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, cache_implementation="paged")
