"""Adapters of prompt learning in an engine: virtual tokens in front of a request's prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, ask, first, prompt, tokens
from adapters import adapted, lora
from families import BY_NAME, build
from pictures import with_pictures
from releases import prefixes_are_ignored
from tiny import build as tiny
from tiny import config_class

from hf_paged import Engine
from hf_paged.engine import Unservable
from hf_paged.model.prompt_learning import PASTS, kind_of

SIZE = 4
COUNT = 6
"""Virtual tokens: one block and a half."""
KINDS: dict[str, Any] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT),
    "P-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=COUNT, encoder_hidden_size=16
    ),
    "CPT": lambda: peft.CPTConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=COUNT,
        cpt_token_ids=list(range(5, 5 + COUNT)),
        cpt_mask=[1] * COUNT,
        cpt_tokens_type_mask=[1] * COUNT,
    ),
    "multitask": lambda: peft.MultitaskPromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=COUNT, num_tasks=3
    ),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT),
    "a projected prefix": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=COUNT, prefix_projection=True, encoder_hidden_size=16
    ),
    "Cartridge": lambda: peft.CartridgeConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=COUNT, num_frozen_tokens=1
    ),
}


def made(kind: str) -> Any:
    """A peft model with two adapters of a kind, both of which change answers."""
    torch.manual_seed(0)
    model = peft.get_peft_model(build(BY_NAME["llama"]).eval(), KINDS[kind](), "one")
    model.add_adapter("two", KINDS[kind]())
    model.set_adapter("one")
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter += torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


@pytest.fixture(scope="module", params=["prompt tuning", "prefix tuning"])
def tuned(request: pytest.FixtureRequest) -> Any:
    if prefixes_are_ignored() and request.param == "prefix tuning":
        pytest.skip("stock's generate() computes without the prefix on this release")
    return made(request.param)


def task(model: Any) -> dict[str, Any]:
    """The keywords of a request that a multitask prompt needs."""
    kind = model.peft_config["one"].peft_type
    return {"task_ids": torch.tensor([2])} if kind == peft.PeftType.MULTITASK_PROMPT_TUNING else {}


def pefts(model: Any, ids: list[int], adapter: str | None, **options: Any) -> list[int]:
    """The answer of peft's own generate() with this adapter active.

    Where peft looks for the cache under another name than transformers, it takes every step for the first one,
    and puts embeddings in front of its token too: there they are in front of the prompt without a cache.
    """
    call = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    call |= {"max_new_tokens": NEW, "do_sample": False, **options}
    if prefixes_are_ignored() and kind_of(model.peft_config["one"]) not in PASTS:
        call["use_cache"] = False
    if adapter is None:
        return list(model.get_base_model().generate(**call)[0, len(ids) :].tolist())
    model.set_adapter(adapter)
    out = model.generate(**call, **task(model))
    model.set_adapter("one")
    return list(out[0, len(ids) :].tolist())


def test_each_request_has_the_tokens_of_peft_alone(model: Any) -> None:
    """Mixed with the other adapter and the model alone; the adapter's requests share its blocks."""
    wanted = [(prompt(i), ["one", "two", None][i % 3]) for i in range(7)]
    expected = [pefts(model, *each) for each in wanted]
    ignored = prefixes_are_ignored() and kind_of(model.peft_config["one"]) in PASTS
    assert (expected[0] == pefts(model, wanted[0][0], "two")) == ignored
    with Engine(model, block_size=SIZE, num_blocks=200) as engine:
        for _ in range(2):
            handles = [
                engine.submit(
                    ids, adapter=name, max_new_tokens=NEW, do_sample=False, **(task(model) if name else {})
                )
                for ids, name in wanted
            ]
            assert list(map(tokens, handles)) == expected
            for (ids, _), handle in zip(wanted, handles, strict=True):
                assert handle.result().prompt_token_ids == ids
        assert [handle.result().cached_tokens for handle in handles] == [8] * 7
        assert ask(engine, wanted[0][0], **task(model)) == expected[0]
        assert engine.adapters()["two"].owner == "model"
        engine.check()


