"""Fused small operations: whose code is replaced, what is called instead, and that nobody else notices."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import kernel_cases
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from families import BY_NAME, LONG, SMALL, TOKENS, VOCABULARY, build
from fused_models import CONFIG, WIDTH, Kernels, replaced, surroundings
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from hf_paged.model.capture import fusion as fusion_of_models
from hf_paged.model.capture.chains import computed
from hf_paged.model.capture.fusion import ROTARY, Fusion, fused, rotates_like_llama
from hf_paged.model.lazy import LazyRotated


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """Another thread, where work can be done meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A family's model with norms that do something."""
    if name == "gemma":
        torch.manual_seed(0)
        model = tf.GemmaForCausalLM(
            tf.GemmaConfig(num_key_value_heads=2, head_dim=8, **SMALL, **TOKENS, **LONG)
        ).eval()
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


EXPECTED: dict[str, tuple[dict[str, int], bool, dict[str, int]]] = {
    "llama": (
        {"norm": 5, "feed_forward": 2, "layer": 2, "product": 10},
        True,
        {"rms_norm": 1, "add_rms_norm": 4, "silu": 2, "rotary": 2},
    ),
    "mistral": (
        {"norm": 5, "feed_forward": 2, "layer": 2, "product": 10},
        True,
        {"rms_norm": 1, "add_rms_norm": 4, "silu": 2, "rotary": 2},
    ),
    "qwen3": (
        {"norm": 9, "feed_forward": 2, "layer": 2, "product": 10},
        True,
        {"rms_norm": 5, "add_rms_norm": 4, "silu": 2, "rotary": 2},
    ),
    "gemma": (
        {"norm": 5, "feed_forward": 2, "layer": 2, "product": 10},
        True,
        {"rms_norm": 1, "add_rms_norm": 4, "gelu_tanh": 2, "rotary": 2},
    ),
    "gemma2": (
        {"norm": 9, "feed_forward": 2, "product": 10},
        True,
        {"rms_norm": 9, "gelu_tanh": 2, "rotary": 2},
    ),
    "gemma3": (
        {"norm": 13, "feed_forward": 2, "product": 10},
        True,
        {"rms_norm": 13, "gelu_tanh": 2, "rotary": 2},
    ),
    "phi3": ({"norm": 5}, False, {"rms_norm": 5}),
    "gpt2": ({}, False, {}),
}
"""For each family: what is replaced, whether its rotary embedding is Llama's, and how often each kernel runs
in a forward.
"""


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_replaced(name: str) -> None:
    """Known by their code: another file's norm is Llama's or Gemma's, phi3's layers (with dropouts) and its
    rotary are not.
    """
    model = make(name)
    fusion = Fusion(model, Kernels())
    modules, rotary, _ = EXPECTED[name]
    assert replaced(fusion) == modules
    assert fusion.rotaries == ({type(model).__module__} if rotary else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPECTED)
def test_same_numbers_in_fewer_launches(name: str, dtype: torch.dtype) -> None:
    """Bit by bit: the fused modules round where the modules' own code does. Sums and norms run together, one
    launch each.
    """
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


def test_under_inference_mode() -> None:
    """Where torch does not count how often a tensor was written."""
    model, kernels = make("llama"), Kernels()
    expected, fusion = run(model), Fusion(model, kernels)
    with torch.inference_mode(), fused(fusion):
        assert torch.equal(run(model), expected)
    assert kernels.calls.pop("chain", 0) <= 1  # of positions
    assert dict(kernels.calls) == EXPECTED["llama"][2]


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
    "another tensor": (lambda x: x[:] * 2, 1),  # two norms are in the chains of what they read
    "a part of it": (lambda x: x[:, -1:], 3),
    "in place": (lambda x: x.add_(1), 3),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_norm_made_ahead_is_used_for_its_own_input_only(name: str) -> None:
    """Hooks and wrappers between two layers are not passed over."""
    between, norms = BETWEEN[name]
    stack, kernels = Stack(between).eval(), Kernels()
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        expected = stack(x)
        with fused(Fusion(stack, kernels)):
            got = stack(x)
    assert torch.equal(got, expected)
    assert kernels.calls["rms_norm"] == norms


