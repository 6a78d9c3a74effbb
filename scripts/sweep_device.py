"""Compare stock generate() with pages on a device, over 30 families, in float32 and bfloat16: the same tokens
up to ties.

    python scripts/sweep_device.py [--device cuda] [--dtypes float32 bfloat16] [--only llama ...] [--jobs 12]
    [--save FILE.json]

Decoding steps are captured (on a CPU a tape stands for the graphs). Tokens may part only where the two best
logits are closer than rounding explains: hf_paged/checking/ties.py says how close that is. Every family runs
in a process of its own. A table at the end; exit code 1 if an answer differs, if a family fails or takes too
long, or if nothing at all was captured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers as tf
from compare import assert_clean
from expected import path_of
from pictures import pad_left, with_pictures, with_recordings
from router_ties import first_ties, judge_beams, router_margins, routers
from sweep_models import caches_used
from tape import record
from tiny import PROMPT_IDS, build, config_class

from hf_paged.checking.ties import NOISE, Verdict, judge, rounding
from hf_paged.model.capture import replay as captures
from hf_paged.model.rehearsal import RECORDERS

FAMILIES = {
    "causal": [
        # Plain attention; windows, softcaps, shared keys and values; sinks and experts; latents; ALiBi;
        # recurrent layers beside attention.
        "llama", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox", "opt", "cohere2", "olmo2", "starcoder2", "stablelm",
        "mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3",
        "bloom", "mpt", "qwen3_next", "bamba", "lfm2",
    ],
    "seq2seq": ["t5", "bart", "marian"],
    "image": ["llava", "qwen2_vl", "gemma3"],
    "audio": ["whisper"],
}  # fmt: skip
NEW = 14
ROWS = 4
LENGTH = 13
PADS = (3, 0, 7, 1)
CALLS = ("greedy", "padded", "beams", "padded beams")
FEWEST = 4
"""Steps to go from which on a call captures: no call here is long."""
MOST = 0.25
"""A model whose own rounding moves its logits by more of their size says nothing about a cache."""
PAGED = {"cache_implementation": "paged", "cache_config": {"block_size": 4}}
GREEDY = {
    "do_sample": False,
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "return_dict_in_generate": True,
    "output_logits": True,
}
Inputs = dict[str, torch.Tensor]
Row = dict[str, Any]


# ---- what is asked


def inputs(kind: str, model: Any, noise: float) -> dict[str, Inputs]:
    """Prompts of one length, and padded ones, for a model that is still on the CPU in float32."""
    if kind in ("image", "audio"):
        media = {"image": with_pictures, "audio": with_recordings}[kind](model)
        if media is None:
            raise RuntimeError("nobody knows how to show it anything")
        return {"whole": media, "padded": pad_left(media)} if "input_ids" in media else {"whole": media}
    seq2seq = model.config.is_encoder_decoder
    whole = steady_prompts(model, noise) if routers(model) else _ids(ROWS)
    padded, mask = torch.zeros_like(whole), torch.zeros_like(whole)
    for row, pads in enumerate(PADS):
        places = slice(0, LENGTH - pads) if seq2seq else slice(pads, LENGTH)
        padded[row, places], mask[row, places] = whole[row, : LENGTH - pads], 1
    return {
        "whole": {"input_ids": whole, "attention_mask": torch.ones_like(whole)},
        "padded": {"input_ids": padded, "attention_mask": mask},
    }


def _ids(rows: int) -> torch.Tensor:
    return torch.randint(
        PROMPT_IDS.start, PROMPT_IDS.stop, (rows, LENGTH), generator=torch.Generator().manual_seed(2)
    )


def steady_prompts(model: Any, noise: float) -> torch.Tensor:
    """Prompts whose experts no rounding can exchange; otherwise there would be nothing to compare from the
    first step on.
    """
    ids = _ids(64 * ROWS)
    with router_margins(model) as margins, torch.no_grad():
        model(ids)
    least = torch.stack([margin.view(len(ids), -1).min(1).values for margin in margins]).min(0).values
    best = least.topk(ROWS)
    if best.values[-1] < noise:
        raise RuntimeError(f"no {ROWS} of {len(ids)} prompts have experts that lead by {noise}")
    return ids[best.indices]


def moved(given: Inputs, device: str, dtype: torch.dtype) -> Inputs:
    """The prompts on the device, and pictures in the model's number format."""
    return {name: x.to(device, dtype) if x.is_floating_point() else x.to(device) for name, x in given.items()}


# ---- a family


def run_family(kind: str, name: str, device: str, dtypes: list[torch.dtype]) -> Iterator[Row]:
    """A row for each number format."""
    captures.LEAST_STEPS = FEWEST
    if device == "cpu":
        RECORDERS["cpu"] = record
    for dtype in dtypes:
        begin = time.monotonic()
        row: Row = {
            "kind": kind,
            "family": name,
            "dtype": str(dtype)[6:],
            "marks": {},
            "apart": 0.0,
            "steps": 0,
            "path": "",
            "notes": [],
        }
        model = build(kind, config_class(kind, name))
        asked = inputs(kind, model, NOISE[dtype])
        model = model.to(device, dtype)
        setting = model.config._attn_implementation
        for call in CALLS:
            given = asked.get("padded" if "padded" in call else "whole")
            if given is not None:
                _note(row, call, model, moved(given, device, dtype))
                assert_clean(model, setting)
        pool = captures.captures_of(model).pool
        counts, reasons = pool.counts, pool.reasons
        row["captured"] = (
            f"{counts['replayed']} steps"
            if counts["replayed"]
            else "no: " + next(iter(reasons.values()), "never tried")
        )
        yield {**row, "seconds": time.monotonic() - begin}


