"""The part of an engine that computes: in one process it meets no other."""

from __future__ import annotations

from typing import Any

import pytest
from engine_steps import executor_of

from hf_paged.engine import Engine
from hf_paged.engine.worker.executor import Executor


@pytest.fixture
def executor(engine: Engine) -> Executor:
    return executor_of(engine)


def test_one_process_leads_and_follows_nobody(engine: Engine, executor: Executor) -> None:
    assert executor.leads is engine.leads is True
    with pytest.raises(RuntimeError, match="only ranks other than 0"):
        engine.follow()


def test_what_ranks_do_together_is_done_here(executor: Executor) -> None:
    done: list[Any] = []
    assert executor.changed(lambda: bool(done.append("look") or True))
    assert executor.load(lambda: {"a.weight"}) == {"a.weight"}
    executor.look_now(lambda: done.append("now"))
    assert done == ["look", "now"]
    assert executor.wait(lambda: True)
    assert not executor.wait_whole(lambda: False)


def test_nothing_is_refused_that_needs_one_process(executor: Executor) -> None:
    """Sleep, a pause that keeps blocks, weights without a pause, adapters in the middle of anything."""
    executor.require_lead()
    executor.require_alone("sleep()")
    executor.require_paused(False)
    executor.require_media(object())
    executor.require_between_forwards("add_adapter()")
