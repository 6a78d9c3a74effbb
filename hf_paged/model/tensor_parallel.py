"""Models that several processes compute together, each with its part of the heads (transformers' tp_plan)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEYS = ("k_proj", "qkv_proj", "query_key_value")
QUERIES = ("q_proj", "qkv_proj", "query_key_value")
"""Last names of the projections that make keys and queries in transformers' plans."""


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The ranks that compute a model together; None if one process has all of it."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) < 2:
        return None
    found: DeviceMesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return found


def why_not_divided(model: nn.Module) -> str | None:
    """Why the ranks of a model cannot have their part of its heads; None if they can, or if there is one.

    Transformers pairs queries with the wrong keys there, or fails within the first forward.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return None
    size = mesh.size()
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    if not isinstance(queries, int) or not isinstance(keys, int):
        return None
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
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


def _style(plan: dict[str, str], names: tuple[str, ...]) -> str | None:
    """How a plan divides the first of these projections that it names."""
    return next((style for key, style in plan.items() if key.rsplit(".", 1)[-1] in names), None)
