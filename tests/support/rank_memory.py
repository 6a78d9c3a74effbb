"""Cases: a rank that has less memory than the others, or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers, right
from engine_parts import block_bytes
from engine_steps import executor_of
from rank_support import (
    CUDA,
    FEW,
    GREEDY,
    NEW,
    SMALL,
    adapter_of,
    compare,
    first_capture_without_memory,
    led,
    loaded,
    lora,
    raises,
    whole,
)

from hf_paged.blocks import OutOfBlocks
from hf_paged.engine import Engine
from hf_paged.engine.in_flight import InFlightStep
from hf_paged.engine.parallel import follower
from hf_paged.engine.worker.adapters import EngineAdapters
from hf_paged.kv import HostBlocks, budget, group
from hf_paged.model.adapters.content import AdapterContents


def no_memory_for_blocks_on_one_rank(rank: int) -> None:
    """Before a forward all ranks have memory for its blocks, or the step fails on all as in one process."""
    full = [rank == 1]

    def scarce(act: Callable[..., Any]) -> Callable[..., Any]:
        def take(*given: Any) -> Any:
            if full[0]:
                raise torch.OutOfMemoryError("no memory on purpose")
            return act(*given)

        return take

    def receive(scarcity: bool) -> None:
        full[0] = scarcity and rank == 1

    def act(engine: Engine) -> None:
        long = [5 + k % 90 for k in range(150)]
        expected = alone(whole("llama"), long, **GREEDY)
        bad = engine.submit(PROMPTS[1], **GREEDY).result()
        assert bad.finish_reason == "error"
        assert "rank 1: OutOfBlocks: no memory" in str(bad.error), bad.error
        engine.broadcast(False)
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
        if CUDA:  # there all blocks have their memory from the first step on
            return
        engine.broadcast(True)
        handle = engine.submit(long, **GREEDY)
        raises(OutOfBlocks, "rank 1: OutOfBlocks: no memory", handle.result)
        raises(OutOfBlocks, "rank 1: OutOfBlocks: no memory", handle.result)
        engine.broadcast(False)
        assert answers(handle.result()) == expected
        engine.check()

    options = {**SMALL, "num_blocks": None}
    model = loaded("llama")
    with Engine(model, **options) as engine:
        total = engine.stats()["blocks"]["full"]["total"]
        assert rank == 0 or not engine.follow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.engine.worker.pools.SHARE_AT_FIRST", 20.5 / total)
        engine = Engine(model, **options)
        patch.setattr(group.Store, "grow", scarce(group.Store.grow))
        patch.setattr("hf_paged.kv.group.Store", scarce(group.Store))
        with engine:
            if rank:
                assert not engine.follow(receive)
            else:
                act(engine)


def no_memory_on_one_host(rank: int) -> None:
    """Blocks that one rank has no room for are computed again on all."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HostBlocks, "reserve", lambda *_: False)
        stats = compare("llama", rank, preemption="swap", num_blocks=21, max_batch_sequences=10)
    if rank == 0:
        assert stats["preemptions"] > 0
        assert stats["swapped_out"] == 0


def no_memory_for_rank_0_to_sample(rank: int) -> None:
    """It fails as in one process; the others wait for the next step."""

    def act(engine: Engine) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InFlightStep, "sample", _full)
            handle = engine.submit(PROMPTS[1], **GREEDY)
            raises(MemoryError, "full", handle.result)
        assert answers(handle.result()) == right("llama", 1, 0, NEW)

    led(rank, loaded("llama"), act)


def no_memory_for_a_capture_on_one_rank(rank: int) -> None:
    """All ranks try it again later, as one process does."""
    with first_capture_without_memory(rank == 1):
        stats = compare("llama", rank, FEW, run_ahead=True)
    if rank == 0:
        assert stats["graphs"]["replayed"] > 5, stats["graphs"]
        assert not stats["graphs"].get("refused"), stats["graphs"]


