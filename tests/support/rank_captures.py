"""Cases: captured steps, which all ranks replay or none."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers, right
from families import BY_NAME, build
from fused_models import Kernels
from kernel_cases import load as load_kernels
from marked import MARK, SEEN, by_request, fillers_of, marked, with_mark
from processes import LIMIT
from rank_support import ASKED, CUDA, FEW, GREEDY, NEW, SMALL, asked, compare, led, loaded, whole
from tape import record, rerun

from hf_paged.blocks.columns import declared
from hf_paged.engine import Engine
from hf_paged.engine.worker.runner import Runner
from hf_paged.kv import Ops
from hf_paged.model.capture.products import joined_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.shards import local_part


def captured_steps(rank: int) -> None:
    """Replayed on all ranks, collectives included; a tape stands in for CUDA graphs."""
    if not CUDA:
        RECORDERS["cpu"] = record
    try:
        stats = compare("llama", rank, FEW, run_ahead=True)
    finally:
        RECORDERS.pop("cpu", None)
    assert rank or stats["graphs"]["replayed"] > 5, stats


def a_column_of_a_test(rank: int) -> None:
    """Rank 0 fills it, all ranks read it, in captured steps and outside of them."""
    requests = [(0, 1), (1, 0), (2, 2), (1, 3), (3, 1)]
    model, reference = marked(loaded("llama")), marked(build(BY_NAME["llama"]).to(whole("llama").device))
    SEEN.clear()

    def act(engine: Engine) -> dict[str, Any]:
        fillers_of(engine).fill("mark", by_request([mark for _, mark in requests]))
        handles = []
        for p, _ in requests:
            handles.append(engine.submit(PROMPTS[p], **GREEDY))
            engine.step()
        found = [answers(handle.result()) for handle in handles]
        assert found == [with_mark(reference, mark, PROMPTS[p], **GREEDY) for p, mark in requests]
        return engine.stats()

    with pytest.MonkeyPatch.context() as patch, declared(MARK):
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
        stats = led(rank, model, act, run_ahead=True, prefix_caching=False)
    assert rank or stats["graphs"]["replayed"] > 4, stats
    assert {mark for step in SEEN for mark in step} == {0, 1, 2, 3}


def kernels_that_are_ready_later_on_one_rank(rank: int) -> None:
    """Until then no rank captures what launches them, and no rank waits for another."""
    asked: list[bool] = []

    def is_ready(runner: Runner, size: Any) -> bool:
        asked.append(rank == 0 or len(asked) >= 4)
        if not asked[-1] or len(asked) < 5:
            assert not runner.captured or not len(runner.captured.captures)
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
        patch.setattr(Runner, "is_ready", is_ready)
        stats = compare("llama", rank, FEW)
    assert len(asked) > 4
    assert rank or stats["graphs"]["replayed"] > 5, stats


def captured_steps_over_pools_that_grow(rank: int) -> None:
    """A pool moves on all ranks or on none: captured steps that read it are dropped with it."""
    if CUDA:
        return  # there pools have all their memory from the first step on
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", record)
        patch.setattr("hf_paged.engine.worker.pools.SHARE_AT_FIRST", 0.001)
        stats = compare("llama", rank, ASKED, num_blocks=None, rank_timeout=20.0)
    assert rank or stats["graphs"]["replayed"] > 5, stats


def captured_steps_of_code_that_changes_on_one_rank(rank: int) -> None:
    """The place where a replaced forward was made is part of a captured step: all begin anew."""
    model = loaded("llama")
    forward = model.model.layers[1].mlp.forward
    noted = [0]

    def noting(states: torch.Tensor) -> torch.Tensor:
        assert noted[0] >= 0
        return forward(states)

    model.model.layers[1].mlp.forward = noting
    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        if rank:
            assert not engine.follow(lambda value: noted.__setitem__(0, value))
            return
        options = {**GREEDY, "max_new_tokens": 9}
        right = alone(whole("llama"), PROMPTS[1], **options)
        for change in (1, None, 2, None):
            before = engine.stats()["graphs"]["replayed"]
            handle = engine.submit(PROMPTS[1], **options)
            for _ in range(5):
                engine.step()
            if change == 1:
                engine.broadcast(change)
            elif change == 2:
                noted[0] = change
            assert answers(handle.result()) == right
            assert answers(engine.submit(PROMPTS[1], **options).result()) == right
            assert engine.stats()["graphs"]["replayed"] > before + 5, engine.stats()["graphs"]


def a_warm_up(rank: int) -> None:
    """All ranks capture before requests come what these will need."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", rerun)
            patch.setitem(sys.modules, "hf_paged_kernels", load_kernels())
            patch.setattr("hf_paged.kv.ops.why_no_kernels", lambda layout: None)

        def act(engine: Engine) -> None:
            end = time.monotonic() + LIMIT
            while not engine.warm_up():
                assert time.monotonic() < end
                time.sleep(0.1)
            warm = engine.stats()["graphs"]
            assert warm["captured"] > 1, warm
            assert asked(engine, [(0, 0)]) == [right("llama", 0, 0, NEW)]
            found = engine.stats()["graphs"]
            assert found["captured"] == warm["captured"], found
            assert found["replayed"] > 2, found

        led(rank, loaded("llama"), act, max_batch_sequences=1, max_batch_tokens=4)


