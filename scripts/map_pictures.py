"""Take the pictures of the map in docs/: a server of the demo model under a mixed load, in a headless Chromium.

python scripts/map_pictures.py
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import httpx  # noqa: E402
from browser import Browser  # noqa: E402
from PIL import Image  # noqa: E402
from serving import serving  # noqa: E402

PREFIX = (
    "Once upon a time there was a fox who lived near the river, and an owl who lived in the old oak tree. "
    * 3
)
ENDS = ("The fox said", "The owl said", "One day", "In the winter", "The bear came to")
WORDS = [
    "The",
    "fox",
    "owl",
    "bear",
    "river",
    "moon",
    "lamp",
    "old",
    "said",
    "went",
    "saw",
    "a",
    "door",
    "song",
]
STATE = "hfPagedMap.state"
GROUP = (
    f"[...{STATE}.requests.values()].filter((each) => each.width > 1 && each.state === 'running'"
    " && each.sequences.size === each.width && [...each.sequences.values()].some((one) => one.computed > each.prompt + 64 && one.computed < each.most - 60))"
)


def load(url: str, clients: int, until: threading.Event) -> list[threading.Thread]:
    """Clients that ask one request after the other: plain ones, common prefixes, beams and samples."""

    def ask(i: int) -> None:
        rng = random.Random(i)
        with httpx.Client(base_url=url, timeout=120) as client:
            while not until.is_set():
                kind = rng.choice(["plain", "common", "common", "beams", "samples"])
                prompt = (
                    " ".join(rng.choices(WORDS, k=rng.randint(4, 60)))
                    if kind == "plain"
                    else PREFIX + rng.choice(ENDS)
                )
                body: dict[str, Any] = {
                    "prompt": prompt,
                    "max_tokens": rng.randint(80, 420),
                    "ignore_eos": True,
                    "temperature": 1,
                }
                body |= {
                    "beams": {"use_beam_search": True, "n": 4, "temperature": 0},
                    "samples": {"n": 4},
                }.get(kind, {})
                client.post("/v1/completions", json={"stream": kind != "beams", **body})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    return threads


def picture(theme: str, clients: int, wait: float, moment: str, hold: str, engine: dict[str, Any]) -> None:
    """A picture of the first moment, after a while, at which an expression is true."""
    end = threading.Event()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, serving(engine) as served:
        with Browser(Path(folder), 1400, 960) as browser:
            browser.theme(theme)
            browser.open(served.url)
            browser.until("document.querySelector('#status').textContent === 'live'")
            threads = load(served.url, clients, end)
            time.sleep(wait)
            # In one go: what is true now is not a moment later. A map that is held shows it as long as it takes.
            browser.until(
                f"{moment} && (hfPagedMap.select({GROUP}[0].number), {hold} && document.querySelector('#hold').click(), true)"
            )
            browser.until("document.querySelector('#detail-text').textContent.length > 9", 5)
            path = ROOT / "docs" / f"map-{theme}.png"
            browser.screenshot(path)
            Image.open(path).convert("RGB").quantize(255).save(path, optimize=True)
            print(path, path.stat().st_size, "bytes", browser.errors)
        end.set()
        for thread in threads:
            thread.join()


def main() -> None:
    mixed = {"block_size": 16, "max_batch_sequences": 32, "preemption": "swap"}
    picture("light", 10, 4, f"{GROUP}.length", "false", {**mixed, "num_blocks": 560})
    on_host = f"{GROUP}.length && {STATE}.pools[0].counts[4] > 12"
    picture("dark", 20, 5, on_host, "true", {**mixed, "num_blocks": 230})


main()
