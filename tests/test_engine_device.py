"""The engine on the device there is, in float32 and bfloat16: its logprobs are those of one forward over what it said.

Tokens may differ from generate()'s where rounding cannot tell two of them apart; what the model thought of the tokens may not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME, build
from test_engine_exact import PROMPTS

from hf_paged.engine import Engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOISE = {torch.float32: 5e-4, torch.bfloat16: 2**-4}
OPTIONS = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 17, "max_batch_sequences": 8}
WAYS: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "num_return_sequences": 2, "seed": 1}, {"num_beams": 3}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["auto", "torch"] if DEVICE == "cuda" else ["auto"])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "mistral-window", "gpt2", "bloom"])
def test_logprobs_are_those_of_one_forward(name: str, kernels: str, dtype: torch.dtype) -> None:
    """C23, C35: chunks, decoding, forks and recomputation, through the kernels where there are any."""
    model = build(BY_NAME[name]).to(DEVICE, dtype)
    with Engine(model, kernels=kernels, **OPTIONS) as engine:
        handles = [engine.submit(prompt, max_new_tokens=8, logprobs=1, **way) for way in WAYS for prompt in PROMPTS[:4]]
        for _ in range(6):
            engine.step()
        engine.pause()
        engine.resume()
        outputs = [handle.result() for handle in handles]
        engine.check()
    for output in outputs:
        assert output.error is None
        for sequence in output.sequences:
            whole = torch.tensor([output.prompt_token_ids + sequence.token_ids], device=DEVICE)
            with torch.no_grad():
                logits = model(whole).logits[0, -len(sequence.token_ids) - 1 : -1].float()
            bound = NOISE[dtype] * max(1.0, float(logits.abs().max()))
            right = logits.log_softmax(-1)
            found = torch.tensor([note.logprob for note in sequence.logprobs], device=DEVICE)
            chosen = right.gather(1, torch.tensor(sequence.token_ids, device=DEVICE)[:, None])[:, 0]
            assert float((found - chosen).abs().max()) <= bound
            best = torch.tensor([note.favourites[0][1] for note in sequence.logprobs], device=DEVICE)
            assert float((best - right.amax(-1)).abs().max()) <= bound
