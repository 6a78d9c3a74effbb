"""A flat row over recurrent states: which functions are answered, in whose forwards, and what is not known."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computed_once import computed_once
from kernel_cases import load
from poison import poison_free_slots
from releases import FLAT_STATES
from tiny import build, config_class

from hf_paged import Engine
from hf_paged.kv.state_spans import StateSpans
from hf_paged.kv.state_store import StateStore
from hf_paged.model import state_functions
from hf_paged.model.source import STANDS_FOR
from hf_paged.model.state_functions import KNOWN
from hf_paged.model.state_spans import SPANNED, StockCall

PROMPTS = [[7, 9, 11, 13, 8], [21, 30], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]
FAMILIES = [
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2",
]  # fmt: skip


def tiny(family: str) -> Any:
    model = build("causal", config_class("causal", family))
    model.generation_config.eos_token_id = None
    return model


def alone(model: Any, prompt: list[int], new: int) -> list[int]:
    def compute() -> list[int]:
        found = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
        return found[0, len(prompt) :].tolist()

    return computed_once(compute, model, prompt, new)


def check(model: Any, engine: Engine, new: int = 5) -> None:
    """All prompts at once are answered as each alone."""
    handles = [engine.submit(prompt, max_new_tokens=new) for prompt in PROMPTS]
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert handle.result().sequences[0].token_ids == alone(model, prompt, new)
    engine.check()


def file_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def is_whole(model: Any) -> bool:
    """True if the functions of a model's file are its own."""
    names = [*KNOWN, *SPANNED]
    return not any(hasattr(getattr(file_of(model), name, None), STANDS_FOR) for name in names)


@FLAT_STATES
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_one_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and decoding rows of a step are one forward."""
    poison_free_slots(monkeypatch)
    model = tiny(family)
    with Engine(model, max_batch_tokens=7, max_batch_sequences=3) as engine:
        assert engine.stats()["form"] == "flat", engine.stats()["off"]
        forwards: list[int] = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: forwards.append(ids[0].numel()))
        check(model, engine)
        assert forwards[0] == 7
    assert is_whole(model)


@FLAT_STATES
def test_a_step_is_one_forward() -> None:
    model = tiny("qwen3_5_text")
    with Engine(model, max_batch_tokens=9) as engine:
        forwards: list[int] = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: forwards.append(ids[0].numel()))
        engine.generate(PROMPTS, max_new_tokens=4)
        assert len(forwards) == engine.stats()["steps"]
        assert sum(forwards) == engine.stats()["tokens"]
        engine.check()


# ---- what is not known runs row by row, by name


def test_a_layer_of_other_code_runs_row_by_row() -> None:
    model = tiny("zaya")
    with Engine(model) as engine:
        assert engine.stats()["form"] == "rows"
        assert "layer 0 advances its states by code that is not known" in engine.stats()["off"]["flat"]
        check(model, engine)


def other_parameters(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: stock(x, *args, **kwargs)


def other_states(stock: Callable[..., Any]) -> Callable[..., Any]:
    """It takes the state behind the tokens for one before them, where there is one."""

    def scan(
        hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None,
        initial_states: Any = None, dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")),
        return_final_states: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if hidden_states.shape[0] > 1 or dt_bias is None:
            initial_states = None
        return stock(
            hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit,
            return_final_states, **kwargs,
        )  # fmt: skip

    return scan


@FLAT_STATES
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (other_parameters, "mamba2_chunk_scan has other parameters"),
        (other_states, "in one row with others its sequences get other logits"),
    ],
)
def test_functions_of_another_release(
    other: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences are computed one by one, and the log says so once for each class."""
    monkeypatch.setattr(state_functions, "_told", weakref.WeakKeyDictionary())
    model = tiny("nemotron_h")
    file = file_of(model)
    monkeypatch.setattr(file, "mamba2_chunk_scan", other(file.mamba2_chunk_scan))
    for _ in range(2):
        with Engine(model) as engine:
            assert engine.stats()["form"] == "rows"
            assert reason in engine.stats()["off"]["flat"]
            check(model, engine)
    told = [each for each in caplog.messages if "NemotronHForCausalLM: " in each]
    lines = [
        each for each in told if f"sequences are computed one by one: {engine.stats()['off']['flat']}" in each
    ]
    assert len(lines) == 1
    assert len(set(told)) == len(told)


# ---- whose calls are answered


@FLAT_STATES
def test_forwards_of_other_threads_get_stocks_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_5_text")
    other = tiny("qwen3_5_text")
    wanted = alone(other, PROMPTS[2], 3)
    found: list[list[int]] = []
    convolve = StateSpans.convolve

    def meanwhile(*given: Any) -> torch.Tensor:
        if not found:
            found.append([])
            thread = threading.Thread(target=lambda: found.append(alone(other, PROMPTS[2], 3)))
            thread.start()
            thread.join()
        return convolve(*given)

    with Engine(model) as engine:
        monkeypatch.setattr(StateSpans, "convolve", meanwhile)
        check(model, engine, new=2)
    assert found[1] == wanted
    assert is_whole(model)


@FLAT_STATES
def test_engines_of_one_file_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends its step leaves the other its functions."""
    models = [tiny("nemotron_h") for _ in range(2)]
    convolve = StateSpans.convolve
    inside: list[list[int]] = []

    def answer(engine: Engine) -> None:
        inside.append(engine.generate([PROMPTS[0]], max_new_tokens=2)[0].sequences[0].token_ids)

    with Engine(models[0]) as first, Engine(models[1]) as second:

        def meanwhile(*given: Any) -> torch.Tensor:
            if not inside:
                inside.append([])
                thread = threading.Thread(target=answer, args=[second])
                thread.start()
                thread.join()
            return convolve(*given)

        monkeypatch.setattr(StateSpans, "convolve", meanwhile)
        check(models[0], first, new=3)
        assert inside[1] == alone(models[1], PROMPTS[0], 2)
        second.check()
    assert is_whole(models[0])


def test_a_call_is_made_again_as_it_was_made() -> None:
    given: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs))

    call = StockCall.of(note, ("x", "y", "z"), (1, 2), {"z": 3})
    assert call.get("x") == 1
    assert call.get("none") is None
    call.again(y=5, z=6)
    assert given == [((1, 5), {"z": 6})]


@FLAT_STATES
@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_5_text", "delta_spans"), ("mamba", "scan_spans"), ("bamba", "ssm_spans")]
)
def test_prompts_by_the_kernel_of_spans(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels step states, gated delta rules and selective scans take all spans of a step by their slots:
    chunks behind others, beside single tokens, and turns behind snapshots.
    """
    kernels = load()
    monkeypatch.setattr(StateStore, "steps", kernels)
    used = []
    spans = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *x, **y: used.append(x[-1].shape) or spans(*x, **y))
    model = tiny(family)
    prompts = [list(range(5, 5 + count)) for count in (3, 20, 9)]
    with Engine(model, block_size=4, max_batch_tokens=12, state_every=8) as engine:
        for _ in range(2):
            handles = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
            outputs = [handle.result() for handle in handles]
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                tokens = output.sequences[0].token_ids
                ids = torch.tensor([prompt])
                assert (
                    tokens
                    == model.generate(ids, max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()
                )
                prompts[i] = [*prompt, *tokens, 7]
        assert engine.stats()["form"] == "flat"
        assert engine.stats()["states"]["hits"]
        engine.check()
    assert used
