"""The parts of an adapter in a state dict as peft saves it, for the modules of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..adaption_prompts import is_prompted
from ..parts import LowRank, LowRankEmbedding, OwnBias, Part, Parts, SavedModule, TrainedTokens, with_tensors
from ..peft_parts import base_of, inner_of, why_not_by_row, why_not_tokens
from ..shards import local_part, require_known_parts
from .vocabulary import PREFIX, ends_of, ids_of, ids_with, is_twice, plain_key, vocabulary_of

NAME = r"(?:\.(?!(?:weight|bias)$)([^.]+))?"
"""An adapter's own, which some state dicts have in their keys."""
KEYS = (
    re.compile(r"(.+)\.(modules_to_save)(?:\.([^.]+))?(\.[^.]+)"),
    re.compile(rf"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector){NAME}(?:\.weight|(\.bias))?"),
    re.compile(rf"(.+?)(?:\.token_adapter)?\.(trainable_tokens_delta){NAME}()"),
)
"""Keys of an adapter's own: the module, the place in it, the adapter's name, an attribute."""


class NoParts(ValueError):
    """An adapter that only peft's own modules compute."""


class Entry(NamedTuple):
    """A tensor of an adapter: the module that it belongs to, and its place there."""

    path: str
    place: str
    adapter: str | None = None
    """The name of the adapter, if the key has it."""


def parts_in(model: nn.Module, state: Mapping[str, torch.Tensor], config: Any, name: str) -> Parts:
    """The parts of an adapter, by the names of modules. Raises ValueError for what does not fit the model."""
    require_known_parts(model)
    found: dict[str, dict[str, torch.Tensor]] = {}
    known_ends = set(map(id, ends_of(model)))
    ends = {path for path, module in model.named_modules() if id(module) in known_ends}
    for entry, tensor in _entries(model, state, config, name, ends):
        found.setdefault(entry.path, {})[entry.place] = tensor
    if not found:
        raise ValueError(
            "there is nothing in the adapter that changes the model; give the one that was trained"
        )
    parts: dict[str, tuple[Part, ...]] = {}
    for path, tensors in found.items():
        base = base_of(module_at(model, path))
        kinds = {place.partition(".")[0] for place in tensors}
        makers = dict.fromkeys(make for kind, make in MAKERS.items() if kind in kinds)
        if not makers:
            raise ValueError(f"the adapter has {sorted(tensors)} of {path}, and no weights beside that")
        made: list[Part] = []
        for make in makers:
            made.append(make(path, base, tensors, config))
            base = made[-1].base_behind(base)
        parts[path] = _with_tokens(made)
        module = module_at(model, path)
        if path not in ends and hasattr(base, "weight") and ids_with(module, made) != ids_of(module):
            raise ValueError(_other_vocabulary(path, ids_with(module, made), ids_of(module)))
    for path, own in list(parts.items()):
        for part in own:
            if isinstance(part, TrainedTokens):
                parts |= {other: (part,) for other in _tied_with(model, path) if other not in parts}
    vocabulary_of(model, {module_at(model, path): own for path, own in parts.items()})
    return parts


