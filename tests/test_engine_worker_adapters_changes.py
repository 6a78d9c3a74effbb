"""Adapters that change while requests wait or run: right tokens, or an error by name (C24)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, alone, ask, first, prompt, tokens
from adapters import adapted, lora
from captures import counts, drop, policy, reasons
from cases import examples, once_each
from engine_parts import checks_of, count_steps_only, eager_of, preempt, preempted, running
from families import BY_NAME, build
from kernel_cases import load
from processes import LIMIT
from tape import rerun

from hf_paged import Engine
from hf_paged.engine.worker.check_policy import WeightsChanged
from hf_paged.model.adapters.loading import HostAdapter
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return adapted(lora(), lora(r=3, use_rslora=True), lora(r=24, target_modules=["q_proj", "down_proj"]))


def plain() -> Any:
    torch.manual_seed(0)
    return build(BY_NAME["llama"]).eval()


def each_layer(model: Any, name: str, act: Callable[[Any], object]) -> None:
    for module in model.modules():
        if hasattr(module, "lora_B") and name in module.lora_B:
            act(module)


def error_of(handle: Any) -> str:
    error = handle.result().error
    assert error is not None
    return str(error)


# ---- between submit and the first step


def test_what_is_active_is_read_anew(model: Any) -> None:
    """Merged and unmerged, wrapped and unwrapped between steps: the next request has what is there."""
    one = alone(model, prompt(1), "one")
    with Engine(model, block_size=4) as engine:
        model.merge_adapter()
        assert ask(engine, prompt(1)) == one
        with pytest.raises(ValueError, match="merged into the model"):
            engine.submit(prompt(1), adapter="two")
        model.unmerge_adapter()
        assert ask(engine, prompt(1), adapter="two") == alone(model, prompt(1), "two")
        assert ask(engine, prompt(1)) == alone(model, prompt(1), "one")
    base = plain()
    with Engine(base, block_size=4) as engine:
        before = ask(engine, prompt(1))
        wrapped = peft.get_peft_model(base, lora(), adapter_name="one").eval()
        assert ask(engine, prompt(1)) == alone(wrapped, prompt(1), "one") != before
        wrapped.unload()
        assert ask(engine, prompt(1)) == before


def test_a_request_that_waits_is_not_computed_with_others(model: Any) -> None:
    """Adapters that cannot be chosen any more end the requests that chose them, the base too; later ones are
    right.
    """
    one = alone(model, prompt(1), "one")
    with Engine(model, block_size=4) as engine:
        handles = [engine.submit(prompt(1), **GREEDY, adapter=each) for each in ("two", None, "active")]
        model.merge_adapter(["one"])
        for handle in handles:
            error = error_of(handle)
            assert "'one' is merged" in error
            assert "submit it again" in error
        assert ask(engine, prompt(1)) == one


def test_a_kind_that_comes_while_requests_wait_concerns_none_of_them(model: Any) -> None:
    wanted = ["two", None, "active"]
    expected = [alone(model, prompt(1), each) for each in ("two", None, "one")]
    with Engine(model, block_size=4) as engine:
        handles = [engine.submit(prompt(1), **GREEDY, adapter=each) for each in wanted]
        model.add_adapter("d", lora(init_lora_weights="mica"))
        model.eval()
        assert [tokens(handle) for handle in handles] == expected
        assert ask(engine, prompt(1), adapter="d") == alone(model, prompt(1), "d")


def test_what_is_active_changes_before_the_first_step() -> None:
    """A request is computed with what was active when it came, by kernels or by peft's modules."""
    model = adapted(lora(init_lora_weights="mica"), lora())
    with Engine(model, block_size=4) as engine:
        handles = [engine.submit(prompt(1), **GREEDY)]
        model.set_adapter("two")
        handles.append(engine.submit(prompt(1), **GREEDY))
        with model.disable_adapter():
            handles.append(engine.submit(prompt(1), **GREEDY))
        expected = [alone(model, prompt(1), each) for each in ("one", "two", None)]
        assert [tokens(handle) for handle in handles] == expected


