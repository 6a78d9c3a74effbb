"""The default pool of an engine on a CPU: loads beside pools for fewer and for more sequences of the longest length.

    OMP_NUM_THREADS=1 python benchmarks/default_pool.py

The demo model answers `prompts` prompts of `input` tokens at once, with answers of 50 to 150 % of `output` tokens.

work          seconds of the processor, the least of `--rounds`; other processes disturb it less than the clock
steps         of the engine
preempted     requests that were put down for want of blocks
memory        MB of the pool
"""

from __future__ import annotations

import argparse
import time

import torch

from hf_paged import Engine, demo

ROW = 65
"""Blocks of a sequence of the longest length, and one."""
LOADS = ((64, 128, 128), (256, 16, 64), (256, 128, 128), (256, 512, 256))
NO_END = 2**31 - 1


def requests(prompts: int, tokens: int, output: int) -> list[tuple[list[int], int]]:
    """Prompts of random tokens, and the lengths of their answers."""
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(600, (prompts, tokens), generator=chance).tolist()
    lengths = torch.randint(output // 2, output + output // 2 + 1, (prompts,), generator=chance).tolist()
    return list(zip(ids, lengths, strict=True))


def run(model: object, load: tuple[int, int, int], sequences: int) -> dict[str, float]:
    """One load in a pool for so many sequences of the longest length."""
    with Engine(model, num_blocks=sequences * ROW) as engine:
        engine.generate([1, 2, 3], max_new_tokens=3)
        begin = time.process_time()
        handles = [
            engine.submit(ids, max_new_tokens=length, eos_token_id=NO_END, do_sample=False)
            for ids, length in requests(*load)
        ]
        for handle in handles:
            handle.result()
        work = time.process_time() - begin
        stats = engine.stats()
    taken = stats["memory"]["reserved_bytes"] / 1e6
    return {"work": work, "steps": stats["steps"], "preempted": stats["preemptions"], "memory": taken}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 64, 32, 16])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    model = demo.model()
    print(
        "| prompts x input, output | sequences | work | steps | preempted | memory |\n|---|---|---|---|---|---|"
    )
    for load in LOADS:
        for sequences in given.sequences:
            found = [run(model, load, sequences) for _ in range(given.rounds)]
            best = min(found, key=lambda each: each["work"])
            prompts, tokens, output = load
            print(
                f"| {prompts} x {tokens}, {output} | {sequences} | {best['work']:.1f} | {best['steps']} | "
                f"{best['preempted']} | {best['memory']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
