"""Rollouts of a trainer, on the model that it trains: 8B Llama shape, random weights, bfloat16, lengths forced.

    python benchmarks/rollouts.py --json results.jsonl         # every section; about six minutes on an H200
    OMP_NUM_THREADS=1 python benchmarks/rollouts.py --shape tiny   # does it run? on any CPU, in a minute

equal     each prompt as several adjacent rows, as trainers give them: seconds of a sampled call, beside
          num_return_sequences and stock's cache, in eval and in training mode
loop      iterations of rollout, loss and optimizer step with LoRA: seconds of every part and bytes, with pools
          that stay and with pools that training takes
engine    output tokens a second of the engine with and without log-probabilities, and with repeated rows in
          generate()
batch     `model.generate_batch` on transformers' engine and on this one
vllm      the rows of `engine` by vLLM on the same card, where it is installed
weights   seconds and bytes of pause, new weights, sleep and wake_up
invariant what batch_invariant costs the sampler, generate() and the trainer's forward, and the largest
          difference of log-probabilities between sampler and trainer
forward   what it costs a micro-batch of the trainer's forward: by the clock, of kernels, and how many operations
          come to its code in Python
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peers import Vllm
from shapes import Report, build, common_parser, report_of
from torch.profiler import ProfilerActivity, profile

import hf_paged
from hf_paged import Engine
from hf_paged.model.registry import memory_of

EQUAL_BAR = 0.80
"""Seconds of 16 prompts of 512 tokens as 8 rows each, 64 new tokens, sampled, 8B on an H200."""
SECOND_BAR = 0.95
"""The speed of the second rollout, of the tenth's."""
LOGPROBS_BAR = 0.97


class Bench:
    """One model, and how its rollouts are sampled."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self.model: Any = build(options.shape, options.device, getattr(torch, options.dtype))
        self.model.generation_config.pad_token_id = 0
        self.model.generation_config.eos_token_id = None
        self.on_gpu = self.model.device.type == "cuda"
        self._calls = 1

    def prompts(self, count: int, tokens: int, seed: int = 1) -> torch.Tensor:
        """Random ids [count, tokens], the same at every call with this seed."""
        random = torch.Generator(self.model.device).manual_seed(seed)
        return torch.randint(10, 1000, (count, tokens), device=self.model.device, generator=random)

    def new_prompts(self, count: int, tokens: int) -> torch.Tensor:
        """Others at every call. Engines would find known ones in their prefix caches, where a trainer's step
        between two rollouts drops them.
        """
        self._calls += 1
        return self.prompts(count, tokens, self._calls)

    def timed(self, call: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, float]:
        """What a call answers, and how long it takes with the device's work."""
        self.synchronize()
        begin = time.perf_counter()
        answer = call(*args, **keywords)
        self.synchronize()
        return answer, time.perf_counter() - begin

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long a call takes, with the device's work."""
        return self.timed(call)[1]

    def sampled(self, model: Any, ids: torch.Tensor, new: int, word: str | None, **arguments: Any) -> Any:
        """One sampled call, as TRL makes it."""
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=new,
            disable_compile=True,
            **({"cache_implementation": word} if word else {}),
            **arguments,
        )

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    @property
    def allocated(self) -> int:
        """Bytes of tensors on the device; of the pools alone on a CPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else memory_of(self.model).bytes

    def rest(self) -> None:
        """Give back all memory that is idle."""
        gc.collect()
        hf_paged.release(self.model)
        if self.on_gpu:
            torch.cuda.empty_cache()

    def bar(self, met: bool) -> dict[str, str]:
        """Whether a bar is met, where that means something."""
        return {"met": "yes" if met else "**no**"} if self.options.shape == "llama8b" else {}


# ---- equal rows


def equal(bench: Bench) -> None:
    """16 x 8 rows, four ways."""
    prompts, copies, tokens, new = bench.options.equal
    ids = bench.prompts(prompts, tokens)
    repeated = ids.repeat_interleave(copies, 0)
    ways: dict[str, Callable[[], Any]] = {
        "paged, equal rows": lambda: bench.sampled(bench.model, repeated, new, "paged"),
        "paged, equal rows, shuffled": lambda: bench.sampled(
            bench.model, repeated[torch.randperm(len(repeated), device=ids.device)], new, "paged"
        ),
        "paged, num_return_sequences": lambda: bench.sampled(
            bench.model, ids, new, "paged", num_return_sequences=copies
        ),
        "stock, equal rows": lambda: bench.sampled(bench.model, repeated, new, None),
    }
    bench.report.table(
        "equal",
        f"{prompts} prompts of {tokens} tokens as {copies} rows each, {new} new, sampled",
        way=("way", ""), mode=("mode", ""), first=("first s", ".2f"), seconds=("s", ".3f"), met=("met", ""),
    )  # fmt: skip
    for mode in ("eval", "training"):
        bench.model.train(mode == "training")
        bench.rest()
        for way, call in ways.items():
            if mode == "training" and way not in ("paged, equal rows", "stock, equal rows"):
                continue
            with bench.report.surviving(f"equal, {way}, {mode}"):
                first = bench.seconds(call)
                times = [bench.seconds(call) for _ in range(bench.options.rounds)]
                seconds = statistics.median(times)
                met = bench.bar(seconds <= EQUAL_BAR) if way == "paged, equal rows" else {}
                bench.report.row(way=way, mode=mode, first=first, seconds=seconds, times=times, **met)
    bench.model.eval()


# ---- rollout, loss, step


@contextmanager
def adapted(model: Any) -> Any:
    """The model with a LoRA adapter that learns, in training mode."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    try:
        yield adapted.train()
    finally:
        adapted.unload()
        model.requires_grad_(True).eval()


