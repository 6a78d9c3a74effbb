"""The command `hf-paged serve`, and what its flags say of the engine and of the server."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from hf_paged_cli.flags import content_of
from hf_paged_cli.limits import ServerLimits

from ..engine import Engine
from ..model.servable import longest
from ..serve.http.options import ServerOptions
from ..serve.link import ranks
from ..serve.link.loading import Source
from .arguments import adapter_sources, add_adapters, source_of


def run(given: argparse.Namespace) -> int:
    """Serve until a signal. The answer is the exit code."""
    if ranks.is_rank():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it serves, an interrupt ends it without a word
    try:
        from ..serve.http.keys import Keys
        from ..serve.http.logs import set_up
        from ..serve.http_process import HttpProcess, HttpSpec
        from ..serve.link.weights import load_what_was_sent
        from ..serve.server import require_address
    except ImportError as error:
        raise ImportError(f"the server needs {error.name}: pip install 'hf_paged[serve]'") from error
    size = given.tensor_parallel_size
    source = source_of(given)
    options = server_options(given, source.name)
    engine_options(given)  # what contradicts itself is refused before anything starts
    if size > 1 and not ranks.is_rank():
        return ranks.start(size, given.arguments)
    ranks.check_size(size)
    keys = Keys(options.api_keys, admin_keys=options.admin_api_keys)
    shares = cache_shares(given.prefix_cache_share, keys.names)
    modules = adapter_sources(given.lora_modules, options.names)
    if size > 1 and not ranks.leads():
        set_up(given.log_level, given.log_format)
        return ranks.follow(engine_of(given, source, shares, {}), load_what_was_sent)
    require_address(options)
    process = HttpProcess(fork=sys.platform == "linux")  # before there are threads
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # KeyboardInterrupt is lost within a destructor
    try:
        set_up(given.log_level, given.log_format)
        tokenizer = source.load_processor()
        process.begin(
            HttpSpec(
                options,
                tokenizer,
                chat_template_of(given, tokenizer),
                response_template_of(given),
                given.log_level,
                given.log_format,
            )
        )
        engine = engine_of(given, source, shares, modules)
        if size > 1:
            ranks.end_with_parent()
        for line in repr(engine).splitlines():
            logging.getLogger("hf_paged.serve").info("%s", line)
        _warn_if_open(options)
        return process.serve(engine)
    finally:
        signal.signal(signal.SIGINT, interrupt)
        process.end()


def engine_of(
    given: argparse.Namespace, source: Source, shares: dict[str, float], modules: dict[str, str]
) -> Engine:
    """The engine by the flags, with its adapters."""
    if given.seed is not None:
        torch.manual_seed(given.seed)
    options = engine_options(given)
    model = source.load()
    most = longest(model)
    if given.max_model_len is not None and most is not None and given.max_model_len > most:
        raise ValueError(
            f"--max-model-len {given.max_model_len} is beyond the {most} tokens that {source.name} is made "
            f"for; give at most {most}, or leave it out"
        )
    engine = Engine(model, **options, cache_shares=shares)
    add_adapters(engine, modules)
    return engine


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """The engine's options by the flags."""
    if given.enable_prefix_caching and given.no_enable_prefix_caching:
        raise ValueError("--enable-prefix-caching and --no-enable-prefix-caching contradict each other")
    if given.no_enable_prefix_caching and (given.prefix_cache_share or given.share_prefixes):
        flag = "--prefix-cache-share" if given.prefix_cache_share else "--share-prefixes"
        raise ValueError(
            f"{flag} is about cached prefixes and --no-enable-prefix-caching caches none; leave one out"
        )
    if given.compile and given.enforce_eager:
        raise ValueError(
            "--compile is for captured steps and --enforce-eager has none; leave one of them out"
        )
    if given.num_blocks is not None and given.gpu_memory_utilization is not None:
        raise ValueError(
            f"--num-blocks {given.num_blocks} and --gpu-memory-utilization {given.gpu_memory_utilization} "
            "both size the pools; give one of them"
        )
    if given.max_num_seqs is not None and given.max_num_seqs > given.max_num_batched_tokens:
        raise ValueError(
            f"--max-num-batched-tokens {given.max_num_batched_tokens} cannot hold one token of each of "
            f"{given.max_num_seqs} sequences; raise it, or lower --max-num-seqs"
        )
    adapters = {"max_adapters": given.max_loras, "max_adapter_forwards": given.max_adapter_forwards}
    return {
        **{name: value for name, value in adapters.items() if value is not None},
        "max_batch_sequences": given.max_num_seqs,
        "max_batch_tokens": given.max_num_batched_tokens,
        "block_size": given.block_size,
        "num_blocks": given.num_blocks,
        "state_slots": given.state_slots,
        "state_snapshots": given.state_snapshots,
        "state_every": given.state_every,
        "state_dtype": given.state_dtype,
        "memory_fraction": given.gpu_memory_utilization,
        "prefix_caching": not given.no_enable_prefix_caching,
        "verify": given.verify,
        "policy": given.scheduling_policy,
        "admission": given.admission,
        "preemption": given.preemption,
        "kernels": given.kernels,
        "rank_timeout": given.rank_timeout,
        "graphs": not given.enforce_eager,
        "compile": given.compile,
        "fuse_projections": True,  # the weights are the server's own
    }


