"""Triton kernels over a paged key-value cache. Plain tensors in, plain tensors out; torch and triton only.

Keys and values of one layer come as [blocks, block_size, heads, dim] with any strides (the last must be 1),
so a pool may lie token by token or head by head. Every length is read from device memory: a launch can be
captured in a CUDA graph.
"""

from .advance import advance
from .chain import FUNCTIONS, PARTS, SUMS, Operation, chain
from .conv_spans import conv_spans
from .conv_step import conv_step
from .copy import copy
from .decode import Plan, decode
from .delta_spans import delta_spans
from .delta_step import delta_step
from .digest import GOLDEN, digest
from .experts import Routes, expert_product, expert_sum, route
from .gather import gather
from .gemv import gemv
from .invariant import Invariant, NoFixedOrder
from .launching import find_driver, know_kernels, know_triton, launches_early
from .lora import AdapterPlan, LoraWeights, fits, lora_expand, lora_gather, lora_shrink
from .norm import add_rms_norm, rms_norm
from .prefill import Spans, prefill
from .product import product
from .reduce_norm import reduce_add_rms_norm
from .rotary import rotary, rotary_write
from .rows import mapped, rows
from .sampling import draw, logsumexp
from .scan_spans import scan_spans
from .scan_step import scan_step
from .slot_rows import SlotRows, slot_embed, slot_product
from .ssm_spans import ssm_spans
from .ssm_step import ssm_step
from .swiglu import swiglu
from .top import top
from .write import write

know_kernels()

__all__ = [
    "FUNCTIONS",
    "GOLDEN",
    "PARTS",
    "SUMS",
    "AdapterPlan",
    "Invariant",
    "LoraWeights",
    "NoFixedOrder",
    "Operation",
    "Plan",
    "Routes",
    "SlotRows",
    "Spans",
    "add_rms_norm",
    "advance",
    "chain",
    "conv_spans",
    "conv_step",
    "copy",
    "decode",
    "delta_spans",
    "delta_step",
    "digest",
    "draw",
    "expert_product",
    "expert_sum",
    "find_driver",
    "fits",
    "gather",
    "gemv",
    "know_triton",
    "launches_early",
    "logsumexp",
    "lora_expand",
    "lora_gather",
    "lora_shrink",
    "mapped",
    "prefill",
    "product",
    "reduce_add_rms_norm",
    "rms_norm",
    "rotary",
    "rotary_write",
    "route",
    "rows",
    "scan_spans",
    "scan_step",
    "slot_embed",
    "slot_product",
    "ssm_spans",
    "ssm_step",
    "swiglu",
    "top",
    "write",
]
