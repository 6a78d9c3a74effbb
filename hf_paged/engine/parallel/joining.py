"""Ranks become one engine: what they must have alike is found out, or decided, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...model.adapters.divided import sum_norms
from ...model.peft_layers import why_no_adapters_on_ranks
from ...model.ranks.tensor_parallel import mesh_of, why_not_divided
from ...model.servable import Unservable
from ...model.weights_digest import host_bytes
from ..worker.adapters import EngineAdapters
from ..worker.config import EngineConfig
from ..worker.runner import Runner
from .ranks import RankError, Ranks

logger = logging.getLogger("hf_paged")


def ranks_of(model: nn.Module, config: EngineConfig) -> Ranks | None:
    """The ranks that compute a model together; None if one process has all of it.

    Raises Unservable for models that the engine's ranks cannot compute, on all ranks alike.
    """
    if mesh_of(model) is None:
        return None
    reason = why_not_on_ranks(model, config)
    if reason is not None:
        raise Unservable(reason)
    try:
        ranks = Ranks(model, config.rank_timeout)
    except RuntimeError as error:
        raise RankError(str(error)) from error
    with made_alike(ranks):
        # Rank 0 alone has books; the names of its tenants are secrets of its process.
        options = replace(config, cache_shares={})
        own = {each.name: getattr(options, each.name) for each in fields(options)}
        own["model"] = _described(model)
        texts = {name: repr(value) for name, value in own.items()}, _digest_of_norms(model)
        everywhere, norms = zip(*ranks.gather(texts), strict=True)
        for name in own:
            if len(set(several := [each[name] for each in everywhere])) > 1:
                raise ValueError(f"ranks have different {name}: {', '.join(several)}; give all the same")
        if len(set(norms)) > 1:
            logger.warning(
                "the models of the ranks have different weights: the norms, which all ranks have undivided, "
                "differ. The answers will be wrong; load one checkpoint on all ranks"
            )
    return ranks


def _described(model: nn.Module) -> str:
    """Facts that ranks must share, whatever adapters they have. Parts that are no DTensor may differ."""
    weights = [weight for name, weight in model.named_parameters() if ".lora_" not in name]
    numbers = sum(weight.numel() for weight in weights if isinstance(weight, DTensor))
    types = ", ".join(sorted({str(weight.dtype) for weight in weights}))
    return f"{type(model).__name__} of {len(weights)} weights in {types}, {numbers} numbers in divided ones"


def _digest_of_norms(model: Any) -> int:
    """Of weights that no plan divides: norms as wide as the model's states."""
    width = model.config.get_text_config(decoder=True).hidden_size
    digest = 0
    for name, weight in model.named_parameters():
        whole = type(weight.data) is torch.Tensor and weight.shape == (width,) and not weight.is_meta
        if whole and name.endswith("norm.weight") and not name.endswith(("q_norm.weight", "k_norm.weight")):
            digest = crc32(host_bytes(weight.float()), digest)
    return digest


def why_not_on_ranks(model: Any, config: EngineConfig) -> str | None:
    """Why the engine's ranks cannot compute a model that is divided; None if they can, or if it is not."""
    mesh = mesh_of(model)
    if mesh is None:
        return None
    size = mesh.size()
    name = type(model).__name__
    whole = model._device_mesh.size()
    if whole != size:
        return (
            f"{name} is divided over {whole} ranks, {size} of them by tensor parallelism; the engine takes "
            "models that are divided by tensor parallelism alone"
        )
    for option in ("compile", "batch_invariant", "lm_head_fp32"):
        if getattr(config, option):
            return f"{option}=True is for one process and {name} is on {size} ranks; leave it out"
    reason = why_not_divided(model)
    return why_no_adapters_on_ranks(model) if reason is None else f"{reason}; use fewer ranks"


@contextmanager
def made_alike(ranks: Ranks) -> Iterator[None]:
    """While ranks make an engine: what fails on one rank alone ends it on all."""
    try:
        with ranks.together():
            yield
    except BaseException:
        ranks.ended_in_order = True  # all know
        ranks.close()
        raise


def load_alike(ranks: Ranks, load: Callable[[], set[str]]) -> set[str]:
    """Load weights, on all ranks those of the same names or none; anything else ends the engine."""
    with ranks.together():
        names: set[str] = set()
        trouble: Exception | None = None
        try:
            names = load()
        except Exception as error:
            trouble = error
        loaded = ranks.gather((names, trouble and f"{type(trouble).__name__}: {trouble}"))
        if any((each, bool(words)) != (names, bool(trouble)) for each, words in loaded):
            several = [words or f"{len(each)} tensors" for each, words in loaded]
            ranks.fail(
                f"ranks have loaded different weights: {', '.join(several)}; start again with one model"
            )
        elif trouble is not None:
            raise trouble
    return names


@contextmanager
def tried_alike(ranks: Ranks, runner: Runner) -> Iterator[None]:
    """While ranks try a model out and size their pools: the smallest decides, and all take its form."""
    pools = runner.eager.pools
    pools.agree = ranks.smallest
    for group in pools.groups.values():
        group.on_ranks = True
        group.kept = bool(group.kept)  # whether pools fit beside training is a question of each rank's memory
    yield
    if runner.captured is not None:
        runner.captured.captures.join(ranks)
    reasons = ranks.gather((runner.why_rows, runner.why_no_embeddings))
    runner.why_rows = next((rows for rows, _ in reasons if rows is not None), None)
    runner.why_no_embeddings = next((why for _, why in reasons if why is not None), None)


def compare_models(ranks: Ranks, changed: bool, runner: Runner, adapters: EngineAdapters) -> bool:
    """True if the model has changed on any rank. All note whether it runs code of the user's on any, or is
    one that ranks have not looked at together; and drop their captured steps if one has dropped some alone.
    """
    checks = runner.eager.checks
    captured = runner.captured
    drops = 0 if captured is None else captured.captures.drops
    moved = captured is not None and captured.moved()
    changed, foreign, moved, differ = ranks.any(
        changed, checks.foreign_forward, moved, agreed=adapters.agreement(), number=drops
    )
    checks.foreign_on_a_rank = foreign
    checks.looks_together = foreign or moved
    if captured is not None and differ:
        captured.forget()
        captured.captures.drops = 0
    return changed


def sum_norms_of(adapters: EngineAdapters, names: Iterable[str] = ()) -> None:
    """Make the norms anew of DoRA over weights of which each rank has a part, of these adapters or all. All
    ranks call it together, while no request runs.
    """
    own = {name: each for name, each in adapters.contents.own.items() if each.reads_base}
    for name in sorted(own.keys() & set(names or own), key=adapters.numbers.__getitem__):
        sum_norms(adapters.model, own[name].host)
    for held in list(adapters.slots):
        if own.keys() & set(held):
            adapters.place(adapters.slots.slot(held), held)
