"""How an engine is used: prompts, handles, increments, lists and options."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import peft
import pytest
import torch
from adapters import lora
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build
from quantized_layers import EightBit
from transformers.utils import logging as progress

import hf_paged
from hf_paged import demo
from hf_paged.engine import Engine, EngineConfig, Output, Unservable
from hf_paged.engine.outputs import progress as outputs_progress
from hf_paged.model.registry import memories, memory_of
from hf_paged.scheduling import Infeasible

GREEDY = {"max_new_tokens": 8, "do_sample": False}


# ---- prompts


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


@pytest.mark.parametrize("prompts", [b"text", {"prompt": [5, 6]}, None, 5])
def test_what_is_neither_a_prompt_nor_a_list_of_them(engine: Engine, prompts: Any) -> None:
    """A dict would be its keys."""
    with pytest.raises(TypeError, match=f"takes a prompt or a list .* got {type(prompts).__name__}"):
        engine.generate(prompts, **GREEDY)


def test_one_prompt_in_one_output_out(engine: Engine) -> None:
    """Token ids of one sequence in any form; a list of prompts is a list of outputs, however short."""
    ids = PROMPTS[1]
    expected = alone(engine.model, ids, **GREEDY)
    for prompt in (ids, tuple(ids), torch.tensor(ids), np.array(ids)):
        output = engine.generate(prompt, **GREEDY)
        assert isinstance(output, Output)
        assert answers(output) == expected
    assert [answers(output) for output in engine.generate(torch.tensor([ids]), **GREEDY)] == [expected]
    assert engine.generate([], **GREEDY) == []
    assert answers(asyncio.run(engine.agenerate(ids, **GREEDY))) == expected
    assert len(asyncio.run(engine.agenerate([ids], **GREEDY))) == 1
    engine.stop()


# ---- engines by the name of their model


@pytest.fixture(scope="module")
def poet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA adapter of the demo model."""
    folder = tmp_path_factory.mktemp("adapters") / "poet"
    torch.manual_seed(0)
    peft.get_peft_model(demo.model(), lora(target_modules=["q_proj", "v_proj"])).save_pretrained(folder)
    return folder


def test_an_engine_by_name(poet: Path) -> None:
    """The model with its tokenizer and adapters; options of the engine and of from_pretrained() beside each other."""
    with Engine.from_pretrained(
        "demo", adapters={"poet": poet}, dtype=torch.bfloat16, device_map="cpu", block_size=8, num_blocks=90
    ) as engine:
        assert engine.model.dtype == torch.bfloat16
        assert (engine.config.block_size, engine.config.num_blocks) == (8, 90)
        assert engine.config.fuse_projections  # the weights are its own
        assert engine.adapters().keys() == {"poet"}
        plain = engine.generate("The moon fell", **GREEDY)
        assert plain.text == engine.tokenizer.decode(plain.sequences[0].token_ids, skip_special_tokens=True)
        assert engine.generate("The moon fell", adapter="poet", **GREEDY).text != plain.text
    assert demo.model().dtype == torch.float32


def test_an_engine_by_a_folder(tmp_path: Path) -> None:
    """The class that the config names, on the first device, with another tokenizer; as config=, options are
    those alone.
    """
    build(BY_NAME["gemma2"]).save_pretrained(tmp_path)
    config = EngineConfig(num_blocks=30)
    with Engine.from_pretrained(tmp_path, tokenizer=demo.tokenizer(), config=config) as engine:
        assert type(engine.model).__name__ == "Gemma2ForCausalLM"
        assert engine.model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert engine.config is config
        assert not engine.model.training
        assert engine.tokenizer("The fox")["input_ids"]
    with Engine.from_pretrained(tmp_path, tokenizer="demo", num_blocks=30) as engine:
        assert engine.tokenizer.chat_template


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_block": 30}, "'num_block' is not an option .*; did you mean 'num_blocks'"),
        ({"num_blocks": 0}, "num_blocks=0 is not a pool"),
        ({"num_blocks": 30, "adapters": {"poet": "/no/such/folder"}}, "/no/such/folder"),
        (
            {"num_blocks": 30, "adapters": {"poet": os.path.dirname(__file__)}},
            "is not a folder with adapter_config",
        ),
        ({"adapters": ["adapters/poet"]}, "adapters are folders by name, as .*, got list"),
    ],
)
def test_an_engine_by_name_is_refused(options: dict[str, Any], error: str) -> None:
    """Before anything is loaded, if the options are wrong; an adapter that is none leaves no engine."""
    held = {id(each) for each in memories() if each.groups}
    with pytest.raises((ValueError, OSError, TypeError), match=error):
        Engine.from_pretrained("demo", **options)
    assert {id(each) for each in memories() if each.groups} <= held


