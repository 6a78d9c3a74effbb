"""The command `hf-paged generate`: answers in the terminal, as they grow, or lines of JSON."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import length_hint
from typing import Any

from hf_paged_cli.flags import content_of, is_utf8

from ..engine import Engine
from ..engine.outputs.answer_file import line_of
from ..model.loading import is_watched
from .arguments import adapter_sources, add_adapters, interrupted, require_out, sampling_of, source_of


def prompt_of(prompt: str | None, file: str | None) -> str:
    """The prompt: a text, or a file ("-" is the standard input)."""
    if prompt is not None:
        text = prompt
    elif file in (None, "-"):
        text = sys.stdin.read()
    else:
        text = content_of("--file", str(file))
    if not is_utf8(text):
        raise ValueError("the prompt is not UTF-8; convert it")
    if not text.strip():
        raise ValueError("the prompt is empty; give --prompt, --file or a text on the standard input")
    return text


def prompts_of(prompt: str | None, file: str | None) -> Iterable[str]:
    """The prompts, each a line; those of the standard input are read as they come."""
    if prompt is None and file in (None, "-"):
        lines = (line for line in map(_line, sys.stdin) if line.strip())
        first = next(lines, None)
        if first is None:
            raise ValueError("the standard input is empty; write a prompt on each line, or give --file")
        return chain([first], lines)
    return [line for line in prompt_of(prompt, file).splitlines() if line.strip()]


def _line(given: str) -> str:
    return given.rstrip("\r\n")


def run(given: Namespace) -> int:
    """Print the answers: one as it grows, several as lines of JSON. The answer is the exit code."""
    if given.prompt is not None and given.file is not None:
        raise ValueError("--prompt and --file are both the prompt; give one of them")
    require_out(given)
    if given.out is not None and not given.lines:
        raise ValueError(f"--out {given.out} is for answers as lines; give --lines, or leave it out")
    options = {"max_new_tokens": given.max_tokens, **sampling_of(given)}
    if given.num_beams is not None:
        options["num_beams"] = given.num_beams
    if given.stop:
        options["stop_strings"] = given.stop
    prompts = prompts_of(given.prompt, given.file) if given.lines else [prompt_of(given.prompt, given.file)]
    source = source_of(given)
    modules = adapter_sources(given.lora_modules, [source.name])
    asked = _asked(prompts, given, [source.name])
    if given.adapter is not None:
        options["adapter"] = None if given.adapter == source.name else given.adapter
    tokenizer = source.load_tokenizer()
    with Engine(source.load(quiet=True), tokenizer, fuse_projections=True) as engine:
        add_adapters(engine, modules)
        if given.out is not None:
            return _write_lines(engine, asked, given, options)
        if given.lines or given.json:
            return _print_lines(engine, asked, options)
        return _stream(engine, next(iter(asked)), options)


def _asked(prompts: Iterable[str], given: Namespace, models: Sequence[str]) -> Iterable[Any]:
    """The prompts, or the chats that begin with them. models: names of the model without adapters."""
    if not given.chat and not given.lora_modules:
        return prompts
    of_lines = models if given.lines and given.lora_modules else None
    items = (_item(each, given.chat, of_lines) for each in prompts)
    return list(items) if isinstance(prompts, list) else items


def _item(line: str, chat: bool, models: Sequence[str] | None) -> Any:
    """The item of a prompt. models: names of the model, if a line may be JSON that names an adapter."""
    own: dict[str, Any] = {}
    if models is not None and line.lstrip().startswith("{"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None  # a prompt that begins with a brace
        own = found if isinstance(found, dict) and "prompt" in found else {}
    if "model" in own and "adapter" in own:
        raise ValueError(f"a line has a model and an adapter; give one of them: {line:.200}")
    if "model" in own:
        name = own.pop("model")
        own["adapter"] = None if name in (models or ()) else name
    prompt = own.get("prompt", line)
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    return {**own, "prompt": asked} if own else asked


def _print_lines(engine: Engine, asked: Iterable[Any], options: dict[str, Any]) -> int:
    """Print each answer when it is there. A bar counts them where stderr alone is a terminal."""
    shown = length_hint(asked, 2) > 1 and is_watched() and not sys.stdout.isatty()
    failed = False
    for row in engine.map(asked, progress=shown, **options).rows():
        print(line_of(row).decode(), end="", flush=True)
        failed |= "error" in row
    return int(failed)


def _write_lines(engine: Engine, asked: Iterable[Any], given: Namespace, options: dict[str, Any]) -> int:
    """Write the answers to a file, of which a further call goes on."""
    try:
        answers = engine.map(asked, given.out, progress=is_watched(), overwrite=given.overwrite, **options)
    except KeyboardInterrupt:
        print(interrupted(given.out), file=sys.stderr)
        raise
    print(f"{given.out}: {answers.summary}", file=sys.stderr)
    return int(answers.failed > 0)


def _stream(engine: Engine, prompt: Any, options: dict[str, Any]) -> int:
    handle = engine.submit(prompt, **options)
    for increment in handle:
        print(increment.text, end="", flush=True)
    print()
    error = handle.result().error
    if error is not None:
        print(f"hf-paged generate: {error}", file=sys.stderr)
    return int(error is not None)
