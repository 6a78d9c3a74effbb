"""Uses of generate() beyond the modes: configs, kept caches, forks, streamers, criteria, embeddings."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every_other
from compare import assert_clean, assert_equal, assert_same
from families import BY_NAME, VOCABULARY, build
from generate_calls import call
from releases import DROPPED_WITHOUT_GRADIENTS, OWN_WORDS
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged.model.cache_name import CACHE, cache_in
from hf_paged.model.registry import memory_of

# ---- the word


def test_word_in_a_generation_config(llama: Any, ids: torch.Tensor) -> None:
    """A GenerationConfig and the model's own config ask as the keyword does."""
    stock = llama.generate(**call(ids))
    config = GenerationConfig(
        max_new_tokens=8,
        cache_implementation="paged",
        cache_config={"block_size": 2},
        return_dict_in_generate=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    given = llama.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    llama.generation_config.cache_implementation = "paged"
    own = llama.generate(**call(ids), return_dict_in_generate=True)
    for answer, size in ((given, 2), (own, 16)):
        assert isinstance(answer.past_key_values, hf_paged.PagedCache)
        assert answer.past_key_values.config.block_size == size
        assert torch.equal(answer.sequences, stock)


def test_options_are_saved_in_a_generation_config(llama: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    """As a dict or as the object that checks them."""
    options: dict[str, Any] = {"block_size": 4, "prefix_caching": True, "salt": "mine"}
    for given in (options, hf_paged.CacheConfig(**options)):
        llama.generation_config.update(cache_implementation="paged", cache_config=given)
        llama.save_pretrained(tmp_path)
        llama.generation_config = GenerationConfig.from_pretrained(tmp_path)
        answer = llama.generate(**call(ids), return_dict_in_generate=True)
        assert answer.past_key_values.config == hf_paged.CacheConfig(**options)
        assert answer.past_key_values.config.salt == "mine"


def test_calls_that_do_not_ask_are_stock(llama: Any, ids: torch.Tensor) -> None:
    """No word, no pages; the model is not touched."""
    answer = llama.generate(**call(ids), return_dict_in_generate=True)
    assert type(answer.past_key_values) is DynamicCache
    assert_clean(llama, "sdpa")


def test_a_model_that_is_compiled_in_place(llama: Any) -> None:
    """model.compile() traces what the model's call runs: none of it may be ours."""
    del llama.model.layers[1:]
    llama.config.num_hidden_layers = 1
    llama.compile(backend="eager")
    cache = {"block_size": 4, "prefix_caching": True}
    for length in (21, 13):
        ids = torch.randint(5, VOCABULARY, (2, length))
        stock = llama.generate(**call(ids))
        paged = llama.generate(**call(ids), cache_implementation="paged", cache_config=cache)
        assert torch.equal(paged, stock)
    torch._dynamo.reset()


@pytest.mark.parametrize("setting", ["sdpa", "eager"])
def test_a_copy_made_while_a_call_runs(setting: str, ids: torch.Tensor) -> None:
    """It is a model of its own, as one made at any other time: an average, a reference, a snapshot."""
    llama: Any = build(BY_NAME["llama"])
    llama.set_attn_implementation(setting)
    head = llama.lm_head
    head.forward = functools.partial(type(head).forward, head)  # as accelerate sets its own
    right = llama(ids).logits
    held = [llama]
    copies: list[Any] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        copies.append(copy.deepcopy(held[0]))
        return scores

    llama.generate(**call(ids, logits_processor=[look]), cache_implementation="paged")
    gone = weakref.ref(llama)
    del llama, head, held[0]
    gc.collect()
    assert gone() is None
    for twin in (copies[-1], copy.deepcopy(copies[-1])):
        assert torch.equal(twin.forward(ids).logits, right)
        assert_same(twin, **call(ids))
        assert twin.config._attn_implementation == setting
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        assert torch.equal(twin(ids).logits, -right)


@pytest.mark.parametrize("nested", [False, True])
def test_attention_chosen_while_a_call_runs(nested: bool, llama: Any, ids: torch.Tensor) -> None:
    """By a processor, a streamer, another thread: it stays chosen, and the call goes on with it."""
    found: list[Any] = []

    def choose(given: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if given.shape[1] == ids.shape[1] + 2:
            llama.set_attn_implementation("eager")
            if nested:
                llama.generate(**call(ids), cache_implementation="paged")
        found.append(llama(ids, output_attentions=True).attentions)
        return scores

    arguments = call(ids, logits_processor=[choose])
    stock = llama.generate(**arguments)
    before = found.copy()
    found.clear()
    assert llama.config._attn_implementation == "eager"
    llama.set_attn_implementation("sdpa")
    assert torch.equal(llama.generate(**arguments, cache_implementation="paged"), stock)
    assert [each is None for each in found] == [each is None for each in before]
    assert_clean(llama, "eager")


def test_uninstall_and_install(llama: Any, ids: torch.Tensor) -> None:
    """The plug comes out and goes in again; twice is once."""
    import transformers

    wrapped = transformers.GenerationMixin.generate
    hf_paged.install()
    assert transformers.GenerationMixin.generate is wrapped
    hf_paged.uninstall()
    try:
        assert not hasattr(transformers.GenerationMixin.generate, "hf_paged")
        assert type(llama.generate(**call(ids), return_dict_in_generate=True).past_key_values) is DynamicCache
    finally:
        hf_paged.install()
    assert_same(llama, **call(ids))


def test_generate_batch_stays_transformers(llama: Any) -> None:
    """Continuous batching of transformers is reachable by its own name."""
    from transformers import ContinuousBatchingConfig

    prompt = [5, 6, 7, 8, 9]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    outputs = llama.generate_batch([prompt], generation_config=config, continuous_batching_config=small)
    stock = llama.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 5), max_new_tokens=4)
    assert next(iter(outputs.values())).generated_tokens == stock[0, 5:].tolist()


def test_a_forward_of_the_user_s_may_use_the_older_name(ids: torch.Tensor) -> None:
    """transformers' own forward understands it, and gets the newer one among the other keywords."""

    class Own(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
            given = {} if past_key_values is None else {"past_key_values": past_key_values}
            return super().forward(input_ids=input_ids, **given, **kwargs)

    model = build(BY_NAME["llama"])
    model.__class__ = Own
    assert_same(model, **call(ids))
    assert memory_of(model).groups


def test_assistant_inherits_the_word(llama: Any, ids: torch.Tensor) -> None:
    """Main and assistant share one config object and are both paged, from transformers 5.10 to 5.23. In others
    assistants go without the word.
    """
    assistant = build(BY_NAME["llama"])
    assistant.config = llama.config
    assert_same(llama, **call(ids[:1], assistant_model=assistant))
    assert bool(memory_of(assistant).groups) == (not OWN_WORDS)
    assert_clean(llama, "sdpa")


# ---- caches that are kept


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon", "gpt-oss"])
def test_several_turns_on_one_cache(name: str, ids: torch.Tensor) -> None:
    """A kept cache computes only what is new and answers as stock's does."""
    model = build(BY_NAME[name])
    stock, paged = DynamicCache(config=model.config), hf_paged.PagedCache(model, block_size=4)
    history = ids[:2]
    for turn in range(3):
        one = model.generate(**call(history, past_key_values=stock))
        other = model.generate(
            **call(history, past_key_values=paged, **({"cache_implementation": "paged"} if turn else {}))
        )
        assert torch.equal(one, other)
        history = torch.cat([one, ids[:2, : 3 + turn]], 1)
    assert stock.get_seq_length() == paged.get_seq_length()


def test_cache_of_the_answer_goes_on(llama: Any, ids: torch.Tensor) -> None:
    """The cache that return_dict hands out can be passed back in, with beams before and greedy after."""
    answers = [
        llama.generate(**call(ids, return_dict_in_generate=True, **extra))
        for extra in ({}, {"cache_implementation": "paged"})
    ]
    more = [torch.cat([answer.sequences, ids[:, :4]], 1) for answer in answers]
    stock, paged = (
        llama.generate(**call(ids, past_key_values=answer.past_key_values))
        for answer, ids in zip(answers, more, strict=True)
    )
    assert torch.equal(stock, paged)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window"])
def test_deepcopy_forks(name: str, ids: torch.Tensor) -> None:
    """C13, C14: a copied cache shares every block; both go on and neither sees the other."""
    model = build(BY_NAME[name])
    stock, paged = DynamicCache(config=model.config), hf_paged.PagedCache(model, block_size=4)
    for cache in (stock, paged):
        history = model.generate(**call(ids[:1], past_key_values=cache))
    held = memory_of(model).held
    stock_twin, paged_twin = copy.deepcopy(stock), copy.deepcopy(paged)
    assert memory_of(model).held == held
    for one, other, extra in ((stock_twin, paged_twin, 3), (stock, paged, 5)):
        longer = torch.cat([history, ids[1:2, :extra]], 1)
        assert torch.equal(
            model.generate(**call(longer, past_key_values=one)),
            model.generate(**call(longer, past_key_values=other)),
        )
    del paged, paged_twin, cache, other
    assert memory_of(model).held == 0


def test_plain_forwards_on_a_paged_cache(llama: Any, ids: torch.Tensor) -> None:
    """A loop of one's own: no generate(), no scope, the same logits; crop, select and repeat as on stock's
    cache.
    """
    stock, paged = DynamicCache(config=llama.config), hf_paged.PagedCache(llama, block_size=4)
    with torch.no_grad():
        for tokens in (ids, ids[:, :1], ids[:, 1:4]):
            logits = [llama(tokens, past_key_values=cache).logits for cache in (stock, paged)]
            torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)
        for cache in (stock, paged):
            cache.crop(-5)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
        assert_equal(stock, paged)
        logits = [llama(ids[:1].repeat(4, 1), past_key_values=cache).logits for cache in (stock, paged)]
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)
    assert_equal(stock, paged)
    assert_equal(stock, copy.deepcopy(paged))
    paged.reset()
    assert paged.get_seq_length() == 0
    assert memory_of(llama).held == 0


