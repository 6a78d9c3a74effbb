"""What a server costs beside the engine alone: the same requests, on the same engine.

    python benchmarks/serve.py --json results.jsonl          # on a GPU: 8B Llama shape, random weights, bfloat16
    OMP_NUM_THREADS=1 python benchmarks/serve.py --shape tiny --requests 24 --at-once 8 --rates 2 --seconds 4 --rounds 1
    python benchmarks/serve.py --fresh 5 --rates 8           # the first requests of a server that was idle for 5 s

throughput    output tokens a second of a trace whose requests all come at once: the engine alone, streams of
              events, and whole answers; each over the same engine, in turns. Beside it the seconds that the
              processor worked: the engine's thread, its whole process, and the event loop of HTTP
load          times to the first token and between tokens where requests come one by one, for the engine alone
              and for clients of the server
vllm          the same clients at vLLM's server on the same card, where it is installed: a model of the same shape with
              random weights of its own. The engine sleeps meanwhile

HTTP is a process of its own, as in `hf-paged serve`, and so are the clients (serve_client.py), which send texts. The tokenizer is made here, of as many
entries as the model has scores. Every run has a salt of its own, so none finds prefixes of another.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shapes import SHAPES, Report, build, common_parser, report_of
from tokenizer import BLANK, tokenizer_of
from traces import TRACES, trace

from hf_paged import Engine
from hf_paged.serve.http.options import ServerOptions
from hf_paged.serve.http_process import HttpProcess, HttpSpec
from hf_paged.serve.server import tuned
from hf_paged_cli.limits import ServerLimits

START_SECONDS = 180
CLIENT = Path(__file__).with_name("serve_client.py")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_server(port: int, path: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a server, of this process if there is one, answers at this path."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}"):
                return
        except urllib.error.URLError as error:
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}") from error
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready within {START_SECONDS} s") from error
            time.sleep(0.1)


class Ask(NamedTuple):
    """A request: its prompt as a text and as ids, and the length of its answer."""

    text: str
    ids: list[int]
    new: int


class Run(NamedTuple):
    """What became of a run: seconds from its begin to its last token, tokens, and each request's time to the
    first token and gaps between tokens, in seconds. busy: the processor's seconds, as the table names them.
    """

    seconds: float
    tokens: int
    first: list[float]
    gaps: list[float]
    busy: tuple[float, ...] = ()

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Bench:
    """One engine, its server, and the requests."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options = options
        self.report = report
        self.vocabulary = SHAPES[options.shape]["vocab_size"]
        self.tokenizer = tokenizer_of(self.vocabulary)
        words = [token for token in self.tokenizer.get_vocab() if token[0] == BLANK and token[1:].isalpha()]
        self._words = [" " + token[1:] for token in sorted(words)]
        model = build(options.shape, options.device, getattr(torch, options.dtype))
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None  # answers are as long as the trace says
        at_once = options.at_once
        limits = {"max_batch_sequences": at_once, "max_batch_tokens": max(2048, at_once)}
        self.engine = Engine(model, **{**limits, **options.engine})
        self.http: Any = None
        self.port = 0
        self._salts = itertools.count()

    def asks(self, count: int, seed: int = 0) -> list[Ask]:
        """Requests of the trace, as texts."""
        made = []
        for ask in trace(self.options.trace, count, self.vocabulary, seed):
            text = "".join(self._words[token % len(self._words)] for token in ask.prompt)
            made.append(Ask(text, self.tokenizer(text)["input_ids"], ask.new))
        return made

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have the process of HTTP serve the engine that is measured alone, too."""
        waiting = max(1024, 4 * self.options.requests)
        limits = ServerLimits(waiting=waiting, request_seconds=3600.0)
        self.port = free_port()
        options = ServerOptions(port=self.port, limits=limits)
        self.http = HttpProcess(HttpSpec(options, self.tokenizer, log_level="error"))
        thread = threading.Thread(target=self.http.serve, args=(self.engine,))
        thread.start()
        try:
            await_server(self.port, "/ready")
            yield
        finally:
            self.http.end()
            thread.join()

    @contextmanager
    def serving_with_vllm(self) -> Iterator[None]:
        """Have vLLM's server answer instead. The engine sleeps, and gives it the memory."""
        self.engine.sleep(level=2)
        torch.cuda.empty_cache()
        own, self.port = self.port, free_port()
        with tempfile.TemporaryDirectory() as folder:
            self.engine.model.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            log = Path(folder) / "log"
            options = [
                *("--model", folder, "--load-format", "dummy", "--dtype", self.options.dtype),
                *("--max-num-seqs", str(self.options.at_once), "--port", str(self.port)),
                *("--gpu-memory-utilization", "0.8", "--disable-uvicorn-access-log"),
            ]
            with log.open("w") as file:
                server = subprocess.Popen(
                    [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options],
                    stdout=file, stderr=file, env={**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"},
                )  # fmt: skip
            try:
                await_server(self.port, "/health", server)
                yield
            except Exception:
                print(log.read_text()[-3000:], flush=True)
                raise
            finally:
                server.terminate()
                server.wait()
                self.port = own
                self.engine.wake_up()

    def measured(self, run: Callable[[], Run]) -> Run:
        """A run with the processor's time of the engine's thread, its process, and the event loop of HTTP."""
        thread = self.engine.driver.background.thread.native_id
        places = (f"/proc/self/task/{thread}/schedstat", f"/proc/{self.http.pid}/schedstat")

        def now() -> tuple[float, ...]:
            own, loop = (int(Path(place).read_text().split()[0]) / 1e9 for place in places)
            return own, time.process_time(), loop

        before = now()
        made = run()
        return made._replace(busy=tuple(b - a for a, b in zip(before, now(), strict=True)))

    # ---- runs

    def alone(self, asks: Sequence[Ask], arrivals: Sequence[float] | None = None) -> Run:
        """The engine, driven by its own thread as in the server."""
        salt = f"run {next(self._salts)}"
        begin = time.monotonic()
        handles = []
        times: list[list[float]] = []
        for i, ask in enumerate(asks):
            if arrivals is not None:
                time.sleep(max(0.0, begin + arrivals[i] - time.monotonic()))
            handle = self.engine.submit(ask.ids, max_new_tokens=ask.new, do_sample=False, salt=salt)
            if arrivals is not None:  # in a throughput run nothing but the engine works
                times.append([])
                handle.watch(lambda own=times[-1]: own.append(time.monotonic()))
            handles.append(handle)
        outputs = [handle.result() for handle in handles]
        seconds = max(output.timing.finished for output in outputs) - begin
        due = [begin] * len(asks) if arrivals is None else [begin + each for each in arrivals]
        first = [output.timing.first_token - at for output, at in zip(outputs, due, strict=True)]
        gaps = [b - a for own in times for a, b in pairwise(own[:-1])]  # the last one is the end's
        return Run(seconds, sum(len(each.sequences[0].token_ids) for each in outputs), first, gaps)

    def served(
        self, asks: Sequence[Ask], arrivals: Sequence[float] | None = None, stream: bool = True
    ) -> Run:
        """Clients of the server."""
        salt = f"run {next(self._salts)}"
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        bodies = [
            {"prompt": ask.text, "max_tokens": ask.new, "temperature": 0, "ignore_eos": True, "stream": stream, "cache_salt": salt, **usage}
            for ask in asks
        ]  # fmt: skip
        job = {"port": self.port, "bodies": bodies, "arrivals": arrivals or [0.0] * len(asks)}
        done = subprocess.run([sys.executable, str(CLIENT)], input=json.dumps(job), capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr[-2000:]}")
        run = Run(**json.loads(done.stdout))
        wanted = sum(ask.new for ask in asks)
        if run.tokens != wanted:
            raise RuntimeError(f"the server answered with {run.tokens} tokens, expected {wanted}")
        return run


def quantiles(values: Sequence[float], scale: float = 1.0) -> str:
    """The median and the 99th percentile."""
    if not values:
        return ""
    ranked = sorted(values)
    return f"{ranked[len(ranked) // 2] * scale:.2f} / {ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))] * scale:.2f}"


def throughput(bench: Bench) -> None:
    options = bench.options
    asks = bench.asks(options.requests)
    bench.report.table(
        "serve throughput", f"{len(asks)} requests of the {options.trace} trace, all there from the beginning, up to "
        f"{options.at_once} at once, a tokenizer of {bench.vocabulary} entries", who=("", ""), speed=("tok/s, median", ".0f"),
        cost=("cost", ".1%"), busy=("processor, s: engine's thread / process / HTTP", ""), runs=("tok/s of each run", ""),
    )  # fmt: skip
    kinds = {
        "the engine alone": lambda: bench.alone(asks),
        "server, streams": lambda: bench.served(asks),
        "server, whole answers": lambda: bench.served(asks, stream=False),
    }
    runs: dict[str, list[Run]] = {who: [] for who in kinds}
    for _ in range(options.rounds):
        for who, run in kinds.items():
            runs[who].append(bench.measured(run))
    alone = statistics.median(run.speed for run in runs["the engine alone"])
    for who, own in runs.items():
        speed = statistics.median(run.speed for run in own)
        busy = [statistics.median(times) for times in zip(*(run.busy for run in own), strict=True)]
        bench.report.row(
            who=who, speed=speed, cost=1 - speed / alone, busy=" / ".join(f"{each:.1f}" for each in busy),
            runs=", ".join(f"{run.speed:.0f}" for run in own),
        )  # fmt: skip


def load(bench: Bench) -> None:
    load_table(bench, "serve load", {"the engine alone": bench.alone, "server, streams": bench.served})


def load_table(bench: Bench, section: str, kinds: dict[str, Callable[..., Run]]) -> None:
    """The same requests at the same moments, for each of these."""
    options = bench.options
    bench.report.table(
        section, f"Requests of the {options.trace} trace for {options.seconds:.0f} s, Poisson arrivals; p50 / p99",
        rate=("requests a second", ".1f"), who=("", ""), requests=("requests", "d"), first=("first token, ms", ""),
        gaps=("between tokens, ms", ""), speed=("tok/s", ".0f"),
    )  # fmt: skip
    for rate in options.rates:
        asks = bench.asks(max(2, round(rate * options.seconds)), seed=3)
        chance = random.Random(2)
        arrivals = list(accumulate(chance.expovariate(rate) for _ in asks))
        for who, kind in kinds.items():
            with bench.report.surviving(f"load, {who}, {rate} a second"):
                run = kind(asks, arrivals)
                bench.report.row(
                    rate=rate, who=who, requests=len(asks), first=quantiles(run.first, 1e3), gaps=quantiles(run.gaps, 1e3),
                    speed=run.speed,
                )  # fmt: skip


def vllm(bench: Bench) -> None:
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here", flush=True)
        return
    with bench.serving_with_vllm():
        asks = bench.asks(bench.options.requests)
        bench.served(bench.asks(bench.options.requests, seed=1))  # warm-up
        bench.report.table(
            "vllm throughput", f"vLLM's server: the {len(asks)} requests of serve throughput",
            who=("", ""), speed=("tok/s, median", ".0f"), runs=("tok/s of each run", ""),
        )  # fmt: skip
        speeds = [bench.served(asks).speed for _ in range(bench.options.rounds)]
        runs = ", ".join(f"{speed:.0f}" for speed in speeds)
        bench.report.row(who="vLLM's server, streams", speed=statistics.median(speeds), runs=runs)
        load_table(bench, "vllm load", {"vLLM's server, streams": bench.served})


SECTIONS = {"throughput": throughput, "load": load, "vllm": vllm}


def main() -> None:
    parser = common_parser(__doc__, SECTIONS, engine=True)
    parser.add_argument("--trace", choices=TRACES, default="sharegpt")
    parser.add_argument("--requests", type=int, default=512, help="of the section throughput")
    parser.add_argument("--at-once", type=int, default=256, help="sequences in a batch")
    parser.add_argument("--rounds", type=int, default=3, help="of the section throughput")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 16.0, 24.0, 32.0, 40.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, for each rate")
    parser.add_argument("--switch-interval", type=float, help="seconds, instead of the server's own")
    parser.add_argument(
        "--fresh", type=float, metavar="SECONDS", help="the section load at a server that has been idle since its start"
    )  # fmt: skip
    options = parser.parse_args()
    report = report_of(options)
    bench = Bench(options, report)
    with tuned(), bench.serving():
        if options.switch_interval is not None:
            sys.setswitchinterval(options.switch_interval)
        if options.fresh is not None:
            time.sleep(options.fresh)
            print(f"captured: {bench.engine.stats()['graphs']}", flush=True)
            load_table(bench, "serve fresh", {"server, streams": bench.served})
            return
        bench.alone(bench.asks(options.requests, seed=1))  # warm-up: captures steps of these sizes
        bench.served(bench.asks(min(options.requests, 2 * options.at_once), seed=4))
        report.run(SECTIONS, options.sections, bench)


if __name__ == "__main__":
    main()
