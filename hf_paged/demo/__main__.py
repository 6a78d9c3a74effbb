"""The same beams on stock's cache and on pages, a map of their shared blocks, and what sharing saves.

python -m hf_paged.demo [--beams 4] [--new 40] [--prompt "The fox"]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged import demo
from hf_paged.model.cache_name import CACHE

COLOURS = (39, 208, 76, 201, 220, 51, 196, 141)
WIDTH = 84
ROWS = {"samples": 16, "beams": 8}
"""Samples and beams of the shared prompt."""
ROWS_NEW = 24
"""New tokens of each of them."""


class Answers(NamedTuple):
    """The answers of one call on stock's cache and on pages, and the median seconds of each."""

    stock: Any
    paged: Any
    stock_seconds: float
    paged_seconds: float

    @property
    def same(self) -> bool:
        """True if the tokens are the same."""
        return torch.equal(self.stock.sequences, self.paged.sequences)


def run(model: Any, inputs: Any, arguments: dict[str, Any], block_size: int, calls: int) -> Answers:
    """The same call on both caches in turns: once to warm up, then `calls` times."""
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": block_size}}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    answers: dict[bool, Any] = {}
    for number in range(-1, calls):
        for on_pages in (False, True):
            answers.pop(on_pages, None)  # frees its blocks for the next call
            torch.manual_seed(0)  # samples of both caches take the same draws
            begin = time.perf_counter()
            answers[on_pages] = model.generate(
                **inputs, **arguments, **(paged if on_pages else {}), return_dict_in_generate=True
            )
            if number >= 0:
                seconds[on_pages].append(time.perf_counter() - begin)
    return Answers(answers[False], answers[True], median(seconds[False]), median(seconds[True]))


def random_model() -> Any:
    """A Llama with random weights, large enough that a prompt's computation outweighs Python's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def long_prompt(tokens: int) -> dict[str, torch.Tensor]:
    """A prompt of that many random tokens."""
    ids = torch.randint(5, 4096, (1, tokens), generator=torch.Generator().manual_seed(0), device="cpu")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def stock_bytes(cache: Any) -> int:
    """Bytes of keys and values in a stock cache."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def paged_bytes(cache: hf_paged.PagedCache) -> int:
    """Bytes of the blocks that the cache's rows hold."""
    rows = cache.sequences.rows.items()
    held = {
        kind: {block for table in cache.sequences.tables(kind) for block in table.blocks} for kind, _ in rows
    }
    return sum(len(held[kind]) * each.group.block_bytes for kind, each in rows)


def block_map(tables: list[list[int]], colour: bool) -> str:
    """A line per row, a cell per block; a block that several rows share is drawn alike in all of them."""
    names = Counter(block for row in tables for block in row)
    cells = max(len(row) for row in tables)
    lines = ["        " + "".join(f"{i:^6}" for i in range(cells))]
    for i, row in enumerate(tables):
        lines.append(f"row {i:<3} " + "".join(_cell(block, names[block], colour) for block in row))
    return "\n".join(lines)


def _cell(block: int, rows: int, colour: bool) -> str:
    text = f"{block:>3}{'x' + str(rows) if rows > 1 else '  '} "
    if not colour:
        return text
    if rows == 1:
        return f"\033[2m{text}\033[0m"
    return f"\033[48;5;{COLOURS[rows % len(COLOURS)]}m\033[30m{text}\033[0m"


def beams(width: int, new: int) -> dict[str, Any]:
    """generate()'s arguments for a beam search that returns all its beams."""
    return {"num_beams": width, "num_return_sequences": width, "max_new_tokens": new, "do_sample": False}


def samples(count: int, new: int) -> dict[str, Any]:
    """generate()'s arguments for several samples of each prompt."""
    return {"num_return_sequences": count, "max_new_tokens": new, "do_sample": True}


def show(tokenizer: Any, answers: Answers) -> None:
    """Print what was generated, and which rows share which blocks."""
    for i, text in enumerate(tokenizer.batch_decode(answers.paged.sequences, skip_special_tokens=True)):
        print(f"beam {i}: {' '.join(text.split())}")
    cache = getattr(answers.paged, CACHE)
    tables = cache.tables()
    named = sum(len(row) for row in tables)
    held = len({block for row in tables for block in row})
    print("-" * WIDTH)
    print(f"tokens       {'identical' if answers.same else 'DIFFERENT'}")
    print(
        f"blocks       {named} in the rows' tables, {held} in memory: {1 - held / named:.0%} saved by sharing"
    )
    print(
        f"blocks of {cache.config.block_size} tokens, by row; 'x{len(tables)}': shared by {len(tables)} rows"
    )
    print(block_map(tables, sys.stdout.isatty() and "NO_COLOR" not in os.environ))


def compare(what: str, answers: Answers) -> None:
    """Print what a call costs on each cache, in seconds and in bytes."""
    before = stock_bytes(getattr(answers.stock, CACHE))
    after = paged_bytes(getattr(answers.paged, CACHE))
    ratio = answers.paged_seconds / answers.stock_seconds
    seconds = f"{answers.stock_seconds:>11.3f}{answers.paged_seconds:>11.3f}"
    print(f"{what:<42}{'seconds':<12}{seconds}   x {ratio:.2f}")
    print(f"{'':<42}{'cache bytes':<12}{before:>11,}{after:>11,}   x {after / before:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--prompt", default=demo.prompts()[0])
    parser.add_argument("--shared", type=int, default=512, help="tokens of the prompt that many rows share")
    parser.add_argument("--calls", type=int, default=3, help="warm calls of each size; the median is printed")
    options = parser.parse_args()
    model = demo.model()
    tokenizer = demo.tokenizer()
    inputs = tokenizer(options.prompt, return_tensors="pt")
    search = beams(options.beams, options.new)
    short = run(model, inputs, search, options.block_size, 3 * options.calls)
    show(tokenizer, short)
    print("-" * WIDTH)
    larger = random_model()
    size = sum(weight.numel() for weight in larger.parameters()) / 1e6
    print(f"medians of {options.calls} warm calls, CPU, {torch.get_num_threads()} thread(s)")
    print(f"{'':<54}{'stock':>11}{'paged':>11}")
    results = [short]
    for name, arguments in (("samples", samples), ("beams", beams)):
        call = arguments(ROWS[name], ROWS_NEW)
        results.append(run(larger, long_prompt(options.shared), call, 16, options.calls))
        compare(f"{ROWS[name]} {name}, prompt of {options.shared}, {size:.1f}M model", results[-1])
    rows, columns = short.stock.sequences.shape
    compare(f"{rows} beams above, {columns} tokens, tiny model", short)
    print("The tiny model's steps are mostly Python: its seconds show the overhead of pages.")
    if not all(answers.same for answers in results):
        sys.exit("the tokens differ: this is a bug, please report it")


if __name__ == "__main__":
    main()
