"""Kernels compiled while a model is tried out: exactly those that are launched later, by threads that end, and nobody's trouble."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from families import BY_NAME, LONG, SMALL, TOKENS, build
from tape import rerun
from test_kernels_reference import GPU, load

from hf_paged.engine import Engine
from hf_paged.engine.warming import jobs
from hf_paged.integration.capture import RECORDERS
from hf_paged.memory import ops

MODULES = ["advance", "copy", "decode", "digest", "gather", "norm", "prefill", "product", "rotary", "swiglu", "write"]
ON_DEVICES = {"EXACT": True, "UPCAST": False}
"""Constants that are other ones in the interpreter."""
Specialisation = tuple[str, str]


class Compiler:
    """Stands for Triton's: it notes which specialisation of which kernel it is asked for."""

    def __init__(self) -> None:
        self.asked: set[Specialisation] = set()

    def since(self, begin: set[Specialisation]) -> set[Specialisation]:
        return self.asked - begin


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Kernels run in the interpreter, and of each launch it is noted what would have been compiled for a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = Compiler()
    target = GPUTarget("cuda", 90, 32)
    known = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0, "get_current_target": lambda: target}
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**known))
    monkeypatch.setattr(triton.JITFunction, "_do_compile", lambda kernel, key, *rest: found.asked.add((kernel.__name__, key)))
    interpreted = load()
    for name in MODULES:
        compiled = importlib.import_module(f"hf_paged_kernels.{name}")
        monkeypatch.setattr(sys.modules[f"{interpreted.__name__}.{name}"], "launch", _noting(compiled, interpreted.launching.launch))
    monkeypatch.setitem(sys.modules, "hf_paged_kernels", interpreted)
    monkeypatch.setattr(ops, "why_no_kernels", lambda layout: None)
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    yield found


def _noting(compiled: Any, launch: Callable[..., None]) -> Callable[..., None]:
    def both(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        own = {name: ON_DEVICES.get(name, value) for name, value in constants.items()}
        getattr(compiled, kernel.fn.__name__).warmup(*arguments, grid=(1,), **own)
        launch(kernel, grid, *arguments, **constants)

    return both


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**SMALL, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, **TOKENS, **LONG, **changes})
    model = tf.LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.skipif(GPU, reason="the interpreted copy is the CPU's")
@pytest.mark.parametrize("name", ["llama"])
def test_what_is_launched_first_was_compiled(name: str, compiler: Compiler) -> None:
    engine = Engine(llama(), block_size=4, num_blocks=200)
    assert engine.why_rows is None
    trial = set(compiler.asked)
    engine.submit([5 + i % 90 for i in range(140)], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    for _ in range(8):
        engine.step()
        now = compiler.since(trial)
        print("step", engine.stats()["graphs"], [n for n, _ in now])
        trial |= now
    compiler.asked.clear()
    for job in jobs(engine._runner):
        job()
    print("launched, not foreseen")
    for n, k in sorted(trial - compiler.asked): print(n, k)
    print("foreseen, not launched")
    for n, k in sorted(compiler.asked - trial): print(n, k)
    assert 0
