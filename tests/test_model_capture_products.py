"""Weights side by side: which ones move, that nothing else about them does, and one operation in a traced
layer.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from accelerate import Accelerator
from families import BY_NAME, VOCABULARY, build
from fused_models import Kernels
from safetensors.torch import load_file, save_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_paged.model.capture.fusion import Fusion, fused
from hf_paged.model.capture.products import fused_parameters, join_products, joined_of, lay_side_by_side

IDS = torch.randint(5, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(3))


def weights(*layers: nn.Linear) -> list[nn.Parameter]:
    return [layer.weight for layer in layers]


@pytest.mark.parametrize(
    ("name", "moved"),
    [("llama", 10), ("qwen2", 16), ("qwen3", 10), ("gemma3", 10), ("gpt-neox", 0), ("gpt2", 0)],
)
def test_the_same_parameters_elsewhere(name: str, moved: int) -> None:
    """q, k, v and gate, up of two layers, with their biases; twice is once. Names, values, strides, gradients
    and hooks stay.
    """
    model = build(BY_NAME[name])
    right, before = model(IDS, use_cache=False).logits, copy.deepcopy(model.state_dict())
    known = {
        name: (id(parameter), parameter.stride(), parameter._version)
        for name, parameter in model.named_parameters()
    }
    assert lay_side_by_side(model) == moved
    assert lay_side_by_side(model) == 0
    assert {name: (id(p), p.stride(), p._version) for name, p in model.named_parameters()} == known
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not [module for module in model.modules() if module._forward_pre_hooks]
    assert torch.equal(model(IDS, use_cache=False).logits, right)
    if name == "qwen2":
        attention = model.model.layers[1].self_attn
        several = [attention.q_proj, attention.k_proj, attention.v_proj]
        joined, bias = joined_of(weights(*several)), joined_of([layer.bias for layer in several])
        assert joined is not None
        assert bias is not None
        assert torch.equal(joined, torch.cat(weights(*several)))
        assert torch.equal(bias, torch.cat([layer.bias for layer in several]))


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_what_lies_side_by_side_already_stays(kind: str) -> None:
    """By chance, as memory was free: what belongs to it moves all the same."""
    model = build(BY_NAME["qwen2"])
    lay_side_by_side(model)
    attention = model.model.layers[1].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    for layer in layers:
        parameter = getattr(layer, kind)
        parameter.data = parameter.data.clone()
    assert fused_parameters(layers) is None
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert lay_side_by_side(model) == 3
    assert fused_parameters(layers) is not None
    assert sum(p.data_ptr() != place for p, place in zip(model.parameters(), places, strict=True)) == 3


def test_shared_weights_stay(llama: Any) -> None:
    """Tied ones, parts of somebody's larger tensor, other types of layers and of parameters."""

    class Own(nn.Linear):
        pass

    first, second = llama.model.layers
    first.self_attn.k_proj.weight = first.self_attn.v_proj.weight
    second.self_attn.q_proj.weight.data = torch.randn(2, 32, 32)[1]
    first.mlp.gate_proj.__class__ = Own
    second.mlp.up_proj.weight.data = second.mlp.up_proj.weight.data.double()
    second.mlp.gate_proj.weight.data = second.mlp.gate_proj.weight.data.T.contiguous().T
    places = [parameter.data_ptr() for parameter in llama.parameters()]
    assert lay_side_by_side(llama) == 0
    assert places == [parameter.data_ptr() for parameter in llama.parameters()]


