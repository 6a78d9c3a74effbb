"""Log lines for machines and for people. Neither has prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

Style = Literal["json", "text", "auto"]
LOGGERS = ("hf_paged", "uvicorn", "uvicorn.error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and what `extra` adds."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
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


def set_up(level: str, style: Style) -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    plain = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(LogFormatter() if plain else JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler] if "." not in name else []
        logger.propagate = "." in name
        logger.setLevel(
            level.upper() if name == "hf_paged" else max(logging.WARNING, logging.getLevelName(level.upper()))
        )
