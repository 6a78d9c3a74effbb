"""Recurrent states in the engine, by a layer that counts: wherever a step may run again, every token is applied
once to the state that later tokens read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captures import counts, policy, pool_of, reasons, sizes
from counted_states import CountedStates, Read, assert_every_token_once, counting, put_into_engines
from engine_answers import PROMPTS, answers
from engine_faults import POISON
from engine_steps import executor_of, watch_plans
from families import BY_NAME, build
from tape import rerun

from hf_paged.engine import Engine
from hf_paged.model.adapters import Inapplicable
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.scheduling import StepPlan

GREEDY = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False, "bad_words_ids": [[POISON]]}
PLACES = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])


class Engines:
    """Engines of one model, over states that are looked at in the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = counting(build(BY_NAME["llama"]))
        self.states = CountedStates(in_place=True)
        put_into_engines(monkeypatch, self.states)

    def make(self, in_place: bool, **options: Any) -> Engine:
        """An engine of few blocks, without prefixes, whose states are not kept."""
        self.states.in_place = in_place
        given = {"block_size": 4, "num_blocks": 90, "max_batch_tokens": 16, "prefix_caching": False}
        engine = Engine(self.model, **{**given, **options})
        self.of_trial = self.states.reads
        self.states.reads = []
        watch_plans(engine, self._name_rows)
        return engine

    def _name_rows(self, plan: StepPlan) -> None:
        self.states.sequences = dict(zip(plan.batch.row_ids, plan.batch.sequences, strict=True))

    def alone(self, prompt: list[int], new: int = 14, ends: int | None = None) -> list[list[int]]:
        """The tokens after a prompt, by the model without a cache: all are computed again for each."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + new:
            with torch.no_grad():
                logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            logits[POISON] = -torch.inf
            tokens.append(int(logits.argmax()))
            if tokens[-1] == ends:
                break
        return [tokens[len(prompt) :]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    made = Engines(monkeypatch)
    made.model.generation_config.eos_token_id = None
    yield made
    assert_every_token_once(made.states, lambda read: read.owner.tokens)


class Raises:
    """Raises once, in the middle of a step: its states are advanced, its later layers not computed."""

    def __init__(self, error: BaseException, wanted: Callable[[CountedStates], bool]) -> None:
        self.error, self.wanted, self.times = error, wanted, 0

    def __call__(self, states: CountedStates) -> None:
        if not self.times and self.wanted(states):
            self.times += 1
            raise self.error


def decodes(rows: int) -> Callable[[CountedStates], bool]:
    """A step in which so many rows have one token."""
    return lambda states: [count for _, _, count in states.rows] == [1] * rows


# ---- a fault in the middle of a step, after which its groups run one by one


@pytest.mark.parametrize("form", ["flat", "rows"])
@AHEAD
@PLACES
def test_a_step_that_broke_off(in_place: bool, ahead: bool, form: str, engines: Engines) -> None:
    """In place the groups are computed again from their first token; else they run again as they are."""
    with engines.make(in_place, graphs=False, run_ahead=ahead) as engine:
        engine.runner.why_rows = None if form == "flat" else "a test says so"
        engines.states.after = raises = Raises(RuntimeError("broke off"), decodes(3))
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        found = [answers(handle.result()) for handle in handles]
        engine.check()
        assert raises.times
        assert engine.stats()["preemptions"] == (3 if in_place else 0)
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


@AHEAD
@PLACES
def test_a_request_that_always_fails_ends_alone(in_place: bool, ahead: bool, engines: Engines) -> None:
    """The others are computed again once, however often it fails, and do not fail with it."""

    def poisoned(states: CountedStates) -> None:
        if any(POISON in tokens for tokens in states.last_ids):
            raise RuntimeError("poison")

    bad = [*PROMPTS[1], *PROMPTS[3], POISON, 7, 9]
    with engines.make(in_place, graphs=False, run_ahead=ahead) as engine:
        engines.states.after = poisoned
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        spoiled = engine.submit(bad, **GREEDY)
        late = engine.submit(PROMPTS[5], **GREEDY)
        found = [answers(handle.result()) for handle in (*handles, late)]
        assert spoiled.result().finish_reason == "error"
        assert "poison" in str(spoiled.result().error)
        engine.check()
        assert engine.stats()["preemptions"] <= (4 if in_place else 0)
    assert found == [engines.alone(prompt) for prompt in (*PROMPTS[:3], PROMPTS[5])]


@PLACES
def test_a_group_that_begins_again_beside_one_that_is_new(in_place: bool, engines: Engines) -> None:
    """A prompt's first chunk reads no state: it runs again at once. The group beside it cannot."""

    def mixed(states: CountedStates) -> bool:
        starts = [start for _, start, _ in states.rows]
        return 0 in starts and any(starts)

    with engines.make(in_place, graphs=False) as engine:
        engines.states.after = raises = Raises(RuntimeError("broke off"), mixed)
        first = engine.submit(PROMPTS[0], **GREEDY)
        for _ in range(3):
            engine.step()
        second = engine.submit(PROMPTS[2], **GREEDY)
        found = [answers(handle.result()) for handle in (first, second)]
        assert raises.times
        assert engine.stats()["preemptions"] == (1 if in_place else 0)
    assert found == [engines.alone(prompt) for prompt in (PROMPTS[0], PROMPTS[2])]


