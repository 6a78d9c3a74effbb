"""A model that changes between requests and under them: what is noticed, and what is no change (C22, C24)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from engine_steps import new_tokens
from model_checks import make_unreadable
from tape import record
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import hf_paged
from hf_paged.engine import Engine
from hf_paged.engine.worker.check_policy import WeightsChanged
from hf_paged.model.rehearsal import RECORDERS

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("keep", [False, None, True])
def test_training_between_requests(model: Any, keep: bool | None) -> None:
    """An optimizer step, requests, another one, requests: no stale hit (C24), and the pools go or stay as
    asked.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = None
    with Engine(model, block_size=4, num_blocks=60, keep_pools=keep) as engine:
        for _ in range(2):
            outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
            assert [output.cached_tokens for output in outputs] == [0, 28]
            assert [answers(output) for output in outputs] == [alone(model, PROMPTS[3], **GREEDY)] * 2
            assert answers(outputs[0]) != before
            before = answers(outputs[0])
            model.train()
            ids = torch.tensor([PROMPTS[1]])
            model(input_ids=ids, labels=ids).loss.backward()
            assert bool(engine.stats()["blocks"]["full"]["bytes"]) is (keep is not False)
            optimizer.step()
            model.eval()
        hf_paged.release(model)
        assert not engine.stats()["blocks"]["full"]["bytes"]


def test_a_fused_optimizer_steps_under_requests(model: Any, engine: Engine) -> None:
    """C24: it writes where torch does not count; an optimizer of somebody else's parameters is nobody's
    business.
    """
    other = torch.optim.AdamW(
        [torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))], lr=0.1, fused=True
    )
    other.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    ids = torch.tensor([PROMPTS[1]])
    model(input_ids=ids, labels=ids).loss.backward()
    engine.submit(PROMPTS[3], max_new_tokens=40, do_sample=False)
    for _ in range(4):
        engine.step()
    other.step()
    engine.step()
    optimizer.step()
    late = engine.submit(PROMPTS[3], **GREEDY)
    with pytest.raises(RuntimeError, match="changed under 1 running"):
        engine.step()
    engine.pause()
    engine.resume()
    assert answers(late.result()) == alone(model, PROMPTS[3], **GREEDY)


def test_engines_have_one_hook_of_optimizers(model: Any) -> None:
    """It stays, and holds no engine. One may go while torch goes through the hooks."""
    engines = [Engine(model, block_size=4, num_blocks=60)]
    before = set(_global_optimizer_post_hooks)
    gone = []

    def drop(*_: Any) -> None:
        gone.append(weakref.ref(engines.pop()))
        gc.collect()

    hook = register_optimizer_step_post_hook(drop)
    engines.append(Engine(model, block_size=4, num_blocks=60))
    for engine in engines:
        engine.close()
    del engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.step()
    hook.remove()
    assert [each() for each in gone] == [None, None]
    assert set(_global_optimizer_post_hooks) == before


def _rows_exchanged(model: Any) -> None:
    data = model.model.layers[1].self_attn.k_proj.weight.data
    data[[3, 7]] = data[[7, 3]].clone()


