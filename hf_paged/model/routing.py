"""Records of routing: the experts that each token was sent to, in the blocks of its keys and values.

A hook of each mixture notes the numbers that its router hands over. Behind the last layer those of all layers
are written, by the slots of the step's tokens. In a captured step that is a part of the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..kv.token_numbers import read_numbers, write_numbers
from .attention import running
from .layer import PagedLayer
from .lazy import NotCapturable
from .mixtures import mixtures_of

ROUTING = "routing"
"""Where a group of layers has the numbers, among its layers."""


class RoutingRecord:
    """The routing of the tokens of a cache: int16 [layers with experts, experts of a token] of each."""

    def __init__(self, model: nn.Module, layers: Sequence[Any]) -> None:
        """layers: those of the cache. ValueError says why nothing of the model's routing can be kept."""
        self._mixtures = [weakref.ref(each) for each in mixtures_of(model).values()]
        whole = [layer for layer in layers if isinstance(layer, PagedLayer) and layer.kind.linear]
        if not whole:
            raise ValueError(
                f"no layer of {type(model).__name__} keeps keys and values of all tokens, beside which their "
                "routing would lie; leave return_routing out"
            )
        self._layer = whole[-1]
        self._chosen: list[torch.Tensor] = []
        """The experts that the mixtures of the running forward have been given so far."""
        self._hooks: list[Any] = []

    @property
    def begun(self) -> bool:
        """True once there is a place for the numbers, which the first forward shows."""
        return self._layer.group.layout(ROUTING) is not None

    @property
    def token_bytes(self) -> int:
        """Bytes of the routing of a token; 0 where no config says how many experts it has."""
        configs = [getattr(each(), "config", None) for each in self._mixtures]
        experts = [getattr(config, "num_experts_per_tok", None) for config in configs]
        return sum(2 * each for each in experts if isinstance(each, int))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the tokens of a forward inside."""
        self._remove_hooks()  # an interrupt may have left some
        self._chosen = []
        try:
            for number, mixture in enumerate(self._mixtures):
                module = mixture()
                assert module is not None
                self._hooks.append(module.register_forward_pre_hook(self._hook(number), with_kwargs=True))
            yield
            self._write()
        finally:
            self._remove_hooks()
            self._chosen = []

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def _hook(self, number: int) -> Callable[..., None]:
        def note(mixture: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            step = running.get()
            if step is not None and step.cache.sequences is self._layer.sequences:
                self._note(number, chosen_of(arguments, keywords))

        return note

    def _note(self, number: int, chosen: torch.Tensor) -> None:
        """Note what the mixture of that number was given. The first one's begins anew: a forward that failed
        may run again.
        """
        if number == 0:
            self._chosen = []
        if number != len(self._chosen):
            raise self._unlike(number)
        self._chosen.append(chosen)

    def _write(self) -> None:
        """Write what the mixtures of the forward were given, by the slots of its tokens."""
        every = self._chosen
        if len(every) != len(self._mixtures):
            raise self._unlike(len(every))
        layer = self._layer
        batch = layer.batch
        tokens = batch.rows * batch.new
        if {each.shape for each in every} != {(tokens, every[0].shape[-1])}:
            shapes = ", ".join(str(list(each.shape)) for each in every)
            raise ValueError(
                f"the layers choose experts {shapes}, expected [{tokens}, k] of every layer with one k; "
                "their routing cannot be kept, leave return_routing out"
            )
        if layer.sequences.static is not None and not self.begun:
            raise NotCapturable("routing has no place before its first forward")
        device = every[0].device
        write_numbers(layer.group, ROUTING, batch, torch.stack([each.to(device) for each in every], 1))

    def _unlike(self, number: int) -> Exception:
        return RuntimeError(
            f"the model's {len(self._mixtures)} layers with experts were not called once each and in order "
            f"(number {number} after {len(self._chosen)}); their routing cannot be kept, leave "
            "return_routing out"
        )

    def read(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """The routing int16 [tokens, layers, k] of the first tokens of a table of the record's kind."""
        return read_numbers(self._layer.group, ROUTING, blocks, tokens)

    @property
    def kind(self) -> Any:
        """The kind of layers in whose blocks it lies."""
        return self._layer.kind


def chosen_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    """The experts [tokens, k] among the arguments of a mixture's call."""
    found: torch.Tensor = arguments[1] if len(arguments) > 1 else keywords["top_k_index"]
    return found.reshape(-1, found.shape[-1])
