"""The command `hf-paged bench`: stock generate(), paged generate() and the engine, each with the same
requests in the same batch.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers import LogitsProcessorList

import hf_paged
from hf_paged_cli.loads import LOADS

from ..engine import Engine
from ..model.loading import is_watched
from ..model.servable import longest
from ..serve.link.loading import Source
from .arguments import source_of
from .bench_report import STOCK, WHO, Speed, draw, table

NO_END = 2**31 - 1
"""An end of sequence that no model has: answers have the lengths that are asked for."""
WIDTH = 4
"""Samples or beams of a prompt."""
MOST = 4
"""The longest of ragged answers, in means."""
BATCHES = 4
"""So many batches of prompts are there from the beginning, unless their number is given."""

Request = tuple[list[int], int]
"""The tokens of a prompt, and how many its answer has."""


@dataclass(frozen=True)
class Load:
    """The requests of one line of the table, and how they are answered. kind: of LOADS. batch: the sequences
    that run at once; a prompt with samples or beams counts as several. prompts: None for four batches.
    """

    kind: str
    batch: int
    input: int
    output: int
    prompts: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "input", "output", "prompts"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a count; give 1 or more")

    @property
    def width(self) -> int:
        """Sequences of a prompt."""
        return WIDTH if self.kind in ("samples", "beams") else 1

    @property
    def call(self) -> int:
        """Prompts of a call of generate(); 0 if the batch has no room for the sequences of one."""
        return self.batch // self.width

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that may come."""
        return self.input + self.output * (MOST if self.kind == "ragged" else 1)

    @property
    def options(self) -> dict[str, Any]:
        """How a prompt is answered, by keywords of generate() and of the engine."""
        found = {"eos_token_id": NO_END, "do_sample": self.kind == "samples", "num_beams": 1}
        if self.kind == "samples":
            return found | {"num_return_sequences": WIDTH}
        return found | {"num_beams": WIDTH} if self.kind == "beams" else found

    def tokens(self, requests: list[Request]) -> int:
        """Tokens of all answers; of a beam search the best beam is the answer."""
        return sum(length for _, length in requests) * (WIDTH if self.kind == "samples" else 1)

    def requests(self, vocabulary: int, turn: int) -> list[Request]:
        """Prompts of random tokens, and the lengths of their answers: others in each turn."""
        chance = torch.Generator().manual_seed(self.seed + turn)
        count = self.prompts or BATCHES * self.call
        ids = torch.randint(vocabulary, (count, self.input), generator=chance, device="cpu")
        if self.kind == "prefix":
            same = torch.Generator().manual_seed(self.seed)
            shared = self.input * 7 // 8
            ids[:, :shared] = torch.randint(vocabulary, (shared,), generator=same, device="cpu")
        lengths = [self.output] * count
        if self.kind == "ragged":
            drawn = torch.empty(count, dtype=torch.float32, device="cpu")
            drawn.exponential_(1 / self.output, generator=chance)
            lengths = [max(1, min(MOST * self.output, round(each))) for each in drawn.tolist()]
        return list(zip(ids.tolist(), lengths, strict=True))


Clock = Callable[[], float]
"""The machine's clock, or what the process has had of its processors."""


class Run(NamedTuple):
    """The seconds of a run, and those from its begin to each token of each answer where they are known."""

    seconds: float
    times: list[list[float]]