def cache_shares(given: Sequence[str], keys: Sequence[str]) -> dict[str, float]:
    """Shares of the cached blocks by the names of keys, as logs have them."""
    found: dict[str, float] = {}
    for each in given:
        name, _, text = each.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share < math.inf:
            raise ValueError(
                f"--prefix-cache-share takes KEY=SHARE with a number above 0, such as key-0=3; got {each!r}"
            )
        if not keys:
            raise ValueError(
                f"--prefix-cache-share {each} divides the blocks between API keys and the server has none; "
                "give --api-key or --api-key-file, or leave it out"
            )
        if name not in keys:
            raise ValueError(
                f"--prefix-cache-share names {name!r}, expected one of {', '.join(keys)}: keys "
                "are counted from 0, in the order in which they are given"
            )
        if name in found:
            raise ValueError(
                f"--prefix-cache-share gives {name} {found[name]:g} and {share:g}; give one of them"
            )
        found[name] = share
    return found


def server_options(given: argparse.Namespace, name: str) -> ServerOptions:
    """The server's options by the flags."""
    limits = {each.name: getattr(given, f"limit_{each.name}") for each in fields(ServerLimits)}
    address = {name: value for name in ("host", "port") if (value := getattr(given, name)) is not None}
    if given.uds is not None and address:
        name, value = next(iter(address.items()))
        raise ValueError(
            f"--uds {given.uds} and --{name} {value} are both the server's address; give one of them"
        )
    plain = (
        "uds", "root_path", "max_model_len", "vllm_metric_names", "share_prefixes", "dev",
        "otlp_traces_endpoint", "allow_runtime_lora_updating",
    )  # fmt: skip
    if given.otlp_traces_endpoint is not None:
        _require_opentelemetry()
    tls = ("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs")
    return ServerOptions(
        names=tuple(given.served_model_name or [name]),
        api_keys=_keys(given),
        admin_api_keys=tuple(given.admin_api_key),
        allowed_hosts=tuple(given.allowed_host),
        allowed_origins=tuple(given.allowed_origin),
        allowed_media_domains=tuple(given.allowed_media_domains),
        limits=ServerLimits(**limits),
        **address,
        **{each: getattr(given, each) for each in (*plain, *tls)},
    )


def _require_opentelemetry() -> None:
    try:
        from ..serve.openai import spans  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"--otlp-traces-endpoint needs {error.name}: pip install 'hf_paged[otel]'"
        ) from error


def _keys(given: argparse.Namespace) -> tuple[str, ...]:
    keys = list(given.api_key)
    if os.environ.get("HF_PAGED_API_KEY"):
        keys.append(os.environ["HF_PAGED_API_KEY"])
    if given.api_key_file:
        lines = content_of("--api-key-file", given.api_key_file).splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ValueError(f"--api-key-file {given.api_key_file} has no key in it; write one on each line")
        keys += found
    return tuple(keys)


def template_of(given: str | None, flag: str = "--chat-template") -> str | None:
    """A template, or the content of its file."""
    return given if given is None or "{" in given else content_of(flag, given)


def chat_template_of(given: argparse.Namespace, tokenizer: Any) -> str | None:
    """The chat template by its flag. What it refuses to write is for requests, but not that it is none."""
    from jinja2 import TemplateSyntaxError

    template = template_of(given.chat_template)
    if template is None:
        return None
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], chat_template=template, tokenize=False
        )
    except TemplateSyntaxError as error:
        raise ValueError(
            f"--chat-template is broken in line {error.lineno}: {error.message}; give a Jinja template"
        ) from error
    except Exception as error:  # it may want more than this message, and requests get what it says
        logging.getLogger("hf_paged.serve").info(
            "--chat-template cannot render a single user message (%s: %s); requests that it refuses get 400",
            type(error).__name__,
            error,
        )
    return template


def response_template_of(given: argparse.Namespace) -> dict[str, Any] | None:
    template = template_of(given.response_template, "--response-template")
    if template is None:
        return None
    try:
        found = json.loads(template)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--response-template is not JSON ({error}); give an object") from error
    if not isinstance(found, dict):
        raise ValueError("--response-template is a JSON object, as transformers documents it")
    return found


def _warn_if_open(options: ServerOptions) -> None:
    if not (options.api_keys or options.admin_api_keys):
        log = logging.getLogger("hf_paged.serve")
        if options.loopback:
            log.info("No API key set: any local process can use this server")
        else:
            log.warning(
                "No API key set: any client that reaches %s can use this server; give --api-key, or "
                "--host 127.0.0.1",
                options.host,
            )
