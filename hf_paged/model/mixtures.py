"""A model's mixtures of experts in transformers' form: a router gives one module, which has all experts, the
numbers of the experts of each token, and their weights.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

SEAM = "transformers.integrations.moe"


def in_form(module: nn.Module) -> bool:
    """True if a module has the experts of a mixture in transformers' form."""
    code = getattr(type(module).forward, "__code__", None)
    return SEAM in sys.modules and code is not None and code.co_filename == sys.modules[SEAM].__file__


def mixtures_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have the experts of a model, by their names, in the order of its layers. ValueError
    says why it has none whose routing can be seen.
    """
    kind = type(model).__name__
    found = {name: module for name, module in model.named_modules() if in_form(module)}
    if not found:
        raise ValueError(
            f"{kind} has no experts in transformers' form ({SEAM}), so there is no routing; leave "
            "return_routing and replay_routing() out"
        )
    if any(getattr(module, "_is_expert_parallel", False) for module in found.values()):
        raise ValueError(
            f"the experts of {kind} are divided among ranks, each of which numbers its own; use a model that "
            "is whole"
        )
    compiled: Any = [module for module in model.modules() if module._compiled_call_impl is not None]
    if compiled:
        raise ValueError(
            f"{type(compiled[0]).__name__} of {kind} is compiled, and compiled code shows no routing; do not "
            "compile it"
        )
    return found
