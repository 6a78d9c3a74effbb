"""Ctrl-C, signal handlers, forks, and what a request's own code raises: everything answers afterwards
(C34).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import examples, pairwise
from engine_answers import PROMPTS, alone, answers
from engine_faults import GREEDY, Fails, assert_neighbours_unharmed, neighbours
from engine_parts import has_unfinished, thread_of
from engine_threads import GUARD, Gate, in_threads, join

from hf_paged.engine import Engine
from hf_paged.engine.sampling.beams import BeamSearch

OWN = [asyncio.CancelledError(), GeneratorExit(), SystemExit("mine"), KeyboardInterrupt()]
NAMES = [type(error).__name__ for error in OWN]
PLAIN = {"max_new_tokens": 9, "do_sample": False}
REACH_THE_DRIVER = (SystemExit, KeyboardInterrupt)


class Decodes:
    """A tokenizer that raises when an answer is decoded that begins with a token."""

    def __init__(self, sore: int, error: BaseException) -> None:
        self.sore, self.error = sore, error

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        if tokens[:1] == [self.sore]:
            raise self.error
        return " ".join(map(str, tokens))


# ---- a request's own code


@pytest.mark.parametrize(
    ("error", "where", "kind"),
    pairwise(
        OWN,
        ["logits_processor", "stopping_criteria"],
        [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ),
    ids=str,
)
def test_own_code_ends_its_request(
    engine: Engine, error: BaseException, where: str, kind: dict[str, Any]
) -> None:
    """Errors of all kinds. Those meant for the process reach the driver, once, when the books are whole."""
    handles = neighbours(engine)
    own = engine.submit(PROMPTS[4], **{**GREEDY, **kind, where: [Fails(1, error)]})
    caught = []
    for _ in range(12):
        try:
            engine.step()
        except REACH_THE_DRIVER as interrupt:
            caught.append(interrupt)
            engine.check()
    assert caught == ([error] if isinstance(error, REACH_THE_DRIVER) else [])
    output = own.result()
    assert (output.finish_reason, output.error) == ("error", error)
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("error", OWN, ids=NAMES)
@pytest.mark.parametrize("reads", [False, True])
def test_a_tokenizer_ends_its_request(model: Any, error: BaseException, reads: bool) -> None:
    sore = alone(model, PROMPTS[4], **GREEDY)[0][0]
    assert sore not in [alone(model, prompt, **GREEDY)[0][0] for prompt in PROMPTS[:3]]
    engine = Engine(
        model, Decodes(sore, error), block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8
    )
    handles = neighbours(engine)
    own = engine.submit(PROMPTS[4], **GREEDY)
    caught = []
    for _ in range(3):
        try:
            if reads:
                list(own)
            own.result()
        except REACH_THE_DRIVER as interrupt:
            caught.append(interrupt)
    assert caught == ([error] if isinstance(error, REACH_THE_DRIVER) else [])
    assert (own.result().finish_reason, own.result().error) == ("error", error)
    assert_neighbours_unharmed(engine, handles)
    engine.close()


@pytest.mark.parametrize("error", OWN, ids=NAMES)
def test_own_code_does_not_end_the_thread(engine: Engine, error: BaseException) -> None:
    with engine.start():
        thread = thread_of(engine)
        handles = neighbours(engine)
        own = engine.submit(PROMPTS[4], **GREEDY, logits_processor=[Fails(1, error)])
        assert (own.result(GUARD).finish_reason, own.result().error) == ("error", error)
        assert_neighbours_unharmed(engine, handles)
        assert thread_of(engine) is thread
        assert not thread.over


def test_an_interrupt_elsewhere_names_itself(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends with what the model raised, in words even if that has none; after start() the request
    goes on.
    """
    with engine.start():
        with monkeypatch.context() as patch:
            patch.setattr(model.lm_head, "forward", Fails(0, SystemExit()))
            handle = engine.submit(PROMPTS[4], **GREEDY)
            with pytest.raises(RuntimeError, match=r"thread has stopped: SystemExit; .*start\(\)"):
                handle.result(GUARD)
        engine.start()
        assert answers(handle.result(GUARD)) == alone(model, PROMPTS[4], **GREEDY)


# ---- Ctrl-C at any moment