def test_left_padded_forwards_without_a_scope(llama: Any, ids: torch.Tensor) -> None:
    """Outside generate() the mask is stock's and padding is stored; the answer is the same."""
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        logits = [
            llama(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
            for cache in (DynamicCache(config=llama.config), hf_paged.PagedCache(llama))
        ]
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


def test_to_dynamic_keeps_the_content(llama: Any, ids: torch.Tensor) -> None:
    """The way out: a stock cache with the same keys and values."""
    answers = [
        llama.generate(**call(ids, return_dict_in_generate=True, **extra))
        for extra in ({}, {"cache_implementation": "paged"})
    ]
    made = answers[1].past_key_values.to_dynamic()
    for one, other in zip(answers[0].past_key_values.layers, made.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=2e-4, rtol=2e-4)


# ---- inputs and hooks of the loop


def test_padding_is_not_stored(llama: Any, ids: torch.Tensor) -> None:
    """C1, C2: a row of 4 real tokens among 13 columns holds the blocks of 4 tokens."""
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    answer = llama.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=1,
        return_dict_in_generate=True,
        cache_implementation="paged",
        cache_config={"block_size": 4},
    )
    assert [len(row) for row in answer.past_key_values.tables()] == [4, 1, 4]


@pytest.mark.parametrize(
    ("holes", "name"), every_other([[0, 4, 5], [12], [2, 3, 12]], ["llama", "gpt2", "gemma3", "bloom"])
)
def test_masks_that_are_not_left_padding(name: str, holes: list[int], ids: torch.Tensor) -> None:
    """Masks with holes anywhere are heeded."""
    model = build(BY_NAME[name])
    mask = torch.ones_like(ids)
    mask[0, holes] = 0
    assert_same(model, **call(ids, attention_mask=mask))
    assert_same(model, **call(ids, attention_mask=mask, num_beams=3))


