"""Parameters of a request, read as generate() reads them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation.logits_process import InfNanRemoveLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from ...blocks.options import is_number
from ...model.adapters.virtual import GivenPast, VirtualTokens
from ...model.adapters.vocabulary import scores_of
from ...model.offloaded import input_device
from ...model.servable import longest
from ...model.slots import cross_layers
from ..multimodal import PromptInputs
from ..multimodal.cross import CrossMedia, cross_length
from ..multimodal.embed import checked, names_of
from ..multimodal.encoder import EncoderInput
from ..multimodal.media import Media, marks_of, media_arguments
from ..outputs.stops import Stop
from ..sampling.grammar import GrammarProcessor
from ..sampling.params import SamplingParams
from ..sampling.penalties import with_penalties
from ..sampling.rules import ProcessorPlan, processor_plan_of
from .openai import OpenAIParams, take_openai_options
from .options import Options, ends_of
from .prompts import checked_ids, prompt_tokens, short, tokenize_prompt, words_of

METHODS = {
    "_prepare_generation_config": ["generation_config"],
    "_prepare_special_tokens": ["generation_config", "kwargs_has_attention_mask", "device"],
    "_prepare_generated_length": [
        "generation_config",
        "has_default_max_length",
        "has_default_min_length",
        "model_input_name",
    ],
    "_get_logits_processor": [
        "generation_config",
        "input_ids_seq_length",
        "encoder_input_ids",
        "prefix_allowed_tokens_fn",
    ],
    "_get_stopping_criteria": ["generation_config", "stopping_criteria", "tokenizer"],
    "_prepare_decoder_input_ids_for_generation": [
        "batch_size",
        "model_input_name",
        "model_kwargs",
        "decoder_start_token_id",
    ],
}
"""The methods of GenerationMixin that interpret its options, so that they mean the same here."""
PASSED_ON = ("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask")
"""Keywords of generate() that are arguments of its processors."""

PROMPTS = ("inputs_embeds", "input_features", "decoder_input_ids")
"""Keywords that are a prompt, or a part of one."""
BY_NUMBERS = (EosTokenCriteria, MaxLengthCriteria)
"""Criteria that are read as numbers."""
KEY = os.urandom(16)
"""This process's key for the names of embeddings and of pictures."""


