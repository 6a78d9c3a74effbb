"""LoRA adapters: apart from the model, and each token's own in one forward."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from adapters import adapted, lora
from captures import counts, policy, reasons
from families import BY_NAME, build
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, load
from tape import record, rerun
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GenerationMixin
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import hf_paged
from hf_paged.model.adapters import (
    Adapter,
    AdapterBatch,
    AdapterTable,
    Inapplicable,
    LowRank,
    applied,
    combine,
)
from hf_paged.model.adapters.identity import AdapterStates
from hf_paged.model.adapters.joint import note_places, runs_of
from hf_paged.model.capture.replay import captures_of
from hf_paged.model.identity import identity_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.snapshot import ModelSnapshot

kernels = load()


def snapshot(model: Any) -> ModelSnapshot:
    return ModelSnapshot(model.get_base_model(), watch=True)


def table_of(model: Any, names: list[str], by_kernels: bool) -> tuple[AdapterTable, list[Any]]:
    lora_layers = snapshot(model).lora
    note_places(model.get_base_model())
    table = AdapterTable(len(names) + 1, torch.device(DEVICE), kernels if by_kernels else None)
    for slot, name in enumerate(names):
        table.put(slot, lora_layers.read(name))
    return table, lora_layers.layers


# ---- apart from the model


def test_switching_adding_and_disabling_leave_the_model_as_it_is() -> None:
    """Base requests keep their blocks and captured steps, whatever happens to adapters."""
    model = adapted(lora(), lora(r=4))
    first = snapshot(model)
    model.set_adapter("two")
    assert first.unchanged()
    model.add_adapter("new", lora(target_modules=["q_proj"]))
    model.eval()
    assert first.unchanged()
    model.delete_adapter("one")
    with model.disable_adapter():
        assert snapshot(model).graph_key is first.graph_key
        assert snapshot(model).lora.active == ()
    assert snapshot(model).lora.names == ["two", "new"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.merge_adapter(), "merged"),
        (lambda model: model.add_adapter("d", lora(use_dora=True)), "Dora"),
        (lambda model: model.add_adapter("d", lora(lora_bias=True)), "biases"),
        (lambda model: model.add_adapter("d", lora(modules_to_save=["lm_head"])), "ModulesToSave"),
        (lambda model: model.add_adapter("d", lora(target_modules=["embed_tokens"])), "Embedding"),
    ],
    ids=["merged", "dora", "bias", "modules_to_save", "embedding"],
)
def test_what_is_more_than_a_product_belongs_to_the_model(change: Any, why: str) -> None:
    """Such adapters are part of the model's state, as peft's own code computes them."""
    model = adapted(lora(), lora())
    first = snapshot(model)
    change(model)
    found = snapshot(model)
    assert not first.unchanged()
    assert found.graph_key is not first.graph_key
    assert not found.lora.apart
    assert why in str(found.lora.why_not)


def test_a_change_of_one_adapter_is_its_own() -> None:
    """Training in place, a scale, a re-added name: another number for that adapter, and for no other (C24)."""
    model = adapted(lora(), lora())
    base = model.get_base_model()

    def keys() -> list[Any]:
        states = AdapterStates.of(identity_of(base), ModelSnapshot(base).lora, ["one", "two"])
        return [identity_of(base).prefix_key(ModelSnapshot(base)), states.key(["one"]), states.key(["two"])]

    layer = base.model.layers[0].self_attn.v_proj
    before = keys()
    assert keys() == before
    for change in (
        lambda: layer.lora_B["one"].weight.data.add_(1e-3),
        lambda: layer.set_scale("one", 3.0),
        lambda: (model.delete_adapter("one"), model.add_adapter("one", lora()), model.eval()),
    ):
        change()
        after = keys()
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
        before = after


# ---- each token its own


@settings(max_examples=8)
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


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernels"])
def test_tokens_of_one_row(kernel: bool) -> None:
    """The engine's form: the tokens of several sequences in one row, the head given only the last ones."""
    model = adapted(lora(target_modules=["q_proj", "v_proj", "lm_head"]), lora(r=4)).to(DEVICE)
    base = model.get_base_model()
    table, layers = table_of(model, ["one", "two"], kernel)
    layer, head = base.model.layers[0].self_attn.q_proj, base.lm_head
    x = torch.randn(1, 5, layer.in_features, device=DEVICE)
    last = torch.tensor([1, 4], device=DEVICE)
    with torch.no_grad(), applied(layers, AdapterBatch(table, [0, 0, 1, -1, 1], last)):
        whole = layer(x)
        ends = head(x[:, last])
    names = ["one", "one", "two", "__base__", "two"]
    with torch.no_grad():
        for i, name in enumerate(names):
            torch.testing.assert_close(
                whole[0, i], layer(x[0, i : i + 1], adapter_names=[name])[0], atol=1e-5, rtol=1e-4
            )
        for place, token in enumerate((1, 4)):
            torch.testing.assert_close(
                ends[0, place],
                head(x[0, token : token + 1], adapter_names=[names[token]])[0],
                atol=1e-5,
                rtol=1e-4,
            )


