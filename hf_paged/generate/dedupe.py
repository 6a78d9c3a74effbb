"""Compute each prompt once: rows of a batch that are equal stay one row until they differ.

Beams and samples are such rows, and so are prompts that a trainer repeats. They are found by content, on the
device, with one transfer to the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from ..blocks import STATE_READ, STATE_WRITTEN
from ..model.adapters.apply import PEFT_KEYWORDS
from ..model.cache_name import CACHE
from ..model.offloaded import input_device
from ..model.outputs import ROWS_FIRST, repeat_fields
from ..model.switch import modules_of
from ..model.training import why_random
from .cache import PagedCache
from .ended import ComputedRows, Hooked
from .padding import Padding, look, mask_name, new_of, rows_of
from .states import computes_rows_apart

SCALARS = (bool, int, float, str, torch.dtype, type(None), Cache)
BY_ROW = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "mm_token_type_ids",
        "encoder_outputs",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "decoder_attention_mask",
        "decoder_position_ids",
    }
)
"""Arguments whose first dimension is the rows of the batch. That of others (pictures) may be as long and mean
something else.
"""
AT_ONCE = 1 << 24
"""Elements that are compared at once."""
MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number with many bits: the golden ratio in 64 of them."""


@cache
def keeps_another_cache(cls: Any) -> bool:
    """True if the forward of a model class takes a second cache from step to step, whose rows cannot be
    repeated.
    """
    names = inspect.signature(cls.forward).parameters
    return any(
        name.endswith(("_past_key_values", "_cache")) and not name.startswith("use_") for name in names
    )


class PromptRows(NamedTuple):
    """The host's knowledge of a prompt's rows after one look at them."""

    distinct: ComputedRows | None
    """The rows that equal no row before them; None if all differ, or may differ in what they become."""
    padding: Padding | None
    """The padding by its attention mask, if that was read."""
    device: torch.device

    def padding_of(self, rows: Sequence[int]) -> Padding | None:
        """The same for some rows."""
        if self.padding is None:
            return None
        return Padding([self.padding.starts[row] for row in rows], self.padding.plain)


def may_be_prompt(cache: PagedCache) -> bool:
    """True if the next forward of a generate() may be its prompt, or a part of it."""
    sequences = cache.sequences
    if not sequences.copies or (cache.ended is not None and cache.ended.begun):
        return False
    return not sequences.columns or (cache.prompt_in_chunks and sequences.sources is not None)


def read_prompt(model: nn.Module, arguments: Mapping[str, Any], cache: PagedCache) -> PromptRows | None:
    """Look for equal rows, and read the mask with them: the host waits for the device once. None for what is
    no prompt of a generate().
    """
    if not may_be_prompt(cache):
        return None
    sequences = cache.sequences
    known = sequences.sources
    device = input_device(model)
    rows = rows_of(arguments)
    tensors = None if rows < 2 else _comparable(model, arguments, rows, cache)
    if tensors is None:
        return PromptRows(None, None, device)
    if known is not None:
        first = [known.index(i) for i in range(max(known) + 1)]
        others = torch.tensor([first[source] for source in known], device=device)
    elif has_rows_only(arguments):
        others = None
    elif rows % sequences.copies or sequences.copies == 1:
        return PromptRows(None, None, device)
    else:
        others = torch.arange(rows, device=device) // sequences.copies * sequences.copies
    mask = arguments.get(mask_name(model))
    told = torch.empty(0, dtype=torch.long, device=device)
    if known is None and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        told = look(mask).to(device)
    row = torch.arange(rows, device=device)
    found = (
        equal_by_content(tensors) if others is None else others.where(equal_to(tensors, others).all(), row)
    )
    host = torch.cat([found.to(device), told]).tolist()
    return PromptRows(ComputedRows.of(host[:rows]), Padding.of(host[rows:]) if len(told) else None, device)


