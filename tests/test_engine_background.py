"""A thread drives the engine: submitting is prompt, whoever waits gets what comes, and nothing hangs
(C34).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from dropout import stop_dropout, train_with_dropout
from engine_answers import PROMPTS, alone, answers
from engine_faults import Does
from engine_parts import is_waited_for, thread_of
from engine_threads import GREEDY, GUARD, Gate, in_threads, join, meanwhile
from fresh_process import FreshProcess

from hf_paged.engine import Engine
from hf_paged.model.registry import memory_of
from hf_paged.scheduling import SequenceGroup, TokenSequence


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8) as made:
        yield made.start()


def held(engine: Engine, prompt: list[int] = PROMPTS[4], **options: Any) -> tuple[Gate, Any]:
    """A request in the middle of whose step the engine is."""
    gate = Gate()
    handle = engine.submit(prompt, **{**GREEDY, **options}, stopping_criteria=[gate.criterion])
    gate.wait()
    return gate, handle


def test_requests_of_many_threads(engine: Engine) -> None:
    """Each gets the tokens it gets alone, and the thread computes them all."""
    found: dict[int, Any] = {}
    drivers: set[str] = set()

    def ask(i: int) -> None:
        note = Does(lambda: drivers.add(threading.current_thread().name))
        found[i] = answers(engine.submit(PROMPTS[i], **GREEDY, stopping_criteria=[note]).result(GUARD))

    join(in_threads([lambda i=i: ask(i) for i in range(5)]))
    assert [found[i] for i in range(5)] == [alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS[:5]]
    assert drivers == {"hf_paged engine"}
    outputs = engine.generate(PROMPTS, **GREEDY)
    assert [answers(output) for output in outputs] == [
        alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS
    ]


def test_submitting_and_cancelling_wait_for_no_step(engine: Engine) -> None:
    """While a step is held up others submit and cancel; who was cancelled ends after it."""
    gate, first = held(engine)
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
    refused = engine.submit([5] * 250, max_new_tokens=50)
    assert refused.result(0).finish_reason == "refused"
    handles[1].cancel()
    first.cancel()
    assert not any(handle.done for handle in [first, *handles])
    gate.open.set()
    assert [handle.result(GUARD).finish_reason for handle in [first, *handles]] == [
        "abort",
        "length",
        "abort",
        "length",
    ]
    assert gate.opened_in_time
    assert [len(handle.result().sequences[0].token_ids) for handle in (first, handles[1])] == [1, 0]
    assert [answers(handles[i].result()) for i in (0, 2)] == [
        alone(engine.model, PROMPTS[i], **GREEDY) for i in (0, 2)
    ]


def test_increments_come_as_they_are_made(engine: Engine) -> None:
    """The first token is read while the step of the second is held up."""
    gate = Gate(token=2)
    stream = engine.stream(PROMPTS[1], **GREEDY, stopping_criteria=[gate.criterion])
    tokens = next(stream).token_ids
    gate.wait()
    gate.open.set()
    tokens += [token for increment in stream for token in increment.token_ids]
    assert gate.opened_in_time
    assert [tokens] == alone(engine.model, PROMPTS[1], **GREEDY)


def test_a_result_in_time(engine: Engine) -> None:
    gate, handle = held(engine)
    with pytest.raises(TimeoutError, match="continues"):
        handle.result(timeout=0.01)
    gate.open.set()
    assert len(answers(handle.result(GUARD))[0]) == 8


def test_a_consumer_that_goes_away(engine: Engine) -> None:
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
    stream = engine.stream(PROMPTS[3], max_new_tokens=100, do_sample=False)
    next(stream)
    stream.close()
    assert [answers(handle.result(GUARD)) for handle in handles] == [
        alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS[:3]
    ]
    assert engine.submit(PROMPTS[0], **GREEDY).result(GUARD).error is None
    assert engine.stats()["running"] == 0


def test_what_a_step_raises_reaches_all_waiting_callers(model: Any, engine: Engine) -> None:
    """Weights that change under requests: all hear of it, later ones too; after pause() and resume() nobody
    has lost a token.
    """
    gate, first = held(engine)
    handles = [first, engine.submit(PROMPTS[1], **GREEDY)]
    heard: list[str] = []

    def wait(handle: Any) -> None:
        with pytest.raises(
            RuntimeError, match="thread has stopped: the model's weights have changed"
        ) as caught:
            handle.result(GUARD)
        heard.append(type(caught.value.__cause__).__name__)

    threads = in_threads([lambda handle=handle: wait(handle) for handle in handles])
    with torch.no_grad():
        model.lm_head.weight.add_(0.0)  # as torch counts, a change
    gate.open.set()
    join(threads)
    assert heard == ["RuntimeError"] * 2
    late = engine.submit(PROMPTS[2], **GREEDY)
    with pytest.raises(RuntimeError, match="weights have changed"):
        late.result(GUARD)
    with pytest.raises(RuntimeError, match="weights have changed"):
        list(late)
    engine.pause()
    engine.resume()
    found = [answers(handle.result(GUARD)) for handle in [*handles, late]]
    assert found == [alone(model, PROMPTS[i], **GREEDY) for i in (4, 1, 2)]


def test_after_trouble_it_is_started_again(model: Any, engine: Engine) -> None:
    train_with_dropout(model)
    handle = engine.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(RuntimeError, match="training mode"):
        handle.result(GUARD)
    stop_dropout(model)
    assert answers(engine.start().submit(PROMPTS[1], **GREEDY).result(GUARD)) == alone(
        model, PROMPTS[1], **GREEDY
    )
    assert answers(handle.result(GUARD)) == alone(model, PROMPTS[0], **GREEDY)


def test_pausing(engine: Engine) -> None:
    """The thread sleeps meanwhile; who is cancelled ends all the same."""
    gate, handle = held(engine)
    pausing = meanwhile(engine.pause, lambda: is_waited_for(engine))
    gate.open.set()
    join(pausing)
    assert engine.stats()["blocks"]["full"]["held"] == 0
    other = engine.submit(PROMPTS[0], **GREEDY)
    other.cancel()
    handle.cancel()
    assert [each.result(GUARD).finish_reason for each in (other, handle)] == ["abort"] * 2
    late = engine.submit(PROMPTS[0], **GREEDY)
    engine.resume()
    assert answers(late.result(GUARD)) == alone(engine.model, PROMPTS[0], **GREEDY)


@pytest.mark.parametrize("ahead", [False, True])
def test_another_thread_changes_the_weights(model: Any, ahead: bool) -> None:
    """Under pause(): what was said stays, the rest is said by the new weights, and nothing that was cached is
    found again (C24).
    """
    held_up, waits = PROMPTS[3], PROMPTS[1]
    old = alone(model, held_up, **GREEDY)[0]
    changed: list[str] = []

    def change() -> None:
        engine.pause()
        assert engine.stats()["blocks"]["full"]["held"] == 0
        noise = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.1)
        assert alone(model, held_up, **GREEDY)[0] != old  # the model is free meanwhile
        engine.resume()
        changed.append(threading.current_thread().name)

    with Engine(
        model, block_size=4, num_blocks=60, max_batch_tokens=40, max_batch_sequences=8, run_ahead=ahead
    ).start() as engine:
        gate = Gate(token=3)
        handle = engine.submit(held_up, **GREEDY, stopping_criteria=[gate.criterion])
        gate.wait()
        other = engine.submit(waits, **GREEDY)
        changing = meanwhile(change, lambda: is_waited_for(engine))
        gate.open.set()
        join(changing)
        assert len(changed) == 1
        said = 3 + ahead  # a step that is on its way is heard of
        rest = alone(model, [*held_up, *old[:said]], **{**GREEDY, "max_new_tokens": 8 - said})[0]
        assert answers(handle.result(GUARD)) == [[*old[:said], *rest]]
        assert rest != old[said:]
        assert answers(other.result(GUARD)) == alone(model, waits, **GREEDY)
        again = engine.submit(held_up, **GREEDY).result(GUARD)
        assert answers(again) == alone(model, held_up, **GREEDY)
        engine.check()


def test_stopping_leaves_the_requests(engine: Engine) -> None:
    """Whoever waits for one drives the engine from then on."""
    gate, handle = held(engine)
    found: list[Any] = []
    thread = thread_of(engine)
    waiting = meanwhile(lambda: found.append(answers(handle.result(GUARD))), lambda: bool(thread.listeners))
    stopping = meanwhile(engine.stop, lambda: thread.halted)
    gate.open.set()
    join(stopping)
    join(waiting)
    assert found == [alone(engine.model, PROMPTS[4], **GREEDY)]
    assert answers(engine.submit(PROMPTS[0], **GREEDY).result()) == alone(engine.model, PROMPTS[0], **GREEDY)
    engine.stop()


def test_stopping_ends_who_was_cancelled(engine: Engine) -> None:
    gate, handle = held(engine)
    thread_of(engine).halted = True  # the step that is held up is the last one
    handle.cancel()
    gate.open.set()
    engine.stop()
    assert handle.done
    assert handle.result().finish_reason == "abort"


def test_closing_ends_everything(engine: Engine) -> None:
    """Waiting threads get what there is; the thread is gone afterwards."""
    gate, handle = held(engine)
    others = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
    reasons: list[str] = []
    waiting = in_threads(
        [lambda each=each: reasons.append(each.result(GUARD).finish_reason) for each in [handle, *others]]
    )
    thread = thread_of(engine).thread
    closing = meanwhile(engine.close, lambda: is_waited_for(engine))
    gate.open.set()
    join([*closing, *waiting])
    assert reasons == ["abort"] * 3
    assert not thread.is_alive()
    for use in (engine.start, lambda: engine.submit(PROMPTS[0])):
        with pytest.raises(RuntimeError, match="closed"):
            use()


@pytest.mark.parametrize("act", ["result", "stop", "exit"])
def test_from_within_a_step(engine: Engine, act: str) -> None:
    """A criterion that waits for the engine, stops it or means to end the process: nobody waits for
    himself.
    """
    inner: list[Any] = []

    def within() -> None:
        if act == "result" and not inner:
            inner.append(engine.submit(PROMPTS[0], **GREEDY))
            inner[0].result(GUARD)
        elif act == "stop":
            engine.stop()
        elif act == "exit":
            raise SystemExit  # what a handler of a signal would do

    handle = engine.submit(PROMPTS[4], **GREEDY, stopping_criteria=[Does(within)])
    if act == "result":
        assert "a step is running already" in str(handle.result(GUARD).error)
        assert answers(inner[0].result(GUARD)) == alone(engine.model, PROMPTS[0], **GREEDY)
    elif act == "stop":
        assert answers(handle.result(GUARD)) == alone(engine.model, PROMPTS[4], **GREEDY)
    else:
        assert type(handle.result(GUARD).error) is SystemExit  # the request's end, and not the thread's
        assert answers(engine.submit(PROMPTS[0], **GREEDY).result(GUARD)) == alone(
            engine.model, PROMPTS[0], **GREEDY
        )


def test_starting_twice_is_once(engine: Engine) -> None:
    thread = thread_of(engine)
    assert engine.start() is engine
    assert thread_of(engine) is thread


def test_an_engine_that_is_dropped_takes_its_thread_along(model: Any) -> None:
    engine = Engine(model, num_blocks=30).start()
    assert answers(engine.submit(PROMPTS[0], **GREEDY).result(GUARD)) == alone(model, PROMPTS[0], **GREEDY)
    thread = thread_of(engine).thread
    memory = memory_of(model)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    thread.join(GUARD)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None
    assert memory.held == 0


SCRIPT = """
from families import BY_NAME, build
from hf_paged import Engine
engine = Engine(build(BY_NAME["llama"]), num_blocks=60).start()
handle = engine.submit([5, 6, 7], max_new_tokens=200, min_new_tokens=200)
next(iter(handle))
"""


@pytest.mark.parametrize(
    "end", ["raise ValueError('mine')", "import threading; threading.Thread(target=handle.result).start()"]
)
def test_the_interpreter_ends(end: str, fresh_process: FreshProcess) -> None:
    """With requests on their way, with an error, with a thread that still waits: nothing keeps the
    process.
    """
    ended = fresh_process.run(SCRIPT + end)
    assert ended.code == ("ValueError" in end), ended.stderr
    assert ("mine" in ended.stderr) == ("mine" in end)
    assert "Fatal" not in ended.stderr


def test_a_forked_process_waits_for_no_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork leaves the thread behind: whoever waits there is told so. The process that has the thread does
    not notice.
    """
    engine.pause()  # nobody computes it meanwhile
    handle = engine.submit(PROMPTS[1], **GREEDY)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("hf_paged.engine.background.os.getpid", lambda: -1)
        with pytest.raises(RuntimeError, match=r"from which this one was forked; make an engine here"):
            handle.result(timeout=GUARD)
    engine.resume()
    assert answers(handle.result(timeout=GUARD)) == alone(engine.model, PROMPTS[1], **GREEDY)


