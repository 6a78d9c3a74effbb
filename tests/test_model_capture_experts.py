"""Mixtures of experts in captured steps: the modules' own numbers, from products that the host does not part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME
from families import build as family
from fused_models import Kernels, captured_steps, replaced
from kernel_cases import load
from tiny import build, config_class
from torch import nn

from hf_paged import FallbackWarning
from hf_paged.model.capture.experts import OTHERS, is_mixture
from hf_paged.model.capture.fusion import Fusion, fused

IDS = torch.tensor([[5, 9, 13, 7, 30, 31, 5, 44, 60]])


def model_of(name: str) -> Any:
    kind = "image" if name == "muse_spark" else "causal"
    return family(BY_NAME[name]) if name in BY_NAME else build(kind, config_class(kind, name))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS, use_cache=False).logits
    return found


# Gates as most have them; none; weights the other way round with biases and interleaved gates; a norm behind.
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "nemotron_h", "muse_spark"])
def test_a_mixture_computes_its_own_numbers(name: str) -> None:
    """By the kernels themselves."""
    model = model_of(name)
    mixtures = [module for module in model.modules() if is_mixture(module)]
    assert mixtures
    expected = logits(model)
    fusion = Fusion(model, load())
    with fused(fusion):
        got = logits(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    assert set(fusion.gates) == set(mixtures)
    assert torch.equal(logits(model), expected)  # outside, nothing has changed


@pytest.mark.parametrize("implementation", OTHERS[:3])
def test_whatever_stock_would_have_taken(implementation: str) -> None:
    model = model_of("mixtral")
    model.set_experts_implementation(implementation)
    kernels = Kernels()
    expected = logits(model)
    with fused(Fusion(model, kernels)):
        got = logits(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    assert kernels.calls["route"] == model.config.num_hidden_layers
    assert kernels.calls["expert_product"] == 2 * model.config.num_hidden_layers


def test_an_implementation_that_the_user_chose_stays() -> None:
    model = model_of("mixtral")
    kernels = Kernels()
    fusion = Fusion(model, kernels)
    called = []

    def own(mixture: nn.Module, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        called.append(mixture)
        return torch.zeros_like(x)

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS["of_the_user"] = own
    try:
        model.config._experts_implementation = "of_the_user"
        with fused(fusion):
            logits(model)
    finally:
        del ALL_EXPERTS_FUNCTIONS["of_the_user"]
    assert len(called) == model.config.num_hidden_layers
    assert not kernels.calls["route"]


def test_weights_that_kernels_cannot_read_stay_with_the_model() -> None:
    """Other types, and weights that are computed when they are asked for."""
    model = model_of("mixtral")
    mixture = next(module for module in model.modules() if is_mixture(module))
    nn.utils.parametrize.register_parametrization(mixture, "down_proj", nn.Identity())
    assert not is_mixture(mixture)
    assert is_mixture(next(module for module in model.modules() if is_mixture(module)))
    assert not any(map(is_mixture, model.double().modules()))


@pytest.mark.parametrize("other", [torch.bfloat16, "meta"], ids=str)
def test_experts_of_several_types_or_devices_stay_with_the_model(other: Any) -> None:
    model = model_of("mixtral")
    mixture: Any = next(module for module in model.modules() if is_mixture(module))
    mixture.down_proj = nn.Parameter(mixture.down_proj.detach().to(other))
    assert not is_mixture(mixture)
    assert replaced(Fusion(model, Kernels()))["of_experts"] == model.config.num_hidden_layers - 1


def test_rows_that_choose_all_experts() -> None:
    """By the kernels themselves."""
    model = model_of("mixtral")
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = model.config.num_local_experts
    expected = logits(model)
    with fused(Fusion(model, load())):
        got = logits(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_noise_of_routers_in_training_mode_is_named() -> None:
    """Stock draws it, call by call, and no step is captured."""
    model = model_of("mixtral").train()
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.1
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    torch.manual_seed(0)
    stock = model.generate(IDS, **options)
    torch.manual_seed(0)
    with captured_steps(Kernels()), pytest.warns(FallbackWarning, match="jitter_noise=0.1; set that to zero"):
        assert torch.equal(model.generate(IDS, **options, cache_implementation="paged"), stock)


def test_hooked_mixtures_and_other_classes_are_left() -> None:
    model = model_of("mixtral")
    mixture: Any = next(module for module in model.modules() if is_mixture(module))
    mixture.forward = lambda *given: given[0]
    kept = replaced(Fusion(model, Kernels()))
    assert kept["of_experts"] == model.config.num_hidden_layers - 1
    assert not is_mixture(nn.Linear(2, 2))


def test_kernels_are_compiled_before_a_step_needs_them() -> None:
    """One call for each kernel of a mixture."""
    model = model_of("gpt-oss")
    fusion = Fusion(model, Kernels())
    names = [call.func.__name__ for call in fusion.calls(4, torch.float32)]  # type: ignore[attr-defined]
    assert {"top", "route", "expert_sum"} <= set(names)
    assert names.count("expert_product") == 2