def loss_of(model: Any, rows: torch.Tensor, prompt: int, micro: int) -> None:
    """Gradients of REINFORCE over all rows, in micro-batches."""
    for part in rows.split(micro):
        logits = model(input_ids=part, use_cache=False, logits_to_keep=part.shape[1] - prompt + 1).logits
        chosen = logits[:, :-1].float().log_softmax(-1).gather(-1, part[:, prompt:, None])[..., 0]
        (-(chosen * torch.randn(len(part), 1, device=part.device)).mean()).backward()


def loop(bench: Bench) -> None:
    """Iterations of rollout, loss and step: the second rollout must be as fast as the tenth."""
    prompts, copies, tokens, new = bench.options.loop
    ids = bench.prompts(prompts, tokens).repeat_interleave(copies, 0)
    bench.report.table(
        "loop",
        f"{prompts} x {copies} rows, {tokens} + {new} tokens, LoRA r16, micro-batches of {bench.options.micro}",
        pools=("keep_pools", ""), iteration=("iteration", "d"), rollout=("rollout s", ".3f"),
        loss=("loss s", ".3f"), step=("step s", ".3f"), allocated=("bytes", ",d"), pool=("pool bytes", ",d"),
    )  # fmt: skip
    for keep in (None, False):
        bench.rest()
        with bench.report.surviving(f"loop, keep_pools={keep}"), adapted(bench.model) as model:
            optimizer = torch.optim.AdamW(
                [each for each in model.parameters() if each.requires_grad], lr=1e-4
            )
            rollouts = []
            options = {"cache_config": {"keep_pools": keep}}
            for iteration in range(1, bench.options.iterations + 1):
                rows, roll = bench.timed(bench.sampled, model, ids, new, "paged", **options)
                _, loss = bench.timed(loss_of, model, rows, tokens, bench.options.micro)
                _, step = bench.timed(optimizer.step)
                optimizer.zero_grad(set_to_none=True)
                rollouts.append(roll)
                bench.report.row(
                    pools=str(keep), iteration=iteration, rollout=roll, loss=loss, step=step,
                    allocated=bench.allocated, pool=memory_of(bench.model).bytes,
                )  # fmt: skip
            speed = statistics.median(rollouts[-3:]) / rollouts[1]
            print(
                f"keep_pools={keep}: the second rollout has {speed:.2f} of the last ones' speed", flush=True
            )
            if keep is None and bench.options.shape == "llama8b":
                print("bar met" if speed >= SECOND_BAR else f"BAR MISSED: {SECOND_BAR}", flush=True)


# ---- the engine


