"""The command `hf-paged generate`: answers in the terminal, as they grow."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from hf_paged_cli.flags import content_of, is_utf8

from ..engine import Engine
from .arguments import sampling_of, source_of


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


def run(given: Namespace) -> int:
    """Print the answers: one as it grows, several as lines of JSON. The answer is the exit code."""
    if given.prompt is not None and given.file is not None:
        raise ValueError("--prompt and --file are both the prompt; give one of them")
    options = {"max_new_tokens": given.max_tokens, **sampling_of(given)}
    if given.num_beams is not None:
        options["num_beams"] = given.num_beams
    if given.stop:
        options["stop_strings"] = given.stop
    prompts = prompts_of(given.prompt, given.file, given.lines)
    asked: list[Any] = list(prompts)
    if given.chat:
        asked = [[{"role": "user", "content": each}] for each in prompts]
    source = source_of(given)
    tokenizer = source.load_tokenizer()
    with Engine(source.load(quiet=True), tokenizer, fuse_projections=True) as engine:
        if len(asked) == 1 and not (given.json or given.lines):
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
