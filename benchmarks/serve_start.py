"""From the command `hf-paged serve demo` to its first answer, beside what the imports alone take.

    python benchmarks/serve_start.py --runs 5

imports: `import torch, transformers` in an interpreter of its own. ready: /health answers with 200. answer: a
completion of 20 tokens has come. Each row is the median of the runs, which take turns, and their extremes.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import httpx
from shapes import line, where

ASKED = {"prompt": "The fox", "max_tokens": 20, "temperature": 0}


def imports() -> float:
    """Seconds of an interpreter that imports both libraries."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
    return time.perf_counter() - begun


def serve() -> dict[str, float]:
    """Seconds from the command to a server that is ready, and to the end of its first answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.perf_counter()
    command = [sys.executable, "-m", "hf_paged", "serve", "demo", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not _ready(client):
                if process.poll() is not None:
                    raise RuntimeError(f"the server has ended with {process.returncode} before it was ready")
                time.sleep(0.02)
            ready = time.perf_counter() - begun
            client.post("/v1/completions", json=ASKED).raise_for_status()
            return {"ready": ready, "answer": time.perf_counter() - begun}
    finally:
        process.terminate()
        process.wait(60)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.runs):
        found["imports"].append(imports())
        for name, seconds in serve().items():
            found[name].append(seconds)
    print(line(where("cpu")))
    print("\n| until | median, s | least | most |\n|---|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
