"""The ways of calling generate() that benchmarks/generate.py times: those of tests/modes.py, at the size of a
benchmark.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class Script(LogitsProcessor):
    """Makes the model say given tokens, so that stock and paged accept and reject the same candidates."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.tokens[input_ids.shape[1]]] = torch.finfo(scores.dtype).max
        return scores


def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Left padding of another length in every row; the first row has some too."""
    rows, tokens = ids.shape
    pads = (torch.arange(rows, device=ids.device) * 7 + 11) % (tokens // 2)
    mask = (torch.arange(tokens, device=ids.device) >= pads[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def lookup(ids: torch.Tensor, new: int) -> dict[str, Any]:
    """A repeating prompt that goes on repeating itself, with every fifth token another: some candidates are
    right.
    """
    prompt = ids[:1, :8].repeat(1, ids.shape[1] // 8)
    words = ids[0, :8].tolist()
    tokens = [words[i % 8] if i % 5 else 3 for i in range(prompt.shape[1] + new + 1)]
    return {
        "input_ids": prompt,
        "prompt_lookup_num_tokens": 3,
        "logits_processor": LogitsProcessorList([Script(tokens)]),
    }


def modes_of(ids: torch.Tensor, new: int, assistant: torch.nn.Module | None) -> dict[str, dict[str, Any]]:
    """The modes of tests/modes.py; those of one row only with an assistant."""
    everything = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    scored = {"return_dict_in_generate": True, "output_scores": True}
    pads = padded(ids)
    alone = {"assisted": {"assistant_model": assistant}, "prompt-lookup": lookup(ids, new)}
    return {
        "greedy": {},
        "greedy-padded": pads,
        "sample": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.3},
        "sample-padded": {**pads, "do_sample": True, "num_return_sequences": 3, "top_k": 20, "top_p": 0.9},
        "beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7, **scored},
        "beams-early": {"num_beams": 3, "early_stopping": True},
        "beams-padded": {**pads, "num_beams": 4, **scored},
        "beam-sample": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
        **(alone if assistant is not None else {}),
        "chunks": {"prefill_chunk_size": 48},
        "chunks-padded-beams": {**pads, "prefill_chunk_size": 48, "num_beams": 2},
        "everything": everything,
        "everything-padded": {**pads, **everything},
        "everything-beams": {"num_beams": 2, "num_return_sequences": 2, **everything},
        "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [8, 9]]},
        "guidance": {"guidance_scale": 1.8},
    }
