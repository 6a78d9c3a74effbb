"""aLoRA: an adapter that begins at its invocation tokens, behind tokens of the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, alone, ask, first, prompt, tokens
from adapters import adapted, lora
from families import BY_NAME, build
from pictures import with_pictures
from tiny import build as tiny
from tiny import config_class

from hf_paged import Engine
from hf_paged.model.adapters.invocation import start_of

CALL = [91, 92]
"""The invocation tokens of "one"."""
OTHER = [93]
"""Those of "two"."""
SIZE = 4


@pytest.fixture(scope="module")
def model() -> Any:
    invoked = [lora(alora_invocation_tokens=each, task_type="CAUSAL_LM") for each in (CALL, OTHER)]
    return adapted(*invoked, lora(r=3, task_type="CAUSAL_LM"))


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    made = Engine(model, block_size=SIZE, num_blocks=200)
    yield made
    made.check()
    made.close()


def pefts(model: Any, ids: list[int], adapter: str | None, **options: Any) -> list[int]:
    """The answer of peft's own generate() with this adapter active, which finds where an aLoRA begins."""
    if adapter is None:
        return alone(model, ids, None, **options)
    model.set_adapter(adapter)
    try:
        call = {"max_new_tokens": NEW, "do_sample": False, **options}
        out = model.generate(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **call)
    finally:
        model.set_adapter("one")
    return list(out[0, len(ids) :].tolist())


def test_an_adapter_begins_at_the_last_occurrence() -> None:
    assert start_of([1, 2, 3, 1, 2], (1, 2)) == 3
    assert start_of([1, 1, 1], (1, 1)) == 1
    assert start_of([2, 1], (1, 2)) is None
    assert start_of([], (1,)) is None


PROMPTS: dict[str, tuple[list[int], str | None]] = {
    "in a block": ([*prompt(1), *CALL, *prompt(2, 5)], "one"),
    "at a block's border": ([*prompt(1, 8), *CALL, 7], "one"),
    "at the end": ([*prompt(1, 6), *CALL], "one"),
    "at the beginning": ([*CALL, *prompt(4, 6)], "one"),
    "twice": ([*prompt(5, 3), *CALL, 8, *CALL, *prompt(6, 3)], "one"),
    "nowhere": (prompt(1, 11), "one"),
    "another one's": ([*prompt(1), *OTHER, *prompt(2, 5)], "two"),
    "a plain one": ([*prompt(1), *CALL, *prompt(2, 5)], "three"),
    "the model alone": ([*prompt(1), *CALL, *prompt(2, 5)], None),
}


def test_each_request_has_the_tokens_of_peft_alone(model: Any, engine: Engine) -> None:
    """Mixed in one batch; a second round finds all of it in the prefix cache."""
    expected = [pefts(model, *each) for each in PROMPTS.values()]
    assert len(set(map(tuple, expected))) > 6
    for _ in range(2):
        handles = [
            engine.submit(ids, adapter=name, max_new_tokens=NEW, do_sample=False)
            for ids, name in PROMPTS.values()
        ]
        assert dict(zip(PROMPTS, map(tokens, handles), strict=True)) == dict(
            zip(PROMPTS, expected, strict=True)
        )
    assert all(handle.result().cached_tokens for handle in handles)


def test_the_active_one_is_the_default(model: Any, engine: Engine) -> None:
    ids, name = PROMPTS["in a block"]
    assert ask(engine, ids) == pefts(model, ids, name)


def test_logprobs_are_those_of_peft(model: Any, engine: Engine) -> None:
    ids, name = PROMPTS["in a block"]
    output = engine.submit(
        ids, adapter=name, max_new_tokens=NEW, do_sample=False, logprobs=True, prompt_logprobs=True
    ).result()
    model.set_adapter(name)
    whole = torch.tensor([[*ids, *first(output)]])
    with torch.no_grad():
        # peft looks for the invocation in what it is given, so the answer must not contain it
        logits = model(whole).logits[0].log_softmax(-1)
    scores = logits[:-1].gather(1, whole[0, 1:, None])[:, 0]
    found = [note.logprob for note in output.prompt_logprobs[1:]]
    found += [note.logprob for note in output.sequences[0].logprobs]
    torch.testing.assert_close(torch.tensor(found), scores, atol=2e-4, rtol=2e-4)


