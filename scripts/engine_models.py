"""How the engine takes every generating architecture in transformers: in one flat row, row by row, or not at
all.

    python scripts/engine_models.py [--seconds 60] [--kinds causal seq2seq image audio] [family ...] >
    docs/engine_models.md
    python scripts/engine_models.py --into docs/engine_models.md family ...    # the rows of these families

One Markdown row per family, on a tiny random model: greedy and beams of several prompts at once against
generate() on each alone. Prompts for models with eyes or ears have a picture or a recording in them; "texts
only" is who is served without these. Whisper's own generate() is not tried, GenerationMixin's is. `=` the
same tokens, `~` rounding (the same in float64), `X` others. Exit code 1 if there is any X, or an engine that
fails.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sweep_models  # finds the packages of this tree, and runs a family in a process of its own
import torch
import transformers as tf
from pictures import with_pictures, with_recordings
from sweep_models import TITLES
from tiny import build, mappings

from hf_paged import Engine
from hf_paged.engine import Unservable
from hf_paged.model.slots import STATES

PROMPTS = [
    torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (3, 14, 9)
]
WAYS = {"greedy": {"do_sample": False}, "beams": {"num_beams": 3, "do_sample": False}}
OPTIONS = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 11, "max_batch_sequences": 8}
LEGEND = """A tiny random model of every architecture: greedy and beam search of several prompts at once, compared with `generate()` on
each alone.

| form | meaning |
|---|---|
| flat | all scheduled tokens of a step run in one row `[1, tokens]`; captured on a CUDA device |
| rows | one forward per sequence; the remark says why |
| flat, states; rows, states | the same of a model with recurrent states: each sequence is computed behind the state in its slot |
| texts only | text prompts are served, the model's images or audio are refused |
| refused | `Engine(model)` or `submit()` raises the remark |
| not tried, not built | this script has no inputs for the model, or cannot make a tiny one |

**greedy, beams**: `=` the same tokens, `~` the same up to rounding (the same in float64), `X` different, `-` stock fails.
"""
SHOW = {"image": with_pictures, "audio": with_recordings}
Request = dict[str, Any]


def run_family(kind: str, config_class: type, modes: list[str]) -> dict[str, Any]:
    """The form of a family, and whether its tokens are generate()'s."""
    try:
        model = build(kind, config_class)
    except Exception as error:
        return {"form": "not built", "remark": f"{type(error).__name__}: {error}"}
    if kind == "seq2seq" and not model.config.is_encoder_decoder:
        return {"form": "no encoder-decoder"}
    try:
        with Engine(model, **OPTIONS) as engine:
            form, why = engine.stats()["form"], engine.stats()["off"].get("flat", "")
            form += ", states" if STATES.name in engine.stats()["blocks"] else ""
    except Unservable as reason:
        return {"form": "refused", "remark": str(reason)}
    except Exception:
        return {"form": "fails", "remark": traceback.format_exc().strip().splitlines()[-1]}
    try:
        requests = _requests(kind, model)
    except Exception as error:
        return {"form": "not tried", "remark": f"{type(error).__name__}: {error}"}
    if requests is None:
        return {"form": "not tried", "remark": "no inputs for it are known"}
    refusal = _refusal(model, requests)
    if refusal and kind in SHOW:
        form, why, requests = "texts only", refusal, [{"prompt": prompt} for prompt in PROMPTS]
        refusal = _refusal(model, requests)
    if refusal:
        return {"form": "refused", "remark": refusal}
    if kind == "image" and model.config.is_encoder_decoder:
        form = "texts only"
    marks, remarks = "", [why] if why else []
    for name, way in WAYS.items():
        mark, remark = _compare(model, requests, way)
        marks += mark
        remarks += [f"{name}: {remark}"] if remark else []
    return {"form": form, "marks": marks, "remark": "; ".join(remarks)}


