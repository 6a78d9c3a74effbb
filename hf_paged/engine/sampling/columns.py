"""The sampling state of the rows whose tokens are chosen together, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...kv.upload import upload
from ...scheduling import UNKNOWN, TokenSequence
from .histories import Histories, Owner
from .parameters import CUTS, FREQUENCY, NO_WARP, PENALTIES, PRESENCE, REPETITION, Warps, has_any
from .params import SamplingParams
from .penalties import with_counts_off
from .random_numbers import row_states
from .rules import ProcessorPlan, ProcessorRule, processed
from .warp import cut, draw, greedy_tokens_now, mend, penalised, scaled

MOST_IDS = 1 << 22
"""Ids that penalties read at once, padding included: 32 MB, and as much again for each operation on them."""


def parts_of(lengths: Sequence[int]) -> Iterator[slice]:
    """Rows of such lengths, in parts of at most MOST_IDS ids where they are padded to the longest until then:
    ascending ones make the fewest parts.
    """
    begin = 0
    for end, longest in enumerate(accumulate(lengths, max)):
        if end > begin and (end - begin + 1) * longest > MOST_IDS:
            yield slice(begin, end)
            begin = end
    yield slice(begin, len(lengths))


def _in_parts(
    scores: torch.Tensor, lengths: Sequence[int], apply: Callable[[torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor:
    """Scores [rows, vocabulary] after a function that reads so many ids of each row."""
    parts = [apply(scores[part], part) for part in parts_of(lengths)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class PenalisedRows(NamedTuple):
    """The rows with penalties, and what of them is the same in every step.

    rows: their places, on the device. begins: where their answers begin. warps: their parameters.
    """

    places: list[int]
    rows: torch.Tensor
    begins: list[int]
    warps: Warps


class SamplingColumns:
    """Sampling parameters as columns, one entry per sequence that gets a token; rebuilt when these sequences
    change.

    A place is a sequence's index among those whose tokens are chosen together.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        params: Sequence[SamplingParams],
        histories: Histories,
        fail: Callable[[int, Exception], None],
    ) -> None:
        """fail: called with a place whose processor raised, and the error; the place gets no token."""
        self._owners = list(zip(params, sequences, strict=True))
        self._histories = histories
        self._fail = fail
        self._drawn = [place for place, each in enumerate(params) if each.sampled]
        warps = [each.warp or NO_WARP for each in params]
        self._penalties = {place: warp for place, warp in enumerate(warps) if has_any(warp, PENALTIES)}
        self._penalised_rows: PenalisedRows | None = None
        """Made in the first step that penalises."""
        seeds = [params[place].seed for place in self._drawn]
        self._states = row_states(seeds, [sequences[place].index for place in self._drawn])
        self._drawn_warps = [warps[place] for place in self._drawn]
        self._warped = any(has_any(each, CUTS) for each in self._drawn_warps)
        """True if drawn rows are scaled or cut."""
        self._warps: tuple[torch.device, Warps] | None = None
        """Their parameters, and the device where they are, once a step draws."""
        self._processor_plans: list[ProcessorPlan] = []
        if any(each.has_rules for each in params):
            self._processor_plans = [each.processor_plan or ProcessorPlan() for each in params]
        readers = [place for place, plan in enumerate(self._processor_plans) if plan.reads]
        self._reading = sorted({*self._penalties, *readers})
        self._reading_rows: torch.Tensor | None = None
        """The same on the device, once they are noted."""
        self._offsets = [each.seen_length(0) for each in params]
        """How many more ids processors see than there are tokens."""
        self.uses_positions = bool(self._drawn or self._processor_plans or self._penalties)
        self.scores: torch.Tensor | None = None
        """Scores that the last tokens were chosen from, [places, vocabulary], if logprobs were requested;
        None if these are the logits.
        """
        self.uncut: torch.Tensor | None = None
        """The same before cuts; None if nothing was cut."""
        changes = self._processor_plans or self._penalties or self._warped
        self._keeps_scores = bool(changes) and any(each.top_logprobs is not None for each in params)

    def choose(
        self, logits: torch.Tensor, positions: Sequence[int], known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens for logits [places, vocabulary], and what the host gets, as `best` gives it: [2, places].

        positions: of these tokens in their sequences, if the batch `uses_positions`. known: the best tokens
            of these logits, if computed already.
        """
        if self._reading:
            self._histories.enter([self._owners[place] for place in self._reading], logits.device)
        scores = logits
        if self._processor_plans:
            scores = self._processed(logits, [plan.before for plan in self._processor_plans], positions)
        penalty = self._penalised(scores, positions) if self._penalties else None
        if penalty is not None and (self._drawn or self._processor_plans):
            scores = scores.index_copy(0, *penalty)
        if self._processor_plans:
            scores = self._processed(scores, [plan.between for plan in self._processor_plans], positions)
        # The next replay writes over what is known.
        chosen = greedy_tokens_now(scores) if known is None or self._processor_plans else known.clone()
        if penalty is not None and not self._processor_plans:
            chosen[:, penalty[0]] = greedy_tokens_now(penalty[1])
        self.scores = scores if self._keeps_scores else None
        self.uncut = None
        if self._drawn:
            chosen = self._with_draws(chosen, scores, positions)
        if self._reading:
            self._note(chosen[0], positions)
        if penalty is not None and not (self._drawn or self._processor_plans) and self._keeps_scores:
            self.scores = scores.index_copy(0, *penalty)
        return chosen

    def _penalised(self, scores: torch.Tensor, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows with penalties, and their scores under them."""
        same = self._penalised_rows
        if same is None or same.rows.device != scores.device:
            same = self._penalised_rows = self._rows_with_penalties(scores, positions)
        owners, lengths = self._seen(same.places, positions)
        own = scores[same.rows]
        if REPETITION.name in same.warps.numbers:
            penalties = same.warps.numbers[REPETITION.name]
            repeated = [length * (by != 1) for by, length in zip(penalties, lengths, strict=True)]
            own = _in_parts(
                own,
                repeated,
                lambda some, part: penalised(
                    some,
                    self._histories.whole(owners[part], repeated[part], UNKNOWN),
                    same.warps.part(part).number(REPETITION),
                ),
            )
        begins = same.begins
        counted = [length - begin for begin, length in zip(begins, lengths, strict=True)]
        if has_any(same.warps.numbers, (PRESENCE, FREQUENCY)) and any(counted):
            own = _in_parts(
                own,
                counted,
                lambda some, part: with_counts_off(
                    some,
                    *self._histories.spans(owners[part], begins[part], lengths[part]),
                    *map(same.warps.part(part).number, (PRESENCE, FREQUENCY)),
                ),
            )
        return same.rows, own

    def _rows_with_penalties(self, scores: torch.Tensor, positions: Sequence[int]) -> PenalisedRows:
        """In the order of their lengths, so that few ids are padded."""
        places = sorted(self._penalties, key=lambda place: positions[place] + self._offsets[place])
        return PenalisedRows(
            places,
            upload(places, scores.device),
            [len(self._owners[place][0].ids) for place in places],
            Warps.of([self._penalties[place] for place in places], scores.device),
        )

    def _seen(self, places: Sequence[int], positions: Sequence[int]) -> tuple[list[Owner], list[int]]:
        """The owners of these places, and how many ids their processors see."""
        offsets = self._offsets
        return [self._owners[place] for place in places], [
            positions[place] + offsets[place] for place in places
        ]

    def _note(self, tokens: torch.Tensor, positions: Sequence[int]) -> None:
        """Keep the tokens of rows whose processors read ids."""
        owners, lengths = self._seen(self._reading, positions)
        every = len(owners) == len(self._owners)
        rows = self._reading_rows
        if rows is None or rows.device != tokens.device:
            rows = self._reading_rows = upload(self._reading, tokens.device)
        self._histories.note(owners, lengths, tokens if every else tokens[rows])

    def _with_draws(
        self, chosen: torch.Tensor, scores: torch.Tensor, positions: Sequence[int]
    ) -> torch.Tensor:
        """The chosen tokens with drawn ones in the rows that are sampled."""
        every = len(self._drawn) == len(self._owners)
        places = None if every else upload(self._drawn, scores.device)
        own = whole = scores if places is None else scores[places]
        if self._warped:
            if self._warps is None or self._warps[0] != scores.device:
                self._warps = scores.device, Warps.of(self._drawn_warps, scores.device)
            warps = self._warps[1]
            whole = scaled(own, warps)
            own = cut(whole, warps)
        where = [positions[place] for place in self._drawn]
        if self._processor_plans:
            rules = [self._processor_plans[place].after for place in self._drawn]
            own = self._processed(own, rules, where, self._drawn)
        if self.scores is not None:
            self.scores = own if places is None else scores.index_copy(0, places, own)
            if own is not whole:
                self.uncut = whole if places is None else scores.index_copy(0, places, whole)
        chosen[0, slice(None) if places is None else places] = draw(own, self._states, where)
        return mend(chosen, scores.shape[1])

    def _processed(
        self,
        scores: torch.Tensor,
        rules: Sequence[tuple[ProcessorRule, ...]],
        positions: Sequence[int],
        owners: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Scores of these owners' rows after their rules."""
        if not any(rules):
            return scores
        places = owners or range(len(self._owners))
        lengths = [self._offsets[place] + position for place, position in zip(places, positions, strict=True)]

        def fail(row: int, error: Exception) -> None:
            self._fail(places[row], error)

        def read(rows: list[int], width: int, pad: int) -> torch.Tensor:
            own = [lengths[row] for row in rows]
            return self._histories.read([self._owners[places[row]] for row in rows], own, width, pad)

        return processed(scores, rules, lengths, fail, read)
