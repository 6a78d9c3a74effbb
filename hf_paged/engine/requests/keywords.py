"""The keywords of a request by name and type, for IDEs, type checkers, notebooks and help()."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig


class GenerationOptions(TypedDict, total=False):
    """The options of a GenerationConfig that change an answer; None leaves one to the model's own."""

    max_length: int | None
    max_new_tokens: int | None
    min_length: int | None
    min_new_tokens: int | None
    max_time: float | None
    stop_strings: str | list[str] | None
    do_sample: bool | None
    num_beams: int | None
    num_return_sequences: int | None
    early_stopping: bool | Literal["never"] | None
    length_penalty: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    renormalize_logits: bool | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    remove_invalid_values: bool | None
    exponential_decay_length_penalty: tuple[int, float] | None
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    sequence_bias: dict[tuple[int, ...], float] | list[list[list[int] | float]] | None
    guidance_scale: float | None
    watermarking_config: WatermarkingConfig | dict[str, Any] | None
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    decoder_start_token_id: int | list[int] | None


class OpenAIOptions(TypedDict, total=False):
    """Options of OpenAI's requests that are none of generate()'s; `submit()` explains them."""

    stop: str | Sequence[str] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None


class NeutralOptions(TypedDict, total=False):
    """Options of generate() that change no answer of the engine, with the values that it takes."""

    use_cache: Literal[True] | None
    cache_implementation: Literal["paged"] | None
    disable_compile: bool | None
    return_dict_in_generate: bool | None
    output_attentions: Literal[False] | None
    output_hidden_states: Literal[False] | None
    output_scores: Literal[False] | None
    output_logits: Literal[False] | None
    token_healing: Literal[False] | None
    is_assistant: Literal[False] | None
    use_mtp: Literal[False] | None
    low_memory: Literal[False] | None
    num_beam_groups: Literal[1] | None
    penalty_alpha: Literal[0] | None
    diversity_penalty: Literal[0] | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    assistant_confidence_threshold: float | None
    assistant_lookbehind: int | None
    target_lookbehind: int | None
    assistant_ensemble_weight: float | None
    max_matching_ngram_size: int | None


class PromptParts(TypedDict, total=False):
    """Prompts in the form of keywords: token ids, what an encoder-decoder takes, pictures and recordings."""

    input_ids: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | None
    attention_mask: Any
    input_features: torch.Tensor | None
    decoder_input_ids: Sequence[int] | torch.Tensor | None
    images: Any
    videos: Any
    audio: Any


class ProcessorTensors(TypedDict, total=False):
    """Pictures and recordings as processors return them.

    A model may take more inputs, as its processor knows: `submit(**processor(...))` passes all of them.
    """

    pixel_values: Any
    pixel_values_videos: Any
    pixel_values_images: Any
    pixel_values_local: Any
    high_res_pixel_values: Any
    image_pixel_values: Any
    image_patches: Any
    flattened_patches: Any
    input_values: Any
    audio_input_features: Any


class Callables(TypedDict, total=False):
    """Keywords of generate() that are not generation options."""

    logits_processor: Iterable[LogitsProcessor | Callable[..., torch.Tensor]] | None
    stopping_criteria: Iterable[StoppingCriteria | Callable[..., Any]] | None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None
    negative_prompt_ids: torch.Tensor | None
    negative_prompt_attention_mask: torch.Tensor | None


class Unnamed(NeutralOptions, ProcessorTensors, total=False):
    """Keywords that signatures leave to `**options`: they are rarely used."""


class GenerateKeywords(GenerationOptions, OpenAIOptions, Callables, PromptParts, Unnamed, total=False):
    """The keywords that `submit()` shares with generate() and with OpenAI's API."""


class RequestKeywords(GenerateKeywords, total=False):
    """All keywords of a request; `submit()` explains those of its own."""

    inputs_embeds: torch.Tensor | None
    seed: int | None
    logprobs: int | bool | None
    prompt_logprobs: int | bool | None
    priority: int
    salt: str | None
    tenant: str
    adapter: str | Sequence[str] | None


UNNAMED = frozenset(Unnamed.__annotations__)


def spell_out(function: Callable[..., Any], keywords: type, defaults: Mapping[str, Any]) -> None:
    """Name the keywords of a TypedDict in the signature of a function that takes `**options` of it.

    help() and completion read the signature. A keyword without a default among `defaults` has None.
    """
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    rest = [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
    hidden = UNNAMED | signature.parameters.keys()
    names = [name for name in keywords.__annotations__ if name not in hidden]
    only = inspect.Parameter.KEYWORD_ONLY
    named = [inspect.Parameter(name, only, default=defaults.get(name)) for name in names]
    complete = UNNAMED.isdisjoint(keywords.__annotations__)
    parameters = own + named + ([] if complete else rest)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