def test_a_chat_that_switches_hits_what_the_model_alone_has_cached(model: Any, engine: Engine) -> None:
    """It computes its own tokens and one block at most; the model alone then finds nothing of the aLoRA."""
    chat = prompt(7, 42)
    ask(engine, chat, adapter=None)
    switched = [*chat, *CALL, 5]
    for name in ("one", "two"):
        ids = switched if name == "one" else [*chat, *OTHER, 5]
        output = engine.submit(ids, adapter=name, max_new_tokens=NEW, do_sample=False).result()
        assert first(output) == pefts(model, ids, name)
        assert len(chat) - SIZE <= output.cached_tokens <= len(chat)
    assert ask(engine, switched, adapter=None) == alone(model, switched, None)
    again = engine.submit(switched, adapter="one", max_new_tokens=1).result()
    assert again.cached_tokens == len(switched) - 1


@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_chunks_end_where_an_adapter_begins(model: Any, chunk: int) -> None:
    expected = [pefts(model, *each) for each in PROMPTS.values()]
    with Engine(
        model, block_size=SIZE, num_blocks=200, max_batch_tokens=chunk, max_batch_sequences=3
    ) as engine:
        handles = [
            engine.submit(ids, adapter=name, max_new_tokens=NEW, do_sample=False)
            for ids, name in PROMPTS.values()
        ]
        assert list(map(tokens, handles)) == expected
        engine.check()


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_under_pressure(model: Any, way: Any) -> None:
    expected = [pefts(model, *each, max_new_tokens=12) for each in PROMPTS.values()]
    with Engine(model, block_size=SIZE, num_blocks=16, preemption=way, watermark=0.0) as engine:
        handles = [
            engine.submit(ids, adapter=name, max_new_tokens=12, do_sample=False)
            for ids, name in PROMPTS.values()
        ]
        assert list(map(tokens, handles)) == expected
        assert engine.stats()["preemptions"]
        engine.check()


def test_samples(model: Any, engine: Engine) -> None:
    ids, name = PROMPTS["in a block"]
    drawn = engine.submit(
        ids, adapter=name, do_sample=True, num_return_sequences=3, seed=3, top_k=1, max_new_tokens=NEW
    ).result()
    assert [list(each.token_ids) for each in drawn.sequences] == [pefts(model, ids, name)] * 3


def test_processors_see_the_ids_of_the_prompt(model: Any, engine: Engine) -> None:
    seen: list[list[int]] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    ids, name = PROMPTS["in a block"]
    call = {"adapter": name, "max_new_tokens": 2, "do_sample": False}
    output = engine.submit(ids, logits_processor=[look], **call).result()
    assert seen[-1] == [*ids, first(output)[0]]
    assert output.prompt_token_ids == ids
    penalised = engine.submit(ids, repetition_penalty=1.7, **call).result()
    assert first(penalised) == pefts(model, ids, name, repetition_penalty=1.7, max_new_tokens=2)


def test_trained_further_it_leaves_the_models_blocks_alone() -> None:
    made = adapted(lora(alora_invocation_tokens=CALL, task_type="CAUSAL_LM"))
    chat = prompt(7, 20)
    ids = [*chat, *CALL, 5]
    with Engine(made, block_size=SIZE, num_blocks=100) as engine:
        before = ask(engine, ids)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter += 0.3
        output = engine.submit(ids, max_new_tokens=NEW, do_sample=False).result()
        assert first(output) == pefts(made, ids, "one") != before
        assert output.cached_tokens == len(chat)
        engine.check()


