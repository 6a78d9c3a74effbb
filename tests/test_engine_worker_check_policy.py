"""Who may have changed the model: after other people's code every step looks, in the engine's own loop one
now and then (C24).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import counts, kept, notice
from cases import pairwise
from engine_answers import PROMPTS, alone, answers
from engine_faults import Does
from engine_parts import checks_of, count_steps_only, scheduler_of
from engine_steps import new_tokens, own_steps, watch_plans
from families import BY_NAME, build
from model_checks import count_checks
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine.worker.check_policy import SECONDS, STEPS, CheckPolicy, WeightsChanged
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.scheduling import StepPlan
from hf_paged.scheduling.prefixes import SharedPrefixes

LONG = {"max_new_tokens": 40, "do_sample": False}
CHANGED = "weights have changed"


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture(params=[False, True], ids=["at once", "ahead"])
def engine(model: Any, request: pytest.FixtureRequest) -> Engine:
    """An engine that counts its steps only, not the time they take."""
    made = Engine(
        model,
        block_size=16,
        num_blocks=40,
        max_batch_tokens=64,
        max_batch_sequences=4,
        run_ahead=request.param,
    )
    count_steps_only(made)
    return made


def warm(engine: Engine) -> None:
    """Have the steps of one and of two rows captured, and trusted."""
    for prompts in ([PROMPTS[0]], PROMPTS[:2]):
        engine.generate(prompts, max_new_tokens=8, do_sample=False)
    assert engine.stats()["graphs"]["replayed"]


def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list of looks from now on; it grows."""
    seen: list[str] = []
    count_checks(monkeypatch, seen.append)
    return seen


def meanwhile(engine: Engine, step: int, act: Callable[[], None]) -> None:
    """Do something with that step from now on, as another thread would: nobody tells the engine."""
    left = [step]

    def watched(plan: StepPlan) -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    watch_plans(engine, watched)


def rewrite(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.0)


def written(model: Any) -> None:
    """Torch counts it as a change, and all tokens stay what they are."""
    with torch.no_grad():
        model.lm_head.weight.mul_(1.0)


# ---- the rule


def test_when_the_model_must_be_checked() -> None:
    now = [0.0]
    checks = CheckPolicy(clock=lambda: now[0])
    assert not checks.skip(list)
    checks.mark_clean()
    for step in range(STEPS):
        assert checks.skip(lambda: ["memory"])
        assert checks.unseen == step + 1
    assert not checks.skip(list)
    assert checks.unseen == STEPS
    checks.mark_clean()
    assert checks.skip(list)
    now[0] = SECONDS
    assert not checks.skip(list)
    checks.mark_clean()
    checks.mark_dirty()
    assert not checks.skip(list)
    assert checks.skip(list, decided=True)


def test_memory_is_kept_while_steps_go_unseen() -> None:
    checks, made = CheckPolicy(), []

    def memory() -> list[object]:
        made.append(torch.zeros(1))
        return [made[-1]]

    checks.mark_clean()
    checks.skip(memory)
    checks.skip(memory)
    assert len(made) == 1
    kept = weakref.ref(made.pop())
    checks.mark_clean()
    assert kept() is not None
    checks.release()
    assert kept() is None
    assert not checks.skip(memory)


# ---- how often


def test_steps_by_hand_look_each_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(engine)
    handle = engine.submit(PROMPTS[0], **LONG)
    engine.step()
    seen = looks(monkeypatch)
    for step in range(1, 20):
        engine.step()
        assert seen.count("weights") == seen.count("graphs") == step
    handle.cancel()


