"""model.generate_batch and transformers' manager of continuous batching, computed by the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from batch_managers import GUARD, NEW, PAGE, SMALL, alone, batching_model, greedy, manager_of  # noqa: F401  # a fixture
from dropout import train_with_dropout
from engine_answers import PROMPTS
from engine_logprobs import one_forward
from families import BY_NAME, build
from releases import NEEDS_SLOTS
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.integrations.neftune import activate_neftune

import hf_paged
from hf_paged.blocks import OutOfBlocks
from hf_paged.continuous.engines import PLACE, begin_on, drop_engine, end_on
from hf_paged.continuous.requests import BatchRequest
from hf_paged.model.registry import memory_of


def test_a_batch_is_what_each_prompt_gets_alone(model: Any) -> None:
    found = model.generate_batch(PROMPTS[:4], generation_config=greedy(), record_timestamps=True)
    assert list(found) == ["req_0", "req_1", "req_2", "req_3"]
    for output, prompt in zip(found.values(), PROMPTS, strict=False):
        assert output.generated_tokens == alone(model, prompt)
        assert output.prompt_ids == prompt
        assert output.status == RequestStatus.FINISHED
        assert output.error is None
        assert output.logprobs == []
        assert len(output.timestamps) == NEW
        assert output.lifespan[0] <= output.lifespan[1]


@NEEDS_SLOTS
def test_a_batch_of_a_hybrid(model: Any) -> None:
    """By the same word, and a second batch begins with the states of the first."""
    hybrid = tiny.build("causal", tiny.config_class("causal", "qwen3_5_text"))
    prompts = [PROMPTS[3], PROMPTS[0], [*PROMPTS[3], *alone(hybrid, PROMPTS[3]), 7]]
    for asked in (prompts[:2], prompts[2:]):
        found = hybrid.generate_batch(asked, generation_config=greedy())
        assert [each.generated_tokens for each in found.values()] == [alone(hybrid, each) for each in asked]
    assert getattr(hybrid, PLACE).engine.stats()["states"]["hits"] == 1
    hybrid.destroy_cached_continuous_batching_manager()
    drop_engine(hybrid)


def test_a_batch_takes_no_more_steps_than_the_engine_alone(model: Any) -> None:
    """No step begins before all requests have come."""
    prompts = [[each, *PROMPTS[1]] for each in range(1, 33)]
    for _ in range(2):
        before = getattr(model, PLACE).engine.stats()["steps"] if hasattr(model, PLACE) else 0
        model.generate_batch(prompts, generation_config=greedy(do_sample=True))
        assert getattr(model, PLACE).engine.stats()["steps"] - before == NEW


def test_the_name_of_a_request_under_way_is_taken(model: Any) -> None:
    """It is refused, so nothing of the first is lost; names that are made up avoid it."""
    with model.continuous_batching_context_manager(greedy()) as manager:
        with manager.pause():
            assert manager.add_request(PROMPTS[1], request_id="req_1") == "req_1"
            with pytest.raises(ValueError, match="'req_1' names a request that is under way"):
                manager.add_request(PROMPTS[2], request_id="req_1")
            names = manager.add_requests(PROMPTS[2:4])
        found = {
            output.request_id: output for output in (manager.get_result(timeout=GUARD) for _ in range(3))
        }
        assert found.keys() == {"req_1", *names}
        assert found["req_1"].prompt_ids == PROMPTS[1]
        assert manager.add_request(PROMPTS[2], request_id="req_1") == "req_1"  # that one has ended
        assert manager.get_result(timeout=GUARD).prompt_ids == PROMPTS[2]


@pytest.mark.parametrize("given", ["mine", None])
def test_the_name_of_a_request_on_its_way_is_taken(
    model: Any, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """By a caller or not: another thread that gives it is refused, and nothing is lost."""
    with model.continuous_batching_context_manager(greedy()) as manager:
        submit = manager.engine.submit
        entered = threading.Event()
        refused = threading.Event()

        def slow(*asked: Any, **options: Any) -> Any:
            entered.set()
            assert refused.wait(GUARD)
            return submit(*asked, **options)

        monkeypatch.setattr(manager.engine, "submit", slow)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(manager.add_request, PROMPTS[1], request_id=given)
            assert entered.wait(GUARD)
            name = given or "req_0"
            with pytest.raises(ValueError, match=f"'{name}' names a request that is under way"):
                manager.add_request(PROMPTS[2], request_id=name)
            refused.set()
            assert first.result() == name
        assert manager.get_result(timeout=GUARD).prompt_ids == PROMPTS[1]


def test_of_managers_that_begin_at_once_one_is_refused(model: Any) -> None:
    """Where ranks follow one at a time: the check and the beginning are one step."""
    one, other = (model.init_continuous_batching(greedy()) for _ in range(2))
    assert begin_on(one.engine, one, alone=True)
    with pytest.raises(RuntimeError, match="another manager runs"):
        begin_on(one.engine, other, alone=True)
    assert begin_on(one.engine, other, alone=False)
    for each in (one, other):
        end_on(one.engine, each)
    assert begin_on(one.engine, other, alone=True)
    end_on(one.engine, other)


def test_several_greedy_answers_are_equal(model: Any) -> None:
    """generate() refuses to give them; transformers' manager does not."""
    manager = manager_of(model)
    manager.num_return_sequences = 2
    manager.start()
    for streams in (False, True):
        name = manager.add_request(PROMPTS[1], streaming=streams)
        found: dict[str, list[Any]] = {name: [], f"{name}__child#0": []}
        while not all(outputs and outputs[-1].is_finished() for outputs in found.values()):
            output = manager.get_result(timeout=GUARD)
            found[output.request_id].append(output)
        for outputs in found.values():
            assert len(outputs) == (NEW if streams else 1)
            assert outputs[-1].generated_tokens == alone(model, PROMPTS[1])
    manager.stop(timeout=GUARD)


