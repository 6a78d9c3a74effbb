"""Compiled layers in the engine's captured steps: the same tokens, few codes, nothing left in the model, and
ways back (C23, C24).
"""

from __future__ import annotations

import copy
import gc
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from captures import compiled as compiled_steps
from captures import counts, drop, reasons, why_not_compiled
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, LONG, SMALL, TOKENS, build
from fused_models import Kernels, surroundings
from model_checks import graph_key
from torch import nn

from hf_paged import FallbackWarning
from hf_paged.engine import Engine
from hf_paged.engine.worker import captured as engine_side
from hf_paged.kv import Ops
from hf_paged.model.capture import compile as compiled
from hf_paged.model.rehearsal import RECORDERS

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def again(step: Callable[[], Any], pools: Any, devices: Any) -> tuple[Callable[[], None], Any]:
    """Stands for a CUDA graph: a replay runs the step's Python once more. No tape can note what compiled code
    does.
    """

    def replay() -> None:
        with torch.no_grad():
            step()

    return replay, step()


@pytest.fixture(autouse=True)
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", again)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers are traced as ever, and what is made of them is the graph itself. The graphs."""
    graphs: list[Any] = []

    def make(graph: Any, inputs: Any) -> Any:
        compiled.join_products(graph)
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "_make", make)
    return graphs


def of_layers(graphs: list[Any]) -> list[Any]:
    """Those of decoder layers; the others make cosines and sines."""
    return [graph for graph in graphs if "hf_paged.attend" in graph.code]


def deep_llama() -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(num_key_value_heads=2, **{**SMALL, "num_hidden_layers": 6}, **TOKENS, **LONG)
    model = tf.LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def assert_served(model: Any, *, compile: bool, match: str = "", **options: Any) -> Engine:
    """Everybody's tokens are those of generate() alone; with `compile` all captured steps are compiled, else
    none is.
    """
    with Engine(model, block_size=4, compile=True, **options) as engine:
        outputs = engine.generate(PROMPTS[:4], **GREEDY)
        engine.check()
        found = counts(engine)
        assert found["replayed"] > 2, reasons(engine)
        assert found["compiled"] == (found["captured"] if compile else 0), why_not_compiled(engine)
        assert match in (why_not_compiled(engine) or "")
    assert [answers(output) for output in outputs] == [
        alone(model, prompt, **GREEDY) for prompt in PROMPTS[:4]
    ]
    return engine


# ---- the same tokens


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_same_tokens_from_compiled_layers(name: str) -> None:
    """C23: whatever the layers are made of; the first in their families' own code."""
    assert_served(build(BY_NAME[name]), compile=True)


def test_beams_and_samples(llama: Any) -> None:
    drawing = {**GREEDY, "do_sample": True, "seed": 3, "num_return_sequences": 3}
    with Engine(llama, block_size=4, compile=True) as engine:
        beams = engine.submit(PROMPTS[3], num_beams=3, max_new_tokens=9, min_new_tokens=9)
        drawn = engine.submit(PROMPTS[0], **drawing)
        found = answers(beams.result()), answers(drawn.result())
        assert counts(engine)["compiled"]
    with Engine(llama, block_size=4, graphs=False) as engine:
        right = engine.submit(PROMPTS[0], **drawing).result()
    assert found == (
        alone(llama, PROMPTS[3], num_beams=3, max_new_tokens=9, min_new_tokens=9),
        answers(right),
    )


def test_one_code_for_all_layers_and_rows(traced: list[Any]) -> None:
    """Two for a model: one row is a case of its own. Neither layers nor buckets of rows nor another engine's
    tables add any.
    """
    model = deep_llama()
    with Engine(model, block_size=4, max_batch_tokens=40, compile=True) as engine:
        for count in (1, 2, 3, 5, 9):
            engine.generate([PROMPTS[0]] * count, **GREEDY)
        assert counts(engine)["compiled"] == counts(engine)["captured"] > 4
        assert len(of_layers(traced)) == 2
        assert len(traced) == 4
        engine.pause()
        engine.resume()
        engine.generate([PROMPTS[1]] * 3, **GREEDY)
        drop(engine)
        engine.generate([PROMPTS[2]] * 3, **GREEDY)
        assert len(traced) == 4


