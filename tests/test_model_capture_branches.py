"""Linear layers with one input: which they are, and that each answers what it answers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from families import BY_NAME, VOCABULARY, build
from fused_models import CONFIG, Kernels, surroundings
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention
from transformers.models.whisper.modeling_whisper import WhisperAttention

from hf_paged.model.capture import fusion as fusing
from hf_paged.model.capture.branches import Product, at_once, given_alike, products_of
from hf_paged.model.capture.fusion import Fusion, fused


class Parent(nn.Module):
    """Two layers of one input, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 4)
        self.last = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.two(x) * self.one(x)[..., :4])


class Reassigned(Parent):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.one(x)
        x = self.two(x)
        return self.last(x)


def test_which_are_given_one_input() -> None:
    """By the code of their parent's forward, in the order of its calls."""
    assert given_alike(Parent.forward) == [["two", "one"]]
    assert given_alike(Reassigned.forward) == []
    assert given_alike(DeepseekV3Attention.forward) == [["q_proj", "q_a_proj", "kv_a_proj_with_mqa"]]
    assert given_alike(MllamaTextCrossAttention.forward) == [["k_proj", "v_proj"]]
    assert given_alike(WhisperAttention.forward) == []
    assert given_alike(len) == []


def test_whose_product_may_be_anywhere() -> None:
    """Linear layers as they are: what a user has set on one, and other kinds of layers, stay where they are."""
    parent = Parent()
    assert [list(each) for each in products_of(parent)] == [[parent.two, parent.one]]
    assert products_of(Reassigned()) == []
    parent.one.forward = lambda x: x  # type: ignore[method-assign]
    assert products_of(parent) == []
    parent = Parent()
    parent.two = nn.Bilinear(8, 8, 4)  # type: ignore[assignment]
    assert products_of(parent) == []
    parent = Parent()
    parent.two = nn.Linear(6, 4)
    assert products_of(parent) == []
    parent = Parent()
    parent.forward = lambda x: x  # type: ignore[method-assign]
    assert products_of(parent) == []


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Products are computed together, as in a capture of few rows: how many each time."""
    counts: list[int] = []

    def beside(x: torch.Tensor, products: Sequence[Product]) -> list[torch.Tensor]:
        counts.append(len(products))
        return [product(x) for product in products]

    monkeypatch.setattr(fusing, "at_once", lambda x: True)
    monkeypatch.setattr(fusing, "beside", beside)
    return counts


TOGETHER = {
    "llama": [3, 2, 3, 2],
    "qwen3": [3, 2, 3, 2],
    "gemma2": [3, 2, 3, 2],
    "gpt-oss": [3, 3],
    "phi3": [],
    "gpt2": [],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_model_answers_the_same(name: str, together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is computed once, with the others of its input, and nothing is left."""
    counts: Counter[nn.Module] = Counter()
    linear = nn.Linear.forward

    def counted(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        counts[module] += 1
        return linear(module, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    model = build(BY_NAME[name])
    ids = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(4))
    before = surroundings(model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        alone = counts.copy()
        fusion = Fusion(model, Kernels())
        with fused(fusion):
            found = model(ids, use_cache=False).logits
    near = 1e-5 if fusion.gates else 0.0  # products of experts are others than the model's
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    assert counts == alone + alone
    assert together == TOGETHER[name]
    assert surroundings(model) == before


@pytest.fixture
def attention() -> Any:
    """Llama's, which gives one input to three layers."""
    return tf.LlamaForCausalLM(CONFIG).eval().model.layers[0].self_attn


def test_another_input_is_no_other_layers(attention: Any, together: list[int]) -> None:
    x = torch.randn(2, 3, CONFIG.hidden_size)
    with torch.no_grad():
        expected = attention.k_proj(2 * x), attention.v_proj(x)
        with fused(Fusion(attention, Kernels())):
            attention.q_proj(x)
            assert torch.equal(attention.k_proj(2 * x), expected[0])
            assert torch.equal(attention.v_proj(x), expected[1])
    assert together == [3, 3, 3]


def test_an_input_that_was_written_to_is_read_again(attention: Any, together: list[int]) -> None:
    x = torch.randn(2, 3, CONFIG.hidden_size)
    with torch.no_grad():
        expected = attention.v_proj(2 * x)
        with fused(Fusion(attention, Kernels())):
            attention.q_proj(x)
            attention.k_proj(x)
            x.mul_(2)
            assert torch.equal(attention.v_proj(x), expected)
    assert together == [3, 3]


def test_layers_that_a_lora_wraps(together: list[int]) -> None:
    """Their own products go together; what the adapter adds is computed as before."""
    model = tf.LlamaForCausalLM(CONFIG).eval()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    ids = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = wrapped(ids, use_cache=False).logits
        with fused(Fusion(wrapped, Kernels())):
            assert torch.equal(wrapped(ids, use_cache=False).logits, expected)
    assert together == [3, 2, 3, 2]


def test_outside_of_a_capture_each_is_computed_when_it_is_asked_for() -> None:
    assert not at_once(torch.zeros(1, 8))
