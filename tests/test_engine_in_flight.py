"""Steps that are launched before the host has heard of the last one's tokens: the same answers, whatever the
host learns too late.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import pairwise
from engine_answers import PROMPTS, alone, answers
from engine_ends import ENDS
from engine_steps import launched_unseen, unseen_tokens, watch_plans
from families import BY_NAME, VOCABULARY, build
from tape import record

from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.scheduling import Scheduler, StepPlan

GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture
def engine(model: Any) -> Engine:
    return Engine(
        model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8, run_ahead=True
    )


@pytest.fixture
def poison(model: Any) -> int:
    """A token that nobody says."""
    said = {token for prompt in PROMPTS for row in [prompt, *alone(model, prompt, **GREEDY)] for token in row}
    return next(token for token in range(5, VOCABULARY) if token not in said)


def test_the_host_is_a_step_behind(engine: Engine) -> None:
    """Every decoding step but the first of each request is launched blind; of those that end by length
    nothing is computed in vain.
    """
    blind = launched_unseen(engine)
    outputs = engine.generate(PROMPTS[:3], **GREEDY)
    assert sum(blind) == 3 * 8
    assert engine.stats()["tokens"] == sum(map(len, PROMPTS[:3])) + 3 * 8
    assert [answers(output) for output in outputs] == [
        alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS[:3]
    ]


def test_a_token_too_many_is_dropped(engine: Engine) -> None:
    """Who ends by a token is found out a step late: one row is computed in vain, and every block comes back
    (C4, C7).
    """
    for prompt in PROMPTS:
        end = alone(engine.model, prompt, **GREEDY)[0][4]
        before = engine.stats()["tokens"]
        (output,) = engine.generate([prompt], **GREEDY, eos_token_id=end)
        (tokens,) = answers(output)
        assert [tokens] == alone(engine.model, prompt, **GREEDY, eos_token_id=end)
        assert output.finish_reason == "stop"
        computed = engine.stats()["tokens"] - before + output.cached_tokens
        assert computed == len(prompt) + len(tokens)
        engine.check()
        assert engine.stats()["blocks"]["full"]["held"] == 0


KINDS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "eos_token_id": ENDS},
    {"do_sample": True, "temperature": 1.3},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "eos_token_id": ENDS},
    {"do_sample": False, "repetition_penalty": 1.4},
    {"do_sample": True, "num_return_sequences": 2, "repetition_penalty": 1.2},
]
SLOW: list[dict[str, Any]] = [{"do_sample": False, "encoder_repetition_penalty": 1.3}, {"num_beams": 3}]


@pytest.mark.parametrize(
    ("name", "graphs", "seed"), pairwise(["llama", "qwen2-window"], [False, True], range(2))
)
def test_a_step_ahead_changes_no_token(
    name: str, graphs: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C23, C35: few blocks, chunked prompts, preemptions, requests that come late, and some that are heard of
    at once.
    """
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    model, chance = build(BY_NAME[name]), random.Random(seed)
    options = {"block_size": 4, "max_batch_tokens": 13, "max_batch_sequences": 6, "graphs": graphs}
    params = [(chance.choice(PROMPTS), chance.choice(KINDS), chance.choice([1, 7, 14]), i) for i in range(9)]
    params[2], params[6] = (PROMPTS[1], SLOW[seed], 7, 2), (PROMPTS[2], SLOW[1 - seed], 7, 6)
    with Engine(
        model, num_blocks=200, run_ahead=False, prefix_caching=False, max_batch_sequences=6
    ) as engine:
        expected = [
            answers(engine.generate([p], max_new_tokens=new, seed=i, **kind)[0]) for p, kind, new, i in params
        ]
    with Engine(model, num_blocks=20, run_ahead=True, **options) as engine:
        blind, handles = launched_unseen(engine), []
        for prompt, kind, new, i in params:
            handles.append(engine.submit(prompt, max_new_tokens=new, seed=i, **kind))
            for _ in range(chance.randrange(3)):
                engine.step()
                engine.check()
            if len(handles) == 5:
                engine.pause()
                engine.resume()
        while not all(handle.done for handle in handles):
            engine.step()
            engine.check()
        assert [answers(handle.result()) for handle in handles] == expected
        assert all(kind["held"] == 0 for kind in engine.stats()["blocks"].values())
        assert engine.stats()["preemptions"]
        assert sum(blind) > 10


