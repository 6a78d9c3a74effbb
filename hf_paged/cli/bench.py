"""The command `hf-paged bench`: a model's speed on this machine, in the engine and in stock generate()."""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers import LogitsProcessorList

import hf_paged

from ..engine import Engine
from ..model.servable import longest
from ..serve.link.loading import Source
from .arguments import source_of

NO_END = 2**31 - 1
"""An end of sequence that no model has: answers have the lengths that are asked for."""


@dataclass(frozen=True)
class Load:
    """The load: so many prompts at once, of so many tokens, with answers of 50 to 150 % of `output`."""

    prompts: int
    input: int
    output: int
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "input", "output", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a count; give 1 or more")

    def requests(self, vocabulary: int) -> list[tuple[list[int], int]]:
        """Prompts of random tokens, and the lengths of their answers."""
        chance = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(vocabulary, (self.prompts, self.input), generator=chance, device="cpu").tolist()
        least = max(self.output // 2, 1)
        most = self.output + self.output // 2
        lengths = torch.randint(least, most + 1, (self.prompts,), generator=chance, device="cpu").tolist()
        return list(zip(ids, lengths, strict=True))


class Speed(NamedTuple):
    """The measured speed: tokens a second of all answers, and milliseconds as the clients see them."""

    who: str
    tokens_per_second: float
    first_token: dict[str, float]
    between_tokens: dict[str, float]
    alone_first: float
    alone_between: float

    @classmethod
    def of(cls, who: str, all_times: list[list[float]], alone: list[float]) -> Speed:
        """all_times: of each answer's tokens, in seconds from the begin of all. alone: of one by itself."""
        between = [b - a for times in all_times for a, b in pairwise(times)]
        rest = [b - a for a, b in pairwise(alone)]
        return cls(
            who,
            sum(map(len, all_times)) / max(times[-1] for times in all_times),
            quantiles([times[0] for times in all_times]),
            quantiles(between),
            1e3 * alone[0],
            1e3 * sum(rest) / max(len(rest), 1),
        )


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return {f"p{q}": 1e3 * ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 99)}


def stock_times(model: Any, requests: list[tuple[list[int], int]], batch: int) -> list[list[float]]:
    """Batch after batch, as a script with generate() does it; a batch takes as long as its longest answer."""
    found: list[list[float]] = []
    begin = time.perf_counter()
    times: list[float] = []

    def note_time(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note when a step of generate() has its scores."""
        if scores.is_cuda:
            torch.cuda.synchronize(scores.device)
        times.append(time.perf_counter() - begin)
        return scores

    for first in tqdm(range(0, len(requests), batch), desc="generate()", unit="batch", leave=False):
        some = requests[first : first + batch]
        ids = torch.tensor([prompt for prompt, _ in some], device=model.device)
        times.clear()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(length for _, length in some),
            do_sample=False,
            num_beams=1,
            eos_token_id=NO_END,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([note_time]),
        )
        found += [times[:length] for _, length in some]
    return found


def engine_times(engine: Engine, requests: list[tuple[list[int], int]]) -> list[list[float]]:
    """All at once."""
    begin = time.perf_counter()
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "eos_token_id": NO_END}
    handles = [engine.submit(ids, max_new_tokens=length, **options) for ids, length in requests]
    found: list[list[float]] = [[] for _ in handles]
    running = dict(enumerate(handles))
    with tqdm(total=len(handles), desc="Engine", unit="request", leave=False) as bar:
        while running:
            engine.step()
            now = time.perf_counter() - begin
            for i, handle in list(running.items()):
                done = handle.done
                found[i] += [now for each in handle.read() for _ in each.token_ids]
                if done:
                    if handle.result().error is not None:
                        raise ValueError(str(handle.result().error))
                    del running[i]
                    bar.update()
    return found


def measure(model: Any, load: Load, options: dict[str, Any]) -> list[Speed]:
    """Both, each after a short answer that does not count."""
    requests = load.requests(model.get_input_embeddings().weight.shape[0])
    warm = [(ids, 4) for ids, _ in requests[: load.batch]]
    one = [requests[0]]
    stock_times(model, warm, load.batch)
    alone = stock_times(model, one, 1)[0]
    stock = Speed.of("generate()", stock_times(model, requests, load.batch), alone)
    gc.collect()
    with Engine(model, **{"prefix_caching": False, **options}) as engine:
        engine_times(engine, warm)
        alone = engine_times(engine, one)[0]
        ours = Speed.of("hf_paged Engine", engine_times(engine, requests), alone)
    return [stock, ours]


def run(given: Namespace) -> int:
    """Measure, print and draw. The answer is the exit code."""
    load = Load(given.num_prompts, given.input_len, given.output_len, given.batch_size, given.seed)
    options = {} if given.max_num_seqs is None else {"max_batch_sequences": given.max_num_seqs}
    source = source_of(given)
    model = source.load()
    most, need = longest(model), load.input + load.output + load.output // 2
    if most is not None and need > most:
        raise ValueError(
            f"--input-len {load.input} and answers of up to 150 % of --output-len {load.output} are {need} "
            f"tokens, and {source.name} is made for {most}; lower one of them"
        )
    found = measure(model, load, options)
    facts = described(source, model, load)
    if given.json:
        print(
            json.dumps({"facts": facts, "load": asdict(load), "speeds": [each._asdict() for each in found]})
        )
    else:
        print("\n".join([*facts, "", *table(found)]))
    if given.out is not None:
        Path(given.out).write_text(draw(found, facts), encoding="utf-8")
        print(given.out, file=sys.stderr)
    return 0


def described(source: Source, model: Any, load: Load) -> list[str]:
    """The conditions of a measurement."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return [
        f"{source.name} ({type(model).__name__}, {str(model.dtype).removeprefix('torch.')}) on {name}, "
        f"{torch.get_num_threads()} CPU threads",
        f"{load.prompts} prompts of {load.input} tokens at once, answers of {max(load.output // 2, 1)} to "
        f"{load.output + load.output // 2}; generate() in batches of {load.batch}",
        f"hf_paged {hf_paged.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}",
    ]