@pytest.mark.parametrize("place", ["terminal", "notebook", "file"])
def test_bars_are_drawn_where_somebody_sees_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Of weights, and by themselves of answers that take long."""
    monkeypatch.setattr(outputs_progress, "LONG_WORK", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: place == "terminal")
    monkeypatch.setattr(progress, "_tqdm_active", True)
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with Engine.from_pretrained("demo", num_blocks=30) as engine:
        assert ("Loading weights" in capsys.readouterr().err) == (place != "file")
        engine.generate(["The fox", "The moon fell"], **GREEDY)
        assert ("2/2" in capsys.readouterr().err) == (place != "file")
    assert progress.is_progress_bar_enabled()


def test_an_engine_by_a_path_where_nothing_is() -> None:
    with pytest.raises(ValueError, match="there is no folder /no/such/model; give that of a model"):
        Engine.from_pretrained("/no/such/model")


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


# ---- answers


def test_an_answer_that_ends_before_its_first_token_says_so(engine: Engine) -> None:
    """Whoever iterates hears of every end, and once."""
    for steps in range(2):
        handle = engine.submit(PROMPTS[3], do_sample=True, num_return_sequences=2, max_new_tokens=6, seed=1)
        for _ in range(steps):
            engine.step()
        handle.cancel()
        assert [(each.index, each.token_ids, each.text, each.finish_reason) for each in handle] == [
            (i, [], "", "abort") for i in range(2)
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
    with pytest.raises(ValueError, match="the prompt is a text and needs a tokenizer"):
        engine.generate("one text")


def test_progress_is_a_bar_or_a_function(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int | None]] = []
    engine.generate(PROMPTS[:3], **GREEDY, progress=lambda ended, total: seen.append((ended, total)))
    assert seen[-1] == (3, 3)
    assert capsys.readouterr().err == ""
    engine.generate(PROMPTS[:3], **GREEDY)
    assert capsys.readouterr().err == "", "a short list needs no bar"
    engine.generate(PROMPTS[:3], **GREEDY, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_list_that_fails_leaves_nothing_behind(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.generate([PROMPTS[0], []], **GREEDY)
    assert engine.stats()["waiting"] == 0


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


# ---- options


@pytest.fixture(scope="module")
def untouched() -> Iterator[Any]:
    """A model of which no engine could be made: none has left blocks behind."""
    model = build(BY_NAME["llama"])
    yield model
    gc.collect()
    memory_of(model).drain()
    assert not memory_of(model).groups


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
def test_options_are_checked(
    untouched: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Options that are not there yet say so, and nothing is ignored."""
    with pytest.raises(error, match=match):
        Engine(untouched, **options)


def compiled(llama: Any) -> torch.nn.Module:
    """A stand-in for torch.compile's model, as far as an engine looks at it: the real one takes seconds."""
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
    """Enough blocks for the most sequences of the model's longest length, on a CPU for 64 of them, within a share
    of the memory.
    """
    with hf_paged.Engine(model) as engine:
        assert engine.stats()["blocks"]["full"]["total"] == 64 * (256 // 16 + 1)
        assert engine.config == EngineConfig()
    with hf_paged.Engine(model, memory_fraction=1e-6) as engine:
        assert 0 < engine.stats()["blocks"]["full"]["total"] < 256
    with hf_paged.Engine(model, config=EngineConfig(max_batch_tokens=9)) as engine:
        assert engine.config.limits().sequences == 9
        assert engine.config.limits() is engine.config.limits(), "requests and steps ask for them"


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


def test_layers_that_round_by_the_batch_are_refused(model: Any) -> None:
    """A neighbour would change what they make of a token."""
    layer = model.model.layers[0].self_attn
    layer.q_proj = EightBit(layer.q_proj, threshold=6.0)
    with pytest.raises(Unservable, match="round a token depending on the rest of its batch"):
        Engine(model)
    layer.q_proj.state.threshold = 0.0
    with Engine(model, num_blocks=60) as engine:
        assert answers(engine.generate([PROMPTS[1]], **GREEDY)[0]) == alone(model, PROMPTS[1], **GREEDY)


@pytest.fixture
def tuned(llama: Any) -> Any:
    """A model with two adapters, the first of which is active."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    made = peft.get_peft_model(llama, config, adapter_name="first")
    made.add_adapter("second", config)
    return made.eval()


TOO_LONG = [5] * 250


def test_an_id_is_no_prompt(engine: Engine) -> None:
    with pytest.raises(TypeError, match="got int 5"):
        engine.submit(5)


def test_a_strict_list_of_prompts_raises(engine: Engine) -> None:
    """Some requests are refused before anything is computed, others fail when all have ended."""
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