def _with_tokens(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of a module, of which a whole weight has its trained tokens in it."""
    whole, *others = parts
    tokens = others[0] if others else None
    if not isinstance(whole, SavedModule) or not isinstance(tokens, TrainedTokens):
        return tuple(parts)
    own: Any = whole.module
    weight = own.weight.detach().clone()
    weight[list(tokens.ids)] = tokens.rows.to(weight)
    return (whole.mapped(lambda each: weight if each is own.weight else each), *others[1:])


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module that a state dict calls so."""
    module = model
    try:
        for name in path.split("."):
            module = (module if not is_prompted(module) else inner_of(module)).get_submodule(name)
        return module
    except AttributeError as error:
        raise ValueError(
            f"{type(model).__name__} has no layer {path!r}; the adapter is for another model"
        ) from error


def _entries(
    model: nn.Module, state: Mapping[str, torch.Tensor], config: Any, name: str, ends: Collection[str]
) -> list[tuple[Entry, torch.Tensor]]:
    """The tensors of one adapter in a state dict, without those that the model has itself. ends: the paths of
    its embeddings and head.
    """
    read = {key.removeprefix(PREFIX): _entry(key.removeprefix(PREFIX)) for key in state}
    names = {entry.adapter for entry in read.values() if entry is not None}
    if len(names) > 1 and name not in names:
        raise ValueError(f"the state dict has the adapters {sorted(map(str, names))}, and none is {name!r}")
    found = []
    others = []
    for key, tensor in zip(read, state.values(), strict=True):
        entry = read[key]
        if is_twice(key, read):
            continue
        if entry is not None and len(names) > 1 and entry.adapter != name:
            continue
        if entry is None:
            entry = _of_module(key, config, ends)
            kept = entry is not None and _is_saved(entry.path, config)
            if "trainable_tokens_original" in key or (
                not kept and _is_of_model(model, key, tensor, entry is not None)
            ):
                continue  # peft saves embeddings and heads along with their adapters
        if entry is None:
            others.append(key)
        else:
            found.append((entry, tensor))
    if others:
        saved = next(filter(None, (_saved_above(key, config) for key in others)), None)
        if saved is not None:
            raise NoParts(f"a saved module that is no linear layer, embedding or norm ({saved})")
        raise ValueError(
            f"{others[0]!r} and {len(others) - 1} more are in the adapter, and its config does not say what "
            "they are; put it into a peft model and give the engine that"
        )
    return found


def _entry(key: str) -> Entry | None:
    """The entry of a key that says itself that its tensor is an adapter's."""
    match = next(filter(None, (pattern.fullmatch(key) for pattern in KEYS)), None)
    if match is None:
        return None
    path, place, adapter, attribute = match.groups()
    return Entry(path, place + (attribute or ""), adapter)


def _of_module(key: str, config: Any, ends: Collection[str]) -> Entry | None:
    """The entry of a whole module's tensor, or of a layer's own bias. ends: embeddings and head, which peft
    saves where they were trained or have another vocabulary.
    """
    path, _, attribute = plain_key(key).rpartition(".")
    if _is_saved(path, config) or path in ends:
        return Entry(path, f"modules_to_save.{attribute}")
    if attribute == "bias" and getattr(config, "bias", "none") != "none":
        return Entry(path, "own_bias")
    return None


def _is_saved(path: str, config: Any) -> bool:
    """True if an adapter has a module of its own in the place of this one, as peft finds them."""
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    return path.endswith(saved) or bool(saved and _ties(config))


def _saved_above(key: str, config: Any) -> str | None:
    """The module of an adapter's own within which a tensor is."""
    paths = accumulate(plain_key(key).split(".")[:-1], "{}.{}".format)
    return next((path for path in paths if _is_saved(path, config)), None)


def _is_of_model(model: nn.Module, key: str, tensor: torch.Tensor, of_adapter: bool) -> bool:
    """True if a tensor in a state dict is known to be one that the model has. of_adapter: whether the adapter
    may have it in the place of the model's.
    """
    named = model.named_parameters(remove_duplicate=False)
    parameters = {plain_key(name): each for name, each in named}
    known = parameters.get(plain_key(key))
    if known is None or known.shape != tensor.shape:
        return False
    if local_part(known) is not known:
        if of_adapter:
            return False  # where it is equal, too
        raise ValueError(
            f"the adapter was saved with {key}, of which each rank has a part, so it is not known to be the "
            "model's own; save the adapter with save_embedding_layers=False"
        )
    return torch.equal(known.detach().to(tensor), tensor)


def _tied_with(model: nn.Module, path: str) -> list[str]:
    """The other modules that have the weight of an embedding, as a tied head has."""
    weight = base_of(model.get_submodule(path)).weight
    inner = {id(inner_of(module)) for module in model.modules()}
    return [
        name
        for name, module in model.named_modules()
        if name != path and id(module) not in inner and not name.startswith(f"{path}.")
        if getattr(base_of(module), "_parameters", {}).get("weight") is weight
    ]


# ---- parts of the kinds


def _products(path: str, base: Any, tensors: Mapping[str, torch.Tensor], config: Any) -> Part:
    own = [key for key in ("lora_A", "lora_B") if key in tensors]
    if len(own) < 2:
        raise ValueError(f"the adapter has only {own or list(tensors)} of {path}; expected lora_A and lora_B")
    if not isinstance(base, (nn.Linear, Conv1D)):
        raise NoParts(f"the adapter of {path} ({type(base).__name__})")
    a, b = tensors["lora_A"], tensors["lora_B"]
    _require_shapes(path, a, b, *widths_of(base))
    bias, magnitude = tensors.get("lora_B.bias"), _magnitude(path, tensors, config, len(b))
    return _as_precise(base, LowRank(a, b, _scale(config, path, len(a)), bias, magnitude))


def _embedding(path: str, base: Any, tensors: Mapping[str, torch.Tensor], config: Any) -> Part:
    own = [key for key in ("lora_embedding_A", "lora_embedding_B") if key in tensors]
    if len(own) < 2:
        raise ValueError(f"the adapter has only {own} of {path}; expected lora_embedding_A and _B")
    if not isinstance(base, nn.Embedding) or base.max_norm is not None:
        raise ValueError(f"{path} is a {type(base).__name__}; expected an embedding without max_norm")
    a, b = tensors["lora_embedding_A"], tensors["lora_embedding_B"]
    _require_shapes(path, a, b, base.num_embeddings, base.embedding_dim)
    magnitude = _magnitude(path, tensors, config, len(b))
    return _as_precise(base, LowRankEmbedding(a, b, _scale(config, path, len(a)), magnitude))


def _magnitude(
    path: str, tensors: Mapping[str, torch.Tensor], config: Any, outputs: int
) -> torch.Tensor | None:
    """DoRA's magnitude of each output, if the adapter has DoRA."""
    found = tensors.get("lora_magnitude_vector")
    if (found is None) == bool(getattr(config, "use_dora", False)):
        raise ValueError(
            f"the adapter has {'no' if found is None else 'a'} lora_magnitude_vector of {path}, and its "
            f"config use_dora={config.use_dora} (DoRA); give the config that it was saved with"
        )
    if found is not None and found.shape != (outputs,):
        raise ValueError(
            f"{path} has {outputs} outputs, the adapter magnitudes {list(found.shape)}; it is for another "
            "model"
        )
    return found


def _tokens(path: str, base: Any, tensors: Mapping[str, torch.Tensor], config: Any) -> Part:
    given = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or ()
    if isinstance(given, Mapping):
        given = next((ids for name, ids in given.items() if path == name or path.endswith(f".{name}")), ())
    ids = tuple(map(int, given))
    rows = tensors["trainable_tokens_delta"]
    weight = base.weight
    if rows.shape != (len(ids), weight.shape[1]):
        raise ValueError(
            f"the adapter has trained tokens {list(rows.shape)} of {path}, which is {list(weight.shape)}, "
            f"and its config {len(ids)} ids; give the config and the model that it was trained with"
        )
    why_not = why_not_tokens(base, ids)
    unknown = set(range(len(weight), max(ids) + 1)) - set(ids)
    if why_not is not None or min(ids) < 0 or unknown:
        raise ValueError(why_not or _other_vocabulary(path, max(ids) + 1, len(weight)))
    return TrainedTokens(ids, rows)


def _saved(path: str, base: Any, tensors: Mapping[str, torch.Tensor], config: Any) -> Part:
    why_not = why_not_by_row(base)
    if why_not is not None:
        raise NoParts(f"{why_not} ({path})")
    own = {place.removeprefix("modules_to_save."): tensor for place, tensor in tensors.items()}
    names = [name for name, _ in (*base.named_parameters(), *base.named_buffers())]
    known = [*base.parameters(), *base.buffers()]
    found = []
    for name, each in zip(names, known, strict=True):
        tensor = own.get(name, each.detach())
        of_rows = isinstance(base, (nn.Linear, nn.Embedding)) and tensor.shape[1:] == each.shape[1:]
        if tensor.shape != each.shape and not of_rows:
            raise ValueError(
                f"{path}.{name} is {list(each.shape)}, the adapter's {list(tensor.shape)}; it is for another "
                "model"
            )
        found.append(tensor.to(each.dtype))  # as peft copies it into a module like the model's
    made = with_tensors(base, found)
    if isinstance(made, (nn.Linear, nn.Embedding)):
        rows = "out_features" if isinstance(made, nn.Linear) else "num_embeddings"
        setattr(made, rows, len(made.weight))
    return SavedModule(made)


def _own_bias(path: str, base: Any, tensors: Mapping[str, torch.Tensor], config: Any) -> Part:
    known = base.bias
    bias = tensors["own_bias"]
    if known is None or known.shape != bias.shape:
        raise ValueError(f"the adapter has a bias {list(bias.shape)} of {path}; it is for another model")
    return OwnBias(bias)


MAKERS: dict[str, Callable[[str, Any, Mapping[str, torch.Tensor], Any], Part]] = {
    "modules_to_save": _saved,
    "lora_A": _products,
    "lora_B": _products,
    "lora_embedding_A": _embedding,
    "lora_embedding_B": _embedding,
    "trainable_tokens_delta": _tokens,
    "own_bias": _own_bias,
}
"""How the parts of a module are made, by the places of their tensors, in the order of their use."""


def _other_vocabulary(path: str, theirs: int, ours: int) -> str:
    return (
        f"the adapter has {theirs} tokens at {path} and the model {ours}: it was trained with a larger "
        f"vocabulary; call model.resize_token_embeddings({theirs}) before the engine is made"
    )


def _as_precise(base: Any, part: Part) -> Part:
    """A part with weights of no fewer digits than the module's own, as peft loads it."""
    own = base.weight.dtype
    if not own.is_floating_point:
        return part
    return part.mapped(lambda each: each.to(torch.promote_types(each.dtype, own)))


def widths_of(layer: Any) -> tuple[int, int]:
    """The inputs and outputs of a linear layer."""
    if isinstance(layer, Conv1D):
        inputs, outputs = layer.weight.shape
        return inputs, outputs
    return layer.in_features, layer.out_features


def _require_shapes(path: str, a: torch.Tensor, b: torch.Tensor, inputs: int, outputs: int) -> None:
    if (a.shape[1], b.shape[0]) != (inputs, outputs) or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"{path} has {inputs} inputs and {outputs} outputs, the adapter's weights are "
            f"{list(a.shape)} and {list(b.shape)}; it is for another model"
        )


