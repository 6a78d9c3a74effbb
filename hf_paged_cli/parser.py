"""The commands and their flags.

By argparse: typer imports in 0.085 s of the processor (argparse in 0.02), and none of its flags takes several
values, as `--lora-modules a=b c=d` does.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from . import __version__
from .flags import Parser, new_file, new_picture, new_socket, number, size, some_text, utf8
from .limits import ServerLimits
from .loads import LOADS

SHELLS = ["bash", "zsh", "fish", "tcsh", "powershell"]
EPILOG = """\
hf-paged serve demo                      serve the model that comes with hf_paged
hf-paged generate demo --prompt "The fox"
hf-paged batch demo in.jsonl out.jsonl   a file of OpenAI's batch requests
hf-paged chat demo                       a conversation in the terminal
hf-paged bench demo --out bench.svg      its speed on this machine, compared with stock generate()
hf-paged info Qwen/Qwen3-8B              what the model would run on pages
hf-paged trace steps.jsonl               the map of the blocks in a file that engine.trace() wrote

The first request to a server:
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
       -d '{"model": "demo", "prompt": "The fox", "max_tokens": 20}'
"""
SELF_TEST = "load MODEL, flip a byte of a cached block, and show that verify='bytes' finds it"
ABOUT = {
    "serve": "serve a model over HTTP with OpenAI's API",
    "generate": "answer a prompt in the terminal, or each line of a file",
    "batch": "answer a file of OpenAI's batch requests",
    "chat": "talk with a model in the terminal",
    "bench": "compare stock generate(), paged generate() and the engine on this machine",
    "completion": "print a script that completes commands in a shell",
    "info": "show versions, devices and kernels, or what a model runs on pages and its memory",
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
  hf-paged generate MODEL --file prompts.txt --lines --out answers.jsonl
  hf-paged generate MODEL --file prompts.txt --lines --out answers.jsonl --resume
""",
    "batch": """
  hf-paged batch MODEL requests.jsonl answers.jsonl
  hf-paged batch MODEL requests.jsonl answers.jsonl --resume
""",
    "chat": """
  hf-paged chat MODEL --system "Answer in one sentence." --temperature 0.7
""",
    "bench": """
  hf-paged bench MODEL --out bench.svg
  hf-paged bench MODEL --load samples beams prefix --batch-size 8 64 --input-len 512
""",
    "completion": """
  eval "$(hf-paged completion bash)"     the same for zsh
  hf-paged completion fish | source
""",
    "info": """
  hf-paged info                   the installation
  hf-paged info Qwen/Qwen3-8B     a model, without its weights: what runs on pages, and its memory here
  hf-paged info config.json       the same of a config's file alone
  hf-paged info Qwen/Qwen3-8B --memory 80GiB --dtype bfloat16      on a card of that size
""",
    "trace": """
  hf-paged trace steps.jsonl      engine.trace("steps.jsonl") wrote it
  hf-paged trace steps.jsonl --html map.html
""",
}


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands."""
    top = Parser(prog="hf-paged", description="Paged generation for transformers.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"hf_paged {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    made = {
        name: commands.add_parser(name, help=about, description=f"{about}:\n{EXAMPLES[name]}")
        for name, about in ABOUT.items()
    }
    _add_serve(made["serve"])
    _add_trace(made["trace"])
    _add_generate(made["generate"])
    _add_batch(made["batch"])
    _add_chat(made["chat"])
    _add_bench(made["bench"])
    made["completion"].add_argument("shell", choices=SHELLS, help="the shell")
    _add_info(made["info"])
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
    _add_names(add)
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
    _add_templates(add)
    add("--dev", action="store_true", help="routes for training loops: /pause, /load_weights, ...")
    collector = "an OpenTelemetry collector that gets a span of each request"
    add("--otlp-traces-endpoint", metavar="URL", help=collector)
    add("--vllm-metric-names", action="store_true", help="serve the metrics as vllm:..., too")
    levels = ["debug", "info", "warning", "error"]
    add("--log-level", default="info", choices=levels, help="the least that is logged (info)")
    add("--log-format", default="auto", choices=["auto", "json", "text"], help="auto: text in a terminal")


def _add_access(add: Any) -> None:
    add("--api-key", action="append", default=[], help="a client's key; repeatable; also $HF_PAGED_API_KEY")
    add("--api-key-file", help="file with a key on each line, which no process list shows")
    add("--admin-api-key", action="append", default=[], help="key that sees all requests and loads adapters")
    add(
        "--prefix-cache-share", nargs="+", action="extend", default=[], metavar="KEY=SHARE",
        help="how API keys divide the blocks, as in key-0=3; 1 for others",
    )  # fmt: skip
    add("--share-prefixes", action="store_true", help="let keys share cached prefixes")
    add("--allowed-host", action="append", default=[], help="Host header that is answered; may be repeated")
    add("--allowed-origin", action="append", default=[], help="origin whose pages may call: https://a.b")
    _add_media(add)


def _add_media(add: Any) -> None:
    add(
        "--allowed-media-domains", nargs="+", action="extend", default=[], metavar="HOST",
        help="hosts from which images are fetched; without it images come in data: URLs alone",
    )  # fmt: skip


def _add_names(add: Any) -> None:
    names = "names of the model for clients; answers have the first (MODEL)"
    add("--served-model-name", nargs="+", action="extend", metavar="NAME", help=names)


def _add_templates(add: Any) -> None:
    add("--chat-template", help="a Jinja file, or the template itself")
    add("--response-template", help="a JSON file or the template: how tool calls and reasoning are read")


def _add_modules(add: Any) -> None:
    add(
        "--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=PATH",
        help="adapters that requests choose as their model",
    )  # fmt: skip


def _add_adapters(add: Any) -> None:
    _add_modules(add)
    add("--max-loras", type=number(int, 1), help="adapters on the device at once (16)")
    add(
        "--max-adapter-forwards", type=number(int, 1), metavar="N",
        help="adapters that peft's own modules compute for running requests at once (4)",
    )  # fmt: skip
    add("--enable-lora", action="store_true", help="no effect: it is the default")
    add(
        "--allow-runtime-lora-updating", action="store_true",
        help="let every key load adapters from folders; an admin key always may",
    )  # fmt: skip


def _add_info(to: Parser) -> None:
    _add_source(to, optional=True)
    to.add_argument("--self-test", action="store_true", help=SELF_TEST)
    add = to.add_argument_group("engine").add_argument
    memory = "free memory of a CUDA device, or of the CPU of --device cpu, instead of this machine's: 80GiB"
    add("--memory", type=size, metavar="SIZE", help=memory)
    _add_sizes(add)
    add("--max-loras", type=number(int, 1), help="adapters on the device at once (16)")


def _add_sizes(add: Any) -> None:
    """The flags that decide how much memory an engine takes."""
    add("--max-num-seqs", type=number(int, 1), help="sequences that run at once (256)")
    add("--max-num-batched-tokens", type=number(int, 1), default=2048, help="tokens of a step (2048)")
    add("--block-size", type=number(int, 1), default=16, help="tokens of a block (16)")
    add("--num-blocks", type=number(int, 1), help="blocks of a pool, instead of a share of the memory")
    add(
        "--state-slots",
        type=number(int, 1),
        help="slots for recurrent states, one for each sequence that runs",
    )
    add(
        "--state-snapshots",
        type=number(int, 0),
        help="further slots, for snapshots of states; 0 for none",
    )
    add("--state-every", type=number(int, 1), default=512, help="tokens of a prompt between snapshots (512)")
    add("--state-dtype", choices=["bfloat16"], help="keep float32 states of recurrent layers in this type")
    add("--gpu-memory-utilization", type=number(float, 0.001, 1), help="share of the free memory for pools")


def _add_engine(add: Any) -> None:
    add("--max-model-len", type=number(int, 2), help="the longest sequence, prompt and answer")
    _add_sizes(add)
    add("--no-enable-prefix-caching", action="store_true", help="compute every prompt whole")
    add("--enable-prefix-caching", action="store_true", help="no effect: it is the default")
    verify = ["tokens", "bytes"]
    add("--verify", choices=verify, help="compare cached blocks' tokens, or also their bytes (neither)")
    policies = ["fcfs", "priority"]
    add("--scheduling-policy", default="fcfs", choices=policies, help="order of requests (fcfs)")
    admissions = ["watermark", "future"]
    add("--admission", default="watermark", choices=admissions, help="when a request may begin (watermark)")
    preemptions = ["auto", "swap", "recompute"]
    add(
        "--preemption",
        default="auto",
        choices=preemptions,
        help="what a request does that must give up its blocks (auto)",
    )
    kernels = ["auto", "triton", "native", "torch"]
    add(
        "--kernels",
        default="auto",
        choices=kernels,
        help="kernels that read the pages (auto: the fastest here)",
    )
    add("--enforce-eager", action="store_true", help="capture no steps")
    add("--compile", action="store_true", help="compile captured steps")
    add("--seed", type=int, help="seed of torch, for requests without one")


def _add_limits(to: Parser) -> None:
    """A flag for each limit, with its default."""
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
    adapters = to.add_argument_group("adapters").add_argument
    _add_modules(adapters)
    help = 'the adapter of all prompts but lines of {"prompt", "adapter"} (none)'
    adapters("--adapter", metavar="NAME", help=help)
    group = to.add_argument_group("file")
    group.add_argument("--out", type=new_file, metavar="FILE", help="with --lines: write the answers there")
    _add_resume(group.add_argument)
    how = to.add_argument_group("options")
    _add_sampling(how, 128)
    how.add_argument("--num-beams", type=number(int, 1), help="beams of a beam search (1)")
    how.add_argument(
        "--stop", type=some_text, action="append", help="a string at which the answer ends; may be repeated"
    )


def _add_batch(to: Parser) -> None:
    _add_source(to)
    to.add_argument("file", metavar="IN", help='lines of {"custom_id", "method", "url", "body"}')
    to.add_argument("out", type=new_file, metavar="OUT", help="the file of answers")
    _add_resume(to.add_argument_group("file").add_argument)
    add = to.add_argument_group("answers").add_argument
    _add_names(add)
    _add_templates(add)
    _add_media(add)
    _add_adapters(to.add_argument_group("adapters").add_argument)
    _add_engine(to.add_argument_group("engine").add_argument)
    to.set_defaults(prefix_cache_share=[], share_prefixes=False, rank_timeout=300.0)


def _add_resume(add: Any) -> None:
    add("--resume", action="store_true", help="continue the file: compute what it lacks")
    add("--overwrite", action="store_true", help="replace the file")


def _add_sampling(group: Any, tokens: int) -> None:
    add = group.add_argument
    add("--max-tokens", type=number(int, 1), default=tokens, help=f"most tokens of an answer ({tokens})")
    add("--temperature", type=number(float, 0), default=0.0, help="above 0: sample tokens (0)")
    add(
        "--top-p",
        type=number(float, 0, 1),
        help="sample from the most likely tokens of this total probability",
    )
    add("--top-k", type=number(int, 0), help="sample from this many of the most likely tokens")
    add("--seed", type=number(int, 0, 2**63 - 1), help="seed for sampling")


def _add_chat(to: Parser) -> None:
    _add_source(to)
    how = to.add_argument_group("options")
    how.add_argument("--system", type=utf8, help="the message before the first one")
    _add_sampling(how, 512)


def _add_bench(to: Parser) -> None:
    _add_source(to)
    add = to.add_argument_group("load").add_argument
    whats = "; ".join(f"{name}: {about}" for name, about in LOADS.items())
    add("--load", nargs="+", choices=LOADS, default=["equal", "ragged"], help=f"{whats} (equal ragged)")
    add(
        "--batch-size", nargs="+", type=number(int, 1), default=[1, 8, 32], metavar="N",
        help="sequences at once, in generate() and in the engine, one size after the other (1 8 32)",
    )  # fmt: skip
    add("--max-num-seqs", type=number(int, 1), help="sequences of the engine at once, if not the same")
    add("--num-prompts", type=number(int, 1), help="prompts, all there at once (four batches)")
    add("--input-len", type=number(int, 1), default=128, help="tokens of each prompt (128)")
    add("--output-len", type=number(int, 1), default=32, help="mean tokens of an answer (32)")
    add("--runs", type=number(int, 1), default=3, help="turns whose medians are shown (3)")
    add("--processor-time", action="store_true", help="count processor time, for a CPU that others use too")
    add("--seed", type=int, default=0, help="seed of prompts and lengths (0)")
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
