"""Engines that serve one trace in one way, so that their figures stand in one table: ours, transformers' own,
and vLLM where it is.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from traces import Ask
from transformers import GenerationConfig

from hf_paged import Engine


@dataclass
class Served:
    """What became of a trace: times in seconds from each request's arrival, whatever an engine can tell."""

    seconds: float
    tokens: int
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """The mean time between two tokens of each request."""
    notes: dict[str, float] = field(default_factory=dict)


class Peer(ABC):
    """An engine, made once and asked again and again."""

    name: str

    @abstractmethod
    def serve(self, asks: Sequence[Ask], arrivals: Sequence[float] | None = None) -> Served:
        """Answer a trace, greedily, every answer as long as it says; arrivals in seconds, else all at
        once.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""


class Ours(Peer):
    """`hf_paged.Engine`, its steps taken in a row as by its own thread."""

    name = "hf_paged"

    def __init__(self, model: Any, at_once: int, **options: Any) -> None:
        self.engine = Engine(
            model, **{"max_batch_sequences": at_once, "max_batch_tokens": max(2048, at_once), **options}
        )
        self._device = model.device

    def serve(self, asks: Sequence[Ask], arrivals: Sequence[float] | None = None) -> Served:
        engine, before, waste, busy = self.engine, self.engine.stats(), [], []
        begin = time.monotonic()
        due = [begin] * len(asks) if arrivals is None else [begin + arrival for arrival in arrivals]
        handles: list[Any] = []

        def drive() -> None:
            while len(handles) < len(asks) or engine.driver.books.jobs:
                while len(handles) < len(asks) and due[len(handles)] <= time.monotonic():
                    ask = asks[len(handles)]
                    handles.append(engine.submit(ask.prompt, max_new_tokens=ask.new, do_sample=False))
                if not engine.driver.books.jobs:
                    time.sleep(max(0.0, due[len(handles)] - time.monotonic()))
                    continue
                start, slept = time.perf_counter(), sum(waited)
                engine.driver.advance_in_turn()
                busy.append(time.perf_counter() - start - (sum(waited) - slept))
                waited[:] = [sum(waited)]
                if len(busy) % 32 == 0:
                    waste.append(unused(engine))

        with waits(self._device) as waited:
            engine.driver.run_steps(drive)
        seconds, after = time.monotonic() - begin, engine.stats()
        outputs = [handle.result() for handle in handles]
        timings = [output.timing for output in outputs]
        notes = {name: after[name] - before[name] for name in ("steps", "preemptions", "hits", "misses")}
        notes |= {"host": sorted(busy)[len(busy) // 2], "waste": sum(waste) / max(1, len(waste))}
        return Served(
            seconds,
            sum(len(output.sequences[0].token_ids) for output in outputs),
            [timing.first_token - at for timing, at in zip(timings, due, strict=True)],
            [
                (timing.finished - timing.first_token) / max(1, ask.new - 1)
                for timing, ask in zip(timings, asks, strict=True)
            ],
            notes,
        )

    def close(self) -> None:
        self.engine.close()


class waits:
    """How long the host waits for the device meanwhile, in a list that grows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited: list[float] = []

    def __enter__(self) -> list[float]:
        if self.device.type == "cuda":
            self._synchronize = torch.cuda.Event.synchronize

            def timed(event: Any) -> None:
                begin = time.perf_counter()
                self._synchronize(event)
                self.waited.append(time.perf_counter() - begin)

            torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
        return self.waited

    def __exit__(self, *trouble: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.Event.synchronize = self._synchronize  # type: ignore[method-assign]


def unused(engine: Engine) -> float:
    """The share of the held slots that hold no token (C2); what is shared counts once."""
    slots = used = 0
    for kv_group in engine.pools.kv_groups:
        slots += kv_group.pool.held * kv_group.pool.block_size
        last = {}
        for group in engine.scheduler.running:
            for sequence in group.sequences:
                table = sequence.tables[engine.pools.kv_groups.index(kv_group)]
                for place, block in enumerate(table.blocks):
                    begin = (table.released + place) * kv_group.pool.block_size
                    last[block] = min(kv_group.pool.block_size, table.length - begin)
        used += sum(last.values())
    return 1 - used / slots if slots else 0.0


class Stock(Peer):
    """transformers' continuous batching, as it chooses by itself."""

    name = "transformers"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any, at_once: int) -> None:
        from transformers import ContinuousBatchingConfig

        self.model = model
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16)
        kept = (
            {} if model.device.type == "cuda" else {"num_blocks": 64, "max_batch_tokens": 2048}
        )  # it asks the device for its memory
        options = ContinuousBatchingConfig(max_requests_per_batch=at_once, **kept, **self.options)
        self._context = model.continuous_batching_context_manager(config, continuous_batching_config=options)
        self._manager = self._context.__enter__()

    def serve(self, asks: Sequence[Ask], arrivals: Sequence[float] | None = None) -> Served:
        begin, waiting, results = time.perf_counter(), list(enumerate(asks)), {}
        while len(results) < len(asks):
            now = time.perf_counter() - begin
            while waiting and (arrivals is None or arrivals[waiting[0][0]] <= now):
                number, ask = waiting.pop(0)
                self._manager.add_request(
                    ask.prompt, request_id=str(number), max_new_tokens=ask.new, record_timestamps=True
                )
            found = self._manager.get_result(timeout=0.001 if waiting else 1.0)
            if found is not None and found.is_finished():
                if found.error:
                    raise RuntimeError(found.error)
                results[int(found.request_id)] = found
            if not self._manager.is_running():
                raise RuntimeError(
                    f"its thread has ended: {self._manager.background_thread_status.fatal_error}"
                )
        seconds = time.perf_counter() - begin
        times = [results[number].timestamps for number in range(len(asks))]
        starts = [begin] * len(asks) if arrivals is None else [begin + arrival for arrival in arrivals]
        return Served(
            seconds,
            sum(len(found.generated_tokens) for found in results.values()),
            [each[0] - start for each, start in zip(times, starts, strict=True)],
            [(each[-1] - each[0]) / max(1, len(each) - 1) for each in times],
        )

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        gc.collect()