def engine(bench: Bench) -> None:
    """Tokens a second with and without log-probabilities, and of generate() over the same rows."""
    prompts, copies, tokens, new = bench.options.engine_rows
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0}
    total = prompts * copies * new
    bench.report.table(
        "engine",
        f"{prompts} prompts of {tokens} x {copies} samples x {new} new, temperature 1",
        way=("way", ""), seconds=("s", ".2f"), rate=("tok/s", ",.0f"), share=("of the engine", ".2f"),
        met=("met", ""),
    )  # fmt: skip
    bench.rest()
    rows = prompts * copies
    own = Engine(bench.model, max_batch_sequences=rows, max_batch_tokens=max(2048, 2 * rows))
    plain = 0.0
    with own:
        for way, options in (("engine", {}), ("engine, logprobs", {"logprobs": True})):
            with bench.report.surviving(f"engine, {way}"):

                def call(options: dict[str, Any] = options) -> Any:
                    return own.generate(
                        bench.new_prompts(prompts, tokens).tolist(),
                        num_return_sequences=copies,
                        progress=False,
                        strict=True,
                        **asked,
                        **options,
                    )

                call()
                seconds = statistics.median(bench.seconds(call) for _ in range(bench.options.rounds))
                plain = plain or seconds
                met = bench.bar(plain / seconds >= LOGPROBS_BAR) if options else {}
                bench.report.row(way=way, seconds=seconds, rate=total / seconds, share=plain / seconds, **met)
    bench.rest()
    with bench.report.surviving("engine, generate()"):

        def repeated() -> Any:
            ids = bench.new_prompts(prompts, tokens).repeat_interleave(copies, 0)
            return bench.sampled(bench.model, ids, new, "paged")

        repeated()
        seconds = statistics.median(bench.seconds(repeated) for _ in range(bench.options.rounds))
        bench.report.row(
            way="generate(), equal rows", seconds=seconds, rate=total / seconds, share=plain / seconds,
            **bench.bar(plain / seconds >= 0.85),
        )  # fmt: skip


def batch(bench: Bench) -> None:
    """transformers' generate_batch, its own and ours."""
    from transformers import GenerationConfig

    prompts, copies, tokens, new = bench.options.engine_rows
    config = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    bench.report.table(
        "batch",
        f"generate_batch: {prompts} x {copies} rows, {tokens} + {new} tokens",
        way=("way", ""), first=("first s", ".2f"), seconds=("s", ".2f"), rate=("tok/s", ",.0f"),
    )  # fmt: skip
    for way, ours in (("ours", True), ("transformers", False)):
        if not ours and not bench.on_gpu:
            continue  # its own takes a minute to begin on a CPU
        bench.rest()
        with bench.report.surviving(f"batch, {way}"):
            hf_paged.install(generate_batch=ours)

            def call() -> Any:
                ids = bench.new_prompts(prompts, tokens).repeat_interleave(copies, 0).tolist()
                return bench.model.generate_batch(ids, generation_config=config, progress_bar=False)

            try:
                first = bench.seconds(call)
                seconds = statistics.median(bench.seconds(call) for _ in range(bench.options.rounds))
            finally:
                hf_paged.install(generate_batch=False)
            rate = prompts * copies * new / seconds
            bench.report.row(way=way, first=first, seconds=seconds, rate=rate)


