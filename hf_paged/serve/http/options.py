"""An operator's choices about a server: checked once, passed down frozen."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from hf_paged_cli.limits import ServerLimits

HOST = re.compile(r"[^\s:/*@]+|\[[0-9a-fA-F:.]+\]")
"""A name or an address as a Host header has it, less its port."""
PORTS = {"http": 80, "https": 443}
"""Ports that browsers leave out of an origin."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server beside its engine's.

    names: what clients may call the model; the first one is shown. api_keys: without any the server is open.
    admin_api_keys: further keys, which see the requests of all on the map. share_prefixes: whether keys share
    cached prefixes; else each key has a salt of its own. allowed_hosts: values of the Host header; empty for
    loopback names on a loopback address, and any elsewhere. allowed_origins: pages of other origins whose
    scripts may call the server. allowed_media_domains: hosts from which images are fetched; none by default.
    max_model_len: the longest sequence, at most what the engine has room for.
    vllm_metric_names: serve the metrics under vLLM's names, too. allow_runtime_lora_updating: let every key
    load and unload adapters; without it an admin key alone may. dev: have the routes for training loops,
    which change weights and read files of this machine.
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
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    share_prefixes: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    max_model_len: int | None = None
    vllm_metric_names: bool = False
    otlp_traces_endpoint: str | None = None
    allow_runtime_lora_updating: bool = False
    dev: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("a served model needs a name; give --served-model-name")
        keys = (*self.api_keys, *self.admin_api_keys)
        if any(len(key) < 1 or not key.isascii() or key != key.strip() for key in keys):
            raise ValueError("an API key is ASCII text without blanks around it; give another one")
        if not set(self.api_keys).isdisjoint(self.admin_api_keys):
            raise ValueError("a key is given as --api-key and as --admin-api-key; give two different ones")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(
                f"--root-path {self.root_path!r} must look like '/prefix': a slash before, none behind"
            )
        if f"{self.root_path}/".startswith("/v1/"):
            raise ValueError(
                f"--root-path {self.root_path} begins as the server's own paths do, such as /v1/models; give "
                "the part before /v1, or leave it out"
            )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("TLS needs both --ssl-keyfile and --ssl-certfile; give the other one, too")
        if not self.ssl_certfile and (self.ssl_keyfile_password or self.ssl_ca_certs):
            flag = "--ssl-keyfile-password" if self.ssl_keyfile_password else "--ssl-ca-certs"
            raise ValueError(
                f"{flag} is for TLS; give --ssl-keyfile and --ssl-certfile, too, or leave it out"
            )
        if self.ssl_certfile:
            self._check_tls(self.ssl_certfile)
        self._check_headers()
        if self.uds is not None and self.allowed_hosts:
            raise ValueError(
                f"--allowed-host {self.allowed_hosts[0]} beside --uds: no Host header is checked on a Unix "
                "socket, which only its user and group reach; leave --allowed-host out"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint {endpoint} is not a URL; spans are sent in OTLP over HTTP, so give "
                "one such as http://127.0.0.1:4318/v1/traces"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"--max-model-len {self.max_model_len} leaves no room for an answer; give 2 or more"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port {self.port} is not a port; give one from 0 to 65535")

    def _check_headers(self) -> None:
        """Check that hosts and origins are such as headers have."""
        for host in self.allowed_hosts:
            if not HOST.fullmatch(host):
                raise ValueError(
                    f"--allowed-host {host} matches no Host header, which is compared without its port; give "
                    "a name or an address such as a.b or [::1]"
                )
        for origin in self.allowed_origins:
            if origin not in ("*", "null", _origin(origin)):
                raise ValueError(
                    f"--allowed-origin {origin} matches no Origin header; expected {_origin(origin)}: "
                    "scheme, host, and a port other than the scheme's, in lower case, or * for any origin"
                )

    def _check_tls(self, certfile: str) -> None:
        """Load the files as the server will, which starts later."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certfile, self.ssl_keyfile, lambda: self.ssl_keyfile_password or "")
            if self.ssl_ca_certs:
                context.load_verify_locations(self.ssl_ca_certs)
        except OSError as error:
            files = [each for each in (self.ssl_keyfile, certfile, self.ssl_ca_certs) if each]
            raise ValueError(
                f"TLS by {', '.join(files)} cannot be set up ({error}); --ssl-keyfile, --ssl-certfile and "
                "--ssl-ca-certs are PEM files, and an encrypted key needs --ssl-keyfile-password"
            ) from error

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _origin(given: str) -> str:
    """An origin as browsers send it; an example for what is none."""
    try:
        parts = urlsplit(given.lower())
        port = parts.port
    except ValueError:
        return "https://a.b"
    name = parts.hostname
    if not parts.scheme or not name:
        return "https://a.b"
    host = f"[{name}]" if ":" in name else name
    return f"{parts.scheme}://{host}" + ("" if port in (None, PORTS.get(parts.scheme)) else f":{port}")
