"""Requests in, tokens out: many at once, on one model as it is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from ..blocks import extra_key
from ..integration.registry import base_model
from ..scheduling import Group, Infeasible, Request, Scheduler
from .asking import Asked, check_transformers, read
from .config import EngineConfig
from .handle import Handle
from .job import Job
from .output import Increment, Output
from .pools import Pools
from .runner import Runner
from .stepping import Steps
from .support import check_servable, longest
from .weights import Weights

LONG_WORK = 3.0
"""Seconds after which `generate` shows a bar."""


class Engine:
    """Continuous batching: every step computes one token of each running sequence and as much of the prompts as fits beside them.

    engine = Engine(model, tokenizer)
    engine.generate(["Once upon", "The fox"], max_new_tokens=40)    # a list in, a list out
    handle = engine.submit("The owl", do_sample=True, seed=1)       # or one by one
    for increment in handle: print(increment.text, end="")

    The model is the user's own, unchanged, and free for anything else between two steps. Whoever waits for a result drives the
    engine; `step()` does it by hand. Requests end one by one, each with its own reason, and none by another's fault.
    """

    def __init__(self, model: Any, tokenizer: Any = None, config: EngineConfig | None = None, **options: Any) -> None:
        check_transformers()
        self.config = EngineConfig.of(config, options)
        self.model, self.tokenizer = base_model(model), tokenizer
        check_servable(self.model, model)
        self._lock = threading.RLock()
        self._stepping = self._closed = self._paused = False
        self._longest = longest(self.model)
        self.pools = Pools(self.model, self.config)
        self._runner = Runner(self.model, self.pools)
        self._require_eval()
        self._runner.try_out()
        self.pools.settle(self._longest)
        self._scheduler = Scheduler(
            self.pools.shelves,
            self.config.limits(),
            self.config.policy,
            admission=self.config.admission,
            prefix_caching=self.config.prefix_caching,
            verify=self.config.check_hits,
        )
        self._jobs: dict[Group, Job] = {}
        self._arrivals = 0
        ahead = self.config.run_ahead if self.config.run_ahead is not None else self._runner.device.type == "cuda"
        self._steps = Steps(self.pools, self._runner, self._scheduler, self._jobs, ahead)
        self._aside: list[Output] = []
        """What ended between two steps."""
        self._weights = Weights(self.model)
        # Finalizers run in the middle of anything, so this one only notes that the pools are nobody's.
        weakref.finalize(self, self.pools.memory.abandon, self.pools).atexit = False

    def __repr__(self) -> str:
        return f"Engine({type(self.model).__name__}, form={self._runner.form!r}, requests={len(self._jobs)})"

    @property
    def why_rows(self) -> str | None:
        """Why the model takes its sequences one by one; None if it takes them all in one flat row."""
        return self._runner.why_rows

    # ---- requests

    def submit(
        self,
        prompt: Any,
        generation_config: Any = None,
        *,
        seed: int | None = None,
        logprobs: int | bool | None = None,
        priority: int = 0,
        salt: str | bytes | None = None,
        **generate_keywords: Any,
    ) -> Handle:
        """Queue a request and answer with its handle; nothing is computed yet.

        prompt: a text or chat messages (with a tokenizer), or token ids. generation_config and keywords: as generate() takes them,
        logits_processor, stopping_criteria and prefix_allowed_tokens_fn among them. seed: of its draws. logprobs: True, or how many
        of the model's favourites are reported beside each token's own. priority: higher is sooner, under policy="priority".
        salt: requests share their prefixes only with requests of the same salt.

        An option that the engine does not honour raises ValueError here. A request that could never fit comes back at once with
        finish_reason "refused" and the numbers in its error.
        """
        asked = read(self.model, self.tokenizer, prompt, generation_config, generate_keywords, seed, logprobs)
        with self._lock:
            self._require_open()
            job = Job(asked, None, self.tokenizer)
            request = Request(self._arrivals, asked.prompt, asked.max_length, asked.width, priority, extra_key(salt))
            try:
                self._check_length(asked)
                job.group = self._scheduler.submit(request)
            except Infeasible as reason:
                job.close("refused", reason)
            else:
                self._arrivals += 1
                self._jobs[job.group] = job
        return Handle(job, self._drive, self._cancel)

    def _check_length(self, asked: Asked) -> None:
        if self._longest is not None and asked.max_length > self._longest:
            raise Infeasible(
                f"a sequence may become {asked.max_length} tokens long (prompt {len(asked.prompt)}) and {type(self.model).__name__} "
                f"is made for {self._longest}; lower max_new_tokens"
            )

    def generate(
        self, prompts: Iterable[Any], generation_config: Any = None, *, progress: bool | None = None, **keywords: Any
    ) -> list[Output]:
        """The outputs of all prompts under the same options, in their order. A bar shows after a while, or as `progress` says."""
        handles: list[Handle] = []
        try:
            for prompt in _each(prompts):
                handles.append(self.submit(prompt, generation_config, **keywords))
            with tqdm(total=len(handles), unit="request", delay=0 if progress else LONG_WORK, disable=progress is False) as bar:
                for handle in handles:
                    while not handle.done:
                        self._drive(handle._job)
                        bar.update(sum(each.done for each in handles) - bar.n)
                bar.update(len(handles) - bar.n)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return [handle.result() for handle in handles]

    def stream(self, prompt: Any, generation_config: Any = None, **keywords: Any) -> Iterator[Increment]:
        """The increments of one request. Whoever stops listening ends it."""
        handle = self.submit(prompt, generation_config, **keywords)
        try:
            yield from handle
        finally:
            handle.cancel()

    # ---- steps

    def step(self) -> list[Output]:
        """One step of everybody's; the answer is what ended in it. Without work it does nothing."""
        with self._lock:
            self._require_open()
            if self._paused:
                raise RuntimeError("the engine is paused; call resume() first")
            if self._stepping:
                raise RuntimeError("a step is running already: a processor or criterion must not drive the engine")
            self._stepping = True
            try:
                return self._step()
            finally:
                self._stepping = False

    def _step(self) -> list[Output]:
        ended, self._aside = self._aside, []
        ended += [self._steps.end(job, "abort") for job in list(self._jobs.values()) if job.cancelled]
        if not self._jobs:
            self._steps.flight = None  # it has nothing but tokens too many
            return ended
        self._require_eval()
        self._require_same_weights()
        with self.pools.memory.lock:
            try:
                return ended + self._steps.go_on()
            except BaseException as error:
                self._steps.start_over(error)
                raise

    # ---- requests end

    def _drive(self, job: Job) -> None:
        with self._lock:
            if job.output is None:
                self.step()

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if job.output is not None:
                return
            job.cancelled = True
            if not self._stepping:  # else whoever is in the middle of a step, it ends with the next one
                self._steps.end(job, "abort")

    # ---- the model in other hands

    def pause(self) -> None:
        """Let go of the model: nobody holds a block, and requests wait. Until `resume` its weights may change.

        What requests have said so far stays; it is computed again, with the weights of then.
        """
        with self._lock:
            self._require_open()
            self._aside += self._steps.land()
            for group in list(self._scheduler.running):
                self._scheduler.preempt(group)
            self._paused = True

    def resume(self) -> None:
        """Go on. What was cached is forgotten if the weights have changed."""
        with self._lock:
            self._paused = False

    def _require_same_weights(self) -> None:
        """What is cached belongs to the weights of now. While nobody holds anything that is looked at closely, else quickly."""
        running = len(self._scheduler.running)
        if not running and self._weights.changed():
            self.pools.forget()
        elif running and self._weights.touched():
            raise RuntimeError(
                f"the model's weights have changed under {running} running requests; call engine.pause() before the change (or now) "
                "and engine.resume() after it"
            )

    def _require_eval(self) -> None:
        if self.model.training:
            raise RuntimeError(f"{type(self.model).__name__} is in training mode, where answers are random; call model.eval() first")

    # ---- the engine itself

    def stats(self) -> dict[str, Any]:
        """Requests by state, blocks by kind of layer, and what has been counted so far."""
        with self._lock:
            scheduler = self._scheduler
            return {
                "form": self._runner.form,
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.running),
                "preempted": len(scheduler.preempted),
                "blocks": self.pools.usage(),
                "graphs": {} if self._runner.decoding is None else dict(self._runner.decoding.counts),
                **{name: scheduler.counts[name] for name in ("steps", "tokens", "preemptions", "admissions", "finished", "hits", "misses")},
            }

    def check(self) -> None:
        """Recount all books; AssertionError on the first thing that does not add up (C7)."""
        with self._lock:
            self._scheduler.check()

    def close(self) -> None:
        """End what runs with "abort" and give the pools back. Twice is once."""
        with self._lock:
            if self._closed:
                return
            for job in list(self._jobs.values()):
                self._steps.end(job, "abort")
            self._closed, self._steps.flight = True, None
            self.pools.free()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *trouble: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")


def _each(prompts: Iterable[Any]) -> list[Any]:
    """A list of prompts; a single one would be taken apart."""
    if isinstance(prompts, str):
        raise TypeError("generate() takes a list of prompts; for one of them write engine.generate([prompt])")
    return list(prompts)