def test_logprobs_beams_samples_and_processors(tuned: Any) -> None:
    """Callers see no virtual token, and nothing counts any."""
    ids = prompt(3)
    seen: list[list[int]] = []

    def look(given: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(given[0].tolist())
        return scores

    with Engine(tuned, block_size=SIZE, num_blocks=200) as engine:
        call = {"max_new_tokens": NEW, "do_sample": False}
        output = engine.submit(
            ids, **call, logprobs=True, prompt_logprobs=True, logits_processor=[look]
        ).result()
        whole = torch.tensor([[*ids, *first(output)]])
        with torch.no_grad():
            logits = tuned(whole).logits[0, -whole.shape[1] :].log_softmax(-1)
        scores = logits[:-1].gather(1, whole[0, 1:, None])[:, 0]
        assert output.prompt_logprobs[0] is None
        found = [note.logprob for note in output.prompt_logprobs[1:]]
        found += [note.logprob for note in output.sequences[0].logprobs]
        torch.testing.assert_close(torch.tensor(found), scores, atol=2e-4, rtol=2e-4)
        assert seen[-1] == [*ids, *first(output)[:-1]]
        again = engine.submit(ids, **call, prompt_logprobs=True).result()
        assert again.prompt_logprobs == output.prompt_logprobs
        beams = {"num_beams": 3, "max_new_tokens": NEW}
        assert ask(engine, ids, **beams) == pefts(tuned, ids, "one", **beams)
        penalty = {"repetition_penalty": 1.6}
        assert ask(engine, ids, **penalty) == pefts(tuned, ids, "one", **penalty)
        drawn = engine.submit(
            ids, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=NEW
        ).result()
        assert [list(each.token_ids) for each in drawn.sequences] == [first(output)] * 3
        ended = engine.submit(ids, max_length=len(ids) + 2, do_sample=False).result()
        assert first(ended) == first(output)[:2]
        engine.check()


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_under_pressure_and_in_chunks(tuned: Any, way: Any) -> None:
    wanted = [(prompt(i), ["one", "two", None][i % 3]) for i in range(7)]
    expected = [pefts(tuned, *each, max_new_tokens=12) for each in wanted]
    options: Any = {"block_size": SIZE, "num_blocks": 18, "preemption": way, "watermark": 0.0}
    with Engine(tuned, **options, max_batch_tokens=7, max_batch_sequences=7) as engine:
        handles = [
            engine.submit(ids, adapter=name, max_new_tokens=12, do_sample=False) for ids, name in wanted
        ]
        assert list(map(tokens, handles)) == expected
        assert engine.stats()["preemptions"]
        engine.check()


@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning"])
def test_trained_further_the_next_request_has_it(kind: str) -> None:
    """One that runs goes on with the virtual tokens that it began with."""
    if prefixes_are_ignored() and kind == "prefix tuning":
        pytest.skip("stock's generate() computes without the prefix on this release")
    model = made(kind)
    ids = prompt(4)
    before = pefts(model, ids, "one")
    with Engine(model, block_size=SIZE, num_blocks=100) as engine:
        running = engine.submit(ids, max_new_tokens=NEW, do_sample=False)
        engine.step()
        with torch.no_grad():
            model.prompt_encoder["one"].embedding.weight += 1.0
        after = pefts(model, ids, "one")
        assert after != before
        assert ask(engine, ids) == after
        assert tokens(running) == before
        with model.disable_adapter():
            assert ask(engine, ids) == pefts(model, ids, None)
        engine.check()


def test_a_plain_model_takes_them(model: Any, tmp_path: Path) -> None:
    """From a folder and from another peft model; no module of the model changes."""
    torch.manual_seed(0)
    plain = build(BY_NAME["llama"]).eval()
    names = [name for name, _ in plain.named_modules()]
    model.save_pretrained(tmp_path)
    ids = prompt(5)
    with Engine(plain, block_size=SIZE, num_blocks=100) as engine:
        engine.add_adapter("a", tmp_path / "two")
        engine.add_adapter("one", model)
        found = [ask(engine, ids, adapter=each, **task(model)) for each in ("a", "one")]
        assert found == [pefts(model, ids, each) for each in ("two", "one")]
        assert ask(engine, ids, adapter=None) == ask(engine, ids) == pefts(model, ids, None)
        assert {name: info.owner for name, info in engine.adapters().items()} == dict.fromkeys(
            ("a", "one"), "engine"
        )
        with pytest.raises(ValueError, match="there is an adapter 'a' already"):
            engine.add_adapter("a", tmp_path / "one")
        handle = engine.submit(ids, adapter="a", max_new_tokens=NEW, **task(model))
        with pytest.raises(ValueError, match="1 requests have the adapter 'a'"):
            engine.remove_adapter("a")
        engine.remove_adapter("a", when="idle")
        with pytest.raises(ValueError, match="'a' is being removed"):
            engine.submit(ids, adapter="a", **task(model))
        handle.result()
        engine.step()
        assert list(engine.adapters()) == ["one"]
        engine.check()
    assert [name for name, _ in plain.named_modules()] == names
    assert all(parameter.requires_grad for parameter in plain.parameters())


@pytest.mark.skipif(prefixes_are_ignored(), reason="stock's generate() computes without the prefix")
@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_mixed_with_adapters_of_layers_under_pressure(way: Any) -> None:
    """LoRA, an aLoRA, both kinds of virtual tokens and the model alone, in one batch on too few blocks."""
    call = [91, 92]
    invoked = lora(alora_invocation_tokens=call, task_type="CAUSAL_LM")
    sources = {"lora": adapted(lora(task_type="CAUSAL_LM")), "invoked": adapted(invoked)}
    sources |= {"prompt": made("prompt tuning"), "prefix": made("prefix tuning")}
    torch.manual_seed(0)
    plain = build(BY_NAME["llama"]).eval()
    wanted = [([*prompt(i, 6), *call, 7], [*sources, None][i % 5]) for i in range(10)]
    expected = [
        pefts(sources["prompt"], ids, None, max_new_tokens=9)
        if name is None
        else pefts(sources[name], ids, "one", max_new_tokens=9)
        for ids, name in wanted
    ]
    options: Any = {"block_size": SIZE, "num_blocks": 20, "preemption": way, "watermark": 0.0}
    with Engine(plain, **options, max_batch_tokens=16) as engine:
        for name, source in sources.items():
            state = peft.get_peft_model_state_dict(source, adapter_name="one")
            engine.add_adapter(name, state, source.peft_config["one"])
        for _ in range(2):
            handles = [
                engine.submit(ids, adapter=name, max_new_tokens=9, do_sample=False) for ids, name in wanted
            ]
            assert list(map(tokens, handles)) == expected
        assert engine.stats()["preemptions"]
        engine.check()


@pytest.mark.skipif(prefixes_are_ignored(), reason="stock's generate() computes without the prefix")
def test_a_prefix_is_one_set_of_blocks_and_no_forward_computes_it() -> None:
    """64 requests at once of other tokens each."""
    model = made("prefix tuning")
    base = model.get_base_model()
    base.generation_config.eos_token_id = None
    computed: list[int] = []
    prompts = [[5 + i, *prompt(i, 5)] for i in range(64)]
    held = []
    with Engine(model, block_size=2, num_blocks=400, max_batch_tokens=512) as engine:
        hook = base.get_input_embeddings().register_forward_hook(
            lambda _, args, __: computed.append(args[0].numel())
        )
        for name in ("one", None):
            handles = [engine.submit(ids, adapter=name, max_new_tokens=3, do_sample=False) for ids in prompts]
            most = 0
            while not all(handle.done for handle in handles):
                engine.step()
                most = max(most, engine.stats()["blocks"]["full"]["held"])
            held.append(most)
            assert sum(computed) == 64 * (6 + 2)
            computed.clear()
        hook.remove()
        engine.check()
    assert held[0] == held[1] + COUNT // 2


@pytest.mark.skipif(prefixes_are_ignored(), reason="stock's generate() computes without the prefix")
def test_a_prefix_is_evicted_behind_all_other_blocks() -> None:
    model = made("prefix tuning")
    with Engine(model, block_size=2, num_blocks=40) as engine:
        expected = ask(engine, prompt(0))
        for i in range(8):  # they fill all blocks several times
            ask(engine, prompt(1 + i, 40), adapter=None, max_new_tokens=1)
        before = engine.stats()["hits"]
        assert ask(engine, prompt(0)) == expected
        assert engine.stats()["hits"] - before == COUNT // 2
        engine.check()


def test_behind_the_last_of_a_peft_model() -> None:
    """The model alone is active then."""
    model = made("prompt tuning")
    expected = pefts(model, prompt(0), None)
    with Engine(model, block_size=SIZE, num_blocks=100) as engine:
        assert ask(engine, prompt(0)) != expected
        for name in list(model.peft_config):
            model.delete_adapter(name)
        assert ask(engine, prompt(0)) == expected
        assert engine.adapters() == {}


def test_bad_input(tuned: Any, tmp_path: Path) -> None:
    with Engine(tuned, block_size=SIZE, num_blocks=100) as engine:
        with pytest.raises(ValueError, match=r"no adapter 'on'; did you mean 'one'\?"):
            engine.submit(prompt(1), adapter="on")
        with pytest.raises(
            ValueError, match=r"'one' is virtual tokens.*cannot be active together with 'two'"
        ):
            engine.submit(prompt(1), adapter=["one", "two"])
        with pytest.raises(ValueError, match="'one' has no tasks; leave it out"):
            engine.submit(prompt(1), task_ids=1)
        with pytest.raises(ValueError, match="only a multitask prompt and Poly have tasks"):
            engine.submit(prompt(1), adapter=None, task_ids=1)
        with pytest.raises(ValueError, match="'two' is the peft model's; delete it there"):
            engine.remove_adapter("two")
        longest = tuned.config.max_position_embeddings
        handle = engine.submit([5] * (longest - COUNT), max_new_tokens=1)
        why = rf"{longest + 1} tokens long .prompt {longest}, {COUNT} of them virtual. and .* for {longest};"
        assert re.search(why, str(handle.result().error))
        state = {"prompt_embeddings": torch.ones(COUNT, 3)}
        with pytest.raises(ValueError, match=r"are \[6, 3\], expected \[6, 32\]; it is for another model"):
            engine.add_adapter("x", state, KINDS["prompt tuning"]())
        with pytest.raises(ValueError, match="expected 'prompt_embeddings'"):
            engine.add_adapter("x", {"a": torch.ones(1)}, KINDS["prompt tuning"]())
        for count, fits in ((longest - 1, False), (longest - 2, True)):
            own = peft.PromptTuningConfig(num_virtual_tokens=count, task_type="CAUSAL_LM")
            state = {"prompt_embeddings": torch.ones(count, 32)}
            if fits:
                engine.add_adapter("long", state, own)
                continue
            with pytest.raises(ValueError, match=rf"has {count} virtual tokens, and .* made for {longest} "):
                engine.add_adapter("x", state, own)
        assert "x" not in engine.adapters()
    tasks = made("multitask")
    with (
        Engine(tasks, block_size=SIZE, num_blocks=100) as engine,
        pytest.raises(
            ValueError, match="is a multitask prompt; give the number of the request's task, 0 to 2"
        ),
    ):
        engine.submit(prompt(1))


def test_virtual_tokens_of_an_encoder_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=COUNT)
    model = peft.get_peft_model(build(BY_NAME["t5"]).eval(), config).eval()
    with pytest.raises(Unservable, match=r"no virtual tokens of encoders; use generate\(\)"):
        Engine(model)


