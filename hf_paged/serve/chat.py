"""The command `hf-paged chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..engine import Engine
from .flags import is_utf8
from .loading import Source

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C breaks an answer off"


def run(source: Source, system: str | None, most: int, options: dict[str, Any]) -> int:
    """Answer line by line until the input ends. The answer is the exit code."""
    tokenizer = source.load_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{source.name} has no chat template; use hf-paged generate")
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited and recalled
        print(HELP, file=sys.stderr)
    with Engine(source.load(), tokenizer) as engine:
        Conversation(engine, tokenizer, system, most, options).run(
            lambda: input("> " if terminal else "").strip()
        )
    return 0


class Conversation:
    """Messages so far, and how they are continued. What they have in common with the last turn is cached."""

    def __init__(
        self, engine: Engine, tokenizer: Any, system: str | None, most: int, options: dict[str, Any]
    ) -> None:
        """most: tokens of an answer. options: keywords of `submit()`."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self._most = most
        self._options = options
        self.messages: list[dict[str, str]] = list(self._begin)

    def run(self, ask: Callable[[], str]) -> None:
        """Take turns until `ask` raises EOFError or says /exit."""
        while True:
            try:
                said = ask()
            except (EOFError, KeyboardInterrupt):
                return
            if said == "/exit":
                return
            if said == "/reset":
                self.messages = list(self._begin)
            elif said.startswith("/"):
                print(HELP, file=sys.stderr)
            elif not is_utf8(said):
                print("this line is not UTF-8 and was left out; convert it", file=sys.stderr)
            elif said:
                self._answer(said)

    def _answer(self, said: str) -> None:
        messages = [*self.messages, {"role": "user", "content": said}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        room = self._engine.longest - len(ids)
        if room < 1:
            print(f"the conversation has {len(ids)} tokens and no room is left; /reset it", file=sys.stderr)
            return
        handle = self._engine.submit(ids, max_new_tokens=min(room, self._most), **self._options)
        try:
            for increment in handle:
                print(increment.text, end="", flush=True)
        except KeyboardInterrupt:
            handle.cancel()
        print()
        output = handle.result()
        if output.error is not None:
            print(f"hf-paged chat: {output.error}", file=sys.stderr)
            return
        self.messages = [*messages, {"role": "assistant", "content": output.text or ""}]