class KnownTokens(NamedTuple):
    """How many tokens there are for a request: those of the model, or of its adapters."""

    count: int  # type: ignore[assignment]  # nothing uses it as a tuple
    scores: int | None
    """Those that there are scores for; None if the model does not say."""
    most: int | None
    """The same, or those of the model if its adapters have fewer."""

    @classmethod
    def of(cls, model: Any, vocabulary: int | None) -> KnownTokens:
        """Those of a model. vocabulary: those of the adapters, if they are others."""
        scores = scores_of(model)
        most = scores if scores is None or vocabulary is None else max(scores, vocabulary)
        own = int(model.config.get_text_config(decoder=True).vocab_size)
        return cls(vocabulary or own, vocabulary or scores, most)


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    """A request, read and checked.

    media: what replaces some of the ids.
    source: the encoder's input; prompt and ids are then what its decoder begins with.
    max_length: of a sequence, as the scheduler counts it.
    processors and criteria: those that do not run for the whole batch at once; criteria without those about
    length and end-of-sequence tokens.
    scored: how many top logprobs are reported beside each token of the prompt; None for no logprobs.
    grammar: the grammar that the answers follow, beside the processor plan.
    slow: the names of the processors that run for this request alone.
    stop: the strings that end its answers, and are no part of their texts.
    virtual: tokens in front of its prompt that an adapter has put there, and that its caller does not see.
    past: their keys and values, if no forward computes them.
    known: the tokens that there are for it.
    return_routing: whether its answers have the experts of their tokens.
    """

    embeds: torch.Tensor | None
    media: Media | None
    source: EncoderInput | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    ends: frozenset[int]
    max_length: int
    scored: int | None
    grammar: GrammarProcessor | None
    slow: tuple[str, ...]
    stop: Stop | None
    known: KnownTokens
    virtual: int = 0
    past: GivenPast | None = None
    return_routing: bool = False

    @property
    def width(self) -> int:
        """How many sequences run."""
        return max(self.beams, self.answers)

    @property
    def on_device(self) -> bool:
        """True if its tokens are chosen on the device, with those of others: the host gets them later."""
        return self.processor_plan is not None and self.grammar is None

    @property
    def batchable(self) -> bool:
        """True if its next token is sampled with the whole batch and has the expected position, and can only
        be the last one by its length, an end-of-sequence token or a stop string.
        """
        moved = self.media is not None and self.media.one_by_one
        return self.on_device and not self.criteria and not moved

    @property
    def source_key(self) -> bytes:
        """The content of what it attends to across, if that is known by content."""
        return self.media.content if isinstance(self.media, CrossMedia) else b""

    @property
    def caller_ids(self) -> tuple[int, ...]:
        """The ids of the prompt as the caller gave them."""
        return self.ids if self.source is None else self.source.ids

    @property
    def of_ids(self) -> bool:
        """True if the rows of its decoder are token ids and nothing else."""
        return self.prompt_inputs is None

    @property
    def prompt_inputs(self) -> PromptInputs | None:
        """The prompt's inputs beside token ids."""
        given = self.media, self.embeds, self.source, self.past
        return next((each for each in given if each is not None), None)

    def behind(self, virtual: VirtualTokens | None) -> RequestParams:
        """The same behind virtual tokens, if there are any."""
        if virtual is None or not virtual.names:
            return self
        if isinstance(self.media, CrossMedia) or self.source is not None:
            what = "pictures to attend to" if self.source is None else "an encoder's input"
            raise ValueError(
                f"adapter={virtual.adapter!r}: virtual tokens stand in front of ids or embeddings, and the "
                f"prompt has {what}; use generate()"
            )
        content, count = virtual.content, len(virtual.names)
        past = content if isinstance(content, GivenPast) else None
        if past is not None and self.embeds is not None:
            raise ValueError(
                f"adapter={virtual.adapter!r}: its keys and values stand in front of ids, and the prompt has "
                "embeddings; use generate()"
            )
        embeds, media = self.embeds, self.media
        if media is not None:
            media = media.behind(content, count)
        elif isinstance(content, torch.Tensor):
            embeds = content[:] if embeds is None else torch.cat([content, embeds])
        return replace(
            self,
            prompt=(*virtual.names, *self.prompt),
            embeds=embeds,
            media=media,
            past=past,
            max_length=self.max_length + count,
            virtual=count,
        )

    def renamed(self) -> RequestParams:
        """The same, if some of its tokens have other names in the books than their ids."""
        return replace(self, prompt=(*self.prompt,))

    @property
    def mends(self) -> bool:
        """True if a processor replaces logits that are no numbers."""
        return any(isinstance(processor, InfNanRemoveLogitsProcessor) for processor in self.processors)


def check_model(model: Any) -> None:
    """Raise if the model's config holds generation settings, an old form. The check takes longer than reading
    a request, so its result is kept.
    """
    model._prepare_generation_config(None)


def _callables(name: str, given: Any) -> list[Any]:
    """The functions that a user hands over as a list."""
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(f"{name} is a list of callables, got {short(given)}; put it into a list")
    found = list(given or [])
    wrong = [each for each in found if not callable(each)]
    if wrong:
        raise TypeError(f"{name} is a list of callables, and {short(wrong[0])} in it is none")
    return found


def _require_function(name: str, given: Any) -> None:
    if given is not None and not callable(given):
        raise TypeError(f"{name} is a function, got {short(given)}")


class ParsedPrompt(NamedTuple):
    """A prompt: the ids that processors see, what the model is given as `name`, and what comes of it.

    inputs: ids are on the CPU, so that no request waits for what the device computes for others.
    """

    tokens: tuple[int, ...]
    name: str
    inputs: torch.Tensor
    embeds: torch.Tensor | None = None
    media: Media | None = None
    source: EncoderInput | None = None

    @property
    def names(self) -> tuple[int, ...]:
        """The prompt's names in the books."""
        if self.media is not None:
            return self.media.names
        return self.tokens if self.embeds is None else names_of(self.embeds, KEY)


