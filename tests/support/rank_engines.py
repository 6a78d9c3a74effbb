"""Cases: how engines of several ranks are made, used wrongly and left."""

from __future__ import annotations

import gc
import json
import os
import pickle
import tempfile
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_answers import PROMPTS, alone, answers, right
from rank_support import (
    CUDA,
    FEW,
    GREEDY,
    MODES,
    NEW,
    SMALL,
    asked,
    first_capture_without_memory,
    generated,
    led,
    loaded,
    lora,
    raises,
    whole,
)

from hf_paged.engine import Engine, RankError
from hf_paged.engine.parallel import Ranks, joining
from hf_paged.model.servable import Unservable


def a_thread_that_waits(rank: int) -> None:
    """An idle engine is no hang: ranks wait for longer than a step may take."""

    def act(engine: Engine) -> None:
        engine.start()
        time.sleep(2)
        found = answers(engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False).result())
        assert found == alone(whole("llama"), PROMPTS[1], max_new_tokens=NEW, do_sample=False)

    led(rank, loaded("llama"), act, rank_timeout=1.5)


def a_data_set(rank: int) -> None:
    """Rank 0 has its answers in a file, and knows its own model again."""

    def act(engine: Engine) -> None:
        out = Path(tempfile.mkdtemp()) / "answers.jsonl"
        for resumed in (0, 3):
            asked = engine.map(PROMPTS[:3], out, max_new_tokens=NEW, do_sample=False)
            assert (asked.resumed, asked.failed) == (resumed, 0)
        found = {row["index"]: row["token_ids"] for row in map(json.loads, out.read_text().splitlines())}
        for i, prompt in enumerate(PROMPTS[:3]):
            assert [found[i]] == alone(whole("llama"), prompt, max_new_tokens=NEW, do_sample=False)

    led(rank, loaded("llama"), act)


def an_error_of_all_ranks(rank: int) -> None:
    """It ends the request that causes it and no other; one for want of memory, too."""
    for error in (ZeroDivisionError, torch.OutOfMemoryError):
        _an_error_of_all_ranks(rank, error)


def _an_error_of_all_ranks(rank: int, error: type[Exception]) -> None:
    model = loaded("llama")
    forward = model.model.layers[1].mlp.forward

    def picky(states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] == 5 or states.shape[1] == 5 + 17:
            raise error("five tokens")
        return forward(states)

    def act(engine: Engine) -> None:
        bad = engine.submit([9, 8, 7, 6, 5], max_new_tokens=3, do_sample=False)
        good = engine.submit(PROMPTS[1], max_new_tokens=3, do_sample=False)
        assert isinstance(bad.result().error, error)
        assert answers(good.result()) == alone(whole("llama"), PROMPTS[1], max_new_tokens=3, do_sample=False)

    model.model.layers[1].mlp.forward = picky
    led(rank, model, act, max_batch_tokens=64)


def engines_that_cannot_be_made(rank: int) -> None:
    """All ranks get the error, and their process groups stay as they are."""
    model = loaded("llama")

    def refuse(*_: Any) -> Any:
        raise Unservable("on purpose")

    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.engine.engine.Pools", refuse)
        try:
            Engine(model, **SMALL)
        except Unservable as error:
            if rank == 0:
                kept.append(error)  # and with its frames what the engine had
    gc.collect()
    time.sleep(0.5)
    assert len(kept) == (rank == 0)
    found = generated(model, MODES[0], cache_implementation="paged")
    assert found == generated(whole("llama"), MODES[0])


def engines_that_are_left_alone(rank: int) -> None:
    """Rank 0's engine is collected and was not closed: the others end as if it were."""
    model = loaded("llama")
    for _ in range(2):
        engine = Engine(model, **SMALL)
        if rank == 0:
            assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
            del engine
            gc.collect()
        else:
            assert not engine.follow()
    led(rank, model, lambda engine: asked(engine, FEW[:1]))


def models_that_go(rank: int) -> None:
    """Neither captured steps nor an engine keep a model, on any rank."""
    for paged in (True, False):
        model = loaded("llama")
        if paged:
            with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
                patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
                for _ in range(3):
                    generated(model, MODES[0], cache_implementation="paged")
        else:
            led(rank, model, lambda engine: asked(engine, FEW[:1]))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None, paged


def groups_of_the_user(rank: int) -> None:
    """Ranks meet though one of them has a process group more, and a closed engine leaves none behind."""
    model = loaded("llama")
    own = dist.new_group([0])
    held = dist.distributed_c10d._world.pg_map
    before = set(held)
    for _ in range(2):
        led(rank, model, lambda engine: asked(engine, FEW[:1]))
    assert set(held) == before
    dist.destroy_process_group(own)


