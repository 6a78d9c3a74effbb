"""Requests in, tokens out: many at once, on one model as it is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from typing import Any, Unpack, get_args

from ..integration.registry import base_model
from ..scheduling import Count, Group, Request, Scheduler, why_infeasible
from .asking import check_model, check_transformers
from .collector import collector_waits
from .config import EngineConfig, EngineOptions
from .custody import Spoiled
from .encoding import Source
from .front import Front
from .job import Job
from .keywords import spell_out
from .media import Media
from .output import FinishReason, Output
from .pools import Pools
from .preemption import Preemption
from .recorder import Recorder
from .runner import Runner
from .settings import Settings
from .stepping import Steps
from .support import check_servable, longest, longest_source
from .weights import Weights


class Engine(Front):
    """Continuous batching: every step computes one token of each running sequence and as much of the prompts as fits beside them.

    engine = Engine(model, tokenizer)
    engine.generate(["Once upon", "The fox"], max_new_tokens=40)    # a list in, a list out
    handle = engine.submit("The owl", do_sample=True, seed=1)       # or one by one
    for increment in handle: print(increment.text, end="")

    The model is the user's own, unchanged, and free for anything else between two steps. Whoever waits for a result drives the
    engine; `start()` has a thread do it, `step()` does it by hand. Requests end one by one, each with its own reason, and none by
    another's fault.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Make an engine on a model in eval mode, with its tokenizer or processor if prompts are texts.

        The options come by name or as `config`; help(hf_paged.EngineConfig) explains each.
        """
        check_transformers()
        self.config = EngineConfig.of(config, options)
        super().__init__(base_model(model), tokenizer)
        check_servable(self.model, model)
        check_model(self.model)
        self._longest, self._longest_source = longest(self.model), longest_source(self.model)
        self.pools = Pools(self.model, self.config)
        # Finalizers run in the middle of anything, so this one only notes that the pools are nobody's.
        weakref.finalize(self, self.pools.memory.abandon, self.pools).atexit = False
        self._runner = Runner(self.model, self.pools)
        self._require_eval()
        with self.pools.memory.lock:
            settings = Settings(self.model)
        self._runner.try_out()
        self.pools.settle(self._longest, self._longest_source)
        self._preemption = Preemption(self.pools, self.config.preemption)
        self._scheduler = Scheduler(
            self.pools.shelves,
            self.config.limits(),
            self.config.policy,
            admission=self.config.admission,
            prefix_caching=self.config.prefix_caching,
            verify=self.config.check_hits,
            swap=self._preemption.decide,
        )
        self._jobs: dict[Group, Job] = {}
        ahead = self.config.run_ahead if self.config.run_ahead is not None else self._runner.device.type == "cuda"
        self._custody = self._runner.custody
        with self.pools.memory.lock:
            self._weights = Weights(self.model, self._custody, settings.after_forwards())
        self._steps = Steps(self.pools, self._runner, self._weights, self._scheduler, self._jobs, self._preemption, ahead)
        self._aside: list[Output] = []
        """What ended between two steps."""

    def __repr__(self) -> str:
        return f"Engine({type(self.model).__name__}, form={self._runner.form!r}, requests={len(self._jobs)})"

    @property
    def why_rows(self) -> str | None:
        """Why the model takes its sequences one by one; None if it takes them all in one flat row."""
        return self._runner.why_rows

    # ---- requests come in

    @property
    def _busy(self) -> bool:
        return bool(self._jobs) or self._steps.flight is not None

    def _why_never(self, request: Request) -> str | None:
        if self._longest is not None and request.most_tokens > self._longest:
            return (
                f"a sequence may become {request.most_tokens} tokens long (prompt {len(request.prompt)}) and {type(self.model).__name__} "
                f"is made for {self._longest}; lower max_new_tokens"
            )
        if self._longest_source is not None and request.source > self._longest_source:
            return (
                f"the encoder of {type(self.model).__name__} is made for {self._longest_source} tokens, got {request.source}; shorten them"
            )
        return why_infeasible(request, self.pools.shelves, self.config.limits())

    def _source_length(self, source: Source) -> int:
        assert self._runner.encoder is not None
        return self._runner.encoder.length(source)

    def _require_vectors(self, media: Media | None) -> None:
        if self._runner.why_no_embeddings is not None:
            raise ValueError(f"{self._runner.why_no_embeddings}; give token ids, or use generate()")
        if media is not None:
            self._runner.merger.require(media)

    def _take_in(self) -> None:
        if self._stepping:
            return  # a criterion, or a finalizer in the middle of anything: the next step does it
        while self._inbox:
            job, request = self._inbox.popleft()
            if job.cancelled or self._closed:
                job.close("abort")
                continue
            job.group = self._scheduler.submit(request)
            self._steps.enter(job)

    # ---- steps

    def step(self) -> list[Output]:
        """One step of everybody's; the answer is what ended in it. Without work it does nothing."""
        with self._driving():
            return self._advance()

    def _advance(self) -> list[Output]:
        with self._lock:
            self._require_open()
            if self._paused:
                raise RuntimeError("the engine is paused; call resume() first")
            if self._stepping:
                raise RuntimeError("a step is running already: a processor or criterion must not drive the engine")
            self._take_in()
            self._stepping = True
            try:
                with collector_waits():
                    return self._step()
            finally:
                self._stepping = False
                if self._closing:
                    self.close()

    def _step(self) -> list[Output]:
        ended, self._aside = self._aside + self._sweep(), []
        if not self._jobs:
            self._steps.flight = None  # it has nothing but tokens too many
            return ended
        self._require_eval()
        with self.pools.memory.lock:  # nobody else is in the middle of a forward then
            self._look()
        with self._mending():
            return ended + self._steps.go_on()

    @contextmanager
    def _mending(self) -> Iterator[None]:
        """Whatever breaks off in here, the books are whole afterwards."""
        with self.pools.memory.lock:
            try:
                yield
            except BaseException as error:
                self._steps.start_over(error)
                raise

    def _sweep(self) -> list[Output]:
        return [self._end(job, "abort") for job in list(self._jobs.values()) if job.cancelled]

    def _end(self, job: Job, reason: FinishReason) -> Output:
        return self._steps.end(job, reason)

    # ---- the model in other hands

    def pause(self) -> None:
        """Let go of the model: nobody holds a block, here or on the host, and requests wait. Until `resume` its weights may change.

        What requests have said so far stays; it is computed again, with the weights of then.
        """
        with self._lock:
            self._require_open()
            if self._stepping:
                raise RuntimeError("a step is running: a processor or criterion must not pause the engine")
            with suppress(Spoiled):  # those whom it concerns have ended
                self._let_go()
            with self._mending():
                self._aside += self._steps.land()
            for group in list(self._scheduler.running):
                self._scheduler.preempt(group, swap=False)
            for group in self._scheduler.preempted:
                if group.swapped:
                    self._scheduler.begin_again(group)
            self._steps.forget()
            self._paused = True

    def resume(self) -> None:
        """Go on. What was cached is forgotten if the weights have changed."""
        with self._lock:
            self._paused = False
        if self._thread is not None:
            self.start()

    def _look(self) -> None:
        """What is cached belongs to the weights of now. While nobody holds anything that is looked at closely, else quickly: whenever
        somebody may have changed them, and before anybody is let in."""
        running = len(self._scheduler.running)
        if not running:
            if self._weights.changed():
                self.pools.forget()
                self._steps.forget()
                if self._runner.decoding is not None:
                    self._runner.decoding.look()
        elif self._custody.due or self._scheduler.may_admit:
            with self._mending() if self._custody.unseen else nullcontext():
                self._weights.require_untouched(running)
        else:
            self._custody.trust(self._weights.memory)

    def _let_go(self) -> None:
        with self._lock:
            if self._stepping:
                return  # the step that runs looks for itself
            try:
                with self._mending():
                    self._steps.look()
            finally:
                self._custody.let_go()

    def _require_eval(self) -> None:
        if self.model.training:
            raise RuntimeError(f"{type(self.model).__name__} is in training mode, where answers are random; call model.eval() first")

    # ---- the engine itself

    def stats(self) -> dict[str, Any]:
        """Requests by state, blocks by kind of layer, and what has been counted so far."""
        with self._lock:
            self._take_in()
            scheduler = self._scheduler
            return {
                "form": self._runner.form,
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.running),
                "preempted": len(scheduler.preempted),
                "blocks": self.pools.usage(),
                "host": self.pools.host_usage(),
                "graphs": {} if self._runner.decoding is None else dict(self._runner.decoding.counts),
                **{name: scheduler.counts[name] for name in get_args(Count)},
                **self._preemption.stats(),
            }

    def trace(self, path: str | os.PathLike[str]) -> Recorder:
        """Write down every step from now on, until the answer is closed: `with engine.trace("steps.jsonl"): ...`.

        `hf_paged.trace.read` gives it back. A path that ends with ".gz" is packed.
        """
        with self._lock:
            self._require_open()
            current = self._steps.recorder
            if current is not None and not current.closed:
                raise RuntimeError(f"{current!r} is being written; close it first")
            self._steps.recorder = Recorder(path, self._scheduler, self.pools.described(type(self.model).__name__), self._lock)
            return self._steps.recorder

    def check(self) -> None:
        """Recount all books; AssertionError on the first thing that does not add up (C7)."""
        with self._lock:
            self._scheduler.check()

    def close(self) -> None:
        """End what runs with "abort", the thread if there is one, and give the pools back. Twice is once.

        From within a step it is done at its end.
        """
        with self._lock:
            self._closing = True
            if self._closed or self._stepping:
                return
            self._closed = True  # who submits from now on is ended, by whoever sees it first
            self._take_in()
            for job in list(self._jobs.values()):
                self._end(job, "abort")
            self._steps.flight = None
            self._custody.let_go()
            self.pools.free()
        self.stop()
        if self._steps.recorder is not None:
            self._steps.recorder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *trouble: object) -> None:
        self.close()


spell_out(Engine.__init__, EngineOptions, {field.name: field.default for field in fields(EngineConfig)})
