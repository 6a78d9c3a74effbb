"""Steps of one token over states in slots: microseconds, and their share of the bandwidth of a copy.

python benchmarks/state_kernels.py [--rows 1 8 64 256]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from triton.testing import do_bench

import hf_paged_kernels as kernels

BF16, FP32 = torch.bfloat16, torch.float32


def noise(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def cases(rows: int) -> Iterator[tuple[str, int, Callable[[], torch.Tensor]]]:
    """Name, bytes of states read and written, and a step: Qwen3.5's shape of 8B, a Kimi-Linear's, a Mamba-2's,
    a Mamba's.
    """
    source = torch.randperm(2 * rows, device="cuda")[:rows]
    target = torch.randperm(2 * rows, device="cuda")[:rows] + 2 * rows
    for name, at in (("elsewhere", target), ("in place", source)):
        conv = noise(4 * rows + 1, 8192, 4)
        step = partial(
            kernels.conv_step, noise(rows, 8192), noise(8192, 4), None, conv, source, at, activation="silu"
        )
        yield f"conv_step {name}", 2 * rows * conv[0].nbytes, step
        for heads, gate in ((16, (32,)), (32, (32, 128))):
            states = noise(4 * rows + 1, 32, 128, 128, dtype=FP32)
            given = noise(rows, heads, 128), noise(rows, heads, 128), noise(rows, 32, 128)
            decay = -noise(rows, *gate, dtype=FP32).abs()
            step = partial(
                kernels.delta_step, *given, decay, noise(rows, 32), states, source, at, l2norm=True
            )
            by = "channel" if len(gate) > 1 else "head"
            yield f"delta_step by {by} {name}", 2 * rows * states[0].nbytes, step
        states = noise(4 * rows + 1, 128, 64, 128, dtype=FP32)
        per_head = (
            -noise(128, dtype=FP32).abs(),
            noise(rows, 8, 128),
            noise(rows, 8, 128),
            noise(128),
            noise(128),
        )
        step = partial(
            kernels.ssm_step,
            noise(rows, 128, 64),
            noise(rows, 128),
            *per_head,
            states,
            source,
            at,
            softplus=True,
        )
        yield f"ssm_step {name}", 2 * rows * states[0].nbytes, step
        states = noise(4 * rows + 1, 8192, 16, dtype=FP32)
        step = partial(
            kernels.scan_step,
            noise(rows, 8192),
            noise(rows, 8192),
            -noise(8192, 16, dtype=FP32).abs(),
            noise(rows, 16),
            noise(rows, 16),
            noise(8192),
            noise(8192, dtype=FP32),
            states,
            source,
            at,
            gate=noise(rows, 8192),
            softplus=True,
        )
        yield f"scan_step {name}", 2 * rows * states[0].nbytes, step


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    data = torch.ones(2**29, device="cuda")
    other = torch.empty_like(data)
    best = 2 * data.nbytes / do_bench(lambda: other.copy_(data)) * 1e3
    print(f"{torch.cuda.get_device_name()}: a copy moves {best / 1e12:.2f} TB/s")
    for rows in parser.parse_args().rows:
        for name, moved, step in cases(rows):
            milliseconds = do_bench(step)
            share = moved / milliseconds * 1e3 / best
            print(f"{rows:4} rows  {name:34} {1e3 * milliseconds:9.1f} us  {share:5.0%}")


if __name__ == "__main__":
    main()
