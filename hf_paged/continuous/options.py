"""transformers' ContinuousBatchingConfig and GenerationConfig as options of the engine and its requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import GenerationConfig

from ..engine.worker.pools import SHARE_OF_HOST

PAGE = 256
"""The tokens of a page where no other number is given."""
NO_EFFECT = frozenset(
    {
        "max_blocks_per_request",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "auto_switch_to_flash",
        "drop_unsupported_processors",
        "disable_nccl_graph_mixing",
        "use_default_compile_configs",
        "max_cached_graphs",
    }
)
"""Fields about transformers' own kernels and graphs, which change neither answers nor memory here, and two
that it deprecates: one of them it has read into another field itself, the other has no effect there either.
"""
READ_ELSEWHERE = frozenset(
    {"block_size", "page_size", "num_blocks", "return_logprobs", "seed", "per_request_processors"}
)
NO_TIMEOUT = 1e8
"""Seconds of a timeout that never comes."""
ELSEWHERE = frozenset(
    {
        "transformers_version",
        "max_new_tokens",
        "max_length",
        "eos_token_id",
        "num_return_sequences",
        "cache_implementation",
        "cache_config",
        "continuous_batching_config",
        "compile_config",
        "disable_compile",
        "use_cache",
    }
)
"""Fields of a generation config that requests get otherwise, or that say how to generate and not what."""
MODE = ("do_sample", "num_beams", "early_stopping", "length_penalty", "stop_strings", "max_time")
"""Options of a request that do not process its scores."""


class WorkloadNeed(NamedTuple):
    """How much is going to be computed at once, as far as a caller has said: sequences, and tokens of each
    one.
    """

    sequences: int
    tokens: int

    @classmethod
    def of(cls, hints: Any, beams: int = 1) -> WorkloadNeed | None:
        """From transformers' WorkloadHints; each request has so many beams."""
        if hints is None or not hints.num_requests or not hints.max_generated_length:
            return None
        return cls(hints.num_requests * beams, (hints.max_prompt_length or 0) + hints.max_generated_length)


def options_of_config(config: Any) -> dict[str, Any]:
    """The engine's options for a ContinuousBatchingConfig; ValueError for a field that it cannot honour."""
    options: dict[str, Any] = {}
    readers: dict[str, Any] = {
        "max_batch_tokens": lambda value: {"max_batch_tokens": value},
        "max_memory_percent": lambda value: {"memory_fraction": value},
        "max_requests_per_batch": lambda value: {"max_batch_sequences": value},
        "allow_block_sharing": lambda value: {"prefix_caching": bool(value)},
        "use_async_batching": lambda value: {"run_ahead": value},
        "use_cuda_graph": lambda value: {"graphs": bool(value[1] if isinstance(value, tuple) else value)},
        "varlen_compile_config": lambda value: {"compile": True},
        "decode_compile_config": lambda value: {"compile": True},
        "default_compile_level": lambda value: {"compile": True} if value else {},
        "safety_margin": lambda value: {"watermark": value},
        "cpu_group_timeout": lambda value: {"rank_timeout": value},
        "cpu_offload_space": lambda value: {} if value else {"host_blocks": 0},
        "cpu_offload_space_safety_threshold": lambda value: {} if value else {"host_blocks": 0},
    }
    for name, value in vars(config).items():
        if name in readers and value is not None:
            options |= readers[name](value)
        elif name not in NO_EFFECT | READ_ELSEWHERE and name not in readers:
            _refuse(name, value)
    if getattr(config, "cpu_group_timeout", 0) is None:
        options["rank_timeout"] = NO_TIMEOUT
    threshold = getattr(config, "cpu_offload_space_safety_threshold", 1)
    if "host_blocks" not in options and threshold < SHARE_OF_HOST:
        _refuse("cpu_offload_space_safety_threshold", threshold)
    size = getattr(config, "page_size", None) or getattr(config, "block_size", None) or PAGE
    if size != PAGE:
        options["block_size"] = size
    if config.num_blocks is not None:
        options["num_blocks"] = -(-config.num_blocks * size // options.get("block_size", 16))
        options.pop("memory_fraction", None)
    if options.get("graphs") is False:
        options.pop("compile", None)
    return options


def host_bytes(config: Any) -> int | None:
    """The most bytes of blocks that may wait on the host; None for as many as the engine sees fit."""
    space = getattr(config, "cpu_offload_space", 0)
    return None if space is None else int(space * 1024**3)


def _refuse(name: str, value: Any) -> None:
    """Raise for a field of another value than its default."""
    reasons = {
        "scheduler_type": ("fifo", "the engine admits requests in the order of their arrival"),
        "max_queue_size": (0, "the engine's queue has no bound; bound the requests where they come from"),
        "cpu_offload_space_safety_threshold": (
            None,
            f"the engine takes up to {SHARE_OF_HOST} of the host's free memory, or cpu_offload_space",
        ),
    }
    default, why = reasons.get(name, (None, "hf_paged does not know it"))
    if value not in (None, default):
        raise ValueError(
            f"continuous_batching_config.{name}={value!r} is not honoured: {why}; leave it out, or call "
            "hf_paged.install(generate_batch=False)"
        )


class ManagerProcessors:
    """The processors of scores of a manager's requests, as options of the engine's requests."""

    def __init__(self, given: GenerationConfig, own: GenerationConfig) -> None:
        self.options = request_options(given, own)
        self._own = own

    def clear(self) -> None:
        """Process no scores of later requests."""
        self.options = self._without(self.options)

    def greedy(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Options that choose the likeliest token of scores as these options would draw from."""
        made = model._get_logits_processor(GenerationConfig(**options))
        return self._without({**options, "do_sample": False}) | {"logits_processor": made}

    def _without(self, options: dict[str, Any]) -> dict[str, Any]:
        mode = {name: options[name] for name in MODE if options.get(name) is not None}
        return request_options(GenerationConfig(**mode), self._own)


def request_options(given: GenerationConfig, own: GenerationConfig) -> dict[str, Any]:
    """The options of the engine's requests under a generation config: what it leaves open is neutral, as in
    transformers' continuous batching, and not the model's own or generate()'s default. own: the model's.
    """
    fields = {name: value for name, value in vars(given).items() if name[0] != "_" and name not in ELSEWHERE}
    options = {name: value for name, value in fields.items() if value is not None}
    if given is not own:
        left_open = {name for name, value in vars(own).items() if value is not None and name in fields}
        options |= {name: _default_of(name) for name in left_open - options.keys() if "token_id" not in name}
    options.setdefault("do_sample", False)
    if options["do_sample"] and (given is not own or own.top_k is None):
        options.setdefault("top_k", 0)
    return options


def _default_of(name: str) -> Any:
    """The meaning of a field that neither a caller nor a model has set."""
    defaults: dict[str, Any] = GenerationConfig._get_default_generation_params()
    return 0 if name == "top_k" else defaults.get(name)
