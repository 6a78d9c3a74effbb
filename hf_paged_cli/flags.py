"""Types of flags: an error says what was got, what is expected, and what to do."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .other_servers import advice_for

SOCKET_BYTES = 107
"""The longest path of a Unix socket, as Linux has it."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Print a message and how to get help, and exit with 2. A choice that is none names the nearest."""
        given, _, choices = message.partition(" (choose from ")
        close = difflib.get_close_matches(
            given.rpartition(": ")[2].strip("'"), re.findall(r"[\w-]+", choices), 1
        )
        message += f"; did you mean {close[0]}?" if close else ""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help explains the flags\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """The error for arguments that are no flags here."""
        flag = unknown[0].partition("=")[0]
        advice = advice_for(flag)
        if advice is not None:
            self.error(f"{flag} is not supported: {advice}")
        names = {each.lstrip("-"): each for each in self._option_string_actions}
        close = difflib.get_close_matches(flag.lstrip("-"), list(names), 1)
        self.error(f"unknown argument {flag!r}" + (f"; did you mean {names[close[0]]}?" if close else ""))


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of a flag whose number has bounds."""
    what = "a whole number" if kind is int else "a number"
    expected = f"{what} from {least} on" if most == math.inf else f"{what} from {least} to {most}"

    def read(given: str) -> float:
        try:
            found = kind(given)
        except ValueError:
            found = math.nan
        if not least <= found <= most or math.isinf(found):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {given!r}")
        return found

    return read


def size(given: str) -> int:
    """The type of a flag that is a number of bytes: 80GiB, 24GB, 512MiB."""
    found = re.fullmatch(r"([0-9.]+) ?(?:([KMGT])(i?)B?|B)?", given.strip(), re.I)
    try:
        count = float(found[1]) if found else math.nan
    except ValueError:
        count = math.nan
    if found is None or not count > 0:
        raise argparse.ArgumentTypeError(f"expected a size like 80GiB or 24GB, got {given!r}")
    unit, binary = found[2], found[3]
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(count * (1024 if binary else 1000) ** power)


def utf8(given: str) -> str:
    """The type of a flag whose text a model reads."""
    if not is_utf8(given):
        raise argparse.ArgumentTypeError(f"expected UTF-8, got {given!r}; convert it")
    return given


def some_text(given: str) -> str:
    """The type of a flag whose text has a character at least."""
    if not given:
        raise argparse.ArgumentTypeError("expected a text, got an empty one; leave the flag out")
    return utf8(given)


def is_utf8(given: str) -> bool:
    """True if all bytes of an argument or of a terminal's line were characters."""
    return not any("\ud800" <= each <= "\udfff" for each in given)


def new_file(given: str) -> str:
    """The type of a flag whose file is written later: whether it can be is known before the work."""
    path = Path(given)
    folder = path.parent
    if not given or path.is_dir():
        raise argparse.ArgumentTypeError(f"{given!r} is a folder; give the path of a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"{given}: there is no folder {folder}; make it, or give another path"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{given} cannot be written by this user; give another path")
    return given


def new_picture(given: str) -> str:
    """The type of a flag whose picture is written later, which has one format."""
    if not given.endswith(".svg"):
        raise argparse.ArgumentTypeError(
            f"{given} does not end with .svg, the format of the picture; rename it"
        )
    return new_file(given)


def new_socket(given: str) -> str:
    """The type of a flag whose Unix socket is made later."""
    size = len(os.fsencode(given))
    if size > SOCKET_BYTES:
        raise argparse.ArgumentTypeError(
            f"{given} has {size} bytes and the path of a socket at most {SOCKET_BYTES}; give a shorter one"
        )
    if Path(given).is_file():
        raise argparse.ArgumentTypeError(f"{given} is a file, not a socket; give another path")
    return new_file(given)


def content_of(flag: str, path: str) -> str:
    """The text of a flag's file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}; give a file's path") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is not UTF-8 text ({error}); convert it") from error
