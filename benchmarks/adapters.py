"""Many adapters in one batch: an engine's steps, generate() with adapter_names, a trace, and the kernels alone.

    python benchmarks/adapters.py                         # everything, some 6 minutes on a GPU
    python benchmarks/adapters.py --sections steps --rows 8 64 --counts 0 8
    python benchmarks/adapters.py --sections parts        # DoRA, trained tokens, embeddings, whole heads
    python benchmarks/adapters.py --sections apart        # IA3, which peft's own modules compute
    python benchmarks/adapters.py --sections several      # eight methods that peft's own modules compute

The adapters are random, of rank 16 on all seven linear layers, in the model's number type; an engine has them
beside a plain model, generate() in a peft model. Rows get them in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
from engine import CONTEXT, Bench, decode_steps
from shapes import SHAPES, common_parser, report_of
from traces import trace

from hf_paged import Engine
from hf_paged.model.capture.replay import captures_of

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HIDDEN = 4096
INNER = 14336
KEYS = 1024
LAYERS = 32
INPUTS = [(HIDDEN, [HIDDEN, KEYS, KEYS]), (HIDDEN, [HIDDEN]), (HIDDEN, [INNER, INNER]), (INNER, [HIDDEN])]
"""The width of each input, and of what the layers make of it."""
CASES = [
    (1, 1, 1), (8, 1, 1), (64, 1, 1), (256, 1, 1), (8, 8, 8), (64, 8, 8), (256, 8, 8), (64, 64, 64),
    (256, 64, 64), (8, 0, 8), (256, 0, 8),
]  # fmt: skip
"""Rows, adapters among them, and slots for adapters."""
WIDE_CASES = [(1, 1, 1), (64, 8, 8), (256, 8, 8)]
"""Those of adapters in float32, beside a model in bfloat16."""


class AdapterBench(Bench):
    """A plain model, and adapters for it."""

    @cached_property
    def config(self) -> Any:
        return peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False)

    @cached_property
    def states(self) -> dict[int, dict[str, torch.Tensor]]:
        """The adapters made so far."""
        return {}

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        """A random adapter, as peft saves it."""
        if seed in self.states:
            return self.states[seed]
        random = torch.Generator(self.options.device).manual_seed(seed)
        found = {}
        for name, module in self.model.named_modules():
            if name.rsplit(".", 1)[-1] in TARGETS:
                for half, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                    weight = torch.randn(shape, generator=random, device=self.options.device) * 0.01
                    key = f"base_model.model.{name}.lora_{half}.weight"
                    found[key] = weight.to(self.model.dtype).cpu()
        self.states[seed] = found
        return found

    def engine_with(self, adapters: int, rows: int, **more: Any) -> Engine:
        """An engine with so many adapters, all of which the device can hold."""
        options = {"max_batch_tokens": max(2048, 16 * rows), "max_adapters": max(adapters, 1), **more}
        made = self.engine(rows, **options)
        for i in range(adapters):
            made.add_adapter(f"a{i}", self.state(i), self.config)
        return made


def adapter_of(row: int, adapters: int) -> str | None:
    """Rows have adapters in turn."""
    return f"a{row % adapters}" if adapters else None


def step_time(bench: AdapterBench, engine: Engine, rows: int, adapters: int) -> float:
    """Milliseconds of a step in which nothing but decoding happens, the median."""
    others = [{"adapter": adapter_of(row, adapters)} for row in range(rows)]
    return statistics.median(decode_steps(bench, engine, rows, 32, others=others)) * 1e3


def steps(bench: AdapterBench) -> None:
    rows = sorted(bench.options.rows)
    bench.report.table(
        "adapters steps", f"A decoding step of the engine, prompts of {CONTEXT}, ms, median",
        adapters=("adapters in the batch", "d"), there=("adapters added", "d"),
        **{f"r{each}": (f"{each} rows", ".2f") for each in rows}, memory=("an adapter on the device, MB", ".0f"),
        peak=("peak memory, GB", ".1f"),
    )  # fmt: skip
    for there in sorted({0, *bench.options.counts}):
        with bench.report.surviving(f"steps, {there} adapters"), bench.engine_with(there, rows[-1]) as engine:
            for count in sorted({0, there}):
                found = {f"r{each}": step_time(bench, engine, each, count) for each in rows if count <= each}
                stats = engine.stats()["adapters"]
                size = stats["bytes"] / stats["on_device"] / 1e6 if stats["on_device"] else None
                peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
                bench.report.row(adapters=count, there=there, memory=size, peak=peak, **found)


PARTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "products": ({}, (8, 64, 256)),
    "DoRA": ({"use_dora": True}, (8, 64, 256)),
    "trained tokens": ({"trainable_token_indices": list(range(100, 200))}, (64,)),
    "embeddings": ({"target_modules": [*TARGETS, "embed_tokens"]}, (64,)),
    "head and embeddings": ({"modules_to_save": ["lm_head", "embed_tokens"]}, (64,)),
}
"""Adapters with parts beside products: the options of their config, and the rows to measure."""


def state_of(bench: AdapterBench, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter of a kind, as peft saves it."""
    state = dict(bench.state(seed))
    options, _ = PARTS[kind]
    random = torch.Generator(bench.options.device).manual_seed(1000 + seed)
    embeddings: Any = bench.model.get_input_embeddings()

    def noise(*shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=random, device=bench.options.device) * 0.01
        return found.to(bench.model.dtype).cpu()

    path = "base_model.model.model.embed_tokens"
    if "use_dora" in options:
        for name, module in bench.model.named_modules():
            if name.rsplit(".", 1)[-1] in TARGETS:
                norm = torch.linalg.norm(module.weight.detach(), dim=1) * 1.05
                state[f"base_model.model.{name}.lora_magnitude_vector"] = norm.cpu()
    elif "trainable_token_indices" in options:
        rows = noise(len(options["trainable_token_indices"]), embeddings.embedding_dim)
        state[f"{path}.token_adapter.trainable_tokens_delta"] = rows
    elif "target_modules" in options:
        state[f"{path}.lora_embedding_A"] = noise(RANK, embeddings.num_embeddings)
        state[f"{path}.lora_embedding_B"] = noise(embeddings.embedding_dim, RANK)
    elif "modules_to_save" in options:
        for saved in ("lm_head", "model.embed_tokens"):
            state[f"base_model.model.{saved}.weight"] = noise(*embeddings.weight.shape)
    return state