def test_streams_have_an_output_for_each_token(model: Any) -> None:
    """Also where the thread of results comes late; the last token's is the one that is finished."""
    manager = manager_of(model, return_logprobs=True)
    number = manager.add_request(PROMPTS[1], streaming=True, record_timestamps=True)
    manager.engine.start()
    while manager.engine.stats()["finished"] < 1:
        time.sleep(0.01)
    manager.start()
    outputs = list(manager.request_id_iter(number))
    for count, output in enumerate(outputs, 1):
        assert len(output.generated_tokens) == len(output.logprobs) == len(output.timestamps) == count
        assert output.is_finished() == (count == NEW)
    assert len(outputs) == NEW
    manager.stop(timeout=GUARD)


def test_a_stop_keeps_what_there_is(model: Any) -> None:
    manager = manager_of(model)
    manager.start()
    number = manager.add_request(PROMPTS[1], max_new_tokens=60, streaming=True)
    for _ in range(3):
        manager.get_result(timeout=GUARD)
    with manager.pause():
        stopper = threading.Thread(target=manager.stop, kwargs={"hard_stop": True})
        stopper.start()
        stopper.join(0.3)
        assert stopper.is_alive()  # until the pause of another thread ends
    stopper.join(GUARD)
    while (output := manager.output_router.output_queue.get(timeout=GUARD)).status == RequestStatus.DECODING:
        pass
    assert (output.request_id, output.status) == (number, RequestStatus.FAILED)
    assert 3 <= len(output.generated_tokens) < 60
    assert (
        output.generated_tokens == alone(model, PROMPTS[1], max_new_tokens=60)[: len(output.generated_tokens)]
    )
    assert not manager.is_running()


