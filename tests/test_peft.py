"""A model fine-tuned with peft is a model like any other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from compare import assert_clean
from families import BY_NAME, build
from prefix_reuse import words
from releases import prefixes_are_ignored

import hf_paged

peft = pytest.importorskip("peft", reason="peft is an extra")
TARGETS = ["q_proj", "k_proj", "v_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False, **options)


@pytest.fixture
def model() -> Any:
    """A Llama with two adapters that do something."""
    torch.manual_seed(0)
    made = peft.get_peft_model(build(BY_NAME["llama"]), lora(), adapter_name="one")
    made.add_adapter("two", lora())
    return made.eval()


def _same(
    model: Any, ids: torch.Tensor, options: dict[str, Any] | None = None, **arguments: Any
) -> torch.Tensor:
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, **arguments}
    torch.manual_seed(0)
    stock = model.generate(**call)
    torch.manual_seed(0)
    paged = model.generate(
        **call, cache_implementation="paged", cache_config={"block_size": 4, **(options or {})}
    )
    assert torch.equal(stock, paged)
    return paged


@pytest.mark.parametrize(
    "mode",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "samples"],
)
def test_lora(model: Any, ids: torch.Tensor, mode: dict[str, Any]) -> None:
    """Active, switched, disabled, merged: each gives its own tokens, the same as stock's."""
    one = _same(model, ids, **mode)
    model.set_adapter("two")
    two = _same(model, ids, **mode)
    with model.disable_adapter():
        none = _same(model, ids, **mode)
    assert not torch.equal(one, two)
    assert not torch.equal(one, none)
    model.merge_adapter()
    assert torch.equal(_same(model, ids, **mode), two)
    model.unmerge_adapter()
    assert_clean(model.get_base_model(), "sdpa")


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_adapter_names(model: Any, ids: torch.Tensor, mode: dict[str, Any]) -> None:
    """A row for each adapter in one batch, and it is really the row's own adapter."""
    mixed = _same(model, ids, adapter_names=["one", "__base__", "two"], **mode)
    model.set_adapter("two")
    per = mode.get("num_return_sequences", 1)
    alone = _same(model, ids[2:], **mode)
    width = min(mixed.shape[1], alone.shape[1])
    assert torch.equal(mixed[2 * per :, :width], alone[:, :width])
    assert not any(
        "adapter_names" in str(hook)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


@pytest.mark.parametrize("active", ["one", ["one", "two"]], ids=["one", "both"])
def test_rows_without_an_adapter_beside_adapters_with_biases(active: Any, ids: torch.Tensor) -> None:
    """Active adapters are part of the model, and its blocks are none of rows that are given something else."""
    torch.manual_seed(0)
    model = peft.get_peft_model(build(BY_NAME["llama"]), lora(lora_bias=True), adapter_name="one")
    model.add_adapter("two", lora())
    model.base_model.set_adapter(active)
    reused = {"prefix_caching": True}
    model.eval()
    plain = _same(model, ids, reused)
    mixed = _same(model, ids, reused, adapter_names=["one", "__base__", "two"])
    assert not torch.equal(plain, mixed)
    _same(model, ids, reused)
    assert hf_paged.stats(model).reused > 0
    assert_clean(model.get_base_model(), "sdpa")


def test_a_call_that_failed_leaves_hooks_behind(model: Any, ids: torch.Tensor) -> None:
    """peft removes the hooks of a call only if it ends well; those of the running call decide, as in peft."""

    def broken(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a processor fails")

    with pytest.raises(RuntimeError, match="a processor fails"):
        model.generate(ids, adapter_names=["two", "two", "one"], logits_processor=[broken])
    assert any("adapter_names" in str(each._forward_pre_hooks) for each in model.modules())
    for names in (["one", "__base__", "two"], ["two", "one", "__base__"]):
        _same(model, ids, {"prefix_caching": True}, adapter_names=names)


def test_rows_with_adapters_that_differ_from_a_later_chunk_on(model: Any, ids: torch.Tensor) -> None:
    """A row that was one of a chunk leaves its blocks under the adapters of the rows that it became."""
    rows = torch.cat([ids[:1].repeat(3, 1), ids[:, -6:]], 1)
    _same(model, rows, {"prefix_caching": True}, adapter_names=["one", "one", "two"], prefill_chunk_size=4)
    for names in (["one"] * 3, ["two"] * 3):
        _same(model, rows, {"prefix_caching": True}, adapter_names=names)
    assert hf_paged.stats(model.get_base_model()).reused


def test_a_cache_of_the_peft_model(model: Any, ids: torch.Tensor) -> None:
    """PagedCache(model) unwraps the peft model."""
    cache = hf_paged.PagedCache(model)
    assert cache.model is model.get_base_model()
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    assert torch.equal(model.generate(**call, past_key_values=cache), model.generate(**call))


@pytest.mark.parametrize("beams", [1, 3])
def test_prompt_tuning(ids: torch.Tensor, beams: int) -> None:
    """Virtual tokens before left padding: a mask that is no left padding any more."""
    base = build(BY_NAME["llama"])
    model = peft.get_peft_model(
        base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    _same(model, ids, attention_mask=mask, num_beams=beams)
    assert_clean(base, "sdpa")


@pytest.mark.filterwarnings("default:Both .past_key_values. and .cache. are set:FutureWarning")
def test_prefix_tuning_that_stock_ignores(ids: torch.Tensor) -> None:
    """peft 0.21 hands its prefix over under the name that transformers 5.24 has given up, and which it ignores
    beside the new one: there stock answers without the prefix, as the model alone does, and pages do the same.
    """
    base = build(BY_NAME["llama"])
    model = peft.get_peft_model(
        base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    paged = model.generate(**call, cache_implementation="paged")
    assert torch.equal(paged, model.generate(**call))
    if prefixes_are_ignored():
        assert torch.equal(paged, base.generate(**call))
    assert_clean(base, "sdpa")


def test_training_between_calls(model: Any, ids: torch.Tensor) -> None:
    """An optimizer step changes the next answer as it changes stock's."""
    before = _same(model, ids)
    model.train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    assert not torch.equal(_same(model, ids), before)


def test_layers_that_take_the_mean_of_all_tokens(ids: torch.Tensor) -> None:
    """Lily's experts are mixed by the mean of a forward's tokens: no row stands for another, no prefix is
    shared, also where the adapter comes after the first paged call.
    """
    base = build(BY_NAME["llama"])
    _same(base, ids)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LilyConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lily" in name:
                each.add_(torch.randn_like(each) * 0.3)
    model.eval()
    for mode in ({}, {"num_beams": 3}):
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, **mode}
        for _ in range(2):
            paged = model.generate(
                **call, cache_implementation="paged", cache_config={"block_size": 4, "prefix_caching": True}
            )
            assert torch.equal(paged, model.generate(**call))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("new", [1, 3])
def test_adapter_names_for_fewer_rows_than_there_are(model: Any, rows: int, new: int) -> None:
    """peft does not repeat the names for several answers of a prompt: its own error, also where equal rows are
    computed once.
    """
    ids = words(1, 7).repeat(rows, 1)
    call = {"max_new_tokens": new, "do_sample": True, "num_return_sequences": 2}
    for word in ({}, {"cache_implementation": "paged"}):
        with pytest.raises(ValueError, match=f"got {rows} and {2 * rows} respectively"):
            model.generate(ids, adapter_names=["one"] * rows, **call, **word)


@pytest.mark.parametrize(
    "names",
    [None, ["al", "other"] * 5, ["al", "__base__", "plain", "other", "al"] * 2],
    ids=["active", "mixed", "mixed with others"],
)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"prefill_chunk_size": 2}], ids=str)
def test_equal_rows_of_an_alora_are_computed_once(names: list[str] | None, mode: dict[str, Any]) -> None:
    """Values that peft gives its layers for each row are narrowed with the rows: the names and the invocation
    tokens.
    """
    peft = pytest.importorskip("peft", reason="peft is an extra")
    torch.manual_seed(0)

    def config(tokens: list[int] | None) -> Any:
        return peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, alora_invocation_tokens=tokens
        )

    model = peft.get_peft_model(build(BY_NAME["llama"]), config([7, 8]), adapter_name="al").eval()
    model.add_adapter("other", config([6, 7]))
    model.add_adapter("plain", config(None))
    rows = [[5, 6, 7, 8, 9], [9, 9, 7, 8, 5], [11, 12, 13, 14, 5], [7, 8, 7, 8, 6], [6, 7, 8, 9, 10]]
    ids = torch.tensor(rows).repeat(2, 1)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    call |= {**mode, "return_dict_in_generate": True, "output_scores": True}
    call |= {} if names is None else {"adapter_names": names}
    seen: list[int] = []
    embedding = model.get_base_model().model.embed_tokens
    handle = embedding.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    stock = model.generate(**call)
    seen.clear()
    paged = model.generate(**call, cache_implementation="paged")
    handle.remove()
    assert seen[0] == (10 if names is not None and names[0] != names[5] else 5)
    assert torch.equal(stock.sequences, paged.sequences)
    for one, other in zip(stock.scores, paged.scores, strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=2e-4)
