"""HTTP in a process of its own, so that it takes nothing of the interpreter in which the engine computes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

from ..engine import Engine
from .http import logs
from .http.options import ServerOptions
from .link.engine_client import EngineClient
from .link.engine_host import EngineHost
from .link.wire import first_message, frame
from .openai.service import Service
from .server import run, tuned

LAST_SECONDS = 15.0
"""For the process to end behind its connection."""


class HttpSpec(NamedTuple):
    """Arguments of the process of HTTP.

    tokenizer: the model's, or its processor. template: how chats are written, instead of its chat template.
    response_template: how answers are read, instead of its response template.
    """

    options: ServerOptions
    tokenizer: Any
    template: str | None = None
    response_template: dict[str, Any] | None = None
    log_level: str = "info"
    log_style: logs.Style = "auto"


class HttpProcess:
    """The process of HTTP, as that of the engine sees it. If one of the two ends, so does the other."""

    def __init__(self, spec: HttpSpec | None = None, fork: bool = False) -> None:
        """Start it: it waits for an engine. Without a spec it first waits for `begin`.

        fork: it has the imports of this process instead of its own. Only for a process of Linux with one
        thread that has computed nothing and has no CUDA context.
        """
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process: subprocess.Popen[bytes] | _Fork
            if fork:
                self._process = _Fork(self._connection, theirs)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's interrupt comes by way of this process, once
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        if spec is not None:
            self.begin(spec)

    def begin(self, spec: HttpSpec) -> None:
        """Have it prepare what it serves, while this process loads the model."""
        self._tokenizer = spec.tokenizer
        self._connection.sendall(frame(spec))

    def serve(self, engine: Engine) -> int:
        """Serve an engine until a signal comes, and close it: the exit code."""
        host = EngineHost(engine, self._tokenizer, self._connection)
        with tuned(), _signals(host.pass_signal):
            host.run()
        code = self.end()
        ended = self._process.wait(0)
        if ended < 0:
            print(f"hf-paged serve: the process of HTTP has ended with {ended}", file=sys.stderr)
        return code

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def end(self) -> int:
        """Close the connection, with which the process ends: its exit code."""
        with contextlib.suppress(OSError):  # it is closed
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            code = self._process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._connection.close()  # not earlier: a thread in `serve` would wait for a socket that is gone
        return code if code >= 0 else 128 - code


class _Fork(ForkProcess):
    """A copy of this process that runs `main`, with what is used of subprocess.Popen."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        super().__init__()
        self._ours = ours
        self._theirs = theirs
        self.start()

    def run(self) -> None:
        """In the copy."""
        os.setsid()  # a terminal's interrupt comes by way of the engine's process, once
        self._ours.close()  # the connection ends with the engine's process
        sys.exit(main(self._theirs.detach()))

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or the signal that ended it as a negative number."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0)
        return self.exitcode


@contextlib.contextmanager
def _signals(take: Callable[[int], None]) -> Iterator[None]:
    """Have signals taken by a function; those of other threads than the first are not there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda number, _: take(number)) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main(descriptor: int) -> int:
    """Run in the process: serve the engine at the other end of a connection. The answer is the exit code."""
    for each in (signal.SIGINT, signal.SIGTERM):  # they come by way of the engine's process
        signal.signal(each, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    try:
        spec: HttpSpec = first_message(connection)
        write_logs = logs.set_up(spec.log_level, spec.log_style)
        client = EngineClient(connection)
    except (EOFError, ConnectionError):  # the engine's process has ended, and its log has the reason
        return 1
    try:
        return run(Service.of(client, spec.tokenizer, spec.options, spec.template, spec.response_template))
    finally:
        write_logs()  # a fork leaves out what an interpreter does at its end


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
