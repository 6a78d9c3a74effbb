"""The command `hf-paged chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from hf_paged_cli.flags import is_utf8

from ..engine import Engine
from .arguments import sampling_of, source_of

Message = dict[str, str]
HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C breaks an answer off"


def run(given: Namespace) -> int:
    """Answer line by line until the input ends. The answer is the exit code."""
    source = source_of(given)
    options = sampling_of(given)
    tokenizer = source.load_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{source.name} has no chat template; use hf-paged generate")
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited and recalled
        print(HELP, file=sys.stderr)
    with Engine(source.load(quiet=True), tokenizer) as engine:
        converse(
            lambda: input("> " if terminal else "").strip(),
            partial(answered, engine, tokenizer, given.max_tokens, options),
            [] if given.system is None else [{"role": "system", "content": given.system}],
        )
    return 0


def converse(
    ask: Callable[[], str], answer: Callable[[list[Message]], str | None], begin: list[Message]
) -> None:
    """Take turns until `ask` raises EOFError or says /exit. answer: to messages; None if it failed. What they
    have in common with the last turn is cached.
    """
    messages = begin
    while True:
        try:
            said = ask()
        except (EOFError, KeyboardInterrupt):
            return
        if said == "/exit":
            return
        if said == "/reset":
            messages = begin
        elif said.startswith("/"):
            print(HELP, file=sys.stderr)
        elif not is_utf8(said):
            print("this line is not UTF-8 and was left out; convert it", file=sys.stderr)
        elif said:
            asked = [*messages, {"role": "user", "content": said}]
            text = answer(asked)
            if text is not None:
                messages = [*asked, {"role": "assistant", "content": text}]


def answered(
    engine: Engine, tokenizer: Any, most: int, options: dict[str, Any], messages: list[Message]
) -> str | None:
    """Print the answer to messages as it comes; None if there is none. most: its tokens. options: keywords
    of `submit()`.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    room = engine.longest - len(ids)
    if room < 1:
        print(f"the conversation has {len(ids)} tokens and no room is left; /reset it", file=sys.stderr)
        return None
    handle = engine.submit(ids, max_new_tokens=min(room, most), **options)
    try:
        for increment in handle:
            print(increment.text, end="", flush=True)
    except KeyboardInterrupt:
        handle.cancel()
    print()
    output = handle.result()
    if output.error is not None:
        print(f"hf-paged chat: {output.error}", file=sys.stderr)
        return None
    return output.text or ""
