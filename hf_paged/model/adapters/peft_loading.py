"""Adapters that no module of the model holds, loaded by peft into a twin of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..lora import Adapter
from ..routers import take_means
from ..switch import modules_of
from ..weights_digest import address_of, content_digest
from .invocation import Invocation
from .twins import NoTwin, keep_nothing, let_write, twin_of, without_tuners
from .vocabulary import is_twice, resize, scores_of

SAVED_ONLY = frozenset({"_name_or_path", "base_model_name_or_path", "revision", "inference_mode"})
"""Entries of a config that change nothing that an adapter computes."""


class PeftAdapter:
    """An adapter from a folder or a state dict that peft's own modules compute.

    Its weights wait on the host. `twin` has peft load them into a twin of the plain model, which it keeps.
    """

    host = Adapter({})
    """It adds nothing to layers of the model itself."""
    reads_base = False
    invocation: Invocation = ()

    def __init__(self, state: Mapping[str, torch.Tensor], config: Any, why: str) -> None:
        """why: why no kernels compute it."""
        self.why_apart = why
        self._state = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        self.config = copy.deepcopy(config)
        """Peft's config of it."""
        self.config.inference_mode = True
        self.settings = repr(sorted(_settings(config).items()))
        self.key = _content(self._state, self.settings)
        self.rank = int(getattr(config, "r", 0) or 0)
        self.bytes = sum(tensor.nbytes for tensor in self._state.values())
        """The memory that it takes on a device: its weights, and those of the model that it has changed."""
        self.copies_base = False
        """True if its twin has weights of its own in the place of the model's."""
        self.vocabulary: int | None = None
        """How many tokens it knows, if they are not the model's."""
        self.whole = False
        """True if all tokens of a forward change each other."""
        self._twin: nn.Module | None = None

    @property
    def digest(self) -> str:
        """A short name of its content that is the same in every process."""
        return self.key.hex()[:16]

    def follow(self, model: nn.Module) -> None:
        """Peft puts modules into the model, or takes some away: its twin is of the model as it was."""
        self._twin = None

    def twin(self, model: nn.Module, name: str) -> nn.Module:
        """A twin of the plain model, into which peft has loaded the adapter under a name. Raises ValueError
        where it does not fit.
        """
        if self._twin is None:
            with torch.random.fork_rng(_cuda_devices(model)):
                try:
                    found = _loaded(model, self._state, self.config, name, writes=False)
                except _WritesBase:
                    found = _loaded(model, self._state, self.config, name, writes=True)
            self._twin, more = found
            known = scores_of(self._twin)
            self.vocabulary = None if known == scores_of(model) else known
            self.copies_base = more > 0
            self.whole = take_means(modules_of(self._twin))
            self.bytes = sum(tensor.nbytes for tensor in self._state.values()) + more
        return self._twin


def _settings(config: Any) -> dict[str, Any]:
    own: dict[str, Any] = config.to_dict()
    found = {name: value for name, value in own.items() if name not in SAVED_ONLY}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}


def _content(state: Mapping[str, torch.Tensor], settings: str) -> bytes:
    """A digest of an adapter's weights and settings."""
    weights = [((name, tuple(state[name].shape)), (state[name],)) for name in sorted(state)]
    return content_digest([(settings, ()), *weights])


def _cuda_devices(model: nn.Module) -> list[int]:
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    return sorted(each.index or 0 for each in devices)


class _WritesBase(Exception):
    """peft is about to write to a weight of the model."""