def test_a_deleted_adapter_ends_its_requests(model: Any) -> None:
    """None of its requests goes on as the base, whether it waited or ran; others go on."""
    with Engine(model, block_size=4, max_batch_sequences=2) as engine:
        handles = [engine.submit(prompt(i), **GREEDY, adapter=each) for i, each in enumerate(("two", "one"))]
        waits = engine.submit(prompt(3), max_new_tokens=1, do_sample=False, adapter="two")
        engine.step()
        engine.step()
        model.delete_adapter("two")
        assert "'two' have changed" in error_of(handles[0])
        assert "'two' was deleted while a request waited" in error_of(waits)
        assert tokens(handles[1]) == alone(model, prompt(1), "one")
        assert ask(engine, prompt(3), adapter=None) == alone(model, prompt(3), None)


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_merged_and_disabled(model: Any, waits: bool) -> None:
    """peft's layers unmerge it in their next forward, which is no change under a running request."""
    base, one = alone(model, prompt(1), None), alone(model, prompt(1), "one")
    with Engine(model, block_size=4) as engine:
        model.merge_adapter()
        with model.disable_adapter():
            handle = engine.submit(prompt(1), **GREEDY)
            if waits:
                model.merge_adapter()
            assert tokens(handle) == base
        assert ask(engine, prompt(1)) == one != base


# ---- while requests wait in the middle


@pytest.mark.parametrize("change", ["scale", "replace", "in place"])
def test_a_pause_lets_adapters_change(model: Any, change: str) -> None:
    """The content of a slot is brought up to date: a scale, other tensors, a sum of several adapters."""

    def act(layer: Any) -> None:
        linear = layer.lora_B["two"]
        if change == "scale":
            layer.scaling["two"] *= -3
        elif change == "replace":
            layer.lora_B["two"] = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
        else:
            linear.weight.data.mul_(-3)

    wanted: list[Any] = ["two", ["one", "two"]]
    with Engine(model, block_size=4) as engine:
        handles = [engine.submit(prompt(3, 13), **GREEDY, adapter=each) for each in wanted]
        for _ in range(3):
            engine.step()
        engine.pause()
        known = [list(group.leader.tokens) for group in preempted(engine)]
        each_layer(model, "two", act)
        engine.resume()
        for handle, each, ids in zip(handles, wanted, known, strict=True):
            rest = alone(model, ids, each, max_new_tokens=13 + NEW - len(ids))
            assert [*prompt(3, 13), *tokens(handle)] == ids + rest


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_mixes_no_weights(model: Any, mode: Any) -> None:
    with Engine(model, block_size=4, preemption=mode) as engine:
        handle = engine.submit(prompt(1), **GREEDY, adapter="two")
        other = engine.submit(prompt(2), **GREEDY, adapter="one")
        for _ in range(3):
            engine.step()
        preempt(engine, next(group for group in running(engine) if group.request.adapter == ("two",)))
        with torch.no_grad():
            each_layer(model, "two", lambda layer: layer.lora_B["two"].weight.mul_(-3))
        assert "'two' have changed" in error_of(handle)
        assert tokens(other) == alone(model, prompt(2), "one")


def test_fused_optimizers_are_noticed(model: Any) -> None:
    """Torch counts none of their writes."""
    with Engine(model, block_size=4) as engine:
        handles = [engine.submit(prompt(1), **GREEDY, adapter=each) for each in ("one", "two")]
        engine.step()
        engine.step()
        weights = [weight for name, weight in model.named_parameters() if ".two." in name]
        for weight in weights:
            weight.requires_grad_(True)
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(weights, lr=0.3, fused=True).step()
        assert "'two' have changed" in error_of(handles[1])
        assert tokens(handles[0]) == alone(model, prompt(1), "one")
        assert ask(engine, prompt(1), adapter="two") == alone(model, prompt(1), "two")


