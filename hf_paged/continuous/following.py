"""The manager of continuous batching on ranks that follow: rank 0's requests, and its results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .engines import begin_on
from .manager import EngineBatchingManager

logger = logging.getLogger("hf_paged")


class FollowingBatchingManager(EngineBatchingManager):
    """The manager of `model.init_continuous_batching()` on other ranks than 0 of a tensor-parallel model.

    As with transformers' own, requests are rank 0's and results come on every rank. Rank 0's manager decides
    when this one stops.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_tp_driver = False
        self._stopped = False
        """True once rank 0's manager has stopped."""
        self._pause_lock = threading.Lock()
        self._paused = threading.Semaphore(0)
        self._resumed = threading.Semaphore(0)

    def _start_engine(self) -> None:
        self._stopped = False
        begin_on(self.engine, self, alone=True)  # ranks make their engines together

    def add_request(self, *_: Any, **__: Any) -> None:
        """Nothing: rank 0's manager takes requests."""

    def cancel_request(self, request_id: str) -> None:
        """Nothing: rank 0's manager cancels requests."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Wait for rank 0's pause, and hold this rank's part of the requests meanwhile."""
        self._require_running()
        with self._pause_lock:
            if not self._pausing:
                while not self._paused.acquire(timeout=1):
                    self._require_running()
            self._pausing.append(threading.get_ident())
        try:
            yield
        finally:
            with self._pause_lock:
                self._pausing.remove(threading.get_ident())
                if not self._pausing:
                    self._resumed.release()

    def _deliver_all(self) -> None:
        """Compute what rank 0 schedules and deliver what it delivers, until its manager has stopped."""
        status = self.background_thread_status
        try:
            while self.engine.follow(self._take) and not self._stopped:
                self._paused.release()
                self._resumed.acquire()
            if not self._stopped:
                raise RuntimeError("rank 0's engine was closed while its manager ran; start both again")
        except Exception as error:
            logger.exception("this rank's part of continuous batching has failed")
            status.record_fatal_error(error)
        finally:
            self.lease.give_back(self)
            status.mark_as_stopped()

    def _take(self, outputs: Any) -> None:
        if outputs is None:
            self._stopped = True
        else:
            self._route(outputs)
