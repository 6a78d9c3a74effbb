"""An engine's books, and who takes its steps: callers that wait, its thread, coroutines."""

from __future__ import annotations

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import NoReturn, TypeVar

import torch

from ..kv import fork_safe_lock
from ..model.adapters.loading import HostAdapter
from ..model.adapters.peft_changes import let_changes_wait
from ..model.adapters.peft_loading import PeftAdapter
from ..model.capture.replay import drop_captures
from ..model.offloaded import input_device
from ..model.parts import Parts
from ..model.support import why_dropped
from ..model.thread_state import restoring
from ..model.training import why_random
from ..scheduling import Infeasible, Request
from .background import Background
from .fair_lock import FairLock
from .loop import StepLoop
from .outputs.output import Output
from .outputs.queue import Wake
from .parallel.ranks import RankError
from .requests.job import Job
from .state import EngineState, Phase, in_turn
from .worker.check_policy import WeightsChanged

T = TypeVar("T")
NO_STEPS = (Phase.PAUSED, Phase.CLOSED, Phase.FREED)


class Books:
    """The requests of an engine from its inbox to their end, and all that they hold.

    What changes them does so in a turn and atomically: a change that an interrupt breaks off is recovered
    before anything else uses them.
    """

    def __init__(self, loop: StepLoop) -> None:
        self.lock = FairLock()
        self.state = EngineState()
        self.loop = loop
        self.executor = loop.executor
        self.jobs = loop.jobs
        self.memory = loop.pools.memory
        self.inbox: deque[tuple[Job, Request]] = deque()
        """Requests that the scheduler does not know yet."""
        self.numbers = itertools.count()
        """The numbers of requests, in the order of arrival."""

    @property
    def busy(self) -> bool:
        """True while anything is left to do."""
        return bool(self.jobs) or self.loop.in_flight is not None

    def receive(self) -> None:
        """Enter the inbox in the books."""
        if (
            self.inbox and not self.state.stepping
        ):  # else a criterion, or a finalizer in the middle of anything: the next step does it
            self.atomically(self._enter)

    receive_in_turn = in_turn(receive)
    """The same by any caller."""

    def _enter(self) -> None:
        """Enter each request. It leaves the inbox last: after an interrupt it is entered again."""
        while self.inbox:
            job, request = self.inbox[0]
            if job.output is not None:
                job.queue.end()
            elif job.cancelled or self.state.closed:
                self.loop.conclude(job, "abort")
            elif job.group not in self.jobs:
                try:
                    self.loop.enter(job, request)
                except Infeasible as error:
                    self.loop.conclude(job, "refused", error)
            self.inbox.popleft()

    def require_open(self) -> None:
        """Raise once the engine is closed."""
        if self.state.closed:
            raise RuntimeError("the engine is closed; make a new one")

    # ---- changes

    def atomically(self, act: Callable[[], T]) -> T:
        """Call `act`, which changes the books: its answer. If it is broken off, the books are recovered
        before anything else uses them.

        Python's garbage collector runs after it, not within. A step makes and drops some objects for each of
        its rows. A collection within would move them to an older generation, and after enough of those
        Python walks all of its objects: a quarter of a second where torch is loaded.
        """
        state = self.state
        stepping = state.stepping
        torn = state.torn
        collecting = gc.isenabled()
        state.stepping = state.torn = True
        try:
            gc.disable()
            answer = act()
            state.torn = torn
            return answer
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            state.stepping = stepping
            if collecting:
                gc.enable()

    def _recover(self, error: BaseException) -> None:
        """Recover the books after a change that broke off; after an interrupt in here the next call does."""
        self.state.torn = True
        with self.memory.lock:
            self.loop.runner.eager.unplug()
            self.loop.start_over(error)
            if isinstance(error, RankError):
                self.drop_captures()
        self.state.torn = False

    def drop_captures(self) -> None:
        """A rank has failed: process groups end when no captured step has their collectives."""
        self.loop.runner.close()
        drop_captures(self.loop.runner.eager.model)

    def settle(self) -> None:
        """Recover from a change of the books that broke off, and close what is to be closed."""
        if self.state.stepping:
            return  # in the middle of a change, whose end does it
        if self.state.torn:
            self._recover(RuntimeError("a step broke off in the middle"))
        if Phase.CLOSING <= self.state.phase < Phase.FREED:
            self._free()

    def end(self, jobs: list[Job]) -> list[Output]:
        """End requests with "abort"."""
        with self.memory.lock:
            return self.atomically(lambda: [self.loop.end(job, "abort") for job in jobs]) if jobs else []

    # ---- adapters

    @in_turn
    def enter_adapter(self, name: str, layers: Parts, loaded: HostAdapter | PeftAdapter) -> None:
        """Let requests name an adapter, on all ranks. loaded: this one's part of `layers`."""
        self.executor.require_between_forwards("add_adapter()")
        adapters = self.loop.adapters
        adapters.add(name, loaded)
        try:
            self.executor.add_adapter(name, layers, self.state.paused)
        except Exception:
            if name in adapters.numbers:
                adapters.remove(name)
            raise

    def users_of(self, name: str) -> int:
        """The number of unfinished requests that have an adapter."""
        jobs = [*self.jobs.values(), *(job for job, _ in list(self.inbox) if job.output is None)]
        return sum(name in job.adapters.all for job in jobs)

    def remove_idle_adapters(self) -> None:
        """Remove the adapters that are to leave, and that no request has."""
        for name in list(self.loop.adapters.leaving):
            if not self.users_of(name):
                self.loop.adapters.remove(name)

    # ---- the end

    @in_turn
    def ask_to_close(self) -> None:
        """Close the engine, from within a step at its end."""
        # `settle` does it, now or after the step that runs
        self.state.phase = max(self.state.phase, Phase.CLOSING)

    def _free(self) -> None:
        """Close the engine. What an interrupt breaks off is done by the next call."""
        loop = self.loop
        self.state.phase = Phase.CLOSED  # a request that comes from now on ends when it is entered
        self.receive()
        self.end(list(self.jobs.values()))
        loop.in_flight = None
        self.loop.runner.eager.checks.release()
        self.executor.close()
        loop.runner.close()
        loop.adapters.close()
        loop.pools.free()
        self.executor.leave()
        self.state.phase = Phase.FREED
        for recorder in loop.recorders:
            with suppress(OSError):  # the recorder has logged it
                recorder.close()

    def forked(self) -> None:
        """In a forked process: recover from what other threads of the parent were doing."""
        self.lock.waiting.clear()
        if not self.lock.mine:
            self.state.stepping = False
            self.state.torn = True
            self.loop.runner.eager.unplug()
        self.executor.forked()