def parts(bench: AdapterBench) -> None:
    """Bars beside plain products: DoRA 1.20 of their step, trained tokens and embeddings 1.03, eight heads the
    time that memory takes to give their bytes, and 0.5 ms.
    """
    count = 8
    bench.report.table(
        "adapters parts", f"A decoding step with {count} adapters of a kind, prompts of {CONTEXT}, ms, median",
        kind=("parts beside products", ""), rows=("rows", "d"), base=("the model alone", ".2f"),
        ms=("mixed", ".2f"), share=("of products alone", ".3f"), more=("beyond them, ms", ".2f"),
        memory=("an adapter on the device, MB", ".0f"), replayed=("steps replayed", "d"),
    )  # fmt: skip
    plain: dict[int, float] = {}
    for kind in dict.fromkeys(["products", *bench.options.kinds]):
        options, measured = PARTS[kind]
        sizes = [rows for rows in measured if rows in bench.options.rows]
        room = {"memory_fraction": 0.3} if "modules_to_save" in options else {}  # eight take 18 GB
        with (
            bench.report.surviving(kind),
            bench.engine_with(0, max(sizes), max_adapters=count, **room) as engine,
        ):
            config = peft.LoraConfig(
                **{
                    "r": RANK,
                    "lora_alpha": RANK,
                    "target_modules": TARGETS,
                    "init_lora_weights": False,
                    **options,
                }
            )
            for i in range(count):
                engine.add_adapter(f"a{i}", state_of(bench, kind, i), config)
            for rows in sizes:
                base = step_time(bench, engine, rows, 0)
                mixed = step_time(bench, engine, rows, count)
                plain.setdefault(rows, mixed)
                bench.report.row(
                    kind=kind, rows=rows, base=base, ms=mixed, share=mixed / plain[rows],
                    more=mixed - plain[rows], memory=engine.adapters()["a0"].bytes / 1e6,
                    replayed=engine.stats()["graphs"]["replayed"],
                )  # fmt: skip


IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}