def test_logprobs_are_of_processed_logits(model: Any) -> None:
    config = greedy(do_sample=True, temperature=0.5)
    batching = ContinuousBatchingConfig(return_logprobs=True, seed=3)
    calls = [
        model.generate_batch([PROMPTS[1]] * 2, generation_config=config, continuous_batching_config=batching)
        for _ in range(2)
    ]
    assert [each.generated_tokens for each in calls[0].values()] == [
        each.generated_tokens for each in calls[1].values()
    ]  # by the seed
    one, other = calls[0].values()
    assert one.generated_tokens != other.generated_tokens
    right = (one_forward(model, PROMPTS[1], one.generated_tokens) / 0.5).log_softmax(-1)
    right = right.gather(1, torch.tensor(one.generated_tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(one.logprobs), right, atol=1e-4, rtol=1e-4)


def test_an_end_of_sequence_ends(model: Any) -> None:
    tokens = alone(model, PROMPTS[1])
    config = greedy(eos_token_id=[tokens[2], 95])
    found = model.generate_batch(PROMPTS[1:2], generation_config=config)
    assert found["req_0"].generated_tokens == tokens[: tokens.index(tokens[2]) + 1]


def test_a_config_without_an_end_has_none(model: Any) -> None:
    """As with transformers' own manager: the model's config is not asked."""
    tokens = alone(model, PROMPTS[1])
    model.config.eos_token_id = tokens[2]
    config = greedy()
    config.eos_token_id = None
    found = model.generate_batch(PROMPTS[1:2], generation_config=config)
    assert found["req_0"].generated_tokens == tokens
    assert config.eos_token_id is None


def test_processors_can_be_cleared(model: Any) -> None:
    manager = model.init_continuous_batching(
        greedy(repetition_penalty=3.0), continuous_batching_config=ContinuousBatchingConfig(**SMALL)
    )
    manager.start()
    for penalty in (3.0, 1.0):
        found = next(manager.request_id_iter(manager.add_request(PROMPTS[1])))
        assert found.generated_tokens == alone(model, PROMPTS[1], repetition_penalty=penalty)
        manager.logit_processor.clear()
    manager.stop(timeout=GUARD)
    assert alone(model, PROMPTS[1]) != alone(model, PROMPTS[1], repetition_penalty=3.0)


def test_sampling_can_be_turned_off_and_the_processors_stay(model: Any) -> None:
    manager = model.init_continuous_batching(
        greedy(do_sample=True, temperature=2.0, top_k=5),
        continuous_batching_config=ContinuousBatchingConfig(**SMALL, return_logprobs=True),
    )
    manager.generation_config.do_sample = False
    manager.start()
    found = next(manager.request_id_iter(manager.add_request(PROMPTS[1])))
    manager.stop(timeout=GUARD)
    assert found.generated_tokens == alone(model, PROMPTS[1])
    scores = one_forward(model, PROMPTS[1], found.generated_tokens) / 2.0
    right = scores.topk(5).values.log_softmax(-1)[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), right, atol=1e-4, rtol=1e-4)


def test_a_model_with_paged_attention_of_transformers(model: Any) -> None:
    """It computes with the cache of transformers' own manager alone; the engine's takes the plain one."""
    expected = alone(model, PROMPTS[1])
    model.set_attn_implementation("paged|eager")
    for _ in range(2):
        found = model.generate_batch(PROMPTS[1:2], generation_config=greedy(), persistent_manager=True)
        assert [each.generated_tokens for each in found.values()] == [expected]
        assert model.config._attn_implementation == "paged|eager"


def test_it_is_off_by_default_and_can_be_taken_out() -> None:
    llama = build(BY_NAME["llama"])
    manager = type(llama).init_continuous_batching
    hf_paged.install()
    assert type(llama).init_continuous_batching is manager
    with pytest.raises(TypeError, match="generate_batch must be True, False or None, got 'yes'"):
        hf_paged.install("yes")  # type: ignore[arg-type]
    hf_paged.install(generate_batch=True)
    hf_paged.install(generate_batch=True)
    assert type(llama).init_continuous_batching is not manager
    hf_paged.uninstall()
    assert type(llama).init_continuous_batching is manager
    hf_paged.install()


