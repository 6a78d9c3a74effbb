"""What the live map costs: the engine's thread for a record, the event loop for the events of each tenant.

    OMP_NUM_THREADS=1 python benchmarks/block_map.py [--sequences 256] [--blocks 20000] [--seconds 10]

The demo model decodes as many sequences at once, in turns unwatched and watched by an admin key (who sees all) and by
two API keys (who each see half). Figures are processor time of a thread, so other work on the machine is not in them.

record        milliseconds of the engine's thread for one record; share: of that thread's whole time
event         milliseconds of the event loop for one record and one tenant; bytes: of one event
tokens        a second, unwatched and watched; both vary with the machine's other work
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import threading
import time
from collections import Counter
from statistics import median
from typing import Any

import torch

from hf_paged import Engine, demo
from hf_paged.serve.http.keys import Tenant
from hf_paged.serve.http.metrics import Metrics
from hf_paged.serve.link.engine_client import EngineClient
from hf_paged.serve.link.engine_host import EngineHost
from hf_paged.serve.map.live import LiveMap
from hf_paged.serve.map.map_view import Owner

TENANTS = (Tenant("admin", None, sees_all=True), Tenant("red", None), Tenant("blue", None))


async def load(engine: Engine, live: LiveMap, sequences: int, until: float) -> None:
    """Keep so many sequences running."""

    rng = random.Random(0)

    async def one(i: int) -> None:
        while time.monotonic() < until:
            ids = [3 + i % 50, 5, 7] * 20
            new = rng.randint(20, 400)
            handle = engine.submit(ids, max_new_tokens=new, min_new_tokens=new, do_sample=True, seed=i)
            assert handle.number is not None
            live.owners.add(handle.number, Owner("red" if i % 2 else "blue", str(i), ()))
            await handle
            live.owners.discard([handle.number])

    await asyncio.gather(*(one(i) for i in range(sequences)))


async def rate(engine: Engine, seconds: float) -> float:
    """Tokens a second from now on."""
    tokens = (await asyncio.to_thread(engine.stats))["tokens"]
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return ((await asyncio.to_thread(engine.stats))["tokens"] - tokens) / (time.monotonic() - begin)


async def read(live: LiveMap, tenant: Tenant, seen: Counter[str]) -> None:
    viewer = live.enter(tenant)
    try:
        async for chunk in live.events(viewer):
            seen["events"] += chunk.count(b'{"at"')
            seen["bytes"] += len(chunk)
    finally:
        live.close(viewer)


async def run(options: Any) -> None:
    engine = Engine(
        demo.model(), block_size=16, num_blocks=options.blocks, max_batch_sequences=options.sequences
    )
    ours, theirs = socket.socketpair()
    host = threading.Thread(target=EngineHost(engine, demo.tokenizer(), theirs).run)
    host.start()
    client = EngineClient(ours)
    await client.open()
    live = LiveMap(client, Metrics("demo"), 8)
    recorders: list[Any] = []
    watch = engine.watch

    def noted(*arguments: Any) -> Any:
        recorders.append(watch(*arguments))
        return recorders[-1]

    engine.watch = noted  # type: ignore[method-assign]
    until = time.monotonic() + 4 + 2 * options.rounds * (options.seconds + 1)
    loading = asyncio.create_task(load(engine, live, options.sequences, until))
    await asyncio.sleep(4)
    seen: Counter[str] = Counter()
    plain: list[float] = []
    watched: list[float] = []
    for i in range(2 * options.rounds):
        if i % 4 in (0, 3):  # neither comes first more often
            plain.append(await rate(engine, options.seconds))
            continue
        readers = [asyncio.create_task(read(live, tenant, seen)) for tenant in TENANTS]
        await asyncio.sleep(1)
        watched.append(await rate(engine, options.seconds))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    seconds = options.rounds * (options.seconds + 1)
    records = seen["events"] / len(TENANTS)
    record = sum(each.seconds for each in recorders)
    print(f"{options.sequences} sequences, {options.blocks} blocks, {records:.0f} records in {seconds:.0f} s")
    print(f"record   {1000 * record / records:.2f} ms, share {100 * record / seconds:.2f} %")
    print(
        f"event    {1000 * live.seconds / seen['events']:.2f} ms a tenant, share of all three {100 * live.seconds / seconds:.2f} %, "
        f"{seen['bytes'] / seen['events']:,.0f} bytes"
    )
    print(f"tokens   {median(plain):,.0f} unwatched, {median(watched):,.0f} watched")
    await loading
    await live.stop()
    client.close()
    await asyncio.to_thread(host.join)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round, watched and unwatched")
    parser.add_argument("--rounds", type=int, default=4)
    torch.set_num_threads(1)
    asyncio.run(run(parser.parse_args()))


main()
