"""Handles: increments, results, and callers that leave or wait in several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from engine_answers import PROMPTS, alone, answers

from hf_paged import demo
from hf_paged.engine import Engine

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def stories() -> Engine:
    return Engine(demo.model(), demo.tokenizer(), num_blocks=200)


def test_increments_are_the_answer(stories: Engine) -> None:
    """Token by token, several requests by turns; the pieces of text are the text."""
    handles = [
        stories.submit(prompt, do_sample=True, num_return_sequences=2, max_new_tokens=12, seed=i)
        for i, prompt in enumerate(demo.prompts()[:3])
    ]
    pieces: list[dict[int, list[Any]]] = [{0: [], 1: []} for _ in handles]
    for i, handle in enumerate(handles):
        for increment in handle:
            pieces[i][increment.index].append(increment)
    for handle, of_handle in zip(handles, pieces, strict=True):
        for sequence, increments in zip(handle.result().sequences, of_handle.values(), strict=True):
            assert [token for increment in increments for token in increment.token_ids] == sequence.token_ids
            assert "".join(increment.text for increment in increments) == sequence.text
            assert [increment.finish_reason for increment in increments] == [None] * (len(increments) - 1) + [
                sequence.finish_reason
            ]
            assert all(len(increment.token_ids) == 1 for increment in increments)


def test_leaving_an_iteration_keeps_the_rest(engine: Engine) -> None:
    """Steps bring an increment for each of three answers at once: a loop that ends after the first of them
    has taken no other.
    """
    handle = engine.submit(
        PROMPTS[3], do_sample=True, num_return_sequences=3, max_new_tokens=6, min_new_tokens=6, seed=1
    )
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for loops in range(4):
        for increment in handle:
            found[increment.index] += increment.token_ids
            if loops < 3:
                break
    assert list(found.values()) == [sequence.token_ids for sequence in handle.result().sequences]
    assert handle.read() == []


def test_a_result_in_time(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(TimeoutError, match="continues"):
        handle.result(timeout=0)
    assert len(answers(handle.result(timeout=60))[0]) == 8


def test_several_threads_wait(engine: Engine) -> None:
    """Each drives the engine for all; nobody's tokens change."""
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = answers(engine.submit(PROMPTS[i], **GREEDY).result())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == [alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS[:4]]