def test_layers_whose_outputs_are_read_together() -> None:
    """Query, key and value where nothing is read in between, as their code says; one launch writes to all."""
    assert runs_of(LlamaAttention.forward) == (("q_proj", "k_proj", "v_proj"),)
    assert runs_of(Qwen3Attention.forward) == ()  # its norms read the query before the key is there
    model = adapted(lora(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])).to(DEVICE)
    table, layers = table_of(model, ["one"], True)
    assert [table.joint.get(i) for i in range(5)] == [2, 2, None, None, 6]
    x = torch.randn(2, 3, layers[0].in_features, device=DEVICE)
    for _ in range(2):
        with torch.no_grad(), applied(layers, AdapterBatch(table, [0, -1])):
            found = [layer(x) for layer in layers[:3]]
    with torch.no_grad():
        for layer, each in zip(layers, found, strict=False):
            torch.testing.assert_close(
                each, layer(x, adapter_names=["one", "__base__"]), atol=1e-5, rtol=1e-4
            )


def test_other_shapes_are_refused() -> None:
    """A layer that is not given the step's tokens cannot know whose they are."""
    model = adapted(lora())
    table, layers = table_of(model, ["one"], False)
    for shape, words in (((2, 4), r"\[2, 4, "), ((), r"\[\d+\] ")):
        table.why_not = None
        with applied(layers, AdapterBatch(table, [0, -1, 0])), pytest.raises(Inapplicable, match=words):
            layers[0](torch.zeros(*shape, layers[0].in_features))
        assert table.why_not is not None


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_part_of_a_wider_product(by_kernels: bool, tokens: int) -> None:
    """Adapters add to an output whose rows lie apart where it lies, and to nothing beside it."""
    model = adapted(lora()).to(DEVICE)
    table, layers = table_of(model, ["one"], by_kernels)
    layer = layers[0]
    x = torch.randn(3, tokens, layer.in_features, device=DEVICE)
    whole = torch.randn(3, tokens, layer.out_features + 16, device=DEVICE)
    before = whole.clone()
    part = whole[..., 8:-8]
    batch = AdapterBatch(table, [0, -1, 0])
    with torch.no_grad():
        found = batch.add_at_once(layer, x, part)
        own = layer(x) - layer.base_layer(x)
    assert found.data_ptr() == part.data_ptr()
    own[1] = 0
    torch.testing.assert_close(part, before[..., 8:-8] + own, atol=1e-5, rtol=1e-4)
    assert torch.equal(whole[..., :8], before[..., :8])
    assert torch.equal(whole[..., -8:], before[..., -8:])


def test_one_adapter_for_everything() -> None:
    """All tokens of a forward have one adapter, whatever its layers are given."""
    model = adapted(lora(), lora())
    ids = torch.randint(0, 90, (2, 7))
    lora_layers = snapshot(model).lora
    model.set_adapter("two")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.set_adapter("one")
        table = AdapterTable(1, torch.device("cpu"))
        with applied(lora_layers.layers, AdapterBatch.of_one(table, lora_layers.read("two"))):
            found = model.get_base_model()(input_ids=ids).logits
        with applied(lora_layers.layers, None):
            none = model.get_base_model()(input_ids=ids).logits
    assert torch.equal(found, expected)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(none, model(input_ids=ids).logits)


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


@pytest.mark.parametrize("way", ["one", "mixed", "kernels"])
def test_a_sum_is_rounded_once(way: str) -> None:
    """An adapter in float32 on a layer in bfloat16: 1 + 1/64 and 4 + 1/64 are 5 + 1/32, but 5 if the
    adapter's part is rounded to 4 before.
    """
    layer = torch.nn.Linear(16, 8)
    a, b = torch.zeros(8, 16, device=DEVICE), torch.zeros(8, 8, device=DEVICE)
    a[0, 0] = 1
    b[:, 0] = 4 + 1 / 64
    adapter = Adapter({layer: (LowRank(a, b, 1.0),)})
    table = AdapterTable(1, torch.device(DEVICE), kernels if way == "kernels" else None)
    table.put(0, adapter)
    x = torch.ones(2, 16, dtype=torch.bfloat16, device=DEVICE)
    y = torch.full((2, 8), 1 + 1 / 64, dtype=torch.bfloat16, device=DEVICE)
    batch = AdapterBatch.of_one(table, adapter) if way == "one" else AdapterBatch(table, [0, -1])
    found = batch.add_at_once(layer, x, y)
    assert found.dtype == torch.bfloat16
    assert found.float().unique(dim=1).flatten().tolist() == [
        5 + 1 / 32,
        5 + 1 / 32 if way == "one" else 1 + 1 / 64,
    ]


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


