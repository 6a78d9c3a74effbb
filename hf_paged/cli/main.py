"""The command line: hf-paged serve, generate, chat, bench, info, trace, completion."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import hf_paged

from .flags import Parser, content_of, new_file, new_picture, new_socket, number, some_text, utf8

EPILOG = """\
hf-paged serve demo                      serve the model that comes with hf_paged
hf-paged generate demo --prompt "The fox"
hf-paged chat demo                       a conversation in the terminal
hf-paged bench demo --out bench.svg      its speed on this machine, beside stock generate()
hf-paged info Qwen/Qwen3-8B              what of a model would run on pages
hf-paged trace steps.jsonl               the map of the blocks, of a file that engine.trace() wrote

The first request to a server:
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
       -d '{"model": "demo", "prompt": "The fox", "max_tokens": 20}'
"""
ABOUT = {
    "serve": "serve a model over HTTP in OpenAI's form",
    "generate": "answer a prompt in the terminal",
    "chat": "talk with a model in the terminal",
    "bench": "a model's speed here, beside stock generate()",
    "completion": "print a script that completes commands in a shell",
    "info": "versions, devices, kernels; what of a model runs on pages",
    "trace": "show the map of the blocks of a trace file",
}
EXAMPLES = {
    "serve": """
  hf-paged serve demo             http://127.0.0.1:8000 in a browser shows the map of its blocks
  hf-paged serve Qwen/Qwen3-8B --lora-modules poet=adapters/poet
  hf-paged serve MODEL --host 0.0.0.0 --api-key-file keys
""",
    "generate": """
  hf-paged generate MODEL --chat --prompt "What is a page table?" --temperature 0.7
  hf-paged generate MODEL --file prompts.txt --lines > answers.jsonl
""",
    "chat": """
  hf-paged chat MODEL --system "Answer in one sentence." --temperature 0.7
""",
    "bench": """
  hf-paged bench MODEL --num-prompts 256 --input-len 512 --output-len 256 --out bench.svg
""",
    "completion": """
  eval "$(hf-paged completion bash)"
""",
    "info": """
  hf-paged info                   the installation
  hf-paged info Qwen/Qwen3-8B     a model, without its weights
""",
    "trace": """
  hf-paged trace steps.jsonl      engine.trace("steps.jsonl") wrote it
  hf-paged trace steps.jsonl --html map.html
