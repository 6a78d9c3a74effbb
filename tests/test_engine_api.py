"""How an engine is used: prompts, handles, increments, lists, options, and the model in other hands
meanwhile.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from engine_steps import new_tokens
from families import BY_NAME, build
from model_checks import make_unreadable
from quantized_layers import EightBit
from tape import record
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import hf_paged
from hf_paged import demo
from hf_paged.engine import Engine, EngineConfig, Unservable
from hf_paged.engine.check_policy import WeightsChanged
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.scheduling import Infeasible

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def stories() -> Engine:
    return Engine(demo.model(), demo.tokenizer(), num_blocks=200)


# ---- prompts


def test_text_chat_and_ids(stories: Engine) -> None:
    """A text, messages, a list, a tensor: the same tokens as the tokenizer makes."""
    tokenizer = stories.tokenizer
    text, chat = "The old bear slept", [{"role": "user", "content": "Tell me about the moon."}]
    template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    for prompt, ids in (
        (text, tokenizer(text)["input_ids"]),
        (chat, template),
        (torch.tensor([[5, 6, 7]]), [5, 6, 7]),
        ((5, 6), [5, 6]),
    ):
        output = stories.generate([prompt], **GREEDY)[0]
        assert output.prompt_token_ids == list(ids)
        assert output.sequences[0].token_ids == alone(stories.model, list(ids), **GREEDY)[0]
        assert output.text == tokenizer.decode(output.sequences[0].token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("message", [{"text": "hi"}, {"role": "user"}, {"role": "user", "content": 3}])
def test_messages_that_the_template_cannot_render(stories: Engine, message: dict[str, Any]) -> None:
    """The error shows them, and what one looks like; the template's own names neither."""
    with pytest.raises(ValueError, match="the chat template cannot render") as caught:
        stories.submit([message], max_new_tokens=2)
    assert str(message) in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("text", "needs a tokenizer"),
        ([], "empty"),
        ([[1, 2], [3, 4]], "one sequence"),
        ([1.5], "one sequence"),
        (b"text", "one sequence"),
        ([5, 96], "token id 96 .* from 0 to 95"),
        ([-1, 5], "token id -1 .* from 0 to 95"),
        (None, "needs a prompt"),
        ({"input_ids": [5, 6]}, 'give its "input_ids"'),
        (np.array([[5, 6], [7, 8]]), "one sequence"),
        (np.array([True, False]), "one sequence"),
        (np.array(5), "one sequence"),
    ],
)
def test_other_prompts_are_refused(engine: Engine, prompt: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        engine.submit(prompt)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_new_tokens": "5"}, "max_new_tokens='5' is not a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not a number of at least 1"),
        ({"logprobs": "many"}, "logprobs='many' is not True or a number"),
        ({"seed": 1.5}, "seed=1.5 is not an int"),
        (
            {"logits_processor": lambda ids, scores: scores},
            "logits_processor is a list of callables, got function",
        ),
        ({"logits_processor": [5]}, "logits_processor is a list of callables, and int 5 in it"),
        ({"stopping_criteria": [None]}, "stopping_criteria is a list of callables, and NoneType None in it"),
    ],
)
def test_other_options_are_refused(engine: Engine, options: dict[str, Any], error: str) -> None:
    """With what was got, in `submit`: nothing of it is in the engine."""
    with pytest.raises((TypeError, ValueError), match=error):
        engine.submit(PROMPTS[0], **options)
    assert engine.stats()["waiting"] == 0


def test_numbers_of_numpy(engine: Engine) -> None:
    """Prompts and seeds come out of arrays, too."""
    drawn = {"do_sample": True, "max_new_tokens": 8}
    expected = answers(engine.generate([PROMPTS[1]], seed=3, **drawn)[0])
    ids = np.array(PROMPTS[1])
    for prompt in (ids, ids[None], list(ids)):
        output = engine.generate([prompt], seed=np.int64(3), **drawn)[0]
        assert answers(output) == expected
        assert [type(token) for token in output.prompt_token_ids] == [int] * len(ids)


