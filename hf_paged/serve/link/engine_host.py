"""The engine's side of a server: it takes requests from a connection and writes what is new."""

from __future__ import annotations

import logging
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ...engine import Engine, Handle, Output
from ...engine.outputs.output import NewTokens
from ...engine.requests.prompts import words_of
from ...engine.worker.executor import use_device
from ...model.adapters.files import require_folder
from ...model.registry import invalidate
from ...trace import Step, encode_header
from .model_facts import ModelFacts
from .processors import Processors
from .weights import load
from .wire import CallResult, Cancel, End, EngineCall, Failure, News, Progress, Submit, frame, messages

logger = logging.getLogger("hf_paged")

EVERY = 0.1
"""The least seconds between two changes of the map."""
MOST_STEPS = 64
"""Steps of the map that wait for a server which does not read. With one more its map begins anew."""
CALLERS = {"": 4, "grammar": 4, "pause": 64, "load_weights": 1}
"""Calls that run at once. Some wait for a step; the named ones take longer and have their own threads."""
OTHER = -1
"""No ticket."""
IDLE = 1.0
"""Seconds after which the writer checks the engine's thread by itself, and writes that this process runs."""
WARM = 0.25
"""Seconds between two looks whether the engine has nothing to do and may capture steps."""
DROPPING = frozenset({"wake_up", "resume", "weights_changed", "load_weights"})
"""Calls behind which captured steps may be gone: what is paused may have slept."""


@dataclass
class _HostedRequest:
    """A request of the server's."""

    handle: Handle
    scored: bool
    """True if the logprobs of its prompt are still to be sent."""


