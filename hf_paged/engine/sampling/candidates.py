"""Candidates of beam searches: the best continuations by the logits of all their beams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kv.upload import upload
from ..outputs.output import TokenLogprob
from .beams import BeamSearch, Continuations
from .random_numbers import gumbel
from .scores import top


class BeamScorer:
    """Searches of one shape without logits processors, scored together on the device.

    The number of operations does not depend on the number of searches, and the device is not synchronised:
    `tensors` are what is copied to the host.
    """

    def __init__(self, searches: Sequence[BeamSearch], rows: Sequence[int], logits: torch.Tensor) -> None:
        """rows: of the logits [rows, vocabulary], those that the beams follow, search by search."""
        self.searches = searches
        count, keep = searches[0].shape
        device = logits.device
        self._most = max(
            (search.params.top_logprobs for search in searches if search.params.top_logprobs is not None),
            default=None,
        )
        own = logits if rows == list(range(len(logits))) else logits[upload(rows, device)]
        self._vocabulary = own.shape[1]
        logprobs = own.log_softmax(-1).view(len(searches), count, self._vocabulary)
        running = upload([search.state.running for search in searches], device, torch.float32)[:, :, None]
        sums = logprobs.add_(running) if self._most is None else logprobs + running
        values, places = sums.flatten(1).topk(keep)
        self.tensors = [values, places]
        if self._most is not None:
            self.tensors += [logprobs.flatten(1).gather(1, places), *top(logprobs, self._most)]

    def found(self, downloaded: Sequence[torch.Tensor]) -> list[Continuations | None]:
        """The candidates of each search, once on the host; None if its logits contain NaN."""
        values, places, *notes = downloaded
        broken: list[bool] = values.isnan().any(1).tolist()  # to torch NaN is the largest number
        beams = (places // self._vocabulary).tolist()
        tokens = (places % self._vocabulary).tolist()
        found: list[Continuations | None] = []
        for i, scores in enumerate(values.tolist()):
            own_notes = self._notes(i, beams[i], tokens[i], notes)
            found.append(None if broken[i] else Continuations(scores, beams[i], tokens[i], own_notes))
        return found

    def _notes(
        self, i: int, beams: list[int], tokens: list[int], downloaded: Sequence[torch.Tensor]
    ) -> list[TokenLogprob] | None:
        wanted = self.searches[i].params.top_logprobs
        if wanted is None:
            return None
        own, values, indices = (each[i].tolist() for each in downloaded)
        pairs = [
            tuple(zip(ids[:wanted], best[:wanted], strict=True))
            for ids, best in zip(indices, values, strict=True)
        ]
        return [
            TokenLogprob(token, logprob, pairs[beam])
            for beam, token, logprob in zip(beams, tokens, own, strict=True)
        ]


def top_continuations(search: BeamSearch, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores [keep] of one search's continuations, and their indices into [beams * vocabulary].

    scores: [beams, vocabulary], processed log probabilities. The continuations are the best ones, or drawn if
    the request samples.
    """
    params = search.params
    state = search.state
    flat = (scores + upload(state.running, scores.device, torch.float32)[:, None]).flatten()
    if not params.sampled:
        values, places = flat.topk(search.keep)
        return values, places
    keys = upload([params.seed, state.new], flat.device)
    noise = gumbel(keys[:1], keys[1:], torch.arange(flat.shape[0], device=flat.device))
    places = (flat.double() + noise).topk(search.keep)[1]
    return flat[places], places
