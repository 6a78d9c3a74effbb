"""`hf_paged.stats`, `release` and `invalidate`: what a model keeps, in figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from prefix_reuse import ask, continued, words

import hf_paged
from hf_paged.generate.stats import NOT_ASKED


def test_a_model_that_was_never_asked(llama: Any) -> None:
    stats = hf_paged.stats(llama)
    assert (stats.blocks, stats.held, stats.layers) == (0, 0, ())
    assert str(stats).splitlines()[:2] == ["LlamaForCausalLM", "layers   no call yet"]
    assert stats.off["prefix_caching"] == "no call has asked for it by cache_config={'prefix_caching': True}"
    hf_paged.invalidate(llama)
    assert hf_paged.release(llama) == 0


def test_every_figure(llama: Any) -> None:
    """C7: free + held + cached = blocks; hits, misses, copies and tokens of two calls that share 37 of 47."""
    first = words(1, 47)
    ask(llama, first)
    cache = hf_paged.PagedCache(llama, prefix_caching=True)
    other = continued(first, 37, 10)
    llama.generate(
        other, attention_mask=torch.ones_like(other), past_key_values=cache, max_new_tokens=5, do_sample=False
    )
    stats = hf_paged.stats(llama)
    assert stats.blocks == stats.free + stats.held + stats.cached
    assert (stats.held, stats.hits, stats.misses, stats.copies, stats.evictions) == (4, 3, 3, 1, 0)
    assert (stats.reused, stats.computed) == (37, 47 + 10)
    assert stats.layers == ("paged", "paged")
    assert stats.bytes == stats.blocks * 16 * 2 * 2 * 2 * 8 * 4
    del cache
    after = hf_paged.stats(llama)
    assert (after.held, after.cached) == (0, stats.cached + 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.model = "another"  # type: ignore[misc]


def test_it_prints_well() -> None:
    model = build(BY_NAME["gemma3"])
    ask(model, words(1, 47), 4)
    ask(model, words(1, 47), 4, return_dict_in_generate=True, output_hidden_states=True)
    lines = str(hf_paged.stats(model)).splitlines()
    assert lines[:2] == ["Gemma3ForCausalLM", "layers   2 dense"]
    assert lines[2].split() == [
        "pools",
        "kind",
        "block",
        "size",
        "blocks",
        "held",
        "cached",
        "free",
        "hits",
        "misses",
        "copies",
        "evictions",
        "bytes",
    ]
    assert [line.split()[0] for line in lines[3:5]] == ["window", "full"]
    assert len({len(line) for line in lines[2:5]}) == 1
    assert lines[5] == "rows     10 computed, 0 left out"
    assert lines[6] == "prompts  0 tokens reused, 94 computed"
    assert lines[7] == "         1 x hidden states or attentions are asked for"
    assert lines[8].startswith("off      graphs: steps are captured on CUDA devices, the model is on cpu")
    assert all(line.startswith("         ") for line in lines[9:])


def test_what_is_off_says_why(llama: Any) -> None:
    """Parts that no call has asked for are on from then on; what the model cannot have stays off."""
    before = hf_paged.stats(llama).off
    assert before["prefix_caching"] == NOT_ASKED
    assert before["graphs"] == "steps are captured on CUDA devices, the model is on cpu"
    ask(llama, words(1, 20), 4)
    assert before.keys() - hf_paged.stats(llama).off.keys() == {"prefix_caching"}
    t5 = build(BY_NAME["t5"])
    ask(t5, words(1, 20), 4)
    assert (
        hf_paged.stats(t5).off["prefix_caching"]
        == "a decoder's keys and values depend on its encoder's output"
    )


def test_a_model_that_falls_back_says_why(llama: Any) -> None:
    """As the warning does, whose reason may pass with the model's state."""
    assert "pages" not in hf_paged.stats(llama).off
    llama.model.layers[0].self_attn.attention_dropout = 0.5
    llama.train()
    with pytest.warns(hf_paged.FallbackWarning) as caught:
        llama.generate(words(1, 9), cache_implementation="paged", max_new_tokens=2)
    (reason,) = hf_paged.stats(llama).off.values()
    assert reason in str(caught[0].message)
    llama.eval()
    assert "pages" not in hf_paged.stats(llama).off
    assert hf_paged.stats(torch.nn.Linear(2, 2)).off == {"pages": "Linear does not generate"}


