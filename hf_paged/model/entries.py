"""Entries of dicts, and whether each still has the object that it had."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, repeat
from operator import contains, is_, itemgetter
from typing import Any

import torch

from .weights_digest import PLAIN_TENSORS, memory_of_parts, versions_of

Entry = tuple[dict[Any, Any], Hashable]
"""A dict, and a key in it."""


class Entries:
    """The objects at some keys of some dicts. It keeps them alive, so that each is known by which one it is;
    of tensors it knows where they lie, too, and how often torch wrote to them.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        tensors: dict[Hashable, list[dict[Any, Any]]] = {}
        others: dict[Hashable, list[dict[Any, Any]]] = {}
        absent: dict[Hashable, list[dict[Any, Any]]] = {}
        for own, key in entries:
            kind = absent if key not in own else tensors if isinstance(own[key], torch.Tensor) else others
            kind.setdefault(key, []).append(own)
        self._absent = list(absent.items())
        self._at = [(itemgetter(key), owns) for key, owns in tensors.items()]
        self._others_at = [(itemgetter(key), owns) for key, owns in others.items()]
        self._others = list(_values(self._others_at))
        self._lists = [each for each in self._others if type(each) in (list, tuple)]
        self._copies = list(map(list, self._lists))
        self._tensors = list(_values(self._at))
        self._wrapped = [each for each in self._tensors if type(each) not in PLAIN_TENSORS]
        self._memory = self._memory_now()
        self._facts = self._facts_now()

    def cover(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if these tensors are all among the objects, or parts of them."""
        return set(map(id, self._memory)).issuperset(map(id, tensors))

    def same(self) -> bool:
        """True if all are surely the same objects, and no key has come."""
        try:
            return (
                all(map(is_, self._tensors, _values(self._at)))
                and list(_values(self._others_at)) == self._others
                and list(map(list, self._lists)) == self._copies
                and not any(any(map(contains, owns, repeat(key))) for key, owns in self._absent)
                and (not self._wrapped or all(map(is_, self._memory, self._memory_now())))
                and self._facts_now() == self._facts
            )
        except (KeyError, RuntimeError):  # one is gone, or a dict changes in another thread
            return False

    def _memory_now(self) -> list[torch.Tensor]:
        """The tensors with memory."""
        if not self._wrapped:
            return self._tensors
        plain = [each for each in self._tensors if type(each) in PLAIN_TENSORS]
        return plain + memory_of_parts(self._wrapped)

    def _facts_now(self) -> Any:
        memory = self._memory
        places = list(map(torch.Tensor.data_ptr, memory)), list(map(torch.Tensor.numel, memory))
        return places, versions_of(memory)


def _values(sources: Iterable[tuple[itemgetter[Any], list[dict[Any, Any]]]]) -> Iterator[Any]:
    return chain.from_iterable([map(get, owns) for get, owns in sources])
