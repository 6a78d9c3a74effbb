"""compile=True beside fuse_projections and neither, in families of other code: eight layers of 8B width, bfloat16, on a GPU.

    PYTHONPATH=.:kernels python benchmarks/compiled.py [FAMILY ...]

Milliseconds of a step, the median of 60: with 1 row and with 64 each without either, with fuse_projections, with compile.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from typing import Any

import torch
import transformers
from host import DRIVERS
from shapes import line, where

from hf_paged import Engine

WIDE = {
    "num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 8}
HEADS = {**GROUPED, "head_dim": 128}
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma2": ("Gemma2Config", HEADS),
    "gemma3": ("Gemma3TextConfig", HEADS),
    "phi3": ("Phi3Config", GROUPED),
    "olmo2": ("Olmo2Config", GROUPED),
    "glm4": ("Glm4Config", HEADS),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "starcoder2": ("Starcoder2Config", GROUPED),
}
CONTEXT, STEPS = 384, 60
OPTIONS: list[dict[str, Any]] = [{}, {"fuse_projections": True}, {"compile": True}]


def step_of(model: Any, rows: int, options: dict[str, Any]) -> float:
    """Milliseconds of a step in which so many rows decode."""
    chance = torch.Generator().manual_seed(0)
    with Engine(model, None, max_batch_sequences=max(rows, 8), **options) as engine:
        for _ in range(rows):
            ids = torch.randint(10, 30000, (CONTEXT,), generator=chance).tolist()
            engine.submit(ids, max_new_tokens=400, eos_token_id=31999, do_sample=False)
        step = DRIVERS["the engine"](engine)
        for _ in range(STEPS):  # prompts, captures
            step()
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(line(where("cuda")))
    for name in parser.parse_args().families:
        kind, shape = FAMILIES[name]
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, kind)(**WIDE, **shape), dtype=torch.bfloat16
            ).eval()
        cells = [f"{step_of(model, rows, options):7.3f}" for rows in (1, 64) for options in OPTIONS]
        print(f"{name:10} | " + " | ".join(cells), flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
