"""Options of OpenAI's requests: `stop`, penalties and biases, beside those that generate() has."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple

from transformers import SequenceBiasLogitsProcessor

from ...blocks.options import is_number
from .prompts import short


class OpenAIParams(NamedTuple):
    """A request's options of OpenAI's. stop: as it was given."""

    stop: Any
    presence: float
    frequency: float
    biases: Mapping[int, float]

    def biased(self, config: Any) -> Any:
        """Options of generate() with the biases as `sequence_bias` of single ids, added to what is there."""
        if not self.biases:
            return config
        given = config.sequence_bias
        found = {} if given is None else dict(SequenceBiasLogitsProcessor(given).sequence_bias)
        for token, bias in self.biases.items():
            found[token,] = found.get((token,), 0.0) + bias
        config.sequence_bias = found
        return config


def take_openai_options(vocabulary: int, keywords: dict[str, Any]) -> OpenAIParams:
    """Take these options out of the keywords of a request, and check them. vocabulary: its tokens."""
    stop, presence, frequency, biases = (
        keywords.pop(name, None) for name in ("stop", "presence_penalty", "frequency_penalty", "logit_bias")
    )
    return OpenAIParams(
        stop,
        _number("presence_penalty", presence),
        _number("frequency_penalty", frequency),
        {} if biases is None else _biases(biases, vocabulary),
    )


def _number(name: str, value: Any) -> float:
    """An option that is a number; None is 0."""
    if value is None:
        return 0.0
    if not is_number(value, Real):
        raise TypeError(f"{name} is a number, got {short(value)}; give one as 0.5, or leave it out")
    if not isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite; give a number as 0.5, or leave it out")
    return float(value)


def _biases(biases: Any, vocabulary: int) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise TypeError(
            f"logit_bias is a mapping of token ids to numbers, got {short(biases)}; give one as {{5: 2.0}}"
        )
    found = {}
    for token, bias in biases.items():
        if not is_number(token, Integral):
            raise TypeError(f"logit_bias has the key {short(token)}, expected a token id; give int(key)")
        if not 0 <= int(token) < vocabulary:
            raise ValueError(
                f"token id {token} of logit_bias is not one of the {vocabulary} of the vocabulary; leave it "
                "out"
            )
        found[int(token)] = _number(f"logit_bias[{token}]", bias)
    return found