def test_another_norm_of_the_same_input_is_not_the_one_made_ahead() -> None:
    side = LlamaRMSNorm(WIDTH, eps=0.5)
    seen: list[torch.Tensor] = []
    stack = Stack(lambda x: (seen.append(side(x)), x)[1]).eval()
    stack.side = side
    with torch.no_grad():
        stack(torch.ones(2, 3, WIDTH))
        with fused(Fusion(stack, Kernels())):
            stack(torch.ones(2, 3, WIDTH))
    assert [torch.equal(x, y) for x, y in zip(seen[:2], seen[2:], strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("norm", {"rms_norm": 1, "add_rms_norm": 2, "silu": 2}),
        ("layer", {"rms_norm": 1, "add_rms_norm": 3, "silu": 2}),
    ],
)
def test_a_norm_that_no_kernel_knows_is_not_made_ahead(where: str, calls: dict[str, int]) -> None:
    """Behind the last layer, or at the beginning of the second."""
    stack, kernels = Stack(lambda x: x).eval(), Kernels()
    if where == "norm":
        stack.norm = nn.LayerNorm(WIDTH)
    else:
        stack.layers[1].input_layernorm = nn.LayerNorm(WIDTH)
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        expected = stack(x)
        with fused(Fusion(stack, kernels)):
            assert torch.equal(computed(stack(x)), expected)
    kernels.calls.pop("chain", None)
    assert dict(kernels.calls) == calls


# ---- rotary embeddings


def _rotary_inputs(tokens: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, *shape, 8, generator=generator)
        for shape in ((4, tokens), (2, tokens), (tokens,), (tokens,))
    ]


def test_turned_when_read() -> None:
    """Query and key wait for the layer that stores them; whoever computes with them gets them turned, both by
    one launch.
    """
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


UNKNOWN: dict[str, tuple[Callable[..., list[torch.Tensor]], dict[str, int]]] = {
    "two dtypes": (lambda q, k, cos, sin: [q, k, cos.double(), sin.double()], {}),
    "keys of another dtype": (lambda q, k, cos, sin: [q, k.double(), cos, sin], {}),
    "one table for all rows": (lambda q, k, cos, sin: [q, k, cos[0], sin[0]], {}),
    "a table for every head": (lambda q, k, cos, sin: [q, k, cos[:, None], sin[:, None]], {}),
    "tokens before heads": (
        lambda q, k, cos, sin: [q.transpose(1, 2), k.transpose(1, 2), cos, sin],
        {"unsqueeze_dim": 2},
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_rotary_calls_that_the_kernel_does_not_know(name: str) -> None:
    """They get the stock function, at once."""
    arrange, options = UNKNOWN[name]
    inputs = arrange(*_rotary_inputs(1))
    model, kernels = make("llama"), Kernels()
    expected = apply_rotary_pos_emb(*inputs, **options)
    with fused(Fusion(model, kernels)):
        got = getattr(sys.modules[type(model).__module__], ROTARY)(*inputs, **options)
    assert all(type(x) is torch.Tensor and torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert kernels.calls.total() == 0


# ---- nobody else notices


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nothing_is_left_after_an_error(name: str) -> None:
    """The body breaks, or a kernel in the middle of a layer, or an interrupt comes."""
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
    """Offloading, quantizing and patching put a `forward` on the module itself: it is called, and it is there
    afterwards.
    """
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


@pytest.mark.parametrize(("ranks", "shots"), [(1, []), (2, [1]), (3, []), (4, [1, 2])])
def test_kernels_of_sums_are_compiled_for_few_rows_and_many(
    monkeypatch: pytest.MonkeyPatch, ranks: int, shots: list[int]
) -> None:
    """For whichever numbers of rows the other kernels are compiled, and with arguments that they take."""
    kernels = kernel_cases.load()
    group = dist.HashStore()  # stands for one
    mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: ranks - 1, get_group=lambda: group)
    monkeypatch.setattr(fusion_of_models, "mesh_of", lambda model: mesh if ranks > 1 else None)
    asked: list[int] = []

    def counted(*given: Any, **options: Any) -> Any:
        asked.append(options["shots"])
        return summed(*given, **options)

    summed = kernels.reduce_add_rms_norm
    monkeypatch.setattr(kernels, "reduce_add_rms_norm", counted)
    fusion = Fusion(make("llama", torch.bfloat16), kernels)
    for rows in (1, 64, 4096):
        asked.clear()
        for call in fusion.calls(rows, torch.bfloat16):
            call()
        assert asked == shots
