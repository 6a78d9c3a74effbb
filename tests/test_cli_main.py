"""The command line: flags, errors that name the nearest one, and info."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fresh_process import FreshProcess
from tiny import config_class, model_class_of, tiny
from transformers.utils import logging as progress

import hf_paged
from hf_paged import demo
from hf_paged.cli.arguments import adapter_sources, source_of
from hf_paged.cli.serve import (
    cache_shares,
    chat_template_of,
    engine_of,
    engine_options,
    server_options,
)
from hf_paged.model.state_layers import NUMBERED
from hf_paged.serve.http.options import ServerOptions
from hf_paged.serve.link.loading import Source
from hf_paged_cli.flags import size
from hf_paged_cli.main import main
from hf_paged_cli.other_servers import ABSENT, TABLE
from hf_paged_cli.parser import parser

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """`serve` sets the process's logging up, which the tests share."""
    loggers = [logging.getLogger(name) for name in ("hf_paged", "uvicorn", "uvicorn.error")]
    before = [(list(each.handlers), each.propagate, each.level) for each in loggers]
    yield
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers = handlers
        each.propagate = propagate
        each.setLevel(level)


def flags(*arguments: str) -> Any:
    given, unknown = parser()[0].parse_known_args(["serve", "demo", *arguments])
    assert not unknown
    return given


