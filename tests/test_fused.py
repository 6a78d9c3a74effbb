"""Fused small operations: whose code is replaced, what is called instead, and that nobody else notices."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as tf
from families import BY_NAME, LONG, SMALL, TOKENS, VOCABULARY, build
from torch import nn
from torch.nn.functional import gelu, silu
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb, rotate_half

from hf_paged.integration.fused import ROTARY, Fusion, fused, reads_like, rotates_like_llama
from hf_paged.integration.lazy import LazyRotated

CONFIG = tf.LlamaConfig(num_key_value_heads=2, **SMALL, **TOKENS, **LONG)
WIDTH = CONFIG.hidden_size


class Kernels:
    """The kernels' formulas in torch, rounding where they round, and a list of who was called in which thread."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.threads: set[int] = set()

    def _note(self, name: str) -> None:
        self.calls[name] += 1
        self.threads.add(threading.get_ident())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, centered: bool = False) -> torch.Tensor:
        self._note("rms_norm")
        return self._norm(x, weight, eps, centered)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1 + weight.float())).to(x.dtype) if centered else weight * normed.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, centered: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("add_rms_norm")
        return residual + x, self._norm(residual + x, weight, eps, centered)

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
        self._note(activation)
        return {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}[activation](gate) * up

    def rotary(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("rotary")
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """Another thread, where work can be done meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A family's model with norms that do something."""
    if name == "gemma":
        torch.manual_seed(0)
        model = tf.GemmaForCausalLM(tf.GemmaConfig(num_key_value_heads=2, head_dim=8, **SMALL, **TOKENS, **LONG)).eval()
    else:
        model = build(BY_NAME[name])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(dtype)


def run(model: Any) -> torch.Tensor:
    ids = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


def replaced(fusion: Fusion) -> dict[str, int]:
    """How many modules of the model are replaced by what."""
    return dict(Counter(forward.func.__name__ for forward in fusion.forwards.values()))  # type: ignore[attr-defined]


def surroundings(model: nn.Module) -> list[Any]:
    """All that a fusion might leave changed."""
    files = {type(module).__module__ for module in model.modules()}
    functions = [getattr(sys.modules[file], ROTARY, None) for file in sorted(files)]
    return [*functions, *((module, dict(module.__dict__), type(module).forward) for module in model.modules())]


EXPECTED: dict[str, tuple[dict[str, int], bool, dict[str, int]]] = {
    "llama": ({"norm": 5, "feed_forward": 2, "layer": 2}, True, {"rms_norm": 1, "add_rms_norm": 4, "silu": 2, "rotary": 2}),
    "mistral": ({"norm": 5, "feed_forward": 2, "layer": 2}, True, {"rms_norm": 1, "add_rms_norm": 4, "silu": 2, "rotary": 2}),
    "qwen3": ({"norm": 9, "feed_forward": 2, "layer": 2}, True, {"rms_norm": 5, "add_rms_norm": 4, "silu": 2, "rotary": 2}),
    "gemma": ({"norm": 5, "feed_forward": 2, "layer": 2}, True, {"rms_norm": 1, "add_rms_norm": 4, "gelu_tanh": 2, "rotary": 2}),
    "gemma2": ({"norm": 9, "feed_forward": 2}, True, {"rms_norm": 9, "gelu_tanh": 2, "rotary": 2}),
    "gemma3": ({"norm": 13, "feed_forward": 2}, True, {"rms_norm": 13, "gelu_tanh": 2, "rotary": 2}),
    "phi3": ({"norm": 5}, False, {"rms_norm": 5}),
    "gpt2": ({}, False, {}),
}
"""For each family: what is replaced, whether its rotary embedding is Llama's, and how often each kernel runs in a forward."""


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_replaced(name: str) -> None:
    """Known by their code: another file's norm is Llama's or Gemma's, phi3's layers (with dropouts) and its rotary are not."""
    model = make(name)
    fusion = Fusion(model, Kernels())
    modules, rotary, _ = EXPECTED[name]
    assert replaced(fusion) == modules
    assert fusion.rotaries == ({type(model).__module__} if rotary else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPECTED)
def test_same_numbers_in_fewer_launches(name: str, dtype: torch.dtype) -> None:
    """Bit by bit: the fused modules round where the modules' own code does. Sums and norms run together, one launch each."""
    model, kernels = make(name, dtype), Kernels()
    expected, before = run(model), surroundings(model)
    fusion = Fusion(model, kernels)
    with fused(fusion):
        got = run(model)
    assert torch.equal(got, expected)
    assert dict(kernels.calls) == EXPECTED[name][2]
    assert fusion.ahead is None, "a norm that was made ahead was used"
    assert surroundings(model) == before
    assert torch.equal(run(model), expected)
    assert dict(kernels.calls) == EXPECTED[name][2]


def test_the_answer_depends_on_the_kernels() -> None:
    """So the comparison above compares something: each of them, answering otherwise, is noticed."""
    model = make("llama")
    expected = run(model)
    for name in ("rms_norm", "add_rms_norm", "swiglu", "rotary"):
        kernels = Kernels()
        right = getattr(kernels, name)

        def wrong(*args: Any, right: Callable[..., Any] = right, **kwargs: Any) -> Any:
            answer = right(*args, **kwargs)
            return tuple(part * 1.01 for part in answer) if isinstance(answer, tuple) else answer * 1.01

        setattr(kernels, name, wrong)
        with fused(Fusion(model, kernels)):
            assert not torch.allclose(run(model), expected, atol=1e-4), name


def test_without_kernels_nothing_is_replaced() -> None:
    model = make("llama")
    fusion = Fusion(model, None)
    assert (fusion.forwards, fusion.rotaries, fusion.following) == ({}, set(), {})
    expected = run(model)
    with fused(fusion):
        assert torch.equal(run(model), expected)


# ---- by code, not by name


class RootMeanSquare(nn.Module):
    """Llama's norm under another name, with a docstring and annotations of its own."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, hidden_states):
        """What Llama's says."""
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


class Squared(nn.Module):
    """An activation that no kernel knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() ** 2


def _with(module: Any, **parts: Any) -> Any:
    for name, part in parts.items():
        setattr(module, name, part)
    return module


LOOKALIKES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "llama's norm under another name": (RootMeanSquare, True),
    "a norm with another formula, named like llama's": (
        lambda: _pretender("LlamaRMSNorm", LlamaRMSNorm, forward=_norm_times_two)(WIDTH),
        False,
    ),
    "gemma's norm, inherited": (lambda: _pretender("Other", GemmaRMSNorm)(WIDTH), True),
    "gemma's norm over another _norm": (lambda: _pretender("GemmaRMSNorm", GemmaRMSNorm, _norm=_mean_first)(WIDTH), False),
    "a layer norm": (lambda: nn.LayerNorm(WIDTH), False),
    "torch's own norm": (lambda: nn.RMSNorm(WIDTH), False),
    "llama's feed-forward": (lambda: LlamaMLP(CONFIG), True),
    "one with gate and up changed": (lambda: _pretender("LlamaMLP", LlamaMLP, forward=_gate_and_up_changed)(CONFIG), False),
    "llama's with another activation": (lambda: _with(LlamaMLP(CONFIG), act_fn=Squared()), False),
    "llama's with exact gelu": (lambda: _with(LlamaMLP(CONFIG), act_fn=nn.GELU()), False),
    "llama's with gelu spelled out": (lambda: _with(LlamaMLP(CONFIG), act_fn=ACT2FN["gelu_python_tanh"]), False),
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
    """Who computes the same is replaced whatever he is called; who computes something else is not, whatever he is called."""
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
    assert replaced(Fusion(LlamaDecoderLayer(CONFIG, 0), Kernels())) == {"norm": 2, "feed_forward": 1, "layer": 1}


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


@pytest.mark.parametrize("function", [None, len, torch.relu, Squared, eval("lambda x: x"), 3])
def test_what_has_no_code_to_read_reads_like_nobody(function: Any) -> None:
    assert not reads_like(function, rotate_half)


ROTARIES = {
    "llama's": ("q, k, cos, sin, unsqueeze_dim=1", "x[..., : x.shape[-1] // 2]", "x[..., x.shape[-1] // 2 :]", True),
    "interleaved": ("q, k, cos, sin, unsqueeze_dim=1", "x[..., ::2]", "x[..., 1::2]", False),
    "keys first": ("k, q, cos, sin, unsqueeze_dim=1", "x[..., : x.shape[-1] // 2]", "x[..., x.shape[-1] // 2 :]", False),
    "another default": ("q, k, cos, sin, unsqueeze_dim=2", "x[..., : x.shape[-1] // 2]", "x[..., x.shape[-1] // 2 :]", False),
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


# ---- norms that are made ahead


class Stack(nn.Module):
    """Layers and a norm as in Llama, and something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm, self.between = LlamaRMSNorm(WIDTH), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return self.norm(x)


class Attention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states.flip(1), None


class Layer(LlamaDecoderLayer):
    """Llama's layer over an attention that needs nothing."""

    def __init__(self) -> None:
        super().__init__(CONFIG, 0)
        self.self_attn = Attention()


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "nothing": (lambda x: x, 1),
    "another tensor": (lambda x: x * 2, 3),
    "a part of it": (lambda x: x[:, -1:], 3),
    "in place": (lambda x: x.add_(1), 3),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_norm_made_ahead_is_used_for_its_own_input_only(name: str) -> None:
    """What a model does between two layers is not passed over."""
    between, norms = BETWEEN[name]
    stack, kernels = Stack(between).eval(), Kernels()
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        expected = stack(x)
        with fused(Fusion(stack, kernels)):
            got = stack(x)
    assert torch.equal(got, expected)
    assert kernels.calls["rms_norm"] == norms


def test_a_stack_without_a_norm_of_its_own_is_not_chained() -> None:
    stack, kernels = _with(Stack(lambda x: x), norm=nn.LayerNorm(WIDTH)).eval(), Kernels()
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        expected = stack(x)
        with fused(Fusion(stack, kernels)):
            assert torch.equal(stack(x), expected)
    assert dict(kernels.calls) == {"rms_norm": 2, "add_rms_norm": 2, "silu": 2}


# ---- rotary embeddings


def _rotary_inputs(dtype: torch.dtype = torch.float32, axes: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tables = [torch.randn(2, 5, 8).to(dtype) for _ in range(2)]
    return [torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), *(x if axes == 3 else x[0] for x in tables)]


def test_turned_when_somebody_looks() -> None:
    """Query and key wait for the layer that stores them; whoever computes with them gets them turned, both by one launch."""
    model, kernels = make("llama"), Kernels()
    place = sys.modules[type(model).__module__]
    inputs = _rotary_inputs()
    expected = getattr(place, ROTARY)(*inputs)
    with fused(Fusion(model, kernels)):
        query, key = getattr(place, ROTARY)(*inputs)
        assert isinstance(query, LazyRotated)
        assert (query.shape, key.shape, kernels.calls["rotary"]) == (inputs[0].shape, inputs[1].shape, 0)
        assert torch.equal(key + 0, expected[1])
        assert torch.equal(query + 0, expected[0])
    assert kernels.calls["rotary"] == 1


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (_rotary_inputs(dtype=torch.float64), {}),
        (_rotary_inputs(axes=2), {}),
        ([x.transpose(1, 2) if x.ndim == 4 else x for x in _rotary_inputs()], {"unsqueeze_dim": 2}),
    ],
    ids=["two dtypes", "one table for all rows", "tokens before heads"],
)
def test_rotary_calls_that_the_kernel_does_not_know(inputs: list[torch.Tensor], options: dict[str, int]) -> None:
    """They get the stock function, at once."""
    model, kernels = make("llama"), Kernels()
    place = sys.modules[type(model).__module__]
    if inputs[2].ndim == 2:
        options = {"unsqueeze_dim": 0}
    expected = apply_rotary_pos_emb(*inputs, **options)
    with fused(Fusion(model, kernels)):
        got = getattr(place, ROTARY)(*inputs, **options)
    assert all(type(x) is torch.Tensor and torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert kernels.calls.total() == 0


# ---- nobody else notices


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nothing_is_left_after_an_error(name: str) -> None:
    """Whatever breaks: the body, a kernel in the middle of a layer, an interrupt."""
    model, kernels = make(name), Kernels()
    expected, before = run(model), surroundings(model)
    fusion = Fusion(model, kernels)

    def broken(error: BaseException) -> None:
        with fused(fusion):
            assert surroundings(model) != before
            raise error

    for error in (RuntimeError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            broken(error)
        assert surroundings(model) == before

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    kernels.swiglu = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"), fused(fusion):
        run(model)
    assert surroundings(model) == before
    assert torch.equal(run(model), expected)
    with fused(Fusion(model, Kernels())):
        assert torch.equal(run(model), expected)


def test_another_thread_gets_its_own_code(elsewhere: ThreadPoolExecutor) -> None:
    """It calls the same model in the middle of a capture, and no kernel of that capture."""
    model, kernels = make("llama"), Kernels()
    expected = run(model)
    with fused(Fusion(model, kernels)):
        assert torch.equal(elsewhere.submit(run, model).result(60), expected)
        assert kernels.calls.total() == 0
        assert torch.equal(run(model), expected)
    assert kernels.threads == {threading.get_ident()}


def test_one_capture_changes_modules_at_a_time(elsewhere: ThreadPoolExecutor) -> None:
    """A second one waits; both leave the modules as they were."""
    model, mine, theirs = make("llama"), Kernels(), Kernels()
    before, inside = surroundings(model), threading.Event()
    first, second = Fusion(model, mine), Fusion(model, theirs)

    def capture() -> torch.Tensor:
        with fused(second):
            inside.set()
            return run(model)

    with fused(first):
        waiting = elsewhere.submit(capture)
        assert not inside.wait(0.2)
        expected = run(model)
        assert theirs.calls.total() == 0
    assert torch.equal(waiting.result(60), expected)
    assert mine.calls == theirs.calls
    assert not theirs.threads & mine.threads
    assert surroundings(model) == before


def test_a_fusion_that_is_made_during_a_capture_knows_the_same(elsewhere: ThreadPoolExecutor) -> None:
    """Meanwhile functions of the module files are replaced; that is not what they are compared with."""
    rotates_like_llama.cache_clear()
    model, kernels = make("llama"), Kernels()
    with fused(Fusion(model, kernels)):
        other = elsewhere.submit(Fusion, make("mistral"), Kernels()).result(60)
    assert other.rotaries == {"transformers.models.mistral.modeling_mistral"}


OWN = {
    "the first norm": lambda model: model.model.layers[0].input_layernorm,
    "a norm inside a layer": lambda model: model.model.layers[0].post_attention_layernorm,
    "a norm after a layer": lambda model: model.model.layers[1].input_layernorm,
    "the last norm": lambda model: model.model.norm,
    "a feed-forward layer": lambda model: model.model.layers[1].mlp,
    "an activation": lambda model: model.model.layers[1].mlp.act_fn,
    "a projection": lambda model: model.model.layers[1].mlp.gate_proj,
    "a layer": lambda model: model.model.layers[0],
}


@pytest.mark.parametrize("name", OWN)
def test_who_brings_a_forward_of_his_own_keeps_it(name: str) -> None:
    """Offloading, quantizing and patching put a `forward` on the module itself: it is called, and it is there afterwards."""
    model, kernels = make("llama"), Kernels()
    module = OWN[name](model)
    stock = run(model)
    calls = []

    def own(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        answer: torch.Tensor = 1.5 * type(module).forward(module, *args, **kwargs)
        return answer

    module.forward = own
    expected = run(model)
    assert (len(calls), torch.equal(expected, stock)) == (1, False)
    with fused(Fusion(model, kernels)):
        assert torch.equal(run(model), expected)
    assert len(calls) == 2
    assert module.__dict__["forward"] is own
    assert kernels.calls["rotary"] == 2, "the others are fused"
