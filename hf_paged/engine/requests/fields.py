"""Every field of a GenerationConfig: honoured, or refused by name. A test holds that none is missing here."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ...model.cache_name import NAMES

LENGTHS = frozenset(
    {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"}
)
CHOICE = frozenset(
    {"do_sample", "num_beams", "num_return_sequences", "early_stopping", "length_penalty", "temperature"}
)
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
"""They have an effect only with an assistant model, which is refused."""
ABOUT_ITSELF = frozenset({"transformers_version", "return_dict_in_generate"})
"""The answer is an object in any case."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((None, True), "the engine is a cache"),
    "cache_implementation": ((None, "paged"), "the engine has its own pages"),
    "cache_config": ((None,), "the engine's own options configure its pages"),
    "max_cache_len": ((None,), "the engine's pools have one size for all requests"),
    "prefill_chunk_size": ((None,), "the engine cuts prompts by max_batch_tokens"),
    "compile_config": ((None,), "the engine's option compile decides whether its steps are compiled"),
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
"""Values without an effect, and why no other value is accepted."""

KNOWN = HONOURED | BESIDE_AN_ASSISTANT | ABOUT_ITSELF | REFUSED.keys()


COUNTS = ("max_length", "max_new_tokens", "num_beams", "num_return_sequences")


class Written(NamedTuple):
    """Where the options of a request are written: in its keywords, in its GenerationConfig, or else in the
    model's.
    """

    keywords: Mapping[str, Any]
    config: Any

    def place(self, name: str) -> str:
        """The suffix that names the option's source in an error; empty for a keyword."""
        if self.keywords.get(name) is not None:
            return ""
        return (
            " of the generation_config"
            if getattr(self.config, name, None) is not None
            else " of model.generation_config"
        )

    def remedy(self, name: str) -> str:
        """Advice on how to leave an option out."""
        if self.keywords.get(name) is not None:
            return "leave it out"
        if getattr(self.config, name, None) is not None:
            return f"the generation_config has it, set generation_config.{name} = None"
        return f"model.generation_config has it, set model.generation_config.{name} = None"


def check_counts(config: Any, written: Written) -> None:
    """Raise unless what is counted is a whole number of at least one: half a token would be counted otherwise
    here than there.
    """
    for name in COUNTS:
        if getattr(config, name, None) is not None:
            setattr(config, name, counted(name, getattr(config, name), written.place(name)))


def counted(name: str, value: Any, place: str = "") -> int:
    """The whole number of at least one that an option is."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r}{place} is not a whole number") from error
    if count < 1:
        raise ValueError(f"{name}={value!r}{place} is not a number of at least 1")
    return count


def check_fields(config: Any, written: Written) -> None:
    """Raise for the first field that asks for something that the engine does not do or does not know."""
    for name, value in generation_fields(config):
        remedy = f"{written.remedy(name)}, or use generate()"
        if name in REFUSED:
            harmless, why = REFUSED[name]
            if not any(
                value is allowed or (type(value) is type(allowed) and value == allowed)
                for allowed in harmless
            ):
                raise ValueError(f"{name}={value!r} is not supported by the engine: {why}; {remedy}")
        elif name not in KNOWN and value is not None:
            raise ValueError(
                f"{name}={value!r} is a generation option that the engine does not know; {remedy}"
            )


OTHERS = {
    "streamer": "iterate over the handle of submit(), or over engine.stream()",
    "tokenizer": "make the engine with it, Engine(model, tokenizer)",
    "attention_mask": "give one prompt a request, without padding",
    "inputs": "give the prompt as the first argument, or as input_ids",
    **dict.fromkeys(NAMES, "the engine has its own pages, and finds what prompts have in common"),
    "assistant_model": "the engine does not draft; use generate()",
    "assistant_tokenizer": "the engine does not draft; use generate()",
    "custom_generate": "the engine has a loop of its own; use generate()",
    "synced_gpus": "the engine runs in one process; use generate()",
    "use_model_defaults": "what is left open comes from model.generation_config",
}
"""Arguments of generate() that no request has, and what to do instead."""
OPENAI = {
    "n": "num_return_sequences",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""Options of OpenAI's requests that have another name here."""


def why_unknown(unknown: Iterable[str], known: Iterable[str]) -> str:
    """The error for keywords that mean nothing here; `known` are those that do."""
    names = sorted(unknown)
    hints = [OTHERS[name] for name in names if name in OTHERS]
    if not hints:
        close = [OPENAI[name] for name in names if name in OPENAI]
        close += [found for name in names for found in difflib.get_close_matches(name, known, 1)]
        hints = [f"did you mean {close[0]!r}?"] if close else []
    hint = hints[0] if hints else "a request takes generate()'s options, seed, logprobs, ..."
    return f"the engine does not take {names}; {hint}"


def generation_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """The options of a GenerationConfig, without what it keeps for itself."""
    for name, value in vars(config).items():
        if not name.startswith("_"):
            yield name, value