def ia3_state(bench: AdapterBench, seed: int) -> dict[str, torch.Tensor]:
    """A random IA3 adapter, as peft saves it."""
    random = torch.Generator(bench.options.device).manual_seed(seed)
    found = {}
    for name, module in bench.model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in IA3["target_modules"]:
            shape = (1, module.in_features) if last == "down_proj" else (module.out_features, 1)
            scale = 1 + 0.05 * torch.randn(shape, generator=random, device=bench.options.device)
            found[f"base_model.model.{name}.ia3_l"] = scale.cpu()
    return found


def apart(bench: AdapterBench) -> None:
    """Bars: 32 rows of LoRA beside 32 of one IA3 take 1.15 of two such steps; 64 requests of 8 adapters that run
    apart take half of the time of stock's generate(), one adapter after another.
    """
    count, each = 8, 32
    new = 32
    bench.report.table(
        "adapters apart", f"Steps with adapters that peft's modules compute, prompts of {CONTEXT}, median",
        what=("rows", ""), ms=("a step, ms", ".2f"), share=("of both apart, or of stock's time", ".2f"),
    )  # fmt: skip
    with bench.engine_with(1, 2 * each, max_adapters=count + 1, max_adapter_forwards=count) as engine:
        for i in range(count):
            engine.add_adapter(f"b{i}", ia3_state(bench, i), peft.IA3Config(**IA3))
        rows = {"LoRA": [{"adapter": "a0"}] * each, "IA3": [{"adapter": "b0"}] * each}
        rows["both"] = [other for pair in zip(rows["LoRA"], rows["IA3"], strict=True) for other in pair]
        found = {
            what: statistics.median(decode_steps(bench, engine, len(others), new, others=others)) * 1e3
            for what, others in rows.items()
        }
        for what, ms in found.items():
            share = ms / (found["LoRA"] + found["IA3"]) if what == "both" else None
            bench.report.row(what=f"{len(rows[what])} of {what}", ms=ms, share=share)
        prompts = bench.prompts(8 * count, 64)
        names = [f"b{i % count}" for i in range(len(prompts))]
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            asked = [
                engine.submit(ids, adapter=name, max_new_tokens=new, min_new_tokens=new, do_sample=False)
                for ids, name in zip(prompts, names, strict=True)
            ]
            for handle in asked:
                handle.result()
            seconds.append(time.perf_counter() - begin)
    model = peft.get_peft_model(bench.model, peft.IA3Config(**IA3), adapter_name="b0")
    peft.set_peft_model_state_dict(model, ia3_state(bench, 0), adapter_name="b0")
    ids = torch.tensor(prompts[:8], device=bench.options.device)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    stock = count * min(call_time(bench, model, new, **call) for _ in range(2))
    bench.model = model.unload()
    bench.report.row(
        what=f"{len(prompts)} requests of {count}", ms=seconds[1] / new * 1e3, share=seconds[1] / stock
    )


METHODS: dict[str, Any] = {
    "IA3": lambda: peft.IA3Config(**IA3),
    "LoHa": lambda: peft.LoHaConfig(r=8, target_modules=["q_proj", "v_proj"]),
    "LoKr": lambda: peft.LoKrConfig(r=8, target_modules=["q_proj", "v_proj"]),
    "VeRA": lambda: peft.VeraConfig(r=16, target_modules=["q_proj", "v_proj"]),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=100, target_modules=["q_proj", "v_proj"]),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=16, target_modules=["q_proj", "v_proj"]),
    "HRA": lambda: peft.HRAConfig(r=8, target_modules=["q_proj", "v_proj"]),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


def several(bench: AdapterBench) -> None:
    """Bar: 64 requests of 8 kinds of adapters that run apart take half of the time of stock's generate(), one kind
    after another.
    """
    each, new = 8, 32
    prompts = bench.prompts(each * len(METHODS), 64)
    bench.report.table(
        "several methods", f"64 requests of 8 methods that peft's modules compute, {new} tokens, s",
        what=("method", ""), stock=("stock", ".2f"), engine=("engine", ".2f"), share=("of stock's", ".2f"),
    )  # fmt: skip
    made, seconds = {}, {}
    for i, (name, config) in enumerate(METHODS.items()):
        model = peft.get_peft_model(bench.model, config(), adapter_name=name)
        random = torch.Generator(bench.options.device).manual_seed(i)
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=random, device=parameter.device)
                parameter.data += 0.01 * noise.to(parameter.dtype)
        model.to(bench.model.dtype).eval()
        ids = torch.tensor(prompts[i * each : (i + 1) * each], device=bench.options.device)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        seconds[name] = min(call_time(bench, model, new, **call) for _ in range(2))
        state = peft.get_peft_model_state_dict(model, adapter_name=name)
        made[name] = {key: value.detach().cpu().clone() for key, value in state.items()}
        bench.model = model.unload()
        bench.report.row(what=name, stock=seconds[name])
    with bench.engine_with(0, len(prompts), max_adapters=8, max_adapter_forwards=8) as engine:
        for name, state in made.items():
            engine.add_adapter(name, state, METHODS[name]())
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            asked = [
                engine.submit(ids, adapter=name, max_new_tokens=new, min_new_tokens=new, do_sample=False)
                for i, name in enumerate(METHODS)
                for ids in prompts[i * each : (i + 1) * each]
            ]
            failed = [error for handle in asked if (error := handle.result().error) is not None]
            if failed:
                raise RuntimeError(f"a request failed: {failed[0]}")
            times.append(time.perf_counter() - begin)
    stock = sum(seconds.values())
    bench.report.row(what="all", stock=stock, engine=times[-1], share=times[-1] / stock)


