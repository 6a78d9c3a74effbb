"""Cases: generate_batch() and managers of batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from engine_answers import PROMPTS, alone
from processes import LIMIT
from rank_support import FOLDER, GREEDY, NEW, loaded, raises, whole
from transformers.generation.continuous_batching import RequestStatus

import hf_paged
from hf_paged.engine import Engine, Handle


def generate_batch(rank: int) -> None:
    """All ranks call it, and all have the tokens; the engine stays from call to call."""
    model = loaded("llama")
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY)
    drawn = tf.GenerationConfig(
        eos_token_id=-1, pad_token_id=0, do_sample=True, num_return_sequences=2, max_new_tokens=NEW
    )
    expected = [alone(whole("llama"), each, **GREEDY) for each in PROMPTS[:4]]
    with batches_on_pages():
        many = tf.ContinuousBatchingConfig(max_requests_per_batch=4096)  # more than max_batch_tokens
        for several, batching in ((PROMPTS[:4], None), (PROMPTS[:2], None), (PROMPTS[:3], many)):
            found = model.generate_batch(several, config, batching)
            assert [[each.generated_tokens] for each in found.values()] == expected[: len(several)]
        seeded = tf.ContinuousBatchingConfig(seed=3)
        outputs = [
            each.generate_batch(PROMPTS[:2], drawn, seeded, persistent_manager=True)
            for each in (model, whole("llama"))
        ]
        texts = [{name: each.generated_tokens for name, each in found.items()} for found in outputs]
        assert texts[0] == texts[1]
        for each in (model, whole("llama")):
            each.destroy_cached_continuous_batching_manager()
        compiled = tf.ContinuousBatchingConfig(num_blocks=20, max_batch_tokens=64, default_compile_level=1)
        with pytest.warns(hf_paged.FallbackWarning, match="compile=True is for one process"):
            manager = model.init_continuous_batching(config, compiled)
        manager.destroy()


@contextmanager
def batches_on_pages() -> Iterator[None]:
    hf_paged.install(generate_batch=True)
    try:
        yield
    finally:
        hf_paged.install(generate_batch=False)


def a_manager_of_batches(rank: int) -> None:
    """Streams, a pause in which all ranks change the weights, a request that is refused, and a stop. Where
    nothing else brings results to the other ranks, the pause and the stop do. Another manager waits for it.
    """
    from hf_paged.continuous.manager import EngineBatchingManager  # some releases have nothing to make it of

    model = loaded("llama")
    other = tf.AutoModelForCausalLM.from_pretrained(FOLDER / "llama").eval().to(model.device)
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY)
    with batches_on_pages(), pytest.MonkeyPatch.context() as patch:
        manager = model.init_continuous_batching(config, tf.ContinuousBatchingConfig(num_blocks=60))
        for busy in (False, True):
            if busy:
                patch.setattr(EngineBatchingManager, "_broadcast", lambda manager: None)
            expected = alone(other, PROMPTS[1], **GREEDY)
            manager.start()
            another = model.init_continuous_batching(config, tf.ContinuousBatchingConfig(num_blocks=70))
            raises(RuntimeError, "another manager runs .* one at a time", another.start)
            raises(RuntimeError, "another manager", lambda: model.generate_batch(PROMPTS[:2], config))
            manager.add_request(PROMPTS[1], request_id="streamed", streaming=True)
            found = [manager.get_result(timeout=LIMIT).generated_tokens for _ in range(NEW)]
            assert found == [expected[0][:count] for count in range(1, NEW + 1)]
            manager.add_request([5] * 100000, request_id="refused")
            assert f"{100_000 + NEW} tokens" in manager.get_result(timeout=LIMIT).error
            with manager.pause(), torch.no_grad():
                for each in (model, other):
                    each.lm_head.weight.mul_(-1)
                manager.add_request([5] * 100000, request_id="refused in a pause")
            assert f"{100_000 + NEW} tokens" in manager.get_result(timeout=LIMIT).error
            assert alone(other, PROMPTS[1], **GREEDY) != expected
            manager.add_request(PROMPTS[1], request_id="later")
            later = manager.get_result(timeout=LIMIT)
            assert [later.generated_tokens] == alone(other, PROMPTS[1], **GREEDY), later
            assert manager.add_request(PROMPTS[2], max_new_tokens=200, request_id="cut") in ("cut", None)
            manager.stop(timeout=LIMIT, hard_stop=True)
            assert manager.get_result(timeout=LIMIT).status == RequestStatus.FAILED
            assert not manager.is_running()
        broadcast = Engine.broadcast
        refused: list[str] = []

        def another_starts_before(engine: Engine, value: Any) -> None:
            try:
                another.start()
            except RuntimeError as error:
                refused.append(str(error))
            broadcast(engine, value)

        manager.start()
        if rank == 0:
            patch.setattr(Engine, "broadcast", another_starts_before)  # by which the others hear of the stop
        manager.stop(timeout=LIMIT)
        assert (rank == 0) == any("another manager runs" in each for each in refused)
        manager.destroy()


def a_manager_whose_engine_is_closed(rank: int) -> None:
    """On rank 0, behind its manager: those of the other ranks end as well, and all may be started again."""
    model = loaded("llama")
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY)
    with batches_on_pages():
        manager = model.init_continuous_batching(config, tf.ContinuousBatchingConfig(num_blocks=60))
        manager.start()
        manager.add_request(PROMPTS[2], max_new_tokens=200, streaming=True)
        assert manager.get_result(timeout=LIMIT).status == RequestStatus.DECODING
        if rank == 0:
            manager.engine.close()
        manager.join(0.0, 20)
        assert "closed" in str(manager.background_thread_status.fatal_error)
        while (output := manager.get_result()) is not None:
            last = output
        assert rank > 0 or last.status == RequestStatus.FAILED, last
        manager.start()
        manager.add_request(PROMPTS[1])
        found = manager.get_result(timeout=LIMIT)
        assert [found.generated_tokens] == alone(whole("llama"), PROMPTS[1], **GREEDY), found
        manager.stop(timeout=LIMIT)
        manager.destroy()


def requests_of_a_processor(rank: int) -> None:
    """A processor may add requests, as a tool's call would, while outputs go to the other ranks."""
    model = loaded("llama")
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=20)
    batching = tf.ContinuousBatchingConfig(
        num_blocks=400, max_batch_tokens=512, max_requests_per_batch=16, per_request_processors=True
    )
    with batches_on_pages():
        manager = model.init_continuous_batching(config, batching)
        manager.start()

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] % 4 == 0:
                time.sleep(0.03)  # outputs of the step before are on their way
                manager.add_request(PROMPTS[2], max_new_tokens=2)
            return scores

        for given in ([processor], None, None, None):
            manager.add_request(PROMPTS[1], streaming=True, logits_processor=given)
        found = [manager.get_result(timeout=LIMIT) for _ in range(4 * 20 + 5)]
        assert None not in found
        manager.stop(timeout=LIMIT)
        assert not manager.is_running()
        manager.destroy()


def a_pause_beside_a_stop(rank: int) -> None:
    """One thread enters a pause while another stops the manager: the pause ends first, then all ranks end."""
    model = loaded("llama")
    cancel = Handle.cancel
    entered = threading.Event()
    with batches_on_pages(), pytest.MonkeyPatch.context() as patch:
        manager = model.init_continuous_batching(
            tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY),
            tf.ContinuousBatchingConfig(num_blocks=60),
        )
        manager.start()

        def hold() -> None:
            with manager.pause():
                entered.set()
                time.sleep(0.3)

        holding = threading.Thread(target=hold)

        def while_a_pause_begins(handle: Handle) -> None:
            holding.start()
            entered.wait()
            cancel(handle)

        if rank == 0:
            patch.setattr(Handle, "cancel", while_a_pause_begins)
        else:
            holding.start()
        manager.add_request(PROMPTS[2], max_new_tokens=200)
        manager.stop(timeout=LIMIT, hard_stop=True)  # it cancels the request
        assert not manager.is_running()
        assert manager.background_thread_status.fatal_error is None
        holding.join()
        manager.destroy()
