"""Scripts that complete commands, flags, choices and files in a shell."""

from __future__ import annotations

from collections.abc import Mapping

from .flags import Parser

FILES = {
    *("model", "tokenizer", "file", "html", "out", "uds", "api_key_file"),
    *("chat_template", "response_template", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
}
"""Arguments that are, or may be, a path."""


def completion(top: Parser, commands: Mapping[str, Parser], shell: str) -> str:
    """The script of a shell."""
    import shtab  # no other command needs it

    for command in commands.values():
        for action in command._actions:
            if action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it there
    return shtab.complete(top, shell)
