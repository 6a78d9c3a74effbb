"""Try hf_paged.ray on this machine, with Ray live and replicas of the demo model on CPUs.

    pip install -e '.[ray]'; python scripts/try_ray.py routing kill scale batches --rows 100000

routing: the share of prompt tokens that a multi-turn trace finds cached, by router. kill: requests lost when one of
four replicas is killed. scale: seconds from the load to more replicas that run, and back. batches: rows of a data set
while a worker is killed midway. The exit code is 1 if a request or a row is lost or comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])

import ray  # noqa: E402  # its processes inherit the path
from ray import serve  # noqa: E402
from ray_serving import DEMO, Application, free_port, kill_worker, local_ray, together, until  # noqa: E402

from hf_paged import demo  # noqa: E402
from hf_paged.ray import map_batches  # noqa: E402

REPLICAS = 4
ROUTERS = {
    "prefix": None,
    "power of two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "random": "ray_routers:RandomRouter",
    "round-robin": "ray_routers:RoundRobinRouter",
}
BLOCK = 16
WORDS = (5, 840)
"""Ids of the demo model that stand for words."""


class Trace:
    """Conversations in turns: a system prompt that several have in common, questions, answers.

    Which conversation speaks next is drawn, so others come in between; the same for all routers.
    """

    def __init__(self, conversations: int, turns: int, systems: int, seed: int = 0) -> None:
        draw = random.Random(seed)
        prompts = [self._words(draw, 96) for _ in range(systems)]
        self.histories = [[2, *draw.choice(prompts)] for _ in range(conversations)]
        self.questions = [
            [self._words(draw, draw.randint(16, 64)) for _ in range(turns)] for _ in range(conversations)
        ]
        self.order = [i for i in range(conversations) for _ in range(turns)]
        draw.shuffle(self.order)
        self.answers = [draw.randint(16, 48) for _ in self.order]

    @staticmethod
    def _words(draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(*WORDS) for _ in range(count)]


def play(application: Application, trace: Trace, clients: int) -> dict[str, Any]:
    """Send a trace with so many clients: the share of its prompts that was cached and the most that one endless
    cache would find, and how long it took.
    """
    locks = [threading.Lock() for _ in trace.histories]
    counts: Counter[str] = Counter()
    seconds: list[float] = []
    seen: set[tuple[int, ...]] = set()
    given_turns = len(trace.questions[0])

    def turn(place: int) -> None:
        i = trace.order[place]
        with locks[i]:
            history = trace.histories[i]
            beginning = tuple(history)
            if beginning in seen or len(trace.questions[i]) < given_turns:
                counts["known"] += len(history)
            seen.add(beginning)
            history += trace.questions[i].pop()
            begun = time.monotonic()
            response = application.complete(
                history, trace.answers[place], return_token_ids=True, ignore_eos=True
            )
            seconds.append(time.monotonic() - begun)
            assert response.status_code == 200, response.text
            body = response.json()
            history += body["choices"][0]["token_ids"]
            counts["prompt"] += body["usage"]["prompt_tokens"]
            counts["cached"] += body["usage"]["prompt_tokens_details"]["cached_tokens"]

    begun = time.monotonic()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(turn, range(len(trace.order))))
    seconds.sort()
    return {
        "requests": len(trace.order),
        "prompt_tokens": counts["prompt"],
        "hit_rate": round(counts["cached"] / counts["prompt"], 3),
        "most": round(counts["known"] / counts["prompt"], 3),
        "seconds": round(time.monotonic() - begun, 1),
        "p50": round(seconds[len(seconds) // 2], 3),
    }


def try_routing(application: Application, given: argparse.Namespace) -> bool:
    """A trace whose conversations fit into all replicas' pools together, and not into one."""
    for name, path in ROUTERS.items():
        other = (
            {}
            if path is None
            else {"request_router_config": {"request_router_class": path.replace(":", ".")}}
        )
        args = {**DEMO, "block-size": BLOCK, "num-blocks": given.blocks}
        application.deploy(args, num_replicas=REPLICAS, autoscaling_config=None, **other)
        until(lambda: application.states == {"RUNNING": REPLICAS})
        trace = Trace(given.conversations, given.turns, systems=4)
        report("routing", router=name, blocks=given.blocks, **play(application, trace, given.clients))
    return True