@contextlib.contextmanager
def interrupts(rng: random.Random, most: float) -> Iterator[Callable[[], object]]:
    """SIGALRM as Ctrl-C: each call has one come in at most so many seconds, and again while it was lost in a
    finalizer.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, most), 0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def bombard(engine: Engine, act: Callable[[], object], count: int, most: float = 0.02) -> int:
    """Do something again and again while Ctrl-C comes at random moments; the answer is how often it came."""
    came = 0
    with interrupts(random.Random(count), most) as arm:
        while came < count:
            with contextlib.suppress(KeyboardInterrupt):  # one more of them, in the lines that count the last
                try:
                    arm()
                    while True:
                        act()
                except KeyboardInterrupt:
                    came += 1
    return came


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that came in a finalizer
@pytest.mark.parametrize("who", ["one", "two", "thread"])
def test_ctrl_c_at_random_moments(engine: Engine, who: str) -> None:
    """One driver, two of them, or start() and a wait; and another client thread all the while. No lock stays
    behind.
    """
    expected = [alone(engine.model, prompt, **PLAIN) for prompt in PROMPTS[:2]]
    over, wrong = threading.Event(), []

    def client() -> None:
        while not over.is_set():
            engine.stats()
            if who == "two":
                found = answers(engine.submit(PROMPTS[1], **PLAIN).result())
                if found != expected[1]:
                    wrong.append(found)
            time.sleep(0.001)

    def act() -> None:
        if who == "thread":
            engine.start()
        engine.submit(PROMPTS[0], **PLAIN).result()

    clients = in_threads([client])
    bombard(engine, act, examples(60))
    over.set()
    join(clients)
    assert not wrong
    engine.stop()
    found: list[Any] = []
    join(in_threads([lambda: found.append(answers(engine.submit(PROMPTS[0], **PLAIN).result(GUARD)))]))
    assert found == [expected[0]]
    while has_unfinished(engine):
        engine.step()
    engine.check()
    assert engine.stats()["blocks"]["full"]["held"] == 0
    engine.close()


# ---- handlers of signals


@pytest.mark.parametrize("act", ["stats", "close", "submit", "cancel"])
@pytest.mark.parametrize("waits", ["submit", "result"])
def test_a_handler_while_the_main_thread_waits(engine: Engine, act: str, waits: str) -> None:
    """The main thread waits for its turn, or for the engine's thread: the handler of a signal may use the
    engine meanwhile.
    """
    did: list[object] = []
    gate = Gate()
    first = engine.submit(PROMPTS[4], **GREEDY, stopping_criteria=[gate.criterion])
    if waits == "result":
        engine.start()
    else:
        drivers = in_threads([first.result])
    gate.wait()
    opener = threading.Timer(0.3, gate.open.set)

    def handle(*_: object) -> None:
        opener.start()
        acts: dict[str, Callable[[], object]] = {
            "stats": engine.stats,
            "close": engine.close,
            "cancel": first.cancel,
        }
        did.append(acts.get(act, lambda: engine.submit(PROMPTS[0], **GREEDY))())

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        if waits == "result":
            first.result(GUARD)
        else:
            with contextlib.suppress(RuntimeError):  # closed, meanwhile
                engine.submit(PROMPTS[1], **GREEDY).result(GUARD)
            join(drivers)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(did) == 1
    assert gate.opened_in_time
    assert first.done
    engine.close()


# ---- fork


def in_a_fork(act: Callable[[], list[list[int]]]) -> Any:
    """The answer of `act` in a forked process: token ids, or the words of what it raised; None if none
    comes.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            answer = repr(act())
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode())
        os._exit(0)
    try:
        ready, _, _ = select.select([read], [], [], 60)
        return os.read(read, 2**16).decode() if ready else None
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(read)
        os.close(write)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("busy", ["call", "engine", "thread"])
def test_a_fork_while_another_thread_is_at_work(model: Any, engine: Engine, busy: str) -> None:
    """The child finds free locks, its model as the user made it, and its own answers right."""
    ids = torch.tensor([PROMPTS[0]])

    def paged() -> list[list[int]]:
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            do_sample=False,
            cache_implementation="paged",
        )
        found: list[list[int]] = answer[:, ids.shape[1] :].tolist()
        return found

    expected, over = paged(), threading.Event()

    def work() -> None:
        while not over.is_set():
            if busy == "call":
                paged()
            else:
                engine.submit(PROMPTS[1], **GREEDY).result()

    def child() -> list[list[int]]:
        found = paged()
        assert model.config._attn_implementation == "sdpa"
        assert "forward" not in model.__dict__
        if busy != "thread":  # whose thread is left behind
            assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == alone(model, PROMPTS[1], **GREEDY)
            engine.check()
        return found

    if busy == "thread":
        engine.start()
    workers = in_threads([work])
    rng = random.Random(0)
    for _ in range(4):
        time.sleep(rng.uniform(0.0, 0.02))
        assert in_a_fork(child) == repr(expected)
    over.set()
    join(workers)
    assert paged() == expected
    engine.close()


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_beams_end(
    model: Any, engine: Engine, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that is over and whose answers are not entered yet ends with them, in the next call at the latest."""
    params = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    expected = answers(engine.submit(PROMPTS[0], **params).result())
    whole, left = BeamSearch.answers, [times]

    def breaks(search: BeamSearch) -> Any:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return whole(search)

    monkeypatch.setattr(BeamSearch, "answers", breaks)
    handle = engine.submit(PROMPTS[0], **params)
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert answers(handle.result()) == expected
    engine.check()
