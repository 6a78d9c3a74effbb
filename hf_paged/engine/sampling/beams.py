"""Beam search, one step at a time, with generate()'s results for each prompt alone; all searches of a step
are advanced together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ..outputs.output import FinishReason, TokenLogprob
from .params import SamplingParams

NOT = -1.0e9
"""The score of what is not there. Sums with it stay in fp32, as generate()'s do."""


class BeamToken(NamedTuple):
    """The last new token of a beam, its logprobs if requested, and a link to the tokens before it, which
    beams share.
    """

    before: BeamToken | None
    token: int
    note: TokenLogprob | None


class Hypothesis(NamedTuple):
    """A finished beam: its new tokens, their logprobs, its finish reason if any, and its score."""

    tokens: list[int]
    notes: list[TokenLogprob]
    reason: FinishReason | None
    score: float


class BeamState(NamedTuple):
    """A search after `new` tokens: the running beams with their scores, and the best finished ones with
    theirs.

    finished: which of the finished slots are filled. why: their finish reasons. improvable: whether a running
    beam can still enter them. done: whether the search is over. Scores are fp32 numbers.
    """

    new: int
    running: list[float]
    last_tokens: list[BeamToken | None]
    scores: list[float]
    finished: list[bool]
    ended: list[BeamToken | None]
    why: list[FinishReason | None]
    improvable: bool
    done: bool = False


class Continuations(NamedTuple):
    """The best continuations of a search, best first: their scores, parent beams, tokens and logprobs."""

    scores: list[float]
    beams: list[int]
    tokens: list[int]
    notes: list[TokenLogprob] | None


class BeamStep(NamedTuple):
    """The parent and the next token of each beam, and the state of the search after the step."""

    sources: list[int]
    tokens: list[int]
    state: BeamState


class BeamSearch:
    """The beam search of one request.

    Of the continuations of all beams the best `keep` are considered: enough that `count` can continue even if
    every end-of-sequence token is among them. Those that end within the first `count` compete with earlier
    finished beams by score over length.
    """

    def __init__(self, params: SamplingParams) -> None:
        config = params.config
        self.params = params
        self.count = params.beams
        self.keep = max(2, 1 + _ends(config)) * self.count
        self.length_penalty = config.length_penalty
        self.early_stopping = config.early_stopping
        count = self.count
        nothing = [NOT] * self.count
        self.state = BeamState(
            0,
            [0.0, *nothing[1:]],
            [None] * count,
            nothing,
            [False] * count,
            [None] * count,
            [None] * count,
            True,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Searches of one shape can take a step together."""
        return self.count, self.keep

    def answers(self) -> list[Hypothesis]:
        """The hypotheses that are returned, best first."""
        found = zip(self.state.ended, self.state.why, self.state.scores, strict=True)
        return [_hypothesis(*each) for each in found][: self.params.answers]

    def candidates(self, found: Continuations, reasons: list[FinishReason | None]) -> BeamCandidates:
        """This search with its candidates and their finish reasons."""
        new = self.state.new + 1
        later = new
        if self.early_stopping == "never" and self.length_penalty > 0:
            later = self.params.config.max_length - len(self.params.ids)
        return BeamCandidates(
            self, found, reasons, float(new**self.length_penalty), float(later**self.length_penalty)
        )


class BeamCandidates(NamedTuple):
    """A search before a step, its candidate continuations, and the finish reason of each if it ends there.

    now, later: the length penalty of a beam that ends now, and of one that continues.
    """

    search: BeamSearch
    found: Continuations
    reasons: list[FinishReason | None]
    now: float
    later: float


def step(searches: Sequence[BeamCandidates]) -> list[BeamStep]:
    """Advance searches of one shape by one token: their new states. The searches themselves are not changed.

    Each row of every tensor is a search. The arithmetic of a row is generate()'s, in fp32 and in its order,
    ties included. It runs on the host: there are a few dozen numbers, and the block tables that follow from
    them are the host's.
    """
    count, keep = searches[0].search.shape
    rows = array("f", chain.from_iterable(map(_row, searches)))
    scores, values, hits, running_on, now, later, full, closed = (
        torch.frombuffer(rows, dtype=torch.float32)
        .view(len(searches), -1)
        .split([count, keep, keep, keep, 1, 1, 1, 1], 1)
    )
    running = values + hits
    chosen = running.topk(count)[1]
    running = running.gather(1, chosen)
    # What ends now competes with what has ended before; the best that runs, with the worst of those.
    merged = torch.cat([scores, values / now + full + closed + running_on], 1)
    best = merged.topk(count)[1]
    scores = merged.gather(1, best)
    after = (
        each.tolist()
        for each in (chosen, running, best, scores, (running[:, 0] / later[:, 0]), scores.amin(1))
    )
    return [_step(*each) for each in zip(searches, *after, strict=True)]


def _row(candidates: BeamCandidates) -> list[float]:
    """The inputs of a search's step as numbers. A large number is subtracted from scores that cannot be
    chosen.
    """
    search, found, reasons, now, later = candidates
    state = search.state
    count = search.count
    hits = [0.0 if reason is None else NOT for reason in reasons]
    running_on = [0.0 if hit and i < count else NOT for i, hit in enumerate(hits)]
    full = NOT if search.early_stopping is True and all(state.finished) else 0.0
    return [
        *state.scores,
        *found.scores,
        *hits,
        *running_on,
        now,
        later,
        full,
        0.0 if state.improvable else NOT,
    ]


def _step(
    candidates: BeamCandidates,
    chosen: list[int],
    running: list[float],
    best: list[int],
    scores: list[float],
    hope: float,
    least: float,
) -> BeamStep:
    """The step that one search's numbers describe.

    chosen: indices into its candidates. best: the same after the indices of earlier finished beams. hope: the
    best score that a running beam can still reach; least: the worst score of the finished ones.
    """
    search, (_, beams, tokens, notes), reasons, _, _ = candidates
    before = search.state
    count = search.count
    new = {
        i: BeamToken(before.last_tokens[beams[i]], tokens[i], notes[i] if notes else None)
        for i in {*chosen, *[place - count for place in best if place >= count]}
    }
    finished = [
        before.finished[i] if i < count else i < 2 * count and reasons[i - count] is not None for i in best
    ]
    ended = [before.ended[i] if i < count else new[i - count] for i in best]
    why = [before.why[i] if i < count else reasons[i - count] for i in best]
    improvable = before.improvable and any(hope > (least if each else NOT) for each in finished)
    done = not improvable or None not in reasons or (search.early_stopping is True and all(finished))
    state = BeamState(
        before.new + 1, running, [new[i] for i in chosen], scores, finished, ended, why, improvable, done
    )
    return BeamStep([beams[i] for i in chosen], [tokens[i] for i in chosen], state)


def _hypothesis(last: BeamToken | None, why: FinishReason | None, score: float) -> Hypothesis:
    """The tokens of a beam, from its first to its last."""
    tokens = []
    notes = []
    while last is not None:
        tokens.append(last.token)
        if last.note is not None:
            notes.append(last.note)
        last = last.before
    return Hypothesis(tokens[::-1], notes[::-1], why, score)


def _ends(config: object) -> int:
    """The number of end-of-sequence tokens."""
    ends = getattr(config, "_eos_token_tensor", None)
    return 0 if ends is None else int(ends.shape[0])
