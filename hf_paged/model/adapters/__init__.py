"""LoRA adapters of a model: which there are, what they add, and how a batch of tokens gets each its own."""

from ..lora import Adapter, LowRank, combine
from ..peft_layers import LoraLayers, adapter_names_of
from .apply import AdapterBatch, Inapplicable, applied
from .table import AdapterTable

__all__ = [
    "Adapter",
    "AdapterBatch",
    "AdapterTable",
    "Inapplicable",
    "LoraLayers",
    "LowRank",
    "adapter_names_of",
    "applied",
    "combine",
]
