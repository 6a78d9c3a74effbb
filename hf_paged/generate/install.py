"""The plug: four methods of GenerationMixin, two registry entries. `import hf_paged` installs it,
`uninstall_cache()` takes it out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..kv import Arithmetic
from ..kv.config import CacheConfig
from ..model.attention import NAME, paged_attention, paged_mask
from ..model.cache_name import CACHE, add_newer_name, name_in, named_by_caller
from ..model.capture.replay import drop_captures
from ..model.invariant.mode import require_same_in_pieces, require_whole_sequences
from ..model.methods import check_methods
from ..model.mla import restore_expansion
from ..model.slots import Slot
from ..model.snapshot import CallSnapshots, runs_foreign_code
from ..model.support import prepares_none, warn, why_dropped, why_not
from ..model.thread_state import restoring
from ..model.training import why_random
from .cache import PagedCache, paged_parts
from .call import Call, current_call, settle_models
from .going_back import go_back
from .leaving import LOOP, watched
from .ranks import begin_on_ranks, check_ranks
from .routing import check_routing, returned_routing

WORD = "paged"
EXPECTED = {
    "generate": ["inputs", "generation_config", "logits_processor", "stopping_criteria"],
    "_prepare_generation_config": ["generation_config"],
    "_prepare_cache_for_generation": [
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ],
    "_sample": ["input_ids", "logits_processor", "stopping_criteria", "generation_config"],
}
PATCH = "_hf_paged_patch"
OWN = "{} has a generate() of its own"


class Patch:
    """The wrappers in GenerationMixin and the methods that they wrap.

    It is kept in GenerationMixin: a module that is reloaded, or imported a second time, finds it there.
    """

    def __init__(self) -> None:
        self.owner = globals()
        """The namespace of the module whose code the wrappers run."""
        self.originals: dict[str, Callable[..., Any]] = {}

    @property
    def active(self) -> bool:
        """True if its wrappers act: one that others have wrapped cannot be removed and passes through."""
        return _patch() is self

    @property
    def complete(self) -> bool:
        """True if every method is wrapped: an interrupt may have kept some from it."""
        methods = {name: getattr(GenerationMixin, name) for name in self.originals}
        return len(methods) == len(EXPECTED) and not any(
            methods[name] is own for name, own in self.originals.items()
        )

    def put_in(self) -> None:
        """Wrap the methods; may be repeated after an interrupt."""
        setattr(GenerationMixin, PATCH, self)
        for name, wrap in (
            ("generate", _wrap_generate),
            ("_prepare_generation_config", _wrap_prepare_config),
            ("_prepare_cache_for_generation", _wrap_prepare_cache),
            ("_sample", _wrap_sample),
        ):
            method = getattr(GenerationMixin, name)
            if self.originals.setdefault(name, method) is not method:
                continue
            wrapper = wrap(method, self)
            # Itself: functools.wraps copies attributes.
            wrapper.hf_paged = wrapper  # type: ignore[attr-defined]
            setattr(GenerationMixin, name, wrapper)

    def take_out(self) -> None:
        """Restore the methods. Wrappers that others put on top of ours stay and pass through."""
        for name, original in self.originals.items():
            method = getattr(GenerationMixin, name)
            if getattr(method, "hf_paged", None) is method:
                setattr(GenerationMixin, name, original)
        delattr(GenerationMixin, PATCH)


def _patch() -> Patch | None:
    return vars(GenerationMixin).get(PATCH)


def install_cache() -> None:
    """Make "paged" a cache of generate(). Doing it twice does nothing."""
    patch = _patch()
    if installed() and patch is not None and patch.complete:
        return
    check_methods(EXPECTED)
    patch = _patch()
    if patch is not None and not installed():  # of a module that was imported before, under the same name
        patch.take_out()
        patch = None
    PagedCache.go_back = go_back
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, paged_mask)
    (patch or Patch()).put_in()


def uninstall_cache() -> None:
    """Restore transformers' methods."""
    patch = _patch()
    if patch is not None and installed():
        patch.take_out()
    settle_models()
    drop_captures()
    restore_expansion()


