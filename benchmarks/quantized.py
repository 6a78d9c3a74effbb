"""Quantized models in generate(): whether steps are captured, what a step takes, whether the tokens are stock's.

    python benchmarks/quantized.py --device cuda                       # the table of docs/benchmarks.md, 8B shape
    python benchmarks/quantized.py --shape small --rows 1 --new 24     # does it run? on any CPU
    python benchmarks/quantized.py --formats torchao-int8 --kernels    # with the kernels that a step spends its time in

One line a format. A format whose library is not installed says so. Times are medians of a greedy step's, on the
prompt's context of 384 tokens; stock's steps come from the same process. "tokens" is the verdict of
`hf_paged.check_mismatch`: equal, or different only where the top two tokens are closer than rounding error.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from decode import Clock
from shapes import SHAPES, build, line, where
from torch import nn
from transformers import LogitsProcessorList

import hf_paged
from hf_paged.model.capture.replay import captures_of
from hf_paged.model.registry import base_model

CONTEXT = 384
GROUP = 128
"""Weights that share a scale, where a format has groups."""


def torchao(name: str, **options: Any) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import torchao.quantization as quantization

        quantization.quantize_(model.model, getattr(quantization, name)(**options))

    return quantize


def replaced(made: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Module], None]:
    """Every linear layer of the decoder as another one."""

    def quantize(model: nn.Module) -> None:
        for module in list(model.model.modules()):
            for name, layer in list(module.named_children()):
                if type(layer) is nn.Linear:
                    setattr(module, name, made(layer))

    return quantize


def four_bits(layer: nn.Linear, kind: str, double: bool) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype,
        compress_statistics=double, quant_type=kind,
    )  # fmt: skip
    made.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data.cpu(), requires_grad=False, quant_type=kind, compress_statistics=double
    )
    return made.to(layer.weight.device)


def eight_bits(layer: nn.Linear, threshold: float) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear8bitLt(
        layer.in_features, layer.out_features, bias=False, has_fp16_weights=False, threshold=threshold
    )
    made.weight = bitsandbytes.nn.Int8Params(
        layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False
    )
    return made.to(layer.weight.device)


def hqq(layer: nn.Linear) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    config["weight_quant_params"]["optimize"] = False
    return HQQLinear(layer, config, compute_dtype=layer.weight.dtype, device=str(layer.weight.device))


FORMATS: dict[str, Callable[[nn.Module], None]] = {
    "bf16": lambda model: None,
    "bitsandbytes-int8": replaced(lambda layer: eight_bits(layer, 0.0)),
    "bitsandbytes-int8-outliers": replaced(lambda layer: eight_bits(layer, 6.0)),
    "bitsandbytes-nf4": replaced(lambda layer: four_bits(layer, "nf4", False)),
    "bitsandbytes-fp4": replaced(lambda layer: four_bits(layer, "fp4", False)),
    "bitsandbytes-nf4-double": replaced(lambda layer: four_bits(layer, "nf4", True)),
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-int8-dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-int4": torchao(
        "Int4WeightOnlyConfig", group_size=GROUP, int4_packing_format="tile_packed_to_4d"
    ),
    "torchao-float8": torchao("Float8WeightOnlyConfig"),
    "torchao-float8-dynamic": torchao("Float8DynamicActivationFloat8WeightConfig"),
    "hqq-4": replaced(hqq),
}


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()


def step_of(model: Any, rows: int, paged: bool, options: argparse.Namespace) -> float:
    """Milliseconds of a step: the median of a call behind one that warms up."""
    ids = torch.randint(
        10,
        1000,
        (rows, CONTEXT),
        device=options.device,
        generator=torch.Generator(options.device).manual_seed(1),
    )
    word = {"cache_implementation": "paged"} if paged else {}
    for _ in range(2):
        clock = Clock(torch.device(options.device), time.perf_counter)
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new, min_new_tokens=options.new,
            do_sample=False, logits_processor=LogitsProcessorList([clock]), pad_token_id=0, **word,
        )  # fmt: skip
    return statistics.median(clock.steps) * 1e3


def kernels_of(model: Any, rows: int, options: argparse.Namespace) -> list[tuple[str, float]]:
    """The kernels of a paged step by the milliseconds that they take."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step_of(model, rows, True, options)
    several = [(each.key, each.device_time_total / 1e3 / 2 / options.new) for each in found.key_averages()]
    return sorted(several, key=lambda each: -each[1])[:10]


def tokens_of(model: Any, options: argparse.Namespace) -> str:
    """Whether the tokens of four rows are stock's."""
    ids = torch.randint(10, 1000, (4, 32), device=options.device)
    report = hf_paged.check_mismatch(model, ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    return "ok" if report.ok else "DIFFER"


def against_itself(model: Any, options: argparse.Namespace) -> str:
    """Stock's four rows together beside each alone: how far the logits lie apart, of the largest, and the first
    token of each row that differs.
    """
    chance = torch.Generator(options.device).manual_seed(3)
    ids = torch.randint(10, 1000, (4, 32), device=options.device, generator=chance)
    with torch.no_grad():
        together = model(ids, use_cache=False).logits[:, -1].float()
        alone = torch.cat([model(row[None], use_cache=False).logits[:, -1].float() for row in ids])
    apart = ((together - alone).abs().max() / together.abs().max()).item()
    asked = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    batch = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
    rows = [
        model.generate(input_ids=row[None], attention_mask=torch.ones_like(row[None]), **asked)[0]
        for row in ids
    ]
    firsts = [(one != other).nonzero().flatten()[:1].tolist() for one, other in zip(batch, rows, strict=True)]
    return (
        f"stock beside itself: {apart:.3f}, first other tokens {[[i - 32 for i in each] for each in firsts]}"
    )


def cells(model: Any, options: argparse.Namespace) -> str:
    """The columns of a model: stock's and paged milliseconds for each count of rows, captures, the verdict."""
    found = []
    for rows in options.rows:
        found += [
            f"{step_of(model, rows, False, options):8.2f}",
            f"{step_of(model, rows, True, options):8.2f}",
        ]
    pool = captures_of(base_model(model)).pool
    graphs = f"{pool.stats()['captured']}/{pool.stats()['replayed']}"
    why = [reason[:80] for reason in pool.reasons.values()][:1]
    return " | ".join([*found, f"{graphs:>8}", tokens_of(model, options), *why])


def measure(name: str, options: argparse.Namespace) -> None:
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    model: Any = build(options.shape, options.device, getattr(torch, options.dtype), **layers)
    FORMATS[name](model)
    torch.manual_seed(0)
    print(f"{name:28} | {cells(model, options)}", flush=True)
    if options.itself:
        print(f"    {against_itself(model, options)}", flush=True)
    if options.kernels:
        for kernel, took in kernels_of(model, options.rows[0], options):
            print(f"    {took:7.3f} ms  {kernel[:100]}", flush=True)
    if options.lora:
        print(f"{name + ' + LoRA':28} | {cells(with_lora(model), options)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--itself", action="store_true", help="stock's rows together beside each alone, too")
    parser.add_argument("--lora", action="store_true", help="each format under a LoRA adapter, too")
    parser.add_argument(
        "--kernels", action="store_true", help="the ten kernels that a step spends its time in"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(line(where(options.device)))
    columns = [f"{side}, {rows}" for rows in options.rows for side in ("stock", "paged")]
    print(f"{'format':28} | " + " | ".join(f"{each:>8}" for each in columns) + " | captured | tokens")
    for name in options.formats:
        try:
            measure(name, options)
        except Exception as error:
            print(f"{name:28} | {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
