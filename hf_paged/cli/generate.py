"""The command `hf-paged generate`: answers in the terminal, as they grow."""

from __future__ import annotations

import json
import sys
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from ..engine import Engine
from ..serve.link.loading import Source
from .flags import content_of, is_utf8


def prompts_of(prompt: str | None, file: str | None, lines: bool) -> list[str]:
    """The prompts: a text, a file ("-" is the standard input), or each line of it."""
    if prompt is not None:
        text = prompt
    elif file in (None, "-"):
        text = sys.stdin.read()
    else:
        text = content_of("--file", str(file))
    if not is_utf8(text):
        raise ValueError("the prompt is not UTF-8; convert it")
    found = [line for line in text.splitlines() if line.strip()] if lines else [text]
    if not any(each.strip() for each in found):
        raise ValueError("the prompt is empty; give --prompt, --file or a text on the standard input")
    return found


def run(source: Source, prompts: list[str], chat: bool, as_json: bool, options: dict[str, Any]) -> int:
    """Print the answers: one as it grows, several as lines of JSON. The answer is the exit code."""
    tokenizer = source.load_tokenizer()
    asked: list[Any] = [[{"role": "user", "content": each}] for each in prompts] if chat else list(prompts)
    with Engine(source.load(), tokenizer, fuse_projections=True) as engine:
        if len(asked) == 1 and not as_json:
            return _stream(engine, asked[0], options)
        return _print_lines(engine, asked, prompts, options)


def _print_lines(engine: Engine, asked: list[Any], prompts: list[str], options: dict[str, Any]) -> int:
    """Print each answer once it and those before it are there. A bar counts them on stderr, unless they are
    printed on a terminal themselves.
    """
    handles = [engine.submit(each, **options) for each in asked]
    failed = False
    hidden = len(handles) == 1 or sys.stdout.isatty()
    for prompt, handle in zip(prompts, tqdm(handles, unit="answer", disable=hidden), strict=True):
        output = handle.result()
        found = {"prompt": prompt, "text": output.text, "finish_reason": output.finish_reason}
        if output.error is not None:
            found["error"] = str(output.error)
            failed = True
        print(json.dumps(found, ensure_ascii=False), flush=True)
    return int(failed)


def _stream(engine: Engine, prompt: Any, options: dict[str, Any]) -> int:
    handle = engine.submit(prompt, **options)
    for increment in handle:
        print(increment.text, end="", flush=True)
    print()
    error = handle.result().error
    if error is not None:
        print(f"hf-paged generate: {error}", file=sys.stderr)
    return int(error is not None)