class Driver:
    """An engine's loop, and who drives it: one step at a time, whoever asks.

    Handles keep it, and it keeps all that their requests need.
    """

    def __init__(self, books: Books, arithmetic: Callable[[], AbstractContextManager[None]]) -> None:
        """arithmetic: in what every step computes."""
        self.books = books
        self.lock, self.state, self.settle = books.lock, books.state, books.settle
        self.loop = books.loop
        self.memory = books.memory
        self.model = self.loop.runner.eager.model
        self.checks = self.loop.runner.eager.checks
        self.undelivered: list[Output] = []
        """Outputs of requests that ended between two steps."""
        self.background: Background | None = None
        self._starting = fork_safe_lock()
        self._arithmetic = arithmetic
        self._training = self.model.training
        self._stale = False
        """True while blocks of other weights may still be there, after an interrupt."""

    # ---- who drives

    @property
    def driven(self) -> bool:
        """True while a thread drives: one was started, and it has neither ended nor been stopped."""
        thread = self.background
        return thread is not None and not thread.over and not thread.halted

    @property
    def _other_thread_drives(self) -> bool:
        thread = self.background
        return thread is not None and not thread.own and not thread.halted

    def start(self) -> None:
        """Let a thread drive from now on."""
        self.books.require_open()
        with self._starting:
            if self.background is None or self.background.over or self.background.halted:
                self._begin_thread()
            if self.background is not None:
                self.background.wake()
        if self.state.phase >= Phase.CLOSING:  # by a signal handler, meanwhile
            self.stop()

    def _begin_thread(self) -> None:
        self.checks.mark_dirty()
        thread = Background(self.turn, input_device(self.model))
        try:
            thread.begin()
            self.background = thread
        except BaseException:
            thread.stop(wait=False)
            raise

    def stop(self) -> None:
        """Stop the thread after its current step."""
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
        if not self.state.stepping:
            self._end_all_cancelled()
        with suppress(WeightsChanged):  # the requests concerned have ended
            self.check_after_steps()

    def turn(self) -> bool:
        """A step, if there is anything to do; the answer is whether there may be more. The engine's thread
        calls it.
        """
        self.lock.give_way()
        return self._take_turn()

    @in_turn
    def _take_turn(self) -> bool:
        if self.state.closed:
            if self.background is not None:
                self.background.stop(wait=False)
            return False
        self.books.receive()
        if self.state.paused:
            self._end_all_cancelled()
        if self.state.paused or not self.books.busy:
            self.check_after_steps()
            return False
        try:
            self.advance()
        except BaseException:
            with suppress(WeightsChanged):
                self.check_after_steps()
            raise
        return True

    def drive_for(self, job: Job, each: bool = False, timeout: float | None = None) -> None:
        """Take steps of all requests until a job has ended, or has `each` increment, or the time is over; or
        wait for the thread.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self.drive([job], lambda: (each and bool(job.queue)) or (end is not None and time.monotonic() >= end))
        thread = self.background
        if thread is not None and job.output is None:
            thread.wait(job, each, None if end is None else end - time.monotonic())

    def drive(
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
            self.run_steps(steps)

    @in_turn
    def _advance_for(self, job: Job) -> bool:
        """Take a step for a job that has not ended meanwhile: true if any has ended in it."""
        return job.output is None and bool(self.advance())

    def run_steps(self, steps: Callable[[], T]) -> T:
        """Take steps: their answer. The caller may change the model around them, so it is marked dirty on
        entry and checked on exit.
        """
        self.checks.mark_dirty()
        try:
            answer = restoring(steps)
        except BaseException:
            with suppress(WeightsChanged):
                self.check_after_steps()
            raise
        self.check_after_steps()
        return answer

    async def arrival(self, job: Job, each: bool = False) -> None:
        """Wait for the end of a job, or for `each` increment, without holding up the event loop."""
        thread = self._thread()
        if thread is None or thread.own:
            raise RuntimeError("a step of an engine cannot wait for a request of the same engine")
        await thread.arrival(job, each)
        if thread.over and job.output is None:
            raise RuntimeError(
                "the engine's thread was stopped while a coroutine awaited a request; start() continues"
            )

    def watch(self, job: Job, wake: Wake, each: bool) -> None:
        """Have `wake` called at the end of a job or of the engine's thread, and at `each` increment."""
        thread = self._thread()
        if thread is not None:
            thread.listen(job, wake, each)

    def _thread(self) -> Background | None:
        if self.background is None:
            self.start()
        return self.background

    def unwatch(self, job: Job, wake: Wake) -> None:
        """Call `wake` no more."""
        if self.background is not None:
            self.background.unlisten(job, wake)

    def cancel(self, job: Job) -> None:
        """End a job at once; where a thread drives, after the step that runs."""
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
        self.books.receive()
        if (
            job.output is None and not self.state.stepping
        ):  # else it is in the middle of a step, and ends with the next one
            self.books.end([job])
        self.raise_interrupts()

    def queue(self, job: Job, request: Request) -> None:
        """Put a request into the inbox."""
        job.number = request.number
        self.books.inbox.append((job, request))
        thread = self.background
        if thread is None or self.state.closed:  # an engine that was closed meanwhile ends it
            self.books.receive_in_turn()
        else:
            thread.wake()

    # ---- steps

    def step(self) -> list[Output]:
        """One step of all requests: what has ended in it. Without work it does nothing."""
        self.lock.give_way()
        return self.run_steps(self.advance_in_turn)

    def advance(self) -> list[Output]:
        """A step of all requests, by a caller that has the lock: what has ended since the step before."""
        state = self.state
        if state.phase in NO_STEPS or state.stepping or not self.books.executor.leads:
            self._refuse_step()
        if self.books.inbox:
            self.books.receive()
        loop = self.loop
        adapters, scheduler = loop.adapters, loop.scheduler
        state.stepping = True
        try:
            cancelled = [job for job in list(self.books.jobs.values()) if job.cancelled]
            if cancelled:
                self.undelivered += self.books.end(cancelled)
            if adapters.leaving:
                self.books.remove_idle_adapters()
            admits = bool(scheduler.waiting or scheduler.preempted) and scheduler.may_admit
            fresh = adapters.fresh and adapters.present
            must_check = admits or fresh or not scheduler.running or self._training != self.model.training
            if not self.books.jobs and scheduler.prefixes.snapshots.idle:
                loop.in_flight = None  # it has only tokens too many, and no state that others may go on from
            else:
                with self.memory.lock:  # no other forward is in progress then
                    if must_check or not self.checks.skip(loop.model_check.memory):
                        self.check_before_step()
                    with self._arithmetic():
                        self.undelivered += self.books.atomically(loop.step)
            if adapters.leaving:
                self.books.remove_idle_adapters()
        finally:
            state.stepping = False
        if loop.interrupted:
            self.raise_interrupts()
        ended = self.undelivered
        self.undelivered = []
        return ended

    advance_in_turn = in_turn(advance)
    """The same by any caller."""

    def _refuse_step(self) -> NoReturn:
        """Raise the reason why no step can be taken now."""
        self.books.executor.require_lead()
        self.books.require_open()
        if self.state.paused:
            raise RuntimeError("the engine is paused; call resume() first")
        raise RuntimeError(
            "a step is running already: a processor, criterion or signal handler must not drive the engine"
        )

    def warm_up(self) -> bool:
        """Capture the steps that many requests will need, until a request comes: true once none is
        missing.
        """
        self.books.require_open()
        self.books.executor.require_lead()
        if not self.loop.runner.captures:
            return True
        missing = -1
        while not self.books.busy and not self.books.inbox:
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
        if self.state.phase in NO_STEPS or self.state.stepping or self.books.busy or self.books.inbox:
            return -1
        with self.memory.lock:
            self.check_before_step()
            with self._arithmetic():
                left = self.books.atomically(self.books.executor.warm_up)
        self.checks.release()
        return left

    @in_turn
    def between_steps(self, act: Callable[[], T]) -> T:
        """Compute something with the model between two steps: its answer."""
        with self.memory.lock, self._arithmetic():
            return act()

    def raise_interrupts(self) -> None:
        """Raise the interrupt that a request has ended with, unless this is the engine's thread."""
        own = self.background is not None and self.background.own
        while self.loop.interrupted:
            error = self.loop.interrupted.popleft().interrupt()
            if error is not None and not own:
                raise error

    def _end_all_cancelled(self) -> None:
        self.books.end([job for job in list(self.books.jobs.values()) if job.cancelled])

    # ---- the model is what it was

    def check_before_step(self) -> None:
        """Check that cached blocks match the current weights: fully when idle, else cheaply. In training mode
        also that no dropout is active.
        """
        loop, adapters = self.loop, self.loop.adapters
        running = len(loop.scheduler.running)
        let_changes_wait()
        if self.model.training and not (self._training and running):
            require_no_dropout(self.model)
        self._training = self.model.training
        if not running:
            adapters.refresh()
            self.books.atomically(self._drop_stale_blocks)
        else:
            look = partial(loop.model_check.require_untouched, running)
            if self.checks.unseen:
                self.books.atomically(look)
            else:
                look()
            if loop.model_check.adapters_moved:
                loop.model_check.adapters_moved = False
                self.books.atomically(adapters.follow_model)
            if adapters.present:
                self.undelivered += self.books.atomically(loop.end_changed_adapters)
        if not running or adapters.present:
            self.undelivered += self.books.atomically(loop.end_lost)
            self.books.atomically(loop.renew_adapters)

    def _drop_stale_blocks(self) -> None:
        """Drop blocks and media of other weights. What an interrupt keeps, the next check drops."""
        stale = self._stale
        self._stale = True
        if self.books.executor.changed(self.loop.model_check.changed) or stale:
            self.loop.scheduler.prefixes.snapshots.drop()
            self.loop.pools.forget()
            self.loop.forget_media()
            self.loop.runner.check_captures()
            self.loop.adapters.refresh()  # some have been made of the weights as they were
        self._stale = False

    @in_turn
    def check_after_steps(self) -> None:
        """Check the model once its caller, who may change it, goes on."""
        if self.state.stepping:
            return  # the current step checks by itself
        try:
            with self.memory.lock:
                self.books.atomically(self.loop.check_model)
        finally:
            self.checks.release()
        if not self.books.busy:
            for recorder in self.loop.recorders:
                recorder.rest()

    # ---- the end

    def close(self) -> None:
        """End what runs with "abort", the thread if there is one, and give the pools back; from within a step
        at its end.
        """
        self.books.ask_to_close()
        if self.state.phase is Phase.FREED:
            self.stop()
            self.raise_interrupts()


def require_no_dropout(model: torch.nn.Module) -> None:
    """Raise if training mode makes answers random, or drops the cache."""
    reason = why_random(model) or why_dropped(model)
    if reason is not None:
        raise RuntimeError(reason)
