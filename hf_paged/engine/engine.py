"""Requests in, tokens out: many at once, on one model as it is."""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from functools import partial
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack, get_args

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from ..blocks import check_salt, extra_key
from ..kv import fork_safe_lock, in_forked_process
from ..model.adapters.loading import HostAdapter
from ..model.adapters.peft_changes import let_changes_wait
from ..model.capture.replay import drop_captures
from ..model.invariant.mode import batch_invariant, require_invariant
from ..model.lora import LowRank
from ..model.offloaded import input_device
from ..model.patches import note_restless
from ..model.registry import base_model
from ..model.snapshot import ModelSnapshot
from ..model.support import why_dropped
from ..model.thread_state import restoring
from ..model.training import why_random
from ..scheduling import Count, Infeasible, Request, Scheduler, SequenceGroup, why_infeasible
from ..trace import Step, Trace, Writer
from .adapters import ACTIVE, AdapterInfo, EngineAdapters
from .background import Background
from .check_policy import WeightsChanged
from .config import EngineConfig, EngineOptions
from .fair_lock import FairLock
from .job import Job
from .loop import StepLoop
from .model_check import ModelCheck
from .multimodal.cross import CrossMedia, longest_picture
from .multimodal.media import Media
from .outputs.handle import Handle
from .outputs.output import Increment, Output, with_errors_noticed
from .outputs.queue import Wake
from .parallel import Follower, Leader, RankError, Ranks, load_alike, made_alike, ranks_of, tried_alike
from .pools import Pools
from .preemption import Preemption
from .protocol import in_turn
from .recorder import Recorder
from .requests.keywords import GenerateKeywords, RequestKeywords, spell_out
from .requests.options import Options
from .requests.params import RequestParams, check_model, check_transformers, read_request
from .requests.prompts import words_of
from .runner import Runner
from .support import check_servable, check_writes, longest, longest_source, versions
from .trial import Trial
from .weights import KeptBlocks, PauseMode, check_choice, load_into, on_devices

T = TypeVar("T")
LONG_WORK = 3.0
"""Seconds after which `generate` shows a bar."""


