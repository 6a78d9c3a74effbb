"""Routers by which a token's result may depend on its batch: they drop tokens, or take the mean of all."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .outputs import Unlike, layout_of
from .random_states import has_drawn, random_states
from .switch import modules_of

WHY = "a router counts the tokens that are computed together"


PATTERNS = 5
"""Contents with which routers are tried: the same token everywhere, and crowds with others among them."""
KINDS = 8
"""Tokens of which contents are made."""
CROWD = 0.7
"""The share of the crowd's token in the others."""


class RouterInputs(NamedTuple):
    """The arguments of a module's call: hidden states of some tokens, the batch's shape, and the others."""

    kinds: torch.Tensor
    """[kinds, hidden]"""
    flat: bool
    """True if rows and tokens came as one dimension."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def content(self, rows: int, tokens: int, pattern: int) -> torch.Tensor:
        """Hidden states [rows, tokens, hidden] that fill one expert sooner than a text does."""
        if pattern == 0:
            return self.kinds[0].expand(rows, tokens, -1)
        chance = torch.Generator().manual_seed(pattern)
        chosen = torch.randint(len(self.kinds), (rows, tokens), generator=chance, device="cpu")
        crowd = torch.rand(rows, tokens, generator=chance, device="cpu", dtype=torch.float32) < CROWD
        return self.kinds[chosen.masked_fill(crowd, 0).to(self.kinds.device)]


class Routers:
    """The modules of a model's decoder that know a capacity or take a mean, and their last calls."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = _found_in(model)
        self.seen: dict[nn.Module, RouterInputs] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Learn from a forward how the modules are called."""

        def note(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
            if arguments and isinstance(arguments[0], torch.Tensor):
                self.seen[module] = _seen(arguments, keywords)

        handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def known(self) -> bool:
        """True if it is known how each of them is called."""
        return all(module in self.seen for module in self.modules)

    def keep_rows_apart(self, rows: int, index: torch.Tensor, tokens: int) -> bool:
        """True if these tokens, and the step after them, come out the same if only rows `index` run."""
        for module in self.modules:
            for pattern in range(PATTERNS):
                few = [self.seen[module].content(rows, count, pattern) for count in (tokens, 1)]
                many = [each.index_select(0, index.to(each.device)) for each in few]
                if not _alike(module, self.seen[module], few, many, rows, index):
                    return False
        return True

    def keep_tokens_apart(self, tokens: int) -> bool:
        """True if so many tokens of one row come out the same together and one by one."""
        for module in self.modules:
            for kind in self.seen[module].kinds:
                few, many = (kind.expand(1, count, -1) for count in (1, tokens))
                copies = torch.zeros(tokens, dtype=torch.long, device="cpu")
                if not _alike(module, self.seen[module], [few], [many], 1, copies):
                    return False
        return True


_routers: weakref.WeakKeyDictionary[nn.Module, Routers] = weakref.WeakKeyDictionary()


def routers_of(model: nn.Module, again: bool = False) -> Routers:
    """The model's routers. again: whether its modules may be others by now, as adapters come and go."""
    known = _routers.get(model)
    if known is None or (again and known.modules != _found_in(model)):
        known = _routers[model] = Routers(model)
    return known


def _found_in(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in modules_of(_decoder(model))
        if _looks_around(cast(Any, type(module))) and _weighs(module)
    ]


def _decoder(model: Any) -> nn.Module:
    """The part that the cache is for: an encoder runs once for each prompt, wherever its rows go."""
    if getattr(model.config, "is_encoder_decoder", False):
        found = model.get_decoder()
        if isinstance(found, nn.Module):
            return found
    return cast(nn.Module, model)


def take_means(modules: Iterable[nn.Module]) -> bool:
    """True if one of these modules takes the mean of all tokens of a forward (peft's Lily)."""
    kinds: list[Any] = list(map(type, modules))
    return any(map(_takes_means, kinds))


@cache
def _takes_means(kind: Any) -> bool:
    """True for a class of peft's that does."""
    mean = ".mean(dim=0)"
    if not kind.__module__.startswith("peft.tuners.") or mean not in _source_of(sys.modules[kind.__module__]):
        return False  # to find a class in a file, all of it is parsed
    return mean in _source_of(kind)


@cache
def _looks_around(kind: Any) -> bool:
    """True if a class's code (no comments) names a capacity, or takes the mean of all tokens."""
    if kind.__module__.startswith("torch."):
        return False
    if _takes_means(kind):
        return True
    file = _source_of(sys.modules.get(kind.__module__))
    if file and "capacity" not in file.lower():
        return False
    source = _source_of(kind)
    if "capacity" not in source.lower():
        return False
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return False
    names = (
        getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
        for node in ast.walk(tree)
    )
    return any("capacity" in name.lower() for name in names if isinstance(name, str))


def _source_of(part: Any) -> str:
    """The source of a module or a class, empty where there is none."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return ""


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _seen(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> RouterInputs:
    hidden = arguments[0].detach()
    kinds = hidden.reshape(-1, hidden.shape[-1])[:KINDS].clone()
    beside = tuple(None if isinstance(each, torch.Tensor) else each for each in arguments[1:])
    named = {name: None if isinstance(each, torch.Tensor) else each for name, each in keywords.items()}
    return RouterInputs(torch.cat([kinds, -kinds]), hidden.ndim == 2, beside, named)


def _alike(
    module: nn.Module,
    seen: RouterInputs,
    few: list[torch.Tensor],
    many: list[torch.Tensor],
    rows: int,
    index: torch.Tensor,
) -> bool:
    """True if a module answers one series of calls like another in which everything is repeated `copies`
    times.

    A series, because a router may keep the capacity of its first call. A module that cannot be tried is not
    trusted.
    """
    try:
        answers = zip(_answers(module, seen, few), _answers(module, seen, many), strict=True)
        for one, other in answers:
            layout_of(one, other, rows, index)
    except Unlike:
        return False
    except Exception:  # it wants more than hidden states
        return False
    return True


def _answers(module: nn.Module, seen: RouterInputs, calls: list[torch.Tensor]) -> list[Any]:
    """The answers of a module to a series of calls, unchanged by them; `Unlike` if it draws at random."""
    twin = copy.copy(module)
    forward: Any = type(module).forward
    devices = [seen.kinds.device] if seen.kinds.device.type == "cuda" else []
    inputs = [each.flatten(0, 1) if seen.flat else each for each in calls]
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        before = random_states(seen.kinds.device)
        answers = [forward(twin, each, *seen.arguments, **seen.keywords) for each in inputs]
        if has_drawn(before, seen.kinds.device):
            raise Unlike
    return answers
