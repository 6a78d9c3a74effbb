"""Adapters that peft's own modules compute, chosen by request: the tokens of peft alone on each."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, alone, ask, first, prompt, tokens
from adapters import NAMES, adapted, lora, trained
from cases import examples
from engine_parts import apart_of
from families import BY_NAME, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from other_methods import other_method, tiny_llama
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from pictures import with_pictures
from quantized_layers import EightBit, FourBit
from tape import rerun
from tiny import build as tiny
from tiny import config_class

from hf_paged import Engine
from hf_paged.engine.worker.check_policy import WeightsChanged
from hf_paged.model.rehearsal import RECORDERS

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
LONG: dict[str, Any] = {"max_new_tokens": 14}
KINDS = [
    "BOFT",
    "C3A",
    "GLORA",
    "HIRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "OFT",
    "ROAD",
    "SHIRA",
    "VERA",
]


def flags_of(model: Any) -> list[Any]:
    """All that says which adapters a model computes with and trains, and where its forwards are."""
    modules = [
        (
            id(module),
            str(vars(module).get("_active_adapter")),
            vars(module).get("_disable_adapters"),
            module.training,
            "forward" in vars(module),
        )
        for module in model.modules()
    ]
    return [modules, [(name, id(each), each.requires_grad) for name, each in model.named_parameters()]]


def answers(engine: Engine, wanted: list[Any], **options: Any) -> list[list[int]]:
    """The tokens of a prompt for each adapter, all in one batch."""
    handles = [
        engine.submit(prompt(i), **{**GREEDY, **options}, adapter=each) for i, each in enumerate(wanted)
    ]
    found = [tokens(handle) for handle in handles]
    engine.check()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_has_its_own(kind: str) -> None:
    """Two adapters of a method, the model alone and what is active in one batch; the model stays as it is."""
    model = other_method(kind)
    wanted = ["one", None, "two", "one"]
    expected = [alone(model, prompt(i), each) for i, each in enumerate(wanted)]
    assert len({tuple(alone(model, prompt(2), each)) for each in ("one", "two", None)}) == 3
    before = flags_of(model)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        assert answers(engine, wanted) == expected
        assert ask(engine, prompt(0)) == expected[0]
        assert flags_of(model) == before
        assert {name: info.computed for name, info in engine.adapters().items()} == {
            "one": "apart",
            "two": "apart",
        }
        assert engine.stats()["adapters"]["forwards_apart"] > 0
    assert flags_of(model) == before


VELORA = {"velora_config": {"num_groups": 4}}
BLOCKS = {
    "use_bdlora": peft.tuners.lora.config.BdLoraConfig(
        target_modules_bd_a=["o_proj", "down_proj"],
        target_modules_bd_b=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        nblocks=2,
    )
}
"""Options of LoRA that peft's own modules compute."""


def mixed() -> Any:
    """Adapters of which kernels compute two and peft the others."""
    return adapted(lora(), lora(**BLOCKS), lora(r=3), lora(**VELORA))


def test_beside_those_of_kernels() -> None:
    """Kernels' rows, the model alone and two kinds of peft's in one batch, whatever is active."""
    model = mixed()
    wanted = ["one", "two", None, "three", "four", "two", ("one", "three"), ("one", "two")]
    expected = [alone(model, prompt(i), each) for i, each in enumerate(wanted)]
    own = [alone(model, prompt(0), each) for each in (None, "one", "two", "three", "four")]
    assert len(set(map(tuple, own))) == len(own)
    with Engine(model, block_size=4, num_blocks=200) as engine:
        assert answers(engine, wanted) == expected
        for name in ("two", "four"):
            model.set_adapter(name)
            assert answers(engine, ["active", "three"]) == [
                alone(model, prompt(0), name),
                alone(model, prompt(1), "three"),
            ]
        with model.disable_adapter():
            assert ask(engine, prompt(2)) == expected[2]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_come_back_with_theirs(mode: Any) -> None:
    model = mixed()
    wanted = ["two", "one", None, "four", "two", "four"]
    expected = [alone(model, prompt(i, 12), each, max_new_tokens=14) for i, each in enumerate(wanted)]
    with Engine(model, block_size=4, num_blocks=17, preemption=mode, watermark=0.0) as engine:
        handles = [
            engine.submit(prompt(i, 12), max_new_tokens=14, do_sample=False, adapter=each)
            for i, each in enumerate(wanted)
        ]
        assert [tokens(handle) for handle in handles] == expected
        assert engine.stats()["preemptions"] > 0
        engine.check()


def test_beams_samples_and_prefixes() -> None:
    """In every mode; a prefix is shared under one adapter and never across two (C24)."""
    model = other_method("IA3")
    ids = prompt(4, 21)
    both: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    with Engine(model, block_size=4, num_blocks=200) as engine:
        for each in ("one", "two", None):
            found = engine.generate([ids], **GREEDY, adapter=each, **both)[0]
            assert first(found) == alone(model, ids, each, **both)
        again = engine.generate([ids], **GREEDY, adapter="one")[0]
        assert again.cached_tokens >= 20
        assert first(again) == alone(model, ids, "one")
        drawn = [
            engine.generate([ids], max_new_tokens=NEW, do_sample=True, seed=3, adapter="two", top_k=20)[0]
            for _ in range(2)
        ]
        assert first(drawn[0]) == first(drawn[1])
        engine.check()


