"""OpenAI's penalties: off the scores of tokens that the answer has already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

BEFORE = (
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
)
"""Processors behind which these penalties run."""


class AnswerPenalties(LogitsProcessor):
    """`presence` off the score of each token of the answer so far, `frequency` off for each time that it
    came.

    A negative number raises scores. Tokens of the prompt cost nothing.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        """prompt: how many ids of a row are no answer."""
        self.prompt = prompt
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answers = input_ids[:, self.prompt :]
        there = torch.ones_like(answers, dtype=torch.bool)
        return with_counts_off(scores.clone(), answers, there, self.presence, self.frequency)


def with_counts_off(
    scores: torch.Tensor,
    answers: torch.Tensor,
    there: torch.Tensor,
    presence: torch.Tensor | float,
    frequency: torch.Tensor | float,
) -> torch.Tensor:
    """Scores [rows, vocabulary] less the penalties on answers [rows, tokens], in place.

    there: which of the answers' tokens are some, [rows, tokens]; the others are any tokens of the vocabulary.
    presence, frequency: numbers, or a number for each row [rows, 1].
    """
    times = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(1, answers, there.int())  # exact sums
    counts = times.gather(1, answers).to(scores.dtype)
    own = scores.gather(1, answers) - frequency * counts - presence * counts.clamp(max=1)
    return scores.scatter_(1, answers, own)  # a token that came twice is written twice, with one number


def with_penalties(
    processors: LogitsProcessorList, prompt: int, presence: float, frequency: float
) -> LogitsProcessorList:
    """The processors with penalties in their place, if there are any."""
    if not (presence or frequency):
        return processors
    place = _first_place(processors)
    own = AnswerPenalties(prompt, presence, frequency)
    return LogitsProcessorList([*processors[:place], own, *processors[place:]])


def _first_place(processors: Sequence[object]) -> int:
    """The place behind all processors that run before penalties."""
    return 1 + max([place for place, each in enumerate(processors) if isinstance(each, BEFORE)], default=-1)
