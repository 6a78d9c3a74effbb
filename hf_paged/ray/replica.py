"""One replica: an engine with the server's own application, called by a gateway instead of a socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from starlette.types import Message, Scope

from ..cli import serve as cli
from ..cli.arguments import source_of
from ..serve import dev
from ..serve.app import make_app
from ..serve.http import logs
from ..serve.link.engine_client import EngineClient
from ..serve.openai.service import Service
from ..serve.server import tuned
from . import engine_process
from .autoscaling import FUTURE_PEAK, ROWS
from .flags import namespace

log = logging.getLogger("hf_paged.ray")


class HttpCall(NamedTuple):
    """An HTTP request as it travels to a replica: its ASGI scope, its body, and the names of its prompt's
    blocks, by which it is routed.
    """

    scope: Scope
    body: bytes
    digests: tuple[bytes, ...]


class Replica:
    """The server's application over an engine of its own, for Ray Serve.

    Requests come by `answer` and not by a port. An update of weights waits until the requests before it have
    ended, and those that come meanwhile wait for it: an answer is by one version of the weights.
    """

    async def __init__(self, options: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """options: a model and flags of `hf-paged serve`, as `namespace` takes them."""
        given = namespace(options)
        logs.set_up(given.log_level, given.log_format)
        self._running = AsyncExitStack()
        self._service = await asyncio.to_thread(_service, options, given)
        self._blocks = 0
        self._weights: str | None = None
        self._adapters: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._updated = asyncio.Event()
        self._updated.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0
        app = make_app(self._service)
        self._app = app
        self._running.enter_context(tuned())
        await self._running.enter_async_context(app.router.lifespan_context(app))
        while self._service.admission.state == "starting":
            await asyncio.sleep(0.05)
        await self.check_health()
        usage = (await self._service.engine.call("stats"))["blocks"].values()
        self._blocks = min(each["total"] for each in usage)

    async def __del__(self) -> None:
        """Ray Serve calls it when all requests have ended."""
        if hasattr(self, "_running"):
            await self._running.aclose()

    # ---- requests

    async def answer(self, call: HttpCall) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of the response, those that are there at once in one list. A caller that stops
        reading is a client that has left.
        """
        while not self._updated.is_set():
            await self._updated.wait()
        self._under_way += 1
        self._idle.clear()
        exchange = _Exchange(call.body, lambda: self._computes)
        task = asyncio.create_task(self._respond(call.scope, exchange))
        self._tasks.add(task)  # it ends by itself, also behind a caller that has left
        task.add_done_callback(self._ended)
        try:
            while messages := await exchange.messages():
                if exchange.broken:
                    self._end()
                yield messages
            await task
        finally:
            exchange.leave()

    def _end(self) -> None:
        """End this process, whose engine has stopped: until the next health check it would answer all that
        comes with an error. A replica that has died is asked nothing.
        """
        log.error("the engine has stopped, and its replica ends")
        os._exit(1)

    @property
    def _computes(self) -> bool:
        return self._service.engine.driven and not self._service.engine.lost

    async def _respond(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.end()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    # ---- updates

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Bring weights and adapters to what `user_config` of the deployment says.

        weights: a folder or file of safetensors, read into the model in place. adapters: folders by name;
        those that were given before and are not given any more leave with their last request.
        """
        wanted = dict(user_config or {})
        weights = wanted.pop("weights", None)
        adapters = wanted.pop("adapters", None) or {}
        if wanted:
            raise ValueError(f"user_config has {sorted(wanted)}, expected weights or adapters")
        if weights != self._weights:
            await self._load_weights(weights)
        for name, path in adapters.items():
            if self._adapters.get(name) != path:
                await self._service.adapters.load(name, path, in_place=True)
        for name in self._adapters.keys() - adapters.keys():
            self._service.adapters.unload(name)
        self._adapters = dict(adapters)

    async def _load_weights(self, path: str | None) -> None:
        if path is None:
            raise ValueError(
                f"user_config has no weights any more and those of {self._weights!r} are loaded; give the "
                "folder of the weights to return to"
            )
        files = dev.weight_files(path)
        self._updated.clear()
        try:
            await self._idle.wait()
            await self._service.engine.call("load_weights", files)
        except BaseException:
            self._service.admission.state = "failed"  # some tensors may be new: others answer what waits here
            raise
        finally:
            self._updated.set()
        self._weights = path

    # ---- what Ray Serve asks

    async def check_health(self) -> None:
        """Raise if the replica must be replaced."""
        if not self._computes or self._service.admission.state == "failed":
            raise RuntimeError("the engine has stopped after an error; its log has the reason")

    def record_routing_stats(self) -> dict[str, Any]:
        """The blocks of its pool: how much of what it was sent the router takes it to hold."""
        return {"blocks": self._blocks}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How full its requests are going to make it."""
        stats = await self._service.engine.call("stats")
        unfinished = stats["waiting"] + stats["running"] + stats["preempted"]
        return {
            FUTURE_PEAK: stats["future_peak"],
            ROWS: unfinished / self._service.engine.facts.sequences,
        }


class _Exchange:
    """The two ends of one request between the application and its caller."""

    def __init__(self, body: bytes, computes: Callable[[], bool]) -> None:
        """computes: whether the engine does."""
        self.broken = False
        """True once something was said after the engine had stopped."""
        self._computes = computes
        self._body: bytes | None = body
        self._unread: list[Message] = []
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._over = False

    async def receive(self) -> Message:
        """The body, and then the end of the connection."""
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take a message of the application."""
        self.broken = self.broken or not self._computes()
        self._unread.append(message)
        self._news.set()

    async def messages(self) -> list[Message]:
        """Those since the last call; empty at the end."""
        while not self._unread and not self._over:
            self._news.clear()
            await self._news.wait()
        found = self._unread
        self._unread = []
        return found

    def leave(self) -> None:
        """The caller is gone."""
        self._gone.set()

    def end(self) -> None:
        """The application has answered."""
        self._over = True
        self._news.set()


def _service(options: Mapping[str, Any], given: Any) -> Service:
    """The service of a new engine."""
    source = source_of(given)
    tokenizer = source.load_processor()
    template = cli.chat_template_of(given, tokenizer)
    response_template = cli.response_template_of(given)
    connection, process = engine_process.start(options)
    try:
        client = EngineClient(connection)
    except (EOFError, ConnectionError):
        code = process.wait()
        raise RuntimeError(
            f"the engine's process ended with exit code {code} before it was ready; see this replica's log"
        ) from None
    return Service.of(client, tokenizer, cli.server_options(given, source.name), template, response_template)