def test_so_many_at_once() -> None:
    """Requests of one kind more wait and delay no other, and each has its turn (C33)."""
    model = other_method("IA3", 3)
    wanted = ["one", "two", "three", "one", None]
    expected = [alone(model, prompt(i), each) for i, each in enumerate(wanted)]
    with Engine(model, block_size=4, num_blocks=200, max_adapter_forwards=1) as engine:
        handles = [engine.submit(prompt(i), **GREEDY, adapter=each) for i, each in enumerate(wanted)]
        engine.step()
        assert engine.stats()["running"] == 3
        assert engine.stats()["waiting"] == 2
        assert [tokens(handle) for handle in handles] == expected
        engine.check()
    with pytest.raises(ValueError, match="max_adapter_forwards=0 is not a number of adapters"):
        Engine(model, max_adapter_forwards=0)


def step_of_optimizer(model: Any, name: str) -> None:
    parameters = [each for path, each in model.named_parameters() if f".{name}" in path]
    for each in parameters:
        each.grad = torch.ones_like(each)
    torch.optim.AdamW(parameters, lr=0.3, fused=True).step()


def in_place(model: Any, name: str) -> None:
    with torch.no_grad():
        for path, each in model.named_parameters():
            if f".{name}" in path:
                each.mul_(-2.0)


@pytest.mark.parametrize("change", [step_of_optimizer, in_place])
@pytest.mark.parametrize("kind", ["IA3", "blocks"])
def test_training_ends_only_its_own(kind: str, change: Callable[[Any, str], None]) -> None:
    """Others go on; later requests have the new weights, and no block of the old ones is found (C24)."""
    model = adapted(lora(**BLOCKS), lora(**BLOCKS)) if kind == "blocks" else other_method(kind)
    ids = prompt(5, 17)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        one, two = [engine.submit(ids, **GREEDY, adapter=each) for each in ("one", "two")]
        engine.step()
        engine.step()
        expected = alone(model, ids, "one")
        change(model, "two")
        model.train()
        model.eval()
        assert tokens(one) == expected
        error = two.result().error
        assert isinstance(error, WeightsChanged)
        assert "adapter 'two' have changed" in str(error)
        new = engine.generate([ids], **GREEDY, adapter="two")[0]
        assert first(new) == alone(model, ids, "two")
        assert new.cached_tokens == 0
        kept = engine.generate([ids], **GREEDY, adapter="one")[0]
        assert kept.cached_tokens >= 16


def test_weights_written_through_data_while_idle() -> None:
    """torch counts no such write: the content is compared (C24)."""
    model = other_method("LOHA")
    ids = prompt(6, 17)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        ask(engine, ids, adapter="two")
        ask(engine, ids, adapter="one")
        model.base_model.model.model.layers[0].self_attn.v_proj.hada_w1_a["two"].data.add_(0.5)
        assert ask(engine, ids, adapter="two") == alone(model, ids, "two")
        assert engine.generate([ids], **GREEDY, adapter="one")[0].cached_tokens >= 16


def test_adapters_that_come_and_go() -> None:
    """A name that is deleted and added again is another adapter; a new kind leaves the others as they are."""
    model = adapted(lora(), lora(**BLOCKS))
    ids = prompt(7, 17)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        before = ask(engine, ids, adapter="two")
        running = engine.submit(ids, **GREEDY, adapter="one")
        engine.step()
        model.add_adapter("new", lora(**VELORA))
        model.eval()
        assert ask(engine, ids, adapter="new") == alone(model, ids, "new")
        assert tokens(running) == alone(model, ids, "one")
        model.delete_adapter("two")
        with pytest.raises(ValueError, match="there is no adapter 'two'"):
            engine.submit(ids, adapter="two")
        model.add_adapter("two", lora(**BLOCKS, r=4))
        model.eval()
        assert ask(engine, ids, adapter="two") == alone(model, ids, "two") != before


def test_those_that_cannot_be_active_together_are_refused_by_name() -> None:
    saved = lora(**VELORA, modules_to_save=["lm_head"])
    model = adapted(saved, saved, lora())
    with Engine(model, block_size=4, num_blocks=100) as engine:
        with pytest.raises(
            ValueError, match="'one' and 'two' have parts of the kind ModulesToSave in one place"
        ):
            engine.submit(prompt(1), adapter=["one", "two"])
        assert ask(engine, prompt(1), adapter=["three", "two"]) == alone_together(model, ["three", "two"])


@pytest.mark.parametrize("kind", ["C3A", "LN_TUNING"])
def test_two_that_peft_computes_one_by_one_are_refused_at_submit(kind: str) -> None:
    """A layer of theirs is tried: the model's weights and flags stay as they are."""
    model = other_method(kind)
    before = flags_of(model)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        seen: list[Any] = []
        hooks = [each.register_forward_hook(lambda *args: seen.append(args)) for each in model.modules()]
        with pytest.raises(ValueError, match="does not compute 'one' and 'two' together"):
            engine.submit(prompt(1), adapter=["one", "two"])
        assert not seen  # a user's hooks are for forwards of the model
        for each in hooks:
            each.remove()
        assert flags_of(model) == before
        assert answers(engine, ["two"]) == [alone(model, prompt(0), "two")]