def _comparable(
    model: nn.Module, arguments: Mapping[str, Any], rows: int, cache: PagedCache
) -> list[torch.Tensor] | None:
    """Tensors by which a prompt's rows are compared; None if equal rows may become different ones: by
    dropout, in a state that cannot be forked, or because an argument has no rows.
    """
    kind: Any = type(model)
    if computes_rows_apart(model, cache) or keeps_another_cache(kind) or why_random(model) is not None:
        return None
    tensors = rows_to_compare(arguments, rows)
    try:
        adapters = adapters_by_row(model, rows)
    except ValueError:
        return None  # peft's layers say what they were given
    if not tensors:
        return None
    given: list[Sequence[int]] = [] if adapters is None else [adapters]
    if cache.sequences.sources is None:  # else rows stand for others, of equal numbers
        numbers = cache.sequences.numbers.items()
        given += [each for name, each in numbers if name not in (STATE_READ.name, STATE_WRITTEN.name)]
    return [*tensors, *(torch.tensor(each, device=tensors[0].device) for each in given)]


# ---- which rows are equal


def rows_to_compare(arguments: Mapping[str, Any], rows: int) -> list[torch.Tensor] | None:
    """The tensors of a forward's arguments, each with `rows` rows; None if one has no rows."""
    found: list[torch.Tensor] = []
    for name, value in arguments.items():
        if has_axes(name, value):
            if value.shape[1:] != (rows, new_of(arguments)):
                return None
            found.append(value.movedim(1, 0))
            continue
        if _is_rowless(value):
            continue
        leaves = _leaves(value)
        if leaves is None or any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in leaves):
            return None
        found += leaves
    return found


def has_axes(name: str, value: Any) -> bool:
    """True for positions along several axes, [axes, rows, tokens] (Qwen-VL)."""
    return name == "position_ids" and isinstance(value, torch.Tensor) and value.ndim == 3


def has_rows_only(arguments: Mapping[str, Any]) -> bool:
    """True if the tensors among the arguments surely have the rows of the batch where they are expected."""
    return all(name in BY_ROW or _is_rowless(value) for name, value in arguments.items())


def _is_rowless(value: object) -> bool:
    """True for an argument that is one for all rows, or empty: encoders' outputs where no picture is."""
    return isinstance(value, SCALARS) or (isinstance(value, dict) and not value)