@pytest.mark.parametrize("prompts", ["text", b"text", {"prompt": [5, 6]}, None, 5])
def test_a_list_of_prompts_is_a_list(engine: Engine, prompts: Any) -> None:
    """A text would be taken apart, and a dict be its keys."""
    with pytest.raises(TypeError, match=f"takes a list of prompts, got {type(prompts).__name__}"):
        engine.generate(prompts, **GREEDY)


def test_an_engine_is_not_copied(engine: Engine) -> None:
    """Nor a handle; what it answers with can be copied."""
    handle = engine.submit(PROMPTS[0], **GREEDY)
    for thing, error in (
        (engine, "an engine .* cannot be pickled or copied"),
        (handle, "a handle .* cannot be pickled or copied"),
    ):
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match=error):
                copied(thing)
    assert answers(pickle.loads(pickle.dumps(handle.result()))) == alone(engine.model, PROMPTS[0], **GREEDY)


def test_what_names_no_tenant_or_holds_several_prompts_is_refused(model: Any) -> None:
    with Engine(model, num_blocks=40) as engine:
        with pytest.raises(TypeError, match="tenant=3 is not a str; give the name of a tenant"):
            engine.submit(PROMPTS[0], tenant=3, **GREEDY)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"got list .*; engine.generate\(\) takes a list of prompts"):
            engine.submit(PROMPTS[:2], **GREEDY)
        with pytest.raises(TypeError, match=r"got Tensor tensor\(\[\[.*; engine.generate\(\) takes a list"):
            engine.submit(torch.tensor([[5, 6], [7, 8]]), **GREEDY)
        with pytest.raises(ValueError, match=r"the token id 100000 .*; use the tokenizer of this model"):
            engine.submit([5, 100_000], **GREEDY)
        engine.check()


@pytest.mark.parametrize("priority", ["high", None, float("nan"), 1.5])
def test_a_priority_is_a_whole_number(model: Any, priority: Any) -> None:
    """Anything else could not be put in order, and would break the queue of everybody."""
    with Engine(model, num_blocks=40, policy="priority") as engine:
        handle = engine.submit(PROMPTS[0], priority=1, **GREEDY)
        with pytest.raises(TypeError, match=r"priority=.* is not an int"):
            engine.submit(PROMPTS[1], priority=priority, **GREEDY)
        assert answers(handle.result()) == alone(model, PROMPTS[0], **GREEDY)


def test_ids_that_an_encoder_decoder_does_not_know() -> None:
    with Engine(build(BY_NAME["bart"]), num_blocks=40) as engine:
        with pytest.raises(ValueError, match="token id 96"):
            engine.submit([5, 96], **GREEDY)
        with pytest.raises(ValueError, match="token id -7"):
            engine.submit([5, 6], decoder_input_ids=[-7], **GREEDY)
        assert engine.generate([[5, 6]], **GREEDY)[0].finish_reason in ("stop", "length")


# ---- answers


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


def test_an_answer_that_ends_before_its_first_token_says_so(engine: Engine) -> None:
    """Whoever iterates hears of every end, and once."""
    for steps in range(2):
        handle = engine.submit(PROMPTS[3], do_sample=True, num_return_sequences=2, max_new_tokens=6, seed=1)
        for _ in range(steps):
            engine.step()
        handle.cancel()
        assert [(each.index, each.token_ids, each.text, each.finish_reason) for each in handle] == [
            (i, [], None, "abort") for i in range(2)
        ]
        assert list(handle) == []


def test_outputs_say_what_happened(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[3], **GREEDY)
    assert "0 tokens so far" in repr(handle)
    output = handle.result()
    assert handle.done
    assert (
        output.timing.submitted
        <= output.timing.started
        <= output.timing.first_token
        <= output.timing.finished
    )
    assert (output.finish_reason, output.error, output.preemptions, output.cached_tokens, output.text) == (
        "length",
        None,
        0,
        0,
        None,
    )
    assert engine.submit(PROMPTS[3], **GREEDY).result().cached_tokens == 28


