"""The keywords of a request by name and type, for IDEs, type checkers, notebooks and help()."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, TypedDict

import torch
from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig

from ..outputs.progress import Progress


class GenerationOptions(TypedDict, total=False):
    """The options of a GenerationConfig that change an answer; None leaves one to the model's own."""

    max_length: int | None
    """Most tokens of prompt and answer together."""
    max_new_tokens: int | None
    """Most tokens of an answer."""
    min_length: int | None
    """Least tokens of prompt and answer together: no answer ends before."""
    min_new_tokens: int | None
    """Least tokens of an answer."""
    max_time: float | None
    """Seconds after `submit()` at which the answer ends."""
    stop_strings: str | list[str] | None
    """Strings at which the sequence ends; they may begin in the prompt and stay in the text."""
    do_sample: bool | None
    """Draw tokens; else each is the likeliest."""
    num_beams: int | None
    """Beams of a beam search; 1 for none."""
    num_return_sequences: int | None
    """Answers: samples, or the best beams."""
    early_stopping: bool | Literal["never"] | None
    """When beams end: True with enough candidates, False once better is unlikely, "never" if impossible."""
    length_penalty: float | None
    """Exponent of the length by which scores of beams are divided; above 0 favours long answers."""
    temperature: float | None
    """Divides the scores before a draw: below 1 sharpens the distribution, above 1 flattens it."""
    top_k: int | None
    """Draw from this many of the likeliest tokens; 0 for all."""
    top_p: float | None
    """Draw from the likeliest tokens of this probability in all."""
    min_p: float | None
    """Draw from tokens of at least this share of the likeliest one's probability."""
    top_h: float | None
    """Draw from the likeliest tokens up to this share of the distribution's entropy."""
    typical_p: float | None
    """Draw from the most typical tokens of this probability in all."""
    epsilon_cutoff: float | None
    """Draw from tokens of at least this probability."""
    eta_cutoff: float | None
    """The same with a bound that falls with the distribution's entropy."""
    repetition_penalty: float | None
    """Divides the scores of tokens that prompt or answer have; above 1 avoids them."""
    encoder_repetition_penalty: float | None
    """Above 1 favours tokens of the prompt."""
    no_repeat_ngram_size: int | None
    """No run of so many tokens comes twice; 0 for no bound."""
    encoder_no_repeat_ngram_size: int | None
    """No run of so many tokens of the prompt comes in the answer."""
    bad_words_ids: list[list[int]] | None
    """Runs of token ids that no answer has."""
    renormalize_logits: bool | None
    """Normalize the scores after all processors."""
    forced_bos_token_id: int | None
    """The first token of an answer."""
    forced_eos_token_id: int | list[int] | None
    """The last token of an answer that reaches its longest."""
    remove_invalid_values: bool | None
    """Replace scores that are NaN or infinite."""
    exponential_decay_length_penalty: tuple[int, float] | None
    """From which token on the end becomes likelier, and by which factor a token."""
    suppress_tokens: list[int] | None
    """Tokens that no answer has."""
    begin_suppress_tokens: list[int] | None
    """Tokens that no answer begins with."""
    sequence_bias: dict[tuple[int, ...], float] | list[list[list[int] | float]] | None
    """Numbers added to the scores of tokens that complete these runs."""
    guidance_scale: float | None
    """Classifier-free guidance: above 1 follows the prompt more closely."""
    watermarking_config: WatermarkingConfig | dict[str, Any] | None
    """A watermark that the choice of tokens leaves."""
    pad_token_id: int | None
    """The token that fills shorter rows, as processors see them."""
    bos_token_id: int | None
    """The token that begins a sequence."""
    eos_token_id: int | list[int] | None
    """The token, or tokens, at which an answer ends."""
    decoder_start_token_id: int | list[int] | None
    """The token behind which an encoder-decoder's answer begins."""


