"""The table of adapters by slot: it follows what lies elsewhere, and keeps the memory that kernels read."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from adapter_tables import kernels, snapshot, table_of
from adapters import adapted, lora
from kernel_cases import DEVICE
from tape import rerun
from torch.multiprocessing.reductions import StorageWeakRef

from hf_paged.model.adapters import (
    Adapter,
    AdapterBatch,
    applied,
)
from hf_paged.model.capture.replay import captures_of
from hf_paged.model.rehearsal import RECORDERS


def test_a_table_follows_what_lies_elsewhere() -> None:
    """Weights that kernels cannot read in place are copied, others are read where they are."""
    model = adapted(lora(r=8), lora(r=3)).to(DEVICE)
    table, layers = table_of(model, ["one", "two"], True)
    assert not table.has_copies(0)
    assert table.has_copies(1)
    assert table.bytes > 0
    layout = table.layout
    table.put(2, Adapter({}))
    assert table.layout == layout
    wide = snapshot(adapted(lora(r=40)).to(DEVICE)).lora.read("one")
    table.put(2, wide)
    assert table.layout != layout
    table.clear(0)
    x = torch.randn(3, 4, layers[0].in_features, device=DEVICE)
    with torch.no_grad(), applied(layers, AdapterBatch(table, [0, 1, -1])):
        found = layers[0](x)
    expected = layers[0](x, adapter_names=["__base__", "two", "__base__"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_memory_that_kernels_read_stays() -> None:
    """A parameter is given other memory: until the table is made anew, kernels read the old."""
    model = adapted(lora(r=8)).to(DEVICE)
    table, layers = table_of(model, ["one"], True)
    weight = layers[0].lora_A["one"].weight
    memory = StorageWeakRef(weight.untyped_storage())
    weight.data = torch.zeros_like(weight)
    assert not memory.expired()
    table.clear(0)
    assert memory.expired()


def test_a_model_whose_adapters_kernels_add_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.kv.ops._why_not_here", lambda device, dtype: None)
    monkeypatch.setitem(sys.modules, "hf_paged_kernels", kernels)
    monkeypatch.setitem(RECORDERS, DEVICE, rerun)
    model = adapted(lora()).to(DEVICE)
    ids = torch.tensor([[5, 6, 7]], device=DEVICE)
    options = {"cache_implementation": "paged", "cache_config": {"graphs": False}}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **options)
    assert captures_of(model.get_base_model()).adapters.table is not None
    gone = weakref.ref(model.get_base_model())
    del model
    gc.collect()
    assert gone() is None
