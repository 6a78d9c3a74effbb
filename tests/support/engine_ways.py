"""Ways of requests whose prompts are more than token ids."""

from __future__ import annotations

from typing import Any

GREEDY = {"max_new_tokens": 9, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "processed": {**GREEDY, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "beams": {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "early": {
        "max_new_tokens": 9,
        "num_beams": 3,
        "early_stopping": "never",
        "eos_token_id": [2, 9, 30, 41, 60, 77],
        "do_sample": False,
    },
}