class StockCompiled(Stock):
    """The same with CUDA graphs and compiled steps."""

    name = "transformers, compiled"
    options: ClassVar[dict[str, Any]] = {"use_cuda_graph": True, "default_compile_level": 1}


class Vllm(Peer):
    """vLLM over the same weights, where it is installed, or over random ones of a folder's shape."""

    name = "vllm"

    def __init__(self, model: Any, at_once: int, **options: Any) -> None:
        import vllm

        self._vllm = vllm
        self._folder = tempfile.TemporaryDirectory()
        folder, options = self._folder.name, {"gpu_memory_utilization": 0.6, **options}
        if isinstance(model, Path):
            folder, options["load_format"] = str(model), "dummy"
        else:
            model.save_pretrained(folder)
        self._llm = vllm.LLM(folder, skip_tokenizer_init=True, max_num_seqs=at_once, **options)

    def serve(self, asks: Sequence[Ask], arrivals: Sequence[float] | None = None) -> Served:
        if arrivals is not None:
            raise NotImplementedError("vLLM's offline interface takes all requests at once")
        options = [
            self._vllm.SamplingParams(
                temperature=0.0, min_tokens=ask.new, max_tokens=ask.new, ignore_eos=True, detokenize=False
            )
            for ask in asks
        ]
        begin = time.monotonic()
        outputs = self._llm.generate(
            [{"prompt_token_ids": ask.prompt} for ask in asks], options, use_tqdm=False
        )
        return Served(time.monotonic() - begin, sum(len(output.outputs[0].token_ids) for output in outputs))

    def sample(self, prompts: list[list[int]], samples: int, new: int, logprobs: bool = False) -> None:
        """Draw several answers to each prompt, all of them `new` tokens long."""
        options = self._vllm.SamplingParams(
            n=samples, temperature=1.0, min_tokens=new, max_tokens=new, ignore_eos=True, detokenize=False,
            logprobs=0 if logprobs else None,
        )  # fmt: skip
        self._llm.generate([{"prompt_token_ids": each} for each in prompts], options, use_tqdm=False)

    def close(self) -> None:
        del self._llm
        self._folder.cleanup()


def peers() -> dict[str, Any]:
    """Those that are installed."""
    found: dict[str, Any] = {"hf_paged": Ours, "transformers": Stock}
    if torch.cuda.is_available():
        found[StockCompiled.name] = StockCompiled
    if importlib.util.find_spec("vllm") is not None:
        found["vllm"] = Vllm
    return found