def test_two_that_the_engine_was_given_are_refused_by_name() -> None:
    saved = other_method("IA3")
    with Engine(tiny_llama(), block_size=4, num_blocks=100) as engine:
        for name in ("one", "two"):
            engine.add_adapter(name, saved)
        with pytest.raises(ValueError, match=r"'one' is the engine's, .* compute it without 'two'; name one"):
            engine.submit(prompt(1), adapter=["one", "two"])


def test_trained_tokens_under_saved_embeddings() -> None:
    """In peft the copy that one adapter has saved has the tokens of the other: so it is together."""
    products: dict[str, Any] = {"target_modules": ["q_proj"]}
    ids = prompt(1)
    tokens_of = lora(**products, trainable_token_indices={"embed_tokens": sorted({5, 6, *ids[:4]})})
    model = trained(tokens_of, lora(**products, modules_to_save=["embed_tokens"]), third=products)
    wanted = ["one", "two", ("one", "two"), ("two", "one"), None]
    expected = [alone(model, ids, each) for each in wanted]
    assert len(set(map(tuple, expected))) == 4
    with Engine(model, block_size=4, num_blocks=100) as engine:
        handles = [engine.submit(ids, **GREEDY, adapter=each) for each in wanted]
        assert [tokens(handle) for handle in handles] == expected


def alone_together(model: Any, names: list[str]) -> list[int]:
    """The answer of peft with several active, of which one has a module saved."""
    model.base_model.set_adapter(names)
    out = model.generate(input_ids=torch.tensor([prompt(1)]), **GREEDY)
    model.base_model.set_adapter(["one"])
    return list(out[0, len(prompt(1)) :].tolist())


