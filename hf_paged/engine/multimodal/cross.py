"""Pictures for cross-attention layers (Mllama): their states, whose keys and values lie in a table of the
request's own (C36), and the masks over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from .media import SHOWN, Media, digest_of, media_token_name

STATES = "cross_attention_states"
"""The argument of a decoder that brings what it attends to across."""
MASK = "cross_attention_mask"
"""The argument that says which token sees which tiles: of a model [1, tokens, pictures, tiles], of its
decoder [1, 1, tokens, columns].
"""
PIXELS = "pixel_values"


class CrossInputs(NamedTuple):
    """The cross-attention inputs of some tokens.

    states: input of the layers' key and value projections, if these are not in the pages yet. rows: by
    argument a mask [1, 1, tokens, columns].
    """

    states: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """As arguments of the decoder."""
        return {**self.states, **self.rows}

    def part(self, start: int, count: int, stored: bool) -> CrossInputs:
        """The same for `count` tokens from `start` on; tokens after the prompt attend as its last token does.

        stored: whether the keys and values are in the pages already.
        """
        rows = {name: _rows(mask, start, count) for name, mask in self.rows.items()}
        return CrossInputs({} if stored else self.states, rows)


class CrossMedia(Media):
    """A request's pictures for cross-attention layers. Its tokens stay token ids.

    The keys and values of every token depend on the pictures: `content` is their key, without the mask. A
    token whose row of the mask differs from the row before is named by that row, any other by its id: the
    names determine all rows, also those of generated tokens, which repeat the last one.
    """

    def __init__(self, inputs: dict[str, Any], ids: tuple[int, ...], key: bytes, length: int) -> None:
        """length: the tokens that the model makes of all pictures."""
        self.length = length
        self.cross: CrossInputs | None = None
        """The decoder's cross-attention inputs; states are dropped once keys and values are in the pages."""
        super().__init__(inputs, ids, (), key)
        self.rope_deltas = ()

    def _name_tokens(self, key: bytes) -> None:
        mask = self.inputs.get(MASK)
        by_row = isinstance(mask, torch.Tensor) and mask.shape[:2] == (1, len(self.ids))
        hashed = {name: value for name, value in self.inputs.items() if not (by_row and name == MASK)}
        self.content = digest_of(hashed, key)
        self.place = slice(0, 0)
        self.names = self.ids
        if by_row and isinstance(mask, torch.Tensor):
            rows = list(mask[0].cpu())
            new = [True, *(not torch.equal(one, other) for one, other in pairwise(rows))]
            self.names = tuple(
                media_token_name(digest_of({MASK: row}, key), token, key) if differs else token
                for token, row, differs in zip(self.ids, rows, new, strict=True)
            )

    def due(self, start: int, count: int, begun: bool) -> bool:
        """True if the media must be encoded before these tokens are computed; begun: whether the sequence's
        keys and values across are in the pages.
        """
        return self.cross is None or not (begun or self.cross.states)

    def spent(self, start: int, count: int) -> bool:
        """True if encoder output can be dropped after these tokens."""
        return self.cross is not None and bool(self.cross.states)

    def forget_spent(self) -> None:
        """Drop the states, which are in the pages now; the masks are needed by every later token."""
        if self.cross is not None:
            self.cross = CrossInputs({}, self.cross.rows)

    def forget(self) -> None:
        self.cross = None

    def ids_of(self, start: int, tokens: list[int]) -> list[int]:
        """The token ids of a sequence's tokens from `start` on, for which the scheduler has names."""
        own = self.ids[start : start + len(tokens)]
        return [*own, *tokens[len(own) :]]


def cross_length(model: Any, inputs: Mapping[str, Any]) -> int:
    """The tokens that a model makes of pictures [1, pictures, tiles, channels, height, width]: those of every
    tile, and one for the tile as a whole.
    """
    pixels = inputs.get(PIXELS)
    patch = getattr(_vision(model), "patch_size", None)
    name = type(model).__name__
    if not isinstance(patch, int):
        raise ValueError(
            f"the config of {name} does not say how many tokens an image becomes "
            "(vision_config.patch_size); use generate()"
        )
    shape = tuple(getattr(pixels, "shape", ()))
    if len(shape) != 6 or shape[0] != 1:
        raise ValueError(
            f"{PIXELS} is {list(shape)}, expected [1, images, tiles, channels, height, width]: the "
            f"images of one prompt, as the processor of {name} returns them"
        )
    if inputs.get(MASK) is None:
        raise ValueError(
            f"the images come without {MASK}, so what a token attends to depends on how its prompt is "
            f"chunked; give the output of the processor of {name}, or use generate()"
        )
    _, pictures, tiles, _, height, width = map(int, shape)
    return pictures * tiles * ((height // patch) * (width // patch) + 1)


def longest_picture(model: Any) -> int | None:
    """The most tokens that one picture can take, or None if the config sets no limit."""
    vision = _vision(model)
    names = ("image_size", "patch_size", "max_num_tiles")
    numbers = [number for name in names if isinstance(number := getattr(vision, name, None), int)]
    if len(numbers) < len(names):
        return None
    size, patch, tiles = numbers
    return tiles * ((size // patch) ** 2 + 1)


def why_not_cross(model: Any) -> str | None:
    """Why a model's cross-attention layers cannot be given pictures; None if they can."""
    name = type(model).__name__
    decoder = type(model.get_decoder()).__name__
    if not any(SHOWN.search(each) for each in inspect.signature(model.forward).parameters):
        return f"{name}.forward takes no pictures"
    if STATES not in inspect.signature(model.get_decoder().forward).parameters:
        return f"{decoder}, the decoder of {name}, takes no {STATES}"
    return None


def trial_inputs(like: torch.Tensor, tokens: int) -> CrossInputs:
    """States shaped like embeddings [1, columns, hidden], and a mask that differs for each of `tokens`
    tokens.
    """
    wave = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    column = torch.arange(like.shape[1], device=like.device)
    pairs = torch.arange(tokens, device=like.device)[:, None] + column
    mask = torch.where(pairs % 3 == 0, torch.finfo(like.dtype).min, 0.0).to(like)
    return CrossInputs({STATES: (wave * 0.37).sin().to(like)}, {MASK: mask[None, None]})


def cross_inputs_of(given: Mapping[str, Any], tokens: int, length: int) -> CrossInputs | None:
    """The cross-attention inputs among a decoder's arguments: states of `length` tokens and masks of the
    prompt's `tokens`; None if the arguments have another form.
    """
    states = given.get(STATES)
    seen = given.get(MASK)
    if not isinstance(states, torch.Tensor) or prod(states.shape[:-1]) != length:
        return None
    if not isinstance(seen, torch.Tensor) or seen.shape[-1] != length:
        return None
    rows = {name: value for name, value in given.items() if name != STATES}
    if not all(
        isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[:3] == (1, 1, tokens)
        for mask in rows.values()
    ):
        return None
    return CrossInputs({STATES: states}, rows)


def _rows(mask: torch.Tensor, start: int, count: int) -> torch.Tensor:
    own = mask[:, :, start : start + count]
    missing = count - own.shape[2]
    return own if not missing else torch.cat([own, mask[:, :, -1:].expand(-1, -1, missing, -1)], 2)


def _vision(model: Any) -> Any:
    return getattr(model.config, "vision_config", None)
