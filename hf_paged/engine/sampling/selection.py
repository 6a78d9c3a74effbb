"""Tokens of rows that are chosen together: rules, penalties, one argmax, one cut and one draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kv.upload import upload
from ...scheduling import TokenSequence
from ..job import Job
from .penalties import PenaltyState
from .rules import Recipe, Rule, processed
from .warp import Warp, best, draw, mend, warp


class Selection:
    """The jobs and sequences of some rows, and what every step needs to know of them."""

    def __init__(self, owners: Sequence[tuple[Job, TokenSequence]], repeats: PenaltyState) -> None:
        self._owners, self._repeats = owners, repeats
        jobs = [job for job, _ in owners]
        self._drawn = [place for place, job in enumerate(jobs) if job.asked.sampled]
        self._fined = [place for place, job in enumerate(jobs) if job.fined]
        self._seeds = [jobs[place].asked.seed for place in self._drawn]
        self._warps = [jobs[place].asked.warp or Warp() for place in self._drawn]
        self._recipes: list[Recipe] = []
        if any(job.ruled for job in jobs):
            self._recipes = [job.asked.recipe or Recipe() for job in jobs]
        self._reading = [place for place, recipe in enumerate(self._recipes) if recipe.reads]

    def choose(
        self, logits: torch.Tensor, positions: Sequence[int], known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens for rows of logits [rows, vocabulary], and what the host gets, as `best` gives it: [2,
        rows].

        positions: of these tokens in their sequences. known: the best tokens of these logits, if computed
            already.
        """
        if self._reading:
            self._repeats.histories.enter([self._owners[place] for place in self._reading], logits.device)
        scores = self._processed(logits, [recipe.before for recipe in self._recipes], positions)
        fined = None
        if self._fined:
            fined = self._repeats.fined(scores, self._fined, [self._owners[place] for place in self._fined])
        if fined is not None and (self._drawn or self._recipes):
            scores = scores.index_copy(0, fined.rows, fined.scores)
        scores = self._processed(scores, [recipe.between for recipe in self._recipes], positions)
        # The next replay writes over what is known.
        chosen = best(scores) if known is None or self._recipes else known.clone()
        if fined is not None and not self._recipes:
            chosen[:, fined.rows] = best(fined.scores)
        if self._drawn:
            chosen = self._with_draws(chosen, scores, positions)
        if fined is not None:
            self._repeats.note(fined, chosen[0])
        if self._reading:
            self._note(chosen[0], positions)
        return chosen

    def _note(self, tokens: torch.Tensor, positions: Sequence[int]) -> None:
        """Keep the tokens of rows whose processors read ids."""
        owners = [self._owners[place] for place in self._reading]
        lengths = [self._owners[place][0].asked.seen_length(positions[place]) for place in self._reading]
        every = len(owners) == len(self._owners)
        own = tokens if every else tokens[upload(self._reading, tokens.device)]
        self._repeats.histories.note(owners, lengths, own)

    def _with_draws(
        self, chosen: torch.Tensor, scores: torch.Tensor, positions: Sequence[int]
    ) -> torch.Tensor:
        """The chosen tokens with drawn ones in the rows that are sampled."""
        every = len(self._drawn) == len(self._owners)
        places = None if every else upload(self._drawn, scores.device)
        own = warp(scores if places is None else scores[places], self._warps)
        where = [positions[place] for place in self._drawn]
        if self._recipes:
            rules = [self._recipes[place].after for place in self._drawn]
            own = self._processed(own, rules, where, self._drawn)
        indices = [self._owners[place][1].index for place in self._drawn]
        chosen[0, slice(None) if places is None else places] = draw(own, self._seeds, indices, where)
        return mend(chosen, scores.shape[1])

    def _processed(
        self,
        scores: torch.Tensor,
        rules: Sequence[tuple[Rule, ...]],
        positions: Sequence[int],
        owners: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Scores after the rules of their rows, which belong to these owners."""
        if not any(rules):
            return scores
        whose = [self._owners[place] for place in owners or range(len(self._owners))]
        lengths = [
            job.asked.seen_length(position) for (job, _), position in zip(whose, positions, strict=True)
        ]

        def fail(row: int, error: Exception) -> None:
            whose[row][0].trouble_with_scores = error

        def read(rows: list[int], width: int, pad: int) -> torch.Tensor:
            own = [lengths[row] for row in rows]
            return self._repeats.histories.read([whose[row] for row in rows], own, width, pad)

        return processed(scores, rules, lengths, fail, read)
