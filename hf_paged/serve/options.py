"""What an operator may choose about a server: checked once, passed down frozen."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields

MIB = 2**20


@dataclass(frozen=True)
class ServerLimits:
    """What one request and one server may take; every limit has a default and a flag.

    body_bytes: of a request's body. prompts: in one request. n: answers to a prompt; the engine's sequence
    budget bounds it, too. stop: stop strings of a request. stop_chars: characters of one. logprobs:
    alternatives beside a token. logit_bias: tokens with a bias. chars_per_token: a text of more characters
    than this times the longest sequence is refused before it is tokenized.
    waiting: engine requests beyond those that can run; more are answered with 429. connections: open ones.
    request_seconds: from arrival to the last token. body_seconds: until a body is complete. write_seconds:
    that a client may leave a full connection unread. drain_seconds: from SIGTERM to the end of all answers.
    """

    body_bytes: int = 8 * MIB
    prompts: int = 128
    n: int = 128
    stop: int = 16
    stop_chars: int = 256
    logprobs: int = 20
    logit_bias: int = 1024
    chars_per_token: int = 32
    waiting: int = 1024
    connections: int = 4096
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("waiting", "logprobs", "drain_seconds") else 1e-3
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**53:
                raise ValueError(f"limit {each.name}={value!r} is not a number from {least} on")


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server beside its engine's.

    names: what clients may call the model; the first one is shown. api_keys: without any the server is open.
    share_prefixes: whether keys share cached prefixes; else each key has a salt of its own. allowed_hosts:
    values of the Host header; empty for loopback names on a loopback address, and any elsewhere.
    allowed_origins: pages of other origins whose scripts may call the server. max_model_len: the longest
    sequence, at most what the engine has room for. vllm_metric_names: serve the metrics under vLLM's names,
    too.
    """

    names: tuple[str, ...] = ("model",)
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    share_prefixes: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_model_len: int | None = None
    vllm_metric_names: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("a served model needs a name; give --served-model-name")
        if any(len(key) < 1 or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ValueError("an API key is ASCII text without blanks around it; give another one")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(
                f"root_path={self.root_path!r} must look like '/prefix': a slash before, none behind"
            )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("TLS needs both --ssl-keyfile and --ssl-certfile; give the other one, too")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len={self.max_model_len} leaves no room for an answer; give 2 or more"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port} is not a port; give one from 0 to 65535")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
