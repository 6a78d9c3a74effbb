"""The same beams on stock's cache and on pages, a map of the blocks that the beams share, and what both cost.

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

import hf_paged
from hf_paged import demo

COLOURS = (39, 208, 76, 201, 220, 51, 196, 141)
WIDTH = 76
LONG = 768
"""Tokens of the prompt at which the caches differ in time: two thirds of what the model is made for."""
LONG_BEAMS = 8
LONG_NEW = 32


class Answers(NamedTuple):
    """What one call answers on stock's cache and on pages, and the median seconds of it on each."""

    stock: Any
    paged: Any
    stock_seconds: float
    paged_seconds: float

    @property
    def same(self) -> bool:
        """Whether the tokens are."""
        return torch.equal(self.stock.sequences, self.paged.sequences)


def run(model: Any, inputs: Any, arguments: dict[str, Any], paged: dict[str, Any], calls: int) -> Answers:
    """The same call on both caches in turns, `calls` times each after one that warms up."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    answers: dict[bool, Any] = {}
    for number in range(-1, calls):
        for on_pages in (False, True):
            answers.pop(on_pages, None)  # its blocks are free for the next call
            begin = time.perf_counter()
            answers[on_pages] = model.generate(
                **inputs, **arguments, **(paged if on_pages else {}), return_dict_in_generate=True
            )
            if number >= 0:
                seconds[on_pages].append(time.perf_counter() - begin)
    return Answers(answers[False], answers[True], median(seconds[False]), median(seconds[True]))


def long_inputs(tokenizer: Any, tokens: int) -> dict[str, torch.Tensor]:
    """A prompt of so many tokens, of the demo's beginnings over and over."""
    ids = tokenizer(" ".join(demo.prompts()), return_tensors="pt")["input_ids"]
    ids = ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]
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
    """A line per row, a cell per block; a block that several rows name is drawn alike in all of them."""
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
    return (
        f"\033[48;5;{COLOURS[rows % len(COLOURS)]}m\033[30m{text}\033[0m"
        if rows > 1
        else f"\033[2m{text}\033[0m"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--prompt", default=demo.prompts()[0])
    parser.add_argument(
        "--calls", type=int, default=3, help="warm calls on each cache; the median is printed"
    )
    options = parser.parse_args()
    model, tokenizer = demo.model(), demo.tokenizer()
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": options.block_size}}
    short = run(
        model,
        tokenizer(options.prompt, return_tensors="pt"),
        beams(options.beams, options.new),
        paged,
        options.calls,
    )
    show(tokenizer, short)
    long = run(model, long_inputs(tokenizer, LONG), beams(LONG_BEAMS, LONG_NEW), paged, options.calls)
    print("-" * WIDTH)
    layers = len(short.stock.past_key_values.layers)
    print(
        f"medians of {options.calls} warm calls, CPU, {torch.get_num_threads()} thread(s), a model of "
        f"{layers} layers"
    )
    print(f"{'':<40}{'stock':>12}{'paged':>12}")
    for answers in (short, long):
        compare(answers)
    if not (short.same and long.same):
        sys.exit("the tokens differ: this is a bug, please report it")


def beams(width: int, new: int) -> dict[str, Any]:
    """generate()'s arguments for a beam search that returns all its beams."""
    return {"num_beams": width, "num_return_sequences": width, "max_new_tokens": new, "do_sample": False}


def compare(answers: Answers) -> None:
    """What a call costs on each cache, in seconds and in bytes."""
    rows, columns = answers.stock.sequences.shape
    what = f"{rows} beams of {columns} tokens"
    before, after = stock_bytes(answers.stock.past_key_values), paged_bytes(answers.paged.past_key_values)
    faster = answers.paged_seconds / answers.stock_seconds
    print(
        f"{what:<24}{'seconds':<16}{answers.stock_seconds:>12.3f}{answers.paged_seconds:>12.3f}   x "
        f"{faster:.2f}"
    )
    print(f"{'':<24}{'cache bytes':<16}{before:>12,}{after:>12,}   x {after / before:.2f}")


def show(tokenizer: Any, answers: Answers) -> None:
    """What was generated, and which rows share which blocks."""
    for i, text in enumerate(tokenizer.batch_decode(answers.paged.sequences, skip_special_tokens=True)):
        print(f"beam {i}: {' '.join(text.split())}")
    cache = answers.paged.past_key_values
    tables = cache.tables()
    named, held = sum(len(row) for row in tables), len({block for row in tables for block in row})
    print("-" * WIDTH)
    print(f"tokens       {'identical' if answers.same else 'DIFFERENT'}")
    print(f"blocks       {named} named by the rows, {held} in memory: {1 - held / named:.0%} shared away")
    print(
        f"blocks of {cache.config.block_size} tokens, by row; 'x{len(tables)}' is held once for "
        f"{len(tables)} rows"
    )
    print(block_map(tables, sys.stdout.isatty() and "NO_COLOR" not in os.environ))


if __name__ == "__main__":
    main()
