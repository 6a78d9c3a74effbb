"""What happens around a model's forward while a paged call runs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from ..model.adapters.apply import Inapplicable
from ..model.attention import Forward, running
from ..model.capture.graph import ReplayableStep
from ..model.capture.rehearsal import can_record
from ..model.capture.replay import captures_of
from ..model.dispatch import below_autograd
from ..model.offloaded import input_device
from ..model.outputs import asked_fields, layouts_of
from ..model.patches import mark_wrapper
from ..model.routers import routers_of
from .cache import Mark, PagedCache, paged_parts
from .dedupe import (
    Draws,
    adapters_agree,
    adapters_of_unique_rows,
    keeps_another_cache,
    repeat_rows,
    unique_rows,
)

DENSE_OUTPUTS = ("output_attentions", "output_hidden_states")
"""Outputs that only the model's own attention makes as stock does: at padded columns too."""
MOST_NEW = 64
"""More new tokens than this in a row are a prompt."""
INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def wrap(
    model: nn.Module, original: Callable[..., Any], masks_known: bool = True, skips_autograd: bool = False
) -> Callable[..., Any]:
    """`original` with the pages known to attention and masks; forwards on any other cache pass through.

    masks_known: whether the model's masks are made by our function. A model that makes its own may show what
    is padding to others, so its padding is stored. skips_autograd: whether a forward without gradients needs
    nothing of autograd.
    """
    compute = original
    if skips_autograd:

        @functools.wraps(original)
        def compute(**arguments: Any) -> Any:
            return below_autograd(original, arguments)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = _by_name(original, args, kwargs) if args else kwargs
        cache = arguments.get("past_key_values")
        parts = paged_parts(cache)
        step = running.get()
        if step is not None and step.cache is cache:
            return original(*args, **kwargs)  # the maker of this cache has set up the forward already
        if not parts:
            return _without_pages(original, args, kwargs)
        memory = parts[0].sequences.memory
        with memory.lock:
            memory.queue()
            before = [part.mark() for part in parts]
            try:
                return _run(model, compute, arguments, parts, masks_known)
            except BaseException:
                try:
                    _roll_back(parts, before, cache)
                finally:
                    # Again, if an interrupt has broken it off; else there is nothing left to do.
                    _roll_back(parts, before, cache)
                raise

    mark_wrapper(forward)
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
    copies = parts[0].sequences.unforked
    if copies == 1:
        return _paged(model, original, arguments, parts, masks_known)
    rows = _rows(arguments)
    kept = unique_rows(arguments, rows, copies) if _may_share(model, arguments, parts[0], rows) else None
    asked = asked_fields(model, arguments)
    layouts = layouts_of(model)
    few = None
    if kept is not None:
        draws = Draws(next(model.parameters()).device)
        if layouts.can_repeat(asked):
            before = [part.mark() for part in parts]
            with adapters_of_unique_rows(model, rows, copies):
                answer = _paged(model, original, kept, parts, masks_known)
            if not draws.drawn():
                return repeat_rows(answer, rows // copies, copies, layouts[asked])
            _take_back(draws, parts, before, arguments.get("past_key_values"))
        elif asked not in layouts and parts[0].sequences.columns == 0:
            with adapters_of_unique_rows(model, rows, copies):
                few = _without_cache(original, kept)
            if draws.drawn():
                draws.take_back()
                few = None
    for part in parts:
        part.spread()
    with routers_of(model).recording():
        answer = _paged(model, original, arguments, parts, masks_known)
    if few is not None:
        layouts.learn(asked, few, answer, rows // copies, copies)
    return answer


def _without_cache(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The same prompt's answer by the model alone, or None if it cannot be computed twice."""
    given = {name: value for name, value in arguments.items() if name != "past_key_values"}
    if "use_cache" in given:
        given["use_cache"] = False
    try:
        return _without_pages(original, (), given)
    except Exception:  # the call itself shows what is wrong, if anything is
        return None


def _take_back(draws: Draws, parts: list[PagedCache], before: list[Mark], cache: Any) -> None:
    """Forget the unique rows of a forward that draws random numbers: every row gets its own, as with
    stock.
    """
    draws.take_back()
    _roll_back(parts, before, cache)
    for part in parts:
        if part.reuse is not None:
            part.reuse.disable("the forward draws random numbers")


def _may_share(model: nn.Module, arguments: Mapping[str, Any], cache: PagedCache, rows: int) -> bool:
    """Whether equal rows may be computed once: not under dropout, and only in the prompt (in chunks: while
    they are equal).
    """
    copies = cache.sequences.unforked
    in_prompt = cache.sequences.columns == 0 or cache.prompt_in_chunks
    # A recurrent state may live in the modules, where it cannot be forked.
    kind: Any = type(model)
    keeps_rows = model.training or getattr(model, "_is_stateful", False) or keeps_another_cache(kind)
    if not in_prompt or keeps_rows or rows % copies or not adapters_agree(model, rows, copies):
        return False
    routers = routers_of(model, again=True)
    return routers.known and routers.keep_rows_apart(rows // copies, copies, _new(arguments))


def _paged(
    model: nn.Module,
    original: Callable[..., Any],
    arguments: dict[str, Any],
    parts: list[PagedCache],
    masks_known: bool,
) -> Any:
    dense = _asks_for(model, arguments, DENSE_OUTPUTS)
    # A prompt in one piece has its padded columns at hand; later pieces read what earlier ones stored.
    _note_padding(
        model, arguments, parts[0], store_all=(dense and parts[0].prompt_in_chunks) or not masks_known
    )

    def run(given: dict[str, Any]) -> Any:
        captured = parts[0].sequences.static is not None
        outer = running.get()
        try:
            running.set(Forward(parts[0], dense and not captured))
            plain = captured or "peft" not in sys.modules
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
    return (
        compute(arguments, True)
        if reuse is None
        else reuse.run(parts[0], model, original, arguments, dense, compute)
    )


def _with_adapters(
    model: nn.Module, original: Callable[..., Any], given: dict[str, Any], parts: list[PagedCache]
) -> Any:
    """The forward, in which kernels add the adapters of each row, if they can. They have no gradients."""
    device = input_device(model)
    if torch.is_grad_enabled() or not can_record([device]):
        return original(**given)
    before = [part.mark() for part in parts]
    try:
        with captures_of(model).with_adapters(model, parts[0], _rows(given), device):
            return original(**given)
    except Inapplicable:  # peft's own layers compute it from now on
        _roll_back(parts, before, given.get("past_key_values"))
        return original(**given)


def _asks_for(model: nn.Module, arguments: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether any of these outputs is requested."""
    config: Any = model.config
    return any(arguments.get(name) or getattr(config, name, False) for name in names)


def _step(
    model: nn.Module, original: Callable[..., Any], arguments: dict[str, Any], parts: list[PagedCache]
) -> ReplayableStep | None:
    """The forward as one that may be replayed, or None: a prompt, one that keeps gradients, one whose mask
    the tables do not know.
    """
    cache = parts[0]
    sequences = parts[0].sequences
    if not any(can_record(rows.group.devices) for rows in sequences.rows.values()):
        return None
    inputs = next((arguments[name] for name in INPUTS[::-1] if arguments.get(name) is not None), None)
    if not cache.config.graphs or not sequences.columns or not sequences.padding_known or inputs is None:
        return None
    if routers_of(model).modules:
        return None  # a captured step has rows beyond the call's, which routers would count
    rows, new = inputs.shape[:2]
    starts = sequences.starts
    prompt = (
        new > MOST_NEW
        or (cache.prompt_in_chunks and new > 1)
        or (starts is not None and max(starts) > sequences.columns)
    )
    if prompt or rows != sequences.count or any(part.sequences.unforked > 1 for part in parts):
        return None
    if (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled()
        or _asks_for(model, arguments, ("output_attentions",))
    ):
        return None
    name = _mask_name(model)
    told = "none" if arguments.get(name) is None else "whole" if starts is None else "padded"
    return ReplayableStep(
        arguments,
        {**arguments, name: None} if told != "none" else arguments,
        told,
        parts,
        rows,
        new,
        original,
    )


def _mask_name(model: nn.Module) -> str:
    """The argument that marks the padding in the rows of the cache."""
    return (
        "decoder_attention_mask" if getattr(model.config, "is_encoder_decoder", False) else "attention_mask"
    )


def _rows(arguments: Mapping[str, Any]) -> int:
    return next((arguments[name].shape[0] for name in INPUTS[::-1] if arguments.get(name) is not None), 0)


def _new(arguments: Mapping[str, Any]) -> int:
    return next((arguments[name].shape[1] for name in INPUTS[::-1] if arguments.get(name) is not None), 0)


def _note_padding(model: nn.Module, arguments: Mapping[str, Any], cache: PagedCache, store_all: bool) -> None:
    """Learn from the attention mask where each row begins, or that it is no left padding."""
    sequences = cache.sequences
    name = _mask_name(model)
    mask = arguments.get(name)
    if mask is None:
        sequences.padding_known = True
        return
    own = INPUTS[:2] if name == "attention_mask" else INPUTS[2:]
    inputs = next((arguments[name] for name in own if arguments.get(name) is not None), None)
    new = 0 if inputs is None else inputs.shape[1]
    fits = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == sequences.columns + new
    if not fits or inputs is None:
        sequences.padding_known = False
    elif mask.device.type == "cpu" or new > 1 or not cache.mask_read:
        # Reading a device's mask waits for it, so a decoding step trusts what its call has read.
        _read_mask(mask, cache, store_all)
        cache.mask_read = True


def _read_mask(mask: torch.Tensor, cache: PagedCache, store_all: bool) -> None:
    """Take mask [rows, columns] apart into where rows begin; with `store_all` padding is stored like anything
    else.
    """
    sequences = cache.sequences
    sequences.flush()  # the mask's rows are in the order that a reorder owes
    known = sequences.starts
    if known is None and sequences.columns:
        sequences.padding_known = bool(mask.all())
        return
    mask = mask.bool()
    begin = (mask.cumsum(1) == 0).sum(1)
    column = torch.arange(mask.shape[1], device=mask.device)
    plain = bool((mask == (column >= begin[:, None])).all())
    starts = begin.tolist()
    if sequences.columns == 0:
        sequences.begin_at(starts if plain and not store_all else None)
        sequences.padding_known = plain and (not any(starts) or not store_all)
        return
    assert known is not None
    # A row that was all padding so far may begin later than it seemed.
    grown = [new if old >= sequences.columns else old for new, old in zip(starts, known, strict=True)]
    sequences.padding_known = plain and grown == starts
    if (mask & (column < torch.tensor(grown, device=mask.device)[:, None])).any():
        raise ValueError(
            "the attention_mask shows tokens that were padding when this cache was begun; use a new cache"
        )
    sequences.begin_at(grown)
