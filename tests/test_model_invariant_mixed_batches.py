"""peft's batches of several adapters in batch_invariant()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import lora
from invariance import adapted, compiles, model_of

from hf_paged import batch_invariant

pytestmark = compiles

NAMES = ["thin", "__base__", "wide", "native", "thin"]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def made(dtype: torch.dtype = torch.bfloat16) -> Any:
    return adapted(model_of("llama", dtype))


def prompts() -> torch.Tensor:
    return torch.randint(5, 60, (len(NAMES), 9), generator=torch.Generator().manual_seed(0))


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
    ids[:, 4:6] = torch.tensor([7, 8])
    names = ["late", "wide", "__base__", "late"]
    with batch_invariant(), torch.no_grad():
        mixed = model(ids[:4], adapter_names=names).logits
        for row, name in enumerate(names):
            choose(model, name)
            assert torch.equal(model(ids[row : row + 1]).logits[0], mixed[row]), name


def test_outside_of_the_mode_it_is_pefts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import LoraLayer

    model = made()
    ids = prompts()
    with batch_invariant():
        torch.ones(1).add(1)  # here peft's forward is replaced
    with torch.no_grad():
        found = model(ids, adapter_names=NAMES).logits
        monkeypatch.setattr(LoraLayer, "_mixed_batch_forward", LoraLayer._mixed_batch_forward.__wrapped__)
        assert torch.equal(found, model(ids, adapter_names=NAMES).logits)
