"""The work around a model's forward while a paged call runs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from ..blocks.columns import selected
from ..model.adapters.apply import Inapplicable
from ..model.attention import Forward, running
from ..model.cache_name import CACHE, name_in, named_as_now, renamed
from ..model.capture.graph import ReplayableStep
from ..model.capture.replay import captures_of
from ..model.dispatch import below_autograd
from ..model.offloaded import input_device
from ..model.outputs import asked_fields, known_layout, layouts_of
from ..model.random_states import has_drawn, random_states, take_back_draws
from ..model.rehearsal import can_record
from ..model.routers import routers_of
from ..model.switch import setting_of
from .cache import Mark, PagedCache, keeping, paged_parts
from .dedupe import (
    PromptRows,
    adapter_keywords,
    answer_all,
    may_be_prompt,
    narrow_adapter_names,
    read_prompt,
    repeat_rows,
    select_rows,
)
from .ended import ComputedRows
from .given_past import with_given_past
from .leaving import rows_of_step
from .padding import INPUTS, Padding, mask_name, new_of, note_padding, rows_of
from .states import begin_again, begin_run, follow_rows

DENSE_OUTPUTS = ("output_attentions", "output_hidden_states")
"""Outputs that only the model's own attention makes as stock does: at padded columns too."""
MOST_NEW = 64
"""More new tokens than this in a row are a prompt."""


def wrap(
    model: nn.Module, original: Callable[..., Any], masks_known: bool = True, skips_autograd: bool = False
) -> Callable[..., Any]:
    """`original` with the pages known to attention and masks; forwards on any other cache pass through.

    masks_known: whether the model's masks are made by our function. A model that makes its own may show what
    is padding to others, so its padding is stored. skips_autograd: whether a forward without gradients needs
    nothing of autograd.
    """
    name = name_in(model)
    compute = original
    if skips_autograd:

        @functools.wraps(original)
        def compute(**arguments: Any) -> Any:
            return below_autograd(original, arguments)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = _by_name(original, args, kwargs) if args else kwargs
        arguments = named_as_now(given)
        if name != CACHE:
            arguments = {key: value for key, value in arguments.items() if key != name}
            arguments[CACHE] = given.get(name)
        cache = arguments.get(CACHE)
        parts = paged_parts(cache)
        step = running.get()
        if step is not None and step.cache is cache:
            return original(*args, **kwargs)  # the maker of this cache has set up the forward already
        if not parts:
            own = with_given_past(model, arguments, cache)
            if own is None:
                return _without_pages(original, args, kwargs)
            cache, parts = own, paged_parts(own)
            arguments = {**arguments, CACHE: own}
        memory = parts[0].sequences.memory
        run = compute if parts[0].own_layers else _of_states_alone(compute, name)
        with memory.lock:
            memory.queue()
            computed = _hold_rows(model, arguments, parts)
            before = [part.mark() for part in parts]
            try:
                if computed is not None:
                    answer = _few(model, run, arguments, parts, masks_known, computed)
                    return answer_all(answer, computed, input_device(model))
                return _run(model, run, arguments, parts, masks_known)
            except BaseException:
                try:
                    _roll_back(parts, before, cache)
                finally:
                    # Again, if an interrupt has broken it off; else there is nothing left to do.
                    _roll_back(parts, before, cache)
                raise

    if model._compiled_call_impl is not None:  # model.compile() traces what the model's call runs
        forward = torch.compiler.disable(forward)
    return forward


def _hold_rows(model: nn.Module, arguments: dict[str, Any], parts: list[PagedCache]) -> ComputedRows | None:
    """Let the caches hold the rows that a step computes, and answer with them; None for all rows of the call.
    Those of a prompt are found later.
    """
    if may_be_prompt(parts[0]):
        return None
    computed = rows_of_step(model, arguments, parts)
    for part in parts:
        if computed is None:
            part.spread()
        elif part.sequences.sources is not computed.sources:
            part.hold(computed.rows, computed.sources)
    return computed


