"""Shared by the tests: HONOURED_HERE, REFUSED_HERE."""

from __future__ import annotations

from typing import Any

import torch
from families import VOCABULARY
from transformers import (
    CompileConfig,
    LogitsProcessor,
    StoppingCriteria,
    WatermarkingConfig,
)

ENDS = [2, 9, 30, 41, 60, 77]


class Even(LogitsProcessor):
    """Lets only even tokens through, and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, 1::2] = -torch.inf
        return scores


class AtSeven(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


HONOURED_HERE: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 35},
    "max_new_tokens": {"max_new_tokens": 3},
    "default-length": {"max_new_tokens": None},
    "min_length": {"min_length": 35, "eos_token_id": ENDS},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": ENDS},
    "eos_token_id": {"eos_token_id": ENDS},
    "no-eos": {"eos_token_id": None},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(3, 50)] + [[60, 61]]},
    "renormalize_logits": {"renormalize_logits": True},
    "forced_bos_token_id": {"forced_bos_token_id": 11},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": ENDS},
    "suppress_tokens": {"suppress_tokens": list(range(3, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "sequence_bias": {"sequence_bias": [[[12], 9.0], [[12, 13], 9.0]]},
    "guidance_scale": {"guidance_scale": 1.8},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "logits_processor": {"logits_processor": [Even()]},
    "stopping_criteria": {"stopping_criteria": [AtSeven()]},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] * 7 + k) % VOCABULARY for k in range(9)]
    },
    "cache_implementation": {"cache_implementation": "paged"},
    "return_dict_in_generate": {"return_dict_in_generate": True},
}


REFUSED_HERE = {
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"block_size": 4},
    "max_cache_len": 100,
    "prefill_chunk_size": 4,
    "compile_config": CompileConfig(),
    "continuous_batching_config": {},
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "token_healing": True,
    "is_assistant": True,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "speculation_type": "dflash",
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["x"],
    "force_words_ids": [[3]],
    "low_memory": True,
}
