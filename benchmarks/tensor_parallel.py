"""The engine on several ranks: a Llama shape with random weights in bfloat16, divided by transformers' tp_plan.

    torchrun --nproc-per-node 4 benchmarks/tensor_parallel.py --shape llama13b --json ranks.jsonl     # on GPUs
    python benchmarks/tensor_parallel.py --shape llama13b                    # the same on one of them
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape tiny --dtype float32
    --device cpu --rows 1 4 --requests 16 --at-once 4 --steps 20             # does it run? on any CPU

    python benchmarks/tensor_parallel.py --shape llama13b --pipeline         # layers over all GPUs, by device_map
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape llama70b --layers 40       # half of a model
    python benchmarks/tensor_parallel.py --shape llama13b --vllm 2           # vLLM's trace on as many GPUs

steps    milliseconds of a step in which every sequence takes one token, by the clock around `Engine.step()`, and
the multiple of what reading a rank's weights takes; what of it rank 0 needs to send the step, and how many
numbers that is; with --kernels also the milliseconds of a step that each kind of kernels takes on rank 0
trace    output tokens a second of sharegpt's lengths, forced, of the second of two runs and of the first, and what
captures took in both
generate milliseconds of a token of generate(), greedy, by pages and by stock's cache, median of calls behind two
vote     what it takes ranks to agree on a replay in generate()

No checkpoint is needed: a file of safetensors without data stands for it, and each rank fills its own part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from anatomy import by_kind, kernels_of
from peers import Vllm
from shapes import SHAPES
from traces import Ask, trace
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged import Engine
from hf_paged.model.ranks.tensor_parallel import mesh_of
from hf_paged.model.ranks.votes import votes_of

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second of a device's memory, by a part of its name."""
CONTEXT = 384
NEW = 64
"""Tokens of a call of generate()."""
SECTIONS = ["steps", "trace", "generate"]
WARM = 40
"""Steps before those that are measured: captures come in them."""
PROFILED = 8
"""Steps whose kernels are timed."""
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def config_of(shape: str, layers: int | None) -> LlamaConfig:
    """The configuration of a shape, or of its first layers."""
    config = LlamaConfig(**{**SHAPES, "llama70b": LLAMA_70B}[shape], tie_word_embeddings=False)
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


def write_checkpoint(folder: Path, config: LlamaConfig, dtype: torch.dtype) -> None:
    """A checkpoint whose file has a header and a hole."""
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    header = {}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def load(options: argparse.Namespace, folder: Path, ranks: int) -> Any:
    """The model, this rank's part of it, with random weights."""
    dtype = getattr(torch, options.dtype)
    where: dict[str, Any] = {"device_map": "balanced" if options.pipeline else options.device}
    if ranks > 1:
        where = {"tp_plan": "auto"}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **where).eval()
    for parameter in model.parameters():
        own = getattr(parameter, "_local_tensor", parameter)
        torch.manual_seed(0)  # what is whole on each rank must be the same there
        with torch.no_grad():
            own.normal_(std=0.02) if own.ndim > 1 else own.fill_(1)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def bytes_of(model: Any) -> int:
    """What a step reads of this rank's weights: all but the embedding, of which it takes some rows."""
    embedding = model.get_input_embeddings().weight
    parts = [getattr(each, "_local_tensor", each) for each in model.parameters() if each is not embedding]
    return sum(each.nbytes for each in parts)


def led(model: Any, act: Callable[[Engine], Any], **options: Any) -> Any:
    """What `act` does with rank 0's engine, while the others follow."""
    with Engine(model, **{"max_batch_tokens": 2048, **options}) as engine:
        if engine.leads:
            return act(engine)
        engine.follow()
    return None


def steps(engine: Engine, options: argparse.Namespace, rows: int, weights: int) -> dict[str, Any]:
    """Decoding steps of so many rows."""
    sent: list[tuple[float, int]] = []
    ranks = engine.driver.books.executor.ranks
    if ranks is not None:
        send = ranks.send

        def timed(numbers: Any) -> None:
            begin = time.perf_counter()
            send(numbers)
            sent.append((time.perf_counter() - begin, len(numbers)))

        ranks.send = timed
    vocabulary = engine.model.config.vocab_size
    context = min(CONTEXT, engine.model.config.max_position_embeddings // 2)
    new = WARM + options.steps + PROFILED + rows * context // 1024 + 64
    chance = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, vocabulary - 10, (rows, context), generator=chance).tolist()
    handles = [engine.submit(each, max_new_tokens=new, do_sample=False) for each in prompts]
    while len(engine.scheduler.rows) < rows:  # prompts, in chunks
        engine.step()
    for _ in range(WARM):
        engine.step()
    sent.clear()
    taken = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    found = {"rows": rows, "ms": 1e3 * statistics.median(taken), "graphs": engine.stats()["graphs"]}
    speed = next((each for name, each in BANDWIDTH.items() if name in device_name(options.device)), None)
    if speed is not None:
        found["floor"] = found["ms"] / (1e3 * weights / speed)
    if sent:
        found["send_ms"] = 1e3 * statistics.median(seconds for seconds, _ in sent)
        found["numbers"] = statistics.median(count for _, count in sent)
    if options.kernels:
        found["kernels"] = kernels(engine)
    for handle in handles:
        handle.cancel()
    return found


