"""For trying things out without a download: a very small Llama with its tokenizer, which tells little
stories.

The files are in `data` beside this module, under one megabyte together. `scripts/train_demo.py` of the
repository makes them. The model knows the few hundred words of its stories and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["model", "prompts", "tokenizer"]

_DATA = Path(__file__).resolve().parent / "data"


def model() -> LlamaForCausalLM:
    """A model to generate with: the demo Llama in float32 and eval mode, a new object at each call.

    Its weights are stored in bfloat16, so `model().to(torch.bfloat16)` loses nothing.
    """
    from ..model.loading import DEMO, Checkpoint

    loaded: LlamaForCausalLM = Checkpoint.of(DEMO[0], {"local_files_only": True}).load(True)
    return loaded


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer for the texts of the demo model, a new object at each call.

    It pads on the left, as generation needs it, and starts a text with its bos token. It has a chat template
    and a response template, though the model has not learned to call tools.
    """
    from transformers import PreTrainedTokenizerFast

    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(_DATA, local_files_only=True)
    return loaded


def prompts() -> list[str]:
    """Eight beginnings of stories, of different lengths, for the demo model to continue.

    The model knows some of these stories by heart and makes the others up from the patterns it has learned.
    """
    return [
        "The tailor and the heron met",
        "Early in the morning the gardener",
        "A thick fog came over",
        "Every night the lighthouse keeper",
        '"Why is the sky blue?" asked the girl.',
        "The old bear slept",
        "One day the mouse went to the",
        "The moon fell",
    ]
