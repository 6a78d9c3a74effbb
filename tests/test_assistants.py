"""Assisted decoding of encoder-decoders, and of models with a generate() of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from cases import once_each
from compare import assert_clean, assert_equal, assert_same, both
from families import BY_NAME, build
from releases import OWN_WORDS, require_decoders_of_whisper

from hf_paged.model.switch import uses_registry

FRAMES = 100
"""Frames of one window of the tiny Whisper."""
FORMS = {
    "short": (FRAMES, {}),
    "short-timestamps": (FRAMES, {"return_timestamps": True, "max_new_tokens": 6}),
    "short-fields": (FRAMES, {"return_dict_in_generate": True, "output_scores": True}),
    "long": (FRAMES + 70, {"return_timestamps": True, "max_new_tokens": 6}),
}


def _whisper(layers: int, cls: Any = tf.WhisperForConditionalGeneration) -> Any:
    config = tf.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=layers, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=200, num_mel_bins=8, max_source_positions=FRAMES // 2,
        max_target_positions=60, decoder_start_token_id=3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    special = {"decoder_start_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model.generation_config = tf.GenerationConfig(
        **special, is_multilingual=False, max_initial_timestamp_index=10
    )
    model.generation_config.no_timestamps_token_id = 100
    return model


@pytest.mark.filterwarnings("default::hf_paged.FallbackWarning")
@pytest.mark.parametrize(
    ("assistant", "form"),
    [
        *once_each([tf.WhisperForConditionalGeneration, tf.WhisperForCausalLM], [*FORMS]),
        (tf.WhisperForCausalLM, "short"),
    ],
)
def test_whisper(assistant: Any, form: str) -> None:
    """An encoder-decoder assistant rebuilds its cache after every round; distil's decoder makes another in
    the first.
    """
    if assistant is tf.WhisperForCausalLM:
        require_decoders_of_whisper()
    model, helper = _whisper(2), _whisper(1, assistant)
    frames, options = FORMS[form]
    heard = torch.randn(1, 8, frames, generator=torch.Generator().manual_seed(5))
    call = {
        "input_features": heard,
        "attention_mask": torch.ones(1, frames, dtype=torch.long),
        "assistant_model": helper,
        "max_new_tokens": 12,
        "do_sample": False,
        **options,
    }
    stock, paged = both(model, **call)
    if isinstance(stock, dict):
        stock, paged = ({name: answer[name] for name in ("sequences", "scores")} for answer in (stock, paged))
    assert_equal(stock, paged)
    del stock, paged
    assert_clean(model, model.config._attn_implementation)
    assert_clean(helper, helper.config._attn_implementation)


@pytest.mark.skipif(OWN_WORDS, reason="transformers 5.9 and 5.24 give assistants no word of their model's")
def test_whisper_s_assistant_is_named_once() -> None:
    """The main model runs on pages; the warning is about its assistant."""
    model, helper = _whisper(2), _whisper(1)
    heard = torch.randn(1, 8, FRAMES, generator=torch.Generator().manual_seed(5))
    call = {"input_features": heard, "assistant_model": helper, "max_new_tokens": 12, "do_sample": False}
    with pytest.warns(Warning, match="assistant WhisperForConditionalGeneration makes its own cache") as seen:
        model.generate(**call, cache_implementation="paged")
    assert {str(warning.message) for warning in seen if "paged" in str(warning.message)} == {
        "cache_implementation='paged': the assistant WhisperForConditionalGeneration makes its own cache and "
        "continues on it; transformers' own cache is used"
    }


def test_a_cache_and_the_word_stay_an_error_of_the_user(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="Passing both"):
        llama.generate(ids, past_key_values=tf.DynamicCache(), max_new_tokens=2, cache_implementation="paged")


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_encoder_decoders(name: str, ids: torch.Tensor) -> None:
    """The assistant has an encoder and a cross table of its own."""
    model, helper = build(BY_NAME[name]), build(BY_NAME[name])
    with torch.no_grad():
        for parameter in helper.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    reads = any(uses_registry(type(each)) for each in model.modules())
    paged = assert_same(
        model,
        input_ids=ids[:1],
        assistant_model=helper,
        max_new_tokens=14,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert set(paged.past_key_values.self_attention_cache.paths) == {"paged" if reads else "dense"}
