"""A prompt's identity in the cache: its tokens, and everything else that decides the keys and values of a row
(contract C24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..blocks import extra_key
from ..model.adapters.identity import AdapterStates
from ..model.hooks import names_of_rows
from ..model.offloaded import divided
from ..model.ranks.tensor_parallel import mesh_of
from ..model.routers import WHY, routers_of
from ..model.snapshot import PLAIN, hooks_everywhere
from ..model.training import why_random

PLACES = ("input_ids", "inputs_embeds", "position_ids")
"""The arguments that grow from token to token."""
NO_MATTER = frozenset(
    {
        "use_cache",
        "return_dict",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
"""Settings of a forward that change what it answers and not what it stores."""


class NotShareable(Exception):
    """Why what is computed here cannot be shared."""


class ForwardInputs(NamedTuple):
    """The input of a forward: a number for each token, and each row's key."""

    tokens: torch.Tensor
    """[rows, new]"""
    keys: list[bytes]


class PrefixOrigin(NamedTuple):
    """The origin of a call's keys and values: the state of the model and of its adapters, and the caller's
    salt.
    """

    secret: bytes
    state: int
    salt: str
    hooked: Sequence[nn.Module]
    adapters: AdapterStates
    active: tuple[str, ...]
    """The adapters of rows that peft's hooks name none for. Where adapters are part of the model, it is "",
    which none is called.
    """

    def read(self, arguments: Mapping[str, Any], starts: Sequence[int] | None, before: int) -> ForwardInputs:
        """The inputs of a forward after `before` columns; raises NotShareable if something in it has no place
        in a key.
        """
        tokens = _tokens(arguments, self.secret)
        rows, new = tokens.shape
        begins = starts or [0] * rows
        positions = arguments.get("position_ids")
        if positions is not None and not _count_tokens(positions, begins, before, new):
            raise NotShareable("the positions do not count a row's tokens")
        device = tokens.device.type
        common = (
            self.secret, self.state, self.salt, tuple(sorted(_settings(arguments))), positions is None,
            torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)), _products(),
        )  # fmt: skip
        adapters = [self.adapters.key(names) for names in names_of_rows(self.hooked, rows, self.active)]
        # Without positions a model may count columns, padding and all.
        places = begins if positions is None else [0] * rows
        return ForwardInputs(
            tokens,
            [extra_key(*common, adapter, place) for adapter, place in zip(adapters, places, strict=True)],
        )


def _settings(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The plain arguments that may change what is computed."""
    for name, value in arguments.items():
        if name in PLACES or name in NO_MATTER or name == "attention_mask" or isinstance(value, Cache):
            continue  # padding is no token, and a mask with more information is detected elsewhere
        if type(value) not in PLAIN:
            raise NotShareable(f"{name} is given")
        yield name, repr(value)


def _tokens(arguments: Mapping[str, Any], secret: bytes) -> torch.Tensor:
    """A number for each token [rows, new]: its id, or what its embedding is boiled down to."""
    ids = arguments.get("input_ids")
    embeddings = arguments.get("inputs_embeds")
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and embeddings is None:
        return ids
    if isinstance(embeddings, torch.Tensor) and embeddings.ndim == 3 and ids is None:
        return fold(embeddings, secret)
    raise NotShareable("the inputs are neither token ids nor embeddings")


def fold(embeddings: torch.Tensor, secret: bytes) -> torch.Tensor:
    """Hash embeddings [rows, new, dim] to a negative number of 63 bits each, [rows, new]: no token id is
    negative.

    Every 16 bits are multiplied with a random odd number that only this process knows: two embeddings that
    differ collide once in 2^47 times, whatever their source.
    """
    words = embeddings.detach().contiguous().view(torch.int16)
    random = torch.Generator().manual_seed(int.from_bytes(secret[:8], "little", signed=True))
    weights = torch.randint(-(2**62), 2**62, (words.shape[2],), generator=random, device="cpu") * 2 + 1
    weights = weights.to(words.device)
    folded = torch.stack([(row.long() * weights).sum(-1) for row in words])
    return folded | torch.iinfo(torch.int64).min


def _count_tokens(positions: Any, starts: Sequence[int], before: int, new: int) -> bool:
    """True if positions [rows or 1, new] count each row's tokens from its first on."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != new:
        return False
    column = torch.arange(before, before + new, device=positions.device)
    expected = column - torch.tensor(starts, device=positions.device)[:, None]
    return bool(((positions == expected) | (expected < 0)).all())


def _products() -> str:
    """How torch multiplies float32 matrices."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's two ways to set it are mixed
        return str(torch.backends.cuda.matmul.fp32_precision)


def why_never(complete: bool, model: Any, in_slots: bool = False) -> str | None:
    """Why nothing that this model computes can be shared, or None if it can. complete: whether pages and
    slots hold everything that its cache keeps. in_slots: whether there are states.
    """
    if model.config.is_encoder_decoder:
        return "a decoder's keys and values depend on its encoder's output"
    random = why_random(model)
    if random is not None:
        return random
    if (getattr(model, "_is_stateful", False) and not in_slots) or not complete:
        return "a layer keeps more than keys and values"
    if routers_of(model, again=True).modules:
        return WHY
    if hooks_everywhere():
        return "hooks run in all modules of the process"
    if divided(map(type, model.modules())):
        return "FSDP divides the weights, and a rank sees changes of its own part of them only"
    if mesh_of(model) is not None:
        return "several ranks compute the model, each with a cache of its own; the engine shares prefixes"
    return None