def _scale(config: Any, path: str, rank: int) -> float:
    """The factor of the product, as peft has it."""
    from peft.utils.other import get_pattern_key

    ranks: dict[str, int] = config.rank_pattern or {}
    own = ranks.get(get_pattern_key(list(ranks), path), config.r)
    if own != rank or not _targets(config, path):
        wanted = f"target_modules={config.target_modules!r}" if own == rank else f"r={own!r}"
        raise ValueError(
            f"the adapter has weights of rank {rank} for {path}, and its config {wanted:.200}; give the one "
            "that it was saved with"
        )
    patterns: dict[str, int] = config.alpha_pattern or {}
    alpha: float = patterns.get(get_pattern_key(list(patterns), path), config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    if not math.isfinite(scale):
        raise ValueError(f"the adapter has lora_alpha={alpha} for {path}; expected a finite number")
    return scale


def _targets(config: Any, path: str) -> bool:
    """True if a config names a layer; one that peft has not completed names none by itself."""
    from peft.tuners.tuners_utils import check_target_module_exists

    open_ended = config.target_modules in (None, "all-linear") or _ties(config)
    return open_ended or bool(check_target_module_exists(config, path))


def _ties(config: Any) -> bool:
    """True if tied modules that a config does not name have parts, too."""
    return bool(getattr(config, "ensure_weight_tying", False))
