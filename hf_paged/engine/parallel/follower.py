"""The other ranks of a tensor-parallel engine: they compute what rank 0 schedules, and decide nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...blocks import OutOfBlocks
from ..multimodal import PromptInputs
from ..multimodal.media import Media
from ..requests.prompts import known_ids
from ..worker.executor import EngineParts, use_device
from .joining import compare_models, sum_norms_of
from .message import AdapterNews, MessageKind, Received, StepDecoder, read_checks
from .prompt_inputs import on_device
from .ranked import Ranked
from .ranks import RankError

logger = logging.getLogger("hf_paged")


class Follower(Ranked):
    """Carries out rank 0's messages with the runner and the pools that rank 0 has, too.

    The pools have no books here: one block is held for as long as this follows, so that no layout changes
    and no memory goes, and blocks are what rank 0 says they are.
    """

    leads = False

    def begin(self, parts: EngineParts) -> None:
        self.runner = parts.runner
        self.pools = parts.runner.eager.pools
        self._adapters = parts.adapters
        self._model_check = parts.model_check
        self._last_tokens = parts.last_tokens
        model: Any = parts.runner.eager.model
        self._reader = model.get_decoder() if model.config.is_encoder_decoder else model
        self._decoder = StepDecoder(self.pools, parts.last_tokens)
        for group in self.pools.groups.values():
            group.pool.sealed = None  # rank 0 has these books, too
        self._held: list[int] = []
        self._given_back: int | None = None
        """How often pools had been given back when rank 0 paused."""

    def require_lead(self) -> None:
        raise RuntimeError(
            f"this is rank {self.ranks.rank} of a tensor-parallel engine; requests and adapters go to "
            "rank 0; call engine.follow() here"
        )

    def require_follower(self) -> None:
        """Nothing: this one follows."""

    def close(self) -> None:
        self.free()

    def _hold(self) -> None:
        self._held = self._held or [group.pool.take() for group in self.pools.groups.values()]

    def free(self) -> None:
        """Hold nothing any more. Twice is once."""
        for group, block in zip(self.pools.groups.values(), self._held, strict=False):
            group.pool.drop(block, group.pool.tick())
        self._held = []

    def _times_given_back(self) -> int:
        return sum(group.times_given_back for group in self.pools.groups.values())

    def follow(self, receive: Callable[[Any], object]) -> bool:
        """Follow rank 0 until it pauses (True) or has closed (False). Raises what ended it, if anything."""
        use_device(self.runner.eager.device)
        self._hold()
        try:
            return self._follow(receive)
        except RankError:
            raise
        except BaseException as error:  # an interrupt, with which rank 0 would wait for this rank
            self.ranks.fail(error)
            raise

    def _follow(self, receive: Callable[[Any], object]) -> bool:
        while True:
            numbers = self._next()
            kind = MessageKind(numbers[0])
            if kind is MessageKind.PAUSE:
                self.free()
                self._given_back = self._times_given_back()
                return True
            if kind is MessageKind.CLOSE:
                self._decoder.prompts.clear()
                words = "".join(map(chr, numbers[1:]))
                if words:
                    self.ranks.reason = words
                    raise RankError(words)
                return False  # in order; its process may be gone
            try:
                with self.ranks.together():
                    if kind is MessageKind.CHECK:
                        self._check()
                    elif kind is MessageKind.ADAPTER:
                        self._add_adapter(AdapterNews.read(iter(numbers[1:])))
                    elif kind is MessageKind.PLACE:
                        self._bring_adapters(numbers[1:])
                    elif kind is MessageKind.INPUTS:
                        self._take_inputs(numbers[1])
                    elif kind is MessageKind.ENCODE:
                        self._encode(numbers[1:])
                    elif kind is MessageKind.RESERVE:
                        self._reserve(numbers[1:])
                    elif kind is MessageKind.RESERVE_HOST:
                        self.ranks.attempt(partial(self._reserve_host, *numbers[1:]), OutOfBlocks)
                    elif kind is MessageKind.WARM_UP:
                        self.runner.warm_up()
                    elif kind is MessageKind.SEAL:
                        self.pools.checks.carry_out(read_checks(iter(numbers[1:]), len(self.pools.groups)))
                    elif kind is MessageKind.BROADCAST:
                        receive(self.ranks.broadcast_object())
                    else:
                        self._carry_out(self._decoder.decode(numbers[1:]))
            except RankError:
                raise
            except Exception as error:  # of all ranks, of which rank 0 decides what follows
                logger.info("a forward failed on all ranks: %s: %s", type(error).__name__, error)

    def _next(self) -> list[int]:
        """Rank 0's next message, however late: the last one if it has closed."""
        self.ranks.require_whole()
        ended = self.ranks.ended()
        if ended is None:
            try:
                return self.ranks.receive()
            except RuntimeError as error:
                ended = self.ranks.ended()
                if ended is None:
                    raise self.ranks.lost(0) from error
        return [MessageKind.CLOSE, *map(ord, ended)]

    def _check(self) -> None:
        """No request runs: check the model, and know of the other ranks whether theirs has changed."""
        changed = self._adapters.look_as_follower() | self._model_check.changed()
        # What rank 0 has cached is gone where a pool was given back in a pause.
        changed |= self._given_back not in (None, self._times_given_back())
        self._given_back = None
        if not compare_models(self.ranks, changed, self.runner, self._adapters):
            return
        sum_norms_of(self._adapters)
        self.free()
        self.pools.forget()
        self._hold()
        self.runner.check_captures()

    def _add_adapter(self, news: AdapterNews) -> None:
        """Take this rank's part of an adapter that rank 0 was given."""
        self._note(news)
        name, number, layers = self.ranks.broadcast_object()
        self.ranks.attempt(lambda: self._adapters.add(name, self._adapters.hold(layers), number), MemoryError)
        sum_norms_of(self._adapters, [name])

    def _bring_adapters(self, numbers: Sequence[int]) -> None:
        """Have adapters in a slot, if all ranks have memory for them."""
        read = iter(numbers)
        slot = next(read)
        self._note(AdapterNews.read(read))
        known = {number: name for name, number in self._adapters.numbered().items()}
        names = tuple([known[number] for number in read])
        try:
            self.ranks.attempt(lambda: self._adapters.place(slot, names), MemoryError)
        except BaseException:
            self._adapters.free(names)
            raise

    def _take_inputs(self, number: int) -> PromptInputs:
        """Take a request's inputs beside token ids: rows name it by its number."""
        sent = self.ranks.broadcast_object()

        def take() -> None:
            self._decoder.prompts[number] = on_device(sent, self.runner.eager.device)

        self.ranks.attempt(take, MemoryError)
        return self._decoder.prompts[number]

    def _encode(self, numbers: Sequence[int]) -> None:
        """Encode pictures or recordings, with the adapters of their request."""
        read = iter(numbers)
        number = next(read)
        self._note(AdapterNews.read(read))
        names = {number: name for name, number in self._adapters.numbered().items()}
        media = self._take_inputs(number)
        assert isinstance(media, Media)
        self.runner.encode_media(media, tuple([names[number] for number in read]))
        media.inputs = {}

    def _note(self, news: AdapterNews) -> None:
        names = {number: name for name, number in self._adapters.numbered().items()} if any(news) else {}
        for number in news.gone:
            if number in names:  # else this rank had no memory for it
                self._adapters.remove(names[number])
        for slot, numbers in news.places:
            self._adapters.place(slot, tuple([names[number] for number in numbers]))

    def _carry_out(self, received: Received) -> None:
        checks = self.runner.eager.checks
        if received.checks:
            self._model_check.require_untouched(len(received.batch.rows))
            if self._model_check.adapters_moved:
                self._model_check.adapters_moved = False
                self._adapters.follow_model()
        else:
            checks.skip(self._model_check.memory, decided=True)
        for preparation in received.preparations:
            self.pools.prepare(preparation.plan, preparation.checks)
        if received.shares:
            self.ranks.broadcast_on_device(self._last_tokens.tokens)
            # Broken off, it leaves any numbers, and an id without an embedding would end this process.
            known = known_ids(self._reader)
            self._last_tokens.tokens.clamp_(0, None if known is None else known - 1)
        self._note(received.news)
        self.pools.checks.launch(self.ranks.least_on_device, read=False)
        self.runner.run(received.batch)

    def _reserve(self, tops: Sequence[int]) -> None:
        """Have memory for the first blocks of every pool, as all ranks do."""
        self.ranks.attempt(lambda: self.pools.back(tops), OutOfBlocks)
        self.ranks.smallest([group.backed for group in self.pools.groups.values()])

    def _reserve_host(self, number: int, blocks: int) -> None:
        """Have memory for so many blocks that rank 0 may put on the host."""
        group = list(self.pools.groups.values())[number]
        if group.host is None or not group.host.reserve(blocks):
            raise OutOfBlocks(
                f"this rank's host has too little memory for {blocks} swapped blocks of the "
                f"{group.kind.name} layers; lower host_blocks"
            )
