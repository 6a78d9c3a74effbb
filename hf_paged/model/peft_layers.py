"""The LoRA layers that peft has put into a model, and the adapters in them."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn

from .adaption_prompts import active_in, is_prompted, wrapper_of
from .entries import Entries
from .lora import Adapter
from .parts import by_kernels
from .patches import own_forward
from .peft_parts import (
    LINEAR,
    base_of,
    homes_in,
    inner_of,
    is_invoked,
    kind_of,
    names_in,
    why_read_outside,
    wraps_around,
)
from .peft_probe import Product, why_otherwise
from .shards import is_divided, why_parts_are_unknown
from .switch import modules_of

BASE = "__base__"
"""peft's name for no adapter."""
LAYERS = "peft.tuners.lora.layer"
RANKS_DIVIDE = frozenset({f"lora.{name}" for name in (*LINEAR, "Embedding")})
"""Those that peft divides among ranks as it does their layers."""
OWN_SETTINGS = frozenset(
    {
        "_active_adapter",
        "_disable_adapters",
        "r",
        "lora_alpha",
        "scaling",
        "use_dora",
        "use_rslora",
        "lora_bias",
        "lora_variant",
        "kwargs",
        "_caches",
        "_adapters",
        "token_indices",
        "adapter_layer_names",
        "other_param_names",
        "input_fns",
        "output_fns",
    }
)
"""Settings of peft's modules that belong to adapters."""
OF_PEFT = frozenset({"lora_alpha", "token_indices", "_adapters"})
"""Settings by one of which such a module is known."""
MODEL_SETTINGS = frozenset({"peft_config", "_hf_peft_config_loaded", "active_adapter", "_weight_conversions"})
"""Attributes of peft and transformers on the model itself."""


SETTLES = 0.2
"""Seconds that another thread is given to finish a change of peft's, which goes from layer to layer."""
T = TypeVar("T")


def settled(look: Callable[[], T | None]) -> T | None:
    """The result of a look at a model, once no other thread is in the middle of a change; None if it goes on
    finding none.
    """
    last = time.monotonic() + SETTLES
    while (found := look()) is None and threading.active_count() > 1 and time.monotonic() < last:
        time.sleep(SETTLES / 100)
    return found