@PLACES
def test_a_step_that_broke_off_before_it_began(
    in_place: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed again that no run has touched."""
    with engines.make(in_place, graphs=False) as engine:
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        for _ in range(5):
            engine.step()
        executor = executor_of(engine)
        run, failing = executor.run, [True]

        def fails(batch: Any) -> Any:
            if failing.pop() if failing else False:
                raise RuntimeError("before")
            return run(batch)

        executor.run = fails
        found = [answers(handle.result()) for handle in handles]
        assert not failing
        assert engine.stats()["preemptions"] == 0
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


def test_an_interrupt_in_the_middle_of_a_step(engines: Engines) -> None:
    """No group keeps anything."""
    with engines.make(in_place=True, graphs=False, run_ahead=True) as engine:
        engines.states.after = Raises(KeyboardInterrupt(), decodes(3))
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        with pytest.raises(KeyboardInterrupt):
            handles[0].result()
        found = [answers(handle.result()) for handle in handles]
        engine.check()
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


# ---- the second run after Inapplicable


@AHEAD
@PLACES
@pytest.mark.parametrize("rows", [1, 3])
def test_adapters_that_do_not_apply(rows: int, in_place: bool, ahead: bool, engines: Engines) -> None:
    """It is no request's fault, so a single one does not fail either."""
    with engines.make(in_place, graphs=False, run_ahead=ahead) as engine:
        engines.states.after = raises = Raises(Inapplicable("other rows"), decodes(rows))
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:rows]]
        found = [answers(handle.result()) for handle in handles]
        assert raises.times
        assert engine.stats()["preemptions"] == (rows if in_place else 0)
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:rows]]


# ---- captured steps


@PLACES
def test_captures_are_made_of_steps_that_may_run_again(in_place: bool, engines: Engines) -> None:
    """Rehearsal, recording and comparison run a step that has its answer."""
    with engines.make(in_place) as engine:
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        found = [answers(handle.result()) for handle in handles]
        assert bool(counts(engine)["captured"]) is not in_place, reasons(engine)
        assert bool(counts(engine)["replayed"]) is not in_place
        assert not reasons(engine)
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


def test_a_trusted_step_is_replayed_in_place(engines: Engines) -> None:
    """A comparison made elsewhere serves both: the slots are its input."""
    with engines.make(in_place=False) as engine:
        engine.generate(PROMPTS[:3], **GREEDY)
        engines.states.in_place = True
        before = counts(engine)["replayed"]
        found = [answers(output) for output in engine.generate(PROMPTS[:3], **GREEDY)]
        assert counts(engine)["replayed"] > before + 10
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