def test_a_manager_streams(model: Any) -> None:
    manager = manager_of(model)
    assert isinstance(manager, ContinuousBatchingManager)
    manager.warmup()
    assert manager.warmed_up
    assert not manager.is_running()
    manager.start()
    number = manager.add_request(PROMPTS[1], streaming=True)
    outputs = list(manager.request_id_iter(number))
    assert outputs[-1].generated_tokens == alone(model, PROMPTS[1])
    assert outputs[-1].is_finished()
    assert len(outputs) > 2
    for before, after in pairwise(outputs):
        assert after.generated_tokens[: len(before.generated_tokens)] == before.generated_tokens
    names = manager.add_requests(PROMPTS[2:4], max_new_tokens=3)
    found = {}
    for output in manager:
        found[output.request_id] = output.generated_tokens
        if len(found) == 2:
            break
    assert found == {name: alone(model, prompt)[:3] for name, prompt in zip(names, PROMPTS[2:4], strict=True)}
    assert manager.is_running()
    manager.stop(block=True, timeout=GUARD)
    assert not manager.is_running()
    assert manager.get_result() is None
    assert manager.add_request(PROMPTS[0]) is None


def test_cancelled_and_unfinished_requests(model: Any) -> None:
    manager = manager_of(model)
    manager.start()
    number = manager.add_request(PROMPTS[1], max_new_tokens=50)
    manager.cancel_request(number)
    manager.cancel_request("no such request")
    late = manager.add_request(PROMPTS[2], max_new_tokens=60)
    manager.stop(hard_stop=True, timeout=GUARD)
    found = manager.get_result(timeout=1) or manager.output_router.output_queue.get(timeout=1)
    assert found.request_id == late
    assert found.status in (RequestStatus.FAILED, RequestStatus.FINISHED)
    memory_of(model).check()


def test_results_come_to_a_handler_on_its_event_loop(model: Any) -> None:
    manager = manager_of(model)
    manager.start()

    async def ask(prompt: list[int], name: str) -> list[int]:
        future = asyncio.get_running_loop().create_future()
        manager.register_result_handler(
            name, lambda output: future.done() or not output.is_finished() or future.set_result(output)
        )
        manager.add_request(prompt, request_id=name, streaming=name == "a")
        return (await asyncio.wait_for(future, GUARD)).generated_tokens

    async def both() -> list[list[int]]:
        return await asyncio.gather(ask(PROMPTS[1], "a"), ask(PROMPTS[2], "b"))

    assert asyncio.run(both()) == [alone(model, PROMPTS[1]), alone(model, PROMPTS[2])]
    manager.stop(timeout=GUARD)


def test_a_handler_whose_event_loop_has_closed_harms_no_other(model: Any) -> None:
    """Its client has gone, say after a timeout: only its own results are lost."""
    manager = manager_of(model)
    manager.start()

    async def leave() -> None:
        manager.register_result_handler("gone", lambda output: None)

    asyncio.run(leave())
    manager.add_request(PROMPTS[1], request_id="gone", streaming=True)
    manager.add_request(PROMPTS[2], request_id="here", max_new_tokens=40)
    found = manager.output_router.output_queue.get(timeout=GUARD)
    assert found.request_id == "here"
    assert found.status == RequestStatus.FINISHED
    manager.stop(timeout=GUARD)
    assert manager.background_thread_status.fatal_error is None


def test_a_persistent_manager_is_used_again(model: Any) -> None:
    for _ in range(2):
        found = model.generate_batch(PROMPTS[1:2], generation_config=greedy(), persistent_manager=True)
        assert next(iter(found.values())).generated_tokens == alone(model, PROMPTS[1])
    manager = model.init_continuous_batching(greedy())
    assert model.init_continuous_batching(greedy()) is manager
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(greedy()) is not manager


