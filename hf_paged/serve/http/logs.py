"""Log lines for machines and for people. Neither has prompts, answers or keys."""

from __future__ import annotations

import atexit
import json
import logging
import queue
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal

Style = Literal["json", "text", "auto"]
MOST_RECORDS = 10_000
"""Log lines that may wait for their writer."""
LAST_SECONDS = 2.0
LOGGERS = ("hf_paged", "uvicorn", "uvicorn.error", "opentelemetry")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and what `extra` adds."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": time.strftime(f"%Y-%m-%dT%H:%M:%S.{record.msecs:03.0f}Z", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            shown["trace"] = self.formatException(record.exc_info)
        return json.dumps(shown, ensure_ascii=True, default=str)


class LogFormatter(logging.Formatter):
    """The same for a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{name}={value}" for name, value in _extras(record).items())
        return " ".join(filter(None, [super().format(record), extras]))


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _Aside(QueueHandler):
    """Hands records to the thread that writes them: a reader of stderr that is slow holds up no request.
    Records that find the queue full are dropped.
    """

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


class _LogWriter(QueueListener):
    """Writes what waits in the queue. At the end of the process a reader that is stuck holds it up for
    LAST_SECONDS.
    """

    def stop(self) -> None:
        thread = self._thread
        with suppress(queue.Full):
            self.queue.put(self._sentinel, timeout=LAST_SECONDS)  # type: ignore[attr-defined]
        if thread is not None:
            thread.join(LAST_SECONDS)


def set_up(level: str, style: Style) -> Callable[[], None]:
    """Log to stderr from now on, in a thread of its own.

    The answer is a function that ends this thread when all is written, as the end of the interpreter does.
    """
    writer = logging.StreamHandler(sys.stderr)
    plain = style == "text" or (style == "auto" and sys.stderr.isatty())
    writer.setFormatter(LogFormatter() if plain else JsonLines())
    records: queue.Queue[logging.LogRecord] = queue.Queue(MOST_RECORDS)
    listener = _LogWriter(records, writer)
    listener.start()
    atexit.register(listener.stop)
    handler = _Aside(records)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler] if "." not in name else []
        logger.propagate = "." in name
        logger.setLevel(
            level.upper() if name == "hf_paged" else max(logging.WARNING, logging.getLevelName(level.upper()))
        )
    return listener.stop