OTLP_ERROR = (
    "--otlp-traces-endpoint grpc://a:4317 is not a URL; spans are sent in OTLP over HTTP"
    if find_spec("opentelemetry.sdk")
    else "--otlp-traces-endpoint needs opentelemetry.exporter: pip install 'hf_paged[otel]'"
)


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "demo", "--prot", "5"], "did you mean --port?"),
        (["serve", "demo", "--max-model-length", "5"], "did you mean --max-model-len?"),
        (["serve", "demo", "--max-lora-rank", "64"], "any rank"),
        (["serve", "--model", "demo"], "MODEL"),
        (["serve", "demo", "--model", "demo"], "--model is not supported: the model is positional"),
        (["serve", "demo", "--continuous-batching"], "always batched continuously"),
        (["serve", "demo", "--cb-block-size=32"], "--cb-block-size is not supported: give --block-size"),
        (["serve", "demo", "--cb_num_blocks", "9"], "--cb_num_blocks is not supported: give --num-blocks"),
        (["serve", "demo", "--default-seed", "1"], "give --seed"),
        (["serve", "demo", "--swap-space", "4"], "see --preemption"),
        (["serve", "demo", "--disable-log-requests"], "no line of the log has a prompt"),
        (["serve", "demo", "--no-enable-chunked-prefill"], "prompts in chunks"),
        (["serve", "demo", "--structured-outputs-config.backend=xgrammar"], "JSON is compact"),
        (["serve", "demo", "-tp", "2"], "-tp is not supported: give --tensor-parallel-size"),
        (["serve", "demo", "--enable-cors"], "give --allowed-origin"),
        (["serve", "demo", "--attn-implementation", "sdpa"], "that of --kernels"),
        (["generate", "demo", "--max-new-tokens", "9"], "give --max-tokens"),
        (["serve", "demo", "--lora-modules", "poet"], "--lora-modules takes name=path, got 'poet'"),
        (
            ["serve", "demo", "--lora-modules", "a=b", "--lora-modules", "a=c"],
            "--lora-modules a=c: 'a' is the name of two adapters; choose another one",
        ),
        (
            ["serve", "demo", "--lora-modules", "demo=b"],
            "--lora-modules demo=b: 'demo' is the name of the model and of an adapter; choose another one",
        ),
        (["serve", "demo", "--lora-modules", '{"name": '], "is not JSON: Expecting value"),
        (
            ["serve", "demo", "--lora-modules", "a=./b"],
            "there is no ./b/adapter_config.json; give a folder as",
        ),
        (["trace", "no.jsonl"], "there is no file no.jsonl; give one that engine.trace() wrote"),
        (["serve", "demo", "--tensor-parallel-size=2", "--device=cpu"], "leave out --device"),
        (["serve", "demo", "--rank-timeout=0"], "--rank-timeout: expected a number from 1"),
        (["serve", "demo", "--tensor-parallel-size=0"], "--tensor-parallel-size/--tp: expected a whole"),
        (["serve", "demo", "--por", "5"], "did you mean --port?"),
        (["serve"], "MODEL"),
        (["sevre", "demo"], "'trace'); did you mean serve?"),
        (["serve", "demo", "--kernels", "tritn"], "did you mean triton?"),
        (["generate", "demo", "--prompt", "a", "--file", "b"], "give one of them"),
        (
            ["generate", "demo", "--device", "cpu", "--device-map", "auto", "--prompt", "a"],
            "give one of them",
        ),
        (
            ["serve", "demo", "--port", "70000"],
            "--port: expected a whole number from 0 to 65535, got '70000'",
        ),
        (["serve", "demo", "--ssl-keyfile", "a"], "--ssl-certfile"),
        (["serve", "demo", "--root-path", "x/"], "/prefix"),
        (
            ["serve", "demo", "--limit-waiting", "-1"],
            "--limit-waiting -1 is out of range; give a whole number from 0 on",
        ),
        (["serve", "demo", "--limit-n", "0"], "--limit-n 0 is out of range; give a whole number from 1 on"),
        (
            ["serve", "demo", "--limit-body-seconds", "nan"],
            "--limit-body-seconds nan is out of range; give a number from 0.001 on",
        ),
        (
            ["serve", "demo", "--max-model-len", "1"],
            "--max-model-len: expected a whole number from 2 on, got '1'",
        ),
        (
            ["serve", "demo", "--num-blocks", "9", "--gpu-memory-utilization", "0.5"],
            "--num-blocks 9 and --gpu-memory-utilization 0.5 both size the pools; give one of them",
        ),
        (
            ["serve", "demo", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            "--max-num-batched-tokens 32 cannot hold one token of each of 64 sequences; raise it, or "
            "lower --max",
        ),
        (["serve", "demo", "--host", "192.0.2.1"], "cannot listen at --host 192.0.2.1 --port 8000 ("),
        (["serve", "demo", "--num-blocks", "0"], "--num-blocks: expected a whole number from 1 on, got '0'"),
        (["serve", "demo", "--gpu-memory-utilization", "9"], "expected a number from 0.001 to 1, got '9'"),
        (
            ["bench", "demo", "--num-prompts", "0"],
            "--num-prompts: expected a whole number from 1 on, got '0'",
        ),
        (["serve", "demo", "--api-key", " a"], "API key"),
        (["serve", "demo", "--prefix-cache-share", "key-0"], "KEY=SHARE"),
        (["serve", "demo", "--api-key", "a", "--prefix-cache-share", "key-1=2"], "expected one of key-0"),
        (
            ["serve", "demo", "--prefix-cache-share", "key-0=3"],
            "--prefix-cache-share key-0=3 divides the blocks between API keys and the server has none; give --api-key",
        ),
        (
            ["serve", "demo", "--api-key", "a", "--prefix-cache-share", "key-0=0"],
            "a number above 0, such as key-0=3; got 'key-0=0'",
        ),
        (
            [
                "serve",
                "demo",
                "--api-key",
                "a",
                "--prefix-cache-share",
                "key-0=1",
                "--prefix-cache-share",
                "key-0=2",
            ],
            "gives key-0 1 and 2; give one of them",
        ),
        (
            ["serve", "demo", "--api-key=a", "--prefix-cache-share", "key-0=3", "--no-enable-prefix-caching"],
            "--prefix-cache-share is about cached prefixes and --no-enable-prefix-caching caches none; leave one",
        ),
        (
            ["serve", "demo", "--share-prefixes", "--no-enable-prefix-caching"],
            "--share-prefixes is about cached prefixes and --no-enable-prefix-caching caches none; leave one",
        ),
        (
            ["serve", "demo", "--uds", "s", "--port", "8000"],
            "--uds s and --port 8000 are both the server's address",
        ),
        (
            ["serve", "demo", "--uds", "s", "--host", "::1"],
            "--uds s and --host ::1 are both the server's address",
        ),
        (["serve", "demo", "--uds", "s", "--allowed-host", "a.b"], "leave --allowed-host out"),
        (
            ["serve", "demo", "--ssl-keyfile-password", "p"],
            "--ssl-keyfile-password is for TLS; give --ssl-keyfile",
        ),
        (["serve", "demo", "--ssl-ca-certs", "c"], "--ssl-ca-certs is for TLS; give --ssl-keyfile"),
        (
            ["serve", "demo", "--dtype", "banana"],
            "--dtype banana is not a dtype of weights; give auto, float32",
        ),
        (["generate", "demo", "--dtype", "int8", "--prompt", "a"], "--dtype int8 is not a dtype of weights"),
        (
            ["serve", "demo", "--revision", "main"],
            "--revision main: demo is not a checkpoint on the Hub; leave the flag out",
        ),
        (
            ["serve", "/no/such/folder"],
            "there is no folder /no/such/folder; give that of a model, a name on the",
        ),
        (["info", "./no-such-folder"], "there is no folder ./no-such-folder; give"),
        (["info", "no-such-folder/config.json"], "there is no file no-such-folder/config.json; give that of"),
        (
            ["bench", "demo", "--out", "a.png"],
            "--out: a.png does not end with .svg, the format of the picture",
        ),
        (["serve", "demo", "--otlp-traces-endpoint", "grpc://a:4317"], OTLP_ERROR),
        (["serve", "demo", "--root-path", "/v1"], "give the part before /v1"),
        (["serve", "demo", "--root-path", "/v1/chat"], "give the part before /v1"),
        (["serve", "demo", "--allowed-origin", "https://a.b/"], "expected https://a.b: scheme"),
        (["serve", "demo", "--allowed-origin", "https://A.b:443"], "expected https://a.b: scheme"),
        (["serve", "demo", "--allowed-origin", "a.b"], "expected https://a.b: scheme"),
        (["serve", "demo", "--allowed-origin", "http://[::1"], "expected https://a.b: scheme"),
        (["serve", "demo", "--allowed-host", "foo:8000"], "without its port; give a name or an address"),
        (["serve", "demo", "--allowed-host", "https://a.b"], "--allowed-host https://a.b matches no Host"),
        (["serve", "demo", "--allowed-host", "::1"], "such as a.b or [::1]"),
        (["serve", "demo", "--uds", "/no/folder/s"], "there is no folder /no/folder; make it"),
        (["serve", "demo", "--uds", "s" * 108], "108 bytes and the path of a socket at most 107"),
        (["serve", "demo", "--uds", "/"], "is a folder; give the path of a file"),
        (["serve", "demo", "--ssl-keyfile=/no/k", "--ssl-certfile=/no/c"], "TLS by /no/k, /no/c cannot be"),
        (["serve", "demo", "--port=0", "--response-template", "{"], "--response-template is not JSON"),
        (
            ["serve", "demo", "--port=0", "--chat-template", "{{ broken"],
            "--chat-template is broken in line 1: ",
        ),
        (
            ["generate", "demo", "--prompt=a", "--temperature=-1"],
            "--temperature: expected a number from 0 on",
        ),
        (["generate", "demo", "--prompt=a", "--temperature=nan"], "from 0 on, got 'nan'"),
        (["generate", "demo", "--prompt=a", "--temperature=inf"], "from 0 on, got 'inf'"),
        (["generate", "demo", "--prompt=a", "--top-p=7"], "--top-p: expected a number from 0 to 1, got '7'"),
        (["generate", "demo", "--prompt=a", "--top-k=a"], "--top-k: expected a whole number from 0 on"),
        (["generate", "demo", "--prompt=a", "--max-tokens=0"], "expected a whole number from 1 on, got '0'"),
        (["generate", "demo", "--prompt=a", "--seed=1"], "--seed needs sampling; give --temp"),
        (["generate", "demo", "--prompt=a", "--top-p=0.5"], "--top-p needs sampling"),
        (["generate", "demo", "--prompt=a", "--stop="], "--stop: expected a text, got an empty one"),
        (["generate", "demo", "--prompt=\udcff"], "--prompt: expected UTF-8"),
        (
            ["generate", "demo", "--prompt=a", "--resume"],
            "--resume is for a file of answers; give --out FILE",
        ),
        (
            ["generate", "demo", "--prompt=a", "--out=/tmp/a"],
            "--out /tmp/a is for answers as lines; give --lines",
        ),
        (
            ["generate", "demo", "--lines", "--out=a", "--resume", "--overwrite"],
            "--overwrite replaces it; give one",
        ),
        (
            ["batch", "demo", "/no/in.jsonl", "out.jsonl"],
            "there is no file /no/in.jsonl; give one with a request",
        ),
        (["batch", "demo", "in.jsonl", "/no/folder/out"], "there is no folder /no/folder"),
        (["batch", "demo", "in.jsonl", "out", "-i", "a"], "-i is not supported: the files are positional"),
        (["run-batch", "demo"], "did you mean batch?"),
        (
            ["generate", "demo", "--prompt=a", "--device=foo"],
            "--device foo is not a device of this machine (",
        ),
        (["generate", "demo", "--prompt=a", "--device=cuda:99"], "--device cuda:99 is not a device of this"),
        (["generate", "demo", "--prompt=a", "--device-map=foo"], "--device-map foo is not a device of this"),
        (["bench", "demo", "--out", "/no/folder/a.svg"], "--out: /no/folder/a.svg: there is no folder"),
        (
            ["trace", "a.jsonl", "--html", "/no/folder/a.html"],
            "--html: /no/folder/a.html: there is no folder",
        ),
    ],
)
def test_errors_say_what_to_do(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    pytest.importorskip("fastapi")
    assert said in failing(capsys, *arguments)


def test_origins_and_hosts_that_match_are_taken() -> None:
    origins = ("https://a.b", "http://a.b:8080", "http://[::1]:3000", "chrome-extension://abc", "null", "*")
    hosts = ("a.b", "A.b", "192.0.2.1", "[::1]", "my_host")
    options = ServerOptions(allowed_origins=origins, allowed_hosts=hosts, root_path="/v12")
    assert options.allowed_origins == origins


def test_files_that_are_no_text_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "binary"
    absent = failing(capsys, "serve", "demo", "--api-key-file", str(file))
    assert f"--api-key-file {file} cannot be read: No such file or directory; give a file's path" in absent
    file.write_bytes(b"\xff\x00")
    assert f"--file {file} is not UTF-8 text" in failing(capsys, "generate", "demo", "--file", str(file))
    said = failing(capsys, "serve", "demo", "--api-key-file", str(file))
    assert f"--api-key-file {file} is not UTF-8 text" in said
    assert f"{file} is a file, not a socket" in failing(capsys, "serve", "demo", "--uds", str(file))


def test_a_page_is_not_written_over_its_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("record")
    (tmp_path / "link").symlink_to(file)
    said = failing(capsys, "trace", str(file), "--html", str(tmp_path / "link"))
    assert "is the trace itself; give the page another path" in said
    assert file.read_text() == "record"


def test_a_template_that_refuses_a_first_message_is_taken() -> None:
    refusing = "{{ raise_exception('tools alone') }}"
    assert chat_template_of(flags("--chat-template", refusing), demo.tokenizer()) == refusing


@pytest.mark.parametrize("name", parser()[1])
def test_the_help_of_a_command_has_an_example_of_its_flags(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    example = re.search(
        rf"hf-paged {name}\b.*", capsys.readouterr().out.partition("positional")[0].partition(":\n")[2]
    )
    assert example is not None
    flags = re.findall(r" (--[\w-]+)", example.string)
    assert set(flags) <= parser()[1][name]._option_string_actions.keys()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hf_paged {hf_paged.__version__}\n"


def test_flags_of_other_servers_are_no_flags_here() -> None:
    """Each has one advice, and flags that an advice names are there."""
    commands = parser()[1].values()
    known = {flag for each in commands for flag in each._option_string_actions}
    assert not ABSENT.keys() & parser()[1]["serve"]._option_string_actions.keys()
    listed = re.findall(r"^ .*$", TABLE, re.M)
    assert len(ABSENT) == len(" ".join(listed).split())
    named = {flag for advice in ABSENT.values() for flag in re.findall(r"--[a-z][\w-]+", advice)}
    assert named <= known


def test_a_flag_given_again_adds_to_what_it_has() -> None:
    given = flags(
        "--api-key", "a", "--api-key", "b", "--prefix-cache-share", "key-0=3", "--prefix-cache-share", "key-1=0.5",
        "--served-model-name", "x", "--served-model-name", "y", "--allowed-media-domains", "c", "--allowed-media-domains", "d",
    )  # fmt: skip
    assert cache_shares(given.prefix_cache_share, ["key-0", "key-1"]) == {"key-0": 3.0, "key-1": 0.5}
    options = server_options(given, "demo")
    assert options.names == ("x", "y")
    assert options.allowed_media_domains == ("c", "d")
    assert not flags().prefix_cache_share


def test_the_address_is_a_port_or_a_socket() -> None:
    options = server_options(flags(), "demo")
    assert (options.host, options.port, options.uds) == ("127.0.0.1", 8000, None)
    assert server_options(flags("--port", "0", "--host", "::1"), "demo").port == 0
    assert server_options(flags("--uds", "s"), "demo").uds == "s"


@pytest.mark.parametrize("kind", ["port", "uds"])
def test_an_address_that_is_taken_is_known_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.setattr(
        "hf_paged.serve.link.loading.Source.load_processor", lambda self: pytest.fail("too late")
    )
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX if kind == "uds" else socket.AF_INET) as taken:
        taken.bind(path if kind == "uds" else ("127.0.0.1", 0))
        taken.listen()
        address = path if kind == "uds" else str(taken.getsockname()[1])
        said = failing(capsys, "serve", "demo", f"--{kind}", address)
    assert f"--{kind} {address}" in said
    assert "give" in said


def test_an_interrupt_ends_the_process_while_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As KeyboardInterrupt it may be raised in a destructor, which ignores it."""
    pytest.importorskip("fastapi")
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def load(source: Any) -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        raise ValueError("no model")

    monkeypatch.setattr("hf_paged.serve.link.loading.Source.load", load)
    assert "no model" in failing(capsys, "serve", "demo", "--port", "0")
    assert seen == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is before


def test_sequences_longer_than_the_model_is_made_for_are_refused() -> None:
    source = source_of(flags())
    most = demo.model().config.max_position_embeddings
    said = (
        f"--max-model-len {most + 1} is beyond the {most} tokens that demo is made for; give at most {most}"
    )
    with pytest.raises(ValueError, match=said):
        engine_of(flags("--max-model-len", str(most + 1)), source, {}, {})
    engine_of(flags("--max-model-len", str(most), "--num-blocks", "64"), source, {}, {}).close()


def test_flags_become_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("three\n\nfour\n")
    monkeypatch.setenv("HF_PAGED_API_KEY", "two")
    given = flags(
        "--api-key", "first-key", "--api-key-file", str(keys), "--max-num-seqs", "7", "--limit-body-bytes", "99", "--limit-drain-seconds",
        "1.5", "--served-model-name", "a", "b", "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching",
        "--gpu-memory-utilization", "0.5", "--scheduling-policy", "priority", "--host", "0.0.0.0", "--enable-lora", "--max-loras", "3",
        "--lora-modules", "poet=a/b=c", '{"name": "pirate", "path": "d"}', "--allow-runtime-lora-updating",
        "--rank-timeout", "900", "--verify", "bytes",
    )  # fmt: skip
    options = server_options(given, "demo")
    assert options.api_keys == ("first-key", "two", "three", "four")
    assert options.names == ("a", "b")
    assert (options.limits.body_bytes, options.limits.drain_seconds) == (99, 1.5)
    assert not options.loopback
    assert "first-key" not in repr(options)
    engine = engine_options(given)
    assert engine["max_batch_sequences"] == 7
    assert engine["fuse_projections"]
    assert engine["rank_timeout"] == 900
    assert engine["max_adapters"] == 3
    assert engine["verify"] == "bytes"
    assert "max_adapters" not in engine_options(flags())
    states = engine_options(
        flags("--state-slots", "8", "--state-snapshots", "0", "--state-dtype", "bfloat16")
    )
    found = {name: value for name, value in states.items() if name.startswith("state_")}
    assert found == {
        "state_slots": 8, "state_snapshots": 0, "state_every": 512, "state_dtype": "bfloat16",
    }  # fmt: skip
    assert adapter_sources(given.lora_modules, options.names) == {"poet": "a/b=c", "pirate": "d"}
    assert options.allow_runtime_lora_updating
    assert engine["memory_fraction"] == 0.5
    assert (engine["graphs"], engine["prefix_caching"], engine["policy"]) == (False, False, "priority")
    assert server_options(flags(), "demo").loopback
    with pytest.raises(ValueError, match="contradict"):
        engine_options(flags("--enable-prefix-caching", "--no-enable-prefix-caching"))


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_weights_are_loaded_with_a_bar_in_a_terminal_alone(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    quiet: bool,
    shown: bool,
) -> None:
    """And never before an answer; whoever loads a model afterwards has what there was before."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    before = progress.is_progress_bar_enabled()
    Source("demo").load(quiet)
    assert ("Loading weights" in capsys.readouterr().err) == (shown and before)
    assert progress.is_progress_bar_enabled() == before


def test_a_reader_that_has_enough_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w", buffering=1) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["completion", "bash"]) == 1
        print("what the interpreter writes at its end goes nowhere")
    assert capsys.readouterr().err == ""


def test_the_self_test_shows_the_alarm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["info", "demo", "--self-test"]) == 0
    said = capsys.readouterr().out
    assert "CorruptedBlock: the bytes in block 0 of the full layers have changed" in said
    monkeypatch.setattr("hf_paged.engine.self_test.flip_a_byte", lambda *given, **more: None)
    with pytest.raises(RuntimeError, match="verify='bytes' has not found the byte that was flipped"):
        main(["info", "demo", "--self-test"])