def read_request(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    generation_config: Any,
    keywords: dict[str, Any],
    seed: int | None,
    logprobs: int | bool | None,
    prompt_logprobs: int | bool | None,
    return_routing: bool,
    options: Options,
    vocabulary: int | None = None,
) -> RequestParams:
    """Read a request as generate() would on that prompt alone; what the engine cannot do is refused.
    vocabulary: how many tokens its adapters know, if they are not the model's.
    """
    prompt, shown = tokenize_prompt(model, tokenizer, prompt, keywords)
    tokenizer = words_of(tokenizer)
    shown = media_arguments(model, _beside(keywords, shown))
    parts = {
        name: keywords.pop(name, None)
        for name in PROMPTS
        if name == "inputs_embeds" or model.config.is_encoder_decoder
    }
    extras = {
        name: keywords.pop(name, None) for name in (*PASSED_ON, "logits_processor", "stopping_criteria")
    }
    known = KnownTokens.of(model, vocabulary)
    asked = take_openai_options(known.count, keywords)
    defaults, config, own_ends = options.read(model, generation_config, keywords)
    config = asked.biased(config)
    given = (_for_encoder if model.config.is_encoder_decoder else _for_decoder)(
        model, tokenizer, prompt, config, vocabulary, **parts
    )
    given = _showing(model, given, shown)
    _require_function("prefix_allowed_tokens_fn", extras["prefix_allowed_tokens_fn"])
    config = _with_lengths(model, config, defaults, given)
    processors = _of_request(_processors(model, config, given, extras, asked), known)
    criteria = _criteria(model, config, tokenizer, extras["stopping_criteria"], options)
    at_tokens = [each.eos_token_id for each in criteria if type(each) is EosTokenCriteria]
    lengths = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
    others = StoppingCriteriaList(each for each in criteria if type(each) not in BY_NUMBERS)
    grammar, processor_plan, slow = _processor_plan(config, processors)
    at_tokens = [each for each in at_tokens if each is not config._eos_token_tensor]
    return RequestParams(
        prompt=given.names,
        ids=given.tokens,
        config=config,
        seed=_seed(seed, drawn=bool(config.do_sample)),
        top_logprobs=_top_logprobs("logprobs", logprobs, known.count),
        processor_plan=processor_plan,
        embeds=given.embeds,
        media=given.media,
        source=given.source,
        processors=processors,
        criteria=others,
        ends=own_ends.union(*map(ends_of, at_tokens)),
        max_length=min(lengths) - len(given.tokens) + len(given.names),
        scored=_scored(prompt_logprobs, known.count, given),
        grammar=grammar,
        slow=slow,
        stop=options.stops.stop(tokenizer, asked.stop, config.min_new_tokens or 0),
        known=known,
        return_routing=return_routing,
    )


def _processors(
    model: Any, config: Any, given: ParsedPrompt, extras: Mapping[str, Any], asked: OpenAIParams
) -> LogitsProcessorList:
    """The logits processors as generate() makes them, and OpenAI's penalties."""
    device = input_device(model)
    kept = config.encoder_repetition_penalty not in (None, 1) or config.encoder_no_repeat_ngram_size
    made: LogitsProcessorList = model._get_logits_processor(
        config,
        input_ids_seq_length=len(given.tokens),
        encoder_input_ids=given.inputs.to(device) if kept else given.inputs,
        logits_processor=LogitsProcessorList(_callables("logits_processor", extras["logits_processor"])),
        device=device,
        model_kwargs={},
        **{name: extras[name] for name in PASSED_ON},
    )
    return with_penalties(made, len(given.tokens), asked.presence, asked.frequency)


