"""Beam search of one request, one step at a time, as generate() does it for that prompt alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .asking import Asked
from .numbers import gumbel
from .output import FinishReason, TokenLogprob

NOT = -1.0e9
"""The score of what is not there. Sums with it stay in fp32, as generate()'s do."""


Notes = Callable[[int, int], TokenLogprob]
"""What is to be kept about a beam's next token."""
Reasons = Callable[[list[int], list[int]], list[FinishReason | None]]
"""Why continuations, given as beams and tokens, end there, if they do."""


class BeamStep(NamedTuple):
    """Where each beam goes on from, and with which token."""

    sources: list[int]
    tokens: list[int]
    done: bool


class Hypothesis(NamedTuple):
    """A beam: its new tokens, for each of them its logprob if that was asked for, and why it ended if it did."""

    tokens: list[int]
    notes: list[TokenLogprob]
    reason: FinishReason | None


class BeamSearch:
    """The scores of the beams that run, and the best that have ended.

    Among the continuations of all beams the best `keep` are looked at, so many that `beams` of them go on even if every end of
    sequence is among them. Those that end among the first `beams` compete with what has ended before, by score over length.
    """

    def __init__(self, asked: Asked) -> None:
        config = asked.config
        self.asked, self.count = asked, asked.beams
        self.keep = max(2, 1 + _ends(config)) * self.count
        self.length_penalty, self.early_stopping = config.length_penalty, config.early_stopping
        self.running = torch.zeros(self.count)
        self.running[1:] = NOT
        self.scores = torch.full((self.count,), NOT)
        self.finished = torch.zeros(self.count, dtype=torch.bool)
        self.hypotheses = [Hypothesis([], [], None) for _ in range(self.count)]
        self.improvable = torch.ones(1, dtype=torch.bool)
        self.new = 0
        """The new tokens so far."""

    def step(
        self,
        scores: torch.Tensor,
        so_far: Sequence[Hypothesis],
        reasons: Reasons,
        notes: Notes | None,
    ) -> BeamStep:
        """Go on by one token. scores [beams, vocabulary] are processed log probabilities, so_far is what each beam has said."""
        values, places = self._continuations(scores)
        beams, tokens = (places // scores.shape[1]).tolist(), (places % scores.shape[1]).tolist()
        why = reasons(beams, tokens)
        hits = torch.tensor([reason is not None for reason in why])
        running = values + hits.float() * NOT
        chosen = running.topk(self.count)[1]
        self.running = running[chosen]
        candidates = [
            Hypothesis([*so_far[beam].tokens, token], [*so_far[beam].notes, notes(beam, token)] if notes else [], reason)
            for beam, token, reason in zip(beams, tokens, why, strict=True)
        ]
        self._collect(values, hits, candidates)
        self.new += 1
        self._look_ahead()
        open_beam = not (bool(self.finished.all()) and self.early_stopping is True)
        done = not (bool(self.improvable.any()) and open_beam and not bool(hits.all()))
        picked = chosen.tolist()
        return BeamStep([beams[i] for i in picked], [tokens[i] for i in picked], done)

    def answers(self) -> list[tuple[Hypothesis, float]]:
        """What is returned, best first, with its score."""
        return list(zip(self.hypotheses, self.scores.tolist(), strict=True))[: self.asked.answers]

    def _continuations(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Accumulated scores and places [keep] of the best continuations, or of drawn ones."""
        flat = (scores + self.running.to(scores.device)[:, None]).flatten()
        if not self.asked.sampled:
            values, places = flat.topk(self.keep)
            return values.cpu(), places.cpu()
        keys = torch.tensor([self.asked.seed, self.new], device=flat.device)
        noise = gumbel(keys[:1], keys[1:], torch.arange(flat.shape[0], device=flat.device))
        places = (flat.double() + noise).topk(self.keep)[1]
        return flat[places].cpu(), places.cpu()

    def _collect(self, values: torch.Tensor, hits: torch.Tensor, candidates: list[Hypothesis]) -> None:
        """Let what ended now compete with what had."""
        ended = hits & (torch.arange(self.keep) < self.count)
        scores = values / (self.new + 1) ** self.length_penalty
        scores = scores + float(bool(self.finished.all()) and self.early_stopping is True) * NOT
        scores = scores + (~self.improvable).float() * NOT
        scores = scores + (~ended).float() * NOT
        merged = torch.cat([self.scores, scores])
        best = merged.topk(self.count)[1]
        everything = self.hypotheses + candidates
        self.hypotheses = [everything[place] for place in best.tolist()]
        self.scores, self.finished = merged[best], torch.cat([self.finished, ended])[best]

    def _look_ahead(self) -> None:
        """Whether the best beam that runs may still beat the worst that has ended."""
        length = self.new
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.asked.config.max_length - len(self.asked.ids)
        best = self.running[:1] / length**self.length_penalty
        worst = torch.where(self.finished, self.scores.min(), NOT)
        self.improvable = self.improvable & (best > worst).any()


def _ends(config: object) -> int:
    """How many end-of-sequence tokens there are."""
    ends = getattr(config, "_eos_token_tensor", None)
    return 0 if ends is None else int(ends.shape[0])
