"""Prompts that begin like earlier ones: what is cached of them is not computed again (contract C17 to
C25).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from ..blocks import Prompt
from ..blocks.prefix_lookup import worth_a_state
from ..kv import Memory, Prefix, Sequences, TokenHistory, tensors_agree
from ..kv.config import CacheConfig
from ..kv.prefixes import begin_with, computed_again, count_hits, longest_prefix
from ..model.adapters.identity import AdapterStates
from ..model.cache_name import CACHE, FOR_STATES
from ..model.capture.graph import CapturedCache
from ..model.hooks import HookMonitor
from ..model.identity import identity_of
from ..model.layer import PagedLayer
from ..model.peft_layers import adapter_names_of
from ..model.snapshot import ModelSnapshot, call_snapshots
from ..model.weights_digest import Unreadable
from .keys import PLACES, ForwardInputs, NotShareable, PrefixOrigin, why_never
from .prompt_snapshots import goes_on, rows_of_states, stops_of, why_unnamed

logger = logging.getLogger("hf_paged")

ANSWERS = frozenset({"logits", CACHE, FOR_STATES})
"""Fields that the answer to a part of a prompt may have."""
Forward = Callable[..., Any]
Compute = Callable[[dict[str, Any], bool], Any]
"""How a forward is computed: from its arguments, and whether these are all that its caller gave."""


class FillableCache(CapturedCache, Protocol):
    """The interface of a cache whose rows reuse begins."""

    prompt_in_chunks: bool

    @property
    def own_layers(self) -> list[PagedLayer]:
        """The paged layers that hold the tokens of `sequences`."""

    def begin_at(self, columns: int) -> None:
        """Notify the layers that their rows begin with cached columns."""


class _Prompt(NamedTuple):
    """A forward of all columns of a prompt from `before` on, up to `columns`."""

    arguments: dict[str, Any]
    fed: ForwardInputs
    tokens: list[list[int]]
    """Of all columns, [rows][columns]."""
    before: int
    columns: int

    def rows(self, starts: Sequence[int], block_size: int) -> list[Prompt]:
        """The rows' own tokens, which begin at these columns."""
        return [
            Prompt(row[start:], block_size, key)
            for row, start, key in zip(self.tokens, starts, self.fed.keys, strict=True)
        ]

    @property
    def form(self) -> dict[str, Any]:
        """The arguments without the cache; None in the place of a tensor."""
        return {
            name: None if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
            if value is not None and not isinstance(value, Cache)
        }

    def part(self, begin: int, end: int) -> dict[str, Any]:
        """The arguments of a forward of the columns from `begin` to `end`."""
        place = slice(begin - self.before, end - self.before)
        given = {name: self.arguments[name] for name in PLACES if self.arguments.get(name) is not None}
        cut = {name: value[:, place].contiguous() for name, value in given.items()}
        mask = self.arguments.get("attention_mask")
        if mask is not None and end < self.columns:
            cut["attention_mask"] = mask[:, :end]
        return {**self.arguments, **cut}


