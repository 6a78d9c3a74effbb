"""Adapters of prompt learning: virtual tokens in front of a prompt, as peft makes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..offloaded import input_device
from ..prompt_learning import BY_TASK, EMBEDDINGS, PASTS, kind_of, learns_prompts, past_in, pasts_are_ignored
from ..servable import longest
from ..weights_digest import content_digest, tensor_facts
from .tasks import task_of


class GivenPast(NamedTuple):
    """Keys and values of virtual tokens."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys [heads, tokens, key_dim] and values of each layer."""

    @property
    def length(self) -> int:
        """The virtual tokens."""
        return self.layers[0][0].shape[1]

    @property
    def rows(self) -> torch.Tensor:
        """[tokens, numbers]: all that there is of each token."""
        parts = [part.transpose(0, 1).flatten(1) for pair in self.layers for part in pair]
        return torch.cat([part.to(parts[0].device) for part in parts], 1)


class VirtualTokens(NamedTuple):
    """The virtual tokens in front of a request's prompt: embeddings [tokens, hidden], or keys and values."""

    adapter: str
    names: tuple[int, ...]
    """Their names in blocks, made of their content."""
    content: torch.Tensor | GivenPast


class ChosenAdapters(NamedTuple):
    """The adapters of a request: those that change layers from token `start` of its prompt on, or its virtual
    tokens.
    """

    names: tuple[str, ...] = ()
    start: int = 0
    virtual: VirtualTokens | None = None
    task: int = -1
    """The task that they compute, if they know several."""
    whole: bool = False
    """True if all tokens of a forward change each other."""

    @property
    def all(self) -> tuple[str, ...]:
        """Their names."""
        return self.names if self.virtual is None else (self.virtual.adapter,)


NO_ADAPTERS = ChosenAdapters()