def vllm(bench: Bench) -> None:
    """The same samples by vLLM, with and without log-probabilities."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here", flush=True)
        return
    prompts, copies, tokens, new = bench.options.engine_rows
    bench.report.table(
        "vllm",
        f"vLLM: {prompts} prompts of {tokens} x {copies} samples x {new} new, temperature 1",
        way=("way", ""), seconds=("s", ".2f"), rate=("tok/s", ",.0f"),
    )  # fmt: skip
    bench.rest()
    # All rows at once, beside the model that it copies.
    peer = Vllm(bench.model, at_once=prompts * copies, gpu_memory_utilization=0.75)
    for way, logprobs in (("vLLM", False), ("vLLM, logprobs", True)):
        with bench.report.surviving(way):

            def call(logprobs: bool = logprobs) -> None:
                peer.sample(bench.new_prompts(prompts, tokens).tolist(), copies, new, logprobs)

            call()
            seconds = statistics.median(bench.seconds(call) for _ in range(bench.options.rounds))
            bench.report.row(way=way, seconds=seconds, rate=prompts * copies * new / seconds)
    peer.close()


# ---- weights that change


def weights(bench: Bench) -> None:
    """What a training loop asks of a running engine."""
    prompts, _, tokens, new = bench.options.engine_rows
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    bench.report.table(
        "weights",
        "an engine between rollouts",
        act=("act", ""),
        seconds=("s", ".4f"),
        allocated=("bytes", ",d"),
    )
    bench.rest()
    ids = bench.prompts(prompts, tokens).tolist()
    with Engine(bench.model, max_batch_sequences=prompts) as own:
        own.generate(ids, progress=False, strict=True, **asked)
        copied = [(name, each.detach().clone()) for name, each in bench.model.named_parameters()][:8]
        acts: dict[str, Callable[[], Any]] = {
            "rollout": lambda: own.generate(ids, progress=False, strict=True, **asked),
            "pause": own.pause,
            "weights_changed": own.weights_changed,
            "resume": own.resume,
            "rollout again": lambda: own.generate(ids, progress=False, strict=True, **asked),
            "load_weights": lambda: own.load_weights(copied),
            "sleep": own.sleep,
            "wake_up": own.wake_up,
            "rollout after it": lambda: own.generate(ids, progress=False, strict=True, **asked),
            "and once more": lambda: own.generate(ids, progress=False, strict=True, **asked),
        }
        for act, do in acts.items():
            bench.report.row(act=act, seconds=bench.seconds(do), allocated=bench.allocated)


# ---- batch-invariant arithmetic


def logprobs_of(model: Any, rows: torch.Tensor, prompt: int, micro: int) -> torch.Tensor:
    """The log-probabilities [rows, new] of a trainer's forwards, with gradients."""
    found = []
    for part in rows.split(micro):
        logits = model(input_ids=part, use_cache=False).logits[:, prompt - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(-1, part[:, prompt:, None])[..., 0].detach())
    return torch.cat(found)