def _of_request(processors: LogitsProcessorList, known: KnownTokens) -> LogitsProcessorList:
    """Processors, those of grammars as they are for a request that knows these tokens."""
    return LogitsProcessorList(
        each.of_request(known.most) if isinstance(each, GrammarProcessor) else each for each in processors
    )


def _criteria(model: Any, config: Any, tokenizer: Any, given: Any, options: Options) -> StoppingCriteriaList:
    """The stopping criteria as generate() makes them, but for stop strings, whose criterion costs less."""
    if config.stop_strings is not None and tokenizer is None:
        # Transformers would name an argument of generate().
        raise ValueError(
            f"stop_strings={config.stop_strings!r} need the model's tokenizer; make the engine with it, "
            "Engine(model, tokenizer)"
        )
    brought = StoppingCriteriaList(_callables("stopping_criteria", given))
    stops = config.stop_strings
    own = stops is not None and not any(type(each) is StopStringCriteria for each in brought)
    others = copy.copy(config)
    others.stop_strings = None if own else stops
    criteria: StoppingCriteriaList = model._get_stopping_criteria(others, brought, tokenizer=tokenizer)
    if own:
        criteria.append(options.stops.criterion(tokenizer, stops))
    return criteria


def _processor_plan(
    config: Any, processors: LogitsProcessorList
) -> tuple[GrammarProcessor | None, ProcessorPlan | None, tuple[str, ...]]:
    """The processors as a grammar and a plan, or the names of those that run for the request alone: all of a
    beam search.
    """
    if (config.num_beams or 1) > 1:
        return None, None, tuple([type(each).__name__ for each in processors])
    grammars = [each for each in processors if isinstance(each, GrammarProcessor)]
    # What a grammar forbids stays forbidden, wherever its mask stands before the cuts.
    others = [each for each in processors if len(grammars) != 1 or each is not grammars[0]]
    plan, slow = processor_plan_of(others, sampled=bool(config.do_sample))
    return grammars[0] if plan is not None and grammars else None, plan, tuple(slow)


