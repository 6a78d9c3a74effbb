"""Many adapters in one engine: every request has the tokens of peft alone on its adapter."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, alone, ask, first, prompt, tokens
from adapters import adapted, lora
from cases import examples
from families import BY_NAME, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import load
from pictures import with_pictures
from tiny import build as tiny
from tiny import config_class
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_paged import Engine
from hf_paged.engine.worker.check_policy import WeightsChanged
from hf_paged.model.adapters import LoraLayers
from hf_paged.model.adapters.content import AdapterContents


@pytest.fixture
def model() -> Any:
    return adapted(lora(), lora(r=3, use_rslora=True), lora(r=24, target_modules=["q_proj", "down_proj"]))


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    made = Engine(model, block_size=4, num_blocks=200, max_adapters=2)
    yield made
    made.check()
    made.close()


def test_each_request_has_its_own(model: Any, engine: Engine) -> None:
    """A mixed batch, more adapters than places on the device, and the base whatever is active (C33)."""
    wanted = ["one", None, "two", "three", "__base__", ("one", "three"), "two"]
    expected = [
        alone(model, prompt(i), None if each == "__base__" else each) for i, each in enumerate(wanted)
    ]
    handles = [
        engine.submit(prompt(i), max_new_tokens=NEW, do_sample=False, adapter=each)
        for i, each in enumerate(wanted)
    ]
    assert [tokens(handle) for handle in handles] == expected
    assert len(set(map(tuple, expected))) == len(expected)


def test_adapters_without_memory_wait_for_others(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device with memory for one adapter: a request of another waits, and none ends with an error (C33)."""
    there: weakref.WeakSet[Any] = weakref.WeakSet()
    bring = AdapterContents.on_device

    def on_device(self: Any, names: Any, device: Any) -> Any:
        if there:
            raise torch.OutOfMemoryError("CUDA out of memory")
        adapter = bring(self, names, device)
        there.add(adapter)
        return adapter

    monkeypatch.setattr(AdapterContents, "on_device", on_device)
    wanted = ["one", "two", None, "three", "one", "two"]
    handles = [
        engine.submit(prompt(i), max_new_tokens=NEW, do_sample=False, adapter=each or "__base__")
        for i, each in enumerate(wanted)
    ]
    assert [tokens(each) for each in handles] == [
        alone(model, prompt(i), name) for i, name in enumerate(wanted)
    ]
    assert len([each for each in caplog.messages if "has no memory for the adapter" in each]) == 1


def test_what_is_active_is_the_default(model: Any, engine: Engine) -> None:
    """A request that names none has what generate() has at that moment."""
    ids = prompt(1)
    assert ask(engine, ids) == alone(model, ids, "one")
    model.set_adapter("two")
    assert ask(engine, ids) == alone(model, ids, "two")
    with model.disable_adapter():
        assert ask(engine, ids) == alone(model, ids, None)
    assert ask(engine, ids, adapter="one") == alone(model, ids, "one")


def test_switching_while_requests_run_changes_none_of_them(model: Any, engine: Engine) -> None:
    ids = prompt(2)
    handle = engine.submit(ids, max_new_tokens=NEW, do_sample=False)
    engine.step()
    model.set_adapter("three")
    assert tokens(handle) == alone(model, ids, "one")