def _compare(model: Any, requests: list[Request], way: dict[str, Any]) -> tuple[str, str]:
    """The mark of one way, and what stands against it."""
    try:
        right = [_right(model, request, way) for request in requests]
    except Exception as error:
        return "-", f"stock cannot: {error}"
    found = _answers(model, requests, way)
    if found == right:
        return "=", ""
    if (
        "num_beams" in way
        and "input_ids" in requests[0]
        and "inputs_embeds" in inspect.signature(model.prepare_inputs_for_generation).parameters
        and found == [_from_embeddings(model, request, way) for request in requests]
    ):
        return "=", "those of generate() on its own embeddings; on the pictures it repeats them wrongly"
    model.double()
    wide = [{name: _double(value) for name, value in request.items()} for request in requests]
    right = [_right(model, request, way) for request in wide]
    same = _answers(model, wide, way) == right
    model.float()
    return ("~", "") if same else ("X", str(found)[:200])


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _requests(kind: str, model: Any) -> list[Request] | None:
    """What each of several requests is about; None if nobody knows how to show the model anything."""
    if kind in SHOW and not model.config.is_encoder_decoder:
        shown = SHOW[kind](model, rows=1)
        others = [(1.0, 0.0), (0.5, 0.1), (-1.0, 0.0)]
        return shown and [
            {name: value * a + b if value.is_floating_point() else value for name, value in shown.items()}
            for a, b in others
        ]
    if model.main_input_name != "input_features":
        return [{"prompt": prompt} for prompt in PROMPTS]
    shape = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    return [
        {"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.dtype)}
        for seed in range(3)
    ]


def _right(model: Any, request: Request, way: dict[str, Any]) -> list[int]:
    """The new tokens of generate() on one of them alone."""
    if "input_ids" in request:
        shown: list[int] = model.generate(**request, max_new_tokens=8, **way)[
            0, request["input_ids"].shape[1] :
        ].tolist()
        return shown
    inputs = torch.tensor([request["prompt"]]) if "prompt" in request else request["input_features"]
    begin = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    answer: list[int] = tf.GenerationMixin.generate(model, inputs, max_new_tokens=8, **way)[
        0, begin:
    ].tolist()
    return answer


def _from_embeddings(model: Any, request: Request, way: dict[str, Any]) -> list[int]:
    """The new tokens of generate() on the embeddings that it makes of a picture itself, where it has one
    row.
    """
    found: list[torch.Tensor] = []
    with model.get_decoder().register_forward_pre_hook(
        lambda _, __, given: found.append(given["inputs_embeds"]), with_kwargs=True
    ):
        model.generate(**request, max_new_tokens=1)
    return _right(model, {"input_ids": request["input_ids"], "inputs_embeds": found[0]}, way)


def _refusal(model: Any, requests: list[Request]) -> str:
    """The error of the first request that is refused; nothing if none is."""
    with Engine(model, **_room(model)) as engine:
        for request in requests:
            try:
                error = engine.submit(**request, max_new_tokens=1).result().error
            except ValueError as reason:
                error = reason
            if "use generate()" in str(error):
                return str(error)
    return ""


def _room(model: Any) -> dict[str, Any]:
    return {**OPTIONS, "num_blocks": 300} if model.main_input_name == "input_features" else OPTIONS


def _answers(model: Any, requests: list[Request], way: dict[str, Any]) -> list[Any]:
    with Engine(model, **_room(model)) as engine:
        handles = [engine.submit(**request, max_new_tokens=8, **way) for request in requests]
        outputs = [handle.result() for handle in handles]
        engine.check()
        return [str(output.error) if output.error else output.sequences[0].token_ids for output in outputs]


def row_of(kind: str, config_class: Any, options: argparse.Namespace) -> list[str]:
    """The cells of a family's row: its name, form, marks, and a remark."""
    family = config_class.model_type
    child = sweep_models.in_child(kind, config_class, options)
    found = sweep_models.finish(*child, kind, family, options.seconds)
    remark = " ".join((found.get("remark") or found.get("unbuilt") or "").split()).replace("|", "/")
    return [family, found.get("form", "fails"), found.get("marks") or "", remark[:200]]


def page_of(kinds: list[str], rows: dict[str, list[list[str]]]) -> str:
    """The tables of kinds, and what the forms add up to."""
    totals: Counter[str] = Counter()
    lines = []
    for kind in kinds:
        lines += [f"## {TITLES[kind]}", "", "| family | form | greedy, beams | remark |", "|---|---|---|---|"]
        for row in rows[kind]:
            lines.append(f"| {' | '.join(row)} |")
            totals[row[1]] += 1
            totals["X"] += "X" in row[2]
        lines.append("")
    lines.append(", ".join(f"{name}: {number}" for name, number in sorted(totals.items())))
    return "\n".join(lines)


def known_rows(text: str) -> dict[str, list[list[str]]]:
    """The rows of a page by kind."""
    found: dict[str, list[list[str]]] = {}
    for kind, title in TITLES.items():
        section = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
        lines = [line for line in section.splitlines()[3:] if line.startswith("| ")]
        found[kind] = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return found


def renewed(text: str, rows: dict[str, list[list[str]]]) -> str:
    """A page with these rows in the place of those of their families."""
    known = known_rows(text)
    for kind, own in rows.items():
        made = {row[0]: row for row in own}
        absent = made.keys() - {row[0] for row in known[kind]}
        if absent:
            raise ValueError(f"{', '.join(sorted(absent))}: no row of the page; make the page anew")
        known[kind] = [made.get(row[0], row) for row in known[kind]]
    head = text.split(f"## {TITLES['causal']}\n", 1)[0]
    return head + page_of(list(TITLES), known) + "\n"


def main() -> int:
    """Go through the families and print a row for each."""
    parser = sweep_models.parser_by_family(__doc__)
    parser.add_argument("--into", type=Path, help="put these rows into the page, in the place of older ones")
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    sweep_models.run_family = run_family  # in a fork of its own, as there
    rows: dict[str, list[list[str]]] = {kind: [] for kind in options.kinds}
    for kind in options.kinds:
        for config_class in dict.fromkeys(mappings()[kind]):
            if options.families and config_class.model_type not in options.families:
                continue
            row = row_of(kind, config_class, options)
            print("| " + " | ".join(row) + " |", file=sys.stderr, flush=True)
            if row[1] != "no encoder-decoder":
                rows[kind].append(row)
    if options.into:
        options.into.write_text(renewed(options.into.read_text(), rows))
    else:
        print(
            f"# Models in the engine\n\nMade by `scripts/engine_models.py`: transformers {tf.__version__}, torch "
            f"{torch.__version__}.\n\n{LEGEND}\n{page_of(options.kinds, rows)}"
        )
    every = [row for own in rows.values() for row in own]
    return 1 if any("X" in row[2] or row[1] == "fails" for row in every) else 0


if __name__ == "__main__":
    sys.exit(main())
