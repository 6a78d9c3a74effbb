"""Whether every causal family gives the same bits in all company: python scripts/sweep_invariant.py [--dtype bfloat16] [--device cuda]
[--adapters]

Tiny random models of each family of transformers, with attention by sdpa where they have it. An engine with batch_invariant=True
samples requests together (in chunks, with shared prefixes, few blocks) and one by one; a training-style forward
in `hf_paged.batch_invariant()` computes the same sequences in one padded batch. "same": all log-probabilities
have the same bits. With --adapters each model has LoRA adapters of ranks 1, 12 and 64 on all its linear layers, in
float32 and in its own number type; requests have one of them, two or none, and each adapter a forward of its
own, in which peft computes. "refused": an operation or a model without a fixed order, by name. "CRASHED": any other error,
unless the engine refuses the model without the mode, too.
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
from invariance import ADAPTERS, adapted, adapters_numbers, engine_numbers, trainer_numbers
from tiny import build, mappings

from hf_paged import Engine, NotInvariant
from hf_paged.model.servable import Unservable


def result_of(model: Any, adapters: bool) -> str:
    """What became of one model, in a few words."""
    with contextlib.suppress(ValueError):  # those without it compute their attention themselves
        model.set_attn_implementation("sdpa")
    if adapters:
        try:
            model = adapted(model)
        except ValueError as error:
            return f"refused by peft: {error}"[:150]
    mixed = ADAPTERS if adapters else ()
    try:
        sequences, together, alone = engine_numbers(model, adapters=mixed)
    except Exception as error:
        return stopped_by(error, model)
    if together != alone:
        return "DIFFERENT in the engine"
    forward = model.get_base_model().forward if adapters else model.forward
    takes_positions = "position_ids" in inspect.signature(forward).parameters
    for side in ("left", "right") if takes_positions else ("right",):
        try:
            found = (
                adapters_numbers(model, sequences, mixed, side)
                if adapters
                else trainer_numbers(model, sequences, side)
            )
        except Exception as error:
            return stopped_by(error, model)
        if found != together:
            return f"DIFFERENT from a forward padded on the {side}"
    return "same"


def stopped_by(error: Exception, model: Any) -> str:
    """Whether an error is a refusal, and what it says."""
    by_name = isinstance(error, Unservable) and error.__cause__ is None
    if isinstance(error, NotInvariant) or isinstance(error.__cause__, NotInvariant):
        by_name = True
    if isinstance(error, Unservable) and not by_name:
        try:
            Engine(model).close()
        except Unservable:
            by_name = True
    return f"{'refused' if by_name else 'CRASHED'}: {type(error).__name__}: {error}"[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="the I-th of N parts"
    )
    parser.add_argument("--adapters", action="store_true", help="mix LoRA adapters and the base")
    parser.add_argument("--families", nargs="+", help="names of model types; all if left out")
    options = parser.parse_args()
    classes = list(mappings()["causal"])
    part, parts = options.share
    if not 0 <= part < parts:
        parser.error(f"--share {part} {parts}: the first part of N is 0 N, the last one N-1 N")
    unknown = set(options.families or ()) - {cls.model_type for cls in classes}
    if unknown:
        parser.error(
            f"--families {' '.join(sorted(unknown))}: transformers has no causal models of that type"
        )
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for cls in classes[part::parts]:
        kind = cls.model_type
        if options.families and kind not in options.families:
            continue
        try:
            model = build("causal", cls).to(options.device, getattr(torch, options.dtype))
        except Exception as error:
            result = f"not built: {type(error).__name__}"
        else:
            result = result_of(model, options.adapters)
        counts[result.split(":")[0]] += 1
        print(f"{kind:<28} {result}", flush=True)
    print(dict(counts))
    return any(result.startswith(("DIFFERENT", "CRASHED")) for result in counts)


if __name__ == "__main__":
    sys.exit(main())
