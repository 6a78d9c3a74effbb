"""The engine in coroutines: any event loop, never held up; who goes away ends his request and harms
nobody.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from engine_threads import GREEDY, GUARD, Gate, in_threads, join, meanwhile, model  # noqa: F401  # a fixture

from hf_paged.engine import Engine
from hf_paged.scheduling import Infeasible


def run(coroutine: Any) -> Any:
    """A coroutine in a loop of its own; one that hangs is an error."""
    return asyncio.run(asyncio.wait_for(coroutine, GUARD))


async def reached(gate: Gate) -> None:
    """The gate is reached; the loop goes on meanwhile."""
    await asyncio.get_running_loop().run_in_executor(None, gate.wait)


@pytest.fixture
def quiet(model: Any) -> Any:  # noqa: F811
    """An engine that nobody has started."""
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8) as made:
        yield made


def test_awaiting(quiet: Engine) -> None:
    """A handle, several together, a list, a stream; the thread starts by itself."""

    async def ask() -> None:
        assert answers(await quiet.submit(PROMPTS[1], **GREEDY)) == alone(quiet.model, PROMPTS[1], **GREEDY)
        together = await asyncio.gather(*(quiet.submit(prompt, **GREEDY) for prompt in PROMPTS))
        listed = await quiet.agenerate(PROMPTS, **GREEDY)
        expected = [alone(quiet.model, prompt, **GREEDY) for prompt in PROMPTS]
        assert [answers(output) for output in together] == [answers(output) for output in listed] == expected
        streamed = [increment async for increment in quiet.astream(PROMPTS[2], **GREEDY)]
        assert [[token for increment in streamed for token in increment.token_ids]] == expected[2]
        assert streamed[-1].finish_reason == "length"
        handle = quiet.submit(PROMPTS[2], **GREEDY)
        assert [increment.token_ids async for increment in handle] == [
            increment.token_ids for increment in streamed
        ]
        assert await handle is handle.result()
        assert await quiet.agenerate([], **GREEDY) == []

    run(ask())


def test_what_is_there_needs_no_thread(quiet: Engine) -> None:
    handle = quiet.submit([5] * 250, max_new_tokens=50)

    async def ask() -> Any:
        return await handle

    assert run(ask()).finish_reason == "refused"
    assert quiet.driver.background is None


def test_the_loop_goes_on(quiet: Engine) -> None:
    """A step that is held up holds up no coroutine: one of them opens its gate."""

    async def ask() -> None:
        gate = Gate()
        quiet.start()
        task = asyncio.ensure_future(
            quiet.agenerate([PROMPTS[0]], **GREEDY, stopping_criteria=[gate.criterion])
        )
        await reached(gate)
        other = quiet.submit(PROMPTS[1], **GREEDY)
        gate.open.set()
        assert answers((await task)[0]) == alone(quiet.model, PROMPTS[0], **GREEDY)
        assert answers(await other) == alone(quiet.model, PROMPTS[1], **GREEDY)
        assert gate.opened_in_time

    run(ask())


def test_increments_come_as_they_are_made(quiet: Engine) -> None:
    async def ask() -> None:
        gate = Gate(token=2)
        stream = quiet.astream(PROMPTS[1], **GREEDY, stopping_criteria=[gate.criterion])
        first = await anext(stream)
        await reached(gate)
        gate.open.set()
        tokens = first.token_ids + [token async for increment in stream for token in increment.token_ids]
        assert gate.opened_in_time
        assert [tokens] == alone(quiet.model, PROMPTS[1], **GREEDY)

    run(ask())


@pytest.mark.parametrize("way", ["handle", "list", "stream", "iteration"])
def test_a_task_that_is_cancelled_ends_its_requests(quiet: Engine, way: str) -> None:
    """With "abort", after the step that runs; the neighbours have the tokens they have alone."""
    gate, options = Gate(), {"max_new_tokens": 100, "do_sample": False}

    async def consume(handles: list[Any]) -> None:
        if way == "handle":
            await handles[0]
        elif way == "list":
            await quiet.agenerate([PROMPTS[3], PROMPTS[5]], **options)
        else:
            async for _ in handles[0] if way == "iteration" else quiet.astream(PROMPTS[3], **options):
                pass

    async def ask() -> None:
        neighbours = [quiet.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        handles = [quiet.submit(PROMPTS[3], **options)] if way in ("handle", "iteration") else []
        gated = quiet.submit(
            PROMPTS[4], **{**GREEDY, "max_new_tokens": 2}, stopping_criteria=[gate.criterion]
        )
        task = asyncio.ensure_future(consume(handles))
        await asyncio.sleep(0)
        quiet.start()
        await reached(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        assert (await gated).finish_reason == "length"
        for handle in handles:
            assert (await handle).finish_reason == "abort"
        assert [answers(await handle) for handle in neighbours] == [
            alone(quiet.model, prompt, **GREEDY) for prompt in PROMPTS[:3]
        ]

    run(ask())
    quiet.stop()
    quiet.check()
    stats = quiet.stats()
    assert (stats["running"], stats["waiting"], stats["blocks"]["full"]["held"]) == (0, 0, 0)
    assert stats["tokens"] < 150  # nobody has computed a hundred more


def test_leaving_a_loop(quiet: Engine) -> None:
    """Leaving astream() ends its request; leaving the loop over a handle does not."""

    async def ask() -> None:
        async for _ in quiet.astream(PROMPTS[3], max_new_tokens=200, do_sample=False):
            break
        handle = quiet.submit(PROMPTS[0], **GREEDY)
        async for _ in handle:
            break
        assert answers(await handle) == alone(quiet.model, PROMPTS[0], **GREEDY)

    run(ask())
    quiet.stop()
    stats = quiet.stats()
    assert (stats["running"], stats["finished"]) == (0, 2)


def test_several_loops(quiet: Engine) -> None:
    """One in each of some threads, others that wait without a loop, one engine."""
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        if i % 2:
            found[i] = [answers(output) for output in run(quiet.agenerate(PROMPTS[:3], **GREEDY))]
        else:
            found[i] = [answers(quiet.submit(prompt, **GREEDY).result(GUARD)) for prompt in PROMPTS[:3]]

    quiet.start()
    join(in_threads([lambda i=i: ask(i) for i in range(4)]))
    expected = [alone(quiet.model, prompt, **GREEDY) for prompt in PROMPTS[:3]]
    assert [found[i] for i in range(4)] == [expected] * 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed(quiet: Engine) -> None:
    """Its coroutines are nobody's any more; whatever they waited for ends, and others do not notice."""
    gate = Gate(token=2)
    quiet.start()
    loop = asyncio.new_event_loop()
    handle = quiet.submit(PROMPTS[3], max_new_tokens=100, do_sample=False, stopping_criteria=[gate.criterion])

    async def consume() -> None:
        async for _ in handle:
            pass

    task = loop.create_task(consume())
    loop.run_until_complete(asyncio.sleep(0))
    gate.wait()
    loop.close()
    task._log_destroy_pending = False
    neighbour = quiet.submit(PROMPTS[0], **GREEDY)
    gate.open.set()
    assert answers(neighbour.result(GUARD)) == alone(quiet.model, PROMPTS[0], **GREEDY)
    assert handle.result(GUARD).finish_reason == "abort"
    del task
    gc.collect()