def test_a_replay_that_differs_is_computed_again(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(step: Any, pools: Any, devices: Any) -> Any:
        replay, answer = rerun(step, pools, devices)
        return lambda: (replay(), [each.logits.mul_(2) for each in pool_of(engine)]), answer

    monkeypatch.setitem(RECORDERS, "cpu", wrong)
    with engines.make(in_place=False) as engine:
        found = [answers(output) for output in engine.generate(PROMPTS[:3], **GREEDY)]
        assert "differs" in reasons(engine)
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


@PLACES
def test_a_larger_step_that_stands_in(
    in_place: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller one is compared with its answer, in a step that may run again."""
    policy(monkeypatch, padded=4)
    with engines.make(in_place=False, max_batch_sequences=3) as engine:
        engine.generate(PROMPTS[:3], **GREEDY)
        assert sizes(engine, "single") == {3}
        engines.states.in_place = in_place
        found = [answers(output) for output in engine.generate(PROMPTS[4:5], **GREEDY)]
        assert sizes(engine, "single") == ({3} if in_place else {1, 3})
        assert not reasons(engine)
    assert found == [engines.alone(prompt) for prompt in PROMPTS[4:5]]


@pytest.mark.parametrize("form", ["rows", "spans"])
@PLACES
def test_chunks_of_prompts_in_a_captured_step(
    in_place: bool, form: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(monkeypatch, **({"pairs": 0} if form == "spans" else {}))
    prompts = [*PROMPTS[:4], *PROMPTS[:4]]
    with engines.make(in_place=False) as engine:
        engine.generate(prompts, **GREEDY)
        engines.states.in_place = in_place
        before = counts(engine)["replayed"]
        found = [answers(output) for output in engine.generate(prompts, **GREEDY)]
        assert counts(engine)["replayed"] > before, reasons(engine)
    assert found == [engines.alone(prompt) for prompt in prompts]


@PLACES
def test_the_model_is_checked_before_a_replay_in_place(in_place: bool, engines: Engines) -> None:
    """A buffer that the captured step reads lies elsewhere: the step is computed without the replay, or after
    it.
    """
    with engines.make(in_place=False) as engine:
        engine.generate(PROMPTS[:3], **GREEDY)
        engines.states.in_place = in_place
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        for _ in range(6):
            engine.step()
        begun = len(engines.states.runs)
        before = counts(engine)["replayed"]
        rotary = engines.model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.clone()
        engine.step()
        assert counts(engine)["replayed"] == before
        assert len(engines.states.runs) - begun == (1 if in_place else 2)
        assert engine.stats()["preemptions"] == 0
        found = [answers(handle.result()) for handle in handles]
    assert found == [engines.alone(prompt) for prompt in PROMPTS[:3]]


# ---- the trial, and the token that runs ahead of an end


@PLACES
def test_the_trial_computes_its_sequences_in_pieces(in_place: bool, engines: Engines) -> None:
    """Each way of computing them begins them anew."""
    with engines.make(in_place) as engine:
        answers(engine.submit(PROMPTS[0], **GREEDY).result())
    sequences: list[list[Read]] = []
    latest: dict[int, list[Read]] = {}
    for read in engines.of_trial:
        if not read.place:
            latest[read.owner] = []
            sequences.append(latest[read.owner])
        latest[read.owner].append(read)
    assert len(sequences) == 4, "two sequences, one by one and beside each other"
    for reads in sequences:
        assert [read.place for read in reads] == list(range(len(reads)))
        assert [read.state for read in reads] == [reads[-1].state[: read.place] for read in reads]


@AHEAD
@PLACES
def test_the_token_beyond_an_end_is_in_no_state_that_is_read(
    in_place: bool, ahead: bool, engines: Engines
) -> None:
    """The state goes with its sequence: the next owner of its row begins without one."""
    free = [engines.alone(prompt)[0] for prompt in PROMPTS[:3]]
    end = free[0][5]
    with engines.make(in_place, graphs=False, run_ahead=ahead, max_batch_sequences=2) as engine:
        given = {**GREEDY, "min_new_tokens": None, "eos_token_id": end}
        handles = [engine.submit(prompt, **given) for prompt in PROMPTS[:3]]
        found = [answers(handle.result()) for handle in handles]
        reads = engines.states.reads
        last = [read.owner for read in reads if read.place == len(read.owner.tokens) - 1]
        beyond = [owner for owner in last if owner.tokens[-1] == end]
        assert bool(beyond) is ahead
        engine.check()
    assert found == [engines.alone(prompt, ends=end) for prompt in PROMPTS[:3]]