def test_a_row_of_nothing_but_padding(llama: Any, ids: torch.Tensor) -> None:
    """A row with no token at all begins with what it generates, and harms no neighbour."""
    mask = torch.ones_like(ids)
    mask[1] = 0
    answer = llama.generate(**call(ids, attention_mask=mask, cache_implementation="paged"))
    stock = llama.generate(**call(ids, attention_mask=mask))
    assert torch.equal(answer[[0, 2]], stock[[0, 2]])
    assert answer.shape == stock.shape


def test_embeddings_as_input(llama: Any, ids: torch.Tensor) -> None:
    """inputs_embeds, alone, with padding, with beams and in chunks."""
    mask = torch.ones_like(ids)
    mask[2, :5] = 0
    embeds = llama.get_input_embeddings()(ids).detach()
    for extra in ({}, {"num_beams": 3}):
        assert_same(
            llama, inputs_embeds=embeds, attention_mask=mask, max_new_tokens=8, do_sample=False, **extra
        )


class _Tape(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.heard.append([])


def test_a_streamer_gets_the_same(llama: Any, ids: torch.Tensor) -> None:
    tapes = [_Tape(), _Tape()]
    llama.generate(**call(ids[:1], streamer=tapes[0]))
    llama.generate(**call(ids[:1], streamer=tapes[1], cache_implementation="paged"))
    assert tapes[0].heard == tapes[1].heard
    assert len(tapes[0].heard) > 2


class _Forbid(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -3:], -torch.inf)