def user_code_on_one_rank_for_a_while(rank: int) -> None:
    """A hook, or a replaced forward, comes and goes between requests: none captures meanwhile."""
    for which, wraps in ((0, True), (1, False)):
        _with_user_code(rank == which, wraps)


def _with_user_code(here: bool, wraps: bool) -> None:
    model = loaded("llama")
    layer: Any = model.model.layers[1].mlp
    forward = layer.forward
    handles: list[Any] = []

    def change(on: bool) -> None:
        if here and wraps and on:
            layer.forward = lambda x: forward(x)
        elif here and wraps:
            del layer.forward
        elif here and on:
            handles.append(layer.register_forward_hook(lambda module, given, answer: None))
        elif here:
            handles.pop().remove()

    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        if not engine.leads:
            assert not engine.follow(change)
            return
        for on in (None, True, False):
            if on is not None:
                engine.broadcast(on)
                change(on)
            before = engine.stats()["graphs"]["replayed"]
            for _ in range(1 if on else 3):
                found = answers(engine.submit(PROMPTS[1], **GREEDY).result())
                assert found == right("llama", 1, 0, NEW)
            assert on or engine.stats()["graphs"]["replayed"] > before + 5


def weights_at_an_earlier_address_on_one_rank(rank: int) -> None:
    """All ranks put a weight elsewhere; rank 0 where it was before, of which it knows captured steps."""
    model = loaded("llama")
    weight = local_part(model.model.norm.weight)
    places = [weight.data, weight.data.clone()]
    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        for turn in range(3):
            if rank == 0:
                for _ in range(2):
                    found = answers(engine.submit(PROMPTS[1], **GREEDY).result())
                    assert found == right("llama", 1, 0, NEW)
                engine.pause()
            else:
                assert engine.follow()
                places.append(places[0].clone())
            weight.data = places[(turn + 1) % 2] if rank == 0 else places[-1]
            if rank == 0:
                engine.resume()
        if rank == 0:
            assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
            assert engine.stats()["graphs"]["replayed"] > 10
        else:
            assert not engine.follow()


def fused_projections(rank: int) -> None:
    """Each rank lays its parts side by side, and multiplies with them at once."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
            patch.setattr(Ops, "kernels", Kernels())
        for name in ("llama", "olmo2"):
            model = loaded(name)
            for parameter in model.parameters():  # on a CPU a rank's part lies in the memory of the whole
                part = local_part(parameter)
                part.data = part.clone()

            def act(engine: Engine, name: str = name) -> int:
                assert asked(engine, FEW) == [right(name, p, k, NEW) for p, k in FEW]
                return int(engine.stats()["graphs"]["replayed"])

            replayed = led(rank, model, act, fuse_projections=True)
            assert rank or replayed > 5
            attention = model.model.layers[0].self_attn
            layers = [attention.q_proj, attention.k_proj, attention.v_proj]
            joined = joined_of([local_part(layer.weight) for layer in layers])
            assert joined is not None
            assert torch.equal(joined, torch.cat([layer.weight.to_local() for layer in layers]))


def a_capture_that_fails_on_one_rank(rank: int) -> None:
    """Then no rank replays, and all answer as before."""
    device = "cuda" if CUDA else "cpu"
    recorder = RECORDERS.get(device)

    own = recorder or record

    def broken(*given: Any) -> Any:
        own(*given)  # a tape computes, with the other rank
        raise RuntimeError("no capture on this rank")

    RECORDERS[device] = broken if rank else own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stats = compare("llama", rank, FEW, run_ahead=True)
    finally:
        RECORDERS.pop(device)
        if recorder is not None:
            RECORDERS[device] = recorder
    if rank == 0:
        assert not stats["graphs"].get("replayed"), stats["graphs"]