ROWS: list[tuple[str, Callable[[Speed], float], bool]] = [
    ("output tokens a second", lambda each: each.tokens_per_second, True),
    ("first token, median, ms", lambda each: each.first_token["p50"], False),
    ("first token, p99, ms", lambda each: each.first_token["p99"], False),
    ("between tokens, median, ms", lambda each: each.between_tokens["p50"], False),
    ("between tokens, p99, ms", lambda each: each.between_tokens["p99"], False),
    ("one request alone: first token, ms", lambda each: each.alone_first, False),
    ("one request alone: between tokens, ms", lambda each: each.alone_between, False),
]
"""The rows shown: a name, a value, and whether more is better."""


def table(found: list[Speed]) -> list[str]:
    """The figures as lines of text."""
    width = max(len(name) for name, _, _ in ROWS)
    lines = [f"{'':{width}}  " + "  ".join(f"{each.who:>16}" for each in found)]
    for name, value, _ in ROWS:
        lines.append(f"{name:{width}}  " + "  ".join(f"{value(each):>16,.1f}" for each in found))
    return lines


COLOURS = ("#d9622b", "#1f6fd6")
"""Readable on white and on black."""


def draw(found: list[Speed], facts: list[str]) -> str:
    """The figures as bars, a group for each row; SVG on a transparent ground."""
    parts: list[str] = []

    def text(x: float, y: float, said: str, more: str = "") -> None:
        parts.append(f'<text x="{x:g}" y="{y:g}" fill="#808080"{more}>{escape(said)}</text>')

    y = 24.0
    for said in facts:
        text(8, y, said)
        y += 18
    for i, each in enumerate(found):
        parts.append(f'<rect x="{8 + 180 * i}" y="{y:g}" width="12" height="12" fill="{COLOURS[i]}"/>')
        text(26 + 180 * i, y + 10, each.who)
    y += 36
    for name, value, more_is_better in ROWS:
        text(8, y, f"{name} ({'higher' if more_is_better else 'lower'} is better)", ' font-weight="600"')
        most = max(value(each) for each in found) or 1.0
        for i, each in enumerate(found):
            y += 18
            width = round(520 * value(each) / most, 1)
            parts.append(
                f'<rect x="8" y="{y - 10:g}" width="{width:g}" height="12" rx="2" fill="{COLOURS[i]}"/>'
            )
            text(16 + width, y, f"{value(each):,.1f}")
        y += 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {y:g}" width="680" height="{y:g}" '
            'role="img" font-family="system-ui, sans-serif" font-size="12">',
            "<title>Speed of a model in generate() and in hf_paged's Engine</title>",
            *parts,
            "</svg>\n",
        ]
    )
