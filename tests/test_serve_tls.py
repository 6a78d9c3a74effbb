"""TLS by the flags that uvicorn has, with a certificate made here."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx
from serving import serving

from hf_paged.serve.http.options import ServerOptions


def test_files_that_are_no_pem_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_text("no key")
    with pytest.raises(ValueError, match=r"TLS by .*key.pem.* cannot be set up"):
        ServerOptions(ssl_keyfile=str(file), ssl_certfile=str(file))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with serving(ssl_keyfile=str(key), ssl_certfile=str(certificate)) as served:
        assert served.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{served.url}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")
    locked = tmp_path / "locked.pem"
    command = f"openssl pkey -in {key} -aes256 -passout pass:secret -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    files = {"ssl_keyfile": str(locked), "ssl_certfile": str(certificate)}
    ServerOptions(**files, ssl_keyfile_password="secret")
    with pytest.raises(ValueError, match="an encrypted key needs --ssl-keyfile-password"):
        ServerOptions(**files)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_clients_need_a_certificate_of_the_authorities_that_are_given(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    files = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate), "ssl_ca_certs": str(certificate)}
    with serving(**files) as served:
        known = ssl.create_default_context(cafile=str(certificate))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{served.url}/v1/models", verify=known)
        known.load_cert_chain(certificate, key)
        assert httpx.get(f"{served.url}/v1/models", verify=known).status_code == 200