def test_requests_that_come_together_are_looked_at_once(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout submits its prompts to an idle engine, and each has what is active then."""
    looks: list[Any] = []
    look = LoraLayers.of

    def layers(model: Any) -> LoraLayers:
        looks.append(model)
        return look(model)

    monkeypatch.setattr(LoraLayers, "of", layers)
    ids = [prompt(i) for i in range(5)]
    names = ["one", "two", "two", "three", "one"]
    handles = []
    for each, name in zip(ids, names, strict=True):
        model.set_adapter(name)
        handles.append(engine.submit(each, max_new_tokens=NEW, do_sample=False))
    assert len(looks) == 1
    assert list(map(tokens, handles)) == [alone(model, *each) for each in zip(ids, names, strict=True)]


def test_adapters_that_come_between_two_requests_are_seen() -> None:
    plain = build(BY_NAME["llama"]).eval()
    with Engine(plain, block_size=4) as engine:
        engine.submit(prompt(2), max_new_tokens=NEW, do_sample=False)
        late = peft.get_peft_model(plain, lora(), "one").eval()
        assert ask(engine, prompt(1)) == alone(late, prompt(1), "one")


@pytest.mark.parametrize("form", ["folder", "state dict", "peft model"])
def test_a_plain_model_takes_adapters(model: Any, form: str, tmp_path: Path) -> None:
    """From a folder, a state dict or another peft model; no module of the model changes."""
    torch.manual_seed(0)
    plain = build(BY_NAME["llama"]).eval()
    names = [name for name, _ in plain.named_modules()]
    with Engine(plain, block_size=4) as engine:
        before = ask(engine, prompt(3))
        for name in ("one", "two"):
            if form == "folder":
                model.save_pretrained(tmp_path)
                folder = tmp_path / name
                engine.add_adapter(name, folder if folder.exists() else tmp_path)
            elif form == "state dict":
                state = peft.get_peft_model_state_dict(model, adapter_name=name)
                engine.add_adapter(name, state, model.peft_config[name])
            else:
                engine.add_adapter(name, model)
        assert [ask(engine, prompt(3), adapter=each) for each in ("one", "two", None)] == [
            alone(model, prompt(3), each) for each in ("one", "two", None)
        ]
        assert ask(engine, prompt(3)) == before
        assert {name: info.owner for name, info in engine.adapters().items()} == {
            "one": "engine",
            "two": "engine",
        }
        engine.remove_adapter("one")
        assert list(engine.adapters()) == ["two"]
        engine.check()
    assert [name for name, _ in plain.named_modules()] == names
    assert all("forward" not in module.__dict__ for module in plain.modules())


def test_beams_samples_and_shared_prefixes(model: Any, engine: Engine) -> None:
    """Adapters beside every mode; a prefix is shared under one adapter and never across two (C24)."""
    ids = prompt(4, 21)
    both = {"num_beams": 3, "num_return_sequences": 2}
    found = {
        each: engine.generate([ids], max_new_tokens=NEW, adapter=each, do_sample=False, **both)[0]
        for each in ("one", "two", None)
    }
    for each, output in found.items():
        expected = alone(model, ids, each, **both)
        assert first(output) == expected
    again = engine.generate([ids] * 2, max_new_tokens=NEW, do_sample=False, adapter="one")
    other = engine.generate([ids], max_new_tokens=NEW, do_sample=False, adapter="three")
    assert again[0].cached_tokens >= 20
    assert other[0].cached_tokens == 0


def test_preempted_requests_come_back_with_theirs(model: Any) -> None:
    """Swapped or computed again, in a pool for half of them."""
    wanted = ["one", "two", None, "three", "one", "two"]
    expected = [alone(model, prompt(i, 12), each, max_new_tokens=14) for i, each in enumerate(wanted)]
    for mode in ("swap", "recompute"):
        with Engine(
            model, block_size=4, num_blocks=17, max_adapters=2, preemption=mode, watermark=0.0
        ) as engine:
            handles = [
                engine.submit(prompt(i, 12), max_new_tokens=14, do_sample=False, adapter=each)
                for i, each in enumerate(wanted)
            ]
            assert [tokens(handle) for handle in handles] == expected
            assert engine.stats()["preemptions"] > 0
            engine.check()


def test_c33_a_group_without_a_slot_delays_no_other(model: Any) -> None:
    """While one place is taken, the base and the same adapter overtake; the one that waits keeps its place."""
    with Engine(model, block_size=4, max_adapters=1, max_batch_sequences=8) as engine:
        options = {"do_sample": False, "max_new_tokens": NEW}
        first = engine.submit(prompt(0), do_sample=False, max_new_tokens=4 * NEW, adapter="one")
        engine.step()
        waits = engine.submit(prompt(1), **options, adapter="two")
        base = engine.submit(prompt(2), **options, adapter=None)
        same = engine.submit(prompt(3), **options, adapter="one")
        while not (base.done and same.done):
            engine.step()
        assert not waits.done
        assert not first.done
        assert engine.stats()["waiting"] == 1
        assert tokens(waits) == alone(model, prompt(1), "two")
        assert first.done


def test_an_adapter_trained_in_place_ends_only_its_own(model: Any, engine: Engine) -> None:
    """Others go on; later requests have the new weights, and no block of the old ones is found (C24)."""
    ids = prompt(5, 17)
    asks = {
        each: engine.submit(ids, max_new_tokens=NEW, do_sample=False, adapter=each) for each in ("one", "two")
    }
    engine.step()
    engine.step()
    expected = alone(model, ids, "one")
    old = alone(model, ids, "two")
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_B") and "two" in module.lora_B:
                module.lora_B["two"].weight.mul_(-2.0)
    assert tokens(asks["one"]) == expected
    with pytest.raises(WeightsChanged, match="adapter 'two' have changed"):
        _raise(asks["two"])
    new = engine.generate([ids], max_new_tokens=NEW, do_sample=False, adapter="two")[0]
    assert first(new) == alone(model, ids, "two") != old
    assert new.cached_tokens == 0
    kept = engine.generate([ids], max_new_tokens=NEW, do_sample=False, adapter="one")[0]
    assert kept.cached_tokens >= 16


def _raise(handle: Any) -> None:
    error = handle.result().error
    assert error is not None
    raise error


@pytest.mark.parametrize("fused", [False, True], ids=["each", "fused"])
def test_an_optimizer_step_ends_only_its_own(model: Any, engine: Engine, fused: bool) -> None:
    """Trainer's optimizer is a fused one, which writes without torch's counting (C24)."""
    ids = prompt(6, 17)
    one, two = [
        engine.submit(ids, max_new_tokens=NEW, do_sample=False, adapter=each) for each in ("one", "two")
    ]
    engine.step()
    engine.step()
    expected = alone(model, ids, "one")
    parameters = [each for name, each in model.named_parameters() if ".one." in name or ".two." in name]
    for name, each in model.named_parameters():
        each.grad = torch.ones_like(each) if ".two." in name else None
    torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()
    assert tokens(one) == expected
    with pytest.raises(WeightsChanged, match="adapter 'two' have changed"):
        _raise(two)
    output = engine.generate([ids], max_new_tokens=NEW, do_sample=False, adapter="two")[0]
    assert first(output) == alone(model, ids, "two")
    assert output.cached_tokens == 0


def test_weights_written_through_data_while_idle(model: Any, engine: Engine) -> None:
    """torch counts no such write: the content is compared (C24)."""
    ids = prompt(6, 17)
    ask(engine, ids, adapter="two")
    ask(engine, ids, adapter="one")
    model.base_model.model.model.layers[0].self_attn.v_proj.lora_B["two"].weight.data.add_(0.5)
    assert ask(engine, ids, adapter="two") == alone(model, ids, "two")
    output = engine.generate([ids], max_new_tokens=NEW, do_sample=False, adapter="one")[0]
    assert output.cached_tokens >= 16


def test_the_same_name_again_is_another_adapter(model: Any) -> None:
    """Removed and added with other weights: nothing of the old one is found; with equal ones all of it is."""
    torch.manual_seed(0)
    plain = build(BY_NAME["llama"]).eval()
    ids = prompt(7, 17)
    state = {name: peft.get_peft_model_state_dict(model, adapter_name=name) for name in ("one", "two")}
    with Engine(plain, block_size=4) as engine:
        engine.add_adapter("x", state["one"], model.peft_config["one"])
        assert ask(engine, ids, adapter="x") == alone(model, ids, "one")
        with pytest.raises(ValueError, match="there is an adapter 'x' already"):
            engine.add_adapter("x", state["two"], model.peft_config["two"])
        engine.remove_adapter("x")
        engine.add_adapter("x", state["two"], model.peft_config["two"])
        output = engine.generate([ids], max_new_tokens=NEW, do_sample=False, adapter="x")[0]
        assert first(output) == alone(model, ids, "two")
        assert output.cached_tokens == 0
        engine.add_adapter("y", state["one"], model.peft_config["one"])
        assert engine.generate([ids], max_new_tokens=NEW, adapter="y")[0].cached_tokens >= 16


def test_removing_waits_or_is_refused(model: Any) -> None:
    torch.manual_seed(0)
    with Engine(build(BY_NAME["llama"]).eval(), block_size=4) as engine:
        engine.add_adapter(
            "x",
            peft.get_peft_model_state_dict(model, adapter_name="one"),
            model.peft_config["one"],
        )
        handle = engine.submit(prompt(8), max_new_tokens=NEW, do_sample=False, adapter="x")
        engine.step()
        assert engine.adapters()["x"].requests == 1
        with pytest.raises(ValueError, match=r"1 requests have the adapter 'x'.*when='idle'"):
            engine.remove_adapter("x")
        engine.remove_adapter("x", when="idle")
        with pytest.raises(ValueError, match="being removed"):
            engine.submit(prompt(9), adapter="x")
        assert tokens(handle) == alone(model, prompt(8), "one")
        engine.step()
        assert engine.adapters() == {}
        with pytest.raises(ValueError, match="there is no adapter 'x'; give it to the engine by add_adapter"):
            engine.submit(prompt(9), adapter="x")
        assert engine.stats()["adapters"]["on_device"] == 0


def test_adapters_for_other_models_are_refused(model: Any, engine: Engine) -> None:
    state = peft.get_peft_model_state_dict(model, adapter_name="one")
    key = next(iter(state))
    with pytest.raises(ValueError, match="for another model"):
        engine.add_adapter("x", {key.replace("layers.0", "layers.9"): state[key]}, lora())
    wrong = {name: torch.zeros(8, 5) if "lora_A" in name else tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"inputs and .* outputs.*for another model"):
        engine.add_adapter("x", wrong, lora())
    with pytest.raises(ValueError, match="the scaling of its weights"):
        engine.add_adapter("x", state)
    with pytest.raises(ValueError, match=r"no adapter 'on'; did you mean 'one'\?"):
        engine.submit(prompt(1), adapter="on")
    with pytest.raises(ValueError, match="is the peft model's; delete it there"):
        engine.remove_adapter("one")


def test_without_peft_an_adapter_says_what_to_install(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"adapters need peft: pip install 'hf_paged\[peft\]'"):
        engine.add_adapter("further", "a/folder")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5", "gemma3", "qwen3"])
def test_families(family: str) -> None:
    """Linear and conv1d layers, routers, an encoder-decoder, one by one or in one row."""
    targets = {"gpt2": ["c_attn", "c_proj"], "t5": ["q", "v", "wi", "wo"]}.get(
        family, ["q_proj", "v_proj", "o_proj"]
    )
    fan = {"fan_in_fan_out": True} if family == "gpt2" else {}
    configs = [lora(target_modules=targets, **fan), lora(r=4, target_modules=targets[:1], **fan)]
    model = adapted(*configs, family=family)
    wanted = ["one", "two", None, "one"]
    with Engine(model, block_size=4) as engine:
        handles = [
            engine.submit(prompt(i), max_new_tokens=NEW, do_sample=False, adapter=each)
            for i, each in enumerate(wanted)
        ]
        found = [tokens(handle) for handle in handles]
    for i, each in enumerate(wanted):
        if family == "t5":
            call = {"input_ids": torch.tensor([prompt(i)]), "max_new_tokens": NEW, "do_sample": False}
            if each is None:
                with model.disable_adapter():
                    out = model.generate(**call)
            else:
                model.set_adapter(each)
                out = model.generate(**call)
            assert found[i] == out[0, 1:].tolist()
        else:
            assert found[i] == alone(model, prompt(i), each)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "mllama"])
def test_pictures(family: str) -> None:
    """Adapters of a tower change what it makes of a picture: each request's own, and the base's (C24)."""
    torch.manual_seed(0)
    model = peft.get_peft_model(
        tiny("image", config_class("image", family)), lora(target_modules="all-linear"), adapter_name="one"
    )
    model.add_adapter("two", lora(r=3, target_modules="all-linear"))
    model.eval()
    shown = with_pictures(model.get_base_model(), rows=1)
    call = {**shown, "max_new_tokens": NEW, "do_sample": False}
    length = shown["input_ids"].shape[1]
    expected = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        expected[name] = model.generate(**call)[0, length:].tolist()
    with model.disable_adapter():
        expected[None] = model.generate(**call)[0, length:].tolist()
    assert len(set(map(tuple, expected.values()))) == 3
    with Engine(model, block_size=4) as engine:
        assert ask(engine, **call) == expected["two"]
        handles = [(each, engine.submit(**call, adapter=each)) for each in (None, "one", "two", "one")]
        for each, handle in handles:
            assert tokens(handle) == expected[each]
        engine.check()


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mix_of_requests(data: st.DataObject, model: Any) -> None:
    """Random adapters, prompts, prefixes, block sizes, cancels, additions and removals."""
    size = data.draw(st.sampled_from([1, 4, 16]))
    slots = data.draw(st.integers(1, 3))
    state = peft.get_peft_model_state_dict(model, adapter_name="two")
    shared = prompt(50, size * 3)
    with Engine(model, block_size=size, num_blocks=4096 // (8 * size), max_adapters=slots) as engine:
        open_: list[tuple[Any, list[int], Any]] = []
        added = False
        for i in range(data.draw(st.integers(2, 8))):
            action = data.draw(st.sampled_from(["ask", "ask", "ask", "step", "cancel", "add", "remove"]))
            if action == "ask":
                names = ["one", "two", "three", None, ("one", "two")] + (["x"] if added else [])
                each = data.draw(st.sampled_from(names))
                ids = shared[: data.draw(st.integers(1, len(shared)))] + prompt(
                    i, data.draw(st.integers(0, 5))
                )
                handle = engine.submit(ids, max_new_tokens=NEW, do_sample=False, adapter=each)
                open_.append((handle, ids, "two" if each == "x" else each))
            elif action == "step":
                engine.step()
            elif action == "cancel" and open_:
                open_.pop()[0].cancel()
            elif action == "add" and not added:
                engine.add_adapter("x", state, model.peft_config["two"])
                added = True
            elif action == "remove" and added:
                engine.remove_adapter("x", when="idle")
                engine.generate([prompt(0, 2)], max_new_tokens=30, adapter=None)
                added = "x" in engine.adapters()
                if added:
                    continue
        for handle, ids, each in open_:
            assert tokens(handle) == alone(model, ids, each)
        engine.check()


def test_adapters_that_come_to_an_idle_engine(model: Any) -> None:
    """The engine was made on the plain model; what is active at the first request afterwards counts."""
    plain = build(BY_NAME["llama"]).eval()
    ids = prompt(1)
    with Engine(plain, block_size=4) as engine:
        before = ask(engine, ids)
        late = peft.get_peft_model(plain, lora(), "one").eval()
        found = ask(engine, ids)
        assert found == alone(late, ids, "one") != before
        late.unload()
        assert ask(engine, ids) == before


def test_an_active_alora_beside_what_only_peft_computes() -> None:
    """It begins at its invocation tokens, whoever computes the others."""
    invoked = lora(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
    made = adapted(invoked, lora(init_lora_weights="mica"))
    ids = [*prompt(1), 5, 6, 7]
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = made.generate(input_ids=torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    with Engine(made, block_size=4) as engine:
        assert ask(engine, ids) == expected
        made.set_adapter("two")
        assert ask(engine, ids) == alone(made, ids, "two")
        assert ask(engine, ids, adapter="one") == expected


def test_experts_whose_weights_are_written_in_each_forward() -> None:
    """A twin of the model has parameters of its own for them."""
    made = adapted(lora(target_modules=[], target_parameters=["experts.gate_up_proj"]), family="mixtral")
    with Engine(made, block_size=4, num_blocks=100) as engine:
        for each in ("one", None):
            assert ask(engine, prompt(1), adapter=each) == alone(made, prompt(1), each)


def test_adaption_prompts_of_a_model_without_its_wrapper() -> None:
    """The active one is served; a request cannot choose, nor ask for the base beside it."""
    base = build(BY_NAME["llama"]).eval()
    made = peft.get_peft_model(
        base,
        peft.AdaptionPromptConfig(
            target_modules="self_attn", adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"
        ),
    ).eval()
    with torch.no_grad():
        for name, each in made.named_parameters():
            if "adaption" in name:
                each.add_(0.5)
    ids = prompt(1)
    expected = made.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[
        0, len(ids) :
    ]
    with Engine(made.get_base_model(), block_size=4) as engine:
        assert ask(engine, ids) == expected.tolist()
        with pytest.raises(ValueError, match=r"parts of the kind adaption_prompt\.AdaptedAttention"):
            engine.submit(ids, adapter=None)


def test_a_mixed_model_is_unwrapped() -> None:
    base = build(BY_NAME["llama"]).eval()
    made = peft.get_peft_model(base, lora(), "one", mixed=True)
    made.add_adapter("two", peft.LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False))
    made.set_adapter(["one", "two"])
    made.eval()
    ids = prompt(1)
    expected = made.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[
        0, len(ids) :
    ]
    with Engine(made, block_size=4) as engine:
        assert ask(engine, ids) == expected.tolist()


@pytest.mark.parametrize("wanted", [["one"], ["one", None, "two"]], ids=["one adapter", "mixed"])
def test_kernels_leave_layers_that_are_given_something_else(
    monkeypatch: pytest.MonkeyPatch, wanted: list[str | None]
) -> None:
    """A layer that is given each token twice: each adapter's rows run by themselves from then on."""
    monkeypatch.setattr("hf_paged.engine.worker.adapters.triton_package", lambda *_: load())

    def twice(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(torch.cat([inner, -inner], dim=1))[:, : hidden.shape[1]]

    monkeypatch.setattr(LlamaMLP, "forward", twice)
    model = adapted(lora(), lora(r=3))
    with Engine(model, block_size=4, num_blocks=60) as engine:
        handles = [
            engine.submit(prompt(i), max_new_tokens=NEW, do_sample=False, adapter=name)
            for i, name in enumerate(wanted)
        ]
        assert [tokens(handle) for handle in handles] == [
            alone(model, prompt(i), name) for i, name in enumerate(wanted)
        ]
        engine.check()
