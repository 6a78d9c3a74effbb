"""Adapters of another vocabulary than their model's, as fine-tunes with new tokens are: embeddings and a head
with more rows, or with fewer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..lora import Adapter, Part
from ..peft_parts import base_of

PREFIX = "base_model.model."
"""The beginning of peft's keys."""
NOT_IN_PATHS = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save)(?=\.)")
"""Peft's own modules in them."""


def plain_key(key: str) -> str:
    """A key of a state dict as the model has it."""
    return NOT_IN_PATHS.sub("", key.removeprefix(PREFIX))


def is_twice(key: str, keys: Collection[str]) -> bool:
    """True for the second key of a whole module in a state dict, which has embeddings along with adapters."""
    path, original, attribute = key.partition(".original_module.")
    if original:
        saved = f"{path}.modules_to_save."
        return f"{path}.{attribute}" in keys or any(each.startswith(saved) for each in keys)
    return ".modules_to_save." in key and key.replace(".modules_to_save.", ".") in keys


def ends_of(model: Any) -> list[nn.Module]:
    """The embeddings of a model and its head, as far as it names them."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, name)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(module, nn.Module):
            found.append(module)
    return found


def ids_of(module: nn.Module) -> int:
    """The ids that an embedding or a head has rows for, without adapters."""
    base: Any = base_of(module)
    own = getattr(base, "num_embeddings", None) or getattr(base, "out_features", None)
    return int(own or base.weight.shape[0])


def scores_of(model: Any) -> int | None:
    """How many tokens a model has scores for, if its head says so."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return None if head is None or not hasattr(base_of(head), "weight") else ids_of(head)


def ids_with(module: nn.Module, parts: Iterable[Part]) -> int:
    """The ids that it has rows for with parts of adapters."""
    count = ids_of(module)
    for part in parts:
        count = part.vocabulary(count)
    return count


def vocabulary_of(model: Any, parts: Mapping[nn.Module, Sequence[Part]]) -> int | None:
    """The size of an adapter's vocabulary, by its parts at modules; None if it is the model's. Raises
    ValueError if its embeddings and its head are of two sizes.
    """
    ends = ends_of(model)
    own = list(map(ids_of, ends))
    found = [ids_with(module, parts.get(module, ())) for module in ends]
    if found == own:
        return None
    require_whole(model, own, found)
    return found[0]


def require_whole(model: Any, own: Sequence[int], found: Sequence[int]) -> None:
    """Raise for an adapter of another vocabulary of whose embeddings and head not all rows are known: found
    instead of the model's own.
    """
    if len(set(found)) > 1 or len(found) < 2 or model.config.is_encoder_decoder:
        raise ValueError(
            f"the adapter has embeddings of {found[0]} tokens and a head of {found[-1]}, and "
            f"{type(model).__name__} has {own[0]}: it was trained with another vocabulary, and not all rows "
            f"of it were saved; call model.resize_token_embeddings({max(found)}) before the engine is made, "
            "or save it with save_embedding_layers=True"
        )


def resize(twin: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give the embeddings and the head of a twin as many rows as a state dict has of them. All rows that are
    new come from there.
    """
    ends = ends_of(twin)
    names = {id(module): name for name, module in twin.named_modules()}
    before = list(map(ids_of, ends))
    found: list[int] = []
    made: dict[int, nn.Parameter] = {}
    for module in ends:
        own: Any = module
        weight = own.weight
        path = f"{names[id(module)]}.weight"
        rows = [len(each) for key, each in state.items() if plain_key(key) == path and each.ndim == 2]
        found.append(rows[0] if rows else len(weight))
        if found[-1] == len(weight):
            continue
        if id(weight) not in made:
            larger = weight.new_zeros(found[-1], *weight.shape[1:])
            both = min(len(weight), len(larger))
            larger[:both] = weight[:both]
            made[id(weight)] = nn.Parameter(larger, requires_grad=False)
        own.weight = made[id(weight)]
        bias = getattr(own, "bias", None)
        if bias is not None:
            own.bias = nn.Parameter(bias.new_zeros(found[-1]), requires_grad=False)
        setattr(own, "num_embeddings" if isinstance(own, nn.Embedding) else "out_features", found[-1])
    if made:
        require_whole(twin, before, found)


class Vocabularies:
    """The vocabularies of the adapters that a table may come to hold."""

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self.by_name: dict[str, int] = {}
        """Those that are not the model's own."""
        self.rows: dict[nn.Module, int] = {}
        """The most rows that any adapter has at embeddings or a head, where the model has fewer."""

    @property
    def own(self) -> int:
        """The model's."""
        return ids_of(self._model.get_output_embeddings())

    @property
    def least(self) -> int:
        """Tokens that all of them have."""
        return min([self.own, *self.by_name.values()])

    @property
    def most(self) -> int:
        """Tokens that any of them has."""
        return max([self.own, *self.by_name.values()])

    def of(self, adapter: Adapter) -> int:
        """That of an adapter."""
        head = self._model.get_output_embeddings()
        return ids_with(head, adapter.layers.get(head, ()))

    def note(self, known: Mapping[str, Adapter]) -> bool:
        """Know these adapters and no others, as far as they concern embeddings and heads: True if any
        vocabulary has come or gone.
        """
        ends = ends_of(self._model)
        before = self.by_name, self.rows
        by_name: dict[str, int] = {}
        rows: dict[nn.Module, int] = {}
        for name, adapter in known.items():
            changed = {each: ids_with(each, adapter.layers.get(each, ())) for each in ends}
            if any(count != ids_of(each) for each, count in changed.items()):
                by_name[name] = changed[ends[-1]]
                rows |= {each: max(count, rows.get(each, ids_of(each))) for each, count in changed.items()}
        self.rows = {each: count for each, count in rows.items() if count > ids_of(each)}
        self.by_name = by_name
        return before != (self.by_name, self.rows)

    def require_together(self, adapters: Mapping[str, Adapter]) -> None:
        """Raise ValueError for adapters whose embeddings or heads are of two vocabularies."""
        ends = ends_of(self._model)
        those = [name for name, each in adapters.items() if any(end in each.layers for end in ends)]
        if len({self.by_name.get(name) for name in those}) > 1:
            sizes = [f"{name!r} ({self.by_name.get(name, self.own)} tokens)" for name in those]
            raise ValueError(
                f"adapters of two vocabularies cannot be active together: {', '.join(sizes)}; name one"
            )

    def known_ids(self, module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Ids that a module has rows for, in the place of those that an adapter alone has."""
        return ids.clamp(max=ids_of(module) - 1) if module in self.rows else ids

    def widened(self, module: nn.Module, y: torch.Tensor) -> torch.Tensor:
        """The output of a head with room for the tokens that adapters have beyond the model's."""
        more = self.rows.get(module, 0) - ids_of(module) if module in self.rows else 0
        return nn.functional.pad(y, (0, more)) if more and not is_embedding(module) else y


def is_embedding(module: nn.Module) -> bool:
    """True for embeddings, which look ids up."""
    return isinstance(base_of(module), nn.Embedding)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of logits of several vocabularies below each other: none has tokens that it does not know."""
    widest = max(each.shape[-1] for each in parts)
    wide = [nn.functional.pad(each, (0, widest - each.shape[-1]), value=-torch.inf) for each in parts]
    return torch.cat(wide)