def test_a_plain_model_takes_one(model: Any, tmp_path: Path) -> None:
    """From a folder, from another peft model and as a state dict; no module of the model changes."""
    torch.manual_seed(0)
    plain = build(BY_NAME["llama"]).eval()
    model.save_pretrained(tmp_path)
    folder = tmp_path / "one"
    ids, name = PROMPTS["in a block"]
    with Engine(plain, block_size=SIZE) as engine:
        engine.add_adapter("a", folder if folder.exists() else tmp_path)
        engine.add_adapter("one", model)
        state = peft.get_peft_model_state_dict(model, adapter_name="one")
        engine.add_adapter("c", state, model.peft_config["one"])
        expected = pefts(model, ids, name)
        assert [ask(engine, ids, adapter=each) for each in ("a", "one", "c")] == [expected] * 3
        assert ask(engine, ids, adapter=None) == alone(model, ids, None)
        engine.check()


def test_together_with_others_it_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"'one' is an aLoRA.*cannot be active together with 'three'"):
        engine.submit(prompt(1), adapter=["one", "three"])


def test_with_parts_that_begin_before_it_is_refused() -> None:
    """peft's saved modules are active in the whole prompt, whatever an aLoRA's products are."""
    made = adapted(
        lora(alora_invocation_tokens=CALL, task_type="CAUSAL_LM", modules_to_save=["lm_head"]),
    )
    with Engine(made, block_size=SIZE, num_blocks=100) as engine:
        with pytest.raises(ValueError, match=r"'one': an aLoRA with other parts.*use generate\(\)"):
            engine.submit(prompt(1), adapter="one")
        ask(engine, prompt(1), adapter=None)
        engine.check()


@pytest.mark.parametrize("way", ["chunks", "gives way"])
def test_beside_pictures(way: str) -> None:
    """Behind and before the picture, also without its tokens; an aLoRA of the picture's tower is refused."""
    base = tiny("image", config_class("image", "llava")).eval()
    shown = with_pictures(base, rows=1)
    call = [int(shown["input_ids"][0, place]) for place in (-2, -1)]
    first_ids = shown["input_ids"][0, :1].tolist()
    text = r".*language_model.*(q_proj|v_proj|down_proj)"
    configs = [
        lora(alora_invocation_tokens=call, target_modules=text, task_type="CAUSAL_LM"),
        lora(alora_invocation_tokens=first_ids, target_modules=text, task_type="CAUSAL_LM"),
        lora(alora_invocation_tokens=[90], target_modules=text, task_type="CAUSAL_LM"),
        lora(alora_invocation_tokens=call, target_modules=r".*(q_proj|v_proj)", task_type="CAUSAL_LM"),
        lora(r=3, target_modules=text, task_type="CAUSAL_LM"),
    ]
    model = adapted(*configs, model=base)
    options = {"max_new_tokens": 18, "do_sample": False}
    expected = {}
    for name in ("one", "two", "three", "five", None):
        with nullcontext() if name else model.disable_adapter():
            if name:
                model.set_adapter(name)
            out = model.generate(**shown, **options)
        expected[name] = out[0, shown["input_ids"].shape[1] :].tolist()
    assert len(set(map(str, expected.values()))) == 4
    assert expected["three"] == expected[None]
    sizes = {"max_batch_tokens": 10} if way == "chunks" else {"num_blocks": 24, "watermark": 0.0}
    with Engine(model, block_size=SIZE, max_adapters=3, **{"num_blocks": 200, **sizes}) as engine:
        for _ in range(2):
            handles = [engine.submit(**shown, **options, adapter=name) for name in expected]
            assert [tokens(handle) for handle in handles] == list(expected.values())
        assert (engine.stats()["preemptions"] > 0) == (way == "gives way")
        with pytest.raises(ValueError, match="'four': an aLoRA of layers that encode pictures"):
            engine.submit(**shown, adapter="four")
        ids = prompt(1) + call
        assert ask(engine, ids, adapter="four") == pefts(model, ids, "four")
        engine.check()
