"""Pictures, recordings, embeddings and encoders."""

import torch

from .encoder import EncoderInput
from .media import Media

PromptInputs = torch.Tensor | Media | EncoderInput
"""Inputs of a prompt beside token ids: embeddings, pictures or recordings, or an encoder's input."""
