"""Edge cases that were wrong once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers as tf
from compare import assert_clean, assert_same
from families import BY_NAME, build
from huggingface_hub.errors import StrictDataclassError
from tiny import build_class
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hf_paged
from hf_paged.engine import Engine
from hf_paged.kv.store import Store
from hf_paged.model.cache_name import CACHE
from hf_paged.model.registry import memory_of

PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": 4}}


def begun(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any, new: int = 4) -> torch.Tensor:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, past_key_values=cache
    )


def padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return mask


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_kept_decoder_cache_and_beams(name: str, ids: torch.Tensor) -> None:
    """A cross cache that begins beside a decoder cache that goes on is not forked again."""
    model = build(BY_NAME[name])
    cache, x = hf_paged.PagedCache(model, block_size=4), ids[:2]
    start = torch.full((2, 3), 7)
    start[:, 0] = 0
    wide, starts = x.repeat_interleave(2, 0), start.repeat_interleave(2, 0)
    first = {
        "decoder_input_ids": starts,
        "decoder_attention_mask": torch.ones_like(starts),
        "max_new_tokens": 1,
    }
    model.generate(wide, attention_mask=torch.ones_like(wide), past_key_values=cache, **first)
    decoder = torch.cat([start, torch.full((2, 2), 9)], 1)
    call = {
        "decoder_input_ids": decoder,
        "decoder_attention_mask": torch.ones_like(decoder),
        "num_beams": 2,
        "max_new_tokens": 6,
    }
    stock = model.generate(x, attention_mask=torch.ones_like(x), **call)
    assert torch.equal(
        model.generate(x, attention_mask=torch.ones_like(x), past_key_values=cache, **call), stock
    )


def test_a_fork_of_a_torn_cache_is_refused(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = hf_paged.PagedCache(llama, block_size=32)
    history = begun(llama, ids, torch.ones_like(ids), cache)
    twin = copy.deepcopy(cache)
    longer = torch.cat([history, ids[:, :2]], 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            Store, "copy", lambda self, copies: (_ for _ in ()).throw(RuntimeError("out of memory"))
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            begun(llama, longer, torch.ones_like(longer), cache)
    for read in (
        copy.deepcopy,
        lambda cache: cache.layers[0].keys,
        hf_paged.PagedCache.to_dynamic,
        hf_paged.PagedCache.tables,
    ):
        with pytest.raises(RuntimeError, match="broke off in the middle"):
            read(cache)
    assert torch.equal(
        begun(llama, longer, torch.ones_like(longer), twin),
        begun(llama, longer, torch.ones_like(longer), None),
    )


def test_a_reorder_is_paid_before_the_mask_is_read(llama: Any, ids: torch.Tensor) -> None:
    """C16: rows of different lengths change places together with their mask."""
    mask, order, answers = padded(ids), torch.tensor([1, 0, 2]), []
    for cache in (tf.DynamicCache(config=llama.config), hf_paged.PagedCache(llama, block_size=4)):
        history = begun(llama, ids, mask, cache)
        cache.reorder_cache(order)
        longer = torch.cat([history[order], ids[:, :1]], 1)
        whole = torch.cat([mask, torch.ones(3, 4, dtype=mask.dtype)], 1)[order]
        answers.append(begun(llama, longer, torch.cat([whole, torch.ones(3, 1, dtype=mask.dtype)], 1), cache))
    assert torch.equal(*answers)


def test_a_reorder_does_not_keep_the_callers_tensor(llama: Any, ids: torch.Tensor) -> None:
    logits = []
    for cache in (tf.DynamicCache(config=llama.config), hf_paged.PagedCache(llama, block_size=4)):
        order = torch.tensor([2, 0, 1])
        with torch.no_grad():
            llama(ids, past_key_values=cache)
            cache.reorder_cache(order)
            order.zero_()
            logits.append(llama(ids[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("replaced", [False, True], ids=["registered", "replaced"])
def test_an_attention_of_the_users_own_is_called(
    replaced: bool, llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's attention function runs on dense copies of the pages."""

    def halved(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out * 0.5, weights

    name = "sdpa" if replaced else "test_halved"
    monkeypatch.setitem(
        tf.modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping if replaced else {}, name, halved
    )
    if not replaced:
        tf.AttentionInterface.register(name, halved)
        AttentionMaskInterface.register(name, sdpa_mask)
        plain = llama.generate(ids, attention_mask=padded(ids), max_new_tokens=8)
        llama.set_attn_implementation(name)
        assert not torch.equal(plain, llama.generate(ids, attention_mask=padded(ids), max_new_tokens=8))
    for beams in (1, 3):
        assert_same(llama, input_ids=ids, attention_mask=padded(ids), max_new_tokens=8, num_beams=beams)
    assert_clean(llama, name)


def test_a_padded_cache_needs_its_mask_in_plain_forwards(llama: Any, ids: torch.Tensor) -> None:
    answer = llama.generate(
        ids, attention_mask=padded(ids), max_new_tokens=5, return_dict_in_generate=True, **PAGED
    )
    with pytest.raises(ValueError, match="pass the attention_mask"), torch.no_grad():
        llama(ids[:, :1], past_key_values=answer.past_key_values)


def test_vision_encoder_with_a_text_decoder() -> None:
    """Unique rows are handed on contiguous, as the model would have got them."""
    vision = tf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
    )
    text = tf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=96, is_decoder=True, add_cross_attention=True
    )
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = tf.VisionEncoderDecoderModel(config=config).eval()
    model.generation_config.decoder_start_token_id, model.generation_config.pad_token_id = 1, 0
    call = {"pixel_values": torch.randn(2, 3, 8, 8), "max_new_tokens": 8}
    for mode in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        assert_same(model, **call, **mode)