def invariant(bench: Bench) -> None:
    """The same work with the mode off and on: the engine with all rows and with fewer, a trainer's forward over
    the answers, and generate() with samples of the first prompts.
    """
    prompts, copies, tokens, new = bench.options.engine_rows
    ids = bench.prompts(prompts, tokens)
    few = ids[: max(1, 32 // copies)]
    micro = bench.options.micro
    bench.report.table(
        "invariant",
        f"{prompts} prompts of {tokens} x {copies} samples x {new} new, temperature 1, with log-probabilities; the "
        f"trainer's forward in micro-batches of {micro}",
        what=("", ""), off=("off, s", ".3f"), on=("on, s", ".3f"), cost=("cost", ".1%"), first=("first calls, s", ""),
        off_calls=("calls off, s", ""), on_calls=("calls on, s", ""),
    )  # fmt: skip
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "logprobs": True}
    times: dict[str, dict[bool, list[float]]] = {}
    off: dict[bool, torch.Tensor] = {}

    def measure(what: str, mode: bool, call: Callable[[], Any]) -> Any:
        """The answer of the first call; its seconds and those of the others are kept."""
        answer, first = bench.timed(call)
        later = [bench.seconds(call) for _ in range(bench.options.rounds)]
        times.setdefault(what, {})[mode] = [first, *later]
        return answer

    for mode in (False, True):
        context = hf_paged.batch_invariant if mode else nullcontext
        for rows in sorted({prompts * copies, 64, 8, 1}, reverse=True):
            if rows > prompts * copies:
                continue
            bench.rest()
            own = ids[: max(1, rows // copies)].tolist()
            limits = {"max_batch_sequences": rows, "max_batch_tokens": max(2048, 2 * rows)}
            with Engine(bench.model, batch_invariant=mode, **limits) as engine:

                def call(engine: Engine = engine, own: Any = own, rows: int = rows) -> Any:
                    return engine.generate(
                        own, num_return_sequences=min(rows, copies), progress=False, strict=True, **asked
                    )

                outputs = measure(f"engine, {rows} rows", mode, call)
            if rows == prompts * copies:
                sequences = [each for output in outputs for each in output.sequences]
        bench.rest()
        answers = torch.tensor([list(each.token_ids) for each in sequences], device=ids.device)
        full = torch.cat([ids.repeat_interleave(copies, 0), answers], 1)
        theirs = torch.tensor([[token.logprob for token in each.logprobs or ()] for each in sequences])

        def forward(full: torch.Tensor = full, context: Any = context) -> Any:
            with context():
                return logprobs_of(bench.model, full, tokens, micro)

        off[mode] = (measure("trainer's forward", mode, forward).cpu() - theirs).abs()
        for word in ("paged", None):

            def generate(word: str | None = word, context: Any = context) -> Any:
                with context():
                    return bench.sampled(bench.model, few, new, word, num_return_sequences=copies)

            bench.rest()
            measure(f"{word or 'stock'} generate(), {len(few) * copies} rows", mode, generate)
    for what, by_mode in times.items():
        (first_off, *off_calls), (first_on, *on_calls) = by_mode[False], by_mode[True]
        plain, exact = statistics.median(off_calls), statistics.median(on_calls)
        bench.report.row(
            what=what, off=plain, on=exact, cost=exact / plain - 1, first=f"{first_off:.2f} / {first_on:.2f}",
            off_calls=", ".join(f"{each:.3f}" for each in off_calls),
            on_calls=", ".join(f"{each:.3f}" for each in on_calls),
        )  # fmt: skip
    for mode, differences in off.items():
        print(
            f"mode {'on' if mode else 'off'}: log-probabilities of sampler and trainer differ by up to "
            f"{differences.max().item():.1e}, {(differences > 0).float().mean().item():.1%} of them at all",
            flush=True,
        )


def kernel_seconds(call: Callable[[], Any]) -> float:
    """The time of a call's kernels on the device."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in found.key_averages()) / 1e6


def seen_operations(call: Callable[[], Any]) -> int:
    """How many operations come to a mode's code in Python."""
    seen = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        seen[0] += event == "call" and frame.f_code.co_name == "__torch_dispatch__"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen[0]


def forward(bench: Bench) -> None:
    """Two micro-batches of a trainer's forward, six times with the mode off and on."""
    _, _, tokens, new = bench.options.engine_rows
    micro = bench.options.micro
    rows = bench.prompts(2 * micro, tokens + new)
    bench.report.table(
        "forward",
        f"the trainer's forward with gradients, a micro-batch of {micro} x {tokens + new} tokens",
        mode=("batch_invariant", ""), first=("first call, s", ".2f"), ms=("ms, median", ".1f"), cost=("cost", ".1%"),
        kernels=("kernels, ms", ".1f"), seen=("operations seen in Python", "d"),
    )  # fmt: skip
    plain = 0.0
    for mode in (False, True):

        def call(mode: bool = mode) -> Any:
            with hf_paged.batch_invariant() if mode else nullcontext():
                return logprobs_of(bench.model, rows, tokens, micro)

        first = bench.seconds(call)
        ms = statistics.median(bench.seconds(call) for _ in range(6)) / 2 * 1e3
        plain = plain or ms
        kernels = kernel_seconds(call) / 2 * 1e3 if bench.on_gpu else None
        seen = seen_operations(call) // 2
        name = "on" if mode else "off"
        bench.report.row(mode=name, first=first, ms=ms, cost=ms / plain - 1, kernels=kernels, seen=seen)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "equal": equal,
    "loop": loop,
    "engine": engine,
    "batch": batch,
    "weights": weights,
    "invariant": invariant,
    "forward": forward,
    "vllm": vllm,  # last: it keeps its share of the memory
}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, SECTIONS)
    shape = {"nargs": 4, "type": int, "metavar": ("PROMPTS", "COPIES", "TOKENS", "NEW")}
    parser.add_argument("--equal", **shape)
    parser.add_argument("--loop", **shape)
    parser.add_argument("--engine-rows", **shape)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--micro", type=int, default=4, help="rows of a micro-batch of the loss")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tiny = options.shape == "tiny"
    options.equal = options.equal or ([4, 4, 64, 16] if tiny else [16, 8, 512, 64])
    options.loop = options.loop or ([2, 4, 32, 24] if tiny else [16, 8, 512, 128])
    options.engine_rows = options.engine_rows or ([4, 4, 32, 16] if tiny else [64, 8, 512, 512])
    return options


def main() -> None:
    options = parse()
    report = report_of(options)
    report.run(SECTIONS, options.sections, Bench(options, report))


if __name__ == "__main__":
    main()
