"""Parts of a request that are no plain values in the engine: stop strings, grammars, media."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.outputs.stops import StopLists
from ...engine.sampling.grammar import Grammars


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
        self._stops.prepare(self._tokenizer)

    def compile(self, grammar: str) -> None:
        """Compile a grammar, and keep it for the request that comes; raises for one that is impossible."""
        self._grammars.compiled(grammar)

    def keywords(self, given: dict[str, Any], prompt: int) -> dict[str, Any]:
        """The keywords of `submit()`, where `grammar` and `media` are plain values. `stop` is made ready for
        the engine, which has no tokenizer here.
        """
        found = dict(given)
        media = found.pop("media", {})
        found.update({name: self._tensor(value) for name, value in media.items()})
        grammar = found.pop("grammar", None)
        if grammar is not None:
            compiled = self._grammars.kept(grammar)
            if compiled is None:
                raise NotCompiled("too many grammars have come since this one; send the request again")
            found["logits_processor"] = [compiled.processor(prompt)]
        if "stop" in found:
            found["stop"] = self._stops.stop(self._tokenizer, found["stop"])
        return found

    def _tensor(self, value: Any) -> Any:
        """An array as a tensor, in the model's dtype where it has numbers with a point."""
        if isinstance(value, list):
            return [self._tensor(each) for each in value]
        if type(value).__module__ != "numpy":
            return value
        found = torch.from_numpy(value)
        return found.to(self._dtype) if found.is_floating_point() else found
