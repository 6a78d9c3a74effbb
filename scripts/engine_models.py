"""How the engine takes every causal and encoder-decoder architecture in transformers: in one flat row, row by row, or not at all.

    python scripts/engine_models.py [--seconds 60] [--kinds causal seq2seq audio] [family ...] > docs/engine_models.md

One Markdown row per family, on a tiny random model: greedy and beams of several prompts at once against generate() on each alone.
Whisper's own generate() is not tried, GenerationMixin's is.
`=` the same tokens, `~` rounding (the same in float64), `X` others. Exit code 1 if there is any X, or an engine that fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sweep_models  # finds the packages of this tree, and runs a family in a process of its own
import torch
import transformers as tf
from tiny import build, mappings

from hf_paged import Engine
from hf_paged.engine import Unservable

PROMPTS = [torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (3, 14, 9)]
WAYS = {"greedy": {"do_sample": False}, "beams": {"num_beams": 3, "do_sample": False}}
OPTIONS = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 11, "max_batch_sequences": 8}
TITLES = {"causal": "Decoders", "seq2seq": "Encoder-decoders", "audio": "Encoder-decoders for recordings"}


def run_family(kind: str, config_class: type, modes: list[str]) -> dict[str, Any]:
    """The form of a family, and whether its tokens are generate()'s."""
    try:
        model = build(kind, config_class)
    except Exception as error:
        return {"form": "not built", "remark": f"{type(error).__name__}: {error}"}
    if kind != "causal" and not model.config.is_encoder_decoder:
        return {"form": "no encoder-decoder"}
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
        right = [_right(model, request, way) for request in _requests(model)]
    except Exception as error:
        return "-", f"stock cannot: {error}"
    found = _answers(model, way)
    if found == right:
        return "=", ""
    model.double()
    right = [_right(model, request, way) for request in _requests(model)]
    same = _answers(model, way) == right
    model.float()
    return ("~", "") if same else ("X", str(found)[:200])


def _requests(model: Any) -> list[dict[str, Any]]:
    """What each of several requests is about."""
    if model.main_input_name != "input_features":
        return [{"prompt": prompt} for prompt in PROMPTS]
    shape = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    return [{"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.dtype)} for seed in range(3)]


def _right(model: Any, request: dict[str, Any], way: dict[str, Any]) -> list[int]:
    """The new tokens of generate() on one of them alone."""
    inputs = torch.tensor([request["prompt"]]) if "prompt" in request else request["input_features"]
    begin = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    answer: list[int] = tf.GenerationMixin.generate(model, inputs, max_new_tokens=8, **way)[0, begin:].tolist()
    return answer


def _answers(model: Any, way: dict[str, Any]) -> list[Any]:
    options = {**OPTIONS, "num_blocks": 300} if model.main_input_name == "input_features" else OPTIONS
    with Engine(model, **options) as engine:
        handles = [engine.submit(**request, max_new_tokens=8, **way) for request in _requests(model)]
        outputs = [handle.result() for handle in handles]
        engine.check()
        return [str(output.error) if output.error else output.sequences[0].token_ids for output in outputs]


def main() -> int:
    """Go through the families and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    parser.add_argument("--kinds", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--seconds", type=int, default=120, help="limit for one family")
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    options.modes = []
    sweep_models.run_family = run_family  # in a fork of its own, as there
    totals: Counter[str] = Counter()
    print(f"# Models in the engine\n\nMade by `scripts/engine_models.py`: transformers {tf.__version__}, torch {torch.__version__}.\n")
    for kind in options.kinds:
        print(f"## {TITLES[kind]}\n\n| family | form | greedy, beams | remark |\n|---|---|---|---|")
        for config_class in dict.fromkeys(mappings()[kind]):
            if options.families and config_class.model_type not in options.families:
                continue
            child = sweep_models.in_child(kind, config_class, options)
            found = sweep_models.finish(*child, kind, config_class.model_type, options.seconds)
            form = found.get("form", "fails")
            if form == "no encoder-decoder":
                continue
            remark = " ".join((found.get("remark") or found.get("unbuilt") or "").split()).replace("|", "/")[:200]
            print(f"| {config_class.model_type} | {form} | {found.get('marks', '')} | {remark} |", flush=True)
            totals[form] += 1
            totals["X"] += "X" in found.get("marks", "")
        print()
    print(", ".join(f"{name}: {number}" for name, number in sorted(totals.items())))
    return 1 if totals["X"] or totals["fails"] else 0


if __name__ == "__main__":
    sys.exit(main())