class Reuse:
    """Prefix reuse of one cache: what it finds, and what it publishes."""

    def __init__(self, sequences: Sequences, config: CacheConfig) -> None:
        self.sequences = sequences
        self.config = config
        self.history: TokenHistory = sequences.keep_history()
        self.disabled: str | None = None
        """Why what the rows hold cannot be shared, or None if it can."""
        self.state = 0
        """The state of the model that the rows come from."""
        self._keys: list[bytes] = []
        """The facts besides its tokens that each row's keys and values depend on; rows as they were in the
        beginning.
        """
        self._given: dict[str, Any] = {}
        """The arguments of the first forward, but for tensors and the cache; the names of tensors are there
        with None.
        """
        self._tokens: list[list[int]] | None = None
        """The tokens [rows][columns] so far, padding included, while the host knows all of them."""
        self._forward: Forward | None = None
        """The running call's forward, once it has checked the model."""
        self._origin: PrefixOrigin | None = None
        self._monitor = HookMonitor()
        self._moves = 0
        """How often the model's state had changed when the running call checked it."""
        self._adapters: AdapterStates | None = None
        """The contents of the running call's adapters when it checked the model."""
        self._closely = False
        """True if foreign code runs between the forwards of the running call, which may change the model and
        change it back.
        """
        self._seen = 0
        """Cache length at the last check of the model; 0 if the call's last forward was not recognised."""

    def fork(self, sequences: Sequences) -> Reuse:
        """A copy for a second cache that continues from here."""
        twin = copy.copy(self)
        assert sequences.history is not None
        twin.sequences = sequences
        twin.history = sequences.history
        twin._monitor = HookMonitor()
        twin.leave()
        return twin

    # ---- a call

    def disable(self, reason: str) -> None:
        """Do not publish the rows, for this reason."""
        if self.disabled is None:
            self.disabled = reason
            _note(self.sequences.memory, reason)

    def leave(self) -> None:
        """Forget the running call, which has ended."""
        self._monitor.leave()
        self._forward = self._origin = self._tokens = None
        self._seen = 0

    def commit(self, model: nn.Module) -> None:
        """Let later calls begin with what the rows hold after one that succeeded (C17)."""
        if self._forward is None or not self._is_sound():
            return
        if self._closely or self._seen != self.sequences.columns:
            self._see_that_nothing_changed(model)
        if self.disabled is None:
            self._name(model, self.history.read(), self._keys_now())

    def _see_that_nothing_changed(self, model: nn.Module) -> None:
        """Disable sharing if the model is not what it was when the call checked it, or was changed
        meanwhile.
        """
        snapshot = ModelSnapshot(model)
        still = identity_of(model).still(snapshot, self.state, self._moves)
        still = still and self._adapters is not None and self._adapters.still(snapshot.lora)
        if self._origin is not None and snapshot.lora.apart:
            still = still and snapshot.lora.active == self._origin.active
        if not still or not self._monitor.know(snapshot.hooked):
            self.disable("the model changed while it was used")

    def _is_sound(self) -> bool:
        """True if the rows agree with their keys and tokens."""
        if self._monitor.changed:
            self.disable("a hook changes what layers compute")
        if not self.sequences.padding_known:
            self.disable("the attention mask is not left padding")
        whole = all(
            rows.columns == self.history.columns and not rows.torn for rows in self.sequences.rows.values()
        )
        return self.disabled is None and whole and self.history.columns > 0

    def _keys_now(self) -> list[bytes]:
        """The keys of the rows as they are now."""
        return [self._keys[row] for row in self.history.origins()]

    def _name(
        self, model: nn.Module, tokens: list[list[int]], keys: list[bytes], snapshots: bool = True
    ) -> None:
        """Let others find the blocks of the rows, and their states if that is worth `snapshots`."""
        dedupe = identity_of(model).trust.get(self.state, "none") != "none"
        for rows in self.sequences.rows.values():
            if rows.kind.fills or snapshots:
                rows.commit(tokens, keys, dedupe)

    def _feed(self, prompt: _Prompt, end: int) -> None:
        """Note the tokens of a prompt up to column `end`."""
        place = slice(self.history.columns - prompt.before, end - prompt.before)
        self.history.feed(prompt.fed.tokens[:, place])

    # ---- rows that go back

    def prompt_again(self, columns: int) -> dict[str, Any]:
        """The arguments of a forward of the first `columns` columns of all rows as they are now; raises
        NotShareable if they are not known.
        """
        if self.disabled is not None:
            raise NotShareable(self.disabled)
        if self._forward is not None:
            raise NotShareable("a call of generate() runs on the cache")
        if self.history.columns != self.sequences.columns or "input_ids" not in self._given:
            raise NotShareable("the cache was filled with other inputs than tokens in calls of generate()")
        tokens = torch.tensor(self.history.read(), device="cpu")[:, :columns]
        starts = torch.tensor(self.sequences.starts or [0] * len(tokens), device="cpu")
        places = torch.arange(columns, device="cpu") - starts[:, None]
        again: dict[str, torch.Tensor | int] = {"input_ids": tokens, "logits_to_keep": 1}
        again["attention_mask"] = (places >= 0).long()
        again["position_ids"] = places.clamp(min=0)
        return {name: again.get(name, value) for name, value in self._given.items()}

    def require_same(self, other: Reuse) -> None:
        """Raise NotShareable unless the rows of another cache are computed as these were."""
        if other.disabled is not None or other._keys_now() != self._keys_now():
            raise NotShareable("the model has changed since the cache was begun")

    def exchange(self, other: Reuse) -> None:
        """Be about the rows of another cache, which have just come here, as that is about these."""
        mine, theirs = dict(vars(self)), dict(vars(other))
        for each, new in ((self, theirs), (other, mine)):
            vars(each).update({name: value for name, value in new.items() if name != "sequences"})

    # ---- a forward

    def run(
        self,
        cache: FillableCache,
        model: nn.Module,
        forward: Forward,
        arguments: dict[str, Any],
        dense: bool,
        compute: Compute,
    ) -> Any:
        """Compute a forward, except for its cached part. With `dense` more than logits is requested."""
        fed = None
        if self.disabled is None:
            try:
                origin = self._look(cache, model, forward)
                if arguments.get("output_attentions") and identity_of(model).trust.get(self.state) != "masks":
                    # Falcon under sdpa leaves out its causal mask then.
                    raise NotShareable("attention of the model's own may compute its weights in another way")
                fed = self._read(cache, arguments, origin)
            except (NotShareable, Unreadable) as reason:
                self.disable(str(reason))
        if self.disabled is None and fed is not None:
            return self._prompt(cache, model, arguments, fed, dense, compute)
        self._tokens = None
        answer = compute(arguments, True)
        full = self.sequences.columns == self.sequences.expected
        if self.disabled is None and (self._closely or full):
            self._see_that_nothing_changed(model)  # while a device still works
            self._seen = self.sequences.columns if full else 0
        if self.disabled is None:
            self.history.feed(arguments["input_ids"])
        return answer

    def _look(self, cache: FillableCache, model: nn.Module, forward: Forward) -> PrefixOrigin:
        """The origin of this call's keys and values; the model is checked once a call."""
        if self.history.columns != self.sequences.columns:
            raise NotShareable("the cache was filled outside of generate()")
        if self._origin is not None:
            return self._origin
        self._forward = forward
        in_slots = bool(rows_of_states(self.sequences))
        complete = cache.complete and in_slots is (cache.states is not None)
        reason = why_never(complete, model, in_slots) or why_unnamed(self.sequences, self.config, model)
        if reason is not None:
            raise NotShareable(reason)
        identity = identity_of(model)
        snapshot = ModelSnapshot(model)
        state = identity.prefix_key(snapshot)
        if snapshot.turns_with_length:
            raise NotShareable("the rotary embedding depends on the longest row")
        if snapshot.looks_around:
            raise NotShareable("a quantized layer rounds a token depending on the rest of its batch")
        if identity.trust.get(state) == "none":
            raise NotShareable("a chunk of a prompt is computed differently from the whole")
        if self.history.columns and self.state != state:
            raise NotShareable("the model has changed since the cache was begun")
        self.state = state
        self._moves = identity.moves
        self._monitor = HookMonitor()
        self._monitor.watch(snapshot.hooked)
        kept = call_snapshots.get()
        self._closely = self._monitor.some or (kept is not None and kept.foreign)
        active = snapshot.lora.active if snapshot.lora.apart else ("",)
        self._adapters = AdapterStates.of(identity, snapshot.lora, _names(snapshot, active))
        return PrefixOrigin(identity.secret, state, self.config.salt, snapshot.hooked, self._adapters, active)

    def _read(
        self, cache: FillableCache, arguments: Mapping[str, Any], origin: PrefixOrigin
    ) -> ForwardInputs | None:
        """The inputs of a prompt, or of a part of one; None for a step that continues it."""
        ids = arguments.get("input_ids")
        before = self.history.columns
        first = self._origin is None
        self._origin = origin
        # Drafts that were taken back are among the tokens known so far: then the prompt has ended.
        known = self._tokens is not None and len(self._tokens[0]) == before
        if (
            not first
            and before
            and (not known or not cache.prompt_in_chunks or ids is None or ids.shape[1] == 1)
        ):
            if ids is None:
                raise NotShareable("a step had other inputs than token ids")
            return None
        if not self.sequences.padding_known:
            raise NotShareable("the attention mask is not left padding")
        fed = origin.read(arguments, self.sequences.starts, before)
        if before and fed.keys != self._keys_now():
            raise NotShareable("the new tokens are computed differently from those in the cache")
        return None if first and before else fed

    def _prompt(
        self,
        cache: FillableCache,
        model: nn.Module,
        arguments: dict[str, Any],
        fed: ForwardInputs,
        dense: bool,
        compute: Compute,
    ) -> Any:
        """Compute a prompt, or a part of one, less what is cached of all that is known so far."""
        sequences = self.sequences
        before = self.history.columns
        new = fed.tokens.tolist()
        tokens = new
        if self._tokens is not None:
            # Rows that were equal so far and differ now are more rows than before.
            known = self._tokens if len(self._tokens) == len(new) else self.history.read()
            tokens = [old + more for old, more in zip(known, new, strict=True)]
        starts = sequences.starts or [0] * len(tokens)
        columns = before + fed.tokens.shape[1]
        prompt = _Prompt(arguments, fed, tokens, before, columns)
        prompts = prompt.rows(starts, self.config.block_size)
        trust = identity_of(model).trust.get(self.state)
        prefix = None
        stops: list[int] = []
        reason = self._why_whole(model, arguments, dense)
        if reason is None:
            # A single token is a decoding step to many models: only under known masks is it computed as the
            # end of a prompt.
            most = columns - max(arguments["logits_to_keep"], 1 if trust == "masks" else 2)
            prefix = longest_prefix(sequences, prompts, most, verify=self.config.verify is not None)
            prefix = prefix if prefix is not None and prefix.columns > before else None
            if trust == "masks" and not cache.prompt_in_chunks:
                begin = before if prefix is None else prefix.columns
                stops = stops_of(sequences, self.config, prompts, begin, most)
        else:
            _note(sequences.memory, reason)
        if not before:
            self._keys = fed.keys
            self._given = prompt.form
        answer = None
        if trust is not None and (prefix is not None or stops):
            answer = self._rest(cache, model, prompt, prefix, stops, compute)
        if answer is None:
            answer = self._whole(cache, model, prompt, prefix, compute)
            prefix, stops = None, []
        self._feed(prompt, columns)
        self._tokens = tokens
        if any(not rows.group.layouts for rows in rows_of_states(self.sequences)):
            self.disable("the model keeps a state outside its cache")
        self._count(prompts, prefix, before, columns)
        if self._is_sound():
            begun = max([before if prefix is None else prefix.columns, *stops])
            worth = worth_a_state(self.config.state_every)
            self._name(model, tokens, fed.keys, snapshots=columns - begun >= worth)
        return answer

    def _whole(
        self,
        cache: FillableCache,
        model: nn.Module,
        prompt: _Prompt,
        prefix: Prefix | None,
        compute: Compute,
    ) -> Any:
        """Compute all of a prompt, and learn whether its cached prefix could have been left out.

        Attention that reads pages under masks of ours guarantees that a token's keys and values depend only
        on the tokens before it. A model with any other attention is tried once: a prefix that was found is
        computed again, before another end than it had, and so is what follows it, with and without it.
        """
        trust = identity_of(model).trust
        state = self.state
        if (
            prefix is None
            or state in trust
            or prefix.columns >= prompt.columns - max(prompt.arguments["logits_to_keep"], 2)
        ):
            answer = compute(prompt.arguments, True)
            if (
                state not in trust
                and self.disabled is None
                and all(layer.path == "paged" for layer in cache.own_layers)
                and (not rows_of_states(self.sequences) or goes_on(model))
            ):
                trust[state] = "masks"
            return answer
        mark = cache.mark()
        starts = self.sequences.starts
        with computed_again(self.sequences, prefix) as agrees:
            part = self._rest(cache, model, prompt, prefix, [], compute)
            if part is not None:
                self._return_to(cache, mark, starts)
            answer = compute(prompt.arguments, True)
            if part is not None and self.disabled is None:
                same = agrees() and tensors_agree(answer.logits[:, -1], part.logits[:, -1])
                trust[state] = "trial" if same else "none"
        if trust.get(state) == "none":
            self.disable("a chunk of a prompt is computed differently from the whole")
        return answer

    def _return_to(self, cache: FillableCache, mark: Any, starts: list[int] | None) -> None:
        """Undo a part of a prompt."""
        cache.roll_back(mark)
        self.sequences.begin_at(starts)

    def _why_whole(self, model: Any, arguments: Mapping[str, Any], dense: bool) -> str | None:
        """Why this part of a prompt must be computed whole, or None if its end suffices."""
        keep = arguments.get("logits_to_keep")
        if dense:
            return "hidden states or attentions are asked for"
        if not isinstance(keep, int) or keep < 1:
            return "all logits are asked for"
        if arguments.get("output_router_logits") or getattr(model.config, "output_router_logits", False):
            return "router logits are asked for"
        if not identity_of(model).answers_in_part:
            return "the model answers more than logits"
        if self.history.columns and any(rows.kind.releases for rows in self.sequences.rows.values()):
            return "a prompt in chunks under a window"
        if self.history.columns and rows_of_states(self.sequences):
            return "a prompt in chunks with recurrent states"
        return None

    def _rest(
        self,
        cache: FillableCache,
        model: nn.Module,
        prompt: _Prompt,
        prefix: Prefix | None,
        stops: list[int],
        compute: Compute,
    ) -> Any:
        """Let the rows begin with the prefix and compute the rest, in parts that end at the stops; None if
        the answer cannot replace the whole prompt's.
        """
        starts = self.sequences.starts
        mark = cache.mark()
        begin = prompt.before
        if prefix is not None:
            begin = prefix.columns
            begin_with(self.sequences, prefix, prompt.columns - begin)
            cache.begin_at(begin)
        try:
            for stop in stops:
                compute(prompt.part(begin, stop), False)
                self._feed(prompt, stop)
                if self._is_sound():
                    self._name(model, [row[:stop] for row in prompt.tokens], prompt.fed.keys)
                begin = stop
            answer = compute(prompt.part(begin, prompt.columns), False)
        except BaseException:
            self.history.crop(self.history.columns - prompt.before)
            raise
        short = not isinstance(answer, ModelOutput) or not ANSWERS.issuperset(
            name for name in answer if answer[name] is not None
        )
        if not short and not self._monitor.changed:
            return answer
        # The answer ought to be longer, or the cached part was computed without the hook: all of it, as if
        # nothing had been found.
        identity_of(model).answers_in_part &= not short
        self.history.crop(self.history.columns - prompt.before)
        self._return_to(cache, mark, starts)
        return None

    def _count(self, prompts: list[Prompt], prefix: Prefix | None, before: int, columns: int) -> None:
        """Count hits and misses."""
        counts = self.sequences.memory.counts
        reached = before if prefix is None else prefix.columns
        count_hits(self.sequences, prompts, prefix)
        for start in self.sequences.starts or [0] * len(prompts):
            counts["reused"] += max(0, reached - max(start, before))
            counts["computed"] += max(0, columns - max(start, reached))


def _names(snapshot: ModelSnapshot, active: tuple[str, ...]) -> set[str]:
    """The adapters that rows of the running call may have, if adapters are apart from the model."""
    named = [hook for module in snapshot.hooked for hook in module._forward_pre_hooks.values()]
    names = {*active, *(name for hook in named for name in adapter_names_of(hook) or ())}
    return names & set(snapshot.lora.names) if snapshot.lora.apart else set()


def _note(memory: Memory, reason: str) -> None:
    """Count a prompt that no other call shares; the log names each reason once a model."""
    memory.reasons[reason] += 1
    if memory.reasons[reason] == 1:
        logger.warning(
            "prefix_caching does not share this prompt: %s; hf_paged.stats(model) counts these", reason
        )
