"""The entry point of `hf-paged`: what a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from .completion import completion
from .parser import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the answer is its exit code. Without one, print the help."""
    top, commands = parser()
    given, unknown = top.parse_known_args(arguments)
    given.arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = commands.get(given.command, top)
    if unknown:
        command.refuse(unknown)
    try:
        if given.command is None:
            top.print_help()
            return 0
        if given.command == "completion":
            print(completion(top, commands, given.shell))
            return 0
        return int(import_module(f"hf_paged.cli.{given.command}").run(given))
    except (ValueError, OSError, TypeError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and given.command != "serve":  # a reader, as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        _complain(f"{command.prog}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _complain(text: str) -> None:
    """Write why a command ends: to stderr, or where that cannot be written (a full disk), to stdout."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError as error:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what it still holds fails again at exit
        with suppress(OSError):
            print(f"{text} (stderr: {error.strerror})", flush=True)