def test_kernels_of_ours_in_compiled_layers(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    """Queries and keys are turned where they are stored, sums are normed in one kernel, and no capture
    compiles anything again.
    """
    model, kernels = deep_llama(), Kernels()
    monkeypatch.setattr(Ops, "kernels", kernels)
    with Engine(model, block_size=4, compile=True) as engine:
        outputs = engine.generate(PROMPTS[:2], **GREEDY)
        engine.generate(PROMPTS[:4], **GREEDY)
        assert counts(engine)["compiled"] == counts(engine)["captured"] > 1
    assert kernels.calls["rotary"] > 12
    assert kernels.calls["add_rms_norm"] > 24
    (graph,) = of_layers(traced)
    assert "position_embeddings" in graph.code
    assert "torch.cat" not in graph.code
    assert "rsqrt" not in graph.code
    assert [answers(output) for output in outputs] == [
        alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]
    ]


@pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="inductor needs a C++ compiler on a CPU"
)
def test_code_of_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The real thing, from an empty cache."""
    monkeypatch.undo()
    monkeypatch.setitem(RECORDERS, "cpu", again)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        "torch._inductor.cpu_vec_isa.valid_vec_isa_list", list, raising=False
    )  # it compiles ten seconds to find out
    from torch._inductor import config

    with config.patch(compile_threads=1):  # no processes that outlive the test
        assert_served(build(BY_NAME["llama"]), compile=True)


# ---- nothing is left


def test_the_model_is_as_it_was(llama: Any) -> None:
    """Modules, functions, parameters and settings after the engine, and between its steps; generate() and
    training work.
    """
    before = copy.deepcopy(llama.state_dict())
    parameters = dict(llama.named_parameters())
    with Engine(llama, block_size=4, compile=True) as engine:
        around, key = surroundings(llama), graph_key(llama)
        handle = engine.submit(PROMPTS[0], **GREEDY)
        for _ in range(5):
            engine.step()
            assert surroundings(llama) == around
            assert graph_key(llama) == key
            alone(llama, PROMPTS[1], max_new_tokens=2)
        assert counts(engine)["compiled"] == 1
        assert answers(handle.result()) == alone(llama, PROMPTS[0], **GREEDY)
    assert {name: id(parameter) for name, parameter in llama.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in llama.state_dict().items())
    llama.train()
    llama(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())


def test_weights_that_change_are_read_anew(llama: Any) -> None:
    """C24: an optimizer step between requests, over weights that lie side by side."""
    with Engine(llama, block_size=4, compile=True) as engine:
        engine.generate(PROMPTS[:2], **GREEDY)
        llama.train()
        optimizer = torch.optim.SGD(llama.parameters(), lr=0.5)
        llama(torch.tensor([PROMPTS[3]]), labels=torch.tensor([PROMPTS[3]])).loss.backward()
        optimizer.step()
        llama.eval()
        outputs = engine.generate(PROMPTS[:2], **GREEDY)
        assert counts(engine)["compiled"] == counts(engine)["captured"]
    assert [answers(output) for output in outputs] == [
        alone(llama, prompt, **GREEDY) for prompt in PROMPTS[:2]
    ]


def test_nothing_keeps_the_model() -> None:
    model = deep_llama()
    with Engine(model, block_size=4, compile=True) as engine:
        engine.generate(PROMPTS[:2], **GREEDY)
        assert counts(engine)["compiled"]
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None


def test_a_model_that_the_user_compiles_too(llama: Any, traced: list[Any]) -> None:
    """Its codes and ours do not meet: neither counts for the other."""
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    def own(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = whole(input_ids=ids, use_cache=False).logits
        return logits

    whole = torch.compile(llama, backend=backend)
    ids = torch.tensor([PROMPTS[0]])
    right, count = own(ids), len(made)
    assert count
    assert_served(llama, compile=True)
    assert len(of_layers(traced)) <= 2
    assert torch.allclose(own(ids), right)
    torch._dynamo.reset()


# ---- ways back


def test_a_layer_that_cannot_be_traced(llama: Any) -> None:
    class Talks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            torch._dynamo.graph_break()
            return self.inner(x)

    llama.model.layers[1].mlp = Talks(llama.model.layers[1].mlp)
    with pytest.warns(FallbackWarning, match="compile=True: Unsupported") as told:
        assert_served(llama, compile=False, match="Unsupported")
    assert len(told) == 1


def test_a_compiler_that_fails(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such target")

    monkeypatch.setattr(compiled, "_make", fails)
    with pytest.warns(FallbackWarning, match="no such target") as told:
        assert_served(llama, compile=False, match="no such target")
    assert len(told) == 1


def test_code_that_differs_is_never_used(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every captured step is held to the forward itself. One that is wrong ends the compiled ones that seemed
    right.
    """

    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *given: tuple(x if len(x) < 3 else -3 * x for x in graph.forward(*given))

    monkeypatch.setattr(compiled, "_make", wrong)
    with Engine(llama, block_size=4, compile=True) as engine:
        (first,) = engine.generate(PROMPTS[:1], **GREEDY)
        assert counts(engine)["compiled"] == 1
        with pytest.warns(FallbackWarning, match="differs from the forward") as told:
            rest = engine.generate(PROMPTS[:4], **GREEDY)
        assert len(told) == 1
        assert not compiled_steps(engine)
        assert counts(engine)["replayed"] > 5
    assert [answers(output) for output in (first, *rest)] == [
        alone(llama, prompt, **GREEDY) for prompt in [PROMPTS[0], *PROMPTS[:4]]
    ]