def try_kill(application: Application, given: argparse.Namespace) -> bool:
    """Whole answers and streams on four replicas, one of which is killed when all streams have begun."""
    application.deploy(DEMO, num_replicas=REPLICAS, autoscaling_config=None)
    until(lambda: application.states == {"RUNNING": REPLICAS})
    whole = given.clients
    streams = given.clients // 2
    begun = threading.Semaphore(0)
    before = application.actors()
    killed: list[float] = []
    prompts = demo.prompts()

    def ask(i: int) -> Any:
        prompt = f"{prompts[i % 8]} {i}"
        if i < whole:
            return application.complete(prompt, 300, ignore_eos=True)
        if i < whole + streams:
            return application.stream(prompt, 300, begun.release)
        for _ in range(streams):
            begun.acquire()
        application.kill(before[0])
        killed.append(time.monotonic())
        return None

    found = together(whole + streams + 1, ask)
    lost = sum(
        each.status_code != 200 or each.json()["usage"]["completion_tokens"] != 300 for each in found[:whole]
    )
    errors = [events[-2].get("error", {}).get("code") for events in found[whole : whole + streams]]
    cut = sum(each == "replica_died" for each in errors)
    unclear = sum(each not in (None, "replica_died") for each in errors)
    until(lambda: len({*application.actors()} - {before[0]}) == REPLICAS)
    until(lambda: application.states == {"RUNNING": REPLICAS})
    report(
        "kill", retriable=whole, lost=lost, streams=streams, cut_with_an_error=cut, cut_without=unclear,
        seconds_to_replace=round(time.monotonic() - killed[0], 1),
    )  # fmt: skip
    return not lost and not unclear


def try_scale(application: Application, given: argparse.Namespace) -> bool:
    """From one replica to what a load needs, and back when it is over."""
    policy = {
        "policy_function": "hf_paged.ray.autoscaling:FuturePeakPolicy",
        "policy_kwargs": {"target": 0.8},
    }
    scaling = {
        "min_replicas": 1, "max_replicas": REPLICAS, "upscale_delay_s": 2, "downscale_delay_s": 5,
        "look_back_period_s": 11, "policy": policy,
    }  # fmt: skip
    application.deploy({**DEMO, "num-blocks": 400}, autoscaling_config=scaling)
    until(lambda: application.states == {"RUNNING": 1})
    over = threading.Event()
    failed: list[str] = []

    def load(i: int) -> None:
        while not over.is_set():
            response = application.complete(f"The old bear {i}", 800, ignore_eos=True)
            if response.status_code != 200:
                failed.append(response.text)

    # Each needs 800 of a pool's 3,200 slots at its peak, and half of that on the way: 24 more than three pools.
    with ThreadPoolExecutor(24) as clients:
        for i in range(24):
            clients.submit(load, i)
        try:
            decided = until(lambda: len(application.actors()) == REPLICAS)
            running = decided + until(lambda: application.states == {"RUNNING": REPLICAS})
        finally:
            over.set()
    back = until(lambda: application.states == {"RUNNING": 1})
    report(
        "scale", replicas=f"1 to {REPLICAS} to 1", decided=round(decided, 1), running=round(running, 1),
        back=round(back, 1), failed=len(failed),
    )  # fmt: skip
    return not failed


def try_batches(application: Application, given: argparse.Namespace) -> bool:
    """Rows with a tiny answer each; one of two workers is killed at a third of them."""
    serve.delete("hf-paged")
    prompts = demo.prompts()
    data = ray.data.range(given.rows, override_num_blocks=16).map(
        lambda row: {"id": row["id"], "prompt": prompts[row["id"] % 8]}
    )
    with tempfile.TemporaryDirectory() as folder:
        answers = map_batches(
            data, "demo", checkpoint=folder, key="id", concurrency=2, num_cpus=1, batch_size=256,
            engine={"num_blocks": 2000, "max_batch_sequences": 256}, max_new_tokens=2, do_sample=False,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as aside:
            killed = aside.submit(kill_worker, "MapWorker", Path(folder), given.rows // 256 // 3)
            begun = time.monotonic()
            rows = answers.take_all()
            seconds = time.monotonic() - begun
            assert killed.result()
        lines = [line for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]
    ids = Counter(row["id"] for row in rows)
    texts: dict[str, set[Any]] = {}
    for row in rows:
        texts.setdefault(row["prompt"], set()).add(row["generated_text"])
    twice = sum(count - 1 for count in ids.values())
    report(
        "batches", rows=given.rows, missing=given.rows - len(ids), twice=twice,
        errors=sum(row["error"] is not None for row in rows), texts_by_prompt=max(map(len, texts.values())),
        kept_twice=len(lines) - len({json.loads(line)[0] for line in lines}), seconds=round(seconds, 1),
    )  # fmt: skip
    return len(ids) == given.rows and not twice


def report(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


TRIALS = {"routing": try_routing, "kill": try_kill, "scale": try_scale, "batches": try_batches}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=", ".join(TRIALS) + "; all")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=600, help="of each replica's pool, for routing")
    given = parser.parse_args()
    with local_ray(cpus=2 * REPLICAS):
        port = free_port()
        serve.start(http_options={"port": port})
        application = Application(port)
        right = [TRIALS[name](application, given) for name in given.trials or TRIALS]
        return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