def kernels(engine: Engine) -> dict[str, float]:
    """Milliseconds of a step that each kind of kernels takes on this rank, sums with their waits for others."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    spent = by_kind(kernels_of(profiler))
    return {kind: round(microseconds / 1e3 / PROFILED, 3) for kind, microseconds in spent.most_common()}


def asks_of(options: argparse.Namespace, config: LlamaConfig, longest: int) -> list[Ask]:
    """The requests of the trace that become no longer than that."""
    asks = trace("sharegpt", options.requests, config.vocab_size)
    return [each for each in asks if len(each.prompt) + each.new <= longest]


def run_trace(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """All requests of a trace at once."""
    asked = asks_of(options, engine.model.config, engine.longest)
    new = sum(each.new for each in asked)
    speeds = []
    for _ in range(2):  # the first time captures and compiles
        begin = time.perf_counter()
        handles = [
            engine.submit(each.prompt, max_new_tokens=each.new, min_new_tokens=each.new, do_sample=False)
            for each in asked
        ]
        for handle in handles:
            output = handle.result()
            if output.error is not None:
                raise output.error
        seconds = time.perf_counter() - begin
        speeds.append(new / seconds)
    graphs = engine.stats()["graphs"]
    return {
        "requests": len(asked),
        "seconds": seconds,
        "tokens_per_second": speeds[-1],
        "first_tokens_per_second": speeds[0],
        "captures": graphs["captured"],
        "capture_seconds": graphs["seconds"],
    }


def vllm_trace(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The trace by vLLM on several GPUs, over random weights: the second of two runs."""
    config = config_of(options.shape, options.layers)
    asks = asks_of(options, config, config.max_position_embeddings)
    peer = Vllm(folder, options.at_once, tensor_parallel_size=options.vllm, gpu_memory_utilization=0.9)
    peer.serve(asks)
    served = peer.serve(asks)
    speed = served.tokens / served.seconds
    return {"requests": len(asks), "seconds": served.seconds, "tokens_per_second": speed}


def calls(model: Any, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Calls of generate() on every rank, by pages and by stock's cache."""
    chance = torch.Generator().manual_seed(1)
    context = min(CONTEXT, model.config.max_position_embeddings // 2)
    ids = torch.randint(10, model.config.vocab_size - 10, (rows, context), generator=chance)
    ids = ids.to(torch.device("cuda", torch.cuda.current_device()) if "cuda" in options.device else "cpu")
    found: dict[str, Any] = {"rows": rows}
    for name, word in (("paged", {"cache_implementation": "paged"}), ("stock", {})):
        taken = []
        for _ in range(3 if name == "stock" else 5):
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **word)
            if ids.is_cuda:
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - begin) / NEW)
        found[f"{name}_ms"] = statistics.median(taken[2:])
    return found


def vote(model: Any) -> dict[str, Any] | None:
    """How long ranks take to agree on a replay."""
    mesh = mesh_of(model)
    if mesh is None:
        return None
    votes = votes_of(mesh.get_group())
    taken = []
    for number in range(200):
        begin = time.perf_counter()
        votes.same((True, number), "a replay")
        taken.append(time.perf_counter() - begin)
    return {"ms": 1e3 * statistics.median(taken)}


def device_name(device: str) -> str:
    """The hardware."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama13b", choices=[*SHAPES, "llama70b"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda:0", help="of one process; ranks have one each")
    parser.add_argument("--pipeline", action="store_true", help="one process, layers over all GPUs")
    parser.add_argument("--layers", type=int, help="so many layers of the shape")
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kernels", action="store_true", help="what the kernels of steps take, on GPUs")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--engine", type=json.loads, default={}, help='e.g. {"fuse_projections": true}')
    parser.add_argument("--vllm", type=int, metavar="GPUS", help="the trace by vLLM instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    first = int(os.environ.get("RANK", "0")) == 0
    folder = (
        Path(tempfile.gettempdir()) / f"hf_paged-{options.shape}-{options.layers or 'all'}-{options.dtype}"
    )
    if first and not (folder / "model.safetensors").exists():
        folder.mkdir(exist_ok=True)
        write_checkpoint(folder, config_of(options.shape, options.layers), getattr(torch, options.dtype))
    while not (folder / "model.safetensors").exists():
        time.sleep(0.1)
    if options.vllm:
        print(
            json.dumps(
                {"what": "vllm", "shape": options.shape, "ranks": options.vllm, **vllm_trace(options, folder)}
            )
        )
        return
    model = load(options, folder, ranks)
    weights = bytes_of(model)

    def report(what: str, found: dict[str, Any] | None) -> None:
        if found is None:
            return
        line = {
            "what": what,
            "shape": options.shape,
            "layers": model.config.num_hidden_layers,
            "ranks": ranks,
            "pipeline": options.pipeline,
            "gpu": device_name(options.device),
            **found,
        }
        print(json.dumps(line), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for rows in options.rows if "steps" in options.sections else ():
        act = lambda engine, rows=rows: steps(engine, options, rows, weights)  # noqa: E731
        report("steps", led(model, act, max_batch_sequences=rows, **options.engine))
    if "trace" in options.sections:
        act = lambda engine: run_trace(engine, options)  # noqa: E731
        report("trace", led(model, act, max_batch_sequences=options.at_once, **options.engine))
    if "generate" in options.sections:
        hf_paged.install()
        for rows in options.rows:
            answer = calls(model, options, rows)
            report("generate", answer if first else None)
        agreed = vote(model)
        report("vote", agreed if first else None)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
