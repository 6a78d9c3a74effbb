"""The options of a request, as generate() completes and checks them."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from ...model.offloaded import input_device
from ..multimodal.media import SHOWN
from ..outputs.stops import StopLists
from .fields import COUNTS, KNOWN, TOKENS, Written, check_counts, check_fields, counted, why_unknown

LENGTHS = ("max_new_tokens", "min_new_tokens")
"""Options on which no other depends: the lengths of answers are as different as the requests."""
MOST_KEPT = 64
"""Sets of options that are kept."""
BESIDE = (
    "seed",
    "logprobs",
    "priority",
    "salt",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "inputs_embeds",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""Keywords of a request that are no options of generation."""
PLAIN = frozenset({bool, int, float, str, type(None)})


class ParsedOptions(NamedTuple):
    """Options, completed from the model's own and checked.

    open: whether the longest and the shortest length are left open. ends: the ends of sequence among the
        options.
    """

    open: tuple[bool, bool]
    config: Any
    ends: frozenset[int]


class Options:
    """Reads options and keeps the results: most requests of an engine come with options that others have had,
    and reading them is slow.
    """

    def __init__(self) -> None:
        self._kept: tuple[dict[str, Any], dict[Hashable, ParsedOptions]] = {}, {}
        """The model's own options, and what was read while they were so. Several threads may read at once."""
        self.stops = StopLists()
        """The stop strings that requests came with."""

    def read(self, model: Any, generation_config: Any, keywords: dict[str, Any]) -> ParsedOptions:
        """The options of a request; the config is its own."""
        if generation_config is not None or not all(map(_is_plain, keywords.values())):
            return _read(model, generation_config, keywords)
        lengths = {name: keywords[name] for name in LENGTHS if _is_length(keywords.get(name))}
        values = [(name, _hashable(value)) for name, value in keywords.items() if name not in lengths]
        key = frozenset(values), frozenset(lengths), input_device(model)
        own = vars(model.generation_config)
        then, known = self._kept
        if not _equal(then, own):
            known = {}
            self._kept = copy.deepcopy(own), known
        found = known.get(key)
        if found is None:
            found = _read(model, None, copy.deepcopy(keywords))
            if len(known) >= MOST_KEPT:
                known.clear()
            known[key] = found
        config = copy.copy(found.config)
        for name, length in lengths.items():
            setattr(config, name, length)
        return found._replace(config=config)


def _is_length(value: Any) -> bool:
    return type(value) is int and value > 0


def _hashable(value: Any) -> Hashable:
    """A plain value, unequal to those of other types."""
    return type(value), tuple(value) if type(value) is list else value


def _is_plain(value: Any) -> bool:
    """True if it can be compared and copied: a number, a string, or a list of numbers."""
    return type(value) in PLAIN or (type(value) is list and all(type(each) is int for each in value))


def _equal(kept: Any, now: Any) -> bool:
    try:
        return bool(kept == now)
    except (RuntimeError, ValueError):  # there are tensors or arrays in it, which are not compared
        return False


def ends_of(tokens: torch.Tensor | None) -> frozenset[int]:
    """The ends of sequence in a tensor; this waits for the device."""
    return frozenset() if tokens is None else frozenset(tokens.flatten().tolist())


def _read(model: Any, generation_config: Any, keywords: dict[str, Any]) -> ParsedOptions:
    own = model.generation_config
    if not isinstance(generation_config, GenerationConfig | None):
        raise TypeError(
            f"generation_config must be a GenerationConfig, got {type(generation_config).__name__}; give "
            "single options by name"
        )

    def left_open(name: str) -> bool:
        return all(
            value is None
            for value in (keywords.get(name), getattr(generation_config, name, None), getattr(own, name))
        )

    defaults = left_open("max_length"), left_open("min_length")
    for name in set(COUNTS) & keywords.keys():
        if keywords[name] is not None:
            counted(name, keywords[name])  # transformers' own checks come with the completion, in other words
    # The engine has its own pages: the word is no news to it.
    if generation_config is None:
        # As transformers does, except for a check of the generation settings in the model's own config
        config, unknown = model._prepare_generation_config(GenerationConfig())
        unknown |= config.update(**keywords)
    else:
        config, unknown = model._prepare_generation_config(generation_config, **keywords)
    unknown = {name for name, value in unknown.items() if value is not None} - {
        "output_attentions",
        "output_hidden_states",
    }
    shown = sorted(name for name in unknown if SHOWN.search(name))
    if shown:
        raise ValueError(
            f"the engine does not take images or audio ({shown}) for {type(model).__name__}; use generate()"
        )
    if unknown:
        raise ValueError(why_unknown(unknown, {*KNOWN, *BESIDE}))
    written = Written(keywords, generation_config)
    check_fields(config, written)
    check_counts(config, written)
    try:
        model._prepare_special_tokens(config, True, device=input_device(model))
    except TypeError as error:
        tokens = {name: getattr(config, name) for name in sorted(TOKENS) if getattr(config, name) is not None}
        raise TypeError(
            f"a special token is an int, eos_token_id also a list of them, got {tokens}"
        ) from error
    return ParsedOptions(defaults, config, ends_of(config._eos_token_tensor))
