"""Replay of routing in a forward of stock's: routers take the experts that were recorded.

All of transformers' routers find their experts by one `topk` over the scores of each token, and read weights
off the scores or off its values. So that one operation answers with the recorded experts, and the model's own
code does the rest: its logits, its normalisation, its gradients. The experts' call shows that it came so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .mixtures import SEAM, in_form, mixtures_of
from .routing import chosen_of

CHECKPOINTING = "_gradient_checkpointing_func"
"""Where transformers' modules have the function that runs a part of them, and again in the backward."""
EXPECTED = "int16 or other whole numbers [rows, columns, layers, k], -1 where the router is to choose"


@contextmanager
def replay_routing(routing: torch.Tensor) -> Iterator[None]:
    """Let forwards inside send each token to the experts that were recorded for it.

    with hf_paged.replay_routing(output.routing):
        logits = model(output.sequences, attention_mask=mask).logits

    routing [rows, columns, layers, k], or [columns, layers, k] of one row: generate()'s `output.routing`, or
    an engine's `sequence.routing`. The forward has as many columns, or one more, which no sampler has
    computed. Where it is -1, the router chooses. Weights come from the model's own router, with gradients,
    normalised as the model does. What gradient checkpointing computes again takes the same experts, inside
    or not.
    """
    replay = _Replay(_checked(routing))
    token = _replaying.set(replay)
    looks = register_module_forward_pre_hook(replay.look_at)
    try:
        with _Choices(replay):
            yield
        replay.require_used()
    finally:
        looks.remove()
        replay.leave()
        _replaying.reset(token)


def _checked(routing: object) -> torch.Tensor:
    """The routing as [rows, columns, layers, k]."""
    if not isinstance(routing, torch.Tensor) or routing.is_floating_point() or routing.is_complex():
        found = routing.dtype if isinstance(routing, torch.Tensor) else type(routing).__name__
        raise TypeError(f"routing must be a tensor of {EXPECTED}, got {found}")
    if routing.ndim not in (3, 4) or not routing.numel():
        raise ValueError(f"Invalid shape of routing: expected {EXPECTED}, got {list(routing.shape)}")
    return routing.detach().reshape(-1, *routing.shape[-3:])