def generate_run(
    model: Any,
    load: Load,
    requests: list[Request],
    clock: Clock = time.perf_counter,
    timed: bool = False,
    **keywords: Any,
) -> Run:
    """Batch after batch, as a script with generate() does it; a batch takes as long as its longest answer.
    timed: note when each token was there, of one sequence a prompt.
    """
    found: list[list[float]] = []
    times: list[float] = []
    begin = clock()

    def note_time(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note when a step of generate() has its scores."""
        wait_for(model)
        times.append(clock() - begin)
        return scores

    if timed:
        keywords["logits_processor"] = LogitsProcessorList([note_time])
    for first in range(0, len(requests), load.call):
        some = requests[first : first + load.call]
        ids = torch.tensor([prompt for prompt, _ in some], device=model.device)
        times.clear()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(length for _, length in some),
            pad_token_id=0,
            **load.options,
            **keywords,
        )
        found += [times[:length] for _, length in some]
    wait_for(model)
    return Run(clock() - begin, found if timed else [])


def wait_for(model: Any) -> None:
    """Until the device has computed what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def engine_run(engine: Engine, load: Load, requests: list[Request], clock: Clock = time.perf_counter) -> Run:
    """All requests at once; the engine runs as many as its batch has room for."""
    begin = clock()
    handles = [engine.submit(ids, max_new_tokens=length, **load.options) for ids, length in requests]
    found: list[list[float]] = [[] for _ in handles]
    running = dict(enumerate(handles))
    while running:
        engine.step()
        now = clock() - begin
        for i, handle in list(running.items()):
            done = handle.done
            found[i] += [now for each in handle.read() for _ in each.token_ids]
            if done:
                if handle.result().error is not None:
                    raise ValueError(str(handle.result().error))
                del running[i]
    return Run(clock() - begin, found if load.width == 1 else [])


def engine_for(model: Any, load: Load, at_once: int | None) -> Engine:
    """An engine with room for the load: `at_once` sequences, else those of the batch."""
    sequences = at_once or load.batch
    blocks = sequences * (load.longest // 16 + 2)
    return Engine(
        model,
        max_batch_sequences=sequences,
        max_batch_tokens=max(2048, sequences),
        num_blocks=blocks + blocks // 8 + 16,
        prefix_caching=load.kind == "prefix",
    )


def measure(
    model: Any, load: Load, turns: int, at_once: int | None = None, clock: Clock = time.perf_counter
) -> Iterator[Speed]:
    """The speed of each in each turn, all on the turn's requests. A turn before the first one warms up."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    paged: dict[str, Any] = {
        "cache_implementation": "paged",
        "cache_config": {"prefix_caching": load.kind == "prefix"},
    }
    gc.collect()
    with engine_for(model, load, at_once) as engine:
        ways: dict[str, Callable[[list[Request]], Run]] = {
            WHO[0]: lambda requests: generate_run(model, load, requests, clock, load.width == 1),
            WHO[1]: lambda requests: generate_run(model, load, requests, clock, **paged),
            WHO[2]: lambda requests: engine_run(engine, load, requests, clock),
        }
        for turn in range(-1, turns):
            requests = load.requests(vocabulary, turn + 1)
            for who, way in ways.items():
                run = way(requests)
                if turn >= 0:
                    yield Speed.of(load.kind, load.batch, who, load.tokens(requests), run.seconds, run.times)


def loads_of(given: Namespace) -> list[Load]:
    """The loads to measure, without those whose samples or beams are more than a batch."""
    found = [
        Load(kind, batch, given.input_len, given.output_len, given.num_prompts, given.seed)
        for kind in given.load
        for batch in given.batch_size
    ]
    fitting = [load for load in found if load.call]
    if not fitting:
        raise ValueError(
            f"--load {' '.join(given.load)} has {WIDTH} sequences a prompt, and no --batch-size is as large; "
            f"give {WIDTH} or more"
        )
    return fitting


def run(given: Namespace) -> int:
    """Measure, print and draw. The answer is the exit code."""
    loads = loads_of(given)
    source = source_of(given)
    model = source.load()
    most, need = longest(model), max(load.longest for load in loads)
    if most is not None and need > most:
        raise ValueError(
            f"--input-len {given.input_len} and answers of up to {need - given.input_len} tokens (by "
            f"--output-len {given.output_len}) are {need}, and {source.name} is made for {most}; lower one"
        )
    clock = time.process_time if given.processor_time else time.perf_counter
    found: list[Speed] = []
    total = len(loads) * given.runs * len(WHO)
    with tqdm(total=total, unit="run", leave=False, disable=not is_watched()) as bar:
        for load in loads:
            bar.set_description(f"{load.kind}, batch of {load.batch}")
            for speed in measure(model, load, given.runs, given.max_num_seqs, clock):
                found.append(speed)
                bar.update()
    facts = described(source, model, given, loads)
    if given.json:
        asked = [asdict(load) for load in loads]
        speeds = [each._asdict() for each in found]
        print(json.dumps({"facts": facts, "loads": asked, "speeds": speeds}))
    else:
        print("\n".join([*facts, "", *table(found)]))
    if given.out is not None:
        Path(given.out).write_text(draw(found, facts), encoding="utf-8")
        print(given.out, file=sys.stderr)
    return 0


def described(source: Source, model: Any, given: Namespace, loads: list[Load]) -> list[str]:
    """The conditions of a measurement."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    prompts = "four batches of" if given.num_prompts is None else f"{given.num_prompts}"
    batch = "the same batch for all"
    if given.max_num_seqs is not None:
        batch = f"batches of {STOCK}; the engine runs {given.max_num_seqs} sequences at once"
    left_out = len(given.load) * len(given.batch_size) - len(loads)
    turns = "1 turn" if given.runs == 1 else f"{given.runs} turns"
    return [
        f"{source.name} ({type(model).__name__}, {str(model.dtype).removeprefix('torch.')}) on {name}, "
        f"{torch.get_num_threads()} CPU threads",
        f"{batch}; {prompts} prompts at once, of {given.input_len} tokens, answers of {given.output_len}",
        f"medians of {turns} behind one that warms up; in a turn all have the same requests",
        *(["seconds are those of the processor"] if given.processor_time else []),
        *(f"{kind}: {LOADS[kind]}" for kind in dict.fromkeys(load.kind for load in loads)),
        *([f"left out: samples and beams in batches of less than {WIDTH}"] if left_out else []),
        f"hf_paged {hf_paged.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}",
    ]
