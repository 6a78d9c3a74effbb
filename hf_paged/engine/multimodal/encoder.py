"""Encoders: run once each time that a request is computed (C36)."""

from __future__ import annotations

from typing import Any

import torch

from ...model.offloaded import input_device
from ...model.servable import Unservable

INPUTS = ("input_ids", "input_features")
"""Possible inputs of encoders: text, or a recording of one length."""
RECORDING = ("num_mel_bins", "max_source_positions")
"""The config entries for the shape of a recording, as in Whisper's config."""
TRIAL = 13
"""Tokens of the input with which an encoder of text is tried out."""


class EncoderInput:
    """One request's encoder input, and the encoder's output while the request runs."""

    def __init__(self, inputs: torch.Tensor, ids: tuple[int, ...] = ()) -> None:
        self.inputs = inputs
        self.ids = ids
        self.made: Any = None
        """The encoder's output; keys and values made of its last_hidden_state [1, tokens, hidden] are in the
        pages.
        """


class Encoder:
    """The encoder of a model. It runs with a request's first decoder tokens, and again if these are
    recomputed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        name = type(model).__name__
        self.input_name: str = model.main_input_name
        if self.input_name not in INPUTS:
            raise Unservable(
                f"the encoder of {name} takes {self.input_name}, the engine takes {INPUTS} only; use "
                "generate()"
            )
        if self.input_name == "input_features" and not all(hasattr(model.config, name) for name in RECORDING):
            raise Unservable(f"{name} does not give the length of a recording; use generate()")
        self._module = model.get_encoder()
        self._shape: tuple[int, ...] = ()
        self._length = 0
        """The encoder's tokens for a recording, whose shape is fixed; measured in the trial."""

    def trial(self, vocabulary: int) -> EncoderInput:
        """An input for the trial of the model."""
        device = input_device(self._model)
        config = self._model.config
        if self.input_name == "input_ids":
            ids = tuple((5 * i + 3) % vocabulary for i in range(TRIAL))
            return EncoderInput(torch.tensor([ids], device=device), ids)
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        wave = torch.arange(shape[1] * shape[2], device=device).reshape(shape)
        source = EncoderInput((wave * 0.37).sin().to(self._model.dtype))
        self._shape = shape
        self._length = self.run(source).last_hidden_state.shape[1]
        return source

    def length(self, source: EncoderInput) -> int:
        """The tokens that the encoder makes of an input; nothing is computed."""
        if self.input_name == "input_ids":
            return source.inputs.shape[1]
        if tuple(source.inputs.shape) != self._shape:
            raise ValueError(
                f"input_features is {list(source.inputs.shape)}, expected {list(self._shape)}: one recording "
                "a request"
            )
        return self._length

    def run(self, source: EncoderInput) -> Any:
        """Encode an input; the output is kept with it."""
        with torch.no_grad():
            source.made = self._module(**{self.input_name: source.inputs}, return_dict=True)
        return source.made
