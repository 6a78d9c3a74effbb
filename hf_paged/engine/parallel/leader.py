"""Rank 0 of a tensor-parallel engine: what its runner and its pools do, all ranks do."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...blocks import OutOfBlocks
from ...model.adapters.virtual import GivenPast
from ...model.parts import Part, Parts
from ...scheduling import AdapterNames, SequenceGroup, StepPlan
from ..multimodal.cross import CrossMedia
from ..multimodal.media import Media
from ..worker.executor import EngineParts
from ..worker.forward_batch import Answer, ForwardBatch
from .joining import compare_models, sum_norms_of
from .message import AdapterNews, MessageKind, Preparation, StepEncoder, write_checks
from .packed import Packed
from .prompt_inputs import SharedInputs, on_host
from .ranked import Ranked


class Leader(Ranked):
    """Gives every forward to the other ranks before it is computed here, with what the pools do before it.

    One message a forward: the scheduler, the sampler and the code of requests know nothing of it.
    """

    def begin(self, parts: EngineParts) -> None:
        self.runner = parts.runner
        self.pools = pools = parts.runner.eager.pools
        self._adapters = parts.adapters
        self._adapter_changes = 0
        self._places: dict[int, AdapterNames] = {}
        """The slots that the other ranks know of."""
        self._numbers: set[int] = set()
        """The adapters that they were given."""
        self._untold: dict[int, tuple[str, Parts]] = {}
        """Those that came while they did not follow."""
        self._last_tokens = parts.last_tokens
        self._inputs = SharedInputs(parts.requests)
        self._encoder = StepEncoder(self._inputs, pools)
        self._preparations: list[Preparation] = []
        self._backed = [group.backed for group in pools.groups.values()]
        """How many first blocks of every pool have memory on all ranks."""
        self._unmade = True
        """True while a rank may lack the memory of a pool altogether."""
        me = weakref.ref(self)  # pools stay with their model, which a leader must not keep
        self._adapters.slots.bring = partial(_bring, me)
        for number, group in enumerate(pools.groups.values()):
            if group.host is not None:
                group.host.grown = partial(_reserve_host, me, number)

    def expect(self, groups: list[SequenceGroup]) -> None:
        """Nothing: ranks' pools move together."""

    def capture_ahead(self, sequences: int) -> None:
        """Nothing: ranks capture together."""

    def prepare(self, plan: StepPlan) -> None:
        """Have memory for a plan on all ranks, or raise OutOfBlocks. What the pools do for it goes out with
        the next forward, in this order.
        """
        tops = self._tops()
        if any(top > backed for top, backed in zip(tops, self._backed, strict=True)):
            self._reserve(tops)
        checks = self.pools.checks.take()
        if plan.swaps or any(plan.copies) or checks:
            self._preparations.append(Preparation(plan.swaps, plan.copies, checks))
        self.pools.prepare(plan, checks)

    def seal(self) -> None:
        checks = self.pools.checks.take_fresh()
        if checks:
            numbers = array("i", [MessageKind.SEAL])
            write_checks(numbers, checks, len(self.pools.groups))
            with self.ranks.together():
                self.ranks.send(numbers)
                self.pools.checks.carry_out(checks)

    def forget(self) -> None:
        """A step broke off: no request keeps what was prepared for it."""
        self._preparations = []

    def run(self, batch: ForwardBatch) -> Answer:
        """Compute a batch on all ranks: rank 0's answer."""
        for given in self._inputs.missing(batch):
            packed = Packed(on_host(given))
            with self.ranks.together():
                self.ranks.send(array("i", [MessageKind.INPUTS, self._inputs.add(given)]))
                try:
                    self._send_inputs(packed)
                except MemoryError:  # of any rank: some have it, and the next step says that none needs it
                    self._inputs.lose(given)
                    raise
        self._reserve_first()
        with self.ranks.together():
            numbers, shares = self._encoder.encode(
                batch, self._preparations, not self.runner.eager.checks.unseen, self._news()
            )
            self.ranks.send(array("i", [MessageKind.STEP]) + numbers)
            self._preparations = []
            if shares:
                self.ranks.broadcast_on_device(self._last_tokens.tokens)
            self.pools.checks.launch(self.ranks.least_on_device)
            return self.runner.run(batch)

    def warm_up(self) -> int:
        """Capture a step on all ranks."""
        self._reserve_first()
        with self.ranks.together():
            self.ranks.send(array("i", [MessageKind.WARM_UP]))
            return self.runner.warm_up()

    def _reserve_first(self) -> None:
        """Have memory for the pools on all ranks."""
        if self._unmade or not all(group.stores for group in self.pools.own.values()):
            self._reserve(self._tops())

    def _tops(self) -> list[int]:
        """How many first blocks of every pool were handed out."""
        return [group.pool.top for group in self.pools.groups.values()]

    def _reserve(self, tops: Sequence[int]) -> None:
        """Have memory for so many first blocks of every pool on all ranks. What lacks it on one raises
        OutOfBlocks on all: no rank is in the middle of a forward.
        """
        anew = self._unmade
        self._unmade = True
        with self.ranks.together():
            self.ranks.send(array("i", [MessageKind.RESERVE, *tops]))
            self.ranks.attempt(lambda: self.pools.back(tops), OutOfBlocks)
            self._backed = self.ranks.smallest([group.backed for group in self.pools.groups.values()])
        for number, group in enumerate(self.pools.groups.values()):
            if anew and group.host is not None and group.host.pool.total:
                self.reserve_host(number, group.host.pool.total)
        self._unmade = False

    def reserve_host(self, number: int, blocks: int) -> None:
        """A pool has memory for so many blocks on this host: have it on all."""
        with self.ranks.together():
            self.ranks.send(array("i", [MessageKind.RESERVE_HOST, number, blocks]))
            self.ranks.attempt(lambda: None, OutOfBlocks)

    def encode_media(self, media: Media, group: SequenceGroup) -> None:
        """Encode a request's pictures or recordings on all ranks, each of which keeps the embeddings."""
        names = group.request.first_adapter
        packed = Packed(on_host(media))
        with self.ranks.together():
            message = array("i", [MessageKind.ENCODE, self._inputs.add(media)])
            self._news().write(message)
            numbers = self._adapters.numbered() if names else {}
            message.extend([numbers[name] for name in names])
            self.ranks.send(message)
            self._send_inputs(packed)
            self.runner.encode_media(media, names)

    def _send_inputs(self, packed: Packed) -> None:
        self.ranks.broadcast_object(packed)
        self.ranks.attempt(lambda: None, MemoryError)  # all of them have read it, which takes time

    def bring_adapters(self, names: AdapterNames, slot: int, bring: Callable[[], None]) -> None:
        """Bring adapters into a slot on all ranks. Raises MemoryError if any has no memory for them."""
        with self.ranks.together():
            news = self._news()
            message = array("i", [MessageKind.PLACE, slot])
            news._replace(places=tuple([each for each in news.places if each[0] != slot])).write(message)
            numbers = self._adapters.numbered()
            message.extend([numbers[name] for name in names])
            self.ranks.send(message)
            try:
                self.ranks.attempt(bring, MemoryError)
            except BaseException:
                self._places.pop(slot, None)
                raise

    def _news(self) -> AdapterNews:
        """The news of adapters that the other ranks do not have."""
        if self._adapter_changes == self._adapters.changes:
            return AdapterNews()
        self._adapter_changes = self._adapters.changes
        gone = self._numbers.difference(self._adapters.numbers.values())
        self._numbers -= gone
        before = self._places
        self._places = self._adapters.places()
        numbers = self._adapters.numbered()
        places = [
            (slot, tuple([numbers[name] for name in held]))
            for slot, held in self._places.items()
            if before.get(slot) != held
        ]
        return AdapterNews(tuple(gone), tuple(places))

    def add_adapter(self, name: str, layers: Parts, paused: bool) -> None:
        """Give an adapter that requests may name to all ranks, each of which keeps its part; in a pause, as
        soon as the others follow.
        """
        on_host = {path: tuple(map(_on_host, parts)) for path, parts in layers.items()}
        self._untold[self._adapters.numbers[name]] = name, on_host
        if not paused:
            self._give_adapters()

    def _give_adapters(self) -> None:
        for number in list(self._untold):
            name, layers = self._untold.pop(number)
            if self._adapters.numbers.get(name) != number:
                continue  # it was removed before anything needed it
            try:
                self._give_adapter(name, number, layers)
            except Exception:  # a rank has no memory for it: no rank keeps it
                self._adapters.remove(name)
                raise

    def _give_adapter(self, name: str, number: int, layers: Parts) -> None:
        packed = Packed((name, number, layers))
        with self.ranks.together():
            message = array("i", [MessageKind.ADAPTER])
            self._news().write(message)
            self.ranks.send(message)
            self.ranks.broadcast_object(packed)
            self._numbers.add(number)
            self.ranks.attempt(lambda: None, MemoryError)  # all of them have it
            sum_norms_of(self._adapters, [name])

    def wait(self, wait: Callable[[], bool]) -> bool:
        """Wait for tokens, which wait for all ranks: what the failure of one leaves in them is never read."""
        with self.ranks.together(everyone=False):
            return wait()

    def wait_whole(self, wait: Callable[[], bool]) -> bool:
        with self.ranks.together(everyone=False):
            answer = wait()
            if self._last_tokens.tokens.is_cuda:
                torch.cuda.current_stream(self._last_tokens.tokens.device).synchronize()
            return answer

    def changed(self, look: Callable[[], bool]) -> bool:
        self._give_adapters()
        with self.ranks.together():
            self.ranks.send(array("i", [MessageKind.CHECK]))
            changed = compare_models(self.ranks, look(), self.runner, self._adapters)
            if changed:
                sum_norms_of(self._adapters)
        self._unmade |= changed  # a rank may have given its pools back
        return changed

    def broadcast(self, value: Any) -> None:
        """Send a value to the callers of the other ranks' `follow()`."""
        self.require_between_forwards("broadcast()")
        packed = Packed(value)
        with self.ranks.together():
            self.ranks.send(array("i", [MessageKind.BROADCAST]))
            self.ranks.broadcast_object(packed)

    def require_media(self, media: object) -> None:
        refused = {CrossMedia: "images for cross-attention layers", GivenPast: "prefix tuning and Cartridge"}
        what = refused.get(type(media))
        if what is not None:
            raise ValueError(f"a tensor-parallel engine takes no {what}; use generate()")

    def require_between_forwards(self, call: str) -> None:
        if self.ranks.meeting:
            raise RuntimeError(
                f"the ranks are in the middle of a forward: a signal handler must not call {call} now; note "
                "there what to do and do it between two steps"
            )

    def pause(self) -> None:
        """Let the other ranks' `follow()` return: their models may change."""
        with self.ranks.together(everyone=False):
            self.ranks.send(array("i", [MessageKind.PAUSE]))

    def close(self) -> None:
        """Let the other ranks' `follow()` return for good, or raise the error that rank 0 ends with."""
        self.ranks.announce_end(array("i", [MessageKind.CLOSE]))


def _reserve_host(leader: weakref.ref[Leader], number: int, blocks: int) -> None:
    """A pool of a leader that may be gone has memory for so many blocks on this host."""
    leads = leader()
    if leads is not None:
        leads.reserve_host(number, blocks)


def _bring(leader: weakref.ref[Leader], names: AdapterNames, slot: int, bring: Callable[[], None]) -> None:
    """Bring adapters into a slot on all ranks of a leader that may be gone."""
    leads = leader()
    if leads is None:
        bring()
    else:
        leads.bring_adapters(names, slot, bring)


def _on_host(part: Part) -> Part:
    """A part with weights that can be sent, without what lies beside them in memory."""
    return part.mapped(lambda each: each.detach().cpu().clone())