def test_a_watcher_is_called_at_each_increment_or_at_the_end(engine: Engine) -> None:
    """`wake` runs in the engine's thread; what `read()` finds then is the answer, token by token."""
    each: list[str] = []
    ends: list[str] = []
    gate, handle = held(engine)
    other = engine.submit(PROMPTS[1], **GREEDY)
    handle.watch(lambda: each.append(threading.current_thread().name))
    other.watch(lambda: ends.append(threading.current_thread().name), each=False)
    gate.open.set()
    wanted = handle.result(GUARD).sequences[0].token_ids
    other.result(GUARD)
    assert [token for piece in handle.read() for token in piece.token_ids] == wanted
    assert set(each) == set(ends) == {"hf_paged engine"}
    assert len(each) >= len(wanted)
    assert len(ends) == 1


def test_a_watcher_is_called_no_more(engine: Engine) -> None:
    calls: list[None] = []

    def wake() -> None:
        calls.append(None)

    gate, handle = held(engine)
    handle.watch(wake)
    handle.unwatch(wake)
    gate.open.set()
    handle.result(GUARD)
    assert not calls


def test_nothing_of_ended_requests_stays(engine: Engine) -> None:
    """Neither watchers nor books wait for the end of the thread or for the collector of garbage: a server's
    memory is flat (C34).
    """

    def books() -> int:
        return sum(type(each) in (SequenceGroup, TokenSequence) for each in gc.get_objects())

    watchers = []
    gc.collect()
    before = books()
    gc.disable()
    try:
        for i in range(8):
            calls: set[int] = set()
            watchers.append(weakref.ref(calls))
            handle = engine.submit(PROMPTS[i % 5], **GREEDY)
            handle.watch(partial(calls.add, i))
            handle.result(GUARD)
            assert calls
        del calls, handle
        engine.submit(PROMPTS[0], **GREEDY).result(GUARD)  # the last step's columns are its own
        assert sum(watcher() is not None for watcher in watchers) <= 1
        assert books() <= before + 4
    finally:
        gc.enable()