def test_calls_at_once_have_their_answers(model: Any) -> None:
    """Also one that needs a larger engine: the first engine stays until its call has ended."""
    config = ContinuousBatchingConfig(**{PAGE: 4})
    running = threading.Event()
    found: dict[str, Any] = {}

    def one() -> None:
        with model.continuous_batching_context_manager(
            greedy(max_new_tokens=200), continuous_batching_config=config, workload_hints=hints(1, 210)
        ) as manager:
            found["engine"] = manager.engine
            number = manager.add_request(PROMPTS[1], streaming=True)
            for found["one"] in manager.request_id_iter(number):
                running.set()

    def hints(requests: int, tokens: int) -> WorkloadHints:
        return WorkloadHints(num_requests=requests, max_prompt_length=10, max_generated_length=tokens)

    thread = threading.Thread(target=one)
    thread.start()
    assert running.wait(GUARD)
    several = model.generate_batch(
        PROMPTS[1:5], generation_config=greedy(max_new_tokens=100), continuous_batching_config=config
    )
    thread.join(GUARD)
    assert found["one"].generated_tokens == alone(model, PROMPTS[1], max_new_tokens=200)
    assert found["engine"].closed
    assert not getattr(model, PLACE).engine.closed
    for output, prompt in zip(several.values(), PROMPTS[1:5], strict=True):
        assert output.generated_tokens == alone(model, prompt, max_new_tokens=100)


