"""The costs of verify="bytes": of a decode step, of a prompt whose blocks fill, and of one whose blocks are found.

    OMP_NUM_THREADS=1 python benchmarks/verify.py                    # a small Llama on a CPU
    python benchmarks/verify.py --model Qwen/Qwen3-8B --rows 64      # on a CUDA device

Engines without and with checks take turns on one model. On a CPU the clock is the process's own time, since
others may use the machine; on a device it is the wall's. Blocks fill in every 16th step of a row; a full pool
also evicts, and then checks, a block for each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_paged import Engine
from hf_paged.kv import Layout, Store
from hf_paged.kv.checksums import checksums

MODES: dict[str, dict[str, Any]] = {"none": {}, "tokens": {"verify": "tokens"}, "bytes": {"verify": "bytes"}}


def small() -> Any:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1024, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(engine: Engine, prompts: list[list[int]], new: int) -> float:
    """Milliseconds of a batch, with `new` tokens for each prompt."""
    device = engine.model.device
    begin = clock(device)
    engine.generate(prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False, progress=False)
    return 1e3 * (clock(device) - begin)


def prompts_of(rows: int, length: int, first: int) -> list[list[int]]:
    """Prompts that have no block in common."""
    return [
        [5 + first % 1000, 5 + row, *[7 + place % 900 for place in range(length - 2)]] for row in range(rows)
    ]


def turn(engine: Engine, given: argparse.Namespace, number: int) -> dict[str, float]:
    """Milliseconds of each part, once."""
    prompts = prompts_of(given.rows, given.prompt, number)
    filled = timed(engine, prompts, 1)
    found = timed(engine, prompts, 1)
    decoded = timed(engine, prompts, 1 + given.new) - found
    return {
        "prompts that fill": filled,
        "prompts that are found": found,
        "a decode step": decoded / given.new,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a name or folder; a small Llama with random weights without it")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = small().to(place)
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto", device_map=place).eval()
    blocks = given.rows * (2 * (given.prompt + given.new) // 16 + 2)  # full from the second turn on
    engines = {
        name: Engine(model, num_blocks=blocks, max_batch_sequences=given.rows, **options)
        for name, options in MODES.items()
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for number in range(1 + given.turns):
        for name, engine in engines.items():
            for part, ms in turn(engine, given, number).items():
                if number:  # the first one compiles and captures
                    found[name].setdefault(part, []).append(ms)
    print(f"{type(model).__name__} on {place}, {given.rows} rows, prompts of {given.prompt}, ms (median)")
    for part in found["none"]:
        medians = {name: statistics.median(of[part]) for name, of in found.items()}
        words = "  ".join(f"{name} {ms:9.3f}" for name, ms in medians.items())
        print(f"{part:24} {words}  bytes {100 * (medians['bytes'] / medians['none'] - 1):+.1f} %")
    print("checked, mismatched:", engines["bytes"].stats()["verify"])
    layout = next(iter(engines["bytes"].pools.layouts))
    measure_checksums(layout, model.config.num_hidden_layers)
    for engine in engines.values():
        engine.close()


def measure_checksums(layout: Layout, layers: int) -> None:
    """The checksums of 256 blocks by themselves."""
    store = Store(layout, layers, 256, 16, "torch")
    blocks = torch.arange(256, device=layout.device)
    taken = []
    for _ in range(5):
        begin = clock(layout.device)
        checksums(store.by_block, blocks)
        taken.append(clock(layout.device) - begin)
    seconds = statistics.median(taken)
    print(f"checksums of 256 blocks: {1e3 * seconds:.2f} ms, {store.bytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