def test_what_a_step_raises_reaches_coroutines(model: Any, quiet: Engine) -> None:  # noqa: F811
    """All that wait, and the list is given up."""

    async def ask() -> None:
        gate = Gate()
        quiet.start()
        first = quiet.submit(PROMPTS[4], **GREEDY, stopping_criteria=[gate.criterion])
        await reached(gate)
        tasks = [asyncio.ensure_future(each) for each in (first, quiet.submit(PROMPTS[1], **GREEDY))]
        listed = asyncio.ensure_future(quiet.agenerate([PROMPTS[2]], **GREEDY))
        await asyncio.sleep(0)
        with torch.no_grad():
            model.lm_head.weight.add_(0.0)
        gate.open.set()
        for task in [*tasks, listed]:
            with pytest.raises(RuntimeError, match="thread has stopped: the model's weights have changed"):
                await task
        quiet.pause()
        quiet.resume()
        assert answers(await first) == alone(model, PROMPTS[4], **GREEDY)

    run(ask())
    quiet.stop()
    assert quiet.stats()["finished"] == 3


def test_stopping_reaches_coroutines(quiet: Engine) -> None:
    async def ask() -> None:
        gate = Gate()
        quiet.start()
        handle = quiet.submit(PROMPTS[4], **GREEDY, stopping_criteria=[gate.criterion])
        await reached(gate)
        task = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        thread = quiet.driver.background
        stopping = meanwhile(quiet.stop, lambda: thread.halted)
        gate.open.set()
        with pytest.raises(RuntimeError, match="was stopped while a coroutine awaited"):
            await task
        join(stopping)
        assert answers(await handle) == alone(quiet.model, PROMPTS[4], **GREEDY)

    run(ask())


def test_a_list_that_fails_leaves_nothing_behind(quiet: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        run(quiet.agenerate([PROMPTS[0], []], **GREEDY))
    with pytest.raises(TypeError, match="a list of prompts"):
        run(quiet.agenerate(5))
    quiet.stop()
    assert quiet.stats()["waiting"] + quiet.stats()["running"] == 0


def test_a_list_with_a_prompt_that_is_too_long(quiet: Engine) -> None:
    """As generate(): a warning, or with `strict` its error."""
    prompts = [PROMPTS[0], [5] * 250]
    with pytest.warns(UserWarning, match=r"1 of 2 requests .* prompts\[1\] ended as 'refused'"):
        outputs = run(quiet.agenerate(prompts, **GREEDY))
    assert answers(outputs[0]) == alone(quiet.model, PROMPTS[0], **GREEDY)
    with pytest.raises(Infeasible, match="tokens long"):
        run(quiet.agenerate(prompts, **GREEDY, strict=True))
    quiet.stop()
    quiet.check()