def test_a_forward_that_raises_ends_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = other_method("IA3")
    before = flags_of(model)
    layer = type(model.base_model.model.model.layers[0].self_attn.k_proj)
    forward = layer.forward

    def fails(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if "two" in self.active_adapters and not self.disable_adapters:
            raise ArithmeticError("no numbers today")
        return forward(self, x, *args, **kwargs)

    with Engine(model, block_size=4, num_blocks=100) as engine:
        expected = answers(engine, ["one", "two", None])
        two = engine.submit(prompt(1), **GREEDY, adapter="two")
        others = [engine.submit(prompt(i), **GREEDY, adapter=each) for i, each in ((0, "one"), (2, None))]
        engine.step()
        monkeypatch.setattr(layer, "forward", fails)
        assert [tokens(handle) for handle in others] == [expected[0], expected[2]]
        error = two.result().error
        assert "the forward of the adapter 'two' failed (ArithmeticError: no numbers today)" in str(error)
        assert flags_of(model) == before
        monkeypatch.undo()
        assert answers(engine, ["one", "two", None]) == expected


def test_what_cannot_be_computed_over_pages_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter whose answers depend on how its prompt is cut ends its own requests."""
    model = other_method("IA3")
    forward = peft.tuners.ia3.layer.Linear.forward

    def mixed_with_all(layer: Any, x: torch.Tensor) -> torch.Tensor:
        found = forward(layer, x)
        return found if layer.disable_adapters else found + found.mean(1, keepdim=True)

    monkeypatch.setattr(peft.tuners.ia3.layer.Linear, "forward", mixed_with_all)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        assert ask(engine, prompt(1), adapter=None) == alone(model, prompt(1), None)
        error = engine.submit(prompt(1), **GREEDY, adapter="one").result().error
        assert "the adapter 'one' cannot be chosen" in str(error)
        assert "computed in chunks" in str(error)


def test_a_mixed_model_of_peft() -> None:
    """LoRA around LoHa: each alone, both and none."""
    base = tiny_llama()
    model: Any = peft.get_peft_model(base, lora(), "one", mixed=True)
    model.add_adapter("two", peft.LoHaConfig(target_modules=["q_proj", "v_proj"], r=4, init_weights=False))
    model.set_adapter(["one", "two"])
    model.eval()
    expected = {}
    for names in (("one",), ("two",), ("one", "two")):
        model.set_adapter(list(names))
        out = model.generate(input_ids=torch.tensor([prompt(1)]), **GREEDY)
        expected[names] = out[0, len(prompt(1)) :].tolist()
    with Engine(model, block_size=4, num_blocks=100) as engine:
        handles = {names: engine.submit(prompt(1), **GREEDY, adapter=list(names)) for names in expected}
        assert {names: tokens(handle) for names, handle in handles.items()} == expected


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_methods_that_take_the_mean_of_all_tokens(mode: Any) -> None:
    """Lily: no prompt is cut, no prefix is shared, and a request that gave way is computed as it was."""
    model, other = other_method("LILY"), adapted(lora())
    wanted = ["one", None, "two", "lora", "one", "two"]
    expected = [
        alone(*(other, prompt(i, 12), "one") if each == "lora" else (model, prompt(i, 12), each), **LONG)
        for i, each in enumerate(wanted)
    ]
    sizes = {"num_blocks": 17, "max_batch_tokens": 17, "max_batch_sequences": 6, "watermark": 0.0}
    with Engine(model, block_size=4, preemption=mode, **sizes) as engine:
        engine.add_adapter("lora", peft.get_peft_model_state_dict(other, adapter_name="one"), lora())
        for _ in range(2):  # nothing is found of what the first ones have left
            handles = [
                engine.submit(prompt(i, 12), **{**GREEDY, **LONG}, adapter=each)
                for i, each in enumerate(wanted)
            ]
            assert [tokens(handle) for handle in handles] == expected
            assert handles[0].result().cached_tokens == 0
        assert engine.stats()["preemptions"] > 0
        engine.check()
        with pytest.raises(ValueError, match="'one' with num_beams=2: it takes the mean of all beams"):
            engine.submit(prompt(1), adapter="one", num_beams=2)
        refused = engine.submit(prompt(1, 13), adapter="one", max_new_tokens=2).result()
        assert "13 tokens, its adapter needs all of them in one forward, and 12 have" in str(refused.error)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_tasks_of_requests(mode: Any) -> None:
    """Poly: two adapters, of several tasks each, LoRA and the model alone; a prefix is that of one task."""
    model, other = other_method("POLY"), adapted(lora())
    wanted = [("one", 0), ("one", 1), (None, None), ("two", 1), ("lora", None), ("one", 1), ("two", 2)]
    given = [{} if task is None else {"task_ids": torch.tensor([task])} for _, task in wanted]
    ids = prompt(3, 12)
    expected = [
        alone(*(other, ids, "one") if name == "lora" else (model, ids, name), **LONG, **options)
        for (name, _), options in zip(wanted, given, strict=True)
    ]
    assert len(set(map(tuple, expected))) == 6
    sizes = {"num_blocks": 17, "max_batch_tokens": 10, "max_batch_sequences": 6, "watermark": 0.0}
    with Engine(model, block_size=4, preemption=mode, **sizes) as engine:
        engine.add_adapter("lora", peft.get_peft_model_state_dict(other, adapter_name="one"), lora())
        for _ in range(2):
            handles = [
                engine.submit(ids, **{**GREEDY, **LONG}, adapter=name, task_ids=task) for name, task in wanted
            ]
            assert [tokens(handle) for handle in handles] == expected
        assert handles[0].result().cached_tokens + handles[1].result().cached_tokens > 0
        assert engine.stats()["preemptions"] > 0
        both: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
        found = engine.generate(ids, **GREEDY, adapter="two", task_ids=2, **both)
        assert first(found) == alone(model, ids, "two", task_ids=torch.tensor([2, 2, 2]), **both)
        assert ask(engine, ids, task_ids=1) == alone(model, ids, "one", task_ids=torch.tensor([1]))
        for wrong in (None, 3, -1, "1", True):
            with pytest.raises(ValueError, match=r"'one' is an adapter of several tasks; .*, 0 to 2"):
                engine.submit(ids, adapter="one", task_ids=wrong)
        with pytest.raises(ValueError, match="only a multitask prompt and Poly have tasks"):
            engine.submit(ids, adapter=None, task_ids=1)
        engine.check()


# ---- given to the engine


def in_peft(folder: Path, **options: Any) -> Any:
    """A plain model with an adapter from a folder, as peft loads it."""
    return peft.PeftModel.from_pretrained(tiny_llama(), str(folder), **options).eval()


def generated(model: Any, ids: list[int]) -> list[int]:
    """The answer of peft with what is active."""
    out = model.generate(input_ids=torch.tensor([ids]), **GREEDY)
    return list(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("kind", ["LILY", "POLY"])
def test_of_means_and_of_tasks(kind: str, tmp_path: Path) -> None:
    """Requests are computed at once, or by their tasks, also where a folder says so."""
    options = {"task_ids": 1} if kind == "POLY" else {}
    other_method(kind, 1).save_pretrained(tmp_path)
    saved = in_peft(tmp_path / "one")
    with Engine(
        tiny_llama(), block_size=4, num_blocks=100, max_batch_tokens=16, max_batch_sequences=4
    ) as engine:
        engine.add_adapter("x", tmp_path / "one")
        handles = [engine.submit(prompt(i, 13), **GREEDY, adapter="x", **options) for i in range(3)]
        asked = {name: torch.tensor([task]) for name, task in options.items()}
        assert [tokens(handle) for handle in handles] == [
            alone(saved, prompt(i, 13), "default", **asked) for i in range(3)
        ]
        assert ask(engine, prompt(1)) == alone(saved, prompt(1), None)
        engine.check()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_replicated_layers(mode: Any, tmp_path: Path) -> None:
    """Adapters of models with more layers come while requests run on the model: blocks keep all layers."""
    saved = {}
    for name, pairs in (("x", [(0, 2), (1, 2)]), ("y", [(0, 1), (0, 2), (0, 2)])):
        torch.manual_seed(len(name) + len(pairs))
        made = peft.get_peft_model(tiny_llama(), lora(layer_replication=pairs), name)
        made.save_pretrained(tmp_path)
        saved[name] = in_peft(tmp_path / name, adapter_name=name)
    saved["lora"] = adapted(lora())
    state = peft.get_peft_model_state_dict(saved["lora"], adapter_name="one")
    model = tiny_llama()
    before = model.config.to_dict(), [id(each) for each in model.parameters()]
    with Engine(model, block_size=4, num_blocks=17, preemption=mode, watermark=0.0, verify="bytes") as engine:
        begun = engine.submit(prompt(7), **{**GREEDY, **LONG})
        engine.step()
        for name in ("x", "y"):
            engine.add_adapter(name, tmp_path / name)
        engine.add_adapter("lora", state, lora())
        wanted = ["x", None, "y", "lora", "x", "y"]
        handles = [
            engine.submit(prompt(i, 12), **{**GREEDY, **LONG}, adapter=each) for i, each in enumerate(wanted)
        ]
        for i, (name, handle) in enumerate(zip(wanted, handles, strict=True)):
            own = "one" if name == "lora" else name
            assert tokens(handle) == alone(saved[name or "lora"], prompt(i, 12), own, **LONG)
        assert tokens(begun) == alone(saved["lora"], prompt(7), None, **LONG)
        assert engine.stats()["preemptions"] > 0
        for found in (False, True):
            again = engine.submit(prompt(2, 12), **{**GREEDY, **LONG}, adapter="y").result()
            assert (again.cached_tokens > 0, first(again)) == (found, tokens(handles[2]))
        assert engine.adapters()["x"].bytes < sum(each.nbytes for each in model.parameters())
        with torch.no_grad():
            for each in (model, saved["x"].get_base_model()):
                each.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        again = engine.submit(prompt(0, 12), **GREEDY, adapter="x").result()
        assert (again.cached_tokens, first(again)) == (0, alone(saved["x"], prompt(0, 12), "x"))
        engine.check()
    assert (model.config.to_dict(), [id(each) for each in model.parameters()]) == before


@pytest.mark.parametrize("kind", ["IA3", "VERA", "ADAPTION_PROMPT", "pissa"])
def test_a_plain_model_takes_every_kind(kind: str, tmp_path: Path) -> None:
    """From a folder; no module, flag or weight of the model changes, though peft changes weights for PiSSA."""
    if kind == "pissa":
        saved = peft.get_peft_model(tiny_llama(), lora(init_lora_weights="pissa", r=2), "one")
        in_place(saved, "lora_B.one")
    else:
        saved = other_method(kind, 1)
    saved.save_pretrained(tmp_path)
    folder = tmp_path / "one"
    model = tiny_llama()
    before = flags_of(model), [each.clone() for each in model.parameters()]
    with Engine(model, block_size=4, num_blocks=100) as engine:
        plain = ask(engine, prompt(1))
        torch.manual_seed(7)
        drawn = torch.rand(3)
        torch.manual_seed(7)
        engine.add_adapter("x", folder)
        assert torch.equal(torch.rand(3), drawn)
        assert ask(engine, prompt(1), adapter="x") == generated(in_peft(folder), prompt(1)) != plain
        assert ask(engine, prompt(1)) == plain
        info = engine.adapters()["x"]
        assert (info.owner, info.computed) == ("engine", "apart")
        assert info.bytes > 0
        engine.add_adapter("y", folder)
        again = engine.generate([prompt(1)], **GREEDY, adapter="y")[0]
        assert again.cached_tokens >= 8
        for name in ("x", "y"):
            engine.remove_adapter(name)
        assert engine.adapters() == {}
        assert engine.stats()["adapters"]["on_device"] == 0
    assert flags_of(model) == before[0]
    assert all(map(torch.equal, model.parameters(), before[1]))


def test_memory_is_counted_and_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = other_method("LOHA", 1)
    saved.save_pretrained(tmp_path)
    state = peft.get_peft_model_state_dict(saved, adapter_name="one")
    needed = sum(each.nbytes for each in state.values())
    caplog.set_level("INFO", "hf_paged")
    with Engine(tiny_llama(), block_size=4, num_blocks=100) as engine:
        before = engine.stats()["adapters"]
        engine.add_adapter("x", tmp_path / "one")
        assert f"'x' ({needed:,} bytes) runs in forwards of its own" in caplog.text
        assert engine.adapters()["x"].bytes == needed
        assert engine.stats()["adapters"]["bytes"] == before["bytes"] + needed
        assert before["ms_apart"] == engine.stats()["adapters"]["ms_apart"] == 0
        begin = time.perf_counter()
        ask(engine, prompt(1), adapter="x")
        assert 0 < engine.stats()["adapters"]["ms_apart"] < (time.perf_counter() - begin) * 1000
        monkeypatch.setattr("hf_paged.engine.worker.adapters.free_bytes", lambda device: needed - 1)
        with pytest.raises(MemoryError, match=f"takes {needed:,} bytes and cpu has {needed - 1:,} for adapt"):
            engine.add_adapter("y", tmp_path / "one")
        engine.remove_adapter("x")
        assert engine.stats()["adapters"]["bytes"] == before["bytes"]
        engine.check()


def test_weights_made_of_the_model_follow_it(tmp_path: Path) -> None:
    """PiSSA takes its beginning off the model's weights as they are: after a training step it is made anew."""
    saved = peft.get_peft_model(tiny_llama(), lora(init_lora_weights="pissa", r=2), "one")
    in_place(saved, "lora_B.one")
    saved.save_pretrained(tmp_path)
    model = tiny_llama()
    with Engine(model, block_size=4, num_blocks=100) as engine:
        engine.add_adapter("x", tmp_path / "one")
        before = ask(engine, prompt(1), adapter="x")
        other = tiny_llama()
        for each in (model, other):
            for layer in each.model.layers:
                layer.self_attn.q_proj.weight.data.mul_(-1.0)
        loaded = peft.PeftModel.from_pretrained(other, str(tmp_path / "one")).eval()
        assert ask(engine, prompt(1), adapter="x") == generated(loaded, prompt(1)) != before


@pytest.mark.parametrize("owner", ["model", "engine"])
def test_norms_that_peft_keeps_follow_the_weights(owner: str, tmp_path: Path) -> None:
    """DoRA by peft's modules under `DoraCaching`: after a write to the model's weights its norm is another."""
    products: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    peft_model = trained(lora(use_dora=True, modules_to_save=["mlp"], **products), third=products)
    peft_model.save_pretrained(tmp_path)
    model = peft_model if owner == "model" else tiny_llama()
    caching = peft.helpers.DoraCaching()
    caching(enabled=True)
    try:
        with Engine(model, block_size=4, num_blocks=100) as engine:
            if owner == "engine":
                engine.add_adapter("one", tmp_path / "one")
            assert engine.adapters()["one"].computed == "apart"
            before = ask(engine, prompt(0), adapter="one")
            for each in (peft_model, model)[: 1 if owner == "model" else 2]:
                with torch.no_grad():
                    for name, weight in each.named_parameters():
                        if "q_proj" in name and "lora" not in name:
                            weight.mul_(3.0)
            found = ask(engine, prompt(0), adapter="one")
    finally:
        caching(enabled=False)
    assert found == alone(peft_model, prompt(0), "one") != before


def test_a_kind_beside_the_adapters_of_a_peft_model(tmp_path: Path) -> None:
    """The model's own by kernels, one of its own by peft, one that was added; the model is trained meanwhile."""
    other_method("IA3", 1).save_pretrained(tmp_path)
    base = tiny_llama()
    model = peft.get_peft_model(base, lora(), "one")
    model.add_adapter("two", lora(**BLOCKS))
    model.eval()
    with Engine(model, block_size=4, num_blocks=100) as engine:
        engine.add_adapter("x", tmp_path / "one")
        assert list(model.peft_config) == ["one", "two"]  # beside the peft model, not in it
        wanted = ["one", "two", "x", None]
        expected = [alone(model, prompt(i), wanted[i]) for i in (0, 1)]
        expected += [generated(in_peft(tmp_path / "one"), prompt(2)), alone(model, prompt(3), None)]
        assert answers(engine, wanted) == expected
        with pytest.raises(ValueError, match="peft's own modules compute 'two', and 'x' is the engine's"):
            engine.submit(prompt(1), adapter=["two", "x"])
        with torch.no_grad():
            base.lm_head.weight.mul_(-1.0)
            other = in_peft(tmp_path / "one")
            other.get_base_model().lm_head.weight.mul_(-1.0)
        assert ask(engine, prompt(2), adapter="x") == generated(other, prompt(2)) != expected[2]
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach() * -1.0)
        assert ask(engine, prompt(2), adapter="x") == expected[2]


