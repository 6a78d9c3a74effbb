"""Modules are known by their code, not by their name: who computes what Llama's and Gemma's do is fused,
nobody else is.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fused_models import CONFIG, WIDTH, Kernels, replaced
from torch import nn
from torch.nn.functional import gelu
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm, rotate_half
from transformers.utils.deprecation import deprecate_kwarg

from hf_paged.model.capture.fusion import Fusion, fused, rotates_like_llama
from hf_paged.model.source import reads_like


class RootMeanSquare(nn.Module):
    """Llama's norm under another name, with a docstring and annotations of its own."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, hidden_states):
        """The numbers of Llama's."""
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)  # as there
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def _pretender(name: str, *bases: type, **methods: Any) -> Any:
    """A class that is called like Llama's and does something else."""
    return type(name, bases, methods)


def _norm_times_two(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return 2 * self.weight * hidden_states.to(input_dtype)


def _gate_and_up_changed(self: Any, x: torch.Tensor) -> torch.Tensor:
    down_proj = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
    return down_proj  # noqa: RET504 (as Llama's own code reads)


def _mean_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _twice_the_act(self: Any, input: torch.Tensor) -> torch.Tensor:
    return 2 * self.act(input)


class Renamed(LlamaRMSNorm):
    """Transformers' own wrapper around it changes nothing."""

    @deprecate_kwarg("x", version="99.0.0", new_name="hidden_states")
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def _with(module: Any, **parts: Any) -> Any:
    """The module with other parts."""
    for name, part in parts.items():
        setattr(module, name, part)
    return module


class Squared(nn.Module):
    """An activation that no kernel knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() ** 2


LOOKALIKES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "llama's norm under another name": (RootMeanSquare, True),
    "a norm with another formula, named like llama's": (
        lambda: _pretender("LlamaRMSNorm", LlamaRMSNorm, forward=_norm_times_two)(WIDTH),
        False,
    ),
    "llama's norm with an argument renamed": (lambda: Renamed(WIDTH), True),
    "gemma's norm, inherited": (lambda: _pretender("Other", GemmaRMSNorm)(WIDTH), True),
    "gemma's norm over another _norm": (
        lambda: _pretender("GemmaRMSNorm", GemmaRMSNorm, _norm=_mean_first)(WIDTH),
        False,
    ),
    "a layer norm": (lambda: nn.LayerNorm(WIDTH), False),
    "torch's own norm": (lambda: nn.RMSNorm(WIDTH), False),
    "llama's feed-forward": (lambda: LlamaMLP(CONFIG), True),
    "one with gate and up changed": (
        lambda: _pretender("LlamaMLP", LlamaMLP, forward=_gate_and_up_changed)(CONFIG),
        False,
    ),
    "llama's with another activation": (lambda: _with(LlamaMLP(CONFIG), act_fn=Squared()), False),
    "llama's with exact gelu": (lambda: _with(LlamaMLP(CONFIG), act_fn=nn.GELU()), False),
    "llama's with gelu spelled out": (
        lambda: _with(LlamaMLP(CONFIG), act_fn=ACT2FN["gelu_python_tanh"]),
        False,
    ),
    "llama's with another tanh": (
        lambda: _with(
            LlamaMLP(CONFIG),
            act_fn=_with(ACT2FN["gelu_pytorch_tanh"], act=functools.partial(gelu, approximate="none")),
        ),
        False,
    ),
    "llama's with twice the tanh": (
        lambda: _with(
            LlamaMLP(CONFIG),
            act_fn=_pretender("GELUTanh", type(ACT2FN["gelu_pytorch_tanh"]), forward=_twice_the_act)(),
        ),
        False,
    ),
    "llama's with torch's silu": (lambda: _with(LlamaMLP(CONFIG), act_fn=nn.SiLU()), True),
    "llama's with an activation that is only called SiLU": (
        lambda: _with(LlamaMLP(CONFIG), act_fn=_pretender("SiLUActivation", Squared)()),
        False,
    ),
    "llama's with an activation that is only called tanh": (
        lambda: _with(LlamaMLP(CONFIG), act_fn=_pretender("GELUTanh", Squared)()),
        False,
    ),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_look_alikes(name: str) -> None:
    """Who computes the same is replaced whatever he is called; who computes something else is not, whatever
    he is called.
    """
    build_one, expected = LOOKALIKES[name]
    module, kernels = build_one(), Kernels()
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    own = module(x)
    fusion = Fusion(module, kernels)
    with fused(fusion):
        got = module(x)
    assert torch.equal(got, own)
    assert (module in fusion.forwards, kernels.calls.total()) == (expected, int(expected))


def test_a_layer_over_another_norm_is_not_replaced() -> None:
    """Llama's layer adds and norms in one launch only if the norm is one that the kernel knows."""
    layer = _with(LlamaDecoderLayer(CONFIG, 0), post_attention_layernorm=nn.LayerNorm(WIDTH))
    assert "layer" not in replaced(Fusion(layer, Kernels()))
    assert replaced(Fusion(LlamaDecoderLayer(CONFIG, 0), Kernels())) == {
        "norm": 2,
        "feed_forward": 1,
        "layer": 1,
        "product": 5,
    }


def test_a_decorated_forward_is_other_code() -> None:
    """The lines are Llama's, what is done with their answer is not."""

    def twice(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return functools.wraps(forward)(lambda self, x: 2 * forward(self, x))

    class Twice(LlamaRMSNorm):
        @twice
        def forward(self, hidden_states):
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)

    module, x = Twice(WIDTH), torch.randn(2, WIDTH)
    own = module(x)
    with fused(Fusion(module, Kernels())):
        assert torch.equal(module(x), own)


UNREADABLE: dict[str, Any] = {
    "nothing": None,
    "a builtin": len,
    "a torch function": torch.relu,
    "a class": Squared,
    "made from a string": eval("lambda x: x"),
    "in a dict": lambda x: x,
    "a number": 3,
    "a partial": functools.partial(rotate_half),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_functions_without_readable_code(name: str) -> None:
    assert not reads_like(UNREADABLE[name], rotate_half)


def test_functions_with_two_statements_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _import("two_statements", tmp_path, monkeypatch, "rotate_half = lambda x: x; other = 2\n")
    assert not reads_like(file.rotate_half, rotate_half)


ROTARIES = {
    "llama's": (
        "q, k, cos, sin, unsqueeze_dim=1",
        "x[..., : x.shape[-1] // 2]",
        "x[..., x.shape[-1] // 2 :]",
        True,
    ),
    "interleaved": ("q, k, cos, sin, unsqueeze_dim=1", "x[..., ::2]", "x[..., 1::2]", False),
    "keys first": (
        "k, q, cos, sin, unsqueeze_dim=1",
        "x[..., : x.shape[-1] // 2]",
        "x[..., x.shape[-1] // 2 :]",
        False,
    ),
    "another default": (
        "q, k, cos, sin, unsqueeze_dim=2",
        "x[..., : x.shape[-1] // 2]",
        "x[..., x.shape[-1] // 2 :]",
        False,
    ),
}


@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_embeddings_by_their_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both functions of the file must read like Llama's, and be called alike."""
    arguments, first, second, expected = ROTARIES[name]
    file = f"rotary_of_{tmp_path.name}"
    _import(file, tmp_path, monkeypatch, _ROTARY_FILE.format(arguments=arguments, first=first, second=second))
    assert rotates_like_llama(file) == expected


_ROTARY_FILE = '''import torch


def rotate_half(x):
    """Of this file."""
    x1 = {first}
    x2 = {second}
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb({arguments}):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
'''


def _import(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> ModuleType:
    (folder / f"{name}.py").write_text(source)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
