"""Shared by the tests: EightBit, FourBit, Grouped. Each keeps its scales where a library does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


class Levels(nn.Parameter):
    """A weight that says nothing without what hangs on it."""

    quant_state: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Levels:
        return levels(
            self.data.clone(), self.quant_state.absmax.clone(), self.quant_state.state2.absmax.clone()
        )


def levels(numbers: torch.Tensor, scale: torch.Tensor, second: torch.Tensor) -> Levels:
    made = Levels(numbers, requires_grad=False)
    made.quant_state = SimpleNamespace(
        absmax=scale, quant_type="nf4", state2=SimpleNamespace(absmax=second, code=None)
    )
    return made


class EightBit(nn.Linear):
    """Scales lie in an object of the module."""

    def __init__(self, plain: nn.Linear, threshold: float = 0.0) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = levels(plain.weight.data.clone(), torch.ones(()), torch.ones(()))
        self.state = SimpleNamespace(SCB=torch.ones(plain.out_features, 1), threshold=threshold, idx=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state.threshold:
            self.state.idx = torch.zeros(1)  # another one at every forward
        return linear(x, self.weight.data * self.state.SCB)


class FourBit(nn.Linear):
    """Scales hang on the weight, and scales of scales on them: bitsandbytes."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = levels(plain.weight.data.clone(), torch.ones(plain.out_features, 1), torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.weight.quant_state
        return linear(x, self.weight.data * (state.absmax * state.state2.absmax))


class Grouped(nn.Module):
    """Integers are the parameter, and scales lie in a dict of the module, those of scales in a dict of that:
    HQQ.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        step = plain.weight.data.abs().amax(1, keepdim=True) / 127
        self.W_q = nn.Parameter((plain.weight.data / step).round().to(torch.int8), requires_grad=False)
        self.meta = {"nbits": 8, "scale": step, "meta_scale": {"scale": torch.ones(())}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.W_q.to(x.dtype) * (self.meta["scale"] * self.meta["meta_scale"]["scale"]))