def wrong_uses(rank: int) -> None:
    model = loaded("llama")
    with Engine(model, **SMALL) as engine:
        if rank == 0:
            raises(RuntimeError, "leads", engine.follow)
            engine.broadcast({"words": [1, 2]})
            raises((AttributeError, pickle.PicklingError), "local", lambda: engine.broadcast(lambda: 1))
            for dtype in (torch.float32, torch.bfloat16, torch.bool):
                engine.broadcast([torch.arange(40000).to(dtype), "large"])
            engine.broadcast(torch.arange(3))
        else:
            raises(RuntimeError, "rank 1 .*rank 0; call engine.follow", lambda: engine.submit([5, 6]))
            raises(RuntimeError, "rank 1", engine.step)
            raises(RuntimeError, "rank 1 .*rank 0", lambda: engine.add_adapter("one", {}, lora()))
            raises(RuntimeError, "rank 1 .*rank 0", lambda: engine.remove_adapter("one"))
            raises(RuntimeError, "rank 1 .*rank 0", lambda: engine.broadcast(1))
            received: list[Any] = []
            assert not engine.follow(received.append)
            assert received[0] == {"words": [1, 2]}
            for dtype, (tensor, word) in zip(
                (torch.float32, torch.bfloat16, torch.bool), received[1:4], strict=True
            ):
                assert torch.equal(tensor, torch.arange(40000).to(dtype))
                assert word == "large"
            assert received[4].tolist() == [0, 1, 2]
            raises(RuntimeError, "closed", engine.follow)
    raises(
        ValueError,
        "different block_size: 4, 8; give",
        lambda: Engine(model, block_size=4 << rank),
    )
    other = loaded(("llama", "qwen3")[rank])
    raises(ValueError, "different model: .*LlamaFor.*, .*Qwen3For", lambda: Engine(other, **SMALL))
    other = loaded("llama").to((torch.float32, torch.float64)[rank])
    raises(ValueError, "different model: .*float32.*float64", lambda: Engine(other, **SMALL))
    other = loaded("llama")
    with torch.no_grad():
        other.model.norm.weight[3] += rank
    with pytest.MonkeyPatch.context() as patch:
        words: list[str] = []
        patch.setattr(joining.logger, "warning", words.append)
        Engine(model, **SMALL).close()
        assert not words
        Engine(other, **SMALL).close()
        assert "load one checkpoint" in words[0]
    raises(ValueError, "compile=True", lambda: Engine(model, compile=True))
    raises(ValueError, "lm_head_fp32=True is for one", lambda: Engine(model, lm_head_fp32=True))


def words_of_rank_0(rank: int) -> None:
    """An error that ends rank 0's block reaches the others."""
    model = loaded("llama")
    if rank == 0:
        try:
            with Engine(model, **SMALL):
                raise LookupError("no prompts")
        except LookupError:
            return
    with Engine(model, **SMALL) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "ended", lambda ranks: None)  # as if the store's process were gone
        raises(RankError, "rank 0 raised LookupError: no prompts", engine.follow)


def heads_that_ranks_do_not_divide(rank: int) -> None:
    try:
        model = loaded("llama-5")
    except ValueError as error:
        raise AssertionError("transformers refuses it by now") from error
    words = "5 KV heads, which 2 ranks cannot divide"
    raises(ValueError, words, lambda: Engine(model, **SMALL))
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    raises(ValueError, words, lambda: model.generate(ids, cache_implementation="paged"))


def a_fork_of_a_rank(rank: int) -> None:
    """It ends, by an error within the engine's block: the ranks go on. It votes for no rank."""
    model = loaded("llama")
    expected = generated(model, MODES[0], cache_implementation="paged")
    with Engine(model, **SMALL) as engine:
        for turn in range(2):
            if rank == turn:
                gc.collect()
                gc.freeze()  # a fork that collects torch's groups of earlier cases crashes: it has no threads
                child = os.fork()
                if child == 0:
                    words = "in forked subprocess" if CUDA else "forked from"  # CUDA says it first
                    try:
                        raises(
                            RuntimeError,
                            words,
                            lambda: generated(model, MODES[0], cache_implementation="paged"),
                        )
                        if rank:
                            raises(RuntimeError, words, engine.follow)
                            os._exit(3)
                        with engine:
                            raises(RuntimeError, words, lambda: engine.submit(PROMPTS[1], **GREEDY).result())
                            raise SystemExit(3)
                    except SystemExit as error:
                        os._exit(int(str(error.code)))
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(4)
                gc.unfreeze()
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert code == 3, f"the fork has ended with {code}; if that is 4, its error is above"
            if rank == 0:
                assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
                if turn == 0:
                    engine.pause()
                    engine.resume()
            else:
                assert engine.follow() is (turn == 0)
    assert generated(model, MODES[0], cache_implementation="paged") == expected
