"""The model in other hands: pauses, new weights, sleep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import torch

from ..model.thread_state import restoring
from .driver import Driver
from .handle import Handle, cancel_all
from .state import Phase, in_turn
from .weights import KeptBlocks, PauseMode, check_choice, load_into, on_devices
from .worker.check_policy import WeightsChanged


class Lifecycle:
    """Pauses an engine and lets it continue: for changes of the model between its steps."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lock = driver.lock
        self.state = driver.state
        self.settle = driver.settle
        self.counts: Counter[str] = Counter(weights_changed=0, kv_kept=0)
        self._asleep: list[tuple[torch.Tensor, torch.device]] | None = None
        """The model's weights while they are in the host's memory, and where they belong."""

    def pause(self, mode: PauseMode) -> None:
        """Release the model until `resume`."""
        check_choice("mode", mode, PauseMode)
        self._require_lead()
        if mode == "keep":
            self.driver.books.executor.require_alone("pause(mode='keep')")
        self._require_between_steps()
        if mode in ("wait", "abort"):
            self._finish_all(abort=mode == "abort")
        self._pause(mode)

    def _require_lead(self) -> None:
        self.driver.books.require_open()
        self.driver.books.executor.require_lead()

    def _require_between_steps(self) -> None:
        if self.state.stepping and self.lock.mine:
            raise RuntimeError(
                "a step is running: a processor, criterion or signal handler must not pause the engine"
            )

    def _finish_all(self, abort: bool) -> None:
        """Wait for the end of all requests that have come, or end them."""
        driver = self.driver
        jobs = [*driver.books.jobs.values(), *[job for job, _ in list(driver.books.inbox)]]
        handles = [Handle(job, driver) for job in jobs if job.output is None]
        if abort:
            cancel_all(handles)
        if not self.state.paused:
            for handle in handles:
                handle.result()

    @in_turn
    def _pause(self, mode: PauseMode) -> None:
        self._require_between_steps()
        driver = self.driver
        with suppress(WeightsChanged):  # the requests concerned have ended
            driver.check_after_steps()
        with driver.books.memory.lock:
            driver.books.atomically(self._preempt_all if mode != "keep" else self._apply_in_flight)
        if self.state.phase is Phase.OPEN:
            driver.books.executor.pause()
            self.state.phase = Phase.PAUSED
        self.state.mode = mode
        driver.raise_interrupts()

    def _apply_in_flight(self) -> None:
        """Apply the tokens of the last step; blocks stay."""
        self.driver.undelivered += self.driver.loop.finish_in_flight()

    def _preempt_all(self) -> None:
        """Apply the tokens of the last step, and free every block."""
        self._apply_in_flight()
        loop = self.driver.loop
        for group in list(loop.scheduler.running):
            loop.scheduler.preempt(group, swap=False)
        for group in loop.scheduler.preempted:
            if group.swapped:
                loop.scheduler.begin_again(group)
        loop.forget_media()

    def resume(self) -> None:
        """Continue. Blocks that were kept are dropped if the weights have changed."""
        for tensor, device in self._asleep or ():
            tensor.data = tensor.data.to(device)
        if self._asleep:
            self.driver.loop.runner.fuse_projections()
        self._asleep = None
        self.state.sleep_level = 0
        self._resume()
        if self.driver.background is not None:
            self.driver.start()

    @in_turn
    def _resume(self) -> None:
        if not self.state.paused:
            return
        driver, loop = self.driver, self.driver.loop
        if self.state.mode == "keep":
            with driver.books.memory.lock:
                names = {name for group in driver.books.jobs for name in group.request.adapter}
                rewritten = loop.model_check.rewritten() or loop.adapters.contents.rewritten(names)
                if loop.scheduler.begun and rewritten:
                    driver.books.atomically(self._preempt_all)
        self.state.phase = Phase.OPEN

    @in_turn
    def weights_changed(self, kv: KeptBlocks) -> None:
        """Note that the weights are others, however they were written."""
        check_choice("kv", kv, KeptBlocks)
        self._require_lead()
        driver, loop = self.driver, self.driver.loop
        if kv == "keep":
            driver.books.executor.require_alone('weights_changed(kv="keep")')
        if driver.books.jobs and not self.state.paused:
            raise RuntimeError("requests are running; call pause() before the weights change")
        with driver.books.memory.lock:
            if kv == "drop":
                driver.books.atomically(self._preempt_all)
                driver.books.atomically(loop.pools.forget)
            else:
                loop.adapters.keep(loop.scheduler.begun)
            loop.forget_media()
            driver.books.executor.look_now(self._look)
        self.counts["weights_changed"] += 1
        self.counts["kv_kept"] += kv == "keep"

    def _look(self) -> None:
        self.driver.loop.model_check.changed(whole=True)
        self.driver.loop.runner.check_captures()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors into the model's weights of these names, in place; the names that were loaded."""
        paused = self.state.paused
        executor = self.driver.books.executor
        load = partial(executor.load, partial(load_into, self.driver.model, weights))
        if not executor.leads:
            return restoring(load)
        executor.require_paused(paused)
        if not paused:
            self.pause("recompute")
        try:
            return restoring(load)
        finally:
            self.weights_changed("drop")
            if not paused:
                self.resume()

    def sleep(self, level: int) -> None:
        """Give memory back until `resume`."""
        if level not in (1, 2):
            raise ValueError(f"level={level!r} is not 1 (the pools) or 2 (the weights, too)")
        self.driver.books.executor.require_alone("sleep()")
        if not self.state.paused or self.state.mode == "keep":
            self.pause("recompute")
        self._drop_pools()
        self.state.sleep_level = max(self.state.sleep_level, level)
        if level == 2:
            # Before any moves: resume() knows it all.
            self._asleep = self._asleep or on_devices(self.driver.model)
            for tensor, _ in self._asleep:
                tensor.data = tensor.data.cpu()

    @in_turn
    def _drop_pools(self) -> None:
        with self.driver.books.memory.lock:
            for group in self.driver.loop.pools.groups.values():
                group.give_back()
