"""Weights that a trainer has left in files, read into the model of a server, on all its ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from safetensors import SafetensorError, safe_open

from ...engine import Engine, RankError
from . import ranks

logger = logging.getLogger("hf_paged")


def load(engine: Engine, files: Sequence[str]) -> int:
    """Read the tensors of files into the model: how many there were. One call at a time."""
    if ranks.world_size() == 1:
        return len(engine.load_weights(tensors_of(files)))
    engine.broadcast(files)  # `load_what_was_sent` has them when the engine pauses
    engine.pause()
    try:
        return len(engine.load_weights(tensors_of(files)))
    finally:
        engine.resume()


def load_what_was_sent(engine: Engine, sent: list[Sequence[str]]) -> None:
    """The same on another rank, in the pause. An error that all ranks have is the first one's to tell."""
    while sent:
        try:
            engine.load_weights(tensors_of(sent.pop()))
        except RankError:
            raise
        except Exception as error:
            logger.info("weights were not loaded, on all ranks: %s", error)


def tensors_of(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of files by their names, one after the other. All files are opened before the first."""
    with ExitStack() as stack:
        opened = []
        for file in files:
            try:
                opened.append(stack.enter_context(safe_open(file, "pt")))
            except SafetensorError as error:
                raise ValueError(
                    f"{file} is not in the form of safetensors: {error}; save it again"
                ) from error
        for each in opened:
            for name in each.keys():  # noqa: SIM118  # it is no mapping
                yield name, each.get_tensor(name)