def test_parts_that_fsdp_keeps_views_of_stay(llama: Any) -> None:
    """It gathers the weights of a forward from views, which training would no longer reach."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layer in llama.model.layers:
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        places = [parameter.to_local().data_ptr() for parameter in llama.model.layers.parameters()]
        assert lay_side_by_side(llama) == 0
        assert places == [parameter.to_local().data_ptr() for parameter in llama.model.layers.parameters()]
    finally:
        dist.destroy_process_group()


def test_weights_made_in_inference_mode_stay() -> None:
    """Torch computes outside of that mode with those that it made there, not with others in their place."""
    with torch.inference_mode():
        model = build(BY_NAME["llama"])
    with torch.no_grad():
        right = model(IDS, use_cache=False).logits
        assert lay_side_by_side(model) == 0
        assert torch.equal(model(IDS, use_cache=False).logits, right)


def test_saved_copied_and_trained(llama: Any, tmp_path: Any) -> None:
    right = llama(IDS, use_cache=False).logits
    lay_side_by_side(llama)
    llama.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS, use_cache=False).logits, right)
    other = copy.deepcopy(llama)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=0.1)
    llama(IDS, labels=IDS).loss.backward()
    optimizer.step()
    attention = llama.model.layers[0].self_attn
    joined = joined_of(weights(attention.q_proj, attention.k_proj, attention.v_proj))
    assert joined is not None
    assert torch.equal(joined[:32], attention.q_proj.weight)
    assert not torch.equal(llama(IDS, use_cache=False).logits, right)
    assert torch.equal(other(IDS, use_cache=False).logits, right)
    llama.double()  # moves every one by itself
    assert joined_of(weights(attention.q_proj, attention.k_proj, attention.v_proj)) is None


def test_saved_by_others(llama: Any, tmp_path: Any) -> None:
    """Who writes each storage once, as accelerate does, writes every weight, and one alone is as large as it
    is.
    """
    right = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    assert lay_side_by_side(llama)
    Accelerator().save_model(llama, tmp_path)
    save_model(llama, tmp_path / "model")
    for file in ("model.safetensors", "model"):
        saved = load_file(tmp_path / file)
        assert saved.keys() == right.keys()
        assert all(torch.equal(tensor, right[name]) for name, tensor in saved.items())
    weight = llama.model.layers[0].self_attn.q_proj.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes
    torch.save(weight, tmp_path / "weight")
    assert torch.equal(torch.load(tmp_path / "weight"), weight)


def test_the_memory_lives_as_long_as_any_of_them(llama: Any) -> None:
    lay_side_by_side(llama)
    attention = llama.model.layers[0].self_attn
    value, right = attention.v_proj.weight.data, attention.v_proj.weight.detach().clone()
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        layer.weight.data = torch.zeros_like(layer.weight)
    gc.collect()
    assert torch.equal(value, right)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "gpt-oss"])
def test_one_product_of_a_fused_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input is multiplied once where a capture replaces layers, and answers are as before."""
    model = build(BY_NAME[name])
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        assert lay_side_by_side(model)
        fusion = Fusion(model, Kernels())
        several = [layer for layer in fusion.forwards if type(layer) is nn.Linear]
        assert several
        alone: list[nn.Module] = []
        linear = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (alone.append(self), linear(self, x))[1])
        with fused(fusion):
            found = model(IDS, use_cache=False).logits
    assert not set(alone) & set(several)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_one_operation(biased: bool, together: bool) -> None:
    """The products of one input come from one call, wherever their weights lie; others stay as they are."""
    torch.manual_seed(0)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, n, bias=biased) for n in (4, 3, 5))
            self.d = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.a(x), self.b(x).relu(), self.c(x) + 1, self.d(self.a(x)), x @ self.b.weight.T

    model, graphs = Layers(), []

    def backend(graph: Any, inputs: Any) -> Any:
        join_products(graph)
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 7, 6)
    with torch.no_grad():
        right = model(x)
        if together:
            assert lay_side_by_side(model) == 3 * (1 + biased)
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, right, strict=True))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count("hf_paged.products.default") == 2
    assert not any("linear" in name for name in called)


def test_the_operation_as_torch_checks_it() -> None:
    x, several = torch.randn(3, 6), [torch.randn(4, 6), torch.randn(2, 6)]
    torch.library.opcheck(torch.ops.hf_paged.products.default, (x, several, []))
    torch.library.opcheck(torch.ops.hf_paged.products.default, (x, several, [torch.randn(4), torch.randn(2)]))
