"""Models that several processes compute together, each with its part of the heads (transformers' tp_plan)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ..patches import ReplacedForward, is_of_transformers, mark_wrapper
from ..shards import is_divided, local_part
from .symmetric_memory import SymmetricMemory, require_whole, symmetric_memory_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEYS = ("k_proj", "qkv_proj", "query_key_value")
QUERIES = ("q_proj", "qkv_proj", "query_key_value")
"""Last names of the projections that make keys and queries in transformers' plans."""
STACKING = {"MergeModulelist", "Concatenate"}
"""Operations of loading after which a weight that is divided has the parts of the divided ones."""


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The ranks that compute a model together; None if one process has all of it."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) < 2:
        return None
    found: DeviceMesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return found


def why_not_divided(model: nn.Module) -> str | None:
    """Why the ranks of a model cannot have their part of it; None if they can, or if there is one.

    Transformers loads or pairs the wrong weights there, or fails within the first forward.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return None
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    name = type(model).__name__
    config: Any = model.config
    for conversion in get_checkpoint_conversion_mapping(config.model_type) or ():
        if _is_cut_after_dividing(conversion, model):
            return (
                f"transformers divides {conversion.source_patterns[0]!r} of {name} among ranks before it "
                "cuts it into projections, so that each rank has parts of the wrong ones"
            )
        if _is_joined_after_dividing(conversion, model):
            return (
                f"transformers divides {' and '.join(conversion.source_patterns)} of {name} among ranks as "
                "if each were both, so that a rank's parts are not those that its down_proj takes"
            )
    return _why_heads_not_divided(model, plan, mesh.size())


def _is_cut_after_dividing(conversion: Any, model: nn.Module) -> bool:
    """True if loading cuts a weight into several which the plan divides."""
    return len(conversion.target_patterns) > 1 and bool(_styles_of(conversion, model))


def _is_joined_after_dividing(conversion: Any, model: nn.Module) -> bool:
    """True if loading joins whole weights into one which the plan divides as two: each of them is divided so.
    Weights of single experts, which are stacked first, are not.
    """
    steps = [type(each).__name__ for each in getattr(conversion, "operations", None) or ()]
    joins = len(conversion.source_patterns) > 1 and steps[:1] == ["Concatenate"]
    return joins and "packed_colwise" in _styles_of(conversion, model)


def divided_otherwise(model: nn.Module) -> set[str]:
    """The weights of which a rank has another part than their placement says: transformers divides what a
    checkpoint has, and computes them from its parts.
    """
    types = {getattr(getattr(each, "config", None), "model_type", None) for each in model.modules()}
    conversions = [each for kind in types if kind for each in get_checkpoint_conversion_mapping(kind) or ()]
    found: set[str] = set()
    for conversion in conversions:
        steps = {type(each).__name__ for each in getattr(conversion, "operations", None) or ()}
        if steps - STACKING:
            found |= _divided_of(conversion, model).keys()
    return found


def _styles_of(conversion: Any, model: nn.Module) -> set[str]:
    """How the plan divides what loading makes."""
    return set(_divided_of(conversion, model).values())


def _divided_of(conversion: Any, model: nn.Module) -> dict[str, str]:
    """The weights that loading makes and the plan divides, and how."""
    made = tuple(["." + target.lstrip(".") for target in conversion.target_patterns])
    names = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]  # peft's name
    found = [name for name in names if f".{name}".endswith(made)]
    styles = {name: style_of(model, name) or style_of(model, name.removesuffix(".weight")) for name in found}
    return {name: style for name, style in styles.items() if style is not None}


def _why_heads_not_divided(model: nn.Module, plan: dict[str, str], size: int) -> str | None:
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    if not isinstance(queries, int) or not isinstance(keys, int):
        return None
    name = type(model).__name__
    if _style(plan, QUERIES) != "colwise":
        return None
    if queries % size:
        return f"{name} has {queries} attention heads, which {size} ranks cannot divide"
    if _style(plan, KEYS) == "colwise":
        if keys % size:
            return f"{name} has {keys} KV heads, which {size} ranks cannot divide"
    elif keys > 1 and _style(plan, KEYS) is not None:
        return (
            f"each of {size} ranks would hold all {keys} KV heads of {name} and a part of its queries, which "
            "transformers pairs wrongly"
        )
    return None


def heads_here(model: nn.Module, queries: int, keys: int) -> tuple[int, int]:
    """How many of so many attention heads and KV heads this process has."""
    mesh = mesh_of(model)
    plan: dict[str, str] = {} if mesh is None else dict(getattr(model, "tp_plan", None) or {})
    size = 1 if mesh is None else mesh.size()
    return (
        queries // size if _style(plan, QUERIES) == "colwise" else queries,
        keys // size if _style(plan, KEYS) == "colwise" else keys,
    )


def _style(plan: dict[str, str], names: tuple[str, ...]) -> str | None:
    """How a plan divides the first of these projections that it names."""
    return next((style for key, style in plan.items() if key.rsplit(".", 1)[-1] in names), None)


def style_of(model: nn.Module, path: str) -> str | None:
    """How a model's plan divides a module."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    return plan.get(re.sub(r"\d+", "*", path.removesuffix(".base_layer")))  # peft's name for what it wraps


# ---- layers on a rank's own part

SUMS = "hf_paged_sums"
"""Of a layer's forward the same with a further argument: what adds to this rank's part of the sum."""
COLUMNS = "hf_paged_columns"
"""The mark of a layer's forward that computes a part of the outputs, and asks no other rank."""


