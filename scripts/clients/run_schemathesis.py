"""schemathesis, a fuzzer that others wrote, against a server's own /openapi.json: no 5xx, no status, content type or
body that is not described there, no wrong body that is taken, no path without its key.

python -m venv /tmp/schemathesis && /tmp/schemathesis/bin/pip install schemathesis
python scripts/clients/run_schemathesis.py --schemathesis /tmp/schemathesis/bin/schemathesis [--examples 100] [--seed 0]

It starts a server of the demo model with two keys, so schemathesis needs an environment of its own only. The exit code
is that of schemathesis, or 1 if the server does not answer afterwards.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_serve import start

KEY = "an-admin-key"
CONFIG = """\
[checks.positive_data_acceptance]
# What a schema cannot say: ids of the vocabulary, lengths that fit, fields that exclude each other.
expected-statuses = [200, 400, 404, 413]
"""
ENDLESS = "/map"
"""A stream that ends with the server."""
CHANGING = ["/pause", "/resume", "/sleep", "/wake_up"]
"""Routes of --dev after which others wait."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--examples", type=int, default=100, help="requests for each route")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keys = ["--admin-api-key", KEY, "--api-key", "another-key"]
    process, port = start([*keys, "--dev", "--max-model-len", "64"])  # answers without a limit are short
    url = f"http://127.0.0.1:{port}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "schemathesis.toml")
            config.write_text(CONFIG)
            arguments = [options.schemathesis, "--config-file", str(config), "run", f"{url}/openapi.json"]
            arguments += ["--header", f"Authorization: Bearer {KEY}", "--request-timeout", "60"]
            arguments += ["--max-examples", str(options.examples), "--seed", str(options.seed)]
            for path in [ENDLESS, *CHANGING]:
                arguments += ["--exclude-path", path]
            code = subprocess.run([*arguments, "--continue-on-failure"], cwd=folder, check=False).returncode
        health = httpx.get(f"{url}/health", timeout=60).status_code
        print(f"/health afterwards: {health}")
        return code or int(health != 200)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


if __name__ == "__main__":
    sys.exit(main())
