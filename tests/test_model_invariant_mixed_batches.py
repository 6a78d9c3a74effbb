"""peft's batches of several adapters in batch_invariant()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import lora
from invariance import adapted, model_of

import hf_paged_native
from hf_paged import batch_invariant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and hf_paged_native.compiler() is None, reason="batch_invariant needs a C++ compiler"
)

NAMES = ["thin", "__base__", "wide", "native", "thin"]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def made(dtype: torch.dtype = torch.bfloat16) -> Any:
    return adapted(model_of("llama", dtype).to(DEVICE))


def prompts() -> torch.Tensor:
    return torch.randint(5, 60, (len(NAMES), 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def choose(model: Any, name: str) -> None:
    """Let an adapter be active, or none."""
    if name == "__base__":
        model.base_model.disable_adapter_layers()
    else:
        model.base_model.enable_adapter_layers()
        model.set_adapter(name)


@HALVES
def test_rows_have_the_bits_of_their_own_adapter(dtype: torch.dtype) -> None:
    """C44: adapters in float32 beside one in the model's type and the base, with the gradients' forward too."""
    model = made(dtype)
    ids = prompts()
    for grad in (False, True):
        with batch_invariant(), torch.set_grad_enabled(grad):
            mixed = model(ids, adapter_names=NAMES).logits
            for row, name in enumerate(NAMES):
                choose(model, name)
                assert torch.equal(model(ids[row : row + 1]).logits[0], mixed[row]), name
            model.base_model.enable_adapter_layers()


@HALVES
@pytest.mark.parametrize("word", ["paged", None])
def test_generate(word: str | None, dtype: torch.dtype) -> None:
    """C44: rows that choose by adapter_names, and each with its adapter active, paged and in stock's cache."""
    model = made(dtype)
    ids = prompts()
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 5,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    options |= {"return_dict_in_generate": True, "output_logits": True}
    options |= {} if word is None else {"cache_implementation": word}

    def logits(rows: torch.Tensor, **more: Any) -> torch.Tensor:
        with batch_invariant():
            found = model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), **options, **more)
        return torch.stack(found.logits, 1)

    mixed = logits(ids, adapter_names=NAMES)
    for row, name in enumerate(NAMES):
        choose(model, name)
        assert torch.equal(logits(ids[row : row + 1])[0], mixed[row]), name


def test_an_alora_beside_others() -> None:
    """C44: what is more than a low-rank product is computed as peft does, and rows beside it as ever."""
    model = made()
    config = lora(r=4, target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    model.add_adapter("late", config)
    model.eval()
    ids = prompts()
    ids[:, 4:6] = torch.tensor([7, 8], device=DEVICE)
    names = ["late", "wide", "__base__", "late"]
    with batch_invariant(), torch.no_grad():
        mixed = model(ids[:4], adapter_names=names).logits
        for row, name in enumerate(names):
            choose(model, name)
            assert torch.equal(model(ids[row : row + 1]).logits[0], mixed[row]), name


def test_outside_of_the_mode_it_is_pefts_own() -> None:
    """1 + 1/64 and 4 + 1/64 are 5 + 1/32, but 5 where peft rounds what is added to 4 before."""
    layer: Any = made().base_model.model.model.layers[0].self_attn.q_proj
    x = torch.zeros(2, 1, layer.in_features, dtype=torch.bfloat16, device=DEVICE)
    x[..., 0] = 1
    for weight in (layer.base_layer.weight, layer.lora_A["thin"].weight, layer.lora_B["thin"].weight):
        torch.nn.init.zeros_(weight)
    with torch.no_grad():
        layer.base_layer.weight[:, 0] = 1 + 1 / 64
        layer.lora_A["thin"].weight[0, 0] = 1
        layer.lora_B["thin"].weight[:, 0] = (4 + 1 / 64) / layer.scaling["thin"]

        def found() -> list[float]:
            answer: torch.Tensor = layer(x, adapter_names=["thin", "__base__"])
            return answer[:, 0, 3].tolist()

        with batch_invariant():
            assert found() == [5 + 1 / 32, 1 + 1 / 64]
        assert found() == [5, 1 + 1 / 64]
