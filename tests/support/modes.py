"""The ways of calling generate() that every family goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Mode = Callable[[Any, torch.Tensor], dict[str, Any]]
NEW = 9
DRAFTED = 14
"""Tokens where drafts make them a few steps."""


def _with(**arguments: Any) -> Mode:
    return lambda model, ids: {"max_new_tokens": NEW, "do_sample": False, **arguments}


def _padded(**arguments: Any) -> Mode:
    def mode(model: Any, ids: torch.Tensor) -> dict[str, Any]:
        mask = torch.ones_like(ids)
        ids = ids.clone()
        for row, pads in enumerate((3, 0, 7)):
            if model.config.is_encoder_decoder:
                mask[row, ids.shape[1] - pads :] = 0
            else:
                mask[row, :pads] = 0
        ids[mask == 0] = 0
        return {"input_ids": ids, "attention_mask": mask, **_with(**arguments)(model, ids)}

    return mode


def _assisted(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    return {
        "input_ids": ids[:1],
        "assistant_model": model.assistant,
        **_with(max_new_tokens=DRAFTED)(model, ids),
    }


def _lookup(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    repeating = ids[:1, :4].repeat(1, 4)
    return {
        "input_ids": repeating,
        "prompt_lookup_num_tokens": 3,
        **_with(max_new_tokens=DRAFTED)(model, ids),
    }


EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}

MODES: dict[str, Mode] = {
    "greedy": _with(),
    "greedy-padded": _padded(),
    "sample": _with(do_sample=True, num_return_sequences=2, temperature=1.3),
    "sample-padded": _padded(do_sample=True, num_return_sequences=3, top_k=20, top_p=0.9),
    "beams": _with(
        num_beams=4,
        num_return_sequences=3,
        length_penalty=0.7,
        return_dict_in_generate=True,
        output_scores=True,
    ),
    "beams-early": _with(num_beams=3, early_stopping=True),
    "beams-padded": _padded(num_beams=4, return_dict_in_generate=True, output_scores=True),
    "beam-sample": _with(num_beams=3, do_sample=True, num_return_sequences=2),
    "assisted": _assisted,
    "prompt-lookup": _lookup,
    "chunks": _with(prefill_chunk_size=5),
    "chunks-padded-beams": _padded(prefill_chunk_size=4, num_beams=2),
    "everything": _with(**EVERYTHING),
    "everything-padded": _padded(**EVERYTHING),
    "everything-beams": _with(num_beams=2, num_return_sequences=2, **EVERYTHING),
    "penalties": _with(
        repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=6, bad_words_ids=[[7], [8, 9]]
    ),
    "guidance": _with(guidance_scale=1.8),
}


def supported(name: str, seq2seq: bool) -> bool:
    """True if stock itself can do this mode for the kind of model."""
    return not (seq2seq and name in ("chunks", "chunks-padded-beams", "guidance", "prompt-lookup"))
