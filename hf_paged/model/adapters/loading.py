"""Adapters from a folder, a state dict or another peft model: read, checked, and brought to a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..lora import Adapter
from ..parts import LowRank, LowRankEmbedding, Part, Parts, SavedModule, by_kernels
from ..peft_layers import LoraLayers
from ..peft_parts import base_of, why_read_outside
from ..peft_probe import Product, why_otherwise
from ..ranks.tensor_parallel import mesh_of
from ..switch import modules_of
from ..weights_digest import content_digest
from .divided import part_here
from .files import read_folder
from .invocation import Invocation, invocation_in
from .state_dict import NoParts, module_at, parts_in, widths_of

NOT_COMPUTED = {
    "target_parameters": "target_parameters",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Options of a LoraConfig for which there are no parts."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Ways to begin an adapter that take its beginning off the model's own weights."""
ALIGNMENT = 16
"""Bytes that kernels want weights to begin at."""


class HostAdapter:
    """An adapter that no module holds: its weights lie together on the host, and are copied to the device
    when a request needs them. They never change. On several ranks it is the part of this one.
    """

    why_apart: str | None = None
    """Kernels compute it."""
    copies_base = False

    def __init__(self, model: nn.Module, layers: Parts, pinned: bool, invocation: Invocation = ()) -> None:
        """layers: by their names in the model. pinned: whether the host's memory is locked, so that a copy
        delays nothing else.
        """
        self.invocation = invocation
        self.rank = max(sum(part.rank for part in parts) for parts in layers.values())
        self.reads_base = any(part.reads_base for parts in layers.values() for part in parts)
        """True if it is computed from weights of the model, too."""
        here = part_here(model, layers)
        parts = {path: tuple(part.padded() for part in own) for path, own in here.items()}
        tensors = [tensor for own in parts.values() for part in own for tensor in part.tensors]
        sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._parts = {
            path: tuple(part.mapped(lambda each: each.detach().to("meta")) for part in own)
            for path, own in parts.items()
        }
        self.follow(model)
        laid = (tensor for part in self.host.parts for tensor in part.tensors)
        for own, tensor in zip(laid, tensors, strict=True):
            own.detach().copy_(tensor)
        self.key = _content(layers)
        """Its content on all ranks, and where it belongs."""

    def follow(self, model: nn.Module) -> None:
        """Find its layers in the model: peft puts others in their places and takes them away again."""
        self._modules = [module_at(model, path) for path in self._parts]
        self.host = self._laid_over(self._memory)

    @property
    def digest(self) -> str:
        """A short name of its content that is the same in every process."""
        return self.key.hex()[:16]

    @property
    def bytes(self) -> int:
        """The memory that it takes on a device."""
        return self._memory.nbytes

    def copy_to(self, device: torch.device) -> Adapter:
        """Its weights on a device, on their way there if the memory is pinned."""
        return self._laid_over(self._memory.to(device, non_blocking=True))

    def _laid_over(self, memory: torch.Tensor) -> Adapter:
        """The adapter whose weights lie in `memory`."""
        begin = 0

        def laid(each: torch.Tensor) -> torch.Tensor:
            nonlocal begin
            found = memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
            begin += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
            return found

        items = zip(self._modules, self._parts.values(), strict=True)
        return Adapter({module: tuple([part.mapped(laid) for part in parts]) for module, parts in items})


def bytes_of_rank(model: nn.Module, rank: int) -> int:
    """The memory on a device of an adapter in the model's type, on every linear layer but the head."""
    modules = modules_of(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    size = next(model.parameters()).dtype.itemsize
    found = 0
    for module in LoraLayers(modules).without_adapters(modules):
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            for width in widths_of(module):
                found += -(-rank * width * size // ALIGNMENT) * ALIGNMENT
    return found


def _content(layers: Parts) -> bytes:
    """A digest of an adapter's weights, their settings and the modules that they belong to."""
    parts = [(path, part) for path, several in layers.items() for part in several]
    return content_digest(
        ((path, part.settings, [each.shape for each in part.tensors]), part.tensors) for path, part in parts
    )


def load_adapter(
    model: nn.Module,
    source: Any,
    config: Any,
    name: str,
    over: Callable[[], bool] = lambda: False,
    *,
    kernels: bool = False,
) -> Parts:
    """An adapter from a folder as peft saves it, from a state dict with its LoraConfig, or from another peft
    model that has an adapter of that name: what it does at modules, by their names. over: true as soon as
    files need not be read any more. kernels: whether kernels must compute all of it. Raises NoParts for one
    that only peft's own modules compute.
    """
    state, config = read_source(source, config, name, over)
    why_not = why_no_parts(config)
    if why_not is not None:
        raise NoParts(why_not)
    parts = parts_in(model, state, config, name)
    for path in (path for path, own in parts.items() if any(isinstance(part, SavedModule) for part in own)):
        above, _, last = path.rpartition(".")
        why_not = why_read_outside(model.get_submodule(above), last)
        if why_not is not None:
            raise NoParts(why_not)
    for path, own in parts.items():
        for part in own:
            why_not = _why_otherwise(module_at(model, path), part, bool(invocation_in(config)))
            if why_not is not None:
                raise NoParts(why_not)
    if kernels and not all(map(by_kernels, parts.values())):
        raise NoParts("no kernel computes whole norms")
    return parts


def _why_otherwise(module: nn.Module, part: Part, invoked: bool) -> str | None:
    """Why peft's own modules must compute a part of an adapter that no module holds."""
    if isinstance(part, LowRankEmbedding):
        return why_otherwise(Product("embedding", part.magnitude is not None))
    if not isinstance(part, LowRank):
        return None
    kind: Literal["linear", "conv1d"] = "conv1d" if isinstance(base_of(module), Conv1D) else "linear"
    return why_otherwise(Product(kind, part.magnitude is not None, part.bias is not None, invoked))


def read_source(
    source: Any, config: Any, name: str, over: Callable[[], bool] = lambda: False
) -> tuple[Mapping[str, torch.Tensor], Any]:
    """An adapter's state dict and its LoraConfig."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'hf_paged[peft]'") from error
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if os.path.isdir(path):
            return read_folder(path, config, over)
        found: Any = peft.PeftConfig.from_pretrained(path) if config is None else config
        return peft.load_peft_weights(path, device="cpu"), found
    configs = getattr(source, "peft_config", None)
    if isinstance(configs, Mapping):
        if name not in configs:
            raise ValueError(f"that model has no adapter {name!r}; it has {sorted(configs)}")
        if mesh_of(source) is not None:
            raise ValueError(
                f"each rank has a part of {name!r}; call save_pretrained() on all of them and give the folder"
            )
        return peft.get_peft_model_state_dict(source, adapter_name=name), configs[name]
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError(
                "a state dict does not contain the scaling of its weights; give config=LoraConfig(...)"
            )
        return source, config
    raise TypeError(
        f"an adapter is a folder, a state dict with config=LoraConfig(...) or a peft model, got "
        f"{type(source).__name__}"
    )


def why_no_parts(config: Any) -> str | None:
    """Why an adapter is not made of parts, by its config."""
    kind = str(getattr(config, "peft_type", None)).removeprefix("PeftType.")
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
        return f"an adapter of the method {kind}"
    used = [what for option, what in NOT_COMPUTED.items() if getattr(config, option, None)]
    begin = getattr(config, "init_lora_weights", True)
    used += [begin] if isinstance(begin, str) and begin.startswith(CHANGES_BASE) else []
    return f"an adapter with {', '.join(used)}" if used else None