class Engine:
    """Continuous batching: every step computes one token of each running sequence and as much of the prompts
    as fits beside them.

    engine = Engine(model, tokenizer)
    engine.generate(["Once upon", "The fox"], max_new_tokens=40)    # a list in, a list out
    handle = engine.submit("The owl", do_sample=True, seed=1)       # or one by one
    for increment in handle: print(increment.text, end="")

    The model is the user's own, unchanged, and free for anything else between two steps. Waiting for a
    result drives the engine; `start()` lets a thread drive it, `step()` takes a step by hand. Requests end
    one by one, each with its own reason; an error of one ends no other.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Make an engine on a model, with its tokenizer or processor if prompts are texts.

        In training mode the model's dropouts must be zero; the engine leaves the mode as it is.

        The options come by name or as `config`; help(hf_paged.EngineConfig) explains each.
        """
        check_transformers()
        let_changes_wait()
        self.config = EngineConfig.of(config, options)
        inner: Any = base_model(model)
        self.model = inner
        self._prepare_for_calls(tokenizer)
        check_servable(self.model, model)
        check_model(self.model)
        self._arithmetic: Callable[[], AbstractContextManager[None]] = nullcontext
        """In what every step computes."""
        if self.config.batch_invariant:
            require_invariant(self.model)
            self._arithmetic = batch_invariant
        self._longest = longest(self.model)
        self._longest_source = longest_source(self.model)
        longest_across = self._longest_source
        if not inner.config.is_encoder_decoder:
            self._longest_source = None
            longest_across = longest_picture(self.model)
        self._ranks = ranks_of(self.model, self.config)
        with made_alike(self._ranks):
            self._make(longest_across)
        if self._ranks is not None:
            weakref.finalize(self, self._ranks.abandon).atexit = False
        _engines.add(self)

    def _make(self, longest_across: int | None) -> None:
        """Try the model out, and make the pools and all that computes. longest_across: the most tokens that
        an encoder makes, or that a picture becomes.
        """
        self.pools = Pools(self.model, self.config)
        # Finalizers run in the middle of anything, so this one only notes that the pools have no owner.
        weakref.finalize(self, self.pools.memory.abandon, self.pools).atexit = False
        self.runner = Runner(self.model, self.pools)
        self._require_no_dropout()
        self._training = self.model.training
        with self.pools.memory.lock:
            before = ModelSnapshot(self.model)
        with tried_alike(self._ranks, self.pools, self.runner):
            written = versions(self.model)
            with self._arithmetic():
                restoring(Trial(self.runner).run)
            check_writes(self.model, written)
            self.pools.settle(self._longest, longest_across, self.runner.capture_bytes)
        self.preemption = Preemption(self.pools, self.config.preemption)
        device = self.runner.eager.device
        with self._arithmetic():  # it decides whether kernels add the adapters
            self._adapters = EngineAdapters(self.model, self.config.max_adapters, device, self.config.kernels)
        self.runner.eager.adapters = self._adapters
        self.scheduler = self._make_scheduler()
        self._jobs: dict[SequenceGroup, Job] = {}
        self.checks = self.runner.eager.checks
        with self.pools.memory.lock:
            note_restless(self.model, ModelSnapshot(self.model).set_since(before))
            self._model_check = ModelCheck(self.model, self.checks)
        self._loop = StepLoop(
            self.runner, self._model_check, self.scheduler, self._jobs, self.preemption, self._adapters
        )
        if self._ranks is not None:
            self._join(self._ranks)

    def _make_scheduler(self) -> Scheduler:
        for kv_group in self.pools.kv_groups:
            kv_group.pool.weights.update(self.config.cache_shares)
        return Scheduler(
            self.pools.kv_groups,
            self.config.limits(),
            self.config.policy,
            admission=self.config.admission,
            prefix_caching=self.config.prefix_caching,
            verify=self.config.check_hits,
            swap=self.preemption.decide,
            adapters=self._adapters.slots,
        )

    def _prepare_for_calls(self, tokenizer: Any) -> None:
        """Make what calls from any thread need: the lock, the inbox, and what they may do now."""
        words = words_of(tokenizer)
        if words is not None and not callable(getattr(words, "decode", None)):
            raise TypeError(
                f"tokenizer must have decode(), got {type(tokenizer).__name__}; give a tokenizer or "
                "processor there, options by name, or leave it out and submit token ids"
            )
        self.processor = tokenizer
        self.tokenizer = words
        self.lock = FairLock()
        self._closed = self._closing = self._paused = False
        self._mode: PauseMode = "recompute"
        """How it was paused."""
        self._asleep: list[tuple[torch.Tensor, torch.device]] | None = None
        """The model's weights while they are in the host's memory, and where they belong."""
        self._sleep_level = 0
        self._counts: Counter[str] = Counter(weights_changed=0, kv_kept=0)
        self._freed = False
        """Whether it was closed and nothing is left to do about that."""
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        """What this rank is, if several processes compute the model."""
        self._slow: Counter[str] = Counter()
        """How many requests had a processor that runs for their rows alone, by its name."""
        self._undelivered: list[Output] = []
        """What ended between two steps."""
        self._stepping = False
        """Whether a step or another change of the books runs. What comes in between (criteria, signal
        handlers) changes none of them.
        """
        self._broken_off = False
        """Whether a change of the books has begun that has not come to its end."""
        self._stale = False
        """Whether blocks of other weights may still be there, after an interrupt."""
        self._numbers = itertools.count()
        self._inbox: deque[tuple[Job, Request]] = deque()
        """Requests that the books do not know yet."""
        self.background: Background | None = None
        self._starting = fork_safe_lock()
        self._options = Options()

    def _join(self, ranks: Ranks) -> None:
        """Take part in an engine of several ranks: one leads, the others follow."""
        if ranks.leads:
            loop = self._loop
            loop.leader = self._leader = Leader(
                ranks, self.runner, self._adapters, loop.last_tokens, loop.with_inputs
            )
        else:
            self._follower = Follower(ranks, self.runner, self._model_check, self.pools.forget)

    def __repr__(self) -> str:
        return f"Engine({type(self.model).__name__}, form={self.runner.form!r}, requests={len(self._jobs)})"

    @property
    def why_rows(self) -> str | None:
        """Why the model takes its sequences one by one; None if it takes them all in one flat row."""
        return self.runner.why_rows

    @property
    def longest(self) -> int:
        """The most tokens that one sequence can have, prompt and answer together: by the model's positions
        and by the pools."""
        slots = [each.pool.total * each.pool.block_size for each in self.pools.kv_groups if not each.cross]
        bound = self._longest or max(slots)
        return bisect_left(range(1, bound + 1), True, key=self._never_fits)

    def _never_fits(self, tokens: int) -> bool:
        alone = Request(0, (0,), tokens, 1)
        return why_infeasible(alone, self.pools.kv_groups, self.config.limits()) is not None

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
        prompt_logprobs: int | bool | None = None,
        priority: int = 0,
        salt: str | None = None,
        tenant: str = "",
        adapter: str | Sequence[str] | None = ACTIVE,
        **generate_keywords: Unpack[GenerateKeywords],
    ) -> Handle:
        """Queue a request and answer with its handle; nothing is computed yet.

        prompt: a text or chat messages (with a tokenizer), or token ids. inputs_embeds: what the model shall
        take for the embeddings of the prompt, [tokens, hidden] or [1, tokens, hidden]; processors see the
        prompt's ids, if there are any. Of an encoder-decoder the prompt is the encoder's, or
        input_features=... is, and decoder_input_ids=... what its decoder begins with. generation_config and
        keywords: as generate() takes them, logits_processor, stopping_criteria and prefix_allowed_tokens_fn
        among them. seed: of its draws. logprobs: True, or how many top tokens are reported beside each
        chosen one; prompt_logprobs: the same of the prompt's tokens. priority: higher is sooner,
        under policy="priority". salt: requests share their prefixes only with requests of the same salt.
        tenant: for whose share of the blocks this request's count. stop: strings that end an answer and are
        no part of its text. presence_penalty, frequency_penalty, logit_bias: as in OpenAI's API.
        adapter: the name of a LoRA adapter, or of several that are added up; None for the model alone. Not
        given, it is what is active on the peft model now.

        An option that the engine does not honour raises ValueError here. A request that could never fit comes
        back at once with finish_reason "refused" and the numbers in its error.
        """
        keywords = {**generate_keywords, "inputs_embeds": inputs_embeds}
        params = read_request(
            self.model,
            self.processor,
            prompt,
            generation_config,
            keywords,
            seed,
            logprobs,
            prompt_logprobs,
            self._options,
        )
        self._require_open()
        self._require_lead(params)
        if params.embeds is not None or params.media is not None:
            self._require_vectors(params.media)
        job = Job(params, None, self.tokenizer)
        if not self.scheduler.unfinished:  # a look takes milliseconds, and the next step takes another
            self._adapters.look_again()
        job.adapter = self._adapters.resolve(adapter)
        job.active = self._adapters.active
        self._queue(job, priority, extra_key(None if salt is None else check_salt(salt)), tenant)
        return Handle(job, self)

    def _queue(self, job: Job, priority: int, extra: bytes, tenant: str) -> None:
        """Put a request into the inbox, or refuse it if it could never fit. extra: what its cached blocks
        depend on beside tokens. tenant: whose share they count for.
        """
        params = job.params
        request = Request(
            next(self._numbers),
            params.prompt,
            params.max_length,
            params.width,
            priority,
            extra,
            self._source_length(params),
            params.batchable,
            params.source_key,
            job.adapter,
            scored=0 if job.prompt_scores is None else job.prompt_scores.width,
            tenant=tenant,
        )
        reason = self._why_never(request)
        if reason is not None:
            job.close("refused", Infeasible(reason))
            return
        job.number = request.number
        self._inbox.append((job, request))
        thread = self.background
        if thread is None or self._closed:  # an engine that was closed meanwhile ends it
            self._receive()
        else:
            thread.wake()

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
            _cancel_all(handles)
            raise
        return with_errors_noticed([handle.result() for handle in handles], strict)

    def stream(
        self,
        prompt: Any,
        generation_config: Any = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Iterator[Increment]:
        """The increments of one request. Leaving the iteration ends the request."""
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
        """`generate` for coroutines: the event loop continues meanwhile, and a task that is cancelled ends
        its requests.
        """
        handles: list[Handle] = []
        try:
            for prompt in _each(prompts):
                handles.append(self.submit(prompt, generation_config, **keywords))
                _require_accepted(handles[-1], strict)
            return with_errors_noticed([await handle for handle in handles], strict)
        except BaseException:
            _cancel_all(handles)
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

    @property
    def closed(self) -> bool:
        """Whether the engine takes no request any more."""
        return self._closed or self._closing

    @property
    def driven(self) -> bool:
        """Whether a thread drives the engine: one was started, and it has neither ended nor been stopped."""
        thread = self.background
        return thread is not None and not thread.over and not thread.halted

    @property
    def thread_error(self) -> BaseException | None:
        """What a step raised that ended the engine's thread, if it has ended so."""
        return None if self.background is None else self.background.error

    def start(self) -> Self:
        """Let a thread drive the engine from now on: requests are computed whether a caller waits or not, and
        submitting is prompt.

        An error of a step reaches every waiting caller and ends the thread; a further call starts it again.
        `stop()` and `close()` end it, and so does the end of the process. Awaiting a handle calls it, too.
        """
        self._require_open()
        with self._starting:
            if self.background is None or self.background.over or self.background.halted:
                self._begin_thread()
            if self.background is not None:
                self.background.wake()
        if self._closing:  # by a signal handler, meanwhile
            self.stop()
        return self

    def _begin_thread(self) -> None:
        self.checks.mark_dirty()
        thread = Background(self, input_device(self.model))
        try:
            thread.begin()
            self.background = thread
        except BaseException:
            thread.stop(wait=False)
            raise

    def stop(self) -> None:
        """Stop the thread after its current step. Requests stay, and a caller that waits for one drives."""
        with self._starting:
            thread = self.background
            if thread is not None:
                thread.stop(wait=False)
            self.background = None
        if thread is not None:
            thread.stop(wait=not self.lock.mine)
            self._after_thread()

    @in_turn
    def _after_thread(self) -> None:
        """Check the model, and end cancelled jobs, after the thread's last step."""
        if not self._stepping:
            self._end_all_cancelled()
        with suppress(WeightsChanged):  # the requests concerned have ended
            self._check_after_steps()

    def _turn(self) -> bool:
        """A step, if there is anything to do; the answer is whether there may be more. The engine's thread
        calls it.
        """
        self.lock.give_way()
        return self._take_turn()

    @in_turn
    def _take_turn(self) -> bool:
        if self._closed:
            return False
        self._drain_inbox()
        if self._paused:
            self._end_all_cancelled()
        if self._paused or not self._busy:
            self._check_after_steps()
            return False
        try:
            self._advance()
        except BaseException:
            with suppress(WeightsChanged):
                self._check_after_steps()
            raise
        return True

    def _drive_for(self, job: Job, each: bool = False, timeout: float | None = None) -> None:
        """Take steps of all requests until a job has ended, or has `each` increment, or the time is over; or
        wait for the thread. Handles call it.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self._drive(
            [job], lambda: (each and bool(job.queue)) or (end is not None and time.monotonic() >= end)
        )
        thread = self.background
        if thread is not None and job.output is None:
            thread.wait(job, each, None if end is None else end - time.monotonic())

    def _drive(
        self, jobs: list[Job], enough: Callable[[], bool], ended: Callable[[], object] = lambda: None
    ) -> None:
        """Take steps until all jobs have ended, or `enough` is true, or a thread drives; `ended` is called
        after steps in which any request has ended.
        """

        def steps() -> None:
            for job in jobs:
                while job.output is None and not self._other_thread_drives:
                    self.lock.give_way()
                    if self._advance_for(job):
                        ended()
                    if enough():
                        return

        if not self._other_thread_drives:
            self._run_steps(steps)

    @in_turn
    def _advance_for(self, job: Job) -> bool:
        """Take a step for a job that has not ended meanwhile; the answer is whether any has ended in it."""
        return job.output is None and bool(self._advance())

    @property
    def _other_thread_drives(self) -> bool:
        """Whether another thread drives the engine."""
        thread = self.background
        return thread is not None and not thread.own and not thread.halted

    def _run_steps(self, steps: Callable[[], T]) -> T:
        """Take steps: their answer. The caller may change the model around them, so it is marked dirty on
        entry and checked on exit.
        """
        self.checks.mark_dirty()
        try:
            answer = restoring(steps)
        except BaseException:
            with suppress(WeightsChanged):
                self._check_after_steps()
            raise
        self._check_after_steps()
        return answer

    async def _arrival(self, job: Job, each: bool = False) -> None:
        """Wait for the end of a job, or for `each` increment, without holding up the event loop. Handles call
        it.
        """
        thread = self.background or self.start().background
        if thread is None or thread.own:
            raise RuntimeError("a step of an engine cannot wait for a request of the same engine")
        await thread.arrival(job, each)
        if thread.over and job.output is None:
            raise RuntimeError(
                "the engine's thread was stopped while a coroutine awaited a request; start() continues"
            )

    def _watch(self, job: Job, wake: Wake, each: bool) -> None:
        thread = self.background or self.start().background
        if thread is not None:
            thread.listen(job, wake, each)

    def _unwatch(self, job: Job, wake: Wake) -> None:
        if self.background is not None:
            self.background.unlisten(job, wake)

    def _cancel(self, job: Job) -> None:
        """End a job at once; where a thread drives, after the step that runs. Handles call it."""
        if job.output is not None:
            return
        job.cancelled = True
        thread = self.background
        if thread is not None and not thread.over:
            # Nothing else: a coroutine that is collected calls this in the middle of anything.
            thread.wake()
            return
        self._end_cancelled(job)

    @in_turn
    def _end_cancelled(self, job: Job) -> None:
        self._drain_inbox()
        if (
            job.output is None and not self._stepping
        ):  # else it is in the middle of a step, and ends with the next one
            self._end([job])
        self._raise_interrupts()

    @in_turn
    def _receive(self) -> None:
        self._drain_inbox()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _require_lead(self, params: RequestParams | None = None) -> None:
        """Raise on ranks that follow, and for a request that ranks cannot compute together."""
        if self._follower is not None:
            raise RuntimeError(
                f"this is rank {self._follower.ranks.rank} of a tensor-parallel engine, whose requests and "
                "adapters go to rank 0; call engine.follow() here"
            )
        if params is not None and self._leader is not None and isinstance(params.media, CrossMedia):
            raise ValueError(
                "a tensor-parallel engine has no pictures for cross-attention layers; use generate()"
            )

    # ---- several ranks

    @property
    def leads(self) -> bool:
        """Whether requests go to this engine: on rank 0, and where one process has the whole model."""
        return self._follower is None

    @in_turn
    def broadcast(self, value: Any) -> None:
        """On rank 0 of a tensor-parallel engine: send a value that can be pickled to all other ranks, whose
        `follow(receive)` calls receive(value) between two steps.
        """
        self._require_open()
        self._require_lead()
        if self._paused:
            raise RuntimeError("the other ranks do not follow a paused engine; call resume() first")
        if self._leader is not None:
            self._leader.broadcast(value)

    def follow(self, receive: Callable[[Any], object] = lambda value: None) -> bool:
        """On all ranks but 0 of a tensor-parallel engine: compute what rank 0 schedules.

        Returns False when rank 0 has closed its engine (this one is closed then, too), and True when it has
        paused: change the model here as there, then call this again. Raises RankError if a rank has failed.
        While rank 0 is idle this waits, however long. receive: called with what rank 0 broadcasts.
        """
        if self._follower is None:
            raise RuntimeError("only ranks other than 0 of a tensor-parallel engine follow; this one leads")
        self._require_open()
        try:
            paused = self._follower.follow(receive)
        except RankError:
            self._drop_captures()
            raise
        if not paused:
            self.close()
        return paused

    # ---- requests come in

    @property
    def _busy(self) -> bool:
        return bool(self._jobs) or self._loop.in_flight is not None

    def _why_never(self, request: Request) -> str | None:
        if self._longest is not None and request.most_tokens > self._longest:
            return (
                f"a sequence may become {request.most_tokens} tokens long (prompt {len(request.prompt)}) and "
                f"{type(self.model).__name__} is made for {self._longest}; lower max_new_tokens"
            )
        if self._longest_source is not None and request.source > self._longest_source:
            return (
                f"the encoder of {type(self.model).__name__} is made for {self._longest_source} tokens, "
                f"got {request.source}; shorten them"
            )
        return why_infeasible(request, self.pools.kv_groups, self.config.limits())

    def _source_length(self, params: RequestParams) -> int:
        if isinstance(params.media, CrossMedia):
            return params.media.length
        if params.source is None:
            return 0
        assert self.runner.eager.encoder is not None
        return self.runner.eager.encoder.length(params.source)

    def _require_vectors(self, media: Media | None) -> None:
        if self.runner.why_no_embeddings is not None:
            raise ValueError(f"{self.runner.why_no_embeddings}; give token ids, or use generate()")
        if isinstance(media, CrossMedia) and self.runner.why_not_across is not None:
            raise ValueError(f"{self.runner.why_not_across}; use generate()")
        if media is not None:
            self.runner.merger.require(media)

    def _drain_inbox(self) -> None:
        if (
            self._inbox and not self._stepping
        ):  # else a criterion, or a finalizer in the middle of anything: the next step does it
            self._atomically(self._enter)

    def _enter(self) -> None:
        """Enter the inbox in the books. A request leaves it last: after an interrupt it is entered again."""
        while self._inbox:
            job, request = self._inbox[0]
            if job.output is not None:
                job.queue.end()
            elif job.cancelled or self._closed:
                self._loop.conclude(job, "abort")
            elif job.group not in self._jobs:
                try:
                    job.group = self.scheduler.submit(request)
                    self._loop.enter(job)
                    self._adapters.fresh |= bool(job.adapter)
                    self._slow.update(set(job.params.slow))
                except Infeasible as error:
                    self._loop.conclude(job, "refused", error)
            self._inbox.popleft()

    # ---- steps

    def step(self) -> list[Output]:
        """One step of all requests; the answer is what ended in it. Without work it does nothing."""
        self.lock.give_way()
        return self._run_steps(self._advance_in_turn)

    def _advance(self) -> list[Output]:
        """A step of all requests, by a caller that has the lock: what has ended since the step before."""
        if self._follower is not None or self._closed or self._paused or self._stepping:
            self._refuse_step()
        if self._inbox:
            self._drain_inbox()
        self._stepping = True
        try:
            cancelled = [job for job in list(self._jobs.values()) if job.cancelled]
            if cancelled:
                self._undelivered += self._end(cancelled)
            if self._adapters.leaving:
                self._remove_idle_adapters()
            scheduler = self.scheduler
            admits = bool(scheduler.waiting or scheduler.preempted) and scheduler.may_admit
            fresh = self._adapters.fresh and bool(self._adapters.layers)
            must_check = admits or fresh or not scheduler.running or self._training != self.model.training
            if not self._jobs:
                self._loop.in_flight = None  # it has only tokens too many
            else:
                with self.pools.memory.lock:  # no other forward is in progress then
                    if must_check or not self.checks.skip(self._model_check.memory):
                        self._check_before_step()
                    with self._arithmetic():
                        self._undelivered += self._atomically(self._loop.step)
            if self._adapters.leaving:
                self._remove_idle_adapters()
        finally:
            self._stepping = False
        if self._loop.interrupted:
            self._raise_interrupts()
        ended = self._undelivered
        self._undelivered = []
        return ended

    _advance_in_turn = in_turn(_advance)
    """The same by any caller."""

    def warm_up(self) -> bool:
        """Capture the steps that many requests will need, one after another, until a request comes: whether
        none is missing any more. Kernels that still compile are not waited for.

        No other thread may compute with the model meanwhile. Compiled steps, and those of a model that runs
        code of the user's or has adapters, are captured when they come.
        """
        self._require_open()
        self._require_lead()
        if not self.runner.captures:
            return True
        missing = -1
        while not self._busy and not self._inbox:
            self.lock.give_way()
            left = self._warm_up_once()
            if left == 0:
                return True
            if left == missing:
                break
            missing = left
        return False

    @in_turn
    def _warm_up_once(self) -> int:
        if self._closed or self._paused or self._stepping or self._busy or self._inbox:
            return -1
        with self.pools.memory.lock:
            self._check_before_step()
            once = self.runner.warm_up
            with self._arithmetic():
                left = self._atomically(once if self._leader is None else partial(self._leader.warm_up, once))
        self.checks.release()
        return left

    def _refuse_step(self) -> NoReturn:
        """Raise the reason why no step can be taken now."""
        self._require_lead()
        self._require_open()
        if self._paused:
            raise RuntimeError("the engine is paused; call resume() first")
        raise RuntimeError(
            "a step is running already: a processor, criterion or signal handler must not drive the engine"
        )

    def _atomically(self, act: Callable[[], T]) -> T:
        """Call `act`, which changes the books: its answer. If it is broken off, the books are recovered
        before anything else uses them.

        Python's garbage collector runs after it, not within. A step makes and drops some objects for each of
        its rows. A collection within would move them to an older generation, and after enough of those
        Python walks all of its objects: a quarter of a second where torch is loaded.
        """
        stepping = self._stepping
        torn = self._broken_off
        collecting = gc.isenabled()
        self._stepping = self._broken_off = True
        try:
            gc.disable()
            answer = act()
            self._broken_off = torn
            return answer
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            self._stepping = stepping
            if collecting:
                gc.enable()

    def _recover(self, error: BaseException) -> None:
        """Recover the books after a change that broke off; after an interrupt in here the next call does."""
        self._broken_off = True
        with self.pools.memory.lock:
            self.runner.eager.unplug()
            self._loop.start_over(error)
            if isinstance(error, RankError):
                self._drop_captures()
        self._broken_off = False

    def _drop_captures(self) -> None:
        """A rank has failed: process groups end when no captured step has their collectives."""
        self.runner.close()
        drop_captures(self.model)

    def _finish_broken_off(self) -> None:
        if self._stepping:
            return  # in the middle of a change, whose end does it
        if self._broken_off:
            self._recover(RuntimeError("a step broke off in the middle"))
        if self._closing and not self._freed:
            self._free()

    def _raise_interrupts(self) -> None:
        own = self.background is not None and self.background.own
        while self._loop.interrupted:
            error = self._loop.interrupted.popleft().interrupt()
            if error is not None and not own:
                raise error

    def _end_all_cancelled(self) -> list[Output]:
        return self._end([job for job in list(self._jobs.values()) if job.cancelled])

    def _end(self, jobs: list[Job]) -> list[Output]:
        with self.pools.memory.lock:
            return self._atomically(lambda: [self._loop.end(job, "abort") for job in jobs]) if jobs else []

    # ---- the model in other hands

    def pause(self, mode: PauseMode = "recompute") -> None:
        """Release the model: until `resume` its weights may change, and requests wait.

        mode: "recompute" frees all blocks; the tokens of requests stay and are computed again, with the
        weights of then. "wait" finishes the requests that have come, "abort" ends them, and both free all
        blocks. "keep" keeps the blocks of running requests: they continue where they are if the weights stay
        the same or `weights_changed(kv="keep")` is called, else they are computed again.
        """
        check_choice("mode", mode, PauseMode)
        self._require_open()
        self._require_lead()
        if mode == "keep":
            self._require_alone("pause(mode='keep')")
        self._require_between_steps("pause")
        if mode in ("wait", "abort"):
            self._finish_all(abort=mode == "abort")
        self._pause(mode)

    def _require_alone(self, act: str) -> None:
        """Raise where several processes compute the model."""
        if self._ranks is not None:
            raise ValueError(
                f"a tensor-parallel engine has no {act}; call pause(), change the weights on all ranks, then "
                "resume()"
            )

    def _require_between_steps(self, act: str) -> None:
        if self._stepping and self.lock.mine:
            raise RuntimeError(
                f"a step is running: a processor, criterion or signal handler must not {act} the engine"
            )

    def _finish_all(self, abort: bool) -> None:
        """Wait for the end of all requests that have come, or end them."""
        jobs = [*self._jobs.values(), *[job for job, _ in list(self._inbox)]]
        handles = [Handle(job, self) for job in jobs if job.output is None]
        if abort:
            _cancel_all(handles)
        if not self._paused:
            for handle in handles:
                handle.result()

    @in_turn
    def _pause(self, mode: PauseMode) -> None:
        self._require_between_steps("pause")
        with suppress(WeightsChanged):  # the requests concerned have ended
            self._check_after_steps()
        with self.pools.memory.lock:
            self._atomically(self._preempt_all if mode != "keep" else self._apply_in_flight)
        if self._leader is not None and not self._paused:
            self._leader.pause()
        self._paused = True
        self._mode = mode
        self._raise_interrupts()

    def _apply_in_flight(self) -> None:
        """Apply the tokens of the last step; blocks stay."""
        self._undelivered += self._loop.finish_in_flight()

    def _preempt_all(self) -> None:
        """Apply the tokens of the last step, and free every block."""
        self._apply_in_flight()
        for group in list(self.scheduler.running):
            self.scheduler.preempt(group, swap=False)
        for group in self.scheduler.preempted:
            if group.swapped:
                self.scheduler.begin_again(group)
        self._loop.forget_media()

    def resume(self) -> None:
        """Continue. Cached blocks, and those of requests that were kept, are dropped if the weights have
        changed.
        """
        self._wake_weights()
        self._resume()
        if self.background is not None:
            self.start()

    @in_turn
    def _resume(self) -> None:
        if self._paused and self._mode == "keep":
            with self.pools.memory.lock:
                rewritten = self._model_check.rewritten() or self._adapters.rewritten(self._jobs)
                if self.scheduler.begun and rewritten:
                    self._atomically(self._preempt_all)
        self._paused = False

    @in_turn
    def weights_changed(self, kv: KeptBlocks = "drop") -> None:
        """Note that the weights are others, however they were written; the engine is paused or idle.

        kv: "drop" forgets cached blocks, and requests that were kept are computed again. "keep" lets requests
        continue, and prompts begin, with keys and values of the old weights; stats()["kv_kept"] counts it.
        """
        check_choice("kv", kv, KeptBlocks)
        self._require_open()
        self._require_lead()
        if kv == "keep":
            self._require_alone('weights_changed(kv="keep")')
        if self._jobs and not self._paused:
            raise RuntimeError("requests are running; call pause() before the weights change")
        with self.pools.memory.lock:
            if kv == "drop":
                self._atomically(self._preempt_all)
                self._atomically(self.pools.forget)
            else:
                self._adapters.keep(self.scheduler.begun)
            self._loop.forget_media()
            if self._ranks is None:  # several look at their models together, before the next step
                self._model_check.changed(whole=True)
                self.runner.check_captures()
        self._counts["weights_changed"] += 1
        self._counts["kv_kept"] += kv == "keep"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors into the model's weights of these names, in place; the names that were loaded.

        Requests that run are put down meanwhile and computed again, unless the engine is paused already.
        Captured steps stay: they read the weights where they lie. Ranks are all given the same tensors, in a
        pause, and keep their parts.
        """
        load = partial(load_alike, self._ranks, partial(load_into, self.model, weights))
        if self._follower is not None:
            return restoring(load)
        paused = self._paused
        if self._ranks is not None and not paused:
            raise RuntimeError(
                "ranks load weights together: call pause(), then load_weights() on all ranks (on the others "
                "behind follow()), then resume()"
            )
        if not paused:
            self.pause()
        try:
            return restoring(load)
        finally:
            self.weights_changed()
            if not paused:
                self.resume()

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up` (or `resume`): requests wait and are computed again.

        level: 1 gives back the pools and captured steps, 2 moves the weights to the host's memory as well.
        """
        if level not in (1, 2):
            raise ValueError(f"level={level!r} is not 1 (the pools) or 2 (the weights, too)")
        self._require_alone("sleep()")
        if not self._paused or self._mode == "keep":
            self.pause()
        self._drop_pools()
        self._sleep_level = max(self._sleep_level, level)
        if level == 2:
            self._asleep = self._asleep or on_devices(self.model)  # before any moves: wake_up() knows it all
            for tensor, _ in self._asleep:
                tensor.data = tensor.data.cpu()

    @in_turn
    def _drop_pools(self) -> None:
        with self.pools.memory.lock:
            for group in self.pools.groups.values():
                group.give_back()

    def wake_up(self) -> None:
        """Bring the weights back and continue; pools and captured steps are made again when needed."""
        self.resume()

    def _wake_weights(self) -> None:
        for tensor, device in self._asleep or ():
            tensor.data = tensor.data.to(device)
        if self._asleep:
            self.runner.fuse_projections()
        self._asleep = None
        self._sleep_level = 0

    def _check_before_step(self) -> None:
        """Check that cached blocks match the current weights: fully when idle, else cheaply. In training mode
        also that no dropout is active.
        """
        running = len(self.scheduler.running)
        let_changes_wait()
        if self.model.training and not (self._training and running):
            self._require_no_dropout()
        self._training = self.model.training
        if not running:
            self._adapters.refresh()
            self._atomically(self._drop_stale_blocks)
        else:
            look = partial(self._model_check.require_untouched, running)
            if self.checks.unseen:
                self._atomically(look)
            else:
                look()
            if self._model_check.adapters_moved:
                self._model_check.adapters_moved = False
                self._atomically(self._adapters.follow_model)
            if self._adapters.layers:
                self._undelivered += self._atomically(self._loop.end_changed_adapters)
        if not running or self._adapters.layers:
            self._undelivered += self._atomically(self._loop.end_lost)
            self._atomically(self._loop.renew_adapters)

    def _drop_stale_blocks(self) -> None:
        """Drop blocks and media of other weights. What an interrupt keeps, the next check drops."""
        stale = self._stale
        self._stale = True
        changed = self._model_check.changed
        if (changed() if self._leader is None else self._leader.any_changed(changed)) or stale:
            self.pools.forget()
            self._loop.forget_media()
            self.runner.check_captures()
        self._stale = False

    @in_turn
    def _check_after_steps(self) -> None:
        if self._stepping:
            return  # the current step checks by itself
        try:
            with self.pools.memory.lock:
                self._atomically(self._loop.check_model)
        finally:
            self.checks.release()
        if not self._busy:
            for recorder in self._loop.recorders:
                recorder.rest()

    def _require_no_dropout(self) -> None:
        """Raise if training mode makes answers random, or drops the cache."""
        reason = why_random(self.model) or why_dropped(self.model)
        if reason is not None:
            raise RuntimeError(reason)

    # ---- adapters

    def add_adapter(self, name: str, source: Any, config: Any = None) -> None:
        """Let requests name a LoRA adapter: submit(..., adapter=name).

        source: a folder as peft saves it, a state dict with its LoraConfig as `config`, or another peft model
        that has an adapter of that name. The model's own modules stay as they are, and so do its answers to
        other requests. Adapters of a peft model are there by their names without this. On several ranks
        rank 0 calls this, and every rank takes its part.
        """
        self._require_open()
        self._require_lead()
        layers = self._adapters.read(name, source, config)
        loaded = self._adapters.hold(layers)
        if self.config.lm_head_fp32 and self.model.get_output_embeddings() in loaded.host.layers:
            raise ValueError(
                f"lm_head_fp32=True and the adapter {name!r} of lm_head: its products are not computed in "
                "float32; leave one of them out"
            )
        self._enter_adapter(name, layers, loaded)

    @in_turn
    def _enter_adapter(self, name: str, layers: Mapping[str, LowRank], loaded: HostAdapter) -> None:
        if self._leader is not None:
            self._leader.require_between_forwards("add_adapter()")
        self._adapters.add(name, loaded)
        try:
            if self._leader is not None:
                self._leader.add_adapter(name, layers, now=not self._paused)
        except Exception:
            if name in self._adapters.numbers:
                self._adapters.remove(name)
            raise

    @in_turn
    def remove_adapter(self, name: str, when: Literal["now", "idle"] = "now") -> None:
        """Forget an adapter that was added. While requests have it that is refused, or with when="idle" done
        when the last of them has ended; no new one may name it meanwhile.
        """
        if when not in ("now", "idle"):
            raise ValueError(f"when={when!r} is neither 'now' nor 'idle'")
        self._require_lead()
        users = self._users_of(name)
        if users and when == "now":
            raise ValueError(
                f"{users} requests have the adapter {name!r}; cancel them, or call "
                f"remove_adapter({name!r}, when='idle')"
            )
        self._adapters.leave(name)
        self._remove_idle_adapters()

    @in_turn
    def adapters(self) -> dict[str, AdapterInfo]:
        """The adapters that requests can name."""
        return self._adapters.infos(self._users_of)

    def _users_of(self, name: str) -> int:
        """How many unfinished requests have an adapter."""
        jobs = [*self._jobs.values(), *(job for job, _ in list(self._inbox) if job.output is None)]
        return sum(name in job.adapter for job in jobs)

    def _remove_idle_adapters(self) -> None:
        for name in list(self._adapters.leaving):
            if not self._users_of(name):
                self._adapters.remove(name)

    # ---- the engine itself

    @in_turn
    def stats(self) -> dict[str, Any]:
        """Requests by state, blocks by kind of layer, and what has been counted so far."""
        self._drain_inbox()
        scheduler = self.scheduler
        return {
            "form": self.runner.form,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "preempted": len(scheduler.preempted),
            "future_peak": scheduler.future_peak,
            "blocks": self.pools.usage(),
            "memory": self.pools.memory_usage(),
            "host": self.pools.host_usage(),
            "adapters": self._adapters.stats(),
            "graphs": {} if self.runner.decoding is None else self.runner.decoding.stats(),
            **{name: scheduler.counts[name] for name in get_args(Count)},
            "slow_processors": dict(self._slow),
            "paused": self._mode if self._paused else None,
            "asleep": self._sleep_level,
            **self._counts,
            **self.preemption.stats(),
        }

    @in_turn
    def trace(self, path: str | os.PathLike[str]) -> Recorder:
        """Write down every step from now on, until the answer is closed: `with engine.trace("steps.jsonl"):
        ...`.

        `hf_paged.trace.read` gives it back. A path that ends with ".gz" is packed.
        """
        self._require_open()
        for each in self._loop.recorders:
            if not (each.closed or each.live):
                raise RuntimeError(f"{each!r} is being written; close it first")
        return self._record(Writer(path, self._header), None)

    @in_turn
    def watch(self, report: Callable[[Step], None], every: float = 0.1) -> Recorder:
        """Have `report(step)` called with what has changed in the blocks and the queue, until the answer is
        closed: first with all there is, then behind a step, at most once in `every` seconds, and when nothing
        is left to do.

        A step of `hf_paged.trace` stands for all steps since the one before; the answer's `header` has the
        kinds of layers. The thread that drives the engine calls `report`, so it must neither wait nor raise.
        """
        self._require_open()
        return self._record(report, every)

    def _record(self, sink: Writer | Callable[[Step], None], every: float | None) -> Recorder:
        made = Recorder(sink, self.scheduler, self._header, self.lock.lock, every)
        self._loop.recorders = [*(each for each in self._loop.recorders if not each.closed), made]
        return made

    @property
    def _header(self) -> Trace:
        return self.pools.described(type(self.model).__name__)

    @in_turn
    def check(self) -> None:
        """Recount all books; AssertionError at the first difference (C7)."""
        self.scheduler.check()

    def close(self) -> None:
        """End what runs with "abort", the thread if there is one, and give the pools back. Twice is once.

        From within a step it is done at its end. A trace that cannot be written is logged; only the trace's
        own `close()` raises.
        """
        self._ask_to_close()
        if self._freed:
            self.stop()
            self._raise_interrupts()

    @in_turn
    def _ask_to_close(self) -> None:
        self._closing = True  # `_finish_broken_off` does it, now or after the step that runs

    def _free(self) -> None:
        """Close the engine. What an interrupt breaks off is done by the next call."""
        self._closed = True  # a request that comes from now on ends when it is entered
        self._drain_inbox()
        self._end(list(self._jobs.values()))
        self._loop.in_flight = None
        self.checks.release()
        if self._leader is not None:
            self._leader.close()
        self.runner.close()
        self._adapters.close()
        if self._follower is not None:
            self._follower.free()
        self.pools.free()
        if self._ranks is not None:
            self._ranks.close()
        if self.background is not None:
            self.background.stop(wait=False)
        self._freed = True
        for recorder in self._loop.recorders:
            with suppress(OSError):  # the recorder has logged it
                recorder.close()

    def _after_fork(self) -> None:
        """In a forked process: recover from what other threads of the parent were doing."""
        self.lock.waiting.clear()
        if not self.lock.mine:
            self._stepping = False
            self._broken_off = True
            self.runner.eager.unplug()
        if self._ranks is not None:
            self._ranks.forget()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *trouble: object) -> None:
        self.close()


def _require_accepted(handle: Handle, strict: bool) -> None:
    """Raise the error of a request that was refused in `submit()`, if its caller is strict."""
    output = handle._job.output
    if strict and output is not None and output.error is not None:
        raise output.error


def _cancel_all(handles: list[Handle]) -> None:
    """Cancel requests; the next step ends those that an interrupt keeps this from ending."""
    for handle in handles:
        handle._job.cancelled = True
    for handle in handles:
        handle.cancel()


for _method in (Engine.submit, Engine.generate, Engine.stream, Engine.agenerate, Engine.astream):
    spell_out(_method, RequestKeywords, {"priority": 0, "adapter": ACTIVE})


def _each(prompts: Iterable[Any]) -> list[Any]:
    """The prompts as a list; raises for a single one, whose characters or ids would be prompts."""
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


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._after_fork()


in_forked_process(_after_fork)
spell_out(Engine.__init__, EngineOptions, {field.name: field.default for field in fields(EngineConfig)})
