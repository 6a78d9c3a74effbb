"""The engine of a replica in a process of its own: Ray and HTTP take nothing of the interpreter in which it
computes. Of several ranks it is the first, and starts the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..cli import serve as cli
from ..cli.arguments import adapter_sources, source_of
from ..serve.http import logs
from ..serve.http.keys import Keys
from ..serve.link import ranks
from ..serve.link.engine_host import EngineHost
from ..serve.link.weights import load_what_was_sent
from ..serve.link.wire import first_message, frame
from ..serve.server import tuned
from .flags import namespace

log = logging.getLogger("hf_paged.ray")
LOADING_SECONDS = 2.0
"""For a rank to say what is wrong with the model or its options, where another has ended for that."""


def start(options: Mapping[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process: a connection for EngineClient, and the process, which ends with the connection."""
    size = namespace(options).tensor_parallel_size
    return _start(options, ranks.environment(0, size, ranks.free_port()) if size > 1 else os.environ)


def _start(
    options: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.engine_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    ours.sendall(frame(dict(options)))
    return ours, process


def main(descriptor: int) -> int:
    """Run in the process: serve the engine that its options describe until the other end closes."""
    connection = socket.socket(fileno=descriptor)
    wanted = first_message(connection)
    given = namespace(wanted)
    logs.set_up(given.log_level, given.log_format)
    source = source_of(given)
    options = cli.server_options(given, source.name)
    keys = Keys(options.api_keys, admin_keys=options.admin_api_keys)
    shares = cli.cache_shares(given.prefix_cache_share, keys.names)
    modules = adapter_sources(given.lora_modules, options.names)
    size = given.tensor_parallel_size
    computing = threading.Event()
    if size > 1:
        threading.Thread(target=_end_behind, args=(connection, computing), daemon=True).start()
    if size > 1 and not ranks.leads():
        engine = cli.engine_of(given, source, shares, {})
        computing.set()
        return ranks.follow(engine, load_what_was_sent)
    with _others(wanted, size, computing), tuned():
        engine = cli.engine_of(given, source, shares, modules)
        computing.set()
        EngineHost(engine, source.load_processor(), connection).run()
    return 0


@contextlib.contextmanager
def _others(options: Mapping[str, Any], size: int, computing: threading.Event) -> Iterator[None]:
    """The other ranks' processes, none of which is left behind. computing: set when the engine is there."""
    started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
    over = threading.Event()
    seconds = 0.0
    try:
        for rank in range(1, size):
            started.append(_start(options, ranks.environment(rank, size, int(os.environ["MASTER_PORT"]))))
            threading.Thread(
                target=_end_with, args=(rank, started[-1][1], computing, over), daemon=True
            ).start()
        yield
        seconds = ranks.LAST_SECONDS
    finally:
        over.set()
        ranks.end_all([process for _, process in started], seconds)
        for connection, _ in started:
            connection.close()


def _end_with(
    rank: int, process: subprocess.Popen[bytes], computing: threading.Event, over: threading.Event
) -> None:
    """End this process when a rank has failed, some time later: it may wait for that one, or say why."""
    code = process.wait()
    if code and not over.is_set():
        log.error("rank %d has ended with %d", rank, code)
        if not over.wait(ranks.LAST_SECONDS if computing.is_set() else LOADING_SECONDS):
            os._exit(1)


def _end_behind(connection: socket.socket, computing: threading.Event) -> None:
    """End this process when the other end of its connection has closed: at once while it loads, as it may
    wait for another rank; else some time later, if it has not ended by itself.
    """
    closed = select.poll()
    closed.register(connection, 0)  # what there is to read is not ours
    closed.poll()
    if computing.is_set():
        time.sleep(2 * ranks.LAST_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