def installed() -> bool:
    """True if generate() takes cache_implementation="paged" here: install() makes it, uninstall() ends it."""
    patch = _patch()
    return patch is not None and patch.owner is globals()


def _wrap_generate(stock: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    names = list(inspect.signature(stock).parameters)[1:]

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return stock(self, *args, **kwargs)
        # A recipe from a hub replaces generate() altogether: the word is its own business.
        asked = kwargs.get("cache_implementation") == WORD and not isinstance(
            kwargs.get("custom_generate"), str
        )
        if asked:
            del kwargs["cache_implementation"]
        kwargs = named_by_caller(kwargs, self)
        call = Call(asked)
        snapshots = CallSnapshots(runs_foreign_code({**dict(zip(names, args, strict=False)), **kwargs}), {})
        answer = None
        try:
            call.open(snapshots)
            answer = restoring(lambda: stock(self, *args, **kwargs))
            if paged_parts(getattr(answer, CACHE, None)):
                add_newer_name(answer)
            if call.routing is not None:
                answer["routing"] = call.routing.of(answer)
            return answer
        finally:
            try:
                call.close(answer)
            finally:
                # Again, if an interrupt has broken it off; else there is nothing left to do.
                call.close(answer)

    return generate


def _wrap_prepare_config(stock: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, model_kwargs = stock(self, *args, **kwargs)
        call = current_call.get()
        if patch.active and call is not None and call.by_keyword:
            config.cache_implementation = WORD
        if patch.active and call is not None and config.cache_implementation == WORD:
            call.configured_class = type(self).__name__
        if patch.active and call is None and config.cache_implementation == WORD and prepares_none(self):
            warn(OWN.format(type(self).__name__))
            config.cache_implementation = None
        return config, model_kwargs

    return _prepare_generation_config


def _wrap_prepare_cache(stock: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        call = current_call.get()
        if call is not None:
            call.decided = True
        require_same_in_pieces(self)
        if call is None and patch.active and generation_config.cache_implementation == WORD:
            warn(OWN.format(type(self).__name__))
            generation_config.cache_implementation = None
        slots: list[Slot] = []
        if call is None or not patch.active or not _takes(self, generation_config, model_kwargs, slots):
            require_whole_sequences(self)
            return stock(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        check_ranks(self, generation_config)
        name = name_in(self)
        given = model_kwargs.get(name)
        options = None if generation_config.cache_config is None else _options(generation_config)
        if options is not None and options.return_routing:
            check_routing(self, generation_config, given)
        cache = _made(self, options, slots) if given is None else _given(self, given, options)
        model_kwargs[name] = cache
        if given is not None:
            model_kwargs[CACHE] = cache  # stock takes the tokens that this one holds off the input
        parts = paged_parts(cache)
        parts[0].sequences.memory.rows_stay = LOOP  # unless that of _sample says another thing
        _prepare(cache, parts, generation_config, max_cache_length)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        call.routing = returned_routing(parts[0], generation_config, model_kwargs.get("attention_mask"))
        call.plug(self, parts, made=given is None)
        return None

    return _prepare_cache_for_generation


def _wrap_sample(stock: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _sample(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call = current_call.get()
        if patch.active and call is not None and call.model is self:
            stopping_criteria = watched(
                call.model,
                call.used,
                bool(call.made),
                generation_config,
                input_ids,
                logits_processor,
                stopping_criteria,
            )
        return stock(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs)

    return _sample


def _takes(model: Any, generation_config: Any, model_kwargs: dict[str, Any], slots: list[Slot]) -> bool:
    """True if this call has a paged cache, or requests one that is available, whose places `slots` gets."""
    given = model_kwargs.get(name_in(model))
    asked = generation_config.cache_implementation == WORD
    if paged_parts(given):
        begin_on_ranks(model, None)
        # A cache and the name of another: stock has its own error for that, here and below.
        return asked or generation_config.cache_implementation is None
    if asked and given is not None and generation_config.is_assistant:
        # The main model's config set the word. Whisper's generate() and decoder make caches of their own in
        # the first round.
        warn(f"the assistant {type(model).__name__} makes its own cache and continues on it")
        generation_config.cache_implementation = generation_config.cache_config = None
    if not asked or given is not None:
        return False
    reason = why_not(model, generation_config, slots) or why_dropped(model) or why_random(model)
    reason = begin_on_ranks(model, reason)
    if reason is not None and _options(generation_config).return_routing:
        raise ValueError(f"cache_config={{'return_routing': True}} needs pages, and {reason}")
    if reason is not None:
        warn(reason)
        generation_config.cache_implementation = generation_config.cache_config = None
    return reason is None


def _options(generation_config: Any) -> CacheConfig:
    """The options of a cache for this call. An assistant's calls are rounds of another's, and leave nothing
    to others.
    """
    options = CacheConfig.of(generation_config.cache_config)
    if not generation_config.is_assistant:
        return options
    return replace(options, prefix_caching=False, return_routing=False)


def _made(model: Any, options: CacheConfig | None, slots: list[Slot]) -> Any:
    return _with_cross(model, PagedCache.make(model, options or CacheConfig(), slots=slots))


def _with_cross(model: Any, cache: PagedCache) -> Any:
    """The cache as the model wants it: an encoder-decoder's has a second half for what the decoder sees of
    the encoder.
    """
    if not model.config.is_encoder_decoder:
        return cache
    prepare = inspect.unwrap(type(model)._prepare_cache_for_generation)
    if prepare is not inspect.unwrap(GenerationMixin._prepare_cache_for_generation):
        # The model makes its cross cache anew from the type of ours, so it gets stock's.
        return EncoderDecoderCache(cache, DynamicCache())
    return EncoderDecoderCache(cache, PagedCache.make(model, cache.config, cross=True))


def _given(model: Any, given: Any, asked: CacheConfig | None) -> Any:
    """A cache that the user passed: check its model and the `asked` options, and complete it for an
    encoder-decoder.
    """
    own = paged_parts(given)[0]
    if asked is not None and asdict(asked) != asdict(own.config):
        raise ValueError(
            f"cache_config={asked} does not fit the PagedCache that was passed, made with {own.config}; give "
            "one of them"
        )
    if id(own.model) != id(model):
        owner = "a model that is gone" if own.model is None else f"another model ({type(own.model).__name__})"
        raise ValueError(
            f"this PagedCache belongs to {owner} and cannot be used with this {type(model).__name__}; "
            "make one with hf_paged.PagedCache(model)"
        )
    kept = own.sequences.states
    made = kept.group.key[2] if kept is not None and kept.columns else None
    if isinstance(made, Arithmetic) and made.dtype != model.dtype:
        raise ValueError(
            f"this PagedCache holds recurrent states of a {type(model).__name__} in {made.dtype}, which is "
            f"in {model.dtype} now; cast it back, or use a new cache"
        )
    if isinstance(given, PagedCache):
        given = _with_cross(model, given)
    given._is_user_defined = True
    return given


def _prepare(cache: Any, parts: list[PagedCache], generation_config: Any, max_cache_length: int) -> None:
    """Prepare the caches for what the call is going to do with them."""
    fork = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if isinstance(cache, EncoderDecoderCache) and len(parts) < 2:
        fork = 0  # a half that is not ours cannot be forked late
    begins = all(part.sequences.columns == 0 for part in parts)
    for part in parts:
        part.prompt_in_chunks = generation_config.prefill_chunk_size is not None
        part.sequences.copies = fork if begins else 0
    parts[0].sequences.expect(max_cache_length)
