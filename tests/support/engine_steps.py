"""Steps of an engine, by the scheduler's plans: for tests that must not depend on how they are carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import answers
from engine_parts import running, scheduler_of

from hf_paged.engine import Engine
from hf_paged.engine.handle import Handle
from hf_paged.engine.requests.job import Job
from hf_paged.engine.worker.executor import Executor
from hf_paged.scheduling import UNKNOWN, StepPlan, TokenSequence


def watch_plans(engine: Engine, see: Callable[[StepPlan], object], empty: bool = False) -> None:
    """Call `see` with every plan that has rows, before it is carried out. empty: with all others too."""
    scheduler = scheduler_of(engine)
    schedule = scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        if plan or empty:
            see(plan)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]


def job_of(handle: Handle) -> Job:
    """The engine's side of a request."""
    return handle._job


def executor_of(engine: Engine) -> Executor:
    """The part of an engine that computes."""
    return engine.driver.loop.executor


def new_tokens(handle: Handle) -> list[int]:
    """The tokens of a request with one sequence since they were read last."""
    return [token for increment in handle.read() for token in increment.token_ids]


def own_steps(engine: Engine, count: int = 1) -> None:
    """A row of steps as the engine's own loop takes them, without its caller's code in between."""
    with engine.lock.lock:
        for _ in range(count):
            engine.driver.advance()


def known_tokens(sequence: TokenSequence) -> int:
    """How many tokens of a sequence the host has."""
    return len(sequence.tokens) - sequence.tokens.count(UNKNOWN)


def launched_unseen(engine: Engine) -> list[int]:
    """How many rows of each step from now on begin with a token that the host has not seen; the list grows."""
    seen: list[int] = []

    def count(plan: StepPlan) -> None:
        seen.append(sum(row.start + row.count > known_tokens(row.sequence) for row in plan.rows))

    watch_plans(engine, count)
    return seen


def unseen_tokens(engine: Engine) -> int:
    """How many running sequences wait for a token of a launched step."""
    sequences = [sequence for group in running(engine) for sequence in group.sequences]
    return sum(sequence.computed >= known_tokens(sequence) for sequence in sequences)


def broken_into(engine: Engine, params: list[tuple[Any, dict[str, Any]]], number: int) -> list[Any]:
    """The answers of requests of which the forward of that number breaks off; the books are recounted."""
    handles = [engine.submit(prompt, **kind) for prompt, kind in params]
    interrupted_forward(engine.model, number)
    with pytest.raises(KeyboardInterrupt):
        handles[-1].result()
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
    return [answers(handle.result()) for handle in handles]


def interrupted_forward(model: Any, number: int) -> None:
    """Have the forward of that number from now on break off with a KeyboardInterrupt, once."""
    forward = model.lm_head.forward
    left = [number]

    def breaks(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return forward(*arguments)

    model.lm_head.forward = breaks
