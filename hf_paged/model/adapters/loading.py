"""Adapters from a folder, a state dict or another peft model: read, checked, and brought to a device."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..lora import Adapter, LowRank
from ..peft_layers import LoraLayers
from ..ranks.tensor_parallel import mesh_of
from ..shards import local_part
from ..switch import modules_of
from ..weights_digest import host_bytes
from .divided import part_here
from .files import read_folder
from .invocation import Invocation

KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
MORE_THAN_PRODUCTS = {
    "use_dora": "DoRA",
    "lora_bias": "biases",
    "modules_to_save": "modules_to_save",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Options of a LoraConfig that make an adapter more than low-rank products of linear layers."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Ways to begin an adapter that take its beginning off the model's own weights."""
ALIGNMENT = 16
"""Bytes that kernels want weights to begin at."""


class HostAdapter:
    """An adapter that no module holds: its weights lie together on the host, and are copied to the device
    when a request needs them. They never change. On several ranks it is the part of this one.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, LowRank], pinned: bool, invocation: Invocation = ()
    ) -> None:
        """layers: by their names in the model. pinned: whether the host's memory is locked, so that a copy
        delays nothing else.
        """
        self.invocation = invocation
        self.rank = max(part.a.shape[0] for part in layers.values())
        parts = {path: _padded(part) for path, part in part_here(model, layers).items()}
        sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for part in parts.values() for each in part[:2]]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._parts = {
            path: LowRank(part.a.to("meta"), part.b.to("meta"), part.scale) for path, part in parts.items()
        }
        self.follow(model)
        for module, part in zip(self._modules, parts.values(), strict=True):
            (own,) = self.host.layers[module]
            own.a.copy_(part.a)
            own.b.copy_(part.b)
        self.key = _content(layers)
        """Its content on all ranks, and where it belongs."""

    def follow(self, model: nn.Module) -> None:
        """Find its layers in the model: peft puts others in their places and takes them away again."""
        self._modules = [_layer(model, path) for path in self._parts]
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
        layers: dict[nn.Module, tuple[LowRank, ...]] = {}
        for module, part in zip(self._modules, self._parts.values(), strict=True):
            found = []
            for each in part[:2]:
                found.append(memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape))
                begin += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
            layers[module] = (LowRank(found[0], found[1], part.scale),)
        return Adapter(layers)


def bytes_of_rank(model: nn.Module, rank: int) -> int:
    """The memory on a device of an adapter in the model's type, on every linear layer but the head."""
    modules = modules_of(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    size = next(model.parameters()).dtype.itemsize
    found = 0
    for module in LoraLayers(modules).without_adapters(modules):
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            for width in _widths(module):
                found += -(-rank * width * size // ALIGNMENT) * ALIGNMENT
    return found


def _widths(layer: Any) -> tuple[int, int]:
    """The inputs and outputs of a linear layer."""
    if isinstance(layer, Conv1D):
        inputs, outputs = layer.weight.shape
        return inputs, outputs
    return layer.in_features, layer.out_features


def _content(layers: Mapping[str, LowRank]) -> bytes:
    """A digest of an adapter's weights, their scales and the layers that they belong to."""
    digest = blake2b(digest_size=32)
    for path, part in layers.items():
        digest.update(repr((path, part.scale, part.a.shape, part.b.shape)).encode())
        for each in (part.a, part.b):
            digest.update(repr(each.dtype).encode())
            digest.update(host_bytes(each))
    return digest.digest()


def _padded(part: LowRank) -> LowRank:
    """A layer's weights with a rank that is a multiple of 8, as kernels read it."""
    rank = part.a.shape[0]
    more = -rank % 8
    pad = nn.functional.pad
    return LowRank(
        pad(part.a.detach().cpu(), (0, 0, 0, more)).contiguous(),
        pad(part.b.detach().cpu(), (0, more)).contiguous(),
        part.scale,
    )


def load_adapter(
    model: nn.Module, source: Any, config: Any, name: str, over: Callable[[], bool] = lambda: False
) -> dict[str, LowRank]:
    """An adapter from a folder as peft saves it, from a state dict with its LoraConfig, or from another peft
    model that has an adapter of that name: what it adds to layers, by their names. over: true as soon as
    files need not be read any more.
    """
    state, config = read_source(source, config, name, over)
    _check(config)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    others = []
    matches = {key: KEY.fullmatch(key) for key in state}
    names = {match[3] for match in matches.values() if match is not None}
    if len(names) > 1 and name not in names:
        raise ValueError(f"the state dict has the adapters {sorted(map(str, names))}, and none is {name!r}")
    for key, tensor in state.items():
        match = matches[key]
        if match is not None and len(names) > 1 and match[3] != name:
            continue
        if match is None and _is_of_model(model, key, tensor):
            continue  # peft saves embeddings and heads along with their adapters
        if match is None:
            others.append(key)
        else:
            halves.setdefault(match[1], {})[match[2]] = tensor
    if others or not halves:
        what = f"{others[0]!r} and {len(others) - 1} more are" if others else "there is nothing"
        raise ValueError(
            f"the engine adds low-rank products of linear layers, and {what} in the adapter; put it into a "
            "peft model and give the engine that"
        )
    layers = {}
    for path, found in halves.items():
        module = _layer(model, path)
        if found.keys() != {"A", "B"}:
            raise ValueError(
                f"the adapter has only lora_{''.join(found)} of {path}; expected lora_A and lora_B"
            )
        part = LowRank(found["A"], found["B"], _scale(config, path, found["A"].shape[0]))
        _check_shapes(path, module, part)
        layers[path] = _as_precise(module, part)
    return layers


def _as_precise(module: nn.Module, part: LowRank) -> LowRank:
    """Weights of no fewer digits than the layer's own, as peft loads them."""
    base: Any = getattr(module, "base_layer", module)
    own = base.weight.dtype
    wide = torch.promote_types(part.a.dtype, own) if own.is_floating_point else part.a.dtype
    return LowRank(part.a.to(wide), part.b.to(wide), part.scale)


def _is_of_model(model: nn.Module, key: str, tensor: torch.Tensor) -> bool:
    """True if a tensor in a state dict is one that the model has."""
    path = key.removeprefix("base_model.model.")
    parameters = dict(model.named_parameters())
    known = parameters.get(path.replace(".base_layer.", "."), parameters.get(path))
    if known is None or known.shape != tensor.shape:
        return False
    if local_part(known) is not known:
        raise ValueError(
            f"the adapter was saved with {path}, of which each rank has a part, so it is not known to be the "
            "model's own; save the adapter with save_embedding_layers=False"
        )
    return torch.equal(known.detach().to(tensor), tensor)


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


def _check(config: Any) -> None:
    """Raise for what is more than low-rank products, by its name."""
    kind = str(getattr(config, "peft_type", None)).removeprefix("PeftType.")
    if kind != "LORA":
        raise ValueError(
            f"the engine adds LoRA adapters to a model, got one of {kind}; put it into a peft model, make it "
            "active and give the engine that"
        )
    used = [what for option, what in MORE_THAN_PRODUCTS.items() if getattr(config, option, None)]
    used += ["biases"] if getattr(config, "bias", "none") != "none" else []
    begin = getattr(config, "init_lora_weights", True)
    used += [begin] if isinstance(begin, str) and begin.startswith(CHANGES_BASE) else []
    if used:
        raise ValueError(
            f"the engine adds low-rank products to linear layers, and this adapter has {', '.join(used)}; "
            "put it into a peft model, make it active and give the engine that"
        )


def _layer(model: nn.Module, path: str) -> nn.Module:
    """The layer that a state dict calls so."""
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(
            f"{type(model).__name__} has no layer {path!r}; the adapter is for another model"
        ) from error
    base = getattr(module, "base_layer", module)
    if not isinstance(base, (nn.Linear, Conv1D)):
        raise ValueError(f"{path} is a {type(base).__name__}; expected a linear layer")
    return module


def _check_shapes(path: str, module: nn.Module, part: LowRank) -> None:
    base: Any = getattr(module, "base_layer", module)
    inputs, outputs = _widths(base)
    if (part.a.shape[1], part.b.shape[0]) != (inputs, outputs) or part.a.shape[0] != part.b.shape[1]:
        raise ValueError(
            f"{path} has {inputs} inputs and {outputs} outputs, the adapter's weights are "
            f"{list(part.a.shape)} and {list(part.b.shape)}; it is for another model"
        )


def _scale(config: Any, path: str, rank: int) -> float:
    """The factor of the product, as peft has it."""
    from peft.utils.other import get_pattern_key

    ranks: dict[str, int] = config.rank_pattern or {}
    own = ranks.get(get_pattern_key(list(ranks), path), config.r)
    if own != rank or not _targets(config, path):
        wanted = f"target_modules={config.target_modules!r}" if own == rank else f"r={own!r}"
        raise ValueError(
            f"the adapter has weights of rank {rank} for {path}, and its config {wanted:.200}; give the one "
            "that it was saved with"
        )
    patterns: dict[str, int] = config.alpha_pattern or {}
    alpha: float = patterns.get(get_pattern_key(list(patterns), path), config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    if not math.isfinite(scale):
        raise ValueError(f"the adapter has lora_alpha={alpha} for {path}; expected a finite number")
    return scale


def _targets(config: Any, path: str) -> bool:
    """True if a config names a layer; one that peft has not completed names none by itself."""
    from peft.tuners.tuners_utils import check_target_module_exists

    open_ended = config.target_modules in (None, "all-linear")
    return open_ended or bool(check_target_module_exists(config, path))
