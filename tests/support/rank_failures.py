"""Cases: ranks that raise, hang or end. Their process groups are gone behind each."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_answers import PROMPTS
from rank_support import (
    BACKEND,
    CUDA,
    FOLDER,
    GREEDY,
    MODES,
    NEW,
    SMALL,
    begin_again,
    generated,
    loaded,
    raises,
)
from tape import record
from torch.distributed import destroy_process_group

from hf_paged.engine import Engine, RankError
from hf_paged.engine.parallel import Ranks, ranks
from hf_paged.engine.parallel.message import MessageKind
from hf_paged.engine.worker.runner import Runner
from hf_paged.model.capture.replay import captures_of
from hf_paged.model.ranks import votes as rank_votes
from hf_paged.model.ranks.tensor_parallel import mesh_of
from hf_paged.model.rehearsal import RECORDERS


def _spoiled(model: Any, rank: int, act: Callable[[], Any]) -> None:
    """Let a rank do something in the middle of its fifth forward behind now."""
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    count = [0]

    def spoilt(states: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if dist.get_rank() == rank and count[0] == 5:
            act()
        return forward(states)

    mlp.forward = spoilt


def _broken(rank: int, act: Callable[[], Any], words: str, seconds: float, **options: Any) -> None:
    """One error on all ranks, soon, and nothing that hangs behind it."""
    model = loaded("llama-3" if dist.get_world_size() == 3 else "llama")
    engine = Engine(model, graphs=False, **{**SMALL, **options})
    _spoiled(model, 1, act)
    begin = time.monotonic()
    if rank == 0:
        handle = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False)
        raises(RankError, words, handle.result)
        raises(RankError, words, handle.result)
    else:
        raises(RankError, words, engine.follow)
    assert time.monotonic() - begin < seconds
    engine.close()


def a_rank_that_raises(rank: int) -> None:
    def act() -> None:
        raise ValueError("mine")

    _broken(rank, act, "rank 1 raised ValueError: mine", 8.0)


def captured_steps_of_a_rank_that_raises(rank: int) -> None:
    """NCCL ends the waits of a group only when no captured step has its collectives: the engine drops them,
    also if it is left open, and no thread of the user's waits for that.
    """
    begin_again(10)
    dropped = threading.Event()
    broken = threading.Event()
    break_waits = ranks.break_waits
    close = Runner.close
    closed: list[None] = []

    def end(*given: Any) -> None:
        break_waits(*given)
        if dropped.wait(5):
            broken.set()

    def drop(model: Any) -> None:
        assert model.config.model_type == "llama"
        dropped.set()

    def act() -> None:
        raise ValueError("mine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "break_waits", end)
        patch.setattr(Runner, "close", lambda runner: closed.append(close(runner)))
        patch.setattr("hf_paged.engine.driver.drop_captures", drop)  # those of generate() on the same ranks
        patch.setattr(Engine, "close", lambda engine: None)
        _broken(rank, act, "rank 1 raised ValueError: mine", 4.0)
        assert broken.wait(2)
        assert closed


def a_rank_without_memory(rank: int) -> None:
    """In the middle of a forward others may wait in a sum already: one error says where and what to do."""
    begin_again(4)

    def act() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    words = (
        "rank 1 raised OutOfMemoryError: CUDA out of memory.*bytes are free on its .*lower max_batch_tokens"
    )
    _broken(rank, act, words, 8.0)


def errors_at_different_places(rank: int) -> None:
    """All ranks raise in one step, but one of them behind a sum that the others have not begun."""
    begin_again(5)
    model = loaded("llama-3")
    engine = Engine(model, graphs=False, **SMALL)
    forward = model.model.layers[1].mlp.forward
    calls = [0]

    def broken(states: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] < 3:
            return forward(states)
        if rank == 0:  # as a device does it: nothing waits for the others yet
            dist.all_reduce(states.clone(), group=mesh_of(model).get_group(), async_op=True)
        raise torch.OutOfMemoryError("on purpose")

    model.model.layers[1].mlp.forward = broken
    act = engine.submit(PROMPTS[1], **GREEDY).result if rank == 0 else engine.follow
    raises(RankError, "raised OutOfMemoryError: on purpose", act)
    engine.close()


def an_interrupt_of_a_rank_that_waits(rank: int) -> None:
    """It is raised there, and ends the next step on all."""
    begin_again(8)
    engine = Engine(loaded("llama-3"), **SMALL)
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        raises(KeyboardInterrupt, "", engine.follow)
        (FOLDER / "interrupted").touch()
    else:
        end = time.monotonic() + 10  # a busy machine takes long to begin to follow
        while not (FOLDER / "interrupted").exists() and time.monotonic() < end:
            time.sleep(0.05)
        act = engine.submit(PROMPTS[1], **GREEDY).result if rank == 0 else engine.follow
        raises(RankError, "rank 1 raised KeyboardInterrupt", act)
    engine.close()


def a_rank_that_closes_early(rank: int) -> None:
    """An error that ends another rank's block reaches rank 0 with its next step, and by it all others."""
    begin_again(6)
    begin = time.monotonic()
    try:
        with Engine(loaded("llama-3"), **SMALL) as engine:
            dist.barrier()  # else a rank that still makes its engine gets the error there
            if rank == 1:
                raise LookupError("no file here")
            act = engine.submit(PROMPTS[1], **GREEDY).result if rank == 0 else engine.follow
            raises(RankError, "rank 1 raised LookupError: no file here", act)
    except LookupError:
        pass
    assert time.monotonic() - begin < 8


