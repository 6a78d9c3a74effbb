"""How the engine takes every causal text architecture in transformers: in one flat row, row by row, or not at all.

    PYTHONPATH=. python scripts/engine_models.py [--seconds 60] [family ...] > docs/engine_models.md

One Markdown row per family, on a tiny random model: greedy and beams of several prompts at once against generate() on each alone.
`=` the same tokens, `~` rounding (the same in float64), `X` others. Exit code 1 if there is any X, or an engine that fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from hf_paged import Engine
from hf_paged.engine import Unservable

sys.path.insert(0, str(Path(__file__).parent))
import sweep_models  # a process of its own for each family
from tiny import build, mappings

PROMPTS = [torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (3, 14, 9)]
WAYS = {"greedy": {"do_sample": False}, "beams": {"num_beams": 3, "do_sample": False}}
OPTIONS = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 11, "max_batch_sequences": 8}


def run_family(kind: str, config_class: type, modes: list[str]) -> dict[str, Any]:
    """The form of a family, and whether its tokens are generate()'s."""
    try:
        model = build(kind, config_class)
    except Exception as error:
        return {"form": "not built", "remark": f"{type(error).__name__}: {error}"}
    try:
        with Engine(model, **OPTIONS) as engine:
            form, why = engine.stats()["form"], engine.why_rows or ""
    except Unservable as reason:
        return {"form": "refused", "remark": str(reason)}
    except Exception:
        return {"form": "fails", "remark": traceback.format_exc().strip().splitlines()[-1]}
    marks, remarks = "", [why] if why else []
    for name, way in WAYS.items():
        mark, remark = _compare(model, way)
        marks += mark
        remarks += [f"{name}: {remark}"] if remark else []
    return {"form": form, "marks": marks, "remark": "; ".join(remarks)}


def _compare(model: Any, way: dict[str, Any]) -> tuple[str, str]:
    """The mark of one way, and what stands against it."""
    try:
        right = [model.generate(torch.tensor([prompt]), max_new_tokens=8, **way)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    except Exception as error:
        return "-", f"stock cannot: {error}"
    found = _answers(model, way)
    if found == right:
        return "=", ""
    model.double()
    right = [model.generate(torch.tensor([prompt]), max_new_tokens=8, **way)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    same = _answers(model, way) == right
    model.float()
    return ("~", "") if same else ("X", str(found)[:200])


def _answers(model: Any, way: dict[str, Any]) -> list[Any]:
    with Engine(model, **OPTIONS) as engine:
        outputs = engine.generate(PROMPTS, max_new_tokens=8, progress=False, **way)
        engine.check()
        return [str(output.error) if output.error else output.sequences[0].token_ids for output in outputs]


def main() -> int:
    """Go through the families and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    parser.add_argument("--seconds", type=int, default=120, help="limit for one family")
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    options.modes = []
    sweep_models.run_family = run_family  # in a fork of its own, as there
    totals: Counter[str] = Counter()
    print(f"# Models in the engine\n\nMade by `scripts/engine_models.py`: transformers {tf.__version__}, torch {torch.__version__}.\n")
    print("| family | form | greedy, beams | remark |\n|---|---|---|---|")
    for config_class in dict.fromkeys(mappings()["causal"]):
        if options.families and config_class.model_type not in options.families:
            continue
        child = sweep_models.in_child("causal", config_class, options)
        found = sweep_models.finish(*child, "causal", config_class.model_type, options.seconds)
        form = found.get("form", "fails")
        remark = " ".join((found.get("remark") or found.get("unbuilt") or "").split()).replace("|", "/")[:200]
        print(f"| {config_class.model_type} | {form} | {found.get('marks', '')} | {remark} |", flush=True)
        totals[form] += 1
        totals["X"] += "X" in found.get("marks", "")
    print("\n" + ", ".join(f"{name}: {number}" for name, number in sorted(totals.items())))
    return 1 if totals["X"] or totals["fails"] else 0


if __name__ == "__main__":
    sys.exit(main())
