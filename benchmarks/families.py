"""A step of several families at sizes that people run, over the bytes that it must read: stock and paged generate(), and
the engine.

python benchmarks/families.py [qwen30b_a3b_half gpt_oss_20b_half llama8b ...] [--rows 1 8 64] [--engine 1 8 64 256]
    [--stock] [--routing] [--layers N]
OMP_NUM_THREADS=1 python benchmarks/families.py qwen_moe_tiny --rows 1 --engine 2    # does it run? on a CPU

Random weights, bf16, 384 tokens of context. The floor counts the weights that a step must read, of experts those that
so many rows are expected to hit if each chooses evenly, and keys and values, at the copy's bandwidth.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
import transformers
from hybrid import CONTEXT, DEVICE, bandwidth, engine_step, step, tokens_of
from shapes import SHAPES, build, line, where

import hf_paged

COPIED = {"H100": 3.0e12, "H200": 4.3e12}
"""Bytes a second of a copy, by the device's name."""


def floor(model: Any, rows: int, rate: float) -> float:
    """Milliseconds in which the bytes of a step are read."""
    config = model.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    read = 0.0
    for name, weight in model.named_parameters():
        if "embed_tokens" in name and model.lm_head.weight is not weight:
            continue
        hit = 1 - (1 - config.num_experts_per_tok / experts) ** rows if experts and ".experts." in name else 1
        read += weight.nbytes * hit
    widths = [each.out_features for name, each in model.named_modules() if name.endswith("k_proj")]
    if not widths:  # one product makes queries, keys and values
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        widths = [config.num_key_value_heads * dim] * config.num_hidden_layers
    read += 2 * rows * CONTEXT * sum(widths) * model.dtype.itemsize
    return 1e3 * read / rate


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--engine", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--stock", action="store_true", help="measure stock too")
    parser.add_argument("--routing", action="store_true", help="also steps that record the experts of tokens")
    given = parser.parse_args()
    print(line(where(DEVICE)))
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else ""
    rate = next((rate for card, rate in COPIED.items() if card in name), 1e11)
    print(f"floors at {rate / 1e12:.1f} TB/s; reading alone {bandwidth() / 1e12:.2f} TB/s", flush=True)
    changes = {} if given.layers is None else {"num_hidden_layers": given.layers}
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for shape in given.shapes:
        model = build(shape, DEVICE, dtype, pad_token_id=0, **changes)
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        size = sum(weight.nbytes for weight in model.parameters()) / 1e9
        print(f"\n{shape}: {size:.1f} GB, {model.config.num_hidden_layers} layers", flush=True)
        for rows in given.rows:
            ids = tokens_of(model, rows, CONTEXT)
            stock = f"stock {step(model, ids, False, 1):8.2f}" if given.stock else ""
            paged = step(model, ids, True)
            least = floor(model, rows, rate)
            print(
                f"generate() {rows:4} rows: {paged:8.2f} ms, floor {least:6.2f} ({paged / least:.2f}) {stock}",
                flush=True,
            )
        hf_paged.release(model)
        if given.engine:
            with hf_paged.Engine(model, prefix_caching=False) as engine:
                for rows in given.engine:
                    taken = engine_step(engine, rows)
                    least = floor(model, rows, rate)
                    more = ""
                    if given.routing:
                        more = f" with routing {engine_step(engine, rows, return_routing=True):8.2f}"
                    print(
                        f"engine     {rows:4} rows: {taken:8.2f} ms, floor {least:6.2f} ({taken / least:.2f}){more}",
                        flush=True,
                    )
        del model
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
