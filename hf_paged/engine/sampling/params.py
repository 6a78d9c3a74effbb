"""The parts of a request by which its tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .parameters import Warp
from .rules import ProcessorPlan


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and which ids its processors see.

    prompt: what the scheduler sees, a number for each position.
    ids: what processors and criteria see: the same, or for a prompt of embeddings [tokens, hidden] the ids
        given with them, if any.
    config: its GenerationConfig.
    top_logprobs: how many are reported beside each token; None for no logprobs.
    processor_plan: what the processors do to scores, if they run for the whole batch at once.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    config: Any
    seed: int
    top_logprobs: int | None
    processor_plan: ProcessorPlan | None

    @property
    def beams(self) -> int:
        """How many beams; 1 is none."""
        return int(self.config.num_beams or 1)

    @property
    def answers(self) -> int:
        """How many sequences come back."""
        return int(self.config.num_return_sequences or 1)

    @property
    def sampled(self) -> bool:
        """True if tokens are drawn."""
        return bool(self.config.do_sample)

    @property
    def warp(self) -> Warp | None:
        """The parts of the processor plan that take other numbers for every row."""
        return None if self.processor_plan is None else self.processor_plan.warp

    @property
    def has_rules(self) -> bool:
        """True if it has processors that run for the rows of all requests at once."""
        return self.processor_plan is not None and any(self.processor_plan[1:])

    def seen_length(self, position: int) -> int:
        """The length of a sequence of so many tokens in the books as processors and criteria see it."""
        return position + len(self.ids) - len(self.prompt)

    def seen(self, tokens: list[int]) -> list[int]:
        """The tokens of a sequence in the books as processors and criteria see them."""
        return tokens if self.prompt is self.ids else [*self.ids, *tokens[len(self.prompt) :]]
