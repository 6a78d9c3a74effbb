"""The modules that peft puts in the place of a model's own, and the parts of adapters in them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from .adaption_prompts import is_prompted
from .entries import Entry
from .parts import LowRank, LowRankEmbedding, Part, SavedModule, TrainedTokens
from .patches import is_of_transformers, own_forward
from .shards import local_part

LINEAR = frozenset(
    {"Linear", "Linear8bitLt", "Linear4bit", "TorchaoLoraLinear", "GPTQLoraLinear", "AwqLoraLinear"}
)
"""peft's classes of LoRA layers that add a low-rank product to what a layer of any kind answers."""
VARIANTS = frozenset({"DoraLinearVariant", "DoraEmbeddingVariant"})
"""peft's classes of what makes a LoRA layer more than a product, as far as parts compute it."""
BY_ROW = re.compile(r"(RMS|Layer)Norm$")
"""Classes of modules, beside linear layers and embeddings, that compute each row by itself."""

READS_WEIGHT = re.compile(r"self\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape)|, torch\.Tensor)")
"""A forward's look at a tensor of a module below it."""


class PeftModule(NamedTuple):
    """A kind of peft's modules: how parts of adapters are read from it."""

    names: Callable[[Any], Iterable[str]]
    """The adapters that have a part there."""
    has: Callable[[Any, str], bool]
    """True if an adapter has one."""
    read: Callable[[Any, str], Part]
    why_not: Callable[[Any, str], str | None]
    """Why only peft's own code can compute the part of an adapter."""
    entries: Callable[[Any, str], Iterable[Entry]]
    """The entries that an adapter's part is read from, in what the module has for all adapters."""
    own_parts: Collection[str]
    """Modules in it that belong to adapters."""
    homes: Collection[str]
    """The attributes with an entry for each adapter, of those that `read` reads."""


def kind_of(module: Any) -> PeftModule | None:
    """The kind of a module of peft's, if parts can be read from it."""
    kind: Any = type(module)
    return _kind_of(kind)


@cache
def _kind_of(of: type) -> PeftModule | None:
    name, home = of.__name__, of.__module__
    if home.startswith("peft.tuners.lora."):
        return LORA_LINEAR if name in LINEAR else LORA_EMBEDDING if name == "Embedding" else None
    return WRAPPERS.get(name) if home.startswith(("peft.utils.", "peft.tuners.trainable_tokens.")) else None


def base_of(module: Any) -> Any:
    """The model's own module in a module of peft's; a module of the model itself."""
    inner = inner_of(module)
    return module if inner is None else base_of(inner)


def inner_of(module: Any) -> Any:
    """The module around which peft has put this one; None for one of the model itself."""
    own = module._modules
    if "token_adapter" in own:
        return own["token_adapter"].base_layer
    for name in ("model",) if is_prompted(module) else ("base_layer", "original_module"):
        if own.get(name) is not None:
            return own[name]
    return None


def wraps_around(module: Any) -> list[Any]:
    """The module of peft's itself, and the one in it that has the trained tokens."""
    return [each for each in (module, module._modules.get("token_adapter")) if each is not None]


def homes_in(module: Any) -> Iterator[Entry]:
    """The entries of what a module of peft's has for all adapters."""
    kind = kind_of(module)
    if kind is None:
        return
    for each in wraps_around(module):
        if each is not module:
            yield module._modules, "token_adapter"
        for where in kind.homes:
            for own in (each._modules, each.__dict__):
                if where in own:
                    yield own, where


def names_in(module: Any) -> dict[str, None]:
    """The adapters that have a part in a module of peft's, in their order."""
    kind = kind_of(module)
    return dict.fromkeys(() if kind is None else kind.names(module))


def takes_products(module: nn.Module) -> bool:
    """True for what is, or is put around, a linear layer."""
    base = base_of(module)
    return isinstance(base, Conv1D) or hasattr(base, "in_features")


