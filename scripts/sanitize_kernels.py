"""Launch every kernel on two tiny shapes, for NVIDIA's checker of memory and races:

PYTHONPATH=.:kernels compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py
PYTHONPATH=.:kernels compute-sanitizer --tool racecheck python scripts/sanitize_kernels.py
"""

from __future__ import annotations

import torch

import hf_paged_kernels as kernels

SHAPES = [
    {"rows": 3, "heads": 2, "group": 2, "dim": 64, "size": 16, "dtype": torch.bfloat16},
    {"rows": 1, "heads": 1, "group": 1, "dim": 80, "size": 1, "dtype": torch.float32},
]


def launch(rows: int, heads: int, group: int, dim: int, size: int, dtype: torch.dtype) -> None:
    """All kernels once, on tables whose last column is the pool's last block."""
    made = {"device": "cuda", "dtype": dtype}
    width, new = 5, 2
    table = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    keys, values = (torch.randn(rows * width, size, heads, dim, **made) for _ in range(2))
    lengths = torch.full((rows,), width * size - new, dtype=torch.int32, device="cuda")
    seen, slots = torch.zeros_like(lengths), torch.zeros(rows * new, dtype=torch.long, device="cuda")
    kernels.advance(table, lengths, seen, slots, torch.zeros(2, dtype=torch.long, device="cuda"), new, size)
    q = torch.randn(rows, heads * group, new, dim, **made)
    k, v = (torch.randn(rows, heads, new, dim, **made) for _ in range(2))
    cos, sin = (torch.randn(rows, new, dim, **made) for _ in range(2))
    kernels.write(k, v, keys, values, slots)
    kernels.rotary(q, k, cos, sin)
    q = kernels.rotary_write(q, k, v, cos, sin, keys, values, slots)
    one = q[:, :, 0].contiguous()
    plan = kernels.Plan(one, keys, values, mean_length=width * size, window=7)
    plan.update(lengths)
    kernels.decode(one, keys, values, table, plan, softcap=9.0)
    borders = torch.arange(0, (rows + 1) * new, new, dtype=torch.int32, device="cuda")
    packed = q.transpose(1, 2).reshape(rows * new, heads * group, dim)
    kernels.prefill(packed, keys, values, table, borders, lengths, new, window=7)
    kernels.gather(keys, table, None, 1, width * size)
    pools = [data.view(1, rows * width, -1) for data in (keys, values)]
    kernels.copy(pools, torch.tensor([0, 1], device="cuda"), torch.tensor([2, 3], device="cuda"))
    x, weight = torch.randn(rows, 1, 3 * dim, **made), torch.randn(3 * dim, **made)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.add_rms_norm(x, x.clone(), weight, 1e-6)
    kernels.swiglu(x, x.clone())
    torch.cuda.synchronize()


if __name__ == "__main__":
    for shape in SHAPES:
        launch(**shape)
        print("launched on", shape)