# ---- steps of all kinds


def test_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards of each adapter are captured as those of a model, and replayed after training in place."""
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    model = other_method("IA3")
    wanted = ["one", "two", None, "one"]
    with Engine(model, block_size=4, num_blocks=100) as engine:
        for _ in range(3):
            expected = [alone(model, prompt(i), each, max_new_tokens=12) for i, each in enumerate(wanted)]
            assert answers(engine, wanted, max_new_tokens=12) == expected
            in_place(model, "two")
        forwards = [each.runner.captured for each in apart_of(engine).by_slot.values()]
        assert len(forwards) == 2
        assert all(each is not None and each.captures.counts["replayed"] > 3 for each in forwards)
        assert engine.stats()["adapters"]["captured_apart"] >= 2
        assert "captured steps: " in repr(engine)


def test_recurrent_states() -> None:
    """Rows of a hybrid model have their states in slots that all forwards share; preempted ones come back."""
    torch.manual_seed(0)
    base = tiny("causal", config_class("causal", "lfm2")).eval()
    model = other_method("LOHA", base=base)
    wanted = ["one", None, "two", "one", "two", None]
    expected = [alone(model, prompt(i, 12), each, max_new_tokens=10) for i, each in enumerate(wanted)]
    with Engine(model, block_size=4, num_blocks=22, watermark=0.0) as engine:
        handles = [
            engine.submit(prompt(i, 12), max_new_tokens=10, do_sample=False, adapter=each)
            for i, each in enumerate(wanted)
        ]
        assert [tokens(handle) for handle in handles] == expected
        engine.check()


@pytest.mark.parametrize("layer", [EightBit, FourBit])
def test_quantized_layers(layer: Any) -> None:
    """By kernels' parts (products, DoRA, a saved head) and apart (IA3), two of each, over the same layers."""

    def quantized() -> Any:
        base = tiny_llama()
        for block in base.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(block.self_attn, name, layer(getattr(block.self_attn, name)))
        return base

    products: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    saved = lora(**products, modules_to_save=["lm_head"])
    kinds = [lora(**products, use_dora=True), saved, lora(**products), saved, lora(**products, use_dora=True)]
    model = trained(*kinds, third=products, model=quantized())
    other = peft.IA3Config(
        target_modules=["q_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
    )
    torch.manual_seed(2)
    apart = peft.get_peft_model(quantized(), other, "x").eval()
    wanted = [*NAMES[:6], None, "x"]
    expected = [alone(model, prompt(i), each) for i, each in enumerate(wanted[:-1])]
    expected.append(alone(apart, prompt(len(wanted) - 1), "x"))
    with Engine(model, block_size=4, num_blocks=200) as engine:
        engine.add_adapter("x", apart)
        assert answers(engine, wanted) == expected
        assert {engine.adapters()[name].computed for name in NAMES[:6]} == {"kernels"}
        assert engine.adapters()["x"].computed == "apart"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_prompts_with_pictures(mode: Any) -> None:
    """Adapters of the text model and of the encoder that peft computes, products and the model alone."""
    base = tiny("image", config_class("image", "llava")).eval()
    weights = {name: each.clone() for name, each in base.state_dict().items()}
    shown = with_pictures(base, rows=1)
    names = ["q_proj", "v_proj"]
    configs = [
        peft.IA3Config(target_modules=names, feedforward_modules=[], init_ia3_weights=False) for _ in range(2)
    ]
    torch.manual_seed(1)
    model = peft.get_peft_model(base, configs[0], "one")
    model.add_adapter("two", configs[1])
    plain = tiny("image", config_class("image", "llava"))
    plain.load_state_dict(weights)
    other = adapted(lora(target_modules=names), model=plain)
    call = {"max_new_tokens": 14, "do_sample": False}
    length = shown["input_ids"].shape[1]
    wanted = ["one", "two", None, "lora", "one"]
    expected = []
    for name in wanted:
        if name in ("one", "two"):
            model.set_adapter(name)
        with nullcontext() if name else model.disable_adapter():
            out = (other if name == "lora" else model.eval()).generate(**shown, **call)
        expected.append(out[0, length:].tolist())
    assert len(set(map(tuple, expected))) == 4
    options = {"max_batch_tokens": 40, "num_blocks": 40, "watermark": 0.0, "preemption": mode}
    with Engine(model, block_size=4, **options) as engine:
        state = peft.get_peft_model_state_dict(other, adapter_name="one")
        engine.add_adapter("lora", state, other.peft_config["one"])
        handles = [engine.submit(**shown, **call, adapter=name) for name in wanted]
        assert [tokens(handle) for handle in handles] == expected
        assert engine.stats()["adapters"]["forwards_apart"] > 0
        engine.check()


def test_logprobs_of_rows_apart() -> None:
    """Of prompts and answers, beside rows of kernels and of the model alone."""
    model = mixed()
    ids = prompt(4, 12)
    with Engine(model, block_size=4, num_blocks=200) as engine:
        wanted = ["two", None, "four", "one"]
        handles = [
            engine.submit(ids, **GREEDY, adapter=each, logprobs=2, prompt_logprobs=True) for each in wanted
        ]
        for name, handle in zip(wanted, handles, strict=True):
            output = handle.result()
            whole = torch.tensor([[*ids, *first(output)]])
            model.set_adapter(name or "one")
            with torch.no_grad(), nullcontext() if name else model.disable_adapter():
                scores = model(whole).logits[0].log_softmax(-1)
            expected = scores[:-1].gather(1, whole[0, 1:, None])[:, 0]
            found = [note.logprob for note in output.prompt_logprobs[1:]]
            found += [note.logprob for note in output.sequences[0].logprobs]
            torch.testing.assert_close(torch.tensor(found), expected, atol=2e-4, rtol=0)


def test_deterministic_algorithms() -> None:
    """No operation of a step with adapters of any kind is one that torch refuses then."""
    configs = [lora(), lora(use_dora=True), lora(modules_to_save=["lm_head"], **BLOCKS), lora(lora_bias=True)]
    tokens_of = lora(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 6, 7]})
    model = trained(*configs, tokens_of)
    wanted = [*NAMES[:5], None, "three"]
    expected = [alone(model, prompt(i), each) for i, each in enumerate(wanted)]
    torch.use_deterministic_algorithms(True)
    try:
        with Engine(model, block_size=4, num_blocks=200) as engine:
            assert answers(engine, wanted) == expected
    finally:
        torch.use_deterministic_algorithms(False)


