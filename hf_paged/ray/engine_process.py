"""The engine of a replica in a process of its own: Ray and HTTP take nothing of the interpreter in which it
computes. Of several ranks it is the first, and starts the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..serve import cli, logs, ranks
from ..serve.engine_host import EngineHost
from ..serve.keys import Keys
from ..serve.server import tuned
from ..serve.weights import load_what_was_sent
from ..serve.wire import first_message, frame
from .flags import namespace

log = logging.getLogger("hf_paged.ray")


def start(options: Mapping[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process: a connection for EngineClient, and the process, which ends with the connection."""
    size = namespace(options).tensor_parallel_size
    return _start(options, ranks.environment(0, size, ranks.free_port()) if size > 1 else {})


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
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    ours.sendall(frame(dict(options)))
    return ours, process


def main(descriptor: int) -> int:
    """Run in the process: serve the engine that its options describe until the other end closes."""
    connection = socket.socket(fileno=descriptor)
    wanted = first_message(connection)
    given = namespace(wanted)
    logs.set_up(given.log_level, given.log_format)
    source = cli.source_of(given)
    options = cli.server_options(given, source.name)
    keys = Keys(options.api_keys, admin_keys=options.admin_api_keys)
    shares = cli.cache_shares(given.prefix_cache_share, keys.names)
    modules = cli.adapter_sources(given.lora_modules, options.names)
    size = given.tensor_parallel_size
    if size > 1 and not ranks.leads():
        threading.Thread(target=_end_behind, args=(connection,), daemon=True).start()
        return ranks.follow(cli.engine_of(given, source, shares, {}), load_what_was_sent)
    with _others(wanted, size), tuned():
        engine = cli.engine_of(given, source, shares, modules)
        EngineHost(engine, source.load_processor(), connection).run()
    return 0


@contextlib.contextmanager
def _others(options: Mapping[str, Any], size: int) -> Iterator[None]:
    """The processes of the other ranks, none of which is left behind."""
    started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
    over = threading.Event()
    try:
        for rank in range(1, size):
            started.append(_start(options, ranks.environment(rank, size, int(os.environ["MASTER_PORT"]))))
        processes = [process for _, process in started]
        threading.Thread(target=_end_with_any, args=(processes, over), daemon=True).start()
        yield
    finally:
        over.set()
        end = time.monotonic() + ranks.LAST_SECONDS
        for connection, process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            connection.close()


def _end_with_any(processes: list[subprocess.Popen[bytes]], over: threading.Event) -> None:
    """End this process some time after one of these has failed: it may wait for that one."""
    while not over.wait(ranks.POLL):
        for rank, process in enumerate(processes, 1):
            if process.poll():
                log.error("rank %d has ended with %d", rank, process.returncode)
                if not over.wait(ranks.LAST_SECONDS):
                    os._exit(1)


def _end_behind(connection: socket.socket) -> None:
    """End this process some time after the first rank's, which has the other end."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    time.sleep(ranks.LAST_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
