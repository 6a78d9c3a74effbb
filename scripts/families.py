"""Launches a layer of every family's captured step, as its code is written and fused.

    python scripts/families.py > docs/families.md
    python scripts/families.py llama gemma3_text    # rows of these families

A tiny random model in bfloat16 of each family decodes a token of two rows, its kernels interpreted: what is
launched there is launched on a GPU. No GPU is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sweep_models  # finds the packages of this tree, and runs a family in a process of its own
import torch
import transformers as tf
from launches import KINDS, launches_of
from sweep_models import TITLES
from tiny import build, mappings

LEGEND = """Launches of a decoding step inside its layers, divided by their number, as the family's code is written and as a captured
step has them. Views launch nothing. Where `other` is 0, nothing is left that is not a product, attention or one fused
kernel. Steps of several rows have one launch more in a layer that attends to the whole past: it reads
[blocks that rows have in common](engine_reference.md#common-blocks-are-read-once), and is not counted here.

| | |
|---|---|
| written | all launches without fusion |
| product | matrix products, of experts too |
| attention | writing keys, values and states, and reading them |
| fused | kernels for several operations of the code |
| other | operations of torch |
"""


def run_family(kind: str, config_class: Any, modes: list[str]) -> dict[str, Any]:
    """The launches of a family: how many of each kind, and the names of what is left."""
    try:
        model = build(kind, config_class).bfloat16()
        _, arguments = next(sweep_models.modes(kind, model))
        arguments = {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in arguments.items()
        }
        written = launches_of(model, arguments, fused=False)
        fused = launches_of(model, arguments)
    except Exception as error:
        return {"unbuilt": f"{type(error).__name__}: {error}"}
    left = {name: count for name, count in fused.counts.items() if " " not in name}
    return {"written": sum(written.kinds().values()), **fused.kinds(), "left": left, "layers": len(fused.met)}


def cells(family: str, found: dict[str, Any]) -> str:
    """A family's row."""
    numbers = [f"{found[name]:.1f}".removesuffix(".0") for name in ("written", *KINDS)]
    left = ", ".join(
        name if count == found["layers"] else f"{name} {count / found['layers']:.1f}".removesuffix(".0")
        for name, count in sorted(found["left"].items(), key=lambda item: -item[1])
    )
    return f"| {' | '.join([family, *numbers, left])} |"


def main() -> None:
    """Go through the families and print the page."""
    options = sweep_models.parser_by_family(__doc__).parse_args()
    tf.logging.set_verbosity_error()
    sweep_models.run_family = run_family  # in a fork of its own, as there
    print(
        "# Launches by family\n\nMade by `scripts/families.py`: "
        f"transformers {tf.__version__}, torch {torch.__version__}.\n\n{LEGEND}"
    )
    for kind in options.kinds:
        rows, why = [], []
        for config_class in dict.fromkeys(mappings()[kind]):
            family = config_class.model_type
            if options.families and family not in options.families:
                continue
            child = sweep_models.in_child(kind, config_class, options)
            found = sweep_models.finish(*child, kind, family, options.seconds)
            if "written" in found:
                rows.append(cells(family, found))
            else:
                text = " ".join(found.get("unbuilt", "its process has failed").split())
                why.append(f"- {family}: {text.replace('NotCapturable: ', '')[:160]}")
            print((rows if "written" in found else why)[-1], file=sys.stderr, flush=True)
        if rows or why:
            print(f"## {TITLES[kind]}\n\n| family | written | {' | '.join(KINDS)} | left, a layer |")
            print("\n".join(["|---" * 7 + "|", *sorted(rows), ""]))
        if why:
            print("\n".join(["Not captured:", "", *sorted(why), ""]))


if __name__ == "__main__":
    main()
