"""Pictures and recordings of a prompt, whose features the model puts in the place of some of its tokens."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from ...blocks.columns import Filler
from ...model.adapters.virtual import GivenPast
from ...model.cache_name import NAMES
from ...model.weights_digest import host_bytes
from ...scheduling import SequenceGroup, TokenSequence
from .extras import DecoderExtras

SHOWN = re.compile(
    r"pixel_values|^(audio_)?input_(features|values)$|^image_patches$|^flattened_patches$"
    r"|^(images?|videos?|audios?)$"
)
"""Keywords that bring pictures or recordings; other keywords of the model's forward describe them."""
OURS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        *NAMES,
        "cache_position",
        "labels",
        "use_cache",
    }
    | {"logits_to_keep", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords of a forward that are the engine's to give."""
MARKS = re.compile(r"(image|img|video|vision|visual|audio|speech|media).*token(_id|_ids|_index)?$")
"""Config entries that name the tokens to be replaced by media."""


class Media:
    """One request's pictures or recordings, and their embeddings while their part of the prompt is computed.

    names: the token ids in the prefix cache: a replaced token is named by the digest of all media, below -1
    unlike any id. place: from the first replaced token to after the last one.
    """

    def __init__(
        self, inputs: dict[str, Any], ids: tuple[int, ...], marks: Collection[int], key: bytes
    ) -> None:
        """marks: tokens that are replaced by features; in a prompt without any of them any token may be."""
        self.inputs = {name: _kept(name, value) for name, value in inputs.items()}
        self.ids = ids
        self.marks = frozenset(marks).intersection(ids) or frozenset(ids)
        self._name_tokens(key)
        self.made: torch.Tensor | None = None
        """[tokens, hidden]: the embeddings of the whole prompt."""
        self.extras: DecoderExtras | None = None
        """Extra decoder inputs for some of its tokens, kept as long as the embeddings."""
        self.positions: torch.Tensor | None = None
        """[axes, tokens] on the host: the prompt's RoPE positions, if these are not consecutive."""
        self.rope_deltas: tuple[int, ...] | None = None
        """RoPE position delta per axis for tokens after the prompt; () if positions are plain, None until
        computed.
        """
        self.front: torch.Tensor | GivenPast | None = None
        """The virtual tokens in front of the prompt: embeddings [tokens, hidden], or keys and values."""
        self.virtual = 0
        """How many they are. Tokens are counted with them, but for `ids`, `names` and `place`."""
        self.one_delta = False
        """True if one delta serves all axes that matter to the model, so captured steps can apply it."""

    def _name_tokens(self, key: bytes) -> None:
        places = [place for place, token in enumerate(self.ids) if token in self.marks]
        self.place = slice(places[0], places[-1] + 1)
        self.content = content = digest_of(self.inputs, key)
        named = {mark: media_token_name(content, mark, key) for mark in self.marks}
        self.names = tuple(named.get(token, token) for token in self.ids)

    @property
    def kind(self) -> frozenset[str]:
        """The names of the media's arguments."""
        return frozenset(self.inputs)

    def behind(self, front: torch.Tensor | GivenPast, count: int) -> Media:
        """The same behind `count` virtual tokens."""
        found = copy.copy(self)
        found.front = front
        found.virtual = count
        return found

    def concerns(self, start: int, count: int) -> bool:
        """True if `count` tokens of the prompt from `start` on have inputs other than their ids."""
        begin = 0 if self.virtual else self.place.start
        return start < self.virtual + self.place.stop and start + count > begin

    def past(self, start: int) -> GivenPast | None:
        """The keys and values that tokens from `start` on have, if these are given."""
        return self.front if isinstance(self.front, GivenPast) and start < self.virtual else None

    def embeds(self, start: int, count: int) -> torch.Tensor | None:
        """[n, hidden]: the embeddings of the first n of `count` tokens from `start` on; None if they have
        none.
        """
        if self.made is None or not self.concerns(start, count):
            return None
        begin = start - (self.virtual if isinstance(self.front, GivenPast) else 0)
        return self.made[begin : begin + count] if begin < len(self.made) else None

    def require_plain(self, name: str) -> None:
        """Raise if virtual tokens are in front of media that have positions or further inputs of their own.
        name: the model's.
        """
        if self.front is not None and (self.rope_deltas or self.extras is not None):
            what = "positions" if self.rope_deltas else "inputs"
            raise ValueError(
                f"{name} gives {sorted(self.kind)} {what} of their own, and the adapter's virtual tokens are "
                "in front of them; use generate()"
            )

    def due(self, start: int, count: int, begun: bool) -> bool:
        """True if the media must be encoded before these tokens are computed."""
        return self.made is None and (self.rope_deltas is None or self.concerns(start, count))

    def spent(self, start: int, count: int) -> bool:
        """True if encoder output can be dropped after these tokens."""
        return self.made is not None and start + count >= self.virtual + self.place.stop

    def forget_spent(self) -> None:
        """Drop encoder output that is not needed any more."""
        self.forget()

    def where(self, start: int, count: int) -> torch.Tensor | None:
        """[axes, count]: the RoPE positions of `count` tokens from `start` on; None if these are consecutive,
        but for a single number.
        """
        if not self.rope_deltas or start + count <= self.place.start or self.moved_by(start) is not None:
            return None
        deltas = torch.tensor(self.rope_deltas, device="cpu")[:, None]
        found = torch.arange(start, start + count, device="cpu") + deltas
        if start < self.place.stop:
            assert self.positions is not None
            own = self.positions[:, start : start + count]
            found[:, : own.shape[1]] = own
        return found

    def moved_by(self, start: int) -> int | None:
        """The RoPE delta of tokens from `start` on, if a single number is known."""
        if not self.rope_deltas or not self.one_delta or start < self.place.stop:
            return None
        delta = self.rope_deltas[-1]  # recordings may have positions between whole numbers
        return int(delta) if delta == int(delta) else None

    @property
    def one_by_one(self) -> bool:
        """True if no single number moves the tokens behind it, so that their rows have positions of their
        own.
        """
        return bool(self.rope_deltas) and self.moved_by(self.place.stop) is None

    def near(self, start: int, count: int) -> DecoderExtras | None:
        """The extra decoder inputs of `count` tokens from `start` on."""
        return (
            None if self.extras is None or not self.concerns(start, count) else self.extras.part(start, count)
        )

    def forget(self) -> None:
        """Drop the embeddings, which are not needed any more or not valid any more."""
        self.made = self.extras = None

    def drop(self) -> None:
        """The prompt will not be computed again: drop the media, even if the answer is kept."""
        self.forget()
        self.positions = None
        self.front = None
        self.inputs = {}

    @property
    def plain(self) -> list[int]:
        """The prompt with a text token in the place of each replaced one."""
        other = next((token for token in self.ids if token not in self.marks), None)
        if other is None:
            return list(self.ids)
        return [other if token in self.marks else token for token in self.ids]


def rope_delta_filler(requests: Mapping[SequenceGroup, Any]) -> Filler:
    """The filler of the column rope_delta; requests: those that may have media."""

    def fill(sequences: Sequence[TokenSequence]) -> list[int]:
        media = [getattr(requests.get(sequence.group), "media", None) for sequence in sequences]
        return [
            0 if each is None else each.moved_by(sequence.computed) or 0
            for each, sequence in zip(media, sequences, strict=True)
        ]

    return fill


def media_arguments(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Take the media, and the keywords that describe them, out of a request's keywords, if the model accepts
    media.
    """
    shown = [name for name, value in keywords.items() if value is not None and SHOWN.search(name)]
    if not shown or model.config.is_encoder_decoder:
        return {}
    known = _parameters(model.forward) | _parameters(model.prepare_inputs_for_generation)
    unknown = sorted(set(shown) - known)
    if unknown:
        raise ValueError(
            f"{type(model).__name__} takes no {unknown}; give the output of its processor: "
            "engine.submit(**processor(...)), or chat messages"
        )
    own = [
        name
        for name in keywords
        if name in known and name not in OURS and not hasattr(model.generation_config, name)
    ]
    return {name: value for name in own if (value := keywords.pop(name)) is not None}


def marks_of(config: Any) -> frozenset[int]:
    """The tokens that a model replaces by media, as far as its config names them."""
    found = [value for name, value in config.to_dict().items() if MARKS.search(name)]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in found]
    return frozenset(each for value in lists for each in value if type(each) is int)


def _parameters(method: Any) -> set[str]:
    return {
        name
        for name, each in inspect.signature(method).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    }


def _kept(name: str, value: Any) -> Any:
    """A copy: what its owner does with a tensor later is no business of a request that may be computed
    again.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_kept(name, each) for each in value)
    if type(value).__module__ == "numpy":
        value = torch.as_tensor(value, device="cpu")
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{name} is or holds a {type(value).__name__}, expected tensors; give the output of the "
        "model's processor"
    )


