"""Requests of a batch: equal prompts are one request of the engine, whose children have its tokens."""

from __future__ import annotations

import inspect
import threading
from typing import Any, cast

import pytest
from batch_managers import GUARD, NEW, SMALL, alone, batching_model, greedy, manager_of  # noqa: F401  # a fixture
from engine_answers import PROMPTS
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints

from hf_paged.continuous.engines import PLACE
from hf_paged.continuous.requests import ActiveRequests, BatchRequest
from hf_paged.engine import Handle


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize(
    ("options", "requests"), [({}, 2), ({"seed": 3}, 5), ({"max_requests_per_batch": 5}, 3)], ids=str
)
def test_equal_prompts_are_one_request_of_the_engine(
    model: Any, samples: bool, options: dict[str, Any], requests: int
) -> None:
    """Except where each has a seed of its own."""
    config = greedy(do_sample=samples)
    config.num_return_sequences = 2
    prompts = [PROMPTS[1], PROMPTS[2], *[PROMPTS[1]] * 3]
    batching = ContinuousBatchingConfig(**options)
    found = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert getattr(model, PLACE).engine.stats()["admissions"] == requests
    assert [name for name in found if "__" not in name] == [f"req_{number}" for number in range(5)]
    assert len(found) in (5, 10)  # older releases leave the children out
    for name, output in found.items():
        assert output.prompt_ids == prompts[int(name[4])]
        assert len(output.generated_tokens) == NEW
        assert samples or output.generated_tokens == alone(model, output.prompt_ids)
    assert not samples or len({tuple(output.generated_tokens) for output in found.values()}) > 3


def test_one_of_equal_requests_can_be_cancelled(model: Any) -> None:
    hints = WorkloadHints(max_prompt_length=len(PROMPTS[1]), max_generated_length=NEW, num_requests=3)
    manager = model.init_continuous_batching(greedy(do_sample=True), workload_hints=hints)
    one, other, last = manager.add_requests([PROMPTS[1]] * 3)
    manager.cancel_request(other)
    manager.start()
    assert [manager.get_result(timeout=GUARD).request_id for _ in range(2)] == [one, last]
    assert manager.engine.stats()["admissions"] == 1
    for name in manager.add_requests([PROMPTS[1]] * 2, max_new_tokens=20):
        manager.cancel_request(name)
    manager.stop(timeout=GUARD)
    assert manager.output_router.output_queue.empty()


def test_children_come_behind_their_parent(model: Any) -> None:
    """As from transformers' own manager; `generate_batch` puts them before it."""
    config = greedy(do_sample=True, num_return_sequences=3, temperature=0.7)
    with model.continuous_batching_context_manager(config) as manager:
        manager.add_requests(PROMPTS[:2])
        found = [manager.get_result(timeout=GUARD) for _ in range(6)]
    names = [output.request_id for output in found]
    for name in ("req_0", "req_1"):
        children = [f"{name}__child#0", f"{name}__child#1"]
        assert [each for each in names if each.startswith(name)] == [name, *children]
    assert len({tuple(output.generated_tokens) for output in found}) > 2
    batch = model.generate_batch(PROMPTS[:1], generation_config=config)
    parents_only = "__child#" not in inspect.getsource(type(model).generate_batch)  # older releases
    children = [] if parents_only else ["req_0__child#0", "req_0__child#1"]
    assert list(batch) == [*children, "req_0"]


@pytest.mark.parametrize("prompt", [[10**6], [1] * 4000], ids=["unknown ids", "too long"])
@pytest.mark.parametrize("samples", [True, False])
def test_children_of_a_refused_request_fail_too(model: Any, prompt: list[int], samples: bool) -> None:
    """`generate_batch` waits for an output of each."""
    config = greedy(do_sample=samples)
    config.num_return_sequences = 3
    found = model.generate_batch([PROMPTS[1], prompt], generation_config=config)
    assert len(found) in (2, 6)  # older releases leave the children out
    for name, output in found.items():
        failed = name.startswith("req_1")
        assert (output.status == RequestStatus.FAILED) == (output.error is not None) == failed


def test_children_of_an_unfinished_request_keep_their_tokens(model: Any) -> None:
    manager = model.init_continuous_batching(
        greedy(do_sample=True, num_return_sequences=2),
        continuous_batching_config=ContinuousBatchingConfig(**SMALL),
    )
    manager.start()
    number = manager.add_request(PROMPTS[1], max_new_tokens=60, streaming=True)
    for _ in range(4):
        manager.get_result(timeout=GUARD)
    with manager.pause():
        stopper = threading.Thread(target=manager.stop, kwargs={"hard_stop": True})
        stopper.start()
        stopper.join(0.3)
    stopper.join(GUARD)
    failed = {}
    while len(failed) < 2:
        output = manager.output_router.output_queue.get(timeout=GUARD)
        if output.status == RequestStatus.FAILED:
            failed[output.request_id] = output
    one, other = (failed[name].generated_tokens for name in (number, f"{number}__child#0"))
    assert min(len(one), len(other)) > 0
    assert one != other


def test_options_of_single_requests(model: Any) -> None:
    manager = manager_of(model, per_request_processors=True)
    manager.start()
    number = manager.add_request(PROMPTS[1], repetition_penalty=3.0)
    found = [*manager.request_id_iter(number)][-1].generated_tokens
    assert found == alone(model, PROMPTS[1], repetition_penalty=3.0)
    for option in ({"num_return_sequences": 2, "do_sample": True}, {"seed": 3}, {"logprobs": True}):
        number = manager.add_request(PROMPTS[1], **option)
        output = manager.get_result(number, timeout=GUARD)
        assert output.status == RequestStatus.FAILED
        assert "all requests have the same; set" in output.error
    assert manager.is_running()
    manager.stop(timeout=GUARD)


def test_ids_of_active_requests_are_not_made_up_again() -> None:
    """Neither those that callers gave nor those on their way."""
    active = ActiveRequests()
    with active.entering(1, "req_1") as given, active.entering(2) as made:
        assert (given, made) == (["req_1"], ["req_2", "req_3"])
        with (
            pytest.raises(ValueError, match="'req_2' names a request that is under way"),
            active.entering(1, "req_2"),
        ):
            pass
        assert "req_2" not in active
    with active.entering(1, "req_2") as again:
        assert again == ["req_2"]


def test_an_active_request_is_found_by_any_of_its_ids() -> None:
    active = ActiveRequests()
    request = BatchRequest(
        ["a", "b"], [1], cast("Handle", None), each=1, copies=1, stamps=False, streams=False
    )
    active.add(request)
    assert len(active) == 2
    assert active.remove("a") is request
    assert active.remove("a") is None
    assert active.of(["a", "b"]) is request
    assert list(active.remove_all()) == [("b", request)]
    assert active.of(["a", "b"]) is None
    assert not active