class LoraLayers:
    """The LoRA layers among a model's modules, and what else of peft is there. False where there are none.

    `reasons` has a verdict for each adapter: None if low-rank products of linear layers are all that it is,
    else why peft's own modules must compute it. `why_whole` is a reason that concerns all of them. Where
    there is no reason at all, adapters are apart from the model: it is what it is without them, and each of
    them has an identity of its own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        tuner_classes = _tuner_classes()
        tuners = [module for module in modules if isinstance(module, tuner_classes)] if tuner_classes else []
        self.tuners: list[Any] = tuners
        """All modules of peft that may compute with an adapter."""
        inner = {id(module._modules.get("token_adapter")) for module in tuners}
        self.layers: list[Any] = [each for each in tuners if kind_of(each) and id(each) not in inner]
        """Those whose adapters' parts can be read, which compute them in the place of the model's modules."""
        self._first: Any = _first_of(self.layers, tuners)
        self._by_kernels: dict[str, tuple[bool, bool]] = {}
        self.looks: dict[str, Entries] = {}
        """By the names of adapters the entries of the last look that found them unchanged."""
        self._homes: Entries | None = None
        self._merged = bool(getattr(self._first, "merged_adapters", ()))
        self.prompts: Any = wrapper_of(modules[0]) if modules else None
        """The owner of the model's Adaption Prompts; None if there are none, or other adapters beside."""
        if self.prompts is not None and not all(map(is_prompted, tuners)):
            self.prompts = None
        self.reasons = _reasons([each for each in tuners if _is_lora(each)], tuners)
        """By the names of all adapters why peft's own modules must compute one."""
        if self.prompts is not None:
            self.reasons |= dict.fromkeys(self.prompts.peft_config, "an adapter is an Adaption Prompt")
        self.why_whole = (
            self.why_whole_now() or _why_not_local(self.layers) or _why_read_outside(modules, self.layers)
            if tuners
            else None
        )
        """Why no adapter can be chosen, and the model alone cannot either."""
        first = next(filter(None, self.reasons.values()), None)
        if self.why_whole is None and first is not None and any(map(_is_elsewhere, tuners)):
            self.why_whole = "an adapter's weights are loaded for each forward"
        if self.why_whole is None and first is not None and _are_divided(modules):
            self.why_whole = first  # ranks have no forwards apart
        self.why_not = self.why_whole or first
        """Why generate() leaves all of them to peft's own modules."""
        others = [each for each in tuners if kind_of(each) is None]
        if self.why_not is None and others:  # whose adapters were deleted
            self.why_not = f"an adapter has parts of the kind {_kind_of(others[0])}"

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def apart(self) -> bool:
        """True if there are adapters apart from the model."""
        return bool(self.layers) and self.why_not is None

    @property
    def beside(self) -> bool:
        """True if the model can be computed without any adapter, though peft's own modules compute some."""
        there = bool(self.tuners) or self.prompts is not None
        return there and self.why_whole is None and not self.apart

    @property
    def names(self) -> list[str]:
        """The names of all adapters."""
        return list(self.reasons)

    def has(self, name: str) -> bool:
        """True if there is an adapter of this name."""
        if self.prompts is not None:
            return name in self.prompts.peft_config
        return any(name in names_of(each) for each in self.tuners)

    @property
    def active(self) -> tuple[str, ...]:
        """The names of the adapters that the model computes with now."""
        if self.prompts is not None:
            return active_in(self.prompts)
        if getattr(self._first, "disable_adapters", False):
            return ()
        return tuple(name for name in getattr(self._first, "active_adapters", ()) if name in self.reasons)

    def merged_since(self) -> bool:
        """True if adapters were merged or unmerged since this was made; the first layer stands for all."""
        return bool(getattr(self._first, "merged_adapters", ())) != self._merged

    @property
    def reads_prompts(self) -> str | None:
        """An active adapter that looks for tokens in the prompt, as aLoRA does: peft's generate() tells its
        layers where they are.
        """
        for layer in filter(_is_lora, self.layers):
            for name in () if layer.disable_adapters else layer.active_adapters:
                if is_invoked(layer.lora_variant.get(name)):
                    return str(name)
        return None

    @property
    def invoked(self) -> bool:
        """True if there is an aLoRA: peft's generate() tells each layer from which tokens on it computes."""
        layers = filter(_is_lora, self.layers)
        return any(is_invoked(each) for layer in layers for each in layer.lora_variant.values())

    @classmethod
    def of(cls, model: nn.Module) -> LoraLayers:
        """Those of a model, once no other thread is in the middle of a change: peft sets the active adapter
        layer by layer.
        """

        def look() -> LoraLayers | None:
            found = cls(modules_of(model))
            return found if _agree(found.layers) else None

        return settled(look) or cls(modules_of(model))

    def why_not_now(self) -> str | None:
        """`why_not` of layers that were apart, as they are now."""
        return _why_whole(self.layers, self.layers) or next(
            filter(None, _reasons(self.layers).values()), None
        )

    def why_whole_now(self) -> str | None:
        """`why_whole` of modules that had no such reason, as they are now."""
        return _why_whole([] if self.prompts is not None else self.tuners, self.layers)

    @property
    def notes_of_merges(self) -> list[dict[str, Any]]:
        """The attributes of modules that note in `merged_adapters` what is merged."""
        return [each.__dict__ for each in self.tuners if "merged_adapters" in each.__dict__]

    def without_tuners(self, model: nn.Module) -> list[nn.Module]:
        """The modules of the model as it is without any adapter: in the place of peft's those that these are
        wrapped around.
        """
        tuners = set(map(id, self.tuners))
        found: dict[int, nn.Module] = {}
        waiting = deque([model])
        while waiting:
            module = waiting.popleft()
            if id(module) in tuners:
                waiting.append(inner_of(module))
            elif id(module) not in found:
                found[id(module)] = module
                waiting.extend(child for child in module._modules.values() if child is not None)
        return list(found.values())

    def without_adapters(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """The model's modules without those that belong to adapters."""
        parts = [
            layer._modules[name]
            for each in self.layers
            for layer in wraps_around(each)
            for name in kind_of(each).own_parts  # type: ignore[union-attr]  # those of its own kind alone
            if layer._modules.get(name) is not None
        ]
        own = {id(module) for part in parts for module in modules_of(part)}
        return [module for module in modules if id(module) not in own]

    def read(self, name: str, modules: Collection[Any] | None = None) -> Adapter:
        """An adapter's weights, where they are, of some modules alone if they are given; on several ranks
        this one's part.
        """
        found = {}
        for layer in self.layers if modules is None else modules:
            kind = kind_of(layer)
            if kind is not None and kind.has(layer, name):
                found[layer] = (kind.read(layer, name),)
        return Adapter(found)

    def look(self, name: str) -> Entries:
        """The entries that an adapter is read from, as they are now."""
        found = [(kind, layer) for layer in self.layers if (kind := kind_of(layer)) is not None]
        return Entries(chain.from_iterable(kind.entries(layer, name) for kind, layer in found))

    def note_homes(self) -> None:
        """Forget `looks` if layers keep adapters elsewhere than before."""
        if self._homes is None or not self._homes.same():
            self.looks.clear()
            self._homes = Entries(chain.from_iterable(map(homes_in, self.layers)))

    def is_by_kernels(self, name: str, mixed: bool = False) -> bool:
        """True if the kernels of adapters compute all parts of one. mixed: and peft lets a row of a batch
        have it, which it refuses for DoRA.
        """
        if name not in self._by_kernels:
            adapter = self.read(name)
            all_of_it = all(map(by_kernels, adapter.layers.values()))
            self._by_kernels[name] = all_of_it, any(part.reads_base for part in adapter.parts)
        all_of_it, dora = self._by_kernels[name]
        return all_of_it and not (mixed and dora)


def has_adapters(layer: Any) -> bool:
    """True unless all adapters of a module were deleted, which leaves it with no active one."""
    return any(True for _ in names_in(layer))


def _is_lora(module: Any) -> bool:
    """True for a LoRA layer, of any kind."""
    layer_class: Any = getattr(sys.modules.get(LAYERS), "LoraLayer", ())
    return isinstance(module, layer_class)


def _is_linear(module: Any) -> bool:
    """True for a LoRA layer of the kinds to whose outputs low-rank products are added."""
    return _is_lora(module) and type(module).__name__ in LINEAR


def _first_of(layers: Sequence[Any], tuners: Sequence[Any]) -> Any:
    """The module that says which adapters are active: one of a method's layers, since what is put around
    other modules knows its own adapters alone.
    """
    own = [each for each in (*layers, *tuners) if hasattr(type(each), "merged")]
    found = (each for each in own if names_of(each))
    return next(found, next(filter(has_adapters, layers), tuners[0] if tuners else None))


def _agree(layers: Sequence[Any]) -> bool:
    """True if modules have the same active adapters, those that know these adapters."""
    first = _first_of(layers, layers)
    for layer in layers:
        same = layer.active_adapters == first.active_adapters
        if same and layer.disable_adapters == first.disable_adapters:
            continue
        known = names_in(layer)
        if not known:
            continue
        expected = [name for name in first.active_adapters if name in known]
        active = [name for name in layer.active_adapters if name in known]
        if layer.disable_adapters != first.disable_adapters or active != expected:
            return False
    return True


def unmerge_disabled(model: nn.Module) -> None:
    """Unmerge adapters that are disabled, as peft's next forward does: no change under a running request."""
    tuner_classes: Any = _tuner_classes()
    for module in modules_of(model) if tuner_classes else ():
        layer: Any = module
        if isinstance(layer, tuner_classes) and getattr(layer, "merged", False) and layer.disable_adapters:
            layer.unmerge()


def _tuner_classes() -> tuple[type, ...]:
    """peft's classes of modules that may compute with an adapter, as far as peft has been loaded."""
    utils: Any = sys.modules.get("peft.tuners.tuners_utils")
    wrappers: Any = sys.modules.get("peft.utils.other")
    prompts: Any = sys.modules.get("peft.tuners.adaption_prompt.layer")
    found = [
        getattr(utils, "BaseTunerLayer", None),
        getattr(prompts, "_BaseAdaptedAttention", None),
        getattr(wrappers, "AuxiliaryTrainingWrapper", None)
        or getattr(wrappers, "ModulesToSaveWrapper", None),
    ]
    return tuple(each for each in found if each is not None)


def names_of(tuner: Any) -> list[str]:
    """The names of the adapters that a module of peft has, in their order."""
    held = [attrgetter(where)(tuner) for where in getattr(tuner, "adapter_layer_names", ())]
    return list(dict.fromkeys(chain.from_iterable(each for each in held if hasattr(each, "keys"))))


def _reasons(*tuners: Sequence[Any]) -> dict[str, str | None]:
    """By the names of all adapters why peft's own modules must compute one; None for low-rank products of
    linear layers.
    """
    found: dict[str, str | None] = {}
    otherwise = cache(why_otherwise)
    for tuner in {id(each): each for each in chain.from_iterable(tuners)}.values():
        if _is_linear(tuner) and _only_products(tuner):
            for name in tuner._modules["lora_A"]._modules:
                found[name] = found.get(name) or otherwise(Product.of(tuner, name))
            continue
        for name in names_of(tuner):
            found[name] = found.get(name) or _why_more(name, tuner)
    return found


def _only_products(layer: Any) -> bool:
    """True if all adapters of a LoRA layer are low-rank products. Read past torch's own lookups, which cost
    more than all the rest.
    """
    parts = layer.__dict__["_modules"]
    more = len(parts["lora_embedding_A"]) or parts["lora_magnitude_vector"]._modules
    if more or any(layer.lora_bias.values()) or not all(map(is_invoked, layer.lora_variant.values())):
        return False
    own = parts["lora_A"]._modules.values()
    if not all(type(part) is nn.Linear for part in own):
        return False
    weights: list[Any] = [part._parameters["weight"] for part in own]
    return not any(weight.is_meta for weight in weights)


def _why_more(name: str, layer: Any) -> str | None:
    """Why only peft's own code can compute what an adapter has in a module of peft's."""
    kind = kind_of(layer)
    if kind is None:
        return f"an adapter has parts of the kind {_kind_of(layer)}"
    why_not = kind.why_not(layer, name)
    return why_otherwise(Product.of(layer, name)) if why_not is None and _is_lora(layer) else why_not


def _why_read_outside(modules: Iterable[nn.Module], layers: Iterable[Any]) -> str | None:
    """Why no adapter can be chosen of a model whose forwards read weights of modules that adapters replace:
    they find those of the active adapter.
    """
    saved = {id(each) for each in layers if hasattr(each, "modules_to_save")}
    for module in modules if saved else ():
        for name, child in module._modules.items():
            why_not = why_read_outside(module, name) if id(child) in saved else None
            if why_not is not None:
                return why_not
    return None


def _why_whole(tuners: Sequence[Any], layers: Sequence[Any]) -> str | None:
    """Why no adapter of a model can be taken apart from it."""
    for tuner in tuners:
        if not hasattr(tuner, "adapter_layer_names"):
            return f"an adapter has parts of the kind {_kind_of(tuner)}"
        if getattr(tuner, "merged_adapters", ()):
            return f"the adapter {tuner.merged_adapters[0]!r} is merged into the model"
    for layer in layers:
        if _is_lora(layer) and _drops(layer):
            return "the dropout of an adapter is active (model.eval() turns it off)"
        if "forward" in layer.__dict__ and own_forward(layer) is not None:
            return "a layer's forward was replaced"
    return None if not layers or _agree(layers) else "the layers have different active adapters"


def why_no_adapters_on_ranks(model: nn.Module) -> str | None:
    """Why peft fails, or hangs, where ranks divide a model with adapters; None if it does not."""
    tuner_classes: Any = _tuner_classes()
    unknown = why_parts_are_unknown(model)
    for path, module in model.named_modules() if tuner_classes else ():
        if unknown is not None and isinstance(module, tuner_classes):
            return unknown
        if isinstance(module, tuner_classes) and any(map(_shards, module.parameters())):
            kind = _kind_of(module)
            if kind not in RANKS_DIVIDE or module.lora_variant or not _divided_as_layer(module):
                return (
                    f"peft cannot divide the adapter of {path} ({kind}) among ranks; leave the layer out of "
                    "the adapter, or merge it in one process and load what that saves. LoRA of linear layers "
                    "is divided from peft 0.21.1 on"
                )
    return None


def _is_elsewhere(tuner: Any) -> bool:
    """True if weights of adapters are in no memory that a twin could share: accelerate has offloaded them."""
    held = [attrgetter(where)(tuner) for where in getattr(tuner, "adapter_layer_names", ())]
    modules = [each for each in held if isinstance(each, nn.Module)]
    return any(tensor.is_meta for each in modules for tensor in each.parameters())


def _are_divided(modules: Iterable[nn.Module]) -> bool:
    """True if ranks divide weights of these modules."""
    return any(_shards(each) for module in modules for each in module._parameters.values())


def _why_not_local(layers: Sequence[Any]) -> str | None:
    """Why ranks cannot add their parts of low-rank products to their parts of these layers' outputs."""
    for layer in layers:
        base = base_of(layer)
        weight: Any = base._parameters.get("weight")
        if _shards(weight):
            hooked = base._forward_hooks or base._forward_pre_hooks
            biased = any(part.bias is not None for part in getattr(layer, "lora_B", {}).values())
            divided = is_divided(base, weight.device_mesh.size()) and _divided_as_layer(layer)
            if hooked or biased or not divided:
                return "ranks divide a layer in unequal parts, or it has hooks"
    return None


def _divided_as_layer(layer: Any) -> bool:
    """True if ranks have B's rows where they have a layer's outputs, and A's columns where its inputs."""
    if not hasattr(layer, "lora_A"):
        return False
    shards = _shards(base_of(layer)._parameters.get("weight"))
    return all(
        _shards(part.weight) == [dim for dim in shards if dim == own]
        for own, parts in enumerate((layer.lora_B, layer.lora_A))
        for part in parts.values()
    )


def _shards(tensor: Any) -> list[int]:
    """The dimensions of a parameter that ranks divide."""
    return [each.dim for each in getattr(tensor, "placements", ()) if each.is_shard()]


def _drops(layer: Any) -> bool:
    """True if a layer computes with the dropout of an active adapter."""
    active = [layer.lora_dropout[name] for name in layer.active_adapters if name in layer.lora_dropout]
    return any(part.training and getattr(part, "p", 0) > 0 for part in active)


def _kind_of(module: object) -> str:
    """A class of peft by the name of its method and its own."""
    parts = type(module).__module__.split(".")
    method = f"{parts[2]}." if parts[:2] == ["peft", "tuners"] else ""
    return method + type(module).__name__


def adapter_names_of(hook: object) -> list[str] | None:
    """The adapter of each row, if this is the hook with which peft gives them to a layer."""
    if isinstance(hook, partial) and set(hook.keywords) == {"adapter_names"}:
        return list(hook.keywords["adapter_names"])
    return None