CHANGES = {
    "two rows of a weight change places": _rows_exchanged,
    "a weight's data is another": lambda model: setattr(
        model.model.norm.weight,
        "data",
        model.model.norm.weight.data * torch.linspace(0.2, 2, model.config.hidden_size),
    ),
    "a setting of a layer": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out * 2
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_an_idle_engine_s_model(model: Any, engine: Engine, change: str) -> None:
    """C24: nobody begins with what was computed before; what stays the same is found again."""
    for cached in (0, 28):
        (output,) = engine.generate([PROMPTS[3]], **GREEDY)
        assert output.cached_tokens == cached
    CHANGES[change](model)
    for cached in (0, 28):
        (output,) = engine.generate([PROMPTS[3]], **GREEDY)
        assert output.cached_tokens == cached
        assert answers(output) == alone(model, PROMPTS[3], **GREEDY)


@pytest.mark.parametrize("how", ["forward", "hook"])
def test_a_layer_that_computes_with_what_is_outside_the_model(model: Any, engine: Engine, how: str) -> None:
    """C24: of a forward it is read; of a hook it may be anything by the time the engine is idle again."""
    strength = [1.0]
    projection = model.model.layers[0].mlp.down_proj
    if how == "hook":
        projection.register_forward_hook(lambda module, args, out: out * strength[0])
    else:
        stock = projection.forward
        projection.forward = lambda x: stock(x) * strength[0]
    for _ in range(3):
        for cached in (0, 0 if how == "hook" else 28):
            outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
            assert [output.cached_tokens for output in outputs] == [cached, 28]
            assert answers(outputs[0]) == alone(model, PROMPTS[3], **GREEDY)
        strength[0] *= 3.0


def test_a_model_that_cannot_be_read(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run at the same time share; what was cached before an idle engine may be anything."""
    make_unreadable(monkeypatch)
    for _ in range(2):
        outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
        assert [output.cached_tokens for output in outputs] == [0, 28]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_that_changes_its_dtype(model: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between requests `.to(dtype)` is a change like others: the pools are of the new dtype with the next
    request, or after a pause.
    """
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    with Engine(model, block_size=4, num_blocks=60, prefix_caching=True) as engine:
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            for _ in range(3):
                outputs = engine.generate(PROMPTS, **GREEDY)
                assert [answers(output) for output in outputs] == [
                    alone(model, prompt, **GREEDY) for prompt in PROMPTS
                ]
        handle = engine.submit(PROMPTS[3], **GREEDY)
        for _ in range(3):
            engine.step()
        engine.pause()
        model.to(torch.float64)
        engine.resume()
        assert answers(handle.result()) == alone(model, PROMPTS[3], **GREEDY)


def test_weights_that_change_under_requests(model: Any, engine: Engine) -> None:
    """An error as long as anybody holds what the old ones computed; pause() lets them change, and nobody
    loses a token.
    """
    handle = engine.submit(PROMPTS[3], max_new_tokens=10, do_sample=False)
    for _ in range(5):
        engine.step()
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    with pytest.raises(RuntimeError, match="weights have changed under 1 running"):
        engine.step()
    engine.pause()
    said = new_tokens(handle)
    assert engine.stats()["blocks"]["full"]["held"] == 0
    with pytest.raises(RuntimeError, match="paused"):
        engine.step()
    engine.resume()
    tokens = answers(handle.result())[0]
    assert tokens[: len(said)] == said
    assert (
        tokens[len(said) :]
        == alone(model, PROMPTS[3] + said, max_new_tokens=10 - len(said), do_sample=False)[0]
    )


def _scale(tuned: Any) -> None:
    for module in tuned.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] *= 3


OF_ADAPTERS: dict[str, Callable[[Any], object]] = {
    "switched": lambda tuned: tuned.set_adapter("second"),
    "disabled": lambda tuned: tuned.base_model.disable_adapter_layers(),
    "scaled": _scale,
    "deleted": lambda tuned: tuned.delete_adapter("first"),
}


UNDER_REQUESTS: dict[str, Callable[[Any], object]] = {
    "merged": lambda tuned: tuned.merge_adapter(),
    "setting": lambda tuned: setattr(tuned.base_model.model.model.layers[0].self_attn, "scaling", 0.9),
    "replaced": lambda tuned: setattr(tuned.base_model.model.model.layers[1], "mlp", torch.nn.Identity()),
}


@pytest.fixture
def tuned(llama: Any) -> Any:
    """A model with two adapters, the first of which is active."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    made = peft.get_peft_model(llama, config, adapter_name="first")
    made.add_adapter("second", config)
    return made.eval()


@pytest.mark.parametrize("change", OF_ADAPTERS)
def test_adapters_that_change_under_requests(tuned: Any, change: str) -> None:
    """C24: a request keeps the adapter that it came with, or ends if that is another; later ones find none of
    its blocks under another.
    """
    before = alone(tuned, PROMPTS[3], max_new_tokens=40, do_sample=False)
    with Engine(tuned, block_size=4, num_blocks=60) as engine:
        handle = engine.submit(PROMPTS[3], max_new_tokens=40, do_sample=False)
        for _ in range(5):
            engine.step()
        OF_ADAPTERS[change](tuned)
        late = engine.submit(PROMPTS[3], **GREEDY)
        assert answers(late.result()) == alone(tuned, PROMPTS[3], **GREEDY)
        if change in ("switched", "disabled"):
            assert answers(handle.result()) == before
        else:
            assert isinstance(handle.result().error, WeightsChanged)


@pytest.mark.parametrize("change", UNDER_REQUESTS)
def test_settings_that_change_under_requests(tuned: Any, change: str) -> None:
    """C24: blocks of one model must not be found under another, by requests that come while others run."""
    with Engine(tuned, block_size=4, num_blocks=60) as engine:
        engine.submit(PROMPTS[3], max_new_tokens=40, do_sample=False)
        for _ in range(5):
            engine.step()
        UNDER_REQUESTS[change](tuned)
        late = engine.submit(PROMPTS[3], **GREEDY)
        with pytest.raises(RuntimeError, match="changed under 1 running"):
            engine.step()
        engine.pause()
        engine.resume()
        assert answers(late.result()) == alone(tuned, PROMPTS[3], **GREEDY)


def test_what_is_no_change_under_requests(model: Any, engine: Engine) -> None:
    """Calls of the model's own, attention weights asked for, equal settings, somebody who looks on, a longer
    forward.
    """
    handle = engine.submit(PROMPTS[3], **GREEDY)
    engine.step()
    ids = torch.tensor([PROMPTS[1]])
    model.generate(ids, max_new_tokens=3, num_beams=2)
    engine.step()
    model.generate(
        ids,
        max_new_tokens=3,
        cache_implementation="paged",
        output_attentions=True,
        return_dict_in_generate=True,
    )
    engine.step()
    model.model.layers[0].self_attn.scaling = float(str(model.model.layers[0].self_attn.scaling))
    with model.model.layers[0].register_forward_hook(lambda module, given, answer: None):
        engine.step()
    model(torch.tensor([PROMPTS[3] * 3]))
    assert answers(handle.result()) == alone(model, PROMPTS[3], **GREEDY)


def test_what_a_forward_notes_on_its_modules_is_no_change(llama: Any) -> None:
    """Some models keep what they computed last; other settings of these modules are looked at all the
    same.
    """

    class Noting(type(llama.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            self.calls = getattr(self, "calls", 0) + 1
            return self.last

    for layer in llama.model.layers:
        layer.mlp.__class__ = Noting
    with Engine(llama, block_size=4, num_blocks=60) as engine:
        (output,) = engine.generate([PROMPTS[3]], **GREEDY)
        assert answers(output) == alone(llama, PROMPTS[3], **GREEDY)
        engine.submit(PROMPTS[3], **GREEDY)
        engine.step()
        llama.model.layers[0].mlp.own = 3
        with pytest.raises(RuntimeError, match="changed under 1 running"):
            engine.step()


@pytest.mark.parametrize("way", ["data", "replaced", "loaded"])
def test_quiet_changes_are_noticed(model: Any, engine: Engine, way: str) -> None:
    """C24: `weight.data += x` moves neither version nor address; a new parameter and a loaded one count as
    well.
    """
    engine.generate([PROMPTS[3]], **GREEDY)
    handle = engine.submit(PROMPTS[0], **GREEDY)  # who only waits holds nothing of the old ones
    head = model.model.layers[1].mlp.down_proj
    if way == "data":
        head.weight.data += 0.3
    elif way == "replaced":
        head.weight = torch.nn.Parameter(head.weight.detach() + 0.3)
    else:
        head.load_state_dict({"weight": head.weight.detach() + 0.3})
    handle.cancel()
    output = engine.generate([PROMPTS[3]], **GREEDY)[0]
    assert output.cached_tokens == 0
    assert answers(output) == alone(model, PROMPTS[3], **GREEDY)


def test_adapters_are_part_of_the_weights(model: Any) -> None:
    """C24: a peft model in the engine; switching, disabling and merging adapters are never a stale hit."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4
    )
    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, config).eval()
    tuned.add_adapter("other", config)
    engine = Engine(tuned, block_size=4, num_blocks=60)
    seen = []
    for change in (
        lambda: None,
        lambda: tuned.set_adapter("other"),
        tuned.merge_adapter,
        tuned.unmerge_adapter,
    ):
        change()
        outputs = engine.generate([PROMPTS[3]] * 2, **GREEDY)
        assert [output.cached_tokens for output in outputs] == [0, 28]
        assert [answers(output) for output in outputs] == [alone(tuned, PROMPTS[3], **GREEDY)] * 2
        seen.append(answers(outputs[0]))
    assert seen[0] != seen[1]
    with tuned.disable_adapter():
        assert engine.generate([PROMPTS[3]], **GREEDY)[0].cached_tokens == 0
    engine.close()