def local_forwards(model: nn.Module) -> list[ReplacedForward]:
    """Forwards by which linear layers and embeddings of a divided model compute with their rank's part.

    Transformers' own go by way of DTensor, or of context managers, in every layer: the same operations, some
    of which no CUDA graph takes.
    """
    found: list[ReplacedForward] = []
    mesh = mesh_of(model)
    if mesh is None:
        return found
    ranks = RankGroup(mesh.get_group(), symmetric_memory_of(mesh.get_group()))
    for name, module in model.named_modules():
        make = LOCAL.get((type(module), style_of(model, name) or ""))
        own = module.__dict__.get("forward")
        if make is not None and is_of_transformers(own) and is_divided(module, mesh.size()):
            local = make(module, ranks)
            ours = functools.wraps(own)(_or(local, own))
            mark_wrapper(ours)
            if make is _rows:
                setattr(ours, SUMS, local)
            if make is _columns:
                setattr(ours, COLUMNS, True)
            found.append(ReplacedForward(module, own, ours))
    return found


Forward = Callable[..., Any]
Add = Callable[[torch.Tensor], torch.Tensor]


class RankGroup(NamedTuple):
    """The ranks of a divided model, and how their parts become one."""

    group: Any
    memory: SymmetricMemory | None
    """Memory that all ranks' devices reach, if any."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, add: Add | None = None) -> torch.Tensor:
        """x [..., in / ranks] times a part of a weight [out, in / ranks], summed over ranks: [..., out].

        add: adds to this rank's part of the sum, perhaps in its place.
        """
        shape = (*x.shape[:-1], len(weight))
        cast = x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type)
        room = None if self.memory is None or cast else self.memory.room(shape, x.dtype)
        if self.memory is None or room is None:
            part = functional.linear(x, weight)
            return self.sum(part if add is None else add(part))
        torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=room.view(-1, len(weight)))
        found = room if add is None else add(room)
        if found is not room:
            room.copy_(found)
        return self.memory.sum(room)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, in its place."""
        require_whole(self.group)
        dist.all_reduce(x, group=self.group)
        return x


def _or(ours: Forward, theirs: Forward) -> Forward:
    """Our forward for plain tensors without gradients, theirs for all others."""

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        plain = type(x) is torch.Tensor and not args and not kwargs and not torch.is_grad_enabled()
        return ours(x) if plain else theirs(x, *args, **kwargs)

    return forward


def _local(module: nn.Module, name: str) -> Any:
    return local_part(module._parameters.get(name))


def _columns(module: nn.Module, ranks: RankGroup) -> Forward:
    """A part of the outputs: x [..., in] to [..., out / ranks]."""
    return lambda x: functional.linear(x, _local(module, "weight"), _local(module, "bias"))


def _rows(module: nn.Module, ranks: RankGroup) -> Forward:
    """A part of the inputs: x [..., in / ranks] to [..., out], summed over the ranks."""

    def forward(x: torch.Tensor, add: Add | None = None) -> torch.Tensor:
        found = ranks.product(x, _local(module, "weight"), add)
        bias = _local(module, "bias")
        return found if bias is None else found + bias

    return forward


def _rows_of_whole(module: nn.Module, ranks: RankGroup) -> Forward:
    """This rank's part of x [..., in] to [..., out], summed over the ranks."""
    forward = _rows(module, ranks)
    width = _local(module, "weight").shape[1]
    begin = dist.get_rank(ranks.group) * width
    return lambda x: forward(x[..., begin : begin + width])


def _gathered(module: nn.Module, ranks: RankGroup) -> Forward:
    """A part of the outputs, and those of all ranks: x [..., in] to [..., out]."""
    part = _columns(module, ranks)
    size = dist.get_world_size(ranks.group)
    # The older name warns where there is the newer one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def forward(x: torch.Tensor) -> torch.Tensor:
        own = part(x)
        flat = own.reshape(-1, own.shape[-1])
        require_whole(ranks.group)
        parts = torch.empty(size * len(flat), flat.shape[1], dtype=own.dtype, device=own.device)
        gather(parts, flat.contiguous(), group=ranks.group)
        whole = parts.view(size, len(flat), -1).transpose(0, 1)
        return whole.reshape(*own.shape[:-1], size * own.shape[-1])

    return forward


def _embedding(module: nn.Module, ranks: RankGroup) -> Forward:
    """A part of the vocabulary: ids [...] to [..., hidden], each from the rank that has it."""
    rank = dist.get_rank(ranks.group)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        weight = _local(module, "weight")
        own = ids - rank * len(weight)
        absent = (own < 0) | (own >= len(weight))
        found = functional.embedding(own.masked_fill(absent, 0), weight)
        return ranks.sum(found.masked_fill(absent[..., None], 0))

    return forward


LOCAL: dict[tuple[type, str], Callable[[nn.Module, RankGroup], Forward]] = {
    (nn.Linear, "colwise"): _columns,
    (nn.Linear, "rowwise"): _rows,
    (nn.Linear, "rowwise_split_input"): _rows_of_whole,
    (nn.Linear, "rowwise_rep"): _rows_of_whole,
    (nn.Linear, "colwise_gather_output"): _gathered,
    (nn.Linear, "colwise_rep"): _gathered,
    (nn.Embedding, "embedding_rowwise"): _embedding,
}
"""The forwards of layers by their class and their name in the plan."""