def test_layers_that_want_a_code_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST", 2)
    model = deep_llama()
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.scaling *= 1 + number / 7
    with pytest.warns(FallbackWarning, match="more than 2 different codes"):
        assert_served(model, compile=False, match="more than 2 different codes")


def test_memory_that_ends_is_no_reason(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is not captured now; later there may be room."""

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(engine_side, "CompiledFusion", full)
    with Engine(llama, block_size=4, compile=True) as engine:
        (output,) = engine.generate(PROMPTS[:1], **GREEDY)
        assert why_not_compiled(engine) is None
        assert not counts(engine)["captured"]
    assert answers(output) == alone(llama, PROMPTS[0], **GREEDY)


def test_a_model_whose_steps_cannot_be_captured(llama: Any) -> None:
    llama.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with (
        pytest.warns(FallbackWarning, match="cannot be captured.*hooks") as told,
        Engine(llama, block_size=4, compile=True) as engine,
    ):
        outputs = engine.generate(PROMPTS[:2], **GREEDY)
    assert len(told) == 1
    assert [answers(output) for output in outputs] == [
        alone(llama, prompt, **GREEDY) for prompt in PROMPTS[:2]
    ]


def test_where_no_step_is_captured(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when the engine is made, and serves."""
    with pytest.warns(FallbackWarning, match="one by one"):
        Engine(build(BY_NAME["falcon"]), compile=True).close()
    monkeypatch.delitem(RECORDERS, "cpu")
    with pytest.warns(FallbackWarning, match="none on cpu"), Engine(llama, compile=True) as engine:
        (output,) = engine.generate(PROMPTS[:1], **GREEDY)
    assert answers(output) == alone(llama, PROMPTS[0], **GREEDY)


def test_without_it_nothing_is_compiled(llama: Any, traced: list[Any]) -> None:
    places = [parameter.data_ptr() for parameter in llama.parameters()]
    with warnings.catch_warnings(), Engine(llama, block_size=4) as engine:
        warnings.simplefilter("error")
        engine.generate(PROMPTS[:2], **GREEDY)
        assert counts(engine)["captured"]
    assert not traced
    assert places == [parameter.data_ptr() for parameter in llama.parameters()]
