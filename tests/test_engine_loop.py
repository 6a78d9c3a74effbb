"""The engine's loop: how much code a decode step runs through, and the rows that sequences own."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cases import examples, once_each
from engine_answers import PROMPTS, alone, answers
from engine_ends import ENDS
from engine_parts import checks_of, preempt, running
from engine_steps import own_steps
from families import BY_NAME, build
from hops import FrozenGraphs, begin_steady_decode, recorded_hops

from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS

HOPS, FILES = 24, 12
"""One function more on a CUDA device, where the host waits for a copy. Before rows and batch were one structure:
105 functions in 27 files, then 39 in 19.
"""


def test_a_decode_step_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and methods of hf_paged in a steady, captured, greedy step of the engine's own loop."""
    graphs = FrozenGraphs()
    monkeypatch.setitem(RECORDERS, "cpu", graphs.record)
    model = build(BY_NAME["llama"])
    model.generation_config.eos_token_id = None
    with Engine(model, block_size=64, num_blocks=40, run_ahead=True) as engine:
        begin_steady_decode(engine, graphs)
        own_steps(engine, 2)
        with recorded_hops() as hops:
            own_steps(engine)
        assert checks_of(engine).unseen, "a step that checks the model was measured"
    assert len(hops) <= HOPS, "\n".join(f"{file}: {name}" for file, name in hops)
    assert len({file for file, _ in hops}) <= FILES


def rows_of(engine: Engine) -> dict[int, set[int]]:
    """The rows that the sequences of each running request own."""
    return {group.request.number: {sequence.row for sequence in group.sequences} for group in running(engine)}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_running_sequence_keeps_its_row(ahead: bool) -> None:
    """Whoever comes and goes beside it; a row that was given back is taken by the next request."""
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=80, max_batch_sequences=4, run_ahead=ahead) as engine:
        handles = [engine.submit(PROMPTS[i], max_new_tokens=20, do_sample=False) for i in range(3)]
        for _ in range(4):
            engine.step()
        assert rows_of(engine) == {0: {0}, 1: {1}, 2: {2}}
        handles[1].cancel()
        engine.step()
        assert rows_of(engine) == {0: {0}, 2: {2}}
        handles[1] = engine.submit(
            PROMPTS[3], max_new_tokens=9, do_sample=True, num_return_sequences=2, seed=1
        )
        engine.step()
        assert rows_of(engine) == {0: {0}, 2: {2}, 3: {1, 3}}
        for i in (0, 2):
            assert answers(handles[i].result()) == alone(
                model, PROMPTS[i], max_new_tokens=20, do_sample=False
            )
        handles[1].result()
        engine.check()


@pytest.mark.parametrize(("seed", "ahead"), once_each(range(examples(4)), [False, True]))
def test_rows_that_change_owners_change_no_token(seed: int, ahead: bool) -> None:
    """C7, C23: a walk of few rows and few blocks, with swaps, aborts, beams, samples and pauses."""
    kinds: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": False, "eos_token_id": ENDS},
        {"do_sample": True, "temperature": 1.2, "num_return_sequences": 2},
        {"do_sample": False, "num_beams": 2},
        {"do_sample": True, "top_k": 9, "repetition_penalty": 1.2},
    ]
    model, chance = build(BY_NAME["llama"]), random.Random(seed)
    params = [(chance.choice(PROMPTS), chance.choice(kinds), chance.choice([2, 6, 11])) for _ in range(12)]
    with Engine(model, num_blocks=200, run_ahead=False, prefix_caching=False) as engine:
        expected = [
            answers(engine.generate([prompt], max_new_tokens=new, seed=i, **kind)[0])
            for i, (prompt, kind, new) in enumerate(params)
        ]
    options = {"block_size": 2, "num_blocks": 32, "max_batch_tokens": 16, "max_batch_sequences": 4}
    with Engine(
        model, run_ahead=ahead, preemption="swap", host_blocks=60, watermark=0.0, **options
    ) as engine:
        handles = []
        aborted = []
        for i, (prompt, kind, new) in enumerate(params):
            handles.append(engine.submit(prompt, max_new_tokens=new, seed=i, **kind))
            if chance.random() < 0.3:
                aborted.append(engine.submit(chance.choice(PROMPTS), max_new_tokens=9, do_sample=False))
            for _ in range(chance.randrange(4)):
                engine.step()
                engine.check()
            if aborted and chance.random() < 0.5:
                aborted.pop().cancel()
            if chance.random() < 0.2 and running(engine):
                preempt(engine, chance.choice(running(engine)))
            if chance.random() < 0.1:
                engine.pause()
                engine.resume()
        while not all(handle.done for handle in handles):
            engine.step()
            engine.check()
        assert [answers(handle.result()) for handle in handles] == expected
        assert engine.stats()["preemptions"]
