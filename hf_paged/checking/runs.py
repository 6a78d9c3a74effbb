"""The calls of generate() that a comparison makes, each from the same random state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..model.cache_name import NEWER, OLDER
from ..model.registry import base_model
from ..model.rounding import computing_dtype, shaken
from ..model.training import evaluating
from .ties import NOISE, Follow, relative_difference

WORD = "paged"
OF_ASSISTANTS = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_tokenizer",
    "tokenizer",
    "assistant_early_exit",
)
OURS = ("cache_config", "cache_implementation", "return_dict_in_generate", "streamer")
"""Options that a comparison sets itself, or leaves out."""
SHAKES = 3
SMALL = 2**-12
LARGE = 2**-4
"""Shakes of embeddings in float32 that show whether a model rounds to fewer bits."""
ROUNDINGS = 2.0
MOST = 0.25
"""Rounding explains so many times what shaking the embeddings does, and at most so much."""


class CallAnswer(NamedTuple):
    """The answer of a call."""

    sequences: torch.Tensor
    scores: torch.Tensor
    """Of beams [rows]; else empty."""
    begin: int
    """Columns before the first new token."""


class Runs:
    """A model and the inputs of one call, to be run by stock and on pages. A context: modes and random states
    are put back.
    """

    def __init__(
        self, model: nn.Module, inputs: torch.Tensor | Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        given = {"inputs": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
        for name in {NEWER, OLDER} & (given.keys() | options.keys()):
            raise ValueError(f"{name} is filled by the first of the two calls; pass the whole prompt instead")
        self.model: Any = model
        self.inputs = given
        self.options = {
            name: value
            for name, value in options.items()
            if not name.startswith("output_") and name not in OURS
        }
        self.cache_config = options.get("cache_config")
        self._modes = evaluating(self.model)
        self._states: list[torch.Tensor] = []

    def __enter__(self) -> Runs:
        self._states = self._random_states()
        self._modes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.__exit__(kind, error, trace)
        self._begin_anew()

    # ---- requested outputs

    @property
    def dtype(self) -> torch.dtype:
        """The model's computing dtype."""
        return computing_dtype(self.model.device.type, self.model.dtype)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def option(self, name: str) -> Any:
        """An option of the call, from where generate() takes it."""
        config = self.options.get("generation_config") or self.model.generation_config
        return self.options.get(name, getattr(config, name, None))

    @property
    def padding(self) -> int:
        """The token after the end of a row."""
        found = self.option("pad_token_id")
        ends = self.option("eos_token_id")
        if found is None:
            found = ends[0] if isinstance(ends, (list, tuple)) else ends
        return 0 if found is None else int(found)

    # ---- calls

    def answer(self, paged: bool, scores: bool) -> CallAnswer:
        """The answer of the user's call."""
        widths: list[int] = []

        def note_width(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            widths.append(input_ids.shape[1])
            return scores

        found = self.generate(paged, note_width, output_scores=scores)
        sequences = found["sequences"]
        own = (
            found["sequences_scores"].float().cpu()
            if scores
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        return CallAnswer(sequences, own, 0 if "inputs_embeds" in self.inputs else next(iter(widths), 0))

    def follow(self, tokens: torch.Tensor, places: Mapping[int, int], paged: bool) -> dict[int, torch.Tensor]:
        """The logits [vocabulary] of each row at its place, if its answer so far is `tokens` [rows,
        steps].
        """
        follow = Follow(tokens, places)
        last = max(places.values()) + 1

        def stop(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), follow.said >= last, device=input_ids.device)

        self.generate(paged, follow, stop, alone=True)
        return follow.kept

    def generate(
        self,
        paged: bool,
        processor: Callable[..., torch.Tensor],
        stop: Callable[..., torch.Tensor] | None = None,
        *,
        alone: bool = False,
        **more: Any,
    ) -> Any:
        """One call from the same random state as all others; `alone` without an assistant."""
        arguments = {**self.inputs, **self.options, **more, "return_dict_in_generate": True}
        if alone:
            arguments = {name: value for name, value in arguments.items() if name not in OF_ASSISTANTS}
        for name, kind, one in (
            ("logits_processor", LogitsProcessorList, processor),
            ("stopping_criteria", StoppingCriteriaList, stop),
        ):
            users = copy.deepcopy(list(arguments.get(name) or []))  # they may count their calls
            arguments[name] = kind([*users, *([] if one is None else [one])])
        if paged:
            arguments |= {"cache_implementation": WORD, "cache_config": self.cache_config}
        elif self.option("cache_implementation") == WORD:
            config = copy.deepcopy(self.options.get("generation_config") or self.model.generation_config)
            config.cache_implementation = config.cache_config = None
            arguments["generation_config"] = config
        self._begin_anew()
        with self._without_the_word(paged), warnings.catch_warnings():
            # Stock's own length is what is compared where the user gives none.
            warnings.filterwarnings("ignore", "Using the model-agnostic default `max_length`", UserWarning)
            return self.model.generate(**arguments)

    @contextmanager
    def _without_the_word(self, paged: bool) -> Iterator[None]:
        """Stock's calls fill what a config leaves open from the model's, which may have the word."""
        config = self.model.generation_config
        kept = (config.cache_implementation, config.cache_config)
        if not paged and config.cache_implementation == WORD:
            config.cache_implementation = config.cache_config = None
        try:
            yield
        finally:
            config.cache_implementation, config.cache_config = kept

    # ---- random states

    def _random_states(self) -> list[torch.Tensor]:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

    def _begin_anew(self) -> None:
        torch.set_rng_state(self._states[0])
        for device, state in enumerate(self._states[1:]):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def shaking(model: nn.Module, seed: int, by: float | None) -> Iterator[None]:
    """Run a model with every embedding off by what rounding may do to it, or by a share of its size."""
    embeddings: Any = base_model(model).get_input_embeddings()  # type: ignore[operator]
    chance = torch.Generator(embeddings.weight.device).manual_seed(seed)
    handle = embeddings.register_forward_hook(lambda module, inputs, output: shaken(output, chance, by))
    try:
        yield
    finally:
        handle.remove()


def expected_noise(dtype: torch.dtype) -> float:
    """How far rounding moves logits in a dtype, relative to the largest."""
    return NOISE.get(dtype, NOISE[torch.bfloat16])


def measured_noise(runs: Runs, logits: Callable[[], Mapping[int, torch.Tensor]]) -> float:
    """The same as far as it can be measured on the model: `logits` computes those of each row by stock, again
    and again.

    A model in float32 may round to fewer bits inside (int8 activations). Its logits then jump where those of
    others glide: a shake of the embeddings moves them by more than its share of what a larger shake does.
    """
    before = logits()

    def moved(by: float | None) -> float:
        most = 0.0
        for seed in range(SHAKES):
            with shaking(runs.model, seed, by):
                after = logits()
            most = max(most, *(relative_difference(before[row], after[row]) for row in before))
        return most

    most = moved(None)
    if runs.dtype in (torch.float32, torch.float64):
        most = max(most, moved(SMALL) - moved(LARGE) * SMALL / LARGE)
    return max(expected_noise(runs.dtype), min(ROUNDINGS * most, MOST))