class _EnoughOf(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids % 7 == 0).sum(1) > 4


@pytest.mark.parametrize("beams", [1, 3])
def test_processors_criteria_and_allowed_tokens(llama: Any, ids: torch.Tensor, beams: int) -> None:
    """Anything a user hangs into the loop runs unchanged."""
    assert_same(llama, **call(ids, num_beams=beams, logits_processor=LogitsProcessorList([_Forbid()])))
    assert_same(
        llama,
        **call(
            ids, num_beams=beams, stopping_criteria=StoppingCriteriaList([_EnoughOf()]), max_new_tokens=20
        ),
    )
    assert_same(
        llama,
        **call(
            ids,
            num_beams=beams,
            prefix_allowed_tokens_fn=lambda batch, sent: list(range(10 + batch, 40 + len(sent))),
        ),
    )


def test_stop_strings(ids: torch.Tensor) -> None:
    """Stop strings need the tokenizer, and stop where stock stops."""
    from hf_paged import demo

    model, tokenizer = demo.model(), demo.tokenizer()
    inputs = tokenizer(demo.prompts()[:1], return_tensors="pt")
    words = tokenizer.decode(
        model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs.input_ids.shape[1] :]
    ).split()
    paged = assert_same(
        model, **inputs, max_new_tokens=30, do_sample=False, stop_strings=[words[2]], tokenizer=tokenizer
    )
    assert paged.shape[1] < inputs.input_ids.shape[1] + 30


def test_without_a_cache(llama: Any, ids: torch.Tensor) -> None:
    """use_cache=False has nothing to page: stock runs, and one warning says why."""
    with pytest.warns(hf_paged.FallbackWarning, match="use_cache=False"):
        paged = llama.generate(**call(ids, use_cache=False, cache_implementation="paged"))
    assert torch.equal(paged, llama.generate(**call(ids, use_cache=False)))


