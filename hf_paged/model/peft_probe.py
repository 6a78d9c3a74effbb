"""peft's LoRA layers against what is computed in their place: a release of peft may compute otherwise."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .lora import add_parts
from .peft_parts import base_of, is_invoked, kind_of

FILE = "peft.tuners.lora.layer"
VARIANT_FILE = "peft.tuners.lora.variants"
NAME = "probe"
CLOSE = 1e-4
"""Of the largest output, in float32."""
TOKENS = 3

logger = logging.getLogger("hf_paged")


class Product(NamedTuple):
    """A low-rank product of a LoRA layer, by what its forward may treat in a way of its own."""

    layer: Literal["linear", "conv1d", "embedding"]
    dora: bool = False
    bias: bool = False
    invoked: bool = False
    """True for an aLoRA's."""

    @classmethod
    def of(cls, layer: Any, name: str) -> Product:
        """That of an adapter in a LoRA layer of peft's."""
        dora = name in layer.lora_magnitude_vector
        if name in layer.lora_embedding_A:
            return cls("embedding", dora)
        second = layer._modules["lora_B"]._modules[name]._parameters
        kind: Literal["linear", "conv1d"] = "conv1d" if isinstance(base_of(layer), Conv1D) else "linear"
        return cls(kind, dora, second.get("bias") is not None, is_invoked(layer.lora_variant.get(name)))

    @property
    def title(self) -> str:
        """Its name in a message."""
        kind = "DoRA" if self.dora else "aLoRA" if self.invoked else "LoRA"
        what = {"linear": "linear layers", "conv1d": "Conv1D", "embedding": "embeddings"}[self.layer]
        return f"{kind} of {what}{' with lora_bias' if self.bias else ''}"


_verdicts: dict[object, str | None] = {}
"""By products, and peft's functions that compute them."""


def why_otherwise(product: Product) -> str | None:
    """Why peft's own modules must compute such a product: for a small layer they answer otherwise. None if
    they answer the same. Each is tried once.
    """
    key = product, *_forwards()
    if key not in _verdicts:
        _verdicts[key] = _compared(product)
        if _verdicts[key] is not None:
            logger.warning("%s: peft's own modules compute such adapters, in forwards apart", _verdicts[key])
    return _verdicts[key]


def _forwards() -> list[object]:
    """peft's functions that compute low-rank products."""
    layers, variants = sys.modules.get(FILE), sys.modules.get(VARIANT_FILE)
    names = {layers: ("Linear", "Embedding"), variants: ("DoraLinearVariant", "DoraEmbeddingVariant")}
    return [getattr(getattr(file, name, None), "forward", None) for file in names for name in names[file]]


def _compared(product: Product) -> str | None:
    import peft

    try:
        with torch.random.fork_rng([]), torch.device("cpu"), torch.no_grad():
            layer = _made(product)
            if product.layer == "embedding":
                x = torch.arange(TOKENS, device="cpu")[None]
            else:
                x = torch.linspace(-1, 1, TOKENS * 6, device="cpu", dtype=torch.float32).view(1, TOKENS, 6)
            theirs = layer(x, alora_offsets=[TOKENS]) if product.invoked else layer(x)
            kind: Any = kind_of(layer)
            ours = add_parts(layer, base_of(layer)(x), x, (kind.read(layer, NAME),))
    except Exception as error:
        return f"{product.title} of peft {peft.__version__} cannot be tried ({type(error).__name__}: {error})"
    if theirs.shape == ours.shape and (theirs - ours).abs().max() <= CLOSE * theirs.abs().max():
        return None
    return f"peft {peft.__version__} computes {product.title} otherwise than is known"


def _made(product: Product) -> Any:
    """A small layer of peft's with an adapter whose weights are not zero."""
    import peft

    model = nn.Module()
    if product.layer == "linear":
        model.own = nn.Linear(6, 4)
    elif product.layer == "conv1d":
        model.own = Conv1D(4, 6)
    else:
        model.own = nn.Embedding(8, 4)
    options: dict[str, Any] = {"lora_bias": True} if product.bias else {}
    if product.invoked:
        options |= {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["own"], init_lora_weights=False, use_dora=product.dora,
        fan_in_fan_out=product.layer == "conv1d", **options,
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model, NAME)
    for number, each in enumerate(model.float().eval().parameters()):
        each.copy_(torch.cos(torch.arange(each.numel(), device="cpu") * 0.7 + number).view(each.shape) + 0.5)
    return model.own