# ---- beside pictures


def pictured(kind: str, family: str = "llava") -> tuple[Any, dict[str, Any]]:
    """A peft model with two adapters of a kind that takes pictures, and a prompt with one."""
    torch.manual_seed(0)
    base = tiny("image", config_class("image", family)).eval()
    model = peft.get_peft_model(base, KINDS[kind](), "one")
    model.add_adapter("two", KINDS[kind]())
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter += torch.randn_like(parameter)
    return model.eval(), with_pictures(base, rows=1)


@pytest.mark.skipif(prefixes_are_ignored(), reason="stock gives virtual tokens to every decoded token")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning"])
def test_in_front_of_pictures(kind: str, mode: Any) -> None:
    """Prompts with pictures in chunks, mixed with LoRA and the model alone, that give way; then found again."""
    model, shown = pictured(kind)
    other = adapted(
        lora(target_modules=["q_proj", "v_proj"]), model=tiny("image", config_class("image", "llava"))
    )
    other.get_base_model().load_state_dict(model.get_base_model().state_dict(), strict=False)
    prompts = [shown, {**shown, "pixel_values": shown["pixel_values"] + 1.0}]
    call = {"max_new_tokens": 18, "do_sample": False}
    expected: dict[Any, list[list[int]]] = {}
    for name in ("one", "two", None, "lora"):
        if name in ("one", "two"):
            model.set_adapter(name)
        acting = {None: model.get_base_model(), "lora": other}.get(name, model)
        found = [acting.generate(**each, **call)[0, shown["input_ids"].shape[1] :] for each in prompts]
        expected[name] = [each.tolist() for each in found]
    assert len({str(each) for several in expected.values() for each in several}) == 8
    wanted = [(name, i) for name in expected for i in range(2)]
    options = {"max_batch_tokens": 10, "num_blocks": 24, "watermark": 0.0, "preemption": mode}
    with Engine(model, block_size=SIZE, **options) as engine:
        state = peft.get_peft_model_state_dict(other, adapter_name="one")
        engine.add_adapter("lora", state, other.peft_config["one"])
        for _ in range(2):
            handles = [engine.submit(**prompts[i], **call, adapter=name) for name, i in wanted]
            assert [tokens(handle) for handle in handles] == [expected[name][i] for name, i in wanted]
        assert engine.stats()["preemptions"] > 0
        again = [engine.submit(**prompts[0], **call, adapter="one").result() for _ in range(2)]
        assert again[1].cached_tokens >= SIZE
        assert first(again[1]) == expected["one"][0]
        engine.check()