def test_generate_keeps_the_order(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = engine.generate(PROMPTS, progress=True, **GREEDY)
    assert [answers(output) for output in outputs] == [
        alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS
    ]
    assert "6/6" in capsys.readouterr().err
    assert engine.generate([], **GREEDY) == []
    with pytest.raises(TypeError, match="a list of prompts"):
        engine.generate("one text")


def test_a_list_that_fails_leaves_nothing_behind(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.generate([PROMPTS[0], []], **GREEDY)
    assert engine.stats()["waiting"] == 0


def test_a_result_in_time(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(TimeoutError, match="continues"):
        handle.result(timeout=0)
    assert len(answers(handle.result(timeout=60))[0]) == 8


def test_steps_by_hand(engine: Engine) -> None:
    """Whoever drives the engine gets what ended in a step."""
    handles = [
        engine.submit(prompt, max_new_tokens=n, do_sample=False)
        for prompt, n in zip(PROMPTS, (2, 5, 2), strict=False)
    ]
    ended = []
    while not all(handle.done for handle in handles):
        ended.append([len(output.sequences[0].token_ids) for output in engine.step()])
    assert [each for each in ended if each] == [[2], [2], [5]] or [each for each in ended if each] == [
        [2, 2],
        [5],
    ]
    assert engine.step() == []


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


def test_a_seed_settles_the_draws(engine: Engine) -> None:
    """C35; without a seed torch's generator gives one, so that torch.manual_seed settles it."""
    options = {"do_sample": True, "max_new_tokens": 12, "temperature": 2.0}
    assert answers(engine.submit(PROMPTS[0], seed=3, **options).result()) == answers(
        engine.submit(PROMPTS[0], seed=3, **options).result()
    )
    found = []
    for manual in (1, 1, 2):
        torch.manual_seed(manual)
        found.append(answers(engine.submit(PROMPTS[0], **options).result()))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("kind", [{}, {"num_beams": 2}, {"repetition_penalty": 1.3}])
def test_a_request_that_draws_nothing_leaves_torchs_generator(model: Any, kind: dict[str, Any]) -> None:
    """As stock and paged generate() do; one that draws takes a single number, and none if it has a seed."""
    state = torch.get_rng_state()
    engine = Engine(model, num_blocks=60)
    engine.submit(PROMPTS[0], max_new_tokens=3, do_sample=False, **kind).result()
    engine.submit(PROMPTS[0], max_new_tokens=3, do_sample=True, seed=1, **kind).result()
    assert torch.equal(state, torch.get_rng_state())
    engine.submit(PROMPTS[0], max_new_tokens=3, do_sample=True, **kind).result()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randint(2**62, ())
    assert torch.equal(after, torch.get_rng_state())
    engine.check()


# ---- options


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"block_sise": 4}, ValueError, "did you mean 'block_size'"),
        ({"tensor_parallel_size": 4}, ValueError, "ranks are those of the loaded model"),
        ({"block_size": 3}, ValueError, "power of two"),
        ({"num_blocks": 4, "memory_fraction": 0.5}, ValueError, "give one of them"),
        ({"max_batch_tokens": 4, "max_batch_sequences": 5}, ValueError, "one token of each of 5"),
        ({"max_batch_tokens": 4.5}, TypeError, "max_batch_tokens"),
        ({"watermark": 2}, ValueError, "watermark=2"),
        ({"max_batch_tokens": 0}, ValueError, "max_batch_tokens=0 leaves a step nothing to compute"),
        ({"max_batch_sequences": 0}, ValueError, "max_batch_sequences=0 leaves a step nothing to compute"),
        (
            {"max_batch_sequences": 9, "max_batch_tokens": 4},
            ValueError,
            "max_batch_tokens=4 .*; raise max_batch_tokens or",
        ),
        ({"policy": "random"}, ValueError, "policy='random'"),
        ({"preemption": "drop"}, ValueError, "preemption='drop'"),
        ({"preemption": "swap", "host_blocks": 0}, ValueError, "host_blocks=0"),
        ({"admission": "hope"}, ValueError, "admission='hope'"),
        ({"compile": True, "graphs": False}, ValueError, "graphs=False"),
        ({"compile": "inductor"}, TypeError, "compile must be True or False"),
        ({"prefix_caching": "False"}, TypeError, "prefix_caching must be True or False"),
        ({"check_hits": 1}, TypeError, "check_hits must be True or False"),
        ({"run_ahead": "no"}, TypeError, "run_ahead must be True or False"),
        ({"watermark": "0.01"}, TypeError, "watermark must be a number"),
        ({"kernels": "cuda"}, ValueError, "kernels='cuda'"),
        ({"policy": ["fcfs"]}, ValueError, r"policy=\['fcfs'\]"),
        ({"admission": []}, ValueError, r"admission=\[\]"),
        ({"num_blocks": 4.5}, TypeError, "num_blocks must be an int"),
        (
            {"num_blocks": 10**12},
            hf_paged.OutOfBlocks,
            "num_blocks=1000000000000 of 16 tokens take [0-9]* bytes on cpu, and [0-9]* are free",
        ),
        ({"host_blocks": 10**12}, hf_paged.OutOfBlocks, "no memory for host_blocks=1000000000000"),
        ({"memory_fraction": 1e-13}, hf_paged.OutOfBlocks, "less than one block of [0-9]* bytes"),
        ({"tokenizer": EngineConfig()}, TypeError, "tokenizer must have decode.., got EngineConfig"),
        ({"config": {"block_size": 4}}, TypeError, "EngineConfig"),
        ({"config": EngineConfig(), "block_size": 4}, ValueError, "give one of them"),
    ],
)
def test_options_are_checked(model: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    """What is not there yet says so; nothing is ignored, and nothing stays behind."""
    with pytest.raises(error, match=match):
        Engine(model, **options)
    gc.collect()
    memory_of(model).drain()
    assert not memory_of(model).groups


def compiled(llama: Any) -> torch.nn.Module:
    """What torch.compile makes of a model, as far as an engine looks at it: the real one takes seconds."""
    module = torch.nn.Module()
    module._orig_mod = llama
    return module


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda llama: None, "expected a model, got NoneType; load one by from_pretrained"),
        (lambda llama: "name", "expected a model, got str"),
        (lambda llama: llama.model, "LlamaModel cannot generate"),
        (lambda llama: torch.nn.Linear(2, 2), "Linear cannot generate"),
        (compiled, "give the engine the model itself, and compile=True"),
    ],
)
def test_what_is_no_model_to_serve(llama: Any, made: Callable[[Any], Any], match: str) -> None:
    with pytest.raises((TypeError, Unservable), match=match):
        Engine(made(llama))