def test_the_own_loop_looks_now_and_then(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many steps, and before something ends."""
    warm(engine)
    handle = engine.submit(PROMPTS[0], **LONG)
    engine.step()
    seen, before = looks(monkeypatch), engine.stats()["steps"]
    handle.result()
    steps = engine.stats()["steps"] - before
    assert steps > 2 * STEPS
    assert steps // (STEPS + 1) <= seen.count("weights") <= steps // STEPS + 3
    assert kept(engine) > 1
    assert seen.count("graphs") == seen.count("weights")  # once for all captured steps
    assert answers(handle.result()) == alone(engine.model, PROMPTS[0], **LONG)


class _Own(torch.nn.Linear):
    """A module with code of the user's."""


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = _Own


def patched(model: Any) -> None:
    layer = model.model.layers[0].mlp
    inner = layer.forward
    layer.forward = lambda *args: inner(*args)


@pytest.mark.parametrize("change", [None, hooked, replaced, patched])
def test_forwards_with_code_of_the_user_look_each_time(
    model: Any, change: Callable[[Any], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without captured steps. What is only torch's and transformers' changes no model."""
    if change is not None:
        change(model)
    with Engine(model, block_size=16, num_blocks=40, graphs=False) as engine:
        count_steps_only(engine)
        handle = engine.submit(PROMPTS[0], **LONG)
        engine.step()
        seen, before = looks(monkeypatch), engine.stats()["steps"]
        handle.result()
        steps = engine.stats()["steps"] - before
        if change is None:
            assert steps // (STEPS + 1) <= seen.count("weights") <= steps // STEPS + 3
        else:
            assert seen.count("weights") >= steps
        assert answers(handle.result()) == alone(model, PROMPTS[0], **LONG)


def test_a_hook_that_changes_the_weights_is_seen_in_the_next_step(model: Any) -> None:
    left = [10]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            rewrite(model)

    with Engine(model, block_size=16, num_blocks=40, graphs=False) as engine:
        count_steps_only(engine)
        model.model.layers[0].mlp.register_forward_hook(hook)
        handle = engine.submit(PROMPTS[0], **LONG)
        with pytest.raises(RuntimeError, match=f"{CHANGED} under 1 running") as raised:
            handle.result()
        assert type(raised.value) is RuntimeError
        handle.cancel()


def test_an_admitted_group_finds_a_checked_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(engine)
    seen, begin = looks(monkeypatch), SharedPrefixes.begin
    entered: list[int] = []

    def watched(*args: Any) -> Any:
        entered.append(seen.count("weights"))
        return begin(*args)

    monkeypatch.setattr(SharedPrefixes, "begin", watched)
    first = engine.submit(PROMPTS[0], **LONG)
    for _ in range(3):
        engine.step()
    late: list[Any] = []

    def come() -> None:
        seen.clear()
        late.append(engine.submit(PROMPTS[1], **LONG))

    meanwhile(engine, 5, come)
    first.result()
    assert entered == [0, 1]  # of the first it was looked at closely, for nobody ran
    assert answers(late[0].result()) == alone(engine.model, PROMPTS[1], **LONG)


def test_groups_that_cannot_be_admitted_cause_no_check(engine: Engine) -> None:
    """A queue in front of a full engine is no reason to look in every step."""
    scheduler = scheduler_of(engine)
    handles = [engine.submit(PROMPTS[0], **LONG) for _ in range(5)]
    assert scheduler.may_admit
    for _ in range(3):
        engine.step()
    assert (len(scheduler.waiting), scheduler.may_admit) == (1, False)
    while scheduler.waiting:
        complete = [group for group in scheduler.running if group.complete]
        assert not scheduler.may_admit or complete or len(scheduler.running) < 4
        engine.step()
    assert len(scheduler.running) == 1
    handles[4].cancel()


# ---- what is found


@pytest.mark.parametrize("step", [3, 35])
def test_weights_that_another_thread_changes_without_pause(engine: Engine, step: int) -> None:
    """Nobody gets an answer that may be of both; who had not begun is answered by the new ones."""
    warm(engine)
    running = [engine.submit(prompt, **LONG) for prompt in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    meanwhile(engine, step, lambda: rewrite(engine.model))
    with pytest.raises(WeightsChanged, match=rf"{CHANGED} while 2 requests were running.*engine.pause\(\)"):
        running[0].result()
    for handle in running:
        output = handle.result()
        assert (output.finish_reason, type(output.error)) == ("error", WeightsChanged)
    engine.check()
    assert engine.stats()["blocks"]["full"]["held"] == 0
    assert checks_of(engine).kept == ()
    (output,) = engine.generate([PROMPTS[0]], **LONG)
    assert output.cached_tokens == 0
    assert answers(output) == alone(engine.model, PROMPTS[0], **LONG)


KINDS = {
    "alone": {"do_sample": False},
    "samples": {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    "told about": {"do_sample": False, "logprobs": 1},
}


@pytest.mark.parametrize(
    ("engine", "kind", "ends"), pairwise([False, True], [*KINDS], ["length", "stop"]), indirect=["engine"]
)
def test_no_request_ends_before_the_model_is_checked(engine: Engine, kind: str, ends: str) -> None:
    """Weights that were changed a few steps before an end are found there, however it comes: by its length,
    or by a token.
    """
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 0, "eos_token_id": None, **KINDS[kind]}
    params = PROMPTS[:1] * 2  # the steps of it are captured, and trusted
    (output, _) = engine.generate(params, **options)
    if ends == "stop":
        # A token that the answer has near its end and not before.
        said = output.sequences[0].token_ids
        options |= {
            "eos_token_id": next(
                token for place, token in enumerate(said) if place > 6 and token not in said[:place]
            )
        }
        options |= {"max_new_tokens": 30}
    for _ in range(3):
        engine.generate(params, **options)
    handle = engine.submit(PROMPTS[0], **options)
    for _ in range(3):
        engine.step()
    meanwhile(engine, 3, lambda: written(engine.model))
    with pytest.raises(RuntimeError, match=CHANGED):
        handle.result()
    assert not handle.done or type(handle.result().error) is WeightsChanged
    handle.cancel()


def test_who_was_in_the_queue_is_answered_by_the_new_weights(engine: Engine) -> None:
    warm(engine)
    handles = [engine.submit(prompt, **LONG) for prompt in PROMPTS[:5]]
    meanwhile(engine, 30, lambda: rewrite(engine.model))
    with pytest.raises(WeightsChanged):
        handles[0].result()
    assert answers(handles[4].result()) == alone(engine.model, PROMPTS[4], **LONG)
    assert [handle.result().finish_reason for handle in handles] == ["error"] * 4 + ["length"]


def test_pause_finds_what_was_changed_before_it(engine: Engine) -> None:
    """It does not raise: whoever calls it late learns from the answers."""
    warm(engine)
    handle = engine.submit(PROMPTS[0], **LONG)

    for _ in range(3):
        engine.step()
    own_steps(engine, 4)
    assert checks_of(engine).unseen == 3
    rewrite(engine.model)
    engine.pause()
    engine.resume()
    assert type(handle.result().error) is WeightsChanged


def test_a_change_between_two_loops_costs_no_answer(engine: Engine) -> None:
    """Whoever drives may change the weights when he is back: an error first, then pause() makes it good, to
    the token.
    """
    warm(engine)
    short = engine.submit(PROMPTS[1], max_new_tokens=20, do_sample=False)
    handle = engine.submit(PROMPTS[0], **LONG)
    short.result()
    rewrite(engine.model)
    with pytest.raises(RuntimeError, match=f"{CHANGED} under 1 running") as raised:
        handle.result()
    assert type(raised.value) is RuntimeError
    engine.pause()
    said = new_tokens(handle)
    engine.resume()
    rest = {**LONG, "max_new_tokens": 40 - len(said)}
    (tokens,) = answers(handle.result())
    assert len(said) >= 18
    assert tokens == said + alone(engine.model, PROMPTS[0] + said, **rest)[0]


@pytest.mark.parametrize("at", [10, 25])
def test_a_criterion_that_changes_the_weights(engine: Engine, at: int) -> None:
    """Changes on the driver's own thread within a step are seen in the next one."""
    warm(engine)
    left = [at]

    def change() -> None:
        left[0] -= 1
        if left[0] == 0:
            rewrite(engine.model)

    neighbour = engine.submit(PROMPTS[0], **LONG)
    engine.submit(PROMPTS[1], **LONG, stopping_criteria=[Does(change)])
    with pytest.raises(RuntimeError, match=f"{CHANGED} under 2 running") as raised:
        neighbour.result()
    assert type(raised.value) is RuntimeError
    engine.close()


class _Tokenizer:
    """Decodes, and changes the weights of a model once as it does."""

    def __init__(self, model: Any) -> None:
        self.models = [model]

    def decode(self, ids: Any, **_: Any) -> str:
        while self.models:
            rewrite(self.models.pop())
        return ""


def test_a_tokenizer_of_a_cancelled_request_that_changes_the_weights(model: Any) -> None:
    """A request that another thread cancels is decoded between two steps: the next one checks the model."""
    with Engine(model, block_size=4) as plain:
        expected = answers(plain.submit(PROMPTS[0], **LONG).result())[0]
    with Engine(model, _Tokenizer(model), block_size=4) as engine:
        neighbour, other = (engine.submit(prompt, **LONG) for prompt in PROMPTS[:2])
        meanwhile(engine, 20, other.cancel)
        with pytest.raises(RuntimeError, match=CHANGED):
            neighbour.result()
        said = [token for increment in neighbour.read() for token in increment.token_ids]
        assert said
        assert said == expected[: len(said)]
        neighbour.cancel()


def test_settings_that_another_thread_changes(engine: Engine) -> None:
    """Like weights: who was running ends, with what it had said on the model of before, and who comes next is
    answered by that of now.
    """
    warm(engine)
    old = alone(engine.model, PROMPTS[0], **LONG)[0]
    handle = engine.submit(PROMPTS[0], **LONG)
    for _ in range(3):
        engine.step()

    def change() -> None:
        for layer in engine.model.model.layers:
            layer.self_attn.scaling = 3.0

    meanwhile(engine, 5, change)
    with pytest.raises(WeightsChanged):
        handle.result()
    said = handle.result().sequences[0].token_ids
    assert 3 < len(said) <= 8 + STEPS
    assert said[:6] == old[:6]
    (output,) = engine.generate([PROMPTS[0]], **LONG)
    assert answers(output) == alone(engine.model, PROMPTS[0], **LONG)
    assert answers(output) != [old]


def test_a_tensor_that_another_thread_replaces_stays_where_graphs_read_it(engine: Engine) -> None:
    """A captured step reads memory, and that is nobody else's until the next look."""
    warm(engine)
    handle = engine.submit(PROMPTS[0], **LONG)
    for _ in range(3):
        engine.step()
    rope, kept = engine.model.model.rotary_emb, []

    def replace() -> None:
        memory = rope.inv_freq.untyped_storage().data_ptr()
        rope.inv_freq = rope.inv_freq.clone()
        kept.append(memory in [each.data_ptr() for each in checks_of(engine).kept])  # type: ignore[attr-defined]

    meanwhile(engine, 5, replace)
    expected = alone(engine.model, PROMPTS[0], **LONG)
    assert answers(handle.result()) == expected
    assert kept == [True]
    assert checks_of(engine).kept == ()


def test_a_step_of_another_state_is_not_replayed_without_a_look(engine: Engine) -> None:
    """Steps are captured at different times: that one of them was looked at says nothing about another."""
    warm(engine)
    handle = engine.submit(PROMPTS[0], **LONG)
    for _ in range(3):
        engine.step()
    before = counts(engine)["replayed"]
    for layer in engine.model.model.layers:
        layer.self_attn.scaling = 3.0
    notice(engine)
    checks_of(engine).mark_clean()
    own_steps(engine)
    assert checks_of(engine).unseen == 1
    assert counts(engine)["replayed"] == before
    handle.cancel()


def test_a_thread_that_stops_lets_go(model: Any) -> None:
    with Engine(model, block_size=16, num_blocks=40) as engine:
        count_steps_only(engine)
        warm(engine)
        engine.start()
        handle = engine.submit(PROMPTS[0], **LONG)
        next(iter(handle))
        engine.stop()
        assert not checks_of(engine).skip(list)
        assert (checks_of(engine).unseen, checks_of(engine).kept) == (0, ())
        assert answers(handle.result()) == alone(model, PROMPTS[0], **LONG)
