"""What comes after the logits: a token for every sequence that is due, each request by its own rules, none by another's fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..memory.upload import upload
from ..scheduling import UNKNOWN, Scheduler
from .beams import Notes
from .job import Job
from .output import TokenLogprob
from .sampling import Warp, draw, warp


class Pick(NamedTuple):
    """A job that is due, and the rows of the step's logits that its running sequences follow, in their order."""

    job: Job
    rows: list[int]


class NoToken(RuntimeError):
    """The model's logits, or what a processor made of them, leave nothing to choose."""


def choose(scheduler: Scheduler, picks: Sequence[Pick], logits: torch.Tensor) -> dict[Job, Exception]:
    """Give every due job its next tokens. logits [rows, vocabulary] in fp32. The answer is who failed, and why.

    Whose tokens need nothing but a cut and a draw are chosen together; processors and criteria run only for their own rows, and
    whatever they raise is their own request's end.
    """
    tokens = _all_at_once([pick for pick in picks if pick.job.plain], logits)
    broken = _broken([pick for pick in picks if not pick.job.plain], logits)
    broken |= {job for job, found in tokens.items() if UNKNOWN in found}
    failed: dict[Job, Exception] = {job: NoToken("the model's logits are NaN") for job in broken}
    for pick in picks:
        if pick.job not in failed:
            try:
                _one(scheduler, pick, logits, tokens.get(pick.job))
            except Exception as error:  # a processor, a criterion or a tokenizer of this request; its neighbours go on
                failed[pick.job] = error
    return failed


def _all_at_once(picks: Sequence[Pick], logits: torch.Tensor) -> dict[Job, list[int]]:
    """The tokens of plain jobs, UNKNOWN for rows of NaN."""
    tokens: dict[Job, list[int]] = {}
    if not picks:
        return tokens
    chosen, broken = together(picks, logits)
    found = torch.where(broken, UNKNOWN, chosen).tolist()
    for pick in picks:
        tokens[pick.job], found = found[: len(pick.rows)], found[len(pick.rows) :]
    return tokens


def _broken(picks: Sequence[Pick], logits: torch.Tensor) -> set[Job]:
    """Whose logits have NaN among them, and no processor that replaces it."""
    rows = [row for pick in picks for row in pick.rows]
    nan = {row for row, each in zip(rows, logits[rows].amax(1).isnan().tolist(), strict=True) if each} if rows else set()
    return {pick.job for pick in picks if not nan.isdisjoint(pick.rows) and not pick.job.asked.mends}


def together(picks: Sequence[Pick], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of plain jobs, one behind the other, and whether their logits have NaN among them.

    One argmax for all that are greedy, one cut and one draw for all that are sampled. Nobody waits for the device.
    """
    rows = [row for pick in picks for row in pick.rows]
    scores = logits if rows == list(range(logits.shape[0])) else logits[upload(rows, logits.device)]
    tokens = scores.argmax(-1)
    broken = scores.gather(1, tokens[:, None])[:, 0].isnan()  # to torch NaN is the largest number
    drawn = [pick for pick in picks if pick.job.asked.sampled]
    if drawn:
        sampled = [pick.job.asked.sampled for pick in picks for _ in pick.rows]
        places = upload([place for place, each in enumerate(sampled) if each], logits.device)
        tokens[places] = _drawn(drawn, scores[places], cut=True)
    return tokens, broken


def _drawn(picks: Sequence[Pick], scores: torch.Tensor, cut: bool) -> torch.Tensor:
    """Tokens [rows] drawn from scores [rows, vocabulary], the rows of the picks one behind the other."""
    seeds, indices, positions, warps = [], [], [], []
    for pick in picks:
        assert pick.job.group is not None
        for sequence in pick.job.group.sequences:
            seeds.append(pick.job.asked.seed)
            indices.append(sequence.index)
            positions.append(len(sequence.tokens))
            warps.append(pick.job.asked.warp or Warp())
    return draw(warp(scores, warps) if cut else scores, seeds, indices, positions)


def _one(scheduler: Scheduler, pick: Pick, logits: torch.Tensor, tokens: list[int] | None) -> None:
    """Let one job go on: with the tokens that were chosen for it, or by its own rules."""
    job = pick.job
    if tokens is not None and job.asked.favourites is None:
        job.take(scheduler, tokens, None, logits.device)  # nothing of its own to compute: not one launch for each request
        return
    own = logits[pick.rows]
    notes = _notes(own, job.asked.favourites) if job.asked.favourites is not None else None
    if job.beams is not None:
        job.take_beams(scheduler, _sound(job.processed(own.log_softmax(-1), own.device), job), notes, own.device)
        return
    if tokens is None:
        scores = _sound(job.processed(own.clone(), own.device), job)
        tokens = (_drawn([pick], scores, cut=False) if job.asked.sampled else scores.argmax(-1)).tolist()
    job.take(scheduler, tokens, [notes(i, token) for i, token in enumerate(tokens)] if notes else None, own.device)


def _sound(scores: torch.Tensor, job: Job) -> torch.Tensor:
    """Scores [rows, vocabulary] of which at least one is a number in every row."""
    if bool(scores.isnan().any()):
        raise NoToken("a logits processor made NaN scores")
    if job.asked.sampled and not bool((scores > -torch.inf).any(-1).all()):
        raise NoToken("the logits processors leave no token to draw")
    return scores


def _notes(logits: torch.Tensor, favourites: int) -> Notes:
    """How to find the logprob of a row's token, and the row's favourites."""
    logprobs = logits.log_softmax(-1)
    own = numbers_of(logprobs, logprobs.new_zeros(len(logprobs), dtype=torch.long), favourites).tolist()

    def note(row: int, token: int) -> TokenLogprob:
        return note_of([float(logprobs[row, token]), *own[row][1:]], token, favourites)

    return note


def numbers_of(logprobs: torch.Tensor, tokens: torch.Tensor, favourites: int) -> torch.Tensor:
    """What is told about tokens [rows] of logprobs [rows, vocabulary]: [rows, 1 + 2 * favourites] in fp64.

    The token's own, then the favourites' logprobs, the best first, then their ids.
    """
    best = logprobs.topk(favourites)
    return torch.cat([logprobs.gather(1, tokens[:, None]).double(), best.values.double(), best.indices.double()], 1)


def note_of(numbers: Sequence[float], token: int, favourites: int) -> TokenLogprob:
    """A row of `numbers_of`, perhaps with more favourites than are wanted."""
    most = len(numbers) // 2
    pairs = zip(map(int, numbers[1 + most : 1 + most + favourites]), numbers[1 : 1 + favourites], strict=True)
    return TokenLogprob(token, numbers[0], tuple(pairs))