class OpenAIOptions(TypedDict, total=False):
    """Options of OpenAI's requests that are none of generate()'s; `submit()` explains them."""

    stop: str | Sequence[str] | None
    """Strings that end an answer and are no part of its text."""
    presence_penalty: float | None
    """Off the score of each token that the answer has; below 0 favours them."""
    frequency_penalty: float | None
    """Off the score of a token for each time that the answer has it."""
    logit_bias: Mapping[int, float] | None
    """Numbers added to the scores of token ids."""


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
    """The prompt as token ids, as tokenizers return them."""
    attention_mask: Any
    """Beside input_ids; it may hide nothing."""
    input_features: torch.Tensor | None
    """The recording for a model of speech, as its processor returns it."""
    decoder_input_ids: Sequence[int] | torch.Tensor | None
    """The tokens that an encoder-decoder's answer continues."""
    images: Any
    """Pictures beside a text prompt, for the processor."""
    videos: Any
    """Videos beside a text prompt, for the processor."""
    audio: Any
    """Recordings beside a text prompt, for the processor."""


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
    """Functions of token ids and scores that return other scores."""
    stopping_criteria: Iterable[StoppingCriteria | Callable[..., Any]] | None
    """Functions of token ids and scores that say whether the answer ends."""
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None
    """Function of the row and its tokens: the token ids that may come next."""
    negative_prompt_ids: torch.Tensor | None
    """The prompt that guidance_scale leads away from."""
    negative_prompt_attention_mask: torch.Tensor | None
    """The mask of negative_prompt_ids."""


class Unnamed(NeutralOptions, ProcessorTensors, total=False):
    """Keywords that signatures leave to `**options`: they are rarely used."""


class GenerateKeywords(GenerationOptions, OpenAIOptions, Callables, PromptParts, Unnamed, total=False):
    """The keywords that `submit()` shares with generate() and with OpenAI's API."""


class RequestKeywords(GenerateKeywords, total=False):
    """All keywords of a request; `submit()` explains those of its own."""

    inputs_embeds: torch.Tensor | None
    """Embeddings [tokens, hidden] or [1, tokens, hidden], instead of token ids or beside them."""
    seed: int | None
    """Seed of the draws: the same answer whatever runs beside it."""
    logprobs: int | bool | None
    """True, or how many top tokens are reported beside each chosen one, with log-probabilities."""
    prompt_logprobs: int | bool | None
    """The same of the prompt's tokens."""
    return_routing: bool
    """True: each sequence of the output has the experts of its tokens, of a mixture of experts."""
    priority: int
    """Higher runs sooner, under policy="priority"."""
    salt: str | None
    """Prefixes are shared only with requests of the same salt."""
    tenant: str
    """For whose share of the blocks this request's count, under `cache_shares`."""
    adapter: str | Sequence[str] | None
    """Name of an adapter, or of several LoRA ones; None for the model alone. Default: the active one."""
    task_ids: int | torch.Tensor | None
    """Number of the request's task, for a multitask prompt."""


class AsyncBatchKeywords(RequestKeywords, total=False):
    """The keywords of `agenerate()`."""

    strict: bool
    """Raise the error of a request that was refused or failed, instead of a warning."""


class BatchKeywords(AsyncBatchKeywords, total=False):
    """The keywords of `generate()`."""

    progress: Progress[int]
    """True for a bar, False for none, None for one after a while; or a function of the number of requests
    that have ended and of all."""


class ChatKeywords(BatchKeywords, total=False):
    """The keywords of `chat()`."""

    tools: Sequence[Any] | None
    """Functions that the model may call: Python functions with docstrings, or JSON schemas."""
    chat_template: str | None
    """A template in Jinja instead of the tokenizer's."""
    continue_final_message: bool
    """Continue the last message instead of answering it."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Options of the template."""


UNNAMED = frozenset(Unnamed.__annotations__)


def defaults_of(options: Any) -> dict[str, Any]:
    """The default of each field of a dataclass."""
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(options)
    }


def spell_out(function: Callable[..., Any], keywords: type, defaults: Mapping[str, Any]) -> None:
    """Name the keywords of a TypedDict, and their types, in the signature of a function that takes
    `**options` of it.

    help() and completion read the signature. A keyword without a default among `defaults` has None.
    """
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    rest = [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
    hidden = UNNAMED | signature.parameters.keys()
    only = inspect.Parameter.KEYWORD_ONLY
    named = [
        inspect.Parameter(name, only, default=defaults.get(name), annotation=kind.__forward_arg__)
        for name, kind in keywords.__annotations__.items()
        if name not in hidden
    ]
    complete = UNNAMED.isdisjoint(keywords.__annotations__)
    parameters = own + named + ([] if complete else rest)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