def test_in_front_of_pictures_with_positions_of_their_own() -> None:
    """They are refused by name, also those that attention layers of their own read; peft itself fails there."""
    model, shown = pictured("prefix tuning", "qwen2_vl")
    with Engine(model, block_size=SIZE) as engine:
        output = engine.submit(**shown, max_new_tokens=NEW, adapter="two").result()
        assert "positions of their own, and the adapter's virtual tokens" in str(output.error)
        plain = ask(engine, **shown, adapter=None)
        length = shown["input_ids"].shape[1]
        alone = model.get_base_model().generate(**shown, max_new_tokens=NEW, do_sample=False)
        assert plain == alone[0, length:].tolist()
        engine.check()


def test_files_of_answers_know_virtual_tokens(tmp_path: Path) -> None:
    """Those that are named, active or added: other ones, or trained further, are other answers."""
    data = [{"prompt": prompt(i)} for i in range(3)]
    call = {"max_new_tokens": NEW, "do_sample": False, "progress": False}
    model = made("prompt tuning")
    model.save_pretrained(tmp_path)
    with Engine(model, block_size=SIZE, num_blocks=100) as engine:
        assert engine.map(data, tmp_path / "named", adapter="two", **call).failed == 0
        assert engine.map(data, tmp_path / "named", adapter="two", **call).resumed == 3
        engine.map(data[:2], tmp_path / "active", **call)
        assert engine.map(data, tmp_path / "active", **call).resumed == 2
        for change in ("another", "trained"):
            if change == "another":
                model.set_adapter("two")
            else:
                model.set_adapter("one")
                with torch.no_grad():
                    model.prompt_encoder["one"].embedding.weight.add_(1.0)
            with pytest.raises(ValueError, match="other"):
                engine.map(data, tmp_path / "active", **call)
    named = [{**each, "adapter": "x"} for each in data]
    for name, resumed in (("one", 0), ("one", 3), ("two", 0)):
        with Engine(build(BY_NAME["llama"]).eval(), block_size=SIZE, num_blocks=100) as engine:
            engine.add_adapter("x", tmp_path / name)
            assert engine.map(named, tmp_path / "added", **call).resumed == resumed
