"""An engine of this process, as a server's routes see it."""

from __future__ import annotations

import socket
import threading
from typing import Any

from ...engine import Engine
from .engine_client import EngineClient
from .engine_host import EngineHost


def connected(engine: Engine, tokenizer: Any) -> EngineClient:
    """A client of an engine, whose side runs in a thread of its own and owns the engine from now on.

    tokenizer: the model's, or its processor.
    """
    ours, theirs = socket.socketpair()
    host = EngineHost(engine, tokenizer, theirs)
    threading.Thread(target=host.run, name="hf_paged host", daemon=True).start()
    return EngineClient(ours)