""",
}


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands."""
    top = Parser(prog="hf-paged", description="Paged generation for transformers.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"hf_paged {hf_paged.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    made = {
        name: commands.add_parser(name, help=about, description=f"{about}:\n{EXAMPLES[name]}")
        for name, about in ABOUT.items()
    }
    _add_serve(made["serve"])
    _add_trace(made["trace"])
    _add_generate(made["generate"])
    _add_chat(made["chat"])
    _add_bench(made["bench"])
    made["completion"].add_argument("shell", choices=["bash", "zsh"], help="the shell")
    _add_source(made["info"], optional=True)
    return top, made


def _add_source(to: Parser, optional: bool = False) -> None:
    model: dict[str, Any] = {"nargs": "?"} if optional else {}
    to.add_argument("model", metavar="MODEL", help="a name on the Hub, a folder, or demo", **model)
    add = to.add_argument_group("model").add_argument
    add("--revision", help="branch, tag or commit of the checkpoint on the Hub")
    add("--tokenizer", help="name or folder of the tokenizer (the model's)")
    add("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    add("--device", help="device as torch names it (the first CUDA device, else cpu)")
    add("--device-map", help="instead of --device: auto, as from_pretrained takes it")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def _add_serve(to: Parser) -> None:
    _add_source(to)
    add = to.add_argument_group("address").add_argument
    add("--host", help="address; 0.0.0.0 serves the network, give --api-key then (127.0.0.1)")
    add("--port", type=number(int, 0, 65535), help="0 takes a free port and logs it (8000)")
    add("--uds", type=new_socket, help="a Unix socket instead of --host and --port")
    add("--root-path", default="", help="the path under which a proxy shows the server: /prefix")
    add("--ssl-keyfile", help="PEM file with the private key, for https")
    add("--ssl-certfile", help="PEM file with the certificate of the server")
    add("--ssl-keyfile-password", help="password of an encrypted key file")
    add("--ssl-ca-certs", help="PEM file: clients must have a certificate of these authorities")
    names = "what clients call the model; the first is shown (MODEL)"
    add("--served-model-name", nargs="+", action="extend", metavar="NAME", help=names)
    _add_access(to.add_argument_group("access").add_argument)
    add = to.add_argument_group("ranks").add_argument
    add(
        "--tensor-parallel-size", "--tp", type=number(int, 1), default=1, metavar="N",
        help="devices that compute the model together, each a process with its part (1)",
    )  # fmt: skip
    seconds = "a step that takes more seconds ends the server, since a device hangs (300)"
    add("--rank-timeout", type=number(float, 1), default=300.0, metavar="N", help=seconds)
    _add_adapters(to.add_argument_group("adapters").add_argument)
    _add_engine(to.add_argument_group("engine").add_argument)
    _add_limits(to)
    add = to.add_argument_group("other").add_argument
    add("--chat-template", help="a Jinja file, or the template itself")
    add("--response-template", help="a JSON file or the template: how tool calls and reasoning are read")
    add("--dev", action="store_true", help="routes for training loops: /pause, /load_weights, ...")
    collector = "an OpenTelemetry collector that gets a span of each request"
    add("--otlp-traces-endpoint", metavar="URL", help=collector)
    add("--vllm-metric-names", action="store_true", help="serve the metrics as vllm:..., too")
    levels = ["debug", "info", "warning", "error"]
    add("--log-level", default="info", choices=levels, help="the least that is logged (info)")
    add("--log-format", default="auto", choices=["auto", "json", "text"], help="auto: text in a terminal")


def _add_access(add: Any) -> None:
    add("--api-key", action="append", default=[], help="a client's key; repeatable; also $HF_PAGED_API_KEY")
    add("--api-key-file", help="file with a key on each line; no process list shows these")
    add("--admin-api-key", action="append", default=[], help="key that sees all requests and loads adapters")
    add(
        "--prefix-cache-share", nargs="+", action="extend", default=[], metavar="KEY=SHARE",
        help="how API keys divide the blocks, as in key-0=3; 1 for others",
    )  # fmt: skip
    add("--share-prefixes", action="store_true", help="let keys share cached prefixes")
    add("--allowed-host", action="append", default=[], help="Host header that is answered; may be repeated")
    add("--allowed-origin", action="append", default=[], help="origin whose pages may call: https://a.b")
    add(
        "--allowed-media-domains", nargs="+", action="extend", default=[], metavar="HOST",
        help="hosts from which images are fetched; without it images come in data: URLs alone",
    )  # fmt: skip


def _add_adapters(add: Any) -> None:
    add(
        "--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=PATH",
        help="LoRA adapters that requests choose as their model",
    )  # fmt: skip
    add("--max-loras", type=number(int, 1), help="adapters on the device at once (16)")
    add("--enable-lora", action="store_true", help="no effect: it is the default")
    add(
        "--allow-runtime-lora-updating", action="store_true",
        help="let every key load adapters from folders; an admin key always may",
    )  # fmt: skip


def _add_engine(add: Any) -> None:
    add("--max-model-len", type=number(int, 2), help="the longest sequence, prompt and answer")
    add("--max-num-seqs", type=number(int, 1), help="sequences that run at once (256)")
    add("--max-num-batched-tokens", type=number(int, 1), default=2048, help="tokens of a step (2048)")
    add("--block-size", type=number(int, 1), default=16, help="tokens of a block (16)")
    add("--num-blocks", type=number(int, 1), help="blocks of a pool, instead of a share of the memory")
    add("--gpu-memory-utilization", type=number(float, 0.001, 1), help="share of the free memory for pools")
    add("--no-enable-prefix-caching", action="store_true", help="compute every prompt whole")
    add("--enable-prefix-caching", action="store_true", help="no effect: it is the default")
    policies = ["fcfs", "priority"]
    add("--scheduling-policy", default="fcfs", choices=policies, help="order of requests (fcfs)")
    admissions = ["watermark", "future"]
    add("--admission", default="watermark", choices=admissions, help="when a request may begin (watermark)")
    preemptions = ["auto", "swap", "recompute"]
    add("--preemption", default="auto", choices=preemptions, help="how a request makes room (auto)")
    kernels = ["auto", "triton", "native", "torch"]
    add("--kernels", default="auto", choices=kernels, help="what reads the pages (auto: the fastest here)")
    add("--enforce-eager", action="store_true", help="capture no steps")
    add("--compile", action="store_true", help="compile captured steps")
    add("--seed", type=int, help="seed of torch, for requests without one")


def _add_limits(to: Parser) -> None:
    """A flag for each limit, with its default."""
    from ..serve.http.options import ServerLimits

    group = to.add_argument_group("limits")
    for each in fields(ServerLimits):
        kind = float if each.name.endswith("_seconds") else int
        flag = "--limit-" + each.name.replace("_", "-")
        help = f"{each.metadata['help']} ({each.default})"
        group.add_argument(flag, type=kind, default=each.default, metavar="N", help=help)


def _add_generate(to: Parser) -> None:
    _add_source(to)
    asked = to.add_argument_group("prompt")
    asked.add_argument("--prompt", type=utf8, help="the prompt; without it the standard input is read")
    asked.add_argument("--file", help="a file with the prompt; - is the standard input")
    asked.add_argument(
        "--lines", action="store_true", help="every line is a prompt; the answers are JSON lines"
    )
    asked.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    asked.add_argument("--json", action="store_true", help="print JSON instead of streaming")
    how = to.add_argument_group("options")
    _add_sampling(how, 128)
    how.add_argument("--num-beams", type=number(int, 1), help="beams of a beam search (1)")
    how.add_argument(
        "--stop", type=some_text, action="append", help="a text at which the answer ends; may be repeated"
    )


def _add_sampling(group: Any, tokens: int) -> None:
    add = group.add_argument
    add("--max-tokens", type=number(int, 1), default=tokens, help=f"most tokens of an answer ({tokens})")
    add("--temperature", type=number(float, 0), default=0.0, help="above 0 tokens are drawn (0)")
    add("--top-p", type=number(float, 0, 1), help="draw from the likeliest tokens of this probability in all")
    add("--top-k", type=number(int, 0), help="draw from this many of the likeliest tokens")
    add("--seed", type=number(int, 0, 2**63 - 1), help="seed of the draws")


def _add_chat(to: Parser) -> None:
    _add_source(to)
    how = to.add_argument_group("options")
    how.add_argument("--system", type=utf8, help="the message before the first one")
    _add_sampling(how, 512)


def _add_bench(to: Parser) -> None:
    _add_source(to)
    load = to.add_argument_group("load")
    load.add_argument("--num-prompts", type=number(int, 1), default=64, help="prompts, all at once (64)")
    load.add_argument("--input-len", type=number(int, 1), default=128, help="tokens of each prompt (128)")
    load.add_argument("--output-len", type=number(int, 1), default=128, help="mean tokens of an answer (128)")
    load.add_argument(
        "--batch-size", type=number(int, 1), default=16, help="prompts in a call of generate() (16)"
    )
    load.add_argument(
        "--max-num-seqs", type=number(int, 1), help="sequences that the engine runs at once (256)"
    )
    load.add_argument("--seed", type=int, default=0, help="seed of prompts and lengths (0)")
    shown = to.add_argument_group("answer")
    shown.add_argument("--out", type=new_picture, metavar="FILE.svg", help="draw a picture")
    shown.add_argument("--json", action="store_true", help="print JSON")


def _add_trace(to: Parser) -> None:
    to.add_argument("file", metavar="FILE", help="what engine.trace() wrote, packed or not")
    to.add_argument(
        "--html",
        type=new_file,
        metavar="OUT",
        help="write the page to a file, whole in itself; do not open it",
    )
    to.add_argument("--partial", action="store_true", help="take a trace that breaks off")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the answer is its exit code. Without one, print what is installed."""
    top, commands = parser()
    given, unknown = top.parse_known_args(arguments)
    given.arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = commands.get(given.command, top)
    if unknown:
        command.refuse(unknown)
    try:
        return COMMANDS.get(given.command, info)(given)
    except (ValueError, OSError, TypeError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and given.command != "serve":  # a reader, as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        _complain(f"{command.prog}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _complain(text: str) -> None:
    """Write why a command ends: to stderr, or where that cannot be written (a full disk), to stdout."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError as error:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what it still holds fails again at exit
        with suppress(OSError):
            print(f"{text} (stderr: {error.strerror})", flush=True)


def source_of(given: argparse.Namespace) -> Any:
    from ..serve.link.loading import Source

    if given.device and given.device_map:
        raise ValueError("--device and --device-map both place the model; give one of them")
    names = [each.name for each in fields(Source) if hasattr(given, each.name)]
    return Source(**{name: getattr(given, name) for name in names})


def info(given: argparse.Namespace) -> int:
    """hf-paged info: the facts of the installation, for a user or an issue."""
    from .environment import facts

    print("\n".join(facts().lines()))
    if getattr(given, "model", None):
        from .info import model_lines

        print("\n".join(["", *model_lines(source_of(given))]))
    return 0


def generate(given: argparse.Namespace) -> int:
    """hf-paged generate."""
    from .generate import prompts_of, run

    if given.prompt is not None and given.file is not None:
        raise ValueError("--prompt and --file are both the prompt; give one of them")
    options = {"max_new_tokens": given.max_tokens, **_sampling(given)}
    if given.num_beams is not None:
        options["num_beams"] = given.num_beams
    if given.stop:
        options["stop_strings"] = given.stop
    prompts = prompts_of(given.prompt, given.file, given.lines)
    return run(source_of(given), prompts, given.chat, given.json or given.lines, options)


def _sampling(given: argparse.Namespace) -> dict[str, Any]:
    drawn = {name: getattr(given, name) for name in ("top_p", "top_k", "seed")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if given.temperature > 0:
        return {"do_sample": True, "temperature": given.temperature, **drawn}
    if drawn:
        flag = "--" + next(iter(drawn)).replace("_", "-")
        raise ValueError(f"{flag} is for answers that are drawn; give --temperature above 0, or leave it out")
    return {"do_sample": False}


def chat(given: argparse.Namespace) -> int:
    """hf-paged chat."""
    from .chat import run

    return run(source_of(given), given.system, given.max_tokens, _sampling(given))


def bench(given: argparse.Namespace) -> int:
    """hf-paged bench."""
    from .bench import Load, run

    load = Load(given.num_prompts, given.input_len, given.output_len, given.batch_size, given.seed)
    options = {} if given.max_num_seqs is None else {"max_batch_sequences": given.max_num_seqs}
    return run(source_of(given), load, options, given.out, given.json)


def completion(given: argparse.Namespace) -> int:
    """hf-paged completion: a script for `eval "$(hf-paged completion bash)"`."""
    _, commands = parser()
    cases = [
        f"    {name}) words='{' '.join(flag for flag in each._option_string_actions if flag[:2] == '--')}';;"
        for name, each in commands.items()
    ]
    lines = [
        "autoload -U +X bashcompinit && bashcompinit" if given.shell == "zsh" else "",
        "_hf_paged() {",
        f"  local words='{' '.join(commands)}'",
        '  if [ "$COMP_CWORD" -gt 1 ]; then case "${COMP_WORDS[1]}" in',
        *cases,
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
        "}",
        "complete -o default -F _hf_paged hf-paged",
    ]
    print("\n".join(line for line in lines if line))
    return 0


def trace(given: argparse.Namespace) -> int:
    """hf-paged trace."""
    from ..serve.map.html import page

    if not Path(given.file).exists():
        raise ValueError(f"there is no file {given.file}; give one that engine.trace() wrote")
    if given.html and Path(given.html).exists() and Path(given.html).samefile(given.file):
        raise ValueError(f"--html {given.html} is the trace itself; give the page another path")
    found = page(given.file, given.partial)
    if given.html:
        Path(given.html).write_text(found, encoding="utf-8")
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(found)
    url = Path(file.name).as_uri()
    print(url)
    if not webbrowser.open(url):
        print("no browser was found; open the file above, or write it with --html", file=sys.stderr)
    return 0


def serve(given: argparse.Namespace) -> int:
    """hf-paged serve."""
    from ..serve.link import ranks

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
        _warn_if_open(options)
        return process.serve(engine)
    finally:
        signal.signal(signal.SIGINT, interrupt)
        process.end()


def engine_of(
    given: argparse.Namespace, source: Any, shares: dict[str, float], modules: dict[str, str]
) -> Any:
    """The engine by the flags, with its adapters."""
    from ..engine import Engine
    from ..engine.support import longest

    if given.seed is not None:
        import torch

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
    for name, path in modules.items():
        try:
            engine.add_adapter(name, path)
        except (ValueError, OSError, TypeError, ImportError) as error:
            raise ValueError(f"--lora-modules {name}={path} cannot be loaded: {error}") from error
    return engine


def adapter_sources(given: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Where adapters lie, by name: of name=path, or of JSON with both as vLLM takes it. models: the names of
    the model.
    """
    from ..model.adapters.files import CONFIG
    from ..serve.link.loading import LOCAL

    found: dict[str, str] = {}
    for each in given:
        if each.startswith("{"):
            try:
                module = json.loads(each)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--lora-modules {each} is no JSON: {error}; give name=path") from error
            name = str(module.get("name", ""))
            path = str(module.get("path", ""))
        else:
            name, _, path = each.partition("=")
        if not name or not path:
            raise ValueError(f"--lora-modules takes name=path, got {each!r}")
        if path.startswith(LOCAL) and not (Path(path) / CONFIG).is_file():  # else a name on the Hub
            raise ValueError(
                f"--lora-modules {each}: there is no {path}/{CONFIG}; give a folder as peft saves it"
            )
        if name in found or name in models:
            of = "two adapters" if name in found else "the model and of an adapter"
            raise ValueError(f"--lora-modules {each}: {name!r} is the name of {of}; choose another one")
        found[name] = path
    return found


COMMANDS = {each.__name__: each for each in (serve, generate, chat, bench, trace, completion)}


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
    adapters = {} if given.max_loras is None else {"max_adapters": given.max_loras}
    return {
        **adapters,
        "max_batch_sequences": given.max_num_seqs,
        "max_batch_tokens": given.max_num_batched_tokens,
        "block_size": given.block_size,
        "num_blocks": given.num_blocks,
        "memory_fraction": given.gpu_memory_utilization,
        "prefix_caching": not given.no_enable_prefix_caching,
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


def server_options(given: argparse.Namespace, name: str) -> Any:
    """The server's options by the flags."""
    from ..serve.http.options import ServerLimits, ServerOptions

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
            "--chat-template writes no lone message of a user (%s: %s); requests that it refuses are 400",
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
        raise ValueError(f"--response-template is no JSON ({error}); give an object") from error
    if not isinstance(found, dict):
        raise ValueError("--response-template is a JSON object, as transformers documents it")
    return found


def _warn_if_open(options: Any) -> None:
    if not (options.api_keys or options.admin_api_keys):
        log = logging.getLogger("hf_paged.serve")
        if options.loopback:
            log.info("no API key: every process of this machine may ask")
        else:
            log.warning(
                "OPEN: anyone who reaches %s may use this model; give --api-key, or --host 127.0.0.1",
                options.host,
            )