def test_the_engine_chooses_well_alone(model: Any) -> None:
    """Enough blocks for the most sequences of the model's longest length, within a share of the memory."""
    with hf_paged.Engine(model) as engine:
        assert engine.stats()["blocks"]["full"]["total"] == 256 * (256 // 16 + 1)
        assert engine.config == EngineConfig()
    with hf_paged.Engine(model, memory_fraction=1e-6) as engine:
        assert 0 < engine.stats()["blocks"]["full"]["total"] < 256
    with hf_paged.Engine(model, config=EngineConfig(max_batch_tokens=9)) as engine:
        assert engine.config.limits().sequences == 9


def test_pools_are_given_back(model: Any) -> None:
    engine = Engine(model, num_blocks=30)
    engine.generate([PROMPTS[0]], **GREEDY)
    assert engine.stats()["blocks"]["full"]["bytes"] > 0
    hf_paged.release(model)
    assert engine.stats()["blocks"]["full"] == {
        "total": 30,
        "held": 0,
        "cached": 0,
        "free": 30,
        "bytes": 0,
        "cached_by_tenant": {},
        "taken_by_tenant": {},
    }
    assert answers(engine.generate([PROMPTS[0]], **GREEDY)[0]) == alone(model, PROMPTS[0], **GREEDY)
    engine.close()
    assert hf_paged.release(model) == 0


def test_an_engine_that_is_dropped_gives_its_pools_back(model: Any) -> None:
    engine = Engine(model, num_blocks=30)
    handle = engine.submit(PROMPTS[0], **GREEDY)
    engine.step()
    memory = memory_of(model)
    assert memory.held > 0
    del engine
    gc.collect()
    assert memory.held > 0  # the handle is still somebody's
    del handle
    gc.collect()
    assert memory.held == 0
    assert not memory.groups


# ---- one model, trained and served


@pytest.mark.parametrize("keep", [False, None, True])
def test_training_between_requests(model: Any, keep: bool | None) -> None:
    """An optimizer step, requests, another one, requests: no stale hit (C24), and the pools go or stay as
    asked.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = None
    with Engine(model, block_size=4, num_blocks=60, keep_pools=keep) as engine:
        for _ in range(2):
            outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
            assert [output.cached_tokens for output in outputs] == [0, 28]
            assert [answers(output) for output in outputs] == [alone(model, PROMPTS[3], **GREEDY)] * 2
            assert answers(outputs[0]) != before
            before = answers(outputs[0])
            model.train()
            ids = torch.tensor([PROMPTS[1]])
            model(input_ids=ids, labels=ids).loss.backward()
            assert bool(engine.stats()["blocks"]["full"]["bytes"]) is (keep is not False)
            optimizer.step()
            model.eval()
        hf_paged.release(model)
        assert not engine.stats()["blocks"]["full"]["bytes"]


def test_a_fused_optimizer_steps_under_requests(model: Any, engine: Engine) -> None:
    """C24: it writes where torch does not count; an optimizer of somebody else's parameters is nobody's
    business.
    """
    other = torch.optim.AdamW(
        [torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))], lr=0.1, fused=True
    )
    other.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    ids = torch.tensor([PROMPTS[1]])
    model(input_ids=ids, labels=ids).loss.backward()
    engine.submit(PROMPTS[3], max_new_tokens=40, do_sample=False)
    for _ in range(4):
        engine.step()
    other.step()
    engine.step()
    optimizer.step()
    late = engine.submit(PROMPTS[3], **GREEDY)
    with pytest.raises(RuntimeError, match="changed under 1 running"):
        engine.step()
    engine.pause()
    engine.resume()
    assert answers(late.result()) == alone(model, PROMPTS[3], **GREEDY)


def test_engines_have_one_hook_of_optimizers(model: Any) -> None:
    """It stays, and holds no engine. One may go while torch goes through the hooks."""
    engines = [Engine(model, block_size=4, num_blocks=60)]
    before = set(_global_optimizer_post_hooks)
    gone = []

    def drop(*_: Any) -> None:
        gone.append(weakref.ref(engines.pop()))
        gc.collect()

    hook = register_optimizer_step_post_hook(drop)
    engines.append(Engine(model, block_size=4, num_blocks=60))
    for engine in engines:
        engine.close()
    del engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.step()
    hook.remove()
    assert [each() for each in gone] == [None, None]
    assert set(_global_optimizer_post_hooks) == before


def _rows_exchanged(model: Any) -> None:
    data = model.model.layers[1].self_attn.k_proj.weight.data
    data[[3, 7]] = data[[7, 3]].clone()


CHANGES = {
    "two rows of a weight change places": _rows_exchanged,
    "a weight's data is another": lambda model: setattr(
        model.model.norm.weight,
        "data",
        model.model.norm.weight.data * torch.linspace(0.2, 2, model.config.hidden_size),
    ),
    "a setting of a layer": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out * 2
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_an_idle_engine_s_model(model: Any, engine: Engine, change: str) -> None:
    """C24: nobody begins with what was computed before; what stays the same is found again."""
    for cached in (0, 28):
        (output,) = engine.generate([PROMPTS[3]], **GREEDY)
        assert output.cached_tokens == cached
    CHANGES[change](model)
    for cached in (0, 28):
        (output,) = engine.generate([PROMPTS[3]], **GREEDY)
        assert output.cached_tokens == cached
        assert answers(output) == alone(model, PROMPTS[3], **GREEDY)


@pytest.mark.parametrize("how", ["forward", "hook"])
def test_a_layer_that_computes_with_what_is_outside_the_model(model: Any, engine: Engine, how: str) -> None:
    """C24: of a forward it is read; of a hook it may be anything by the time the engine is idle again."""
    strength = [1.0]
    projection = model.model.layers[0].mlp.down_proj
    if how == "hook":
        projection.register_forward_hook(lambda module, args, out: out * strength[0])
    else:
        stock = projection.forward
        projection.forward = lambda x: stock(x) * strength[0]
    for _ in range(3):
        for cached in (0, 0 if how == "hook" else 28):
            outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
            assert [output.cached_tokens for output in outputs] == [cached, 28]
            assert answers(outputs[0]) == alone(model, PROMPTS[3], **GREEDY)
        strength[0] *= 3.0


def test_a_model_that_cannot_be_read(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run at the same time share; what was cached before an idle engine may be anything."""
    make_unreadable(monkeypatch)
    for _ in range(2):
        outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
        assert [output.cached_tokens for output in outputs] == [0, 28]


def test_layers_that_round_by_the_batch_are_refused(model: Any) -> None:
    """A neighbour would change what they make of a token."""
    layer = model.model.layers[0].self_attn
    layer.q_proj = EightBit(layer.q_proj, threshold=6.0)
    with pytest.raises(Unservable, match="round a token by the rest of its batch"):
        Engine(model)
    layer.q_proj.state.threshold = 0.0
    with Engine(model, num_blocks=60) as engine:
        assert answers(engine.generate([PROMPTS[1]], **GREEDY)[0]) == alone(model, PROMPTS[1], **GREEDY)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_that_changes_its_dtype(model: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between requests `.to(dtype)` is a change like others: the pools are of the new dtype with the next
    request, or after a pause.
    """
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    with Engine(model, block_size=4, num_blocks=60, prefix_caching=True) as engine:
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            for _ in range(3):
                outputs = engine.generate(PROMPTS, **GREEDY)
                assert [answers(output) for output in outputs] == [
                    alone(model, prompt, **GREEDY) for prompt in PROMPTS
                ]
        handle = engine.submit(PROMPTS[3], **GREEDY)
        for _ in range(3):
            engine.step()
        engine.pause()
        model.to(torch.float64)
        engine.resume()
        assert answers(handle.result()) == alone(model, PROMPTS[3], **GREEDY)


def test_weights_that_change_under_requests(model: Any, engine: Engine) -> None:
    """An error as long as anybody holds what the old ones computed; pause() lets them change, and nobody
    loses a token.
    """
    handle = engine.submit(PROMPTS[3], max_new_tokens=10, do_sample=False)
    for _ in range(5):
        engine.step()
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    with pytest.raises(RuntimeError, match="weights have changed under 1 running"):
        engine.step()
    engine.pause()
    said = new_tokens(handle)
    assert engine.stats()["blocks"]["full"]["held"] == 0
    with pytest.raises(RuntimeError, match="paused"):
        engine.step()
    engine.resume()
    tokens = answers(handle.result())[0]
    assert tokens[: len(said)] == said
    assert (
        tokens[len(said) :]
        == alone(model, PROMPTS[3] + said, max_new_tokens=10 - len(said), do_sample=False)[0]
    )


def _scale(tuned: Any) -> None:
    for module in tuned.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] *= 3


OF_ADAPTERS: dict[str, Callable[[Any], object]] = {
    "switched": lambda tuned: tuned.set_adapter("second"),
    "disabled": lambda tuned: tuned.base_model.disable_adapter_layers(),
    "scaled": _scale,
    "deleted": lambda tuned: tuned.delete_adapter("first"),
}
UNDER_REQUESTS: dict[str, Callable[[Any], object]] = {
    "merged": lambda tuned: tuned.merge_adapter(),
    "setting": lambda tuned: setattr(tuned.base_model.model.model.layers[0].self_attn, "scaling", 0.9),
    "replaced": lambda tuned: setattr(tuned.base_model.model.model.layers[1], "mlp", torch.nn.Identity()),
}


@pytest.fixture
def tuned(llama: Any) -> Any:
    """A model with two adapters, the first of which is active."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    made = peft.get_peft_model(llama, config, adapter_name="first")
    made.add_adapter("second", config)
    return made.eval()


@pytest.mark.parametrize("change", OF_ADAPTERS)
def test_adapters_that_change_under_requests(tuned: Any, change: str) -> None:
    """C24: a request keeps the adapter that it came with, or ends if that is another; later ones find none of
    its blocks under another.
    """
    before = alone(tuned, PROMPTS[3], max_new_tokens=40, do_sample=False)
    with Engine(tuned, block_size=4, num_blocks=60) as engine:
        handle = engine.submit(PROMPTS[3], max_new_tokens=40, do_sample=False)
        for _ in range(5):
            engine.step()
        OF_ADAPTERS[change](tuned)
        late = engine.submit(PROMPTS[3], **GREEDY)
        assert answers(late.result()) == alone(tuned, PROMPTS[3], **GREEDY)
        if change in ("switched", "disabled"):
            assert answers(handle.result()) == before
        else:
            assert isinstance(handle.result().error, WeightsChanged)


@pytest.mark.parametrize("change", UNDER_REQUESTS)
def test_settings_that_change_under_requests(tuned: Any, change: str) -> None:
    """C24: blocks of one model must not be found under another, by requests that come while others run."""
    with Engine(tuned, block_size=4, num_blocks=60) as engine:
        engine.submit(PROMPTS[3], max_new_tokens=40, do_sample=False)
        for _ in range(5):
            engine.step()
        UNDER_REQUESTS[change](tuned)
        late = engine.submit(PROMPTS[3], **GREEDY)
        with pytest.raises(RuntimeError, match="changed under 1 running"):
            engine.step()
        engine.pause()
        engine.resume()
        assert answers(late.result()) == alone(tuned, PROMPTS[3], **GREEDY)


def test_what_is_no_change_under_requests(model: Any, engine: Engine) -> None:
    """Calls of the model's own, attention weights asked for, equal settings, somebody who looks on, a longer
    forward.
    """
    handle = engine.submit(PROMPTS[3], **GREEDY)
    engine.step()
    ids = torch.tensor([PROMPTS[1]])
    model.generate(ids, max_new_tokens=3, num_beams=2)
    engine.step()
    model.generate(
        ids,
        max_new_tokens=3,
        cache_implementation="paged",
        output_attentions=True,
        return_dict_in_generate=True,
    )
    engine.step()
    model.model.layers[0].self_attn.scaling = float(str(model.model.layers[0].self_attn.scaling))
    with model.model.layers[0].register_forward_hook(lambda module, given, answer: None):
        engine.step()
    model(torch.tensor([PROMPTS[3] * 3]))
    assert answers(handle.result()) == alone(model, PROMPTS[3], **GREEDY)


def test_what_a_forward_notes_on_its_modules_is_no_change(llama: Any) -> None:
    """Some models keep what they computed last; other settings of these modules are looked at all the
    same.
    """

    class Noting(type(llama.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            self.calls = getattr(self, "calls", 0) + 1
            return self.last

    for layer in llama.model.layers:
        layer.mlp.__class__ = Noting
    with Engine(llama, block_size=4, num_blocks=60) as engine:
        (output,) = engine.generate([PROMPTS[3]], **GREEDY)
        assert answers(output) == alone(llama, PROMPTS[3], **GREEDY)
        engine.submit(PROMPTS[3], **GREEDY)
        engine.step()
        llama.model.layers[0].mlp.own = 3
        with pytest.raises(RuntimeError, match="changed under 1 running"):
            engine.step()


@pytest.mark.parametrize("way", ["data", "replaced", "loaded"])
def test_quiet_changes_are_noticed(model: Any, engine: Engine, way: str) -> None:
    """C24: `weight.data += x` moves neither version nor address; a new parameter and a loaded one count as
    well.
    """
    engine.generate([PROMPTS[3]], **GREEDY)
    handle = engine.submit(PROMPTS[0], **GREEDY)  # who only waits holds nothing of the old ones
    head = model.model.layers[1].mlp.down_proj
    if way == "data":
        head.weight.data += 0.3
    elif way == "replaced":
        head.weight = torch.nn.Parameter(head.weight.detach() + 0.3)
    else:
        head.load_state_dict({"weight": head.weight.detach() + 0.3})
    handle.cancel()
    output = engine.generate([PROMPTS[3]], **GREEDY)[0]
    assert output.cached_tokens == 0
    assert answers(output) == alone(model, PROMPTS[3], **GREEDY)


def test_adapters_are_part_of_the_weights(model: Any) -> None:
    """C24: a peft model in the engine; switching, disabling and merging adapters are never a stale hit."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4
    )
    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, config).eval()
    tuned.add_adapter("other", config)
    engine = Engine(tuned, block_size=4, num_blocks=60)
    seen = []
    for change in (
        lambda: None,
        lambda: tuned.set_adapter("other"),
        tuned.merge_adapter,
        tuned.unmerge_adapter,
    ):
        change()
        outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
        assert [output.cached_tokens for output in outputs] == [0, 28]
        assert [answers(output) for output in outputs] == [alone(tuned, PROMPTS[3], **GREEDY)] * 2
        seen.append(answers(outputs[0]))
    assert seen[0] != seen[1]
    with tuned.disable_adapter():
        assert engine.generate([PROMPTS[3]], **GREEDY)[0].cached_tokens == 0
    engine.close()


def test_prompt_tuning_is_refused(model: Any) -> None:
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(hf_paged.engine.Unservable, match="prompt and prefix tuning"):
        Engine(tuned.eval())


def test_long_rope_has_its_border() -> None:
    """Beyond it one request would turn its neighbours' positions: the border is the longest that is taken."""
    family = BY_NAME["phi3"].build().config
    family.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    family.original_max_position_embeddings = 32
    model = type(BY_NAME["phi3"].build())(family).eval()
    with Engine(model, num_blocks=40) as engine:
        assert engine.generate([PROMPTS[3]], **GREEDY)[0].finish_reason == "refused"
        assert answers(engine.generate([PROMPTS[1]], **GREEDY)[0]) == alone(model, PROMPTS[1], **GREEDY)


TOO_LONG = [5] * 250


def test_the_ids_of_one_prompt_are_no_list_of_prompts(engine: Engine) -> None:
    with pytest.raises(
        TypeError, match=r"got token ids; for one prompt of them write engine.generate\(\[ids\]\)"
    ):
        engine.generate(PROMPTS[0], **GREEDY)
    with pytest.raises(TypeError, match="got int 5"):
        engine.submit(5)


def test_more_sequences_than_run_at_once_name_the_option(engine: Engine) -> None:
    """C11."""
    output = engine.submit(PROMPTS[0], max_new_tokens=3, num_beams=9).result()
    assert output.finish_reason == "refused"
    assert "lower num_beams or num_return_sequences, or raise max_batch_sequences" in str(output.error)


def test_a_prompt_that_is_too_long_is_no_silent_empty_answer(engine: Engine) -> None:
    """C11: its neighbours have theirs, and a warning says which one has none and why; the rest is in its
    output.
    """
    prompts = [PROMPTS[0], TOO_LONG, PROMPTS[1], TOO_LONG]
    said = r"2 of 4 requests .*: prompts\[1\] ended as 'refused', Infeasible: .* 258 tokens.*strict=True"
    with pytest.warns(UserWarning, match=said) as seen:
        outputs = engine.generate(prompts, **GREEDY)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert [output.finish_reason for output in outputs] == ["length", "refused", "length", "refused"]
    assert answers(outputs[0]) == alone(engine.model, PROMPTS[0], **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(prompts[::2], **GREEDY)
        engine.generate(prompts[::2], **GREEDY, strict=True)


def test_a_strict_list_of_prompts_raises(engine: Engine) -> None:
    """What is refused before anything is computed, what fails when all have ended."""
    with pytest.raises(Infeasible, match="258 tokens"):
        engine.generate([PROMPTS[0], TOO_LONG], **GREEDY, strict=True)
    assert engine.stats()["blocks"]["full"]["cached"] == 0
    broken = [lambda ids, scores: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS[:2], **GREEDY, stopping_criteria=broken, strict=True)
    with pytest.warns(
        UserWarning, match=r"2 of 2 requests .* prompts\[0\] ended as 'error', ZeroDivisionError: div"
    ):
        engine.generate(PROMPTS[:2], **GREEDY, stopping_criteria=broken)
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    engine.check()


@pytest.mark.parametrize("salt", [7, b"tenant", 1.5, True, ["tenant"]])
def test_a_salt_is_text_in_the_engine_and_in_generate(engine: Engine, salt: Any) -> None:
    """One check for both, so what names a tenant in one names it in the other (C24)."""
    found = []
    for ask in (
        lambda: engine.submit(PROMPTS[0], **GREEDY, salt=salt),
        lambda: hf_paged.CacheConfig(salt=salt),
        lambda: engine.model.generate(
            torch.tensor(PROMPTS[:1]),
            **GREEDY,
            cache_implementation="paged",
            cache_config={"prefix_caching": True, "salt": salt},
        ),
    ):
        with pytest.raises(TypeError, match="salt must be a str, got") as error:
            ask()
        found.append(str(error.value))
    assert len(set(found)) == 1
    assert engine.submit(PROMPTS[0], **GREEDY, salt="tenant").result().error is None
