"""The numbers of a row by which its scores change before a choice: one declaration each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...blocks import Column
from ...kv.upload import upload
from .penalties import AnswerPenalties


class Parameter(NamedTuple):
    """A column of the sampler, and the processor of transformers that has its number."""

    column: Column
    processor: type
    attribute: str
    """The processor's name for the number."""

    @property
    def name(self) -> str:
        """The name of its column."""
        return self.column.name


_own = partial(Column, sent=False, captured=False)

REPETITION = Parameter(_own("repetition", "float32", empty=1), RepetitionPenaltyLogitsProcessor, "penalty")
PRESENCE = Parameter(_own("presence", "float32"), AnswerPenalties, "presence")
FREQUENCY = Parameter(_own("frequency", "float32"), AnswerPenalties, "frequency")
TEMPERATURE = Parameter(_own("temperature", "float32", empty=1), TemperatureLogitsWarper, "temperature")
TOP_K = Parameter(_own("top_k", "int64"), TopKLogitsWarper, "top_k")
TOP_P = Parameter(_own("top_p", "float64", empty=1), TopPLogitsWarper, "top_p")
MIN_P = Parameter(_own("min_p", "float32"), MinPLogitsWarper, "min_p")

PENALTIES = (REPETITION, PRESENCE, FREQUENCY)
"""Parameters that go by the tokens of a row, in the order in which transformers applies them."""
CUTS = (TEMPERATURE, TOP_K, TOP_P, MIN_P)
"""Parameters that scale or cut scores, for sampling only, in the same order, after penalties."""

Warp = Mapping[str, float]
"""By parameter the number of a row. A parameter that is not there is empty."""
NO_WARP: Warp = MappingProxyType({})


def has_any(numbers: Mapping[str, object], parameters: Sequence[Parameter]) -> bool:
    """True if there are numbers of one of these parameters."""
    return any(each.name in numbers for each in parameters)


def is_of(processor: Any, parameters: Sequence[Parameter]) -> bool:
    """True if a processor has one of these parameters."""
    return any(type(processor) is each.processor for each in parameters)


def warp_of(processors: Sequence[Any], sampled: bool) -> Warp | None:
    """These processors as a warp, if they are known ones in their order; else None. Cuts apply only to
    sampling.
    """
    known = (*PENALTIES, *CUTS) if sampled else PENALTIES
    order = list(dict.fromkeys(each.processor for each in known))
    kinds = [type(processor) for processor in processors]
    if any(kind not in order for kind in kinds) or kinds != sorted(set(kinds), key=order.index):
        return None
    for processor in processors:
        if (
            getattr(processor, "filter_value", -torch.inf) != -torch.inf
            or getattr(processor, "min_tokens_to_keep", 1) != 1
        ):
            return None
        if getattr(processor, "prompt_ignore_length", None) is not None:
            return None
    by_kind = dict(zip(kinds, processors, strict=True))
    numbers = [
        (each, getattr(by_kind[each.processor], each.attribute))
        for each in known
        if each.processor in by_kind
    ]
    return {each.name: number for each, number in numbers if number != each.column.empty}


class Warps(NamedTuple):
    """The parameters of several rows: those that any row has, on the host and on a device."""

    numbers: Mapping[str, tuple[float, ...]]
    tensors: Mapping[str, torch.Tensor]
    """By parameter [rows, 1]."""

    @classmethod
    def of(cls, warps: Sequence[Warp], device: torch.device) -> Warps:
        """Those of rows with these warps, laid out by their declarations."""
        columns = [each.column for each in (*PENALTIES, *CUTS)]
        numbers = {
            each.name: tuple([warp.get(each.name, each.empty) for warp in warps])
            for each in columns
            if any(each.name in warp for warp in warps)
        }
        tensors = {
            each.name: upload(list(numbers[each.name]), device, getattr(torch, each.dtype))[:, None]
            for each in columns
            if each.name in numbers
        }
        return cls(numbers, tensors)

    def part(self, rows: slice) -> Warps:
        """Those of some of the rows."""
        return Warps(
            {name: numbers[rows] for name, numbers in self.numbers.items()},
            {name: tensor[rows] for name, tensor in self.tensors.items()},
        )

    def number(self, parameter: Parameter) -> torch.Tensor | float:
        """The numbers [rows, 1] of a parameter, or the one that is empty if no row has any."""
        return self.tensors.get(parameter.name, parameter.column.empty)
