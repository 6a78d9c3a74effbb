"""Parts of a request that are no plain values in the engine: penalties, stop strings, grammars, media."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ...engine.requests.stops import StopLists, StopStrings
from ...engine.sampling.grammar import Grammars


def penalised(
    prompt: int, presence: float, frequency: float, input_ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Scores under OpenAI's penalties: `presence` off the score of every token of the answer so far,
    `frequency` off for each time that it came. The first `prompt` tokens cost nothing.
    """
    answer = input_ids[:, prompt:]
    counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
    return scores - frequency * counts - presence * (counts > 0).to(scores.dtype)


def answer_stopped(
    prompt: int, least: int, strings: StopStrings, input_ids: torch.Tensor, scores: Any, **kwargs: Any
) -> torch.Tensor:
    """True if a stop string ends the answer behind `prompt` tokens: one that begins in the prompt, or ends
    within the `least` first tokens of the answer, does not.
    """
    answer = input_ids[:, prompt:]
    if answer.shape[1] <= least:
        return torch.zeros(answer.shape[0], dtype=torch.bool, device=answer.device)
    stopped: torch.Tensor = strings(answer, scores)
    return stopped


class NotCompiled(RuntimeError):
    """A grammar that must be compiled again."""


class Processors:
    """Makes them, and keeps what is the same for many requests."""

    def __init__(self, tokenizer: Any, scores: int, ends: list[int], dtype: torch.dtype) -> None:
        """scores: how many tokens the model has scores for. ends: its ends of sequence. dtype: in which it
        computes.
        """
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._stops = StopLists()
        self._grammars = Grammars(tokenizer, scores, ends)

    def prepare(self) -> None:
        """Make once what requests with stop strings need of the vocabulary."""
        with suppress(ValueError):  # no token ends with it
            self._stops.criterion(self._tokenizer, ["\n"])

    def compile(self, grammar: str) -> None:
        """Compile a grammar, and keep it for the request that comes; raises for one that is impossible."""
        self._grammars.compiled(grammar)

    def keywords(self, given: dict[str, Any], prompt: int) -> dict[str, Any]:
        """The keywords of `submit()`, where `penalties`, `stop`, `grammar` and `media` are plain
        values.
        """
        found = dict(given)
        media = found.pop("media", {})
        found.update({name: self._tensor(value) for name, value in media.items()})
        processors: list[Callable[..., torch.Tensor]] = []
        penalties = found.pop("penalties", None)
        if penalties is not None:
            processors.append(partial(penalised, prompt, *penalties))
        grammar = found.pop("grammar", None)
        if grammar is not None:
            compiled = self._grammars.kept(grammar)
            if compiled is None:
                raise NotCompiled("too many grammars have come since this one; send the request again")
            processors.append(compiled.processor(prompt))
        if processors:
            found["logits_processor"] = processors
        stop = found.pop("stop", None)
        if stop:
            strings = self._stops.criterion(self._tokenizer, stop)
            least = found.get("min_new_tokens", 0)
            found["stopping_criteria"] = [partial(answer_stopped, prompt, least, strings)]
        return found

    def _tensor(self, value: Any) -> Any:
        """An array as a tensor, in the model's dtype where it has numbers with a point."""
        if isinstance(value, list):
            return [self._tensor(each) for each in value]
        if type(value).__module__ != "numpy":
            return value
        found = torch.from_numpy(value)
        return found.to(self._dtype) if found.is_floating_point() else found
