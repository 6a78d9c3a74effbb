"""Tiny random models of the families that must keep their paged path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as tf
from transformers.models.t5 import modeling_t5

VOCABULARY = 96
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LONG = {"max_position_embeddings": 256}
T5_PATH = "paged" if hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS") else "dense"
"""Before 5.17 T5 computes with code of its own."""
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@dataclass(frozen=True)
class Family:
    """How to build a model, and how attention must read each of its layers."""

    name: str
    build: Callable[[], tf.PreTrainedModel]
    path: str = "paged"
    seq2seq: bool = False
    pads: bool = True


def _decoder(name: str, config: type, model: type, path: str = "paged", **options: object) -> Family:
    settings = {**SMALL, **TOKENS, **LONG, **options}
    return Family(name, lambda: model(config(**settings)), path)


def _gpt2() -> tf.PreTrainedModel:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, vocab_size=VOCABULARY, **TOKENS)
    )


def _opt() -> tf.PreTrainedModel:
    config = tf.OPTConfig(
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        word_embed_proj_dim=32,
        **LONG,
        **TOKENS,
    )
    return tf.OPTForCausalLM(config)


def _bloom() -> tf.PreTrainedModel:
    return tf.BloomForCausalLM(
        tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, **TOKENS)
    )


def _falcon() -> tf.PreTrainedModel:
    config = tf.FalconConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        new_decoder_architecture=True,
        num_kv_heads=2,
        **TOKENS,
    )
    return tf.FalconForCausalLM(config)


def _t5() -> tf.PreTrainedModel:
    config = tf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config)


def _bart() -> tf.PreTrainedModel:
    config = tf.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCABULARY, decoder_start_token_id=2, forced_eos_token_id=None, **LONG, **TOKENS,
    )  # fmt: skip
    return tf.BartForConditionalGeneration(config)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}

FAMILIES = [
    _decoder("llama", tf.LlamaConfig, tf.LlamaForCausalLM, num_key_value_heads=2),
    _decoder("llama-mha", tf.LlamaConfig, tf.LlamaForCausalLM, num_key_value_heads=4),
    _decoder("qwen2", tf.Qwen2Config, tf.Qwen2ForCausalLM, num_key_value_heads=2),
    _decoder(
        "qwen2-window",
        tf.Qwen2Config,
        tf.Qwen2ForCausalLM,
        num_key_value_heads=2,
        use_sliding_window=True,
        **ALTERNATING,
    ),
    _decoder("qwen3", tf.Qwen3Config, tf.Qwen3ForCausalLM, num_key_value_heads=2, head_dim=8),
    _decoder("mistral", tf.MistralConfig, tf.MistralForCausalLM, num_key_value_heads=2, sliding_window=None),
    _decoder(
        "mistral-window", tf.MistralConfig, tf.MistralForCausalLM, num_key_value_heads=2, sliding_window=6
    ),
    _decoder(
        "gemma2",
        tf.Gemma2Config,
        tf.Gemma2ForCausalLM,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        attn_implementation="eager",
        **ALTERNATING,
    ),
    _decoder(
        "gemma3",
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        **ALTERNATING,
    ),
    _decoder("gpt-neox", tf.GPTNeoXConfig, tf.GPTNeoXForCausalLM),
    _decoder("phi3", tf.Phi3Config, tf.Phi3ForCausalLM, num_key_value_heads=2),
    _decoder("mixtral", tf.MixtralConfig, tf.MixtralForCausalLM, **EXPERTS),
    _decoder(
        "qwen3-moe",
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    _decoder("gpt-oss", tf.GptOssConfig, tf.GptOssForCausalLM, head_dim=8, **EXPERTS, **ALTERNATING),
    Family("gpt2", _gpt2),
    Family("opt", _opt),
    Family("bloom", _bloom, path="dense"),
    Family("falcon", _falcon, path="dense"),
    Family("t5", _t5, seq2seq=True, path=T5_PATH),
    Family("bart", _bart, seq2seq=True),
]
BY_NAME = {family.name: family for family in FAMILIES}
UNLIKE = [
    family
    for family in FAMILIES
    if family.name not in ("llama-mha", "qwen2", "qwen3", "mistral", "qwen3-moe")
]
"""Those whose attention or cache is called in a way of its own: a Llama without groups, with biases or with norms of heads
differs in numbers alone.
"""


def build(family: Family) -> tf.PreTrainedModel:
    """The family's model, the same random weights every time, wide enough apart that ties are rare."""
    torch.manual_seed(0)
    model = family.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model
