"""How likely the model finds the tokens of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...blocks import Prompt, PromptScores
from ...kv.ops import on, triton_package
from ...kv.reference import invariant
from ...kv.upload import upload
from ..outputs.output import TokenLogprob

SLICE = 256
"""Tokens whose logits are in fp32 at once: of 2,048 tokens and a vocabulary of 128k they would take a GiB."""


class Scored(NamedTuple):
    """Tokens whose logprobs are wanted, each behind the token before it: those behind the first tokens of a
    row. top_logprobs: how many of the model's are wanted beside each.
    """

    tokens: Sequence[int]
    top_logprobs: int


def numbers_of(logits: torch.Tensor, tokens: torch.Tensor, top_logprobs: int) -> torch.Tensor:
    """The logprobs of tokens [rows] and of the top tokens, from logits [rows, vocabulary] in fp32: [rows, 1 +
    2 * top_logprobs] in fp64.

    The token's own, then the top logprobs, the best first, then their ids.
    """
    whole = _logsumexp(logits)
    if whole is None:
        logits = logits.log_softmax(-1)
    own = logits.gather(1, tokens[:, None])
    if top_logprobs:
        best, places = top(logits, top_logprobs)
        own = torch.cat([own, best], 1)
    if whole is not None:
        own = own - whole[0] - whole[1]
    return torch.cat([own.double(), places.double()], 1) if top_logprobs else own.double()


def top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scores [..., vocabulary] in fp32, and their ids. Where no other row may change anything equal
    ones come in the order of their ids: the order of topk is another one for another count.
    """
    if not invariant.get():
        best = scores.topk(count)
        return best.values, best.indices
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as the numbers are
    last = scores.shape[-1] - 1
    back = last - torch.arange(last + 1, device=scores.device)
    places = last - (((ordered.long() << 32) + back).topk(count).values & 0xFFFFFFFF)
    return scores.gather(-1, places), places


def _logsumexp(scores: torch.Tensor) -> torch.Tensor | None:
    """The logsumexp of rows of scores [rows, vocabulary] in two parts, [2, rows, 1], if there is a kernel for
    it.
    """
    kernels = triton_package("auto", scores.device, scores.dtype)
    if kernels is None:
        return None
    with on(scores.device):
        found: torch.Tensor = kernels.logsumexp(scores)
    return found[:, :, None]


def _kept(scores: torch.Tensor, uncut: torch.Tensor) -> torch.Tensor:
    """The share [rows, 1] of the probability of `uncut` that the scores kept."""
    some, whole = _logsumexp(scores), _logsumexp(uncut)
    if some is None or whole is None:
        log = scores.logsumexp(-1, True) - uncut.logsumexp(-1, True)
    else:
        log = some.sum(0) - whole.sum(0)
    return log.exp().clamp(max=1).double()


def note_of(numbers: Sequence[float], token: int, top_logprobs: int) -> TokenLogprob:
    """A row of `numbers_of`, perhaps with more top tokens than are wanted."""
    if not top_logprobs:
        return TokenLogprob(token, numbers[0])
    most = len(numbers) // 2
    pairs = zip(
        map(int, numbers[1 + most : 1 + most + top_logprobs]), numbers[1 : 1 + top_logprobs], strict=True
    )
    return TokenLogprob(token, numbers[0], tuple(pairs))


def chosen_numbers_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    top_logprobs: int,
    scores: torch.Tensor | None,
    uncut: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of `TokenLogprobs` for tokens that were chosen after logits [rows, vocabulary], in fp64.

    scores: what they were chosen from, [rows, vocabulary], None if it is the logits. uncut: the same before
        cuts, None if nothing was cut.
    """
    numbers = numbers_of(logits, tokens, top_logprobs)
    own = numbers[:, :1]
    chosen = own if scores is None else numbers_of(scores, tokens, 0)
    kept = torch.ones_like(own) if scores is None or uncut is None else _kept(scores, uncut)
    return torch.cat([tokens[:, None].double(), own, chosen, kept, numbers[:, 1:]], 1)


def token_scores(logits: torch.Tensor, tokens: Sequence[int], top_logprobs: int) -> torch.Tensor:
    """The numbers [tokens, 1 + 2 * top_logprobs] of tokens, as `numbers_of` makes them of the logits [tokens,
    vocabulary] that they follow.
    """
    ids = upload(list(tokens), logits.device)
    found = [
        numbers_of(part.to(torch.float32), own, top_logprobs)
        for part, own in zip(logits.split(SLICE), ids.split(SLICE), strict=True)
    ]
    return torch.cat(found)


class PromptLogprobs:
    """The known scores of the tokens of one prompt. The first one follows nothing and has no numbers, and
    neither have virtual tokens in front of it.
    """

    def __init__(self, prompt: Sequence[int], top_logprobs: int, virtual: int = 0) -> None:
        self._prompt = [*[0] * virtual, *prompt[virtual:]]
        self._first = virtual
        self._top_logprobs = top_logprobs
        self._rows: list[Sequence[float] | None] = []
        self.width = 1 + 2 * top_logprobs
        """How many numbers there are of a token."""
        self.forget()

    def forget(self) -> None:
        """Nothing is known."""
        none = array("d", bytes(8 * self.width))
        unscored = self._first + 1
        self._rows = [*[none] * unscored, *[None] * (len(self._prompt) - unscored)]

    def wanted(self, start: int, count: int) -> Scored | None:
        """The scored tokens in a row of so many from `start` on."""
        tokens = self._prompt[start + 1 : start + count + 1]
        return Scored(tokens, self._top_logprobs) if tokens else None

    def note(self, start: int, rows: Sequence[Sequence[float]]) -> None:
        """The numbers of the tokens from `start` on."""
        own = rows[: max(0, len(self._rows) - start)]
        self._rows[start : start + len(own)] = own

    def recall(self, scores: PromptScores, prompt: Prompt, start: int) -> None:
        """Take over the numbers of the tokens up to `start`, whose blocks were found."""
        first = next((i for i, row in enumerate(self._rows) if row is None), start + 1)
        for index in range(first // prompt.size, start // prompt.size + 1 if first <= start else 0):
            self.note(index * prompt.size, scores.rows(prompt.digests[index]))

    def publish(self, scores: PromptScores, prompt: Prompt, start: int, count: int) -> None:
        """Let others find the numbers of the blocks that a row has filled."""
        size = prompt.size
        for index in range(start // size, min(start + count, len(self._rows)) // size):
            rows = [row for row in self._rows[index * size : (index + 1) * size] if row is not None]
            if len(rows) == size and len({len(row) for row in rows}) == 1:
                scores.add(prompt.digests[index], rows)

    @property
    def notes(self) -> list[TokenLogprob | None] | None:
        """As a request's output has them; None before all are known."""
        rows = self._rows
        if None in rows:
            return None
        behind = self._first + 1
        found = [
            note_of(row, token, self._top_logprobs)
            for row, token in zip(rows[behind:], self._prompt[behind:], strict=True)
            if row is not None
        ]
        return [None, *found]
