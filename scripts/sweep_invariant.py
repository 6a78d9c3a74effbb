"""Whether every causal family gives the same bits in all company: python scripts/sweep_invariant.py [--dtype bfloat16] [--device cuda]

Tiny random models of each family of transformers, with attention by sdpa where they have it. An engine with batch_invariant=True
samples requests together (in chunks, with shared prefixes, few blocks) and one by one; a training-style forward
in `hf_paged.batch_invariant()` computes the same sequences in one padded batch. "same": all log-probabilities
have the same bits. "refused": an operation or a model without a fixed order, by name.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from invariance import engine_numbers, trainer_numbers
from tiny import build, mappings


def result_of(model: Any) -> str:
    """What became of one model, in a few words."""
    with contextlib.suppress(ValueError):  # those without it compute their attention themselves
        model.set_attn_implementation("sdpa")
    try:
        sequences, together, alone = engine_numbers(model)
    except Exception as error:
        cause = error.__cause__ or error
        return f"refused: {type(cause).__name__}: {cause}"[:150]
    if together != alone:
        return "DIFFERENT in the engine"
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for side in ("left", "right") if takes_positions else ("right",):
        try:
            found = trainer_numbers(model, sequences, side)
        except Exception as error:
            return f"refused: trainer: {type(error).__name__}: {error}"[:150]
        if found != together:
            return f"DIFFERENT from a forward padded on the {side}"
    return "same"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="the I-th of N parts"
    )
    parser.add_argument("--families", nargs="+", help="names of model types; all if left out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    part, parts = options.share
    for cls in list(mappings()["causal"])[part::parts]:
        kind = cls.model_type
        if options.families and kind not in options.families:
            continue
        try:
            model = build("causal", cls).to(options.device, getattr(torch, options.dtype))
        except Exception as error:
            result = f"not built: {type(error).__name__}"
        else:
            result = result_of(model)
        counts[result.split(":")[0]] += 1
        print(f"{kind:<28} {result}", flush=True)
    print(dict(counts))
    return any(result.startswith("DIFFERENT") for result in counts)


if __name__ == "__main__":
    sys.exit(main())
