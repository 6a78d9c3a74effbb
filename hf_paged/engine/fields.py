"""Every field of a GenerationConfig: honoured, or refused by name. A test holds that none is missing here."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

LENGTHS = frozenset({"max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"})
CHOICE = frozenset({"do_sample", "num_beams", "num_return_sequences", "early_stopping", "length_penalty", "temperature"})
PROCESSORS = frozenset(
    {
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "guidance_scale",
        "watermarking_config",
    }
)
"""Transformers' own logits processors are made of these, as generate() makes them."""
TOKENS = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})
HONOURED = LENGTHS | CHOICE | PROCESSORS | TOKENS

BESIDE_AN_ASSISTANT = frozenset(
    {
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "max_matching_ngram_size",
    }
)
"""They say something only where an assistant drafts, and that is refused."""
ABOUT_ITSELF = frozenset({"transformers_version", "return_dict_in_generate"})
"""The answer is an object in any case."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((None, True), "the engine is a cache"),
    "cache_implementation": ((None, "paged"), "the engine has its own pages"),
    "cache_config": ((None,), "the engine's options say how its pages are"),
    "max_cache_len": ((None,), "the engine's pools have one size for all requests"),
    "prefill_chunk_size": ((None,), "the engine cuts prompts by max_batch_tokens"),
    "compile_config": ((None,), "the engine's option compile says whether its steps are compiled"),
    "disable_compile": ((None, False, True), ""),
    "continuous_batching_config": ((None,), "that is transformers' own continuous batching"),
    "output_attentions": ((None, False), "the engine keeps no attention weights"),
    "output_hidden_states": ((None, False), "the engine keeps no hidden states"),
    "output_scores": ((None, False), "the engine keeps no scores; ask for logprobs"),
    "output_logits": ((None, False), "the engine keeps no logits; ask for logprobs"),
    "token_healing": ((None, False), "the engine does not rewrite prompts"),
    "is_assistant": ((None, False), "the engine does not draft"),
    "use_mtp": ((None, False), "the engine does not draft"),
    "prompt_lookup_num_tokens": ((None,), "the engine does not draft"),
    "assistant_early_exit": ((None,), "the engine does not draft"),
    "speculation_type": ((None,), "the engine does not draft"),
    "penalty_alpha": ((None, 0, 0.0), "contrastive search is not there"),
    "dola_layers": ((None,), "DoLa is not there"),
    "num_beam_groups": ((None, 1), "group beam search is not there"),
    "diversity_penalty": ((None, 0, 0.0), "group beam search is not there"),
    "constraints": ((None,), "constrained beam search is not there"),
    "force_words_ids": ((None,), "constrained beam search is not there"),
    "low_memory": ((None, False), "beams share their blocks as it is"),
}
"""The values that say nothing, and why no other is taken."""

KNOWN = HONOURED | BESIDE_AN_ASSISTANT | ABOUT_ITSELF | REFUSED.keys()


COUNTS = ("max_length", "max_new_tokens", "num_beams", "num_return_sequences")


def check_counts(config: Any) -> None:
    """Raise unless what is counted is a whole number of at least one: half a token would be counted otherwise here than there."""
    for name in COUNTS:
        if getattr(config, name, None) is not None:
            setattr(config, name, counted(name, getattr(config, name)))


def counted(name: str, value: Any) -> int:
    """The whole number of at least one that an option is."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r} is not a whole number") from error
    if count < 1:
        raise ValueError(f"{name}={value!r} is not a number of at least 1")
    return count


def check_fields(config: Any) -> None:
    """Raise for the first field that asks for what the engine does not do, or that nobody here has heard of."""
    for name, value in fields_of(config):
        if name in REFUSED:
            harmless, why = REFUSED[name]
            if not any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in harmless):
                raise ValueError(f"{name}={value!r} is not taken by the engine: {why}; leave it out, or use generate()")
        elif name not in KNOWN and value is not None:
            raise ValueError(f"{name}={value!r} is a generation option that the engine does not know; leave it out, or use generate()")


def fields_of(config: Any) -> Iterator[tuple[str, Any]]:
    """The options of a GenerationConfig, without what it keeps for itself."""
    for name, value in vars(config).items():
        if not name.startswith("_"):
            yield name, value
