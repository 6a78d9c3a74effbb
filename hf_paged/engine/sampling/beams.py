"""Beam search, one step at a time, as generate() does it for that prompt alone; the searches of a step take
it together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ..outputs.output import FinishReason, TokenLogprob
from ..requests.params import RequestParams

NOT = -1.0e9
"""The score of what is not there. Sums with it stay in fp32, as generate()'s do."""


class BeamToken(NamedTuple):
    """The last new token of a beam, what was noted about it, and the tokens before it: beams share their
    beginnings.
    """

    before: BeamToken | None
    token: int
    note: TokenLogprob | None


class Hypothesis(NamedTuple):
    """A beam that ended: its new tokens, what was noted about them, why it ended if it did, and its score."""

    tokens: list[int]
    notes: list[TokenLogprob]
    reason: FinishReason | None
    score: float


class BeamState(NamedTuple):
    """A search after `new` tokens: the beams that run with their scores, and the best that have ended with
    theirs.

    finished: which of these are there at all; the others only hold a place. why: the reasons for which they
    ended. improvable: whether a beam that runs may still become one of them. done: whether the search is
    over. Scores are fp32 numbers.
    """

    new: int
    running: list[float]
    said: list[BeamToken | None]
    scores: list[float]
    finished: list[bool]
    ended: list[BeamToken | None]
    why: list[FinishReason | None]
    improvable: bool
    done: bool = False


class Continuations(NamedTuple):
    """The best continuations of a search, best first: their scores, the beams they continue, with which
    tokens, what is told of those.
    """

    scores: list[float]
    beams: list[int]
    tokens: list[int]
    notes: list[TokenLogprob] | None


class BeamStep(NamedTuple):
    """Where each beam continues, and with which token, and the state of the search then."""

    sources: list[int]
    tokens: list[int]
    standing: BeamState


class BeamSearch:
    """The beam search of one request.

    Among the continuations of all beams the best `keep` are looked at, so many that `count` of them go on
    even if every end of sequence is among them. Those that end among the first `count` compete with what has
    ended before, by score over length.
    """

    def __init__(self, params: RequestParams) -> None:
        config = params.config
        self.params = params
        self.count = params.beams
        self.keep = max(2, 1 + _ends(config)) * self.count
        self.length_penalty = config.length_penalty
        self.early_stopping = config.early_stopping
        count = self.count
        nothing = [NOT] * self.count
        self.standing = BeamState(
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
        """What is returned, best first."""
        found = zip(self.standing.ended, self.standing.why, self.standing.scores, strict=True)
        return [_hypothesis(*each) for each in found][: self.params.answers]

    def contender(self, found: Continuations, reasons: list[FinishReason | None]) -> BeamCandidates:
        """The search as it continues with some of these, or ends for these reasons."""
        new = self.standing.new + 1
        later = new
        if self.early_stopping == "never" and self.length_penalty > 0:
            later = self.params.config.max_length - len(self.params.ids)
        return BeamCandidates(
            self, found, reasons, float(new**self.length_penalty), float(later**self.length_penalty)
        )


class BeamCandidates(NamedTuple):
    """A search that is about to take a step, what it chooses from, and why beams would end there, if they
    would.

    now, later: what the score of a beam that ends now is divided by, and that of one that runs on.
    """

    search: BeamSearch
    found: Continuations
    reasons: list[FinishReason | None]
    now: float
    later: float


def step(contenders: Sequence[BeamCandidates]) -> list[BeamStep]:
    """Let searches of one shape go on by one token. They change nothing themselves: the answer is how they
    stand then.

    A row of every tensor here is a search, and the arithmetic of a row is generate()'s, in fp32 and in its
    order; so are ties. It is the host's: there are a few dozen numbers, and the blocks that follow from them
    are the host's, too.
    """
    count, keep = contenders[0].search.shape
    rows = array("f", chain.from_iterable(map(_row, contenders)))
    scores, values, hits, running_on, now, later, full, closed = (
        torch.frombuffer(rows, dtype=torch.float32)
        .view(len(contenders), -1)
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
    return [_step(*each) for each in zip(contenders, *after, strict=True)]


def _row(contender: BeamCandidates) -> list[float]:
    """All that a search brings to a step, as numbers; most of them are taken off the scores of what cannot be
    chosen.
    """
    search, found, reasons, now, later = contender
    standing = search.standing
    count = search.count
    hits = [0.0 if reason is None else NOT for reason in reasons]
    running_on = [0.0 if hit and i < count else NOT for i, hit in enumerate(hits)]
    full = NOT if search.early_stopping is True and all(standing.finished) else 0.0
    return [
        *standing.scores,
        *found.scores,
        *hits,
        *running_on,
        now,
        later,
        full,
        0.0 if standing.improvable else NOT,
    ]


def _step(
    contender: BeamCandidates,
    chosen: list[int],
    running: list[float],
    best: list[int],
    scores: list[float],
    hope: float,
    least: float,
) -> BeamStep:
    """What the numbers of one search mean.

    chosen: places among what was found. best: the same behind the places of what had ended before. hope: what
    the best beam that runs may still come to; least: the worst score of all that ended.
    """
    search, (_, beams, tokens, notes), reasons, _, _ = contender
    before = search.standing
    count = search.count
    said = {
        i: BeamToken(before.said[beams[i]], tokens[i], notes[i] if notes else None)
        for i in {*chosen, *[place - count for place in best if place >= count]}
    }
    finished = [
        before.finished[i] if i < count else i < 2 * count and reasons[i - count] is not None for i in best
    ]
    ended = [before.ended[i] if i < count else said[i - count] for i in best]
    why = [before.why[i] if i < count else reasons[i - count] for i in best]
    improvable = before.improvable and any(hope > (least if each else NOT) for each in finished)
    done = not improvable or None not in reasons or (search.early_stopping is True and all(finished))
    standing = BeamState(
        before.new + 1, running, [said[i] for i in chosen], scores, finished, ended, why, improvable, done
    )
    return BeamStep([beams[i] for i in chosen], [tokens[i] for i in chosen], standing)


def _hypothesis(said: BeamToken | None, why: FinishReason | None, score: float) -> Hypothesis:
    """The tokens of a beam, from its first to its last."""
    tokens = []
    notes = []
    while said is not None:
        tokens.append(said.token)
        if said.note is not None:
            notes.append(said.note)
        said = said.before
    return Hypothesis(tokens[::-1], notes[::-1], why, score)


def _ends(config: object) -> int:
    """How many end-of-sequence tokens there are."""
    ends = getattr(config, "_eos_token_tensor", None)
    return 0 if ends is None else int(ends.shape[0])