def test_attention_weights_of_an_eager_model(llama: Any, ids: torch.Tensor) -> None:
    """Weights and hidden states are the model's own, at padded columns too."""
    llama.set_attn_implementation("eager")
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for given in (torch.ones_like(ids), mask):
        for beams in (1, 2):
            everything = {
                "return_dict_in_generate": True,
                "output_attentions": True,
                "output_hidden_states": True,
                "output_scores": True,
            }
            assert_same(llama, **call(ids, attention_mask=given, num_beams=beams, **everything))
    assert_clean(llama, "eager")


def test_long_rope_drops_the_cache() -> None:
    """Trap 7: at its border Phi-3's long rope goes on with a plain cache; so do we, with the same tokens."""
    import transformers as tf

    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    }
    torch.manual_seed(0)
    config = tf.Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.Phi3ForCausalLM(config).eval()
    ids = torch.randint(5, VOCABULARY, (2, 12))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", hf_paged.FallbackWarning)
        assert_same(model, **call(ids, max_new_tokens=12, min_new_tokens=12))
    said = {str(each.message) for each in seen if issubclass(each.category, hf_paged.FallbackWarning)}
    assert len(said) == 1
    assert "Phi3ForCausalLM continued with another cache, in which its long rope" in said.pop()
    assert_clean(model, "sdpa")


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "drawn"]
)
def test_gradient_checkpointing_drops_the_cache(
    llama: Any, ids: torch.Tensor, options: dict[str, Any]
) -> None:
    """In training mode transformers before 5.24 takes any cache from checkpointed layers: stock runs, and the
    warning says why. From 5.24 on it takes none where nothing has gradients: pages are used.
    """
    llama.gradient_checkpointing_enable()
    llama.train()
    found = []
    for word in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", hf_paged.FallbackWarning)
            found.append(llama.generate(**call(ids, **options, **word), return_dict_in_generate=True))
        said = [str(each.message) for each in seen if issubclass(each.category, hf_paged.FallbackWarning)]
    stock, paged = found
    assert torch.equal(stock.sequences, paged.sequences)
    if DROPPED_WITHOUT_GRADIENTS:
        assert len(said) == 1
        assert "LlamaForCausalLM trains with gradient checkpointing" in said[0]
        assert "prefix tuning" not in said[0]
        assert "long rope" not in said[0]
    else:
        assert not said
        assert set(cache_in(paged).paths) == {"paged"}
        assert cache_in(paged).get_seq_length() == cache_in(stock).get_seq_length() > 0
    del stock, paged, found
    for act in (llama.eval, llama.gradient_checkpointing_disable):
        llama.train()
        llama.gradient_checkpointing_enable()
        act()
        assert_same(llama, **call(ids))  # without a warning, which is an error here
    assert_clean(llama, "sdpa")


def test_a_paged_cache_that_checkpointed_layers_drop(llama: Any, ids: torch.Tensor) -> None:
    """A cache that was passed cannot be exchanged beforehand: the warning comes with the answer, and says the
    same. From transformers 5.24 on nothing drops it.
    """
    llama.gradient_checkpointing_enable()
    llama.train()
    cache = hf_paged.PagedCache(llama)
    with (
        pytest.warns(hf_paged.FallbackWarning, match="trains with gradient checkpointing")
        if DROPPED_WITHOUT_GRADIENTS
        else nullcontext()
    ):
        found = llama.generate(**call(ids), **{CACHE: cache})
    if not DROPPED_WITHOUT_GRADIENTS:
        assert torch.equal(found, llama.generate(**call(ids)))
        assert cache.get_seq_length() == found.shape[1] - 1
    cache.reset()


def test_half_precision_runs(ids: torch.Tensor) -> None:
    """A model that changes its dtype between calls gets pools of the new one."""
    model = build(BY_NAME["llama"])
    assert_same(model, **call(ids))
    model.to(torch.bfloat16)
    answer = model.generate(**call(ids, cache_implementation="paged", return_dict_in_generate=True))
    assert answer.past_key_values.layers[0].keys.dtype == torch.bfloat16