@pytest.mark.parametrize("beams", [1, 3])
def test_autocast(beams: int, llama: Any, ids: torch.Tensor) -> None:
    """Keys and values of different dtypes live in one store."""
    with torch.autocast("cpu", torch.bfloat16):
        answer = llama.generate(ids, attention_mask=padded(ids), num_beams=beams, max_new_tokens=5, **PAGED)
    assert answer.shape[0] == 3
    assert_clean(llama, "sdpa")


def test_a_generate_of_its_own_is_warned_about(llama: Any) -> None:
    """A model that prepares its cache outside our call gets stock's, and a word about it."""
    config = copy.deepcopy(llama.generation_config)
    config.cache_implementation, config.use_cache = "paged", True
    arguments: dict[str, Any] = {}
    with pytest.warns(hf_paged.FallbackWarning, match=r"generate\(\) of its own"):
        llama._prepare_cache_for_generation(config, arguments, None, 1, 8)
    assert type(arguments[CACHE]) is tf.DynamicCache


def music(model: Any) -> dict[str, Any]:
    return {"input_ids": torch.full((2, 5), 7), "attention_mask": torch.ones(2, 5, dtype=torch.long)}


def speech(model: Any) -> dict[str, Any]:
    return {"input_features": torch.rand(2, 60, 80, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize(
    ("name", "config", "inputs", "reason"),
    [
        ("ParakeetForRNNT", "ParakeetRNNTConfig", speech, "prepares its caches itself"),
        ("MusicgenForConditionalGeneration", "MusicgenConfig", music, "has a generate() of its own"),
    ],
)
def test_caches_that_a_model_makes_itself_are_warned_about(
    name: str, config: str, inputs: Any, reason: str
) -> None:
    """A transducer has a state of its own in the place of a cache, and MusicGen's generate() prepares none:
    the word is not passed over in silence.
    """
    try:
        model = build_class(getattr(tf, name), getattr(tf, config))
    except (AttributeError, ValueError, TypeError, StrictDataclassError) as error:
        pytest.skip(f"this transformers builds no {name} from its defaults: {error}")
    call = {**inputs(model), "max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    right = model.generate(**call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.generate(**call, cache_implementation="paged")
    assert torch.equal(found.sequences, right.sequences)
    told = [str(one.message) for one in caught if issubclass(one.category, hf_paged.FallbackWarning)]
    assert len(told) == 1
    assert f"{name} {reason}" in told[0]


def test_rows_without_padding_are_left(llama: Any, ids: torch.Tensor) -> None:
    """A padded cache of which only whole rows are kept goes on without a mask."""
    answer = llama.generate(
        ids,
        attention_mask=padded(ids),
        max_new_tokens=5,
        min_new_tokens=5,
        return_dict_in_generate=True,
        **PAGED,
    )
    cache = answer.past_key_values
    cache.batch_select_indices(torch.tensor([1, 2]))
    longer = torch.cat([answer.sequences[1:], ids[1:, :3]], 1)
    stock = begun(llama, longer, torch.ones_like(longer), None)
    assert torch.equal(begun(llama, longer, torch.ones_like(longer), cache), stock)


def test_a_layer_that_changes_its_layout(llama: Any, ids: torch.Tensor) -> None:
    """While nobody holds anything a layer may come to look otherwise."""
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3}
    llama.generate(ids, **call, **PAGED)
    attention = llama.model.layers[1].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.register_forward_hook(lambda module, inputs, output: output.double())
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    assert torch.equal(llama.generate(ids, **call, **PAGED), llama.generate(ids, **call))


def test_an_interrupt_in_a_plain_forward_loses_nothing(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.blocks import BlockPool

    cache, taken, original = hf_paged.PagedCache(llama, block_size=4), [], BlockPool.take

    def take(self: Any, *where: Any) -> int:
        block = original(self, *where)
        taken.append(block)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return block

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(BlockPool, "take", take)
        with pytest.raises(KeyboardInterrupt):
            llama(ids, past_key_values=cache)
    cache.reset()
    memory_of(llama).check()
    assert memory_of(llama).held == 0


def test_a_paged_cache_and_another_name(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="Passing both"):
        llama.generate(
            ids, past_key_values=hf_paged.PagedCache(llama), cache_implementation="static", max_new_tokens=2
        )


def test_idle_pools_of_other_options_are_given_back(llama: Any, ids: torch.Tensor) -> None:
    sizes = []
    for blocks in (40, 80, 40, 80):
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3}
        llama.generate(ids, cache_implementation="paged", cache_config={"num_blocks": blocks}, **call)
        sizes.append(memory_of(llama).bytes)
    assert sizes[0] == sizes[2]
    assert sizes[1] == sizes[3] == 2 * sizes[0]


@contextmanager
def other_defaults(what: str) -> Iterator[None]:
    """A device (one that holds nothing, so whatever lands there is missed) or a dtype that tensors get if
    nobody says another.
    """
    before = torch.get_default_dtype()
    if what != "device":
        torch.set_default_dtype(getattr(torch, what))
    try:
        with torch.device("meta") if what == "device" else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("what", ["device", "bfloat16", "float64"])
def test_the_users_defaults(what: str, llama: Any, ids: torch.Tensor) -> None:
    """`torch.set_default_device("cuda")` and `set_default_dtype` are for the user's own tensors."""
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    right, prompts = llama.generate(ids, **call), ids.tolist()
    for options in ({}, {"prefix_caching": True}, {"prefix_caching": True}):
        with other_defaults(what):
            found = llama.generate(ids, **call, cache_implementation="paged", cache_config=options)
        assert torch.equal(found, right)
    with other_defaults(what), Engine(llama, num_blocks=40) as engine:
        outputs = engine.generate(prompts, max_new_tokens=5, do_sample=False, logprobs=2)
        drawn = [
            engine.generate(prompts, max_new_tokens=5, do_sample=True, top_p=0.9, seed=1) for _ in range(2)
        ]
        engine.generate(prompts, max_new_tokens=5, do_sample=False, num_beams=2)
    assert [output.sequences[0].token_ids for output in outputs] == right[:, ids.shape[1] :].tolist()
    assert drawn[0][0].sequences == drawn[1][0].sequences