def test_a_request_that_is_cancelled_as_it_ends_harms_no_other(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(model)
    read = BatchRequest.read

    def cancelled(request: BatchRequest) -> Any:
        new = read(request)
        if request.streams and request.handle.done:  # another thread's comes here
            manager.cancel_request(request.ids[0])
        return new

    monkeypatch.setattr(BatchRequest, "read", cancelled)
    manager.start()
    manager.add_request(PROMPTS[2], streaming=True)
    number = manager.add_request(PROMPTS[1], max_new_tokens=50)
    output = next(each for each in manager if each.request_id == number)
    assert output.generated_tokens == alone(model, PROMPTS[1], max_new_tokens=50)
    manager.stop(timeout=GUARD)


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_may_outnumber_prompts(model: Any, beams: int) -> None:
    for prompts in (PROMPTS[1:2], PROMPTS[1:3]):
        found = model.generate_batch(prompts, generation_config=greedy(num_beams=beams))
        for output, prompt in zip(found.values(), prompts, strict=True):
            assert output.generated_tokens == alone(model, prompt, num_beams=beams), output.error


def test_active_dropout_is_off_while_the_manager_runs(model: Any) -> None:
    """As transformers' own manager calls eval(); the modes come back."""
    expected = alone(model, PROMPTS[1])
    train_with_dropout(model)
    model.model.layers[0].eval()
    calls: list[bool] = []
    norm = model.model.norm
    norm.train = lambda mode=True: calls.append(mode) or type(norm).train(norm, mode)
    found = model.generate_batch(PROMPTS[1:2], generation_config=greedy())
    assert found["req_0"].generated_tokens == expected
    assert model.training
    assert not model.model.layers[0].training
    assert calls == [False, True]


def test_noise_of_a_hook_is_off_while_the_manager_runs(model: Any) -> None:
    """Trainers put NEFTune's on embeddings, which draws noise in training mode."""
    expected = alone(model, PROMPTS[1])
    model.train()
    activate_neftune(model, 5.0)
    found = model.generate_batch(PROMPTS[1:2], generation_config=greedy())
    assert found["req_0"].generated_tokens == expected
    assert model.training


def test_a_start_that_fails_leaves_the_model_in_its_mode(model: Any) -> None:
    train_with_dropout(model)
    manager = manager_of(model, num_blocks=1 << 40)
    for act in (manager.start, manager.warmup):
        with pytest.raises(OutOfBlocks):
            act()
        assert model.training


def test_weights_may_change_in_a_pause(model: Any) -> None:
    manager = manager_of(model)
    with pytest.raises(RuntimeError, match="call start"), manager.pause():
        pass
    manager.start()
    number = manager.add_request(PROMPTS[1], max_new_tokens=40, streaming=True)
    assert manager.get_result(timeout=GUARD) is not None
    with manager.pause():
        with pytest.raises(RuntimeError, match="leave pause"):
            manager.stop()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    output = [*manager.request_id_iter(number)][-1]
    assert len(output.generated_tokens) == 40
    ids = torch.tensor([PROMPTS[1] + output.generated_tokens[:-1]])
    assert output.generated_tokens[-1] == model(ids).logits[0, -1].argmax()
    manager.stop(timeout=GUARD)


def test_a_server_sees_which_requests_there_are(model: Any) -> None:
    """`transformers serve` has a property for the scheduler of its manager."""
    manager = manager_of(model)
    scheduler = manager.batch_processor.scheduler
    number = manager.add_request(PROMPTS[1])
    assert scheduler.has_pending_requests()
    assert not scheduler.request_is_cancelled(number)
    manager.cancel_request(number)
    assert scheduler.request_is_cancelled(number)
    assert not scheduler.has_pending_requests()
    with pytest.raises(AttributeError, match=r"manager\.engine\.stats"):
        scheduler.active_requests  # noqa: B018


def test_a_request_that_is_refused_fails_with_its_reason(model: Any) -> None:
    config = greedy(num_beams=2, early_stopping=True, num_return_sequences=1)
    found = model.generate_batch([PROMPTS[1], [1] * 4000], generation_config=config)
    assert "max_new_tokens" in found["req_1"].error
    assert found["req_1"].status == RequestStatus.FAILED
    assert found["req_0"].error is None
    manager = manager_of(model)
    with pytest.raises(ValueError, match="per_request_processors=True"):
        manager.add_request(PROMPTS[1], temperature=0.3)


def test_a_thread_that_dies_is_reported(model: Any) -> None:
    manager = manager_of(model)
    manager.start()
    train_with_dropout(model)
    number = manager.add_request(PROMPTS[1])
    output = manager.output_router.output_queue.get(timeout=GUARD)
    assert output.request_id == number
    assert "training mode" in output.error
    manager.join(0.0, GUARD)
    assert "training mode" in str(manager.background_thread_status.fatal_error)
    assert manager.add_request(PROMPTS[1]) is None


@pytest.mark.parametrize("how", ["close", "close in a pause"])
def test_an_engine_that_is_closed_behind_its_manager(how: str, model: Any) -> None:
    """No answer looks complete that is not; the manager ends, and may be started again."""
    manager = manager_of(model)
    manager.start()
    for number in range(2):
        manager.add_request(PROMPTS[number], max_new_tokens=200, streaming=number == 0)
    assert manager.get_result(timeout=GUARD) is not None
    with manager.pause() if how == "close in a pause" else contextlib.nullcontext():
        manager.engine.close()
    ended: dict[str, Any] = {}
    while len(ended) < 2:
        output = manager.output_router.output_queue.get(timeout=GUARD)
        if output.status != RequestStatus.DECODING:
            ended[output.request_id] = output
    assert all(each.status == RequestStatus.FAILED for each in ended.values())
    assert all("the engine was closed" in each.error for each in ended.values())
    manager.join(0.0, GUARD)
    assert "the engine was closed" in str(manager.background_thread_status.fatal_error)
    assert manager.add_request(PROMPTS[1]) is None
    manager.start()
    manager.add_request(PROMPTS[1])
    assert manager.get_result(timeout=GUARD).generated_tokens == alone(model, PROMPTS[1])
    manager.destroy()
    assert memory_of(model).groups == {} or hf_paged.stats(model).held == 0