@pytest.mark.parametrize("kind", [{"num_beams": 3}, {"encoder_repetition_penalty": 1.3}])
def test_requests_that_need_the_host_delay_no_other(engine: Engine, kind: dict[str, Any]) -> None:
    """Beams and processors are heard of at once; whoever runs beside them is launched blind all the same."""
    blind = launched_unseen(engine)
    first = engine.submit(PROMPTS[0], max_new_tokens=20, do_sample=False)
    for _ in range(5):
        engine.step()
    assert blind[-3:] == [1] * 3
    slow = engine.submit(PROMPTS[2], max_new_tokens=4, do_sample=False, **kind)
    while not slow.done:
        engine.step()
        assert blind[-1] == 1
        assert unseen_tokens(engine) == 1
    assert answers(first.result()) == alone(engine.model, PROMPTS[0], max_new_tokens=20, do_sample=False)
    assert answers(slow.result()) == alone(
        engine.model, PROMPTS[2], max_new_tokens=4, do_sample=False, **kind
    )
    assert blind[-3:] == [1] * 3


def test_nan_is_reported_a_step_later(model: Any, engine: Engine, poison: int) -> None:
    """It ends its own request, nobody finds what it has computed, and neighbours do not read it (C22)."""
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    bad = [*PROMPTS[3], poison, *PROMPTS[3][:3]]
    forward, said = model.model.embed_tokens.forward, []
    model.model.embed_tokens.forward = lambda ids: (said.append(int(ids.max())), forward(ids))[1]
    for _ in range(3):
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        engine.step()
        spoiled = [
            engine.submit(bad, **GREEDY),
            engine.submit(bad, do_sample=True, num_return_sequences=2, max_new_tokens=4),
        ]
        for handle in spoiled:
            output = handle.result()
            assert output.finish_reason == "error"
            assert "the model's logits are NaN" in str(output.error)
            assert not any(sequence.token_ids for sequence in output.sequences)
        assert [answers(handle.result()) for handle in handles] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS[:3]
        ]
        engine.check()
    assert max(said) < VOCABULARY
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = 1.0
    engine.pause()
    engine.resume()
    assert answers(engine.submit(bad, **GREEDY).result()) == alone(model, bad, **GREEDY)


def test_an_exception_in_the_forward(model: Any, engine: Engine, poison: int) -> None:
    """Whose tokens break the forward of all ends alone, with what it has said until then."""
    embed = model.model.embed_tokens.forward

    def choke(ids: torch.Tensor) -> torch.Tensor:
        if (ids == poison).any():
            raise ValueError("indigestible")
        return embed(ids)

    model.model.embed_tokens.forward = choke
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    bad = engine.submit([*PROMPTS[3], poison], **GREEDY)
    assert str(bad.result().error) == "indigestible"
    assert [answers(handle.result()) for handle in handles] == [
        alone(model, prompt, **GREEDY) for prompt in PROMPTS[:3]
    ]
    engine.check()