def call_time(bench: AdapterBench, model: Any, new: int, **call: Any) -> float:
    """Seconds of a call of generate() for so many tokens."""
    bench.wait()
    begin = time.perf_counter()
    model.generate(**call, min_new_tokens=new, max_new_tokens=new)
    bench.wait()
    return time.perf_counter() - begin


def generate(bench: AdapterBench) -> None:
    count = 8
    model = peft.get_peft_model(bench.model, bench.config, adapter_name="a0", autocast_adapter_dtype=False)
    for i in range(1, count):
        model.add_adapter(f"a{i}", bench.config, autocast_adapter_dtype=False)
    model.to(bench.model.dtype).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    steps = captures_of(bench.model).pool
    bench.report.table(
        "adapters generate", f"A decoding step of generate(), prompts of {CONTEXT}, ms",
        what=("rows have", ""), rows=("rows", "d"), paged=("paged", ".2f"), stock=("stock", ".2f"),
        replayed=("steps replayed", "d"),
    )  # fmt: skip
    for what, rows in (("one", 1), ("one", 8), ("one", 64), ("mixed", 8), ("mixed", 64), ("base", 8)):
        ids = torch.tensor(bench.prompts(rows, CONTEXT), device=bench.options.device)
        call: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        if what == "mixed":
            call["adapter_names"] = [f"a{i % count}" for i in range(rows)]
        if what == "base":
            call["adapter_names"] = ["__base__"] * rows
        found = {}
        with bench.report.surviving(f"generate, {what}, {rows} rows"):
            for name, more in (("paged", {"cache_implementation": "paged"}), ("stock", {})):
                longest, rounds = (72, 4) if name == "paged" else (16, 2)
                each = [
                    (
                        call_time(bench, model, longest, **call, **more)
                        - call_time(bench, model, 8, **call, **more)
                    )
                    for _ in range(rounds)
                ]
                found[name] = statistics.median(each[1:]) / (longest - 8) * 1e3
        bench.report.row(what=what, rows=rows, replayed=steps.counts["replayed"], **found)
    for reason in dict.fromkeys(steps.reasons.values()):
        print(f"a step is not captured: {reason}", flush=True)
    bench.__dict__["model"] = model.unload()


def run_trace(bench: AdapterBench) -> None:
    count, requests, at_once = 32, bench.options.requests, 256
    bench.report.table(
        "adapters trace", f"{requests} requests of the sharegpt trace, {at_once} at once, output tokens a second",
        adapters=("adapters", "d"), speed=("tok/s, second run", ".0f"), first=("tok/s, first run", ".0f"),
        share=("of the base's", ".2f"),
    )  # fmt: skip
    vocabulary = SHAPES[bench.options.shape]["vocab_size"]
    traces = [trace("sharegpt", requests, vocabulary, seed=seed) for seed in (1, 0)]
    base = None
    for adapters in (0, count):
        speeds = []
        with (
            bench.report.surviving(f"trace, {adapters} adapters"),
            bench.engine_with(adapters, at_once) as engine,
        ):
            for asks in traces:
                begin = time.perf_counter()
                handles = [
                    engine.submit(
                        ask.prompt, max_new_tokens=ask.new, do_sample=False,
                        adapter=adapter_of(i, adapters),
                    )
                    for i, ask in enumerate(asks)
                ]  # fmt: skip
                made = sum(len(handle.result().sequences[0].token_ids) for handle in handles)
                speeds.append(made / (time.perf_counter() - begin))
            base = base or speeds[1]
            bench.report.row(adapters=adapters, speed=speeds[1], first=speeds[0], share=speeds[1] / base)


