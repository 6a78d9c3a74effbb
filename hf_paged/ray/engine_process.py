"""The engine of a replica in a process of its own: Ray and HTTP take nothing of the interpreter in which it
computes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ..serve import cli, logs
from ..serve.engine_host import EngineHost
from ..serve.keys import Keys
from ..serve.server import tuned
from ..serve.wire import first_message, frame
from .flags import namespace


def start(options: Mapping[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process: a connection for EngineClient, and the process, which ends with the connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    ours.sendall(frame(dict(options)))
    return ours, process


def main(descriptor: int) -> None:
    """Run in the process: serve the engine that its options describe until the other end closes."""
    connection = socket.socket(fileno=descriptor)
    given = namespace(first_message(connection))
    logs.set_up(given.log_level, given.log_format)
    source = cli.source_of(given)
    options = cli.server_options(given, source.name)
    keys = Keys(options.api_keys, admin_keys=options.admin_api_keys)
    shares = cli.cache_shares(given.prefix_cache_share, keys.names)
    modules = cli.adapter_sources(given.lora_modules, options.names)
    engine = cli.engine_of(given, source, shares, modules)
    with tuned():
        EngineHost(engine, source.load_processor(), connection).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
