"""Pictures, recordings, embeddings and encoders."""

import torch

from ...model.adapters.virtual import GivenPast
from .encoder import EncoderInput
from .media import Media

PromptInputs = torch.Tensor | Media | EncoderInput | GivenPast
"""Inputs of a prompt beside token ids: embeddings, pictures or recordings, an encoder's input, or keys and
values of its first tokens.
"""