def first_token(bench: AdapterBench) -> None:
    bench.report.table(
        "adapters first token", "A request whose adapter is on the host, prompts of 64, ms to its first token, median of 5",
        what=("", ""), ms=("ms", ".1f"),
    )  # fmt: skip
    prompts = bench.prompts(40, 64)
    with bench.engine_with(16, 8, max_adapters=1) as engine:
        for what in ("the base's", "adapter on the device", "adapter on the host"):
            found = []
            for i in range(8):
                adapter = {"t": None, "a": "a0"}[what[0]] if "host" not in what else f"a{1 + i}"
                begin = time.perf_counter()
                engine.generate([prompts.pop()], max_new_tokens=1, adapter=adapter)
                found.append((time.perf_counter() - begin) * 1e3)
            bench.report.row(what=what, ms=statistics.median(found[3:]))


def kernel_table(
    outs: list[int], n: int, slots: int, rank: int, dtype: torch.dtype
) -> tuple[object, list[torch.Tensor]]:
    """Random adapters of the layers with one input, and the tensors that hold them."""
    import hf_paged_kernels as kernels

    found = kernels.LoraWeights(len(outs), slots, rank, dtype, "cuda")
    kept = []
    for layer, out in enumerate(outs):
        a = torch.randn(slots, rank, n, dtype=dtype, device="cuda") * 0.01
        b = torch.randn(slots, out, rank, dtype=dtype, device="cuda") * 0.01
        for slot in range(slots):
            found.put(layer, slot, a[slot], b[slot], 1.0)
        kept += [a, b]
    found.upload()
    return found, kept


def kernel_step(rows: int, adapters: int, slots: int, rank: int, dtype: torch.dtype) -> float:
    """Milliseconds of the kernels of a step."""
    import hf_paged_kernels as kernels

    tables = [
        (n, outs, *kernel_table(outs, n, slots, rank, dtype)) for _ in range(LAYERS) for n, outs in INPUTS
    ]
    inputs = {n: torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for n in (HIDDEN, INNER)}
    outputs = {n: torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda") for n in (HIDDEN, KEYS, INNER)}
    index = [row % adapters if adapters else -1 for row in range(rows)]
    chosen = torch.tensor(index, dtype=torch.int32, device="cuda")
    plan = kernels.AdapterPlan(rows, slots, "cuda")

    def step() -> None:
        plan.update(chosen)
        for n, outs, weights, _ in tables:
            shrunk = kernels.lora_shrink(inputs[n], weights, plan)
            kernels.lora_expand([outputs[out] for out in outs], shrunk, weights, plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(13):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def kernel_steps(bench: AdapterBench) -> None:
    bench.report.table(
        "adapters kernels", "The kernels of a step alone, in one CUDA graph",
        rows=("rows", "d"), adapters=("adapters", "d"), slots=("slots", "d"), type=("type", ""), ms=("ms", ".2f"),
    )  # fmt: skip
    for cases, dtype in ((CASES, torch.bfloat16), (WIDE_CASES, torch.float32)):
        for rows, adapters, slots in cases:
            found = kernel_step(rows, adapters, slots, RANK, dtype)
            name = str(dtype).removeprefix("torch.")
            bench.report.row(rows=rows, adapters=adapters, slots=slots, type=name, ms=found)
            torch.cuda.empty_cache()


SECTIONS = {
    "steps": steps, "parts": parts, "apart": apart, "several": several, "generate": generate, "trace": run_trace, "first_token": first_token, "kernels": kernel_steps,
}  # fmt: skip


def main() -> None:
    parser = common_parser(__doc__, SECTIONS, engine=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 8, 64])
    parser.add_argument("--kinds", nargs="+", choices=PARTS, default=list(PARTS), help="of the section parts")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--layers", type=int, help="of the model, if not all of its shape")
    options = parser.parse_args()
    if options.layers is not None:
        SHAPES[options.shape]["num_hidden_layers"] = options.layers
    report = report_of(options)
    report.run(SECTIONS, options.sections, AdapterBench(options, report))


if __name__ == "__main__":
    main()
