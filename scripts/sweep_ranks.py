#!/usr/bin/env python3
"""Compare a tiny random model of every architecture that has a tensor-parallel plan, divided over processes, with the
same model in one process: transformers' generate(), paged generate(), the engine, and the engine behind
load_weights() of the same weights.

    python scripts/sweep_ranks.py                          # every family on 2 ranks, CPU, some 10 minutes
    python scripts/sweep_ranks.py --ranks 3 --only llama
    python scripts/sweep_ranks.py --experts                # the experts divided by ep_size, where there is a plan
    python scripts/sweep_ranks.py --kind image             # prompts with pictures; or audio: with recordings

Each family runs in processes of its own. Exit code 1 if paged generate() or the engine answers otherwise than one
process does. Where transformers alone fails or answers otherwise, the row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers as tf
from pictures import with_pictures, with_recordings
from tiny import build, mappings, model_class_of

import hf_paged
from hf_paged.engine import Engine

NEW = 8
WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sample": {"do_sample": True, "num_return_sequences": 2},
}
SAME = "same"


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, one of them padded, and their mask."""
    chance = torch.Generator().manual_seed(4)
    ids = torch.randint(5, 60, (2, 9), generator=chance)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def shown(model: Any, kind: str) -> dict[str, Any]:
    """A prompt with a picture or a recording."""
    found = (with_pictures if kind == "image" else with_recordings)(model, rows=1)
    if found is None:
        raise ValueError(f"no way of showing it {kind} is known")
    return found


def generated(model: Any, way: dict[str, Any], given: dict[str, Any], **word: Any) -> list[list[int]]:
    """The answer to both prompts, or to the one that is given."""
    ids, mask = prompts()
    inputs = given or {"input_ids": ids, "attention_mask": mask}
    torch.manual_seed(3)
    answer = model.generate(**inputs, max_new_tokens=NEW, pad_token_id=0, **way, **word)
    tokens: list[list[int]] = answer.tolist()
    return tokens


def alone(model: Any, given: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens behind each prompt without its padding."""
    found = []
    if given:
        answer = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        return [answer[0, given["input_ids"].shape[1] :].tolist()]
    for row, mask in zip(*prompts(), strict=True):
        own = row[mask.bool()]
        answer = model.generate(own[None], max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(answer[0, len(own) :].tolist())
    return found


def engine_answers(
    model: Any, rank: int, given: dict[str, Any], weights: dict[str, torch.Tensor] | None = None
) -> list[list[int]] | None:
    """The same from an engine on all ranks; None of those that follow. weights: those that it loads first."""
    with Engine(model, block_size=4, num_blocks=64, max_batch_tokens=16, rank_timeout=30.0) as engine:
        if weights is not None:
            if rank:
                engine.follow()
            else:
                engine.pause()
            with torch.no_grad():
                for parameter in model.parameters():
                    getattr(parameter, "_local_tensor", parameter).fill_(7)
            engine.load_weights(weights)
            if not rank:
                engine.resume()
        if rank:
            engine.follow()
            return None
        greedy: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        if given:
            outputs = [engine.submit(**given, **greedy).result()]
        else:
            own = [row[mask.bool()].tolist() for row, mask in zip(*prompts(), strict=True)]
            outputs = engine.generate(own, **greedy)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.sequences[0].token_ids for output in outputs]


def attempt(act: Callable[[], Any], expected: Any) -> str:
    """What became of it, in a few words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:160]
    fallback = [str(each.message) for each in caught if each.category is hf_paged.FallbackWarning]
    if found is not None and found != expected:
        return "DIFFERENT"
    return f"stock's cache: {fallback[0][:120]}" if fallback else SAME