class VirtualPrompts:
    """Adapters that are virtual tokens, by name: those of a peft model, and others that an engine was given.

    Those of the peft model are read when a request comes, and kept until they change. A request has them as
    they were then, to its end.
    """

    def __init__(self, outer: Any, model: Any, naming: Callable[[torch.Tensor], tuple[int, ...]]) -> None:
        """outer: what the user holds, perhaps peft's wrapper of the model. naming: names of rows of numbers
        by their content.
        """
        self._outer = outer if learns_prompts(outer) else None
        self._model = model
        self._naming = naming
        self._read: dict[tuple[str, int | None], tuple[Any, list[torch.Tensor], VirtualTokens]] = {}
        """By name and task the versions of the weights when they were read, these, and what was read."""
        self.own: dict[str, Any] = {}
        """Stand-ins of peft's model for those that the engine was given."""

    @property
    def names(self) -> list[str]:
        """Those of the peft model."""
        return [] if self._outer is None else list(self._outer.peft_config)

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self.names

    @property
    def active(self) -> str | None:
        """The one of the peft model that is active now."""
        outer = self._outer
        if outer is None or outer._adapters_disabled or outer.active_adapter not in self.names:
            return None  # peft has an empty list there once all were deleted
        return str(outer.active_adapter)

    def forget(self) -> None:
        """Anything may have happened to the peft model: read all again."""
        self._read = {}

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step, on this model or another."""
        self.forget()

    def of(self, name: str, task: Any = None) -> VirtualTokens:
        """The virtual tokens of an adapter now; none where stock's generate() ignores them. task: of a
        multitask prompt.
        """
        acting = self.own[name] if name in self.own else _acting(self._outer, name)
        place = task_of(acting.active_peft_config, name, task)
        weights = self._weights(name)
        versions = tensor_facts(weights)
        known = self._read.get((name, place))
        if known is not None and known[0] == versions:
            return known[2]
        if kind_of(acting.active_peft_config) in PASTS:
            if pasts_are_ignored():
                return VirtualTokens(name, (), torch.empty(0, 0, dtype=torch.float32, device="cpu"))
            past = self._past(acting)
            found = VirtualTokens(name, self._naming(past.rows), past)
        else:
            embeds = self._embeds(acting, place)
            found = VirtualTokens(name, self._naming(embeds), embeds)
        self._read[name, place] = versions, weights, found
        return found

    def _embeds(self, acting: Any, task: int | None) -> torch.Tensor:
        """Embeddings as peft's own code makes them for one row."""
        from peft import PeftModel

        encoder = acting.prompt_encoder[acting.active_adapter]
        tasks = None if task is None else torch.tensor([task], device=next(encoder.parameters()).device)
        with torch.no_grad():
            made: Any = PeftModel.get_prompt(acting, 1, tasks)
        embeds: torch.Tensor = made[0].detach().to(input_device(self._model), self._model.dtype, copy=True)
        return embeds

    def _past(self, acting: Any) -> GivenPast:
        """Keys and values as peft's own code makes them for one row."""
        from peft import PeftModel

        with torch.no_grad():
            made: Any = PeftModel.get_prompt(acting, 1, max_cache_len=-1)
        layers = past_in(made)
        count = self._model.config.get_text_config(decoder=True).num_hidden_layers
        if layers is None or len(layers) != count:
            raise ValueError(
                f"adapter={acting.active_adapter!r} has no keys and values for each of the {count} layers of "
                f"{type(self._model).__name__}; use generate()"
            )
        device, dtype = input_device(self._model), self._model.dtype

        def held(given: torch.Tensor) -> torch.Tensor:
            return given[0].to(device, dtype, copy=True)

        return GivenPast(tuple((held(keys), held(values)) for keys, values in layers))

    def add(self, name: str, state: Mapping[str, torch.Tensor], config: Any) -> None:
        """Take an adapter as peft saves it; raises ValueError if it is not for this model."""
        kind = kind_of(config)
        if kind not in (*EMBEDDINGS, *PASTS) or self._model.config.is_encoder_decoder:
            raise ValueError(
                f"the engine cannot add an adapter of {kind} to {type(self._model).__name__}; put it into a "
                "peft model and use generate()"
            )
        config = copy.copy(config)
        config.inference_mode = True
        self.own[name] = _saved(self._model, name, state, config)
        try:
            self._check(self.of(name, 0 if kind == BY_TASK else None), config)
        except BaseException:
            del self.own[name]
            raise

    def remove(self, name: str) -> bool:
        """Forget one that the engine was given: False if there is none of this name."""
        self.forget()
        return self.own.pop(name, None) is not None

    def _check(self, tokens: VirtualTokens, config: Any) -> None:
        """Raise if embeddings are not as wide as the model's own, or leave no room for a prompt."""
        most = longest(self._model)
        if most is not None and len(tokens.names) + 2 > most:
            name = type(self._model).__name__
            raise ValueError(
                f"the adapter has {len(tokens.names)} virtual tokens, and {name} is made for {most} "
                "with the prompt and the answer; train one with fewer"
            )
        expected = config.num_virtual_tokens, self._model.get_input_embeddings().weight.shape[1]
        content = tokens.content
        if tokens.names and isinstance(content, torch.Tensor) and content.shape != expected:
            raise ValueError(
                f"the adapter's virtual tokens are {list(content.shape)}, expected {list(expected)}; it is "
                "for another model"
            )

    def digest(self, name: str) -> str:
        """A short name of an adapter's content that is the same in every process."""
        return content_digest([("virtual tokens", self._weights(name))]).hex()[:16]

    def bytes_of(self, name: str) -> int:
        """The memory of an adapter's weights."""
        return sum(each.nbytes for each in self._weights(name))

    def _weights(self, name: str) -> list[torch.Tensor]:
        acting: Any = self.own.get(name, self._outer)
        return list(acting.prompt_encoder[name].parameters())


def _acting(outer: Any, name: str) -> Any:
    """A stand-in, for peft's code, of a peft model that has this adapter active."""
    return SimpleNamespace(
        active_adapter=name,
        active_peft_config=outer.peft_config[name],
        prompt_encoder=outer.prompt_encoder,
        prompt_tokens=outer.prompt_tokens,
        base_model_torch_dtype=outer.base_model_torch_dtype,
        get_base_model=outer.get_base_model,
        config=outer.config,
    )


def _saved(model: Any, name: str, state: Mapping[str, torch.Tensor], config: Any) -> Any:
    """A stand-in, for peft's code, of a model that has this adapter, as it was saved, and no other."""
    if "prompt_embeddings" not in state:
        raise ValueError(
            f"the adapter has {sorted(state)[:3]}, expected 'prompt_embeddings'; give it as peft saves it"
        )
    held = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
    rows = held["prompt_embeddings"]

    def by_task(indices: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
        """The embeddings of a multitask prompt."""
        return rows[indices] * (held["prefix_task_cols"][tasks] @ held["prefix_task_rows"][tasks])

    encoder: Any = by_task
    encoder.embedding = SimpleNamespace(weight=rows)
    encoder.parameters = lambda: iter(held.values())
    return SimpleNamespace(
        active_adapter=name,
        active_peft_config=config,
        prompt_encoder={name: encoder},
        prompt_tokens={name: torch.arange(len(rows), device="cpu")},
        base_model_torch_dtype=model.dtype,
        get_base_model=lambda: model,
        config=model.config,
    )
