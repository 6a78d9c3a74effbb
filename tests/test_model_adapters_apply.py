"""LoRA adapters in one forward: each token has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from adapter_tables import kernels, snapshot, table_of
from adapters import adapted, lora, trained, with_a_tied_head
from captures import counts, policy, reasons
from families import BY_NAME, build
from kernel_cases import DEVICE
from tape import record
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
)
from hf_paged.model.adapters.joint import runs_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.snapshot import ModelSnapshot


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


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"trainable_token_indices": [5, 7, 30]}, {"trainable_token_indices": list(range(3, 60))}),
    "embeddings": (
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"], "r": 3},
    ),
    "modules": ({"modules_to_save": ["lm_head", "embed_tokens"]}, {"modules_to_save": ["lm_head", "norm"]}),
    "dora": ({"use_dora": True}, {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "biases": ({"lora_bias": True}, {"lora_bias": True, "r": 3}),
}


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in KINDS), ("tokens", True)])
def test_kernels_compute_parts_of_every_kind(kind: str, tied: bool) -> None:
    """Rows of one batch have logits of peft alone on their adapters, with others in the slots than when the
    tables were made.
    """
    model = trained(*[lora(**each) for each in KINDS[kind]], model=with_a_tied_head() if tied else None)
    model = model.to(DEVICE)
    names = ["one", "two", "three"]
    table, layers = table_of(model, names, True)
    ids = torch.randint(3, 90, (5, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = ["two", None, "one", "three", "two"]
    expected = [alone_logits(model, each, row) for each, row in zip(ids, rows, strict=True)]
    slots = [-1 if row is None else names.index(row) for row in rows]
    base = model.get_base_model()
    with torch.no_grad(), applied(layers, AdapterBatch(table, slots)):
        found = base(input_ids=ids).logits
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-4)
    layout = table.layout
    assert (table.why_eager is None) == (kind != "modules")  # of its norms plain torch computes
    table.clear(0)
    table.put(1, snapshot(model).lora.read("one"))
    assert table.layout == layout
    with torch.no_grad(), applied(layers, AdapterBatch(table, [1, 0, 2, -1, -1])):
        found = base(input_ids=ids).logits
    for row, name in enumerate(["one", None, "three", None, None]):
        wanted = alone_logits(model, ids[row], name)
        torch.testing.assert_close(found[row : row + 1], wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["embeddings", "modules", "dora"])
def test_a_forward_launches_the_same_for_any_mix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was captured without any adapter, or with one, is right for all others of the layout."""
    model = trained(*[lora(**each) for each in KINDS[kind]]).to(DEVICE)
    table, layers = table_of(model, ["one", "two", "three"], True)
    launched: list[str] = []

    def noted(name: str) -> Any:
        kernel = getattr(kernels, name)

        def launch(*arguments: Any, **options: Any) -> Any:
            launched.append(name)
            return kernel(*arguments, **options)

        return launch

    for name in ("lora_shrink", "lora_gather", "lora_expand", "slot_embed", "slot_product"):
        monkeypatch.setattr(kernels, name, noted(name))

    def launches(slots: list[int]) -> list[str]:
        launched.clear()
        index = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        batch = AdapterBatch(table, index)
        with torch.no_grad(), applied(layers, batch):
            model.get_base_model()(input_ids=torch.tensor([[5], [6], [30]], device=DEVICE))
        return list(launched)

    table.in_torch = [{} for _ in table.in_torch]  # such slots are never captured
    launches([0, 1, -1])  # which learns what layers share an input
    full = launches([0, 1, -1])
    layout = table.layout
    for slot in range(3):
        table.clear(slot)
    assert launches([-1, -1, -1]) == launches([0, 0, 1]) == full
    table.put(1, snapshot(model).lora.read("three"))
    assert launches([1, -1, 1]) == full
    assert table.layout == layout


def alone_logits(model: Any, ids: torch.Tensor, adapter: str | None) -> torch.Tensor:
    with torch.no_grad():
        if adapter is None:
            with model.disable_adapter():
                return model(input_ids=ids[None]).logits
        model.set_adapter(adapter)
        return model(input_ids=ids[None]).logits


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