def an_engine_that_one_rank_cannot_make(rank: int) -> None:
    begin_again(7)
    model = loaded("llama-3")
    if rank == 1:
        model.train()
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    begin = time.monotonic()
    raises(RankError, "rank 1 raised RuntimeError: .*dropout", lambda: Engine(model, **SMALL))
    assert time.monotonic() - begin < 8


def weights_that_one_rank_cannot_load(rank: int) -> None:
    """The model would be none: the engine ends on all."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"no.such": torch.ones(2)}, "1 tensors, ValueError: .*'no.such'.*, 1 tensors; start again"),
        ({}, "1 tensors, 0 tensors, 1 tensors; start again"),
    ]
    for number, (given, words) in enumerate(cases):
        begin_again(20 + number)
        model = loaded("llama-3")
        state = given if rank == 1 else {"model.norm.weight": torch.ones(model.config.hidden_size)}
        load = functools.partial(_load_in_a_pause, model, state)
        raises(RankError, f"ranks have loaded different weights: {words}", load)


def _load_in_a_pause(model: Any, state: dict[str, Any]) -> None:
    with Engine(model, **SMALL) as engine:
        if engine.leads:
            engine.pause()
        else:
            assert engine.follow()
        engine.load_weights(state)


def a_rank_that_neither_makes_an_engine_nor_generates(rank: int) -> None:
    begin_again(11)
    model = loaded("llama-3")
    words = "ranks do not meet: .*each of them has to make"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_votes, "MEETING", 1.0)
        patch.setattr(rank_votes, "_patience", lambda group: 1.0)
        if rank != 1:
            raises(RankError, words, lambda: Engine(model, rank_timeout=1.0))
            ids = torch.tensor([PROMPTS[0]], device=model.device)
            raises(RuntimeError, words, lambda: model.generate(ids, cache_implementation="paged"))


def a_rank_that_hangs(rank: int) -> None:
    begin_again(1)
    seconds = 6 if CUDA else 1  # kernels are loaded, and devices connected, in the first step
    words = f"rank_timeout={seconds} seconds: rank 1 hangs"
    _broken(rank, lambda: time.sleep(4 * seconds), words, 7.0 * seconds, rank_timeout=seconds)


def a_rank_that_dies(rank: int) -> None:
    begin_again(2)
    _broken(rank, lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 has ended", 8.0)


def rank_0_that_ends_at_once(rank: int) -> None:
    """A process that has closed its engine may end, and the process groups' store with it. NCCL's groups are
    not destroyed while a captured step has their collectives.
    """
    model = loaded("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", record)
        for _ in range(4):
            generated(model, MODES[0], cache_implementation="paged")
        assert captures_of(model).pool.sizes()
    closed_too_late = Engine(model, **SMALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    destroy_process_group()
    assert not captures_of(model).pool.sizes()
    closed_too_late.close()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's: rank 0 is to have the store here
    dist.init_process_group(
        BACKEND,
        init_method=f"tcp://127.0.0.1:{port[0]}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    model = loaded("llama")
    engine = Engine(model, **SMALL)
    if rank == 0:
        engine.submit(PROMPTS[1], **GREEDY).result()
        time.sleep(0.5)  # the other one waits
        engine.close()
        os._exit(0)
    receive = Ranks.receive

    def slowly(ranks: Ranks) -> list[int]:
        numbers = receive(ranks)
        if MessageKind(numbers[0]) is MessageKind.CLOSE:
            time.sleep(1)  # rank 0 is gone by now
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "receive", slowly)
        assert not engine.follow()
