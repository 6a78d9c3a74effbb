"""A release of peft that computes otherwise: its own modules compute its adapters then."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import prompt, tokens
from adapters import adapted, lora
from other_methods import tiny_llama
from peft.tuners.lora import layer as layers
from peft.tuners.lora import variants

from hf_paged import Engine
from hf_paged.model.peft_probe import Product, why_otherwise

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
DORA = {"use_dora": True}


def doubled(monkeypatch: pytest.MonkeyPatch, owner: Any) -> None:
    """Let peft's forward of a class add twice what it adds."""
    forward = owner.forward

    def twice(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        y = forward(self, x, *args, **kwargs)
        return 2 * y - self.base_layer(x)

    def twice_in_variant(module: Any, active_adapter: str, x: Any, result: Any, **kwargs: Any) -> Any:
        return 2 * forward(module, active_adapter, x, result, **kwargs) - result

    own = twice if issubclass(owner, torch.nn.Module) else staticmethod(twice_in_variant)
    monkeypatch.setattr(owner, "forward", own)


def of_this_peft(model: Any, ids: list[int], adapter: str | None) -> list[int]:
    """The answer of peft as it is now: others are kept by the model's content alone."""
    model.set_adapter(adapter or "one")
    with nullcontext() if adapter else model.disable_adapter():
        out = model.generate(input_ids=torch.tensor([ids]), **GREEDY)
    return list(out[0, len(ids) :].tolist())


@pytest.mark.parametrize(
    ("owner", "otherwise"),
    [
        (layers.Linear, {"one", "two", "three"}),
        (layers.Embedding, {"three"}),
        (variants.DoraLinearVariant, {"two"}),
        (None, set()),
    ],
)
def test_adapters_fall_apart_with_one_line(
    owner: Any, otherwise: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    """In a peft model and beside a plain one: requests have the tokens of this peft."""
    if owner is not None:
        doubled(monkeypatch, owner)
    model = adapted(lora(), lora(**DORA), lora(target_modules=["q_proj", "embed_tokens"]))
    model.save_pretrained(tmp_path)
    caplog.set_level("WARNING", "hf_paged")
    wanted = ["one", "two", "three", None]
    expected = [of_this_peft(model, prompt(i), each) for i, each in enumerate(wanted)]
    for given in (model, tiny_llama()):
        with Engine(given, block_size=4, num_blocks=100) as engine:
            if given is not model:
                for name in filter(None, wanted):
                    engine.add_adapter(name, tmp_path / name)
            found = {name for name, info in engine.adapters().items() if info.computed == "apart"}
            assert found == otherwise
            handles = [engine.submit(prompt(i), **GREEDY, adapter=each) for i, each in enumerate(wanted)]
            assert [tokens(handle) for handle in handles] == expected
            engine.check()
    lines = [each.getMessage() for each in caplog.records if "otherwise" in each.getMessage()]
    assert len(lines) == len(set(lines)) == {layers.Linear: 2}.get(owner, min(len(otherwise), 1))
    assert all(f"peft {peft.__version__} computes" in line for line in lines)


def test_a_product_that_peft_cannot_make_is_left_to_peft() -> None:
    assert "cannot be tried (ValueError" in str(why_otherwise(Product("linear", dora=True, bias=True)))


def test_it_draws_no_random_numbers_and_needs_no_device() -> None:
    why_otherwise(Product("linear"))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.device("meta"):
        forwards = layers.Linear.forward
        try:
            layers.Linear.forward = lambda self, *args, **kwargs: forwards(self, *args, **kwargs)
            assert why_otherwise(Product("linear")) is None
        finally:
            layers.Linear.forward = forwards
    assert torch.equal(torch.rand(2), expected)
