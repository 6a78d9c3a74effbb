"""Embeddings of prompts with pictures or recordings, taken from the model's own forward."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig

from ...model.rounding import shaken
from ...model.servable import Unservable, longest
from ...model.snapshot import INTERNAL
from ..multimodal.cross import CrossInputs, CrossMedia, cross_inputs_of
from ..multimodal.extras import decoder_arguments, decoder_extras, joined_extras
from ..multimodal.media import Media, put_on
from .eager import EagerModel
from .probe import distance, far

TOKENS = ("input_ids", "inputs_embeds")
POSITIONS = "position_ids"
NEW = 3
"""So many tokens of the first prompt of a kind are computed by generate(), too, if the model is made for that
many.
"""
MOST = 4096
"""Of so many prompts it is known how far they move what follows."""
PLAIN = (bool, int, float, str, type(None))


class _InputsSeen(BaseException):
    """Stops generate() at its call of the decoder."""


class Merger:
    """Makes embeddings of prompts with media, for any kind of model.

    generate() is started on the prompt and stopped where it calls the decoder. The arguments of that call
    must be those of a text prompt, except for embeddings (equal to the prompt's own for all text), positions
    (`moved`) and features of tokens (`decoder_extras`). Otherwise the model does more with media than the
    engine supports, and the request ends with an error that says so. The first prompt of a kind is also
    compared with the first tokens of generate() itself.
    """

    def __init__(self, eager: EagerModel) -> None:
        self._eager = eager
        self._model: Any = eager.model
        self._held: set[frozenset[str]] = set()
        self._one_delta: set[frozenset[str]] = set()
        """Kinds of media after which one RoPE delta serves all axes."""
        self.why_not: dict[frozenset[str], str] = {}
        """Why media of a kind are refused."""
        self._rope_deltas: OrderedDict[tuple[bytes, tuple[int, ...]], tuple[int, ...]] = OrderedDict()
        """The RoPE deltas after prompts that were encoded lately."""

    def require(self, media: Media) -> None:
        """Raise if the engine is known not to support prompts of this kind."""
        if media.kind in self.why_not:
            raise ValueError(self.why_not[media.kind])
        self.recall(media)

    def recall(self, media: Media) -> None:
        """Set a prompt's RoPE delta, if one with this content was encoded."""
        if isinstance(media, CrossMedia):
            return  # it moves nothing
        media.rope_deltas = self._rope_deltas.get((media.content, media.ids))
        media.one_delta = media.kind in self._one_delta

    def run(self, media: Media) -> None:
        """Make a prompt's embeddings, which are kept with it."""
        try:
            with torch.no_grad(), _as_before(self._model):
                if isinstance(media, CrossMedia):
                    media.cross = self._cross(media)
                else:
                    made = self._made(media)
                    front = media.front
                    media.made = (
                        torch.cat([front.to(made), made]) if isinstance(front, torch.Tensor) else made
                    )
        except Unservable as reason:
            self.why_not[media.kind] = str(reason)
            raise

    def _made(self, media: Media) -> torch.Tensor:
        name = type(self._model).__name__
        device = self._eager.device
        shown = self._handed(list(media.ids), put_on(media.inputs, device))
        plain = self._handed(media.plain, {})
        media.positions, media.rope_deltas = moved(media, shown.get(POSITIONS), plain.get(POSITIONS))
        others = self._others(media, shown, plain)
        media.extras = decoder_extras({each: shown.get(each) for each in others}, len(media.ids))
        media.require_plain(name)
        if others and (media.extras is None or any(plain.get(each) is not None for each in others)):
            raise Unservable(
                f"{name} gives its decoder other {others} with {sorted(media.kind)}; use generate()"
            )
        merged = shown.get("inputs_embeds")
        if not isinstance(merged, torch.Tensor):
            raise Unservable(
                f"{name} passes no embeddings to its decoder for {sorted(media.kind)}; use generate()"
            )
        own = self._eager.embedded(torch.tensor([media.plain], device=device))
        if merged.shape != own.shape:
            raise ValueError(
                f"{name} makes embeddings {list(merged.shape)} of a prompt with {list(own.shape)}; use its "
                "processor"
            )
        merged = merged.to(own)
        before = slice(media.place.start)
        behind = slice(media.place.stop, None)
        if not all(torch.equal(merged[:, text], own[:, text]) for text in (before, behind)):
            raise Unservable(
                f"{name} changes the embeddings of text next to {sorted(media.kind)}; use generate()"
            )
        if media.kind not in self._held:
            self._hold(media, merged)
            self._held.add(media.kind)
        media.one_delta = media.kind in self._one_delta
        self._rope_deltas[media.content, media.ids] = media.rope_deltas
        if len(self._rope_deltas) > MOST:
            self._rope_deltas.popitem(last=False)
        return merged[0]

    def _cross(self, media: CrossMedia) -> CrossInputs:
        """The decoder's cross-attention inputs; its tokens must be those of text."""
        name = type(self._model).__name__
        ids = list(media.ids)
        shown = self._handed(ids, put_on(media.inputs, self._eager.device))
        plain = self._handed(ids, {})
        others = self._others(media, shown, plain)
        if not all(same(shown.get(each), plain.get(each)) for each in TOKENS):
            raise Unservable(
                f"{name} gives its decoder other tokens with {sorted(media.kind)}, and cross-attention "
                "states; use generate()"
            )
        found = cross_inputs_of(
            {each: shown[each] for each in others if each in shown}, len(ids), media.length
        )
        if found is None or any(plain.get(each) is not None for each in others):
            shapes = {each: list(getattr(shown.get(each), "shape", ())) for each in others}
            raise Unservable(
                f"{name} gives its decoder {shapes} with {sorted(media.kind)}, expected cross-attention "
                f"states of {media.length} tokens and masks of {len(ids)}; use generate()"
            )
        if media.kind not in self._held:
            self._hold_cross(media, found)
            self._held.add(media.kind)
        return found

    def _hold_cross(self, media: CrossMedia, found: CrossInputs) -> None:
        """Raise unless the prompt's tokens with these inputs lead to the first logits of generate()."""
        eager = self._eager
        right, sequence = self._first_logits(media)
        embeds = eager.embedded(sequence)
        with decoder_arguments(self._model, found.part(0, embeds.shape[1], stored=False).arguments):
            self._require_near(media, right, embeds, None)

    def _first_logits(self, media: Media) -> tuple[torch.Tensor, torch.Tensor]:
        """The first logits [new, vocabulary] of generate() on a prompt, and the tokens [1, tokens] before the
        last of them.
        """
        room = (longest(self._model) or len(media.ids) + NEW) - len(media.ids)
        new = max(1, min(NEW, room))
        answer = self._generate(
            list(media.ids), put_on(media.inputs, self._eager.device), max_new_tokens=new, output_logits=True
        )
        right = torch.cat([logits[:1] for logits in answer.logits]).to(torch.float32)
        return right, answer.sequences[:1, : len(media.ids) + len(right) - 1]

    def _require_near(
        self, media: Media, right: torch.Tensor, embeds: torch.Tensor, where: torch.Tensor | None
    ) -> None:
        """Raise unless embeddings [1, tokens, hidden] lead to these logits."""
        eager = self._eager
        found = eager.logits_of(embeds, len(right), where)

        def moved() -> float:
            again = shaken(embeds, torch.Generator(eager.device).manual_seed(0))
            return distance(right, eager.logits_of(again, len(right), where))

        off = far(right, found, eager.dtype, moved)
        if off is not None:
            name = type(self._model).__name__
            raise Unservable(
                f"{name} gives other logits for {sorted(media.kind)} than for the embeddings of them "
                f"(by {off:.1e}); use generate()"
            )

    def _generate(self, ids: list[int], inputs: Mapping[str, Any], **options: Any) -> Any:
        """Stock generate() on ids [tokens], greedy and without the options of the model's own config."""
        model = copy.copy(self._model)  # the same modules
        model.generation_config = GenerationConfig()
        rows = torch.tensor([ids], device=self._eager.device)
        mask = torch.ones_like(rows)
        return model.generate(
            input_ids=rows,
            attention_mask=mask,
            **inputs,
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )

    def _handed(self, ids: list[int], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of generate()'s first call of the decoder."""
        decoder = self._model.get_decoder()
        found = {}
        names = inspect.signature(decoder.forward)

        def stop(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found.update(dict(zip(names.parameters, args, strict=False)) | keywords)
            raise _InputsSeen

        hook = decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._generate(ids, inputs, max_new_tokens=1)
        except _InputsSeen:
            return found
        finally:
            hook.remove()
        raise Unservable(
            f"{type(self._model).__name__} does not call its decoder, {type(decoder).__name__}; use "
            "generate()"
        )

    def _others(self, media: Media, shown: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
        """Further arguments of the decoder that differ with media. Arguments that are only passed through,
        without a name in its signature, do not count.
        """
        known = inspect.signature(self._model.get_decoder().forward).parameters
        names = [
            name
            for name in {**shown, **plain}
            if name not in TOKENS and (name in known or name not in media.inputs)
        ]
        if media.rope_deltas:
            names.remove(POSITIONS)
        return [name for name in names if not same(shown.get(name), plain.get(name))]

    def _hold(self, media: Media, merged: torch.Tensor) -> None:
        """Raise unless the embeddings [1, tokens, hidden] lead to the first logits of generate() on this
        prompt.
        """
        eager = self._eager
        right, sequence = self._first_logits(media)
        embeds = torch.cat([merged, eager.embedded(sequence[:, len(media.ids) :])], 1)
        count = embeds.shape[1]
        new = len(right)
        where = media.where(0, count)
        extras = joined_extras([media.near(0, count)], [count])
        with decoder_arguments(self._model, extras):
            self._require_near(media, right, embeds, where)
            behind = count - media.place.stop
            one_delta = media.rope_deltas is not None and len(set(media.rope_deltas[1:])) == 1
            if where is not None and behind and one_delta:
                where[:, media.place.stop :] = where[-1:, media.place.stop :].clone()
                if far(right, eager.logits_of(embeds, new, where), eager.dtype, lambda: 0.0) is None:
                    self._one_delta.add(media.kind)


def moved(media: Media, shown: Any, plain: Any) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """The RoPE positions [axes, tokens] of a prompt with media, and the RoPE delta per axis for tokens after
    it.

    None and () if positions are those of text, or of a form that is not supported: text before the media must
    have its usual positions, text after them consecutive ones with a constant delta.
    """
    if (
        not (isinstance(shown, torch.Tensor) and isinstance(plain, torch.Tensor))
        or shown.ndim != 3
        or shown.shape != plain.shape
    ):
        return None, ()
    here = shown[:, 0].cpu()
    text = plain[:, 0].cpu()
    if torch.equal(here, text) or not torch.equal(
        text, torch.arange(text.shape[1], device="cpu").expand_as(text)
    ):
        return None, ()
    off = here - text
    if off[:, : media.place.start].any() or not torch.equal(
        off[:, media.place.stop :], off[:, -1:].expand(-1, len(media.ids) - media.place.stop)
    ):
        return None, ()
    return here, tuple(off[:, -1].tolist())


def same(one: Any, other: Any) -> bool:
    """True if two arguments are equal; two caches are if they are of one type, both being new."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or isinstance(one, Cache) or (isinstance(one, PLAIN) and bool(one == other))


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Restore the attributes that a forward sets on the modules: they belong to one prompt, and other
    requests run beside it.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for own, kept in before:
            for name in [
                name for name in own if name not in INTERNAL and own[name] is not kept.get(name, before)
            ]:
                if name in kept:
                    own[name] = kept[name]
                else:
                    del own[name]