def the_smallest_rank_decides(rank: int) -> None:
    measured = budget.free_bytes
    from hf_paged.engine.worker import pools

    pools.free_bytes = lambda device: (1 << 22) - (rank << 21)
    try:
        engine = Engine(loaded("llama"), block_size=4, memory_fraction=0.5, graphs=False)
    finally:
        pools.free_bytes = measured
    gather = executor_of(engine).ranks.gather
    totals = gather([kind["total"] for kind in engine.stats()["blocks"].values()])
    hosts = gather([kind["most"] for kind in engine.stats()["host"].values()])
    assert totals[0] == totals[1] == [(1 << 20) // block_bytes(engine)]
    assert hosts[0] == hosts[1]
    if rank == 0:
        engine.close()
    else:
        assert not engine.follow()


def adapters_that_one_rank_has_no_memory_for(rank: int) -> None:
    """No rank has it then, and all others go on; inputs beside token ids are taken as adapters are."""
    model = loaded("llama")
    with Engine(model, **SMALL) as engine, pytest.MonkeyPatch.context() as patch:
        full = [rank == 1]

        def scarce(act: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: _full() if full[0] else act(*given)

        patch.setattr(EngineAdapters, "hold", scarce(EngineAdapters.hold))
        patch.setattr(follower, "on_device", scarce(follower.on_device))
        if rank:

            def receive(scarcity: int) -> None:
                full[0] = bool(scarcity)

            assert engine.follow(receive)
            assert not engine.follow(receive)
            assert list(engine.adapters()) == ["two"]
            return
        state = adapter_of("llama", 0, 4)
        row = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        raises(MemoryError, "rank 1: MemoryError: full", lambda: engine.add_adapter("one", state, lora(r=4)))
        raises(ValueError, "no adapter", lambda: engine.submit(PROMPTS[1], adapter="one"))
        output = engine.submit(inputs_embeds=row.to(model.device), **GREEDY).result()
        assert "rank 1: MemoryError: full" in str(output.error), output
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
        engine.broadcast(0)
        output = engine.submit(inputs_embeds=row.to(model.device), **GREEDY).result()
        assert output.error is None
        engine.add_adapter("two", state, lora(r=4))
        found = answers(engine.submit(PROMPTS[1], adapter="two", **GREEDY).result())
        assert found != right("llama", 1, 0, NEW)
        engine.broadcast(1)
        engine.pause()
        engine.add_adapter("three", state, lora(r=4))  # the others get it when they follow
        engine.resume()
        waiting = engine.submit(PROMPTS[1], adapter="three", **GREEDY)
        handle = engine.submit(PROMPTS[1], adapter="two", **GREEDY)
        raises(MemoryError, "rank 1: MemoryError: full", handle.result)
        assert answers(handle.result()) == found
        assert "'three'" in str(waiting.result().error)


def adapters_that_wait_for_memory_of_one_rank(rank: int) -> None:
    """A rank has memory for one adapter: requests of others wait on all ranks, and none ends with an error."""
    bring = AdapterContents.on_device
    there: weakref.WeakSet[Any] = weakref.WeakSet()
    refused = []

    def on_device(self: Any, names: Any, device: Any) -> Any:
        if there or names == ("large",):
            refused.append(names)
            raise torch.OutOfMemoryError("CUDA out of memory")
        adapter = bring(self, names, device)
        there.add(adapter)
        return adapter

    def answered(engine: Engine) -> list[Any]:
        for seed, name in enumerate(("one", "two", "three")):
            engine.add_adapter(name, adapter_of("llama", seed, 4), lora(r=4))
        wanted = ["one", "two", None, "three", "one", "two"]
        handles = [engine.submit(PROMPTS[i % 4], **GREEDY, adapter=each) for i, each in enumerate(wanted)]
        return [answers(each.result()) for each in handles]

    def act(engine: Engine) -> None:
        found = answered(engine)
        assert engine.stats()["adapters"]["on_device"] == 1
        engine.add_adapter("large", adapter_of("llama", 3, 4), lora(r=4))
        output = engine.submit(PROMPTS[1], **GREEDY, adapter="large").result()
        assert "rank 1: " in str(output.error), output.error
        assert "CUDA out of memory" in str(output.error)
        again = answers(engine.submit(PROMPTS[1], **GREEDY, adapter="two").result())
        assert again == found[1]
        with Engine(whole("llama"), **SMALL) as one:
            assert found == answered(one)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(AdapterContents, "on_device", on_device)
        led(rank, loaded("llama"), act, max_adapters=2)
    assert bool(refused) == (rank == 1)


def _full(*_: Any) -> Any:
    raise MemoryError("full")