# ---- prefixes of generate()


def test_training_one_adapter_leaves_other_blocks() -> None:
    """After a step on one adapter its prompts are computed again; the base's and the other's are found."""
    model = adapted(lora(), lora())
    base = model.get_base_model()
    ids = torch.randint(3, 90, (3, 20))
    call: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 3,
        "do_sample": False,
        "adapter_names": ["__base__", "one", "two"],
        "cache_implementation": "paged",
        "cache_config": {"block_size": 4, "prefix_caching": True},
    }

    def reused() -> int:
        before = hf_paged.stats(base).reused
        found = model.generate(**call)
        stock = model.generate(**{name: value for name, value in call.items() if "cache" not in name})
        assert torch.equal(found, stock)
        return int(hf_paged.stats(base).reused - before)

    reused()
    whole = reused()
    with torch.no_grad():
        base.model.layers[0].self_attn.k_proj.lora_B["two"].weight.mul_(2.0)
    # All rows of a call begin with the shortest of their prefixes, so ask for those of one adapter at a time.
    call |= {
        "input_ids": ids[:2],
        "attention_mask": torch.ones_like(ids[:2]),
        "adapter_names": ["__base__", "one"],
    }
    assert whole > 0
    assert reused() == whole // 3 * 2
    call |= {"input_ids": ids[2:], "attention_mask": torch.ones_like(ids[2:]), "adapter_names": ["two"]}
    assert reused() == 0
    assert reused() == whole // 3


def test_peft_is_what_finds_them() -> None:
    """A model without peft's layers has no adapters."""
    assert isinstance(peft.LoraConfig(), peft.LoraConfig)
    model = adapted(lora()).merge_and_unload()
    assert not ModelSnapshot(model).lora


# ---- whatever breaks a forward off


class Interrupting(list[Any]):
    """Modules, in the middle of which an interrupt comes."""

    def __iter__(self) -> Any:
        yield from list.__iter__(self)
        raise KeyboardInterrupt


def test_nothing_stays_after_an_interrupt() -> None:
    """Neither while layers are prepared nor in a forward, whose own forwards may be the user's."""
    model = adapted(lora())
    layers = snapshot(model).lora.layers
    base = layers[0].base_layer
    base.forward = own = base.forward
    for modules in (Interrupting([*layers, base]), [*layers, base]):
        with pytest.raises(KeyboardInterrupt), applied(modules, None):
            raise KeyboardInterrupt
        assert all("forward" not in layer.__dict__ for layer in layers)
        assert base.forward is own


def test_active_dropout_is_left_to_peft() -> None:
    """An adapter added after eval() drops inputs at random: stock's cache answers, with a warning."""
    model = adapted(lora())
    model.add_adapter("random", lora(lora_dropout=0.5))
    assert snapshot(model).lora.apart
    model.set_adapter("random")
    assert "dropout" in (snapshot(model).lora.why_not or "")
    call = {"input_ids": torch.arange(10, 22)[None], "do_sample": False, "max_new_tokens": 12}
    torch.manual_seed(3)
    expected = model.generate(**call)
    torch.manual_seed(3)
    with pytest.warns(hf_paged.FallbackWarning, match="Dropout"):
        assert torch.equal(model.generate(**call, cache_implementation="paged"), expected)


def test_experts_that_compute_otherwise_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers switches experts to another implementation for decoding on a GPU. Steps are captured with
    it, although the prompt's forward has looked for adapters before.
    """

    @contextmanager
    def switched(model: Any) -> Iterator[None]:
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation("eager")

    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", switched)
    monkeypatch.setattr("hf_paged.model.capture.replay.triton_package", lambda *_: kernels)
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = build(BY_NAME["mixtral"])
    model.set_experts_implementation("eager")
    ids = torch.arange(10, 22)[None]
    call = {"input_ids": ids, "do_sample": False, "min_new_tokens": 16, "max_new_tokens": 16}
    expected = model.generate(**call)
    assert torch.equal(model.generate(**call, cache_implementation="paged"), expected)
    assert counts(model)["replayed"] > 5, reasons(model)
