"""A thread that drives an engine, and how others wait for it."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from .outputs.queue import OutputQueue, Wake
from .requests.job import Job
from .worker.executor import use_device


class Background:
    """The thread: it steps while there is work, sleeps when there is none, and ends with its engine.

    An error of a step ends it: all waiting callers get the error, and later ones too. It never keeps the
    interpreter alive.
    """

    def __init__(self, turn: Callable[[], bool], device: torch.device) -> None:
        self._turn_of_driver = weakref.WeakMethod(turn, self._left_alone)
        self._device = device
        self._awake: SimpleQueue[None] = SimpleQueue()
        """One entry for each notice of work: a queue that finalizers may write to."""
        self.halted = False
        """True once it begins no other step."""
        self.listeners: set[OutputQueue] = set()
        """Those of jobs that callers wait for: all are woken when the thread ends."""
        self._over = False
        self._process = os.getpid()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="hf_paged engine", daemon=True)

    def begin(self) -> None:
        """Start it, once."""
        atexit.register(self.stop)
        self.thread.start()

    @property
    def own(self) -> bool:
        """True in the thread itself."""
        return threading.current_thread() is self.thread

    @property
    def over(self) -> bool:
        """True once it has ended, or where it never ran: a fork copies no threads."""
        return self._over or self._forked

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def wake(self) -> None:
        """There is something to do."""
        self._awake.put(None)

    def stop(self, wait: bool = True) -> None:
        """Begin no other step, and wait for the end of the current one. A call from within a step does not
        wait.
        """
        self.halted = True
        self._awake.put(None)
        atexit.unregister(self.stop)
        if wait:
            self.thread.join()

    def _left_alone(self, _: object) -> None:
        """The engine is gone. Finalizers run at any point, so this only notes it."""
        self.halted = True
        self._awake.put(None)

    # ---- in the thread

    def _run(self) -> None:
        try:
            use_device(self._device)
            while not self.halted:
                self._awake.get()
                while not self._awake.empty():
                    self._awake.get()
                while not self.halted and self._turn():
                    pass
        except BaseException as error:  # an interrupt from within a processor is raised in the driver too
            self.error = error
        finally:
            self._over = True
            atexit.unregister(self.stop)
            for queue in self.listeners.copy():
                queue.wake()

    def _turn(self) -> bool:
        """The driver is referenced for a turn only, so that an otherwise unreferenced one can be
        collected.
        """
        turn = self._turn_of_driver()
        return turn is not None and turn()

    # ---- in other threads

    def wait(self, job: Job, each: bool, timeout: float | None = None) -> None:
        """Wait, for at most `timeout` seconds, for `each` increment or the end of a job or of the thread."""
        queue: SimpleQueue[None] = SimpleQueue()  # not an Event, whose lock a signal handler must not meet

        def wake() -> None:
            queue.put(None)

        try:
            self.listen(job, wake, each)
            if not self._ready(job, each):
                queue.get(timeout=None if timeout is None else max(0.0, timeout))
        except Empty:
            pass
        finally:
            self.unlisten(job, wake)
        self._raise_trouble(job)

    async def arrival(self, job: Job, each: bool) -> None:
        """The same for a coroutine; its event loop continues meanwhile."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed: there is no listener any more
                job.cancelled = True

        try:
            self.listen(job, wake, each)
            if not self._ready(job, each):
                await event.wait()
        finally:
            self.unlisten(job, wake)
        self._raise_trouble(job)

    def listen(self, job: Job, wake: Wake, each: bool) -> None:
        """Have `wake` called at the end of a job, or at `each` increment. A read after this call
        misses none.
        """
        (job.queue.readers if each else job.queue.waiters).add(wake)
        job.queue.listeners = self.listeners
        self.listeners.add(job.queue)
        if job.output is not None:  # its end may have come before
            self.listeners.discard(job.queue)

    def unlisten(self, job: Job, wake: Wake) -> None:
        job.queue.readers.discard(wake)
        job.queue.waiters.discard(wake)

    def _ready(self, job: Job, each: bool) -> bool:
        return self.over or job.output is not None or (each and bool(job.queue))

    def _raise_trouble(self, job: Job) -> None:
        if self.error is not None and job.output is None:
            what = str(self.error) or type(self.error).__name__
            raise RuntimeError(
                f"the engine's thread has stopped: {what}; when that is fixed, start() continues"
            ) from self.error
        if self._forked and job.output is None:
            raise RuntimeError(
                f"the engine's thread is in process {self._process}, from which this one was forked; make an "
                "engine here"
            )