def _beside(keywords: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a request with what its processor has made to be shown."""
    twice = sorted(name for name in shown if keywords.get(name) is not None)
    if twice:
        raise ValueError(f"the prompt has images or audio and so do {twice}; give one of them")
    keywords.update(shown)
    return keywords


def _showing(model: Any, given: ParsedPrompt, shown: dict[str, Any]) -> ParsedPrompt:
    """A prompt of ids in the place of some of which something is put, if anything is shown."""
    if not shown:
        return given
    if given.embeds is not None:
        raise ValueError(
            f"{sorted(shown)} replace token ids of the prompt, got a prompt of embeddings; give one of them"
        )
    if cross_layers(model.config.get_text_config(decoder=True)):
        return given._replace(media=CrossMedia(shown, given.tokens, KEY, cross_length(model, shown)))
    return given._replace(media=Media(shown, given.tokens, marks_of(model.config), KEY))


def _for_decoder(
    model: Any, tokenizer: Any, prompt: Any, config: Any, vocabulary: int | None, inputs_embeds: Any
) -> ParsedPrompt:
    """A prompt's ids, and its embeddings if it is made of those. A tensor of numbers with a point is
    embeddings, too.
    """
    if isinstance(prompt, torch.Tensor) and prompt.is_floating_point():
        if inputs_embeds is not None:
            raise ValueError("the prompt and inputs_embeds are both embeddings; give one of them")
        inputs_embeds = prompt
        prompt = None
    if inputs_embeds is None:
        if prompt is None:
            raise ValueError("a request needs a prompt, or inputs_embeds")
        tokens = checked_ids(prompt_tokens(prompt, tokenizer), model, vocabulary)
        return ParsedPrompt(tokens, "input_ids", torch.tensor([tokens], device="cpu"))
    tokens = () if prompt is None else prompt_tokens(prompt, tokenizer)
    embeds = checked(model, inputs_embeds, tokens)
    return ParsedPrompt(tokens, "inputs_embeds", embeds[None], embeds)


def _for_encoder(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    config: Any,
    vocabulary: int | None,
    inputs_embeds: Any,
    input_features: Any,
    decoder_input_ids: Any,
) -> ParsedPrompt:
    """The input of an encoder, and the ids that its decoder begins with."""
    name = model.main_input_name
    if inputs_embeds is not None or (name == "input_ids" and input_features is not None):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; the engine takes its prompt as {name} only. Give "
            "that, or use generate()"
        )
    if name == "input_ids":
        if prompt is None:
            raise ValueError("a request needs a prompt")
        ids = checked_ids(prompt_tokens(prompt, tokenizer), model.get_encoder(), vocabulary)
        inputs = torch.tensor([ids], device="cpu")
    else:
        if prompt is not None or not isinstance(input_features, torch.Tensor):
            raise ValueError(
                f"{type(model).__name__} takes no text prompt; give {name}=..., and decoder_input_ids for "
                "the first tokens of the answer"
            )
        features = input_features[None] if input_features.ndim == 2 else input_features
        ids = ()
        inputs = features.detach().to(input_device(model), model.dtype, copy=True)
    begin = (
        {}
        if decoder_input_ids is None
        else {"decoder_input_ids": torch.tensor([prompt_tokens(decoder_input_ids, tokenizer)], device="cpu")}
    )
    start = config._decoder_start_token_tensor.cpu()
    found, _ = model._prepare_decoder_input_ids_for_generation(1, name, begin, start, torch.device("cpu"))
    begun = checked_ids(tuple(found[0].tolist()), model.get_decoder())
    source = EncoderInput(inputs.to(input_device(model), non_blocking=True), ids)
    return ParsedPrompt(begun, name, inputs, source=source)


def _with_lengths(model: Any, config: Any, defaults: tuple[bool, bool], given: ParsedPrompt) -> Any:
    """The options with the lengths that they mean for this prompt."""
    config = model._prepare_generated_length(config, *defaults, given.name, len(given.tokens), given.inputs)
    if len(given.tokens) >= config.max_length:
        count = len(given.tokens) if given.embeds is None else len(given.embeds)
        limit = longest(model)
        fits = limit is None or count < limit
        advice = "give max_new_tokens instead" if fits else f"shorten it: the model is made for {limit}"
        raise ValueError(
            f"the prompt has {count} tokens and max_length={config.max_length} leaves none to generate; "
            f"{advice}"
        )
    return config


def _seed(seed: int | None, drawn: bool) -> int:
    """The request's seed. Draws without one take it from torch's generator, so that torch.manual_seed settles
    it.

    A request that draws nothing leaves the generator as it is, as in generate().
    """
    if seed is None:
        return int(torch.randint(2**62, (), device="cpu")) if drawn else 0
    if not is_number(seed, Integral) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r} is not an int from 0 to 2**63 - 1")
    return int(seed)


def _scored(prompt_logprobs: int | bool | None, vocabulary: int, given: ParsedPrompt) -> int | None:
    """The same of the prompt's tokens."""
    found = _top_logprobs("prompt_logprobs", prompt_logprobs, vocabulary)
    of_ids = given.embeds is None and given.media is None and given.source is None
    if found is not None and not of_ids:
        raise ValueError(
            f"prompt_logprobs={prompt_logprobs!r} needs a prompt of token ids, and this one has embeddings, "
            "media or an encoder; leave prompt_logprobs out"
        )
    return found


def _top_logprobs(name: str, logprobs: int | bool | None, vocabulary: int) -> int | None:
    """How many of the likeliest tokens are reported with each token's logprob; None without logprobs."""
    if logprobs is None or logprobs is False:
        return None
    count = 0 if logprobs is True else logprobs
    if not isinstance(count, Integral) or not 0 <= count <= vocabulary:
        raise ValueError(f"{name}={logprobs!r} is not True or a number of top tokens from 0 to {vocabulary}")
    return int(count)


def is_about_time(criterion: Any) -> bool:
    """True if a criterion ends a request for its length in seconds."""
    return isinstance(criterion, MaxTimeCriteria)