def on_rank(folder: Path, rank: int, options: argparse.Namespace) -> None:
    """One rank's part: each result goes to its file at once."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    timeout = timedelta(seconds=40)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=options.ranks, timeout=timeout
    )
    expected = json.loads((folder / "expected.json").read_text())
    found: dict[str, str] = {}

    def note(name: str, result: str) -> None:
        found[name] = result
        (folder / f"found-{rank}.json").write_text(json.dumps(found))

    plan: dict[str, Any] = {"tp_plan": "auto"}
    if options.experts:
        from transformers.distributed import DistributedConfig

        plan = {"distributed_config": DistributedConfig(tp_plan="auto", ep_size=options.ranks)}
    try:
        given = torch.load(folder / "given.pt", weights_only=False)
        model = options.model_class.from_pretrained(folder / "model", **plan).eval()
    except Exception as error:
        note("load", f"{type(error).__name__}: {error}"[:160])
        note("end", SAME)
        return
    for name, way in WAYS.items():
        note(f"transformers {name}", attempt(lambda way=way: generated(model, way, given), expected[name]))
    for name, way in WAYS.items():
        paged = {"cache_implementation": "paged"}
        note(
            f"paged {name}",
            attempt(lambda way=way, paged=paged: generated(model, way, given, **paged), expected[name]),
        )
    note("engine", attempt(lambda: engine_answers(model, rank, given), expected["alone"]))
    if found["engine"] == SAME:
        whole = options.model_class.from_pretrained(folder / "model")
        weights = {name: parameter.detach() for name, parameter in whole.named_parameters()}
        note("new weights", attempt(lambda: engine_answers(model, rank, given, weights), expected["alone"]))
    note("end", SAME)


def fork(act: Callable[[], None], log: Path) -> int:
    """A process that does it, and ends."""
    child = os.fork()
    if child:
        return child
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        act()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def wait(children: list[int], seconds: float) -> bool:
    """Whether all of them ended in time; those that did not are ended."""
    left = set(children)
    end = time.monotonic() + seconds
    while left and time.monotonic() < end:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def prepare(folder: Path, config_class: Any, kind: str) -> None:
    """The model, and what one process answers."""
    model = build(kind, config_class).float().eval()
    model.save_pretrained(folder / "model")
    whole, report = type(model).from_pretrained(folder / "model", output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(
            f"transformers does not load what it has saved: {sorted(report['missing_keys'])[:3]}"
        )
    whole.eval()
    given = {} if kind == "causal" else shown(whole, kind)
    torch.save(given, folder / "given.pt")
    expected = {name: generated(whole, way, given) for name, way in WAYS.items()}
    (folder / "expected.json").write_text(json.dumps(expected | {"alone": alone(whole, given)}))


def last_line(log: Path) -> str:
    """The last words of a process."""
    lines = log.read_text().strip().splitlines() if log.exists() else []
    return lines[-1][:160] if lines else ""


def has_plan(model_class: Any, config_class: Any, experts: bool) -> bool:
    """Whether transformers can divide it."""
    kind = "ep" if experts else "tp"
    text = model_class.config_class is config_class  # else it is of a part of the config
    configs = [config_class, *(config_class.sub_configs.values() if text else ())]
    plans = [getattr(each, f"base_model_{kind}_plan", None) for each in configs]
    return any(plans) or bool(getattr(model_class, f"_{kind}_plan", None))


def run_family(config_class: Any, options: argparse.Namespace) -> dict[str, str]:
    """What each rank's worst result was, way by way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = wait(
            [fork(lambda: prepare(folder, config_class, options.kind), folder / "log")], options.seconds
        )
        if not done or not (folder / "expected.json").exists():
            return {"one process": last_line(folder / "log") or "too slow"}
        ranks = [
            fork(lambda rank=rank: on_rank(folder, rank, options), folder / f"log-{rank}")
            for rank in range(options.ranks)
        ]
        done = wait(ranks, options.seconds)
        row: dict[str, str] = {}
        for rank in range(options.ranks):
            file = folder / f"found-{rank}.json"
            found = json.loads(file.read_text()) if file.exists() else {}
            for way, result in ({"end": f"CRASHED: {last_line(folder / f'log-{rank}')}"} | found).items():
                if way not in row or row[way] == SAME:
                    row[way] = result
        if not done:
            row["end"] = "HANGS"
        return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--kind", choices=["causal", "image", "audio"], default="causal")
    parser.add_argument("--seconds", type=float, default=120, help="that a family may take")
    parser.add_argument("--save", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    bad = 0
    rows: dict[str, dict[str, str]] = {}
    counts: Counter[str] = Counter()
    for config_class in mappings()[options.kind]:
        kind = config_class.model_type
        options.model_class = model_class = model_class_of(options.kind, config_class)
        if options.only and kind not in options.only:
            continue
        if not has_plan(model_class, config_class, options.experts):
            continue
        row = rows[kind] = run_family(config_class, options)
        ours = [result for way, result in row.items() if not way.startswith(("transformers", "end"))]
        theirs = [result for way, result in row.items() if way.startswith("transformers")]
        wrong = any("DIFFERENT" in each for each in ours) or row.get("end", SAME) != SAME
        bad += wrong
        if ours and not wrong and all(each == SAME for each in ours):
            counts["right"] += 1
            words = "right" + ("" if all(each == SAME for each in theirs) else f", transformers: {theirs}")
        else:
            counts["wrong" if wrong else "refused, or not for transformers"] += 1
            words = str({way: result for way, result in row.items() if result != SAME})
        print(f"{kind:<28} {words}{'   <-- wrong' if wrong else ''}", flush=True)
    print(dict(counts))
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