def why_not_by_row(module: nn.Module) -> str | None:
    """Why rows of a batch cannot each have a module of their own in the place of this one."""
    known = isinstance(module, (nn.Linear, nn.Embedding, Conv1D)) or BY_ROW.search(type(module).__name__)
    if not known or module._modules:
        return f"a {type(module).__name__} in modules_to_save is no linear layer, embedding or norm"
    needed = [
        each.name
        for each in inspect.signature(type(module).forward).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(needed) > 2:
        return f"a {type(module).__name__} in modules_to_save has several inputs"
    forward = own_forward(module)
    if (forward is not None and not is_of_transformers(forward)) or any(
        each.device.type == "meta" for each in module.parameters()
    ):
        return "an adapter's weights are loaded for each forward"
    return None


def why_read_outside(parent: nn.Module, name: str) -> str | None:
    """Why a module of another weight in the place of one below `parent` would not be enough: a forward reads
    the weight itself.
    """
    kind: Any = type(parent)
    if name not in _weights_read(kind):
        return None
    return f"the forward of {kind.__name__} reads the weight of {name}, which modules_to_save replaces"


@cache
def _weights_read(kind: type) -> frozenset[str]:
    """The names of modules whose weights the forwards of a class read, not only facts about them."""
    found: set[str] = set()
    for name in dir(kind):
        function = inspect.unwrap(getattr(kind, name)) if "forward" in name else None
        if inspect.isfunction(function):
            with suppress(OSError):  # no source
                found.update(READS_WEIGHT.findall(inspect.getsource(function)))
    return frozenset(found)


# ---- LoRA of linear layers and embeddings


def _lora_names(layer: Any) -> list[str]:
    return [*layer.lora_A, *layer.lora_embedding_A]


def _has_lora(layer: Any, name: str) -> bool:
    parts = layer._modules
    return name in parts["lora_A"]._modules or name in parts["lora_embedding_A"]


def _read_linear(layer: Any, name: str) -> LowRank:
    parts = layer._modules  # past torch's own lookups, which cost more than all the rest
    a = parts["lora_A"]._modules[name]._parameters["weight"]
    second = parts["lora_B"]._modules[name]._parameters
    bias = second.get("bias")
    own = parts["lora_magnitude_vector"]
    magnitude = local_part(own[name].weight) if name in own else None
    bias = None if bias is None else local_part(bias)
    return LowRank(local_part(a), local_part(second["weight"]), float(layer.scaling[name]), bias, magnitude)


def _read_embedding(layer: Any, name: str) -> LowRankEmbedding:
    own = layer.lora_magnitude_vector
    magnitude = own[name].weight if name in own else None
    a, b = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
    return LowRankEmbedding(local_part(a), local_part(b), float(layer.scaling[name]), magnitude)


def _linear_entries(layer: Any, name: str) -> Iterator[Entry]:
    yield from _entries(layer, "lora_A", name, "weight")
    yield from _entries(layer, "lora_B", name, "weight", "bias")
    yield from _scale_entries(layer, name)


def _embedding_entries(layer: Any, name: str) -> Iterator[Entry]:
    for where in ("lora_embedding_A", "lora_embedding_B"):
        yield layer._modules[where]._parameters, name
    yield from _scale_entries(layer, name)


def _scale_entries(layer: Any, name: str) -> Iterator[Entry]:
    yield from _entries(layer, "lora_magnitude_vector", name, "weight")
    yield layer.scaling, name


def _entries(layer: Any, where: str, name: str, *keys: str) -> Iterator[Entry]:
    """The entries of an adapter's module in a layer, and of its weights."""
    held = layer._modules[where]._modules
    yield held, name
    for key in keys if name in held else ():
        yield held[name]._parameters, key


def is_invoked(variant: object) -> bool:
    """True for the low-rank products of an aLoRA."""
    return type(variant).__name__.startswith("ALora")


def _why_not_lora(layer: Any, name: str) -> str | None:
    variant = layer.lora_variant.get(name)
    if not (variant is None or is_invoked(variant) or type(variant).__name__ in VARIANTS):
        kind = type(variant).__name__.removesuffix("Variant").removesuffix("Linear")
        return f"the adapter {name!r} is more than a low-rank product ({kind})"
    for part in (layer.lora_A, layer.lora_B):
        if name in part and (type(part[name]) is not nn.Linear or part[name].weight.device.type == "meta"):
            return "an adapter's weights are loaded for each forward"
    if layer.lora_embedding_A and (
        getattr(base_of(layer), "max_norm", None) is not None or getattr(layer, "tp_layer", None) is not None
    ):
        return "an embedding has max_norm, or ranks divide it"
    return None


LORA_PARTS = frozenset(
    {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_dropout"}
)
SCALES = ("lora_magnitude_vector", "scaling")
LORA_LINEAR = PeftModule(
    _lora_names,
    _has_lora,
    _read_linear,
    _why_not_lora,
    _linear_entries,
    LORA_PARTS,
    ("lora_A", "lora_B", *SCALES),
)
LORA_EMBEDDING = LORA_LINEAR._replace(
    read=_read_embedding,
    entries=_embedding_entries,
    homes=("lora_embedding_A", "lora_embedding_B", *SCALES),
)


# ---- trained tokens


def _tokens_of(module: Any) -> Any:
    """The layer that has the trained tokens."""
    return module._modules.get("token_adapter", module)


def _token_names(module: Any) -> list[str]:
    return list(_tokens_of(module).trainable_tokens_delta)


def _has_tokens(module: Any, name: str) -> bool:
    return name in _tokens_of(module).trainable_tokens_delta


def _read_tokens(module: Any, name: str) -> TrainedTokens:
    layer = _tokens_of(module)
    return TrainedTokens(
        tuple(map(int, layer.token_indices[name])), local_part(layer.trainable_tokens_delta[name])
    )


def _token_entries(module: Any, name: str) -> Iterator[Entry]:
    layer = _tokens_of(module)
    yield layer.trainable_tokens_delta._parameters, name
    yield layer.token_indices, name


def _why_not_tokens(module: Any, name: str) -> str | None:
    return why_not_tokens(base_of(module), _tokens_of(module).token_indices[name])


def why_not_tokens(base: Any, ids: Collection[int]) -> str | None:
    """Why tokens of a module cannot be replaced row by row."""
    if len(set(ids)) < len(ids):
        return "an adapter has one trained token twice"
    if not isinstance(base, (nn.Embedding, nn.Linear)) or getattr(base, "max_norm", None) is not None:
        return f"an adapter has trained tokens of a {type(base).__name__}"
    if getattr(base, "bias", None) is not None:
        return "an adapter has trained tokens of a head with a bias"
    return None


# ---- whole modules


def _saved_names(module: Any) -> list[str]:
    return list(module.modules_to_save)


def _has_saved(module: Any, name: str) -> bool:
    return name in module._modules["modules_to_save"]._modules


def _read_saved(module: Any, name: str) -> SavedModule:
    return SavedModule(module.modules_to_save[name])


def _saved_entries(module: Any, name: str) -> Iterator[Entry]:
    yield from _entries(module, "modules_to_save", name)
    own = module.modules_to_save._modules.get(name)
    for held in () if own is None else (own._parameters, own._buffers):
        for key in held:
            yield held, key


def _why_not_saved(module: Any, name: str) -> str | None:
    return why_not_by_row(module.modules_to_save[name])


TOKENS = PeftModule(
    _token_names,
    _has_tokens,
    _read_tokens,
    _why_not_tokens,
    _token_entries,
    ("trainable_tokens_delta", "trainable_tokens_original"),
    ("trainable_tokens_delta", "token_indices"),
)
WRAPPERS = {
    "TrainableTokensWrapper": TOKENS,
    "TrainableTokensLayer": TOKENS,
    "ModulesToSaveWrapper": PeftModule(
        _saved_names,
        _has_saved,
        _read_saved,
        _why_not_saved,
        _saved_entries,
        ("modules_to_save",),
        ("modules_to_save",),
    ),
}
"""By the names of peft's classes."""