def test_a_watcher_is_called_when_the_thread_ends(engine: Engine) -> None:
    """Then `driven` and `thread_error` say why nothing more comes."""
    assert engine.driven
    ended = threading.Event()
    gate, handle = held(engine)
    handle.watch(ended.set, each=False)
    train_with_dropout(engine.model)
    gate.open.set()
    assert ended.wait(GUARD)
    assert not engine.driven
    assert "training mode" in str(engine.thread_error)
    stop_dropout(engine.model)
    handle.cancel()
    engine.start()
    handle.result(GUARD)
    assert engine.driven
    assert engine.thread_error is None


def test_increments_carry_the_logprobs_of_their_tokens(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], **GREEDY, logprobs=2)
    pieces = list(handle)
    notes = [note for piece in pieces for note in piece.logprobs or []]
    assert notes == handle.result(GUARD).sequences[0].logprobs
    assert all(len(piece.logprobs or []) == len(piece.token_ids) for piece in pieces)
    assert all(piece.logprobs is None for piece in engine.submit(PROMPTS[0], **GREEDY))


@pytest.mark.parametrize("blocks", [5, 60])
def test_the_longest_sequence_fits_and_a_longer_one_is_refused(model: Any, blocks: int) -> None:
    with Engine(model, block_size=4, num_blocks=blocks, max_batch_tokens=24, max_batch_sequences=8) as engine:
        longest = engine.longest
        assert longest <= 4 * blocks
        fits = engine.submit([5], max_length=longest)
        assert not fits.done
        fits.cancel()
        refused = engine.submit([5], max_length=longest + 1)
        assert refused.done
        assert refused.result().finish_reason == "refused"