def test_info_says_what_runs_on_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info", "demo"]) == 0
    said = capsys.readouterr().out
    assert "3 full in pages" in said
    assert "kernels='torch'" in said
    from transformers import MambaConfig, MistralConfig

    window = MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
        vocab_size=64, sliding_window=16, architectures=["MistralForCausalLM"],
    )  # fmt: skip
    window.save_pretrained(tmp_path / "window")
    assert main(["info", str(tmp_path / "window")]) == 0
    said = capsys.readouterr().out
    assert "MistralForCausalLM" in said
    assert "2 window of 16 tokens in pages" in said
    state = MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=64, architectures=["MambaForCausalLM"]
    )
    state.save_pretrained(tmp_path / "state")
    assert main(["info", str(tmp_path / "state")]) == 0
    said = capsys.readouterr().out
    assert ("2 states in slots" if NUMBERED else "2 in transformers' own tensors") in said
    assert ("0 bytes a token" if NUMBERED else "upgrade it; use generate()") in said
    from transformers import RwkvConfig

    own = RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, architectures=["RwkvForCausalLM"])
    own.save_pretrained(tmp_path / "own")
    assert main(["info", str(tmp_path / "own")]) == 0
    said = capsys.readouterr().out
    assert "on transformers' own cache: RwkvForCausalLM keeps a state of its own" in said
    assert "not served" in said


