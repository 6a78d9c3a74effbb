"""Kernels on a CPU: interpreted, and of each launch it is noted what would have been compiled for a GPU."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from families import ALTERNATING, LONG, SMALL, TOKENS
from kernel_cases import load
from tape import rerun

from hf_paged.kv import ops
from hf_paged.model.rehearsal import RECORDERS

MODULES = ["advance", "copy", "decode", "digest", "gather", "norm", "prefill", "rotary", "swiglu", "write"]
ON_DEVICES = {"EXACT": True, "UPCAST": False}
"""Constants that are other ones in the interpreter."""
Specialisation = tuple[str, str]


class Compiler:
    """Stands for Triton's: it notes which specialisation of which kernel it is asked for."""

    def __init__(self) -> None:
        self.params: set[Specialisation] = set()
        self.here: set[str] = set()
        """Kernels that the main thread has asked for."""

    def ask(self, kernel: Any, key: str) -> None:
        self.params.add((kernel.__name__, key))
        if threading.current_thread() is threading.main_thread():
            self.here.add(kernel.__name__)


@pytest.fixture(name="compiler")
def noting_compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Kernels run in the interpreter, and of each launch it is noted what would have been compiled for a
    GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = Compiler()
    target = GPUTarget("cuda", 90, 32)
    known = {
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
        "get_current_target": lambda: target,
    }
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**known))
    monkeypatch.setattr(triton.JITFunction, "_do_compile", lambda kernel, key, *rest: found.ask(kernel, key))
    interpreted = load()
    for name in MODULES:
        compiled = importlib.import_module(f"hf_paged_kernels.{name}")
        monkeypatch.setattr(
            sys.modules[f"{interpreted.__name__}.{name}"],
            "launch",
            _noting(compiled, interpreted.launching.launch),
        )
    monkeypatch.setitem(sys.modules, "hf_paged_kernels", interpreted)
    monkeypatch.setattr(ops, "why_no_kernels", lambda layout: None)
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    return found


Form = tuple[Any, int, int]


class ChainForms:
    """Kernels of chains that were compiled ahead and that were launched, each with the numbers in its code."""

    def __init__(self) -> None:
        self.ahead: set[Form] = set()
        self.launched: set[Form] = set()

    @property
    def late(self) -> set[Form]:
        """Those that a launch has to wait for."""
        return self.launched - self.ahead


@pytest.fixture(name="chain_forms")
def noting_chains(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> ChainForms:
    """Kernels of chains run in the interpreter, and each is noted."""
    chain = sys.modules[f"{load().__name__}.chain"]
    found, launch = ChainForms(), chain.launch

    def noting(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        form = kernel, constants["AT_ONCE"], constants["PADDED"]
        (found.ahead if arguments[0].is_meta else found.launched).add(form)
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(chain, "launch", noting)
    return found


def _noting(compiled: Any, launch: Callable[..., None]) -> Callable[..., None]:
    def both(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        own = {name: ON_DEVICES.get(name, value) for name, value in constants.items()}
        getattr(compiled, kernel.fn.__name__).warmup(*arguments, grid=(1,), **own)
        launch(kernel, grid, *arguments, **constants)

    return both


SHAPE = {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, **TOKENS, **LONG}
"""Heads of 16 dimensions: like those of larger models they begin where whole words do."""


def make(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(tf, f"{kind}Config")(**{**SHAPE, **changes})
    model = getattr(tf, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id = 0
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make("Llama"),
    "half": lambda: make("Llama", max_position_embeddings=1024).half(),
    "qwen3": lambda: make("Qwen3", head_dim=16),
    "gemma2": lambda: make(
        "Gemma2",
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        **ALTERNATING,
        attn_implementation="eager",
    ),
    "gemma3": lambda: make("Gemma3Text", head_dim=16, **ALTERNATING),
}
CHAINED: dict[str, Callable[[], Any]] = {
    "gemma2": MODELS["gemma2"],
    "gemma3": MODELS["gemma3"],
    "phi3": lambda: make("Phi3"),
    "glm4": lambda: make("Glm4", head_dim=16),
}
"""Models whose norms are parts of chains."""
"""In half precision prompts of several lengths have tiles of several sizes, and the trial is as long as on a
device.
"""