class _Replay:
    """Recorded routing, and how far the running forward has come with it."""

    def __init__(self, routing: torch.Tensor) -> None:
        self.routing = routing
        self.rows, self.columns, self.layers, self.k = routing.shape
        self.most = int(routing.max())
        self._has_gaps = bool((routing < 0).any())
        self._on: dict[tuple[torch.device, int], torch.Tensor] = {}
        """By device and number of tokens the experts [layers, tokens, k]."""
        self._mixtures: dict[nn.Module, tuple[int, str]] = {}
        """The modules with experts: the number of each, and the model's name."""
        self._experts = 0
        """The fewest experts of a layer."""
        self._known: set[nn.Module] = set()
        """Modules that need no look."""
        self._checkpointing: list[tuple[nn.Module, Callable[..., Any]]] = []
        """Modules and their own functions."""
        self._hooks: list[Any] = []
        self._next = 0
        """The number of the layer whose experts are called next."""
        self._taken: torch.Tensor | None = None
        """The recorded experts that its router has been given."""
        self._used = False
        self._without: set[str] = set()
        """Modules that were called and have no experts, by their classes."""

    # ---- the models that are called

    def look_at(self, module: nn.Module, arguments: object) -> None:
        """Before a module's forward: see whether it has experts, once."""
        if module in self._known or _replaying.get() is not self:
            return
        modules = [*module.modules()]
        self._known.update(modules)
        if not any(map(in_form, modules)):
            self._without.add(type(module).__name__)
            return
        kind = type(module).__name__
        mixtures = mixtures_of(module)
        if len(mixtures) != self.layers:
            raise ValueError(
                f"the routing has {self.layers} layers, expected the {len(mixtures)} layers of {kind} that "
                "have experts; replay it on the model that recorded it"
            )
        if any(type(each).__name__ == "CheckpointWrapper" for each in modules):
            raise ValueError(
                f"{kind} has modules in torch's CheckpointWrapper, which compute again without the recorded "
                "experts; use model.gradient_checkpointing_enable()"
            )
        self._mixtures |= {each: (number, kind) for number, each in enumerate(mixtures.values())}
        self._experts = min(int(getattr(each, "num_experts", 1)) for each in self._mixtures)
        self._take_out()
        self._put_in()
        for each in modules:
            own = each.__dict__.get(CHECKPOINTING)
            if own is not None:
                self._checkpointing.append((each, own))
                setattr(each, CHECKPOINTING, self._remembering(own))

    def _put_in(self) -> None:
        """Have hooks at all mixtures that are known."""
        for mixture in self._mixtures:
            self._hooks.append(mixture.register_forward_pre_hook(self._verify, with_kwargs=True))

    def _take_out(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def leave(self) -> None:
        """Leave the models as they were."""
        self._take_out()
        for module, own in self._checkpointing:
            setattr(module, CHECKPOINTING, own)

    def _remembering(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A function for parts that run again: then they take the same experts, wherever that is."""

        def checkpoint(part: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            begin = self._next
            begun = False

            def run(*inputs: Any, **named: Any) -> Any:
                nonlocal begun
                if not begun:
                    begun = True
                    return part(*inputs, **named)
                with self._again(begin):
                    return part(*inputs, **named)

            return own(run, *arguments, **keywords)

        return checkpoint

    @contextmanager
    def _again(self, begin: int) -> Iterator[None]:
        """A stretch in which layers are computed again, from that number on, perhaps in another thread."""
        outside = not self._hooks
        before = self._next, self._taken
        token = _replaying.set(self)
        self._next, self._taken = begin, None
        try:
            if outside:
                self._put_in()
            with _Choices(self):  # torch has none in a backward, nor in its threads
                yield
        finally:
            if outside:
                self._take_out()
            self._next, self._taken = before
            _replaying.reset(token)

    def require_used(self) -> None:
        """Raise if no forward has replayed anything."""
        if not self._used:
            called = ", ".join(sorted(self._without)) or "no model"
            raise ValueError(
                f"replay_routing() needs a model with experts in transformers' form ({SEAM}), and {called} "
                "was called inside; put the forward of the model that recorded it there"
            )

    # ---- a layer

    def choose(self, scores: torch.Tensor, k: int, own: Callable[[], Any]) -> Any:
        """The answer of a `topk`: the recorded experts and their scores if a router asks, else its own."""
        tokens = scores.shape[0]
        asks = self._mixtures and k == self.k and tokens in self._lengths
        if not asks or scores.shape[1] < self._experts:
            return own()
        if self.most >= scores.shape[1]:
            raise ValueError(
                f"the routing names expert {self.most}, expected one of {scores.shape[1]}; replay it on the "
                "model that recorded it"
            )
        chosen = self._recorded(scores.device, tokens)[self._next]
        if self._has_gaps or tokens != self.rows * self.columns:
            chosen = torch.where((chosen < 0).any(-1, keepdim=True), own()[1], chosen)
        self._taken = chosen
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    @property
    def _lengths(self) -> tuple[int, int]:
        """The tokens that a forward may have: those that were recorded, or with a last column more."""
        return self.rows * self.columns, self.rows * (self.columns + 1)

    def _recorded(self, device: torch.device, tokens: int) -> torch.Tensor:
        found = self._on.get((device, tokens))
        if found is None:
            routing = self.routing.to(device, torch.long)
            if tokens != self.rows * self.columns:
                routing = torch.cat([routing, torch.full_like(routing[:, :1], -1)], 1)
            found = self._on[device, tokens] = routing.flatten(0, 1).transpose(0, 1).contiguous()
        return found

    def _verify(self, mixture: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """At the experts' call: require that they are the recorded ones."""
        if _replaying.get() is not self:
            return
        number, kind = self._mixtures[mixture]
        given = chosen_of(arguments, keywords)
        tokens, k = given.shape
        if k != self.k:
            raise ValueError(
                f"the routing has k={self.k} experts of a token, expected k={k} of {kind}; replay it on the "
                "model that recorded it"
            )
        if tokens not in self._lengths:
            raise ValueError(
                f"the routing has {self.rows} rows of {self.columns} columns, expected those of the forward "
                f"of {tokens} tokens (or one column less); replay the rows and columns that this forward has"
            )
        taken, self._taken = self._taken, None
        same = taken is not None and number == self._next and given.data_ptr() == taken.data_ptr()
        if not same:
            recorded = self._recorded(given.device, tokens)[number]
            there = (recorded >= 0).all(-1, keepdim=True)
            same = bool((there.logical_not() | (given == recorded)).all())
        if not same:
            raise ValueError(
                f"the router of layer {number} of {kind} finds its experts in a way in which recorded ones "
                "cannot be put; leave replay_routing() out"
            )
        self._next = (number + 1) % self.layers
        self._used = True


class _Choices(TorchFunctionMode):
    """Answers the `topk` of routers."""

    def __init__(self, replay: _Replay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2:
            return func(*args, **kwargs)
        return self._replay.choose(scores, k, lambda: func(*args, **kwargs))


_replaying: ContextVar[_Replay | None] = ContextVar("hf_paged_replayed_routing", default=None)
