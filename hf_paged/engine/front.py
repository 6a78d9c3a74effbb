"""The side of an engine that callers see: requests come in, from any thread, and whoever waits for them is served."""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self, Unpack

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from ..blocks import extra_key
from ..scheduling import Infeasible, Request
from .asking import read
from .background import Background
from .custody import Custody, Spoiled
from .encoding import Source
from .handle import Handle
from .job import Job
from .keywords import GenerateKeywords, RequestKeywords, spell_out
from .media import Media
from .options import Options
from .output import FinishReason, Increment, Output
from .prompts import words_of
from .turns import Turns

LONG_WORK = 3.0
"""Seconds after which `generate` shows a bar."""


class Front(ABC):
    """What callers say to an engine.

    It owns the inbox and the thread, if there is one. The books and the steps are the engine's, under its lock; submitting does not
    wait for that where a thread drives.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        words = words_of(tokenizer)
        if words is not None and not callable(getattr(words, "decode", None)):
            raise TypeError(
                f"a tokenizer has decode(), got {type(tokenizer).__name__}; give options by name, and no tokenizer if there is none"
            )
        self.model, self.processor, self.tokenizer = model, tokenizer, words
        self._lock = Turns()
        self._closed = self._closing = self._paused = self._stepping = False
        self._numbers = itertools.count()
        self._inbox: deque[tuple[Job, Request]] = deque()
        """Requests that the books do not know yet."""
        self._thread: Background | None = None
        self._starting = threading.Lock()
        self._options = Options()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an engine lives in its model's pools and cannot be pickled or copied; make another one for the other model")

    # ---- requests

    def submit(
        self,
        prompt: Any = None,
        generation_config: Any = None,
        *,
        inputs_embeds: torch.Tensor | None = None,
        seed: int | None = None,
        logprobs: int | bool | None = None,
        priority: int = 0,
        salt: str | bytes | None = None,
        **generate_keywords: Unpack[GenerateKeywords],
    ) -> Handle:
        """Queue a request and answer with its handle; nothing is computed yet.

        prompt: a text or chat messages (with a tokenizer), or token ids. inputs_embeds: what the model shall take for the embeddings
        of the prompt, [tokens, hidden] or [1, tokens, hidden]; processors see the prompt's ids, if there are any. Of an encoder-decoder
        the prompt is the encoder's, or input_features=... is, and decoder_input_ids=... what its decoder begins with. generation_config
        and keywords: as generate() takes them, logits_processor, stopping_criteria and prefix_allowed_tokens_fn among them. seed: of
        its draws. logprobs: True, or how many of the model's favourites are reported beside each token's own. priority: higher is
        sooner, under policy="priority". salt: requests share their prefixes only with requests of the same salt.

        An option that the engine does not honour raises ValueError here. A request that could never fit comes back at once with
        finish_reason "refused" and the numbers in its error.
        """
        keywords = {**generate_keywords, "inputs_embeds": inputs_embeds}
        asked = read(self.model, self.processor, prompt, generation_config, keywords, seed, logprobs, self._options)
        self._require_open()
        if asked.embeds is not None or asked.media is not None:
            self._require_vectors(asked.media)
        job = Job(asked, None, self.tokenizer)
        source = 0 if asked.source is None else self._source_length(asked.source)
        extra = extra_key(salt)
        request = Request(next(self._numbers), asked.prompt, asked.max_length, asked.width, priority, extra, source, asked.steady)
        reason = self._why_never(request)
        if reason is not None:
            job.close("refused", Infeasible(reason))
            return Handle(job, self)
        job.number = request.number
        self._inbox.append((job, request))
        thread = self._thread
        if thread is None or self._closed:  # an engine that was closed meanwhile ends it
            with self._lock:
                self._take_in()
        else:
            thread.wake()
        return Handle(job, self)

    def generate(
        self,
        prompts: Iterable[Any],
        generation_config: Any = None,
        *,
        progress: bool | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """The outputs of all prompts under the same options, in their order. A bar shows after a while, or as `progress` says."""
        handles: list[Handle] = []
        try:
            for prompt in _each(prompts):
                handles.append(self.submit(prompt, generation_config, **keywords))
            with tqdm(total=len(handles), unit="request", delay=0 if progress else LONG_WORK, disable=progress is False) as bar:

                def show() -> None:
                    bar.update(sum(each.done for each in handles) - bar.n)

                self._drive([handle._job for handle in handles], lambda: False, ended=show)
                for handle in handles:
                    if not handle.done:  # a thread drives
                        handle.result()
                        show()
                show()
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return [handle.result() for handle in handles]

    def stream(
        self,
        prompt: Any,
        generation_config: Any = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Iterator[Increment]:
        """The increments of one request. Whoever stops listening ends it."""
        handle = self.submit(prompt, generation_config, **keywords)
        try:
            yield from handle
        finally:
            handle.cancel()

    async def agenerate(
        self,
        prompts: Iterable[Any],
        generation_config: Any = None,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """`generate` for coroutines: the event loop goes on meanwhile, and a task that is cancelled ends its requests."""
        handles: list[Handle] = []
        try:
            for prompt in _each(prompts):
                handles.append(self.submit(prompt, generation_config, **keywords))
            return [await handle for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    async def astream(
        self,
        prompt: Any,
        generation_config: Any = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncIterator[Increment]:
        """`stream` for coroutines."""
        handle = self.submit(prompt, generation_config, **keywords)
        try:
            async for increment in handle:
                yield increment
        finally:
            handle.cancel()

    # ---- who drives

    def start(self) -> Self:
        """Let a thread drive the engine from now on: requests are computed whether anybody waits or not, and submitting is prompt.

        What a step raises reaches everybody who waits and ends the thread; calling this again goes on. `stop()` and `close()` end it,
        and so does the end of the process. Awaiting a handle calls it, too.
        """
        self._require_open()
        with self._starting:
            if self._thread is None or self._thread.over:
                self._thread = Background(self, self.model.device)
            self._thread.wake()
        return self

    def stop(self) -> None:
        """Drive no more by a thread: the step that runs comes to its end. Requests stay, and whoever waits for one drives."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(wait=not self._lock.mine)
            with self._lock:
                if not self._stepping:
                    self._sweep()
                with suppress(Spoiled):  # those whom it concerns have ended
                    self._let_go()

    def _turn(self) -> bool:
        """A step, if there is anything to do; the answer is whether there may be more. The engine's thread calls it."""
        with self._lock:
            if self._closed:
                return False
            self._take_in()
            if self._paused:
                self._sweep()
            if self._paused or not self._busy:
                self._let_go()
                return False
            try:
                self._advance()
            except BaseException:
                with suppress(Spoiled):
                    self._let_go()
                raise
            return True

    def _drive_for(self, job: Job, each: bool = False, timeout: float | None = None) -> None:
        """Take everybody's steps until a job has ended, or has `each` increment, or the time is over; or wait for what the thread makes
        of it. Handles call it."""
        end = None if timeout is None else time.monotonic() + timeout
        self._drive([job], lambda: (each and bool(job.news)) or (end is not None and time.monotonic() >= end))
        thread = self._thread
        if thread is not None and job.output is None:
            thread.wait(job, each, None if end is None else end - time.monotonic())

    def _drive(self, jobs: list[Job], enough: Callable[[], bool], ended: Callable[[], object] = lambda: None) -> None:
        """Take steps until all jobs have ended, or it is enough, or a thread does it; `ended` is told of steps in which anybody has."""
        if self._others_drive:
            return
        with self._driving():
            for job in jobs:
                while job.output is None and not self._others_drive:
                    with self._lock:
                        if job.output is None and self._advance():
                            ended()
                    if enough():
                        return

    @property
    def _others_drive(self) -> bool:
        """Whether there is a thread that drives, and it is not the one that asks."""
        thread = self._thread
        return thread is not None and not thread.own

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Whoever drives has done anything before this, and will do anything after it."""
        self._custody.lend()
        try:
            yield
        except BaseException:
            with suppress(Spoiled):
                self._let_go()
            raise
        self._let_go()

    async def _arrival(self, job: Job, each: bool = False) -> None:
        """Wait for the end of a job, or for `each` increment, without holding up the event loop. Handles call it."""
        thread = self._thread or self.start()._thread
        if thread is None or thread.own:
            raise RuntimeError("nobody can wait for a request from within a step of its engine")
        await thread.arrival(job, each)
        if thread.over and job.output is None:
            raise RuntimeError("the engine's thread was stopped while somebody awaited a request; start() goes on")

    def _cancel(self, job: Job) -> None:
        """End a job at once; where a thread drives, after the step that runs. Handles call it."""
        if job.output is not None:
            return
        job.cancelled = True
        thread = self._thread
        if thread is not None and not thread.over:
            thread.wake()  # nothing else: a coroutine that nobody holds any more calls this in the middle of anything
            return
        with self._lock:
            self._take_in()
            if job.output is None and not self._stepping:  # else it is in the middle of a step, and ends with the next one
                self._end(job, "abort")

    # ---- what the engine behind it does

    _custody: Custody

    @abstractmethod
    def _advance(self) -> list[Output]:
        """One step of everybody's, in a row of them."""

    @abstractmethod
    def _let_go(self) -> None:
        """The row of steps is over: raise Spoiled if somebody has changed the weights meanwhile."""

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """Whether there is anything for a step to do."""

    @abstractmethod
    def _why_never(self, request: Request) -> str | None:
        """Why a request can never be computed, or None if it can. Asked without the lock."""

    @abstractmethod
    def _source_length(self, source: Source) -> int:
        """How many tokens the encoder makes of an input."""

    @abstractmethod
    def _require_vectors(self, media: Media | None) -> None:
        """Raise unless the model takes embeddings for token ids, and what is shown in the place of some."""

    @abstractmethod
    def _take_in(self) -> None:
        """Enter what is in the inbox; in the middle of a step it stays there."""

    @abstractmethod
    def _sweep(self) -> list[Output]:
        """End whoever was cancelled."""

    @abstractmethod
    def _end(self, job: Job, reason: FinishReason) -> Output:
        """End a job."""

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")


for _method in (Front.submit, Front.generate, Front.stream, Front.agenerate, Front.astream):
    spell_out(_method, RequestKeywords, {"priority": 0})


def _each(prompts: Iterable[Any]) -> list[Any]:
    """A list of prompts; a single one would be taken apart."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"generate() takes a list of prompts, got {type(prompts).__name__}; for one of them write engine.generate([prompt])"
        )
    return list(prompts)