OF_LAYERS = sorted(
    {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    - {"LORA", "PROMPT_TUNING", "P_TUNING", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "CARTRIDGE"}
    - {"ADAMSS", "SHADOW", "XLORA"}  # docs/adapters.md says why these cannot be tried
    - {"ADALORA"}  # peft has one of it that is not for inference alone
    - {"ADAPTION_PROMPT"}  # nothing may be beside these in a peft model
)
OF_LORA: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "biases of products": {"lora_bias": True},
    "block-diagonal": BLOCKS,
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved": {"modules_to_save": ["lm_head", "norm"]},
    "trained tokens": {"trainable_token_indices": {"embed_tokens": [5, 6, 7, 8]}},
    "VeLoRA": VELORA,
}
"""The kinds of docs/adapters.md, beside virtual tokens, which tests/test_model_adapters_virtual.py has."""


@settings(max_examples=examples(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([*OF_LAYERS, *OF_LORA]), st.integers(0, 50))
def test_two_of_any_kind_beside_products_and_the_model(kind: str, seed: int) -> None:
    """One engine, each request with the tokens of peft alone on its adapter."""
    if kind in OF_LORA:
        model = trained(lora(**OF_LORA[kind]), lora(**OF_LORA[kind]), third={"target_modules": ["k_proj"]})
    else:
        model = other_method(kind)
    other = adapted(lora(r=4))
    wanted = ["one", "product", None, "two", "one"]
    ids = [prompt(seed + i) for i in range(len(wanted))]
    task: dict[str, Any] = {"task_ids": torch.tensor([1])} if kind == "POLY" else {}
    expected = [
        alone(other, each, "one") if name == "product" else alone(model, each, name, **(task if name else {}))
        for name, each in zip(wanted, ids, strict=True)
    ]
    with Engine(model, block_size=4, num_blocks=200) as engine:
        state = peft.get_peft_model_state_dict(other, adapter_name="one")
        engine.add_adapter("product", state, lora(r=4))
        handles = [
            engine.submit(each, **GREEDY, adapter=name, task_ids=1 if task and name in NAMES else None)
            for name, each in zip(wanted, ids, strict=True)
        ]
        assert [tokens(handle) for handle in handles] == expected, kind
        engine.check()


def test_an_encoder_decoder() -> None:
    """Its encoder is the adapter's, too."""
    torch.manual_seed(0)
    layers: dict[str, Any] = {"target_modules": ["q", "v", "wi"], "feedforward_modules": ["wi"]}
    configs = [peft.IA3Config(**layers, task_type="SEQ_2_SEQ_LM", init_ia3_weights=False) for _ in range(2)]
    model: Any = peft.get_peft_model(build(BY_NAME["t5"]), configs[0], "one")
    model.add_adapter("two", configs[1])
    model.eval()
    wanted = ["one", None, "two"]
    expected = []
    for i, each in enumerate(wanted):
        with nullcontext() if each else model.disable_adapter():
            if each:
                model.set_adapter(each)
            out = model.generate(input_ids=torch.tensor([prompt(i)]), **GREEDY)
        expected.append(out[0, 1:].tolist())
    with Engine(model, block_size=4, num_blocks=100) as engine:
        assert answers(engine, wanted) == expected


@settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_requests_of_two_kinds_under_pressure(data: st.DataObject) -> None:
    """Requests come at any time, are cancelled and give way: each has the tokens of its adapter alone."""
    model = under_pressure()
    names = [None, "one", "two", "three", "four"]
    options = {
        "num_blocks": data.draw(st.integers(12, 20)),
        "max_adapter_forwards": data.draw(st.integers(1, 2)),
        "max_batch_tokens": data.draw(st.sampled_from([6, 16, 64])),
        "preemption": data.draw(st.sampled_from(["swap", "recompute"])),
    }
    with Engine(model, block_size=4, watermark=0.0, **options) as engine:
        asked = []
        for i in range(8):
            name = data.draw(st.sampled_from(names))
            seed = data.draw(st.integers(0, 3))
            handle = engine.submit(prompt(seed, 13), max_new_tokens=9, do_sample=False, adapter=name)
            asked.append((handle, seed, name))
            for _ in range(data.draw(st.integers(0, 3))):
                engine.step()
            if data.draw(st.integers(0, 5)) == 0:
                asked.pop(data.draw(st.integers(0, i)) % len(asked))[0].cancel()
            engine.check()
        for handle, seed, name in asked:
            assert tokens(handle) == alone(model, prompt(seed, 13), name, max_new_tokens=9)
        engine.check()


@functools.cache
def under_pressure() -> Any:
    return mixed()


def test_a_hook_of_an_object_that_changes() -> None:
    """A twin has the user's hooks with their objects, not with copies of these."""

    class Steering:
        scale = 1.0

        def hook(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            return out * self.scale

    model, steering = other_method("IA3"), Steering()
    model.get_base_model().model.layers[0].mlp.register_forward_hook(steering.hook)
    with Engine(model, block_size=4, num_blocks=100) as engine:
        for steering.scale in (1.0, 0.2):
            assert ask(engine, prompt(1), adapter="one") == alone(model, prompt(1), "one")