@pytest.mark.parametrize("where", ["forward", "schedule", "apply"])
@pytest.mark.parametrize("kind", [{}, {"do_sample": True, "num_return_sequences": 2}])
def test_an_interrupt(
    model: Any, engine: Engine, where: str, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a step is on its way: nobody loses a token that was told, nobody gets another one."""
    params = [(prompt, {**GREEDY, **kind, "seed": i}) for i, prompt in enumerate(PROMPTS[:4])]
    expected = [answers(engine.generate([prompt], **options)[0]) for prompt, options in params]
    handles = [engine.submit(prompt, **options) for prompt, options in params]
    for _ in range(4):
        engine.step()

    def breaks(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    target = {
        "forward": (model.lm_head, "forward"),
        "schedule": (Scheduler, "schedule"),
        "apply": (Scheduler, "confirm"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*target, breaks)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert [answers(handle.result()) for handle in handles] == expected
    engine.check()


@pytest.mark.parametrize("act", ["cancel", "pause", "close"])
def test_while_a_step_is_on_its_way(engine: Engine, act: str) -> None:
    """C34: whatever is done to a request then, its blocks come back and what was said stays."""
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
    for _ in range(5):
        engine.step()
    assert unseen_tokens(engine) == 3
    if act == "cancel":
        handles[1].cancel()
        assert handles[1].result().finish_reason == "abort"
        assert len(handles[1].result().sequences[0].token_ids) == 4
        engine.step()
    elif act == "pause":
        engine.pause()
        assert engine.stats()["blocks"]["full"]["held"] == 0
        engine.resume()
    else:
        engine.close()
        assert [handle.result().finish_reason for handle in handles] == ["abort"] * 3
        return
    engine.check()
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        if handle.result().finish_reason != "abort":
            assert answers(handle.result()) == alone(engine.model, prompt, **GREEDY)


def test_what_ends_while_the_engine_is_paused_is_in_the_next_step(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], max_new_tokens=2, do_sample=False)
    engine.step()
    engine.step()
    engine.pause()
    assert handle.done
    engine.resume()
    assert engine.step() == [handle.result()]
    assert engine.step() == []


def test_samples_that_were_preempted_before_their_tokens_arrived(model: Any) -> None:
    """The tokens that they have in common are counted when they are known: until then their last tokens only
    look the same (C30).
    """
    kind = {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "max_new_tokens": 12}
    with Engine(model, num_blocks=200, run_ahead=False) as engine:
        expected = [answers(engine.generate([prompt], seed=1, **kind)[0]) for prompt in PROMPTS[:3]]
    with Engine(
        model,
        block_size=2,
        num_blocks=34,
        run_ahead=True,
        max_batch_tokens=40,
        max_batch_sequences=9,
        watermark=0.0,
    ) as engine:
        handles = [engine.submit(prompt, seed=1, **kind) for prompt in PROMPTS[:3]]
        assert [answers(handle.result()) for handle in handles] == expected
        assert engine.stats()["preemptions"] > 1


def test_logprobs_come_with_their_tokens(engine: Engine) -> None:
    """To each request as many top tokens as it has asked for, beside others that asked for none."""
    params = [(PROMPTS[0], 2), (PROMPTS[1], None), (PROMPTS[2], 0), (PROMPTS[3], 5)]
    kind = {"do_sample": True, "max_new_tokens": 7}
    with Engine(engine.model, num_blocks=200, run_ahead=False) as slow:
        expected = [
            slow.generate([prompt], seed=2, logprobs=n, **kind)[0]
            for prompt, n in [(p, True if n == 0 else n) for p, n in params]
        ]
    blind = launched_unseen(engine)
    handles = [engine.submit(prompt, seed=2, logprobs=True if n == 0 else n, **kind) for prompt, n in params]
    for handle, right, (_, wanted) in zip(handles, expected, params, strict=True):
        (mine,), (its,) = handle.result().sequences, right.sequences
        assert mine.token_ids == its.token_ids
        if wanted is None:
            assert mine.logprobs is None
            continue
        assert [len(each.top_logprobs) for each in mine.logprobs] == [wanted] * 7
        assert [(each.token_id, [token for token, _ in each.top_logprobs]) for each in mine.logprobs] == [
            (each.token_id, [token for token, _ in each.top_logprobs]) for each in its.logprobs
        ]
        assert [each.logprob for each in mine.logprobs] == pytest.approx(
            [each.logprob for each in its.logprobs], abs=1e-4
        )
    assert sum(blind) == 4 * 6


@pytest.mark.parametrize(("one", "other", "new", "blocks"), [(0, 1, 6, 15), (0, 5, 5, 12), (2, 5, 4, 13)])
def test_a_preemption_while_all_others_wait_for_tokens(
    model: Any, one: int, other: int, new: int, blocks: int
) -> None:
    """A step without rows still moves blocks: the one that has its last token gives no row, and the other has
    no room (C30).
    """
    options = {
        "block_size": 2,
        "max_batch_tokens": 20,
        "max_batch_sequences": 2,
        "watermark": 0.0,
        "prefix_caching": False,
    }
    with Engine(
        model, num_blocks=blocks, run_ahead=True, preemption="swap", host_blocks=50, **options
    ) as engine:
        plans: list[StepPlan] = []
        watch_plans(engine, plans.append, empty=True)
        handles = [
            engine.submit(PROMPTS[i], max_new_tokens=n, do_sample=False) for i, n in ((one, new), (other, 12))
        ]
        found = [answers(handle.result()) for handle in handles]
        engine.check()
    assert found == [
        alone(model, PROMPTS[i], max_new_tokens=n, do_sample=False) for i, n in ((one, new), (other, 12))
    ]
    assert any(plan.swaps and not plan.rows for plan in plans)
