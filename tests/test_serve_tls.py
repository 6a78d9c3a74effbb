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
