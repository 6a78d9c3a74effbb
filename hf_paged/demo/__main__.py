"""The same beams on stock's cache and on pages, and a map of the blocks that the beams share.

python -m hf_paged.demo [--beams 4] [--new 40] [--prompt "The fox"]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from typing import Any

import torch

import hf_paged
from hf_paged import demo

COLOURS = (39, 208, 76, 201, 220, 51, 196, 141)
WIDTH = 76


def run(model: Any, inputs: Any, arguments: dict[str, Any]) -> tuple[Any, float]:
    """The answer of a warm call, and its seconds."""
    model.generate(**inputs, **{**arguments, "max_new_tokens": 2})
    begin = time.perf_counter()
    answer = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    return answer, time.perf_counter() - begin


def stock_bytes(cache: Any) -> int:
    """Bytes of keys and values in a stock cache."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def paged_bytes(cache: hf_paged.PagedCache) -> int:
    """Bytes of the blocks that the cache's rows hold."""
    groups = [rows.group for rows in cache.sequences.rows.values()]
    return sum(group.pool.held * group.block_bytes for group in groups)


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
    return f"\033[48;5;{COLOURS[rows % len(COLOURS)]}m\033[30m{text}\033[0m" if rows > 1 else f"\033[2m{text}\033[0m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--prompt", default=demo.prompts()[0])
    options = parser.parse_args()
    model, tokenizer = demo.model(), demo.tokenizer()
    inputs = tokenizer(options.prompt, return_tensors="pt")
    beams = {"num_beams": options.beams, "num_return_sequences": options.beams, "max_new_tokens": options.new, "do_sample": False}
    stock, stock_seconds = run(model, inputs, beams)
    word = {"cache_implementation": "paged", "cache_config": {"block_size": options.block_size}}
    paged, paged_seconds = run(model, inputs, {**beams, **word})
    show(tokenizer, stock, stock_seconds, paged, paged_seconds)
    if not torch.equal(stock.sequences, paged.sequences):
        sys.exit("the tokens differ: this is a bug, please report it")


def show(tokenizer: Any, stock: Any, stock_seconds: float, paged: Any, paged_seconds: float) -> None:
    """What was generated, what it cost, and who shares which block."""
    for i, text in enumerate(tokenizer.batch_decode(paged.sequences, skip_special_tokens=True)):
        print(f"beam {i}: {' '.join(text.split())}")
    cache = paged.past_key_values
    tables = cache.tables()
    named, held = sum(len(row) for row in tables), len({block for row in tables for block in row})
    before, after = stock_bytes(stock.past_key_values), paged_bytes(cache)
    print("-" * WIDTH)
    print(f"tokens       {'identical' if torch.equal(stock.sequences, paged.sequences) else 'DIFFERENT'}")
    print(f"seconds      stock {stock_seconds:.3f}   paged {paged_seconds:.3f}   (CPU, {torch.get_num_threads()} thread(s), one call)")
    print(f"blocks       {named} named by the rows, {held} in memory: {1 - held / named:.0%} shared away")
    print(f"cache bytes  stock {before:,}   paged {after:,}: {1 - after / before:.0%} saved")
    print("-" * WIDTH)
    print(f"blocks of {cache.config.block_size} tokens, by row; 'x{len(tables)}' is held once for {len(tables)} rows")
    print(block_map(tables, sys.stdout.isatty() and "NO_COLOR" not in os.environ))


if __name__ == "__main__":
    main()