def equal_by_content(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """For each row of tensors [rows, ...] the first row that is equal to it in all of them, [rows], on the
    device. Rows whose digests collide are compared and stay apart.
    """
    digests = torch.zeros(tensors[0].shape[0], dtype=torch.long, device=tensors[0].device)
    for tensor in tensors:
        for part in _words(tensor):
            place = torch.arange(part.shape[1], device=part.device) + 1
            weights = place * MIX ^ place << 31
            digests = digests * MIX + (part.long() * weights).sum(1).to(digests.device)
    ordered, order = digests.sort(stable=True)
    row = torch.arange(len(order), device=order.device)
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    # A stable sort: the first of equal digests is the first of the rows.
    first = torch.empty_like(order)
    first[order] = order[row.where(begins, 0).cummax(0).values]
    return first.where(equal_to(tensors, first), row)


def equal_to(tensors: Sequence[torch.Tensor], others: torch.Tensor) -> torch.Tensor:
    """A mask of the rows i of tensors [rows, ...] that equal row others[i] in all of them, bit by bit."""
    same = torch.ones_like(others, dtype=torch.bool)
    for tensor in tensors:
        for part in _words(tensor):
            same &= (part == part[others.to(part.device)]).all(1).to(same.device)
    return same


def _words(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The content of x [rows, ...] as whole numbers [rows, some], a part of it at a time."""
    flat = x.detach().flatten(1) if x.ndim > 1 else x.detach()[:, None]
    if flat.is_floating_point():
        flat = flat.contiguous().view(
            {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(x.itemsize, torch.long)
        )
    yield from flat.split(max(1, AT_ONCE // max(1, len(flat))), 1)


def _leaves(value: Any) -> list[torch.Tensor] | None:
    """The tensors of an argument; None if there is anything else in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (ModelOutput, tuple, list)):
        return None
    parts = value.values() if isinstance(value, ModelOutput) else value
    found = [_leaves(part) for part in parts if part is not None]
    if any(leaves is None for leaves in found):
        return None
    return [leaf for leaves in found for leaf in leaves or ()]


def select_rows(arguments: Mapping[str, Any], computed: ComputedRows) -> dict[str, Any]:
    """The forward's arguments for the rows that it computes, of a prompt or of a step."""

    def picked(x: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        return x.index_select(dimension, computed.on(x.device)[0])

    def some(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return picked(value, 1 if has_axes(name, value) else 0)
        if not isinstance(value, (ModelOutput, tuple, list)):
            return value
        last, few = computed.selected.get(name, (None, None))
        if last is not value:
            few = _each(value, picked)
            computed.selected[name] = value, few
        return few

    return {name: some(name, value) for name, value in arguments.items()}


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _each(part, change) for name, part in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_each(part, change) for part in value)
    return value


def answer_all(answer: Any, computed: ComputedRows, device: torch.device) -> Any:
    """The answer of a step over some of its call's rows as one over all. What came through from an argument
    is the caller's own.
    """
    own = {
        id(few): whole
        for given, selected in computed.selected.values()
        for whole, few in zip(_leaves(given) or (), _leaves(selected) or (), strict=True)
    }
    through = {name: own[id(part)] for name, part in answer.items() if id(part) in own} if own else {}
    if through:
        answer = type(answer)(**{name: part for name, part in answer.items() if name not in through})
    whole = repeat_rows(answer, len(computed.rows), computed.on(device)[1])
    return type(answer)(**{**whole, **through}) if through else whole


def repeat_rows(value: Any, rows: int, index: torch.Tensor, layout: Any = ROWS_FIRST) -> Any:
    """The answer of a forward over `rows` rows, as if it were one over the rows of `index`.

    A model may have put the cache next to one of its own, for what it sees of a picture: that has as many
    rows as were computed.
    """
    both = value.get(CACHE) if isinstance(value, ModelOutput) else None
    if isinstance(both, EncoderDecoderCache) and not isinstance(both.cross_attention_cache, PagedCache):
        both.cross_attention_cache.reorder_cache(cast(torch.LongTensor, index))
    return repeat_fields(value, layout, rows, index)


# ---- what rows of equal inputs may differ in


@contextmanager
def narrow_adapter_names(hooked: Iterable[Hooked], count: int, rows: Sequence[int]) -> Iterator[None]:
    """Let peft's mixed batches of `count` rows see the adapters of some rows only; hooked: `adapter_keywords`
    of the model.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for keywords, name in hooked:
            if len(keywords[name]) == count:
                changed.append((keywords, name, keywords[name]))
                keywords[name] = [keywords[name][row] for row in rows]
        yield
    finally:
        for keywords, name, values in changed:
            keywords[name] = values


def adapters_by_row(model: nn.Module, rows: int) -> list[int] | None:
    """A number for the adapters of each row, the same for the same adapters; None if rows have none of their
    own. Raises ValueError if peft was given adapters for another number of rows.
    """
    told = {id(keywords[name]): keywords[name] for keywords, name in adapter_keywords(model)}
    if not told:
        return None
    by_row = [values for values in told.values() if len(values) == rows]  # others are an encoder's
    if not by_row:
        raise ValueError(f"peft was given adapters for another number of rows than {rows}")
    numbers: dict[tuple[Any, ...], int] = {}
    return [numbers.setdefault(each, len(numbers)) for each in zip(*by_row, strict=True)]


def adapter_keywords(model: nn.Module) -> Iterator[Hooked]:
    """The keywords of the hooks with which peft hands each layer what is of its rows, and their names."""
    for module in modules_of(model):
        for hook in module._forward_pre_hooks.values():
            keywords = hook.keywords if isinstance(hook, partial) else {}
            for name in PEFT_KEYWORDS:
                values = keywords.get(name)
                if isinstance(values, Sequence) and not isinstance(values, str):
                    yield keywords, name