def test_info_takes_the_file_of_a_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that need weights name the folder instead."""
    demo.model().save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "config.json").rename(tmp_path / "llama" / "small.json")
    monkeypatch.chdir(tmp_path)
    for path in ("llama/small.json", "./llama/small.json", str(tmp_path / "llama" / "small.json")):
        assert main(["info", path]) == 0
        assert facts_of(capsys.readouterr().out)["model"].strip() == "LlamaForCausalLM"
    assert main(["generate", "llama/small.json", "--prompt", "a"]) == 1
    assert "llama/small.json is a file; give its folder, llama, which has" in capsys.readouterr().err


def facts_of(printed: str) -> dict[str, str]:
    """The lines that `info` prints, by subject."""
    lines = [line.split("  ", 1) for line in printed.splitlines() if "  " in line]
    return {name: value.strip() for name, value in lines}


def test_info_says_how_much_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a config alone, on a card of a size: what an engine would take, or why there would be none."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=64, max_position_embeddings=4096, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "llama")
    asked = ["info", str(tmp_path / "llama"), "--memory", "4GB", "--dtype", "bfloat16", "--block-size", "32"]
    assert main(asked) == 0
    said = facts_of(capsys.readouterr().out)
    assert said["free memory"] == "3.73 GiB of a CUDA device, before the weights"
    assert (
        said["weights"]
        == f"{(64 * 64 + 5 * 64 + 2 * (3 * 64 * 64 + 3 * 64 * 96) + 2 * 16) / 512:.3g} KiB in bfloat16"
    )
    assert said["keys and values"] == "256 bytes a token"  # of 2 layers, 2 heads of 16 numbers of 2 bytes
    assert said["pool"] == f"{256 * 129:,} blocks of 32 tokens, 258 MiB"
    assert said["room for"] == f"{256 * 129 * 32:,} tokens, 255 requests of 4,096"
    assert said["adapters"].startswith("16 at once")
    assert main([*asked, "--memory", "64KiB"]) == 0
    assert "not one request of 4,096 tokens fits" in facts_of(capsys.readouterr().out)["engine, serve"]
    assert main([*asked, "--device", "cpu", "--max-loras", "3", "--num-blocks", "70"]) == 0
    said = facts_of(capsys.readouterr().out)
    assert said["free memory"] == "3.73 GiB of a CPU device, before the weights"
    assert said["pool"].startswith("70 blocks")
    assert said["adapters"].startswith("3 at once")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path / "llama")
    assert main(asked) == 0
    assert facts_of(capsys.readouterr().out)["weights"].endswith("before they are quantized by bitsandbytes")
    families = {"falcon_h1": "528 state slots", "jetmoe": "not known without weights"}
    if not NUMBERED:  # its engine refuses recurrent states
        del families["falcon_h1"]
    for family, told in families.items():
        cls = config_class("causal", family)
        cls(**tiny(cls), architectures=[model_class_of("causal", cls).__name__]).save_pretrained(
            tmp_path / family
        )
        assert main(["info", str(tmp_path / family)]) == 0
        said = facts_of(capsys.readouterr().out)
        assert told in said.get("pools", said["keys and values"])
        if family == "falcon_h1":
            assert " of states a sequence" in said["keys and values"]
            assert said["layers"] == "2 full in pages and states in slots"
            whole = said["keys and values"]
            flags = ["--state-slots", "3", "--state-snapshots", "2", "--state-dtype", "bfloat16"]
            assert main(["info", str(tmp_path / family), *flags]) == 0
            said = facts_of(capsys.readouterr().out)
            assert "5 state slots" in said["pools"]
            assert said["keys and values"] != whole
        assert said["engine, serve"].startswith("served, if")


@pytest.mark.parametrize(
    ("said", "count"),
    [("80GiB", 80 * 2**30), ("24gb", 24 * 10**9), ("1.5 G", 15 * 10**8), ("512MiB", 2**29), ("4096", 4096)],
)
def test_sizes(said: str, count: int) -> None:
    assert size(said) == count


@pytest.mark.parametrize("said", ["", "much", "0GiB", "-1GB", "80XB", "1.2.3GB", "GiB"])
def test_what_is_no_size(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["info", "demo", f"--memory={said}"])
    assert f"expected a size like 80GiB or 24GB, got {said!r}" in capsys.readouterr().err


def test_the_page_names_every_flag_field_and_metric() -> None:
    pytest.importorskip("fastapi")
    from hf_paged.serve.http.metrics import CounterFamily, Metrics
    from hf_paged.serve.openai.protocol import (
        ChatRequest,
        CompletionRequest,
        DetokenizeRequest,
        LoadAdapterRequest,
        TokenizeChat,
        TokenizeText,
        UnloadAdapterRequest,
    )
    from hf_paged.serve.openai.responses import ResponsesRequest

    page = (ROOT / "docs" / "serving.md").read_text()
    flags = {flag for flag in parser()[1]["serve"]._option_string_actions if flag.startswith("--")}
    flags -= {"--help", "--enable-prefix-caching"}
    kinds = (
        ChatRequest, CompletionRequest, DetokenizeRequest, LoadAdapterRequest, TokenizeChat, TokenizeText, UnloadAdapterRequest,
        ResponsesRequest,
    )  # fmt: skip
    fields = {name for kind in kinds for name in kind.model_fields}
    families = [each for each in vars(Metrics("m")).values() if hasattr(each, "samples")]
    metrics = {f"{each.name}_total" if isinstance(each, CounterFamily) else each.name for each in families}
    for name in flags | fields:
        assert f"`{name}`" in page or f"`{name}." in page, name
    for name in metrics:
        assert f"`{name}" in page, name
    for line in page.splitlines():
        assert len(line) <= 150 or line.startswith("|"), line


def test_a_full_disk_is_said_where_it_can_be(tmp_path: Path, fresh_process: FreshProcess) -> None:
    """The log cannot be written at the start: why it ends is on the other stream, and the code is not 0."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    module = "import runpy; runpy.run_module('hf_paged', run_name='__main__')"
    ended = fresh_process.run(module, "serve", str(tmp_path / "none"), stderr="/dev/full")
    assert ended.code == 1
    assert "hf-paged serve: " in ended.stdout
    assert "No space left" in ended.stdout
