"""The process of HTTP: sockets, signals, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import FrameType

import uvicorn

from .app import log, make_app
from .connection import Connection
from .http.options import ServerOptions
from .openai.service import Service

LAST_SECONDS = 2
"""For connections to be closed after the drain."""
THRESHOLDS = (1_000, 5, 1_000)
"""Of the collector's generations: a collection of the second one, of 5,000 objects, takes 10 ms at most. One
of all objects of 1,000 clients takes 0.2 s, so it comes once in some 60,000 requests: each leaves an object.
"""
COLLECT_SECONDS = 30.0
"""From one full collection while no request is under way to the next."""
SWITCH_SECONDS = 1e-3
"""After which a thread that computes gives the interpreter's lock to one that waits for it."""
FORCED = 130
"""The exit code after a second signal."""
CHAT = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 60},
)
TEXT = ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 60})
"""First requests, to a model with a chat template and to one without."""


class Server(uvicorn.Server):
    """uvicorn's server. The first SIGTERM or SIGINT begins the drain, a second one ends all at once. Signals
    come from the engine's process, to which they are sent.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0
        self._collected = time.monotonic()
        """When all garbage was collected, while no request was under way."""
        self._count = 0.0
        """How many requests had been answered then."""
        self._greeted = False
        super().__init__(_config(service))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. The model warms up meanwhile."""
        self._loop = asyncio.get_running_loop()
        self._service.engine.on_signal = lambda number: self.handle_exit(number, None)
        await super().startup(sockets)
        log.info("listening", extra={"url": self.url})

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes, on the Unix socket if the options name one."""
        with _unix_socket(self._service.options.uds) as own:
            super().run(own or sockets)

    @property
    def url(self) -> str:
        """Where the server listens."""
        options = self._service.options
        if options.uds is not None:
            return f"unix:{options.uds}"
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = self.servers[0].sockets[0].getsockname()[1]
        return f"{scheme}://{host}:{port}{options.root_path}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, after streams that would not end by themselves. Requests that are still
        answered then are cut off, and counted in one line of the log.
        """
        self._service.live.end()
        reports = logging.getLogger("uvicorn.error")
        reports.disabled = True  # it has a traceback for each request that is cut off
        cut = len(self.server_state.tasks) if self.force_exit else 0  # some end with their connections
        try:
            await super().shutdown(sockets)
            left = list(self.server_state.tasks)
            for task in left:
                task.cancel()
            if cut or left:
                log.warning("cut off", extra={"requests": max(cut, len(left))})
            if left:
                await asyncio.wait(left, timeout=LAST_SECONDS)
            if self.force_exit:
                await self.lifespan.shutdown()
        finally:
            reports.disabled = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave this process's signals as they are."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Act on a signal."""
        if self._drain is None and self._loop is not None and self.started:
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)
        else:
            if not self.should_exit:
                log.warning("ending at once", extra={"signal": signal.Signals(sig).name})
            self.exit_code = FORCED
            self.should_exit = True
            self.force_exit = True

    def _begin_drain(self, why: str) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drained(why))

    async def _drained(self, why: str) -> None:
        admission = self._service.admission
        self._service.live.end()
        seconds = self._service.options.limits.drain_seconds
        log.info("draining", extra={"signal": why, "in_flight": admission.in_flight, "seconds": seconds})
        await admission.drain(seconds)
        log.info("drained", extra={"in_flight": admission.in_flight})
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave the main loop."""
        if self._service.admission.state == "failed" or self._service.engine.lost:
            self.exit_code = 1
            self.should_exit = True
        if self._service.admission.state == "ready" and not self._greeted:
            self._greeted = True
            log.info(greeting(self.url, self._service.options, self._service.tokenizer.chats))
        self._collect_if_idle()
        return await super().on_tick(counter)

    def _collect_if_idle(self) -> None:
        """Collect what requests have left, while no request is under way."""
        count = self._service.metrics.http.total
        due = time.monotonic() - self._collected > COLLECT_SECONDS and count != self._count
        if due and not self._service.admission.in_flight:
            gc.collect()
            self._collected = time.monotonic()
            self._count = count


def greeting(url: str, options: ServerOptions, chats: bool) -> str:
    """The pages and a first request, for the log. chats: whether the model has a chat template."""
    path, body = CHAT if chats else TEXT
    words = ["curl", url + path, "-H", "content-type: application/json"]
    if options.uds is not None:
        words[1:2] = ["--unix-socket", options.uds, "http://localhost" + options.root_path + path]
    if options.api_keys or options.admin_api_keys:
        words += ["-H", "authorization: Bearer KEY"]
    request = shlex.join([*words, "-d", json.dumps(body)])
    pages = f"map of the blocks: {url}/ (in a browser); API: {url}/docs; " if options.uds is None else ""
    return f"{pages}first request: {request}"


def _config(service: Service) -> uvicorn.Config:
    options = service.options
    return uvicorn.Config(
        make_app(service),
        host=options.host,
        port=options.port,
        http=partial(Connection, service=service),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_SECONDS,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
    )


def run(service: Service) -> int:
    """Serve until a signal comes; the answer is the exit code."""
    server = Server(service)
    with tuned():
        server.run()
    return server.exit_code


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Settings of the interpreter under which the threads of a process hold each other up least.

    What is here stays to the end: a full collection that looks at all of torch's and the model's objects
    holds up every thread for a tenth of a second and more. One that looks at the requests of a thousand
    clients does so, too, so it comes while there are none, or after many objects.
    """
    thresholds = gc.get_threshold()
    interval = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        gc.unfreeze()


def require_address(options: ServerOptions) -> None:
    """ValueError if the server could not listen: to be known before a model is loaded."""
    if options.uds is not None:
        with _unix_socket(options.uds):
            return
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
            return  # a name may have an address that is not this machine's
        raise ValueError(
            f"the server cannot listen at --host {options.host} --port {options.port} ({error.strerror}); "
            "give an address of this machine and a free port, such as --port 0"
        ) from error


@contextlib.contextmanager
def _unix_socket(path: str | None) -> Iterator[list[socket.socket] | None]:
    """A socket in the file system that this user and group may use; None without a path."""
    if path is None:
        yield None
        return
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ValueError(f"--uds {path} is a file, not a socket; give another path")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(path)
            raise ValueError(f"--uds {path} is the socket of a server that runs; give another path")
        os.unlink(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o117)
    try:
        made.bind(path)
    finally:
        os.umask(mask)
    try:
        yield [made]
    finally:
        made.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
