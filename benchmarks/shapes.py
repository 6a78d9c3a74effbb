"""What the benchmarks of generate() share: the shapes of the models, where they ran, and the tables of what
they found.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_paged

QWEN_LINEAR = {
    "model_type": "qwen3_5_text",
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "vocab_size": 151936,
}
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 8192,
}
DENSE_GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "mlp_bias": False,
    "sliding_window": 128,
}
DENSE = ("gpt_oss_wide", "gpt_oss_dense_tiny")
"""Shapes of mixtures whose layers get Llama's feed-forward layer in the place of their experts. What is left is gpt-oss's own:
attention with a sink of each head and biases, of 128 tokens in every other layer.
"""
WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    },
    "llama1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    **{f"{family}_wide": {**WIDE, "model_type": family} for family in ("llama", "glm4", "phi3", "olmo3")},
    "gemma4_wide": {
        **WIDE,
        "model_type": "gemma4_text",
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss_wide": {**WIDE, **DENSE_GPT_OSS},
    "gpt_oss_dense_tiny": {
        **DENSE_GPT_OSS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
    },
    "qwen_tiny": {
        **QWEN_LINEAR,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 2048,
    },
    "qwen1b": {
        **QWEN_LINEAR,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen8b": {
        **QWEN_LINEAR,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "qwen30b_a3b": QWEN_MOE,
    "qwen30b_a3b_half": {**QWEN_MOE, "num_hidden_layers": 24},
    "gpt_oss_20b": GPT_OSS,
    "gpt_oss_20b_half": {**GPT_OSS, "num_hidden_layers": 12},
    "qwen_moe_tiny": {
        **QWEN_MOE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 2048,
    },
}
"""Llama's; 16 layers of 8B width in other families' code; Qwen3.5's, of which every fourth layer is attention and the
others are linear; and mixtures of experts, also with half of their layers.
"""


class FeedForward(nn.Module):
    """Llama's feed-forward layer where a layer expects a mixture's answer and its scores."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config.hidden_act = "silu"
        self.dense = LlamaMLP(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.dense(hidden_states), None


def build(shape: str, device: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """A model of the shape with random weights, made on the device; `changes` go into its configuration."""
    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape], **changes})
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
            if shape in DENSE:
                for layer in model.model.layers:
                    layer.mlp = FeedForward(config).eval()
            for module in model.modules():
                if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                    # Scores of this size come from trained weights, where the code divides them by nothing.
                    module.q_norm.weight.fill_(len(module.q_norm.weight) ** -0.5)
            return model
    finally:
        torch.set_default_dtype(torch.float32)


def where(device: str) -> dict[str, str]:
    """The hardware, the versions and the day, for the line that goes with every table."""
    on_gpu = torch.device(device).type == "cuda"
    name = (
        torch.cuda.get_device_name(device)
        if on_gpu
        else f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"
    )
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "hardware": name,
        "torch": torch.__version__,
        "triton": triton,
        "transformers": transformers.__version__,
        "hf_paged": hf_paged.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def line(place: dict[str, str]) -> str:
    """`where` as one line."""
    versions = [f"{name} {place[name]}" for name in ("torch", "triton", "transformers", "hf_paged")]
    return ", ".join([place["hardware"], *versions, place["date"]])


class Report:
    """Tables on the screen, JSON lines in a file. What fails is noted and does not stop the rest."""

    def __init__(self, place: dict[str, str], extra: dict[str, Any], path: Path | None) -> None:
        self.place, self.extra, self.path = place, extra, path
        self.columns: dict[str, tuple[str, str]] = {}
        self.failed: list[str] = []

    def table(self, section: str, title: str, **columns: tuple[str, str]) -> None:
        """Begin a table: for each column's key its heading and its format."""
        self.section, self.columns = section, columns
        print(f"\n{title}\n\n{line(self.place)}\n", flush=True)
        print(
            "| "
            + " | ".join(heading for heading, _ in columns.values())
            + " |\n"
            + "|---" * len(columns)
            + "|",
            flush=True,
        )

    def row(self, **values: Any) -> None:
        """Print the values that have a column, and keep all of them."""
        shown = [values.get(key) for key in self.columns]
        cells = [
            "" if value is None else format(value, how)
            for value, (_, how) in zip(shown, self.columns.values(), strict=True)
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps({"section": self.section, **values, **self.extra, **self.place}), file=file)

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """Go on after whatever happens in here."""
        try:
            yield
        except Exception as error:
            self.failed.append(what)
            print(f"FAILED {what}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-5)

    def run(self, sections: Mapping[str, Callable[[Any], None]], names: Iterable[str], bench: Any) -> None:
        """The sections of these names, one after another, whatever happens in one of them."""
        for name in names:
            with self.surviving(name):
                sections[name](bench)
        self.end()

    def end(self) -> None:
        """Leave with an error if anything has failed."""
        if self.failed:
            sys.exit(f"failed: {'; '.join(self.failed)}")


def common_parser(
    about: str | None, sections: Iterable[str] = (), engine: bool = False
) -> argparse.ArgumentParser:
    """The options that benchmarks have in common; `engine`: whether they take an engine's."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu, names = torch.cuda.is_available(), list(sections)
    if names:
        parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b" if on_gpu else "tiny")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    if engine:
        parser.add_argument(
            "--engine",
            type=json.loads,
            default={},
            help="""options of the engine, such as '{"graphs": false}'""",
        )
    parser.add_argument("--json", type=Path, help="a file that gets each row as a line")
    return parser


def report_of(options: argparse.Namespace, **extra: Any) -> Report:
    """The report of a run with these options; `extra` stands in every line of its file, too."""
    kept = {name: getattr(options, name) for name in ("shape", "dtype", "engine") if hasattr(options, name)}
    return Report(where(options.device), kept | extra, options.json)
