"""The side of an engine that callers see: requests come in, from any thread, and whoever waits for them is
served.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar, Unpack

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from ..blocks import check_salt, extra_key
from ..kv import fork_safe_lock
from ..model.offloaded import input_device
from ..scheduling import Infeasible, Request
from .background import Background
from .check_policy import CheckPolicy, WeightsChanged
from .fair_lock import FairLock, in_turn
from .job import Job
from .multimodal.media import Media
from .outputs.handle import Handle
from .outputs.output import Increment, Output, with_errors_noticed
from .outputs.queue import Wake
from .requests.keywords import GenerateKeywords, RequestKeywords, spell_out
from .requests.options import Options
from .requests.params import RequestParams, read
from .requests.prompts import words_of

T = TypeVar("T")
LONG_WORK = 3.0
"""Seconds after which `generate` shows a bar."""


class Front(ABC):
    """What callers say to an engine.

    It owns the inbox and the thread, if there is one. The books and the steps are the engine's, under its
    lock; submitting does not wait for that where a thread drives.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        words = words_of(tokenizer)
        if words is not None and not callable(getattr(words, "decode", None)):
            raise TypeError(
                f"a tokenizer has decode(), got {type(tokenizer).__name__}; give options by name, and no "
                "tokenizer if there is none"
            )
        self.model, self.processor, self.tokenizer = model, tokenizer, words
        self._lock = FairLock()
        self._closed = self._closing = self._paused = False
        self._stepping = False
        """Whether a step or another change of the books runs. What comes in between (criteria, signal
        handlers) changes none of them.
        """
        self._torn = False
        """Whether a change of the books has begun that has not come to its end."""
        self._numbers = itertools.count()
        self._inbox: deque[tuple[Job, Request]] = deque()
        """Requests that the books do not know yet."""
        self._thread: Background | None = None
        self._starting = fork_safe_lock()
        self._options = Options()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an engine lives in its model's pools and cannot be pickled or copied; make another one for the "
            "other model"
        )

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
        salt: str | None = None,
        **generate_keywords: Unpack[GenerateKeywords],
    ) -> Handle:
        """Queue a request and answer with its handle; nothing is computed yet.

        prompt: a text or chat messages (with a tokenizer), or token ids. inputs_embeds: what the model shall
        take for the embeddings of the prompt, [tokens, hidden] or [1, tokens, hidden]; processors see the
        prompt's ids, if there are any. Of an encoder-decoder the prompt is the encoder's, or
        input_features=... is, and decoder_input_ids=... what its decoder begins with. generation_config and
        keywords: as generate() takes them, logits_processor, stopping_criteria and prefix_allowed_tokens_fn
        among them. seed: of its draws. logprobs: True, or how many of the model's favourites are reported
        beside each token's own. priority: higher is sooner, under policy="priority". salt: requests share
        their prefixes only with requests of the same salt.

        An option that the engine does not honour raises ValueError here. A request that could never fit comes
        back at once with finish_reason "refused" and the numbers in its error.
        """
        keywords = {**generate_keywords, "inputs_embeds": inputs_embeds}
        asked = read(
            self.model, self.processor, prompt, generation_config, keywords, seed, logprobs, self._options
        )
        self._require_open()
        if asked.embeds is not None or asked.media is not None:
            self._require_vectors(asked.media)
        job = Job(asked, None, self.tokenizer)
        extra = extra_key(None if salt is None else check_salt(salt))
        request = Request(
            next(self._numbers),
            asked.prompt,
            asked.max_length,
            asked.width,
            priority,
            extra,
            self._source_length(asked),
            asked.steady,
            asked.source_key,
        )
        reason = self._why_never(request)
        if reason is not None:
            job.close("refused", Infeasible(reason))
            return Handle(job, self)
        job.number = request.number
        self._inbox.append((job, request))
        thread = self._thread
        if thread is None or self._closed:  # an engine that was closed meanwhile ends it
            self._receive()
        else:
            thread.wake()
        return Handle(job, self)

    def generate(
        self,
        prompts: Iterable[Any],
        generation_config: Any = None,
        *,
        progress: bool | None = None,
        strict: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """The outputs of all prompts under the same options, in their order. A bar shows after a while, or as
        `progress` says.

        A warning counts the requests that were refused or failed. With `strict` the error of one is raised
        instead: of a refused one before anything is computed, of a failed one at the end.
        """
        handles: list[Handle] = []
        try:
            for prompt in _each(prompts):
                handles.append(self.submit(prompt, generation_config, **keywords))
                _require_accepted(handles[-1], strict)
            with tqdm(
                total=len(handles),
                unit="request",
                delay=0 if progress else LONG_WORK,
                disable=progress is False,
            ) as bar:

                def show() -> None:
                    bar.update(sum(each.done for each in handles) - bar.n)

                self._drive([handle._job for handle in handles], lambda: False, ended=show)
                for handle in handles:
                    if not handle.done:  # a thread drives
                        handle.result()
                        show()
                show()
        except BaseException:
            _give_up(handles)
            raise
        return with_errors_noticed([handle.result() for handle in handles], strict)

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
        *,
        strict: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> list[Output]:
        """`generate` for coroutines: the event loop goes on meanwhile, and a task that is cancelled ends its
        requests.
        """
        handles: list[Handle] = []
        try:
            for prompt in _each(prompts):
                handles.append(self.submit(prompt, generation_config, **keywords))
                _require_accepted(handles[-1], strict)
            return with_errors_noticed([await handle for handle in handles], strict)
        except BaseException:
            _give_up(handles)
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
        """Let a thread drive the engine from now on: requests are computed whether anybody waits or not, and
        submitting is prompt.

        What a step raises reaches everybody who waits and ends the thread; calling this again goes on.
        `stop()` and `close()` end it, and so does the end of the process. Awaiting a handle calls it, too.
        """
        self._require_open()
        with self._starting:
            if self._thread is None or self._thread.over or self._thread.halted:
                self._begin_thread()
            if self._thread is not None:
                self._thread.wake()
        if self._closing:  # by a signal handler, meanwhile
            self.stop()
        return self

    def _begin_thread(self) -> None:
        self._checks.mark_dirty()
        thread = Background(self, input_device(self.model))
        try:
            thread.begin()
            self._thread = thread
        except BaseException:
            thread.stop(wait=False)
            raise

    def stop(self) -> None:
        """Drive no more by a thread: the step that runs comes to its end. Requests stay, and whoever waits
        for one drives.
        """
        with self._starting:
            thread = self._thread
            if thread is not None:
                thread.stop(wait=False)
            self._thread = None
        if thread is not None:
            thread.stop(wait=not self._lock.mine)
            self._take_over()

    @in_turn
    def _take_over(self) -> None:
        """The thread has taken its last step."""
        if not self._stepping:
            self._sweep()
        with suppress(WeightsChanged):  # those whom it concerns have ended
            self._let_go()

    def _turn(self) -> bool:
        """A step, if there is anything to do; the answer is whether there may be more. The engine's thread
        calls it.
        """
        self._lock.give_way()
        return self._take_turn()

    @in_turn
    def _take_turn(self) -> bool:
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
            with suppress(WeightsChanged):
                self._let_go()
            raise
        return True

    def _drive_for(self, job: Job, each: bool = False, timeout: float | None = None) -> None:
        """Take everybody's steps until a job has ended, or has `each` increment, or the time is over; or wait
        for what the thread makes of it. Handles call it."""
        end = None if timeout is None else time.monotonic() + timeout
        self._drive([job], lambda: (each and bool(job.news)) or (end is not None and time.monotonic() >= end))
        thread = self._thread
        if thread is not None and job.output is None:
            thread.wait(job, each, None if end is None else end - time.monotonic())

    def _drive(
        self, jobs: list[Job], enough: Callable[[], bool], ended: Callable[[], object] = lambda: None
    ) -> None:
        """Take steps until all jobs have ended, or it is enough, or a thread does it; `ended` is told of
        steps in which anybody has.
        """

        def steps() -> None:
            for job in jobs:
                while job.output is None and not self._others_drive:
                    self._lock.give_way()
                    if self._advance_for(job):
                        ended()
                    if enough():
                        return

        if not self._others_drive:
            self._driving(steps)

    @in_turn
    def _advance_for(self, job: Job) -> bool:
        """Take a step for a job that has not ended meanwhile; the answer is whether any has ended in it."""
        return job.output is None and bool(self._advance())

    @property
    def _others_drive(self) -> bool:
        """Whether there is a thread that drives, and it is not the one that asks."""
        thread = self._thread
        return thread is not None and not thread.own and not thread.halted

    def _driving(self, steps: Callable[[], T]) -> T:
        """The answer of a row of steps. Their caller has done anything before this, and will do anything
        after it.
        """
        self._checks.mark_dirty()
        try:
            answer = steps()
        except BaseException:
            with suppress(WeightsChanged):
                self._let_go()
            raise
        self._let_go()
        return answer

    async def _arrival(self, job: Job, each: bool = False) -> None:
        """Wait for the end of a job, or for `each` increment, without holding up the event loop. Handles call
        it.
        """
        thread = self._thread or self.start()._thread
        if thread is None or thread.own:
            raise RuntimeError("nobody can wait for a request from within a step of its engine")
        await thread.arrival(job, each)
        if thread.over and job.output is None:
            raise RuntimeError(
                "the engine's thread was stopped while somebody awaited a request; start() goes on"
            )

    @property
    def driven(self) -> bool:
        """Whether a thread drives the engine: one was started, and it has neither ended nor been stopped."""
        thread = self._thread
        return thread is not None and not thread.over and not thread.halted

    @property
    def thread_error(self) -> BaseException | None:
        """What a step raised that ended the engine's thread, if it has ended so."""
        return None if self._thread is None else self._thread.error

    def _watch(self, job: Job, wake: Wake, each: bool) -> None:
        thread = self._thread or self.start()._thread
        if thread is not None:
            thread.listen(job, wake, each)

    def _unwatch(self, job: Job, wake: Wake) -> None:
        if self._thread is not None:
            self._thread.unlisten(job, wake)

    def _cancel(self, job: Job) -> None:
        """End a job at once; where a thread drives, after the step that runs. Handles call it."""
        if job.output is not None:
            return
        job.cancelled = True
        thread = self._thread
        if thread is not None and not thread.over:
            # Nothing else: a coroutine that is collected calls this in the middle of anything.
            thread.wake()
            return
        self._end_cancelled(job)

    @in_turn
    def _end_cancelled(self, job: Job) -> None:
        self._take_in()
        if (
            job.output is None and not self._stepping
        ):  # else it is in the middle of a step, and ends with the next one
            self._end([job])
        self._pass_on()

    @in_turn
    def _receive(self) -> None:
        self._take_in()

    # ---- what the engine behind it does

    _checks: CheckPolicy

    @abstractmethod
    def _advance(self) -> list[Output]:
        """One step of everybody's, in a row of them."""

    @abstractmethod
    def _let_go(self) -> None:
        """The row of steps is over: raise WeightsChanged if the weights have changed meanwhile."""

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """Whether there is anything for a step to do."""

    @abstractmethod
    def _why_never(self, request: Request) -> str | None:
        """Why a request can never be computed, or None if it can. Asked without the lock."""

    @abstractmethod
    def _source_length(self, asked: RequestParams) -> int:
        """How many tokens a request attends to across: those that an encoder makes, or those of pictures."""

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
    def _end(self, jobs: list[Job]) -> list[Output]:
        """End jobs with "abort"."""

    @abstractmethod
    def _settle(self) -> None:
        """Make the books whole if a change of them broke off, and close the engine if that could not be done
        at once.
        """

    @abstractmethod
    def _pass_on(self) -> None:
        """Raise the KeyboardInterrupt or SystemExit with which a request has ended, once, unless this is the
        engine's own thread.
        """

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")


def _require_accepted(handle: Handle, strict: bool) -> None:
    """Raise the error of a request that was refused in `submit()`, if its caller is strict."""
    output = handle._job.output
    if strict and output is not None and output.error is not None:
        raise output.error


def _give_up(handles: list[Handle]) -> None:
    """Cancel requests; the next step ends those that an interrupt keeps this from ending."""
    for handle in handles:
        handle._job.cancelled = True
    for handle in handles:
        handle.cancel()


for _method in (Front.submit, Front.generate, Front.stream, Front.agenerate, Front.astream):
    spell_out(_method, RequestKeywords, {"priority": 0})


def _each(prompts: Iterable[Any]) -> list[Any]:
    """A list of prompts; a single one would be taken apart."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"generate() takes a list of prompts, got {type(prompts).__name__}; for one of them write "
            "engine.generate([prompt])"
        )
    listed = list(prompts)
    if listed and all(isinstance(each, int) for each in listed):
        raise TypeError(
            "generate() takes a list of prompts, got token ids; for one prompt of them write "
            "engine.generate([ids])"
        )
    return listed