def put_on(inputs: Any, device: torch.device) -> Any:
    """The media's arguments on a device."""
    if isinstance(inputs, dict):
        return {name: put_on(value, device) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(put_on(each, device) for each in inputs)
    return inputs.to(device) if isinstance(inputs, torch.Tensor) else inputs


def digest_of(inputs: dict[str, Any], key: bytes) -> bytes:
    """A digest of a forward's arguments; different contents have different digests."""
    digest = blake2b(key=key)
    for part in _parts(sorted(inputs.items())):
        digest.update(part)
    return digest.digest()


def _parts(value: Any) -> Iterator[bytes]:
    """The bytes of a value, different for different values."""
    if isinstance(value, (list, tuple)):
        yield b"(%d" % len(value)
        for each in value:
            yield from _parts(each)
    elif isinstance(value, torch.Tensor):
        yield f"<{value.dtype}{list(value.shape)}".encode()
        yield host_bytes(value)
    else:
        said = f"{type(value).__name__} {value!r}".encode()
        yield b"=%d " % len(said)
        yield said


def media_token_name(content: bytes, mark: int, key: bytes) -> int:
    """The name of a token that is replaced by media with this digest. Without the key it is infeasible to
    find two media with one name.
    """
    digest = blake2b(content + mark.to_bytes(8, "big"), digest_size=8, key=key).digest()
    return -2 - (int.from_bytes(digest, "big") >> 2)