def _of_states_alone(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A forward of recurrent layers alone. name: of its cache. It reads the mask of the new tokens only."""

    @functools.wraps(original)
    def forward(**arguments: Any) -> Any:
        mask = arguments.get("attention_mask")
        if mask is not None:
            arguments["attention_mask"] = mask[:, -new_of(arguments) :]
        return original(**renamed(arguments, CACHE, name))

    return forward


def _by_name(original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `original` by their names."""
    return {**dict(zip(inspect.signature(original).parameters, args, strict=False)), **kwargs}


def _roll_back(parts: list[PagedCache], before: list[Mark], cache: Any) -> None:
    """Return to where the parts of a cache were before a forward."""
    for part, mark in zip(parts, before, strict=True):
        part.roll_back(mark)
    if isinstance(cache, EncoderDecoderCache):
        # Cross attention that was written by the forward is not there any more.
        for layer in cache.is_updated:
            cache.is_updated[layer] &= cache.cross_attention_cache.get_seq_length(layer) > 0


def _without_pages(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A forward on another cache, or on none, in the middle of a paged call: guidance, an encoder, prefix
    tuning.
    """
    outer = running.get()
    try:
        running.set(None)
        return original(*args, **kwargs)
    finally:
        running.set(outer)


def _run(
    model: nn.Module,
    original: Callable[..., Any],
    arguments: dict[str, Any],
    parts: list[PagedCache],
    masks_known: bool,
) -> Any:
    sequences = parts[0].sequences
    if not sequences.columns:
        for part in parts:
            part.sequences.sources = None
        sequences.fill(rows_of(arguments))
    prompt = read_prompt(model, arguments, parts[0])
    distinct = None if prompt is None else prompt.distinct
    if prompt is not None and distinct is not None:
        rows, new = len(distinct.rows), new_of(arguments)
        index = distinct.on(prompt.device)[1]
        routers = routers_of(model, again=True)
        once = not all(part.may_repeat(rows, new) for part in parts)
        if not once and routers.known and routers.keep_rows_apart(rows, index, new):
            return _unique(model, original, arguments, parts, masks_known, prompt, distinct)
    for part in parts:
        part.spread()
    if prompt is None:
        return _paged(model, original, arguments, parts, masks_known)
    with routers_of(model).recording():
        return _paged(model, original, arguments, parts, masks_known, prompt.padding)


def _unique(
    model: nn.Module,
    original: Callable[..., Any],
    arguments: dict[str, Any],
    parts: list[PagedCache],
    masks_known: bool,
    prompt: PromptRows,
    distinct: ComputedRows,
) -> Any:
    """Compute the rows of a prompt that differ, and answer for all."""
    first = distinct.rows
    index = distinct.on(prompt.device)[1]
    asked = asked_fields(model, arguments)
    layouts = layouts_of(model)
    # Codecs of recordings draw random numbers: then rows of equal inputs are not equal rows.
    device = next(model.parameters()).device
    states = random_states(device)
    few = None
    if layouts.get(asked) is not None:
        before = [part.mark(repeats=True) for part in parts]
        for part in parts:
            part.sequences.expect_rows(len(index))
        sequences = parts[0].sequences
        if sequences.sources is None:  # else a chunk before this one has done so
            sequences.numbers = selected(sequences.numbers, first)
        padding = prompt.padding_of(first)
        answer = _few(model, original, arguments, parts, masks_known, distinct, padding)
        drawn = has_drawn(states, device)
        if not drawn and follow_rows(model, parts, len(first)):
            for part in parts:
                part.sequences.sources = distinct.sources
            return repeat_rows(answer, len(first), index, layouts[asked])
        take_back_draws(states, device)
        _drop_unique_rows(parts, before, arguments.get(CACHE), drawn)
    elif asked not in layouts and parts[0].sequences.columns == 0:
        with narrow_adapter_names(adapter_keywords(model), len(index), first):
            few = _without_cache(original, select_rows(arguments, distinct))
        if has_drawn(states, device):
            take_back_draws(states, device)
            few = None
    for part in parts:
        part.spread()
    with routers_of(model).recording():
        answer = _paged(model, original, arguments, parts, masks_known, prompt.padding)
    if few is not None:
        layouts[asked] = known_layout(few, answer, len(first), index)
    return answer


def _few(
    model: nn.Module,
    original: Callable[..., Any],
    arguments: dict[str, Any],
    parts: list[PagedCache],
    masks_known: bool,
    computed: ComputedRows,
    padding: Padding | None = None,
) -> Any:
    """The answer of a forward of some of the call's rows, for these."""
    few, all_rows = len(computed.rows), len(computed.sources)
    ended = parts[0].ended
    hooked = ended.hooked if ended is not None and ended.begun else adapter_keywords(model)
    with narrow_adapter_names(hooked, all_rows, computed.rows):
        answer = _paged(model, original, select_rows(arguments, computed), parts, masks_known, padding)
    parts[0].sequences.memory.rows["left_out"] += all_rows - few
    return answer


def _without_cache(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The same prompt's answer by the model alone, or None if it cannot be computed twice."""
    given = {name: value for name, value in arguments.items() if name != CACHE}
    if "use_cache" in given:
        given["use_cache"] = False
    try:
        return _without_pages(original, (), given)
    except Exception:  # the call itself shows what is wrong, if anything is
        return None


def _drop_unique_rows(parts: list[PagedCache], before: list[Mark], cache: Any, drawn: bool) -> None:
    """Forget the unique rows of a forward that has drawn random numbers, of which every row gets its own as
    with stock, or whose states cannot be forked.
    """
    _roll_back(parts, before, cache)
    for part in parts:
        if drawn and part.reuse is not None:
            part.reuse.disable("the forward draws random numbers")


def _paged(
    model: nn.Module,
    original: Callable[..., Any],
    arguments: dict[str, Any],
    parts: list[PagedCache],
    masks_known: bool,
    padding: Padding | None = None,
) -> Any:
    dense = _asks_for(model, arguments, DENSE_OUTPUTS)
    # A prompt in one piece has its padded columns at hand; later pieces read what earlier ones stored.
    store_all = (dense and parts[0].prompt_in_chunks) or not masks_known
    note_padding(model, arguments, parts[0], store_all, padding)

    parts[0].sequences.memory.rows["computed"] += rows_of(arguments)

    def run(given: dict[str, Any]) -> Any:
        captured = parts[0].sequences.static is not None
        if not captured:
            begin_run(parts, rows_of(given), new_of(given))
        outer = running.get()
        try:
            running.set(Forward(parts[0], dense and not captured))
            plain = captured or "peft" not in sys.modules
            with keeping(parts):
                answer = original(**given) if plain else _with_adapters(model, original, given, parts)
        finally:
            running.set(outer)
        if not captured:
            parts[0].require_even()
        return answer

    def compute(given: dict[str, Any], whole: bool) -> Any:
        step = _step(model, original, given, parts) if whole else None
        return run(given) if step is None else captures_of(model).run(model, step, run)

    reuse = parts[0].reuse
    if reuse is None:
        return compute(arguments, True)
    return reuse.run(parts[0], model, original, arguments, dense, compute)


def _with_adapters(
    model: nn.Module, original: Callable[..., Any], given: dict[str, Any], parts: list[PagedCache]
) -> Any:
    """The forward, in which kernels add the adapters of each row, if they can. They have no gradients."""
    device = input_device(model)
    if torch.is_grad_enabled() or not can_record([device]):
        return original(**given)
    before: list[Mark] = []
    try:
        with captures_of(model).with_adapters(model, parts[0], rows_of(given), device) as applied:
            before = [part.mark(repeats=applied) for part in parts]
            return original(**given)
    except Inapplicable:  # peft's own layers compute it from now on
        if before:
            _roll_back(parts, before, given.get(CACHE))
        begin_again(parts)
        return original(**given)


def _asks_for(model: nn.Module, arguments: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """True if any of these outputs is requested."""
    for name in names:  # noqa: SIM110 - asked in every step, and a generator costs as much as the answer
        if arguments.get(name) or setting_of(model.config, name):
            return True
    return False


def _step(
    model: nn.Module, original: Callable[..., Any], arguments: dict[str, Any], parts: list[PagedCache]
) -> ReplayableStep | None:
    """The forward as one that may be replayed, or None: a prompt, one that keeps gradients, one whose mask
    the tables do not know.
    """
    cache = parts[0]
    sequences = parts[0].sequences
    if not can_record(device for rows in sequences.rows.values() for device in rows.group.devices):
        return None
    inputs = next((arguments[name] for name in INPUTS[::-1] if arguments.get(name) is not None), None)
    if not cache.config.graphs or not sequences.columns or not sequences.padding_known or inputs is None:
        return None
    if routers_of(model).modules:
        return None  # a captured step has rows beyond the call's, which routers would count
    rows, new = inputs.shape[:2]
    starts = sequences.starts
    prompt = new > MOST_NEW or (cache.prompt_in_chunks and new > 1)
    prompt = prompt or (starts is not None and max(starts) > sequences.columns)
    if prompt or rows != sequences.count or may_be_prompt(cache):
        return None
    differs = torch.is_grad_enabled() or torch.is_autocast_enabled()
    if differs or _asks_for(model, arguments, ("output_attentions",)):
        return None
    name = mask_name(model)
    padded = starts is not None or (cache.ended is not None and cache.ended.padded)
    told = "none" if arguments.get(name) is None else "padded" if padded else "whole"
    return ReplayableStep(
        arguments,
        {**arguments, name: None} if told != "none" else arguments,
        told,
        parts,
        rows,
        new,
        original,
    )
