"""Adaption Prompts by request: peft keeps the inactive ones outside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, ask, prompt, tokens
from adapters import adapted, lora
from families import BY_NAME, build

from hf_paged import Engine

LINEAR = {"llama": ["q_proj", "up_proj"], "gpt2": ["c_attn"]}


def config(length: int = 4, layers: int = 2) -> Any:
    return peft.AdaptionPromptConfig(adapter_len=length, adapter_layers=layers, task_type="CAUSAL_LM")


def prompted(family: str = "llama") -> Any:
    """A peft model with two Adaption Prompts, in other layers, that change answers."""
    torch.manual_seed(0)
    made = peft.get_peft_model(build(BY_NAME[family]), config(), "one")
    made.add_adapter("two", config(3, 1))
    noise = torch.Generator().manual_seed(7)
    for name in ("two", "one"):
        made.set_adapter(name)
        for key, each in made.named_parameters():
            if "adaption" in key:
                each.data += torch.randn(each.shape, generator=noise) + 0.5
    return made.eval()


def build_again() -> Any:
    """The plain model under `prompted`."""
    torch.manual_seed(0)
    return build(BY_NAME["llama"])


def first_of(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return list(out[0, len(ids) :].tolist())


def alone(model: Any, ids: list[int], name: str | None, **options: Any) -> list[int]:
    """The answer of peft alone, which leaves active what was."""
    call = {"input_ids": torch.tensor([ids]), "max_new_tokens": NEW, "do_sample": False, **options}
    before = model.active_adapter
    if name is None:
        with model.disable_adapter():
            out = model.generate(**call)
    else:
        model.set_adapter(name)
        out = model.generate(**call)
        model.set_adapter(before)
    return list(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_requests_choose_among_them_and_the_base(family: str) -> None:
    made = prompted(family)
    before = list(made.named_modules())
    names = ["one", "two", None] * 2
    wanted = [alone(made, prompt(i), name, num_beams=1 + i // 3) for i, name in enumerate(names)]
    assert len({tuple(alone(made, prompt(1), name)) for name in names}) == 3
    with Engine(made, block_size=4, num_blocks=200) as engine:
        infos = engine.adapters()
        assert {name: (each.computed, each.owner) for name, each in infos.items()} == {
            "one": ("apart", "model"), "two": ("apart", "model"),
        }  # fmt: skip
        handles = [
            engine.submit(prompt(i), max_new_tokens=NEW, do_sample=False, adapter=name, num_beams=1 + i // 3)
            for i, name in enumerate(names)
        ]
        assert [tokens(each) for each in handles] == wanted
        assert ask(engine, prompt(1)) == alone(made, prompt(1), "one")
        with pytest.raises(ValueError, match="are Adaption Prompts, of which peft has one active"):
            engine.submit(prompt(1), adapter=["one", "two"])
        with pytest.raises(ValueError, match="did you mean 'two'"):
            engine.submit(prompt(1), adapter="too")
        engine.check()
    assert list(made.named_modules()) == before


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_preempted_requests_come_back_with_theirs(family: str, mode: Any) -> None:
    """In chunks of prompts too, beside LoRA that the engine was given."""
    made, other = prompted(family), adapted(lora(target_modules=LINEAR[family]), family=family)
    names = ["one", "two", None, "lora", "one", "two"]
    long = {"max_new_tokens": 14, "do_sample": False}
    wanted = [
        alone(*(other, prompt(i, 12), "one") if name == "lora" else (made, prompt(i, 12), name), **long)
        for i, name in enumerate(names)
    ]
    with Engine(
        made, block_size=4, num_blocks=17, preemption=mode, watermark=0.0, max_batch_tokens=10
    ) as engine:
        state = peft.get_peft_model_state_dict(other, adapter_name="one")
        engine.add_adapter("lora", state, other.peft_config["one"])
        handles = [engine.submit(prompt(i, 12), **long, adapter=name) for i, name in enumerate(names)]
        assert [tokens(each) for each in handles] == wanted
        assert engine.stats()["preemptions"] > 0
        engine.check()


def test_the_wrapper_need_not_be_kept() -> None:
    wanted = alone(prompted(), prompt(1), "two")
    with Engine(prompted(), block_size=4) as engine:
        assert ask(engine, prompt(1), adapter="two") == wanted


def test_another_becomes_active_or_none_while_requests_run() -> None:
    """Running requests keep theirs; whoever names none gets what is active then."""
    made = prompted()
    wanted = {name: alone(made, prompt(2), name, max_new_tokens=12) for name in ("one", "two", None)}
    with Engine(made, block_size=4, num_blocks=200) as engine:

        def begin(**adapter: Any) -> Any:
            handle = engine.submit(prompt(2), max_new_tokens=12, do_sample=False, **adapter)
            next(iter(handle))
            return handle

        running = {name: begin(adapter=name) for name in wanted}
        made.set_adapter("two")
        two = begin()
        with made.disable_adapter():
            none = begin()
            assert ask(engine, prompt(2), adapter="one") == wanted["one"][:NEW]
        made.set_adapter("one")
        one = begin()
        assert {name: tokens(each) for name, each in running.items()} == wanted
        assert [tokens(each) for each in (one, two, none)] == [wanted["one"], wanted["two"], wanted[None]]
        engine.check()


def test_beside_adapters_that_the_engine_is_given(tmp_path: Path) -> None:
    made = prompted()
    made.save_pretrained(tmp_path / "prompts")
    products = adapted(lora(), model=build_again())
    products.save_pretrained(tmp_path / "products")
    wanted = {
        "products": first_of(products, prompt(3)),
        "third": alone(made, prompt(3), "two"),
        "one": alone(made, prompt(3), "one"),
    }
    with Engine(made, block_size=4, num_blocks=200) as engine:
        engine.add_adapter("products", tmp_path / "products" / "one")
        engine.add_adapter("third", tmp_path / "prompts" / "two")
        handles = {
            name: engine.submit(prompt(3), max_new_tokens=NEW, do_sample=False, adapter=name)
            for name in wanted
        }
        assert {name: tokens(each) for name, each in handles.items()} == wanted
        engine.check()


def test_training_adding_and_deleting() -> None:
    made = prompted()
    with Engine(made, block_size=4, num_blocks=200) as engine:
        first = [ask(engine, prompt(1), adapter=name) for name in ("one", "two")]
        made.set_adapter("two")
        with torch.no_grad():
            for key, each in made.named_parameters():
                if "adaption" in key:
                    each.mul_(-1.5)
        made.set_adapter("one")
        changed = alone(made, prompt(1), "two")
        assert changed != first[1]
        assert ask(engine, prompt(1), adapter="two") == changed
        assert ask(engine, prompt(1), adapter="one") == first[0]
        made.add_adapter("three", config())
        assert ask(engine, prompt(1), adapter="three") == alone(made, prompt(1), "three")
        made.delete_adapter("two")
        with pytest.raises(ValueError, match="there is no adapter 'two'"):
            engine.submit(prompt(1), adapter="two")
        assert sorted(engine.adapters()) == ["one", "three"]
        engine.check()
