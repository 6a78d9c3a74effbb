"""The next token of many rows at once: greedy, or drawn under each row's own temperature and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...kv.ops import on, triton_package
from ...kv.upload import upload
from ...scheduling import UNKNOWN
from .penalties import AnswerPenalties
from .random_numbers import row_numbers


class Warp(NamedTuple):
    """How a row's scores are penalised, scaled and cut before a choice, in the order of the processors."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def penalises(self) -> bool:
        """True if tokens that a row has already have other scores."""
        return self.repetition != 1 or self.counts

    @property
    def counts(self) -> bool:
        """True if the tokens of answers are counted."""
        return bool(self.presence or self.frequency)

    @property
    def warps(self) -> bool:
        """True if scores are scaled or cut."""
        return self._replace(repetition=1.0, presence=0.0, frequency=0.0) != Warp()


_FIELDS_OF = {
    RepetitionPenaltyLogitsProcessor: {"repetition": "penalty"},
    AnswerPenalties: {"presence": "presence", "frequency": "frequency"},
    TemperatureLogitsWarper: {"temperature": "temperature"},
    TopKLogitsWarper: {"top_k": "top_k"},
    TopPLogitsWarper: {"top_p": "top_p"},
    MinPLogitsWarper: {"min_p": "min_p"},
}
"""The fields of each processor's numbers, and what the processor calls them."""
PENALTIES = (RepetitionPenaltyLogitsProcessor, AnswerPenalties)
CUTS = frozenset(_FIELDS_OF) - set(PENALTIES)


def warp_of(processors: Sequence[Any], sampled: bool) -> Warp | None:
    """These processors as a warp, if they are known ones in their order; else None. Cuts apply only to
    sampling.
    """
    kinds = [type(processor) for processor in processors]
    known: list[type] = list(_FIELDS_OF) if sampled else list(PENALTIES)
    if any(kind not in known for kind in kinds) or kinds != sorted(set(kinds), key=known.index):
        return None
    for processor in processors:
        if (
            getattr(processor, "filter_value", -torch.inf) != -torch.inf
            or getattr(processor, "min_tokens_to_keep", 1) != 1
        ):
            return None
        if getattr(processor, "prompt_ignore_length", None) is not None:
            return None
    return Warp(
        **{
            field: getattr(processor, name)
            for processor in processors
            for field, name in _FIELDS_OF[type(processor)].items()
        }
    )


def penalised(scores: torch.Tensor, ids: torch.Tensor, penalties: Sequence[float]) -> torch.Tensor:
    """Scores [rows, vocabulary] with each row's repetition penalty on its tokens `ids` [rows, n], each once.

    Ids without a score cannot be repeated.
    """
    by = upload(penalties, scores.device, scores.dtype)[:, None]
    vocabulary = scores.shape[1]
    wide = torch.nn.functional.pad(scores, (0, 1))
    ids = ids.masked_fill((ids < 0) | (ids >= vocabulary), vocabulary)
    own = wide.gather(1, ids)
    return wide.scatter_(1, ids, torch.where(own < 0, own * by, own / by))[:, :vocabulary]


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The best tokens of scores [rows, vocabulary], and the same with UNKNOWN in rows without one: [2, rows].

    A row has none if its scores contain NaN or are all -inf.
    """
    tokens = scores.argmax(-1)
    sound = scores.gather(1, tokens[:, None])[:, 0] > -torch.inf  # to torch NaN is the largest number
    return torch.stack([tokens, tokens.masked_fill(~sound, UNKNOWN)])


def greedy_tokens_now(scores: torch.Tensor) -> torch.Tensor:
    """`greedy_tokens` outside captured steps: on the host numpy finds them in a tenth of torch's time."""
    if scores.device.type != "cpu":
        return greedy_tokens(scores)
    rows = scores.numpy()
    tokens = rows.argmax(1).tolist()  # to numpy, too, NaN is the largest number
    host = [token if row[token] > -torch.inf else UNKNOWN for row, token in zip(rows, tokens, strict=True)]
    return upload([tokens, host], scores.device)


def scaled(scores: torch.Tensor, warps: Sequence[Warp]) -> torch.Tensor:
    """The scores [rows, vocabulary] under each row's temperature."""
    if all(each.temperature == 1 for each in warps):
        return scores
    return scores / upload([each.temperature for each in warps], scores.device, torch.float32)[:, None]


def cut(scores: torch.Tensor, warps: Sequence[Warp]) -> torch.Tensor:
    """The scores [rows, vocabulary], with -inf for what each row's cuts leave out."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return upload(values, scores.device, dtype)[:, None]

    most = max(each.top_k for each in warps)
    vocabulary = scores.shape[1]
    if most:
        largest = scores.topk(min(most, vocabulary)).values
        places = column([min(each.top_k or most, vocabulary) - 1 for each in warps], torch.long)
        least = largest.gather(1, places).masked_fill(column([each.top_k for each in warps]) == 0, -torch.inf)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if any(each.top_p < 1 for each in warps):
        ascending, order = scores.sort()
        below = ascending.softmax(-1).cumsum(-1) <= column([1 - each.top_p for each in warps])
        below &= column([each.top_p for each in warps]) < 1
        below[:, -1] = False
        scores = scores.masked_fill(below.scatter(1, order, below), -torch.inf)
    if any(each.min_p > 0 for each in warps):
        chances = scores.softmax(-1)
        lowest = column([each.min_p for each in warps]) * chances.amax(-1, keepdim=True)
        scores = scores.masked_fill(chances < lowest, -torch.inf)
    return scores


def draw(scores: torch.Tensor, states: np.ndarray, positions: Sequence[int]) -> torch.Tensor:
    """A token [rows] for every row of scores [rows, vocabulary], drawn by its softmax. states: `row_states`.

    The draw depends on the seed of the row's request, the number of its sample and the position of the token,
    and on nothing else (C35).
    """
    chance = upload(row_numbers(states, positions), scores.device, torch.float64)
    kernels = triton_package("auto", scores.device, scores.dtype)
    if kernels is not None:
        with on(scores.device):
            tokens: torch.Tensor = kernels.draw(scores, chance)
        return tokens
    chances = scores.softmax(-1).double().cumsum(-1)
    at = chance[:, None] * chances[:, -1:]
    return torch.searchsorted(chances, at, right=True).squeeze(1)


def mend(chosen: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Tokens [2, rows] as `greedy_tokens` gives them, some of them drawn since, with invalid ids replaced.

    A draw may be outside the vocabulary, as where a temperature is so low that all scores are infinite. It
    becomes a valid id on the device and UNKNOWN on the host.
    """
    tokens, host = chosen
    host = torch.where(host < 0, host, tokens).masked_fill(tokens >= vocabulary, UNKNOWN)
    return torch.stack([tokens.clamp(max=vocabulary - 1), host])