class _NoWrites(TorchDispatchMode):
    """No operation of this thread may write to some memory."""

    def __init__(self, memory: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.met = False
        """True once one was about to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = kwargs.get(argument.name, args[i] if i < len(args) else None)
                if any(address_of(each) in self._memory for each in _tensors(given)):
                    self.met = True
                    raise _WritesBase
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def _loaded(
    model: nn.Module, state: Mapping[str, torch.Tensor], config: Any, name: str, writes: bool
) -> tuple[nn.Module, int]:
    """A twin with an adapter, and the bytes of the model's weights that it has of its own. writes: whether
    peft may write to these weights, which are copied for it.
    """
    twin = without_tuners(twin_of(model))
    known = _give_own_parameters(twin, writes)
    resize(twin, state)
    memory = {address_of(own) for own, _ in known.values()} if not writes else set()
    guard = _NoWrites(memory)
    try:
        with (_own_configs if _replicates(config) else _same_config)(twin), guard:
            _inject(twin, state, copy.deepcopy(config), name)
    except Exception as error:
        if guard.met:  # torch says of it no more than that there was an error
            raise _WritesBase from error
        raise
    more = _share_parameters(twin, known)
    for module in modules_of(twin):
        let_write(module)
        keep_nothing(module)
    return twin.train().eval(), more


def _replicates(config: Any) -> bool:
    """True for an adapter with which layers of the model come several times."""
    return bool(getattr(config, "layer_replication", None))


@contextmanager
def _own_configs(twin: nn.Module) -> Iterator[None]:
    """Around what may change a config: give a twin configs of its own."""
    known: dict[int, Any] = {}
    for module in modules_of(twin):
        if "config" in module.__dict__:
            module.__dict__["config"] = copy.deepcopy(module.__dict__["config"], known)
    yield


@contextmanager
def _same_config(twin: nn.Module) -> Iterator[None]:
    """Around what may change a config, which is the model's: it stays as it is. Raises NoTwin if the adapter
    needs another one.
    """
    config: Any = twin.config
    own: dict[str, Any] = vars(config)
    before = dict(own)
    try:
        yield
        changed = [name for name in own if name not in before or own[name] is not before[name]]
    finally:
        own.clear()
        own.update(before)
    others = sorted(set(changed) - {"pretraining_tp"})
    if others:
        raise NoTwin(f"peft changes {others[0]} in the config of the model for it; put it into a peft model")


def _inject(twin: nn.Module, state: Mapping[str, torch.Tensor], config: Any, name: str) -> None:
    """Have peft put an adapter into a model."""
    import peft

    made = peft.PeftModel(twin, config, adapter_name=name)
    state = {key: tensor for key, tensor in state.items() if not is_twice(key, state)}
    try:
        result: Any = peft.set_peft_model_state_dict(made, dict(state), adapter_name=name)
    except RuntimeError as error:
        raise ValueError(f"peft cannot load the adapter into {type(twin).__name__}: {error}") from error
    own = peft.get_peft_model_state_dict(made, adapter_name=name, save_embedding_layers=False)
    prefix = str(getattr(made.base_model, "prefix", ""))
    missing = [each for each in own.keys() - state.keys() if prefix in each]
    if result.unexpected_keys or missing:
        what = "no place for" if result.unexpected_keys else "further weights,"
        first = sorted(result.unexpected_keys or missing)[0]
        raise ValueError(
            f"{type(twin).__name__} with this config has {what} {first!r} and others; the adapter is for "
            "another model, or its config is"
        )


Known = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""By the id of a parameter of a twin this one and the model's own."""


def _give_own_parameters(twin: nn.Module, copied: bool) -> Known:
    """Give a twin parameters of its own, over the model's memory or over copies."""
    made: dict[int, nn.Parameter] = {}
    known: Known = {}
    for module in modules_of(twin):
        for key, each in module._parameters.items():
            if type(each) is not nn.Parameter:
                continue
            if id(each) not in made:
                data = each.data.clone() if copied else each.data
                own = made[id(each)] = nn.Parameter(data, requires_grad=False)
                known[id(own)] = own, each
            module._parameters[key] = made[id(each)]
    return known


def _share_parameters(twin: nn.Module, known: Known) -> int:
    """Give a twin the model's parameters where they are what it has: the bytes of all others."""
    more: dict[int, int] = {}
    for module in modules_of(twin):
        for key, each in module._parameters.items():
            found = known.get(id(each))
            if found is None or each is None:
                continue
            original = found[1]
            same = each.shape == original.shape and each.dtype == original.dtype
            if same and (address_of(each) == address_of(original) or torch.equal(each.data, original.data)):
                module._parameters[key] = original
            else:
                more[id(each)] = each.nbytes
    return sum(more.values())