def test_a_request_that_ends_unseen_is_looked_at(model: Any) -> None:
    """Another thread writes between two checks, and the request ends before the next one."""
    with Engine(model, block_size=4) as engine:
        count_steps_only(engine)
        handle = engine.submit(prompt(1), **GREEDY, adapter="two")
        steps = 0

        def write(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == 3:
                with torch.no_grad():
                    each_layer(model, "two", lambda layer: layer.lora_B["two"].weight.mul_(-3))

        hook = model.get_base_model().model.norm.register_forward_hook(write)
        checks_of(engine).mark_forward = lambda: None  # as if it were the thread's doing
        error = handle.result().error
        hook.remove()
        assert isinstance(error, WeightsChanged)


# ---- failed loads


def test_a_failed_load_ends_its_request_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, and another adapter's request behind it."""
    kept = HostAdapter.copy_to
    fails = True

    def once_out_of_memory(adapter: HostAdapter, device: torch.device) -> Any:
        nonlocal fails
        if fails:
            fails = False
            raise torch.OutOfMemoryError("on purpose")
        return kept(adapter, device)

    monkeypatch.setattr(HostAdapter, "copy_to", once_out_of_memory)
    with Engine(plain(), block_size=4, max_adapters=1) as engine:
        for name in ("one", "two"):
            engine.add_adapter(name, model)
        handles = [engine.submit(prompt(1), **GREEDY, adapter=each) for each in ("one", "two")]
        assert error_of(handles[0]) == "on purpose"
        assert tokens(handles[1]) == alone(model, prompt(1), "two")
        assert ask(engine, prompt(1), adapter="one") == alone(model, prompt(1), "one")
        engine.check()


def test_a_sum_that_cannot_be_made_anew(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter in a slot has changed, and there is no memory to follow it."""
    with Engine(model, block_size=4) as engine:
        ask(engine, prompt(1), adapter=["one", "two"])
        each_layer(model, "two", lambda layer: layer.lora_B["two"].weight.data.mul_(-3))

        def out_of_memory(adapters: Any) -> Any:
            raise torch.OutOfMemoryError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr("hf_paged.model.adapters.content.combine", out_of_memory)
            fails = engine.submit(prompt(1), **GREEDY, adapter=["one", "two"])
            base = engine.submit(prompt(1), **GREEDY, adapter=None)
            assert error_of(fails) == "on purpose"
            assert tokens(base) == alone(model, prompt(1), None)
        assert ask(engine, prompt(1), adapter=["one", "two"]) == alone(model, prompt(1), ["one", "two"])


# ---- adapters of the engine's own


def test_they_follow_the_model(model: Any) -> None:
    """peft wraps its layers, unwraps them, or the user has replaced a layer's forward."""
    expected = alone(model, prompt(1), "two")
    state = peft.get_peft_model_state_dict(model, adapter_name="two")
    config = model.peft_config["two"]
    with Engine(model, block_size=4) as engine:
        engine.add_adapter("x", state, config)
        assert ask(engine, prompt(1), adapter="x") == expected
        model.unload()
        assert ask(engine, prompt(1), adapter="x") == expected
        wrapped = peft.get_peft_model(engine.model, lora(), adapter_name="w").eval()
        assert ask(engine, prompt(1), adapter="x") == expected
        assert ask(engine, prompt(1)) == alone(wrapped, prompt(1), "w")
    base = plain()
    layer = base.model.layers[0].self_attn.q_proj
    own = layer.forward
    layer.forward = lambda x: own(x)
    replaced = layer.forward
    with Engine(base, block_size=4) as engine:
        engine.add_adapter("x", state, config)
        assert ask(engine, prompt(1), adapter="x") == expected
    assert layer.forward is replaced


def test_one_that_leaves_goes_with_its_last_request(model: Any) -> None:
    """Whoever drives, and without a further step."""
    with Engine(plain(), block_size=4) as engine:
        engine.add_adapter("one", model)
        engine.start()
        handle = engine.submit(prompt(1), max_new_tokens=60, do_sample=False, adapter="one")
        engine.remove_adapter("one", when="idle")
        handle.result()
        end = time.monotonic() + LIMIT
        while engine.adapters() and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.adapters() == {}


def test_what_is_no_name_is_refused(model: Any) -> None:
    with Engine(model, block_size=4) as engine:
        for wrong in (5, True, b"one", ["one", None], {"one": 1}):
            with pytest.raises(TypeError, match="expected the name of an adapter, a list of names or None"):
                engine.submit(prompt(1), adapter=wrong)  # type: ignore[arg-type]
        for name in ("active", "__base__", "", 5):
            with pytest.raises(ValueError, match="cannot name an adapter; give another text"):
                engine.add_adapter(name, model)  # type: ignore[arg-type]


def test_captured_steps_know_the_layers_that_adapters_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that comes again meets steps that were captured without it: they leave out the layers that
    only it changes, the head here.
    """
    made = adapted(lora(target_modules=["q_proj"]), lora(target_modules=["q_proj", "lm_head"]))
    monkeypatch.setattr("hf_paged.engine.worker.adapters.triton_package", lambda *_: load())
    policy(monkeypatch, pairs=0)
    options = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 12, "max_batch_sequences": 2}
    with Engine(plain(), **options) as engine:
        adapters = eager_of(engine).adapters
        assert adapters is not None

        def record(step: Callable[[], Any], pools: Any, devices: Any) -> Any:
            layers = adapters.layers

            def as_recorded() -> Any:
                with monkeypatch.context() as now:
                    now.setattr(adapters, "layers", layers)
                    return step()

            return rerun(as_recorded, pools, devices)

        monkeypatch.setitem(RECORDERS, "cpu", record)

        def add(name: str) -> None:
            state = peft.get_peft_model_state_dict(made, adapter_name=name, save_embedding_layers=False)
            engine.add_adapter(name, state, made.peft_config[name])

        def same(name: str) -> bool:
            ids = [prompt(seed, 17) for seed in range(4)]
            outputs = engine.generate(ids, adapter=name, **GREEDY)
            return [first(output) for output in outputs] == [alone(made, each, name) for each in ids]

        add("one")
        add("two")
        assert same("two")
        engine.remove_adapter("two")
        drop(engine)
        assert same("one")
        add("two")
        assert same("two")
        assert counts(engine)["replayed"] > 20, reasons(engine)


# ---- peft adds and deletes an adapter beside requests of others

TARGETS = (["k_proj"], ["o_proj", "down_proj"], ["q_proj", "up_proj"])
"""Layers of an adapter that comes later: without LoRA so far, or with."""


def change_at_random(chance: random.Random, model: Any, there: bool) -> bool:
    """Add "b", delete it, or set what is active; whether it is there afterwards."""
    what = chance.random()
    if what < 0.4 and not there:
        model.add_adapter("b", lora(r=chance.choice([2, 8]), target_modules=chance.choice(TARGETS)))
        return True
    if 0.4 <= what < 0.55 and there:
        model.delete_adapter("b")
        return False
    if 0.55 <= what < 0.7:
        model.set_adapter("b" if there else "one")
    return there


@pytest.mark.parametrize(("seed", "threaded"), once_each(range(examples(4)), [False, True]))
def test_an_adapter_that_comes_or_goes_concerns_its_own_requests_alone(seed: int, threaded: bool) -> None:
    """C24: on layers that had no LoRA so far, too, and under the engine's own thread."""
    chance = random.Random(seed)
    model = adapted(lora(target_modules=["q_proj", "v_proj"]), lora(r=3, target_modules=["q_proj"]))
    expected = {name: alone(model, prompt(1), name) for name in ("one", "two", None)}
    with Engine(model, block_size=4) as engine:
        if threaded:
            engine.start()
        asked = []
        there = False
        for _ in range(10):
            name = chance.choice(["one", "two", None])
            asked.append((name, engine.submit(prompt(1), adapter=name, **GREEDY)))
            for _ in range(0 if threaded else chance.randrange(3)):
                engine.step()
            there = change_at_random(chance, model, there)
            if there:
                handle = engine.submit(prompt(1), adapter="b", **GREEDY)
                handle.cancel()
        for name, handle in asked:
            assert tokens(handle) == expected[name]
        engine.check()


def test_a_new_adapter_is_served_beside_running_requests() -> None:
    """It has layers that no other adapter has, and its requests run in one step with the others'."""
    model = adapted(lora(target_modules=["q_proj"]))
    one = alone(model, prompt(1), "one")
    with Engine(model, block_size=4) as engine:
        first_of_one = engine.submit(prompt(1), adapter="one", **GREEDY)
        engine.step()
        model.add_adapter("b", lora(r=4, target_modules=["k_proj", "down_proj"]))
        of_b = engine.submit(prompt(2), adapter="b", **GREEDY)
        assert tokens(first_of_one) == one
        assert tokens(of_b) == alone(model, prompt(2), "b")


def test_changes_of_peft_wait_for_a_forward() -> None:
    """A layer in the making computes with the new adapter: no forward of another thread meets it."""
    model = adapted(lora(target_modules=["q_proj"]))
    base = model.get_base_model()
    with Engine(model, block_size=4) as engine:
        engine.generate([prompt(1)], max_new_tokens=1)
        memory = memory_of(base)
        done = threading.Event()

        def add() -> None:
            model.add_adapter("b", lora(r=4, target_modules=["k_proj"]))
            done.set()

        thread = threading.Thread(target=add)
        with memory.lock:
            thread.start()
            assert not done.wait(0.3)
            assert not hasattr(base.model.layers[0].self_attn.k_proj, "lora_A")
        thread.join()
        assert done.is_set()