class EngineHost:
    """An engine for a server at the other end of a connection, to which it belongs from then on.

    The engine's thread notes which requests have news; another one writes these in one message. While the
    server does not take it, tokens stay in the engine: nothing grows beyond the answers themselves.
    """

    def __init__(self, engine: Engine, tokenizer: Any, connection: socket.socket) -> None:
        """tokenizer: the model's, or its processor."""
        tokenizer = words_of(tokenizer)
        self.facts = ModelFacts.of(engine, tokenizer)
        self._engine = engine
        self._connection = connection
        self._processors = Processors(tokenizer, self.facts.scores, self.facts.ends, engine.model.dtype)
        self._requests: dict[int, _HostedRequest] = {}
        self._answers: deque[CallResult] = deque()
        self._submitting = threading.Lock()
        """Held from the submission of a request to its answer: what follows is sent behind it."""
        self._steps: deque[Step] = deque()
        self._lag = False
        self._recorder: Any = None
        self._signals: deque[int] = deque()
        self._cold = threading.Event()
        """Set where captured steps may be missing."""
        self._cold.set()
        self._notes: SimpleQueue[int] = SimpleQueue()
        """Tickets of requests with news, which may be there several times, and OTHER for other news."""
        self._over = False
        self._calls: dict[str, Callable[..., Any]] = {
            "stats": engine.stats,
            "adapters": engine.adapters,
            "add_adapter": partial(add_folder, engine),
            "remove_adapter": engine.remove_adapter,
            "grammar": self._processors.compile,
            "prepare": self._processors.prepare,
            "pause": engine.pause,
            "resume": engine.resume,
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
            "weights_changed": engine.weights_changed,
            "forget": lambda: invalidate(engine.model),
            "load_weights": partial(load, engine),
            "watch": self._watch,
            "unwatch": self._unwatch,
        }

    def run(self) -> None:
        """Serve until the other end closes the connection; then close the engine."""
        writer = threading.Thread(target=self._write, name="hf_paged news", daemon=True)
        warm_up = threading.Thread(target=self._warm_up, name="hf_paged warm-up", daemon=True)
        callers = {name: ThreadPoolExecutor(most, f"hf_paged calls {name}") for name, most in CALLERS.items()}
        try:
            self._engine.start()
            self._connection.sendall(frame(self.facts))
            writer.start()
            warm_up.start()
            for message in messages(self._connection):
                self._take(message, callers)
        except ConnectionError:  # the server has ended before it had the facts
            pass
        finally:
            self._over = True
            self._ring()
            self._cold.set()
            for each in callers.values():
                each.shutdown(wait=False, cancel_futures=True)
            self._engine.close()
            if warm_up.is_alive():  # a thread that frees tensors while the process ends is an abort
                warm_up.join(timeout=5)
            self._connection.close()

    def pass_signal(self, number: int) -> None:
        """Have the server act on a signal. A signal handler may call it, in the middle of anything."""
        self._signals.append(number)
        self._ring()

    # ---- what the server asks

    def _take(self, message: Any, callers: dict[str, ThreadPoolExecutor]) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            request = self._requests.get(message.ticket)
            if request is not None:
                request.handle.cancel()
        else:
            callers.get(message.name, callers[""]).submit(self._call, message)

    def _submit(self, asked: Submit) -> None:
        with self._submitting:
            try:
                keywords = self._processors.keywords(asked.keywords, len(asked.ids))
                handle = self._engine.submit(list(asked.ids), **keywords)
            except Exception as error:  # whatever it is, the client gets it
                self._answers.append(CallResult(asked.ticket, failure=Failure.of(error)))
                self._ring()
                return
            output = handle.output
            if output is not None and output.error is not None:
                refused = output.finish_reason == "refused"
                self._answers.append(CallResult(asked.ticket, failure=Failure.of(output.error, refused)))
                self._ring()
                return
            self._answers.append(CallResult(asked.ticket, handle.number))
        self._requests[asked.ticket] = _HostedRequest(handle, "prompt_logprobs" in keywords)
        # The engine's thread calls it for each token: no line of Python runs there.
        note = partial(self._notes.put, asked.ticket)
        handle.watch(note, asked.each)
        if asked.each or handle.done:  # what came before is not announced
            note()

    def _call(self, asked: EngineCall) -> None:
        try:
            answer = CallResult(asked.ticket, self._calls[asked.name](*asked.arguments))
        except Exception as error:  # the caller gets it
            answer = CallResult(asked.ticket, failure=Failure.of(error))
        self._answers.append(answer)
        self._ring()
        if asked.name in DROPPING:
            self._cold.set()

    def _warm_up(self) -> None:
        """The thread that has steps captured while the engine is idle; no other thread has the model."""
        use_device(self._engine.model.device)
        try:
            while self._cold.wait() and not self._over:
                self._cold.clear()
                while not self._over and not self._engine.warm_up():
                    time.sleep(WARM)
        except Exception:  # requests get what is wrong with the model
            logger.info("idle capture failed; steps are captured when they first occur", exc_info=True)

    # ---- the map

    def _watch(self) -> tuple[Any, dict[str, Any]]:
        """Record the map from now on: its kinds of layers, and the header of a trace."""
        self._unwatch()
        self._steps.clear()
        self._lag = False
        self._recorder = self._engine.watch(self._report, EVERY)
        header = self._recorder.header
        return header.kinds, encode_header(header)

    def _unwatch(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _report(self, step: Step) -> None:
        """In the engine's thread."""
        if self._lag or len(self._steps) >= MOST_STEPS:
            self._lag = True
            return
        self._steps.append(step)
        self._ring()

    # ---- news

    def _ring(self) -> None:
        """There is other news than of requests."""
        self._notes.put(OTHER)

    def _write(self) -> None:
        """The thread that writes what is new, as often as the server takes it."""
        try:
            self._write_news()
        finally:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # the reader ends, and so does the server

    def _write_news(self) -> None:
        driven = True
        due = 0.0
        while not self._over:
            tickets = self._noted()
            before = driven
            driven = self._engine.driven
            news = self._news(tickets, driven)
            now = time.monotonic()
            if not any(news[:5]) and not news.signals and driven == before and now < due:
                continue
            due = now + IDLE
            try:
                self._connection.sendall(frame(news))
            except OSError:  # the server has closed it
                return

    def _noted(self) -> dict[int, None]:
        """The tickets that were noted; without any after a while."""
        notes = self._notes
        try:
            tickets = {notes.get(timeout=IDLE): None}
        except Empty:
            return {}
        for _ in range(notes.qsize()):
            tickets[notes.get()] = None
        return tickets

    def _news(self, tickets: dict[int, None], driven: bool) -> News:
        lag = self._lag
        steps = _emptied(self._steps)
        with self._submitting:
            answers = _emptied(self._answers)
        tokens = array("q")
        progress = []
        for ticket in tickets:
            request = self._requests.get(ticket)
            if request is None:
                continue
            output = request.handle.output  # read first: the last token comes before it
            new = request.handle.read_tokens()
            if output is None and len(new) == 1 and _plain(request, new[0]):
                tokens.extend((ticket, new[0].answer, new[0].token_ids[0]))
            elif new or output is not None:
                progress.append(self._progress(ticket, request, new, output))
        return News(answers, tokens, progress, steps, lag, driven, _emptied(self._signals))

    def _progress(
        self, ticket: int, request: _HostedRequest, new: list[NewTokens], output: Output | None
    ) -> Progress:
        """Progress of a request beside a token."""
        scores = request.handle.prompt_logprobs if request.scored else None
        if scores is not None:
            request.scored = False
        if output is not None:
            del self._requests[ticket]
        return Progress(ticket, new, scores, None if output is None else End.of(output))


def add_folder(engine: Engine, name: str, folder: str) -> None:
    """Let requests name the adapter in a folder of this machine."""
    require_folder(folder, lambda: engine.closed)
    engine.add_adapter(name, folder)


def _plain(request: _HostedRequest, new: NewTokens) -> bool:
    """True if new tokens are one, and there is nothing else to say about it."""
    return (
        len(new.token_ids) == 1 and new.finish_reason is None and new.logprobs is None and not request.scored
    )


def _emptied(notes: deque[Any]) -> list[Any]:
    """The items there now, taken out; another thread may append meanwhile."""
    return [notes.popleft() for _ in range(len(notes))]