def _note(row: Row, call: str, model: Any, given: Inputs) -> None:
    """One call, its mark and what stands against it."""
    beams = "beams" in call
    if beams and routers(model) and model.dtype != torch.float32:
        row["marks"][call] = (
            "."  # beams of other experts are other beams, and which ones they will be nobody knows beforehand
        )
        return
    verdict = _compare_beams(model, given) if beams else _compare(row, model, given)
    row["marks"][call] = verdict.mark
    row["apart"], row["steps"] = max(row["apart"], verdict.apart), row["steps"] + verdict.compared
    if verdict.why:
        row["notes"].append(f"{call}: {verdict.why}")


def _compare(row: Row, model: Any, given: Inputs) -> Verdict:
    arguments = {**given, **GREEDY}
    noise = NOISE[model.dtype]
    with router_margins(model) as margins:
        stock = model.generate(**arguments)
    comparable = (
        first_ties(margins, noise, given["attention_mask"], len(routers(model)), NEW) if margins else None
    )
    with caches_used() as used:
        paged = model.generate(**arguments, **PAGED)
    row["path"] = row["path"] or path_of(used)
    prompt = stock.sequences.shape[1] - len(stock.logits)
    verdict = judge(stock, paged, prompt, noise, comparable)
    if verdict.mark != "X":
        return verdict
    own = rounding(model, arguments, stock, prompt)
    if not noise < 3 * own <= MOST:
        return verdict._replace(why=f"{verdict.why}; stock's own rounding moves them by {own:.1e}")
    wider = judge(stock, paged, prompt, 3 * own, comparable)
    return wider._replace(
        why=wider.why or f"stock's own rounding moves logits by {own:.1e}, and three times that was allowed"
    )


def _compare_beams(model: Any, given: Inputs) -> Verdict:
    arguments = {**given, **GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    return judge_beams(model.generate(**arguments), model.generate(**arguments, **PAGED), NOISE[model.dtype])


def child(options: argparse.Namespace) -> int:
    """Run the family that the parent asked for, and print its rows as lines of JSON."""
    (kind,) = options.kinds
    tf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    out, sys.stdout = sys.stdout, sys.stderr
    for row in run_family(
        kind, options.only[0], options.device, [getattr(torch, name) for name in options.dtypes]
    ):
        print(json.dumps(row), file=out, flush=True)
    return 0


# ---- all of them


def run_child(kind: str, name: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a family from a process of its own, which may crash, hang, and leave the device as it
    likes.
    """
    command = [
        sys.executable,
        __file__,
        "--child",
        "--kinds",
        kind,
        "--only",
        name,
        "--device",
        options.device,
        "--dtypes",
        *options.dtypes,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
        text, error = (
            done.stdout,
            "" if done.returncode == 0 else f"exit code {done.returncode}: {_last_lines(done.stderr)}",
        )
    except subprocess.TimeoutExpired as expired:
        text = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        error = f"more than {options.seconds} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for dtype in options.dtypes[len(rows) :]:
        rows.append(
            {"kind": kind, "family": name, "dtype": dtype, "marks": {}, "notes": [error], "failed": True}
        )
    for row in rows:
        print(line(row), flush=True)
    return rows


def _last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])[-600:]


def line(row: Row) -> str:
    """A row of the table."""
    begin = f"| {row['family']} | {row['dtype']} "
    if row.get("failed"):
        return begin + f"| FAILED: {row['notes'][0]} |"
    marks = " ".join(row["marks"].get(call, "-") for call in CALLS)
    notes = "; ".join(row["notes"]).replace("|", "/")
    return (
        begin
        + f"| {marks} | {row['apart']:.1e} | {row['steps']} | {row['path'] or 'stock'} | {row['captured']} | {row['seconds']:.0f} "
        f"| {notes} |"
    )


def summary(rows: list[Row]) -> int:
    """Print the table and what it adds up to; the answer is the exit code."""
    print(
        f"\n| family | dtype | {', '.join(CALLS)} | apart | steps | path | replayed | s | notes |\n"
        + "|---" * 9
        + "|"
    )
    for row in rows:
        print(line(row))
    marks = [mark for row in rows for mark in row["marks"].values()]
    failed = sorted({row["family"] for row in rows if row.get("failed")})
    wrong = sorted({row["family"] for row in rows if "X" in row["marks"].values()})
    captured = sum(str(row.get("captured", "no")).endswith("steps") for row in rows)
    print(
        f"\n{len({row['family'] for row in rows})} families, {marks.count('=')} answers the same, "
        f"{marks.count('~')} part at ties"
    )
    print(
        f"captured: {captured} of {len(rows)} rows; different: {', '.join(wrong) or 'none'}; failed: "
        f"{', '.join(failed) or 'none'}"
    )
    return 1 if wrong or failed or not captured else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--only", nargs="*", default=[], help="model types; all of the list by default")
    parser.add_argument("--kinds", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="families at a time"
    )
    parser.add_argument("--seconds", type=int, default=240, help="limit for one family")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Go through the families and add them up."""
    options = parse()
    if options.child:
        return child(options)
    begin = time.monotonic()
    todo = [
        (kind, name)
        for kind in options.kinds
        for name in FAMILIES[kind]
        if not options.only or name in options.only
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for found in pool.map(lambda one: run_child(*one, options), todo) for row in found]
    run = {
        "transformers": tf.__version__,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    if options.device.startswith("cuda"):
        run["hardware"] = torch.cuda.get_device_name(options.device)
    if options.save:
        options.save.write_text(json.dumps(run, indent=1))
    code = summary(rows)
    print(
        ", ".join(f"{name} {value}" for name, value in run.items() if name != "rows")
        + f", {time.monotonic() - begin:.0f} s"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
