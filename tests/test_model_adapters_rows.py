"""The adapter of each row in generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_tables import kernels, snapshot, table_of
from adapters import adapted, lora
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE
from tape import rerun

from hf_paged.model.adapters import (
    AdapterBatch,
    AdapterTable,
    applied,
    combine,
)
from hf_paged.model.rehearsal import RECORDERS


@settings(max_examples=examples(6))
@given(
    rows=st.lists(st.sampled_from(["__base__", "one", "two", "three"]), min_size=1, max_size=5),
    kernel=st.booleans(),
)
def test_rows_have_each_its_own(rows: list[str], kernel: bool) -> None:
    """One forward computes what peft computes by adapter_names: other ranks, scales and targets."""
    model = adapted(lora(), lora(r=3, use_rslora=True), lora(r=24, target_modules=["q_proj", "down_proj"]))
    model.to(DEVICE)
    names = ["one", "two", "three"]
    ids = torch.randint(0, 90, (len(rows), 4), device=DEVICE)
    table, layers = table_of(model, names, kernel)
    slots = [names.index(row) if row in names else -1 for row in rows]
    with torch.no_grad():
        expected = model(input_ids=ids, adapter_names=rows).logits
        for _ in range(2):  # the second forward knows which layers share an input
            with applied(layers, AdapterBatch(table, slots)):
                found = model.get_base_model()(input_ids=ids).logits
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert not kernel or set(rows) == {"__base__"} or max(table.groups.values()) == 3
    assert all("forward" not in layer.__dict__ for layer in layers)


@pytest.mark.parametrize("order", [["one", "two"], ["two", "one"]], ids=str)
def test_several_active_at_once(order: list[str]) -> None:
    """A set of adapters adds what each of them adds: by torch with peft's bits, by kernels up to rounding."""
    model = adapted(lora(), lora(r=4, target_modules=["q_proj"])).to(DEVICE)
    lora_layers = snapshot(model).lora
    both = combine([lora_layers.read(name) for name in order])
    ids = torch.randint(0, 90, (2, 7), device=DEVICE)
    model.base_model.set_adapter(order)
    table = AdapterTable(1, torch.device(DEVICE), kernels)
    table.put(0, both)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with applied(lora_layers.layers, AdapterBatch.of_one(table, both)):
            assert torch.equal(model.get_base_model()(input_ids=ids).logits, expected)
        with applied(lora_layers.layers, AdapterBatch(table, [0, 0])):
            found = model.get_base_model()(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_of_adapters_that_are_active_together(dtype: torch.dtype) -> None:
    """Adapters in float32 and in half precision: each computes in its own type, as in peft's forward."""
    model = adapted(lora(), lora(r=4), lora(r=2)).to(dtype)
    for name, parameter in model.named_parameters():
        if ".one." in name or ".two." in name:
            parameter.data = parameter.data.to(torch.bfloat16 if ".one." in name else torch.float32)
    lora_layers = snapshot(model).lora
    ids = torch.randint(0, 90, (2, 7))
    table = AdapterTable(2, torch.device("cpu"))
    for order in (["one", "two", "three"], ["two", "one"]):
        model.base_model.set_adapter(order)
        table.put(0, combine([lora_layers.read(name) for name in order]))
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            with applied(lora_layers.layers, AdapterBatch(table, [0, 0])):
                assert torch.equal(model.get_base_model()(input_ids=ids).logits, expected)


def test_what_peft_refuses_for_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adapter_names` with DoRA: peft raises, and so does the paged call where kernels could compute it."""
    asked: list[Any] = []

    def package(*arguments: Any) -> Any:
        asked.append(arguments)
        return kernels

    monkeypatch.setattr("hf_paged.model.capture.replay.triton_package", package)
    monkeypatch.setitem(RECORDERS, DEVICE, rerun)
    model = adapted(lora(use_dora=True), lora()).to(DEVICE)
    call = {"input_ids": torch.tensor([[5, 6, 7]], device=DEVICE), "max_new_tokens": 2, "do_sample": False}
    paged = {**call, "cache_implementation": "paged"}
    assert torch.equal(model.generate(**paged), model.generate(**call))
    assert asked
    for each in (call, paged):
        with pytest.raises(ValueError, match="Cannot pass `adapter_names` when DoRA is enabled"):
            model.generate(**each, adapter_names=["one"])
