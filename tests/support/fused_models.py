"""Shared by the tests: CONFIG, Kernels, WIDTH, captured_steps, replaced, surroundings."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
import transformers as tf
from captures import policy
from chain_functions import FUNCTIONS, PARTS
from families import LONG, SMALL, TOKENS
from tape import record
from torch import nn
from torch.nn.functional import gelu, silu
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.models.llama.modeling_llama import (
    rotate_half,
)

import hf_paged_kernels as kernels
from hf_paged.model.capture import pool
from hf_paged.model.capture.chains import Chains
from hf_paged.model.capture.fusion import ROTARY, Fusion, current_fusion
from hf_paged.model.rehearsal import RECORDERS

CONFIG = tf.LlamaConfig(num_key_value_heads=2, **SMALL, **TOKENS, **LONG)


WIDTH = CONFIG.hidden_size
ACTIVATIONS: dict[str, Any] = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def _as_a_kernel(method: Any) -> Any:
    """No chain has what a kernel computes; a rehearsal and a recorded step see it."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, Chains):
                    stack.enter_context(mode.paused())
            return method(*args, **kwargs)

    return run


class Kernels:
    """The kernels' formulas in torch, rounding where they round, and a list of who was called in which
    thread.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.threads: set[int] = set()

    @staticmethod
    def launches_early(device: torch.device) -> bool:
        return False

    def _note(self, name: str) -> None:
        self.calls[name] += 1
        self.threads.add(threading.get_ident())

    @_as_a_kernel
    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, centered: bool = False
    ) -> torch.Tensor:
        self._note("rms_norm")
        return self._norm(x, weight, eps, centered)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1 + weight.float())).to(x.dtype) if centered else weight * normed.to(x.dtype)

    @_as_a_kernel
    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        centered: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("add_rms_norm")
        return residual + x, self._norm(residual + x, weight, eps, centered)

    @_as_a_kernel
    def swiglu(self, gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
        self._note(activation)
        return ACTIVATIONS[activation](gate) * up

    Operation = kernels.Operation

    @_as_a_kernel
    def chain(
        self,
        inputs: Sequence[torch.Tensor],
        operations: Sequence[kernels.Operation],
        outputs: Mapping[int, torch.Tensor],
    ) -> None:
        self._note("chain")
        values = [x.float() for x in inputs]
        for kind, operands, dtype in operations:
            given = [values[x] if isinstance(x, int) else x for x in operands]
            values.append({**FUNCTIONS, **PARTS}[kind](*given).to(dtype).float())
        for place, out in outputs.items():
            out.copy_(values[place])

    @_as_a_kernel
    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("rotary")
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    Routes = kernels.Routes

    @_as_a_kernel
    def top(self, x: torch.Tensor, count: int, *, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self._note("top of softmax" if softmax else "top")
        values, places = (x.softmax(-1, dtype=torch.float32) if softmax else x).topk(count)
        return values, places

    @_as_a_kernel
    def route(self, chosen: torch.Tensor, experts: int) -> kernels.Routes:
        """Chosen experts as they are, in the place of the kernel's records."""
        self._note("route")
        return kernels.Routes(chosen.flatten().argsort(stable=True), chosen, chosen.shape[1])

    @_as_a_kernel
    def expert_product(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        routes: kernels.Routes,
        bias: torch.Tensor | None = None,
        *,
        by_pair: bool = False,
        activation: str | None = None,
    ) -> torch.Tensor:
        self._note("expert_product")
        chosen = routes.records.flatten()
        rows = x if by_pair else x.repeat_interleave(routes.top, 0)
        y = torch.bmm(rows[:, None], w[chosen])[:, 0]
        y = y if bias is None else y + bias[chosen]
        return y if activation is None else ACTIVATIONS[activation](y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]

    @_as_a_kernel
    def expert_sum(
        self, y: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int
    ) -> torch.Tensor:
        self._note("expert_sum")
        return (y.view(*weights.shape, -1) * weights[..., None]).sum(1).to(y.dtype)


@contextmanager
def captured_steps(kernels: Kernels | None = None) -> Iterator[None]:
    """Calls of generate() on a CPU capture their steps soon, a tape standing in for CUDA graphs. kernels: of
    small operations; without them modules compute as they are written.
    """
    with pytest.MonkeyPatch.context() as patch:
        policy(patch, least_steps=4)
        patch.setitem(RECORDERS, "cpu", record)
        patch.setattr(pool, "Fusion", lambda model, _: Fusion(model, kernels))
        yield


def replaced(fusion: Fusion) -> dict[str, int]:
    """How many modules of the model are replaced by what."""
    return dict(Counter(forward.func.__name__ for forward in fusion.forwards.values()))  # type: ignore[attr-defined]


def surroundings(model: nn.Module) -> list[Any]:
    """All that a fusion might leave changed."""
    files = {type(module).__module__ for module in model.modules()}
    functions = [getattr(sys.modules[file], ROTARY, None) for file in sorted(files)]
    return [
        current_fusion.get(),
        *functions,
        *((module, dict(module.__dict__), type(module).forward) for module in model.modules()),
    ]
