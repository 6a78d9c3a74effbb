"""Kernels of an engine's first launches, compiled while its model is tried out, and later ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...kv import GroupBatches, Layout, TritonOps, is_out_of_memory
from ...kv.ops import choose
from ...kv.warmup import AttentionShape, Job, Warming, compile_digest
from ...model.capture.branches import layers_of_one_input
from ...model.capture.fusion import Fusion
from ...model.capture.gemv import MOST_ROWS
from ...model.capture.products import fused_parameters
from ...model.capture.step import Size, bucket_of
from ...model.capture.warmup import COMPILED_FOR, attention_shape
from ...model.ranks.tensor_parallel import heads_here
from .captured import WIDTHS
from .eager import EagerModel

ROWS = bucket_of(1)
"""Those of the captured step that comes first: one request, decoding."""
LARGEST_PRODUCT = 2**28
"""Bytes that a product may take or make to be computed ahead."""
MULTIPLIED = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def warming(eager: EagerModel, captures: bool, flat: bool) -> Iterator[Warming | None]:
    """Compile what an engine will launch first; at the end all of it is compiled, and threads compile what
    other sizes of steps need. None if nothing is compiled.

    captures: whether steps are captured. flat: whether the model may take a flat row.
    """
    kernels = eager.pools.config.kernels
    if eager.device.type not in COMPILED_FOR or kernels == "torch" or (not flat and kernels == "auto"):
        yield None
        return
    at_work = Warming(
        eager.device,
        lambda: TritonOps().first,
        lambda: jobs(eager, captures),
        lambda: later_jobs(eager) if captures else [],
    )
    try:
        yield at_work
        at_work.wait()
    except BaseException:
        at_work.stop()
        at_work.join()
        raise


class _Expected(NamedTuple):
    """Kernels' calls, as the config lets expect them."""

    ops: TritonOps
    fusion: Fusion | None
    """The small operations of captured steps, if there are any."""
    attentions: list[AttentionShape]
    """Of each kind of layer."""
    dtype: torch.dtype
    vocabulary: int


def _expected(eager: EagerModel, captures: bool) -> _Expected | None:
    model: Any = eager.model
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_heads = config.num_attention_heads
    _, key_heads = heads_here(model, query_heads, getattr(config, "num_key_value_heads", None) or query_heads)
    layout = Layout(eager.device, model.dtype, key_heads, dim, dim)
    ops = choose(eager.pools.config.kernels, layout, captured=True)
    if not isinstance(ops, TritonOps):
        return None
    fusion = Fusion(model, ops.kernels) if captures else None
    makers = [GroupBatches(group, captured=True) for group in eager.pools.paged.values()]
    attentions = [attention_shape(model, layout, maker, fusion) for maker in makers]
    return _Expected(ops, fusion, attentions, layout.dtype, config.vocab_size)


def jobs(eager: EagerModel, captures: bool) -> Sequence[Job]:
    """Calls on tensors without data of the kernels of a prompt, of a step behind it and of that step
    captured, as the config lets expect.

    What is not foreseen (layers that differ among each other) is compiled when it is launched.
    """
    expected = _expected(eager, captures)
    if expected is None:
        return []
    ops, fusion, attentions, dtype, _ = expected
    found: list[Job] = []
    for attention in attentions:
        found += attention.jobs(ops, ROWS, WIDTHS[0], captured=fusion is not None)
    found.append(partial(compile_digest, ops))
    return found if fusion is None else [*found, *fusion.calls(ROWS, dtype)]


def later_jobs(eager: EagerModel) -> Sequence[tuple[Hashable, Sequence[Job]]]:
    """The kernels of captured steps of more rows, by the label of the sizes that need them: the largest
    first, which can hold the others. Behind the first of them those of sampling.
    """
    expected = _expected(eager, True)
    if expected is None:
        return []
    ops, fusion, attentions, dtype, vocabulary = expected
    if fusion is None:
        return []
    limits = eager.pools.config.limits()
    most = bucket_of(limits.sequences)
    tokens = max(limits.tokens, limits.sequences)
    chunks: list[Job] = [
        job for each in attentions for job in each.spans(ops, bucket_of(tokens), most, WIDTHS[0])
    ]
    scores = torch.empty(ROWS, vocabulary, dtype=torch.float32, device="meta")
    chances = torch.empty(ROWS, dtype=torch.float64, device="meta")
    sampling = [partial(ops.kernels.draw, scores, chances), partial(ops.kernels.logsumexp, scores)]
    found: list[tuple[Hashable, Sequence[Job]]] = [
        ("spans", [*chunks, *fusion.calls(bucket_of(tokens), dtype)]),
        ("sampling", sampling),
    ]
    known: dict[AttentionShape, set[Any]] = {each: set() for each in attentions}
    for power in range((most - 1).bit_length(), 0, -1):
        rows = min(2**power, most)
        singles = [job for each in attentions for job in each.singles(ops, rows, WIDTHS[0], known[each])]
        few = fusion.calls(rows, dtype) if rows == min(MOST_ROWS, most) else []
        found.append((power, [*singles, *few]))
    return found


def load_products(model: nn.Module, rows: Iterable[int]) -> None:
    """Multiply so many rows by a weight of each shape, and by several that lie side by side.

    A GPU loads the kernel of a product when that is met first, and then waits until all that it was given is
    done: no step could be captured while another is computed.
    """
    kinds: dict[Hashable, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for module in model.modules():
        several = layers_of_one_input(module)
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            several = [[module]]
        for layers in several:
            weight, bias = fused_parameters(layers) or (None, None)
            if weight is not None and weight.device.type in COMPILED_FOR and weight.dtype in MULTIPLIED:
                kinds[weight.shape, weight.dtype, weight.device, bias is None] = weight, bias
    try:
        with torch.no_grad():
            for count, (weight, bias) in product(sorted(set(rows)), kinds.values()):
                if count * max(weight.shape) * weight.itemsize <= LARGEST_PRODUCT:
                    x = torch.zeros_like(weight[:1]).expand(count, -1).contiguous()
                    functional.linear(x[:, None], weight, bias)
    except Exception as error:
        if not is_out_of_memory(error):  # then they are loaded where they are met
            raise


def label_of(size: Size) -> Hashable:
    """Which of the later jobs a captured step's kernels are compiled by; 0 for none of them."""
    return "spans" if size.form == "spans" else (size.rows - 1).bit_length()


@contextmanager
def without_plans(device: torch.device) -> Iterator[None]:
    """On a GPU keep torch's attention from cuDNN, which plans for a quarter of a second at each new length.

    A trial uses many lengths once. Forwards of other threads meanwhile run without it, too: other kernels,
    the same answers.
    """
    backends = torch.backends.cuda
    spared = device.type == "cuda" and backends.cudnn_sdp_enabled() and backends.math_sdp_enabled()
    if spared:
        backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if spared:
            backends.enable_cudnn_sdp(True)