def test_of_a_model_in_a_wrapper(llama: Any) -> None:
    """peft's wrapper and the model inside are one."""
    peft = pytest.importorskip("peft", reason="peft is an extra")
    model = peft.get_peft_model(llama, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    ask(llama, words(1, 20), 4)
    assert hf_paged.stats(model) == hf_paged.stats(llama)
    assert hf_paged.stats(model).cached
    hf_paged.invalidate(model)
    assert hf_paged.stats(llama).cached == 0


def test_release_takes_what_is_cached(llama: Any) -> None:
    ask(llama, words(1, 20), 4)
    assert hf_paged.release(llama) > 0
    stats = hf_paged.stats(llama)
    assert (stats.cached, stats.bytes) == (0, 0)
    assert ask(llama, words(1, 20), 4)[1][0] == 20


def test_invalidate_forgets_and_frees(llama: Any) -> None:
    ask(llama, words(1, 20), 4)
    before = hf_paged.stats(llama)
    hf_paged.invalidate(llama)
    after = hf_paged.stats(llama)
    assert (after.cached, after.free) == (0, before.free + before.cached)
    assert ask(llama, words(1, 20), 4)[1][0] == 20


@pytest.mark.parametrize(
    ("options", "error", "words_of_it"),
    [
        ({"prefix_caching": 1}, TypeError, "prefix_caching must be True or False, got 1"),
        ({"salt": 7}, TypeError, "salt must be a str, got 7"),
        ({"verify": "yes"}, ValueError, r"verify='yes' is not one of \(None, 'tokens', 'bytes'\)"),
        ({"prefix_cache": True}, ValueError, "did you mean 'prefix_caching'"),
    ],
)
def test_bad_options(llama: Any, options: dict[str, Any], error: type[Exception], words_of_it: str) -> None:
    with pytest.raises(error, match=words_of_it):
        ask(llama, words(1, 20), 4, options)


def test_a_kept_cache_with_other_wishes_is_refused(llama: Any) -> None:
    """A salt that differs is another tenant's."""
    cache, ids = hf_paged.PagedCache(llama, prefix_caching=True, salt="one"), words(1, 20)
    with pytest.raises(ValueError, match="does not fit the PagedCache"):
        llama.generate(
            ids,
            past_key_values=cache,
            cache_config={"prefix_caching": True, "salt": "two"},
            cache_implementation="paged",
        )


@pytest.mark.parametrize("about", [hf_paged.stats, hf_paged.release, hf_paged.invalidate])
def test_of_what_is_no_model(about: Any) -> None:
    with pytest.raises(TypeError, match="expected a model, got str"):
        about("a folder")


def test_of_an_engine(llama: Any) -> None:
    engine = hf_paged.Engine(llama)
    with pytest.raises(TypeError, match="expected a model, got Engine; give its model"):
        hf_paged.stats(engine)  # type: ignore[arg-type]
    assert hf_paged.stats(engine.model).model == "LlamaForCausalLM"
    engine.check()


def test_prompts_are_counted_with_prefix_caching_alone(llama: Any) -> None:
    """A call without it computes prompts, and has no count of their tokens to print."""
    llama.generate(torch.arange(1, 7)[None], max_new_tokens=2, cache_implementation="paged")
    assert "prompts" not in str(hf_paged.stats(llama))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_pools_of_an_engine(name: str, checked: bool) -> None:
    """They count what requests found when they were let in, each of them once however long it waited, for
    every kind of layer.
    """
    model = build(BY_NAME[name])
    with hf_paged.Engine(
        model, block_size=4, num_blocks=40, max_batch_sequences=1, max_batch_tokens=9, check_hits=checked
    ) as engine:
        prompts = [words(1, 26)[0].tolist()] * 3
        engine.generate(prompts, max_new_tokens=3, min_new_tokens=3)
        assert (engine.stats()["hits"], engine.stats()["misses"]) == (12, 6)
        assert [(pool.hits, pool.misses) for pool in hf_paged.stats(model).pools] == [(12, 6)] * len(
            engine.stats()["blocks"]
        )
